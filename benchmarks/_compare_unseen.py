"""Pairs and faults on architectures and seeds that no threshold of compare was chosen on.

The faults are weak and planted in every layer or in one, in float32 and in bfloat16, where many of
them are no larger than the noise.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from benchmarks._compare_models import UNSEEN, batch, build
from torchfmri import Run

SEEDS = (21, 22)
_STATELESS = ("falcon_mamba",)


def _run(name: str, seed: int, attention: str | None = None) -> Run:
    data = batch(name, seed=100 + seed)
    if name == "opt":  # makes its positions of the mask itself
        data.pop("position_ids", None)
    if name == "roberta":  # its positions begin after the padding's own
        data["position_ids"] = data["position_ids"] + 1
    return Run(build(name, attention, seed), data)


def lowered(run: Run) -> Run:
    """The run in bfloat16."""
    data = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in run.data.items()
    }
    return replace(run, model=run.model.bfloat16(), data=data)


def rounding_pairs() -> Iterator[tuple[str, str, Run, Run]]:
    """(kind, architecture, one side, the other): pairs that differ by rounding alone."""
    for name in UNSEEN:
        for seed in SEEDS:
            if name not in _STATELESS:
                eager, fused = (_run(name, seed, each) for each in ("eager", "sdpa"))
                yield "eager / SDPA", name, eager, fused
                eager, fused = (lowered(_run(name, seed, each)) for each in ("eager", "sdpa"))
                yield "eager / SDPA in bfloat16", name, eager, fused
            yield "float32 / bfloat16", name, _run(name, seed), lowered(_run(name, seed))
            run = _run(name, seed)
            yield "float32 / autocast", name, run, replace(run, autocast=torch.bfloat16)


# -- faults --------------------------------------------------------------------------------------


def _scale_attention(factor: float) -> Callable[[nn.Module], bool]:
    """Multiply the scale of every attention."""

    def plant(model: nn.Module) -> bool:
        found = False
        for module in model.modules():
            for name in ("scaling", "scale"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, getattr(module, name) * factor)
                    found = True
        return found

    return plant


def _scale_norms(model: nn.Module) -> bool:
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.weight.data.mul_(1.02)
    return True


def _set_epsilon(model: nn.Module) -> bool:
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-2)
    return True


def _middle_linear(model: nn.Module) -> nn.Linear:
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    return linears[len(linears) // 2]


def _scale_linear(model: nn.Module) -> bool:
    _middle_linear(model).weight.data.mul_(1.05)
    return True


def _shift_linear(model: nn.Module) -> bool:
    """Lose the bias of one layer."""
    biased = [
        each for each in model.modules() if isinstance(each, nn.Linear) and each.bias is not None
    ]
    if not biased:
        return False
    biased[len(biased) // 2].bias.data.zero_()
    return True


def _lose_rows(model: nn.Module) -> bool:
    """Lose one unit in eight of a layer, as of a shard that was not loaded."""
    weight = _middle_linear(model).weight.data
    weight[: max(1, len(weight) // 8)] = 0
    return True


FAULTS: dict[str, Callable[[nn.Module], bool]] = {
    "attention scale x 1.1": _scale_attention(1.1),
    "attention scale x 1.5": _scale_attention(1.5),
    "norm weights x 1.02": _scale_norms,
    "epsilon of norms 1e-2": _set_epsilon,
    "one Linear x 1.05": _scale_linear,
    "bias of one Linear lost": _shift_linear,
    "an eighth of a Linear lost": _lose_rows,
}
"""What was done -> the function that does it to a model; False where there is nothing to change."""


def fault_pairs(fault: str, *, low: tuple[bool, bool]) -> Iterator[tuple[str, Run, Run]]:
    """(architecture, the model, the model with the fault), each in bfloat16 where `low`."""
    for name in UNSEEN:
        for seed in SEEDS[:1]:
            a, b = (_run(name, seed, "eager") for _ in range(2))
            if FAULTS[fault](b.model):
                one, two = (
                    lowered(run) if each else run for run, each in zip((a, b), low, strict=True)
                )
                yield name, one, two
