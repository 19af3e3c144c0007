"""Diagnoses of how far calls and gradients reach: cuts, idle layers, tensors nobody owns.

`registry` calls each function. A check-up knows from the graph what was called and read (`Reach`);
a Monitor knows only that a layer ran and got no gradient (`_cut_in_trace`), so its finding says
less. Experts that got no token are idle and not unused, so they are left out. Texts and advice may
be changed freely; conditions only with the suite of `benchmarks diagnosis`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchfmri._diagnosis.observation import Observation, layers_of
from torchfmri._diagnosis.signals import all_frozen, gradient_kind, in_order
from torchfmri._diagnosis.structure import ParameterFacts
from torchfmri._records import Finding, alarm, warn
from torchfmri._text import listed, plural

_LEAST_STEPS = 8


def graph_cut(seen: Observation) -> Iterator[Finding]:
    """Find layers that run and are in the optimizer, and that no gradient ever reaches."""
    reach = seen.reach
    if reach is None:
        yield from _cut_in_trace(seen)
        return
    if not reach.loss_has_graph and not all_frozen(seen):  # else `frozen_layer` reports it
        yield alarm(
            "graph_cut",
            layers=layers_of(_optimized(seen)),
            phase="loss",
            text="The loss has no graph: nothing that is trained can be reached from it.",
            advice="Look for .detach(), .item(), .numpy(), torch.tensor(...), argmax or no_grad "
            "between the output and the loss.",
        )
    if not reach.loss_has_graph or not len(seen.trace):
        return
    called = set(reach.called)
    without = [
        each
        for each in in_order(seen, _optimized(seen))
        if each.layer in called and gradient_kind(seen, each) == "none"
    ]
    cut = [each for each in without if _is_read(seen, each.layer) and not _is_passed_by(seen, each)]
    if not cut:
        return
    layers = layers_of(cut)
    beyond = _first_with_gradient_after(seen, layers[-1])
    no_graph = [layer for layer in layers if layer in reach.without_graph]
    why = (
        f"{listed(no_graph)} ran under no_grad"
        if no_graph
        else f"the graph ends after {layers[-1]!r}" + (f", before {beyond!r}" if beyond else "")
    )
    yield alarm(
        "graph_cut",
        layers=layers,
        text=f"No gradient reached {listed(layers)} in {len(seen.trace)} steps, although the "
        f"optimizer is to train {'it' if len(layers) == 1 else 'them'}: {why}.",
        advice="Remove the .detach(), no_grad, .item() or argmax there; if the cut is on purpose, "
        "set requires_grad=False and leave these parameters out of the optimizer.",
        evidence={"layers_without_gradient": len(layers)},
    )


def _cut_in_trace(seen: Observation) -> Iterator[Finding]:
    """Find cut graphs in a Monitor's view: layers run, and their matrices never get a gradient."""
    trace = seen.trace
    if len(trace) < _LEAST_STEPS or not trace.names("parameter_gradients"):
        return
    ran = np.asarray(np.isfinite(trace.matrix("activations", "rms")).all(0))
    always = {name for name, each in zip(trace.names("activations"), ran, strict=True) if each}
    arrived = np.nan_to_num(trace.matrix("parameter_gradients", "count")) > 0
    if not arrived.any(1).all():
        return
    cut = [
        each
        for each in _optimized(seen)
        if each.is_matrix and each.layer in always and gradient_kind(seen, each) == "none"
    ]
    if not cut:
        return
    layers = layers_of(cut)
    yield warn(
        "graph_cut",
        layers=layers,
        step=int(trace.steps[0]),
        text=f"{listed(layers)} ran in each of {len(trace)} steps and no gradient came back, "
        "although the optimizer has the weights: the graph is cut behind, or nothing reads the "
        "output.",
        advice="Remove the .detach(), no_grad, .item() or argmax there; if it is on purpose, leave "
        "these parameters out of the optimizer.",
        evidence={"layers_without_gradient": len(layers)},
    )


def unused_layer(seen: Observation) -> Iterator[Finding]:
    """Find layers in the optimizer that never run, or whose output nobody reads."""
    reach = seen.reach
    if reach is None or not len(seen.trace) or not reach.loss_has_graph:
        return
    experts = {name for router in seen.routers for name in router.experts}
    called = set(reach.called)
    idle, passed_by = [], []
    for each in _optimized(seen):
        if gradient_kind(seen, each) != "none" or _is_inside(each.layer, experts):
            continue
        if each.layer in called and _is_passed_by(seen, each):
            passed_by.append(each)
        elif each.layer not in called or not _is_read(seen, each.layer):
            idle.append(each)
    if passed_by:
        yield _unused_parameters(passed_by)
    if not idle:
        return
    layers, count = layers_of(idle), sum(each.elements for each in idle)
    what = (
        "never ran" if not called.issuperset(layers) else "ran, but nothing reads what it returns"
    )
    yield warn(
        "unused_layer",
        layers=layers,
        step=None,
        text=f"{listed(layers)} {what}: {count:,} parameters in the optimizer that cannot learn.",
        advice="Call the layer in forward, or remove it.",
        evidence={"parameters": count},
    )


def _unused_parameters(found: list[ParameterFacts]) -> Finding:
    """Return the finding about parameters without a gradient in layers that are trained."""
    count = sum(each.elements for each in found)
    return warn(
        "unused_layer",
        layers=layers_of(found),
        step=None,
        text=f"No gradient reaches {listed([each.name for each in found])}, while the rest of the "
        f"layer is trained: forward does not use {'it' if len(found) == 1 else 'them'}, or only "
        f"under no_grad. {plural(count, 'number')} in the optimizer cannot learn.",
        advice="Use the parameter in forward, or remove it.",
        evidence={"parameters": count},
    )


def _is_passed_by(seen: Observation, each: ParameterFacts) -> bool:
    """Whether other parameters of its layer, or of layers inside, do get gradients."""
    return any(
        gradient_kind(seen, other) != "none"
        for other in _optimized(seen)
        if each.layer in ("", other.layer) or other.layer.startswith(f"{each.layer}.")
    )


def unregistered_parameters(seen: Observation) -> Iterator[Finding]:
    """Find tensors that the loss depends on and that the model does not know as its own."""
    found = () if seen.reach is None else seen.reach.unregistered
    if not found:
        return
    yield alarm(
        "unregistered_parameters",
        step=None,
        text=f"The loss depends on {plural(len(found), 'trainable tensor')} not among "
        f"model.parameters() ({found[0]}): neither an optimizer nor state_dict() has it.",
        advice="Keep layers in nn.ModuleList or nn.ModuleDict instead of a list or dict, and "
        "tensors in nn.Parameter.",
        evidence={"tensors": len(found)},
    )


def _optimized(seen: Observation) -> list[ParameterFacts]:
    return [
        each for each in seen.structure.parameters.values() if each.trainable and each.optimized
    ]


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
    having = {each.layer for each in _optimized(seen) if gradient_kind(seen, each) != "none"}
    return next((each for each in later if each in having), "")
