"""One row of the table of a contrast; `Contrast.peaks` returns a list of these.

`Peak` is public. Its fields are also the headings of CSV, Parquet and JSON exports: new ones go to
the end, none may be renamed. How a row is computed stands in `record`.
"""

from __future__ import annotations

from typing import NamedTuple


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
