"""Ports: another implementation of a model, with names of its own and the same weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks._compare_models import batch, build
from torchfmri import Comparison, Run, compare

pytestmark = pytest.mark.usefixtures("one_thread")


class Norm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(32)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.q, self.out = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(32, 16, bias=False) for _ in range(2))
        self.bug = bug

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (y * cos + self.turned(y) * sin for y in (q, k))
        if self.bug == "groups":  # which key belongs to which query
            k, v = (y.repeat(1, 2, 1, 1) for y in (k, v))
        else:
            k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        later = torch.ones(s, s, dtype=torch.bool).triu(1)
        weights = (q @ k.mT / math.sqrt(8)).masked_fill(later, -math.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, s, -1))

    def turned(self, y: Tensor) -> Tensor:
        if self.bug == "interleaved":
            return torch.stack((-y[..., 1::2], y[..., ::2]), -1).flatten(-2)
        one, two = y.chunk(2, -1)
        return torch.cat((-two, one), -1)


class Block(nn.Module):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.before, self.between = (Norm(1e-3 if bug == "epsilon" else 1e-6) for _ in range(2))
        self.attention = Attention(bug)
        self.gate, self.up = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.down = nn.Linear(48, 32, bias=False)
        self.act = nn.functional.gelu if bug == "gelu" else nn.functional.silu

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), cos, sin)
        y = self.between(x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))


class Port(nn.Module):
    """Llama, written by hand."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(67, 32), Norm(1e-6)
        self.blocks = nn.ModuleList(Block(bug) for _ in range(3))
        self.head = nn.Linear(32, 67, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        angles = torch.outer(torch.arange(input_ids.shape[1]), 1e4 ** -(torch.arange(4) / 4))
        angles = torch.cat((angles, angles), -1)
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        logits = self.head(self.last(x))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


NAMES = {"self_attn.q_proj": "attention.q", "self_attn.k_proj": "attention.k",
         "self_attn.v_proj": "attention.v", "self_attn.o_proj": "attention.out",
         "input_layernorm": "before", "post_attention_layernorm": "between",
         "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}  # fmt: skip


def compared(bug: str = "", plant: Any = None) -> Comparison:
    """Compare a model with its port."""
    model, port = build("llama"), Port(bug)
    pairs = {"model.embed_tokens": "words", "model.norm": "last", "lm_head": "head"}
    for block in range(3):
        pairs |= {f"model.layers.{block}.{a}": f"blocks.{block}.{b}" for a, b in NAMES.items()}
    with torch.no_grad():
        for ours, theirs in pairs.items():
            target = port.get_submodule(theirs)
            weight = target.gain if isinstance(target, Norm) else target.weight
            weight.copy_(model.get_submodule(ours).weight)
        if plant is not None:
            plant(port)
    found: Comparison = compare(model, port, data=batch("llama", None))
    return found


def test_layers_of_a_port_are_matched_by_their_weights() -> None:
    found = compared()
    assert found.agree, str(found.first)
    partners = {pair.place.layer: pair.partner.layer for pair in found.pairs if pair.partner}
    for ours, theirs in NAMES.items():
        assert partners[f"model.layers.1.{ours}"] == f"blocks.1.{theirs}"
    assert partners["model.layers.2"] == "blocks.2", "a module made of partners"
    assert any("by their weights" in note for note in found.notes)


class Plain(Block):
    """Computes its norms in its own code, so that the norms of the model have no partners."""

    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.eps = self._modules.pop("before").eps
        del self._modules["between"]

    def before(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    between = before


@pytest.mark.parametrize("bug", ["", "epsilon"])
def test_a_port_without_modules_for_its_norms(bug: str) -> None:
    model, port = build("llama"), Port()
    port.blocks = nn.ModuleList(Plain(bug) for _ in range(3))
    pairs = {"model.embed_tokens": "words", "lm_head": "head"}
    for block in range(3):
        inner = {a: b for a, b in NAMES.items() if "norm" not in a}
        pairs |= {f"model.layers.{block}.{a}": f"blocks.{block}.{b}" for a, b in inner.items()}
    with torch.no_grad():
        for ours, theirs in pairs.items():
            port.get_submodule(theirs).weight.copy_(model.get_submodule(ours).weight)
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else None
    found = compare(model, port, data=batch("llama", None))
    partners = {pair.place.layer: pair.partner.layer for pair in found.pairs if pair.partner}
    assert partners["model.norm"] == "last", "of seven equal norms the one before the head"
    assert "model.layers.1.input_layernorm" in found.only_a
    assert not found.only_b
    if not bug:
        assert found.agree, str(found.first)
        return
    first = found.first
    assert first is not None
    assert (first.seen_at, first.layer) == ("model.layers.0.self_attn.q_proj", "model.layers.0")
    assert "factor_per_token" in [kind.name for kind in first.kinds]


@pytest.mark.parametrize(
    ("bug", "layer", "token"),
    [
        ("interleaved", "model.layers.0.self_attn", 1),
        ("groups", "model.layers.0.self_attn", 0),
        ("epsilon", "model.layers.0.input_layernorm", 0),
        ("gelu", "model.layers.0", 0),
    ],
)
@pytest.mark.one_in(2)
def test_a_mistake_in_a_port_is_located(bug: str, layer: str, token: int) -> None:
    first = compared(bug).first
    assert first is not None
    assert (first.layer, first.token) == (layer, token)
    if bug == "epsilon":
        assert "variance_epsilon (eps in b) is 1e-06 in a and 0.001 in b" in str(first)


def test_a_weight_that_was_loaded_wrong_is_still_matched() -> None:
    def transpose(port: Port) -> None:
        weight = port.blocks[1].attention.q.weight
        weight.copy_(weight.T.clone())

    first = compared(plant=transpose).first
    assert first is not None
    assert (first.layer, first.partner) == (
        "model.layers.1.self_attn.q_proj",
        "blocks.1.attention.q",
    )
    assert "transposed" in [kind.name for kind in first.kinds]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("model.layers.1.input_layernorm", "blocks.1.before"), ("model.norm", "last"),
        ("model.embed_tokens", "words"), ("model.layers.2.mlp.up_proj", "blocks.2.up"),
        ("model.layers.0.self_attn.k_proj", "blocks.0.attention.k"),
    ],
)  # fmt: skip
def test_a_layer_with_other_numbers_has_the_partner_at_its_place(ours: str, theirs: str) -> None:
    """A mistake in loading changes the weights by which layers are matched."""

    def damage(port: Port) -> None:
        layer = port.get_submodule(theirs)
        weight = layer.gain if isinstance(layer, Norm) else layer.weight
        weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))

    found = compared(plant=damage)
    assert found.first is not None
    assert (found.first.layer, found.first.partner) == (ours, theirs)
    assert any(f"by place and shape, such as {ours!r}" in note for note in found.notes)


class Fused(nn.Module):
    """Two layers of another model in one."""

    def __init__(self, two: nn.Sequential) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(16, 8)
        self.first.load_state_dict(two[0].state_dict())
        self.last.load_state_dict(two[2].state_dict())
        self.both = nn.Linear(8, 16)
        parts = [two[1].one, two[1].other]
        with torch.no_grad():
            self.both.weight.copy_(torch.cat([each.weight for each in parts]))
            self.both.bias.copy_(torch.cat([each.bias for each in parts]))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.both(self.first(x).tanh()).tanh())
        return found


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.one(x.tanh()), self.other(x.tanh())), -1).tanh()


def test_layers_without_a_partner_before_the_first_difference_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Pair(), nn.Linear(16, 8))
    port, data = Fused(model), torch.randn(6, 8)
    assert compare(model, port, data=data).agree
    with torch.no_grad():
        port.both.bias[3] += 0.1
    first = compare(model, port, data=data).first
    assert first is not None
    assert first.seen_at == "2"
    said = [kind.text for kind in first.kinds if kind.name == "unmatched_layers"]
    assert said[0] == "just before it only a runs '1.one', '1.other', '1'"
    assert said[1] == "just before it only b runs 'both'"


def test_a_weight_that_is_shared_on_one_side_only_is_named() -> None:
    tied, loose = (build("llama", tie_word_embeddings=tie) for tie in (True, False))
    loose.load_state_dict(tied.state_dict())
    found = compare(tied, loose, data=batch("llama"))
    first = found.first
    assert first is not None
    assert (first.direction, first.layer) == ("parameters", "model.embed_tokens")
    text = "'lm_head' and 'model.embed_tokens' share a weight in a only"
    assert first.kinds[0] == ("tied", text)
    assert text in [change.text for change in found.changes]


@pytest.mark.parametrize("wrong", [False, True])
def test_generating_with_and_without_a_cache(wrong: bool) -> None:
    model = build("llama")

    def generate(cached: bool) -> Any:
        def call(model: Any, data: Any) -> Any:
            if cached and wrong:
                model.model.layers[1].self_attn.scaling *= 2
            try:
                return model.generate(**data, max_new_tokens=4, do_sample=False, use_cache=cached)
            finally:
                model.model.layers[1].self_attn.scaling = 8**-0.5

        return call

    data = {"input_ids": batch("llama", None)["input_ids"][:1]}
    with torch.no_grad():
        found = compare(*(Run(model, data, call=generate(each)) for each in (False, True)))
    tokens = {len(pair.grid) for pair in found.pairs if pair.grid is not None}
    assert tokens == {data["input_ids"].shape[1] + 3}, "the last one is never read"
    assert {"lm_head"} <= {pair.place.layer for pair in found.pairs}
    assert found.agree != wrong, str(found.first)
    if found.first is not None:
        assert found.first.layer == "model.layers.1.self_attn"
