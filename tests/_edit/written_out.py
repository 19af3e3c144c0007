"""A Llama's forward pass written out, with every place that can be edited handed to a function."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Change = Callable[[str, Tensor], Tensor]


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions of (b, heads, s, d)."""
    d, s = x.shape[-1], x.shape[-2]
    frequencies = 1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
    angles = torch.arange(s, dtype=torch.float32)[:, None] * frequencies
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    half = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
    return x * cos.to(x.dtype) + half * sin.to(x.dtype)


def logits_of(model: nn.Module, ids: Tensor, change: Change) -> Tensor:
    """The logits (b, s, vocabulary), with `change(place, value)` at every place."""
    config, inner = model.config, model.model
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    theta = config.rope_parameters["rope_theta"]
    x = inner.embed_tokens(ids)
    for number, block in enumerate(inner.layers):
        name = f"blocks.{number}"
        x = change(f"{name}.hook_resid_pre", x)
        read, attention = block.input_layernorm(x), block.self_attn
        q, k, v = (
            change(f"{name}.attn.hook_{each}", getattr(attention, f"{each}_proj")(read))
            .unflatten(-1, (count, -1))
            .transpose(1, 2)
            for each, count in (("q", heads), ("k", groups), ("v", groups))
        )
        q, k = rotate(q, theta), rotate(k, theta)
        k, v = (each.repeat_interleave(heads // groups, 1) for each in (k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        eager = config._attn_implementation == "eager"  # which has its softmax in float32
        z = scores.softmax(-1, dtype=torch.float32 if eager else None).to(v.dtype) @ v
        z = change(f"{name}.attn.hook_z", z.transpose(1, 2).flatten(2))
        x = x + change(f"{name}.hook_attn_out", attention.o_proj(z))
        read, mlp = block.post_attention_layernorm(x), block.mlp
        gate = change(f"{name}.mlp.hook_pre", mlp.gate_proj(read))
        post = nn.functional.silu(gate) * change(f"{name}.mlp.hook_pre_linear", mlp.up_proj(read))
        x = x + change(f"{name}.hook_mlp_out", mlp.down_proj(change(f"{name}.mlp.hook_post", post)))
        x = change(f"{name}.hook_resid_post", x)
    return model.lm_head(inner.norm(x))


def unchanged(_: str, value: Tensor) -> Tensor:
    return value
