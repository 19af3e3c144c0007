"""Seconds until verify_gradients names the wrong layer of a transformer of 100M parameters."""

import argparse
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._timing import describe_machine, report
from torchfmri import Verification, verify_gradients


class WrongGelu(torch.autograd.Function):
    """GELU whose backward pass forgets that the factor depends on x too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * torch.special.ndtr(x)


class Gelu(nn.Module):
    """GELU, right or wrong."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        return WrongGelu.apply(x) if self.wrong else F.gelu(x)


class Block(nn.Module):
    """One layer of a decoder: causal attention and an MLP, each after a norm."""

    def __init__(self, width: int, heads: int, wrong: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act = Gelu(wrong)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder like GPT-2; the activation of layer number `wrong` has a wrong backward pass."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, wrong: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(1024, width)
        self.layers = nn.ModuleList(Block(width, heads, number == wrong) for number in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12, help="how many layers")
    parser.add_argument("--vocabulary", type=int, default=24_000)
    parser.add_argument("--tokens", type=int, default=16, help="how long the sequence is")
    parser.add_argument("--wrong", type=int, default=7, help="which layer is wrong")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """The seconds for the model with one wrong layer and for the same model without."""
    threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        found, spent, parameters = _verify(arguments, arguments.wrong)
        right, spent_without, _ = _verify(arguments, -1)
    finally:
        torch.set_num_threads(threads)
    first = found.first_wrong
    return {
        "seconds": spent.seconds,
        "processor_seconds": spent.processor_seconds,
        "seconds_without_mistake": spent_without.seconds,
        "processor_seconds_without_mistake": spent_without.processor_seconds,
        "million_parameters": parameters / 1e6,
        "first_wrong": [str(first)],
        "layers_named": sorted({check.layer for check in found.findings}),
        "findings_without_mistake": [str(check) for check in right.findings],
        "settings": {
            **{name: getattr(arguments, name) for name in ("depth", "width", "tokens", "threads")},
            "layers_verified": len(found.layers),
        },
        "machine": describe_machine(),
    }


class _Clocks(NamedTuple):
    """On the wall, and of this process: on a busy machine the first says little."""

    seconds: float
    processor_seconds: float


def _verify(arguments: argparse.Namespace, wrong: int) -> tuple[Verification, _Clocks, int]:
    torch.manual_seed(0)
    heads = max(arguments.width // 64, 1)
    model = Transformer(arguments.vocabulary, arguments.width, arguments.depth, heads, wrong)
    model = model.to(arguments.device)
    ids = torch.randint(arguments.vocabulary, (1, arguments.tokens), device=arguments.device)
    target = torch.randint(arguments.vocabulary, (arguments.tokens,), device=arguments.device)
    parameters = sum(each.numel() for each in model.parameters())
    report(f"{parameters / 1e6:.1f} million parameters, wrong layer: {wrong}")
    start = _Clocks(time.perf_counter(), time.process_time())
    verification = verify_gradients(model, ids, lambda y: F.cross_entropy(y[0], target))
    end = _Clocks(time.perf_counter(), time.process_time())
    spent = _Clocks(end.seconds - start.seconds, end.processor_seconds - start.processor_seconds)
    return verification, spent, parameters
