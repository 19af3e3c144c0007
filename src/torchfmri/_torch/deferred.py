"""Numbers that are still being computed on an accelerator, fetched without waiting for it.

The Monitor, token gradients and the guard that only reports read through it. The values are copied
on the device before the constructor returns, because the next step writes into the same tensors
again. `ready` asks and never waits; `read` waits. The memory on the host is pinned: without it, a
copy from CUDA waits for the device. How values are packed for the copy may change freely.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _Copy(NamedTuple):
    places: list[int]
    host: Tensor
    event: torch.cuda.Event | None


class Deferred:
    """The values of some tensors on their way to the host; nothing waits until they are read.

    They are copied as they are now: what is written into the tensors later is not seen.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in tensors]
        places: dict[torch.device, list[int]] = defaultdict(list)
        for place, tensor in enumerate(tensors):
            places[tensor.device].append(place)
        self._copies = [
            _start_copy([tensors[place] for place in some], some) for some in places.values()
        ]

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return all(copy.event is None or bool(copy.event.query()) for copy in self._copies)  # type: ignore[no-untyped-call]

    def read(self) -> list[list[float]]:
        """Return the values of each tensor, in the order given; waits for those not there yet."""
        found: list[list[float]] = [[] for _ in self._sizes]
        for places, host, event in self._copies:
            if event is not None:
                event.synchronize()
            parts = torch.split(host, [self._sizes[place] for place in places])
            for place, part in zip(places, parts, strict=True):
                found[place] = part.tolist()
        return found


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64 where a device has it; float32 on other accelerators, such as Apple's."""
    return torch.float64 if device.type in ("cpu", "cuda", "meta") else torch.float32


def _start_copy(tensors: list[Tensor], places: list[int]) -> _Copy:
    """Begin to copy the values of tensors of one device to the host, all in one piece."""
    device = tensors[0].device
    wide = widest_dtype(device)
    with torch.no_grad():
        flat = torch.cat([tensor.detach().reshape(-1).to(wide) for tensor in tensors])
        if device.type != "cuda":
            return _Copy(places, flat.cpu(), None)
        host = torch.empty(flat.shape, dtype=wide, pin_memory=True, device="cpu")
        with torch.cuda.device(device):
            host.copy_(flat, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
    return _Copy(places, host, event)
