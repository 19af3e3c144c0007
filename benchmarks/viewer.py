"""What looking costs: a scan with `--live` and a page that watches, against the same scan without.

The two take turns. Compared is the processor time of the scanning process with the server's
thread, which also holds on a machine that others use. The watching client is a process of its own
that reads every frame, as a browser does; what it draws is not counted. Also the sizes on the
wire and the time to the first tile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np

import torchfmri
from torchfmri import Anatomy, Scan, ScannedSequence, Scanner, ScanOptions, Tokens
from torchfmri._scan import TELL_EVERY, LiveBoard
from torchfmri._viewer import Desk, View

TOKEN = "0123456789abcdef"
CLIENT = """
import asyncio, json, sys, websockets

async def main():
    async with websockets.connect(sys.argv[1], max_size=None) as line:
        await line.recv()
        print("ready", flush=True)
        total = frames = 0
        while True:
            got = await line.recv()
            if isinstance(got, bytes):
                total, frames = total + len(got), frames + 1
            elif json.loads(got)["type"] == "board":
                watched = {"metric": "activation", "planes": ["layers", "tracks"]}
                await line.send(json.dumps({"type": "watch", "sequence": 0, "from": 0, **watched}))

asyncio.run(main())
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)


def main(options: argparse.Namespace) -> dict[str, Any]:
    named = torchfmri.load_model(options.model)
    scanner = Scanner(named.model, named.tokenizer, ScanOptions(per="position"))
    prompt, generate = "Once upon a time", {"do_sample": False, "min_new_tokens": options.tokens}
    anatomy, meta = scanner.describe(prompt, options.tokens)
    counts: dict[str, int] = {}

    def plain() -> float:
        started = time.process_time()
        counts["plain"] = len(scanner.scan(prompt, options.tokens, generate=generate)[0])
        return time.process_time() - started

    def live() -> float:
        board = LiveBoard(anatomy, meta)
        with View(board, token=TOKEN) as view:
            board.changed = view.changed
            line = f"ws://127.0.0.1:{view.port}/{TOKEN}/live"
            client = subprocess.Popen(
                [sys.executable, "-c", CLIENT, line], stdout=subprocess.PIPE, text=True
            )
            assert client.stdout is not None
            client.stdout.readline()
            try:
                started = time.process_time()
                board.begin("live")
                scan = scanner.scan(
                    prompt, options.tokens, on_token=board.on_token, tell_every=TELL_EVERY,
                    generate=generate,
                )  # fmt: skip
                board.finish(scan)
                counts["live"] = len(scan[0])
                return time.process_time() - started
            finally:
                client.kill()
                client.wait()

    plain(), live()
    pairs = [(live(), plain()) for _ in range(options.rounds)]
    ratio = float(np.median([a / b for a, b in pairs]))
    return {
        "ratio": ratio,
        "live_seconds": float(np.median([a for a, _ in pairs])),
        "plain_seconds": float(np.median([b for _, b in pairs])),
        "live_tokens": counts["live"],
        "plain_tokens": counts["plain"],
        **_long(100_000, 300),
    }


def _long(tokens: int, layers: int) -> dict[str, float]:
    """The first tile of a long scan, and what a token takes on the wire."""
    random = np.random.default_rng(0)
    names = [f"layers.{at}" for at in range(layers)]
    anatomy = Anatomy.of_widths(names, ["Layer"] * layers, [4] * layers, [4] * layers)
    values = np.exp(random.standard_normal((tokens, layers), np.float32))
    some, no = np.ones(tokens, np.float32), np.zeros(tokens, bool)
    spelt = Tokens(np.arange(tokens), (b" x",) * tokens, some, some, no, no)
    sequence = ScannedSequence("long", spelt, {"activation": values}, {})
    desk = Desk(Scan(anatomy, [sequence], {})._board())
    place = {"sequence": "0", "metric": "activation", "plane": "layers"}
    started = time.perf_counter()
    header = desk.answer("plane", place)
    assert isinstance(header, dict)
    tile = desk.answer("tile", {**place, "level": str(header["levels"] - 1), "x": "0"})
    first = time.perf_counter() - started
    frame = desk.plane(0, "activation", "layers")[0].coded(0, 1).nbytes
    return {
        "first_tile_seconds": first,
        "first_tile_bytes": len(tile),
        "live_bytes_per_token": frame,
        "json_bytes_per_token": len(json.dumps(values[0].tolist())),
    }
