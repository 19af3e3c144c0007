"""Gradients of layers that are called several times, and of layers that read an encoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfmri import Comparison, compare

pytestmark = pytest.mark.usefixtures("one_thread")


def scaled(x: Tensor, factor: float = 1.3) -> Tensor:
    found: Tensor = Scaled.apply(x, factor)  # type: ignore[no-untyped-call]
    return found


class Scaled(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y


class Looped(nn.Module):
    """One block that is called three times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(20, 8), Block(), nn.Linear(8, 4)
        self.fault = ""

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        for step in range(3):
            if step == 1:
                x = {"": x, "detach": x.detach(), "scale": scaled(x)}[self.fault]
            x = self.block(x)
        return self.head(x)


def compared(a: nn.Module, b: nn.Module, data: dict[str, Tensor]) -> Comparison:
    found: Comparison = compare(a, b, data=data, loss=lambda y: y.square().mean())
    return found


def twice(kind: type[nn.Module]) -> tuple[Any, Any]:
    sides = kind(), kind()
    sides[1].load_state_dict(sides[0].state_dict())
    return sides


@pytest.mark.parametrize("fault", ["detach", "scale"])
def test_a_fault_between_two_calls_of_a_block_is_that_of_the_loop(fault: str) -> None:
    """The inputs of another call were looked at, and a layer inside the block was named."""
    a, b = twice(Looped)
    data = {"input_ids": torch.randint(0, 20, (2, 6))}
    assert compared(a, b, data).agree
    b.fault = fault
    first = compared(a, b, data).first
    assert first is not None
    assert (first.direction, first.layer, first.seen_at) == ("backward", "", "block")
    assert ("factor" in [each.name for each in first.kinds]) == (fault == "scale")


def test_a_fault_inside_a_block_that_is_called_often_is_that_of_its_layer() -> None:
    a, b = twice(Looped)
    b.block.up.register_forward_hook(lambda _, __, y: scaled(y))
    first = compared(a, b, {"input_ids": torch.randint(0, 20, (2, 6))}).first
    assert first is not None
    assert (first.direction, first.layer) == ("backward", "block.up")


class Crossing(nn.Module):
    """A block of a decoder that reads what the encoder returned."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.rest = nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        read = self.query(x).softmax(-1) * self.value(memory).mean(1, keepdim=True)
        y: Tensor = self.rest(read)
        return x + y


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Crossing() for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, memory)
        return x


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.embed, self.decoder = nn.Linear(8, 8), nn.Linear(8, 8), Decoder()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.decoder(self.embed(y), memory=self.encoder(x))


@pytest.mark.parametrize(
    "layer", ["decoder.blocks.0.value", "decoder.blocks.2.value", "decoder.blocks.2", "decoder"]
)
def test_what_reads_an_encoder_far_from_it_is_named(layer: str) -> None:
    """The gradient of an encoder arrives after that of the whole decoder, which was named."""
    a, b = twice(Translator)
    data = {"x": torch.randn(2, 6, 8), "y": torch.randn(2, 5, 8)}
    assert compared(a, b, data).agree

    module = b.get_submodule(layer)
    forward, at = module.forward, "memory"

    def wrong(*given: Tensor, **keywords: Tensor) -> Any:
        if at in keywords:
            return forward(*given, memory=scaled(keywords[at]))
        return forward(*given[:-1], scaled(given[-1]))

    module.forward = wrong
    first = compared(a, b, data).first
    assert first is not None
    assert (first.direction, first.seen_at) == ("backward", "encoder")
    assert first.layer == layer
    assert [each.name for each in first.kinds] == ["factor"]
