"""The logit lens against transformers' own hidden states, pushed through norm and head by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import _DECODER, ARCHITECTURES, Architecture, _causal, tokens
from torch import Tensor, nn

import torchfmri
from torchfmri import InspectionError, LayerNotFoundError

_NEOX = {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
MORE = (
    Architecture("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", _NEOX, _causal),
    Architecture("phi", "PhiForCausalLM", "PhiConfig", _DECODER, _causal),
    Architecture("olmo2", "Olmo2ForCausalLM", "Olmo2Config", _DECODER, _causal),
    Architecture("falcon", "FalconForCausalLM", "FalconConfig", _NEOX, _causal),
    Architecture(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        {**_NEOX, "ffn_dim": 24, "word_embed_proj_dim": 16},
        _causal,
    ),
    Architecture(
        "cohere", "CohereForCausalLM", "CohereConfig", {**_DECODER, "logit_scale": 0.25}, _causal
    ),
    Architecture(
        "granite",
        "GraniteForCausalLM",
        "GraniteConfig",
        {**_DECODER, "logits_scaling": 3.0, "residual_multiplier": 0.4},
        _causal,
    ),
    Architecture(
        "bloom",
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 67, "hidden_size": 16, "n_layer": 2, "n_head": 4},
        _causal,
        ("eager",),
    ),
)
SINGLE = {
    name: each
    for name, each in {**ARCHITECTURES, **{each.name: each for each in MORE}}.items()
    if name not in ("t5", "whisper", "vit", "clip", "albert")
}


@pytest.mark.parametrize("name", SINGLE)
def test_the_last_row_is_what_the_model_itself_says(name: str) -> None:
    model, ids = SINGLE[name].build().eval(), tokens(batch=1)
    lens = torchfmri.lens(model, None, ids)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
    expected = logits.softmax(-1)
    ahead = 0 if name == "bert" else 1  # a masked language model speaks about the token itself
    following, said = ids[0, ahead:], len(ids[0]) - ahead
    shares = expected[:said].gather(-1, following[:, None])[:, 0]
    assert lens.ahead == ahead
    assert np.allclose(lens.probability[-1, :said], shares, rtol=1e-5)
    assert np.isnan(lens.probability[:, said:]).all()
    ranks = [(row > row[token]).sum() + 1 for row, token in zip(logits, following, strict=False)]
    assert lens.rank[-1].tolist() == [*map(int, ranks), *[0] * ahead]
    assert np.array_equal(lens.top[-1, :, 0], logits.argmax(-1))
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert np.allclose(lens.entropy[-1], entropy, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_equal_hidden_states_through_norm_and_head(dtype: torch.dtype) -> None:
    model, ids = SINGLE["gemma2"].build().eval().to(dtype), tokens(batch=1)
    lens = torchfmri.lens(model, None, ids)
    inner, cap = model.model, model.config.final_logit_softcapping  # type: ignore[union-attr]
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        for row, state in enumerate(states[:-1]):  # the last one has been through the norm
            logits = model.lm_head(inner.norm(state))[0]  # type: ignore[operator,union-attr]
            logits = torch.tanh(logits / cap) * cap
            shares = logits.double().softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
            tolerance = {torch.float64: 1e-6, torch.float32: 1e-5}.get(dtype, 2e-2)
            assert np.allclose(lens.probability[row, :-1], shares, rtol=tolerance)
    assert lens.layers == ("embedding", "model.layers.0", "model.layers.1")


def test_without_the_final_norm_the_rows_would_be_others() -> None:
    model, ids = SINGLE["llama"].build().eval(), tokens(batch=1)
    lens = torchfmri.lens(model, None, ids)
    with torch.no_grad():
        state = model(input_ids=ids, output_hidden_states=True).hidden_states[1]
        plain = model.lm_head(state)[0].softmax(-1)  # type: ignore[operator]
    shares = plain[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert not np.allclose(lens.probability[1, :-1], shares, rtol=1e-3)


def test_nothing_is_left_behind() -> None:
    model, ids = SINGLE["llama"].build(), tokens(batch=1)  # in training mode, with dropout
    state = torch.get_rng_state()
    for act in (torchfmri.lens, torchfmri.attribute_logit, torchfmri.attribute_inputs):
        act(model, None, ids)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in model.parameters())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


class _Shifted(nn.Module):
    """A language model that adds something to its logits that no layer of it does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SINGLE["llama"].build().eval()
        self.config = self.inner.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits + torch.arange(logits.shape[-1])


def test_what_cannot_be_read_is_refused_by_name() -> None:
    ids = tokens(batch=1)
    for name, words in {
        "t5": r"T5ForConditionalGeneration has an encoder and a decoder.*a lens .*decoder\.L3H1",
        "albert": "no stream",
        "vit": "ViTForImageClassification is fed pixel_values and no token ids",
    }.items():
        with pytest.raises(InspectionError, match=words):
            torchfmri.lens(ARCHITECTURES[name].build(), None, ids)
    with pytest.raises(InspectionError, match=r"_Shifted: inner\.model\.norm -> inner\.lm_head"):
        torchfmri.lens(_Shifted(), None, ids)
    body = SINGLE["llama"].build().model
    assert isinstance(body, nn.Module)
    with pytest.raises(InspectionError, match="LlamaModel returns no logits"):
        torchfmri.lens(body, None, ids)


def test_an_encoder_by_itself_is_one_stack() -> None:
    """Its configuration is that of the whole model, which says that there are two."""
    with pytest.raises(InspectionError, match="T5Stack returns no logits"):
        torchfmri.lens(ARCHITECTURES["t5"].build().encoder, None, tokens(batch=1))  # type: ignore[union-attr, arg-type]


def test_a_masked_language_model_speaks_about_the_token_that_stands_there() -> None:
    model, ids = ARCHITECTURES["bert"].build().eval(), tokens(batch=1)
    lens = torchfmri.lens(model, None, ids)
    table = lens.table(4)
    assert "at token 4" in table
    assert "would say here" in table
    assert "next" not in table
    label = lens.plot("probability").get_xlabel()
    assert label == "what was read; the cells say what would stand there"
    scan = torchfmri.scan(model, None, ids[0].tolist(), max_new_tokens=0, per=None, lens=True)
    stored = scan.lens()
    assert stored.ahead == 0
    assert np.array_equal(stored.rank, lens.rank)
    assert np.allclose(stored.probability, lens.probability, rtol=1e-5)
    decoder = torchfmri.lens(_bert_decoder(), None, ids)
    assert decoder.ahead == 1
    assert "would say next" in decoder.table(4)


def test_a_pooler_between_the_blocks_and_the_head_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.FNetConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, intermediate_size=32
    )
    model = transformers.FNetForMaskedLM(config).eval()
    with pytest.raises(InspectionError, match=r"gives \(1, 61\).*A lens cannot read it"):
        torchfmri.lens(model, None, [5, 6, 7, 8, 9, 10, 11])


def _bert_decoder() -> nn.Module:
    sizes = {**ARCHITECTURES["bert"].sizes, "is_decoder": True}
    return Architecture("bert", "BertLMHeadModel", "BertConfig", sizes, _causal).build()


def test_a_stream_of_zeros_is_read() -> None:
    """Relative to the largest logit, 0 is 0 away from 0."""
    model, ids = SINGLE["llama"].build().eval(), tokens(batch=1)
    with torchfmri.edited(model, {"L*": "zero"}):
        lens = torchfmri.lens(model, None, ids)
    assert np.allclose(lens.probability[-1, :-1], 1 / 67)


def test_bad_input() -> None:
    model, ids = SINGLE["llama"].build(), tokens(batch=1)
    lens = torchfmri.lens(model, None, ids, top=2)
    assert lens.top.shape == (3, 9, 2)
    with pytest.raises(InspectionError, match="2 prompts"):
        torchfmri.lens(model, None, tokens())
    with pytest.raises(InspectionError, match="no position 9"):
        lens.table(9)
    with pytest.raises(InspectionError, match="'surprise' is unknown: choose one of"):
        lens.plot("surprise")
    with pytest.raises(InspectionError, match="top=0"):
        torchfmri.lens(model, None, ids, top=0)
    with pytest.raises((InspectionError, LayerNotFoundError), match=r"nn\.Module"):
        torchfmri.lens("gpt2", None, ids)  # type: ignore[arg-type]


def test_the_layer_where_the_answer_is_decided() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    lens = torchfmri.lens(model, tokenizer, "The capital of France is")
    assert lens.spell(lens.top[-1, -1, 0]) == " Paris"
    row = int(lens.decided()[-1])
    assert (lens.top[row:, -1, 0] == lens.top[-1, -1, 0]).all()
    assert row == 0 or lens.top[row - 1, -1, 0] != lens.top[-1, -1, 0]
    assert "' Paris' 99%" in lens.table()
    assert lens.to_dict()["probability"][0][-1] is None


def test_the_picture_has_a_word_in_every_cell() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    lens = torchfmri.lens(model, tokenizer, "The capital of $x is")
    for metric in ("top_probability", "probability", "rank", "entropy"):
        ax = lens.plot(metric)
        assert len(ax.texts) == lens.rank.size
        ax.figure.canvas.draw()


def test_translators_are_applied_to_all_but_the_last_block() -> None:
    model, ids = SINGLE["llama"].build().eval(), tokens(batch=1)
    plain = torchfmri.lens(model, None, ids)
    matrices = torch.randn(1, 16, 16)
    tuned = torchfmri.lens(model, None, ids, translate=lambda x, block: x @ matrices[block])
    with torch.no_grad():
        state = model(input_ids=ids, output_hidden_states=True).hidden_states[1] @ matrices[0]
        logits = model.lm_head(model.model.norm(state))[0]  # type: ignore[operator,union-attr]
    shares = logits.softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert np.allclose(tuned.probability[1, :-1], shares, rtol=1e-5)
    for row in (0, 2):
        assert np.array_equal(tuned.rank[row], plain.rank[row])
