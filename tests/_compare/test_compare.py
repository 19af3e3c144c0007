"""Two live models: planted faults are located, rounding is silent, and no trace is left."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from oracles import assert_same_state, state_of
from torch import Tensor, nn

from benchmarks._compare_faults import FAULTS, Fault
from benchmarks._compare_models import MODELS, batch, build
from benchmarks._compare_pairs import EXPECTED, PAIRS, quiet
from benchmarks.compare import is_located
from torchfmri import Difference, InspectionError, Run, compare

pytestmark = pytest.mark.usefixtures("one_thread")
FAST_PAIRS = [kind for kind in PAIRS if "compiled" not in kind]


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


X = torch.linspace(-2, 2, 30).reshape(5, 6)


def test_there_are_enough_faults() -> None:
    assert len(FAULTS) >= 30
    assert {fault.model for fault in FAULTS} == set(MODELS)
    assert len(MODELS) >= 10


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.model}: {fault.name}")
@pytest.mark.one_in(8)
def test_fault_is_located(fault: Fault) -> None:
    with quiet():
        found = compare(*fault.pair())
    assert is_located(found, fault), str(found.first)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(5)
def test_identical_models_are_silent(name: str) -> None:
    with quiet():
        found = compare(Run(build(name), batch(name)), Run(build(name), batch(name)))
    assert found.agree, str(found)
    assert {pair.direction for pair in found.pairs} == {"forward", "backward", "parameters"}
    assert all(pair.worst == 0 for pair in found.pairs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", FAST_PAIRS)
@pytest.mark.one_in(12)
def test_rounding_is_silent_and_int8_is_not(kind: str, name: str) -> None:
    with quiet():
        made = PAIRS[kind](name)
        if made is None:
            return
        found = compare(*made)
    assert found.agree == (kind not in EXPECTED), str(found)
    assert found.pairs


@pytest.mark.slow
def test_compiled_code_is_compared_from_outside() -> None:
    made = PAIRS["eager / compiled"]("llama")
    assert made is not None
    found = compare(*made)
    assert found.agree
    assert any("compiled code shows no layers" in note for note in found.notes)
    made[1].model.model.layers[1].mlp.down_proj.weight.data.mul_(1.01)
    found = compare(*made)
    assert found.first is not None
    assert found.first.direction == "forward"
    assert found.differences["parameters"].relative > 1e-3


# -- noise ---------------------------------------------------------------------------------------


def test_noise_is_measured_on_both_sides_and_grows_with_precision() -> None:
    single = compare(mlp(), mlp(), data=X, loss="sum")
    double = compare(mlp().double(), mlp().double(), data=X.double(), loss="sum")
    for found, unit in ((single, torch.finfo(torch.float32).eps), (double, 2.2e-16)):
        for pair in found.pairs:
            assert not math.isnan(pair.spread_a)
            assert not math.isnan(pair.spread_b)
        assert unit / 10 < found.pairs[0].spread_a < unit * 10


def test_what_is_as_small_as_noise_is_silent_and_what_is_larger_is_not() -> None:
    reference = mlp()
    for share, agrees in ((1e-7, True), (1e-4, False)):
        other = copy.deepcopy(reference)
        with torch.no_grad():
            other[2].weight.mul_(1 + share)
        found = compare(reference, other, data=X, loss="sum")
        assert found.agree == agrees
        if not agrees:
            assert found.first is not None
            assert found.first.layer == "2"
            assert found.first.relative == pytest.approx(share, rel=0.5)


def test_tolerance_replaces_the_measurement() -> None:
    other = mlp()
    with torch.no_grad():
        other[2].weight.mul_(1 + 1e-4)
    found = compare(mlp(), other, data=X, tolerance=1e-2)
    assert found.agree
    assert found.summary().startswith(
        "no difference of more than 0.01 in 6 tensors (forward), though"
    )
    assert "within the tolerance: weight differs by 1.0e-04" in found.text()
    assert "noise" not in f"{found.text()} {found.summary()}", "nothing was measured"
    found = compare(mlp(), other, data=X, tolerance=0.0)
    assert not found.agree
    equal = compare(mlp(), mlp(), data=X, tolerance=0.0).summary()
    assert equal == "no difference in 6 tensors (forward): equal to the last bit"
    assert math.isnan(found.pairs[0].spread_a)


def test_dropout_counts_as_noise_and_is_said() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    found = compare(made(), made(), data=X)
    assert found.agree
    assert any("dropout is on" in note for note in found.notes)
    assert next(p for p in found.pairs if p.place.layer == "1").spread_a > 0.1


def test_rows_that_depend_on_each_other_are_no_noise() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x[:1]

    model = nn.Sequential(nn.Linear(6, 4), First())
    found = compare(model, model, data=X)
    assert any("order of the rows" in note for note in found.notes)
    assert next(p for p in found.pairs if p.place.layer == "1").spread_a < 1e-5


def test_a_gradient_of_a_parameter_is_judged_as_sharply_where_rows_depend_on_their_place() -> None:
    """Rows in another order are no noise of the sums over them either."""

    class Weighted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.linspace(1, 1.1, len(x))[:, None]

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Weighted(), nn.Linear(8, 4))

    data = torch.randn(9, 6, generator=torch.Generator().manual_seed(3))
    found = compare(made(), made(), data=data, loss="sum")
    assert found.agree, str(found)
    assert any("what '2'" in note and "order of the rows" in note for note in found.notes)
    scaled = made()
    scaled[0].weight.register_hook(lambda gradient: gradient * 1.001)
    found = compare(made(), scaled, data=data, loss="sum")
    assert found.first is not None
    assert (found.first.layer, found.first.direction) == ("0", "parameters")


# -- where and what ------------------------------------------------------------------------------


def test_first_token_of_any_row_is_named() -> None:
    class Late(nn.Module):
        def __init__(self, wrong: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.mix = nn.Embedding(10, 8), nn.Linear(8, 8)
            self.wrong = wrong

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            if self.wrong:
                x = x.clone()
                x[1, 3] += 0.1
            return self.mix(x)

    ids = torch.arange(12).reshape(2, 6) % 10
    found = compare(Late(False), Late(True), data=ids).first
    assert found is not None
    assert (found.layer, found.seen_at, found.row, found.token) == ("", "mix", 1, 3)
    assert any(kind.name == "attribute" and "wrong" in kind.text for kind in found.kinds)


def test_only_padded_positions_is_a_remark_and_no_difference() -> None:
    a, b = (Run(build("bert"), batch("bert")) for _ in range(2))
    mask = b.data["attention_mask"]
    ids = b.data["input_ids"].masked_fill(mask == 0, 9)
    found = compare(a, Run(b.model, {**b.data, "input_ids": ids}))
    assert found.agree, str(found)
    assert any("only padded positions differ" in note for note in found.notes)


def test_attention_to_padding_is_no_difference_and_hides_none() -> None:
    """Gradients arrive at attention weights of padded keys, and nothing is computed with them."""
    model, data = build("llama", "eager"), batch("llama")
    forgotten = {**data, "attention_mask": torch.ones_like(data["attention_mask"])}

    def weigh(_: nn.Module, __: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        weights = output[1].clone()
        weights[0, 2, 4, 3] *= 1.01
        return output[0], weights

    b = build("llama", "eager")
    found = compare(Run(model, data), Run(b, forgotten))
    assert found.agree, str(found)
    seen = {pair.direction for pair in found.pairs if pair.place.element == "1"}
    assert {"forward", "backward"} <= seen, "attention weights are compared"
    b.get_submodule("model.layers.1.self_attn").register_forward_hook(weigh)
    first = compare(Run(model, data), Run(b, forgotten)).first
    assert first is not None
    assert (first.layer, first.element, first.token) == ("model.layers.1.self_attn", "1", 4)


def test_only_under_autocast() -> None:
    class Fragile(nn.Module):
        def __init__(self, wrong: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.wrong = nn.Linear(6, 6), wrong

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y * 3 if self.wrong and torch.is_autocast_enabled("cpu") else y

    a, b = (Run(Fragile(wrong), X, autocast=torch.bfloat16) for wrong in (False, True))
    found = compare(a, b).first
    assert found is not None
    assert [kind.name for kind in found.kinds][-1] == "autocast"


@pytest.mark.parametrize(("factor", "kind"), [(0.5, "rope_factor"), (None, "parameter")])
def test_frequencies_that_follow_no_base_are_not_called_one(
    factor: float | None, kind: str
) -> None:
    model, data = build("llama"), batch("llama")
    other = copy.deepcopy(model)
    frequencies = other.model.rotary_emb.inv_freq
    frequencies *= torch.linspace(1, 2, len(frequencies)) if factor is None else factor
    found = compare(model, other, data=data)
    assert found.first is not None
    assert kind in [each.name for each in found.first.kinds]


def test_nan_on_one_side() -> None:
    bad = mlp()
    with torch.no_grad():
        bad[2].bias[0] = math.nan
    found = compare(mlp(), bad, data=X).first
    assert found is not None
    assert found.layer == "2"
    assert found.relative == math.inf
    assert "nonfinite" in [kind.name for kind in found.kinds]
    both = compare(bad, bad, data=X)
    assert both.first is None, "NaN in both"
    assert not both.agree, "nothing is known about those values"


@pytest.mark.parametrize("side", ["a", "b"])
def test_an_infinity_that_the_next_layer_hides_is_named(side: str) -> None:
    """Tanh turns infinity into 1, and a large number too."""
    sides = {"a": mlp(), "b": mlp()}
    with torch.no_grad():
        for each in sides.values():
            each[0].bias[1] = 50.0
        sides[side][0].bias[1] = math.inf
    found = compare(**sides, data=X).first
    assert found is not None
    assert (found.layer, found.relative) == ("0", math.inf)
    assert "nonfinite" in [kind.name for kind in found.kinds]


class Masked(nn.Module):
    """Masks the last units of its output with -infinity, in a module of its own."""

    def __init__(self, masked: int, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.shown = nn.Linear(5, 6), nn.Identity()
        self.masked, self.scale = masked, scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * torch.tensor([self.scale, 1, 1, 1, 1, 1])
        return self.shown(y.masked_fill(torch.arange(6) >= 6 - self.masked, -math.inf)).softmax(-1)


def test_infinities_on_both_sides_hide_nothing() -> None:
    x = torch.randn(4, 5)
    same = compare(Masked(1), Masked(1), data=x, loss="sum")
    assert same.agree
    assert not any("not be judged" in note for note in same.notes)
    scaled = compare(Masked(1), Masked(1, 1.01), data=x).first
    assert scaled is not None
    assert scaled.seen_at == "shown"
    more = compare(Masked(1), Masked(2), data=x).first
    assert more is not None
    assert more.seen_at == "shown"
    (kind,) = (each for each in more.kinds if each.name == "nonfinite")
    assert kind.text == "4 values of a and 8 of b are NaN or infinite"


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_empty_data_are_refused(shape: tuple[int, ...]) -> None:
    model = nn.Embedding(5, 3)
    with pytest.raises(InspectionError, match="nothing to compare"):
        compare(model, model, data={"input": torch.zeros(shape, dtype=torch.long)})


def test_a_backward_pass_that_is_switched_off_is_said() -> None:
    with torch.no_grad():
        found = compare(mlp(), mlp(), data=X, loss="sum")
    assert found.agree
    assert any("torch.no_grad() is on" in note for note in found.notes)


def test_other_depths_are_listed() -> None:
    deep = nn.Sequential(*mlp(), nn.Tanh())
    found = compare(mlp(), deep, data=X)
    assert found.only_b == ("5",)
    assert "5" in str(found)


def test_layers_with_other_names_are_matched_by_order_and_the_doubt_is_said() -> None:
    class Port(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first, _, second, _, third = mlp()
            self.one, self.two, self.three = first, second, third

        def forward(self, x: Tensor) -> Tensor:
            return self.three(self.two(self.one(x).tanh()).tanh())

    port = Port()
    with torch.no_grad():
        port.two.bias += 1
    found = compare(mlp(), port, data=X, names={"0": "one", "2": "two", "4": "three"})
    assert found.first is not None
    assert (found.first.layer, found.first.partner) == ("2", "two")
    assert any(kind.name == "parameter" for kind in found.first.kinds)
    prefixed = nn.ModuleDict({"inner": mlp()})
    prefixed.forward = lambda x: prefixed["inner"](x)  # type: ignore[method-assign]
    found = compare(mlp(), prefixed, data=X)
    assert any("by the end of the name" in note for note in found.notes)


# -- traces and bad input ------------------------------------------------------------------------


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_is_left_behind(raises: bool) -> None:
    class Raises(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Raises.calls += 1
            if raises and Raises.calls == 3:  # while rounding is drawn anew
                raise RuntimeError("mine")
            return x

    a, b = nn.Sequential(mlp(), nn.BatchNorm1d(3), Raises()).train(), mlp()
    x = X.clone()
    before, random, threads = state_of(a), torch.get_rng_state(), torch.get_num_threads()
    if raises:
        with pytest.raises(RuntimeError, match="mine"):
            compare(a, b, data=x, loss="sum", names={"0": ""})
    else:
        compare(a, b, data=x, loss="sum", names={"0": ""})
    assert_same_state(before, state_of(a))
    assert torch.equal(random, torch.get_rng_state())
    assert threads == torch.get_num_threads()
    assert torch.equal(x, X)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in a.modules())


def test_other_tokens_are_refused_with_the_first_of_them() -> None:
    model = build("llama")
    one, two = batch("llama", None), batch("llama", None)
    two["input_ids"] = two["input_ids"].clone()
    two["input_ids"][1, 4] = 5
    with pytest.raises(InspectionError, match=r"other tokens: at position 4 of row 1.*tokenizers"):
        compare(Run(model, one), Run(model, two))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"b": None}, "b is a NoneType"),
        ({"data": None}, "data=None"),
        ({"names": {"0": 5}}, "map layers of a"),
        ({"names": {"zero": "0"}}, "a has no such layer"),
        ({"names": {"0": "2", "2": "2"}}, "maps '0', '2' of a to '2' of b"),
        ({"tolerance": -1}, "a relative difference"),
        ({"max_bytes": 10}, "max_bytes|10"),
    ],
)
def test_bad_input(arguments: dict[str, Any], match: str) -> None:
    given = {"a": mlp(), "b": mlp(), "data": X, **arguments}
    with pytest.raises(InspectionError, match=match):
        compare(given.pop("a"), given.pop("b"), **given)


def test_results_can_be_read_and_drawn() -> None:
    with quiet():
        found = compare(*FAULTS[1].pair())
    assert found.to_dict()["first"]["layer"] == FAULTS[1].layer
    axes = found.plot()
    assert axes.get_title(loc="left") or axes.title is not None
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    assert {float(line.get_xdata()[0]) for line in marks} == {float(found.first.token)}
    assert found.plot_depth().get_yscale() == "log"
    assert "<table" in found._repr_html_()
    for draw in (found.plot, found.plot_depth):
        with pytest.raises(InspectionError, match="direction='up'"):
            draw("up")


def test_what_is_on_one_side_only_is_drawn_and_written_as_json() -> None:
    bad = mlp()
    with torch.no_grad():
        bad[2].bias[0] = math.nan
    found = compare(mlp(), bad, data=X)
    (marks,) = (line for line in found.plot_depth().lines if line.get_marker() == "^")
    names = [pair.place.layer for pair in found.pairs if pair.direction == "forward"]
    assert [names[int(at)] for at in marks.get_xdata()] == names[names.index("2") :]
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert json.loads(text)["first"]["relative"] is None
    model, data = build("llama"), batch("llama")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0] = math.nan
    axes = compare(model, other, data=data).plot()
    first, last = (np.asarray(axes.images[at].get_array()) for at in (0, -1))
    assert last.min() > first.max(), "not drawn as if it had no value"
    assert "brightest is NaN" in axes.get_xlabel()


def drawn(found: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in found.draw().axes]


def test_pictures_show_the_direction_that_differs_or_that_nothing_does() -> None:
    backward = next(fault for fault in FAULTS if fault.direction == "backward")
    with quiet():
        found = compare(*backward.pair())
        same = compare(Run(build("llama"), batch("llama")), Run(build("llama"), batch("llama")))
    assert any("How rounding grows along the backward pass" in title for title in drawn(found))
    lines = {line.get_label() for line in found.draw().axes[1].lines}
    assert "a differs from b" in lines
    texts = [text.get_text() for axes in same.draw().axes for text in axes.texts]
    assert any("No difference beyond noise" in each for each in [*drawn(same), *texts])


def test_the_picture_names_a_parameter_whose_gradient_alone_differs() -> None:
    sides = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2)]
    sides[1].load_state_dict(sides[0].state_dict())
    sides[1][0].weight.register_hook(lambda grad: grad * 1.5)
    found = compare(*sides, data=torch.randn(6, 4), loss="sum")
    assert found.first is not None
    assert found.first.direction == "parameters"
    (title,) = drawn(found)
    assert title.startswith("Where two runs part: gradients of parameters")
    assert "dL/d 0.weight" in title


class Scored(nn.Module):
    """Returns a loss beside its logits.

    Args:
        extra: Added to the loss.
        late: Added to the logits of the last token.
    """

    def __init__(self, extra: float, late: float = 0.0) -> None:
        super().__init__()
        self.embed, self.extra, self.late = nn.Embedding(20, 8), extra, late

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.embed(input_ids)
        late = torch.zeros_like(logits)
        late[:, -1] = self.late
        return {"loss": logits.square().mean() + self.extra, "logits": logits + late}


def scored(extra: float, late: float) -> Difference:
    """The first difference between a model and one that adds something."""
    sides = [Scored(0.0), Scored(extra, late)]
    sides[1].embed.load_state_dict(sides[0].embed.state_dict())
    first = compare(*sides, data={"input_ids": torch.arange(12).view(2, 6)}).first
    assert first is not None
    return first


def test_a_scalar_has_no_token_and_both_sizes_of_a_difference_are_named() -> None:
    first = scored(0.5, 0.0)
    assert (first.element, first.row, first.token, first.text) == ("loss", None, None, "")
    assert "token" not in first.place()
    assert "relative difference" in first.reason
    assert "largest absolute difference 5.000e-01" in first.reason
    said = first.reason.split()
    assert said[1:4] + said[4:6] == ["in", "a", "and", said[4], "in"]
    assert float(said[4]) - float(said[0]) == pytest.approx(0.5, rel=1e-4)


def test_logits_come_before_the_loss_that_is_made_of_them() -> None:
    first = scored(0.5, 0.5)
    assert (first.element, first.row, first.token) == ("logits", 0, 5)


@pytest.mark.parametrize("side", ["a", "b"])
def test_an_error_of_a_model_passes_through_with_a_note_that_names_the_side(side: str) -> None:
    error = ValueError("my own words")

    def refuse(*_: Any) -> None:
        raise error

    sides = {"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)}
    sides[side].register_forward_hook(refuse)
    with pytest.raises(ValueError, match="my own words") as found:
        compare(**sides, data=torch.randn(3, 4))
    assert found.value is error
    assert str(error) == "my own words"
    assert error.__notes__ == [f"torchfmri.compare: raised while {side} was run, a Linear"]
