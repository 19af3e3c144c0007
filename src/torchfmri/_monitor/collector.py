"""Turns the tensors of a training step into statistics, now or many at a time.

On the CPU a tensor is reduced at once, while it is in the cache, to a row of a table: for small
layers the Python around that is the cost, so no object is made for it. On a CUDA device the
launches are the cost, so references are collected and reduced many per launch; a tensor that
somebody wrote into in the meantime is not used, and its series is reduced at once from then on.

`WatchedStep` makes a Collector for each step, adds to it from hooks, also in the threads of a
backward pass, and reads it when the next step begins.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchfmri._capture import TokenMask
from torchfmri._kernels import Floats, NumberTable, Reduction, cuda, reduction_of, summaries
from torchfmri._records import HistoryRows, Series
from torchfmri._torch import Deferred
from torchfmri.exceptions import InspectionError
from torchfmri.statistics import (
    Statistics,
    calculate_statistics,
    merge_statistics,
    statistics_of_reduction,
)

SHARE = 64
"""A launch costs a fraction of a millisecond of Python, so there should be few per step."""
_LAUNCHABLE = (torch.float32, torch.float16, torch.bfloat16)
_WRITTEN = "was written in place before it was read; reduced at once from the next step"


class _Masked(NamedTuple):
    """A tensor with its token axes first, which of them count, and whether all do."""

    values: Tensor
    kept: Tensor
    all_kept: Deferred


class _Reference(NamedTuple):
    """A tensor to be reduced later; detached, so that it holds memory but no graph."""

    series: Series
    tensor: Tensor
    version: int
    masked: _Masked | None


class _Label(NamedTuple):
    """What a launch does not know of a tensor; `positions` where a mask was applied."""

    series: Series
    dtype: str
    shape: tuple[int, ...]
    positions: int | None


class _Launch(NamedTuple):
    labels: list[_Label]
    result: cuda.DeviceReductions
    left_out: Deferred  # per masked tensor: positions that are padding


class _Summaries(NamedTuple):
    """Numbers that a compiled graph wrote, (series, field), still on their way."""

    series: list[Series]
    labels: list[summaries.Label | None]
    numbers: Deferred

    def read(self) -> tuple[list[Series], list[summaries.Label], Floats]:
        """Return the series that the graph wrote, with their labels and numbers."""
        numbers = np.array(self.numbers.read()).reshape(len(self.series), -1)
        came = [
            (place, series, label)
            for place, (series, label) in enumerate(zip(self.series, self.labels, strict=True))
            if label is not None and numbers[place, :4].sum() > 0
        ]
        places = [place for place, *_ in came]
        return [series for _, series, _ in came], [label for *_, label in came], numbers[places]


class Collector:
    """The statistics of one step, by series; tensors of one series are merged.

    Args:
        histogram: Whether to take histograms.
        max_bytes: How many bytes may be referenced before they are reduced; None for one part in
            `SHARE` of the device's memory.
        immediate: Series that are never collected by reference; grows here.
        missed: Told (layer, what, reason) when a tensor could not be used.
    """

    def __init__(
        self,
        histogram: bool,
        max_bytes: int | None,
        immediate: set[Series],
        missed: Callable[[str, str, str], None],
    ) -> None:
        self._histogram, self._most = histogram, max_bytes
        self._immediate, self._missed = immediate, missed
        self._found: dict[Series, list[Statistics]] = defaultdict(list)
        self._table = NumberTable()
        self._rows: list[tuple[int, _Label]] = []  # in the table, with what each is about
        self._references: list[_Reference] = []
        self._bytes = 0
        self._launches: list[_Launch] = []
        self._summaries: list[_Summaries] = []
        self._looks: dict[tuple[int, int], tuple[TokenMask, Deferred]] = {}

    def add(self, series: Series, tensor: Tensor, mask: TokenMask | None = None) -> None:
        """Take in a detached tensor; positions that the mask leaves out do not count."""
        if not is_launchable(tensor):
            row = None if mask is not None or self._histogram else self._table.add(tensor)
            if row is None:
                self._reduce(series, tensor, mask)
            else:
                label = _Label(series, _name(tensor.dtype), tensor.shape, None)
                self._rows.append((row, label))
            return
        masked = None
        if mask is not None and (aligned := mask.align(tensor)) is not None:
            masked = _Masked(*aligned, self._start_look(mask, aligned[1]))
        self._references.append(_Reference(series, tensor, tensor._version, masked))
        self._bytes += tensor.nbytes
        if self._most is None:
            self._most = _share_of_memory(tensor.device)
        if self._bytes > self._most or series in self._immediate:
            self.flush()

    def add_summaries(
        self, series: list[Series], labels: list[summaries.Label | None], numbers: Tensor
    ) -> None:
        """Take in what a compiled graph found out by itself: `summaries.combine`."""
        self._summaries.append(_Summaries(series, labels, Deferred([numbers])))

    def flush(self) -> None:
        """Reduce what was collected by reference, one launch per device, and let go of it."""
        references, self._references, self._bytes = self._references, [], 0
        usable: dict[torch.device, list[_Reference]] = defaultdict(list)
        for each in references:
            if each.tensor._version == each.version:
                usable[each.tensor.device].append(each)
            else:
                self._immediate.add(each.series)
                self._missed(*each.series, _WRITTEN)
        self._launches += [self._launch(some) for some in usable.values()]

    def ready(self) -> bool:
        """Whether `read` would not wait for the device."""
        return (
            not self._references
            and all(each.result.ready() and each.left_out.ready() for each in self._launches)
            and all(each.numbers.ready() for each in self._summaries)
        )

    def read(self) -> Mapping[Series, Statistics]:
        """The statistics of every series."""
        self.flush()
        summed = [each.read() for each in self._summaries]
        self._summaries.clear()
        rows = self._read_rows(summed)
        if rows is not None:
            return rows
        for row, about in self._take_rows():
            reduction, shape = reduction_of(row), tuple(about.shape)
            self._found[about.series].append(
                statistics_of_reduction(reduction, dtype=about.dtype, shape=shape)
            )
        for names, labels, numbers in summed:
            for each, label, own in zip(names, labels, numbers, strict=True):
                self._found[each].append(_statistics_of_summary(label, own))
        for launch in self._launches:
            for series, found in _read(launch):
                self._found[series].append(found)
        self._launches.clear()
        return {
            series: parts[0] if len(parts) == 1 else merge_statistics(parts)
            for series, parts in self._found.items()
        }

    def _take_rows(self) -> Iterator[tuple[Floats, _Label]]:
        """Each row of the table, with its label."""
        rows, self._rows = self._rows, []
        numbers = self._table.read([number for number, _ in rows])
        return zip(numbers, (label for _, label in rows), strict=True)

    def _read_rows(
        self, summed: list[tuple[list[Series], list[summaries.Label], Floats]]
    ) -> HistoryRows | None:
        """All series in one table, where nothing has to be merged or corrected."""
        reduced = [label for _, label in self._rows]
        labels = [*reduced, *(label for launch in self._launches for label in launch.labels)]
        compiled = [label for _, some, _ in summed for label in some]
        series = [label.series for label in labels] + [each for some, *_ in summed for each in some]
        plain = all(label.positions is None for label in labels) and not any(
            label.rows for label in compiled
        )
        if self._found or not series or not plain or len(set(series)) < len(series):
            return None
        tables = [launch.result.read_table() for launch in self._launches]
        known = [table for table in tables if table is not None]
        if len(known) < len(tables):
            return None
        self._launches.clear()
        known.insert(0, self._table.read([number for number, _ in self._rows]))
        self._rows = []
        known += [summaries.table_of(numbers) for *_, numbers in summed]
        shapes = [(each.dtype, tuple(each.shape)) for each in labels]
        shapes += [(each.dtype, each.shape) for each in compiled]
        return HistoryRows(series, np.concatenate(known), shapes)

    def _reduce(self, series: Series, tensor: Tensor, mask: TokenMask | None) -> None:
        aligned = mask.align(tensor) if mask is not None else None
        values, kept = aligned if aligned is not None else (tensor, None)
        try:
            found = calculate_statistics(values, mask=kept, histogram=self._histogram)
        except InspectionError as error:  # it has no values to read, and says so
            self._missed(*series, str(error))
            return
        self._found[series].append(found)

    def _start_look(self, mask: TokenMask, kept: Tensor) -> Deferred:
        """Begin to find out whether a mask leaves anything out, once per mask."""
        key = (id(mask), kept.numel())  # a mask may be of two sequences
        if key not in self._looks:
            self._looks[key] = (mask, Deferred([kept.all()]))
        return self._looks[key][1]

    def _launch(self, references: list[_Reference]) -> _Launch:
        tensors, labels, left_out = [], [], []
        for series, tensor, _, masked in references:
            positions = None
            dtype, shape = _name(tensor.dtype), tuple(tensor.shape)
            if masked is not None and not _is_known_full(masked):
                # Selecting would wait for the device. NaN is counted apart, and subtracted later.
                values, kept, _ = masked
                over = kept.reshape(*kept.shape, *[1] * (values.ndim - kept.ndim))
                tensor = torch.where(over, values, torch.nan)
                left_out.append(kept.numel() - kept.sum())
                positions = kept.numel()
            tensors.append(tensor)
            labels.append(_Label(series, dtype, shape, positions))
        result = cuda.reduce_many(tensors, histogram=self._histogram)
        result.start_copy()
        return _Launch(labels, result, Deferred(left_out))


def _is_known_full(masked: _Masked) -> bool:
    """Whether it is known by now that nothing is left out; asking waits for nothing."""
    return masked.all_kept.ready() and masked.all_kept.read() == [[1.0]]


@lru_cache(maxsize=64)
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=64)
def _share_of_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 256 << 20
    return int(torch.cuda.get_device_properties(device).total_memory) // SHARE


def is_launchable(tensor: Tensor) -> bool:
    """Whether a tensor is reduced by launches on its device, together with others."""
    return (
        tensor.is_cuda
        and tensor.dtype in _LAUNCHABLE
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and cuda.available()
    )


def _read(launch: _Launch) -> list[tuple[Series, Statistics]]:
    left_out = iter(launch.left_out.read())
    found = []
    for label, reduction in zip(launch.labels, launch.result.read(), strict=True):
        series, dtype, shape, positions = label
        counted = None
        if positions is not None:
            padding = int(next(left_out)[0])
            values = padding * (reduction.count // positions)
            reduction.count -= values
            reduction.nan -= values
            counted = (positions - padding, positions)
        found.append(
            (
                series,
                statistics_of_reduction(reduction, dtype=dtype, shape=shape, positions=counted),
            )
        )
    return found


def _statistics_of_summary(label: summaries.Label, numbers: Floats) -> Statistics:
    finite, nan, positive, negative, zero, tiny, mean, squares, low, high, rows = numbers.tolist()
    counted = None
    if label.rows:
        nan -= (label.rows - rows) * (math.prod(label.shape) // label.rows)
        counted = (int(rows), label.rows)
    found = Reduction(
        count=int(finite + nan + positive + negative),
        nan=int(nan),
        pos_inf=int(positive),
        neg_inf=int(negative),
        zero=int(zero),
        subnormal=int(tiny - zero),
        mean=mean,
        squared_deviations=squares,
        low=low,
        high=high,
    )
    return statistics_of_reduction(found, dtype=label.dtype, shape=label.shape, positions=counted)
