"""Which token positions are padding, while a model runs.

Inspections, Monitors, token gradients and routing follow it, so that padding is in no statistic. A
module that is handed a two-dimensional `attention_mask` sets the padding for everything that runs
inside it; the modules inside it may be handed other masks (a four-dimensional one changes nothing,
`None` means that nothing is padded). Attach the taps first: their hooks must run inside ours. Each
call that enters must leave, also after an exception. Ctrl-C can skip that, so a call that is
entered a second time ends the first. A mask that cannot be aligned with a tensor leaves all
positions in; it never guesses.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._torch import Hook, HookSet, flatten_arguments

_TOKENS = ("input_ids", "inputs_embeds", "hidden_states")


class TokenMask(NamedTuple):
    """Which positions are tokens (True) and which are padding.

    Attributes:
        kept: (b, s) for the sequence that the module runs on; None if it is unknown.
        memory: (b, s') for the encoder's sequence that a decoder attends to; None without one.
    """

    kept: Tensor | None
    memory: Tensor | None = None

    def align(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return `tensor` with its token axes first and the mask over them; None if it has none.

        Understands (b, s, ...), (b * s, w), (b, heads, s, ...) and, for integers, (b, s).
        """
        if self.kept is not None and (aligned := _align(self.kept, tensor)) is not None:
            return aligned
        # With a length of its own it cannot be mistaken for the decoder's sequence.
        return None if self.memory is None else _align(self.memory, tensor)


def _align(kept: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the tensor and the mask over its leading axes; None if no axes match for certain."""
    b, s = kept.shape
    shape = tuple(tensor.shape) if not tensor.is_nested else ()
    kept = kept if kept.device == tensor.device else kept.to(tensor.device)
    whole = not tensor.is_floating_point() and len(shape) == 2
    if shape[:2] == (b, s) and (len(shape) >= 3 or whole):
        return tensor, kept
    if len(shape) == 2 and s > 1 and shape[0] == b * s:
        return tensor, kept.reshape(-1)
    if len(shape) == 4 and (shape[0], shape[2]) == (b, s):
        return tensor.transpose(1, 2), kept
    return None


class _Inside(NamedTuple):
    """A running module that takes a mask, and the padding that holds inside it."""

    module: int
    mask: TokenMask | None


class Running(defaultdict[int, list[_Inside]]):
    """The running modules that take a mask, by thread, the innermost last.

    Attributes:
        is_padded: Something was, since the hooks are there.
    """

    is_padded = False


class Padding:
    """Follows the padding through a run, by hooks on the modules that take an attention_mask.

    Args:
        modules: Modules that are handed a mask; see `masked_modules`.
        failed: Called with an error in a hook of ours; by default the error comes through.

    Attributes:
        running: The modules that run, and whether anything was padded at all.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._failed = failed
        self._modules = modules
        self.running = Running(list)
        self._hooks = HookSet()

    def current(self) -> TokenMask | None:
        """Return the padding that holds for the module running in this thread."""
        if not self.running.is_padded:
            return None
        stack = self.running[get_ident()]
        return stack[-1].mask if stack else None

    def attach(self) -> None:
        """Add the hooks; attach the taps first, so that theirs run inside ours."""
        places = {id(each): _mask_place(type(each).forward) for each in self._modules}
        enter = _Enter(places, self.running, self._failed)
        self._hooks.before(self._modules, enter, first=True)
        self._hooks.after(self._modules, _Leave(self.running), always=True)

    def detach(self) -> None:
        """Remove the hooks; safe to call twice."""
        self._hooks.remove()
        self.running.clear()
        self.running.is_padded = False


def _end_call(stack: list[_Inside], key: int) -> None:
    """Take a module and those called inside it off the stack; nothing if it is not running."""
    for index in range(len(stack) - 1, -1, -1):
        if stack[index].module == key:
            del stack[index:]
            return


class _Leave(Hook):
    """The forward hook of all these modules; a copy of a model takes it along as a no-op."""

    __slots__ = ("_running",)

    def __init__(self, running: Running) -> None:
        super().__init__(None)
        self._running = running

    def __call__(self, module: nn.Module, *_: object) -> None:
        _end_call(self._running[get_ident()], id(module))


class _Enter(Hook):
    """The hook before the calls of all these modules; by their ids, where each finds its mask."""

    __slots__ = ("_places", "_running")

    def __init__(
        self,
        places: dict[int, tuple[int, bool]],
        running: Running,
        failed: Callable[[Exception], None] | None,
    ) -> None:
        super().__init__(None, failed=failed)
        self._places, self._running = places, running

    def __call__(
        self, module: nn.Module, arguments: tuple[object, ...], keywords: Mapping[str, object]
    ) -> None:
        key = id(module)
        place = self._places.get(key)
        if place is None:  # a copy of a module
            return
        stack = self._running[get_ident()]
        # An interrupt ends a call without its forward hook: entered again, it is not running.
        _end_call(stack, key)
        outer = stack[-1].mask if stack else None
        found = outer
        try:
            found = self._find(place, arguments, keywords, outer, bool(stack))
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)
        finally:
            stack.append(_Inside(key, found))  # whatever happened, the forward hook pops one
            if found is not None:
                self._running.is_padded = True

    def _find(
        self,
        place: tuple[int, bool],
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
        outer: TokenMask | None,
        is_inside: bool,
    ) -> TokenMask | None:
        """Return the padding inside this call, given that around it."""
        index, has_two_sequences = place
        if has_two_sequences or "decoder_input_ids" in keywords:
            return None  # the mask belongs to the encoder, which is handed it by itself
        mask = keywords.get("attention_mask", self)
        if mask is self and len(arguments) > index:
            mask = arguments[index]
        memory = keywords.get("encoder_attention_mask")
        if memory is None and outer is None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            return None
        kept, memory_kept = outer or (None, None)
        if isinstance(memory, Tensor) and memory.ndim == 2:
            # As long as the decoder's own sequence, it could not be told from it.
            same = memory.shape[1] == _length(arguments, keywords)
            memory_kept = None if same else _kept(memory, is_inside)
        if mask is None:
            kept = None
        elif isinstance(mask, Tensor) and mask.ndim == 2:
            kept = _kept(mask, is_inside)
            length = _length(arguments, keywords)
            if 0 < length < mask.shape[1]:  # with a KV cache it covers earlier positions as well
                kept = kept[:, -length:]
        return None if kept is memory_kept is None else TokenMask(kept, memory_kept)


def _kept(mask: Tensor, is_inside: bool) -> Tensor:
    """Return True where a mask keeps a position, and False where it is padding.

    Most masks are 1 there. One that is added to attention scores is 0, or above, and negative where
    a position is padding; a model hands it to its own layers.
    """
    mask = mask.detach()
    if mask.is_floating_point():
        is_plain = bool(((mask == 0) | (mask == 1)).all())
        if not is_plain or (is_inside and not bool(mask.any())):
            return mask >= 0
    return mask != 0


def _length(arguments: tuple[object, ...], keywords: Mapping[str, object]) -> int:
    """Return how many positions this call runs on; 0 where it cannot be told."""
    named = [keywords.get(name) for name in _TOKENS]
    for tokens in [*named, *(each.tensor for each in flatten_arguments(arguments, {}))]:
        if isinstance(tokens, Tensor) and tokens.ndim >= 2:
            return tokens.shape[1]
    return 0


def masked_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that are handed an `attention_mask`, each once.

    The first one, which is the model, may be handed it through `**keywords` as well.
    """
    found = {id(e): e for at, e in enumerate(modules) if _takes_mask(e, is_model=at == 0)}
    return list(found.values())


def _takes_mask(module: nn.Module, is_model: bool) -> bool:
    if isinstance(module, torch.jit.ScriptModule):  # takes no hooks, and its class has no forward
        return False
    names = _parameters(type(module).forward)
    return "attention_mask" in names or (is_model and names[-1:] == ("**",))


@lru_cache(maxsize=4096)
def _parameters(forward: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of its arguments after `self`, `**` for any others."""
    try:
        found = [*inspect.signature(forward).parameters.values()][1:]
    except (TypeError, ValueError):  # a forward written in C has no signature
        return ()
    return tuple("**" if e.kind is e.VAR_KEYWORD else e.name for e in found)


@lru_cache(maxsize=4096)
def _mask_place(forward: Callable[..., object]) -> tuple[int, bool]:
    """Return the place of the mask among the arguments, and whether there are two sequences."""
    names = _parameters(forward)
    known = "attention_mask" in names  # else somebody has replaced a forward that had it
    return names.index("attention_mask") if known else sys.maxsize, "decoder_input_ids" in names
