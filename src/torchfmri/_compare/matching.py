"""Match the layers of both sides: `match_layers` returns a `Matching`.

`entry_point` calls it before any tensor is compared; `explanation` asks here for layers that only
one side has. The ways to match are tried from certain to doubtful: the user's names, equal names
(`lists` moves the numbers in lists first), ends of names, then, while less than half have a
partner, weights and finally order and shape. A later way must not touch pairs of an earlier one.
Each way that guesses puts a sentence into `doubt`, since a wrong pair looks like a difference.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from torch import nn

from torchfmri._compare.causes import own_tensors
from torchfmri._compare.difference import Kind
from torchfmri._compare.lists import match_lists
from torchfmri._compare.recording import FORWARD, RecordedPlace, Recording
from torchfmri._compare.side import Side
from torchfmri._compare.weights import match_by_place, match_by_weights, parameter_shapes
from torchfmri._text import listed, plural
from torchfmri.exceptions import InspectionError

EXPORTED = "hidden_states"
"""The name of hidden states that were exported without saying of which layers."""
EXPORTED_MODEL = "exported hidden states"
"""The name of the model in an inspection of such states."""


@dataclass(frozen=True)
class Matching:
    """Pairs of layers.

    Attributes:
        pairs: Layer of a -> layer of b.
        only_a: Layers of a without a partner.
        only_b: Layers of b without a partner.
        doubt: What is not certain about the pairs, in words; empty where names agree.
    """

    pairs: Mapping[str, str]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    doubt: str = ""


def match_layers(one: Side, two: Side, names: Mapping[str, str] | None) -> Matching:
    """Match by the user's mapping, by name, by the end of the name, by weights, by order and shape.

    Raises:
        InspectionError: The mapping names layers that are not there, or nothing matches.
    """
    a, b = one.recording, two.recording
    layers_a, layers_b = a.layers, b.layers
    given = _given(names or {}, layers_a, layers_b)
    taken = set(given.values())
    known, free = match_lists(one, two), set(layers_b) - taken
    named = [each for each in layers_a if known.get(each) in free and each not in given]
    moved = {each: known[each] for each in named if known[each] != each}
    pairs = given | {each: known[each] for each in named}
    by_ending = _by_ending(_without(layers_a, pairs), _without(layers_b, pairs.values()))
    pairs |= by_ending
    doubts = [_doubt(moved, "in the order of their list")] if moved else []
    kept = {each: pairs[each] for each in _credible(pairs, given, one, two)}
    if moved or len(kept) < len(pairs) or _are_few(pairs, layers_a, layers_b):
        rest = _without(layers_a, kept), _without(layers_b, kept.values())
        by_weights = match_by_weights(one.modules, two.modules, rest, kept)
        known = kept | by_weights
        by_place = match_by_place(one.modules, two.modules, (layers_a, layers_b), known)
        if (moved or by_weights) and len(known) + len(by_place) >= len(pairs):
            pairs = known | by_place
            doubts += [_doubt(by_weights, "by their weights")] if by_weights else []
            doubts += [_doubt(by_place, "by place and shape")] if by_place else []
    by_ending = {each: pairs[each] for each in by_ending if pairs.get(each) == by_ending[each]}
    doubts[:0] = [_doubt(by_ending, "by the end of the name")] if by_ending else []
    rest_a, rest_b = _without(layers_a, pairs), _without(layers_b, pairs.values())
    if _are_few(pairs, layers_a, layers_b):
        by_order = _by_order(a, b, rest_a, rest_b)
        pairs |= by_order
        if by_order:
            wrong = "give names={layer of a: layer of b} where that is wrong"
            doubts.append(f"{_doubt(by_order, 'by order and shape alone')}: {wrong}")
    nothing = set(pairs) <= {""} and min(len(layers_a), len(layers_b)) > 1  # models as a whole
    if not pairs or nothing:
        raise InspectionError(
            f"The two have no layer in common: a has {listed(layers_a)}, b has {listed(layers_b)}. "
            "Give names={layer of a: layer of b}."
        )
    rest_a, rest_b = _without(layers_a, pairs), _without(layers_b, pairs.values())
    _check_exported("a", "b", a, rest_a, layers_b)
    _check_exported("b", "a", b, rest_b, layers_a)
    return Matching(pairs, tuple(rest_a), tuple(rest_b), "; ".join(doubts))


def _credible(
    pairs: Mapping[str, str], given: Mapping[str, str], one: Side, two: Side
) -> list[str]:
    """Return the layers of a whose partner by name can be the same layer.

    Names are doubted only if more than half of them mean other layers.
    """
    wrong = {
        each
        for each, other in pairs.items()
        if each not in given and not _fit(one.modules.get(each), two.modules.get(other))
    }
    wrong = wrong if 2 * len(wrong) > len(pairs) else set()
    return [each for each in pairs if each in given or each not in wrong]


def _fit(one: nn.Module | None, two: nn.Module | None) -> bool:
    """Whether two modules can be the same layer: both with layers inside, or of equal shapes."""
    if one is None or two is None:
        return True
    inside = [next(each.children(), None) is not None for each in (one, two)]
    return inside[0] == inside[1] and parameter_shapes(one) == parameter_shapes(two)


def _check_exported(
    name: str, other: str, side: Recording, rest: Sequence[str], known: Sequence[str]
) -> None:
    """Raise if a side holds exported hidden states of layers that the other side does not have."""
    if rest and side.inspection.model == EXPORTED_MODEL:
        raise InspectionError(
            f"{name} holds the hidden states of {listed(rest)}, and {other} has no such layer, "
            f"only {listed(known)}. Check layers= of import_hidden_states."
        )


def missing_layers(
    a: Mapping[str, nn.Module], b: Mapping[str, nn.Module], matching: Matching, layer: str
) -> Iterator[Kind]:
    """Yield which layers with parameters, inside the one that differs, only one side has.

    Args:
        a: The modules of one side.
        b: Those of the other.
        matching: Which layers are partners.
        layer: The layer of a that differs.
    """
    partner = matching.pairs.get(layer, layer)
    for side, modules, names, around, rest in (
        ("a", a, matching.only_a, layer, b.keys() - set(matching.pairs.values())),
        ("b", b, matching.only_b, partner, a.keys() - matching.pairs.keys()),
    ):
        # A layer without a partner that the other side has too is one that it never calls.
        inside = [n for n in names if n not in rest and (not around or n.startswith(f"{around}."))]
        held = [each for each in inside if each in modules and own_tensors(modules[each])]
        if held:
            more = "" if len(held) == 1 else f" and {plural(len(held) - 1, 'more layer')}"
            yield Kind("missing_layer", f"only {side} has {held[0]!r}{more}")


def other_order(a: Recording, b: Recording, matching: Matching, layer: str) -> Iterator[Kind]:
    """Yield which layers, inside the one that differs, run in another order.

    Args:
        a: One side.
        b: The other.
        matching: Which layers are partners.
        layer: The layer of a that differs.
    """
    # A layer that is never called may still have a gradient of its parameters.
    ours, theirs = (dict.fromkeys(p.layer for p in side.places(FORWARD)) for side in (a, b))
    order = {each: at for at, each in enumerate(theirs)}
    inside = [each for each in ours if not layer or each.startswith(f"{layer}.")]
    known = [each for each in inside if matching.pairs.get(each) in order]
    for one, two in itertools.pairwise(known):
        if order[matching.pairs[one]] > order[matching.pairs[two]]:
            yield Kind("order", f"{one!r} runs before {two!r} in a, and after it in b")
            return


def alone_before(
    a: Recording, b: Recording, matching: Matching, place: RecordedPlace, layer: str
) -> Iterator[Kind]:
    """Yield which layers only one side runs just before the first difference: a likely cause.

    Args:
        a: One side.
        b: The other.
        matching: Which layers are partners.
        place: The tensor of a that is the first to differ.
        layer: The layer of a that the difference comes from.
    """
    back = {other: one for one, other in matching.pairs.items()}
    theirs, around_b = (matching.pairs.get(each, each) for each in (place.layer, layer))
    doubtful = bool(matching.doubt) and layer != place.layer

    for only, side, other, names, seen, around in (
        ("a", a, b, matching.pairs, place.layer, layer), ("b", b, a, back, theirs, around_b),
    ):  # fmt: skip
        calls = [(each.layer, each.call) for each in side.places(FORWARD)]
        before = calls[: calls.index((seen, place.call))] if (seen, place.call) in calls else []
        found: list[str] = []
        for each, call in reversed(before):
            name = names.get(each, each)
            calls_of_other = other.inspection[name].calls if name in other.inspection else None
            uncalled = calls_of_other is not None and call >= len(calls_of_other)
            if not (uncalled or (doubtful and each not in names)):
                break
            found.append(each)
        if seen == around:
            found = [each for each in found if not around or each.startswith(f"{around}.")]
        if found:
            text = f"just before it only {only} runs {listed(list(dict.fromkeys(found[::-1])))}"
            yield Kind("unmatched_layers", text)


def _are_few(pairs: Mapping[str, str], a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether less than half of the smaller side has a partner."""
    return 2 * len(pairs) < min(len(a), len(b))


def _doubt(pairs: Mapping[str, str], how: str) -> str:
    one, other = next(iter(pairs.items()))
    return f"{plural(len(pairs), 'layer')} matched {how}, such as {one!r} with {other!r}"


def _given(names: Mapping[str, str], a: Sequence[str], b: Sequence[str]) -> dict[str, str]:
    for side, known, wanted in (("a", a, names.keys()), ("b", b, names.values())):
        absent = [each for each in wanted if each not in known]
        if absent:
            said = f"{{{absent[0]!r}: ...}}" if side == "a" else f"{{...: {absent[0]!r}}}"
            raise InspectionError(
                f"names={said}: {side} has no such layer, only {listed(known)}. "
                "Map layers of a to layers of b."
            )
    twice = [each for each, count in Counter(names.values()).items() if count > 1]
    if twice:
        ours = [each for each, other in names.items() if other == twice[0]]
        raise InspectionError(
            f"names= maps {listed(ours)} of a to {twice[0]!r} of b. Map each to a layer of its own."
        )
    return dict(names)


def _without(layers: Iterable[str], taken: Iterable[str]) -> list[str]:
    known = set(taken)
    return [each for each in layers if each not in known]


def _by_ending(a: Sequence[str], b: Sequence[str]) -> dict[str, str]:
    """Return pairs of layers where one name ends with the whole other name, if only one does."""
    found: dict[str, str] = {}
    last: dict[str, tuple[list[str], list[str]]] = {}
    for side, layers in enumerate((a, b)):
        for each in filter(None, layers):
            last.setdefault(each.rpartition(".")[2], ([], []))[side].append(each)
    for ours, theirs in last.values():
        for one in ours:
            fits = [each for each in theirs if _ends(one, each)]
            if len(fits) == 1 and sum(_ends(each, fits[0]) for each in ours) == 1:
                found[one] = fits[0]
    return {one: found[one] for one in a if one in found}


def _ends(one: str, other: str) -> bool:
    return one.endswith(f".{other}") or other.endswith(f".{one}")


def _by_order(a: Recording, b: Recording, rest_a: Sequence[str], rest_b: Sequence[str]) -> Any:
    """Return pairs of layers that run in the same order and return the same shapes."""
    if rest_b and all(each.startswith(f"{EXPORTED}.") for each in rest_b):
        return _blocks(rest_a, rest_b)
    shapes_a, shapes_b = (
        [_shapes(side, each) for each in rest] for side, rest in ((a, rest_a), (b, rest_b))
    )
    blocks = SequenceMatcher(None, shapes_a, shapes_b, autojunk=False).get_matching_blocks()
    return {
        rest_a[block.a + index]: rest_b[block.b + index]
        for block in blocks
        for index in range(block.size)
    }


def _blocks(a: Sequence[str], b: Sequence[str]) -> dict[str, str]:
    """The numbered blocks of a model with hidden states that have no names.

    Raises:
        InspectionError: There are more or fewer blocks.
    """
    blocks = [each for each in a if each.rpartition(".")[2].isdigit()]
    if len(blocks) != len(b):
        raise InspectionError(
            f"b holds the hidden states of {len(b)} layers without names, and a has {len(blocks)} "
            "blocks. Say which they are: import_hidden_states(folder, tokenizer, layers=[...])."
        )
    return dict(zip(blocks, b, strict=True))


def _shapes(side: Recording, layer: str) -> tuple[Any, ...]:
    """Return the number of units of each tensor a layer returns; rows depend on padding."""
    record = side.inspection[layer]
    values = record.calls[0].values("activations") if record.calls else []
    return tuple(value.shape[-1:] for value in values if value is not None)
