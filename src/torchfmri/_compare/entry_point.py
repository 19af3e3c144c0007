"""`torchfmri.compare`: find where two runs part, and whether that is rounding.

Users and `torchfmri compare` call `compare`; histories go on to `histories`, everything else
becomes two `Side`s. The order of the steps matters. The two sides first agree on what counts as a
token, because noise is measured on these rows; then each side is run again for its noise; then
layers are matched, tensors are paired, and the first pair that differs is explained. Only the first
direction that differs gets an origin and kinds: what comes after a difference follows from it. The
signature of `compare` is public.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from torchfmri._arguments import check_real, require
from torchfmri._compare.changes import changes_of
from torchfmri._compare.comparison import Comparison, nonfinite_note
from torchfmri._compare.difference import Difference, Kind, Pair
from torchfmri._compare.explanation import explain
from torchfmri._compare.grid import PositionGrid
from torchfmri._compare.histories import compare_histories, histories_of
from torchfmri._compare.matching import Matching, match_layers
from torchfmri._compare.origin import Origin, origin_of
from torchfmri._compare.pairing import pair_up
from torchfmri._compare.recording import FORWARD, WHAT, relative
from torchfmri._compare.run import Run
from torchfmri._compare.side import Side, live_side, measure_spread, without_autocast
from torchfmri._compare.sources import opened, recorded_data, running, side_of
from torchfmri._compare.tokens_given import are_given_alike, check_tokens, token_texts
from torchfmri._model import Loss
from torchfmri._records import History
from torchfmri._text import apart, listed, plural
from torchfmri.exceptions import InspectionError


def compare(
    a: Any,
    b: Any,
    *,
    data: Any = None,
    target: Any = None,
    loss: Loss = None,
    names: Mapping[str, str] | None = None,
    tolerance: float | None = None,
    tokenizer: Any = None,
    max_bytes: int | None = None,
) -> Any:
    """Find where two runs part: the first layer, token and direction beyond the noise of both.

    Each side that can be run is run again: as it was, with the rows of its batch and the number of
    threads arranged otherwise, and with every layer rounding anew. What it then differs from
    itself, layer by layer, is its noise. A difference counts where it is 5 times as large as the
    noise of both sides.

    Args:
        a: The reference: a model (with `data`), a `Run`, an `Inspection` or several of the same
            run, a `Scan`, what `import_hidden_states` returned, or the path of a saved one. Two
            training runs: a `History`, a `Monitor`, or the folder of one; or several of the same.
        b: The side to compare with it.
        data: What both models are called with; `Run` has its own.
        target: Handed to the loss as its second argument.
        loss: As for `Inspector.run_inspection`. Without one the backward pass is not compared.
        names: Layer of a -> layer of b, where they are called differently.
        tolerance: The relative difference to allow instead of measuring noise; 0 asks for equal
            values. For training runs it is that of their statistics.
        tokenizer: To write tokens as texts.
        max_bytes: The most bytes of tensors to keep of one pass; beyond it an error is raised.

    Returns:
        A `Comparison`; a `HistoryComparison` of two training runs.

    Raises:
        InspectionError: A side cannot be compared, or the two have nothing in common. An error of
            a model passes through, with a note that names the side.
    """
    if tolerance is not None:
        check_real(
            "tolerance", tolerance, "give a relative difference of at least 0, such as 1e-5", 0.0
        )
    mapped = names is None or (
        isinstance(names, Mapping)
        and all(isinstance(each, str) for pair in names.items() for each in pair)
    )
    require(mapped, "names", names, "map layers of a to layers of b: {'layer in a': 'layer in b'}")
    a, b = opened(a), opened(b)
    runs = [histories_of(each) for each in (a, b)]
    if any(runs):
        _refuse(data=data, target=target, loss=loss, names=names, max_bytes=max_bytes)
        first, second = _both_histories(runs, (a, b))
        return compare_histories(first, second, tolerance)
    a, b = _with_data(a, b, data, target, loss), _with_data(b, a, data, target, loss)
    with running("a", a):
        one = side_of(a, "a", max_bytes)
    with running("b", b):
        two = side_of(b, "b", max_bytes)
    if "rms" in (one.recording.reduced, two.recording.reduced):
        for side in (one, two):
            side.recording.reduced = "rms"
    if are_given_alike(one, two):
        two.recording.grids = list(one.recording.grids)
    for side, other in ((one, two), (two, one)):
        if not side.recording.grids:  # made of the same data, or nothing can be compared
            side.recording.grids = list(other.recording.grids)
        if not side.recording.batch:  # a recording does not say how many rows there were
            side.recording.batch = other.recording.batch
    check_tokens(one, two, tokenizer)
    _note_dropout(one, two)
    if tolerance is None:
        _measure(one, two, max_bytes)
    found = _compared(one, two, names, tolerance, tokenizer)
    if found.first is not None and found.first.direction == FORWARD:
        _explain_autocast(found, one, two, names, tolerance, max_bytes)
    return found


def _refuse(**options: Any) -> None:
    """Raise an error if options of models were given with training runs."""
    for name, value in options.items():
        require(value is None, name, value, "training runs are compared as they are; leave it out")


def _both_histories(runs: list[list[History]], given: tuple[Any, Any]) -> list[list[History]]:
    for name, found, each in zip("ab", runs, given, strict=True):
        if not found:
            raise InspectionError(
                f"{name} is a {type(each).__name__}, and the other side is a training run. Give "
                "two training runs (History, Monitor or folder), or two runs of a model."
            )
    return runs


def _with_data(side: Any, other: Any, data: Any, target: Any, loss: Loss) -> Any:
    """Make a run of a model: on the data given, or on the tokens that the other side recorded."""
    if not isinstance(side, nn.Module):
        return side
    if data is None and isinstance(other, Run):
        data, target, loss = (
            other.data,
            other.target if target is None else target,
            loss or other.loss,
        )
    if data is None:
        data = recorded_data(other)
        _check_vocabulary(side, data)
    if data is None:
        raise InspectionError(
            f"data=None: compare needs what the {type(side).__name__} is called with. Give data=, "
            "or torchfmri.Run(model, data) as the side."
        )
    return Run(side, data, target, loss)


def _check_vocabulary(model: nn.Module, data: Any) -> None:
    """Raise an error if recorded tokens are not in the vocabulary of a model."""
    find = getattr(model, "get_input_embeddings", None)
    table = find() if callable(find) else None
    known = getattr(table, "num_embeddings", None)
    highest = int(data["input_ids"].max()) if data is not None and known is not None else -1
    if known is not None and highest >= known:
        raise InspectionError(
            f"The recording has token {highest:,}, and the {type(model).__name__} knows {known:,} "
            "tokens: another tokenizer made it. Record it again with the tokenizer of this model."
        )


def _drops_alone(side: Side, other: Side) -> bool:
    """Whether dropout is on in one of two live sides only: a mistake then, and no noise."""
    if side.run is None or other.run is None:
        return False
    return side.run.has_dropout and not other.run.has_dropout


def _note_dropout(one: Side, two: Side) -> None:
    for side, other in ((one, two), (two, one)):
        if side.run is None or not side.run.has_dropout:
            continue
        said = "its noise counts as this side's own spread and hides differences of that size"
        if _drops_alone(side, other):
            said = "on this side only, so it counts as a difference"
        side.notes.append(f"dropout is on: {said}. Call model.eval() for a sharp comparison")


def _measure(one: Side, two: Side, max_bytes: int | None) -> None:
    """Measure the noise of each side that can be run again."""
    for name, side, other in (("a", one, two), ("b", two, one)):
        if side.run is None:
            continue
        coarsest = other.coarsest if other.run is None else None
        with running(name, side.run):
            measure_spread(side, coarsest, max_bytes, redraw=not _drops_alone(side, other))
    if one.run is None and two.run is None and not (one.spread or two.spread):
        one.notes.append(
            "neither side can be run again, so its noise was not measured: what rounding usually "
            "amounts to in the dtype of each tensor was allowed"
        )


def _compared(
    one: Side, two: Side, names: Mapping[str, str] | None, tolerance: float | None, tokenizer: Any
) -> Comparison:
    matching = match_layers(one, two, names)
    pairs = pair_up(one, two, matching, tolerance)
    if not pairs:
        raise InspectionError(
            "There is nothing to compare: the layers in common have no tensors of one kind on both "
            "sides. Watch the same (activations, gradients) in both."
        )
    texts = token_texts(one, two, tokenizer)
    differences: dict[str, Difference] = {}
    for direction in WHAT:
        if any(pair.direction == direction and pair.differs for pair in pairs):
            # What comes after a difference follows from it: its own origin would mislead.
            follows = bool(differences)
            found = _difference(direction, pairs, one, two, matching, texts, follows)
            differences[direction] = found
    notes = [matching.doubt] if matching.doubt else []
    if differences and (one.run is None or two.run is None):
        notes.append(_seen_note(next(iter(differences.values())).layer, matching))
    for name, side in (("a", one), ("b", two)):
        notes += [f"{name}: {note}" for note in dict.fromkeys(side.notes)]
    unknown = [pair.place.layer for pair in pairs if pair.threshold == math.inf]
    if unknown:
        notes.append(
            f"{plural(len(unknown), 'tensor')} could not be judged, because noise was not measured "
            f"there: of {listed(list(dict.fromkeys(unknown)))}"
        )
    for kind in ("NaN", "infinite"):
        if several := [pair for pair in pairs if pair.nonfinite == kind]:
            notes.append(f"{nonfinite_note(several)}: those values could not be compared")
    if not differences and one.run is not None and two.run is not None:
        notes += _padded_notes(pairs, one, two)
    changes = changes_of(one.run, two.run, matching.pairs)
    return Comparison(
        pairs=pairs, differences=differences, matching=matching, changes=changes, notes=notes,
        tokens=texts, tolerance=tolerance,
    )  # fmt: skip


def _difference(
    direction: str, pairs: Sequence[Pair], one: Side, two: Side, matching: Matching,
    texts: Sequence[str], follows: bool,
) -> Difference:  # fmt: skip
    own = [pair for pair in pairs if pair.direction == direction]
    at, pair = next((at, pair) for at, pair in enumerate(own) if pair.differs)
    origin = Origin(pair.place.layer)
    if not follows:
        origin = origin_of(pair, own, one, two, dict(matching.pairs))
    layer = origin.layer
    # A tensor without tokens (of experts, of another shape) is followed by one that has them. A
    # scalar such as the loss has no part that belongs to a token.
    value = one.recording.value(pair.place)
    later = own[at:] if value is None or value.shape else []
    told = next((each for each in later if each.differs and each.grid is not None), pair)
    index, place = _first_row(pair), _first_row(told)
    row, token = index if len(pair.gaps) == one.recording.batch > 1 else None, None
    if told.grid is not None:
        row, token = told.grid.places[place]
        if told.axes[:2] == (1, 0) and told.place in one.placed:
            row, token = token, row  # a has time first, and b has the batch
            place = told.grid.places.index((row, token))
    return Difference(
        direction=direction,
        layer=layer,
        seen_at=pair.place.layer,
        partner=matching.pairs.get(layer, layer),
        call=pair.place.call,
        what=pair.place.what,
        element=pair.place.element,
        row=row,
        token=token,
        text=texts[place] if told.grid is not None and _has_texts(told.grid, texts, one) else "",
        relative=float(pair.gaps[index]),
        largest=pair.largest,
        spread_a=pair.spread_a,
        spread_b=pair.spread_b,
        threshold=pair.threshold,
        compared=at,
        kinds=() if follows else explain(pair, origin, matching, one, two),
        reason=_reason(pair, own, float(pair.gaps[index]), one, two),
    )


def _seen_note(layer: str, matching: Matching) -> str:
    """Return what a recording does not tell about the layer that is named."""
    outer = [each for each in matching.pairs if each and layer.startswith(f"{each}.")]
    code = f"the code of {max(outer, key=len)!r}" if outer else "the code around it"
    return (
        f"with a recording a difference is named where it is seen, at {layer!r}: {code} may have "
        "made it. Two live models tell"
    )


def _has_texts(grid: PositionGrid, texts: Sequence[str], side: Side) -> bool:
    """Whether the texts are those of this grid; a second encoder has tokens of its own."""
    return len(texts) == len(grid) and grid is side.recording.grids[0]


def _reason(pair: Pair, own: Sequence[Pair], gap: float, one: Side, two: Side) -> str:
    """Return how the first tensor that differs does, in words.

    Args:
        pair: The first that differs.
        own: All of its direction.
        gap: The relative difference in its first row that differs.
        one: Side a.
        two: Side b.
    """
    reason = pair.reason or (
        f"{_numbers(pair, one, two)}relative difference {gap:.2e} "
        f"(allowed {pair.threshold:.1e}), largest absolute difference {pair.largest:.3e}"
    )
    if not pair.reason and gap == math.inf:
        reason = "some values are NaN or infinite on one side only"
    last = max(index for index, each in enumerate(own) if each.differs)
    # The loss may agree because it does not depend on what differs.
    # A layer of several tensors differs as long as one of them does.
    rest = [each for each in own[last + 1 :] if each.place[:2] != own[last].place[:2]]
    rest = rest if any(_has_axes(each, one) for each in rest) else []
    if pair.direction == FORWARD and rest:
        after = rest[0].place.layer
        reason += f". From the output of {listed([after])} on the two agree again"
    if pair.repeats:
        reason += (
            f". Noise alone explains up to {pair.noise:.1e}, but this difference comes back the "
            "same way when both sides round anew, so less is allowed"
        )
    return reason


def _has_axes(pair: Pair, one: Side) -> bool:
    """Whether a pair is more than one number."""
    value = one.recording.value(pair.place)
    return value is None or bool(value.shape)


def _numbers(pair: Pair, one: Side, two: Side) -> str:
    """Return the numbers of a pair that is one number, such as the loss, in words; else empty."""
    rows = one.recording.rows(pair.place), two.recording.rows(pair.partner or pair.place)
    values = [each.values for each in rows if each is not None]
    if len(values) < 2 or any(each.numel() != 1 for each in values):
        return ""
    a, b = apart(float(values[0]), float(values[1]), 6)
    return f"{a} in a and {b} in b, "


def _first_row(pair: Pair) -> int:
    """Return the first differing token: the earliest position in any row of the batch.

    In a tensor that differs a token counts too if its difference is within noise but repeats.
    """
    differing = np.flatnonzero(pair.counting).tolist()
    if pair.grid is None:
        return int(differing[0])
    places = pair.grid.places
    return min(differing, key=lambda index: (places[index][1], places[index][0]))


def _padded_notes(pairs: Sequence[Pair], one: Side, two: Side) -> list[str]:
    """Return a note if only padded positions differ."""
    for pair in pairs:
        if pair.partner is None or pair.grid is None:
            continue
        a, b = one.recording.padded(pair.place), two.recording.padded(pair.partner)
        if a is None or b is None or a.shape != b.shape:
            continue
        gap = float(relative(a, b).max())
        if gap > pair.threshold:
            where = f"first in {pair.place.layer!r} (by {gap:.1e})"
            return [f"only padded positions differ, {where}: no token sees them"]
    return []


def _explain_autocast(
    found: Comparison, one: Side, two: Side, names: Mapping[str, str] | None,
    tolerance: float | None, max_bytes: int | None,
) -> None:  # fmt: skip
    """Add the kind `autocast` if the two sides agree without autocast."""
    runs = (one.run, two.run)
    if None in runs or not any(run.autocast for run in runs if run is not None):
        return
    plain = [live_side(without_autocast(run), max_bytes) for run in runs if run is not None]
    if tolerance is None:
        _measure(plain[0], plain[1], max_bytes)
    if _compared(plain[0], plain[1], names, tolerance, None).agree:
        for direction, each in found.differences.items():
            kinds = (*each.kinds, Kind("autocast", "only under autocast: without it they agree"))
            found.differences[direction] = replace(each, kinds=kinds)
