"""Healthy setups whose rates, sizes, modes, layout or loop look like a fault and are none."""

# ruff: noqa: E501  (one case, one line)

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from benchmarks._cases import (
    BLOBS,
    CE,
    MSE,
    Case,
    ConvNet,
    Healthy,
    LanguageModel,
    images,
    mlp,
    texts,
    token_loss,
)
from benchmarks._faults_loss import adam, sequences
from benchmarks._faults_setup import Batch, train

# -- learning rates ------------------------------------------------------------------------------


def layer_wise_decay() -> Case:
    model = LanguageModel(depth=4)
    first = [*model.tokens.parameters(), *model.positions.parameters()]
    last = [*model.norm.parameters(), *model.head.parameters()]
    groups = [{"params": first, "lr": 1e-3 * 0.65**5}, {"params": last, "lr": 1e-3}]
    for number, block in enumerate(model.blocks):
        groups.append({"params": list(block.parameters()), "lr": 1e-3 * 0.65 ** (4 - number)})
    return Case(model, texts(50), token_loss, torch.optim.AdamW(groups))


def rates_by_width() -> Case:
    model = LanguageModel(width=64, depth=1)
    matrices, others = [], []
    for name, each in model.named_parameters():
        (matrices if "blocks" in name and each.ndim == 2 else others).append(each)
    groups = [{"params": matrices, "lr": 1e-2 / 16}, {"params": others, "lr": 1e-2}]
    return Case(model, texts(50), token_loss, torch.optim.Adam(groups))


def slow_body_fast_head() -> Case:
    model = mlp(16, 64, 64, 4)
    groups = [
        {"params": model[:4].parameters(), "lr": 1e-6},
        {"params": model[4:].parameters(), "lr": 1e-2},
    ]
    return Case(model, BLOBS.batches(50), CE, torch.optim.Adam(groups))


def scheduled(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]) -> Case:
    model = mlp(16, 64, 4)
    schedules: list[lr_scheduler.LRScheduler] = []

    def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
        if not schedules:
            schedules.append(make(optimizer))
        loss = train(model, batch, optimizer)
        schedules[0].step()
        return loss

    return Case(model, BLOBS.batches(50), None, adam(model, 3e-3), step)


def cosine_to_zero() -> Case:
    return scheduled(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 200))


def one_cycle() -> Case:
    return scheduled(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=201))


def drops_by_ten() -> Case:
    return scheduled(lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [80, 120, 160], 0.1))


# -- sizes ---------------------------------------------------------------------------------------


def pixels_from_0_to_1() -> Case:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    return Case(model, [(x.sigmoid(), y) for x, y in images(50)], CE, adam(model))


def faint_inputs() -> Case:
    model = mlp(16, 64, 64, 4)
    return Case(model, [(0.02 * x, y) for x, y in BLOBS.batches(50)], CE, adam(model, 3e-3))


def faint_inputs_and_norms() -> Case:
    model = ConvNet()
    return Case(model, [(1e-3 * x, y) for x, y in images(50)], CE, adam(model))


def branches_scaled_down() -> Case:
    model = LanguageModel(depth=4)
    for name, each in model.named_parameters():
        ends = name.endswith(("proj.weight", "mlp.2.weight"))
        if each.ndim == 2:
            nn.init.normal_(each, std=0.02 / (8**0.5 if ends else 1))
        elif name.endswith("bias"):
            nn.init.zeros_(each)
    return Case(model, texts(50), token_loss, adam(model, 3e-3))


def nine_layers_by_default() -> Case:
    model = mlp(16, *[64] * 8, 4)
    return Case(model, BLOBS.batches(50), CE, adam(model))


class Scaled(nn.Module):
    """A branch that starts at a millionth."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(32), mlp(32, 64, 32)
        self.scale = nn.Parameter(torch.full((32,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.body(self.norm(x))


def branches_of_a_millionth() -> Case:
    model = nn.Sequential(nn.Linear(16, 32), *[Scaled() for _ in range(6)], nn.Linear(32, 4))
    return Case(model, BLOBS.batches(50), CE, adam(model))


# -- modes and norms -----------------------------------------------------------------------------


def norms_frozen_with_statistics() -> Case:
    model = ConvNet()
    for norm in (model.bn1, model.bn2):
        norm.running_mean.normal_()  # type: ignore[union-attr]
        norm.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
        norm.eval().requires_grad_(False)
    return Case(model, images(50), CE, adam(model, 3e-3))


def evaluated_now_and_then() -> Case:
    model = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4)
    )
    count = 0

    def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
        nonlocal count
        count += 1
        loss = train(model, batch, optimizer)
        if count % 5 == 0:
            model.eval()
            with torch.no_grad():
                model(batch[0])
            model.train()
        return loss

    return Case(model, BLOBS.batches(50), None, adam(model), step)


def norm_of_eight() -> Case:
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    return Case(model, BLOBS.batches(50, 8), CE, adam(model))


def instance_norm() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    )
    return Case(model, images(50, 1), CE, adam(model))


# -- the loop and the layout ---------------------------------------------------------------------


def every_fourth_step() -> Case:
    model = mlp(16, 64, 4)
    count = 0

    def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
        nonlocal count
        count += 1
        loss = F.cross_entropy(model(batch[0]), batch[1])
        (loss / 4).backward()
        if count % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Case(model, BLOBS.batches(50), None, None, step)


class TimeFirst(nn.Module):
    """A recurrent net over (time, batch, features), with an output at each time."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def time_first() -> Case:
    model = TimeFirst()
    made = [torch.randn(10, 16, 8) for _ in range(50)]
    return Case(model, [(x, x[..., :1].cumsum(0) / 4) for x in made], MSE, adam(model, 3e-3))


class Graph(nn.Module):
    """Nodes that add up what their neighbours say."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.b(h.index_add(0, edges[1], h[edges[0]]))


def graph() -> Case:
    model, batches = Graph(), []
    for x, y in BLOBS.batches(50, 60):
        batches.append(((x, torch.randint(60, (2, 90))), y))
    return Case(model, batches, CE, adam(model))


def narrow_waist() -> Case:
    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8, bias=False), nn.Linear(8, 64), nn.GELU(),
        nn.Linear(64, 4),
    )  # fmt: skip
    return Case(model, BLOBS.batches(50), CE, adam(model))


def last_state() -> Case:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    model = Last()
    return Case(model, sequences(50), CE, adam(model, 3e-3))


SETUP_HEALTHY = (
    Healthy("layer-wise decay of the rate", layer_wise_decay, "rates from 1e-4 to 1e-3"),
    Healthy("rates by width", rates_by_width, "two groups, 16 times apart"),
    Healthy("slow body, fast head", slow_body_fast_head, "two groups, 10,000 times apart"),
    Healthy("cosine to 0", cosine_to_zero, "a rate that ends at 0"),
    Healthy("one cycle", one_cycle, "a rate that ends at a 250,000th of its largest"),
    Healthy("drops by ten", drops_by_ten, "a rate that ends at a thousandth"),
    Healthy("pixels from 0 to 1", pixels_from_0_to_1, "inputs that are not centred"),
    Healthy("faint inputs", faint_inputs, "inputs with an rms of 0.04"),
    Healthy("faint inputs and norms", faint_inputs_and_norms, "inputs with an rms of 0.001"),
    Healthy("branches scaled down", branches_scaled_down, "small weights by 1/sqrt(2N), as in GPT-2"),
    Healthy("nine layers by default", nine_layers_by_default, "a signal that shrinks by 0.41 per layer"),
    Healthy("branches of a millionth", branches_of_a_millionth, "branches that hardly add anything"),
    Healthy("norms frozen with statistics", norms_frozen_with_statistics, "batch norms in evaluation mode"),
    Healthy("evaluated now and then", evaluated_now_and_then, "evaluation mode inside the loop"),
    Healthy("batch norm over eight", norm_of_eight, "small batches"),
    Healthy("instance norm", instance_norm, "statistics of one sample"),
    Healthy("a step in four", every_fourth_step, "steps without an update; losses divided by 4"),
    Healthy("time first", time_first, "an output that depends on earlier rows"),
    Healthy("graph", graph, "nodes that depend on each other"),
    Healthy("narrow waist", narrow_waist, "two linear layers in a row"),
    Healthy("last state", last_state, "a recurrent net with batch_first"),
)  # fmt: skip
