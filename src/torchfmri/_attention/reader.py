"""Attention read where it is called, with the layer that called it.

`Inspector` and `_scan` open an `AttentionReader`. Its `TorchFunctionMode` only reads: what it sees
is handed on as it came, so outputs are bit-equal, and nothing is drawn from the random generators.
Four kinds of attention are seen: `F.scaled_dot_product_attention` and flash-attention kernels,
whose patterns are recomputed from queries, keys and mask; `F.multi_head_attention_forward`
(`nn.MultiheadAttention`), asked once more for its weights; and attention written out, a softmax
whose result is multiplied with the values. Weights on their way from softmax to product are known
by id, so `_Weights` holds the tensor. A call in a backward pass is a checkpoint's repetition and is
not read again. Further kinds of attention may be read freely, under the same rule.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchfmri._attention.flash import is_flash, read_flash
from torchfmri._attention.fused import FusedAttention
from torchfmri._capture import RunningLayers
from torchfmri._model import named_layers
from torchfmri._torch import (
    NO_BACKWARD,
    Attached,
    current_backward,
    is_transformed,
    operator_schema,
)

CHUNK_BYTES = 64 << 20
"""How many bytes of a pattern are recomputed at once."""

_SOFTMAX = frozenset([torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax])
_PRODUCTS = frozenset(
    [torch.matmul, torch.bmm, torch.einsum, Tensor.matmul, Tensor.bmm, Tensor.__matmul__]
)
# What a model does to the weights between softmax and product. What keeps all of them (a cast,
# another shape, dropout) leaves the pattern as it is; a slice (gpt-oss drops its sink) is the
# pattern from then on, and so is a product (a mask over heads).
_BETWEEN = frozenset(
    [
        *(Tensor.to, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double),
        *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.contiguous, Tensor.clone),
        *(F.dropout, torch.dropout, Tensor.__getitem__, Tensor.mul, Tensor.__mul__, torch.mul),
    ]
)
_CHANGES = frozenset([Tensor.mul, Tensor.__mul__, torch.mul, Tensor.__getitem__])
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads")
_MULTIHEAD = inspect.signature(F.multi_head_attention_forward)


class AttentionCall:
    """One attention that ran.

    Attributes:
        layer: The innermost layer that was running.
        stack: All layers that were running, the outermost first.
        shape: (b, heads, q, k).
        dropout: Whether the model drops weights at random; the pattern is that before it does.
    """

    def __init__(
        self, stack: tuple[str, ...], source: FusedAttention | Tensor, dropout: bool
    ) -> None:
        self.stack, self.dropout = stack, dropout
        self.layer = stack[-1] if stack else ""
        self._source = source
        self.shape = _four(tuple(source.shape))

    @property
    def bytes(self) -> int:
        """How many bytes the whole pattern takes."""
        b, heads, queries, keys = self.shape
        return b * heads * queries * keys * self._dtype().itemsize

    def _dtype(self) -> torch.dtype:
        source = self._source
        dtype = source.query.dtype if isinstance(source, FusedAttention) else source.dtype
        return torch.float64 if dtype == torch.float64 else torch.float32

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the pattern in parts of at most `CHUNK_BYTES`: the first query, and its rows.

        Each part is (b, heads, rows, k), the weights of one row adding up to 1.
        """
        queries = self.shape[2]
        rows = max(1, CHUNK_BYTES * queries // max(1, self.bytes))
        for first in range(0, queries, rows):
            last = min(first + rows, queries)
            if isinstance(self._source, FusedAttention):
                part = self._source.rows(first, last)
            else:
                part = self._source[..., first:last, :].detach().to(self._dtype())
            yield first, part.reshape(_four(tuple(part.shape)))

    def pattern(self) -> Tensor:
        """Return the whole pattern, (b, heads, q, k)."""
        parts = [part for _, part in self.chunks()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _four(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return a shape as (b, heads, q, k); a pattern without an axis of heads has one head."""
    *before, queries, keys = shape
    return (before[0] if before else 1, math.prod(before[1:]), queries, keys)


class AttentionReader(Attached):
    """Hands over every attention of a model while its block runs; see the top of this file.

    Args:
        model: The model; hooks on its layers tell which one is running, and are taken off again.
        found: Called with each attention, inside the forward pass: read it at once.
        failed: Told the running layer and an exception of ours, so that the model runs on.

    Attributes:
        layers: The layers that were seen to compute attention.
        unread: Layers that were seen to compute attention that cannot be read, and why.
        running: The layers that run now, and how often each was called.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Callable[[AttentionCall], None],
        failed: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self.layers: dict[str, None] = {}
        self.unread: dict[str, str] = {}
        self.running = RunningLayers(model, lambda _: None)
        self._found, self._failed = found, failed
        self._layers = named_layers(model)
        self._mode = _Reading(self._see, self._miss)

    def _attach(self, stack: ExitStack) -> None:
        stack.callback(self._mode.forget)
        stack.enter_context(self.running)
        stack.enter_context(self._mode)

    def _by_head(
        self, stack: tuple[str, ...], source: FusedAttention | Tensor
    ) -> FusedAttention | Tensor:
        """Return (b * heads, q, k) as (b, heads, q, k) if the layer says how many heads it has."""
        if isinstance(source, FusedAttention) or source.ndim != 3 or not stack:
            return source
        module = self._layers.get(stack[-1])
        counts = (getattr(module, name, None) for name in _HEAD_COUNTS)
        heads = next((each for each in counts if isinstance(each, int) and each > 0), 1)
        return source.unflatten(0, (-1, heads)) if len(source) % heads == 0 else source  # type: ignore[no-untyped-call]

    def _miss(self, reason: str) -> None:
        if current_backward() == NO_BACKWARD:
            self.unread.setdefault(self.running.stack[-1] if self.running.stack else "", reason)

    def _see(self, source: FusedAttention | Tensor, dropout: bool) -> None:
        # A checkpoint that runs its part again repeats a call that was seen.
        if current_backward() != NO_BACKWARD:
            return
        stack = tuple(self.running.stack)
        call = AttentionCall(stack, self._by_head(stack, source), dropout)
        self.layers[call.layer] = None
        try:
            device = source.query.device if isinstance(source, FusedAttention) else source.device
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                self._found(call)
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(call.layer, error)


class _Reading(TorchFunctionMode):
    """Sees the functions that attention is made of; inside its handler it is switched off."""

    def __init__(
        self, see: Callable[[FusedAttention | Tensor, bool], None], miss: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._see, self._miss = see, miss
        self._weights: dict[int, _Weights] = {}

    def forget(self) -> None:
        """Let go of the weights that wait for their product."""
        self._weights.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if not is_transformed(args[0] if args else kwargs["query"]):
                self._see(FusedAttention.of_call(args, kwargs), bool(dropout))
        elif func is F.multi_head_attention_forward:
            self._ask_again(args, kwargs)
        elif (schema := operator_schema(func)) is not None:
            if is_flash(schema):
                self._take_flash(schema, args, kwargs)
        elif func in _SOFTMAX:
            self._start(args, kwargs, result)
        elif self._weights:
            if func in _PRODUCTS:
                self._end(func, args)
            elif func in _BETWEEN and args and isinstance(result, Tensor):
                self._follow(func, args, result)
        return result

    def _take_flash(self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = read_flash(schema, args, kwargs)
        if isinstance(found, str):
            self._miss(found)
        else:
            self._see(*found)

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        """Keep what a softmax over the last axis made; only the latest one."""
        axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
        self._weights.clear()
        if result.ndim >= 3 and axis in (-1, result.ndim - 1) and not is_transformed(result):
            self._weights[id(result)] = _Weights(result, result, dropped=False)

    def _follow(self, func: Any, args: tuple[Any, ...], result: Tensor) -> None:
        before = self._weights.get(id(args[0]))
        if before is None:
            return
        same = result.numel() == before.pattern.numel() and func not in _CHANGES
        dropped = before.dropped or (func in (F.dropout, torch.dropout) and result is not args[0])
        pattern = before.pattern if same else result
        self._weights[id(result)] = _Weights(result, pattern, dropped)

    def _end(self, func: Any, args: tuple[Any, ...]) -> None:
        operands = args[1:] if func is torch.einsum else args
        if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
            operands = tuple(operands[0])
        weights = self._weights.get(id(operands[0])) if operands else None
        if weights is None or len(operands) < 2:
            return
        self._weights.clear()
        keys = operands[1].shape[-2] if func is not torch.einsum else weights.pattern.shape[-1]
        if weights.pattern.shape[-1] == keys:
            self._see(weights.pattern, weights.dropped)

    def _ask_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have nn.MultiheadAttention compute its weights, without dropout."""
        given = _MULTIHEAD.bind(*args, **kwargs).arguments
        is_dropping = bool(given.get("training", True) and given["dropout_p"])
        given |= {"need_weights": True, "average_attn_weights": False, "dropout_p": 0.0}
        with torch.no_grad():
            _, weights = F.multi_head_attention_forward(**given)
        if weights is not None:
            # Without a batch axis it is (heads, q, k).
            self._see(weights if weights.ndim == 4 else weights[None], is_dropping)


class _Weights(NamedTuple):
    """A tensor on its way from a softmax to a product, and the pattern that it stands for."""

    tensor: Tensor  # held, so that no other tensor gets its id
    pattern: Tensor
    dropped: bool
