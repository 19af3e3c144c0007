"""The Qwen3 models of the benchmarks: from a config, with random weights that are always the same.

transformers is imported only when one is built.
"""

from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LARGE: dict[str, Any] = {  # Qwen3-1.7B
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
HUGE: dict[str, Any] = {  # Qwen3-8B
    **LARGE,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}


def build_qwen3(
    shape: dict[str, Any],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    **options: Any,
) -> Any:
    """A language model of this shape; `options` are further ones of its config."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{**shape, **options})
    config._attn_implementation = attention
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM(config).to(dtype)
