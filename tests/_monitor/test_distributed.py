"""Two processes, each with half of the batch, see together what one with the whole batch sees."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import run_in_processes
from torch import nn

from torchfmri import Monitor
from torchfmri._monitor.gather import SHARD, WHOLE, merge, share_of
from torchfmri._records.history import History, Series, Step
from torchfmri.statistics import calculate_statistics

PROCESSES, STEPS, ROWS = 2, 3, 12

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed, gloo"
)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 4)).double()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)


def train(wrap: Callable[[nn.Module], nn.Module], part: slice) -> Monitor:
    model = wrap(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = Monitor(model, optimizer, histogram=True)
    for number in range(STEPS):
        with monitor.step() as step:
            loss = model(batch(number)[part]).square().mean()
            step.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor


def with_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def with_fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {"ddp": with_ddp, "fsdp": with_fsdp}


def work(rank: int, folder: str) -> None:
    """What each process does; the first one writes what was gathered."""
    rows = ROWS // PROCESSES
    for name, wrap in WRAPPERS.items():
        monitor = train(wrap, slice(rank * rows, (rank + 1) * rows))
        gathered = monitor.gather()
        dist.barrier()
        if rank == 0:
            content = pickle.dumps((gathered, monitor.history))
            Path(folder, f"{name}.pickle").write_bytes(content)


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[History, History]]:
    folder = tmp_path_factory.mktemp("processes")
    run_in_processes(work, folder, PROCESSES)
    return {name: pickle.loads(Path(folder, f"{name}.pickle").read_bytes()) for name in WRAPPERS}


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_gathered_statistics_equal_those_of_one_process(name: str, gathered: Any) -> None:
    whole = train(lambda model: model, slice(None)).history
    history, of_one = gathered[name]
    assert {*history.series} == {*whole.series}
    assert list(history.steps) == list(whole.steps)
    assert np.allclose(history.loss, whole.loss, rtol=1e-12)
    for layer, what in whole.series:
        for field in ("count", "mean", "std", "min", "max", "l2", "zero", "nan"):
            one, two = history.values(layer, what, field), whole.values(layer, what, field)
            assert np.allclose(one, two, rtol=1e-9, atol=1e-15), (layer, what, field)
    for parameter in ("0.weight", "0.bias", "2.weight", "2.bias"):
        ratios = history.update_ratio(parameter), whole.update_ratio(parameter)
        assert np.allclose(*ratios, rtol=1e-9)
    # What one process sees alone is something else.
    assert of_one.values("0", field="count")[0] == ROWS // PROCESSES * 10
    found, expected = history.statistics("0", "gradients"), whole.statistics("0", "gradients")
    assert found.histogram is not None
    assert found.histogram.total == expected.histogram.total  # type: ignore[union-attr]


def test_shards_are_noted(gathered: Any) -> None:
    assert any("own shard" in note for note in gathered["fsdp"][1].notes)
    assert not any("own shard" in note for note in gathered["ddp"][1].notes)


def test_one_process_gathers_its_own() -> None:
    monitor = train(lambda model: model, slice(None))
    assert monitor.gather() is monitor.history


def make_history(number: int, values: torch.Tensor, loss: float, norms: list[float]) -> History:
    history = History(4)
    step = Step(number, loss, parameters=("fc.weight",), updates=np.array(norms).reshape(2, 1))
    found = calculate_statistics(values)
    what = ("activations", "gradients", "parameters")
    history.append(step, {Series("fc" + ".weight" * (w == "parameters"), w): found for w in what})
    return history


def test_merge_by_hand() -> None:
    values = torch.arange(8.0)
    histories = [
        make_history(5, values[:3], 1.0, [3.0, 4.0]),
        make_history(5, values[3:], 2.0, [4.0, 3.0]),
    ]
    histories[1].missing["gone"] = "why"
    histories[1].notes["remark"] = ["fc"]
    sharded = merge(histories, {"fc.weight": SHARD}, {"fc": 2})
    assert sharded.loss[0] == 1.5
    assert sharded.statistics("fc").count == 8
    assert sharded.statistics("fc").mean == 3.5
    assert sharded.statistics("fc", "gradients").max == 3.5  # of the mean of both losses
    assert sharded.statistics("fc.weight", "parameters").count == 8
    assert sharded.update_ratio("fc.weight")[0] == 1.0
    assert sharded.missing == {"gone": "why"}
    assert sharded.notes == {"remark": ["fc"]}
    whole = merge(histories, {"fc.weight": WHOLE}, {"fc": 2})
    assert whole.statistics("fc.weight", "parameters").count == 3
    assert math.isclose(whole.update_ratio("fc.weight")[0], 0.75)


def test_steps_that_one_process_lacks_are_left_out() -> None:
    one = make_history(5, torch.ones(2), 1.0, [1.0, 1.0])
    other = make_history(6, torch.ones(2), 1.0, [1.0, 1.0])
    assert len(merge([one, other], {}, {})) == 0


def test_share_of_a_plain_parameter() -> None:
    assert share_of(nn.Parameter(torch.ones(2))) == WHOLE


MICRO = 4


class Stage(nn.Module):
    """One half of the model, under the names that its layers have in the whole."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        whole = make_model()
        names = [["0", "1"], ["2"]][rank]
        for name in names:
            self.add_module(name, whole.get_submodule(name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def pipeline(rank: int, folder: str) -> None:
    """A pipeline of two stages; the first process writes what was gathered."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = Stage(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stage = PipelineStage(model, rank, PROCESSES, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO, loss_fn=lambda output, _: output.square().mean())
    monitor = Monitor(model, optimizer, on_nonfinite="raise")
    for number in range(STEPS):
        with monitor.step():
            x = batch(number)
            schedule.step(*[x] if rank == 0 else [], target=x if rank else None)
            optimizer.step()
            optimizer.zero_grad()
    gathered = monitor.gather()
    dist.barrier()
    if rank == 0:
        Path(folder, "pipeline.pickle").write_bytes(pickle.dumps(gathered))


@pytest.mark.slow
def test_stages_of_a_pipeline(tmp_path: Path) -> None:
    run_in_processes(pipeline, tmp_path, PROCESSES)
    found = pickle.loads((tmp_path / "pipeline.pickle").read_bytes())
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer)
    for number in range(STEPS):
        with monitor.step():
            for part in batch(number).chunk(MICRO):  # each with a loss of its own
                model(part).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad /= MICRO  # type: ignore[operator]
            optimizer.step()
            optimizer.zero_grad()
    whole = monitor.history
    assert {*found.series} == {*whole.series}
    for layer, what in whole.series:
        for field in ("count", "rms", "max"):
            one, two = found.values(layer, what, field), whole.values(layer, what, field)
            assert np.allclose(one, two, rtol=1e-9), (layer, what, field)
    for parameter in ("0.weight", "2.weight"):
        ratios = found.update_ratio(parameter), whole.update_ratio(parameter)
        assert np.allclose(*ratios, rtol=1e-9)
