"""The Gram matrix of many parameters at once.

<G_s, G_t> of an outer product is the product of two matrices, of g and of x. Parameters that read
the same x (q, k and v) share its matrix, and those of their g are added up before they are
multiplied by it; parameters with one vector per token are added to the total as they are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchfmri._tokens.algebra.factors import (
    MOST_ENTRIES,
    Index,
    Term,
    add_lower_square,
    lower_gram,
    precise,
)

_Key: TypeAlias = tuple[object, ...]
_SHORT, _WIDE = 128, 1024  # rows that are joined, and until they are so long


class _Rows(NamedTuple):
    """A factor with one row per token, and where it lies."""

    key: _Key
    values: Tensor  # (t, n); of rows with a single 1 its place, (t,)

    @property
    def is_index(self) -> bool:
        """Whether its rows have a single 1."""
        return self.values.ndim == 1


def summed_gram(parameters: Iterable[Sequence[Term]]) -> Tensor:
    """The Gram matrices of all parameters added up, (t, t), of which the lower half is right.

    Args:
        parameters: The terms of each, over the same tokens.
    """
    vectors: dict[_Key, list[_Rows]] = defaultdict(list)
    outer: list[tuple[_Rows, _Rows]] = []
    found: list[Tensor] = []
    for terms in parameters:
        rows = _only_rows(terms)
        if len(rows) == 1:
            vectors[rows[0].key].append(rows[0])
        elif len(rows) == 2:
            outer.append((rows[0], rows[1]))
        else:
            found.append(lower_gram(terms))
    totals: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    scratch: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
    for shared, members, plus in _groups(outer, vectors):
        total = _total(totals, members[0].values)
        kind = (total.device, total.dtype)
        if kind not in scratch:  # the same for all, so that they stay in a cache
            scratch[kind] = torch.zeros_like(total), torch.zeros_like(total)
        inner, own = scratch[kind]
        for number, matrix in enumerate(_joined(members)):
            add_lower_square(inner, matrix, keep=number > 0)
        if shared.is_index:
            torch.eq(shared.values[:, None], shared.values, out=own)
        else:
            add_lower_square(own, _wide(shared.values), keep=False)
        total.addcmul_(inner, own.add_(plus) if plus else own)
    for matrix in _joined([each for same in vectors.values() for each in same]):
        add_lower_square(_total(totals, matrix), matrix)
    found += totals.values()
    result = found[0]
    for each_total in found[1:]:
        result = result + each_total
    return result


def _joined(several: Sequence[_Rows]) -> list[Tensor]:
    """The same rows in fewer matrices: a product with long rows is faster than many with short.

    The inner products of the joined rows are the sums of those of the parts.
    """
    together: dict[tuple[torch.device, torch.dtype], list[list[Tensor]]] = defaultdict(list)
    alone = []
    for each in several:
        rows = _wide(each.values)
        if rows.shape[1] >= _SHORT:
            alone.append(rows)
            continue
        groups = together[rows.device, rows.dtype]
        if not groups or sum(len(one.T) for one in (*groups[-1], rows)) > _WIDE:
            groups.append([])
        groups[-1].append(rows)
    joined = [
        same[0] if len(same) == 1 else torch.cat(same, 1)
        for groups in together.values()
        for same in groups
    ]
    return alone + joined


def _groups(
    outer: list[tuple[_Rows, _Rows]], vectors: dict[_Key, list[_Rows]]
) -> list[tuple[_Rows, list[_Rows], float]]:
    """What is shared, what it is multiplied by, and 1 where that counts by itself too (a bias)."""
    uses = Counter(each.key for pair in outer for each in pair)
    groups: dict[tuple[_Key, bool], list[_Rows]] = defaultdict(list)
    shared: dict[_Key, _Rows] = {}
    for first, second in outer:
        common, own = (first, second) if uses[first.key] > uses[second.key] else (second, first)
        if own.is_index:
            common, own = own, common
        shared[common.key] = common
        biases = vectors.get(own.key)
        groups[common.key, bool(biases)].append(own)
        if biases:
            biases.pop()
    return [(shared[key], members, float(plus)) for (key, plus), members in groups.items()]


def _only_rows(terms: Sequence[Term]) -> list[_Rows]:
    """The factors of a parameter that has one term of at most two, a row per token; else none."""
    if len(terms) != 1 or len(terms[0].factors) > 2:
        return []
    (term,) = terms
    if term.rows != 1 or term.tokens**2 > MOST_ENTRIES:
        return []
    found = []
    for each in term.factors:
        values = each.at if isinstance(each, Index) else each
        if values.is_complex():
            return []
        key = (values.data_ptr(), values.shape, values.stride(), values.dtype)
        found.append(_Rows(key, values[:, 0]))
    return [] if all(each.is_index for each in found) else found


def _total(totals: dict[tuple[torch.device, torch.dtype], Tensor], like: Tensor) -> Tensor:
    """Where matrices of this device and precision are added up."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if (like.device, dtype) not in totals:
        totals[like.device, dtype] = like.new_zeros(len(like), len(like), dtype=dtype)
    return totals[like.device, dtype]


def _wide(rows: Tensor) -> Tensor:
    """The same in float32; where a GPU multiplies 16 bits exactly it is left as it is."""
    return rows if rows.is_cuda else precise(rows)
