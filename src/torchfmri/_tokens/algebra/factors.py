"""The algebra of per-token parameter gradients, which are never formed.

What one use of a parameter adds to the gradient of token t is a short sum of outer products,

    G_t = sum over r of  f_0[t, r] (x) f_1[t, r] (x) ...

with one factor per axis of the parameter (its shape, or a refinement of it): dL/dy and x for a
Linear, a row number and dL/dy for an Embedding, a group, dL/dy and a patch for a convolution, and
a single factor for a bias or a norm layer. A factor is a tensor (t, r, n), or an `Index` where it
has a single one in each row. Letters: t token, r row of a token, n entries along an axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

# Intermediate results of the operations below stay under this many entries at a time.
MOST_ENTRIES = 1 << 24


class Index(NamedTuple):
    """A factor whose rows are zero but for a one: where that one is.

    Attributes:
        at: (t, r), integers from 0 to size - 1.
        size: The length of the axis.
    """

    at: Tensor
    size: int


Factor: TypeAlias = "Tensor | Index"


@dataclass(frozen=True, slots=True)
class Term:
    """What one use of a parameter adds to each token's gradient.

    Attributes:
        factors: One per axis, each over (t, r); at least one of them is a tensor.
    """

    factors: tuple[Factor, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        """The length of each axis; their product is the number of the parameter's entries."""
        return tuple(
            each.size if isinstance(each, Index) else each.shape[2] for each in self.factors
        )

    @property
    def tokens(self) -> int:
        return len(_at_or_values(self.factors[0]))

    @property
    def rows(self) -> int:
        return _at_or_values(self.factors[0]).shape[1]

    @property
    def bytes(self) -> int:
        """The bytes that its tensors keep in memory."""
        return sum(each.untyped_storage().nbytes() for each in map(_at_or_values, self.factors))

    def at(self, tokens: slice | Tensor) -> Term:
        """The same of some tokens only."""
        return Term(
            tuple(
                Index(each.at[tokens], each.size) if isinstance(each, Index) else each[tokens]
                for each in self.factors
            )
        )

    def scaled(self, weights: Tensor) -> Term:
        """Each token's gradient multiplied by a number of its own, (t,)."""
        sizes = {
            k: size
            for k, (size, each) in enumerate(zip(self.axes, self.factors, strict=True))
            if isinstance(each, Tensor)
        }
        smallest = min(sizes, key=sizes.__getitem__)
        factors = list(self.factors)
        tensor = factors[smallest]
        assert isinstance(tensor, Tensor)
        factors[smallest] = tensor * weights.to(tensor.dtype)[:, None, None]
        return Term(tuple(factors))

    def precise(self) -> Term:
        """The same in float32 where it was kept in 16 bits."""
        return Term(
            tuple(each if isinstance(each, Index) else precise(each) for each in self.factors)
        )


def precise(values: Tensor) -> Tensor:
    """The same in float32 where it was kept in 16 bits."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _at_or_values(factor: Factor) -> Tensor:
    return factor.at if isinstance(factor, Index) else factor


# -- bringing terms onto the same axes -----------------------------------------------------------


def common_axes(terms: Sequence[Term]) -> list[Term]:
    """The terms over the finest axes that all of them can be written with."""
    if len({term.axes for term in terms}) <= 1 and 1 not in terms[0].axes:
        return list(terms)
    boundaries = [set(_boundaries(term.axes)) for term in terms]
    shared = sorted(set.intersection(*boundaries))
    return [_coarser(term, shared) for term in terms]


def _boundaries(axes: Sequence[int]) -> list[int]:
    """The products of the axes from the last one on: what a step along each of them is."""
    return [math.prod(axes[k:]) for k in range(len(axes) + 1)]


def _coarser(term: Term, boundaries: list[int]) -> Term:
    merged: list[Factor] = []
    lengths: list[int] = []
    for factor, step, length in zip(term.factors, _boundaries(term.axes), term.axes, strict=False):
        # An axis of length 1 is no boundary: (1, 5), (5, 1) and (5,) are the same.
        if not merged or (step in boundaries and length > 1 and lengths[-1] > 1):
            merged.append(factor)
            lengths.append(length)
        else:
            merged[-1] = _merge(merged[-1], factor)
            lengths[-1] *= length
    return Term(tuple(merged))


def _merge(first: Factor, second: Factor) -> Factor:
    """One factor over two axes taken together, row by row."""
    if isinstance(first, Index) and isinstance(second, Index):
        return Index(first.at * second.size + second.at, first.size * second.size)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return (first[..., :, None] * second[..., None, :]).flatten(2)
    if isinstance(first, Index):
        assert isinstance(second, Tensor)
        whole = second.new_zeros(*second.shape[:2], first.size, second.shape[2])
        place = first.at[..., None, None].expand(*second.shape[:2], 1, second.shape[2])
        return whole.scatter_(2, place, second[:, :, None]).flatten(2)
    assert isinstance(second, Index)
    whole = first.new_zeros(*first.shape, second.size)
    place = second.at[..., None, None].expand(*first.shape, 1)
    return whole.scatter_(3, place, first[..., None]).flatten(2)


# -- numbers per token ---------------------------------------------------------------------------


def squares(terms: Sequence[Term]) -> Tensor:
    """|G_t|^2 of the sum of the terms, (t,)."""
    axes = {term.axes for term in terms}
    if len(axes) > 1 or 1 in terms[0].axes or any(term.rows > 1 for term in terms):
        terms = common_axes([term.precise() for term in terms])
    total = sum(inner(term, term) for term in terms)
    for k, first in enumerate(terms):
        for second in terms[k + 1 :]:
            total = total + 2 * inner(first, second)
    assert isinstance(total, Tensor)
    return total.clamp_min(0)


def inner(first: Term, second: Term) -> Tensor:
    """<G_t, G'_t> of two terms over the same axes, (t,)."""
    if first.rows == second.rows == 1:
        product: Tensor | None = None
        for one, other in zip(first.factors, second.factors, strict=True):
            if one is other and isinstance(one, Index):
                continue
            each = _row_inner(one, other)
            product = each if product is None else product * each
        assert product is not None
        return product
    parts = [_pairs(a, b).sum((1, 2)) for a, b in _in_chunks(first, second)]
    return torch.cat(parts)


def _row_inner(one: Factor, other: Factor) -> Tensor:
    """The inner product of single rows, (t,)."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one is other:
            return _norms(one[:, 0]).square()
        return _row_dots(precise(one[:, 0]), precise(other[:, 0]))
    if isinstance(one, Index) and isinstance(other, Index):
        return (one.at[:, 0] == other.at[:, 0]).to(torch.float32)
    if isinstance(one, Index):
        one, other = other, one
    assert isinstance(one, Tensor)
    assert isinstance(other, Index)
    return precise(one[:, 0].gather(1, other.at)[:, 0])


def _norms(rows: Tensor) -> Tensor:
    wide = rows.dtype in (torch.float32, torch.float64)
    found: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=None if wide else torch.float32)
    return found


def _row_dots(rows: Tensor, others: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vecdot(rows, others)
    return found


def _pairs(first: Term, second: Term) -> Tensor:
    """The inner product of every row of a token with every other of the same token, (t, r, r')."""
    product: Tensor | None = None
    for one, other in zip(first.factors, second.factors, strict=True):
        each = _row_pairs(one, other)
        product = each if product is None else product * each
    assert product is not None
    return product


def _row_pairs(one: Factor, other: Factor) -> Tensor:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one @ other.mT
    if isinstance(one, Index) and isinstance(other, Index):
        return (one.at[:, :, None] == other.at[:, None, :]).to(torch.float32)
    if isinstance(one, Tensor):
        assert isinstance(other, Index)
        return one.gather(2, other.at[:, None, :].expand(*one.shape[:2], -1))
    return _row_pairs(other, one).mT


def _in_chunks(first: Term, second: Term) -> Iterator[tuple[Term, Term]]:
    """Both terms, some tokens at a time."""
    entries = max(1, first.rows * second.rows, sum(first.axes) * max(first.rows, second.rows))
    for part in slices(first.tokens, entries):
        yield first.at(part), second.at(part)


def slices(count: int, entries: int) -> Iterator[slice]:
    step = max(1, MOST_ENTRIES // max(1, entries))
    for start in range(0, max(1, count), step):  # one, if empty, where there are no tokens
        yield slice(start, start + step)


def dots(terms: Sequence[Term], direction: Tensor) -> Tensor:
    """<G_t, V> for one V of the parameter's size, (t,)."""
    return torch.stack([_dot(term.precise(), direction) for term in terms]).sum(0)


def _dot(term: Term, direction: Tensor) -> Tensor:
    index, tensors, direction = _ordered(term, direction)
    if index is None:
        return _contract(tensors, direction[None], None)
    if len(tensors) < 2:
        return torch.cat([
            _contract([each[part] for each in tensors], direction, index[part])
            for part in slices(term.tokens, term.rows * direction[0].numel())
        ])  # fmt: skip
    total = tensors[0].new_zeros(index.shape)
    for each in torch.unique(index).tolist():  # one product per expert, not one copy of V per token
        tokens, rows = (index == each).nonzero(as_tuple=True)
        first, second = (tensor[tokens, rows] for tensor in tensors)
        total[tokens, rows] = _row_dots(first @ direction[each].to(first.dtype), second)
    return total.sum(1)


def _contract(tensors: list[Tensor], direction: Tensor, index: Tensor | None) -> Tensor:
    if not tensors:
        assert index is not None
        return direction[index].reshape(index.shape).sum(1)
    dtype = tensors[0].dtype
    if len(tensors) == 2:
        return _row_dots(tensors[0] @ direction[0].to(dtype), tensors[1]).sum(1)
    chosen = direction[0] if index is None else direction[index]
    return (tensors[0] * chosen.to(dtype)).sum((1, 2))


def _ordered(term: Term, whole: Tensor | None = None) -> tuple[Tensor | None, list[Tensor], Tensor]:
    """All indices as one, the tensors (two at most), and `whole` as (indices, *tensor axes)."""
    indices = [k for k, each in enumerate(term.factors) if isinstance(each, Index)]
    others = [k for k, each in enumerate(term.factors) if isinstance(each, Tensor)]
    index: Factor | None = None
    for k in indices:
        index = term.factors[k] if index is None else _merge(index, term.factors[k])
    tensors = [each for each in term.factors if isinstance(each, Tensor)]
    shape = [math.prod(term.axes[k] for k in indices), *(term.axes[k] for k in others)]
    while len(tensors) > 2:
        merged = _merge(tensors[-2], tensors[-1])
        assert isinstance(merged, Tensor)
        tensors, shape = [*tensors[:-2], merged], [*shape[:-2], shape[-2] * shape[-1]]
    if whole is None:
        whole = torch.empty(0, device="cpu")
    else:
        whole = whole.reshape(term.axes).permute(*indices, *others).reshape(shape)
    assert index is None or isinstance(index, Index)
    return None if index is None else index.at, tensors, whole


def _restored(term: Term, whole: Tensor) -> Tensor:
    """What `_ordered` made of a tensor over the axes, undone."""
    indices = [k for k, each in enumerate(term.factors) if isinstance(each, Index)]
    order = indices + [k for k, each in enumerate(term.factors) if isinstance(each, Tensor)]
    back = [order.index(k) for k in range(len(order))]
    return whole.reshape([term.axes[k] for k in order]).permute(back)


# -- numbers per pair of tokens ------------------------------------------------------------------


def gram(terms: Sequence[Term]) -> Tensor:
    """<G_s, G_t> for every pair of tokens, (t, t)."""
    return mirrored(lower_gram(terms))


def mirrored(lower: Tensor) -> Tensor:
    """A symmetric matrix from its lower half."""
    return lower.tril().add_(lower.tril(-1).T)


def lower_gram(terms: Sequence[Term]) -> Tensor:
    """The Gram matrix of a parameter's gradients, (t, t), of which the lower half is right."""
    terms = common_axes([term.precise() for term in terms])
    total: Tensor | None = None
    for k, one in enumerate(terms):
        for other in terms[k:]:
            if one is other:
                each = _own_gram(one)
            else:
                each = _gram(one, other)
                each = each + each.T
            total = each if total is None else total + each
    assert total is not None
    return total


def _own_gram(term: Term) -> Tensor:
    """The Gram matrix of one term: a product of those of its factors."""
    if term.rows > 1 or term.tokens**2 > MOST_ENTRIES:
        return _gram(term, term)
    product: Tensor | None = None
    for factor in term.factors:
        if isinstance(factor, Index):
            each = _across(factor, factor)
        else:
            each = factor.new_zeros(term.tokens, term.tokens)
            add_lower_square(each, factor[:, 0])
        product = each if product is None else product * each
    assert product is not None
    return product


def add_lower_square(whole: Tensor, rows: Tensor, keep: bool = True) -> None:
    """Add rows @ rows.T to a matrix, most of its upper half left out: it is symmetric.

    Where what is there is not to be kept, it is written over.
    """
    count = len(rows)
    pieces = 1 if count < 64 else 2 if rows.shape[1] < 192 else 4
    ends = [count * k // pieces for k in range(pieces + 1)]
    for start, end in pairwise(ends):
        part, some, others = whole[start:, start:end], rows[start:], rows[start:end].T
        if rows.dtype == whole.dtype:
            part.addmm_(some, others, beta=int(keep))
        elif keep:
            part += wide_product(some, others)
        else:
            part.copy_(wide_product(some, others))


def _gram(first: Term, second: Term) -> Tensor:
    parts = []
    for part in slices(first.tokens, first.rows * second.rows * second.tokens):
        some = first.at(part)
        product: Tensor | None = None
        for one, other in zip(some.factors, second.factors, strict=True):
            each = _across(one, other)
            product = each if product is None else product * each
        assert product is not None
        if first.rows * second.rows > 1:
            product = product.view(some.tokens, first.rows, second.tokens, second.rows).sum((1, 3))
        parts.append(product)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _across(one: Factor, other: Factor) -> Tensor:
    """The inner product of every row with every other row, (t r, t' r')."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.flatten(0, 1) @ other.flatten(0, 1).T
    if isinstance(one, Index) and isinstance(other, Index):
        return (one.at.flatten()[:, None] == other.at.flatten()).to(torch.float32)
    if isinstance(one, Tensor):
        assert isinstance(other, Index)
        return one.flatten(0, 1)[:, other.at.flatten()]
    return _across(other, one).T.contiguous()


# -- over the parameter --------------------------------------------------------------------------


def total(terms: Sequence[Term]) -> Tensor:
    """The sum of all tokens' gradients, over the axes of the first term, in the factors' dtype.

    For a Linear it is the very matrix product with which autograd computes the gradient.
    """
    parts = [_total(term) for term in terms]
    result = parts[0]
    for part in parts[1:]:
        result = result + part.reshape(result.shape)
    return result


def _total(term: Term) -> Tensor:
    index, tensors, _ = _ordered(term)
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    if index is None:
        whole = flat[0].sum(0) if len(flat) == 1 else flat[0].T @ flat[1]
        return _restored(term, whole)
    size = math.prod(each.size for each in term.factors if isinstance(each, Index))
    at = index.flatten()
    whole = flat[0].new_zeros(size, *(each.shape[1] for each in flat))
    if len(flat) == 1:
        whole.index_add_(0, at, flat[0])
    else:
        for each in torch.unique(at).tolist():
            chosen = at == each
            whole[each] = flat[0][chosen].T @ flat[1][chosen]
    return _restored(term, whole)


def products(first: Term, second: Term) -> Term:
    """The entry-by-entry product of two terms, over pairs of their rows."""
    pairs = (first.rows, second.rows)
    same: Tensor | None = None
    factors: list[Factor] = []
    for one, other in zip(first.factors, second.factors, strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            factors.append((one[:, :, None] * other[:, None, :]).flatten(1, 2))
            continue
        index = one if isinstance(one, Index) else other
        assert isinstance(index, Index)
        at = index.at[:, :, None] if index is one else index.at[:, None, :]
        at = at.expand(len(at), *pairs).flatten(1)
        factors.append(Index(at, index.size))
        if isinstance(one, Index) and isinstance(other, Index):
            here = (one.at[:, :, None] == other.at[:, None, :]).flatten(1)[..., None]
        else:  # the tensor's entry there is a weight
            tensor = other if index is one else one
            assert isinstance(tensor, Tensor)
            tensor = tensor[:, None, :] if index is one else tensor[:, :, None]
            whole = tensor.expand(-1, *pairs, -1).flatten(1, 2)
            here = whole.gather(2, at[..., None])
        same = here if same is None else same * here
    if same is not None and not any(isinstance(each, Tensor) for each in factors):
        first_index = factors[0]
        assert isinstance(first_index, Index)
        ones = torch.nn.functional.one_hot(first_index.at, first_index.size)
        factors[0] = ones.to(same.dtype)
    if same is not None:
        tensors = [k for k, each in enumerate(factors) if isinstance(each, Tensor)]
        last = factors[tensors[-1]]
        assert isinstance(last, Tensor)
        factors[tensors[-1]] = last * same
    return Term(tuple(factors))


def squared_terms(terms: Sequence[Term]) -> list[Term]:
    """The entry-by-entry square of the sum of the terms, as terms."""
    terms = common_axes([term.precise() for term in terms])
    return [products(first, second) for first in terms for second in terms]


def marginal_squares(terms: Sequence[Term], start: int, end: int) -> Tensor:
    """The squared norms along one part of the parameter, (t, entries of that part).

    Args:
        terms: Terms of one parameter.
        start: Where the part begins: how many entries one step before it spans.
        end: Where it ends: how many entries its own smallest step spans.
    """
    terms = common_axes([term.precise() for term in terms])
    steps = _boundaries(terms[0].axes)
    outer = min(step for step in steps if step >= start)
    inside = max(step for step in steps if end % step == 0 and step <= end)
    if outer == inside:  # a side of length 1
        return squares(terms)[:, None]
    part = steps.index(outer), steps.index(inside)
    found: Tensor | None = None
    for first in terms:
        for second in terms:
            each = _marginal(first, second, *part)
            found = each if found is None else found + each
    assert found is not None
    # The factors may be coarser than what was asked for: the rest is added up here.
    whole = found.view(len(found), outer // start, start // end, end // inside)
    return whole.sum((1, 3)).clamp_min_(0)


def _marginal(first: Term, second: Term, start: int, end: int) -> Tensor:
    parts = []
    for one, other in _in_chunks(first, second):
        mine, theirs = _kept(one, start, end), _kept(other, start, end)
        weights: Tensor | None = None
        for x, y in zip(_rest(one, start, end), _rest(other, start, end), strict=True):
            each = _row_pairs(x, y)
            weights = each if weights is None else weights * each
        if weights is None:
            parts.append(mine.sum(1) * theirs.sum(1))
        else:
            parts.append(((weights.to(mine.dtype).mT @ mine) * theirs).sum(1))
    return torch.cat(parts)


def _kept(term: Term, start: int, end: int) -> Tensor:
    factor = term.factors[start]
    for each in term.factors[start + 1 : end]:
        factor = _merge(factor, each)
    if isinstance(factor, Tensor):
        return factor
    ones = torch.nn.functional.one_hot(factor.at, factor.size)
    return ones.to(next(each.dtype for each in term.factors if isinstance(each, Tensor)))


def _rest(term: Term, start: int, end: int) -> list[Factor]:
    return [*term.factors[:start], *term.factors[end:]]


def dense(terms: Sequence[Term]) -> Tensor:
    """Every token's gradient in full, (t, entries)."""
    terms = [term.precise() for term in terms]
    result: Tensor | None = None
    for term in terms:
        each = _dense(term)
        result = each if result is None else result + each
    assert result is not None
    return result


def _dense(term: Term) -> Tensor:
    if len(term.factors) == 1 or any(isinstance(each, Index) for each in term.factors):
        merged = term.factors[0]
        for each in term.factors[1:]:
            merged = _merge(merged, each)
        assert isinstance(merged, Tensor)
        return merged.sum(1)
    _, (first, second), _ = _ordered(term)
    return (first.mT @ second).flatten(1)


def device_of(term: Term) -> torch.device:
    """Where a term lies."""
    return _at_or_values(term.factors[0]).device


def dtype_of(term: Term) -> torch.dtype:
    """In which precision a term is kept."""
    return next(each.dtype for each in term.factors if isinstance(each, Tensor))


def probe(terms: Sequence[Term], shape: tuple[int, ...], vectors: Sequence[Tensor]) -> Tensor:
    """Each token's gradient between two vectors, u^T G_t v, (t,); one vector for a 1-D parameter.

    Args:
        terms: Terms of a parameter.
        shape: Of the parameter, which is read as (shape[0], everything else).
        vectors: u and v, of numbers that 16 bits hold.
    """
    found = [_probe(term, shape, vectors) for term in terms]
    return torch.stack(found).sum(0)


def _probe(term: Term, shape: tuple[int, ...], vectors: Sequence[Tensor]) -> Tensor:
    steps = _boundaries(term.axes)
    count = steps[0] // max(1, shape[0]) if shape else 1
    if len(vectors) == 1 or count not in steps:
        whole = vectors[0] if len(vectors) == 1 else torch.outer(*vectors).flatten()
        return _dot(term.precise(), whole.to(device_of(term)))
    place = steps.index(count)
    if not place:  # a single row
        return vectors[0][0] * _along(term.factors, vectors[1]).sum(1)
    left = _along(term.factors[:place], vectors[0])
    if place == len(term.factors):  # a single column
        return left.sum(1) * vectors[1][0]
    return (left * _along(term.factors[place:], vectors[1])).sum(1)


def _along(part: Sequence[Factor], vector: Tensor) -> Tensor:
    """The inner product of some factors taken together with one vector, (t, r)."""
    merged = part[0]
    if len(part) > 1:
        part = Term(tuple(part)).precise().factors
        merged = reduce(_merge, part)
    if isinstance(merged, Index):
        return vector[merged.at]
    return rows_times(merged, vector)


def rows_times(rows: Tensor, vector: Tensor) -> Tensor:
    """Rows @ vector in float32 at least, (t, r), of a vector that the dtype of the rows holds."""
    column = vector.to(rows.dtype)[:, None]
    return wide_product(rows.flatten(0, 1), column).view(rows.shape[:2])


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """A @ b in float32 at least.

    Products of 16-bit numbers are exact in float32, in which a GPU adds them up: then nothing has
    to be copied.
    """
    if a.is_cuda and a.itemsize == 2:
        try:
            found: Tensor = torch.mm(a, b, out_dtype=torch.float32)
        except (TypeError, NotImplementedError):  # before torch 2.8, or on another kind of GPU
            pass
        else:
            return found
    return precise(a) @ precise(b)


def grouped(token: Tensor, tokens: int, term: Term) -> Term:
    """A term whose rows are in any order, put under their tokens.

    Tokens with fewer rows than others get rows of zeros.

    Args:
        token: The token of each of the term's own tokens, (n,).
        tokens: How many there are.
        term: (n, r, ...).
    """
    if len(token) == tokens and bool((token == torch.arange(tokens, device=token.device)).all()):
        return term
    order = torch.argsort(token, stable=True)
    sorted_token = token[order]
    counts = torch.bincount(token, minlength=tokens)
    most = max(1, int(counts.max())) if len(counts) else 1
    start = counts.cumsum(0) - counts
    place = torch.arange(len(token), device=token.device) - start[sorted_token]
    result: list[Factor] = []
    for each in term.factors:
        values = each.at if isinstance(each, Index) else each
        whole = values.new_zeros(tokens, most, *values.shape[1:])
        whole[sorted_token, place] = values[order]
        whole = whole.flatten(1, 2)
        result.append(Index(whole, each.size) if isinstance(each, Index) else whole)
    return Term(tuple(result))
