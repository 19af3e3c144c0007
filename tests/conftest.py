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
