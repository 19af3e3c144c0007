"""Ctrl-C at any moment: what was begun ends, and what was changed is put back all the same."""

import _weakrefset
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import pytest
import torch
from oracles import assert_same_state, state_of
from torch import nn
from torch.nn import functional as F

import torchfmri

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """Everything that a run must put back: modes, buffers, dropout's numbers, a hook, a .grad."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        return self.head(self.drop(self.norm(hidden.flatten(0, -2)).view_as(hidden)))


def make_model() -> Model:
    model = Model().train()
    model.drop.eval()  # a mode of its own
    model.head.weight.grad = torch.ones_like(model.head.weight)
    return model


IDS = torch.arange(6).view(2, 3)


def inspect(model: nn.Module) -> None:
    inspector = torchfmri.Inspector(model)
    inspector.watch("*", what=["activations", "gradients"])
    inspector.run_inspection(IDS, loss="sum")


def record(model: nn.Module) -> None:
    with torchfmri.Inspector(model).recording(), torch.no_grad():
        model.head(torch.ones(1, 4))


def take_token_gradients(model: nn.Module) -> None:
    loss = model.head(torch.ones(1, 2, 4)).sum()
    with torchfmri.token_gradients(model):
        del loss


def take_loss_gradients(model: nn.Module) -> None:
    with torchfmri.token_gradients(model, "*", per="token_loss"):
        pass


def scan(model: nn.Module) -> None:
    torchfmri.scan(model, None, [1, 2, 3], 2, do_sample=True, seed=3)


def verify(model: nn.Module) -> None:
    torchfmri.verify_gradients(model, IDS, loss=lambda output: output.square().mean())


def count_cost(model: nn.Module) -> None:
    torchfmri.cost(model, IDS, loss=lambda output: output.square().mean())


def monitor(model: nn.Module) -> None:
    with torchfmri.Monitor(model, torch.optim.SGD(model.parameters(), 0.1)):
        pass


def check(model: nn.Module, loss: Callable[..., torch.Tensor] = F.cross_entropy) -> None:
    def of_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(output.flatten(0, 1), target.flatten())

    torchfmri.diagnose(model, [(IDS, IDS)], of_tokens, torch.optim.AdamW, 2, show=False)


def check_bad(model: nn.Module) -> None:
    check(model, lambda output, _: output.log().mean())


def read_stream(model: nn.Module) -> None:
    for _ in torchfmri.stream(model, None, [1, 2, 3], 2):
        pass


WORK = [
    inspect, record, scan, take_loss_gradients, take_token_gradients, monitor, verify, count_cost,
    check, check_bad, read_stream,
]  # fmt: skip


def is_restoring(frame: FrameType | None) -> bool:
    """Whether an `__exit__` is among the frames."""
    while frame is not None:
        if frame.f_code.co_name == "__exit__":
            return True
        frame = frame.f_back
    return False


def run_traced(work: Callable[[], None], act: Callable[[int], None]) -> int:
    """Call `act` with the number of each line that an `__exit__` runs; return their count."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if is_restoring(frame):
            count += 1
            act(count)
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def interrupted(work: Callable[[nn.Module], None], model: nn.Module, at: int) -> bool:
    """Whether Ctrl-C at this line of the restorations reached the caller, however late.

    What the callback of a weak reference raises, Python itself drops, and torch has such callbacks:
    that counts as reached, for nobody could have caught it.
    """
    dropped: list[type[BaseException]] = []

    def act(number: int) -> None:
        if number == at:
            signal.raise_signal(signal.SIGINT)

    hook, sys.unraisablehook = sys.unraisablehook, lambda what: dropped.append(what.exc_type)
    try:
        run_traced(partial(work, model), act)
        for _ in range(100):  # one that came in the last restoration comes a little later
            time.sleep(0.005)
    except KeyboardInterrupt:
        return True
    finally:
        sys.unraisablehook = hook
    return KeyboardInterrupt in dropped


@pytest.mark.parametrize("work", WORK, ids=lambda each: each.__name__)
@pytest.mark.slow
def test_no_line_of_a_restoration_can_be_interrupted(work: Callable[[nn.Module], None]) -> None:
    model = make_model()
    for _ in range(3):  # imports, caches, and tokens that are kept after two passes
        work(model)
    count = run_traced(partial(work, model), lambda _: None)
    handler = signal.getsignal(signal.SIGINT)
    before = state_of(model)
    places = random.Random(0).sample(range(1, count + 1), min(12, count))
    for place in [1, count, *places]:
        assert interrupted(work, model, place), f"line {place} of {count}"
        assert_same_state(before, state_of(model))
        assert signal.getsignal(signal.SIGINT) is handler


def run_interrupted(work: Callable[[], None], at: int | None) -> int:
    """Press Ctrl-C at a point of `work`; return how many points there are.

    Python looks for signals when a function begins and when one that is written in C has returned.
    What a callback of the garbage collector raises, Python drops: that counts as raised.
    """
    count = 0
    dropped: list[type[BaseException]] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        # Python ends generators without looking for signals, and drops what callbacks raise.
        if event == "c_return" or (event == "call" and not frame.f_code.co_flags & CO_GENERATOR):
            count += frame.f_code.co_filename != _weakrefset.__file__
            if count == at:
                count += 1
                signal.raise_signal(signal.SIGINT)

    hook, sys.unraisablehook = sys.unraisablehook, lambda what: dropped.append(what.exc_type)
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
        sys.unraisablehook = hook
    if KeyboardInterrupt in dropped:
        raise KeyboardInterrupt
    if at is not None:
        assert count > at, "the work has fewer points than it had before"
        time.sleep(10)  # one that came in the last restoration comes later, and ends this at once
    return count


@pytest.mark.parametrize("work", WORK, ids=lambda each: each.__name__)
@pytest.mark.parametrize("cases", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_point(work: Callable[[nn.Module], None], cases: int) -> None:
    model = make_model()
    for _ in range(3):  # imports, caches, and tokens that are kept after two passes
        work(model)
    count = run_interrupted(partial(work, model), None)
    handler = signal.getsignal(signal.SIGINT)
    before = state_of(model)
    places = random.Random(0)
    for place in [places.randint(1, count) for _ in range(cases)]:
        with pytest.raises(KeyboardInterrupt):
            run_interrupted(partial(work, model), place)
        assert_same_state(before, state_of(model))
        assert not torch.is_anomaly_enabled()
        assert signal.getsignal(signal.SIGINT) is handler


def test_an_optimizer_that_is_interrupted_does_not_leave_gradients_off() -> None:
    """Its step turns them on again in a function of its own, after calling another one."""
    graph_breaks: list[int] = []
    model = make_model()
    check(model)
    before = state_of(model)

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "graph_break":
            graph_breaks.append(1)
            if len(graph_breaks) == 2:
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(look)
    try:
        with pytest.raises(KeyboardInterrupt):
            check(model)
    finally:
        sys.setprofile(None)
    assert len(graph_breaks) == 2
    assert_same_state(before, state_of(model))


def test_ctrl_c_in_a_loop_over_a_stream_waits_for_its_thread() -> None:
    model = make_model()
    read_stream(model)
    before, threads = state_of(model), threading.active_count()

    def interrupt() -> None:
        for _ in torchfmri.stream(model, None, [1, 2, 3], 40, per=None):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert_same_state(before, state_of(model))
    assert threading.active_count() == threads


def test_a_stream_that_is_closed_in_another_thread_ends() -> None:
    model = make_model()
    before = state_of(model)
    stream = torchfmri.stream(model, None, [1, 2, 3], 40, per=None)
    next(stream)
    closing = threading.Thread(target=stream.close)
    closing.start()
    assert len(list(stream)) < 42
    closing.join()
    assert list(stream) == []
    assert_same_state(before, state_of(model))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")
@pytest.mark.parametrize("trials", [25, pytest.param(100, marks=pytest.mark.slow)])
def test_interrupts_at_any_moment(trials: int) -> None:
    model = make_model()
    scan(model)
    started = time.perf_counter()
    scan(model)
    seconds = time.perf_counter() - started
    before = state_of(model)
    moments = random.Random(1)
    hits = 0
    alarm = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        for _ in range(trials):
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-4, seconds))
                scan(model)
                time.sleep(seconds + 0.05)
            except KeyboardInterrupt:
                hits += 1
            assert_same_state(before, state_of(model))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
    assert hits >= 0.9 * trials  # on a busy machine a call may end before its interrupt comes


def test_an_interrupt_of_the_model_itself_comes_at_once() -> None:
    model = make_model()
    calls: list[int] = []

    def interrupt(*_: object) -> None:
        calls.append(1)
        signal.raise_signal(signal.SIGINT)

    model.head.register_forward_hook(interrupt)
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        scan(model)
    assert len(calls) == 1
    assert_same_state(before, state_of(model))


def test_a_handler_of_the_user_s_is_called_and_left_alone() -> None:
    said: list[int] = []

    def handler(number: int, _: FrameType | None) -> None:
        said.append(number)

    outer = signal.signal(signal.SIGINT, handler)
    try:
        model = make_model()
        model.head.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        torchfmri.Inspector(model).run_inspection(IDS)
        assert said == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, outer)
