"""Fixed random vectors, and gradients between them: u^T (dL/dW) v, one number per parameter.

On the side of the output units they look at a block of neighbours: enough to tell tokens apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from torchfmri._kernels import Form
from torchfmri._tokens.algebra.parameter import ParameterInfo

OUTPUT, INPUT = 0, 1


_BLOCK = 64


def block(length: int) -> slice:
    """The output units that are looked at: some neighbours, enough to tell tokens apart."""
    if length <= _BLOCK:
        return slice(None)
    start = length * 7919 % (length - _BLOCK + 1)
    return slice(start, start + _BLOCK)


@lru_cache(maxsize=64)
def _one(device: torch.device) -> Tensor:
    """The vector before a matrix with a single row."""
    return torch.ones(1, device=device)


@lru_cache(maxsize=512)
def _fixed(length: int, side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Fixed random numbers, 1 to 2 with random signs, which a dtype of 16 bits holds exactly.

    Signs alone would be blind: the gradients of a softmax add up to zero. On the output side all
    but a block of them are zero.
    """
    generator = torch.Generator().manual_seed(2 * length + side)
    sizes = torch.randint(128, (length,), generator=generator, device="cpu").div(128).add(1)
    signs = torch.randint(2, (length,), generator=generator, device="cpu").mul(2).sub(1)
    found = sizes * signs
    if side == OUTPUT:
        kept = torch.zeros_like(found)
        kept[block(length)] = found[block(length)]
        found = kept
    return found.to(device, dtype)


class RandomVectors:
    """The vectors of some parameters."""

    def __init__(self, infos: Mapping[str, ParameterInfo]) -> None:
        self._infos = infos
        self._pairs: dict[tuple[object, ...], tuple[Tensor, ...]] = {}

    def vectors(self, name: str, like: Tensor) -> tuple[Tensor, ...]:
        """The vectors for a parameter read as (shape[0], everything else); one for 1-D."""
        found = self._pairs.get((name, like.device, like.dtype))
        if found is not None:
            return found
        info = self._infos[name]
        shape = info.shape
        if len(shape) < 2:
            found = (self.vector(shape[0] if shape else 1, OUTPUT, like),)
        else:
            sides = (OUTPUT, INPUT) if info.output.first == 0 else (INPUT, OUTPUT)
            lengths = (shape[0], math.prod(shape[1:]))
            found = tuple(self.vector(*each, like) for each in zip(lengths, sides, strict=True))
        self._pairs[name, like.device, like.dtype] = found
        return found

    def info(self, name: str) -> ParameterInfo:
        """What is known of a parameter."""
        return self._infos[name]

    def vector(self, length: int, side: int, like: Tensor) -> Tensor:
        """A fixed random vector of this length, one per side of a matrix."""
        dtype = like.dtype if like.dtype == torch.float64 else torch.float32
        return _fixed(length, side, like.device, dtype)

    def narrow_vector(self, length: int, side: int, like: Tensor) -> Tensor:
        """The same in the dtype of `like`, which holds its numbers exactly."""
        return _fixed(length, side, like.device, like.dtype)

    def block_vector(self, length: int, side: int, like: Tensor) -> tuple[int, Tensor]:
        """Of such a vector the part that is not zero: where it begins, and it."""
        whole = self.narrow_vector(length, side, like)
        part = block(length) if side == OUTPUT else slice(None)
        return part.start or 0, whole[part].contiguous()

    def between(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient of a parameter between its two vectors."""
        vectors = self.vectors(name, gradient)
        dtype = vectors[0].dtype
        if gradient.is_sparse:
            rows = gradient.coalesce()  # of an embedding: some rows of it
            product = rows.values().to(dtype).flatten(1) @ vectors[1]
            return torch.dot(product, vectors[0][rows.indices()[0]])
        part = self.part(name, gradient).to(dtype)
        if len(vectors) == 1:
            return torch.dot(part, vectors[0])
        if self._infos[name].output.first == 0:
            return torch.dot(part @ vectors[1], vectors[0][block(len(vectors[0]))])
        return torch.dot(part @ vectors[1][block(len(vectors[1]))], vectors[0])

    def part(self, name: str, gradient: Tensor) -> Tensor:
        """The part of a gradient that the vectors look at, as a matrix; all of it for 1-D."""
        shape = self._infos[name].shape
        if len(shape) < 2:
            return gradient if shape else gradient.reshape(1)
        matrix = gradient if len(shape) == 2 else gradient.reshape(shape[0], -1)
        if self._infos[name].output.first == 0:
            return matrix[block(shape[0])]
        return matrix[:, block(matrix.shape[1])]

    def form(self, name: str, gradient: Tensor) -> Form:
        """What compiled code is told of a contiguous gradient; its address is where that begins."""
        info, vectors = self._infos[name], self.vectors(name, gradient)
        item = gradient.itemsize
        if len(vectors) == 1:
            length = gradient.numel()
            start, end = _ends(length)
            right = vectors[0].data_ptr() + 4 * start
            return Form(
                matrix=item * start,
                rows=1,
                width=end - start,
                stride=length,
                left=_one(gradient.device).data_ptr(),
                right=right,
            )
        left, right = (each.data_ptr() for each in vectors)
        rows = info.shape[0]
        width = gradient.numel() // rows
        if info.output.first == 0:
            start, end = _ends(rows)
            return Form(
                matrix=item * start * width,
                rows=end - start,
                width=width,
                stride=width,
                left=left + 4 * start,
                right=right,
            )
        start, end = _ends(width)
        return Form(
            matrix=item * start,
            rows=rows,
            width=end - start,
            stride=width,
            left=left,
            right=right + 4 * start,
        )


def _ends(length: int) -> tuple[int, int]:
    """Where the block begins and ends."""
    seen = block(length)
    return seen.start or 0, seen.stop or length
