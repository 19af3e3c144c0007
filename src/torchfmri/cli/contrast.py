"""The command `torchfmri contrast`: what differs between the conditions of a scan."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchfmri._arguments import check_number
from torchfmri._contrast import Contrast
from torchfmri._scan import Scan, condition_of, contrast, load
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import check_picture, save_figure

Result = tuple[dict[str, Any], str, int]
_WORDS = ("all", "prompt", "generated", "last", "prompt_last")


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `torchfmri contrast`."""
    parser.add_argument("scan", type=Path, help="a scan: NAME.fmri")
    parser.add_argument(
        "with_scan", type=Path, nargs="?", metavar="OTHER", help="compare with this"
    )
    parser.add_argument("--by", default="condition", help="the field with the condition")
    parser.add_argument(
        "--contrast",
        action="append",
        metavar="'A - B'",
        help="which conditions; several make an F-test (default: the two that there are)",
    )
    parser.add_argument(
        "--paired",
        nargs="?",
        const=True,
        metavar="FIELD",
        help="the field that pairs prompts; alone, with OTHER: the same prompts of two models",
    )
    _add_values(parser)
    _add_test(parser)
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, metavar="NAME.contrast", help="keep the contrast")
    files.add_argument("--table", type=Path, metavar="FILE", help="all rows: .csv, .parquet, .json")
    files.add_argument("--picture", type=Path, metavar="FILE", help="draw the map")
    files.add_argument("--report", type=Path, metavar="FILE.html", help="write the page")


def _add_values(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("values")
    group.add_argument(
        "--metric",
        default=None,
        choices=("activation", "signed", "gradient", "learning_cost", "delta_sc"),
        help="what to compare (default: activation; signed for --level unit)",
    )
    group.add_argument(
        "--level",
        default="voxel",
        choices=("layer", "voxel", "head", "unit", "feature"),
        help="of what (default: %(default)s)",
    )
    group.add_argument(
        "--layers", action="append", metavar="PATTERN", help="which layers; may be repeated"
    )
    group.add_argument(
        "--tokens",
        default="all",
        metavar="WHICH",
        help=f"{', '.join(_WORDS)}, a position, FIRST:END, field:NAME, role:NAME, chars:FIRST:END "
        "or match:REGEX (default: all)",
    )


def _add_test(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("test")
    group.add_argument("--alpha", type=float, default=0.05, help="threshold (default: 0.05)")
    group.add_argument(
        "--height-control",
        default="fdr",
        choices=("fdr", "bonferroni", "max", "fpr", "none"),
        help="what alpha bounds (default: %(default)s)",
    )
    group.add_argument("--one-sided", action="store_true", help="only A above B counts")
    group.add_argument("--test", choices=("t", "permutation"), default="t", help="where p is from")
    group.add_argument("--permutations", type=int, metavar="N", help="relabellings (default: 1000)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of relabellings")
    group.add_argument(
        "--calibrate",
        type=int,
        default=0,
        metavar="N",
        help="also shuffle the labels N times, to see how often something is found in nothing",
    )
    group.add_argument("--peaks", type=int, default=20, metavar="N", help="rows (default: 20)")


def run(options: Namespace) -> Result:
    """Compare, and return the result as data, as text, and as an exit code."""
    if options.picture is not None:
        check_picture("--picture", options.picture)
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
        "level": options.level,
        "layers": options.layers or "*",
        "tokens": read_tokens(options.tokens),
        "alpha": options.alpha,
        "height_control": None if options.height_control == "none" else options.height_control,
        "two_sided": not options.one_sided,
        "test": options.test,
        "permutations": options.permutations,
        "seed": options.seed,
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
    """The two conditions that there are, the first one against the second.

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
    """What `--tokens` says, as `Scan.contrast` takes it.

    Example:
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
    raise InspectionError(
        f"--tokens {text!r}: give {', '.join(_WORDS)}, a position, FIRST:END, field:NAME, "
        "role:NAME, chars:FIRST:END or match:REGEX."
    )


def _write(options: Namespace, found: Contrast) -> list[Path]:
    if options.out is not None:
        found.save(options.out)
    if options.table is not None:
        found.export(options.table)
    if options.picture is not None:
        figure: Any = found.plot_contrast().figure
        save_figure(figure, options.picture, dpi=150)
    if options.report is not None:
        found.report(options.peaks).save_as_html(options.report)
    files = (options.out, options.table, options.picture, options.report)
    return [path for path in files if path is not None]
