"""Random small models, "programs", each in two forms: a plain module, and the oracle's.

A program is a chain of steps. `Step.forward` is written as people write models; `Step.truth` says
the same with one copy of each parameter per row, while the numbers of the tokens go through the
same moves as the data (`attribution.py`). `program(seed)` draws one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from attribution import Copies, Rows, Verdict, rows_of, verdicts_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Samples, positions, units, heads, and the positions of a second input."""

    b: int
    s: int
    h: int
    heads: int = 2
    m: int = 3


class Step(nn.Module):
    """A part of a program; `other` names the second argument that it takes."""

    other: str | None = None

    def truth(self, use: Copies, x: Rows, *others: Rows) -> Rows:
        raise NotImplementedError


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=torch.float64))


# -- every row by itself -------------------------------------------------------------------------


class Layer(Step):
    """nn.Linear and an activation."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.layer = nn.Linear(size.h, size.h, bias=rng.random() < 0.7)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        y = use.linear(x, self.layer.weight, self.layer.bias)
        return y.holding(y.value.tanh())


class Feedforward(Step):
    """A gated pair of Linears, the inner one wider."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        wide = size.h + rng.choice((0, 3))
        self.up, self.gate = nn.Linear(size.h, wide), nn.Linear(size.h, wide, bias=False)
        self.down = nn.Linear(wide, size.h)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * F.silu(self.gate(x)))

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        up, gate = use.linear(x, self.up.weight, self.up.bias), use.linear(x, self.gate.weight)
        return use.linear(
            x.holding(up.value * F.silu(gate.value)), self.down.weight, self.down.bias
        )


class Norm(Step):
    """LayerNorm, RMSNorm, or the latter written by hand."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.kind = rng.choice(("layer", "rms", "own"))
        if self.kind == "layer":
            self.norm: nn.Module = nn.LayerNorm(size.h)
        elif self.kind == "rms":
            self.norm = nn.RMSNorm(size.h, eps=1e-5)
        else:
            self.weight = parameter(size.h)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "own":
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        return self.norm(x)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        value = x.value
        if self.kind == "layer":
            middle = value - value.mean(-1, keepdim=True)
            flat = middle / (middle.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            norm: Any = self.norm
            return x.holding(flat * use(norm.weight, x) + use(norm.bias, x))
        weight: Any = self.weight if self.kind == "own" else self.norm.weight
        flat = value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x.holding(flat * use(weight, x))


class Scale(Step):
    """Free parameters, multiplied and added, of the shapes in which people write them."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        shapes = [(size.h,), (1, size.h), (1, 1, size.h), (1,), ()]
        self.scale = parameter(*rng.choice(shapes))
        self.shift = parameter(*rng.choice(shapes))
        self.swapped = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.shift + self.scale * x if self.swapped else x * self.scale + self.shift

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        scale, shift = (
            use(each, x).reshape(*x.value.shape[:-1], -1) for each in (self.scale, self.shift)
        )
        return x.holding(x.value * scale + shift)


class Matrix(Step):
    """A free matrix, used in one of the ways in which a Linear can be written."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.weight = parameter(size.h, size.h)
        self.bias = parameter(size.h)
        self.kind = rng.choice(("matmul", "einsum", "linear", "baddbmm", "flat", "left"))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "matmul":
            return x @ self.weight.T + self.bias
        if self.kind == "einsum":
            return torch.einsum("bsi,oi->bso", x, self.weight) + self.bias
        if self.kind == "baddbmm":
            weight = self.weight.T.expand(len(x), -1, -1)
            return torch.baddbmm(self.bias, x, weight)
        if self.kind == "flat":
            flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight.T)
            return flat.view(x.shape)
        if self.kind == "left":
            return (self.weight @ x.mT).mT + self.bias
        return F.linear(x, self.weight, self.bias)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        return use.linear(x, self.weight, self.bias)


class Moved(Step):
    """F.linear with a weight to which a further argument of the model is added."""

    other = "delta"

    def __init__(self, _: random.Random, size: Sizes) -> None:
        super().__init__()
        self.weight = parameter(size.h, size.h)

    def forward(self, x: Tensor, delta: Tensor) -> Tensor:
        return F.linear(x, self.weight + delta)

    def truth(self, use: Copies, x: Rows, *others: Rows) -> Rows:
        weight = use(self.weight, x) + others[0].value
        return x.holding(torch.einsum("...oi,...i->...o", weight, x.value))


class Twice(Step):
    """One layer, called several times: on its own output, or on rows in another order."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.layer = nn.Linear(size.h, size.h)
        self.flipped = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        if self.flipped:
            return self.layer(x) + self.layer(x.flip(1).sin()).flip(1)
        return self.layer(self.layer(x).tanh())

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        first = use.linear(x, self.layer.weight, self.layer.bias)
        if self.flipped:
            turned = x.move(lambda each: each.flip(1))
            turned = turned.holding(turned.value.sin())
            second = use.linear(turned, self.layer.weight, self.layer.bias)
            return first.plus(second.move(lambda each: each.flip(1)))
        return use.linear(first.holding(first.value.tanh()), self.layer.weight, self.layer.bias)


# -- rows that are moved -------------------------------------------------------------------------


class PermutedRows(Step):
    """Rows in another order, drawn or by a score, through a layer, and back."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.layer = nn.Linear(size.h, size.h)
        self.by_score = rng.random() < 0.5
        self.kind = rng.choice(("setitem", "index_copy", "inverse", "index_select"))
        self.register_buffer("order", torch.randperm(size.b * size.s))
        self.register_buffer("probe", torch.randn(size.h))

    def _order(self, flat: Tensor) -> Tensor:
        order: Tensor = (flat @ self.probe).argsort() if self.by_score else self.order
        return order[order < len(flat)]

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        order = self._order(flat)
        if self.kind == "setitem":
            y = torch.empty_like(flat)
            y[order] = self.layer(flat[order])
        elif self.kind == "index_copy":
            y = torch.zeros_like(flat).index_copy(0, order, self.layer(flat[order]))
        elif self.kind == "inverse":
            y = self.layer(flat[order])[order.argsort()]
        else:
            y = self.layer(flat.index_select(0, order)).index_select(0, order.argsort())
        return y.view(x.shape)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        order = self._order(x.value.detach().reshape(-1, x.value.shape[-1]))
        moved = x.move(lambda each: each.reshape(-1, each.shape[-1])[order])
        y = use.linear(moved, self.layer.weight, self.layer.bias)
        back = order.argsort()
        lead = x.value.shape[:-1]
        return y.move(lambda each: each[back].view(*lead, each.shape[-1]))


class SortedTokens(Step):
    """The positions of each sample sorted by a score, a layer, and back."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.layer = nn.Linear(size.h, size.h)
        self.kind = rng.choice(("gather", "take", "index"))
        self.register_buffer("probe", torch.randn(size.h))

    def _taken(self, x: Tensor, order: Tensor) -> Tensor:
        if self.kind == "gather":
            return x.gather(1, order[..., None].expand(*order.shape, x.shape[-1]))
        if self.kind == "take":
            return torch.take_along_dim(x, order[..., None], 1)
        return x[torch.arange(len(x))[:, None], order]

    def forward(self, x: Tensor) -> Tensor:
        order = (x @ self.probe).argsort(1)
        return self._taken(self.layer(self._taken(x, order)), order.argsort(1))

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        order = (x.value.detach() @ self.probe).argsort(1)
        taken = x.move(lambda each: torch.take_along_dim(each, order[..., None], 1))
        y = use.linear(taken, self.layer.weight, self.layer.bias)
        back = order.argsort(1)
        return y.move(lambda each: torch.take_along_dim(each, back[..., None], 1))


class Chosen(Step):
    """Some of the positions, by place or by the best scores, go through a layer."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.layer = nn.Linear(size.h, size.h)
        self.kind = rng.choice(("every second", "reversed", "repeated", "best"))
        places = list(range(size.s))
        self.places = {
            "every second": places[::2],
            "reversed": places[::-1][: max(1, size.s - 1)],
            "repeated": [rng.choice(places) for _ in places],
            "best": [],
        }[self.kind]
        self.register_buffer("probe", torch.randn(size.h))

    def _index(self, x: Tensor) -> Tensor:
        """(b, n)."""
        if self.kind == "best":
            return (x @ self.probe).topk(max(1, x.shape[1] // 2), 1).indices
        return torch.tensor(self.places).expand(len(x), -1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "every second":
            y = torch.zeros_like(x)
            y[:, ::2] = self.layer(x[:, ::2])
            return y
        if self.kind in ("reversed", "repeated"):
            index = torch.tensor(self.places)
            return torch.zeros_like(x).index_add(1, index, self.layer(x[:, index]))
        index = self._index(x)[..., None].expand(-1, -1, x.shape[-1])
        return torch.zeros_like(x).scatter_add(1, index, self.layer(x.gather(1, index)))

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        index = self._index(x.value.detach())[..., None]
        taken = x.move(lambda each: torch.take_along_dim(each, index, 1))
        y = use.linear(taken, self.layer.weight, self.layer.bias).value
        wide = index.expand(-1, -1, y.shape[-1])
        return x.holding(torch.zeros_like(x.value).scatter_add(1, wide, y))


def _flip(x: Tensor) -> Tensor:
    return x.flip(1)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


class Around(Step):
    """A move of all rows, steps, and the move back: flips, rolls, windows, steps first."""

    def __init__(self, rng: random.Random, size: Sizes, depth: int = 0) -> None:
        super().__init__()
        kinds = ["flip", "roll", "transpose", "flat"]
        if size.s % 2 == 0:
            kinds += ["windows", "rolled windows", "strided"]
        if size.s == 8:
            kinds += ["square windows"] * 2
        self.kind = rng.choice(kinds)
        self.size, inner = size, size
        if "windows" in self.kind:
            wide = 4 if self.kind == "square windows" else 2
            inner = replace(size, b=size.b * (size.s // wide), s=wide)
        elif self.kind == "strided":
            inner = replace(size, b=2 * size.b, s=size.s // 2)
        elif self.kind == "transpose":
            inner = replace(size, b=size.s, s=size.b)
        elif self.kind == "flat":
            inner = replace(size, b=1, s=size.b * size.s)
        self.roll = rng.choice((1, -1, 2))
        local = self.kind in ("transpose", "flat")  # the second axis is no sequence
        kinds_inside = ROWWISE if local or depth else ROWWISE + IN_SEQUENCE
        self.inner = nn.ModuleList(
            rng.choice(kinds_inside)(rng, inner) for _ in range(rng.choice((1, 2)))
        )

    def there(self, x: Tensor) -> Tensor:
        b, s = self.size.b, self.size.s
        if self.kind == "flip":
            return _flip(x)
        if self.kind == "roll":
            return x.roll(self.roll, 1)
        if self.kind == "transpose":
            return _transposed(x)
        if self.kind == "flat":
            return x.reshape(1, b * s, x.shape[-1])
        if self.kind == "strided":
            return x.view(b, s // 2, 2, -1).transpose(1, 2).reshape(2 * b, s // 2, -1)
        if self.kind == "square windows":  # 2 x 4 positions, two windows of 2 x 2, shifted by one
            square = torch.roll(x.view(b, 2, 4, -1), shifts=(-1, -1), dims=(1, 2))
            square = square.view(b, 1, 2, 2, 2, x.shape[-1])
            return square.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, x.shape[-1])
        if self.kind == "rolled windows":
            x = x.roll(-1, 1)
        return x.reshape(b * s // 2, 2, x.shape[-1])

    def back(self, x: Tensor) -> Tensor:
        b, s = self.size.b, self.size.s
        if self.kind == "flip":
            return _flip(x)
        if self.kind == "roll":
            return x.roll(-self.roll, 1)
        if self.kind == "transpose":
            return _transposed(x)
        if self.kind == "flat":
            return x.reshape(b, s, x.shape[-1])
        if self.kind == "strided":
            return x.view(b, 2, s // 2, -1).transpose(1, 2).reshape(b, s, -1)
        if self.kind == "square windows":
            square = x.view(b, 1, 2, 2, 2, -1).permute(0, 1, 3, 2, 4, 5).reshape(b, 2, 4, -1)
            square = torch.roll(square, shifts=(1, 1), dims=(1, 2))
            return square.reshape(b, s, -1)
        x = x.reshape(b, s, x.shape[-1])
        return x.roll(1, 1) if self.kind == "rolled windows" else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.there(x)
        for step in self.inner:
            x = step(x)
        return self.back(x)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        x = x.move(self.there)
        for step in self.inner:
            x = step.truth(use, x)  # type: ignore[operator]
        return x.move(self.back)


class Checkpointed(Step):
    """A step whose activations are computed again in the backward pass."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.inner = rng.choice([*ROWWISE, *IN_SEQUENCE, PermutedRows, Twice])(rng, size)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        return self.inner.truth(use, x)


# -- along the sequence --------------------------------------------------------------------------


class Channels(Step):
    """Channels first: convolutions, of which output position l is token l, and biases (c, 1)."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        kinds = ("layer 1", "layer 3", "free 1", "free 3", "depthwise", "causal", "cut", "bias")
        self.kind = rng.choice(kinds)
        h = size.h
        self.width = 1 if self.kind in ("layer 1", "free 1", "bias") else 3
        self.apart = self.kind in ("depthwise", "causal", "cut")
        if self.kind.startswith("free"):
            self.weight = parameter(h, h, self.width)
            self.bias = parameter(h, 1)
        elif self.kind == "bias":
            self.scale, self.bias = parameter(h, 1), parameter(1, h, 1)
        else:
            padding = {"causal": 0, "cut": 2}.get(self.kind, self.width // 2)
            groups = h if self.apart else 1
            self.conv = nn.Conv1d(h, h, self.width, padding=padding, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        s, x = x.shape[1], x.mT
        if self.kind.startswith("free"):
            y = F.conv1d(x, self.weight, padding=self.width // 2) + self.bias
        elif self.kind == "bias":
            y = x * self.scale + self.bias
        elif self.kind == "causal":
            y = self.conv(F.pad(x, (2, 0)))
        else:
            y = self.conv(x)[..., :s]
        return y.mT

    def _rows(self, use: Copies, x: Rows) -> Rows:
        """The rows; of a longer output that is cut off an axis of its own is as right."""
        if self.kind != "cut":
            return x
        b, s = x.value.shape[:2]
        longer = use.places(f"output {b} x {s + 2}", b, s + 2)[:, :s]
        return replace(rows_of(x.value, x.ids[..., 0], x.ids[..., 1], longer), doubtful=x.doubtful)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        if self.kind == "bias":
            scale, bias = use(self.scale, x)[..., 0], use(self.bias, x)[..., 0, :, 0]
            return x.holding(x.value * scale + bias)
        left = {1: 0, 3: 1}[self.width] if self.kind not in ("causal", "cut") else 2
        s = x.value.shape[1]
        padded = F.pad(x.value, (0, 0, left, self.width - 1 - left))
        near = torch.stack([padded[:, at : at + s] for at in range(self.width)], -1)
        if self.kind.startswith("free"):
            y = torch.einsum("bsoik,bsik->bso", use(self.weight, x), near)
            return x.holding(y + use(self.bias, x)[..., 0])
        rows = self._rows(use, x)
        weight = use(self.conv.weight, rows)
        if self.apart:
            y = (weight[:, :, :, 0] * near).sum(-1)
        else:
            y = torch.einsum("bsoik,bsik->bso", weight, near)
        return x.holding(y + use(self.conv.bias, rows))  # type: ignore[arg-type]


class Recurrence(Step):
    """Step t belongs to t: a decay, a layer on the state, or gates; in either direction."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.kind = rng.choice(("decay", "layer", "gated", "free"))
        self.backward_in_time = rng.random() < 0.3
        self.collected = rng.choice(("stack", "cat", "written", "insert"))
        h = size.h
        if self.kind == "decay":
            self.decay = nn.Parameter(torch.rand(h))
        elif self.kind == "layer":
            self.layer = nn.Linear(h, h)
        elif self.kind == "gated":
            self.gate, self.layer = nn.Linear(h, h), nn.Linear(h, h, bias=False)
        else:
            self.weight, self.start = parameter(h, h), parameter(h)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        state = self.start.expand(b, h) if self.kind == "free" else x.new_zeros(b, h)
        times = range(s - 1, -1, -1) if self.backward_in_time else range(s)
        states, written = [], torch.zeros_like(x)
        for t in times:
            now = x[:, t]
            if self.kind == "decay":
                state = self.decay * state + now
            elif self.kind == "layer":
                state = torch.tanh(self.layer(state) + now)
            elif self.kind == "gated":
                keep = torch.sigmoid(self.gate(now))
                state = keep * state + (1 - keep) * self.layer(state).tanh() + now
            else:
                state = torch.tanh(state @ self.weight + now)
            if self.collected == "written":
                written[:, t] = state
            elif self.backward_in_time and self.collected == "insert":
                states.insert(0, state)
            else:
                states.append(state)
        if self.collected == "written":
            return written
        if self.backward_in_time and self.collected != "insert":
            states.reverse()
        if self.collected == "cat":
            return torch.cat([each[:, None] for each in states], 1)
        return torch.stack(states, 1)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        b, s, h = x.value.shape
        state, made = x.value.new_zeros(b, h), [x.value[:, 0]] * s
        for number, t in enumerate(range(s - 1, -1, -1) if self.backward_in_time else range(s)):
            now = x.move(lambda each, t=t: each[:, t])  # type: ignore[misc]
            if number == 0 and self.kind == "free":
                state = use(self.start, now)
            before = now.holding(state)
            if self.kind == "decay":
                state = use(self.decay, now) * state + now.value
            elif self.kind == "layer":
                state = torch.tanh(
                    use.linear(before, self.layer.weight, self.layer.bias).value + now.value
                )
            elif self.kind == "gated":
                keep = use.linear(now, self.gate.weight, self.gate.bias).value.sigmoid()
                new = use.linear(before, self.layer.weight).value.tanh()
                state = keep * state + (1 - keep) * new + now.value
            else:
                weight = use(self.weight, now)
                state = torch.tanh(torch.einsum("bi,bio->bo", state, weight) + now.value)
            made[t] = state
        return x.holding(torch.stack(made, 1))


class Attention(Step):
    """Self-attention; the rows are queries."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        h = size.h
        self.heads, self.causal = size.heads, rng.random() < 0.5
        self.kind = rng.choice(("eager", "sdpa", "scaled", "einsum"))
        self.fused = rng.random() < 0.4
        if self.fused:
            self.qkv = nn.Linear(h, 3 * h)
        else:
            self.q, self.k, self.v = (nn.Linear(h, h, bias=rng.random() < 0.5) for _ in range(3))
        if self.kind == "scaled":
            self.scale = parameter(self.heads, 1, 1)
        self.out = nn.Linear(h, h)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def _weights(self, scores: Tensor) -> Tensor:
        if self.causal:
            hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
            scores = scores.masked_fill(hidden, -math.inf)
        return scores.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            q, k, v = map(self._split, self.qkv(x).chunk(3, -1))
        else:
            q, k, v = self._split(self.q(x)), self._split(self.k(x)), self._split(self.v(x))
        if self.kind == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        elif self.kind == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
            mixed = torch.einsum("bhqk,bhkd->bhqd", self._weights(scores), v)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            if self.kind == "scaled":
                scores = scores * self.scale
            mixed = self._weights(scores) @ v
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        if self.fused:
            parts = use.linear(x, self.qkv.weight, self.qkv.bias).value.chunk(3, -1)
        else:
            parts = [use.linear(x, e.weight, e.bias).value for e in (self.q, self.k, self.v)]
        q, k, v = map(self._split, parts)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.kind == "scaled":
            scores = scores * use(self.scale, x)[..., 0].transpose(1, 2)
        mixed = (self._weights(scores) @ v).transpose(1, 2).reshape(x.value.shape)
        return use.linear(x.holding(mixed), self.out.weight, self.out.bias)


ROWWISE = [Layer, Feedforward, Norm, Scale, Matrix]
IN_SEQUENCE = [Channels, Recurrence, Attention]


# -- experts -------------------------------------------------------------------------------------


class Experts(Step):
    """A mixture of experts, one for each token, in the ways in which these are written."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        h, self.count = size.h, rng.choice((2, 3))
        self.kind = rng.choice(("index_add", "masks", "sorted", "where", "taken", "halves", "bmm"))
        if self.kind in ("halves", "bmm"):
            self.count = 2
        self.router = nn.Linear(h, self.count, bias=False)
        if self.kind in ("taken", "bmm"):
            self.weight = parameter(self.count, h, h)
        else:
            self.experts = nn.ModuleList(nn.Linear(h, h) for _ in range(self.count))

    def _chosen(self, flat: Tensor, scores: Tensor) -> Tensor:
        """The expert of each row, (t,); rows of zeros have no favourite, whatever rounding says."""
        scores = scores + 1e-6 * torch.arange(scores.shape[1])
        if self.kind in ("halves", "bmm"):  # as many rows for the one as for the other
            order = (scores[:, 0] - scores[:, 1]).argsort()
            chosen = torch.zeros_like(order)
            chosen[order[: len(order) // 2]] = 1
            return chosen
        return scores.argmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = self.router(flat).softmax(-1)
        chosen = self._chosen(flat, scores)
        weight = scores.gather(1, chosen[:, None])
        y = torch.zeros_like(flat)
        if self.kind == "index_add":
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0]
                y = y.index_add(0, rows, expert(flat[rows]) * weight[rows])
        elif self.kind == "masks":
            for number, expert in enumerate(self.experts):
                y = y + expert(flat) * weight * (chosen == number)[:, None]
        elif self.kind == "where":
            for number, expert in enumerate(self.experts):
                (rows,) = torch.where(chosen == number)
                if len(rows):
                    y[rows] = weight[rows] * expert(flat[rows])
        elif self.kind == "taken":
            y = torch.einsum("ti,tio->to", flat, self.weight[chosen]) * weight
        else:
            order = chosen.argsort(stable=True)
            counts = chosen.bincount(minlength=self.count).tolist()
            if self.kind == "bmm" and counts[0] == counts[1]:
                parts = torch.bmm(flat[order].view(self.count, -1, x.shape[-1]), self.weight)
                y[order] = parts.flatten(0, 1) * weight[order]
            elif self.kind == "bmm":
                made = [
                    part @ self.weight[number]
                    for number, part in enumerate(flat[order].split(counts))
                ]
                y[order] = torch.cat(made) * weight[order]
            else:
                parts = flat[order].split(counts)
                made = [expert(each) for expert, each in zip(self.experts, parts, strict=True)]
                y = (torch.cat(made) * weight[order])[order.argsort()]
        return y.view(x.shape)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        x_flat = x.move(lambda each: each.reshape(-1, each.shape[-1]))
        scores = use.linear(x_flat, self.router.weight).value.softmax(-1)
        chosen = self._chosen(x_flat.value.detach(), scores.detach())
        y = torch.zeros_like(x_flat.value)
        for number in range(self.count):
            if self.kind in ("taken", "bmm"):
                weight = use(self.weight, x_flat)[:, number]
                made = torch.einsum("ti,tio->to", x_flat.value, weight)
            else:
                expert: Any = self.experts[number]
                made = use.linear(x_flat, expert.weight, expert.bias).value
            y = y + made * scores[:, number, None] * (chosen == number)[:, None]
        return x.holding(y.view(x.value.shape))


# -- a second input ------------------------------------------------------------------------------


class CrossAttention(Step):
    """Queries from one input, keys and values from the other."""

    other = "mem"

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(size.h, size.h) for _ in range(3))
        self.kind = rng.choice(("eager", "sdpa"))

    def forward(self, x: Tensor, mem: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(mem), self.v(mem)
        if self.kind == "sdpa":
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v

    def truth(self, use: Copies, x: Rows, *others: Rows) -> Rows:
        q, k, v = (
            use.linear(rows, each.weight, each.bias).value
            for rows, each in ((x, self.q), (others[0], self.k), (others[0], self.v))
        )
        return x.holding((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v)


class Together(Step):
    """The two inputs one after the other, and steps on all of their rows.

    The tokens are those of either input; an axis of the longer sequence is as right.
    """

    other = "mem"

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.first = rng.random() < 0.7  # x before mem
        longer = replace(size, s=size.s + size.m)
        kinds = [Layer, Norm, Scale, Matrix, Attention]
        self.inner = nn.ModuleList(rng.choice(kinds)(rng, longer) for _ in range(2))

    def forward(self, x: Tensor, mem: Tensor) -> Tensor:
        s = x.shape[1]
        y = torch.cat([x, mem] if self.first else [mem, x], 1)
        for step in self.inner:
            y = step(y)
        return y[:, :s] if self.first else y[:, -s:]

    def truth(self, use: Copies, x: Rows, *others: Rows) -> Rows:
        s, pair = x.value.shape[1], [x, others[0]]
        pair = pair if self.first else pair[::-1]
        value, ids = (torch.cat([getattr(e, what) for e in pair], 1) for what in ("value", "ids"))
        one_axis = use.places("x and mem", len(value), value.shape[1])
        y = replace(rows_of(value, ids[..., 0], one_axis), doubtful=x.doubtful)
        for step in self.inner:
            y = step.truth(use, y)  # type: ignore[operator]
        return x.holding(y.value[:, :s] if self.first else y.value[:, -s:])


# -- without a position --------------------------------------------------------------------------


class Pooled(Step):
    """A gate or a shift from the mean over all positions: its parameters belong to samples."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.layer = nn.Linear(size.h, size.h)
        self.kind = rng.choice(("gate", "shift", "kept"))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "kept":
            return x * self.layer(x.mean(1, keepdim=True)).sigmoid()
        y = self.layer(x.mean(1))[:, None]
        return x * y.sigmoid() if self.kind == "gate" else x + y

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        samples = use.places("sample", len(x.value), 1)
        mean = replace(rows_of(x.value.mean(1, keepdim=True), samples), doubtful=x.doubtful)
        y = use.linear(mean, self.layer.weight, self.layer.bias).value
        return x.holding(x.value + y if self.kind == "shift" else x.value * y.sigmoid())


class Centred(Step):
    """The mean over all positions taken off, and a scale: every row keeps its position."""

    def __init__(self, _: random.Random, size: Sizes) -> None:
        super().__init__()
        self.scale = parameter(size.h)

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) * self.scale

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        return x.holding((x.value - x.value.mean(1, keepdim=True)) * use(self.scale, x))


class Mixer(Step):
    """Positions mixed by a matrix: the rows are channels, or samples, and what follows is in doubt.

    Row t of a matrix on the left, or column t of one on the right, makes position t; that reading
    is right as well.
    """

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.kind = rng.choice(("layer", "matmul", "left"))
        if self.kind == "layer":
            self.layer = nn.Linear(size.s, size.s)
        else:
            self.weight = parameter(size.s, size.s)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return self.layer(x.mT).mT
        return self.weight @ x if self.kind == "left" else (x.mT @ self.weight).mT

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        b, s, h = x.value.shape
        channels = use.places("channel", b, h)[..., None].expand(b, h, s)
        samples = use.places("sample", b, 1)[..., None].expand(b, h, s)
        places = x.ids[:, None, :, 0].expand(b, h, s)
        readings = [channels, samples] + [places] * (self.kind != "layer")
        # A copy for every number that comes out, (b, h, s).
        rows = replace(rows_of(x.value.mT, *readings), doubtful=x.doubtful)
        each = torch.arange(s)
        if self.kind == "layer":
            weight = use(self.layer.weight, rows)[:, :, each, each]
            bias = use(self.layer.bias, rows)[:, :, each, each]
        else:
            weight = use(self.weight, rows)
            weight = (weight if self.kind == "left" else weight.mT)[:, :, each, each]
            bias = torch.zeros(())
        y = torch.einsum("bhts,bhs->bht", weight, x.value.mT) + bias
        return x.holding(y.mT).doubted()


# -- operands that name different positions ------------------------------------------------------


class TokenShift(Step):
    """x * m + before * (1 - m), the position before by one of several ways of shifting.

    Each product has the position of its own row; of their sum nothing decides.
    """

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(rng.choice(((size.h,), (1, 1, size.h)))))
        self.kind = rng.choice(("cat", "pad", "written"))
        self.layer = nn.Linear(size.h, size.h) if rng.random() < 0.5 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "cat":
            before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        elif self.kind == "pad":
            before = F.pad(x, (0, 0, 1, -1))
        else:
            before = torch.zeros_like(x)
            before[:, 1:] = x[:, :-1]
        y = x * self.mix + before * (1 - self.mix)
        return y if self.layer is None else self.layer(y)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        last = x.move(lambda each: each[:, :-1])

        def row(rows: Rows) -> Tensor:
            return use(self.mix, rows).reshape(*rows.value.shape)

        before = F.pad(last.value * (1 - row(last)), (0, 0, 1, 0))
        y = x.holding(x.value * row(x) + before).doubted()
        if self.layer is None:
            return y
        return use.linear(y, self.layer.weight, self.layer.bias)


class Mixed(Step):
    """Rows of two positions in one, times a parameter: refused, or the place."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.weight = parameter(size.h)
        self.kind = rng.choice(("flip", "roll", "maximum", "product", "cumsum", "softmax"))
        self.swapped = rng.random() < 0.5

    def _mix(self, x: Tensor) -> Tensor:
        if self.kind == "cumsum":
            return x.cumsum(1)
        if self.kind == "softmax":
            return x.softmax(1)
        pair = [x, x.roll(1, 1) if self.kind == "roll" else x.flip(1)]
        one, two = pair[::-1] if self.swapped else pair
        if self.kind == "maximum":
            return torch.maximum(one, two)
        return one * two if self.kind == "product" else one + two

    def forward(self, x: Tensor) -> Tensor:
        return self._mix(x) * self.weight

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        y = x.holding(self._mix(x.value)).doubted()
        return y.holding(y.value * use(self.weight, y))


class AdditiveAttention(Step):
    """v . tanh(q_i + k_j): rows of a query and a key at once."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(size.h, size.h), nn.Linear(size.h, size.h)
        self.v = parameter(size.h)
        self.swapped = rng.random() < 0.5

    def _pairs(self, q: Tensor, k: Tensor) -> Tensor:
        one, two = q[:, :, None], k[:, None]
        return (two + one if self.swapped else one + two).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return (self._pairs(self.q(x), self.k(x)) @ self.v).softmax(-1) @ x

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        q, k = (use.linear(x, each.weight, each.bias).value for each in (self.q, self.k))
        y = x.doubted()
        scores = torch.einsum("bqkh,bqh->bqk", self._pairs(q, k), use(self.v, y))
        return y.holding(scores.softmax(-1) @ x.value)


STEPS: list[type[Step]] = [
    *ROWWISE,
    *IN_SEQUENCE,
    *IN_SEQUENCE,
    Moved,
    Twice,
    PermutedRows,
    SortedTokens,
    Chosen,
    Around,
    Around,
    Checkpointed,
    Experts,
    Experts,
    CrossAttention,
    Together,
    Pooled,
    Centred,
]
DOUBTFUL: list[type[Step]] = [TokenShift, Mixed, AdditiveAttention, Mixer]


# -- beginnings and ends -------------------------------------------------------------------------


class Words(Step):
    """Ids (b, s) to vectors, with or without positions."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(7, size.h)
        self.kind = rng.choice(("none", "layer", "rows", "broadcast"))
        if self.kind == "layer":
            self.positions = nn.Embedding(size.s + 1, size.h)
        elif self.kind != "none":
            shape = (size.s + 1, size.h) if self.kind == "rows" else (1, size.s, size.h)
            self.place = parameter(*shape)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        if self.kind == "layer":
            x = x + self.positions(torch.arange(ids.shape[1]))
        elif self.kind != "none":
            x = x + (self.place[: ids.shape[1]] if self.kind == "rows" else self.place)
        return x

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        ids = x.value[..., 0].long()
        s = ids.shape[1]
        words = use(self.words.weight, x)
        y = torch.take_along_dim(words, ids[..., None, None], 2)[:, :, 0]
        if self.kind != "none":
            table = use(self.positions.weight if self.kind == "layer" else self.place, x)
            table = table[:, :, 0] if self.kind == "broadcast" else table
            y = y + table[:, torch.arange(s), torch.arange(s)]
        return x.holding(y)


class Patches(Step):
    """Patches of 2 x 2 of an image (b, 2, 2, 2 s), by a convolution; one token each."""

    def __init__(self, _: random.Random, size: Sizes) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, size.h, 2, 2)

    def forward(self, image: Tensor) -> Tensor:
        return self.conv(image).flatten(2).mT

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        weight = use(self.conv.weight, x).flatten(3)
        y = torch.einsum("bsoi,bsi->bso", weight, x.value)
        return x.holding(y + use(self.conv.bias, x))  # type: ignore[arg-type]


class Head(Step):
    """The end: all positions, their mean or maximum, or the first of them."""

    def __init__(self, rng: random.Random, size: Sizes) -> None:
        super().__init__()
        self.head = nn.Linear(size.h, 3)
        self.kind = rng.choice(("all", "mean", "maximum", "first"))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "mean":
            x = x.mean(1)
        elif self.kind == "maximum":
            x = x.amax(1)
        elif self.kind == "first":
            x = x[:, 0]
        return self.head(x)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        if self.kind != "all":
            samples = use.places("sample", len(x.value), 1)[:, 0]
            value = {
                "mean": x.value.mean(1),
                "maximum": x.value.amax(1),
                "first": x.value[:, 0],
            }[self.kind]
            # The first position is a position; an axis of samples is as right.
            first = x.ids[:, 0, 0] if self.kind == "first" else samples
            x = replace(rows_of(value, first, samples), doubtful=x.doubtful)
        return use.linear(x, self.head.weight, self.head.bias)


class Program(nn.Module):
    """Steps in a chain, some of them around a residual connection."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        s = rng.choice((2, 3, 4, 5, 6, 8))
        size = Sizes(
            rng.choice((1, 2, 2, 3, 4)), s, rng.choice((4, 6)), 2, rng.choice((2, s, s + 2))
        )
        self.size = size
        self.begin: Step | None = None
        beginning = rng.random()
        if beginning < 0.25:
            self.begin = Words(rng, size)
        elif beginning < 0.35:
            self.begin = Patches(rng, size)
        kinds: list[type[Step]] = [rng.choice(STEPS) for _ in range(rng.choice((1, 2, 3, 4)))]
        if rng.random() < 0.2:
            kinds.insert(rng.randrange(len(kinds) + 1), rng.choice(DOUBTFUL))
        self.steps = nn.ModuleList(kind(rng, size) for kind in kinds)
        self.residual = [rng.random() < 0.5 for _ in kinds]
        self.direct = [rng.random() < 0.05 for _ in kinds]
        self.end = Head(rng, size) if rng.random() < 0.4 else None

    @property
    def others(self) -> list[str]:
        return sorted({each.other for each in self.steps if each.other})  # type: ignore[misc]

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        if self.begin is not None:
            x = self.begin(x)
        for step, residual, direct in zip(self.steps, self.residual, self.direct, strict=True):
            arguments = (x,) if step.other is None else (x, others[step.other])  # type: ignore[index]
            y = step.forward(*arguments) if direct else step(*arguments)
            x = x + y if residual else y
        return x if self.end is None else self.end(x)

    def truth(self, use: Copies, x: Rows, **others: Rows) -> Rows:
        if self.begin is not None:
            x = self.begin.truth(use, x)
        for step, residual in zip(self.steps, self.residual, strict=True):
            arguments = (x,) if step.other is None else (x, others[step.other])  # type: ignore[index]
            y = step.truth(use, *arguments)  # type: ignore[operator]
            x = x.plus(y) if residual else y
        return x if self.end is None else self.end.truth(use, x)

    def inputs(self) -> dict[str, Tensor]:
        """Its arguments, with the first one under "x"."""
        size = self.size
        first = torch.randn(size.b, size.s, size.h)
        if isinstance(self.begin, Words):
            first = torch.randint(7, (size.b, size.s))
        elif isinstance(self.begin, Patches):
            first = torch.randn(size.b, 2, 2, 2 * size.s)
        found = {"x": first}
        if "mem" in self.others:
            found["mem"] = torch.randn(size.b, size.m, size.h)
        if "delta" in self.others:
            found["delta"] = torch.randn(size.h, size.h)
        return found

    def rows(self, use: Copies, inputs: dict[str, Tensor]) -> dict[str, Rows]:
        """The arguments with the numbers of their tokens."""
        size, found = self.size, {}
        for name, value in inputs.items():
            if name == "x" and isinstance(self.begin, Words):
                value = value[..., None].double()
            elif name == "x" and isinstance(self.begin, Patches):
                value = value.view(size.b, 2, 2, size.s, 2).permute(0, 3, 1, 2, 4).flatten(2)
            if name == "delta":
                found[name] = Rows(value, value)
            else:
                found[name] = rows_of(value, use.places(name, *value.shape[:2]))
        return found


def kind_of(program: Program, name: str) -> str:
    """What the step of a parameter is, such as "Recurrence decay"."""
    part, _, rest = name.partition(".")
    step: Any = getattr(program, part)
    words = []
    for each in [*rest.split(".")[:-1], ""]:
        if isinstance(step, Step):
            words.append(f"{type(step).__name__} {getattr(step, 'kind', '')}".strip())
        if each:
            step = getattr(step, each)
    return " > ".join(words) or part


def program(seed: int) -> tuple[Program, dict[str, Tensor]]:
    """A program and its inputs, in float64."""
    rng = random.Random(seed)
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        try:
            found = Program(rng)
            with torch.no_grad():
                for each in found.parameters():  # nothing is zero or one by accident
                    each.add_(0.3 * torch.randn(each.shape))
            return found, found.inputs()
        finally:
            torch.set_default_dtype(default)


def judged(seed: int) -> tuple[Program, list[Verdict]]:
    """A program with what became of each of its parameters."""
    found, inputs = program(seed)
    generator = torch.Generator().manual_seed(seed)

    def loss(output: Tensor) -> Tensor:
        weights = torch.randn(output.shape, generator=generator.manual_seed(seed)).double()
        return (output * weights).sum() + output.sin().square().mean()

    def written_out(use: Copies) -> Tensor:
        return loss(found.truth(use, **found.rows(use, inputs)).value)

    return found, verdicts_of(found, lambda: loss(found(**inputs)), written_out)
