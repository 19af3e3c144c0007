"""Generate token by token: greedy or sampled, with the cache or without.

`RoutingLanguageModel.generate` calls `generate`. With and without a cache it writes the same
tokens, which `test_routing.py` checks; `use_cache=False` is the slow way to compare with. A
change of how tokens are drawn must keep that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_number, check_real, require
from torchfmri._model import evaluating
from torchfmri.exceptions import InspectionError


class Sampling(NamedTuple):
    """The options of drawing a token."""

    temperature: float = 1.0
    top_k: int | None = None
    generator: torch.Generator | None = None


@torch.no_grad()
def generate(
    model: nn.Module,
    ids: Tensor,
    max_new_tokens: int,
    mask: Tensor | None,
    sampling: Sampling | None,
    ending: tuple[int, int | None] | None,
    use_cache: bool,
) -> Tensor:
    """Return the prompt and what follows it, (b, s + new).

    Args:
        model: Called with input_ids, attention_mask, past_key_values and use_cache.
        ids: The prompt, (b, s).
        max_new_tokens: How many tokens to add at most.
        mask: (b, s), 0 where the prompt is padding.
        sampling: How to draw; None takes the likeliest.
        ending: The id that ends a sequence, and the one that fills it then (None: the same).
        use_cache: Whether to read every token once only.
    """
    _check(ids, max_new_tokens, mask, sampling, int(model.config.vocab_size))  # type: ignore[union-attr,arg-type]
    with evaluating(model):
        running = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        cache: Any = None
        unread = ids
        for _ in range(max_new_tokens):
            out = model(unread, attention_mask=mask, past_key_values=cache, use_cache=use_cache)
            new = _choose(out.logits[:, -1].float(), sampling)
            if ending is not None:
                end, fill = ending[0], ending[0] if ending[1] is None else ending[1]
                new = torch.where(running, new, fill)
                running &= new != end
            ids = torch.cat((ids, new[:, None]), 1)
            mask = mask if mask is None else torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
            cache, unread = (out.past_key_values, new[:, None]) if use_cache else (None, ids)
            if ending is not None and not bool(running.any()):
                break
    return ids


def _choose(logits: Tensor, sampling: Sampling | None) -> Tensor:
    if sampling is None:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        least = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    drawn = torch.multinomial(logits.softmax(-1), 1, generator=sampling.generator)
    return drawn[:, 0]


def _check(
    ids: Tensor, new: int, mask: Tensor | None, sampling: Sampling | None, vocabulary: int
) -> None:
    tokens = isinstance(ids, Tensor) and not ids.is_floating_point()
    tokens = tokens and ids.ndim == 2 and ids.shape[1] > 0
    require(tokens, "input_ids", ids, "give (b, s) token ids, with at least one token")
    wrong = ids[(ids < 0) | (ids >= vocabulary)].tolist()
    known = f"the model's ids are from 0 to {vocabulary - 1}"
    require(not wrong, "input_ids with the id", wrong[0] if wrong else None, known)
    check_number("max_new_tokens", new, 0, "give 0 or more")
    if mask is not None and not bool((mask[:, -1] != 0).all()):
        raise InspectionError(
            "The prompt is padded on the right: what follows would follow the padding. Pad it on "
            "the left."
        )
    if sampling is not None:
        meaning = "give more than 0, or do_sample=False"
        check_real("temperature", sampling.temperature, meaning, least=1e-30)
        if sampling.top_k is not None:
            check_number("top_k", sampling.top_k, 1, "give at least 1, or None")
