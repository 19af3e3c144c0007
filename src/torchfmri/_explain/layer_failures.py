"""Failures of what single layers and functions are given: their table, and how clues are read.

`entry_points` puts the table together with the others, before the general failures of shapes. A
function that reads clues takes a `Crash` and the match of the failure's pattern; it may fail, and a
guess says probably. A new entry needs a test that makes the real failure happen and a row in
`docs/errors.md`.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._explain.crash import Crash, describe
from torchfmri._explain.failure import SIZES, Clues, Failure

# Layers that return more than a tensor, and what they return.
_RETURNED = {nn.RNNBase: "output, state", nn.MultiheadAttention: "output, weights"}


def with_doubled_cache(crash: Crash, match: re.Match[str]) -> bool:
    """Return whether sizes N and 2N met while a cache of keys and values was in use."""
    return _is_doubled(match) and _uses_cache(crash)


def maybe_with_doubled_cache(crash: Crash, match: re.Match[str]) -> bool:
    """Return whether sizes N and 2N met and nothing but the message is known."""
    return _is_doubled(match) and not crash.steps


def needs_tensor(crash: Crash, match: re.Match[str]) -> bool:
    """Return whether a layer, or the forward of one, took the value for a tensor."""
    name = match["name"]
    return bool(crash.modules) and (name is None or hasattr(Tensor, name))


def in_lstm_with_one_state(crash: Crash, _: re.Match[str]) -> bool:
    """Return whether an LSTM was given one tensor as its state."""
    return isinstance(crash.module, nn.LSTM | nn.LSTMCell) and isinstance(
        crash.local("hx", "forward"), Tensor
    )


def in_attention(crash: Crash, match: re.Match[str]) -> bool:
    """Return whether scaled_dot_product_attention ran, or attention merged its masks."""
    if not crash.steps:
        return False
    last = crash.steps[-1]
    if match["shape"] is not None:
        return last.of_torch and last.function == "merge_masks"
    return "scaled_dot_product_attention(" in last.line.code


def by_given_value(crash: Crash, _: re.Match[str]) -> Clues:
    """Find what the layer got instead of a tensor, and which layer probably returned it."""
    given = [each for each in crash.arguments().values() if isinstance(each, tuple | list)]
    facts = [f"It was given {_outline(given[0])}."] if given else []
    layer = crash.layer_of(crash.module) or ""
    # Either the layer was given a tuple by its neighbour, or its own forward got one from a child.
    parent = layer.rpartition(".")[0] if given else layer
    beside = {
        name: module
        for name, module in crash.layers.items()
        if name and name.rpartition(".")[0] == parent and isinstance(module, tuple(_RETURNED))
    }
    if len(beside) != 1:
        return Clues(tuple(facts), ("Take the tensor out of it: x = x[0].",) if given else ())
    ((name, module),) = beside.items()
    parts = next(each for kind, each in _RETURNED.items() if isinstance(module, kind))
    facts.append(f"Probably layer {name!r} ({type(module).__name__}) returned it: ({parts}).")
    if isinstance(crash.layers.get(parent), nn.Sequential):
        cure = (
            f"nn.Sequential passes on all of ({parts}): call the layers in a forward of your own."
        )
    else:
        cure = f"Take it apart: {parts} = self.{name.rpartition('.')[2]}(...), and pass on output."
    return Clues(tuple(facts), (cure,))


def by_hidden_state(crash: Crash, match: re.Match[str]) -> Clues:
    """Find whether batch and length of the input are probably swapped."""
    module, inputs = crash.module, list(crash.inputs().values())
    if not isinstance(module, nn.RNNBase) or not inputs or inputs[0].dim() != 3:
        return Clues()
    batch = 0 if module.batch_first else 1
    shape, state = inputs[0].shape, re.findall(r"\d+", match["got"])
    facts = (
        f"batch_first={module.batch_first}: an input {tuple(shape)} has a batch of {shape[batch]}.",
    )
    if len(state) == 3 and int(state[1]) == shape[1 - batch] != shape[batch]:
        cure = f"Probably the input is meant the other way: batch_first={not module.batch_first}."
        return Clues(facts, (cure,))
    if len(state) == 3 and int(state[0]) == shape[batch] != int(state[1]):
        return Clues(
            facts, ("Probably the batch comes first in the state: state.transpose(0, 1).",)
        )
    return Clues(facts)


def by_probabilities(crash: Crash, match: re.Match[str]) -> Clues:
    """Find the range of the values, and how many are NaN."""
    values = crash.local(match["which"], "binary_cross_entropy")
    if not isinstance(values, Tensor) or values.device.type != "cpu" or not values.numel():
        return Clues()
    values = values.detach()
    count = int(torch.isnan(values).sum())
    if count:
        told = f"{count} of {values.numel()} values are NaN."
        cure = "Find where the first NaN comes from: torchfmri.Monitor(model), or detect_anomaly."
        return Clues((told,), (cure,))
    low, high = float(values.min()), float(values.max())
    return Clues((f"The {match['which']} runs from {low:.4g} to {high:.4g}.",))


def by_equation(crash: Crash, match: re.Match[str]) -> Clues:
    """Find the equation, the shapes, and the letters that stand for two sizes."""
    equation, operands = crash.local("equation", "einsum"), crash.local("operands", "einsum")
    if not isinstance(equation, str) or not isinstance(operands, list | tuple):
        return Clues((f"PyTorch says: {match['reason']}.",))
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = operands[0]
    shapes = [tuple(each.shape) for each in operands if isinstance(each, Tensor)]
    facts = [f"The equation {equation!r} got {', '.join(map(str, shapes))}."]
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, set[int]] = {}
    for term, shape in zip(terms, shapes, strict=False):
        if len(term) == len(shape):
            for letter, size in zip(term, shape, strict=True):
                sizes.setdefault(letter, set()).add(size)
        elif "..." not in term:
            facts.append(f"{term!r} has {len(term)} letters for {len(shape)} dimensions.")
    facts += [
        f"{letter!r} stands for {' and '.join(map(str, sorted(each)))}."
        for letter, each in sizes.items()
        if len(each - {1}) > 1
    ]
    if len(facts) == 1:
        facts.append(f"PyTorch says: {match['reason']}.")
    return Clues(tuple(facts))


def _outline(value: Any) -> str:
    """Write the tensors of a container with their shapes, such as `((2, 3) float32 cpu, int)`."""
    if isinstance(value, Tensor):
        return describe(value)
    if isinstance(value, tuple | list):
        inside = ", ".join(map(_outline, value[:4])) + (", ..." if len(value) > 4 else "")
        return f"a {type(value).__name__} of [{inside}]"
    return f"a {type(value).__name__}"


def _is_doubled(match: re.Match[str]) -> bool:
    small, large = sorted((int(match["first"]), int(match["second"])))
    return large == 2 * small and small > 0


def _uses_cache(crash: Crash) -> bool:
    return any(
        ("past" in name or "cache" in name) and value is not None and not isinstance(value, int)
        for step in crash.steps
        for name, value in list(step.frame.f_locals.items())
        if not step.of_torch
    )


# -- the table ------------------------------------------------------------------------------------

_STATE = "An h_0 (for LSTM also c_0) is (layers x directions, batch, hidden_size)"

LAYER_FAILURES = (
    Failure(
        "doubled_cache",
        SIZES,
        "Attention met sizes {first} and {second}, one twice the other, while a cache of keys and "
        "values was in use: the signature of the same sequence fed twice into one cache.",
        "A cache already holds the keys and values of the positions that went through the model. "
        "Feeding these again appends them a second time: keys are twice as many as the mask or "
        "the queries expect. Without an explicit mask the same mistake gives no error but wrong "
        "numbers.",
        (
            "Feed only the new token: ids[:, -1:], with the cache of those before it.",
            "Or take a new cache for a pass over the whole sequence (past_key_values=None).",
            "To step back one position: cache.crop(-1).",
        ),
        when=with_doubled_cache,
    ),
    Failure(
        "doubled_cache",
        SIZES,
        "Sizes {first} and {second} met, one twice the other. In attention with a cache of keys "
        "and values, this means that the same sequence was probably fed twice into the cache.",
        "A cache already holds the keys and values of the positions that went through the model. "
        "Feeding these again appends them a second time. The message alone does not tell whether a "
        "cache was in use: without one, two tensors simply have different sizes.",
        (
            "With a cache: feed only the new token, ids[:, -1:], or start with a new cache.",
            "Without one: print both shapes on the line above.",
            "Pass the exception itself for layer and line: torchfmri.explain(error).",
        ),
        when=maybe_with_doubled_cache,
    ),
    Failure(
        "not_a_tensor",
        r"(?P<function>\w+)\(\): argument '(?P<name>\w+)' (?:\(position \d+\) )?must be Tensor, "
        r"not (?P<got>[\w.]+)",
        "{function} takes a tensor as its argument {name!r} and got a {got}.",
        "Some layers return several values: recurrent ones (output, state), attention (output, "
        "weights). A layer without `return` gives None; NumPy arrays are not tensors.",
        ("Look at what the layer before returns, and pass on the tensor that you mean.",),
        clues=by_given_value,
    ),
    Failure(
        "not_a_tensor",
        r"'(?P<got>tuple|list|dict|NoneType)' object has no attribute '(?P<name>\w+)'"
        r"|invalid combination of arguments.*\(!(?P<g>tuple|list|NoneType)\b",
        "A {got}{g} stands where a tensor is needed.",
        "Some layers return several values: recurrent ones (output, state), attention (output, "
        "weights). A layer without `return` gives None.",
        ("Look at what the layer before returns, and pass on the tensor that you mean.",),
        when=needs_tensor,
        clues=by_given_value,
    ),
    Failure(
        "hidden_state",
        r"Expected hidden(?:\[\d\])? size (?P<wanted>\([^)]*\)), got (?P<got>\[[^\]]*\])",
        "A recurrent layer got a hidden state of size {got}; for this input it takes {wanted}.",
        f"{_STATE}, also with batch_first=True, and the batch is that of the input.",
        (
            "Make the state for the batch at hand: x.new_zeros{wanted}, or pass none for zeros.",
            "A state kept from step to step: start again when the batch changes its size.",
        ),
        clues=by_hidden_state,
    ),
    Failure(
        "hidden_state",
        r"For (?:un)?batched \d-D input, hx (?:and cx )?should also be \d-D"
        r"|Input batch size \d+ doesn't match hidden\d? batch size"
        r"|hidden\d? has inconsistent hidden_size"
        r"|Expected h(?:idden|x\[\d\]) to be 1D or 2D",
        "A recurrent layer got a hidden state that does not fit its input or its hidden_size.",
        f"{_STATE}; without a batch in the input it has none either. That of a cell (LSTMCell, "
        "GRUCell) is (batch, hidden_size).",
        ("Make the state for the batch at hand, or pass none for zeros.",),
    ),
    Failure(
        "hidden_state",
        r"index 1 is out of bounds for dimension 0 with size 1|too many values to unpack",
        "An LSTM got one tensor as its state and takes two: (h_0, c_0).",
        "An LSTM carries a hidden state and a cell state; GRU and RNN carry one tensor.",
        ("Pass a pair: lstm(x, (h_0, c_0)), or nothing for zeros.",),
        when=in_lstm_with_one_state,
    ),
    Failure(
        "attention_shapes",
        r"The shape of the \dD attn_mask is torch\.Size\((?P<got>\[[^\]]*\])\), but should be "
        r"(?P<wanted>\([^)]*\))",
        "The attention mask has shape {got} and should have {wanted}.",
        "attn_mask is (queries, keys), or (batch x heads, queries, keys) where samples differ. "
        "Padding is hidden by another argument: key_padding_mask, (batch, keys).",
        (
            "Make the mask for this length: torch.triu(torch.ones(n, n, dtype=torch.bool), 1).",
            "One mask per sample: mask.repeat_interleave(num_heads, 0).",
            "Padding: key_padding_mask=mask, True where a key is padding.",
        ),
    ),
    Failure(
        "attention_shapes",
        r"Expected key_padd(?:ed|ing)_mask\.shape\[\d\] to be \d+, but got"
        r"|For (?:un)?batched \(\d-D\) `query`, expected `\w*mask` to be "
        r"|mask_type == \d mask shape should be"
        r"|types of (?:key_padding_mask|attn_mask|mask) are supported"
        r"|Expected attn_mask dtype to be bool",
        "A mask of an attention layer has a shape or dtype that the layer does not take.",
        "key_padding_mask is (batch, keys), also without batch_first; attn_mask is (queries, keys) "
        "or (batch x heads, queries, keys). Both are bool (True: hidden) or floats that are added.",
        (
            "A mask of the tokenizer (1 for tokens) becomes key_padding_mask=attention_mask == 0.",
            "Batch and length swapped: mask.t().",
        ),
    ),
    Failure(
        "attention_shapes",
        SIZES + r"|shape '(?P<shape>\[[^\]]*\])' is invalid for input of size (?P<size>\d+)",
        "Query, key, value and mask of an attention do not fit together.",
        "The mask must broadcast to (batch, heads, queries, keys): a padding mask (b, keys) needs "
        "two more dimensions. Query, key and value agree in batch and heads, key and value in "
        "length.",
        (
            "A padding mask: mask[:, None, None, :], True where a query may look.",
            "A mask per sample: mask[:, None] adds the dimension of the heads.",
        ),
        when=in_attention,
    ),
    Failure(
        "probabilities",
        r"all elements of (?P<which>input|target) should be between 0 and 1",
        "binary_cross_entropy takes an {which} of probabilities, and some value is not between 0 "
        "and 1.",
        "It takes the logarithm of its input, so raw scores (logits) must go through a sigmoid "
        "first. A target is 0 or 1. NaN is not between 0 and 1 either.",
        (
            "Raw scores: BCEWithLogitsLoss takes them as they are, and is more exact.",
            "Or apply torch.sigmoid to the scores first; of a target, check the labels.",
        ),
        clues=by_probabilities,
    ),
    Failure(
        "gather",
        r"expected index (?P<index>\[[^\]]*\]) to be (?:no larger|smaller) than self "
        r"(?P<self>\[[^\]]*\]) apart from dimension (?P<along>\d+)"
        r"(?: and to be (?:no larger|smaller)(?: size)? than src (?P<src>\[[^\]]*\]))?",
        "gather or scatter along dimension {along} got an index of size {index} for a tensor of "
        "size {self}.",
        "In all dimensions but that one, the index must not be larger than the tensor; for scatter "
        "it must not be larger than the source in any.",
        (
            "Rows chosen by one number each: index of shape (b, 1), index[:, None].",
            "Whole rows: x[index], or x.index_select(dim, index).",
        ),
    ),
    Failure(
        "gather",
        r"Index tensor must have the same number of dimensions as (?:input|self|src) tensor"
        r"|(?:gather|scatter)\w*\(\): Expected dtype int\S* for index",
        "gather or scatter takes an index of whole numbers with as many dimensions as the tensor.",
        "The result has the shape of the index; it is not broadcast.",
        (
            "Add the missing dimension: x.gather(1, index[:, None]).squeeze(1).",
            "Floats: index.long().",
        ),
    ),
    Failure(
        "index_bounds",
        r"index (?P<value>-?\d+) is out of bounds for dimension (?P<along>\d+) with size "
        r"(?P<size>\d+)",
        "Index {value} was asked for in dimension {along}, which has size {size}.",
        "Indices run from 0 to the size - 1. Labels that start at 1, a padding label such as -100, "
        "or an index made for another tensor.",
        (
            "Print index.min(), index.max() and the shape of the tensor on the line above.",
            "Padding labels: index.clamp_min(0), and mask the result.",
        ),
    ),
    Failure(
        "einsum",
        r"einsum\(\): (?P<reason>[^\n]*)",
        "The operands do not fit the equation of an einsum.",
        "Every letter stands for one size in all operands, an operand has one letter for each of "
        "its dimensions, and letters of the output appear in an operand.",
        ("Write the shape under each term of the equation, and look for the letter that differs.",),
        clues=by_equation,
    ),
)
