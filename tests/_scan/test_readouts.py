"""Attention, lens, experts and features of a scan, each against a way of its own to get them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor, nn

import torchfmri
from torchfmri import InspectionError, LayerNotFoundError, MemoryLimitError, ScanOptions
from torchfmri._scan.run import readouts

SHORT, LONG = [7, 9, 7, 9, 12], [20, 21, 22, 20, 21, 22, 20, 30]
SCORES = ("entropy", "distance", "first", "previous", "induction")


def build(name: str = "llama", attention: str | None = "sdpa") -> nn.Module:
    return ARCHITECTURES[name].build(attention).eval()


def eager_pattern(ids: list[int], layer: int, name: str = "llama") -> Tensor:
    """(heads, s, s) of one sequence alone, as the eager implementation writes it out."""
    model = build(name, "eager")
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids]), output_attentions=True)
    found: Tensor = output.attentions[layer][0]
    return found


def by_hand(pattern: Tensor, ids: list[int], score: str) -> np.ndarray[Any, Any]:
    """(s, heads), by loops."""
    found = np.full((len(ids), len(pattern)), math.nan)
    for head, rows in enumerate(pattern.double().tolist()):
        for i, row in enumerate(rows):
            after = [j + 1 for j in range(i) if ids[j] == ids[i]]
            if score == "entropy":
                found[i, head] = -sum(p * math.log(p) for p in row if p > 0)
            elif score == "distance":
                found[i, head] = sum(p * abs(i - j) for j, p in enumerate(row))
            elif score == "first":
                found[i, head] = row[0]
            elif score == "previous" and i:
                found[i, head] = row[i - 1]
            elif score == "induction" and after:
                found[i, head] = sum(row[j] for j in after)
    return found


@pytest.mark.parametrize("per", [None, "position"])
def test_attention_of_a_padded_batch_that_goes_on_writing(per: Any) -> None:
    model = build()
    options: dict[str, Any] = {"max_new_tokens": 4, "per": per, "min_new_tokens": 4}
    scan = torchfmri.scan(model, None, [SHORT, LONG], attention="L1.attn", **options)
    plain = torchfmri.scan(model, None, [SHORT, LONG], **options)
    for number in (0, 1):
        ids = scan[number].tokens.ids.tolist()
        assert ids == plain[number].tokens.ids.tolist()
        assert np.array_equal(
            scan[number].voxels["activation"], plain[number].voxels["activation"], equal_nan=True
        )
        for layer in (0, 1):
            pattern = eager_pattern(ids, layer)
            for score in SCORES:
                names, values = scan.attention(score, f"*.{layer}.self_attn", sequence=number)
                assert names[2] == f"model.layers.{layer}.self_attn[head 2]"
                expected = by_hand(pattern, ids, score)
                assert np.allclose(values, expected, atol=1e-5, equal_nan=True), score
        kept = scan.attention_pattern("model.layers.1.self_attn", sequence=number)
        for name in ("L1.attn", "blocks.1.attn.hook_pattern", "layers.1.self_attn"):
            assert np.array_equal(scan.attention_pattern(name, sequence=number), kept)
        assert np.allclose(kept, eager_pattern(ids, 1), atol=1e-6)
    with pytest.raises(LayerNotFoundError):
        scan.attention_pattern("model.layers.0.self_attn", sequence=0)


def test_readouts_are_stored_and_loaded(tmp_path: Path) -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    scan = torchfmri.scan(
        model, tokenizer, ["The cat", "Once upon a time there"], max_new_tokens=3, per=None,
        attention="*.2.self_attn", lens=True, features={"L1.mlp": torch.relu},
    )  # fmt: skip
    scan.save(tmp_path / "a.fmri")
    loaded = torchfmri.load(tmp_path / "a.fmri")
    for number in (0, 1):
        for score in SCORES:
            before, after = (each.attention(score, sequence=number) for each in (scan, loaded))
            assert before.names == after.names  # blocks in their order, not by alphabet
            assert np.array_equal(before.values, after.values, equal_nan=True)
        layer = "model.layers.2.self_attn"
        patterns = [each.attention_pattern(layer, sequence=number) for each in (scan, loaded)]
        assert np.array_equal(*patterns)
        lenses = [each.lens(tokenizer, sequence=number) for each in (scan, loaded)]
        assert np.array_equal(lenses[0].rank, lenses[1].rank)
        assert lenses[0].table(0) == lenses[1].table(0)
        assert np.array_equal(
            scan.features(sequence=number)[0], loaded.features("L1.mlp", sequence=number)[0]
        )
    dataset = loaded.to_xarray()
    assert "tensor_lens@rank" in dataset
    assert f"tensor_{layer}@attention" not in dataset  # of another width in each sequence
    assert loaded.plot_heads("first", sequence=0).figure is not None
    assert len(loaded.plot_attention(layer, [0, 2], sequence=1).axes) == 3


def test_names_of_places_work_on_a_stored_scan(tmp_path: Path) -> None:
    model = ARCHITECTURES["gpt2"].build()
    torchfmri.scan(model, None, SHORT, max_new_tokens=0, per=None).save(tmp_path / "a.fmri")
    scan = torchfmri.load(tmp_path / "a.fmri")
    for name, layer in (
        ("L1.mlp", "transformer.h.1.mlp"),
        ("layers.0.self_attn", "transformer.h.0.attn"),
    ):
        assert scan.values("activation", pattern=name).names == (layer,)
        assert scan.statistics(name) == scan.statistics(layer)
        assert scan.plot_voxels(name).get_title() == scan.plot_voxels(layer).get_title()
    every = scan.values("activation", pattern=["L*.mlp", "L0"]).names
    assert every == ("transformer.h.0", "transformer.h.0.mlp", "transformer.h.1.mlp")
    with pytest.raises(InspectionError, match=r"head 1 of the inputs.*c_proj"):
        scan.values("activation", pattern="L0H1")
    with pytest.raises(InspectionError, match="stands for 2 layers"):
        scan.statistics("L*.mlp")


def test_the_lens_of_a_scan_is_that_of_its_text() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    prompts = ["The capital of France is", "The cat"]
    scan = torchfmri.scan(model, tokenizer, prompts, max_new_tokens=3, per=None, lens=True)
    for number in (0, 1):
        found = scan.lens(tokenizer, sequence=number)
        own = torchfmri.lens(model, tokenizer, scan[number].tokens.ids.tolist())
        assert found.layers == own.layers
        assert np.array_equal(found.rank, own.rank)
        assert np.allclose(found.probability, own.probability, rtol=1e-4, equal_nan=True)
        assert found.top.shape == own.top.shape
        assert np.array_equal(found.top[-1, :, 0], own.top[-1, :, 0])
        # What the last row says of the tokens is the surprisal of the scan, one token earlier.
        surprisal = -np.log(found.probability[-1, :-1])
        seen = ~np.isnan(scan[number].tokens.surprisal[1:])  # of what it wrote
        assert seen.sum() == 3
        assert np.allclose(surprisal[seen], scan[number].tokens.surprisal[1:][seen], atol=1e-4)
    assert scan.lens(sequence=0).spell(5) == "#5"


def routed(model: nn.Module, routers: list[str], ids: list[int]) -> dict[str, Any]:
    """What the routers return for one sequence alone: logits, weights and experts."""
    seen: dict[str, Any] = {}
    handles = [
        model.get_submodule(layer).register_forward_hook(
            lambda _, x, y, layer=layer: seen.update({layer: y})
        )
        for layer in routers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss"])
def test_experts_of_mixtures(name: str) -> None:
    model = build(name, "eager")
    scan = torchfmri.scan(model, None, [SHORT, LONG], max_new_tokens=0, per=None, experts=True)
    for number, ids in enumerate((SHORT, LONG)):
        found = scan.experts(sequence=number)
        seen = routed(model, list(found), ids)
        assert len(found) == (1 if name == "deepseek-v3" else 2)
        for layer, experts in found.items():
            logits, weights, chosen = seen[layer]
            assert np.array_equal(experts.ids, chosen)
            assert np.allclose(experts.weights, weights, atol=1e-6)
            entropy = torch.distributions.Categorical(logits=logits.double()).entropy()
            assert np.allclose(experts.entropy, entropy, atol=1e-5)
            assert experts.load(4).sum() == chosen.numel()


class _Dictionary(nn.Module):
    """A sparse autoencoder as SAELens has them, as far as we look."""

    class cfg:  # noqa: N801
        hook_name = "blocks.1.hook_resid_post"

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(16, 40)

    def encode(self, activations: Tensor) -> Tensor:
        return (self.matrix(activations) - 0.1).relu()


def test_features_are_the_strongest_of_an_encoder() -> None:
    model, sae = build(), _Dictionary()
    scan = torchfmri.scan(model, None, LONG, max_new_tokens=0, per=None, features=sae)
    ids, values = scan.features()
    with torch.no_grad():
        seen: list[Tensor] = []
        handle = model.model.layers[1].register_forward_hook(  # type: ignore[union-attr,index,operator]
            lambda _, x, y: seen.append(y if isinstance(y, Tensor) else y[0])
        )
        model(input_ids=torch.tensor([LONG]))
        handle.remove()
        expected = sae.encode(seen[0])[0]
    dense = np.zeros((len(LONG), 40), np.float32)
    for row in range(len(LONG)):
        on = ids[row] >= 0
        dense[row, ids[row][on]] = values[row][on]
        assert not values[row][~on].any()
    assert (expected > 0).any()
    assert (expected == 0).any()
    assert np.allclose(dense, expected, atol=1e-6)


def test_features_at_heads_and_by_function() -> None:
    model = build()
    scan = torchfmri.scan(
        model, None, LONG, max_new_tokens=0, per=None,
        features={"L0H2": lambda z: z.relu(), "L0.mlp": lambda x: x.abs()},
    )  # fmt: skip
    assert scan.features("L0H2")[0].shape == (8, 4)  # a head has 4 units
    assert scan.features("L0.mlp")[0].shape == (8, 16)
    with pytest.raises(InspectionError, match=r"read at L0\.mlp, L0H2"):
        scan.features()


def test_a_dataset_keeps_its_readouts_and_refuses_others(tmp_path: Path) -> None:
    model = build()
    rows = [{"ids": SHORT}, {"ids": LONG}]
    options = ScanOptions(per=None, attention=True, lens=True)
    for _ in range(2):  # the second time there is nothing left to do
        torchfmri.scan_dataset(model, None, rows, tmp_path / "a.fmri", 2, options=options)
    loaded = torchfmri.load(tmp_path / "a.fmri")
    assert [each.attention("first", sequence=i).values.shape for i, each in enumerate([loaded] * 2)]
    assert len(loaded) == 2
    with pytest.raises(InspectionError, match="'readouts' is"):
        torchfmri.scan_dataset(
            model, None, [*rows, {"ids": [5]}], tmp_path / "a.fmri", 2,
            options=ScanOptions(per=None, lens=True),
        )  # fmt: skip


def test_what_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    scan = torchfmri.scan(model, None, SHORT, max_new_tokens=0, per=None)
    for act, words in (
        (scan.attention, "attention=True"),
        (scan.plot_heads, "attention=True"),
        (lambda: scan.attention_pattern("L0"), "attention='L3.attn'"),
        (scan.lens, "lens=True"),
        (scan.experts, "experts=True"),
        (scan.features, "features="),
        (lambda: scan.attention("sharpness"), "score='sharpness'"),
    ):
        with pytest.raises(InspectionError, match=words):
            act()
    for options, words in (
        ({"attention": "*.attn"}, "attn"),
        ({"attention": "L0H1"}, "L0H1"),
        ({"attention": 3}, "3"),
        ({"lens": "yes"}, "lens='yes'"),
        ({"features": {"L9.mlp": torch.relu}}, "blocks"),
        ({"features": {"L0.mlp": 3}}, "no|encode"),
        ({"features": torch.relu}, "hook_name"),
        ({"features": {"*.mlp": torch.relu}}, "2 places"),
        ({"features": {"L0.mlp": lambda x: x.sum()}}, "one row of features per token"),
        ({"features": {"L0.mlp": torch.nn.Linear(99, 5)}}, r"'L0\.mlp' failed on values .*99x5"),
    ):
        with pytest.raises(InspectionError, match=words):
            torchfmri.scan(model, None, SHORT, 0, None, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(readouts, "MOST_PATTERN_BYTES", 100)
    with pytest.raises(MemoryLimitError, match="attention=True keeps the scores"):
        torchfmri.scan(model, None, SHORT, 0, None, attention="*")
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_models_without_attention_or_experts_are_named() -> None:
    scan = torchfmri.scan(
        ARCHITECTURES["mamba"].build().eval(), None, SHORT, 0, None, attention=True
    )
    assert "attention: none was computed" in scan.meta["missed"][""]
    assert "not captured: the model" in scan.table()
    scan = torchfmri.scan(build(), None, SHORT, 0, None, experts=True)
    assert scan.meta["missed"][""] == "experts: no layer of the model is a router"
