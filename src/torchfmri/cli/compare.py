"""The command `torchfmri compare`: two settings of a model, two recordings, two training runs.

`_compare` does the work. Options, the keys of `--json` and the exit code (1 if the sides differ)
are public.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from torchfmri._arguments import check_file
from torchfmri._compare import SETTINGS, Run, compare, parse_settings, run_with
from torchfmri._model import CHOICES, FORM
from torchfmri.cli.options import CommandOptions, Result, say, subject_of, users_code
from torchfmri.exceptions import InspectionError

_PROMPTS = ("The capital of France is Paris.", "Once upon a time there was a little girl.")


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri compare`."""
    text = (
        "two of: the folder of a training run, a saved history, inspection or scan, a folder of "
        f"exported hidden states; or {FORM}, which returns (model, data, loss)"
    )
    parser.argument("sides", nargs="*", metavar="SIDE", help=text)
    parser.argument("--model", help=f"compare two settings of a model: {CHOICES}")
    known = ", ".join(f"{name}=" for name in SETTINGS)
    for side in ("a", "b"):
        text = f"a setting of side {side}: {known}"
        parser.several(f"--{side}", text, "NAME=VALUE", default=[])
    parser.several("--prompt", "what the model reads", "TEXT")
    text = "relative difference to allow (default: measured)"
    parser.text("--tolerance", text, "X", type=float)
    parser.text("--picture", "draw where they differ into this file", "FILE")


def run(options: Namespace) -> Result:
    """Compare, and return the result as data, as text, and as an exit code."""
    if options.picture:
        check_file("--picture", options.picture)
    a, b, tokenizer = _sides(options) if options.model is None else _settings(options)
    with users_code("The model"):
        found = compare(a, b, tolerance=options.tolerance, tokenizer=tokenizer)
    if options.picture:
        found.draw(options.picture)
    return found.to_dict(), found.text(), 0 if found.agree else 1


def _settings(options: Namespace) -> tuple[Run, Run, Any]:
    if options.sides:
        raise InspectionError(
            f"{options.sides[0]!r} and --model were both given: compare two settings of a "
            "model, or two sides."
        )
    if not options.a and not options.b:
        raise InspectionError("--model needs a setting, such as --a attn=eager --b attn=sdpa.")
    settings = [parse_settings(each) for each in (options.a, options.b)]
    prompts = options.prompt or list(_PROMPTS)
    say("compare", options.model)
    (a, tokenizer), (b, _) = (run_with(options.model, prompts, each) for each in settings)
    return a, b, tokenizer


def _sides(options: Namespace) -> tuple[Any, Any, None]:
    if len(options.sides) != 2:
        raise InspectionError(
            f"compare takes two sides, not {len(options.sides)}: two folders or files, or --model "
            "with --a and --b."
        )
    for name in ("a", "b", "prompt"):
        if getattr(options, name):
            raise InspectionError(f"--{name} needs --model; the sides have their own settings.")
    a, b = (_side(each) for each in options.sides)
    return a, b, None


def _side(given: str) -> Any:
    if Path(given).exists() or ":" not in given:
        return Path(given)
    subject = subject_of(given)
    return Run(subject.model, subject.data, loss=subject.loss)
