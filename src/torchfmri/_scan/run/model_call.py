"""Call a language model on token ids, and find the logits in what it returns.

All passes of a scan call models through `call_model`, and `_lesion` uses `logits_of`, `is_causal`
and `refuse_unknown_ids` too. What a model takes is read from the signature of its forward, never
from a list of model names. The position ids are only fed where padding or an earlier call requires
it, because they must be the same in generation and in the passes after it. `held_positions` runs at
every step, so it asks no cache that would wait for the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._model import unwrap
from torchfmri.exceptions import InspectionError


@lru_cache(maxsize=256)
def _parameters(forward: Callable[..., object]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(forward).parameters)
    except (TypeError, ValueError):  # a forward without a signature
        return frozenset()


def takes(model: nn.Module, name: str) -> bool:
    """Whether the model's forward has a parameter of this name."""
    return name in _parameters(type(unwrap(model)).forward)


def call_model(
    model: nn.Module, ids: Tensor, mask: Tensor | None, positions: Tensor | None = None
) -> Any:
    """The output of the model for (b, s) ids.

    Mask and positions are handed over where its forward takes them.

    Args:
        model: The model.
        ids: (b, s).
        mask: (b, s), 0 for padding; None where nothing is padded.
        positions: (b, s); None leaves them to the model, where nothing is padded.
    """
    keywords: dict[str, Any] = {"use_cache": False}
    if mask is not None and takes(model, "attention_mask"):
        keywords["attention_mask"] = mask
        positions = needed_positions(model, mask, positions)
    if positions is not None:
        keywords["position_ids"] = positions
    keywords = {key: value for key, value in keywords.items() if takes(model, key)}
    if takes(model, "input_ids"):
        return model(input_ids=ids, **keywords)
    return model(ids, **keywords)


def needed_positions(
    model: nn.Module, mask: Tensor, positions: Tensor | None = None
) -> Tensor | None:
    """The positions to feed, (b, s): those given, or where there is padding those that skip it."""
    if positions is None and is_causal(model) and not bool(mask.all()):
        return positions_of(mask)
    return positions


def positions_of(mask: Tensor) -> Tensor:
    """The position of each token, (b, s): padding on the left does not count."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def logits_of(output: object) -> Tensor | None:
    """The logits (b, s, vocabulary) in what a model returns, if there are any.

    What is called `logits` comes first, also in a named tuple. Of a plain tuple it is the first
    tensor that can be logits: there may be a loss before it.
    """
    if isinstance(output, Tensor):
        candidates: Sequence[object] = [output]
    elif isinstance(output, Mapping):
        candidates = [output.get("logits")]
    elif hasattr(output, "logits"):
        candidates = [output.logits]
    else:
        candidates = output if isinstance(output, (tuple, list)) else []
    for each in candidates:
        if isinstance(each, Tensor) and each.ndim == 3 and each.is_floating_point():
            return each
    return None


def is_causal(model: nn.Module) -> bool:
    """Whether position t of the model predicts token t + 1.

    A model of transformers does if it can generate; any other module that maps ids to logits is
    taken to be one that does.
    """
    can_generate = getattr(unwrap(model), "can_generate", None)
    return bool(can_generate()) if callable(can_generate) else True


def like_parameters(model: nn.Module) -> Tensor:
    """A tensor on the device and of the dtype of the model's parameters."""
    floating = (each for each in model.parameters() if each.is_floating_point())
    return next(floating, torch.empty(0, device="cpu")).detach()


def refuse_unknown_ids(
    model: nn.Module, ids: Tensor, vocabulary: int | None = None, what: str = "prompt"
) -> None:
    """Raise for ids that the model has no embedding for: on a GPU they would end the process.

    Args:
        model: The model.
        ids: (b, s).
        vocabulary: How many tokens it knows, where that was found out; else what it says itself.
        what: What each row of ids is, for the message.
    """
    count = vocabulary or count_embeddings(unwrap(model))
    wrong = ids < 0
    if count is not None:
        wrong |= ids >= count
    if bool(wrong.any()):
        row, position = wrong.nonzero()[0].tolist()
        known = "never negative" if count is None else f"from 0 to {count - 1}"
        raise InspectionError(
            f"Token id {int(ids[row, position])} at position {position} of {what} {row} is none of "
            f"{type(unwrap(model)).__name__}'s, which are {known}. Is the tokenizer that of the "
            "model?"
        )


def count_embeddings(model: nn.Module) -> int | None:
    """How many tokens a model of transformers knows; None where it does not say."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        count = getattr(find() if callable(find) else None, "num_embeddings", None)
    except NotImplementedError:  # it has embeddings of another kind
        return None
    return count if isinstance(count, int) else None


def held_positions(keywords: Mapping[str, Any], fed: int, seen: int, again: bool) -> int:
    """How many positions the model remembers as it is called.

    A KV cache says so. Another cache, or a single token without any, goes on from what was seen;
    otherwise the model starts from the beginning.

    Args:
        keywords: Of the call.
        fed: How many tokens it is given.
        seen: How many positions were seen before.
        again: Whether its cache is that of the pass before.
    """
    cache = keywords.get("past_key_values")
    length = getattr(cache, "get_seq_length", None)
    if again and fed == 1 and getattr(cache, "is_compileable", False):
        return seen  # it counts on the device, and asking takes as long as a small layer
    if callable(length):
        held = _length_of(length)
        if isinstance(held, Tensor):  # a static cache counts on the device: do not wait for it
            held = seen if again and fed == 1 else int(held)
        # One that was run and holds nothing keeps a state, and no positions (RecurrentGemma,
        # MiniMax).
        return seen if held is None or (not held and again and fed == 1) else held
    goes_on = cache is not None or keywords.get("cache_params") is not None or fed == 1
    return seen if goes_on else 0


def _length_of(length: Callable[[], Any]) -> int | Tensor | None:
    """What a cache says; None where it has states alone and says so by raising."""
    try:
        found = length()
        return found if isinstance(found, Tensor) else int(found)
    except (ValueError, NotImplementedError):
        return None
