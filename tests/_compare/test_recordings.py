"""Sides that were recorded elsewhere: saved inspections, scans, exported hidden states."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import torchfmri
from benchmarks._compare_models import batch, build
from torchfmri import (
    FileFormatError,
    Inspection,
    InspectionError,
    Inspector,
    Run,
    compare,
    import_hidden_states,
)

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ("The capital of France is Paris.", "What is the capital?")


@pytest.fixture(scope="module")
def tiny() -> Any:
    return torchfmri.load_model("tiny")


def export(folder: Path, model: nn.Module, tokenizer: Any, dtype: torch.dtype) -> None:
    """Write one file per request, as vLLM documents it: the residual stream after each layer."""
    for number, text in enumerate(TEXTS):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            inspector = Inspector(model, keep="tensors")
            inspector.watch([f"model.layers.{n}" for n in range(len(model.model.layers))])
            inspection = inspector.run_inspection(ids)
        seen = [record.activations for record in inspection.values()]
        states = torch.stack([each[0] for each in seen], 1).to(dtype)
        assert states.shape[:2] == (ids.shape[1], len(model.model.layers))
        save_file({"hidden_states": states, "token_ids": ids[0]}, folder / f"{number}.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("named", [True, False])
def test_exported_hidden_states_agree(
    tiny: Any, tmp_path: Path, dtype: torch.dtype, named: bool
) -> None:
    model, tokenizer = tiny
    export(tmp_path, model, tokenizer, dtype)
    count = len(model.model.layers)
    layers = list(range(1, count + 1)) if named else None
    side = import_hidden_states(tmp_path, tokenizer, layers=layers)
    assert side.token_ids.shape[0] == len(TEXTS)
    found = compare(model, side)
    assert found.agree, str(found)
    assert len(found.pairs) == count
    assert any("activations only" in note for note in found.notes)
    assert any(("end of the name" if named else "order and shape") in n for n in found.notes)


def test_layers_in_any_order_beside_lock_files(tiny: Any, tmp_path: Path) -> None:
    """vLLM keeps layers in the order in which they were asked for, and a lock for each file."""
    model, tokenizer = tiny
    export(tmp_path, model, tokenizer, torch.bfloat16)
    for path in list(tmp_path.iterdir()):
        kept = load_file(path)
        kept["hidden_states"] = kept["hidden_states"][:, [4, 0, 2]].contiguous()
        save_file(kept, path)
        path.with_name(f"{path.name}.lock").touch()
    found = compare(model, import_hidden_states(tmp_path, tokenizer, layers=[5, 1, 3]))
    assert found.agree, str(found.first)
    layers = {pair.place.layer for pair in found.pairs}
    assert layers == {"model.layers.0", "model.layers.2", "model.layers.4"}
    assert not compare(model, import_hidden_states(tmp_path, tokenizer, layers=[1, 3, 5])).agree


def test_a_layer_that_differs_from_the_export_is_found(tiny: Any, tmp_path: Path) -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    export(tmp_path, model, tokenizer, torch.float32)
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(1.05)
    found = compare(model, import_hidden_states(tmp_path, tokenizer, layers=[1, 2, 3, 4, 5])).first
    assert found is not None
    assert (found.layer, found.token) == ("model.layers.3", 0)
    assert found.text == tokenizer.decode([tokenizer(TEXTS[0])["input_ids"][0]])


def test_token_ids_may_be_floats_that_hold_them_exactly(tiny: Any, tmp_path: Path) -> None:
    model, tokenizer = tiny
    export(tmp_path, model, tokenizer, torch.float32)
    expected = import_hidden_states(tmp_path, tokenizer).token_ids
    for path in tmp_path.iterdir():
        kept = load_file(path)
        save_file({**kept, "token_ids": kept["token_ids"].float()}, path)
    side = import_hidden_states(tmp_path, tokenizer)
    assert side.token_ids.dtype == torch.long
    assert torch.equal(side.token_ids, expected)
    assert compare(model, side).agree


def write(path: Path, **tensors: Tensor) -> None:
    save_file(tensors, path)


def bad_exports(folder: Path, tokenizer: Any) -> dict[str, tuple[Any, str]]:
    """Name -> (how to import, what the error says)."""
    states, ids = torch.zeros(4, 2, 8), torch.arange(4)
    places = {}
    for name, tensors in {
        "no ids": {"hidden_states": states},
        "lengths": {"hidden_states": states, "token_ids": torch.arange(5)},
        "shape": {"hidden_states": states[0], "token_ids": ids},
        "vocabulary": {"hidden_states": states, "token_ids": ids + 10_000_000},
        "whole": {"hidden_states": states.int(), "token_ids": ids},
        "nothing": {"hidden_states": states[:0], "token_ids": ids[:0]},
        "right": {"hidden_states": states, "token_ids": ids},
        "fraction": {"hidden_states": states, "token_ids": torch.tensor([1, 2.5, 3, 4])},
        "negative": {"hidden_states": states, "token_ids": torch.tensor([1, 2, 3, -1])},
        "nan": {"hidden_states": states, "token_ids": torch.full((4,), math.nan)},
        "rounded": {"hidden_states": states, "token_ids": (ids * 100).bfloat16()},
    }.items():
        place = folder / name
        place.mkdir()
        write(place / "0.safetensors", **tensors)
        places[name] = place
    half = folder / "half"
    half.mkdir()
    whole = (places["right"] / "0.safetensors").read_bytes()
    (half / "0.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "empty").mkdir()
    return {
        "no ids": (lambda: import_hidden_states(places["no ids"]), "no 'token_ids', only"),
        "lengths": (lambda: import_hidden_states(places["lengths"]), "4 tokens and the ids of 5"),
        "shape": (lambda: import_hidden_states(places["shape"]), r"\(tokens, layers, units\)"),
        "whole": (lambda: import_hidden_states(places["whole"]), "hidden_states is int32"),
        "nothing": (lambda: import_hidden_states(places["nothing"]), "holds no token"),
        "vocabulary": (
            lambda: import_hidden_states(places["vocabulary"], tokenizer), "another one",
        ),
        "layers": (
            lambda: import_hidden_states(places["right"], layers=[1]), "the files hold 2 layers",
        ),
        "twice": (
            lambda: import_hidden_states(places["right"], layers=[1, 1]), "each layer once",
        ),
        "fraction": (
            lambda: import_hidden_states(places["fraction"]), r"token_ids\[1\] is 2.5; tokens are",
        ),
        "negative": (lambda: import_hidden_states(places["negative"]), r"token_ids\[3\] is -1"),
        "nan": (lambda: import_hidden_states(places["nan"]), r"token_ids\[0\] is nan"),
        "rounded": (
            lambda: import_hidden_states(places["rounded"]),
            "bfloat16, which rounds whole numbers above 256, and the largest is 300: write it as",
        ),
        "half": (lambda: import_hidden_states(half), "0.safetensors"),
        "empty": (lambda: import_hidden_states(folder / "empty"), "no .safetensors file"),
        "missing": (lambda: import_hidden_states(folder / "nowhere"), "no such folder"),
    }  # fmt: skip


def test_bad_exports_are_explained(tiny: Any, tmp_path: Path) -> None:
    for act, match in bad_exports(tmp_path, tiny.tokenizer).values():
        with pytest.raises(InspectionError, match=match):
            act()


def test_another_number_of_layers_is_explained(tiny: Any, tmp_path: Path) -> None:
    ids = torch.tensor(tiny.tokenizer(TEXTS[0])["input_ids"])
    width = tiny.model.config.hidden_size
    write(tmp_path / "0.safetensors", hidden_states=torch.zeros(len(ids), 2, width), token_ids=ids)
    with pytest.raises(InspectionError, match=r"2 layers without names.*5 blocks.*layers="):
        compare(tiny.model, import_hidden_states(tmp_path))


def test_a_layer_that_the_model_does_not_have_is_explained(tiny: Any, tmp_path: Path) -> None:
    ids = torch.tensor(tiny.tokenizer(TEXTS[0])["input_ids"])
    width = tiny.model.config.hidden_size
    write(tmp_path / "0.safetensors", hidden_states=torch.zeros(len(ids), 2, width), token_ids=ids)
    exported = import_hidden_states(tmp_path, layers=[1, 99])
    with pytest.raises(InspectionError, match=r"states of 'layers.98', and a has no such layer"):
        compare(tiny.model, exported)


# -- saved inspections ---------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_an_inspection_is_saved_and_loaded(tiny: Any, tmp_path: Path, keep: str) -> None:
    inspector = Inspector(tiny.model, keep=keep)
    inspector.watch("*", ["activations", "gradients", "parameter_gradients"])
    data = tiny.tokenizer(TEXTS[0], return_tensors="pt")
    before = inspector.run_inspection({**data, "labels": data["input_ids"]})
    path = before.save(tmp_path / "run.inspection")
    after = Inspection.load(path)
    assert after.table() == before.table()
    assert after.to_dict() == before.to_dict()
    assert list(after) == list(before)
    if keep == "tensors":
        layer = "model.layers.1.mlp"
        assert torch.equal(after[layer].activations, before[layer].activations)
        assert torch.equal(after[layer].gradients, before[layer].gradients)
    assert compare(path, before).agree
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(FileFormatError):
        Inspection.load(path)


def test_padding_and_dtypes_survive(tmp_path: Path) -> None:
    from benchmarks._compare_models import batch, build

    inspector = Inspector(build("llama").bfloat16(), keep="tensors")
    before = inspector.run_inspection(batch("llama"))
    after = Inspection.load(before.save(tmp_path / "x"))
    layer = "model.layers.0.mlp"
    assert after["model.norm"].activations.dtype == torch.bfloat16
    assert layer not in after
    one, two = (each["model.norm"].statistics() for each in (before, after))
    assert one.count == two.count < before["model.norm"].activations.numel(), "padding is left out"


def test_a_model_against_its_recording_of_another_machine(tmp_path: Path) -> None:
    from benchmarks._compare_models import batch, build

    model = build("qwen3")
    inspector = Inspector(model, keep="tensors")
    inspector.watch("*", ["activations", "gradients"])
    path = inspector.run_inspection(batch("qwen3")).save(tmp_path / "other")
    assert compare(model, path, data=batch("qwen3")).agree
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1.1)
    found = compare(model, path, data=batch("qwen3")).first
    assert found is not None
    assert found.layer == "model.layers.1.self_attn.v_proj"
    assert "factor" in [kind.name for kind in found.kinds], "told from the values alone"


def test_scans(tiny: Any, tmp_path: Path) -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    scan = torchfmri.scan(model, tokenizer, TEXTS[0], max_new_tokens=3)
    scan.save(tmp_path / "a.fmri")
    assert compare(tmp_path / "a.fmri", scan).agree
    assert compare(model, scan).agree
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.1)
    found = compare(model, tmp_path / "a.fmri").first
    assert found is not None
    assert found.layer == "model.layers.2.mlp.up_proj"


@pytest.mark.parametrize("turned", [False, True])
def test_a_scan_has_the_rounding_of_the_dtype_of_its_model(turned: bool, tmp_path: Path) -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    text = "What is 2 + 2? The answer"  # the gradients of its keys differ by 0.14
    exact = torchfmri.scan(model, tokenizer, text, max_new_tokens=1)
    torchfmri.scan(model.bfloat16(), tokenizer, text, max_new_tokens=1).save(tmp_path / "b")
    rounded = torchfmri.load(tmp_path / "b")
    assert compare(*(exact, rounded)[:: -1 if turned else 1]).agree
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.2)
    wrong = torchfmri.scan(model, tokenizer, text, max_new_tokens=1)
    first = compare(*(exact, wrong)[:: -1 if turned else 1]).first
    assert first is not None
    assert first.layer == "model.layers.1.mlp.down_proj"


def test_scans_are_compared_in_the_order_in_which_modules_finish() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    scans = []
    for scale in (1.0, 1.02):
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(scale)
        scans.append(torchfmri.scan(model, tokenizer, TEXTS[0], max_new_tokens=1))
    found = compare(*scans).first
    assert found is not None
    assert found.layer == "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("turned", [False, True])
def test_a_gradient_that_never_arrived_in_a_recording_counts(turned: bool) -> None:
    model, data = build("llama"), batch("llama")
    other = build("llama")
    attention = other.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda **given: (forward(**given)[0].detach(), None)
    inspector = Inspector(other, keep="tensors")
    inspector.watch("*", ["activations", "gradients"])
    recording = inspector.run_inspection(data)
    sides = (recording, model) if turned else (model, recording)
    found = compare(*sides, data=data).first
    assert found is not None
    assert (found.direction, found.layer) == ("backward", "model.layers.1.self_attn")
    assert found.reason == f"a gradient arrives in {'b' if turned else 'a'} only"


def test_a_call_that_never_runs_the_model_is_explained() -> None:
    run = Run(nn.Linear(3, 3), torch.randn(2, 3))
    scripted = torch.jit.trace(run.model, run.data)
    with pytest.raises(InspectionError, match="is TorchScript, which shows no layers"):
        compare(scripted, run.model, data=run.data)
    with pytest.raises(InspectionError, match="did not run the Linear"):
        compare(run, Run(run.model, run.data, call=lambda model, data: None))


def test_recorded_tokens_of_another_vocabulary_are_explained() -> None:
    model = build("llama")
    ids = torch.randint(5, 60, (2, 7))
    inspector = Inspector(model, keep="tensors")
    inspector.watch("*", ["activations"])
    recording = inspector.run_inspection({"input_ids": ids})
    small = build("llama", vocab_size=int(ids.max()))
    with pytest.raises(InspectionError, match="another tokenizer made it"):
        compare(small, recording)
