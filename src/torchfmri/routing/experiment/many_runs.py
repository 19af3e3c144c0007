"""Run an experiment: several variants, several seeds, several processes, and none of them twice.

`torchfmri routing` makes an `Experiment`. Each run writes its own result file, so an experiment
that was interrupted goes on where it was. Runs are ordered seed by seed: an unfinished experiment
then has all variants to compare. Every process has one thread, so that results do not depend on
`workers`. How progress is shown may change freely.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchfmri._arguments import check_device, check_number
from torchfmri._model import one_thread
from torchfmri._text import Progress
from torchfmri.exceptions import InspectionError
from torchfmri.routing.experiment.training_run import VARIANTS, RunPlan, TrainingRun

_TICKS = 50
"""Into how many parts the progress bar divides a run."""
_counters: Any = None


@dataclass(frozen=True)
class Experiment:
    """The runs of an experiment, and where they are kept.

    Attributes:
        plan: What all runs have in common; its variant and seed are replaced.
        variants: Keys of `VARIANTS`.
        seeds: How many seeds, from 0.
        folder: Where results and checkpoints are written.
        device: Where to train, such as "cpu" or "cuda".
        workers: Processes at a time, each on one thread.
        checkpoint_every: Steps between two checkpoints of a run.
    """

    plan: RunPlan
    variants: tuple[str, ...]
    seeds: int
    folder: Path
    device: str = "cpu"
    workers: int = 1
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        for name in self.variants:
            if name not in VARIANTS:
                known = ", ".join(VARIANTS)
                raise InspectionError(f"There is no variant {name!r}; there are {known}.")
        for name in ("seeds", "workers", "checkpoint_every"):
            check_number(name, getattr(self, name), 1, "give a whole number of at least 1")
        for name in ("steps", "batch", "hidden_size", "blocks", "heads"):
            check_number(name, getattr(self.plan, name), 1, "give a whole number of at least 1")
        check_device("device", self.device)

    @property
    def plans(self) -> list[RunPlan]:
        """One per run: seed by seed, so that an unfinished experiment has all variants."""
        return [
            replace(self.plan, variant=variant, seed=seed)
            for seed in range(self.seeds)
            for variant in self.variants
        ]

    def run(self) -> list[dict[str, Any]]:
        """Return the results of all runs, in the order of `plans`; finished runs are only read."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.workers == 1:
            return self._run_here()
        return self._run_in_processes()

    def _run_here(self) -> list[dict[str, Any]]:
        results = []
        with Progress("routing", len(self.plans) * _TICKS) as progress, one_thread():
            shown = _Shown(progress, len(self.plans))
            for number, plan in enumerate(self.plans):
                results.append(self._training(plan).run(partial(shown.show, number, plan)))
        return results

    def _run_in_processes(self) -> list[dict[str, Any]]:
        context = multiprocessing.get_context("spawn")
        counters = context.Array("q", len(self.plans))
        pool = ProcessPoolExecutor(self.workers, context, _begin, (counters,))
        plans = self.plans
        with Progress("routing", len(plans) * _TICKS) as progress:
            shown = _Shown(progress, len(plans))
            futures = [
                pool.submit(_work, self._arguments(plan), number)
                for number, plan in enumerate(plans)
            ]
            try:
                _watch(futures, plans, counters, shown)
                return [future.result() for future in futures]
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _arguments(self, plan: RunPlan) -> tuple[RunPlan, Path, str, int]:
        return plan, self.folder, self.device, self.checkpoint_every

    def _training(self, plan: RunPlan) -> TrainingRun:
        return TrainingRun(*self._arguments(plan))


class _Shown:
    """The progress of all runs in the parts that the bar shows."""

    def __init__(self, progress: Progress, runs: int) -> None:
        self._progress, self._ticks = progress, [0] * runs

    def show(self, number: int, plan: RunPlan, step: int) -> None:
        """Move the bar to where this run is."""
        wanted = int(step / plan.steps * _TICKS)
        for _ in range(wanted - self._ticks[number]):
            self._progress.step(plan.name)
        self._ticks[number] = max(wanted, self._ticks[number])


def _watch(
    futures: Sequence[Future[Any]], plans: Sequence[RunPlan], counters: Any, shown: _Shown
) -> None:
    """Show progress until all runs are done; the first error ends it."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
        for number, plan in enumerate(plans):
            shown.show(number, plan, counters[number])
        for future in done:
            future.result()


def _begin(counters: Any) -> None:
    """Prepare a process, before its first run."""
    global _counters
    _counters = counters
    torch.set_num_threads(1)


def _work(arguments: tuple[RunPlan, Path, str, int], number: int) -> dict[str, Any]:
    told = 0.0

    def report(step: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told > 0.2 or step == arguments[0].steps:
            _counters[number], told = step, now

    return TrainingRun(*arguments).run(report)
