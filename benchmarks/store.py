"""What keeping a scan on disk costs: beside writing the same bytes plainly, and reading them.

`python -m benchmarks store` prints the ratio of a commit to a plain write with `fsync`, and the
times of opening many short sequences and of reading one token. Only ratios hold on a busy machine.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._timing import Effort, describe_machine, measure_ratios, report
from torchfmri import Anatomy, ScannedSequence, Tokens, load
from torchfmri._scan.record.sequence import METRICS, STATISTICS
from torchfmri._scan.store.writer import ScanWriter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=300, help="of the long sequence")
    parser.add_argument("--layers", type=int, default=391)
    parser.add_argument("--voxels", type=int, default=5_083, help="of all layers together")
    parser.add_argument("--short", type=int, default=1_000, help="how many short sequences")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", default=None, help="where to write; the temporary folder")


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds, and the ratio of a commit to a plain write and fsync of as many bytes."""
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        return _measure(arguments, folder)
    finally:
        shutil.rmtree(folder)


def _measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    width = max(arguments.voxels // arguments.layers, 1)
    names = [f"layers.{number}" for number in range(arguments.layers)]
    anatomy = Anatomy.of_widths(
        names, ["Linear"] * len(names), [64 * width] * len(names), [64] * len(names)
    )
    sequence = _sequence("long", arguments.tokens, anatomy)
    data = np.zeros(_bytes(sequence), np.uint8)
    report(f"a sequence of {len(data) / 1e6:.1f} MB")
    count = [0]

    def plain() -> None:
        count[0] += 1
        with (folder / f"plain{count[0]}").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    writer = ScanWriter(folder / "long.fmri", anatomy, {})

    def commit() -> None:
        count[0] += 1
        writer.append(ScannedSequence(**{**vars(sequence), "name": str(count[0])}))
        writer.commit()

    figure = measure_ratios(plain, {"commit": commit}, Effort(rounds=arguments.rounds))
    commits = [_milliseconds(commit) for _ in range(arguments.rounds)]
    writer.close()
    return {
        "commit_over_plain_write": figure["commit"].ratio,
        "plain_again": figure["plain_again"].ratio,
        "intervals": {
            "commit_over_plain_write": [figure["commit"].low, figure["commit"].high],
            "plain_again": [figure["plain_again"].low, figure["plain_again"].high],
        },
        "commit_ms": statistics.median(commits),
        **_read_token(folder / "long.fmri", arguments.rounds),
        **_short(folder / "short.fmri", anatomy, arguments.short),
        "settings": {"megabytes": round(len(data) / 1e6, 1), "short": arguments.short},
        "machine": describe_machine(),
    }


def _read_token(path: Path, rounds: int) -> dict[str, float]:
    """One token of all voxels: after the file has left the page cache, again, and once mapped."""
    cold, cached, mapped = [], [], []
    for index in range(rounds):
        scan = load(path)
        for segment in path.glob("segment*"):
            with segment.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        def read(scan: Any = scan, index: int = index) -> None:
            for metric in METRICS:
                scan[index].voxels[metric][7].copy()

        cold.append(_milliseconds(read))
        mapped.append(_milliseconds(read))
        again = load(path)
        cached.append(_milliseconds(lambda again=again, read=read: read(again)))
    return {
        "token_cold_ms": statistics.median(cold),
        "token_cached_ms": statistics.median(cached),
        "token_mapped_ms": statistics.median(mapped),
    }


def _short(path: Path, anatomy: Anatomy, count: int) -> dict[str, float]:
    sequences = [_sequence(str(number), 1, anatomy) for number in range(count)]

    def write() -> None:
        with ScanWriter(path, anatomy, {}, commit_seconds=1e9) as writer:
            for sequence in sequences:
                writer.append(sequence)

    written = _milliseconds(write)
    opened = statistics.median(_milliseconds(lambda: load(path)) for _ in range(5))
    read = _milliseconds(lambda: list(load(path)))
    return {
        "short_append_ms": written / count,
        "open_short_scan_ms": opened,
        "read_short_scan_ms": read,
    }


def _sequence(name: str, length: int, anatomy: Anatomy) -> ScannedSequence:
    random = np.random.default_rng(0)
    values = random.random(length, np.float32)
    tokens = Tokens(np.arange(length), (b" word",) * length, values, values, values > 2, values > 2)
    layers, voxels = len(anatomy.layers), len(anatomy.layer)
    return ScannedSequence(
        name,
        tokens,
        {metric: random.random((length, layers), np.float32) for metric in METRICS},
        {metric: random.random((length, voxels), np.float32) for metric in METRICS},
        {what: np.zeros((layers, len(STATISTICS))) for what in ("activations", "gradients")},
    )


def _bytes(sequence: ScannedSequence) -> int:
    tables = (sequence.layers, sequence.voxels, sequence.statistics)
    return sum(values.nbytes for table in tables for values in table.values())


def _milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)
