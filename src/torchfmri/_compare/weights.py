"""Match layers by their weights, for a port of a model with other names.

`matching` calls `match_by_weights` where names tell too little, and then `match_by_place` for
layers whose weights differ but which stand between the same partners. The fingerprint of a weight
is made of sums in bfloat16 and of its sorted shape, so that it stays the same in another dtype,
transposed, or with permuted units. A layer is only matched when both sides have equally many
candidates. The weight that was loaded wrongly is often the bug that is looked for: its layer must
still find a partner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._compare.causes import own_tensors

_DIGITS = 6


def match_by_weights(
    a: Mapping[str, nn.Module],
    b: Mapping[str, nn.Module],
    rest: tuple[Sequence[str], Sequence[str]],
    known: Mapping[str, str],
) -> dict[str, str]:
    """Return pairs of layers that hold the same numbers, and of modules made of such layers.

    Args:
        a: The modules of one side by layer, in order; empty for a recording.
        b: Those of the other.
        rest: The layers of both that have no partner yet, in the order in which they finish.
        known: Pairs that are known already.
    """
    keys = [
        _grouped({n: fingerprint(side[n]) for n in names if n in side})
        for side, names in zip((a, b), rest, strict=True)
    ]
    found: dict[str, str] = {}
    for key, ours in keys[0].items():
        theirs = keys[1].get(key, [])
        if len(ours) == len(theirs):  # several that are equal, such as new norms, come in order
            found |= dict(zip(ours, theirs, strict=True))
    found |= _match_by_neighbours(keys, rest, found)
    inner = {**known, **found}
    made_a = _grouped({n: _parts(n, inner.items()) for n in rest[0] if n not in found})
    turned = [(other, one) for one, other in inner.items()]
    taken = set(found.values())
    made_b = _grouped({n: _parts(n, turned) for n in rest[1] if n not in taken})
    image = {frozenset(inner[each] for each in key): names for key, names in made_a.items()}
    for key, theirs in made_b.items():
        ours = image.get(frozenset(key), [])
        if len(ours) == len(theirs):  # modules that hold nothing else than one another
            found |= dict(zip(ours, theirs, strict=True))
    return found


def match_by_place(
    a: Mapping[str, nn.Module],
    b: Mapping[str, nn.Module],
    layers: tuple[Sequence[str], Sequence[str]],
    known: Mapping[str, str],
) -> dict[str, str]:
    """Return pairs of layers with other numbers that stand between the same partners.

    A weight that was loaded wrong is the mistake that is looked for: its layer needs a partner.

    Args:
        a: The modules of one side by layer.
        b: Those of the other.
        layers: The layers of both, in the order in which they finish.
        known: Pairs that are known.
    """
    found: dict[str, str] = {}
    for exact in (True, False):  # a weight may be kept transposed, and most are not
        pairs = {**known, **found}
        taken = (set(pairs), set(pairs.values()))
        keys = [
            _grouped({n: _place_key(side[n], exact) for n in names if n in side and n not in own})
            for side, names, own in zip((a, b), layers, taken, strict=True)
        ]
        found |= _match_by_neighbours(keys, layers, pairs, equal_counts=True)
    return found


def _place_key(module: nn.Module, exact: bool) -> tuple[Any, ...]:
    """Return the shapes of the parameters, or what stands for an activation; empty for no key."""
    shapes = parameter_shapes(module)
    if exact and shapes:
        return tuple(sorted(tuple(each.shape) for each in own_tensors(module).values()))
    plain = not isinstance(module, (nn.Identity, nn.modules.dropout._DropoutNd))
    alone = next(module.children(), None) is None
    return shapes or (("without parameters",) if plain and alone else ())


def parameter_shapes(module: nn.Module) -> tuple[Any, ...]:
    """Return the shapes of what a module holds itself, whatever they are called."""
    tensors = own_tensors(module).values()
    return tuple(sorted(tuple(sorted(n for n in each.shape if n > 1)) for each in tensors))


def _match_by_neighbours(
    keys: Sequence[Mapping[tuple[Any, ...], list[str]]],
    rest: tuple[Sequence[str], Sequence[str]],
    found: Mapping[str, str],
    *,
    equal_counts: bool = False,
) -> dict[str, str]:
    """Return pairs of layers with one key of which one side has more, such as new norms.

    Two of them are partners if the layers before and after them are.

    Args:
        keys: Key -> the layers that have it, of both sides.
        rest: The layers of both, in the order in which they finish.
        found: Pairs that are known.
        equal_counts: Match those too of which both sides have equally many.
    """
    partners = [dict(found), {other: one for one, other in found.items()}]
    around = [_neighbours(names, each) for names, each in zip(rest, partners, strict=True)]
    pairs: dict[str, str] = {}
    for key, ours in keys[0].items():
        theirs = keys[1].get(key, [])
        if len(ours) == len(theirs) and not equal_counts:
            continue
        places = _grouped({name: around[1][name] for name in theirs})
        for (before, after), several in _grouped({n: around[0][n] for n in ours}).items():
            same = places.get((found.get(before), found.get(after)), [])
            if len(several) == len(same):
                pairs |= dict(zip(several, same, strict=True))
    return pairs


def _neighbours(names: Sequence[str], partners: Mapping[str, str]) -> dict[str, tuple[Any, Any]]:
    """Name -> the nearest layers before and after it that have partners; None at the ends."""
    before: list[str | None] = []
    after: list[str | None] = []
    for found, order in ((before, names), (after, names[::-1])):
        last = None
        for name in order:
            found.append(last)
            last = name if name in partners else last
    return dict(zip(names, zip(before, reversed(after), strict=True), strict=True))


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Return numbers that stay the same if a weight is transposed or its units are permuted."""
    tensors = [each for each in own_tensors(module).values() if each.is_floating_point()]
    return tuple(sorted(map(_sums, tensors)))


def _sums(x: Tensor) -> tuple[Any, ...]:
    # In the coarsest precision of all, so that a checkpoint is known in every dtype.
    values = x.detach().bfloat16().double()
    sums = (values.sum(), values.abs().sum(), values.square().sum())
    rounded = [f"{float(each):.{_DIGITS}g}" for each in torch.stack(sums)]
    return (tuple(sorted(x.shape)), *rounded)


def _parts(name: str, pairs: Any) -> tuple[str, ...]:
    """The layers inside a module that have partners."""
    prefix = f"{name}." if name else ""
    return tuple(sorted(one for one, _ in pairs if one.startswith(prefix) and one != name))


def _grouped(keys: Mapping[str, tuple[Any, ...]]) -> dict[tuple[Any, ...], list[str]]:
    """Key -> the names that have it; those with an empty key are left out."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, key in keys.items():
        if key:
            found.setdefault(key, []).append(name)
    return found
