"""The command `torchfmri verify`: prove the backward pass of every layer, or name the wrong one.

`cli/commands` calls `add_arguments` and `run`; the work is `verify_gradients` of `_verify`.
Options, the keys of `--json` and the exit code (1 if a layer is wrong) are public.
"""

from __future__ import annotations

from argparse import Namespace

from torchfmri._verify import verify_gradients
from torchfmri.cli.options import CommandOptions, Result, say, subject_of, users_code


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri verify`."""
    parser.subject()
    parser.several("--layers", "verify these layers only, for example '*.mlp'")
    parser.several("--expected", "layers whose gradient differs on purpose")
    parser.number("--directions", 2, "random directions for each input and parameter")
    parser.switch("--second", "verify second derivatives too")


def run(options: Namespace) -> Result:
    """Verify, and return the result as data, as text, and as an exit code."""
    subject = subject_of(options.subject)
    say("verify", f"{type(subject.model).__name__} of {options.subject}")
    with users_code("The model"):
        verification = verify_gradients(
            subject.model,
            subject.data,
            subject.loss,
            options.layers or "*",
            expected=options.expected,
            directions=options.directions,
            second=options.second,
        )
    return verification.to_dict(), verification.table(), 0 if verification.ok else 1
