"""Run an experiment: several variants, several seeds, several processes, and none of them twice.

`torchfmri routing` makes an `Experiment`. Each run writes its own result file, so an experiment
that was interrupted goes on where it was. Runs are ordered seed by seed: an unfinished experiment
then has all variants to compare. Every process has one thread, so that results do not depend on
`workers`. How progress is shown may change freely.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from torchfmri._arguments import check_device, check_number
from torchfmri._model import one_thread
from torchfmri._text import Progress
from torchfmri.exceptions import InspectionError
from torchfmri.routing.experiment.training_run import VARIANTS, RunPlan, TrainingRun

Job: TypeAlias = tuple[RunPlan, Path, str, int]
"""The arguments of a `TrainingRun`."""
_TOLD = 50
"""How often a run tells how far it is."""
_steps: Any = None  # in a process of the pool: the queue to tell it through


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
        jobs = [(plan, self.folder, self.device, self.checkpoint_every) for plan in self.plans]
        done, total = [0] * len(jobs), len(jobs) * self.plan.steps
        with Progress("routing", total) as progress, one_thread():

            def show(number: int, step: int) -> None:
                done[number] = step
                progress.at(sum(done), total, jobs[number][0].name)

            if self.workers > 1:
                return self._run_in_processes(jobs, show)
            return [_train(job, partial(show, number)) for number, job in enumerate(jobs)]

    def _run_in_processes(
        self, jobs: list[Job], show: Callable[[int, int], None]
    ) -> list[dict[str, Any]]:
        """Run several at a time; the first error ends all of them."""
        context = multiprocessing.get_context("spawn")
        steps = context.SimpleQueue()
        pool = ProcessPoolExecutor(self.workers, context, _begin, (steps,))
        try:
            futures = [pool.submit(_work, job, number) for number, job in enumerate(jobs)]
            pending = set(futures)
            while pending:
                ended, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                while not steps.empty():
                    show(*steps.get())
                for future in ended:
                    future.result()
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _train(job: Job, tell: Callable[[int], None]) -> dict[str, Any]:
    """Return the result of one run; `tell` gets its step now and then."""
    steps = job[0].steps

    def report(step: int) -> None:
        if step % max(1, steps // _TOLD) == 0 or step == steps:
            tell(step)

    return TrainingRun(*job).run(report)


def _begin(steps: Any) -> None:
    """Prepare a process, before its first run."""
    global _steps
    _steps = steps
    torch.set_num_threads(1)


def _work(job: Job, number: int) -> dict[str, Any]:
    return _train(job, lambda step: _steps.put((number, step)))
