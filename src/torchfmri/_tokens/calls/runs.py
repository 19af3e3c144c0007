"""The parts of one parameter, from all passes of the model, as token gradients.

The tokens of further passes (gradient accumulation, a model called twice) are further samples: they
follow along b; where passes have different lengths the shorter ones are filled up with positions
that count as padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from torchfmri._tokens.algebra.factors import Factor, Index, Term
from torchfmri._tokens.algebra.gradient import TokenGradient
from torchfmri._tokens.algebra.parameter import ParameterInfo
from torchfmri._tokens.algebra.reduced import Reduced
from torchfmri._tokens.rules.record import Axis, UsePart
from torchfmri.exceptions import InspectionError

Masks: TypeAlias = dict[object, "Tensor | None"]


def joined(
    info: ParameterInfo, parts: Sequence[UsePart], masks: Masks
) -> dict[Axis, TokenGradient]:
    """The token gradients of a parameter on each of its token axes.

    Args:
        info: The parameter.
        parts: What its uses brought.
        masks: Masks of parameters before, which may be those of this one too.
    """
    if len(parts) == 1:
        (part,) = parts
        _, stack, grid, of = part.axis
        mask = None if part.mask is None else _mask(grid, [[part]], masks)
        return {
            Axis(0, stack, grid, of): TokenGradient(
                info, grid, part.rule, terms=part.terms, reduced=part.reduced, mask=mask
            )
        }
    by_axis: dict[Axis, list[UsePart]] = defaultdict(list)
    for part in parts:
        by_axis[part.axis].append(part)
    passes: dict[tuple[str, str, int], list[Axis]] = defaultdict(list)
    seen: dict[tuple[int, str, str], int] = defaultdict(int)
    for axis in sorted(
        by_axis, key=lambda each: each.run
    ):  # the n-th axis of one pass goes with the n-th of the next
        number = seen[axis.run, axis.stack, axis.of]
        seen[axis.run, axis.stack, axis.of] += 1
        passes[axis.stack, axis.of, number].append(axis)
    result: dict[Axis, TokenGradient] = {}
    for (stack, of, _), axes in passes.items():
        grid = (sum(each.grid[0] for each in axes), max(each.grid[1] for each in axes))
        passed = [by_axis[each] for each in axes]
        mask = _mask(grid, passed, masks)
        result[Axis(0, stack, grid, of)] = _token_gradient(info, grid, passed, mask)
    return result


def _token_gradient(
    info: ParameterInfo, grid: tuple[int, int], passes: list[list[UsePart]], mask: Tensor | None
) -> TokenGradient:
    names = " + ".join(dict.fromkeys(part.rule for parts in passes for part in parts))
    if any(part.terms is None for parts in passes for part in parts):
        numbers = [
            (_spread(reduced.squares(), axis, grid[1]), _spread(reduced.probes(), axis, grid[1]))
            for reduced, axis in ((_only(parts), parts[0].axis) for parts in passes)
        ]
        squares, probes = map(torch.cat, zip(*numbers, strict=True))
        reduced = Reduced.of(squares, probes)
        return TokenGradient(info, grid, names, reduced=reduced, mask=mask)
    terms = [[term for part in parts for term in part.terms or ()] for parts in passes]
    axes = [parts[0].axis for parts in passes]
    return TokenGradient(info, grid, names, terms=_joined_terms(terms, axes, grid), mask=mask)


def _only(parts: list[UsePart]) -> Reduced:
    """The numbers of a pass, in which all uses were reduced together."""
    if len(parts) > 1 or parts[0].reduced is None:
        raise InspectionError(
            f"Several calls were reduced one by one ({', '.join(part.rule for part in parts)}), so "
            "their cross terms are missing. Write token_gradients(..., keep='factors')."
        )
    return parts[0].reduced


def _spread(numbers: Tensor, axis: Axis, length: int) -> Tensor:
    """Numbers per token of a pass, (t, ...), filled up to a common length."""
    missing = length - axis.grid[1]
    if not missing:
        return numbers
    whole = numbers.view(*axis.grid, *numbers.shape[1:])
    return F.pad(whole, (*[0, 0] * (numbers.ndim - 1), 0, missing)).flatten(0, 1)


def _mask(grid: tuple[int, int], passes: list[list[UsePart]], masks: Masks) -> Tensor | None:
    """Which positions count, (b, s); None where all do."""
    key = (grid, *((parts[0].axis, id(parts[0].mask)) for parts in passes))
    if key not in masks:
        masks[key] = _new_mask(grid, passes)
    return masks[key]


def _new_mask(grid: tuple[int, int], passes: list[list[UsePart]]) -> Tensor | None:
    found: list[Tensor | None] = []
    for parts in passes:
        axis, padding = parts[0].axis, parts[0].mask
        options = () if padding is None else (padding.kept, padding.memory)
        if axis.stack == "encoder":
            options = options[::-1]
        kept = next(
            (each for each in options if each is not None and each.shape == axis.grid), None
        )
        if kept is None and axis.grid[1] == grid[1]:
            found.append(
                torch.ones(axis.grid, dtype=torch.bool, device="cpu") if len(passes) > 1 else None
            )
            continue
        whole = torch.ones(axis.grid, dtype=torch.bool, device="cpu") if kept is None else kept
        found.append(F.pad(whole, (0, grid[1] - axis.grid[1])))
    if all(each is None for each in found):
        return None
    device = next((each.device for each in found if each is not None and each.is_cuda), None)
    masks = [each if device is None else each.to(device) for each in found if each is not None]
    mask = torch.cat(masks)
    return None if bool(mask.all()) else mask


def _joined_terms(terms: list[list[Term]], axes: list[Axis], grid: tuple[int, int]) -> list[Term]:
    """The terms of several passes as terms over all their tokens."""
    if len(terms) == 1:
        return terms[0]
    kinds = {tuple((term.axes, term.rows, _kinds(term)) for term in each) for each in terms}
    if len(kinds) == 1:
        return [
            Term(tuple(
                _cat([_filled(term.factors[k], axis, grid[1])
                      for term, axis in zip(same, axes, strict=True)])
                for k in range(len(same[0].factors))
            ))
            for same in zip(*terms, strict=True)
        ]  # fmt: skip
    result = []
    before = 0
    total = grid[0] * grid[1]
    for several, axis in zip(terms, axes, strict=True):
        size = axis.grid[0] * grid[1]
        for term in several:
            filled = [_filled(each, axis, grid[1]) for each in term.factors]
            result.append(Term(tuple(_placed(each, before, total) for each in filled)))
        before += size
    return result


def _kinds(term: Term) -> tuple[bool, ...]:
    return tuple(isinstance(each, Index) for each in term.factors)


def _filled(factor: Factor, axis: Axis, length: int) -> Factor:
    """A factor with rows of zeros where the pass was shorter."""
    missing = length - axis.grid[1]
    if not missing:
        return factor
    values = factor.at if isinstance(factor, Index) else factor
    whole = values.reshape(*axis.grid, *values.shape[1:])
    whole = F.pad(whole, (*[0, 0] * (whole.ndim - 2), 0, missing)).flatten(0, 1)
    return Index(whole, factor.size) if isinstance(factor, Index) else whole


def _cat(several: Sequence[Factor]) -> Factor:
    first = several[0]
    if isinstance(first, Index):
        return Index(
            torch.cat([each.at for each in several if isinstance(each, Index)]), first.size
        )
    return torch.cat([each for each in several if isinstance(each, Tensor)])


def _placed(factor: Factor, before: int, total: int) -> Factor:
    """A factor of some tokens as one of all of them."""
    values = factor.at if isinstance(factor, Index) else factor
    after = total - before - len(values)
    whole = F.pad(values, (*[0, 0] * (values.ndim - 1), before, after))
    return Index(whole, factor.size) if isinstance(factor, Index) else whole
