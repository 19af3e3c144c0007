"""Names that people use already, compared with what the layers really compute."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.architectures import ARCHITECTURES
from torchfmri import InspectionError, Inspector, LayerNotFoundError
from torchfmri._model import Place, find_layers, named_layers, places_of

STREAM = ("llama", "qwen3", "qwen3-moe", "gpt2", "vit", "mixtral", "gemma", "gemma2", "gemma3",
          "phi3", "deepseek-v3", "gpt-oss")  # fmt: skip
PATTERNS = ("llama", "qwen3", "gpt2", "bert", "gemma2", "phi3", "mixtral")


def build(name: str) -> nn.Module:
    attention = "eager" if ARCHITECTURES[name].attention else None
    experts = "eager" if name in ("qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss") else None
    return ARCHITECTURES[name].build(attention, experts).eval().double()


def read(model: nn.Module, batch: dict[str, Tensor], places: list[Place]) -> list[Tensor]:
    """What each place holds in one pass, by plain hooks."""
    layers, found, handles = named_layers(model), {}, []
    for place in places:
        module = layers[place.layer]

        def before(_: nn.Module, given: tuple, keywords: dict, place: Place = place) -> None:
            found[place] = (given or tuple(keywords.values()))[0].detach().clone()

        def after(_: nn.Module, __: object, output: object, place: Place = place) -> None:
            found[place] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        if place.what == "inputs":
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(after))
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return [found[place] for place in places]


def batch_of(name: str) -> dict[str, Tensor]:
    batch = ARCHITECTURES[name].batch()
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def units_of(value: Tensor, place: Place, head: int) -> Tensor:
    assert place.heads is not None
    return torch.cat([value[..., a:b] for a, b in place.heads[head]], -1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", STREAM)
def test_the_parts_of_the_stream_add_up(name: str) -> None:
    model = build(name)
    hooks = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    places = [places_of(named_layers(model), f"blocks.1.hook_{each}")[0] for each in hooks]
    before, attention, middle, mlp, after = read(model, batch_of(name), places)
    torch.testing.assert_close(before + attention, middle, rtol=0, atol=1e-12)
    mlp = mlp.view_as(middle)
    torch.testing.assert_close(middle + mlp, after, rtol=0, atol=1e-12)
    assert not torch.allclose(before, after)


def test_a_block_that_norms_the_sums_has_the_stream_before_the_norms() -> None:
    model = build("bert")
    layers = named_layers(model)
    hooks = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    places = [places_of(layers, f"blocks.1.hook_{each}")[0] for each in hooks]
    before, attention, middle, mlp, after = read(model, batch_of("bert"), places)
    torch.testing.assert_close(before + attention, middle, rtol=0, atol=1e-12)
    norm = layers["bert.encoder.layer.1.attention.output.LayerNorm"]
    torch.testing.assert_close(norm(middle) + mlp, after, rtol=0, atol=1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PATTERNS)
def test_a_head_is_its_pattern_times_its_values(name: str) -> None:
    model = build(name)
    layers = named_layers(model)
    z, v = (places_of(layers, f"blocks.1.attn.hook_{each}")[0] for each in "zv")
    batch = batch_of(name)
    mixed, values = read(model, batch, [z, v])
    with torch.no_grad():
        pattern = model(**batch, output_attentions=True).attentions[1]
    assert z.heads is not None
    assert v.heads is not None
    group = len(z.heads) // len(v.heads)
    for head in range(len(z.heads)):
        expected = pattern[:, head].to(values.dtype) @ units_of(values, v, head // group)
        torch.testing.assert_close(units_of(mixed, z, head), expected, rtol=0, atol=1e-6)
    wrong = pattern[:, 0].to(values.dtype) @ units_of(values, v, 0)
    assert not torch.allclose(units_of(mixed, z, 1), wrong, atol=1e-6)


SMALL = {"vocab_size": 50, "hidden_size": 16}
OTHERS = {
    "bloom": {**SMALL, "n_layer": 2, "n_head": 4},
    "gpt_neox": {
        **SMALL,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
    },
    "mpt": {"vocab_size": 50, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OTHERS)
def test_fused_projections_and_layers_that_add_the_stream_themselves(name: str) -> None:
    config = AutoConfig.for_model(name, **OTHERS[name])
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    batch = {"input_ids": torch.randint(3, 50, (2, 7))}
    names = ["attn.hook_z", "attn.hook_v"]
    names += [f"hook_{each}" for each in ("resid_pre", "attn_out", "mlp_out", "resid_post")]
    z, v, *places = (places_of(named_layers(model), f"blocks.1.{each}")[0] for each in names)
    mixed, values, before, attention, mlp, after = read(model, batch, [z, v, *places])
    torch.testing.assert_close(before + attention + mlp, after, rtol=0, atol=1e-12)
    with torch.no_grad():
        pattern = model(**batch, output_attentions=True).attentions[1].double()
    for head in range(4):
        expected = pattern[:, head] @ units_of(values, v, head)
        torch.testing.assert_close(units_of(mixed, z, head), expected, rtol=0, atol=1e-6)


def test_queries_and_keys_of_a_fused_projection_make_the_pattern() -> None:
    model = build("gpt2")
    layers = named_layers(model)
    q, k = (places_of(layers, f"blocks.0.attn.hook_{each}")[0] for each in "qk")
    batch = {"input_ids": batch_of("gpt2")["input_ids"]}
    queries, keys = read(model, batch, [q, k])
    with torch.no_grad():
        pattern = model(**batch, output_attentions=True).attentions[0]
    scores = units_of(queries, q, 2) @ units_of(keys, k, 2).mT / 2.0  # heads have four units
    mask = torch.ones_like(scores, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(pattern[:, 2].double(), expected, rtol=0, atol=1e-6)


def test_short_names() -> None:
    layers = named_layers(build("llama"))
    (head,) = places_of(layers, "L1H2")
    assert (head.layer, head.what, head.units) == (
        "model.layers.1.self_attn.o_proj",
        "inputs",
        ((8, 12),),
    )
    assert places_of(layers, "blocks.1.attn.hook_z")[0].of_head(2).units == head.units
    assert [each.name for each in places_of(layers, "L*H1")] == ["L0H1", "L1H1"]
    assert [each.name for each in places_of(layers, "L0H*")] == ["L0H0", "L0H1", "L0H2", "L0H3"]
    assert [each.layer for each in places_of(layers, "L*.mlp")] == [
        "model.layers.0.mlp",
        "model.layers.1.mlp",
    ]


@pytest.mark.parametrize(("name", "layer"), [
    ("llama", "model.layers.1.self_attn"), ("gpt2", "transformer.h.1.attn"),
    ("bert", "bert.encoder.layer.1.attention"), ("vit", "vit.layers.1.attention"),
])  # fmt: skip
def test_plain_names_on_other_architectures(name: str, layer: str) -> None:
    assert Inspector(ARCHITECTURES[name].build()).layers("layers.1.self_attn") == [layer]


def test_an_encoder_and_a_decoder_are_told_apart() -> None:
    layers = named_layers(ARCHITECTURES["t5"].build())
    (place,) = places_of(layers, "decoder.L1H3")
    assert place.layer == "decoder.block.1.layer.0.SelfAttention.o"
    (cross,) = places_of(layers, "decoder.1.cross_attn.hook_z")
    assert cross.layer == "decoder.block.1.layer.1.EncDecAttention.o"
    with pytest.raises(InspectionError, match=r"ambiguous.*'encoder.L1H3'"):
        places_of(layers, "L1H3")


@pytest.mark.parametrize(
    ("architecture", "name", "words"),
    [
        ("llama", "L7H0", "2 blocks, 0 to 1"),
        ("llama", "L1H9", "4 heads, 0 to 3"),
        ("llama", "L1H3.k", "2 heads, 0 to 1"),
        ("llama", "L1H0.mlp", "no heads"),
        ("llama", "L1.foo", "not a part of a block"),
        ("llama", "blocks.1.attn.hook_result", "edit attn.hook_z"),
        ("llama", "blocks.1.attn.hook_zz", "Nearest: 'attn.hook_z'"),
        ("llama", "encoder.L1H1", "no list of blocks is called 'encoder'"),
        ("mamba", "L1H1", "no attention that torchfmri knows"),
        ("mamba", "blocks.0.hook_resid_mid", "no hook_resid_mid"),
        ("deepseek-v3", "L0H0.k", "no projection of a known name for its k"),
        ("albert", "L0H0", "calls it 3 times"),
    ],
)
def test_what_cannot_be_resolved_is_refused_by_name(
    architecture: str, name: str, words: str
) -> None:
    layers = named_layers(ARCHITECTURES[architecture].build())
    with pytest.raises(InspectionError, match=words):
        places_of(layers, name)


def test_a_model_without_blocks_and_a_name_that_is_none() -> None:
    layers = named_layers(nn.Linear(2, 2))
    with pytest.raises(InspectionError, match="has no list of blocks"):
        places_of(layers, "L0H0")
    with pytest.raises(LayerNotFoundError):
        places_of(layers, "layers.0.self_attn")
    with pytest.raises(LayerNotFoundError):
        places_of(layers, "fc9")


def test_heads_of_torchs_own_attention_are_refused() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
    with pytest.raises(InspectionError, match=r"nn.MultiheadAttention, which uses the weight"):
        places_of(named_layers(model), "L0H0")


def test_an_inspector_watches_what_a_layer_takes() -> None:
    model = build("llama")
    inspector = Inspector(model, keep="tensors")
    assert inspector.watch("blocks.1.attn.hook_z") == ["model.layers.1.self_attn.o_proj"]
    assert inspector.watched == {"model.layers.1.self_attn.o_proj": ("inputs",)}
    inspection = inspector.run_inspection(batch_of("llama"))
    (place,) = places_of(named_layers(model), "blocks.1.attn.hook_z")
    (wanted,) = read(model, batch_of("llama"), [place])
    assert torch.equal(inspection[place.layer].tensors("inputs"), wanted)


def test_an_inspector_lists_the_layers_at_which_places_are() -> None:
    inspector = Inspector(ARCHITECTURES["llama"].build())
    assert inspector.layers("L1.mlp") == ["model.layers.1.mlp"]
    assert inspector.layers("L1H0") == ["model.layers.1.self_attn.o_proj"]
    assert inspector.layers("blocks.0.attn.hook_z") == ["model.layers.0.self_attn.o_proj"]
    assert inspector.layers("blocks.0.hook_resid_pre") == ["model.layers.0"]
    every = inspector.layers("model.layers.*.mlp")
    assert inspector.layers("*.mlp", exclude="L0.mlp") == every[1:]
    inspector.watch("blocks.*.attn.hook_z")
    inspector.unwatch("blocks.0.attn.hook_z")
    assert list(inspector.watched) == ["model.layers.1.self_attn.o_proj"]


def test_where_only_whole_layers_can_be_taken_parts_are_refused() -> None:
    model = ARCHITECTURES["llama"].build()
    inspector = Inspector(model)
    for name in ("L1H0", "L1H0.q"):
        with pytest.raises(InspectionError, match=r"units 0 to \d, and layers are taken whole"):
            inspector.watch(name)
    with pytest.raises(InspectionError, match=r"the inputs of layer 'model\.layers\.0'. Watch it"):
        find_layers(named_layers(model), "blocks.0.hook_resid_pre")
    with pytest.raises(InspectionError, match="the model has 2 blocks"):
        inspector.layers("*.mlp", exclude="L7.mlp")


def test_statistics_are_found_by_these_names_too() -> None:
    inspector = Inspector(ARCHITECTURES["llama"].build())
    inspector.watch("*.mlp")
    inspector.run_inspection(batch_of("llama"))
    assert inspector.get_statistics("L1.mlp") == inspector.get_statistics("model.layers.1.mlp")


def test_a_plain_name_is_a_layer_without_heads_on_every_architecture() -> None:
    for name in ("llama", "gpt2"):
        layers = named_layers(ARCHITECTURES[name].build())
        (place,) = places_of(layers, "layers.1.self_attn.q_proj")
        assert place.heads is None, name
