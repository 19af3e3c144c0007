"""Pairs that people really compare: two settings of one model, on ten architectures."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks._compare_models import CAUSAL, MODELS, batch, build, padded
from torchfmri import Run

Pair = tuple[Run, Run]


def _run(name: str, attention: str | None = None) -> Run:
    return Run(build(name, attention), batch(name))


def eager_and_sdpa(name: str) -> Pair | None:
    """Attention written out, and torch's fused kernel."""
    if name == "mamba":
        return None
    return _run(name, "eager"), _run(name, "sdpa")


def eager_and_compiled(name: str) -> Pair | None:
    """The model, and the same compiled by Inductor."""
    run = _run(name)
    return run, replace(run, model=torch.compile(build(name)))


def uncached_and_cached(name: str) -> Pair | None:
    """One pass over all tokens, and one token at a time with a KV cache (or a state)."""
    if name not in (*CAUSAL, "mamba"):
        return None
    data = {"input_ids": batch(name, None)["input_ids"]}
    plain = Run(build(name), data, call=_without_gradients)
    return plain, replace(plain, call=_cached)


def _without_gradients(model: nn.Module, data: Any) -> Any:
    with torch.no_grad():
        return model(**data, use_cache=False)


def _cached(model: nn.Module, data: Any) -> Any:
    ids = data["input_ids"]
    first = ids.shape[1] // 2
    key = "cache_params" if hasattr(model, "backbone") else "past_key_values"
    with torch.no_grad():
        output = model(input_ids=ids[:, :first], use_cache=True)
        for at in range(first, ids.shape[1]):
            state = {key: getattr(output, key)}
            if key == "cache_params":
                state["cache_position"] = torch.tensor([at])
            output = model(input_ids=ids[:, at : at + 1], use_cache=True, **state)
    return output


def float32_and_bfloat16(name: str) -> Pair | None:
    """The model in float32, and cast to bfloat16."""
    run = _run(name)
    data = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in run.data.items()
    }
    return run, Run(build(name).bfloat16(), data)


def float32_and_autocast(name: str) -> Pair | None:
    """The model in float32, and under autocast to bfloat16."""
    run = _run(name)
    return run, replace(run, autocast=torch.bfloat16)


def float32_and_int8(name: str) -> Pair | None:
    """The model, and with its Linear layers quantised dynamically to int8."""
    if name == "mamba":  # reads the weight of a Linear directly: the quantised model itself raises
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        quantised = torch.ao.quantization.quantize_dynamic(build(name), {nn.Linear}, torch.qint8)
    run = Run(build(name), batch(name), call=_forward)
    return run, replace(run, model=quantised)


def _forward(model: nn.Module, data: Any) -> Any:
    with torch.no_grad():
        return model(**data)


def right_and_left_padded(name: str) -> Pair | None:
    """Return two runs of one batch of texts, padded on the right and on the left."""
    if name not in (*CAUSAL, "bert"):
        return None
    ids = batch(name, None)["input_ids"]
    sides = [padded(ids, side) for side in ("right", "left")]
    for each in sides:  # transformers predicts the first token of a left-padded row from padding
        each["labels"] = each["labels"].masked_fill(each["position_ids"] == 0, -100)
    if name == "bert":
        for each in sides:
            each["token_type_ids"] = torch.zeros_like(each["input_ids"])
    right, left = (Run(build(name), each) for each in sides)
    return right, left


PAIRS: dict[str, Callable[[str], Pair | None]] = {
    "eager / SDPA": eager_and_sdpa,
    "eager / compiled": eager_and_compiled,
    "uncached / cached": uncached_and_cached,
    "float32 / bfloat16": float32_and_bfloat16,
    "float32 / autocast": float32_and_autocast,
    "float32 / int8": float32_and_int8,
    "right- / left-padded": right_and_left_padded,
}
EXPECTED = {"float32 / int8"}
"""Pairs that differ by more than the rounding of their dtype: int8 is no float32."""


def pairs(wanted: list[str] | None = None) -> Iterator[tuple[str, str, Pair]]:
    """(kind of pair, architecture, the two runs), for each that there is."""
    for kind, make in PAIRS.items():
        if wanted and not any(each in kind for each in wanted):
            continue
        for name in MODELS:
            made = make(name)
            if made is not None:
                yield kind, name, made


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the remarks of transformers and of torch's quantisation."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
