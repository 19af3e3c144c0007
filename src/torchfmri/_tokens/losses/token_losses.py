"""The public function `token_losses`: one loss per token of a causal language model.

Users hand its result to `tokens.backward`, and scans take their losses from it. Column t is the
loss computed at position t, about token t + 1: this alignment is shared with per="position" and
must not move. The values add up to the loss of the given reduction. Labels are shifted instead of
logits, since shifting these would copy the largest tensor of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torchfmri._arguments import check_flag, check_number, check_tensor
from torchfmri.exceptions import InspectionError

_REDUCTIONS = ("none", "sum", "mean")


def token_losses(
    logits: Tensor,
    labels: Tensor,
    *,
    shift: bool = True,
    ignore_index: int = -100,
    reduction: str = "none",
) -> Tensor:
    """The loss of every token of a causal language model, (b, s), not added up.

    Column t holds the loss computed *at position t*, from the logits of position t. With `shift`
    (as in Transformers: `labels` are the input ids themselves) that is -log p(token t+1 | tokens
    up to t), and the last column is 0, because nothing comes after it. So the columns are the
    positions that token gradients have for `per="position"`. The surprisal of a scan belongs to
    the token that is predicted and sits one column further right: surprisal[t] = losses[t - 1].

    The values add up to the loss of your own reduction, and therefore their gradients add up to
    its gradient: with `reduction="mean"` each is divided by the number of labels that count, with
    "sum" and "none" (which are the same here) it is left as it is. Ignored labels have loss 0 and
    gradient 0. Narrow dtypes are computed in float32, as Transformers does.

    Args:
        logits: (b, s, vocabulary) or (s, vocabulary).
        labels: Token numbers, (b, s) or (s,); `ignore_index` where nothing is to be predicted,
            which padded positions should have.
        shift: Whether position t predicts label t+1; False where the labels are shifted already,
            or for a masked language model.
        ignore_index: The label that does not count.
        reduction: That of the loss that you train with: "none", "sum" or "mean".

    Raises:
        InspectionError: Shapes, dtypes or labels that do not fit.

    Examples:
        >>> import torch, torchfmri
        >>> logits, ids = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
        >>> torchfmri.token_losses(logits, ids, reduction="mean").shape
        torch.Size([2, 5])
    """
    check_number("ignore_index", ignore_index, None, "the label that does not count, such as -100")
    check_flag("shift", shift)
    _check(logits, labels, ignore_index, reduction)
    labels = labels.to(logits.device, torch.long)
    if shift:  # the labels move, not the logits: those would be copied
        labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    flat = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="none"
    )
    losses = flat.view(labels.shape)
    return losses / (labels != ignore_index).sum() if reduction == "mean" else losses


def _check(logits: Tensor, labels: Tensor, ignore_index: int, reduction: str) -> None:
    check_tensor("logits", logits, "the scores of the model, (b, s, vocabulary)")
    check_tensor("labels", labels, "token numbers, (b, s)")
    if reduction not in _REDUCTIONS:
        raise InspectionError(f"reduction={reduction!r}: choose one of {', '.join(_REDUCTIONS)}.")
    if not logits.is_floating_point() or logits.ndim not in (2, 3):
        raise InspectionError(
            "Logits are floating point numbers (b, s, vocabulary) or (s, vocabulary), not "
            f"{logits.dtype} of shape {tuple(logits.shape)}."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InspectionError(f"Labels are token numbers (integers), not {labels.dtype}.")
    if labels.shape != logits.shape[:-1]:
        raise InspectionError(
            f"Labels of shape {tuple(labels.shape)} do not fit logits of shape "
            f"{tuple(logits.shape)}: expected {tuple(logits.shape[:-1])}, one label per position. "
            "Do not cut off the first label or the last logits: shift=True does that."
        )
    vocabulary = logits.shape[-1]
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise InspectionError(
            f"Label {int(labels[place])} at {place} is not a token of a vocabulary of "
            f"{vocabulary:,}, and not ignore_index={ignore_index}."
        )
