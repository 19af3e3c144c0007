"""Activation patching: 0 is corrupted, 1 is clean, tokens are matched by role."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchfmri
from torchfmri import InspectionError, patch
from torchfmri._lesion.patching import match_roles

Subject = tuple[nn.Module, Any]
CLEAN, CORRUPTED = "Tom had a dog. Tom was", "Lily had a dog. Lily was"


@pytest.fixture(scope="module")
def tiny() -> Subject:
    model, tokenizer = torchfmri.load_model("tiny")
    return model, tokenizer


def test_roles() -> None:
    assert match_roles([1, 2, 3], [1, 9, 3]) == [(0, 0), (1, 1), (2, 2)]
    assert match_roles([1, 2, 3], [1, 7, 8, 9, 3]) == [(0, 0), (1, 3), (2, 4)]
    assert match_roles([1, 2, 3], [1, 3]) == [(0, 0), (2, 1)]


def test_patching_a_whole_block_brings_everything_back(tiny: Subject) -> None:
    found = patch(*tiny, CLEAN, CORRUPTED, " happy", " sad")
    if found.unmatched:
        pytest.skip("the names have different numbers of tokens")
    np.testing.assert_allclose(found.score, 1.0, atol=1e-4)
    assert found.metric == "logit_difference"


def test_every_patch_is_an_edit(tiny: Subject) -> None:
    model, tokenizer = tiny
    found = patch(model, tokenizer, CLEAN, CORRUPTED, " happy", of=["heads"], per="token", batch=9)
    clean, corrupted = (torch.tensor([tokenizer(each)["input_ids"]]) for each in (CLEAN, CORRUPTED))
    answer = tokenizer(" happy", add_special_tokens=False)["input_ids"]
    inspector = torchfmri.Inspector(model, keep="tensors")
    inspector.watch("*.o_proj", "inputs")
    donor = inspector.run_inspection({"input_ids": clean})

    def surprisal(ids: torch.Tensor) -> float:
        with torch.no_grad():
            whole = torch.cat([ids, torch.tensor([answer[:-1]], dtype=torch.long)], 1)
            logits = model(whole).logits[0, len(ids[0]) - 1 :].double().log_softmax(-1)
        return -float(sum(logits[at, token] for at, token in enumerate(answer)))

    assert len(answer) == 1
    assert (found.clean, found.corrupted) == pytest.approx(
        (surprisal(clean), surprisal(corrupted)), abs=1e-4
    )
    for row, name in enumerate(found.names):
        for column, (one, other) in enumerate(found.pairs):
            edit = torchfmri.Edit.replace(donor, source=[one]).at(tokens=[other])
            with torchfmri.edited(model, {name: edit}):
                assert found.patched[row, column] == pytest.approx(surprisal(corrupted), abs=2e-4)
    best = found.top(1)[0]
    assert best[2] == pytest.approx(found.score.max())
    assert best[0] in found.table()


def test_prompts_of_different_lengths(tiny: Subject, tmp_path: Path) -> None:
    longer = "The little old dog had a ball. Tom was"
    found = patch(*tiny, CLEAN, longer, " happy", of="blocks", per="token")
    assert found.patched.shape == (5, len(found.pairs))
    assert found.unmatched
    assert "not matched by role" in found.table()
    found.draw(tmp_path / "patches.png")
    assert (tmp_path / "patches.png").exists()


def test_bad_arguments(tiny: Subject) -> None:
    with pytest.raises(InspectionError, match="same logit_difference"):
        patch(*tiny, CLEAN, CLEAN, " happy", " sad")
    with pytest.raises(InspectionError, match="choose 'place' or 'token'"):
        patch(*tiny, CLEAN, CORRUPTED, " happy", per="layer")
    with pytest.raises(InspectionError, match="positions are 0 to"):
        patch(*tiny, CLEAN, CORRUPTED, " happy", pairs=[(0, 99)])
    with pytest.raises(InspectionError, match="stands twice"):
        patch(*tiny, CLEAN, CORRUPTED, " happy", pairs=[(0, 1), (2, 1)])
