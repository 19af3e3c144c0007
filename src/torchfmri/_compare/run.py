"""`Run`, one side of a comparison that can be run, and the functions that record it.

Users make a `Run`, or `compare` makes it from a model and data. `side` and `origin` call `record`
and its variants: the same pass again, with rows in the opposite order and one thread, with redrawn
rounding, or seen from outside where code is compiled. Each returns a `RecordedPass`. Every pass
copies the data and puts the model and the random state back, so that all passes start alike; what
one left behind would be measured as noise of the next. The fields of `Run` are public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_callable, check_module, require
from torchfmri._compare.grid import PositionGrid, grids_of, grids_seen
from torchfmri._compare.rounding import rounding_redrawn
from torchfmri._inspect import Inspector
from torchfmri._model import (
    Loss,
    arguments_for,
    copy_of_data,
    device_of,
    loss_of,
    named_layers,
    one_thread,
    own_turn,
    run_backward,
    runnable,
    thawed,
    unchanged,
    whole_restorations,
)
from torchfmri._records import Inspection, Record, Value
from torchfmri._text import listed
from torchfmri._torch import CompiledForward, compiled_parts, flatten, map_tensors, uncompiled_call

_WATCHED = ("activations", "gradients", "parameter_gradients")
_OTHER_SEED = 1


@dataclass(frozen=True, eq=False)
class Run:
    """One side of a comparison: a model with its data and settings, ready to be run.

    Attributes:
        model: The model, in the mode (train or eval) in which it is to be compared.
        data: A tensor, a tuple of positional arguments or a dict of keyword arguments.
        target: Handed to the loss as its second argument.
        loss: As for `Inspector.run_inspection`; without one only the forward pass is compared.
        autocast: The dtype of `torch.autocast`; None runs without it.
        call: `call(model, data)` runs the forward pass and returns the output, where it is more
            than `model(**data)`: with a cache, in parts, inside a context manager.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> x = torch.randn(8, 4)
        >>> run = torchfmri.Run(model, x, loss="sum", autocast=torch.bfloat16)
        >>> torchfmri.compare(torchfmri.Run(model, x, loss="sum"), run).agree
        True
    """

    model: nn.Module
    data: Any
    target: Any = None
    loss: Loss = None
    autocast: torch.dtype | None = None
    call: Callable[[nn.Module, Any], Any] | None = None

    def __post_init__(self) -> None:
        check_module("model", self.model)
        require(self.data is not None, "data", self.data, "give what the model is called with")
        # torch.autocast warns of any other dtype, and does nothing then.
        known = self.autocast in (None, torch.bfloat16, torch.float16)
        require(known, "autocast", self.autocast, "give torch.bfloat16, torch.float16 or None")
        check_callable("call", self.call, "give a function of the model and the data")
        if self.call is None:
            arguments_for(self.model, self.data)

    @property
    def compiled_parts(self) -> list[CompiledForward]:
        """The compiled modules of the model, inside which no layer can be seen."""
        whole = CompiledForward(self.model)
        return [whole] if whole.known else compiled_parts(self.model)

    @property
    def compiled_layers(self) -> list[str]:
        """The names of the compiled parts; empty for the model itself."""
        parts = {id(part.inner) for part in self.compiled_parts}
        return [name for name, each in named_layers(self.model).items() if id(each) in parts]

    @property
    def hidden(self) -> list[str]:
        """The layers inside compiled parts."""
        inner = [part.inner for part in self.compiled_parts]
        known = {id(each) for part in inner for each in part.modules()} - set(map(id, inner))
        return [n for n, each in named_layers(self.model).items() if id(each) in known]

    @property
    def has_dropout(self) -> bool:
        """Whether the forward pass may draw random numbers."""
        return any(each.training and can_drop(each) for each in self.model.modules())

    @property
    def device(self) -> torch.device:
        """That of the first parameter."""
        return device_of(self.model)

    @property
    def called(self) -> nn.Module:
        """What to call: the model, without a wrapper around it that waits for other processes."""
        return self.model if CompiledForward(self.model).known else runnable(self.model)

    def forward(self, data: Any, model: nn.Module) -> Any:
        """The output of `called`."""
        kind = self.device.type
        casting = torch.autocast(kind, self.autocast) if self.autocast else nullcontext()
        with casting:
            if self.call is not None:
                return self.call(model, data)
            arguments, keywords = arguments_for(self.model, data)
            return model(*arguments, **dict(keywords))


def can_drop(module: nn.Module) -> bool:
    """Whether a module has dropout that takes effect in training mode."""
    kinds = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention)
    named = ("dropout", "attention_dropout", "p")
    return (isinstance(module, kinds) or hasattr(module, "attention_dropout")) and any(
        isinstance(p := getattr(module, n, 0), float) and p > 0 for n in named
    )


@dataclass(frozen=True, eq=False)
class RecordedPass:
    """What one pass left.

    Attributes:
        inspection: The tensors, by layer.
        grids: Where the tokens are in them.
        notes: What to know about it.
        batch: How many rows the batch has; 0 where it has none.
        turned: Whether its rows are in the opposite order.
    """

    inspection: Inspection
    grids: list[PositionGrid]
    notes: tuple[str, ...] = ()
    batch: int = 0
    turned: bool = False


def record(
    run: Run,
    *,
    layers: Sequence[str] | None = None,
    what: Sequence[str] = _WATCHED,
    max_bytes: int | None = None,
    other_seed: bool = False,
    eager: bool = False,
) -> RecordedPass:
    """Run a model once and keep the tensors of its layers; the model stays as it was.

    Args:
        run: What to run.
        layers: Which layers; all that can be seen by default.
        what: What to keep of them.
        max_bytes: The most bytes to keep.
        other_seed: Draw other random numbers than the first pass did.
        eager: Run compiled parts eagerly.
    """
    inspector = Inspector(run.model, keep="tensors", max_bytes=max_bytes)
    hidden, model = set(run.hidden), run.called
    seen = [each for each in named_layers(run.model) if each not in hidden]
    inspector.watch(seen if layers is None else list(layers), list(what))
    notes: list[str] = []
    gradients: dict[str, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(own_turn())
        stack.enter_context(unchanged(run.model, lambda name: notes.append(_written(name))))
        if other_seed:
            torch.manual_seed(_OTHER_SEED)
        data = copy_of_data(run.data if not hasattr(run.data, "items") else dict(run.data))
        back = torch.is_grad_enabled() and any("gradients" in each for each in what)
        if back:
            stack.enter_context(thawed(runnable(run.model), data, notes.append))
        elif any("gradients" in each for each in what):
            notes.append("the backward pass was not compared: torch.no_grad() is on")
        tables = _hook_tables(run)
        before = [set(table) for table in tables]
        inspection = stack.enter_context(inspector.recording())
        if run.compiled_parts:
            notes.append(_hiding(run))
            _drop_new(tables, before)
            stack.enter_context(_gradients_kept(run, gradients))
            stack.enter_context(nullcontext() if eager else _parts_compiled(run))
        _differentiate(run, run.forward(data, model), notes if back else None, inspection)
    found = _parameter_records(run.model, gradients)
    inspection._records |= {name: each for name, each in found.items() if name in hidden}
    return _passed(run, inspection, notes)


def _hiding(run: Run) -> str:
    parts = listed([each or "the model" for each in run.compiled_layers])
    return (
        f"compiled code shows no layers: of {parts} the output and the gradients of parameters "
        "were compared"
    )


def _drop_new(tables: Sequence[dict[int, Any]], before: Sequence[set[int]]) -> None:
    """Drop hooks of ours inside compiled parts: they would be compiled, and nobody needs them."""
    for table, keys in zip(tables, before, strict=True):
        for key in set(table) - keys:
            del table[key]


def _hook_tables(run: Run) -> list[dict[int, Any]]:
    """Return the hooks of the layers inside compiled parts."""
    modules = named_layers(run.model)
    hidden = [modules[name] for name in run.hidden]
    return [table for each in hidden for table in (each._forward_pre_hooks, each._forward_hooks)]


@contextmanager
def _parts_compiled(run: Run) -> Iterator[None]:
    """Run compiled parts as compiled code while all else runs eagerly, with hooks around them.

    A call of a compiled module runs its hooks in the compiled code. Here its forward alone is
    compiled, with the settings of the user, and hooks on it run as on every other layer.
    """
    with whole_restorations(), ExitStack() as stack:
        for part in run.compiled_parts:
            inner = part.inner
            stack.enter_context(part.replaced(uncompiled_call(inner)))
            state, forward = vars(inner), part.compile(inner.forward)
            undo = partial(state.pop, "forward")
            if "forward" in state:  # somebody else put one there, as accelerate does
                undo = partial(state.update, forward=state["forward"])
            stack.callback(undo)
            state["forward"] = partial(_in_default_stance, forward)
        yield


def _in_default_stance(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    with torch.compiler.set_stance("default"):
        return function(*arguments, **keywords)


@contextmanager
def _gradients_kept(run: Run, gradients: dict[str, Tensor]) -> Iterator[None]:
    """Add up the gradients of the parameters of hidden layers, by name, while the block runs."""
    modules = named_layers(run.model)
    hidden = {id(p) for name in run.hidden for p in modules[name].parameters(recurse=False)}
    with ExitStack() as stack:
        for name, parameter in run.model.named_parameters():
            if id(parameter) not in hidden or not parameter.requires_grad:
                continue

            def add(gradient: Tensor, name: str = name) -> None:
                before = gradients.get(name)
                gradients[name] = gradient if before is None else before + gradient

            handle = parameter.register_hook(add)  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)
        yield


def _passed(run: Run, inspection: Inspection, notes: list[str]) -> RecordedPass:
    rows = batch_size(run)
    grids = grids_of((run.data, run.target))
    return RecordedPass(inspection, grids + grids_seen(inspection, rows, grids), tuple(notes), rows)


def batch_size(run: Run) -> int:
    """How many rows the batch has: the first axis of the first tensor; 0 without one."""
    first = next((each.tensor for each in flatten(run.data) if each.tensor.ndim), None)
    return 0 if first is None else first.shape[0]


def _differentiate(run: Run, output: Any, notes: list[str] | None, found: Inspection) -> None:
    """Run the backward pass if the output has a loss; `notes` is None to add no notes."""
    value = loss_of(output, run.target, run.loss)
    if value is not None:
        found.loss = float(value.detach())
    if notes is None:
        return
    if value is None:
        notes.append(
            "the backward pass was not compared: there is no loss. Give loss=, or labels in the "
            "data of a model that returns its own"
        )
    elif not value.requires_grad:
        notes.append("the backward pass was not compared: the loss does not require grad")
    else:
        run_backward(value, runnable(run.model).parameters())


def _written(name: str) -> str:
    return f"the forward pass writes into the parameter {name!r}: those changes stay"


def _parameter_records(model: nn.Module, gradients: Mapping[str, Tensor]) -> dict[str, Record]:
    """Return records of the layers of which gradients of parameters are known, by full name."""
    by_id = {id(p): gradients[n] for n, p in model.named_parameters() if n in gradients}
    records = {}
    for layer, module in named_layers(model).items() if gradients else ():
        kept = {
            name: kept_value(name, by_id[id(parameter)])
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in by_id
        }
        records[layer] = Record(layer, type(module).__name__, frozenset({"parameter_gradients"}))
        records[layer]._parameters[0] = {"parameter_gradients": kept}
    return records


def kept_value(path: str, tensor: Tensor) -> Value:
    """Return a value that keeps a tensor which no hook has seen."""
    value = Value(path, tensor, nn.Module, None)
    value.keep(tensor.detach())
    return value


# -- the same run, otherwise ---------------------------------------------------------------------


def rearranged(run: Run) -> Run | None:
    """The run with the rows of its batch in the opposite order; None for a batch of one row."""
    b = batch_size(run)
    if b < 2:
        return None

    def turn(tensor: Tensor) -> Tensor:
        return tensor.flip(0) if tensor.ndim and tensor.shape[0] == b else tensor

    data = dict(run.data) if hasattr(run.data, "items") else run.data
    return replace(run, data=map_tensors(data, turn), target=map_tensors(run.target, turn))


def record_rearranged(run: Run, **options: Any) -> RecordedPass:
    """A pass over the batch in the opposite order, on one thread."""
    other = rearranged(run)
    with one_thread():
        found = record(run if other is None else other, **options)
    grids = found.grids
    if other is not None:
        grids = [replace(grid, order=tuple(reversed(grid.order))) for grid in grids]
    return replace(found, grids=grids, turned=other is not None)


def record_rounded(run: Run, coarsest: torch.dtype | None, **options: Any) -> RecordedPass:
    """A pass in which every layer rounds anew, to the coarser of two precisions."""
    with rounding_redrawn(runnable(run.model), coarsest, run.autocast):
        return record(run, eager=True, **options)
