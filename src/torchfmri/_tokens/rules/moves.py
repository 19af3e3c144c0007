"""Operations that only move entries (views, copies, indexing), done on token numbers instead.

`operations`, `trace` and `tracker` call `moved_like` with tensors of numbers in place of data and
get the numbers of the results. An operation may be entered in `_VIEWS` or `_COPIES` if it changes
no value and its result depends on positions only. Numbers of tensors that are nobody's are
`NOBODY`. Memory is imitated where views depend on it (`as_strided`, `window`), so strides of
numbers and of data must match there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchfmri._tokens.rules.numbers import NOBODY, UNKNOWN, constant
from torchfmri._torch import map_tensors

_VIEWS = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy", "t", "transpose", "permute",
    "expand", "expand_copy", "unsqueeze", "squeeze", "select", "slice", "narrow", "split",
    "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind", "chunk", "unfold",
    "diagonal", "as_strided", "movedim", "alias", "detach",
}  # fmt: skip
_COPIES = {
    "clone", "_to_copy", "contiguous", "lift_fresh", "lift_fresh_copy", "index", "index_select",
    "gather", "cat", "stack", "repeat", "flip", "roll", "constant_pad_nd", "_unsafe_index",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "take", "select_copy", "slice_copy",
    "permute_copy", "transpose_copy", "unsqueeze_copy", "squeeze_copy", "split_copy",
    "diagonal_copy", "unbind_copy",
}  # fmt: skip
MOVES = frozenset(_VIEWS | _COPIES)
BY_IDS = frozenset({"index", "_unsafe_index", "index_select", "embedding", "gather", "take"})


def moved_like(
    function: Any, arguments: Any, keywords: Any, instead: Mapping[int, Tensor]
) -> list[Tensor]:
    """An operation that only moves entries, done on other tensors of the same shapes."""
    name = name_of(function)

    def replaced(value: Any) -> Any:
        return map_tensors(value, one)

    def one(tensor: Tensor) -> Tensor:
        found = instead.get(id(tensor))
        return constant(NOBODY, tensor) if found is None else found

    if name == "embedding":
        table, ids = replaced(arguments[0]), arguments[1]
        return [table[ids]]
    if name in ("_to_copy", "clone", "contiguous", "detach", "alias", "lift_fresh",
                "lift_fresh_copy"):  # fmt: skip
        return [replaced(arguments[0])]
    if name in ("view", "_unsafe_view", "_reshape_alias", "view_copy"):
        shape = arguments[1]
        if isinstance(shape, torch.dtype):  # the same bits read as another type
            return [replaced(arguments[0])]
        return [replaced(arguments[0]).reshape(shape)]  # expanded numbers have no view
    if name == "constant_pad_nd":  # what is added is nobody's
        return [function(replaced(arguments[0]), arguments[1], NOBODY)]
    if name == "as_strided":
        return [_strided(arguments[0], replaced(arguments[0]), *arguments[1:], **keywords)]
    if name in BY_IDS:  # the first operand moves, the others say where
        arguments = (replaced(arguments[0]), *arguments[1:])
    else:
        arguments = tuple(map(replaced, arguments))
    return tensors_in((function(*arguments, **keywords),), {})


def _strided(
    tensor: Tensor, numbers: Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> Tensor:
    """Numbers that lie in memory as the tensor does, seen with another size and other strides."""
    start = 0 if storage_offset is None else storage_offset - tensor.storage_offset()
    shapes = ((tensor.shape, tensor.stride(), 0), (size, stride, start))
    ends = [at + sum((n - 1) * k for n, k in zip(a, b, strict=True)) for a, b, at in shapes]
    if start < 0:
        raise ValueError("it reads before the beginning of its operand")
    memory = torch.full((max(ends) + 1,), UNKNOWN, dtype=torch.int64, device=tensor.device)
    memory.as_strided(tensor.shape, tensor.stride()).copy_(numbers)
    return memory.as_strided(size, stride, start)


def window(numbers: Tensor, base: Tensor, view: Tensor) -> Tensor:
    """The part of a base's numbers that a view of the base sees."""
    if numbers.stride() != base.stride():
        dense = torch.empty_strided(base.shape, base.stride(), dtype=torch.int64,
                                    device=base.device)  # fmt: skip
        numbers = dense.copy_(numbers)
    offset = view.storage_offset() - base.storage_offset()
    return numbers.as_strided(view.shape, view.stride(), offset)


def name_of(function: Any) -> str:
    """The name of an operation, without its namespace and the mark of the one in place."""
    schema = getattr(function, "_schema", None)
    name = str(function) if schema is None else str(schema.name)
    return name.rpartition("::")[2].removesuffix("_") or name


def tensors_in(arguments: Any, keywords: Any) -> list[Tensor]:
    """The tensors among operands, lists of tensors opened."""
    found: list[Tensor] = []
    for each in (*arguments, *keywords.values()):
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += [one for one in each if isinstance(one, Tensor)]
    return found
