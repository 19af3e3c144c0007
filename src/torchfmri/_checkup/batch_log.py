"""What the batches of a run have in common: size, repeats, classes, padding.

`Checkup` adds every batch and asks for `DataFacts` at the end. The data is only read. Batches of
more than `_MOST_VALUES` values are skipped, and labels are followed for about `_MOST_SAMPLES`
samples. Samples of few numbers, one-hot rows and small batches repeat by chance and are left out.
The thresholds are tuned on the healthy models of `benchmarks diagnosis`; run it after a change.
Further facts may be counted freely.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchfmri._checkup.gradient_watch import norm_of
from torchfmri._checkup.users_step import Split
from torchfmri._diagnosis import DataFacts, median
from torchfmri._model import named_layers
from torchfmri._torch import flatten

LEAST_NUMBERS = 8
"""Samples of fewer numbers than this repeat by chance (a truth table has four rows)."""
LEAST_CLASSES_BATCH = 8
"""Smaller batches hold a single class by chance."""
LEAST_AGAIN = 32
"""Labels of repeated samples are compared if there are at least this many."""
_MOST_VALUES = 1 << 20
_MOST_SAMPLES = 1 << 14


@dataclass
class BatchLog:
    """Collects what the batches of a run have in common.

    Attributes:
        samples: How many there were.
        varies: Whether any batch differs from the first.
    """

    samples: int = 0
    varies: bool = False
    _first: list[Tensor] = field(default_factory=list)
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
        keywords = dict(split.keywords)
        target = keywords.pop("labels", None) if split.target is None else split.target
        target = target if isinstance(target, Tensor) else None
        inputs = [each.tensor for each in flatten((split.arguments, keywords))]
        floats = [each for each in inputs if each.is_floating_point() and each.numel()]
        self._input_sizes.append(max(map(_size, floats), default=math.nan))
        is_number = target is not None and target.is_floating_point()
        self._target_sizes.append(_size(target) if is_number and target is not None else math.nan)
        if not self._first:
            self._first = inputs
        elif not self.varies:
            self.varies = not _are_equal(self._first, inputs)
        if inputs and inputs[0].ndim:
            self.samples += inputs[0].shape[0]
            self._compare(_rows(inputs), target)
        if target is not None:
            self._count_classes(target)
            self._look_for_padding(target)

    def _compare(self, rows: Tensor, target: Tensor | None) -> None:
        if len(rows) < 4 or rows.shape[1] < LEAST_NUMBERS:
            return
        if bool(((rows != 0).sum(1) <= 1).all()):  # one-hot: one number per row
            return
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

    def _look_for_padding(self, target: Tensor) -> None:
        """Count targets that are padding after the end of a text.

        Padding is a token that stands at the ends of rows alone, in runs of different lengths, most
        of them longer than the one token that ends a text.
        """
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
        """Return the share of batches of a single class, minus the share expected by chance."""
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


def _rows(inputs: list[Tensor]) -> Tensor:
    """Return the samples of a batch, with all inputs of a sample in one row: (b, numbers).

    All of them count: an attention mask alone repeats where the texts do not. float64 holds the
    values of every dtype that models are given; they are on the CPU, as not every device has it.
    """
    b = inputs[0].shape[0]
    parts = [each for each in inputs if each.ndim and each.shape[0] == b and not each.is_complex()]
    if not parts or sum(each.numel() for each in parts) > _MOST_VALUES:
        return torch.empty(0, 0, device="cpu")
    rows = [each.detach().flatten(1) if each.ndim > 1 else each.detach()[:, None] for each in parts]
    return torch.cat([each.cpu().to(torch.float64) for each in rows], 1)


def _are_equal(inputs: list[Tensor], others: list[Tensor]) -> bool:
    return len(inputs) == len(others) and all(map(torch.equal, inputs, others))


def _size(tensor: Tensor) -> float:
    """Return the root mean square of the finite values; 0 if there are none."""
    values = tensor.detach()[torch.isfinite(tensor.detach())]
    return norm_of(values) / math.sqrt(values.numel()) if values.numel() else 0.0


def _padding_rows(model: nn.Module) -> dict[str, float]:
    """Return, by embedding, the rms of its padding row if that is not 0."""
    found = {}
    for name, module in named_layers(model).items():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            rms = float(module.weight[module.padding_idx].detach().float().square().mean().sqrt())
            if rms > 0 and math.isfinite(rms):
                found[name] = rms
    return found
