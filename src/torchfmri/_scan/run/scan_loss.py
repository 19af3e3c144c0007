"""The loss that the gradients of a scan are of: `ScanLoss`, one value per position.

`Scanner` makes it with `check_loss`, before anything is generated; the gradient passes compute it
and ask which positions have a gradient. Position t holds the loss computed from the logits at t.
The sentence in `text` is stored in the meta of scans and read again by `record/reading.py`, which
looks for `OWN_LOSS` and `ALL_TOKENS` in it. Users' functions are called with output, ids and
generated, and with `mask` only if they name it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import TypeAlias

import torch
from torch import Tensor

from torchfmri._scan.record.reading import ALL_TOKENS, OWN_LOSS
from torchfmri._tokens import token_losses
from torchfmri.exceptions import InspectionError

IGNORED = -100
OwnLoss: TypeAlias = Callable[..., Tensor]
"""A user's own: the model's output, (b, s) ids, (b, s) whether they were generated -> one number,
or one per token, (b, s). Where it has a parameter `mask`, that is (b, s), 0 for padding."""


@dataclass(frozen=True, eq=False)
class ScanLoss:
    """The loss of one scan.

    Attributes:
        kind: "generated" or "all" tokens, or "own".
        own: The user's function.
        causal: Whether position t predicts token t + 1.
    """

    kind: str
    own: OwnLoss | None = None
    causal: bool = True

    @property
    def text(self) -> str:
        """What the gradients are of, in words."""
        if self.own is not None:
            return f"{OWN_LOSS} ({getattr(self.own, '__name__', type(self.own).__name__)})"
        tokens = "the generated tokens" if self.kind == "generated" else ALL_TOKENS
        given = "given those before it" if self.causal else "at its own position"
        return f"the sum of -log p of {tokens}, each {given}"

    def labels(self, ids: Tensor, mask: Tensor, generated: Tensor) -> Tensor:
        """(b, s): the ids that count, and IGNORED."""
        counts = mask.bool() if self.kind == "all" else mask.bool() & generated
        labels = ids.masked_fill(~counts, IGNORED)
        if self.causal:
            # The first token of a row is predicted by nothing; what stands before it is padding.
            first = mask.long().cumsum(-1) == 1
            labels = labels.masked_fill(first & mask.bool(), IGNORED)
        return labels

    def losses(
        self, output: object, logits: Tensor | None, ids: Tensor, mask: Tensor, generated: Tensor
    ) -> Tensor:
        """One loss per position, (b, s), which add up to the loss; or one number if it is own.

        Raises:
            InspectionError: There are no logits to take it from, or the user's loss is no number.
        """
        if self.own is not None:
            masked = {"mask": mask} if "mask" in signature(self.own).parameters else {}
            found = self.own(output, ids, generated, **masked)
            if not isinstance(found, Tensor) or not found.requires_grad:
                raise InspectionError(
                    f"loss= must return a tensor that depends on the model's output, not {found!r}."
                )
            return found
        if logits is None:
            raise InspectionError(
                "The model returned no logits (b, s, vocabulary), so there is no loss to take "
                "gradients of. Give one: loss=lambda output, ids, generated: ..., or per=None."
            )
        if logits.shape[:2] != ids.shape:
            raise InspectionError(
                f"The model returned logits for {tuple(logits.shape[:2])} (b, s) positions where "
                f"{tuple(ids.shape)} were fed: the loss needs those of every position. Give your "
                "own loss=, or per=None."
            )
        labels = self.labels(ids, mask, generated)
        if not bool((labels != IGNORED).any()):
            raise InspectionError(
                f"No token counts for the loss {self.kind!r}: nothing was generated, or there is "
                "a single token. Use loss='all' with at least two tokens, or per=None."
            )
        return token_losses(logits, labels, shift=self.causal, ignore_index=IGNORED)


def check_loss(loss: str | OwnLoss | None, generates: bool, causal: bool) -> ScanLoss:
    """The loss that was asked for; by default over what was generated, else over all tokens.

    Raises:
        InspectionError: It is neither a known name nor a function.
    """
    if callable(loss):
        _check_arguments(loss)
        return ScanLoss("own", loss, causal)
    if loss is None:
        loss = "generated" if generates else "all"
    if loss not in ("generated", "all"):
        raise InspectionError(
            f"loss={loss!r}: choose 'generated', 'all', or a function of output, ids and generated."
        )
    if loss == "generated" and not generates:
        raise InspectionError(
            "loss='generated', but with max_new_tokens=0 nothing is generated. Use loss='all'."
        )
    return ScanLoss(loss, None, causal)


def _check_arguments(loss: OwnLoss) -> None:
    """Raise where a function cannot be called as a loss is: better now than after generating."""
    try:
        found = signature(loss)
    except (TypeError, ValueError):  # it has none that could be read
        return
    try:
        masked = {"mask": 0} if "mask" in found.parameters else {}
        found.bind("output", "ids", "generated", **masked)
    except TypeError as error:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise InspectionError(
            f"loss={name}{found} is called with output, ids and generated ({error}). Write it as "
            "def loss(output, ids, generated), with mask as a fourth parameter if it wants that."
        ) from error


def gradient_positions(
    loss: ScanLoss, own_step: bool, ids: Tensor, mask: Tensor, generated: Tensor
) -> Tensor:
    """(b, s): whether this position has a gradient at all.

    Args:
        loss: What is differentiated.
        own_step: Whether the gradient of a position is that of its own loss alone.
        ids: (b, s).
        mask: (b, s).
        generated: (b, s).
    """
    keep = mask.bool()
    if loss.own is None and own_step:
        return position_has_loss(loss, ids, mask, generated)
    if loss.own is None and loss.causal:  # nothing depends on the last position
        following = torch.zeros_like(keep)
        following[:, :-1] = keep[:, 1:]
        return keep & following
    return keep


def position_has_loss(loss: ScanLoss, ids: Tensor, mask: Tensor, generated: Tensor) -> Tensor:
    """(b, s): whether the loss at this position counts (it predicts a label that counts)."""
    labels = loss.labels(ids, mask, generated) != IGNORED
    if not loss.causal:
        return labels
    return torch.cat([labels[:, 1:], torch.zeros_like(labels[:, :1])], 1)
