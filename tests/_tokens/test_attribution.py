"""Every token gets what is its own, or the parameter is refused by name: never a wrong token.

A use of a parameter belongs to the position of the row that it produces, followed from the model's
inputs through every move. Each case has its truth written out beside it: `truth` says the same as
`forward` with a copy of each parameter per row (`attribution.py`). Then come random programs.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attribution import (
    EXCUSED,
    REFUSED,
    RIGHT,
    WRONG,
    Copies,
    Rows,
    Truth,
    Verdict,
    judge,
    rows_of,
    truth_of,
    verdicts_of,
)
from programs import Step, judged, kind_of, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformer_copies import no_float32

import torchfmri
from torchfmri._tokens.calls import passes
from torchfmri._tokens.rules.way import Way
from torchfmri.routing import RoutingConfig, RoutingLanguageModel, mas

pytestmark = pytest.mark.usefixtures("one_thread", "double")
B, S, H = 2, 5, 4


@pytest.fixture
def double() -> Iterator[None]:
    """Everything that a test makes is in float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def loss_of(output: Tensor) -> Tensor:
    weights = torch.linspace(-1, 2, output.numel()).view(output.shape)
    return (output * weights).sum() + output.sin().square().mean()


def verdicts(model: Step, *inputs: Tensor, kinds: tuple[str, ...] = ("x", "mem")) -> list[Verdict]:
    """What became of every parameter; inputs are (b, s, h), and their tokens are of these kinds."""

    def written_out(use: Copies) -> Tensor:
        named = zip(inputs, kinds, strict=False)
        rows = [rows_of(each, use.places(kind, *each.shape[:2])) for each, kind in named]
        return loss_of(model.truth(use, *rows).value)

    return verdicts_of(model, lambda: loss_of(model(*inputs)), written_out)


def assert_right(found: list[Verdict]) -> None:
    assert found
    assert [each for each in found if each.outcome != RIGHT] == []


def assert_not_wrong(found: list[Verdict], but: tuple[str, ...] = ()) -> None:
    """Right or refused by name; those in `but` may be refused, the others are right."""
    assert found
    assert [each for each in found if each.outcome == WRONG] == []
    assert [e for e in found if e.outcome == REFUSED and e.name.rpartition(".")[2] not in but] == []


def spread(model: nn.Module) -> nn.Module:
    """Nothing is zero or one by accident."""
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.2 * torch.randn(each.shape))
    return model


def free(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


# -- recurrences ---------------------------------------------------------------------------------


class Decay(Step):
    """h = a * h + x_t, forward or backward in time, of which all or the last state is returned."""

    def __init__(self, reverse: bool = False, last: bool = False, written: bool = False) -> None:
        super().__init__()
        self.a, self.reverse, self.last, self.written = free(H), reverse, last, written

    def times(self, s: int) -> list[int]:
        return list(range(s))[:: -1 if self.reverse else 1]

    def forward(self, x: Tensor) -> Tensor:
        h, states, out = torch.zeros(len(x), H), {}, torch.zeros_like(x)
        for t in self.times(x.shape[1]):
            h = self.a * h + x[:, t]
            if self.written:
                out[:, t] = h
            states[t] = h
        if self.last:
            return h
        return out if self.written else torch.stack([states[t] for t in range(x.shape[1])], 1)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        a, h, states = use(self.a, x), torch.zeros(len(x.value), H), {}
        for t in self.times(x.value.shape[1]):
            states[t] = h = a[:, t] * h + x.value[:, t]
        if self.last:
            return Rows(h, x.ids[:, 0])
        return x.holding(torch.stack([states[t] for t in range(x.value.shape[1])], 1))


@pytest.mark.parametrize("s", [2, 3, S])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["stacked", "last", "written"])
def test_step_t_of_a_recurrence_belongs_to_t(s: int, reverse: bool, kind: str) -> None:
    model = Decay(reverse, last=kind == "last", written=kind == "written")
    assert_right(verdicts(model, torch.randn(B, s, H)))


class LayerOnState(Step):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        h, states = torch.zeros(len(x), H), []
        for t in range(x.shape[1]):
            z = self.gate(x[:, t]).sigmoid()
            h = z * h + (1 - z) * torch.tanh(self.layer(h) + x[:, t])
            states.append(h)
        return torch.stack(states, 1)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        h, states = torch.zeros(len(x.value), H), []
        for t in range(x.value.shape[1]):
            now = Rows(x.value[:, t], x.ids[:, t])
            z = use.linear(now, self.gate.weight, self.gate.bias).value.sigmoid()
            inner = use.linear(now.holding(h), self.layer.weight, self.layer.bias).value
            h = z * h + (1 - z) * torch.tanh(inner + now.value)
            states.append(h)
        return x.holding(torch.stack(states, 1))


@pytest.mark.parametrize("s", [2, S])
def test_a_layer_on_the_state_belongs_to_its_step(s: int) -> None:
    assert_right(verdicts(LayerOnState(), torch.randn(B, s, H)))


def test_the_decay_of_rwkv_belongs_to_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from transformers.models.rwkv import modeling_rwkv

    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "context_length": 8}
    config = transformers.RwkvConfig(**sizes, use_cache=False)
    model = spread(transformers.RwkvForCausalLM(config).double()).train()
    ids = torch.randint(11, (B, S))
    names = {id(each): name for name, each in model.named_parameters() if "time_decay" in name}
    names |= {id(each): name for name, each in model.named_parameters() if "time_first" in name}

    def run() -> Tensor:
        return loss_of(model(input_ids=ids).logits)

    def written_out(use: Copies) -> Tensor:
        def attention(decay: Tensor, first: Tensor, key: Tensor, value: Tensor, **_: Any) -> Any:
            rows = rows_of(key, use.places("x", *key.shape[:2]))
            decay, first = -use(decay, rows).exp(), use(first, rows)
            above, below, made = torch.zeros_like(key[:, 0]), torch.zeros_like(key[:, 0]), []
            for t in range(key.shape[1]):
                now = (key[:, t] + first[:, t]).exp()
                made.append((above + now * value[:, t]) / (below + now))
                above = above * decay[:, t].exp() + key[:, t].exp() * value[:, t]
                below = below * decay[:, t].exp() + key[:, t].exp()
            return torch.stack(made, 1), None

        with monkeypatch.context() as patch:
            patch.setattr(modeling_rwkv, "rwkv_linear_attention", attention)
            return run()

    with no_float32():
        assert_right(verdicts_of(model, run, written_out, set(names.values())))


# -- operands that name different positions ------------------------------------------------------


class Combined(Step):
    """Two orders of the same rows in one operation, times a parameter."""

    def __init__(self, combine: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.combine = free(H), combine

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(x) * self.w

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        x = x.doubted()
        return x.holding(self.combine(x.value) * use(self.w, x))


MIXES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "flip": (lambda x: x + x.flip(1), lambda x: x.flip(1) + x),
    "roll": (lambda x: x + x.roll(1, 1), lambda x: x.roll(1, 1) + x),
    "difference": (lambda x: x - x.flip(1), lambda x: -x.flip(1) + x),
    "product": (lambda x: x * x.flip(1), lambda x: x.flip(1) * x),
    "maximum": (
        lambda x: torch.maximum(x, x.flip(1)),
        lambda x: torch.maximum(x.flip(1), x),
    ),
    "where": (
        lambda x: torch.where(x > x.flip(1), x, x.flip(1)),
        lambda x: torch.where(x.flip(1) >= x, x.flip(1), x),
    ),
    "stack": (
        lambda x: torch.stack([x, x.flip(1)]).sum(0),
        lambda x: torch.stack([x.flip(1), x]).sum(0),
    ),
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_of_positions_does_not_depend_on_the_order_of_operands(mix: str) -> None:
    x = torch.randn(B, S, H)
    found = []
    for combine in MIXES[mix]:
        torch.manual_seed(0)
        (verdict,) = verdicts(Combined(combine), x)
        assert verdict.outcome in (RIGHT, EXCUSED), verdict
        found.append(verdict.outcome)
    assert found[0] == found[1]


class Additive(Step):
    """v . tanh(q_i + k_j), summed over the keys."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(H, H), nn.Linear(H, H)
        self.v, self.swapped = free(H), swapped

    def pairs(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = q[:, :, None], k[:, None]
        return torch.tanh(k + q if self.swapped else q + k)

    def forward(self, x: Tensor) -> Tensor:
        return (self.pairs(self.q(x), self.k(x)) * self.v).sum(2)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        q, k = (use.linear(x, each.weight, each.bias).value for each in (self.q, self.k))
        y = x.doubted()
        return y.holding((self.pairs(q, k) * use(self.v, y)[:, :, None]).sum(2))


@pytest.mark.parametrize("swapped", [False, True])
def test_additive_attention_is_not_attributed_to_the_keys(swapped: bool) -> None:
    found = verdicts(Additive(swapped), torch.randn(B, S, H))
    assert_right([each for each in found if each.name != "v"])
    assert_not_wrong(found)


class Shifted(Step):
    """Token shift: x * m + before * (1 - m), each product at the position of its own row."""

    def __init__(self) -> None:
        super().__init__()
        self.m = free(H)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return x * self.m + before * (1 - self.m)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        last = x.move(lambda each: each[:, :-1])
        before = F.pad(last.value * (1 - use(self.m, last)), (0, 0, 1, 0))
        return x.holding(x.value * use(self.m, x) + before)


def test_a_shifted_row_keeps_its_own_token() -> None:
    assert_not_wrong(verdicts(Shifted(), torch.randn(B, S, H)), but=("m",))


class Concatenated(Step):
    """Two inputs one after the other: the tokens of either, or an axis of both together."""

    def __init__(self, layer: bool, first: bool) -> None:
        super().__init__()
        self.w, self.first = free(H), first
        self.layer = nn.Linear(H, H) if layer else None

    def forward(self, x: Tensor, mem: Tensor) -> Tensor:
        y = torch.cat([x, mem] if self.first else [mem, x], 1) * self.w
        return y if self.layer is None else self.layer(y)

    def truth(self, use: Copies, x: Rows, *others: Rows) -> Rows:
        pair = [x, others[0]] if self.first else [others[0], x]
        value, ids = (torch.cat([getattr(e, a) for e in pair], 1) for a in ("value", "ids"))
        y = rows_of(value, ids[..., 0], use.places("both", *value.shape[:2]))
        y = y.holding(value * use(self.w, y))
        return y if self.layer is None else use.linear(y, self.layer.weight, self.layer.bias)


@pytest.mark.parametrize("m", [2, S, 8], ids=["shorter", "equal", "longer"])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_concatenated_inputs_keep_their_tokens(m: int, layer: bool, first: bool) -> None:
    model = Concatenated(layer, first)
    assert_not_wrong(
        verdicts(model, torch.randn(B, S, H), torch.randn(B, m, H)), ("w", "weight", "bias")
    )


# -- moved rows ----------------------------------------------------------------------------------


class PermutedRows(Step):
    """f = x.view(-1, 3); y[p] = lin(f[p])."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lin, self.kind = nn.Linear(3, 3), kind

    def order(self, f: Tensor) -> Tensor:
        if self.kind == "by score":
            return f.sum(1).argsort(descending=True)
        return torch.randperm(len(f), generator=torch.Generator().manual_seed(3))

    def forward(self, x: Tensor) -> Tensor:
        f = x.view(-1, 3)
        p = self.order(f)
        y = torch.empty_like(f)
        if self.kind == "inverse":
            y = self.lin(f[p])[p.argsort()]
        else:
            y[p] = self.lin(f[p])
        return y.view(x.shape)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        p = self.order(x.value.view(-1, 3))
        moved = x.move(lambda each: each.reshape(-1, each.shape[-1])[p])
        y = use.linear(moved, self.lin.weight, self.lin.bias)
        return x.holding(y.value[p.argsort()].view(x.value.shape))


@pytest.mark.parametrize("kind", ["drawn", "by score", "inverse"])
def test_permuted_rows_keep_their_tokens(kind: str) -> None:
    assert_right(verdicts(PermutedRows(kind), torch.randn(B, S, 3)))


class Windows(Step):
    """Swin's moves: (b, 4 * 4, h) rolled and cut into windows of 2 * 2, a layer, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(H, H), free(H)

    @staticmethod
    def there(x: Tensor) -> Tensor:
        x = x.view(-1, 4, 4, x.shape[-1]).roll((-1, -1), (1, 2))
        x = x.view(-1, 2, 2, 2, 2, x.shape[-1]).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, 4, x.shape[-1])

    @staticmethod
    def back(x: Tensor) -> Tensor:
        x = x.view(-1, 2, 2, 2, 2, x.shape[-1]).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, 4, 4, x.shape[-1]).roll((1, 1), (1, 2)).reshape(-1, 16, x.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.layer(self.there(x)).tanh() * self.scale)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        y = x.move(self.there)
        y = use.linear(y, self.layer.weight, self.layer.bias)
        y = y.holding(y.value.tanh() * use(self.scale, y))
        return x.plus(y.move(self.back))


def test_windows_are_not_tokens() -> None:
    assert_right(verdicts(Windows(), torch.randn(B, 16, H)))


@contextlib.contextmanager
def instead(*changes: tuple[nn.Module, str, Any]) -> Iterator[None]:
    """For a while modules have another forward, or copies in the place of a parameter."""
    kept = []
    for module, name, value in changes:
        kept.append((module, name, module._parameters.pop(name, None)))
        module.__dict__[name] = value
    try:
        yield
    finally:
        for module, name, parameter in kept:
            del module.__dict__[name]
            if parameter is not None:
                module._parameters[name] = parameter


def copied(use: Copies, module: Any, ids: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The forward of a Linear, Embedding or norm with a copy per row; `ids` numbers the rows."""

    def forward(x: Tensor) -> Tensor:
        if isinstance(module, nn.Embedding):
            table = use(module.weight, rows_of(x[..., None], ids(x[..., None])))
            return torch.take_along_dim(table, x[..., None, None], -2)[..., 0, :]
        rows = rows_of(x, ids(x))
        if isinstance(module, nn.Linear):
            return use.linear(rows, module.weight, module.bias).value
        if isinstance(module, nn.LayerNorm):
            flat = F.layer_norm(x, module.normalized_shape, eps=module.eps)
            return flat * use(module.weight, rows) + use(module.bias, rows)
        flat = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return flat * use(module.weight, rows)

    return forward


def test_swin_is_on_the_tokens_of_its_resolutions() -> None:
    import transformers

    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 4, "depths": [2, 2]}
    config = transformers.SwinConfig(
        **sizes, num_heads=[2, 2], window_size=2, num_labels=3, drop_path_rate=0.0
    )
    config._attn_implementation = "eager"
    model: Any = spread(transformers.SwinForImageClassification(config).double()).eval()
    images = torch.randn(B, 3, 16, 16)

    def run() -> Tensor:
        return loss_of(model(pixel_values=images).logits)

    def written_out(use: Copies) -> Tensor:
        changes: list[tuple[nn.Module, str, Any]] = []

        def on(module: nn.Module, numbers: Tensor) -> None:
            forward = copied(use, module, lambda x: numbers.reshape(x.shape[:-1]))
            changes.append((module, "forward", forward))

        swin = model.swin
        grids = {n: use.places(f"stage {n}", B, side * side) for n, side in enumerate((8, 4))}
        projection = swin.embeddings.patch_embeddings.projection

        def patches(image: Tensor) -> Tensor:
            cut = F.unfold(image, 2, stride=2).mT
            rows = rows_of(cut, grids[0])
            y = torch.einsum("bsoi,bsi->bso", use(projection.weight, rows).flatten(3), cut)
            return (y + use(projection.bias, rows)).mT.reshape(B, -1, 8, 8)

        changes.append((projection, "forward", patches))
        on(swin.embeddings.norm, grids[0])
        for number, stage in enumerate(swin.encoder.layers):
            side = 8 >> number
            for block in stage.blocks:
                shift = block.shift_size
                moved = grids[number].view(B, side, side).roll((-shift, -shift), (1, 2))
                moved = moved.view(B, side // 2, 2, side // 2, 2).transpose(2, 3).reshape(-1, 4)
                attention = block.attention
                for each in (attention.q_proj, attention.k_proj, attention.v_proj):
                    on(each, moved)
                on(attention.o_proj, moved)
                for each in block.modules():
                    inside = any(each is one for one in attention.modules())
                    if isinstance(each, (nn.Linear, nn.LayerNorm)) and not inside:
                        on(each, grids[number])
                changes.append(_bias(use, attention.relative_position_bias, moved))
            if stage.downsample is not None:
                on(stage.downsample.norm, grids[number + 1])
                on(stage.downsample.reduction, grids[number + 1])
        on(swin.layernorm, grids[1])
        on(model.classifier, use.places("sample", B, 1))
        with instead(*changes):
            return run()

    with no_float32():
        found = verdicts_of(model, run, written_out)
    assert_not_wrong(found, ("relative_position_bias_table",))
    assert len(found) > 50


def _bias(use: Copies, module: Any, numbers: Tensor) -> tuple[nn.Module, str, Any]:
    """Swin's relative positions: added to the scores of every query of every window."""

    def forward() -> Tensor:
        table = use(module.relative_position_bias_table, rows_of(numbers, numbers))
        index = module.relative_position_index.view(4, 4)
        return torch.stack([table[:, q, index[q]] for q in range(4)], 1).permute(0, 3, 1, 2)

    return module, "forward", forward


def test_jetmoe_with_one_expert_per_token() -> None:
    import transformers

    config = transformers.JetMoeConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=4,
        intermediate_size=6,
        num_local_experts=3,
        num_experts_per_tok=1,
    )
    config._attn_implementation = "eager"
    model: Any = spread(transformers.JetMoeForCausalLM(config).double()).eval()
    words = torch.randint(11, (B, S))

    def run() -> Tensor:
        return loss_of(model(input_ids=words).logits)

    def written_out(use: Copies) -> Tensor:
        ids = use.places("x", B, S)
        changes: list[tuple[nn.Module, str, Any]] = []
        for module in model.modules():
            kind = type(module).__name__
            if isinstance(module, (nn.Linear, nn.Embedding)) or kind == "JetMoeRMSNorm":
                forward = copied(use, module, lambda x: ids.reshape(x.shape[:-1]))
                changes.append((module, "forward", forward))
            elif kind in ("JetMoeMoE", "JetMoeMoA"):
                changes.extend(_experts(use, module, ids))
        with instead(*changes):
            return run()

    with no_float32():
        assert_right(verdicts_of(model, run, written_out))


def _experts(use: Copies, block: Any, ids: Tensor) -> Iterator[tuple[nn.Module, str, Any]]:
    order: list[Tensor] = []  # the token of each row, by expert
    router = type(block.router).forward

    def route(hidden: Tensor) -> Any:
        result = router(block.router, hidden)
        order[:] = [result[1]]
        return result

    def forward(module: Any) -> Callable[..., Tensor]:
        def each(rows: Tensor, counts: list[int]) -> Tensor:
            expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
            weight = use(module.weight, rows_of(rows, ids.flatten()[order[0]]))
            return torch.einsum("toi,ti->to", weight[torch.arange(len(rows)), expert], rows)

        return each

    yield block.router, "forward", route
    yield block.input_linear, "forward", forward(block.input_linear)
    yield block.output_linear, "forward", forward(block.output_linear)
    yield block, "bias", use(block.bias, rows_of(ids, ids))


# -- channels first ------------------------------------------------------------------------------


class ChannelsFirst(Step):
    """A convolution of (b, c, s) and a bias (c, 1): output position l is token l."""

    def __init__(self, width: int, layer: bool) -> None:
        super().__init__()
        self.width, self.weight, self.bias = width, free(H, H, width), free(H, 1)
        self.conv = nn.Conv1d(H, H, width, padding=width // 2, bias=False) if layer else None

    def forward(self, x: Tensor) -> Tensor:
        if self.conv is None:
            return (F.conv1d(x.mT, self.weight, padding=self.width // 2) + self.bias).mT
        x = self.conv(x.mT)
        x += self.bias
        return x.mT

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        at, s = self.width // 2, x.value.shape[1]
        padded = F.pad(x.value, (0, 0, at, at))
        near = torch.stack([padded[:, k : k + s] for k in range(self.width)], -1)
        weight = use(self.weight if self.conv is None else self.conv.weight, x)
        y = torch.einsum("bsoik,bsik->bso", weight, near)
        return x.holding(y + use(self.bias, x)[..., 0])


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("layer", [False, True])
def test_channels_first(width: int, layer: bool) -> None:
    assert_right(verdicts(ChannelsFirst(width, layer), torch.randn(B, S, H)))


@pytest.mark.parametrize("s", [7, 16])
def test_the_bias_of_convbert_is_at_its_positions(s: int) -> None:
    """With 16 positions there are as many as channels."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    config = transformers.ConvBertConfig(
        vocab_size=11, embedding_size=8, num_attention_heads=4, conv_kernel_size=3, **sizes
    )
    model: Any = spread(transformers.ConvBertModel(config).double()).eval()
    words = torch.randint(11, (B, s))
    layer = model.encoder.layer[0].attention.self.key_conv_attn_layer

    def run() -> Tensor:
        return loss_of(model(input_ids=words).last_hidden_state)

    def written_out(use: Copies) -> Tensor:
        def forward(x: Tensor) -> Tensor:
            x = layer.pointwise(layer.depthwise(x))
            return x + use(layer.bias, rows_of(x.mT, use.places("x", B, s)))[..., 0].mT

        with instead((layer, "forward", forward)):
            return run()

    name = next(name for name, each in model.named_parameters() if each is layer.bias)
    with no_float32():
        assert_right(verdicts_of(model, run, written_out, {name}))


@pytest.mark.parametrize("before", ["nothing", "convolution"])
def test_prelu_of_channels_first_is_at_positions(before: str) -> None:
    model = nn.Sequential(nn.Conv1d(3, 3, 1, bias=False), nn.PReLU())
    if before == "nothing":
        model = nn.Sequential(nn.PReLU())
    x = torch.randn(B, 3, S)

    def written_out(use: Copies) -> Tensor:
        rows = rows_of(x.mT, use.places("positions", B, S))
        if before != "nothing":
            weight: Any = model[0].weight
            value = torch.einsum("bsoi,bsi->bso", use(weight, rows)[..., 0], rows.value)
            rows = rows.holding(value)
        slope = use(model[-1].weight, rows)  # type: ignore[arg-type]
        return loss_of(torch.where(rows.value > 0, rows.value, slope * rows.value).mT)

    assert_right(verdicts_of(model, lambda: loss_of(model(x)), written_out))


def test_prelu_after_a_linear_is_at_its_rows() -> None:
    model = nn.Sequential(nn.Linear(H, 3), nn.PReLU())
    x = torch.randn(B, S, H)

    def written_out(use: Copies) -> Tensor:
        layer: Any = model[0]
        rows = use.linear(rows_of(x, use.places("x", B, S)), layer.weight, layer.bias)
        slope = use(model[1].weight, rows)  # type: ignore[arg-type]
        return loss_of(torch.where(rows.value > 0, rows.value, slope * rows.value))

    assert_right(verdicts_of(model, lambda: loss_of(model(x)), written_out))


# -- experts, mixers, frequencies ----------------------------------------------------------------


class TwoExperts(Step):
    """Two experts with equally many rows: row 0 of the one is another token than of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(H, H) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, H)
        first = flat[:, 0] > flat[:, 0].median()
        y = torch.zeros_like(flat)
        for expert, here in zip(self.experts, (first, ~first), strict=True):
            rows = here.nonzero()[:, 0]
            y = y.index_add(0, rows, expert(flat[rows]))
        return y.view(x.shape)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        score = x.value[..., :1]
        first = score > score.median()
        one, two = (use.linear(x, e.weight, e.bias).value for e in self.experts)  # type: ignore
        return x.holding(torch.where(first, one, two))


def test_two_experts_with_equally_many_rows() -> None:
    assert_not_wrong(verdicts(TwoExperts(), torch.randn(B, 6, H)), ("weight", "bias"))


class MixerBlock(Step):
    """A mixer with as many channels as positions, and a layer: (b, h) and (b, s) look alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mix = nn.Linear(S, S), nn.Linear(S, S, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.mix(x.mT).mT

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        y = use.linear(x, self.layer.weight, self.layer.bias)
        channels, samples = use.places("channel", B, S), use.places("sample", B, 1).expand(B, S)
        mixed = use.linear(rows_of(x.value.mT, channels, samples), self.mix.weight)
        return y.holding(y.value + mixed.value.mT)


def test_channels_are_not_added_to_positions() -> None:
    model, x = MixerBlock(), torch.randn(B, S, S)
    assert_not_wrong(verdicts(model, x), ("weight",))
    with torchfmri.token_gradients(model) as tokens:
        loss_of(model(x)).backward()
    for names in tokens.axes.values():
        assert not {"layer.weight", "mix.weight"} <= set(names)
    missing = {row.name for row in tokens.coverage().missing}
    if "mix.weight" not in missing:
        with pytest.raises(torchfmri.InspectionError):
            tokens.norm()
    wanted = sum(tokens[f"layer.{each}"].norm().square() for each in ("weight", "bias"))
    torch.testing.assert_close(tokens.norm("layer.*").square(), wanted)


class Frequencies(Step):
    """A filter in the frequency domain, with as many frequencies as positions, or about half."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole, self.layer = whole, nn.Linear(H, H)
        self.kernel = free(S if whole else S // 2 + 1, H)

    def mixed(self, x: Tensor, kernel: Tensor) -> Tensor:
        if self.whole:
            return torch.fft.ifft(torch.fft.fft(x, dim=1) * kernel, dim=1).real
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * kernel, n=S, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(self.layer(x), self.kernel)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        y = use.linear(x, self.layer.weight, self.layer.bias)
        samples = rows_of(x.value[:, 0], use.places("sample", B, 1)[:, 0])
        return y.holding(self.mixed(y.value, use(self.kernel, samples)))


@pytest.mark.parametrize("whole", [False, True])
def test_frequencies_are_not_called_tokens(whole: bool) -> None:
    assert_not_wrong(verdicts(Frequencies(whole), torch.randn(B, S, H)), ("kernel",))


# -- weights that are computed -------------------------------------------------------------------


class MovedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = free(6, 4)

    def forward(self, x: Tensor, delta: Tensor) -> Tensor:
        return F.linear(x, self.w + delta)


@pytest.mark.parametrize("shape", [(2, 5, 4), (6, 5, 4), (2, 6, 4), (6, 4, 4)])
def test_a_tensor_added_to_a_weight_is_no_token(shape: tuple[int, ...]) -> None:
    model, x, delta = MovedWeight(), torch.randn(shape), torch.randn(6, 4)

    def written_out(use: Copies) -> Tensor:
        weight = use(model.w, rows_of(x, use.places("x", *shape[:2]))) + delta
        return loss_of(torch.einsum("bsoi,bsi->bso", weight, x))

    assert_right(verdicts_of(model, lambda: loss_of(model(x, delta)), written_out))


@pytest.mark.parametrize("blocks", [2, 3])
def test_our_own_routing_model(blocks: int) -> None:
    """Its blocks add the prototypes of the blocks before to their own."""
    model = spread(RoutingLanguageModel(RoutingConfig(11, hidden_size=6, blocks=blocks, heads=1)))
    words = torch.randint(11, (B, S))

    def run() -> Tensor:
        return loss_of(model(words).logits)

    def written_out(use: Copies) -> Tensor:
        ids = use.places("x", B, S)
        inherited: dict[str, list[Tensor]] = {}
        changes: list[tuple[nn.Module, str, Any]] = []
        for name, module in model.named_modules():
            if type(module).__name__ == "SparseProtoLinear":
                kind = name.rpartition(".")[2]
                changes.append((module, "forward", _proto(use, module, ids, inherited, kind)))
            elif isinstance(module, nn.RMSNorm):
                changes.append((module, "forward", _rms(use, module, ids)))
            elif isinstance(module, nn.Embedding) or name == "head":
                changes.append((module, "forward", copied(use, module, lambda _: ids)))
        with instead(*changes):
            return run()

    assert_right(verdicts_of(model, run, written_out))
    with torchfmri.token_gradients(model) as tokens:
        run().backward()
    assert tokens.norm().shape == (B, S)


def _rms(use: Copies, module: Any, ids: Tensor) -> Callable[[Tensor], Tensor]:
    eps = torch.finfo(torch.float64).eps if module.eps is None else module.eps

    def forward(x: Tensor) -> Tensor:
        flat = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return flat * use(module.weight, rows_of(x, ids))

    return forward


def _proto(
    use: Copies, module: Any, ids: Tensor, inherited: dict[str, list[Tensor]], kind: str
) -> Callable[..., Tensor]:
    def forward(x: Tensor, _: Any = None) -> Tensor:
        rows, layer = rows_of(x, ids), module.computation
        computed = x + use.linear(rows, layer.weight, layer.bias).value
        known = inherited.setdefault(kind, [])
        known.append(module.prototypes)
        prototypes = sum(use(each, rows) for each in known) / math.sqrt(x.shape[-1])
        match = torch.einsum("bsoi,bsi->bso", prototypes, x)
        return computed * mas(match - mas(use.linear(rows, module.gate).value))

    return forward


# -- keep="norms", keep="voxels" -----------------------------------------------------------------


class CalledTwice(nn.Module):
    """A layer with a free parameter, which is run again, called twice, each time checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gain()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=False)
        return x


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = free(H, H), free(H)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh() * self.scale


@pytest.mark.parametrize("keep", ["factors", "norms", "voxels"])
def test_nothing_is_unattributed_where_a_checkpoint_is_called_twice(keep: str) -> None:
    model, x = CalledTwice(), torch.randn(B, S, H)
    expected = loss_of(model(x))
    expected.backward()

    def written_out(use: Copies) -> Tensor:
        rows = rows_of(x, use.places("x", B, S))
        for _ in range(2):
            weight, scale = use(model.inner.weight, rows), use(model.inner.scale, rows)
            rows = rows.holding(torch.einsum("bsi,bsio->bso", rows.value, weight).tanh() * scale)
        return loss_of(rows.value)

    truth = truth_of(model, expected.detach(), written_out)
    model.zero_grad()
    with torchfmri.token_gradients(model, keep=keep) as tokens:
        loss_of(model(x)).backward()
    coverage = tokens.coverage()
    assert [row.note for row in coverage] == ["", ""]
    assert coverage.residual < 1e-10
    for name, (reading,) in truth.readings.items():
        wanted = reading["x"].flatten(2).norm(dim=2)
        torch.testing.assert_close(tokens[name].norm(), wanted, rtol=1e-8, atol=0)


# -- what must not fail --------------------------------------------------------------------------


class FromConstants(Step):
    """x + lin(ones): rows that no input of the model made."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.head = nn.Linear(2, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.lin(torch.ones(x.shape[1], 2)))

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        once = use.places("of the constant", 1, S).expand(B, S)
        rows = rows_of(torch.ones(B, S, 2), x.ids[..., 0], once)
        y = x.holding(x.value + use.linear(rows, self.lin.weight, self.lin.bias).value)
        return use.linear(y, self.head.weight, self.head.bias)


def test_rows_of_constants() -> None:
    model, x = FromConstants(), torch.randn(B, S, H)
    found = verdicts(model, x)
    assert_not_wrong(found, ("weight", "bias"))
    assert_right([each for each in found if each.name.startswith("head")])
    with torchfmri.token_gradients(model) as tokens:
        loss_of(model(x)).backward()
    assert tokens.norm("head.*").shape == (B, S)


class WithPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(11, H), nn.Embedding(8, H)
        self.head = nn.Linear(H, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids) + self.positions(torch.arange(ids.shape[1])))


@pytest.mark.parametrize("keep", ["factors", "norms", "voxels"])
def test_a_loss_that_is_not_a_number(keep: str) -> None:
    model, ids = WithPositions(), torch.randint(11, (B, S))
    with torchfmri.token_gradients(model, keep=keep) as tokens:
        (loss_of(model(ids)) * math.nan).backward()
    assert len(tokens.coverage()) == 4
    for row in tokens.coverage():
        if row.rule == "none":
            with pytest.raises(torchfmri.InspectionError):
                tokens[row.name]
        else:
            assert tokens[row.name].norm().isnan().all()
    assert tokens.norm("head.*").shape == (B, S)


@pytest.mark.parametrize("keep", ["factors", "norms", "voxels"])
@pytest.mark.parametrize("shape", [(0, S), (B, 0)])
def test_a_batch_without_rows(keep: str, shape: tuple[int, int]) -> None:
    model = WithPositions()
    with torchfmri.token_gradients(model, keep=keep) as tokens:
        model(torch.zeros(shape, dtype=torch.long)).sum().backward()
    for row in tokens.coverage():
        if row.rule == "none":
            assert row.note
            with pytest.raises(torchfmri.InspectionError):
                tokens[row.name]
        else:
            assert tokens[row.name].norm().numel() == 0
    assert tokens.norm("head.*").numel() == 0


class Routed(Step):
    """Experts, of which one has no rows, and a layer."""

    def __init__(self, free_weights: bool) -> None:
        super().__init__()
        self.weight = free(2, H, H) if free_weights else None
        self.experts = nn.ModuleList(
            nn.Linear(H, H, bias=False) for _ in range(2 - 2 * free_weights)
        )
        self.head = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, H)
        y = torch.zeros_like(flat)
        for number, chosen in enumerate((flat[:, 0] < 9, flat[:, 0] >= 9)):
            rows = chosen.nonzero()[:, 0]
            weight = self.experts[number].weight if self.weight is None else self.weight[number]
            made = (
                self.experts[number](flat[rows]) if self.weight is None else flat[rows] @ weight.T
            )
            y = y.index_add(0, rows, made)
        return self.head(y.view(x.shape))

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        if self.weight is None:
            unused: Any = self.experts[1]
            first: Any = self.experts[0]
            y = use.linear(x, first.weight).value + 0 * use.linear(x, unused.weight).value
        else:
            y = torch.einsum("bsoi,bsi->bso", use(self.weight, x)[:, :, 0], x.value)
        return use.linear(x.holding(y), self.head.weight, self.head.bias)


@pytest.mark.parametrize("free_weights", [False, True])
def test_an_expert_without_rows(free_weights: bool) -> None:
    model, x = Routed(free_weights), torch.randn(B, S, H)
    found = verdicts(model, x)
    assert_not_wrong(found, ("weight",))
    assert_right([each for each in found if each.name.startswith("head")])
    with torchfmri.token_gradients(model) as tokens:
        loss_of(model(x)).backward()
    assert tokens.norm("head.*").shape == (B, S)


class Squared(torch.autograd.Function):
    """A function of a user, which knows nothing of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.square() * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return 2 * x * weight * gradient, (x.square() * gradient).flatten(0, -2).sum(0)


class WithFunction(Step):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight, self.last = nn.Linear(H, H), free(H), nn.Linear(H, H)
        self.scale = free(H)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Squared.apply(self.first(x), self.weight) * self.scale)

    def truth(self, use: Copies, x: Rows, *_: Rows) -> Rows:
        y = use.linear(x, self.first.weight, self.first.bias)
        y = y.holding(y.value.square() * use(self.weight, y) * use(self.scale, y))
        return use.linear(y, self.last.weight, self.last.bias)


def test_a_function_with_a_backward_of_its_own() -> None:
    model, x = WithFunction(), torch.randn(B, S, H)
    found = {each.name: each for each in verdicts(model, x)}
    assert_not_wrong(list(found.values()), ("weight", "bias", "scale"))
    assert_right([found["first.weight"], found["first.bias"]])
    with torchfmri.token_gradients(model) as tokens:
        loss_of(model(x)).backward()
    assert tokens.norm("first.*").shape == (B, S)
    assert tokens.on(next(iter(tokens.axes))).norm().shape == (B, S)


# -- the oracle itself ---------------------------------------------------------------------------


def test_a_wrong_token_is_seen() -> None:
    """Two tokens swapped, a place shifted, an axis transposed: the sum is right, the place not."""
    model, x = nn.Linear(H, H), torch.randn(B, S, H)

    def judged_with(numbers: Callable[[Tensor], Tensor]) -> set[str]:
        def written_out(use: Copies) -> Tensor:
            rows = rows_of(x, numbers(use.places("x", B, S)))
            return loss_of(use.linear(rows, model.weight, model.bias).value)

        return {each.outcome for each in verdicts_of(model, lambda: loss_of(model(x)), written_out)}

    assert judged_with(lambda ids: ids) == {RIGHT}
    assert judged_with(lambda ids: ids.flip(1)) == {WRONG}
    assert judged_with(lambda ids: ids.roll(1, 1)) == {WRONG}
    assert judged_with(lambda ids: ids[[1, 0]]) == {WRONG}
    swapped = list(range(S))
    swapped[1:3] = 2, 1
    assert judged_with(lambda ids: ids[:, swapped]) == {WRONG}
    assert judged_with(lambda ids: ids.mT.reshape(B, S)) == {WRONG}


def test_unrelated_tokens_on_one_axis_are_seen() -> None:
    model, x = nn.Sequential(nn.Linear(H, H), nn.Linear(H, H)), torch.randn(B, S, H)
    expected = loss_of(model(x))
    expected.backward()

    def written_out(use: Copies) -> Tensor:
        rows = rows_of(x, use.places("x", B, S))
        for layer, kind in zip(model, ("x", "other"), strict=True):
            rows = rows_of(rows.value, use.places(kind, B, S))
            rows = use.linear(rows, layer.weight, layer.bias)  # type: ignore[arg-type]
        return loss_of(rows.value)

    truth = truth_of(model, expected.detach(), written_out)
    model.zero_grad()
    with torchfmri.token_gradients(model) as tokens:
        loss_of(model(x)).backward()
    outcomes = [each.outcome for each in judge(tokens, truth)]
    assert outcomes == [RIGHT, RIGHT, WRONG, WRONG]


def test_a_gradient_without_a_row_is_seen() -> None:
    model, x = nn.Linear(H, H), torch.randn(B, S, H)
    with torchfmri.token_gradients(model, "weight") as tokens:
        loss_of(model(x)).backward()
    truth = Truth({"bias": [{"x": torch.ones(B, S, H)}]})
    assert [each.outcome for each in judge(tokens, truth)] == [WRONG]


# -- recurrences of other forms, and passes that differ ------------------------------------------


class Loop(nn.Module):
    """A recurrence in one of several forms; each layer is called once per step."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.state, self.after, self.fed = (nn.Linear(H, H) for _ in range(3))
        self.both = nn.Linear(2 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        y = h = x.new_zeros(len(x), H)
        made = []
        for t in range(x.shape[1]):
            if self.form == "layer after the step":
                y = self.after(x[:, t] + self.state(y))
            elif self.form == "beside the state":
                y = self.both(torch.cat([x[:, t], y], 1)).tanh()
            elif self.form == "state first":
                y = self.both(torch.cat([y, x[:, t]], 1)).tanh()
            else:  # the output is fed back
                h = (self.state(h) + self.fed(y) + x[:, t]).tanh()
                y = self.after(h)
            made.append(y * (t + 1))
        return torch.stack(made, 1)


FORMS = ("layer after the step", "beside the state", "state first", "output fed back")


@pytest.mark.parametrize("form", FORMS)
def test_every_step_has_its_own_uses(form: str) -> None:
    model, x = Loop(form).double(), torch.randn(B, S, H).double()
    copies: dict[str, list[Tensor]] = {}  # of the bias, one per call
    changes = []
    for name, layer in model.named_children():
        calls = copies.setdefault(name, [])

        def forward(given: Tensor, layer: Any = layer, calls: list[Tensor] = calls) -> Tensor:
            calls.append(layer.bias.detach().expand(len(given), H).clone().requires_grad_())
            return given @ layer.weight.T + calls[-1]

        changes.append((layer, "forward", forward))
    with instead(*changes):
        loss_of(model(x)).backward()
    model.zero_grad()
    with torchfmri.token_gradients(model) as tokens:
        loss_of(model(x)).backward()
    for name, calls in copies.items():
        if calls:
            wanted = torch.stack([each.grad for each in calls if each.grad is not None], 1)
            found = tokens[f"{name}.bias"].materialise()
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("how", ["drawn", "list", "numpy", "attribute"])
def test_an_order_that_differs_between_passes(how: str) -> None:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.order = nn.Linear(H, H), torch.arange(S)

        def forward(self, x: Tensor, order: Any) -> Tensor:
            if how == "drawn":
                self.order = torch.randperm(S)
            elif how == "numpy":
                self.order = torch.from_numpy(x[0, :, 0].detach().numpy().argsort())
            elif how == "attribute":
                self.order = self.order.flip(0)
            return self.layer(x[:, order if how == "list" else self.order])

    model = Ordered().double()
    for number in range(3):
        model.zero_grad()
        x = torch.randn(B, S, H).double()
        weights = torch.arange(1.0, S + 1, dtype=torch.float64)
        with torchfmri.token_gradients(model) as tokens:
            order = [(each + number) % S for each in range(S)]
            (model(x, order) * weights[:, None]).sum().backward()
        used = torch.tensor(order) if how == "list" else model.order
        wanted = torch.zeros(S, dtype=torch.float64)
        wanted[used] = weights
        found = tokens["layer.bias"].materialise()
        torch.testing.assert_close(found, wanted[:, None].expand(B, S, H))


def shift_of(model: Any, x: Tensor, how: str) -> int:
    """2 where something read out of a tensor says so, 0 otherwise."""
    low = x[:, 0, 0]
    if how == "nonzero":
        return min(2, (x < 0).nonzero().shape[0])
    if how == "drawn":
        return 2 if torch.rand(()) < model.chance else 0
    read = {
        "branch": lambda: x.sum() < 0,
        "float item": lambda: x.sum().item() < 0,
        "int of a bool": lambda: int((x < 0).any()),
        "int of a float": lambda: int(model.level),
        "a buffer compared": lambda: model.level > 0,
        "equal": lambda: torch.equal(low, -low.abs()),
        "allclose": lambda: torch.allclose(low, -low.abs()),
    }
    return 2 if read[how]() else 0


class Branching(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(H, H)
        self.register_buffer("level", torch.zeros(()))
        self.how, self.chance = how, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.roll(shift_of(self, x, self.how), 1))


def first_row(model: nn.Module, *arguments: Any) -> int | None:
    """The token of the first row that a model makes; None where it is refused."""
    with torchfmri.token_gradients(model) as tokens:
        model(*arguments)[:, 0].square().sum().backward()
    try:
        return int(tokens["layer.weight"].norm()[0].argmax())
    except torchfmri.UnsupportedLayerError as error:
        return None if "another way" in str(error) else -1


READS = (
    "branch", "float item", "int of a bool", "int of a float", "a buffer compared", "equal",
    "allclose", "nonzero", "drawn",
)  # fmt: skip


@pytest.mark.parametrize("how", READS)
def test_a_value_read_from_a_tensor_that_decides_later(how: str) -> None:
    model, found = Branching(how), []
    for turn in (0, 0, 0, 0, 1, 1, 1, 0, 1):
        model.level.fill_(turn)
        model.chance.fill_(turn)
        x = torch.rand(B, S, H) + 0.1
        found.append(first_row(model, -x if turn else x))
    right = [0, 0, 0, 0, S - 2, S - 2, S - 2, 0, S - 2]
    refused = [number for number, each in enumerate(found) if each is None]
    assert refused in ([4], [])  # once, and every pass is followed from there on
    assert [each for each in found if each is not None] == [
        each for number, each in enumerate(right) if number not in refused
    ]


def test_masks_that_are_full_are_told_from_others() -> None:
    class LeftPadded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(H, H)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x if mask.all() else x.roll(1, 1))

    model, full = LeftPadded(), torch.ones(B, S, dtype=torch.bool)
    padded = full.clone()
    padded[1, -1] = False
    several = [full, full, full, padded, padded, padded, full, padded]
    found = [first_row(model, torch.randn(B, S, H), mask) for mask in several]
    assert found == [0 if mask is full else S - 1 for mask in several]


class Slotted:
    __slots__ = ("shift",)


class Stateful(nn.Module):
    """Rolls its input by a number that it finds in one of many places."""

    kind_shift = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(H, H), how
        self.deep = SimpleNamespace(inner={"shifts": [SimpleNamespace(shift=0)]})
        self.slotted = Slotted()
        self.generator = np.random.default_rng(0)
        hidden = {"shift": 0}
        self.closed, self.open = (lambda: hidden["shift"]), hidden.update

    def set(self, shift: int) -> None:
        type(self).kind_shift = self.slotted.shift = shift
        self.deep.inner["shifts"][0].shift = shift
        self.open(shift=shift)
        seed = next(each for each in range(99) if (drawn_by(each) < 0.7) == (shift == 0))
        self.generator.bit_generator.state = np.random.default_rng(seed).bit_generator.state

    def forward(self, x: Tensor, given: Any) -> Tensor:
        found = {
            "dict": lambda: given["shift"],
            "object": lambda: given.shift,
            "array": lambda: int(given[0]),
            "list of a dict": lambda: given[1]["shift"],
            "deep attribute": lambda: self.deep.inner["shifts"][0].shift,
            "slots": lambda: self.slotted.shift,
            "class attribute": lambda: self.kind_shift,
            "closure": self.closed,
            "generator": lambda: 0 if self.generator.random() < 0.7 else 2,
        }
        return self.layer(x.roll(found[self.how](), 1))


def drawn_by(seed: int) -> float:
    return float(np.random.default_rng(seed).random())


GIVEN: dict[str, Any] = {
    "dict": lambda shift: {"shift": shift},
    "object": lambda shift: SimpleNamespace(shift=shift),
    "array": lambda shift: np.array([shift]),
    "list of a dict": lambda shift: [0, {"shift": shift}],
}
STATES = (*GIVEN, "deep attribute", "slots", "class attribute", "closure", "generator")


@pytest.mark.parametrize("how", STATES)
def test_an_argument_or_a_state_that_decides_later(how: str) -> None:
    model = Stateful(how)
    for number, shift in enumerate((0, 0, 0, 0, 2, 2, 2)):
        model.set(shift)
        given = GIVEN.get(how, lambda _: None)(shift)
        found = first_row(model, torch.randn(B, S, H), given)
        assert found == -shift % S or (number == 4 and found is None)


def test_a_model_whose_state_is_known_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    compared: list[Way] = []

    class Noted(Way):
        def __init__(self) -> None:
            super().__init__()
            compared.append(self)

    monkeypatch.setattr(passes, "Way", Noted)
    config = transformers.Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    for number in range(4):
        if number == 3:
            assert not compared
            model.config.anything = 1
        ids = torch.randint(0, 32, (B, S))
        with torchfmri.token_gradients(model):
            model(input_ids=ids, labels=ids).loss.backward()
    assert len(compared) == 1


# -- drawn at random -----------------------------------------------------------------------------


def summary(seeds: range) -> tuple[Counter[str], list[str]]:
    outcomes: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        found, several = judged(seed)
        for each in several:
            outcomes[each.outcome] += 1
            if each.outcome == WRONG:
                wrong.append(f"{seed} {each.name} ({kind_of(found, each.name)}): {each.detail}")
            elif each.outcome in (REFUSED, EXCUSED):
                assert each.detail, f"{seed} {each.name}: refused without a reason"
    return outcomes, wrong


def test_random_programs() -> None:
    outcomes, wrong = summary(range(60))
    assert not wrong, f"{len(wrong)} wrong of {outcomes}:\n" + "\n".join(wrong[:20])
    assert outcomes[RIGHT] > 5 * outcomes[REFUSED]


@pytest.mark.slow
def test_more_random_programs() -> None:
    outcomes, wrong = summary(range(60, 1060))
    assert not wrong, f"{len(wrong)} wrong of {outcomes}:\n" + "\n".join(wrong[:40])
    assert outcomes[RIGHT] > 5 * outcomes[REFUSED]


def test_a_program_is_the_same_each_time() -> None:
    first, second = program(7), program(7)
    assert str(first[0]) == str(second[0])
    for one, two in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, two)
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
