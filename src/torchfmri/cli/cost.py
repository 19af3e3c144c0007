"""The command `torchfmri cost`: the FLOPs, bytes and seconds of every layer, and how they grow.

`cli/commands` calls `add_arguments` and `run`; the work is `cost` of `_cost`. Options, the keys of
`--json` and the exit code are public.
"""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace

from torchfmri._cost import cost
from torchfmri.cli.options import CommandOptions, Result, say, subject_of
from torchfmri.exceptions import InspectionError


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri cost`."""
    parser.subject()
    parser.number("--rounds", 5, "how often to measure time")
    parser.argument("--batch", type=_sizes, metavar="N,N,N", help="more batch sizes to measure")
    parser.argument("--length", type=_sizes, metavar="N,N,N", help="more lengths to measure")
    text = "predict a size that was not measured, for example 8x4096; with --batch or --length"
    parser.several("--predict", text, "BATCHxLENGTH", type=_size, default=[])
    parser.switch("--inside", "show each layer with what is inside it")


def run(options: Namespace) -> Result:
    """Count and time, and return the result as data, as text, and as an exit code."""
    sizes = {
        axis: values
        for axis, values in (("batch", options.batch), ("length", options.length))
        if values
    }
    if options.predict and not sizes:
        raise InspectionError("--predict needs sizes to start from: --batch 1,2,4 or --length ...")
    subject = subject_of(options.subject)
    say("cost", f"running {type(subject.model).__name__}")
    rounds = options.rounds
    found = cost(subject.model, subject.data, subject.loss, sizes=sizes or None, rounds=rounds)
    text, data = [found.table(inside=options.inside)], found.to_dict()
    if found.growth is not None:
        predictions = [found.growth.predict(batch=b, length=s) for b, s in options.predict]
        text += [f"\npredicted {each}" for each in predictions]
        data["predictions"] = [each._asdict() for each in predictions]
    return data, "\n".join(text), 0


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,2,4") from None


def _size(text: str) -> tuple[int, int]:
    try:
        batch, length = text.lower().split("x")
        return int(batch), int(length)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a size such as 8x4096") from None
