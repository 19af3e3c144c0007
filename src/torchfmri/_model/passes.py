"""One forward pass of a model on a user's data, its loss, and a backward pass that spares `.grad`.

Inspections, costs, verification, compare and incidents all go through here: `arguments_for`, the
model's call, `loss_of`, `run_backward`. So a message names none of these callers. `thawed` sets
`requires_grad` on the data: the caller hands it copies, never the user's own tensors. Words may
change freely; what counts as data, target and loss is public.

`torch.autograd.grad` runs wherever it can, because it fills no `.grad` and sets off no optimizer
that steps in the backward pass. A reentrant checkpoint refuses it and needs `backward()`: then each
`.grad` is put aside, as it is around a Function that runs backward passes of its own.
`prepare_backward` searches the graph beforehand, so that costs can time the pass alone. Whichever
way runs, every `.grad` must be the same tensor with the same values afterwards, because the user's
optimizer steps with it. How the graph is searched may change freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import Parameter, signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_scalar, shown
from torchfmri._model.layers import named_layers, runnable
from torchfmri._model.process import whole_restorations
from torchfmri._torch import Hook, flatten, has_post_accumulate_hooks, hooked, nodes_behind
from torchfmri.exceptions import InspectionError

WITH_TARGET = (
    "target=y with a loss (on the command line, let your function return "
    "(model, x, lambda output: loss(output, y)))"
)
"""The advice where to put a target, in calls and on the command line."""

TARGET_NAMES = ("target", "targets", "label", "labels", "y")
"""What targets are usually called in a batch that is a dict."""
Loss: TypeAlias = "Callable[..., Tensor] | str | None"


def arguments_for(model: nn.Module, data: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return how to call the model with `data`.

    Raises:
        InspectionError: They do not fit, or have no values.
    """
    if data is None or isinstance(data, (str, bytes, int, float)):
        raise InspectionError(
            f"data={shown(data)} holds no tensor. Pass what the model is called with: a tensor, a "
            "tuple of positional arguments, such as (None,), or a dict of keyword arguments."
        )
    refuse_meta(model, data)
    if isinstance(data, Mapping):
        return (), data
    refuse_list(data)
    if not isinstance(data, tuple):
        return (data,), {}
    try:
        signature(runnable(model).forward).bind(*data)
    except TypeError as error:
        raise InspectionError(
            f"The model does not take {len(data)} positional arguments ({error}). If the last one "
            f"is the target, pass {WITH_TARGET}."
        ) from error
    except ValueError:  # a forward without a signature: let the model judge
        pass
    return data, {}


def refuse_list(data: Any) -> None:
    """Raise if the data is a list: it may be arguments, or a batch with its target."""
    if isinstance(data, list):
        raise InspectionError(
            f"data is a list of {len(data)}, as a DataLoader yields it. For several positional "
            "arguments pass a tuple, and for a model that takes a list pass (data,). For [x, y] "
            f"pass x as the data, and {WITH_TARGET}."
        )


def refuse_meta(model: nn.Module, data: Any = None) -> None:
    """Raise if something is on the meta device: it has a shape and no values.

    Raises:
        InspectionError: A parameter, a buffer or a tensor of the data is.
    """
    for what, tensors in (
        ("Parameter", model.named_parameters()),
        ("Buffer", model.named_buffers()),
    ):
        empty = next((name for name, each in tensors if each.is_meta), None)
        if empty is not None:
            raise InspectionError(
                f"{what} {empty!r} is on the meta device and has no values. Load the weights "
                "first: from_pretrained, or model.to_empty(device='cpu') and load_state_dict."
            )
    for path, tensor in flatten(data, "data"):
        if tensor.is_meta:
            raise InspectionError(
                f"{path} is on the meta device and has no values. Make it on the model's device."
            )


def refuse_scripted(model: nn.Module) -> None:
    """Raise if a layer is TorchScript, which calls no hooks.

    Raises:
        InspectionError: The first such layer, by name.
    """
    for name, module in named_layers(model).items():
        if isinstance(module, torch.jit.ScriptModule):
            raise InspectionError(
                f"{f'Layer {name!r}' if name else 'The model'} is TorchScript, which calls no "
                "hooks. Put the nn.Module that it was scripted or traced from in its place."
            )


@contextmanager
def thawed(model: nn.Module, data: Any, note: Callable[[str], None]) -> Iterator[None]:
    """Let gradients flow through a model whose parameters are all frozen, for one run."""
    floating = [each.tensor for each in flatten(data) if each.tensor.is_floating_point()]
    if any(each.requires_grad for each in [*model.parameters(), *floating]):
        yield
        return
    if floating:
        for tensor in floating:
            tensor.requires_grad_()  # our own copy of the data
        note("all parameters are frozen: gradients were started at the input")
        yield
        return

    def start(_: nn.Module, __: object, output: object) -> None:
        for element in flatten(output):
            if element.tensor.is_floating_point() and not element.tensor.requires_grad:
                element.tensor.requires_grad_()

    embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    if embeddings:
        note("all parameters are frozen: gradients were started at embeddings")
    with hooked(each.register_forward_hook(Hook(start, each), prepend=True) for each in embeddings):
        yield


def loss_of(output: Any, target: Any, loss: Loss) -> Tensor | None:
    """Return the scalar that the loss gives, or the output's own loss if no loss was given.

    Raises:
        InspectionError: It is not one real number, or loss and target do not fit together.
    """
    if callable(loss):
        if target is None and isinstance(loss, nn.Module) and needs_target(loss):
            raise InspectionError(
                f"{type(loss).__name__} compares the output with a target. Pass {WITH_TARGET}."
            )
        return check_scalar(loss(output) if target is None else loss(output, target))
    if loss == "sum":
        floating = [each.tensor for each in flatten(output) if each.tensor.is_floating_point()]
        if not floating:
            raise InspectionError("loss='sum' needs a floating-point output; there is none.")
        return check_scalar(floating[0].sum())
    if loss is not None:
        raise InspectionError(f"loss={loss!r}: give a function of the output, or 'sum'.")
    if target is not None:
        raise InspectionError(
            "A target was given without a loss. Write loss=nn.CrossEntropyLoss(), for example."
        )
    own = loss_in(output)
    return None if own is None else check_scalar(own)


def check_differentiable(value: Tensor | None) -> Tensor:
    """Return what `loss_of` found, which a backward pass can start from.

    Raises:
        InspectionError: There is no loss, or it does not require grad.
    """
    if value is None:
        raise InspectionError(
            "A backward pass needs a loss, and there is no loss: the output has no .loss and is "
            "not a scalar. Pass loss=lambda output: ..., loss='sum' for the sum of the output, or "
            f"{WITH_TARGET}."
        )
    if not value.requires_grad:
        raise InspectionError(
            "A backward pass is not possible, because the loss does not require grad: the model "
            "ran under no_grad or inference_mode, its output was detached, or nothing in it is "
            "trainable."
        )
    return value


def needs_target(loss: Callable[..., Any], unsure: bool = False) -> bool:
    """Whether a loss takes more than the output; `unsure` where its signature does not tell."""
    try:
        parameters = signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    except (TypeError, ValueError):
        return unsure
    if any(each.kind is Parameter.VAR_POSITIONAL for each in parameters.values()):
        return unsure
    named = [each for each in parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    return sum(each.default is Parameter.empty for each in named) > 1


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has none."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def loss_in(output: Any) -> Tensor | None:
    """Return the loss that an output is, or has; None if it has no loss."""
    if isinstance(output, Tensor):
        return output if output.numel() == 1 and output.is_floating_point() else None
    own = own_loss(output)
    return own if isinstance(own, Tensor) else None


def own_loss(output: Any) -> Any:
    """Return `output.loss` or `output["loss"]`, of any type; None without one."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


# The node that torch.utils.checkpoint(use_reentrant=True) leaves in the graph.
_REENTRANT = "CheckpointFunctionBackward"


def run_backward(loss: Tensor, parameters: Iterable[Tensor]) -> None:
    """Run the backward pass of `loss`; hooks fire, and every `.grad` stays as it is.

    Raises:
        InspectionError: The graph holds a reentrant checkpoint, which only `loss.backward()` can
            run, and something (an optimizer in the backward pass) would act on the gradients.
    """
    prepare_backward(loss, parameters)()


def prepare_backward(loss: Tensor, parameters: Iterable[Tensor]) -> Callable[[], object]:
    """Return what `run_backward` runs, with the search through the graph already done."""
    leaves, reentrant = _explore(loss)
    spared = {**leaves, **{id(each): each for each in parameters}}
    run: Callable[[], object] = partial(torch.autograd.backward, loss)
    if reentrant:
        _refuse_acting(spared.values())
    elif leaves:  # else nothing is to be differentiated, and hooks still fire
        run = partial(torch.autograd.grad, loss, list(leaves.values()), allow_unused=True)
    return partial(_run_spared, run, spared.values())


def _run_spared(run: Callable[[], object], leaves: Iterable[Tensor]) -> None:
    """Run a backward pass in which a Function may run others, as reversible layers do.

    These are `backward()`s, whatever the outer pass is: they fill the `.grad` of their leaves.
    """
    with spared_grad(leaves):
        run()


def _explore(loss: Tensor) -> tuple[dict[int, Tensor], bool]:
    """Return the leaves of the graph behind `loss`, and whether it has a reentrant checkpoint."""
    leaves: dict[int, Tensor] = {}
    reentrant = False
    for node in nodes_behind([loss.grad_fn]):
        variable = getattr(node, "variable", None)  # an AccumulateGrad node has its leaf
        if isinstance(variable, Tensor):
            leaves[id(variable)] = variable
        reentrant = reentrant or node.name() == _REENTRANT
    if loss.grad_fn is None:
        leaves[id(loss)] = loss
    return leaves, reentrant


def _refuse_acting(leaves: Iterable[Tensor]) -> None:
    """Raise if something acts as soon as a `.grad` is filled, which only we would have done."""
    acting = [leaf for leaf in leaves if has_post_accumulate_hooks(leaf)]
    if acting:
        raise InspectionError(
            f"The model uses reentrant checkpointing, and {len(acting)} parameters act as soon as "
            "they get a gradient (an optimizer in the backward pass). A backward pass by torchfmri "
            "would step that optimizer. Use checkpoint(..., use_reentrant=False)."
        )


@contextmanager
def spared_grad(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Put every `.grad` aside while the block runs its own backward passes."""
    with whole_restorations():
        spare = [(leaf, leaf.grad) for leaf in leaves if leaf.is_leaf]
        try:
            for leaf, _ in spare:
                leaf.grad = None
            yield
        finally:
            for leaf, gradient in spare:
                leaf.grad = gradient


def acts_on_gradients(parameters: Iterable[Tensor]) -> bool:
    """Whether a plain `backward()` would set something off besides filling `.grad`.

    An optimizer in the backward pass would step, and data-parallel processes would talk.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed or any(has_post_accumulate_hooks(each) for each in parameters)
