"""The stack of layers that are running, kept by hooks that are taken off again.

`Position` knows more: the backward pass too, and one pass at a time. This is for code that only
has to say where something happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn

from torchfmri._model import each_once, named_layers
from torchfmri._torch import NO_BACKWARD, Attached, Hook, current_backward


class RunningLayers(Attached):
    """The stack of layers that are running; a context manager that attaches and removes.

    Args:
        model: The model.
        returned: Called with what the outermost layer returned.

    Attributes:
        stack: The layers that run now, the innermost last.
        was_entered: Whether any layer has been called.
        calls: How often each layer was called; not counted when a checkpoint runs its part again.
    """

    def __init__(self, model: nn.Module, returned: Callable[[object], None]) -> None:
        self.stack: list[str] = []
        self.was_entered = False
        self.calls: Counter[str] = Counter()
        self._model, self._returned = model, returned

    def _attach(self, stack: ExitStack) -> None:
        stack.callback(self.stack.clear)
        for name, module in each_once(named_layers(self._model)).items():
            if isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                continue
            before = Hook(partial(self._before, name), module)
            stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            after = Hook(self._after, module)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)

    def _before(self, name: str, *_: object) -> None:
        self.was_entered = True
        if current_backward() == NO_BACKWARD:
            self.calls[name] += 1
        self.stack.append(name)

    def _after(self, _: nn.Module, __: object, output: object) -> None:
        if self.stack:
            self.stack.pop()
        if not self.stack:
            self._returned(output)
