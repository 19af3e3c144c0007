"""Planted faults: training setups with one thing wrong, and what should be said about each.

`benchmarks diagnosis` and `tests/_diagnosis/test_diagnosis_suite.py` train every case of `FAULTS`.
A new fault is a function that returns a `Case` and an entry of that list. An expectation is what a
person would call the fault, written before the diagnosis is run; do not fit it to what is found.
"""

# ruff: noqa: E501  (one fault, one line)

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._cases import (
    BLOBS,
    CE,
    MSE,
    Attention,
    Blobs,
    Block,
    Case,
    ConvNet,
    Fault,
    LanguageModel,
    MixtureOfExperts,
    adam,
    images,
    mlp,
    regression,
    sgd,
    texts,
    token_loss,
)
from benchmarks._faults_loss import LOSS_FAULTS
from benchmarks._faults_output import OUTPUT_FAULTS
from benchmarks._faults_setup import SETUP_FAULTS

# -- numeric -------------------------------------------------------------------------------------


def log_of_zero() -> Case:
    model = mlp(16, 32, 4)
    with torch.no_grad():
        model[2].weight.mul_(300)  # probabilities underflow to 0
        model[2].weight.mul_(10)

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return -logits.softmax(-1).log().gather(1, y[:, None]).mean()

    return Case(model, BLOBS.batches(), loss)


class Distance(nn.Module):
    """A model whose output is a norm, which has no derivative at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 8)
        self.scale = nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc(x))
        return self.scale((h - h.detach()).square().sum(-1, keepdim=True).sqrt())


def root_of_zero() -> Case:
    return Case(Distance(), BLOBS.batches(), CE)


def learning_rate_high_sgd() -> Case:
    model = mlp(16, 32, 32, 1)
    return Case(model, regression(), MSE, sgd(model, 500.0))


def learning_rate_high_adam() -> Case:
    model = LanguageModel()
    return Case(model, texts(), token_loss, adam(model, 1.0))


class HalfAttention(nn.Module):
    """Attention whose scores are computed in float16, without the division."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k = self.q(x).half() * 300, self.k(x).half() * 300
        scores = q @ k.transpose(-1, -2)
        return self.head(scores.float().softmax(-1) @ self.v(x))


def half_overflow() -> Case:
    return Case(HalfAttention(), texts(), token_loss)


def nan_sample() -> Case:
    batches = BLOBS.batches()
    batches[7][0][3, 5] = float("nan")
    return Case(mlp(16, 32, 4), batches, CE)


def infinite_sample() -> Case:
    batches = regression()
    batches[4][1][2] = float("inf")
    return Case(mlp(16, 32, 1), batches, MSE)


def zero_epsilon() -> Case:
    model = mlp(16, 32, 4)
    with torch.no_grad():
        model[0].bias[:4] = -100.0  # no gradient: 0 / 0 without epsilon
    return Case(model, BLOBS.batches(), CE, torch.optim.Adam(model.parameters(), 1e-3, eps=0.0))


class Divides(nn.Module):
    """Divides by the spread of each sample, which may be 0."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)
        return self.fc2(torch.relu(self.fc1(x)))


def constant_sample() -> Case:
    batches = BLOBS.batches()
    batches[2][0][5] = 1.0
    return Case(Divides(), batches, CE)


# -- flow ----------------------------------------------------------------------------------------


class Growing(nn.Module):
    """A residual net without norms whose branches are as large as what they are added to."""

    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + 3 * torch.relu(block(x))
        return self.head(self.norm(x))


def residual_growth() -> Case:
    model = Growing()
    return Case(model, BLOBS.batches(), CE, adam(model, 1e-4))


def sigmoid_stack() -> Case:
    return Case(mlp(*[16] * 9, 4, act=nn.Sigmoid), BLOBS.batches(), CE)


def tanh_saturated() -> Case:
    model = mlp(16, 32, 32, 1, act=nn.Tanh)
    with torch.no_grad():
        model[2].weight.mul_(20)
    return Case(model, regression(), MSE, sgd(model, 0.01))


class FunctionalTanh(nn.Module):
    """tanh as a function, on inputs that are too large."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(8 * self.fc1(x)))


def functional_tanh_saturated() -> Case:
    return Case(FunctionalTanh(), regression(), MSE)


def recurrent_saturated() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.RNN(8, 16, batch_first=True), nn.Linear(16, 1)
            with torch.no_grad():
                self.rnn.weight_hh_l0.mul_(20)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    model = Net()
    batches = [(torch.randn(32, 12, 8), torch.randn(32, 1)) for _ in range(25)]
    return Case(model, batches, MSE, sgd(model, 1e-3))


def dead_by_bias() -> Case:
    model = mlp(16, 32, 32, 4)
    with torch.no_grad():
        model[2].bias.fill_(-50)
    return Case(model, BLOBS.batches(), CE)


class FunctionalRelu(nn.Module):
    """ReLU as a function; most of its units are off for good."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        with torch.no_grad():
            self.fc2.bias[:24] = -50

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def dead_functional() -> Case:
    return Case(FunctionalRelu(), BLOBS.batches(), CE)


def dead_channels() -> Case:
    model = ConvNet()
    with torch.no_grad():
        model.bn2.bias.fill_(-20)
    return Case(model, images(), CE)


def clipped_explosion() -> Case:
    model = mlp(16, 32, 1)

    def step(
        model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        optimizer.zero_grad()
        loss = 1e5 * F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return Case(model, regression(), None, sgd(model), step)


def attention_runs_away() -> Case:
    model = LanguageModel()
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[:64].mul_(60)
    return Case(model, texts(), token_loss, adam(model, 1e-4))


class Scaleless(nn.Module):
    """Attention written out, with a scale that is far too large."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 32)
        self.norm = nn.LayerNorm(32)
        self.attention = Attention(32, 4, fused=False, scale=2000.0)
        self.head = nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.head(x + self.attention(self.norm(x)))


def attention_without_scale() -> Case:
    model = Scaleless()
    return Case(model, texts(), token_loss, adam(model, 1e-5))


# -- wiring --------------------------------------------------------------------------------------


class Detached(nn.Module):
    """An encoder whose result is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.encoder(x)).detach())


def detached() -> Case:
    return Case(Detached(), BLOBS.batches(), CE)


class Ungraded(Detached):
    """An encoder that runs under no_grad although it is to be trained."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.encoder(x)
        return self.head(torch.relu(h))


def under_no_grad() -> Case:
    return Case(Ungraded(), BLOBS.batches(), CE)


def loss_without_graph() -> Case:
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return torch.tensor(float(F.cross_entropy(logits, y)))

    return Case(mlp(16, 32, 4), BLOBS.batches(), loss)


def frozen_by_mistake() -> Case:
    model = mlp(16, 32, 32, 32, 4)
    model[2].requires_grad_(False)
    return Case(model, BLOBS.batches(), CE)


def frozen_block() -> Case:
    model = LanguageModel(depth=4)
    model.blocks[2].requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    return Case(model, texts(), token_loss, torch.optim.AdamW(trained, 1e-3))


def left_out_of_optimizer() -> Case:
    model = mlp(16, 32, 32, 4)
    kept = [each for name, each in model.named_parameters() if not name.startswith("4")]
    return Case(model, BLOBS.batches(), CE, torch.optim.SGD(kept, 0.05))


def replaced_after_optimizer() -> Case:
    model = ConvNet(classes=10)
    optimizer = adam(model)
    model.head = nn.Linear(16, 4)
    return Case(model, images(), CE, optimizer)


def never_zeroed() -> Case:
    model = mlp(16, 32, 4)

    def step(
        model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return Case(model, BLOBS.batches(), None, sgd(model), step)


def softmax_twice() -> Case:
    model = nn.Sequential(*mlp(16, 32, 4), nn.Softmax(-1))
    return Case(model, BLOBS.batches(), CE)


def sigmoid_twice() -> Case:
    model = nn.Sequential(*mlp(16, 32, 1), nn.Sigmoid())
    batches = [(x, (y > 1).float()[:, None]) for x, y in BLOBS.batches()]
    return Case(model, batches, nn.BCEWithLogitsLoss())


def logits_to_nll() -> Case:
    return Case(mlp(16, 32, 4), BLOBS.batches(), nn.NLLLoss())


def broadcast_loss() -> Case:
    batches = [(x, y[:, 0]) for x, y in regression()]
    return Case(mlp(16, 32, 1), batches, MSE)


def broadcast_by_hand() -> Case:
    batches = [(x, y[:, 0]) for x, y in regression()]
    return Case(mlp(16, 32, 1), batches, lambda out, y: (out - y).abs().mean())


def minus_sign() -> Case:
    return Case(mlp(16, 32, 1), regression(), lambda out, y: -F.mse_loss(out, y))


class Listed(nn.Module):
    """Layers in a Python list, which nn.Module does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(16, 16) for _ in range(3)]
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def python_list() -> Case:
    return Case(Listed(), BLOBS.batches(), CE)


def multiplied_list() -> Case:
    model = nn.Sequential(nn.Linear(16, 32), *[nn.Linear(32, 32)] * 3, nn.ReLU(), nn.Linear(32, 4))
    return Case(model, BLOBS.batches(), CE)


class Skips(nn.Module):
    """A layer that forward forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.head(x)


def forgotten_layer() -> Case:
    return Case(Skips(), BLOBS.batches(), CE)


def copied_head() -> Case:
    model = LanguageModel()
    model.head.weight.data = model.tokens.weight.data.clone()
    return Case(model, texts(), token_loss, adam(model))


def left_in_evaluation() -> Case:
    model = ConvNet().eval()
    return Case(model, images(), CE)


# -- init ----------------------------------------------------------------------------------------


def init_20_times() -> Case:
    model = mlp(16, 64, 64, 4)
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.mul_(20)
    return Case(model, BLOBS.batches(), CE, adam(model))


def standard_normal_init() -> Case:
    model = mlp(16, 64, 64, 1)
    for layer in model[::2]:
        nn.init.normal_(layer.weight)
    return Case(model, regression(), MSE, adam(model))


def all_equal_init() -> Case:
    model = mlp(16, 32, 32, 4)
    for each in model.parameters():
        nn.init.constant_(each, 0.05)
    return Case(model, BLOBS.batches(), CE)


def all_zero_init() -> Case:
    model = mlp(16, 32, 32, 4, act=nn.Tanh)
    for each in model.parameters():
        nn.init.zeros_(each)
    return Case(model, BLOBS.batches(), CE)


def large_logits() -> Case:
    return Case(
        mlp(16, 32, 10), Blobs(classes=10).batches(), lambda out, y: F.cross_entropy(200 * out, y),
        None,
    )  # fmt: skip


# -- data ----------------------------------------------------------------------------------------


def raw_pixels() -> Case:
    batches = [(127 + 60 * x, y) for x, y in images()]
    model = nn.Sequential(nn.Flatten(), *mlp(64, 32, 4))
    return Case(model, batches, CE, adam(model))


def copies_in_batch() -> Case:
    batches = [(x[:4].repeat(8, 1), y[:4].repeat(8)) for x, y in BLOBS.batches()]
    return Case(mlp(16, 32, 4), batches, CE)


def sorted_classes() -> Case:
    made = []
    for number in range(25):
        label = number % 4
        x = BLOBS.centres[label] + torch.randn(32, 16)
        made.append((x, torch.full((32,), label)))
    return Case(mlp(16, 32, 4), made, CE)


def padded_targets() -> Case:
    made = []
    for x, y in texts():
        ends = torch.randint(4, 12, (len(x), 1))
        after = torch.arange(x.shape[1]) >= ends
        made.append((x.clamp(min=1).masked_fill(after, 0), y.clamp(min=1).masked_fill(after, 0)))
    model = LanguageModel()
    return Case(model, made, token_loss, adam(model))


class Padded(nn.Module):
    """An embedding whose padding row was initialised with the others."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16, padding_idx=0)
        self.head = nn.Linear(16, 4)
        nn.init.normal_(self.tokens.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tokens(ids).mean(1))


def padding_row() -> Case:
    made = [(torch.randint(0, 32, (32, 8)), torch.randint(4, (32,))) for _ in range(25)]
    return Case(Padded(), made, CE)


def targets_out_of_reach() -> Case:
    batches = [(x, 3 * y) for x, y in regression()]
    return Case(nn.Sequential(*mlp(16, 32, 1), nn.Sigmoid()), batches, MSE)


# -- precision and optimizer ---------------------------------------------------------------------


class Half(nn.Module):
    """A float16 model whose loss is small: gradients underflow."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(16, 32, 32, 1).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.half()).float()


def half_underflow() -> Case:
    model = Half()
    return Case(
        model, regression(), lambda out, y: 1e-4 * F.mse_loss(out, y), sgd(model, 1e-3)
    )  # fmt: skip


class HalfBody(nn.Module):
    """A float16 body whose large outputs a norm brings back."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(16, 32, 32).half()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = 4e3 * torch.relu(self.body[0](x.half()))
        return self.head(self.norm(self.body[2](h).float()))


def half_headroom() -> Case:
    model = HalfBody()
    with torch.no_grad():
        model.body[2].weight.mul_(5)

    def step(
        model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch[0]), batch[1])
        (loss * 2**14).backward()  # as a GradScaler does it
        for each in model.parameters():
            each.grad.div_(2**14)
        optimizer.step()
        return loss

    return Case(model, regression(), None, sgd(model, 0.05), step)


def bfloat16_updates_lost() -> Case:
    model = mlp(16, 32, 4).bfloat16()
    batches = [(x.bfloat16(), y) for x, y in BLOBS.batches()]
    return Case(model, batches, CE, sgd(model, 1e-6))


def learning_rate_zero() -> Case:
    model = mlp(16, 32, 4)
    return Case(model, BLOBS.batches(), CE, sgd(model, 0.0))


def learning_rate_tiny() -> Case:
    model = mlp(16, 32, 4)
    return Case(model, BLOBS.batches(), CE, torch.optim.Adam(model.parameters(), 1e-8))


def strong_decay() -> Case:
    model = mlp(16, 32, 4)
    return Case(model, BLOBS.batches(), CE, adam(model, 1e-2, weight_decay=10.0))


def never_stepped() -> Case:
    model = mlp(16, 32, 4)

    def step(
        model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return Case(model, BLOBS.batches(), None, sgd(model), step)


class Routed(nn.Module):
    """A mixture of experts with a classifier on top."""

    def __init__(self) -> None:
        super().__init__()
        self.moe, self.head = MixtureOfExperts(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(x))


def one_expert() -> Case:
    model = Routed()
    with torch.no_grad():
        model.moe.router.bias[2] = 60.0
    return Case(model, BLOBS.batches(), CE)


def frozen_half_way() -> Case:
    model = LanguageModel(depth=3)
    count = 0

    def step(
        model: LanguageModel, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        nonlocal count
        if count == 12:
            model.blocks[1].requires_grad_(False)
        count += 1
        optimizer.zero_grad()
        loss = token_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return Case(model, texts(), None, adam(model), step)


def rate_times_100_half_way() -> Case:
    model = LanguageModel()
    count = 0

    def step(
        model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        nonlocal count
        if count == 12:
            optimizer.param_groups[0]["lr"] *= 100
        count += 1
        optimizer.zero_grad()
        loss = token_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return Case(model, texts(), None, adam(model, 3e-3), step)


# -- found by somebody who did not know the suite --------------------------------------------------


def cleared_too_late() -> Case:
    model = mlp(16, 32, 4)

    def step(
        model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
        return loss

    return Case(model, BLOBS.batches(), None, adam(model), step)


def schedule_in_epochs() -> Case:
    model = mlp(16, 32, 4)
    rates: list[torch.optim.lr_scheduler.LRScheduler] = []

    def step(
        model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        if not rates:
            rates.append(
                torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.0, 1 - n / 10))
            )
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        rates[0].step()
        return loss

    return Case(model, BLOBS.batches(), None, adam(model), step)


def prices_as_they_are() -> Case:
    model = mlp(16, 32, 1)
    return Case(model, [(x, 3e5 + 1e5 * y) for x, y in regression()], MSE, adam(model))


class Recurrent(nn.Module):
    """A recurrent net with relu."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 32, batch_first=True, nonlinearity="relu")
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def recurrent_explodes() -> Case:
    model = Recurrent()
    nn.init.orthogonal_(model.rnn.weight_hh_l0, gain=2.2)
    batches = [(torch.randn(16, 60, 8), torch.randint(4, (16,))) for _ in range(25)]
    return Case(model, batches, CE, sgd(model, 1e-4))


def dropout_of_nearly_all() -> Case:
    model = nn.Sequential(
        nn.Linear(16, 64),
        nn.ReLU(),
        nn.Dropout(0.99),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Dropout(0.99),
        nn.Linear(64, 4),
    )
    return Case(model, BLOBS.batches(), CE, adam(model))


def sorted_unequal_classes() -> Case:
    model = mlp(16, 32, 4)
    x, y = (torch.cat(each) for each in zip(*BLOBS.batches(), strict=True))
    order = (torch.where(torch.rand(len(y)) < 0.3, 3, y)).argsort(stable=True)
    return Case(
        model, list(zip(x[order].split(48), y[order].sort().values.split(48), strict=True)), CE
    )


def dead_behind_a_shift() -> Case:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.fc3 = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x))) - 60.0))

    model = Shifted()
    return Case(model, BLOBS.batches(), CE, adam(model))


FAULTS = (
    Fault("log of a probability that underflowed", log_of_zero, "nonfinite_loss", (), "loss", 0, "numeric"),
    Fault("derivative of sqrt at 0", root_of_zero, "nonfinite_backward", (), "backward", 0, "numeric"),
    Fault("learning rate too high, SGD", learning_rate_high_sgd, "learning_rate_too_high", (), "optimizer", 0, "numeric"),
    Fault("learning rate too high, AdamW", learning_rate_high_adam, "learning_rate_too_high", (), "optimizer", 0, "numeric"),
    Fault("float16 overflow in attention scores", half_overflow, "nonfinite_forward", (), "forward", 0, "numeric"),
    Fault("one NaN sample", nan_sample, "nonfinite_data", (), "data", 7, "numeric"),
    Fault("one infinite target", infinite_sample, "nonfinite_data", (), "data", 4, "numeric"),
    Fault("Adam without epsilon", zero_epsilon, "nonfinite_update", ("0", "2"), "optimizer", 0, "numeric"),
    Fault("division by a spread of 0", constant_sample, "nonfinite_forward", (), "forward", 2, "numeric"),
    Fault("residual branches without norm", residual_growth, "activation_growth", ("blocks.11",), "forward", 0, "flow"),
    Fault("stack of sigmoids", sigmoid_stack, "vanishing_gradients", ("0",), "backward", 0, "flow"),
    Fault("tanh saturated", tanh_saturated, "saturated_units", ("3",), "forward", 0, "flow"),
    Fault("tanh saturated, as a function", functional_tanh_saturated, "saturated_units", ("fc1",), "forward", 0, "flow"),
    Fault("recurrent net saturated", recurrent_saturated, "saturated_units", ("rnn",), "forward", 0, "flow"),
    Fault("ReLU dead by its bias", dead_by_bias, "dead_units", ("3", "2"), "forward", 0, "flow"),
    Fault("ReLU dead, as a function", dead_functional, "dead_units", ("fc2",), "forward", 0, "flow"),
    Fault("channels dead behind batch norm", dead_channels, "dead_units", ("bn2",), "forward", 0, "flow"),
    Fault("clipping hides an explosion", clipped_explosion, "clipping_hides_explosion", (), "backward", 0, "flow"),
    Fault("attention logits run away (SDPA)", attention_runs_away, "attention_collapse", ("blocks.1.attention",), "forward", 0, "flow"),
    Fault("attention logits without scale", attention_without_scale, "attention_collapse", ("attention",), "forward", 0, "flow"),
    Fault("detached subgraph", detached, "graph_cut", ("encoder.2",), "backward", 0, "wiring"),
    Fault("no_grad around an encoder", under_no_grad, "graph_cut", ("encoder.0",), "backward", 0, "wiring"),
    Fault("loss turned into a number", loss_without_graph, "graph_cut", ("0",), "loss", 0, "wiring"),
    Fault("one layer frozen by mistake", frozen_by_mistake, "frozen_layer", ("2",), "backward", None, "wiring"),
    Fault("one block frozen by mistake", frozen_block, "frozen_layer", ("blocks.2.mlp.0",), "backward", None, "wiring"),
    Fault("a layer missing from the optimizer", left_out_of_optimizer, "missing_from_optimizer", ("4",), "optimizer", None, "wiring"),
    Fault("head replaced after the optimizer was made", replaced_after_optimizer, "missing_from_optimizer", ("head",), "optimizer", None, "wiring"),
    Fault("zero_grad missing", never_zeroed, "stale_gradients", (), "backward", 1, "wiring"),
    Fault("softmax applied twice", softmax_twice, "probabilities_as_logits", (), "loss", 0, "wiring"),
    Fault("sigmoid applied twice", sigmoid_twice, "probabilities_as_logits", (), "loss", 0, "wiring"),
    Fault("logits handed to nll_loss", logits_to_nll, "logits_as_log_probabilities", (), "loss", 0, "wiring"),
    Fault("loss broadcasts", broadcast_loss, "loss_broadcast", (), "loss", 0, "wiring"),
    Fault("hand-written loss broadcasts", broadcast_by_hand, "loss_broadcast", (), "loss", 0, "wiring"),
    Fault("loss with the wrong sign", minus_sign, "inverted_loss", (), "loss", 0, "wiring"),
    Fault("layers in a Python list", python_list, "unregistered_parameters", (), "optimizer", None, "wiring"),
    Fault("one layer times three", multiplied_list, "shared_module", ("1",), "forward", None, "wiring"),
    Fault("a layer that never runs", forgotten_layer, "unused_layer", ("layers.3",), "forward", None, "wiring"),
    Fault("tied weights that were copied", copied_head, "untied_weights", ("head",), "forward", None, "wiring"),
    Fault("model left in evaluation mode", left_in_evaluation, "evaluation_mode", ("bn1",), "forward", 0, "wiring"),
    Fault("init 20 times too large", init_20_times, "init_too_large", ("0",), "forward", 0, "init"),
    Fault("standard normal init", standard_normal_init, "init_too_large", ("2",), "forward", 0, "init"),
    Fault("all-equal init", all_equal_init, "symmetric_init", ("0",), "forward", 0, "init"),
    Fault("all-zero init", all_zero_init, "symmetric_init", ("0",), "forward", 0, "init"),
    Fault("logits 200 times too large", large_logits, "initial_loss", ("2",), "loss", 0, "init"),
    Fault("raw pixels", raw_pixels, "unscaled_inputs", ("1",), "data", 0, "data"),
    Fault("copies within each batch", copies_in_batch, "duplicate_samples", (), "data", 0, "data"),
    Fault("data sorted by class", sorted_classes, "unshuffled_data", (), "data", 0, "data"),
    Fault("padding counted in the loss", padded_targets, "padding_in_loss", (), "loss", 0, "data"),
    Fault("padding row initialised", padding_row, "padding_row", ("tokens",), "forward", None, "data"),
    Fault("targets that the last activation cannot return", targets_out_of_reach, "unreachable_targets", ("2",), "loss", 0, "data"),
    Fault("float16 gradients underflow", half_underflow, "half_underflow", ("body.0", "body.2", "body.4"), "backward", 0, "precision"),
    Fault("float16 values near the limit", half_headroom, "half_headroom", ("body.2",), "forward", 0, "precision"),
    Fault("bfloat16 weights too coarse for the updates", bfloat16_updates_lost, "updates_lost", ("0",), "optimizer", 0, "precision"),
    Fault("learning rate 0", learning_rate_zero, "learning_rate_zero", (), "optimizer", 0, "optimizer"),
    Fault("learning rate far too low", learning_rate_tiny, "learning_rate_too_low", (), "optimizer", 0, "optimizer"),
    Fault("weight decay 1000 times too strong", strong_decay, "weight_decay_too_strong", (), "optimizer", 0, "optimizer"),
    Fault("optimizer.step forgotten", never_stepped, "optimizer_never_steps", (), "optimizer", 0, "optimizer"),
    Fault("router sends everything to one expert", one_expert, "routing_collapse", ("moe.router",), "forward", 0, "flow"),
    Fault("a block frozen half-way", frozen_half_way, "stopped_training", ("blocks.1.mlp.0",), "optimizer", 12, "optimizer"),
    Fault("gradients cleared before the step", cleared_too_late, "cleared_gradients", (), "optimizer", 0, "wiring"),
    Fault("a schedule that ends too early", schedule_in_epochs, "learning_rate_zero", (), "optimizer", 10, "optimizer"),
    Fault("prices as they are for targets", prices_as_they_are, "unscaled_targets", (), "data", 0, "data"),
    Fault("recurrent weights that explode in time", recurrent_explodes, "activation_growth", ("rnn",), "forward", 0, "flow"),
    Fault("dropout of nearly everything", dropout_of_nearly_all, "excessive_dropout", ("2", "5"), "forward", None, "flow"),
    Fault("unequal classes, sorted", sorted_unequal_classes, "unshuffled_data", (), "data", 0, "data"),
    Fault("ReLU dead behind a shift", dead_behind_a_shift, "dead_units", ("fc2",), "forward", 0, "flow"),
    Fault("learning rate x 100 half-way", rate_times_100_half_way, "learning_rate_too_high", (), "optimizer", 12, "optimizer"),
    *LOSS_FAULTS,
    *SETUP_FAULTS,
    *OUTPUT_FAULTS,
)  # fmt: skip
_ = Block
