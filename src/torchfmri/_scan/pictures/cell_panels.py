"""Make the viewer's panels about one cell: what its heads attended to, and what a lens reads there.

`ScanBoard.panels_at` calls `cell_panels` for the cell at the crosshair. Titles and numbers of rows
may change freely. The name and the kind of a `Panel` ("bars", "matrix", "table") and the keys of
its data are read by `viewer/src/panels.ts`: change both together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._attention import HEAD_SCORES
from torchfmri._scan.pictures.bands import without_prefix
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
    """Yield the panels about a layer at a token, for what the scan has read out.

    Args:
        sequence: What was scanned.
        layer: The layer at the crosshair.
        part: Which of how many heads is at the crosshair; None for the whole layer.
        column: The token.
        lens: The rows of the lens; empty where there is none.
        spelling: Token id -> text, for the tokens that a lens names.
    """
    whole = _near(find_readouts(sequence, PATTERN), layer)
    scored = _near(find_readouts(sequence, f"{PATTERN}_entropy"), layer)
    if whole is not None:
        yield from _attended(sequence, *whole, part, column)
    elif scored is not None:
        yield _scores(sequence, scored[0], column)
    if lens and readout_name(LENS, "rank") in sequence.tensors:
        yield _lens(sequence, column, lens, spelling)


class Spelling(dict[int, str]):
    """Token id -> text, of any token.

    Args:
        known: The tokens of a text.
        tokenizer: Spells all others.
    """

    def __init__(self, known: Mapping[int, str], tokenizer: Any) -> None:
        super().__init__(known)
        self._tokenizer = tokenizer

    def get(self, token: int, default: Any = None) -> Any:
        """Return the text of a token; what the text at hand does not have is decoded."""
        if token not in self:
            self[token] = self._tokenizer.decode([token])
        return self[token]


def _near(found: Mapping[str, NDArray[Any]], layer: str) -> tuple[str, NDArray[Any]] | None:
    """Return the attention that a layer is, is part of, or has inside as the only one."""
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
        [head, *(number_text(float(table[column, head])) for table in known.values())]
        for head in range(heads)
    ]
    data = {"columns": ["head", *known], "rows": rows}
    return Panel("attention", f"Attention of {layer} here", "table", data)


def _lens(
    sequence: ScannedSequence, column: int, layers: list[str], spelling: Mapping[int, str]
) -> Panel:
    def read(part: str) -> NDArray[Any]:
        table = np.asarray(sequence.tensors[readout_name(LENS, part)])
        return np.asarray(table.reshape(len(sequence), len(layers), -1)[column])

    # Nothing comes after the last token: a rank there is that of the token itself (masked models).
    is_ahead = not sequence.tensors[readout_name(LENS, "rank")][-1, -1]
    about, place = ("next", column + 1) if is_ahead else ("here", column)
    title = f"Lens: what each layer would say {about}"
    ranks, top, shares = read("rank")[:, 0], read("top"), read("top_probability")
    if not np.isfinite(shares).any():
        return Panel("lens", title, "text", {"text": "The lens did not read this token."})
    labels = without_prefix(layers)
    spelled = [
        ", ".join(
            f"{spelling.get(int(token), f'#{int(token)}').strip()} {share:.0%}"
            for token, share in zip(tokens[:_LIKELIEST], own[:_LIKELIEST], strict=True)
        )
        for tokens, own in zip(top, shares, strict=True)
    ]
    rows: list[list[Any]]
    names = [{"layer": name, "text": labels[name]} for name in layers]
    if place >= len(sequence):
        title += "; the text ends here, so there is no rank of what came"
        columns, rows = (
            ["layer", "would say"],
            [list(row) for row in zip(names, spelled, strict=True)],
        )
    else:
        came = sequence.tokens.pieces_of(place, place + 1)[0].strip()
        title += f", and the rank of {'what came' if is_ahead else 'the token'}, {came!r}"
        known = [int(rank) or None for rank in ranks]
        columns = ["layer", "rank", "would say"]
        rows = [[*row] for row in zip(names, known, spelled, strict=True)]
    return Panel("lens", title, "table", {"columns": columns, "rows": rows})
