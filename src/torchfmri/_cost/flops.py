"""FLOPs of one operation, from the shapes of its arguments: {operation: rule}.

`live_memory` asks for every operation that it sees. A multiplication and an addition count as two.
The rules cover what the FLOP/s of a processor are about: matrix products, convolutions, attention
and recurrent cells. Sums, activations and norms do not count; they cost time because they move
memory, and the time of a layer shows it. A new rule is a line of `RULES`. Argument positions are
those of the ATen schema. Index letters: b batch, h heads, q and k positions of queries and keys, d
and v their widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod as _prod
from typing import Any, TypeAlias

from torch import Tensor

Rule: TypeAlias = "Callable[[Sequence[Any], Any], int]"
"""From the arguments and the output of an operation to its FLOPs."""


def _size(shape: Sequence[int]) -> int:
    """Return how many numbers a shape holds."""
    return int(_prod(shape))


def _product(first: int) -> Rule:
    """Count the product of two matrices (or batches of them), from argument `first` on."""

    def rule(arguments: Sequence[Any], _: Any) -> int:
        a, b = arguments[first].shape, arguments[first + 1].shape
        return 2 * _size(a) * (int(b[-1]) if len(b) > 1 else 1)

    return rule


def _grouped_product(arguments: Sequence[Any], _: Any) -> int:
    """Count products over sorted tokens: each meets the matrix of its own expert only."""
    a, b = arguments[0].shape, arguments[1].shape
    if len(a) == 3 and len(b) == 2:  # (experts, o, i) with (i, tokens)
        return 2 * _size(a[1:]) * int(b[1])
    return 2 * _size(a) * int(b[-1])


def _trilinear(arguments: Sequence[Any], _: Any) -> int:
    """Count the sum over products of three tensors, as in nn.Bilinear."""
    shapes = []
    for tensor, expanded in zip(arguments[:3], arguments[3:6], strict=True):
        shape = list(tensor.shape)
        for dimension in expanded:
            shape.insert(dimension, 1)
        shapes.append(shape)
    longest = max(map(len, shapes))
    aligned = [[1] * (longest - len(shape)) + shape for shape in shapes]
    return 2 * _size([max(sizes) for sizes in zip(*aligned, strict=True)])


def _linear(arguments: Sequence[Any], _: Any) -> int:
    return 2 * int(arguments[0].numel()) * int(arguments[1].shape[0])


def _convolution(arguments: Sequence[Any], output: Any) -> int:
    """Count each weight once per position: of the output, or of the input if transposed."""
    x, weight, transposed = *arguments[:2], arguments[6]
    positions = _size((x if transposed else output).shape[2:])
    return 2 * int(x.shape[0]) * positions * int(weight.numel())


def _convolution_backward(arguments: Sequence[Any], _: Any) -> int:
    """Count dL/d input and dL/d weight: each costs as much as the forward pass."""
    y, x, weight, transposed, mask = *arguments[:3], arguments[7], arguments[10]
    places = _size(x.shape[2:]) if transposed else _size(y.shape[2:])
    return 2 * int(x.shape[0]) * places * int(weight.numel()) * (bool(mask[0]) + bool(mask[1]))


def _attention(arguments: Sequence[Any], _: Any) -> int:
    """Count scores and weighted sum. Masked scores count, as in every published figure."""
    query, key, value = (each.shape for each in arguments[:3])
    return 2 * _size(query[:-1]) * int(key[-2]) * (int(query[-1]) + int(value[-1]))


def _attention_backward(arguments: Sequence[Any], _: Any) -> int:
    """Count the scores again, and dL/d weights, value, query and key."""
    query, key, value = (each.shape for each in arguments[1:4])
    return 2 * _size(query[:-1]) * int(key[-2]) * (3 * int(query[-1]) + 2 * int(value[-1]))


def _recurrent(weights: Callable[[Sequence[Any]], Sequence[Tensor]], passes: int = 1) -> Rule:
    """Count all time steps of recurrent layers: each matrix meets each token once per pass."""

    def rule(arguments: Sequence[Any], _: Any) -> int:
        x = arguments[0]
        tokens = x.numel() // x.shape[-1]
        sizes = sum(each.numel() for each in weights(arguments) if each.ndim == 2)
        return 2 * passes * int(tokens) * int(sizes)

    return rule


_LIST, _FOUR = (lambda arguments: arguments[1]), (lambda arguments: arguments[1:5])
_SDPA = "aten::_scaled_dot_product_"
_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")

RULES: dict[str, Rule] = {
    "aten::mm": _product(0),
    "aten::bmm": _product(0),
    "aten::mv": _product(0),
    "aten::dot": _product(0),
    "aten::vdot": _product(0),
    "aten::_int_mm": _product(0),
    "aten::_scaled_mm": _product(0),
    "aten::addmm": _product(1),
    "aten::addmv": _product(1),
    "aten::baddbmm": _product(1),
    "aten::addbmm": _product(1),
    "aten::_addmm_activation": _product(1),
    "aten::_grouped_mm": _grouped_product,
    "aten::_scaled_grouped_mm": _grouped_product,
    "aten::linear": _linear,
    "aten::mkldnn_linear": _linear,
    "aten::_trilinear": _trilinear,
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::mkldnn_rnn_layer": _recurrent(_FOUR),
    "aten::mkldnn_rnn_layer_backward": _recurrent(_FOUR, 2),
    "aten::_cudnn_rnn": _recurrent(_LIST),
    "aten::_cudnn_rnn_backward": _recurrent(_LIST, 2),
    **{f"{_SDPA}{kernel}": _attention for kernel in (*_KERNELS, "fused_attention_overrideable")},
    **{
        f"{_SDPA}{kernel}_backward": _attention_backward
        for kernel in (*_KERNELS, "fused_attention_overrideable")
    },
}
"""What each operation takes. Others: `torch.utils.flop_counter.register_flop_formula`."""

# Arithmetic worth counting that has no closed form in use.
_HEAVY = ("fft", "linalg", "cholesky", "cdist", "grid_sampler", "_embedding_bag_backward")


def flops_of(operation: Any, arguments: Sequence[Any], keywords: Any, output: Any) -> int | None:
    """Return the FLOPs of one call of an operation, or None if there is no rule for it.

    Args:
        operation: The operation, as a dispatch mode receives it.
        arguments: Positional arguments.
        keywords: Keyword arguments.
        output: What the operation returned.
    """
    rule = RULES.get(operation_name(operation))
    if rule is not None:
        return rule(arguments, output)
    from torch.utils.flop_counter import flop_registry  # imports Triton, which takes a while

    formula = flop_registry.get(getattr(operation, "overloadpacket", operation))
    if formula is not None:
        return int(formula(*arguments, **keywords, out_val=output))
    return None


def is_heavy(operation: Any) -> bool:
    """Return whether an operation without a rule may hide work: a custom one, or a transform."""
    space, _, name = operation_name(operation).partition("::")
    if space not in ("aten", "prim", "prims"):
        return True
    return any(name.removeprefix("_").startswith(each) for each in _HEAVY)


def operation_name(operation: Any) -> str:
    """Return the name of an operation without its overload, such as `aten::mm`."""
    packet = getattr(operation, "overloadpacket", None)
    if packet is None:  # a higher-order operation
        return f"higher_order::{operation}"
    return f"{operation.namespace}::{packet.__name__}"
