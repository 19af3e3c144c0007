"""A still picture of a board, for whoever cannot run the page, without any further package.

The widget puts it into a notebook: as PNG, and as SVG with the names of its rows and columns around
it. It is made of the coarsest tile with the scales of the page, so its colours are those that the
page begins with.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from torchfmri._text import printable
from torchfmri._viewer.board import LAYERS, Board
from torchfmri._viewer.desk import Desk
from torchfmri._viewer.tiles import FEW, NOT_MEASURED, STEPS, ZERO, Plane

_WIDTH, _HEIGHT = 960, 480
"""Pixels at most, as far as every cell has one."""
_LEFT, _BELOW, _LINE, _COLUMN = 190, 80, 12, 10
"""Pixels for the names of rows and columns, and of a line of text, level and turned."""
_MOST_ROWS = 48
"""The most rows of a picture. With more layers, it draws blocks and what is outside of them."""
_LONGEST = 28
_GREY = (200, 202, 206)
_VIRIDIS = "4401544820713e4a8a31688e26838e1f9d8a36b77874d055b5de2bfde725"
_VIK = "0012610443811d6f9e6da4c2dee6e9e1b79fc57742a03c0f590008"


def still(board: Board) -> bytes:
    """Return a PNG of the first metric of the first sequence: columns across, layers down."""
    plane = _plane(board)
    codes = np.frombuffer(plane.tile(plane.levels - 1, 0), np.uint8)
    shown = shown_rows(board.layers)
    codes = codes.reshape(plane.rows, -1)[shown] if codes.size else np.zeros((1, 1), np.uint8)
    scale = plane.scale[shown, None].astype(np.float64)
    span = np.arcsinh(plane.limit[shown, None].astype(np.float64) / scale)
    values = scale * np.sinh((codes.astype(float) - ZERO) / STEPS * span)
    tops = np.where(plane.tops > 0, plane.tops, 1.0)[shown, None]
    if plane.signed:
        shares = 0.5 + values / tops / 2
    elif plane.logarithmic:
        shares = 1 + np.log10(np.maximum(values / tops, 1e-30)) / 2
    else:
        lows = plane.lows[shown, None]
        shares = (values - lows) / (tops - lows)
    table = _colours(_VIK if plane.signed else _VIRIDIS)
    pixels = table[np.rint(255 * np.clip(shares, 0, 1)).astype(int)]
    pixels[codes <= NOT_MEASURED] = _GREY
    rows, columns = codes.shape
    pixels = pixels.repeat(max(1, _HEIGHT // rows), 0).repeat(max(1, _WIDTH // columns), 1)
    return _png(pixels)


def shown_rows(layers: Sequence[str]) -> list[int]:
    """Return the places of the layers that have a row in the picture."""
    names = [name.split(".") for name in layers]
    inside = [next((at for at, each in enumerate(n) if each.isdigit()), len(n)) for n in names]
    found = [row for row, name in enumerate(names) if inside[row] >= len(name) - 1]
    blocks = any(inside[row] == len(names[row]) - 1 for row in found)
    return found if blocks and len(layers) > _MOST_ROWS else list(range(len(layers)))


def labelled(board: Board, picture: bytes) -> bytes:
    """Return the picture with the names of its rows and columns, as SVG."""
    wide, high = struct.unpack(">II", picture[16:24])  # where a PNG has its size
    names = [board.layers[row] for row in shown_rows(board.layers)]
    rows, columns = len(names), board.length(0)
    texts = []

    def write(x: float, y: float, text: str, place: str) -> None:
        short = text if len(text) <= _LONGEST else "…" + text[1 - _LONGEST :]
        texts.append(f'<text x="{x:.1f}" y="{y:.1f}" {place}>{escape(printable(short))}</text>')

    step = max(1, -(-_LINE * rows // high))
    for row in range(0, rows, step):
        y = (row + 0.5) * high / rows + 4
        write(_LEFT - 6, y, names[row] or "model", 'text-anchor="end"')
    step = max(1, -(-_COLUMN * columns // wide))
    spelt = board.axis != "token" or step == 1  # between tokens that are left out texts say nothing
    for column in range(0, columns, step):
        x, y = _LEFT + (column + 0.5) * wide / columns + 4, high + 6
        text = board.columns(0, column, column + 1)["pieces"][0].strip()
        turned = f'text-anchor="end" transform="rotate(-90 {x:.1f} {y})"'
        write(x, y, text[: _LONGEST // 2] if spelt else f"{column:,}", turned)
    size = f'width="{_LEFT + wide}" height="{high + _BELOW}"'
    data = base64.b64encode(picture).decode("ascii")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">'
        f'<rect {size} fill="#fff"/><image x="{_LEFT}" width="{wide}" height="{high}" '
        f'href="data:image/png;base64,{data}"/>{"".join(texts)}</svg>'
    ).encode()


def top_words(board: Board) -> str:
    """Return what the brightest colour of a row stands for."""
    plane = _plane(board)
    values = plane.columns - int((plane.missing + plane.nonfinite).min(initial=plane.columns))
    if values < FEW:
        return "its largest value"
    return "its second largest value" if values <= 201 else "its 99.5th percentile"


def _plane(board: Board) -> Plane:
    """Return the first metric of the first sequence."""
    metric = next(each for each in board.metrics(0) if each.shown)
    return Desk(board).plane(0, metric.name, LAYERS)[0]


def _colours(stops: str) -> NDArray[np.uint8]:
    """Return 256 colours between stops, (256, 3)."""
    known = np.frombuffer(bytes.fromhex(stops), np.uint8).reshape(-1, 3)
    at = np.linspace(0, len(known) - 1, 256)
    parts = [np.interp(at, np.arange(len(known)), known[:, each]) for each in range(3)]
    return np.stack(parts, 1).round().astype(np.uint8)


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels (y, x, 3) as a file."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # the first byte of a line: no filter
    lines[:, 1:] = pixels.reshape(height, -1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(lines.tobytes(), 6))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")
