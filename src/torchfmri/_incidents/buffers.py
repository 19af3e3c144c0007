"""The buffers of a model as they were before a step, in case that it has to be taken back.

A forward pass writes into buffers (running statistics) before anybody can see that it is bad.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchfmri._incidents.content import readable
from torchfmri._torch import copy_into

LARGE = 1 << 20
"""Buffers with more values are copied only once somebody has written to them: most are tables."""


class _Kept(NamedTuple):
    """A buffer, where it stands, and what it held; no copy of a large one nobody writes to."""

    owner: dict[str, Tensor | None]
    name: str
    label: str
    buffer: Tensor
    copy: Tensor | None
    version: int


class Buffers:
    """Keeps what the buffers of a model hold, and gives it back.

    Args:
        model: The model; its modules are looked up once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = [
            (name, module._buffers) for name, module in model.named_modules() if module._buffers
        ]
        self._kept: dict[str, _Kept] = {}

    def keep(self) -> None:
        """Remember what the buffers hold now; memory of the last time is used again."""
        kept, copies, sources = {}, [], []
        for label, owner, name, buffer in self._now():
            last = self._kept.get(label)
            version = _version(buffer)
            copy = last.copy if last is not None and last.buffer is buffer else None
            was_written = last is not None and (copy is not None or last.version != version)
            if copy is not None and (copy.shape, copy.dtype) == (buffer.shape, buffer.dtype):
                # Batch norm writes without a new version, so a small buffer is always copied.
                if buffer.numel() <= LARGE or last is None or last.version != version:
                    copies.append(copy)
                    sources.append(buffer.detach())
            elif was_written or buffer.numel() <= LARGE:
                copy = buffer.detach().clone()
            kept[label] = _Kept(owner, name, label, buffer, copy, version)
        copy_into(copies, sources)
        self._kept = kept

    def keep_if_written(self) -> None:
        """Remember them anew, if anybody wrote to one since."""
        if any(_version(each.buffer) != each.version for each in self._kept.values()):
            self.keep()

    def restore(self) -> Callable[[], None]:
        """Give the buffers what was kept; returns a function that undoes this."""
        kept = [each for each in self._kept.values() if each.copy is not None]
        now = [
            _Kept(each.owner, each.name, each.label, found, found.detach().clone(), 0)
            for each in kept
            if (found := each.owner.get(each.name)) is not None
        ]
        _put_back(kept)
        return lambda: _put_back(now)

    def spoilt(self) -> list[str]:
        """The buffers that are not finite and were, or were not copied."""
        return [
            label
            for label, _, _, buffer in self._now()
            if not _is_finite(buffer)
            and ((last := self._kept.get(label)) is None or _was_finite(last))
        ]

    def _now(self) -> list[tuple[str, dict[str, Tensor | None], str, Tensor]]:
        return [
            (f"{prefix}.{name}" if prefix else name, owner, name, buffer)
            for prefix, owner in self._owners
            for name, buffer in owner.items()
            if buffer is not None and not is_lazy(buffer) and not buffer.is_meta
        ]


def _put_back(kept: list[_Kept]) -> None:
    for each in kept:
        assert each.copy is not None
        each.owner[each.name] = each.buffer
        # Through .data: views follow, and autograd does not count it as a write.
        if each.buffer.shape != each.copy.shape:
            each.buffer.data = each.copy.clone()
        elif not each.buffer.is_inference():
            each.buffer.data.copy_(each.copy)


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


def _is_finite(tensor: Tensor) -> bool:
    values = readable(tensor)
    return values is None or bool(torch.isfinite(values).all())


def _was_finite(kept: _Kept) -> bool:
    return kept.copy is None or _is_finite(kept.copy)
