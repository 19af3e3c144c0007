"""Every architecture of transformers: watching changes no bit, and what is seen is right.

Judged by means that share nothing with the package: bytes before and after, plain cloning hooks,
and for gradients an oracle that replaces a tensor by itself plus e and reads dL/de.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from architectures import ARCHITECTURES, Batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchfmri import Inspection, Inspector

pytestmark = pytest.mark.usefixtures("one_thread")

WHAT = (
    *("inputs", "activations", "gradients", "input_gradients"),
    *("parameters", "parameter_gradients"),
)
CASES = [(each.name, kind) for each in ARCHITECTURES.values() for kind in each.attention or (None,)]
SEED = 11

# Layers that are never called: attention does without its dropout where that is fused, and a cast
# or an activation may be skipped.
SKIPPED = {
    ("gpt2", "eager"): {f"transformer.h.{i}.attn.attn_dropout" for i in (0, 1)},
    ("gpt2", "sdpa"): {f"transformer.h.{i}.attn.attn_dropout" for i in (0, 1)},
    ("bert", "eager"): {f"bert.encoder.layer.{i}.attention.self.dropout" for i in (0, 1)},
    ("bert", "sdpa"): {f"bert.encoder.layer.{i}.attention.self.dropout" for i in (0, 1)},
    ("albert", "eager"): {
        f"albert.encoder.albert_layer_groups.0.albert_layers.0.{part}"
        for part in ("dropout", "attention.attention_dropout")
    },
    ("albert", "sdpa"): {
        f"albert.encoder.albert_layer_groups.0.albert_layers.0.{part}"
        for part in ("dropout", "attention.attention_dropout")
    },
    ("mamba", None): {f"backbone.layers.{i}.mixer.act" for i in (0, 1)},
}
# Layers that own parameters and are never called: another module uses their weight.
USED_BY_OTHERS = {
    "mamba": {
        f"backbone.layers.{i}.mixer.{name}" for i in (0, 1) for name in ("conv1d", "dt_proj")
    },
    "t5": {"shared"},
}
# Several experts in one three-dimensional parameter, used by one module.
FUSED_EXPERTS = {
    "qwen3-moe": "model.layers.0.mlp.experts",
    "mixtral": "model.layers.0.mlp.experts",
    "deepseek-v3": "model.layers.1.mlp.experts",
    "gpt-oss": "model.layers.0.mlp.experts",
}


# -- running and comparing -------------------------------------------------------------------


def bits(tensor: Tensor | None) -> bytes | None:
    """Every bit of a tensor, so that -0.0 differs from 0.0 and NaN equals itself."""
    if tensor is None:
        return None
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Step(NamedTuple):
    """The bits of a training step: what a watcher may not change."""

    loss: bytes | None
    gradients: dict[str, bytes | None]
    random: bytes | None


def step(model: nn.Module, batch: Batch, autocast: bool = False) -> Step:
    """One forward and backward pass from a fixed seed; `.grad` is empty before and after."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = model(**batch).loss
    loss.backward()
    gradients = {name: bits(each.grad) for name, each in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return Step(bits(loss), gradients, bits(torch.get_rng_state()))


def hooks_of(model: nn.Module) -> dict[str, list[int]]:
    """Every hook on the modules and parameters of a model."""
    found = {}
    for name, each in [*model.named_modules(), *model.named_parameters()]:
        held = [getattr(each, key) for key in dir(each) if key.endswith("_hooks")]
        hooks = [hook for one in held if isinstance(one, Mapping) for hook in one.values()]
        found[f"{type(each).__name__} {name}"] = [id(hook) for hook in hooks]
    return found


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that an inspection has to leave as it is."""
    return {
        "parameters": {name: bits(each) for name, each in model.named_parameters()},
        "gradients": {name: (id(p.grad), bits(p.grad)) for name, p in model.named_parameters()},
        "trainable": {name: each.requires_grad for name, each in model.named_parameters()},
        "buffers": {name: bits(each) for name, each in model.named_buffers()},
        "modes": {name: each.training for name, each in model.named_modules()},
        "attributes": {name: sorted(vars(each)) for name, each in model.named_modules()},
        "hooks": hooks_of(model),
        "random": bits(torch.get_rng_state()),
    }


def watch_everything(model: nn.Module) -> Inspector:
    inspector = Inspector(model)
    inspector.watch(["*", ""], WHAT)
    return inspector


def record(model: nn.Module, batch: Batch, autocast: bool = False) -> tuple[Inspection, Step]:
    with watch_everything(model).recording(keep="tensors") as inspection:
        seen = step(model, batch, autocast)
    return inspection, seen


def build(name: str, attention: str | None, **changes: Any) -> tuple[nn.Module, Batch]:
    """A model that ran once (transformers adds hooks of its own on the first call), and a batch."""
    model, batch = ARCHITECTURES[name].build(attention, **changes), ARCHITECTURES[name].batch()
    with torch.no_grad():
        model(**batch)
    return model, batch


def build_double(name: str, attention: str | None) -> tuple[nn.Module, Batch]:
    """The same in float64, for comparisons that are exact to rounding."""
    model, batch = build(name, attention, experts="eager")
    return model.double(), {key: _double(each) for key, each in batch.items()}


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


# -- oracles ---------------------------------------------------------------------------------


def substitute(value: Any, act: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in it, in order, replaced by what `act` makes of it."""
    if isinstance(value, Tensor):
        return act(value)
    if isinstance(value, Mapping):
        return type(value)(**{key: substitute(each, act) for key, each in value.items()})
    if isinstance(value, (tuple, list)):
        return type(value)(substitute(each, act) for each in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    substitute(value, lambda tensor: found.append(tensor) or tensor)
    return found


Calls = dict[str, list[list[Tensor | None]]]
"""Layer -> call -> element."""


def cloned(model: nn.Module, batch: Batch) -> tuple[Calls, Calls]:
    """The inputs and activations of a step, by plain hooks that clone."""
    inputs: Calls = defaultdict(list)
    outputs: Calls = defaultdict(list)

    def before(name: str, arguments: Any, keywords: Any) -> None:
        inputs[name].append([each.detach().clone() for each in tensors_in((arguments, keywords))])

    def after(name: str, output: Any) -> None:
        outputs[name].append([each.detach().clone() for each in tensors_in(output)])

    with hooked(model, before, after):
        step(model, batch)
    return inputs, outputs


def differentiated(model: nn.Module, batch: Batch, only: str | None = None) -> tuple[Calls, Calls]:
    """dL/d input (through one call) and dL/d output, by adding e to each and reading dL/de.

    All e are zero, so that they do not disturb each other; `only` takes one module alone.
    """
    inputs: Calls = defaultdict(list)
    outputs: Calls = defaultdict(list)

    def with_e(value: Any, parts: list[Tensor | None]) -> Any:
        def add(tensor: Tensor) -> Tensor:
            e = torch.zeros_like(tensor, requires_grad=True) if tensor.requires_grad else None
            parts.append(e)
            return tensor if e is None else tensor + e

        return substitute(value, add)

    def before(name: str, arguments: Any, keywords: Any) -> Any:
        inputs[name].append([])
        return with_e((arguments, dict(keywords)), inputs[name][-1])

    def after(name: str, output: Any) -> Any:
        outputs[name].append([])
        return with_e(output, outputs[name][-1])

    with hooked(model, before, after, only):
        step(model, batch)
    return _map(inputs, lambda e: e.grad), _map(outputs, lambda e: e.grad)


def whole_gradients(model: nn.Module, batch: Batch) -> Calls:
    """dL/d of every tensor that a module returned, through all that read it anywhere."""
    outputs: Calls = defaultdict(list)

    def before(name: str, arguments: Any, keywords: Any) -> None:
        pass

    def after(name: str, output: Any) -> None:
        outputs[name].append(tensors_in(output))

    torch.manual_seed(SEED)
    with hooked(model, before, after):
        loss = model(**batch).loss
    every = [each for calls in outputs.values() for call in calls for each in call]
    wanted = [each for each in every if each.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    gradients = {id(each): gradient for each, gradient in zip(wanted, found, strict=True)}
    return _map(outputs, lambda tensor: gradients.get(id(tensor)))


@contextlib.contextmanager
def hooked(
    model: nn.Module, before: Callable[..., Any], after: Callable[..., Any], only: str | None = None
) -> Iterator[None]:
    """Plain hooks on every module, which may replace its arguments and its output."""
    handles = []
    for name, module in model.named_modules():
        if only not in (None, name):
            continue
        handles += [
            module.register_forward_pre_hook(
                lambda _, arguments, keywords, name=name: before(name, arguments, keywords),
                with_kwargs=True,
            ),
            module.register_forward_hook(lambda _, __, output, name=name: after(name, output)),
        ]
    yield
    for handle in handles:
        handle.remove()


def _map(calls: Calls, act: Callable[[Tensor], Tensor | None]) -> Calls:
    return {
        name: [[each if each is None else act(each) for each in call] for call in each_call]
        for name, each_call in calls.items()
    }


def difference(found: Tensor | None, expected: Tensor | None) -> str:
    """How two gradients differ beyond rounding, in words; "" where they do not."""
    if found is None or expected is None:
        return "" if found is expected else f"{'none' if found is None else 'one'} came"
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{found.dtype} {found.shape} came, not {expected.dtype} {expected.shape}"
    bound = 1e-11 if expected.dtype == torch.float64 else 1e-5
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    largest = float((found - expected).abs().max()) if expected.numel() else 0.0
    return "" if largest <= bound * scale else f"off by {largest} of {scale}"


def compare(inspection: Inspection, what: str, expected: Calls, bitwise: bool = False) -> int:
    """Compare every element of every call of every layer; returns how many there were."""
    count = 0
    for name, calls in expected.items():
        found = inspection[name].calls
        assert len(found) == len(calls), name
        for index, (mine, theirs) in enumerate(zip(found, calls, strict=True)):
            tensors = mine.tensors(what)
            where = f"{what} of {name!r}, call {index}"
            assert len(tensors) == len(theirs), f"{where}: {mine.elements(what)}"
            for position, (one, other) in enumerate(zip(tensors, theirs, strict=True)):
                if bitwise:
                    assert bits(one) == bits(other), f"{where}, element {position}"
                else:
                    assert not difference(one, other), f"{where}, element {position}"
                count += other is not None
    return count


# -- nothing changes -------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attention"), CASES)
@pytest.mark.one_in(3)
def test_watching_every_layer_changes_no_bit(name: str, attention: str | None) -> None:
    model, batch = build(name, attention)
    plain = step(model, batch)
    hooks = hooks_of(model)
    inspection, watched = record(model, batch)
    assert watched == plain
    assert hooks_of(model) == hooks
    assert step(model, batch) == plain
    assert inspection[""].calls


@pytest.mark.parametrize(("name", "attention"), CASES)
@pytest.mark.one_in(3)
def test_an_inspection_leaves_the_model_as_it_was(name: str, attention: str | None) -> None:
    model, batch = build(name, attention)
    plain = step(model, batch)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    torch.manual_seed(SEED)
    before = state_of(model)
    inspection = watch_everything(model).run_inspection(batch)
    assert state_of(model) == before
    assert bits(torch.tensor(inspection.loss, dtype=torch.float32)) == plain.loss
    assert step(model, batch) == plain


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "whisper", "qwen3-moe"])
def test_a_model_whose_first_call_is_an_inspection_works_as_ever(name: str) -> None:
    # transformers hooks its own modules on the first call that asks for hidden states or
    # attentions; what an inspection puts back may not take these away.
    batch = ARCHITECTURES[name].batch()
    asking = {**batch, "output_hidden_states": True, "output_attentions": True}
    fresh, inspected = (ARCHITECTURES[name].build("eager").eval() for _ in range(2))
    watch_everything(inspected).run_inspection(asking)
    watch_everything(inspected).run_inspection(batch)
    expected, found = fresh(**asking), inspected(**asking)
    assert list(found) == list(expected)
    for one, other in zip(tensors_in(dict(found)), tensors_in(dict(expected)), strict=True):
        assert bits(one) == bits(other)


def test_a_hook_that_perturbs_is_found() -> None:
    model, batch = build("llama", "sdpa")
    plain = step(model, batch)
    layer = model.get_submodule("model.layers.0.mlp")
    handle = layer.register_forward_hook(lambda _, __, output: output * (1 + 1e-6))
    assert step(model, batch) != plain
    assert any(hooks_of(model)["LlamaMLP model.layers.0.mlp"])
    handle.remove()
    assert step(model, batch) == plain


def test_a_hook_that_draws_a_random_number_is_found() -> None:
    model, batch = build("bert", "sdpa")
    plain = step(model, batch)
    handle = model.get_submodule("cls").register_forward_hook(lambda *_: torch.rand(1) and None)
    watched = step(model, batch)
    handle.remove()
    assert watched.loss == plain.loss
    assert watched.random != plain.random


@pytest.mark.filterwarnings("ignore")
def test_backward_hooks_of_modules_change_bits() -> None:
    # The reason why none is used: autograd adds up in another order.
    model, batch = build("qwen3", "sdpa")
    plain = step(model, batch)
    handles = [each.register_full_backward_hook(lambda *_: None) for each in model.modules()]
    watched = step(model, batch)
    for handle in handles:
        handle.remove()
    assert watched != plain


# -- what is seen is right -------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_values_are_those_of_cloning_hooks(name: str, attention: str | None) -> None:
    model, batch = build(name, attention)
    inputs, outputs = cloned(model, batch)
    inspection, _ = record(model, batch)
    assert compare(inspection, "inputs", inputs, bitwise=True) > 15
    assert compare(inspection, "activations", outputs, bitwise=True) > 15


@pytest.mark.parametrize(("name", "attention"), CASES)
@pytest.mark.one_in(3)
def test_gradients_are_those_of_the_oracle(name: str, attention: str | None) -> None:
    model, batch = build_double(name, attention)
    inputs, outputs = differentiated(model, batch)
    # A tensor that the module returns and also reads itself is seen with all its readers.
    outputs, read_inside = _combined(outputs, whole_gradients(model, batch))
    inspection, _ = record(model, batch)
    assert compare(inspection, "gradients", outputs) > 10
    assert compare(inspection, "input_gradients", inputs) > 10
    noted = {layer for layers in inspection.notes.values() for layer in layers}
    assert read_inside <= noted


@pytest.mark.parametrize(("name", "attention"), [("llama", "eager"), ("mamba", None)])
def test_gradients_of_tensors_that_the_module_reads_itself_are_noted(
    name: str, attention: str | None
) -> None:
    model, batch = build_double(name, attention)
    _, read_inside = _combined(differentiated(model, batch)[1], whole_gradients(model, batch))
    assert read_inside
    inspection, _ = record(model, batch)
    noted = {layer for layers in inspection.notes.values() for layer in layers}
    assert noted == read_inside


def test_input_gradients_of_an_input_that_is_returned_are_local() -> None:
    # T5 hands the position bias that the first block made and read on to the second.
    model, batch = build_double("t5", "sdpa")
    inputs, _ = differentiated(model, batch)
    inspection, _ = record(model, batch)
    layer = "encoder.block.1"
    compare(inspection, "input_gradients", {layer: inputs[layer]})


def _combined(through: Calls, whole: Calls) -> tuple[Calls, set[str]]:
    """The oracle's gradients, the whole ones where these are more, and the layers of those."""

    def chosen(part: Tensor | None, full: Tensor | None) -> Tensor | None:
        return full if difference(part, full) else part

    result: Calls = {}
    more = set()
    for name, calls in through.items():
        result[name] = [
            [chosen(part, full) for part, full in zip(*pair, strict=True)]
            for pair in zip(calls, whole[name], strict=True)
        ]
        parts = [part for call in calls for part in call]
        taken = [each for call in result[name] for each in call]
        if any(one is not other for one, other in zip(parts, taken, strict=True)):
            more.add(name)
    return result, more


def test_a_view_of_another_output_gets_no_gradient_of_its_own() -> None:
    model, batch = build_double("clip", "sdpa")
    inspection, _ = record(model, batch)
    call = inspection[""].calls[0]
    gradients = dict(zip(call.elements("gradients"), call.gradients, strict=True))
    assert gradients["logits_per_text"] is not None
    assert gradients["logits_per_image"] is None  # the transposed of the other, read by nobody


@pytest.mark.parametrize("name", FUSED_EXPERTS)
def test_gradients_of_grouped_experts_are_those_of_the_oracle(name: str) -> None:
    model, batch = build(name, ARCHITECTURES[name].attention[-1], experts="grouped_mm")
    inputs, outputs = differentiated(model, batch)
    inspection, _ = record(model, batch)
    layer = FUSED_EXPERTS[name]
    assert compare(inspection, "gradients", {layer: outputs[layer]}) == 1
    assert compare(inspection, "input_gradients", {layer: inputs[layer]}) >= 2


@pytest.mark.parametrize("layer", ["", "model.layers.1", "model.layers.0.self_attn", "model.norm"])
def test_the_oracle_says_the_same_of_one_module_alone(layer: str) -> None:
    model, batch = build_double("qwen3", "sdpa")
    together, alone = (differentiated(model, batch, only) for only in (None, layer))
    for all_layers, one_layer in zip(together, alone, strict=True):
        assert list(one_layer) == [layer]
        for many, one in zip(all_layers[layer], one_layer[layer], strict=True):
            for a, b in zip(many, one, strict=True):
                assert not difference(a, b)


def test_the_comparison_finds_a_gradient_that_is_not_local() -> None:
    # The whole gradient of a decoder layer's output has the residual's branch in it, the one
    # through the norm that reads it has not.
    model, batch = build_double("qwen3", "sdpa")
    whole = whole_gradients(model, batch)["model.layers.0"][0][0]
    inspection, _ = record(model, batch)
    assert not difference(inspection["model.layers.1"].input_gradients, whole)
    norm = inspection["model.layers.1.input_layernorm"]
    assert difference(norm.input_gradients, whole).startswith("off by")


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_parameter_gradients_are_the_models_own(name: str, attention: str | None) -> None:
    model, batch = build(name, attention)
    plain = step(model, batch)
    inspection, _ = record(model, batch)
    names = {id(each): key for key, each in model.named_parameters()}
    compared = 0
    for layer, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        kept, gradients = inspection[layer].parameters, inspection[layer].parameter_gradients
        assert {key: bits(each) for key, each in kept.items()} == {
            key: bits(each) for key, each in own.items()
        }
        expected = {key: plain.gradients[names[id(each)]] for key, each in own.items()}
        expected = {key: each for key, each in expected.items() if each is not None}
        assert {key: bits(each) for key, each in gradients.items()} == expected, layer
        compared += len(expected)
    assert compared >= sum(each is not None for each in plain.gradients.values())


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_an_optimizer_step_does_not_reach_what_was_seen(name: str) -> None:
    model, batch = build(name, "sdpa")
    before, _ = record(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_everything(model).recording(keep="tensors") as inspection:
        torch.manual_seed(SEED)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    _assert_same_inspection(inspection, before)


# -- nothing is missing without a reason -----------------------------------------------------


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_every_layer_is_captured_or_has_a_reason(name: str, attention: str | None) -> None:
    model, batch = build(name, attention)
    inspection, _ = record(model, batch)
    assert set(inspection) == {layer for layer, _ in model.named_modules()}
    uncalled = {layer for layer, each in inspection.items() if not each.calls}
    containers = {
        layer
        for layer, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict))
    }
    known = USED_BY_OTHERS.get(name, set()) | SKIPPED.get((name, attention), set())
    assert uncalled == containers | known
    assert uncalled <= set(inspection.missing)
    for layer, each in inspection.items():
        for call in each.calls:
            assert all(value is not None for value in call.tensors("activations")), layer
            assert call.tensors("activations"), layer
            if not any(value is not None for value in call.tensors("gradients")):
                assert "gradients: " in inspection.missing[layer], layer
            if call.elements("input_gradients") and not any(
                value is not None for value in call.tensors("input_gradients")
            ):
                assert "input_gradients: " in inspection.missing[layer], layer


@pytest.mark.parametrize("name", USED_BY_OTHERS)
def test_a_weight_that_others_use_has_its_gradient_and_a_reason(name: str) -> None:
    model, batch = build(name, (ARCHITECTURES[name].attention or (None,))[-1])
    inspection, _ = record(model, batch)
    for layer in USED_BY_OTHERS[name]:
        assert not inspection[layer].calls
        reason = inspection.missing[layer]
        assert "never called" in reason
        assert "uses its weight directly" in reason
        assert (repr(layer.rpartition(".")[0]) if "." in layer else "the model") in reason
        assert bool(inspection[layer].parameter_gradients["weight"].any())


@pytest.mark.parametrize(("name", "attention"), SKIPPED)
def test_a_skipped_layer_without_parameters_says_only_that(
    name: str, attention: str | None
) -> None:
    model, batch = build(name, attention)
    inspection, _ = record(model, batch)
    for layer in SKIPPED[name, attention]:
        assert "never called" in inspection.missing[layer]
        assert "weight" not in inspection.missing[layer]


@pytest.mark.parametrize("name", FUSED_EXPERTS)
def test_fused_experts_are_one_layer_with_three_dimensional_parameters(name: str) -> None:
    model, batch = build(name, ARCHITECTURES[name].attention[-1])
    inspection, _ = record(model, batch)
    experts = inspection[FUSED_EXPERTS[name]]
    assert len(experts.calls) == 1
    fused = {key: each.shape for key, each in experts.parameters.items() if each.ndim == 3}
    assert {"gate_up_proj", "down_proj"} <= set(fused)
    assert all(shape[0] == 4 for shape in fused.values())
    assert {key: each.shape for key, each in experts.parameter_gradients.items()} | fused == {
        key: each.shape for key, each in experts.parameters.items()
    }


@pytest.mark.parametrize("name", ["llama", "clip"])
def test_a_container_that_is_never_called_says_so(name: str) -> None:
    model, batch = build(name, "sdpa")
    inspection, _ = record(model, batch)
    lists = [layer for layer, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    assert lists
    for layer in lists:
        assert "never called" in inspection.missing[layer]
        assert "weight" not in inspection.missing[layer], "a list has none"


def test_a_frozen_parameter_says_so() -> None:
    model, batch = build("whisper", "sdpa")  # its encoder's positions are not trained
    inspection, _ = record(model, batch)
    reason = inspection.missing["model.encoder.embed_positions"]
    assert "parameter_gradients: none arrived: frozen" in reason


def test_whole_numbers_have_no_gradient_and_the_reason_says_so() -> None:
    model, batch = build("llama", "sdpa")
    inspection, _ = record(model, batch)
    reason = inspection.missing["model.embed_tokens"].split("input_gradients: ")[1]
    assert "overwritten in place" not in reason
    assert "require" in reason


# -- precisions and checkpoints --------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "bert", "qwen3-moe"])
def test_bfloat16_changes_no_bit(name: str) -> None:
    model, batch = build(name, "sdpa")
    model = model.bfloat16()
    plain = step(model, batch)
    inspection, watched = record(model, batch)
    assert watched == plain
    inputs, outputs = cloned(model, batch)
    compare(inspection, "inputs", inputs, bitwise=True)
    compare(inspection, "activations", outputs, bitwise=True)
    linear = next(key for key, each in model.named_modules() if isinstance(each, nn.Linear))
    assert inspection[linear].activations.dtype == torch.bfloat16
    assert inspection[linear].gradients.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_autocast_changes_no_bit(name: str) -> None:
    model, batch = build(name, "sdpa")
    plain = step(model, batch, autocast=True)
    inspection, watched = record(model, batch, autocast=True)
    assert watched == plain
    assert watched != step(model, batch)
    linear = next(key for key, each in model.named_modules() if isinstance(each, nn.Linear))
    assert inspection[linear].activations.dtype == torch.bfloat16
    assert inspection[linear].gradients.dtype == torch.bfloat16
    assert inspection[linear].parameter_gradients["weight"].dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_gradient_checkpointing_shows_what_the_model_without_it_shows(
    name: str, reentrant: bool
) -> None:
    model, batch = build(name, "sdpa")
    batch = batch if name == "bert" else {**batch, "use_cache": False}
    unchecked, plain = record(model, batch)
    options = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    assert step(model, batch) == plain
    hooks = hooks_of(model)
    inspection, watched = record(model, batch)
    assert watched == plain
    assert hooks_of(model) == hooks
    _assert_same_inspection(inspection, unchecked)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_an_inspection_of_a_checkpointed_model_leaves_no_trace(name: str, reentrant: bool) -> None:
    model, batch = build(name, "sdpa")
    batch = batch if name == "bert" else {**batch, "use_cache": False}
    unchecked, plain = record(model, batch)
    options = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    torch.manual_seed(SEED)
    before = state_of(model)
    inspection = watch_everything(model).run_inspection(batch, keep="tensors")
    assert state_of(model) == before
    _assert_same_inspection(inspection, unchecked)
    assert step(model, batch) == plain


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_shared_layer_in_several_checkpoints_is_told_apart(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ALBERT calls one layer three times: its parameters get their gradient in three parts.
    model, batch = build("albert", "sdpa")
    unchecked, _ = record(model, batch)
    group = model.albert.encoder.albert_layer_groups[0]
    forward = group.forward

    def checkpointed(*given: Any, **named: Any) -> Any:
        return checkpoint(partial(forward, **named), *given, use_reentrant=reentrant)

    monkeypatch.setattr(group, "forward", checkpointed)
    plain = step(model, batch)
    inspection, watched = record(model, batch)
    assert watched == plain
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    assert len(inspection[layer].calls) == 3
    for mine, theirs in zip(inspection[layer].calls, unchecked[layer].calls, strict=True):
        assert bits(mine.activations[0]) == bits(theirs.activations[0])
        assert not difference(mine.gradients[0], theirs.gradients[0])
    for name, parameter in model.get_submodule(f"{layer}.ffn").named_parameters():
        gradient = inspection[f"{layer}.ffn"].parameter_gradients[name]
        assert gradient.shape == parameter.shape
        assert bits(gradient) == plain.gradients[f"{layer}.ffn.{name}"]


def _assert_same_inspection(one: Inspection, other: Inspection) -> None:
    """The same tensors, bit for bit, in both."""
    compared = 0
    for layer in other:
        assert len(one[layer].calls) == len(other[layer].calls), layer
        for mine, theirs in zip(one[layer].calls, other[layer].calls, strict=True):
            for what in ("inputs", "activations", "gradients", "input_gradients"):
                assert mine.elements(what) == theirs.elements(what), (layer, what)
                pairs = zip(mine.tensors(what), theirs.tensors(what), strict=True)
                for path, (a, b) in zip(mine.elements(what), pairs, strict=True):
                    assert bits(a) == bits(b), (layer, what, path)
                    compared += b is not None
        a, b = one[layer].parameter_gradients, other[layer].parameter_gradients
        assert {key: bits(each) for key, each in a.items()} == {
            key: bits(each) for key, each in b.items()
        }, layer
    assert compared > 50


# -- frozen models ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_a_frozen_model_shows_the_gradients_of_the_trainable_one(name: str) -> None:
    model, batch = build(name, "sdpa")
    torch.manual_seed(SEED)
    trainable = watch_everything(model).run_inspection(batch, keep="tensors")
    model.requires_grad_(False)
    torch.manual_seed(SEED)
    before = state_of(model)
    inspector = Inspector(model)
    inspector.watch("*", ["activations", "gradients"])
    frozen = inspector.run_inspection(batch, keep="tensors")
    assert state_of(model) == before
    assert any("frozen" in note for note in frozen.notes)
    compared = 0
    for layer, each in frozen.items():
        for mine, theirs in zip(each.calls, trainable[layer].calls, strict=True):
            pairs = zip(mine.tensors("gradients"), theirs.tensors("gradients"), strict=True)
            for one, other in pairs:
                if one is not None and other is not None:
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
                    compared += 1
    assert compared > 20
