"""Sequence tasks behind a task token: copy, reverse, increment, sort.

`TrainingRun` draws its batches from these, or from anything else that fits the protocol `Tasks`, as
`GridPuzzles` does. A batch depends on its generator alone, so a run that was interrupted goes on
with the data it would have seen. The sequences of a task must stay as they are, because new results
are compared with earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchfmri.exceptions import InspectionError

SYMBOLS = 16
NAMES = ("copy", "reverse", "increment", "sort")
IGNORED = -100


class Batch(NamedTuple):
    """Sequences of one length, or padded on the right.

    Attributes:
        ids: (b, s).
        labels: (b, s), -100 where nothing is to be predicted.
        tasks: (b,), the number of each sample's task.
        mask: (b, s), 0 where a position is padding; None if there is none.
    """

    ids: Tensor
    labels: Tensor
    tasks: Tensor
    mask: Tensor | None = None

    def to(self, device: str) -> Batch:
        """Return the task with its tensors on a device."""
        moved = (None if each is None else each.to(device) for each in self)
        return Batch(*moved)  # type: ignore[arg-type]


class Tasks(Protocol):
    """A source of batches."""

    @property
    def names(self) -> Sequence[str]:
        """The tasks, by number."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""

    @property
    def groups(self) -> Sequence[str]:
        """The groups that are judged separately, the hardest last."""

    def train(self, size: int, generator: torch.Generator) -> Batch:
        """Return a batch to learn from."""

    def test(self, group: str, size: int, generator: torch.Generator) -> Batch:
        """Return a batch to be judged by; groups are lengths, or what else is judged apart."""


@dataclass(frozen=True)
class SequenceTasks:
    """[task] x_1 ... x_n [=] y_1 ... y_n, made when asked for; every batch has one length.

    Attributes:
        lengths: The lengths n, each as likely as the others.
        names: The tasks.

    Examples:
        >>> import torch
        >>> tasks = SequenceTasks(lengths=(3,), names=("reverse",))
        >>> batch = tasks.train(1, torch.Generator().manual_seed(0))
        >>> (batch.ids[0, 1:4].flip(0) == batch.ids[0, 5:]).all().item()
        True
    """

    lengths: tuple[int, ...] = (6, 10, 14)
    names: tuple[str, ...] = NAMES

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in NAMES:
                raise InspectionError(f"There is no task {name!r}; there are {', '.join(NAMES)}.")
        if not self.lengths or min(self.lengths) < 1 or not self.names:
            raise InspectionError(
                f"lengths={self.lengths}, names={self.names}: give at least one length of 1 or "
                "more, and one task."
            )

    @property
    def vocab_size(self) -> int:
        """Symbols, one token per task, and the sign between question and answer."""
        return SYMBOLS + len(NAMES) + 1

    @property
    def groups(self) -> tuple[str, ...]:
        """Lengths are judged apart."""
        return tuple(f"length {length}" for length in self.lengths)

    def train(self, size: int, generator: torch.Generator) -> Batch:
        """Return a batch of one length, with a task for each sample."""
        at = int(torch.randint(len(self.lengths), (), generator=generator))
        return self._make(size, self.lengths[at], generator)

    def test(self, group: str, size: int, generator: torch.Generator) -> Batch:
        """Return a batch of that length."""
        return self._make(size, self.lengths[self.groups.index(group)], generator)

    def _make(self, size: int, length: int, generator: torch.Generator) -> Batch:
        x = torch.randint(SYMBOLS, (size, length), generator=generator)
        tasks = torch.randint(len(self.names), (size,), generator=generator)
        answers = torch.stack([_answer(name, x) for name in self.names])
        y = answers[tasks, torch.arange(size)]
        tokens = torch.tensor([SYMBOLS + NAMES.index(name) for name in self.names])
        sign = torch.full((size, 1), SYMBOLS + len(NAMES))
        ids = torch.cat((tokens[tasks, None], x, sign, y), 1)
        labels = ids.clone()
        labels[:, : length + 2] = IGNORED
        return Batch(ids, labels, tasks)


def _answer(name: str, x: Tensor) -> Tensor:
    if name == "reverse":
        return x.flip(1)
    if name == "increment":
        return (x + 1) % SYMBOLS
    return x.sort(1).values if name == "sort" else x
