"""Healthy training setups, each with something about it that looks like a fault and is none.

`benchmarks diagnosis` and `tests/_diagnosis/test_diagnosis_suite.py` train every case of
`HEALTHY`, and any finding of them is a false alarm. A new case is a function that returns a `Case`
and an entry of that list, with the trap in words.
"""

# ruff: noqa: E501  (one case, one line)

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._cases import (
    BLOBS,
    CE,
    MSE,
    Case,
    ConvNet,
    Healthy,
    LanguageModel,
    MixtureOfExperts,
    adam,
    images,
    mlp,
    regression,
    texts,
    token_loss,
)
from benchmarks._healthy_loss import LOSS_HEALTHY
from benchmarks._healthy_output import OUTPUT_HEALTHY
from benchmarks._healthy_setup import SETUP_HEALTHY

STEPS = 200


def relu_mlp() -> Case:
    return Case(mlp(16, 64, 64, 4), BLOBS.batches(100), CE)


def conv_batch_norm() -> Case:
    model = ConvNet()
    return Case(model, images(50), CE, adam(model))


def causal_language_model() -> Case:
    model = LanguageModel(fused=False, depth=1)
    return Case(model, texts(50), token_loss, adam(model, 3e-3))


def tied_language_model() -> Case:
    model = LanguageModel(tied=True, dropout=0.1)
    return Case(model, texts(50), token_loss, adam(model, 3e-3))


class Lora(nn.Module):
    """A frozen Linear with a trainable product beside it that starts at 0."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def lora() -> Case:
    model = LanguageModel(width=64)
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = Lora(block.attention.qkv)
        block.mlp[0] = Lora(block.mlp[0])
    trained = [each for each in model.parameters() if each.requires_grad]
    return Case(model, texts(50), token_loss, torch.optim.AdamW(trained, 3e-3))


def bfloat16_autocast() -> Case:
    model = LanguageModel(depth=1)

    def step(
        model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = token_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return Case(model, texts(50), None, adam(model, 3e-3), step)


class Routed(nn.Module):
    """A mixture of experts with a classifier on top."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.moe, self.head = MixtureOfExperts(16, experts), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(x))


def idle_experts() -> Case:
    model = Routed(8)
    with torch.no_grad():
        model.moe.router.bias[5:] = -30.0
    return Case(model, BLOBS.batches(50), CE)


class ZeroInitResidual(nn.Module):
    """Residual branches that start at 0."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.up = nn.ModuleList(nn.Linear(32, 64) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(64, 32) for _ in range(depth))
        self.head = nn.Linear(32, 4)
        for each in self.down:
            nn.init.zeros_(each.weight)
            nn.init.zeros_(each.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return self.head(x)


def zero_init_residual() -> Case:
    model = ZeroInitResidual()
    return Case(model, BLOBS.batches(50), CE, adam(model))


def sparse_net() -> Case:
    model = mlp(16, 128, 128, 4)
    with torch.no_grad():
        model[0].bias.fill_(-1.0)
        model[2].bias.fill_(-0.2)
    return Case(model, BLOBS.batches(50), CE)


class Massive(nn.Module):
    """A language model in which one feature of the stream is a thousand times the others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = LanguageModel(depth=1)

    def forward(self, ids: Tensor) -> Tensor:
        inner = self.inner
        x = inner.tokens(ids) + inner.positions(torch.arange(ids.shape[1]))
        spike = torch.zeros(32)
        spike[3] = 100.0
        x = x + spike * (torch.arange(ids.shape[1]) == 0)[:, None]
        for block in inner.blocks:
            x = block(x)
        return inner.head(inner.norm(x))


def massive_activations() -> Case:
    model = Massive()
    return Case(model, texts(50), token_loss, adam(model))


def strong_dropout() -> Case:
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(64, 4),
    )  # fmt: skip
    return Case(model, BLOBS.batches(50), CE, adam(model, 3e-3))


class Adversarial(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(4, 32, 16), mlp(16, 32, 1)


def adversarial() -> Case:
    model = Adversarial()
    optimizers = [
        torch.optim.Adam(model.generator.parameters(), 1e-3),
        torch.optim.Adam(model.discriminator.parameters(), 1e-3),
    ]

    def step(
        model: Adversarial, batch: tuple[Tensor, Tensor], both: list[torch.optim.Optimizer]
    ) -> Tensor:
        real, judge = batch[0], F.binary_cross_entropy_with_logits
        noise = torch.randn(len(real), 4)
        fake = model.generator(noise)
        both[1].zero_grad()
        answers = model.discriminator(real), model.discriminator(fake.detach())
        loss = judge(answers[0], torch.ones(len(real), 1)) + judge(
            answers[1], torch.zeros(len(real), 1)
        )
        loss.backward()
        both[1].step()
        both[0].zero_grad()
        judge(model.discriminator(fake), torch.ones(len(real), 1)).backward()
        both[0].step()
        return loss

    return Case(model, BLOBS.batches(50), None, optimizers, step)


def frozen_backbone() -> Case:
    model = ConvNet()
    for part in (model.conv1, model.bn1, model.conv2, model.bn2):
        part.requires_grad_(False)
    return Case(model, images(50), CE)


def linear_probe() -> Case:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(16, 64, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.body(x)
            return self.head(h)

    model = Probe()
    return Case(model, BLOBS.batches(50), CE, torch.optim.SGD(model.head.parameters(), 0.05))


def warm_up() -> Case:
    model = LanguageModel(depth=1)
    optimizer = adam(model, 1e-8)
    count = 0

    def step(
        model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        nonlocal count
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, count / 100)  # 0 at the first step
        count += 1
        optimizer.zero_grad()
        loss = token_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return Case(model, texts(50), None, optimizer, step)


def accumulation_and_clipping() -> Case:
    model = LanguageModel(depth=1)

    def step(
        model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        total = torch.zeros(())
        for x, y in zip(batch[0].split(4), batch[1].split(4), strict=True):
            loss = token_loss(model(x), y) / 2
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return total

    return Case(model, texts(50), None, adam(model, 3e-3), step)


def tiny_dataset() -> Case:
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    y = torch.tensor([0, 1, 1, 0])
    model = mlp(2, 16, 2, act=nn.Tanh)
    return Case(model, [(x, y)], CE, torch.optim.Adam(model.parameters(), 1e-2))


def overfit_one_batch() -> Case:
    model = mlp(16, 64, 64, 4)
    return Case(model, BLOBS.batches(1), CE, adam(model, 1e-2))


class Recurrent(nn.Module):
    """An LSTM or RNN with a readout of the last state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.head = kind(4, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def _sequences(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        x = torch.randn(16, 15, 4, generator=generator)
        made.append((x, x[:, -5:, 0].sum(1, keepdim=True) / 5**0.5))
    return made


def lstm() -> Case:
    model = Recurrent(nn.LSTM)
    return Case(model, _sequences(50), MSE, adam(model, 3e-3))


def tanh_rnn() -> Case:
    model = Recurrent(nn.RNN)
    return Case(model, _sequences(50), MSE, adam(model, 3e-3))


def regression_net() -> Case:
    model = mlp(16, 64, 64, 1)
    return Case(model, regression(50), MSE, adam(model))


class TwoViews(nn.Module):
    """An encoder trained by contrast between two views."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(16, 64, 16)

    def forward(self, x: Tensor) -> Tensor:
        views = [F.normalize(self.encoder(x + 0.3 * torch.randn_like(x)), dim=-1) for _ in "ab"]
        logits = views[0] @ views[1].T / 0.1
        return F.cross_entropy(logits, torch.arange(len(x)))


def contrastive() -> Case:
    model = TwoViews()
    return Case(model, [x for x, _ in BLOBS.batches(50)], None, adam(model))


def one_class() -> Case:
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
    centre = torch.full((8,), 0.5)
    batches = [x for x, _ in BLOBS.batches(50)]
    return Case(
        model, batches, lambda out: (out - centre).square().sum(-1).mean(), adam(model, 1e-3)
    )


def autoencoder() -> Case:
    model = mlp(16, 32, 4, 32, 16)
    return Case(model, [(x, x) for x, _ in BLOBS.batches(50)], MSE, adam(model, 3e-3))


def weight_decay() -> Case:
    model = mlp(16, 64, 4)
    return Case(model, BLOBS.batches(50), CE, adam(model, 3e-3, weight_decay=0.1))


def encoder_of_clones() -> Case:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(32, 16, padding_idx=0)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 4)

        def forward(self, ids: Tensor) -> Tensor:
            hidden = ids == 0
            h = self.encoder(self.tokens(ids), src_key_padding_mask=hidden)
            return self.head((h * ~hidden[..., None]).sum(1) / (~hidden).sum(1, keepdim=True))

    made = []
    for _ in range(50):
        ids = torch.randint(1, 32, (16, 10))
        y = (ids[:, 0] % 4).clone()
        ends = torch.randint(3, 11, (16, 1))
        made.append((ids.masked_fill(torch.arange(10) >= ends, 0), y))
    model = Net()
    return Case(model, made, CE, adam(model))


def sigmoid_output() -> Case:
    model = nn.Sequential(*mlp(16, 32, 1), nn.Sigmoid())
    batches = [(x, (y > 1).float()[:, None]) for x, y in BLOBS.batches(50)]
    return Case(model, batches, nn.BCELoss(), adam(model, 1e-2))


def gated_unit() -> Case:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.gate, self.head = (
                nn.Linear(16, 32),
                nn.Linear(16, 32),
                nn.Linear(32, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.value(x) * torch.sigmoid(self.gate(x)))

    return Case(Gated(), BLOBS.batches(50), CE)


class TeacherStudent(nn.Module):
    """A student, and a teacher that is its running mean and never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(16, 32, 8), mlp(16, 32, 8)
        self.predictor = mlp(8, 16, 8)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = F.normalize(self.teacher(x + 0.1 * torch.randn_like(x)), dim=-1)
        found = self.predictor(self.student(x + 0.1 * torch.randn_like(x)))
        return 2 - 2 * (F.normalize(found, dim=-1) * target).sum(-1).mean()


def teacher_student() -> Case:
    model = TeacherStudent()
    trained = [*model.student.parameters(), *model.predictor.parameters()]
    return Case(model, [x for x, _ in BLOBS.batches(50)], None, torch.optim.AdamW(trained, 1e-3))


def group_norm_images() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, 2, 1),
        nn.GroupNorm(4, 16), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    return Case(model, images(50), CE, adam(model, 3e-3))


def deep_tanh() -> Case:
    model = mlp(16, *[32] * 5, 1, act=nn.Tanh)
    for layer in model[::2]:
        nn.init.xavier_normal_(layer.weight, 5 / 3)
    return Case(model, regression(50), MSE, adam(model))


def summed_loss() -> Case:
    model = mlp(16, 32, 4)
    return Case(
        model, BLOBS.batches(50), nn.CrossEntropyLoss(reduction="sum"),
        torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9),
    )  # fmt: skip


def stochastic_depth() -> Case:
    class Net(ZeroInitResidual):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for up, down in zip(self.up, self.down, strict=True):
                if float(torch.rand(())) < 0.8:
                    x = x + down(torch.relu(up(x)))
            return self.head(x)

    model = Net(4)
    for each in model.down:
        each.reset_parameters()
    return Case(model, BLOBS.batches(50), CE, adam(model))


def cosine_rate() -> Case:
    model = mlp(16, 64, 4)
    count = 0

    def step(
        model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        nonlocal count
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * min(count, 199) / 199)) / 2
        count += 1
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Case(model, BLOBS.batches(50), None, torch.optim.SGD(model.parameters(), 0.05), step)


# -- found by somebody who did not know the suite --------------------------------------------------


def gradient_penalty() -> Case:
    """An equation as the loss: du/dx = -u, with a leaf that each step makes for itself."""
    model = mlp(1, 32, 1, act=nn.Tanh)

    def step(model: nn.Module, batch: tuple[Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
        x = batch[0].clone().requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        loss = (slope + u).square().mean() + (model(torch.zeros(1, 1)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Case(model, [(torch.rand(64, 1),) for _ in range(50)], None, adam(model, 3e-3), step)


def rare_class() -> Case:
    model = mlp(8, 32, 1)
    batches = []
    for _ in range(STEPS):
        y = (torch.rand(16, 1) < 0.005).float()
        batches.append((torch.randn(16, 8) + 2 * y, y))
    return Case(model, batches, nn.BCEWithLogitsLoss(), adam(model, 2e-3))


def one_hot_states() -> Case:
    model = mlp(12, 32, 1, act=nn.Tanh)
    states = [torch.randint(12, (32,)) for _ in range(50)]
    return Case(
        model,
        [(F.one_hot(each, 12).float(), each[:, None] / 12) for each in states],
        MSE,
        adam(model, 3e-3),
    )


def warm_restart() -> Case:
    model = mlp(16, 64, 64, 4)
    rates: list[torch.optim.lr_scheduler.LRScheduler] = []

    def step(
        model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        if not rates:
            rates.append(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 50))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        rates[0].step()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Case(model, BLOBS.batches(100), None, optimizer, step)


class Padded(nn.Module):
    """Attention that leaves out padding, by the module that everybody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16, padding_idx=0)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x, pad = self.embed(ids), ids == 0
        x = x + self.attention(x, x, x, key_padding_mask=pad, need_weights=False)[0]
        return self.head(x.masked_fill(pad[..., None], 0).sum(1) / (~pad).sum(1, keepdim=True))


def key_padding_mask() -> Case:
    model, batches = Padded(), []
    for _ in range(50):
        y = torch.randint(4, (16,))
        ids = 4 * torch.randint(1, 8, (16, 10)) + y[:, None]
        ids[torch.arange(10)[None] >= torch.randint(3, 11, (16, 1))] = 0
        batches.append((ids, y))
    return Case(model, batches, CE, adam(model, 3e-3))


def mostly_zero_loss() -> Case:
    model = mlp(16, 32, 4)
    return Case(model, BLOBS.batches(100), nn.MultiMarginLoss(), adam(model, 3e-3))


def one_sample() -> Case:
    model = mlp(8, 32, 1, act=nn.Tanh)
    return Case(model, regression(STEPS, 1, 8), MSE, torch.optim.SGD(model.parameters(), 0.01))


def negative_loss() -> Case:
    model = mlp(16, 32, 2, act=nn.Tanh)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.gaussian_nll_loss(output[:, :1], 0.1 * y, F.softplus(output[:, 1:]) + 1e-4)

    return Case(model, regression(50), loss, adam(model, 3e-3))


HEALTHY = (
    Healthy("ReLU MLP", relu_mlp, "half of the activations are 0"),
    Healthy("conv net with batch norm", conv_batch_norm, "a bias before batch norm has no gradient"),
    Healthy("causal language model", causal_language_model, "-inf in attention masks"),
    Healthy("tied language model with dropout", tied_language_model, "one parameter in two layers"),
    Healthy("LoRA", lora, "most is frozen, and A has no gradient at first"),
    Healthy("bfloat16 autocast", bfloat16_autocast, "gradients in two dtypes"),
    Healthy("mixture of experts", idle_experts, "three of eight experts are idle"),
    Healthy("zero-init residual branches", zero_init_residual, "equal rows and no gradient at first"),
    Healthy("sparse net", sparse_net, "most activations are 0"),
    Healthy("massive activations", massive_activations, "one feature 1000 times the others"),
    Healthy("strong dropout", strong_dropout, "half of the activations set to 0"),
    Healthy("adversarial pair", adversarial, "two optimizers, a detached path, a loss that rises"),
    Healthy("frozen backbone", frozen_backbone, "frozen on purpose"),
    Healthy("linear probe", linear_probe, "a body under no_grad, not in the optimizer"),
    Healthy("warm-up", warm_up, "learning rate 0 at the first step"),
    Healthy("accumulation and clipping", accumulation_and_clipping, "gradients clipped at most steps"),
    Healthy("tiny dataset", tiny_dataset, "four samples, again and again"),
    Healthy("one batch again and again", overfit_one_batch, "loss and gradients go to 0"),
    Healthy("LSTM", lstm, "long products of gates"),
    Healthy("tanh RNN", tanh_rnn, "tanh at every step"),
    Healthy("regression", regression_net, "no classes"),
    Healthy("contrastive", contrastive, "no targets, a temperature of 0.1"),
    Healthy("one-class", one_class, "all samples are drawn to one point"),
    Healthy("autoencoder", autoencoder, "a narrow waist, target = input"),
    Healthy("weight decay", weight_decay, "weights shrink a little"),
    Healthy("encoder of cloned layers", encoder_of_clones, "layers start as copies; padding"),
    Healthy("sigmoid output", sigmoid_output, "outputs near 0 and 1"),
    Healthy("gated unit", gated_unit, "sigmoid gates"),
    Healthy("teacher and student", teacher_student, "a copy without gradients"),
    Healthy("group norm and SiLU", group_norm_images, "small activations"),
    Healthy("deep tanh net", deep_tanh, "five tanh layers"),
    Healthy("summed loss", summed_loss, "a loss 32 times as large, with momentum"),
    Healthy("stochastic depth", stochastic_depth, "layers that do not run at every step"),
    Healthy("cosine schedule", cosine_rate, "updates that go to 0"),
    Healthy("an equation as the loss", gradient_penalty, "the loss depends on a trainable tensor that nobody owns"),
    Healthy("a rare class", rare_class, "loss and gradient jump where it occurs; batches of one class"),
    Healthy("one-hot states", one_hot_states, "most samples equal another one"),
    Healthy("warm restarts", warm_restart, "the learning rate jumps and the loss with it"),
    Healthy("padded attention", key_padding_mask, "a mask of floats with -inf"),
    Healthy("a loss that is 0 at most steps", mostly_zero_loss, "gradients of 0, and sudden ones"),
    Healthy("batches of one sample", one_sample, "losses that scatter a hundredfold"),
    Healthy("negative loss", negative_loss, "a loss that passes 0"),
    *LOSS_HEALTHY,
    *SETUP_HEALTHY,
    *OUTPUT_HEALTHY,
)  # fmt: skip
