"""Make a `Run` from words such as `attn=eager` or `dtype=bfloat16`, for the command line.

Only `torchfmri compare` (`cli/compare.py`) uses this file: it parses `--a` and `--b` with
`parse_settings`, and `run_with` loads and prepares the model. A new setting is an entry in
`CHOICES`, which the help text lists, and a step in `_prepared`. Positions count tokens and not
padding, and the first token of a row has no label; otherwise left and right padding would differ
without any fault of the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from torchfmri._arguments import require
from torchfmri._compare.run import Run
from torchfmri._model import load_model
from torchfmri.exceptions import InspectionError

_SWITCH = ("on", "off")
CHOICES: dict[str, str] = {
    "model": "another model or checkpoint",
    "attn": "eager, sdpa or another implementation of attention",
    "dtype": "float32, bfloat16, float16 or float64",
    "autocast": "bfloat16 or float16",
    "cache": "on: one token at a time with a KV cache",
    "compile": "on: torch.compile",
    "quantize": "int8: dynamic quantisation of Linear layers",
    "padding": "left or right, of several prompts",
    "device": "such as cuda",
}
"""Setting -> what it can be."""


def parse_settings(words: Sequence[str]) -> dict[str, str]:
    """Settings by name, from words such as "attn=eager" or "attn=eager,dtype=bfloat16".

    Raises:
        InspectionError: One is not known, has no value, or was given two values.
    """
    found: dict[str, str] = {}
    for word in (part for each in words for part in each.split(",")):
        name, equals, value = word.partition("=")
        if name not in CHOICES or not equals or not value:
            known = "; ".join(f"{each}= ({meaning})" for each, meaning in CHOICES.items())
            raise InspectionError(f"{word!r} is not a setting (name=value). There are {known}.")
        if found.setdefault(name, value) != value:
            raise InspectionError(
                f"{name}= was given twice, as {found[name]!r} and as {value!r}. Give it once."
            )
    return found


def run_with(model: str, prompts: Sequence[str], settings: Mapping[str, str]) -> tuple[Run, Any]:
    """A run of a named model on prompts, and its tokenizer.

    Raises:
        InspectionError: A setting is invalid or not supported by the model, or it has no tokenizer.
    """
    for name in ("cache", "compile"):
        value = settings.get(name, "off")
        require(value in _SWITCH, name, value, "choose on or off")
    named = load_model(
        settings.get("model", model), dtype=settings.get("dtype"), device=settings.get("device")
    )
    if named.tokenizer is None:
        raise InspectionError(
            f"{named.name!r} has no tokenizer, so prompts cannot be given. Compare two runs of "
            "your own: torchfmri compare module:factory module:factory."
        )
    data = _tokens(named.model, named.tokenizer, prompts, settings.get("padding", "right"))
    cached = settings.get("cache") == "on"
    prepared = _prepared(named.model.eval(), settings)
    call: Callable[[nn.Module, Any], Any] | None = None
    if cached:
        call = _token_by_token
    elif settings.get("quantize"):
        call = _without_gradients
    autocast = _dtype(settings["autocast"]) if "autocast" in settings else None
    return Run(prepared, data, autocast=autocast, call=call), named.tokenizer


def _prepared(model: nn.Module, settings: Mapping[str, str]) -> nn.Module:
    if "attn" in settings:
        change = getattr(model, "set_attn_implementation", None)
        require(change is not None, "attn", settings["attn"], "this model cannot change it")
        try:
            change(settings["attn"])  # type: ignore[misc]
        except (ValueError, ImportError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise InspectionError(f"attn={settings['attn']}: {reason}") from error
    if "quantize" in settings:
        require(settings["quantize"] == "int8", "quantize", settings["quantize"], "choose int8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            quantize: Any = torch.ao.quantization.quantize_dynamic
            model = quantize(model, {nn.Linear}, torch.qint8)
    if settings.get("compile") == "on":
        model = torch.compile(model)  # type: ignore[assignment]
    return model


def _tokens(model: nn.Module, tokenizer: Any, prompts: Sequence[str], side: str) -> dict[str, Any]:
    """What the model is called with, labels included; padded where prompts differ in length."""
    require(side in ("left", "right"), "padding", side, "choose left or right")
    rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    if not all(rows):
        raise InspectionError(f"prompt={prompts!r}: a prompt without tokens cannot be compared.")
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long, device="cpu")
    mask = torch.zeros_like(ids)
    for row, found in enumerate(rows):
        at = slice(longest - len(found), None) if side == "left" else slice(0, len(found))
        ids[row, at], mask[row, at] = torch.tensor(found, device="cpu"), 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    # Nothing predicts the first token of a row, wherever the padding puts it.
    labels = ids.masked_fill((mask == 0) | (positions == 0), -100)
    device = next(model.parameters()).device
    data = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if bool((labels == -100).all()):  # prompts of one token predict nothing: that loss is NaN
        del data["labels"]
    if "position_ids" in signature(model.forward).parameters:
        data["position_ids"] = positions
    return {name: value.to(device) for name, value in data.items()}


def _without_gradients(model: nn.Module, data: Any) -> Any:
    with torch.no_grad():
        return model(**data)


def _token_by_token(model: nn.Module, data: Any) -> Any:
    """Run one token at a time, with the model's cache; the mask covers what is in the cache."""
    output = None
    cache: dict[str, Any] = {}
    with torch.no_grad():
        for at in range(data["input_ids"].shape[1]):
            # Without labels: a loss needs the whole sequence.
            step = {name: data[name][:, at : at + 1] for name in data if name != "labels"}
            step["attention_mask"] = data["attention_mask"][:, : at + 1]
            output = model(**step, use_cache=True, **cache)
            cache = {"past_key_values": output.past_key_values}
    return output


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    known = found in (torch.bfloat16, torch.float16)
    require(known, "autocast", name, "choose bfloat16 or float16")
    assert isinstance(found, torch.dtype)
    return found
