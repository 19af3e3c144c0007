"""Why an operation makes something non-finite of finite numbers, and what to do, in words.

`report` asks `cause_of`. `FORWARD` and `BACKWARD` map the name of an operation to a function of its
event: add a rule there, with a case in tests/_incidents/test_incidents_origin.py. A rule that does
not know returns None, and the event gets the general words. Words may change freely; a rule must
only claim what the operands show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from torchfmri._incidents.event import PRODUCTS, SOFTMAX, Event, Operand, is_softmax

_PROBABILITIES = {
    "_softmax": ("softmax", "log_softmax / cross_entropy"),
    "_safe_softmax": ("softmax", "log_softmax / cross_entropy"),
    "sigmoid": ("sigmoid", "logsigmoid / binary_cross_entropy_with_logits"),
    "sigmoid_": ("sigmoid", "logsigmoid / binary_cross_entropy_with_logits"),
}
_SUMS = "add sub rsub sum mean cumsum prod mul square pow var std norm addcmul"


class Cause(NamedTuple):
    """What an operation met, and what to do about it."""

    why: str
    advice: str


def cause_of(event: Event) -> Cause:
    """Return why this event began, from its operation and what went into it."""
    if event.parents and event.content.nan and not is_softmax(event.operation):
        return _anything(event)
    name = event.operation.removesuffix("_") if len(event.operation) > 1 else event.operation
    table = BACKWARD if event.place.derivative else FORWARD
    rule = table.get(name) or table.get(event.operation)
    if rule is None and is_softmax(event.operation) and not event.place.derivative:
        rule = _softmax
    found = rule(event) if rule is not None else None
    return found or _anything(event)


Rule = Callable[[Event], "Cause | None"]


def _of_argument(rule: Callable[[Event, Operand], Cause | None]) -> Rule:
    """Return a rule that looks at the first operand; it says nothing if none is known."""
    return lambda event: rule(event, event.operands[0]) if event.operands else None


# -- the forward pass and the loss -----------------------------------------------------------------


@_of_argument
def _logarithm(event: Event, argument: Operand) -> Cause | None:
    name = event.operation
    if argument.low < 0:
        return Cause(
            f"{name} of a negative number (down to {argument.low:.4g})",
            f"Keep the argument of {name} above 0.",
        )
    made_by, instead = _PROBABILITIES.get(argument.made_by, ("", ""))
    if made_by:
        return Cause(f"{name} of a probability that underflowed to 0", f"Use {instead}.")
    return Cause(f"{name} of 0", "Keep the argument away from 0, for example x.clamp(min=1e-8).")


def _division(event: Event) -> Cause | None:
    below = event.operands[-1] if event.operands else None
    if below is None or (below.zeros == 0 and event.operation != "reciprocal"):
        return _overflow(event)
    what = "0 / 0" if event.content.nan and not event.content.inf else "division by 0"
    return Cause(
        f"{what} ({below.zeros:,} zeros in the denominator)",
        "Add a small number to the denominator, or clamp it.",
    )


@_of_argument
def _root(event: Event, argument: Operand) -> Cause | None:
    if argument.low < 0:
        why = f"{event.operation} of a negative number (down to {argument.low:.4g})"
    elif event.operation == "rsqrt" and argument.zeros:
        why = "rsqrt of 0"
    else:
        return _overflow(event)
    return Cause(why, "Clamp the argument, or add a small number to it.")


def _power(event: Event) -> Cause | None:
    argument = event.operands[0] if event.operands else None
    if argument is not None and event.content.nan and argument.low < 0:
        why = f"a fractional power of a negative number (down to {argument.low:.4g})"
        return Cause(why, "Take the power of the absolute value, or clamp it.")
    if argument is not None and argument.zeros and argument.high < 1e3:
        return Cause("a negative power of 0", "Add a small number before taking the power.")
    return _overflow(event)


@_of_argument
def _exponential(event: Event, argument: Operand) -> Cause | None:
    limit = torch.tensor(_largest(argument.dtype), device="cpu").log()
    return Cause(
        f"{event.operation} of up to {argument.high:.4g} overflowed: {argument.dtype} ends at "
        f"exp({limit:.3g})",
        "Subtract the maximum first, or use logsumexp, softmax or log-space.",
    )


def _overflow(event: Event) -> Cause:
    high = max((max(-each.low, each.high) for each in event.operands), default=0.0)
    dtype = event.content.dtype
    half = "Run it in bfloat16 or float32, or scale its inputs down." if "16" in dtype else ""
    return Cause(
        f"{_plain(event.operation)} of values up to {high:.4g} overflowed {dtype}, whose largest "
        f"number is {_largest(dtype):.4g}",
        half or "Look for what let the values grow so large: learning rate, initialisation, data.",
    )


@_of_argument
def _cast(event: Event, argument: Operand) -> Cause | None:
    high = max(-argument.low, argument.high)
    dtype = event.content.dtype
    return Cause(
        f"{high:.4g} does not fit into {dtype}, whose largest number is {_largest(dtype):.4g}",
        "Use bfloat16, or keep this value in float32 (autocast(enabled=False) around it).",
    )


def _softmax(event: Event) -> Cause | None:
    if not event.content.nan or not event.parents:
        return _overflow(event)
    return Cause(
        f"{_plain(event.operation)} over a row in which every entry is -inf: all of it is masked",
        "Leave at least one position of each row unmasked, or set such rows to 0 afterwards.",
    )


@_of_argument
def _domain(event: Event, argument: Operand) -> Cause | None:
    return Cause(
        f"{event.operation} of numbers from {argument.low:.4g} to {argument.high:.4g}, outside "
        "where it is finite",
        f"Clamp the argument of {event.operation}.",
    )


def _variance(event: Event) -> Cause | None:
    return Cause(f"{_plain(event.operation)} of too few values", "Give it more than one value.")


def _anything(event: Event) -> Cause:
    """Return the cause for an operation without a rule of its own."""
    name = _plain(event.operation)
    if event.kind == "constant":
        return Cause(f"the code itself writes {event.content.value} ({name})", "Remove it.")
    if event.parents:
        return Cause(
            f"{name} makes NaN of infinities (inf - inf, 0 * inf)",
            "Infinite mask entries belong in softmax only; multiply by 0 and 1 elsewhere.",
        )
    if event.place.derivative:
        return _steep(event)
    return Cause(f"{name} makes {event.content.value} of finite numbers", "Look at this line.")


FORWARD: dict[str, Rule] = {
    **dict.fromkeys(("log", "log2", "log10", "log1p", "xlogy", "special_xlogy"), _logarithm),
    **dict.fromkeys(("div", "divide", "true_divide", "reciprocal", "addcdiv"), _division),
    **dict.fromkeys(("sqrt", "rsqrt"), _root),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh", "special_expm1"), _exponential),
    **dict.fromkeys(("acos", "asin", "acosh", "atanh", "logit", "digamma", "erfinv"), _domain),
    **dict.fromkeys(SOFTMAX, _softmax),
    **dict.fromkeys(PRODUCTS, _overflow),
    **dict.fromkeys((*_SUMS.split(), "linalg_vector_norm", "mse_loss"), _overflow),
    "_to_copy": _cast,
    "pow": _power,
    "var": _variance,
    "std": _variance,
}


# -- the backward pass -----------------------------------------------------------------------------


_EDGES = ("acos", "asin", "atanh", "erfinv", "arccos", "arcsin", "arctanh")
"""Functions that are steep where their argument reaches -1 or 1, and not at 0."""


def _steep(event: Event) -> Cause:
    name = _plain(event.operation)
    if name in _EDGES:
        return Cause(
            f"the derivative of {name} is infinite at -1 and 1, and its argument reaches one of "
            "them",
            f"Clamp the argument of {name} a little inside -1 and 1.",
        )
    if any(each.zeros for each in event.operands):
        return Cause(
            f"the derivative of {name} is infinite at 0, and its argument holds 0",
            f"Add a small number inside {name}. torch.where does not help: a branch that is "
            "not chosen still has 0 * inf = NaN as its gradient; clamp the argument before.",
        )
    return Cause(
        f"the gradient of {name} is {event.content.value} though what goes into it is finite",
        "Look at this line: where is its derivative infinite or undefined?",
    )


def _gradient_overflow(event: Event) -> Cause:
    found = _overflow(event)
    return Cause(f"in the gradient {found.why}", found.advice)


BACKWARD: dict[str, Rule] = {
    **dict.fromkeys((*PRODUCTS, "_to_copy", "to_copy", "mul", "sum", "add"), _gradient_overflow),
}


def _plain(operation: str) -> str:
    """Return the name as it is called in code: `_softmax` is softmax, `mm` a matrix product."""
    if operation in PRODUCTS:
        return "a matrix product"
    if operation.lstrip("_").startswith("scaled_dot_product"):
        return "scaled_dot_product_attention"
    return operation.strip("_") or operation


def _largest(dtype: str) -> float:
    kind = getattr(torch, dtype, torch.float32)
    return float(torch.finfo(kind).max) if kind.is_floating_point else float("inf")
