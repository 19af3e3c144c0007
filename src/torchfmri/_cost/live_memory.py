"""How many bytes of tensors are alive at any moment of one pass.

`counted_step` and `trial` open a `LiveMemory`. Every operation that torch dispatches is seen with
its results; a storage counts from the operation that returned it until it is freed, and once
however many tensors share it. This is exact and the same in every run. It misses what a kernel
takes and gives back inside one operation; on CUDA the allocator reports that, and is used for
nothing else, because its blocks are larger than requested. Storages are known by id and watched by
weak references: a strong one would keep alive what is being counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torchfmri._capture import FORWARD, Position
from torchfmri._cost.flops import flops_of, is_heavy, operation_name
from torchfmri._torch import DispatchMode, flatten, storage_of

Place = tuple[str, str]
"""A phase and a layer."""
_SLACK = 1 << 20
"""Bytes by which a block of the CUDA allocator may be larger than what was asked for."""


class Storages:
    """A set of distinct storages, each with a label, until they are freed.

    Args:
        existing: Tensors whose storages do not count.
        freed: Called with the label and the bytes of a storage when it is freed.
    """

    def __init__(
        self, existing: Iterable[Tensor], freed: Callable[[Any, int], None] | None = None
    ) -> None:
        storages = [storage_of(each) for each in existing]
        self._existing = {id(each): each for each in storages if each is not None}
        self._seen: dict[int, tuple[weakref.ref[Any], Any, int]] = {}
        self._freed = freed

    @property
    def existing_bytes(self) -> int:
        """The bytes of the storages that existed before."""
        return sum(each.nbytes() for each in self._existing.values())

    def add(self, tensor: Tensor, label: Any) -> int:
        """Add the storage of a tensor, and return its bytes: 0 if it is known already."""
        storage = storage_of(tensor)
        key = id(storage)
        if storage is None or key in self._existing or key in self._seen:
            return 0
        size = int(storage.nbytes())

        def forget(_: object, key: int = key) -> None:
            _, label, size = self._seen.pop(key)
            if self._freed is not None:
                self._freed(label, size)

        self._seen[key] = (weakref.ref(storage, forget), label, size)
        return size

    def sizes(self) -> list[tuple[Any, int]]:
        """Return label and bytes of every storage that is alive."""
        return [(label, size) for _, label, size in self._seen.values()]


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """The storages that autograd saves in its `with` block, each for the first who saved it.

    If a view is saved, its whole storage counts, because all of it stays alive. Storages that
    existed before (parameters, buffers, data) cost nothing to keep and do not count. Storages that
    are freed before the forward pass ends do not count either.

    Args:
        position: Says which layer is running.
        existing: Tensors that existed before.
    """

    def __init__(self, position: Position, existing: Iterable[Tensor]) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self._position = position
        self._storages = Storages(existing)

    def by_layer(self) -> Counter[str]:
        """Return the bytes now saved by each layer: ask when the forward pass is over."""
        result: Counter[str] = Counter()
        for layer, size in self._storages.sizes():
            result[layer] += size
        return result

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._position.phase == FORWARD:
            self._storages.add(tensor, self._position.layer)
        # Keeping the output itself would keep its own node alive for ever.
        return tensor.detach()


class LiveMemory(DispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts FLOPs and live bytes of what runs inside its `with` block.

    Args:
        position: Says which layer is running; None if layers do not matter.
        existing: Tensors that existed before: parameters, buffers, data.
        device: The device that does the work. On CUDA the memory that kernels take for themselves
            counts too; this resets the allocator's peak statistics.

    Attributes:
        flops: (phase, layer) -> FLOPs.
        live: Bytes alive now, beyond what existed.
        peak: The most bytes alive at once, beyond what existed.
        peak_place: Phase and layer of the peak.
        steps: Bytes alive at each step of the program, in order: after each allocation; on CUDA
            during each operation.
        uncounted: Operations that may hide FLOPs, and how often they ran.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        position: Position | None,
        existing: Iterable[Tensor],
        device: torch.device | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: dict[Place, int] = {}
        self.live = self.peak = 0
        self.peak_place: Place = ("", "")
        self.steps: list[int] = []
        self.uncounted: dict[str, int] = {}
        self._position = position
        self._storages = Storages(existing, self._on_free)
        self.existing_bytes = self._storages.existing_bytes
        self._device = device if device is not None and device.type == "cuda" else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:  # elsewhere composite operations arrive in parts
                parts = func.decompose(*args, **keywords)
            if parts is not NotImplemented:
                return parts
        workspace = _Workspace(self._device)
        output = func(*args, **keywords)
        taken = workspace.taken()
        self._count(func, args, keywords, output)
        self._notice(output, taken)
        return output

    def _count(self, func: Any, arguments: tuple[Any, ...], keywords: Any, output: Any) -> None:
        flops = flops_of(func, arguments, keywords, output)
        if flops is None:
            if is_heavy(func):
                name = operation_name(func)
                self.uncounted[name] = self.uncounted.get(name, 0) + 1
            return
        place = self._place()
        self.flops[place] = self.flops.get(place, 0) + flops

    def _place(self) -> Place:
        return (self._position.phase, self._position.layer) if self._position else ("", "")

    def _notice(self, output: Any, taken: int) -> None:
        sizes = [self._storages.add(each.tensor, None) for each in flatten(output)]
        if self._device is None:
            for size in filter(None, sizes):
                self.live += size
                self._reach(self.live)
            return
        extra = taken - sum(sizes)
        self.live += sum(sizes)
        self._reach(self.live + (extra if extra > _SLACK * (len(sizes) + 1) else 0))

    def _reach(self, height: int) -> None:
        self.steps.append(height)
        if height > self.peak:
            self.peak, self.peak_place = height, self._place()

    def _on_free(self, _: object, size: int) -> None:
        self.live -= size


class _Workspace:
    """The bytes that the CUDA allocator hands out during one operation, results included."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        if device is not None:
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def taken(self) -> int:
        """Return the most bytes taken beyond those before; 0 on other devices."""
        if self._device is None:
            return 0
        return torch.cuda.max_memory_allocated(self._device) - self._before
