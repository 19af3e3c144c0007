"""Nonlinearities: which function made a tensor, and where it is flat.

`watcher`, `layer_logs` and `loss_reading` use it. A function is known by the class of its module or
by the name of its autograd node; the names are PyTorch's own and may change between versions, so an
unknown one means no answer. The points from which on a function counts as flat go with the cuts
`FLAT_*` and `DEAD_*`, which were measured with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._torch import nodes_before

TANH_FLAT = 0.97
"""tanh' is below 6 % of its maximum there."""
SIGMOID_FLAT = 1e-2
"""Share of the largest slope, 1/4."""

SQUASHERS = frozenset({"tanh", "sigmoid", "hardtanh"})
"""Functions with two flat ends."""

_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu", nn.ReLU6: "relu6", nn.GELU: "gelu", nn.SiLU: "silu", nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid", nn.Hardtanh: "hardtanh", nn.Softmax: "softmax",
    nn.LogSoftmax: "log_softmax", nn.Softplus: "softplus",
}  # fmt: skip
_NODES = {
    "ReluBackward0": "relu", "TanhBackward0": "tanh", "SigmoidBackward0": "sigmoid",
    "SoftmaxBackward0": "softmax", "LogSoftmaxBackward0": "log_softmax",
    "HardtanhBackward0": "hardtanh", "SoftplusBackward0": "softplus",
    "ClampMinBackward0": "relu", "ThresholdBackward0": "relu",
}  # fmt: skip
_MOST_STEPS = 5  # back through the graph to the function behind a value
_PASSING = (
    *("View", "Reshape", "Transpose", "Permute", "Squeeze", "Unsqueeze", "ToCopy", "Clone"),
    *("Flatten", "Expand", "Slice", "Select", "Alias", "NativeDropout"),
)


_POOLING = ("Mean", "AvgPool", "AdaptiveAvgPool", "MaxPool", "AdaptiveMaxPool", "Max", "Amax")


def function_of_module(module: nn.Module) -> str:
    """Return the name of the function of an activation layer; "" for other layers."""
    if isinstance(module, nn.RNN):
        return str(module.nonlinearity)
    return _MODULES.get(type(module), "")


def function_behind(tensor: Tensor) -> tuple[str, Any]:
    """Return what function made a tensor, and the node before it; ("", the last node) if none did.

    Pooling is looked through for relu, whose values are 0 after it only if all were.
    """
    node = tensor.grad_fn
    pooled = False
    for _ in range(_MOST_STEPS):
        if node is None:
            break
        before = iter(nodes_before(node))
        name = type(node).__name__ if node.__class__.__module__ == "builtins" else node.name()
        if name in _NODES:
            function = _NODES[name]
            return (
                (function, next(before, None)) if function == "relu" or not pooled else ("", node)
            )
        # A product with something that has no graph, as dropout makes it, is looked through too.
        masks = name in ("MulBackward0", "DivBackward0") and len(nodes_before(node)) == 1
        if name.startswith(_POOLING):
            pooled = True
        elif not name.startswith(_PASSING) and not masks:
            break
        node = next(before, None)
    return "", node


_FLAT: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda y: y == 0,
    "relu6": lambda y: (y == 0) | (y == 6),
    "tanh": lambda y: y.abs() > TANH_FLAT,
    "sigmoid": lambda y: y * (1 - y) < SIGMOID_FLAT / 4,
    "hardtanh": lambda y: (y == y.max()) | (y == y.min()),
}
_FLAT_BELOW = {"gelu": -4.0, "silu": -8.0}
"""Slopes there: -5e-4 and -2e-3."""


def flat_values(function: str, x: Tensor | None, y: Tensor) -> Tensor | None:
    """Return where the function is flat, as booleans of y's shape; None if that is unknown."""
    if function in _FLAT:
        return _FLAT[function](y)
    cut = _FLAT_BELOW.get(function)
    return None if cut is None or x is None or x.shape != y.shape else x < cut


RANGES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "relu": ("0 and above", lambda y: y < 0),
    "softplus": ("above 0", lambda y: y < 0),
    "sigmoid": ("0 to 1", lambda y: (y < 0) | (y > 1)),
    "softmax": ("0 to 1", lambda y: (y < 0) | (y > 1)),
    "tanh": ("-1 to 1", lambda y: y.abs() > 1),
    "hardtanh": ("-1 to 1", lambda y: y.abs() > 1),
    "log_softmax": ("0 and below", lambda y: y > 0),
}
"""Function -> what it can return, and which targets lie outside."""


def share_outside(function: str, target: Tensor) -> float:
    """Return the share of the targets that a function cannot return."""
    if function not in RANGES or not target.is_floating_point() or not target.numel():
        return 0.0
    return float(RANGES[function][1](target.detach()).to(torch.float32).mean())
