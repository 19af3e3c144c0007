"""The sink between taps and an Inspection: keeps each tensor as statistics or whole.

Taps call it in the middle of the user's pass, so it reads or copies a tensor at once: a moment
later somebody may write into it. Gradients can come from autograd's threads; what they touch stands
under the lock. An error of ours never ends the user's pass: it is listed and warned about at the
end. Only the memory limit stops a run, and in a backward pass not before its end, because `.grad`
would be half filled. The reasons in `missing` may be reworded freely.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_device, require
from torchfmri._capture import CallKey, Padding, TokenMask
from torchfmri._records import GRADIENT_OF, PARAMETER_WHAT, Call, Inspection, Record, Value
from torchfmri._torch import Element
from torchfmri.exceptions import InspectionError, MemoryLimitError


@dataclass(frozen=True, slots=True)
class Keep:
    """What is kept of a captured tensor.

    Attributes:
        keep: `"statistics"` or `"tensors"`.
        max_bytes: The most bytes of tensors to keep; None for no limit.
        device: The device to keep tensors on; None for their own.
        dtype: The dtype to keep floating-point tensors in; None for their own.
    """

    keep: str = "statistics"
    max_bytes: int | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        known = self.keep in ("statistics", "tensors")
        require(known, "keep", self.keep, "there are 'statistics' and 'tensors'")
        limit = self.max_bytes
        fits = limit is None or (isinstance(limit, int) and limit >= 0)
        require(fits, "max_bytes", limit, "give a number of bytes such as 2 << 30; None: no limit")
        fits = self.dtype is None or isinstance(self.dtype, torch.dtype)
        require(fits, "dtype", self.dtype, "give a torch.dtype, such as torch.bfloat16")
        if self.device is not None:
            check_device("device", self.device)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` that nobody else writes into."""
        if self.device is None and self.dtype is None:
            return tensor.clone()
        return tensor.to(device=self.device, dtype=self._dtype_of(tensor), copy=True)

    def bytes_of(self, tensor: Tensor) -> int:
        """Return how many bytes `copy` would take."""
        return tensor.numel() * (self._dtype_of(tensor) or tensor.dtype).itemsize

    def _dtype_of(self, tensor: Tensor) -> torch.dtype | None:
        return self.dtype if tensor.is_floating_point() else None


class WatchedLayer:
    """One watched module: its record, what is wanted, and whether per unit."""

    __slots__ = (
        *("channels", "has_parameters", "is_frozen", "is_scripted", "is_sharded"),
        *("kind", "record", "what"),
    )

    def __init__(
        self, record: Record, module: nn.Module, what: frozenset[str], channels: bool
    ) -> None:
        self.record, self.kind, self.what, self.channels = record, type(module), what, channels
        own = [each for each in module._parameters.values() if each is not None]
        self.has_parameters = bool(own)
        self.is_frozen = not any(each.requires_grad for each in own)
        self.is_sharded = any(hasattr(each, "to_local") for each in own)
        self.is_scripted = isinstance(module, torch.jit.ScriptModule)


class Recorder:
    """Fills an Inspection with what the taps see."""

    def __init__(
        self,
        inspection: Inspection,
        watched: Mapping[str, WatchedLayer],
        keep: Keep,
        padding: Padding,
    ) -> None:
        self.inspection = inspection
        self.error: Exception | None = None
        self._watched, self._keep, self._padding = watched, keep, padding
        self._calls: dict[CallKey, tuple[Call, TokenMask | None]] = {}
        self._order = itertools.count()
        self._bytes = 0
        self._failures: list[tuple[str, Exception]] = []
        self._lock = threading.RLock()

    # -- the sink ----------------------------------------------------------------------------

    def values(self, call: CallKey, what: str, elements: list[Element]) -> None:
        """Keep the inputs or activations of a call."""
        watched = self._watched[call.layer]
        record, mask = self._call(call, watched.record)
        if what == "activations":
            record.order = next(self._order)
        wanted = what in watched.what
        differentiable = False
        for path, tensor in elements:
            value = self._value(watched, path, tensor, mask) if wanted else None
            record._values[what, path] = value
            differentiable = differentiable or tensor.requires_grad
        if differentiable:
            record._differentiable += (GRADIENT_OF[what],)

    def gradient(
        self, call: CallKey, what: str, path: str, gradient: Tensor | None, backward: int
    ) -> None:
        """Keep a gradient of a call, or drop it again."""
        watched = self._watched[call.layer]
        record, mask = self._call(call, watched.record)
        value = None if gradient is None else self._value(watched, path, gradient, mask)
        with self._lock:
            if value is None:
                record._gradients.pop((backward, what, path), None)
            else:
                record._gradients[backward, what, path] = value

    def parameter(self, layer: str, what: str, name: str, tensor: Tensor, backward: int) -> None:
        """Keep a parameter or its gradient."""
        watched = self._watched[layer]
        if hasattr(tensor, "to_local"):
            self.noted(layer, "is sharded: its parameters are described by the local shard alone")
            tensor = tensor.to_local()
        value = self._value(watched, name, tensor, None)
        with self._lock:
            found = watched.record._parameters.setdefault(backward, {})
            found.setdefault(what, {})[name] = value

    def attention(self, call: CallKey, element: Element) -> None:
        """Keep an attention pattern of a call, (b, heads, q, k)."""
        watched = self._watched[call.layer]
        record, mask = self._call(call, watched.record)
        record._values["attention", element.path] = self._value(watched, *element, mask)

    def missed(self, layer: str, what: str, reason: str) -> None:
        """Note why something of a layer is not there."""
        text = f"{what}: {reason}" if what else reason
        with self._lock:
            before = self.inspection.missing.get(layer)
            if before is None:
                self.inspection.missing[layer] = text
            elif text not in before:
                self.inspection.missing[layer] = f"{before}; {text}"

    def noted(self, layer: str, text: str) -> None:
        """Note a reservation about a layer."""
        with self._lock:
            layers = self.inspection.notes.setdefault(text, [])
            if layer not in layers:
                layers.append(layer)

    def failed(self, layer: str, error: Exception, backward: bool) -> None:
        """Note an error of ours; one that must stop the run is raised where that is safe."""
        if isinstance(error, MemoryLimitError):
            self.error = error
            if not backward:  # inside a backward pass it would leave .grad half filled
                raise error
            return
        self.missed(layer, "", f"could not be captured: {type(error).__name__}: {error}")
        if not isinstance(error, InspectionError):
            self._failures.append((layer, error))

    # -- keeping -----------------------------------------------------------------------------

    def _call(self, key: CallKey, record: Record) -> tuple[Call, TokenMask | None]:
        with self._lock:
            found = self._calls.get(key)
            if found is None:
                found = (Call(key.layer, key.number), self._padding.current())
                self._calls[key] = found
                record.calls.append(found[0])
        return found

    def _value(
        self, watched: WatchedLayer, path: str, tensor: Tensor, mask: TokenMask | None
    ) -> Value:
        source = tensor.detach() if tensor.requires_grad else tensor
        value = Value(path, source, watched.kind, mask)
        if self._keep.keep == "tensors":
            self._reserve(watched.record.layer, source)
            value.keep(self._keep.copy(source))
        else:
            value.reduce(source, channels=watched.channels)
        return value

    def check_room(self, layer: str, needed: int) -> None:
        """Raise if `needed` bytes more would exceed the limit on tensors that are kept."""
        limit = self._keep.max_bytes
        if limit is None or self._keep.keep != "tensors":
            return
        if self.error is not None:
            raise self.error
        if self._bytes + needed > limit:
            raise MemoryLimitError(layer, needed, self._bytes, limit)

    def _reserve(self, layer: str, tensor: Tensor) -> None:
        needed = self._keep.bytes_of(tensor)
        with self._lock:
            self.check_room(layer, needed)
            self._bytes += needed

    # -- the end -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Note which watched layers were never called and which gradients never arrived."""
        for layer, watched in self._watched.items():
            record = watched.record
            if watched.what - PARAMETER_WHAT and not record.calls and not watched.is_scripted:
                self.missed(layer, "", _never_called(layer, watched))
            for what in ("gradients", "input_gradients"):
                if what in watched.what and any(call.elements(what) for call in record.calls):
                    self._check_gradients(record, what)
            if (
                "parameter_gradients" in watched.what
                and watched.has_parameters
                and not record.parameter_values("parameter_gradients")
            ):
                reason = "frozen" if watched.is_frozen else "not on the path from the loss"
                if watched.is_sharded:
                    reason += ", or sharded and used without a call of its layer"
                self.missed(layer, "parameter_gradients", f"none arrived: {reason}")
        # One instance under several names: what is missing of it is missing under each.
        for name, record in self.inspection.items():
            if record.layer in self.inspection.missing:
                self.inspection.missing.setdefault(name, self.inspection.missing[record.layer])
        if self._failures:  # told now, because a warning may be an error where hooks run
            layer, error = self._failures[0]
            warnings.warn(
                f"torchfmri failed to capture {layer or 'a layer'!r} and went on without it; see "
                f"inspection.missing. Please report this: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _check_gradients(self, record: Record, what: str) -> None:
        """Note why no gradient of a layer arrived, if none did."""
        if any(value for call in record.calls for value in call.values(what)):
            return
        if any(what in call._differentiable for call in record.calls):
            reason = (
                "none arrived: detached, not on the path from the loss, or overwritten in place"
            )
        elif what == "input_gradients":
            reason = (
                "its inputs do not require grad (whole numbers, or data): for data, pass "
                "x.requires_grad_()"
            )
        else:
            reason = "its output does not require grad (frozen, whole numbers, or under no_grad)"
        self.missed(record.layer, what, reason)


def _never_called(layer: str, watched: WatchedLayer) -> str:
    if issubclass(watched.kind, (nn.ModuleList, nn.ModuleDict)):
        return f"never called: a {watched.kind.__name__} only holds layers; watch those below it"
    if not watched.has_parameters:
        return "never called in this run"
    above = layer.rpartition(".")[0]
    parent = repr(above) if above else "the model"
    return (
        f"never called in this run; if {parent} uses its weight directly (as MultiheadAttention "
        f"does), watch {parent} or what='parameter_gradients'"
    )
