"""A view's part of the gradient of its base, in whatever layout that gradient comes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchfmri._torch import view_geometry

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as the base": lambda gradient: gradient,
    "transposed": lambda gradient: gradient.T.contiguous().T,
    "expanded": lambda gradient: gradient[:1, :1].expand(gradient.shape),
    "a part of a larger one": lambda gradient: torch.cat([gradient, gradient + 1])[3:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_part_of_a_gradient_is_the_same_in_every_layout(layout: str) -> None:
    base = torch.randn(3, 4, requires_grad=True).clone()
    geometry = view_geometry(base[1:, ::2])
    assert geometry is not None
    gradient = LAYOUTS[layout](torch.randn(3, 4))
    part = geometry.part_of(gradient)
    assert torch.equal(part, gradient[1:, ::2])
    whole = torch.zeros(3, 4)
    whole[1:, ::2] = part
    assert torch.equal(geometry.placed(part), whole)
