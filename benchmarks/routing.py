"""Cost of routing's signals on a training step, as a ratio to the plain step of the same model.

`signals` reads contribution, relevance and learning cost of every token, unit and layer and does
nothing with them. `token` and `aggregate` add Goodness, the divergence and its gradients,
`agreement` the Goodness of that name, `price` an L1 penalty instead. A step is forward, backward,
and one step of both optimizers, inside an attached LearningDynamics. Ratios are of thread time
on the CPU (other programs on the machine then count little) and of wall time on CUDA.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._timing import PLAIN_AGAIN, describe_machine, report, summarise_ratios

Step = Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this subject."""
    parser.add_argument("--rounds", type=int, default=30, help="rounds (default: 30)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=22, help="of a sample (default: 22)")
    parser.add_argument("--threads", type=int, default=1)


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios by contestant with intervals, and what they were measured on."""
    torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = {"intervals": {}}
    steps = {name: build_step(name, arguments) for name in CONTESTANTS}
    plain, again = (build_step("plain", arguments) for _ in range(2))
    steps[PLAIN_AGAIN] = again
    for step in (plain, *steps.values()):
        for _ in range(3):
            step()
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.rounds):
        for name, step in steps.items():  # each beside a plain step of its own
            first = seconds(plain, arguments.device)
            own = seconds(step, arguments.device)
            last = seconds(plain, arguments.device)
            ratios[name].append(2 * own / (first + last))
        if (number + 1) % max(1, arguments.rounds // 4) == 0:
            report(f"  round {number + 1}/{arguments.rounds}")
    for name, each in ratios.items():
        figure = summarise_ratios(each)
        result[name] = figure.ratio
        result["intervals"][name] = [figure.low, figure.high]
    result["plain_milliseconds"] = 1e3 * statistics.median(
        seconds(plain, arguments.device) for _ in range(5)
    )
    result["task"] = {key: value for key, value in vars(arguments).items() if key in TASK}
    result["machine"] = describe_machine()
    return result


CONTESTANTS = ("signals", "token", "aggregate", "agreement", "price")
TASK = ("hidden_size", "blocks", "batch", "tokens", "device")


def build_step(name: str, arguments: argparse.Namespace) -> Step:
    """A training step of a model of its own."""
    from torchfmri.routing import (
        Divergence,
        LearningDynamics,
        Price,
        RoutingConfig,
        RoutingLanguageModel,
        agreement,
        computation_parameters,
        routing_parameters,
    )

    torch.manual_seed(0)
    config = RoutingConfig(21, arguments.hidden_size, arguments.blocks)
    model = RoutingLanguageModel(config).to(arguments.device)
    ids = torch.randint(21, (arguments.batch, arguments.tokens), device=arguments.device)
    optimizers = [
        torch.optim.AdamW(parameters(model), fused=True)
        for parameters in (computation_parameters, routing_parameters)
    ]
    if name == "plain":

        def plain() -> None:
            model(ids, labels=ids).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return plain
    options: dict[str, Any] = {
        "signals": {"meta_loss": None, "keep_signals": True},
        "token": {"meta_loss": Divergence()},
        "aggregate": {"meta_loss": Divergence(), "signal": "aggregate"},
        "agreement": {"meta_loss": Divergence(agreement)},
        "price": {"meta_loss": Price()},
    }[name]
    dynamics = LearningDynamics(model, *optimizers, mode="joint", **options)
    dynamics.__enter__()
    return lambda: dynamics.compute_and_apply_gradients(model(ids, labels=ids).loss)


def seconds(step: Step, device: str) -> float:
    """Of one step."""
    clock = time.thread_time
    if device == "cuda":
        torch.cuda.synchronize()
        clock = time.perf_counter
    begun = clock()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - begun
