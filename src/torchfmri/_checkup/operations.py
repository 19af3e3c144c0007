"""What single operations do: how attention spreads, what softmaxes run over, who reads whom.

`Watcher` opens an `OperationWatch` for about six steps of a run. A dispatch mode sees each
operation below autograd, whatever the code above is called. Tensors are known by id or memory
address, so everything that is looked up must be kept alive until `release`: a freed address is used
again within the step. New operations are entries of the name tables at the top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._attention import masked_logits
from torchfmri._checkup.loss_watch import LossWatch
from torchfmri._checkup.softmaxes import Softmax, SoftmaxLog
from torchfmri._diagnosis import HeadActivity, Notes
from torchfmri._torch import DispatchMode

_VIEW_NAMES = (
    "detach view _unsafe_view t transpose permute expand alias slice select unsqueeze squeeze "
    "_reshape_alias split split_with_sizes unbind as_strided"
)
_VIEWS = frozenset(_VIEW_NAMES.split())
_LOGIT_NAMES = (
    "add add_ sub sub_ mul mul_ div div_ masked_fill masked_fill_ where view _unsafe_view "
    "expand transpose permute clone _to_copy softcap tanh contiguous"
)
_KEEPS_LOGITS = frozenset(_LOGIT_NAMES.split())
_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_ATTENTION = tuple(f"_scaled_dot_product_{kernel}" for kernel in _KERNELS)
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
# Losses that compare output and target number by number.
_NUMBER_BY_NUMBER = ("binary_cross_entropy", "mse_loss")
LEAST_KEYS = 4
"""Entropy over fewer keys says little."""
_COPIES = frozenset(["clone", "_to_copy", "contiguous", "_unsafe_view"])


class OperationWatch(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes what the operations of one step show about the model.

    Args:
        where: The layer that is running, "" outside the model.
        step: The number of the step.
        notes: Takes down what fails in here.
        samples: How many samples the batch has; 0 if another axis is as long.
        unscaling: Told the gradients that a GradScaler is about to multiply, and by what.

    Attributes:
        heads: Attention by layer.
        loss: What the operations of the loss say about it.
        consumed: The layers whose output was read by an operation of another.
        softmaxes: The softmaxes, and those that run over the wrong axis.
    """

    def __init__(
        self,
        where: Callable[[], str],
        step: int,
        notes: Notes,
        samples: int = 0,
        unscaling: Callable[[Sequence[Tensor], Tensor], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unscaling = unscaling
        self._where, self._step = where, step
        self._notes = notes
        self.in_loss = False
        self.heads: list[HeadActivity] = []
        self.loss = LossWatch()
        self.consumed: set[str] = set()
        self.softmaxes = SoftmaxLog(samples)
        self._makers: dict[int, str] = {}
        self._kept: list[Tensor] = []
        self._logits: dict[int, Tensor] = {}

    def made(self, layer: str, output: Tensor) -> None:
        """Take in what a layer returned, which other layers may read from now on."""
        if output.layout == torch.strided:
            self._makers[output.untyped_storage().data_ptr()] = layer
            self._kept.append(output)  # so that its memory is not used again in this step

    def release(self) -> None:
        """Let go of the tensors of the step; what was noted about them stays."""
        self._kept.clear()
        self._makers.clear()
        self._logits.clear()
        self.softmaxes.release()
        self.loss.release()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and look at what came of it."""
        if self._unscaling is not None and func.overloadpacket.__name__ == _UNSCALE:
            with self._notes.guard("Some operation"):
                self._unscaling(args[0], args[2])
        result = func(*args, **(kwargs or {}))
        with self._notes.guard("Some operation"):
            self._look(func.overloadpacket.__name__, args, kwargs or {}, result)
        return result

    def _look(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        self._note_readers(name, args)
        if name in ("bmm", "baddbmm") or (name == "matmul" and isinstance(result, Tensor)):
            self._mark(result)
            if name == "bmm" and not self.in_loss and torch.is_grad_enabled():
                self.softmaxes.contracted(args[0], args[1])
        elif name in _KEEPS_LOGITS and isinstance(result, Tensor):
            if any(isinstance(each, Tensor) and id(each) in self._logits for each in args):
                self._mark(result)
        elif name in ("_softmax", "_safe_softmax"):
            self._look_at_softmax(args, result)
        elif name in _ATTENTION:
            logits = logits_of_fused(args, kwargs)
            if logits is not None:
                self._add_heads(logits, logits.softmax(-1).nan_to_num())
        elif name == "_log_softmax":
            self._add_softmax(args, result, of_scores=False, function="log_softmax")
        elif name in _NUMBER_BY_NUMBER and torch.is_grad_enabled():
            self.softmaxes.compared(args[0], args[1])
        if name in _COPIES and isinstance(result, Tensor):
            self.softmaxes.copied(args[0], result)
        self.loss.look(name, args, result, self.in_loss)

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

    # -- attention ---------------------------------------------------------------------------

    def _mark(self, tensor: Tensor) -> None:
        self._logits[id(tensor)] = tensor

    def _look_at_softmax(self, args: tuple[Any, ...], probabilities: Tensor) -> None:
        logits = args[0]
        scores = id(logits) in self._logits
        self._add_softmax(args, probabilities, scores and logits.ndim >= 3)
        axis = int(args[1]) % max(1, logits.ndim) - logits.ndim
        if scores and logits.ndim >= 3 and axis >= -2 and logits.shape[axis] >= LEAST_KEYS:
            found = [each.detach().float() for each in (logits, probabilities)]
            keys_last = found if axis == -1 else [each.transpose(-1, -2) for each in found]
            self._add_heads(*keys_last)

    def _add_softmax(
        self, args: tuple[Any, ...], result: Tensor, of_scores: bool, function: str = "softmax"
    ) -> None:
        if not torch.is_grad_enabled() or result.ndim == 0:
            return  # in backward, and for targets, it may run over anything
        softmax = Softmax(
            layer=self._where(),
            axis=int(args[1]) % result.ndim,
            result=result,
            of_scores=of_scores,
            in_loss=self.in_loss,
            function=function,
        )
        self.softmaxes.add(softmax, isinstance(args[0], nn.Parameter))

    def _add_heads(self, logits: Tensor, probabilities: Tensor) -> None:
        found = head_activity(self._where(), self._step, logits, probabilities)
        if found is not None:
            self.heads.append(found)


def logits_of_fused(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the masked logits inside a fused attention; None if there are few keys."""
    q, k = args[0], args[1]
    if q.ndim != 4 or k.shape[-2] < LEAST_KEYS:
        return None
    options = dict(kwargs)
    scale = options.get("scale")
    causal = options.get("is_causal", next((a for a in args[3:] if isinstance(a, bool)), False))
    mask = options.get("attn_mask", options.get("attn_bias"))
    if mask is None:
        mask = next((a for a in args[3:] if isinstance(a, Tensor)), None)
    mask = None if mask is None else mask.detach()
    return masked_logits(q, k, mask, scale, bool(causal)).float()


def head_activity(
    layer: str, step: int, logits: Tensor, probabilities: Tensor
) -> HeadActivity | None:
    """Return the entropy and logits of each head; None if no query has enough keys."""
    if logits.ndim == 3:
        logits, probabilities = logits[None], probabilities[None]
    hidden = torch.finfo(torch.float16).min / 2  # as -inf, and as the smallest number
    open_keys = logits > hidden
    keys = open_keys.sum(-1)
    entropy = torch.special.entr(probabilities).sum(-1) / keys.clamp(min=2).log()
    rows = keys >= LEAST_KEYS
    if not bool(rows.any()):
        return None
    sums = (entropy * rows).sum(dim=(0, -1)) / rows.sum(dim=(0, -1)).clamp(min=1)
    largest = logits.masked_fill(~open_keys, 0).abs().amax(dim=(0, -1, -2))
    return HeadActivity(
        layer=layer,
        step=step,
        entropy=tuple(sums.tolist()),
        logit=tuple(largest.tolist()),
        keys=logits.shape[-1],
        future=_open_future(open_keys),
    )


def _open_future(open_keys: Tensor) -> float:
    """Return the share of later keys that queries may read; nan if they are not one text."""
    queries, keys = open_keys.shape[-2:]
    if queries != keys:
        return math.nan
    after = torch.ones(queries, keys, dtype=torch.bool, device=open_keys.device).triu(1)
    return float(open_keys[..., after].float().mean())
