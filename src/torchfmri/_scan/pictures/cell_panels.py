"""The viewer's panels about one cell: what its heads attended to, and what a lens reads there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._attention import HEAD_SCORES
from torchfmri._scan.record.readouts import LENS, PATTERN, find_readouts, readout_name
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._text import number_text
from torchfmri._viewer import Panel

_KEYS = 8
"""Tokens that a panel lists."""
_LIKELIEST = 3
_LARGEST = 96
"""Tokens up to which the whole pattern is drawn."""


def cell_panels(
    sequence: ScannedSequence,
    layer: str,
    part: tuple[int, int] | None,
    column: int,
    *,
    lens: list[str],
    spelling: Mapping[int, str],
) -> Iterator[Panel]:
    """The panels about a layer at a token, as far as the scan has read out what they show.

    Args:
        sequence: What was scanned.
        layer: The layer at the crosshair.
        part: Which of how many heads is at the crosshair; None for the whole layer.
        column: The token.
        lens: The rows of the lens; empty where there is none.
        spelling: Token id -> text, for the tokens that a lens names.
    """
    whole, scored = (_near(find_readouts(sequence, each), layer) for each in
                     (PATTERN, f"{PATTERN}_entropy"))  # fmt: skip
    if whole is not None:
        yield from _attended(sequence, *whole, part, column)
    elif scored is not None:
        yield _scores(sequence, scored[0], column)
    if lens and readout_name(LENS, "rank") in sequence.tensors:
        yield _lens(sequence, column, lens, spelling)


def _near(found: Mapping[str, NDArray[Any]], layer: str) -> tuple[str, NDArray[Any]] | None:
    """The attention that a layer is, is part of, or has inside as the only one."""
    above = [name for name in found if f"{layer}.".startswith(f"{name}.")]
    inside = [name for name in found if name.startswith(f"{layer}.")]
    chosen = above or (inside if len(inside) == 1 else [])
    return (chosen[0], found[chosen[0]]) if chosen else None


def _attended(
    sequence: ScannedSequence,
    layer: str,
    values: NDArray[Any],
    part: tuple[int, int] | None,
    column: int,
) -> Iterator[Panel]:
    s = len(sequence)
    pattern = np.asarray(values, np.float64).reshape(s, -1, s)  # (query, head, key)
    heads = pattern.shape[1]
    chosen, who = slice(None), f"mean of {heads} heads"
    if part is not None and heads % part[1] == 0:
        # Queries that share keys and values form a group: a voxel of those stands for all of it.
        group = heads // part[1]
        chosen = slice(part[0] * group, (part[0] + 1) * group)
        who = f"head {part[0]}" if group == 1 else f"heads {chosen.start} to {chosen.stop - 1}"
    shares = pattern[:, chosen].mean(1)
    pieces = sequence.tokens.pieces_of(0, s)
    keys = [int(key) for key in np.argsort(-np.nan_to_num(shares[column]))[:_KEYS]]
    keys = [key for key in keys if shares[column, key] > 0]
    data: dict[str, Any] = {
        "names": [f"{key} {pieces[key]}" for key in keys],
        "values": [float(shares[column, key]) for key in keys],
        "columns": keys,
    }
    yield Panel("attention", f"Attends to ({layer}, {who})", "bars", data)
    if s <= _LARGEST:
        matrix = {"rows": pieces, "columns": pieces, "values": shares.tolist(), "row": column}
        yield Panel("attention-pattern", f"Attention pattern, {who}", "matrix", matrix)


def _scores(sequence: ScannedSequence, layer: str, column: int) -> Panel:
    tables = {
        score: find_readouts(sequence, f"{PATTERN}_{score}").get(layer) for score in HEAD_SCORES
    }
    known = {score: table for score, table in tables.items() if table is not None}
    heads = next(iter(known.values())).shape[1]
    rows = [
        [f"head {head}", *(number_text(float(table[column, head])) for table in known.values())]
        for head in range(heads)
    ]
    data = {"columns": ["", *known], "rows": rows}
    return Panel("attention", f"Attention of {layer} here", "table", data)


def _lens(
    sequence: ScannedSequence, column: int, layers: list[str], spelling: Mapping[int, str]
) -> Panel:
    def read(part: str) -> NDArray[Any]:
        table = np.asarray(sequence.tensors[readout_name(LENS, part)])
        return np.asarray(table.reshape(len(sequence), len(layers), -1)[column])

    ranks, top, shares = read("rank")[:, 0], read("top"), read("top_probability")
    rows = [
        [
            name,
            int(rank) or None,
            ", ".join(
                f"{spelling.get(int(token), f'#{int(token)}').strip()} {share:.0%}"
                for token, share in zip(tokens[:_LIKELIEST], own[:_LIKELIEST], strict=True)
            ),
        ]
        for name, rank, tokens, own in zip(layers, ranks, top, shares, strict=True)
    ]
    # Nothing comes after the last token: a rank there is that of the token itself (masked models).
    ahead = 0 if sequence.tensors[readout_name(LENS, "rank")][-1, -1] else 1
    about, place = ("next", column + 1) if ahead else ("here", column)
    came = f" ({sequence.tokens.pieces_of(place, place + 1)[0].strip()!r})"
    rank = "rank" if place >= len(sequence) else f"rank of the {'next' if ahead else 'token'}{came}"
    data = {"columns": ["layer", rank, f"would say {about}"], "rows": rows}
    return Panel("lens", f"Lens: what each layer would say {about}", "table", data)
