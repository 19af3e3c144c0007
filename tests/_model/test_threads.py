"""Threads: runs take turns, and a model that is watched belongs to one thread."""

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracles import assert_same_state, state_of
from torch import nn

import torchfmri
from torchfmri import InspectionError
from torchfmri._model import TrainedModel, threads

pytestmark = pytest.mark.usefixtures("one_thread")


def in_threads(*acts: Callable[[], Any]) -> list[Any]:
    """Run these at the same time; what each returned, or the error it raised."""
    found: list[Any] = [None] * len(acts)
    start = threading.Barrier(len(acts))

    def work(index: int) -> None:
        start.wait()
        try:
            found[index] = acts[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(acts))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not any(each.is_alive() for each in threads), "they wait for each other"
    return found


def elsewhere(act: Callable[[], Any]) -> Any:
    """What a call in another thread returned or raised."""
    return in_threads(act)[0]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.embed(ids)))


IDS = torch.arange(6).view(2, 3)


def sample(model: nn.Module, seed: int) -> list[list[int]]:
    found = torchfmri.scan(model, None, [1, 2, 3], 12, per=None, do_sample=True, seed=seed)
    return [each.tokens.ids.tolist() for each in found]


def scanned(model: nn.Module) -> int:
    return len(torchfmri.scan(model, None, [1, 2], 1))


def test_seeded_sampling_in_two_threads_on_two_models() -> None:
    models = [Words(), Words()]
    expected = [[sample(model, seed) for seed in range(4)] for model in models]
    before = [state_of(each) for each in models]

    def work(model: nn.Module) -> Callable[[], Any]:
        return lambda: [sample(model, seed) for seed in range(4)]

    for _ in range(3):
        assert in_threads(*map(work, models)) == expected
    for model, state in zip(models, before, strict=True):
        assert_same_state(state, state_of(model))


def test_one_model_in_several_threads_gives_what_one_thread_gives() -> None:
    model = Words().train()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = state_of(model)

    def scan() -> np.ndarray:
        found = torchfmri.scan(model, None, [[1, 2, 3], [4, 5, 6]], 4)
        return np.stack([each.layers["gradient"] for each in found])

    def inspect() -> np.ndarray:
        inspector = torchfmri.Inspector(model)
        inspector.watch("*", what=["activations", "gradients"])
        found = inspector.run_inspection(IDS, loss="sum")
        return np.array(
            [found[name].statistics("activations")["mean"] for name in ("embed", "head")]
        )

    def price() -> int:
        return torchfmri.cost(model, IDS, loss=lambda output: output.sum()).total.backward_flops

    acts = [scan, inspect, price, scan, inspect]
    expected = [each() for each in acts]
    for _ in range(2):
        for found, wanted in zip(in_threads(*acts), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    assert not any(isinstance(each, Exception) for each in in_threads(inspect, scan, inspect))
    torch.set_rng_state(
        torch.frombuffer(bytearray(before.facts["torch random"]), dtype=torch.uint8)
    )
    assert_same_state(before, state_of(model))


BLOCKS: dict[str, Callable[[nn.Module], Any]] = {
    "token_gradients": lambda model: torchfmri.token_gradients(model),
    "token_loss": lambda model: torchfmri.token_gradients(model, per="token_loss"),
    "recording": lambda model: torchfmri.Inspector(model).recording(),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_a_model_in_a_block_belongs_to_its_thread(block: str) -> None:
    model, other = Words(), Words()
    before = state_of(model)
    with BLOCKS[block](model):
        name = threading.current_thread().name
        for work in (
            lambda: torchfmri.scan(model, None, [1, 2], 1),
            lambda: torchfmri.Inspector(model).run_inspection(IDS),
            lambda: torchfmri.token_gradients(model).__enter__(),
            lambda: torchfmri.cost(model.head, torch.ones(1, 8)),
        ):
            error = elsewhere(work)
            assert isinstance(error, InspectionError)
            assert f"in thread {name!r}" in str(error)
            assert "copy.deepcopy(model)" in str(error)
        assert len(elsewhere(lambda: torchfmri.scan(other, None, [1, 2], 1))) == 1
        assert len(elsewhere(lambda: torchfmri.scan(copy.deepcopy(model), None, [1, 2], 1))) == 1
        assert len(torchfmri.scan(other, None, [1, 2], 1)) == 1
    assert_same_state(before, state_of(model))
    assert len(elsewhere(lambda: torchfmri.scan(model, None, [1, 2], 1))) == 1


@pytest.mark.parametrize("block", ["token_gradients", "token_loss"])
def test_a_call_in_another_thread_is_refused_by_name(block: str) -> None:
    model = Words()
    with BLOCKS[block](model):
        error = elsewhere(lambda: model(IDS))
    assert isinstance(error, InspectionError)
    assert "Words was called in thread" in str(error)
    assert elsewhere(lambda: model(IDS)).shape == (2, 3, 50)


def test_a_model_that_is_being_scanned_cannot_be_trained_elsewhere() -> None:
    """It is in eval mode then, with hooks on it."""
    model = Words()
    errors: list[Any] = []

    def decode(scanned: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        errors.append(elsewhere(lambda: model(IDS)))
        scanned(ids)
        return torch.cat((ids, ids[:, :1]), 1)

    torchfmri.scan(model, None, [1, 2, 3], 1, decode=decode, per=None)
    assert isinstance(errors[0], InspectionError)


def test_a_thread_that_died_in_a_block_hinders_nobody() -> None:
    model = Words()
    blocks = []
    elsewhere(lambda: blocks.append(torchfmri.token_gradients(model).__enter__()))
    assert len(torchfmri.scan(model, None, [1, 2], 1)) == 1
    blocks[0].__exit__(None, None, None)


def test_a_model_that_is_gone_hinders_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may give the id of a module that is gone to a new one; here it always does."""
    model, heir = Words(), Words()
    places = {id(each): place for one in (model, heir) for place, each in enumerate(one.modules())}
    monkeypatch.setattr(threads, "id", lambda each: places[id(each)], raising=False)
    trained = TrainedModel(model)
    trained.is_called()
    try:
        assert isinstance(elsewhere(lambda: scanned(heir)), InspectionError)
        del model
        gc.collect()
        assert elsewhere(lambda: scanned(heir)) == 1
    finally:
        trained.release()


def test_a_callback_may_wait_for_a_thread_that_scans() -> None:
    model, other = Words(), Words()
    expected = sample(other, 1)
    found: list[Any] = []
    torchfmri.scan(
        model, None, [1, 2], 2, on_token=lambda _: found.append(elsewhere(lambda: sample(other, 1)))
    )
    assert found
    assert all(each == expected for each in found)


def test_the_reader_of_a_stream_may_run_other_models() -> None:
    model, other = Words(), Words()
    expected, drawn = sample(other, 2), sample(model, 3)
    with torchfmri.stream(model, None, [1, 2, 3], 12, per=None, do_sample=True, seed=3) as stream:
        tokens = []
        for token in stream:
            tokens.append(token.id)
            assert sample(other, 2) == expected
    assert [tokens] == drawn


def test_a_model_in_training_under_a_monitor_is_not_scanned_in_another_thread() -> None:
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        model(IDS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def scan() -> Any:
        return torchfmri.scan(model, None, [1, 2], 1)

    with torchfmri.Monitor(model, optimizer) as monitor:
        step()
        error = elsewhere(scan)
        assert isinstance(error, InspectionError)
        assert f"in thread {threading.current_thread().name!r}" in str(error)
        assert len(scan()) == 1  # between two steps of its own thread
        assert elsewhere(step) is None  # the loop moves to another thread, which ends
        assert len(scan()) == 1
        step()
    assert len(monitor.history) == 3
    assert len(elsewhere(scan)) == 1
