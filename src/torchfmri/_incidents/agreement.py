"""What all processes of a training run decide together.

`hold` and `aftermath` ask it. Each function is collective: if one process calls it and another does
not, training hangs. So no caller may return or raise before it in some processes only. Objects are
exchanged by torch, which pickles them: they come from our own processes, never from a file. What is
exchanged may grow; every process must take part in every exchange.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def processes() -> tuple[int, int]:
    """Return the rank of this process, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def any_is_true(here: bool) -> bool:
    """Whether `here` is true in any process; all of them must ask."""
    return here if processes()[1] == 1 else _largest(torch.tensor(float(here), device="cpu")) > 0


def exchange(value: Any) -> list[Any]:
    """Return the `value` of each process, by rank; all processes must take part."""
    count = processes()[1]
    if count == 1:
        return [value]
    found: list[Any] = [None] * count
    dist.all_gather_object(found, value)
    return found


def _largest(flag: Tensor) -> float:
    # NCCL takes tensors on its own device only, gloo those of the CPU.
    on_device = "nccl" in dist.get_backend() or "xccl" in dist.get_backend()
    flag = flag.to(torch.device("cuda") if on_device else torch.device("cpu"))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return float(flag)
