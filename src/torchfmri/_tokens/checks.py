"""Proof beside the numbers: does what the tokens add up to equal the gradient that autograd found?

While the backward pass runs, every gradient that reaches a watched parameter is read once, between
two fixed random vectors, u^T (dL/dW) v; the tokens' sum must give the same number. Two tokens mixed
up, a call missed or a factor of the wrong call all move it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._backwards import runs_grad
from torchfmri._hooks import Hook
from torchfmri._tokens.parameter import ParameterInfo
from torchfmri._torch_private import NO_BACKWARD, current_backward

OUTPUT, INPUT = 0, 1


_BLOCK = 64
_NO_GRAD = "it left no .grad to compare with (autograd.grad on a GPU, or it was taken away)"


def block(length: int) -> slice:
    """The output units that are looked at: some neighbours, enough to tell tokens apart."""
    if length <= _BLOCK:
        return slice(None)
    start = length * 7919 % (length - _BLOCK + 1)
    return slice(start, start + _BLOCK)


@lru_cache(maxsize=512)
def _fixed(length: int, side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Fixed random numbers, 1 to 2 with random signs, which a dtype of 16 bits holds exactly.

    Signs alone would be blind: the gradients of a softmax add up to zero. On the output side all
    but a block of them are zero.
    """
    generator = torch.Generator().manual_seed(2 * length + side)
    sizes = torch.randint(128, (length,), generator=generator).div(128).add(1)
    signs = torch.randint(2, (length,), generator=generator).mul(2).sub(1)
    found = sizes * signs
    if side == OUTPUT:
        kept = torch.zeros_like(found)
        kept[block(length)] = found[block(length)]
        found = kept
    return found.to(device, dtype)


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """No autocast for what is computed in a hook, which may run inside the user's."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


class Checks:
    """The random vectors, and what autograd's gradients are between them.

    Attributes:
        unread: Parameters whose gradient could not be read, with the reason.
        on_backward: Called when the first gradient of a backward pass reaches a parameter.
    """

    def __init__(self, infos: Mapping[str, ParameterInfo]) -> None:
        self._infos = infos
        self._pairs: dict[tuple[object, ...], tuple[Tensor, ...]] = {}
        self._brought: dict[str, list[Tensor]] = defaultdict(list)
        self.unread: dict[str, str] = {}
        self.on_backward: Callable[[], None] = lambda: None
        self._backward = NO_BACKWARD
        self._parameters: Mapping[str, nn.Parameter] = {}
        self._reads_at_once = self._reads_now = False
        self._received: set[str] = set()
        self._came: dict[str, Tensor | None] = {}

    def attach(
        self, parameters: Mapping[str, nn.Parameter], failed: Callable[..., None]
    ) -> list[Any]:
        """Listen for the gradients of the parameters; returns the handles of the hooks.

        Hooks only note that a gradient came. `.grad` is read when the backward pass is over, all
        of them in a row; among several processes, where it is then averaged, each hook reads the
        gradient of its own process at once.
        """
        self._parameters = parameters
        self._reads_at_once = (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        )
        return [
            parameter.register_hook(_Probe(self, name, failed))  # type: ignore[no-untyped-call]
            for name, parameter in parameters.items()
        ]

    def backward_is_over(self) -> None:
        """Read the gradients that this backward pass brought."""
        came, self._came = self._came, {}
        alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for name in came:
            gradient = self._parameters[name].grad
            if gradient is None:
                self.unread[name] = _NO_GRAD
            elif gradient.is_sparse or type(gradient) is not Tensor:
                self._brought[name].append(self._read(name, gradient))
            else:
                side = self._infos[name].output.first
                alike[gradient.shape, gradient.dtype, gradient.device, side].append(name)
        for names in alike.values():
            for name, each in zip(names, self._read_alike(names).unbind(), strict=True):
                before = came[name]
                self._brought[name].append(each if before is None else each - before)

    def _read_alike(self, names: list[str]) -> Tensor:
        """The gradients of parameters of one shape between their vectors, in few operations."""
        first = self._parameters[names[0]].grad
        assert first is not None
        vectors = self.vectors(names[0], first)
        with without_autocast(first):
            gradients = [self._parameters[name].grad for name in names]
            parts = [self._part(names[0], each.detach()) for each in gradients if each is not None]
            whole = torch.stack(parts).to(vectors[0].dtype)
            if len(vectors) == 1:
                return whole @ vectors[0]
            if self._infos[names[0]].output.first == 0:
                return (whole @ vectors[1]) @ vectors[0][block(len(vectors[0]))]
            return (whole @ vectors[1][block(len(vectors[1]))]) @ vectors[0]

    def _part(self, name: str, gradient: Tensor) -> Tensor:
        """The part of a gradient that the vectors look at, as a matrix; all of it for 1-D."""
        shape = self._infos[name].shape
        if len(shape) < 2:
            return gradient.reshape(-1)
        matrix = gradient.reshape(shape[0], -1)
        if self._infos[name].output.first == 0:
            return matrix[block(shape[0])]
        return matrix[:, block(matrix.shape[1])]

    def _read(self, name: str, gradient: Tensor) -> Tensor:
        with without_autocast(gradient):
            return self.between(name, gradient.detach())

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

    def received(self, name: str) -> bool:
        """Whether any gradient reached the parameter."""
        return name in self._received

    def brought(self, name: str) -> Tensor | None:
        """What autograd's gradient is between the vectors; None if it was not read."""
        found = self._brought.get(name)
        return None if not found else torch.stack(found).double().sum()

    def arrived(self, name: str, gradient: Tensor) -> None:
        """Take note of a gradient that reaches a parameter."""
        if self._backward != current_backward():
            self._backward = current_backward()
            self._reads_now = self._reads_at_once or runs_grad()
            self.on_backward()
        self._received.add(name)
        if type(gradient) is not Tensor and hasattr(gradient, "to_local"):
            self.unread[name] = "sharded over processes: the check needs the whole gradient"
        elif self._reads_now:
            self._brought[name].append(self._read(name, gradient))
        elif name not in self._came:
            earlier = self._parameters[name].grad  # of passes before: this one is added to it
            self._came[name] = None if earlier is None else self._read(name, earlier)

    def between(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient of a parameter between its two vectors."""
        vectors = self.vectors(name, gradient)
        dtype = vectors[0].dtype
        if gradient.is_sparse:
            rows = gradient.coalesce()  # of an embedding: some rows of it
            product = rows.values().to(dtype).flatten(1) @ vectors[1]
            return torch.dot(product, vectors[0][rows.indices()[0]])
        part = self._part(name, gradient).to(dtype)
        if len(vectors) == 1:
            return torch.dot(part, vectors[0])
        if self._infos[name].output.first == 0:
            return torch.dot(part @ vectors[1], vectors[0][block(len(vectors[0]))])
        return torch.dot(part @ vectors[1][block(len(vectors[1]))], vectors[0])


class _Probe:
    """The hook on one parameter."""

    __slots__ = ("_checks", "_failed", "_name")
    __torch_unserializable__ = True

    def __init__(self, checks: Checks, name: str, failed: Callable[..., None]) -> None:
        self._checks, self._name, self._failed = checks, name, failed

    def __call__(self, gradient: Tensor) -> None:
        try:
            self._checks.arrived(self._name, gradient)
        except Exception as error:
            self._failed(self._name, error, backward=True)

    def __deepcopy__(self, memo: object) -> Hook:
        return Hook(None)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return (Hook, (None,))
