"""What a comparison says about a difference: its kind, what differs before, where colours begin."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchfmri import InspectionError, Inspector, Monitor, Run, compare
from torchfmri._compare.causes import replaced_classes
from torchfmri._compare.grid import PositionGrid
from torchfmri._compare.kinds import kinds_of
from torchfmri._compare.recording import RecordedRows
from torchfmri.visualization._colour_scale import scale_from


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def test_a_layer_that_one_side_froze_is_listed() -> None:
    sides = [small(), small()]
    sides[1][2].weight.requires_grad_(False)
    found = compare(*sides, data=torch.randn(6, 8), loss="sum")
    (change,) = found.changes
    assert str(change) == "weight requires grad in a only, at 2"
    assert not compare(small(), small(), data=torch.randn(6, 8)).changes


@pytest.mark.parametrize("turned", [False, True])
def test_dropout_that_only_one_side_has_is_named(turned: bool) -> None:
    net = nn.Sequential()
    for name, layer in zip(("first", "act", "last"), small(), strict=True):
        net.add_module(name, layer)
    port: Any = copy.deepcopy(net.eval())
    port.act = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    found = compare(*(net, port)[:: -1 if turned else 1], data=x)
    said = f"dropout is on in {'a' if turned else 'b'} only"
    assert found.first is not None
    assert found.first.layer == "act"
    assert ("mode", f"{said}, in '1'") in found.first.kinds
    assert f"{said}, in 'act.1'" in [str(each) for each in found.changes]
    port.eval()
    found = compare(*(net, port)[:: -1 if turned else 1], data=x)
    assert found.agree
    assert "mode" not in [each.name for each in found.changes]


@pytest.mark.parametrize("turned", [False, True])
def test_a_weight_that_is_shared_on_one_side_only_is_named(turned: bool) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    port = copy.deepcopy(net)
    port[2].weight = port[0].weight
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    first = compare(*(net, port)[:: -1 if turned else 1], data=x).first
    assert first is not None
    assert first.layer == "2"
    only = "a" if turned else "b"
    assert first.kinds[0] == ("tied", f"'0' and '2' share a weight in {only} only")


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_layer_that_only_one_side_has_is_named() -> None:
    deep = Deep(4)
    shallow = copy.deepcopy(deep)
    shallow.blocks = shallow.blocks[:2]
    first = compare(shallow, deep, data=torch.randn(6, 8)).first
    assert first is not None
    assert [kind.text for kind in first.kinds] == ["only b has 'blocks.2' and 1 more layer"]
    assert first.layer == "", "the code of the model calls them"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(61, 24)
        self.rnn = nn.LSTM(24, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 61)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(self.embed(x))[0])
        return logits


def test_a_constant_that_each_dtype_rounds_once_is_no_difference() -> None:
    """The mean over 30 tokens divides by 30: in float32 all gradients are off by one factor."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    ids = torch.randint(3, 61, (3, 10), generator=torch.Generator().manual_seed(5))
    a, b = (
        Run(model, ids, target=ids.roll(-1, 1), loss=loss)
        for model in (Recurrent(), Recurrent().double())
    )
    found = compare(a, b)
    gradient = next(pair for pair in found.pairs if pair.direction == "backward")
    assert gradient.worst > 0, "there is something to judge"
    assert found.agree, str(found.first)


class Router(nn.Module):
    """Chooses two of three experts for each token; `flipped` lists them the other way round."""

    def __init__(self, *, flipped: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.scores, self.flipped, self.scale = nn.Embedding(9, 3), flipped, scale

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        found = self.scores(input_ids).topk(2)
        last = (-1,) if self.flipped else ()
        return found.values.flip(last) * self.scale, found.indices.flip(last)


def test_experts_in_another_order_agree_and_hide_no_mistake() -> None:
    torch.manual_seed(0)
    one, two, wrong = Router(flipped=False), Router(flipped=True), Router(flipped=True, scale=1.01)
    for each in (two, wrong):
        each.load_state_dict(one.state_dict())
    data = {"input_ids": torch.arange(8).view(2, 4)}

    def loss(output: tuple[Tensor, Tensor]) -> Tensor:
        return output[0].square().sum()

    agreeing = compare(one, two, data=data, loss=loss)
    assert agreeing.agree, str(agreeing.first)
    assert {pair.direction for pair in agreeing.pairs} == {"forward", "backward", "parameters"}
    first = compare(one, wrong, data=data, loss=loss).first
    assert first is not None
    assert (first.direction, first.layer) == ("forward", "")


def test_tokens_are_not_shifted_where_noise_makes_all_of_them_alike() -> None:
    grid = PositionGrid(torch.ones(1, 6, dtype=torch.bool), (0,))
    values = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).double()
    turned = values.clone()
    turned[2] *= -1
    found = kinds_of(RecordedRows(values, grid), RecordedRows(turned, grid), 1.6)
    assert "shifted_positions" not in [kind.name for kind in found]


def test_colours_are_linear_where_nothing_is_beyond_noise() -> None:
    scale = scale_from(1.0, np.array([[0.0, 0.2, 0.4]]), "difference")
    assert (scale.logarithmic, scale.low, scale.high) == (False, 0.0, 1.0)
    assert "linear scale" in scale.label


def test_a_difference_far_below_the_largest_is_not_drawn_as_noise() -> None:
    values = np.array([[0.0, 0.5, 1.0, 20.0, 3e4]])
    scale = scale_from(1.0, values, "difference")
    colours = scale.norm()(scale.shown)[0]
    assert colours[:3].max() == 0.0
    assert colours[3] > 0.2
    assert colours[4] == 1.0
    assert "log scale; darkest: 1 or less" in scale.label


class Unordered(nn.Module):
    """Defines the layer that runs last first."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def trained(changed: int | None, folder: Path | None = None) -> Monitor:
    torch.manual_seed(0)
    model = Unordered()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Monitor(model, optimizer, folder=folder) as monitor:
        for step in range(12):
            x = torch.randn(16, 8)
            x[3] = -x[3] if step == changed else x[3]
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            monitor.loss(loss)
            optimizer.step()
    return monitor


def test_the_first_layer_of_a_step_is_the_one_that_ran_first() -> None:
    first = compare(trained(None), trained(7)).first
    assert first is not None
    assert (first.step, first.what, first.layer) == (7, "activations", "first")


def test_a_lost_file_of_a_run_is_named(tmp_path: Path) -> None:
    for name in "ab":
        trained(None, tmp_path / name)
    steps = sorted((tmp_path / "b").glob("steps-*"))
    assert len(steps) > 1
    steps[0].unlink()
    found = compare(tmp_path / "a", tmp_path / "b")
    assert any("a file of the folder is missing" in note for note in found.notes)


class _Positions(nn.Module):
    """Positions without a batch axis, beside tokens with one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 8), nn.Embedding(16, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(hidden)


class _States(nn.Module):
    """A recurrent layer, whose states have another axis before that of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(8, 8, batch_first=True, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.memory(x)[0]


@pytest.mark.parametrize(
    ("make", "data"),
    [(_Positions, torch.arange(30).view(3, 10)), (_States, torch.randn(3, 10, 8))],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_model_agrees_with_its_recording_whatever_axes_its_tensors_have(
    make: Any, data: torch.Tensor, swapped: bool
) -> None:
    model = make()
    inspector = Inspector(model, keep="tensors")
    inspector.watch("*", ["activations"])
    sides = [model, inspector.run_inspection(data)]
    found = compare(*(sides[::-1] if swapped else sides), data=data)
    assert found.agree, found
    with torch.no_grad():
        next(model.parameters()).mul_(1.1)
    assert not compare(*(sides[::-1] if swapped else sides), data=data).agree


def test_a_side_that_does_not_repeat_itself_is_named() -> None:
    class Unsteady(nn.Linear):
        generator = torch.Generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(x.shape[:-1], generator=self.generator)[..., None]
            return super().forward(x) * (1 + 0.3 * noise)

    torch.manual_seed(0)
    steady = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    unsteady = nn.Sequential(nn.Linear(4, 4), Unsteady(4, 4))
    unsteady.load_state_dict(steady.state_dict())
    x = torch.randn(3, 5, 4)
    found = compare(steady, unsteady, data=x)
    (note,) = [each for each in found.notes if "differs from itself" in each]
    assert "from '1' on" in note
    assert not [each for each in compare(steady, steady, data=x).notes if "itself" in each]


def test_tokens_are_compared_at_their_places() -> None:
    model, rows = _Positions(), torch.arange(30).view(3, 10)
    with pytest.raises(
        InspectionError, match="at position 7 of row 0 a has nothing more and b has"
    ):
        compare(Run(model, rows[:, :7]), Run(model, rows))


class Attention(nn.Module):
    """Two heads; `change` is done to what they return before the last layer reads it."""

    def __init__(self, change: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.change = nn.Linear(16, 48), nn.Linear(16, 16), change

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 2, 8).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out((heads if self.change is None else self.change(heads)).flatten(2))


def one_token(heads: Tensor) -> Tensor:
    return torch.cat([heads[:, :4], 1.5 * heads[:, 4:5], heads[:, 5:]], 1)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (
            lambda heads: heads.flip(2),
            "swapped_heads",
            "heads of 8 units have changed places: 0, 1",
        ),
        (lambda heads: 1.5 * heads, "factor", "b is a times 1.5"),
        (one_token, "factor", "b is a times 1.5"),
        (lambda heads: heads.bfloat16().float(), "precision", "b was rounded to bfloat16"),
        (
            lambda heads: heads * torch.arange(2).view(2, 1),
            "factor_per_unit",
            "8 of 16 units are zero in b",
        ),
    ],
    ids=["swapped heads", "a factor", "one token", "rounded", "a lost head"],
)
def test_what_code_between_layers_did_is_told_from_what_it_gave_on(
    change: Any, kind: str, said: str
) -> None:
    """The last layer mixes all units, so that its output tells none of this."""
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1))
    first = compare(Attention(), Attention(change), data=x).first
    assert first is not None
    assert (first.layer, first.seen_at) == ("", "out")
    (found,) = (each for each in first.kinds if each.name != "from_position")
    assert found.name == kind
    assert said in found.text


def test_values_that_are_lost_are_called_zero() -> None:
    grid = PositionGrid(torch.ones(1, 6, dtype=torch.bool), (0,))
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
    lost = values.clone()
    lost[3] = 0
    found = kinds_of(RecordedRows(values, grid), RecordedRows(lost, grid), 1e-6)
    assert [kind.text for kind in found] == ["b is zero there"]
    assert kinds_of(RecordedRows(lost, grid), RecordedRows(values, grid), 1e-6)[0].text.startswith(
        "a"
    )


def test_targets_are_data_too() -> None:
    model, x = small(), torch.randn(6, 8)
    targets = torch.randn(6, 4), torch.randn(6, 4)
    a, b = (Run(model, x, target, nn.MSELoss()) for target in targets)
    found = compare(a, b)
    assert found.first is not None
    assert (found.first.direction, found.first.element) == ("forward", "loss")
    assert "data" in [kind.name for kind in found.first.kinds]
    (change,) = found.changes
    assert change.text.startswith("target differs in 24 of 24 values")


def test_a_kernel_that_was_transposed_is_named() -> None:
    one, two = (nn.Sequential(nn.Conv2d(3, 4, 3)) for _ in range(2))
    two.load_state_dict(one.state_dict())
    with torch.no_grad():
        two[0].weight.copy_(one[0].weight.transpose(2, 3))
    first = compare(one, two, data=torch.randn(2, 3, 6, 6)).first
    assert first is not None
    assert first.kinds[0] == ("transposed", "weight is transposed: its axes 2 and 3 are swapped")


def test_a_loss_that_is_computed_otherwise_is_a_difference() -> None:
    """A function of the output is no part of the model, and its gradients may be the same."""
    model, x, target = small(), torch.randn(6, 8), torch.randn(6, 4)

    def louder(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target) + 1.0

    plain = Run(model, x, target, nn.functional.mse_loss)
    assert compare(plain, Run(model, x, target, nn.MSELoss())).agree
    first = compare(plain, Run(model, x, target, louder)).first
    assert first is not None
    assert (first.layer, first.direction, first.element) == ("", "forward", "loss")
    assert str(first).startswith("the loss")


def test_a_mask_that_one_side_lacks_is_named() -> None:
    class Masked(nn.Module):
        def __init__(self, masks: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.masks = masks

        def forward(self, x: Tensor) -> Tensor:
            causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            found: Tensor = self.layer(x, src_mask=causal if self.masks else None)
            return found

    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    first = compare(Masked(True).eval(), Masked(False).eval(), data=x, loss="sum").first
    assert first is not None
    said = [kind.text for kind in first.kinds if kind.name == "mask"]
    assert said, first
    assert said[0].endswith("in a only")


def test_nearly_zero_is_no_factor_and_few_tokens_are_counted() -> None:
    grid = PositionGrid(torch.ones(1, 8, dtype=torch.bool), (0,))
    values = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double()
    clamped = values.clamp(-1e-3, 1e-3)
    found = kinds_of(RecordedRows(values, grid), RecordedRows(clamped, grid), 1e-6)
    assert not found, "0.001 times a accounts for the difference, and not for what b is"
    louder = values.clone()
    louder[3] *= 1.2
    found = kinds_of(RecordedRows(values, grid), RecordedRows(louder, grid), 1e-6)
    assert [kind.text for kind in found] == ["b is a times 1.2, at 1 of 8 tokens"]
    found = kinds_of(RecordedRows(values, None), RecordedRows(louder, None), 1e-6)
    assert [kind.text for kind in found] == ["b is a times 1.2, at 1 of 8 samples"]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv1d(2, 12, 3, padding=1), nn.Conv1d(12, 12, 3, padding=1)
        self.norm, self.three = nn.GroupNorm(3, 12), nn.Conv1d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.three(self.norm(self.two(self.one(x).tanh())).tanh())
        return found


@pytest.mark.parametrize("length", [20, 12], ids=["", "as long as wide"])
def test_positions_of_convolutions_are_tokens_and_channels_are_not(length: int) -> None:
    x = torch.randn(3, 2, length, generator=torch.Generator().manual_seed(0))
    later, wider = Convolutions(), Convolutions()

    def louder_at_5(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return torch.where(torch.arange(length) == 5, 1.5 * output, output)

    def louder_channel(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return torch.where((torch.arange(12) == 2)[:, None], 1.5 * output, output)

    later.two.register_forward_hook(louder_at_5)
    wider.two.register_forward_hook(louder_channel)
    first = compare(Convolutions(), later, data=x, loss="sum").first
    assert first is not None
    assert (first.layer, first.token, first.kinds[0].name) == ("two", 5, "factor")
    first = compare(Convolutions(), wider, data=x, loss="sum").first
    assert first is not None
    assert (first.layer, first.token, first.kinds[0].name) == ("two", 0, "factor_per_unit")
    assert first.kinds[0].text == "b is a times 1.5, in 1 of 12 units"


def test_a_sample_that_differs_alone_is_named() -> None:
    b = small()
    b[0].register_forward_hook(lambda _, __, y: y * (1 + (torch.arange(len(y)) == 3))[:, None])
    first = compare(small(), b, data=torch.randn(6, 8)).first
    assert first is not None
    assert (first.layer, first.row, first.token) == ("0", 3, None)
    assert ", row 3 of the batch" in str(first)
    assert "at 1 of 6 samples" in str(first)


class Listening(nn.Module):
    """An encoder of sounds, whose positions no token ids tell, and a decoder with token ids."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sound = nn.Conv1d(4, 8, 3, stride=2, padding=1)
        self.encoder = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_features: Tensor, decoder_input_ids: Tensor) -> Tensor:
        heard = self.encoder(self.sound(input_features).mT)
        words = self.words(decoder_input_ids)
        weights = (words @ heard.mT).softmax(-1)
        found: Tensor = self.head(words + weights @ heard)
        return found


@pytest.mark.parametrize(("layer", "length"), [("encoder.1", 10), ("head", 6)])
def test_positions_of_an_encoder_beside_token_ids_are_named(layer: str, length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    data = {
        "input_features": torch.randn(2, 4, 20, generator=generator),
        "decoder_input_ids": torch.randint(0, 20, (2, 6), generator=generator),
    }
    b = Listening()

    def louder(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return torch.where((torch.arange(length) == 3)[:, None], 1.2 * output, output)

    assert compare(Listening(), Listening(), data=data, loss="sum").agree
    b.get_submodule(layer).register_forward_hook(louder)
    found = compare(Listening(), b, data=data, loss="sum", tokenizer=_Numbers()).first
    assert found is not None
    assert (found.layer, found.token) == (layer, 3)
    assert found.kinds[0].text.startswith("b is a times 1.2, at 2 of")
    assert bool(found.text) == (layer == "head"), "sounds have no texts"


class _Numbers:
    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"


class RootMeanSquare(nn.LayerNorm):
    """A LayerNorm that forgets the mean, as a kernel might."""

    def forward(self, x: Tensor) -> Tensor:
        found = nn.functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return found + self.bias


def test_a_class_that_one_module_of_many_has_is_named() -> None:
    def made(*kinds: type[nn.LayerNorm]) -> nn.Sequential:
        torch.manual_seed(0)
        parts = ((kind(8), nn.Linear(8, 8)) for kind in kinds)
        return nn.Sequential(*(layer for part in parts for layer in part))

    plain, x = nn.LayerNorm, torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    one = compare(made(plain, plain, plain), made(plain, RootMeanSquare, plain), data=x).first
    assert one is not None
    assert (one.layer, one.kinds[0].name) == ("2", "class")
    assert one.kinds[0].text.endswith("RootMeanSquare in b")
    all_ = compare(made(plain, plain), made(RootMeanSquare, RootMeanSquare), data=x).first
    assert all_ is not None
    assert "class" not in [kind.name for kind in all_.kinds], "a port has other classes"


def test_an_empty_sequential_has_a_class_too() -> None:
    """A module without members is False: such pairs were left out."""
    a = {"0": nn.Sequential(), "1": nn.Sequential()}
    b = {"0": nn.Identity(), "1": nn.Sequential()}
    assert replaced_classes(a, b, {"0": "0", "1": "1"}) == {(nn.Sequential, nn.Identity)}
