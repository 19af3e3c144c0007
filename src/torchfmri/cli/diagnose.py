"""The command `torchfmri diagnose`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from torchfmri._arguments import check_file, check_number
from torchfmri._checkup import diagnose, diagnose_script
from torchfmri._diagnosis import Diagnosis
from torchfmri._model import FORM, find_factory
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import check_picture, save_figure

_PARTS = ("model", "batches", "loss", "optimizer", "step")


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `torchfmri diagnose`."""
    parser.add_argument(
        "subject",
        metavar="SUBJECT",
        help=f"{FORM}, which returns (model, batches, loss, optimizer); or a training script",
    )
    parser.add_argument(
        "--steps", type=int, default=25, metavar="N", help="training steps (default: %(default)s)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the run into this file")


def run(options: Namespace) -> tuple[dict[str, Any], str, int]:
    """Diagnose, and return the result as data, as text, and as an exit code."""
    check_number("--steps", options.steps, 1, "give the number of training steps to look at")
    if options.plot:
        check_picture("--plot", check_file("--plot", options.plot))  # before the model trains
    print(f"torchfmri diagnose: {options.subject}", file=sys.stderr, flush=True)
    if options.subject.endswith(".py"):
        diagnosis = _user_code(lambda: diagnose_script(Path(options.subject), options.steps))
    else:
        parts = _parts(find_factory(options.subject)(), options.subject)
        diagnosis = _user_code(lambda: diagnose(**parts, steps=options.steps, show=False))
    if options.plot:
        figure: Any = diagnosis.plot().figure
        save_figure(figure, options.plot, bbox_inches="tight", dpi=150)
    return diagnosis.to_dict(), diagnosis.text(), 0 if diagnosis.ok else 1


def _user_code(act: Any) -> Diagnosis:
    try:
        found: Diagnosis = act()
    except InspectionError:
        raise
    except Exception as error:  # the user's own: it could not be done, nothing was found
        raise InspectionError(f"The training raised {type(error).__name__}: {error}") from error
    return found


def _parts(made: Any, spec: str) -> dict[str, Any]:
    """What a factory returned, by name."""
    if isinstance(made, Mapping):
        unknown = [name for name in made if name not in _PARTS]
        if unknown or "model" not in made:
            raise InspectionError(
                f"{spec} returned {', '.join(map(repr, made))}; diagnose takes {', '.join(_PARTS)}."
            )
        return dict(made)
    if not isinstance(made, tuple) or len(made) != 4 or not isinstance(made[0], nn.Module):
        found = type(made).__name__
        if isinstance(made, tuple):
            found = f"({', '.join(type(each).__name__ for each in made)})"
        raise InspectionError(
            f"{spec} returned {found}. It should return (model, batches, loss, optimizer), or a "
            "dict with these names and, if you like, step."
        )
    return dict(zip(_PARTS, made, strict=False))
