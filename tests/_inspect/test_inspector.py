"""The Inspector as its users meet it: choosing, running, reading, and every way to get it wrong."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import warnings
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import assert_same_state, same_bits, state_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchfmri
from torchfmri import InspectionError, Inspector, LayerNotFoundError, MemoryLimitError

WHAT = ("inputs", "activations", "gradients", "input_gradients", "parameters")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def data() -> Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4)


def hooks_on(each: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in each.modules())


# -- choosing ----------------------------------------------------------------------------------


def test_watch_returns_the_names_and_adds() -> None:
    inspector = Inspector(model())
    assert inspector.watched == {}
    assert inspector.watch("0") == ["0"]
    assert inspector.watch("*", what=["gradients", "inputs"]) == ["0", "1", "2"]
    assert inspector.watch("1", what="activations") == ["1"]
    assert inspector.watched == {
        "0": ("activations", "gradients", "inputs"),
        "1": ("activations", "gradients", "inputs"),
        "2": ("gradients", "inputs"),
    }


def test_watch_leaves_the_model_alone() -> None:
    each = model()
    before = state_of(each)
    inspector = Inspector(each)
    inspector.watch("*", what=["gradients"], per="channel")
    assert_same_state(before, state_of(each))
    inspector.unwatch()
    assert_same_state(before, state_of(each))


def test_unwatch() -> None:
    inspector = Inspector(model())
    inspector.watch("*", what=["activations", "gradients"])
    assert inspector.unwatch("0", what="gradients") == ["0"]
    assert inspector.watched["0"] == ("activations",)
    inspector.unwatch("1")
    assert set(inspector.watched) == {"0", "2"}
    inspector.unwatch("2", what=["activations", "gradients"])
    assert set(inspector.watched) == {"0"}
    inspector.unwatch()
    assert inspector.watched == {}
    with pytest.raises(LayerNotFoundError):
        inspector.unwatch("nothing")


def test_unwatching_everything_is_watching_nothing_yet() -> None:
    """Nothing watched: all leaf layers, also after unwatch; said in the repr."""
    inspector = Inspector(model())
    inspector.watch("0")
    inspector.unwatch()
    assert "all leaf layers" in repr(inspector)
    assert list(inspector.run_inspection(data())) == ["0", "1", "2"]


def test_nothing_watched_means_leaf_layers() -> None:
    inspection = Inspector(nn.Sequential(model(), nn.Tanh())).run_inspection(data())
    assert list(inspection) == ["0.0", "0.1", "0.2", "1"]
    assert {record.what for record in inspection.values()} == {("activations",)}


def test_exclude_and_types() -> None:
    inspector = Inspector(model())
    assert inspector.watch(nn.Linear, exclude="2") == ["0"]
    assert inspector.layers([nn.ReLU, "0"]) == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"what": "activation"}, r"'activation'.*inputs, activations.*Did you mean 'activations'"),
        ({"what": []}, r"what=\[\] watches nothing"),
        ({"what": ["activations", "grads"]}, r"'grads'.*gradients"),
        ({"what": [3]}, r"Cannot watch 3"),
        ({"what": ""}, r"Cannot watch ''"),
        ({"per": "unit"}, r"per='unit'.*per='channel'"),
        ({"pattern": "encoderr"}, r"No layer matches 'encoderr' .* with inspector\.layers\(\)"),
        ({"pattern": nn.Conv2d}, r"No layer matches 'Conv2d'"),
        ({"pattern": 3}, r"pattern.*not 3"),
        ({"pattern": "0", "exclude": "0"}, r"excluded"),
    ],
)
def test_bad_watch(arguments: dict[str, Any], match: str) -> None:
    inspector = Inspector(model())
    inspector.watch("1")
    with pytest.raises(InspectionError, match=match):
        inspector.watch(**arguments)
    assert inspector.watched == {"1": ("activations",)}, "a failed watch changes nothing"


@pytest.mark.parametrize("what", [None, 3], ids=repr)
def test_what_of_another_type(what: Any) -> None:
    with pytest.raises((InspectionError, TypeError)):
        Inspector(model()).watch("*", what=what)


@pytest.mark.parametrize(
    ("not_a_model", "match"),
    [
        (nn.Linear, r"nn.Module, not type.*instance, not its class"),
        (lambda x: x, r"not function"),
        (None, r"not NoneType"),
        ("bert", r"not str"),
        (torch.ones(1), r"not Tensor"),
        ([nn.Linear(1, 1)], r"not list"),
    ],
    ids=["class", "function", "none", "text", "tensor", "list"],
)
def test_not_a_module(not_a_model: Any, match: str) -> None:
    with pytest.raises(InspectionError, match=match):
        Inspector(not_a_model)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep": "all"}, r"keep='all'.*'statistics' and 'tensors'"),
        ({"max_bytes": -1}, r"max_bytes=-1"),
        ({"dtype": "float16"}, r"dtype='float16'.*torch.dtype"),
    ],
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InspectionError, match=match):
        Inspector(model(), **options)
    inspector = Inspector(model())
    with pytest.raises(InspectionError, match=match):
        inspector.run_inspection(data(), **options)


def test_unknown_option_names_those_there_are() -> None:
    inspector = Inspector(model())
    with pytest.raises(TypeError, match=r"'keeps'.*device, dtype, keep, max_bytes"):
        inspector.run_inspection(data(), keeps="tensors")
    with pytest.raises(TypeError, match=r"'tensors'"), inspector.recording(tensors=True):
        pass


# -- running -----------------------------------------------------------------------------------


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor, shift: float = 0.0) -> Tensor:
        return self.layer(x) * scale + shift


Batch = namedtuple("Batch", ["x", "scale"])


@pytest.mark.parametrize(
    "batch",
    [
        (data(), torch.tensor(2.0)),
        (data(), torch.tensor(2.0), 0.0),
        Batch(data(), torch.tensor(2.0)),
        {"x": data(), "scale": torch.tensor(2.0)},
        {"x": data(), "scale": torch.tensor(2.0), "shift": 0.0},
    ],
    ids=["tuple", "three", "namedtuple", "dict", "dict3"],
)
def test_ways_to_hand_over_data(batch: Any) -> None:
    torch.manual_seed(0)
    each = Keywords()
    inspection = Inspector(each, keep="tensors").run_inspection(batch)
    assert torch.equal(inspection["layer"].activations, each.layer(data()))


def test_batch_encoding() -> None:
    transformers = pytest.importorskip("transformers")

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 2)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.embedding(input_ids)

    batch = transformers.BatchEncoding(
        {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[1, 0]])}
    )
    inspector = Inspector(Reads())
    inspector.run_inspection(batch)
    assert inspector.get_statistics("embedding").positions == (1, 2)


def test_data_loader_batch_is_told_how() -> None:
    loader = DataLoader(TensorDataset(data(), torch.tensor([0, 1])), batch_size=2)
    (batch,) = list(loader)
    with pytest.raises(InspectionError, match=r"list of 2.*DataLoader.*target=y with a loss"):
        Inspector(model()).run_inspection(batch)


def test_tuple_with_the_target_in_it_is_told_how() -> None:
    with pytest.raises(InspectionError, match=r"2 positional arguments.*target=y"):
        Inspector(model()).run_inspection((data(), torch.tensor([0, 1])))


def test_model_that_takes_a_list() -> None:
    class Joins(nn.Module):
        def forward(self, parts: list[Tensor]) -> Tensor:
            return torch.cat(parts)

    inspector = Inspector(Joins())
    inspector.watch("")
    inspector.run_inspection(([data(), data()],))
    assert inspector.get_statistics("").count == 16


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loss": "sum"}, lambda y: y.sum()),
        ({"loss": lambda y: y.pow(2).mean()}, lambda y: y.pow(2).mean()),
        (
            {"loss": nn.CrossEntropyLoss(), "target": torch.tensor([0, 2])},
            lambda y: nn.functional.cross_entropy(y, torch.tensor([0, 2])),
        ),
        (
            {"loss": nn.functional.mse_loss, "target": torch.ones(2, 3)},
            lambda y: nn.functional.mse_loss(y, torch.ones(2, 3)),
        ),
        ({"loss": lambda y: y.sum().reshape(1, 1)}, lambda y: y.sum()),
    ],
    ids=["sum", "function", "module_and_target", "function_and_target", "one_number"],
)
def test_losses(options: dict[str, Any], expected: Any) -> None:
    each = model()
    inspector = Inspector(each, keep="tensors")
    inspector.watch("*", "gradients")
    inspection = inspector.run_inspection(data(), **options)
    output = each(data()).detach().requires_grad_()
    value = expected(output)
    value.backward()
    assert inspection.loss == float(value)
    assert torch.equal(inspection["2"].gradients, output.grad)


def test_loss_module_stays_as_it_was() -> None:
    loss = nn.CrossEntropyLoss().eval()
    inspector = Inspector(model())
    inspector.watch("*", "gradients")
    inspector.run_inspection(data(), target=torch.tensor([0, 1]), loss=loss)
    assert not loss.training
    assert not loss._forward_hooks


class OwnLoss(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 3), kind

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        loss = y.pow(2).sum()
        if self.kind == "scalar":
            return loss
        if self.kind == "dict":
            return {"logits": y, "loss": loss}
        return namedtuple("Output", ["loss", "logits"])(loss, y)


@pytest.mark.parametrize("kind", ["scalar", "dict", "attribute"])
def test_loss_of_the_model_itself(kind: str) -> None:
    each = OwnLoss(kind)
    inspector = Inspector(each, keep="tensors")
    inspector.watch("*", ["gradients", "activations"])
    record = inspector.run_inspection(data())["layer"]
    torch.testing.assert_close(record.gradients, 2 * record.activations)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, r"no loss.*loss='sum'.*target=y with a loss"),
        ({"target": torch.tensor([0, 1])}, r"target was given without a loss"),
        ({"loss": "mean"}, r"loss='mean'.*'sum'"),
        ({"loss": lambda y: y}, r"loss must be one number.*\(2, 3\).*mean"),
        ({"loss": lambda y: 3.0}, r"loss must be one number.*float"),
        ({"loss": lambda y: None}, r"loss"),
        ({"loss": lambda y: y.detach().sum()}, r"does not require grad"),
        ({"loss": 3}, r"loss=3"),
    ],
)
def test_bad_losses(options: dict[str, Any], match: str) -> None:
    each = model()
    inspector = Inspector(each)
    inspector.watch("*", "gradients")
    before = state_of(each)
    with pytest.raises(InspectionError, match=match):
        inspector.run_inspection(data(), **options)
    assert_same_state(before, state_of(each))


def test_loss_sum_without_numbers_to_sum() -> None:
    class Integers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).argmax(-1)

    inspector = Inspector(Integers())
    inspector.watch("*", "gradients")
    with pytest.raises(InspectionError, match=r"loss='sum' needs a floating-point output"):
        inspector.run_inspection(data(), loss="sum")


def test_no_loss_is_needed_for_activations() -> None:
    inspection = Inspector(model()).run_inspection(data())
    assert inspection.loss is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_where_grad_mode_is_off(mode: Any) -> None:
    each = model()
    inspector = Inspector(each)
    inspector.watch("*", "gradients")
    with mode(), pytest.raises(InspectionError, match=r"grad mode is off.*no_grad"):
        inspector.run_inspection(data(), loss="sum")
    assert hooks_on(each) == 0
    inspector = Inspector(each)
    with mode():
        inspector.run_inspection(data())
    assert inspector.get_statistics("0").count == 10


def test_model_that_switches_grad_off_itself() -> None:
    class NoGrad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    inspector = Inspector(NoGrad())
    inspector.watch("*", "gradients")
    with pytest.raises(InspectionError, match=r"does not require grad.*no_grad"):
        inspector.run_inspection(data(), loss="sum")


def test_data_that_the_model_rejects() -> None:
    each = model()
    inspector = Inspector(each)
    inspector.watch("*", WHAT)
    before = state_of(each)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        inspector.run_inspection(torch.ones(2, 9), loss="sum")
    assert not isinstance(caught.value, InspectionError)
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        inspector.run_inspection({"y": data()}, loss="sum")
    assert_same_state(before, state_of(each))


def test_layers_that_left_the_model() -> None:
    each = model()
    inspector = Inspector(each)
    inspector.watch("2")
    del each[2]
    with pytest.raises(InspectionError, match=r"no longer in the model: '2'.*new Inspector"):
        inspector.run_inspection(data())


def test_layer_that_was_replaced_is_the_new_one() -> None:
    each = model()
    inspector = Inspector(each, keep="tensors")
    inspector.watch("2")
    each[2] = nn.Linear(5, 7)
    assert inspector.run_inspection(data())["2"].activations.shape == (2, 7)


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    each = model()
    inspector = Inspector(each)
    inspector.watch("*", WHAT)
    for value in ("off", "OFF", " off "):
        monkeypatch.setenv("TORCHFMRI", value)
        with inspector.recording() as inspection:
            assert hooks_on(each) == 0
            each(data())
        assert "TORCHFMRI=off" in inspection.missing["0"]
        assert inspection["0"].calls == []
        inspection = inspector.run_inspection(data(), loss="sum")
        assert "TORCHFMRI=off" in inspection.missing["0"]
        with pytest.raises(InspectionError, match="TORCHFMRI=off"):
            inspector.get_statistics("0")
        inspection.table()
    monkeypatch.setenv("TORCHFMRI", "on")
    assert inspector.run_inspection(data(), loss="sum")["0"].calls
    monkeypatch.delenv("TORCHFMRI")
    assert inspector.run_inspection(data(), loss="sum")["0"].calls


# -- keeping -----------------------------------------------------------------------------------


def test_only_statistics_are_kept_unless_asked() -> None:
    inspector = Inspector(model())
    inspection = inspector.run_inspection(data())
    with pytest.raises(InspectionError, match=r"keep='tensors'"):
        _ = inspection["0"].activations
    with pytest.raises(InspectionError, match=r"keep='tensors'"):
        _ = inspector.captured_data
    assert inspector.run_inspection(data(), keep="tensors")["0"].activations.shape == (2, 5)
    with pytest.raises(InspectionError, match=r"keep='tensors'"):
        _ = inspector.run_inspection(data())["0"].activations


def test_kept_tensors_have_memory_of_their_own() -> None:
    """On the CPU `.cpu()` returns the same tensor: what we keep must not be what the model has."""
    held: list[Tensor] = []

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            held.append(self.layer(x))
            return held[-1]

    each = Holds()
    for options in ({}, {"device": "cpu"}, {"dtype": torch.float32}):
        inspector = Inspector(each, keep="tensors", **options)
        inspector.watch("layer", ["activations", "inputs", "parameters"])
        x = data()
        with inspector.recording() as inspection:
            each(x)
        record = inspection["layer"]
        before = [record.activations.clone(), record.inputs.clone()]
        with torch.no_grad():
            held[-1].zero_()
            x.zero_()
            weight = each.layer.weight.clone()
            each.layer.weight.zero_()
        assert same_bits(record.activations, before[0])
        assert same_bits(record.inputs, before[1])
        assert same_bits(record.parameters["weight"], weight)
        with torch.no_grad():
            each.layer.weight.copy_(weight)


def test_dtype_is_that_of_floating_point_tensors_alone() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.layer(x)
            return y, y.argmax(-1), y > 0, torch.complex(y, y)

    inspector = Inspector(Mixed(), keep="tensors", dtype=torch.bfloat16)
    inspector.watch("")
    (call,) = inspector.run_inspection(data())[""].calls
    dtypes = [each.dtype for each in call.activations]
    assert dtypes == [torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    assert call.value("activations").dtype == torch.float32, "what the model computed"


def test_device() -> None:
    inspector = Inspector(model(), keep="tensors", device="meta")
    inspection = inspector.run_inspection(data())
    assert inspection["0"].activations.device.type == "meta"


@pytest.mark.parametrize("way", ["run_inspection", "recording"])
def test_memory_limit_in_the_forward_pass(way: str) -> None:
    each = model()
    inspector = Inspector(each, keep="tensors", max_bytes=2 * 5 * 4 * 2)
    before = state_of(each)

    def run() -> None:
        if way == "recording":
            with inspector.recording():
                each(data())
        else:
            inspector.run_inspection(data())

    with pytest.raises(MemoryLimitError) as caught:
        run()
    error = caught.value
    assert (error.layer, error.needed, error.kept, error.max_bytes) == ("2", 24, 80, 80)
    assert "'2'" in str(error)
    assert "24 bytes" in str(error)
    assert "max_bytes=80" in str(error)
    assert isinstance(error, MemoryError)
    assert isinstance(error, InspectionError)
    assert_same_state(before, state_of(each))
    assert inspector.inspection["0"].activations.shape == (2, 5), "what fitted is there"


def test_memory_limit_in_the_backward_pass_leaves_grad_whole() -> None:
    """Raised when the block ends: inside backward it would leave `.grad` half filled."""
    plain, each = model(), model()
    plain(data()).sum().backward()
    inspector = Inspector(each, keep="tensors", max_bytes=30)
    inspector.watch("*", "gradients")

    def run() -> None:
        with inspector.recording():
            each(data()).sum().backward()
            assert each[0].weight.grad is not None

    with pytest.raises(MemoryLimitError, match="'1'"):
        run()
    for ours, theirs in zip(each.parameters(), plain.parameters(), strict=True):
        assert same_bits(ours.grad, theirs.grad)
    assert hooks_on(each) == 0


def test_memory_limit_counts_the_dtype_that_is_kept() -> None:
    options = {"keep": "tensors", "max_bytes": 2 * (5 + 5 + 3) * 2}
    Inspector(model(), dtype=torch.bfloat16, **options).run_inspection(data())
    with pytest.raises(MemoryLimitError):
        Inspector(model(), **options).run_inspection(data())
    with pytest.raises(MemoryLimitError):
        Inspector(model()).run_inspection(data(), keep="tensors", max_bytes=0)
    Inspector(model(), max_bytes=0).run_inspection(data())  # statistics take none of it


@pytest.mark.parametrize("warned", ["always", "error"])
def test_failure_of_ours_never_stops_the_users_training(
    monkeypatch: pytest.MonkeyPatch, warned: Any
) -> None:
    """One warning, when the block ends; also where warnings are errors."""

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(torchfmri._records.values, "calculate_statistics", broken)
    plain, each = model(), model()
    plain(data()).sum().backward()
    inspector = Inspector(each)
    inspector.watch("*", WHAT)
    done = False

    def train() -> None:
        nonlocal done
        with inspector.recording():
            each(data()).sum().backward()
            done = True

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(warned)
        with contextlib.suppress(RuntimeWarning):
            train()
    assert done
    for ours, theirs in zip(each.parameters(), plain.parameters(), strict=True):
        assert same_bits(ours.grad, theirs.grad)
    assert hooks_on(each) == 0
    assert "a bug of ours" in inspector.inspection.missing["0"]
    if warned == "always":
        (warning,) = [w for w in caught if issubclass(w.category, RuntimeWarning)]
        assert "a bug of ours" in str(warning.message)
        assert "inspection.missing" in str(warning.message)


# -- reading -----------------------------------------------------------------------------------


def test_reading_before_running() -> None:
    inspector = Inspector(model())
    for read in (
        lambda: inspector.inspection,
        lambda: inspector.captured_data,
        lambda: inspector.get_statistics("0"),
    ):
        with pytest.raises(InspectionError, match=r"Nothing was inspected yet.*run_inspection"):
            read()


def test_get_statistics() -> None:
    each = model()
    inspector = Inspector(each)
    inspector.watch("*", ["activations", "gradients", "parameters"], per="channel")
    inspector.run_inspection(data(), loss="sum")
    output = each[0](data()).detach().double()
    found = inspector.get_statistics("0")
    assert found["mean"] == pytest.approx(float(output.mean()), rel=1e-6)
    assert found["std"] == pytest.approx(float(output.std(correction=0)), rel=1e-6)
    assert found["count"] == 10
    assert set(found) >= {"mean", "std", "min", "max", "nan", "inf", "zero", "quantiles"}
    assert inspector.get_statistics("2", "gradients")["mean"] == 1
    weight = inspector.get_statistics("0", "parameters", element="weight")
    assert weight["count"] == 20
    assert inspector.get_statistics("0", "parameters")["count"] == 25
    channels = inspector.get_statistics("0", per="channel")
    torch.testing.assert_close(
        torch.as_tensor(channels.mean), output.mean(0), check_dtype=False, rtol=1e-6, atol=1e-6
    )


def test_get_statistics_of_several_layers() -> None:
    inspector = Inspector(model())
    inspector.watch("*")
    inspector.watch("2", "gradients")
    inspector.run_inspection(data(), loss="sum")
    one = {name: inspector.get_statistics(name) for name in "012"}
    assert inspector.get_statistics(layer_name="0") == one["0"]
    assert inspector.get_statistics("*") == one
    assert list(inspector.get_statistics("*")) == ["0", "1", "2"], "in model order"
    assert inspector.get_statistics(layer_name="[12]") == {"1": one["1"], "2": one["2"]}
    assert inspector.get_statistics(["2", "0"]) == {"0": one["0"], "2": one["2"]}
    assert inspector.get_statistics(layer_name=nn.ReLU) == {"1": one["1"]}
    assert list(inspector.get_statistics("*", "gradients")) == ["2"], "only there were they watched"
    assert json.loads(json.dumps(inspector.get_statistics("*")))["1"]["zero"] == one["1"].zero


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "takes the name of a layer"),
        ({"layer": "0", "layer_name": "0"}, "takes the name of a layer"),
        ({"layer_name": "conv*"}, r"No layer matches 'conv\*'"),
        ({"layer_name": ["0", "conv"]}, "No layer matches 'conv'"),
        ({"layer_name": "*", "what": "gradients"}, "'gradients' of '0' was not watched"),
        ({"layer_name": "[12]"}, "'1' was not watched in the latest run"),
        ({"layer": 3}, "not 3"),
    ],
)
def test_bad_choice_of_layers(arguments: Any, match: str) -> None:
    inspector = Inspector(model())
    inspector.watch("0")
    inspector.run_inspection(data())
    with pytest.raises(InspectionError, match=match):
        inspector.get_statistics(**arguments)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("output", "activations"),
        ("outputs", "activations"),
        ("Outputs", "activations"),
        ("input", "inputs"),
        ("grad", "gradients"),
        ("grad_output", "gradients"),
        ("grad_input", "input_gradients"),
        ("weights", "parameters"),
    ],
)
def test_word_of_another_library_is_understood(word: str, meant: str) -> None:
    with pytest.raises(InspectionError, match=f"Did you mean '{meant}'"):
        Inspector(model()).watch("*", word)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("3",), r"No layer matches '3' among 3 layers"),
        (("0", "inputs"), r"'inputs' of '0' was not watched, only.*watch\('0', what='inputs'\)"),
        (("0", "input"), r"Cannot watch 'input'"),
        (("0", "activations", {"element": "logits"}), r"no element 'logits'"),
        (("0", "activations", {"element": 3}), r"no element 3"),
        (("0", "activations", {"call": 7}), r"1 calls, not call 7|1 call, not call 7"),
        (("0", "activations", {"per": "unit"}), r"per='unit'"),
        (("0", "parameters", {"element": "gain"}), r"no parameters 'gain'.*weight"),
        (("0", "activations", {"per": "channel"}), r"per='channel'"),
    ],
)
def test_bad_reading(arguments: Any, match: str) -> None:
    inspector = Inspector(model())
    inspector.watch("*", ["activations", "parameters"])
    inspector.run_inspection(data())
    layer, what, options = (*arguments, None, {})[:3] if len(arguments) < 3 else arguments
    options = options or {}
    with pytest.raises(InspectionError, match=match):
        inspector.get_statistics(layer, what, **options)


def test_no_gradient_arrived_is_an_error_with_the_reason() -> None:
    each = model()
    each[0].requires_grad_(False)
    inspector = Inspector(each)
    inspector.watch("*", "gradients")
    inspection = inspector.run_inspection(data(), loss="sum")
    assert inspection["0"].statistics("gradients") is None
    with pytest.raises(InspectionError, match=r"No gradients of '0'.*require grad|none arrived"):
        inspector.get_statistics("0", "gradients")


def test_captured_data() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    each = Twice()
    inspector = Inspector(each, keep="tensors")
    inspector.watch("*", ["activations", "parameters", "gradients"])
    inspector.run_inspection(data(), loss="sum")
    captured = inspector.captured_data
    assert set(captured) == {"layer"}
    assert [each_.shape for each_ in captured["layer"]["activations"]] == [(2, 4), (2, 4)]
    assert set(captured["layer"]["parameters"]) == {"weight", "bias"}
    assert torch.equal(captured["layer"]["gradients"][1], torch.ones(2, 4))


def test_layer_that_is_not_called_is_missing_with_the_reason() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    inspector = Inspector(Idle(), keep="tensors")
    inspection = inspector.run_inspection(data())
    assert set(inspection.missing) == {"idle"}
    assert "never called" in inspection.missing["idle"]
    with pytest.raises(InspectionError, match=r"'idle'.*never called"):
        inspector.get_statistics("idle")
    with pytest.raises(InspectionError, match=r"'idle' was never called"):
        _ = inspection["idle"].activations


def test_merged_over_calls() -> None:
    each = nn.Linear(4, 4)
    inspector = Inspector(each)
    inspector.watch("")
    with inspector.recording() as inspection:
        outputs = [each(data() * scale) for scale in (1, 2, 3)]
    found = inspection[""].statistics()
    both = torch.stack(outputs).detach().double()
    assert found.count == 24
    assert found.mean == pytest.approx(float(both.mean()), rel=1e-6)
    assert found.max == float(both.max())
    for call, output in enumerate(outputs):
        one = inspector.get_statistics("", call=call)
        assert one.max == float(output.max())
    assert inspector.get_statistics("", call=-1).max == float(outputs[-1].max())


def test_inspections_do_not_change_with_the_next_run() -> None:
    inspector = Inspector(model(), keep="tensors")
    first = inspector.run_inspection(data())
    kept = first["0"].activations.clone()
    second = inspector.run_inspection(data() * 2)
    assert torch.equal(first["0"].activations, kept)
    assert not torch.equal(second["0"].activations, kept)
    assert inspector.inspection is second


def test_inspection_is_a_mapping_in_model_order() -> None:
    inspection = Inspector(model()).run_inspection(data())
    assert list(inspection) == ["0", "1", "2"]
    assert len(inspection) == 3
    assert "0" in inspection
    assert "9" not in inspection
    with pytest.raises(LookupError, match="'9'"):
        inspection["9"]
    assert inspection.get("0") is inspection["0"]
    assert [call.layer for call in inspection.calls()] == ["0", "1", "2"]


def test_get_with_a_default() -> None:
    """Mapping.get catches KeyError alone; a default must still work."""
    inspection = Inspector(model()).run_inspection(data())
    assert inspection.get("9") is None
    assert inspection.get("9", 3) == 3


def test_calls_are_in_the_order_in_which_they_finished() -> None:
    inspector = Inspector(nn.Sequential(model(), nn.Tanh()))
    inspector.watch(["", "*"])
    inspection = inspector.run_inspection(data())
    assert [call.layer for call in inspection.calls()] == ["0.0", "0.1", "0.2", "0", "1", ""]


def test_representations_say_something() -> None:
    inspector = Inspector(model())
    assert repr(inspector) == "<Inspector of Sequential: nothing watched: all leaf layers>"
    inspector.watch("0", ["activations", "gradients"])
    assert "1 layer" in repr(inspector)
    inspection = inspector.run_inspection(data(), loss="sum")
    text = repr(inspection)
    assert "Sequential" in text
    assert "activations, gradients" in text
    assert f"{inspection.loss:.6g}" in text
    assert "\n" not in text
    assert "Linear" in repr(inspection["0"])
    assert "1 call" in repr(inspection["0"])
    assert "0" in inspection.table()
    assert "<table" in inspection._repr_html_()


def test_to_dict_is_json() -> None:
    inspector = Inspector(model())
    inspector.watch("*", ["activations", "gradients", "parameters"])
    found = inspector.run_inspection(data(), loss="sum").to_dict()
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again["layers"]["0"]["activations"]["count"] == 10
    assert again["model"] == "Sequential"


def test_errors_can_be_pickled() -> None:
    errors = [
        LayerNotFoundError("a", ["b"], 3),
        MemoryLimitError("a", 1, 2, 3),
        InspectionError("text"),
    ]
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_inspector_can_be_copied_and_pickled() -> None:
    inspector = Inspector(model())
    inspector.watch("0")
    inspector.run_inspection(data())
    for twin in (copy.deepcopy(inspector), pickle.loads(pickle.dumps(inspector))):
        assert twin.watched == inspector.watched
        assert twin.run_inspection(data())["0"].calls
        assert twin.model is not inspector.model


def test_public_names() -> None:
    assert len(set(torchfmri.__all__)) == len(torchfmri.__all__)  # ruff keeps them in order
    for name in torchfmri.__all__:
        assert getattr(torchfmri, name) is not None


# -- what the numbers are ------------------------------------------------------------------------


def test_everything_at_once() -> None:
    """All six kinds, from one run, against plain PyTorch."""
    each = model().double()
    x = data().double()
    inspector = Inspector(each, keep="tensors")
    inspector.watch("*", [*WHAT, "parameter_gradients"])
    inspection = inspector.run_inspection(x, loss="sum")
    h = each[0](x)
    a = h.relu()
    y = each[2](a)
    dh, da, dy = torch.autograd.grad(y.sum(), [h, a, y], retain_graph=True)
    record = inspection["2"]
    assert torch.equal(record.inputs, a)
    assert torch.equal(record.activations, y)
    assert torch.equal(record.gradients, dy)
    torch.testing.assert_close(record.input_gradients, da)
    torch.testing.assert_close(inspection["1"].input_gradients, dh)
    assert torch.equal(record.parameters["weight"], each[2].weight)
    (weight,) = torch.autograd.grad(y.sum(), each[2].weight)
    torch.testing.assert_close(record.parameter_gradients["weight"], weight)


def test_layer_that_exists_but_was_not_watched_says_so() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    inspector = Inspector(model)
    inspector.watch("0")
    inspector.run_inspection(torch.ones(1, 2))
    with pytest.raises(InspectionError, match=r"not watched.*inspector\.watch\('1'\)"):
        inspector.get_statistics("1")


def test_loss_that_needs_a_target_shows_the_line_to_write() -> None:
    inspector = Inspector(nn.Linear(2, 2))
    inspector.watch("", what="gradients")
    with pytest.raises(InspectionError, match="target=y"):
        inspector.run_inspection(torch.ones(1, 2), loss=nn.CrossEntropyLoss())


def test_wrong_kinds_of_arguments_are_named() -> None:
    inspector = Inspector(nn.Linear(2, 2))
    with pytest.raises(InspectionError, match="max_bytes='1GB'"):
        inspector.run_inspection(torch.ones(1, 2), max_bytes="1GB")
    inspection = inspector.run_inspection(torch.ones(1, 2))
    assert repr(inspection[""].calls[0]) == (
        "<Call 0 of '': 1 tensors returned, 0 backward passes>"
    )


# -- layers whose backward pass is special -------------------------------------------------------


class Recomputed(torch.autograd.Function):
    """As reversible layers do: the backward pass runs the layer again, and `backward()` on it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), gradients[0])
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Recomputed.apply(self.first(x), self.second)


@pytest.mark.parametrize("filled", [False, True])
def test_a_function_that_runs_backward_passes_leaves_no_grad(filled: bool) -> None:
    reversible = Reversible()
    if filled:
        reversible(data()).square().sum().backward()
    before = state_of(reversible)
    inspector = Inspector(reversible)
    inspector.watch("first", ["gradients", "parameter_gradients"])
    inspector.run_inspection(data(), loss="sum")
    assert_same_state(before, state_of(reversible))


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    meeting = f"file://{tmp_path}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("each_layer", [False, True])
def test_parameter_gradients_of_a_sharded_model(each_layer: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain, sharded = model(), model()
    mesh = init_device_mesh("cpu", (1,))
    for layer in (sharded[0], sharded[2], sharded) if each_layer else (sharded,):
        fully_shard(layer, mesh=mesh)
    plain(data()).square().sum().backward()
    inspector = Inspector(sharded, keep="tensors")
    inspector.watch("[02]", "parameter_gradients")
    for _ in range(2):  # the second time the parameters were gathered before
        inspection = inspector.run_inspection(data(), loss=lambda y: y.square().sum())
        assert inspection.missing == {}
        for name in ("0", "2"):
            found = inspector.captured_data[name]["parameter_gradients"]
            for key, parameter in plain[int(name)].named_parameters():
                torch.testing.assert_close(found[key], parameter.grad)
        assert all(parameter.grad is None for parameter in sharded.parameters())
    assert any("before they are averaged" in note for note in inspection.notes)


def test_why_no_parameter_gradient_arrived() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.apart = (nn.Linear(4, 3) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) + self.frozen(x) + self.apart(x).detach()

    inspector = Inspector(Both())
    inspector.watch(["frozen", "apart"], "parameter_gradients")
    missing = inspector.run_inspection(data(), loss="sum").missing
    assert missing["frozen"] == "parameter_gradients: none arrived: frozen"
    assert missing["apart"] == "parameter_gradients: none arrived: not on the path from the loss"
