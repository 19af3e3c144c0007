"""What the graph behind a loss holds: trainable tensors that nobody trains, skip connections.

`Checkup` looks at the first two steps. A tensor that a step makes for itself is a new one at the
next step, so only leaves that stay are reported. Walks over the graph are bounded (`_BRANCH`): in a
deep residual net the cost would grow with the square of the depth. `_BRANCH` may change freely: it
only weighs time against long branches.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from torch import Tensor, nn

from torchfmri._checkup.watcher import Watcher
from torchfmri._model import TrainingCopies
from torchfmri._torch import nodes_behind

_BRANCH = 256
"""How many nodes a branch has at most."""


class Leaves:
    """Tensors that the loss depends on and that model, optimizers and data do not have.

    A tensor that a step makes for itself (to differentiate with respect to its input) is another
    one at the next step; what stays is a weight.

    Args:
        copies: The copies that run.
        watcher: Knows the inputs of the step.

    Attributes:
        has_residual: Whether something is added to what it was computed from.
    """

    def __init__(self, copies: TrainingCopies, watcher: Watcher) -> None:
        self._copies, self._watcher = copies, watcher
        self._strange: dict[int, Tensor] | None = None
        self._looks = 0
        self.has_residual = False

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
        """Describe the leaves that stayed from step to step; after one step only parameters."""
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
        for node in nodes_behind([value.grad_fn]):
            self.has_residual = self.has_residual or _is_residual(node)
            leaf = getattr(node, "variable", None)
            if not isinstance(leaf, Tensor) or id(leaf) in known:
                continue
            if leaf.untyped_storage().data_ptr() not in inputs:
                found[id(leaf)] = leaf
        return found


def _is_residual(node: Any) -> bool:
    """Whether a node adds two results, one of which was computed from the other."""
    if not node.name().startswith("AddBackward"):
        return False
    added = [each for each, _ in node.next_functions if each is not None]
    return len(added) == 2 and (_leads_to(*added) or _leads_to(*reversed(added)))


def _leads_to(start: Any, end: Any) -> bool:
    """Whether a node is among the nearest ones behind another; the end of a graph is not."""
    if not end.next_functions:
        return False
    return any(node is end for node in islice(nodes_behind([start]), 1, _BRANCH))
