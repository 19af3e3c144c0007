"""Failures of indices and of the targets of losses: their table, and how clues are read.

`entry_points` puts the table together with the others. A function that reads clues takes a `Crash`
and the match of the failure's pattern; it may fail, and a guess says probably. Values are read on
the CPU only, because reading them on a GPU would wait for it, and fail after a device-side assert.
A new entry needs a test that makes the real failure happen and a row in `docs/errors.md`.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from torchfmri._explain.crash import Crash, describe
from torchfmri._explain.failure import Clues, Failure


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


# -- the table ------------------------------------------------------------------------------------

TARGET_FAILURES = (
    Failure(
        "index_out_of_range",
        r"index out of range in self|Index \d+ of input takes value (?P<value>-?\d+)",
        "An embedding was asked for a row that it does not have.",
        "Token ids beyond num_embeddings (tokenizer and model do not belong together, tokens were "
        "added), a negative padding id, or positions longer than the position table.",
        (
            "Check ids.min() >= 0 and ids.max() < num_embeddings.",
            "Tokens were added: model.resize_token_embeddings(len(tokenizer)).",
            "Positions: shorten the sequence.",
        ),
        when=in_embedding,
        clues=by_indices,
    ),
    Failure(
        "target_out_of_range",
        r"Target (?P<target>-?\d+) is out of bounds",
        "The target holds class {target}, which the scores do not have.",
        "Classes are counted from 0 to the number of scores - 1. Labels that start at 1, an "
        "unknown label coded as -1, or a last layer with too few outputs.",
        ("Check target.min() and target.max() against the last layer's out_features.",),
        when=in_loss,
        clues=by_target,
    ),
    Failure(
        "target_dtype",
        r"Found dtype (?P<found>\w+) but expected (?P<expected>\w+)"
        r"|result type (?P<result>\w+) can't be cast to the desired output type (?P<target>\w+)",
        "The target of a binary loss is {found}{target}; it must be {expected}{result} like the "
        "scores.",
        "The binary losses compare value by value, and a label may lie between 0 and 1: they take "
        "floats, also where every label is 0 or 1.",
        ("target.float(), or target.to(scores.dtype) where the scores are not float32.",),
        when=in_binary_loss,
    ),
    Failure(
        "target_dtype",
        r"expected target dtype to be Long|expected scalar type Long but found"
        r"|Expected floating point type for target|not implemented for 'Int'",
        "The target of a classification loss has the wrong dtype.",
        "cross_entropy takes class numbers as int64 of shape (b,), or probabilities as floats in "
        "the shape of the scores.",
        ("Class numbers: target.long().", "Probabilities or one-hot: target.float()."),
        when=in_loss,
        clues=by_target,
    ),
    Failure(
        "target_shape",
        r"Expected input batch_size \((?P<rows>\d+)\) to match target batch_size "
        r"\((?P<targets>\d+)\)",
        "The scores have {rows} rows and the target has {targets}.",
        "A loss compares scores and target row by row, so their first sizes must be equal. Either "
        "a view(-1, n) before the loss has put other values into the batch dimension, or scores "
        "and target come from different batches.",
        (
            "Follow the first size of x from the input on, and keep it: x.view(len(x), -1).",
            "Language models: shift both, scores[:, :-1] against target[:, 1:].",
        ),
        clues=by_rows,
    ),
    Failure(
        "target_shape",
        r"Target size \(torch\.Size\((?P<target>\[[^\]]*\])\)\) must be the same as input size "
        r"\(torch\.Size\((?P<scores>\[[^\]]*\])\)\)"
        r"|Using a target size \(torch\.Size\((?P<t>\[[^\]]*\])\)\) that is different to the input "
        r"size \(torch\.Size\((?P<s>\[[^\]]*\])\)\) is deprecated\. Please ensure",
        "A binary loss got scores of size {scores}{s} and a target of size {target}{t}.",
        "The binary losses compare value by value and do not broadcast: both shapes must be equal.",
        ("Print both shapes on the line above.",),
        clues=by_binary_shapes,
    ),
    Failure(
        "target_shape",
        r"Expected target size \[|size mismatch \(got input: \[.*\] ?, target: \["
        r"|only batches of spatial targets supported",
        "The target of a loss has another shape than its scores ask for.",
        "cross_entropy takes scores (b, classes, ...) and a target (b, ...): classes are "
        "dimension 1, for sequences and images too.",
        (
            "Sequences: cross_entropy(scores.flatten(0, 1), target.flatten()).",
            "Or move the classes to dimension 1: scores.movedim(-1, 1).",
        ),
        clues=by_target,
    ),
    Failure(
        "target_shape",
        r"multi-target not supported|0D or 1D target tensor expected"
        r"|For 1D input, 1D target must have size 1",
        "The target of a classification loss does not fit the shape of its scores.",
        "For scores (b, classes) the target is (b,) with class numbers, or (b, classes) with "
        "probabilities as floats.",
        (
            "A trailing 1: target.squeeze(-1).",
            "One-hot rows: target.argmax(-1), or target.float() as probabilities.",
            "One sample without a batch: scores.unsqueeze(0) and a target of shape (1,).",
        ),
        clues=by_target,
    ),
    Failure(
        "index_dtype",
        r"'indices' to have one of the following scalar types: Long, Int; but got (?P<got>\S+)",
        "An embedding was given {got} instead of whole numbers.",
        "An embedding looks up rows by number. Ids turned into floats on the way (a collate "
        "function, .float(), NumPy), or the input goes to the wrong layer.",
        ("Pass ids.long().",),
    ),
    Failure(
        "sampling",
        r"probability tensor contains either .?inf|invalid multinomial distribution",
        "torch.multinomial was asked to draw from numbers that are not probabilities.",
        "They hold NaN, infinity or negative values, or sum to 0. Usually the logits are not "
        "finite: float16 that overflowed, a row that is masked entirely, a temperature near 0; or "
        "logits were given instead of their softmax.",
        (
            "Ask logits.isfinite().all() before the softmax; inspect the layers if it is False.",
            "Load the model in bfloat16 or float32 instead of float16.",
            "Draw from logits.softmax(-1), not from logits.",
        ),
    ),
    Failure(
        "negative_class",
        r"Class values must be non-negative|Class values must be smaller than num_classes",
        "one_hot was given class numbers that it does not have.",
        "Classes are counted from 0 to num_classes - 1. Labels that are padded or unknown are "
        "often coded as -1 or -100.",
        ("Check labels.min() >= 0 and labels.max() < num_classes; mask the others first.",),
    ),
)
