"""Diagnoses of the optimizer's settings: rates too low, of all or of one group, and momentum."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.observation import Floats, Observation
from torchfmri._diagnosis.rates import low_groups, rate_fell, rate_in_words
from torchfmri._diagnosis.signals import LEAST_STEPS, has_gradients, median, update_ratios
from torchfmri._records import Finding
from torchfmri._text import listed, percent

_BEGAN = 100
"""So many times the cut, and the first steps did train."""


def learning_rate_too_low(seen: Observation) -> Iterator[Finding]:
    """Updates so small that nothing will come of them."""
    ratios = update_ratios(seen)
    typical = _too_low(seen, ratios)
    if typical is None or rate_fell(seen) is not None:
        return
    yield Finding(
        "learning_rate_too_low", "warn", (), "optimizer", int(seen.trace.steps[0]),
        f"Each step changes the weights by {percent(typical)} of their size (usual is about 0.1 % "
        "to 1 %).",
        f"Raise the learning rate{rate_in_words(seen)}, or look for what makes the gradients so "
        "small.",
        {"update_ratio": typical},
    )  # fmt: skip


def group_rate_too_low(seen: Observation) -> Iterator[Finding]:
    """One group that next to nothing is done to, beside others that learn."""
    groups = low_groups(seen)
    if groups and _too_low(seen, update_ratios(seen)) is not None:
        return  # it is no matter of one group
    for group, typical in groups:
        if group.rate == 0:
            yield Finding(
                "learning_rate_zero", "warn", group.layers, "optimizer",
                int(seen.trace.steps[0]) if len(seen.trace) else 0,
                f"The group of {listed(group.layers)} has a learning rate of 0 (others have "
                f"{group.nearest:g}): it is not trained.",
                "Set lr for this group; to freeze on purpose set requires_grad=False, which is "
                "cheaper.",
            )  # fmt: skip
            continue
        yield Finding(
            "learning_rate_too_low", "warn", group.layers, "optimizer", int(seen.trace.steps[0]),
            f"Each step changes the weights of {listed(group.layers)} by {percent(typical)} of "
            f"their size (usual is about 0.1 % to 1 %): their group has the learning rate "
            f"{group.rate:g}, the nearest other {group.nearest:g}.",
            f"Raise the learning rate of this group ({group.rate:g}); to freeze it on purpose set "
            "requires_grad=False.",
            {"update_ratio": typical, "rate": group.rate, "nearest": group.nearest},
        )  # fmt: skip


def learning_rate_fell(seen: Observation) -> Iterator[Finding]:
    """A schedule that brings the learning rate to next to nothing long before the end."""
    place = rate_fell(seen)
    if place is None or seen.steps is None or len(seen.steps.learning_rate) < LEAST_STEPS:
        return
    rates = seen.steps.learning_rate
    if not rates[-1] > 0:  # that it is 0 is told elsewhere
        return
    step = int(seen.trace.steps[min(place, len(seen.trace) - 1)])
    yield Finding(
        "learning_rate_too_low", "warn", (), "optimizer", step,
        f"The learning rate fell from {rates.max():.2g} to {rates[-1]:.2g} in {len(rates)} steps, "
        f"and is below a thousandth of what it was since step {step}: hardly anything is learnt "
        "any more.",
        "Step a scheduler that counts epochs once per epoch, not per batch; or give it the number "
        "of steps that you train for.",
        {"largest": float(rates.max()), "last": float(rates[-1])},
    )  # fmt: skip


def momentum_too_high(seen: Observation) -> Iterator[Finding]:
    """A momentum that forgets nothing."""
    for group in seen.structure.groups:
        if not group.get("momentum", 0.0) > cuts.MOMENTUM.value:
            continue
        yield Finding(
            "momentum_too_high", "warn", (), "optimizer", None,
            f"momentum={group['momentum']:g} keeps every gradient for ever (or for more than a "
            "thousand steps): updates grow without end and overshoot.",
            "Set momentum to 0.9 (0.99 at most).",
            {"momentum": group["momentum"]},
        )  # fmt: skip
        return


def _too_low(seen: Observation, ratios: Floats) -> float | None:
    """The typical update / weight where that is far too small, and not about to rise."""
    known = ratios[np.isfinite(ratios) & has_gradients(seen)]
    if len(known) < LEAST_STEPS or not (known > 0).any():
        return None
    typical = median(known)
    rates = seen.steps.learning_rate if seen.steps is not None else np.array([])
    warming_up = len(rates) > 1 and rates[-1] > rates[0]
    if median(known[:3]) > _BEGAN * cuts.UPDATE_LOW.value:
        return None  # it was high enough, and fell
    if typical == 0 or typical >= cuts.UPDATE_LOW.value or warming_up or known[-1] > 2 * known[0]:
        return None
    return typical
