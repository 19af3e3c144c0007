"""Whether the calls of its module explain the whole gradient of a parameter.

A parameter may be used outside of its module's calls, or the module may do something else than its
class says. Comparing one gradient finds all such cases, whatever their reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchfmri._tokens.algebra.block import TermBlock
from torchfmri._tokens.losses.matrix_calls import MatrixCall

# The calls explain a gradient that differs by less than this, by the dtype they came in.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_NARROW = 2e-2
_SCALED = 2  # calls of one parameter for which a scale is looked for


def explaining(total: Tensor, arrived: list[tuple[MatrixCall, Tensor]]) -> list[MatrixCall] | None:
    """The calls that the gradient is made of, with their scales; None if it is not."""
    if not arrived or not all(call.is_sound() for call, _ in arrived):
        return None
    if explains(total, arrived):
        return [call for call, _ in arrived]
    if len(arrived) > _SCALED or not bool(total.isfinite().all()):
        return None
    scaled = [(replace(call, scale=scale), g) for (call, g), scale in _scales(total, arrived)]
    return [call for call, _ in scaled] if explains(total, scaled) else None


def _scales(
    total: Tensor, arrived: list[tuple[MatrixCall, Tensor]]
) -> Iterator[tuple[tuple[MatrixCall, Tensor], float]]:
    """The multiples of the calls' products that come nearest to the gradient."""
    shape = tuple(total.shape)
    blocks = [TermBlock(shape, [call.factors(g[None])]).precise() for call, g in arrived]
    products = torch.stack([torch.cat([a.gram(b).flatten() for b in blocks]) for a in blocks])
    dots = torch.cat([block.dots(total) for block in blocks])
    found = torch.linalg.lstsq(products.double(), dots.double()[:, None]).solution.flatten()
    return zip(arrived, found.tolist(), strict=True)


def explains(total: Tensor, arrived: list[tuple[MatrixCall, Tensor]]) -> bool:
    """Whether the calls' factors give the whole gradient of the parameter."""
    factors = [call.factors(g[None]) for call, g in arrived]
    narrowest = min((each.varying.dtype for each in factors), key=lambda dtype: dtype.itemsize)
    found = TermBlock(tuple(total.shape), factors).precise().dense()[0]
    gap = torch.linalg.vector_norm(found - total)
    size = torch.linalg.vector_norm(total)
    return bool(gap <= _TOLERANCE.get(narrowest, _NARROW) * size)


def rule_of(calls: Sequence[MatrixCall]) -> str:
    """Linear, or Embedding + Linear, or 3 x Linear."""
    counts: dict[str, int] = {}
    for call in calls:
        kind = call.kind if abs(call.scale - 1) < 1e-6 else f"scaled {call.kind}"
        counts[kind] = counts.get(kind, 0) + 1
    return " + ".join(kind if n == 1 else f"{n} x {kind}" for kind, n in sorted(counts.items()))
