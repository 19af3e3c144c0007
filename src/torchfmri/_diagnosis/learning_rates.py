"""Learning rates of groups and over the steps; diagnoses of rates that are too low and of momentum.

`registry` calls each diagnosis; other files about the optimizer read the numbers and words above
them. Rates are compared with the nearest other group, not with the mean: layer-wise decay is a
ladder of rates without a wide step. Rates come from the run if there was one, because a scheduler's
first rate may be 0. A rate that is low for one group only is reported for that group, one that is
low for all is reported once. Warm-ups and schedules that end at 0 on purpose must stay silent.
Texts and advice may be changed freely; how far groups may be apart is a cut, and conditions change
only with the suite of `benchmarks diagnosis`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.observation import Floats, Observation, layers_of
from torchfmri._diagnosis.signals import LEAST_STEPS, has_gradients, median, update_ratios
from torchfmri._records import Finding, warn
from torchfmri._text import listed, percent

# Advice that several diagnoses give.
SET_RATE = (
    "Set lr; if a scheduler sets it, see that scheduler.step() is called and where its warm-up "
    "begins."
)
TRAIN_LENGTH = "Give the scheduler the number of steps that you train for (steps, not epochs)."
FINER_WEIGHTS = (
    "Keep the weights in float32 (autocast computes in bfloat16 all the same), or raise the "
    "learning rate."
)


@dataclass(frozen=True)
class FarGroup:
    """A group whose learning rate is far from that of every other.

    Attributes:
        rate: Its learning rate.
        nearest: The learning rate of the group that is nearest to it.
        parameters: The names of its parameters.
        layers: The layers that own them.
    """

    rate: float
    nearest: float
    parameters: tuple[str, ...]
    layers: tuple[str, ...]

    @property
    def above(self) -> bool:
        """Whether it is larger than the nearest."""
        return self.rate > self.nearest


def far_groups(seen: Observation) -> list[FarGroup]:
    """Return the groups that are far from all others; a ladder of rates has none."""
    rates = np.array([_usual_rate(seen, place) for place in range(len(seen.structure.groups))])
    facts = seen.structure.parameters
    found = []
    for place, group in enumerate(seen.structure.groups):
        others = np.delete(rates, place)
        others = others[others > 0]
        if not len(others) or not math.isfinite(rates[place]) or rates[place] < 0:
            continue
        with np.errstate(divide="ignore"):
            gaps = np.abs(np.log(others) - np.log(rates[place]))
        if not gaps.min() >= math.log(cuts.GROUP_GAP):
            continue
        names = tuple(name for name in group["parameters"] if name in facts)
        layers = layers_of(facts[name] for name in names)
        nearest = float(others[int(gaps.argmin())])
        found.append(FarGroup(float(rates[place]), nearest, names, layers))
    return found


def _usual_rate(seen: Observation, place: int) -> float:
    """Return the largest rate that a group had in the run; without a run, that of its settings."""
    if seen.steps is not None and seen.steps.rates.shape[1] == len(seen.structure.groups):
        column = seen.steps.rates[:, place]
        return float(column.max()) if len(column) else math.nan
    return float(seen.structure.groups[place]["lr"])


def low_groups(seen: Observation) -> list[tuple[FarGroup, float]]:
    """Return the groups far below the others that hardly move, with their update / weight."""
    found = []
    for group in far_groups(seen):
        ratios = update_ratios(seen, group.parameters)
        typical = median(ratios)
        enough = int(np.isfinite(ratios).sum()) >= LEAST_STEPS
        if not group.above and (group.rate == 0 or (enough and typical < cuts.UPDATE_LOW)):
            found.append((group, typical))
    return found


def rate_fell(seen: Observation) -> int | None:
    """Return the place since which the learning rate is a tiny part of its largest; or None.

    That is for a quarter of the steps, and after its largest: a warm-up comes before.
    """
    rates: Floats = np.zeros(0) if seen.steps is None else seen.steps.learning_rate
    if not len(rates) or not np.isfinite(rates).all() or not rates.max() > 0:
        return None
    low = rates < cuts.RATE_LEFT * np.maximum.accumulate(rates)
    if not low[-1]:
        return None
    high = np.flatnonzero(~low)
    first = int(high[-1]) + 1
    return first if len(rates) - first >= max(1, len(rates) // 4) else None


def rate_in_words(seen: Observation) -> str:
    """Return the largest learning rate in brackets; "" if there is none."""
    rates = {group["lr"] for group in seen.structure.groups if math.isfinite(group["lr"])}
    return f" ({max(rates):g})" if rates else ""


_BEGAN = 100
"""Updates this many times above the cut at the start show that the run did train at first."""


def learning_rate_too_low(seen: Observation) -> Iterator[Finding]:
    """Find updates so small that nothing will come of them."""
    ratios = update_ratios(seen)
    typical = _too_low(seen, ratios)
    if typical is None or rate_fell(seen) is not None:
        return
    yield warn(
        "learning_rate_too_low",
        step=int(seen.trace.steps[0]),
        text=f"Each step changes the weights by {percent(typical)} of their size (usual is about "
        "0.1 % to 1 %).",
        advice=f"Raise the learning rate{rate_in_words(seen)}, or look for what makes the "
        "gradients so small.",
        evidence={"update_ratio": typical},
    )


def group_rate_too_low(seen: Observation) -> Iterator[Finding]:
    """Find a group of parameters that hardly changes, beside others that learn."""
    groups = low_groups(seen)
    if groups and _too_low(seen, update_ratios(seen)) is not None:
        return  # all groups are too slow, and `learning_rate_too_low` reports them together
    first = int(seen.trace.steps[0]) if len(seen.trace) else 0
    for group, typical in groups:
        if group.rate == 0:
            yield warn(
                "learning_rate_zero",
                layers=group.layers,
                step=first,
                text=f"The group of {listed(group.layers)} has a learning rate of 0 (others have "
                f"{group.nearest:g}): it is not trained.",
                advice="Set lr for this group; to freeze on purpose set requires_grad=False, which "
                "is cheaper.",
            )
            continue
        yield warn(
            "learning_rate_too_low",
            layers=group.layers,
            step=first,
            text=f"Each step changes the weights of {listed(group.layers)} by {percent(typical)} "
            f"of their size (usual is about 0.1 % to 1 %): their group has the learning rate "
            f"{group.rate:g}, the nearest other {group.nearest:g}.",
            advice=f"Raise the learning rate of this group ({group.rate:g}); to freeze it on "
            "purpose set requires_grad=False.",
            evidence={"update_ratio": typical, "rate": group.rate, "nearest": group.nearest},
        )


def learning_rate_fell(seen: Observation) -> Iterator[Finding]:
    """Find a schedule that brings the learning rate to next to nothing long before the end."""
    place = rate_fell(seen)
    if place is None or seen.steps is None or len(seen.steps.learning_rate) < LEAST_STEPS:
        return
    rates = seen.steps.learning_rate
    if not rates[-1] > 0:  # another diagnosis reports a rate of 0
        return
    step = int(seen.trace.steps[min(place, len(seen.trace) - 1)])
    yield warn(
        "learning_rate_too_low",
        step=step,
        text=f"The learning rate fell from {rates.max():.2g} to {rates[-1]:.2g} in {len(rates)} "
        f"steps, and is below a thousandth of what it was since step {step}: hardly anything is "
        "learnt any more.",
        advice="Step a scheduler that counts epochs once per epoch, not per batch; or give it the "
        "number of steps that you train for.",
        evidence={"largest": float(rates.max()), "last": float(rates[-1])},
    )


def momentum_too_high(seen: Observation) -> Iterator[Finding]:
    """Find a momentum that forgets nothing."""
    for group in seen.structure.groups:
        if not group.get("momentum", 0.0) > cuts.MOMENTUM:
            continue
        yield warn(
            "momentum_too_high",
            step=None,
            text=f"momentum={group['momentum']:g} keeps every gradient for ever (or for more than "
            "a thousand steps): updates grow without end and overshoot.",
            advice="Set momentum to 0.9 (0.99 at most).",
            evidence={"momentum": group["momentum"]},
        )
        return


def _too_low(seen: Observation, ratios: Floats) -> float | None:
    """Return the typical update / weight if it is far too small and not rising; else None."""
    known = ratios[np.isfinite(ratios) & has_gradients(seen)]
    if len(known) < LEAST_STEPS or not (known > 0).any():
        return None
    typical = median(known)
    rates = seen.steps.learning_rate if seen.steps is not None else np.array([])
    warming_up = len(rates) > 1 and rates[-1] > rates[0]
    if median(known[:3]) > _BEGAN * cuts.UPDATE_LOW:
        return None  # it was high enough, and fell
    if typical == 0 or typical >= cuts.UPDATE_LOW or warming_up or known[-1] > 2 * known[0]:
        return None
    return typical
