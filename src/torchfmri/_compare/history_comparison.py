"""The `HistoryComparison` that `torchfmri.compare` returns for two training runs.

`histories` makes it together with its `StepDifference`; users and `torchfmri compare` read it. The
gaps and what is allowed come in finished, so text, table and pictures may change freely. The
attributes and the keys of `to_dict` are public (`--json` prints them). In `gaps`, nan means that
one side has no value and infinity that they cannot be equal: keep the two apart when you draw or
sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchfmri._compare.difference import BRIGHTEST, beyond_text, drawable, finite, unit_text
from torchfmri._records import UPDATES, Finding, Floats, History, Series
from torchfmri._scan import layer_bands
from torchfmri._text import Column, Grid, plural
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import (
    Brain,
    TokenTrack,
    axes_or_new,
    draw_brain,
    new_figure,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 110
_MOST_TICKS = 12


@dataclass(frozen=True)
class StepDifference:
    """The first step where two training runs part.

    Attributes:
        step: Its number.
        layer: The layer, or the parameter; empty for the loss.
        what: activations, gradients, parameters, parameter_gradients, updates or loss.
        relative: How far the statistics are apart, relative to the rms of the values.
        allowed: What was allowed.
        before: The largest difference of that series in the steps before.
        reason: Both sides in words.

    Examples:
        >>> import torchfmri
        >>> found = torchfmri.StepDifference(step=37, layer="0", what="activations", relative=0.2,
        ...     allowed=1e-5, before=0.0, reason="mean 0.1 against 0.3")
        >>> str(found).split(" (")[0]
        "step 37: activations of '0': mean 0.1 against 0.3"
    """

    step: int
    layer: str
    what: str
    relative: float
    allowed: float
    before: float
    reason: str

    def place(self) -> str:
        """The step and the layer in words."""
        of = "the loss" if self.what == "loss" else f"{self.what} of {self.layer or 'the model'!r}"
        return f"step {self.step}: {of}"

    def __str__(self) -> str:
        if math.isinf(self.relative):
            return f"{self.place()}: {self.reason}"
        of = "" if self.what in ("loss", UPDATES) else " of the rms"
        return (
            f"{self.place()}: {self.reason} (they differ by {self.relative:.1e}{of}, allowed "
            f"{self.allowed:.1e}, before {self.before:.1e})"
        )


class _KindOfNumber(NamedTuple):
    """Where one kind of number, such as activations, parts first; None where it never does."""

    step: int | None
    layer: str | None
    difference: float | None
    last: float | None


@dataclass(frozen=True, eq=False, repr=False)
class HistoryComparison:
    """The result of comparing two training runs: where they part, or that they agree.

    Attributes:
        a: The reference.
        b: The other run.
        steps: The steps that both have.
        series: What was compared: (layer, what) of each column.
        gaps: (step, series) relative differences; nan where one side has nothing.
        allowed: (step, series) what noise explains.
        first: The first step, layer and what beyond that; None where there is none.
        notes: What to know about the comparison.
        tolerance: The relative difference that was allowed instead of noise; None without one.

    Examples:
        >>> import torch, torchfmri
        >>> def train(rate):
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Linear(4, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        ...     with torchfmri.Monitor(model, optimizer) as monitor:
        ...         for _ in range(3):
        ...             model(torch.ones(2, 4)).square().mean().backward()
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...     return monitor.history
        >>> torchfmri.compare(train(0.01), train(0.01)).agree
        True
    """

    a: History
    b: History
    steps: list[int]
    series: list[Series]
    gaps: Floats
    allowed: Floats
    first: StepDifference | None
    notes: list[str]
    tolerance: float | None = None

    @property
    def agree(self) -> bool:
        """Whether no step parts beyond noise."""
        return self.first is None

    def summary(self) -> str:
        """The result in a sentence."""
        if self.first is not None:
            before = self.gaps[: self.steps.index(self.first.step)]
            same = before.size and not np.nan_to_num(before).any()
            equal = "; all steps before are equal to the last bit" if same else ""
            return f"the runs part at {self.first}{equal}"
        # A sum of gradients that cancel is nothing but rounding: it may differ by any amount.
        known = self.gaps[np.isfinite(self.gaps) & np.isfinite(self.allowed)]
        worst = float(known.max(initial=0.0))
        rounding = f"they differ by rounding only, by at most {worst:.1e}"
        size = "equal to the last bit" if worst == 0 else rounding
        count, most = len(self.steps), max(len(self.a), len(self.b))
        of = plural(count, "step") if count == most else f"the {count} of {most} steps in common"
        parts = "no step parts beyond noise"
        if self.tolerance is not None:
            parts = f"no step differs{beyond_text(self.tolerance).replace(' of', ' by')}"
        return f"{parts} in {of}: {size}"

    def __repr__(self) -> str:
        return f"<HistoryComparison: {self.summary()}>"

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """The result for a terminal: for each kind of number the first step that parts."""
        kinds = list(dict.fromkeys(each.what for each in self.series))
        rows = [self._first_of(what) for what in kinds]
        columns = [
            Column("first step", list(map(self._step_text, kinds, rows)), 5),
            Column("there", [row.layer or "" for row in rows], 4, right=False),
            Column("difference then", [_text(row.difference, ".1e") for row in rows], 3),
            Column("at the last step", [_text(row.last, ".1e") for row in rows], 2),
        ]
        notes = [*self.notes, *self._following(kinds, rows), *self._findings()]
        return Grid(self.summary(), "what", kinds, columns, notes).text()

    def _largest(self, what: str) -> float:
        """The largest difference of one kind of number in any step; nan if there are no values."""
        gaps = self.gaps[:, [at for at, each in enumerate(self.series) if each.what == what]]
        return float(np.fmax.reduce(gaps, axis=None, initial=math.nan))

    def _step_text(self, what: str, row: _KindOfNumber) -> str:
        """The first step that parts, or why there is none."""
        if row.step is not None:
            return str(row.step)
        within = "within noise" if self.tolerance is None else "within the tolerance"
        within = "follows" if self._follows(what, row) else within
        largest = self._largest(what)
        return "no values" if math.isnan(largest) else within if largest else "equal"

    def _follows(self, what: str, row: _KindOfNumber) -> bool:
        """Whether it differs by more than rounding, and no more than what came before explains."""
        alone = self.first is not None and row.step is None
        return alone and self.first is not None and self._largest(what) > self.first.allowed

    def _following(self, kinds: Sequence[str], rows: Sequence[_KindOfNumber]) -> Iterator[str]:
        for what, row in zip(kinds, rows, strict=True):
            if self._follows(what, row):
                yield (
                    f"{what.replace('_', ' ')} differ by up to {self._largest(what):.1e}, which "
                    "follows from gradients that differ: no step of their own is named"
                )

    def _first_of(self, what: str) -> _KindOfNumber:
        columns = [at for at, each in enumerate(self.series) if each.what == what]
        gaps = self.gaps[:, columns]
        ending = gaps[-1][~np.isnan(gaps[-1])]
        last = float(ending.max()) if len(ending) else None
        with np.errstate(invalid="ignore"):
            beyond = gaps > self.allowed[:, columns]
        rows = np.flatnonzero(beyond.any(1))
        if not len(rows):
            return _KindOfNumber(None, None, None, last)
        row = int(rows[0])
        # Gradients arrive at the last layer first.
        place = int(np.flatnonzero(beyond[row])[-1 if what == "gradients" else 0])
        layer = self.series[columns[place]].layer
        return _KindOfNumber(self.steps[row], layer, float(gaps[row, place]), last)

    def _findings(self) -> list[str]:
        """The findings of both runs, side by side."""
        found: dict[str, list[str]] = {}
        for name, history in (("a", self.a), ("b", self.b)):
            for finding in history.findings:
                found.setdefault(finding.problem, []).append(f"{name}: {_said(finding)}")
        return [f"found {problem}: {'; '.join(each)}" for problem, each in found.items()]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for JSON: numbers that are not finite are None."""
        first = self.first
        found = {
            "agree": self.agree,
            "steps": [self.steps[0], self.steps[-1]],
            "first": None if first is None else dict(vars(first)),
            "kinds": {
                what: self._first_of(what)._asdict()
                for what in dict.fromkeys(each.what for each in self.series)
            },
            "findings": {
                name: [finding.to_dict() for finding in history.findings]
                for name, history in (("a", self.a), ("b", self.b))
            },
            "notes": self.notes,
        }
        return dict(finite(found))

    def plot(self, what: str = "activations", *, ax: Axes | None = None) -> Axes:
        """Layers down, steps across: the difference in units of what noise explains.

        Args:
            what: activations, gradients, parameters, parameter_gradients or updates.
            ax: Where to draw.

        Raises:
            InspectionError: Nothing of that kind was compared.
        """
        columns = [at for at, each in enumerate(self.series) if each.what == what]
        if not columns:
            known = ", ".join(dict.fromkeys(each.what for each in self.series))
            raise InspectionError(f"There are no {what!r} in both runs, only {known}.")
        brain = self._brain(what, columns)
        ax = draw_brain(axes_or_new(ax, *brain.figure_inches), brain, text=False, surprisal=False)
        places = range(0, len(self.steps), _stride(len(self.steps)))
        ax.set_xticks(places, [str(self.steps[at]) for at in places], fontsize=7)
        ax.tick_params(axis="x", labelbottom=True, pad=6)
        ax.set_xlabel("\n".join(filter(None, ("step", brain.remark))), fontsize=8)
        return ax

    def _brain(self, what: str, columns: Sequence[int]) -> Brain:
        """Return the picture of some series, all of one kind."""
        names = [self.series[at].layer for at in columns]
        first = self.first if self.first is not None and self.first.what == what else None
        with np.errstate(invalid="ignore", divide="ignore"):
            values = (self.gaps / self.allowed)[:, columns].T
        mark, said = None, "" if self.first is None else str(self.first.place())
        if first is not None:
            mark = (names.index(first.layer), self.steps.index(first.step))
        count = len(self.steps)
        no = np.zeros(count, bool)
        subject = (
            "Where two training runs part"
            if said
            else f"No difference{beyond_text(self.tolerance)}"
        )
        return Brain(
            bands=layer_bands(names, "kind"),
            values=drawable(values),
            remark=BRIGHTEST if np.isinf(values).any() else "",
            tokens=TokenTrack([""] * count, np.full(count, np.nan), no, no),
            metric=unit_text(self.tolerance),
            normalise="global",
            title=f"{subject}: {what.replace('_', ' ')}",
            subtitle=f"first: {said}{' (the ring)' if mark else ''}" if said else "",
            mark=mark,
            unit=1.0,
        )

    def plot_curves(
        self, layer: str = "", what: str = "loss", field: str = "rms", *, ax: Axes | None = None
    ) -> Axes:
        """One number of both runs over the steps, with the step where they part.

        Args:
            layer: The layer or parameter; none for the loss.
            what: loss, or as for `History.values`.
            field: The statistic, as for `History.values`.
            ax: Where to draw.
        """
        ax = axes_or_new(ax, 9.0, 3.2)
        for name, run, colour, dashes in (
            ("a", self.a, "#0072B2", "-"), ("b", self.b, "#D55E00", "--"),
        ):  # fmt: skip
            values = run.loss if what == "loss" else run.values(layer, what, field)
            ax.plot(run.steps, values, dashes, color=colour, linewidth=1.4, label=name)
        if self.first is not None:
            ax.axvline(self.first.step, color="#7f7f7f", linestyle=":", linewidth=1.0)
            ax.text(
                self.first.step,
                1.0,
                f" part at step {self.first.step}",
                fontsize=7.5,
                color="#555555",
                va="bottom",
                transform=ax.get_xaxis_transform(),
            )
        ax.set_xlabel("step", fontsize=8)
        ax.set_ylabel("loss" if what == "loss" else f"{field} of {what}\nof {layer}", fontsize=8)
        ax.legend(frameon=False, fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(x=0.01)
        ax.locator_params(axis="x", integer=True)
        return ax

    def draw(self, path: str | PathLike[str] | None = None) -> Figure:
        """The picture of layers and steps above the curves of the loss, in one figure.

        Args:
            path: Where to write it, if anywhere.
        """
        kinds = list(dict.fromkeys(each.what for each in self.series if each.what != "loss"))
        wanted = self.first.what if self.first is not None else "activations"
        shown = wanted if wanted in kinds else kinds[0]
        columns = [at for at, each in enumerate(self.series) if each.what == shown]
        wide, high = self._brain(shown, columns).figure_inches
        figure = new_figure(max(wide, 10.0), high + 2.6)
        above, below = figure.subplots(2, 1, height_ratios=[high, 2.6])
        self.plot(shown, ax=above)
        self.plot_curves(ax=below)
        if path is not None:
            save_figure(figure, path, dpi=_DOTS_PER_INCH)
        return figure


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _stride(count: int) -> int:
    """Return every how many steps a number is written: 1, 2, 5, 10, 20, 50, ..."""
    stride, steps = 1, itertools.cycle((2, 2.5, 2))
    while count > stride * _MOST_TICKS:
        stride = round(stride * next(steps))
    return stride


def _said(finding: Finding) -> str:
    when = "" if finding.step is None else f"step {finding.step}, "
    return f"{when}{finding.text}"
