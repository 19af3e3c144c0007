"""(x, dL/dy) of one call of a layer -> the terms of its parameters; {layer type: rule}.

Pure algebra: a rule gets the module (for its settings), its input x, the gradient g of its output
and the `TokenGrid` of tokens, and returns one `Term` per parameter. Letters: b batch, s position,
i input unit, o output unit.

To add a layer, write a rule and enter it in `RULES`; layers without one are run again on their own
(`rerun.py`), which needs no rule but costs a second pass through that layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfmri._kernels import Product, written_product
from torchfmri._tokens.algebra.factors import Index, Term
from torchfmri._tokens.rules.axes import TokenGrid
from torchfmri.exceptions import InspectionError

Terms: TypeAlias = dict[str, Term]
Rule: TypeAlias = Callable[[Any, Any, Tensor, TokenGrid], Terms]


def linear(module: Any, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """A weight (o, i) and bias (o,): g_t (x) x_t and g_t."""
    check_tokens(x, g)
    g = grid.rows_of(g)
    return {"weight": Term((g, grid.rows_of(x))), "bias": Term((g,))}


def check_tokens(x: Tensor, g: Tensor) -> None:
    """Refuse an output that has not a row for each row of the input."""
    if x.numel() * g.shape[-1] != g.numel() * x.shape[-1]:
        raise InspectionError(
            f"The layer read {tuple(x.shape)}, and a gradient came back to {tuple(g.shape)}, which "
            "are not the same tokens. Does a forward hook of yours return a part of the output?"
        )


def conv1d_of_transformers(module: Any, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """A Linear whose weight is stored as (i, o)."""
    check_tokens(x, g)
    g = grid.rows_of(g)
    return {"weight": Term((grid.rows_of(x), g)), "bias": Term((g,))}


def bilinear(module: Any, x: Any, g: Tensor, grid: TokenGrid) -> Terms:
    """A weight (o, i, j): g_t (x) x_t (x) x'_t."""
    g, first, second = grid.rows_of(g), grid.rows_of(x[0]), grid.rows_of(x[1])
    return {"weight": Term((g, first, second)), "bias": Term((g,))}


def embedding(module: nn.Embedding, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """The row of the token's id is g_t; that of the padding id stays zero."""
    rows, ids = grid.rows_of(g), grid.numbers_of(x)
    if module.padding_idx is not None:
        rows = rows * (ids != module.padding_idx)[..., None].to(rows.dtype)
    if module.scale_grad_by_freq:
        counts = torch.bincount(ids.flatten(), minlength=module.num_embeddings)
        rows = rows / counts[ids][..., None].to(rows.dtype)
    return {"weight": Term((Index(ids, module.num_embeddings), rows))}


def layer_norm(module: nn.LayerNorm, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """weight: g_t * xhat_t, bias: g_t, over the normalised axes."""
    wide = x if x.itemsize >= 4 else x.float()  # as the kernel computes inside
    hat = F.layer_norm(wide, module.normalized_shape, eps=module.eps)
    return _scale_and_shift(grid.rows_of(g, len(module.normalized_shape)), hat, grid)


def rms_norm(module: Any, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """weight: g_t * xhat_t, with xhat = x / rms(x); per head: summed over the heads."""
    shape, small = tuple(module.weight.shape), epsilon(module, x.dtype)
    if len(shape) == 1 and x.dtype == torch.float32:  # in fewer passes over memory
        product = product_of(x, g, grid, small)
        found = None if product is None else written_product(g, x, product)
        if found is not None:
            return {"weight": Term((found[:, None],))}
    hat = rms_normalised(x, len(shape), small)
    return _scale_and_shift(grid.rows_of(g, len(shape)), hat, grid)


def product_of(x: Tensor, g: Tensor, grid: TokenGrid, small: float) -> Product | None:
    """What a compiled pass is told of g * x / rms(x); None where torch has to do it."""
    width = g.shape[-1]
    if g.shape != x.shape or g.dtype != x.dtype:
        return None
    if g.is_contiguous() and x.is_contiguous() and g.ndim <= 3:
        strides = (0, width, 0)
        return Product((1, g.numel() // max(1, width), 1, width), strides, strides, small)
    order = grid.order
    if g.ndim != 4 or len(order) != 3 or g.stride(3) != 1 or x.stride(3) != 1:
        return None
    shape, g_strides, x_strides = (
        tuple(of[axis] for axis in order) for of in (g.shape, g.stride(), x.stride())
    )
    return Product((*shape, width), g_strides, x_strides, small)  # type: ignore[arg-type]


def own_rms_norm(module: Any, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """The same for a class that normalises in a precision and order of its own (transformers).

    xhat is what the module itself returns for a weight that changes nothing; of float32 that is
    what all of them compute.
    """
    if x.dtype == torch.float32:
        return rms_norm(module, x, g, grid)
    value = _NEUTRAL[type(module)] or 0.0
    neutral = torch.full(x.shape[-1:], value, dtype=module.weight.dtype, device=x.device)
    hat = with_weight(module, neutral).forward(x)
    return _scale_and_shift(grid.rows_of(g, 1), hat, grid)


def rms_normalised(x: Tensor, dims: int, small: float) -> Tensor:
    """Return x divided by its root mean square over the last axes, in float32 at least."""
    x = x if x.dtype == torch.float64 else x.float()
    axes = tuple(range(-dims, 0))
    return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + small)


def _scale_and_shift(g: Tensor, hat: Tensor, grid: TokenGrid) -> Terms:
    product = g * grid.rows_of(hat, hat.ndim - grid.leading)
    return {"weight": Term((_over_rows(product),)), "bias": Term((g,))}


def _over_rows(product: Tensor) -> Tensor:
    """(t, r, n) added up over the rows of each token, (t, 1, n)."""
    return product.sum(1, keepdim=True) if product.shape[1] > 1 else product


def epsilon(module: Any, dtype: torch.dtype) -> float:
    """What a norm layer adds to the mean square."""
    own = vars(module)  # asked first: a module is slow to say that it has no such attribute
    for name in ("eps", "variance_epsilon", "epsilon"):
        if own.get(name) is not None:
            return float(own[name])
    for name in ("eps", "variance_epsilon", "epsilon"):
        value = getattr(module, name, None)
        if value is not None:
            return float(value)
    return torch.finfo(dtype).eps


def group_norm(module: nn.GroupNorm, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """For weight and bias per channel: g * xhat and g at each position."""
    return _per_channel(F.group_norm(x, module.num_groups, eps=module.eps), g, grid)


def instance_norm(module: Any, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """As for BatchNorm, with the statistics of each sample."""
    batched = x if x.ndim == (module.spatial or 0) + 2 else x[None]
    mean, variance = (
        (None, None)
        if module.training or not module.track_running_stats
        else (module.running_mean, module.running_var)
    )
    hat = F.instance_norm(
        batched, mean, variance, use_input_stats=mean is None, eps=module.eps
    ).view_as(x)
    return _per_channel(hat, g, grid)


def batch_norm(module: Any, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """For weight and bias per channel at each position, with the batch's mean and variance.

    The copies of the weight at different positions are independent: only the use of the weight is
    split, not the statistics that all positions share.
    """
    uses_batch = module.training or module.running_mean is None
    mean, variance = (None, None) if uses_batch else (module.running_mean, module.running_var)
    hat = F.batch_norm(x, mean, variance, training=uses_batch, eps=module.eps)
    return _per_channel(hat, g, grid)


def prelu(module: nn.PReLU, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """One slope for everything: g * x summed where x is negative."""
    rows = grid.rows_of(g) * grid.rows_of(x).clamp(max=0)
    return {"weight": Term((rows.sum((1, 2), keepdim=True),))}


def prelu_at_positions(module: Any, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """One slope for everything, on data with its features second."""
    rows = grid.channels_of(g * x.clamp(max=0))
    return {"weight": Term((rows.sum(2, keepdim=True),))}


def prelu_per_channel(module: nn.PReLU, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """A slope per channel, the second axis: g * x where x is negative."""
    return {"weight": Term((grid.channels_of(g * x.clamp(max=0)),))}


def _per_channel(hat: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    rows = grid.channels_of(g)
    return {"weight": Term((rows * grid.channels_of(hat),)), "bias": Term((rows,))}


def spatial_axes(module: Any) -> int | None:
    """How many axes of positions a module of this kind has; None where it follows from the data."""
    if hasattr(module, "kernel_size"):
        return len(module.kernel_size)
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return next(dims for dims in (1, 2, 3) if f"{dims}d" in type(module).__name__)
    return None


# -- convolutions --------------------------------------------------------------------------------


def convolution(module: Any, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """A weight (o, i / groups, *kernel): per group g_t (x) the patch of x that position t reads."""
    spatial = len(module.kernel_size)
    batched = x if x.ndim == spatial + 2 else x[None]
    padded = _padded(module, batched)
    return convolution_terms(
        padded,
        g,
        grid,
        tuple(module.kernel_size),
        tuple(module.stride),
        tuple(module.dilation),
        module.groups,
    )


def convolution_terms(
    padded: Tensor,
    g: Tensor,
    grid: TokenGrid,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Terms:
    """The terms of a convolution over an input that is padded already, (b, i, *positions)."""
    rows = grid.channels_of(g)
    size = tuple(g.shape[-len(kernel) :])
    x = patches(padded, kernel, stride, dilation, size)
    # No -1: it cannot be told where there are no rows.
    x = x.reshape(len(rows), groups, padded.shape[1] * math.prod(kernel) // groups)
    if groups == 1:
        return {"weight": Term((rows, x)), "bias": Term((rows,))}
    number = torch.arange(groups, device=g.device).expand(len(rows), groups)
    split = rows.reshape(len(rows), groups, rows.shape[-1] // groups)
    return {"weight": Term((Index(number, groups), split, x)), "bias": Term((rows,))}


def patches(
    padded: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    size: tuple[int, ...],
) -> Tensor:
    """The inputs that each output position reads, (b, *size, i, *kernel), a view."""
    found = padded
    for axis, (k, step, gap, count) in enumerate(zip(kernel, stride, dilation, size, strict=True)):
        found = found.unfold(2 + axis, (k - 1) * gap + 1, step)[..., ::gap]
        found = found.narrow(2 + axis, 0, count)
    spatial = len(kernel)
    positions = range(2, 2 + spatial)
    inside = range(2 + spatial, 2 + 2 * spatial)
    return found.permute(0, *positions, 1, *inside)


def _padded(module: Any, x: Tensor) -> Tensor:
    before_and_after = list(module._reversed_padding_repeated_twice)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, before_and_after, mode=mode) if any(before_and_after) else x


def transposed_convolution(module: Any, x: Tensor, g: Tensor, grid: TokenGrid) -> Terms:
    """Weight (i, o / groups, *kernel): tokens are the positions of the input."""
    spatial = len(module.kernel_size)
    batched, back = (x, g) if x.ndim == spatial + 2 else (x[None], g[None])
    ends = [
        value
        for axis in reversed(range(spatial))
        for value in (module.padding[axis], _room(module, batched, back, axis))
    ]
    padded = F.pad(back, ends)
    kernel = tuple(module.kernel_size), tuple(module.stride), tuple(module.dilation)
    read = patches(padded, *kernel, tuple(batched.shape[2:]))
    rows = batched.movedim(1, -1).flatten(1, -2).flatten(0, 1)
    groups = module.groups
    number = torch.arange(groups, device=g.device).expand(len(rows), groups)
    width = padded.shape[1] * math.prod(module.kernel_size) // groups
    inside = read.reshape(len(rows), groups, width)
    own = rows.reshape(len(rows), groups, rows.shape[-1] // groups)
    weight = Term((Index(number, groups), own, inside))
    return {"weight": weight, "bias": Term((grid.channels_of(g),))}


def _room(module: Any, x: Tensor, g: Tensor, axis: int) -> int:
    """How much the gradient has to be padded at the end, so that every input finds its patch."""
    reach = (module.kernel_size[axis] - 1) * module.dilation[axis] + 1
    needed = (x.shape[2 + axis] - 1) * module.stride[axis] + reach
    return int(max(0, needed - g.shape[2 + axis] - module.padding[axis]))


# -- the table -----------------------------------------------------------------------------------

# A module of this kind, with the forward that torch defines for it -> its rule.
RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Bilinear: bilinear,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    nn.PReLU: prelu,
    nn.modules.batchnorm._BatchNorm: batch_norm,
    nn.modules.instancenorm._InstanceNorm: instance_norm,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.ConvTranspose1d: transposed_convolution,
    nn.ConvTranspose2d: transposed_convolution,
    nn.ConvTranspose3d: transposed_convolution,
}

CHANNELS_SECOND: frozenset[Rule] = frozenset(
    {
        group_norm,
        batch_norm,
        instance_norm,
        prelu_per_channel,
        convolution,
        transposed_convolution,
    }
)
# Layers that autocast lets multiply in 16 bits.
AUTOCAST: frozenset[Rule] = frozenset(
    {linear, conv1d_of_transformers, bilinear, convolution, transposed_convolution}
)


# What a class of normalisation was found to do: the weight that changes nothing, None for others.
_NEUTRAL: dict[type[nn.Module], float | None] = {}


def rule_of(module: nn.Module) -> Rule | None:
    """The rule that describes exactly what this module's forward computes, if there is one."""
    kind: Any = type(module)
    if "forward" in vars(module) or not _parameters_are_plain(module):
        return None
    if isinstance(module, nn.PReLU) and module.num_parameters > 1:
        return prelu_per_channel
    is_known, rule = _rule_of_class(kind, kind.forward)
    if is_known:
        return rule
    if kind not in _NEUTRAL:
        _NEUTRAL[kind] = _neutral_weight(module)
    return own_rms_norm if _NEUTRAL[kind] is not None else None


@lru_cache(maxsize=4096)
def _rule_of_class(kind: type[nn.Module], forward: Any) -> tuple[bool, Rule | None]:
    """Whether its code alone says what a class computes, and that."""
    if forward.__module__.startswith("torch.nn.modules"):
        return True, next((rule for base, rule in RULES.items() if issubclass(kind, base)), None)
    if forward.__module__ == "transformers.pytorch_utils" and kind.__name__ == "Conv1D":
        return True, conv1d_of_transformers
    return False, None


# Rules that ask for a state of the module which may be another when the result is read.
STATEFUL: frozenset[Rule] = frozenset({batch_norm, instance_norm})


def settings_of(module: Any) -> Any:
    """What these rules ask a module for, as it is now."""
    settings = SimpleNamespace(
        training=module.training,
        eps=module.eps,
        track_running_stats=module.track_running_stats,
        running_mean=None,
        running_var=None,
        spatial=spatial_axes(module),
    )
    if not module.training and module.running_mean is not None:
        settings.running_mean = module.running_mean.clone()
        settings.running_var = module.running_var.clone()
    return settings


def _parameters_are_plain(module: nn.Module) -> bool:
    """Whether the module computes with its parameters themselves, and not with functions of them.

    Parametrizations and the older weight_norm put a computed tensor in the parameter's place.
    """
    plain = "weight" in module._parameters or not hasattr(module, "weight")
    return plain and "parametrizations" not in module._modules


def _neutral_weight(module: nn.Module) -> float | None:
    """Of a module that scales x / rms(x) by its weight (1.0) or by 1 + weight (0.0); else None.

    transformers has a class of its own per model; what counts is what it computes, on a copy.
    """
    if "Norm" not in type(module).__name__ or any(True for _ in module.children()):
        return None
    weight = module._parameters.get("weight")
    if weight is None or len(module._parameters) != 1 or weight.ndim != 1 or weight.is_meta:
        return None
    if len(signature(type(module).forward).parameters) != 2:  # x alone; others have a gate as well
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, len(weight), generator=generator, device="cpu").to(weight.device)
    scale = torch.randn(len(weight), generator=generator, device="cpu").to(weight.device)
    try:
        with torch.no_grad():
            y = with_weight(module, scale).forward(x)
    except Exception:  # whatever it needs, it is no such layer, and is run again as others are
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    hat = rms_normalised(x, 1, epsilon(module, x.dtype))
    for neutral, factor in ((1.0, scale), (0.0, 1 + scale)):
        if torch.allclose(y, hat * factor, rtol=1e-4, atol=1e-5):
            return neutral
    return None


def with_weight(module: nn.Module, weight: Tensor) -> Any:
    """A shallow copy of a module without its hooks and with another weight."""
    bare = copy.copy(module)
    bare._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    return bare
