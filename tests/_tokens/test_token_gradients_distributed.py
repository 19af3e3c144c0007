"""Two processes, each with its own samples: token gradients are those of the local loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import ARCHITECTURES, Batch, tokens
from processes import run_in_processes
from torch import Tensor, nn

import torchfmri

PROCESSES = 2
NAMES = ("llama", "mixtral")
WRAPPERS = ("ddp", "ddp-bucket-view", "fsdp")
KEEPS = ("factors", "norms")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(),
        reason="needs torch.distributed, gloo",
    ),
]


def build(name: str) -> nn.Module:
    return ARCHITECTURES[name].build("sdpa", experts="eager").double().eval()


def batch_of(rank: int) -> Batch:
    """Another text, and another length, for each process."""
    ids = tokens(length=7 - rank, seed=rank)
    return {"input_ids": ids, "labels": ids}


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind.startswith("ddp"):
        view = kind == "ddp-bucket-view"
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def measured(model: nn.Module, rank: int, keep: str) -> dict[str, Any]:
    model.zero_grad(set_to_none=True)
    with torchfmri.token_gradients(model, keep=keep) as found:
        model(**batch_of(rank)).loss.backward()
    coverage = found.coverage()
    missing = {row.name for row in coverage.missing}
    return {
        "rows": coverage.to_dict(),
        "norms": {name: found[name].norm() for name in found.names if name not in missing},
    }


def work(rank: int, folder: str) -> None:
    found = {
        (name, kind, keep): measured(wrapped(kind, build(name)), rank, keep)
        for name in NAMES
        for kind in WRAPPERS
        for keep in KEEPS
    }
    torch.save(found, Path(folder, f"{rank}.pt"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("processes")
    run_in_processes(work, folder, PROCESSES)
    return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(PROCESSES)]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_local(name: str, kind: str, keep: str, found: Any) -> None:
    """As if the process were alone: `.grad` is averaged over processes, the tokens are not."""
    for rank in range(PROCESSES):
        alone = measured(build(name), rank, keep)
        here = found[rank][name, kind, keep]
        refused = _refused(here) if kind == "fsdp" else set()
        assert here["norms"].keys() == alone["norms"].keys() - refused, _notes(here)
        for key, each in here["norms"].items():
            assert torch.allclose(alone["norms"][key], each, rtol=1e-9, atol=1e-14), key
        assert {row["name"]: row["rule"] for row in here["rows"] if row["name"] not in refused} == {
            row["name"]: row["rule"] for row in alone["rows"] if row["name"] not in refused
        }


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", NAMES)
def test_the_residual_is_against_the_local_gradient(name: str, keep: str, found: Any) -> None:
    for kind in ("ddp", "ddp-bucket-view"):
        for rank in range(PROCESSES):
            for row in found[rank][name, kind, keep]["rows"]:
                assert row["residual"] is not None, row
                assert row["residual"] < 1e-6, row


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_compared_or_say_why_not(name: str, found: Any) -> None:
    expected = {key for key, _ in build(name).named_parameters()}
    for rank in range(PROCESSES):
        rows = found[rank][name, "fsdp", "factors"]["rows"]
        assert {row["name"] for row in rows} == expected
        for row in rows:
            assert row["note"] if row["residual"] is None else row["residual"] < 1e-6, row


def _refused(here: dict[str, Any]) -> set[str]:
    """Layers that are run again cannot be under FSDP: their weights are gone by then."""
    rows = [row for row in here["rows"] if row["rule"] == "none"]
    assert all("DTensor" in row["note"] for row in rows)
    assert all(".mlp.gate." in row["name"] or ".mlp.experts." in row["name"] for row in rows)
    return {row["name"] for row in rows}


def _notes(here: dict[str, Any]) -> list[str]:
    return [row["note"] for row in here["rows"] if row["rule"] == "none"]


def test_processes_really_differ(found: Any) -> None:
    """Otherwise local and averaged gradients would be the same, and the tests above say nothing."""
    one, other = (each["llama", "ddp", "factors"]["norms"] for each in found)
    norms: list[Tensor] = [each["model.norm.weight"] for each in (one, other)]
    assert norms[0].shape == (2, 7)
    assert norms[1].shape == (2, 6)
