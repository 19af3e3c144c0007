"""One captured tensor, and what can be captured at all.

Inspector, tables, compare and figures ask `check_what`; edits ask `channel_axis`. Something new to
watch begins with a word in `WHAT`, whose order is that of tables. A `Value` never holds the user's
own tensor: it is reduced at once, or a copy is kept. Positions that a mask leaves out are in no
statistic. Which axis holds the units is decided by the class of the layer, since shapes alone do
not tell channels from features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchfmri._arguments import require
from torchfmri._capture import TokenMask
from torchfmri._model import nearest_names
from torchfmri.exceptions import InspectionError
from torchfmri.statistics import (
    ChannelStatistics,
    Statistics,
    calculate_channel_statistics,
    calculate_statistics,
)

WHAT = (
    "inputs",
    "activations",
    "gradients",
    "input_gradients",
    "parameters",
    "parameter_gradients",
    "attention",
)
_MEANT = {
    **dict.fromkeys(("output", "outputs", "out", "features"), "activations"),
    **dict.fromkeys(("grad", "grads", "grad_output", "output_gradients"), "gradients"),
    **dict.fromkeys(("grad_input", "grad_inputs"), "input_gradients"),
    **dict.fromkeys(("weight", "weights", "params", "bias"), "parameters"),
    **dict.fromkeys(("attentions", "attn", "pattern", "attention_weights"), "attention"),
    **dict.fromkeys(("weight_gradients", "weight_grad", "param_grads"), "parameter_gradients"),
}
"""Words for the same in other libraries, for the error that suggests ours."""
BACKWARD_WHAT = frozenset({"gradients", "input_gradients", "parameter_gradients"})
PARAMETER_WHAT = frozenset({"parameters", "parameter_gradients"})
# A gradient has the elements of the values it belongs to.
ELEMENTS_OF = {"gradients": "activations", "input_gradients": "inputs"}
GRADIENT_OF = {values: gradients for gradients, values in ELEMENTS_OF.items()}


def check_what(what: str) -> str:
    """Return `what`, if it is something that can be watched.

    Raises:
        InspectionError: It is not.
    """
    if what not in WHAT:
        near = nearest_names(what, (*WHAT, *_MEANT), count=1)
        hint = f" Did you mean {_MEANT.get(near[0], near[0])!r}?" if near else ""
        raise InspectionError(f"Cannot watch {what!r}: there are {', '.join(WHAT)}.{hint}")
    return what


def check_per(per: str | None) -> None:
    """Raise if `per` is neither None nor `"channel"`."""
    require(per in (None, "channel"), "per", per, "there is per='channel', or None for the tensor")


class Value:
    """One captured tensor: kept whole, as statistics, or both.

    Attributes:
        path: Its place in the module's arguments or output: `""`, `"0"`, `"logits"`.
        shape: Its shape.
        dtype: Its dtype as the model computed it.
    """

    __slots__ = ("_channels", "_kind", "_mask", "_statistics", "_tensor", "dtype", "path", "shape")

    def __init__(self, path: str, source: Tensor, kind: type, mask: TokenMask | None) -> None:
        self.path = path
        self.dtype = source.dtype
        self.shape = () if source.is_nested else tuple(source.shape)
        self._kind, self._mask = kind, mask
        self._tensor: Tensor | None = None
        self._statistics: Statistics | None = None
        self._channels: ChannelStatistics | None = None

    def keep(self, tensor: Tensor) -> None:
        """Hold the tensor itself; it must be a copy that nobody else writes into."""
        self._tensor = tensor

    def keep_statistics(self, statistics: Statistics) -> None:
        """Hold statistics that were taken before."""
        self._statistics = statistics

    @property
    def tensor(self) -> Tensor:
        """The tensor itself.

        Raises:
            InspectionError: Only its statistics were kept.
        """
        if self._tensor is None:
            raise InspectionError(
                "Only statistics were kept. Run again with keep='tensors', for example "
                "inspector.run_inspection(data, keep='tensors')."
            )
        return self._tensor

    @property
    def has_tensor(self) -> bool:
        """Whether the tensor itself was kept."""
        return self._tensor is not None

    def reduce(self, source: Tensor, channels: bool) -> None:
        """Take the statistics of `source` now."""
        aligned = self._mask.align(source) if self._mask is not None else None
        tensor, kept = aligned if aligned is not None else (source, None)
        self._statistics = calculate_statistics(tensor, mask=kept)
        axis = channel_axis(self._kind, source) if channels else None
        if axis is not None:
            # Aligning moves the token axis to the front of (b, heads, s, d); units stay last.
            axis = axis if tensor is source else tensor.ndim - 1
            if kept is not None and axis < kept.ndim:
                kept = None
            self._channels = calculate_channel_statistics(tensor, axis, mask=kept)

    @property
    def statistics(self) -> Statistics:
        """Its statistics, computed now if the tensor was kept instead."""
        if self._statistics is None:
            self.reduce(self.tensor, channels=False)
        assert self._statistics is not None
        return self._statistics

    @property
    def channels(self) -> ChannelStatistics:
        """Its statistics per unit.

        Raises:
            InspectionError: They were not asked for and the tensor is gone, or it has no units.
        """
        if self._channels is None and self._tensor is not None:
            self.reduce(self._tensor, channels=True)
        if self._channels is None:
            if self._tensor is not None or not self.shape:
                raise InspectionError(f"A tensor of shape {self.shape} has no units.")
            raise InspectionError(
                "Statistics per unit were not taken. Watch with per='channel', for example "
                "inspector.watch(pattern, per='channel')."
            )
        return self._channels


def channel_axis(kind: type, tensor: Tensor) -> int | None:
    """Return the axis of a tensor's units: channels of images, features of all else."""
    if tensor.is_nested or tensor.ndim == 0:
        return None
    if issubclass(kind, _FEATURES_LAST) or tensor.ndim < 3:
        return tensor.ndim - 1
    if issubclass(kind, _CHANNELS_FIRST) or tensor.ndim >= 4:
        return 1
    return tensor.ndim - 1


_FEATURES_LAST = (
    torch.nn.Linear,
    torch.nn.Embedding,
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
    torch.nn.MultiheadAttention,
    torch.nn.RNNBase,
)
_CHANNELS_FIRST = (
    torch.nn.modules.conv._ConvNd,
    torch.nn.modules.batchnorm._NormBase,
    torch.nn.GroupNorm,
    torch.nn.modules.pooling._MaxPoolNd,
    torch.nn.modules.pooling._AvgPoolNd,
    torch.nn.modules.pooling._AdaptiveAvgPoolNd,
    torch.nn.modules.pooling._AdaptiveMaxPoolNd,
)
