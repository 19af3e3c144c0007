"""Cost of capturing all Linears of a small Qwen3, as a ratio to the plain run.

Passes: `forward` (under no_grad), `forward_backward` (loss.backward() and zero_grad), `generate`
(greedy). Attaching and removing the hooks is part of what is measured.
"""

import argparse
import contextlib
import importlib.util
import sys
import warnings
from typing import Any

import torch
from torch import nn

from benchmarks import _peers
from benchmarks._peers import Builder, Task
from benchmarks._qwen3 import SMALL, build_qwen3
from benchmarks._timing import PLAIN_AGAIN, Effort, Run, describe_machine, measure_ratios, report

# Our figures are taken before any peer is imported, and TorchLens is last: it leaves torch
# wrapped, nnsight replaces Tensor.backward, and both would slow down the plain run of the others.
PEERS: tuple[dict[str, Builder], ...] = (
    {"captum": _peers.build_captum},
    {"nnsight": _peers.build_nnsight, "transformer_lens": _peers.build_transformer_lens},
    {"torchlens": _peers.build_torchlens},
)

NOTES = {
    "transformer_lens": "wraps a copy of the model and computes attention with its eager code; "
    "compared with the plain run of the original model",
    "captum": "forward_backward is LayerGradientXActivation: gradients of the layers' outputs "
    "only, no parameter gradients, so it does less work than the plain run; no generate",
    "nnsight": "wraps a copy of the model; gradients inside `with loss.backward()`",
    "torchlens": "records every operation and saves the `linear` ones; measured last because "
    "it leaves torch wrapped",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this subject."""
    parser.add_argument("--rounds", type=int, default=40, help="rounds per pass (default: 40)")
    parser.add_argument(
        "--slow-rounds", type=int, default=5, help="rounds of runs over 2 seconds (default: 5)"
    )
    parser.add_argument("--hidden-size", type=int, default=256, help="width (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="depth (default: 4)")
    parser.add_argument("--tokens", type=int, default=256, help="length of the input")
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens to generate")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads of torch (default: 1; with more, waiting for each other is the noise)",
    )
    parser.add_argument(
        "--no-peers", action="store_true", help="only ours and bare hooks, a quick look"
    )


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios by contestant and pass, with intervals, errors, notes, task and machine."""
    torch.set_num_threads(arguments.threads)
    task = build_task(
        arguments.tokens, arguments.new_tokens, arguments.hidden_size, arguments.layers
    )
    effort = Effort(rounds=arguments.rounds, slow_rounds=arguments.slow_rounds)
    result: dict[str, Any] = {"intervals": {}, "rounds": {}, "errors": {}, "not_installed": []}

    measure_group(task, {"ours": build_ours, "bare_hooks": _peers.build_bare_hooks}, effort, result)
    for group in PEERS if not arguments.no_peers else ():
        absent = [name for name in group if importlib.util.find_spec(name) is None]
        result["not_installed"] += absent
        installed = {name: build for name, build in group.items() if name not in absent}
        if installed:
            measure_group(task, installed, effort, result)
    result["notes"] = {name: NOTES[name] for name in NOTES if _has_figures(result, name)}
    result["task"] = describe_task(task)
    result["machine"] = describe_machine()
    return _figures_first(result)


def build_task(
    tokens: int = 256, new_tokens: int = 8, hidden_size: int = 256, layers: int = 4
) -> Task:
    """A small Qwen3 with random weights, and one row of random tokens."""
    model = build_qwen3(
        SMALL,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 128),
        max_position_embeddings=tokens + new_tokens,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ).eval()
    return Task(model, torch.randint(3, model.config.vocab_size, (1, tokens)), new_tokens)


def build_ours(task: Task) -> dict[str, Run]:
    """Ours, keeping tensors and keeping statistics; the names carry which."""
    from torchfmri import Inspector

    def watched(keep: str, name: str, plain: Run) -> Run:
        inspector = Inspector(task.model)
        gradients = ["gradients"] if name == "forward_backward" else []
        inspector.watch(nn.Linear, what=["activations", *gradients])

        def run() -> object:
            with inspector.recording(keep=keep) as inspection:
                plain()
            return inspection

        return run

    return {
        f"{keep}_{name}": watched(keep, name, plain)
        for keep in ("tensors", "statistics")
        for name, plain in task.passes.items()
    }


def measure_group(
    task: Task, builders: dict[str, Builder], effort: Effort, result: dict[str, Any]
) -> None:
    """Measure some contestants together and add their figures to the result."""
    runs: dict[str, Run] = {}

    def on_error(key: str, error: Exception) -> None:
        if "ours" in builders:  # a failure of ours is no result
            raise error
        result["errors"][key] = _describe(error)

    # Peers print and warn; stdout belongs to the result.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, build in builders.items():
            try:
                runs.update({f"{name}_{key}": run for key, run in build(task).items()})
            except Exception as error:
                on_error(name, error)
        for ending, plain in task.passes.items():
            contestants = {key: run for key, run in runs.items() if _ending(key) == ending}
            report(f"{ending}: {', '.join(contestants) or 'nobody'}")
            figures = measure_ratios(plain, contestants, effort, on_error)
            noise = figures.pop(PLAIN_AGAIN)
            if "ours" in builders:  # the noise floor of our own figures
                figures[f"{PLAIN_AGAIN}_{ending}"] = noise
                if ending == "forward_backward":
                    figures[PLAIN_AGAIN] = noise
            for key, figure in figures.items():
                result[key] = round(figure.ratio, 4)
                result["intervals"][key] = [round(figure.low, 4), round(figure.high, 4)]
                result["rounds"][key] = figure.rounds


def describe_task(task: Task) -> dict[str, Any]:
    """Sizes of the model and of the input."""
    config = task.model.config
    return {
        "model": "Qwen3 from its config, random weights, float32, eval mode",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layers": config.num_hidden_layers,
        "attention": config._attn_implementation,
        "watched_linears": len(task.linears),
        "tokens": list(task.tokens.shape),
        "new_tokens": task.new_tokens,
    }


def _ending(key: str) -> str:
    # The longer ending first: `forward_backward` also ends in `backward`, never in `forward`.
    endings = ("forward_backward", "forward", "generate")
    return next(ending for ending in endings if key.endswith(ending))


def _has_figures(result: dict[str, Any], name: str) -> bool:
    return any(key.startswith(f"{name}_") for key in result)


def _describe(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _figures_first(result: dict[str, Any]) -> dict[str, Any]:
    figures = {key: value for key, value in result.items() if isinstance(value, float)}
    return {**figures, **{key: value for key, value in result.items() if key not in figures}}
