"""The command `torchfmri contrast`: what differs between the conditions of a scan, or two scans.

`run` translates the options into the arguments of `Scan.contrast` or `torchfmri.contrast`, which do
the work. Options, the keys of `--json` and the exit code are public. A new form of `--tokens`
belongs in `read_tokens`, in `_TOKENS` and in `_scan/prompts/token_choice`.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchfmri._arguments import check_number
from torchfmri._contrast import Contrast
from torchfmri._scan import Scan, condition_of, contrast, load
from torchfmri.cli.options import CommandOptions, Result
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import save_figure

_SAME = ("level", "alpha", "test", "permutations", "seed")
"""Options that `contrast` calls by the same names."""
_WORDS = ("all", "prompt", "generated", "last", "prompt_last")
_TOKENS = (
    f"{', '.join(_WORDS)}, a position, FIRST:END, field:NAME, role:NAME, chars:FIRST:END or "
    "match:REGEX"
)


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri contrast`."""
    parser.argument("scan", type=Path, help="a scan: NAME.fmri")
    parser.path("with_scan", "another scan to compare with", "OTHER", nargs="?")
    parser.argument(
        "--by", default="condition", help="field with the condition (default: %(default)s)"
    )
    text = "conditions to compare; several make an F-test (default: the only two)"
    parser.argument("--contrast", action="append", metavar="'A - B'", help=text)
    text = "field that pairs prompts; without a value, with OTHER: the same prompts in two models"
    parser.text("--paired", text, "FIELD", nargs="?", const=True)
    values = parser.group("values")
    metrics = ("activation", "signed", "gradient", "learning_cost", "delta_sc")
    text = "values to compare (default: activation; signed for --level unit)"
    values.choice("--metric", metrics, text)
    levels = ("layer", "voxel", "head", "unit", "feature")
    values.choice("--level", levels, "what to compare", "voxel")
    values.several("--layers", "layers to compare")
    text = f"tokens to average over: {_TOKENS} (default: all)"
    values.text("--tokens", text, "WHICH", default="all")
    _add_test(parser.group("test"))
    files = parser.group("files")
    files.path("--out", "save the contrast", "NAME.contrast")
    files.path("--table", "write all rows: .csv, .parquet or .json")
    files.path("--picture", "draw the map into this file")
    files.path("--report", "write the report", "FILE.html")


def _add_test(group: CommandOptions) -> None:
    group.argument("--alpha", type=float, default=0.05, help="threshold (default: 0.05)")
    controls = ("fdr", "bonferroni", "max", "fpr", "none")
    group.choice("--height-control", controls, "the error rate that alpha limits", "fdr")
    group.switch("--one-sided", "count only A above B")
    group.choice("--test", ("t", "permutation"), "how p is computed", "t")
    group.number("--permutations", None, "number of relabellings (default: 1000)")
    group.number("--seed", 0, "seed of relabellings")
    text = "also shuffle the labels N times and count how often anything is found"
    group.number("--calibrate", 0, text)
    group.number("--peaks", 20, "rows to print")


def run(options: Namespace) -> Result:
    """Compare, and return the result as data, as text, and as an exit code."""
    check_number("--peaks", options.peaks, 0, "how many rows to print, such as 20")
    found = _compare(options)
    if options.calibrate:
        found = found.calibrate(options.calibrate, options.seed)
    text = [found.table(options.peaks)]
    if found.calibration is not None:
        text.append(f"calibration: {found.calibration}")
    text += [f"wrote {path}" for path in _write(options, found)]
    data = {
        "question": found.question,
        "summary": found.summary,
        "survive": int(found.survives.sum()),
        "tested": int((found.p == found.p).sum()),
        "peaks": found.tidy(found.ranked(options.peaks)),
        "notes": list(found.notes),
        "calibration": found.calibration and found.calibration._asdict(),
    }
    return data, "\n".join(text), 0


def _compare(options: Namespace) -> Contrast:
    metric = options.metric or ("signed" if options.level == "unit" else "activation")
    settings: dict[str, Any] = {
        "metric": metric,
        **{name: getattr(options, name) for name in _SAME},
        "layers": options.layers or "*",
        "tokens": read_tokens(options.tokens),
        "height_control": None if options.height_control == "none" else options.height_control,
        "two_sided": not options.one_sided,
    }
    scan = load(options.scan)
    if options.with_scan is not None:
        if options.contrast:
            raise InspectionError(
                "--contrast names conditions of one scan; two scans are compared whole. Leave it "
                "out."
            )
        return contrast(scan, load(options.with_scan), paired=options.paired or False, **settings)
    if options.paired is True:
        raise InspectionError("--paired needs the field that pairs the prompts: --paired pair_id.")
    several = options.contrast or [_only_contrast(scan, options.by)]
    definition = several[0] if len(several) == 1 else several
    return scan.contrast(definition, by=options.by, paired=options.paired, **settings)


def _only_contrast(scan: Scan, by: str) -> Mapping[str, float]:
    """Return the only two conditions of a scan, the first one against the second.

    Raises:
        InspectionError: There are not two.
    """
    found: dict[str, int] = {}
    for sequence in scan:
        value = condition_of(sequence, by)
        if value is not None:
            found[value] = found.get(value, 0) + 1
    if len(found) != 2:
        said = (
            ", ".join(f"{name!r} ({count})" for name, count in list(found.items())[:20]) or "none"
        )
        fields = ", ".join(map(repr, scan[0].fields)) if len(scan) else ""
        raise InspectionError(
            f"The conditions in {by!r} are {said}. Say which to compare: --contrast 'A - B'"
            + (f", or another field: --by with one of {fields}." if fields else ".")
        )
    first, second = found
    return {first: 1.0, second: -1.0}


def read_tokens(text: str) -> Any:
    """Return what `--tokens` says, as `Scan.contrast` takes it.

    Examples:
        >>> read_tokens("2:5"), read_tokens("-1"), read_tokens("role:user")
        ((2, 5), -1, {'role': 'user'})
    """
    if text in _WORDS:
        return text
    kind, _, rest = text.partition(":")
    if kind in ("field", "role", "match") and rest:
        return {kind: rest}
    span = re.fullmatch(r"(?:(chars):)?(-?\d+):(-?\d+)", text)
    if span:
        places = (int(span[2]), int(span[3]))
        return {"characters": places} if span[1] else places
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    raise InspectionError(f"--tokens {text!r}: give {_TOKENS}.")


def _write(options: Namespace, found: Contrast) -> list[Path]:
    if options.out is not None:
        found.save(options.out)
    if options.table is not None:
        found.export(options.table)
    if options.picture is not None:
        save_figure(found.plot_contrast(), options.picture, dpi=150)
    if options.report is not None:
        found.report(options.peaks).save_as_html(options.report)
    files = (options.out, options.table, options.picture, options.report)
    return [path for path in files if path is not None]
