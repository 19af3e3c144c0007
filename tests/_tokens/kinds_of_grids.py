"""New grids of positions, made of different tokens: each has an axis of its own."""

from __future__ import annotations

from typing import Any

import torch
from attribution import Places
from kinds_of_models import B, H, Ids, Kind, free, kind, linear
from kinds_of_short_walks import KINDS
from torch import Tensor, nn

__all__ = ["KINDS"]  # those of the other files, and these


@kind("one strided convolution on two arguments", "two")
@kind("one strided convolution on two arguments, subtracted", "difference")
@kind("one strided convolution on two halves", "halves")
@kind("one strided convolution twice, one on the other", "pyramid")
@kind("two strided convolutions of one argument, added", "branches")
class StridedConvolutions(Kind):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.other = how, nn.Conv1d(H, H, 2, stride=2), linear()
        if how == "branches":
            self.beside = nn.Conv1d(H, H, 4, stride=2, padding=1)

    def inputs(self) -> tuple[Any, ...]:
        return torch.randn(B, H, 8), torch.randn(B, H, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.how == "branches":
            return self.other((self.layer(x) + self.beside(x)).mT)  # type: ignore[no-any-return]
        if self.how == "pyramid":
            return self.other(self.layer(self.layer(x).relu()).mT)  # type: ignore[no-any-return]
        if self.how == "halves":
            x, y = x[..., :4], x[..., 4:]
        one, two = self.layer(x).mT, self.layer(y).mT
        if self.how == "difference":
            return self.other(one - two)  # type: ignore[no-any-return]
        return self.other(one).sum(1) * self.other(two).sum(1)  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        count = 2 if self.how == "halves" else 4
        one, two = at("one", B, count), at("two", B, 2 if self.how == "pyramid" else count)
        if self.how == "branches":
            return {"layer": [one], "beside": [one], "other": [one]}
        if self.how == "pyramid":
            return {"layer": [one, two], "other": [two]}
        return {"layer": [one, two], "other": [one] if self.how == "difference" else [one, two]}


class Pooled(nn.Module):
    """Means of neighbours, with a free weight: it is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = free(H)

    def forward(self, x: Tensor) -> Tensor:
        return x.view(B, 4, 2, H).mean(2) * self.scale


@kind("one module that pools two arguments", False)
@kind("one module that pools an argument twice", True)
class PooledTwice(Kind):
    def __init__(self, is_same: bool) -> None:
        super().__init__()
        self.is_same, self.layer, self.head = is_same, Pooled(), linear()

    def inputs(self) -> tuple[Any, ...]:
        return torch.randn(B, 8, H), torch.randn(B, 8, H)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.is_same:
            return self.head(self.layer(x) + self.layer(x).tanh())  # type: ignore[no-any-return]
        return self.head(self.layer(x)).sum(1) * self.head(self.layer(y)).sum(1)  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        one, two = at("one", B, 4), at("two", B, 4)
        if self.is_same:
            return {"layer.scale": [one, one], "head": [one]}
        return {"layer.scale": [one, two], "head": [one, two]}


@kind("frames one by one", "sum")
@kind("a convolution on the state and a frame", "state")
class Frames(Kind):
    """Frames (b, t, c, h, w) of a video, each with a grid of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Conv2d(H, H, 3, padding=1)
        if how == "state":
            self.refused = ("layer.weight", "layer.bias")

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 3, H, 2, 3),)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(B, H, 2, 3)
        for t in range(3):
            h = self.layer(h + x[:, t]).tanh() if self.how == "state" else h + self.layer(x[:, t])
        return h

    def rows(self, at: Places) -> Ids:
        return {"layer": [at(f"frame {t}", B, 6).view(B, 2, 3) for t in range(3)]}


@kind("patches of every feature by itself", 4, False)
@kind("overlapping patches of every feature by itself", 2, False)
@kind("patches of every feature, normalised", 4, True)
class FeaturePatches(Kind):
    """A series (b, s, d) whose features are cut into patches: these are tokens, as heads are."""

    def __init__(self, step: int, is_normalised: bool) -> None:
        super().__init__()
        self.step, self.is_normalised = step, is_normalised
        self.embed, self.after = linear(4), linear()

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 12, 3),)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_normalised:
            x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
        return self.after(self.embed(x.mT.unfold(-1, 4, self.step)).tanh())

    def rows(self, at: Places) -> Ids:
        count = 1 + 8 // self.step
        ids = at("patches", B, count)[:, None].expand(B, 3, count)
        return {"embed": [ids], "after": [ids]}


@kind("neighbours added in place", "in place")
@kind("a sum of neighbours, written", "written")
@kind("a sum of positions, read by a convolution", "convolution")
@kind("ids of two positions", "ids")
@kind("ids that a state has chosen", "chosen")
class OpenSums(Kind):
    """Rows of two positions between which nothing decides, written, chosen or read."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.table, self.head = how, nn.Embedding(5, H), linear()
        self.layer = nn.Conv1d(H, H, 1) if how == "convolution" else linear()
        names = ("table",) if how == "chosen" else ("layer", "table", "head")
        self.refused = tuple(f"{each}.{key}" for each in names for key in ("weight", "bias"))

    def inputs(self) -> tuple[Any, ...]:
        return (torch.tensor([[0, 3, 1, 4, 2], [2, 2, 4, 0, 1]]),)

    def forward(self, ids: Tensor) -> Tensor:
        if self.how == "chosen":
            return self.decoded(ids)
        x = self.table((ids + ids.roll(1, 1)) % 5 if self.how == "ids" else ids)
        if self.how == "in place":
            x = x.clone()
            x[:, 1:] += x[:, :-1].clone()
        elif self.how == "written":
            made = torch.zeros_like(x)
            made[:, torch.arange(5)] = x + x.flip(1)
            x = made
        elif self.how == "convolution":
            return self.head(self.layer((x + x.flip(1)).mT).mT)  # type: ignore[no-any-return]
        return self.head(self.layer(x))  # type: ignore[no-any-return]

    def decoded(self, ids: Tensor) -> Tensor:
        """A state takes in what it has chosen before."""
        data = torch.nn.functional.one_hot(ids, 5)[..., :H].double()
        h, chosen, made = torch.zeros(B, H), torch.zeros(B, dtype=torch.int64), []
        for t in range(5):
            h = (self.layer(h) + data[:, t]).tanh() + self.table(chosen)
            chosen = h.argmax(-1)
            made.append(h)
        return self.head(torch.stack(made, 1))  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        ids = at("x", B, 5)
        if self.how == "chosen":
            steps = list(ids.T)
            return {"table": steps, "layer": steps, "head": [ids]}
        return {"table": [ids], "layer": [ids], "head": [ids]}
