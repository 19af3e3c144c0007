"""The written-out backward passes: equal to autograd's, twice differentiable, light on memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracles import numbers
from torch import Tensor
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.nn import functional as F

from torchfmri.reference import (
    AttentionFunction,
    LightAttentionFunction,
    LinearFunction,
    attention,
    light_attention,
    linear,
)

pytestmark = pytest.mark.usefixtures("one_thread")
EXACT = 1e-12


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention as autograd differentiates it; the heads of a group are copies."""
    copies = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(copies, 1) for each in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0) @ value


def tensors(*shapes: Sequence[int], seed: int = 0) -> list[Tensor]:
    return [numbers(*shape, seed=seed + k).requires_grad_() for k, shape in enumerate(shapes)]


def assert_equal_to_autograd(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> None:
    output, expected = ours(*inputs), theirs(*inputs)
    assert output.shape == expected.shape
    assert (output - expected).abs().max() < EXACT
    g = numbers(*output.shape, seed=99)
    for mine, right in zip(
        torch.autograd.grad(output, inputs, g),
        torch.autograd.grad(expected, inputs, g),
        strict=True,
    ):
        assert mine.shape == right.shape
        assert (mine - right).abs().max() < EXACT


# -- linear ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3), (2, 1, 4, 3), (0, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_that_of_autograd(shape: tuple[int, ...], bias: bool) -> None:
    inputs = tensors(shape, (2, 3), *([(2,)] if bias else []))
    if 0 in shape:
        assert linear(*inputs).shape == (0, 2)
        assert torch.autograd.grad(linear(*inputs).sum(), inputs[1])[0].abs().sum() == 0
        return
    assert_equal_to_autograd(linear, F.linear, inputs)
    assert gradcheck(linear, inputs)
    assert gradgradcheck(linear, inputs)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_linear_computes_only_what_is_asked_for(wanted: int) -> None:
    inputs = [each.detach() for each in tensors((4, 3), (2, 3), (2,))]
    inputs[wanted].requires_grad_()
    output = linear(*inputs)
    returned: list[Tensor | None] = []
    output.grad_fn.register_hook(lambda found, _: returned.extend(found))
    output.sum().backward()
    assert [each is not None for each in returned] == [k == wanted for k in range(3)]


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_weight_of_textbooks_is_taken(shape: tuple[int, ...], bias: bool) -> None:
    inputs = tensors(shape, (3, 5), *([(5,)] if bias else []))
    assert_equal_to_autograd(LinearFunction.apply, lambda x, w, b=0.0: (x @ w) + b, inputs)
    assert gradcheck(LinearFunction.apply, inputs)


@pytest.mark.parametrize("layout", ["oi", "io"])
def test_square_weight_is_what_the_layout_says(layout: str) -> None:
    x, weight, bias = tensors((4, 3), (3, 3), (3,))
    right = x @ (weight.T if layout == "oi" else weight) + bias
    assert (LinearFunction.apply(x, weight, bias, layout) - right).abs().max() < EXACT


def test_square_weight_is_never_taken_silently() -> None:
    x, weight, bias = tensors((4, 3), (3, 3), (3,))
    with pytest.warns(UserWarning, match=r"\(3, 3\) is square: it is taken as \(out, in\)") as seen:
        y = LinearFunction.apply(x, weight, bias)
    assert seen[0].filename == __file__, "the warning is about the user's line"
    assert torch.equal(y, linear(x, weight, bias)), "as before, and as nn.Linear"


@pytest.mark.parametrize("shape", [(5, 4), (3,), (1, 3, 3)])
def test_weight_that_fits_neither_way_is_refused(shape: tuple[int, ...]) -> None:
    x, weight = tensors((4, 3), shape)
    with pytest.raises(
        ValueError, match=r"\(out, 3\) as in nn\.Linear, or \(3, out\) as in x W \+ b"
    ):
        LinearFunction.apply(x, weight)


# -- attention -------------------------------------------------------------------------------

SHAPES = {
    # b, heads, groups, s, t, d, width of the value
    "one of everything": (1, 1, 1, 1, 1, 1, 1),
    "one head": (2, 1, 1, 4, 4, 3, 3),
    "heads": (2, 3, 3, 5, 5, 2, 2),
    "groups": (1, 4, 2, 3, 3, 2, 2),
    "one key head for all": (2, 4, 1, 3, 3, 2, 2),
    "more keys than queries": (1, 2, 2, 2, 5, 3, 3),
    "more queries than keys": (1, 2, 1, 5, 2, 3, 3),
    "a wider value": (1, 2, 2, 3, 4, 2, 5),
}


def query_key_value(name: str) -> list[Tensor]:
    b, heads, groups, s, t, d, width = SHAPES[name]
    return tensors((b, heads, s, d), (b, groups, t, d), (b, groups, t, width))


VERSIONS: dict[str, Callable[..., Tensor]] = {
    "kept": attention,
    "light": light_attention,
    "light, blocks of 2": lambda *inputs, **options: light_attention(*inputs, **options, block=2),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("version", VERSIONS)
def test_attention_is_that_of_autograd(version: str, name: str, causal: bool) -> None:
    inputs = query_key_value(name)
    assert_equal_to_autograd(
        lambda *each: VERSIONS[version](*each, causal=causal),
        lambda *each: plain_attention(*each, causal=causal),
        inputs,
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["one head", "groups", "more keys than queries", "a wider value"])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.one_in(4)
def test_attention_passes_gradcheck_twice(version: str, name: str, causal: bool) -> None:
    inputs = query_key_value(name)

    def run(*each: Tensor) -> Tensor:
        return VERSIONS[version](*each, causal=causal, scale=0.7)

    assert gradcheck(run, inputs)
    assert gradgradcheck(run, inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (4, 1), (2, 1, 1, 5), (2, 4, 4, 5), (1, 4, 1, 1)])
@pytest.mark.parametrize("version", VERSIONS)
def test_added_mask_has_a_gradient_of_its_own_shape(
    version: str, shape: tuple[int, ...], causal: bool
) -> None:
    inputs = [*tensors((2, 4, 4, 3), (2, 2, 5, 3), (2, 2, 5, 3)), *tensors(shape, seed=7)]
    assert_equal_to_autograd(
        lambda *each: VERSIONS[version](*each, causal=causal),
        lambda *each: plain_attention(*each, causal=causal),
        inputs,
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_added_mask_passes_gradcheck_twice(version: str) -> None:
    inputs = [*tensors((1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2)), *tensors((1, 2, 1, 3), seed=7)]
    assert gradcheck(VERSIONS[version], inputs)
    assert gradgradcheck(VERSIONS[version], inputs)


def padding_mask() -> Tensor:
    """The second sequence has two tokens of five; its last query and all of head 0 see nothing."""
    allowed = torch.ones(2, 2, 4, 5, dtype=torch.bool)
    allowed[1, :, :, 2:] = False
    allowed[1, :, 3] = False
    allowed[0, 0] = False
    return allowed


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.one_in(4)
def test_queries_that_may_see_nothing(version: str, added: bool, causal: bool) -> None:
    mask = padding_mask()
    nothing = ~mask.any(-1)
    if added:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    inputs = tensors((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 3))

    def run(*each: Tensor) -> Tensor:
        return VERSIONS[version](*each, mask, causal=causal)

    assert_equal_to_autograd(run, lambda *each: plain_attention(*each, mask, causal=causal), inputs)
    output = run(*inputs)
    assert output[nothing].eq(0).all()
    assert nothing.any()
    dq, dk, dv = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    assert dq[nothing].eq(0).all()
    assert dk[1, :, 2:].eq(0).all()
    assert dv[1, :, 2:].eq(0).all()
    second = torch.autograd.grad(dq.square().sum() + dk.square().sum(), inputs)
    assert all(each.isfinite().all() for each in second)
    assert gradgradcheck(run, inputs)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_same_as_torch(version: str) -> None:
    inputs = query_key_value("groups")
    mask = numbers(3, 3, seed=5)
    for options, theirs in [
        ({"causal": True}, {"is_causal": True}),
        ({"mask": mask, "scale": 0.3}, {"attn_mask": mask, "scale": 0.3}),
        ({"mask": mask > 0}, {"attn_mask": mask > 0}),
    ]:
        assert_equal_to_autograd(
            lambda *each, options=options: VERSIONS[version](*each, **options),
            lambda *each, theirs=theirs: F.scaled_dot_product_attention(
                *each, enable_gqa=True, **theirs
            ),
            inputs,
        )


@pytest.mark.parametrize("version", VERSIONS)
def test_large_scores_do_not_overflow(version: str) -> None:
    query, key, value = tensors((1, 1, 3, 2), (1, 1, 4, 2), (1, 1, 4, 2))
    inputs = [(1e3 * query).detach().requires_grad_(), key, value]
    assert plain_attention(*inputs).isfinite().all()
    assert_equal_to_autograd(VERSIONS[version], plain_attention, inputs)


def test_heads_that_do_not_divide_are_refused() -> None:
    query, key, value = tensors((1, 3, 2, 2), (1, 2, 2, 2), (1, 2, 2, 2))
    for each in (attention, light_attention):
        with pytest.raises(ValueError, match="3 query heads cannot share 2 key heads"):
            each(query, key, value)


# -- what is kept ----------------------------------------------------------------------------


def saved_numbers(run: Callable[[], Any]) -> int:
    """How many numbers autograd keeps for the backward pass, every storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    assert kept.requires_grad
    return sum(storages.values())


def growth(version: Callable[..., Tensor]) -> list[float]:
    """What is kept per position, at two lengths."""
    found = []
    for length in (64, 256):
        inputs = tensors((1, 2, length, 4), (1, 1, length, 4), (1, 1, length, 4))
        found.append(saved_numbers(lambda inputs=inputs: version(*inputs, causal=True)) / length)
    return found


def test_light_attention_keeps_a_number_per_position_and_not_per_pair() -> None:
    # query, key, value and output: 2 x 4 + 4 + 4 + 2 x 4; logsumexp: 2.
    assert growth(light_attention) == [26.0, 26.0]
    # The control: the same measure sees the square where there is one: 2 heads x length.
    assert growth(attention) == [16 + 2 * 64, 16 + 2 * 256]


def test_light_attention_makes_nothing_of_that_size_meanwhile() -> None:
    length = 512
    inputs = tensors((1, 1, length, 4), (1, 1, length, 4), (1, 1, length, 4))
    largest = {}
    for name, version in (("kept", attention), ("light", light_attention)):
        with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
            version(*inputs, causal=True).sum().backward()
        sizes = [
            math.prod(shape)
            for event in profile.events() or []
            for shape in event.input_shapes
            if shape and all(isinstance(size, int) for size in shape)
        ]
        largest[name] = max(sizes)
    assert largest["light"] == length * 128
    assert largest["kept"] == length * length


# -- as the functions are called by themselves -----------------------------------------------


@pytest.mark.parametrize("function", [AttentionFunction, LightAttentionFunction])
def test_one_head_needs_no_axis(function: type[Function]) -> None:
    inputs = tensors((2, 3, 4), (2, 5, 4), (2, 5, 6))
    assert_equal_to_autograd(
        function.apply, lambda *each: F.scaled_dot_product_attention(*each), inputs
    )
    assert gradcheck(function.apply, inputs, eps=1e-6)
    assert gradgradcheck(function.apply, inputs)
    output, kept = function.apply(*inputs, None, False, 1.0)
    assert output.shape == (2, 3, 6)
    assert kept.shape[:2] == (2, 3)


def test_gradcheck_as_users_write_it() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        Q, K, V = (torch.randn(2, 3, 64, requires_grad=True) for _ in range(3))  # noqa: N806
        assert gradcheck(AttentionFunction.apply, (Q, K, V), eps=1e-6)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("function", [AttentionFunction, LightAttentionFunction])
@pytest.mark.parametrize("shape", [(5, 5), (2, 5, 5), (2, 1, 5)])
def test_masks_of_one_head(function: type[Function], shape: tuple[int, ...]) -> None:
    inputs = tensors((2, 5, 4), (2, 5, 4), (2, 5, 4))
    may_look = numbers(*shape, seed=7) > 0
    may_look[..., 0] = True
    output = function.apply(*inputs, may_look)[0]
    right = F.scaled_dot_product_attention(*inputs, attn_mask=may_look)
    assert (output - right).abs().max() < EXACT


def test_mixed_dimensions_are_refused() -> None:
    query, key, value = tensors((2, 3, 4), (2, 1, 3, 4), (2, 1, 3, 4))
    with pytest.raises(ValueError, match=r"\(2, 3, 4\), \(2, 1, 3, 4\), .* for one head"):
        AttentionFunction.apply(query, key, value)


# -- the tests can fail ----------------------------------------------------------------------


class ForgottenSoftmaxTerm(AttentionFunction):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, weights = ctx.saved_tensors
        g = gradients[0]
        ds = weights * (g @ value.mT)
        return ds @ key * ctx.scale, ds.mT @ query * ctx.scale, weights.mT @ g, None, None, None


class UnrecordedIntermediate(Function):
    """Saves something that is neither input nor output: the first derivative is right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0]


def test_a_wrong_backward_fails_these_tests() -> None:
    inputs = query_key_value("heads")

    def wrong(*each: Tensor) -> Tensor:
        return ForgottenSoftmaxTerm.apply(*each, None, False, each[0].shape[-1] ** -0.5)[0]

    with pytest.raises(AssertionError):
        assert_equal_to_autograd(wrong, plain_attention, inputs)
    assert not gradcheck(wrong, inputs, raise_exception=False)


def test_a_saved_intermediate_fails_only_the_second_time() -> None:
    (x,) = tensors((3,))
    assert gradcheck(UnrecordedIntermediate.apply, x)
    assert not gradgradcheck(UnrecordedIntermediate.apply, x, raise_exception=False)


def test_functions_return_what_they_save() -> None:
    query, key, value = query_key_value("groups")
    _, weights = AttentionFunction.apply(query, key, value, None, False, 1.0)
    _, lse = LightAttentionFunction.apply(query, key, value, None, False, 1.0, 2)
    scores = query @ key.repeat_interleave(2, 1).mT
    assert (weights - scores.softmax(-1)).abs().max() < EXACT
    assert (lse - scores.logsumexp(-1)).abs().max() < EXACT
    assert_equal_to_autograd(
        lambda *each: AttentionFunction.apply(*each, None, False, 1.0)[1],
        lambda q, k, v: (q @ k.repeat_interleave(2, 1).mT).softmax(-1) + 0 * v.sum(),
        (query, key, value),
    )
    assert LinearFunction.apply(query, key.detach()[0, 0]).shape[-1] == 3
