"""Patches, lesions, patterns and attributions computed by torchfmri and by other tools.

Everyone changes the heads of one model one after the other and reports one number for each. Bare
hooks, one forward pass per head, are the answer the others are compared with. Wrapping the model is
not timed. A tool is imported only when it runs, because some change torch when imported.
"""

import copy
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchfmri
from benchmarks._peers import make_tokenizer

# The name only selects the architecture (Llama); weights and sizes are those of our model.
_LLAMA = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Task:
    """One number for every head, with its output z replaced.

    Attributes:
        model: A Llama of transformers.
        ids: (b, s) what runs with replaced heads.
        donor: (b, s) where the values that replace others come from.
        value: What replaces z (b, s, w) of a layer, given that of the donor.
        measure: The number, of the logits (b, s, vocabulary).
    """

    model: Any
    ids: Tensor
    donor: Tensor
    value: Callable[[Tensor], Tensor]
    measure: Callable[[Tensor], Tensor]

    @property
    def layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @property
    def heads(self) -> int:
        return int(self.model.config.num_attention_heads)

    def units(self, head: int) -> slice:
        size = self.model.model.layers[0].self_attn.o_proj.in_features // self.heads
        return slice(head * size, (head + 1) * size)

    def each(self) -> Iterator[tuple[int, int]]:
        return ((layer, head) for layer in range(self.layers) for head in range(self.heads))


Run = Callable[[], np.ndarray]


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def build_bare_hooks(task: Task) -> Run:
    """A pre-hook on each output projection; one forward pass per head."""
    projections = [block.self_attn.o_proj for block in task.model.model.layers]

    def run() -> np.ndarray:
        kept: list[Tensor] = []
        handles = [
            each.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
            for each in projections
        ]
        with torch.no_grad():
            task.model(task.donor)
        for handle in handles:
            handle.remove()
        found = []
        for layer, head in task.each():
            units, new = task.units(head), task.value(kept[layer])

            def change(_: object, given: Any, units: slice = units, new: Tensor = new) -> Any:
                z = given[0].clone()
                z[..., units] = new[..., units]
                return (z,)

            handle = projections[layer].register_forward_pre_hook(change)
            with torch.no_grad():
                found.append(float(task.measure(task.model(task.ids).logits)))
            handle.remove()
        return np.array(found)

    return run


def build_nnsight(task: Task) -> Run:
    """The heads of a layer are invocations of one trace, which nnsight runs as one batch."""
    import nnsight
    from nnsight.modeling.transformers import TransformersModel

    model = TransformersModel(
        copy.deepcopy(task.model),
        task="text-generation",
        tokenizer=make_tokenizer(task.model.config.vocab_size),
    )
    layers, ids, donor = model.model.layers, task.ids, task.donor

    def patch_layer(layer: int, new: Tensor) -> Any:
        with torch.no_grad(), model.trace() as tracer:
            rows = nnsight.save([])
            for head in range(task.heads):
                with tracer.invoke(ids):
                    z = layers[layer].self_attn.o_proj.input.clone()
                    z[..., task.units(head)] = new[..., task.units(head)]
                    layers[layer].self_attn.o_proj.input = z
                    rows.append(model.lm_head.output)
        return rows

    def run() -> np.ndarray:
        with torch.no_grad(), model.trace(donor):
            kept = nnsight.save([each.self_attn.o_proj.input for each in layers])
        found: list[float] = []
        for layer in range(task.layers):
            rows = patch_layer(layer, task.value(kept[layer]))
            found += [float(task.measure(each)) for each in rows]
        return np.array(found)

    return run


def _bridge(model: Any) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    tokenizer = make_tokenizer(model.config.vocab_size)
    return TransformerBridge.boot_transformers(
        _LLAMA, hf_model=copy.deepcopy(model), tokenizer=tokenizer
    )


def build_transformer_lens(task: Task) -> Run:
    """`run_with_hooks` on `hook_z`, one forward pass per head."""
    bridge = _bridge(task.model)
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(task.layers)]

    def run() -> np.ndarray:
        found = []
        with torch.no_grad():
            _, cache = bridge.run_with_cache(task.donor, names_filter=names)
            for layer, head in task.each():
                new = task.value(cache[names[layer]].flatten(-2)).unflatten(-1, (task.heads, -1))

                def change(z: Tensor, hook: object, head: int = head, new: Tensor = new) -> Tensor:
                    z[..., head, :] = new[..., head, :]
                    return z

                logits = bridge.run_with_hooks(task.ids, fwd_hooks=[(names[layer], change)])
                found.append(float(task.measure(logits)))
        return np.array(found)

    return run


PEERS: dict[str, tuple[str, Callable[[Task], Run]]] = {
    "nnsight": ("nnsight", build_nnsight),
    "transformer_lens": ("transformer_lens", build_transformer_lens),
}
"""Name -> the package that it needs, and what makes its run."""


def patterns_of_lens(model: Any, ids: Tensor) -> list[Tensor]:
    """The attention patterns (b, head, q, k) of every block, by TransformerLens."""
    bridge = _bridge(model)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(ids)
    return [cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(len(bridge.blocks))]


def patterns_of_torchfmri(model: Any, ids: Tensor) -> list[Tensor]:
    inspector = torchfmri.Inspector(model)
    names = inspector.watch("blocks.*.attn.hook_pattern", what="attention")
    inspection = inspector.run_inspection({"input_ids": ids}, keep="tensors")
    return [inspection[name].attention for name in names]


def attribution_of_lens(model: Any, ids: Tensor, token: int, against: int) -> np.ndarray:
    """What every head and MLP adds to a logit difference, by TransformerLens' compatibility mode.

    It folds the weight of the final norm into the unembedding; `apply_ln_to_stack` divides by the
    scale that the norm had at that token.
    """
    bridge = _bridge(model)
    bridge.enable_compatibility_mode()
    with torch.no_grad():
        _, cache = bridge.run_with_cache(ids)
        heads = cache.stack_head_results(layer=-1, pos_slice=-1)
        mlps = [cache[f"blocks.{each}.hook_mlp_out"][:, -1] for each in range(len(bridge.blocks))]
        stack = torch.cat([heads, torch.stack(mlps)])
        normed = cache.apply_ln_to_stack(stack, layer=-1, pos_slice=-1)[:, 0]
        direction = bridge.W_U[:, token] - bridge.W_U[:, against]
        return (normed @ direction).double().numpy()
