"""What people use instead of a Monitor: hooks of their own, wandb.watch, TensorBoard histograms.

Each builder puts its hooks on a model that nobody else uses, and returns a run that does one
training step while watching.
"""

import atexit
import os
import tempfile
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from benchmarks._timing import Run

Builder = Callable[[Run, nn.Module, Mapping[str, nn.Module]], Run]
NOTES = {
    "empty_hooks": "a forward hook that does nothing on each layer: the floor of any watching",
    "bare_hooks": "references to each output and its gradient until the end of the step, no "
    "statistics: the floor of watching both",
    "naive_hooks": "mean, std, min, max, isnan, isinf, == 0 and histc in each hook, kept on the "
    "device",
    "wandb_watch": "watches parameters and their gradients instead of activations and output "
    "gradients: wandb.watch(model, log='all', log_freq=1), offline",
    "tensorboard": "add_histogram of the same tensors",
}


def build_empty_hooks(step: Run, model: nn.Module, layers: Mapping[str, nn.Module]) -> Run:
    """Forward hooks that do nothing."""
    for module in layers.values():
        module.register_forward_hook(lambda *_: None)
    return step


def build_bare_hooks(step: Run, model: nn.Module, layers: Mapping[str, nn.Module]) -> Run:
    """References to outputs and gradients, dropped after the step."""
    found: list[Tensor] = []
    watched = _hooked(step, layers, lambda _, tensor: found.append(tensor.detach()))

    def run() -> object:
        result = watched()
        found.clear()
        return result

    return run


def build_naive_hooks(step: Run, model: nn.Module, layers: Mapping[str, nn.Module]) -> Run:
    """Eight statistics of each output and output gradient, in each hook."""
    found: list[tuple[Tensor, ...]] = []

    def reduce(name: str, tensor: Tensor) -> None:
        x = tensor.detach()
        number = x if x.dtype == torch.float32 else x.float()
        found.append(
            (
                *(x.mean(), x.std(), x.min(), x.max(), x.isnan().sum(), x.isinf().sum()),
                *((x == 0).sum(), number.histc(64)),
            )
        )

    watched = _hooked(step, layers, reduce)

    def run() -> object:
        found.clear()
        return watched()

    return run


def build_tensorboard(step: Run, model: nn.Module, layers: Mapping[str, nn.Module]) -> Run:
    """A histogram of each output and output gradient."""
    from torch.utils.tensorboard import SummaryWriter

    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    writer = SummaryWriter(folder.name)

    def write(name: str, tensor: Tensor) -> None:
        x = tensor.detach()
        writer.add_histogram(name, x if x.dtype == torch.float32 else x.float(), 0)

    return _hooked(step, layers, write)


def build_wandb_watch(step: Run, model: nn.Module, layers: Mapping[str, nn.Module]) -> Run:
    """`wandb.watch` of everything it can watch."""
    import wandb

    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    os.environ["WANDB_SILENT"] = "true"
    recording = wandb.init(mode="offline", dir=folder.name, project="benchmark")
    atexit.register(recording.finish)

    recording.watch(model, log="all", log_freq=1)

    def run() -> object:
        result = step()
        recording.log({})
        return result

    return run


PEERS: dict[str, Builder] = {
    "empty_hooks": build_empty_hooks,
    "bare_hooks": build_bare_hooks,
    "naive_hooks": build_naive_hooks,
    "tensorboard": build_tensorboard,
    "wandb_watch": build_wandb_watch,
}
COPYING = ("tensorboard", "wandb_watch")
NEEDS = {"tensorboard": "tensorboard", "wandb_watch": "wandb"}


def _hooked(step: Run, layers: Mapping[str, nn.Module], act: Callable[[str, Tensor], None]) -> Run:
    """The step with `act(name, tensor)` called for each output and its gradient."""

    def hook(name: str) -> Callable[..., None]:
        def after(module: nn.Module, inputs: object, output: Tensor) -> None:
            act(name, output)
            output.register_hook(lambda gradient: act(f"{name}.gradient", gradient))

        return after

    for name, module in layers.items():
        module.register_forward_hook(hook(name))
    return step
