"""Trainable tensors behind a loss that nobody trains."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchfmri._checkup.copies import Copies
from torchfmri._checkup.watcher import Watcher


class Leaves:
    """Leaves behind the loss that neither the model nor an optimizer nor the data has.

    A tensor that a step makes for itself (to differentiate with respect to its input) is another
    one at the next step; what stays is a weight.

    Args:
        copies: What runs.
        watcher: Knows the inputs of the step.
    """

    def __init__(self, copies: Copies, watcher: Watcher) -> None:
        self._copies, self._watcher = copies, watcher
        self._strange: dict[int, Tensor] | None = None
        self._looks = 0

    def look(self, value: Any) -> None:
        """Look behind the loss of one more step."""
        self._looks += 1
        if not isinstance(value, Tensor) or value.grad_fn is None:
            return
        leaves = self._leaves_behind(value)
        if self._strange is None:
            self._strange = leaves
        else:
            self._strange = {key: each for key, each in self._strange.items() if key in leaves}

    def unregistered(self) -> tuple[str, ...]:
        """Those that stayed, in words; of a single step only what is a parameter."""
        return tuple(
            f"a tensor of shape {tuple(each.shape)}"
            for each in (self._strange or {}).values()
            if self._looks > 1 or isinstance(each, nn.Parameter)
        )

    def _leaves_behind(self, value: Tensor) -> dict[int, Tensor]:
        known = {id(each) for each in self._copies.model.parameters()}
        for optimizer in self._copies.optimizers:
            known |= {id(each) for group in optimizer.param_groups for each in group["params"]}
        if isinstance(self._copies.loss, nn.Module):
            known |= {id(each) for each in self._copies.loss.parameters()}
        inputs = set(self._watcher.inputs)
        found: dict[int, Tensor] = {}
        seen, waiting = set(), [value.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if not isinstance(leaf, Tensor) or id(leaf) in known:
                pass
            elif leaf.untyped_storage().data_ptr() not in inputs:
                found[id(leaf)] = leaf
            waiting += [each for each, _ in node.next_functions]
        return found
