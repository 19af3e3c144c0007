"""Match the numbers in lists of layers: a block that only one side has moves all that follow.

`matching` calls `match_lists` before it compares names, because the numbers in an `nn.Sequential`
or an `nn.ModuleList` are places and no names. A list is left as it is unless it has more layers on
one side, layers that cannot be partners, or none with the same weights. Then its layers are aligned
in order, so that as many as possible look alike and hold the same numbers, or by their weights if
those tell another order. Names without a number are never changed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchfmri._compare.kinds import is_same
from torchfmri._compare.side import Side
from torchfmri._compare.weights import fingerprint, parameter_shapes

_EQUAL = 2.0
"""How much more equal numbers say about two layers than equal shapes."""


class _Tree(NamedTuple):
    """The layers of a side.

    Attributes:
        kinds: Layer -> the shapes of its parameters, or its class; empty for one of layers alone.
        children: Layer -> the names of the layers directly inside it, in order.
        side: The side.
    """

    kinds: Mapping[str, Any]
    children: Mapping[str, Sequence[str]]
    side: Side

    def below(self, layer: str) -> Iterator[str]:
        """Yield a layer and those inside it."""
        if layer in self.kinds:
            yield layer
        for name in self.children.get(layer, ()):
            yield from self.below(_join(layer, name))

    def inside(self, layer: str) -> dict[str, tuple[Any, Any]]:
        """Return what a layer and those inside it are, with their numbers, by the rest of name."""
        modules = self.side.modules
        return {
            each[len(layer) :]: (self.kinds[each], fingerprint(modules[each]) if modules else ())
            for each in self.below(layer)
        }


def match_lists(a: Side, b: Side) -> dict[str, str]:
    """Return layer of a -> the same layer in b, by name but for the numbers of lists that moved."""
    both_live = bool(a.modules and b.modules)
    one, two = _tree(a, both_live), _tree(b, both_live)
    found, waiting = {}, [("", "")]
    while waiting:
        ours, theirs = waiting.pop()
        found[ours] = theirs
        children = [tree.children.get(at, ()) for tree, at in ((one, ours), (two, theirs))]
        named = [each for each in children[0] if each in children[1] and not each.isdigit()]
        waiting += [(_join(ours, each), _join(theirs, each)) for each in named]
        first, second = (
            [_join(at, each) for each in names if each.isdigit()]
            for at, names in zip((ours, theirs), children, strict=True)
        )
        waiting += _aligned(one, two, first, second)
    return found


def _tree(side: Side, live: bool) -> _Tree:
    types = {name: type(module).__name__ for name, module in side.modules.items()}
    records = side.recording.inspection.values()
    types = types or {name: each.kind for each in records for name in each.names}
    children: dict[str, dict[str, None]] = {}
    for layer in filter(None, types):
        parts = layer.split(".")
        for at, part in enumerate(parts):
            children.setdefault(".".join(parts[:at]), {})[part] = None
    # A port has other classes: of a module with layers inside it, these tell what it is.
    kinds: dict[str, Any] = {name: "" if name in children else kind for name, kind in types.items()}
    if live:
        shapes = {name: parameter_shapes(module) for name, module in side.modules.items()}
        kinds = {name: shapes[name] or kind for name, kind in kinds.items()}
    return _Tree(kinds, {name: list(each) for name, each in children.items()}, side)


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _aligned(one: _Tree, two: _Tree, a: Sequence[str], b: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of two lists in order: by number, unless others are more alike by far."""
    by_number = list(zip(a, b, strict=False))
    alike = len(a) == len(b) and all(one.kinds.get(x) == two.kinds.get(y) for x, y in by_number)
    if alike and (not a or any(_share_numbers(one, two, x, y) for x, y in by_number)):
        return by_number
    parts = [[tree.inside(each) for each in several] for tree, several in ((one, a), (two, b))]
    if alike:  # another order, or other weights
        same = {
            x: b[parts[1].index(part)]
            for x, part in zip(a, parts[0], strict=True)
            if parts[0].count(part) == parts[1].count(part) == 1
        }
        rest = iter([each for each in b if each not in same.values()])
        return [(x, same.get(x) or next(rest)) for x in a] if 2 * len(same) >= len(a) else by_number
    likeness = [[_likeness(x, y) for y in parts[1]] for x in parts[0]]
    best = [[0.0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            best[i][j] = max(best[i + 1][j], best[i][j + 1], best[i + 1][j + 1] + likeness[i][j])
    if best[0][0] <= sum(likeness[i][i] for i in range(len(by_number))):
        return by_number
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if likeness[i][j] and best[i][j] == best[i + 1][j + 1] + likeness[i][j]:
            found.append((a[i], b[j]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return found


def _share_numbers(one: _Tree, two: _Tree, a: str, b: str) -> bool:
    """Whether two blocks hold an equal matrix, or none that could tell."""
    ours, theirs = one.side.modules, two.side.modules
    known = [
        (parameter, other)
        for name in one.below(a)
        if name in ours and b + name[len(a) :] in theirs
        for key, parameter in ours[name].named_parameters(recurse=False)
        if (other := theirs[b + name[len(a) :]]._parameters.get(key)) is not None
        and parameter.ndim > 1
    ]
    return not known or any(is_same(*each) for each in known)


def _likeness(one: Mapping[str, tuple[Any, Any]], two: Mapping[str, tuple[Any, Any]]) -> float:
    """Return how much two blocks look alike: the share of equal layers, and of equal numbers."""
    same = [name for name in one if name in two and one[name][0] == two[name][0]]
    held = [name for name in one if one[name][1]]
    equal = sum(name in two and bool(one[name][1] == two[name][1]) for name in held)
    return (len(same) + _EQUAL * equal) / len(one.keys() | two.keys())
