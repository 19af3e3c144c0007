"""Ways to make a training step lighter or faster, each applied to a copy of the user's model.

`advice_run` tries `TECHNIQUES` one by one and combines those that helped. A new technique is an
entry with an obstacle (why it does not apply, or None) and a function that changes the `Setup`.
Techniques of one family are never combined. A technique may write to the setup, since it is a copy,
and may change its precision or the order of its sums: how far the gradient moves is measured and
shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchfmri._cost.resizing import size_of
from torchfmri._model import Loss, device_of, named_layers
from torchfmri._torch import flatten, map_tensors

# Layers whose running statistics a replay updates a second time.
_RUNNING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass
class Setup:
    """A training step on copies, which techniques change.

    Attributes:
        model: A copy of the model.
        optimizer: A copy of the optimizer, on the parameters of the copied model; None without one.
        data: A copy of the data.
        target: A copy of the target.
        loss: The loss that the user gave.
        autocast: The dtype to compute in; None leaves it to the model.
        pieces: The number of parts in which the batch runs.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    data: Any
    target: Any
    loss: Loss
    autocast: torch.dtype | None = None
    pieces: int = 1


class Technique(NamedTuple):
    """One way to make a training step lighter or faster.

    Attributes:
        name: The name in the table.
        family: Techniques of one family are never combined.
        obstacle: Returns why the technique does not apply to a setup; None if it does.
        apply: Changes the setup.
    """

    name: str
    family: str
    obstacle: Callable[[Setup], str | None]
    apply: Callable[[Setup], None]


# -- activation checkpointing ---------------------------------------------------------------------


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model: outermost containers of one class in a row."""
    blocks: dict[str, nn.Module] = {}
    layers = named_layers(model)
    for name, module in layers.items():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        if any(f"{name}.".startswith(f"{block}.") for block in blocks):
            continue
        kinds = [type(child) for child in module]
        for key, child in module.named_children():
            if kinds.count(type(child)) > 1 and any(True for _ in child.children()):
                blocks[f"{name}.{key}" if name else key] = child
    return blocks


def _checkpoint_obstacle(setup: Setup) -> str | None:
    if not find_blocks(setup.model):
        return "no repeated blocks (containers of one class in a ModuleList or Sequential)"
    if hasattr(setup.model, "gradient_checkpointing_enable") and not setup.model.training:
        return "the model is in eval mode, where transformers does not checkpoint: model.train()"
    return None


def _checkpoint(every: int, setup: Setup) -> None:
    blocks = list(find_blocks(setup.model).values())
    enable = getattr(setup.model, "gradient_checkpointing_enable", None)
    if enable is not None:
        # transformers' own switch also handles its KV cache, which a replay would double.
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for index, block in enumerate(blocks):
            if index % every and hasattr(block, "gradient_checkpointing"):
                block.gradient_checkpointing = False  # type: ignore[assignment]
        return
    for block in blocks[::every]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def has_running_statistics(setup: Setup) -> bool:
    """Return whether a replay updates running statistics a second time."""
    return any(
        isinstance(each, _RUNNING) and each.training and each.track_running_stats
        for block in find_blocks(setup.model).values()
        for each in block.modules()
    )


def _second_obstacle(setup: Setup) -> str | None:
    obstacle = _checkpoint_obstacle(setup)
    if obstacle is None and len(find_blocks(setup.model)) < 3:
        return f"there are only {len(find_blocks(setup.model))} blocks"
    return obstacle


# -- precision, attention, layout -----------------------------------------------------------------


def _autocast_obstacle(setup: Setup) -> str | None:
    kinds = {each.dtype for each in setup.model.parameters() if each.is_floating_point()}
    if torch.float32 not in kinds:
        named = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        return f"no float32 parameters to compute with in bf16 (they are {named})"
    device = device_of(setup.model)
    if torch.is_autocast_enabled(device.type):
        return "autocast is already on here"
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return "this device has no bf16"
    return None


def _autocast(setup: Setup) -> None:
    setup.autocast = torch.bfloat16


def _attention_obstacle(setup: Setup) -> str | None:
    implementation = getattr(getattr(setup.model, "config", None), "_attn_implementation", None)
    if implementation == "eager":
        return None
    if implementation is not None:
        return f"attention already runs as {implementation!r}"
    attention = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    if any(isinstance(each, attention) for each in setup.model.modules()):
        return "torch's own attention layers choose SDPA by themselves (need_weights=False)"
    return "no switch for it: not a transformers model with attn_implementation='eager'"


def _attention(setup: Setup) -> None:
    switch = getattr(setup.model, "set_attn_implementation", None)
    if switch is not None:
        switch("sdpa")
    else:
        setup.model.config._attn_implementation = "sdpa"  # type: ignore[union-attr]


def _layout_obstacle(setup: Setup) -> str | None:
    if not any(isinstance(each, (nn.Conv2d, nn.ConvTranspose2d)) for each in setup.model.modules()):
        return "no 2-d convolutions"
    if not any(each.tensor.ndim == 4 for each in flatten(setup.data)):
        return "no 4-d tensor among the data"
    return None


def _layout(setup: Setup) -> None:
    setup.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    setup.data = map_tensors(
        setup.data,
        lambda tensor: (
            tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
        ),
    )


# -- optimizer and batch --------------------------------------------------------------------------


def _fused_obstacle(setup: Setup) -> str | None:
    if setup.optimizer is None:
        return "no optimizer was given: advise(..., optimizer=optimizer)"
    if "fused" not in setup.optimizer.defaults:
        return f"{type(setup.optimizer).__name__} has no fused version"
    if all(group.get("fused") for group in setup.optimizer.param_groups):
        return "the optimizer is already fused"
    return None


def _fused(setup: Setup) -> None:
    assert setup.optimizer is not None
    state = setup.optimizer.state_dict()
    known = signature(type(setup.optimizer)).parameters
    options = {key: value for key, value in setup.optimizer.defaults.items() if key in known}
    options.update(fused=True, foreach=False)
    groups = [{**group, "fused": True, "foreach": False} for group in setup.optimizer.param_groups]
    for group in state["param_groups"]:
        group.update(fused=True, foreach=False)
    fused: torch.optim.Optimizer = type(setup.optimizer)(groups, **options)
    fused.load_state_dict(state)
    setup.optimizer = fused


def _pieces_obstacle(pieces: int, setup: Setup) -> str | None:
    batch = size_of(setup.data).batch
    if batch % pieces:
        return f"a batch of {batch} does not divide into {pieces} equal parts"
    return None


def _pieces(pieces: int, setup: Setup) -> None:
    setup.pieces = pieces


ACCUMULATION = Technique(
    "accumulate 2", "pieces", partial(_pieces_obstacle, 2), partial(_pieces, 2)
)
TECHNIQUES = (
    Technique("checkpoint", "checkpoint", _checkpoint_obstacle, partial(_checkpoint, 1)),
    Technique("half checkpoint", "checkpoint", _second_obstacle, partial(_checkpoint, 2)),
    Technique("bf16", "precision", _autocast_obstacle, _autocast),
    Technique("SDPA", "attention", _attention_obstacle, _attention),
    Technique("channels last", "layout", _layout_obstacle, _layout),
    Technique("fused", "optimizer", _fused_obstacle, _fused),
    ACCUMULATION,
    Technique("accumulate 4", "pieces", partial(_pieces_obstacle, 4), partial(_pieces, 4)),
)


def parts_of(value: Any, pieces: int, batch: int) -> list[Any]:
    """Split data into equal parts along the batch; data without a batch goes into every part."""

    def part_of(part: int, tensor: Tensor) -> Tensor:
        has_batch = tensor.ndim > 0 and tensor.shape[0] == batch
        return tensor.chunk(pieces)[part] if has_batch else tensor

    return [map_tensors(value, partial(part_of, part)) for part in range(pieces)]
