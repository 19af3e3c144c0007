"""The commands `torchfmri cost` and `torchfmri advise`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

import torch

from torchfmri._cost import advise, cost
from torchfmri._model import FORM, load_subject, nearest_names
from torchfmri.exceptions import InspectionError

Result = tuple[dict[str, Any], str, int]


def add_cost_arguments(parser: ArgumentParser) -> None:
    """The options of `torchfmri cost`."""
    _add_subject(parser)
    parser.add_argument("--batch", type=_sizes, metavar="N,N,N", help="batch sizes to measure too")
    parser.add_argument("--length", type=_sizes, metavar="N,N,N", help="lengths to measure too")
    parser.add_argument(
        "--predict",
        type=_size,
        action="append",
        default=[],
        metavar="BATCHxLENGTH",
        help="predict a size that was not measured, for example 8x4096; with --batch or --length",
    )
    parser.add_argument(
        "--inside", action="store_true", help="show each layer with what is inside it"
    )


def run_cost(options: Namespace) -> Result:
    """Count and time, and return the result as data, as text, and as an exit code."""
    sizes = {
        axis: values
        for axis, values in (("batch", options.batch), ("length", options.length))
        if values
    }
    if options.predict and not sizes:
        raise InspectionError("--predict needs sizes to start from: --batch 1,2,4 or --length ...")
    subject = load_subject(options.subject)
    _say("cost", f"running {type(subject.model).__name__}")
    rounds = options.rounds
    found = cost(subject.model, subject.data, subject.loss, sizes=sizes or None, rounds=rounds)
    text, data = [found.table(inside=options.inside)], found.to_dict()
    if found.growth is not None:
        predictions = [found.growth.predict(batch=b, length=s) for b, s in options.predict]
        text += [f"\npredicted {each}" for each in predictions]
        data["predictions"] = [each._asdict() for each in predictions]
    return data, "\n".join(text), 0


def add_advise_arguments(parser: ArgumentParser) -> None:
    """The options of `torchfmri advise`."""
    _add_subject(parser)
    parser.add_argument(
        "--optimizer", metavar="NAME", help="a class of torch.optim, for example AdamW"
    )
    parser.add_argument(
        "--combine", type=int, default=6, metavar="N", help="combinations to try at most"
    )


def run_advise(options: Namespace) -> Result:
    """Try everything, and return the result as data, as text, and as an exit code."""
    make = None
    if options.optimizer:
        make = _optimizers().get(options.optimizer)
        if make is None:
            near = ", ".join(nearest_names(options.optimizer, list(_optimizers())))
            raise InspectionError(
                f"There is no torch.optim.{options.optimizer}. Nearest optimizers: {near}."
            )
    subject = load_subject(options.subject)
    found = advise(
        subject.model,
        subject.data,
        subject.loss,
        make,
        rounds=options.rounds,
        combine=options.combine,
        progress=lambda text: _say("advise", text),
    )
    return found.to_dict(), found.table(), 0


def _optimizers() -> dict[str, Any]:
    """Name -> class of the optimizers in torch.optim."""
    base = torch.optim.Optimizer
    return {
        name: each
        for name, each in vars(torch.optim).items()
        if isinstance(each, type) and issubclass(each, base) and each is not base
    }


def _add_subject(parser: ArgumentParser) -> None:
    parser.add_argument("subject", help=f"{FORM}: a function that returns (model, data, loss)")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="how often to measure time (default: 5)"
    )


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


def _say(command: str, text: str) -> None:
    print(f"torchfmri {command}: {text}", file=sys.stderr, flush=True)
