"""Products, gathers, windows and mixtures in unusual forms, each with the tokens of its rows."""

from __future__ import annotations

from typing import Any

import torch
from attribution import Places
from kinds_of_models import B, H, Ids, Kind, M, S, kind, linear, x_at
from kinds_of_recurrences import KINDS
from torch import Tensor
from torch.nn import functional as F

__all__ = ["KINDS"]  # those of the other files, and these

ORDER = torch.tensor([3, 0, 5, 1, 4, 2])

WAYS = ("einsum", "einsum, batch last", "bmm of samples", "matmul of (s, b, d)", "baddbmm",
        "heads by einsum", "tensordot", "a permutation and back", "a scatter by a permutation",
        "index_copy", "take_along_dim", "unfold and fold", "windows with padding", "shifted heads",
        "a stack of shifts", "cross attention to a flipped memory", "cross attention to a window",
        "top two of three experts", "experts choose rows", "two sequences, joined and cut",
        "channels first in between", "a tied layer on two orders", "where between orders",
        "rows of one sample only", "triangle of pairs", "swapped halves",
        "sorted by a feature", "cumulative maximum of a permutation",
        "a mean over windows")  # fmt: skip


class Moves(Kind):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.out = how, linear(), linear()
        if "expert" in how:
            self.other, self.third = linear(), linear()

    def inputs(self) -> tuple[Any, ...]:
        torch.manual_seed(11)
        return torch.randn(B, S, H), torch.randn(B, M, H)

    def chosen(self, x: Tensor) -> Tensor:
        return x.square().sum(-1).argsort(1, descending=True)

    def forward(self, x: Tensor, mem: Tensor) -> Tensor:
        how = self.how
        if how in ("einsum", "einsum, batch last", "bmm of samples", "matmul of (s, b, d)",
                   "baddbmm", "tensordot"):  # fmt: skip
            return self.out(self.product(x, mem))
        if how == "heads by einsum":
            q = self.layer(x).view(B, S, 2, 2)
            k = self.layer(mem).view(B, M, 2, 2)
            scores = torch.einsum("bshd,bmhd->bhsm", q, k).softmax(-1)
            return self.out(torch.einsum("bhsm,bmhd->bshd", scores, k).flatten(2))
        if how == "a permutation and back":
            return self.out(self.layer(x[:, ORDER])[:, ORDER.argsort()])
        if how == "a scatter by a permutation":
            y = self.layer(x)
            at = ORDER[None, :, None].expand(B, S, H)
            return self.out(torch.zeros_like(y).scatter(1, at, y))
        if how == "index_copy":
            return self.out(torch.zeros_like(x).index_copy(1, ORDER, self.layer(x)))
        if how == "take_along_dim":
            at = self.chosen(x)
            return self.out(self.layer(torch.take_along_dim(x, at[..., None], 1)))
        if how == "unfold and fold":
            y = self.layer(x.unfold(1, 3, 3).mT)
            return self.out(y.reshape(B, S, H))
        if how == "windows with padding":
            y = F.pad(x, (0, 0, 1, 1)).view(B * 2, 4, H)
            return self.out(self.layer(y).view(B, 8, H)[:, 1:-1])
        if how == "shifted heads":
            return self.out(self.layer(x.roll(1, 0)).roll(-1, 0) + x)
        if how == "a stack of shifts":
            return self.out(self.layer(torch.stack([x, x.roll(1, 1), x.flip(1)])))
        if how == "cross attention to a flipped memory":
            k = self.layer(mem.flip(1))
            return self.out(F.scaled_dot_product_attention(x, k, k))
        if how == "cross attention to a window":
            k = self.layer(mem[:, 1:4])
            return self.out((x @ k.mT).softmax(-1) @ k)
        if "expert" in how:
            return self.experts(x)
        if how == "two sequences, joined and cut":
            y = self.layer(torch.cat([mem, x], 1).flip(1))
            return self.out(y.flip(1)[:, M:])
        if how == "channels first in between":
            return self.out(self.layer(x.mT.contiguous().flip(2).mT))
        if how == "a tied layer on two orders":
            return self.out(self.layer(x) + self.layer(x[:, ORDER])[:, ORDER.argsort()])
        if how == "where between orders":
            return self.out(torch.where(torch.arange(S)[:, None] < 3, self.layer(x), x))
        if how == "rows of one sample only":
            return self.out(self.layer(x[1]))
        if how == "triangle of pairs":
            return self.out(self.layer(x)[:, torch.triu_indices(S, S)[0]])
        if how == "swapped halves":
            one, two = x.chunk(2, 1)
            return self.out(self.layer(torch.cat([two, one], 1)))
        if how == "sorted by a feature":
            order = x[..., 0].argsort(1)
            y = self.layer(x.gather(1, order[..., None].expand(-1, -1, H)))
            return self.out(y.gather(1, order.argsort(1)[..., None].expand(-1, -1, H)))
        if how == "cumulative maximum of a permutation":
            return self.out(self.layer(x[:, ORDER]).cummax(1).values)
        return self.out(self.layer(x).view(B, 2, 3, H).mean(2))

    def product(self, x: Tensor, mem: Tensor) -> Tensor:
        y, how = self.layer(x), self.how
        if how == "einsum":
            return torch.einsum("bsd,bd->bsd", y, mem.mean(1))
        if how == "einsum, batch last":
            return torch.einsum("sdb->bsd", torch.einsum("bsd->sdb", y))
        if how == "bmm of samples":
            return torch.bmm((y @ mem.mT).softmax(-1), mem)
        if how == "matmul of (s, b, d)":
            return (y.transpose(0, 1) @ torch.ones(H, H).tril()).transpose(0, 1)
        if how == "baddbmm":
            return torch.baddbmm(y, (y @ mem.mT).softmax(-1), mem)
        return torch.tensordot(y, torch.ones(H, H).triu(), ([2], [0]))

    def experts(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        layers = (self.layer, self.other, self.third)
        if self.how == "top two of three experts":
            best = flat[:, :3].topk(2, -1).indices
            y = torch.zeros_like(flat)
            for number, layer in enumerate(layers):
                row, _ = (best == number).nonzero(as_tuple=True)
                y = y.index_add(0, row, layer(flat[row]))
            return self.out(y.view_as(x) + x)
        y = torch.zeros_like(flat)
        for number, layer in enumerate(layers):
            row = flat[:, number].topk(4).indices
            y = y.index_add(0, row, layer(flat[row]))
        return self.out(y.view_as(x) + x)

    def rows(self, at: Places) -> Ids:
        x, mem, how = x_at(at), at("mem", B, M), self.how
        value = self.inputs()[0]
        flat, data = x.flatten(), value.reshape(-1, H)
        if how == "top two of three experts":
            best = data[:, :3].topk(2, -1).indices
            chosen = [flat[(best == n).nonzero()[:, 0]] for n in range(3)]
        else:
            chosen = [flat[data[:, n].topk(4).indices] for n in range(3)]
        if "expert" in how:
            return {"layer": [chosen[0]], "other": [chosen[1]], "third": [chosen[2]], "out": [x]}
        scattered = torch.empty_like(x)
        scattered[:, ORDER] = x
        taken = x.gather(1, self.chosen(value))
        padded = F.pad(x, (1, 1), value=-1).view(B * 2, 4).clone()
        padded[padded < 0] = at("nobody", 4, 1)[:, 0]
        pairs = torch.triu_indices(S, S)[0]
        swapped = x.roll(-3, 1)
        order = value[..., 0].argsort(1)
        shifts = torch.stack([x, x.roll(1, 1), x.flip(1)])
        layer, out = {
            "heads by einsum": ([x, mem], x),
            "a permutation and back": ([x[:, ORDER]], x),
            "a scatter by a permutation": ([x], scattered),
            "index_copy": ([x], scattered),
            "take_along_dim": ([taken], taken),
            "unfold and fold": ([x.view(B, 2, 3)], x),
            "windows with padding": ([padded], x),
            "shifted heads": ([x.roll(1, 0)], x),
            "a stack of shifts": ([shifts], shifts),
            "cross attention to a flipped memory": ([mem.flip(1)], x),
            "cross attention to a window": ([mem[:, 1:4]], x),
            "two sequences, joined and cut": ([torch.cat([mem, x], 1).flip(1)], x),
            "channels first in between": ([x.flip(1)], x.flip(1)),
            "a tied layer on two orders": ([x, x[:, ORDER]], x),
            "rows of one sample only": ([x[1]], x[1]),
            "triangle of pairs": ([x], x[:, pairs]),
            "swapped halves": ([swapped], swapped),
            "sorted by a feature": ([x.gather(1, order)], x),
            "cumulative maximum of a permutation": ([x[:, ORDER]], x[:, ORDER]),
            "a mean over windows": ([x], at("windows", B, 2)),
        }.get(how, ([x], x))
        return {"layer": layer, "out": [out]}


for _how in WAYS:
    kind(f"moves: {_how}", _how)(Moves)
