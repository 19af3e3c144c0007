"""Two processes, one of which has a NaN: both hold, both write their part, both do the same."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_in_processes
from torch import nn

from torchfmri import Incidents, Monitor, NonFiniteError
from torchfmri._incidents.replay_run import replay
from torchfmri._model.factory import Subject

PROCESSES, BAD_STEP, BAD_RANK = 2, 2, 1

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(),
        reason="needs torch.distributed, gloo",
    ),
]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def wrap(kind: str) -> nn.Module:
    model = make_model()
    if kind != "fsdp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(rank: int, kind: str, action: str, folder: str) -> dict[str, Any]:
    """What a process sees of its training."""
    model = wrap(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = Incidents(Path(folder, f"{kind}-{action}"), weights=kind == "ddp")
    monitor = Monitor(model, optimizer, on_nonfinite=action, incidents=options)
    seen: dict[str, Any] = {"error": None, "steps": 0}
    try:
        for number in range(4):
            x = torch.randn(3, 4)
            if number == BAD_STEP and rank == BAD_RANK and kind != "healthy":
                x[1, 2] = math.nan
            with monitor.step() as step:
                loss = model(x).square().mean()
                step.loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            seen["steps"] += 1
    except NonFiniteError as error:
        seen["error"] = str(error)
    weights = [_local(each) for each in model.parameters()]
    seen["finite"] = all(bool(each.isfinite().all()) for each in weights)
    seen["sum"] = float(sum(each.double().sum() for each in weights))
    seen["incidents"] = [each.finding.to_dict() for each in monitor.incidents]
    return seen


def _local(parameter: Any) -> torch.Tensor:
    values: torch.Tensor = parameter.detach()
    return values.to_local() if hasattr(values, "to_local") else values  # type: ignore[attr-defined]


CASES = (("ddp", "raise"), ("ddp", "skip"), ("fsdp", "skip"), ("healthy", "raise"))


def work(rank: int, folder: str) -> None:
    """What each process does."""
    import warnings

    warnings.simplefilter("ignore")
    for kind, action in CASES:
        torch.manual_seed(rank)
        seen = train(rank, kind, action, folder)
        Path(folder, f"{kind}-{action}-{rank}.json").write_text(json.dumps(seen))
        dist.barrier()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("processes")
    run_in_processes(work, found, PROCESSES)
    return found


def read(folder: Path, kind: str, action: str) -> list[dict[str, Any]]:
    return [
        json.loads((folder / f"{kind}-{action}-{rank}.json").read_text())
        for rank in range(PROCESSES)
    ]


@pytest.mark.slow
def test_all_raise_together(folder: Path) -> None:
    for seen in read(folder, "ddp", "raise"):
        assert seen["steps"] == BAD_STEP
        assert f"In process {BAD_RANK}" in seen["error"]
        assert "sample 1" in seen["error"]
        assert seen["finite"]


def test_all_skip_together(folder: Path) -> None:
    one, other = read(folder, "ddp", "skip")
    assert one["steps"] == other["steps"] == 4
    assert one["finite"]
    assert one["sum"] == other["sum"]  # still the same weights
    assert one["incidents"] == other["incidents"]
    assert one["incidents"][0]["evidence"]["rank"] == BAD_RANK


def test_sharded_weights(folder: Path) -> None:
    for seen in read(folder, "fsdp", "skip"):
        assert seen["steps"] == 4
        assert seen["finite"]
        (finding,) = seen["incidents"]
        assert (finding["step"], finding["evidence"]["rank"]) == (BAD_STEP, BAD_RANK)
        assert "holds NaN in sample 1" in finding["text"]
        assert "not traced" in finding["text"]


def test_healthy_processes(folder: Path) -> None:
    for seen in read(folder, "healthy", "raise"):
        assert (seen["error"], seen["incidents"], seen["steps"]) == (None, [], 4)


def test_each_writes_its_part(folder: Path) -> None:
    incident = folder / "ddp-raise" / f"step-{BAD_STEP:06d}"
    assert sorted(each.name for each in incident.iterdir()) == [
        "incident.json",
        "rank-0",
        "rank-1",
    ]
    summary = json.loads((incident / "incident.json").read_text())
    assert (summary["rank"], summary["processes"]) == (BAD_RANK, PROCESSES)
    written = replay(incident)  # of the process with the origin
    assert written.rank == BAD_RANK
    model = make_model()
    subject = Subject(model, None, lambda output: output.square().mean())
    bad, good = (replay(incident, subject, rank) for rank in (BAD_RANK, 0))
    assert bad.finding.problem == "nonfinite_data"
    assert bad.finding.evidence["rows"] == [1]
    assert good.finding.problem == "nonfinite_not_reproduced"  # its own part was fine
