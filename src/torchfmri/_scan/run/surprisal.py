"""Surprisal and entropy of tokens, in nats, from the logits they were drawn from.

`gradient_pass` and `cached_pass` call `surprisal_and_entropy` on whole sequences; `live` feeds a
`Surprisals` step by step, which reads the waiting logits together. The logits of a step are copied
at once, because `generate` may divide them by a temperature in place. nan means that the model gave
no logits for a token. Narrow dtypes are computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class Surprisals:
    """Surprisal and entropy of the tokens of a batch while they come.

    The logits of single steps wait until they are read together.

    Args:
        b: Rows.
        s: Positions.
        device: Where.

    Attributes:
        surprisal: (b, s), nan where the model gave no logits for a token.
        entropy: (b, s) of the distributions that they were drawn from.
        bytes: What waits, with what reading it takes.
    """

    def __init__(self, b: int, s: int, device: torch.device) -> None:
        self.surprisal = torch.full((b, s), torch.nan, device=device)
        self.entropy = self.surprisal.clone()
        self._waiting: list[tuple[Tensor, Tensor]] = []  # logits, and the token drawn from them
        self._first = 0
        self._next: Tensor | None = None  # the logits that the next token is drawn from
        self.bytes = 0

    def grow(self, s: int) -> None:
        """Make room for `s` positions."""
        missing = s - self.surprisal.shape[1]
        self.surprisal = F.pad(self.surprisal, (0, missing), value=torch.nan)
        self.entropy = F.pad(self.entropy, (0, missing), value=torch.nan)

    def take(self, logits: Tensor, first: int, ids: Tensor) -> None:
        """Take in the logits of the last of the positions from `first` on.

        Args:
            logits: (b, m, vocabulary) of the last m positions; row j predicts the one after it.
            first: The first position of the pass.
            ids: (b, n) its tokens.
        """
        count = ids.shape[1]
        logits = logits[:, -min(count, logits.shape[1]) :].detach()
        if self._next is not None:
            if self._first + len(self._waiting) != first:
                self.flush()
                self._first = first
            self._waiting.append((self._next, ids[:, :1]))
            self.bytes += 5 * 4 * self._next.numel()
        self._next = logits[:, -1:].clone()  # somebody may divide it by a temperature
        inner = logits[:, :-1]
        if inner.shape[1]:
            self._put(inner, first + count - inner.shape[1], ids[:, -inner.shape[1] :])

    def flush(self) -> None:
        """Read what waits."""
        if self._waiting:
            logits, ids = (torch.cat(each, 1) for each in zip(*self._waiting, strict=True))
            self._waiting, self.bytes = [], 0
            self._put(logits, self._first, ids)
            self._first += logits.shape[1]

    def finish(self, position: int, ids: Tensor) -> bool:
        """Take in the last token, (b, 1), drawn and never fed; whether there are logits for it."""
        if self._next is None:
            return False
        self._put(self._next, position, ids)
        return True

    def _put(self, logits: Tensor, first: int, ids: Tensor) -> None:
        where = slice(first, first + logits.shape[1])
        self.surprisal[:, where], self.entropy[:, where] = surprisal_and_entropy(logits, ids)


def surprisal_and_entropy(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """-log p of the ids and the entropy of their distributions, in nats, both (b, s).

    Args:
        logits: (b, s, vocabulary), those from which each id was drawn.
        ids: (b, s).
    """
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    logs = torch.log_softmax(logits, -1)
    surprisal = -logs.gather(-1, ids.to(logs.device)[..., None])[..., 0]
    # 0 log 0 is 0: a token that cannot come adds nothing.
    entropy = -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1)
    return surprisal, entropy
