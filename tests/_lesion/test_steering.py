"""Steering: answers with a direction, beside plain ones and random directions."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchfmri
from torchfmri import Direction, Edit, InspectionError, LayerNotFoundError, steer

Subject = tuple[nn.Module, Any]
PROMPT = "Once upon a time there was a little"


@pytest.fixture(scope="module")
def tiny() -> Subject:
    model, tokenizer = torchfmri.load_model("tiny")
    return model, tokenizer


@pytest.fixture(scope="module")
def direction(tiny: Subject) -> Direction:
    vector = np.random.default_rng(1).normal(size=tiny[0].config.hidden_size)
    return Direction("model.layers.2", vector, "dogs - cats", "last")


def test_answers_are_those_of_edited_generation(tiny: Subject, direction: Direction) -> None:
    model, tokenizer = tiny
    before = {name: each.clone() for name, each in model.state_dict().items()}
    found = steer(*tiny, PROMPT, direction, factor=3.0, max_new_tokens=6, random=2, seed=3)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]

    def write(vector: np.ndarray | None) -> tuple[str, torch.Tensor]:
        edits = {}
        if vector is not None:
            edit = Edit.add(torch.tensor(vector), 3.0).at(tokens=slice(ids.shape[1] - 1, None))
            edits = {"L2": edit}
        with torch.no_grad():
            if not edits:
                logits, new = model(ids).logits, model.generate(ids, max_new_tokens=6)
            else:
                with torchfmri.edited(model, edits):
                    # Without a cache: every token is fed again, and edited again.
                    logits = model(ids).logits
                    new = model.generate(ids, max_new_tokens=6, use_cache=False)
        text = tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)
        return text, logits[0, -1].double().log_softmax(-1)

    plain, logs = write(None)
    vectors = [direction.vector, *direction.random(2, seed=3)]
    wanted = [write(each) for each in vectors]
    assert found.plain == plain
    assert [found.steered, *found.random] == [text for text, _ in wanted]
    shifts = [float((new.exp() * (new - logs)).sum()) for _, new in wanted]
    np.testing.assert_allclose([found.shift, *found.random_shifts], shifts, rtol=1e-3)
    assert min(shifts) > 1e-3
    assert found.steered != found.plain
    assert "dogs - cats" in found.table(200)
    assert "of 2 random directions of the same length" in found.table(200)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_nothing_is_added_with_a_factor_of_zero(tiny: Subject, direction: Direction) -> None:
    found = steer(*tiny, PROMPT, direction, factor=0.0, max_new_tokens=4, random=1)
    assert found.steered == found.random[0] == found.plain
    assert found.shift == pytest.approx(0.0, abs=1e-12)


def test_bad_arguments(tiny: Subject, direction: Direction) -> None:
    vector = torch.ones(tiny[0].config.hidden_size)
    for options, words in (
        ({"direction": vector}, "say where to add the vector"),
        ({"direction": vector[None], "place": "L1"}, r"give contrast\.direction"),
        ({"direction": vector[:7], "place": "L1"}, "does not fit 'L1'"),
        ({"direction": vector, "place": "L*"}, "several places"),
        ({"direction": vector * torch.nan, "place": "L1"}, "NaN or infinite"),
        ({"factor": float("nan")}, "factor=nan"),
        ({"random": 0}, "from 1"),
        ({"max_new_tokens": 0}, "from 1"),
    ):
        with pytest.raises(InspectionError, match=words):
            steer(*tiny, PROMPT, **{"direction": direction, **options})
    with pytest.raises(LayerNotFoundError):
        steer(*tiny, PROMPT, direction, place="model.layers.9")
    with pytest.raises(InspectionError, match=r"Linear has no generate\(\)"):
        steer(nn.Linear(2, 2), None, [1, 2], torch.ones(2), place="")


def test_the_factor_is_checked_before_anything_is_written(
    tiny: Subject, direction: Direction
) -> None:
    calls: list[int] = []
    handle = tiny[0].register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(InspectionError, match="factor='2'"):
            steer(*tiny, PROMPT, direction, factor="2")
    finally:
        handle.remove()
    assert not calls
