"""Names of places on scans that are stored: the model is gone, its table of places is not."""

import json
from typing import Any

import pytest

from tests.architectures import ARCHITECTURES
from torchfmri import InspectionError
from torchfmri._model import named_layers, place_table, places_of, stored_layers

NAMES = (
    *("L1", "L1.attn", "L1.mlp", "L*.mlp", "blocks.1.hook_resid_post", "blocks.1.hook_attn_out"),
    *("blocks.*.hook_mlp_out", "layers.1.self_attn", "layers.1.mlp", "blocks.1.attn.hook_q"),
    *("layers.1.self_attn.o_proj", "h.0.mlp.down_proj", "layers.1.self_attn.q_proj"),
)


def stored(name: str) -> tuple[dict[str, Any], list[str], Any]:
    """The table as a file has it, the layers, and what resolves names in the model itself."""
    layers = named_layers(ARCHITECTURES[name].build())
    table = json.loads(json.dumps(place_table(layers)))
    return table, [each for each in layers if each], layers


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "bert", "mixtral", "vit"])
def test_names_mean_the_same_layers_as_in_the_model(name: str) -> None:
    table, known, layers = stored(name)
    agreed = 0
    for each in NAMES:
        try:
            places = places_of(layers, each)
        except InspectionError:
            if each.startswith(("layers", "h.")):
                assert stored_layers(each, known, table) == []
                continue
            with pytest.raises(InspectionError, match="has no known"):
                stored_layers(each, known, table)
            continue
        if any(place.what != "activations" or place.units is not None for place in places):
            with pytest.raises(InspectionError, match=r"is the input of layer|part of the"):
                stored_layers(each, known, table)
            continue
        assert stored_layers(each, known, table) == [place.layer for place in places]
        agreed += 1
    assert agreed >= 6


def test_an_encoder_and_a_decoder_are_told_apart() -> None:
    table, known, _ = stored("t5")
    assert stored_layers("decoder.L1", known, table) == ["decoder.block.1"]
    with pytest.raises(InspectionError, match=r"'L1' is ambiguous.*'encoder\.L1'"):
        stored_layers("L1", known, table)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("L9.mlp", "the model has 2 blocks, 0 to 1"),
        ("L1H2", r"head 2 of the inputs of layer 'model\.layers\.1\.self_attn\.o_proj'"),
        ("L1H2.q", r"head 2 of the activations.*q_proj.*by='voxel'"),
        ("blocks.1.attn.hook_z", r"is the input of layer.*o_proj'.*heads=True"),
        ("blocks.1.attn.hook_pattern", r"attention pattern.*scan\.attention\(\)"),
        ("blocks.1.hook_resid_pre", "is the input of layer"),
        ("blocks.1.attn.hook_result", "the outputs of single heads are never computed"),
        ("encoder.L1", "no list of blocks is called 'encoder'"),
        ("L1.cross_attn", "is not a part of a block"),
        ("blocks.1.hook_cross_attn_out", "has no known hook_cross_attn_out; it has block"),
    ],
)
def test_what_a_scan_does_not_hold_is_refused_by_name(name: str, words: str) -> None:
    table, known, _ = stored("llama")
    with pytest.raises(InspectionError, match=words):
        stored_layers(name, known, table)


def test_a_layer_that_was_not_scanned_is_named() -> None:
    """Gemma adds the output of a norm: the MLP that the scan has is not what the name means."""
    table, known, _ = stored("gemma3")
    few = [each for each in known if each.endswith((".mlp", ".self_attn"))]
    with pytest.raises(InspectionError, match="post_feedforward_layernorm', which is not among"):
        stored_layers("L1.mlp", few, table)
    assert stored_layers("layers.1.mlp", few, table) == ["model.layers.1.mlp"]


def test_a_name_of_llamas_that_no_layer_has_is_none() -> None:
    """So that the caller says `LayerNotFoundError`, as of any other name of a layer."""
    table, known, _ = stored("llama")
    names = ("model.layers.99", "encoder.layer.1", "model.layers.1.mlpp", "layers.1.x", "h.9.mlp")
    for name in names:
        assert stored_layers(name, known, table) == stored_layers(name, known, None) == []
    few = [each for each in known if not each.endswith("mlp")]
    assert stored_layers("model.layers.1.mlp", few, table) == []


def test_what_each_head_wrote_is_found_where_it_was_scanned() -> None:
    table, known, _ = stored("llama")
    source = "model.layers.1.self_attn.o_proj.input"
    assert stored_layers("blocks.1.attn.hook_z", [*known, source], table) == [source]


def test_without_a_table_blocks_are_known_and_nothing_inside_them() -> None:
    _, known, _ = stored("gpt2")
    assert stored_layers("L1", known, None) == ["transformer.h.1"]
    assert stored_layers("L*", known, None) == ["transformer.h.0", "transformer.h.1"]
    assert stored_layers("wte", known, None) == stored_layers(3, known, None) == []
    for name in ("L1.mlp", "L1H2", "L7"):
        with pytest.raises(InspectionError, match="Name the layer as the model does"):
            stored_layers(name, known, None)


@pytest.mark.parametrize(
    "damage",
    [
        3,
        {"model.layers": 3},
        {"model.layers": {"of": [0]}},
        {"model.layers": {"of": [7], "parts": [{}]}},
        {"model.layers": {"of": [-1], "parts": [{}]}},
        {"model.layers": {"of": [0], "parts": [{"block": ["", "activations"]}]}},
        {"model.layers": {"of": [0], "parts": [{"block": [0, "activations", ""]}]}},
    ],
)
def test_a_damaged_table_is_refused(damage: Any) -> None:
    with pytest.raises(InspectionError, match="The scan is damaged"):
        stored_layers("L0", ["model.layers.0"], damage)


def test_one_block_that_runs_several_times_has_no_table() -> None:
    table, known, _ = stored("albert")
    assert table == {}
    with pytest.raises(InspectionError, match="Name the layer as the model does"):
        stored_layers("L0.mlp", known, table)
