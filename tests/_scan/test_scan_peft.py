"""Models of PEFT, where it is installed: adapters in use, merged, disabled, and in training.

`test_scan.py` has look-alikes of its wrappers, for where it is not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracles import assert_same_state, state_of
from scan_oracles import build, prompts

import torchfmri
from torchfmri import InspectionError, Inspector, Scan

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.tensor([prompts()[0]])
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def lora(**options: Any) -> Any:
    """A model whose adapters matter: they start as zeros."""
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **LORA, **options})
    base = build("llama")  # made once and copied: how much it draws depends on who came first
    torch.manual_seed(1)
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    return model.eval()


def generated(model: Any) -> list[int]:
    mask = torch.ones_like(IDS)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": 66}
    found: list[int] = model.generate(input_ids=IDS, attention_mask=mask, **options)[0].tolist()
    return found


def scanned(model: Any, per: Any = "position") -> Scan:
    expected = generated(model)
    before = state_of(model)
    scan = torchfmri.scan(model, None, IDS, 5, per=per, eos_token_id=66)
    assert_same_state(before, state_of(model))
    assert scan.tokens.ids.tolist() == expected
    if per is not None:
        assert scan.only.checks["live_difference"] < 1e-5
        assert scan.only.checks["gradient_residual"] < 1e-4
    return scan


@pytest.mark.parametrize("per", [None, "position", "cached", "token_loss"])
def test_adapters_are_layers(per: Any) -> None:
    scan = scanned(lora(), per)
    assert generated(lora()) != generated(build("llama"))
    names = [name for name in scan.layers if name.startswith("model.layers.0.self_attn.q_proj")]
    assert names[0] == "model.layers.0.self_attn.q_proj"
    assert {name.rpartition("q_proj.")[2] for name in names[1:]} >= {
        "base_layer", "lora_A.default", "lora_B.default"
    }  # fmt: skip


def test_merged_adapters() -> None:
    inside = lora()
    expected = scanned(inside)
    inside.merge_adapter()
    merged = scanned(inside)
    alone = scanned(lora().merge_and_unload())
    for layer in ("*.mlp", "lm_head"):
        for metric in ("activation", "gradient"):
            _, values = expected.values(metric, pattern=layer)
            for other in (merged, alone):
                found = other.values(metric, pattern=layer)[1]
                np.testing.assert_allclose(found, values, rtol=1e-3, atol=1e-6)


def test_disabled_adapters() -> None:
    model = lora()
    with model.disable_adapter():
        found = scanned(model)
    expected = scanned(build("llama"))
    assert found.tokens.ids.tolist() == expected.tokens.ids.tolist()
    ours, values = (each.values("gradient", pattern="*.mlp")[1] for each in (found, expected))
    np.testing.assert_allclose(ours, values, rtol=1e-5)
    assert found.tokens.ids.tolist() != scanned(model).tokens.ids.tolist()


def test_in_the_middle_of_training() -> None:
    """Two runs of the same training, one of them scanned between backward and step."""

    def train(watched: bool) -> list[float]:
        torch.manual_seed(3)
        model = lora(lora_dropout=0.2).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        losses = []
        for _ in range(4):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            if watched:
                before = state_of(model)
                torchfmri.scan(model, None, IDS, 3)
                assert_same_state(before, state_of(model))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    assert train(watched=True) == train(watched=False)


def test_an_adapter_that_its_own_generate_prepares() -> None:
    """Activated LoRA begins where its invocation tokens stand; PEFT's generate finds the place."""
    if "alora_invocation_tokens" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip("this version of PEFT has no activated LoRA")
    model = lora(alora_invocation_tokens=prompts()[0][2:4], target_modules=["q_proj", "v_proj"])
    assert generated(model) != model.get_base_model().generate(
        IDS, max_new_tokens=5, do_sample=False, eos_token_id=66
    )[0].tolist()  # fmt: skip
    scanned(model)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens(kind: str) -> None:
    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama"), config)
    for per in (None, "position"):
        with pytest.raises(InspectionError, match=r"puts 3 virtual tokens.*disable_adapter"):
            torchfmri.scan(model, None, IDS, 3, per=per)
    with model.disable_adapter():
        found = torchfmri.scan(model, None, IDS, 5, eos_token_id=66)
    assert found.tokens.ids.tolist() == generated(build("llama"))


def test_adapters_of_different_kinds() -> None:
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(**LORA), mixed=True)
    model.add_adapter("other", peft.LoHaConfig(r=2, target_modules=["v_proj"]))
    model.set_adapter(["default", "other"])
    scan = torchfmri.scan(model, None, IDS, 3)
    assert scan.layers[0] == "model"
    assert scan.only.checks["live_difference"] < 1e-5


def test_adaption_prompts() -> None:
    config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")
    scan = scanned(peft.get_peft_model(build("llama"), config))
    assert scan.layers[0] == "model"


def test_token_gradients_and_the_inspector() -> None:
    model = lora()
    with torchfmri.token_gradients(model) as tokens:
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert tokens.names
    assert all(".lora_" in name for name in tokens.names)
    assert tokens.coverage().residual < 1e-5
    assert not tokens.coverage().missing
    model.zero_grad(set_to_none=True)
    inspector = Inspector(model)
    inspector.watch("*.lora_A.*", what=["activations", "gradients"])
    inspection = inspector.run_inspection({"input_ids": IDS, "labels": IDS})
    assert len(inspection) == 6
