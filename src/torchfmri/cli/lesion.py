"""The command `torchfmri lesion`: take parts of a model out and see what its answers lose.

`run` reads the prompts and calls `lesion` of `_lesion`, which can go on after an interruption. The
model is loaded in float32, because effects of single heads are small. Options, the lines of
`--prompts` and the keys of `--json` are public.
"""

from __future__ import annotations

from argparse import Namespace

import torch

from torchfmri._files import parse, read_regular
from torchfmri._lesion import EDITS, KINDS, METHODS, METRICS, lesion
from torchfmri._model import load_model
from torchfmri._text import Progress
from torchfmri.cli.options import LOG_SECONDS, CommandOptions, Result, say
from torchfmri.exceptions import FileFormatError, InspectionError

_LIMIT = 64 << 20


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri lesion`."""
    what = parser.one_of()
    what.text("--prompt", "one prompt, with --answer")
    text = 'several: lines such as {"prompt": "...", "answer": " ...", "foil": " ..."}'
    what.path("--prompts", text, "FILE.jsonl")
    parser.text("--answer", "the answer, with the space before it: ' Paris'")
    parser.text("--foil", "another answer, for logit_difference")
    parser.model()
    text = (
        f"what to lesion: {', '.join(KINDS)}, or a place such as 'L3H*' (default: heads and mlps)"
    )
    parser.several("--of", text, "WHAT")
    text = "what is measured (default: surprisal, or logit_difference with a foil)"
    parser.choice("--metric", METRICS, text)
    parser.choice("--edit", EDITS, "what replaces the lesioned value", "zero")
    text = "attribution estimates all lesions from one backward pass"
    parser.choice("--method", METHODS, text, "lesion")
    parser.number("--batch", 32, "lesions in one forward pass")
    parser.number("--top", 12, "rows of the table")
    text = "save the map here; after an interruption the same command resumes"
    parser.path("--out", text, "FILE.json")
    parser.path("--picture", "draw the map into this file")
    parser.device()


def run(options: Namespace) -> Result:
    """Lesion, and return the result as data, as text, and as an exit code."""
    rows = _rows(options)
    foils = [each["foil"] for each in rows if "foil" in each]
    if foils and len(foils) < len(rows):
        raise InspectionError(f"{len(foils)} of {len(rows)} prompts have a foil. Give all or none.")
    say("lesion", f"loading {options.model}")
    named = load_model(options.model, dtype=torch.float32, device=options.device)
    with Progress("lesion", 1, log_seconds=LOG_SECONDS) as progress:
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
    """Return the prompts with their answers."""
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
