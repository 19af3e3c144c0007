"""Recurrences of many kinds, each with the tokens of its uses written beside it.

Step t belongs to t, wherever the rows come from: `nn.RNN`, `nn.GRU` and `nn.LSTM` on rows that were
moved, and loops written by hand. Where the graph does not tell, a parameter may be refused.
"""

from __future__ import annotations

from typing import Any

import torch
from attribution import Places
from kinds_of_models import KINDS, B, H, Ids, Kind, M, S, free, kind, linear, x_at
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["KINDS"]  # those of the other file, and these

ORDER = torch.tensor([3, 0, 5, 1, 4, 2])
LENGTHS = torch.tensor([4, 6])
BACK = (LENGTHS[:, None] - 1 - torch.arange(S)) % S


def moved(how: str, x: Tensor) -> Tensor:
    """Rows (b, s, ...) in another order; numbers are moved as data is."""
    if how == "flip":
        return x.flip(1)
    if how == "roll":
        return x.roll(2, 1)
    if how == "batch":
        return x[[1, 0]]
    if how == "order":
        return x[:, ORDER]
    if how == "even":
        return x[:, ::2]
    if how == "windows":
        return x.reshape(-1, 3, *x.shape[2:])
    if how == "both":
        return x.flip(0).roll(-1, 1)
    if how == "within":
        at = BACK if x.ndim == 2 else BACK[..., None].expand(-1, -1, x.shape[2])
        return x.gather(1, at)
    return x


@kind("RNN after flip", "flip", nn.RNN)
@kind("GRU after roll", "roll", nn.GRU)
@kind("LSTM after a permutation of the batch", "batch", nn.LSTM)
@kind("GRU after a permutation of positions", "order", nn.GRU)
@kind("RNN on every second position", "even", nn.RNN)
@kind("LSTM on windows", "windows", nn.LSTM)
@kind("GRU after moves of both axes", "both", nn.GRU)
@kind("LSTM reversed within lengths", "within", nn.LSTM)
@kind("LSTM in both directions after flip", "flip", nn.LSTM, {"bidirectional": True})
@kind("GRU of two layers after roll", "roll", nn.GRU, {"num_layers": 2})
@kind("LSTM with a projection after flip", "flip", nn.LSTM, {"proj_size": 2})
@kind("RNN steps first after flip", "flip", nn.RNN, {"batch_first": False})
@kind("GRU steps first, all at once", "both", nn.GRU,
      {"batch_first": False, "num_layers": 2, "bidirectional": True})  # fmt: skip
@kind("RNN with relu, unmoved", "", nn.RNN, {"nonlinearity": "relu"})
class RecurrentLayer(Kind):
    """A recurrent layer between two Linear layers."""

    def __init__(self, how: str, make: Any, options: Any = None) -> None:
        super().__init__()
        self.how, options = how, {"batch_first": True, **(options or {})}
        self.embed, self.rnn = linear(), make(H, H, **options)
        width = (options.get("proj_size") or H) * (1 + options.get("bidirectional", False))
        self.out = linear(width, H)

    def forward(self, x: Tensor) -> Tensor:
        x = moved(self.how, self.embed(x))
        y, _ = self.rnn(x if self.rnn.batch_first else x.transpose(0, 1))
        return self.out(y if self.rnn.batch_first else y.transpose(0, 1))

    def rows(self, at: Places) -> Ids:
        x = moved(self.how, x_at(at))
        return {"embed": [x_at(at)], "rnn": [x if self.rnn.batch_first else x.T], "out": [x]}


@kind("the last state of a flipped RNN", "flip", nn.RNN)
@kind("the last state of a GRU on permuted samples", "batch", nn.GRU)
@kind("the last state of an LSTM", "", nn.LSTM)
@kind("the first output of a flipped RNN", "first", nn.RNN)
class LastState(Kind):
    """Only one row of what the layer returns is used."""

    def __init__(self, how: str, make: Any) -> None:
        super().__init__()
        self.how, self.rnn, self.head = how, make(H, H, batch_first=True), linear()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "first":
            return self.head(self.rnn(x.flip(1))[0][:, 0])
        _, state = self.rnn(moved(self.how, x))
        return self.head((state[0] if isinstance(state, tuple) else state)[-1])

    def rows(self, at: Places) -> Ids:
        x = x_at(at).flip(1) if self.how == "first" else moved(self.how, x_at(at))
        return {"rnn": [x], "head": [x[:, 0] if self.how == "first" else x[:, -1]]}


@kind("packed rows of a flipped sequence", "flip", False)
@kind("packed rows, steps first", "steps", False)
@kind("packed rows in both directions of permuted samples", "batch", True)
class PackedRows(Kind):
    def __init__(self, how: str, both: bool) -> None:
        super().__init__()
        self.how, first = how, how != "steps"
        self.rnn = nn.GRU(H, H, batch_first=first, bidirectional=both)
        # Going back, samples begin one after the other, with rows of zeros among the states.
        self.refused = ("out.weight", "out.bias") if both else ()
        self.out = linear(2 * H if both else H, H)

    def forward(self, x: Tensor) -> Tensor:
        x = moved(self.how, x)
        first = self.how != "steps"
        packed = nn.utils.rnn.pack_padded_sequence(
            x if first else x.transpose(0, 1), LENGTHS, first, enforce_sorted=False
        )
        y, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], first)
        return self.out(y if first else y.transpose(0, 1))

    def rows(self, at: Places) -> Ids:
        x = moved(self.how, x_at(at)).clone()
        read = x.masked_fill(torch.arange(S) >= LENGTHS[:, None], -1)
        x[0, 4:] = at("padding", 2, 1)[:, 0]
        return {"rnn": [read if self.how != "steps" else read.T], "out": [x]}


@kind("zeros before what an RNN reads")
class ZerosBefore(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(H, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(torch.cat([x.new_zeros(B, 1, H), x[:, :-1]], 1))[0]

    def rows(self, at: Places) -> Ids:
        return {"rnn": [torch.cat([at("nobody", B, 1), x_at(at)[:, :-1]], 1)]}


@kind("an LSTM that carries its state over chunks")
class Carried(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(H, H, batch_first=True), linear()

    def forward(self, x: Tensor) -> Tensor:
        state, made = None, []
        for chunk in x.flip(1).split(2, 1):
            y, state = self.rnn(chunk, state)
            made.append(y)
        return self.out(torch.cat(made, 1))

    def rows(self, at: Places) -> Ids:
        x = x_at(at).flip(1)
        return {"rnn": list(x.split(2, 1)), "out": [x]}


@kind("the top three rows through a GRU")
class Chosen(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(H, H, batch_first=True), linear()

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, S, H, generator=torch.Generator().manual_seed(5)),)

    def chosen(self) -> Tensor:
        return self.inputs()[0].square().sum(-1).topk(3, 1).indices

    def forward(self, x: Tensor) -> Tensor:
        keep = x.square().sum(-1).topk(3, 1).indices
        return self.out(self.rnn(x.gather(1, keep[..., None].expand(-1, -1, H)))[0])

    def rows(self, at: Places) -> Ids:
        ids = x_at(at).gather(1, self.chosen())
        return {"rnn": [ids], "out": [ids]}


@kind("one RNN on two sequences")
class TwoSequences(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(H, H, batch_first=True), linear()

    def inputs(self) -> tuple[Any, ...]:
        return torch.randn(B, S, H), torch.randn(B, M, H)

    def forward(self, x: Tensor, mem: Tensor) -> Tensor:
        y = self.rnn(torch.cat([mem.flip(1), x], 1))[0]
        return self.out(y)

    def rows(self, at: Places) -> Ids:
        ids = torch.cat([at("mem", B, M).flip(1), x_at(at)], 1)
        return {"rnn": [ids], "out": [ids]}


# -- loops written by hand -----------------------------------------------------------------------


class Cell(nn.Module):
    """A cell with free parameters, which is run again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.w, self.u = how, free(H), free(H)

    def forward(self, h: Tensor, x: Tensor | None = None) -> Tensor:
        if x is None:
            return h * self.w
        if self.how == "after":
            return (h + x) * self.w
        return (h * self.w + x * self.u).tanh()


class Loop(Kind):
    """A loop over positions; `steps` are those whose uses are numbered."""

    start, stop, is_back, is_collected = 0, S, False, False

    def times(self) -> list[int]:
        found = list(range(self.start, self.stop))
        return found[::-1] if self.is_back else found

    def first(self, x: Tensor) -> Tensor:
        return x[:, 0] if self.start else torch.zeros(len(x), H)

    def step(self, h: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h, made = self.first(x), []
        for t in self.times():
            h = self.step(h, x[:, t])
            made.append(h)
        return torch.stack(made, 1) if self.is_collected else h

    def rows(self, at: Places) -> Ids:
        steps = [x_at(at)[:, t] for t in self.times()]
        names = {name.rpartition(".")[0] or name for name, _ in self.named_parameters()}
        return {name: list(steps) for name in names}


STEPS = ("layer on the state", "layer after the step", "norm after the step", "GRU", "LSTM",
         "decay", "lerp", "a layer on both", "two uses in a row", "two uses after the step",
         "a masked weight", "a gate of two", "highway", "a shared layer", "addcmul",
         "a layer of each kind", "features side by side", "a residual step")  # fmt: skip


class Steps(Loop):
    """The same loops from zeros or from the first position, with the last state or all of them."""

    def __init__(
        self, how: str, start: int = 0, collected: bool = False, back: bool = False
    ) -> None:
        super().__init__()
        self.how, self.start, self.is_collected, self.is_back = how, start, collected, back
        gates = {"GRU": 6, "LSTM": 4, "highway": 3, "a gate of two": 2}.get(how, 1)
        if how in ("decay", "lerp", "addcmul"):
            self.w = free(H)
        elif how == "a masked weight":
            self.w, self.mask = free(H), torch.tensor([1.0, 0, 1, 1])
        elif how == "features side by side":
            self.w = linear(2 * H, H)
        elif how == "norm after the step":
            self.w, self.norm = linear(), nn.LayerNorm(H)
        elif how == "a layer of each kind":
            self.w, self.v, self.u = linear(), linear(), linear()
        elif how == "LSTM":
            self.w, self.u = linear(H, 4 * H), linear(H, 4 * H)
        elif gates > 1:
            self.layers = nn.ModuleList(linear() for _ in range(gates))
        elif how == "layer on the state":
            self.w, self.u = linear(), linear()
        else:
            self.w = linear()
        self.memory: Tensor | None = None
        if how == "features side by side" and start:  # the first step may be a head on two rows
            self.refused = ("w.weight", "w.bias")

    def forward(self, x: Tensor) -> Tensor:
        self.memory = None
        return super().forward(x)

    def step(self, h: Tensor, x: Tensor) -> Tensor:
        how = self.how
        if how == "GRU":
            wr, ur, wz, uz, w, u = self.layers
            r, z = (wr(h) + ur(x)).sigmoid(), (wz(h) + uz(x)).sigmoid()
            return (1 - z) * h + z * (w(r * h) + u(x)).tanh()
        if how == "LSTM":
            memory = torch.zeros_like(x) if self.memory is None else self.memory
            i, f, g, o = (self.w(h) + self.u(x)).chunk(4, -1)
            self.memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            return o.sigmoid() * self.memory.tanh()
        if how == "highway":
            w, wz, uz = self.layers
            z = (wz(h) + uz(x)).sigmoid()
            return (1 - z) * h + z * w(h).tanh()
        if how == "a gate of two":
            w, wz = self.layers
            return wz(x).sigmoid() * h + (w(h) + x).tanh()
        found: dict[str, Any] = {
            "layer on the state": lambda: (self.w(h) + self.u(x)).tanh(),
            "layer after the step": lambda: self.w(h + x),
            "norm after the step": lambda: self.norm(self.w(h) + x),
            "decay": lambda: self.w * h + x,
            "lerp": lambda: torch.lerp(h, x, self.w),
            "a layer on both": lambda: self.w((h * 0.5 + x).tanh()) + x,
            "two uses in a row": lambda: self.w(self.w(h).tanh()) + x,
            "two uses after the step": lambda: self.w(self.w(h + x).tanh()),
            "a masked weight": lambda: (h * (self.w * self.mask) + x).tanh(),
            "a shared layer": lambda: (self.w(h) + self.w(x)).tanh(),
            "addcmul": lambda: torch.addcmul(x, h, self.w),
            "a layer of each kind": lambda: self.v((self.w(h) + self.u(x)).tanh()),
            "features side by side": lambda: self.w(torch.cat([x, h], -1)).tanh(),
            "a residual step": lambda: h + self.w(x).tanh(),
        }
        return found[how]()  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        found = super().rows(at)
        twice = ("two uses in a row", "two uses after the step", "a shared layer")
        if self.how in twice:
            found["w"] = [ids for ids in found["w"] for _ in range(2)]
        return found


for _how in STEPS:
    for _start in (0, 1):
        for _collected in (False, True):
            _name = f"{_how}, from {'the first position' if _start else 'zeros'}"
            _name += ", all states" if _collected else ", the last state"
            kind(_name, _how, _start, _collected)(Steps)
for _how in STEPS[:6]:
    kind(f"{_how}, backwards, the last state", _how, 0, False, True)(Steps)


@kind("a cell that is run again", "before", 0)
@kind("a cell that is run again, from the first position", "before", 1)
@kind("a cell that is run again, after the step", "after", 0)
@kind("a free weight on the state, in a module of its own", "state", 0)
@kind("a free weight on the state, in a module of its own, from the first position", "state", 1)
@kind("GRUCell from the first position, behind a layer", "GRUCell", 1)
@kind("LSTMCell, the last state", "LSTMCell", 0)
@kind("a checkpointed step, the last state", "checkpoint", 0)
class Cells(Loop):
    """Cells with free parameters; each call is run again by itself."""

    def __init__(self, how: str, start: int) -> None:
        super().__init__()
        self.how, self.start = how, start
        if how in ("GRUCell", "LSTMCell"):
            self.cell, self.lin = getattr(nn, how)(H, H), linear()
        elif how == "checkpoint":
            self.lin = linear()
        else:
            self.cell = Cell(how)

    def forward(self, x: Tensor) -> Tensor:
        self.memory: Tensor | None = None
        if self.is_slow and self.how.endswith("Cell"):
            module = self.cell
            return self.slow(x, module)
        return super().forward(x)

    def slow(self, x: Tensor, module: Any) -> Tensor:
        h, c = self.first(x), torch.zeros(B, H)
        for t in self.times():
            h, c = module.cell("l0", module.read.pop(0), self.lin(x[:, t]), h, c)
        return h

    def step(self, h: Tensor, x: Tensor) -> Tensor:
        if self.how == "GRUCell":
            return self.cell(self.lin(x), h)  # type: ignore[no-any-return]
        if self.how == "LSTMCell":
            c = torch.zeros_like(h) if self.memory is None else self.memory
            h, self.memory = self.cell(self.lin(x), (h, c))
            return h
        if self.how == "checkpoint":
            if self.is_slow:
                return self.lin(h + x).tanh()  # type: ignore[no-any-return]
            return checkpoint(lambda h, x: self.lin(h + x).tanh(), h, x, use_reentrant=False)  # type: ignore[no-any-return]
        if self.how == "state":
            return (self.cell(h) + x).tanh()  # type: ignore[no-any-return]
        return self.cell(h, x)  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        found = super().rows(at)
        steps = [x_at(at)[:, t] for t in self.times()]
        if "cell" in found:
            del found["cell"]
            if self.how.endswith("Cell"):
                found["cell"] = steps
            else:
                found["cell.w"] = list(steps)
                if self.how == "before":
                    found["cell.u"] = list(steps)
        return found


@kind("two states back", "two back")
@kind("an encoder and a decoder by hand", "encoder")
@kind("an encoder and a decoder, after their steps", "encoder after")
@kind("one layer in an encoder and a decoder", "tied")
@kind("a first state made of the sample", "mean")
@kind("a learned first state", "learned")
@kind("unbound steps from the first position", "unbound")
@kind("unbound steps backwards from the last position", "unbound back")
@kind("one layer for the first half, another for the rest", "halves")
@kind("a layer at every second step", "clockwork")
@kind("a product of two positions", "pair")
@kind("a tree of sums", "tree")
@kind("last states of both directions, side by side", "both ends")
@kind("a mix with the position before, in a recurrence", "token shift")
@kind("written into a buffer, from the first position", "buffer")
@kind("a state that multiplies a matrix memory", "matrix")
@kind("an output that is fed back", "feedback")
@kind("a gate that reads the state and the position", "gated output")
class Others(Kind):
    """Recurrences that are not of the usual form."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.w, self.u = how, linear(), linear()
        if how in ("two back", "encoder", "encoder after", "halves", "feedback", "gated output"):
            self.v = linear()
        if how == "both ends":
            self.head = linear(2 * H, H)
        if how == "learned":
            self.start = free(H)
        if how in ("unbound back", "halves", "clockwork", "pair", "tree", "token shift"):
            self.refused = tuple(f"{e}.{key}" for e in "wuv" for key in ("weight", "bias"))
        if how == "matrix":
            self.v = linear()

    def inputs(self) -> tuple[Any, ...]:
        return torch.randn(B, S, H), torch.randn(B, M, H)

    def forward(self, x: Tensor, mem: Tensor) -> Tensor:
        h, how = torch.zeros(B, H), self.how
        if how == "two back":
            before = h
            for t in range(S):
                h, before = (self.w(h) + self.v(before) + self.u(x[:, t])).tanh(), h
        elif how == "encoder":
            for t in range(M):
                h = (self.v(h) + mem[:, t]).tanh()
            for t in range(S):
                h = (self.w(h) + self.u(x[:, t])).tanh()
        elif how == "encoder after":
            for t in range(M):
                h = self.v(h + mem[:, t]).tanh()
            for t in range(S):
                h = (self.w(h) + self.u(x[:, t])).tanh()
        elif how == "tied":
            for t in range(M):
                h = (self.w(h) + self.u(mem[:, t])).tanh()
            for t in range(S):
                h = (self.w(h) + self.u(x[:, t])).tanh()
        elif how == "mean":
            h = self.u(x.mean(1))
            for t in range(S):
                h = (self.w(h) + x[:, t]).tanh()
        elif how == "learned":
            h = self.start.expand(B, H)
            for t in range(S):
                h = (self.w(h) + self.u(x[:, t])).tanh()
        elif how == "unbound":
            steps = x.unbind(1)
            h = steps[0]
            for each in steps[1:]:
                h = (self.w(h) + self.u(each)).tanh()
        elif how == "unbound back":
            steps = x.unbind(1)
            h = steps[-1]
            for each in steps[-2::-1]:
                h = (self.w(h) + self.u(each)).tanh()
        elif how == "halves":
            for t in range(S):
                h = (self.w if t < S // 2 else self.v)(h + x[:, t]).tanh()
        elif how == "clockwork":
            h = x[:, 0]
            for t in range(1, S - 1):
                h = h + x[:, t]
                h = self.w(h).tanh() if t % 2 else h
            h = h + x[:, -1]
        elif how == "pair":
            h = self.w(x[:, 0] * x[:, -1])
        elif how == "tree":
            level = [self.u(x[:, t]) for t in range(4)]
            while len(level) > 1:
                level = [self.w(a + b).tanh() for a, b in zip(level[::2], level[1::2], strict=True)]
            h = level[0]
        elif how == "both ends":
            back = h
            for t in range(S):
                h = (self.w(h) + x[:, t]).tanh()
            for t in reversed(range(S)):
                back = self.u(back + x[:, t]).tanh()
            h = self.head(torch.cat([h, back], -1))
        elif how == "token shift":
            for t in range(1, S):
                mixed = 0.3 * x[:, t] + 0.7 * x[:, t - 1]
                h = (self.w(h) + self.u(mixed)).tanh()
        elif how == "buffer":
            made = torch.zeros(B, S - 1, H)
            h = x[:, 0]
            for t in range(1, S):
                h = (self.w(h) + x[:, t]).tanh()
                made[:, t - 1] = h
            h = self.u(made)
        elif how == "matrix":
            memory = torch.zeros(B, H, H)
            for t in range(S):
                k, v = self.w(x[:, t]), self.u(x[:, t])
                memory = memory * 0.9 + k[:, :, None] * v[:, None]
                h = self.v((memory @ x[:, t, :, None])[..., 0])
        elif how == "feedback":
            y = h
            for t in range(S):
                h = (self.w(h) + self.u(x[:, t]) + y).tanh()
                y = self.v(h).sigmoid()
            h = y
        else:
            for t in range(S):
                z = self.v(h + x[:, t]).sigmoid()
                h = z * (self.w(h) + self.u(x[:, t])).tanh()
        return h

    def rows(self, at: Places) -> Ids:
        x, mem, how = x_at(at), at("mem", B, M), self.how
        steps, other = list(x.T), list(mem.T)
        found: Ids = {"w": steps, "u": steps}
        if how in ("two back", "gated output"):
            return {**found, "v": steps}
        if how in ("encoder", "encoder after"):
            return {**found, "v": other}
        if how == "tied":
            return {"w": [*other, *steps], "u": [*other, *steps]}
        if how == "mean":
            return {"w": steps, "u": [at("sample", B, 1)[:, 0]]}
        if how == "learned":
            return {**found, "start": [steps[0]]}
        if how == "unbound":
            return {"w": steps[1:], "u": steps[1:]}
        if how == "unbound back":
            return {"w": steps[-2::-1], "u": steps[-2::-1]}
        if how == "halves":
            return {"w": steps[: S // 2], "v": steps[S // 2 :], "u": []}
        if how == "clockwork":
            return {"w": steps[1 : S - 1 : 2], "u": []}
        if how == "pair":
            return {"w": [steps[0]], "u": []}
        if how == "tree":
            return {"u": steps[:4], "w": [steps[1], steps[3], steps[3]]}
        if how == "both ends":
            return {"w": steps, "u": steps[::-1], "head": [at("sample", B, 1)[:, 0]]}
        if how == "token shift":
            return {"w": steps[1:], "u": steps[1:]}
        if how == "buffer":
            return {"w": steps[1:], "u": [x[:, 1:]]}
        return {**found, "v": steps}


class Sizes(Steps):
    """Axes of one size, and a batch of one."""

    def __init__(self, how: str, start: int, b: int, s: int) -> None:
        super().__init__(how, start)
        self.b, self.stop = b, s

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(self.b, self.stop, H),)

    def rows(self, at: Places) -> Ids:
        at("x", self.b, self.stop)
        steps = [at("x", self.b, self.stop)[:, t] for t in self.times()]
        names = {name.rpartition(".")[0] or name for name, _ in self.named_parameters()}
        return {name: list(steps) for name in names}


for _how in ("layer on the state", "layer after the step", "GRU", "a masked weight", "decay"):
    for _start in (0, 1):
        for _b, _s in ((H, H), (1, S), (S, S), (2, 3)):
            kind(f"{_how}, ({_b}, {_s}, {H}), from {_start}", _how, _start, _b, _s)(Sizes)


@kind("GRU of two layers in both directions, one sample", nn.GRU, True)
@kind("LSTM of two layers in both directions, one sample", nn.LSTM, True)
@kind("GRU on the first positions of one sample", nn.GRU, False)
class OneSample(Kind):
    """A recurrent layer on a batch of one, whose steps look like the rows of a batch."""

    def __init__(self, layer: Any, is_whole: bool) -> None:
        super().__init__()
        self.stop = S if is_whole else 2
        options = {"num_layers": 2, "bidirectional": True} if is_whole else {}
        self.core = layer(H, H, batch_first=True, **options)
        self.head = nn.Linear(H * (2 if is_whole else 1), H)

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(1, S, H),)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x[:, : self.stop])[0])

    def rows(self, at: Places) -> Ids:
        x = at("x", 1, S)[:, : self.stop]
        return {"core": [x], "head": [x]}


@kind("delta rule")
class DeltaRule(Kind):
    """A matrix as the state, which is multiplied by the key of the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.head = (nn.Linear(H, H) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.key(x), self.value(x)
        state, outputs = x.new_zeros(len(x), H, H), []
        for t in range(S):
            old = (state @ keys[:, t, :, None])[..., 0]
            state = state + (values[:, t] - old)[..., None] * keys[:, t, None]
            outputs.append((state @ x[:, t, :, None])[..., 0])
        return self.head(torch.stack(outputs, 1))

    def rows(self, at: Places) -> Ids:
        return {name: [x_at(at)] for name in ("key", "value", "head")}


@kind("decoder that begins with the state of an encoder of the same steps")
class TwoWalks(Kind):
    """Two walks over one sequence: the second one meets steps that its state has seen."""

    refused = ("head.weight", "head.bias")

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.GRU(H, H, batch_first=True) for _ in range(2))
        self.head = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(x, self.encoder(x)[1])[0])

    def rows(self, at: Places) -> Ids:
        return {name: [x_at(at)] for name in ("encoder", "decoder", "head")}
