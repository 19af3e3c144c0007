"""`Run`, one side of a comparison that can be run, and the functions that record it.

Users make a `Run`, or `compare` makes it from a model and data. `side` and `origin` call `record`
and its variants: the same pass again, with rows in the opposite order and one thread, with redrawn
rounding, or seen from outside where code is compiled. Each returns a `RecordedPass`. Every pass
copies the data and puts the model and the random state back, so that all passes start alike; what
one left behind would be measured as noise of the next. The fields of `Run` are public.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
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
)
from torchfmri._records import Call, Inspection, Record, Value
from torchfmri._torch import flatten, map_tensors

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
    def is_compiled(self) -> bool:
        """Whether compiled code runs in it, inside of which no layer can be seen."""
        return any(
            type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None
            for each in self.model.modules()
        )

    @property
    def has_dropout(self) -> bool:
        """Whether the forward pass may draw random numbers."""
        return any(each.training and can_drop(each) for each in self.model.modules())

    @property
    def device(self) -> torch.device:
        """That of the first parameter."""
        return device_of(self.model)

    def forward(self, data: Any) -> Any:
        """The output of the model."""
        model = self.model if self.is_compiled else runnable(self.model)
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
) -> RecordedPass:
    """Run a model once and keep the tensors of its layers; the model stays as it was.

    Args:
        run: What to run.
        layers: Which layers; all by default.
        what: What to keep of them.
        max_bytes: The most bytes to keep.
        other_seed: Draw other random numbers than the first pass did.
    """
    inspector = Inspector(run.model, keep="tensors", max_bytes=max_bytes)
    inspector.watch(list(named_layers(run.model)) if layers is None else list(layers), list(what))
    notes: list[str] = []
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
        inspection = stack.enter_context(inspector.recording())
        _differentiate(run, run.forward(data), notes if back else None, inspection)
    return _passed(run, inspection, notes)


def _passed(run: Run, inspection: Inspection, notes: list[str]) -> RecordedPass:
    rows = batch_size(run)
    grids = grids_of((run.data, run.target)) or grids_seen(inspection, rows)
    return RecordedPass(inspection, grids, tuple(notes), rows)


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


def record_outside(run: Run) -> RecordedPass:
    """Run compiled code and keep its output and the gradients of its parameters.

    They stand in an inspection as the activations of the model and parameter gradients of its
    layers.
    """
    notes: list[str] = []
    outputs: list[Any] = []
    gradients: dict[str, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(own_turn())
        stack.enter_context(unchanged(run.model, lambda name: notes.append(_written(name))))
        output = run.forward(copy_of_data(run.data))
        outputs.append(map_tensors(_plain(output), lambda each: each.detach().clone()))
        value = loss_of(output, run.target, run.loss)
        trainable = {n: p for n, p in run.model.named_parameters() if p.requires_grad}
        if value is not None and value.requires_grad and trainable:
            found = torch.autograd.grad(value, list(trainable.values()), allow_unused=True)
            gradients = {n: g for n, g in zip(trainable, found, strict=True) if g is not None}
    notes.append("compiled code shows no layers: its output and parameter gradients were compared")
    inspection = outside_inspection(type(run.model).__name__, outputs[0], gradients, run.model)
    return _passed(run, inspection, notes)


def _plain(output: Any) -> Any:
    """Return the output without entries that are not compared, such as a cache."""
    return {element.path: element.tensor for element in flatten(output)}


def outside_inspection(
    name: str, output: dict[str, Tensor], gradients: dict[str, Tensor], model: nn.Module
) -> Inspection:
    """An inspection of what is seen from outside of a model."""
    records: dict[str, Record] = {}
    root = Record("", name, frozenset({"activations", "parameter_gradients"}))
    call = Call("", 0, 0)
    for path, tensor in output.items():
        value = Value(path, tensor, nn.Module, None)
        value.keep(tensor)
        call._values["activations", path] = value
    root.calls.append(call)
    records[""] = root
    by_id = {id(p): n for n, p in model.named_parameters()}
    for layer, module in named_layers(model).items():
        own = {
            short: gradients[full]
            for short, p in module.named_parameters(recurse=False)
            if (full := by_id.get(id(p), "")) in gradients
        }
        if not own:
            continue
        record_ = records.setdefault(
            layer, Record(layer, type(module).__name__, frozenset({"parameter_gradients"}))
        )
        kept = {}
        for short, gradient in own.items():
            kept[short] = Value(short, gradient, type(module), None)
            kept[short].keep(gradient.detach().clone())
        record_._parameters[0] = {"parameter_gradients": kept}
    return Inspection(name, records)


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
        return record(run, **options)
