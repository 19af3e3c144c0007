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
from torchfmri._torch_private import (
    NO_BACKWARD,
    HookSet,
    current_backward,
    has_post_accumulate_hooks,
    is_subclass,
)

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


def _has_gradients_of_its_own(parameter: nn.Parameter) -> bool:
    """Whether `.grad` will not simply be what one backward pass brings."""
    return (
        parameter.grad is not None or is_subclass(parameter) or has_post_accumulate_hooks(parameter)
    )


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
        self._brought: dict[str, list[tuple[Tensor, int]]] = defaultdict(list)  # tables, places
        self.unread: dict[str, str] = {}
        self.on_backward: Callable[[], None] | None = None
        self._backward = NO_BACKWARD
        self._parameters: Mapping[str, nn.Parameter] = {}
        self._reads_at_once = self._reads_now = False
        self._received: set[str] = set()
        self._came: dict[str, Tensor | None] = {}
        self._listen: Callable[[], None] | None = None  # what is left to be done to listen
        self._counted: set[str] = set()

    # -- what autograd brings ------------------------------------------------------------------

    def attach(
        self,
        parameters: Mapping[str, nn.Parameter],
        hooks: HookSet,
        failed: Callable[..., None],
    ) -> None:
        """Begin to watch the gradients of the parameters.

        `.grad` is read when the backward pass is over, all of them in a row. Where there was none
        before, that is all; else hooks note what was there when a gradient came. Among several
        processes, where it is then averaged, each hook reads the gradient of its own process at
        once; so it does for torch.autograd.grad, which leaves no `.grad`.
        """
        self._parameters = parameters
        self._reads_at_once = (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        )

        def listen() -> None:
            self._listen = None
            for name, parameter in parameters.items():
                hooks.gradient(parameter, _Probe(self, name, failed))

        if self._reads_at_once or any(map(_has_gradients_of_its_own, parameters.values())):
            listen()
        else:
            self._listen = listen
            self._counted.clear()

    def backward_begins(self) -> None:
        """Listen to a pass whose gradients are added to others, or are not left in `.grad`."""
        if self._listen is None:
            return
        if any(each.grad is not None for each in self._parameters.values()) or runs_grad():
            listen = self._listen
            self.settle()
            listen()
        else:
            self._counted.clear()

    def settle(self) -> None:
        """Read the gradients that are there, of whatever pass, unless hooks were told of them."""
        if self._listen is None:
            return
        for name, parameter in self._parameters.items():
            if name not in self._counted and parameter.grad is not None:
                self._came[name] = None
        self._counted.update(self._came)
        self._received.update(self._came)
        self._read_all()

    def detach(self) -> None:
        """Read what is left; nothing here holds on to the block any more."""
        self.settle()
        self._listen = self.on_backward = None

    def backward_is_over(self) -> None:
        """Read the gradients that this backward pass brought."""
        if self._listen is None:
            self._read_all()
        else:
            self.settle()

    def _read_all(self) -> None:
        came, self._came = self._came, {}
        alike: dict[tuple[object, ...], dict[str, Tensor]] = defaultdict(dict)
        for name, before in came.items():
            gradient = self._parameters[name].grad
            if gradient is None:
                self.unread[name] = _NO_GRAD
                continue
            if before is not None:
                self._brought[name].append((before.neg()[None], 0))
            if gradient.is_sparse or type(gradient) is not Tensor:
                self._brought[name].append((self._read(name, gradient)[None], 0))
            else:
                info = self._infos[name]
                key = (info.shape, info.output.first, gradient.dtype, gradient.get_device())
                alike[key][name] = gradient
        for gradients in alike.values():
            found = self._read_alike(gradients)
            for number, name in enumerate(gradients):
                self._brought[name].append((found, number))

    def _read_alike(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The gradients of parameters of one shape between their vectors, in few operations."""
        name, first = next(iter(gradients.items()))
        vectors = self.vectors(name, first)
        with torch.no_grad(), without_autocast(first):
            parts = [self._part(name, each) for each in gradients.values()]
            whole = torch.stack(parts).to(vectors[0].dtype)
            if len(vectors) == 1:
                return whole @ vectors[0]
            if self._infos[name].output.first == 0:
                return (whole @ vectors[1]) @ vectors[0][block(len(vectors[0]))]
            return (whole @ vectors[1][block(len(vectors[1]))]) @ vectors[0]

    def _part(self, name: str, gradient: Tensor) -> Tensor:
        """The part of a gradient that the vectors look at, as a matrix; all of it for 1-D."""
        shape = self._infos[name].shape
        if len(shape) < 2:
            return gradient if shape else gradient.reshape(1)
        matrix = gradient if len(shape) == 2 else gradient.reshape(shape[0], -1)
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
        if not found:
            return None
        return torch.stack([table[place] for table, place in found]).double().sum()

    def arrived(self, name: str, gradient: Tensor) -> None:
        """Take note of a gradient that reaches a parameter."""
        if self._backward != current_backward():
            self._backward = current_backward()
            self._reads_now = self._reads_at_once or runs_grad()
            if self.on_backward is not None:
                self.on_backward()
        self._received.add(name)
        if type(gradient) is not Tensor and hasattr(gradient, "to_local"):
            self.unread[name] = "sharded over processes: the check needs the whole gradient"
        elif self._reads_now:
            self._brought[name].append((self._read(name, gradient)[None], 0))
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
