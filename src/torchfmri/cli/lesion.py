"""The command `torchfmri lesion`: take parts of a model out and see what its answers lose."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch

from torchfmri._files import parse, read_regular
from torchfmri._lesion import EDITS, KINDS, METHODS, METRICS, lesion
from torchfmri._model import CHOICES, load_model
from torchfmri._text import Progress
from torchfmri.exceptions import FileFormatError, InspectionError
from torchfmri.visualization import check_picture

Result = tuple[dict[str, Any], str, int]
_LIMIT = 64 << 20
_LOG_SECONDS = 30.0


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `torchfmri lesion`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="one prompt, with --answer")
    what.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help='several: lines such as {"prompt": "...", "answer": " ...", "foil": " ..."}',
    )
    parser.add_argument("--answer", metavar="TEXT", help="with the space before it: ' Paris'")
    parser.add_argument("--foil", metavar="TEXT", help="another answer, for logit_difference")
    parser.add_argument("--model", default="tiny", help=f"{CHOICES} (default: %(default)s)")
    parser.add_argument(
        "--of",
        action="append",
        metavar="WHAT",
        help=f"{', '.join(KINDS)}, or a place such as 'L3H*'; may be repeated (default: heads and "
        "mlps)",
    )
    parser.add_argument("--metric", choices=METRICS, help="by default logit_difference with a foil")
    parser.add_argument("--edit", choices=EDITS, default="zero", help="(default: %(default)s)")
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="lesion",
        help="attribution estimates all lesions from one backward pass (default: %(default)s)",
    )
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="lesions at once")
    parser.add_argument("--top", type=int, default=12, metavar="N", help="lesions in the table")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        help="keep the map; run the same command again to go on after an interruption",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the map")
    parser.add_argument("--device", help="such as cuda; by default where the model is loaded")


def run(options: Namespace) -> Result:
    """Lesion, and return the result as data, as text, and as an exit code."""
    rows = _rows(options)
    if options.picture is not None:
        check_picture("--picture", options.picture)
    foils = [each["foil"] for each in rows if "foil" in each]
    if foils and len(foils) < len(rows):
        raise InspectionError(f"{len(foils)} of {len(rows)} prompts have a foil. Give all or none.")
    print(f"torchfmri lesion: loading {options.model}", file=sys.stderr, flush=True)
    named = load_model(options.model, dtype=torch.float32, device=options.device)
    with Progress("lesion", 1, log_seconds=_LOG_SECONDS) as progress:
        found = lesion(
            named.model,
            named.tokenizer,
            [each["prompt"] for each in rows],
            [each["answer"] for each in rows],
            foils or None,
            of=options.of or ("heads", "mlps"),
            metric=options.metric or ("logit_difference" if foils else "surprisal"),
            edit=options.edit,
            method=options.method,
            batch=options.batch,
            path=options.out,
            on_step=progress.at,
        )
    lines = [found.table(options.top)]
    if options.picture is not None:
        found.draw(options.picture)
        lines += ["", f"wrote {options.picture}"]
    return found.to_dict(), "\n".join(lines), 0


def _rows(options: Namespace) -> list[dict[str, str]]:
    """The prompts with their answers."""
    if options.prompts is None:
        if options.answer is None:
            raise InspectionError("--prompt needs --answer: that is what is measured.")
        row = {"prompt": options.prompt, "answer": options.answer}
        return [row | ({} if options.foil is None else {"foil": options.foil})]
    for name in ("answer", "foil"):
        if getattr(options, name) is not None:
            raise InspectionError(f"--{name} does nothing with --prompts: the file has its own.")
    name = str(options.prompts)
    text = read_regular(options.prompts, _LIMIT)
    rows = [parse(line, name) for line in text.splitlines() if line.strip()]
    for number, row in enumerate(rows, start=1):
        texts = isinstance(row, dict) and all(
            isinstance(row.get(k), str) for k in ("prompt", "answer")
        )
        if not texts or not isinstance(row.get("foil", ""), str):
            wanted = '{"prompt": "...", "answer": " ..."}'
            raise FileFormatError(name, f"line {number} is not of the form {wanted}")
    if not rows:
        raise FileFormatError(name, "it has no lines")
    return rows
