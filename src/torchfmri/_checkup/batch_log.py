"""What the batches of a run have in common: size, repeats, classes, padding.

`Checkup` adds every batch and asks for `DataFacts` at the end. It only reads the data, and gives up
on large ones (`_MOST_VALUES`, `_MOST_SAMPLES`). Samples of few numbers, one-hot rows and small
batches repeat by chance and are left out; sizes are in float64, because squares of large inputs
overflow float32.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._checkup.users_step import Split
from torchfmri._diagnosis import DataFacts, median
from torchfmri._model import named_layers
from torchfmri._torch import flatten

LEAST_NUMBERS = 8
"""Samples of fewer numbers repeat by chance (a truth table has four)."""
LEAST_CLASSES_BATCH = 8
"""Smaller batches hold a single class by chance."""
LEAST_AGAIN = 32
"""The number of repeated samples from which on their labels are compared."""
_MOST_VALUES = 1 << 20
_MOST_SAMPLES = 1 << 14


@dataclass
class BatchLog:
    """Collects what the batches of a run have in common.

    Attributes:
        samples: How many there were.
        varies: Whether there were two batches that differ.
    """

    samples: int = 0
    varies: bool = False
    _first: Tensor | None = None
    _input_sizes: list[float] = field(default_factory=list)
    _target_sizes: list[float] = field(default_factory=list)
    _repeated: int = 0
    _contradicting: int = 0
    _compared: int = 0
    _one_class: int = 0
    _judged: int = 0
    _classes: Counter[int] = field(default_factory=Counter)
    _class_of: dict[bytes, int] = field(default_factory=dict)
    _again: int = 0
    _changed: int = 0
    _padded: int = 0
    _positions: int = 0
    _tokens: Counter[int] = field(default_factory=Counter)

    def add(self, split: Split) -> None:
        """Look at one batch."""
        inputs = [each.tensor for each in flatten((split.arguments, dict(split.keywords)))]
        target = split.target if isinstance(split.target, Tensor) else None
        if target is None:
            target = next((each for key, each in split.keywords.items() if key == "labels"), None)
        floats = [each for each in inputs if each.is_floating_point() and each.numel()]
        self._input_sizes.append(max(map(_size, floats), default=math.nan))
        is_number = isinstance(target, Tensor) and target.is_floating_point()
        self._target_sizes.append(_size(target) if is_number and target is not None else math.nan)
        if inputs and self._first is None:
            self._first = inputs[0]
        elif inputs and self._first is not None and not self.varies:
            self.varies = not torch.equal(self._first, inputs[0])
        if inputs and inputs[0].ndim:
            self.samples += inputs[0].shape[0]
            self._compare(inputs[0], target)
        if isinstance(target, Tensor):
            self._count_classes(target)
            self._look_for_padding(split.keywords, target)

    def _compare(self, first: Tensor, target: Tensor | None) -> None:
        rows = first.detach().flatten(1) if first.ndim > 1 else first.detach()[:, None]
        if len(rows) < 4 or rows.shape[1] < LEAST_NUMBERS or rows.numel() > _MOST_VALUES:
            return
        if bool(((rows != 0).sum(1) <= 1).all()):  # one-hot: one number per row
            return
        rows = rows.cpu()
        rows = rows.float() if rows.dtype == torch.bfloat16 else rows
        _, places, counts = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
        self._compared += len(rows)
        again = counts[places] > 1
        self._repeated += int(again.sum())
        is_class = target is not None and not target.is_floating_point() and target.ndim == 1
        if not is_class or target is None or len(target) != len(rows):
            return
        self._follow(rows, target.tolist())
        if bool(again.any()):
            for group in set(places[again].tolist()):
                labels = target[(places == group).to(target.device)]
                if len(set(labels.tolist())) > 1:
                    self._contradicting += len(labels)

    def _follow(self, rows: Tensor, classes: list[int]) -> None:
        """Count the samples seen before, and how many of those had a different label."""
        if len(self._class_of) > _MOST_SAMPLES:
            return
        now = {
            hashlib.blake2b(row.tobytes(), digest_size=8).digest(): label
            for row, label in zip(rows.contiguous().numpy(), classes, strict=True)
        }
        known = [key for key in now if key in self._class_of]
        self._again += len(known)
        self._changed += sum(self._class_of[key] != now[key] for key in known)
        self._class_of |= now

    def _count_classes(self, target: Tensor) -> None:
        if target.is_floating_point() or target.ndim != 1 or len(target) < LEAST_CLASSES_BATCH:
            return
        classes = target.detach().tolist()
        self._judged += 1
        self._one_class += len(set(classes)) == 1
        self._classes.update(classes)

    def _look_for_padding(self, keywords: Mapping[str, Any], target: Tensor) -> None:
        """Count the positions after the end of a text that are among the targets."""
        if target.is_floating_point() or target.ndim != 2 or target.shape[1] < 4:
            return
        rows = target.detach().cpu()
        self._positions += rows.numel()
        last = rows[:, -1]
        token = int(last.mode().values)
        is_token = rows == token
        ends = is_token.flip(1).long().cumprod(1).flip(1).bool()
        runs = ends.sum(1)
        at_ends_only = bool((is_token & ~ends).sum() == 0)
        ragged = len(set(runs.tolist())) > 1 and int((runs >= 2).sum()) * 2 >= len(runs)
        if at_ends_only and ragged:
            self._padded += int(ends.sum())
            self._tokens[token] += 1

    def _sorted_share(self) -> float:
        """Return the share of batches of a single class, beyond what chance gives."""
        if self._judged < 4:
            return 0.0
        seen = self._classes.total()
        size = seen / self._judged
        by_chance = math.fsum((count / seen) ** size for count in self._classes.values())
        return max(0.0, self._one_class / self._judged - by_chance)

    def facts(
        self, model: nn.Module, reader: tuple[str, bool] | None, ignored: int | None
    ) -> DataFacts:
        """Return the facts about all batches; targets equal to `ignored` are not in the loss."""
        token = self._tokens.most_common(1)[0][0] if self._tokens else None
        padded = self._padded / self._positions if self._positions and token != ignored else 0.0
        return DataFacts(
            rms=None if math.isnan(size := median(self._input_sizes)) else size,
            normalised=reader is not None and reader[1],
            reader="" if reader is None else reader[0],
            repeated=self._repeated / self._compared if self._compared else 0.0,
            contradicting=self._contradicting / self._compared if self._compared else 0.0,
            changing=self._changed / self._again if self._again >= LEAST_AGAIN else 0.0,
            samples=self.samples,
            one_class_batches=self._sorted_share(),
            classes_seen=len(self._classes),
            padding=padded,
            padding_token=token,
            padding_rows=_padding_rows(model),
            target_rms=0.0 if math.isnan(size := median(self._target_sizes)) else size,
            sizes={"inputs": self._input_sizes, "targets": self._target_sizes},
        )


def _size(tensor: Tensor) -> float:
    """Return the root mean square of the finite values in float64; 0 if there are none."""
    values = tensor.detach()[torch.isfinite(tensor.detach())].double()
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def _padding_rows(model: nn.Module) -> dict[str, float]:
    """Return, by embedding, the rms of its padding row if that is not 0."""
    found = {}
    for name, module in named_layers(model).items():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            rms = float(module.weight[module.padding_idx].detach().float().square().mean().sqrt())
            if rms > 0 and math.isfinite(rms):
                found[name] = rms
    return found
