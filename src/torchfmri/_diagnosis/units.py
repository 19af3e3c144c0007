"""Diagnoses of what flows through layers: units that are off or flat, attention, experts.

`registry` calls each function; `_checkup` counts units, heads and routers. A Monitor only sees
shares of zeros, so `dead_layer` speaks for it. Severities depend on whether the run learns: units
that are sure of their classes become flat or silent without harm, as the healthy setups of the
suite show. Texts and advice may be changed freely; conditions only with the suite of `benchmarks
diagnosis`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.observation import HeadActivity, Observation, UnitActivity
from torchfmri._diagnosis.signals import (
    dead_shares,
    experts_in_use,
    flat_shares,
    gains,
    is_stuck,
    learns,
    median,
)
from torchfmri._records import Finding, Severity, alarm, finding_of, warn
from torchfmri._text import how_many, percent, plural

_LEAST_STEPS = 5
_LEAST_VALUES = 1024  # zeros that are too many to be chance


def excessive_dropout(seen: Observation) -> Iterator[Finding]:
    """Find dropout that leaves next to nothing."""
    large = {
        layer: share
        for layer, share in seen.structure.dropouts.items()
        if share > cuts.DROPPED and seen.structure.modes.get(layer, True)
    }
    if not large:
        return
    layer, share = max(large.items(), key=lambda each: each[1])
    yield warn(
        "excessive_dropout",
        layers=tuple(large),
        step=None,
        text=f"{layer!r} sets {percent(share)} of its input to 0 and multiplies the rest by "
        f"{1 / (1 - share) if share < 1 else math.inf:,.0f}: hardly anything of a sample passes.",
        advice="Set p to between 0.1 and 0.5; p is the share that is dropped, not the one that is "
        "kept.",
        evidence={"dropped_share": share},
    )


def dead_units(seen: Observation) -> Iterator[Finding]:
    """Find units behind a rectifier that were off for every sample of a window."""
    shares = dead_shares(seen)
    dead = [
        each
        for each in seen.units
        if shares.get(each.key, 0.0) >= cuts.DEAD_INFORM and not _reads_no_signal(seen, each)
    ]
    if not dead:
        return
    worst = max(dead, key=lambda each: each.silent / each.units)
    share = worst.silent / worst.units
    layers = dict.fromkeys(
        layer
        for each in sorted(dead, key=lambda each: -each.silent / each.units)
        for layer in each.named
    )
    severity: Severity = "alarm" if share >= cuts.DEAD_ALARM else "inform"
    died = worst.first_silent != 0  # units that chance switched off at the start did not die
    if severity == "inform" and share >= cuts.DEAD_WARN and died and is_stuck(seen):
        severity = "warn"
    more = len({each.label for each in dead}) - 1
    others = f" (and more in {plural(more, 'other layer')})" if more else ""
    yield finding_of(
        "dead_units",
        severity=severity,
        layers=tuple(layers),
        step=worst.first_silent,
        text=f"{how_many(worst.silent, worst.units, 'units')} of {worst.label}"
        f"{others} were off for each of {worst.samples:,} samples over {worst.steps} steps: no "
        "gradient passed them.",
        advice="Lower the learning rate, start biases at 0, keep inputs centred, or use LeakyReLU "
        "or GELU.",
        evidence={"dead_share": share, "samples": worst.samples, "steps": worst.steps},
    )


def dead_layer(seen: Observation) -> Iterator[Finding]:
    """Find a whole layer that returns nothing but 0, seen by a Monitor."""
    if seen.units or not len(seen.trace):
        return
    zero = seen.trace.matrix("activations", "zero_share")
    counts = np.nan_to_num(seen.trace.matrix("activations", "count"))
    for column, layer in enumerate(seen.trace.names("activations")):
        dead = (zero[-_LEAST_STEPS:, column] == 1).all()
        if "ReLU" not in seen.structure.kinds.get(layer, "") or not dead:
            continue
        if counts[-_LEAST_STEPS:, column].sum() < _LEAST_VALUES:
            continue
        off = np.flatnonzero(zero[:, column] != 1)
        first = int(seen.trace.steps[int(off[-1]) + 1 if len(off) else 0])
        yield alarm(
            "dead_units",
            layers=(layer,),
            step=first,
            text=f"{layer!r} returned 0 for everything since step {first}: no gradient passes it.",
            advice="Lower the learning rate, start biases at 0, or use LeakyReLU or GELU.",
            evidence={"dead_share": 1.0},
        )


def saturated_units(seen: Observation) -> Iterator[Finding]:
    """Find hidden squashing functions that sit on their flat ends."""
    shares = flat_shares(seen)
    flat = [
        each
        for each in seen.units
        if shares.get(each.key, 0.0) > cuts.FLAT_WARN and len(each.flat) >= 2
    ]
    if not flat:
        return
    worst = max(flat, key=lambda each: shares[each.key])
    share = shares[worst.key]
    layers = tuple(dict.fromkeys(layer for each in flat for layer in each.named))
    first = next(step for step, value in worst.flat.items() if value > cuts.FLAT_WARN)
    worst_start = next(iter(worst.flat))
    large = {
        each.layer: gain
        for each in seen.structure.matrices
        if (gain := gains(seen).get(each.name, 0.0)) > cuts.GAIN and each.layer in layers
    }
    more = len({each.label for each in flat}) - 1
    others = f" (and as many in {plural(more, 'other layer')})" if more else ""
    why = "".join(
        f" The weights of {layer!r} make outputs {gain:.2g} times their inputs."
        for layer, gain in list(large.items())[:1]
    )
    severity: Severity = "alarm" if share > cuts.FLAT_ALARM else "warn"
    if learns(seen) and (severity == "warn" or first > worst_start):
        severity = "inform"  # units that tell classes apart become sure of them
    yield finding_of(
        "saturated_units",
        severity=severity,
        layers=layers,
        step=first,
        text=f"{percent(share)} of the values of {worst.label} lie on its flat ends{others}: "
        f"hardly any gradient passes.{why}",
        advice="Make what goes in smaller: initialise with Xavier, normalise inputs or add a norm "
        "layer.",
        evidence={"flat_share": share},
    )


def attention_collapse(seen: Observation) -> Iterator[Finding]:
    """Find attention whose logits have run away, so that each query sees a single key."""
    by_layer: dict[str, list[HeadActivity]] = {}
    for each in seen.heads:
        by_layer.setdefault(each.layer, []).append(each)
    found = []
    for layer, records in by_layer.items():
        for record in records:
            largest = max(record.logit)
            sharp = float(np.mean(np.array(record.entropy) < cuts.ENTROPY))
            collapsed = sharp >= 0.5 and largest > cuts.LOGIT_WARN
            if collapsed or largest > cuts.LOGIT_ALARM:
                found.append((layer, record, sharp, largest))
                break
    if not found:
        return
    layer, record, sharp, largest = max(found, key=lambda each: each[3])
    yield finding_of(
        "attention_collapse",
        severity="alarm" if largest > cuts.LOGIT_ALARM else "warn",
        layers=tuple(each[0] for each in found),
        step=record.step,
        text=f"Attention logits of {layer!r} reach {largest:,.0f}, and {percent(sharp)} of its "
        f"heads put all weight on one key (median entropy {median(record.entropy):.2g} of what is "
        "possible).",
        advice="Divide by sqrt(head width), initialise queries and keys smaller, or normalise them "
        "(QK norm).",
        evidence={
            "largest_logit": largest,
            "sharp_heads": sharp,
            "entropy": median(record.entropy),
        },
    )


def constant_layer(seen: Observation) -> Iterator[Finding]:
    """Find a softmax or a norm over one number, which returns the same whatever it is given."""
    for each in seen.constants:
        layer = each.layer or seen.loss.output_layer
        soft = each.function.endswith("softmax")
        value = {"softmax": "1", "log_softmax": "0"}.get(each.function, "the bias")
        where = " of the loss" if each.in_loss else f" of {layer!r}" if layer else ""
        what = f"The {each.function}{where} runs over" if soft else f"{each.layer!r} normalises"
        yield alarm(
            "representation_collapse",
            layers=(layer,) if layer else (),
            phase="loss" if each.in_loss else "forward",
            text=f"{what} a single number, and {value} comes out whatever went in: nothing of the "
            "input passes, and no gradient.",
            advice="Use sigmoid for one output (or BCEWithLogitsLoss of the logits), or two "
            "outputs."
            if soft
            else "Take the norm away, or normalise over the features before the last layer.",
        )


def representation_collapse(seen: Observation) -> Iterator[Finding]:
    """Find a last representation in which all samples are the same."""
    if seen.steps is None or not seen.loss.output_layer:
        return
    spread = seen.steps.spread.get(seen.loss.output_layer, math.nan)
    if not spread < cuts.SPREAD or seen.constants:
        return
    yield alarm(
        "representation_collapse",
        layers=(seen.loss.output_layer,),
        step=int(seen.trace.steps[-1]) if len(seen.trace) else 0,
        text=f"What goes into {seen.loss.output_layer!r} differs between samples by "
        f"{percent(spread)} of its size: the output hardly depends on the input.",
        advice="Look for a layer that is saturated or dead, for a loss that a constant output "
        "satisfies, or for a missing stop-gradient or contrast.",
        evidence={"spread": spread},
    )


def routing_collapse(seen: Observation) -> Iterator[Finding]:
    """Find a router that sends everything to one expert."""
    for router in seen.routers:
        if len(router.experts) < 3 or len(router.load) < _LEAST_STEPS:
            continue
        used = np.array([experts_in_use(load) for load in router.load])
        if (used < cuts.EXPERTS).mean() < 0.5 or used[-1] >= cuts.EXPERTS:
            continue
        favourite = int(router.load[-1].argmax())
        first = int(np.flatnonzero(used < cuts.EXPERTS)[0])
        share = float(router.load[-1].max())
        yield alarm(
            "routing_collapse",
            layers=(router.layer, router.experts[favourite]),
            step=first,
            text=f"The router {router.layer!r} sends {percent(share)} of the tokens to "
            f"{router.experts[favourite]!r}: {len(router.experts) - 1} of {len(router.experts)} "
            "experts are idle.",
            advice="Add a load-balancing loss or noise to the router, and start its weights small.",
            evidence={"share": share, "experts_in_use": float(used[-1])},
        )


def _reads_no_signal(seen: Observation, units: UnitActivity) -> bool:
    """Whether all samples were alike before these units: they are then on or off for all."""
    if seen.steps is None or units.silent == units.units:
        return False
    return seen.steps.spread.get(units.source or units.layer, math.nan) < cuts.SPREAD
