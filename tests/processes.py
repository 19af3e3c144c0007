"""Work done by several processes that talk to each other, as in distributed training."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

PATIENCE = 120  # seconds


def run_in_processes(work: Callable[[int, str], None], folder: Path, count: int) -> None:
    """Call `work(rank, folder)` in each of `count` processes of one gloo group."""
    torch.multiprocessing.spawn(_work, (work, str(folder), count), nprocs=count)


def _work(rank: int, work: Callable[[int, str], None], folder: str, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count
    )
    try:
        work(rank, folder)
    finally:
        dist.destroy_process_group()
    _wait_for_all(rank, Path(folder), count)
    sys.stdout.flush()
    sys.stderr.flush()
    # DistributedDataParallel keeps its group's threads alive beyond destroy_process_group. When one
    # of them lets go of a Python object while the interpreter ends, the process aborts, now and
    # then. So it ends here, without that: how torch's threads end is not what is tested.
    os._exit(0)


def _wait_for_all(rank: int, folder: Path, count: int) -> None:
    """Return once the work of every process is done; nobody loses a peer that it talks to."""
    (folder / f"done-{rank}").touch()
    end = time.monotonic() + PATIENCE
    while any(not (folder / f"done-{each}").exists() for each in range(count)):
        if time.monotonic() > end:
            raise TimeoutError(f"a process of {count} did not finish within {PATIENCE} s")
        time.sleep(0.01)
