"""Interrupted writers: nothing that was finished is lost, doubled or half."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import faults
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
KILLS, IMAGES = 24, 3


@pytest.mark.slow
def test_kills_and_power_cuts() -> None:
    pytest.importorskip("zarr")
    pytest.importorskip("pyarrow")
    memory = "/dev/shm"  # no test needs a real disk: a kill leaves what the system has
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as place:
        found = run(place)
    assert set(found) == set(faults.TASKS)
    assert [each for task in found.values() for each in task["wrong"]] == []
    power = [task["power"] for task in found.values() if "power" in task]
    assert [each for task in power for each in task["wrong"]] == []
    assert sum(task["kills"] for task in found.values()) >= 200
    assert sum(task["images"] for task in power) >= 500


def run(place: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, faults.__file__, place, str(KILLS), str(IMAGES)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", ["Write", "Overwrite", "OverwriteInTwoSteps"])
def test_power_cuts(name: str, tmp_path: Path) -> None:
    found = faults.cut_power(name, tmp_path, 2, random.Random(0))
    assert found["wrong"] == []
    assert found["operations"] > 20


@pytest.mark.parametrize("name", ["Write", "Overwrite"])
def test_a_disk_that_does_not_flush_is_noticed(name: str, tmp_path: Path) -> None:
    assert faults.cut_power(name, tmp_path, 2, random.Random(0), flushes=False)["wrong"]
