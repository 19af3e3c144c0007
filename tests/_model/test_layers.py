"""Names of layers: model order, wrappers stripped, one instance under all its names."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchfmri
from torchfmri import InspectionError, Inspector, LayerNotFoundError
from torchfmri._model.layers import (
    each_once,
    find_layers,
    first_names,
    leaf_layers,
    named_layers,
    named_parameters,
    runnable,
    unwrap,
)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def model() -> nn.Module:
    """encoder.{0,1} blocks, then a head; `tied` is the head's second name."""
    made = nn.Module()
    made.encoder = nn.ModuleList([block(), block()])
    made.head = nn.Linear(2, 2)
    made.tied = made.head
    return made


def test_names_are_those_of_named_modules_in_model_order() -> None:
    each = model()
    assert list(named_layers(each)) == [
        name for name, _ in each.named_modules(remove_duplicate=False)
    ]


def test_one_instance_under_two_names_is_found_by_both() -> None:
    layers = named_layers(model())
    assert layers["head"] is layers["tied"]
    assert find_layers(layers, "tied") == ["tied"]
    assert find_layers(layers, "{head,tied}") == ["head", "tied"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", 9),
        ("*.0", ["encoder.0", "encoder.0.0", "encoder.1.0"]),
        (nn.Linear, ["encoder.0.0", "encoder.1.0", "head", "tied"]),
        ([nn.ReLU, "head"], ["encoder.0.1", "encoder.1.1", "head"]),
        (("head", "head"), ["head"]),
        ({"head"}, ["head"]),
        ("", [""]),
        (["", "head"], ["", "head"]),
        ("encoder", ["encoder"]),
    ],
    ids=str,
)
def test_find(pattern: Any, expected: Any) -> None:
    found = find_layers(named_layers(model()), pattern)
    assert found == expected if isinstance(expected, list) else len(found) == expected


def test_star_is_every_layer_but_the_model_itself() -> None:
    layers = named_layers(model())
    assert find_layers(layers, "*") == [name for name in layers if name]
    assert find_layers(named_layers(nn.Linear(1, 1)), "*") == [""]


def test_order_is_that_of_the_model_not_of_the_patterns() -> None:
    assert find_layers(named_layers(model()), ["head", "encoder.0"]) == ["encoder.0", "head"]


def test_exclude() -> None:
    layers = named_layers(model())
    assert find_layers(layers, nn.Linear, exclude="encoder.*") == ["head", "tied"]
    assert find_layers(layers, nn.Linear, exclude=["encoder.*", "tied"]) == ["head"]
    assert find_layers(layers, "head", exclude="nothing.like.it") == ["head"]
    with pytest.raises(InspectionError, match=r"'head'.*excluded by.*Linear"):
        find_layers(layers, "head", exclude=nn.Linear)


def test_nothing_found_names_the_nearest() -> None:
    layers = named_layers(model())
    with pytest.raises(LayerNotFoundError) as caught:
        find_layers(layers, "encoderr")
    error = caught.value
    assert error.pattern == "encoderr"
    assert error.nearest[0] == "encoder"
    assert error.count == 9
    assert "No layer matches 'encoderr' among 9 layers" in str(error)
    assert "Nearest: 'encoder'" in str(error)
    assert str(error).endswith("List them with torchfmri.Inspector(model).layers().")
    assert isinstance(error, LookupError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_type_not_found_names_the_types_there_are() -> None:
    with pytest.raises(LayerNotFoundError, match=r"'LazyLinear'.*Nearest.*'Linear'") as caught:
        find_layers(named_layers(model()), nn.LazyLinear)
    assert caught.value.pattern == "LazyLinear"
    assert "Linear" in caught.value.nearest


def test_one_bad_pattern_in_a_list_is_an_error() -> None:
    with pytest.raises(LayerNotFoundError, match="'nowhere'"):
        find_layers(named_layers(model()), ["head", "nowhere"])


@pytest.mark.parametrize(
    "pattern", [3, None, [], [3], [int], int, [None], nn.Linear(1, 1)], ids=str
)
def test_not_a_pattern(pattern: Any) -> None:
    with pytest.raises(InspectionError, match="pattern") as caught:
        find_layers(named_layers(model()), pattern)
    assert "nn.Linear" in str(caught.value)


def test_leaves() -> None:
    assert leaf_layers(named_layers(model())) == [
        "encoder.0.0",
        "encoder.0.1",
        "encoder.1.0",
        "encoder.1.1",
        "head",
        "tied",
    ]
    assert leaf_layers(named_layers(nn.Linear(1, 1))) == [""]


# -- wrappers --------------------------------------------------------------------------------------


def wrapper(kind: str, child: str, inner: nn.Module) -> nn.Module:
    """A module that calls itself as the real wrapper does, without its dependencies."""
    made = type(
        kind, (nn.Module,), {"forward": lambda self, *a, **k: getattr(self, child)(*a, **k)}
    )()
    made.add_module(child, inner)
    return made


WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


@pytest.mark.parametrize(("kind", "child"), WRAPPERS.items())
def test_wrapper_is_stripped_outside_and_inside(kind: str, child: str) -> None:
    plain = nn.Sequential(block(), nn.Linear(2, 2))
    expected = list(named_layers(plain))
    inner = plain[0]
    plain[0] = wrapper(kind, child, inner)
    wrapped = wrapper(kind, child, plain)
    layers = named_layers(wrapped)
    assert list(layers) == expected
    assert layers["0"] is inner
    assert layers[""] is plain
    assert unwrap(wrapped) is plain


def test_wrappers_in_wrappers() -> None:
    plain = block()
    wrapped = wrapper("OptimizedModule", "_orig_mod", wrapper("DataParallel", "module", plain))
    assert unwrap(wrapped) is plain
    assert list(named_layers(wrapped)) == ["", "0", "1"]


def test_real_wrappers() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(block(), nn.Linear(2, 2))
    plain[0] = checkpoint_wrapper(plain[0])
    expected = ["", "0", "0.0", "0.1", "1"]
    assert list(named_layers(plain)) == expected
    assert list(named_layers(nn.DataParallel(plain))) == expected
    assert list(named_layers(torch.compile(plain))) == expected
    inspection = Inspector(torch.compile(plain)).run_inspection(torch.ones(1, 2))
    assert list(inspection) == ["0.0", "0.1", "1"]
    assert not inspection.missing


def test_peft_model() -> None:
    """PeftModel(base_model=LoraModel(model=...)): both levels go."""
    plain = block()
    tuner = type("BaseTuner", (nn.Module,), {})
    lora = type("LoraModel", (tuner,), {})()
    lora.model = plain
    peft = type("PeftModel", (nn.Module,), {})
    made = type("PeftModelForCausalLM", (peft,), {})()
    made.base_model = lora
    assert list(named_layers(made)) == ["", "0", "1"]


@pytest.mark.parametrize("child", ["module", "model", "base_model", "_orig_mod"])
def test_an_ordinary_child_of_that_name_stays(child: str) -> None:
    class Ours(nn.Module):
        pass

    made = Ours()
    made.add_module(child, nn.Linear(2, 2))
    assert list(named_layers(made)) == ["", child]


def test_runnable_keeps_wrappers_that_do_work() -> None:
    plain = block()
    for kind in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        assert runnable(wrapper(kind, WRAPPERS[kind], plain)) is plain
    for kind in ("FullyShardedDataParallel", "CheckpointWrapper"):
        wrapped = wrapper(kind, WRAPPERS[kind], plain)
        assert runnable(wrapped) is wrapped


def test_child_that_knows_its_parent() -> None:
    class Child(nn.Module):
        pass

    parent = nn.Module()
    parent.child = Child()
    parent.child.parent = parent
    assert list(named_layers(parent)) == ["", "child"]


def test_none_children_and_scripted_children() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_module("absent", None)
            self.scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))

        def forward(self, x: Tensor) -> Tensor:
            return self.scripted(x)

    assert list(named_layers(Optional())) == ["", "scripted", "scripted.0"]


def test_each_module_and_parameter_once_by_its_first_name() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Linear(2, 2, bias=False), shared)
    model[1].weight = shared.weight
    layers = named_layers(model)
    assert first_names(layers) == {"": "", "0": "0", "1": "1", "2": "0"}
    assert list(each_once(layers)) == ["", "0", "1"]
    parameters = named_parameters(layers)
    assert list(parameters) == ["0.weight", "0.bias", "1.weight", "2.weight", "2.bias"]
    assert list(each_once(parameters)) == ["0.weight", "0.bias"]
    # torch's own walk agrees where nothing is wrapped.
    assert each_once(parameters) == dict(model.named_parameters())


@pytest.mark.parametrize(
    "use",
    [
        lambda model, x: torchfmri.cost(model, x, "sum", rounds=0),
        lambda model, x: torchfmri.verify_gradients(model, x, "sum"),
        lambda model, x: torchfmri.diagnose(
            model, [(x, x)], nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), 1, show=False
        ),
    ],
    ids=["cost", "verify_gradients", "diagnose"],
)
def test_a_scripted_layer_is_named(use: Callable[[nn.Module, Tensor], object]) -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    for model, name in [
        (nn.Sequential(nn.Linear(4, 4), scripted), "Layer '1'"),
        (scripted, "The model"),
    ]:
        with pytest.raises(InspectionError, match=rf"{name} is TorchScript.*Put the nn\.Module"):
            use(model, torch.randn(2, 4))
