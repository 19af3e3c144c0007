"""One training run of the experiment, and the table of variants to compare.

`Experiment` starts these, also in other processes. A run can be killed at any moment: it goes on
from its last checkpoint, and a finished one is read from its result file. Both files hold the whole
`RunPlan`, and a file of another plan is not used. Fields of `RunPlan` are part of these files; a
new one makes older results count as another plan's. Everything random is drawn from the seed and
the step. What is measured may grow: results are read by key. A new variant is an entry of
`VARIANTS`; their names stand in result files and on the command line: do not rename them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchfmri._files import new_file, read_regular, size_of
from torchfmri._records import History
from torchfmri.exceptions import FileFormatError
from torchfmri.routing.experiment.tasks import IGNORED, GridPuzzles, SequenceTasks, Tasks
from torchfmri.routing.experiment.training_step import TrainingStep, on_own_stream
from torchfmri.routing.language_model import RoutingConfig, RoutingLanguageModel
from torchfmri.routing.learning_dynamics import (
    LearningDynamics,
    computation_parameters,
    routing_parameters,
)
from torchfmri.routing.meta_loss import (
    Divergence,
    MetaLoss,
    Price,
    agreement,
    harmony,
    helpfulness,
    worth_over_tokens,
)
from torchfmri.routing.prototype_map import map_prototypes
from torchfmri.routing.routing_history import (
    append_rates,
    history_from_data,
    history_to_data,
    selectivity,
)
from torchfmri.routing.unit_rates import UnitRates


@dataclass(frozen=True)
class Variant:
    """One way to train the routing.

    Attributes:
        title: In a few words.
        meta_loss: What it learns from; None: from the main loss only.
        signal: Whose learning cost.
        mode: Whether the main loss trains it too ("joint") or not ("strict").
    """

    title: str
    meta_loss: MetaLoss | None
    signal: Literal["token", "aggregate"] = "token"
    mode: Literal["strict", "joint"] = "strict"


VARIANTS: Mapping[str, Variant] = {
    "token": Variant("strict, each token's own cost", Divergence()),
    "aggregate": Variant("strict, cost of the batch", Divergence(), "aggregate"),
    "token-and-unit": Variant(
        "strict, scaled over tokens and units", Divergence(worth_over_tokens, "tokens_and_units")
    ),
    "joint-token": Variant(
        "main loss and each token's own cost", Divergence(weight=0.3), mode="joint"
    ),
    "dense": Variant("main loss alone", None, mode="joint"),
    "l1-weak": Variant("main loss and a lower price", Price(0.1), mode="joint"),
    "l1": Variant("main loss and a price on weights", Price(0.4), mode="joint"),
    "l1-strong": Variant("main loss and a higher price", Price(2.0), mode="joint"),
    "helpfulness": Variant(
        "main loss and first-order effect", Divergence(helpfulness, weight=0.3), mode="joint"
    ),
    "agreement": Variant(
        "main loss and agreeing gradients", Divergence(agreement, weight=0.3), mode="joint"
    ),
    "agreement-strong": Variant(
        "main loss and agreeing gradients, more of it", Divergence(agreement), mode="joint"
    ),
    "harmony": Variant("main loss and no conflict", Divergence(harmony, weight=0.3), mode="joint"),
}


RESULT_BYTES = 256 << 20
"""No result of a run is larger."""
MEASUREMENTS = 25
"""How often the routing is measured during a run."""
_TEST_SEED = 1 << 40


@dataclass(frozen=True)
class RunPlan:
    """Everything that a run depends on, except where it runs.

    Attributes:
        variant: A key of `VARIANTS`.
        seed: The seed of parameters and data.
        steps: How many training steps.
        batch: Sequences per step.
        hidden_size: Size of the residual stream.
        blocks: How many blocks.
        heads: How many heads.
        lengths: Lengths of the sequence tasks.
        puzzles: A folder of ARC tasks to learn instead; "" for the sequence tasks.
        learning_rate: Of everything but the routing.
        meta_learning_rate: Of the routing.
        tested: Sequences per group to be judged by.
    """

    variant: str
    seed: int = 0
    steps: int = 2500
    batch: int = 32
    hidden_size: int = 128
    blocks: int = 4
    heads: int = 4
    lengths: tuple[int, ...] = (6, 10, 14)
    puzzles: str = ""
    learning_rate: float = 2e-3
    meta_learning_rate: float = 2e-3
    tested: int = 1024

    @property
    def name(self) -> str:
        """The stem of the names of its files."""
        return f"{self.variant}-{self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data that JSON can hold."""
        return {**asdict(self), "lengths": list(self.lengths)}

    def tasks(self) -> Tasks:
        """Return the tasks that are learned."""
        return GridPuzzles.read(Path(self.puzzles)) if self.puzzles else SequenceTasks(self.lengths)


class TrainingRun:
    """A run that can be stopped and goes on where it was.

    Args:
        plan: What to train.
        folder: Where results and checkpoints are written.
        device: Where to train.
        checkpoint_every: Steps between two checkpoints.
    """

    def __init__(
        self, plan: RunPlan, folder: Path, device: str = "cpu", checkpoint_every: int = 500
    ) -> None:
        self._plan, self._device, self._every = plan, device, checkpoint_every
        self._result, self._checkpoint = (folder / f"{plan.name}{end}" for end in (".json", ".pt"))
        self._tasks = plan.tasks()
        torch.manual_seed(plan.seed)
        config = RoutingConfig(self._tasks.vocab_size, plan.hidden_size, plan.blocks, plan.heads)
        self._model = RoutingLanguageModel(config).to(device)
        options: dict[str, Any] = {
            "fused": True,
            "capturable": torch.device(device).type == "cuda",
        }
        computation, routing = computation_parameters(self._model), routing_parameters(self._model)
        # The scale of a gate means nothing and that of a prototype a lot: no decay of either.
        self._optimizers = (
            torch.optim.AdamW(computation, lr=plan.learning_rate, **options),
            torch.optim.AdamW(routing, lr=plan.meta_learning_rate, weight_decay=0.0, **options),
        )
        self._history = History(length=plan.steps + 2)
        self._seconds = 0.0

    def run(self, report: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
        """Return the result, read from its file if the run is finished already.

        Args:
            report: Called with the number of steps done.
        """
        finished = read_result(self._result, self._plan)
        if finished is not None:
            report(self._plan.steps)
            return finished
        on_own_stream(self._device, lambda: self._train(report))
        data = self._judge()
        with new_file(self._result) as new:
            new.write_text(json.dumps(data), encoding="utf-8")
        self._checkpoint.unlink(missing_ok=True)
        return data

    def _train(self, report: Callable[[int], None]) -> None:
        first, begun = self._resume(), time.perf_counter()
        variant, plan = VARIANTS[self._plan.variant], self._plan
        dynamics = LearningDynamics(
            self._model,
            *self._optimizers,
            meta_loss=variant.meta_loss,
            signal=variant.signal,
            mode=variant.mode,
        )
        with dynamics:
            train = TrainingStep(self._model, dynamics, self._device)
            for step in range(first, plan.steps):
                batch = self._tasks.train(plan.batch, _generator(plan.seed, step))
                loss = train(batch.to(self._device))
                if step % max(1, plan.steps // MEASUREMENTS) == 0 or step + 1 == plan.steps:
                    self._measure(step, loss)
                if (step + 1) % self._every == 0:
                    self._keep(step + 1, self._seconds + time.perf_counter() - begun)
                report(step + 1)
        self._seconds += time.perf_counter() - begun

    # -- stopping and going on -----------------------------------------------------------------

    def _keep(self, step: int, seconds: float) -> None:
        state = {
            "plan": self._plan.to_dict(),
            "step": step,
            "seconds": seconds,
            "model": self._model.state_dict(),
            "optimizers": [each.state_dict() for each in self._optimizers],
            "history": history_to_data(self._history),
        }
        with new_file(self._checkpoint) as new:
            torch.save(state, new)

    def _resume(self) -> int:
        """Load the checkpoint, if there is one, and return the step to go on with."""
        if not self._checkpoint.exists():
            return 0
        size_of(self._checkpoint)  # a pipe would be waited for
        try:
            state = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
            plan = state["plan"]
        except Exception as error:  # whatever torch makes of a damaged file, or of another one
            name = self._checkpoint.name
            reason = "it is damaged. Move it away, and the run begins anew"
            raise FileFormatError(name, reason) from error
        if plan != self._plan.to_dict():
            return 0  # of another experiment in the same folder: overwritten by the next one
        self._model.load_state_dict(state["model"])
        for optimizer, kept in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self._history = history_from_data(state["history"], self._plan.steps + 2)
        self._seconds = state["seconds"]
        return int(state["step"])

    # -- judging -------------------------------------------------------------------------------

    def _measure(self, step: int, loss: Tensor) -> None:
        """Add a step to the history, from a small batch of every group."""
        rates, _ = self._test(64)
        append_rates(self._history, step, float(loss), rates)

    @torch.no_grad()
    def _test(self, size: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return unit rates by layer and accuracy by group, on the same data for every run."""
        counter = UnitRates(self._model, len(self._tasks.names))
        accuracy: dict[str, Any] = {}
        right_by_task = torch.zeros(2, len(self._tasks.names), dtype=torch.float64)
        for number, group in enumerate(self._tasks.groups):
            batch = self._tasks.test(group, size, _generator(number, _TEST_SEED))
            batch = batch.to(self._device)
            call = partial(self._model, batch.ids, batch.mask)
            out: Any = counter.run(call, batch.tasks, batch.mask)
            wanted = batch.labels[:, 1:]
            counted = wanted != IGNORED
            right = (out.logits[:, :-1].argmax(-1) == wanted) & counted
            whole = right.sum(1) == counted.sum(1)
            accuracy[group] = {
                "tokens": float(right.sum() / counted.sum()),
                "whole": float(whole.float().mean()),
            }
            one_hot = torch.nn.functional.one_hot(batch.tasks, len(self._tasks.names)).double()
            sums = torch.stack((right.sum(1), counted.sum(1))).double()
            right_by_task += (sums @ one_hot).cpu()
        shares = (right_by_task[0] / right_by_task[1].clamp_min(1)).tolist()
        accuracy["tasks"] = dict(zip(self._tasks.names, shares, strict=True))
        return {layer: each.cpu() for layer, each in counter.rates.items()}, accuracy

    def _judge(self) -> dict[str, Any]:
        rates, accuracy = self._test(self._plan.tested)
        batch = self._tasks.test(self._tasks.groups[0], 64, _generator(0, _TEST_SEED + 1))
        batch = batch.to(self._device)
        maps = map_prototypes(self._model, batch.ids, batch.labels)
        groups = [accuracy[group] for group in self._tasks.groups]
        return {
            "plan": self._plan.to_dict(),
            "tasks": list(self._tasks.names),
            "seconds": self._seconds,
            "loss": float(self._history.loss[-1]),
            "accuracy": sum(each["tokens"] for each in groups) / len(groups),
            "accuracy_of_whole_answers": sum(each["whole"] for each in groups) / len(groups),
            "accuracy_by": accuracy,
            **judge_routing(rates, self._plan.blocks),
            "rates": {layer: _rounded(each) for layer, each in rates.items()},
            "prototypes": [each.to_dict() for each in maps],
            "history": history_to_data(self._history),
        }


def judge_routing(rates: Mapping[str, Tensor], blocks: int) -> dict[str, Any]:
    """Return activation, selectivity and dead units, from layer -> (task, o) in model order.

    Middle blocks are all but the first and the last. Relative selectivity is that of the living
    units, divided by their rate: it can be compared between sparse and dense models.
    """
    stacked = torch.stack(list(rates.values()))  # (layer, task, o)
    by_block = stacked.view(blocks, -1).mean(1)
    mean, spread = stacked.mean(1), torch.stack([selectivity(each) for each in stacked])
    living = mean > 0
    relative = (spread / mean.clamp_min(1e-12))[living]
    middle = by_block[1:-1] if blocks > 2 else by_block
    return {
        "activation_by_block": by_block.tolist(),
        "activation": float(by_block.mean()),
        "middle_activation": float(middle.mean()),
        "selectivity": float(spread.mean()),
        "relative_selectivity": float(relative.mean()) if len(relative) else 0.0,
        "dead_units": float((~living).float().mean()),
    }


def read_result(path: Path, plan: RunPlan) -> dict[str, Any] | None:
    """Return the result of exactly this plan, if it is there."""
    if not path.exists():
        return None
    data = load_json(path)
    if not isinstance(data, dict) or "plan" not in data:
        raise FileFormatError(path.name, "it is not a result of a run. Move it away")
    return data if data["plan"] == plan.to_dict() else None


def load_json(path: Path) -> Any:
    """Return what a result says; a loss may be NaN, which only Python's JSON has.

    Raises:
        FileFormatError: It is not JSON, not a regular file, or too large.
    """
    content = read_regular(path, RESULT_BYTES)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(path.name, "it is not JSON: it is damaged. Move it away") from error


def _generator(seed: int, step: int) -> torch.Generator:
    """Return the generator of one step, the same whenever it is run."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def _rounded(rates: Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in rates.tolist()]
