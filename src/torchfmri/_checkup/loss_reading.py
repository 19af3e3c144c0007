"""What the loss of the first steps does with the output, and what the graph behind it holds.

`Checkup` calls `loss_facts` once, after the first step, with what `LossWatch` and `Watcher` saw.
`score_of` calls the user's loss again on made-up outputs, on a copy and with random state restored,
so that it leaves no trace. A fact that cannot be read keeps its default, which never leads to a
finding: guess nothing here, because a false alarm accuses a right loss. Further facts may be added,
each with such a default.

`Leaves` looks for trainable tensors that nobody trains, at the first two steps. A tensor that a
step makes for itself is a new one at the next step, so only leaves that stay are reported. Walks
over the graph are bounded (`_BRANCH`): in a deep residual net the cost would grow with the square
of the depth. `_BRANCH` may change freely: it only weighs time against long branches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._checkup.activations import RANGES, SQUASHERS, function_behind, share_outside
from torchfmri._checkup.loss_watch import LossWatch
from torchfmri._checkup.users_step import Split
from torchfmri._checkup.watcher import Watcher
from torchfmri._checkup.weights import relative_size
from torchfmri._diagnosis import ConstantLayer, LossFacts
from torchfmri._model import TrainingCopies, generators_restored
from torchfmri._torch import flatten, nodes_before, nodes_behind

_SURE = 20.0
"""A logit whose probability is 1 to eight digits."""
SUM_OF_ONE = "numbers that sum to 1"
_LEAST_TEXT = 4
"""Shorter rows of numbers may be anything."""


def loss_facts(
    watcher: Watcher, parts: Split, target_is_known: bool, value: Any, matrices: Sequence[str]
) -> LossFacts:
    """Return the facts about one loss.

    Args:
        watcher: What was seen of the step.
        parts: The batch in its parts.
        target_is_known: Whether its target is known to be one, and not just the last of the batch.
        value: The loss.
        matrices: The layers with matrices that ran, in order.
    """
    seen = LossWatch() if watcher.last_detailed is None else watcher.last_detailed.loss
    elements = flatten(watcher.output)
    tensors = [each.tensor for each in elements if each.tensor.is_floating_point()]
    target = parts.target if isinstance(parts.target, Tensor) else None
    function = ""
    if tensors:
        function, _ = function_behind(tensors[0])
        for log in watcher.units.values():
            made = not log.reader and watcher.makes(log.layer, tensors[0])
            log.is_last = made and log.function == function
        if watcher.last_detailed is not None:
            watcher.last_detailed.softmaxes.against(tensors[0], target)
    lowest, highest = seen.logit_range or (-math.inf, math.inf)
    bounded = function in SQUASHERS and lowest >= -1 and highest <= 1
    known = target if target_is_known else None
    misread = _misread(watcher, seen, function)
    function, outside, reach = _range_left(watcher, seen, function, known)
    return LossFacts(
        classes=seen.classes,
        cross_entropy=seen.cross_entropy,
        misread=misread,
        broadcast=seen.broadcast,
        inner=seen.inner,
        value=float(value.detach()) if isinstance(value, Tensor) else math.nan,
        output_function=function,
        output_layer=matrices[-1] if matrices else "",
        output_size=relative_size(tensors[0], known) if tensors else math.nan,
        outside=outside,
        range=reach,
        bounded=bounded,
        targets=what_targets_are(seen, parts),
        weights=tuple(seen.weights),
        logit=math.nan if seen.logit_range is None else max(map(abs, seen.logit_range)),
    )


def _range_left(
    watcher: Watcher, seen: LossWatch, function: str, target: Tensor | None
) -> tuple[str, float, str]:
    # The function whose range does not hold most targets, what share of them is, and the range.
    outside = 0.0 if target is None else share_outside(function, target)
    reach = RANGES[function][0] if function in RANGES else ""
    detailed = watcher.last_detailed
    if detailed is not None and detailed.softmaxes.above_one > outside:
        function, outside, reach = "softmax", detailed.softmaxes.above_one, SUM_OF_ONE
    if seen.outside > outside:
        return "the sigmoid of a binary cross entropy", seen.outside, "0 to 1"
    return function, outside, reach


def score_of(loss: Any, output: Any, target: Any, squashed: bool) -> tuple[float, float] | None:
    """Return what a loss makes of outputs that equal targets of 0 and 1, and of their opposite.

    None if targets are not 0 or 1, or the loss is not a number from 0 to 1.

    Args:
        loss: A function of output and target.
        output: What the model returned.
        target: The target that the output was compared with.
        squashed: Whether outputs are probabilities, and not logits.
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or not callable(loss):
        return None
    marks = target.detach().to(output.dtype)
    if output.shape != target.shape or not bool(((marks == 0) | (marks == 1)).all()):
        return None
    if not 0 < float(marks.float().mean()) < 1:
        return None
    asked = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
    sure = _SURE * (2 * marks - 1)
    right, wrong = (marks, 1 - marks) if squashed else (sure, -sure)
    with torch.no_grad(), generators_restored():
        return float(asked(right, target)), float(asked(wrong, target))


def constant_layers(watcher: Watcher) -> list[ConstantLayer]:
    """Return norms and softmaxes over a single number, which return a constant."""
    found = [ConstantLayer(layer, kind) for layer, kind in watcher.constants.items()]
    if watcher.last_detailed is None:
        return found
    tensors = [each.tensor for each in flatten(watcher.output)]
    made = watcher.last_detailed.softmaxes.of_one(tensors[0] if tensors else None)
    return found + [ConstantLayer(each.layer, each.function, each.in_loss) for each in made]


def _misread(watcher: Watcher, seen: LossWatch, function: str) -> tuple[str, str] | None:
    misread = seen.misread
    if misread is None:
        return None
    detailed = watcher.last_detailed
    misplaced = detailed is not None and bool(detailed.softmaxes.misplaced)
    if misplaced and misread == ("log-probabilities", "logits"):
        return None  # they are normalised, over another axis
    if seen.classes is None and misread[0] == "logits" and function not in ("sigmoid", "softmax"):
        return None
    return misread


def what_targets_are(seen: LossWatch, parts: Split) -> str:
    """Whether the class numbers of a cross entropy are the input, or what comes next in it.

    Told for a single text (samples, length) of tokens as the input: "inputs", "next inputs", "".
    """
    compared = seen.compared
    texts = {
        each.path: each.tensor
        for each in flatten((parts.arguments, dict(parts.keywords)))
        if each.tensor.ndim == 2 and not each.tensor.is_floating_point()
    }
    tokens = [each for path, each in texts.items() if "label" not in path and int(each.max()) > 1]
    if compared is None or len(tokens) != 1 or tokens[0].shape[1] < _LEAST_TEXT:
        return ""
    ids = tokens[0].detach().to(compared.device)
    rows, length = ids.shape
    if compared.numel() == ids.numel():
        targets = compared.reshape(rows, length)
        same, following = _agree(targets, ids, seen), _agree(targets[:, :-1], ids[:, 1:], seen)
    elif compared.numel() == rows * (length - 1):
        targets = compared.reshape(rows, length - 1)
        same, following = _agree(targets, ids[:, :-1], seen), _agree(targets, ids[:, 1:], seen)
    else:
        return ""
    if same == following:
        return ""
    return "inputs" if same else "next inputs"


def _agree(targets: Tensor, ids: Tensor, seen: LossWatch) -> bool:
    counts = torch.ne(targets, -100 if seen.ignored is None else seen.ignored)
    return bool(counts.any()) and bool((targets == ids)[counts].all())


def parts_of(batch: Any, split: Split | None) -> Split:
    """Return the parts of a batch; in a user's own step the last of several is the target."""
    if split is not None:
        return split
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return Split(tuple(batch[:-1]), {}, batch[-1])
    return Split((), dict(batch)) if isinstance(batch, dict) else Split((batch,), {})


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
    added = nodes_before(node)
    return len(added) == 2 and (_leads_to(*added) or _leads_to(*reversed(added)))


def _leads_to(start: Any, end: Any) -> bool:
    """Whether a node is among the nearest ones behind another; the end of a graph is not."""
    if not end.next_functions:
        return False
    return any(node is end for node in islice(nodes_behind([start]), 1, _BRANCH))
