"""How a language model is called on token ids, and where its logits are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._model import unwrap


@lru_cache(maxsize=256)
def _parameters(forward: Callable[..., object]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(forward).parameters)
    except (TypeError, ValueError):  # a forward without a signature
        return frozenset()


def takes(model: nn.Module, name: str) -> bool:
    """Whether the model's forward has a parameter of this name."""
    return name in _parameters(type(unwrap(model)).forward)


def call_model(model: nn.Module, ids: Tensor, mask: Tensor | None, **options: Any) -> Any:
    """The output of the model for (b, s) ids.

    Mask, positions and options are handed over where its forward takes them. Positions count the
    tokens that are not padding, as `generate` has them.

    Args:
        model: The model.
        ids: (b, s).
        mask: (b, s), 0 for padding; None where nothing is padded.
        **options: Further keywords.
    """
    keywords: dict[str, Any] = {"use_cache": False, **options}
    if mask is not None and takes(model, "attention_mask"):
        keywords["attention_mask"] = mask
        if is_causal(model) and not bool(mask.all()):
            keywords["position_ids"] = positions_of(mask)
    keywords = {key: value for key, value in keywords.items() if takes(model, key)}
    if takes(model, "input_ids"):
        return model(input_ids=ids, **keywords)
    return model(ids, **keywords)


def positions_of(mask: Tensor) -> Tensor:
    """The position of each token, (b, s): padding on the left does not count."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def logits_of(output: object) -> Tensor | None:
    """The logits (b, s, vocabulary) in what a model returns, if there are any."""
    if isinstance(output, Tensor):
        found: object = output
    elif isinstance(output, Mapping):
        found = output.get("logits")
    elif isinstance(output, (tuple, list)):
        found = output[0] if output else None
    else:
        found = getattr(output, "logits", None)
    if isinstance(found, Tensor) and found.ndim == 3 and found.is_floating_point():
        return found
    return None


def is_causal(model: nn.Module) -> bool:
    """Whether position t of the model predicts token t + 1.

    A model of transformers does if it can generate; any other module that maps ids to logits is
    taken to be one that does.
    """
    can_generate = getattr(unwrap(model), "can_generate", None)
    return bool(can_generate()) if callable(can_generate) else True


def device_of(model: nn.Module) -> torch.device:
    """The device on which the model takes its ids: that of its first parameter."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def like_parameters(model: nn.Module) -> Tensor:
    """A tensor on the device and of the dtype of the model's parameters."""
    floating = (each for each in model.parameters() if each.is_floating_point())
    return next(floating, torch.empty(0)).detach()
