"""Slow and obvious answers to the questions that torchfmri answers quickly.

Nothing here uses torchfmri. dL/d output: the output is replaced by `output + e` with `e` zeros
that require grad, and `e.grad` is read. dL/d input through one call: the same with the input, at
that call only. Parameter gradients: a plain backward pass. Values: clones. Where the output lives
on in aliases, so that replacing it would change the model, numbers are pushed in its memory
instead and the loss is differentiated by central differences.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Run = Callable[[nn.Module], Tensor]
TOLERANCE = {
    torch.float64: 1e-11,
    torch.complex128: 1e-11,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}


# The same traps on an accelerator: TORCHFMRI_TEST_DEVICE=cuda pytest tests/_capture
DEVICE = torch.device(os.environ.get("TORCHFMRI_TEST_DEVICE", "cpu"))
if DEVICE.type != "cpu":
    torch.set_default_device(DEVICE)
    torch.backends.cudnn.deterministic = True


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """The same normal numbers on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(*shape, dtype=torch.float64, generator=generator, device="cpu")
    return drawn.to(DEVICE, dtype)


def whole_numbers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    """Draw whole numbers from `low` to below `high`, equal on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, device="cpu").to(DEVICE)


def random_state() -> Any:
    """What the next random numbers depend on, on the CPU and on the device under test."""
    if DEVICE.type == "cpu":
        return (torch.get_rng_state(),)
    return (torch.get_rng_state(), torch.get_device_module(DEVICE).get_rng_state())


def set_random_state(state: Any) -> None:
    torch.set_rng_state(state[0])
    if DEVICE.type != "cpu":
        torch.get_device_module(DEVICE).set_rng_state(state[1])


# -- containers ------------------------------------------------------------------------------


def rebuild(value: Any, act: Callable[[Tensor], Tensor]) -> Any:
    """The same container with `act(tensor)` in the place of every tensor."""
    if isinstance(value, Tensor):
        return act(value)
    if isinstance(value, Mapping):
        items = {key: rebuild(each, act) for key, each in value.items()}
        return type(value)(**items) if dataclasses.is_dataclass(value) else type(value)(items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuild(each, act) for each in value))
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(rebuild(each, act) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value)]
        return dataclasses.replace(
            value, **{name: rebuild(getattr(value, name), act) for name in names}
        )
    return value


def tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    rebuild(value, lambda tensor: found.append(tensor) or tensor)
    return found


def loss_of(output: Any) -> Tensor:
    """A scalar with a different, non-zero gradient at every number of the output."""
    total: Any = 0
    for index, tensor in enumerate(tensors_in(output)):
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.requires_grad:
            continue
        if tensor.is_nested:
            tensor = tensor.to_padded_tensor(0.0)
        wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
        tensor = tensor.to(wide)
        count = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device) + index
        weight = (torch.cos(count) + 1.5).reshape(tensor.shape).to(wide)
        part = (tensor * weight).sum() + 0.25 * (tensor * tensor).sum()
        total = total + (part.real + 2 * part.imag if part.is_complex() else part)
    return total


# -- the truth about one run -----------------------------------------------------------------


@dataclass
class CallTruth:
    inputs: list[Tensor] = field(default_factory=list)
    activations: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    input_gradients: list[Tensor | None] = field(default_factory=list)


@dataclass
class Truth:
    loss: Tensor
    grads: dict[str, Tensor | None]  # .grad of every parameter after the plain run
    calls: dict[str, list[CallTruth]]
    parameter_gradients: dict[str, dict[str, Tensor | None]]


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))


def plain_run(model: nn.Module, run: Run) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and `.grad` of the model when nobody watches. The model is used up."""
    loss = run(model)
    loss.backward()
    return loss.detach(), grads_of(model)


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: None if each.grad is None else each.grad.clone() for name, each in named}


def find_truth(model: nn.Module, run: Run, reference: nn.Module | None = None) -> Truth:
    """Everything about `run(model)`, each from its own run on its own copy.

    Args:
        model: Is not touched.
        run: Forward pass up to the loss.
        reference: The same model written without the thing under test (checkpointing,
            compilation); the gradients of outputs and inputs are taken from it.
    """
    # Each run starts from the same random state, as the watched one must.
    state = random_state()
    loss, grads = plain_run(copy.deepcopy(model), run)
    reference = model if reference is None else reference
    set_random_state(state)
    calls = _values(copy.deepcopy(reference), run)
    set_random_state(state)
    probed = _gradients(copy.deepcopy(reference), run)
    set_random_state(state)
    for name, found in probed.items():
        for call, (outputs, inputs) in zip(calls[name], found, strict=True):
            call.gradients, call.input_gradients = outputs, inputs
    own = {
        name: {
            key: grads[f"{name}.{key}" if name else key]
            for key, each in module._parameters.items()
            if each is not None
        }
        for name, module in layers_of(model).items()
    }
    return Truth(loss, grads, calls, own)


def _values(model: nn.Module, run: Run) -> dict[str, list[CallTruth]]:
    calls: dict[int, list[CallTruth]] = {}
    open_calls: dict[int, list[CallTruth]] = {}

    def clone(value: Any) -> list[Tensor]:
        with torch.no_grad():
            return [each.detach().clone() for each in tensors_in(value)]

    def before(module: nn.Module, arguments: Any, keywords: Any) -> None:
        call = CallTruth(inputs=clone(arguments) + clone(dict(keywords)))
        calls.setdefault(id(module), []).append(call)
        open_calls.setdefault(id(module), []).append(call)

    def after(module: nn.Module, _: Any, output: Any) -> None:
        open_calls[id(module)].pop().activations = clone(output)

    for module in set(model.modules()):
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)
    run(model)
    return {name: calls.get(id(module), []) for name, module in layers_of(model).items()}


def _gradients(
    model: nn.Module, run: Run
) -> dict[str, list[tuple[list[Tensor | None], list[Tensor | None]]]]:
    probes: dict[int, list[tuple[list[Tensor | None], list[Tensor | None]]]] = {}
    open_calls: dict[int, list[Any]] = {}
    replaying = False  # a checkpoint's replay makes the same operations, but is no call

    def push(value: Any, into: list[Tensor | None]) -> Any:
        def add(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad or not torch.is_grad_enabled():
                into.append(None)
                return tensor
            probe = torch.zeros_like(tensor, requires_grad=True)
            into.append(probe)
            return tensor + probe

        return rebuild(value, add)

    def before(module: nn.Module, arguments: Any, keywords: Any) -> Any:
        inputs: list[Tensor | None] = []
        call: tuple[list[Tensor | None], list[Tensor | None]] = ([], inputs)
        if not replaying:
            probes.setdefault(id(module), []).append(call)
        open_calls.setdefault(id(module), []).append(call)
        return push(arguments, inputs), push(dict(keywords), inputs)

    def after(module: nn.Module, _: Any, output: Any) -> Any:
        return push(output, open_calls[id(module)].pop()[0])

    for module in set(model.modules()):
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)
    loss = run(model)
    replaying = True
    loss.backward()

    def read(found: list[Tensor | None]) -> list[Tensor | None]:
        return [None if probe is None else probe.grad for probe in found]

    return {
        name: [(read(out), read(into)) for out, into in probes.get(id(module), [])]
        for name, module in layers_of(model).items()
    }


def push_numbers(
    model: nn.Module, run: Run, layer: str, *, call: int = 0, element: int = 0, at: str = "output"
) -> Tensor:
    """dL/d one output (or input) by central differences, pushed in memory: aliases see it.

    Meant for float64 and a handful of numbers.
    """
    step = 1e-6
    shape = _push(copy.deepcopy(model), run, layer, call, element, at, None)[1]
    gradient = torch.zeros(shape, dtype=torch.float64)
    for index in range(gradient.numel()):
        losses = []
        for sign in (1, -1):
            nudge = torch.zeros(gradient.numel(), dtype=torch.float64)
            nudge[index] = sign * step
            losses.append(
                _push(copy.deepcopy(model), run, layer, call, element, at, nudge.view(shape))[0]
            )
        gradient.view(-1)[index] = (losses[0] - losses[1]) / (2 * step)
    return gradient


def _push(
    model: nn.Module,
    run: Run,
    layer: str,
    call: int,
    element: int,
    at: str,
    nudge: Tensor | None,
) -> tuple[float, torch.Size]:
    count, shapes = 0, []

    def act(value: Any) -> None:
        nonlocal count
        if count == call:
            tensor = tensors_in(value)[element]
            shapes.append(tensor.shape)
            if nudge is not None:
                with torch.no_grad():
                    tensor.data.add_(nudge)
        count += 1

    module = layers_of(model)[layer]
    if at == "output":
        module.register_forward_hook(lambda _, __, output: act(output))
    else:
        module.register_forward_pre_hook(lambda _, arguments: act(arguments))
    return float(run(model).detach()), shapes[0]


# -- comparing -------------------------------------------------------------------------------


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.is_nested:
        pairs = zip(one.unbind(), other.unbind(), strict=True)
        return one.size(0) == other.size(0) and all(same_bits(a, b) for a, b in pairs)
    if one.layout == torch.sparse_coo:
        one, other = one.coalesce(), other.coalesce()
        return same_bits(one.indices(), other.indices()) and same_bits(one.values(), other.values())
    if one.shape != other.shape:
        return False
    one, other = (each.detach().resolve_conj().resolve_neg().contiguous() for each in (one, other))
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def assert_same_bits(one: Tensor | None, other: Tensor | None, what: str) -> None:
    if one is None or other is None:
        assert one is other, f"{what}: one is None"
        return
    assert same_bits(one, other), f"{what}: bits differ"


def assert_close(
    ours: Tensor | None, truth: Tensor | None, what: str, *, zero_is_none: bool = False
) -> None:
    """Equal up to rounding in the dtype, relative to the largest number."""
    if zero_is_none:
        ours = None if ours is not None and not ours.any() else ours
        truth = None if truth is not None and not truth.any() else truth
    if ours is None or truth is None:
        found = "None" if ours is None else f"a gradient with |g| up to {float(ours.abs().max())}"
        assert ours is truth, f"{what}: we have {found}, the oracle has {truth}"
        return
    assert ours.dtype == truth.dtype, f"{what}: {ours.dtype} against {truth.dtype}"
    assert ours.layout == truth.layout, f"{what}: {ours.layout} against {truth.layout}"
    assert ours.shape == truth.shape, f"{what}: {tuple(ours.shape)} != {tuple(truth.shape)}"
    ours, truth = ours.to_dense(), truth.to_dense()
    if not truth.numel():
        return
    gap = float((ours - truth).abs().max())
    size = float(truth.abs().max())
    allowed = TOLERANCE[truth.dtype] * max(size, 1e-30)
    assert gap <= allowed, f"{what}: off by {gap:.3g} of {size:.3g}"


def assert_same_grads(
    ours: Mapping[str, Tensor | None], truth: Mapping[str, Tensor | None]
) -> None:
    assert set(ours) == set(truth)
    for name, gradient in ours.items():
        assert_same_bits(gradient, truth[name], f".grad of {name}")


def assert_matches(
    inspection: Any,
    truth: Truth,
    *,
    what: tuple[str, ...] = (
        "inputs",
        "activations",
        "gradients",
        "input_gradients",
        "parameter_gradients",
    ),
    zero_is_none: bool = False,
    skip: frozenset[tuple[str, str]] = frozenset(),
) -> None:
    """Every call and every element of every layer equals the oracle's.

    Args:
        inspection: Recorded with keep="tensors" on every layer.
        truth: The oracle's.
        what: What to compare.
        zero_is_none: Whether a gradient of zeros and no gradient are the same (overwritten).
        skip: (layer, what) that are not compared.
    """
    for layer, calls in truth.calls.items():
        if layer not in inspection:
            continue
        record = inspection[layer]
        assert len(record.calls) == len(calls), f"{layer!r}: {len(record.calls)} calls"
        for index, (ours, theirs) in enumerate(zip(record.calls, calls, strict=True)):
            for each in what:
                if each == "parameter_gradients" or (layer, each) in skip:
                    continue
                found, expected = ours.tensors(each), getattr(theirs, each)
                place = f"{each} of {layer!r}, call {index}"
                assert len(found) == len(expected), f"{place}: {len(found)} elements"
                for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                    where = f"{place}, element {number}"
                    if each in ("inputs", "activations"):
                        assert_same_bits(one, other, where)
                    else:
                        assert_close(one, other, where, zero_is_none=zero_is_none)
        if "parameter_gradients" in what and (layer, "parameter_gradients") not in skip:
            found = record.parameter_gradients
            for name, expected in truth.parameter_gradients[layer].items():
                place = f"parameter gradient {name} of {layer!r}"
                assert_close(found.get(name), expected, place)


# -- state -----------------------------------------------------------------------------------

_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name)


@dataclass
class State:
    facts: dict[str, Any]
    held: list[Any]  # keeps what the ids in `facts` speak of alive


def state_of(model: nn.Module, *others: Any) -> State:
    """Everything about a model, the random generators and torch that a run may change."""
    facts: dict[str, Any] = {}
    held: list[Any] = []
    for name, module in model.named_modules():
        held.append(module)
        facts[f"{name}: class"] = type(module)
        facts[f"{name}: training"] = module.training
        for hooks in _HOOKS:
            registered = vars(module).get(hooks)
            if isinstance(registered, Mapping):
                facts[f"{name}: {hooks}"] = [(key, id(each)) for key, each in registered.items()]
        for key, value in vars(module).items():
            if key not in _HOOKS and key not in ("_parameters", "_modules"):
                facts[f"{name}.{key}"] = _describe(value, held, ())
        facts[f"{name}: children"] = [(key, id(each)) for key, each in module._modules.items()]
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            held.append(parameter)
            facts[f"{name}.{key}: parameter"] = (
                id(parameter),
                parameter.requires_grad,
                parameter._version,
                _bits(parameter),
                id(parameter.grad) if parameter.grad is not None else None,
                None if parameter.grad is None else _bits(parameter.grad),
                len(parameter._backward_hooks or ()),
                len(parameter._post_accumulate_grad_hooks or ()),
            )
            held.append(parameter.grad)
    facts["torch random"] = torch.get_rng_state().numpy().tobytes()
    facts["python random"] = random.getstate()
    numpy_state = np.random.get_state()
    facts["numpy random"] = (numpy_state[1].tobytes(), *numpy_state[2:])
    facts["grad mode"] = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    facts["autocast"] = torch.is_autocast_enabled("cpu")
    facts["stance"] = _stance()
    for index, other in enumerate(others):
        facts[f"other {index}"] = _describe(other, held, ())
    return State(facts, held)


def assert_same_state(before: State, after: State) -> None:
    assert set(before.facts) == set(after.facts), (
        f"came or went: {sorted(set(before.facts) ^ set(after.facts))}"
    )
    changed = [name for name, fact in before.facts.items() if after.facts[name] != fact]
    assert not changed, f"changed: {changed}"


def _stance() -> Any:
    from torch._dynamo import eval_frame

    return repr(eval_frame._stance)


def _bits(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.is_nested:
        return [_bits(each) for each in tensor.unbind()]
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return (_bits(tensor.indices()), _bits(tensor.values()))
    dense = tensor.resolve_conj().contiguous().flatten()
    return (tensor.dtype, tuple(tensor.shape), dense.view(torch.uint8).cpu().numpy().tobytes())


def _describe(value: Any, held: list[Any], above: tuple[int, ...]) -> Any:
    held.append(value)
    if isinstance(value, Tensor):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # .grad of a non-leaf
            grad = value.grad if value.is_leaf else None
        held.append(grad)
        described = None if grad is None else (id(grad), _bits(grad))
        return (id(value), value.requires_grad, _bits(value), described)
    if id(value) in above:
        return "itself"
    inside = (*above, id(value))
    if isinstance(value, Mapping):
        return (id(value), [(key, _describe(each, held, inside)) for key, each in value.items()])
    if isinstance(value, (list, tuple, deque)):
        own = id(value) if not isinstance(value, tuple) else type(value)
        return (own, [_describe(each, held, inside) for each in value])
    if isinstance(value, (set, frozenset)):
        return (id(value), sorted(map(repr, value)))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type)):
        return value
    if isinstance(value, nn.Module):
        return id(value)
    inner = getattr(value, "__dict__", None)
    if inner is not None and type(value).__module__.split(".")[0] not in ("torch", "builtins"):
        return (id(value), _describe(dict(inner), held, inside)[1])
    return id(value)
