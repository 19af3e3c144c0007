"""The command `torchfmri replay`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from torchfmri._incidents import replay
from torchfmri._model import FORM, load_subject
from torchfmri.exceptions import InspectionError


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `torchfmri replay`."""
    parser.add_argument(
        "folder", type=Path, help="an incident that a Monitor wrote, or a folder of several"
    )
    parser.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="which process to replay (default: the one that has the origin)",
    )
    parser.add_argument(
        "--factory",
        metavar="MODULE:FACTORY",
        help=f"{FORM}, which returns (model, data, loss); the data is not used and may be None, "
        "the batch of the incident is. Without it the finding is printed as it was written",
    )


def run(options: Namespace) -> tuple[dict[str, Any], str, int]:
    """Run the step again, and return the result as data, as text, and as an exit code."""
    subject = load_subject(options.factory, needs_data=False) if options.factory else None
    if subject is not None:
        print(
            f"torchfmri replay: {type(subject.model).__name__} of {options.factory}",
            file=sys.stderr,
            flush=True,
        )
    try:
        outcome = replay(options.folder, subject, options.rank)
    except InspectionError:
        raise
    except Exception as error:  # the model's own: it could not be done
        raise InspectionError(f"The model raised {type(error).__name__}: {error}") from error
    return outcome.to_dict(), outcome.text(), 1
