"""Linear and attention with the backward pass written out, to compare with.

Every class here is a `torch.autograd.Function` whose `backward` is the derivation of
docs/backward.md, line by line. Nothing is clever; everything can be differentiated twice. That a
second derivative comes out right depends on one rule: what `backward` uses must be an input or an
output of the function, because only through these does autograd know how it came about. This is why
the attention functions return what they save: the weights, or the logsumexp. The tests compare
layers with them, and so may users: the names are public. Speed does not matter, and a shorter
derivation is welcome if gradcheck and gradgradcheck pass.

Letters: b batch, i in, o out; g group (a key/value head), r a query head of that group, s query
position, t key position, d width.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from torchfmri._arguments import check_number, check_real, check_tensor, require

__all__ = [
    "AttentionFunction",
    "LightAttentionFunction",
    "LinearFunction",
    "attention",
    "light_attention",
    "linear",
]

Gradients = tuple[Tensor | None, ...]


class LinearFunction(Function):
    """y = x Wᵀ + b, with `apply(x, weight, bias, layout)`.

    x is (..., i), weight (o, i) as in `nn.Linear`, bias (o,) or None. A weight (i, o), as in
    y = x W + b of textbooks, is taken too: where i and o differ, the shapes tell which of the two
    is meant. A square weight is taken as (o, i), with a warning unless `layout` says which it is.

    Examples:
        >>> x, weight, bias = (torch.randn(*shape) for shape in [(5, 3), (2, 3), (2,)])
        >>> y = LinearFunction.apply(x, weight, bias)
        >>> torch.allclose(y, torch.nn.functional.linear(x, weight, bias), atol=1e-6)
        True
        >>> torch.allclose(LinearFunction.apply(x, weight.T, bias), y)
        True
    """

    @classmethod
    def apply(
        cls,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        layout: Literal["oi", "io"] | None = None,
    ) -> Tensor:
        """Return the output, (..., o).

        Args:
            x: (..., i).
            weight: (o, i) or (i, o).
            bias: (o,).
            layout: Which of the two the weight is: "oi" or "io"; by default told by the shapes.

        Raises:
            ValueError: The shapes do not fit together in either layout.
        """
        if (layout or _layout_of(x, weight)) == "io":
            weight = weight.T
        result: Tensor = super().apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Keep x for the gradient of the weight, and the weight for that of x."""
        ctx.save_for_backward(x, weight)
        y = x @ weight.T
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Return one product per input: g W, gᵀ x, and the sum of g over everything but o."""
        (g,) = gradients
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = g.flatten(0, -2) if g.dim() > 1 else g[None]  # every position is one row: (n, o)
        x_rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
        return (
            g @ weight if needs_x else None,
            rows.T @ x_rows if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


class AttentionFunction(Function):
    """Scaled dot-product attention, with `apply(query, key, value, mask, causal, scale)`.

    It returns the output (b, heads, s, d) and the weights (b, heads, s, t), and keeps the weights:
    their size grows with the square of the length. `apply(query, key, value)` alone returns the
    output only. See `attention` for the arguments.

    Examples:
        >>> from torch.autograd import gradcheck
        >>> inputs = torch.randn(3, 2, 3, 8, dtype=torch.float64, requires_grad=True).unbind()
        >>> gradcheck(AttentionFunction.apply, inputs, eps=1e-6)
        True
        >>> query, key, value = torch.randn(3, 1, 2, 4, 8, dtype=torch.float64)
        >>> output, weights = AttentionFunction.apply(query, key, value, None, True, 8**-0.5)
        >>> output.shape, weights.shape
        (torch.Size([1, 2, 4, 8]), torch.Size([1, 2, 4, 4]))
        >>> torch.allclose(weights.sum(-1), torch.ones(4, dtype=torch.float64))
        True
    """

    @classmethod
    def apply(cls, query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Any:
        """Return the output; with `mask` and what follows it, the output and the weights."""
        return _apply(super().apply, (query, key, value), arguments, (None, False, None))

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Return O and P of S = scale Q Kᵀ + mask, P = softmax(S), O = P V."""
        q, groups = _split_heads(query, key)
        scores = _scores(q, key, mask, causal, scale)
        weights = torch.softmax(scores, -1)
        # A query that may see nothing has no weights at all, rather than 0 / 0.
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
        output = torch.einsum("bgrst,bgtd->bgrsd", weights, value)
        output, weights = output.flatten(1, 2), weights.flatten(1, 2)
        ctx.groups, ctx.scale = groups, scale
        ctx.mask_shape = None if mask is None else mask.shape
        ctx.save_for_backward(query, key, value, weights)
        return output, weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Go back through O = P V, then through the softmax, then through S = scale Q Kᵀ + mask."""
        query, key, value, weights = ctx.saved_tensors
        q, p, g, g_weights = (
            each.unflatten(1, ctx.groups) for each in (query, weights, *gradients)
        )
        dv = torch.einsum("bgrst,bgrsd->bgtd", p, g)  # the heads of a group share one value: summed
        dp = torch.einsum("bgrsd,bgtd->bgrst", g, value) + g_weights
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        dq = torch.einsum("bgrst,bgtd->bgrsd", ds, key) * ctx.scale
        dk = torch.einsum("bgrst,bgrsd->bgtd", ds, q) * ctx.scale
        dmask = None
        if ctx.needs_input_grad[3]:
            dmask = ds.flatten(1, 2).sum_to_size(ctx.mask_shape)
        return dq.flatten(1, 2), dk, dv, dmask, None, None


class LightAttentionFunction(Function):
    """Attention that does not keep its weights: `apply(..., mask, causal, scale, block)`.

    It returns the output and the logsumexp of the scores (b, heads, s), and keeps these two beside
    its inputs: their size grows with the length, not with its square. The weights are made again
    from them in the backward pass, `block` keys at a time. Only a second derivative
    (`create_graph=True`) lets autograd keep the blocks.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64)
        >>> light, _ = LightAttentionFunction.apply(query, key, value, None, False, 8**-0.5, 4)
        >>> output, _ = AttentionFunction.apply(query, key, value, None, False, 8**-0.5)
        >>> torch.allclose(light, output)
        True
    """

    @classmethod
    def apply(cls, query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Any:
        """Return the output; with `mask` and what follows it, the output and the logsumexp."""
        defaults = (None, False, None, 128)
        return _apply(super().apply, (query, key, value), arguments, defaults)

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        block: int,
    ) -> tuple[Tensor, Tensor]:
        """Go over the keys once; whenever the largest score grows, scale down what is there."""
        q, groups = _split_heads(query, key)
        ctx.groups, ctx.causal, ctx.scale, ctx.block = groups, causal, scale, block
        largest = q.new_full(q.shape[:-1], -math.inf)
        total = torch.zeros_like(largest)
        output = q.new_zeros(*q.shape[:-1], value.shape[-1])
        for keys in _blocks(key.shape[2], block):
            scores = _scores(q, key, mask, causal, scale, keys)
            previous, largest = largest, torch.maximum(largest, scores.amax(-1))
            reference = largest.masked_fill(largest == -math.inf, 0.0)  # nothing seen yet
            shrink = torch.exp(previous - reference)
            weights = torch.exp(scores - reference[..., None])
            total = total * shrink + weights.sum(-1)
            update = torch.einsum("bgrst,bgtd->bgrsd", weights, value[:, :, keys])
            output = output * shrink[..., None] + update
        seen = total > 0
        output = (output / torch.where(seen, total, 1.0)[..., None]).flatten(1, 2)
        logsumexp = (largest + total.log()).flatten(1, 2)
        ctx.save_for_backward(query, key, value, mask, output, logsumexp)
        return output, logsumexp

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Return the gradients of `Attention`, block by block, with P = exp(S - logsumexp)."""
        query, key, value, mask, output, logsumexp = ctx.saved_tensors
        q, out, lse, g, g_lse = (
            each.unflatten(1, ctx.groups) for each in (query, output, logsumexp, *gradients)
        )
        # (p * dp).sum(-1) of the formula above is g · O: no block needs to know the others.
        row = (g * out).sum(-1, keepdim=True)
        nothing = lse == -math.inf  # exp(-inf - inf) is 0 where exp(-inf + inf) would be NaN
        lse = lse.masked_fill(nothing, math.inf)
        g_lse = g_lse.masked_fill(nothing, 0.0)
        dq, parts = torch.zeros_like(q), []
        for keys in _blocks(key.shape[2], ctx.block):
            k, v = key[:, :, keys], value[:, :, keys]
            p = torch.exp(_scores(q, key, mask, ctx.causal, ctx.scale, keys) - lse[..., None])
            ds = p * (torch.einsum("bgrsd,bgtd->bgrst", g, v) - row + g_lse[..., None])
            dq = dq + torch.einsum("bgrst,bgtd->bgrsd", ds, k) * ctx.scale
            dk = torch.einsum("bgrst,bgrsd->bgtd", ds, q) * ctx.scale
            dv = torch.einsum("bgrst,bgrsd->bgtd", p, g)
            dmask = None
            if ctx.needs_input_grad[3]:
                dmask = ds.flatten(1, 2).sum_to_size(*mask.shape[:-1], ds.shape[-1])
            parts.append((dk, dv, dmask))
        dks, dvs, dmasks = zip(*parts, strict=True)
        dmask = torch.cat(dmasks, -1) if ctx.needs_input_grad[3] else None
        return dq.flatten(1, 2), torch.cat(dks, 2), torch.cat(dvs, 2), dmask, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, by `LinearFunction`: x (..., i), weight (o, i), bias (o,) to (..., o)."""
    check_tensor("x", x, "(..., i)")
    check_tensor("weight", weight, "(o, i)")
    fits = weight.dim() == 2 and x.dim() > 0 and x.shape[-1] == weight.shape[-1]
    require(fits, "weight", weight, f"give (o, i), with the last axis of x, {tuple(x.shape)}")
    if bias is not None:
        check_tensor("bias", bias, "(o,)")
        require(bias.shape == weight.shape[:1], "bias", bias, f"give ({weight.shape[0]},)")
    return LinearFunction.apply(x, weight, bias, "oi")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return attention, by `AttentionFunction`: `scaled_dot_product_attention` without dropout.

    Args:
        query: (b, heads, s, d), or (b, s, d) for one head.
        key: (b, groups, t, d); `heads` is a multiple of `groups` (grouped-query attention).
        value: (b, groups, t, width); the output is (b, heads, s, width).
        mask: Broadcasts to (b, heads, s, t): added to the scores (and differentiated), or boolean,
            True where a query may see a key. A query that may see nothing gets zeros.
        causal: Query s sees keys 0 to s only; beside a mask, both hold.
        scale: The factor on the scores; 1/√d by default.
    """
    _check_attention(query, key, value, mask, scale)
    result: Tensor = AttentionFunction.apply(query, key, value, mask, causal, scale)[0]
    return result


def light_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    block: int = 128,
) -> Tensor:
    """Return attention, by `LightAttentionFunction`, which keeps nothing of size s x t.

    Args:
        query: (b, heads, s, d), or (b, s, d) for one head.
        key: (b, groups, t, d).
        value: (b, groups, t, width).
        mask: As for `attention`; a mask of size s x t that you hand in is yours and is kept.
        causal: As for `attention`.
        scale: As for `attention`.
        block: How many keys at a time.
    """
    _check_attention(query, key, value, mask, scale)
    check_number("block", block, 1, "how many keys at a time, such as 128")
    apply = LightAttentionFunction.apply
    result: Tensor = apply(query, key, value, mask, causal, scale, block)[0]
    return result


def _layout_of(x: Tensor, weight: Tensor) -> str:
    """Return if a weight is (o, i) or (i, o), "oi" or "io", as far as the shapes tell."""
    features = x.shape[-1] if x.dim() else 0
    if weight.dim() != 2 or features not in weight.shape:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: the weight is "
            f"(out, {features}) as in nn.Linear, or ({features}, out) as in x W + b."
        )
    if weight.shape[0] == weight.shape[1]:
        warnings.warn(
            f"The weight {tuple(weight.shape)} is square: it is taken as (out, in), as in "
            "nn.Linear, and not as (in, out), as in x W + b. Say which it is: "
            "LinearFunction.apply(x, weight, bias, 'oi'), or 'io'.",
            stacklevel=3,
        )
    return "oi" if weight.shape[1] == features else "io"


def _apply(
    apply: Callable[..., Any],
    tensors: tuple[Tensor, Tensor, Tensor],
    arguments: tuple[Any, ...],
    defaults: tuple[Any, ...],
) -> Any:
    """Run `apply` on tensors with an axis of heads, with all arguments filled in.

    One head needs no axis: (b, s, d) goes in as (b, 1, s, d), and the axis is taken out again.
    """
    shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
    dims = {each.dim() for each in tensors}
    if dims not in ({3}, {4}):
        raise ValueError(
            f"Query, key and value {shapes}: all three are (b, heads, length, width), or all three "
            "(b, length, width) for one head."
        )
    mask, causal, scale, *rest = (*arguments, *defaults[len(arguments) :])
    one_head = dims == {3}
    if one_head:
        tensors = (tensors[0][:, None], tensors[1][:, None], tensors[2][:, None])
        mask = mask[:, None] if mask is not None and mask.dim() == 3 else mask
    normalised = _normalised(tensors[0], tensors[1], mask, causal, scale)
    results = apply(*tensors, *normalised, *rest)
    results = tuple(each.squeeze(1) for each in results) if one_head else results
    return results if arguments else results[0]


def _check_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> None:
    """Raise if the shapes do not fit together."""
    axes = "(b, heads, tokens, d), or (b, tokens, d) for one head"
    for name, each in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, each, axes)
        require(each.dim() in (3, 4), name, each, f"give {axes}")
    fits = query.shape[0] == key.shape[0] and query.shape[-1] == key.shape[-1]
    require(fits, "key", key, f"its b and d must be those of the query, {tuple(query.shape)}")
    fits = value.shape[:-1] == key.shape[:-1]
    require(fits, "value", value, f"give one for each key, {tuple(key.shape[:-1])} and a width")
    if mask is not None:
        check_tensor("mask", mask, "booleans or numbers, (..., s, t)")
        wanted = (*query.shape[:-1], key.shape[-2])
        if query.dim() == 3 and mask.dim() == 4:
            wanted = (query.shape[0], 1, *wanted[1:])
        sizes = zip(reversed(mask.shape), reversed(wanted), strict=False)
        fits = mask.dim() <= 4 and all(size in (1, whole) for size, whole in sizes)
        require(fits, "mask", mask, f"give one that broadcasts to {wanted}")
    if scale is not None:
        check_real("scale", scale, "give a number, or None for 1/√d")


def _normalised(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor | None, bool, float]:
    """Return the mask as numbers with four axes, expanded over the keys, and the scale."""
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask.expand(*mask.shape[:-1], key.shape[2])
    return mask, causal, 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _split_heads(query: Tensor, key: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return the query as (b, g, r, s, d), and (g, r)."""
    heads, groups = query.shape[1], key.shape[1]
    if heads % groups:
        raise ValueError(f"{heads} query heads cannot share {groups} key heads: not a multiple.")
    split = (groups, heads // groups)
    return torch.unflatten(query, 1, split), split


def _scores(
    q: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    keys: slice = slice(None),
) -> Tensor:
    """Return scale Q Kᵀ + mask for some keys: (b, g, r, s, t), -inf where a query may not look."""
    scores = torch.einsum("bgrsd,bgtd->bgrst", q, key[:, :, keys]) * scale
    b, groups, per_group, queries, count = scores.shape
    if mask is not None:
        part = mask[..., keys].expand(b, groups * per_group, queries, count)
        scores = scores + torch.unflatten(part, 1, (groups, per_group))
    if causal:
        positions = torch.arange(key.shape[2], device=q.device)[keys]
        later = positions > torch.arange(queries, device=q.device)[:, None]
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _blocks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
