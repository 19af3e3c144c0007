"""Read clues about a failure from indices, scores and targets.

Each function takes a `Crash` and the match of a failure's pattern. A guess says probably.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from torchfmri._explain.crash import Crash, describe
from torchfmri._explain.failure import Clues


def in_embedding(crash: Crash, _: re.Match[str]) -> bool:
    """Return whether an embedding was being looked up (or nothing is known)."""
    functions = ("embedding", "embedding_bag")
    return not crash.steps or any(crash.local("weight", each) is not None for each in functions)


def in_loss(crash: Crash, _: re.Match[str]) -> bool:
    """Return whether a loss of torch.nn.functional was running (or nothing is known)."""
    return not crash.steps or isinstance(crash.local("target"), Tensor)


def in_binary_loss(crash: Crash, _: re.Match[str]) -> bool:
    """Return whether a binary loss of torch.nn.functional was running."""
    functions = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
    return any(isinstance(crash.local("target", each), Tensor) for each in functions)


def by_indices(crash: Crash, _: re.Match[str]) -> Clues:
    """Compare the range of the indices with the size of the table."""
    table, indices = crash.local("weight", "embedding"), crash.local("input", "embedding")
    facts = f"The table has {len(table)} rows" if isinstance(table, Tensor) else ""
    span = _span(indices)
    if not facts or span is None:
        return Clues()
    return Clues(
        (f"{facts} (0 to {len(table) - 1}); the indices run from {span[0]} to {span[1]}.",)
    )


def by_rows(crash: Crash, match: re.Match[str]) -> Clues:
    """Find whether only scores or target was flattened, or how many rows are too many."""
    scores, target = _loss_arguments(crash)
    facts: tuple[str, ...] = ()
    if scores is not None and target is not None:
        facts = (f"The scores are {describe(scores)}, the target is {describe(target)}.",)
        if target.dim() > 1 and target.numel() == len(scores):
            return Clues(facts, ("Flatten the target as the scores were: target.flatten().",))
        if scores.dim() > 2 and scores.shape[:-1].numel() == len(target):
            dims = f"0, {scores.dim() - 2}"
            return Clues(facts, (f"Flatten the scores as the target was: scores.flatten({dims}).",))
    small, large = sorted((int(match["rows"]), int(match["targets"])))
    if small and large % small == 0:
        told = f"{large} is {large // small} x {small}: probably {large // small} rows were made of"
        return Clues((*facts, f"{told} every sample on one side."))
    return Clues(facts)


def by_binary_shapes(crash: Crash, match: re.Match[str]) -> Clues:
    """Find how to make the two shapes equal, as far as their sizes tell."""
    scores, target = (
        [int(each) for each in re.findall(r"\d+", match[long] or match[short])]
        for long, short in (("scores", "s"), ("target", "t"))
    )
    if math.prod(scores) == math.prod(target):
        return Clues(
            cure=("Only the shape differs: target.view_as(scores), if the order is right.",)
        )
    if len(target) == 1 and len(scores) == 2 and scores[0] == target[0]:
        return Clues(
            (f"There are {scores[1]} scores and one label for every sample.",),
            (
                "One class out of several: cross_entropy(scores, target.long()).",
                f"Several at once: one_hot(target.long(), {scores[1]}).float() as the target.",
            ),
        )
    return Clues()


def by_target(crash: Crash, _: re.Match[str]) -> Clues:
    """Compare the range of the target with the number of classes."""
    scores, target = _loss_arguments(crash)
    if scores is None or target is None or scores.dim() < 1:
        return Clues()
    classes = scores.shape[1 if scores.dim() > 1 else 0]
    span = _span(target)
    if scores.dim() > 2 and scores.shape[2:] != target.shape[1:]:
        return _by_dimensions(scores, target, span)
    if span is None:
        return Clues((f"There are {classes} classes.",))
    told = f"There are {classes} classes (0 to {classes - 1}); the target runs from {span[0]} to"
    cure: tuple[str, ...] = ()
    if span == (1, classes):
        cure = ("Probably the labels start at 1: pass target - 1.",)
    elif span[0] < 0:
        cure = (f"Say which label stands for nothing: ignore_index={span[0]}.",)
    return Clues((f"{told} {span[1]}.",), cure)


def _by_dimensions(scores: Tensor, target: Tensor, span: tuple[int, int] | None) -> Clues:
    """Say what the dimensions of the scores were taken for, if they differ from the target's."""
    told = (
        f"The scores are {describe(scores)}: dimension 1, of size {scores.shape[1]}, was taken for "
        f"the classes. The target is {describe(target)}"
    )
    told += "." if span is None else f" and runs from {span[0]} to {span[1]}."
    if scores.shape[:-1] != target.shape:
        return Clues((told,))
    last = f"Probably the classes are the last dimension, of size {scores.shape[-1]}."
    return Clues((told, last))


def _loss_arguments(crash: Crash) -> tuple[Tensor | None, Tensor | None]:
    """Return the scores and the target of the loss of torch.nn.functional that failed."""
    for function in ("nll_loss", "cross_entropy"):
        scores, target = (crash.local(name, function) for name in ("input", "target"))
        if isinstance(scores, Tensor) and isinstance(target, Tensor):
            return scores, target
    return None, None


def _span(values: Any) -> tuple[int, int] | None:
    """Return least and greatest value of a tensor of integers that can be read without waiting."""
    if not isinstance(values, Tensor) or values.device.type != "cpu" or not values.numel():
        return None
    if values.is_floating_point() or values.dtype == torch.bool:
        return None
    return int(values.min()), int(values.max())
