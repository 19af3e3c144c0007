"""Everything about a model that a forward pass may change, saved and put back bit for bit.

We run the user's model only inside `unchanged`. It puts back buffers, modes, attributes and the
contents of containers, each of them even if another fails. Values go back through `.data`: views
follow, and autograd counts no write. Parameters are not copied, because they are too large;
`written` gets the names of those that were written into. A tensor is written only if its bits
differ: 0 equals -0, and NaN equals nothing, so comparing values would not do.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchfmri._model.generators import random_state
from torchfmri._model.layers import every_module
from torchfmri._model.process import whole_restorations
from torchfmri._model.threads import own_turn, watched
from torchfmri.exceptions import InspectionError


@contextmanager
def unchanged(model: nn.Module, written: Callable[[str], None] | None = None) -> Iterator[None]:
    """Leave `model` and the random generators as they were, also after an exception.

    Restored are buffers, modes, plain attributes (caches, counters), the tensors and the contents
    of lists, dicts and sets that modules hold at any depth, and the weights of embeddings that
    renormalise themselves. Other parameters are too large to copy: `written` is told the name of
    each that the forward pass wrote into. `.grad` is for the caller to spare.

    Other threads wait for their turn to run a model; this one may nest such blocks.

    Raises:
        InspectionError: The model has lazy parameters, or another thread watches it.
    """
    with own_turn(), watched(model), _restored(model, written):
        yield


@contextmanager
def _restored(model: nn.Module, written: Callable[[str], None] | None) -> Iterator[None]:
    """Put everything back at the end of the block; `written` gets names of changed parameters."""
    modules = every_module(model)
    _reshard(modules)
    # An optimizer's step changes the mode in a function of its own: Ctrl-C may leave it changed.
    grad_mode: Callable[[], object] = partial(torch.set_grad_enabled, torch.is_grad_enabled())
    # Embeddings that write into their weights in each forward pass.
    kinds = (nn.Embedding, nn.EmbeddingBag)
    writing = [each for each in modules if isinstance(each, kinds) and each.max_norm]
    renormalised = [each.weight for each in writing]
    restore = [random_state().restore, grad_mode, *_save_modules(model, modules, renormalised)]
    spared = {id(each) for each in renormalised}
    versions = [
        (module, key, parameter, parameter._version)
        for module in modules
        for key, parameter in module._parameters.items()
        if parameter is not None and id(parameter) not in spared and not parameter.is_inference()
    ]
    try:
        with ExitStack() as stack:  # should one of them fail, the others still run
            for put_back in restore:
                stack.callback(put_back)
            stack.callback(_reshard, modules)  # before the others: the last one in is the first out
            yield
    finally:
        changed: set[int] = set()  # a shared one is named once
        for module, key, parameter, version in versions:
            if written is not None and parameter._version != version:
                if id(parameter) not in changed:
                    name = _name_of(module, model)
                    written(f"{name}.{key}" if name else key)
                changed.add(id(parameter))


def _name_of(module: nn.Module, model: nn.Module) -> str:
    """Return the first name of a module; walking over a large model takes milliseconds."""
    names: dict[int, str] = {id(each): name for name, each in model.named_modules()}
    return names.get(id(module), "")


def _reshard(modules: Sequence[nn.Module]) -> None:
    """Let FSDP (`fully_shard`) put its shards in the place of the gathered parameters.

    After a forward pass some stay gathered, and FSDP remembers that: were only the parameters put
    back, the next pass would take the shards for the whole.
    """
    lines = {kind: {each.__name__ for each in kind.__mro__} for kind in set(map(type, modules))}
    kinds = {kind for kind, names in lines.items() if "FSDPModule" in names}
    for module in modules if kinds else ():
        if type(module) in kinds:
            module.reshard()  # type: ignore[operator]


@contextmanager
def generators_restored() -> Iterator[None]:
    """Leave the random generators as they were."""
    with own_turn():
        state = random_state()
        try:
            yield
        finally:
            state.restore()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and afterwards back into the mode that it had."""
    with whole_restorations():
        modes = [(module, module.training) for module in every_module(model)]
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def copy_of_data(value: Any) -> Any:
    """Return `value` with every tensor copied and detached, so that nothing writes into it.

    A leaf that requires grad still does, on the copy. Other objects (a KV cache) are deep-copied.
    """
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, tuple):
        copies = [copy_of_data(each) for each in value]
        return type(value)(*copies) if hasattr(value, "_fields") else tuple(copies)
    if isinstance(value, list):
        return [copy_of_data(each) for each in value]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, copy_of_data(each)) for key, each in value.items())
    if value is None or callable(value) or isinstance(value, (str, bytes, int, float, complex)):
        return value
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise InspectionError(
            f"The {type(value).__name__} among the data cannot be copied ({error}), and the model "
            "might change it. Pass tensors, numbers and containers of these, or give its class a "
            "__deepcopy__."
        ) from error


def _save_modules(
    model: nn.Module, modules: Sequence[nn.Module], spared: Iterable[Tensor]
) -> list[Callable[[], None]]:
    """Return what puts back the attributes of each module, and what these hold."""
    renormalised = {id(each): each for each in spared}
    own = {id(each) for module in modules for each in module._parameters.values()}
    held: dict[int, Any] = dict(renormalised)
    empty: list[Any] = []
    for module in modules:
        if module._parameters and any(map(is_lazy, module._parameters.values())):  # type: ignore[arg-type]
            raise InspectionError(
                f"{_name_of(module, model) or 'The model'!r} has lazy parameters, which the first "
                "call creates for good. Run the model once by yourself first."
            )
        state = module.__dict__
        if "_buffers" not in state:  # a scripted one
            state = {**state, "_buffers": dict(module._buffers.items())}
        for value in state.values():
            kind = type(value)
            if kind in _CONTAINERS:
                if value:
                    _collect(value, held)
                else:
                    empty.append(value)  # most are: the places for hooks
            elif kind not in _PLAIN:
                _collect(value, held)
    containers: list[Any] = []
    tensors: list[Tensor] = []
    for value in held.values():
        if not isinstance(value, Tensor):
            (containers if value else empty).append(value)
        elif id(value) in renormalised or not (
            id(value) in own or (isinstance(value, nn.Parameter) and value.requires_grad)
        ):  # the last is somebody else's parameter, reached through a plain attribute
            tensors.append(value)
    return [
        _save_attributes(modules),
        partial(_empty_again, empty),
        _save_contents([each for each in containers if not isinstance(each, tuple)]),
        *map(_save_tensor, tensors),
    ]


def _empty_again(containers: list[Any]) -> None:
    """Empty the containers that were empty before, as most are (the places for hooks)."""
    for each in filter(None, containers):
        each.clear()


def _collect(value: Any, held: dict[int, Any]) -> None:
    """Gather the tensors and containers reached from an attribute through containers alone."""
    if isinstance(value, Tensor):
        if not is_lazy(value):
            held.setdefault(id(value), value)
        return
    if type(value) not in _CONTAINERS or id(value) in held:
        return
    held[id(value)] = value
    for each in list(value.values() if isinstance(value, Mapping) else value):
        _collect(each, held)


_CONTAINERS = frozenset((list, dict, set, tuple, OrderedDict, deque))
_PLAIN = frozenset((bool, int, float, str, type(None)))


def _save_attributes(modules: Iterable[nn.Module]) -> Callable[[], None]:
    saved = [(each.__dict__, dict(each.__dict__)) for each in modules]

    def put_back() -> None:
        for now, attributes in saved:
            if _same_content(now, attributes):  # nearly always, and a model has hundreds of modules
                continue
            for key in [key for key in now if key not in attributes]:
                del now[key]
            for key, value in attributes.items():
                if key not in now or now[key] is not value:
                    now[key] = value

    return put_back


def _save_contents(containers: Iterable[Any]) -> Callable[[], None]:
    """Return what puts back the contents of containers, in the same ones: others hold them."""
    saved = [(each, copy.copy(each)) for each in containers]

    def put_back() -> None:
        for container, content in saved:
            if not _same_content(container, content):
                container.clear()
                add = container.extend if isinstance(container, (list, deque)) else container.update
                add(content)

    return put_back


def _same_content(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects; equal ones may be told apart by their users."""
    if len(one) != len(other):
        return False
    if isinstance(one, set):  # in any order
        return set(map(id, one)) == set(map(id, other))
    if isinstance(one, Mapping) and not all(map(is_, one.values(), other.values())):
        return False
    return all(map(is_, one, other))


def _save_tensor(tensor: Tensor) -> Callable[[], None]:
    saved = tensor.detach().clone()

    def put_back() -> None:
        # Through .data: views of this tensor follow, and autograd does not count it as a write.
        if tensor.shape != saved.shape:
            tensor.data = saved
        elif not _same_bits(tensor.detach(), saved):
            tensor.data.copy_(saved)

    return put_back


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors of one shape hold the same bits; False if that is hard to tell."""
    if one.layout != torch.strided or one.is_nested:
        return False
    if torch.equal(one, other):
        # Zero and minus zero are equal but not the same.
        return not one.is_floating_point() or torch.equal(one.signbit(), other.signbit())
    # NaN is not equal to itself: compare the bytes.
    return torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )
