"""Planted faults of the loss: what it reads, over which axis, and what it is compared with."""

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
    adam,
    images,
    mlp,
    texts,
    token_loss,
)


def softened(count: int = 25) -> list[tuple[Tensor, Tensor]]:
    """Blobs with a distribution for the target of each sample."""
    return [(x, 0.9 * F.one_hot(y, 4).float() + 0.025) for x, y in BLOBS.batches(count)]


def divergence_of_probabilities() -> Case:
    model = nn.Sequential(*mlp(16, 32, 4), nn.Softmax(-1))
    return Case(model, softened(), nn.KLDivLoss(reduction="batchmean"))


def divergence_of_logits() -> Case:
    return Case(mlp(16, 32, 4), softened(), nn.KLDivLoss(reduction="batchmean"))


def divergence_from_probabilities_as_logs() -> Case:
    loss = nn.KLDivLoss(reduction="batchmean", log_target=True)
    return Case(mlp(16, 32, 4), softened(), lambda out, y: loss(out.log_softmax(-1), y))


def softmax_over_batch() -> Case:
    model = nn.Sequential(*mlp(16, 32, 4), nn.LogSoftmax(0))
    return Case(model, BLOBS.batches(), nn.NLLLoss())


def softmax_over_time() -> Case:
    model = LanguageModel()

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(logits.log_softmax(1).flatten(0, 1), y.flatten())

    return Case(model, texts(), loss, adam(model))


def softmax_over_columns() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.LogSoftmax(-1)
    )
    batches = [(x, (x[:, 0] > 0.5).long()) for x, _ in images()]
    return Case(model, batches, nn.NLLLoss(), adam(model, 3e-3))


class Scored(nn.Module):
    """Attention over a sequence, whose weights are taken over some axis, and a classifier."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 32) for _ in range(3))
        self.head, self.axis = nn.Linear(32, 4), axis

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            each(x).view(b, s, 4, 8).transpose(1, 2) for each in (self.q, self.k, self.v)
        )  # fmt: skip
        weights = (q @ k.transpose(-1, -2) / 8**0.5).softmax(self.axis)
        return self.head((weights @ v).transpose(1, 2).flatten(2).mean(1))


def sequences(count: int = 25) -> list[tuple[Tensor, Tensor]]:
    """Noise around a level that tells the class."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        y = torch.randint(4, (16,), generator=generator)
        x = torch.randn(16, 10, 8, generator=generator) + y[:, None, None] - 1.5
        made.append((x, y))
    return made


def softmax_over_queries() -> Case:
    model = Scored(-2)
    return Case(model, sequences(), CE, adam(model))


def softmax_over_heads() -> Case:
    model = Scored(1)
    return Case(model, sequences(), CE, adam(model))


def targets_not_shifted() -> Case:
    model = LanguageModel()
    return Case(model, [(x, x) for x, _ in texts()], token_loss, adam(model))


class Bidirectional(nn.Module):
    """A language model that forgot its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def no_causal_mask() -> Case:
    model = Bidirectional()
    return Case(model, texts(), token_loss, adam(model))


def sigmoid_before_cross_entropy() -> Case:
    model = nn.Sequential(*mlp(16, 32, 4), nn.Sigmoid())
    return Case(model, BLOBS.batches(), CE, adam(model))


def one_label_only() -> Case:
    model = mlp(16, 64, 4)
    return Case(model, [(x, torch.full_like(y, 2)) for x, y in BLOBS.batches()], CE, adam(model))


def shuffled_apart() -> Case:
    """Inputs and targets from two loaders, each of which shuffles on its own."""
    x, y = (torch.cat(each) for each in zip(*BLOBS.batches(4), strict=True))
    batches = []
    for _ in range(7):
        rows, others = (torch.randperm(len(y)).split(32) for _ in "xy")
        batches += [(x[one], y[other]) for one, other in zip(rows, others, strict=True)]
    model = mlp(16, 64, 4)
    return Case(model, batches, CE, adam(model))


def mean_of_a_mean() -> Case:
    model = mlp(16, 64, 4)
    return Case(model, BLOBS.batches(), lambda out, y: F.cross_entropy(out, y) / len(y))


def accumulated_and_divided_twice() -> Case:
    model = mlp(16, 64, 4)

    def step(
        model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in zip(batch[0].split(8), batch[1].split(8), strict=True):
            loss = F.cross_entropy(model(x), y) / 4
            (loss / 4).backward()
            total += loss.detach()
        optimizer.step()
        return total

    return Case(model, BLOBS.batches(), None, None, step)


def temperature_of_ten_thousand() -> Case:
    model = mlp(16, 64, 4)
    return Case(model, BLOBS.batches(), lambda out, y: F.cross_entropy(out / 1e4, y), adam(model))


def error_maximised() -> Case:
    model = mlp(16, 64, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, maximize=True)
    return Case(model, BLOBS.batches(), CE, optimizer)


LOSS_FAULTS = (
    Fault("KL divergence of probabilities", divergence_of_probabilities, "probabilities_as_log_probabilities", (), "loss", 0, "wiring"),
    Fault("KL divergence of logits", divergence_of_logits, "logits_as_log_probabilities", (), "loss", 0, "wiring"),
    Fault("log_target=True with probabilities", divergence_from_probabilities_as_logs, "probabilities_as_log_probabilities", (), "loss", 0, "wiring"),
    Fault("log_softmax over the batch", softmax_over_batch, "softmax_dimension", ("3",), "forward", 0, "wiring"),
    Fault("log_softmax over time", softmax_over_time, "softmax_dimension", ("head",), "loss", 0, "wiring"),
    Fault("log_softmax over columns", softmax_over_columns, "softmax_dimension", ("3",), "forward", 0, "wiring"),
    Fault("attention over queries", softmax_over_queries, "softmax_dimension", (), "forward", 0, "wiring"),
    Fault("attention over heads", softmax_over_heads, "softmax_dimension", (), "forward", 0, "wiring"),
    Fault("targets not shifted", targets_not_shifted, "targets_not_shifted", (), "loss", 0, "wiring"),
    Fault("no causal mask", no_causal_mask, "missing_causal_mask", ("attention",), "forward", 0, "wiring"),
    Fault("sigmoid before the cross entropy", sigmoid_before_cross_entropy, "activation_before_loss", ("2",), "loss", 0, "wiring"),
    Fault("one label only", one_label_only, "constant_targets", (), "data", 0, "data"),
    Fault("inputs and targets shuffled apart", shuffled_apart, "contradictory_labels", (), "data", 0, "data"),
    Fault("a mean divided by the batch size", mean_of_a_mean, "loss_divided_again", (), "loss", 0, "wiring"),
    Fault("accumulation divided twice", accumulated_and_divided_twice, "loss_divided_again", (), "loss", 0, "wiring"),
    Fault("logits divided by ten thousand", temperature_of_ten_thousand, "logits_too_small", ("2",), "loss", 0, "wiring"),
    Fault("an error maximised", error_maximised, "inverted_loss", (), "loss", 0, "wiring"),
)  # fmt: skip
