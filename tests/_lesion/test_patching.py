"""Activation patching: 0 is corrupted, 1 is clean, tokens are matched by role."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import torchfmri
from tests._edit.written_out import logits_of
from tests.architectures import ARCHITECTURES
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
    for row, name in list(enumerate(found.names))[::3]:
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
    with pytest.raises(InspectionError, match="given twice"):
        patch(*tiny, CLEAN, CORRUPTED, " happy", pairs=[(0, 1), (2, 1)])


# -- path patching -------------------------------------------------------------------------------

CLEAN_IDS, CORRUPTED_IDS = [5, 6, 7, 8, 9], [5, 11, 7, 8, 12]
SENDERS = {
    "L0H2": ("blocks.0.attn.hook_z", slice(8, 12), ["blocks.0.hook_mlp_out"]),
    "L0.mlp": ("blocks.0.hook_mlp_out", slice(None), []),
    "blocks.0.hook_resid_pre": (
        "blocks.0.hook_resid_pre",
        slice(None),
        ["blocks.0.hook_attn_out", "blocks.0.hook_mlp_out"],
    ),
}
RECEIVERS = {
    "L1H3.q": ("blocks.1.attn.hook_q", slice(12, 16)),
    "L1H1": ("blocks.1.attn.hook_z", slice(4, 8)),
    "L1.mlp": ("blocks.1.hook_mlp_out", slice(None)),
    "logits": None,
}


def path_by_hand(model: nn.Module, sender: str, receiver: str) -> float:
    """The logit difference of the corrupted prompt, by forward passes that are written out."""
    seen: dict[str, dict[str, torch.Tensor]] = {}
    place, units, held = SENDERS[sender]
    held = [*held, "blocks.1.hook_attn_out", "blocks.1.hook_mlp_out"]
    arrives = RECEIVERS[receiver]
    arrived = {}

    def keep(into: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> torch.Tensor:
        into[name] = value
        return value

    def first(name: str, value: torch.Tensor) -> torch.Tensor:
        arrived[name] = value
        if name == place:
            value = value.clone()
            value[..., units] = seen["clean"][name][..., units]
        return seen["corrupted"][name] if name in held else value

    def second(name: str, value: torch.Tensor) -> torch.Tensor:
        if arrives is not None and name == arrives[0]:
            value = value.clone()
            value[..., arrives[1]] = arrived[name][..., arrives[1]]
        return value

    ids = {"clean": torch.tensor([CLEAN_IDS]), "corrupted": torch.tensor([CORRUPTED_IDS])}
    with torch.no_grad():
        for name, each in ids.items():
            into = seen.setdefault(name, {})
            logits_of(model, each, lambda *given, into=into: keep(into, *given))
        logits = logits_of(model, ids["corrupted"], first)
        if arrives is not None:
            logits = logits_of(model, ids["corrupted"], second)
    return float(logits[0, -1, 3] - logits[0, -1, 4])


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_paths_are_passes_that_are_written_out(receiver: str) -> None:
    model = ARCHITECTURES["llama"].build("eager", attention_dropout=0.0).eval().double()
    options = {"of": list(SENDERS), "batch": 2}
    found = patch(model, None, CLEAN_IDS, CORRUPTED_IDS, [3], [4], to=receiver, **options)
    wanted = [path_by_hand(model, name, receiver) for name in found.names]
    np.testing.assert_allclose(found.patched[:, 0], wanted, atol=1e-9)
    assert np.abs(found.patched[:, 0] - found.corrupted).min() > 1e-9  # something arrived
    whole = patch(model, None, CLEAN_IDS, CORRUPTED_IDS, [3], [4], **options)
    assert np.abs(found.patched - whole.patched).max() > 1e-6  # and not everything
    assert f"on the direct way to {receiver}" in " ".join(found.table().split())


@pytest.mark.parametrize(
    ("of", "to"),
    [
        ("L3H*", ["L3H*.q", "L1.mlp"]),
        ("L3.mlp", "L3H1"),
        ("L3", "L3"),
        ("L0H1", "model.embed_tokens"),
    ],
)
def test_a_path_that_does_not_exist_is_refused(tiny: Subject, of: str, to: str) -> None:
    with pytest.raises(InspectionError, match=r"No path leads from L\d.* to .*name later ones"):
        patch(*tiny, CLEAN, CORRUPTED, " happy", of=of, to=to)


def test_places_from_which_no_path_leads_are_noted(tiny: Subject) -> None:
    found = patch(*tiny, CLEAN, CORRUPTED, " happy", of=["heads", "mlps"], to="L2.mlp", batch=7)
    late = [each for each in found.names if int(each[1]) > 2 or each == "L2.mlp"]
    assert list(found.unreached) == late
    scores = dict(zip(found.names, found.score[:, 0], strict=True))
    assert all((scores[each] == 0) == (each in late) for each in found.names)
    grey = found.plot().axes[0]
    assert "on the direct way to L2.mlp\n(grey: no path)" in grey.get_title(loc="left")
    assert int(np.ma.getmaskarray(grey.images[0].get_array()).sum()) == len(late)
    assert f"no path leads to L2.mlp from {len(late)} places (L2.mlp, L3H0," in found.table(
        width=200
    )


def test_attention_reaches_no_mlp_that_stands_beside_it() -> None:
    """GPT-NeoX computes both from the same stream."""
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=67, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config).eval().double()
    with pytest.raises(InspectionError, match=r"No path leads from L1H0.* to L1\.mlp"):
        patch(model, None, CLEAN_IDS, CORRUPTED_IDS, [3], [4], of="L1H*", to="L1.mlp")
    found = patch(model, None, CLEAN_IDS, CORRUPTED_IDS, [3], [4], of="L0H*", to="L1.mlp")
    assert found.unreached == ()
    assert np.abs(found.score).min() > 0


def test_everything_arrives_by_the_last_block(tiny: Subject) -> None:
    """Nothing comes after its MLP, so that the direct way is the only one."""
    options = {"of": ["L4H*", "L4.mlp"], "per": "token"}
    found = patch(*tiny, CLEAN, CORRUPTED, " happy", to="logits", **options)
    whole = patch(*tiny, CLEAN, CORRUPTED, " happy", **options)
    np.testing.assert_allclose(found.patched[-1], whole.patched[-1], atol=1e-5)
    assert found.names[-1] == "L4.mlp"
    assert np.abs(found.patched[:-1] - whole.patched[:-1]).max() > 1e-4  # its MLP reads its heads


def test_bad_paths(tiny: Subject) -> None:
    for to, words in (
        ("L9H0", "the model has 5 blocks"),
        (["logits", "L1H0"], "or 'logits'"),
        ("L1.pattern", "cannot be edited"),
        (3, "give names of places"),
    ):
        with pytest.raises(InspectionError, match=words):
            patch(*tiny, CLEAN, CORRUPTED, " happy", of="L0H0", to=to)
    with pytest.raises(InspectionError, match="is in no block"):
        patch(*tiny, CLEAN, CORRUPTED, " happy", of="model.embed_tokens", to="logits")
    with pytest.raises(InspectionError, match="neither in the attention nor in the MLP"):
        patch(*tiny, CLEAN, CORRUPTED, " happy", of="model.layers.0.input_layernorm", to="logits")
