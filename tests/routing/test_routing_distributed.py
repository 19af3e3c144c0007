"""Two processes with half of the batch each train like one process with all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_in_processes
from torch import Tensor, nn

from torchfmri.routing import (
    LearningDynamics,
    RoutingConfig,
    RoutingLanguageModel,
    computation_parameters,
    routing_parameters,
)

PROCESSES = 2
CASES = [("token", "strict"), ("aggregate", "strict"), ("token", "joint")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(),
        reason="needs torch.distributed, gloo",
    ),
]


def train(ids: Tensor, wrap: bool, signal: Any, mode: Any) -> dict[str, Any]:
    """Two steps; the signals of the first, and the parameters after the second."""
    torch.manual_seed(0)
    model = RoutingLanguageModel(RoutingConfig(11, hidden_size=32, blocks=2, heads=2)).double()
    wrapped = nn.parallel.DistributedDataParallel(model) if wrap else model
    main = torch.optim.SGD(computation_parameters(wrapped), lr=0.1)
    meta = torch.optim.SGD(routing_parameters(wrapped), lr=0.1)
    found: dict[str, Any] = {}
    with LearningDynamics(
        wrapped, main, meta, signal=signal, mode=mode, keep_signals=True
    ) as dynamics:
        for step in range(2):
            dynamics.compute_and_apply_gradients(wrapped(ids, labels=ids).loss)
            if step == 0:
                found["signals"] = {
                    tuple(key): (each.contribution, each.relevance, each.cost.clone())
                    for key, each in dynamics.signals.items()
                }
    found["parameters"] = dict(model.state_dict())
    return found


def batch() -> Tensor:
    return torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(2))


def work(rank: int, folder: str) -> None:
    own = batch().chunk(PROCESSES)[rank]
    found = {case: train(own, True, *case) for case in CASES}
    torch.save(found, Path(folder, f"{rank}.pt"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("processes")
    run_in_processes(work, folder, PROCESSES)
    return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(PROCESSES)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_two_processes_are_one(case: tuple[str, str], found: Any) -> None:
    alone = train(batch(), False, *case)
    for key, (contribution, relevance, cost) in alone["signals"].items():
        parts = [each[case]["signals"][key] for each in found]
        torch.testing.assert_close(torch.cat([part[0] for part in parts]), contribution)
        # Each process has the mean over its own samples: gradients are larger by their number.
        scaled = [torch.cat([part[at] for part in parts]) / PROCESSES for at in (1, 2)]
        torch.testing.assert_close(scaled[0], relevance)
        torch.testing.assert_close(scaled[1], cost)
    for rank in range(PROCESSES):
        for name, expected in alone["parameters"].items():
            torch.testing.assert_close(found[rank][case]["parameters"][name], expected)


def test_without_averaging_they_would_part(found: Any) -> None:
    """The control: halves of the batch have different signals."""
    first, second = (each[CASES[0]]["signals"] for each in found)
    assert all(not torch.allclose(first[key][2], second[key][2]) for key in first)
