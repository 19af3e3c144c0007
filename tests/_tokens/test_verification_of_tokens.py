"""`tokens.verify()`: the rows that change with a token, against those that it is said to have."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchfmri
from torchfmri._tokens.rules.recurrences import Recurrences

PROVED = {"local", "first"}


def tokens_of(model: nn.Module, *inputs: Tensor, keep: str = "factors") -> Any:
    with torchfmri.token_gradients(model, keep=keep) as tokens:  # type: ignore[call-overload]
        model(*inputs).square().mean().backward()
    return tokens


# -- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["factors", "norms"])
def test_a_causal_model_is_proved(keep: Any) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4}
    config = Qwen3Config(
        vocab_size=40, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1, **sizes
    )
    model, ids = Qwen3ForCausalLM(config).train(), torch.randint(40, (2, 6))
    with torchfmri.token_gradients(model, keep=keep) as tokens:
        model(input_ids=ids, labels=ids).loss.backward()
    found = tokens.verify()
    assert {row.verdict for row in found} == PROVED
    assert found.layers["model.layers.0.self_attn.q_proj"] == "local"
    assert found.layers["lm_head"] == "first"
    assert {name for row in found for name in row.parameters} == set(tokens.names)
    assert len({row.token for row in found}) == 8


def test_attention_in_both_directions_proves_nothing_behind_it() -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=40, num_attention_heads=2, max_position_embeddings=8, **sizes)
    model, ids = BertModel(config), torch.randint(40, (2, 6))
    with torchfmri.token_gradients(model) as tokens:
        model(input_ids=ids).pooler_output.square().mean().backward()
    found = tokens.verify()
    assert not found.refuted
    assert found.layers["encoder.layer.0.attention.self.query"] == "local"
    assert found.layers["encoder.layer.0.attention.output.dense"] == "mixed"
    assert found.layers["encoder.layer.1.output.dense"] == "mixed"
    assert found.layers["pooler.dense"] == "mixed"
    assert found.layers["embeddings.position_embeddings"] == "not judged"


def test_arguments_of_two_stacks_are_both_changed() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=40, **sizes))
    source, target = torch.randint(40, (2, 5)), torch.randint(40, (2, 5))
    with torchfmri.token_gradients(model) as tokens:
        model(input_ids=source, decoder_input_ids=target).logits.square().mean().backward()
    found = tokens.verify(samples=20)
    assert not found.refuted
    assert found.layers["encoder.block.0.layer.0.SelfAttention.q"] == "local"
    assert found.layers["decoder.block.0.layer.0.SelfAttention.q"] == "local"
    assert found.layers["decoder.block.0.layer.0.SelfAttention.o"] == "first"
    assert {row.of for row in found} == {"", "decoder_input_ids"}


class Permuted(nn.Module):
    """The rows in another order, a fixed one or by their sums."""

    def __init__(self, is_by_score: bool) -> None:
        super().__init__()
        self.layer, self.is_by_score = nn.Linear(3, 3), is_by_score

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 3)
        order = torch.arange(len(rows)) * 5 % len(rows)  # 5 has no divisor in common with 32
        if self.is_by_score:
            order = rows.sum(1).argsort()
        y = torch.empty_like(rows)
        y[order] = self.layer(rows[order])
        return y.view(x.shape)


class Windows(nn.Module):
    """(b, 4 * 4, h) rolled and cut into windows of 2 * 2."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 4, 4, 4).roll((-1, -1), (1, 2))
        x = x.view(-1, 2, 2, 2, 2, 4).permute(0, 1, 3, 2, 4, 5)
        y: Tensor = self.layer(x.reshape(-1, 4, 4)).tanh()
        y = y.view(-1, 2, 2, 2, 2, 4).permute(0, 1, 3, 2, 4, 5)
        return self.last(y.reshape(-1, 4, 4, 4).roll((1, 1), (1, 2)).reshape(-1, 16, 4))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Each row goes to one of three layers, chosen by its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 4)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (at,) = (chosen == number).nonzero(as_tuple=True)
            y.index_add_(0, at, expert(rows[at]) * weights[at, None])
        return self.last(y.view(x.shape))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda: Permuted(False), (2, 5, 3)),
        (lambda: Permuted(True), (2, 5, 3)),
        (Windows, (2, 16, 4)),
        (Experts, (2, 9, 4)),
        (lambda: nn.Linear(4, 2), (6, 4)),
    ],
    ids=["drawn", "by score", "windows", "experts", "no positions"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moved_rows_are_proved(model: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = tokens_of(model().to(dtype), torch.randn(shape, dtype=dtype)).verify(samples=18)
    assert {row.verdict for row in found} == {"local"}, found


def test_statistics_of_the_batch_prove_nothing() -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 2, stride=2))
    x = torch.randn(2, 3, 8)
    found = tokens_of(model, x).verify()
    assert found.layers == {"0": "local", "1": "mixed", "2": "mixed"}
    assert tokens_of(model.eval(), x).verify().layers["1"] == "local"


@pytest.mark.parametrize("name", ["one by one", "steps first", "dilated"])
def test_layouts_are_not_refuted(name: str) -> None:
    models: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "one by one": (nn.Conv2d(3, 4, 1), (2, 3, 2, 3)),  # as many positions in both readings
        "steps first": (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), (5, 3, 4)),
        "dilated": (nn.Conv1d(3, 4, 2, dilation=2, padding="same"), (2, 3, 6)),
    }
    model, shape = models[name]
    found = tokens_of(model, torch.randn(shape)).verify(samples=15)
    assert not found.refuted, found
    assert found.layers["linear1" if name == "steps first" else ""] in {"local", "mixed"}


class OnState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, states = torch.zeros(len(x), 4), []
        for t in range(x.shape[1]):
            z = self.gate(x[:, t]).sigmoid()
            h = z * h + (1 - z) * torch.tanh(self.layer(h) + x[:, t])
            states.append(h)
        return torch.stack(states, 1)


def test_a_state_belongs_to_the_step_that_reads_it() -> None:
    found = tokens_of(OnState(), torch.randn(2, 4, 4)).verify()
    assert found.layers == {"gate": "local", "layer": "mixed"}


class Free(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale  # type: ignore[no-any-return]


def test_what_is_run_again_is_listed_with_the_reason() -> None:
    found = tokens_of(Free(), torch.randn(2, 3, 4)).verify(samples=2)
    (row,) = [row for row in found if row.verdict == "not judged"]
    assert (row.parameters, row.token) == (("scale",), None)
    assert "run again" in row.note
    assert found.layers == {"": "not judged", "layer": "local"}
    text = repr(found)
    assert "(model)" in text
    assert row.note in text
    assert found.to_dict()[0]["verdict"] == "not judged"
    assert len(found) == len(found.to_dict()) == 3


# -- negative control ----------------------------------------------------------------------------


def swapped(numbers: Tensor) -> Tensor:
    found = numbers.clone()
    found[:2] = numbers[:2].flip(0)
    return found


@pytest.mark.parametrize("tamper", [swapped, lambda numbers: numbers.roll(1)], ids=["swap", "roll"])
@pytest.mark.parametrize("model", [lambda: Permuted(False), Windows], ids=["permuted", "windows"])
def test_wrong_tokens_are_refuted(model: Any, tamper: Any) -> None:
    net = model()
    x = torch.randn(2, 16, 3 if isinstance(net, Permuted) else 4)
    tokens_of(net, x)
    tokens = tokens_of(net, x)  # of two passes in a row: what they found is kept
    right = tokens["layer.weight"].norm()
    assert not tokens.verify(samples=32).refuted
    (known,) = tokens._plan.maps.values()  # later passes of these shapes look their tokens up
    call = known.calls["layer"][0]
    rows = tuple(each._replace(numbers=tamper(each.numbers)) for each in call.rows)
    known.calls["layer"][0] = call._replace(rows=rows)
    again = tokens_of(net, x)
    assert not torch.allclose(again["layer.weight"].norm(), right)
    refuted = again.verify(samples=32).refuted
    assert {row.layer for row in refuted} == {"layer"}
    tampered = 2 if tamper is swapped else 32
    assert len(refuted) == tampered


# -- no trace ------------------------------------------------------------------------------------


class Fragile(nn.Module):
    """Draws random numbers, counts its calls, and refuses some data when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.calls, self.allowed = 0, 100

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        np.random.rand()
        random.random()
        y: Tensor = self.drop(self.norm(self.layer(x)))
        if self.calls > self.allowed:
            raise ValueError("no more")
        return y


def everything(model: Fragile) -> list[Any]:
    return [
        [each.clone() for each in model.state_dict().values()],
        [None if each.grad is None else each.grad.clone() for each in model.parameters()],
        [id(each.grad) for each in model.parameters()],
        [each.training for each in model.modules()],
        [dict(each._forward_hooks) for each in model.modules()],
        [dict(each._forward_hooks_with_kwargs) for each in model.modules()],
        model.calls, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(),
    ]  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_on_the_model(fails: bool) -> None:
    model, x, seen = Fragile(), torch.randn(3, 5, 4), []
    model.layer.eval()
    model.layer.register_forward_hook(lambda *_: seen.append(1))
    tokens = tokens_of(model, x)
    torch.rand(3)
    if fails:
        model.allowed = model.calls
    before, values, count = everything(model), x.clone(), len(seen)
    if fails:
        with pytest.raises(torchfmri.InspectionError, match="no more"):
            tokens.verify()
    else:
        tokens.verify()
    assert same(everything(model), before)
    assert torch.equal(x, values)
    assert len(seen) == count


def test_arguments_are_let_go_with_the_gradients() -> None:
    x = torch.randn(2, 3, 4)
    tokens, kept = tokens_of(nn.Linear(4, 4), x), weakref.ref(x)
    tokens.verify()
    del x, tokens
    gc.collect()
    assert kept() is None


# -- where it cannot run -------------------------------------------------------------------------


def test_without_a_pass_there_is_nothing_to_verify() -> None:
    model = nn.Linear(4, 4)
    with torchfmri.token_gradients(model) as tokens:
        with torch.no_grad():
            model(torch.randn(2, 3, 4))
        with pytest.raises(torchfmri.InspectionError, match="after the `with` block"):
            tokens.verify()
    with pytest.raises(torchfmri.InspectionError, match="No pass was made"):
        tokens.verify()


def test_a_pass_that_cannot_be_reproduced_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tokens = tokens_of(model, torch.randn(2, 3, 4))
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(torchfmri.InspectionError, match="'2' read something else"):
        tokens.verify()


def test_the_meta_device_has_nothing_to_compare() -> None:
    model = nn.Linear(4, 4, device="meta")
    tokens = tokens_of(model, torch.randn(2, 3, 4, device="meta"))
    with pytest.raises(torchfmri.InspectionError, match="meta"):
        tokens.verify()


def test_a_number_of_tokens_is_asked_for() -> None:
    with pytest.raises(torchfmri.InspectionError, match="samples=0"):
        tokens_of(nn.Linear(4, 4), torch.randn(2, 3, 4)).verify(samples=0)


def test_the_last_of_several_passes_is_verified() -> None:
    model = nn.Linear(4, 4)
    with torchfmri.token_gradients(model) as tokens:
        model(torch.randn(7, 2, 4)).square().mean().backward()
        model(torch.randn(1, 3, 4)).square().mean().backward()
    found = tokens.verify(samples=10)
    assert {row.token for row in found} == {(0, 0), (0, 1), (0, 2)}
    assert {row.verdict for row in found} == {"local"}


class Recurrence(nn.Module):
    """A layer before or after the step of a recurrence."""

    def __init__(self, is_after: bool) -> None:
        super().__init__()
        self.layer, self.is_after = nn.Linear(3, 3), is_after

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 3)
        for each in x.unbind(1):
            h = self.layer(h + each) if self.is_after else self.layer(h).tanh() + each
        return h


@pytest.mark.parametrize("is_after", [False, True])
def test_uses_at_the_wrong_steps_are_refuted(
    is_after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 4, 3)
    assert not tokens_of(Recurrence(is_after), x).verify().refuted

    def taken_in(self: Recurrences) -> None:
        """Place all uses at the next step, whatever the end of the recurrence says."""
        for use in (each for uses in self.uses.values() for each in uses):
            use.place = use.own if use.shift is None else use.own + use.shift[:, None]

    monkeypatch.setattr(Recurrences, "place", taken_in)
    found = tokens_of(Recurrence(is_after), x).verify()
    assert {row.verdict for row in found} == ({"refuted"} if is_after else {"mixed"})
