"""Planted faults of what comes out: constants, sums of 1, tables as heads, sizes, half precision."""

# ruff: noqa: E501  (one fault, one line)

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._cases import (
    BLOBS,
    CE,
    Case,
    Fault,
    LanguageModel,
    images,
    mlp,
    texts,
    token_loss,
)
from benchmarks._faults_loss import adam
from benchmarks._faults_setup import Batch, train

# -- constants -----------------------------------------------------------------------------------


def masks(count: int = 25) -> list[Batch]:
    """Images, and where they are bright."""
    return [(x, (F.avg_pool2d(x, 3, 1, 1) > 0.5).float()) for x, _ in images(count)]


def softmax_of_one_channel() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1), nn.Softmax(dim=1)
    )
    return Case(model, masks(), nn.BCELoss(), adam(model))


def cross_entropy_of_one_output() -> Case:
    model = mlp(16, 32, 1)
    batches = [(x, (y > 1).float()[:, None]) for x, y in BLOBS.batches()]
    return Case(model, batches, CE, adam(model))


def norm_of_one_channel() -> Case:
    model = nn.Sequential(nn.Linear(16, 64), nn.GroupNorm(64, 64), nn.ReLU(), nn.Linear(64, 4))
    return Case(model, BLOBS.batches(), CE, adam(model))


def several_labels(count: int = 25) -> list[Batch]:
    """Blobs with two or three of six tags each."""
    tags = torch.tensor(
        [[1, 1, 0, 0, 1, 0], [0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0], [1, 0, 0, 1, 0, 1.0]]
    )
    return [(x, tags[y]) for x, y in BLOBS.batches(count)]


def several_labels_by_softmax() -> Case:
    model = mlp(16, 64, 6)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(out.softmax(-1), y)

    return Case(model, several_labels(), loss, adam(model))


def overlap(p: Tensor, y: Tensor) -> Tensor:
    """Intersection over union: 1 where all is right."""
    both = (p * y).sum()
    return both / (p.sum() + y.sum() - both)


def overlap_minimised() -> Case:
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    return Case(model, masks(), lambda out, y: overlap(out.sigmoid(), y), adam(model))


# -- freezing and tying --------------------------------------------------------------------------


def frozen_with_its_head() -> Case:
    model = LanguageModel()
    model.head = nn.Linear(model.head.in_features, model.head.out_features)
    model.requires_grad_(False)
    return Case(model, texts(), token_loss, adam(model))


class Tied(nn.Module):
    """A recurrent language model whose output layer is its table of embeddings."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.tokens, self.rnn = nn.Embedding(32, 128), nn.GRU(128, 128, batch_first=True)
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 32, bias=False)
        nn.init.normal_(self.tokens.weight, std=size)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.rnn(self.tokens(ids))[0]))


def tied_to_a_large_table() -> Case:
    model = Tied(1.0)
    return Case(model, texts(), token_loss, adam(model))


# -- sizes ---------------------------------------------------------------------------------------


class Pixels(nn.Module):
    """A convolution of pixels as they come out of a file."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Conv2d(1, 8, 3), nn.Linear(288, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x.float() / self.scale)).flatten(1))


def bytes_of(count: int = 25) -> list[Batch]:
    """Images as whole numbers from 0 to 255."""
    return [((x.sigmoid() * 255).to(torch.uint8), y) for x, y in images(count)]


def bytes_as_they_are() -> Case:
    model = Pixels(1.0)
    return Case(model, bytes_of(), CE, adam(model))


class Dated(nn.Module):
    """Features and the number of a day, side by side."""

    def __init__(self, days: float) -> None:
        super().__init__()
        self.a, self.b, self.days = nn.Linear(17, 64), nn.Linear(64, 4), days

    def forward(self, x: Tensor, day: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(torch.cat([day[:, None] / self.days, x], 1))))


def dated(count: int = 25) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(x, torch.randint(3650, (len(x),)), y) for x, y in BLOBS.batches(count)]


def days_beside_features() -> Case:
    model = Dated(1.0)
    return Case(model, dated(), CE, adam(model))


class Rounds(nn.Module):
    """Many rounds of averaging over neighbours, until all of them are alike."""

    def __init__(self, count: int = 24) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.rounds:
            x = F.relu(each((x + x.roll(1, 0) + x.roll(-1, 0) + x.roll(5, 0)) / 4))
        return self.out(x)


def too_many_rounds() -> Case:
    model = Rounds()
    return Case(model, BLOBS.batches(), CE, adam(model))


# -- the optimizer -------------------------------------------------------------------------------


def half_with_small_epsilon() -> Case:
    model = mlp(16, 64, 4).half()
    batches = [(x.half(), y) for x, y in BLOBS.batches()]
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3, eps=1e-8)
    return Case(model, batches, lambda out, y: F.cross_entropy(out.float(), y), optimizer)


def faded_out() -> Case:
    model = mlp(16, 64, 64, 4)
    count = 0

    def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
        nonlocal count
        optimizer.param_groups[0]["lr"] = 0.1 * 0.1 ** (count / 3)
        count += 1
        return train(model, batch, optimizer)

    return Case(model, BLOBS.batches(40), None, None, step, steps=40)


OUTPUT_FAULTS = (
    Fault("softmax over one channel", softmax_of_one_channel, "representation_collapse", ("3",), "forward", 0, "wiring"),
    Fault("cross entropy of one output", cross_entropy_of_one_output, "representation_collapse", ("2",), "loss", 0, "wiring"),
    Fault("a norm over one number", norm_of_one_channel, "representation_collapse", ("1",), "forward", 0, "wiring"),
    Fault("several labels by softmax", several_labels_by_softmax, "unreachable_targets", ("2",), "loss", 0, "wiring"),
    Fault("an overlap minimised", overlap_minimised, "inverted_loss", (), "loss", 0, "wiring"),
    Fault("frozen with its new head", frozen_with_its_head, "frozen_layer", ("head",), "backward", None, "wiring"),
    Fault("head tied to a large table", tied_to_a_large_table, "initial_loss", ("head",), "loss", 0, "init"),
    Fault("pixels as whole numbers", bytes_as_they_are, "unscaled_inputs", ("a",), "data", 0, "data"),
    Fault("days beside features", days_beside_features, "unscaled_inputs", ("a",), "data", 0, "data"),
    Fault("too many rounds of averaging", too_many_rounds, "vanishing_gradients", ("rounds.0",), "backward", 0, "flow"),
    Fault("an epsilon that float16 does not have", half_with_small_epsilon, "nonfinite_update", ("0",), "optimizer", 0, "precision"),
    Fault("a learning rate that fades out", faded_out, "learning_rate_too_low", (), "optimizer", 11, "optimizer"),
)  # fmt: skip
