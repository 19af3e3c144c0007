"""Turn one use of a parameter in an operation into terms, given the gradient of its result.

`rerun` calls `terms_of` for each `Use` that `tracker` recorded in a layer without a rule of its
own. To support an operation, add a function to `_RULES`; operations entry by entry need none. A
rule gets the places of the entries in the parameter, so it must also be right for views, slices and
transposes of it. If tokens or operation are not understood, raise `NotUnderstoodError`, and `rerun`
tries another exact way or names the operation to the user. `_ENTRIES` bounds what is formed in
full.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from torchfmri._tokens.algebra.factors import Factor, Index, Term, dense, grouped, slices
from torchfmri._tokens.rules.axes import features_second
from torchfmri._tokens.rules.layer_rules import convolution_terms, rms_normalised
from torchfmri._tokens.rules.moves import name_of
from torchfmri._tokens.rules.numbers import NOBODY, SEVERAL, compact, is_constant_along
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.sources import Sources
from torchfmri._tokens.rules.tracker import Derived, Tags, Use

# What may be formed per token where nothing but the whole gradient will do.
_ENTRIES = 1 << 26

Found: TypeAlias = "tuple[Tags, Term]"


class NotUnderstoodError(Exception):
    """A use that no rule covers; the text says which operation it was."""


class UnclearLayoutError(NotUnderstoodError):
    """A use on an argument of which nothing says whether its features are last or second."""


def terms_of(use: Use, g: Tensor, leaf: Tensor, sources: Sources) -> list[Found]:
    """The tokens and the terms of one use of one parameter, for each source of tokens.

    Args:
        use: What was recorded.
        g: The gradient of its result.
        leaf: The parameter, in the graph of the re-run.
        sources: The tokens of the run.

    Raises:
        NotUnderstoodError: No rule covers the operation, or its tokens cannot be told.
    """
    numbers = told_numbers(use.origins, g, _text(use), sources)
    found = []
    for use.tags in tags_of(sources, numbers):
        whole = use.derived.places is not None
        term = _term_of(use, g, tuple(leaf.shape)) if whole else _through_function(use, g, leaf)
        found.append(term)
    return found


def tags_of(sources: Sources, numbers: Tensor) -> list[Tags]:
    """The tokens of entries, for each source of tokens."""
    found = []
    for source in sources.present(numbers):
        local = sources.local(source, compact(numbers)).expand(numbers.shape)
        of = "" if source.true.name == "samples" else source.true.name
        found.append(Tags(source.grid, local, source.true.stack, of))
    return found


def told_numbers(origins: Origins | None, g: Tensor, operation: str, sources: Sources) -> Tensor:
    """The token of each entry, where every entry that matters has one.

    Raises:
        NotUnderstoodError: It cannot be told.
        UnclearLayoutError: It depends on which axis of an argument the positions are.
    """
    if origins is None:
        raise NotUnderstoodError(f"{operation} on entries whose tokens cannot be told")
    if origins.second is not None and not origins.is_decided and not origins.is_raw:
        raise NotUnderstoodError(
            f"{operation} on entries computed from different positions, by {origins.reason}"
        )
    if origins.is_raw and origins.second is not None:
        layouts = [each.layout for each in sources.present(origins.first)]
        if any(each is not None and each.is_unclear for each in layouts):
            raise UnclearLayoutError
        if layouts and all(each is not None and each.is_second for each in layouts):
            return origins.second
    small = compact(origins.first)
    if bool((small < NOBODY).any()):
        matters = (g != 0) & (origins.first < NOBODY)
        if bool((matters & (origins.first == SEVERAL)).any()):
            raise NotUnderstoodError(
                f"{operation} on entries computed from different positions, by {origins.reason}"
            )
        if bool(matters.any()):
            raise NotUnderstoodError(
                f"{operation} on entries whose tokens cannot be followed through {origins.reason}"
            )
    return origins.first


def _term_of(use: Use, g: Tensor, shape: tuple[int, ...]) -> Found:
    if use.is_direct and use.tags is not None and use.derived.places is not None:
        return use.tags, scattered(use.tags, use.derived.places, g, shape)
    rule = _RULES.get(name_of(use.function))
    if rule is not None:
        return rule(use, g, shape)
    if torch.Tag.pointwise in use.function.tags and use.tags is not None and not g.is_complex():
        return use.tags, scattered(use.tags, *entry_gradients(use, g), shape)
    raise NotUnderstoodError(_text(use))


def _through_function(use: Use, g: Tensor, leaf: Tensor) -> Found:
    """The term of a parameter that is used through a computed function of it, D = f(W).

    Each token's gradient of D is formed, and taken back through f: a few tokens at a time.
    """
    made = use.derived.tensor
    places = torch.arange(made.numel(), device=made.device).view(made.shape)
    identity = replace(use, derived=replace(use.derived, places=places))
    tags, term = _term_of(identity, g, tuple(made.shape))
    if term.tokens * leaf.numel() > _ENTRIES:
        raise NotUnderstoodError(
            f"{_text(use)} with a computed function of the parameter, whose whole gradients are "
            f"too large ({term.tokens:,} tokens x {leaf.numel():,} entries)"
        )
    parts = []
    for some in slices(term.tokens, made.numel()):
        whole = dense([term.at(some)]).view(-1, *made.shape).to(made.dtype)
        (back,) = torch.autograd.grad(
            [use.derived.edge],
            leaf,
            [whole],
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
        parts.append(
            leaf.new_zeros(len(whole), leaf.numel())
            if back is None
            else back.reshape(len(whole), -1)
        )
    return tags, Term((torch.cat(parts)[:, None],))


def _text(use: Use) -> str:
    return "direct use" if use.function is None else str(use.function)


# -- entry by entry ------------------------------------------------------------------------------


def entry_gradients(use: Use, g: Tensor) -> tuple[Tensor, Tensor]:
    """Of an operation entry by entry: where each entry's parameter stands, and its gradient.

    The parameter is broadcast first, so that its gradient comes before the sum over tokens.
    """
    assert use.derived.places is not None
    places = use.derived.places.expand(use.output.shape)
    whole = use.arguments[use.position].detach().expand(use.output.shape)
    with torch.enable_grad():
        spread = whole.clone().requires_grad_()
        arguments = [each.detach() if isinstance(each, Tensor) else each for each in use.arguments]
        arguments[use.position] = spread
        # The same operation out of place: the first operand may have been written into.
        function = getattr(torch.ops.aten, name_of(use.function))
        result = function(*arguments, **use.keywords)
        (values,) = torch.autograd.grad(result, spread, g.to(result.dtype))
    return places, values


def scattered(tags: Tags, places: Tensor, values: Tensor, shape: tuple[int, ...]) -> Term:
    """The term whose entries are given one by one: token, place in the parameter, value.

    As whole gradients where every token reaches most of the parameter; else as rows of it.
    """
    tokens = math.prod(tags.grid)
    count = math.prod(shape)
    numbers = tags.numbers.expand(values.shape).reshape(-1)
    at, flat = places.expand(values.shape).reshape(-1), values.reshape(-1)
    keep = (numbers >= 0) & (at >= 0)
    if not bool(keep.all()):
        numbers, at, flat = numbers[keep], at[keep], flat[keep]
    if tokens * count <= max(4 * values.numel(), 1 << 16):
        whole = flat.new_zeros(tokens * count).index_add_(0, numbers * count + at, flat)
        return Term((whole.view(tokens, 1, count),))
    width = shape[-1]
    pairs, inverse = torch.unique(
        numbers * (count // width) + at // width, return_inverse=True, sorted=True
    )
    rows = flat.new_zeros(len(pairs) * width).index_add_(0, inverse * width + at % width, flat)
    token, row = pairs // (count // width), pairs % (count // width)
    term = Term((Index(row[:, None], count // width), rows.view(-1, 1, width)))
    return grouped(token, tokens, term)


# -- products ------------------------------------------------------------------------------------


def _product(use: Use, g: Tensor, shape: tuple[int, ...]) -> Found:
    """Products x @ W and W @ x, also many at once: rows of x meet rows of g."""
    shift = 1 if name_of(use.function) in ("addmm", "baddbmm") else 0
    if shift and use.position == 0:  # the bias
        scale = use.keywords.get("beta", 1)
        assert use.tags is not None
        assert use.derived.places is not None
        return use.tags, scattered(use.tags, use.derived.places.expand(g.shape), g * scale, shape)
    g = g * use.keywords.get("alpha", 1) if shift else g
    first, second = use.arguments[shift], use.arguments[shift + 1]
    if second.ndim == 1:  # matrix times vector
        second, g = second[:, None], g[:, None]
    places = use.derived.places
    assert places is not None
    tags = use.tags
    assert tags is not None
    transposed = use.position != shift + 1
    numbers = tags.numbers if use.output.ndim == g.ndim else tags.numbers[:, None]
    x, w = first, places if places.ndim > 1 else places[:, None]
    if transposed:  # W @ x: everything transposed
        x, w, g, numbers = second.mT, places.mT, g.mT, numbers.mT
    if not is_constant_along(numbers, -1):
        return _mixed(tags, numbers, x.detach(), w, g, shape)
    x, w, g = (each if each.ndim == 3 else each[None] for each in (x.detach(), w, g))
    token = numbers[..., 0].expand(g.shape[:-1]).reshape(-1)
    block = w[:, 0, 0, None].expand(g.shape[:-1]).reshape(-1)
    rows = x.reshape(-1, 1, x.shape[-1]), g.reshape(-1, 1, g.shape[-1])
    return tags, _placed(token, tags, block, _steps(w), *rows, shape)


def _mixed(
    tags: Tags, numbers: Tensor, x: Tensor, w: Tensor, g: Tensor, shape: tuple[int, ...]
) -> Found:
    """A product along the tokens: each entry of the result has a token of its own."""
    if g.numel() * x.shape[-1] > _ENTRIES:
        raise NotUnderstoodError("a product along the tokens, too large to be taken apart")
    values = g[..., None] * x[..., None, :]
    each = replace(tags, numbers=numbers[..., None].expand(values.shape))
    return tags, scattered(each, w.mT[..., None, :, :].expand(values.shape), values, shape)


def _steps(w: Tensor) -> tuple[int, int]:
    """How far apart in the parameter neighbours along the rows and the columns are."""
    down = int(w[0, 1, 0] - w[0, 0, 0]) if w.shape[1] > 1 else 0
    right = int(w[0, 0, 1] - w[0, 0, 0]) if w.shape[2] > 1 else 0
    return down, right


def _placed(
    token: Tensor,
    tags: Tags,
    block: Tensor,
    steps: tuple[int, int],
    x: Tensor,
    g: Tensor,
    shape: tuple[int, ...],
) -> Term:
    """Rows of x and g at their place in the parameter, which may be a part of it.

    Args:
        token: Of each row, (n,).
        tags: The tokens.
        block: Where in the parameter, flat, the first entry stands that a row meets.
        steps: How far apart its entries along x and along g are.
        x: (n, 1, i).
        g: (n, 1, o).
        shape: Of the parameter.
    """
    keep = token >= 0
    if not bool(keep.all()):
        token, block, x, g = (each[keep] for each in (token, block, x, g))
    for rows, columns, down, right in ((g, x, *steps[::-1]), (x, g, *steps)):
        split = _split(shape, block, rows.shape[-1], columns.shape[-1], down, right)
        if split is not None:
            break
    else:
        raise NotUnderstoodError("a product with entries of the parameter in another order")
    count, height, width = split
    number, inside = block // (height * width), block % (height * width)
    factors: list[Factor] = [
        _padded(rows, inside // width, height),
        _padded(columns, inside % width, width),
    ]
    if count > 1:
        factors.insert(0, Index(number[:, None], count))
    return grouped(token, math.prod(tags.grid), Term(tuple(factors)))


def _split(
    shape: tuple[int, ...], block: Tensor, rows: int, columns: int, down: int, right: int
) -> tuple[int, int, int] | None:
    """The parameter as (blocks, height, width) in which rows and columns lie as they should.

    Args:
        shape: Of the parameter.
        block: Where the first entry of each product stands.
        rows: How many rows of the parameter the product covers.
        columns: How many columns.
        down: How far apart its rows are.
        right: How far apart its columns are.
    """
    if columns > 1 and right != 1:
        return None
    for first in reversed(range(len(shape) + 1)):
        width = math.prod(shape[first:])
        if columns > width or (rows > 1 and down != width):
            continue
        for start in reversed(range(first + 1)):
            height = math.prod(shape[start:first])
            inside = block % (height * width)
            fits = (inside // width + rows <= height) & (inside % width + columns <= width)
            if bool(fits.all()):
                return math.prod(shape[:start]), height, width
    return None


def _padded(rows: Tensor, start: Tensor, length: int) -> Tensor:
    """Rows (n, 1, k) as (n, 1, length), beginning at `start`, the same for all of them."""
    if rows.shape[-1] == length:
        return rows
    first = int(start[0]) if len(start) else 0
    if bool((start != first).any()):
        raise NotUnderstoodError("a product with parts of the parameter that differ between rows")
    return F.pad(rows, (first, length - first - rows.shape[-1]))


def _grouped_product(use: Use, g: Tensor, shape: tuple[int, ...]) -> Found:
    """Rows sorted by expert, each expert's rows times its matrix."""
    x = use.arguments[0].detach()
    ends = use.arguments[2] if len(use.arguments) > 2 else use.keywords["offs"]
    places, tags = use.derived.places, use.tags
    assert places is not None
    if tags is None or use.position != 1 or places.ndim != 3 or x.ndim != 2:
        raise NotUnderstoodError(_text(use))
    row = torch.arange(len(x), device=x.device)
    expert = torch.searchsorted(ends.to(row.dtype), row, right=True)
    inside = expert < len(places)
    token = torch.where(inside, tags.numbers[:, 0], -1)
    block = places[:, 0, 0][expert.clamp(max=len(places) - 1)]
    return tags, _placed(token, tags, block, _steps(places), x[:, None], g[:, None], shape)


# -- layers used as functions --------------------------------------------------------------------


def _convolution(use: Use, g: Tensor, shape: tuple[int, ...]) -> Found:
    x, weight, _, stride, padding, dilation, transposed, _, groups = use.arguments
    if transposed or not _is_whole(use.derived, shape):
        raise NotUnderstoodError(_text(use))
    kernel = tuple(weight.shape[2:])
    ends = [each for each in reversed(list(padding)) for _ in range(2)]
    padded = F.pad(x.detach(), ends)
    grid = features_second(tuple(g.shape), None)
    strides, gaps = (
        tuple(each) if len(each) == len(kernel) else tuple(each) * len(kernel)
        for each in (stride, dilation)
    )
    terms = convolution_terms(padded, g, grid, kernel, strides, gaps, groups)
    term, tags = terms["weight" if use.position == 1 else "bias"], use.tags
    assert tags is not None
    if not is_constant_along(tags.numbers, 1):
        raise NotUnderstoodError(f"{_text(use)} along channels that belong to different tokens")
    token = tags.numbers[:, 0].reshape(-1)
    kept = (token >= 0).nonzero()[:, 0]
    return tags, grouped(token[kept], math.prod(tags.grid), term.at(kept))


def _is_whole(derived: Derived, shape: tuple[int, ...]) -> bool:
    """Whether a derived tensor is the parameter itself, entry by entry."""
    places = derived.places
    if places is None or places.numel() != math.prod(shape):
        return False
    return bool((places.reshape(-1) == torch.arange(places.numel(), device=places.device)).all())


def _layer_norm(use: Use, g: Tensor, shape: tuple[int, ...]) -> Found:
    x, axes, epsilon = use.arguments[0].detach(), use.arguments[1], use.arguments[4]
    return _normalised(use, g, shape, F.layer_norm(x, list(axes), eps=epsilon), use.position == 2)


def _rms_norm(use: Use, g: Tensor, shape: tuple[int, ...]) -> Found:
    x, axes = use.arguments[0].detach(), use.arguments[1]
    epsilon = use.arguments[3] if len(use.arguments) > 3 else use.keywords.get("eps")
    epsilon = torch.finfo(x.dtype).eps if epsilon is None else epsilon
    return _normalised(use, g, shape, rms_normalised(x, len(axes), epsilon), True)


def _normalised(use: Use, g: Tensor, shape: tuple[int, ...], hat: Tensor, is_weight: bool) -> Found:
    assert use.tags is not None
    assert use.derived.places is not None
    values = g * hat if is_weight else g
    return use.tags, scattered(use.tags, use.derived.places.expand(g.shape), values, shape)


_RULES: dict[str, Callable[[Use, Tensor, Any], Found]] = {
    "mm": _product,
    "addmm": _product,
    "bmm": _product,
    "baddbmm": _product,
    "mv": _product,
    "_grouped_mm": _grouped_product,
    "grouped_mm_fallback": _grouped_product,
    "convolution": _convolution,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
}
