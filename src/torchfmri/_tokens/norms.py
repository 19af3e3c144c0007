"""REDUCE: a call of a layer straight to numbers per token, without forming its terms.

For the layers that models are made of. Every function returns what is left to be done when the
numbers are read, so that the backward pass waits for as little as possible; each number comes with
the probe of the same gradient between the check's random vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from torchfmri._tokens import factors, rules
from torchfmri._tokens.checks import INPUT, OUTPUT, Checks, block
from torchfmri._tokens.factors import Term
from torchfmri._tokens.record import Numbers, Record
from torchfmri._tokens.rules import Rule

Found: TypeAlias = dict[str, tuple[Tensor, Callable[[], Tensor]]]


class XNumbers:
    """Norm and probe of an input; q, k and v, whose gradients come in a row, share them."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm and the probe over the last axis."""
        if self._last is None or self._last[0] is not x:
            vector = self._checks.narrow_vector(x.shape[-1], INPUT, x)
            self._last = (x, norms_of(x), along(x, vector))
        return self._last[1:]

    def forget(self) -> None:
        """Let go of the input."""
        self._last = None


def outer(record: Record, g: Tensor, checks: Checks, x_numbers: XNumbers) -> Numbers:
    """A Linear: the norm of an outer product is the product of the norms."""
    if g.ndim > 3:
        grid = record.grid()
        if grid.leading > 2 and grid.b * grid.s * g.shape[-1] != g.numel():
            return terms(record, g, checks, x_numbers)
        if grid.order != tuple(range(grid.leading)):
            return terms(record, g, checks, x_numbers)
    norm, probe = norms_of(g), output_probe(g, checks)
    x_norm, x_probe = x_numbers.of(record.x)

    def read() -> Found:
        found: Found = {
            "weight": (
                (norm * x_norm).square_().view(-1),
                lambda: (probe * x_probe).reshape(-1),
            )
        }
        if "bias" in record.watched.parameters:
            found["bias"] = (norm.square().view(-1), lambda: probe.reshape(-1))
        return found

    return read


def embedding(record: Record, g: Tensor, checks: Checks, x_numbers: XNumbers) -> Numbers:
    """The row of the token's id is g."""
    module: Any = record.watched.module
    x = record.x
    grid = record.grid()
    plain = module.padding_idx is None and not module.scale_grad_by_freq
    if not plain or x.numel() != grid.b * grid.s:
        return terms(record, g, checks, x_numbers)
    norm, probe = norms_of(g), output_probe(g, checks)
    rows = checks.narrow_vector(module.num_embeddings, INPUT, g)

    return lambda: {"weight": (norm.square().reshape(-1), lambda: (probe * rows[x]).reshape(-1))}


def rms_norm(record: Record, g: Tensor, checks: Checks, x_numbers: XNumbers) -> Numbers:
    """The product g * x / rms(x), summed over the heads where it is per head."""
    module: Any = record.watched.module
    x = record.x
    if module.weight.ndim != 1 or x.dtype == torch.float64:  # there every digit counts
        return terms(record, g, checks, x_numbers)
    width, small = x.shape[-1], rules.epsilon(module, x.dtype)
    size = norms_of(x)
    product = g * x
    if g.ndim > 3:  # per head: summed over the heads
        scale = torch.rsqrt(size.square_().div_(width).add_(small))
        rows = record.grid().rows_of(product.mul_(scale[..., None])).sum(1)
        norm, probe = norms_of(rows), output_probe(rows, checks)
        return lambda: {"weight": (norm.square(), lambda: probe)}
    norm, probe = norms_of(product), output_probe(product, checks)

    def read() -> Found:
        power = size.square().div_(width).add_(small).view(-1)
        return {"weight": (norm.square().view(-1) / power, lambda: probe.view(-1) * power.rsqrt())}

    return read


def layer_norm(record: Record, g: Tensor, checks: Checks, x_numbers: XNumbers) -> Numbers:
    """weight: g * xhat, bias: g."""
    module: Any = record.watched.module
    if len(module.normalized_shape) != 1 or record.grid().leading > 2 or g.dtype != record.x.dtype:
        return terms(record, g, checks, x_numbers)
    product = F.layer_norm(record.x, module.normalized_shape, eps=module.eps) * g
    weight, bias = ((norms_of(each), output_probe(each, checks)) for each in (product, g))

    return lambda: {
        name: (norm.square().reshape(-1), partial(probe.reshape, -1))
        for name, (norm, probe) in (("weight", weight), ("bias", bias))
    }


def terms(record: Record, g: Tensor, checks: Checks, x_numbers: XNumbers) -> Numbers:
    """Any other layer: by its terms, which are let go at once."""
    names = record.watched.parameters
    found = {
        key: reduced_terms(part.terms or [], names[key], checks)
        for key, part in record.parts().items()
    }
    return lambda: found


def reduced_terms(
    several: Sequence[Term], name: str, checks: Checks
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Squared norms and probes of terms, with all cross terms."""
    squares = factors.squares(several)
    probes = factors.probe(several, checks.shape(name), checks.vectors(name, squares))
    return squares, lambda: probes


def norms_of(tensor: Tensor) -> Tensor:
    """The norm over the last axis, in float32 at least."""
    wide = tensor.dtype in (torch.float32, torch.float64)
    found: Tensor = torch.linalg.vector_norm(tensor, 2, -1, dtype=None if wide else torch.float32)
    return found


def output_probe(tensor: Tensor, checks: Checks) -> Tensor:
    """The inner product of the last axis, of output units, with the check's vector."""
    part = block(tensor.shape[-1])
    return along(tensor[..., part], checks.narrow_vector(tensor.shape[-1], OUTPUT, tensor)[part])


def along(tensor: Tensor, vector: Tensor) -> Tensor:
    """The inner product of the last axis with a vector."""
    return tensor @ vector


REDUCERS: dict[Rule, Callable[[Record, Tensor, Checks, XNumbers], Numbers]] = {
    rules.linear: outer,
    rules.conv1d_of_transformers: outer,
    rules.embedding: embedding,
    rules.rms_norm: rms_norm,
    rules.own_rms_norm: rms_norm,
    rules.layer_norm: layer_norm,
}
