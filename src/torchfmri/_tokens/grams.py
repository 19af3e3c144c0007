"""REDUCE: the Gram matrix of many parameters at once.

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

from torchfmri._tokens.factors import MOST_ENTRIES, Term, add_lower_square, lower_gram

_Key: TypeAlias = tuple[object, ...]
_WIDE = 1024  # beyond that a copy costs more than it saves


class _Rows(NamedTuple):
    """A factor with one row per token, and where it lies."""

    key: _Key
    values: Tensor  # (t, n)


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
    for shared, members, plus in _groups(outer, vectors):
        total = _total(totals, shared.values)
        inner = torch.zeros_like(total)
        for matrix in _joined(members):
            add_lower_square(inner, matrix)
        own = torch.full_like(total, plus)
        add_lower_square(own, _precise(shared.values))
        total.addcmul_(inner, own)
    for matrix in _joined([each for same in vectors.values() for each in same]):
        add_lower_square(_total(totals, matrix), matrix)
    found += totals.values()
    result = found[0]
    for each_total in found[1:]:
        result = result + each_total
    return result


def _joined(several: Sequence[_Rows]) -> list[Tensor]:
    """The same rows in fewer matrices: a product with long rows is faster than several with short.

    The inner products of the joined rows are the sums of those of the parts.
    """
    together: dict[tuple[torch.device, torch.dtype], list[list[Tensor]]] = defaultdict(list)
    for each in several:
        rows = _precise(each.values)
        groups = together[rows.device, rows.dtype]
        if not groups or sum(len(one.T) for one in (*groups[-1], rows)) > _WIDE:
            groups.append([])
        groups[-1].append(rows)
    return [
        same[0] if len(same) == 1 else torch.cat(same, 1)
        for groups in together.values()
        for same in groups
    ]


def _groups(
    outer: list[tuple[_Rows, _Rows]], vectors: dict[_Key, list[_Rows]]
) -> list[tuple[_Rows, list[_Rows], float]]:
    """What is shared, what it is multiplied by, and 1 where that counts by itself too (a bias)."""
    uses = Counter(each.key for pair in outer for each in pair)
    groups: dict[tuple[_Key, bool], list[_Rows]] = defaultdict(list)
    shared: dict[_Key, _Rows] = {}
    for first, second in outer:
        common, own = (first, second) if uses[first.key] > uses[second.key] else (second, first)
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
        if not isinstance(each, Tensor) or each.is_complex():
            return []
        key = (each.data_ptr(), each.shape, each.stride(), each.dtype)
        found.append(_Rows(key, each[:, 0]))
    return found


def _total(totals: dict[tuple[torch.device, torch.dtype], Tensor], like: Tensor) -> Tensor:
    """Where matrices of this device and precision are added up."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if (like.device, dtype) not in totals:
        totals[like.device, dtype] = like.new_zeros(len(like), len(like), dtype=dtype)
    return totals[like.device, dtype]


def _precise(rows: Tensor) -> Tensor:
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
