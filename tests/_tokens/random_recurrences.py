"""Random recurrences written by hand, each with the position of every use beside it.

A program is a few walks over the positions. Each has an order of its own, a cell, a first state, a
place where its states are kept and a way to read rows; walks may go on from the last state of the
one before, read its states, or begin anew in the middle. The truth needs no rules: every use names
the step in which it is written, and the slow form hands it a copy of the parameter for that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from attribution import Truth, Verdict, failed, judge
from torch import Tensor, nn

import torchfmri

B, H = 2, 3
State = dict[str, Tensor]


@dataclass
class Walk:
    """One walk over the positions: everything about it but the numbers."""

    order: list[int]
    reads: str
    first: str
    cell: str
    names: dict[str, str]
    keeps: str
    gate: str
    after: str
    extra: str
    source: str
    anew: int
    turns: int
    upper: str = ""


@dataclass
class Program:
    """A random recurrence."""

    seed: int
    count: int
    walks: list[Walk]
    embeds: bool
    returns: str
    modules: bool


READS = ("select", "unbind", "split", "chunk", "narrow", "comprehension", "steps", "index")
FIRSTS = ("zeros", "zeros", "row", "row", "layer", "learned", "mean", "mean layer", "noise")
CELLS = ("before", "after", "both", "scale", "scale after", "twice", "cat", "data", "shared",
         "product", "lstm", "gru", "residual", "norm", "plain", "lowrank", "memory")  # fmt: skip
KEEPS = ("variable", "list", "stack", "cat", "buffer", "column", "overwrite")
GATES = ("", "", "", "state", "both", "cat", "new", "data", "free")
AFTERS = ("", "", "", "tanh", "layer", "scale", "tanh layer")
EXTRAS = ("", "", "", "", "row before", "two before", "attention", "mean of states", "row first")
RETURNS = ("last", "all", "head last", "head all", "mean", "head mean", "sum", "some")


def program_of(seed: int) -> Program:
    """The program of a seed."""
    some = Random(seed)
    count = some.randint(2, 6)
    walks: list[Walk] = []
    for number in range(some.choice((1, 1, 1, 2, 2, 3))):
        order = list(range(count))
        how = some.choice(("forwards", "forwards", "backwards", "shuffled", "part"))
        if how == "backwards":
            order.reverse()
        elif how == "shuffled":
            some.shuffle(order)
        elif how == "part" and count > 2:
            order = order[some.randint(0, 1) : count - some.randint(0, 1)]
        shared = number > 0 and some.random() < 0.25
        prefix = "" if shared else f"p{number}"
        names = {slot: (prefix or "p0") + slot for slot in "wuvkagcnsq"}
        if some.random() < 0.08:
            names["u"] = names["w"]
        source, first = "x", some.choice(FIRSTS)
        if number:
            source = some.choice(("x", "x", "states", "stacked", "mixed"))
            first = some.choice(("end", "end", "end", *FIRSTS))
        walks.append(Walk(
            order=order, reads=some.choice(READS), first=first, cell=some.choice(CELLS),
            names=names, keeps=some.choice(KEEPS), gate=some.choice(GATES),
            after=some.choice(AFTERS), extra=some.choice(EXTRAS), source=source,
            anew=some.choice((0, 0, 0, 0, 0, some.randint(1, count))),
            turns=some.choice((1, 1, 1, 1, 1, 1, 2, count)),
            upper=some.choice(("", "", "", "", "before", "after", "cat")),
        ))  # fmt: skip
    return Program(seed, count, walks, some.random() < 0.3, some.choice(RETURNS),
                   some.random() < 0.7)  # fmt: skip


class Written(nn.Module):
    """A program as a model; parameters are made when they are used first."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.free = program, nn.ParameterDict()
        self.layers = nn.ModuleDict()
        self.copies: dict[str, dict[str, Tensor]] | None = None
        self.at = 0

    # -- uses --------------------------------------------------------------------------------

    def weight(self, name: str, shape: tuple[int, ...], kind: str = "x") -> Tensor:
        """The parameter, or its copies (b, 1, *shape) at the step that is being written."""
        if name not in self.free:
            self.free[name] = nn.Parameter(torch.randn(shape) / max(1, shape[-1]) ** 0.5)
        if self.copies is None:
            return self.free[name]
        return self.copy(f"free.{name}", self.free[name], kind)

    def copy(self, name: str, parameter: Tensor, kind: str) -> Tensor:
        """The copies (b, *shape) of a parameter at the step that is being written."""
        assert self.copies is not None
        known = self.copies.setdefault(name, {})
        if kind not in known:
            places = self.program.count if kind == "x" else 1
            whole = parameter.detach().expand(B, places, *parameter.shape)
            known[kind] = whole.clone().requires_grad_()
        return known[kind][:, self.at if kind == "x" else 0]

    def layer(self, name: str, x: Tensor, width: int = H, kind: str = "x") -> Tensor:
        """A Linear layer on the row of one step, (b, i) or (b, r, i)."""
        i = x.shape[-1]
        name = f"{name}_{width}x{i}"
        if self.program.modules:
            if name not in self.layers:
                self.layers[name] = nn.Linear(i, width)
            layer = self.layers[name]
            if self.copies is None:
                return layer(x)
            weight = self.copy(f"layers.{name}.weight", layer.weight, kind)
            bias = self.copy(f"layers.{name}.bias", layer.bias, kind)
        else:
            weight = self.weight(f"{name}_weight", (width, i), kind)
            bias = self.weight(f"{name}_bias", (width,), kind)
        if self.copies is None:
            return nn.functional.linear(x, weight, bias)
        lead = (slice(None), *[None] * (x.ndim - 2))
        return (weight[lead] @ x[..., None])[..., 0] + bias[lead]

    def scaled(self, name: str, x: Tensor) -> Tensor:
        return self.weight(f"{name}_scale", (H,)) * x

    def by_rows(self, do: Callable[[Tensor], Tensor], x: Tensor, order: Iterable[int]) -> Tensor:
        """A layer on a whole sequence; in the slow form row by row."""
        if self.copies is None:
            return do(x)
        rows = []
        for place, at in enumerate(order):
            self.at = at
            rows.append(do(x[:, place]))
        return torch.stack(rows, 1)

    # -- a walk ------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        program = self.program
        if program.embeds:
            x = self.by_rows(lambda row: self.layer("embed", row), x, range(program.count))
        made: list[tuple[list[int], list[Tensor]]] = []
        end = None
        for walk in program.walks:
            rows, order = self.rows_of(walk, x, made)
            if len(order) < 1:
                continue
            states = self.walked(walk, rows, order, x, end)
            made.append((order, states))
            end = states[-1]
        order, states = made[-1]
        last, how = states[-1], program.returns
        if how in ("last", "head last"):
            self.at = order[-1]
            return self.layer("head", last) if how == "head last" else last
        whole = torch.stack(states, 1)
        if how == "head all":
            return self.by_rows(lambda row: self.layer("head", row), whole, order)
        if how == "some" and len(states) > 1:
            self.at = order[-2]
            return self.layer("head", states[-2]) + last
        if how in ("mean", "head mean") and len(states) > 1:
            mean = whole.mean(1)
            return self.layer("head", mean, kind="sample") if how == "head mean" else mean
        return whole.sum(1) if how == "sum" else whole

    def rows_of(
        self, walk: Walk, x: Tensor, made: list[tuple[list[int], list[Tensor]]]
    ) -> tuple[Callable[[int], Tensor], list[int]]:
        """How a walk reads the row of a position, and the positions that it can read."""
        count = self.program.count
        if walk.source != "x":
            order, states = made[-1]
            by_place = dict(zip(order, states, strict=True))
            kept = [t for t in walk.order if t in by_place]
            if walk.source == "states":
                return by_place.__getitem__, kept
            if walk.source == "mixed":
                return lambda t: by_place[t] + x[:, t], kept
            if len(by_place) < count:
                return by_place.__getitem__, kept
            x = torch.stack([by_place[t] for t in range(count)], 1)
        if walk.reads == "unbind":
            rows = x.unbind(1)
        elif walk.reads == "split":
            rows = [each[:, 0] for each in x.split(1, 1)]
        elif walk.reads == "chunk":
            rows = [each.squeeze(1) for each in x.chunk(count, 1)]
        elif walk.reads == "comprehension":
            rows = [x[:, t] for t in range(count)]
        elif walk.reads == "narrow":
            return lambda t: x.narrow(1, t, 1)[:, 0], walk.order
        elif walk.reads == "steps":
            first = x.transpose(0, 1)
            return lambda t: first[t], walk.order
        elif walk.reads == "index":
            return lambda t: x.index_select(1, torch.tensor([t]))[:, 0], walk.order
        else:
            return lambda t: x[:, t], walk.order
        return lambda t: rows[t], walk.order

    def walked(
        self, walk: Walk, rows: Callable[[int], Tensor], order: list[int], x: Tensor, end: Any
    ) -> list[Tensor]:
        """The states of a walk, in its order."""
        self.at = order[0]
        zeros = torch.zeros(B, H)
        begins, start = 0, zeros
        if walk.first in ("row", "layer") and len(order) > 1:
            start, begins = rows(order[0]), 1
            if walk.first == "layer":
                start = self.layer(walk.names["s"], start).tanh()
        elif walk.first == "learned":
            start = self.weight(walk.names["s"] + "_start", (H,)).expand(B, H)
        elif walk.first in ("mean", "mean layer"):
            start = x.mean(1)
            if walk.first == "mean layer":
                start = self.layer(walk.names["s"], start, kind="sample").tanh()
        elif walk.first == "noise":
            start = torch.linspace(-1, 1, B * H).view(B, H)
        elif walk.first == "end":
            start = end
        kept = Kept(walk.keeps, start, begins, len(order), x)
        state = {"h": start, "c": zeros, "m": zeros[:, None] * zeros[..., None], "up": zeros}
        found = [start] if begins else []
        before: list[Tensor] = [start]
        for step in range(begins, len(order)):
            self.at = t = order[step]
            if walk.anew and step == walk.anew:
                state = {**state, "h": zeros}
            elif step > begins or walk.keeps != "overwrite":
                state["h"] = kept.last(state["h"], step)
            row = rows(t)
            names = walk.names
            if walk.turns > 1:
                names = {slot: f"{name}t{step % walk.turns}" for slot, name in names.items()}
            if walk.extra == "row before" and step:
                row = row + rows(order[step - 1])
            elif walk.extra == "row first" and step:
                row = row + rows(order[0])
            elif walk.extra == "two before" and len(before) > 1:
                row = row + before[-2]
            elif walk.extra == "mean of states":
                row = row + torch.stack(before, 1).mean(1)
            elif walk.extra == "attention":
                past = torch.stack(before, 1)
                weights = (self.layer(names["q"], row)[:, None] @ past.mT).softmax(-1)
                row = row + (weights @ past)[:, 0]
            state = self.stepped(walk, names, state, row)
            if walk.upper:
                state["up"] = self.cell(walk.upper, {s: n + "up" for s, n in names.items()},
                                        state["up"], state["h"], state)  # fmt: skip
            before.append(state["h"])
            found.append(state["up"] if walk.upper else state["h"])
            kept.keep(state["h"], step)
        if walk.keeps == "buffer" and not walk.upper:
            return [kept.row(step) for step in range(len(found))]
        return found

    def stepped(self, walk: Walk, names: dict[str, str], state: State, x: Tensor) -> State:
        """The state after a step."""
        h, made = state["h"], dict(state)
        new = self.cell(walk.cell, names, h, x, made)
        gate = walk.gate
        if walk.cell not in ("lstm", "gru") and gate:
            if gate == "state":
                z = self.layer(names["v"], h)
            elif gate == "both":
                z = self.layer(names["v"], h) + self.layer(names["k"], x)
            elif gate == "cat":
                z = self.layer(names["v"], torch.cat([h, x], -1))
            elif gate == "new":
                z = self.layer(names["v"], new)
            elif gate == "data":
                z = self.layer(names["v"], x)
            else:
                z = self.scaled(names["g"], h)
            new = z.sigmoid() * h + (1 - z.sigmoid()) * new
        if walk.after == "tanh":
            new = new.tanh()
        elif walk.after == "layer":
            new = self.layer(names["n"], new)
        elif walk.after == "scale":
            new = self.scaled(names["n"], new)
        elif walk.after == "tanh layer":
            new = self.layer(names["n"], new.tanh()).tanh()
        made["h"] = new
        return made

    def cell(self, how: str, names: dict[str, str], h: Tensor, x: Tensor, state: State) -> Tensor:
        """What a cell makes of a state and a row."""
        w, u = names["w"], names["u"]
        if how == "before":
            return self.layer(w, h) + x
        if how == "after":
            return self.layer(w, h + x).tanh()
        if how == "both":
            return (self.layer(w, h) + self.layer(u, x)).tanh()
        if how == "scale":
            return self.scaled(names["a"], h) + x
        if how == "scale after":
            return self.scaled(names["a"], h + x)
        if how == "twice":
            return self.layer(w, self.layer(w, h).tanh()) + x
        if how == "cat":
            return self.layer(w, torch.cat([h, x], -1)).tanh()
        if how == "data":
            return h.tanh() + self.layer(u, x)
        if how == "shared":
            return (self.layer(w, h) + self.layer(w, x)).tanh()
        if how == "product":
            return self.layer(w, h) * self.layer(u, x) + x
        if how == "residual":
            return h + self.layer(w, h + x).tanh()
        if how == "norm":
            return nn.functional.layer_norm(self.layer(w, h), (H,)) + x
        if how == "plain":
            return (h + x).tanh()
        if how == "lowrank":
            return self.layer(u, self.layer(w, h, 2).tanh()) + x
        if how == "memory":
            m = 0.9 * state["m"] + self.layer(w, x)[:, :, None] * self.layer(u, x)[:, None]
            state["m"] = m
            return h * 0.3 + (m @ x[..., None])[..., 0]
        if how == "lstm":
            gates = self.layer(w, h, 4 * H) + self.layer(u, x, 4 * H)
            i, f, g, o = gates.chunk(4, -1)
            state["c"] = f.sigmoid() * state["c"] + i.sigmoid() * g.tanh()
            return o.sigmoid() * state["c"].tanh()
        z = (self.layer(w, h) + self.layer(u, x)).sigmoid()
        r = (self.layer(names["v"], h) + self.layer(names["k"], x)).sigmoid()
        n = (self.layer(names["c"], r * h) + self.layer(names["g"], x)).tanh()
        return (1 - z) * n + z * h


class Kept:
    """Where a walk keeps its states."""

    def __init__(self, how: str, start: Tensor, begins: int, count: int, x: Tensor) -> None:
        self.how, self.begins = how, begins
        self.states = [start]
        self.whole = start[:, None]
        self.buffer = torch.zeros(B, count, H)
        if begins and how == "buffer":
            self.buffer[:, 0] = start
        self.column = start[..., None]

    def last(self, h: Tensor, step: int) -> Tensor:
        if self.how == "list":
            return self.states[-1]
        if self.how == "stack":
            return torch.stack(self.states, 1)[:, -1]
        if self.how == "cat":
            return self.whole[:, -1]
        if self.how == "buffer" and step:
            return self.buffer[:, step - 1].clone()
        if self.how == "column":
            return self.column[..., -1]
        return h

    def keep(self, h: Tensor, step: int) -> None:
        self.states.append(h)
        if self.how == "cat":
            self.whole = torch.cat([self.whole, h[:, None]], 1)
        elif self.how == "buffer":
            self.buffer = self.buffer.clone()
            self.buffer[:, step] = h
        elif self.how == "column":
            self.column = torch.cat([self.column, h[..., None]], -1)

    def row(self, step: int) -> Tensor:
        return self.buffer[:, step]


# -- judging -----------------------------------------------------------------------------------


def loss_of(output: Tensor) -> Tensor:
    weights = torch.linspace(-1, 2, output.numel()).view(output.shape)
    return (output * weights).sum() + output.sin().square().sum() / output.numel()


def judged(seed: int) -> list[Verdict]:
    """The verdict on each parameter of the program of a seed."""
    return judged_program(program_of(seed))


def judged_program(program: Program, shift: int = 0) -> list[Verdict]:
    """The verdict on each parameter of a program, in float64.

    Args:
        program: The program.
        shift: How far the truth is moved, so that it is wrong.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(program.seed)
        model, x = Written(program), torch.randn(B, program.count, H)
        model(x)  # makes the parameters
        expected = loss_of(model(x))
        if not expected.requires_grad:  # it has used no parameter
            return []
        expected.backward()
        model.copies = {}
        slow = loss_of(model(x))
        slow.backward()
        copies, model.copies = model.copies, None
        torch.testing.assert_close(slow, expected, rtol=1e-9, atol=1e-9)
        truth = Truth({})
        for name, parameter in model.named_parameters():
            found = {kind: each.grad for kind, each in copies.get(name, {}).items()}
            kept = {kind: each for kind, each in found.items() if each is not None}
            if parameter.grad is None:
                continue
            total = sum((each.sum((0, 1)) for each in kept.values()), torch.zeros(()))
            torch.testing.assert_close(total, parameter.grad, rtol=1e-8, atol=1e-9)
            truth.readings[name] = [{k: e.roll(shift, 1) for k, e in kept.items()}]
        model.zero_grad()
        try:
            with torchfmri.token_gradients(model) as tokens:
                loss_of(model(x)).backward()
        except Exception as error:
            return failed(error, truth)
        return judge(tokens, truth)
    finally:
        torch.set_default_dtype(default)
