"""The result of `torchfmri.advise`: the arrangements that were tried, and their effect.

`advice_run` fills it. `Advice` and `Option` are public: attributes and `to_dict` must stay, the
table may be changed freely. An arrangement is on the front if no other one is at least as good in
time and memory and better in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchfmri._text import Column, Grid, bytes_text, change_text, seconds_text
from torchfmri.exceptions import InspectionError


@dataclass(frozen=True)
class Option:
    """The measured time, memory and gradient deviation of one arrangement.

    Attributes:
        name: The names of the techniques, joined by `+`; `"plain"` is the unchanged model.
        techniques: The names one by one.
        seconds: Seconds of a training step: the median ratio to the plain step, times its seconds.
        spread: Half the range of the middle half of the rounds, in seconds.
        peak_bytes: The most bytes alive in a step: parameters, buffers, data, gradients, optimizer
            state and everything computed; see `Cost.peak_bytes`.
        gradient_deviation: |g - g plain| / |g plain| over all parameters together.
        loss_deviation: The relative deviation of the loss.
        on_front: Whether no other arrangement is both faster and lighter.

    Examples:
        >>> option = Option("SDPA", ("SDPA",), 0.012, 0.001, 2**20, 1e-7, 0.0, True)
        >>> option.peak_bytes
        1048576
    """

    name: str
    techniques: tuple[str, ...]
    seconds: float
    spread: float
    peak_bytes: int
    gradient_deviation: float
    loss_deviation: float
    on_front: bool = False


@dataclass(frozen=True)
class Advice:
    """The result of `advise`: the arrangements that were tried, and their effect.

    `advice["checkpoint"]` is an `Option`. The plain model comes first. Every option was really run.

    Attributes:
        model: The class of the model.
        device: The device it ran on.
        options: Name -> the measured `Option`.
        obstacles: Technique -> why it does not apply.
        failures: Arrangement -> the error it ended with.
        noise: The gradient's deviation between two plain runs with the same random numbers.
        randomness: The same with other random numbers (dropout); 0 for a model without any.
        notes: What the reader should know.

    Examples:
        >>> import torch, torchfmri
        >>> from torch import nn
        >>> block = lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU())
        >>> model = nn.Sequential(block(), block(), block())
        >>> advice = torchfmri.advise(model, torch.randn(256, 32), loss="sum", rounds=1)
        >>> advice["checkpoint"].peak_bytes < advice["plain"].peak_bytes
        True
        >>> advice.obstacles["channels last"]
        'no 2-d convolutions'
    """

    model: str
    device: str
    options: dict[str, Option]
    obstacles: dict[str, str]
    failures: dict[str, str]
    noise: float
    randomness: float
    notes: tuple[str, ...] = ()

    @property
    def front(self) -> list[Option]:
        """The arrangements that no other beats in both time and memory, fastest first."""
        chosen = [option for option in self.options.values() if option.on_front]
        return sorted(chosen, key=lambda option: option.seconds)

    def __getitem__(self, name: str) -> Option:
        if name not in self.options:
            reason = self.obstacles.get(name) or self.failures.get(name)
            raise InspectionError(
                f"{name!r} was not measured: {reason or 'there is no such technique'}. Measured: "
                f"{', '.join(map(repr, self.options))}."
            )
        return self.options[name]

    def __contains__(self, name: object) -> bool:
        return name in self.options

    def __iter__(self) -> Iterator[str]:
        return iter(self.options)

    def __len__(self) -> int:
        return len(self.options)

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return self._grid().html()

    def table(self, *, width: int | None = None) -> str:
        """Return a text with one line per arrangement, and with what did not apply or run."""
        return self._grid().text(width)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {
            **vars(self),
            "options": [{**vars(option)} for option in self.options.values()],
            "front": [option.name for option in self.front],
            "notes": list(self.notes),
        }

    def _grid(self) -> Grid:
        options = list(self.options.values())
        plain = options[0]
        peaks, seconds = [each.peak_bytes for each in options], [each.seconds for each in options]
        columns = [
            Column("time", [seconds_text(each) for each in seconds], 8),
            Column("", [change_text(each, plain.seconds) for each in seconds], 10),
            Column("±", [f"{100 * each.spread / plain.seconds:.0f} %" for each in options], 5),
            Column("peak", [bytes_text(each) for each in peaks], 8),
            Column("", [change_text(each, plain.peak_bytes) for each in peaks], 10),
            Column("gradient off", [f"{each.gradient_deviation:.1e}" for each in options], 7),
            Column("loss off", [f"{each.loss_deviation:.1e}" for each in options], 1),
            Column("front", ["*" if each.on_front else "" for each in options], 6, right=False),
        ]
        notes = [
            *(f"{name} does not apply: {reason}" for name, reason in self.obstacles.items()),
            *(f"{name} could not run: {reason}" for name, reason in self.failures.items()),
            *self.notes,
        ]
        front = frozenset(index for index, each in enumerate(options) if each.on_front)
        title = f"one training step of {self.model} on {self.device}, as measured on copies"
        return Grid(
            title=title,
            heading="arrangement",
            names=[each.name for each in options],
            columns=columns,
            notes=notes,
            emphasised=front,
        )


def mark_front(options: dict[str, Option], max_deviation: float | None) -> dict[str, Option]:
    """Return the options, with those marked that no other beats in both time and memory."""
    allowed = [
        option
        for option in options.values()
        if max_deviation is None or option.gradient_deviation <= max_deviation
    ]

    def beaten(option: Option) -> bool:
        return any(
            other.seconds <= option.seconds
            and other.peak_bytes <= option.peak_bytes
            and (other.seconds, other.peak_bytes) != (option.seconds, option.peak_bytes)
            for other in allowed
        )

    return {
        name: replace(option, on_front=option in allowed and not beaten(option))
        for name, option in options.items()
    }
