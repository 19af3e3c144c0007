"""One open page: it watches planes of a sequence and is told what is added to them.

Made by the site for each web socket. No column may be left out: what a page has is counted in
`_sent`, which begins where the page says. The model that is watched has the first right to the
processor: looking and sending are limited to a share of it (`SHARE`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from torchfmri._viewer.board import TRACKS, Board
from torchfmri._viewer.desk import DeskQuestion, to_json
from torchfmri.exceptions import InspectionError

if TYPE_CHECKING:
    from torchfmri._viewer.site import Site

MOST_MESSAGE = 64 << 10
"""Bytes of a message."""
TICK = 0.05
"""Seconds between looks at whether a board has grown, at least."""
IDLE = 0.2
"""Seconds between looks where the last ones found nothing."""
SHARE, REST = 0.01, 0.5
"""How much of the processor time of this process looking and sending may take while columns come,
and the longest pause that follows: the model that a page watches needs the processor itself."""
FRAME_COLUMNS = 2048
"""Columns that are pushed at once."""
_QUICK = 1 << 16
"""Values that are coded faster than another thread could be asked to."""
_HEAD = struct.Struct("<IIII")
"""The header of a frame of columns: plane, version of the plane, first column, column count."""


class Client:
    """An open page.

    Args:
        site: Whose page it is.
        socket: Starlette's web socket.
    """

    def __init__(self, site: Site, socket: Any) -> None:
        self._site, self._socket = site, socket
        self._watched: dict[str, Any] | None = None
        self._sent = 0
        self._told: dict[str, Any] = {}
        self._lock = asyncio.Lock()
        # Only a board that reads files looks for what is new.
        self._looks = type(site.desk.board).refresh is not Board.refresh

    async def run(self) -> None:
        """Serve the page until it goes."""
        from starlette.websockets import WebSocketDisconnect

        await self._socket.accept()
        site = self._site
        site.clients.add(self)
        pushing = asyncio.create_task(self._push())
        try:
            await self.say({"type": "hello", "id": site.desk.board.id, "changes": site.changes})
            while True:
                text = await self._socket.receive_text()
                if len(text) > MOST_MESSAGE:
                    await self._socket.close(1009)
                    return
                self._take(json.loads(text))
        except (WebSocketDisconnect, RuntimeError, ValueError, KeyError, TypeError):
            with contextlib.suppress(Exception):
                await self._socket.close(1003)
        finally:
            site.clients.discard(self)
            pushing.cancel()

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] == "state" and isinstance(message["state"], dict):
            self._site.state = message["state"]
        elif message["type"] == "watch":
            self._sent = int(message["from"])
            self._watched = {
                "sequence": int(message["sequence"]),
                "metric": str(message["metric"]),
                "planes": [str(each) for each in message["planes"]][:64],
            }

    async def say(self, message: dict[str, Any]) -> None:
        """Send a message."""
        await self._send(lambda: self._socket.send_text(to_json(message)))

    async def _send(self, act: Callable[[], Awaitable[None]]) -> None:
        async with self._lock:
            with contextlib.suppress(Exception):  # it has gone; `run` notices
                await act()

    async def _push(self) -> None:
        """Look again and again whether something is new, and send it.

        A slow client gets larger pieces less often, and so does every client of a busy machine:
        what was not sent yet stays in the board.
        """
        board, pause, took = self._site.desk.board, TICK, 0.0
        while True:
            await self._rest(pause, took)
            started, sent = time.thread_time(), self._sent
            if self._looks and await asyncio.to_thread(board.refresh):
                self._site.changed()
            told = {"type": "doing", "going": board.going, **board.doing()}
            if told != self._told:
                self._told = told
                await self.say(told)
            if self._watched is not None:
                await self._push_columns(self._watched)
            # What other clients were served meanwhile counts as well: they share the processor.
            took = time.thread_time() - started
            pause = TICK if self._sent != sent else min(2 * pause, IDLE)
            if self._sent - sent >= FRAME_COLUMNS:
                took = 0.0  # there is more to send

    async def _rest(self, pause: float, took: float) -> None:
        """Wait, while columns come until a look that took so long is a small share of the work.

        Work is processor time: on a busy machine a second may bring no column at all.
        """
        board = self._site.desk.board
        began, worked = time.monotonic(), time.process_time()
        await asyncio.sleep(pause)
        while board.going and (time.process_time() - worked) * SHARE < took:
            if time.monotonic() - began >= REST:
                return
            await asyncio.sleep(pause)

    async def _push_columns(self, watched: dict[str, Any]) -> None:
        """Send the columns that a page does not have yet, a limited number at once."""
        board, sequence = self._site.desk.board, watched["sequence"]
        if sequence >= len(board.entries()):
            return
        length = board.length(sequence)
        first, last = self._sent, min(length, self._sent + FRAME_COLUMNS)
        if first >= last:
            return
        try:
            if (last - first) * len(board.layers) <= _QUICK:
                frames = self._frames(watched, first, last)
            else:
                frames = await asyncio.to_thread(self._frames, watched, first, last)
            columns = board.columns(sequence, first, last)
        except (DeskQuestion, LookupError, InspectionError):
            return  # the sequence has just been replaced; the next look finds it
        if watched is not self._watched:
            return  # the page has turned to something else meanwhile
        self._sent = last
        for frame in frames:
            await self._send(lambda frame=frame: self._socket.send_bytes(frame))  # type: ignore[misc]
        told = {"type": "columns", "sequence": sequence, "first": first, "length": last}
        told["tops"] = self._site.desk.plane(sequence, TRACKS, TRACKS)[0].tops.tolist()
        if board.kind == "run":
            told["headline"] = board.headline(sequence)
        await self.say({**told, **columns})

    def _frames(self, watched: dict[str, Any], first: int, last: int) -> list[bytes]:
        desk, found = self._site.desk, []
        for number, name in enumerate(watched["planes"]):
            metric = TRACKS if name == TRACKS else watched["metric"]
            plane, version = desk.plane(watched["sequence"], metric, name)
            codes = plane.coded(first, last)
            found.append(_HEAD.pack(number, version, first, last - first) + codes.tobytes())
        return found
