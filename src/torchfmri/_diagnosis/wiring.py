"""Diagnoses of how things are connected: optimizer, freezing, sharing, symmetry.

`registry` calls each function. Freezing is often a plan: adapters, a frozen body, frozen first
layers and the same part of every block give no finding or a remark. Texts may be changed freely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from torchfmri._diagnosis import cuts
from torchfmri._diagnosis.observation import Observation, layers_of
from torchfmri._diagnosis.signals import all_frozen, gradient_kind, in_order, stale_steps
from torchfmri._diagnosis.structure import ParameterFacts
from torchfmri._records import Finding, alarm, finding_of, warn
from torchfmri._text import how_many, listed, percent

_ADAPTERS = 0.5
"""If more than this share of the parameters is frozen, the rest is trained on purpose."""


def missing_from_optimizer(seen: Observation) -> Iterator[Finding]:
    """Find parameters that ask for gradients, get them, and that no optimizer has."""
    everything = seen.structure.parameters.values()
    missing = [
        each
        for each in everything
        if each.trainable and each.optimized is False and gradient_kind(seen, each) == "some"
    ]
    if not missing or not seen.structure.groups:
        return
    share = sum(each.elements for each in missing) / sum(each.elements for each in everything)
    layers = layers_of(missing)
    strangers = seen.structure.strangers
    yield finding_of(
        "missing_from_optimizer",
        severity="alarm" if share <= 0.9 else "warn",
        layers=layers,
        step=None,
        text=f"{how_many(len(missing), len(everything), 'parameters')} ({listed(layers)}) get "
        "gradients but are in no optimizer: they never change."
        + (
            f" The optimizer holds {strangers} tensors that are not part of the model: were layers "
            "replaced after it was made?"
            if strangers
            else ""
        ),
        advice="Make the optimizer from model.parameters() after the model is complete; to freeze "
        "on purpose set requires_grad=False.",
        evidence={"parameters": len(missing), "share": share, "strangers": strangers},
    )


def frozen_layer(seen: Observation) -> Iterator[Finding]:
    """Find frozen matrices between layers that are trained, unless that looks like a plan."""
    everything = in_order(seen, list(seen.structure.parameters.values()))
    matrices = [each for each in everything if each.is_matrix]
    frozen = [each for each in matrices if not each.trainable]
    if all_frozen(seen) and seen.reach is not None and not seen.reach.loss_has_graph:
        layers = layers_of(everything)
        yield alarm(
            "frozen_layer",
            layers=layers,
            step=None,
            text=f"All {len(everything)} parameters are frozen (requires_grad=False), those of "
            f"{layers[-1]!r} too: there is nothing to train.",
            advice="Set requires_grad=True for what you want to train; a new head is put in after "
            "the rest is frozen, not before.",
            evidence={"frozen": len(everything)},
        )
    if not frozen or len(frozen) == len(matrices):
        return
    total = sum(each.elements for each in everything)
    if sum(each.elements for each in everything if not each.trainable) > _ADAPTERS * total:
        return  # adapters, or a head on a frozen body
    if _is_pattern(matrices, frozen):
        return
    called = None if seen.reach is None else seen.reach.called
    judged = [each for each in frozen if called is None or each.layer in called]
    if not judged:
        return
    first_trained = next(index for index, each in enumerate(matrices) if each.trainable)
    first_ones = all(each in matrices[:first_trained] for each in judged)
    layers = layers_of(judged)
    yield finding_of(
        "frozen_layer",
        severity="inform" if first_ones else "warn",  # the first layers are often frozen
        layers=layers,
        step=None,
        text=f"{listed(layers)} {'is' if len(layers) == 1 else 'are'} frozen (requires_grad=False) "
        f"while layers {'after' if first_ones else 'before'} are trained.",
        advice="Set requires_grad=True if that was not the plan; freezing on purpose usually "
        "concerns the first layers, or all but adapters.",
        evidence={"frozen": len(judged), "matrices": len(matrices)},
    )


def stale_gradients(seen: Observation) -> Iterator[Finding]:
    """Find gradients that are added to those of the step before."""
    if seen.steps is not None:
        stale, steps = seen.steps.stale, np.arange(len(seen.steps.stale))
    else:
        stale, steps = stale_steps(seen), seen.trace.steps
    if int(stale.sum()) < 3 or stale[1:].mean() < 0.5:
        return
    first = int(steps[np.flatnonzero(stale)[0]])
    yield alarm(
        "stale_gradients",
        step=first,
        text=f"When backward began at step {first}, the gradients of the step before were still "
        "there: they add up from step to step.",
        advice="Call optimizer.zero_grad() after each optimizer.step().",
        evidence={"steps": int(stale.sum())},
    )


def shared_module(seen: Observation) -> Iterator[Finding]:
    """Find one module under several numbers of a list: copies were meant."""
    groups: dict[tuple[str, ...], int] = {}
    for owners in seen.structure.aliases.values():
        parents = {owner.rpartition(".")[0] for owner in owners}
        numbered = all(owner.rpartition(".")[2].isdigit() for owner in owners)
        if not numbered or len(parents) != 1:
            parents = {_list_of(owner) for owner in owners}
            numbered = len(parents) == 1 and "" not in parents
        if numbered:
            groups[owners] = groups.get(owners, 0) + 1
    if not groups:
        return
    owners = next(iter(groups))
    layers = tuple(dict.fromkeys(owner for each in groups for owner in each))
    yield warn(
        "shared_module",
        layers=layers,
        step=None,
        text=f"{listed(owners)} are one and the same module: they share all weights.",
        advice="Make each member by itself, [make() for _ in range(n)] instead of [make()] * n; to "
        "share on purpose, register it once and call it several times.",
        evidence={"members": len(owners)},
    )


def symmetric_init(seen: Observation) -> Iterator[Finding]:
    """Find matrices whose units began equal and are still equal: nothing tells them apart."""
    if len(seen.trace) < 2:
        return
    equal = [
        each
        for each in in_order(seen, seen.structure.matrices)
        if each.name in seen.weights
        and seen.weights[each.name].equal_rows
        and seen.weights[each.name].still_equal_rows
        and each.optimized
        and seen.weights[each.name].gradient != "none"
    ]
    if not equal:
        return
    layers = layers_of(equal)
    zero = all(seen.weights[each.name].last_rms == 0 for each in equal)
    yield alarm(
        "symmetric_init",
        layers=layers,
        text=f"All units of {listed(layers)} began with the same weights"
        + (" (0)" if zero else "")
        + f" and still have the same after {len(seen.trace)} steps: each layer works as one unit.",
        advice="Initialise with random numbers; only the last layer of a branch may start at 0.",
        evidence={"layers": len(layers)},
    )


def missing_nonlinearity(seen: Observation) -> Iterator[Finding]:
    """Find linear layers in a row with nothing between them, which are one Linear layer."""
    pairs = () if seen.reach is None else seen.reach.linear_pairs
    follows = dict(pairs)
    chains = [(first, second, follows[second]) for first, second in pairs if second in follows]
    if not chains:
        return  # a single pair may be a projection
    layers = tuple(dict.fromkeys(layer for chain in chains for layer in chain))
    yield warn(
        "missing_nonlinearity",
        layers=layers,
        step=None,
        text=f"There is nothing between {listed(layers)}: linear layers in a row can do no more "
        "than one.",
        advice="Put an activation between them (ReLU, GELU), or use one layer.",
        evidence={"layers": len(layers)},
    )


def samples_mixed(seen: Observation) -> Iterator[Finding]:
    """Find a model whose answer about one sample depends on the others, also in evaluation mode."""
    if not seen.data.mixed > cuts.MIXED or seen.softmaxes:
        return
    recurrent = [
        layer
        for layer, kind in seen.structure.kinds.items()
        if kind in ("RNN", "LSTM", "GRU", "MultiheadAttention") or "Transformer" in kind
    ]
    yield warn(
        "samples_mixed",
        layers=tuple(recurrent),
        text="When one sample of a batch is exchanged, the outputs of the others change by "
        f"{percent(seen.data.mixed)} of how they differ: samples are mixed with each other.",
        advice=("Set batch_first=True, or hand over (time, batch, features). " if recurrent else "")
        + "Look for an operation along axis 0 and for view or reshape in place of transpose; where "
        "samples are meant to see each other (graphs, sets), there is nothing to do.",
        evidence={"mixed": seen.data.mixed},
    )


def untied_weights(seen: Observation) -> Iterator[Finding]:
    """Find an embedding and an output layer that began as copies and are two parameters."""
    if not seen.copied_tables:
        return
    embedding, head = seen.copied_tables[0]
    yield warn(
        "untied_weights",
        layers=(embedding, head),
        step=None,
        text=f"{embedding!r} and {head!r} began with the same values but are two parameters: they "
        "were copied where they were meant to be tied, and drift apart.",
        advice="Assign the parameter itself: head.weight = embedding.weight, after any copy or "
        "move.",
    )


def _list_of(layer: str) -> str:
    """Return the part of a name before its last number: the list it is a member of."""
    parts = layer.split(".")
    for place in range(len(parts) - 1, -1, -1):
        if parts[place].isdigit():
            return ".".join(parts[:place]) + "/" + ".".join(parts[place + 1 :])
    return ""


def _is_pattern(matrices: Sequence[ParameterFacts], frozen: Sequence[ParameterFacts]) -> bool:
    """Whether the same part of every block is frozen, which nobody does by mistake."""

    def part(each: ParameterFacts) -> str:
        return ".".join("*" if piece.isdigit() else piece for piece in each.name.split("."))

    parts = {part(each) for each in frozen}
    if all("*" not in each for each in parts):
        return False
    counts, frozen_counts = Counter(map(part, matrices)), Counter(map(part, frozen))
    return all(frozen_counts[name] == counts[name] > 1 for name in parts)
