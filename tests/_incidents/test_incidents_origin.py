"""The origin of a non-finite value: each planted fault is named with operation, layer and line."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchfmri._incidents.origin import find_origin

ROWS = 6


def line_of(marker: str) -> str:
    """Where this file carries the comment `# here: marker`."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    found = [i + 1 for i, line in enumerate(lines) if line.endswith(f"# here: {marker}")]
    assert len(found) == 1
    return f"{Path(__file__).name}:{found[0]}"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 4), torch.arange(ROWS) % 3


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


class Rooted(nn.Module):
    """Takes the root of a square, whose derivative at 0 is 0 * inf."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.last, self.factor = nn.Linear(4, 4), nn.Linear(4, 1), factor

    def forward(self, x: Tensor) -> Tensor:
        squares = (self.first(x) * self.factor) ** 2
        return self.last(torch.sqrt(squares))  # here: root


class Nested(nn.Module):
    def __init__(self, factor: float, reentrant: bool | None = None) -> None:
        super().__init__()
        self.start, self.body, self.reentrant = nn.Linear(4, 4), Rooted(factor), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Attention(nn.Module):
    def __init__(self, half: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)
        self.half_precision, self.factor = half, factor

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k = self.q(x) * self.factor, self.k(x) * self.factor
        if self.half_precision:
            q, k = q.half(), k.half()
        scores = q @ k.T  # here: scores
        scores = scores.masked_fill(mask, -math.inf)
        return torch.softmax(scores.float(), -1) @ x  # here: softmax


def causal_mask() -> Tensor:
    return torch.triu(torch.ones(ROWS, ROWS, dtype=torch.bool), 1)


# -- data, weights, update -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_sample_is_named(value: float) -> None:
    model, (x, y) = network(), inputs()
    x[3, 1] = value
    finding = find_origin(
        lambda: F.cross_entropy(model(x), y), model, {"pixels": x, "labels": y}, step=7
    )
    assert finding is not None
    assert (finding.problem, finding.phase, finding.step) == ("nonfinite_data", "data", 7)
    assert finding.layers == ()
    assert finding.evidence["rows"] == [3]
    assert finding.evidence["element"] == [3, 1]
    assert "'pixels'" in finding.text
    assert "sample 3" in finding.text


def test_bad_data_that_the_step_takes_care_of_is_no_origin() -> None:
    model, (x, y) = network(), inputs()
    x[3, 1] = math.nan
    assert find_origin(lambda: F.cross_entropy(model(x.nan_to_num()), y), model, x) is None


def test_bad_data_beside_another_cause() -> None:
    """What is harmless is not named, though it comes first."""
    model, (x, y) = network(), inputs()
    x[3, 1] = math.nan

    def run() -> Tensor:
        logits = model(x.nan_to_num())
        return (logits - logits).log().mean() + F.cross_entropy(logits, y)  # here: other cause

    finding = find_origin(run, model, x)
    assert finding is not None
    assert finding.problem == "nonfinite_loss"
    assert finding.evidence["line"] == line_of("other cause")


def test_weights_and_updates() -> None:
    model, (x, y) = network(), inputs()
    with torch.no_grad():
        model[2].weight[1, 2] = math.inf

    def run() -> Tensor:
        return F.cross_entropy(model(x), y)

    finding = find_origin(run, model, x, step=5)
    assert finding is not None
    assert (finding.problem, finding.layers, finding.step) == ("nonfinite_weights", ("2",), 5)
    assert finding.evidence["parameter"] == "2.weight"
    assert finding.evidence["element"] == [1, 2]
    after = find_origin(run, model, x, step=5, after_update=True)
    assert after is not None
    # The update belongs to the step before.
    assert (after.problem, after.phase, after.step) == ("nonfinite_update", "optimizer", 4)


def test_an_update_by_a_real_optimizer() -> None:
    model, (x, y) = network(), inputs()
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0)  # 0 / 0 where there is no gradient
    F.cross_entropy(model(x * 0), y).backward()
    optimizer.step()
    run = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    finding = find_origin(run, model, x, step=1, after_update=True)
    assert finding is not None
    bad = [name for name, each in model.named_parameters() if not each.isfinite().all()]
    assert finding.evidence["parameters"] == bad
    assert set(finding.layers) == {name.partition(".")[0] for name in bad}


# -- the loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_log_of_an_underflowed_probability(factor: float) -> None:
    model, (x, y) = network(), inputs()

    def run() -> Tensor:
        probabilities = torch.softmax(model(x) * factor, -1)
        return -probabilities.log()[range(ROWS), y].mean()  # here: log

    finding = find_origin(run, model, (x, y), step=0)
    if factor == 1.0:
        assert finding is None
        return
    assert finding is not None
    assert (finding.problem, finding.phase, finding.layers) == ("nonfinite_loss", "loss", ())
    assert finding.evidence["operation"] == "log"
    assert finding.evidence["line"] == line_of("log")
    assert "in the loss at step 0 (forward was finite)" in finding.text
    assert "probability that underflowed to 0" in finding.text
    assert "cross_entropy" in finding.advice


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda z: (z - z.detach().max() - 1).log(), "log of a negative number"),
        (lambda z: z / (z.detach() * 0), "zeros in the denominator"),
        (lambda z: (z.detach().abs() + 1).neg().sqrt() * z, "sqrt of a negative number"),
        (lambda z: (z * 0 + 1e3).exp(), "float32 ends at exp(88.7)"),
        (lambda z: (z * 0 + 7e4).half(), "does not fit into float16"),
        (lambda z: (z * 0 + 2).acos(), "outside where it is finite"),
        (lambda z: (z * 0 - 2) ** 0.5, "fractional power of a negative number"),
        (lambda z: z * torch.full_like(z, math.inf) * 0, "infinities"),
    ],
)
def test_other_operations_in_the_loss(compute: Callable[[Tensor], Tensor], words: str) -> None:
    model, (x, _) = network(), inputs()
    finding = find_origin(lambda: compute(model(x)).float().mean(), model, x)
    assert finding is not None
    assert finding.problem == "nonfinite_loss"
    assert words in finding.text


def test_entropy_of_a_masked_distribution() -> None:
    """The mask is no fault; 0 * -inf is."""
    model, (x, _) = network(), inputs()

    def run() -> Tensor:
        logits = model(x).masked_fill(torch.tensor([True, False, False]), -math.inf)
        logs = F.log_softmax(logits, -1)
        return -(logs.exp() * logs).sum()  # here: entropy

    finding = find_origin(run, model, x)
    assert finding is not None
    assert finding.evidence["operation"] == "mul"
    assert finding.evidence["line"] == line_of("entropy")


# -- forward -------------------------------------------------------------------------------------


def test_masks_are_no_fault() -> None:
    model, (x, _) = Attention(), inputs()
    mask = causal_mask()
    assert find_origin(lambda: model(x, mask).sum(), model, (x, mask)) is None
    floats = torch.zeros(ROWS, ROWS).masked_fill(mask, -math.inf)
    q = torch.randn(2, 2, ROWS, 4)
    linear = nn.Linear(4, 4)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(linear(q), q, q, attn_mask=floats).sum()

    assert find_origin(attend, linear, {"q": q, "mask": floats}) is None


def test_a_row_that_is_masked_entirely() -> None:
    model, (x, _) = Attention(), inputs()
    mask = causal_mask()
    mask[4] = True
    finding = find_origin(lambda: model(x, mask).sum(), model, x)
    assert finding is not None
    assert finding.problem == "nonfinite_forward"
    assert finding.evidence["line"] == line_of("softmax")
    assert finding.evidence["element"] == [4, 0]
    assert "every entry is -inf" in finding.text


@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_half_precision_overflow_is_where_it_began(factor: float) -> None:
    model, (x, _) = Attention(half=True, factor=factor), inputs()
    finding = find_origin(lambda: model(x, causal_mask()).sum(), model, x)
    if factor == 1.0:
        assert finding is None
        return
    assert finding is not None
    assert finding.evidence["operation"] == "mm"
    assert finding.evidence["line"] == line_of("scores")
    assert "float16" in finding.text
    assert "becomes NaN in softmax" in finding.text


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.std(1, keepdim=True)  # here: spread


def test_layer_element_and_sample_in_the_forward_pass() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(Odd(), nn.Linear(4, 2)))
    x, _ = inputs()
    x[2] = 1.5  # no spread: 1.5 / 0
    finding = find_origin(lambda: model(x).sum(), model, x)
    assert finding is not None
    assert (finding.problem, finding.layers) == ("nonfinite_forward", ("1.0",))
    assert finding.evidence["element"] == [2, 0]
    assert finding.evidence["rows"] == [2]
    assert finding.evidence["line"] == line_of("spread")
    assert "sample 2 of the batch" in finding.text


def test_without_a_loss_the_output_is_judged() -> None:
    model, (x, _) = network(), inputs()
    assert find_origin(lambda: model(x), model, x) is None
    masked = nn.Sequential(network(), Masked())
    assert find_origin(lambda: masked(x), masked, x) is None
    bad = nn.Sequential(network(), Logarithm())
    finding = find_origin(lambda: bad(x), bad, x)
    assert finding is not None
    assert finding.layers == ("1",)


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(torch.tensor([True, False, False]), -math.inf)


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).log()


# -- backward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_derivative_of_a_root_at_zero(factor: float, reentrant: bool | None) -> None:
    model, (x, _) = Nested(factor, reentrant), inputs()
    finding = find_origin(lambda: model(x).sum(), model, x, step=3)
    if factor:
        assert finding is None
        return
    assert finding is not None
    assert (finding.problem, finding.phase) == ("nonfinite_backward", "backward")
    assert finding.layers == ("body",)
    assert finding.evidence["operation"] == "sqrt"
    assert finding.evidence["line"] == line_of("root")
    assert "(the loss was finite)" in finding.text


def test_the_branch_that_where_does_not_take() -> None:
    model, (x, _) = network(), inputs()
    keep = torch.ones(ROWS)
    keep[0] = 0

    def run() -> Tensor:
        z = model(x)[:, 0] * keep
        return torch.where(z != 0, z.abs().log(), torch.zeros(())).sum()  # here: where

    finding = find_origin(run, model, x)
    assert finding is not None
    assert (finding.problem, finding.layers) == ("nonfinite_backward", ())
    assert finding.evidence["operation"] == "log"
    assert finding.evidence["line"] == line_of("where")


class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (g - g)  # here: function


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Faulty.apply(x)  # type: ignore[no-any-return]


def test_a_backward_written_in_python() -> None:
    model, (x, _) = nn.Sequential(nn.Linear(4, 4), Own()), inputs()
    finding = find_origin(lambda: model(x).sum(), model, x)
    assert finding is not None
    assert (finding.problem, finding.layers) == ("nonfinite_backward", ("1",))
    assert finding.evidence["line"] == line_of("function")


def test_a_step_that_runs_its_own_backward() -> None:
    model, (x, _) = Nested(0.0), inputs()

    def run() -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    finding = find_origin(run, model, x)
    assert finding is not None
    assert finding.evidence["line"] == line_of("root")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_that_stops_itself() -> None:
    model, (x, _) = network(), inputs()

    def run() -> Tensor:
        loss = (model(x) * 0 - 1).log().mean()
        if loss.isnan():
            raise FloatingPointError("NaN")
        return loss

    finding = find_origin(run, model, x)
    assert finding is not None
    assert finding.problem == "nonfinite_loss"
    with pytest.raises(ZeroDivisionError):  # an error that is not about this passes through
        find_origin(lambda: 1 / 0, model, x)


# -- precision, compilation ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    model, (x, y) = network(), inputs()

    def run(factor: float) -> Tensor:
        with torch.autocast("cpu", dtype):
            hidden = model[1](model[0](x * factor))
            return F.cross_entropy(model[2](hidden).float(), y)

    assert find_origin(lambda: run(1.0), model, x) is None
    if dtype == torch.float16:
        finding = find_origin(lambda: run(1e5), model, x)
        assert finding is not None
        assert finding.layers == ("0",)
        assert finding.evidence["dtype"] == "float16"


def test_compiled_code_is_run_eagerly() -> None:
    model, (x, _) = Nested(0.0), inputs()
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    finding = find_origin(lambda: compiled(x).sum(), compiled, x)  # type: ignore[arg-type]
    assert finding is not None
    assert finding.layers == ("body",)
    assert finding.evidence["line"] == line_of("root")
    torch.compiler.reset()


def test_float64_is_searched_like_float32() -> None:
    model, (x, _) = Nested(0.0).double(), inputs()
    finding = find_origin(lambda: model(x.double()).sum(), model, x)
    assert finding is not None
    assert finding.evidence["dtype"] == "float64"


# -- traces --------------------------------------------------------------------------------------


def test_no_trace_is_left() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Rooted(0.0))
    x, _ = inputs()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    kept = [(each.grad, each.grad.clone()) for each in model.parameters()]  # type: ignore[union-attr]
    state = {name: each.clone() for name, each in model.state_dict().items()}
    random = torch.get_rng_state()
    assert find_origin(lambda: model(x).sum(), model, x) is not None
    assert torch.equal(torch.get_rng_state(), random)
    for parameter, (gradient, values) in zip(model.parameters(), kept, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, values)  # type: ignore[arg-type]
        assert not parameter._backward_hooks
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["qwen3-moe", "t5", "whisper", "mamba"])
def test_healthy_models_have_no_origin(name: str) -> None:
    """Masks of -inf, padding, idle experts, dropout."""
    pytest.importorskip("transformers")
    from architectures import ARCHITECTURES

    architecture = ARCHITECTURES[name]
    batch = architecture.batch()
    for attention in architecture.attention or (None,):
        model = architecture.build(attention)
        assert find_origin(lambda m=model, b=batch: m(**b), model, batch) is None


def test_uninitialised_memory_is_not_looked_at() -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            room = torch.empty(1_000_000)
            room.fill_(math.nan)  # whatever was there
            del room
            out = torch.empty(x.shape)
            out[:] = 0
            return out + x

    model, (x, _) = nn.Sequential(nn.Linear(4, 4), Filled()), inputs()
    assert find_origin(lambda: model(x).sum(), model, x) is None


def test_each_function_is_said_to_be_steep_where_it_is() -> None:
    model = nn.Linear(3, 3)

    def born(function: Callable[[Tensor], Tensor], at: float) -> str:
        found = find_origin(lambda: function(model(torch.zeros(2, 3)) * 0 + at).sum(), model)
        assert found is not None
        return found.text

    assert "acos is infinite at -1 and 1" in born(torch.acos, 1.0)
    assert "sqrt is infinite at 0" in born(torch.sqrt, 0.0)
