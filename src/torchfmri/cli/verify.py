"""The command `torchfmri verify`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from torchfmri._model import FORM, load_subject
from torchfmri._verify import verify_gradients
from torchfmri.exceptions import InspectionError


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `torchfmri verify`."""
    parser.add_argument(
        "subject", metavar="MODULE:FACTORY", help=f"{FORM}, which returns (model, data, loss)"
    )
    parser.add_argument(
        "--layers",
        action="append",
        metavar="PATTERN",
        help="verify these layers only, for example '*.mlp'; may be repeated",
    )
    parser.add_argument(
        "--expected",
        action="append",
        metavar="PATTERN",
        help="layers whose gradient is meant to be something else; may be repeated",
    )
    parser.add_argument(
        "--directions",
        type=int,
        default=2,
        metavar="N",
        help="random directions for each input and parameter (default: %(default)s)",
    )
    parser.add_argument("--second", action="store_true", help="verify second derivatives too")


def run(options: Namespace) -> tuple[dict[str, Any], str, int]:
    """Verify, and return the result as data, as text, and as an exit code."""
    subject = load_subject(options.subject)
    print(
        f"torchfmri verify: {type(subject.model).__name__} of {options.subject}",
        file=sys.stderr,
        flush=True,
    )
    try:
        verification = verify_gradients(
            subject.model,
            subject.data,
            subject.loss,
            options.layers or "*",
            expected=options.expected,
            directions=options.directions,
            second=options.second,
        )
    except InspectionError:
        raise
    except Exception as error:  # the model's own: it could not be done, nothing was found
        raise InspectionError(f"The model raised {type(error).__name__}: {error}") from error
    return verification.to_dict(), verification.table(), 0 if verification.ok else 1
