"""REDUCE: a call of a layer straight to numbers per token, without forming its terms.

For the layers that models are made of; all others are reduced by their terms. What is left to be
done with the numbers waits until they are read, so that the backward pass waits for as little as
possible. Every norm comes with the probe of the same gradient between the check's random vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from torchfmri._kernels.rows import SMALLEST, Asked, Product, Rows
from torchfmri._tokens import factors, rules
from torchfmri._tokens.checks import Checks
from torchfmri._tokens.factors import Term
from torchfmri._tokens.random_vectors import INPUT, OUTPUT
from torchfmri._tokens.record import Record
from torchfmri._tokens.reduced import OUTER, OUTER_BY_VOXEL, SQUARES, Reduced
from torchfmri._tokens.rules import Rule
from torchfmri._tokens.voxels import grouped_squares, voxel_squares

Found: TypeAlias = dict[str, Reduced]


class Reducer:
    """Turns records into numbers per token, as norms or as norms by voxel.

    Args:
        checks: The random vectors, and what is known of the parameters.
        by_voxel: Whether to keep the squares of each voxel.
    """

    def __init__(self, checks: Checks, by_voxel: bool) -> None:
        self._checks, self.by_voxel = checks, by_voxel
        self._rows = Rows()
        self._known: dict[object, Asked] = {}
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, record: Record, g: Tensor) -> Found:
        """The numbers of a call's parameters, by their names in the module."""
        rule = record.watched.rule
        assert rule is not None
        reduce = _REDUCERS.get(rule)
        found = None if reduce is None else reduce(self, record, g)
        if found is None:
            names = record.watched.parameters
            found = {key: self.terms([term], names[key]) for key, term in record.terms().items()}
        return found

    def at_once(self, record: Record, g: Tensor) -> Found | None:
        """The same if that is a pass or two of compiled code over memory; else None."""
        rule = record.watched.rule
        if g.dtype is not torch.float32 or not g.is_cpu or g.numel() < SMALLEST:
            return None
        if rule is rules.linear:
            if g.ndim > 3 or not g.is_contiguous():
                return None
            return _outer(self, record, g)
        if rule is rules.own_rms_norm or rule is rules.rms_norm:
            return _rms_norm(self, record, g)
        return None

    def terms(self, several: Sequence[Term], name: str) -> Reduced:
        """The numbers of a parameter from its terms, with all cross terms."""
        info = self._checks.info(name)
        squares = voxel_squares(several, info) if self.by_voxel else factors.squares(several)
        probes = factors.probe(several, info.shape, self._checks.vectors(name, squares))
        return Reduced(SQUARES, (squares, probes))

    def finish(self) -> None:
        """Have everything computed that waits; let go of the input that was read last."""
        self._last = None
        self._rows.flush()

    # -- rows --------------------------------------------------------------------------------

    def input_numbers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Squares and probe of an input; q, k and v, whose gradients come in a row, share them."""
        last = self._last
        if last is None or last[0] is not x:
            numbers = self._reduced(x, self._asked(x, INPUT))
            last = self._last = (x, *numbers)
        return last[1:]

    def output_numbers(self, values: Tensor, record: Record) -> tuple[Tensor, Tensor]:
        """Of gradients with one vector per token, (..., o): squares, maybe by voxel, and probe."""
        return self._by_voxel(self._reduced(values, self._asked(values, OUTPUT, record)))

    def product_numbers(
        self, record: Record, g: Tensor, small: float
    ) -> tuple[Tensor, Tensor] | None:
        """The same of g * x / rms(x), added up over the heads; None where torch has to do it."""
        product = _product(record, g, small)
        if product is None:
            return None
        found = self._rows.reduce_product(product, self._asked(g, OUTPUT, record))
        return None if found is None else self._by_voxel(found)

    def _asked(self, values: Tensor, side: int, record: Record | None = None) -> Asked:
        """What is wanted of rows of output or input units."""
        width = values.shape[-1]
        size = width
        if self.by_voxel and record is not None:
            size = self._checks.info(next(iter(record.watched.parameters.values()))).voxel
        key = (width, side, size, values.dtype, values.get_device())
        asked = self._known.get(key)
        if asked is None:
            start, vector = self._checks.block_vector(width, side, values)
            asked = Asked(size, start, vector, vector.data_ptr(), len(vector))
            self._known[key] = asked
        return asked

    def _by_voxel(self, numbers: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The same with an axis of voxels, where there is only one of them."""
        squares, probe = numbers
        return (squares[:, None], probe) if self.by_voxel and squares.ndim == 1 else numbers

    def _reduced(self, values: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
        found = self._rows.reduce(values, asked)
        if found is not None:
            return found
        size, start, vector, _, length = asked
        rows = _matrix(values)
        some = rows if length == rows.shape[1] else rows.narrow(1, start, length)
        if size < rows.shape[1]:
            return grouped_squares(rows, size), torch.mv(some, vector)
        return norms_of(rows).square_(), torch.mv(some, vector)

    def rows_of_embedding(self, count: int, like: Tensor) -> Tensor:
        """The check's vector over the rows of an embedding."""
        return self._checks.narrow_vector(count, INPUT, like)


# -- rules; None where the terms have to be formed -------------------------------------------------


def _outer(reducer: Reducer, record: Record, g: Tensor) -> Found | None:
    """A Linear: the norm of an outer product is the product of the norms."""
    if g.ndim > 3:
        grid = record.grid()
        one = grid.leading <= 2 or grid.b * grid.s * g.shape[-1] == g.numel()
        if not one or grid.order != tuple(range(grid.leading)):
            return None
    numbers = reducer.output_numbers(g, record)
    outer = OUTER if numbers[0].ndim == 1 else OUTER_BY_VOXEL
    found = {"weight": Reduced(outer, (*numbers, *reducer.input_numbers(record.x)))}
    if "bias" in record.watched.parameters:
        found["bias"] = Reduced(SQUARES, numbers)
    return found


def _embedding(reducer: Reducer, record: Record, g: Tensor) -> Found | None:
    """The row of the token's id is g."""
    module: Any = record.watched.module
    grid = record.grid()
    plain = module.padding_idx is None and not module.scale_grad_by_freq
    if not plain or record.x.numel() != grid.b * grid.s:
        return None
    squares, probe = reducer.output_numbers(g, record)
    weights = reducer.rows_of_embedding(module.num_embeddings, g)
    return {"weight": Reduced(SQUARES, (squares, probe * weights[record.x].view(-1)))}


def _rms_norm(reducer: Reducer, record: Record, g: Tensor) -> Found | None:
    """The product g * x / rms(x), summed over the heads where it is per head."""
    module: Any = record.watched.module
    x = record.x
    if module.weight.ndim != 1 or x.dtype == torch.float64:  # there every digit counts
        return None
    small = rules.epsilon(module, x.dtype)
    numbers = reducer.product_numbers(record, g, small)
    if numbers is None:
        scale = norms_of(x).square_().div_(x.shape[-1]).add_(small).rsqrt_()
        product = (g * x).mul_(scale[..., None])
        if g.ndim > 3:
            product = record.grid().rows_of(product).sum(1)
        numbers = reducer.output_numbers(product, record)
    return {"weight": Reduced(SQUARES, numbers)}


def _product(record: Record, g: Tensor, small: float) -> Product | None:
    """What a compiled pass is told of g * x / rms(x)."""
    x, width = record.x, g.shape[-1]
    if g.shape != x.shape:
        return None
    if g.is_contiguous() and x.is_contiguous() and g.ndim <= 3:
        strides = (0, width, 0)
        return Product(g, x, (1, g.numel() // max(1, width), 1, width), strides, strides, small)
    order = record.grid().order
    if g.ndim != 4 or len(order) != 3 or g.stride(3) != 1 or x.stride(3) != 1:
        return None
    shape, g_strides, x_strides = (
        tuple(of[axis] for axis in order) for of in (g.shape, g.stride(), x.stride())
    )
    return Product(g, x, (*shape, width), g_strides, x_strides, small)  # type: ignore[arg-type]


def _layer_norm(reducer: Reducer, record: Record, g: Tensor) -> Found | None:
    """weight: g * xhat, bias: g."""
    module: Any = record.watched.module
    if len(module.normalized_shape) != 1 or record.grid().leading > 2 or g.dtype != record.x.dtype:
        return None
    product = F.layer_norm(record.x, module.normalized_shape, eps=module.eps) * g
    found = {}
    for key, each in (("weight", product), ("bias", g)):
        found[key] = Reduced(SQUARES, reducer.output_numbers(each, record))
    return found


def _matrix(tensor: Tensor) -> Tensor:
    """A tensor with its features last as (t, n)."""
    if tensor.ndim == 2:
        return tensor
    return tensor.flatten(0, -2) if tensor.ndim > 2 else tensor[None]


def norms_of(tensor: Tensor) -> Tensor:
    """The norm over the last axis, in float32 at least."""
    wide = tensor.dtype in (torch.float32, torch.float64)
    found: Tensor = torch.linalg.vector_norm(tensor, 2, -1, dtype=None if wide else torch.float32)
    return found


_REDUCERS: dict[Rule, Callable[[Reducer, Record, Tensor], Found | None]] = {
    rules.linear: _outer,
    rules.conv1d_of_transformers: _outer,
    rules.embedding: _embedding,
    rules.rms_norm: _rms_norm,
    rules.own_rms_norm: _rms_norm,
    rules.layer_norm: _layer_norm,
}
