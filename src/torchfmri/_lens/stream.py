"""The residual stream of one pass: what enters the blocks, what leaves each, what reads it.

The lens and the attributions run a model with `run_stream`. Only layers are watched, so it is the
model's own forward pass on every architecture. Hooks come after others, so that an edited stream is
read as it was edited. A state must be (b, s, width), once per block; anything else is refused,
because a lens over it would be a wrong number. What else is kept of a pass may grow freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._model import Block, each_once, find_stacks, named_layers, unwrap
from torchfmri._torch import Hook, flatten, hook_side
from torchfmri.exceptions import InspectionError


@dataclass(eq=False)
class Stream:
    """What one pass left.

    Attributes:
        blocks: The blocks that the stream runs through.
        states: The stream before the first block and after each, (b, s, w), one more than blocks.
        tail: The outermost layers that ran after the last block, by name, in order.
        inputs: Layer -> the first tensor it was handed, of those that were asked for.
        outputs: Layer -> the first tensor it returned, of those that were asked for.
        output: What the model returned.
    """

    blocks: list[Block]
    states: list[Tensor] = field(default_factory=list)
    tail: dict[str, nn.Module] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    output: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """What the states are called: the embedding, then the blocks."""
        return ("embedding", *(block.name for block in self.blocks))


def only_stack(model: nn.Module) -> list[Block]:
    """Return the blocks of a model with one stack of blocks.

    Raises:
        InspectionError: The model has no stack of blocks, or several.
    """
    stacks = find_stacks(named_layers(model))
    kind = type(unwrap(model)).__name__
    if len(stacks) != 1:
        found = f"several: {', '.join(map(repr, stacks))}" if stacks else "none"
        raise InspectionError(
            f"A lens reads the stream of one stack of blocks, and {kind} has {found}. Pass the "
            "part that is one language model (model.language_model, for example)."
        )
    (blocks,) = stacks.values()
    return blocks


def run_stream(
    model: nn.Module,
    call: Callable[[], Any],
    *,
    inputs: Iterable[str] = (),
    outputs: Iterable[str] = (),
) -> Stream:
    """Run a model once and keep its stream.

    Args:
        model: The model.
        call: Runs it, and returns what it returned.
        inputs: Layers whose first input is kept as well.
        outputs: Layers whose first output is kept as well.

    Raises:
        InspectionError: There is no stream to read: no single stack of blocks, a block that does
            not return what it is handed in another state, or that runs several times.
    """
    stream = Stream(only_stack(model))
    layers = named_layers(model)
    kept = _Keeper(stream, layers)
    with ExitStack() as stack:
        for index, block in enumerate(stream.blocks):
            kept.add(stack, block.name, partial(kept.enter, index), partial(kept.leave, index))
        for name in inputs:
            kept.add(stack, name, partial(_keep, stream.inputs, name, "inputs"))
        for name in outputs:
            kept.add(stack, name, None, partial(_keep, stream.outputs, name, "outputs"))
        for name in kept.outside():
            kept.add(stack, name, partial(kept.begin, name), kept.end)
        stream.output = call()
    kept.check()
    return stream


class _Keeper:
    """The hooks of one pass."""

    def __init__(self, stream: Stream, layers: Mapping[str, nn.Module]) -> None:
        self._stream, self._layers = stream, layers
        self._states: list[list[Tensor]] = [[] for _ in range(len(stream.blocks) + 1)]
        self._depth, self._is_after = 0, False

    def add(
        self,
        stack: ExitStack,
        name: str,
        before: Callable[..., None] | None,
        after: Callable[..., None] | None = None,
    ) -> None:
        module = self._layers[name]
        # After other hooks, so that the stream is read as it was edited.
        for what, act in (("inputs", before), ("outputs", after)):
            if act is not None:
                stack.callback(hook_side(module, what, Hook(act, module)).remove)

    def outside(self) -> list[str]:
        """Return the layers that are not blocks, not in a block and not above one, each once."""
        blocks = [block.name for block in self._stream.blocks]
        others = {
            name: module
            for name, module in self._layers.items()
            if not any(f"{name}.".startswith(f"{each}.") for each in blocks)
            and not any(each.startswith(f"{name}." if name else "") for each in blocks)
        }
        return list(each_once(others))

    def enter(self, index: int, _: nn.Module, arguments: Any, keywords: Any) -> None:
        if index == 0:
            self._states[0].append(_first((arguments, keywords)))

    def leave(self, index: int, _: nn.Module, __: Any, output: Any) -> None:
        self._states[index + 1].append(_first(output))
        self._is_after = index + 1 == len(self._stream.blocks)

    def begin(self, name: str, *_: Any) -> None:
        if self._is_after and self._depth == 0:
            self._stream.tail[name] = self._layers[name]
        self._depth += 1

    def end(self, *_: Any) -> None:
        self._depth -= 1

    def check(self) -> None:
        """Raise if the states are not one stream."""
        shape = None if not self._states[0] else self._states[0][0].shape
        for block, found in zip([None, *self._stream.blocks], self._states, strict=True):
            name = "the first block" if block is None else repr(block.name)
            if len(found) != 1 or found[0].ndim != 3 or found[0].shape != shape:
                shapes = [tuple(each.shape) for each in found]
                raise InspectionError(
                    f"There is no stream (b, s, width) to read: {name} has {shapes}, but one "
                    f"tensor of the shape {shape and tuple(shape)} was expected."
                )
        self._stream.states = [found[0] for found in self._states]


def _keep(
    into: dict[str, Tensor], name: str, what: str, _: nn.Module, arguments: Any, other: Any
) -> None:
    # A hook before a call is handed arguments and keywords; one after it arguments and output.
    into[name] = _first((arguments, other) if what == "inputs" else other)


def _first(value: object) -> Tensor:
    for each in flatten(value):
        if each.tensor.is_floating_point():
            return each.tensor.detach().clone()
    return torch.empty(0, device="cpu")
