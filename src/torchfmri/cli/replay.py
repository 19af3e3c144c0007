"""The command `torchfmri replay`: run a step again that turned NaN, and name where it began.

`run` calls `replay` of `_incidents`. With `--factory` the user's model is loaded and the step is
run; without it the stored finding is printed. The exit code is 1, because something was
found. Options, the keys of `--json` and the exit code are public.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from torchfmri._incidents import replay
from torchfmri._model import FORM
from torchfmri.cli.options import CommandOptions, Result, say, subject_of, users_code


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri replay`."""
    text = "an incident that a Monitor wrote, or a folder of several"
    parser.argument("folder", type=Path, help=text)
    text = "process to replay (default: the one with the origin)"
    parser.number("--rank", None, text)
    text = (
        f"{FORM}, which returns (model, data, loss), to run the step again on the incident's own "
        "batch: data is not used and may be None. Without a factory the stored finding is printed"
    )
    parser.text("--factory", text, "MODULE:FACTORY")


def run(options: Namespace) -> Result:
    """Run the step again, and return the result as data, as text, and as an exit code."""
    subject = subject_of(options.factory, needs_data=False) if options.factory else None
    if subject is not None:
        say("replay", f"{type(subject.model).__name__} of {options.factory}")
    with users_code("The model"):
        outcome = replay(options.folder, subject, options.rank)
    return outcome.to_dict(), outcome.text(), 1
