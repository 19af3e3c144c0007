"""Events: operations whose result is not finite, each with those that its inputs come from.

`trace` makes them in the order of the step, `trace_back` walks from the loss to what began it,
`report` and `causes` put it into words. NaN is followed before infinities, because -inf is often
meant (a mask) and NaN never is. Events hold numbers and names, no tensors: a whole step of them is
kept. What an event tells may grow; the order of blame in `trace_back` is tested case by case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from torchfmri._explain import SourceLine
from torchfmri._incidents.content import Content
from torchfmri._records import Phase

Kind: TypeAlias = Literal["operation", "constant", "parameter", "buffer", "data", "outside"]

SOFTMAX = frozenset({"_softmax", "_log_softmax", "_safe_softmax", "logsumexp"})
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "linear"})


class EventPlace(NamedTuple):
    """The place where an operation was run.

    Attributes:
        phase: The part of the step.
        layer: The innermost layer that was running (in a backward pass: that made the operation);
            None outside the model.
        line: The innermost line outside PyTorch.
        caller: The user's own line that led there, if `line` is in a library.
        derivative: Whether it is a derivative that autograd computes of the operation at `line`.
    """

    phase: Phase
    layer: str | None = None
    line: SourceLine | None = None
    caller: SourceLine | None = None
    derivative: bool = False


class Operand(NamedTuple):
    """A finite input of an operation that made something non-finite.

    Attributes:
        made_by: The operation whose result it is; empty if that is not known.
        low: Its smallest value.
        high: Its largest value.
        zeros: How many of its values are 0.
        dtype: Such as "float32".
    """

    made_by: str
    low: float
    high: float
    zeros: int
    dtype: str


@dataclass(frozen=True)
class Event:
    """An operation (or something that was there before) with a non-finite result.

    Attributes:
        number: Its number, in the order in which events come.
        kind: "operation", or what was not made by one: a "constant" in the code, a "parameter" or
            "buffer" of the model, "data" of the batch, any other tensor from "outside".
        operation: Such as "log"; in a backward pass the operation whose gradient it computes.
        name: The name of the parameter or buffer, or the path of the data in the batch.
        place: The phase, layer and line that ran it.
        content: The non-finite values of its result.
        parents: The events that its non-finite inputs come from.
        operands: Its finite inputs, if nothing else explains it.
    """

    number: int
    kind: Kind
    operation: str
    place: EventPlace
    content: Content
    name: str = ""
    parents: tuple[Event, ...] = ()
    operands: tuple[Operand, ...] = ()


class Lineage(NamedTuple):
    """How something non-finite came about.

    Attributes:
        root: The event that began it.
        birth: Where NaN first appeared on the way, if something else (an infinity) began it.
        trouble: The event that it led to: the loss, or a gradient.
    """

    root: Event
    birth: Event
    trouble: Event


def trace_back(trouble: Event) -> Lineage:
    """Return the lineage of an event.

    NaN is followed to the operation that made it of other numbers. If there were infinities among
    these, they are followed in turn; an infinity that the code put in on purpose is not a cause,
    but the operation that could not cope with it is.
    """
    birth = trouble
    while birth.content.nan and any(parent.content.nan for parent in birth.parents):
        birth = min((each for each in birth.parents if each.content.nan), key=_number)
    roots = sorted(set(_roots(birth)), key=_number)
    computed = [each for each in roots if each.kind == "operation"]
    if birth.content.nan and is_softmax(birth.operation):
        given = [each for each in roots if each.content.pos_inf and each.kind in _FAULTY]
    else:
        given = [each for each in roots if each.kind in _FAULTY]
    chosen = min([*computed, *given], key=_number, default=None)
    if chosen is None:  # constants only
        chosen = birth if birth.content.nan else roots[0]
    return Lineage(chosen, birth, trouble)


_FAULTY = ("parameter", "data")


def is_softmax(operation: str) -> bool:
    """Whether -inf among the inputs of an operation is what masks look like."""
    return operation in SOFTMAX or operation.startswith("_scaled_dot_product")


def is_on_purpose(event: Event) -> bool:
    """Whether infinities of an event all come from constants of the code and the like."""
    if event.content.nan:
        return False
    return not any(each.kind in ("operation", *_FAULTY) for each in _roots(event))


def _roots(event: Event) -> Iterator[Event]:
    """Yield, once each, the events behind one that began by themselves or overflowed anew."""
    seen: set[int] = set()
    waiting = [event]
    while waiting:
        each = waiting.pop()
        if each.number in seen:
            continue
        seen.add(each.number)
        if not each.parents or _overflows(each):
            yield each
        waiting.extend(each.parents)


def _overflows(event: Event) -> bool:
    """Whether a product brought a +inf of its own to the -inf of a mask."""
    above = any(parent.content.pos_inf or parent.content.nan for parent in event.parents)
    return event.operation in PRODUCTS and event.content.pos_inf > 0 and not above


def _number(event: Event) -> int:
    return event.number
