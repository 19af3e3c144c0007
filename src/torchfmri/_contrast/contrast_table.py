"""The table of a contrast: as a DataFrame, as a file, and as text for terminals and pages.

The methods of `Contrast` call these functions. All three tables have the columns of
`Contrast.headings`. `Peak`, one row, is public, and its fields are the headings of CSV, Parquet and
JSON exports: new ones go to the end, none may be renamed. In JSON, None stands for what is not
finite, because JSON has no NaN. Which columns the text shows may change freely.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchfmri._arguments import from_extra
from torchfmri._files import new_file
from torchfmri._text import Column, Grid, number_text, probability_text
from torchfmri.exceptions import InspectionError

if TYPE_CHECKING:
    import pandas

    from torchfmri._contrast.record import Contrast

FLOATS = ("effect", "g", "ci_low", "ci_high", "t", "f", "dof", "p", "q")
"""The columns of the table that are numbers with a fraction."""


class Peak(NamedTuple):
    """One row of the table of a contrast.

    Attributes:
        layer: Its layer.
        module: The type of the layer's module.
        kind: "layer", "units", "head", "expert", "unit" or "feature".
        head: The number of the head or expert; None for others.
        unit: The first unit; the number of a feature; None for a layer.
        n: Prompts in all.
        n_a: Prompts on the positive side; None for an F-test and a linear model, without sides.
        n_b: Prompts on the negative side; None for the same tests.
        effect: The difference of the means, in the units of the metric.
        g: Hedges g; nan for an F-test.
        ci_low: Where its interval begins.
        ci_high: Where it ends.
        t: The statistic of a t-test; nan for an F-test.
        f: The statistic of an F-test; nan for a t-test.
        dof_num: The degrees of freedom of its numerator; None for a t-test.
        dof: The degrees of freedom of t; of F, those of the denominator.
        p: The p-value.
        q: The p-value adjusted as `height_control` says.
        survives: Whether q is at most alpha.
        label: The text that the user gave for a feature; "" for all else.

    Examples:
        >>> import torchfmri
        >>> torchfmri.Peak._fields[:5]
        ('layer', 'module', 'kind', 'head', 'unit')
    """

    layer: str
    module: str
    kind: str
    head: int | None
    unit: int | None
    n: int
    n_a: int | None
    n_b: int | None
    effect: float
    g: float
    ci_low: float
    ci_high: float
    t: float
    f: float
    dof_num: int | None
    dof: float
    p: float
    q: float
    survives: bool
    label: str = ""


def frame_of(contrast: Contrast) -> pandas.DataFrame:
    """Return the whole table as a frame; see `Contrast.to_dataframe`.

    Raises:
        InspectionError: pandas is not installed.
    """
    without = "Without it, contrast.peaks(None) gives the same rows."
    with from_extra("A DataFrame needs pandas", "tables", without):
        import pandas
    columns, own = contrast.columns, (*FLOATS, "n_a", "n_b", "dof_num", "survives")
    data = {**vars(columns), **{name: getattr(contrast, name) for name in own}}
    data["n"] = contrast.n_a + contrast.n_b
    data["head"] = pandas.Series(columns.head, dtype="Int64").where(columns.head >= 0)
    data["unit"] = pandas.Series(columns.start, dtype="Int64").where(columns.kind != "layer")
    return pandas.DataFrame({name: data[name] for name in contrast.headings})


def export_table(contrast: Contrast, target: Path) -> None:
    """Write the whole table; see `Contrast.export`.

    Raises:
        InspectionError: The ending is none of these, or a package is missing.
    """
    if target.suffix == ".json":
        rows = contrast.tidy(range(len(contrast)))
        with new_file(target) as new:
            new.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
        return
    if target.suffix not in (".csv", ".parquet"):
        raise InspectionError(
            f"Cannot export to {target.name!r}: the ending is one of .csv, .parquet, .json. To "
            "keep the contrast itself, use contrast.save."
        )
    frame = frame_of(contrast)
    with new_file(target) as new:
        if target.suffix == ".csv":
            frame.to_csv(new, index=False)
        else:
            with from_extra("Parquet needs pyarrow", "parquet"):
                frame.to_parquet(new, index=False)


def grid_of(contrast: Contrast, places: list[int]) -> Grid:
    """Return the rows at these places as a table of text."""
    peaks, names = [contrast.row(each) for each in places], contrast.columns[places].titles
    columns = [
        Column("effect", [number_text(peak.effect) for peak in peaks], 4),
        *_size_columns(contrast, peaks),
        Column("p", [probability_text(peak.p) for peak in peaks], 3),
        Column("q", [probability_text(peak.q) for peak in peaks], 7),
        Column("survives", ["yes" if peak.survives else "" for peak in peaks], 8),
    ]
    kept = frozenset(row for row, peak in enumerate(peaks) if peak.survives)
    return Grid(
        title=contrast.summary,
        heading=contrast.level,
        names=names,
        columns=columns,
        notes=contrast.notes,
        emphasised=kept,
    )


def _size_columns(contrast: Contrast, peaks: list[Peak]) -> list[Column]:
    """Return what the table says of a statistic: t with g and its interval, or F with its dof."""
    if contrast.is_f:
        freedom = [f"{peak.dof_num}, {number_text(peak.dof)}" for peak in peaks]
        return [
            Column("f", [number_text(peak.f) for peak in peaks], 6),
            Column("dof", freedom, 2),
        ]
    between = [_interval(peak.ci_low, peak.ci_high) for peak in peaks]
    return [
        Column("g", [number_text(peak.g) for peak in peaks], 5),
        Column(f"{100 * (1 - contrast.alpha):g}% interval of g", between, 2),
        Column("t", [number_text(peak.t) for peak in peaks], 6),
    ]


def finite_or_none(value: Any) -> Any:
    """Return the value, None for a float that is not finite."""
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _interval(low: float, high: float) -> str:
    return "-" if np.isnan(low) else f"{low:.2f} to {high:.2f}"
