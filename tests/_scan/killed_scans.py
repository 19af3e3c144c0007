"""Scans of datasets that are killed: a program that loads a model once and forks what it kills.

    python killed_scans.py FOLDER KILLS KILLS_OF_TWO

It scans the same rows again and again into new folders. `KILLS` of these scans, and `KILLS_OF_TWO`
that two processes share, are killed with SIGKILL at random moments; each is resumed until it ends
by itself. What was seen is printed as JSON: for each run the names that were said to be committed
and those that a reader found afterwards, without repair. `reference.fmri` is a scan that nobody
interrupted. While they run, a reader looks at them.
"""

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import torchfmri
from torchfmri._scan.run import dataset
from torchfmri._scan.run.dataset_rows import rows_of
from torchfmri._scan.store.writer import ScanWriter

ROWS = [
    {
        "prompt": f"What is {number} plus {number + 1}?",
        "condition": "even" if number % 2 else "odd",
        "difficulty": number if number % 3 else None,
        "number": number,
        "tags": ["sum", None, {"größe": number / 2}],
    }
    for number in range(6)
]
NEW_TOKENS = 1


class TellingWriter(ScanWriter):
    """Says through a pipe what is committed, once it is."""

    report = -1

    def commit(self) -> None:
        names = [entry.name for entry, _ in self._pending]
        super().commit()
        for name in names:
            os.write(self.report, f"{name}\n".encode())


def start(scanner: torchfmri.Scanner, path: Path, report: int, rank: int, world: int) -> int:
    """The id of a new process that scans its share of what is missing."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if world > 1:
            meeting = f"file://{os.environ['MEETING']}"
            torch.distributed.init_process_group(
                "gloo", init_method=meeting, rank=rank, world_size=world
            )
        TellingWriter.report = report
        dataset.ScanWriter = TellingWriter  # type: ignore[misc]
        dataset.scan_rows(scanner, rows_of(ROWS), path, NEW_TOKENS, chat=True, commit_seconds=0)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run(
    scanner: torchfmri.Scanner, path: Path, world: int, seconds: float | None, after_commit: bool
) -> dict[str, Any]:
    """Scan until it is done, or kill it so many seconds after its start or its first commit."""
    os.environ["MEETING"] = f"{path}.meeting{time.monotonic_ns()}"
    reading, writing = os.pipe()
    children = [start(scanner, path, writing, rank, world) for rank in range(world)]
    os.close(writing)
    if after_commit:
        select.select([reading], [], [], 20)
    until = time.monotonic() + (1e9 if seconds is None else seconds)
    codes: dict[int, int] = {}
    seen = 0
    while time.monotonic() < until and len(codes) < world:
        for child in set(children) - set(codes):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = status
        seen = max(seen, look(path, seen))
        time.sleep(0.01)
    killed = len(codes) < world
    for child in set(children) - set(codes):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        committed = pipe.read().decode().split()
    result: dict[str, Any] = {
        "killed": killed, "codes": list(codes.values()), "committed": committed,
        "names": [], "problems": [],
    }  # fmt: skip
    if (path / "meta.json").exists():
        scan = torchfmri.load(path)
        result |= {"names": list(scan.names), "problems": list(scan.verify())}
    return result


def look(path: Path, seen: int) -> int:
    """Read the scan while it is written: never fewer sequences, and all of them readable."""
    if not (path / "meta.json").exists():
        return seen
    scan = torchfmri.load(path)
    assert len(scan) >= seen, (len(scan), seen)
    if len(scan) > seen:
        assert len(list(scan)) == len(scan)
        assert scan.problems == ()
    return len(scan)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    model, tokenizer = torchfmri.load_model("tiny")
    options = torchfmri.ScanOptions(layers="*.q_proj")
    scanner = torchfmri.Scanner(model, tokenizer, options)
    scanner.scan("Warm up.", 1, chat=True)
    reference = run(scanner, folder / "reference.fmri", 1, None, after_commit=False)
    assert reference["codes"] == [0], reference
    runs = [
        found
        for world, kills in enumerate(sys.argv[2:], start=1)
        for found in kill(scanner, folder, world, int(kills))
    ]
    print(json.dumps(runs))


def kill(
    scanner: torchfmri.Scanner, folder: Path, world: int, kills: int
) -> Iterator[dict[str, Any]]:
    """Kill so many runs; every scan that was begun is brought to its end."""
    moments = random.Random(world)
    number = killed = 0
    while killed < kills:
        path = folder / f"{world}-{number:02d}.fmri"
        done = False
        while not done:
            after_commit = moments.random() < 0.6
            seconds = moments.uniform(0, 0.1 if after_commit else 0.3)
            wanted = seconds if killed < kills else None
            found = run(scanner, path, world, wanted, after_commit)
            done = not found["killed"]
            killed += found["killed"]
            yield {"scan": path.name, **found}
        number += 1


if __name__ == "__main__":
    main()
