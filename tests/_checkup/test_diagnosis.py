"""diagnose leaves no trace and reads well; live findings; one inspection; the command."""

import copy
import json
import math
import random
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchfmri
from benchmarks._cases import Blobs, LanguageModel, mlp, regression, texts, token_loss
from benchmarks._cuts import CUTS
from torchfmri import Finding, InspectionError, Inspector, Monitor, diagnose
from torchfmri._checkup.batch_log import BatchLog
from torchfmri._checkup.gradient_watch import norm_of
from torchfmri._checkup.users_step import split_batch
from torchfmri._diagnosis.registry import CAUSES, DIAGNOSES, LIVE, fold
from torchfmri._records import PHASE_OF
from torchfmri.cli import main

BLOBS = Blobs()
CE = nn.CrossEntropyLoss()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    tensors = [each.clone() for each in [*model.parameters(), *model.buffers()]]
    gradients = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    return [tensors, gradients, state, torch.get_rng_state(), random.getstate(), model.training]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# -- no trace ------------------------------------------------------------------------------------


def warm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give gradients and optimizer state to be spared."""
    for x, y in BLOBS.batches(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_leaves_no_trace() -> None:
    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    warm(model, optimizer)
    batches = BLOBS.batches(8)
    kept = copy.deepcopy(batches)
    before = state_of(model, optimizer)
    diagnosis = diagnose(model, batches, CE, optimizer, 8, show=False)
    assert same(before, state_of(model, optimizer))
    assert same(kept, batches)
    assert diagnosis.steps == 8
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert not any(each._backward_hooks for each in model.parameters())


def test_a_loss_that_refers_to_the_model_does_not_touch_its_gradients() -> None:
    model = mlp(16, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    warm(model, optimizer)
    before = state_of(model, optimizer)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        decay = sum(each.square().sum() for each in model.parameters())
        return F.cross_entropy(output, y) + 1e-4 * decay

    diagnose(model, BLOBS.batches(4), loss, optimizer, 4, show=False)
    assert same(before, state_of(model, optimizer))


def test_an_exception_of_the_model_passes_through_and_leaves_no_trace() -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 4)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                raise ZeroDivisionError("the user's own")
            return self.fc(x)

    model = Raises()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    before = state_of(model, optimizer)
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        diagnose(model, BLOBS.batches(4), CE, optimizer, show=False)
    assert same(before, state_of(model, optimizer))
    assert model.calls == 0


def test_optimizer_state_is_carried_over() -> None:
    """Adam's state of many steps makes the first step of the copy what the next would have been."""
    model = mlp(16, 8, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    warm(model, optimizer)
    x, y = BLOBS.batches(1)[0]
    diagnosis = diagnose(model, [(x, y)], CE, optimizer, 1, show=False)
    assert diagnosis.history is not None
    measured = diagnosis.history.update_ratio("0.weight")[0]
    old = model[0].weight.detach().clone()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    expected = float((model[0].weight.detach() - old).norm() / old.norm())
    assert measured == pytest.approx(expected, rel=1e-4)


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFMRI", "off")
    model = mlp(16, 8, 4)
    found = diagnose(
        model, BLOBS.batches(2), CE, torch.optim.SGD(model.parameters(), 1e9), show=False
    )
    assert len(found) == 0
    assert found.steps == 0


# -- what can be handed over ---------------------------------------------------------------------


def test_forms_of_batches() -> None:
    x, y = BLOBS.batches(1)[0]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
            return self.fc(a if b is None else a + b)

    def run(batch: Any, loss: Any = CE) -> int:
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        return diagnose(model, [batch], loss, optimizer, 2, show=False).steps

    assert run((x, y)) == run([x, y]) == run((x, x, y)) == run(((x, x), y)) == 2
    assert run({"a": x, "labels": y}) == run(({"a": x}, y)) == 2
    assert run(x, lambda output: output.square().mean()) == 2


def test_labels_may_be_a_list() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 3)

        def forward(self, x: Tensor, labels: list[int]) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.lin(x), torch.tensor(labels))}

    model = Classifier()
    batch = {"x": torch.randn(8, 8), "labels": [0, 1, 2, 0, 1, 2, 0, 1]}
    diagnosis = diagnose(
        model, [batch], optimizer=torch.optim.SGD(model.parameters(), 0.1), steps=2
    )
    assert not [note for note in diagnosis.notes if "could not be looked at" in note]


@pytest.mark.parametrize("order", [("x", "mask", "labels"), ("labels", "mask", "x")])
def test_repeats_do_not_depend_on_the_order_of_a_dict(order: tuple[str, ...]) -> None:
    x = torch.randn(8, 8)
    x[4:] = x[:4]
    values = {"x": x, "mask": torch.ones(8, 8), "labels": torch.arange(8)}
    log, other = BatchLog(), BatchLog()
    log.add(split_batch({key: values[key] for key in order}, None))
    facts = log.facts(nn.Linear(1, 1), None, None)
    assert (facts.samples, facts.repeated, facts.contradicting) == (8, 1.0, 1.0)
    # Without repeats in x there are none, although the mask repeats in every sample.
    other.add(split_batch({**{key: values[key] for key in order}, "x": torch.randn(8, 8)}, None))
    assert other.facts(nn.Linear(1, 1), None, None).repeated == 0
    other.add(split_batch({key: values[key] for key in order}, None))
    assert other.varies
    assert not log.varies


class OnMps(Tensor):
    """A tensor that says it is on an Apple GPU, and refuses float64 as one does."""

    device = property(lambda _: torch.device("mps"))  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if func is Tensor.cpu:
            return found.as_subclass(Tensor)
        if isinstance(found, cls) and found.dtype in (torch.float64, torch.complex128):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return found


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e15])
def test_what_has_no_float64_is_measured_too(size: float) -> None:
    x, gradient = size * torch.randn(8, 8), size * torch.randn(50)
    log = BatchLog()
    log.add(split_batch((x.as_subclass(OnMps), torch.arange(8)), CE))
    facts = log.facts(nn.Linear(1, 1), None, None)
    assert facts.rms == pytest.approx(float(x.double().square().mean().sqrt()))
    assert facts.samples == 8
    assert facts.repeated == 0
    found = norm_of(gradient.as_subclass(OnMps))
    assert found == pytest.approx(float(gradient.double().norm()))
    with pytest.raises(TypeError, match="float64"):
        x.as_subclass(OnMps).double()


def test_batches_are_taken_again_and_iterators_used_up() -> None:
    model = mlp(16, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    assert diagnose(model, BLOBS.batches(2), CE, optimizer, 5, show=False).steps == 5

    def few() -> Iterator[Any]:
        yield from BLOBS.batches(3)

    assert diagnose(model, few(), CE, optimizer, 5, show=False).steps == 3


def test_errors_say_what_to_do() -> None:
    model = mlp(16, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(InspectionError, match="needs the optimizer"):
        diagnose(model, BLOBS.batches(1), CE)
    with pytest.raises(InspectionError, match="no batches"):
        diagnose(model, [], CE, optimizer)
    with pytest.raises(InspectionError, match=r"steps=0"):
        diagnose(model, BLOBS.batches(1), CE, optimizer, 0)
    with pytest.raises(InspectionError, match="one number"):
        diagnose(model, BLOBS.batches(1), nn.CrossEntropyLoss(reduction="none"), optimizer)
    with pytest.raises(InspectionError, match=r"the batch has none.*each batch be"):
        diagnose(model, [(torch.randn(4, 16),)], CE, optimizer)
    with pytest.raises(InspectionError, match=r"no loss: the output has no \.loss.*Give loss="):
        diagnose(model, [torch.randn(4, 16)], None, optimizer)
    with pytest.raises(InspectionError, match=r"nn\.Module"):
        diagnose(lambda x: x, BLOBS.batches(1), CE, optimizer)  # type: ignore[arg-type]


class Trial(nn.Module):
    """A layer that tries another one, which raises, and does its own work instead."""

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("not today")

    def __init__(self) -> None:
        super().__init__()
        self.failing, self.scores, self.values = self.Failing(), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        with suppress(ValueError):
            self.failing(x)
        return self.values(self.scores(x).softmax(0))  # type: ignore[no-any-return]


def test_a_layer_that_raised_is_not_running_any_more() -> None:
    model = nn.Sequential(Trial(), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters())
    found = diagnose(model, BLOBS.batches(3), CE, optimizer, 3, show=False)
    assert [each.layers for each in found if each.problem == "softmax_dimension"] == [("0",)]


# -- the numbers against slow, obvious ones ------------------------------------------------------


def test_attention_of_every_head_is_right() -> None:
    """Entropy and logits from the fused kernel against attention written out, in float64."""
    torch.manual_seed(0)
    model = LanguageModel(depth=1).double()
    ids, target = texts(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    diagnosis = diagnose(model, [(ids, target)], token_loss, optimizer, 1, show=False)
    assert diagnosis.observation is not None
    head = diagnosis.observation.heads[0]
    assert head.layer == "blocks.0.attention"
    attention = model.blocks[0].attention
    x = model.blocks[0].norm1(model.tokens(ids) + model.positions(torch.arange(16)))
    q, k, _ = (each.view(8, 16, 4, 8).transpose(1, 2) for each in attention.qkv(x).chunk(3, -1))
    scores = q @ k.transpose(-1, -2) / 8**0.5
    for h in range(4):
        entropies, largest = [], 0.0
        for b in range(8):
            for query in range(16):
                row = scores[b, h, query, : query + 1]
                largest = max(largest, float(row.abs().max()))
                if query >= 3:
                    p = row.softmax(-1)
                    entropies.append(float(-(p * p.log()).sum()) / math.log(query + 1))
        assert head.entropy[h] == pytest.approx(float(np.mean(entropies)), rel=1e-4)
        assert head.logit[h] == pytest.approx(largest, rel=1e-4)


def test_dead_units_are_counted_right() -> None:
    torch.manual_seed(0)
    model = mlp(16, 32, 4)
    with torch.no_grad():
        model[0].bias[:20] = -100.0
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    batches = BLOBS.batches(12)
    diagnosis = diagnose(model, batches, CE, optimizer, 12, show=False)
    on = torch.stack([(model[0](x) > 0).any(0) for x, _ in batches]).any(0)
    assert diagnosis[0].problem == "dead_units"
    assert diagnosis[0].evidence["dead_share"] == pytest.approx(float((~on).float().mean()))
    assert diagnosis[0].evidence["dead_share"] == 20 / 32


# -- folding -------------------------------------------------------------------------------------


def finding(problem: str, step: int | None, phase: Any = "forward") -> Finding:
    return Finding(problem, "alarm", (), phase, step, "", "")


def test_consequences_are_folded_under_the_earliest_cause() -> None:
    found = fold(
        [
            finding("nonfinite_loss", 5, "loss"),
            finding("dead_units", 3),
            finding("learning_rate_too_high", 1, "optimizer"),
        ]
    )
    assert [each.problem for each in found] == ["learning_rate_too_high"]
    assert {each.problem for each in found[0].consequences} == {"nonfinite_loss", "dead_units"}


def test_nothing_follows_from_what_comes_later() -> None:
    found = fold([finding("dead_units", 0), finding("learning_rate_too_high", 0, "optimizer")])
    assert {each.problem for each in found} == {"dead_units", "learning_rate_too_high"}


def test_the_worst_comes_first() -> None:
    mild = Finding("padding_row", "warn", (), "forward", None, "", "")
    found = fold([mild, finding("loss_broadcast", 0, "loss")])
    assert [each.severity for each in found] == ["alarm", "warn"]


def test_causes_and_cuts_are_complete() -> None:
    assert all(cut.reason and cut.signal for cut in CUTS.values())
    assert set(LIVE) <= set(DIAGNOSES)
    assert all(effects for effects in CAUSES.values())
    named = {*CAUSES, *(effect for effects in CAUSES.values() for effect in effects)}
    assert named <= set(PHASE_OF)


# -- the report ----------------------------------------------------------------------------------


def sick() -> torchfmri.Diagnosis:
    torch.manual_seed(0)
    model = mlp(16, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 500.0)
    return diagnose(model, regression(6), nn.MSELoss(), optimizer, 12, show=False)


def test_report_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    diagnosis = sick()
    text = diagnosis.text(80)
    assert text.splitlines()[0].startswith("Sequential: 1 alarm")
    assert "alarm: learning rate too high" in text
    assert "What to do: Lower the learning rate (500)" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert repr(diagnosis).startswith("<Diagnosis of Sequential: learning_rate_too_high")
    assert "learning rate too high" in diagnosis._repr_html_()
    assert json.loads(json.dumps(diagnosis.to_dict()))["findings"][0]["phase"] == "optimizer"
    assert not diagnosis.ok
    model = mlp(16, 8, 4)
    diagnose(model, BLOBS.batches(2), CE, torch.optim.SGD(model.parameters(), 0.05), 2)
    assert "nothing found in 2 steps" in capsys.readouterr().out


def test_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure: Any = sick().plot().figure
    figure.savefig(tmp_path / "sick.png")
    assert (tmp_path / "sick.png").stat().st_size > 5_000
    with pytest.raises(InspectionError):
        torchfmri.Diagnosis("Nothing", ()).plot()


# -- live ----------------------------------------------------------------------------------------


def train(
    monitor: Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int,
    zero: bool = True, clip: float = math.inf, scale: float = 1.0,
) -> None:  # fmt: skip
    for x, y in BLOBS.batches(steps):
        with monitor.step() as step:
            loss = scale * F.cross_entropy(model(x), y)
            step.loss(loss)
            if zero:
                optimizer.zero_grad()
            loss.backward()
            if clip < math.inf:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()


def live(lr: float = 0.05, steps: int = 24, **options: Any) -> tuple[Monitor, list[str]]:
    torch.manual_seed(0)
    model = mlp(16, 32, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    monitor = Monitor(model, optimizer)
    train(monitor, model, optimizer, steps, **options)
    return monitor, [each.problem for each in monitor.findings]


def test_live_healthy() -> None:
    monitor, found = live(steps=60)
    assert found == []
    assert monitor.new_findings() == []


def test_live_learning_rate() -> None:
    monitor, found = live(lr=300.0)
    assert found == ["learning_rate_too_high"]
    assert monitor.findings[0].step == 0


def test_live_zero_grad_missing() -> None:
    monitor, found = live(zero=False)
    assert "stale_gradients" in found
    assert monitor.findings[0].step == 1


def test_live_clipping() -> None:
    assert live(clip=0.1, scale=1e6)[1] == ["clipping_hides_explosion"]
    assert live(clip=0.5)[1] == []


def test_live_missing_from_optimizer_and_frozen() -> None:
    torch.manual_seed(0)
    model = mlp(16, 32, 32, 4)
    model[0].requires_grad_(True)
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[4].parameters()], 0.05)
    monitor = Monitor(model, optimizer)
    train(monitor, model, optimizer, 10)
    assert [(each.problem, each.layers) for each in monitor.findings] == [
        ("missing_from_optimizer", ("2",))
    ]


def test_live_frozen_half_way() -> None:
    torch.manual_seed(0)
    model = mlp(16, 32, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    monitor = Monitor(model, optimizer)
    train(monitor, model, optimizer, 12)
    model[2].requires_grad_(False)
    train(monitor, model, optimizer, 12)
    found = monitor.findings
    assert [(each.problem, each.layers, each.step) for each in found] == [
        ("stopped_training", ("2",), 12)
    ]
    assert monitor.new_findings() == found  # once
    assert monitor.new_findings() == []


def test_live_nonfinite_names_the_first_layer() -> None:
    torch.manual_seed(0)

    class Divide(nn.Module):
        by = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x / self.by

    divide = Divide()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), divide, nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    monitor = Monitor(model, optimizer)
    train(monitor, model, optimizer, 5)
    divide.by = 0.0
    train(monitor, model, optimizer, 3)
    first = monitor.findings[0]
    assert (first.problem, first.layers, first.step) == ("nonfinite_forward", ("2",), 5)


# -- one inspection ------------------------------------------------------------------------------


def test_inspector_diagnoses() -> None:
    torch.manual_seed(0)
    model = mlp(*[16] * 9, 4, act=nn.Sigmoid)
    inspector = Inspector(model)
    inspector.watch("*", what=["activations", "gradients", "parameter_gradients"])
    x, y = BLOBS.batches(1)[0]
    inspector.run_inspection(x, target=y, loss=CE)
    diagnosis = inspector.diagnose()
    assert [each.problem for each in diagnosis] == ["vanishing_gradients"]
    assert "0" in diagnosis[0].layers
    healthy = Inspector(mlp(16, 32, 4))
    healthy.run_inspection(x)
    assert healthy.diagnose().ok


# -- the command ---------------------------------------------------------------------------------

FACTORY = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3){softmax})
    batches = [(torch.randn(32, 8), torch.randint(3, (32,))) for _ in range(5)]
    return model, batches, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), 1e-3)

def wrong():
    return 3
"""


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sick.py").write_text(FACTORY.format(softmax=", nn.Softmax(-1)"))
    (tmp_path / "fine.py").write_text(FACTORY.format(softmax=""))
    assert main(["diagnose", f"{tmp_path}/sick.py:make", "--json", "--steps", "5"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["findings"][0]["problem"] == "probabilities_as_logits"
    assert main(["diagnose", f"{tmp_path}/fine.py:make", "--steps", "5"]) == 0
    assert "nothing found" in capsys.readouterr().out
    assert main(["diagnose", f"{tmp_path}/fine.py:wrong"]) == 2
    assert "(model, batches, loss, optimizer)" in capsys.readouterr().err


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(1000):
    loss = nn.functional.cross_entropy(model(torch.randn(32, 8)), torch.randint(3, (32,)))
    loss.backward()
    optimizer.step()
raise SystemExit("never reached")
"""


def test_command_on_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(["diagnose", f"{tmp_path}/train.py", "--steps", "20", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [each["problem"] for each in data["findings"]] == ["stale_gradients"]
    assert data["steps"] == 20


# -- what watching must stand --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("torchfmri._checkup.watcher.Watcher._leave", "layer"),
        ("torchfmri._checkup.gradient_watch.GradientWatch._look_at_update", "update"),
        ("torchfmri._checkup.operations.OperationWatch._look", "operation"),
        ("torchfmri._checkup.batch_log.BatchLog.add", "batch"),
        ("torchfmri._checkup.run.Checkup._look_at_loss", "loss"),
        ("torchfmri._diagnosis.step_sizes.median", "diagnosis"),
    ],
)
def test_a_failure_of_ours_is_a_note_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, place: str, name: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    model = mlp(16, 32, 32, 4)
    nn.init.constant_(model[2].bias, -50)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    monkeypatch.setattr(place, broken)
    diagnosis = diagnose(model, BLOBS.batches(12), CE, optimizer, 12, show=False)
    assert diagnosis.steps == 12
    assert any("ZeroDivisionError: planted" in note for note in diagnosis.notes)
    assert "note: " in diagnosis.text()
    assert diagnosis.to_dict()["notes"] == list(diagnosis.notes)
    if name != "layer":
        assert "dead_units" in [finding.problem for finding in diagnosis]


def test_without_a_failure_there_is_no_note() -> None:
    model = mlp(16, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    assert diagnose(model, BLOBS.batches(4), CE, optimizer, 4, show=False).notes == ()


class Masked(nn.Module):
    """Attention with a mask: of booleans, or the same in floats."""

    def __init__(self, floats: bool) -> None:
        super().__init__()
        self.floats, self.tokens, self.head = floats, nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)[:, None]
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        if self.floats:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
        return self.head(F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, 0])


def test_masks_of_floats_and_of_booleans_say_the_same() -> None:
    heads = []
    for floats in (False, True):
        torch.manual_seed(0)
        model = Masked(floats)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        seen = diagnose(model, texts(3), token_loss, optimizer, 3, show=False)
        assert seen.notes == ()
        assert seen.observation is not None
        heads.append([(each.entropy, each.logit) for each in seen.observation.heads])
    assert heads[0]
    assert heads[0] == heads[1]


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(9, 4, dtype=torch.cfloat))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((torch.fft.rfft(x) @ self.weight).abs())


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(16, 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = torch.func.vmap(self.body)(x)
        return mapped


@pytest.mark.parametrize("kind", [Spectral, Mapped])
def test_complex_parameters_and_vmap_are_watched(kind: type[nn.Module]) -> None:
    model = kind()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    diagnosis = diagnose(model, BLOBS.batches(12), CE, optimizer, 12, show=False)
    assert (diagnosis.steps, diagnosis.ok, diagnosis.notes) == (12, True, ())


def test_an_optimizer_with_a_closure_needs_a_step() -> None:
    model = mlp(16, 8, 4)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(InspectionError, match=r"LBFGS.*closure.*step="):
        diagnose(model, BLOBS.batches(2), CE, optimizer, 2, show=False)

    def step(model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        loss: Tensor = optimizer.step(closure)
        return loss

    diagnosis = diagnose(model, BLOBS.batches(3), None, optimizer, 3, step=step, show=False)
    assert (diagnosis.steps, diagnosis.notes) == (3, ())
    assert diagnosis.facts["at last"] < 0.5 * diagnosis.facts["loss at first"]


def test_a_step_that_trains_the_original_is_refused_and_undone() -> None:
    model = mlp(16, 8, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    warm(model, optimizer)
    before = state_of(model, optimizer)

    def step(_: nn.Module, batch: Any, __: Any) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(InspectionError, match=r"'0\.weight'.*put back"):
        diagnose(model, BLOBS.batches(4), None, optimizer, 4, step=step, show=False)
    assert same(before, state_of(model, optimizer))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_a_scheduler_of_the_original_is_put_back_with_a_note() -> None:
    model = mlp(16, 8, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    warm(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    before, schedule = state_of(model, optimizer), scheduler.state_dict()

    def step(model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    diagnosis = diagnose(model, BLOBS.batches(4), None, optimizer, 4, step=step, show=False)
    assert ["scheduler" in note for note in diagnosis.notes] == [True]
    assert same(before, state_of(model, optimizer))
    assert scheduler.state_dict() == schedule


def test_what_is_held_as_an_incident_is_not_said_twice() -> None:
    said = {}
    for held in (None, "skip"):
        torch.manual_seed(0)
        model = mlp(16, 8, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        monitor = Monitor(model, optimizer, **({} if held is None else {"on_nonfinite": held}))
        said[held] = []
        for number, (x, y) in enumerate(BLOBS.batches(4)):
            x = x * (math.nan if number == 2 else 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with monitor.step() as watched:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    watched.loss(loss)
                    loss.backward()
                    optimizer.step()
            _ = monitor.history
            said[held] += [each.problem for each in monitor.new_findings()]
        assert [each.problem for each in monitor.findings] != []
    assert "nonfinite_forward" in said[None]
    assert said["skip"] == []


def test_live_batches_of_one_sample_do_not_diverge() -> None:
    """The loss of single samples scatters a hundredfold; the control grows and stays."""

    def run(scale: float) -> list[str]:
        torch.manual_seed(0)
        model = mlp(8, 32, 1, act=nn.Tanh)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        monitor = Monitor(model, optimizer)
        for number, (x, y) in enumerate(regression(64, 1, 8)):
            with monitor.step() as watched:
                optimizer.zero_grad()
                loss = scale**number * F.mse_loss(model(x), y)
                watched.loss(loss)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return [each.problem for each in monitor.findings]

    assert run(1.0) == []
    assert "diverging_loss" in run(1.5)


def test_weights_that_the_optimizer_spoils_are_its_own_finding() -> None:
    """0 / 0 in Adam where an embedding's row has no gradient: loss and gradients are finite."""
    for eps, expected in ((0.0, ["nonfinite_update"]), (1e-8, [])):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(1000, 8), nn.Linear(8, 4))
        batches = [(torch.randint(20, (32, 4)), torch.randint(4, (32,))) for _ in range(4)]
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=eps)
        diagnosis = diagnose(model, batches, CE, optimizer, 4, show=False)
        found = [each for each in diagnosis if each.severity != "inform"]
        assert [each.problem for each in found] == expected
        assert all(
            (each.layers, each.phase, each.step) == (("0",), "optimizer", 1) for each in found
        )


def test_targets_of_a_binary_cross_entropy_are_probabilities() -> None:
    for scale, expected in ((255.0, ["unreachable_targets"]), (1.0, [])):
        torch.manual_seed(0)
        model = mlp(16, 32, 1)
        batches = [(x, scale * (y > 0).float()) for x, y in regression(6)]
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        loss = nn.BCEWithLogitsLoss()
        diagnosis = diagnose(model, batches, loss, optimizer, 6, show=False)
        assert [each.problem for each in diagnosis if each.severity != "inform"] == expected


@pytest.mark.parametrize(("last", "expected"), [(10, ["learning_rate_zero"]), (26, [])])
def test_live_learning_rate_that_ends_early(last: int, expected: list[str]) -> None:
    torch.manual_seed(0)
    model = mlp(16, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    monitor = Monitor(model, optimizer)
    for number, (x, y) in enumerate(BLOBS.batches(30)):
        optimizer.param_groups[0]["lr"] = 1e-3 * max(0.0, 1 - number / last)
        with monitor.step() as watched:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            watched.loss(loss)
            loss.backward()
            optimizer.step()
    assert [each.problem for each in monitor.findings] == expected
    assert [each.step for each in monitor.findings] == [last] * len(expected)
