"""Steps of another checkout, in a process of their own, so that two versions meet in one run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks._timing import Run

# Runs in the other checkout: a line in is the name of a step, a line out says that it was done.
# Each line out also says how much processor time the process has taken so far.
_WORKER = """
import argparse, sys, time, torch
from benchmarks import token_gradients as subject
parser = argparse.ArgumentParser()
subject.add_arguments(parser)
arguments = parser.parse_args(sys.argv[1:])
torch.set_num_threads(arguments.threads)
steps = subject.build_ours(subject.build_task(arguments))
print("ready", time.process_time(), *steps, flush=True)
for line in sys.stdin:
    steps[line.strip()]()
    print("done", time.process_time(), flush=True)
"""


@contextmanager
def steps_of(
    checkout: Path, names: Iterable[str], options: list[str]
) -> Iterator[tuple[dict[str, Run], Callable[[], float]]]:
    """Yield the steps that another checkout has too, as `before_<name>`, and its process's clock.

    The clock gives the processor time in seconds up to the end of the last step: this process's own
    clock does not see what another one computes.

    Args:
        checkout: Its folder.
        names: Of steps of `token_gradients`.
        options: Of that subject, on the command line.
    """
    paths = os.pathsep.join(map(str, (checkout / "src", checkout)))
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert worker.stdin is not None
    assert worker.stdout is not None

    def step(name: str) -> Run:
        def run() -> None:
            worker.stdin.write(f"{name}\n")  # type: ignore[union-attr]
            worker.stdin.flush()  # type: ignore[union-attr]
            (spent[0],) = expect("done")

        return run

    def expect(word: str) -> list[str]:
        line = worker.stdout.readline().strip()  # type: ignore[union-attr]
        first, *others = line.split() or [""]
        if first != word:
            raise RuntimeError(f"{checkout} ended with {line!r}: its errors are above.")
        return others

    spent = ["0"]
    with worker:
        try:
            spent[0], *known = expect("ready")
            steps = {f"before_{name}": step(name) for name in names if name in known}
            yield steps, lambda: float(spent[0])
        finally:
            worker.stdin.close()
