"""What is not compared, and the notes that say why.

`pairing` calls these functions once all pairs are known, and gets the pairs that stay. Words may
change freely. Nothing may be left out without a note, and nothing that computed something: a pair
goes only if the output around it is compared, or if all that was computed from it agrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchfmri._compare.causes import own_tensors
from torchfmri._compare.difference import Pair
from torchfmri._compare.matching import Matching
from torchfmri._compare.recording import FORWARD, PARAMETERS
from torchfmri._compare.side import Side
from torchfmri._text import listed, plural


def note_left_out(a: Side, b: Side, left_out: Sequence[str]) -> None:
    """Say which tensors were not compared, and why."""
    for side in (a, b):
        if layers := sorted({layer for layer, _ in side.recording.left_out}):
            side.notes.append(
                "tensors of several calls that do not fit together were not compared: of "
                f"{listed([each or 'the model' for each in layers])}"
            )
    if left_out:
        a.notes.append(
            f"{plural(len(left_out), 'tensor')} not compared, because the two batches are laid out "
            "differently, and so are these (no token axis, or attention weights): of "
            f"{listed(list(dict.fromkeys(left_out)))}"
        )


def without_details(pairs: list[Pair], a: Side) -> list[Pair]:
    """Leave out tensors without tokens that have other shapes or calls, inside a module that has.

    Such as the rows of experts, which one implementation computes one by one and another at once.
    The output of the module around them is compared.
    """
    whole = {p.place.layer for p in pairs if p.direction == FORWARD and p.grid is not None}
    details = set()
    for pair in pairs:
        rows = a.recording.rows(pair.place) if a.recording.value(pair.place) is not None else None
        if (
            a.recording.grids
            and pair.direction == FORWARD
            and pair.is_structural
            and (rows is None or rows.grid is None)
        ):
            around = pair.place.layer
            while around and around not in whole:
                around = around.rpartition(".")[0]
            if around in whole and around != pair.place.layer:
                details.add(pair.place.layer)
    if details:
        a.notes.append(
            f"not compared, because the two compute it in other parts: {listed(sorted(details))}"
        )
    kept = (pair for pair in pairs if pair.place.layer not in details)
    return [*kept, *(p for p in pairs if p.place.layer in details and p.direction == PARAMETERS)]


def without_uncalled(pairs: list[Pair], a: Side, b: Side, matching: Matching) -> list[Pair]:
    """Leave out calls that only one side makes, if something is compared after them.

    A side may use the weights of a layer without calling it, and what it computes with them is
    compared further on.
    """
    last = {pair.direction: at for at, pair in enumerate(pairs) if pair.partner is not None}
    alone = ((a, matching.only_b), (b, matching.only_a))
    never = [{each for each in names if _has_uncalled(side, each)} for side, names in alone]
    fewer: list[set[str]] = [set(), set()]
    kept = []
    for at, pair in enumerate(pairs):
        ours, theirs = pair.place.layer, matching.pairs[pair.place.layer]
        sides = ((a, ours), (b, theirs))
        counts = [len(side.recording.inspection[layer].calls) for side, layer in sides]
        lacks = counts.index(min(counts))
        dropped = ours in never[lacks] | fewer[lacks]
        if (
            pair.direction == PARAMETERS
            or pair.partner is not None
            or pair.place.call < counts[lacks]
            or not (at < last.get(pair.direction, -1) or dropped)
            or (counts[lacks] and _ends_a_module(pair, pairs[at + 1 :]))
        ):
            kept.append(pair)
        else:
            (fewer if counts[lacks] else never)[lacks].add(ours)
    for side, layers, calls in zip((a, b), never, fewer, strict=True):
        if layers:
            side.notes.append(f"never calls {listed(sorted(layers))}: not compared")
        if calls:
            side.notes.append(
                f"calls {listed(sorted(calls))} less often than the other side: the calls that "
                "only one side makes were not compared"
            )
    return kept


def _ends_a_module(pair: Pair, later: Sequence[Pair]) -> bool:
    """Whether the next tensor of both sides differs and is that of a module around this one."""
    found = next((each for each in later if each.partner is not None), pair)
    around = found.place.layer
    inside = not around or pair.place.layer.startswith(f"{around}.")
    return inside and found.direction == pair.direction == FORWARD and found.differs


def _has_uncalled(side: Side, layer: str) -> bool:
    """Whether a side has a layer and does not call it."""
    inspection = side.recording.inspection
    return layer in inspection and not inspection[layer].calls


def without_positions(pairs: list[Pair], a: Side) -> list[Pair]:
    """Leave out tensors that only say where tokens stand, if all that is computed of them agrees.

    Such as the rotations of a model that counts padding as positions, and reads distances only.
    """
    apart = [pair for pair in pairs if pair.differs]
    layers = list(dict.fromkeys(pair.place.layer for pair in apart))
    bare = all(
        layer in a.modules and next(a.modules[layer].parameters(), None) is None for layer in layers
    )
    if not apart or not bare or any(pair.direction != FORWARD for pair in apart):
        return pairs
    a.notes.append(
        f"padding is counted as positions, so {listed(layers)} cannot be compared; all that is "
        "computed with it agrees"
    )
    return [pair for pair in pairs if pair not in apart]


def without_frozen(pairs: list[Pair], a: Side, b: Side, names: Mapping[str, str]) -> list[Pair]:
    """Leave out gradients that a side lacks because it does not train the parameter."""

    def is_frozen(pair: Pair) -> bool:
        layer, name = pair.place.layer, pair.place.element
        held = [own_tensors(side.modules[at]).get(name)
                for side, at in ((a, layer), (b, names[layer])) if at in side.modules]  # fmt: skip
        return any(each is not None and not each.requires_grad for each in held)

    frozen = [p for p in pairs if p.direction == PARAMETERS and not p.partner and is_frozen(p)]
    if frozen:
        layers = listed(list(dict.fromkeys(pair.place.layer for pair in frozen)))
        a.notes.append(
            f"the gradients of {plural(len(frozen), 'parameter')} were not compared, because only "
            f"one side trains them: of {layers}"
        )
    return [pair for pair in pairs if pair not in frozen]
