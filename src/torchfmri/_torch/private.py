"""Every private PyTorch symbol that torchfmri uses, each with what happens without it.

Nothing else in the package touches a name of torch that begins with an underscore, apart from
`Tensor._version`, `Tensor._base` and `Tensor._is_view`, which PyTorch documents; a test looks. To
use another one, add it here with its fallback and test both in tests/_torch/test_torch_private.py.
A fallback may be slower or know less, but must not give a wrong number. `HookSet` and `OutputHooks`
write into torch's tables of hooks by themselves: making a handle for each hook takes several times
as long as the rest.
"""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)
from torch.utils.hooks import RemovableHandle

NO_BACKWARD = -1
_NODE: Any = getattr(torch._C, "_current_autograd_node", None)

# The first four are torch's own functions: what asks for these runs at every call of a layer, and
# never in warm caches.

current_backward: Callable[[], int] = getattr(
    torch._C, "_current_graph_task_id", lambda: NO_BACKWARD
)
"""The number of the backward pass that is running in this thread, or NO_BACKWARD.

Without the symbol every gradient counts as part of one and the same backward pass.
"""

is_transformed: Callable[[Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda tensor: False
)
"""Whether a tensor belongs to a torch.func transform (vmap, grad): unreadable afterwards.

Without the symbol: False, and reading it later reports whatever PyTorch says then.
"""

saved_tensor_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: ()
)
"""Somebody's hooks through which goes what autograd saves now (a checkpoint, offloading), or None.

Takes False. Without the symbol: not None, and whoever asks has to look closer.
"""

may_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether autocast is on for any kind of device; without the symbol: True."""


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Ask autograd to call `callback` when the running backward pass ends; False if it cannot."""
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None or not hasattr(engine, "queue_callback"):
        return False
    engine.queue_callback(callback)
    return True


def sequence_number() -> int:
    """Return the number that the next autograd node of this thread gets.

    Without the symbol it is 0: a search for nodes created since then looks at all of them.
    """
    read = getattr(torch.autograd, "_get_sequence_nr", None)
    return int(read()) if read is not None else 0


def node_sequence_number(node: Any) -> int:
    """Return the number of an autograd node; without the symbol, one that is recent enough."""
    read = getattr(node, "_sequence_nr", None)
    return int(read()) if read is not None else 1 << 62


class _TensorHooks(dict[int, Any]):
    """The hooks of a tensor in a dict that handles of other people's hooks can refer to weakly."""

    __slots__ = ("__weakref__",)


def frames() -> Iterator[FrameType]:
    """Yield the functions that are running in this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def operator_schema(func: object) -> Any:
    """Return the schema of an operator of `torch.ops`; None for other functions.

    Without the symbols no operator is known.
    """
    operators = getattr(torch, "_ops", None)
    if isinstance(func, getattr(operators, "OpOverloadPacket", ())):
        overloads = func.overloads()  # type: ignore[attr-defined]
        func = getattr(func, overloads[0]) if overloads else None
    return func._schema if isinstance(func, getattr(operators, "OpOverload", ())) else None  # type: ignore[attr-defined]


def take_off(hook: object, module: object) -> None:
    """Take a hook off a module while the module calls it; without the symbols it stays."""
    if not isinstance(module, nn.Module) or torch.compiler.is_compiling():
        return
    state = vars(module)
    for kind in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = state.get(kind) or {}
        for number in [number for number, each in hooks.items() if each is hook]:
            for table in (kind, f"{kind}_with_kwargs", f"{kind}_always_called"):
                (state.get(table) or {}).pop(number, None)


class HookSet:
    """Hooks on modules and parameters that come and go together, one of a kind on each.

    All of them have one number: making a handle for each takes several times as long as everything
    else about them. Without the symbols there is a handle for each.
    """

    def __init__(self) -> None:
        self._number = RemovableHandle(OrderedDict()).id
        self._tables: list[dict[int, Any]] = []
        self._handles: list[RemovableHandle] = []
        self._parameters: list[Tensor] = []

    def before(
        self, modules: Iterable[nn.Module], hook: Callable[..., None], first: bool = False
    ) -> None:
        """Have `hook(module, arguments, keywords)` called before the others, or after them."""
        entries = {"_forward_pre_hooks": hook, "_forward_pre_hooks_with_kwargs": True}
        for module in modules:
            if not self._enter(module, entries):
                add = module.register_forward_pre_hook
                self._handles.append(add(hook, prepend=first, with_kwargs=True))
            elif first:
                hooks: Any = module._forward_pre_hooks
                hooks.move_to_end(self._number, last=False)

    def after(
        self, modules: Iterable[nn.Module], hook: Callable[..., None], always: bool = False
    ) -> None:
        """Have `hook(module, arguments, keywords, output)` called; always: after an error too."""
        entries: dict[str, Any] = {"_forward_hooks": hook, "_forward_hooks_with_kwargs": True}
        if always:
            entries["_forward_hooks_always_called"] = True
        for module in modules:
            if not self._enter(module, entries):
                add = module.register_forward_hook
                self._handles.append(add(hook, with_kwargs=True, always_call=always))

    def _enter(self, module: nn.Module, entries: Mapping[str, Any]) -> bool:
        """Put entries into the hook tables of a module; False if it has no such tables."""
        tables: list[Any] = [*map(vars(module).get, entries)]
        if None in tables:
            return False
        for table, entry in zip(tables, entries.values(), strict=True):
            table[self._number] = entry
        self._tables += tables
        return True

    def gradient(self, parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Have `hook(gradient)` called when a gradient comes to a parameter."""
        if type(parameter) is not nn.Parameter or not parameter.is_leaf:
            self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
            return
        self._parameters.append(parameter)
        hooks: Any = parameter._backward_hooks
        if hooks is None:
            parameter._backward_hooks = _TensorHooks({self._number: hook})
        else:
            hooks[self._number] = hook

    def remove(self) -> None:
        """Remove all of them; safe to call twice."""
        number = self._number
        while self._tables:
            self._tables.pop().pop(number, None)
        while self._handles:
            self._handles.pop().remove()
        while self._parameters:
            parameter = self._parameters.pop()
            hooks: Any = parameter._backward_hooks
            if hooks is not None:
                hooks.pop(number, None)
                if not hooks and type(hooks) is _TensorHooks:  # there were none before us
                    parameter._backward_hooks = None


class OutputHooks:
    """Hooks on what calls return, put on the nodes that made it; the tensors are left alone.

    There is one for all of them: every node is handed the hooks of one tensor that nobody else has,
    and what is called then looks up whose gradient it is by the node that runs. Without the symbols
    there is a handle for each.

    Args:
        arrived: Called with a call and the gradient of its output; None if autograd knows that
            it is zero.
        lost: Called for a gradient of unknown origin: compiled autograd runs no nodes.
    """

    def __init__(
        self, arrived: Callable[[Any, Tensor | None], None], lost: Callable[[], None]
    ) -> None:
        self._arrived, self._lost = arrived, lost
        self._handles: list[RemovableHandle] = []
        self.forget()

    def add(self, tensor: Tensor, node: Any, call: object) -> None:
        """Listen for the gradient of a tensor that this node has made."""
        try:
            number, register = node._sequence_nr(), node._register_hook_dict
        except AttributeError:  # without the symbols
            number, register = 0, None
        if (
            register is not None
            and _NODE is not None
            and tensor.output_nr == 0
            and not compiles_backward()
            # Claimed before anything is done: every thread counts its nodes from 0.
            and self._calls.setdefault(number, call) is call
        ):
            register(self._carrier)
            return
        hook = uncompiled(partial(_come, self._arrived, call))
        self._handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Leave the hooks where they are: their graph is about to go."""
        self._handles.clear()
        self._calls: dict[int, Any] = {}
        self._hooks = {0: partial(_look_up, self._arrived, self._lost, self._calls)}
        carrier: Any = torch.empty(0, device="cpu")
        carrier._backward_hooks = self._hooks
        self._carrier = carrier

    def remove(self) -> None:
        """Remove all of them; safe to call twice."""
        self._hooks.clear()
        self._calls.clear()
        while self._handles:
            self._handles.pop().remove()


def compiles_backward() -> bool:
    """Whether backward passes are compiled now (compiled autograd); without the symbol: False."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


def uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook so that compiled autograd does not compile what it does."""
    if not compiles_backward():
        return hook
    found: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return found


def _look_up(
    arrived: Callable[[Any, Tensor | None], None],
    lost: Callable[[], None],
    calls: dict[int, Any],
    gradient: Tensor | None,
) -> None:
    """Hand a gradient to `arrived` with the call whose output the running node made."""
    node = _NODE()
    if node is None:
        lost()
        return
    call = calls.get(node._sequence_nr())
    if call is not None:
        # Views are skipped: checking for them costs more than it saves, and call outputs are
        # never views here.
        if gradient is not None and isinstance(node, BackwardCFunction):
            gradient = own_copy(gradient)
        arrived(call, gradient)


def _come(
    arrived: Callable[[Any, Tensor | None], None], call: object, gradient: Tensor | None
) -> None:
    arrived(call, None if gradient is None else own_copy(gradient))


def own_copy(gradient: Tensor) -> Tensor:
    """Return the gradient at the running node in a form that nobody writes into.

    Somebody's Function may write into it next, as fused kernels do, which no version tells: then it
    is a copy. Without the symbol it is not known, and it is the gradient itself.
    """
    node = current_node()
    while type(node).__name__ in _VIEWS:  # what comes to it goes on in the same memory
        node = node.next_functions[0][0]
    return gradient.detach().clone() if isinstance(node, BackwardCFunction) else gradient


_VIEWS = frozenset(
    {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"}
    | {"TBackward0", "TransposeBackward0", "PermuteBackward0", "UnsqueezeBackward0"}
    | {"SqueezeBackward0", "SqueezeBackward1"}
)


def calls_itself(module: nn.Module) -> bool:
    """Whether a module is called by code that runs inside an earlier call of it.

    Without the symbol: False, and the earlier call counts as one that an interrupt has ended.
    """
    code = getattr(getattr(nn.Module, "_call_impl", None), "__code__", None)
    calls = [each for each in frames() if each.f_code is code]
    return sum(each.f_locals.get("self") is module for each in calls) > 1


def has_post_accumulate_hooks(tensor: Tensor) -> bool:
    """Whether something (an optimizer in the backward pass) acts when `tensor.grad` is filled.

    Without the symbol: False; the backward pass that asks for this is the reentrant one alone.
    """
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def gradient_scale(scaler: Any) -> Tensor | float:
    """Return the factor of a GradScaler on the loss, without waiting for a device.

    Without the symbol the scaler's public `get_scale()` is asked, which waits.
    """
    scale = getattr(scaler, "_scale", None)
    if isinstance(scale, Tensor):
        return scale.detach().clone()  # update() writes into it
    return float(scaler.get_scale())


def gradient_scale_version(scaler: Any) -> int:
    """Return a number that changes when a GradScaler is updated; without the symbol: 0."""
    scale = getattr(scaler, "_scale", None)
    return scale._version if isinstance(scale, Tensor) else 0


def scaler_went_on(scaler: Any, version: int) -> bool:
    """Whether a GradScaler has made its step, or `update()` since it had this version.

    Without the symbol for the first: whether there was an update.
    """
    if gradient_scale_version(scaler) != version:
        return True
    states: dict[int, Any] = getattr(scaler, "_per_optimizer_states", {})
    stages = [getattr(each.get("stage"), "name", "") for each in states.values()]
    return "STEPPED" in stages


def _foreach(name: str, act: Callable[..., Tensor], *lists: list[Tensor]) -> list[Tensor]:
    """Do an operation to each tensor, in few launches if torch has it for lists of tensors."""
    together = getattr(torch, name, None)
    if together is None or not lists[0]:  # torch refuses empty lists
        return [act(*each) for each in zip(*lists, strict=True)]
    return list(together(*lists) or ())


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the Euclidean norm of each tensor."""
    return _foreach("_foreach_norm", torch.linalg.vector_norm, tensors)


def differences(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Return tensor - other for each pair."""
    return _foreach("_foreach_sub", torch.sub, tensors, others)


def copy_into(copies: list[Tensor], tensors: list[Tensor]) -> None:
    """Write each tensor into its copy."""
    _foreach("_foreach_copy_", Tensor.copy_, copies, tensors)


def set_to_zero(tensors: list[Tensor]) -> None:
    """Fill each tensor with zeros."""
    _foreach("_foreach_zero_", Tensor.zero_, tensors)


def infers_shapes() -> bool:
    """Whether a pipeline stage runs its module to learn shapes, on memory that was never filled.

    Without the symbol: False, and such a run counts as a call of the module.
    """
    stages: Any = sys.modules.get("torch.distributed.pipelining.stage")
    runs = getattr(getattr(stages, "PipelineStage", None), "_forward_metadata_inference", None)
    return runs is not None and any(each.f_code is runs.__code__ for each in frames())


def users_of_memory(tensor: Tensor) -> int:
    """Return how many tensors share this one's memory, itself included; or 0 if unknown."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    return 0 if count is None else int(count(storage._cdata)) - 1  # one is the storage itself


def compile_cuda(source: str, name: str) -> Any:
    """Return the kernel `name` of a CUDA C source, compiled now.

    Raises:
        NotImplementedError: This torch has no such compiler; Triton then does the work.
    """
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        raise NotImplementedError("This version of torch does not compile CUDA C at run time.")
    return compile_kernel(source, name)


def saved_tensor_errors(node: Any) -> dict[str, str]:
    """Name of a tensor saved by an autograd node -> why it cannot be read any more, or "".

    A tensor packed by hooks (checkpointing, offloading) is left alone, because unpacking it would
    run other people's code. Without the symbols nothing is read.
    """
    errors: dict[str, str] = {}
    for raw_name in [name for name in dir(node) if name.startswith("_raw_saved_")]:
        name = raw_name.removeprefix("_raw_")
        short = name.removeprefix("saved_")
        errors[short] = ""
        try:
            raw = getattr(node, raw_name)
            saved = raw if isinstance(raw, (list, tuple)) else [raw]
            packed = [getattr(each, "unpack_hook", raw) for each in saved]
            if all(hook is None for hook in packed):
                getattr(node, name if hasattr(type(node), name) else f"_{name}")
        except RuntimeError as error:  # this is the answer: modified in place, or freed
            errors[short] = str(error)
    return errors


def saved_count(node: Any) -> int | None:
    """Return how many tensors a custom Function saved for backward; None if unknown.

    They are counted only, not unpacked.
    """
    try:
        saved = getattr(node, "_raw_saved_tensors", None)
    except RuntimeError:  # freed by a backward pass
        return None
    return None if saved is None else len(saved)


def gradient_bytes(node: Any) -> int:
    """Return how large the largest gradient is that arrives at an autograd node, in bytes.

    Without the symbol it is not known: 0.
    """
    arriving = getattr(node, "_input_metadata", None) or ()
    sizes = [math.prod(each.shape) * each.dtype.itemsize for each in arriving if each is not None]
    return max(sizes, default=0)


def is_compiled_in_place(module: Any) -> bool:
    """Whether `module.compile()` was called, so that its own calls run compiled code.

    Without the symbol: False, and hooks on it may have it compiled again.
    """
    return getattr(module, "_compiled_call_impl", None) is not None


def uncompiled_call(module: nn.Module) -> Callable[..., Any]:
    """Return what a module's calls run, hooks included, if `module.compile()` was never called.

    Without the symbol: the module itself.
    """
    found: Callable[..., Any] = getattr(module, "_call_impl", module)
    return found


def current_node() -> Any:
    """Return the node of the autograd graph whose backward is running in this thread, or None.

    Without the symbol it is not known.
    """
    return _NODE() if _NODE is not None else None


def function_of(node: Any) -> Any:
    """Return the class of the custom autograd.Function that made a node, or None.

    Without the symbol it is not known.
    """
    return getattr(type(node), "_forward_cls", None)


def checkpointed_function(frame: Any) -> Any:
    """Return what `torch.utils.checkpoint` re-runs, from the record it keeps of one call, or None.

    Without the symbols it is not known.
    """
    return _closed_over(getattr(frame, "recompute_fn", None), "fn", "function")


def _closed_over(function: Any, *names: str) -> Any:
    """Return what the closure of a function holds under one of these names, or None."""
    known = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(known, getattr(function, "__closure__", None) or (), strict=False):
        if name in names:
            try:
                return cell.cell_contents
            except ValueError:  # the cell was emptied
                return None
    return None


# Every operation passes through a mode of this kind. There is no other way to see them all; it has
# been where it is since torch 1.13, and torch's own FLOP counter is built on it.
DispatchMode = TorchDispatchMode


def leave(mode: TorchDispatchMode | TorchFunctionMode) -> None:
    """Leave a mode that was entered by hand, and others inside it that an interrupt left behind."""
    entered: list[Any]
    if isinstance(mode, TorchFunctionMode):
        entered = list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    else:
        entered = list(_get_current_dispatch_mode_stack())
    if not any(each is mode for each in entered):
        return
    for each in reversed(entered):
        each.__exit__(None, None, None)
        if each is mode:
            return


def stream_of(device: torch.device) -> int:
    """Return the number of the CUDA stream that is current on a device; 0 on other devices.

    torch's own function returns an object, which takes ten times as long to make.
    """
    if device.type != "cuda":
        return 0
    number = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if number is None or device.index is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(number(device.index))


def compiled_graphs() -> int | None:
    """Return how many graphs this process has compiled; None if torch does not count."""
    counters = getattr(getattr(torch._dynamo, "utils", None), "counters", None)
    return None if counters is None else int(counters["stats"]["unique_graphs"])


def is_compiler_error(error: BaseException) -> bool:
    """Whether an exception is the compiler's own and not the model's; without the symbol, never."""
    kind = getattr(getattr(torch._dynamo, "exc", None), "TorchDynamoException", None)
    return kind is not None and isinstance(error, kind)


class CompiledForward:
    """The place where a compiled module keeps what its calls run, to put something else there.

    Args:
        module: Compiled by `torch.compile(module)`, by `module.compile()`, or by
            `module.forward = torch.compile(module.forward)`.

    Attributes:
        module: The module, as given.
        call: The compiled code.
        known: Whether it was found; without the symbols, never.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        state = vars(module)
        self._key = "_compiled_call_impl" if is_compiled_in_place(module) else "forward"
        self.call: Any = state.get(self._key)
        context = state.get("dynamo_ctx") or _context_of(self.call)
        compiles = callable(context) and callable(getattr(context, "callback", None))
        self._compile = context if compiles and callable(self.call) else None
        self.known = self._compile is not None

    @property
    def inner(self) -> nn.Module:
        """The module that was compiled: inside a wrapper of `torch.compile`, or the module itself.

        `uncompiled_call` of it runs it eagerly while something else is `replaced`.
        """
        found: nn.Module = getattr(self.module, "_orig_mod", self.module)
        return found

    @property
    def function(self) -> Callable[..., Any]:
        """What was compiled: the wrapped module, the calls of a module, or its forward."""
        if self.inner is not self.module:
            return self.inner
        written: Any = _uncompiled_function(self.call) if self._key == "forward" else None
        return written or uncompiled_call(self.module)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function with the settings that the module was compiled with."""
        assert self._compile is not None
        found: Callable[..., Any] = self._compile(function)
        return found

    def put(self, call: Callable[..., Any]) -> None:
        """Have `call` run in place of the compiled code."""
        vars(self.module)[self._key] = call

    def put_back(self) -> None:
        """Have the compiled code run again."""
        vars(self.module)[self._key] = self.call

    @contextlib.contextmanager
    def replaced(self, call: Callable[..., Any]) -> Iterator[None]:
        """Have whole calls of the module run `call`, which finds its forward as it was written.

        `module._call_impl` is the uncompiled call then, with the hooks on the module. A forward
        that somebody else put on the module (accelerate does) stays where it is.
        """
        state, keys = vars(self.module), ("_compiled_call_impl", "forward")
        before = {key: state[key] for key in keys if key in state}
        try:
            written = _uncompiled_function(before.get("forward"))
            if written is not None:
                del state["forward"]
                # That of the class needs no entry; what else was compiled has to be put there.
                if getattr(written, "__func__", written) is not type(self.module).forward:
                    state["forward"] = written
            state["_compiled_call_impl"] = call
            yield
        finally:
            for key in keys:
                state.pop(key, None)
            state.update(before)


def compiled_parts(model: nn.Module) -> list[CompiledForward]:
    """Return the compiled modules below a model, without those inside another one.

    Without the symbols there are none.
    """
    found, inside = [], {id(model)}
    for module in model.modules():
        state = vars(module)
        if id(module) in inside or not (state.get("_compiled_call_impl") or "forward" in state):
            continue
        compiled = CompiledForward(module)
        if compiled.known:
            inside.update(map(id, module.modules()))
            found.append(compiled)
    return found


def _uncompiled_function(compiled: Any) -> Any:
    """Return what was compiled to this function or method; None where it is not compiled."""
    function = getattr(compiled, "_torchdynamo_orig_callable", None)
    owner = getattr(compiled, "__self__", None)
    if function is None or owner is None or hasattr(function, "__self__"):
        return function
    return types.MethodType(function, owner)


def _context_of(compiled: Any) -> Any:
    """Return the settings in the closure of a compiled function; None for any other function."""
    is_compiled = hasattr(compiled, "_torchdynamo_orig_callable")
    return _closed_over(compiled, "self") if is_compiled else None
