"""Cost of a Monitor on a training step of a Qwen3, as a ratio to the plain step.

Every Linear, activations and output gradients, at every step; attached once, as in a real loop:
each contestant has modules and an optimizer of its own, which share weights and state. `ours` takes
moments, extremes and counts, `ours_with_histogram` the histogram too, and `ours_by_default` is a
Monitor without options: every leaf layer, weights, their gradients and updates as well. `ours_tiny`
is the latter on a model so small that its step is little but overhead. `ours_peak_memory` is the
peak with the Monitor over the plain peak: resident memory of fresh processes on the CPU, allocated
memory on CUDA. Where numba is used both processes load it; what numba itself takes is
`accelerator_megabytes`.

With `--compiled`, `compiled_monitor` is the cost of a Monitor on a model that is compiled by
`torch.compile`, as a ratio to plain compiled steps, four in a row; `compiled_monitor_one_step` is
that of single steps, between which the GPU is waited for. `eager_monitor` is the same on the model
without compiling, beside `empty_hooks`, a hook on every Linear that does nothing.
`compiled_gradients_apart` is the largest difference between the parameters' gradients of the
watched and of the plain compiled step, as a share of the parameter's largest gradient;
`compiled_against_eager_apart` that between the plain compiled and the plain eager step.
"""

import argparse
import copy
import importlib.util
import json
import resource
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks._monitor_peers import COPYING, NEEDS, NOTES, PEERS
from benchmarks._qwen3 import LARGE, SMALL, build_qwen3
from benchmarks._timing import (
    PLAIN_AGAIN,
    Effort,
    Run,
    describe_machine,
    measure_ratios,
    report,
    time_once,
)

CUDA_SIZES = ((4, 1024), (8, 2048))
STEPS_FOR_PEAK = 6
IN_A_ROW = 4
TINY_STEPS = 100


class Training(NamedTuple):
    """A model, the Linears to watch, and what a training step needs."""

    model: nn.Module
    layers: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor

    def step(self) -> object:
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def twin(self) -> "Training":
        """Other modules and another optimizer with the same weights and the same state."""
        shared: dict[int, Any] = {id(each): each for each in self.model.parameters()}
        shared |= {id(each): each for each in self.model.buffers()}
        model = copy.deepcopy(self.model, shared)
        optimizer = build_optimizer(model)
        optimizer.state = self.optimizer.state
        layers = {name: model.get_submodule(name) for name in self.layers}
        return Training(model, layers, optimizer, self.tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this subject."""
    parser.add_argument("--rounds", type=int, default=40, help="rounds (default: 40)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--accelerator",
        choices=("auto", "off"),
        default="auto",
        help="off: torch alone, also where numba is installed",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads of torch (default: 1; with more, waiting for each other is the noise)",
    )
    parser.add_argument("--no-peers", action="store_true", help="only ours, a quick look")
    parser.add_argument("--compiled", action="store_true", help="a compiled model, and only that")
    parser.add_argument("--peak-of", choices=("plain", "loaded", "ours"), help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios by contestant with intervals, notes, task and machine."""
    from torchfmri._kernels import accelerator_name, use_accelerator

    torch.set_num_threads(arguments.threads)
    if arguments.peak_of:
        return {"peak_bytes": measure_own_peak(arguments.peak_of, arguments.accelerator)}
    use_accelerator(arguments.accelerator == "auto")
    on_cuda = arguments.device == "cuda"
    result: dict[str, Any] = {"intervals": {}, "not_installed": [], "errors": {}}
    if arguments.compiled:
        batch, tokens = CUDA_SIZES[0] if on_cuda else (4, 128)
        measure_compiled(build_training(arguments.device, batch, tokens), arguments, result)
        result["machine"] = describe_machine()
        return result
    for batch, tokens in CUDA_SIZES if on_cuda else ((4, 128),):
        suffix = f"_b{batch}_s{tokens}" if on_cuda else ""
        report(f"{batch} x {tokens} tokens on {arguments.device}")
        training = build_training(arguments.device, batch, tokens)
        measure(training, arguments, suffix, result)
        if on_cuda:
            result[f"ours_peak_memory{suffix}"] = peak_on_cuda(training)
        else:
            result |= peaks_on_cpu(arguments)
            measure_tiny(arguments, result)
        layers = len(training.layers)
        del training
        if on_cuda:
            torch.cuda.empty_cache()
    result["notes"] = {
        name: text for name, text in NOTES.items() if any(key.startswith(name) for key in result)
    }
    result["task"] = {
        "model": "Qwen3-1.7B shape, bfloat16" if on_cuda else f"Qwen3 {SMALL}",
        "linears": layers,
        "batch": [list(size) for size in CUDA_SIZES] if on_cuda else [4, 128],
        "optimizer": "AdamW, fused" if on_cuda else "AdamW",
        "passes_over_memory": "cuda" if on_cuda else accelerator_name(),
    }
    result["machine"] = describe_machine()
    return result


def build_training(device: str, batch: int, tokens: int) -> Training:
    """A Qwen3 with random weights, its Linears, and one step on random tokens."""
    on_cuda = device == "cuda"
    shape = LARGE if on_cuda else SMALL
    dtype = torch.bfloat16 if on_cuda else torch.float32
    options = {"max_position_embeddings": tokens, "use_cache": False}
    model = build_qwen3(shape, device, dtype, **options).train()
    ids = torch.randint(3, shape["vocab_size"], (batch, tokens), device=device)
    optimizer = build_optimizer(model)
    linears = {
        name: module
        for name, module in model.named_modules()
        # The logits alone would be as large as everything else together.
        if isinstance(module, nn.Linear) and not (on_cuda and name == "lm_head")
    }

    return Training(model, linears, optimizer, ids)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, fused on CUDA; its steps are small, so that all contestants do the same work."""
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused)


def build_default(training: Training, until: ExitStack) -> Run:
    """The step of a twin with a Monitor that has no options."""
    from torchfmri import Monitor

    twin = training.twin()
    until.enter_context(Monitor(twin.model, twin.optimizer))
    return twin.step


def measure_tiny(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Add the ratio of a Monitor on a model of two Linears."""
    from torchfmri import Monitor

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Run]:
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = build_optimizer(model)

        def steps() -> object:  # one of them is shorter than what a scheduler deals out
            for _ in range(TINY_STEPS):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return None

        return model, optimizer, steps

    x = torch.randn(32, 16)
    *_, plain = build()
    model, optimizer, steps = build()
    effort = Effort(rounds=arguments.rounds, slow_seconds=30, slow_rounds=arguments.rounds)
    with Monitor(model, optimizer):
        figure = measure_ratios(plain, {"ours_tiny": steps}, effort)["ours_tiny"]
    result["ours_tiny"] = figure.ratio
    result["intervals"]["ours_tiny"] = [figure.low, figure.high]
    seconds = sorted(time_once(plain) for _ in range(5))[2] / TINY_STEPS
    result["plain_milliseconds_tiny"] = seconds * 1e3


def build_ours(training: Training, histogram: bool, until: ExitStack) -> Run:
    """The step of a twin with a Monitor attached until the stack is closed."""
    from torchfmri import Monitor

    twin = training.twin()
    what = ("activations", "gradients")
    watch = list(twin.layers)
    until.enter_context(Monitor(twin.model, twin.optimizer, watch, what=what, histogram=histogram))
    return twin.step


def measure(
    training: Training, arguments: argparse.Namespace, suffix: str, result: dict[str, Any]
) -> None:
    """Add the ratios of all contestants, and the time of the plain step."""
    with ExitStack() as until:
        ours = {
            "ours": build_ours(training, False, until),
            "ours_with_histogram": build_ours(training, True, until),
            "ours_by_default": build_default(training, until),
        }
        compare(training, ours, arguments, suffix, result)
    runs = build_peers(training, arguments, result)
    if runs:  # apart, because some of them leave memory and caches in another state
        compare(training, runs, arguments, suffix, result)
    seconds = sorted(time_once(training.step) for _ in range(5))[2]
    result[f"plain_milliseconds{suffix}"] = seconds * 1e3


def measure_compiled(
    training: Training, arguments: argparse.Namespace, result: dict[str, Any]
) -> None:
    """Add the cost of a Monitor on a compiled model, and on the same model without compiling."""
    effort = Effort(rounds=arguments.rounds, warm_up=3, slow_seconds=600)
    with ExitStack() as until:
        plain, watched = (compiled_twin(training) for _ in range(2))
        report("compiling")
        result["compile_seconds"] = time_once(plain.step)
        monitor = until.enter_context(watch_linears(watched))
        result["compile_watched_seconds"] = time_once(watched.step)
        result["compiled_series"] = len(monitor.history.series)
        result["compiled_notes"] = list(monitor.history.notes)
        report(str(result))
        for suffix, count in (("", IN_A_ROW), ("_one_step", 1)):
            runs = {f"compiled_monitor{suffix}": repeated(watched.step, count)}
            figures = measure_ratios(repeated(plain.step, count), runs, effort)
            note_figures(figures, f"plain_compiled_again{suffix}", result)
        result["plain_compiled_milliseconds"] = 1e3 * min(time_once(plain.step) for _ in range(5))
        result |= compare_gradients(training, plain, watched)
        report(str({name: each for name, each in result.items() if "compiled" in name}))
    with ExitStack() as until:
        eager, hooked = training.twin(), training.twin()
        until.enter_context(watch_linears(eager))
        for layer in hooked.layers.values():
            layer.register_forward_hook(lambda *_: None)
        runs = {
            "eager_monitor": repeated(eager.step, IN_A_ROW),
            "empty_hooks": repeated(hooked.step, IN_A_ROW),
        }
        figures = measure_ratios(repeated(training.step, IN_A_ROW), runs, effort)
        note_figures(figures, "plain_again", result)
    result["plain_milliseconds"] = 1e3 * min(time_once(training.step) for _ in range(5))


def repeated(step: Run, count: int) -> Run:
    """Several steps in a row, as a training loop has them: the GPU lags behind the host."""

    def run() -> None:
        for _ in range(count):
            step()

    return run


def compiled_twin(training: Training) -> Training:
    """A twin whose model is compiled."""
    twin = training.twin()
    return twin._replace(model=torch.compile(twin.model))


def watch_linears(training: Training) -> Any:
    """A Monitor of the outputs of all Linears and their gradients."""
    from torchfmri import Monitor

    what = ("activations", "gradients")
    return Monitor(training.model, training.optimizer, list(training.layers), what=what)


def note_figures(figures: dict[str, Any], again: str, result: dict[str, Any]) -> None:
    """Put ratios into the result; `again` is what the plain run against itself is called."""
    for name, figure in figures.items():
        key = again if name == PLAIN_AGAIN else name
        result[key], result["intervals"][key] = figure.ratio, [figure.low, figure.high]
        report(f"  {key}: {figure.ratio:.3f} [{figure.low:.3f}, {figure.high:.3f}]")


def compare_gradients(eager: Training, plain: Training, watched: Training) -> dict[str, Any]:
    """How far loss and gradients of a compiled step are from others, on the same weights."""
    found = []
    for each in (eager, plain, watched):
        for parameter in eager.model.parameters():
            parameter.grad = None
        loss = each.model(input_ids=each.tokens, labels=each.tokens).loss
        loss.backward()
        gradients = [p.grad.clone() for p in each.model.parameters() if p.grad is not None]
        found.append((loss.detach(), gradients))
    for parameter in eager.model.parameters():
        parameter.grad = None
    (_, one), (loss, two), (other, three) = found

    def apart(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
        pairs = zip(some, others, strict=True)
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)

    return {
        "compiled_same_loss": bool(torch.equal(loss, other)),
        "compiled_same_gradients": sum(map(torch.equal, two, three)) / len(two),
        "compiled_gradients_apart": apart(three, two),
        "compiled_against_eager_apart": apart(two, one),
    }


def build_peers(
    training: Training, arguments: argparse.Namespace, result: dict[str, Any]
) -> dict[str, Run]:
    """A run of each peer that is installed; why the others are missing is noted in `result`."""
    runs: dict[str, Run] = {}
    for name, build in PEERS.items() if not arguments.no_peers else ():
        if arguments.device == "cuda" and name in COPYING:
            result["errors"][name] = "left out on CUDA: copies every tensor to the host, minutes"
            continue
        if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
            result["not_installed"] = sorted({*result["not_installed"], name})
            continue
        try:
            twin = training.twin()
            runs[name] = build(twin.step, twin.model, twin.layers)
        except Exception as error:
            result["errors"][name] = f"{type(error).__name__}: {error}"
    return runs


def compare(
    training: Training,
    runs: dict[str, Run],
    arguments: argparse.Namespace,
    suffix: str,
    result: dict[str, Any],
) -> None:
    """Add the ratios of these runs to the plain step, interleaved with it."""
    effort = Effort(
        rounds=arguments.rounds, slow_seconds=1.5, slow_rounds=arguments.rounds // 3 + 1
    )
    figures = measure_ratios(
        training.step,
        runs,
        effort,
        on_error=lambda name, error: result["errors"].update({name + suffix: repr(error)}),
    )
    for name, figure in figures.items():
        if name + suffix not in result:  # of plain_again, the one beside ours
            result[name + suffix] = figure.ratio
            result["intervals"][name + suffix] = [figure.low, figure.high]


def peak_on_cuda(training: Training) -> float:
    """Peak of allocated memory with the Monitor over that without."""

    def peak(run: Run) -> int:
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    plain = peak(training.step)
    with ExitStack() as until:
        return peak(build_ours(training, True, until)) / plain


def peaks_on_cpu(arguments: argparse.Namespace) -> dict[str, float]:
    """Peak of resident memory of a fresh process with the Monitor over that of one without."""

    def peak(kind: str) -> int:
        command = [sys.executable, "-m", "benchmarks", "monitor", "--json", "--peak-of", kind]
        options = ["--accelerator", arguments.accelerator, "--threads", str(arguments.threads)]
        found = []
        for _ in range(3):
            done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
            found.append(int(json.loads(done.stdout)["peak_bytes"]))
        return sorted(found)[1]

    plain, loaded, ours = (peak(kind) for kind in ("plain", "loaded", "ours"))
    return {"ours_peak_memory": ours / loaded, "accelerator_megabytes": (loaded - plain) / 1e6}


def measure_own_peak(kind: str, accelerator: str) -> int:
    """The peak of this process after some steps, in bytes.

    Args:
        kind: "plain", "loaded" (plain, with whatever does the passes loaded) or "ours".
        accelerator: "auto" or "off".
    """
    from torchfmri import calculate_statistics
    from torchfmri._kernels import use_accelerator

    use_accelerator(accelerator == "auto")
    training = build_training("cpu", 4, 128)
    if kind == "loaded":
        calculate_statistics(torch.ones(1000))
    run = build_ours(training, True, ExitStack()) if kind == "ours" else training.step
    for _ in range(STEPS_FOR_PEAK):
        run()
    return _peak_of_this_process()


def _peak_of_this_process() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        # Not ru_maxrss: on Linux it begins with that of the process that started this one.
        line = next(each for each in status.read_text().splitlines() if "VmHWM" in each)
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
