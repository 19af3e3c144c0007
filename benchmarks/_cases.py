"""What a planted fault and a healthy model have in common: a training setup, made on demand.

The files `_faults*` and `_healthy*` build their cases from these models, data and optimizers, and
`benchmarks diagnosis` trains them. Data and weights come from fixed seeds: changing one here
changes the figures of docs/diagnosis.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[nn.Module, Any, Any], Any]


@dataclass
class Case:
    """A training setup.

    Attributes:
        model: The model.
        batches: What to train on.
        loss: Of output and target; None where the model returns its loss.
        optimizer: One or several; SGD with lr 0.05 by default.
        step: A training step of its own.
        steps: How many steps show it.
    """

    model: nn.Module
    batches: Sequence[Any]
    loss: Any = None
    optimizer: Any = None
    step: Step | None = None
    steps: int = 25

    def __post_init__(self) -> None:
        if self.optimizer is None:
            trained = [each for each in self.model.parameters() if each.requires_grad]
            self.optimizer = torch.optim.SGD(trained, lr=0.05)


@dataclass(frozen=True)
class Fault:
    """A planted fault and what should be said about it.

    Attributes:
        name: What was done.
        make: Makes the setup.
        problem: What it should be called.
        layers: One of these should be named; empty where it is about no layer.
        phase: Where in a step it begins.
        step: When; None where it does not depend on a step.
        kind: The family: numeric, flow, wiring, init, data, precision or optimizer.
    """

    name: str
    make: Callable[[], Case]
    problem: str
    layers: tuple[str, ...]
    phase: str
    step: int | None
    kind: str


@dataclass(frozen=True)
class Healthy:
    """A setup with which nothing is wrong, and what may look wrong about it."""

    name: str
    make: Callable[[], Case]
    trap: str


@dataclass
class Blobs:
    """Gaussian clusters: something that every small net learns."""

    classes: int = 4
    width: int = 16
    seed: int = 0
    centres: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.centres = 2 * torch.randn(self.classes, self.width, generator=generator)

    def batches(self, count: int = 25, size: int = 32) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        made = []
        for _ in range(count):
            y = torch.randint(self.classes, (size,), generator=generator)
            x = self.centres[y] + torch.randn(size, self.width, generator=generator)
            made.append((x, y))
        return made


BLOBS = Blobs()
CE = nn.CrossEntropyLoss()
MSE = nn.MSELoss()


def regression(
    count: int = 25, size: int = 32, width: int = 16, outputs: int = 1, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Y = tanh of a random projection of x, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(width, outputs, generator=generator) / width**0.5
    made = []
    for _ in range(count):
        x = torch.randn(size, width, generator=generator)
        noise = 0.1 * torch.randn(size, outputs, generator=generator)
        made.append((x, torch.tanh(x @ w) + noise))
    return made


def images(
    count: int = 25, size: int = 16, classes: int = 4, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Noise with a bright quadrant that tells the class."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        y = torch.randint(classes, (size,), generator=generator)
        x = torch.randn(size, 1, 8, 8, generator=generator)
        for row, label in enumerate(y.tolist()):
            top, left = 4 * (label // 2), 4 * (label % 2)
            x[row, 0, top : top + 4, left : left + 4] += 1.5
        made.append((x, y))
    return made


def texts(
    count: int = 25, size: int = 8, length: int = 16, vocabulary: int = 32, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Tokens that count upwards from a random start, now and then interrupted; the next token."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        start = torch.randint(vocabulary, (size, 1), generator=generator)
        row = (start + torch.arange(length + 1)) % vocabulary
        noise = torch.rand(size, length + 1, generator=generator) < 0.1
        other = torch.randint(vocabulary, (size, length + 1), generator=generator)
        row = torch.where(noise, other, row)
        made.append((row[:, :-1].contiguous(), row[:, 1:].contiguous()))
    return made


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def adam(model: nn.Module, lr: float = 1e-3, **options: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)  # type: ignore[arg-type]


def sgd(model: nn.Module, lr: float = 0.05, **options: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)  # type: ignore[arg-type]


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for index, (fan_in, fan_out) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(fan_in, fan_out))
        if index < len(widths) - 2:
            layers.append(act())
    return nn.Sequential(*layers)


class Attention(nn.Module):
    """Causal self-attention: by SDPA, or written out with -inf masks."""

    def __init__(self, width: int, heads: int, fused: bool = True, scale: float = 1.0) -> None:
        super().__init__()
        self.heads, self.fused, self.scale = heads, fused, scale
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        q, k, v = (
            each.view(b, s, self.heads, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)
        )
        q = q * self.scale
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            hidden = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
            y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, s, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, fused: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, fused)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """A small decoder."""

    def __init__(
        self,
        vocabulary: int = 32,
        width: int = 32,
        depth: int = 2,
        heads: int = 4,
        fused: bool = True,
        tied: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(64, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads, fused, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """Convolutions with batch norms (and a bias before them, as people write it)."""

    def __init__(self, classes: int = 4, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class MixtureOfExperts(nn.Module):
    """A router with top-1 choice over small experts."""

    def __init__(self, width: int = 16, experts: int = 4, top: int = 1) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(mlp(width, 2 * width, width) for _ in range(experts))
        self.top = top

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                y = y.index_add(0, rows, weights[rows, place, None] * expert(x[rows]))
        return x + y
