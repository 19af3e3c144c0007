"""The command `torchfmri advise`: try what may save memory or time, and report what it saves.

`cli/commands` calls `add_arguments` and `run`; the work is `advise` of `_cost`. Options, the keys
of `--json` and the exit code are public.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from torchfmri._cost import advise
from torchfmri._model import nearest_names
from torchfmri.cli.options import CommandOptions, Result, say, subject_of
from torchfmri.exceptions import InspectionError


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri advise`."""
    parser.subject()
    parser.number("--rounds", 5, "how often to measure time")
    parser.text("--optimizer", "a class of torch.optim, for example AdamW", "NAME")
    parser.number("--combine", 6, "largest number of combinations to try")


def run(options: Namespace) -> Result:
    """Try everything, and return the result as data, as text, and as an exit code."""
    make = None
    if options.optimizer:
        make = _optimizers().get(options.optimizer)
        if make is None:
            near = ", ".join(nearest_names(options.optimizer, list(_optimizers())))
            raise InspectionError(
                f"There is no torch.optim.{options.optimizer}. Nearest optimizers: {near}."
            )
    subject = subject_of(options.subject)
    found = advise(
        subject.model,
        subject.data,
        subject.loss,
        make,
        rounds=options.rounds,
        combine=options.combine,
        progress=lambda text: say("advise", text),
    )
    return found.to_dict(), found.table(), 0


def _optimizers() -> dict[str, Any]:
    """Return name -> class of the optimizers in torch.optim."""
    base = torch.optim.Optimizer
    return {
        name: each
        for name, each in vars(torch.optim).items()
        if isinstance(each, type) and issubclass(each, base) and each is not base
    }
