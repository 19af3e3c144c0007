"""The table of failures of indices and of the targets of losses."""

from __future__ import annotations

from torchfmri._explain import target_clues as clues
from torchfmri._explain.failure import Failure

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
        when=clues.in_embedding,
        clues=clues.by_indices,
    ),
    Failure(
        "target_out_of_range",
        r"Target (?P<target>-?\d+) is out of bounds",
        "The target holds class {target}, which the scores do not have.",
        "Classes are counted from 0 to the number of scores - 1. Labels that start at 1, an "
        "unknown label coded as -1, or a last layer with too few outputs.",
        ("Check target.min() and target.max() against the last layer's out_features.",),
        when=clues.in_loss,
        clues=clues.by_target,
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
        when=clues.in_binary_loss,
    ),
    Failure(
        "target_dtype",
        r"expected target dtype to be Long|expected scalar type Long but found"
        r"|Expected floating point type for target|not implemented for 'Int'",
        "The target of a classification loss has the wrong dtype.",
        "cross_entropy takes class numbers as int64 of shape (b,), or probabilities as floats in "
        "the shape of the scores.",
        ("Class numbers: target.long().", "Probabilities or one-hot: target.float()."),
        when=clues.in_loss,
        clues=clues.by_target,
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
        clues=clues.by_rows,
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
        clues=clues.by_binary_shapes,
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
        clues=clues.by_target,
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
        clues=clues.by_target,
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
        "torch.multinomial was asked to draw from numbers that are no probabilities.",
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
