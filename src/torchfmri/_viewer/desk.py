"""The desk: answers what a page asks, over whatever line the question comes.

A question is a name and parameters, an answer is bytes or plain data. The server, the widget and a
page in one file all put the same questions, so that they show the same.

Values are exact float32, tiles are one byte per value. A plane has a version, because bytes of one
coding mean nothing in another: whoever codes a plane anew must raise it.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from torchfmri._viewer.board import LAYERS, TRACKS, Board, Entry
from torchfmri._viewer.tiles import Plane, Table
from torchfmri.exceptions import InspectionError

CHUNK = 2048
"""Columns whose texts are sent at once."""
MOST_VALUES = 1 << 22
"""Values of one answer."""
LISTED = 200
"""Sequences of one answer."""
SHARED = 20
"""Characters from which a beginning that all texts share is left out."""
PLANES = 24
"""Planes that stay in memory."""
NOTHING = 0x7FC00001
"""The bits of the NaN that is sent where nothing was measured; `data.ts` knows it by them."""
HEADROOM = 4.0
"""A growing plane is coded for values up to so many times its largest."""

Answer = bytes | dict[str, Any]


class DeskQuestion(ValueError):  # noqa: N818 - it is what a page asked, not what went wrong here
    """A question that has no answer; its text says why."""


class Desk:
    """Answers questions about a board.

    Args:
        board: What is shown.
        version: Where the versions of planes begin. Servers begin anywhere, so that a page that
            finds another one at the same address does not mix its codes with those it has.
    """

    def __init__(self, board: Board, version: int = 0) -> None:
        self.board = board
        self._planes: OrderedDict[tuple[int, str, str], tuple[Plane, int]] = OrderedDict()
        self._lock = threading.RLock()
        self._dropped = version
        self._answers: dict[str, Callable[[Mapping[str, str]], Answer]] = {
            "board": self._board,
            "sequences": self._sequences,
            "sequence": self._sequence,
            "columns": self._columns,
            "plane": self._plane_header,
            "tile": self._tile,
            "values": self._values,
            "panels": self._panels,
        }

    def answer(self, name: str, given: Mapping[str, str]) -> Answer:
        """Return the answer to a question.

        Raises:
            DeskQuestion: There is no such question, sequence, metric, layer or tile.
        """
        if name not in self._answers:
            raise DeskQuestion(f"There is no question {name[:40]!r}: {', '.join(self._answers)}.")
        return self._answers[name](given)

    def warm(self) -> None:
        """Make what a page asks for first, so that it is there when the page comes."""
        with contextlib.suppress(DeskQuestion, InspectionError, IndexError):
            metric = next(iter(self.board.metrics(0))).name
            plane, _ = self.plane(0, metric, LAYERS)
            with self._lock:
                plane.tile(plane.levels - 1, 0)

    # -- questions ---------------------------------------------------------------------------

    def _board(self, given: Mapping[str, str]) -> Answer:
        board = self.board
        return {
            "id": board.id, "kind": board.kind, "axis": board.axis, "live": board.live,
            "going": board.going,
            "layers": list(board.layers), "types": list(board.types), "parts": list(board.parts),
            "sequences": len(board.entries()), "state": dict(board.start),
            "panels": type(board).panels_at is not Board.panels_at, **board.about(),
        }  # fmt: skip

    def _sequences(self, given: Mapping[str, str]) -> Answer:
        words = given.get("search", "").casefold().split()
        first = _number(given, "first", 0)
        entries = self.board.entries()
        chosen = _searched(entries, words)
        told = own_texts([each.text for each in entries])
        found = [
            {"index": index, **vars(each), "text": told[index]}
            for index, each in enumerate(entries)
            if chosen[index]
        ]
        return {"total": len(found), "found": list(islice(found, first, first + LISTED))}

    def _sequence(self, given: Mapping[str, str]) -> Answer:
        index = self._index(given)
        board = self.board
        entries = board.entries()
        entry = entries[index]
        overlay = board.overlay(index)
        return {
            **vars(entry),
            "text": own_texts([each.text for each in entries])[index],
            "columns": board.length(index),
            "overlay": None if overlay is None else vars(overlay),
            "live": board.live,
            "going": board.is_going(index),
            "voxels": list(board.voxels(index)),
            "opens": board.opens(index),
            "metrics": [vars(each) for each in board.metrics(index)],
            "tracks": [vars(each) for each in board.tracks(index)],
            "headline": board.headline(index),
            "health": [vars(each) for each in board.health(index)],
            "panels": [each.to_dict() for each in board.panels(index)],
        }

    def _columns(self, given: Mapping[str, str]) -> Answer:
        index, chunk = self._index(given), _number(given, "chunk", 0)
        return self.board.columns(index, chunk * CHUNK, (chunk + 1) * CHUNK)

    def _plane_header(self, given: Mapping[str, str]) -> Answer:
        plane, version = self.plane(*self._place(given))
        names = self.board.names(given.get("plane", LAYERS))
        return {**plane.header(), "version": version, "names": list(names)}

    def _tile(self, given: Mapping[str, str]) -> Answer:
        plane, _ = self.plane(*self._place(given))
        try:
            level, x = _number(given, "level", 0), _number(given, "x", 0)
            with self._lock:
                return plane.tile(level, x, mean=given.get("pool") == "mean")
        except IndexError as error:
            raise DeskQuestion(f"There is no {error}.") from error

    def _panels(self, given: Mapping[str, str]) -> Answer:
        index, column = self._index(given), _number(given, "column", 0)
        if column >= self.board.length(index):
            raise DeskQuestion(f"There is no {self.board.axis} {column}.")
        found = self.board.panels_at(index, given.get("row", ""), column)
        return {"panels": [each.to_dict() for each in found]}

    def _values(self, given: Mapping[str, str]) -> Answer:
        place = self._place(given)
        table = self.table(*place)
        rows = slice(None)
        if "row" in given:
            row = _number(given, "row", 0)
            if not 0 <= row < table.shape[1]:
                raise DeskQuestion(f"There is no row {row}: there are {table.shape[1]}.")
            rows = slice(row, row + 1)
        taken = slice(_number(given, "first", 0), _number(given, "last", len(table))), rows
        part = table[taken]
        if part.size > MOST_VALUES:
            raise DeskQuestion(
                f"These are {part.size:,} values; {MOST_VALUES:,} are sent at once. Zoom in."
            )
        sent = np.array(part.T, "<f4", order="C")
        odd = ~np.isfinite(sent)
        if odd.any():
            sent[np.isnan(sent)] = np.nan  # a model may compute any of the many NaNs
            missing = self.board.missing(*place)
            if missing is not None:
                lost = np.broadcast_to(missing[: max(1, len(table))], table.shape)[taken].T
                sent.view("<u4")[odd & lost] = NOTHING
        return sent.tobytes()

    # -- planes ------------------------------------------------------------------------------

    def table(self, sequence: int, metric: str, name: str) -> Table:
        """Return the values of a plane as they are now, (column, row)."""
        try:
            return self.board.values(sequence, metric, name)
        except (KeyError, LookupError, ValueError) as error:
            what = error.args[0] if error.args else error
            raise DeskQuestion(f"There is no {metric!r} of {name!r}: {what}") from error

    def plane(self, sequence: int, metric: str, name: str) -> tuple[Plane, int]:
        """Return the plane of a table and its version, coded anew if the table has outgrown it."""
        key = (sequence, metric, name)
        with self._lock:
            known, version = self._planes.get(key, (None, self._dropped))
            length = self.board.length(sequence)
            if known is None or length != known.columns:
                table = self.table(sequence, metric, name)
                missing = self.board.missing(sequence, metric, name)
                many, least = self.board.growth
                most = 0 if known is None else max(many * known.coded_columns, least)
                if known is not None and len(table) <= most and known.fits(table[known.columns :]):
                    known = known.longer(table, missing)
                else:
                    known = Plane(
                        table, metric, missing=missing, bars=name == TRACKS,
                        signed=self._signed(sequence, metric) and name != TRACKS,
                        headroom=HEADROOM if self.board.live else 1.0,
                    )  # fmt: skip
                    version += 1
                self._planes[key] = (known, version)
            self._planes.move_to_end(key)
            while len(self._planes) > PLANES:
                _, (_, old) = self._planes.popitem(last=False)
                self._dropped = max(self._dropped, old)
            return known, version

    def drop(self) -> None:
        """Forget what is kept: the board shows something else now."""
        with self._lock:
            self._dropped = 1 + max([self._dropped, *(each for _, each in self._planes.values())])
            self._planes.clear()

    def _signed(self, sequence: int, metric: str) -> bool:
        return any(each.signed for each in self.board.metrics(sequence) if each.name == metric)

    # -- parameters --------------------------------------------------------------------------

    def _index(self, given: Mapping[str, str]) -> int:
        index, count = _number(given, "sequence", 0), len(self.board.entries())
        if not 0 <= index < count:
            raise DeskQuestion(f"There is no sequence {index}: there are {count}.")
        return index

    def _place(self, given: Mapping[str, str]) -> tuple[int, str, str]:
        index, plane = self._index(given), given.get("plane", LAYERS)
        if plane == TRACKS:
            return index, TRACKS, TRACKS
        known = [each.name for each in self.board.metrics(index)]
        metric = given.get("metric") or (known[0] if known else "")
        if metric not in known:
            raise DeskQuestion(f"There is no metric {metric[:40]!r}: {', '.join(known) or 'none'}.")
        return index, metric, plane


def own_texts(texts: list[str]) -> list[str]:
    """Return the texts without the words that all begin with, such as a system prompt.

    Examples:
        >>> rule = "You are a helpful assistant."
        >>> own_texts([f"{rule} Why is it blue?", f"{rule} What is it?"])
        ['… Why is it blue?', '… What is it?']
        >>> own_texts(["Why?", "What?"])
        ['Why?', 'What?']
    """
    if len(texts) < 2:
        return texts
    low, high = min(texts), max(texts)  # what these share, all between them share
    same = next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    start = low.rfind(" ", 0, same) + 1
    if start < SHARED or any(len(each) <= start for each in texts):
        return texts
    return [f"… {each[start:]}" for each in texts]


def _searched(entries: Sequence[Entry], words: list[str]) -> list[bool]:
    """Return which entries have the words one after the other; if none has, all of them.

    What is looked at is what the list shows. A name counts as far as somebody types it: one that a
    scan gives by itself has a number and a hash, in which any digit occurs somewhere.
    """
    phrase = " ".join(words)
    texts = [f"{each.text or each.name} {each.condition}".casefold() for each in entries]
    exact = [
        phrase in text or each.name.casefold().startswith(phrase)
        for each, text in zip(entries, texts, strict=True)
    ]
    return exact if any(exact) else [all(word in text for word in words) for text in texts]


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise DeskQuestion(f"{name}={text[:40]!r} is no number from 0 upwards.")
    return int(text)


def to_json(data: dict[str, Any]) -> str:
    """Return plain data as JSON, with null for what is not finite."""
    try:
        return _dump(data)
    except (
        ValueError
    ):  # NaN or infinity somewhere: rare, and looking for it takes ten times as long
        return _dump(_finite(data))


def _dump(data: Any) -> str:
    text = json.dumps(
        data, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain
    )
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a character, as "\\ud83d" in a file of JSON gives it
        return text.encode("utf-8", "replace").decode()
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no plain data")


def _finite(value: Any) -> Any:
    """Return plain data with None in place of what is not finite."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value
