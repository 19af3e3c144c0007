"""The pieces that make token gradients fast, each with a way to switch it off for one step.

`python -m benchmarks token_gradients --without all` times a step without each of them beside one
with all of them. A piece saves host time per call of a layer, so a deep and narrow model shows it
best: `--layers 28 --hidden-size 64 --intermediate-size 128 --tokens 16 --vocabulary 64`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

from benchmarks._timing import Run
from torchfmri._capture import taps
from torchfmri._tokens.calls import arrivals, gradients, plan, plans
from torchfmri._torch import HookSet, OutputHooks, private

_MAPS: dict[int, Any] = {}


def without_kept_plans() -> list[Any]:
    """Plan anew at every step; what was found out about tokens is kept all the same."""

    def plan_of(model: nn.Module, pattern: Any, voxel: int) -> Any:
        plans._KEPT.clear()
        made = plans.plan_of(model, pattern, voxel)
        return made._replace(maps=_MAPS.setdefault(id(model), made.maps))

    return [patch.object(gradients, "plan_of", plan_of)]


def without_code_reading() -> list[Any]:
    """Look at every container's calls: that it only calls its children is not read off its code."""
    return [patch.object(plan, "_only_calls", lambda container: False)]


def without_waiting() -> list[Any]:
    """Take in each gradient as it comes."""
    return [patch.object(arrivals, "most_waiting", lambda *_: (1, 0))]


def without_fast_hook() -> list[Any]:
    """Hand each call of a layer to its general tap."""
    return [patch.object(taps._ShortHook, "__call__", _general)]


def _general(hook: Any, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
    owner = hook._owners.get(id(module))
    if owner is not None:
        hook._tap(hook._short.target(owner)).after(module, arguments, keywords, output)


def without_shared_handles() -> list[Any]:
    """Register each hook by PyTorch's own calls, with a handle for each."""

    def before(self: Any, modules: Any, hook: Any, first: bool = False) -> None:
        for each in modules:
            add = each.register_forward_pre_hook
            self._handles.append(add(hook, prepend=first, with_kwargs=True))

    def after(self: Any, modules: Any, hook: Any, always: bool = False) -> None:
        for each in modules:
            add = each.register_forward_hook
            self._handles.append(add(hook, with_kwargs=True, always_call=always))

    def gradient(self: Any, parameter: Any, hook: Any) -> None:
        self._handles.append(parameter.register_hook(hook))

    replaced = {"before": before, "after": after, "gradient": gradient}
    return [patch.object(HookSet, name, act) for name, act in replaced.items()]


def without_shared_output_hooks() -> list[Any]:
    """Register a hook for each output, with a handle for each."""

    def add(self: Any, tensor: Any, node: Any, call: Any) -> None:
        hook = private.partial(private._come, self._arrived, call)
        self._handles.append(tensor.register_hook(hook))

    return [patch.object(OutputHooks, "add", add)]


PIECES: dict[str, Callable[[], list[Any]]] = {
    "kept_plans": without_kept_plans,
    "code_reading": without_code_reading,
    "waiting": without_waiting,
    "fast_hook": without_fast_hook,
    "shared_handles": without_shared_handles,
    "shared_output_hooks": without_shared_output_hooks,
}


@contextmanager
def switched_off(pieces: list[Any], kept: dict[Any, Any]) -> Iterator[None]:
    """Take these pieces out, and have plans of its own: a plan was made with what was there."""
    outside = dict(plans._KEPT)
    plans._KEPT.clear()
    plans._KEPT.update(kept)
    with ExitStack() as stack:
        for each in pieces:
            stack.enter_context(each)
        yield
    kept.clear()
    kept.update(plans._KEPT)
    plans._KEPT.clear()
    plans._KEPT.update(outside)


def stripped(watch: Run, piece: str) -> Run:
    """The step of `watch` without a piece."""
    kept: dict[Any, Any] = {}

    def run() -> object:
        with switched_off(PIECES[piece](), kept):
            return watch()

    return run
