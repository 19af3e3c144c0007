"""The logit lens: every layer's stream read as if it were the last one's.

`torchfmri.lens` calls `read_lens`, `_scan` calls `read_stream` on a stream that it has. Logits are
computed in parts of `_CHUNK_BYTES`, because those of all layers do not fit into memory. The last
layer is never translated: the model itself reads it, and the comparison with its logits would fail.
`_CHUNK_BYTES` may change freely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._lens.stream import Stream, run_stream
from torchfmri._lens.unembedding import Unembedding, find_unembedding

# (stream (b, s, width), number of the block) -> the stream to read: a tuned lens.
Translate = Callable[[Tensor, int], Tensor]
_READ = ("rank", "probability", "entropy", "top", "top_probability")
"""What is read at each position, in the order of the functions below."""
_CHUNK_BYTES = 256 << 20
"""How many bytes of logits are held at once."""


@dataclass(eq=False)
class LensReading:
    """What the streams of one pass say about the next token, (b, s, ...) by layer.

    Masked language models say it about the token that stands there instead.

    Attributes:
        names: The layers: the embedding, then the blocks.
        rank: (layer, b, s) of the token that came next, 1 for the likeliest; 0 if none came.
        probability: (layer, b, s) of the token that came next; nan if none came.
        entropy: (layer, b, s) of the distribution, in nats.
        top: (layer, b, s, k) the likeliest tokens.
        top_probability: (layer, b, s, k).
        unembedding: The layers that they were read through.
    """

    names: tuple[str, ...]
    rank: Tensor
    probability: Tensor
    entropy: Tensor
    top: Tensor
    top_probability: Tensor
    unembedding: Unembedding


def read_lens(
    model: nn.Module,
    call: Callable[[], Any],
    logits_of: Callable[[Any], Tensor | None],
    ids: Tensor,
    top: int = 5,
    translate: Translate | None = None,
    ahead: int = 1,
) -> LensReading:
    """Run a model once and read its stream after each block through its own final norm and head.

    Args:
        model: The model.
        call: Runs it on `ids` and returns what it returned.
        logits_of: Finds the logits in that.
        ids: (b, s) the tokens.
        top: How many of the likeliest tokens are kept.
        translate: Applied to the stream (b, s, width) after block i, called with both; the last
            block's, which the model itself reads, is left alone.
        ahead: 1 if a position predicts the token after it; 0 if it predicts its own, as in
            masked language models.

    Raises:
        InspectionError: The stream, or what reads it, cannot be resolved for this model.
    """
    with torch.no_grad():
        stream = run_stream(model, call)
        unembedding = find_unembedding(model, stream, logits_of(stream.output))
        if translate is not None:
            last = len(stream.blocks)
            stream.states[1:last] = [
                translate(state, index) for index, state in enumerate(stream.states[1:last])
            ]
        return read_stream(stream, unembedding, ids, top, ahead=ahead)


def read_stream(
    stream: Stream,
    unembedding: Unembedding,
    ids: Tensor,
    top: int = 5,
    mask: Tensor | None = None,
    ahead: int = 1,
) -> LensReading:
    """Read the states of a stream through an unembedding; see `read_lens`.

    Args:
        stream: The stream.
        unembedding: The layers that it is read through.
        ids: (b, s) the tokens.
        top: How many of the likeliest tokens are kept.
        mask: (b, s) 0 for padding, which does not come next.
        ahead: As for `read_lens`.
    """
    known = ids if mask is None else ids.masked_fill(mask == 0, -1)
    following = torch.cat([known[:, ahead:], torch.full_like(ids[:, :ahead], -1)], 1)
    parts = [_read(state, unembedding, following, top) for state in stream.states]
    several = map(torch.stack, zip(*parts, strict=True))
    read: dict[str, Any] = dict(zip(_READ, several, strict=True))
    return LensReading(names=stream.names, unembedding=unembedding, **read)


def _read(
    state: Tensor, unembedding: Unembedding, following: Tensor, top: int
) -> tuple[Tensor, ...]:
    """Return what `_READ` names, of one layer."""
    parts, first, rows = [], 0, 1
    while first < state.shape[1]:
        logits = unembedding.logits(state[:, first : first + rows])
        parts.append(_describe(logits, following[:, first : first + rows], top))
        first += rows
        # The first row tells how large the vocabulary is.
        rows = max(1, _CHUNK_BYTES // (8 * len(state) * logits.shape[-1]))
    return tuple(torch.cat(each, 1) for each in zip(*parts, strict=True))


def entropy_of(logs: Tensor) -> Tensor:
    """Return the entropy in nats of log probabilities; one that is never likely adds nothing."""
    return -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1)


def _describe(logits: Tensor, following: Tensor, top: int) -> tuple[Tensor, ...]:
    """Return what `_READ` names, of some positions."""
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    logs = wide.log_softmax(-1)
    came = following >= 0
    own = logs.gather(-1, following.clamp(min=0)[..., None])
    rank = (logs > own).sum(-1) + 1
    probability = own.squeeze(-1).exp().masked_fill(~came, torch.nan)
    best = logs.topk(min(top, logs.shape[-1]), -1)
    rank, entropy = rank.masked_fill(~came, 0), entropy_of(logs)
    return rank, probability, entropy, best.indices, best.values.exp()
