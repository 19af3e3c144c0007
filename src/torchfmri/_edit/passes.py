"""Which tokens a pass of a model is fed: rows, tokens, and how many stand in its cache.

`BoundEdit` asks for positions and `with_grad`, `attached` starts `listening`, and `_lesion` calls
`feed` if it edits values outside a pass. Positions count from the start of the sequence, also
while a cache is used, so a cache that does not say its length is refused. A reentrant checkpoint
switches grad mode off inside, so `with_grad` is that of the model's own call. `current` stays set
after the model has returned, because a checkpoint runs its part again in the backward pass. The
names of arguments that `_IDS` and `_cached` know may be extended freely.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._model import runnable, unwrap
from torchfmri._torch import Hook, hook_side, hooked
from torchfmri.exceptions import InspectionError

# The arguments by which models are fed tokens; (b, s) or (b, s, width).
_IDS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


class Fed(NamedTuple):
    """The tokens of one pass.

    Attributes:
        b: Rows.
        s: Tokens of each.
        before: Tokens in the cache; None if a cache does not say.
    """

    b: int
    s: int
    before: int | None


class EditPasses:
    """Knows what the pass that runs now was fed.

    Attributes:
        current: The tokens of the pass that runs; None outside a pass, or without tokens.
        with_grad: Whether the model was called with grad mode on. Inside, a reentrant checkpoint
            switches it off, and on again when it runs once more.
    """

    def __init__(self) -> None:
        self.current: Fed | None = None
        self.with_grad = True

    def feed(self, b: int, s: int) -> None:
        """Take b rows of s tokens as what the model is fed."""
        self.current = Fed(b, s, 0)

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        """Notice every call of the model while the block runs."""
        module = unwrap(runnable(model))

        def begin(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self.current = _fed(arguments, keywords)
            self.with_grad = torch.is_grad_enabled()

        with hooked([hook_side(module, "inputs", Hook(begin, module), prepend=True)]):
            try:
                yield
            finally:
                self.current = None

    def positions(self, value: Tensor, layer: str) -> tuple[int, int, int]:
        """Return rows, tokens and the position of the first token of a layer's value.

        Raises:
            InspectionError: The value has no token axis, or a cache does not say how long it is.
        """
        fed = self.current
        if fed is not None and fed.before is None:
            raise InspectionError(
                f"The edit of {layer!r} selects tokens, and the model's cache does not say how "
                "many tokens are in it. Generate with use_cache=False, or edit all tokens."
            )
        before = 0 if fed is None or fed.before is None else fed.before
        if fed is not None and value.shape[:2] == (fed.b, fed.s):
            return fed.b, fed.s, before
        if fed is not None and value.shape[:1] == (fed.b * fed.s,):
            return fed.b, fed.s, before
        if value.ndim >= 3 and (fed is None or not before):  # images, and the encoder's own tokens
            return value.shape[0], value.shape[1], 0
        raise InspectionError(
            f"The edit of {layer!r} selects tokens, and its value of shape {tuple(value.shape)} "
            f"has no token axis{'' if fed is None else f' for {fed.b} x {fed.s} tokens'}. Leave "
            "tokens= out, or edit the layer around it."
        )


def _fed(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Fed | None:
    given = [keywords.get(name) for name in _IDS] + list(arguments[:1])
    ids = [each for each in given if isinstance(each, Tensor) and each.ndim in (2, 3)]
    if not ids:
        return None
    fed = ids[-1] if keywords.get("decoder_input_ids") is not None else ids[0]
    return Fed(int(fed.shape[0]), int(fed.shape[1]), _cached(keywords))


def _cached(keywords: dict[str, Any]) -> int | None:
    """Return how many tokens are in the cache that a model is given; None if it does not say."""
    caches = [keywords.get(name) for name in ("past_key_values", "cache_params", "past_key_value")]
    for cache in caches:
        if cache is None:
            continue
        length = getattr(cache, "get_seq_length", None)
        if callable(length) and keywords.get("cache_params") is None:
            return int(length())
        start = keywords.get("cache_position")
        return int(start[0]) if isinstance(start, Tensor) and start.numel() else None
    return 0
