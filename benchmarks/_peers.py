"""The same capture with the tools people would use instead: every Linear, what each offers.

A builder takes the `Task` and returns a run per pass (`forward`, `forward_backward`, `generate`).
It imports its tool only when called, because some of them change torch when imported.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks._timing import Run


@dataclass(frozen=True)
class Task:
    """What everyone captures: all Linears of one model, on one input."""

    model: Any  # a transformers causal language model
    tokens: torch.Tensor  # (b, s)
    new_tokens: int

    @property
    def linears(self) -> list[str]:
        """Names of the Linears in model order, which here is the order of execution."""
        return [
            name for name, module in self.model.named_modules() if isinstance(module, nn.Linear)
        ]

    def forward(self) -> object:
        with torch.no_grad():
            return self.model(input_ids=self.tokens)

    def forward_backward(self) -> object:
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.model.zero_grad()
        return loss

    def generate(self) -> object:
        return self.model.generate(self.tokens, **self.generation)

    @property
    def generation(self) -> dict[str, Any]:
        return {
            "max_new_tokens": self.new_tokens,
            "min_new_tokens": self.new_tokens,
            "do_sample": False,
        }

    @property
    def passes(self) -> dict[str, Run]:
        """The plain runs by name."""
        return {
            "forward": self.forward,
            "forward_backward": self.forward_backward,
            "generate": self.generate,
        }


Builder = Callable[[Task], dict[str, Run]]


def build_bare_hooks(task: Task) -> dict[str, Run]:
    """A forward hook that clones the output, and a tensor hook on it that clones the gradient."""
    modules = [task.model.get_submodule(name) for name in task.linears]

    def watched(plain: Run) -> Run:
        def run() -> object:
            kept: list[torch.Tensor] = []

            def keep(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
                kept.append(output.detach().clone())
                if output.requires_grad:
                    output.register_hook(lambda gradient: kept.append(gradient.detach().clone()))

            handles = [module.register_forward_hook(keep) for module in modules]
            try:
                return plain(), kept
            finally:
                for handle in handles:
                    handle.remove()

        return run

    return {name: watched(plain) for name, plain in task.passes.items()}


def build_nnsight(task: Task) -> dict[str, Run]:
    """Saves `.output` of every Linear, and `.grad` inside `with loss.backward()`."""
    import nnsight
    from nnsight.modeling.transformers import TransformersModel

    # Wraps a copy: what nnsight installs on the model must not slow down the plain run.
    wrapped = TransformersModel(
        copy.deepcopy(task.model), task="text-generation", tokenizer=make_tokenizer()
    )
    layers = [_find(wrapped, name) for name in task.linears]
    tokens, new_tokens = task.tokens, task.new_tokens

    def forward() -> object:
        with torch.no_grad(), wrapped.trace(tokens):
            outputs = nnsight.save([layer.output for layer in layers])
        return outputs  # noqa: RET504 - nnsight rewrites the block above, it cannot return

    def forward_backward() -> object:
        with wrapped.trace(tokens, labels=tokens):
            outputs = nnsight.save([layer.output for layer in layers])
            loss = wrapped.output.loss
            gradients = nnsight.save([])
            with loss.backward():
                for output in reversed(outputs):
                    gradients.append(output.grad)
        wrapped._module.zero_grad()
        return outputs, gradients

    def generate() -> object:
        with wrapped.generate(tokens, **task.generation) as tracer:
            outputs = nnsight.save([])
            for _ in tracer.iter[:new_tokens]:
                for layer in layers:
                    outputs.append(layer.output)
        return outputs

    return {"forward": forward, "forward_backward": forward_backward, "generate": generate}


def build_transformer_lens(task: Task) -> dict[str, Run]:
    """Wraps a copy of the model in a TransformerBridge and caches every `hook_out` of a Linear."""
    from transformer_lens.model_bridge import TransformerBridge

    # The name only selects the architecture; weights and sizes are those of our model.
    bridge = TransformerBridge.boot_transformers(
        "Qwen/Qwen3-0.6B", hf_model=copy.deepcopy(task.model), tokenizer=make_tokenizer()
    )
    ends = tuple(
        [f".attn.{name}.hook_out" for name in ("q", "k", "v", "o")]
        + [f".mlp.{name}.hook_out" for name in ("gate", "in", "out")]
    )
    names = [name for name in bridge.hook_dict if name.endswith(ends) or name == "unembed.hook_out"]
    if len(names) != len(task.linears):
        raise RuntimeError(f"{len(names)} hook points for {len(task.linears)} Linears")

    def forward() -> object:
        with torch.no_grad():
            return bridge.run_with_cache(task.tokens, names_filter=names)

    def forward_backward() -> object:
        result = bridge.run_with_cache(
            task.tokens, names_filter=names, incl_bwd=True, return_type="loss"
        )
        bridge.zero_grad()
        return result

    def generate() -> object:
        kept: list[torch.Tensor] = []

        def keep(value: torch.Tensor, hook: object) -> None:
            kept.append(value.detach().clone())

        with bridge.hooks(fwd_hooks=[(name, keep) for name in names]):
            result = bridge.generate(
                task.tokens,
                max_new_tokens=task.new_tokens,
                do_sample=False,
                stop_at_eos=False,
                return_type="tokens",
                verbose=False,
            )
        return result, kept

    return {"forward": forward, "forward_backward": forward_backward, "generate": generate}


def build_captum(task: Task) -> dict[str, Run]:
    """LayerActivation, and LayerGradientXActivation for the gradients; nothing for generation."""
    from captum.attr import LayerActivation, LayerGradientXActivation

    layers = [task.model.get_submodule(name) for name in task.linears]

    def compute_logits(tokens: torch.Tensor) -> torch.Tensor:
        return task.model(input_ids=tokens).logits

    def compute_loss(tokens: torch.Tensor) -> torch.Tensor:
        loss = task.model(input_ids=tokens, labels=tokens).loss
        return loss.unsqueeze(0)  # captum wants one number per row

    activations = LayerActivation(compute_logits, layers)
    gradients = LayerGradientXActivation(compute_loss, layers)

    def forward() -> object:
        with torch.no_grad():
            return activations.attribute(task.tokens)

    def forward_backward() -> object:
        return gradients.attribute(task.tokens)

    return {"forward": forward, "forward_backward": forward_backward}


def build_torchlens(task: Task) -> dict[str, Run]:
    """`torchlens.trace` that saves the `linear` calls, and their gradients."""
    import torchlens

    class Loss(nn.Module):
        """TorchLens runs backward from an output of the model: the loss must be one."""

        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=tokens, labels=tokens).loss

    with_loss = Loss()
    linear = torchlens.func("linear")
    options = torchlens.options.CaptureOptions(save_grads=linear)

    def forward() -> object:
        with torch.no_grad():
            return torchlens.trace(task.model, [], {"input_ids": task.tokens}, save=linear)

    def forward_backward() -> object:
        save = linear | torchlens.func("cross_entropy")
        trace = torchlens.trace(with_loss, task.tokens, save=save, capture=options)
        trace.log_backward(trace[trace.output_layers[0]].out)
        task.model.zero_grad()
        return trace

    def generate() -> object:
        with torch.no_grad():
            return torchlens.trace(
                task.model.generate, task.tokens, dict(task.generation), save=linear
            )

    return {"forward": forward, "forward_backward": forward_backward, "generate": generate}


def _find(root: Any, name: str) -> Any:
    for part in name.split("."):
        root = root[int(part)] if part.isdigit() else getattr(root, part)
    return root


def make_tokenizer(vocabulary: int = 1000) -> Any:
    """A tokenizer for tools that insist on one; the benchmarks feed tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = WordLevel({f"t{number}": number for number in range(vocabulary)}, unk_token="t0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words),
        unk_token="t0",
        pad_token="t0",
        bos_token="t1",
        eos_token="t2",
    )
    # TransformerLens loads it a second time, from where it came from: the folder has to stay.
    folder = tempfile.mkdtemp(prefix="benchmark-tokenizer-")
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)
