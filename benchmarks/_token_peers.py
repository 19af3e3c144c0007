"""What people use for gradients that are not averaged: Opacus, BackPACK and torch.func.

All of them split by sample, none by token. Each builder gets a model that nobody else uses and its
tokens, and returns a run: forward, backward, and whatever the tool adds. Its results are dropped
where the plain step drops the gradients, so that every step starts from the same state.
"""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from benchmarks._timing import Run

Builder = Callable[[nn.Module, Tensor], Run]

# The package that has to be installed.
NEEDS = {"opacus": "opacus", "opacus_ghost": "opacus", "backpack": "backpack"}

NOTES = {
    "opacus": "per SAMPLE: gradients of all parameters (GradSampleModule(strict=False)); Linear "
    "and Embedding by its own rules, the norm layers of transformers by functorch",
    "opacus_ghost": "per SAMPLE: norms of all parameters' gradients "
    "(GradSampleModuleFastGradientClipping, get_norm_sample()); one backward pass, without the "
    "second one that clips",
    "backpack": "per SAMPLE: gradients (BatchGrad) of Linear and Embedding, which are extended one "
    "by one; the weights of the norm layers are left out, BackPACK has no rule for them",
    "vmap_grad": "per SAMPLE: gradients of all parameters, torch.func.vmap(grad(loss)) over the "
    "batch, the loss of each sample averaged over its own tokens; replaces the plain forward and "
    "backward",
}


def build_opacus(model: nn.Module, tokens: Tensor) -> Run:
    """Per-sample gradients of every parameter."""
    from opacus import GradSampleModule

    return _wrapped(GradSampleModule(copy.deepcopy(model), strict=False), tokens)


def build_opacus_ghost(model: nn.Module, tokens: Tensor) -> Run:
    """Per-sample norms over all parameters, by ghost norms."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        copy.deepcopy(model), strict=False, use_ghost_clipping=True
    )
    return _wrapped(wrapped, tokens, wrapped.get_norm_sample)


def _wrapped(model: Any, tokens: Tensor, read: Callable[[], Tensor] | None = None) -> Run:
    def run() -> object:
        model(input_ids=tokens, labels=tokens).loss.backward()
        result = read() if read is not None else None
        model.zero_grad()  # of Opacus: drops what it kept per sample as well
        return result

    return run


def build_backpack(model: nn.Module, tokens: Tensor) -> Run:
    """Per-sample gradients of the layers that BackPACK knows."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    own = copy.deepcopy(model)
    for module in own.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            extend(module)

    def run() -> object:
        with backpack(BatchGrad()):
            own(input_ids=tokens, labels=tokens).loss.backward()
        for parameter in own.parameters():
            if hasattr(parameter, "grad_batch"):
                del parameter.grad_batch
        own.zero_grad()
        return None

    return run


def build_vmap_grad(model: nn.Module, tokens: Tensor) -> Run:
    """Per-sample gradients of every parameter by a vectorised gradient function."""
    from torch.func import functional_call, grad, vmap

    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def compute_loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        keywords = {"input_ids": row[None], "labels": row[None]}
        loss: Tensor = functional_call(model, values, (), keywords).loss
        return loss

    per_sample = vmap(grad(compute_loss), in_dims=(None, 0), randomness="different")

    def run() -> object:
        per_sample(parameters, tokens)
        return None

    return run


PEERS: dict[str, Builder] = {
    "opacus": build_opacus,
    "opacus_ghost": build_opacus_ghost,
    "backpack": build_backpack,
    "vmap_grad": build_vmap_grad,
}
