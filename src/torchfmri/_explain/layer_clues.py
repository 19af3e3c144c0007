"""Read clues about a failure from the arguments of single layers and functions.

Each function takes a `Crash` and the match of a failure's pattern. A guess says probably.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._explain.crash import Crash, describe
from torchfmri._explain.failure import Clues

_RETURNED = {nn.RNNBase: "output, state", nn.MultiheadAttention: "output, weights"}


def with_doubled_cache(crash: Crash, match: re.Match[str]) -> bool:
    """Return whether sizes N and 2N met while a cache of keys and values was in use."""
    return _is_doubled(match) and _uses_cache(crash)


def maybe_with_doubled_cache(crash: Crash, match: re.Match[str]) -> bool:
    """Return whether sizes N and 2N met and nothing but the message is known."""
    return _is_doubled(match) and not crash.steps


def needs_tensor(crash: Crash, match: re.Match[str]) -> bool:
    """Return whether a layer, or the forward of one, took the value for a tensor."""
    name = match["name"]
    return bool(crash.modules) and (name is None or hasattr(Tensor, name))


def in_lstm_with_one_state(crash: Crash, _: re.Match[str]) -> bool:
    """Return whether an LSTM was given one tensor as its state."""
    return isinstance(crash.module, nn.LSTM | nn.LSTMCell) and isinstance(
        crash.local("hx", "forward"), Tensor
    )


def in_attention(crash: Crash, match: re.Match[str]) -> bool:
    """Return whether scaled_dot_product_attention ran, or attention merged its masks."""
    if not crash.steps:
        return False
    last = crash.steps[-1]
    if match["shape"] is not None:
        return last.of_torch and last.function == "merge_masks"
    return "scaled_dot_product_attention(" in last.line.code


def by_given_value(crash: Crash, _: re.Match[str]) -> Clues:
    """Find what the layer got instead of a tensor, and which layer probably returned it."""
    given = [each for each in crash.arguments().values() if isinstance(each, tuple | list)]
    facts = [f"It was given {_outline(given[0])}."] if given else []
    layer = crash.layer_of(crash.module) or ""
    # Either the layer was given a tuple by its neighbour, or its own forward got one from a child.
    parent = layer.rpartition(".")[0] if given else layer
    beside = {
        name: module
        for name, module in crash.layers.items()
        if name and name.rpartition(".")[0] == parent and isinstance(module, tuple(_RETURNED))
    }
    if len(beside) != 1:
        return Clues(tuple(facts), ("Take the tensor out of it: x = x[0].",) if given else ())
    ((name, module),) = beside.items()
    parts = next(each for kind, each in _RETURNED.items() if isinstance(module, kind))
    facts.append(f"Probably layer {name!r} ({type(module).__name__}) returned it: ({parts}).")
    if isinstance(crash.layers.get(parent), nn.Sequential):
        cure = (
            f"nn.Sequential passes on all of ({parts}): call the layers in a forward of your own."
        )
    else:
        cure = f"Take it apart: {parts} = self.{name.rpartition('.')[2]}(...), and pass on output."
    return Clues(tuple(facts), (cure,))


def by_hidden_state(crash: Crash, match: re.Match[str]) -> Clues:
    """Find whether batch and length of the input are probably swapped."""
    module, inputs = crash.module, list(crash.inputs().values())
    if not isinstance(module, nn.RNNBase) or not inputs or inputs[0].dim() != 3:
        return Clues()
    batch = 0 if module.batch_first else 1
    shape, state = inputs[0].shape, re.findall(r"\d+", match["got"])
    facts = (
        f"batch_first={module.batch_first}: an input {tuple(shape)} has a batch of {shape[batch]}.",
    )
    if len(state) == 3 and int(state[1]) == shape[1 - batch] != shape[batch]:
        cure = f"Probably the input is meant the other way: batch_first={not module.batch_first}."
        return Clues(facts, (cure,))
    if len(state) == 3 and int(state[0]) == shape[batch] != int(state[1]):
        return Clues(
            facts, ("Probably the batch comes first in the state: state.transpose(0, 1).",)
        )
    return Clues(facts)


def by_probabilities(crash: Crash, match: re.Match[str]) -> Clues:
    """Find the range of the values, and how many are NaN."""
    values = crash.local(match["which"], "binary_cross_entropy")
    if not isinstance(values, Tensor) or values.device.type != "cpu" or not values.numel():
        return Clues()
    values = values.detach()
    count = int(torch.isnan(values).sum())
    if count:
        told = f"{count} of {values.numel()} values are NaN."
        cure = "Find where the first NaN comes from: torchfmri.Monitor(model), or detect_anomaly."
        return Clues((told,), (cure,))
    low, high = float(values.min()), float(values.max())
    return Clues((f"The {match['which']} runs from {low:.4g} to {high:.4g}.",))


def by_equation(crash: Crash, match: re.Match[str]) -> Clues:
    """Find the equation, the shapes, and the letters that stand for two sizes."""
    equation, operands = crash.local("equation", "einsum"), crash.local("operands", "einsum")
    if not isinstance(equation, str) or not isinstance(operands, list | tuple):
        return Clues((f"PyTorch says: {match['reason']}.",))
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = operands[0]
    shapes = [tuple(each.shape) for each in operands if isinstance(each, Tensor)]
    facts = [f"The equation {equation!r} got {', '.join(map(str, shapes))}."]
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, set[int]] = {}
    for term, shape in zip(terms, shapes, strict=False):
        if len(term) == len(shape):
            for letter, size in zip(term, shape, strict=True):
                sizes.setdefault(letter, set()).add(size)
        elif "..." not in term:
            facts.append(f"{term!r} has {len(term)} letters for {len(shape)} dimensions.")
    facts += [
        f"{letter!r} stands for {' and '.join(map(str, sorted(each)))}."
        for letter, each in sizes.items()
        if len(each - {1}) > 1
    ]
    if len(facts) == 1:
        facts.append(f"PyTorch says: {match['reason']}.")
    return Clues(tuple(facts))


def _outline(value: Any) -> str:
    """Write the tensors of a container with their shapes, such as `((2, 3) float32 cpu, int)`."""
    if isinstance(value, Tensor):
        return describe(value)
    if isinstance(value, tuple | list):
        inside = ", ".join(map(_outline, value[:4])) + (", ..." if len(value) > 4 else "")
        return f"a {type(value).__name__} of [{inside}]"
    return f"a {type(value).__name__}"


def _is_doubled(match: re.Match[str]) -> bool:
    small, large = sorted((int(match["first"]), int(match["second"])))
    return large == 2 * small and small > 0


def _uses_cache(crash: Crash) -> bool:
    return any(
        ("past" in name or "cache" in name) and value is not None and not isinstance(value, int)
        for step in crash.steps
        for name, value in list(step.frame.f_locals.items())
        if not step.of_torch
    )
