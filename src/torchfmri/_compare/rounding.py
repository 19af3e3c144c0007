"""Random rounding: what a model would return if each layer had rounded differently.

Every floating-point value that a layer returns, and that a layer with parameters takes, is moved up
or down at random, by about half a unit in the last place of its dtype, and so is its gradient. The
difference to the plain run is what rounding amounts to at each depth of this model on this data
(Monte Carlo arithmetic), forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._model import whole_restorations
from torchfmri._torch import map_tensors

_SEED = 20_26


@contextmanager
def rounding_redrawn(
    model: nn.Module, coarsest: torch.dtype | None, autocast: torch.dtype | None = None
) -> Iterator[None]:
    """While the block runs, layers without layers inside them round at random.

    Args:
        model: The model whose layers get hooks, during the block only.
        coarsest: Round to this precision where the values are finer; None for their own.
        autocast: The dtype in which recurrent layers compute; None for their own.
    """
    draw = _Draw(coarsest)
    with whole_restorations(), ExitStack() as stack:
        for module in model.modules():
            if next(module.children(), None) is not None or isinstance(
                module, torch.jit.ScriptModule
            ):
                continue
            hooks = _Hooks(draw, max(map(_unit, _held_dtypes(module, autocast)), default=0.0))
            if next(module.parameters(recurse=False), None) is not None:
                handle = module.register_forward_pre_hook(hooks.before, with_kwargs=True)
                stack.callback(handle.remove)
            stack.callback(module.register_forward_hook(hooks.after).remove)
        yield


def _held_dtypes(module: nn.Module, autocast: torch.dtype | None) -> set[torch.dtype]:
    """Return the dtypes of what a layer holds, and the one in which autocast makes it compute.

    A layer may compute in float32 with frequencies of bfloat16, and an LSTM may return float32
    that it computed in bfloat16.
    """
    held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    found = {each.dtype for each in held if each.is_floating_point()}
    if autocast is not None and isinstance(module, nn.RNNBase):
        found.add(autocast)
    return found


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


class _Hooks:
    """The hooks of one layer.

    Args:
        draw: How to round.
        unit: The rounding of the numbers that the layer holds itself, relative to their size.
    """

    def __init__(self, draw: _Draw, unit: float) -> None:
        self._draw, self._unit = draw, unit
        self._returned = 0.0

    def before(self, _: nn.Module, arguments: Any, keywords: Any) -> tuple[Any, Any]:
        return map_tensors(arguments, self._round), map_tensors(keywords, self._round)

    def after(self, _: nn.Module, __: Any, output: Any) -> Any:
        return map_tensors(output, self._round_output)

    def _round(self, x: Tensor) -> Tensor:
        rounded = self._draw.round(x, self._unit)
        if rounded is not x and rounded.requires_grad:
            # A linear loss has the same gradients however the forward pass rounds: the backward
            # pass rounds by itself, and under autocast as coarsely as what the layer returned.
            rounded.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self._draw.round(gradient, max(self._unit, self._returned))
            )
        return rounded

    def _round_output(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            self._returned = max(self._returned, _unit(x.dtype))
        return self._round(x)


class _Draw:
    """The random numbers of a pass: the program's own generators are not touched."""

    def __init__(self, coarsest: torch.dtype | None) -> None:
        self._coarsest = coarsest
        self._generators: dict[torch.device, torch.Generator] = {}

    def round(self, x: Tensor, least: float) -> Tensor:
        """Return the tensor with new rounding errors, of at least `least` relative to its size."""
        if not x.is_floating_point() or x.is_nested or x.layout != torch.strided or not x.numel():
            return x
        generator = self._generators.get(x.device)
        if generator is None:
            generator = torch.Generator(x.device).manual_seed(_SEED)
            self._generators[x.device] = generator
        unit = max(_unit(x.dtype), least)
        if self._coarsest is not None:
            unit = max(unit, _unit(self._coarsest))
        wide = x.detach().float() if x.dtype.itemsize < 4 else x.detach()
        sign = torch.randint(0, 2, x.shape, generator=generator, device=x.device).mul_(2).sub_(1)
        # A sum that cancels keeps the rounding of its terms: the size of the neighbours counts too.
        size = wide.abs()
        around = size if x.ndim == 0 else size.square().mean(-1, keepdim=True).sqrt()
        gap = torch.where(wide.isfinite() & around.isfinite(), (size + around) / 2, 0) * unit * sign
        moved = (wide + gap).to(x.dtype)
        # The difference carries no gradient; the backward pass is evaluated at the rounded value.
        return x + torch.where(gap != 0, moved - x.detach(), 0) if x.requires_grad else moved
