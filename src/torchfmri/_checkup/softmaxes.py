"""Softmaxes of a step: the axis each runs over, and the axis that its result is used along.

`OperationWatch` makes one `SoftmaxLog` per step and tells it what runs; `loss_reading` then asks
`against` and `of_one`, and reads `above_one`; `run` reads `misplaced`; `loss_watch` uses
`distribution_axes`. A softmax is found again by the memory of its result, so results are kept until
`release`, and everything that looks for a softmax must be asked before. The axis is only judged if
a product, a loss or the targets imply one: slots, capsules and bags use other axes on purpose. The
tolerances may be changed with the tests of rounded dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchfmri._diagnosis import MisplacedSoftmax

_TOLERANCE, _COARSE = 1e-3, 0.05
"""Tolerances for sums of weights. Sums of many small bfloat16 numbers are off by about 0.01."""
_LEAST_RIGHT = 0.5
"""Rows without a single key sum to 0; most rows have some."""


@dataclass(frozen=True)
class Softmax:
    """One softmax, and what it made.

    Attributes:
        layer: Where it ran.
        axis: Over which axis, counted from 0.
        result: Kept, so that its memory is not used again within the step.
        of_scores: Whether it reads products of queries and keys.
        in_loss: Whether it ran after the model.
        function: "softmax" or "log_softmax".
    """

    layer: str
    axis: int
    result: Tensor
    of_scores: bool
    in_loss: bool
    function: str = "softmax"


class SoftmaxLog:
    """The softmaxes of one step, found again through views and copies.

    Args:
        samples: How many samples the batch has; 0 if another axis has the same length, so that the
            batch axis cannot be told by its length.

    Attributes:
        misplaced: Softmaxes over an axis that is not the one their result is used along.
        above_one: The largest share of rows of a target that sum to more than 1, among the targets
            that a loss compared with a softmax number by number.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._of: dict[int, Softmax] = {}
        self._kept: list[Tensor] = []
        self.misplaced: list[MisplacedSoftmax] = []
        self.above_one = 0.0
        self._of_one: list[Softmax] = []

    def add(self, softmax: Softmax, reads_parameter: bool) -> None:
        """Take in one that has just run."""
        self._of[_memory(softmax.result)] = softmax
        shape = tuple(softmax.result.shape)
        if shape[softmax.axis] == 1 and softmax.result.numel() > 1:
            self._of_one.append(softmax)
        over_samples = softmax.axis == 0 and shape.count(self._samples) == 1
        if over_samples and shape[0] == self._samples and len(shape) > 1 and not reads_parameter:
            self._note(softmax, "the samples of the batch", "")

    def copied(self, source: Tensor, copy: Tensor) -> None:
        """Take in that something was copied."""
        if (found := self.of(source)) is not None:
            self._of[_memory(copy)] = found
            self._kept.append(copy)

    def of(self, tensor: Tensor) -> Softmax | None:
        """Return the softmax that made a tensor, or made what it is a view of."""
        return self._of.get(_memory(tensor)) if tensor.layout == torch.strided else None

    def contracted(self, one: Tensor, other: Tensor) -> None:
        """Look at a product of matrices: do weights from scores sum to 1 along the summed axis?

        Elsewhere (clusters, capsules) a softmax may well run over another axis on purpose.
        """
        for weights, axis in ((one, -1), (other, -2)):
            softmax = self.of(weights)
            if softmax is None or not softmax.of_scores or weights.shape[axis] < 2:
                continue
            sums = weights.detach().float().sum(axis)
            is_coarse = weights.dtype in (torch.float16, torch.bfloat16)
            tolerance = _COARSE if is_coarse else _TOLERANCE
            right = ((sums - 1).abs() < tolerance).float().mean()
            if bool(torch.isfinite(sums).all()) and float(right) < _LEAST_RIGHT:
                self._note(softmax, f"axis {softmax.axis}", "the keys")

    def compared(self, output: Tensor, target: Tensor) -> None:
        """Look at what a loss compares number by number: do targets sum to more than 1?"""
        softmax = self.of(output)
        if softmax is None or output.shape != target.shape or softmax.axis >= target.ndim:
            return
        if softmax.result.shape == output.shape and softmax.function == "softmax":
            sums = target.detach().float().sum(softmax.axis)
            share = float((sums > 1 + _COARSE).float().mean())
            self.above_one = max(self.above_one, share)  # a loss may have several parts

    def of_one(self, output: Tensor | None) -> list[Softmax]:
        """Return softmaxes over an axis of length 1 that made the output or ran in the loss.

        Inside a model a single key, expert or head is normal.
        """
        made = None if output is None else self.of(output)
        return [each for each in self._of_one if each.in_loss or each is made]

    def against(self, output: Tensor, target: Tensor | None) -> None:
        """Compare each softmax's axis with the class axis that the targets imply."""
        if output.ndim == 0 or output.shape[0] != self._samples:
            # One answer for all that was given (a bag, a graph): these are not samples.
            self.misplaced = [each for each in self.misplaced if each.wanted]
        if target is None or output.ndim < 2:
            return
        classes = class_axis(tuple(output.shape), target)
        if classes is None:
            return
        made = self.of(output)
        found = [each for each in self._of.values() if each.in_loss]
        for softmax in ([made] if made is not None else []) + found:
            same = softmax.result.shape == output.shape
            told = softmax.axis == 0 and (self._samples > 0 or _is_square(output))
            if same and softmax.axis != classes and not told:
                self._note(softmax, f"axis {softmax.axis}", f"the classes (axis {classes})")

    def release(self) -> None:
        """Let go of what was kept; what was found stays."""
        self._of.clear()
        self._kept.clear()
        self._of_one.clear()

    def _note(self, softmax: Softmax, over: str, wanted: str) -> None:
        if any(each.layer == softmax.layer and each.over == over for each in self.misplaced):
            return
        found = MisplacedSoftmax(
            layer=softmax.layer,
            axis=softmax.axis,
            shape=tuple(softmax.result.shape),
            over=over,
            wanted=wanted,
            in_loss=softmax.in_loss,
        )
        self.misplaced.append(found)


def class_axis(shape: Sequence[int], target: Tensor) -> int | None:
    """Return the axis of the classes in an output, told by its targets; None if they do not tell.

    Class numbers have the output's shape without it; distributions sum to 1 along it alone.
    """
    if not target.is_floating_point():
        fits = [
            axis
            for axis in range(1, len(shape))
            if [*shape[:axis], *shape[axis + 1 :]] == list(target.shape)
        ]
    elif list(target.shape) == list(shape):
        fits = distribution_axes(target)
    else:
        return None
    return fits[0] if len(fits) == 1 else None


def distribution_axes(values: Tensor) -> list[int]:
    """Return the axes along which every row is a distribution: in [0, 1], with sum 1.

    The sum may be off by what rounding to the dtype of `values` explains, so do not widen it
    before.
    """
    # Each number is off by some roundings of itself, and all of them sum to 1.
    epsilon = torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
    tolerance = max(_TOLERANCE, 2 * epsilon)
    rows = values.detach().float()
    if rows.ndim == 0 or not rows.numel() or bool(((rows < 0) | (rows > 1)).any()):
        return []
    sums = [rows.sum(axis) for axis in range(rows.ndim)]
    return [axis for axis, each in enumerate(sums) if bool(((each - 1).abs() < tolerance).all())]


def _is_square(output: Tensor) -> bool:
    return output.shape[0] in output.shape[1:]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
