"""Cost of looking at every step for non-finite values, as a ratio to the plain training step.

A small Qwen3 on 4 x 128 tokens, as in the subject `monitor`, on one thread. The Monitor watches no
step (`every` is out of reach after the first): what is left is the sentinel. `sentinel` holds each
step (`on_nonfinite="skip"`), `sentinel_continue` does not. On CUDA (`--device cuda`) a Qwen3-1.7B;
`continue` then never waits for the device, `skip` does once per step.
"""

import argparse
import gc
import random
import time
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks._timing import (
    Effort,
    Figure,
    Run,
    describe_machine,
    measure_ratios,
    summarise_ratios,
)
from benchmarks.monitor import Training, build_training

NEVER = 1_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this subject."""
    parser.add_argument("--rounds", type=int, default=40, help="rounds (default: 40)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios with intervals, and the machine."""
    return {**measure(arguments.rounds, arguments.device), "machine": describe_machine()}


def measure(rounds: int = 40, device: str = "cpu") -> dict[str, Any]:
    """The ratios `sentinel` and `sentinel_continue`, `plain_again` as the noise, and intervals."""
    if device == "cpu":
        torch.set_num_threads(1)
    training = build_training(device, 4, 128 if device == "cpu" else 1024)
    with ExitStack() as until:
        runs = {
            "sentinel": build_sentinel(training, "skip", until),
            "sentinel_continue": build_sentinel(training, "continue", until),
        }
        figures = compare(training.step, runs, rounds, on_cuda=device == "cuda")
    result: dict[str, Any] = {name: figure.ratio for name, figure in figures.items()}
    result["intervals"] = {name: [each.low, each.high] for name, each in figures.items()}
    return result


def build_sentinel(training: Training, action: str, until: ExitStack) -> Run:
    """The step of a twin whose steps are looked at until the stack is closed."""
    from torchfmri import Monitor

    twin = training.twin()
    until.enter_context(Monitor(twin.model, twin.optimizer, every=NEVER, on_nonfinite=action))
    return twin.step


def compare(plain: Run, runs: dict[str, Run], rounds: int, on_cuda: bool) -> dict[str, Figure]:
    """Ratios to the plain run within each round.

    On the CPU by the time that this thread computes: all of the step runs in it, and other
    processes of the machine do not count.
    """
    if on_cuda:
        return measure_ratios(plain, runs, Effort(rounds=rounds))
    everyone = {"plain": plain, "plain_again": plain, **runs}
    order = random.Random(0)
    ratios: dict[str, list[float]] = {name: [] for name in everyone}
    for number in range(rounds + 2):
        names = list(everyone)
        order.shuffle(names)
        seconds = {name: _time(everyone[name]) for name in names}
        if number >= 2:  # the first ones warm up
            for name in everyone:
                ratios[name].append(seconds[name] / seconds["plain"])
    return {name: summarise_ratios(some) for name, some in ratios.items() if name != "plain"}


def _time(run: Run) -> float:
    gc.collect()
    start = time.thread_time()
    run()
    return time.thread_time() - start
