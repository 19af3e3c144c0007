"""Patterns equal those of `output_attentions=True` with the eager implementation.

The oracle is transformers' own: a second model with the same weights that writes its attention
out. What is read must equal it under every implementation, and watching must change no bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import _DECODER, ARCHITECTURES, Architecture, _causal, padded_mask, tokens
from torch import Tensor, nn

import torchfmri
from torchfmri import InspectionError, Inspector, MemoryLimitError
from torchfmri._attention import AttentionReader, FusedAttention

_NEOX = {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
_ALIBI = {**_NEOX, "alibi": True}
_BLOOM = {"vocab_size": 67, "hidden_size": 16, "n_layer": 2, "n_head": 4}
_OPT = {**_NEOX, "ffn_dim": 24, "word_embed_proj_dim": 16}
MORE = (
    Architecture(
        "mistral", "MistralForCausalLM", "MistralConfig", {**_DECODER, "sliding_window": 4}, _causal
    ),
    Architecture("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", _NEOX, _causal),
    Architecture("phi", "PhiForCausalLM", "PhiConfig", _DECODER, _causal),
    Architecture("olmo", "OlmoForCausalLM", "OlmoConfig", _DECODER, _causal),
    Architecture("olmo2", "Olmo2ForCausalLM", "Olmo2Config", _DECODER, _causal),
    Architecture("falcon", "FalconForCausalLM", "FalconConfig", _NEOX, _causal),
    # With ALiBi the two implementations of transformers give other logits (0.008 apart here).
    Architecture("falcon-alibi", "FalconForCausalLM", "FalconConfig", _ALIBI, _causal, ("eager",)),
    Architecture("opt", "OPTForCausalLM", "OPTConfig", _OPT, _causal),
    Architecture("bloom", "BloomForCausalLM", "BloomConfig", _BLOOM, _causal, ("eager",)),
    Architecture("cohere", "CohereForCausalLM", "CohereConfig", _DECODER, _causal),
    Architecture("granite", "GraniteForCausalLM", "GraniteConfig", _DECODER, _causal),
)
ALL = {name: each for name, each in ARCHITECTURES.items() if each.attention} | {
    each.name: each for each in MORE
}
CASES = [(name, kind) for name, each in ALL.items() for kind in each.attention]
MUST = (
    *("llama", "qwen3", "gemma3", "mistral", "gpt2", "gpt-neox", "bert", "t5", "vit", "whisper"),
    *("clip", "mixtral", "phi", "olmo", "falcon"),
)
KEYS = (
    *("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"),
    *("text_model_output", "vision_model_output"),
)


def eager_patterns(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """The patterns of the eager implementation, in no order that is promised."""
    with torch.no_grad():
        output = model(**batch, output_attentions=True)
    found: list[Tensor] = []
    for key in KEYS:
        each = output.get(key)
        found += each.attentions if hasattr(each, "attentions") else each or ()
    return found


def read(model: nn.Module, batch: dict[str, Any]) -> tuple[Any, list[tuple[str, Tensor]]]:
    """What the model returns, and the patterns with their layers."""
    calls: list[tuple[str, Tensor]] = []
    with (
        torch.no_grad(),
        AttentionReader(model, lambda call: calls.append((call.layer, call.pattern()))),
    ):
        output = model(**batch)
    return output, calls


def hooks_of(model: nn.Module) -> list[int]:
    return [
        len(hooks)
        for each in model.modules()
        for hooks in (each._forward_hooks, each._forward_pre_hooks, each._backward_hooks)
    ]


def test_the_architectures_that_must_be_read_are_tested() -> None:
    assert len(set(MUST) & set(ALL)) == len(MUST) == 15


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_patterns_equal_those_of_the_eager_implementation(name: str, kind: str) -> None:
    model, batch = ALL[name].build(kind).eval(), ALL[name].batch()
    oracle = eager_patterns(ALL[name].build("eager").eval(), batch)
    with torch.no_grad():
        plain = model(**batch)
    before, state = hooks_of(model), torch.get_rng_state()
    output, calls = read(model, batch)
    assert hooks_of(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    for key in plain:
        if isinstance(plain[key], Tensor):
            assert torch.equal(plain[key], output[key]), key
    assert len(calls) == len(oracle) > 0
    for layer, pattern in calls:
        assert "att" in layer.lower()
        apart = [
            float((pattern - each).abs().max()) for each in oracle if each.shape == pattern.shape
        ]
        # Rows of padded queries that may read nothing are uniform in eager and zero in kernels.
        assert min(apart) < 1e-6, (layer, apart)


def test_a_pattern_of_another_layer_is_seen_to_differ() -> None:
    batch = ALL["llama"].batch()
    oracle = eager_patterns(ALL["llama"].build("eager").eval(), batch)
    _, calls = read(ALL["llama"].build("sdpa").eval(), batch)
    assert float((calls[0][1] - oracle[1]).abs().max()) > 1e-3
    assert float((calls[1][1] - oracle[1]).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_other_precisions(dtype: torch.dtype) -> None:
    batch = ALL["llama"].batch()
    oracle = eager_patterns(ALL["llama"].build("eager").eval().to(dtype), batch)
    _, calls = read(ALL["llama"].build("sdpa").eval().to(dtype), batch)
    assert calls[0][1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for (_, pattern), expected in zip(calls, oracle, strict=True):
        # Eager takes its softmax in float32 whatever the dtype, and rounds to bfloat16.
        tolerance = 1e-6 if dtype == torch.float64 else 2e-2
        assert float((pattern - expected).abs().max()) < tolerance


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_dropout_draws_the_same_numbers_and_is_not_in_the_pattern(kind: str) -> None:
    model, batch = ALL["llama"].build(kind), ALL["llama"].batch()
    oracle = eager_patterns(ALL["llama"].build("eager").eval(), batch)
    torch.manual_seed(3)
    with torch.no_grad():
        plain = model(**batch).logits
    after = torch.get_rng_state()
    torch.manual_seed(3)
    inspector = Inspector(model)
    inspector.watch("*.self_attn", what="attention")
    with torch.no_grad(), inspector.recording(keep="tensors") as inspection:
        logits = model(**batch).logits
    assert torch.equal(plain, logits)
    assert torch.equal(torch.get_rng_state(), after)
    pattern = inspection["model.layers.0.self_attn"].attention
    assert isinstance(pattern, Tensor)
    assert float((pattern - oracle[0]).abs().max()) < 1e-6
    assert any("before dropout" in note for note in inspection.notes)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("name", "cache"),
    [("llama", "dynamic"), ("llama", "static"), ("mistral", "dynamic"), ("mistral", "static"),
     ("gpt2", "dynamic")],
)  # fmt: skip
def test_while_generating_with_a_cache(name: str, cache: str, kind: str) -> None:
    inputs = {"input_ids": tokens(), "attention_mask": padded_mask("left")}
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    options |= {"cache_implementation": cache, "return_dict_in_generate": True}
    oracle = ALL[name].build("eager").eval()
    expected = oracle.generate(**inputs, **options, output_attentions=True)  # type: ignore[operator]
    model = ALL[name].build(kind).eval()
    inspector = Inspector(model)
    (layer, *_) = inspector.watch("*.{self_attn,attn}", what="attention")
    with inspector.recording(keep="tensors") as inspection:
        found = model.generate(**inputs, **options)  # type: ignore[operator]
    assert torch.equal(found.sequences, expected.sequences)
    patterns = inspection[layer].attention
    assert isinstance(patterns, list)
    assert len(patterns) == len(expected.attentions) == 4
    for pattern, each in zip(patterns, expected.attentions, strict=True):
        assert pattern is not None
        assert pattern.shape == each[0].shape
        queries = inputs["attention_mask"].bool()[:, -pattern.shape[2] :]
        if pattern.shape[2] == 1:
            queries = torch.ones(len(pattern), 1, dtype=torch.bool)
        apart = (pattern - each[0]).abs().amax((1, 3))
        assert float(apart[queries].max()) < 1e-6
        # Padding is never read, and neither is room in the cache that is not filled yet.
        hidden = pattern[1, :, :, :3] if pattern.shape[-1] >= 9 else pattern[1, :, :, :0]
        assert not hidden[:, queries[1]].any()


def test_padded_queries_are_left_out_of_statistics() -> None:
    model, batch = ALL["llama"].build("sdpa").eval(), ALL["llama"].batch()
    inspector = Inspector(model)
    inspector.watch("*.self_attn", what="attention")
    inspector.run_inspection(batch)
    queries = int(batch["attention_mask"].sum())
    statistics = inspector.get_statistics("model.layers.0.self_attn", "attention")
    assert statistics["count"] == queries * 4 * batch["input_ids"].shape[1]


class _Folded(nn.Module):
    """Attention with batch and heads in one axis, as old models write it with bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(8, 24), 2

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            each.view(b, s, 2, 4).transpose(1, 2).reshape(2 * b, s, 4)
            for each in self.qkv(x).chunk(3, -1)
        )
        weights = F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1)
        return torch.bmm(weights, v)


def test_batch_and_heads_in_one_axis_are_told_apart() -> None:
    model, x = _Folded(), torch.randn(3, 5, 8)
    inspector = Inspector(model)
    inspector.watch("", what="attention")
    pattern = inspector.run_inspection(x, keep="tensors")[""].attention
    with torch.no_grad():
        q, k, _ = (each.view(3, 5, 2, 4).transpose(1, 2) for each in model.qkv(x).chunk(3, -1))
    assert torch.allclose(pattern, (q @ k.transpose(-1, -2)).softmax(-1), atol=1e-6)  # type: ignore[arg-type]


class _WrittenOut(nn.Module):
    """An attention as people write it, with einsum and without an axis of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.expected: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.einsum("bqd,bkd->bqk", q, k).div(8**0.5).softmax(dim=-1)
        self.expected.append(weights.detach().clone())
        return torch.einsum("bqk,bkd->bqd", F.dropout(weights, 0.5, self.training), v)


def test_attention_written_out_by_hand() -> None:
    model = _WrittenOut()
    inspector = Inspector(model)
    inspector.watch("", what="attention")
    with inspector.recording(keep="tensors") as inspection:
        model(torch.randn(2, 5, 8))
    pattern = inspection[""].attention
    assert isinstance(pattern, Tensor)
    assert torch.equal(pattern, model.expected[0][:, None])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention_of_torch(batch_first: bool, training: bool) -> None:
    model = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=batch_first).train(training)
    x = torch.randn(3, 3, 16)
    with torch.no_grad():
        _, expected = model.eval()(x, x, x, average_attn_weights=False)
    model.train(training)
    inspector = Inspector(model)
    inspector.watch("", what="attention")
    data = {"query": x, "key": x, "value": x, "need_weights": False}
    torch.manual_seed(1)
    plain, _ = model(**data)
    torch.manual_seed(1)
    with inspector.recording(keep="tensors") as inspection:
        output, _ = model(**data)
    assert torch.equal(output, plain)
    assert torch.allclose(inspection[""].attention, expected, atol=1e-6)  # type: ignore[arg-type]


def test_a_checkpointed_layer_is_read_once() -> None:
    model, batch = ALL["llama"].build("sdpa"), ALL["llama"].batch()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    inspector = Inspector(model)
    inspector.watch("*.self_attn", what="attention")
    with inspector.recording() as inspection:
        model(**batch).loss.backward()
    assert [len(each.calls) for each in inspection.values()] == [1, 1]


def test_layers_above_and_without_attention_say_so() -> None:
    model, batch = ALL["bert"].build("sdpa").eval(), ALL["bert"].batch()
    inspector = Inspector(model)
    inspector.watch("*.{attention,intermediate}", what="attention")
    inspection = inspector.run_inspection(batch, keep="tensors")
    record = inspection["bert.encoder.layer.0.attention"]
    assert record.calls[0].elements("attention") == ["self"]  # as it is called in there
    assert "none is computed" in inspection.missing["bert.encoder.layer.0.intermediate"]


def test_a_model_without_attention_is_named() -> None:
    arch = ARCHITECTURES["mamba"]
    inspector = Inspector(arch.build().eval())
    inspector.watch("*.mixer", what="attention")
    inspection = inspector.run_inspection(arch.batch())
    assert "no scaled_dot_product_attention ran" in inspection.missing["backbone.layers.0.mixer"]


def test_an_implementation_that_cannot_be_read_is_named() -> None:
    from transformers import AttentionInterface

    def silent(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        return v.repeat_interleave(2, 1).transpose(1, 2).contiguous(), None  # as a kernel would

    AttentionInterface.register("silent", silent)
    model = ALL["llama"].build("silent").eval()
    inspector = Inspector(model)
    inspector.watch("*.self_attn", what="attention")
    inspection = inspector.run_inspection({"input_ids": tokens()})
    assert "by 'silent', which cannot be read" in inspection.missing["model.layers.0.self_attn"]
    assert "sdpa" in inspection.missing["model.layers.0.self_attn"]


@torch.library.custom_op("torchfmri_flash_stand_in::_flash_attn_forward", mutates_args=())
def flash_kernel(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, cu_seqlens_q: Tensor | None,
) -> Tensor:  # fmt: skip
    """What flash-attn registers, for (b, s, heads, d), with the same names of arguments."""
    queries, keys = q.shape[1], k.shape[1]
    at = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    hidden = at < 0 if causal else torch.zeros_like(at, dtype=torch.bool)
    if window_size_left >= 0:
        hidden |= at > window_size_left
    k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], 2) for each in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


class FlashFunction(torch.autograd.Function):
    """As flash-attn calls its kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return torch.ops.torchfmri_flash_stand_in._flash_attn_forward(q, k, v, *rest)


def flash_model(lengths: Tensor | None = None, window: int = -1) -> nn.Module:
    from transformers import AttentionInterface

    def forward(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Any:
        swapped = (each.transpose(1, 2) for each in (q, k, v))
        rest = (0.0, options["scaling"], True, window, 0, lengths)
        return FlashFunction.apply(*swapped, *rest), None

    AttentionInterface.register("kernel_stand_in", forward)
    return ALL["llama"].build("kernel_stand_in").eval()


def test_flash_attention_is_read_where_its_kernel_is_called() -> None:
    """The package needs a GPU; a kernel with its names and arguments stands in."""
    model, ids = flash_model(), tokens()
    inspector = Inspector(model)
    inspector.watch("*.self_attn", what="attention")
    with torch.no_grad():
        plain = model(ids).logits
        with inspector.recording(keep="tensors") as inspection:
            assert torch.equal(model(ids).logits, plain)
        model.set_attn_implementation("eager")  # type: ignore[operator]
        wanted = model(ids, output_attentions=True)
    assert torch.allclose(plain, wanted.logits, atol=1e-5)
    for layer, pattern in enumerate(wanted.attentions):
        found = inspection[f"model.layers.{layer}.self_attn"].attention
        assert (found - pattern).abs().max() < 1e-6


def test_a_window_of_flash_attention() -> None:
    model, ids = flash_model(window=2), tokens()
    inspector = Inspector(model)
    inspector.watch("L1.pattern", what="attention")
    with torch.no_grad(), inspector.recording(keep="tensors") as inspection:
        model(ids)
    pattern = inspection["model.layers.1.self_attn"].attention
    apart = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
    assert not pattern[..., (apart < 0) | (apart > 2)].any()
    assert torch.allclose(pattern.sum(-1), torch.ones(()), atol=1e-6)


def test_flash_attention_without_padding_is_named() -> None:
    """Several sequences in one row: their lengths are handed to the kernel."""
    model, ids = flash_model(lengths=torch.tensor([0, 4, 9])), tokens()
    inspector = Inspector(model)
    inspector.watch("*.self_attn", what="attention")
    with torch.no_grad(), inspector.recording() as inspection:
        model(ids)
    reason = inspection.missing["model.layers.0.self_attn"]
    assert "_flash_attn_forward' was called with cu_seqlens_q, which is not read" in reason
    scan = torchfmri.scan(model, None, ids[0], max_new_tokens=0, per=None, attention=True)
    assert "cu_seqlens_q" in scan.meta["missed"]["model.layers.0.self_attn"]


def test_too_large_a_pattern_is_refused_before_it_is_computed() -> None:
    model, batch = ALL["llama"].build("sdpa").eval(), ALL["llama"].batch()
    before = hooks_of(model)
    inspector = Inspector(model)
    inspector.watch("*.self_attn", what="attention")
    with pytest.raises(MemoryLimitError, match=r"layers\.0\.self_attn"):
        inspector.run_inspection(batch, keep="tensors", max_bytes=100)
    assert hooks_of(model) == before


def test_chunks_add_up_to_the_whole() -> None:
    q, k, v = (torch.randn(2, *each, 8).double() for each in ((4, 7), (2, 9), (2, 9)))
    mask = torch.rand(2, 1, 7, 9) > 0.4
    mask[0, 0, 3] = False  # a query that may read nothing
    fused = FusedAttention(q, k, mask, 0.3, causal=False)
    whole = fused.rows(0, 7)
    parts = torch.cat([fused.rows(i, i + 1) for i in range(7)], -2)
    assert torch.allclose(whole, parts, atol=1e-14)
    assert not whole[0, :, 3].any()
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
    assert torch.allclose(whole @ v.repeat_interleave(2, 1), expected, atol=1e-14)


def test_an_exception_leaves_nothing_behind() -> None:
    model = ALL["llama"].build("sdpa").eval()
    before = hooks_of(model)
    inspector = Inspector(model)
    inspector.watch("*.self_attn", what="attention")
    with pytest.raises(IndexError):
        inspector.run_inspection({"input_ids": torch.tensor([[10_000]])})
    assert hooks_of(model) == before
    assert not torch.overrides._get_current_function_mode_stack()


def test_names_of_transformer_lens_are_taken() -> None:
    model, batch = ALL["gpt2"].build("sdpa").eval(), ALL["gpt2"].batch()
    inspector = Inspector(model)
    assert inspector.watch("blocks.1.attn.hook_pattern", what="attention") == [
        "transformer.h.1.attn"
    ]
    assert inspector.watch("L0.attn", what="attention") == ["transformer.h.0.attn"]
    inspection = inspector.run_inspection(batch, keep="tensors")
    oracle = eager_patterns(ALL["gpt2"].build("eager").eval(), batch)
    for layer, expected in zip(inspection, oracle, strict=True):
        assert torch.allclose(inspection[layer].attention, expected, atol=1e-6)  # type: ignore[arg-type]
    with pytest.raises(InspectionError, match="one head, and all heads"):
        inspector.watch("L1H2.pattern", what="attention")
