"""Differences between two models before they run: settings, attributes, parameters.

A difference of configuration may be too small to be seen in the activations, in bfloat16 above all.
It is listed whether or not its effect is larger than the noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._compare.causes import (
    Convention,
    attribute_kinds,
    class_kind,
    dropout_kinds,
    mode_kinds,
    own_tensors,
    setting_kinds,
    tensor_kinds,
    tied_kinds,
    transposing_classes,
)
from torchfmri._compare.difference import Kind
from torchfmri._compare.grid import grids_of
from torchfmri._compare.kinds import is_same
from torchfmri._compare.run import Run
from torchfmri._model import named_layers
from torchfmri._text import plural, star
from torchfmri._torch import flatten

_MOST_PATTERNS = 3


class Change(NamedTuple):
    """One thing that differs between the two models, and in which layers.

    Attributes:
        name: What kind of change it is, as in `Difference.kinds`; or dtype.
        text: In words, with both values; of several layers those of the first.
        layers: The layers of a where it is so.
    """

    name: str
    text: str
    layers: tuple[str, ...]

    def __str__(self) -> str:
        several = len(self.layers) > 1
        patterns = list(dict.fromkeys(star(each) if several else each for each in self.layers))
        if "" in patterns or self.name == "tied":  # of the model itself, or named already
            return self.text
        more = len(patterns) - _MOST_PATTERNS
        where = ", ".join(patterns[:_MOST_PATTERNS]) + (f" and {more} more" if more > 0 else "")
        count = f" ({plural(len(self.layers), 'layer')})" if several else ""
        return f"{self.text}, at {where}{count}"


def changes_of(a: Run | None, b: Run | None, names: Mapping[str, str]) -> list[Change]:
    """Return what differs between two runs; a change that several layers share is one entry.

    Args:
        a: One side; None for a recording, which shows nothing of its model.
        b: The other.
        names: Layer of a -> layer of b.
    """
    if a is None or b is None:
        return []
    settings = (Change(kind.name, kind.text, ("",)) for kind in setting_kinds(a.model, b.model))
    modules = _module_changes(named_layers(a.model), named_layers(b.model), names)
    tied: dict[Kind, list[str]] = {}
    for layer, kind in tied_kinds(a.model, b.model, names).items():
        tied.setdefault(kind, []).append(layer)
    shared = [Change(kind.name, kind.text, tuple(layers)) for kind, layers in tied.items()]
    return [*_run_changes(a, b), *settings, *shared, *modules]


def _run_changes(a: Run, b: Run) -> Iterator[Change]:
    """Yield differences of autocast, of the mode and of the data."""
    if a.autocast != b.autocast:
        yield Change("autocast", f"autocast is {a.autocast} in a and {b.autocast} in b", ("",))
    if a.model.training != b.model.training:
        said = f"training is {a.model.training} in a and {b.model.training} in b"
        yield Change("mode", said, ("",))
    else:
        yield from (Change(*each, ("",)) for each in dropout_kinds(a.model, b.model))
    yield from data_changes(a, b)


def data_changes(a: Run, b: Run) -> Iterator[Change]:
    """Yield what differs in what two runs are given; the tokens themselves are not compared here.

    The same tokens padded on other sides are no change: then values at tokens are compared.
    """
    if isinstance(a.data, Mapping) and isinstance(b.data, Mapping):
        sides = [_padded_side(each.data.get("attention_mask")) for each in (a, b)]
        bare = "position_ids" not in a.data or "position_ids" not in b.data
        if bare and None not in sides and sides[0] != sides[1]:
            said = f"padding is on the {sides[0]} in a and on the {sides[1]} in b"
            more = ", without position_ids, so it may be counted as positions"
            yield Change("data", said + more, ("",))
        for side, only in (
            ("a", a.data.keys() - b.data.keys()),
            ("b", b.data.keys() - a.data.keys()),
        ):
            for name in sorted(only):
                yield Change("data", f"only {side} is given {name}", ("",))
    ours, theirs = (_given(run) for run in (a, b))
    grids = [grids_of(run.data) for run in (a, b)]
    moved = [str(each.kept.tolist()) for each in grids[0]] != [
        str(each.kept.tolist()) for each in grids[1]
    ] and not _same_ids(ours, theirs)
    for path in (each for each in ours if each in theirs):
        one, two = ours[path].cpu(), theirs[path].cpu()
        if moved:
            if "mask" in path or one.ndim != 2 or one.is_floating_point():
                continue
            at_tokens = [side[0].rows(x) for side, x in zip(grids, (one, two), strict=True) if side]
            known = [each for each in at_tokens if each is not None]
            if len(known) < 2:
                continue
            one, two = known[0], known[1]
        name = path or "the data"
        if one.shape != two.shape:
            yield Change("data", f"{name} is {_shape(one)} in a and {_shape(two)} in b", ("",))
        elif not is_same(one, two):
            apart = torch.nonzero(one != two)
            first = tuple(apart[0].tolist())
            values = f"{one[first].item():.6g} in a and {two[first].item():.6g} in b"
            count = f"{len(apart):,} of {one.numel():,} values"
            yield Change("data", f"{name} differs in {count}, first {list(first)}: {values}", ("",))


def _given(run: Run) -> dict[str, Tensor]:
    """Return the tensors that a run is given, by path, and what its loss is handed."""
    data = {each.path: each.tensor for each in flatten(run.data)}
    return data | {f"target.{each.path}".rstrip("."): each.tensor for each in flatten(run.target)}


def _same_ids(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether both are given the same token numbers in the same places, padding included."""
    ids = [each.get("input_ids") for each in (a, b)]
    return ids[0] is None or ids[1] is None or torch.equal(ids[0].cpu(), ids[1].cpu())


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))


def _padded_side(mask: Any) -> str | None:
    """Return the side on which rows are padded; None without padding."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or bool(mask.all()):
        return None
    return "left" if bool((mask[:, 0] == 0).any()) else "right"


def _module_changes(
    a: Mapping[str, nn.Module], b: Mapping[str, nn.Module], names: Mapping[str, str]
) -> list[Change]:
    found: dict[tuple[str, str], tuple[Kind, list[str]]] = {}
    turned = transposing_classes(a, b, names)
    for layer, partner in names.items():
        if layer not in a or partner not in b or a[layer] is b[partner]:
            continue
        for key, kind in _kinds(a[layer], b[partner], turned):
            found.setdefault((kind.name, key), (kind, []))[1].append(layer)
    return [Change(kind.name, kind.text, tuple(layers)) for kind, layers in found.values()]


def _kinds(a: nn.Module, b: nn.Module, turned: Convention) -> Iterator[tuple[str, Kind]]:
    """Yield the changes of one module, each with a key that equal changes of other layers share."""
    yield from ((kind.text, kind) for kind in mode_kinds(a, b))
    other_class = class_kind(a, b)
    if other_class is not None:
        yield other_class.text, other_class
        return
    yield from ((kind.text, kind) for kind in attribute_kinds(a, b))
    yield from tensor_kinds(a, b, turned)
    one, two = own_tensors(a), own_tensors(b)
    for name in (each for each in one if each in two):
        if one[name].dtype != two[name].dtype:
            dtypes = [str(side[name].dtype).removeprefix("torch.") for side in (one, two)]
            kind = Kind("dtype", f"{name} is {dtypes[0]} in a and {dtypes[1]} in b")
            yield kind.text, kind
        if one[name].requires_grad != two[name].requires_grad:
            only = "a" if one[name].requires_grad else "b"
            kind = Kind("frozen", f"{name} requires grad in {only} only")
            yield kind.text, kind
