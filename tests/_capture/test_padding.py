"""Padding is not data: statistics are those of the tokens alone, and say how many there were."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchfmri
from torchfmri import Inspector
from torchfmri._capture.padding import Padding, TokenMask, masked_modules
from torchfmri.statistics import calculate_statistics

RIGHT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
LEFT = RIGHT.flip(1)
MASKS = {"right": RIGHT, "left": LEFT, "boolean": RIGHT.bool(), "float": LEFT.float()}
KEPT = 7


class Tokens(nn.Module):
    """A model with layers of every shape that tokens come in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.layer = nn.Linear(6, 6)
        self.flat = nn.Linear(6, 5)
        self.heads = nn.Identity()
        self.by_head = nn.Identity()
        self.pooled = nn.Linear(6, 2)
        self.choice = Choice()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = self.layer(self.embedding(input_ids))
        b, s, w = h.shape
        self.flat(h.reshape(b * s, w))
        self.heads(h.unflatten(-1, (2, 3)))
        self.by_head(h.unflatten(-1, (2, 3)).transpose(1, 2))
        self.choice(h)
        kept = torch.ones(b, s) if attention_mask is None else attention_mask
        weights = kept.to(h.dtype).unsqueeze(-1)
        return self.pooled((h * weights).sum(1) / weights.sum(1))


class Choice(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.argmax(-1)


def tokens() -> Tensor:
    return torch.randint(0, 10, (3, 4), generator=torch.Generator().manual_seed(0))


def tokens_model() -> Tokens:
    torch.manual_seed(0)
    return Tokens().double()


def of_kept(value: Tensor, mask: Tensor) -> Tensor:
    """The rows of tokens, picked one by one."""
    rows = [value[b, s] for b in range(3) for s in range(4) if mask[b, s]]
    return torch.stack(rows)


def assert_same_values(statistics: Any, values: Tensor) -> None:
    """Statistics against plain torch on the values that should have been counted."""
    values = values.double().flatten()
    assert statistics.count == values.numel()
    assert statistics.mean == pytest.approx(float(values.mean()), rel=1e-9)
    assert statistics.std == pytest.approx(float(values.std(correction=0)), rel=1e-9)
    assert statistics.min == pytest.approx(float(values.min()), rel=1e-12)
    assert statistics.max == pytest.approx(float(values.max()), rel=1e-12)
    assert statistics.l2 == pytest.approx(float(values.norm()), rel=1e-9)
    assert statistics.zero == int((values == 0).sum())


SHAPED = {
    "embedding": lambda value: value,
    "layer": lambda value: value,
    "flat": lambda value: value.unflatten(0, (3, 4)),
    "heads": lambda value: value,
    "by_head": lambda value: value.transpose(1, 2),
    "choice": lambda value: value,
}


@pytest.mark.parametrize("keep", ["statistics", "tensors"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("positional", [True, False], ids=["positional", "keyword"])
def test_padded_positions_are_left_out(mask: Tensor, keep: str, positional: bool) -> None:
    model = tokens_model()
    data = (tokens(), mask) if positional else {"input_ids": tokens(), "attention_mask": mask}
    inspector = Inspector(model, keep="tensors")
    inspector.watch("*", ["activations", "gradients"])
    values = inspector.run_inspection(data, loss="sum")
    inspector.run_inspection(data, loss="sum", keep=keep)
    for layer, shaped in SHAPED.items():
        found = inspector.get_statistics(layer)
        assert_same_values(found, of_kept(shaped(values[layer].activations), mask))
        assert found.positions == (KEPT, 12), layer
    for layer in ("embedding", "layer"):
        found = inspector.get_statistics(layer, "gradients")
        assert_same_values(found, of_kept(values[layer].gradients, mask))
        assert found.positions == (KEPT, 12)


@pytest.mark.parametrize("mask", [RIGHT, LEFT], ids=["right", "left"])
def test_statistics_are_those_of_the_rows_run_by_themselves(mask: Tensor) -> None:
    model = tokens_model()
    inspector = Inspector(model)
    inspector.watch("layer")
    inspector.run_inspection({"input_ids": tokens(), "attention_mask": mask})
    padded = inspector.get_statistics("layer")
    parts = []
    for row, kept in zip(tokens(), mask.bool(), strict=True):
        inspector.run_inspection(row[kept].unsqueeze(0))
        parts.append(inspector.get_statistics("layer"))
    alone = parts[0] + parts[1] + parts[2]
    for name in ("count", "zero", "nan"):
        assert padded[name] == alone[name]
    for name in ("mean", "std", "min", "max", "l2"):
        assert padded[name] == pytest.approx(alone[name], rel=1e-6)


def test_what_is_in_the_padding_makes_no_difference() -> None:
    """NaN in padded positions is not a finding."""
    model = tokens_model()
    inspector = Inspector(model)
    inspector.watch("layer")
    with torch.no_grad():
        model.embedding.weight[9] = float("nan")
    ids = tokens().masked_fill(RIGHT == 0, 9).masked_fill((RIGHT == 1) & (tokens() == 9), 1)
    inspector.run_inspection({"input_ids": ids, "attention_mask": RIGHT})
    assert inspector.get_statistics("layer").nan == 0
    inspector.run_inspection(ids)
    assert inspector.get_statistics("layer").nan > 0


def test_layer_without_tokens_is_counted_whole() -> None:
    model = tokens_model()
    inspector = Inspector(model)
    inspector.watch("pooled")
    inspector.run_inspection({"input_ids": tokens(), "attention_mask": RIGHT})
    found = inspector.get_statistics("pooled")
    assert found.count == 6
    assert found.positions is None


def test_all_tokens_kept() -> None:
    model = tokens_model()
    inspector = Inspector(model)
    inspector.watch("layer")
    inspector.run_inspection({"input_ids": tokens(), "attention_mask": torch.ones(3, 4)})
    found = inspector.get_statistics("layer")
    assert found.count == 72
    assert found.positions in (None, (12, 12))


def test_all_positions_padded() -> None:
    """Nothing to count is not an error."""
    model = tokens_model()
    inspector = Inspector(model)
    inspector.watch("layer", per="channel")
    inspector.run_inspection({"input_ids": tokens(), "attention_mask": torch.zeros(3, 4)})
    found = inspector.get_statistics("layer")
    assert found.count == 0
    assert found.positions == (0, 12)
    assert math.isnan(found.mean)


def test_no_mask() -> None:
    inspector = Inspector(tokens_model())
    inspector.watch("layer")
    inspector.run_inspection(tokens())
    assert inspector.get_statistics("layer").positions is None
    assert inspector.get_statistics("layer").count == 72


def test_per_channel() -> None:
    model = tokens_model()
    inspector = Inspector(model, keep="tensors")
    inspector.watch("layer", per="channel")
    data = {"input_ids": tokens(), "attention_mask": LEFT}
    values = of_kept(inspector.run_inspection(data)["layer"].activations, LEFT)
    for keep in ("tensors", "statistics"):
        inspector.run_inspection(data, keep=keep)
        found = inspector.get_statistics("layer", per="channel")
        torch.testing.assert_close(torch.as_tensor(found.mean), values.mean(0), check_dtype=False)


# -- masks inside masks --------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, h: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.layer(h)


class Outer(nn.Module):
    """Hands its inner module what `pass_on` makes of the mask."""

    def __init__(self, pass_on: Any) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(6, 6), Inner(), nn.Linear(6, 6)
        self.pass_on = pass_on

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.before(x)
        given = self.pass_on(attention_mask)
        h = self.inner(h) if given is self else self.inner(h, **given)
        return self.after(h)


@pytest.mark.parametrize(
    ("pass_on", "expected"),
    [
        (lambda mask: {"attention_mask": mask}, (KEPT, 12)),
        (lambda mask: {}, (KEPT, 12)),
        (lambda mask: {"attention_mask": mask[:, None, None, :].float()}, (KEPT, 12)),
        (lambda mask: {"attention_mask": None}, None),
        (lambda mask: {"attention_mask": torch.ones_like(mask)}, (12, 12)),
        (lambda mask: {"attention_mask": "text"}, (KEPT, 12)),
    ],
    ids=["same", "not_given", "four_dimensions", "none", "another", "nonsense"],
)
def test_inner_module_with_a_mask_of_its_own(pass_on: Any, expected: Any) -> None:
    inspector = Inspector(Outer(pass_on))
    inspector.watch(["before", "inner.layer", "after"])
    inspector.run_inspection((torch.randn(3, 4, 6), RIGHT))
    assert inspector.get_statistics("before").positions == (KEPT, 12)
    found = inspector.get_statistics("inner.layer").positions
    assert found == expected or (expected == (12, 12) and found is None)
    assert inspector.get_statistics("after").positions == (KEPT, 12)


def test_mask_ends_with_the_call_that_was_handed_it() -> None:
    model = nn.ModuleDict({"outer": Outer(lambda mask: {}), "layer": nn.Linear(6, 6)})
    inspector = Inspector(model)
    inspector.watch("*", exclude="outer")
    x = torch.randn(3, 4, 6)
    with inspector.recording():
        model["layer"](x)
        model["outer"](x, RIGHT)
        model["layer"](x)
    record = inspector.inspection["layer"]
    assert [call.statistics().positions for call in record.calls] == [None, None]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_mask_ends_with_a_call_that_failed(error: Any) -> None:
    """Also with an interrupt, which skips forward hooks, when the user goes on recording."""

    class Fails(Outer):
        fail = True

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            if self.fail:
                raise error("planned")
            return self.inner(x)

    model = Fails(lambda mask: {})
    inspector = Inspector(model)
    inspector.watch("inner.layer")
    x = torch.randn(3, 4, 6)
    with inspector.recording() as inspection:
        with pytest.raises(error, match="planned"):
            model(x, RIGHT)
        model.fail = False
        model(x)
    assert inspection["inner.layer"].calls[0].statistics().positions is None


def test_two_threads_have_their_own_masks() -> None:
    from test_taps import in_threads

    model = Outer(lambda mask: {})
    inspector = Inspector(model)
    inspector.watch("inner.layer")
    x = torch.randn(3, 4, 6)
    masks = [RIGHT, torch.ones(3, 4)]

    def work(mask: Tensor) -> Any:
        return lambda: [model(x, mask) for _ in range(10)]

    with inspector.recording() as inspection:
        in_threads(*map(work, masks))
    counted = [call.statistics().count for call in inspection["inner.layer"].calls]
    assert sorted(counted) == [KEPT * 6] * 10 + [72] * 10


# -- aligning ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "counted"),
    [
        ((3, 4, 5), True),
        ((3, 4, 2, 5), True),
        ((3, 2, 4, 5), True),
        ((12, 5), True),
        ((3, 5), False),
        ((3, 5, 4), False),
        ((4, 3, 5), False),
        ((3,), False),
        ((), False),
        ((1, 4, 5), False),
        ((3, 4), False),
    ],
    ids=str,
)
def test_token_axis(shape: tuple[int, ...], counted: bool) -> None:
    tensor = torch.randn(shape)
    aligned = TokenMask(RIGHT.bool()).align(tensor)
    assert (aligned is not None) == counted
    if aligned is not None:
        values, kept = aligned
        assert int(kept.sum()) == KEPT
        assert calculate_statistics(values, mask=kept).positions == (KEPT, 12)


def test_whole_numbers_of_two_dimensions_are_tokens() -> None:
    assert TokenMask(RIGHT.bool()).align(torch.ones(3, 4, dtype=torch.long)) is not None


def test_one_position_is_not_a_batch() -> None:
    """(b * 1, w) is (b, w): with one position nothing says that rows are tokens."""
    assert TokenMask(torch.tensor([[True], [False]])).align(torch.ones(2, 5)) is None


def test_nested_tensors_have_no_padding() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    assert TokenMask(RIGHT.bool()).align(nested) is None


def test_padding_hooks_go() -> None:
    model = Outer(lambda mask: {})
    padding = Padding(masked_modules(model.modules()))
    padding.attach()
    assert model._forward_pre_hooks
    assert model.inner._forward_hooks
    assert not model.before._forward_hooks
    padding.detach()
    padding.detach()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_a_forward_that_is_replaced_while_hooks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is where it was when the block began."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.layer(x)

    model, first, mask = Masked(), Masked.forward, torch.tensor([[1, 1, 0]])
    with torchfmri.token_gradients(model, "layer.weight") as tokens:
        monkeypatch.setattr(Masked, "forward", lambda *call: first(*call))
        model(torch.ones(1, 3, 4), mask).sum().backward()
    assert (tokens["layer.weight"].norm() > 0).tolist() == [[True, True, False]]


# -- transformers --------------------------------------------------------------------------------


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("side", ["left", "right"])
def test_language_model(side: str) -> None:
    """Statistics of a padded batch are those of its rows run without padding."""
    model = llama()
    mask = LEFT if side == "left" else RIGHT
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inspector = Inspector(model)
    inspector.watch(["model.layers.*.mlp.*", "*_proj", "model.norm"])
    data = {"input_ids": tokens(), "attention_mask": mask, "position_ids": positions}
    padded = inspector.run_inspection(data)
    alone: dict[str, Any] = {}
    for row, kept in zip(tokens(), mask.bool(), strict=True):
        inspection = inspector.run_inspection({"input_ids": row[kept].unsqueeze(0)})
        for layer in inspection:
            part = inspection[layer].statistics()
            alone[layer] = alone[layer] + part if layer in alone else part
    for layer in padded:
        ours = padded[layer].statistics()
        assert ours.positions == (KEPT, 12), layer
        assert ours.count == alone[layer].count
        for name in ("mean", "std", "min", "max", "l2"):
            assert ours[name] == pytest.approx(alone[layer][name], rel=1e-5, abs=1e-9), layer


def test_generation_with_a_cache_and_left_padding() -> None:
    model = llama()
    inspector = Inspector(model)
    inspector.watch("model.norm")
    with inspector.recording() as inspection:
        model.generate(
            tokens(), attention_mask=LEFT, max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    calls = inspection["model.norm"].calls
    assert len(calls) == 4
    assert calls[0].statistics().positions == (KEPT, 12)
    assert calls[0].statistics().count == KEPT * 16
    for call in calls[1:]:  # one new token per row, none of it padding
        assert call.statistics().count == 3 * 16
        assert call.statistics().positions in (None, (3, 3))


def test_encoder_and_decoder_have_masks_of_their_own() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    inspector = Inspector(model, keep="tensors")
    inspector.watch(["encoder.final_layer_norm", "decoder.final_layer_norm"])
    decoder_mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])
    inspector.run_inspection(
        {
            "input_ids": tokens(),
            "attention_mask": RIGHT,
            "decoder_input_ids": tokens()[:, :3],
            "decoder_attention_mask": decoder_mask,
        }
    )
    encoder, decoder = inspector.inspection.values()
    assert encoder.statistics().positions == (KEPT, 12)
    assert_same_values(encoder.statistics(), of_kept(encoder.activations, RIGHT))
    assert decoder.statistics().positions == (8, 9)
    assert decoder.statistics().count == 8 * 16
    inspector.run_inspection(
        {"input_ids": tokens(), "attention_mask": RIGHT, "decoder_input_ids": tokens()}
    )
    encoder, decoder = inspector.inspection.values()
    assert encoder.statistics().positions == (KEPT, 12)
    assert decoder.statistics().count == 12 * 16, "as long as the encoder's, but not padded"


def test_an_interrupt_inside_of_a_module_with_a_mask_of_its_own() -> None:
    """The mask of the batch before does not hold for the next one."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.interrupted = nn.Linear(4, 4), True

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.layer(x)
            if self.interrupted:
                raise KeyboardInterrupt
            return x * attention_mask[..., None]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner = nn.Embedding(9, 4), Inner()

        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.inner(self.embed(ids), attention_mask=(ids != 0).long())

    model = Outer()
    with torchfmri.token_gradients(model) as tokens:
        with pytest.raises(KeyboardInterrupt):
            model(torch.tensor([[1, 2, 0, 0]]))
        model.inner.interrupted = False
        model(torch.tensor([[1, 2, 3, 4]])).square().sum().backward()
    assert bool((tokens["embed.weight"].norm()[-1] > 0).all())


class Masked(nn.Module):
    """Takes a mask, as the layers of a language model do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.layer(hidden_states)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([1.0, 1.0, 0.0], [True, True, False]),
        ([0.0, 0.0, -1e9], [True, True, False]),
        ([0.0, 1e4, -1e4], [True, True, False]),  # Longformer: above 0 is seen by all
    ],
)
def test_masks_of_floats(values: list[float], kept: list[bool]) -> None:
    model = Masked()
    with torchfmri.token_gradients(model) as tokens:
        model(torch.randn(2, 3, 4), attention_mask=torch.tensor([values] * 2)).sum().backward()
    assert (tokens["layer.weight"].norm() > 0).tolist() == [kept] * 2


def test_zeros_that_a_model_hands_to_its_layers_hide_nothing() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Masked()

        def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            added = torch.zeros(hidden_states.shape[:2])
            return self.inner(hidden_states, attention_mask=added)

    model = Around()
    with torchfmri.token_gradients(model) as tokens:
        model(torch.randn(2, 3, 4)).sum().backward()
    assert bool((tokens["inner.layer.weight"].norm() > 0).all())
