"""Slow and obvious answers to what a scan measures, and the language models it is asked about.

Nothing here uses torchfmri. Activations: plain hooks on one plain forward pass over the finished
sequences. Gradients of outputs: `retain_grad` on every module's output. Gradients of parameters:
dense ones, from `autograd.grad`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from architectures import ARCHITECTURES, VOCABULARY, Architecture, tokens
from torch import Tensor, nn

_SIZES = {**ARCHITECTURES["llama"].sizes}
_PLAIN = {key: each for key, each in _SIZES.items() if key != "num_key_value_heads"}
_BATCH = ARCHITECTURES["llama"].batch


def _own(name: str, model: str, sizes: dict[str, Any], *attention: str) -> Architecture:
    kinds = attention or ("eager", "sdpa")
    return Architecture(name, f"{model}ForCausalLM", f"{model}Config", sizes, _BATCH, kinds)


_IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_FALCON = {**_IDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LANGUAGE_MODELS = {
    **{
        name: ARCHITECTURES[name]
        for name in ("llama", "qwen3", "gpt2", "gemma", "gemma2", "gemma3", "phi3", "mamba")
    },
    # Their routers' own loss does not know of a KV cache: transformers' generate() fails with it.
    **{
        name: replace(
            ARCHITECTURES[name],
            sizes={**ARCHITECTURES[name].sizes, "output_router_logits": False},
        )
        for name in ("qwen3-moe", "mixtral")
    },
    "mistral": _own("mistral", "Mistral", {**_SIZES, "sliding_window": 4, "head_dim": 4}),
    "phi": _own("phi", "Phi", {**_SIZES, "num_key_value_heads": 4}),
    "falcon": _own("falcon", "Falcon", _FALCON),
    "falcon-alibi": _own("falcon-alibi", "Falcon", {**_FALCON, "alibi": True}, "eager"),
    "opt": _own("opt", "OPT", {**_PLAIN, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "bloom": _own(
        "bloom", "Bloom", {**_IDS, "hidden_size": 16, "n_layer": 2, "n_head": 4}, "eager"
    ),
    # A cache of compressed keys and values, which one projection unfolds again at each step.
    "deepseek-v3": _own(
        "deepseek-v3", "DeepseekV3",
        {
            **_PLAIN, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_group": 1,
            "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 8, "first_k_dense_replace": 1,
        },
    ),
    # Heads of different sizes, so that its configuration names none.
    "gemma4": Architecture(
        "gemma4", "Gemma4ForCausalLM", "Gemma4TextConfig",
        {
            **_SIZES, "head_dim": 4, "global_head_dim": 8, "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
        },
        _BATCH,
    ),
    "jamba": _own(
        "jamba", "Jamba",
        {
            **_SIZES, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
            "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
            "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False,
        },
    ),
    # Its norms have a gate beside their input.
    "mamba2": _own(
        "mamba2", "Mamba2",
        {
            **_IDS, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 4,
            "state_size": 4, "n_groups": 1,
        },
        "",
    ),
}  # fmt: skip
"""Causal language models of many kinds, a few dozen units wide."""
PECULIAR = {
    # Its cache counts no positions, and a step with padding is not what a pass computes.
    "recurrent-gemma": _own(
        "recurrent-gemma", "RecurrentGemma",
        {
            **_SIZES, "num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 32,
            "head_dim": 4,
        },
    ),
    # Its cache has states of linear attention beside keys and values.
    "minimax": _own(
        "minimax", "MiniMax",
        {
            **_SIZES, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}  # fmt: skip
"""Those that are not asked everything that the others are."""


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny language model in eval mode."""
    architecture = {**ARCHITECTURES, **PECULIAR, **LANGUAGE_MODELS}[name]
    attention = (architecture.attention or (None,))[-1] or None
    return architecture.build(attention, **changes).to(dtype).eval()


def prompts() -> list[list[int]]:
    """Two prompts of different lengths."""
    first, second = tokens(length=7).tolist()
    return [first, second[3:]]


def left_padded(rows: list[list[int]], filler: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask, (b, s)."""
    longest = max(map(len, rows))
    ids = [[filler] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


# -- activations ---------------------------------------------------------------------------------


def first_number(output: Any) -> Tensor | None:
    """The output, or the first tensor in it."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, (tuple, list)):
        return first_number(output[0]) if output else None
    if hasattr(output, "to_tuple"):
        return first_number(output.to_tuple())
    return None


def by_token(y: Tensor, b: int, s: int) -> Tensor | None:
    """(b, s, w), by the one axis that has s entries; None where there is none (experts' rows)."""
    if y.shape[0] == b * s:
        return y.reshape(b, s, -1)
    places = [axis for axis, size in enumerate(y.shape) if size == s]
    if len(places) != 1:
        return None
    y = y.movedim(places[0], 1) if places[0] else y[None].expand(b, *y.shape)
    assert y.shape[0] in (1, b)
    return y.flatten(2).expand(b, -1, -1) if y.ndim > 2 else y[..., None].expand(b, -1, -1)


def call(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Any:
    """A plain forward pass as `generate` would have it: positions count from each first token."""
    if mask is None or bool(mask.all()):
        return model(ids)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    takes = inspect.signature(type(model).forward).parameters
    extra = {"position_ids": positions} if "position_ids" in takes else {}
    return model(ids, attention_mask=mask, **extra)


@contextmanager
def outputs_of(
    model: nn.Module, into: dict[str, list[Tensor]], copied: bool = False
) -> Iterator[None]:
    """Collect the outputs of every module, under its first name, while the block runs.

    Copied at once, for the next operation may be one in place.
    """
    handles = []
    for name, module in model.named_modules():

        def keep(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            tensor = first_number(output)
            if tensor is not None:
                into.setdefault(name, []).append(tensor.clone() if copied else tensor)

        handles.append(module.register_forward_hook(keep))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def activations(
    model: nn.Module, ids: Tensor, mask: Tensor | None = None
) -> dict[str, list[Tensor]]:
    """Layer -> for each call, (b, s, w), of one pass over the whole sequences."""
    found: dict[str, list[Tensor]] = {}
    with torch.no_grad(), outputs_of(model, found, copied=True):
        call(model, ids, mask)
    return _arranged(found, *ids.shape)


def _arranged(found: dict[str, list[Tensor]], b: int, s: int) -> dict[str, list[Tensor]]:
    arranged = {name: [by_token(each, b, s) for each in several] for name, several in found.items()}
    return {
        name: [each.clone() for each in several if each is not None]
        for name, several in arranged.items()
        if all(each is not None for each in several)
    }


def rms(rows: Tensor) -> Tensor:
    """Root mean square over the last axis, in float64."""
    return rows.double().square().mean(-1).sqrt()


def log_probabilities(logits: Tensor) -> Tensor:
    """In float64."""
    wide = logits.double()
    return wide - wide.logsumexp(-1, keepdim=True)


def surprisals(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """-log p of every token after the first and the entropy of its distribution, (b, s - 1)."""
    with torch.no_grad():
        output = call(model, ids, mask)
    logs = log_probabilities(getattr(output, "logits", output)[:, :-1])
    surprisal = -logs.gather(-1, ids[:, 1:, None])[..., 0]
    return surprisal, -(logs.exp() * logs).sum(-1)


# -- voxels --------------------------------------------------------------------------------------


def voxels_of(anatomy: Any, layer: str) -> list[tuple[int, slice]]:
    """(column, units) of each voxel of units or heads that a layer has."""
    column = anatomy.layers.index(layer)
    return [
        (voxel, slice(int(anatomy.start[voxel]), int(anatomy.start[voxel] + anatomy.count[voxel])))
        for voxel in range(len(anatomy.layer))
        if anatomy.layer[voxel] == column and anatomy.kind[voxel] != 2
    ]


# -- gradients -----------------------------------------------------------------------------------


def summed_loss(logits: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    """(b, s - 1): -log p of token t + 1 at position t, 0 where it does not count."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logs = torch.log_softmax(wide[:, :-1], -1)
    return -logs.gather(-1, ids[:, 1:, None])[..., 0] * counts[:, 1:].to(logs.dtype)


def output_gradients(
    model: nn.Module, run: Callable[[], Tensor], b: int, s: int
) -> dict[str, list[Tensor]]:
    """Layer -> for each call, dL/d output (b, s, w), from retained gradients.

    `run` is the forward pass up to the loss. A layer that hands its input on as it is shares the
    tensor's gradient.
    """
    kept: dict[str, list[Tensor]] = {}
    with torch.enable_grad(), outputs_of(model, kept):
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        loss = run()
    wanted = [each for several in kept.values() for each in several if each.requires_grad]
    for each in wanted:
        each.retain_grad()
    loss.backward()
    model.zero_grad(set_to_none=True)
    gradients = {
        name: [each.grad for each in several if each.grad is not None]
        for name, several in kept.items()
    }
    return _arranged(gradients, b, s)


def dense_gradients(model: nn.Module, loss: Tensor, **options: Any) -> dict[str, Tensor]:
    """Parameter -> its whole gradient; those that the loss does not reach are left out."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, **options)
    return {name: each for name, each in zip(names, found, strict=True) if each is not None}


def norm_over(several: list[Tensor], units: slice = slice(None)) -> Tensor:
    """The norm over calls and units, (b, s)."""
    squares = [each[..., units].double().square().sum(-1) for each in several]
    total: Any = sum(squares)
    return torch.sqrt(total)


def is_close(ours: Tensor, truth: Tensor, tolerance: float) -> bool:
    """Everywhere equal to within a part of the largest number, nan where the other is nan."""
    if not torch.equal(ours.isnan(), truth.isnan()):
        return False
    known = ~truth.isnan()
    scale = float(truth[known].abs().max()) if bool(known.any()) else 0.0
    apart = (ours[known].double() - truth[known].double()).abs()
    return not apart.numel() or float(apart.max()) <= tolerance * max(scale, math.ulp(0.0))
