"""What an examiner planted into models of many kinds: the layer, the token and true words."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from torchfmri import (
    Comparison,
    FileFormatError,
    History,
    InspectionError,
    Inspector,
    MemoryLimitError,
    compare,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def kinds_of(found: Comparison) -> list[str]:
    return [] if found.first is None else [kind.name for kind in found.first.kinds]


# -- ports ---------------------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(8, 12, bias=False) for _ in range(2))
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return x + y


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layers = nn.ModuleList(Gated() for _ in range(depth))

    def forward(self, input_ids: Tensor) -> Any:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Joined(nn.Module):
    """A port of the decoder above: gate and up are one layer, and layers have other names."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.w13, self.w2 = nn.Linear(8, 24, bias=False), copy.deepcopy(block.down)
        self.w13.weight.data = torch.cat([block.gate.weight.data, block.up.weight.data])

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.w13(x).chunk(2, -1)
        y: Tensor = self.w2(functional.silu(one) * two)
        return x + y


class Port(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tok, self.out = copy.deepcopy(model.words), copy.deepcopy(model.head)
        self.h = nn.ModuleList(Joined(each) for each in model.layers)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.tok(input_ids)
        for block in self.h:
            x = block(x)
        return self.out(x)


def test_a_layer_after_fused_ones_keeps_its_partner_with_a_wrong_row() -> None:
    """down lost its partner as soon as its weights differed, though its shape and place fit."""
    model: Any = Model()
    data = {"input_ids": torch.randint(0, 20, (2, 6))}
    port: Any = Port(model)
    assert compare(model, port, data=data).agree
    with torch.no_grad():
        port.h[2].w2.weight[3] *= 1.5
    first = compare(model, port, data=data).first
    assert first is not None
    assert (first.layer, first.partner) == ("layers.2.down", "h.2.w2")


def test_a_wrong_name_of_a_layer_is_quoted_as_it_was_given() -> None:
    """The error quoted the value of the mapping in the place of its key."""
    model: Any = Model()
    data = {"input_ids": torch.randint(0, 20, (2, 6))}
    with pytest.raises(InspectionError, match=r"\{...: 'nope'\}: b has no such layer"):
        compare(model, copy.deepcopy(model), data=data, names={"layers.0": "nope"})
    with pytest.raises(InspectionError, match=r"\{'nope': ...\}: a has no such layer"):
        compare(model, copy.deepcopy(model), data=data, names={"nope": "layers.0"})


# -- recordings ----------------------------------------------------------------------------------


def recorded(model: nn.Module, data: Any, layers: str | list[str] = "*") -> Any:
    inspector = Inspector(model, keep="tensors")
    inspector.watch(layers, ["activations", "gradients"])
    return inspector.run_inspection(data, loss=lambda y: y.float().square().mean())


def test_layers_that_were_not_recorded_are_not_called_missing() -> None:
    """A recording of the blocks alone: "only a has" the layers inside them was not true."""
    model: Any = Model()
    data = {"input_ids": torch.randint(0, 20, (2, 6))}
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layers[1].up.weight *= 1.1
    found = compare(model, recorded(other, data, [f"layers.{n}" for n in range(3)]), data=data)
    assert found.first is not None
    assert found.first.layer == "layers.1"
    assert "missing_layer" not in kinds_of(found)
    other.layers[1].up = nn.Sequential(other.layers[1].up, nn.Linear(12, 12))
    assert "missing_layer" in kinds_of(compare(model, other, data=data))


@pytest.mark.parametrize("damage", ["half", "more", "head"])
def test_a_damaged_recording_is_called_damaged(damage: str, tmp_path: Path) -> None:
    """It was said to be no file that torchfmri saved."""
    model: Any = Model()
    data = {"input_ids": torch.randint(0, 20, (2, 6))}
    path = recorded(model, data).save(tmp_path / "run.inspection")
    assert compare(path, path).agree
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[30] ^= 0xFF
    wrong = {"half": whole[: len(whole) // 2], "more": whole + b"xx", "head": bytes(changed)}
    path.write_bytes(wrong[damage])
    with pytest.raises(FileFormatError, match="damaged or a part of one"):
        compare(path, model, data=data)
    with pytest.raises(FileFormatError, match="no such file"):
        compare(tmp_path / "nowhere.inspection", model, data=data)


def test_a_damaged_history_is_called_damaged(tmp_path: Path) -> None:
    """As `History.load` says of the same file."""
    from benchmarks.compare import train

    path = train().history.save(tmp_path / "run.history")
    assert compare(path, path).agree
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(FileFormatError, match="damaged or a part of one"):
        compare(path, path)
    with pytest.raises(FileFormatError):
        History.load(path)


def test_the_spread_of_two_recordings_does_not_take_the_place_of_rounding() -> None:
    """Two float32 recordings hardly differ, and bfloat16 parted from them in the gradients."""
    torch.manual_seed(0)
    model: Any = Model(depth=8)
    data = {"input_ids": torch.randint(0, 20, (2, 6))}
    with torch.no_grad():
        for layer in model.layers:
            layer.down.weight *= 2
    several = [recorded(model, data), recorded(copy.deepcopy(model).double(), data)]
    rounded = copy.deepcopy(model).bfloat16()
    for sides in ((several, recorded(rounded, data)), (recorded(rounded, data), several)):
        found = compare(*sides)
        assert found.agree, str(found.first)
        assert max(pair.worst for pair in found.pairs) > 4 * torch.finfo(torch.bfloat16).eps
    with torch.no_grad():
        rounded.layers[1].down.weight *= 1.5
    first = compare(several, recorded(rounded, data)).first
    assert first is not None
    assert first.layer == "layers.1.down"


def test_a_difference_of_a_recording_is_said_to_be_named_where_it_is_seen() -> None:
    """What layers are given is not recorded: a fault in the code of a block was named at its
    first layer that shows it, as if that was sure."""
    model: Any = Model()
    data = {"input_ids": torch.randint(0, 20, (2, 6))}
    other = copy.deepcopy(model)
    block = other.layers[1]
    block.forward = lambda x: x + block.down(functional.gelu(block.gate(x)) * block.up(x))
    live = compare(model, other, data=data)
    assert live.first is not None
    assert (live.first.layer, live.first.seen_at) == ("layers.1", "layers.1.down")
    said = "named where it is seen"
    assert not any(said in note for note in live.notes)
    for sides in ((model, recorded(other, data)), (recorded(model, data), recorded(other, data))):
        found = compare(*sides, data=data)
        assert found.first is not None
        assert found.first.layer == "layers.1.down"
        note = next(note for note in found.notes if said in note)
        assert "at 'layers.1.down': the code of 'layers.1' may have made it" in note
    same = compare(model, recorded(model, data), data=data)
    assert same.agree
    assert not any(said in note for note in same.notes)


# -- what layers are given -----------------------------------------------------------------------


class Multiply(nn.Module):
    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return x * by


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.multiply = Multiply()

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return torch.fft.irfft(self.multiply(torch.fft.rfft(x), by), n=8)


class Filtering(nn.Module):
    """Hands a complex parameter of its own to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.filter, self.out = nn.Linear(8, 8), Filter(), nn.Linear(8, 2)
        self.by = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        return self.out(self.filter(self.into(x), self.by))


def test_a_complex_parameter_of_the_model_is_not_that_of_the_layer_it_is_given_to() -> None:
    """Complex inputs were left out where layers with real inputs were judged."""
    model: Any = Filtering()
    x = torch.randn(2, 5, 8)
    other = copy.deepcopy(model)
    assert compare(model, other, data=x, loss="sum").agree
    with torch.no_grad():
        other.by[2] *= 1.2
    found = compare(model, other, data=x, loss="sum")
    assert found.first is not None
    assert (found.first.layer, found.first.direction) == ("", "forward")
    assert "parameter" in kinds_of(found)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.by += 0.5j
    first = compare(model, other, data=x, loss="sum").first
    assert first is not None
    size = float(0.5 * 5**0.5 / model.by.detach().norm())
    assert first.kinds[0].text == f"by differs by {size:.1e}", "imaginary parts count"


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        weights = (x @ x.mT).masked_fill(~seen, -torch.inf).softmax(-1)
        y: Tensor = self.out(weights @ self.value(x))
        return x + y


class Causal(nn.Module):
    """Makes a mask in its own code and hands it on by its place, without a name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.diagonal = nn.ModuleList(Masked() for _ in range(2)), 0

    def forward(self, x: Tensor) -> Any:
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(self.diagonal)
        for layer in self.layers:
            x = layer(x, seen)
        return x


def test_a_mask_without_a_name_is_named() -> None:
    """A mask was known by its name only: nothing said that the layer was given another one."""
    model: Any = Causal()
    x = torch.randn(2, 6, 8)
    other = copy.deepcopy(model)
    assert compare(model, other, data=x).agree
    with torch.no_grad():
        other.layers[0].value.weight *= 1.2
    assert "mask" not in kinds_of(compare(model, other, data=x)), "both are given the same"
    other = copy.deepcopy(model)
    other.diagonal = 1
    found = compare(model, other, data=x)
    assert found.first is not None
    assert (found.first.layer, found.first.token) == ("layers.0", 0)
    said = [kind.text for kind in found.first.kinds if kind.name == "mask"]
    assert said == ["'1' that 'layers.0' is given differs in 5 of 36 values"]


# -- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "said"), [(torch.float8_e4m3fn, "float8_e4m3fn"), (torch.bfloat16, "bfloat16")]
)
def test_the_dtype_to_which_values_were_rounded_is_the_coarsest_that_fits(
    dtype: torch.dtype, said: str
) -> None:
    """Values in float8 have no more bits than bfloat16 either, and that was what was said."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(6, 8)
    other = copy.deepcopy(model)
    other[1].register_forward_hook(lambda _, __, y: y.to(dtype).to(y.dtype))
    found = compare(model, other, data=x)
    assert found.first is not None
    assert found.first.layer == "1"
    texts = [kind.text for kind in found.first.kinds if kind.name == "precision"]
    assert texts == [f"b was rounded to {said}: its values have no more bits"]


class Several(nn.Module):
    """Returns several tensors, of which one may be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.k = nn.Linear(6, 6), nn.Linear(6, 3), 1.0

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.a(x)
        return {"h": [h, None, (h * self.k,)], "y": self.b(h)}


def test_a_model_does_not_agree_again_if_one_of_its_outputs_differs() -> None:
    """The reason said "from the output of 'the model' on the two agree again"."""
    model: Any = Several()
    x = torch.randn(4, 5, 6)
    other = copy.deepcopy(model)
    other.k = 1.1
    first = compare(model, other, data=x).first
    assert first is not None
    assert (first.layer, first.element) == ("", "h.2.0")
    assert "agree again" not in first.reason
    folded = nn.Sequential(nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 3))
    scaled = copy.deepcopy(folded)
    scaled[0].register_forward_hook(lambda _, __, y: 2 * y)
    scaled[1].register_forward_hook(lambda _, __, y: y / 2)
    first = compare(folded, scaled, data=x).first
    assert first is not None
    assert "From the output of '1' on the two agree again" in first.reason


def test_a_limit_of_memory_advises_what_compare_takes() -> None:
    """It advised to watch fewer layers and to keep statistics: options of an Inspector."""
    model: Any = Model()
    data = {"input_ids": torch.randint(0, 20, (2, 6))}
    with pytest.raises(MemoryLimitError, match="of max_bytes=100 are") as caught:
        compare(model, model, data=data, max_bytes=100)
    assert "fewer rows or tokens" in str(caught.value)
    assert "keep=" not in str(caught.value)
    assert caught.value.layer == "words"
    assert compare(model, model, data=data, max_bytes=1 << 20).agree


class Quantised(nn.Module):
    """A Linear with a weight of eight bits, and a scale for each of its rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scales = linear.weight.detach().abs().amax(1) / 127
        self.register_buffer("weight", (linear.weight.detach() / scales[:, None]).round().char())
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return functional.linear(x, weight * self.scales[:, None], self.bias)  # type: ignore[index]


def test_a_weight_of_whole_numbers_is_quantised_and_not_multiplied() -> None:
    """The kind was `factor`, "b is a times 741.6", because the scales are kept apart."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(9, 64)
    found = compare(model, nn.Sequential(Quantised(model[0]), nn.Tanh()), data=x)  # type: ignore[arg-type]
    assert found.first is not None
    assert found.first.layer == "0"
    texts = [kind.text for kind in found.first.kinds if kind.name == "precision"]
    assert texts[0] == "weight is float32 in a and int8 in b, as if quantised"
    assert "factor" not in kinds_of(found)
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        scaled[0].weight *= 2  # type: ignore[operator]
    assert "factor" in kinds_of(compare(model, scaled, data=x))


def test_one_factor_in_some_units_is_said_once() -> None:
    """It read "1 of 8 units have a factor of their own, 1.2000000527 to 1.2000000527"."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(6, 8)
    factors = torch.ones(8)
    factors[3] = 1.2
    for changed, said in (
        (factors, "b is a times 1.2, in 1 of 8 units"),
        (torch.linspace(1.1, 1.8, 8), "each unit has a factor of its own, 1.1 to 1.8, as of"),
    ):
        other = copy.deepcopy(model)
        other[1].register_forward_hook(lambda _, __, y, by=changed: y * by)
        first = compare(model, other, data=x).first
        assert first is not None
        assert any(kind.text.startswith(said) for kind in first.kinds), first.kinds


# -- models of transformers ------------------------------------------------------------------------


def louder(model: nn.Module, layer: str, token: int) -> nn.Module:
    """Return a copy of a model in which one layer multiplies one position by 1.2."""
    other = copy.deepcopy(model)

    def change(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        here = (torch.arange(output.shape[1]) == token)[:, None]
        return torch.where(here, 1.2 * output, output)

    other.get_submodule(layer).register_forward_hook(change)
    return other


@pytest.mark.parametrize(
    "layer", ["model.encoder.layers.0.fc1", "model.decoder.layers.0.encoder_attn.k_proj"]
)
def test_a_frame_of_whisper_is_named(layer: str) -> None:
    """The frames were no tokens, so a fault in one of them was named at token 0, as of a bias."""
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    sizes |= {"num_mel_bins": 8, "max_source_positions": 15, "max_target_positions": 20}
    config = transformers.WhisperConfig(
        vocab_size=100, d_model=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, **sizes,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    data = {"input_features": torch.randn(2, 8, 30), "labels": torch.randint(3, 90, (2, 6))}
    assert compare(model, copy.deepcopy(model), data=data).agree
    first = compare(model, louder(model, layer, 3), data=data).first
    assert first is not None
    assert (first.layer, first.token) == (layer, 3)
    assert first.kinds[0].text == "b is a times 1.2, at 2 of 30 tokens"


@pytest.mark.parametrize(
    ("tower", "count"), [("vision_model", 34), ("text_model", 18)], ids=["patches", "words"]
)
def test_a_patch_of_clip_is_named(tower: str, count: int) -> None:
    """The second tower has a sequence of its own, whose positions no token ids tell."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={"vocab_size": 100, "max_position_embeddings": 20, "eos_token_id": 2, **sizes},
        vision_config={"image_size": 16, "patch_size": 4, **sizes},
        projection_dim=16,
    )
    model = transformers.CLIPModel(config).eval()
    data = {"input_ids": torch.randint(3, 90, (2, 9)), "pixel_values": torch.randn(2, 3, 16, 16)}
    layer = f"{tower}.encoder.layers.0.mlp.fc2"
    assert compare(model, copy.deepcopy(model), data=data).agree
    first = compare(model, louder(model, layer, 3), data=data).first
    assert first is not None
    assert (first.layer, first.token) == (layer, 3)
    assert first.kinds[0].text == f"b is a times 1.2, at 2 of {count} tokens"


# -- pictures --------------------------------------------------------------------------------------


def test_a_picture_of_many_tokens_and_layers_says_what_it_leaves_out() -> None:
    """The numbers of 400 tokens overlapped, and the layers inside blocks were left out silently."""
    for depth, length, left_out in ((3, 400, False), (24, 6, True)):
        model: Any = Model(depth)
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.layers[2].up.weight *= 1.1
        found = compare(model, other, data={"input_ids": torch.randint(0, 20, (1, length))})
        ax = found.plot()
        assert ("tensors are drawn" in ax.get_xlabel()) == left_out
        figure: Any = ax.figure
        figure.canvas.draw()
        texts = [each for each in ax.get_xticklabels() if each.get_text()]
        boxes = [each.get_window_extent() for each in texts]
        assert len(texts) >= 6
        assert all(int(t.get_text()) == at for t, at in zip(texts, ax.get_xticks(), strict=True))
        assert all(one.x1 <= two.x0 for one, two in pairwise(boxes)), "they overlap"
