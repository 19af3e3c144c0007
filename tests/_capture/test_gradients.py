"""Gradients beside in-place writes, views, repeated calls, containers, checkpoints: by the oracle.

A case is a small model. It is run unwatched, under the oracle, and watched; activations must be
equal by bits, gradients up to rounding, and loss and `.grad` of the watched run by bits.
"""

from __future__ import annotations

import copy
import gc
import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracles import (
    DEVICE,
    TOLERANCE,
    assert_close,
    assert_matches,
    assert_same_bits,
    assert_same_grads,
    find_truth,
    grads_of,
    loss_of,
    numbers,
    push_numbers,
    random_state,
    set_random_state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from torchfmri import Inspector

WHAT = ("inputs", "activations", "gradients", "input_gradients", "parameter_gradients")
BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])


def run_model(model: nn.Module, data: Any) -> Tensor:
    """Forward pass with data of its own, so that in-place models cannot disturb the next run."""
    args, kwargs = copy.deepcopy(data)
    return loss_of(model(*args, **kwargs))


def record(model: nn.Module, data: Any, what: Any = WHAT, keep: str = "tensors") -> Any:
    """The inspection, and the loss, of one watched forward and backward pass."""
    inspector = Inspector(model, keep=keep)
    inspector.watch(["", "*"], what)
    with inspector.recording() as inspection:
        loss = run_model(model, data)
        loss.backward()
    return inspection, loss.detach()


def check(
    model: nn.Module,
    data: Any,
    *,
    reference: nn.Module | None = None,
    **options: Any,
) -> Any:
    """Compare a watched run with the oracle, and everything about it with an unwatched run."""
    truth = find_truth(model, lambda each: run_model(each, data), reference)
    state = random_state()
    light = copy.deepcopy(model)
    inspection, loss = record(model, data)
    assert_same_bits(loss, truth.loss, "loss")
    assert_same_grads(grads_of(model), truth.grads)
    assert_matches(inspection, truth, **options)
    if loss.dtype != torch.float64:  # once per pair of dtypes: statistics take their time
        set_random_state(state)
        statistics, loss = record(light, data, keep="statistics")
        assert_same_bits(loss, truth.loss, "loss with statistics")
        assert_same_grads(grads_of(light), truth.grads)
        assert_same_statistics(statistics, inspection)
    return inspection


def assert_same_statistics(statistics: Any, tensors: Any) -> None:
    """Statistics taken on the way are those of the tensors that were kept."""
    for layer, record_ in statistics.items():
        for ours, kept in zip(record_.calls, tensors[layer].calls, strict=True):
            for what in ("inputs", "activations", "gradients", "input_gradients"):
                for one, other in zip(ours.values(what), kept.tensors(what), strict=True):
                    assert (one is None) == (other is None)
                    if one is not None and other.is_floating_point():
                        assert one.statistics.count == other.numel()
                        assert one.statistics.l2 == pytest.approx(
                            float(other.double().norm()), rel=1e-5, abs=1e-30
                        )


def built(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype)


class Body(nn.Module):
    """A model from layers and a function of (layers, x)."""

    def __init__(self, act: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.act = act
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(self, *args, **kwargs)


def linear(i: int = 4, o: int = 4, bias: bool = True) -> nn.Linear:
    return nn.Linear(i, o, bias=bias)


def body(act: Callable[..., Any], **layers: nn.Module) -> nn.Module:
    """A model whose first layer makes the input of the rest require grad."""
    return Body(act, first=linear(), **layers)


# -- in-place writes after the module --------------------------------------------------------


def write_add(m: Any, y: Tensor) -> Tensor:
    return y.add_(1)


def write_mul(m: Any, y: Tensor) -> Tensor:
    return y.mul_(torch.linspace(1, 2, y.shape[-1], dtype=y.dtype))


def write_relu(m: Any, y: Tensor) -> Tensor:
    return F.relu_(y)


def write_functional(m: Any, y: Tensor) -> Tensor:
    return F.leaky_relu(y, inplace=True)


def write_index(m: Any, y: Tensor) -> Tensor:
    y[..., 0] = 3.0
    return y


def write_boolean_index(m: Any, y: Tensor) -> Tensor:
    y[y > 0] = 0.5
    return y


def write_slice(m: Any, y: Tensor) -> Tensor:
    y[:, :1].add_(1)
    return y


def write_slice_mul(m: Any, y: Tensor) -> Tensor:
    y[..., 1:].mul_(2)
    return y


def write_alias(m: Any, y: Tensor) -> Tensor:
    alias = y[..., 1:3]
    alias.mul_(2)
    return y * y


def write_alias_of_alias(m: Any, y: Tensor) -> Tensor:
    alias = y.transpose(0, 1)[1:]
    alias[..., :2].mul_(3)
    return y


def write_flat_view(m: Any, y: Tensor) -> Tensor:
    y.view(-1).mul_(2)
    return y


def write_twice(m: Any, y: Tensor) -> Tensor:
    y.add_(1)
    y.mul_(2)
    y[..., 0].sub_(1)
    return y


def write_after_read(m: Any, y: Tensor) -> Tensor:
    before = y * 2
    y.mul_(3)
    return before + y


def write_after_sum(m: Any, y: Tensor) -> Tensor:
    total = y.sum()
    y.add_(1)
    return y * 2 + total


def write_after_slice_read(m: Any, y: Tensor) -> Tensor:
    part = y[..., :2] * 5
    y[..., 1:].mul_(3)
    return torch.cat([part, y], dim=-1)


def write_other_branch(m: Any, y: Tensor) -> Tensor:
    y[..., :2] += m.second(y.detach().clone())[..., :2]
    return y


def write_masked_fill(m: Any, y: Tensor) -> Tensor:
    return y.masked_fill_(y < 0, -1.0)


def write_clamp(m: Any, y: Tensor) -> Tensor:
    return y.clamp_(-0.5, 0.5)


def write_through_layer(m: Any, y: Tensor) -> Tensor:
    return m.second(F.relu(y, inplace=True))


def write_then_keep_view(m: Any, y: Tensor) -> Tensor:
    view = y.flatten()
    y.mul_(2)
    return view * 3


def write_square(m: Any, y: Tensor) -> Tensor:
    return y.pow_(2)


def write_without_grad(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        y.mul_(2)
    return y.sin()


def write_data(m: Any, y: Tensor) -> Tensor:
    y.data.mul_(2)
    return y.sin()


def write_detached(m: Any, y: Tensor) -> Tensor:
    y.detach()[..., :1].add_(1)
    return y * y


WRITES = [
    write_add,
    write_mul,
    write_relu,
    write_functional,
    write_index,
    write_boolean_index,
    write_slice,
    write_slice_mul,
    write_alias,
    write_alias_of_alias,
    write_flat_view,
    write_twice,
    write_after_read,
    write_after_sum,
    write_after_slice_read,
    write_other_branch,
    write_masked_fill,
    write_clamp,
    write_through_layer,
    write_then_keep_view,
    write_square,
    write_without_grad,
    write_data,
    write_detached,
]
SHAPES = {"2d": (3, 4), "3d": (2, 3, 4), "4d": (2, 2, 2, 4)}


@BOTH
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("write", WRITES, ids=lambda each: each.__name__)
@pytest.mark.one_in(4)
def test_output_written_in_place(write: Any, shape: Any, bias: bool, dtype: Any) -> None:
    def act(m: Any, x: Tensor) -> Tensor:
        return write(m, m.layer(m.first(x)))

    model = built(lambda: body(act, layer=linear(bias=bias), second=linear()), dtype)
    check(model, ((numbers(*shape, dtype=dtype),), {}))


@BOTH
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("write", WRITES, ids=lambda each: each.__name__)
def test_output_written_in_place_inside_a_parent(write: Any, shape: Any, dtype: Any) -> None:
    """The parent's output is what was written; its child's is what was there before."""
    inner = Body(lambda m, x: write(m, m.layer(x)), layer=linear(), second=linear())
    model = built(
        lambda: body(
            lambda m, x: m.last(m.inner(m.first(x)).reshape(-1, 2)), inner=inner, last=linear(2, 3)
        ),
        dtype,
    )
    check(model, ((numbers(*shape, dtype=dtype),), {}))


@BOTH
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("write", [write_add, write_slice, write_alias, write_relu, write_twice])
def test_parent_written_again_after_it_returned(write: Any, shape: Any, dtype: Any) -> None:
    """The trap that crashes: a view updated through an alias inside the module, then hooked."""

    def inside(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        y[:, :1].add_(1)
        return y

    def act(m: Any, x: Tensor) -> Tensor:
        return write(m, m.inner(m.first(x)))

    model = built(lambda: body(act, inner=Body(inside, layer=linear())), dtype)
    check(model, ((numbers(*shape, dtype=dtype),), {}))


@BOTH
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_output_overwritten_whole_has_no_gradient(shape: Any, dtype: Any) -> None:
    def act(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        y = m.layer(h)
        y.copy_(h)
        return y

    model = built(lambda: body(act, layer=linear()), dtype)
    inspection = check(model, ((numbers(*shape, dtype=dtype),), {}), zero_is_none=True)
    ours = inspection["layer"].gradients
    assert ours is None or not ours.any()


@BOTH
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_input_written_in_place_by_the_module(shape: Any, dtype: Any) -> None:
    def writes(m: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        return m.layer(x)

    def act(m: Any, x: Tensor) -> Tensor:
        return m.inner(m.first(x))

    model = built(lambda: body(act, inner=Body(writes, layer=linear())), dtype)
    check(model, ((numbers(*shape, dtype=dtype),), {}))


@BOTH
def test_slice_of_input_written_in_place_by_the_module(dtype: Any) -> None:
    def writes(m: Any, x: Tensor) -> Tensor:
        x[:, :1] *= 2
        return x

    def act(m: Any, x: Tensor) -> Tensor:
        return m.inner(m.first(x)) * 3

    model = built(lambda: body(act, inner=Body(writes)), dtype)
    check(model, ((numbers(3, 4, dtype=dtype),), {}))


def test_buffer_filled_in_place_gives_the_gradient_of_its_part() -> None:
    def fills(m: Any, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], 6, dtype=x.dtype)
        out[:, 1:5] = m.layer(x)
        return out[:, :4]

    model = built(
        lambda: body(lambda m, x: m.inner(m.first(x)).mul_(2), inner=Body(fills, layer=linear())),
        torch.float64,
    )
    check(model, ((numbers(3, 4),), {}))


# -- views -----------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Any, Tensor], Any]] = {
    "whole": lambda m, x: m.layer(x).view(-1),
    "slice": lambda m, x: m.layer(x)[..., 1:3],
    "transpose": lambda m, x: m.layer(x).transpose(0, 1),
    "view_of_view": lambda m, x: m.layer(x)[1:].transpose(0, 1)[..., :2],
    "narrow": lambda m, x: m.layer(x).narrow(-1, 1, 2),
    "expand": lambda m, x: m.layer(x).unsqueeze(0).expand(3, *m.layer(x).shape),
    "diagonal": lambda m, x: m.layer(x).diagonal(dim1=-2, dim2=-1),
    "select": lambda m, x: m.layer(x)[0],
    "strided": lambda m, x: m.layer(x)[..., ::2],
    "unflatten": lambda m, x: m.layer(x).unflatten(-1, (2, 2)),
    "view_of_input": lambda m, x: x.reshape(-1),
    "slice_of_input": lambda m, x: x[..., :2],
}
AFTER: dict[str, Callable[[Any], Any]] = {
    "read": lambda y: y * 2,
    "write": lambda y: y.mul_(2),
    "write_part": lambda y: y[..., :1].mul_(2) * 0 + y,
    "read_and_write": lambda y: (y * 3).sum() + y.mul_(2),
    "drop": lambda y: y.clone(),
}


@BOTH
@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.one_in(3)
def test_output_that_is_a_view(view: Any, after: Any, dtype: Any) -> None:
    if view is VIEWS["expand"] and after is not AFTER["read"] and after is not AFTER["drop"]:
        pytest.skip("PyTorch forbids writing into overlapping memory")

    def act(m: Any, x: Tensor) -> Any:
        return after(m.inner(m.first(x)))

    for shape in ((3, 4), (2, 3, 4)):
        model = built(lambda: body(act, inner=Body(view, layer=linear())), dtype)
        check(model, ((numbers(*shape, dtype=dtype),), {}))


@BOTH
@pytest.mark.parametrize("layer", [nn.Flatten(0), nn.Unflatten(-1, (2, 2))], ids=["flat", "unflat"])
def test_view_of_an_input_with_other_readers(layer: nn.Module, dtype: Any) -> None:
    """Not written, so nothing excuses mixing in what the other readers send to the base."""

    def act(m: Any, x: Tensor) -> Any:
        h = m.first(x)
        return m.flat(h).sin(), h.exp(), m.layer(h)

    model = built(lambda: body(act, flat=layer, layer=linear()), dtype)
    check(model, ((numbers(2, 3, 4, dtype=dtype),), {}))


@BOTH
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("split", ["chunk", "split", "unbind", "unequal"])
def test_parts_of_an_output_some_unused(split: str, bias: bool, dtype: Any) -> None:
    def parts(m: Any, x: Tensor) -> Any:
        y = m.layer(x)
        return {
            "chunk": lambda: y.chunk(3, -1),
            "split": lambda: y.split(2, -1),
            "unbind": lambda: y.unflatten(-1, (3, 2)).unbind(-2),
            "unequal": lambda: y.split([1, 2, 3], -1),
        }[split]()

    def act(m: Any, x: Tensor) -> Any:
        q, _, v = m.inner(m.first(x))
        return q * 2, v.sin()

    for shape in ((3, 4), (2, 3, 4)):
        model = built(lambda: body(act, inner=Body(parts, layer=linear(4, 6, bias))), dtype)
        inspection = check(model, ((numbers(*shape, dtype=dtype),), {}))
        gradients = inspection["inner"].calls[0].gradients
        assert [each is None for each in gradients] == [False, True, False]


@BOTH
def test_output_that_the_module_reads_itself_has_its_whole_gradient_and_a_note(dtype: Any) -> None:
    def parts(m: Any, x: Tensor) -> Any:
        y = m.layer(x)
        return y, y[..., :2], y.exp()

    def act(m: Any, x: Tensor) -> Any:
        whole, left, right = m.inner(m.first(x))
        return whole * 2, left.sin(), right * right

    for shape in ((3, 4), (2, 3, 4)):
        model = built(lambda: body(act, inner=Body(parts, layer=linear())), dtype)
        data = ((numbers(*shape, dtype=dtype),), {})
        truth = find_truth(model, lambda each: run_model(each, data))  # noqa: B023
        inspection, _ = record(model, data)
        ours, expected = inspection["inner"].calls[0].gradients, truth.calls["inner"][0].gradients
        assert_close(ours[0], truth.calls["inner.layer"][0].gradients[0], "the whole gradient")
        assert_close(ours[1], expected[1], "a view of it")
        assert_close(ours[2], expected[2], "a function of it")
        told = [text for text, layers in inspection.notes.items() if "inner" in layers]
        assert any("readers inside" in text for text in told)


def test_one_tensor_twice_in_an_output_has_its_whole_gradient_in_both() -> None:
    model = built(
        lambda: body(
            lambda m, x: [y * (1 + i) for i, y in enumerate(m.inner(m.first(x)))],
            inner=Body(lambda m, x: [m.layer(x)] * 2, layer=linear()),
        ),
        torch.float64,
    )
    data = ((numbers(3, 4),), {})
    inspection, _ = record(model, data)
    truth = find_truth(model, lambda each: run_model(each, data))
    whole = truth.calls["inner.layer"][0].gradients[0]
    for ours in inspection["inner"].calls[0].gradients:
        assert_close(ours, whole, "the whole gradient")


@BOTH
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_user_hook_on_a_gradient_changes_ours_alike_for_views_and_whole_tensors(
    shape: Any, dtype: Any
) -> None:
    """What a user's hook makes of the gradient after us is not dL/d output; 2-D and 3-D agree."""

    def clipped(m: Any, x: Tensor) -> Tensor:
        y = m.layer(m.first(x))
        if m.hooked:
            y.register_hook(lambda g: g * 100)
        return y.tanh()

    model = built(lambda: body(clipped, layer=linear()), dtype)
    data = ((numbers(*shape, dtype=dtype),), {})
    model.hooked = False
    truth = find_truth(model, lambda each: run_model(each, data))
    model.hooked = True
    inspection, _ = record(model, data)
    expected = truth.calls["layer"][0].gradients[0]
    assert_close(inspection["layer"].gradients, expected, "before the user's hook")


def multiply(gradient: Tensor) -> None:
    gradient.mul_(100)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("what", [WHAT, ("gradients",), ("input_gradients",)], ids=len)
def test_gradient_written_in_place_by_another_hook_leaves_our_record(shape: Any, what: Any) -> None:
    def spoiled(m: Any, x: Tensor) -> Tensor:
        y = m.layer(m.first(x))
        if m.hooked:
            y.register_hook(multiply)
        return (y * y).tanh()

    model = built(lambda: body(spoiled, layer=linear()), torch.float64)
    data = ((numbers(*shape),), {})
    model.hooked = False
    truth = find_truth(model, lambda each: run_model(each, data))
    model.hooked = True
    inspection, _ = record(model, data, what)
    if "gradients" in what:
        expected = truth.calls["layer"][0].gradients[0]
        assert_close(inspection["layer"].gradients, expected, "before the user's hook")
    if "input_gradients" in what:
        expected = truth.calls["layer"][0].input_gradients[0] * 100
        assert_close(inspection["layer"].input_gradients, expected, "after the user's hook")


def test_gradient_of_a_sum_is_kept_whole() -> None:
    """It arrives as a stride-0 expand; what we keep has memory of its own."""
    model = built(lambda: body(lambda m, x: m.layer(m.first(x))), torch.float64)
    model.layer = linear().double()
    inspector = Inspector(model, keep="tensors")
    inspector.watch("layer", "gradients")
    with inspector.recording() as inspection:
        model(numbers(3, 4)).sum().backward()
    ours = inspection["layer"].gradients
    assert torch.equal(ours, torch.ones(3, 4, dtype=torch.float64))
    ours[0, 0] = 7
    assert ours.sum() == 11 + 7


# -- views that no stride describes ------------------------------------------------------------

COMPLEX_VIEWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "view_as_real": lambda m, x: torch.view_as_real(m.layer(x)),
    "real": lambda m, x: m.layer(x).real,
    "imag": lambda m, x: m.layer(x).imag,
    "conj": lambda m, x: m.layer(x).conj(),
    "imag_of_conj": lambda m, x: m.layer(x).conj().imag,
}


def check_or_reason(model: nn.Module, data: Any, layer: str) -> None:
    """The gradient at `layer` is the oracle's, or None with a reason; everything else is right."""
    gradients = record(copy.deepcopy(model), data)[0][layer].calls[0].gradients
    skip = frozenset({(layer, "gradients")}) if gradients == [None] else frozenset()
    inspection = check(model, data, skip=skip)
    if skip:
        assert "in place" in inspection.missing[layer]


@pytest.mark.parametrize("after", ["read", "write", "read_and_write", "drop"])
@pytest.mark.parametrize("view", COMPLEX_VIEWS.values(), ids=COMPLEX_VIEWS)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["2d", "3d"])
def test_views_of_complex_outputs(view: Any, after: str, shape: Any) -> None:
    act = AFTER[after]
    model = built(
        lambda: body(lambda m, x: act(m.inner(m.first(x))), inner=Body(view, layer=linear())),
        torch.complex128,
    )
    data = ((torch.complex(numbers(*shape), numbers(*shape, seed=1)),), {})
    if "write" in after:
        check_or_reason(model, data, "inner")
    else:
        check(model, data)


def test_view_as_complex_written_in_place() -> None:
    def view(m: Any, x: Tensor) -> Tensor:
        return torch.view_as_complex(m.layer(x).unflatten(-1, (2, 2)))

    model = built(
        lambda: body(lambda m, x: m.inner(m.first(x)).mul_(2), inner=Body(view, layer=linear())),
        torch.float64,
    )
    check_or_reason(model, ((numbers(3, 4),), {}), "inner")


# -- modules that write in place -----------------------------------------------------------------

IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "leaky_relu": lambda: nn.LeakyReLU(inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "hardtanh": lambda: nn.Hardtanh(inplace=True),
    "dropout": lambda: nn.Dropout(0.5, inplace=True),
    "threshold": lambda: nn.Threshold(0.1, 0.2, inplace=True),
}


@BOTH
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("make", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place_module(make: Any, shape: Any, dtype: Any) -> None:
    model = built(lambda: nn.Sequential(linear(), make(), linear(), make(), linear()), dtype)
    check(model, ((numbers(*shape, dtype=dtype),), {}))


@BOTH
@pytest.mark.parametrize("make", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place_module_on_a_view(make: Any, dtype: Any) -> None:
    def act(m: Any, x: Tensor) -> Tensor:
        return m.last(m.relu(m.first(x)[..., 1:3]))

    for shape in SHAPES.values():
        model = built(lambda: body(act, relu=make(), last=linear(2, 3)), dtype)
        check(model, ((numbers(*shape, dtype=dtype),), {}))


@pytest.mark.parametrize("shape", [(2, 4), (1, 2, 4)], ids=["2d", "3d"])
@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
def test_in_place_module_whose_result_is_read_from_its_input(shape: Any, view: bool) -> None:
    """`relu(h); return h`: the output is the input, written; replacing it would cut the model."""

    def act(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        m.relu(h[..., :2] if view else h)
        return m.last(h)

    model = built(lambda: body(act, relu=nn.ReLU(inplace=True), last=linear()), torch.float64)
    data = ((numbers(*shape),), {})
    inspection, _ = record(copy.deepcopy(model), data)
    call = inspection["relu"].calls[0]
    for ours, at in ((call.gradients[0], "output"), (call.input_gradients[0], "input")):
        truth = push_numbers(model, lambda each: run_model(each, data), "relu", at=at)
        torch.testing.assert_close(ours, truth, rtol=1e-6, atol=1e-6)


@BOTH
def test_conv_batchnorm_in_place_relu(dtype: Any) -> None:
    def block(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]

    model = built(
        lambda: nn.Sequential(*block(2, 3), *block(3, 2), nn.MaxPool2d(2), nn.Flatten()), dtype
    )
    check(model, ((numbers(2, 2, 4, 4, dtype=dtype),), {}))


@BOTH
def test_flatten_then_in_place_relu(dtype: Any) -> None:
    model = built(
        lambda: nn.Sequential(
            nn.Conv1d(3, 2, 2), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(6, 2)
        ),
        dtype,
    )
    check(model, ((numbers(2, 3, 4, dtype=dtype),), {}))


@BOTH
def test_in_place_residual_as_in_resnet(dtype: Any) -> None:
    def block(m: Any, x: Tensor) -> Tensor:
        y = m.b(m.relu(m.a(x)))
        y += x
        return m.relu(y)

    make = {"a": linear(), "b": linear(), "relu": nn.ReLU(inplace=True)}
    for shape in SHAPES.values():
        model = built(
            lambda: body(
                lambda m, x: m.block(m.first(x)), block=Body(block, **copy.deepcopy(make))
            ),
            dtype,
        )
        check(model, ((numbers(*shape, dtype=dtype),), {}))


# -- repeated and shared modules ---------------------------------------------------------------


@BOTH
def test_module_called_several_times_with_cross_use(dtype: Any) -> None:
    def act(m: Any, x: Tensor) -> Tensor:
        one = m.layer(m.first(x))
        two = m.layer(one.tanh())
        three = m.layer(one + two)
        return three * one + two

    model = built(lambda: body(act, layer=linear()), dtype)
    inspection = check(model, ((numbers(2, 3, 4, dtype=dtype),), {}))
    assert len(inspection["layer"].calls) == 3


@BOTH
def test_module_called_twice_with_the_same_input(dtype: Any) -> None:
    def act(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.layer(h) + 2 * m.layer(h).sin() + h

    model = built(lambda: body(act, layer=linear()), dtype)
    inspection = check(model, ((numbers(3, 4, dtype=dtype),), {}))
    one, two = inspection["layer"].calls
    assert not torch.allclose(one.input_gradients[0], two.input_gradients[0])


@BOTH
def test_one_instance_under_two_names(dtype: Any) -> None:
    def make() -> nn.Module:
        shared = linear()
        return body(lambda m, x: m.b(m.a(m.first(x)).tanh()), a=shared, b=shared)

    inspection = check(built(make, dtype), ((numbers(3, 4, dtype=dtype),), {}))
    assert inspection["a"] is inspection["b"]
    assert inspection["a"].names == ("a", "b")
    assert len(inspection["b"].calls) == 2


@BOTH
def test_module_that_calls_itself(dtype: Any) -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor, depth: int) -> Tensor:
            if not depth:
                return self.layer(x)
            return self(x, depth - 1) * 2 + self(x.tanh(), depth - 1)

    model = built(lambda: body(lambda m, x: m.tree(m.first(x), 2), tree=Tree()), dtype)
    data = ((numbers(3, 4, dtype=dtype),), {})
    truth = find_truth(model, lambda each: run_model(each, data))
    inspection, _ = record(model, data)
    assert len(inspection["tree"].calls) == 7
    # Ours are in the order in which calls begin, and so are the oracle's.
    assert_matches(inspection, truth)


@BOTH
def test_tied_weights(dtype: Any) -> None:
    def make() -> nn.Module:
        model = body(lambda m, x: m.b(m.a(m.first(x))), a=linear(), b=linear())
        model.b.weight = model.a.weight
        return model

    check(built(make, dtype), ((numbers(3, 4, dtype=dtype),), {}))


# -- containers --------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Bundle:
    hidden: Tensor
    extra: Any = None
    note: str = "not a tensor"


def model_output(a: Tensor, b: Tensor) -> Any:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.BaseModelOutput(last_hidden_state=a, hidden_states=(b, b.detach()))


CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "one_tuple": lambda a, b: (a + b,),
    "deep": lambda a, b: [[[{"a": (a,)}]], [b]],
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"z": a, "a": b},
    "ordered_dict": lambda a, b: OrderedDict(z=a, a=b),
    "namedtuple": lambda a, b: Pair(a, b),
    "dataclass": lambda a, b: Bundle(a, b),
    "dataclass_none": lambda a, b: Bundle(a),
    "nested": lambda a, b: ({"x": [b, (a, None)], "y": Bundle(b.detach(), {"k": None})}, None),
    "with_none": lambda a, b: (None, a, None, b),
    "with_others": lambda a, b: (a, "text", 3, True, {"n": None}, b, torch.Size([1])),
    "with_integers": lambda a, b: (a, torch.arange(3), b > 0),
    "unused": lambda a, b: (a, {"unused": b * 2}),
    "detached": lambda a, b: (a, b.detach()),
    "model_output": model_output,
}


def use(value: Any) -> list[Tensor]:
    """Everything in a container but what is called unused."""
    if isinstance(value, Tensor):
        return [value.sin()] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [each for key, item in value.items() if key != "unused" for each in use(item)]
    if isinstance(value, (tuple, list)):
        return [each for item in value for each in use(item)]
    if isinstance(value, Bundle):
        return [*use(value.hidden), *use(value.extra)]
    return []


@BOTH
@pytest.mark.parametrize("pack", CONTAINERS.values(), ids=CONTAINERS)
def test_outputs_in_containers(pack: Any, dtype: Any) -> None:
    inner = Body(lambda m, x: pack(m.a(x), m.b(x)), a=linear(), b=linear())
    for shape in ((3, 4), (2, 3, 4)):
        model = built(
            lambda: body(lambda m, x: use(m.inner(m.first(x))), inner=copy.deepcopy(inner)), dtype
        )
        check(model, ((numbers(*shape, dtype=dtype),), {}))


@BOTH
@pytest.mark.parametrize("pack", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
def test_inputs_in_containers(pack: Any, keyword: bool, dtype: Any) -> None:
    def act(m: Any, x: Tensor) -> Any:
        h = m.first(x)
        packed = pack(h * 2, h.tanh())
        return m.inner(x=packed) if keyword else m.inner(packed)

    model = built(
        lambda: body(act, inner=Body(lambda m, x: [m.a(each) for each in use(x)], a=linear())),
        dtype,
    )
    check(model, ((numbers(3, 4, dtype=dtype),), {}))


@BOTH
def test_keyword_only_inputs(dtype: Any) -> None:
    def attend(m: Any, *, hidden_states: Tensor, mask: Tensor | None = None) -> Any:
        return m.layer(hidden_states), mask

    def act(m: Any, *, x: Tensor) -> Any:
        h = m.first(x)
        y, _ = m.inner(hidden_states=h, mask=None)
        return y + h

    model = built(lambda: body(act, inner=Body(attend, layer=linear())), dtype)
    inspection = check(model, ((), {"x": numbers(2, 3, 4, dtype=dtype)}))
    assert inspection["inner"].calls[0].elements("inputs") == ["hidden_states"]


def test_a_module_that_returns_none() -> None:
    def act(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        assert m.silent(h) is None
        return h

    model = built(lambda: body(act, silent=Body(lambda m, x: None)), torch.float64)
    inspection = check(model, ((numbers(3, 4),), {}))
    assert inspection["silent"].calls[0].activations == []


# -- gradients of inputs through one call ------------------------------------------------------

INNER: dict[str, Callable[[Any, Tensor], Any]] = {
    "residual_inside": lambda m, x: x + m.layer(x),
    "square": lambda m, x: x * x,
    "twice": lambda m, x: m.layer(x) + m.other(x).sin(),
    "twice_same_op": lambda m, x: x + x,
    "three_ways": lambda m, x: torch.cat([x, x * 2, m.layer(x)], dim=-1),
    "returned_beside": lambda m, x: (x + 0, m.layer(x)),
    "detached_branch": lambda m, x: m.layer(x) * x.detach().exp(),
    "no_grad_branch": lambda m, x: m.layer(x) + m.gate(x),
    "ignored": lambda m, x: m.layer(torch.ones_like(x)),
    "stacked": lambda m, x: torch.stack([x, x, m.layer(x)]),
    "where": lambda m, x: torch.where(x > 0, x, m.layer(x)),
    "einsum": lambda m, x: torch.einsum("...i,...i->...", x, x).unsqueeze(-1) * m.layer(x),
    "indexed": lambda m, x: m.layer(x)[..., [0, 2]] + x[..., [1, 1]],
    "checkpointed": lambda m, x: checkpoint(m.layer, x, use_reentrant=False) + x,
}


def gate(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return m.layer(x)


@BOTH
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_input_gradient_is_of_this_call_alone(inner: Any, dtype: Any) -> None:
    def act(m: Any, x: Tensor) -> Any:
        h = m.first(x)
        y = m.inner(h)
        return y, h.sin(), m.last(h)

    layers = {"layer": linear(), "other": linear(), "gate": Body(gate, layer=linear())}
    for shape in ((3, 4), (2, 3, 4)):
        model = built(
            lambda: body(act, inner=Body(inner, **copy.deepcopy(layers)), last=linear()), dtype
        )
        check(model, ((numbers(*shape, dtype=dtype),), {}))


@BOTH
def test_prenorm_transformer_block(dtype: Any) -> None:
    def block(m: Any, x: Tensor) -> Tensor:
        h = m.norm(x)
        x = x + m.attention(h, h, h, need_weights=False)[0]
        return x + m.down(F.gelu(m.up(m.norm(x))))

    layers = {
        "norm": nn.LayerNorm(4),
        "attention": nn.MultiheadAttention(4, 2, batch_first=True),
        "up": linear(4, 8),
        "down": linear(8, 4),
    }
    model = built(
        lambda: body(
            lambda m, x: m.b(m.a(m.first(x))),
            a=Body(block, **copy.deepcopy(layers)),
            b=Body(block, **copy.deepcopy(layers)),
        ),
        dtype,
    )
    # One tensor as q, k and v: see test_attention_layers.
    skip = frozenset((f"{each}.attention", "input_gradients") for each in "ab")
    inspection = check(model, ((numbers(2, 3, 4, dtype=dtype),), {}), skip=skip)
    assert "a.attention" in inspection.missing["a.attention.out_proj"]
    # Used by weight alone, its parameter gradients still arrive.
    for name, ours in inspection["a.attention.out_proj"].parameter_gradients.items():
        assert_same_bits(ours, model.a.attention.out_proj.get_parameter(name).grad, name)


@BOTH
def test_input_gradient_includes_what_leaves_by_an_attribute(dtype: Any) -> None:
    """An auxiliary loss kept on the module (a router's) is a way out of the call like any other."""

    def route(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        m.auxiliary = (x.exp() * 0.5).sum()
        return y

    def act(m: Any, x: Tensor) -> Any:
        y = m.router(m.first(x))
        return y, m.router.auxiliary

    model = built(lambda: body(act, router=Body(route, layer=linear())), dtype)
    check(model, ((numbers(3, 4, dtype=dtype),), {}))


def test_state_that_is_returned_and_kept_for_the_next_call() -> None:
    """The output lives on in the module: what the next call makes of it is in its gradient."""

    def step(m: Any, x: Tensor) -> Tensor:
        m.state = torch.tanh(m.layer(x) + (0 if m.state is None else m.state))
        return m.state

    def act(m: Any, x: Tensor) -> Any:
        m.cell.state = None
        h = m.first(x)
        return m.cell(h) + m.cell(h * 2) + m.cell(h * 3)

    def make() -> nn.Module:
        cell = Body(step, layer=linear())
        cell.state = None
        return body(act, cell=cell)

    model = built(make, torch.float64)
    data = ((numbers(2, 4),), {})
    inspection, _ = record(copy.deepcopy(model), data)
    truth = find_truth(model, lambda each: run_model(each, data))
    for index, call in enumerate(inspection["cell"].calls):
        pushed = push_numbers(model, lambda each: run_model(each, data), "cell", call=index)
        torch.testing.assert_close(call.gradients[0], pushed, rtol=1e-6, atol=1e-6)
        expected = truth.calls["cell"][index].input_gradients[0]
        assert_close(call.input_gradients[0], expected, f"call {index}")


# -- checkpointing -----------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Layers in segments; `kind` None runs them plainly."""

    def __init__(self, kind: bool | None, act: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.kind, self.act = kind, act
        self.first = linear()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def segment(self, run: Callable[..., Any], *args: Any) -> Any:
        if self.kind is None:
            return run(*args)
        return checkpoint(run, *args, use_reentrant=self.kind)

    def forward(self, x: Tensor) -> Any:
        return self.act(self, self.first(x))


def block() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), linear())


def checkpointed(kind: bool | None, act: Any, dtype: torch.dtype = torch.float64) -> nn.Module:
    return built(lambda: Checkpointed(kind, act, a=block(), b=block()), dtype)


def nested(m: Any, h: Tensor) -> Tensor:
    return m.segment(lambda x: m.b(m.segment(m.a, x)) + x, h)


def dropping(m: Any, h: Tensor) -> Tensor:
    return m.segment(lambda x: F.dropout(m.a(x), 0.5), h) + m.segment(m.b, h)


def writing(m: Any, h: Tensor) -> Tensor:
    return m.segment(lambda x: m.a[0](x).relu_(), h)


SEGMENTS: dict[str, Callable[..., Any]] = {
    "one": lambda m, h: m.segment(m.a, h),
    "two": lambda m, h: m.segment(m.b, m.segment(m.a, h)),
    "residual": lambda m, h: h + m.segment(m.a, h),
    "inside_and_outside": lambda m, h: m.b(m.segment(m.a, h)) * m.a(h),
    "called_twice_in_one": lambda m, h: m.segment(lambda x: m.a(m.a(x).tanh()), h),
    "called_in_two": lambda m, h: m.segment(m.a, m.segment(m.a, h).tanh()),
    "called_in_three": lambda m, h: m.segment(m.a, m.segment(m.a, m.segment(m.a, h))),
    "same_values_in_two": lambda m, h: m.segment(m.a, h) + 2 * m.segment(m.a, h).sin(),
    "nested": nested,
    "dropout": dropping,
    "in_place": writing,
    "tuple": lambda m, h: m.segment(lambda x: (m.a(x), m.b(x).sin()), h),
    "in_place_after": lambda m, h: m.segment(m.a, h).mul_(2),
}


@BOTH
@pytest.mark.parametrize("kind", [True, False], ids=["reentrant", "non_reentrant"])
@pytest.mark.parametrize("act", SEGMENTS.values(), ids=SEGMENTS)
def test_checkpointing(act: Any, kind: bool, dtype: Any) -> None:
    """A replay is no call, and its gradients belong to the call it replays."""
    if kind and act is SEGMENTS["in_place_after"]:
        pytest.skip("PyTorch forbids writing into what a custom Function returned as a view")
    for shape in ((3, 4), (2, 3, 4)):
        model, plain = (checkpointed(each, act, dtype) for each in (kind, None))
        skip = frozenset()
        if kind and act is SEGMENTS["inside_and_outside"]:
            # Parameter gradients come in parts here; the parts must be added up or be missing.
            skip = frozenset((f"a.{each}", "parameter_gradients") for each in (0, 2))
        check(model, ((numbers(*shape, dtype=dtype),), {}), reference=plain, skip=skip)


def test_parameter_gradient_in_parts_is_whole_or_missing() -> None:
    """Inside and outside of a reentrant checkpoint: the sum, or a reason, never a part."""
    act = SEGMENTS["inside_and_outside"]
    model = built(lambda: Checkpointed(True, act, a=block(), b=block()), torch.float64)
    data = ((numbers(3, 4),), {})
    inspection, _ = record(model, data)
    for layer in ("a.0", "a.2"):
        for name, parameter in model.get_submodule(layer).named_parameters():
            ours = inspection[layer].parameter_gradients.get(name)
            said = name in inspection.missing.get(layer, "")
            if ours is not None and not said:
                assert_close(ours, parameter.grad, f"{layer}.{name}")
            assert ours is None or not said, "a part is kept beside the reason"
            assert ours is not None or said


@pytest.mark.parametrize("kind", [True, False], ids=["reentrant", "non_reentrant"])
def test_checkpoint_sequential(kind: bool) -> None:
    model = built(lambda: nn.Sequential(*(linear() for _ in range(6))), torch.float64)
    data = numbers(3, 4).requires_grad_()
    truth = find_truth(model, lambda each: loss_of(each(data)))
    inspector = Inspector(model, keep="tensors")
    inspector.watch("*", WHAT)
    data.grad = None
    with inspector.recording() as inspection:
        loss_of(checkpoint_sequential(model, 3, data, use_reentrant=kind)).backward()
    assert_matches(inspection, truth)
    assert_same_grads(grads_of(model), truth.grads)


@pytest.mark.parametrize("kind", [True, False], ids=["reentrant", "non_reentrant"])
@pytest.mark.parametrize("when", ["before", "between"])
def test_call_without_grad_beside_a_checkpointed_one(kind: bool, when: str) -> None:
    """An evaluation of the same data in the same recording does not take the gradients."""
    model = built(lambda: Checkpointed(kind, SEGMENTS["one"], a=block()), torch.float64)
    plain = built(lambda: Checkpointed(None, SEGMENTS["one"], a=block()), torch.float64)
    data = ((numbers(3, 4),), {})
    truth = find_truth(plain, lambda each: run_model(each, data))
    inspector = Inspector(model, keep="tensors")
    inspector.watch("a.0", ["gradients", "input_gradients"])
    with inspector.recording() as inspection:
        if when == "before":
            with torch.no_grad():
                model(*data[0])
        loss = run_model(model, data)
        if when == "between":
            with torch.no_grad():
                model(*data[0])
        loss.backward()
    calls = inspection["a.0"].calls
    trained, idle = (calls[1], calls[0]) if when == "before" else (calls[0], calls[1])
    assert_close(trained.gradients[0], truth.calls["a.0"][0].gradients[0], "the training call")
    assert idle.gradients == [None]


@pytest.mark.parametrize("kind", [True, False], ids=["reentrant", "non_reentrant"])
def test_two_micro_batches_with_checkpoints_before_any_backward(kind: bool) -> None:
    model = built(lambda: Checkpointed(kind, SEGMENTS["two"], a=block(), b=block()), torch.float64)
    plain = built(lambda: Checkpointed(None, SEGMENTS["two"], a=block(), b=block()), torch.float64)
    batches = [((numbers(3, 4, seed=seed),), {}) for seed in (0, 1)]
    truths = [find_truth(plain, lambda each: run_model(each, batch)) for batch in batches]  # noqa: B023
    for order in ((0, 1), (1, 0)):
        inspector = Inspector(model, keep="tensors")
        inspector.watch("a.*", ["gradients", "input_gradients"])
        with inspector.recording() as inspection:
            losses = [run_model(model, batch) for batch in batches]
            for index in order:
                losses[index].backward()
        for layer in ("a.0", "a.1", "a.2"):
            for call, truth in zip(inspection[layer].calls, truths, strict=True):
                expected = truth.calls[layer][0]
                assert_close(call.gradients[0], expected.gradients[0], layer)
                assert_close(call.input_gradients[0], expected.input_gradients[0], layer)


# -- several backward passes -------------------------------------------------------------------


def test_retained_graph_gives_two_records_never_their_sum() -> None:
    model = built(lambda: nn.Sequential(linear(), nn.Tanh(), linear()), torch.float64)
    data = ((numbers(3, 4),), {})
    truth = find_truth(model, lambda each: run_model(each, data))
    inspector = Inspector(model, keep="tensors")
    inspector.watch("*", WHAT)
    with inspector.recording() as inspection:
        loss = run_model(model, data)
        loss.backward(retain_graph=True)
        (loss * 3).backward()
    for layer in ("0", "1", "2"):
        call = inspection[layer].calls[0]
        expected = truth.calls[layer][0]
        assert len(call.backwards) == 2
        for backward, factor in ((0, 1), (1, 3), (-1, 3)):
            for what in ("gradients", "input_gradients"):
                ours, wanted = call.tensors(what, backward)[0], getattr(expected, what)[0]
                assert_close(
                    ours, None if wanted is None else wanted * factor, f"{what} {backward}"
                )
    # A parameter's record is what the latest pass brought; .grad is the sum of both.
    for name, ours in inspection["0"].parameter_gradients.items():
        assert_close(ours, truth.parameter_gradients["0"][name] * 3, name)
        assert_close(
            model[0].get_parameter(name).grad, truth.parameter_gradients["0"][name] * 4, name
        )


def test_gradient_accumulation_over_micro_batches() -> None:
    model = built(lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()), torch.float64)
    batches = [((numbers(3, 4, seed=seed),), {}) for seed in range(3)]
    truths = [find_truth(model, lambda each: run_model(each, batch)) for batch in batches]  # noqa: B023
    inspector = Inspector(model, keep="tensors")
    inspector.watch("*", WHAT)
    with inspector.recording() as inspection:
        for batch in batches:
            run_model(model, batch).backward()
    for layer in ("0", "1", "2"):
        record_ = inspection[layer]
        assert len(record_.calls) == 3
        for call, truth in zip(record_.calls, truths, strict=True):
            assert_close(call.gradients[0], truth.calls[layer][0].gradients[0], layer)
    for number, truth in enumerate(truths):
        found = inspection["0"].parameter_values("parameter_gradients", number)
        for name, expected in truth.parameter_gradients["0"].items():
            assert_close(found[name].tensor, expected, f"{name}, micro-batch {number}")
    total = sum(truth.grads["0.weight"] for truth in truths)
    assert_close(model[0].weight.grad, total, ".grad")


def test_autograd_grad_and_backward_with_inputs() -> None:
    model = built(lambda: nn.Sequential(linear(), nn.Tanh(), linear()), torch.float64)
    data = ((numbers(3, 4),), {})
    truth = find_truth(model, lambda each: run_model(each, data))
    for way in ("autograd.grad", "backward(inputs)"):
        inspector = Inspector(model, keep="tensors")
        inspector.watch("*", WHAT)
        with inspector.recording() as inspection:
            loss = run_model(model, data)
            if way == "autograd.grad":
                torch.autograd.grad(loss, [model[0].weight])
                assert model[0].weight.grad is None
            else:
                loss.backward(inputs=[model[0].weight])
        for layer in ("0", "1", "2"):
            call, expected = inspection[layer].calls[0], truth.calls[layer][0]
            assert_close(call.gradients[0], expected.gradients[0], f"{way} {layer}")
            assert_close(call.input_gradients[0], expected.input_gradients[0], f"{way} {layer}")
        assert_close(inspection["0"].parameter_gradients["weight"], truth.grads["0.weight"], way)
        assert "bias" not in inspection["0"].parameter_gradients
        assert inspection["2"].parameter_gradients == {}
        assert "parameter_gradients" in inspection.missing["2"]
        model.zero_grad()


def test_double_backward_keeps_both_passes_apart_and_changes_nothing() -> None:
    model = built(lambda: nn.Sequential(linear(), nn.Tanh(), linear()), torch.float64)
    x = numbers(3, 4)

    def penalised(each: nn.Module, hold: dict[str, Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        loss = loss_of(each(leaf))
        hold["outer"] = loss
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return gradient.pow(2).sum()

    unwatched = copy.deepcopy(model)
    penalised(unwatched, {}).backward()
    truth = find_truth(model, lambda each: loss_of(each(x.clone().requires_grad_())))
    inspector = Inspector(model, keep="tensors")
    inspector.watch("*", WHAT)
    with inspector.recording() as inspection:
        penalised(model, {}).backward()
    assert_same_grads(grads_of(model), grads_of(unwatched))
    # The second pass, by hand: d penalty / d output of the first layer.
    h = (x @ model[0].weight.T + model[0].bias).detach().requires_grad_()
    leaf_gradient = torch.autograd.grad(loss_of(model[2](h.tanh())), h, create_graph=True)[0]
    penalty = (leaf_gradient @ model[0].weight.detach()).pow(2).sum()
    second = torch.autograd.grad(penalty, h)[0]
    call = inspection["0"].calls[0]
    assert len(call.backwards) == 2
    assert_close(call.tensors("gradients", 0)[0], truth.calls["0"][0].gradients[0], "first pass")
    assert_close(call.tensors("gradients", 1)[0], second, "second pass")
    assert not call.tensors("gradients", 0)[0].requires_grad


def test_failed_backward_pass_does_not_swallow_the_next() -> None:
    """After an exception in one backward pass the next has a number and gradients of its own."""
    model = built(
        lambda: body(
            lambda m, x: m.inner(m.first(x)),
            inner=Body(INNER["twice"], layer=linear(), other=linear()),
        ),
        torch.float64,
    )
    data = ((numbers(3, 4),), {})
    truth = find_truth(model, lambda each: run_model(each, data))
    inspector = Inspector(model, keep="tensors")
    inspector.watch(["", "*"], WHAT)

    def refuse(_: Tensor) -> None:
        raise ArithmeticError("in backward")

    with inspector.recording() as inspection:
        output = model(*data[0])
        bad = loss_of(output)
        handle = model.first.weight.register_hook(refuse)
        with pytest.raises(ArithmeticError, match="in backward"):
            bad.backward()
        handle.remove()
        model.zero_grad()
        run_model(model, data).backward()
    for layer, calls in truth.calls.items():
        call = inspection[layer].calls[1]
        assert_close(call.gradients[0], calls[0].gradients[0], f"gradient of {layer!r}")
        expected = calls[0].input_gradients[0]
        assert_close(call.input_gradients[0], expected, f"input gradient of {layer!r}")
    numbers_ = (
        inspection["inner.layer"].calls[0].backwards + inspection["inner.layer"].calls[1].backwards
    )
    assert len(set(numbers_)) == 2
    for name, expected in truth.parameter_gradients["first"].items():
        assert_close(inspection["first"].parameter_gradients[name], expected, name)


def test_backward_pass_inside_a_backward_pass() -> None:
    """A custom Function that differentiates inside its backward (as reentrant checkpoints do)."""

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                return torch.autograd.grad(leaf.sin(), leaf, g)[0]

    model = built(
        lambda: body(
            lambda m, x: Inside.apply(m.b(Inside.apply(m.a(m.first(x))))), a=linear(), b=linear()
        ),
        torch.float64,
    )
    check(model, ((numbers(3, 4),), {}))


# -- where no gradient flows -------------------------------------------------------------------


@BOTH
def test_detached_part_has_none_and_says_so(dtype: Any) -> None:
    def act(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.last(h) + m.side(h).detach()

    model = built(lambda: body(act, side=linear(), last=linear()), dtype)
    inspection = check(model, ((numbers(3, 4, dtype=dtype),), {}))
    assert inspection["side"].gradients is None
    assert "gradients: none arrived" in inspection.missing["side"]
    assert "; gradients" not in inspection.missing["first"]


@BOTH
def test_unused_output_has_none_and_says_so(dtype: Any) -> None:
    def act(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        m.side(h)
        return m.last(h)

    model = built(lambda: body(act, side=linear(), last=linear()), dtype)
    inspection = check(model, ((numbers(2, 3, 4, dtype=dtype),), {}))
    assert inspection["side"].gradients is None
    assert "gradients" in inspection.missing["side"]


@BOTH
def test_part_without_grad_has_none_and_says_so(dtype: Any) -> None:
    def act(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        with torch.no_grad():
            side = m.side(h)
        return m.last(h) * side

    model = built(lambda: body(act, side=linear(), last=linear()), dtype)
    inspection = check(model, ((numbers(3, 4, dtype=dtype),), {}))
    assert inspection["side"].gradients is None
    assert "gradients" in inspection.missing["side"]


@BOTH
def test_frozen_part(dtype: Any) -> None:
    model = built(lambda: nn.Sequential(linear(), linear(), linear()), dtype)
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    inspection = check(model, ((numbers(3, 4, dtype=dtype),), {}))
    assert inspection["0"].gradients is None
    assert "gradients" in inspection.missing["0"]
    assert set(inspection["1"].parameter_gradients) == {"bias"}


def test_module_that_starts_a_graph_of_its_own() -> None:
    """detach().requires_grad_() as an output: a leaf that gets its gradient."""

    def cut(m: Any, x: Tensor) -> Tensor:
        m.leaf = x.detach().requires_grad_()
        return m.leaf

    def act(m: Any, x: Tensor) -> Tensor:
        return m.last(m.cut(m.first(x)))

    model = built(lambda: body(act, cut=Body(cut), last=linear()), torch.float64)
    data = ((numbers(2, 3, 4),), {})
    inspection, _ = record(model, data)
    assert_close(inspection["cut"].gradients, model.cut.leaf.grad, "the leaf's own .grad")
    assert "cut" not in inspection.missing or "could not" not in inspection.missing["cut"]


def test_module_that_returns_a_parameter() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.arange(4.0))

        def forward(self) -> Tensor:
            return self.value

    model = built(
        lambda: body(lambda m, x: m.first(x) * m.constant(), constant=Constant()), torch.float64
    )
    inspection = check(model, ((numbers(3, 4),), {}))
    assert_close(inspection["constant"].gradients, model.constant.value.grad, "parameter")


# -- identity ------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "layer", [nn.Identity(), nn.Dropout(0.5).eval()], ids=["identity", "dropout"]
)
def test_module_that_returns_its_input(layer: nn.Module, dtype: Any) -> None:
    model = built(
        lambda: body(lambda m, x: m.last(m.same(m.first(x))), same=layer, last=linear()), dtype
    )
    model.same.eval()
    inspection = check(model, ((numbers(2, 3, 4, dtype=dtype),), {}))
    assert any("same" in layers for layers in inspection.notes.values())


@BOTH
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layer", [nn.Identity(), nn.Dropout(0.5)], ids=["identity", "dropout"])
def test_module_that_returns_its_input_which_is_then_written(
    layer: nn.Module, shape: Any, dtype: Any
) -> None:
    """Linear, Dropout in eval, in-place ReLU: in 3-D all three share one view."""
    model = built(
        lambda: nn.Sequential(linear(), copy.deepcopy(layer), nn.ReLU(inplace=True), linear()),
        dtype,
    )
    model[1].eval()
    check(model, ((numbers(*shape, dtype=dtype),), {}))


def test_identity_with_other_readers_says_that_they_are_included() -> None:
    def act(m: Any, x: Tensor) -> Any:
        h = m.first(x)
        return m.same(h).sin(), h * 3

    model = built(lambda: body(act, same=nn.Identity()), torch.float64)
    data = ((numbers(3, 4),), {})
    truth = find_truth(model, lambda each: run_model(each, data))
    inspection, _ = record(model, data)
    told = [text for text, layers in inspection.notes.items() if "same" in layers]
    assert told
    assert "other readers" in told[0]
    with pytest.raises(AssertionError):  # the known limit; without it the note would be wrong
        assert_matches(inspection, truth, what=("gradients",))


def test_view_written_in_place_whose_base_has_other_readers_says_so() -> None:
    def view(m: Any, x: Tensor) -> Tensor:
        return x[..., :2]

    def act(m: Any, x: Tensor) -> Any:
        h = m.first(x)
        other = h[..., 1:] * 3
        y = m.inner(h)
        y.mul_(2)
        return y, other

    model = built(lambda: body(act, inner=Body(view)), torch.float64)
    inspection, _ = record(model, ((numbers(3, 4),), {}))
    told = [text for text, layers in inspection.notes.items() if "inner" in layers]
    lost = inspection.missing.get("inner", "")
    assert any("base" in text for text in told) or "in place" in lost


# -- kinds of modules ----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers(kind: Any, batch_first: bool, dtype: Any) -> None:
    def act(m: Any, x: Tensor) -> Any:
        output, _ = m.recurrent(m.first(x))
        return m.last(output)

    layer = {"recurrent": kind(4, 5, num_layers=2, batch_first=batch_first), "last": linear(5, 2)}
    model = built(lambda: body(act, **copy.deepcopy(layer)), dtype)
    inspection = check(model, ((numbers(2, 3, 4, dtype=dtype),), {}))
    assert inspection["recurrent"].calls[0].gradients[1] is None


def test_packed_sequence() -> None:
    def act(m: Any, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            m.first(x), torch.tensor([3, 2], device="cpu"), batch_first=True
        )
        return m.lstm(packed)[1][0] * 2

    model = built(lambda: body(act, lstm=nn.LSTM(4, 5, batch_first=True)), torch.float64)
    data = ((numbers(2, 3, 4),), {})
    inspection, loss = record(model, data)
    call = inspection["lstm"].calls[0]
    assert call.elements("inputs")[:2] == ["0.data", "0.batch_sizes"]
    assert call.elements("activations")[0] == "0.data"
    gradient = dict(zip(call.elements("gradients"), call.gradients, strict=True))
    hidden = dict(zip(call.elements("activations"), call.activations, strict=True))["1.0"]
    count = torch.arange(hidden.numel(), dtype=torch.float64)
    weight = (torch.cos(count) + 1.5).reshape(hidden.shape)
    assert_close(gradient["1.0"], 2 * (weight + 0.5 * (2 * hidden)), "d loss / d hidden by hand")
    assert gradient["0.data"] is None
    assert call.input_gradients[0] is not None
    assert loss.isfinite()


@BOTH
def test_custom_function_with_several_outputs(dtype: Any) -> None:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            ctx.save_for_backward(x)
            signs = (x > 0).to(torch.int64)
            ctx.mark_non_differentiable(signs)
            return x.sin(), x.exp(), signs

        @staticmethod
        def backward(ctx: Any, a: Tensor, b: Tensor, _: Any) -> Tensor:
            (x,) = ctx.saved_tensors
            return a * x.cos() + b * x.exp()

    def act(m: Any, x: Tensor) -> Any:
        sine, exponent, _ = m.inner(m.first(x))
        return sine * 2, exponent

    model = built(lambda: body(act, inner=Body(lambda m, x: Both.apply(x))), dtype)
    check(model, ((numbers(3, 4, dtype=dtype),), {}))


@BOTH
def test_custom_function_that_writes_in_place(dtype: Any) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    model = built(
        lambda: body(
            lambda m, x: m.last(m.inner(m.first(x))),
            inner=Body(lambda m, x: Doubled.apply(x)),
            last=linear(),
        ),
        dtype,
    )
    for shape in ((3, 4), (2, 3, 4)):
        check(copy.deepcopy(model), ((numbers(*shape, dtype=dtype),), {}))


@BOTH
def test_weight_norm_and_spectral_norm(dtype: Any) -> None:
    def make() -> nn.Module:
        return body(
            lambda m, x: m.b(m.a(m.first(x))),
            a=nn.utils.parametrizations.weight_norm(linear()),
            b=nn.utils.parametrizations.spectral_norm(linear()),
        )

    check(built(make, dtype), ((numbers(3, 4, dtype=dtype),), {}))


def test_sparse_embedding_gradient() -> None:
    model = built(lambda: nn.Sequential(nn.Embedding(10, 4, sparse=True), linear()), torch.float64)
    inspection = check(model, ((torch.tensor([[1, 2, 2], [3, 1, 9]]),), {}))
    assert inspection["0"].parameter_gradients["weight"].is_sparse
    inspector = Inspector(model)
    inspector.watch("0", "parameter_gradients")
    inspector.run_inspection(torch.tensor([[1, 2]]), loss="sum")
    assert inspector.get_statistics("0", "parameter_gradients").count == 40


def test_complex_layers() -> None:
    model = built(lambda: nn.Sequential(linear(), linear()), torch.complex128)
    check(model, ((torch.complex(numbers(3, 4), numbers(3, 4, seed=1)),), {}))


@BOTH
def test_empty_batch(dtype: Any) -> None:
    model = built(lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()), dtype)
    inspection = check(model, ((torch.zeros(0, 4, dtype=dtype),), {}))
    assert inspection["0"].gradients.shape == (0, 4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("write", [write_add, write_relu, write_slice, write_after_read])
def test_autocast(shape: Any, write: Any) -> None:
    def act(m: Any, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return m.last(write(m, m.layer(m.norm(m.first(x)))))

    model = built(
        lambda: body(act, layer=linear(), norm=nn.LayerNorm(4), last=linear(), second=linear()),
        torch.float32,
    )
    inspection = check(model, ((numbers(*shape, dtype=torch.float32),), {}))
    assert inspection["layer"].activations.dtype == torch.bfloat16
    assert inspection["layer"].gradients.dtype == torch.bfloat16
    assert inspection["layer"].parameter_gradients["weight"].dtype == torch.float32


def test_half_precision_models() -> None:
    model = built(lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()), torch.bfloat16)
    check(model, ((numbers(2, 3, 4, dtype=torch.bfloat16),), {}))


@BOTH
def test_attention_layers(dtype: Any) -> None:
    def act(m: Any, x: Tensor) -> Any:
        h = m.first(x)
        return m.attention(h, h, h)

    model = built(lambda: body(act, attention=nn.MultiheadAttention(4, 2, batch_first=True)), dtype)
    inspection = check(
        model,
        ((numbers(2, 3, 4, dtype=dtype),), {}),
        skip=frozenset({("attention", "input_gradients")}),
    )
    assert any(
        "attention" in layers and "several inputs" in text
        for text, layers in inspection.notes.items()
    )
    # q, k and v are one tensor: what arrives there is the same for each of the three names.
    call = inspection["attention"].calls[0]
    assert "MultiheadAttention" in inspection.missing["attention.out_proj"]
    total = sum_of_input_gradients(model, dtype)
    for ours in call.input_gradients:
        assert_close(ours, total, "q = k = v: the whole of it")


def sum_of_input_gradients(model: nn.Module, dtype: torch.dtype) -> Tensor:
    h = model.first(numbers(2, 3, 4, dtype=dtype)).detach().requires_grad_()
    return torch.autograd.grad(loss_of(model.attention(h, h, h)), h)[0]


# -- run_inspection runs the same backward pass --------------------------------------------------


@BOTH
@pytest.mark.parametrize("kind", [None, True, False], ids=["plain", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("name", ["residual", "called_in_two", "nested", "dropout", "in_place"])
def test_run_inspection_gives_the_same_gradients(name: str, kind: bool | None, dtype: Any) -> None:
    model, plain = (checkpointed(each, SEGMENTS[name], dtype) for each in (kind, None))
    data = ((numbers(2, 3, 4, dtype=dtype),), {})
    truth = find_truth(model, lambda each: run_model(each, data), plain)
    inspector = Inspector(model, keep="tensors")
    inspector.watch(["", "*"], WHAT)
    inspection = inspector.run_inspection(data[0][0], loss=loss_of)
    assert_matches(inspection, truth)
    assert inspection.loss == float(truth.loss)
    assert all(each.grad is None for each in model.parameters())


@BOTH
def test_frozen_model_is_inspected_all_the_same(dtype: Any) -> None:
    model = built(lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()), dtype)
    x = numbers(3, 4, dtype=dtype)
    truth = find_truth(model, lambda each: loss_of(each(x.clone().requires_grad_())))
    model.requires_grad_(False)
    inspector = Inspector(model, keep="tensors")
    inspector.watch(["", "*"], ["activations", "gradients", "input_gradients"])
    inspection = inspector.run_inspection(x, loss=loss_of)
    assert_matches(inspection, truth, what=("activations", "gradients", "input_gradients"))
    assert any("frozen" in text for text in inspection.notes)
    assert not any(each.requires_grad for each in model.parameters())
    assert not x.requires_grad


def test_frozen_model_that_takes_tokens_starts_at_the_embedding() -> None:
    model = built(lambda: nn.Sequential(nn.Embedding(10, 4), linear(), linear()), torch.float64)
    tokens = torch.tensor([[1, 2, 3]])
    truth = find_truth(model, lambda each: loss_of(each(tokens)))
    model.requires_grad_(False)
    inspector = Inspector(model, keep="tensors")
    inspector.watch("*", ["activations", "gradients"])
    inspection = inspector.run_inspection(tokens, loss=loss_of)
    assert_matches(inspection, truth, what=("activations", "gradients"))
    assert any("frozen" in text for text in inspection.notes)


# -- random programs -------------------------------------------------------------------------------


class Program(nn.Module):
    """A chain of random steps: layers, views, in-place writes, readers beside the chain."""

    STEPS = (
        "linear",
        "linear",
        "shared",
        "relu",
        "flatten",
        "unflatten",
        "identity",
        "tuple",
        "slice",
        "transpose",
        "write",
        "write_part",
        "read",
        "residual",
        "checkpoint",
    )

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        self.steps = [choose.choice(self.STEPS) for _ in range(choose.randint(3, 9))]
        self.shared = linear()
        self.first = linear()
        for index, step in enumerate(self.steps):
            layer = {
                "linear": lambda: linear(bias=choose.random() < 0.7),
                "relu": lambda: nn.LeakyReLU(0.3, inplace=True),
                "flatten": lambda: nn.Flatten(0, -2),
                "unflatten": lambda: Body(lambda m, x: x.unsqueeze(0)),
                "identity": nn.Identity,
                "tuple": lambda: Body(lambda m, x: {"a": m.layer(x), "b": None}, layer=linear()),
                "checkpoint": linear,
            }.get(step)
            if layer is not None:
                self.add_module(f"{step}{index}", layer())

    def forward(self, h: Tensor) -> Any:
        beside = []
        h = self.first(h)
        for index, step in enumerate(self.steps):
            layer = getattr(self, f"{step}{index}", None)
            if step == "tuple":
                h = layer(h)["a"]
            elif step == "checkpoint":
                h = checkpoint(layer, h, use_reentrant=False)
            elif layer is not None:
                h = layer(h)
            elif step == "shared":
                h = self.shared(h)
            elif step == "slice":
                h = h[..., 1:, :] if h.dim() > 1 and h.shape[-2] > 1 else h[:]
            elif step == "transpose":
                h = h.transpose(0, -2)
            elif step == "write":
                h.mul_(1.5)
            elif step == "write_part":
                h[..., :2].add_(1)
            elif step == "read":
                beside.append(h.sum() * 3)
            else:
                h = h + h.detach().clone().requires_grad_(False) * 0.5
        return [h * 1, *beside]


RESERVED = ("returns its input", "base")


@pytest.mark.parametrize("seed", range(300))
def test_random_program_is_right_or_says_what_is_not(seed: int) -> None:
    """A gradient may differ only where a note says that other readers are in it, and there are."""
    torch.manual_seed(seed)
    model = Program(seed).double()
    data = ((numbers(*((2, 3, 4) if seed % 3 else (3, 4)), seed=seed),), {})
    try:
        truth = find_truth(model, lambda each: run_model(each, data))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
        pytest.skip("PyTorch cannot differentiate this program")
    inspection, loss = record(model, data)
    assert_same_bits(loss, truth.loss, "loss")
    assert_same_grads(grads_of(model), truth.grads)
    noted = {
        layer
        for text, layers in inspection.notes.items()
        for layer in layers
        if any(word in text for word in RESERVED)
    }
    if "read" not in model.steps:
        noted = set()
    skip = {(layer, what) for layer in noted for what in ("gradients", "input_gradients")}
    assert_matches(inspection, truth, skip=frozenset(skip))


# -- the oracle itself can say no ----------------------------------------------------------------


class TestOracle:
    def setup_method(self) -> None:
        self.model = built(
            lambda: nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh()), torch.float64
        )
        self.data = ((numbers(3, 4),), {})
        self.truth = find_truth(self.model, lambda each: run_model(each, self.data))
        self.inspection, _ = record(self.model, self.data)

    def test_agrees(self) -> None:
        assert_matches(self.inspection, self.truth)

    @pytest.mark.parametrize("what", ["gradients", "input_gradients", "activations", "inputs"])
    def test_notices_the_values_of_another_layer(self, what: str) -> None:
        one, two = self.truth.calls["2"][0], self.truth.calls["3"][0]
        setattr(one, what, getattr(two, what))
        with pytest.raises(AssertionError, match=f"{what} of '2'"):
            assert_matches(self.inspection, self.truth)

    def test_notices_a_small_error_in_one_number(self) -> None:
        self.truth.calls["2"][0].gradients[0][1, 1] *= 1 + 1e-7
        with pytest.raises(AssertionError, match="off by"):
            assert_matches(self.inspection, self.truth)

    def test_notices_one_bit_of_an_activation(self) -> None:
        self.truth.calls["2"][0].activations[0].view(torch.int64)[0, 0] ^= 1
        with pytest.raises(AssertionError, match="bits differ"):
            assert_matches(self.inspection, self.truth)

    def test_notices_a_missing_gradient_and_a_superfluous_one(self) -> None:
        kept = self.truth.calls["2"][0].gradients
        self.truth.calls["2"][0].gradients = [None]
        with pytest.raises(AssertionError, match="the oracle has None"):
            assert_matches(self.inspection, self.truth)
        self.truth.calls["2"][0].gradients = kept
        self.truth.calls["0"][0].input_gradients = [torch.zeros(3, 4)]
        with pytest.raises(AssertionError, match="we have None"):
            assert_matches(self.inspection, self.truth)

    def test_notices_a_call_too_many(self) -> None:
        self.truth.calls["2"] *= 2
        with pytest.raises(AssertionError, match="calls"):
            assert_matches(self.inspection, self.truth)

    def test_notices_another_parameter_gradient(self) -> None:
        self.truth.parameter_gradients["0"]["weight"] = self.truth.grads["2.weight"]
        with pytest.raises(AssertionError, match="parameter gradient weight of '0'"):
            assert_matches(self.inspection, self.truth)

    def test_two_oracles_agree(self) -> None:
        """Probes and central differences, which share nothing, give the same."""
        for layer in ("0", "1", "2"):
            pushed = push_numbers(self.model, lambda each: run_model(each, self.data), layer)
            probed = self.truth.calls[layer][0].gradients[0]
            torch.testing.assert_close(pushed, probed, rtol=1e-6, atol=1e-6)
        assert TOLERANCE[torch.float64] < 1e-9


def test_recording_twice_in_a_row_gives_the_same() -> None:
    model = built(lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()), torch.float64)
    data = ((numbers(2, 3, 4),), {})
    truth = find_truth(model, lambda each: run_model(each, data))
    for _ in range(2):
        model.zero_grad()
        inspection, _ = record(model, data)
        assert_matches(inspection, truth)
        gc.collect()
