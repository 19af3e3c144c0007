"""The run of a check-up: steps on copies, observed, as long as numbers are finite.

`entry_point` makes a `Checkup` and asks it to `observe`. A step that loses its numbers is run again
from the same random state, buffers and weights, operation by operation, to find the origin;
therefore state is kept before each step, and no optimizer may step in the second run. Our own code
runs inside guards; the user's model, loss and step do not, so their errors reach the user as they
are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from torchfmri._arguments import check_scalar
from torchfmri._checkup.batch_log import BatchLog
from torchfmri._checkup.loss_reading import Leaves, constant_layers, loss_facts, parts_of, score_of
from torchfmri._checkup.mixing import mixed_share
from torchfmri._checkup.users_step import Lost, OwnStep, Split, loss_in_step, split_batch
from torchfmri._checkup.watcher import StepLog, Watcher
from torchfmri._checkup.weights import copied_tables, has_equal_rows, rms
from torchfmri._diagnosis import (
    ConstantLayer,
    LossFacts,
    MisplacedSoftmax,
    Notes,
    Observation,
    Reach,
    RouterActivity,
    Structure,
    WeightFacts,
    describe,
    parameters_of,
    trace_of,
)
from torchfmri._incidents import Buffers, find_origin, is_finite
from torchfmri._model import (
    RandomState,
    TrainingCopies,
    compiled_code_as_eager,
    copy_of_data,
    random_state,
    refuse_meta,
)
from torchfmri._monitor import Monitor
from torchfmri._records import Finding, History, alarm
from torchfmri.exceptions import InspectionError

_END = object()


class Checkup:
    """One run on copies.

    Args:
        original: The user's model, whose weights are those before the first step.
        copies: The copies to run.
        own_step: The user's own training step, or None.
        steps: How many steps at most.
        notes: Takes down what fails in the watching itself.
    """

    def __init__(
        self,
        original: nn.Module,
        copies: TrainingCopies,
        own_step: OwnStep | None,
        steps: int,
        notes: Notes,
    ) -> None:
        self._notes = notes
        self._original, self._copies, self._steps = original, copies, steps
        self._own_step = own_step
        self._structure: Structure = describe(copies.model, copies.optimizers)
        self._monitor = Monitor(copies.model, copies.optimizers, watch="*", history=steps + 1)
        self._watcher = Watcher(copies.model, copies.optimizers, self._structure, notes)
        self._batches = BatchLog()
        self._log = StepLog()
        self._loss = LossFacts()
        self._origin: Finding | None = None
        self._ignored: int | None = None
        self._heads: list[Any] = []
        self._softmaxes: list[MisplacedSoftmax] = []
        self._constants: list[ConstantLayer] = []
        self._value: Any = None
        self._consumed: set[str] = set()
        self._leaves = Leaves(copies, self._watcher)
        self._loss_has_graph = True
        self._buffers = Buffers(copies.model)

    @property
    def steps_taken(self) -> int:
        """How many steps were begun."""
        return len(self._log)

    @property
    def history(self) -> History:
        """The statistics of all steps."""
        return self._monitor.history

    def observe(self, batches: Iterator[Any], check: Callable[[], None]) -> Observation:
        """Run the steps and return what was observed; `check` is called after each step."""
        every = max(1, self._steps // 5)
        with self._watcher.attached(), compiled_code_as_eager():
            for number in range(self._steps):
                batch = next(batches, _END)
                if batch is _END:
                    break
                batch = copy_of_data(batch)
                refuse_meta(self._original, batch)
                detailed = number % every == 0 or number == self._steps - 1
                goes_on = self._take_step(number, batch, detailed)
                check()
                if not goes_on:
                    break
            if len(self._monitor.history) < self.steps_taken - 1:
                self._notes.add("The statistics of some steps are missing: see the warning.")
        return self._observation(self._mixed())

    # -- one step ----------------------------------------------------------------------------

    def _take_step(self, number: int, batch: Any, detailed: bool) -> bool:
        """Take one training step; return whether the run can go on."""
        copies, watcher = self._copies, self._watcher
        split = None if self._own_step is not None else split_batch(batch, copies.loss)
        with self._notes.guard("A batch"):
            self._batches.add(parts_of(batch, split))
        state = random_state()
        self._buffers.keep()
        rates = [float(group["lr"]) for each in copies.optimizers for group in each.param_groups]
        lost, value = False, None
        with ExitStack() as stack:
            stack.enter_context(suppress(Lost))
            step = stack.enter_context(self._monitor.step())
            stack.enter_context(watcher.observing(number, detailed, batch))
            lost = True
            value = self._own(batch) if split is None else self._plain(split)
            if value is not None:
                step.loss(value.detach() if isinstance(value, Tensor) else value)
            lost = False
        self._log.add(watcher.gradients, rates, watcher.trains)
        if number == 0:
            with self._notes.guard("The loss"):
                self._look_at_loss(batch, split, value)
        if number <= 1:
            with self._notes.guard("What the loss depends on"):
                self._leaves.look(value if self._value is None else self._value)
        if detailed and watcher.last_detailed is not None:
            self._heads += watcher.last_detailed.heads
            self._consumed |= watcher.last_detailed.consumed
            if number == 0:
                self._softmaxes = watcher.last_detailed.softmaxes.misplaced
                self._constants = constant_layers(watcher)
            watcher.last_detailed.release()
        lost = lost or (isinstance(value, Tensor) and not is_finite(value))
        updated = not lost and not all(map(is_finite, self._copies.model.parameters()))
        if lost or updated:
            self._trace_back(number, batch, split, state, updated)
            return False
        return self._loss_has_graph

    def _plain(self, split: Split) -> Tensor:
        copies = self._copies
        for optimizer in copies.optimizers:
            optimizer.zero_grad()
        value = self._forward(split)
        self._value = value
        if not value.requires_grad:
            self._loss_has_graph = False
            return value
        if not is_finite(value):
            raise Lost
        value.backward()  # type: ignore[no-untyped-call]
        for optimizer in copies.optimizers:
            optimizer.step()
        return value

    def _forward(self, split: Split) -> Tensor:
        output = self._copies.model(*split.arguments, **split.keywords)
        return loss_in_step(output, split, self._copies.loss)

    def _own(self, batch: Any) -> Any:
        copies = self._copies
        assert self._own_step is not None
        optimizers = copies.optimizers[0] if len(copies.optimizers) == 1 else copies.optimizers
        value = self._own_step(copies.model, batch, optimizers)
        if value is not None and not isinstance(value, (Tensor, float, int)):
            raise InspectionError(
                f"step= returned {type(value).__name__}. Return the loss, as a tensor or a number, "
                "or nothing."
            )
        return check_scalar(value) if isinstance(value, Tensor) else value

    def _trace_back(
        self, number: int, batch: Any, split: Split | None, state: RandomState, updated: bool
    ) -> None:
        """Run the step again, operation by operation, without touching the weights."""
        self._buffers.restore()
        state.restore()

        def again() -> Any:
            if split is not None:
                return self._forward(split)
            for optimizer in self._copies.optimizers:
                optimizer.step = _no_step  # type: ignore[assignment,method-assign]
            with suppress(Lost):
                return self._own(batch)
            return None

        found = None
        with self._notes.guard("The step that was not finite"):
            found = find_origin(
                again, self._copies.model, batch, step=number + int(updated), after_update=updated
            )
        if found is None and updated:
            found = self._bad_update(number)
        self._origin = found or alarm(
            "nonfinite_loss",
            step=number,
            text=f"The loss or a gradient of step {number} was not finite, but was when the step "
            "ran again: it depends on something that changes from run to run.",
            advice="Look for random numbers with a generator of their own, and for memory that is "
            "read before it is written (torch.empty).",
        )

    def _bad_update(self, number: int) -> Finding:
        """Return the finding about weights that only the update made non-finite."""
        parameters = parameters_of(self._copies.model)
        bad = [name for name, each in parameters.items() if not is_finite(each)]
        return alarm(
            "nonfinite_update",
            layers=tuple(dict.fromkeys(name.rpartition(".")[0] for name in bad)),
            step=number + 1,
            text=f"Loss and gradients of step {number} were finite, and {bad[0]!r} was not after "
            "optimizer.step(): the optimizer made it.",
            advice="Look at the settings of the optimizer: eps=0 divides 0 by 0 where a weight has "
            "no gradient yet, and too high a learning rate overflows.",
            evidence={"parameters": len(bad)},
        )

    # -- the loss, once ----------------------------------------------------------------------

    def _look_at_loss(self, batch: Any, split: Split | None, value: Any) -> None:
        value = value if self._value is None else self._value
        called = [name for name in self._watcher.called if self._owns_matrix(name)]
        parts = parts_of(batch, split)
        self._loss = loss_facts(self._watcher, parts, split is not None, value, called)
        if self._watcher.last_detailed is not None:
            self._ignored = self._watcher.last_detailed.loss.ignored
        if split is not None and 0 <= self._loss.value <= 1 and self._loss.inner is None:
            squashed = self._loss.output_function in ("sigmoid", "softmax")
            score = score_of(self._copies.loss, self._watcher.output, split.target, squashed)
            self._loss = replace(self._loss, score=score)

    def _owns_matrix(self, layer: str) -> bool:
        structure = self._structure
        if "Embedding" in structure.kinds.get(layer, ""):
            return False
        return any(
            len(each.shape) >= 2 and layer in structure.aliases.get(each.name, (each.layer,))
            for each in structure.parameters.values()
        )

    # -- the end -----------------------------------------------------------------------------

    def _mixed(self) -> float:
        """Return how much samples influence each other in the model after the run."""
        call = self._watcher.last_call
        if call is None or self._origin is not None or not self._batches.varies:
            return math.nan
        try:
            return mixed_share(self._copies.model, *call)
        except Exception as error:
            self._notes.add(
                "Whether samples influence each other was not checked: in evaluation mode the "
                f"model does not run ({type(error).__name__}: {error})."
            )
            return math.nan

    def _observation(self, mixed: float) -> Observation:
        watcher = self._watcher
        units = [log.activity() for log in watcher.units.values()]
        reach = Reach(
            called=tuple(watcher.called),
            without_graph=frozenset(watcher.without_graph),
            consumed=frozenset(self._consumed),
            unregistered=self._leaves.unregistered(),
            loss_has_graph=self._loss_has_graph,
            linear_pairs=tuple(watcher.linear_pairs),
            has_residual=self._leaves.has_residual,
        )
        place = {layer: index for index, layer in enumerate(watcher.called)}
        routers = [
            RouterActivity(name, experts, np.array(watcher.loads[name]))
            for name, experts in self._structure.experts.items()
            # What runs after those that it would choose from is a head, not a router.
            if name in watcher.loads
            and place.get(name, -1) < min(place.get(each, len(place)) for each in experts)
        ]
        return Observation(
            trace=trace_of(self._monitor.history),
            structure=self._structure,
            units=[each for each in units if each is not None],
            heads=self._heads,
            routers=routers,
            weights=self._weights(),
            reach=reach,
            loss=self._loss,
            data=replace(
                self._batches.facts(self._original, watcher.reader, self._ignored),
                mixed=mixed,
                given=dict(watcher.given),
            ),
            steps=self._log.facts(watcher, self._batches.samples),
            copied_tables=copied_tables(self._original),
            norms=[log.facts() for log in watcher.norms.values()],
            softmaxes=self._softmaxes,
            constants=self._constants,
            origin=self._origin,
        )

    def _weights(self) -> dict[str, WeightFacts]:
        before, after = parameters_of(self._original), parameters_of(self._copies.model)
        found = {}
        for name, start in before.items():
            end = after[name].detach()
            found[name] = WeightFacts(
                rms=rms(start),
                last_rms=rms(end),
                equal_rows=has_equal_rows(start),
                still_equal_rows=has_equal_rows(end),
                moved=float((start.detach() != end).float().mean()) if end.numel() else 0.0,
                gradient=self._watcher.gradients.kinds.get(name, "none"),
            )
        return found


def _no_step(*_: Any, **__: Any) -> None:
    """Do nothing: it replaces an optimizer's step while a training step is traced back."""
