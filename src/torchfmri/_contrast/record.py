"""The `Contrast` that users hold: one effect, interval and p-value per layer, voxel or unit.

`compare`, `GLM.contrast` and `load_contrast` make one. Most methods hand it to the file that does
the work (`contrast_table`, `picture`, `report`, `saving`); their documentation stands here because
users look for it here. All fields are public, and most of them stand in `.contrast` files
(`saving`): new ones need a default. The sentences of `summary` may change freely.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import check_file, check_number
from torchfmri._contrast.calibration import Calibration
from torchfmri._contrast.contrast_table import (
    FLOATS,
    Peak,
    export_table,
    finite_or_none,
    frame_of,
    grid_of,
)
from torchfmri._contrast.direction import Direction
from torchfmri._contrast.distributions import Doubles
from torchfmri._contrast.picture import plot_map
from torchfmri._contrast.prompt_table import PromptColumns
from torchfmri._contrast.report import ContrastReport
from torchfmri._contrast.saving import write_contrast
from torchfmri._model import match_names, nearest_names, stored_layers
from torchfmri._text import Grid, plural, printable
from torchfmri.exceptions import InspectionError, LayerNotFoundError

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

    from torchfmri._contrast.comparison import ContrastTrial
    from torchfmri._contrast.second_level import Refit

_PEAKS = 20
_NAMES = {
    "activation": "activation",
    "signed": "signed activation",
    "gradient": "gradient norm",
    "learning_cost": "learning cost",
    "delta_sc": "delta_sc",
}


@dataclass(frozen=True, eq=False)
class Contrast:
    """The differences between conditions, one per column, with their tests.

    Everything with the shape (v,) has one value per column: a layer, a voxel, a head or a unit.

    Attributes:
        question: The contrast in words, such as "true - false".
        conditions: The conditions that are compared.
        weights: (q, k) the weight of each condition in each of the contrasts, as it was given.
        test: "Welch t", "paired t" or "F", after "permutation" where p is from relabellings; "GLM
            t" or "GLM F".
        alpha: The threshold.
        height_control: What it bounds: "fdr", "bonferroni", "max", "fpr", or None.
        two_sided: Whether both directions count.
        metric: What was compared.
        level: "layer", "voxel", "head", "unit" or "feature".
        tokens: Over which tokens of a prompt the values are averaged, in words.
        model: Whose values they are.
        prompts: Condition -> the names of its prompts.
        columns: What the columns are: layer, module, kind, first unit, number of units.
        n_a: (v,) prompts with a value on the positive side; of an F-test and a linear model, all.
        n_b: (v,) on the negative side; 0 if there are no sides.
        effect: (v,) the weighted sum of the means; of an F-test the largest mean less the smallest,
            of one in a linear model the largest coefficient.
        g: (v,) Hedges g: the effect in standard deviations over prompts, with the weights divided
            by the sum of the positive ones.
        ci_low: (v,) where the interval of g begins, at the level 1 - alpha.
        ci_high: (v,) where it ends.
        statistic: (v,) t, or F; `t` and `f` name it.
        dof: (v,) its degrees of freedom; of F, those of the denominator.
        dof_num: The degrees of freedom of F's numerator; None for a t-test.
        p: (v,) the p-value; nan where nothing was tested.
        q: (v,) p adjusted as height_control says.
        p_max: (v,) p by the largest statistic of all columns, if labels were permuted.
        survives: (v,) whether q is at most alpha.
        permutations: How many relabellings were compared, 0 for none.
        notes: What has to be known: power, lengths, what was not tested and why.
        calibration: How often shuffled labels found anything; None until `calibrate` looks.
        scans: The names of the folders of the scans, as far as they are stored.
        trial: The prompts' own values, to test again with other labels; None after loading.
        stored: Layer -> (w,) the differences of the mean vectors, of a contrast that was loaded.

    Examples:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> rows = [{"prompt": f"{n} {w}", "condition": w} for w in ("is", "was") for n in "ABC"]
        >>> options = torchfmri.ScanOptions(per=None, layers="*.mlp")
        >>> done = torchfmri.scan_dataset(model, tokenizer, rows, "c.fmri", 1, options=options)
        >>> contrast = torchfmri.load("c.fmri").contrast("is", "was", level="layer")
        >>> contrast.question, len(contrast), contrast.n_a.tolist()
        ('is - was', 5, [3, 3, 3, 3, 3])
    """

    question: str
    conditions: tuple[str, ...]
    weights: Doubles
    test: str
    alpha: float
    height_control: str | None
    two_sided: bool
    metric: str
    level: str
    tokens: str
    model: str
    prompts: Mapping[str, tuple[str, ...]]
    columns: PromptColumns
    n_a: NDArray[np.int64]
    n_b: NDArray[np.int64]
    effect: Doubles
    g: Doubles
    ci_low: Doubles
    ci_high: Doubles
    statistic: Doubles
    dof: Doubles
    p: Doubles
    q: Doubles
    survives: NDArray[np.bool_]
    dof_num: int | None = None
    p_max: Doubles | None = None
    permutations: int = 0
    notes: tuple[str, ...] = ()
    calibration: Calibration | None = None
    scans: tuple[str, ...] = ()
    trial: ContrastTrial | Refit | None = None
    stored: Mapping[str, Doubles] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def is_f(self) -> bool:
        """Whether it is an F-test, of several contrasts at once."""
        return self.test.endswith("F")

    @property
    def t(self) -> Doubles:
        """(v,) t; nan for an F-test, whose statistic is `f`."""
        return np.full(len(self), np.nan) if self.is_f else self.statistic

    @property
    def f(self) -> Doubles:
        """(v,) F; nan for a t-test, whose statistic is `t`."""
        return self.statistic if self.is_f else np.full(len(self), np.nan)

    # -- tables ------------------------------------------------------------------------------

    @property
    def headings(self) -> tuple[str, ...]:
        """The columns of the table: those that this kind of test has."""
        sides = ("n",) if self.is_f or self.test.startswith("GLM") else ("n_a", "n_b")
        size = ("effect",) if self.is_f else ("effect", "g", "ci_low", "ci_high")
        statistic = ("f", "dof_num", "dof") if self.is_f else ("t", "dof")
        label = () if self.columns.label is None else ("label",)
        first = ("layer", "module", "kind", "head", "unit", *label)
        return (*first, *sides, *size, *statistic, "p", "q", "survives")

    def peaks(self, number: int | None = _PEAKS, layers: str = "*") -> list[Peak]:
        """Return the rows of the table, the smallest p first; without p, by size of g or effect.

        Args:
            number: How many; None for all.
            layers: A pattern that their layers match.

        Raises:
            LayerNotFoundError: No layer matches.
        """
        return [self.row(index) for index in self.ranked(number, layers)]

    def ranked(self, number: int | None = _PEAKS, layers: str = "*") -> list[int]:
        """Return the places of the peaks in the arrays; see `peaks`."""
        own = list(dict.fromkeys(self.columns.layer.tolist()))
        if number is not None:
            check_number("number", number, 0, "how many peaks, such as 20")
        found = match_names(layers, own) or stored_layers(layers, own, None)
        if not found:
            raise LayerNotFoundError(layers, nearest_names(layers, own), len(own), "scan.layers")
        size = np.nan_to_num(np.abs(np.where(np.isnan(self.g), self.effect, self.g)), nan=-1.0)
        order = np.lexsort(
            (-size, -np.nan_to_num(np.abs(self.statistic)), np.nan_to_num(self.p, nan=2.0))
        )
        order = order[np.isin(self.columns.layer[order], np.array(found, object))]
        return [int(index) for index in order[:number]]

    def row(self, index: int) -> Peak:
        """Return one row of the table."""
        columns, head = self.columns, int(self.columns.head[index])
        kind = str(columns.kind[index])
        n_a, n_b = int(self.n_a[index]), int(self.n_b[index])
        has_sides = "n_a" in self.headings
        return Peak(
            layer=str(columns.layer[index]),
            module=str(columns.module[index]),
            kind=kind,
            head=head if head >= 0 else None,
            unit=None if kind == "layer" else int(columns.start[index]),
            n=n_a + n_b,
            n_a=n_a if has_sides else None,
            n_b=n_b if has_sides else None,
            dof_num=self.dof_num,
            survives=bool(self.survives[index]),
            label="" if columns.label is None else str(columns.label[index]),
            **{name: float(getattr(self, name)[index]) for name in FLOATS},
        )

    def tidy(self, places: Iterable[int]) -> list[dict[str, Any]]:
        """Return rows of the table as mappings, for JSON: None stands for what is not finite."""
        rows = (self.row(place)._asdict() for place in places)
        return [{name: finite_or_none(row[name]) for name in self.headings} for row in rows]

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the whole table, tidy: a row per column of the contrast, in model order.

        Raises:
            InspectionError: pandas is not installed.
        """
        return frame_of(self)

    def export(self, path: str | PathLike[str]) -> None:
        """Write the whole table: `.csv`, `.parquet` or `.json`, as the ending says.

        Raises:
            InspectionError: The ending is none of these, or a package is missing.
        """
        export_table(self, check_file("path", path))

    def table(self, number: int = _PEAKS, width: int | None = None) -> str:
        """Return the peaks as text, with what has to be known below.

        Args:
            number: How many peaks.
            width: In characters; that of the terminal by default.
        """
        return self.grid(number).text(width)

    def grid(self, number: int = _PEAKS) -> Grid:
        """Return the peaks, for terminals and pages."""
        return grid_of(self, self.ranked(number))

    @property
    def summary(self) -> str:
        """The question and the answer in a sentence or two."""
        groups = " and ".join(
            f"{plural(len(self.prompts[each]), 'prompt')} of {each!r}" for each in self.conditions
        )
        if self.test.startswith("GLM"):
            groups = plural(len(self.prompts[self.conditions[0]]), "prompt")
        of = f"{_NAMES.get(self.metric, self.metric)} by {self.level}, {self.tokens}"
        tested = int((~np.isnan(self.p)).sum())
        if not tested:
            return f"{self.question}: {of}; {groups}; effects only"
        side = "" if self.two_sided or self.is_f else "one-sided "
        said = f"{self.question}: {of}; {groups}; {side}{self.test} over prompts"
        control = {
            "fdr": "false discovery rate",
            "bonferroni": "family-wise error by Bonferroni",
            "max": "family-wise error by the largest statistic",
            "fpr": "error of each test, uncorrected",
        }.get(str(self.height_control))
        if control is None:
            return f"{said}; no threshold"
        return (
            f"{said}; {int(self.survives.sum()):,} of {tested:,} survive at {self.alpha:g} "
            f"({control})"
        )

    def __repr__(self) -> str:
        return f"<Contrast: {printable(self.summary)}>"

    def _repr_html_(self) -> str:
        return self.grid().html()

    # -- directions ----------------------------------------------------------------------------

    @cached_property
    def differences(self) -> Mapping[str, Doubles]:
        """Layer -> (w,) the difference of the conditions' mean vectors, read from the scan now.

        Raises:
            InspectionError: There are no mean vectors for these tokens; the message says why.
        """
        if self.is_f:
            raise InspectionError(
                f"An F-test asks several things at once ({self.question}), so there is no single "
                "direction. Make a contrast of one of them, such as "
                f"scan.contrast({self.question.split('; ')[0]!r}, ...)."
            )
        if self.trial is not None:
            return self.trial.differences()
        if not self.stored:
            raise InspectionError(
                "This contrast was saved without mean vectors. Compute it again from its scan."
            )
        return self.stored

    def direction(self, layer: str) -> Direction:
        """Return the difference of a layer's mean vectors, with random directions as its control.

        Raises:
            LayerNotFoundError: There is no mean vector of such a layer.
            InspectionError: There are no mean vectors for these tokens; the message says why.
        """
        known = list(self.differences)
        found = [layer] if layer in known else stored_layers(layer, known, None)
        if len(found) != 1:
            raise LayerNotFoundError(layer, nearest_names(layer, known), len(known), "scan.layers")
        (layer,) = found
        vector = self.differences[layer]
        lacking = int((~np.isfinite(vector)).sum())
        if lacking:
            raise InspectionError(
                f"The mean vectors of {layer!r} are not finite in {lacking} of {len(vector)} units "
                "for some prompts, so their difference is not a direction. Look at "
                "scan[0].vectors, and leave those prompts out."
            )
        return Direction(layer, vector, self.question, self.tokens)

    # -- calibration, pictures, files ------------------------------------------------------------

    def calibrate(self, draws: int = 200, seed: int = 0) -> Contrast:
        """Return the same contrast with its calibration: how often shuffled labels find anything.

        The labels of the prompts are shuffled, or exchanged within pairs, and the whole path is
        run again, `draws` times. A test that is right finds something in a share of alpha of them.

        Raises:
            InspectionError: The contrast was loaded, nothing was tested, or many tests are
                uncorrected.
        """
        check_number("draws", draws, 1, "how many relabellings, such as 200")
        tests, why = int((~np.isnan(self.p)).sum()), ""
        if not tests:
            why = "this contrast has no p-values. Compare at least two prompts of each condition."
        elif self.height_control is None:
            why = "this contrast has no threshold. Choose height_control='fdr'."
        elif self.trial is None:
            why = (
                "this contrast was loaded from a file, and the prompts' own values are in the "
                "scan. Compute it from there."
            )
        elif self.height_control == "fpr" and tests > 1:
            why = (
                f"height_control='fpr' bounds the error of each of {tests:,} tests, so some find "
                "something in almost every relabelling. Choose 'fdr', 'bonferroni' or 'max'."
            )
        if why or self.trial is None:
            raise InspectionError(f"There is nothing to calibrate: {why}")
        path = f"{self.test} by {self.level}, {self.height_control}"
        found = self.trial.calibrate(draws, seed)
        calibration = Calibration(path=path, draws=draws, found=found, alpha=self.alpha)
        return replace(self, calibration=calibration)

    def plot_contrast(self, *, ax: Axes | None = None) -> Axes:
        """Draw the map: kinds of layers down, depth across; colour is g, what survives is outlined.

        Opacity grows with the size of the statistic. A layer's voxels stand above each other, the
        first one on top. Needs the extra `plots`.

        Args:
            ax: Where to draw.
        """
        return plot_map(self, ax)

    def report(self, number: int = _PEAKS) -> ContrastReport:
        """Return question, design, map, peaks and calibration as one page."""
        check_number("number", number, 0, "how many peaks, such as 20")
        return ContrastReport(self, number)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the contrast into one file, `NAME.contrast`; `torchfmri.load_contrast` reads it.

        Raises:
            OSError: The disk is full, or the like.
        """
        write_contrast(self, check_file("path", path))
