"""Token gradients on real architectures: nothing is missing, and every token has what is its own.

That the tokens' sum is `.grad` says nothing about which token got what, so each number is also
compared with brute force (`transformer_copies.py`): a copy of every parameter for every token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, BATCH, LENGTH, Batch, padded_mask, tokens
from torch import Tensor, nn
from transformer_copies import Tokens, no_float32, token_gradients_by_copies

import torchfmri
from torchfmri._tokens.calls.gradients import TokenGradients
from torchfmri.exceptions import InspectionError

# The fast tier keeps half of the cases of each test; the slow tier runs the others.
pytestmark = pytest.mark.one_in(2)

SEED = 11
CASES = [(each.name, kind) for each in ARCHITECTURES.values() for kind in each.attention or (None,)]
# The scale of CLIP's logits meets pairs of texts and images, and no token.
WITHOUT_TOKENS = {"logit_scale"}
EXPERTS = ("qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower on several threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- running ---------------------------------------------------------------------------------


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return {
        key: each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each
        for key, each in batch.items()
    }


def build(
    name: str, attention: str | None, dtype: torch.dtype = torch.float64, **changes: Any
) -> nn.Module:
    changes = {"experts": "eager", **changes}
    return ARCHITECTURES[name].build(attention, **changes).to(dtype)


def last_attention(name: str) -> str | None:
    return (ARCHITECTURES[name].attention or (None,))[-1]


def loss_of(model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        torch.manual_seed(SEED)
        return model(**batch).loss

    return loss


def measured(model: nn.Module, batch: Batch, **options: Any) -> TokenGradients:
    """The token gradients of one step of the model; `.grad` holds that step alone."""
    model.zero_grad(set_to_none=True)
    with torchfmri.token_gradients(model, "*", **options) as found:
        loss_of(model, batch)().backward()
    return found


def assert_complete(found: TokenGradients, model: nn.Module, tolerance: float) -> None:
    """A row for every parameter with a gradient; all that have tokens add up to it."""
    received = {name for name, each in model.named_parameters() if each.grad is not None}
    coverage = found.coverage()
    assert {row.name for row in coverage} == received
    assert {row.name for row in coverage.missing} == received & WITHOUT_TOKENS
    for row in coverage:
        if row.name not in WITHOUT_TOKENS:
            assert row.residual is not None, row
            assert row.residual < tolerance, row


# -- coverage --------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["factors", "norms"])
@pytest.mark.parametrize(
    ("name", "attention", "dtype"),
    [
        *((name, attention, torch.float64) for name, attention in CASES),
        *((name, last_attention(name), torch.float32) for name in ARCHITECTURES),
    ],
    ids=str,
)
@pytest.mark.one_in(3)
def test_every_parameter_is_covered(
    name: str, attention: str | None, dtype: torch.dtype, keep: str
) -> None:
    """In float64 with dropout, and in float32 in eval mode."""
    training, tolerance = (True, 1e-9) if dtype == torch.float64 else (False, 1e-4)
    model = build(name, attention, dtype).train(training)
    with no_float32() if dtype == torch.float64 else contextlib.nullcontext():
        found = measured(model, cast(ARCHITECTURES[name].batch(), dtype), keep=keep)
        assert_complete(found, model, tolerance)


@pytest.mark.parametrize("keep", ["factors", "norms"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", EXPERTS)
def test_every_implementation_of_experts_is_covered(name: str, experts: str, keep: str) -> None:
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        model = build(name, last_attention(name), dtype, experts=experts)
        found = measured(model, ARCHITECTURES[name].batch(), keep=keep)
        assert_complete(found, model, tolerance)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma"])
def test_tied_and_untied_heads_are_covered(name: str, tied: bool) -> None:
    model = build(name, "sdpa", tie_word_embeddings=tied)
    for keep in ("factors", "norms"):
        with no_float32():
            found = measured(model, ARCHITECTURES[name].batch(), keep=keep)
            assert_complete(found, model, 1e-9)
        head, embedding = _head_and_embedding(model)
        assert (head == embedding) is tied
        assert ("linear" in found.coverage()[embedding].rule) is tied


def _head_and_embedding(model: nn.Module) -> tuple[str, str]:
    """Names of the weights of the head and of the embedding, the same where they are tied."""
    names = {id(each): name for name, each in model.named_parameters()}
    return (
        names[id(model.get_output_embeddings().weight)],
        names[id(model.get_input_embeddings().weight)],
    )


# -- every token has what is its own ---------------------------------------------------------


def stack_of(layer: str) -> str:
    """Encoder or decoder in T5, BART and Whisper: cross-attention reads the encoder's tokens."""
    parts = layer.split(".")
    if {"EncDecAttention", "encoder_attn"} & {*parts}:
        return "encoder" if parts[-1] in ("k", "v", "k_proj", "v_proj") else "decoder"
    return "encoder" if "encoder" in parts else "decoder"


def truth_of(name: str, model: nn.Module, batch: Batch) -> Tokens:
    rows = next(len(each) for each in batch.values() if isinstance(each, Tensor))
    stacks = {"stack_of": stack_of} if name in ("t5", "whisper", "bart") else {}
    found, whole = token_gradients_by_copies(model, loss_of(model, batch), rows, **stacks)
    assert {*whole} - {*found} <= WITHOUT_TOKENS
    return found


def without_padding(each: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None or each.shape[:2] != mask.shape:
        return each
    return each * mask.to(each.dtype).view(*mask.shape, *[1] * (each.ndim - 2))


def axis_of(stack: str, each: Tensor) -> str:
    return f"{stack} {each.shape[0]} x {each.shape[1]}".strip()


# Heads that read one row of each sample: that of the class token, or of the last word.
OF_ONE_TOKEN = ("classifier.weight", "classifier.bias", "text_projection.weight",
                "visual_projection.weight", "vision_model.post_layernorm.weight",
                "vision_model.post_layernorm.bias")  # fmt: skip


def assert_tokens(
    found: TokenGradients,
    truth: Tokens,
    mask: Tensor | None,
    tolerance: float,
    dense: bool = True,
    decoder_mask: Tensor | None = None,
) -> None:
    """Every token's gradient of every parameter, relative to the largest of that parameter."""
    for name, stacks in truth.items():
        axes = {axis_of(stack, each): each for stack, each in stacks.items()}
        tokens = found.coverage()[name].tokens
        named = {axis.partition(" of ")[0]: axis for axis in tokens}
        if name in OF_ONE_TOKEN:  # the copies are of samples: here each is at its class token
            ((axis, whole),), (each,) = named.items(), axes.values()
            norms = found.on(whole)[name].norm()
            blank = each.new_zeros(*norms.shape, *each.shape[2:])
            position = norms.sum(0).argmax()[None]
            axes = {axis: blank.index_copy(1, position, each)}
        assert {*named} == {*axes}, name
        for axis, each in axes.items():
            its_mask = decoder_mask if axis.startswith("decoder") else mask
            expected = without_padding(each.double(), its_mask)
            norms = expected.flatten(2).norm(dim=2)
            one = found.on(named[axis])[name]
            scale = max(float(norms.max()), 1e-15 / tolerance)  # all zero but for rounding
            apart = float((one.norm() - norms).abs().max()) / scale
            assert apart < tolerance, (name, axis, apart, one.rule)
            if dense:
                apart = float((one.materialise() - expected).flatten(2).norm(dim=2).max()) / scale
                assert apart < tolerance, (name, axis, apart, one.rule)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.one_in(4)
def test_each_token_equals_a_copy_of_its_own(name: str) -> None:
    """In float64, dropout included; both modes; and again in float32, by the same rules."""
    with no_float32():
        model = build(name, last_attention(name))
        batch = cast(ARCHITECTURES[name].batch(), torch.float64)
        mask = batch.get("attention_mask")
        truth = truth_of(name, model, batch)
        precise = measured(model, batch)
        assert_tokens(precise, truth, mask, 1e-12)
        assert_tokens(measured(model, batch, keep="norms"), truth, mask, 1e-12, dense=False)
    model = build(name, last_attention(name), torch.float32)
    batch = cast(ARCHITECTURES[name].batch(), torch.float32)
    single = measured(model, batch)
    assert_complete(single, model, 1e-4)
    assert_tokens(single, truth, mask, 1e-4)
    assert {row.name: row.rule for row in single.coverage()} == {
        row.name: row.rule for row in precise.coverage()
    }


@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", EXPERTS)
def test_tokens_of_other_experts_implementations(name: str, experts: str) -> None:
    """The same numbers as one expert after the other, in the kernels that models really use."""
    batch = ARCHITECTURES[name].batch()
    with no_float32():
        truth = truth_of(name, build(name, last_attention(name)), batch)
    model = build(name, last_attention(name), torch.float32, experts=experts)
    fused = {name: each for name, each in truth.items() if "experts" in name or "gate.w" in name}
    for keep in ("factors", "norms"):
        found = measured(model, batch, keep=keep)
        assert_tokens(found, fused, batch["attention_mask"], 1e-4, dense=keep == "factors")
        rules = {found.coverage()[each].rule.split()[0] for each in fused if ".experts." in each}
        assert rules <= {"re-run", "linear"}  # "linear": the shared experts of DeepSeek


def test_a_token_in_another_place_is_seen() -> None:
    """The comparison can fail: two tokens exchanged leave the sum as it is, and are found."""
    with no_float32():
        model = build("llama", "sdpa")
        batch = ARCHITECTURES["llama"].batch()
        truth = truth_of("llama", model, batch)
        found = measured(model, batch)
    name = "model.layers.0.mlp.up_proj.weight"
    swapped = truth[name][""].clone()
    swapped[0, [2, 3]] = swapped[0, [3, 2]]
    assert float((swapped.sum((0, 1)) - truth[name][""].sum((0, 1))).norm()) < 1e-12
    with pytest.raises(AssertionError, match="up_proj"):
        assert_tokens(found, {name: {"": swapped}}, batch["attention_mask"], 1e-2)


# -- sizes that can be mistaken for each other -----------------------------------------------

CAUSAL = ("llama", "qwen3", "gemma3", "gpt2", "mixtral", "mamba", "deepseek-v3", "gpt-oss")


def causal_batch(b: int, s: int, seed: int = 5) -> Batch:
    ids = tokens(length=s, seed=seed, batch=b)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("b", "s"),
    [(4, 4), (2, 2), (1, 16), (3, 5)],
    ids=["heads-and-batch", "kv-heads-and-experts-per-token", "hidden", "odd"],
)
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.one_in(4)
def test_lengths_that_equal_another_size(name: str, b: int, s: int) -> None:
    """As many positions as heads, as batch elements, as experts per token, as units."""
    with no_float32():
        model = build(name, last_attention(name))
        batch = causal_batch(b, s)
        truth = truth_of(name, model, batch)
        found = measured(model, batch)
        refused = {row.name: row.note for row in found.coverage().missing}
        if (name, s) == ("mamba", 2):  # its loop over two positions does not tell which came first
            assert any("recurrence" in each for each in refused.values())
            assert all(refused.values())  # what follows the loop has reasons too
            truth = {each: truth[each] for each in truth if each not in refused}
        else:
            assert not refused
        assert_tokens(found, truth, None, 1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mixtral", "bert"])
def test_padded_positions_are_left_out(name: str, side: str) -> None:
    """Also where a loss on every position gives them a gradient of their own."""
    ids, mask = tokens(), padded_mask(side)
    batch: Batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    with no_float32():
        model = build(name, last_attention(name))
        truth = truth_of(name, model, batch)
        for keep in ("factors", "norms"):
            found = measured(model, batch, keep=keep)
            assert_complete(found, model, 1e-9)
            assert_tokens(found, truth, mask, 1e-12, dense=keep == "factors")
            together = found.norm()
    assert bool((together[mask == 0] == 0).all())
    # Behind the last position a causal model predicts nothing.
    assert bool((together[:, :-1][mask[:, :-1] == 1] > 0).all())


def test_the_norm_over_all_parameters() -> None:
    with no_float32():
        model = build("qwen3", "sdpa")
        batch = ARCHITECTURES["qwen3"].batch()
        truth = truth_of("qwen3", model, batch)
        found = measured(model, batch)
        together = found.norm()
    mask = batch["attention_mask"]
    squares = [
        without_padding(each[""], mask).flatten(2).square().sum(2) for each in truth.values()
    ]
    expected = torch.stack(squares).sum(0).sqrt()
    assert torch.allclose(together, expected, rtol=1e-12, atol=1e-15)


# -- encoder and decoder ---------------------------------------------------------------------


def bart() -> nn.Module:
    import transformers

    config = transformers.BartConfig(
        vocab_size=67, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24,
        max_position_embeddings=32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.BartForConditionalGeneration(config).double()


@contextlib.contextmanager
def encoder_decoder(name: str, source: int, target: int) -> Iterator[tuple[nn.Module, Batch]]:
    with no_float32():
        model = bart() if name == "bart" else build("t5", "sdpa")
        yield (
            model,
            {"input_ids": tokens(length=source), "labels": tokens(length=target, seed=8)},
        )


@pytest.mark.parametrize(("source", "target"), [(9, 5), (5, 5), (4, 9)])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_and_decoder_tokens_are_kept_apart(name: str, source: int, target: int) -> None:
    """Cross-attention's keys and values are the encoder's tokens, also where lengths are equal."""
    with encoder_decoder(name, source, target) as (model, batch):
        truth = truth_of(name, model, batch)
        found = measured(model, batch)
        assert_complete(found, model, 1e-9)
        assert_tokens(found, truth, None, 1e-12)
    encoder, decoder = f"encoder {BATCH} x {source}", f"decoder {BATCH} x {target}"
    # T5's relative positions are one table for the batch, with a position for each query.
    queries = {f"encoder 1 x {source}", f"decoder 1 x {target}"} if name == "t5" else set()
    assert {*found.axes} == {encoder, decoder} | queries
    with pytest.raises(InspectionError) as raised:
        found.norm()
    assert encoder in str(raised.value)
    assert decoder in str(raised.value)
    for axis, size in ((encoder, source), (decoder, target)):
        norms = found.on(axis).norm()
        assert norms.shape == (BATCH, size)
        squares = sum(
            each.flatten(2).square().sum(2)
            for stacks in truth.values()
            for stack, each in stacks.items()
            if axis_of(stack, each) == axis
        )
        assert torch.allclose(norms, squares.sqrt(), rtol=1e-12)
    shared = next(key for key, stacks in truth.items() if len(stacks) == 2)
    with pytest.raises(InspectionError, match="axes"):
        found[shared]


def test_the_encoder_s_padding_is_not_the_decoder_s() -> None:
    """Both have the same length, so that a mask could be taken for the other."""
    with encoder_decoder("t5", LENGTH, LENGTH) as (model, batch):
        batch = {**batch, "attention_mask": padded_mask("right")}
        truth = truth_of("t5", model, batch)
        found = measured(model, batch)
        assert_tokens(found, truth, batch["attention_mask"], 1e-12)
    padded = batch["attention_mask"] == 0
    assert bool((found.on(f"encoder {BATCH} x {LENGTH}").norm()[padded] == 0).all())
    assert bool((found.on(f"decoder {BATCH} x {LENGTH}").norm()[padded] > 0).all())


def test_both_masks_of_equal_length() -> None:
    """Keys and values of cross-attention are in the decoder, and their tokens the encoder's."""
    target_mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    target_mask[0, -4:] = 0
    with encoder_decoder("t5", LENGTH, LENGTH) as (model, batch):
        masks = {"attention_mask": padded_mask("right"), "decoder_attention_mask": target_mask}
        batch = {**batch, **masks}
        truth = truth_of("t5", model, batch)
        for keep in ("factors", "norms"):
            found = measured(model, batch, keep=keep)
            dense = keep == "factors"
            assert_tokens(found, truth, masks["attention_mask"], 1e-12, dense, target_mask)
