"""The tokens of the arguments that a model or layer is called with, where following them begins.

`token_map`, `rerun`, `verification` and the scan's `row_order` call `given_origins`. The tokens of
a call are those of its ids or embeddings, and further arguments of the same batch and length share
them; masks have none. A float argument could be (b, s, d) or (b, d, s): it gets both readings, and
`layouts` decides later from the layers that read it. To treat an argument otherwise, change
`_aligned` or `_beside`; every error here shows up in all layers after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchfmri._tokens.rules.axes import TOKENS
from torchfmri._tokens.rules.numbers import NOBODY
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.sources import CHANNELS_FIRST, Layout, Sources, TokenSource
from torchfmri._torch import Element, flatten_arguments


def given_origins(
    sources: Sources,
    arguments: tuple[object, ...],
    keywords: Mapping[str, object],
    stack: str = "",
    name: str = "",
) -> list[tuple[Tensor, Origins]]:
    """The origins of a call's tensors.

    The tokens are those of the ids, embeddings or images that come first. Further arguments of
    the same batch and length are aligned with them, others have tokens of their own.

    Args:
        sources: To which the tokens are added.
        arguments: Of the call.
        keywords: Of the call.
        stack: "encoder" or "decoder", if it is one of the two that is called.
        name: Of the tokens, where it is not the model that is called.
    """
    elements = flatten_arguments(arguments, keywords)
    main = main_element(elements)
    if main is None:
        return []
    found = [(main.tensor, _own(sources, main.tensor, name, stack))]
    for each in elements:
        if all(each.tensor is not tensor for tensor, _ in found):
            if _is_sibling(each, main):
                own = _own(sources, each.tensor, each.path, stack)
            else:
                own = _aligned(each, found) or _beside(sources, each, main.tensor, stack)
            found.append((each.tensor, own))
    return found


def _is_sibling(element: Element, main: Element) -> bool:
    """Whether an argument is another sequence (s, d) of the same list, of another length."""
    both = element.tensor, main.tensor
    lists = {each.path.rpartition(".")[0] for each in (element, main)}
    if len(lists) > 1 or "" in lists or any(e.ndim != 2 or not e.is_floating_point() for e in both):
        return False
    (one, width), (other, others) = (each.shape for each in both)
    return one != other and width == others


def _aligned(element: Element, found: Sequence[tuple[Tensor, Origins]]) -> Origins | None:
    """The tokens of another argument of the same batch and length, where these are the same.

    Numbers beside ids (types, positions, boxes) and values beside keys are at the same positions.
    A sequence of embeddings beside the first argument is another sequence, whatever its length.
    """
    tensor = element.tensor
    is_decoders = element.path.startswith("decoder")
    if is_mask(element) or tensor.ndim < 2 or is_decoders:
        return None
    for number, (other, origins) in enumerate(found):
        is_another = tensor.is_floating_point() and not number
        if other.shape[:2] != tensor.shape[:2] or other.ndim > 3 or is_another:
            continue
        first = origins.first if other.ndim == 2 else origins.first[..., 0]
        if other.ndim == 2 and other.is_floating_point():
            continue
        first = first.to(tensor.device)[(..., *[None] * (tensor.ndim - 2))]
        return Origins(first.expand(tensor.shape))
    return None


def main_element(elements: Sequence[Element]) -> Element | None:
    """The argument whose tokens are those of the call: ids, embeddings, or what comes first."""
    named = {each.path: each for each in elements}
    first = [named[name] for name in TOKENS if name in named]
    several = [*first, *elements]
    return next((each for each in several if not is_mask(each)), several[0] if several else None)


def is_mask(element: Element) -> bool:
    """Whether an argument says which tokens are there, and has none itself."""
    return "mask" in element.path or element.tensor.dtype == torch.bool


def _own(sources: Sources, tensor: Tensor, name: str, stack: str) -> Origins:
    """The tokens of a tensor by itself."""
    shape = tuple(tensor.shape)
    has_features = tensor.is_floating_point() or tensor.is_complex() or tensor.ndim > 2
    if not has_features:
        grid = (shape[0], shape[1]) if tensor.ndim == 2 else (shape[0] if shape else 1, 1)
        return _at(sources, sources.add(grid, name, stack, is_given=True), tensor, shape)
    if tensor.ndim < 3:
        grid = (shape[0] if tensor.ndim == 2 else 1, 1)
        source = sources.add(grid, name, stack, is_given=True)
        return _at(sources, source, tensor, (grid[0], *[1] * (tensor.ndim - 1)))
    middle, last = shape[1:-1], shape[2:]
    first = sources.add((shape[0], math.prod(middle)), name, stack, is_given=True)
    found = _at(sources, first, tensor, (shape[0], *middle, 1))
    if tensor.is_floating_point() or tensor.is_complex():
        second = sources.add((shape[0], math.prod(last)), f"{name} {CHANNELS_FIRST}".strip(), stack,
                             is_given=True)  # fmt: skip
        other = _at(sources, second, tensor, (shape[0], 1, *last))
        found.second, found.is_decided, found.is_raw = other.first, False, True
        first.layout = second.layout = Layout()
    return found


def _at(sources: Sources, source: TokenSource, tensor: Tensor, shape: Sequence[int]) -> Origins:
    return Origins(source.numbers(tensor.device).reshape(tuple(shape)).expand(tensor.shape))


def _beside(sources: Sources, element: Element, main: Tensor, stack: str) -> Origins:
    """The tokens of a further argument."""
    tensor, shape = element.tensor, tuple(element.tensor.shape)
    whole = tuple(main.shape) if main.ndim == 2 else tuple(main.shape[:2])
    nobody = torch.full((), NOBODY, dtype=torch.int64, device=tensor.device).expand(shape)
    if is_mask(element) or not shape or shape[0] == 1 != whole[0]:
        return Origins(nobody)
    has_features = tensor.is_floating_point() or tensor.ndim > 2
    if tensor.ndim - has_features >= 2:
        return _own(sources, tensor, element.path, stack)
    if shape[0] != whole[0]:
        return Origins(nobody)
    samples = sources.whole_samples(shape[0]).numbers(tensor.device)
    numbers = samples.view(-1, *[1] * (tensor.ndim - 1)).expand(shape)
    return Origins(numbers, is_doubtful=tensor.is_floating_point() and tensor.ndim > 1)


def with_layout(origins: Origins, channels: str | None) -> Origins:
    """The origins of an argument, read with its features "last" or "first" of a sample."""
    if channels is None or not origins.is_raw or origins.second is None:
        return origins
    first = origins.first if channels == "last" else origins.second
    return origins.but(first=first, second=None, is_decided=True, is_raw=False)
