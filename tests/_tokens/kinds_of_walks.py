"""Walks over the positions in unusual forms, each with the tokens of its uses written beside it.

Two readings of one graph are not told apart by anything: then its parameters may be refused.
"""

from __future__ import annotations

from typing import Any

import torch
from attribution import Places
from kinds_of_models import B, H, Ids, Kind, S, free, kind, linear, x_at
from kinds_of_moves import KINDS
from torch import Tensor, nn

__all__ = ["KINDS"]  # those of the other files, and these


class Turns(Kind):
    """Layers that take turns, so that each is used in some of the steps.

    Args:
        count: How many layers there are.
        start: The first step; the state begins with the position before, or with zeros.
        stop: How many positions there are.
        is_after: Whether a layer reads the sum of state and position, or the state alone.
    """

    def __init__(self, count: int, start: int, stop: int, is_after: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(count))
        self.start, self.stop, self.is_after = start, stop, is_after
        self.refused = tuple(name for name, _ in self.named_parameters())

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, self.stop, H),)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, 0] if self.start else torch.zeros(B, H)
        for t in range(self.start, self.stop):
            layer = self.layers[t % len(self.layers)]
            h = layer(h + x[:, t]).tanh() if self.is_after else (layer(h) + x[:, t]).tanh()
        return h

    def rows(self, at: Places) -> Ids:
        x, found = at("x", B, self.stop), {f"layers.{k}": [] for k in range(len(self.layers))}
        for t in range(self.start, self.stop):
            found[f"layers.{t % len(self.layers)}"].append(x[:, t])
        return found


for _count, _stop in ((2, 3), (2, 4), (5, 5)):
    for _start in (0, 1):
        for _is_after in (False, True)[: 1 + (_stop == 3)]:
            _name = f"{_count} layers in turn, {_stop} steps from {_start}"
            _name += ", after the step" if _is_after else ", before the step"
            kind(_name, _count, _start, _stop, _is_after)(Turns)


@kind("a product with all earlier states", "product")
@kind("a product with all earlier states and zeros", "zeros")
@kind("sums of products with all earlier states", "sums")
@kind("the mean of all earlier states", "mean")
@kind("attention to all earlier states", "attention")
@kind("attention to the sequence, with a state for a query", "query")
class EarlierStates(Kind):
    """A step that reads all earlier states, or with a state the whole sequence."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.w, self.u = how, linear(), linear()
        if how != "attention":
            names = ("u",) if how == "query" else ("w",)
            self.refused = tuple(f"{each}.{key}" for each in names for key in ("weight", "bias"))

    def forward(self, x: Tensor) -> Tensor:
        begins = torch.zeros(B, H) if self.how in ("zeros", "query") else x[:, 0]
        states = [begins]
        for t in range(self.first, S):
            past = x if self.how == "query" else torch.stack(states, 1)
            q = self.u(states[-1] if self.how == "query" else x[:, t])
            if self.how == "mean":
                read = past.mean(1)
            elif self.how == "sums":
                read = ((past * q[:, None]).sum(-1).softmax(1)[..., None] * past).sum(1)
            elif self.how in ("attention", "query"):
                read = ((q[:, None] @ past.mT).softmax(-1) @ past)[:, 0]
            else:
                read = ((past @ q[..., None]).softmax(1) * past).sum(1)
            states.append((self.w(read) + x[:, t] * q).tanh())
        return torch.stack(states[1:], 1)

    @property
    def first(self) -> int:
        return int(self.how not in ("zeros", "query"))

    def rows(self, at: Places) -> Ids:
        steps = list(x_at(at).T[self.first :])
        return {"w": steps, "u": steps}


@kind("samples one after the other, from zeros", "samples", 0)
@kind("samples one after the other, from the first position", "samples", 1)
@kind("samples of different lengths", "lengths", 1)
@kind("an axis before the batch, from zeros", "before", 0)
@kind("an axis before the batch, from the first position", "before", 1)
@kind("an axis behind the features", "behind", 0)
@kind("states of two steps before", "two back", 2)
@kind("two layers by hand", "layers", 0)
@kind("a second walk backwards, from the end of the first one", "again", 0)
@kind("outputs that are summed", "outputs", 0)
class Walks(Kind):
    def __init__(self, how: str, start: int) -> None:
        super().__init__()
        self.how, self.start, self.w = how, start, linear()
        if how in ("layers", "again", "outputs"):
            self.u = linear()
        if how == "again":
            self.refused = ("u.weight", "u.bias")

    def forward(self, x: Tensor) -> Tensor:
        how, start = self.how, self.start
        h, made = torch.zeros(B, H), []
        if how in ("samples", "lengths"):
            for each, stop in zip(x, self.lengths(), strict=True):
                h = each[:1] if start else torch.zeros(1, H)
                for t in range(start, stop):
                    h = (each[t : t + 1] + self.w(h)).tanh()
                made.append(h)
            return torch.cat(made)
        if how == "before":
            h = x[:, 0][None] if start else torch.zeros(1, B, H)
            for t in range(start, S):
                h = (x[:, t][None] + self.w(h)).tanh()
        elif how == "behind":
            h = h[..., None]
            for t in range(S):
                h = (self.w(h[..., 0])[..., None] + x[:, t, :, None]).tanh()
        elif how == "two back":
            made = [x[:, 0], x[:, 1]]
            for t in range(start, S - 1):  # the last state of one of the two chains is its first
                made.append((self.w(made[-2]) + x[:, t]).tanh())
            return torch.stack(made, 1)
        elif how == "layers":
            upper = h
            for t in range(S):
                h = (self.w(h) + x[:, t]).tanh()
                upper = (upper * 0.5 + self.u(h)).tanh()
            return upper
        elif how == "again":
            for t in range(S):
                h = (self.w(h) + x[:, t]).tanh()
            for t in reversed(range(S)):
                h = (self.u(h) + x[:, t]).tanh()
        else:
            total = torch.zeros(B, H)
            for t in range(S):
                h = (self.w(h) + x[:, t]).tanh()
                total = total + self.u(h)
            return total
        return h

    def lengths(self) -> list[int]:
        return [3, S] if self.how == "lengths" else [S, S]

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        steps = list(x.T[self.start :])
        if self.how in ("samples", "lengths"):
            each = [x[j, t : t + 1] for j, n in enumerate(self.lengths())
                    for t in range(self.start, n)]  # fmt: skip
            return {"w": each}
        if self.how == "before":
            steps = [each[None] for each in steps]
        found = {"w": steps[:-1] if self.how == "two back" else steps}
        if self.how in ("layers", "outputs", "again"):
            found["u"] = steps[::-1] if self.how == "again" else steps
        return found


@kind("a bilinear layer of state and position")
class BilinearSteps(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.product, self.head = nn.Bilinear(H, H, H), linear()

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, 0]
        for t in range(1, S):
            h = self.product(h, x[:, t]).tanh()
        return self.head(h)  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        steps = list(x_at(at).T[1:])
        return {"product": steps, "head": steps[-1:]}


@kind("two positions in all, a decay", "decay")
@kind("two positions in all, a layer before the step", "before")
@kind("two positions in all, a layer after the step", "after")
@kind("two positions in all, from zeros", "zeros")
@kind("two positions in all, a layer before and after", "both")
@kind("two positions of three", "three")
class TwoPositions(Kind):
    """Two positions that are joined: a recurrence in either direction, or none.

    Where there are others beside them, each product belongs to its own row.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.w = how, free(H) if how in ("decay", "three") else linear()
        if how in ("decay", "before", "after", "both"):
            self.refused = ("w", "w.weight", "w.bias")

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 3 if self.how == "three" else 2, H),)

    def forward(self, x: Tensor) -> Tensor:
        if self.how in ("decay", "three"):
            return x[:, 1] + self.w * x[:, 0]
        if self.how == "before":
            return self.w(x[:, 0]) + x[:, 1]
        if self.how == "after":
            return self.w(x[:, 0] + x[:, 1])  # type: ignore[no-any-return]
        if self.how == "both":
            return self.w(self.w(x[:, 0]).tanh() + x[:, 1])  # type: ignore[no-any-return]
        h = torch.zeros(B, H)
        for t in range(2):
            h = (self.w(h) + x[:, t]).tanh()
        return h

    def rows(self, at: Places) -> Ids:
        x = at("x", B, 3 if self.how == "three" else 2)
        return {"w": [x[:, 0], x[:, 1]] if self.how in ("zeros", "both") else [x[:, 0]]}


def _over(y: Tensor, t: int, row: Tensor, how: str) -> Tensor:
    """A copy of (B, S, H) with another row (B, H) at position t."""
    at, row = torch.tensor([t]), row[:, None]
    if how == "index_copy":
        return y.index_copy(1, at, row)
    if how == "scatter":
        return y.scatter(1, at.expand(B, 1, H), row)
    if how == "index_put":
        return y.index_put((torch.arange(B)[:, None], at[None]), row)
    if how == "slice_scatter":
        return y.slice_scatter(row, 1, t, t + 1)
    return y.select_scatter(row[:, 0], 1, t)


@kind("one row written over another, after a sum of two", "once")
@kind("rows written one after the other", "assigned")
@kind("rows written one after the other, with a layer between", "layer")
@kind("rows added to in place", "in place")
@kind("rows added to by add_", "add_")
@kind("rows written backwards", "backwards")
@kind("rows written with steps first", "steps first")
@kind("rows written over by index_copy", "index_copy")
@kind("rows written over by index_copy, with a layer between", "index_copy", True)
@kind("rows written over by scatter", "scatter")
@kind("rows written over by index_put", "index_put")
@kind("rows written over by slice_scatter", "slice_scatter")
@kind("rows written over by select_scatter", "select_scatter")
@kind("rows of three positions, written", "three")
@kind("rows of three positions, in a list", "list")
@kind("a row of three positions, put between others", "between")
class RowsWritten(Kind):
    """A sum of two positions that is written to one of them belongs to that one."""

    def __init__(self, how: str, has_layer: bool = False) -> None:
        super().__init__()
        self.how, self.head = how, linear()
        self.has_layer = has_layer or how == "layer"
        if self.has_layer:
            self.w = linear()
            self.refused = ("w.weight", "w.bias", "head.weight", "head.bias")
        if how in ("three", "list", "between"):
            self.refused = ("head.weight", "head.bias")

    def before(self, row: Tensor) -> Tensor:
        return self.w(row.clone()) if self.has_layer else 0.5 * row.clone()

    def forward(self, x: Tensor) -> Tensor:
        how, y = self.how, x.clone()
        if how == "once":
            y[:, 2] = y[:, 2] + 0.5 * y[:, 0]
        elif how == "list":
            rows = list(x.unbind(1))
            for t in range(2, S):
                rows[t] = rows[t] + 0.5 * rows[t - 1] + 0.25 * rows[t - 2]
            y = torch.stack(rows, 1)
        elif how == "between":
            row = x[:, 2] + x[:, 1] + x[:, 0]
            y = torch.cat([x[:, :2], row[:, None], x[:, 3:]], 1)
        elif how == "backwards":
            for t in reversed(range(S - 1)):
                y[:, t] = (y[:, t] + self.before(y[:, t + 1])).tanh()
        elif how == "steps first":
            y = x.transpose(0, 1).clone()
            for t in range(1, S):
                y[t] = (y[t] + self.before(y[t - 1])).tanh()
            y = y.transpose(0, 1)
        else:
            for t in range(2 if how == "three" else 1, S):
                if how == "in place":
                    y[:, t] += self.before(y[:, t - 1])
                elif how == "add_":
                    y[:, t].add_(self.before(y[:, t - 1]))
                elif how == "three":
                    y[:, t] = y[:, t] + 0.5 * y[:, t - 1] + 0.25 * y[:, t - 2]
                elif how in ("assigned", "layer"):
                    y[:, t] = (y[:, t] + self.before(y[:, t - 1])).tanh()
                else:
                    y = _over(y, t, (y[:, t] + self.before(y[:, t - 1])).tanh(), how)
        return self.head(y)  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        return {"head": [x], **({"w": list(x.T[1:])} if self.has_layer else {})}


@kind("a second walk from the last state, stacked", "stacked")
@kind("a second walk from the last state, step by step", "steps")
@kind("a second walk from the last state, over some positions", "some")
@kind("a second walk backwards from the last state, stacked", "backwards")
@kind("a second walk over positions taken apart before, step by step", "unbound")
class SecondWalk(Kind):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.head = how, linear()
        self.refused = ("head.weight", "head.bias")

    def steps(self) -> list[int]:
        steps = list(range(3 if self.how == "some" else S))
        return steps[::-1] if self.how == "backwards" else steps

    def forward(self, x: Tensor) -> Tensor:
        h, made, is_by_step = torch.zeros(B, H), [], self.how in ("steps", "unbound")
        steps = x.unbind(1) if self.how == "unbound" else None
        for t in range(S):
            h = (h + (steps[t] if steps else x[:, t])).tanh()
        for t in self.steps():
            h = (h + (steps[t] if steps else x[:, t])).tanh()
            made.append(self.head(h) if is_by_step else h)
        found = torch.stack(made, 1)
        return found if is_by_step else self.head(found)

    def rows(self, at: Places) -> Ids:
        x = x_at(at)[:, self.steps()]
        return {"head": list(x.T) if self.how in ("steps", "unbound") else [x]}


@kind("earlier positions in each step", 0)
@kind("earlier positions and a layer in each step", 1)
class EarlierPositions(Kind):
    """Every step meets a position again that its state has taken in: this is no second walk."""

    def __init__(self, has_layer: int) -> None:
        super().__init__()
        self.has_layer, self.w, self.head = has_layer, linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        steps, made = x.unbind(1), []
        h = steps[0]
        for t in range(1, S):
            h = self.w(h) if self.has_layer else h
            h = (h + steps[t] + steps[t - 1] / 3 + (steps[t - 2] / 5 if t > 1 else 0)).tanh()
            made.append(self.head(h))
        return torch.stack(made, 1)

    def rows(self, at: Places) -> Ids:
        steps = list(x_at(at).T[1:])
        return {"head": steps, "w": steps if self.has_layer else []}


@kind("a layer twice in each step, from a parameter", S, True)
@kind("a layer twice in each of two steps, from zeros", 2, False)
class TwiceInAStep(Kind):
    def __init__(self, count: int, is_learned: bool) -> None:
        super().__init__()
        self.count, self.w, self.head = count, linear(), linear()
        self.is_learned, self.start = is_learned, free(H)

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, self.count, H),)

    def forward(self, x: Tensor) -> Tensor:
        h = self.start.expand(B, H) if self.is_learned else torch.zeros(B, H)
        for t in range(self.count):
            h = (self.w(self.w(h).tanh()) + x[:, t]).tanh()
        return self.head(h)  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        x = at("x", B, self.count)
        return {"w": [each for each in x.T for _ in range(2)], "head": [x[:, -1]]}


@kind("states in a stack, read by a layer", "stack", True)
@kind("states in a longer sequence, read by a layer", "cat", True)
@kind("states in a sequence of zeros, read by a layer", "index_copy", True)
@kind("states in a sequence of zeros, read before a layer", "index_copy", False)
@kind("states written into a sequence of zeros", "in place", True)
@kind("states written into copies of a sequence of zeros", "copy", True)
class StoredStates(Kind):
    """States that are put into a sequence, out of which the next step takes them."""

    def __init__(self, how: str, is_before: bool) -> None:
        super().__init__()
        self.how, self.is_before = how, is_before
        self.w, self.u, self.head = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        how, states, made = self.how, torch.zeros(B, S + 1, H), [torch.zeros(B, H)]
        states = states[:, :1] if how == "cat" else states
        for t in range(S):
            h = (torch.stack(made, 1) if how == "stack" else states)[:, t].clone()
            x_t = self.u(x[:, t])
            h = (self.w(h) + x_t if self.is_before else self.w(h + x_t)).tanh()
            made.append(h)
            if how == "cat":
                states = torch.cat([states, h[:, None]], 1)
            elif how == "index_copy":
                states = states.index_copy(1, torch.tensor([t + 1]), h[:, None])
            else:
                states = states.clone() if how == "copy" else states
                states[:, t + 1] = h
        return self.head(torch.stack(made[1:], 1))  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        steps = list(x_at(at).T)
        return {"w": steps, "u": steps, "head": [x_at(at)]}


@kind("chunks, with a state that is spread before a layer", True)
@kind("chunks, with a state that is added before a layer", False)
class Chunks(Kind):
    """Positions that are taken in two at a time."""

    def __init__(self, is_spread: bool) -> None:
        super().__init__()
        self.is_spread, self.w = is_spread, linear()
        if is_spread:
            self.refused = ("w.weight", "w.bias")

    def forward(self, x: Tensor) -> Tensor:
        h, made = torch.zeros(B, H), []
        for t in range(0, S - S % 2, 2):
            both, state = x[:, t : t + 2], h[:, None].expand(B, 2, H)
            y = both + self.w(state) if self.is_spread else self.w(both + state)
            made.append(y.tanh())
            h = made[-1][:, -1]
        return torch.cat(made, 1)

    def rows(self, at: Places) -> Ids:
        return {"w": [x_at(at)[:, t : t + 2] for t in range(0, S - S % 2, 2)]}


@kind("a state of two slots", 2, "mean")
@kind("a state of three slots", 3, "mean")
@kind("the sum of a state of two slots", 2, "sum")
@kind("the largest of a state of two slots", 2, "amax")
class Slots(Kind):
    """The latest states, each in a slot of its own; a step reads all of them."""

    def __init__(self, count: int, how: str) -> None:
        super().__init__()
        self.count, self.how, self.w, self.head = count, how, linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        slots, made = torch.zeros(B, self.count, H), []
        for t in range(S):
            new = (self.w(getattr(slots, self.how)(1)) + x[:, t]).tanh()
            slots = slots.clone()
            slots[:, t % self.count] = new
            made.append(new)
        return self.head(torch.stack(made, 1))  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        return {"w": list(x_at(at).T), "head": [x_at(at)]}


@kind("a recurrence over a plane, with a layer along its rows", "rows")
@kind("a recurrence over a plane, with a layer along its columns", "columns")
@kind("a recurrence over a plane, with two layers", "both")
class Plane(Kind):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.u, self.w = how, linear(), linear()
        if how == "both":
            self.v = linear()
        self.refused = tuple(f"{e}.{key}" for e in "wv" for key in ("weight", "bias"))

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 6, H),)

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for place in range(6):
            above = made[place - 3] if place >= 3 else torch.zeros(B, H)
            left = made[place - 1] if place % 3 else torch.zeros(B, H)
            if self.how != "columns":
                left = self.w(left)
            if self.how != "rows":
                above = self.v(above) if self.how == "both" else self.w(above)
            made.append((above + left + self.u(x[:, place])).tanh())
        return torch.stack(made, 1)

    def rows(self, at: Places) -> Ids:
        steps = list(at("x", B, 6).T)
        return {"u": steps, "w": steps, **({"v": steps} if self.how == "both" else {})}


@kind("a list of sequences, padded")
class Sequences(Kind):
    """Each sequence of a list has tokens of its own; the padding is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def inputs(self) -> tuple[Any, ...]:
        return ([torch.randn(3, H), torch.randn(5, H)],)

    def forward(self, several: list[Tensor]) -> Tensor:
        padded = nn.utils.rnn.pad_sequence(several, batch_first=True)
        kept = torch.arange(5) < torch.tensor([[3], [5]])
        return self.layer(padded) * kept[..., None]

    def rows(self, at: Places) -> Ids:
        each = [at("short", 3, 1)[:, 0], at("long", 5, 1)[:, 0]]
        return {"layer": [nn.utils.rnn.pad_sequence(each, True, -1)]}


@kind("a second walk over two positions taken apart before", 2, "list", False)
@kind("a second walk backwards over three positions, states in a stack", 3, "stack", True)
@kind("a second walk, states in a sequence of zeros", S, "index_copy", False)
@kind("a second walk backwards, states in a sequence of zeros", S, "index_copy", True)
@kind("a second walk, states added to by cat", S, "cat", False)
class StoredSecondWalk(Kind):
    """A second walk from the last state, with a layer of its own and another one on its states."""

    refused = ("v.weight", "v.bias", "head.weight", "head.bias")

    def __init__(self, count: int, how: str, is_back: bool) -> None:
        super().__init__()
        self.count, self.how, self.is_back = count, how, is_back
        self.w, self.v, self.head = linear(), linear(), linear()
        self.u = linear()

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, self.count, H),)

    def times(self) -> list[int]:
        return list(range(self.count))[:: -1 if self.is_back else 1]

    def forward(self, x: Tensor) -> Tensor:
        steps, states = x.unbind(1), [torch.zeros(B, H)]
        stored = torch.zeros(B, 2 * self.count + 1, H)
        for place, t in enumerate([*range(self.count), *self.times()]):
            h = states[-1]
            if self.how == "stack":
                h = torch.stack(states, 1)[:, -1]
            elif self.how == "index_copy":
                h = stored[:, place]
            elif self.how == "cat":
                h = torch.cat([each[:, None] for each in states], 1)[:, -1]
            layer = self.w if place < self.count else self.v
            states.append((layer(h) + self.u(steps[t])).tanh())
            stored = stored.index_copy(1, torch.tensor([place + 1]), states[-1][:, None])
        return self.head(torch.stack(states[1 + self.count :], 1))  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        x = at("x", B, self.count)
        steps, others = list(x.T), [x[:, t] for t in self.times()]
        return {"w": steps, "u": [*steps, *others], "v": others, "head": [x[:, self.times()]]}


@kind("a layer before and after each step, from zeros", 1, 0)
@kind("a layer twice before each step and once after it, from zeros", 2, 0)
@kind("a layer before and after each step, from the first position", 1, 1)
@kind("a layer twice before each step and once after it, from the first position", 2, 1)
class AroundSteps(Kind):
    """One layer that is used before each step and again after it."""

    def __init__(self, count: int, start: int) -> None:
        super().__init__()
        self.count, self.start, self.w, self.head = count, start, linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, 0] if self.start else torch.zeros(B, H)
        for t in range(self.start, S):
            for _ in range(self.count):
                h = self.w(h).tanh()
            h = self.w(h + x[:, t]).tanh()
        return self.head(h)  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        steps = x_at(at).T[self.start :]
        return {"w": [e for e in steps for _ in range(self.count + 1)], "head": [steps[-1]]}


@kind("a learned first state, with later states added by cat", "learned")
@kind("queries made of states, the first of zeros", "query")
@kind("features of state and position side by side, states in a buffer", "buffer")
@kind("the next position in each step", "next")
@kind("the mean of a window of earlier rows, in a buffer", "window")
class OpenSteps(Kind):
    """Steps that nothing tells: refused, or right."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.w = how, linear(2 * H if how == "buffer" else H, H)
        self.head, self.start = linear(), free(H)
        self.refused = ("w.weight", "w.bias", "head.weight", "head.bias", "start")

    def forward(self, x: Tensor) -> Tensor:
        how, made = self.how, list[Tensor]()
        states, h = self.start.expand(B, H)[:, None], torch.zeros(B, H)
        stored = torch.cat([x[:, :1], x.new_zeros(B, S - 1, H)], 1)
        for t in range(how == "buffer", S - (how == "next")):
            if how == "learned":
                h = (self.w(states[:, -1]) + x[:, t]).tanh()
                states = torch.cat([states, h[:, None]], 1)
            elif how == "query":
                scores = (self.w(h)[:, None] * x).sum(-1).softmax(1)
                h = ((scores[..., None] * x).sum(1) + x[:, t]).tanh()
            elif how == "buffer":
                h = self.w(torch.cat([stored[:, t - 1], x[:, t]], -1)).tanh()
                stored = stored.clone()
                stored[:, t] = h
            elif how == "next":
                h = (self.w(h) + x[:, t] + 0.2 * x[:, t + 1]).tanh()
            else:
                stored = torch.cat([stored[:, 1:], self.w(x[:, t])[:, None]], 1)
                h = stored[:, -2:].mean(1)
            made.append(h)
        rows = torch.stack(made, 1)
        return rows if how == "next" else self.head(rows)

    def rows(self, at: Places) -> Ids:
        x, how = x_at(at), self.how
        times = list(range(how == "buffer", S - (how == "next")))
        found: Ids = {"w": [x[:, t] for t in times], "head": [x[:, times]]}
        found["head"] = [] if how == "next" else [x[:, times]]
        return {**found, **({"start": [x[:, 0]]} if how == "learned" else {})}


@kind("layers that take turns around each step, two positions", "turns", 2)
@kind("layers that take turns around each step, from zeros", "turns", 3)
@kind("a learned first state that the first step reads twice", "twice", 4)
@kind("queries made of states, over all states before", "past", 3)
@kind("a mean as first state, beside a position as features", "mean", 2)
@kind("states in a stack, with a free parameter alone", "stack", 3)
@kind("a second walk by another cell with gates, over unbound rows", "gates", 4)
@kind("features of state and position side by side, in another order", "order", 3)
class RefusedSteps(Kind):
    """Steps of which nothing tells the position: refused, or right."""

    def __init__(self, how: str, count: int) -> None:
        super().__init__()
        self.how, self.count = how, count
        self.w = linear(2 * H if how in ("mean", "order") else H, H)
        self.v, self.head, self.scale, self.start = linear(), linear(), free(H), free(H)
        self.refused = tuple(name for name, _ in self.named_parameters())

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, self.count, H),)

    def times(self) -> list[int]:
        times = list(range(self.count))
        if self.how == "gates":
            return [*times, *times]
        return {"order": [0, 2], "stack": times[1:], "mean": times[::-1]}.get(self.how, times)

    def forward(self, x: Tensor) -> Tensor:
        how, made, c = self.how, list[Tensor](), torch.zeros(B, H)
        first = {"twice": self.start.expand(B, H), "mean": x.mean(1), "stack": x[:, 0]}
        first["order"] = x[:, 1]
        h = first.get(how, torch.zeros(B, H))
        states, rows = [h], x.unbind(1)
        for place, t in enumerate(self.times()):
            if how == "turns":
                layer = self.v if t % 2 else self.w
                h = layer((layer(h) + x[:, t]).tanh())
            elif how == "twice":
                h = h + self.w((h + x[:, t]).tanh())
            elif how == "past":
                past = torch.stack(states, 1)
                scores = torch.einsum("bkh,bh->bk", past, self.w(h)).softmax(1)
                h = ((scores[..., None] * past).sum(1) + self.v(x[:, t])).tanh()
            elif how == "stack":
                h = self.scale * torch.stack(states, 1)[:, -1] + x[:, t]
            elif how == "gates":
                layer = self.w if place < self.count else self.v
                gate = (layer(h) + rows[t]).sigmoid()
                c = gate * c + (1 - gate) * rows[t]
                h = (h + rows[t]).sigmoid() * c.tanh()
            else:
                h = self.w(torch.cat([h, x[:, t]], -1)).tanh()
            states.append(h)
            made.append(self.head(h) if how == "order" else h)
        last = made[-1] if how != "order" else torch.stack(made, 1)
        return self.head(last) if how == "gates" else last

    def rows(self, at: Places) -> Ids:
        x, how, times = at("x", B, self.count), self.how, self.times()
        steps, none = [x[:, t] for t in times], list[Any]()
        found: Ids = {"w": none if how == "stack" else steps, "v": none, "head": none}
        if how == "turns":
            both = [[x[:, t] for t in times if t % 2 == odd for _ in range(2)] for odd in (0, 1)]
            found |= {"w": both[0], "v": both[1]}
        elif how == "gates":
            count = self.count
            found |= {"w": steps[:count], "v": steps[count:], "head": steps[-1:]}
        more: dict[str, Ids] = {
            "stack": {"scale": steps},
            "twice": {"start": [x[:, 0]]},
            "past": {"v": steps},
            "order": {"head": steps},
        }
        return {**found, **more.get(how, {})}


@kind("each feature filtered by itself, two positions", 2)
@kind("each feature filtered by itself, as many positions as features", H)
class Filtered(Kind):
    """A convolution of (b * h, 1, s) with a kernel of constants: positions stay where they are."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.w = count, linear()

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, self.count, H),)

    def forward(self, x: Tensor) -> Tensor:
        kernel = torch.tensor([[[0.5, 0.3, 0.2]]])
        rows = nn.functional.conv1d(x.mT.reshape(-1, 1, self.count), kernel, padding=1)
        return self.w(rows.view(B, H, self.count).mT)  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        return {"w": [at("x", B, self.count)]}
