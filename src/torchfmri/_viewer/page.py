"""The page: HTML for the server, and as one file that carries its data with it.

The site serves `served_page`, `save_html` writes `whole_page`. Both have a policy
(Content-Security-Policy) that allows their own script by its hash and nothing from elsewhere.
Whatever is put into the file must not be able to end its script element: a token may be
"</script>".
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from torchfmri._viewer.board import LAYERS, TRACKS, Board
from torchfmri._viewer.desk import CHUNK, Desk, to_json
from torchfmri._viewer.tiles import Plane

VOXEL_BYTES = 10 << 20
"""Voxels are left out of a page in one file where they would take more."""
_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{title}</title>
</head>
<body style="margin:0">
<style>#viewer > p {{ visibility: hidden; animation: late 0s 3s forwards }}
@keyframes late {{ to {{ visibility: visible }} }}</style>
<main id="viewer"><p>{unopened}</p></main>
{content}
</body>
</html>
"""


_UNOPENED = (
    "This page draws its data with JavaScript. If nothing appears, scripts are switched off here, "
    "or a policy of the server that sent this page forbids them."
)
"""Stands in the page until the viewer draws over it: a policy may forbid scripts, and `noscript`
shows nothing then."""


def bundle() -> str:
    """Return the viewer as an ES module, built from `viewer/` in the repository."""
    return files("torchfmri._viewer").joinpath("static/viewer.js").read_text("utf-8")


def served_page(title: str) -> str:
    """Return the page that asks its server for everything."""
    start = (
        'import viewer from "./viewer.js";'
        'viewer.serve(document.getElementById("viewer"), location.pathname);'
    )
    content = f'<script type="module">{start}</script>'
    return _filled(title, content, start, "'self' ", "connect-src 'self'; ")


def whole_page(board: Board, sequence: int = 0) -> str:
    """Return the page of one sequence as one file that needs nothing else.

    Args:
        board: What is shown.
        sequence: Which of its sequences.
    """
    answers = dict(_answers(Desk(board), sequence))
    about = answers["board"]
    # The same scan gives the same file. Paths stay here: the copied Python names the file alone.
    path, about["id"] = about["id"], "page"
    about["python"] = about["python"].replace(repr(path), repr(Path(path).name))
    about["panels"] = False  # there would be one for every cell
    # Inside a script element "</script>" and "<!--" would end or hide what follows.
    data = json.dumps({"sequence": sequence, "answers": answers}, ensure_ascii=False)
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    # The names of the module's exports mean nothing in a script: it puts them on the window.
    code = bundle().replace("</script", "<\\/script").replace("<!--", "<\\!--")
    start = (
        'torchfmriViewer.open(document.getElementById("viewer"), document.getElementById("data"));'
    )
    script = f"{code}\n{start}"
    content = (
        f'<script id="data" type="application/json">{data}</script>\n'
        f'<script type="module">{script}</script>'
    )
    return _filled(f"{board.about()['model']}: {board.kind}", content, script)


def _filled(title: str, content: str, script: str, own: str = "", connect: str = "") -> str:
    """Return the page; its policy allows this script, and what else is said of its own server."""
    policy = (
        f"default-src 'none'; script-src {own}'{_hash(script)}'; style-src 'unsafe-inline'; "
        f"{connect}img-src {own}data: blob:; base-uri 'none'; form-action 'none'"
    )
    return _TEMPLATE.format(
        policy=escape(policy), title=escape(title), unopened=_UNOPENED, content=content
    )


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _answers(desk: Desk, sequence: int) -> Iterator[tuple[str, Any]]:
    """Yield every question that a page may put about a sequence, with its answer."""

    def put(name: str, **given: Any) -> tuple[str, Any]:
        texts = {key: str(value) for key, value in given.items()}
        key = name + ("?" + urlencode(sorted(texts.items())) if texts else "")
        answer = desk.answer(name, texts)
        if isinstance(answer, bytes):
            return key, base64.b64encode(answer).decode("ascii")
        return key, json.loads(to_json(answer))

    yield put("board")
    key, described = put("sequence", sequence=sequence)
    metrics = [each["name"] for each in described["metrics"]]
    planes = [LAYERS, *_voxel_planes(desk, sequence, metrics)]
    # What compares layers is computed when it is read: for voxels that is left to a server.
    signed = {each["name"] for each in described["metrics"] if each["signed"]}
    whole = described["voxels"] if len(planes) > 1 else []
    described["voxels"] = [each for each in whole if each not in signed]
    yield key, described
    for chunk in range(-(-described["columns"] // CHUNK)):
        yield put("columns", sequence=sequence, chunk=chunk)
    asked = [
        (metric, name) for metric in metrics for name in planes
        if name == LAYERS or metric in described["voxels"]
    ]  # fmt: skip
    for metric, name in [("tracks", TRACKS), *asked]:
        place = {"sequence": sequence, "metric": metric, "plane": name}
        yield put("plane", **place)
        plane: Plane = desk.plane(sequence, metric, name)[0]
        for level in range(plane.levels):
            for x in range(max(1, -(-plane.columns // (256 << level)))):
                yield put("tile", **place, level=level, x=x)
        yield put("values", **place)


def _voxel_planes(desk: Desk, sequence: int, metrics: list[str]) -> list[str]:
    """Return the layers whose voxels are part of the page: all of them, or none."""
    board = desk.board
    size = board.length(sequence) * sum(board.parts) * len(metrics) * 6
    if size > VOXEL_BYTES:
        return []
    return [layer for layer, count in zip(board.layers, board.parts, strict=True) if count > 1]
