"""What each attention head wrote: the input of the projection that puts the heads together.

No module puts it out, so it is read where it goes in. In a scan it is a layer of its own, named
after the projection, `self_attn.o_proj.input`, whose voxels are the heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchfmri._torch import Hook, hooked

_PROJECTIONS = ("o_proj", "out_proj")
"""What modules call the projection that puts the heads together."""


@contextlib.contextmanager
def listening_to_inputs(
    modules: Mapping[str, nn.Module], take: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Hand over the name and the first input of every module that is called inside."""

    def called(name: str, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            take(name, arguments[0])

    with hooked(
        module.register_forward_pre_hook(Hook(partial(called, name), module))
        for name, module in modules.items()
    ):
        yield


def head_outputs(layers: Mapping[str, nn.Module], head: int | None) -> dict[str, nn.Module]:
    """Name of the new layer -> the projection whose input it is, for heads of so many units."""
    return {
        f"{name}.input": module
        for name, module in layers.items()
        if name.rpartition(".")[2] in _PROJECTIONS
        and isinstance(module, nn.Linear)
        and head
        and module.in_features % head == 0
        and f"{name}.input" not in layers
    }
