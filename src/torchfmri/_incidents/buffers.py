"""The buffers of a model as they were before a step, in case it has to be taken back.

The guard keeps them at each step, and `diagnose` around its own. A forward pass writes into buffers
(running statistics) before anybody can see that it is bad. It costs one call for all copies in a
step, and large buffers that nobody writes to are not copied. Batch norm writes without a new
version, so versions alone must not decide what is copied. Values go back through `.data`, so that
autograd counts no write. `LARGE` may change freely: it weighs the cost of copies against losing the
first write to a large buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchfmri._incidents.content import readable
from torchfmri._model import kept_whole
from torchfmri._torch import copy_into

LARGE = 1 << 20
"""Buffers with more values are copied only once somebody has written to them: most are tables."""
_Owner: TypeAlias = "dict[str, Tensor | None]"


class _KeptBuffer(NamedTuple):
    """A buffer, its place, and a copy of it; None if it is large and nobody has written to it."""

    owner: _Owner
    name: str
    label: str
    buffer: Tensor
    copy: Tensor | None


class Buffers:
    """Keeps what the buffers of a model hold, and gives it back.

    Args:
        model: The model; its modules are looked up once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = [
            (name, module._buffers) for name, module in model.named_modules() if module._buffers
        ]
        self._contents: list[_Owner] = []
        self._kept: list[_KeptBuffer] = []
        self._copies: list[Tensor] = []
        self._originals: list[Tensor] = []
        self._versions: list[int] = []

    def keep(self) -> None:
        """Remember what the buffers hold now; memory of the last time is used again."""
        if not self._are_known() or any(each.copy is None for each in self._written()):
            self._look_up()
        # Batch norm writes without a new version, so what has a copy is always copied.
        with torch.no_grad():
            copy_into(self._copies, self._originals)
        self._versions = [each.buffer._version for each in self._kept]

    def keep_if_written(self) -> None:
        """Remember them anew, if anybody wrote to one since."""
        if not self._are_known() or any(True for _ in self._written()):
            self.keep()

    def restore(self) -> Callable[[], None]:
        """Give the buffers what was kept; returns a function that undoes this."""
        now = [
            each._replace(buffer=found, copy=found.detach().clone())
            for each in self._kept
            if each.copy is not None and (found := each.owner.get(each.name)) is not None
        ]
        _put_back(self._kept)
        return lambda: _put_back(now)

    def spoilt(self) -> list[str]:
        """Return the buffers that are not finite now and were when they were kept."""
        return [
            each.label
            for each in self._kept
            if (now := each.owner.get(each.name)) is not None
            and not _is_finite(now)
            and (each.copy is None or _is_finite(each.copy))
        ]

    def _are_known(self) -> bool:
        """Whether the buffers are the tensors that were looked up."""
        return len(self._contents) == len(self._owners) and all(
            owner.keys() == content.keys() and all(map(is_, owner.values(), content.values()))
            for (_, owner), content in zip(self._owners, self._contents, strict=True)
        )

    def _look_up(self) -> None:
        """Find the buffers anew, and make room for copies: of small and of written ones."""
        copied = {each.label for each in self._kept if each.copy is not None}
        copied |= {each.label for each in self._written()}
        self._contents, self._kept = [], []
        for prefix, owner in self._owners:
            found = {name: each for name, each in owner.items() if not _is_empty(each)}
            self._contents.append(found)
            for name, buffer in found.items():
                if buffer is None or buffer.is_inference():
                    continue
                label = f"{prefix}.{name}" if prefix else name
                due = buffer.numel() <= LARGE or label in copied
                copy = buffer.detach().clone() if due else None
                self._kept.append(_KeptBuffer(owner, name, label, buffer, copy))
        self._copies = [each.copy for each in self._kept if each.copy is not None]
        self._originals = [each.buffer for each in self._kept if each.copy is not None]

    def _written(self) -> Iterable[_KeptBuffer]:
        """Return the buffers that were written to since they were kept, as far as versions tell."""
        return (
            each
            for each, version in zip(self._kept, self._versions, strict=False)
            if each.buffer._version != version
        )


@kept_whole
def _put_back(kept: list[_KeptBuffer]) -> None:
    """Give the modules these buffers again, with what the copies hold."""
    for owner, name, _, buffer, copy in kept:
        if copy is None:
            continue
        owner[name] = buffer
        # Through .data: views follow, and autograd does not count it as a write.
        if buffer.shape != copy.shape:
            buffer.data = copy.clone()
        else:
            buffer.data.copy_(copy)


def _is_empty(buffer: Tensor | None) -> bool:
    """Whether a buffer has yet to get its values."""
    return buffer is not None and (is_lazy(buffer) or buffer.is_meta)


def _is_finite(tensor: Tensor) -> bool:
    values = readable(tensor)
    return values is None or bool(torch.isfinite(values).all())
