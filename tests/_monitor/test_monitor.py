"""The Monitor: exact, invisible to training, and never in its way."""

import copy
import gc
import math
import resource
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchfmri._monitor import collector, plan, step_hooks, watched_step
from torchfmri._monitor import monitor as _monitor
from torchfmri._monitor.monitor import Monitor, MonitorWarning
from torchfmri._records.history import Series
from torchfmri.exceptions import InspectionError, LayerNotFoundError
from torchfmri.integrations.writers import WandbWriter

BOTH = ("activations", "gradients")


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 5,
    monitor: Monitor | None = None,
    seed: int = 1,
) -> list[float]:
    """A loop as people write it; with a monitor, each step is inside `monitor.step()`."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 4, generator=generator)

        def one(x: Tensor = x) -> Tensor:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        if monitor is None:
            losses.append(float(one().detach()))
        else:
            with monitor.step() as step:
                loss = one()
                step.loss(loss)
                losses.append(float(loss.detach()))
    return losses


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = sum(len(getattr(each, kind)) for each in model.modules() for kind in kinds)
    return on_modules + sum(len(each._backward_hooks or ()) for each in model.parameters())


def global_hooks() -> int:
    found = sys.modules["torch.optim.optimizer"]
    return len(found._global_optimizer_pre_hooks) + len(found._global_optimizer_post_hooks)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = global_hooks()
    yield
    gc.collect()
    assert global_hooks() == before


class Collected:
    """Clones of everything that a Monitor should see, taken by hand."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[Series, list[Tensor]] = defaultdict(list)
        self.model = model
        self.handles = []
        for name, module in model.named_modules():
            if not list(module.children()):
                self.handles.append(module.register_forward_hook(self.hook(name)))

    def hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: Tensor) -> None:
            if not torch.is_grad_enabled():
                return
            self.found[Series(name, "activations")].append(output.detach().clone())
            keep = self.found[Series(name, "gradients")]
            output.register_hook(lambda gradient: keep.append(gradient.clone()))

        return hook

    def parameters(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.found[Series(name, "parameters")] = [parameter.detach().clone()]
            if parameter.grad is not None:
                self.found[Series(name, "parameter_gradients")] = [parameter.grad.clone()]

    def take(self) -> dict[Series, Tensor]:
        taken = {
            series: torch.cat([each.reshape(-1) for each in tensors]).double()
            for series, tensors in self.found.items()
        }
        self.found.clear()
        return taken


def assert_exact(monitor: Monitor, expected: list[dict[Series, Tensor]]) -> None:
    history = monitor.history
    assert len(history) == len(expected)
    assert {*history.series} == {series for step in expected for series in step}
    for position, step in enumerate(expected):
        for series, values in step.items():
            found = history.statistics(*series, position)
            assert found.count == values.numel(), series
            assert found.zero == int((values == 0).sum())
            assert found.min == float(values.min())
            assert found.max == float(values.max())
            scale = float(values.square().mean().sqrt()) or 1.0
            assert abs(found.mean - float(values.mean())) <= 1e-6 * scale
            assert math.isclose(
                found.std, float(values.std(unbiased=False)), rel_tol=1e-6, abs_tol=1e-7 * scale
            )
            assert math.isclose(
                history.values(*series, "rms")[position], scale, rel_tol=1e-6, abs_tol=1e-12
            )


# -- exact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("attach", [False, True])
def test_every_step_and_layer_equals_what_was_collected_by_hand(attach: bool) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    by_hand = Collected(model)
    monitor = Monitor(model, optimizer, what=plan.WHAT)
    expected, ratios = [], []
    if attach:
        monitor.attach()
    for number in range(4):
        with monitor.step() if not attach else warnings.catch_warnings():
            # The batch changes its shape, and is accumulated from two parts.
            for part in range(2):
                loss = model(torch.randn(3 + number, 5 + part, 4)).square().mean()
                monitor.loss(loss)
                loss.backward()
            by_hand.parameters()
            before = {name: each.detach().clone() for name, each in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        ratios.append(
            {
                name: float((each.detach() - before[name]).norm() / before[name].norm())
                for name, each in model.named_parameters()
            }
        )
        expected.append(by_hand.take())
    monitor.detach()
    assert_exact(monitor, expected)
    for position, step in enumerate(ratios):
        for name, ratio in step.items():
            found = monitor.history.update_ratio(name)[position]
            assert math.isclose(found, ratio, rel_tol=1e-5)
    assert list(monitor.history.steps) == [0, 1, 2, 3]
    assert np.isfinite(monitor.history.loss).all()


def test_series_are_in_model_order() -> None:
    model = make_model()
    monitor = Monitor(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, monitor)
    assert monitor.history.matrix("gradients")[0] == ["0", "1", "2"]
    assert monitor.history.matrix("parameters")[0] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_histogram_gives_quantiles_of_recent_steps() -> None:
    model = make_model()
    monitor = Monitor(model, histogram=True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 20, monitor)
    assert monitor.history.statistics("0").quantiles is not None
    assert monitor.history.statistics("0", step=0).histogram is None
    assert monitor.history.statistics("0", step=0).count == 16 * 8


@pytest.mark.parametrize("histogram", [False, True])
def test_training_is_bit_identical(histogram: bool) -> None:
    def run(watch: bool) -> tuple[list[float], list[Tensor], Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.3), nn.GELU(), nn.Linear(32, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        monitor = Monitor(model, optimizer, histogram=histogram) if watch else None
        losses = train(model, optimizer, 5, monitor)
        return losses, [each.detach().clone() for each in model.parameters()], torch.rand(4)

    plain, watched = run(False), run(True)
    assert plain[0] == watched[0]
    assert all(torch.equal(one, two) for one, two in zip(plain[1], watched[1], strict=True))
    assert torch.equal(plain[2], watched[2])


def test_padding_is_left_out() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 6), nn.Linear(6, 2)

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.head(self.embed(input_ids))

    torch.manual_seed(0)
    model = Tokens()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    monitor = Monitor(model, what=BOTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    handle = model.head.register_forward_hook(lambda *args: seen.append(args[2]))
    with monitor.step():
        model(torch.randint(0, 10, (2, 5)), attention_mask=mask).square().sum().backward()
        optimizer.step()
    handle.remove()
    kept = seen[0].detach()[mask.bool()].double()
    for what, factor in (("activations", 1), ("gradients", 2)):
        found = monitor.history.statistics("head", what)
        assert found.count == kept.numel() == 16
        assert math.isclose(found.mean, factor * float(kept.mean()), rel_tol=1e-5, abs_tol=1e-7)
        assert found.positions == (8, 10)


# -- following the loop --------------------------------------------------------------------------


def test_attach_and_step_see_the_same() -> None:
    found = []
    for attach in (False, True):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = Monitor(model, optimizer)
        if attach:
            with monitor:
                train(model, optimizer)
        else:
            train(model, optimizer, monitor=monitor)
        assert hooks_of(model) == 0
        found.append(monitor.history.matrix("gradients", "rms")[1])
    assert np.array_equal(*found)


def test_skipped_steps_carry_no_hooks() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, every=3)
    hooks, optimizer_hooks = [], []

    def look() -> None:
        hooks.append(hooks_of(model))
        optimizer_hooks.append(global_hooks())

    for _ in range(6):
        with monitor.step() as step:
            look()
            assert step.watched == bool(hooks[-1])
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    assert [bool(each) for each in hooks] == [True, False, False, True, False, False]
    assert [bool(each) for each in optimizer_hooks] == [bool(each) for each in hooks]
    hooks.clear()
    with Monitor(model, every=3):
        for _ in range(6):
            look()
            train(model, optimizer, 1)
    assert [bool(each) for each in hooks] == [True, False, False, True, False, False]
    assert list(monitor.history.steps) == [0, 3]
    assert hooks_of(model) == 0


def test_evaluation_between_steps_is_not_part_of_one() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer) as monitor:
        for _ in range(3):
            train(model, optimizer, 1)
            with torch.no_grad():
                model(torch.full((64, 4), 1e6))
            with torch.inference_mode():
                model[0](torch.full((64, 4), 1e6))
    assert set(monitor.history.values("0", field="count")) == {16.0 * 8}
    assert monitor.history.values("0", field="max").max() < 100


def test_several_optimizers_the_last_one_ends_the_step() -> None:
    model = make_model()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(model[2].parameters(), lr=0.1)
    with Monitor(model, [first, second]) as monitor:
        for _ in range(3):
            model(torch.randn(8, 4)).square().mean().backward()
            first.step()
            second.step()
            model.zero_grad()
    assert list(monitor.history.steps) == [0, 1, 2]
    assert set(monitor.history.values("0", field="count")) == {64.0}
    assert (monitor.history.update_ratio("0.weight") > 0).all()
    assert (monitor.history.update_ratio("2.weight") > 0).all()
    # Both optimizers look at all parameters; each was counted once per look.
    assert set(monitor.history.values("0.weight", "parameter_gradients", "count")) == {32.0}


def test_another_models_optimizer_is_not_ours() -> None:
    model, other = make_model(), make_model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model) as monitor:
        for _ in range(2):
            train(other, torch.optim.SGD(other.parameters(), lr=0.1), 2)
            train(model, optimizer, 1)
    assert len(monitor.history) == 2


def test_optimizer_with_closure() -> None:
    found = []
    for use_closure in (False, True):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(8, 4)

        def closure(model: nn.Module = model, optimizer: Any = optimizer, x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        with Monitor(model) as monitor:
            for _ in range(3):
                if use_closure:
                    assert isinstance(optimizer.step(closure), Tensor)
                else:
                    closure()
                    optimizer.step()
        history = monitor.history
        found.append([history.matrix(what, "rms")[1] for what in plan.WHAT])
        assert (history.values("0.weight", "parameter_gradients", "rms") > 0).all()
    for one, two in zip(*found, strict=True):
        assert np.array_equal(one, two)
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    with Monitor(model, optimizer) as monitor:
        optimizer.step(lambda: closure(model, optimizer, x))
    assert len(monitor.history) == 1
    assert monitor.history.statistics("0").count > 64  # several evaluations, merged


def test_a_step_that_raises_is_not_recorded() -> None:
    model = make_model()
    monitor = Monitor(model)
    with pytest.raises(ZeroDivisionError), monitor.step():
        model(torch.randn(2, 4)) / (1 // 0)
    assert hooks_of(model) == 0
    assert len(monitor.history) == 0
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, monitor)
    assert len(monitor.history) == 2


def test_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFMRI", "off")
    model = make_model()
    monitor = Monitor(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, monitor)
    with monitor:
        assert hooks_of(model) == 0
    assert len(monitor.history) == 0


def test_deepcopy_and_save_while_attached(tmp_path: Any) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer) as monitor:
        train(model, optimizer, 1)
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        copy.deepcopy(optimizer)
        train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 3)
        train(model, optimizer, 1)
    assert len(monitor.history) == 2
    assert set(monitor.history.values("0", field="count")) == {128.0}
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    train(loaded, torch.optim.SGD(loaded.parameters(), lr=0.1), 1)
    assert len(monitor.history) == 2


def test_misuse_is_explained() -> None:
    model = make_model()
    with pytest.raises(InspectionError, match="every=0"):
        Monitor(model, every=0)
    with pytest.raises(InspectionError, match="what='weights': a Monitor can watch"):
        Monitor(model, what="weights")
    with pytest.raises(InspectionError, match=r"what=\(\): a Monitor can watch"):
        Monitor(model, what=())
    with pytest.raises(InspectionError, match=r"is not a torch\.optim\.Optimizer"):
        Monitor(model, ["adam"])  # type: ignore[list-item]
    with pytest.raises(InspectionError, match=r"nn\.Module, not int"):
        Monitor(3)  # type: ignore[arg-type]
    with pytest.raises(LayerNotFoundError, match="encoder"):
        Monitor(model, watch="encoder.*")
    monitor = Monitor(model)
    assert monitor.table().startswith("No step was watched")
    with pytest.raises(InspectionError, match=r"every=1\.5"):
        Monitor(model, every=1.5)  # type: ignore[arg-type]
    with pytest.raises(InspectionError, match=r"step\.loss\(loss\)"):
        Monitor(model, loss=nn.functional.mse_loss)  # type: ignore[arg-type]
    with pytest.raises(InspectionError, match="A writer is a function"):
        monitor.add_writer(monitor)  # type: ignore[arg-type]
    with pytest.raises(InspectionError, match="optimizer='sgd'"):
        Monitor(model, "sgd")  # type: ignore[arg-type]
    with monitor:
        with pytest.raises(InspectionError, match="either attach"), monitor.step():
            pass
        with pytest.raises(InspectionError, match="attached already"):
            monitor.attach()
    with (
        monitor.step(),
        pytest.raises(InspectionError, match="in a step already"),
        monitor.step(),
    ):
        pass


# -- the loss ------------------------------------------------------------------------------------


def test_loss_is_seen_in_three_ways() -> None:
    class Output(dict[str, Tensor]):
        pass

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Output:
            return Output(loss=self.fc(x).square().mean())

    x = torch.randn(8, 4)
    model = WithLoss()
    monitor = Monitor(model)
    with monitor.step():
        model(x)["loss"].backward()
    assert monitor.history.loss[0] == pytest.approx(float(model(x)["loss"].detach()))

    plain, criterion = make_model(), nn.MSELoss()
    monitor = Monitor(plain, loss=criterion)
    with monitor.step():
        loss = criterion(plain(x), torch.zeros(8, 3))
        loss.backward()
    assert monitor.history.loss[0] == pytest.approx(float(loss.detach()))

    monitor = Monitor(plain)
    with monitor.step() as step:
        for part in (1.0, 2.0):
            step.loss(torch.tensor(part))
    assert monitor.history.loss[0] == 1.5


def test_loss_not_seen_is_said() -> None:
    model = make_model()
    monitor = Monitor(model)
    with monitor.step():
        model(torch.randn(2, 4)).sum().backward()
    assert math.isnan(monitor.history.loss[0])
    assert "loss not seen" in monitor.table()
    assert "loss not seen" in repr(monitor.history)


def test_a_loss_that_is_nan_was_seen(tmp_path: Any) -> None:
    model = nn.Linear(4, 1)
    monitor = Monitor(model)
    rows: list[dict[str, float]] = []
    monitor.add_writer(WandbWriter(SimpleNamespace(log=rows.append), histograms=False, images=0))
    for factor in (1.0, math.nan):
        with monitor.step() as step:
            step.loss(model(torch.randn(2, 4)).sum() * factor)
    assert "loss nan" in monitor.table()
    assert "loss nan" in repr(monitor.history)
    assert "not seen" not in monitor.table() + repr(monitor.history[1])
    assert [math.isnan(row["torchfmri/loss"]) for row in rows] == [False, True]
    written = monitor.export(tmp_path / "history.csv").read_text().splitlines()
    assert written[-1].endswith(",nan")
    assert [each.problem for each in monitor.findings] == ["nonfinite_loss"]


def test_parameters_of_layers_that_are_no_leaves() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 16), layer)
    model.register_parameter("token", nn.Parameter(torch.randn(1, 1, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer)
    with monitor.step():
        (model(torch.randn(2, 3, 4)) + model.token).square().mean().backward()
        optimizer.step()
    history = monitor.history
    everything = {name for name, _ in model.named_parameters()}
    for what in ("parameters", "parameter_gradients", "updates"):
        assert set(history.matrix(what, "rms")[0]) == everything
    gradient = history.statistics("1.self_attn.in_proj_weight", "parameter_gradients")
    assert gradient.l2 == pytest.approx(layer.self_attn.in_proj_weight.grad.norm().item())
    names = history.matrix("parameters", "rms")[0]
    assert names.index("1.self_attn.in_proj_weight") < names.index("1.linear1.weight")
    assert history.missing == {}


# -- mixed precision -----------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("attach", [False, True])
def test_gradients_are_reported_unscaled(fused: bool, attach: bool) -> None:
    found = []
    for use_scaler in (False, True):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=2, enabled=use_scaler)
        monitor = Monitor(model, optimizer, scaler=scaler if use_scaler else None)
        generator = torch.Generator().manual_seed(0)
        if attach:
            monitor.attach()
        for _ in range(5):
            with monitor.step() if not attach else warnings.catch_warnings():
                loss = model(torch.randn(8, 4, generator=generator)).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        monitor.detach()
        history = monitor.history
        found.append(
            [history.matrix(w, "rms")[1] for w in ("gradients", "parameter_gradients", "updates")]
        )
    for plain, scaled in zip(*found, strict=True):
        assert np.allclose(plain, scaled, rtol=1e-5)
    assert history.scalar("gradient_scale").tolist() == [1024.0, 1024.0, 2048.0, 2048.0, 4096.0]
    assert "divided by the loss scale" in monitor.table()


def test_a_step_that_the_scaler_skips_is_a_step_of_its_own() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    with Monitor(model, optimizer, scaler=scaler) as monitor:
        for number in range(3):
            loss = model(torch.randn(8, 4)).square().mean() * (math.inf if number == 1 else 1.0)
            monitor.loss(loss)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    history = monitor.history
    assert list(history.steps) == [0, 1, 2]
    assert history.scalar("optimizer_skipped").tolist()[1] == 1.0
    assert history.scalar("gradient_scale").tolist() == [1024.0, 1024.0, 512.0]
    assert set(history.values("0", field="count")) == {64.0}
    assert history.values("2", "gradients", "inf")[1] + history.values("2", "gradients", "nan")[1]
    assert np.isfinite(history.loss).tolist() == [True, False, True]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_step_that_the_scaler_skips_says_so(fused: bool, attach: bool, inside: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    monitor = Monitor(model, optimizer, scaler=scaler)
    if attach:
        monitor.attach()
    for number in range(5):
        with monitor.step() if not attach else warnings.catch_warnings():
            loss = model(torch.randn(8, 4)).square().mean() * (math.inf if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            if inside:
                scaler.update()
            optimizer.zero_grad()
        if not inside:
            scaler.update()
    monitor.detach()
    skipped = monitor.history.scalar("optimizer_skipped")
    assert (skipped == 1).tolist() == [False, False, True, False, False]


def test_micro_batches_are_no_skipped_steps() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    monitor = Monitor(model, optimizer, scaler=scaler, on_nonfinite="raise")
    for number in range(40):
        with monitor.step():
            scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
            if number % 20 == 19:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    assert not (monitor.history.scalar("optimizer_skipped") == 1).any()
    assert monitor.incidents == []


def test_autocast() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer) as monitor, torch.autocast("cpu", torch.bfloat16):
        train(model, optimizer, 2)
    assert monitor.history.statistics("0").dtype == "bfloat16"
    assert monitor.history.statistics("0.weight", "parameters").dtype == "float32"


# -- checkpoints, shapes, compilation ------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(4, 8), make_body()
            self.use_checkpoint = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.head(x)
            if self.use_checkpoint:
                return checkpoint(self.body, x, use_reentrant=reentrant)
            return self.body(x)

    def make_body() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    found = []
    for use_checkpoint in (False, True):
        torch.manual_seed(0)
        model = Net()
        model.use_checkpoint = use_checkpoint
        monitor = Monitor(model)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, monitor)
        history = monitor.history
        found.append({s: history.values(*s, "l2").tolist() for s in history.series})
        counts = {s: history.values(*s, "count").tolist() for s in history.series}
        assert counts[Series("body.0", "activations")] == [128.0] * 3
        assert counts[Series("body.0", "gradients")] == [128.0] * 3
    assert found[0] == found[1]


def test_compiled_model_runs_compiled_on_unwatched_steps() -> None:
    calls, compilations = [], []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        compilations.append(graph)

        def run(*args: Any) -> Any:
            calls.append(1)
            return graph.forward(*args)

        return run

    torch._dynamo.reset()
    model = make_model()
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(compiled, optimizer, every=3, histogram=True)  # which no graph takes
    per_step = []
    for _ in range(7):
        before = len(calls)
        train(compiled, optimizer, 1, monitor)
        per_step.append(len(calls) - before)
    assert per_step == [0, 1, 1, 0, 1, 1, 0]
    assert len(compilations) == 1
    assert list(monitor.history.steps) == [0, 3, 6]
    assert set(monitor.history.values("0", "gradients", "count")) == {128.0}
    assert any("eagerly" in note for note in monitor.history.notes)
    torch._dynamo.reset()


# -- failures ------------------------------------------------------------------------------------


def fail(*_: object, **__: object) -> None:
    raise ValueError("injected")


def fail_begin(patch: pytest.MonkeyPatch, monitor: Monitor) -> None:
    patch.setattr(_monitor, "WatchedStep", fail)


def fail_hook(patch: pytest.MonkeyPatch, monitor: Monitor) -> None:
    patch.setattr(collector.Collector, "add", fail)


def fail_gradient(patch: pytest.MonkeyPatch, monitor: Monitor) -> None:
    patch.setattr(watched_step.WatchedStep, "read_scale", fail)


def fail_optimizer(patch: pytest.MonkeyPatch, monitor: Monitor) -> None:
    patch.setattr(watched_step.WatchedStep, "before_update", fail)


def fail_after_optimizer(patch: pytest.MonkeyPatch, monitor: Monitor) -> None:
    patch.setattr(watched_step.WatchedStep, "after_update", fail)


def fail_end(patch: pytest.MonkeyPatch, monitor: Monitor) -> None:
    patch.setattr(watched_step.WatchedStep, "finish", fail)


def fail_read(patch: pytest.MonkeyPatch, monitor: Monitor) -> None:
    patch.setattr(watched_step.WatchedStep, "read", fail)


def fail_loss(patch: pytest.MonkeyPatch, monitor: Monitor) -> None:
    patch.setattr(step_hooks, "own_loss", fail)


def fail_writer(patch: pytest.MonkeyPatch, monitor: Monitor) -> None:
    monitor.add_writer(fail)


FAILURES = [
    *(fail_begin, fail_hook, fail_gradient, fail_optimizer, fail_after_optimizer, fail_end),
    *(fail_read, fail_loss, fail_writer),
]


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("inject", FAILURES, ids=lambda each: each.__name__)
def test_a_failure_detaches_with_one_warning(
    inject: Callable[..., None], attach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = make_model()
    expected = train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 4)
    monitor = Monitor(model, optimizer)
    inject(monkeypatch, monitor)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if attach:
            monitor.attach()
        losses = train(model, optimizer, 4, None if attach else monitor)
    (said,) = [each for each in caught if each.category is MonitorWarning]
    assert "training goes on. ValueError: injected" in str(said.message)
    assert losses == expected
    assert hooks_of(model) == 0
    assert "stopped" in repr(monitor)
    assert len(monitor.history) <= 1


def test_a_tensor_that_cannot_be_read_is_noted_and_nothing_stops() -> None:
    class Meta(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to("meta")

    model = nn.ModuleDict({"fc": nn.Linear(4, 4), "meta": Meta()})
    monitor = Monitor(model, what=BOTH)
    with monitor.step():
        output = model["fc"](torch.randn(2, 4))
        model["meta"](output)
        output.sum().backward()
    assert "meta device" in monitor.history.missing["meta"]
    assert monitor.history.statistics("fc", "gradients").count == 8


# -- output --------------------------------------------------------------------------------------


def test_table_export_and_repr(tmp_path: Any) -> None:
    model = make_model()
    monitor = Monitor(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, monitor)
    table = monitor.table()
    assert "step 2 of Sequential; loss" in table
    assert "update / weight: median" in table
    assert monitor.export(tmp_path / "history.csv").read_text().count("\n") > 10
    assert "3 layers, not attached, 3 steps" in repr(monitor)


def test_a_folded_table_says_how_a_monitor_shows_all_rows() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
    monitor = Monitor(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, monitor)
    assert "All rows: monitor.table(fold=False)." in " ".join(monitor.table().split())
    rows = monitor.table(fold=False)
    assert "All rows" not in rows
    assert rows.count("\n") > monitor.table().count("\n")


def test_writers_get_every_watched_step() -> None:
    model = make_model()
    monitor = Monitor(model, every=2)
    seen = []
    monitor.add_writer(lambda step, found: seen.append((step.number, len(found))))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 5, monitor)
    assert seen == [(0, 14), (2, 14), (4, 14)]


# -- 10,000 steps --------------------------------------------------------------------------------


@pytest.mark.slow
def test_writers_get_what_was_still_being_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_step.WatchedStep, "ready", lambda _: False)  # a slow device
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    written: list[int] = []
    with Monitor(model, optimizer) as monitor:
        monitor.add_writer(lambda step, _: written.append(step.number))
        train(model, optimizer, 3)
        assert written == []
    assert written == [0, 1, 2]


@pytest.mark.parametrize("steps", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_steps(steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(model, optimizer, nn.Linear, what=BOTH, history=500).attach()
    hooks = hooks_of(model)
    x = torch.randn(8, 4)
    largest, means = [], []
    for number in range(steps):
        output = model(x)
        means.append(float(output.detach().double().mean()))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in (steps // 5, steps - 1):
            gc.collect()
            largest.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            assert hooks_of(model) == hooks
    monitor.detach()
    history = monitor.history
    assert len(history) == 500
    assert list(history.steps) == list(range(steps - 500, steps))
    assert np.allclose(history.values("2", "activations", "mean"), means[-500:], rtol=1e-6)
    assert set(history.values("0", "gradients", "count")) == {32.0}
    assert largest[1] - largest[0] < 4 * 1024  # KiB
    assert hooks_of(model) == 0


def test_monitor_and_model_are_freed() -> None:
    """Nothing of a watched step holds on to them."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer) as monitor:
        for _ in range(2):
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
    assert len(monitor.history) == 2
    references = [weakref.ref(each) for each in (model, monitor)]
    del model, monitor, optimizer
    gc.collect()
    assert [each() for each in references] == [None, None]
