"""What holds for all tests: no network, and figures without a screen."""

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")


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
        from torchfmri._tokens import arrivals

        monkeypatch.setattr(arrivals, "most_waiting", lambda *_: (most, 1 << 60))
