"""The histogram in CUDA C, compiled at run time by torch; optional.

Triton cannot address shared memory, and there an increment costs next to nothing: counting all
16,384 codes runs at the speed of memory. Where torch has no `_compile_kernel`, or it fails,
`usable` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchfmri._kernels.cuda_plan import DTYPES, LaunchPlan
from torchfmri._kernels.histogram import CODES
from torchfmri._torch import compile_cuda

THREADS = 1024
UNROLL = 4
_allowed = True


def use_native(allowed: bool) -> None:
    """Let the compiled histogram be used where it compiles (the default), or not."""
    global _allowed
    _allowed = allowed


def usable(plan: LaunchPlan, device: torch.device) -> bool:
    """Whether the kernels for all dtypes of a plan compile on the current device."""
    return (
        _allowed
        and device.type == "cuda"
        and all(compiles(group[0]) for group in plan.codes.groups)
    )


def count_codes(plan: LaunchPlan, pointers: Tensor, tables: Tensor) -> None:
    """Queue the counting of all codes into `tables` (rows, 16384), for a plan that is `usable`."""
    codes = plan.codes
    where = [pointers, plan.lengths, codes.rows, codes.firsts, tables, codes.chunk]
    for dtype, first, number in codes.groups:
        kernel = _kernel(dtype, torch.cuda.current_device(), THREADS, UNROLL)
        assert kernel is not None
        kernel(
            grid=(number, 1, 1),
            block=(THREADS, 1, 1),
            args=[*where, first],
            shared_mem=4 * CODES,
        )


def compiles(dtype: torch.dtype) -> bool:
    """Whether the kernel for a dtype compiles on the current device."""
    return _kernel(dtype, torch.cuda.current_device(), THREADS, UNROLL) is not None


@lru_cache(maxsize=64)
def _kernel(
    dtype: torch.dtype, device: int, threads: int, unroll: int
) -> Callable[..., None] | None:
    """The compiled kernel for a dtype on the current device, or None."""
    try:
        source = Path(__file__).with_name("histogram.cu").read_text(encoding="utf-8")
        names = {"VALUE": DTYPES.index(dtype), "THREADS": threads, "UNROLL": unroll}
        settings = "".join(f"#define {name} {value}\n" for name, value in names.items())
        kernel: Any = compile_cuda(settings + source, "count_codes")
        kernel.set_shared_memory_config(4 * CODES)
    except (AttributeError, NotImplementedError, OSError, RuntimeError):
        # Another torch, no NVRTC, too little shared memory: the Triton pass counts the same.
        return None
    return kernel  # type: ignore[no-any-return]
