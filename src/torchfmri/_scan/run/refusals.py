"""Refuse what cannot be scanned, before the model runs, with what to do instead.

`Scanner`, `lenses`, `dataset` and `_lesion` call one function for each reason; `live` uses the last
two for what only shows while generating. Without a refusal the scan would be wrong, fail in the
middle or hang. Each message names the user's own value and another way. `refuse_other_prompts`
talks to the other processes, so all of them must reach it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._model import find_stacks, named_layers, refuse_meta, unwrap
from torchfmri._scan.run.model_call import takes
from torchfmri._scan.run.prompt import EncodedPrompt
from torchfmri.exceptions import InspectionError

_NO_INPUTS = frozenset(
    {"use_cache", "past_key_values", "cache_params", "cache_position", "logits_to_keep"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
)
"""What a forward takes beside its inputs; without them it computes the same."""


# -- the model -----------------------------------------------------------------------------------


_SCAN = (
    "a scan has one token axis. Scan its encoder or decoder by itself, or use "
    "torchfmri.token_gradients, which keeps the two apart."
)


def refuse_two_stacks(model: nn.Module, reason: str = _SCAN) -> None:
    """Raise for encoder-decoder models, whose two stacks have different tokens.

    Args:
        model: The model.
        reason: Why that cannot be done, and what to do instead.
    """
    model = unwrap(model)
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return
    if len(find_stacks(named_layers(model))) != 1:  # T5's encoder alone has T5's configuration
        raise InspectionError(
            f"{type(model).__name__} has an encoder and a decoder, with different tokens each: "
            + reason
        )


def refuse_without_tokens(model: nn.Module) -> None:
    """Raise for models of transformers that are fed images or sound, and no token ids."""
    name = getattr(unwrap(model), "main_input_name", "input_ids")
    if name != "input_ids" and not takes(model, "input_ids"):
        raise InspectionError(
            f"{type(unwrap(model)).__name__} is fed {name} and no token ids, so it has no words to "
            "read. Edit it (torchfmri.edited) or watch it (Inspector) in passes of your own."
        )


def refuse_unrunnable(model: nn.Module) -> None:
    """Raise for a model that computes nothing, or whose layers cannot be watched."""
    if isinstance(model, torch.jit.ScriptModule):
        raise InspectionError(
            f"The model is TorchScript ({type(model).__name__}): its layers run without Python, "
            "and no hook sees them. Scan the nn.Module that it was traced or scripted from."
        )
    empty = next((name for name, each in model.named_parameters() if each.is_meta), None)
    if empty is not None and any(hasattr(each, "_hf_hook") for each in model.modules()):
        raise InspectionError(
            f"Parameter {empty!r} is offloaded (accelerate's device_map): its weights are there "
            "while its own layer runs, and a scan also reads them outside of it. Load the model on "
            "GPUs alone, in a narrower dtype where memory is short: device_map='cuda', "
            "dtype='bfloat16'."
        )
    refuse_meta(model)


def refuse_virtual_tokens(model: nn.Module) -> None:
    """Raise where PEFT puts virtual tokens before the text: they are no tokens of the sequence."""
    config: Any = getattr(model, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return
    if getattr(model, "_adapters_disabled", False):
        return
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    raise InspectionError(
        f"The adapter of this model ({kind}) puts {config.num_virtual_tokens} virtual tokens "
        "before the text, which have no ids and no place in a scan. Scan the model without it: "
        "with model.disable_adapter(): torchfmri.scan(model, ...)."
    )


def refuse_shards(model: nn.Module, per: str | None) -> None:
    """Raise for a model of which each process runs a part; FSDP gathers what a layer needs."""
    kinds = {each.__name__ for module in model.modules() for each in type(module).__mro__}
    if "FullyShardedDataParallel" in kinds:
        raise InspectionError(
            "FullyShardedDataParallel gathers its parameters around its own forward, and generate "
            "runs the module inside. Shard the model with torch.distributed.fsdp.fully_shard, or "
            "scan it whole."
        )
    shards = _shards(model)
    several = [each for each in shards if len(_shard_axes(each)) > 1]
    if shards and ("FSDPModule" not in kinds or several):
        raise InspectionError(
            "The model is tensor-parallel: each process computes a part of a layer's output, and a "
            "scan needs it whole. Scan the model on one device, or sharded with "
            "torch.distributed.fsdp.fully_shard."
        )
    if shards and per == "token_loss":
        raise InspectionError(
            "per='token_loss' differentiates by the parameters again and again, and those of a "
            "sharded model (fully_shard) are put away in between. Use per='position', or scan it "
            "whole."
        )


def refuse_shared_work(model: nn.Module) -> None:
    """Raise where processes would scan rows of their own with a model that they share."""
    if _shards(model):
        raise InspectionError(
            "The model is sharded (fully_shard), so every pass needs all processes, and a dataset "
            "gives each process rows of its own. Load the whole model in each process, or call "
            "torchfmri.scan for one prompt after the other, in all processes alike."
        )


# -- the prompt ----------------------------------------------------------------------------------


def refuse_padding(model: nn.Module, mask: Tensor) -> None:
    """Raise where sequences are padded and the model would take the padding for text."""
    if not bool(mask.all()) and not takes(model, "attention_mask"):
        raise InspectionError(
            f"{type(unwrap(model)).__name__}.forward takes no attention_mask, so prompts of "
            "different lengths cannot be run together. Scan them one by one."
        )


def refuse_other_prompts(model: nn.Module, ids: Tensor, seed: int | None, samples: bool) -> None:
    """Raise where the processes of a sharded model were given different prompts: they would hang.

    All of them must come here, as they must for each pass.
    """
    shards = _shards(model)
    if not shards:
        return
    if samples and seed is None:
        raise InspectionError(
            "The model is sharded (fully_shard), so all processes must draw the same tokens: give "
            "a seed=, the same in all of them."
        )
    text = f"{tuple(ids.shape)} {ids.tolist()} {seed}"
    own = hashlib.sha256(text.encode()).hexdigest()
    mesh: Any = shards[0].device_mesh  # type: ignore[attr-defined]
    group = mesh.get_group(_shard_axes(shards[0])[0])
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, own, group=group)
    if len(set(found)) > 1:
        raise InspectionError(
            "The model is sharded (fully_shard), so every pass needs all processes, and they were "
            "given different prompts or seeds. Scan the same one in all of them."
        )


# -- the options of generate ---------------------------------------------------------------------


def refuse_options(options: Mapping[str, Any], prompt: EncodedPrompt, max_new_tokens: int) -> None:
    """Raise where an option of `generate` is said elsewhere, or cannot be followed by the pass."""
    length = getattr(options.get("generation_config"), "max_new_tokens", None)
    if length is not None and length != max_new_tokens:
        raise InspectionError(
            f"generation_config has max_new_tokens={length}, and the scan has {max_new_tokens}. "
            f"Give it to the scan: max_new_tokens={length}."
        )
    own = sorted({"input_ids", "inputs", "inputs_embeds", "attention_mask"} & set(options))
    if own:
        raise InspectionError(
            f"{own[0]}= is a matter of the prompt: scan(model, tokenizer, prompt), where the "
            "prompt may be token ids, or what a tokenizer returns with its attention_mask."
        )
    temperature = options.get("temperature")
    if temperature is not None and not _is_positive(temperature):
        raise InspectionError(
            f"temperature={temperature!r}: it divides the logits, so it is a number above 0. For "
            "the likeliest token at each step leave it out, with do_sample=False."
        )
    if "adapter_names" in options:
        raise InspectionError(
            "adapter_names= chooses adapters row by row for generate() alone; the pass for "
            "gradients cannot follow. Use model.set_adapter(name), and a scan for each adapter."
        )
    count = getattr(options.get("past_key_values"), "get_seq_length", None)
    held = int(count()) if callable(count) else 0
    if held >= prompt.ids.shape[1]:
        raise fed_twice(held, prompt.ids.shape[1], prompt.ids.shape[1])


def _is_positive(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < float("inf")  # type: ignore[operator]


def refuse_inputs(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise for inputs beside the ids, such as images: the pass would run without them."""
    extra = sorted(name for name in options if takes(model, name) and name not in _NO_INPUTS)
    if extra:
        raise InspectionError(
            f"{extra[0]}= is an input of {type(unwrap(model)).__name__}.forward, which the pass "
            "over the finished sequence would not have. Scan the activations while it generates: "
            "per=None."
        )


def _shards(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of which this process holds a part."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    unusual = (each for each in model.parameters() if type(each) is not nn.Parameter)
    return [each for each in unusual if _shard_axes(each)]


def _shard_axes(parameter: Tensor) -> list[int]:
    """The axes of the processes' mesh over which a parameter is cut."""
    placements: Any = getattr(parameter, "placements", ())
    return [axis for axis, each in enumerate(placements) if each.is_shard()]


# -- while it generates -------------------------------------------------------------------------


def fed_in_its_own_way(model: nn.Module) -> InspectionError:
    """The error for a model that writes in another way than it reads (XLNet, XLM, CPM-Ant)."""
    return InspectionError(
        f"{type(model).__name__} looks ahead: in a pass over a whole sequence, what it computes at "
        "a position depends on the tokens after it. To write nevertheless, its generate() feeds it "
        "placeholders for tokens that are not there yet, or all tokens again at each step, so that "
        "no pass over the finished sequence computes what generating did. Read a text with "
        "max_new_tokens=0, or scan a model whose attention is causal."
    )


def fed_twice(held: int, fed: int, known: int) -> InspectionError:
    """The error for a sequence that is fed again into a cache that holds it already."""
    return InspectionError(
        f"The model is fed {fed} tokens while its cache already holds {held} positions, which "
        f"makes {held + fed}; but the sequence has only {known}. The same tokens are fed twice "
        "into one cache: attention would see each of them twice, and either answer wrongly without "
        "an error, or fail with sizes such as "
        f"{known} against {held + fed}. Feed only the tokens that are new to the cache "
        "(ids[:, -1:] after the first pass), or start with a new cache. (If your loop really "
        "writes several tokens per pass, scan it with live=False.)"
    )
