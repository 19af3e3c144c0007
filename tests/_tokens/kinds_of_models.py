"""Small models of many kinds, each with the tokens of the rows of every layer written beside it.

`forward` is written as users write it. `rows` numbers the rows that each layer returns, call by
call, and those that each free parameter is broadcast to. `truth_by_rows` needs nothing else: it
adds a probe to what a layer returns, so that the probe's gradient is what reaches each row, and
differentiates the layer row by row. A free parameter is replaced by one copy per row.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from attribution import Places, Truth
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

B, S, H = 2, 6, 4
M = 5  # of a second sequence
LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Conv1d, nn.Conv2d,
          nn.ConvTranspose1d, nn.ConvTranspose2d, nn.PReLU, nn.GroupNorm, nn.Bilinear)  # fmt: skip
Ids = dict[str, list[Tensor]]


class Kind(nn.Module):
    """A model with its tokens.

    Attributes:
        refused: Parameters that may be refused: nothing says whose their rows are.
        second: Layers with features second.
        is_slow: Whether this is the copy of which the truth is found (no probe works in a vmap).
    """

    refused: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    is_slow = False

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, S, H),)

    def rows(self, at: Places) -> Ids:
        """By layer or free parameter, the numbers of the rows of each call or use."""
        raise NotImplementedError

    def spread(self, at: Places) -> dict[str, Tensor]:
        """By parameter, the numbers (b, n) of the tokens at which each of its n rows is used."""
        return {}

    def loss(self, *inputs: Any, only: int | None = None) -> Tensor:
        """A loss to which samples contribute one by one; `only` one of them, or all."""
        output = self(*inputs)
        weights = torch.linspace(-1, 2, output.numel()).view(output.shape)
        some = slice(None) if only is None else only
        return (output * weights)[some].sum() + output.sin().square()[some].sum() / output.numel()


def linear(i: int = H, o: int = H) -> nn.Linear:
    return nn.Linear(i, o)


def free(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


# -- the truth -----------------------------------------------------------------------------------


def truth_by_rows(model: Kind, *inputs: Any) -> tuple[Tensor, Truth]:
    """The loss, and the gradient of every token, row by row."""
    at = Places()
    numbers = model.rows(at)
    slow = copy.deepcopy(model)
    slow.is_slow = True
    for name, module in list(slow.named_modules()):
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            parent, _, key = name.rpartition(".")
            unrolled = Unrolled(module, name, numbers)
            setattr(slow.get_submodule(parent), key, unrolled)
    calls: dict[str, list[tuple[tuple[Any, ...], Tensor]]] = defaultdict(list)
    found: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # (ids, gradients)
    modules = {name: each for name, each in slow.named_modules() if isinstance(each, LAYERS)}
    handles = []
    for name, module in modules.items():

        def after(_: nn.Module, arguments: Any, output: Tensor, name: str = name) -> Tensor:
            probe = torch.zeros_like(output, requires_grad=True)
            kept = tuple(e.detach().clone() if isinstance(e, Tensor) else e for e in arguments)
            calls[name].append((kept, probe))
            return output + probe

        handles.append(module.register_forward_hook(after))
    copies = _with_copies(slow, numbers)
    loss = slow.loss(*inputs)
    loss.backward()
    for each in handles:
        each.remove()
    for name, several in copies.items():
        found[name] += [
            (ids.reshape(-1), each.grad.reshape(-1, *model.get_parameter(name).shape))
            for ids, each in several if each.grad is not None
        ]  # fmt: skip
    for name, module in modules.items():
        if not numbers[name]:  # see `spread`
            continue
        assert len(calls[name]) == len(numbers[name]), f"{name}: {len(calls[name])} calls"
        for (arguments, probe), ids in zip(calls[name], numbers[name], strict=True):
            second = isinstance(module, nn.modules.conv._ConvNd) or name in model.second
            for key, parts in _by_row(module, arguments, probe, ids, second).items():
                found[f"{name}.{key}"].append((ids.reshape(-1), parts))
    for name, ids in model.spread(at).items():
        parameter = model.get_parameter(name)
        for b, own in enumerate(ids):
            loss_of_sample = model.loss(*inputs, only=b)
            (whole,) = torch.autograd.grad(loss_of_sample, parameter)
            parts = whole.new_zeros(len(own), *whole.shape)
            rows = parts.view(len(own), -1, whole.shape[-1])
            each = torch.arange(len(own))
            rows[each, each] = whole.view(-1, whole.shape[-1])[: len(own)]
            found[name].append((own, parts))
    truth = {_in_torch(name): [_placed(at, each)] for name, each in found.items()}
    return loss.detach(), Truth(truth)


def _in_torch(name: str) -> str:
    """The name of a parameter of a recurrent layer, of which `Unrolled` has made a Linear."""
    path, _, key = name.rpartition(".")
    path, _, cell = path.rpartition(".")
    if path == "cell":  # of a GRUCell or LSTMCell
        cell = cell.removesuffix("_l0")
    return f"{path}.{key}_{cell}" if cell.startswith(("ih", "hh", "hr")) else name


def _settings(module: Any) -> Any:
    """What `Unrolled` asks a layer, or a cell, which has one layer."""
    if isinstance(module, nn.RNNBase):
        return module
    mode = {nn.GRUCell: "GRU", nn.LSTMCell: "LSTM", nn.RNNCell: "RNN_TANH"}[type(module)]
    return SimpleNamespace(mode=mode, batch_first=True, proj_size=0)


class Unrolled(nn.Module):
    """An RNN, GRU or LSTM as one Linear per product and step.

    Args:
        module: The layer.
        name: In the model.
        numbers: Those of the rows that it reads, for each call, are there under its name; those of
            each Linear are added.
    """

    def __init__(self, module: Any, name: str, numbers: Ids) -> None:
        super().__init__()
        self.settings, self.at, self.numbers = [_settings(module)], name, numbers
        self.batch_first = self.settings[0].batch_first
        self.read = numbers.pop(name)
        for key, weight in module.named_parameters():
            kind, _, cell = key.partition("_")
            if kind == "weight":
                own = f"bias_{cell}"
                cell = cell if "_l" in cell else f"{cell}_l0"
                bias = module._parameters.get(own)
                made = nn.Linear(*weight.T.shape, bias=bias is not None)
                made.load_state_dict({"weight": weight, **({} if bias is None else {"bias": bias})})
                self.add_module(cell, made)
                numbers[f"{name}.{cell}"] = []

    def product(self, cell: str, ids: Tensor, x: Tensor) -> Tensor:
        self.numbers[f"{self.at}.{cell}"].append(ids)
        return self.get_submodule(cell)(x)  # type: ignore[no-any-return]

    def cell(self, at: str, ids: Tensor, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        (module,) = self.settings
        given, state = self.product(f"ih_{at}", ids, x), self.product(f"hh_{at}", ids, h)
        if module.mode == "GRU":
            (r, z, n), (hr, hz, hn) = given.chunk(3, -1), state.chunk(3, -1)
            z = (z + hz).sigmoid()
            return (1 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * h, c
        if module.mode == "LSTM":
            i, f, g, o = (given + state).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            return (self.product(f"hr_{at}", ids, h) if module.proj_size else h), c
        both = given + state
        return (both.tanh() if module.mode == "RNN_TANH" else both.relu()), c

    def forward(self, x: Any, state: Any = None) -> Any:
        (module,), ids, lengths = self.settings, self.read.pop(0), None
        packed = x if isinstance(x, nn.utils.rnn.PackedSequence) else None
        if packed is not None:
            x, lengths = nn.utils.rnn.pad_packed_sequence(packed)
            ids = ids.T if module.batch_first else ids
        elif module.batch_first:
            x, ids = x.transpose(0, 1), ids.T
        size = (x.shape[1], module.proj_size or module.hidden_size)
        zero = x.new_zeros(x.shape[1], module.hidden_size)
        given = state if module.mode == "LSTM" else (state, None)
        ends: list[tuple[Tensor, Tensor]] = []
        for layer in range(module.num_layers):
            both = []
            for back in range(1 + module.bidirectional):
                h = x.new_zeros(size) if state is None else given[0][len(ends)]
                c = zero if state is None or given[1] is None else given[1][len(ends)]
                made: dict[int, Tensor] = {}
                for t in list(range(len(x)))[:: -1 if back else 1]:
                    at = f"l{layer}{'_reverse' if back else ''}"
                    new = self.cell(at, ids[t], x[t], h, c)
                    if lengths is not None:
                        here = (t < lengths)[:, None]
                        new = torch.where(here, new[0], h), torch.where(here, new[1], c)
                    h, c = new
                    made[t] = h if lengths is None else torch.where(here, h, 0.0)
                both.append(torch.stack([made[t] for t in sorted(made)]))
                ends.append((h, c))
            x = torch.cat(both, -1)
        h, c = (torch.stack(each) for each in zip(*ends, strict=True))
        last = (h, c) if module.mode == "LSTM" else h
        if packed is not None:
            again = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
            return (
                again
                if packed.sorted_indices is not None
                else packed._replace(data=nn.utils.rnn.pack_padded_sequence(x, lengths).data)
            ), last
        return (x.transpose(0, 1) if module.batch_first else x), last


def _by_row(
    module: nn.Module, arguments: tuple[Any, ...], probe: Tensor, ids: Tensor, second: bool
) -> dict[str, Tensor]:
    own = dict(module.named_parameters(recurse=False))
    with torch.enable_grad():
        output, g = module(*arguments), probe.grad
        g = torch.zeros_like(probe) if g is None else g
        if second:
            output, g = output.movedim(1, -1), g.movedim(1, -1)
        assert output.shape[:-1] == ids.shape, (output.shape, ids.shape)
        output, g = output.reshape(-1, output.shape[-1]), g.reshape(-1, g.shape[-1])
        rows = [
            torch.autograd.grad(y, list(own.values()), each, retain_graph=True)
            for y, each in zip(output, g, strict=True)
        ]
    return {
        key: torch.stack(several) for key, several in zip(own, zip(*rows, strict=True), strict=True)
    }


def _with_copies(slow: Kind, numbers: Ids) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Replace free parameters by copies, another one each time that it is read."""
    made: dict[str, list[tuple[Tensor, Tensor]]] = {}
    names = {name for name, _ in slow.named_parameters()}
    for name in [each for each in numbers if each in names]:
        path, _, key = name.rpartition(".")
        owner = slow.get_submodule(path)
        parameter, left = owner._parameters.pop(key), list(numbers[name])
        made[name] = several = []

        def read(
            _: Any, parameter: Any = parameter, left: Any = left, several: Any = several
        ) -> Tensor:
            ids = left.pop(0)
            spread = parameter.detach().expand(*ids.shape, *parameter.shape)
            several.append((ids, spread.clone().requires_grad_()))
            return several[-1][1]

        owner.__class__ = type(type(owner).__name__, (type(owner),), {key: property(read)})
    return made


def _placed(at: Places, several: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    shape = several[0][1].shape[1:]
    total = torch.zeros(at.total, *shape)
    used = set()
    for ids, parts in several:
        keep = ids >= 0
        total.index_add_(0, ids[keep], parts[keep])
        used |= {k for k, (start, b, s) in at.blocks.items()
                 if bool(((ids >= start) & (ids < start + b * s)).any())}  # fmt: skip
    return {
        kind: total[start : start + b * s].view(b, s, *shape)
        for kind, (start, b, s) in at.blocks.items() if kind in used
    }  # fmt: skip


def x_at(at: Places) -> Tensor:
    return at("x", B, S)


KINDS: dict[str, Callable[[], Kind]] = {}


def kind(name: str, *arguments: Any) -> Callable[[type[Kind]], type[Kind]]:
    def register(made: type[Kind]) -> type[Kind]:
        KINDS[name] = lambda: made(*arguments)
        return made

    return register


# -- patches -------------------------------------------------------------------------------------


@kind("patches by reshape", "reshape")
@kind("patches by unfold", "unfold")
@kind("patches by two unfolds", "unfolds")
@kind("patches by einsum order", "nhwc")
@kind("overlapping patches", "overlap")
class Patches(Kind):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed, self.after = linear(27 if how == "overlap" else 12), linear()
        self.scale = free(H)

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 3, 8, 8),)

    def patches(self, x: Tensor) -> Tensor:
        if self.how == "reshape":
            x = x.reshape(B, 3, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5)
            return x.reshape(B, 16, 12)
        if self.how == "nhwc":
            return x.reshape(B, 3, 4, 2, 4, 2).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        if self.how == "unfolds":
            x = x.unfold(2, 2, 2).unfold(3, 2, 2)
            return x.permute(0, 2, 3, 1, 4, 5).reshape(B, 16, 12)
        if self.how == "overlap":
            return F.unfold(x, 3, padding=1, stride=2).mT
        return F.unfold(x, 2, stride=2).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.patches(x))
        return self.after(x.tanh()) * self.scale

    def rows(self, at: Places) -> Ids:
        ids = at("patches", B, 16)
        return {"embed": [ids], "after": [ids], "scale": [ids]}


@kind("patches of a series", False)
@kind("overlapping patches of a series", True)
class SeriesPatches(Kind):
    def __init__(self, overlap: bool) -> None:
        super().__init__()
        self.overlap, self.embed, self.after = overlap, linear(12), linear()

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 12, 3),)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unfold(1, 4, 2).flatten(2) if self.overlap else x.reshape(B, 3, 12)
        return self.after(self.embed(x).tanh())

    def rows(self, at: Places) -> Ids:
        ids = at("patches", B, 5 if self.overlap else 3)
        return {"embed": [ids], "after": [ids]}


@kind("patches with a class token and positions")
class VisionTransformer(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = linear(12), linear(), linear(H, 3)
        self.norm = nn.LayerNorm(H)
        self.cls, self.pos = free(H), free(1, 17, H)

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 3, 8, 8),)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(B, 3, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, 16, 12)
        x = self.embed(x)
        x = torch.cat([self.cls.expand(B, 1, H), x], 1)
        x = x + self.pos
        x = x + self.mlp(F.scaled_dot_product_attention(x, x, x))
        return self.head(self.norm(x)[:, 0])

    def rows(self, at: Places) -> Ids:
        patches, longer = at("patches", B, 16), at("longer", B, 17)
        return {"embed": [patches], "mlp": [longer], "norm": [longer], "head": [longer[:, 0]]}

    def spread(self, at: Places) -> dict[str, Tensor]:
        longer = at("longer", B, 17)
        return {"cls": longer[:, :1], "pos": longer}


# -- windows -------------------------------------------------------------------------------------


@kind("shifted windows with a bias table")
class ShiftedWindows(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = linear(H, 3 * H), linear()
        self.bias = nn.Embedding(5, 1)

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 9, H),)

    def forward(self, x: Tensor) -> Tensor:
        w = x.roll(-1, 1).view(B, 3, 3, H).reshape(-1, 3, H)
        q, k, v = self.qkv(w).chunk(3, -1)
        place = torch.arange(3)
        table = self.bias(place[:, None] - place[None] + 2)[..., 0]
        scores = (q @ k.mT + table).softmax(-1)
        y = self.out(scores @ v).reshape(B, 9, H).roll(1, 1)
        return x + y

    def rows(self, at: Places) -> Ids:
        w = at("x", B, 9).roll(-1, 1).view(-1, 3)
        return {"qkv": [w], "out": [w], "bias": [at("pairs", 3, 3)]}


@kind("windows of an image")
class ImageWindows(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layer, self.gain = nn.Conv2d(3, H, 2, 2), linear(), free(H)

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 3, 8, 8),)

    def windows(self, x: Tensor) -> Tensor:
        return x.view(B, 2, 2, 2, 2, -1).permute(0, 1, 3, 2, 4, 5).reshape(B * 4, 4, -1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).permute(0, 2, 3, 1)
        w = self.layer(self.windows(x.contiguous())) * self.gain
        return w.view(B, 2, 2, 2, 2, H).permute(0, 1, 3, 2, 4, 5).reshape(B, 4, 4, H) + x

    def rows(self, at: Places) -> Ids:
        ids = at("patches", B, 16)
        w = self.windows(ids.view(B, 4, 4, 1))[..., 0]
        return {"conv": [ids.view(B, 4, 4)], "layer": [w], "gain": [w]}


# -- learned queries -----------------------------------------------------------------------------


@kind("perceiver", "latents")
@kind("queries of one row each", "one")
@kind("queries expanded by repeat", "repeat")
class Perceiver(Kind):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.n = how, 1 if how == "one" else 3
        self.q, self.kv, self.o = linear(), linear(H, 2 * H), linear()
        self.mlp, self.norm, self.qkv = linear(), nn.LayerNorm(H), linear(H, 3 * H)
        self.latents = free(self.n, H)

    def forward(self, x: Tensor) -> Tensor:
        latents = (
            self.latents[None].repeat(B, 1, 1) if self.how == "repeat"
            else self.latents.expand(B, -1, -1)
        )  # fmt: skip
        k, v = self.kv(x).chunk(2, -1)
        latents = latents + self.o((self.q(latents) @ k.mT).softmax(-1) @ v)
        latents = latents + self.mlp(self.norm(latents)).relu()
        q, k, v = self.qkv(latents).chunk(3, -1)
        return latents + F.scaled_dot_product_attention(q, k, v)

    def rows(self, at: Places) -> Ids:
        ids = at("latents", B, self.n)
        own = {name: [ids] for name in ("q", "o", "mlp", "norm", "qkv")}
        return {**own, "kv": [x_at(at)]}

    def spread(self, at: Places) -> dict[str, Tensor]:
        return {"latents": at("latents", B, self.n)}


@kind("queries from an embedding, DETR")
class Detr(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.k, self.v, self.q = (linear() for _ in range(4))
        self.ff, self.head = linear(), linear(H, 3)
        self.queries = nn.Embedding(3, H)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.embed(x)
        place = self.queries.weight.unsqueeze(0).repeat(len(x), 1, 1)
        target = torch.zeros_like(place)
        for _ in range(2):
            q = self.q(target + place)
            scores = (q @ self.k(memory).mT / 2).softmax(-1)
            target = target + scores @ self.v(memory)
            target = target + self.ff(target).relu()
        return self.head(target)

    def rows(self, at: Places) -> Ids:
        x, ids = x_at(at), at("queries", B, 3)
        found = {"embed": [x], "k": [x, x], "v": [x, x], "q": [ids, ids], "ff": [ids, ids]}
        return {**found, "head": [ids], "queries": []}

    def spread(self, at: Places) -> dict[str, Tensor]:
        return {"queries.weight": at("queries", B, 3)}


@kind("attention pooling with a learned query")
class AttentionPool(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.k, self.v, self.head = free(H), linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.k(x) * self.query).sum(-1).softmax(1)
        return self.head((scores[..., None] * self.v(x)).sum(1))

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        return {"query": [x], "k": [x], "v": [x], "head": [at("sample", B, 1)[:, 0]]}


# -- choosing rows -------------------------------------------------------------------------------


@kind("masked select and masked scatter")
class MaskedSelect(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other, self.gain = linear(), linear(), free(H)

    def inputs(self) -> tuple[Any, ...]:
        return torch.randn(B, S, H), torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 1]]) > 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        chosen = self.layer(x[mask]) * self.gain
        y = x.masked_scatter(mask[..., None], chosen)
        z = torch.zeros_like(x)
        z[mask] = chosen.tanh()
        return self.other(y + z)

    def rows(self, at: Places) -> Ids:
        chosen = x_at(at)[self.inputs()[1]]
        return {"layer": [chosen], "gain": [chosen], "other": [x_at(at)]}


@kind("packed sequence")
class Packed(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain, self.head = linear(), free(H), linear()

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, torch.tensor([4, 6]), batch_first=True, enforce_sorted=False
        )
        data = self.layer(packed.data) * self.gain
        packed = nn.utils.rnn.PackedSequence(data, *packed[1:])
        y, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
        return self.head(y)

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        lengths = [6, 4]  # sorted: sample 1 first
        packed = torch.stack([x[1 - n, t] for t in range(6) for n in (0, 1) if lengths[n] > t])
        padded = x.clone()
        padded[0, 4:] = at("padding", 2, 1)[:, 0]
        return {"layer": [packed], "gain": [packed], "head": [padded]}


@kind("pruned by top-k", "topk")
@kind("pruned by sort", "sort")
@kind("kept in order", "ordered")
class Pruned(Kind):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.layer, self.score = how, linear(), linear(), linear(H, 1)
        self.gain = free(H)

    def keep(self, x: Tensor) -> Tensor:
        scores = x.square().sum(-1)
        if self.how == "sort":
            return scores.argsort(1, descending=True)[:, :3]
        keep = scores.topk(3, 1).indices
        return keep.sort(1).values if self.how == "ordered" else keep

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, S, H, generator=torch.Generator().manual_seed(5)),)

    def forward(self, x: Tensor) -> Tensor:
        keep = self.keep(x)
        x = self.first(x)
        if self.how == "ordered":
            x = x[torch.arange(B)[:, None], keep]
        else:
            x = x.gather(1, keep[..., None].expand(-1, -1, H))
        return self.layer(x) * self.gain * self.score(x).sigmoid()

    def rows(self, at: Places) -> Ids:
        kept = x_at(at).gather(1, self.keep(self.inputs()[0]))
        return {"first": [x_at(at)], "layer": [kept], "gain": [kept], "score": [kept]}


@kind("mixture of depths", "scatter")
@kind("mixture of depths by scatter_add", "scatter_add")
@kind("mixture of depths by index_put", "index_put")
class Depths(Kind):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.head, self.router = how, linear(), linear(), linear(H, 1)

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, S, H, generator=torch.Generator().manual_seed(5)),)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)[..., 0]
        keep = x.square().sum(-1).topk(3, 1).indices
        at = keep[..., None].expand(-1, -1, H)
        y = self.layer(x.gather(1, at)) * scores.gather(1, keep).sigmoid()[..., None]
        if self.how == "scatter":
            x = x.scatter(1, at, y)
        elif self.how == "scatter_add":
            x = x.scatter_add(1, at, y)
        else:
            x = x.index_put((torch.arange(B)[:, None], keep), y, accumulate=True)
        return self.head(x)

    def rows(self, at: Places) -> Ids:
        x, keep = x_at(at), self.inputs()[0].square().sum(-1).topk(3, 1).indices
        return {"router": [x], "layer": [x.gather(1, keep)], "head": [x]}


@kind("experts with a capacity, by index")
class Capacity(Kind):
    """Rows over the capacity are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = linear(), linear(), linear()

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, S, H, generator=torch.Generator().manual_seed(3)),)

    def slots(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        expert = (flat[:, 0] > 0).long()
        place = F.one_hot(expert, 2).cumsum(0).gather(1, expert[:, None])[:, 0] - 1
        return expert, place, place < 4

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        expert, place, fits = self.slots(flat)
        buffer = flat.new_zeros(2, 4, H)
        buffer[expert[fits], place[fits]] = flat[fits]
        out = torch.stack([self.one(buffer[0]), self.two(buffer[1])])
        y = torch.zeros_like(flat)
        y[fits] = out[expert[fits], place[fits]]
        return self.head(y.view_as(x) + x)

    def rows(self, at: Places) -> Ids:
        x = x_at(at).flatten()
        expert, place, fits = self.slots(self.inputs()[0].reshape(-1, H))
        buffer = torch.full((2, 4), -1)
        buffer[expert[fits], place[fits]] = x[fits]
        return {"one": [buffer[0]], "two": [buffer[1]], "head": [x_at(at)]}


@kind("experts by a one-hot dispatch")
class Dispatch(Capacity):
    """As in the Switch transformer: rows are sent and brought back by products with ones."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        expert, place, fits = self.slots(flat)
        send = F.one_hot(expert, 2)[..., None] * F.one_hot(place.clamp(max=3), 4)[:, None]
        send = (send * fits[:, None, None]).to(x.dtype)
        buffer = torch.einsum("tec,th->ech", send, flat)
        out = torch.stack([self.one(buffer[0]), self.two(buffer[1])])
        return self.head(torch.einsum("tec,ech->th", send, out).view_as(x) + x)


@kind("masked autoencoder")
class MaskedAutoencoder(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.decoder = linear(), linear(), linear()
        self.mask_token = free(H)

    def inputs(self) -> tuple[Any, ...]:
        noise = torch.rand(B, S, generator=torch.Generator().manual_seed(1))
        return torch.randn(B, S, H), noise

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        order = noise.argsort(1)
        back = order.argsort(1)
        x = self.embed(x)
        kept = x.gather(1, order[:, :2, None].expand(-1, -1, H))
        kept = self.encoder(kept)
        y = torch.cat([kept, self.mask_token.expand(B, 4, H)], 1)
        return self.decoder(y.gather(1, back[..., None].expand(-1, -1, H)))

    def rows(self, at: Places) -> Ids:
        x, order = x_at(at), self.inputs()[1].argsort(1)
        longer = at("kept and masked", B, S).gather(1, order.argsort(1))
        return {"embed": [x], "encoder": [x.gather(1, order[:, :2])], "decoder": [longer]}


# -- moves ---------------------------------------------------------------------------------------


@kind("heads by view and transpose", "heads")
@kind("heads folded into the batch", "folded")
@kind("time first", "time")
@kind("repeated for beams", "beams")
@kind("batch in another order", "batch")
@kind("sample by sample", "samples")
@kind("position by position", "positions")
@kind("in chunks", "chunks")
@kind("vmap over the batch", "vmap")
@kind("vmap over positions", "vmap1")
@kind("functional call", "functional")
@kind("even and odd positions", "parity")
@kind("reversed within its length", "reverse")
class Moved(Kind):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = linear(2, 2) if how in ("heads", "folded") else linear()
        self.norm = nn.LayerNorm(self.layer.out_features)
        if how in ("vmap", "vmap1"):  # the tensors of a vmap end with it
            self.refused = tuple(name for name, _ in self.named_parameters())

    def forward(self, x: Tensor) -> Tensor:
        def both(y: Tensor) -> Tensor:
            return self.norm(self.layer(y))

        if self.how == "heads":
            y = both(x.view(B, S, 2, 2).transpose(1, 2))
            return y.transpose(1, 2).reshape(B, S, H)
        if self.how == "folded":
            return both(x.view(B, S, 2, 2).transpose(1, 2).reshape(2 * B, S, 2))
        if self.how == "time":
            return both(x.transpose(0, 1))
        if self.how == "beams":
            return both(x.repeat_interleave(3, 0)).view(B, 3, S, H)
        if self.how == "batch":
            return both(x[[1, 0]])
        if self.how == "samples":
            return torch.stack([both(each) for each in x])
        if self.how == "positions":
            return torch.stack([both(x[:, t]) for t in range(S)], 1)
        if self.how == "chunks":
            return torch.cat([both(each) for each in x.split(2, 1)], 1)
        if self.how == "vmap":
            return both(x) if self.is_slow else torch.vmap(both)(x)
        if self.how == "vmap1":
            return both(x) if self.is_slow else torch.vmap(both, in_dims=1, out_dims=1)(x)
        if self.how == "functional":
            y = torch.func.functional_call(self.layer, dict(self.layer.named_parameters()), (x,))
            return self.norm(y)
        if self.how == "parity":
            y = torch.empty_like(x)
            y[:, ::2] = both(x[:, ::2])
            y[:, 1::2] = both(x[:, 1::2]).tanh()
            return y
        at = (torch.tensor([[4], [6]]) - 1 - torch.arange(S)) % S
        return both(x.gather(1, at[..., None].expand(-1, -1, H)))

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        back = (torch.tensor([[4], [6]]) - 1 - torch.arange(S)) % S
        found = {
            "heads": [x[:, None].expand(B, 2, S)],
            "folded": [x[:, None].expand(B, 2, S).reshape(2 * B, S)],
            "time": [x.mT], "beams": [x.repeat_interleave(3, 0)], "batch": [x[[1, 0]]],
            "samples": list(x), "positions": list(x.T), "chunks": list(x.split(2, 1)),
            "parity": [x[:, ::2], x[:, 1::2]], "reverse": [x.gather(1, back)],
        }.get(self.how, [x])  # fmt: skip
        return {"layer": found, "norm": found}


@kind("learned tokens before the sequence", "memory")
@kind("registers after the sequence", "registers")
@kind("start token before a shifted sequence", "start")
@kind("zeros before a shifted sequence", "zeros")
class Prepended(Kind):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed, self.layer, self.head = how, linear(), linear(), linear()
        self.memory, self.start = free(3, H), free(H)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        memory = self.memory.expand(B, -1, -1)
        if self.how == "start":
            x = torch.cat([self.start.expand(B, 1, H), x[:, :-1]], 1)
            return self.head(self.layer(x).tanh())
        if self.how == "zeros":
            x = torch.cat([x.new_zeros(B, 1, H), x[:, :-1]], 1)
            return self.head(self.layer(x).tanh())
        y = torch.cat([memory, x] if self.how == "memory" else [x, memory], 1)
        y = self.layer(y + F.scaled_dot_product_attention(y, y, y))
        return self.head(y[:, 3:] if self.how == "memory" else y[:, :S])

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        if self.how == "zeros":
            shifted = torch.cat([at("nobody", B, 1), x[:, :-1]], 1)
            return {"embed": [x], "layer": [shifted], "head": [shifted]}
        longer = at("longer", B, S if self.how == "start" else S + 3)
        head = longer if self.how == "start" else longer[:, 3:]
        head = longer[:, :S] if self.how == "registers" else head
        return {"embed": [x], "layer": [longer], "head": [head]}

    def spread(self, at: Places) -> dict[str, Tensor]:
        longer = at("longer", B, S if self.how == "start" else S + 3)
        found = {"memory": longer[:, :3], "registers": longer[:, S:]}
        if self.how == "start":
            return {"start": longer[:, :1]}
        return {"memory": found[self.how]} if self.how in found else {}


@kind("token shift", "cat")
@kind("token shift by lerp", "lerp")
@kind("token shift by pad", "pad")
@kind("token shift written in place", "written")
class TokenShift(Kind):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.mu = how, linear(), free(H)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "pad":
            before = F.pad(x, (0, 0, 1, -1))
        elif self.how == "written":
            before = torch.zeros_like(x)
            before[:, 1:] = x[:, :-1]
        else:
            before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        if self.how == "lerp":
            return self.layer(torch.lerp(x, before, self.mu))
        return self.layer(x + (before - x) * self.mu)

    def rows(self, at: Places) -> Ids:
        return {"layer": [x_at(at)], "mu": [x_at(at)]}


@kind("cumulative sums")
class Cumulative(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other, self.gain = linear(), linear(), free(H)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.cumsum(1) / torch.arange(1, S + 1)[:, None]
        return self.layer(mean) * self.gain + self.other(x.cummax(1).values)

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        return {"layer": [x], "other": [x], "gain": [x]}


# -- convolutions --------------------------------------------------------------------------------


@kind("dilated convolutions", "dilated")
@kind("causal convolution by padding", "causal")
@kind("causal convolution cut off", "cut")
@kind("depthwise convolution", "depthwise")
@kind("strided convolution", "strided")
@kind("strided and dilated convolution", "both")
class Convolutions(Kind):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.after = how, linear()
        options: dict[str, Any] = {
            "dilated": {"dilation": 2, "padding": 2}, "causal": {}, "cut": {"padding": 2},
            "depthwise": {"padding": 1, "groups": H}, "strided": {"stride": 2, "padding": 1},
            "both": {"stride": 2, "dilation": 2, "padding": 2},
        }[how]  # fmt: skip
        self.conv = nn.Conv1d(H, H, 3, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT
        if self.how == "causal":
            x = F.pad(x, (2, 0))
        x = self.conv(x)
        x = x[..., :S] if self.how == "cut" else x
        return self.after(x.mT.tanh())

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        if self.how in ("strided", "both"):
            ids = at("fewer", B, 3)
            return {"conv": [ids], "after": [ids]}
        if self.how == "cut":
            return {"conv": [torch.cat([x, x[:, -1:], x[:, -1:]], 1)], "after": [x]}
        return {"conv": [x], "after": [x]}


@kind("a longer convolution", 0, S + 4)
@kind("a longer convolution, cut in the middle", 2, S)
@kind("a longer convolution, cut at its end", 0, S)
@kind("a longer convolution, cut at its end after an activation", 0, S, True)
@kind("a longer convolution, cut in the middle after an activation", 2, S, True)
class LongerConvolution(Kind):
    """More rows than the sequence has; if as many are left, they are those of the sequence."""

    def __init__(self, start: int, count: int, is_late: bool = False) -> None:
        super().__init__()
        self.start, self.count, self.is_late = start, count, is_late
        self.conv, self.after = nn.Conv1d(H, H, 5, padding=4), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.mT)
        x = x.tanh() if self.is_late else x
        return self.after(x.narrow(2, self.start, self.count).mT)  # type: ignore[no-any-return]

    def rows(self, at: Places) -> Ids:
        x, longer = x_at(at), at("longer", B, S + 4)
        if self.count > S:
            return {"conv": [longer], "after": [longer]}
        own = longer if self.start else torch.cat([x, x[:, -1:].expand(B, 4)], 1)
        return {"conv": [own], "after": [x]}


@kind("u-net, nearest", "nearest")
@kind("u-net, transposed", "transposed")
@kind("u-net by shuffled pixels", "shuffle")
class UNet(Kind):
    def __init__(self, up: str) -> None:
        super().__init__()
        self.up = up
        self.first, self.down = nn.Conv2d(3, H, 3, padding=1), nn.Conv2d(H, H, 3, 2, 1)
        self.middle = nn.Conv2d(H, 4 * H if up == "shuffle" else H, 3, padding=1)
        self.back = nn.ConvTranspose2d(H, H, 2, 2)
        self.last = nn.Conv2d(2 * H, H, 1)

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 3, 4, 4),)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        y = self.middle(self.down(x)).tanh()
        if self.up == "nearest":
            y = F.interpolate(y, scale_factor=2)
        elif self.up == "shuffle":
            y = F.pixel_shuffle(y, 2)
        else:
            y = self.back(y)
        return self.last(torch.cat([x, y], 1))

    def rows(self, at: Places) -> Ids:
        whole, half = at("pixels", B, 16).view(B, 4, 4), at("half", B, 4).view(B, 2, 2)
        # A transposed convolution has the positions of its input.
        return {"first": [whole], "down": [half], "middle": [half], "last": [whole], "back": []}


@kind("frames of a video")
class Video(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.time, self.head = nn.Conv2d(3, H, 2, 2), linear(), linear()

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 3, 3, 4, 4),)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.flatten(0, 1)).mean((2, 3)).view(B, 3, H)
        return self.head(self.time(y).tanh().mean(1))

    def rows(self, at: Places) -> Ids:
        frames = at("frames", B, 3)
        return {"conv": [at("patches", B, 12).view(B * 3, 2, 2)], "time": [frames],
                "head": [at("sample", B, 1)[:, 0]]}  # fmt: skip


@kind("channels last images")
class ChannelsLast(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.conv = linear(3, H), nn.Conv2d(H, H, 3, padding=1)

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, 4, 5, 3),)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.layer(x).permute(0, 3, 1, 2))

    def rows(self, at: Places) -> Ids:
        ids = at("pixels", B, 20).view(B, 4, 5)
        return {"layer": [ids], "conv": [ids]}


@kind("pooled by two and put back")
class PooledByTwo(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.coarse, self.fine, self.head = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        coarse = self.coarse(F.avg_pool1d(x.mT, 2).mT)
        return self.head(self.fine(x) + coarse.repeat_interleave(2, 1))

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        return {"coarse": [at("pairs", B, 3)], "fine": [x], "head": [x]}


# -- recurrences ---------------------------------------------------------------------------------


@kind("scans in both directions")
class Bidirectional(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mix, self.u = free(H), free(H), linear(2 * H, H), linear()

    def scan(self, x: Tensor, times: list[int], is_back: bool) -> Tensor:
        h, states = torch.zeros(B, H), {}
        for t in times:
            h = (self.b if is_back else self.a) * h + x[:, t]
            states[t] = h
        return torch.stack([states[t] for t in sorted(states)], 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.u(x)
        times = list(range(S))
        both = self.scan(x, times, False), self.scan(x, times[::-1], True)
        return self.mix(torch.cat(both, -1))

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        return {"a": list(x.T), "b": list(x.T)[::-1], "mix": [x], "u": [x]}


@kind("two recurrent layers, step by step", False)
@kind("two recurrent layers, layer by layer", True)
class Stacked(Kind):
    def __init__(self, outer: bool) -> None:
        super().__init__()
        self.outer = outer
        self.ih = nn.ModuleList(linear() for _ in range(2))
        self.hh = nn.ModuleList(linear() for _ in range(2))

    def cell(self, n: int, x: Tensor, h: Tensor) -> Tensor:
        return (self.ih[n](x) + self.hh[n](h)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.zeros(B, H), torch.zeros(B, H)]
        if not self.outer:
            made = []
            for t in range(S):
                states[0] = self.cell(0, x[:, t], states[0])
                states[1] = self.cell(1, states[0], states[1])
                made.append(states[1])
            return torch.stack(made, 1)
        for n in range(2):
            made = []
            for t in range(S):
                states[n] = self.cell(n, x[:, t], states[n])
                made.append(states[n])
            x = torch.stack(made, 1)
        return x

    def rows(self, at: Places) -> Ids:
        steps = list(x_at(at).T)
        return {f"{name}.{n}": steps for name in ("ih", "hh") for n in (0, 1)}


@kind("a state per chunk")
class ChunkState(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.memory = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        state, made = torch.zeros(B, H), []
        for chunk in x.split(2, 1):
            y = self.layer(chunk + state[:, None])
            state = self.memory(y.mean(1)).tanh()
            made.append(y)
        return torch.cat(made, 1)

    def rows(self, at: Places) -> Ids:
        sample = at("sample", B, 1)[:, 0]  # one token of each sample
        return {"layer": list(x_at(at).split(2, 1)), "memory": [sample] * 3}


@kind("a free gain inside a checkpointed loop")
class CheckpointedLoop(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.first = free(H), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        h, made = torch.zeros(B, H), []
        for t in range(S):
            h = checkpoint(self.step, h, x[:, t], use_reentrant=False)
            made.append(h)
        return torch.stack(made, 1)

    def step(self, h: Tensor, x: Tensor) -> Tensor:
        return (self.gain * h + x).tanh()

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        steps = list(x.T)
        again = steps[::-1]  # read again in the replay
        return {"gain": [*steps, *again], "first": [x]}


@kind("positions looked up step by step", "step")
@kind("positions looked up step by step, in a row", "row")
@kind("positions that multiply, step by step", "product")
@kind("positions looked up at once", "once")
@kind("positions of a slice", "slice")
class Positions(Kind):
    """Added positions are at the tokens that they are added to, others are rows of their own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.pos, self.layer = how, nn.Embedding(9, H), linear()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "step":
            made = [x[:, t] + self.pos(torch.tensor(t)) for t in range(S)]
            return self.layer(torch.stack(made, 1))
        if self.how == "row":
            made = [x[:, t] + self.pos(torch.tensor([t])) for t in range(S)]
            return self.layer(torch.stack(made, 1))
        if self.how == "product":
            made = [x[:, t] * self.pos(torch.tensor(t)) for t in range(S)]
            return self.layer(torch.stack(made, 1))
        if self.how == "slice":
            return self.layer(x + self.pos(torch.arange(9))[:S])
        return self.layer(x + self.pos(torch.arange(S)))

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        if self.how == "slice":
            return {"pos": [at("places", 9, 1)[:, 0]], "layer": [x]}
        if self.how == "product":
            return {"pos": list(at("places", S, 1)[:, 0]), "layer": [x]}
        return {"pos": [], "layer": [x]}

    def spread(self, at: Places) -> dict[str, Tensor]:
        return {} if self.how in ("slice", "product") else {"pos.weight": x_at(at)}


# -- two inputs, ties, mixes ---------------------------------------------------------------------


@kind("cross attention", False)
@kind("the same layer on two inputs", True)
class CrossAttention(Kind):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tied, self.q, self.out = tied, linear(), linear()
        self.k, self.v = linear(), linear()

    def inputs(self) -> tuple[Any, ...]:
        return torch.randn(B, S, H), torch.randn(B, M, H)

    def forward(self, x: Tensor, mem: Tensor) -> Tensor:
        k = self.q(mem) if self.tied else self.k(mem)
        v = self.v(mem)
        return self.out(x + F.scaled_dot_product_attention(self.q(x), k, v))

    def rows(self, at: Places) -> Ids:
        x, mem = x_at(at), at("mem", B, M)
        q = [mem, x] if self.tied else [x]
        return {"q": q, "k": [] if self.tied else [mem], "v": [mem], "out": [x]}


@kind("tied embedding and head")
class Tied(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.gain = nn.Embedding(11, H), linear(), free(1)

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randint(11, (B, S), generator=torch.Generator().manual_seed(0)),)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.layer(x + x.mean(1, keepdim=True)) * self.gain

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        return {"embed": [x], "layer": [x], "gain": [x]}


@kind("mixed by where", "where")
@kind("replaced by a mask token", "token")
@kind("layers weighted by a softmax", "weighted")
@kind("gated by a summary", "gate")
@kind("modulated by a condition", "film")
@kind("a sum over the sequence added", "added")
class Mixed(Kind):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b, self.out = how, linear(), linear(), linear()
        self.token, self.mix = free(H), free(2)

    def inputs(self) -> tuple[Any, ...]:
        mask = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 1]]) > 0
        return torch.randn(B, S, H), mask, torch.randn(B, H)

    def forward(self, x: Tensor, mask: Tensor, condition: Tensor) -> Tensor:
        if self.how == "where":
            return self.out(torch.where(mask[..., None], self.a(x), self.b(x)))
        if self.how == "token":
            return self.out(torch.where(mask[..., None], self.a(x), self.token))
        if self.how == "weighted":
            both = torch.stack([self.a(x), self.b(x)])
            return self.out((self.mix.softmax(0)[:, None, None, None] * both).sum(0))
        if self.how == "gate":
            return self.out(self.a(x) * self.b(x.mean(1)).sigmoid()[:, None])
        if self.how == "film":
            return self.out(self.a(x) * self.b(condition)[:, None])
        return self.out(self.a(x) + self.b(x).sum(1, keepdim=True))

    def rows(self, at: Places) -> Ids:
        x, sample = x_at(at), at("sample", B, 1)[:, 0]
        found = {"a": [x], "b": [x], "out": [x]}
        if self.how in ("gate", "film"):
            return {**found, "b": [sample]}
        if self.how == "token":
            return {"a": [x], "b": [], "out": [x], "token": [x]}
        return found


# -- layouts of the input ------------------------------------------------------------------------


@kind("channels first, a layer", "layer")
@kind("channels first, a wider layer", "wide")
@kind("channels first, attention", "attention")
@kind("channels first, a recurrence", "recurrence")
@kind("channels first, a classifier of all of it", "flat")
@kind("channels first, every second position backwards", "moved")
@kind("channels first, a cumulative sum", "cumsum")
@kind("channels first, written into a buffer", "buffer")
class ChannelsFirst(Kind):
    """(b, d, s) without a convolution: the layers that sum over the channels say so."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, width = how, 7 if how == "wide" else H
        self.a, self.b = linear(H, width), linear(width, H)
        if how == "recurrence":
            self.state = linear()
        if how == "flat":
            self.head = linear(S * H, 3)

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(B, H, S),)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "recurrence":
            h, made = torch.zeros(B, H), []
            for t in range(S):
                h = (self.a(x[:, :, t]) + self.state(h)).tanh()
                made.append(h)
            return self.b(torch.stack(made, 1)).mT
        if self.how == "attention":
            q = self.a(x.mT)
            return self.b((q @ q.mT).softmax(-1) @ q).mT
        x = x[:, :, ::2].flip(2) if self.how == "moved" else x
        x = x.cumsum(2) if self.how == "cumsum" else x
        rows = x.mT
        if self.how == "buffer":
            rows = torch.zeros(B, S, H)
            for t in range(S):
                rows[:, t] = x[:, :, t]
        y = self.b(self.a(rows).relu())
        return self.head(y.flatten(1)) if self.how == "flat" else y.mT

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        if self.how == "recurrence":
            return {"a": list(x.T), "state": list(x.T), "b": [x]}
        x = x[:, ::2].flip(1) if self.how == "moved" else x
        found = {"a": [x], "b": [x]}
        return {**found, "head": [at("sample", B, 1)[:, 0]]} if self.how == "flat" else found


@kind("positions mixed first", S)
@kind("positions mixed first, by a wider layer", 9)
class MixedFirst(Kind):
    """(b, s, d): the first layer sums over positions, and the next one over features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.back, self.layer = linear(S, width), linear(width, S), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.back(self.into(x.mT).relu()).mT)

    def rows(self, at: Places) -> Ids:
        sample = at("sample", B, 1).expand(B, H)
        return {"into": [sample], "back": [sample], "layer": [x_at(at)]}


@kind("steps first, a sum of two layers", "sum")
@kind("steps first, features side by side", "cat")
@kind("steps first, gates", "gates")
@kind("steps first, backwards into a buffer", "back")
@kind("steps first, a decay", "decay")
class StepsFirst(Kind):
    """A recurrence over (s, b, d)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.out = how, linear()
        if how == "decay":
            self.a = free(H)
        elif how == "cat":
            self.u = linear(2 * H, H)
        else:
            self.u, self.w = linear(), linear()
        if how == "gates":
            self.uz, self.wz = linear(), linear()

    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(S, B, H),)

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        if self.how == "decay":
            return self.a * h + x
        if self.how == "cat":
            return self.u(torch.cat([x, h], -1)).tanh()
        if self.how == "gates":
            z = (self.uz(x) + self.wz(h)).sigmoid()
            return (1 - z) * h + z * (self.u(x) + self.w(z * h)).tanh()
        return (self.u(x) + self.w(h)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        h, made = torch.zeros(B, H), torch.zeros(S, B, H)
        for t in self.times():
            h = self.step(x[t], h)
            made[t] = h
        return self.out(made).transpose(0, 1)

    def times(self) -> list[int]:
        return list(range(S))[:: -1 if self.how == "back" else 1]

    def rows(self, at: Places) -> Ids:
        ids = at("steps", S, B)
        names = {"decay": ["a"], "cat": ["u"], "gates": ["u", "w", "uz", "wz"]}
        several = names.get(self.how, ["u", "w"])
        return {**{each: [ids[t] for t in self.times()] for each in several}, "out": [ids]}


@kind("a recurrence of (b, 1, d)", "one")
@kind("a recurrence sample by sample", "samples")
@kind("a recurrence head by head", "heads")
class StateShapes(Kind):
    """A Linear returns a view of its product, unless what it reads has two axes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.out = how, linear()
        width = H // 2 if how == "heads" else H
        self.u, self.w = linear(width, width), linear(width, width)

    def states(self, x: Tensor, h: Tensor) -> list[Tensor]:
        made = []
        for each in x:
            h = (self.u(each) + self.w(h)).tanh()
            made.append(h)
        return made

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "samples":
            return self.out(torch.stack([torch.stack(self.states(e, torch.zeros(H))) for e in x]))
        if self.how == "heads":
            y = x.view(B, S, 2, -1)
            y = torch.stack(self.states(y.unbind(1), torch.zeros(B, 2, H // 2)), 1)  # type: ignore[arg-type]
            return self.out(y.flatten(2))
        return self.out(torch.cat(self.states(x.split(1, 1), torch.zeros(B, 1, H)), 1))  # type: ignore[arg-type]

    def rows(self, at: Places) -> Ids:
        x = x_at(at)
        steps = list(x[..., None].unbind(1)) if self.how == "one" else list(x.flatten())
        if self.how == "heads":
            steps = list(x[..., None].expand(B, S, 2).unbind(1))
        return {"u": steps, "w": steps, "out": [x]}


@kind("a step that ends in a layer", "layer")
@kind("a step that ends in a product", "product")
@kind("a step that ends in a norm", "norm")
@kind("a step that ends in lerp", "lerp")
class StepEnds(Kind):
    """A recurrence whose step returns what a parameter made, with nothing after it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how in ("product", "lerp"):
            self.w = free(H)
        else:
            self.lin = linear() if how == "layer" else nn.LayerNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        h, made = torch.zeros(B, H), []
        for t in range(S):
            if self.how == "product":
                h = (h + x[:, t]) * self.w
            elif self.how == "lerp":
                h = torch.lerp(h, x[:, t], self.w)
            else:
                h = self.lin(h + x[:, t])
            made.append(h)
        return torch.stack(made, 1)

    def rows(self, at: Places) -> Ids:
        steps = list(x_at(at).unbind(1))
        return {"w" if self.how in ("product", "lerp") else "lin": steps}
