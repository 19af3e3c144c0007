"""Planted faults of the setup: rates of groups, schedules, modes, norms, sizes, the loop."""

# ruff: noqa: E501  (one fault, one line)

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._cases import (
    BLOBS,
    CE,
    Case,
    ConvNet,
    Fault,
    LanguageModel,
    adam,
    images,
    mlp,
    texts,
    token_loss,
)
from benchmarks._faults_loss import sequences

Batch = tuple[Tensor, Tensor]


def train(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
    """A step as it should be."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


# -- learning rates ------------------------------------------------------------------------------


def one_group_too_fast() -> Case:
    model = LanguageModel()
    rest = [each for name, each in model.named_parameters() if not name.startswith("head")]
    groups = [{"params": rest, "lr": 1e-3}, {"params": model.head.parameters(), "lr": 1.0}]
    return Case(model, texts(), token_loss, torch.optim.AdamW(groups))


def one_group_replaced() -> Case:
    model = mlp(16, 64, 64, 64, 4)
    groups = [
        {"params": model[0].parameters(), "lr": 100.0},
        {"params": model[2:].parameters(), "lr": 0.05},
    ]
    return Case(model, BLOBS.batches(), CE, torch.optim.SGD(groups))


def one_group_too_slow() -> Case:
    model = mlp(16, 64, 64, 64, 4)
    groups = [
        {"params": model[:4].parameters(), "lr": 1e-10},
        {"params": model[4:].parameters(), "lr": 1e-3},
    ]
    return Case(model, BLOBS.batches(), CE, torch.optim.Adam(groups))


def one_group_at_zero() -> Case:
    model = mlp(16, 64, 64, 64, 4)
    groups = [
        {"params": model[:4].parameters(), "lr": 0.0},
        {"params": model[4:].parameters(), "lr": 1e-3},
    ]
    return Case(model, BLOBS.batches(), CE, torch.optim.Adam(groups))


def schedule_per_batch() -> Case:
    model = mlp(16, 64, 4)
    schedules: list[torch.optim.lr_scheduler.LRScheduler] = []

    def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
        if not schedules:
            schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1))
        loss = train(model, batch, optimizer)
        schedules[0].step()
        return loss

    return Case(model, BLOBS.batches(), None, None, step)


def momentum_of_one() -> Case:
    model = mlp(16, 64, 4)
    return Case(model, BLOBS.batches(), CE, torch.optim.SGD(model.parameters(), 0.05, momentum=1.0))


# -- sizes ---------------------------------------------------------------------------------------


def inputs_divided_twice() -> Case:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    return Case(model, [(x.sigmoid() / 255**2, y) for x, y in images()], CE)


def inputs_of_zero() -> Case:
    model = mlp(16, 64, 4)
    return Case(model, [(torch.zeros_like(x), y) for x, y in BLOBS.batches()], CE, adam(model))


def small_weights(std: float, depth: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """A plain net whose weights are too small to keep a signal alive."""
    model = mlp(16, *[64] * depth, 4, act=act)
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=std)  # type: ignore[arg-type]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return model


def signal_lost_behind_relu() -> Case:
    return Case(small_weights(0.01, 10), BLOBS.batches(), CE)


def signal_lost_behind_tanh() -> Case:
    return Case(small_weights(0.03, 12, nn.Tanh), BLOBS.batches(), CE)


def default_init_twenty_deep() -> Case:
    model = mlp(16, *[64] * 20, 4)
    for layer in model[::2]:
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return Case(model, BLOBS.batches(), CE)


def clipped_to_nothing() -> Case:
    model = mlp(16, 64, 4)

    def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-5)
        optimizer.step()
        return loss

    return Case(model, BLOBS.batches(), None, None, step)


# -- modes and norms -----------------------------------------------------------------------------


def never_back_in_training() -> Case:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4))
    count = 0

    def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
        nonlocal count
        count += 1
        if count == 11:
            model.eval()  # for an evaluation that is over
        return train(model, batch, optimizer)

    return Case(model, BLOBS.batches(), None, adam(model), step)


def batches_of_one_image() -> Case:
    model = ConvNet()
    return Case(model, images(25, 1), CE, adam(model))


def norm(**options: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64, **options), nn.ReLU(), nn.Linear(64, 4)  # type: ignore[arg-type]
    )  # fmt: skip


def batches_of_two() -> Case:
    model = norm()
    return Case(model, BLOBS.batches(25, 2), CE, adam(model))


def statistics_never_kept() -> Case:
    model = norm(momentum=0.0)
    return Case(model, BLOBS.batches(), CE, adam(model))


def statistics_of_the_last_batch() -> Case:
    model = norm(momentum=0.99)
    return Case(model, BLOBS.batches(), CE, adam(model))


def frozen_before_it_learnt() -> Case:
    model = ConvNet()
    model.bn1.eval()
    model.bn2.eval()
    return Case(model, images(), CE, adam(model))


# -- the loop and the layout ---------------------------------------------------------------------


def stepped_too_early() -> Case:
    model = mlp(16, 64, 4)

    def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.step()
        loss.backward()
        return loss

    return Case(model, BLOBS.batches(), None, adam(model), step)


def weights_loaded_again() -> Case:
    model = mlp(16, 64, 4)
    kept: dict[str, Tensor] = {}

    def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
        if not kept:
            kept.update({name: each.clone() for name, each in model.state_dict().items()})
        model.load_state_dict(kept)
        return train(model, batch, optimizer)

    return Case(model, BLOBS.batches(), None, None, step)


def one_of_two_optimizers() -> Case:
    model = mlp(16, 32, 4)
    both = [torch.optim.Adam(model[place].parameters()) for place in (0, 2)]

    def step(model: nn.Module, batch: Batch, both: list[torch.optim.Optimizer]) -> Tensor:
        both[0].zero_grad()
        return train(model, batch, both[1])

    return Case(model, BLOBS.batches(), None, both, step)


class Sequence(nn.Module):
    """A recurrent net that takes (time, batch, features) and gets (batch, time, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def batch_taken_for_time() -> Case:
    model = Sequence()
    return Case(model, sequences(), CE, adam(model, 3e-3))


class Scrambled(nn.Module):
    """A view where a transpose was meant."""

    def __init__(self, mean: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.mean = nn.Linear(8, 32), nn.Linear(32, 4), mean

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.mean(torch.relu(self.a(x))))


def view_for_transpose() -> Case:
    model = Scrambled(lambda h: h.view(10, 16, 32).mean(0))
    return Case(model, sequences(), CE, adam(model))


def no_activation() -> Case:
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4))
    return Case(model, BLOBS.batches(), CE, adam(model))


SETUP_FAULTS = (
    Fault("learning rate of one group too high", one_group_too_fast, "learning_rate_too_high", ("head",), "optimizer", 0, "optimizer"),
    Fault("weights of one group replaced", one_group_replaced, "learning_rate_too_high", ("0",), "optimizer", 0, "optimizer"),
    Fault("learning rate of one group too low", one_group_too_slow, "learning_rate_too_low", ("0",), "optimizer", 0, "optimizer"),
    Fault("learning rate of one group 0", one_group_at_zero, "learning_rate_zero", ("0",), "optimizer", 0, "optimizer"),
    Fault("a schedule stepped per batch", schedule_per_batch, "learning_rate_too_low", (), "optimizer", 4, "optimizer"),
    Fault("momentum of 1", momentum_of_one, "momentum_too_high", (), "optimizer", None, "optimizer"),
    Fault("inputs scaled down twice", inputs_divided_twice, "unscaled_inputs", ("0",), "data", 0, "data"),
    Fault("inputs of 0", inputs_of_zero, "unscaled_inputs", ("0",), "data", 0, "data"),
    Fault("weights too small behind ReLU", signal_lost_behind_relu, "signal_shrinks", ("20",), "forward", 0, "init"),
    Fault("weights too small behind tanh", signal_lost_behind_tanh, "signal_shrinks", ("24",), "forward", 0, "init"),
    Fault("default initialisation, 20 layers deep", default_init_twenty_deep, "signal_shrinks", ("40",), "forward", 0, "init"),
    Fault("clipping at next to nothing", clipped_to_nothing, "clipping_too_strong", (), "backward", 0, "optimizer"),
    Fault("never back in training mode", never_back_in_training, "evaluation_mode", ("2",), "forward", 10, "wiring"),
    Fault("batch norm over one image", batches_of_one_image, "batch_norm_of_few", ("bn1",), "forward", 0, "data"),
    Fault("batch norm over two numbers", batches_of_two, "batch_norm_of_few", ("1",), "forward", 0, "data"),
    Fault("batch norm without memory", statistics_never_kept, "batch_norm_statistics", ("1",), "forward", 0, "wiring"),
    Fault("batch norm that remembers one batch", statistics_of_the_last_batch, "batch_norm_statistics", ("1",), "forward", 0, "wiring"),
    Fault("batch norm frozen before it learnt", frozen_before_it_learnt, "batch_norm_statistics", ("bn1",), "forward", 0, "wiring"),
    Fault("optimizer.step before backward", stepped_too_early, "step_before_backward", (), "optimizer", 0, "wiring"),
    Fault("weights loaded again at each step", weights_loaded_again, "updates_undone", (), "optimizer", 0, "optimizer"),
    Fault("one of two optimizers forgotten", one_of_two_optimizers, "optimizer_never_steps", ("0",), "optimizer", 0, "optimizer"),
    Fault("batch_first forgotten", batch_taken_for_time, "samples_mixed", ("rnn",), "forward", 0, "wiring"),
    Fault("view in place of transpose", view_for_transpose, "samples_mixed", (), "forward", 0, "wiring"),
    Fault("no activation", no_activation, "missing_nonlinearity", ("1",), "forward", None, "init"),
)  # fmt: skip
