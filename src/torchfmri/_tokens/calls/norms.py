"""A call of a layer straight to numbers per token, without forming its terms.

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

from torchfmri._kernels import Asked, Lane, Numbers, RowLanes
from torchfmri._tokens.algebra import factors
from torchfmri._tokens.algebra.factors import Term
from torchfmri._tokens.algebra.random_vectors import INPUT, OUTPUT
from torchfmri._tokens.algebra.reduced import (
    OUTER,
    OUTER_BY_VOXEL,
    SQUARES,
    WEIGHTED_PROBE,
    Reduced,
)
from torchfmri._tokens.algebra.voxels import grouped_squares, voxel_squares
from torchfmri._tokens.calls.checks import Checks
from torchfmri._tokens.rules import layer_rules as rules
from torchfmri._tokens.rules.layer_rules import Rule
from torchfmri._tokens.rules.record import TokenRecord

Found: TypeAlias = dict[str, Reduced]


class Reducer:
    """Turns records into numbers per token, as norms or as norms by voxel.

    Args:
        checks: The random vectors, and what is known of the parameters.
        by_voxel: Whether to keep the squares of each voxel.
    """

    def __init__(self, checks: Checks, by_voxel: bool) -> None:
        self._checks, self.by_voxel = checks, by_voxel
        self._rows = RowLanes()
        self._lanes: dict[object, Lane | None] = {}
        self._pairs: dict[object, tuple[Lane | None, Lane | None]] = {}
        self._last: tuple[Tensor, Numbers] | None = None

    def __call__(self, record: TokenRecord, g: Tensor) -> Found:
        """Return the numbers of a call's parameters, by their names in the module."""
        reduce = _REDUCERS.get(record.watched.rule)  # type: ignore[arg-type]
        found = None if reduce is None or record.rows else reduce(self, record, g)
        if found is None:
            names = record.watched.parameters
            found = {key: self.terms([term], names[key]) for key, term in record.terms().items()}
        return found

    def terms(self, several: Sequence[Term], name: str) -> Reduced:
        """The numbers of a parameter from its terms, with all cross terms."""
        info = self._checks.info(name)
        squares = voxel_squares(several, info) if self.by_voxel else factors.squares(several)
        probes = factors.probe(several, info.shape, self._checks.vectors(name, squares))
        return Reduced.of(squares, probes)

    def finish(self) -> None:
        """Have everything computed that waits; let go of the input that was read last."""
        self._last = None
        self._rows.flush()

    # -- rows --------------------------------------------------------------------------------

    def outer_numbers(self, record: TokenRecord, g: Tensor) -> tuple[Numbers, Numbers]:
        """Of the gradient and of the input of a Linear; most of the calls of a model come here.

        q, k and v, whose gradients come in a row, share those of their input.
        """
        x, last = record.x, self._last
        size = self._voxel(record) if self.by_voxel else 0
        key = (g.shape, x.shape, g.dtype, x.dtype, g.get_device(), size)
        try:
            of_g, of_x = self._pairs[key]
        except KeyError:
            rules.check_tokens(x, g)
            of_g, of_x = self._lane(g, OUTPUT, size), self._lane(x, INPUT, 0)
            self._pairs[key] = of_g, of_x
        if last is None or last[0] is not x:
            last = self._last = (x, self._numbers(x, of_x, INPUT, 0))
        if of_g is not None and g.is_contiguous():
            return of_g.read(g), last[1]
        return self._numbers(g, None, OUTPUT, size), last[1]

    def output_numbers(self, values: Tensor, record: TokenRecord) -> Numbers:
        """Of gradients with one vector per token, (..., o): squares, maybe by voxel, and probe."""
        return self._read(values, OUTPUT, self._voxel(record) if self.by_voxel else 0)

    def product_numbers(self, record: TokenRecord, g: Tensor, small: float) -> Numbers | None:
        """The same of g * x / rms(x), added up over the heads; None where torch has to do it."""
        x: Tensor = record.x
        size = self._voxel(record) if self.by_voxel else 0
        like = (g.shape, g.stride(), g.dtype, x.shape, x.stride(), x.dtype)
        key = (like, g.get_device(), record.model, small, size)
        try:
            lane = self._lanes[key]
        except KeyError:
            product = rules.product_of(record.x, g, record.grid(), small)
            asked = self._asked(g, OUTPUT, size)
            lane = None if product is None else self._rows.product_lane(g, product, asked)
            self._lanes[key] = lane
        return None if lane is None else lane.read(g, x)

    def _read(self, values: Tensor, side: int, size: int) -> Numbers:
        """Of each row of output or input units."""
        return self._numbers(values, self._lane(values, side, size), side, size)

    def _lane(self, values: Tensor, side: int, size: int) -> Lane | None:
        key = (values.shape, values.dtype, values.get_device(), side, size)
        try:
            return self._lanes[key]
        except KeyError:
            lane = self._lanes[key] = self._rows.lane(values, self._asked(values, side, size))
            return lane

    def _numbers(self, values: Tensor, lane: Lane | None, side: int, size: int) -> Numbers:
        if lane is not None and values.is_contiguous():
            return lane.read(values)
        _, start, vector, _, length = self._asked(values, side, size)
        rows = _matrix(values.detach())
        some = rows if length == rows.shape[1] else rows.narrow(1, start, length)
        squares = grouped_squares(rows, size) if size else norms_of(rows).square_()
        return Numbers.of(squares, torch.mv(some, vector))

    def _asked(self, values: Tensor, side: int, size: int) -> Asked:
        start, vector = self._checks.block_vector(values.shape[-1], side, values)
        return Asked(size, start, vector, vector.data_ptr(), len(vector))

    def _voxel(self, record: TokenRecord) -> int:
        """How many units are one voxel."""
        return self._checks.info(next(iter(record.watched.parameters.values()))).voxel

    def rows_of_embedding(self, count: int, like: Tensor) -> Tensor:
        """The check's vector over the rows of an embedding."""
        return self._checks.narrow_vector(count, INPUT, like)


# -- rules; None where the terms have to be formed -------------------------------------------------


def _outer(reducer: Reducer, record: TokenRecord, g: Tensor) -> Found | None:
    """A Linear: the norm of an outer product is the product of the norms."""
    if g.ndim > 3:
        grid = record.grid()
        one = grid.leading <= 2 or grid.b * grid.s * g.shape[-1] == g.numel()
        if not one or grid.order != tuple(range(grid.leading)):
            return None
    numbers = reducer.outer_numbers(record, g)
    found = {"weight": Reduced(OUTER_BY_VOXEL if reducer.by_voxel else OUTER, numbers)}
    if "bias" in record.watched.parameters:
        found["bias"] = Reduced(SQUARES, numbers[:1])
    return found


def _embedding(reducer: Reducer, record: TokenRecord, g: Tensor) -> Found | None:
    """The row of the token's id is g."""
    module: Any = record.watched.module
    grid = record.grid()
    plain = module.padding_idx is None and not module.scale_grad_by_freq
    if not plain or record.x.numel() != grid.b * grid.s:
        return None
    numbers = reducer.output_numbers(g, record)
    weights = reducer.rows_of_embedding(module.num_embeddings, g)[record.x].view(-1)
    return {"weight": Reduced(WEIGHTED_PROBE, (numbers, Numbers.of(weights, weights)))}


def _rms_norm(reducer: Reducer, record: TokenRecord, g: Tensor) -> Found | None:
    """The product g * x / rms(x), summed over the heads where it is per head."""
    module, x = record.watched.module, record.x
    weight: Any = module._parameters["weight"]
    if weight.ndim != 1 or x.dtype == torch.float64:  # there every digit counts
        return None
    small = rules.epsilon(module, x.dtype)
    numbers = reducer.product_numbers(record, g, small)
    if numbers is None:
        scale = norms_of(x).square_().div_(x.shape[-1]).add_(small).rsqrt_()
        product = (g * x).mul_(scale[..., None])
        if g.ndim > 3:
            product = record.grid().rows_of(product).sum(1)
        numbers = reducer.output_numbers(product, record)
    return {"weight": Reduced(SQUARES, (numbers,))}


def _layer_norm(reducer: Reducer, record: TokenRecord, g: Tensor) -> Found | None:
    """weight: g * xhat, bias: g."""
    module: Any = record.watched.module
    if len(module.normalized_shape) != 1 or record.grid().leading > 2 or g.dtype != record.x.dtype:
        return None
    product = F.layer_norm(record.x, module.normalized_shape, eps=module.eps) * g
    found = {}
    for key, each in (("weight", product), ("bias", g)):
        found[key] = Reduced(SQUARES, (reducer.output_numbers(each, record),))
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


_REDUCERS: dict[Rule, Callable[[Reducer, TokenRecord, Tensor], Found | None]] = {
    rules.linear: _outer,
    rules.conv1d_of_transformers: _outer,
    rules.embedding: _embedding,
    rules.rms_norm: _rms_norm,
    rules.own_rms_norm: _rms_norm,
    rules.layer_norm: _layer_norm,
}
