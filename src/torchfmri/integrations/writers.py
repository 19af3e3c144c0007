"""Writers for `Monitor.add_writer`: each watched step to TensorBoard or Weights & Biases.

The names are `<what>/<layer>/<statistic>`, such as `gradients/layers.0.mlp/rms`. Statistics are
those of all values: a NaN is counted and neither dropped nor passed on. A loss that is NaN is
written as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchfmri._arguments import check_each, require
from torchfmri._records import COLUMNS, UPDATES, Series, Step
from torchfmri.statistics import Statistics

FIELDS = ("rms", "mean", "std", "abs_max", "nan", "inf")
_KNOWN = tuple(name for name in COLUMNS if name == "rms" or hasattr(Statistics, name))
_BINS = 64


class TensorBoardWriter:
    """Writes each watched step to a `torch.utils.tensorboard.SummaryWriter`.

    Args:
        writer: The SummaryWriter.
        fields: Which statistics.
        histograms: Whether to write histograms, where the Monitor takes them.
    """

    def __init__(
        self, writer: Any, fields: Sequence[str] = FIELDS, histograms: bool = True
    ) -> None:
        meaning = "give a SummaryWriter of torch.utils.tensorboard"
        require(hasattr(writer, "add_scalar"), "writer", writer, meaning)
        self._fields = check_each("fields", fields, _KNOWN, "name statistics")
        self._writer, self._histograms = writer, histograms

    def __call__(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        """Write one step."""
        for name, value in scalars_of(step, found, self._fields):
            self._writer.add_scalar(name, value, step.number)
        if not self._histograms:
            return
        for (layer, what), statistics in found.items():
            if statistics.histogram is None or not statistics.finite:
                continue
            counts, edges = statistics.linear_histogram(_BINS)
            total = statistics.mean * statistics.finite
            self._writer.add_histogram_raw(
                f"{what}/{layer or 'model'}",
                min=float(statistics.min),
                max=float(statistics.max),
                num=statistics.finite,
                sum=total,
                sum_squares=statistics.l2**2,
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
                global_step=step.number,
            )


class WandbWriter:
    """Writes each watched step to a Weights & Biases run.

    Args:
        run: What `wandb.init()` returned.
        fields: Which statistics.
        histograms: Whether to write histograms, where the Monitor takes them.
    """

    def __init__(self, run: Any, fields: Sequence[str] = FIELDS, histograms: bool = True) -> None:
        require(hasattr(run, "log"), "run", run, "give a run, which wandb.init() returns")
        self._fields = check_each("fields", fields, _KNOWN, "name statistics")
        self._run, self._histograms = run, histograms

    def __call__(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        """Write one step."""
        row: dict[str, Any] = dict(scalars_of(step, found, self._fields))
        row["torchfmri/step"] = step.number
        if self._histograms:
            row |= _wandb_histograms(found)
        self._run.log(row)


def scalars_of(
    step: Step, found: Mapping[Series, Statistics], fields: Sequence[str]
) -> Iterator[tuple[str, float]]:
    """The numbers of a step by name; those that are not known are left out."""
    if step.has_loss:  # also one that is NaN
        yield "torchfmri/loss", step.loss
    for name, value in {"seconds": step.seconds, **step.scalars}.items():
        if not math.isnan(value):
            yield f"torchfmri/{name}", value
    for (layer, what), statistics in found.items():
        for field in fields:
            value = _field(statistics, field)
            if not math.isnan(value):
                yield f"{what}/{layer or 'model'}/{field}", value
    for name, ratio in step.update_ratios.items():
        if not math.isnan(ratio):
            yield f"{UPDATES}/{name}", ratio


def _field(statistics: Statistics, field: str) -> float:
    if field != "rms":
        return float(getattr(statistics, field))
    return statistics.l2 / math.sqrt(statistics.finite) if statistics.finite else math.nan


def _wandb_histograms(found: Mapping[Series, Statistics]) -> dict[str, Any]:
    taken = {
        series: each for series, each in found.items() if each.histogram is not None and each.finite
    }
    if not taken:
        return {}
    import wandb

    return {
        f"{what}/{layer or 'model'}": wandb.Histogram(np_histogram=each.linear_histogram(_BINS))
        for (layer, what), each in taken.items()
    }
