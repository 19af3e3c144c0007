"""Masked language models predict the token that is masked, where it stands; T5 has two sides."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.architectures import ARCHITECTURES, VOCABULARY, tokens
from torchfmri import InspectionError, LesionMap, lesion, patch

MASK = 4
TOKENIZER = SimpleNamespace(mask_token_id=MASK, mask_token="[MASK]")
PROMPT = [9, 8, 21, MASK, 33, 40, 17]
TWO = [9, 8, MASK, 21, 33, MASK, 17]


def roberta() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return transformers.RobertaForMaskedLM(config)


MODELS = {"bert": ARCHITECTURES["bert"].build, "roberta": roberta}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return MODELS[request.param]().eval().double()


def log_probabilities(model: nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_lesions_are_plain_passes_read_at_the_mask(model: nn.Module) -> None:
    found = lesion(model, TOKENIZER, [PROMPT], [[11]], of="mlps", method="both")
    plain = log_probabilities(model, PROMPT)
    assert found.intact[0] == pytest.approx(-float(plain[3, 11]), abs=1e-12)
    assert abs(found.intact[0] + float(plain[-1, 11])) > 1e-3  # the last token's is another number
    for index, name in enumerate(found.names):
        (layer,) = [
            each
            for key, each in model.named_modules()
            if key.endswith(f"layer.{name[1]}.output.dense") and "attention" not in key
        ]
        handle = layer.register_forward_hook(lambda _, __, output: torch.zeros_like(output))
        wanted = -float(log_probabilities(model, PROMPT)[3, 11])
        handle.remove()
        assert found.lesioned[0, index] == pytest.approx(wanted, abs=1e-12)
    assert np.isfinite(found.estimate).all()


def test_an_answer_of_two_tokens_has_two_masks(model: nn.Module) -> None:
    found = lesion(model, TOKENIZER, [TWO], [[11, 12]], of="L0.mlp")
    plain = log_probabilities(model, TWO)
    assert found.intact[0] == pytest.approx(-float(plain[2, 11] + plain[5, 12]), abs=1e-12)
    difference = lesion(
        model, TOKENIZER, [TWO], [[11]], [[13]], of="L0.mlp", metric="logit_difference"
    )
    assert difference.intact[0] == pytest.approx(float(plain[2, 11] - plain[2, 13]), abs=1e-12)


def test_patches_are_read_at_the_mask(model: nn.Module) -> None:
    corrupted = [*PROMPT[:1], 50, *PROMPT[2:]]
    found = patch(model, TOKENIZER, PROMPT, corrupted, [11], [12], of="blocks")
    clean, other = (log_probabilities(model, each)[3] for each in (PROMPT, corrupted))
    assert found.clean == pytest.approx(float(clean[11] - clean[12]), abs=1e-12)
    assert found.corrupted == pytest.approx(float(other[11] - other[12]), abs=1e-12)
    np.testing.assert_allclose(found.score[-1], 1.0, atol=1e-9)


def test_a_metric_of_ones_own_sees_the_prompt_alone(model: nn.Module) -> None:
    def at_the_mask(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        assert ids.tolist() == PROMPT
        return logits[3, 11]

    found = lesion(model, None, [PROMPT], of="L0.mlp", metric=at_the_mask)
    with torch.no_grad():
        assert found.intact[0] == pytest.approx(
            float(model(torch.tensor([PROMPT])).logits[0, 3, 11])
        )


def test_prompts_without_a_mask_are_refused(model: nn.Module) -> None:
    kind = type(model).__name__
    for prompt, tokenizer, words in (
        ([9, 8, 7], TOKENIZER, r"0 mask tokens, and the answer.*write '\[MASK\]'"),
        (TWO, TOKENIZER, "2 mask tokens, and the answer.*has 1 token"),
        (PROMPT, None, "no tokenizer says what the mask token is"),
    ):
        with pytest.raises(
            InspectionError, match=f"{kind} predicts tokens that are masked.*{words}"
        ):
            lesion(model, tokenizer, [prompt], [[11]], of="mlps")
    with pytest.raises(
        InspectionError, match=r"write '\[MASK\]' where answer and foil would stand"
    ):
        lesion(model, TOKENIZER, [[9, 8, 7]], [[11]], [[13]], of="mlps", metric="logit_difference")


def test_the_file_says_that_answers_are_masked(model: nn.Module, tmp_path: Path) -> None:
    found = lesion(model, TOKENIZER, [PROMPT], [[11]], of="mlps", path=tmp_path / "map.json")
    assert found.masked
    assert LesionMap.load(tmp_path / "map.json").masked
    assert found.to_dict()["masked"] is True


def test_a_model_without_a_head_is_not_asked_for_a_mask() -> None:
    with pytest.raises(InspectionError, match="CLIPModel has no language modelling head"):
        lesion(ARCHITECTURES["clip"].build(), TOKENIZER, [PROMPT], [[11]], of="text_model.L*.mlp")
    with pytest.raises(InspectionError, match="is fed pixel_values and no token ids"):
        lesion(ARCHITECTURES["vit"].build(), None, [PROMPT], of="mlps", metric=lambda x, _: x.sum())


@pytest.mark.parametrize("ask", ["lesion", "patch"])
def test_an_encoder_and_a_decoder_are_refused_with_what_to_do(ask: str) -> None:
    model = ARCHITECTURES["t5"].build()
    one, other = tokens(batch=2).tolist()
    asked: Any = (
        (lambda: lesion(model, None, [one], [[11]], of="decoder.L*H*"))
        if ask == "lesion"
        else (lambda: patch(model, None, one, other, [11]))
    )
    with pytest.raises(InspectionError, match=r"read by the encoder.*decoder\.L3H1") as found:
        asked()
    assert "scan" not in str(found.value)


def test_a_metric_that_is_nan_is_refused_or_noted(model: nn.Module) -> None:
    calls = []

    def nan(logits: torch.Tensor, _: torch.Tensor) -> float:
        calls.append(1)
        return float("nan") if len(calls) > wanted else float(logits.sum())

    wanted = 0
    with pytest.raises(InspectionError, match="is nan before anything is changed"):
        lesion(model, None, [PROMPT], of="mlps", metric=nan)
    calls, wanted = [], 2  # without a lesion, then the first of two lesions
    found = lesion(model, None, [PROMPT], of="mlps", metric=nan)
    assert found.is_exact
    assert f"The metric is NaN with 1 lesion, such as {found.names[1]}" in found.table()
