"""Scans of models that several processes share, in processes of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import run_in_processes
from scan_oracles import build, prompts
from torch import nn

import torchfmri
from torchfmri import InspectionError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(),
        reason="needs torch.distributed, gloo",
    ),
]
PROCESSES, STEPS = 2, 4
PER = (None, "position", "cached")


def sharded(model: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def refusal(run: Any) -> str:
    try:
        run()
    except InspectionError as error:
        return str(error)
    return ""


def tensor_parallel() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Embedding(67, 16), nn.Linear(16, 68))
    mesh = init_device_mesh("cpu", (PROCESSES,))
    return parallelize_module(model, mesh, {"1": ColwiseParallel()})


def work(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, ids = sharded(build("llama")), prompts()[0]
    found: dict[str, Any] = {}
    for per in PER:
        scan = torchfmri.scan(model, None, ids, STEPS, per=per)  # the first one before any pass
        found[str(per)] = {
            "ids": scan.tokens.ids.tolist(),
            "checks": dict(scan.only.checks),
            "values": {key: each.tolist() for key, each in scan.only.layers.items()},
        }
    # The model goes on: forward, backward, and a look at it in between.
    batch = torch.tensor([ids])
    losses = []
    for _ in range(2):
        loss = model(batch, labels=batch).loss
        loss.backward()
        torchfmri.scan(model, None, ids, 2, per=None)
        losses.append(float(loss.detach()))
    found["losses"] = losses
    found["other"] = refusal(lambda: torchfmri.scan(model, None, prompts()[rank], STEPS))
    found["losses alone"] = refusal(
        lambda: torchfmri.scan(model, None, ids, STEPS, per="token_loss")
    )
    found["drawn"] = refusal(lambda: torchfmri.scan(model, None, ids, STEPS, do_sample=True))
    found["dataset"] = refusal(
        lambda: torchfmri.scan_dataset(model, None, [{"ids": ids}], f"{folder}/x.fmri")
    )
    whole = FullyShardedDataParallel(build("llama"), device_id=torch.device("cpu"))
    found["wrapper"] = refusal(lambda: torchfmri.scan(whole, None, ids, STEPS))
    found["parallel"] = refusal(lambda: torchfmri.scan(tensor_parallel(), None, ids, STEPS))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    run_in_processes(work, folder, PROCESSES)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("per", PER)
def test_a_sharded_model_is_scanned_as_a_whole_one(results: Any, per: Any) -> None:
    expected = torchfmri.scan(build("llama"), None, prompts()[0], STEPS, per=per)
    for each in results:
        found = each[str(per)]
        assert found["ids"] == expected.tokens.ids.tolist()
        assert set(found["values"]) == set(expected.only.layers)
        for metric, values in found["values"].items():
            truth = expected.only.layers[metric]
            np.testing.assert_allclose(values, truth, rtol=1e-4, atol=1e-7, err_msg=metric)
        if per is not None:
            assert found["checks"]["live_difference"] < 1e-5
            assert found["checks"]["gradient_residual"] < 1e-5


def test_it_goes_on_as_if_nothing_had_been(results: Any) -> None:
    ids = torch.tensor([prompts()[0]])
    expected = float(build("llama")(ids, labels=ids).loss.detach())
    for each in results:
        assert each["losses"] == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other", "every pass needs all processes, and they were given different prompts"),
        ("drawn", "all processes must draw the same tokens: give a seed="),
        ("losses alone", "per='token_loss'.*sharded.*per='position'"),
        ("dataset", "a dataset gives each process rows of its own"),
        ("wrapper", "FullyShardedDataParallel gathers.*fully_shard"),
        ("parallel", "tensor-parallel: each process computes a part"),
    ],
)
def test_what_is_refused_by_name(results: Any, case: str, words: str) -> None:
    for each in results:
        assert re.search(words, each[case])
