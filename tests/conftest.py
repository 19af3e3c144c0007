"""What holds for all tests: no network, figures without a screen, and the same random numbers."""

import gc
import math
import os
import random
import signal
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

# Hypothesis draws the same examples in every run: what fails in CI fails on the desk.
hypothesis.settings.register_profile("seeded", derandomize=True, deadline=None)
hypothesis.settings.load_profile("seeded")


# A shell that starts the tests in the background has them ignore these; tests send them.
for _number, _handler in {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
}.items():
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


def seed() -> None:
    """Set every generator that tests draw from; CUDA's follow torch's."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, in whatever order the tests run."""
    seed()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Seed the import of a test module, whichever modules were imported before it."""
    seed()
    return (yield)


@pytest.hookimpl(tryfirst=True)  # before anything shuffles the tests or selects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `one_in(n)` leaves to the slow tier: all but every n-th case, drawn."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, several in cases.items():
        mark = several[0].get_closest_marker("one_in")
        assert mark is not None
        kept = random.Random(test).sample(several, math.ceil(len(several) / mark.args[0]))
        for item in several:
            if item not in kept:
                item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Seed a fixture that several tests share; the test that asks first notices nothing of it."""
    if fixturedef.scope == "function":
        return (yield)
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    seed()
    try:
        return (yield)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: on a busy machine threads that wait for each other cost ten times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["as it is", "three together", "all together"])
def waiting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many calls wait until their gradients are looked at; on a GPU it is many."""
    most = {"three together": 3, "all together": 1 << 30}.get(request.param)
    if most is not None:
        from torchfmri._tokens.calls import arrivals

        monkeypatch.setattr(arrivals, "most_waiting", lambda *_: (most, 1 << 60))


@pytest.fixture(autouse=True, scope="module")
def _imports_frozen() -> None:
    """Keep what is imported out of garbage collections, which many tests ask for: 0.5 s each."""
    gc.collect()
    gc.freeze()
