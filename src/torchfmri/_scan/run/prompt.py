"""Turn a text, chat messages or token ids into one padded tensor: `encode`.

`Scanner`, `lenses` and `_lesion` call it and get an `EncodedPrompt`. Texts are used as they are,
and templates and special tokens are those of the tokenizer; nothing is added here. Models that go
on writing are padded on the left, so that all rows write at the same position. A batch that is
already padded on the wrong side is refused rather than moved. Another kind of prompt is a branch in
`encode` or `_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchfmri.exceptions import InspectionError

Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
Prompt: TypeAlias = (
    "str | Tensor | NDArray[Any] | Messages | Sequence[int] | Sequence[str] | Sequence[Any]"
)


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """Token ids of one or several prompts, padded to one length.

    Attributes:
        ids: (b, s).
        mask: (b, s), 1 for a token, 0 for padding.
        single: Whether it was one prompt and not a batch of one.
    """

    ids: Tensor
    mask: Tensor
    single: bool

    def to(self, device: torch.device) -> EncodedPrompt:
        """A copy on a device: ids that were made in inference mode cannot be trained on."""
        return EncodedPrompt(
            self.ids.to(device, copy=True), self.mask.to(device, copy=True), self.single
        )


def encode(prompt: Prompt, tokenizer: Any, chat: bool = False, side: str = "left") -> EncodedPrompt:
    """The token ids of a prompt.

    Args:
        prompt: A text (used as it is), chat messages (`[{"role": "user", "content": "..."}]`, with
            the template's own ids), token ids, or a list of any of these.
        tokenizer: That of the model; None for token ids.
        chat: Wrap a text as a user's message.
        side: Where to pad: "left" for a model that goes on writing.

    Raises:
        InspectionError: It is none of these, it is empty, or there is no tokenizer for it.
    """
    if isinstance(prompt, np.ndarray):
        prompt = torch.as_tensor(prompt, device="cpu")
    if isinstance(prompt, Tensor):
        _refuse_wrapped_ids(chat)
        return _encode_tensor(prompt)
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        _refuse_wrapped_ids(chat)
        return _encode_batch(prompt, side)
    single = _is_single(prompt)
    several: Sequence[Any] = [prompt] if single else list(prompt)
    if not several:
        raise InspectionError("The list of prompts is empty.")
    return _padded([_ids(each, tokenizer, chat) for each in several], tokenizer, single, side)


def _is_single(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InspectionError(
            f"A prompt is a text, a list of chat messages, token ids, or a list of these, not "
            f"{type(prompt).__name__}."
            + (" A single message stands in a list, too." if isinstance(prompt, Mapping) else "")
        )
    return bool(prompt) and (isinstance(prompt[0], Mapping) or _is_id(prompt[0]))


def _is_id(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _refuse_wrapped_ids(chat: bool) -> None:
    if chat:
        raise InspectionError(
            "chat=True wraps a text as a message, and this prompt is token ids already. Leave "
            "chat=True out, or give the text."
        )


def _ids(prompt: Any, tokenizer: Any, chat: bool) -> list[int]:
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
    if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes)) and prompt:
        if all(map(_is_id, prompt)):
            _refuse_wrapped_ids(chat)
            return [int(each) for each in prompt]
        if all(isinstance(each, Mapping) for each in prompt):
            return _template(list(prompt), tokenizer)
    if not isinstance(prompt, str):
        raise InspectionError(
            f"A prompt is a text, chat messages or token ids, not {str(prompt)[:80]!r}."
        )
    if tokenizer is None:
        raise InspectionError(
            "A text needs a tokenizer: scan(model, tokenizer, text). Without one, give token ids."
        )
    if not callable(tokenizer):
        raise InspectionError(
            f"tokenizer={str(tokenizer)[:80]!r} is not a tokenizer: it cannot be called with a "
            "text. Give that of the model, or token ids and None."
        )
    if chat:
        return _template([{"role": "user", "content": prompt}], tokenizer)
    ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise InspectionError(f"The prompt {prompt!r} has no tokens.")
    return list(ids)


def _template(messages: list[Any], tokenizer: Any) -> list[int]:
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
        raise InspectionError(
            "Chat messages need a tokenizer with a chat template; this one has none. Give the "
            "text as it is, without chat=True."
        )
    for each in messages:
        if "role" not in each or not {"content", "tool_calls"} & set(each):
            raise InspectionError(
                "A chat message has a role and a content, as in {'role': 'user', 'content': "
                f"'Hello'}}; this one has {', '.join(map(repr, each)) or 'nothing'}."
            )
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    ids = found["input_ids"] if isinstance(found, Mapping) else found
    return list(ids[0] if ids and isinstance(ids[0], (list, tuple)) else ids)


def _padded(rows: list[list[int]], tokenizer: Any, single: bool, side: str) -> EncodedPrompt:
    if any(not row for row in rows):
        raise InspectionError("A prompt has no tokens.")
    longest = max(map(len, rows))
    filler = getattr(tokenizer, "pad_token_id", None)
    filler = 0 if filler is None else int(filler)
    ids = torch.full((len(rows), longest), filler, dtype=torch.long, device="cpu")
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        first = longest - len(tokens) if side == "left" else 0
        ids[row, first : first + len(tokens)] = torch.tensor(tokens, device="cpu")
        mask[row, first : first + len(tokens)] = 1
    return EncodedPrompt(ids, mask, single)


def _encode_tensor(ids: Tensor) -> EncodedPrompt:
    numbers = not ids.is_floating_point() and ids.dtype != torch.bool
    if not numbers or ids.ndim not in (1, 2) or not ids.numel():
        raise InspectionError(
            f"Token ids are integers (s,) or (b, s), not {ids.dtype} of shape {tuple(ids.shape)}."
        )
    ids = ids.long()
    rows = ids if ids.ndim == 2 else ids[None]
    return EncodedPrompt(rows, torch.ones_like(rows), single=ids.ndim == 1 or len(ids) == 1)


def _encode_batch(batch: Mapping[str, Any], side: str) -> EncodedPrompt:
    """What a tokenizer returned, with its mask."""
    ids = _as_tensor(batch["input_ids"], "input_ids")
    found = _encode_tensor(ids)
    if batch.get("attention_mask") is None:
        return found
    mask = _as_tensor(batch["attention_mask"], "attention_mask")
    if mask.numel() != found.ids.numel():
        raise InspectionError(
            f"attention_mask has the shape {tuple(mask.shape)}, and input_ids {tuple(ids.shape)}."
        )
    mask = mask.long().reshape(found.ids.shape)
    if not bool(mask.any(1).all()):
        raise InspectionError("A prompt has no tokens: its attention_mask is all padding.")
    if side == "left" and bool((mask[:, :-1] > mask[:, 1:]).any()):
        raise InspectionError(
            "These prompts are padded on the right; a model that goes on writing needs the padding "
            "on the left. Use tokenizer.padding_side = 'left', or give the texts."
        )
    return EncodedPrompt(found.ids, mask, found.single)


def _as_tensor(value: Any, key: str) -> Tensor:
    try:
        return torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InspectionError(
            f"{key} is not a rectangle of numbers ({error}). Let the tokenizer pad "
            "(padding=True, padding_side='left'), or give the texts."
        ) from error
