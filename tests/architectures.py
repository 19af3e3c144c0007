"""Tiny transformers models with random weights, made from configurations: nothing is downloaded.

Every entry of `ARCHITECTURES` builds one model with a fixed seed and a batch that gives it a loss.
Sizes are a few dozen units, so that a forward and a backward pass take milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from oracles import numbers, whole_numbers
from torch import Tensor, nn

VOCABULARY = 67
BATCH, LENGTH = 2, 9
Batch = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How to build one model and what to feed it.

    Attributes:
        name: As tests show it.
        model: Name of the class in transformers.
        config: Name of the configuration class.
        sizes: What the configuration is given.
        batch: Makes the inputs, labels among them.
        attention: The implementations offered; empty where there is no attention.
    """

    name: str
    model: str
    config: str
    sizes: dict[str, Any]
    batch: Callable[[], Batch]
    attention: tuple[str, ...] = ("eager", "sdpa")

    def build(
        self, attention: str | None = None, experts: str | None = None, **changes: Any
    ) -> nn.Module:
        """The model, in float32 and training mode; equal arguments give equal weights.

        Args:
            attention: The implementation of attention.
            experts: That of mixtures of experts; "eager" is the one that takes float64.
            **changes: To the sizes.
        """
        config = getattr(transformers, self.config)(**{**self.sizes, **changes})
        if attention is not None:
            config._attn_implementation = attention
        if experts is not None:
            config._experts_implementation = experts
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = getattr(transformers, self.model)(config)
            _spread(model)
        return model.train()


def _spread(model: nn.Module) -> None:
    """Make every parameter matter: some start as zeros or ones, which hides mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif not parameter.any():
                parameter.normal_(std=0.05)


def tokens(length: int = LENGTH, seed: int = 7, batch: int = BATCH) -> Tensor:
    """Token numbers (b, s), none of them special."""
    return whole_numbers(5, VOCABULARY, batch, length, seed=seed)


def padded_mask(side: str = "right", padding: int = 3) -> Tensor:
    """An attention mask (b, s) whose last row is padded."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[-1, slice(-padding, None) if side == "right" else slice(None, padding)] = 0
    return mask


def _causal() -> Batch:
    ids, mask = tokens(), padded_mask()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _causal_unpadded() -> Batch:
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def _masked() -> Batch:
    return {**_causal(), "token_type_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long)}


def _sequences() -> Batch:
    return {
        "input_ids": tokens(),
        "attention_mask": padded_mask(),
        "labels": tokens(length=5, seed=8),
    }


def _images() -> Batch:
    images = numbers(BATCH, 3, 16, 16, dtype=torch.float32, seed=7)
    return {"pixel_values": images, "labels": torch.tensor([0, 2])}


def _audio() -> Batch:
    features = numbers(BATCH, 16, 24, dtype=torch.float32, seed=7)
    return {"input_features": features, "labels": tokens(length=6)}


def _captions() -> Batch:
    return {
        "input_ids": tokens(),
        "attention_mask": padded_mask(),
        "pixel_values": _images()["pixel_values"],
        "return_loss": True,
    }


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DROPOUT = {"attention_dropout": 0.1}
_GEMMA = {**_DECODER, **_DROPOUT, "head_dim": 4}

_ALL = (
    Architecture("llama", "LlamaForCausalLM", "LlamaConfig", {**_DECODER, **_DROPOUT}, _causal),
    Architecture(
        "qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, **_DROPOUT, "head_dim": 4}, _causal
    ),
    Architecture(
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **_DECODER,
            **_DROPOUT,
            "head_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "decoder_sparse_step": 1,
            "output_router_logits": True,
        },
        _causal,
    ),
    Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        _causal,
    ),
    Architecture(
        "bert",
        "BertForMaskedLM",
        "BertConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
        _masked,
    ),
    # One layer that is called several times.
    Architecture(
        "albert",
        "AlbertForMaskedLM",
        "AlbertConfig",
        {
            "vocab_size": VOCABULARY,
            "embedding_size": 8,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
        },
        _masked,
    ),
    Architecture(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "feed_forward_proj": "gated-gelu",
        },
        _sequences,
    ),
    Architecture(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 3,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
        },
        _images,
    ),
    Architecture(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 16,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_source_positions": 12,
            "max_target_positions": 16,
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dropout": 0.1,
            "attention_dropout": 0.1,
            "activation_dropout": 0.1,
        },
        _audio,
    ),
    Architecture(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        {
            "projection_dim": 8,
            "text_config": {
                "vocab_size": VOCABULARY,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 32,
                "attention_dropout": 0.1,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 16,
                "patch_size": 8,
                "attention_dropout": 0.1,
            },
        },
        _captions,
    ),
    Architecture(
        "mamba",
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        _causal_unpadded,
        attention=(),
    ),
    Architecture(
        "mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        {
            **_DECODER,
            **_DROPOUT,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
        },
        _causal,
    ),
    Architecture("gemma", "GemmaForCausalLM", "GemmaConfig", _GEMMA, _causal),
    Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_GEMMA, "sliding_window": 4, "query_pre_attn_scalar": 4},
        _causal,
        attention=("eager",),
    ),
    Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_GEMMA, "sliding_window": 4, "query_pre_attn_scalar": 4},
        _causal,
    ),
    Architecture(
        "phi3",
        "Phi3ForCausalLM",
        "Phi3Config",
        {**_DECODER, **_DROPOUT, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
        _causal,
    ),
    Architecture(
        "deepseek-v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_DECODER,
            **_DROPOUT,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 4,
            "first_k_dense_replace": 1,
        },
        _causal,
    ),
    Architecture(
        "gpt-oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_DECODER,
            **_DROPOUT,
            "head_dim": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "output_router_logits": True,
        },
        _causal,
        attention=("eager",),
    ),
)

ARCHITECTURES = {each.name: each for each in _ALL}
