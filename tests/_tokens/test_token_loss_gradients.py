"""Gradients of every token's own loss against a loop of `autograd.grad`, one loss at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from architectures import tokens as tokens_of
from oracles import DEVICE, assert_same_state, grads_of, numbers, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import torchfmri
from torchfmri import InspectionError, LayerNotFoundError, MemoryLimitError, token_losses
from torchfmri._tokens.algebra.sketch import Sketch
from torchfmri._tokens.losses.gradients import TokenLossGradients
from torchfmri._tokens.losses.loss_pass import DIRECT, UNUSED
from torchfmri._tokens.losses.matrix_calls import MatrixCall
from torchfmri._tokens.losses.vector_jacobian import VectorJacobian

B, S, WIDTH = 2, 5, 6
IDS = torch.tensor([[1, 2, 0, 4, 2], [3, 3, 1, 0, 6]], device=DEVICE)
EXACT = 1e-12


def truth(parameters: dict[str, nn.Parameter], losses: Tensor) -> dict[str, Tensor]:
    """The gradient of each loss by itself: name -> (t, *shape)."""
    rows = []
    for loss in losses.flatten():
        found = torch.autograd.grad(
            loss, list(parameters.values()), retain_graph=True, allow_unused=True
        )
        dense = [None if each is None else each.to_dense() for each in found]
        rows.append(dense)
    return {
        name: torch.stack(
            [torch.zeros_like(parameter) if row[k] is None else row[k] for row in rows]
        ).detach()
        for k, (name, parameter) in enumerate(parameters.items())
    }


def assert_near(ours: Tensor, theirs: Tensor, what: str, tolerance: float = EXACT) -> None:
    """Equal relative to the largest number; a NaN is never equal."""
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} != {tuple(theirs.shape)}"
    gap = float((ours.double() - theirs.double()).abs().max())
    size = float(theirs.double().abs().max())
    assert gap <= tolerance * max(size, 1e-30), f"{what}: off by {gap:.3g} of {size:.3g}"


def assert_all_near(
    tokens: TokenLossGradients, expected: dict[str, Tensor], tolerance: float = EXACT
) -> None:
    """Everything that can be asked of kept factors, for each parameter and all together."""
    grams, sketches, squares = [], [], []
    for name, gradients in expected.items():
        found, flat = tokens[name], gradients.reshape(len(gradients), -1)
        grid = tuple(found.norm().shape)
        assert found.shape == (*grid, *gradients.shape[1:])
        assert_near(found.norm().flatten(), flat.norm(dim=1), f"norm of {name}", tolerance)
        assert_near(found.gram(), flat @ flat.mT, f"gram of {name}", tolerance)
        direction = numbers(flat.shape[1], seed=5).to(gradients).view(gradients.shape[1:])
        dots = flat @ direction.flatten()
        assert_near(found.dot(direction).flatten(), dots, f"dot of {name}", tolerance)
        sketch = Sketch(name, tuple(gradients.shape[1:]), 12, 4).dense(flat)
        assert_near(found.project(12, 4).flatten(0, -2), sketch, f"sketch of {name}", tolerance)
        weights = numbers(*grid, seed=6)
        total = torch.tensordot(weights.flatten().to(gradients), gradients, 1)
        assert_near(found.sum(weights), total, f"sum of {name}", tolerance)
        last = tuple(length - 1 for length in grid)
        one = (*last[:-1], last[-1] - 1)
        place = int(torch.arange(len(flat)).view(grid)[one])
        size = gradients.abs().max()
        assert float((found[one] - gradients[place]).abs().max()) <= tolerance * size
        grams.append(flat @ flat.mT)
        sketches.append(sketch)
        squares.append(flat.square().sum(1))
    assert_near(tokens.norm().flatten(), torch.stack(squares).sum(0).sqrt(), "norm", tolerance)
    assert_near(tokens.gram(), torch.stack(grams).sum(0), "gram", tolerance)
    assert_near(
        tokens.project(12, 4).flatten(0, -2), torch.stack(sketches).sum(0), "sketch", tolerance
    )


# -- layers ----------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A token mixer, so that a token's loss depends on earlier positions, around one layer."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.layer = layer
        self.call = call
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + torch.tanh(x.cumsum(1) / 3)
        y = self.call(self.layer, x)
        y = torch.tanh(y.flip(1).cumsum(1).flip(1) / 3) if isinstance(y, Tensor) else y
        return self.head(F.relu(y + x, inplace=True))


def plain(layer: Any, x: Tensor) -> Tensor:
    return layer(x)


class Tied(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH, padding_idx=0 if form == "padded" else None)
        self.form = form
        if form == "functional":
            return
        if form == "transposed":
            self.head: nn.Module = Conv1D(WIDTH, 7)  # weight (7, WIDTH): in, out
            self.head.weight = self.embedding.weight
            self.first = nn.Linear(WIDTH, 7, bias=False)
            self.first.weight = self.embedding.weight
        else:
            self.head = nn.Linear(WIDTH, 7)
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = torch.tanh(x + x.cumsum(1) / 3)
        if self.form == "functional":
            return x @ self.embedding.weight.T
        if self.form == "transposed":
            return self.head(torch.tanh(self.first(x)))
        return self.head(x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = self.layer(torch.tanh(x + x.cumsum(1)))
        return self.layer(F.relu(x, inplace=True)) + self.embedding((ids + 1) % 7)


class Scaled(nn.Linear):
    """A Linear that does something else than its class says."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) + x @ self.weight.square()


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.7


class Positions(nn.Embedding):
    """Takes token numbers and looks up positions, as Whisper's does."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.arange(ids.shape[1], device=ids.device).expand(ids.shape))


class Slots(nn.Embedding):
    """The same, without a batch axis."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[: ids.shape[1]]


class Gemma(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = ScaledEmbedding(7, WIDTH, padding_idx=0)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(torch.tanh(x + x.cumsum(1) / 3))


class Free(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.place = nn.Parameter(torch.zeros(1, S, WIDTH))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + torch.sin(self.place + x)


def attention(layer: Any, x: Tensor) -> Tensor:
    mask = torch.ones(S, S, dtype=torch.bool, device=x.device).triu(1)
    return layer(x, x, x, attn_mask=mask, need_weights=False)[0]


def experts(layer: Any, x: Tensor) -> Tensor:
    chosen = torch.stack(list(layer))[IDS % 3]  # (b, s, o, i)
    return torch.einsum("bsoi,bsi->bso", chosen, x)


class Routed(nn.Module):
    """Experts that are modules: each sees some rows, in an order of its own, and one sees none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        rows, y = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        for number, expert in enumerate(self.experts):
            chosen = (IDS.flatten() % 2 == number).nonzero().flatten().flip(0)
            y = y.index_add(0, chosen, expert(rows[chosen]))
        return y.view(x.shape)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    rules: dict[str, str]  # of the parameters that matter to the case


def mixed(layer: Callable[[], nn.Module], call: Any = plain, **rules: str) -> Case:
    named = {f"layer.{name}": rule for name, rule in rules.items()}
    return Case(lambda: Mixed(layer(), call), named)


CASES = {
    "linear": mixed(lambda: nn.Linear(WIDTH, WIDTH), weight="Linear", bias=DIRECT),
    "conv1d": mixed(lambda: Conv1D(WIDTH, WIDTH), weight="Conv1D", bias=DIRECT),
    "inplace": mixed(
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(True), nn.Linear(8, WIDTH)),
        **{"0.weight": "Linear", "2.weight": "Linear"},
    ),
    "padding": Case(lambda: Tied("padded"), {"embedding.weight": "Embedding + Linear"}),
    "tied": Case(lambda: Tied("module"), {"embedding.weight": "Embedding + Linear"}),
    "transposed": Case(
        lambda: Tied("transposed"), {"embedding.weight": "Conv1D + Embedding + Linear"}
    ),
    "by hand": Case(lambda: Tied("functional"), {"embedding.weight": DIRECT}),
    "repeated": Case(Twice, {"layer.weight": "2 x Linear", "embedding.weight": "2 x Embedding"}),
    "scaled embedding": Case(Gemma, {"embedding.weight": "Linear + scaled Embedding"}),
    "positions": mixed(
        lambda: Positions(S, WIDTH), lambda layer, x: layer(IDS + 10), weight=DIRECT
    ),
    "slots": mixed(lambda: Slots(S, WIDTH), lambda layer, x: layer(IDS) + 0 * x, weight=DIRECT),
    "scaled": mixed(lambda: Scaled(WIDTH, WIDTH), weight=DIRECT),
    "layernorm": mixed(lambda: nn.LayerNorm(WIDTH), weight=DIRECT, bias=DIRECT),
    "rmsnorm": mixed(lambda: nn.RMSNorm(WIDTH), weight=DIRECT),
    "batchnorm": mixed(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(S)),
        **{"0.weight": "Linear", "1.weight": DIRECT},
    ),
    "conv": mixed(
        lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2),
        lambda layer, x: layer(x.mT).mT,
        weight=DIRECT,
        bias=DIRECT,
    ),
    "lstm": mixed(
        lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
        lambda layer, x: layer(x)[0],
        weight_ih_l0=DIRECT,
        weight_hh_l0=DIRECT,
    ),
    "attention": mixed(
        lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        attention,
        in_proj_weight=DIRECT,
        **{"out_proj.weight": DIRECT},
    ),
    "free": mixed(Free, scale=DIRECT, place=DIRECT, unused=UNUSED),
    "experts": mixed(
        lambda: nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3)]),
        experts,
        **{"0": DIRECT},
    ),
    "routed": mixed(Routed, **{"experts.0.weight": "Linear", "experts.2.weight": "Linear"}),
    "weight norm": mixed(
        lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        **{"parametrizations.weight.original0": DIRECT},
    ),
    "frequency": mixed(
        lambda: nn.Embedding(7, WIDTH, scale_grad_by_freq=True),
        lambda layer, x: layer(IDS),
        weight=DIRECT,
    ),
    "sparse": mixed(
        lambda: nn.Embedding(7, WIDTH, sparse=True),
        lambda layer, x: layer(IDS),
        weight="Embedding",
    ),
    "dropout": mixed(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), **{"0.weight": "Linear"}
    ),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    model = CASES[name].build().to(DEVICE, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def losses_of(output: Tensor) -> Tensor:
    """One loss per token, different for each."""
    number = torch.arange(output.numel(), device=output.device, dtype=output.dtype)
    return (output * number.view(output.shape).cos() + output.square() / 4).sum(-1)


def run(model: nn.Module, **options: Any) -> tuple[TokenLossGradients, Tensor]:
    parameters = dict(model.named_parameters())
    max_bytes = options.pop("max_bytes", 1 << 24)
    with TokenLossGradients(model, parameters, max_bytes) as tokens:
        losses = losses_of(model(IDS))
        tokens.backward(losses, **options)
    return tokens, losses


def rules_of(tokens: TokenLossGradients) -> dict[str, str]:
    return {each.name: each.rule for each in tokens.coverage()}


@pytest.mark.parametrize("name", CASES)
def test_everything_equals_a_loop_over_the_losses(name: str) -> None:
    model = build(name)
    tokens, losses = run(model, keep="factors")
    assert_all_near(tokens, truth(dict(model.named_parameters()), losses))
    assert rules_of(tokens).items() >= CASES[name].rules.items()
    for each in tokens.coverage():
        assert each.residual <= 1e-12, each


@pytest.mark.parametrize("name", CASES)
def test_the_same_rules_fire_in_float32(name: str) -> None:
    model = build(name, torch.float32)
    tokens, losses = run(model, keep="factors")
    assert_all_near(tokens, truth(dict(model.named_parameters()), losses), 2e-5)
    assert rules_of(tokens).items() >= CASES[name].rules.items()
    for each in tokens.coverage():
        assert each.residual <= 1e-5, each


@pytest.mark.parametrize("name", ["linear", "tied", "layernorm"])
def test_swapped_tokens_are_not_equal(name: str) -> None:
    model = build(name)
    tokens, losses = run(model, keep="factors")
    expected = truth(dict(model.named_parameters()), losses)
    swapped = {key: each[[1, 0, *range(2, len(each))]] for key, each in expected.items()}
    with pytest.raises(AssertionError, match="off by"):
        assert_all_near(tokens, swapped, 1e-3)


# -- transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_transformers(name: str, dtype: torch.dtype) -> None:
    architecture = ARCHITECTURES[name]
    # float64: mixtures of experts have one implementation that takes it.
    chosen = "eager" if name == "mixtral" and dtype == torch.float64 else None
    model = architecture.build(experts=chosen, num_hidden_layers=1).to(dtype)  # dropout is on
    batch = architecture.batch()
    labels = batch.pop("labels")
    with TokenLossGradients(model, dict(model.named_parameters())) as tokens:
        losses = token_losses(model(**batch).logits, labels, reduction="mean")
        tokens.backward(losses, keep="factors")
    expected = truth(dict(model.named_parameters()), losses)
    assert_all_near(tokens, expected, EXACT if dtype == torch.float64 else 2e-4)
    rules = rules_of(tokens)
    assert set(rules) == {key for key, _ in model.named_parameters()}
    matrices = {key for key, each in model.named_parameters() if each.ndim == 2}
    direct = {key for key in matrices if rules[key] == DIRECT}
    assert direct <= {"model.layers.0.mlp.gate.weight"}, "a matrix lost its factors"
    assert max(each.residual for each in tokens.coverage()) <= 1e-5
    ignored = F.pad(labels[:, 1:], (0, 1), value=-100) == -100
    assert ignored.sum() > B  # padding too, not only the last column
    assert torch.equal(tokens.norm() == 0, ignored)


def test_tied_weights_have_both_names() -> None:
    model = ARCHITECTURES["gpt2"].build(n_layer=1)
    batch = ARCHITECTURES["gpt2"].batch()
    with TokenLossGradients(model, dict(model.named_parameters())) as tokens:
        tokens.backward(token_losses(model(**batch).logits, batch["labels"]))
    assert tokens["lm_head.weight"] is tokens["transformer.wte.weight"]
    assert tokens["lm_head.weight"].rule == "Embedding + Linear"


# -- chunks and memory -----------------------------------------------------------------------


class Sizes(TorchDispatchMode):
    """The bytes of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.numel() * each.element_size())
        return found


def needed_for_one_token(model: nn.Module) -> int:
    with pytest.raises(MemoryLimitError) as caught:
        run(model, max_bytes=1)
    return caught.value.needed


@pytest.mark.parametrize("name", ["linear", "conv1d", "tied", "attention", "lstm", "batchnorm"])
def test_chunks_give_the_same_numbers(name: str) -> None:
    model = build(name)
    whole, _ = run(model, keep="factors", max_bytes=1 << 30)
    for count in (1, 2, 3, 7):
        parts, _ = run(build(name), project=8, max_bytes=count * needed_for_one_token(model))
        for key in whole:
            assert_near(parts[key].norm(), whole[key].norm(), key)
            assert_near(parts[key].project(8), whole[key].project(8), key)
            assert parts[key].residual <= 1e-12


def test_no_tensor_is_larger_than_the_cap() -> None:
    architecture = ARCHITECTURES["llama"]
    model, batch = architecture.build(), architecture.batch()
    labels = batch.pop("labels")
    largest = {}
    for max_bytes in (100_000, 400_000, 1 << 30):
        with TokenLossGradients(model, dict(model.named_parameters()), max_bytes) as tokens:
            losses = token_losses(model(**batch).logits, labels)
            with Sizes() as sizes:
                tokens.backward(losses, project=16)
        largest[max_bytes] = sizes.largest
        assert sizes.largest <= max_bytes
    assert largest[100_000] < largest[400_000] < largest[1 << 30], "the mode saw no chunks"


def test_all_whole_gradients_together_stay_under_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 20).double()
    gates = {f"gate{k}": nn.Parameter(numbers(20, 20, seed=k)) for k in range(8)}  # used by hand
    original, arrived = VectorJacobian.tokens, []

    def measured(self: VectorJacobian, first: int, last: int) -> list[Tensor | None]:
        found = original(self, first, last)
        arrived.append(sum(each.numel() * each.element_size() for each in found))
        return found

    monkeypatch.setattr(VectorJacobian, "tokens", measured)
    with TokenLossGradients(model, gates, 100_000) as tokens:
        losses = losses_of(
            sum(torch.tanh(model(numbers(B, S, 3)) @ each) for each in gates.values())
        )
        tokens.backward(losses)
    assert max(arrived) <= 100_000 < sum(arrived)


def test_what_was_not_selected_counts_towards_the_cap() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1000)).double()
    parameters = {"0.weight": model[0].weight}
    with TokenLossGradients(model, parameters, 300_000) as tokens:
        losses = token_losses(model(numbers(B, S, 3)), IDS)  # 80 kB of logits for each token
        with Sizes() as sizes:
            tokens.backward(losses)
    assert sizes.largest <= 300_000 < len(losses.flatten()) * 80_000
    assert_near(
        tokens["0.weight"].norm().flatten(),
        truth(parameters, losses)["0.weight"].norm(dim=(1, 2)),
        "norm",
    )


def test_a_cap_that_is_too_small_says_what_is_needed() -> None:
    model = build("linear")
    with pytest.raises(MemoryLimitError, match=r"single token.*max_bytes"):
        run(model, max_bytes=100)
    enough = needed_for_one_token(model)
    run(model, max_bytes=enough)
    with pytest.raises(MemoryLimitError, match=r"factors.*project=256"):
        run(model, max_bytes=enough, keep="factors")


# -- the proof beside the numbers ------------------------------------------------------------


def test_the_residual_shows_tokens_that_were_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    original = VectorJacobian.tokens

    def mixed_up(self: VectorJacobian, first: int, last: int) -> list[Tensor | None]:
        found = original(self, first, last)
        order = torch.tensor([1, 0, *range(2, last - first)])
        return [None if each is None else each[order] for each in found]

    monkeypatch.setattr(VectorJacobian, "tokens", mixed_up)
    tokens, _ = run(build("linear"))
    assert all(each.residual > 1e-3 for each in tokens.coverage())


def test_the_residual_shows_a_wrong_input(monkeypatch: pytest.MonkeyPatch) -> None:
    original = MatrixCall.factors

    def shifted(self: MatrixCall, gradients: Tensor) -> Any:
        found = original(self, gradients)
        if len(gradients) == 1 or self.kind != "Linear":  # the routes are chosen with single ones
            return found
        return type(found)(found.varying, found.shared.roll(1, 0), found.axis)

    monkeypatch.setattr(MatrixCall, "factors", shifted)
    tokens, _ = run(build("linear"))
    found = {each.name: each.residual for each in tokens.coverage()}
    assert found["layer.weight"] > 1e-2
    assert found["head.weight"] > 1e-2
    assert found["embedding.weight"] < 1e-12


def test_an_input_that_does_not_explain_the_gradient_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = MatrixCall.factors

    def shifted(self: MatrixCall, gradients: Tensor) -> Any:
        found = original(self, gradients)
        if self.kind != "Linear":
            return found
        return type(found)(found.varying, found.shared.roll(1, 0), found.axis)

    monkeypatch.setattr(MatrixCall, "factors", shifted)
    model = build("linear")
    tokens, losses = run(model, keep="factors")
    assert_all_near(tokens, truth(dict(model.named_parameters()), losses))
    assert rules_of(tokens)["layer.weight"] == DIRECT
    assert "do not explain its whole gradient" in tokens["layer.weight"].note


def test_the_losses_add_up_to_the_gradient_of_their_sum() -> None:
    model = build("tied")
    tokens, losses = run(model, keep="factors")
    losses.sum().backward()  # the graph is still there
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_near(tokens[name].sum(), parameter.grad, name)


# -- what training code does around it -------------------------------------------------------


def test_nothing_is_left_behind() -> None:
    model = build("dropout")
    losses_of(model(IDS)).sum().backward()  # there are .grad to spare
    grads = grads_of(model)
    before = state_of(model)
    rng = torch.get_rng_state()
    run(model, keep="factors", project=4)
    torch.set_rng_state(rng)  # the user's own forward pass drew a dropout mask
    assert_same_state(before, state_of(model))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, grads[name])


def test_the_pass_itself_draws_no_random_numbers() -> None:
    model = build("dropout")
    with TokenLossGradients(model, dict(model.named_parameters())) as tokens:
        losses = losses_of(model(IDS))
        before = torch.get_rng_state()
        tokens.backward(losses, project=4)
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_hooks_go_after_an_exception(error: type[BaseException]) -> None:
    model = build("linear")
    before = state_of(model)
    tokens = TokenLossGradients(model, dict(model.named_parameters()))

    def interrupted() -> None:
        with tokens:
            model(IDS)
            assert any(each._forward_hooks for each in model.modules())
            raise error

    with pytest.raises(error):
        interrupted()
    assert_same_state(before, state_of(model))
    assert not tokens._calls.calls


def test_several_batches_in_one_block_do_not_pile_up() -> None:
    model = build("linear")
    parameters = dict(model.named_parameters())
    with TokenLossGradients(model, parameters) as tokens:
        for step in range(3):
            losses = losses_of(model((IDS + step) % 7))
            tokens.backward(losses)
            tokens.backward(losses, keep="factors")  # again, on the same graph
            assert len(tokens._calls.calls) == 3
            assert_all_near(tokens, truth(parameters, losses))


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.model = model
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embedding(ids)
        x = checkpoint(self.model.layer, x.cumsum(1), use_reentrant=self.reentrant)
        return self.model.head(x)


def test_checkpointing() -> None:
    model = Checkpointed(build("dropout"), False)
    tokens, losses = run(model, keep="factors")
    assert_all_near(tokens, truth(dict(model.named_parameters()), losses))
    assert rules_of(tokens)["model.layer.0.weight"] == "Linear"
    # The replay draws the dropout mask again, which batching does not allow.
    assert all("one token at a time" in each.note for each in tokens.coverage())


def test_a_replay_is_not_a_call() -> None:
    model = Checkpointed(build("inplace"), False)
    with TokenLossGradients(model, dict(model.named_parameters())) as tokens:
        losses = losses_of(model(IDS))
        assert len(tokens._calls.calls) == 4
        tokens.backward(losses)
        losses.sum().backward()
        assert len(tokens._calls.calls) == 4


def test_reentrant_checkpointing_is_refused_with_the_way_out() -> None:
    model = Checkpointed(build("inplace"), True)
    with pytest.raises(InspectionError, match="use_reentrant=False"):
        run(model)


def test_checkpointing_of_transformers() -> None:
    model = ARCHITECTURES["llama"].build(num_hidden_layers=1).double()
    model.gradient_checkpointing_enable()
    batch = ARCHITECTURES["llama"].batch()
    labels = batch.pop("labels")
    with TokenLossGradients(model, dict(model.named_parameters())) as tokens:
        losses = token_losses(model(**batch, use_cache=False).logits, labels)
        tokens.backward(losses, keep="factors")
    assert_all_near(tokens, truth(dict(model.named_parameters()), losses))


class Unbatched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        assert float(g.abs().sum()) >= 0  # .item() of a batched tensor raises
        return g


def test_what_cannot_be_batched_goes_one_by_one() -> None:
    model = build("linear")
    model.call = lambda layer, x: Unbatched.apply(layer(x))
    tokens, losses = run(model, keep="factors")
    assert_all_near(tokens, truth(dict(model.named_parameters()), losses))
    assert all("one token at a time" in each.note for each in tokens.coverage())


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise ValueError("the user's own")


def test_errors_of_the_model_pass_through() -> None:
    model = build("linear")
    model.call = lambda layer, x: Failing.apply(layer(x))
    with pytest.raises(ValueError, match="the user's own"):
        run(model)


def test_autocast() -> None:
    model = build("linear", torch.float32)
    parameters = dict(model.named_parameters())
    with (
        torch.autocast(DEVICE.type, torch.bfloat16),
        TokenLossGradients(model, parameters) as tokens,
    ):
        losses = losses_of(model(IDS).float())
        tokens.backward(losses, keep="factors")
        inside = tokens.norm()
        with torch.autocast(DEVICE.type, enabled=False):
            tokens.backward(losses, keep="factors")
        assert torch.equal(inside, tokens.norm())  # our own arithmetic is not cast
    assert_all_near(tokens, truth(parameters, losses), 2e-2)
    assert rules_of(tokens)["layer.weight"] == "Linear"
    assert max(each.residual for each in tokens.coverage()) <= 2e-2
    assert tokens["layer.weight"].norm().dtype == torch.float32


def test_bfloat16() -> None:
    model = build("linear", torch.bfloat16)
    tokens, losses = run(model, keep="factors")
    assert_all_near(tokens, truth(dict(model.named_parameters()), losses), 3e-2)
    assert rules_of(tokens)["layer.weight"] == "Linear"


def test_some_tokens_only() -> None:
    model = build("linear")
    parameters = dict(model.named_parameters())
    with TokenLossGradients(model, parameters) as tokens:
        losses = losses_of(model(IDS))[:, 1:4]
        tokens.backward(losses, keep="factors")
    assert tokens.norm().shape == (B, 3)
    assert_all_near(tokens, truth(parameters, losses))


def test_kept_factors_do_not_follow_the_next_batch() -> None:
    model = build("tied")
    parameters = dict(model.named_parameters())
    ids = IDS.clone()
    with TokenLossGradients(model, parameters) as tokens:
        losses = losses_of(model(ids))
        tokens.backward(losses, keep="factors")
        expected = truth(parameters, losses)
    ids.zero_()
    assert_all_near(tokens, expected)


def test_after_the_users_own_backward_it_says_what_to_do() -> None:
    model = build("linear")
    with TokenLossGradients(model, dict(model.named_parameters())) as tokens:
        losses = losses_of(model(IDS))
        losses.sum().backward()
        with pytest.raises(InspectionError, match=r"before losses\.sum\(\)\.backward"):
            tokens.backward(losses)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_passed_on(number: float) -> None:
    model = nn.Linear(3, 2).double()
    parameters = dict(model.named_parameters())
    x = numbers(1, 4, 3)
    x[0, 1] = number
    with TokenLossGradients(model, parameters) as tokens:
        losses = model(x).square().sum(-1)
        tokens.backward(losses)
    for name, expected in truth(parameters, losses).items():
        norms = expected.flatten(1).norm(dim=1)
        assert norms.isnan().any()
        torch.testing.assert_close(tokens[name].norm().flatten(), norms, equal_nan=True)
    assert all(each.residual != each.residual for each in tokens.coverage())  # NaN, not 0


def test_frozen_parameters_are_listed() -> None:
    model = build("linear")
    model.layer.weight.requires_grad_(False)
    tokens, _ = run(model)
    assert rules_of(tokens)["layer.weight"] == "frozen"
    assert "layer.weight" not in tokens
    assert "layer.bias" in tokens
    with pytest.raises(InspectionError, match="frozen"):
        tokens["layer.weight"]


def test_a_direction_is_reduced_while_the_chunks_pass() -> None:
    model = build("tied")
    parameters = dict(model.named_parameters())
    direction = {name: numbers(*each.shape, seed=3) for name, each in parameters.items()}
    tokens, losses = run(model, dot=direction, max_bytes=2 * needed_for_one_token(model))
    expected = truth(parameters, losses)
    total = 0
    for name, each in direction.items():
        dots = expected[name].flatten(1) @ each.flatten()
        assert_near(tokens[name].dot().flatten(), dots, name)
        total = total + dots
    assert_near(tokens.dot().flatten(), total, "all")
    kept, _ = run(model, keep="factors")
    assert_near(kept.dot(direction), tokens.dot(), "afterwards")


def test_a_pattern_takes_some_of_the_parameters() -> None:
    model = build("linear")
    tokens, _ = run(model, keep="factors", project=8)
    chosen = [tokens["layer.weight"], tokens["layer.bias"]]
    expected = torch.stack([each.norm().square() for each in chosen]).sum(0).sqrt()
    torch.testing.assert_close(tokens.norm("layer.*"), expected)
    torch.testing.assert_close(tokens.gram("layer.weight"), chosen[0].gram())
    total = torch.stack([each.project(8) for each in chosen]).sum(0)
    torch.testing.assert_close(tokens.project(8, pattern="layer.*"), total)
    with pytest.raises(LayerNotFoundError, match="'lair"):
        tokens.norm("lair.*")


def test_a_parameter_without_gradient_has_zeros() -> None:
    tokens, _ = run(build("free"))
    assert not tokens["layer.unused"].norm().any()
    assert "layer.unused" not in tokens.names
    assert tokens.coverage()["layer.unused"].rule == UNUSED


# -- the front door --------------------------------------------------------------------------


def test_beside_the_gradients_per_position() -> None:
    """Equal where no position looks at another any more, different before, the same sum."""
    model = ARCHITECTURES["llama"].build().double().eval()
    ids = tokens_of()
    with torchfmri.token_gradients(model) as positions:
        token_losses(model(ids).logits, ids, reduction="mean").sum().backward()
    with torchfmri.token_gradients(model, "*.weight", per="token_loss") as tokens:
        losses = token_losses(model(ids).logits, ids, reduction="mean")
        tokens.backward(losses, keep="factors")
    last = ["lm_head", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj"]
    for name in last:
        name = f"{name}.weight"
        assert_near(tokens[name].norm(), positions[name].norm(), name, 1e-6)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.v_proj.weight"):
        gap = (tokens[name].norm() - positions[name].norm()).abs().max()
        assert float(gap) > 0.05 * float(tokens[name].norm().max())
        assert_near(tokens[name].sum(), positions[name].sum(), name, 1e-6)
    name = "model.layers.0.mlp.up_proj.weight"
    ours = tokens[name].project(16, 3).sum((0, 1))
    assert_near(ours, positions[name].project(16, 3).sum((0, 1)), "the same map", 1e-6)


def test_compiled_models() -> None:
    model = build("linear")
    compiled = torch.compile(model, backend="eager")
    compiled(IDS)  # compiled before anybody watches
    with torchfmri.token_gradients(compiled, "layer.*", per="token_loss") as tokens:
        losses = losses_of(compiled(IDS))
        tokens.backward(losses, keep="factors")
    parameters = {f"layer.{name}": each for name, each in model.layer.named_parameters()}
    assert_all_near(tokens, truth(parameters, losses))
    assert tokens["layer.weight"].rule == "Linear"


# -- words -----------------------------------------------------------------------------------


def test_a_wrong_order_says_what_to_write() -> None:
    model = build("linear")
    parameters = dict(model.named_parameters())
    tokens = TokenLossGradients(model, parameters)
    with pytest.raises(InspectionError, match="inside the with block"):
        tokens.backward(losses_of(model(IDS)))
    with pytest.raises(InspectionError, match=r"tokens\.backward\(losses\) comes first"):
        tokens["layer.weight"]
    tokens, losses = run(model)
    with pytest.raises(InspectionError, match=r"backward\(losses, project=64\)"):
        tokens.project(64)
    with pytest.raises(InspectionError, match=r"project=64, seed=1"):
        tokens["layer.weight"].project(64, 1)
    with pytest.raises(InspectionError, match="keep='factors'"):
        tokens.gram()
    with pytest.raises(InspectionError, match="keep='factors'"):
        tokens["layer.weight"][0, 0]
    with pytest.raises(InspectionError, match="No direction"):
        tokens.dot()
    with pytest.raises(LayerNotFoundError, match=r"layer\.weight"):
        tokens["layer.wieght"]
    with TokenLossGradients(model, parameters) as tokens:
        losses = losses_of(model(IDS))
        with pytest.raises(InspectionError, match=r"one loss per token.*token_losses"):
            tokens.backward(losses.sum())
        with pytest.raises(InspectionError, match="no graph"):
            tokens.backward(losses.detach())
        with pytest.raises(InspectionError, match="'gradients'"):
            tokens.backward(losses, keep="gradients")
        with pytest.raises(InspectionError, match=r"\(3,\).*\(6, 6\)"):
            tokens.backward(losses, dot={"layer.weight": torch.zeros(3)})


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFMRI", "off")
    model = build("linear")
    with TokenLossGradients(model, dict(model.named_parameters())) as tokens:
        assert not any(each._forward_hooks for each in model.modules())
        tokens.backward(losses_of(model(IDS)))
    with pytest.raises(InspectionError, match="TORCHFMRI=off"):
        tokens.norm()
