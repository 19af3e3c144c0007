"""A small causal language model of MoIETransformerBlocks, and how it writes token by token.

It is called like a causal model of Transformers, so that `torchfmri.scan` and the experiment can
use it without a special case. `RoutingConfig` and `RoutingLanguageModel` are public; the names of
submodules are in saved checkpoints and must not change. `generate` writes the same tokens with and
without a cache, which `test_routing.py` checks; `use_cache=False` is the slow way to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfmri._arguments import check_number, check_real, require
from torchfmri._model import evaluating
from torchfmri.exceptions import InspectionError
from torchfmri.routing.block import (
    BlockContext,
    KeyValueCache,
    MoIETransformerBlock,
    check_heads,
    rotary,
)


@dataclass(frozen=True)
class RoutingConfig:
    """The sizes of a model.

    Attributes:
        vocab_size: How many token ids.
        hidden_size: Size of the residual stream.
        blocks: How many blocks, of four SparseProtoLinear layers each.
        heads: How many heads in each.

    Examples:
        >>> RoutingConfig(vocab_size=20).blocks
        4
    """

    vocab_size: int
    hidden_size: int = 128
    blocks: int = 4
    heads: int = 4

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return asdict(self)


class LanguageModelOutput(NamedTuple):
    """The output of a forward pass.

    Attributes:
        loss: Mean cross entropy of the labels; None without labels.
        logits: (b, s, vocabulary).
        past_key_values: The cache; None without `use_cache`.
    """

    loss: Tensor | None
    logits: Tensor
    past_key_values: KeyValueCache | None


class RoutingLanguageModel(nn.Module):
    """Embedding, blocks, norm and head; called like a causal model of Transformers.

    Args:
        config: Its sizes.

    Examples:
        >>> import torch
        >>> model = RoutingLanguageModel(RoutingConfig(20, hidden_size=16, blocks=2, heads=2))
        >>> ids = torch.randint(20, (2, 5))
        >>> model(ids, labels=ids).logits.shape
        torch.Size([2, 5, 20])
        >>> model.generate(ids, max_new_tokens=3).shape
        torch.Size([2, 8])
    """

    def __init__(self, config: RoutingConfig) -> None:
        super().__init__()
        meaning = "give a RoutingConfig(vocab_size, hidden_size, blocks, heads)"
        require(isinstance(config, RoutingConfig), "config", config, meaning)
        check_number("vocab_size", config.vocab_size, 1, "give a number from 1 upwards")
        check_number("blocks", config.blocks, 1, "give a number from 1 upwards")
        check_heads(config.hidden_size, config.heads)  # before anything is drawn
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            MoIETransformerBlock(config.hidden_size, config.heads, number)
            for number in range(config.blocks)
        )
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=config.hidden_size**-0.5)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: KeyValueCache | None = None,
        use_cache: bool = False,
    ) -> LanguageModelOutput:
        """Return logits, and the loss if labels are given.

        Args:
            input_ids: (b, s).
            attention_mask: (b, all s), 0 where a position is padding, left or right.
            labels: (b, s), each predicted from the position before it; -100 does not count.
            past_key_values: The cache of the tokens before; implies `use_cache`.
            use_cache: Return a cache.
        """
        cache = past_key_values
        if cache is None and use_cache:
            cache = KeyValueCache()
        context = self._context(input_ids, attention_mask, cache)
        hidden, prototypes = self.embedding(input_ids), None
        for block in self.blocks:
            hidden, prototypes = block(hidden, context, prototypes)
        logits = self.head(self.norm(hidden))
        loss = None
        if labels is not None:
            predicted, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            wide = torch.promote_types(predicted.dtype, torch.float32)
            loss = F.cross_entropy(predicted.to(wide), wanted, ignore_index=-100)
        return LanguageModelOutput(loss, logits, cache)

    def _context(
        self, ids: Tensor, attention_mask: Tensor | None, cache: KeyValueCache | None
    ) -> BlockContext:
        before, length = cache.length if cache is not None else 0, ids.shape[1]
        mask = None
        if attention_mask is None:
            positions = torch.arange(before, before + length, device=ids.device)[None]
        else:
            if attention_mask.shape != (ids.shape[0], before + length):
                raise InspectionError(
                    f"attention_mask has the shape {tuple(attention_mask.shape)}; for "
                    f"{length} ids after {before} in the cache it should be "
                    f"{(ids.shape[0], before + length)}."
                )
            kept = attention_mask != 0
            positions = (kept.cumsum(-1) - 1).clamp_min(0)[:, before:]
            mask = kept[:, None, None, :]
        if mask is not None or (before and length > 1):
            places = torch.arange(before + length, device=ids.device)
            causal = places[None, :] <= places[before:, None]
            # A padded position looks at itself, so that no row is empty.
            itself = places[None, :] == places[before:, None]
            mask = causal[None, None] if mask is None else (causal & mask) | itself
        head_size = self.config.hidden_size // self.config.heads
        return BlockContext(rotary(positions, head_size), mask, cache)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 20,
        *,
        attention_mask: Tensor | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        use_cache: bool = True,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the prompt and what follows it, (b, s + new).

        Args:
            input_ids: (b, s); pad on the left, with an attention_mask.
            max_new_tokens: How many tokens to add at most.
            attention_mask: (b, s), 0 where the prompt is padding.
            do_sample: Draw tokens instead of taking the likeliest.
            temperature: Divides the logits before drawing.
            top_k: Draw among this many of the likeliest tokens only.
            eos_token_id: Ends a sequence; generation stops when all have ended.
            pad_token_id: Fills what has ended; by default the ending itself.
            use_cache: Read every token once; without it the result is the same, and slow.
            generator: Random numbers for drawing.
        """
        _check_prompt(input_ids, attention_mask, self.config.vocab_size)
        check_number("max_new_tokens", max_new_tokens, 0, "give 0 or more")
        choose = _sampler(temperature, top_k, generator) if do_sample else _likeliest
        fill = eos_token_id if pad_token_id is None else pad_token_id
        with evaluating(self):
            running = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
            ids, mask, unread, cache = input_ids, attention_mask, input_ids, None
            for _ in range(max_new_tokens):
                out = self(unread, mask, past_key_values=cache, use_cache=use_cache)
                new = choose(out.logits[:, -1].float())
                if eos_token_id is not None and fill is not None:
                    new = torch.where(running, new, fill)
                    running &= new != eos_token_id
                ids = torch.cat((ids, new[:, None]), 1)
                mask = mask if mask is None else F.pad(mask, (0, 1), value=1)
                cache, unread = (out.past_key_values, new[:, None]) if use_cache else (None, ids)
                if not bool(running.any()):
                    break
        return ids


def _likeliest(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def _sampler(
    temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Callable[[Tensor], Tensor]:
    """Return a function that draws a token for each row of logits."""
    check_real("temperature", temperature, "give more than 0, or do_sample=False", least=1e-30)
    if top_k is not None:
        check_number("top_k", top_k, 1, "give at least 1, or None")

    def draw(logits: Tensor) -> Tensor:
        logits = logits / temperature
        if top_k is not None:
            least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    return draw


def _check_prompt(ids: Tensor, mask: Tensor | None, vocabulary: int) -> None:
    tokens = isinstance(ids, Tensor) and not ids.is_floating_point()
    tokens = tokens and ids.ndim == 2 and ids.shape[1] > 0
    require(tokens, "input_ids", ids, "give (b, s) token ids, with at least one token")
    wrong = ids[(ids < 0) | (ids >= vocabulary)].tolist()
    known = f"the model's ids are from 0 to {vocabulary - 1}"
    require(not wrong, "input_ids with the id", wrong[0] if wrong else None, known)
    if mask is not None and not bool((mask[:, -1] != 0).all()):
        raise InspectionError(
            "The prompt is padded on the right: what follows would follow the padding. Pad it on "
            "the left."
        )
