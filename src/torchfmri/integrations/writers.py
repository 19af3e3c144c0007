"""Writers for `Monitor.add_writer`: each watched step to TensorBoard, Weights & Biases or trackio.

By default a run gets a summary under `torchfmri/`: the loss (also one that is NaN), how many values
were NaN or infinite, one number per kind of layer (`layers.*.mlp`), heat maps of layers over steps,
and what was found wrong as alerts or text, always with the step. `fields=` adds statistics of every
layer, named `<what>/<layer>/<statistic>`, such as `gradients/layers.0.mlp/rms`: hundreds of tags.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import check_each, check_number, require
from torchfmri._records import COLUMNS, UPDATES, Finding, History, Series, Step
from torchfmri._text import star
from torchfmri.statistics import Statistics
from torchfmri.visualization import history_plots

FIELDS = ("rms", "mean", "std", "abs_max", "nan", "inf")
"""The statistics that `fields=FIELDS` writes of every layer."""
_KNOWN = tuple(name for name in COLUMNS if name == "rms" or hasattr(Statistics, name))
_BINS = 64
_FIRST_IMAGE = 10
_LEVELS = {"alarm": "ERROR", "warn": "WARN", "inform": "INFO"}
_MAPS = ("activations", "gradients", UPDATES)
Image = NDArray[np.uint8]


class _Summary:
    """What a dashboard gets of a run: numbers of each step, and now and then a picture.

    Args:
        run: What it is written to; it must have the method that `_NEEDS` names.
        fields: Statistics of every layer to write besides.
        histograms: Whether to write the histogram of every layer, where the Monitor takes them.
        images: One heat map of layers over steps in so many watched steps; 0 for none. They need
            matplotlib; without it there are none.
    """

    _NEEDS = ("run", "log", "")
    """The name of `run` for the user, the method that it must have, and what to give."""

    def __init__(
        self,
        run: Any,
        fields: Sequence[str] | None = None,
        histograms: bool = False,
        images: int = 100,
    ) -> None:
        name, method, meaning = self._NEEDS
        require(hasattr(run, method), name, run, meaning)
        self._run = run
        self._fields: Sequence[str] = ()
        if fields is not None:
            self._fields = check_each("fields", fields, _KNOWN, "name statistics")
        check_number("images", images, 0, "a number of steps between heat maps, or 0 for none")
        self._histograms = histograms
        self._images = images if find_spec("matplotlib") is not None else 0
        self._history = History(with_histograms=0)
        self._count = 0
        self._broken = False
        self._defined: set[str] = set()

    def numbers(self, step: Step, found: Mapping[Series, Statistics]) -> dict[str, float]:
        """Return the numbers of a step by name."""
        kinds, details = _of_kinds(step, found), _details(step, found, self._fields)
        return {**dict(_of_step(step)), **kinds, **dict(details)}

    def pictures(self, step: Step, found: Mapping[Series, Statistics]) -> dict[str, Image]:
        """Return heat maps by name, if one is due at this step."""
        if not self._images:
            return {}
        self._history.append(
            Step(step.number, step.loss, step.seconds, parameters=step.parameters,
                 updates=step.updates, has_loss=step.has_loss),
            found,
        )  # fmt: skip
        self._count += 1
        # A run that breaks often ends soon, and its last picture must show where it broke.
        bad = step.has_loss and math.isnan(step.loss)
        bad = bad or any(each.nan for each in found.values())
        broke, self._broken = bad and not self._broken, bad or self._broken
        if not broke and self._count != _FIRST_IMAGE and self._count % self._images:
            return {}
        known = {series.what for series in self._history.series}
        known |= {UPDATES} if step.parameters else set()
        return {
            f"torchfmri/map/{what}": _picture(self._history, what)
            for what in _MAPS
            if what in known
        }

    def histograms(self, found: Mapping[Series, Statistics]) -> dict[Series, Statistics]:
        """Return the statistics whose histogram is to be written."""
        if not self._histograms:
            return {}
        return {
            series: each
            for series, each in found.items()
            if each.histogram is not None and each.finite
        }


class TensorBoardWriter(_Summary):
    """Writes each watched step to a `torch.utils.tensorboard.SummaryWriter`.

    Args:
        writer: The SummaryWriter, such as the one that the trainer has opened.
        fields: Statistics of every layer to write besides the summary, such as `FIELDS`.
        histograms: Whether to write the histogram of every layer, where the Monitor takes them.
        images: One heat map of layers over steps in so many watched steps; 0 for none.
    """

    _NEEDS = ("writer", "add_scalar", "give a SummaryWriter of torch.utils.tensorboard")

    def __init__(
        self,
        writer: Any,
        fields: Sequence[str] | None = None,
        histograms: bool = False,
        images: int = 100,
    ) -> None:
        super().__init__(writer, fields, histograms, images)

    def __call__(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        """Write one step."""
        for name, value in self.numbers(step, found).items():
            self._run.add_scalar(name, value, step.number)
        for name, image in self.pictures(step, found).items():
            self._run.add_image(name, image, step.number, dataformats="HWC")
        for (layer, what), statistics in self.histograms(found).items():
            counts, edges = statistics.linear_histogram(_BINS)
            self._run.add_histogram_raw(
                f"{what}/{layer or 'model'}",
                min=float(statistics.min),
                max=float(statistics.max),
                num=statistics.finite,
                sum=statistics.mean * statistics.finite,
                sum_squares=statistics.l2**2,
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
                global_step=step.number,
            )

    def found(self, step: int, findings: Sequence[Finding]) -> None:
        """Write what was found wrong, as text."""
        for each in findings:
            text = f"**{each.severity}** {each.problem}, {_when(each, step)}: {_said(each)}"
            self._run.add_text("torchfmri/findings", text, step)


class WandbWriter(_Summary):
    """Writes each watched step to a Weights & Biases run.

    Kinds of layers are called `layers.N.mlp` there, because `*` makes a pattern of a name.

    Args:
        run: What `wandb.init()` returned, such as the run that the trainer has opened.
        fields: Statistics of every layer to write besides the summary, such as `FIELDS`.
        histograms: Whether to write the histogram of every layer, where the Monitor takes them.
        images: One heat map of layers over steps in so many watched steps; 0 for none.
    """

    _NEEDS = ("run", "log", "give a run, which wandb.init() returns")

    def __call__(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        """Write one step."""
        numbers = self.numbers(step, found)
        row: dict[str, Any] = {name.replace("*", "N"): numbers[name] for name in numbers}
        self._define(row)
        row["torchfmri/step"] = step.number
        images, histograms = self.pictures(step, found), self.histograms(found)
        if images or histograms:
            import wandb

            row |= {name: wandb.Image(image) for name, image in images.items()}
            row |= {
                f"{what}/{layer or 'model'}": wandb.Histogram(
                    np_histogram=each.linear_histogram(_BINS)
                )
                for (layer, what), each in histograms.items()
            }
        self._run.log(row)

    def _define(self, names: Iterable[str]) -> None:
        """Draw numbers over our steps: a trainer counts steps of its own.

        Trainers define "*" over theirs, and a number that two patterns fit gets either of them,
        so every number is defined by its name, in which no "*" may stand.
        """
        if not hasattr(self._run, "define_metric"):
            return
        for name in [each for each in names if each not in self._defined]:
            self._run.define_metric(name, step_metric="torchfmri/step")
            self._defined.add(name)

    def found(self, step: int, findings: Sequence[Finding]) -> None:
        """Send what was found wrong as alerts."""
        for each in findings:
            self._run.alert(level=_LEVELS[each.severity], **_alert(each, step))


class TrackioWriter(_Summary):
    """Writes each watched step to a trackio run.

    Args:
        run: What `trackio.init()` returned.
        fields: Statistics of every layer to write besides the summary, such as `FIELDS`.
        images: One heat map of layers over steps in so many watched steps; 0 for none.
    """

    _NEEDS = ("run", "log", "give a run, which trackio.init() returns")

    def __init__(self, run: Any, fields: Sequence[str] | None = None, images: int = 100) -> None:
        super().__init__(run, fields, False, images)

    def __call__(self, step: Step, found: Mapping[Series, Statistics]) -> None:
        """Write one step."""
        row: dict[str, Any] = {**self.numbers(step, found), "torchfmri/step": step.number}
        images = self.pictures(step, found)
        if images:
            import trackio

            row |= {name: trackio.Image(image) for name, image in images.items()}
        self._run.log(row, step=step.number)

    def found(self, step: int, findings: Sequence[Finding]) -> None:
        """Send what was found wrong as alerts."""
        if not findings:
            return
        import trackio

        for each in findings:
            level = getattr(trackio.AlertLevel, _LEVELS[each.severity])
            self._run.alert(level=level, step=step, **_alert(each, step))


# -- numbers -------------------------------------------------------------------------------------


def _of_step(step: Step) -> Iterator[tuple[str, float]]:
    """Yield the numbers of the step itself; those that are not known are left out."""
    if step.has_loss:  # also one that is NaN
        yield "torchfmri/loss", step.loss
    for name, value in {"seconds": step.seconds, **step.scalars}.items():
        if not math.isnan(value):
            yield f"torchfmri/{name}", value


def _of_kinds(step: Step, found: Mapping[Series, Statistics]) -> dict[str, float]:
    """Return the largest rms of each kind of layer, and how many values are not finite."""
    largest: dict[str, float] = {}
    bad: dict[str, float] = {}
    for (layer, what), statistics in found.items():
        bad[what] = bad.get(what, 0.0) + statistics.nan + statistics.inf
        if what == "parameters":  # they change slowly: the updates say how fast
            continue
        value = _field(statistics, "rms")
        if not math.isnan(value):
            name = f"torchfmri/{what}/{star(layer) or 'model'}"
            largest[name] = max(largest.get(name, 0.0), value)
    for parameter, ratio in step.update_ratios.items():
        if not math.isnan(ratio):
            name = f"torchfmri/{UPDATES}/{star(parameter)}"
            largest[name] = max(largest.get(name, 0.0), ratio)
    return {**{f"torchfmri/nonfinite/{what}": count for what, count in bad.items()}, **largest}


def _details(
    step: Step, found: Mapping[Series, Statistics], fields: Sequence[str]
) -> Iterator[tuple[str, float]]:
    """Yield statistics of every layer; those that are not known are left out."""
    if not fields:
        return
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


# -- pictures and words --------------------------------------------------------------------------


def _picture(history: History, what: str) -> Image:
    """Return a heat map of layers over steps as pixels (height, width, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure: Any = history_plots.plot_history(history, "rms", what).figure
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    pixels: Image = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return pixels


def _when(finding: Finding, step: int) -> str:
    return f"step {step if finding.step is None else finding.step}"


def _alert(finding: Finding, step: int) -> dict[str, str]:
    """Return title and text of a finding, as the alerts of both dashboards take them."""
    title = f"torchfmri: {finding.problem}, {_when(finding, step)}"
    return {"title": title, "text": _said(finding)}


def _said(finding: Finding) -> str:
    return f"{finding.text} {finding.advice}".strip()
