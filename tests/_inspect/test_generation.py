"""`generate()` under watch: the same tokens, every step seen, padding left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, BATCH, LENGTH, VOCABULARY, padded_mask, tokens
from torch import Tensor, nn

from torchfmri import Inspection, Inspector

pytestmark = pytest.mark.usefixtures("one_thread")

WHAT = (
    *("inputs", "activations", "gradients", "input_gradients"),
    *("parameters", "parameter_gradients"),
)
STEPS = 6
DECODERS = ("llama", "qwen3", "gpt2", "mamba")
MODELS = (*DECODERS, "t5")
MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 0},
}


def build(name: str) -> nn.Module:
    architecture = ARCHITECTURES[name]
    return architecture.build((architecture.attention or (None,))[-1]).eval()


def prompt(side: str | None) -> dict[str, Tensor]:
    """A batch of prompts, the last one shorter where padded."""
    if side is None:
        return {"input_ids": tokens(), "attention_mask": torch.ones(BATCH, LENGTH).long()}
    mask = padded_mask(side)
    return {"input_ids": tokens().masked_fill(mask == 0, 0), "attention_mask": mask}


def generate(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    torch.manual_seed(3)
    steps = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, **options}
    return model.generate(**inputs, **steps)


def hook_count(model: nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


# -- the same tokens -------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
@pytest.mark.parametrize("side", [None, "left"], ids=["whole", "padded"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(4)
def test_the_tokens_are_those_of_plain_generation(
    name: str, mode: str, side: str | None, keep: str
) -> None:
    model, inputs = build(name), prompt(side)
    plain = generate(model, inputs, **MODES[mode])
    random, hooks = torch.get_rng_state(), hook_count(model)
    inspector = Inspector(model)
    inspector.watch(["*", ""], WHAT)
    with inspector.recording(keep=keep) as inspection:
        watched = generate(model, inputs, **MODES[mode])
    assert torch.equal(watched, plain)
    assert torch.equal(torch.get_rng_state(), random)
    assert hook_count(model) == hooks
    assert torch.equal(generate(model, inputs, **MODES[mode]), plain)
    assert len(inspection[""].calls) == STEPS


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "do_sample": False},
        {"use_cache": False, "do_sample": False},
        {"prompt_lookup_num_tokens": 2, "do_sample": False},
        {"repetition_penalty": 1.5, "do_sample": False, "output_scores": True},
    ],
    ids=["beams", "no cache", "prompt lookup", "penalty"],
)
def test_other_ways_to_generate_give_the_same_tokens(options: dict[str, Any]) -> None:
    model = build("qwen3")
    batch = 1 if "prompt_lookup_num_tokens" in options else BATCH
    inputs = {key: each[:batch] for key, each in prompt(None).items()}
    plain = generate(model, inputs, **options)
    inspector = Inspector(model)
    inspector.watch("*", ["inputs", "activations"])
    with inspector.recording(keep="tensors") as inspection:
        watched = generate(model, inputs, **options)
    assert torch.equal(watched, plain)
    assert inspection["model.norm"].calls


def test_generation_in_inference_mode_is_seen() -> None:
    model, inputs = build("llama"), prompt("left")
    plain = generate(model, inputs)
    inspector = Inspector(model)
    inspector.watch("*", WHAT)
    with inspector.recording(keep="tensors") as inspection, torch.inference_mode():
        watched = generate(model, inputs)
    assert torch.equal(watched, plain)
    assert len(inspection["model.norm"].calls) == STEPS
    assert not any("could not be captured" in reason for reason in inspection.missing.values())


def test_a_hook_that_perturbs_gives_other_tokens() -> None:
    model, inputs = build("llama"), prompt("left")
    plain = generate(model, inputs)
    norm = model.get_submodule("model.norm")
    handle = norm.register_forward_hook(lambda _, __, output: output.flip(-1))
    assert not torch.equal(generate(model, inputs), plain)
    handle.remove()
    assert torch.equal(generate(model, inputs), plain)


# -- step by step ----------------------------------------------------------------------------


def record(name: str, side: str | None, **options: Any) -> tuple[nn.Module, Inspection, Tensor]:
    model = build(name)
    inspector = Inspector(model)
    inspector.watch(["*", ""], ["inputs", "activations"])
    with inspector.recording(keep="tensors") as inspection:
        sequence = generate(model, prompt(side), **options)
    return model, inspection, sequence


@pytest.mark.parametrize("name", DECODERS)
def test_every_step_is_one_call(name: str) -> None:
    model, inspection, sequence = record(name, "left")
    assert sequence.shape == (BATCH, LENGTH + STEPS)
    width = model.config.hidden_size
    block = {"gpt2": "transformer.h.1", "mamba": "backbone.layers.1"}.get(name, "model.layers.1")
    shapes = [call.activations[0].shape for call in inspection[block].calls]
    assert shapes == [(BATCH, LENGTH, width), *[(BATCH, 1, width)] * (STEPS - 1)]
    # The head reads the last position only; the last token is never fed.
    heads = inspection["lm_head"].calls
    assert [call.activations[0].shape for call in heads] == [(BATCH, 1, VOCABULARY)] * STEPS
    logits = torch.cat([call.activations[0] for call in heads], dim=1)
    logits[..., model.config.eos_token_id] = -torch.inf  # an end was not allowed
    assert torch.equal(logits.argmax(-1), sequence[:, LENGTH:])
    fed = torch.cat([call.inputs[0] for call in _embedding(inspection).calls], dim=1)
    assert torch.equal(fed, sequence[:, :-1])


def _embedding(inspection: Inspection) -> Any:
    return next(
        each
        for layer, each in inspection.items()
        if layer.endswith(("embed_tokens", "wte", ".embeddings")) and each.calls
    )


def test_an_encoder_is_called_once_and_its_decoder_at_every_step() -> None:
    model, inspection, sequence = record("t5", "right")
    width = model.config.d_model
    (encoder,) = inspection["encoder.block.1"].calls
    assert encoder.activations[0].shape == (BATCH, LENGTH, width)
    shapes = [call.activations[0].shape for call in inspection["decoder.block.1"].calls]
    assert shapes == [(BATCH, 1, width)] * STEPS
    keys = inspection["decoder.block.1.layer.1.EncDecAttention.k"].calls
    assert [call.activations[0].shape for call in keys] == [(BATCH, LENGTH, width)]
    fed = torch.cat([call.inputs[0] for call in inspection["decoder.embed_tokens"].calls], dim=1)
    assert torch.equal(fed, sequence[:, :-1])


def test_without_a_cache_every_step_sees_everything() -> None:
    _, inspection, _ = record("llama", None, use_cache=False)
    lengths = [call.activations[0].shape[1] for call in inspection["model.norm"].calls]
    assert lengths == [LENGTH + step for step in range(STEPS)]


@pytest.mark.parametrize("side", [None, "left"], ids=["whole", "padded"])
@pytest.mark.parametrize("name", DECODERS)
def test_the_steps_together_are_one_pass_over_the_sequence(name: str, side: str | None) -> None:
    model, steps, sequence = record(name, side)
    mask = torch.cat([prompt(side)["attention_mask"], torch.ones(BATCH, STEPS - 1).long()], dim=1)
    inputs = {"input_ids": sequence[:, :-1], "attention_mask": mask, "use_cache": False}
    if name != "mamba":
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    inspector = Inspector(model)
    inspector.watch("*")
    with torch.no_grad():
        whole = inspector.run_inspection(inputs, keep="tensors")
    compared = 0
    for layer, each in steps.items():
        if not layer or layer == "lm_head" or not each.calls:
            continue
        expected = whole[layer].activations
        if expected.shape[:2] != mask.shape:
            continue
        parts = torch.cat([call.activations[0] for call in each.calls], dim=1)
        kept = mask.bool()
        difference = float((parts[kept] - expected[kept]).abs().max())
        assert difference <= 3e-6, f"{layer}: off by {difference}"
        compared += 1
    assert compared >= 12
    head = torch.cat([call.activations[0] for call in steps["lm_head"].calls], dim=1)
    expected = whole["lm_head"].activations[:, LENGTH - 1 :]
    torch.testing.assert_close(head, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_pass_without_positions_is_told_apart(name: str) -> None:
    # The comparison above can fail: padding without mask and positions gives other values.
    model, steps, sequence = record(name, "left")
    inspector = Inspector(model)
    inspector.watch("lm_head")
    with torch.no_grad():
        whole = inspector.run_inspection(
            {"input_ids": sequence[:, :-1], "use_cache": False}, keep="tensors"
        )
    head = torch.cat([call.activations[0] for call in steps["lm_head"].calls], dim=1)
    difference = (head - whole["lm_head"].activations[:, LENGTH - 1 :]).abs().max()
    assert difference > 1e-4


# -- padding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_padded_positions_are_left_out_of_the_statistics(name: str) -> None:
    _, steps, _ = record(name, "left")
    kept = prompt("left")["attention_mask"].bool()
    compared = 0
    for layer, each in steps.items():
        first = each.calls[0].activations[0] if each.calls else None
        if first is None or first.shape[:2] != kept.shape:
            continue
        statistics = each.calls[0].statistics()
        values = first[kept].double()
        assert statistics.positions == (int(kept.sum()), kept.numel()), layer
        assert statistics.count == values.numel(), layer
        scale = float(values.abs().max())
        assert statistics.mean == pytest.approx(float(values.mean()), abs=1e-7 * scale), layer
        assert (statistics.min, statistics.max) == (float(values.min()), float(values.max())), layer
        everything = torch.cat([values, *(c.activations[0].double()[:, 0] for c in each.calls[1:])])
        merged = each.statistics("activations")
        assert merged.count == everything.numel(), layer
        assert merged.std == pytest.approx(float(everything.std(correction=0)), rel=1e-6), layer
        compared += 1
    assert compared >= 12


def test_padding_that_is_counted_would_be_seen() -> None:
    _, steps, _ = record("llama", "left")
    call = steps["model.layers.0"].calls[0]
    assert call.statistics().mean != pytest.approx(float(call.activations[0].mean()), rel=1e-6)


@pytest.mark.parametrize(
    "name",
    DECODERS[:-1],
)
def test_the_sum_over_steps_says_how_many_positions_were_counted(name: str) -> None:
    _, steps, _ = record(name, "left")
    norm = {"gpt2": "transformer.ln_f", "mamba": "backbone.norm_f"}.get(name, "model.norm")
    kept = int(prompt("left")["attention_mask"].sum())
    later = BATCH * (STEPS - 1)
    assert steps.statistics(norm).positions == (kept + later, BATCH * LENGTH + later)


def test_a_sum_with_steps_that_got_no_mask_claims_no_positions() -> None:
    # Mamba is handed the mask at the first step only: for the others nothing is known.
    _, steps, _ = record("mamba", "left")
    first, *later = [call.statistics() for call in steps["backbone.norm_f"].calls]
    kept = int(prompt("left")["attention_mask"].sum())
    assert first.positions == (kept, BATCH * LENGTH)
    assert all(step.positions is None for step in later)
    assert steps.statistics("backbone.norm_f").positions is None


def test_an_encoders_padding_is_left_out_and_its_decoder_has_none() -> None:
    _, steps, _ = record("t5", "right")
    kept = int(prompt("right")["attention_mask"].sum())
    assert steps.statistics("encoder.block.1").positions == (kept, BATCH * LENGTH)
    assert steps.statistics("encoder.block.1.layer.1.DenseReluDense.wo").positions == (
        kept,
        BATCH * LENGTH,
    )
    decoder = steps.statistics("decoder.block.1")
    assert decoder.count == BATCH * STEPS * 16


def test_keys_of_cross_attention_leave_out_the_encoders_padding() -> None:
    _, steps, _ = record("t5", "right")
    kept = int(prompt("right")["attention_mask"].sum())
    for part in "kv":
        layer = f"decoder.block.0.layer.1.EncDecAttention.{part}"
        assert steps.statistics(layer).positions == (kept, BATCH * LENGTH)


def test_gradients_that_were_asked_for_have_a_reason() -> None:
    model = build("llama")
    inspector = Inspector(model)
    inspector.watch("*", ["activations", "gradients", "parameter_gradients"])
    with inspector.recording(keep="tensors") as inspection:
        generate(model, prompt(None))
    assert "no_grad" in inspection.missing["model.norm"]
    assert inspection["model.norm"].calls[0].gradients == [None]
