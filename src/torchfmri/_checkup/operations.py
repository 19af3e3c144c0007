"""What single operations do: how the loss reads the output, how attention spreads, who reads whom.

A dispatch mode sees each operation below autograd, whatever the code above it is called. It is on
for a few steps of a check-up only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchfmri._diagnosis.notes import Notes
from torchfmri._diagnosis.observation import HeadActivity
from torchfmri._torch_private import DispatchMode

_VIEWS = frozenset(
    [
        "detach",
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "permute",
        "expand",
        "alias",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "_reshape_alias",
        "split",
        "split_with_sizes",
        "unbind",
        "as_strided",
    ]
)
_KEEPS_LOGITS = frozenset(
    [
        "add",
        "add_",
        "sub",
        "sub_",
        "mul",
        "mul_",
        "div",
        "div_",
        "masked_fill",
        "masked_fill_",
        "where",
        "view",
        "_unsafe_view",
        "expand",
        "transpose",
        "permute",
        "clone",
        "_to_copy",
        "softcap",
        "tanh",
        "contiguous",
    ]
)
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
_COMPARISONS = frozenset(["sub", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "mul"])
_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "nll_loss_forward")
_MEAN = 1


class OperationWatch(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes what the operations of one step tell.

    Args:
        where: The layer that is running, "" outside of the model.
        step: The number of the step.
        notes: Takes down what fails in here.

    Attributes:
        heads: Attention by layer.
        classes: Of the cross entropy, if there is one.
        cross_entropy: Its mean in nats.
        misread: What the output is taken for, and what it is.
        broadcast: Two shapes that a comparison in the loss blew up, and the result's.
        inner: The value of the last built-in loss.
        consumed: The layers whose output was read by an operation of another.
        ignored: The target that a cross entropy leaves out; None if there is no cross entropy.
        outside: The share of targets of a binary cross entropy that are no probabilities.
    """

    def __init__(self, where: Callable[[], str], step: int, notes: Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where, self._step = where, step
        self._guard = notes.guard("Some operation")
        self.in_loss = False
        self.heads: list[HeadActivity] = []
        self.classes: int | None = None
        self.cross_entropy: float | None = None
        self.misread: tuple[str, str] | None = None
        self.broadcast: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None
        self.inner: float | None = None
        self.consumed: set[str] = set()
        self.ignored: int | None = None
        self.outside = 0.0
        self._makers: dict[int, str] = {}
        self._kept: list[Tensor] = []
        self._logits: dict[int, Tensor] = {}
        self._expanded: dict[int, tuple[Tensor, tuple[int, ...]]] = {}

    def made(self, layer: str, output: Tensor) -> None:
        """A layer returned this; from now on somebody may read it."""
        if output.layout == torch.strided:
            self._makers[output.untyped_storage().data_ptr()] = layer
            self._kept.append(output)  # so that its memory is not used again in this step

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and look at what came of it."""
        result = func(*args, **(kwargs or {}))
        with self._guard:
            self._look(func.overloadpacket.__name__, args, kwargs or {}, result)
        return result

    def _look(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        self._note_readers(name, args)
        if name in ("bmm", "baddbmm") or (name == "matmul" and isinstance(result, Tensor)):
            self._mark(result)
        elif name in _KEEPS_LOGITS and isinstance(result, Tensor):
            if any(isinstance(each, Tensor) and id(each) in self._logits for each in args):
                self._mark(result)
        elif name in ("_softmax", "_safe_softmax"):
            self._look_at_softmax(args[0], result)
        elif name in _ATTENTION:
            self._look_at_attention(args, kwargs)
        elif name == "_log_softmax":
            self._look_at_logits(args[0])
        elif name.startswith("nll_loss") and name.endswith("forward"):
            self._look_at_nll(args, result)
        elif name == "binary_cross_entropy_with_logits":
            self._look_at_binary(args[0], args[1])
        if self.in_loss and name == "expand":
            self._expanded[id(result)] = (result, tuple(args[0].shape))
        if self.in_loss and name in _COMPARISONS:
            self._look_at_comparison(name, args, result)
        if name in _LOSSES:
            value = result[0] if isinstance(result, tuple) else result
            if value.numel() == 1:
                self.inner = float(value.detach())

    # -- who reads whom ----------------------------------------------------------------------

    def _note_readers(self, name: str, args: tuple[Any, ...]) -> None:
        if name in _VIEWS or not self._makers:
            return
        here = self._where()
        for each in args:
            for tensor in each if isinstance(each, (list, tuple)) else (each,):
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                    maker = self._makers.get(tensor.untyped_storage().data_ptr())
                    if maker is not None and maker != here and not here.startswith(f"{maker}."):
                        self.consumed.add(maker)

    # -- the loss ----------------------------------------------------------------------------

    def _look_at_logits(self, logits: Tensor) -> None:
        if logits.ndim < 2 or (logits.shape[-1] < 2 and logits.shape[1] < 2):
            return
        if self.misread is None and _are_probabilities(logits):
            self.misread = ("logits", "probabilities")
        elif self.misread is None and logits.ndim == 2 and _are_probabilities(logits.T):
            self.misread = ("logits", "probabilities over the batch")

    def _look_at_binary(self, logits: Tensor, target: Tensor) -> None:
        values = logits.detach()
        self.outside = float(((target < 0) | (target > 1)).float().mean())
        inside = bool(((values >= 0) & (values <= 1)).all())
        if inside and values.numel() >= 8 and float(values.float().std()) > 0:
            # Logits of a model at its start are of both signs.
            self.misread = self.misread or ("logits", "probabilities")

    def _look_at_nll(self, args: tuple[Any, ...], result: Any) -> None:
        log_probabilities, target = args[0].detach().float(), args[1]
        self.ignored = int(args[4]) if len(args) > 4 else -100
        if log_probabilities.ndim > 2:
            log_probabilities = log_probabilities.movedim(1, -1).flatten(0, -2)
        target = target.reshape(-1)
        counts = target != self.ignored
        if log_probabilities.ndim != 2 or not bool(counts.any()):
            return
        total = log_probabilities.logsumexp(-1)
        if bool(torch.isfinite(total).all()) and float(total.abs().max()) > 1e-2:
            if _are_probabilities(log_probabilities):
                self.misread = self.misread or ("log-probabilities", "probabilities")
            else:
                self.misread = self.misread or ("log-probabilities", "logits")
            return
        chosen = log_probabilities[counts].gather(1, target[counts][:, None])
        self.classes = log_probabilities.shape[-1]
        self.cross_entropy = float(-chosen.mean())

    def _look_at_comparison(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if len(args) < 2 or not all(isinstance(each, Tensor) for each in args[:2]):
            return
        one, other = (
            self._expanded[id(each)][1] if id(each) in self._expanded else tuple(each.shape)
            for each in args[:2]
        )
        numbers = math.prod(one)
        if numbers != math.prod(other) or numbers < 2 or len(one) == len(other):
            return
        shape = tuple(torch.broadcast_shapes(one, other))  # type: ignore[no-untyped-call]
        if math.prod(shape) > numbers and self.broadcast is None:
            self.broadcast = (one, other, shape)

    # -- attention ---------------------------------------------------------------------------

    def _mark(self, tensor: Tensor) -> None:
        self._logits[id(tensor)] = tensor

    def _look_at_softmax(self, logits: Tensor, probabilities: Tensor) -> None:
        if id(logits) not in self._logits or logits.ndim < 3 or logits.shape[-1] < 4:
            return
        self._add_heads(logits.detach().float(), probabilities.detach().float())

    def _look_at_attention(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        q, k = args[0].detach().float(), args[1].detach().float()
        if q.ndim != 4 or k.shape[-2] < 4:
            return
        options = dict(kwargs)
        scale = options.get("scale")
        causal = options.get("is_causal", next((a for a in args[3:] if isinstance(a, bool)), False))
        mask = options.get("attn_mask", options.get("attn_bias"))
        if mask is None:
            mask = next((a for a in args[3:] if isinstance(a, Tensor)), None)
        if k.shape[1] != q.shape[1]:  # grouped queries
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        logits = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
        if mask is not None:
            mask = mask.detach()
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -math.inf)
            logits = logits + mask
        if causal:
            above = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            logits = logits.masked_fill(above, -math.inf)
        self._add_heads(logits, logits.softmax(-1).nan_to_num())

    def _add_heads(self, logits: Tensor, probabilities: Tensor) -> None:
        """Logits (b, heads, s, s) or (b * heads, s, s)."""
        if logits.ndim == 3:
            logits, probabilities = logits[None], probabilities[None]
        hidden = torch.finfo(torch.float16).min / 2  # as -inf, and as the smallest number
        open_keys = logits > hidden
        keys = open_keys.sum(-1)
        entropy = torch.special.entr(probabilities).sum(-1) / keys.clamp(min=2).log()
        rows = keys >= 4
        sums = (entropy * rows).sum(dim=(0, -1)) / rows.sum(dim=(0, -1)).clamp(min=1)
        largest = logits.masked_fill(~open_keys, 0).abs().amax(dim=(0, -1, -2))
        if not bool(rows.any()):
            return
        self.heads.append(
            HeadActivity(self._where(), self._step, tuple(sums.tolist()), tuple(largest.tolist()))
        )


def _are_probabilities(values: Tensor) -> bool:
    """Whether each row is a distribution: in [0, 1], with sum 1."""
    rows = values.detach().float()
    if bool(((rows < 0) | (rows > 1)).any()):
        return False
    axes = (-1,) if rows.ndim == 2 else (-1, 1)
    return any(bool(((rows.sum(axis) - 1).abs() < 1e-3).all()) for axis in axes)
