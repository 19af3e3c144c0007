"""Direct logit attribution: parts add up, and heads equal the formula written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, tokens
from test_lens import SINGLE

import torchfmri
from torchfmri import InspectionError

ADDITIVE = [name for name in SINGLE if name != "bert"]
UNSPLIT = {"mamba", "bloom"}  # their blocks add up inside of other layers


@pytest.mark.parametrize("name", ADDITIVE)
def test_parts_add_up_to_the_logit(name: str) -> None:
    model, ids = SINGLE[name].build().eval(), tokens(batch=1)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, 5].double()
    for token, against in ((3, None), (3, 11)):
        found = torchfmri.attribute_logit(model, None, ids, token, against=against, position=5)
        logit = logits[token] - (0 if against is None else logits[against])
        if name != "gemma2":  # whose logit is that before the softcap
            assert found.logit == pytest.approx(float(logit), rel=1e-6)
        assert abs(found.residual) <= 1e-5 * max(abs(found.logit), float(logits.abs().max()))
        assert (found.heads.size == 0) == (name in UNSPLIT)
        assert bool(found.notes) == (name in UNSPLIT or name == "gemma2")


def test_the_softcap_is_named_and_undone() -> None:
    model, ids = SINGLE["gemma2"].build(final_logit_softcapping=0.2).eval(), tokens(batch=1)
    found = torchfmri.attribute_logit(model, None, ids, 3, position=5)
    with torch.no_grad():
        capped = float(model(input_ids=ids).logits[0, 5, 3])
    assert 0.2 * np.tanh(found.logit / 0.2) == pytest.approx(capped, rel=1e-5)
    assert found.notes == ("it is the logit before the softcap of 0.2",)
    assert abs(found.residual) <= 1e-5 * abs(found.logit)


@pytest.mark.parametrize(("name", "factor"), [("llama", 1.0), ("granite", 0.4 / 3.0)])
def test_heads_and_mlps_equal_the_formula_written_out(name: str, factor: float) -> None:
    """Granite multiplies what a block adds by 0.4, and divides its logits by 3."""
    model, ids = SINGLE[name].build().eval().double(), tokens(batch=1)
    position, token = 6, 4
    seen: dict[str, torch.Tensor] = {}
    handles = []
    for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr,arg-type]
        handles += [
            layer.self_attn.o_proj.register_forward_hook(
                lambda _, x, y, index=index: seen.update({f"z{index}": x[0][0, position]})
            ),
            layer.mlp.register_forward_hook(
                lambda _, x, y, index=index: seen.update({f"m{index}": y[0, position]})
            ),
        ]
    norm = model.model.norm  # type: ignore[union-attr]
    handles.append(
        norm.register_forward_hook(lambda _, x, y: seen.update(x=x[0][0, position]))  # type: ignore[union-attr,operator]
    )
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    x = seen["x"]
    scale = (x.pow(2).mean() + norm.variance_epsilon).rsqrt()  # type: ignore[union-attr,operator]
    direction = factor * (model.lm_head.weight[token] * norm.weight * scale).detach()  # type: ignore[union-attr,index,operator]
    found = torchfmri.attribute_logit(model, None, ids, token, position=position)
    for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr,arg-type]
        weight = layer.self_attn.o_proj.weight.detach()
        for head in range(4):
            part = slice(4 * head, 4 * head + 4)
            value = float(direction @ (weight[:, part] @ seen[f"z{index}"][part]))
            assert found[f"L{index}H{head}"] == pytest.approx(value, abs=1e-9)
            assert found.heads[index, head] == found[f"L{index}H{head}"]
        assert found[f"L{index}.mlp"] == pytest.approx(
            float(direction @ seen[f"m{index}"]), abs=1e-9
        )
        heads = sum(found[f"L{index}H{head}"] for head in range(4))
        assert found[f"L{index}.attn"] == pytest.approx(heads)
    # Without the norm's weight folded in the numbers would be others.
    unfolded = factor * float(model.lm_head.weight[token].detach() @ seen["m0"])  # type: ignore[union-attr,index,operator]
    assert found["L0.mlp"] != pytest.approx(unfolded, rel=1e-3)


def test_half_precision_shows_what_does_not_add_up() -> None:
    model, ids = SINGLE["llama"].build().eval().bfloat16(), tokens(batch=1)
    found = torchfmri.attribute_logit(model, None, ids, 3, position=5)
    assert 0 < abs(found.residual) < 2e-2
    assert "residual" in found.table()


def test_on_a_real_model() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    found = torchfmri.attribute_logit(
        model, tokenizer, "The capital of France is", " Paris", against=" Rome"
    )
    assert (found.token, found.against) == (" Paris", " Rome")
    assert abs(found.residual) <= 1e-5 * abs(found.logit)
    assert found.total == pytest.approx(found.logit, rel=1e-5)
    assert found.top(1)[0][0] in found.names
    assert "logit of ' Paris' less that of ' Rome'" in found.table()
    ax = found.plot()
    assert next(each.get_text() for each in ax.get_yticklabels()) == "L0"


def test_an_edited_attention_is_one_part() -> None:
    """Its heads did not make what it puts out."""
    model, tokenizer = torchfmri.load_model("tiny")
    with torchfmri.edited(model, {"L2.attn": "zero"}):
        found = torchfmri.attribute_logit(model, tokenizer, "The capital of France is", " Paris")
    assert found["L2.attn"] == 0.0
    assert any("edited value" in each for each in found.notes)


def test_heads_of_an_edited_layer_are_told_apart() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    plain = torchfmri.attribute_logit(model, tokenizer, "The capital of France is", " Paris")
    with torchfmri.edited(model, {"L2H1": "zero"}):
        found = torchfmri.attribute_logit(model, tokenizer, "The capital of France is", " Paris")
    assert found["L2H1"] == 0.0
    assert plain["L2H1"] != 0.0
    assert found.names == plain.names
    assert not found.notes
    assert abs(found.residual) <= 1e-5 * abs(found.logit)


def test_bad_input() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    ask = "The capital of France is"
    for options, words in (
        ({"token": " Paris or Rome"}, "tokens .*and a logit belongs to one"),
        ({"token": 10**9}, "Token id 1000000000 is not in the vocabulary"),
        ({"against": -1}, "Token id -1 is not in the vocabulary"),
        ({"token": 1.5}, r"token=1\.5"),
        ({"position": 99}, "position=99: the prompt has 6 tokens"),
    ):
        with pytest.raises(InspectionError, match=words):
            torchfmri.attribute_logit(model, tokenizer, ask, **options)  # type: ignore[arg-type]
    with pytest.raises(InspectionError, match="no part 'L9H9'"):
        torchfmri.attribute_logit(model, tokenizer, ask)["L9H9"]
    bert = ARCHITECTURES["bert"].build()
    with pytest.raises(InspectionError, match="'cls' of BertForMaskedLM"):
        torchfmri.attribute_logit(bert, None, tokens(batch=1))
