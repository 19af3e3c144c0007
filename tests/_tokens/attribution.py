"""An oracle for whose gradient is whose: a copy of a parameter for every row that it produces.

Nothing here knows how torchfmri finds tokens. The oracle runs a model in a second, slow form. Every
use of a parameter takes one copy of it per row, and the numbers of the tokens are carried along by
hand: a tensor of integers goes through exactly the moves that the data goes through. What reaches a
copy belongs to the token whose number the row carries. The oracle checks itself: the loss must be
the same, and the copies' gradients must add up to `.grad`.

`judge` compares: a parameter is RIGHT (equal to the oracle), REFUSED (listed as missing, with a
reason), EXCUSED (refused after operands that name different positions, where nothing decides), or
WRONG.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import torchfmri

RIGHT, REFUSED, EXCUSED, WRONG = "right", "refused", "excused", "wrong"
READINGS = 3
TOLERANCE = 1e-8
FLOOR = 1e-4  # numbers that are zero but for rounding are compared with this

# What the tokens are ("x", "mem", "sample" ...), and their gradients, (b, s, *shape).
Reading = dict[str, Tensor]


class Places:
    """The numbers of all tokens: every kind of token has a block of them."""

    def __init__(self) -> None:
        self.blocks: dict[str, tuple[int, int, int]] = {}
        self.total = 0

    def __call__(self, kind: str, b: int, s: int) -> Tensor:
        """The numbers (b, s) of the tokens of one kind."""
        if kind not in self.blocks:
            self.blocks[kind] = (self.total, b, s)
            self.total += b * s
        start, *shape = self.blocks[kind]
        assert shape == [b, s], f"{kind}: {shape} and {[b, s]}"
        return torch.arange(start, start + b * s).view(b, s)


@dataclass
class Rows:
    """Data with the number of the token of each row.

    Attributes:
        value: (..., h).
        ids: (..., readings): where several answers are right, each has a number. The first follows
            the moves.
        doubtful: Whether operands that name different positions were mixed: then nothing decides,
            the numbers are those of the place, and a refusal is as good.
    """

    value: Tensor
    ids: Tensor
    doubtful: bool = False

    def move(self, how: Callable[[Tensor], Tensor]) -> Rows:
        """The rows in other places; data and numbers go through the same move."""
        return replace(self, value=how(self.value), ids=how(self.ids))

    def holding(self, value: Tensor) -> Rows:
        """The same rows with other data."""
        assert value.shape[:-1] == self.ids.shape[:-1], (value.shape, self.ids.shape)
        return replace(self, value=value)

    def plus(self, other: Rows) -> Rows:
        """The sum of two tensors with the same tokens."""
        doubtful = self.doubtful or other.doubtful
        assert doubtful or torch.equal(self.ids[..., 0], other.ids[..., 0]), "a mix: say doubted()"
        return Rows(self.value + other.value, self.ids, doubtful)

    def doubted(self) -> Rows:
        return replace(self, doubtful=True)


def rows_of(value: Tensor, ids: Tensor, *others: Tensor) -> Rows:
    """Rows whose tokens have these numbers; `others` are further answers that are as right."""
    readings = [ids, *others, *[others[-1] if others else ids] * (READINGS - 1 - len(others))]
    return Rows(value, torch.stack(readings, -1))


@dataclass
class _Use:
    copy: Tensor
    ids: Tensor
    doubtful: bool


class Copies:
    """Gives every use of a parameter one copy per row, and remembers whose they are."""

    def __init__(self) -> None:
        self.places = Places()
        self.uses: dict[int, list[_Use]] = {}

    def __call__(self, parameter: Tensor, rows: Rows) -> Tensor:
        """Copies (..., *shape) of a parameter for rows (..., h)."""
        lead = rows.ids.shape[:-1]
        copy = parameter.detach().expand(*lead, *parameter.shape).clone().requires_grad_()
        use = _Use(copy, rows.ids, rows.doubtful)
        self.uses.setdefault(id(parameter), []).append(use)
        return copy

    def linear(self, rows: Rows, weight: Tensor, bias: Tensor | None = None) -> Rows:
        """y_t = W_t x_t + b_t."""
        value = torch.einsum("...oi,...i->...o", self(weight, rows), rows.value)
        return rows.holding(value if bias is None else value + self(bias, rows))

    def readings(self, parameter: Tensor) -> list[Reading]:
        """The gradient of every token, in each of the readings, without those that repeat."""
        found: list[Reading] = []
        uses = self.uses.get(id(parameter), [])
        for number in range(READINGS):
            total = torch.zeros(self.places.total, *parameter.shape, dtype=parameter.dtype)
            kinds = set()
            for use in uses:
                if use.copy.grad is None:
                    continue
                ids = use.ids[..., number].flatten()
                total.index_add_(0, ids, use.copy.grad.reshape(-1, *parameter.shape))
                kinds |= {kind for kind in self.places.blocks if self._meets(kind, ids)}
            found.append(
                {
                    kind: total[start : start + b * s].view(b, s, *parameter.shape)
                    for kind, (start, b, s) in self.places.blocks.items()
                    if kind in kinds
                }
            )
        return [each for n, each in enumerate(found) if not any(_same(each, e) for e in found[:n])]

    def _meets(self, kind: str, ids: Tensor) -> bool:
        start, b, s = self.places.blocks[kind]
        return bool(((ids >= start) & (ids < start + b * s)).any())

    def doubtful(self, parameter: Tensor) -> bool:
        return any(use.doubtful for use in self.uses.get(id(parameter), []))


def _same(one: Reading, other: Reading) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@dataclass
class Truth:
    """What is right.

    Attributes:
        readings: For every parameter that received a gradient, the answers that are right.
        excused: Parameters that may be refused.
    """

    readings: dict[str, list[Reading]]
    excused: set[str] = field(default_factory=set)


def truth_of(
    model: nn.Module,
    expected: Tensor,
    written_out: Callable[[Copies], Tensor],
    names: Collection[str] | None = None,
) -> Truth:
    """The truth of a model, whose `.grad` holds that of the loss `expected`.

    Args:
        model: Its parameters are those that `written_out` asks copies of.
        expected: The loss of the plain run.
        written_out: The loss in the slow form.
        names: The parameters that it has copies of; by default all.
    """
    copies = Copies()
    loss = written_out(copies)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    loss.backward()
    truth = Truth({})
    for name, parameter in model.named_parameters():
        if parameter.grad is None or (names is not None and name not in names):
            continue
        found = copies.readings(parameter)
        for reading in found:
            total = torch.zeros_like(parameter.grad)
            for each in reading.values():
                total += each.sum((0, 1))
            gap = float((total - parameter.grad).abs().max())
            scale = max([1.0, *(float(each.abs().max()) for each in reading.values())])
            assert gap < 1e-9 * scale, f"the oracle's copies of {name} miss .grad by {gap:.1e}"
        truth.readings[name] = found
        if copies.doubtful(parameter):
            truth.excused.add(name)
    return truth


# -- judging -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What became of one parameter."""

    name: str
    outcome: str
    detail: str = ""


def judge(tokens: Any, truth: Truth) -> list[Verdict]:
    """A verdict for every parameter of the truth, from what a `token_gradients` block found."""
    try:
        coverage = {row.name: row for row in tokens.coverage()}
    except Exception as error:
        text = f"coverage() raised {_said(error)}"
        return [Verdict(name, WRONG, text) for name in truth.readings]
    kinds: dict[str, str] = {}
    return [
        _verdict(tokens, coverage.get(name), name, truth, kinds)
        for name in truth.readings
        if name in coverage or any(e.any() for r in truth.readings[name] for e in r.values())
    ]


def failed(error: Exception, truth: Truth) -> list[Verdict]:
    """The verdicts where the block itself raised: the user's own pass must never do that."""
    return [Verdict(name, WRONG, f"the pass raised {_said(error)}") for name in truth.readings]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _verdict(tokens: Any, row: Any, name: str, truth: Truth, kinds: dict[str, str]) -> Verdict:
    if row is None:
        return Verdict(name, WRONG, "it received a gradient and has no row in coverage()")
    if row.rule == "none":
        return _refusal(tokens, row, name, name in truth.excused)
    try:
        found = {axis: tokens.on(axis)[name].materialise() for axis in row.tokens}
    except Exception as error:
        return Verdict(name, WRONG, f"reading it raised {_said(error)}")
    closest = ""
    for reading in truth.readings[name]:
        for labels in _matches(found, reading):
            alien = {
                axis: kinds[axis]
                for axis in labels
                if kinds.get(axis, labels[axis]) != labels[axis]
            }
            if alien:
                closest = f"shares the axes {alien} with tokens that are {labels}"
                continue
            kinds.update(labels)
            return Verdict(name, RIGHT, ", ".join(f"{a}: {k}" for a, k in labels.items()))
    if "unattributed" in row.note:  # a part of it, and coverage() says how much
        return Verdict(name, EXCUSED if name in truth.excused else REFUSED, row.note)
    if not closest:
        wanted = [{k: tuple(e.shape[:2]) for k, e in r.items()} for r in truth.readings[name]]
        had = {axis: tuple(each.shape[:2]) for axis, each in found.items()}
        closest = f"other numbers on {had} than on {wanted}; rule {row.rule!r}, note {row.note!r}"
    return Verdict(name, WRONG, closest)


def _refusal(tokens: Any, row: Any, name: str, excused: bool) -> Verdict:
    try:
        tokens[name]
    except torchfmri.InspectionError as error:
        reason = str(getattr(error, "reason", error))
        if row.note and reason:
            return Verdict(name, EXCUSED if excused else REFUSED, reason)
        return Verdict(name, WRONG, f"refused without a reason: {row}")
    except Exception as error:
        return Verdict(name, WRONG, f"a raw error: {_said(error)}")
    return Verdict(name, WRONG, "coverage() calls it missing, and it can be read")


def _matches(found: Mapping[str, Tensor], reading: Reading) -> Iterator[dict[str, str]]:
    """Every way in which axes that were found are the kinds of tokens of a reading."""
    sizes = [float(each.abs().max()) for each in reading.values() if each.numel()]
    allowed = TOLERANCE * max([FLOOR, *sizes])

    def is_zero(gap: Tensor) -> bool:
        return not gap.numel() or bool(gap.abs().max() <= allowed)

    # Where nothing came, nothing can be in a wrong place.
    had = {axis: each for axis, each in found.items() if not is_zero(each)}
    must = {kind for kind, each in reading.items() if not is_zero(each)}
    for kinds in itertools.permutations(reading, len(had)):
        pairs = list(zip(had.values(), (reading[kind] for kind in kinds), strict=True))
        same = all(one.shape == two.shape and is_zero(one.to(two) - two) for one, two in pairs)
        if same and must <= set(kinds):
            yield dict(zip(had, kinds, strict=True))
    # What is said of a whole sample may be said of the one token whose row it is (a class token).
    if len(had) == len(must) == 1 and reading[next(iter(must))].shape[1] == 1:
        (one,), sample = had.values(), reading[next(iter(must))]
        alone = (one != 0).flatten(2).any(2).sum(1) <= 1
        if len(one) == len(sample) and bool(alone.all()) and is_zero(one.sum(1, True) - sample):
            yield {}


def verdicts_of(
    model: nn.Module,
    run: Callable[[], Tensor],
    written_out: Callable[[Copies], Tensor],
    names: Collection[str] | None = None,
) -> list[Verdict]:
    """Run a model in a `token_gradients` block and judge every parameter.

    Args:
        model: In float64.
        run: Forward pass up to the loss.
        written_out: The same loss in the slow form; see `truth_of`.
        names: The parameters to judge; by default all.
    """
    model.zero_grad()
    expected = run()
    expected.backward()
    truth = truth_of(model, expected.detach(), written_out, names)
    model.zero_grad()
    try:
        with torchfmri.token_gradients(model) as tokens:
            run().backward()
    except Exception as error:
        return failed(error, truth)
    return judge(tokens, truth)
