"""Faults that ports, kernels and configurations really have, planted into one of two equal models.

Each says which layer and token the comparison has to name, and which kind where it can be told.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._compare_models import batch, build, module
from torchfmri import Run


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: What was done.
        model: To which architecture.
        plant: Changes side b, which is the same as side a before, and returns it.
        layer: The layer to be named.
        token: The token to be named; None where there are no tokens.
        kind: A kind to be named; empty where none can be told.
        direction: forward, backward or parameters.
        call: Which call of the layer.
    """

    name: str
    model: str
    plant: Callable[[Run], Run]
    layer: str
    token: int | None
    kind: str = ""
    direction: str = "forward"
    call: int = 0

    def pair(self) -> tuple[Run, Run]:
        """Side a, and side b with the fault."""
        a = Run(build(self.model), batch(self.model))
        return a, self.plant(Run(build(self.model), batch(self.model)))


def _set(layer: str, **values: Any) -> Callable[[Run], Run]:
    """Set attributes of a layer."""

    def plant(run: Run) -> Run:
        for name, value in values.items():
            setattr(module(run.model, layer), name, value)
        return run

    return plant


def _write(layer: str, act: Callable[[Any], None]) -> Callable[[Run], Run]:
    """Write into the parameters of a layer."""

    def plant(run: Run) -> Run:
        with torch.no_grad():
            act(module(run.model, layer))
        return run

    return plant


def _built(**changes: Any) -> Callable[[Run], Run]:
    """Build the model with another configuration and the same weights."""

    def plant(run: Run) -> Run:
        name = next(each for each in _NAMES if _NAMES[each] == type(run.model).__name__)
        model = build(name, **changes)
        model.load_state_dict(run.model.state_dict(), strict=False)
        return replace(run, model=model)

    return plant


_NAMES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma3": "Gemma3ForCausalLM",
          "mixtral": "MixtralForCausalLM", "phi3": "Phi3ForCausalLM"}  # fmt: skip


def _data(**changes: Callable[[Tensor], Tensor]) -> Callable[[Run], Run]:
    """Give the model other arguments."""

    def plant(run: Run) -> Run:
        data = {
            name: changes[name](value) if name in changes else value
            for name, value in run.data.items()
        }
        return replace(run, data=data)

    return plant


def _swap_heads(linear: Any, size: int, one: int, other: int) -> None:
    weight = linear.weight.view(-1, size, linear.weight.shape[1])
    weight[[one, other]] = weight[[other, one]].clone()


def _transpose(linear: Any) -> None:
    linear.weight.copy_(linear.weight.T.clone())


def _wrapped(layer: str, act: Callable[..., Any]) -> Callable[[Run], Run]:
    """Replace the forward of a layer by act(forward, ...)."""

    def plant(run: Run) -> Run:
        target = module(run.model, layer)
        forward = target.forward
        target.forward = lambda *arguments, **keywords: act(forward, *arguments, **keywords)
        return run

    return plant


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.2


def _wrong_backward(forward: Any, x: Tensor) -> Tensor:
    output: Tensor = forward(x)
    return _WrongGradient.apply(output)


def _straight(forward: Any, x: Tensor) -> Tensor:
    """An activation whose backward pass forgets its derivative."""
    output: Tensor = forward(x)
    return x + (output - x).detach()


def _only_second_row(forward: Any, x: Tensor, *rest: Any, **more: Any) -> Any:
    output = forward(x, *rest, **more).clone()
    output[1, 4:] *= 1.5
    return output


def _lora(alpha: int) -> Callable[[Run], Run]:
    def plant(run: Run) -> Run:
        import peft

        config = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"],
                                 init_lora_weights=False, layers_to_transform=[1])  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = peft.get_peft_model(run.model, config).eval()
        return replace(run, model=model)

    return plant


@dataclass(frozen=True)
class LoraFault(Fault):
    """A fault in an adapter, which side a has too."""

    def pair(self) -> tuple[Run, Run]:
        a, b = (Run(build(self.model), batch(self.model)) for _ in range(2))
        return _lora(8)(a), _lora(16)(b)


def _forget_mask(run: Run) -> Run:
    """Padding that is attended to: the mask is forgotten."""
    return replace(
        run, data={**run.data, "attention_mask": torch.ones_like(run.data["attention_mask"])}
    )


_ROPE = {"rope_type": "default", "rope_theta": 500.0}
FAULTS = (
    Fault("rope base 10000 -> 500", "llama", _built(rope_parameters=_ROPE), "model.rotary_emb", 1,
          "rope_base"),
    Fault("attention scale missing", "llama", _set("model.layers.1.self_attn", scaling=1.0),
          "model.layers.1.self_attn", 1, "attribute"),
    Fault("RMSNorm eps 1e-6 -> 1e-2", "llama",
          _set("model.layers.2.input_layernorm", variance_epsilon=1e-2),
          "model.layers.2.input_layernorm", 0, "epsilon"),
    LoraFault("LoRA alpha 8 -> 16", "llama", lambda run: run, "model.layers.1.self_attn.q_proj", 0,
              "attribute"),
    Fault("backward of an MLP's activation lost", "llama",
          _wrapped("model.layers.1.mlp.act_fn", _straight), "model.layers.1.mlp.act_fn", None,
          direction="backward"),
    Fault("gradient of o_proj times 1.2", "llama",
          _wrapped("model.layers.0.self_attn.o_proj", _wrong_backward),
          "model.layers.0.self_attn.o_proj", None, direction="backward"),
    Fault("position ids from 1", "llama", _data(position_ids=lambda x: x + 1), "model.rotary_emb",
          0, "shifted_positions"),
    Fault("query heads 0 and 2 swapped", "qwen3",
          _write("model.layers.1.self_attn.q_proj", lambda m: _swap_heads(m, 8, 0, 2)),
          "model.layers.1.self_attn.q_proj", 0, "swapped_heads"),
    Fault("norm of queries missing", "qwen3",
          _write("model.layers.0.self_attn.q_norm", lambda m: m.weight.fill_(1.0)),
          "model.layers.0.self_attn.q_norm", 0, "factor_per_unit"),
    Fault("keys times 1.1", "qwen3",
          _write("model.layers.2.self_attn.k_proj", lambda m: m.weight.mul_(1.1)),
          "model.layers.2.self_attn.k_proj", 0, "factor"),
    Fault("down_proj of an int8 checkpoint", "qwen3",
          _write("model.layers.1.mlp.down_proj",
                 lambda m: m.weight.copy_((m.weight / m.weight.abs().max() * 127).round()
                                          * m.weight.abs().max() / 127)),
          "model.layers.1.mlp.down_proj", 0, "precision"),
    Fault("sliding window 4 -> 3", "gemma3", _built(sliding_window=3), "model.layers.0.self_attn",
          3, "from_position"),
    Fault("norm weight without + 1", "gemma3",
          _write("model.layers.1.pre_feedforward_layernorm", lambda m: m.weight.sub_(1.0)),
          "model.layers.1.pre_feedforward_layernorm", 0, "factor_per_unit"),
    Fault("embeddings not scaled", "gemma3",
          _write("model.embed_tokens", lambda m: m.embed_scale.fill_(1.0)), "model.embed_tokens", 0,
          "factor"),
    Fault("keys and values of qkv swapped", "phi3",
          _write("model.layers.0.self_attn.qkv_proj",
                 lambda m: m.weight[32:64].copy_(m.weight[32:64].roll(16, 0).clone())),
          "model.layers.0.self_attn.qkv_proj", 0, "swapped_heads"),
    Fault("gate and up swapped", "phi3",
          _write("model.layers.2.mlp.gate_up_proj",
                 lambda m: m.weight.copy_(m.weight.roll(48, 0).clone())),
          "model.layers.2.mlp.gate_up_proj", 0, "swapped_heads"),
    Fault("one expert instead of two", "mixtral", _built(num_experts_per_tok=1),
          "model.layers.0.mlp.gate", 0),
    Fault("experts 0 and 1 swapped", "mixtral",
          _write("model.layers.1.mlp.experts",
                 lambda m: m.gate_up_proj.copy_(m.gate_up_proj[[1, 0, 2, 3]].clone())),
          "model.layers.1.mlp.experts", 0, "permuted_units"),
    Fault("weights of the router lost for expert 2", "mixtral",
          _write("model.layers.2.mlp.gate", lambda m: m.weight[2].zero_()),
          "model.layers.2.mlp.gate", 0, "parameter"),
    Fault("c_proj transposed", "gpt2",
          _write("transformer.h.1.attn.c_proj", _transpose), "transformer.h.1.attn.c_proj", 0,
          "transposed"),
    Fault("positions off by one", "gpt2", _data(position_ids=lambda x: x + 1), "transformer.wpe", 0,
          "shifted_positions"),
    Fault("padded positions attended to", "bert", _forget_mask,
          "bert.encoder.layer.0.attention.self", 0),
    Fault("tanh GELU -> exact GELU", "gpt2",
          lambda run: _set("transformer.h.2.mlp", act=nn.GELU())(run), "transformer.h.2.mlp.act", 0,
          "class"),
    Fault("bias of the query missing", "bert",
          _write("bert.encoder.layer.0.attention.self.query", lambda m: m.bias.zero_()),
          "bert.encoder.layer.0.attention.self.query", 0, "missing_parameter"),
    Fault("LayerNorm eps 1e-12 -> 1e-3", "bert",
          _set("bert.encoder.layer.1.output.LayerNorm", eps=1e-3),
          "bert.encoder.layer.1.output.LayerNorm", 0, "epsilon"),
    Fault("row 1 wrong from token 4 on", "bert",
          _wrapped("bert.encoder.layer.2.output.dense", _only_second_row),
          "bert.encoder.layer.2.output.dense", 4, "factor"),
    Fault("relative positions of the encoder lost", "t5",
          _write("encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
                 lambda m: m.weight.zero_()),
          "encoder.block.0.layer.0.SelfAttention.relative_attention_bias", 0,
          "missing_parameter"),
    Fault("keys of cross attention transposed", "t5",
          _write("decoder.block.1.layer.1.EncDecAttention.k", _transpose),
          "decoder.block.1.layer.1.EncDecAttention.k", 0, "transposed"),
    Fault("skip D of the scan lost", "mamba",
          _write("backbone.layers.1.mixer", lambda m: m.D.zero_()), "backbone.layers.1.mixer", 0,
          "missing_parameter"),
    Fault("kernel of the convolution flipped", "mamba",
          _write("backbone.layers.0.mixer.conv1d", lambda m: m.weight.copy_(m.weight.flip(-1))),
          "backbone.layers.0.mixer", 0),
    Fault("colours BGR instead of RGB", "vit",
          _write("vit.embeddings.patch_embeddings.projection",
                 lambda m: m.weight.copy_(m.weight.flip(1))),
          "vit.embeddings.patch_embeddings.projection", 1, "parameter"),
    Fault("position embeddings lost", "vit",
          _write("vit.embeddings", lambda m: m.position_embeddings.zero_()), "vit.embeddings", 0,
          "missing_parameter"),
)  # fmt: skip
