"""Small architectures with random weights, and a batch for each, for comparisons.

On the ten of `MODELS` the thresholds of compare were chosen. Those of `UNSEEN` were not looked at
then: they tell what the thresholds are worth.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, BATCH, LENGTH = 67, 3, 10
Batch = dict[str, Any]
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, **_SPECIAL,
}  # fmt: skip
_HEADS = {**_DECODER, "head_dim": 8}
_ENCODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _HEADS),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_HEADS, "sliding_window": 4, "query_pre_attn_scalar": 8},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _DECODER),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4,
         **_SPECIAL},
    ),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {**_ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 64},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3,
         "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 3,
         **_SPECIAL},
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**_ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 3},
    ),
}  # fmt: skip
UNSEEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _DECODER),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 32, "word_embed_proj_dim": 32,
         "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "max_position_embeddings": 64},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _DECODER),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 32},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", _DECODER),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**_DECODER, "attention_multiplier": 0.35}),
    "roberta": (
        "RobertaForMaskedLM",
        "RobertaConfig",
        {**_ENCODER, **_SPECIAL, "vocab_size": VOCABULARY, "max_position_embeddings": 64},
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {**_SPECIAL, "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 3,
         "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
         "decoder_start_token_id": 2},
    ),
    "deit": (
        "DeiTForImageClassification",
        "DeiTConfig",
        {**_ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 3},
    ),
    "falcon_mamba": (
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 3,
         **_SPECIAL},
    ),
}  # fmt: skip
_IMAGES, _PAIRS, _STATES = ("vit", "deit"), ("t5", "bart"), ("mamba", "falcon_mamba")
CAUSAL = ("llama", "qwen3", "gemma3", "phi3", "mixtral", "gpt2")


def build(name: str, attention: str | None = None, seed: int = 0, **changes: Any) -> nn.Module:
    """The model in float32 and evaluation mode; equal arguments give equal weights."""
    model_class, config_class, sizes = (MODELS | UNSEEN)[name]
    config = getattr(transformers, config_class)(**{**sizes, **changes})
    if attention is not None:
        config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config)
        with torch.no_grad():  # nothing is zero or one, so that everything matters
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def batch(name: str, padding: str | None = "right", seed: int = 7) -> Batch:
    """What the model is called with; one row is padded on that side, where it can be."""
    generator = torch.Generator().manual_seed(seed)
    if name in _IMAGES:
        images = torch.randn(BATCH, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([0, 2, 1])}
    ids = torch.randint(5, VOCABULARY, (BATCH, LENGTH), generator=generator)
    if name in _PAIRS:
        labels = torch.randint(5, VOCABULARY, (BATCH, 6), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    if name in _STATES or padding is None:
        return {"input_ids": ids, "labels": ids}
    return padded(ids, padding)


def padded(ids: torch.Tensor, side: str, padding: int = 3) -> Batch:
    """The batch whose last row has lost its last tokens, and is padded left or right."""
    ids = ids.clone()
    mask = torch.ones_like(ids)
    row = ids[-1, :-padding].clone()
    place = slice(None, -padding) if side == "right" else slice(padding, None)
    ids[-1], mask[-1] = 0, 0
    ids[-1, place], mask[-1, place] = row, 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {**found, "position_ids": positions}


def module(model: nn.Module, name: str) -> Any:
    """The layer of that name."""
    return model.get_submodule(name)


Change = Callable[[nn.Module], None]
