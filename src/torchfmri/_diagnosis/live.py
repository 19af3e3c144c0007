"""Diagnosis without a check-up: while a model trains, and of one inspection.

`Monitor` calls `add` after each step and asks for findings. Only the diagnoses in `registry.LIVE`
run, on the last `WINDOW` steps and every `EVERY` steps, so the cost stays constant (1.01 times a
Monitor without it, `benchmarks diagnosis`). A finding that was made stays, even after its steps
left the window. The first step that turns non-finite is looked at immediately. `Inspector.diagnose`
calls `diagnose_inspection`, which runs all diagnoses on a history of one step; parts that one pass
cannot know stay empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from torchfmri._diagnosis.observation import Observation, Reach, layers_of
from torchfmri._diagnosis.registry import LIVE, find, fold
from torchfmri._diagnosis.report import Diagnosis
from torchfmri._diagnosis.structure import Structure, describe
from torchfmri._diagnosis.trace import RunTrace, trace_of
from torchfmri._records import Finding, History, Inspection, Series, Step
from torchfmri.statistics import Statistics

WINDOW = 64
"""How many steps are looked at: enough for every diagnosis, at a constant cost."""
EVERY = 8
"""How many steps pass between two looks, unless numbers stop being finite."""
_PARAMETERS = ("parameter_gradients", "parameters")


class LiveDiagnosis:
    """Findings of a run so far; a finding stays once it was made.

    Args:
        structure: Says what the model is; called at the first step.
    """

    def __init__(self, structure: Callable[[], Structure]) -> None:
        self._describe = structure
        self._structure: Structure | None = None
        self._trace = RunTrace(WINDOW)
        self._known: dict[tuple[str, tuple[str, ...]], Finding] = {}
        self._fresh: list[Finding] = []
        self._waiting = 0
        self._nonfinite = False

    def add(self, step: Step, series: Sequence[Series]) -> None:
        """Take in a step; looks at the last ones every now and then."""
        if self._structure is None:
            self._structure = self._describe()
        self._trace.add(step, series)
        self._waiting += 1
        turned = not self._nonfinite and self._trace.ends_nonfinite(_PARAMETERS)
        self._nonfinite = self._nonfinite or turned
        if self._waiting >= EVERY or turned:
            self._look()

    def findings(self, origins: Sequence[Finding] = ()) -> list[Finding]:
        """Return all findings so far, the worst first.

        Args:
            origins: Findings of steps that were traced back, which know more than statistics.
        """
        if self._waiting:
            self._look()
        found = list(self._known.values())
        if origins:
            found = [each for each in found if not each.problem.startswith("nonfinite")]
        return fold([*found, *_once_each(origins)])

    def known(self) -> list[Finding]:
        """Return the findings made so far, oldest first, without looking again."""
        return list(self._known.values())

    def take_fresh(self, held: Collection[int] = ()) -> list[Finding]:
        """Return the findings that were made since this was last asked.

        Args:
            held: Steps that were held as not finite, which were reported already.
        """
        fresh, self._fresh = self._fresh, []
        return [
            each
            for each in fresh
            if not (each.problem.startswith("nonfinite") and each.step in held)
        ]

    def _look(self) -> None:
        self._waiting = 0
        if self._structure is None:
            return
        for finding in find(Observation(self._trace, self._structure), LIVE):
            for each in (finding, *finding.consequences):
                key = (each.problem, each.layers)
                named_before = any(problem == each.problem for problem, _ in self._known)
                if key in self._known or (named_before and each.problem in _ONCE):
                    continue
                self._known[key] = replace(each, consequences=())  # they are known by themselves
                self._fresh.append(each)


def _once_each(origins: Sequence[Finding]) -> list[Finding]:
    """Return each finding once, with a remark on later steps where it came again.

    Two are the same if the same weights are not finite, or the same layers and the origin was not
    looked for.
    """
    found: dict[tuple[Any, ...], list[Finding]] = {}
    for number, each in enumerate(origins):
        key: tuple[Any, ...] = (each.problem, each.evidence.get("parameter"), each.layers)
        if "operation" in each.evidence and key[1] is None:
            key = (number,)
        found.setdefault(key, []).append(each)
    return [
        same[0]
        if len(same) == 1
        else replace(
            same[0],
            text=f"{same[0].text} It was the same in {len(same) - 1} later step"
            f"{'s' if len(same) > 2 else ''}, up to step {same[-1].step}.",
        )
        for same in found.values()
    ]


_ONCE = {
    *("nonfinite_forward", "nonfinite_loss", "nonfinite_backward", "nonfinite_weights"),
    *("vanishing_gradients", "exploding_gradients", "activation_growth", "loss_spike"),
    "outlier_batch",
}
"""Problems of the whole run, whose layers may vary a little from look to look."""


def diagnose_inspection(inspection: Inspection, model: nn.Module) -> Diagnosis:
    """Return what one inspection tells; what was not watched cannot be judged."""
    found: dict[Series, Statistics] = {}
    for layer, record in inspection.items():
        for what in record.what:
            if what in _PARAMETERS:
                for name, value in record.parameter_values(what).items():
                    full = f"{layer}.{name}" if layer else name
                    found[Series(full, what)] = value.statistics
            elif (statistics := record.tensor_statistics(what)) is not None:
                found[Series(layer, what)] = statistics
    history = History(1)
    history.append(Step(0, math.nan if inspection.loss is None else inspection.loss), found)
    reach = Reach(
        called=layers_of(inspection.calls()),
        without_graph=frozenset(),
        consumed=frozenset(),
        unregistered=(),
        loss_has_graph=True,
    )
    seen = Observation(trace_of(history), describe(model, None), reach=reach)
    return Diagnosis(
        model=inspection.model,
        findings=tuple(find(seen)),
        steps=1,
        seconds=0.0,
        history=history,
        observation=seen,
    )
