"""Known results: induction heads are found by lesion in a model trained to have them."""

import numpy as np
import pytest
import torch

import torchfmri
from benchmarks.lesion import attention_scores, repeated, second_half, train_induction_model


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
