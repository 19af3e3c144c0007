"""Language models as people use them: no false alarm, and a wrong activation is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from architectures import ARCHITECTURES
from wrong_functions import Elementwise, MissingTerm

from torchfmri import verify_gradients

pytestmark = pytest.mark.usefixtures("one_thread")


def architecture(name: str) -> Any:
    found = ARCHITECTURES.values() if isinstance(ARCHITECTURES, dict) else ARCHITECTURES
    return next(each for each in found if each.name == name)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt2", "mamba"])
def test_no_false_alarm(name: str) -> None:
    model, batch = architecture(name).build(), architecture(name).batch()
    verification = verify_gradients(model, batch)
    assert [str(check) for check in verification.findings] == []
    assert {check.status for check in verification.checks} == {"right"}
    calculated = [each for each in model.modules() if isinstance(each, nn.Linear)]
    judged = [check for check in verification.checks if check.of == "weight"]
    assert len(judged) >= len(calculated) / 2


def test_a_wrong_activation_is_found() -> None:
    model, batch = architecture("llama").build(), architecture("llama").batch()
    model.model.layers[1].mlp.act_fn = Elementwise(MissingTerm)
    verification = verify_gradients(model, batch)
    assert {check.layer for check in verification.findings} == {"model.layers.1.mlp.act_fn"}
    assert torch.isfinite(model(**batch).loss)
