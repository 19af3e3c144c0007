"""Bandwidth of the CUDA pass over many tensors, with a plain sum and a plain copy beside it."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks._timing import describe_machine, report
from torchfmri._kernels import cpu, cuda, cuda_native, cuda_plan
from torchfmri._kernels.histogram import CODES
from torchfmri._kernels.reduction import Reduction

GIBIBYTE = 1 << 30
# Outputs of the seven Linears of a Qwen3-1.7B block: q, k, v, o, gate, up, down.
WIDTHS = (2048, 1024, 1024, 2048, 6144, 6144, 2048)
BLOCKS = 28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="timed runs; the median counts")
    parser.add_argument("--tokens", type=int, default=4096, help="rows of the 196 tensors")
    parser.add_argument(
        "--sweep", action="store_true", help="also try other shapes of programs (minutes)"
    )


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """TB/s per case, microseconds of Python per launch, and how many checks failed."""
    if not cuda.available():
        return {"skipped": ["This subject needs a CUDA device and Triton."]}
    wrong = check()
    report(f"{len(wrong)} wrong of all checks")
    result: dict[str, Any] = {"wrong": len(wrong)}
    for name, tensors in data(arguments.tokens):
        report(name)
        result |= _bandwidths(name, tensors, arguments.rounds)
        if arguments.sweep:
            result |= _sweep(name, tensors, arguments.rounds)
        del tensors
    result |= _python_costs()
    result["histogram_bins"] = CODES
    result["histogram_in_shared_memory"] = int(cuda_native.compiles(torch.bfloat16))
    return {**result, "mistakes": wrong, "machine": describe_machine()}


def data(tokens: int) -> Iterator[tuple[str, list[Tensor]]]:
    """The cases: one large tensor, then the outputs of 196 Linears, then hard ones."""
    torch.manual_seed(0)
    yield "one_bf16", [_normal(GIBIBYTE // 2, torch.bfloat16)]
    yield "one_fp32", [_normal(GIBIBYTE // 4, torch.float32)]
    yield "many_bf16", [_normal((tokens, width), torch.bfloat16) for width in WIDTHS * BLOCKS]
    yield "one_16_mib_bf16", [_normal((4096, 2048), torch.bfloat16)]
    yield "relu_bf16", [_normal(GIBIBYTE // 2, torch.bfloat16).relu_()]
    yield "zeros_bf16", [torch.zeros(GIBIBYTE // 2, dtype=torch.bfloat16, device="cuda")]
    poisoned = _normal(GIBIBYTE // 2, torch.bfloat16)
    poisoned[:: 1 << 15] = torch.nan
    yield "nan_in_every_chunk_bf16", [poisoned]


def _normal(shape: int | tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


# ---------------------------------------------------------------- time


def seconds(run: Callable[[], object], rounds: int) -> float:
    """Median time on the device; the launch itself is hidden behind a pause of the device."""
    run()
    found: list[float] = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)
        start.record()
        kept = run()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) / 1000)
        del kept
    return statistics.median(found)


def _bandwidths(name: str, tensors: list[Tensor], rounds: int) -> dict[str, float]:
    size = sum(tensor.nbytes for tensor in tensors)
    copy = torch.empty_like(tensors[0])

    def plain_sum() -> list[Tensor]:
        return [tensor.sum() for tensor in tensors]

    runs: dict[str, Callable[[], object]] = {
        "": lambda: cuda.reduce_many(tensors),
        "_histogram": lambda: cuda.reduce_many(tensors, histogram=True),
        "_sum": plain_sum,
    }
    result = {
        f"{name}{case}_tb_per_s": round(size / seconds(run, rounds) / 1e12, 3)
        for case, run in runs.items()
    }
    if len(tensors) == 1:
        elapsed = seconds(lambda: copy.copy_(tensors[0]), rounds)
        result[f"{name}_copy_tb_per_s"] = round(2 * size / elapsed / 1e12, 3)
    report(str(result))
    return result


def _python_costs(number: int = 392) -> dict[str, float]:
    """Microseconds until `reduce_many` returns for that many small tensors."""
    tensors = [_normal((64, 64), torch.bfloat16) for _ in range(number)]
    result = {}
    for histogram in (False, True):
        found = []
        for _ in range(50):
            torch.cuda.synchronize()
            start = time.perf_counter()
            kept = cuda.reduce_many(tensors, histogram=histogram)
            launched = time.perf_counter()
            kept.start_copy()
            copied = time.perf_counter()
            torch.cuda.synchronize()
            waited = time.perf_counter()
            kept.read()
            end = time.perf_counter()
            found.append((launched - start, copied - launched, end - waited))
        suffix = "_histogram" if histogram else ""
        for part, times in zip(("launch", "copy", "read"), zip(*found, strict=True), strict=True):
            name = f"python_{number}_tensors{suffix}_{part}_us"
            result[name] = round(statistics.median(times) * 1e6, 1)
    return result


# ---------------------------------------------------------------- other shapes


@contextmanager
def _settings(**values: Any) -> Iterator[None]:
    """Other sizes of programs for a while: shape, chunks, code_chunks, threads, unroll, native."""
    before = (dict(cuda.SHAPES), cuda_plan.CHUNKS, cuda_plan.CODE_CHUNKS)
    native = (cuda_native.THREADS, cuda_native.UNROLL)
    cuda_plan.make_plan.cache_clear()
    if "shape" in values:
        cuda.SHAPES.update(dict.fromkeys((2, 4), cuda.Shape(*values["shape"])))
    cuda_plan.CHUNKS = values.get("chunks", cuda_plan.CHUNKS)
    cuda_plan.CODE_CHUNKS = values.get("code_chunks", cuda_plan.CODE_CHUNKS)
    cuda_native.THREADS = values.get("threads", cuda_native.THREADS)
    cuda_native.UNROLL = values.get("unroll", cuda_native.UNROLL)
    cuda_native.use_native(values.get("native", True))
    try:
        yield
    finally:
        cuda.SHAPES.update(before[0])
        _, cuda_plan.CHUNKS, cuda_plan.CODE_CHUNKS = before
        cuda_native.THREADS, cuda_native.UNROLL = native
        cuda_native.use_native(True)
        cuda_plan.make_plan.cache_clear()


def _sweep(name: str, tensors: list[Tensor], rounds: int) -> dict[str, Any]:
    """TB/s for other shapes of programs."""
    if name not in ("one_bf16", "one_fp32", "many_bf16"):
        return {}
    size = sum(tensor.nbytes for tensor in tensors)
    narrow = name != "one_fp32"
    shapes = [(1024, 4, 4), (512, 4, 2), (512, 8, 4), (1024, 8, 4)]
    if not narrow:
        shapes = [(512, 8, 4), (512, 4, 4), (256, 8, 2), (1024, 8, 8)]
    table = {}
    for shape in shapes:
        for chunk in (16, 17, 18, 19) if shape == shapes[0] else (18,):
            with _settings(shape=shape, chunks=(1 << 13, 1 << chunk)):
                taken = seconds(lambda: cuda.reduce_many(tensors), rounds)
            table[f"{shape}, chunk 2^{chunk}"] = round(size / taken / 1e12, 3)
    plain = seconds(lambda: cuda.reduce_many(tensors), rounds)
    for threads, unroll, chunk in ((1024, 4, 19), (1024, 4, 20), (512, 4, 19)):
        with _settings(threads=threads, unroll=unroll, code_chunks=(1 << 15, 1 << chunk)):
            taken = seconds(lambda: cuda.reduce_many(tensors, histogram=True), rounds) - plain
        name_of = f"codes alone, {threads} threads, {unroll} loads, chunk 2^{chunk}"
        table[name_of] = round(size / taken / 1e12, 3)
    with _settings(native=False):
        taken = seconds(lambda: cuda.reduce_many(tensors, histogram=True), 3) - plain
    table["codes alone, Triton"] = round(size / taken / 1e12, 3)
    report("\n".join(f"  {key}: {value}" for key, value in table.items()))
    return {f"{name}_sweep": table}


# ---------------------------------------------------------------- correctness


def check() -> list[str]:
    """What differs from float64, over dtypes, sizes, layouts and hard values; [] is right."""
    tensors = [tensor.cuda() for tensor in hard_tensors()]
    tensors += [tensor[3:] for tensor in tensors if tensor.dim() == 1 and len(tensor) > 3]
    wrong = []
    for native in (True, False):
        cuda_native.use_native(native)
        first, again = (cuda.reduce_many(tensors, histogram=True).read() for _ in range(2))
        wrong += [] if first == again else ["two runs differ"]
        for tensor, found in zip(tensors, first, strict=True):
            name = f"{tensor.dtype} {tuple(tensor.shape)}"
            wrong += [f"{name}: {text}" for text in differences(tensor, found)]
    cuda_native.use_native(True)
    return wrong


def hard_tensors() -> Iterator[Tensor]:
    """Tensors on the CPU that a pass over floats can get wrong."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-41, 3e-6, 1.0])
    late = torch.cat((torch.zeros(5000), 1e4 + normal(4000)))
    poisoned = normal(70_000)
    poisoned[66_000] = torch.inf
    for dtype in cuda_plan.DTYPES:
        for size in (0, 1, 7, 8, 4095, 4096, 4097, 300_001):
            yield (normal(size) * 3 + 100).to(dtype)
        nothing = torch.full((9000,), torch.nan)
        for values in (special, late, poisoned, nothing, special.repeat(999)):
            yield values.to(dtype)
        for scale in (1e-30, 1e-20, 1e-6, 1e4, 1e20, 1e35):
            yield (normal(30_000) * scale).to(dtype)
        for mean in (1.0, 1e3, 1e4):
            yield (normal(200_000) + mean).to(dtype)
        yield normal(30_000).relu().to(dtype)
        yield torch.full((30_000,), 0.1).to(dtype)
        yield normal(50, 60).to(dtype).t()
        yield normal(50, 60).to(dtype)[::2, ::3]
        yield normal(50, 1).to(dtype).expand(50, 7)


def differences(tensor: Tensor, found: Reduction) -> Sequence[str]:
    """Where a reduction is not what float64 gives."""
    values = tensor.detach().cpu().float().double().reshape(-1)
    finite = values[values.isfinite()]
    tiny = int((values.abs() < torch.finfo(tensor.dtype).smallest_normal).sum())
    zero = int((values == 0).sum())
    expected: dict[str, Any] = {
        "count": len(values),
        "nan": int(values.isnan().sum()),
        "pos_inf": int((values == torch.inf).sum()),
        "neg_inf": int((values == -torch.inf).sum()),
        "zero": zero,
        "subnormal": tiny - zero,
        "histogram": cpu.reduce_values(tensor.detach().cpu().reshape(-1), True).histogram,
    }
    if len(finite):
        expected |= {"low": float(finite.min()), "high": float(finite.max())}
    wrong = [
        f"{name} is {getattr(found, name)}, not {value}"
        for name, value in expected.items()
        if getattr(found, name) != value and (name != "histogram" or found.histogram is not None)
    ]
    if len(finite):
        mean, std = float(finite.mean()), float(finite.std(correction=0))
        std_found = (found.squared_deviations / len(finite)) ** 0.5
        if not abs(found.mean - mean) <= 1e-6 * max(abs(mean), std):
            wrong.append(f"mean is {found.mean}, not {mean}")
        if not abs(std_found - std) <= 1e-6 * std:
            wrong.append(f"std is {std_found}, not {std}")
    return wrong
