"""The user's data at another batch size or length.

`cost_run` asks for it at every size, `trial` for the batch size. Axis 0 is the batch and axis 1 of
token numbers or (b, s, width) floats the length; other data needs a function of the user's. Data is
cut or repeated and never padded, so that the same program runs at every size. Which axis is the
batch and which the length is documented and must stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchfmri._arguments import is_list, is_whole, require
from torchfmri._torch import flatten, map_tensors
from torchfmri.exceptions import InspectionError

AXES = ("batch", "length")


class Sized(NamedTuple):
    """Data and target of one size."""

    data: Any
    target: Any


class Size(NamedTuple):
    """The batch size and length of data; the length is 1 if it has none."""

    batch: int
    length: int


def check_sizes(sizes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return the sizes to measure by axis, sorted.

    Raises:
        InspectionError: `sizes` names no axis, an unknown one, or fewer than two sizes of one.
    """
    if not isinstance(sizes, Mapping) or not sizes or set(sizes) - set(AXES):
        raise InspectionError(
            f"sizes={sizes!r}: write sizes={{'batch': (1, 2, 4), 'length': (64, 128, 256)}}, or "
            "one of the two."
        )
    for axis, values in sizes.items():
        whole = is_list(values) and all(map(is_whole, values))
        require(whole, f"sizes[{axis!r}]", values, "give two whole numbers or more, as (1, 2, 4)")
    result = {axis: sorted(set(map(int, sizes[axis]))) for axis in AXES if axis in sizes}
    for axis, values in result.items():
        if len(values) < 2 or values[0] < 1:
            raise InspectionError(
                f"sizes[{axis!r}]={sizes[axis]}: a law needs two sizes or more, better "
                "three, all of them positive."
            )
    return result


def data_of_size(
    data: Any,
    target: Any,
    sizes: Mapping[str, Sequence[int]] | None,
    size: Mapping[str, int] | None = None,
) -> Sized:
    """Return data and target as given, at `size`, or, made by a function, at the largest size.

    Raises:
        InspectionError: The data cannot have that size, or it is a function without `sizes`.
    """
    made_by_user = callable(data) and not isinstance(data, (Tensor, Mapping))
    if made_by_user:
        if sizes is None:
            raise InspectionError(
                "data is a function; it is called with a batch size and a length, so give "
                "sizes={'batch': (1, 2, 4), 'length': (64, 128, 256)} too, or give its result."
            )
        asked = size or {axis: values[-1] for axis, values in check_sizes(sizes).items()}
        made = data(**asked)
        return Sized(made, target)
    if size is None:
        return Sized(data, target)
    given = size_of(data)
    if "length" in size and given.length == 1:
        raise InspectionError(
            "This data has no length: axis 1 is taken as the length of (b, s) token numbers and "
            "(b, s, width) floats. Give a function data(batch=..., length=...) that makes it."
        )
    resize = partial(_resized, given, size)
    made = Sized(map_tensors(data, resize), map_tensors(target, resize))
    if size_of(made.data) != given._replace(**size):
        raise InspectionError(
            f"A {type(data).__name__} cannot be brought to another size. Give tensors in tuples, "
            "lists or dicts, or a function data(batch=..., length=...) that makes the data."
        )
    return made


def size_of(data: Any) -> Size:
    """Return batch size and length, from the first tensor with a length, or the first tensor."""
    tensors = [each.tensor for each in flatten(data) if each.tensor.ndim]
    if not tensors:
        raise InspectionError(
            "The data holds no tensor, so it has no batch size to change. Give tensors, or a "
            "function data(batch=..., length=...) that makes them."
        )
    for tensor in tensors:
        if tensor.ndim == 3 or (tensor.ndim == 2 and not tensor.is_floating_point()):
            return Size(int(tensor.shape[0]), int(tensor.shape[1]))
    return Size(int(tensors[0].shape[0]), 1)


def _resized(given: Size, size: Mapping[str, int], tensor: Tensor) -> Tensor:
    """Return the tensor with its batch and length cut or repeated."""
    lengthy = tensor.ndim in (2, 3) and given.length > 1 and tensor.shape[1] == given.length
    for axis, wanted, applies in (
        (0, size.get("batch"), tensor.ndim > 0 and tensor.shape[0] == given.batch),
        (1, size.get("length"), lengthy),
    ):
        if wanted is not None and applies:
            chosen = torch.arange(wanted, device=tensor.device) % tensor.shape[axis]
            tensor = tensor.index_select(axis, chosen)
    return tensor
