"""A still picture of a board, for whoever cannot run the page: PNG without any further package.

The widget puts it into a notebook. It is made of the coarsest tile with the scales of the page, so
its colours are those that the page begins with.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from torchfmri._viewer.board import LAYERS, Board
from torchfmri._viewer.desk import Desk
from torchfmri._viewer.tiles import NOT_MEASURED, STEPS, ZERO

_WIDTH, _HEIGHT = 960, 480
"""Pixels at most, as far as every cell has one."""
_GREY = (200, 202, 206)
_VIRIDIS = "4401544820713e4a8a31688e26838e1f9d8a36b77874d055b5de2bfde725"
_VIK = "0012610443811d6f9e6da4c2dee6e9e1b79fc57742a03c0f590008"


def still(board: Board, sequence: int = 0) -> bytes:
    """A PNG of the first metric of a sequence: columns across, layers down, each row by itself."""
    desk = Desk(board)
    metric = next(each for each in board.metrics(sequence) if each.shown)
    plane, _ = desk.plane(sequence, metric.name, LAYERS)
    codes = np.frombuffer(plane.tile(plane.levels - 1, 0), np.uint8)
    codes = codes.reshape(plane.rows, -1) if codes.size else np.zeros((1, 1), np.uint8)
    scale = plane.scale[:, None].astype(np.float64)
    span = np.arcsinh(plane.limit[:, None].astype(np.float64) / scale)
    values = scale * np.sinh((codes.astype(float) - ZERO) / STEPS * span)
    tops = np.where(plane.tops > 0, plane.tops, 1.0)[:, None]
    if plane.signed:
        shares = 0.5 + values / tops / 2
    elif plane.logarithmic:
        shares = 1 + np.log10(np.maximum(values / tops, 1e-30)) / 2
    else:
        lows = plane.lows[:, None]
        shares = (values - lows) / (tops - lows)
    table = _colours(_VIK if plane.signed else _VIRIDIS)
    pixels = table[np.rint(255 * np.clip(shares, 0, 1)).astype(int)]
    pixels[codes <= NOT_MEASURED] = _GREY
    rows, columns = codes.shape
    pixels = pixels.repeat(max(1, _HEIGHT // rows), 0).repeat(max(1, _WIDTH // columns), 1)
    return _png(pixels)


def _colours(stops: str) -> NDArray[np.uint8]:
    """(256, 3) colours between stops."""
    known = np.frombuffer(bytes.fromhex(stops), np.uint8).reshape(-1, 3)
    at = np.linspace(0, len(known) - 1, 256)
    parts = [np.interp(at, np.arange(len(known)), known[:, each]) for each in range(3)]
    return np.stack(parts, 1).round().astype(np.uint8)


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """(y, x, 3) as a file."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # the first byte of a line: no filter
    lines[:, 1:] = pixels.reshape(height, -1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(lines.tobytes(), 6))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")
