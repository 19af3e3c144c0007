"""What looking costs: a scan with `--live` and a page that watches, against the same scan without.

The two take turns: plain, live, plain. Compared is processor time, which also holds on a machine
that others use: that of the scanning thread, and that of the whole process with the server's
thread. The two plain scans of a round beside each other say how much of a ratio is chance. The
page is a browser of its own (`--browser`), or a stand-in that asks and reads what the page does;
what it draws is not counted. Also the sizes on the wire and the time to the first tile; and of a
page in chromium, if it and playwright are there, the first paint of 100,000 tokens x 300 layers and
the processor time of its frames while it is swept from end to end. And the memory that every tile
of that scan adds to the server's process, and that the page holds after the sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import torchfmri
from torchfmri import Scanner, ScanOptions
from torchfmri._scan import TELL_EVERY, LiveBoard
from torchfmri._viewer import Desk, View

TESTS = Path(__file__).parent.parent / "tests" / "_viewer"
TOKEN = "0123456789abcdef"
CLIENT = """
import asyncio, json, sys, time, urllib.request, websockets

base = sys.argv[1]

def ask(question):
    with urllib.request.urlopen(base + question) as answer:
        return answer.read()

async def main():
    live = base.replace("http", "ws", 1) + "live"
    async with websockets.connect(live, max_size=None, origin=base.rsplit("/", 2)[0]) as line:
        await line.recv()
        print("ready", flush=True)
        looked, versions = 0, {}
        while True:
            got = await line.recv()
            if isinstance(got, bytes):
                plane, version = got[:4], got[4:8]
                if versions.get(plane) != version:  # coded anew: header and tile are asked again
                    versions[plane] = version
                    name = ("layers", "tracks")[int.from_bytes(plane, "little")]
                    for question in ("plane", "tile"):
                        await asyncio.to_thread(ask, f"{question}?sequence=0&plane={name}")
                if time.monotonic() - looked > 1:  # the details at the crosshair
                    looked = time.monotonic()
                    await asyncio.to_thread(ask, "values?row=0&sequence=0")
            elif json.loads(got)["type"] == "board":
                for question in ("board", "sequence?sequence=0", "columns?sequence=0"):
                    await asyncio.to_thread(ask, question)
                watched = {"metric": "activation", "planes": ["layers", "tracks"]}
                await line.send(json.dumps({"type": "watch", "sequence": 0, "from": 0, **watched}))

asyncio.run(main())
"""
BROWSER = (
    "--headless", "--no-sandbox", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--no-first-run", "--remote-debugging-port=0",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--browser", action="store_true", help="a real page, in chromium")


def main(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(TESTS))  # the long scan and the browser live beside the tests
    named = torchfmri.load_model(options.model)
    scanner = Scanner(named.model, named.tokenizer, ScanOptions(per="position"))
    prompt, generate = "Once upon a time", {"do_sample": False, "min_new_tokens": options.tokens}
    anatomy, meta = scanner.describe(prompt, options.tokens)
    counts: dict[str, int] = {}

    def plain() -> Times:
        with _timed() as times:
            counts["plain"] = len(scanner.scan(prompt, options.tokens, generate=generate)[0])
        return times

    def live() -> Times:
        board = LiveBoard(anatomy, meta)
        with View(board, token=TOKEN) as view, _watched(view, options.browser):
            board.changed = view.changed
            with _timed() as times:
                board.begin("live")
                scan = scanner.scan(
                    prompt, options.tokens, on_token=board.on_token, tell_every=TELL_EVERY,
                    generate=generate,
                )  # fmt: skip
                board.finish(scan)
            counts["live"] = len(scan[0])
        return times

    plain(), live()
    rounds = [(plain(), live(), plain()) for _ in range(options.rounds)]
    found: dict[str, Any] = {}
    for name, at in (("process", 0), ("thread", 1)):
        ratios = [2 * b[at] / (a[at] + c[at]) for a, b, c in rounds]
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
        found[f"{name}_ratio"], found[f"{name}_quartiles"] = middle, [low, high]
        found[f"{name}_plain_again"] = float(np.median([c[at] / a[at] for a, _, c in rounds]))
    return {
        **found,
        "live_seconds": float(np.median([b[0] for _, b, _ in rounds])),
        "plain_seconds": float(np.median([a[0] for a, _, _ in rounds])),
        "live_tokens": counts["live"],
        "plain_tokens": counts["plain"],
        **_long(100_000, 300),
        **_page(100_000, 300),
    }


Times = list[float]
"""Seconds of processor time: of the process, and of this thread."""


@contextmanager
def _timed() -> Iterator[Times]:
    times = [-time.process_time(), -time.thread_time()]
    yield times
    times[0] += time.process_time()
    times[1] += time.thread_time()


@contextmanager
def _watched(view: View, browser: bool) -> Iterator[None]:
    """Somebody looks at the page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if browser:
            program = shutil.which("chromium") or shutil.which("google-chrome")
            if program is None:
                raise SystemExit("--browser needs chromium")
            command = [program, *BROWSER, f"--user-data-dir={folder}", view.url]
        else:
            command = [sys.executable, "-c", CLIENT, view.url]
        quiet = subprocess.DEVNULL
        client = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
        try:
            while not view._site.clients:
                time.sleep(0.05)
            time.sleep(0.5)  # the page has drawn that nothing is there yet
            yield
        finally:
            os.killpg(client.pid, signal.SIGKILL)
            client.wait()


def _resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _long(tokens: int, layers: int) -> dict[str, float]:
    """The first tile of a long scan, and what a token takes on the wire."""
    from boards import long_scan

    scan = long_scan(tokens, layers)
    board = scan._board()
    board.values(0, "activation", "layers")  # the scan itself is not what looking costs
    desk, resident = Desk(board), _resident()
    place = {"sequence": "0", "metric": "activation", "plane": "layers"}
    started = time.perf_counter()
    header = desk.answer("plane", place)
    assert isinstance(header, dict)
    tile = desk.answer("tile", {**place, "level": str(header["levels"] - 1), "x": "0"})
    first = time.perf_counter() - started
    for level in range(header["levels"]):
        for x in range(-(-tokens // (256 << level))):
            desk.answer("tile", {**place, "level": str(level), "x": str(x)})
    server = _resident() - resident
    frame = desk.plane(0, "activation", "layers")[0].coded(0, 1).nbytes
    return {
        "first_tile_seconds": first,
        "first_tile_bytes": len(tile),
        "server_megabytes": server / 1e6,
        "live_bytes_per_token": frame,
        "json_bytes_per_token": len(json.dumps(scan[0].layers["activation"][0].tolist())),
    }


def _page(tokens: int, layers: int) -> dict[str, float]:
    """How fast a page draws a long scan, opened five times; empty where there is no browser."""
    from boards import long_scan
    from browser import CHROMIUM, FLAGS, SWEEP, opened_page

    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return {}
    if CHROMIUM is None:
        return {}
    paints, found = [], {}
    with View(long_scan(tokens, layers)._board(), token=TOKEN) as view, sync_playwright() as made:
        browser = made.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for _ in range(5):
            with opened_page(browser) as page:
                page.open(view.url)
                drawn = "performance.getEntriesByName('torchfmri-drawn')[0].startTime"
                paints.append(page.js(drawn) / 1000)
        with opened_page(browser) as page:
            page.open(view.url)
            with page.frames() as frames:
                found = page.page.evaluate(SWEEP)
            line = page.page.context.new_cdp_session(page.page)
            line.send("HeapProfiler.collectGarbage")
            heap = line.send("Runtime.getHeapUsage")
        browser.close()
    return {
        "first_paint_seconds": float(np.median(paints)),
        "first_paint_slowest": max(paints),
        "frame_p95_ms": float(np.quantile(frames, 0.95)),
        "frame_median_ms": float(np.median(frames)),
        "frames": len(frames),
        "blank_columns": found["blank"],
        "page_megabytes": (heap["usedSize"] + heap.get("backingStorageSize", 0)) / 1e6,
    }
