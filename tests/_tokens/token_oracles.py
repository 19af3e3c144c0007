"""Slow and obvious token gradients: every token position has a copy of the weights of its own.

Nothing here uses torchfmri. A module runs once per token, each time with another copy of its
parameters, and of each run only that token's part of the output is used; what reaches a copy is
the token's gradient. Where a position is not one of the output (a transposed convolution, the keys
of an attention, the steps of an RNN), the layer is written out. The oracle checks itself: with
copies the loss must be the same, and the copies' gradients must add up to `.grad`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from oracles import random_state, set_random_state
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

GridShape = tuple[int, int]
Truth = dict[str, dict[GridShape, Tensor]]

CHANNELS_SECOND = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
)


class Copies:
    """The copies of every parameter: one leaf (b, s, *shape) per parameter and grid of tokens."""

    def __init__(self) -> None:
        self.leaves: dict[tuple[int, GridShape], Tensor] = {}

    def __call__(self, parameter: Tensor, b: int, s: int) -> Tensor:
        key = (id(parameter), (b, s))
        if key not in self.leaves:
            whole = parameter.detach().expand(b, s, *parameter.shape).clone()
            self.leaves[key] = whole.requires_grad_()
        return self.leaves[key]


def token_truth(
    build: Callable[[], nn.Module],
    run: Callable[[nn.Module], Tensor],
    grid: GridShape | None = None,
    *,
    tolerance: float = 1e-11,
) -> Truth:
    """Every parameter's gradient per token, {name: {(b, s): (b, s, *shape)}}.

    Args:
        build: Makes the model, the same one each time.
        run: Forward pass up to the loss.
        grid: (b, s) of what the model is handed; with it further axes are inside a token.
        tolerance: Of the oracle's check of itself.
    """
    state = random_state()
    plain, replica, copies = build(), build(), Copies()
    set_random_state(state)
    expected = run(plain)
    expected.backward()
    _patch(replica, copies, grid)
    set_random_state(state)
    loss = run(replica)
    set_random_state(state)
    assert torch.allclose(loss, expected, rtol=tolerance, atol=tolerance), "the oracle is wrong"
    keys = list(copies.leaves)
    gradients = torch.autograd.grad(loss, [copies.leaves[key] for key in keys], allow_unused=True)
    found = {
        key: torch.zeros_like(copies.leaves[key]) if each is None else each
        for key, each in zip(keys, gradients, strict=True)
    }
    truth: Truth = {}
    grads = {name: each.grad for name, each in plain.named_parameters()}
    for name, parameter in replica.named_parameters():
        own = {key[1]: each for key, each in found.items() if key[0] == id(parameter)}
        gradient = grads[name]
        if gradient is None:
            zero = not any(bool(each.any()) for each in own.values())
            assert zero or not parameter.requires_grad, f"{name}: no gradient"
            continue
        total = sum(each.sum((0, 1)) for each in own.values())
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        scale = float(gradient.abs().max()) or 1.0
        off = float((total - gradient).abs().max()) / scale
        assert off < tolerance, f"the oracle's copies of {name} miss .grad by {off:.1e}"
        truth[name] = own
    return truth


def _patch(replica: nn.Module, copies: Copies, grid: GridShape | None) -> None:
    """Put the references in the place of the forwards of all modules with parameters."""

    def visit(module: nn.Module) -> None:
        whole = hasattr(module, "token_reference") or hasattr(module, "parametrizations")
        whole = whole or isinstance(module, nn.MultiheadAttention)
        if whole or _own(module):
            module.forward = _reference(module, copies, grid)  # type: ignore[method-assign]
        if not whole:
            for child in module.children():
                visit(child)

    visit(replica)


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that a module uses itself: not those of a child that has them too."""
    if hasattr(module, "parametrizations"):
        return dict(module.named_parameters())
    below = {id(each) for child in module.children() for each in child.parameters()}
    named = module.named_parameters(recurse=False)
    return {name: each for name, each in named if id(each) not in below}


def _reference(module: nn.Module, copies: Copies, grid: GridShape | None) -> Callable[..., Any]:
    if hasattr(module, "token_reference"):
        return lambda *inputs, **keywords: module.token_reference(copies, *inputs, **keywords)  # type: ignore[operator]
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return lambda *inputs: _transposed(module, copies, *inputs)
    if isinstance(module, nn.RNNBase):
        return lambda *inputs, **keywords: _recurrent(module, copies, *inputs, **keywords)
    if isinstance(module, nn.MultiheadAttention):
        return lambda *inputs, **keywords: _attention(module, copies, *inputs, **keywords)
    return lambda *inputs, **keywords: by_position(module, copies, grid, inputs, keywords)


# -- one run per token ---------------------------------------------------------------------------


def by_position(
    module: nn.Module,
    copies: Copies,
    grid: GridShape | None,
    inputs: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """The output of which each position was computed with that position's copies."""
    bare = _bare(module)
    bare.__dict__["sparse"] = False  # of an Embedding: the values are the same
    parameters = _own(module)
    state = random_state()

    def called(own: dict[str, Tensor]) -> Any:
        set_random_state(state)
        buffers = {name: each.clone() for name, each in module.named_buffers()}
        return functional_call(bare, own | buffers, inputs, keywords)

    with torch.no_grad():
        plain = called({})
    several = isinstance(plain, tuple)
    first = plain[0] if several else plain
    second = isinstance(module, CHANNELS_SECOND)
    second = second or (isinstance(module, nn.PReLU) and module.num_parameters > 1)
    (b, s), numbers = token_numbers(first.shape, second, grid, module)
    own = {name: copies(each, b, s).flatten(0, 1) for name, each in parameters.items()}
    result: list[Any] = [0] * (len(plain) if several else 1)
    for token in range(b * s):
        made = called({name: each[token] for name, each in own.items()})
        for place, each in enumerate(made if several else (made,)):
            here = numbers.expand_as(each) if not several else numbers[..., :1].expand_as(each)
            result[place] = result[place] + torch.where(here == token, each, 0)
    return tuple(result) if several else result[0]


def _bare(module: nn.Module) -> nn.Module:
    """The module with its own forward."""
    bare = object.__new__(type(module))
    bare.__dict__.update({key: each for key, each in vars(module).items() if key != "forward"})
    return bare


def token_numbers(
    shape: torch.Size, channels_second: bool, grid: GridShape | None, module: nn.Module
) -> tuple[GridShape, Tensor]:
    """(b, s), and the token b * s + s of every entry of an output of this shape."""
    if channels_second and len(shape) >= 2:
        kernel = getattr(module, "kernel_size", None)
        spatial = len(kernel) if kernel is not None else None
        if isinstance(module, nn.modules.instancenorm._InstanceNorm):
            spatial = int(type(module).__name__[-2])  # InstanceNorm2d
        if spatial is not None and len(shape) == spatial + 1:  # no batch axis
            positions = math.prod(shape[1:])
            return (1, positions), torch.arange(positions).view(1, *shape[1:]).expand(shape)
        b, positions = shape[0], math.prod(shape[2:])
        numbers = torch.arange(b * positions).view(b, 1, *shape[2:])
        return (b, positions), numbers.expand(shape)
    features = len(getattr(module, "normalized_shape", (0,)))
    lead = shape[: len(shape) - features]
    ones = [1] * features
    if len(lead) == 0:
        return (1, 1), torch.zeros(shape, dtype=torch.long)
    if len(lead) == 1:
        if grid is not None and grid[1] > 1 and lead[0] == math.prod(grid):
            return grid, torch.arange(lead[0]).view(-1, *ones).expand(shape)
        return (lead[0], 1), torch.arange(lead[0]).view(-1, *ones).expand(shape)
    if len(lead) > 2 and grid is not None and lead[0] == grid[0] and grid[1] in lead[1:]:
        axis = 1 + list(lead[1:]).index(grid[1])
        axes = [grid[0]] + [1] * (len(lead) - 1)
        axes[axis] = grid[1]
        return grid, torch.arange(math.prod(grid)).view(*axes, *ones).expand(shape)
    b, s = lead[0], math.prod(lead[1:])
    return (b, s), torch.arange(b * s).view(*lead, *ones).expand(shape)


# -- layers that are written out -----------------------------------------------------------------


def _transposed(module: Any, copies: Copies, x: Tensor, output_size: Any = None) -> Tensor:
    """A transposed convolution: each INPUT position spreads with its own copy of the weight.

    The bias is added at output positions.
    """
    bare, spatial = _bare(module), len(module.kernel_size)
    batched = x if x.ndim == spatial + 2 else x[None]
    b, s = batched.shape[0], math.prod(batched.shape[2:])
    weights = copies(module.weight, b, s).flatten(0, 1)
    numbers = torch.arange(b * s).view(b, 1, *batched.shape[2:])
    zero = None if module.bias is None else torch.zeros_like(module.bias)
    result: Any = 0
    for token in range(b * s):
        alone = torch.where(numbers == token, batched, 0.0)
        own = {"weight": weights[token]} | ({} if zero is None else {"bias": zero})
        result = result + functional_call(bare, own, (alone, output_size))
    if module.bias is not None:
        positions = math.prod(result.shape[2:])
        bias = copies(module.bias, b, positions)
        result = result + bias.mT.reshape(b, -1, *result.shape[2:])
    return result if x.ndim == spatial + 2 else result[0]


def rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y_t = W_t x_t + b_t for x (b, s, i), weights (b, s, o, i)."""
    y = torch.einsum("bsi,bsoi->bso", x, weight)
    return y if bias is None else y + bias


def _attention(
    module: Any,
    copies: Copies,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Multi-head attention: projections with copies of the query's, key's or value's position.

    bias_k and bias_v are one more key position of each sample.
    """
    width, heads = module.embed_dim, module.num_heads
    is_batched = query.ndim == 3
    # Without a batch axis (s, i) is read like any (b, i): s tokens of one position.
    tensors = [each if is_batched else each[:, None] for each in (query, key, value)]
    swapped = not is_batched or not module.batch_first
    projected = []
    for number, x in enumerate(tensors):
        part = slice(number * width, (number + 1) * width)
        if module.in_proj_weight is not None:
            weight = copies(module.in_proj_weight, *x.shape[:2])[:, :, part]
        else:
            name = ("q_proj_weight", "k_proj_weight", "v_proj_weight")[number]
            weight = copies(getattr(module, name), *x.shape[:2])
        bias = module.in_proj_bias
        bias = None if bias is None else copies(bias, *x.shape[:2])[:, :, part]
        y = rows(x, weight, bias)
        projected.append(y.transpose(0, 1) if swapped else y)
    q, k, v = projected
    b = len(q)
    if module.bias_k is not None:
        s = k.shape[1]  # torch puts them after the keys: token (b, s) of (b, s + 1)
        extra = [copies(each, b, s + 1)[:, s, 0] for each in (module.bias_k, module.bias_v)]
        k, v = torch.cat([k, extra[0]], 1), torch.cat([v, extra[1]], 1)
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    q, k, v = (each.view(b, -1, heads, width // heads).transpose(1, 2) for each in (q, k, v))
    scores = q @ k.mT / math.sqrt(width // heads)
    added = k.shape[2] - (key.shape[0] if swapped else tensors[1].shape[1])
    if attn_mask is not None:
        mask = attn_mask if attn_mask.ndim == 2 else attn_mask.view(b, heads, *attn_mask.shape[1:])
        scores = _masked(scores, F.pad(mask, (0, added)))
    if key_padding_mask is not None:
        hidden = key_padding_mask if is_batched else key_padding_mask[None]
        scores = _masked(scores, F.pad(hidden, (0, added))[:, None, None])
    weights = F.dropout(scores.softmax(-1), module.dropout, module.training)
    mixed = (weights @ v).transpose(1, 2).flatten(2)
    mixed = mixed.transpose(0, 1) if swapped else mixed
    outer = module.out_proj
    bias = None if outer.bias is None else copies(outer.bias, *mixed.shape[:2])
    result = rows(mixed, copies(outer.weight, *mixed.shape[:2]), bias)
    if is_batched and module.batch_first:  # torch's own comes steps first in memory, and dropout
        result = result.transpose(0, 1).contiguous().transpose(0, 1)  # draws in that order
    shown = weights.mean(1) if average_attn_weights else weights
    if not is_batched:
        result, shown = result[:, 0], shown[0]
    return result, shown if need_weights else None


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _recurrent(module: Any, copies: Copies, x: Any, hx: Any = None) -> Any:
    """An RNN, sample by sample and step by step, every step with its own copy of the weights."""
    packed = x if isinstance(x, PackedSequence) else None
    if packed is not None:
        padded, lengths = pad_packed_sequence(packed, batch_first=True)
    else:
        is_batched = x.ndim == 3
        padded = x if module.batch_first else x.transpose(0, 1)
        padded = padded if is_batched else x[None]
        lengths = torch.full((len(padded),), padded.shape[1])
    b, s = padded.shape[:2]
    time_first = not module.batch_first and (packed is not None or is_batched)
    grid = (s, b) if time_first else (b, s)
    directions = 2 if module.bidirectional else 1
    several = isinstance(module, nn.LSTM)
    states = _first_states(module, padded, hx, packed is not None or is_batched)

    def weights(sample: int, time: int, name: str) -> Tensor | None:
        parameter = module._parameters.get(name)
        if parameter is None:
            return None
        whole = copies(parameter, *grid)
        return whole[time, sample] if time_first else whole[sample, time]

    layers: Any = padded
    ends: list[list[list[Tensor]]] = [[[] for _ in range(b)] for _ in states]
    for layer in range(module.num_layers):
        made = [[torch.zeros(0)] * s for _ in range(b)]
        width = 0
        for direction in range(directions):
            number = layer * directions + direction
            for sample in range(b):
                state = [each[number, sample] for each in states]
                order = range(int(lengths[sample]))
                for time in reversed(order) if direction else order:
                    state = _cell(
                        module,
                        layers[sample, time],
                        state,
                        layer,
                        direction,
                        partial(weights, sample, time),
                    )
                    width = len(state[0])
                    before = made[sample][time] if direction else state[0].new_zeros(0)
                    made[sample][time] = torch.cat([before, state[0]])
                for kept, each in zip(ends, state, strict=True):
                    kept[sample].append(each)
        zero = padded.new_zeros(width * directions)
        rows_of = [torch.stack([each if len(each) else zero for each in sample]) for sample in made]
        layers = torch.stack(rows_of)
        if layer < module.num_layers - 1 and module.dropout and module.training:
            # The kernel is steps first, and draws its numbers in that order.
            drop = F.dropout(layers.transpose(0, 1).contiguous(), module.dropout)
            layers = drop.transpose(0, 1)
    last = [torch.stack([torch.stack(each) for each in kept], 1) for kept in ends]
    if packed is not None:
        again = pack_padded_sequence(layers, lengths, True, enforce_sorted=False)
        order = packed.sorted_indices
        if order is None:
            again = pack_padded_sequence(layers, lengths, True)
        return again, (tuple(last) if several else last[0])
    if not is_batched:
        last = [each[:, 0] for each in last]
        return layers[0], (tuple(last) if several else last[0])
    result = layers if module.batch_first else layers.transpose(0, 1)
    return result, (tuple(last) if several else last[0])


def _first_states(module: Any, padded: Tensor, hx: Any, is_batched: bool) -> list[Tensor]:
    several = isinstance(module, nn.LSTM)
    if hx is not None:
        given = list(hx) if several else [hx]
        return given if is_batched else [each[:, None] for each in given]
    count = module.num_layers * (2 if module.bidirectional else 1)
    width = getattr(module, "proj_size", 0) or module.hidden_size
    widths = [width, module.hidden_size] if several else [width]
    return [padded.new_zeros(count, len(padded), each) for each in widths]


def _cell(
    module: Any,
    x: Tensor,
    state: list[Tensor],
    layer: int,
    direction: int,
    weight: Callable[[str], Tensor | None],
) -> list[Tensor]:
    """One step of one sample, with torch's own cells."""
    at = f"l{layer}{'_reverse' if direction else ''}"
    four = [weight(f"{name}_{at}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    row = x[None]
    if isinstance(module, nn.GRU):
        return [torch.gru_cell(row, state[0][None], *four)[0]]
    if isinstance(module, nn.RNN):
        step = torch.rnn_tanh_cell if module.nonlinearity == "tanh" else torch.rnn_relu_cell
        return [step(row, state[0][None], *four)[0]]
    projection = weight(f"weight_hr_{at}")
    if projection is None:
        hidden, memory = torch.lstm_cell(row, (state[0][None], state[1][None]), *four)
        return [hidden[0], memory[0]]
    from_x = F.linear(x, four[0], four[2])  # type: ignore[arg-type]
    from_h = F.linear(state[0], four[1], four[3])  # type: ignore[arg-type]
    enter, forget, cell, leave = (from_x + from_h).chunk(4)
    memory = forget.sigmoid() * state[1] + enter.sigmoid() * cell.tanh()
    return [F.linear(leave.sigmoid() * memory.tanh(), projection), memory]
