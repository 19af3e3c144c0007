"""The command `torchfmri diagnose`: train a copy for some steps, and say what is wrong.

`run` finds the user's training, as a factory or as a script, and hands it to `_checkup`. An error
of the user's own code is reported as one, so that it is not taken for a finding. Options, the keys
of `--json` and the exit code (1 with a finding) are public.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from torchfmri._arguments import check_file, check_number
from torchfmri._checkup import diagnose, diagnose_script
from torchfmri._model import FORM, find_factory, kinds_of
from torchfmri.cli.options import CommandOptions, Result, say, users_code
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import save_figure

_PARTS = ("model", "batches", "loss", "optimizer", "step")


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri diagnose`."""
    text = f"{FORM}, which returns (model, batches, loss, optimizer); or a training script"
    parser.argument("subject", metavar="SUBJECT", help=text)
    parser.number("--steps", 25, "training steps")
    parser.text("--plot", "draw the run into this file", "FILE")


def run(options: Namespace) -> Result:
    """Diagnose, and return the result as data, as text, and as an exit code."""
    check_number("--steps", options.steps, 1, "give the number of training steps to look at")
    if options.plot:
        check_file("--plot", options.plot)  # before the model trains
    say("diagnose", options.subject)
    is_script = options.subject.endswith(".py")
    parts = {} if is_script else _parts(options.subject)
    with users_code("The training"):
        if is_script:
            diagnosis = diagnose_script(Path(options.subject), options.steps)
        else:
            diagnosis = diagnose(**parts, steps=options.steps, show=False)
    if options.plot:
        save_figure(diagnosis.plot(), options.plot, bbox_inches="tight", dpi=150)
    return diagnosis.to_dict(), diagnosis.text(), 0 if diagnosis.ok else 1


def _parts(spec: str) -> dict[str, Any]:
    """Return what a factory returned, by name."""
    make = find_factory(spec)
    with users_code(repr(spec)):
        made = make()
    if isinstance(made, Mapping):
        unknown = [name for name in made if name not in _PARTS]
        if unknown or "model" not in made:
            raise InspectionError(
                f"{spec} returned {', '.join(map(repr, made))}; diagnose takes {', '.join(_PARTS)}."
            )
        return dict(made)
    if not isinstance(made, tuple) or len(made) != 4 or not isinstance(made[0], nn.Module):
        raise InspectionError(
            f"{spec} returned {kinds_of(made)}. It should return (model, batches, loss, "
            "optimizer), or a dict with these names and, if you like, step."
        )
    return dict(zip(_PARTS, made, strict=False))
