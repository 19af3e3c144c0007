"""Cost of token gradients on a forward and backward pass of a Qwen3, as a ratio to the plain pass.

`norms` keeps numbers per token and reads the norm over all parameters, `factors` keeps the factors
and reads nothing; `gram` and `projection` (to 256 numbers) are read from them. Attaching, reading
and detaching are part of what is measured. `empty_hooks` is for comparison: PyTorch's own hooks on
the same calls and on the gradients of what they return, which do nothing. `norms_peak_memory` is
the peak of a step with norms over the plain peak, weights included: live tensors, counted operation
by operation, on the CPU (the same number in every run); allocated memory on CUDA.

`--steps` times several steps in a row, of the peers as well. On CUDA that is the default, as in
training: the GPU is waited for when the last step is over. `norms_one_step` and
`empty_hooks_one_step` are of a single step there, which begins with an idle GPU and ends with
waiting for it. All that Python does before the backward pass is waited for then, so these two say
as much about the host: hence the forward pass is timed by itself as well, how long its calls take
(`..._host_milliseconds`, of `norms` with attaching) and how long the GPU takes
(`plain_forward_milliseconds`, no less than the calls).

`--against` times another checkout of this repository in the same run, in a process of its own:
`before_norms` beside `norms`, and so on.
"""

import argparse
import contextlib
import importlib.util
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks._qwen3 import LARGE, SMALL, build_qwen3
from benchmarks._timing import Effort, Run, describe_machine, measure_ratios, report, time_once
from benchmarks._token_peers import NEEDS, NOTES, PEERS
from benchmarks._token_pieces import PIECES, stripped
from benchmarks._versions import steps_of

SHAPES = {"small": (SMALL, 2, 128), "1.7b": (LARGE, 4, 1024)}  # with batch and tokens
NUMBERS = 256  # of a projection
OURS = (
    "empty_hooks", "norms", "factors", "gram", "projection", "norms_compared", "norms_first_pass",
)  # fmt: skip

Keep = Literal["factors", "norms"]


class Task(NamedTuple):
    """A model and its tokens; a step is a forward and a backward pass with the model's own loss."""

    model: nn.Module
    tokens: Tensor

    def forward_backward(self) -> None:
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()

    def plain(self) -> None:
        self.forward_backward()
        self.model.zero_grad()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this subject."""
    parser.add_argument("--rounds", type=int, default=40, help="rounds (default: 40)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--accelerator",
        choices=("auto", "off"),
        default="auto",
        help="off: torch alone on the CPU, also where numba is installed",
    )
    parser.add_argument(
        "--shape",
        choices=tuple(SHAPES),
        default="small",
        help="of the Qwen3: small (2 x 128 tokens) or that of 1.7B (4 x 1024 tokens)",
    )
    parser.add_argument("--hidden-size", type=int, help="width, instead of the shape's")
    parser.add_argument("--intermediate-size", type=int, help="width inside the MLPs, likewise")
    parser.add_argument("--layers", type=int, help="depth, likewise")
    parser.add_argument("--vocabulary", type=int, help="how many token ids, likewise")
    parser.add_argument("--batch", type=int, help="samples, likewise")
    parser.add_argument("--tokens", type=int, help="tokens of a sample, likewise")
    parser.add_argument(
        "--tied", action="store_true", help="one weight for embedding and head (1.7b has that)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads of torch (default: 1; with more, waiting for each other is the noise)",
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        help="steps in a row that are timed as one (default: 5 on CUDA, 1 on the CPU)",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="a folder with another version of this repository, whose steps run in turn with ours",
    )
    parser.add_argument("--no-peers", action="store_true", help="only ours, a quick look")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count what this process and --against compute, on a CPU that others use as well",
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=(),
        choices=("all", *PIECES),
        metavar="PIECE",
        help="also norms and factors without each of these pieces that make them fast: all, or "
        + ", ".join(PIECES),
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=OURS,
        default=OURS,
        metavar="NAME",
        help=f"of ours, these alone, for more rounds in the same time: {', '.join(OURS)}",
    )


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return int(text)


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios by contestant with intervals, errors, notes, task and machine."""
    from torchfmri._kernels.accelerator import accelerator_name, use_accelerator

    torch.set_num_threads(arguments.threads)
    use_accelerator(arguments.accelerator == "auto")
    task = build_task(arguments)
    result: dict[str, Any] = {"intervals": {}, "rounds": {}, "errors": {}, "not_installed": []}

    report(f"ours, {' x '.join(map(str, task.tokens.shape))} tokens on {arguments.device}")
    ours, steps = build_ours(task), arguments.steps
    ours = {name: ours[name] for name in OURS if name in arguments.only}
    ours |= build_pieces(ours, PIECES if "all" in arguments.without else arguments.without)
    if steps is None:
        steps = 5 if task.tokens.is_cuda else 1
    with contextlib.ExitStack() as stack:
        clock = time.process_time if arguments.processor_time else time.perf_counter
        others = {}
        if arguments.against is not None:
            options = _repeated_options(arguments)
            others, spent = stack.enter_context(steps_of(arguments.against, ours, options))
            if arguments.processor_time:
                clock = lambda: time.process_time() + spent()  # noqa: E731
        compare(task, ours | others, steps, arguments.rounds, result, clock=clock)
    plain = sorted(time_once(repeated(task.plain, steps)) for _ in range(5))[2]
    result["plain_milliseconds"] = plain / steps * 1e3
    if task.tokens.is_cuda:
        names = [name for name in ("empty_hooks", "norms") if name in ours]
        single = {f"{name}_one_step": ours[name] for name in names}
        compare(task, single, 1, arguments.rounds, result)
        result |= measure_forward(task)
    result["norms_peak_memory"] = measure_peak(task, "norms") / measure_peak(task, None)
    if not arguments.no_peers:  # apart: some of them leave memory and caches in another state
        report("peers")
        # Peers print and warn; stdout belongs to the result.
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peers = build_peers(task, result)
            compare(task, peers, steps, arguments.rounds, result, describe_error(result))
    result["notes"] = {name: NOTES[name] for name in NOTES if name in result}
    result["task"] = describe_task(task) | {"steps_in_a_row": steps}
    passes = "cuda" if task.tokens.is_cuda else accelerator_name()
    result["task"] |= {"passes_over_memory": passes}
    result["machine"] = describe_machine()
    return figures_first(result)


def _repeated_options(arguments: argparse.Namespace) -> list[str]:
    """The options that describe the task, for another process."""
    names = ("device", "dtype", "shape", "hidden_size", "intermediate_size", "layers",
             "vocabulary", "batch", "tokens", "threads")  # fmt: skip
    given = {name: getattr(arguments, name) for name in names}
    found = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value]
    return [*found, "--tied"] if arguments.tied else found


def build_task(arguments: argparse.Namespace) -> Task:
    """A Qwen3 with random weights in training mode, and random tokens."""
    shape, batch, tokens = SHAPES[arguments.shape]
    batch, tokens = arguments.batch or batch, arguments.tokens or tokens
    chosen = {
        "hidden_size": arguments.hidden_size,
        "intermediate_size": arguments.intermediate_size,
        "num_hidden_layers": arguments.layers,
        "vocab_size": arguments.vocabulary,
        "tie_word_embeddings": arguments.tied,
    }
    options: dict[str, Any] = {key: value for key, value in chosen.items() if value}
    options |= {"max_position_embeddings": tokens, "use_cache": False}
    dtype = getattr(torch, arguments.dtype)
    model = build_qwen3(shape, arguments.device, dtype, **options).train()
    ids = torch.randint(3, model.config.vocab_size, (batch, tokens), device=arguments.device)
    return Task(model, ids)


def build_ours(task: Task) -> dict[str, Run]:
    """Token gradients of all parameters, with what is read of them."""
    return {
        "empty_hooks": listened(task),
        "norms": watched(task, "norms", lambda tokens: tokens.norm()),
        "factors": watched(task, "factors", lambda tokens: None),
        "gram": watched(task, "factors", lambda tokens: tokens.gram()),
        "projection": watched(task, "factors", lambda tokens: tokens.project(NUMBERS)),
        "norms_compared": counted(task, watched(task, "norms", lambda tokens: tokens.norm())),
        "norms_first_pass": forgotten(watched(task, "norms", lambda tokens: tokens.norm())),
    }


def build_pieces(ours: dict[str, Run], pieces: Collection[str]) -> dict[str, Run]:
    """Norms and factors without each of these pieces, and once more with all of them."""
    found: dict[str, Run] = {}
    for name in ("norms", "factors"):
        if name in ours and pieces:
            found[f"{name}_again"] = ours[name]
            found |= {f"{name}_without_{key}": stripped(ours[name], key) for key in pieces}
    return found


def counted(task: Task, watch: Run) -> Run:
    """The step of a model that counts its passes: the way through it is compared each time."""
    passes = itertools.count()

    def run() -> object:
        task.model.passes = next(passes)  # type: ignore[assignment]
        return watch()

    return run


def forgotten(watch: Run) -> Run:
    """The first step of a model: its plan is made, and its tokens are followed."""
    from torchfmri._tokens.calls import plans

    def run() -> object:
        kept = dict(plans._KEPT)  # for the others, whose passes are not the first
        plans._KEPT.clear()
        try:
            return watch()
        finally:
            plans._KEPT.clear()
            plans._KEPT.update(kept)

    return run


def watched(task: Task, keep: Keep, read: Callable[[Any], object]) -> Run:
    """The step inside token_gradients, and something read of them."""
    import torchfmri

    def run() -> object:
        with torchfmri.token_gradients(task.model, keep=keep) as tokens:
            task.forward_backward()
        found = read(tokens)
        task.model.zero_grad()
        return tokens, found

    return run


def listened(task: Task) -> Run:
    """The step with hooks on every layer with parameters, and on what it returns: empty ones."""
    layers = [each for each in task.model.modules() if each._parameters]

    def listen(layer: nn.Module, arguments: object, output: Tensor) -> None:
        output.register_hook(ignore)

    def ignore(gradient: Tensor) -> None:
        pass

    def run() -> None:
        handles = [each.register_forward_hook(listen) for each in layers]
        task.forward_backward()
        for handle in handles:
            handle.remove()
        task.model.zero_grad()

    return run


def repeated(run: Run, steps: int) -> Run:
    """So many steps in a row."""

    def all_of_them() -> object:
        for _ in range(steps - 1):
            run()
        return run()

    return all_of_them


def build_peers(task: Task, result: dict[str, Any]) -> dict[str, Run]:
    """A run of each peer that is installed; why the others are missing is noted in `result`."""
    runs: dict[str, Run] = {}
    for name, build in PEERS.items():
        if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
            result["not_installed"].append(name)
            continue
        try:
            runs[name] = build(task.model, task.tokens)
        except Exception as error:
            describe_error(result)(name, error)
    return runs


def compare(
    task: Task,
    runs: dict[str, Run],
    steps: int,
    rounds: int,
    result: dict[str, Any],
    on_error: Callable[[str, Exception], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Add the ratios of these runs to the plain step, interleaved with it, so many in a row."""
    plain = repeated(task.plain, steps)
    several = {name: repeated(run, steps) for name, run in runs.items()}
    effort = Effort(rounds, slow_seconds=Effort.slow_seconds * steps, clock=clock)
    for name, figure in measure_ratios(plain, several, effort, on_error).items():
        if name not in result:  # of plain_again, the first one
            result[name] = figure.ratio
            result["intervals"][name] = [figure.low, figure.high]
            result["rounds"][name] = figure.rounds


def describe_error(result: dict[str, Any]) -> Callable[[str, Exception], None]:
    """What notes the error of a peer in the result."""

    def note(name: str, error: Exception) -> None:
        text = " ".join(str(error).split())
        result["errors"][name] = f"{type(error).__name__}: {text[:300]}"

    return note


def measure_forward(task: Task) -> dict[str, float]:
    """Milliseconds of the forward pass until its calls are over, and until the GPU is."""
    import torchfmri

    calls: dict[str, list[float]] = {"plain": [], "norms": []}
    whole = []
    for name in ["plain", "norms"] * 9:
        torch.cuda.synchronize()
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if name == "norms":
                stack.enter_context(torchfmri.token_gradients(task.model, keep="norms"))
            output = task.model(input_ids=task.tokens, labels=task.tokens)
            calls[name].append(time.perf_counter() - start)
            torch.cuda.synchronize()
            if name == "plain":
                whole.append(time.perf_counter() - start)
            del output
    found = {f"{name}_forward_host": several for name, several in calls.items()}
    found["plain_forward"] = whole
    return {
        f"{name}_milliseconds": statistics.median(several) * 1e3 for name, several in found.items()
    }


def measure_peak(task: Task, keep: Keep | None) -> int:
    """The most bytes alive at once in a step, weights included; plain where nothing is kept."""
    run = task.plain if keep is None else watched(task, keep, lambda tokens: tokens.norm())
    run()  # what is made once, such as cached tables, is there
    if task.tokens.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())
    from torchfmri._cost.live_memory import LiveMemory

    existing = [*task.model.parameters(), *task.model.buffers(), task.tokens]
    with LiveMemory(None, existing) as memory:
        run()
    return int(memory.existing_bytes + memory.peak)


def describe_task(task: Task) -> dict[str, Any]:
    config: Any = task.model.config
    return {
        "model": {name: getattr(config, name) for name in LARGE},
        "parameters": sum(each.numel() for each in task.model.parameters()),
        "parameter_tensors": len(list(task.model.parameters())),
        "tokens": list(task.tokens.shape),
        "device": task.tokens.device.type,
        "dtype": str(next(task.model.parameters()).dtype).removeprefix("torch."),
        "step": "forward and backward with the model's own loss, zero_grad; no optimizer",
        "projection": f"to {NUMBERS} numbers",
    }


def figures_first(result: dict[str, Any]) -> dict[str, Any]:
    """The same with the figures before everything else."""
    figures = {key: value for key, value in result.items() if isinstance(value, float)}
    return figures | {key: value for key, value in result.items() if key not in figures}
