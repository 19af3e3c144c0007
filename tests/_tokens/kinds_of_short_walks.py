"""Walks of a few steps, of which the first and the last are all: little tells where uses belong.

What nothing tells is refused; it must never be at another step.
"""

from __future__ import annotations

from typing import Any

import torch
from attribution import Places
from kinds_of_models import B, H, Ids, Kind, free, kind, linear
from kinds_of_recurrences import Cells
from kinds_of_walks import KINDS
from torch import Tensor

__all__ = ["KINDS"]  # those of the other files, and these


@kind("a second walk by a second cell with gates, over two positions", "gates", 2)
@kind("a second walk backwards, over two unbound positions", "back", 2)
@kind("a second walk backwards, with features side by side", "features back", 2)
@kind("a walk backwards over the states of three positions", "states back", 3)
@kind("layers in turn on features side by side, three positions", "turns", 3)
@kind("free parameters in turn on states in a stack, three positions", "free turns", 3)
@kind("layers in turn on states, the first of them made by a layer", "made turns", 3)
@kind("a mean as first state, over unbound rows in an order of its own", "mean", 3)
@kind("unbound rows in an order of their own, a layer before the step", "order", 4)
@kind("a matrix memory beside a state, two positions", "memory", 2)
@kind("gates of two positions", "reset gate", 2)
@kind("states that begin anew after two steps, under another walk", "anew", 4)
class ShortWalk(Kind):
    def __init__(self, how: str, count: int) -> None:
        super().__init__()
        self.how, self.count = how, count
        self.w, self.v, self.u, self.head = (linear() for _ in range(4))
        self.c, self.d = linear(2 * H, H), linear(2 * H, H)
        if how == "free turns":
            self.a, self.b = free(H), free(H)
        self.refused = tuple(name for name, _ in self.named_parameters())

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, self.count, H),)

    def forward(self, x: Tensor) -> Tensor:
        how, rows = self.how, x.unbind(1)
        h = zeros = torch.zeros(B, H)
        made: list[Tensor] = []
        if how == "gates":
            h = (self.w(x[:, 0]) + x[:, 1]).tanh()
            for t in range(2):
                z = (self.v(h) + self.u(x[:, t])).sigmoid()
                h = z * h + (1 - z) * x[:, t]
        elif how == "back":
            for t in range(2):
                h = (self.w(h) + rows[t]).tanh()
            for t in (1, 0):
                h = (self.v(h) + rows[t]).tanh()
        elif how == "features back":
            for t in range(2):
                h = self.c(torch.cat([h, rows[t]], -1)).tanh()
            for t in (1, 0):
                z = (self.w(h) + self.u(rows[t])).sigmoid()
                h = z * h + (1 - z) * rows[t]
        elif how == "states back":
            first = (self.w(x[:, 0]) + self.u(x[:, 1])).tanh()
            for state in ((self.w(first) + self.u(x[:, 2])).tanh(), first):
                h = (h + self.v(h)).tanh() + state
                made.append(h)
            return self.head(torch.stack(made, 1))  # type: ignore[no-any-return]
        elif how == "turns":
            made = [x[:, 0]]
            for t, layer in ((1, self.c), (2, self.d)):
                past = torch.stack(made, 1)[:, -1]
                made.append(layer(torch.cat([past, x.narrow(1, t, 1)[:, 0]], -1)).tanh())
            return torch.stack(made[1:], 1)
        elif how == "free turns":
            made = [rows[2]]
            for t, scale in ((1, self.a), (0, self.b)):
                made.append(scale * torch.stack(made, 1)[:, -1] + rows[t])
            h = made[-1]
        elif how == "made turns":
            h = self.u(x[:, 2]).tanh()
            for t, layer in ((1, self.w), (0, self.v)):
                h = (layer(h) + x.narrow(1, t, 1)[:, 0]).tanh()
                made.append(h)
            return torch.stack(made, 1)
        elif how == "mean":
            h = x.mean(1)
            for t in self.times():
                z = self.w(h).sigmoid()
                h = z * h + (1 - z) * rows[t]
        elif how == "order":
            h = rows[1]
            for t in self.times():
                h = self.w(self.w(h).tanh()) + rows[t]
                made.append(h)
            return self.head(torch.stack(made, 1))  # type: ignore[no-any-return]
        elif how == "memory":
            memory = zeros[:, None] * zeros[..., None] * 0.9
            memory = memory + self.w(x[:, 1])[:, :, None] * self.u(x[:, 1])[:, None]
            h = self.head(0.3 * x[:, 0] + (memory @ x[:, 1, :, None])[..., 0])
        elif how == "reset gate":
            r = (self.u(x[:, 0]) + self.v(x[:, 1])).sigmoid()
            h = (r * self.w(x[:, 0]) + x[:, 1]).tanh()
        else:
            upper = zeros
            for t in range(4):
                h = zeros if t == 2 else h
                z = (self.c(torch.cat([h, x[:, t]], -1))).sigmoid()
                h = h + z * (x[:, t] + self.w(z * h) - h)
                upper = (self.v(upper) + self.u(h)).tanh()
            h = upper
        return h

    def times(self) -> list[int]:
        found = {"mean": [1, 0, 2], "order": [0, 2, 3], "back": [0, 1, 1, 0]}
        return found.get(self.how, list(range(self.count)))

    def rows(self, at: Places) -> Ids:
        x, none = at("x", B, self.count).T, list[Tensor]()
        found: Ids = dict.fromkeys("wvucd", none) | {"head": none}
        steps = [x[t] for t in self.times()]
        more: dict[str, Ids] = {
            "gates": {"w": [x[1]], "v": steps, "u": steps},
            "back": {"w": steps[:2], "v": steps[2:]},
            "features back": {"c": steps, "w": steps[::-1], "u": steps[::-1]},
            "states back": {"w": steps[1:], "u": steps[1:], "v": steps[:0:-1]}
            | {"head": [torch.stack(steps[:0:-1], 1)]},
            "turns": {"c": [x[1]], "d": [x[2]]} if len(x) > 2 else {},
            "free turns": {"a": [x[1]], "b": [x[0]]},
            "made turns": {"u": [x[-1]], "w": [x[1]], "v": [x[0]]},
            "mean": {"w": steps},
            "order": {"w": [e for e in steps for _ in range(2)], "head": [torch.stack(steps, 1)]},
            "memory": {"w": [x[1]], "u": [x[1]], "head": [x[1]]},
            "reset gate": {"w": [x[1]], "u": [x[1]], "v": [x[1]]},
            "anew": {"c": steps, "w": steps, "v": steps, "u": steps},
        }
        return {**found, **more[self.how]}


@kind("GRUCell over two positions, from zeros", "GRUCell", 0)
@kind("LSTMCell over two positions, from zeros", "LSTMCell", 0)
class TwoSteps(Cells):
    """The cells of torch, whose biases are read once more where the state is zero."""

    stop = 2

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 2, H),)

    def rows(self, at: Places) -> Ids:
        steps = list(at("x", B, 2).T)
        return {"cell": steps, "lin": list(steps)}


@kind("a learned first state, and one row for each sample returned")
class OneRow(Kind):
    """A parameter that is refused is not at the whole sample, which is all that is returned."""

    refused = ("start", "w.weight", "w.bias", "v.weight", "v.bias", "head.weight", "head.bias")

    def __init__(self) -> None:
        super().__init__()
        self.start, self.head = free(H), linear(2 * H, H)
        self.w, self.v = linear(), linear()

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 4, H),)

    def forward(self, x: Tensor) -> Tensor:
        states, back = self.start.expand(B, H)[:, None], torch.zeros(B, H)
        for t in range(4):
            h = self.w(states[:, -1] + x[:, t]).tanh()
            states = torch.cat([states, h[:, None]], 1)
            back = (self.v(back) + x[:, 3 - t]).tanh()
        return self.head(torch.cat([states[:, -1], back], -1))  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        steps = list(at("x", B, 4).T)
        head = [at("sample", B, 1)[:, 0]]
        return {"start": steps[:1], "w": steps, "v": steps[::-1], "head": head}
