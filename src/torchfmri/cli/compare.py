"""The command `torchfmri compare`: two settings of a model, two recordings, two training runs."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from torchfmri._arguments import check_file
from torchfmri._compare import SETTINGS, Run, compare, parse_settings, run_with
from torchfmri._model import CHOICES, FORM, load_subject
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import check_picture

_PROMPTS = ("The capital of France is Paris.", "Once upon a time there was a little girl.")


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `torchfmri compare`."""
    parser.add_argument(
        "sides",
        nargs="*",
        metavar="SIDE",
        help="two of: the folder of a training run, a saved history, inspection or scan, a folder "
        f"of exported hidden states; or {FORM}, which returns (model, data, loss)",
    )
    parser.add_argument("--model", help=f"compare two settings of a model: {CHOICES}")
    known = ", ".join(f"{name}=" for name in SETTINGS)
    for side in ("a", "b"):
        parser.add_argument(
            f"--{side}",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"a setting of side {side}: {known}; may be repeated",
        )
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="what the model reads; may be repeated"
    )
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="relative difference to allow; else measured"
    )
    parser.add_argument("--picture", metavar="FILE", help="draw where they part into this file")


def run(options: Namespace) -> tuple[dict[str, Any], str, int]:
    """Compare, and return the result as data, as text, and as an exit code."""
    if options.picture:
        check_picture("--picture", check_file("--picture", options.picture))
    if options.model is not None:
        a, b, tokenizer = _settings(options)
    else:
        a, b = _sides(options)
        tokenizer = None
    try:
        found = compare(a, b, tolerance=options.tolerance, tokenizer=tokenizer)
    except InspectionError:
        raise
    except Exception as error:  # the model's own: it could not be done, nothing was found
        raise InspectionError(f"The model raised {type(error).__name__}: {error}") from error
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
    print(f"torchfmri compare: {options.model}", file=sys.stderr, flush=True)
    (a, tokenizer), (b, _) = (run_with(options.model, prompts, each) for each in settings)
    return a, b, tokenizer


def _sides(options: Namespace) -> tuple[Any, Any]:
    if len(options.sides) != 2:
        raise InspectionError(
            f"compare takes two sides, not {len(options.sides)}: two folders or files, or --model "
            "with --a and --b."
        )
    for name in ("a", "b", "prompt"):
        if getattr(options, name):
            raise InspectionError(f"--{name} needs --model; the sides have their own settings.")
    a, b = (_side(each) for each in options.sides)
    return a, b


def _side(given: str) -> Any:
    if Path(given).exists() or ":" not in given:
        return Path(given)
    subject = load_subject(given)
    return Run(subject.model, subject.data, loss=subject.loss)
