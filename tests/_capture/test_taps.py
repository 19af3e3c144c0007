"""Hooks on other people's models: what must not happen to the model, its copies and its memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import (
    assert_close,
    assert_matches,
    assert_same_bits,
    assert_same_grads,
    assert_same_state,
    find_truth,
    grads_of,
    loss_of,
    numbers,
    state_of,
)
from processes import run_in_processes
from torch import Tensor, nn
from torch.nn import functional as F

from torchfmri import InspectionError, Inspector
from torchfmri._capture.taps import CallKey, Taps, Target
from torchfmri._torch.elements import Element

WHAT = (
    "inputs",
    "activations",
    "gradients",
    "input_gradients",
    "parameters",
    "parameter_gradients",
)
GRADIENTS = ("gradients", "input_gradients", "parameter_gradients")


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.Dropout(0.5)
    ).double()


def some_input(*shape: int) -> Tensor:
    return numbers(*(shape or (3, 4)), seed=1)


def watch_all(model: nn.Module, what: Any = WHAT, keep: str = "tensors") -> Inspector:
    inspector = Inspector(model, keep=keep)
    inspector.watch(["", "*"], what)
    return inspector


def hooks_on(model: nn.Module) -> int:
    """Everything that is hooked anywhere on a model."""
    count = 0
    for module in model.modules():
        for name, registered in vars(module).items():
            if "hook" in name and isinstance(registered, dict):
                count += len(registered)
        for parameter in module._parameters.values():
            count += 0 if parameter is None else len(parameter._backward_hooks or ())
    return count


@pytest.fixture
def dynamo() -> Iterator[Any]:
    torch._dynamo.reset()
    torch.compiler.set_stance("default")
    yield torch._dynamo
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


# -- the tap and its sink, without an inspector --------------------------------------------------


class Heard:
    """A sink that remembers what it was told."""

    def __init__(self, refuse: Callable[[str], None] = lambda _: None) -> None:
        self.refuse = refuse
        self.told: list[tuple[Any, ...]] = []

    def values(self, call: CallKey, what: str, elements: list[Element]) -> None:
        self.refuse(what)
        self.told.append((what, *call, [each.path for each in elements]))

    def gradient(
        self, call: CallKey, what: str, path: str, gradient: Tensor, backward: int
    ) -> None:
        self.refuse(what)
        self.told.append((what, *call, path, tuple(gradient.shape)))

    def parameter(self, layer: str, what: str, name: str, tensor: Tensor, backward: int) -> None:
        self.refuse(what)
        self.told.append((what, layer, name))

    def missed(self, layer: str, what: str, reason: str) -> None:
        self.told.append(("missed", layer, what, reason))

    def noted(self, layer: str, text: str) -> None:
        self.told.append(("noted", layer, text))

    def failed(self, layer: str, error: Exception, backward: bool) -> None:
        self.told.append(("failed", layer, str(error), backward))


def test_tap_tells_its_sink_in_the_order_of_events() -> None:
    layer = nn.Linear(4, 2)
    sink = Heard()
    with Taps([Target("layer", layer, frozenset(WHAT))], sink):
        x = torch.ones(3, 4, requires_grad=True)
        layer(x).sum().backward()
    assert sink.told[:5] == [
        ("parameters", "layer", "weight"),
        ("parameters", "layer", "bias"),
        ("inputs", "layer", 0, ["0"]),
        ("activations", "layer", 0, [""]),
        ("gradients", "layer", 0, "", (3, 2)),
    ]
    assert ("input_gradients", "layer", 0, "0", (3, 4)) in sink.told
    assert ("parameter_gradients", "layer", "weight") in sink.told
    assert hooks_on(layer) == 0


@pytest.mark.parametrize("what", WHAT)
def test_error_in_the_sink_never_reaches_the_model(what: str) -> None:
    """A failure of ours is reported; loss and `.grad` of the run are those of an unwatched one."""

    def refuse(asked: str) -> None:
        if asked == what:
            raise OSError(f"no room for {asked}")

    x = some_input().requires_grad_()
    plain, model = small_model().eval(), small_model().eval()
    plain_loss = loss_of(plain(x))
    plain_loss.backward()
    sink = Heard(refuse)
    targets = [Target(n, m, frozenset(WHAT)) for n, m in model.named_modules()]
    with Taps(targets, sink):
        loss = loss_of(model(x))
        loss.backward()
    assert_same_bits(loss, plain_loss, "loss")
    assert_same_grads(grads_of(model), grads_of(plain))
    failures = [each for each in sink.told if each[0] == "failed"]
    assert failures
    assert all(f"no room for {what}" in each[2] for each in failures)
    assert {each[3] for each in failures} == {what in GRADIENTS}


def test_taps_detach_when_attaching_fails() -> None:
    good, bad = nn.Linear(4, 4), nn.Linear(4, 4)

    def refuse(*_: Any, **__: Any) -> None:
        raise TypeError("takes no hooks")

    bad.register_forward_hook = refuse  # type: ignore[method-assign]
    bad._forward_hooks_with_kwargs = None  # type: ignore[assignment]  # as in another torch
    targets = [Target(str(n), m, frozenset(WHAT)) for n, m in enumerate((good, bad))]
    with pytest.raises(TypeError, match="takes no hooks"), Taps(targets, Heard()):
        pass
    assert hooks_on(good) == hooks_on(bad) == 0


def test_detaching_twice_is_harmless() -> None:
    layer = nn.Linear(4, 4)
    theirs = layer.register_forward_hook(lambda *_: None)
    taps = Taps([Target("", layer, frozenset(WHAT))], Heard())
    with taps:
        taps.detach()
        assert hooks_on(layer) == 1
    assert hooks_on(layer) == 1
    theirs.remove()


# -- hooks go away, and only ours ----------------------------------------------------------------


def test_hooks_of_others_stay_and_keep_their_order() -> None:
    model = small_model()
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("first"))
    model[0].register_forward_pre_hook(lambda *_: calls.append("pre"))
    model[0].weight.register_hook(lambda g: None)
    before = state_of(model)
    with watch_all(model).recording():
        pass
    assert_same_state(before, state_of(model))
    with watch_all(model).recording():
        model[0].register_forward_hook(lambda *_: calls.append("second"))
    model(some_input())
    assert calls == ["pre", "first", "second"]


def test_hook_that_changes_the_output_is_seen_and_respected() -> None:
    """Registered before the recording: we see what it returned, and gradients are at that."""
    model = small_model().eval()
    model[0].register_forward_hook(lambda _, __, output: output * 2)
    model[2].register_forward_pre_hook(lambda _, arguments: (arguments[0] + 1,))
    x = some_input()
    truth = find_truth(model, lambda each: loss_of(each(x)))
    with watch_all(model).recording() as inspection:
        loss_of(model(x)).backward()
    assert_matches(inspection, truth)
    assert_same_grads(grads_of(model), truth.grads)


def test_nothing_of_ours_fires_after_the_block() -> None:
    """A graph built inside and differentiated outside belongs to nobody."""
    model = small_model()
    with watch_all(model).recording() as inspection:
        loss = loss_of(model(some_input()))
    loss.backward()
    assert inspection["0"].gradients is None
    assert hooks_on(model) == 0
    assert "gradients" in inspection.missing["0"]


@pytest.mark.parametrize(
    "what", [WHAT, ("activations",), GRADIENTS], ids=["all", "forward", "back"]
)
@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_training_steps_are_bit_equal(what: Any, keep: str) -> None:
    """Three optimizer steps with dropout: parameters afterwards are the unwatched ones."""

    def train(model: nn.Module, watched: contextlib.AbstractContextManager[Any]) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        torch.manual_seed(5)
        for _ in range(3):
            with watched:
                optimizer.zero_grad()
                loss_of(model(some_input())).backward()
                optimizer.step()

    plain, model = small_model(), small_model()
    train(plain, contextlib.nullcontext())
    inspector = watch_all(model, what, keep)

    class Watched(contextlib.AbstractContextManager[Any]):
        def __enter__(self) -> Any:
            self.block = inspector.recording()
            return self.block.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.block.__exit__(*error)

    train(model, Watched())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same_bits(ours, theirs, "after training")


def test_optimizer_in_backward() -> None:
    """The gradient is seen before the optimizer uses it up."""

    def make() -> nn.Module:
        model = small_model().eval()
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(each: Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                each.grad = None

            parameter.register_post_accumulate_grad_hook(step)
        return model

    x = some_input()
    plain, model, pristine = make(), make(), small_model().eval()
    loss_of(plain(x)).backward()
    with watch_all(model).recording() as inspection:
        loss_of(model(x)).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same_bits(ours, theirs, "after the step")
    loss_of(pristine(x)).backward()
    for layer in ("0", "2"):
        for name, ours in inspection[layer].parameter_gradients.items():
            expected = pristine.get_submodule(layer).get_parameter(name).grad
            assert_same_bits(ours, expected, f"{layer}.{name}")


# -- copies of a watched model -------------------------------------------------------------------


def copies() -> dict[str, Callable[[nn.Module], nn.Module]]:
    def saved(model: nn.Module) -> nn.Module:
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        return torch.load(stream, weights_only=False)

    return {
        "deepcopy": copy.deepcopy,
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "torch.save": saved,
    }


@pytest.mark.parametrize("make_copy", copies().values(), ids=copies())
def test_copy_made_while_watched_is_silent(make_copy: Any) -> None:
    model = small_model().eval()
    x = some_input()
    with watch_all(model).recording() as inspection:
        loss_of(model(x)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            twin = make_copy(model)
        twin.zero_grad()
        loss_of(twin(x)).backward()
        assert all(len(record.calls) == 1 for record in inspection.values())
    assert all(len(inspection[layer].calls) == 1 for layer in "012")
    loss_of(twin(x)).backward()  # and afterwards
    assert len(inspection["0"].calls[0].backwards) == 1
    assert set(twin.state_dict()) == set(model.state_dict())
    # The twin can be watched by itself.
    with watch_all(twin).recording() as other:
        twin(x)
    assert_same_bits(other["2"].activations, inspection["2"].activations, "the twin's own")


def test_copies_work_inside_the_recording_with_parameter_hooks_attached() -> None:
    model = small_model()
    with watch_all(model, GRADIENTS).recording(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(copy.deepcopy(model).state_dict()) == set(model.state_dict())
        stream = io.BytesIO()
        torch.save(model.state_dict(), stream)
        torch.save(list(model.parameters()), stream)
        copy.copy(model)


def test_shallow_copy_shares_children_but_not_our_record_of_itself() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    model = Model()
    inspector = watch_all(model, "activations")
    with inspector.recording() as inspection:
        twin = copy.copy(model)
        twin(some_input())
    assert inspection[""].calls == []


# -- exceptions and interrupts -------------------------------------------------------------------


class Failing(nn.Module):
    """Raises in the middle of its forward, or hands an error to its backward."""

    def __init__(self, error: type[BaseException], where: str) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.error, self.where = error, where

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        if self.where == "forward":
            raise self.error("from the model")
        if self.where == "backward":
            h.register_hook(self.refuse)
        return self.after(h)

    def refuse(self, _: Tensor) -> None:
        raise self.error("from the model")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_passes_through_and_hooks_are_gone(error: Any, where: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Failing(error, where))
    inspector = watch_all(model)
    before = state_of(model)

    def run() -> None:
        with inspector.recording():
            model(torch.ones(3, 4)).sum().backward()

    with pytest.raises(error, match="from the model") as caught:
        run()
    inspection = inspector.inspection
    assert type(caught.value) is error
    assert hooks_on(model) == 0
    if where == "forward":
        assert_same_state(before, state_of(model))
    assert inspection["0"].activations.shape == (3, 4)  # what there was is kept
    model[1].where = "nowhere"
    model.zero_grad()
    with inspector.recording() as again:  # and the inspector works on
        model(torch.ones(3, 4)).sum().backward()
    assert all(len(again[layer].calls) == 1 for layer in ("0", "1", "1.before", "1.after"))
    assert again["1.before"].gradients is not None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_that_the_user_catches_inside_the_recording(error: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Failing(error, "forward")).double()
    x = some_input()
    with watch_all(model).recording() as inspection:
        with contextlib.suppress(error):
            model(x)
        model[1].where = "nowhere"
        loss_of(model(x)).backward()
    truth = find_truth(model, lambda each: loss_of(each(x)))
    for layer, calls in truth.calls.items():
        ours = inspection[layer].calls[-1]
        assert_same_bits(ours.activations[0], calls[0].activations[0], layer)
        assert_close(ours.gradients[0], calls[0].gradients[0], layer)
        assert_close(ours.input_gradients[0], calls[0].input_gradients[0], layer)


def test_exception_that_the_model_catches_itself() -> None:
    class Retry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.risky, self.safe = Failing(ValueError, "forward"), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.risky(x)
            except ValueError:
                return self.safe(x)

    model = nn.Sequential(nn.Linear(4, 4), Retry()).double()
    x = some_input()

    def run(each: nn.Module) -> Tensor:
        return loss_of(each(x))

    plain = copy.deepcopy(model)
    plain_loss = run(plain)
    plain_loss.backward()
    with watch_all(model).recording() as inspection:
        loss = run(model)
        loss.backward()
    assert_same_bits(loss, plain_loss, "loss")
    assert_same_grads(grads_of(model), grads_of(plain))
    assert inspection["1.safe"].gradients is not None
    assert inspection["1"].input_gradients is not None
    with pytest.raises(ValueError, match="from the model"):
        model[1].risky(x)


def test_exception_in_the_block_itself() -> None:
    model = small_model()

    def run() -> None:
        with watch_all(model).recording():
            model(some_input())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert hooks_on(model) == 0


# -- several inspectors --------------------------------------------------------------------------


def test_two_inspectors_at_once_see_the_same() -> None:
    model = small_model().eval()
    x = some_input()
    truth = find_truth(model, lambda each: loss_of(each(x)))
    one, two = watch_all(model), watch_all(model)
    with one.recording() as first:
        with two.recording() as second:
            loss_of(model(x)).backward()
        assert hooks_on(model) > 0
        model(x)
    assert hooks_on(model) == 0
    assert_matches(second, truth)
    assert [len(each["0"].calls) for each in (first, second)] == [2, 1]
    assert_same_grads(grads_of(model), truth.grads)


def test_inspectors_may_end_in_any_order(dynamo: Any) -> None:
    model = small_model().eval()
    before = state_of(model)
    one, two = watch_all(model).recording(), watch_all(model).recording()
    one.__enter__()
    second = two.__enter__()
    one.__exit__(None, None, None)
    model(some_input())
    assert len(second["0"].calls) == 1
    two.__exit__(None, None, None)
    assert_same_state(before, state_of(model))


def test_inspectors_on_parts_of_one_model() -> None:
    model = small_model().eval()
    with watch_all(model).recording() as whole, watch_all(model[0]).recording() as part:
        model(some_input())
    assert_same_bits(whole["0"].activations, part[""].activations, "the same layer")


def test_one_inspector_does_not_record_twice_at_once() -> None:
    model = small_model()
    inspector = watch_all(model)
    with inspector.recording():
        with pytest.raises(InspectionError, match=r"already recording.*second Inspector"):
            inspector.run_inspection(some_input(), loss="sum")
        with pytest.raises(InspectionError, match="already recording"), inspector.recording():
            pass
        assert hooks_on(model) > 0
    assert hooks_on(model) == 0


# -- threads -------------------------------------------------------------------------------------


def in_threads(*acts: Callable[[], None]) -> None:
    """Run all at the same time, in lockstep at the start; the first error is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(acts))

    def guarded(act: Callable[[], None]) -> None:
        try:
            start.wait()
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_two_threads_call_one_model() -> None:
    """Every call has the gradients of its own output: matched by value, since order is open."""
    model = small_model().eval()
    batches = [[some_input(3, 4) * (1 + i + 10 * t) for i in range(8)] for t in range(2)]

    def work(batch: list[Tensor]) -> Callable[[], None]:
        def act() -> None:
            for x in batch:
                loss_of(model(x.clone().requires_grad_())).backward()

        return act

    with watch_all(
        model, ["inputs", "activations", "gradients", "input_gradients"]
    ).recording() as r:
        in_threads(*map(work, batches))
    calls = r["2"].calls
    assert len(calls) == 16
    truths = [
        find_truth(model, lambda each, x=x: loss_of(each(x.clone().requires_grad_())))
        for batch in batches
        for x in batch
    ]
    for layer in ("0", "2", ""):
        for truth in truths:
            expected = truth.calls[layer][0]
            (ours,) = [
                call for call in r[layer].calls if torch.equal(call.inputs[0], expected.inputs[0])
            ]
            assert_same_bits(ours.activations[0], expected.activations[0], layer)
            assert_close(ours.gradients[0], expected.gradients[0], layer)
            assert_close(ours.input_gradients[0], expected.input_gradients[0], layer)
    assert sorted(call.index for call in calls) == list(range(16))


def test_two_threads_with_a_model_and_an_inspector_each(dynamo: Any) -> None:
    models = [small_model().eval() for _ in range(2)]
    stance = state_of(models[0]).facts["stance"]
    found: dict[int, Any] = {}

    def work(index: int) -> Callable[[], None]:
        def act() -> None:
            with watch_all(models[index]).recording() as inspection:
                for _ in range(4):
                    loss_of(models[index](some_input() * (index + 1))).backward()
            found[index] = inspection

        return act

    in_threads(work(0), work(1))
    assert state_of(models[0]).facts["stance"] == stance
    for index, model in enumerate(models):
        assert hooks_on(model) == 0
        x = some_input() * (index + 1)
        truth = find_truth(model.requires_grad_(), lambda each: loss_of(each(x)))  # noqa: B023
        for call in found[index]["0"].calls:
            assert_close(call.gradients[0], truth.calls["0"][0].gradients[0], f"thread {index}")


def test_backward_pass_in_another_thread() -> None:
    model = small_model().eval()
    x = some_input()
    truth = find_truth(model, lambda each: loss_of(each(x)))
    with watch_all(model).recording() as inspection:
        loss = loss_of(model(x))
        in_threads(loss.backward)
    assert_matches(inspection, truth)


# -- memory --------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


LEAKS: dict[str, Callable[[Tensor], Any]] = {
    "linear": lambda y: y.sum(),
    "written": lambda y: y.add_(1).sum(),
    "view": lambda y: y[:, :1].mul_(2).sum() + y.sum(),
}


class Anchor:
    """Something that lives as long as the autograd graph that holds it."""


class Anchored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Anchor) -> Tensor:
        ctx.anchor = anchor
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@pytest.mark.parametrize("backward", [True, False], ids=["backward", "forward"])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["2d", "3d"])
@pytest.mark.parametrize("use", LEAKS.values(), ids=LEAKS)
@pytest.mark.one_in(3)
def test_output_and_graph_die_during_the_recording(use: Any, shape: Any, backward: bool) -> None:
    """By reference counting alone: hooks that hold a tensor would keep its graph for ever."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    with no_garbage_collector(), watch_all(model, keep="statistics").recording() as inspection:
        for _ in range(2):
            anchor = Anchor()
            hidden = model[0](Anchored.apply(some_input(*shape).requires_grad_(), anchor))
            y = model[1](hidden)
            loss = use(y)
            died = [weakref.ref(each) for each in (hidden, y, loss, anchor)]
            if backward:
                loss.backward()
            del hidden, y, loss, anchor
            assert [each() is None for each in died] == [True] * 4
        assert len(inspection["0"].calls) == 2


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["2d", "3d"])
def test_nothing_lives_on_after_the_recording(shape: Any) -> None:
    with no_garbage_collector():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)).double()
        inspector = watch_all(model, keep="statistics")
        with inspector.recording():
            y = model(some_input(*shape))
            y.sum().backward()
        died = [weakref.ref(y), weakref.ref(model[0]), weakref.ref(model)]
        del y, model, inspector
    gc.collect()
    assert [each() is None for each in died] == [True] * 3


def test_memory_of_outputs_is_freed_while_their_graph_lives() -> None:
    """An in-place ReLU's graph keeps its result; we add no second copy of a large tensor."""
    layer = nn.Linear(64, 64)
    storages = []
    with watch_all(layer, keep="statistics").recording():
        y = layer(torch.randn(2, 512, 64))
        storages.append(weakref.ref(y.untyped_storage()))
        loss = y.sum()
        del y
        assert storages[0]() is None, "sum() saves nothing, so nobody may hold the output"
        loss.backward()


def test_inspection_holds_neither_model_nor_graph() -> None:
    model = small_model()
    inspector = watch_all(model)
    with inspector.recording() as inspection:
        loss_of(model(some_input())).backward()
    gone = weakref.ref(model)
    del inspector, model
    gc.collect()
    assert gone() is None
    assert not inspection["0"].activations.requires_grad
    assert not inspection["0"].gradients.requires_grad
    assert inspection["0"].activations._base is None
    assert copy.deepcopy(inspection)["0"].activations.shape == (3, 5)
    assert pickle.loads(pickle.dumps(inspection))["0"].gradients.shape == (3, 5)


# -- compiled models -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before first run", "after first run"])
def test_compiled_model_is_seen_and_not_compiled_again(
    backend: str, when: str, dynamo: Any
) -> None:
    model = small_model().eval()
    x = some_input()
    truth = find_truth(model, lambda each: loss_of(each(x)))
    compiled_frames = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal compiled_frames
        compiled_frames += 1
        if backend == "eager":
            return graph.forward
        return dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(model, backend=counting)
    if when == "after first run":
        compiled(x)
    frames = compiled_frames
    stance = state_of(model).facts["stance"]
    with watch_all(compiled).recording() as inspection:
        loss_of(compiled(x)).backward()
    assert compiled_frames == frames, "compiled while watched"
    assert state_of(model).facts["stance"] == stance
    assert_matches(inspection, truth)
    model.zero_grad()
    loss_of(compiled(x)).backward()
    compiled(x)
    assert compiled_frames == max(frames, 1), "compiled once, never again"
    assert_same_grads(grads_of(model), truth.grads)
    model.zero_grad()
    again = watch_all(compiled).run_inspection(x, loss=loss_of)
    assert_matches(again, truth)
    compiled(x)
    assert compiled_frames == max(frames, 1)
    assert hooks_on(model) == 0


def test_fullgraph_model_can_be_watched(dynamo: Any) -> None:
    """Hooks would break its one graph; run eagerly they do not."""
    model = small_model().eval()
    x = some_input()
    truth = find_truth(model, lambda each: loss_of(each(x)))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        with watch_all(compiled).recording() as inspection:
            loss_of(compiled(x)).backward()
        assert_matches(inspection, truth)
        compiled(x)


def test_module_compiled_in_place(dynamo: Any) -> None:
    model = small_model().eval()
    x = some_input()
    truth = find_truth(model, lambda each: loss_of(each(x)))
    model.compile(backend="eager")
    model(x)
    with watch_all(model).recording() as inspection:
        loss_of(model(x)).backward()
    assert_matches(inspection, truth)


def test_compiled_part_of_a_model(dynamo: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), small_model()).double().eval()
    x = some_input()
    truth = find_truth(model, lambda each: loss_of(each(x)))
    model[1] = torch.compile(model[1], backend="eager")
    model(x)
    with watch_all(model).recording() as inspection:
        loss_of(model(x)).backward()
    assert set(inspection) == set(truth.calls)
    assert_matches(inspection, truth)


def test_stance_of_the_user_comes_back(dynamo: Any) -> None:
    model = small_model().eval()
    with torch.compiler.set_stance("eager_on_recompile"):
        before = state_of(model).facts["stance"]
        with watch_all(model).recording():
            assert state_of(model).facts["stance"] != before
            model(some_input())
        assert state_of(model).facts["stance"] == before
        with contextlib.suppress(KeyboardInterrupt), watch_all(model).recording():
            raise KeyboardInterrupt
        assert state_of(model).facts["stance"] == before


# -- torch.func, scripting, tracing --------------------------------------------------------------


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functional_call", "vmap_of_grad"])
def test_torch_func_works_and_is_reported(transform: str) -> None:
    model = small_model().eval()
    model[1] = nn.Tanh()
    x = some_input()
    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def call(weights: Any, data: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (data,)).pow(2).sum()

    acts: dict[str, Callable[[], Any]] = {
        "vmap": lambda: torch.func.vmap(model)(x),
        "grad": lambda: torch.func.grad(call)(parameters, x)["0.weight"],
        "jvp": lambda: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
        "functional_call": lambda: call(parameters, x),
        "vmap_of_grad": lambda: torch.func.vmap(torch.func.grad(call), in_dims=(None, 0))(
            parameters, x
        )["0.weight"],
    }
    expected = acts[transform]()
    for keep in ("tensors", "statistics"):
        with watch_all(model, keep=keep).recording() as inspection:
            found = acts[transform]()
        assert_same_bits(found.detach(), expected.detach(), transform)
        assert hooks_on(model) == 0
        if transform == "functional_call":
            assert inspection["0"].calls[0].value("activations").shape == (3, 5)
        else:
            assert "torch.func" in inspection.missing["0"]
        repr(inspection)
        inspection.table()


def test_scripted_child_is_listed_with_the_reason() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))

    x = some_input().float()
    plain, model = make(), make()
    hidden = plain[0](x)
    hidden.retain_grad()
    loss_of(plain[2](plain[1](hidden))).backward()
    with watch_all(model).recording() as inspection:
        loss_of(model(x)).backward()
    assert_same_grads(grads_of(model), grads_of(plain))
    assert "scripted" in inspection.missing["1"]
    assert inspection["1"].calls == []
    assert_close(inspection["0"].gradients, hidden.grad, "the layer before the scripted one")
    assert inspection["2"].calls[0].input_gradients[0] is not None


def test_traced_child_never_fires_inside_and_says_so() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(inner, torch.ones(1, 4)))
    with watch_all(model).recording() as inspection:
        model(torch.ones(3, 4)).sum().backward()
    for layer in ("1", "1.0", "1.1"):
        assert layer in inspection.missing
        assert inspection[layer].calls == []
    assert "scripted" in inspection.missing["1"] or "traced" in inspection.missing["1"]


# -- odd modules ---------------------------------------------------------------------------------


def test_inference_mode_and_no_grad() -> None:
    model = small_model().eval()
    x = some_input()
    for mode in (torch.no_grad, torch.inference_mode):
        for keep in ("tensors", "statistics"):
            with watch_all(model, keep=keep).recording() as inspection, mode():
                output = model(x)
            value = inspection[""].calls[0].value("activations")
            assert value.statistics.l2 == pytest.approx(float(output.norm()))
            assert "could not" not in str(inspection.missing)
            assert "gradients" in inspection.missing["0"]
        if mode is torch.inference_mode:
            with mode(), watch_all(model).recording() as inspection:
                output = model(x)
            assert_same_bits(inspection[""].activations, output, "inference tensor")
            assert "could not" not in str(inspection.missing)


def test_lazy_linear_is_seen_while_it_becomes_linear() -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(2))
    x = torch.ones(3, 4)
    with watch_all(model).recording() as inspection:
        loss = model(x).sum()
        loss.backward()
    assert type(model[0]) is nn.Linear
    assert hooks_on(model) == 0
    assert torch.equal(inspection["0"].activations, F.linear(x, model[0].weight, model[0].bias))
    assert inspection["2"].gradients.shape == (3, 2)
    with watch_all(model).recording() as again:  # an ordinary model from now on
        model(x).sum().backward()
    assert set(again["0"].parameter_gradients) == {"weight", "bias"}


def test_nested_tensor_of_the_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    x = torch.randn(2, 4, 8)
    padding = torch.tensor([[False, False, False, False], [False, False, True, True]])
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=padding)
    for keep in ("tensors", "statistics"):
        inspector = watch_all(model, ["inputs", "activations"], keep)
        with inspector.recording() as inspection, torch.no_grad():
            output = model(x, src_key_padding_mask=padding)
        assert output.shape == plain.shape
        torch.testing.assert_close(output[~padding], plain[~padding], rtol=1e-4, atol=1e-5)
        record = inspection["layers.0"]
        assert record.calls
        value = record.calls[0].value("activations")
        assert value.statistics.count in (2 * 4 * 8, 6 * 8)
        assert value.statistics.nan == 0
        assert "could not" not in str(inspection.missing)
        inspection.table()


class Odd(nn.Module):
    """Returns what its function makes of the input."""

    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Any:
        return self.act(x)


ODD: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "integers": (lambda x: x.argmax(-1), 3),
    "booleans": (lambda x: x > 0, 12),
    "complex": (lambda x: torch.complex(x, x), 12),
    "bfloat16": (lambda x: x.bfloat16(), 12),
    "float8": (lambda x: x.to(torch.float8_e4m3fn), 12),
    "empty": (lambda x: x[:0], 0),
    "scalar": (lambda x: x.sum(), 1),
    "sparse": (lambda x: x.to_sparse(), 12),
    "sparse_csr": (lambda x: x.detach().to_sparse_csr(), 12),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]), 6),
    "expanded": (lambda x: x[:1].expand(5, 4), 20),
    "quantized": (lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8), 12),
    "conjugate": (lambda x: torch.complex(x, x).conj(), 12),
    "float16": (lambda x: x.half(), 12),
    "bits": (lambda x: torch.zeros(3, 4, dtype=torch.uint16), 12),
    "infinite": (lambda x: x / 0, 12),
    "size": (lambda x: x.shape, -1),
    "text": (lambda x: "text", -1),
    "none": (lambda x: None, -1),
    "generator": (lambda x: (each for each in x), -1),
    "meta": (lambda x: torch.empty(3, 4, device="meta"), -2),
}


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
@pytest.mark.parametrize(("act", "count"), ODD.values(), ids=ODD)
def test_any_output_is_kept_or_has_a_reason(act: Any, count: int, keep: str) -> None:
    """Never a crash in the user's forward."""
    model = nn.Sequential(nn.Linear(4, 4), Odd(act))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested and csr tensors warn of being new
        with watch_all(model, ["inputs", "activations"], keep).recording() as inspection:
            model(torch.randn(3, 4))
        record = inspection["1"]
        inspection.table()
    if count >= 0:
        assert record.calls[0].statistics().count == count
        assert "1" not in inspection.missing
    elif count == -1:
        assert len(record.calls) == 1
        assert record.calls[0].activations == []
    else:
        assert "1" in inspection.missing


@pytest.mark.slow
def test_ddp_in_one_process(tmp_path: Path) -> None:
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("no gloo")
    run_in_processes(inspect_ddp, tmp_path, 1)


def inspect_ddp(rank: int, folder: str) -> None:
    model = small_model().eval()
    x = some_input()
    truth = find_truth(model, lambda each: loss_of(each(x)))
    wrapped = nn.parallel.DistributedDataParallel(model)
    inspector = watch_all(wrapped)
    assert inspector.layers() == ["0", "1", "2", "3"]
    with inspector.recording() as inspection:
        loss_of(wrapped(x)).backward()
    assert_matches(inspection, truth)
    assert_same_grads(grads_of(model), truth.grads)
    model.zero_grad()
    before = state_of(wrapped)
    again = inspector.run_inspection(x, loss=loss_of)
    assert_same_state(before, state_of(wrapped))
    assert_matches(again, truth)
    wrapped(x)  # DDP is not confused by a run that it did not see
    loss_of(wrapped(x)).backward()


def test_watched_children_of_a_module_that_is_used_as_a_namespace() -> None:
    """ModuleList and ModuleDict are never called, and that is said."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])
            self.heads = nn.ModuleDict({"a": nn.Linear(4, 4)})

        def forward(self, x: Tensor) -> Tensor:
            return self.heads["a"](self.blocks[0](x))

    with watch_all(Model()).recording() as inspection:
        pass
    assert "never called" in inspection.missing["blocks"]
    model = Model()
    with watch_all(model).recording() as inspection:
        model(torch.ones(1, 4)).sum().backward()
    assert "never called" in inspection.missing["heads"]
    assert "blocks.0" not in inspection.missing or "never" not in inspection.missing["blocks.0"]


def test_weight_used_by_the_parent_is_listed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.unused = nn.Embedding(10, 4), nn.Linear(4, 10)

        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(self.embedding(tokens), self.unused.weight)

    model = Tied()
    with watch_all(model).recording() as inspection:
        model(torch.tensor([[1, 2]])).sum().backward()
    assert "never called" in inspection.missing["unused"]
    weight = inspection["unused"].parameter_gradients["weight"]
    assert_same_bits(weight, model.unused.weight.grad, "weight")


# -- in odd company ------------------------------------------------------------------------------


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


COMPANY: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "deterministic": deterministic,
    "default_device": lambda: torch.device("meta"),
    "default_dtype": default_dtype,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "single_threaded_backward": lambda: torch.autograd.set_multithreading_enabled(False),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["2d", "3d"])
@pytest.mark.parametrize("company", COMPANY.values(), ids=COMPANY)
def test_modes_of_the_user(company: Any, shape: Any) -> None:
    model = small_model()[:3]
    x = some_input(*shape)
    weight = torch.linspace(1, 2, 4, dtype=torch.float64)

    def run(each: nn.Module) -> Tensor:
        with company():
            return (each(x).relu_() * weight).sum()

    truth = find_truth(model, run)
    for keep in ("tensors", "statistics"):
        model.zero_grad()
        with company(), watch_all(model, keep=keep).recording() as inspection:
            loss = (model(x).relu_() * weight).sum()
            loss.backward()
        assert_same_bits(loss, truth.loss, "loss")
        assert_same_grads(grads_of(model), truth.grads)
        assert "could not" not in str(inspection.missing)
        if keep == "tensors":
            assert_matches(inspection, truth)
        else:
            count = inspection["0"].calls[0].statistics("gradients").count
            assert count == truth.calls["0"][0].gradients[0].numel()


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["2d", "3d"])
def test_retain_grad_of_the_user(shape: Any) -> None:
    held: list[Tensor] = []

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            held.append(self.layer(x))
            held[-1].retain_grad()
            return held[-1].tanh()

    model = Holds().double()
    with watch_all(model).recording() as inspection:
        loss_of(model(some_input(*shape))).backward()
    assert_same_bits(inspection["layer"].gradients, held[0].grad, "retain_grad")


def test_fake_tensors_have_no_values_and_do_no_harm() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for keep in ("statistics", "tensors"):
        with FakeTensorMode():
            model = nn.Linear(4, 4)
            with watch_all(model, ["inputs", "activations"], keep).recording() as inspection:
                assert model(torch.ones(3, 4)).shape == (3, 4)
        repr(inspection)
        if keep == "statistics":
            assert "" in inspection.missing


def test_our_work_is_not_counted_as_the_models() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = small_model().eval()

    def flops(watched: contextlib.AbstractContextManager[Any]) -> int:
        with watched, FlopCounterMode(display=False) as counter:
            loss_of(model(some_input())).backward()
        return counter.get_total_flops()

    plain = flops(contextlib.nullcontext())
    assert flops(watch_all(model, keep="statistics").recording()) == plain
    assert flops(watch_all(model).recording()) == plain
