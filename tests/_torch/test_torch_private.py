"""Each private symbol is there on this torch, and things still work on one that lacks it."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import assert_matches, assert_same_grads, find_truth, grads_of, loss_of
from torch import nn

import torchfmri
from torchfmri import Inspector
from torchfmri._torch import private

WHAT = ("inputs", "activations", "gradients", "input_gradients", "parameter_gradients")


def residual_model() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return x + self.b(torch.relu(self.a(x))) * x

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Block(), nn.Linear(4, 4)).double()


def record(model: nn.Module, x: Any) -> Any:
    inspector = Inspector(model, keep="tensors")
    inspector.watch(["", "*"], WHAT)
    with inspector.recording() as inspection:
        loss_of(model(x)).backward()
    return inspection


# -- present on this torch -----------------------------------------------------------------------


def test_current_backward_counts() -> None:
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(private.current_backward()))
    y.backward(retain_graph=True)
    y.backward()
    assert private.current_backward() == private.NO_BACKWARD
    assert len(set(seen)) == 2
    assert private.NO_BACKWARD not in seen


def test_end_of_backward_is_called_once_after_everything() -> None:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)

    def hook(_: Any) -> None:
        assert private.at_end_of_backward(lambda: order.append("end"))
        order.append("hook")

    y = x * 2
    y.register_hook(hook)
    x.register_hook(lambda _: order.append("leaf"))
    y.backward()
    assert order == ["hook", "leaf", "end"]


def test_sequence_numbers_tell_earlier_from_later_nodes() -> None:
    x = torch.ones(1, requires_grad=True)
    before = x * 2
    start = private.sequence_number()
    after = before * 2
    assert private.node_sequence_number(before.grad_fn) < start
    assert private.node_sequence_number(after.grad_fn) >= start


def test_transformed_tensors_are_known() -> None:
    seen = []

    def look(x: Any) -> Any:
        seen.append(private.is_transformed(x))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    assert seen == [True, True]
    assert not private.is_transformed(torch.ones(1))


def test_post_accumulate_hooks_are_known() -> None:
    parameter = nn.Parameter(torch.ones(1))
    assert not private.has_post_accumulate_hooks(parameter)
    handle = parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert private.has_post_accumulate_hooks(parameter)
    handle.remove()
    assert not private.has_post_accumulate_hooks(parameter)
    assert not private.has_post_accumulate_hooks(torch.ones(1))


# -- absent --------------------------------------------------------------------------------------


@pytest.fixture(params=["graph task", "queue_callback", "engine", "sequence", "functorch"])
def without(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A torch that lacks one symbol."""
    if request.param == "graph task":
        _replace(monkeypatch, "current_backward", lambda: private.NO_BACKWARD)
    elif request.param == "queue_callback":
        # The engine is needed to run at all; only its callbacks are taken away.
        class Engine:
            run_backward = staticmethod(torch.autograd.Variable._execution_engine.run_backward)

        monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", Engine(), raising=True)
    elif request.param == "engine":
        monkeypatch.setattr(private, "at_end_of_backward", lambda _: False)
        import torchfmri._torch.graph as backwards

        monkeypatch.setattr(backwards, "at_end_of_backward", lambda _: False)
    elif request.param == "sequence":
        monkeypatch.delattr(torch.autograd, "_get_sequence_nr")
        import torchfmri._torch.graph as edges

        monkeypatch.setattr(
            edges, "node_sequence_number", lambda _: private.node_sequence_number(object())
        )
    else:
        _replace(monkeypatch, "is_transformed", lambda tensor: False)
    return request.param


def _replace(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Put another function in the place of one of ours, wherever it was imported."""
    for module in [each for key, each in sys.modules.items() if key.startswith("torchfmri")]:
        if name in vars(module):
            monkeypatch.setattr(module, name, value)


def test_a_plain_run_is_right_without_the_symbol(without: str) -> None:
    model = residual_model()
    x = torch.randn(3, 4, dtype=torch.float64)
    truth = find_truth(model, lambda each: loss_of(each(x)))
    inspection = record(model, x)
    assert_matches(inspection, truth)
    assert_same_grads(grads_of(model), truth.grads)


def test_fallback_values(without: str) -> None:
    if without == "graph task":
        assert private.current_backward() == private.NO_BACKWARD
    elif without == "queue_callback":
        assert not private.at_end_of_backward(lambda: None)
    elif without == "sequence":
        assert private.sequence_number() == 0
        assert private.node_sequence_number(object()) > 1 << 60
    elif without == "functorch":
        assert not private.is_transformed(torch.ones(1))


def test_torch_func_does_not_crash_without_its_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace(monkeypatch, "is_transformed", lambda tensor: False)
    model = residual_model()
    inspector = Inspector(model)
    inspector.watch("*", ["activations", "inputs"])
    x = torch.randn(3, 4, dtype=torch.float64)
    expected = torch.func.vmap(model)(x)
    with inspector.recording() as inspection:
        found = torch.func.vmap(model)(x)
    assert torch.equal(found, expected)
    repr(inspection)


def test_post_accumulate_hooks_without_the_symbol() -> None:
    assert not private.has_post_accumulate_hooks(object())  # type: ignore[arg-type]


# -- all in one file -----------------------------------------------------------------------------


def private_names(tree: ast.AST) -> list[str]:
    """Dotted names that begin with torch and have a part that begins with one underscore."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            name = ast.unparse(node)
            if name.startswith("torch.") and not node.attr.startswith("__"):
                found.append(name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            parts = [*(node.module or "").split("."), *(each.name for each in node.names)]
            found += [f"{node.module}: {part}" for part in parts if re.match("_[^_]", part)]
    return found


def test_no_other_file_touches_private_names_of_torch() -> None:
    # Base classes of layers, which have no public name.
    allowed = "torch.nn.modules."
    found = {
        f"{path.name}: {name}"
        for path in sorted(Path(torchfmri.__file__).parent.rglob("*.py"))
        if path.parts[-2:] != ("_torch", "private.py")
        for name in private_names(ast.parse(path.read_text(encoding="utf-8")))
        if not name.startswith(allowed)
    }
    assert not found


def test_private_names_are_noticed() -> None:
    tree = ast.parse("torch._C.x(); torch.a._b; from torch._x import y; torch.__version__")
    assert set(private_names(tree)) == {"torch._C", "torch.a._b", "torch._x: _x"}


# -- the graph of a failed backward pass ---------------------------------------------------------


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return 2 * g


def test_errors_of_saved_tensors() -> None:
    x = torch.ones(2, requires_grad=True)
    y = torch.sigmoid(x)
    assert private.saved_tensor_errors(y.grad_fn) == {"result": ""}
    assert private.saved_tensor_errors(Twice.apply(x).grad_fn) == {"tensors": ""}
    y.data.add_(0)  # does not count as a change
    assert private.saved_tensor_errors(y.grad_fn) == {"result": ""}
    node = y.grad_fn
    y.mul_(2)
    assert "inplace operation" in private.saved_tensor_errors(node)["result"]
    z = torch.sigmoid(x)
    z.sum().backward()
    assert "second time" in private.saved_tensor_errors(z.grad_fn)["result"]


def test_saved_tensors_without_the_symbols() -> None:
    assert private.saved_tensor_errors(object()) == {}

    class Node:  # of a torch that does not tell whether a tensor is packed by hooks
        _raw_saved_result = object()

        @property
        def _saved_result(self) -> Any:
            raise AssertionError("must not be unpacked")

    assert private.saved_tensor_errors(Node()) == {"result": ""}


def test_number_of_saved_tensors() -> None:
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            a, b = ctx.saved_tensors
            return g * b, g * a

    y = Pair.apply(torch.ones(1, requires_grad=True), torch.ones(1))
    node = y.grad_fn
    assert private.saved_count(node) == 2
    y.backward()
    assert private.saved_count(node) is None, "freed"
    assert private.saved_count(object()) is None


def test_function_of_a_node() -> None:
    x = torch.ones(1, requires_grad=True)
    assert private.function_of(Twice.apply(x).grad_fn) is Twice
    assert private.function_of((x * 2).grad_fn) is None
    assert private.function_of(object()) is None


def test_checkpointed_function_without_the_symbols() -> None:
    class Frame:
        recompute_fn = staticmethod(lambda: None)

    assert private.checkpointed_function(object()) is None
    assert private.checkpointed_function(None) is None
    assert private.checkpointed_function(Frame()) is None


def test_bytes_of_the_gradient_at_a_node() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    assert private.gradient_bytes((2 * x).sum(1).grad_fn) == 3 * 4
    assert private.gradient_bytes((2 * x).double().grad_fn) == 12 * 8
    parts = x.split((1, 3), 1)[0].grad_fn
    assert private.gradient_bytes(parts) == 9 * 4  # the larger of two outputs
    assert private.gradient_bytes(object()) == 0


def test_node_that_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: found.append(private.current_node()))
    y.exp().backward()
    assert private.current_node() is None
    assert [each.name() for each in found] == ["MulBackward0"]
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    assert private.current_node() is None


def test_modules_compiled_in_place() -> None:
    module = torch.nn.Linear(2, 2)
    assert not private.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert private.is_compiled_in_place(module)
    assert not private.is_compiled_in_place(object())


# -- sets of hooks -------------------------------------------------------------------------------


def hook_tables(module: nn.Module) -> dict[str, list[Any]]:
    return {
        name: list(table)
        for name, table in vars(module).items()
        if "hook" in name and isinstance(table, dict)
    }


@pytest.mark.parametrize("symbols", [True, False])
def test_set_of_hooks(symbols: bool) -> None:
    """Called like registered ones, in the same order, and gone without a trace."""
    module = nn.Linear(2, 2)
    told: list[Any] = []
    for hook in ("pre", "after"):
        add = module.register_forward_pre_hook if hook == "pre" else module.register_forward_hook
        add(lambda *_, hook=hook: told.append(f"theirs {hook}"))
    before = hook_tables(module)
    target = module if symbols else WithoutTables(module)
    hooks = private.HookSet()
    hooks.before((target,), lambda *call: told.append(("first", len(call))), first=True)
    hooks.after((target,), lambda *call: told.append(("after", len(call))), always=True)
    hooks.gradient(module.weight, lambda gradient: told.append(gradient.shape))
    other = private.HookSet()  # has a number of its own
    other.before((target,), lambda *_: told.append("last"))
    module(torch.ones(1, 2)).sum().backward()
    expected = [("first", 3), "theirs pre", "last", "theirs after", ("after", 4), (2, 2)]
    assert told == expected
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(1, 3))
    assert told[len(expected) :] == [("first", 3), "theirs pre", "last", ("after", 4)]
    hooks.remove()
    other.remove()
    hooks.remove()
    assert hook_tables(module) == before
    assert not module.weight._backward_hooks


class WithoutTables:
    """A module of a torch that keeps its hooks elsewhere."""

    def __init__(self, module: nn.Module) -> None:
        self.register_forward_hook = module.register_forward_hook
        self.register_forward_pre_hook = module.register_forward_pre_hook


def test_autocast_anywhere() -> None:
    assert not private.may_autocast()
    with torch.autocast("cpu", torch.bfloat16):
        assert private.may_autocast()


def test_functions_of_torch_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delattr(torch._C, "_is_any_autocast_enabled")
    monkeypatch.delattr(torch._C._functorch, "is_functorch_wrapped_tensor")
    found = runpy.run_path(str(private.__file__))
    assert found["current_backward"]() == found["NO_BACKWARD"]
    assert found["may_autocast"]()
    assert not found["is_transformed"](torch.ones(1))


def no_loss() -> None:
    raise AssertionError("a gradient came, and not whose")


def test_a_gradient_that_no_node_brings_is_said_to_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_NODE", lambda: None)  # as in compiled autograd
    said: list[str] = []
    hooks = private.OutputHooks(
        lambda call, gradient: said.append(call), lambda: said.append("lost")
    )
    y = torch.ones(2, requires_grad=True) * 2
    hooks.add(y, y.grad_fn, "call")
    y.sum().backward()
    assert said == ["lost"]


def test_memory_has_as_many_users_as_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.ones(6)
    part = torch.nn.Parameter(whole[:2])  # a view would hold on to the whole
    assert private.users_of_memory(part) == 2
    del whole
    assert private.users_of_memory(part) == 1
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert private.users_of_memory(part) == 0


@pytest.mark.parametrize("symbol", [True, False])
def test_tensors_are_set_to_zero(symbol: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not symbol:
        monkeypatch.delattr(torch, "_foreach_zero_")
    tensors = [torch.ones(2), torch.full((3,), 7)]
    private.set_to_zero(tensors)
    assert [each.tolist() for each in tensors] == [[0, 0], [0, 0, 0]]


@pytest.mark.parametrize("symbol", [True, False])
def test_copies_are_written(symbol: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not symbol:
        monkeypatch.delattr(torch, "_foreach_copy_")
    copies = [torch.zeros(2), torch.zeros(3, dtype=torch.int64)]
    private.copy_into(copies, [torch.ones(2), torch.full((3,), 7)])
    assert [each.tolist() for each in copies] == [[1, 1], [7, 7, 7]]


def test_a_scaler_that_has_stepped() -> None:
    parameter = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    version = private.gradient_scale_version(scaler)
    assert not private.scaler_went_on(scaler, version)
    scaler.step(optimizer)
    assert private.scaler_went_on(scaler, version)
    scaler.update()
    assert private.scaler_went_on(scaler, version)
    assert not private.scaler_went_on(object(), 0), "without the symbols"


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_hooks_on_outputs_come_together_with_those_of_others(
    first: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of ours, one of the user's, in either order; both are called, and each can go."""
    if not known:  # a torch without the symbol
        monkeypatch.setattr(private, "_NODE", None)
    seen: list[str] = []
    y = torch.ones(2, requires_grad=True) * 2
    hooks = private.OutputHooks(lambda call, gradient: seen.append(call), no_loss)
    node = y.grad_fn
    if first:
        hooks.add(y, node, "ours")
        assert (y._backward_hooks is None) is known
    handle: Any = y.register_hook(lambda gradient: seen.append("theirs"))  # type: ignore[no-untyped-call]
    gone: Any = y.register_hook(lambda gradient: seen.append("gone"))  # type: ignore[no-untyped-call]
    if not first:
        hooks.add(y, node, "ours")
    gone.remove()
    y.sum().backward(retain_graph=True)
    assert sorted(seen) == ["ours", "theirs"]
    handle.remove()
    y.sum().backward(retain_graph=True)
    assert sorted(seen) == ["ours", "ours", "theirs"]
    hooks.remove()
    y.sum().backward()
    assert sorted(seen) == ["ours", "ours", "theirs"]


def test_hooks_on_outputs_stay_with_the_node_that_made_them() -> None:
    """Also where somebody writes into the output, and where a node has several outputs."""
    seen: dict[str, float] = {}
    hooks = private.OutputHooks(lambda call, each: seen.update({call: float(each[0])}), no_loss)
    y = torch.ones(2, requires_grad=True) * 2
    hooks.add(y, y.grad_fn, "y")
    hooks.add(y, y.grad_fn, "y again")  # as of a layer that returns what one inside it returned
    y.mul_(3)
    first, second = torch.ones(2, 2, requires_grad=True).unbind()
    hooks.add(second, second.grad_fn, "second")
    hooks.add(first, first.grad_fn, "first")
    (y.sum() + 5 * second.sum() + 7 * first.sum()).backward()
    assert seen == {"y": 3, "y again": 3, "second": 5, "first": 7}


@pytest.mark.parametrize("known", [True, False])
def test_hooks_on_outputs_that_are_forgotten_stay_with_their_graph(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr(private, "_NODE", None)
    seen: list[str] = []
    hooks = private.OutputHooks(lambda call, gradient: seen.append(call), no_loss)
    x = torch.ones(2, requires_grad=True)
    old = x * 2
    hooks.add(old, old.grad_fn, "old")
    hooks.forget()
    new = x * 3
    hooks.add(new, new.grad_fn, "new")
    hooks.remove()
    (old.sum() + new.sum()).backward()
    assert seen == ["old"]


def test_hooks_on_outputs_of_two_threads() -> None:
    """Every thread counts its nodes from 0: the same number does not mean the same call."""
    seen: dict[str, float] = {}
    hooks = private.OutputHooks(lambda call, each: seen.update({call: float(each)}), no_loss)
    made: dict[str, tuple[torch.Tensor, int]] = {}

    def make(name: str) -> None:
        y = torch.ones((), requires_grad=True) * 2
        made[name] = (y, private.node_sequence_number(y.grad_fn))
        hooks.add(y, y.grad_fn, name)

    for name in ("one", "other"):
        thread = threading.Thread(target=make, args=(name,))
        thread.start()
        thread.join()
    (one, first), (other, second) = made.values()
    assert first == second
    (3 * one + 5 * other).backward()
    assert seen == {"one": 3, "other": 5}


class WithoutSymbols:
    """A node of a torch that does not have them."""


def test_hooks_on_outputs_of_nodes_without_the_symbols() -> None:
    seen: list[str] = []
    hooks = private.OutputHooks(lambda call, gradient: seen.append(call), no_loss)
    y = torch.ones((), requires_grad=True) * 2
    hooks.add(y, WithoutSymbols(), "y")
    y.backward()
    assert seen == ["y"]


def test_hooks_on_outputs_keep_no_graph_alive() -> None:
    hooks = private.OutputHooks(lambda call, gradient: None, no_loss)
    x = torch.ones(2, requires_grad=True)
    saved = x.exp()
    reference = weakref.ref(saved)
    y = saved * saved
    hooks.add(y, y.grad_fn, "y")
    del saved, y
    assert reference() is None


@pytest.mark.parametrize("symbols", [True, False])
def test_a_function_that_writes_into_its_gradient_does_not_change_what_came(
    symbols: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            gradients[0].detach().numpy()[...] *= 2  # no version tells
            return gradients[0]

    held: list[torch.Tensor] = []
    came: list[torch.Tensor | None] = []
    hooks = private.OutputHooks(lambda call, gradient: came.append(gradient), no_loss)
    x = torch.ones(3, requires_grad=True)
    output = Doubled.apply(x * 1)
    output.register_hook(held.append)
    node = output.grad_fn if symbols else object()
    hooks.add(output, node, "call")
    (3 * output).sum().backward()
    assert came[0] is not None
    assert came[0].tolist() == [3, 3, 3]
    assert held[0].tolist() == [6, 6, 6], "it was written into"
    assert x.grad is not None
    assert x.grad.tolist() == [6, 6, 6]
    monkeypatch.setattr(private, "_NODE", None)
    assert private.own_copy(x) is x, "without the symbol"


def test_what_the_compiler_tells() -> None:
    torch.compiler.reset()
    before = private.compiled_graphs()
    doubled = torch.compile(lambda x: x * 2, backend="eager")
    tensor = torch.ones(2)
    assert doubled(tensor).tolist() == [2, 2]
    assert before is not None
    assert private.compiled_graphs() == before + 1

    def broken(graph: object, inputs: object) -> None:
        raise ValueError("no compiler here")

    with pytest.raises(RuntimeError) as failure:
        torch.compile(lambda x: x + 1, backend=broken)(tensor)
    assert private.is_compiler_error(failure.value)
    assert not private.is_compiler_error(RuntimeError("of the model"))
    torch.compiler.reset()


def test_without_the_compiler_s_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_dynamo", object())
    assert private.compiled_graphs() is None
    assert not private.is_compiler_error(RuntimeError("of anybody"))
