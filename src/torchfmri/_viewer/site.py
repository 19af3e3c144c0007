"""The site: what is answered to a request, and to whom.

Every address starts with a random token. The Host and the Origin of a request must be ours, so that
a page of another site that finds the port learns nothing. Questions are small and answered from
memory; a client that reads slowly is not waited for by anybody else.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Callable
from typing import Any

from torchfmri._viewer.client import Client
from torchfmri._viewer.desk import Desk, DeskQuestion, to_json
from torchfmri._viewer.page import bundle, served_page
from torchfmri.exceptions import InspectionError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_BODY = 64 << 10
"""Bytes of a question."""
MOST_CLIENTS = 32
Asked = Callable[[str], None]
_PORT = re.compile(r":\d+$")
"""Behind the name in a Host; browsers leave out that of HTTP itself."""
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Site:
    """The ASGI application of a view.

    Args:
        desk: Answers questions.
        token: What every address starts with.
        remote: Whether other machines may connect.
        on_prompt: Takes what is typed into the page; without it the page has no box.

    Attributes:
        desk: As given.
        token: As given.
        clients: The open pages.
        changes: How often the board was another: a page that connects late compares it.
        state: What the page shows.
        told: What Python asked for; a page opens with it.
    """

    def __init__(self, desk: Desk, token: str, *, remote: bool, on_prompt: Asked | None) -> None:
        self.desk, self.token = desk, token
        self._remote, self._on_prompt = remote, on_prompt
        self.clients: set[Client] = set()
        self.changes = 0
        self.state: dict[str, Any] = {}
        self.told: dict[str, Any] = {}
        self.loop: asyncio.AbstractEventLoop | None = None

    def changed(self) -> None:
        """Tell the pages that there are other sequences, metrics or findings now."""
        self.changes += 1
        self.desk.drop()
        self.tell({"type": "board"})

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message to every page, from any thread."""
        loop = self.loop
        if loop is None or loop.is_closed():
            return
        for client in tuple(self.clients):
            said = client.say(message)
            try:
                asyncio.run_coroutine_threadsafe(said, loop)
            except RuntimeError:  # the loop has just been closed
                said.close()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.websockets import WebSocket

        refused = self._refusal(scope)
        if scope["type"] == "websocket":
            socket = WebSocket(scope, receive, send)
            if refused or len(self.clients) >= MOST_CLIENTS or not scope["path"].endswith("/live"):
                await socket.close(1008)
                return
            await Client(self, socket).run()
            return
        if refused:
            status, text = refused
            response = Response(text, status, media_type="text/plain")
        else:
            response = await self._respond(Request(scope, receive))
        response.headers.update(_HEADERS)
        await response(scope, receive, send)

    def _refusal(self, scope: dict[str, Any]) -> tuple[int, str] | None:
        """Return the status and the reason if a request is refused, else None."""
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        name = _PORT.sub("", headers.get("host", "")).strip("[]")
        if not self._remote and name not in LOOPBACK:
            return 403, "This server answers to this machine's own names only."
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{headers.get('host', '')}":
            return 403, "This server answers its own page only."
        token = scope["path"].split("/")[1] if scope["path"].count("/") >= 2 else ""
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return 403, "The address is incomplete: open the one that torchfmri printed."
        return None

    async def _respond(self, request: Any) -> Any:
        from starlette.responses import HTMLResponse, JSONResponse, Response

        path = request.url.path.removeprefix(f"/{self.token}/")
        if request.method == "POST" and path == "prompt" and self._on_prompt is not None:
            return await self._take_prompt(request)
        if request.method not in ("GET", "HEAD"):
            return Response("Only GET.", 405)
        if path == "":
            about = self.desk.board.about()
            return HTMLResponse(served_page(f"{about['model']}: {self.desk.board.kind}"))
        if path == "viewer.js":
            return Response(bundle(), media_type="text/javascript")
        if len(request.url.query) > MOST_BODY:
            return Response("The question is too long.", 414)
        given, changes = dict(request.query_params), self.changes
        try:
            # While columns come, answers are small, and handing one to another thread takes longer
            # than making it: the model that is watched shares the processor.
            if self.desk.board.going:
                answer = self.desk.answer(path, given)
            else:
                answer = await asyncio.to_thread(self.desk.answer, path, given)
        except DeskQuestion as error:
            return JSONResponse({"error": str(error)}, 404)
        except InspectionError as error:  # a damaged file of the scan
            return JSONResponse({"error": str(error)}, 422)
        if isinstance(answer, bytes):
            stays = path == "tile" and not self.desk.board.live
            headers = {"cache-control": "private, max-age=3600" if stays else "no-store"}
            return Response(answer, media_type="application/octet-stream", headers=headers)
        if path == "board":
            asked = self._on_prompt is not None
            answer = {
                **answer,
                "prompts": asked,
                "state": {**answer["state"], **self.told},
                "changes": changes,
            }
        return Response(to_json(answer), media_type="application/json")

    async def _take_prompt(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY:
                most = f"it may have {MOST_BODY // 1024} kB"
                said = f"The prompt is too long: {most}. Nothing was asked."
                return JSONResponse({"error": said}, 413)
        try:
            text = json.loads(body)["prompt"]
            assert isinstance(text, str)
            assert self._on_prompt is not None
            self._on_prompt(text)
        except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
            return JSONResponse({"error": 'Send {"prompt": "..."}.'}, 400)
        except InspectionError as error:
            return JSONResponse({"error": str(error)}, 409)
        return JSONResponse({})
