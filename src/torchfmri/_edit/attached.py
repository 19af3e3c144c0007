"""Edits attached to a model for the time of a block.

`edited` is public; `_inspect` uses `bind_edits` and `attached`, `_lesion` uses `attached`. Two
orders must be kept. The hooks of an edit come before all others, so whoever watches a layer sees
the edited value. The hook that counts tokens is put on last with `prepend`, so it runs first: an
edit of the model's own input needs to know the tokens. Two edits of the same value are refused,
because their order would decide; `_refuse_nested` finds those of an outer block through the hook's
`_act`, so that name is part of the protocol with `ReplacingHook`. Words of errors are free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_module, require
from torchfmri._edit.bound import BoundEdit
from torchfmri._edit.carried import change_arguments, change_output
from torchfmri._edit.edit import Edit, Spec, edit_of
from torchfmri._edit.passes import EditPasses
from torchfmri._model import (
    Place,
    compiled_code_as_eager,
    named_layers,
    places_of,
    switched_off,
    unwrap,
    watched,
)
from torchfmri._tokens import VOXEL, describe, head_size
from torchfmri._torch import ReplacingHook, hook_side
from torchfmri.exceptions import InspectionError


@contextmanager
def edited(model: nn.Module, edits: Mapping[str, Spec]) -> Iterator[dict[str, int]]:
    """Run a model with changed activations: `with torchfmri.edited(model, {"L9H6": "zero"}):`.

    Everything the model does in the block is done with the edits: your own passes, `generate` with
    its cache, backward passes, inspections, scans and token gradients. Hooks that watch an edited
    layer see the edited value. Afterwards the model is as it was, however the block ended.

    Args:
        model: Any `nn.Module`; a compiled one runs eagerly in the block.
        edits: Place -> edit. A place is a layer or a pattern over layers (their outputs), a head
            (`L9H6`), or a name of TransformerLens (`blocks.9.hook_resid_pre`); see the page about
            edits. An edit is an `Edit`, `"zero"`, a tensor to put there, or a function.

    Yields:
        Place -> how many calls were changed so far.

    Raises:
        LayerNotFoundError: A place matches no layer.
        InspectionError: A place or an edit is refused, two edits meet, an edit does not fit the
            value that it finds; or, at the end of the block, an edit never acted.
    """
    check_module("model", model)
    bound, passes = bind_edits(model, edits)
    counts: dict[str, int] = {each.place.name: 0 for each in bound}
    if switched_off():
        yield counts
        return
    with attached(model, bound, passes, counts):
        yield counts
    require_acted(bound)


def bind_edits(model: nn.Module, edits: Mapping[str, Spec]) -> tuple[list[BoundEdit], EditPasses]:
    """Return the edits with their places in a model, checked, and the passes they listen to.

    Raises:
        LayerNotFoundError: A place matches no layer.
        InspectionError: A place or an edit is refused, or two edits meet.
    """
    meaning = "give {place: edit}, such as {'L9H6': 'zero'}"
    is_mapping = isinstance(edits, Mapping) and bool(edits)
    require(is_mapping and all(isinstance(each, str) for each in edits), "edits", edits, meaning)
    layers, passes = named_layers(model), EditPasses()
    found: list[BoundEdit] = []
    for name, spec in edits.items():
        edit = edit_of(spec, name)
        for place in places_of(layers, name):
            own = replace(edit, values=_values_for(place, edit))
            voxel = _voxel_size(model, place.layer, layers[place.layer])
            found.append(BoundEdit(place, own, layers[place.layer], passes, voxel))
    refuse_meeting(found)
    return found, passes


def refuse_meeting(bound: Sequence[BoundEdit]) -> None:
    """Raise if two edits may change the same value: their order would decide.

    Raises:
        InspectionError: Two edits may change the same value; both are named.
    """
    groups: dict[tuple[str, str], list[BoundEdit]] = {}
    for each in bound:
        group = groups.setdefault((each.place.layer, each.place.what), [])
        for other in group:
            if each.overlaps(other):
                raise InspectionError(
                    f"Two edits meet in the {each.place.what} of layer {each.place.layer!r}: "
                    f"{other.place.name!r} ({other.edit!r}) and {each.place.name!r} "
                    f"({each.edit!r}). Which comes first would matter; write one function that "
                    "does both, or give them different heads, units, tokens or rows."
                )
        group.append(each)


@contextmanager
def attached(
    model: nn.Module, bound: Sequence[BoundEdit], passes: EditPasses, counts: dict[str, int]
) -> Iterator[None]:
    """Keep one hook per layer and side on while the block runs; compiled code runs eagerly."""
    layers = named_layers(model)
    groups: dict[tuple[str, str], list[BoundEdit]] = {}
    for each in bound:
        groups.setdefault((each.place.layer, each.place.what), []).append(each)
    with ExitStack() as stack:
        stack.enter_context(watched(model))
        stack.enter_context(compiled_code_as_eager())
        for (layer, what), edits in groups.items():
            module = layers[layer]
            if isinstance(module, torch.jit.ScriptModule):
                raise InspectionError(
                    f"Layer {layer!r} is a ScriptModule, which takes no hooks: it cannot be "
                    "edited. Edit the layer around it."
                )
            _refuse_nested(module, what, edits)
            act = _EditedCall(edits, counts)
            # First of all hooks, so that whoever watches the layer sees the edited value.
            hook = ReplacingHook(act.arguments if what == "inputs" else act.output, module)
            stack.callback(hook_side(module, what, hook, prepend=True).remove)
        # Last, so that it comes first: the edit of the model's own input needs to know the tokens.
        stack.enter_context(passes.listening(model))
        yield


class _EditedCall:
    """The hooks of one layer: they apply its edits one after the other to one copy."""

    def __init__(self, edits: Sequence[BoundEdit], counts: dict[str, int]) -> None:
        self.edits, self._counts = edits, counts

    def arguments(self, module: nn.Module, given: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        found = change_arguments(given, keywords, self._change)
        return self._found(found, module, "takes")

    def output(self, module: nn.Module, _: object, output: Any) -> Any:
        return self._found(change_output(output, self._change), module, "returns")

    def _found(self, found: Any, module: nn.Module, verb: str) -> Any:
        if found is None:
            raise InspectionError(
                f"Layer {self.edits[0].place.layer!r} ({type(module).__name__}) {verb} no "
                "floating-point tensor first, so there is nothing to edit. Name a layer inside it "
                "or around it."
            )
        return found

    def _change(self, value: Tensor) -> Tensor:
        changed: Tensor | None = None
        for edit in self.edits:
            before, name = edit.acted, edit.place.name
            changed = edit.change(value, changed)
            self._counts[name] = self._counts.get(name, 0) + edit.acted - before
        return value if changed is None else changed


def require_acted(bound: Sequence[BoundEdit]) -> None:
    """Raise if an edit never changed anything.

    Raises:
        InspectionError: An edit never acted; the first is named, with the reason.
    """
    for each in bound:
        if each.acted:
            continue
        reason = "was never called as a module in the block"
        if each.called:
            often = "once" if each.called == 1 else f"{each.called} times"
            reason = f"was called {often}, but no call had a token that {each.edit!r} selects"
        raise InspectionError(
            f"The edit of {each.place.name!r} never acted: layer {each.place.layer!r} {reason}."
        )


def _refuse_nested(module: nn.Module, what: str, edits: Sequence[BoundEdit]) -> None:
    """Raise if an edit of an outer block meets one of these."""
    hooks = module._forward_pre_hooks if what == "inputs" else module._forward_hooks
    for hook in hooks.values():
        owner = getattr(getattr(hook, "_act", None), "__self__", None)
        if isinstance(owner, _EditedCall):
            refuse_meeting([*owner.edits, *edits])


def _values_for(place: Place, edit: Edit) -> Any:
    """Return the donor of an edit as a tensor; of an inspection, the place's own."""
    values = edit.values
    if isinstance(values, Mapping):
        if place.layer not in values:
            raise InspectionError(
                f"The donor of {place.name!r} has nothing of layer {place.layer!r}. Watch that "
                f"layer in the other run: inspector.watch({place.layer!r}, {place.what!r})."
            )
        found = values[place.layer]
        values = found if isinstance(found, Tensor) else found.tensors(place.what)
        if not isinstance(values, Tensor):
            raise InspectionError(
                f"The donor has {len(values)} calls of layer {place.layer!r}, and one is needed. "
                "Give the tensor of the call that you mean."
            )
    if isinstance(values, Tensor):
        values = _without_heads(place, values)
    if edit.kind == "mean":
        wide = values.detach().to(torch.float64 if values.device.type != "mps" else torch.float32)
        mean = wide.reshape(-1, wide.shape[-1]).mean(0)
        # The mean of whole numbers is seldom one; `bound` converts it to the dtype of the layer.
        return mean.to(values.dtype) if values.is_floating_point() else mean
    return values


def _without_heads(place: Place, values: Tensor) -> Tensor:
    """Return values (..., head, d), the shape of TransformerLens, as the layer's (..., w)."""
    heads = place.heads or ()
    sizes = {sum(last - first for first, last in each) for each in heads}
    if values.ndim < 2 or len(sizes) != 1 or values.shape[-2:] != (len(heads), *sizes):
        return values
    # Of one head, (tokens, d) may have as many tokens as there are heads.
    return values if place.head is not None and values.ndim < 4 else values.flatten(-2)


def _voxel_size(model: nn.Module, layer: str, module: nn.Module) -> int:
    """Return how many units a voxel of the layer has, as in a scan."""
    head = head_size(getattr(unwrap(model), "config", None))
    own = [
        describe(f"{layer}.{key}", module, parameter, head)
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]
    sizes = [info.voxel for info in own if info.output.last - info.output.first == 1]
    return max(sizes, default=VOXEL)
