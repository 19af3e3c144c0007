"""Healthy setups whose loss, softmaxes or targets look like a fault and are none."""

# ruff: noqa: E501  (one case, one line)

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._cases import (
    BLOBS,
    CE,
    Case,
    Healthy,
    LanguageModel,
    images,
    mlp,
    texts,
    token_loss,
)
from benchmarks._faults_loss import adam, sequences, softened


def divergence_in_logs() -> Case:
    loss = nn.KLDivLoss(reduction="batchmean", log_target=True)
    batches = [(x, y.log()) for x, y in softened(50)]
    return Case(mlp(16, 32, 4), batches, lambda out, y: loss(out.log_softmax(-1), y))


def distillation() -> Case:
    teacher = mlp(16, 32, 4)
    batches = [(x, teacher(x).detach()) for x, _ in BLOBS.batches(50)]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return 16 * F.kl_div((out / 4).log_softmax(-1), (y / 4).softmax(-1), reduction="batchmean")

    return Case(mlp(16, 32, 4), batches, loss)


class Sparse(nn.Module):
    """An autoencoder whose units are to be on for a tenth of the samples each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        units = self.encoder(x).sigmoid()
        rate = units.mean(0, keepdim=True)
        apart = F.kl_div(rate.log(), torch.full_like(rate, 0.1), reduction="sum")
        return F.mse_loss(self.decoder(units), x) + 0.01 * apart


def divergence_of_rates() -> Case:
    model = Sparse()
    return Case(model, [x for x, _ in BLOBS.batches(50)], None, adam(model, 3e-3))


def segmentation() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.LogSoftmax(1)
    )
    batches = [(x, (x[:, 0] > 0.5).long()) for x, _ in images(50)]
    return Case(model, batches, nn.NLLLoss(), adam(model, 3e-3))


class KeysFirst(nn.Module):
    """Causal attention whose scores are (keys, queries), so that the softmax is over axis -2."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        b, s, _ = x.shape
        q, k, v = (
            each(x).view(b, s, 4, 8).transpose(1, 2) for each in (self.q, self.k, self.v)
        )  # fmt: skip
        scores = k @ q.transpose(-1, -2) / 8**0.5
        later = torch.ones(s, s, dtype=torch.bool).tril(-1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-2)
        return self.head((weights.transpose(-1, -2) @ v).transpose(1, 2).flatten(2))


def keys_first() -> Case:
    model = KeysFirst()
    return Case(model, texts(50), token_loss, adam(model, 3e-3))


class Slots(nn.Module):
    """Inputs that choose among slots: a softmax over queries, normalised over inputs after it."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(3, 16))
        self.k, self.v, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (self.slots @ self.k(x).transpose(-1, -2) / 4).softmax(1)
        shares = chosen / chosen.sum(-1, keepdim=True)
        return self.head((shares @ self.v(x)).flatten(1))


def slots() -> Case:
    model = Slots()
    return Case(model, sequences(50), CE, adam(model, 3e-3))


class Pooled(nn.Module):
    """A mean over time with weights, of a sequence that is (time, batch, features) inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.score, self.head = nn.Linear(8, 32), nn.Linear(32, 1), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc(x.transpose(0, 1)))
        return self.head((self.score(h).softmax(0) * h).sum(0))


def softmax_over_first_axis() -> Case:
    model = Pooled()
    return Case(model, sequences(50), CE, adam(model, 3e-3))


class Bag(Pooled):
    """One answer for a bag of instances, weighed against each other."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc(x))
        return self.head((self.score(h).softmax(0) * h).sum(0, keepdim=True))


def bag_of_instances() -> Case:
    model = Bag()
    batches = [
        (torch.randn(20, 8) + label, torch.tensor([label])) for label in (0, 1, 2, 3) * 12
    ]  # fmt: skip
    return Case(model, batches, CE, adam(model))


class Prototypes(nn.Module):
    """Two views that are to choose the same prototypes, spread evenly over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.prototypes = mlp(16, 32, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        one, other = (
            self.prototypes(F.normalize(self.encoder(x + 0.2 * torch.randn_like(x)), dim=-1))
            for _ in "ab"
        )
        with torch.no_grad():
            chosen = (one / 0.05).softmax(0)
            chosen = chosen / chosen.sum(1, keepdim=True)
        return -(chosen * (other / 0.1).log_softmax(1)).sum(1).mean()


def prototypes() -> Case:
    model = Prototypes()
    return Case(model, [x for x, _ in BLOBS.batches(50)], None, adam(model))


class Pair(nn.Module):
    """Two encoders that are to find each other's sample, both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = mlp(16, 64, 16), mlp(16, 64, 16)

    def forward(self, x: Tensor) -> Tensor:
        found = [F.normalize(each(x), dim=-1) for each in (self.one, self.other)]
        logits = found[0] @ found[1].T / 0.1
        places = torch.arange(len(x))
        return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2


def both_ways() -> Case:
    model = Pair()
    return Case(model, [x for x, _ in BLOBS.batches(50)], None, adam(model))


class Masked(nn.Module):
    """An encoder that sees everything and fills in hidden tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(33, 32), nn.Embedding(16, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 33)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(ids) + self.places.weight))


def masked_tokens() -> Case:
    model, batches = Masked(), []
    for ids, _ in texts(50):
        hidden = torch.rand(ids.shape) < 0.3
        batches.append((ids.masked_fill(hidden, 32), ids.masked_fill(~hidden, -100)))
    return Case(model, batches, token_loss, adam(model, 3e-3))


def shifted_in_the_loss() -> Case:
    model = LanguageModel(depth=1)

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return Case(model, [(x, x) for x, _ in texts(50)], loss, adam(model, 3e-3))


class Cosine(nn.Module):
    """Logits between -10 and 10: ten times a cosine."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes = mlp(16, 64, 16), nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        return 10 * F.normalize(self.body(x), dim=-1) @ F.normalize(self.classes, dim=-1).T


def cosine_logits() -> Case:
    model = Cosine()
    return Case(model, BLOBS.batches(50), CE, adam(model))


def noisy_labels() -> Case:
    x, y = (torch.cat(each) for each in zip(*BLOBS.batches(4), strict=True))
    y = torch.where(torch.rand(len(y)) < 0.3, torch.randint(4, y.shape), y)
    epochs = [torch.randperm(len(y)).split(32) for _ in range(12)]
    batches = [(x[rows], y[rows]) for epoch in epochs for rows in epoch]
    model = mlp(16, 64, 4)
    return Case(model, batches, CE, adam(model))


def weighted_parts() -> Case:
    model = mlp(16, 64, 4)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) / 16 + 0.01 * out.square().mean()

    return Case(model, BLOBS.batches(50), loss, adam(model))


LOSS_HEALTHY = (
    Healthy("KL divergence in logs", divergence_in_logs, "targets below 0"),
    Healthy("distillation", distillation, "two softmaxes, a temperature, and a loss times 16"),
    Healthy("KL divergence of rates", divergence_of_rates, "logs whose exponentials do not sum to 1"),
    Healthy("segmentation", segmentation, "a softmax that is not over the last axis"),
    Healthy("scores with keys first", keys_first, "a softmax over axis -2, and a mask the other way round"),
    Healthy("slots", slots, "a softmax over queries, on purpose"),
    Healthy("time first inside", softmax_over_first_axis, "a softmax over axis 0"),
    Healthy("bag of instances", bag_of_instances, "a softmax over all that was given"),
    Healthy("prototypes", prototypes, "a softmax over the batch, for targets"),
    Healthy("contrast both ways", both_ways, "cross entropies over both axes of one matrix"),
    Healthy("masked tokens", masked_tokens, "attention without a mask; targets that are the inputs' own"),
    Healthy("targets shifted in the loss", shifted_in_the_loss, "targets that are the inputs"),
    Healthy("cosine logits", cosine_logits, "logits that cannot grow"),
    Healthy("noisy labels", noisy_labels, "a third of the labels is wrong"),
    Healthy("weighted parts", weighted_parts, "a mean divided by 16"),
)  # fmt: skip
