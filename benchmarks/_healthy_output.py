"""Healthy setups whose units, sums, tables or precision look like a fault and are none."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._cases import (
    BLOBS,
    CE,
    Case,
    Healthy,
    images,
    mlp,
    texts,
    token_loss,
)
from benchmarks._faults_loss import adam, softened
from benchmarks._faults_output import (
    Dated,
    Pixels,
    Tied,
    bytes_of,
    dated,
    masks,
    overlap,
    several_labels,
)


class Equilibrium(nn.Module):
    """One layer with tanh, applied again and again to what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.out = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        given = self.enter(x)
        state = torch.tanh(given)
        for _ in range(6):
            state = torch.tanh(given + self.again(state))
        return self.out(state)


def sure_of_it() -> Case:
    model = Equilibrium()
    return Case(model, BLOBS.batches(50), CE, adam(model, 5e-3))


def few_patterns() -> Case:
    generator = torch.Generator().manual_seed(3)
    patterns = (torch.rand(5, 80, generator=generator) < 0.08).float()
    encoder, decoder = mlp(80, 24, 3), mlp(3, 24, 80)
    model = nn.Sequential(*encoder, *decoder, nn.Sigmoid())
    rows = [torch.randint(5, (48,), generator=generator) for _ in range(50)]
    batches = []
    for each in rows:
        noise = torch.rand(len(each), 80, generator=generator) < 0.02
        x = (patterns[each] + noise).clamp(max=1)
        batches.append((x, x))
    return Case(model, batches, nn.BCELoss(), adam(model, 3e-3))


def margins_kept() -> Case:
    model = mlp(16, 32, 4)
    batches = [(2 * x, y) for x, y in BLOBS.batches(50)]
    return Case(model, batches, nn.MultiMarginLoss(margin=0.1), adam(model, 3e-3))


def a_group_for_each_channel() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    )
    return Case(model, images(50), CE, adam(model))


class Pooled(nn.Module):
    """Weights over the parts of a sample, of which there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.value = nn.Linear(16, 1), mlp(16, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = x[:, None]
        return (self.score(parts).softmax(1) * self.value(parts)).sum(1)


def one_part() -> Case:
    model = Pooled()
    return Case(model, BLOBS.batches(50), CE, adam(model))


def several_labels_by_sigmoid() -> Case:
    model = nn.Sequential(*mlp(16, 64, 6), nn.Sigmoid())
    return Case(model, several_labels(50), nn.BCELoss(), adam(model))


def squares_of_probabilities() -> Case:
    model = nn.Sequential(*mlp(16, 64, 4), nn.Softmax(-1))
    return Case(model, softened(50), nn.MSELoss(), adam(model))


def tied_to_a_small_table() -> Case:
    model = Tied(0.02)
    return Case(model, texts(50), token_loss, adam(model))


def bytes_scaled_inside() -> Case:
    model = Pixels(255.0)
    return Case(model, bytes_of(50), CE, adam(model))


def days_scaled_inside() -> Case:
    model = Dated(3650.0)
    return Case(model, dated(50), CE, adam(model))


def half_with_large_epsilon() -> Case:
    model = mlp(16, 64, 4).half()
    batches = [(x.half(), y) for x, y in BLOBS.batches(50)]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, eps=1e-4)
    return Case(model, batches, lambda out, y: F.cross_entropy(out.float(), y), optimizer)


def lack_of_overlap() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1), nn.Sigmoid()
    )
    return Case(model, masks(50), lambda out, y: 1 - overlap(out, y), adam(model))


OUTPUT_HEALTHY = (
    Healthy("lack of overlap", lack_of_overlap, "a loss from 0 to 1"),
    Healthy("sure of it", sure_of_it, "tanh at its ends because the task is solved"),
    Healthy("few patterns", few_patterns, "units that are off for all of five patterns"),
    Healthy("margins kept", margins_kept, "a loss of exactly 0, and updates that fade"),
    Healthy("a group for each channel", a_group_for_each_channel, "a norm of one channel"),
    Healthy("one part", one_part, "a softmax over a single number, inside"),
    Healthy("several labels by sigmoid", several_labels_by_sigmoid, "targets that sum to 2 or 3"),
    Healthy("squares of probabilities", squares_of_probabilities, "a softmax compared by squares"),
    Healthy("tied to a small table", tied_to_a_small_table, "a head that is a table"),
    Healthy("bytes scaled inside", bytes_scaled_inside, "inputs of 0 to 255"),
    Healthy("days scaled inside", days_scaled_inside, "whole numbers up to 3650"),
    Healthy("half with a large epsilon", half_with_large_epsilon, "weights and Adam in float16"),
)
