"""Every architecture of the installed transformers that can be built small, from its configuration.

A configuration is shrunk by setting the attributes that many of them share; where that does not
fit, further sizes are tried. What cannot be built is listed with the reason.
"""

import contextlib
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 61
LENGTH, TARGET_LENGTH = 7, 5
MOST_PARAMETERS = 500_000
KINDS = ("causal", "masked", "seq2seq", "vision")

Inputs = dict[str, Tensor]


@dataclass
class Small:
    """A small model.

    Attributes:
        name: As transformers calls its type.
        kind: One of `KINDS`.
        model: In float64, in evaluation mode.
        inputs: Of a batch of two.
    """

    name: str
    kind: str
    model: nn.Module
    inputs: Inputs


def architectures() -> list[tuple[str, str, str]]:
    """All (kind, model type, class) that transformers lists, without repeated classes."""
    # Imported whole: an import that `within` interrupts would leave no class to build.
    import transformers.generation.utils
    import transformers.modeling_utils  # noqa: F401
    from transformers.models.auto import modeling_auto as auto

    tables = {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "vision": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    found: dict[str, tuple[str, str, str]] = {}
    for kind, table in tables.items():
        for model_type, names in table.items():
            name = names if isinstance(names, str) else names[0]
            found.setdefault(name, (kind, model_type, name))
    return list(found.values())


# -- shrinking -----------------------------------------------------------------------------------

_WIDTHS = """hidden_size d_model n_embd dim emb_dim embed_dim embedding_size word_embed_proj_dim
    embedding_dim encoder_hidden_size attention_hidden_size decoder_hidden_size lru_width"""
_INNER = """intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim hidden_dim
    dense_ffn_hidden_size shared_intermediate_size ffn_hidden_size"""
_EXPERT_INNER = """moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
    shared_expert_intermediate_size moe_ffn_hidden_size"""
_DEPTHS = """num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers depth
    num_encoder_layers num_decoder_layers num_blocks"""
_HEADS = """num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads
    n_heads attention_heads num_encoder_attention_heads num_decoder_attention_heads
    linear_num_value_heads linear_num_key_heads"""
_KEYS = "num_key_value_heads num_kv_heads n_kv_heads multi_query_group_num"
_HEAD_SIZES = """head_dim d_kv kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim
    linear_key_head_dim linear_value_head_dim global_head_dim attention_head_dim d_head
    query_pre_attn_scalar rotary_dim"""
_POSITIONS = """max_position_embeddings n_positions context_length max_seq_len n_ctx
    max_sequence_length max_source_positions max_target_positions"""
_EXPERTS = """num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts"""
_CHOSEN = """num_experts_per_tok top_k moe_k num_experts_per_token moe_topk moe_top_k"""
_ONE = """n_group topk_group n_shared_experts moe_num_shared_experts num_shared_experts
    first_k_dense_replace"""
_EIGHT = "kv_lora_rank q_lora_rank attn_lora_rank"
_FOUR = """state_size mamba_d_state ssm_state_size d_state sliding_window attention_window
    local_attention mamba_chunk_size chunk_size attention_chunk_size index_head_dim index_n_heads
    index_topk swa_window"""
_NO = """attention_dropout hidden_dropout dropout activation_dropout attn_pdrop embd_pdrop
    resid_pdrop hidden_dropout_prob attention_probs_dropout_prob layerdrop encoder_layerdrop
    decoder_layerdrop drop_path_rate classifier_dropout embedding_dropout
    ffn_dropout summary_first_dropout"""
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def _sizes(width: int, heads: int) -> dict[str, Any]:
    table = {
        _WIDTHS: width,
        _INNER: 24,
        _EXPERT_INNER: 8,
        _DEPTHS: 2,
        _HEADS: heads,
        _KEYS: heads // 2,
        _HEAD_SIZES: width // heads,
        _POSITIONS: 64,
        _EXPERTS: 4,
        _CHOSEN: 2,
        _ONE: 1,
        _EIGHT: 8,
        _FOUR: 4,
        _NO: 0.0,
    }
    found = {name: value for names, value in table.items() for name in names.split()}
    more = {
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 4,
        "mamba_n_heads": heads,
        "mamba_d_head": 2 * width // heads,
        "mamba_num_heads": heads,
        "mamba_head_dim": 2 * width // heads,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "n_groups": 1,
        "type_vocab_size": 2,
        "image_size": 16,
        "patch_size": 4,
        "num_labels": 3,
        "window_size": 2,
        "num_hidden_groups": 1,
        "use_cache": False,
        "time_step_rank": 4,
        "mlstm_chunk_size": 4,
        "conv_dim": 16,
        "num_classes": 3,
        "stages": 4,
    }
    return found | more | _SPECIAL


def _shrunk(config_class: Any, sizes: dict[str, Any]) -> Any:
    """A configuration with the sizes that it knows, and its parts likewise."""
    default = config_class()
    parts = {
        name: _shrunk(type(value), sizes).to_dict()
        for name, value in vars(default).items()
        if hasattr(value, "to_dict") and hasattr(value, "model_type")
    }
    known = default.to_dict()
    other_names = getattr(default, "attribute_map", {})
    names = set(known) | {e for e, of in other_names.items() if not isinstance(known.get(of), list)}
    layers = known.get("num_hidden_layers", known.get("num_layers"))
    chosen: dict[str, Any] = {}
    for name in names - set(parts):
        value = known.get(name)
        if isinstance(value, list | tuple) and value:
            chosen |= _list(name, list(value), sizes, layers)
        elif name in sizes and isinstance(value, bool) <= isinstance(sizes[name], bool):
            chosen[name] = int(sizes[name]) if type(value) is int else sizes[name]
    return config_class(**chosen, **parts)


def _list(name: str, value: list[Any], sizes: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """A list with an entry per layer, or of sizes, one per stage: widths, depths or heads."""
    stages = min(len(value), sizes["stages"])
    if all(type(each) is int for each in value) and len(value) < 6:
        if "depth" in name or "layers" in name or "blocks" in name:
            return {name: [1 + (stages == 2)] * stages}
        if "head" in name:
            return {name: [2] * stages}
        if "hidden_sizes" in name or "dims" in name or "channels" in name or name == "embed_dim":
            return {name: [sizes["hidden_size"]] * stages}
        if name == "image_size":
            return {name: [sizes[name]] * len(value)}
        return {name: value[:stages]} if stages == 2 and len(value) == 4 else {}
    if len(value) == layers and sizes.get("layer_lists", True):
        others = [each for each in value if each != value[0]]
        return {name: [value[0], (others or value)[0]]}
    return {}


# -- building ------------------------------------------------------------------------------------


class TooLongError(BaseException):
    """Time is up; no `except Exception` on the way stops it."""


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise a TooLongError after so many seconds of this process: others do not count."""

    def stop(*_: Any) -> None:
        raise TooLongError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# Widths, and sizes to be set otherwise or, with None, to be left alone.
_LANGUAGE: list[tuple[int, dict[str, Any]]] = [
    (16, {}),
    (16, {"layer_lists": False}),
    (16, {"head_dim": None}),
    (16, {"head_dim": None, "num_experts_per_tok": 1, "num_key_value_heads": 4}),
    (16, {"head_dim": None, "global_head_dim": None, "hidden_size_per_layer_input": 0}),
    (16, {"head_dim": 8, "num_heads": 4}),
    (32, {}),
    (16, {"sliding_window": None, "head_dim": None}),
    (16, {"head_dim": None, "num_hidden_layers": None}),
    (64, {}),
]
_VISION: list[tuple[int, dict[str, Any]]] = [
    (16, {}),
    (16, {"image_size": 32, "stages": 2}),
    (16, {"image_size": 32}),
    (16, {"image_size": 32, "patch_size": None, "stages": 2}),
    (32, {"image_size": 64, "patch_size": None}),
]


def build(kind: str, model_type: str, name: str) -> Small:
    """One small model.

    Raises:
        RuntimeError: None of the sizes fits; the message is that of the first try.
    """
    import transformers

    first: Exception | None = None
    tries = dict.fromkeys(KINDS, _LANGUAGE) | {"vision": _VISION}
    for width, change in tries[kind]:
        try:
            config_class = transformers.CONFIG_MAPPING[model_type]
            sizes = {k: v for k, v in (_sizes(width, 4) | change).items() if v is not None}
            config = _shrunk(config_class, sizes)
            config._experts_implementation = "eager"
            return _made(kind, model_type, getattr(transformers, name), config)
        except Exception as error:
            first = first or error
    raise RuntimeError(f"{type(first).__name__}: {' '.join(str(first).split())[:160]}")


def _made(kind: str, model_type: str, model_class: Any, config: Any) -> Small:
    with torch.device("meta"):
        count = sum(each.numel() for each in model_class(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters remain")
    torch.manual_seed(0)
    model = model_class(config).double().eval()
    with torch.no_grad():
        for each in model.parameters():  # nothing is zero or one by accident
            each.copy_(torch.nan_to_num(each).clamp(-2, 2) + 0.1 * torch.randn(each.shape))
    inputs = INPUTS[kind](config)
    model(**inputs)
    return Small(model_type, kind, model, inputs)


def _ids(length: int, start: int) -> Tensor:
    """Ids (2, length), all different, none of them special."""
    return torch.randperm(VOCABULARY - start)[: 2 * length].view(2, length) + start


def _text(config: Any) -> Inputs:
    if getattr(config, "is_encoder_decoder", False):
        return _sequences(config)
    return {"input_ids": _ids(LENGTH, 5)}


def _sequences(_: Any) -> Inputs:
    return {"input_ids": _ids(LENGTH, 5), "decoder_input_ids": _ids(TARGET_LENGTH, 5)}


def _images(config: Any) -> Inputs:
    parts = (config, getattr(config, "vision_config", None))
    size = next((e.image_size for e in parts if getattr(e, "image_size", None)), 32)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", 3)
    return {"pixel_values": torch.randn(2, channels, height, width, dtype=torch.float64)}


INPUTS: dict[str, Callable[[Any], Inputs]] = {
    "causal": _text,
    "masked": _text,
    "seq2seq": _sequences,
    "vision": _images,
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing that transformers says about default configurations."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
