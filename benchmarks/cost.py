"""Accuracy of `torchfmri.cost`: bytes saved and predicted peaks against what the allocator says.

`*_saved_error` is how far `cost.total.saved_bytes` is from the bytes that the allocator holds more
after a forward pass than before it. `*_peak_error_*` is how far the peak predicted for twice the
largest measured batch or length is from the peak that the allocator reports when that size is run.
The allocator is asked in runs without torchfmri: on CUDA `memory_allocated`, on a CPU the memory
events of torch's profiler. Errors are relative. Negative: we say too little.
"""

import argparse
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchfmri
from benchmarks import _subjects
from benchmarks._timing import describe_machine, report

SIZES = {
    "cpu": {"batch": (1, 2, 4), "length": (32, 64, 128)},
    "cuda": {"batch": (2, 4, 8), "length": (256, 512, 1024)},
}
IMAGES = {"cpu": (4, 8, 16), "cuda": (64, 128, 256)}


class Real(NamedTuple):
    """What the allocator says of one forward and backward pass, beyond what was there before."""

    saved: int
    peak: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Relative errors by subject, the bytes behind them, and the machine."""
    device = torch.device(arguments.device)
    sizes = SIZES[device.type]
    result: dict[str, Any] = {"bytes": {}}
    subjects = {
        "qwen3_eager": (_subjects.qwen3, _subjects.tokens, sizes),
        "qwen3_sdpa": (_subjects.qwen3_sdpa, _subjects.tokens, sizes),
        "conv_net": (_subjects.conv_net, _subjects.images, {"batch": IMAGES[device.type]}),
    }
    for name, (make, make_data, own) in subjects.items():
        report(name)
        model, _, loss = make()
        compare(name, model.to(device), make_data, loss, own, result)
    result["machine"] = describe_machine()
    return result


def compare(
    name: str,
    model: nn.Module,
    make_data: Callable[..., Any],
    loss: Any,
    sizes: dict[str, tuple[int, ...]],
    result: dict[str, Any],
) -> None:
    """Add the errors for one model to the result."""
    device = next(model.parameters()).device
    largest = {axis: values[-1] for axis, values in sizes.items()}

    def data(**size: int) -> Any:
        return to(make_data(**{**largest, **size}), device)

    cost = torchfmri.cost(model, data, loss, sizes=sizes, rounds=0)
    assert cost.growth is not None
    real = run_plain(model, data(), loss)
    result[f"{name}_saved_error"] = cost.total.saved_bytes / real.saved - 1
    there = sum(each.nbytes for each in [*model.parameters(), *model.buffers()])
    result["bytes"][f"{name}_saved"] = {"ours": cost.total.saved_bytes, "real": real.saved}
    result["bytes"][f"{name}_law"] = str(cost.growth.total.forward_flops)
    for axis in sizes:
        size = {**largest, axis: 2 * largest[axis]}
        predicted = cost.growth.predict(**size).peak_bytes
        twice = data(**size)
        measured = run_plain(model, twice, loss).peak + there + bytes_of(twice)
        result[f"{name}_peak_error_double_{axis}"] = predicted / measured - 1
        result["bytes"][f"{name}_peak_{axis}"] = {"predicted": predicted, "real": measured}


def run_plain(model: nn.Module, data: Any, loss: Any) -> Real:
    """One pass without torchfmri, watched by the allocator alone."""
    parameters = list(model.parameters())

    def forward() -> Tensor:
        output = model(**data) if isinstance(data, dict) else model(data)
        return output.loss if loss is None else loss(output)

    torch.autograd.grad(forward(), parameters)  # workspaces of libraries are there afterwards
    gc.collect()
    gc.disable()
    try:
        run = _on_cuda if parameters[0].is_cuda else _on_cpu
        return run(forward, parameters)
    finally:
        gc.enable()


def _on_cuda(forward: Callable[[], Tensor], parameters: list[nn.Parameter]) -> Real:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = forward()
    saved = torch.cuda.memory_allocated() - before
    torch.autograd.grad(loss, parameters)
    return Real(saved, torch.cuda.max_memory_allocated() - before)


def _on_cpu(forward: Callable[[], Tensor], parameters: list[nn.Parameter]) -> Real:
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = forward()
        with record_function("forward is over"):
            pass
        torch.autograd.grad(loss, parameters)
    assert profiler.profiler is not None
    live = peak = saved = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "forward is over":
            saved = live
        elif event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return Real(saved, peak)


def to(data: Any, device: torch.device) -> Any:
    if isinstance(data, dict):
        return {key: each.to(device) for key, each in data.items()}
    return data.to(device)


def bytes_of(data: Any) -> int:
    """Of the tensors of a batch, those that share memory once."""
    tensors = list(data.values()) if isinstance(data, dict) else [data]
    storages = {each.untyped_storage().data_ptr(): each.nbytes for each in tensors}
    return sum(storages.values())
