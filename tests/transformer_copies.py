"""Token gradients of whole transformers by brute force, without torchfmri.

Every position of every layer gets a copy of the layer's parameters of its own: the layer is called
token by token, with another copy each time, and what reaches a copy is that token's gradient. Where
a layer computes with parameters that no call of a module carries (Mamba, attention sinks, relative
positions), the copies are put into that computation by hand. The oracle checks itself: the loss is
the model's own, and the copies' gradients add up to `.grad`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Any]
Tokens = dict[str, dict[str, Tensor]]
"""Parameter -> stack ("encoder", "decoder" or "") -> (b, s, *shape)."""


@contextlib.contextmanager
def no_float32() -> Iterator[None]:
    """A model in float64 stays there: transformers computes norms and softmax in float32."""
    kept = {name: getattr(Tensor, name) for name in ("float", "to", "type")}
    softmax = F.softmax

    def staying(function: Any) -> Any:
        def cast(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            if function is kept["float"] and tensor.dtype == torch.int64:
                return kept["to"](tensor, torch.float64)  # positions, which meet frequencies
            if tensor.dtype == torch.float64:
                if function is kept["float"]:
                    return tensor
                arguments = tuple(_double(each) for each in arguments)
                keywords = {key: _double(each) for key, each in keywords.items()}
            return function(tensor, *arguments, **keywords)

        return cast

    try:
        for name, function in kept.items():
            setattr(Tensor, name, staying(function))
        F.softmax = staying(softmax)
        yield
    finally:
        for name, function in kept.items():
            setattr(Tensor, name, function)
        F.softmax = softmax


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class Copies:
    """A copy of each parameter for every token of every stack."""

    def __init__(self, model: nn.Module, batch: int, stack_of: Callable[[str], str]) -> None:
        self.batch, self._stack_of = batch, stack_of
        self._names = {id(each): name for name, each in model.named_parameters()}
        self.leaves: dict[str, dict[str, Tensor]] = {}

    def of(self, layer: str, parameter: Tensor, s: int, b: int | None = None) -> Tensor:
        """The copies (b, s, *shape) of a parameter that a layer reads."""
        several = self.leaves.setdefault(self._names[id(parameter)], {})
        stack = self._stack_of(layer)
        if stack not in several:
            copies = parameter.detach().expand(b or self.batch, s, *parameter.shape).clone()
            several[stack] = copies.requires_grad_()
        return several[stack]


def token_gradients_by_copies(
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    batch: int,
    stack_of: Callable[[str], str] = lambda layer: "",
    tolerance: float = 1e-11,
) -> tuple[Tokens, dict[str, Tensor]]:
    """Every parameter's gradient per token, and its whole gradient.

    Args:
        model: Is put back as it was.
        loss_of: Runs the model, from a fixed seed.
        batch: b.
        stack_of: To which stack of tokens a layer's calls belong.
        tolerance: Of the oracle's check of itself, relative to each gradient.
    """
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    loss = loss_of()
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    whole = {name: each for name, each in zip(parameters, found, strict=True) if each is not None}
    copies = Copies(model, batch, stack_of)
    with _patched(model, copies):
        again = loss_of()
    assert torch.allclose(again, loss, rtol=tolerance, atol=0), "the oracle computes something else"
    again.backward()
    tokens: Tokens = {}
    for name, several in copies.leaves.items():
        if name in whole:
            tokens[name] = {
                stack: torch.zeros_like(each) if each.grad is None else each.grad
                for stack, each in several.items()
            }
            total = sum(each.sum((0, 1)) for each in tokens[name].values())
            scale = max(float(each.norm()) for each in tokens[name].values())
            assert float((total - whole[name]).norm()) <= tolerance * scale + 1e-17, name
    return tokens, whole


# A bias that belongs to the layer below, and a scale that meets no token.
_NOT_THEIR_OWN = ("BertLMPredictionHead", "AlbertMLMHead", "CLIPModel")


@contextlib.contextmanager
def _patched(model: nn.Module, copies: Copies) -> Iterator[None]:
    """Every module that owns parameters computes with copies, while the block runs."""
    touched = []
    for layer, module in model.named_modules():
        kind = type(module).__name__
        if not _trained(module) or kind in _NOT_THEIR_OWN:
            continue
        patch = _SPECIAL.get(kind)
        if patch is None:
            patch = _convolution if isinstance(module, nn.modules.conv._ConvNd) else _by_token
        touched.append((module, dict(module._parameters)))
        patch(layer, module, copies)
    for layer, module in model.named_modules():
        if getattr(module, "has_relative_attention_bias", False):
            touched.append((module, dict(module._parameters)))
            _relative_bias(layer, module, copies)
    try:
        yield
    finally:
        for module, parameters in touched:
            vars(module).pop("forward", None)
            vars(module).pop("compute_bias", None)
            module._parameters.update(parameters)


def _trained(module: nn.Module) -> dict[str, Tensor]:
    return {
        key: each
        for key, each in module._parameters.items()
        if each is not None and each.requires_grad
    }


@contextlib.contextmanager
def _swapped(module: nn.Module, instead: dict[str, Any]) -> Iterator[None]:
    kept = {key: module._parameters[key] for key in instead}
    module._parameters.update(instead)
    try:
        yield
    finally:
        module._parameters.update(kept)


# -- one call per token ------------------------------------------------------------------------


def _by_token(layer: str, module: nn.Module, copies: Copies) -> None:
    """A layer that works position by position: (b, s, ...), (b, heads, s, d) or rows (b * s, n)."""
    original, parameters, b = module.forward, _trained(module), copies.batch
    is_gemma = type(module).__name__ == "Gemma3RMSNorm"
    heads_first = layer.endswith(("q_norm", "k_norm") if is_gemma else "kv_b_proj")

    def forward(*arguments: Any, **keywords: Any) -> Any:
        first = next(each for each in (*arguments, *keywords.values()) if isinstance(each, Tensor))
        is_rows = first.ndim == 2 and not isinstance(module, nn.Embedding)
        axis = 0 if is_rows else 2 if heads_first and first.ndim == 4 else 1
        s = len(first) // b if is_rows else first.shape[axis]
        own = {key: copies.of(layer, each, s) for key, each in parameters.items()}
        results = []
        for row in range(b):
            for position in range(s):

                def taken(value: Any, row: int = row, position: int = position) -> Any:
                    if not isinstance(value, Tensor) or value.ndim == 0:
                        return value
                    if is_rows:
                        return value[row * s + position][None] if len(value) == b * s else value
                    if len(value) == 1:  # positions, the same for the whole batch
                        value = value.expand(b, *value.shape[1:])
                    return value[row : row + 1].narrow(axis, position, 1)

                with _swapped(module, {key: each[row, position] for key, each in own.items()}):
                    results.append(
                        original(
                            *map(taken, arguments),
                            **{key: taken(each) for key, each in keywords.items()},
                        )
                    )
        return _joined(results, b, axis)

    module.forward = forward


def _joined(results: list[Any], b: int, axis: int) -> Any:
    if isinstance(results[0], tuple):
        return tuple(_joined(list(each), b, axis) for each in zip(*results, strict=True))
    if axis == 0 or results[0].ndim == 2:
        return torch.cat(results)
    s = len(results) // b
    return torch.cat([torch.cat(results[k * s : (k + 1) * s], axis) for k in range(b)])


def _convolution(layer: str, module: nn.Module, copies: Copies) -> None:
    """The whole convolution once per token, of which its own position is taken."""
    original, parameters, b = module.forward, _trained(module), copies.batch

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            shape = original(x).shape
        s = shape[2:].numel()
        own = {key: copies.of(layer, each, s) for key, each in parameters.items()}
        columns = []
        for row in range(b):
            for position in range(s):
                with _swapped(module, {key: each[row, position] for key, each in own.items()}):
                    columns.append(original(x[row : row + 1]).flatten(2)[0, :, position])
        return torch.stack(columns).view(b, s, -1).mT.reshape(shape).contiguous()

    module.forward = forward


# -- parameters that no call of a module carries -----------------------------------------------


def _relative_bias(layer: str, module: Any, copies: Copies) -> None:
    """T5: the bias of query q, the same for the whole batch and all layers, is in the copy of q."""
    original, table = module.compute_bias, module.relative_attention_bias
    del table.forward  # the table is not called token by token

    def compute_bias(query_length: int, key_length: int, **keywords: Any) -> Tensor:
        own = copies.of(layer, table.weight, query_length, b=1)
        queries = []
        for query in range(query_length):
            with _swapped(table, {"weight": own[0, query]}):
                queries.append(original(query_length, key_length, **keywords)[:, :, query])
        return torch.stack(queries, 2)

    module.compute_bias = compute_bias


class _Sinks:
    """A parameter per head that is expanded to (b, heads, s, 1): here each query has its own."""

    def __init__(self, copies: Tensor) -> None:
        self._copies = copies

    def reshape(self, *_: int) -> _Sinks:
        return self

    def expand(self, *_: int) -> Tensor:
        return self._copies.mT[..., None]


def _sinks(layer: str, module: nn.Module, copies: Copies) -> None:
    original, sinks = module.forward, module._parameters["sinks"]
    assert sinks is not None

    def forward(*arguments: Any, **keywords: Any) -> Any:
        x = keywords.get("hidden_states", arguments[0] if arguments else None)
        with _swapped(module, {"sinks": _Sinks(copies.of(layer, sinks, x.shape[1]))}):
            return original(*arguments, **keywords)

    module.forward = forward


def _image_embeddings(layer: str, module: Any, copies: Copies) -> None:
    """ViT: the class token is position 0; each position has its row of the positions."""
    original, parameters = module.forward, _trained(module)
    s = 1 + module.patch_embeddings.num_patches

    def forward(*arguments: Any, **keywords: Any) -> Any:
        own = {key: copies.of(layer, each, s) for key, each in parameters.items()}
        position = torch.arange(s)
        instead = {
            "cls_token": own["cls_token"][:, 0, 0],
            "position_embeddings": own["position_embeddings"][:, position, 0, position],
        }
        with _swapped(module, instead):
            return original(*arguments, **keywords)

    module.forward = forward


def _clip_images(layer: str, module: Any, copies: Copies) -> None:
    original, token = module.forward, module._parameters["class_embedding"]

    def forward(*arguments: Any, **keywords: Any) -> Any:
        own = copies.of(layer, token, 1 + module.num_patches)
        with _swapped(module, {"class_embedding": own[:, :1]}):
            return original(*arguments, **keywords)

    module.forward = forward


def _own_positions(layer: str, module: Any, copies: Copies) -> None:
    """Whisper and BART: positions that the table's layer makes itself, for the whole batch."""
    original, parameters = module.forward, _trained(module)

    def forward(input_ids: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        s = input_ids.shape[1]
        own = copies.of(layer, parameters["weight"], s)
        rows = []
        for row in range(copies.batch):
            for position in range(s):
                with _swapped(module, {"weight": own[row, position]}):
                    found = original(input_ids, *arguments, **keywords)
                    rows.append(found.reshape(-1, found.shape[-1])[position])
        return torch.stack(rows).view(copies.batch, s, -1)

    module.forward = forward


def _mamba(layer: str, module: Any, copies: Copies) -> None:
    """Written out with a copy of A, D, the convolution and the step size for every token."""
    conv, step = module.conv1d, module.dt_proj
    parameters = dict(module._parameters)

    def forward(x: Tensor, cache_params: Any = None, attention_mask: Any = None) -> Tensor:
        s = x.shape[1]
        rank, states, width = module.time_step_rank, module.ssm_state_size, module.conv_kernel_size
        own = {key: copies.of(layer, each, s) for key, each in parameters.items()}
        kernel = copies.of(f"{layer}.conv1d", conv.weight, s)[:, :, :, 0]
        shift = copies.of(f"{layer}.conv1d", conv.bias, s)
        slope = copies.of(f"{layer}.dt_proj", step.weight, s)
        offset = copies.of(f"{layer}.dt_proj", step.bias, s)
        values, gate = module.in_proj(x).chunk(2, -1)
        window = F.pad(values, (0, 0, width - 1, 0)).unfold(1, width, 1)
        values = F.silu((window * kernel).sum(-1) + shift)
        raw, into, out = module.x_proj(values).split([rank, states, states], -1)
        dt = F.softplus(torch.einsum("bsdr,bsr->bsd", slope, raw) + offset)
        decay = torch.exp(-torch.exp(own["A_log"]) * dt[..., None])
        driven = (dt * values)[..., None] * into[:, :, None]
        state = torch.zeros_like(driven[:, 0])
        read = []
        for position in range(s):
            state = decay[:, position] * state + driven[:, position]
            read.append(torch.einsum("bdn,bn->bd", state, out[:, position]))
        y = torch.stack(read, 1) + values * own["D"]
        return module.out_proj(y * F.silu(gate))

    def unused(*_: Any) -> None:
        raise AssertionError("the mixer computes with these weights, it does not call the layer")

    module.forward = forward
    conv.forward = step.forward = unused


_SPECIAL: dict[str, Callable[[str, Any, Copies], None]] = {
    "MambaMixer": _mamba,
    "GptOssAttention": _sinks,
    "ViTEmbeddings": _image_embeddings,
    "CLIPVisionEmbeddings": _clip_images,
    "WhisperPositionalEmbedding": _own_positions,
    "BartLearnedPositionalEmbedding": _own_positions,
}
