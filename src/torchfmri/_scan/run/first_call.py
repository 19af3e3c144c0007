"""Notice which position the first token has while a model generates: `FirstCall`.

`BatchRun` puts it around generation and feeds the same `position_ids` to the passes for gradients;
otherwise a model that counts differently by itself (RoBERTa starts at 2) would compute something
else there. Only the first call is looked at, and the hook removes itself in it, so later steps pay
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from torchfmri._model import unwrap
from torchfmri._scan.run.model_call import held_positions
from torchfmri._torch import Attached, Hook


class FirstCall(Attached):
    """A hook on the first call of a model that generates, as a context manager.

    `generate` of transformers counts positions from 0. Some models number positions
    differently by default (RoBERTa starts at 2), so without position_ids they give other results.

    Args:
        model: The model that generates.
        mask: (b, s) of the prompt, 0 for padding.

    Attributes:
        first: The position of the first token that is not padding; None where the model was not
            told any positions.
    """

    def __init__(self, model: nn.Module, mask: Tensor) -> None:
        self._model, self._mask = unwrap(model), mask
        self._handle: Any = None
        self.first: int | None = None

    def _attach(self, stack: ExitStack) -> None:
        hook = Hook(self._called, self._model)
        self._handle = self._model.register_forward_pre_hook(hook, with_kwargs=True)
        stack.callback(self._handle.remove)

    def _called(
        self, model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        self._handle.remove()
        positions = keywords.get("position_ids")
        if isinstance(positions, Tensor) and positions.ndim == 2:
            fed = positions.shape[1]
            until = held_positions(keywords, fed, seen=0, again=False) + fed
            padding = int((self._mask[0, :until] == 0).sum())
            self.first = int(positions[0, -1]) - (until - 1 - padding)
