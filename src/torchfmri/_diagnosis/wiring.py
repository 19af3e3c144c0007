"""Diagnoses of how things are connected: graph, optimizer, freezing, sharing, symmetry, modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from torchfmri._diagnosis.finding import Finding
from torchfmri._diagnosis.observation import Observation
from torchfmri._diagnosis.signals import in_order, stale_steps
from torchfmri._diagnosis.structure import ParameterFacts
from torchfmri._diagnosis.words import how_many, listed

_ADAPTERS = 0.5
"""Above this share of frozen (or left out) parameters the rest is what is trained on purpose."""


def graph_cut(seen: Observation) -> Iterator[Finding]:
    """Layers that run and are in the optimizer, and that no gradient ever reaches."""
    reach = seen.reach
    if reach is None or (not len(seen.trace) and reach.loss_has_graph):
        return
    if not reach.loss_has_graph:
        layers = tuple(dict.fromkeys(each.layer for each in _optimized(seen)))
        yield Finding(
            "graph_cut", "alarm", layers, "loss", 0,
            "The loss has no graph: nothing that is trained can be reached from it.",
            "Look for .detach(), .item(), .numpy(), torch.tensor(...), argmax or no_grad between "
            "the output and the loss.",
        )  # fmt: skip
        return
    called = set(reach.called)
    without = [
        each
        for each in in_order(seen, _optimized(seen))
        if each.layer in called and _gradient(seen, each) == "none"
    ]
    cut = [each for each in without if _is_read(seen, each.layer)]
    if not cut:
        return
    layers = tuple(dict.fromkeys(each.layer for each in cut))
    beyond = _first_with_gradient_after(seen, layers[-1])
    no_graph = [layer for layer in layers if layer in reach.without_graph]
    why = (
        f"{listed(no_graph)} ran under no_grad"
        if no_graph
        else f"the graph ends after {layers[-1]!r}" + (f", before {beyond!r}" if beyond else "")
    )
    yield Finding(
        "graph_cut", "alarm", layers, "backward", 0,
        f"No gradient reached {listed(layers)} in {len(seen.trace)} steps, although the optimizer "
        f"is to train {'it' if len(layers) == 1 else 'them'}: {why}.",
        "Remove the .detach(), no_grad, .item() or argmax there; if the cut is on purpose, set "
        "requires_grad=False and leave these parameters out of the optimizer.",
        {"layers_without_gradient": len(layers)},
    )  # fmt: skip


def unused_layer(seen: Observation) -> Iterator[Finding]:
    """Layers in the optimizer that never run, or whose output nobody reads."""
    reach = seen.reach
    if reach is None or not len(seen.trace) or not reach.loss_has_graph:
        return
    experts = {name for router in seen.routers for name in router.experts}
    called = set(reach.called)
    idle = []
    for each in _optimized(seen):
        if _gradient(seen, each) != "none" or _is_inside(each.layer, experts):
            continue
        if each.layer not in called or not _is_read(seen, each.layer):
            idle.append(each)
    if not idle:
        return
    layers = tuple(dict.fromkeys(each.layer for each in idle))
    never = [layer for layer in layers if layer not in called]
    what = "never ran" if never else "ran, but nothing reads what it returns"
    yield Finding(
        "unused_layer", "warn", layers, "forward", None,
        f"{listed(layers)} {what}: {sum(each.elements for each in idle):,} parameters in the "
        "optimizer that cannot learn.",
        "Call the layer in forward, or remove it.",
        {"parameters": sum(each.elements for each in idle)},
    )  # fmt: skip


def missing_from_optimizer(seen: Observation) -> Iterator[Finding]:
    """Parameters that ask for gradients, get them, and that no optimizer has."""
    everything = seen.structure.parameters.values()
    missing = [
        each
        for each in everything
        if each.trainable and each.optimized is False and _gradient(seen, each) == "some"
    ]
    if not missing or not seen.structure.groups:
        return
    share = sum(each.elements for each in missing) / sum(each.elements for each in everything)
    layers = tuple(dict.fromkeys(each.layer for each in missing))
    strangers = seen.structure.strangers
    yield Finding(
        "missing_from_optimizer", "alarm" if share <= 0.9 else "warn", layers, "optimizer", None,
        f"{how_many(len(missing), len(everything), 'parameters')} ({listed(layers)}) get gradients "
        "but are in no optimizer: they never change."
        + (
            f" The optimizer holds {strangers} tensors that are no part of the model: were layers "
            "replaced after it was made?"
            if strangers
            else ""
        ),
        "Make the optimizer from model.parameters() after the model is complete; to freeze on "
        "purpose set requires_grad=False.",
        {"parameters": len(missing), "share": share, "strangers": strangers},
    )  # fmt: skip


def unregistered_parameters(seen: Observation) -> Iterator[Finding]:
    """Tensors that the loss depends on and that the model does not know as its own."""
    if seen.reach is None or not seen.reach.unregistered:
        return
    found = seen.reach.unregistered
    yield Finding(
        "unregistered_parameters", "alarm", (), "optimizer", None,
        f"The loss depends on {len(found)} trainable tensors that are not among "
        f"model.parameters() ({found[0]}): no optimizer has them, and state_dict() neither.",
        "Keep layers in nn.ModuleList or nn.ModuleDict instead of a list or dict, and tensors in "
        "nn.Parameter.",
        {"tensors": len(found)},
    )  # fmt: skip


def frozen_layer(seen: Observation) -> Iterator[Finding]:
    """Frozen matrices between layers that are trained, unless that looks like a plan."""
    everything = in_order(seen, list(seen.structure.parameters.values()))
    matrices = [each for each in everything if each.is_matrix]
    frozen = [each for each in matrices if not each.trainable]
    if not frozen or len(frozen) == len(matrices):
        return
    total = sum(each.elements for each in everything)
    if sum(each.elements for each in everything if not each.trainable) > _ADAPTERS * total:
        return  # adapters, or a head on a frozen body
    if _is_pattern(matrices, frozen):
        return
    trained = [index for index, each in enumerate(matrices) if each.trainable]
    called = None if seen.reach is None else set(seen.reach.called)
    judged = [
        (index, each)
        for index, each in enumerate(matrices)
        if not each.trainable and (called is None or each.layer in called)
    ]
    if not judged:
        return
    first_ones = all(index < trained[0] for index, _ in judged)
    layers = tuple(dict.fromkeys(each.layer for _, each in judged))
    yield Finding(
        # The first layers may well be frozen on purpose.
        "frozen_layer", "inform" if first_ones else "warn", layers, "backward", None,
        f"{listed(layers)} {'is' if len(layers) == 1 else 'are'} frozen (requires_grad=False) "
        f"while layers {'after' if first_ones else 'before'} are trained.",
        "Set requires_grad=True if that was not the plan; freezing on purpose usually concerns the "
        "first layers, or all but adapters.",
        {"frozen": len(judged), "matrices": len(matrices)},
    )  # fmt: skip


def stale_gradients(seen: Observation) -> Iterator[Finding]:
    """Gradients that are added to those of the step before."""
    if seen.steps is not None:
        stale, steps = seen.steps.stale, np.arange(len(seen.steps.stale))
    else:
        stale, steps = stale_steps(seen), seen.trace.steps
    if int(stale.sum()) < 3 or stale[1:].mean() < 0.5:
        return
    first = int(steps[np.flatnonzero(stale)[0]])
    yield Finding(
        "stale_gradients", "alarm", (), "backward", first,
        f"When backward began at step {first}, the gradients of the step before were still there: "
        "they add up from step to step.",
        "Call optimizer.zero_grad() after each optimizer.step().",
        {"steps": int(stale.sum())},
    )  # fmt: skip


def shared_module(seen: Observation) -> Iterator[Finding]:
    """One module under several numbers of a list: copies were meant."""
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
    yield Finding(
        "shared_module", "warn", layers, "forward", None,
        f"{listed(owners)} are one and the same module: they share all weights.",
        "Make each member anew, [make() for _ in range(n)] instead of [make()] * n; to share on "
        "purpose, register it once and call it several times.",
        {"members": len(owners)},
    )  # fmt: skip


def symmetric_init(seen: Observation) -> Iterator[Finding]:
    """Matrices whose units began equal and are still equal: nothing tells them apart."""
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
    layers = tuple(dict.fromkeys(each.layer for each in equal))
    zero = all(seen.weights[each.name].last_rms == 0 for each in equal)
    yield Finding(
        "symmetric_init", "alarm", layers, "forward", 0,
        f"All units of {listed(layers)} began with the same weights"
        + (" (0)" if zero else "")
        + f" and still have the same after {len(seen.trace)} steps: each layer works as one unit.",
        "Initialise with random numbers; only the last layer of a branch may start at 0.",
        {"layers": len(layers)},
    )  # fmt: skip


def untied_weights(seen: Observation) -> Iterator[Finding]:
    """An embedding and an output layer that began as copies and are two parameters."""
    pairs = seen.copied_tables
    if not pairs:
        return
    embedding, head = pairs[0]
    yield Finding(
        "untied_weights", "warn", (embedding, head), "forward", None,
        f"{embedding!r} and {head!r} began with the same values but are two parameters: they were "
        "copied where they were meant to be tied, and drift apart.",
        "Assign the parameter itself: head.weight = embedding.weight, after any copy or move.",
    )  # fmt: skip


def evaluation_mode(seen: Observation) -> Iterator[Finding]:
    """Dropout and batch norms in evaluation mode while the model is trained."""
    modes = seen.structure.modes
    called = modes if seen.reach is None else [each for each in modes if each in seen.reach.called]
    judged = [layer for layer in modes if layer in called]
    if not judged or any(modes[layer] for layer in judged) or seen.structure.trains:
        return
    yield Finding(
        "evaluation_mode", "warn", tuple(judged), "forward", 0,
        f"The model is trained in evaluation mode: {how_many(len(judged), len(judged), 'layers')} "
        "of dropout or batch norm do not do what they do in training.",
        "Call model.train() before training, and again after each evaluation.",
    )  # fmt: skip


def _optimized(seen: Observation) -> list[ParameterFacts]:
    return [
        each for each in seen.structure.parameters.values() if each.trainable and each.optimized
    ]


def _gradient(seen: Observation, each: ParameterFacts) -> str:
    """Whether a gradient ever arrived: "none", "zero" or "some"."""
    if each.name in seen.weights:
        return seen.weights[each.name].gradient
    rms = seen.trace.column(each.name, "parameter_gradients", "rms")
    if not np.isfinite(rms).any():
        return "none"
    return "some" if (rms > 0).any() else "zero"


def _is_read(seen: Observation, layer: str) -> bool:
    assert seen.reach is not None
    inside = any(each.startswith(f"{layer}.") for each in seen.reach.called)
    return inside or layer in seen.reach.consumed or layer in seen.reach.without_graph


def _is_inside(layer: str, parents: set[str]) -> bool:
    return any(layer == each or layer.startswith(f"{each}.") for each in parents)


def _first_with_gradient_after(seen: Observation, layer: str) -> str:
    order = seen.order
    if layer not in order:
        return ""
    later = order[order.index(layer) + 1 :]
    having = {each.layer for each in _optimized(seen) if _gradient(seen, each) != "none"}
    return next((each for each in later if each in having), "")


def _list_of(layer: str) -> str:
    """The part of a name before its last number: the list it is a member of."""
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
