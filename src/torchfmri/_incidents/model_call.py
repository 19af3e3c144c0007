"""One call of a model in a training step: enough of it to run it again.

`seen_step` remembers calls, `redone_step` and `replay_run` run them. A call holds the batch by
reference, which costs nothing at ordinary steps; so the versions of its tensors are kept too, which
tell if the loop wrote into its batch. A call whose data `was_written` must not be believed when it
is run again. `to_data` and `from_data` are a stored format. What else is kept of a call may grow
freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._model import RandomState, copy_of_data, device_of, random_state, runnable
from torchfmri._torch import flatten, map_tensors
from torchfmri.exceptions import InspectionError


class Autocast(NamedTuple):
    """The state of autocast for one type of device."""

    device: str
    enabled: bool
    dtype: torch.dtype
    cached: bool


class Output(NamedTuple):
    """Stands for a tensor that the model returned, in the arguments of the loss.

    Attributes:
        path: Its place in the output.
        shape: The loss may have got it in another shape.
    """

    path: str
    shape: tuple[int, ...]


@dataclass
class ModelCall:
    """What a model was called with, by reference, and the state around it.

    Attributes:
        arguments: The positional arguments.
        keywords: The keyword arguments.
        random: What the random generators were about to draw.
        autocast: The state of autocast around the call.
        given: The tensors that model and loss were handed, each with its version then, to see
            whether they were written into since.
        is_copy: Whether the arguments are copies, which nobody else writes into.
        is_written_by_model: Whether the model wrote into its arguments while it ran.
        outputs: Path -> storage of what was returned, until the loss has been seen.
        loss_arguments: What the loss module was called with; None if it was not seen, or holds
            something computed from the output that cannot be told.
        targets: Name -> what else the loss is computed from, as the user told it.
    """

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    random: RandomState
    autocast: tuple[Autocast, ...]
    given: list[tuple[Tensor, int]] = field(default_factory=list)
    is_copy: bool = False
    is_written_by_model: bool = False
    outputs: dict[int, str] = field(default_factory=dict)
    loss_arguments: tuple[Any, ...] | None = None
    targets: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> dict[str, Any]:
        """The arguments by number and name."""
        return {**{str(i): each for i, each in enumerate(self.arguments)}, **self.keywords}

    @property
    def data(self) -> dict[str, Any]:
        """The arguments of the model, the further arguments of the loss, and the targets."""
        given = self.loss_arguments or ()
        own = {f"loss argument {i}": each for i, each in enumerate(given)}
        return {
            **self.batch,
            **{name: each for name, each in own.items() if not isinstance(each, Output)},
            **self.targets,
        }

    @property
    def overwritten(self) -> set[int]:
        """The identities of those tensors given that were written into since."""
        return {id(tensor) for tensor, version in self.given if _version(tensor) != version}

    @property
    def was_written(self) -> bool:
        """Whether what is remembered is no longer what model and loss were called with."""
        return not self.is_copy and bool(self.overwritten)

    def ended(self) -> None:
        """Note that the model has run: who writes into its data from now on is the loop."""
        self.is_written_by_model = bool(self.overwritten)

    def returned(self, output: Any) -> None:
        """Remember what the model returned, by where it lies in memory."""
        self.outputs = {_address(each.tensor): each.path for each in flatten(output)}

    def reached_loss(self, arguments: tuple[Any, ...]) -> None:
        """Remember what the loss module was called with; the model's outputs are not kept."""
        found: list[Any] = []
        for each in arguments:
            if isinstance(each, Tensor) and _address(each) in self.outputs:
                found.append(Output(self.outputs[_address(each)], tuple(each.shape)))
            elif any(element.tensor.requires_grad for element in flatten(each)):
                return  # made from the output in a way that we do not know
            else:
                self.given += versions(each)
                found.append(map_tensors(each, copy_of_data) if self.is_copy else each)
        self.loss_arguments = tuple(found)

    def run(self, model: nn.Module, loss: Callable[..., Any] | None = None) -> Any:
        """Call the model again as it was called then, and the loss if there is one.

        The loss gets what it was called with then, or the output if that is not known.
        """
        arguments, keywords = copy_of_data(self.arguments), copy_of_data(dict(self.keywords))
        with self.state():
            output = runnable(model)(*arguments, **keywords)
            if loss is None:
                return output
            if self.loss_arguments is None:
                return loss(output)
            tensors = {each.path: each.tensor for each in flatten(output)}
            for each in self.loss_arguments:
                if isinstance(each, Output) and each.path not in tensors:
                    raise InspectionError(
                        f"The loss was called with output {each.path!r} of the model, which now "
                        f"returns {list(tensors)[:5]}. Use the model of the incident."
                    )
            given = [
                tensors[each.path].reshape(each.shape) if isinstance(each, Output) else each
                for each in self.loss_arguments
            ]
            return loss(*given)

    @contextmanager
    def state(self) -> Iterator[None]:
        """Set the random generators and autocast as they were at the call, for this block."""
        self.random.restore()
        with ExitStack() as stack:
            for device, enabled, dtype, cached in self.autocast:
                stack.enter_context(
                    torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached)
                )
            yield

    def to_data(self) -> dict[str, Any]:
        """Return the call in dicts, lists, numbers and tensors."""
        return {
            "arguments": self.arguments,
            "keywords": dict(self.keywords),
            "random": self.random.to_data(),
            "autocast": [list(each) for each in self.autocast],
            "loss_arguments": _encode_outputs(self.loss_arguments),
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> ModelCall:
        """Return the call that `to_data` gave.

        Raises:
            ValueError, TypeError, LookupError, RuntimeError: It gave something else.
        """
        arguments, keywords, given = data["arguments"], data["keywords"], data["loss_arguments"]
        if not isinstance(arguments, tuple) or not all(isinstance(key, str) for key in keywords):
            raise TypeError("its arguments are not a tuple, or its keywords are not strings")
        call = cls(
            arguments,
            dict(keywords),
            RandomState.from_data(data["random"]),
            tuple(_read_autocast(*each) for each in data["autocast"]),
        )
        if given is not None:
            call.loss_arguments = tuple(
                _read_output(**each) if kind == "output" else each for kind, each in given
            )
        return call


def call_of(
    model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any], copy: bool = False
) -> ModelCall:
    """Return the call that is about to be made, without waiting for a device.

    Args:
        model: The model that is called.
        arguments: The positional arguments.
        keywords: The keyword arguments.
        copy: Whether to copy the tensors among them, because somebody writes into them.
    """
    devices = dict.fromkeys(["cpu", device_of(model).type])
    states = tuple(
        Autocast(
            device,
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
        )
        for device in devices
    )
    given, named = versions((arguments, keywords)), dict(keywords)
    if copy:
        arguments, named = map_tensors(arguments, copy_of_data), map_tensors(named, copy_of_data)
    kept = {id(each.tensor) for each in flatten((arguments, named))}
    is_copy = copy and kept.isdisjoint(id(tensor) for tensor, _ in given)  # not of every container
    return ModelCall(arguments, named, random_state(), states, given=given, is_copy=is_copy)


def _read_autocast(device: Any, enabled: Any, dtype: Any, cached: Any) -> Autocast:
    kinds = (type(device), type(enabled), type(dtype), type(cached))
    if kinds != (str, bool, torch.dtype, bool) or torch.device(device).index is not None:
        raise TypeError("its autocast is not that of a device")
    return Autocast(device, enabled, dtype, cached)


def _read_output(path: Any, shape: Any) -> Output:
    if not isinstance(path, str) or any(type(size) is not int or size < 0 for size in shape):
        raise TypeError("an argument of its loss is not an output of the model")
    return Output(path, tuple(shape))


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor in memory; a negative number if it has none."""
    try:
        return tensor.data_ptr() or -id(tensor)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


def versions(values: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors among some values, each with the number of writes into it so far."""
    return [(each.tensor, _version(each.tensor)) for each in flatten(values)]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _encode_outputs(arguments: tuple[Any, ...] | None) -> list[Any] | None:
    if arguments is None:
        return None
    return [
        ["output", {"path": each.path, "shape": list(each.shape)}]
        if isinstance(each, Output)
        else ["value", each]
        for each in arguments
    ]
