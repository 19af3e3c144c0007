"""Cost of the statistics of one large tensor, as multiples of `x.sum()` over it, one thread."""

import argparse
import statistics
import time
from typing import Any

import torch

from benchmarks._timing import (
    PLAIN_AGAIN,
    Effort,
    Figure,
    describe_machine,
    measure_ratios,
    report,
)
from torchfmri import _kernels
from torchfmri.statistics import calculate_statistics

MEBIBYTE = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=21, help="how often each contestant runs")
    parser.add_argument("--mebibytes", type=int, default=64, help="size of the tensor")
    parser.add_argument(
        "--accelerator",
        choices=["auto", "off"],
        default="auto",
        help="auto: numba where it is installed; off: torch alone",
    )


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """The ratios in float32 and bfloat16, their intervals, and the cost of a small tensor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _kernels.use_accelerator(arguments.accelerator == "auto")
    try:
        figures = _measure("fp32", torch.float32, arguments)
        figures |= _measure("bf16", torch.bfloat16, arguments)
        figures[PLAIN_AGAIN] = figures[f"{PLAIN_AGAIN}_fp32"]
        return {
            **{name: figure.ratio for name, figure in figures.items()},
            "intervals": {name: [figure.low, figure.high] for name, figure in figures.items()},
            "settings": {
                "accelerator": _kernels.accelerator_name(),
                "mebibytes": arguments.mebibytes,
                "rounds": arguments.rounds,
            },
            "small_tensor_microseconds": _measure_small(),
            "machine": describe_machine(),
        }
    finally:
        _kernels.use_accelerator(True)
        torch.set_num_threads(threads)


def naive_statistics(x: torch.Tensor) -> list[Any]:
    """What people write in a hook."""
    floats = x.float()
    return [
        *(x.mean().item(), x.std().item(), x.min().item(), x.max().item()),
        *(x.isnan().sum().item(), x.isinf().sum().item(), (x == 0).sum().item()),
        torch.histc(floats, bins=64),
    ]


def _measure(name: str, dtype: torch.dtype, arguments: argparse.Namespace) -> dict[str, Figure]:
    """Ratios to `x.sum()` for one dtype, with the noise floor `plain_again`."""
    generator = torch.Generator().manual_seed(0)
    count = arguments.mebibytes * MEBIBYTE // dtype.itemsize
    x = torch.randn(count, generator=generator).to(dtype)
    contestants = {
        f"ours_{name}": lambda: calculate_statistics(x),
        f"ours_moments_{name}": lambda: calculate_statistics(x, histogram=False),
        f"naive_{name}": lambda: naive_statistics(x),
    }
    report(f"{name}: {count:,} values")
    figures = measure_ratios(x.sum, contestants, Effort(rounds=arguments.rounds))
    figures[f"{PLAIN_AGAIN}_{name}"] = figures.pop(PLAIN_AGAIN)
    return figures


def _measure_small(values: int = 1 << 16, repetitions: int = 500) -> dict[str, float]:
    """Median microseconds for a tensor as a hook meets it: 256 x 256, in the cache."""
    result = {}
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        x = torch.randn(values, generator=torch.Generator().manual_seed(0)).to(dtype)
        for key, histogram in {"ours": True, "ours_moments": False}.items():
            seconds = []
            for _ in range(repetitions):
                start = time.perf_counter()
                calculate_statistics(x, histogram=histogram)
                seconds.append(time.perf_counter() - start)
            result[f"{key}_{name}"] = round(statistics.median(seconds) * 1e6, 1)
    return result
