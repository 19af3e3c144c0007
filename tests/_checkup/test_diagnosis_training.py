"""Findings in real training: the script of the tiny language model, and other people's trainers."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchfmri
from torchfmri import Finding, FindingWarning, Monitor, NonFiniteWarning

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
STEPS, HALF = 24, 12
Disturb = Callable[[nn.Module, torch.optim.Optimizer, dict[str, Tensor], int], None]


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[ModuleType, Any]]:
    """The training script, and a tokenizer so that each run need not train its own."""
    pytest.importorskip("transformers")
    sys.path.insert(0, str(SCRIPTS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    script = importlib.import_module("train_tiny")
    yield script, script.make_tokenizer(0)
    torch.set_num_threads(threads)
    sys.path.remove(str(SCRIPTS))


def watch(tiny: tuple[ModuleType, Any], disturb: Disturb, steps: int = STEPS, size: int = 2) -> Any:
    """The Monitor of a run of the script, and each finding with the step after which it came."""
    script, tokenizer = tiny
    monitors: list[Monitor] = []
    came: list[tuple[int, Finding]] = []

    def before(step: int, model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> None:
        if not monitors:
            monitors.append(Monitor(model, optimizer).attach())
        disturb(model, optimizer, batch, step)

    def after(step: int, loss: float) -> None:
        came.extend((step, finding) for finding in monitors[0].new_findings())

    script.train(steps, batch_size=size, tokenizer=tokenizer, before_step=before, on_step=after)
    monitors[0].detach()
    return monitors[0], came


def test_healthy_run_raises_nothing(tiny: tuple[ModuleType, Any]) -> None:
    monitor, came = watch(tiny, lambda *_: None)
    assert monitor.findings == []
    assert came == []


@pytest.mark.slow
def test_long_healthy_run_raises_nothing(tiny: tuple[ModuleType, Any]) -> None:
    script, _ = tiny
    monitor, _ = watch(tiny, lambda *_: None, script.STEPS // 3, 2)
    assert monitor.findings == []


def rate_times_100(model: Any, optimizer: Any, batch: dict[str, Tensor], step: int) -> None:
    if step >= HALF:
        optimizer.param_groups[0]["lr"] *= 100


def nan_batch(model: Any, optimizer: Any, batch: dict[str, Tensor], step: int) -> None:
    if step == HALF:
        batch["weights"][0, 3] = float("nan")


def frozen_block(model: Any, optimizer: Any, batch: dict[str, Tensor], step: int) -> None:
    if step == HALF:
        model.model.layers[2].requires_grad_(False)


@pytest.mark.parametrize(
    ("disturb", "problem"),
    [
        (rate_times_100, "learning_rate_too_high"),
        (nan_batch, "nonfinite_loss"),
        (frozen_block, "stopped_training"),
    ],
)
@pytest.mark.slow
def test_fault_half_way_is_found_at_its_step(
    tiny: tuple[ModuleType, Any], disturb: Disturb, problem: str
) -> None:
    monitor, came = watch(tiny, disturb)
    (finding,) = monitor.findings
    assert (finding.problem, finding.step) == (problem, HALF)
    assert came[0][1].problem == problem
    assert HALF <= came[0][0] <= HALF + 8  # said within eight steps
    if disturb is frozen_block:
        assert all(layer.startswith("model.layers.2.") for layer in finding.layers)


# -- trainers ------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = (torch.arange(12) + index) % 16
        return {"input_ids": row, "labels": row}


def test_hugging_face_trainer_warns(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from torchfmri.integrations.huggingface import MonitorCallback

    def train(rate: float) -> Any:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=16, use_cpu=True, report_to="none", save_strategy="no",
            learning_rate=rate, disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        callback = MonitorCallback()
        transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=[callback]).train()
        return callback.monitor

    with pytest.warns(FindingWarning, match="changed the weights"):
        train(3.0)
    assert train(1e-3).findings == []


def test_hugging_face_callback_tells_of_losses_that_the_log_hides(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from torchfmri.integrations.huggingface import MonitorCallback

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 1)
            self.calls = 0

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            self.calls += 1
            loss = self.fc(input_ids.float()).mean()
            return {"loss": loss / 0 * 0 if self.calls > 2 else loss}

    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, use_cpu=True, report_to="none", save_strategy="no",
        logging_steps=1, disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    trainer = transformers.Trainer(
        Broken(), arguments, train_dataset=Rows(), callbacks=[MonitorCallback()]
    )
    with pytest.warns(NonFiniteWarning, match="step 2 .*logging_nan_inf_filter"):
        trainer.train()


def test_lightning_trainer_warns(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from torchfmri.integrations.lightning import MonitorCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
            nn.init.constant_(self.net[0].bias, -100)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = torch.utils.data.TensorDataset(torch.randn(640, 4))
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, callbacks=[MonitorCallback()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.warns(FindingWarning, match="returned 0 for everything"):
        trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=32))


# -- random numbers of a device ------------------------------------------------------------------


class Unlucky(nn.Module):
    """Takes the logarithm of a number that it draws on a device: now and then a negative one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.draw = lambda: torch.rand((), generator=generator)  # which a copy shares

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.log(self.draw() - 0.1 + 0 * x)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """Two stand-ins for GPUs: nothing of them but their random generators."""
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]

    def put_back(states: list[Tensor]) -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_rng_state_all", lambda: [each.get_state() for each in generators]
    )
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", put_back)
    return generators


@pytest.mark.parametrize("device", [0, 1])
def test_the_step_that_is_run_again_draws_the_same_numbers_on_a_device(
    devices: list[torch.Generator], device: int
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Unlucky(devices[device]), nn.Linear(4, 1))
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(30)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = torchfmri.diagnose(model, batches, nn.MSELoss(), optimizer, steps=30, show=False)
    assert [finding.problem for finding in found] == ["nonfinite_forward"]
    assert found[0].layers == ("1",)
    assert "log of a negative number" in found[0].text


def test_an_inspection_leaves_the_random_state_of_every_device(
    devices: list[torch.Generator],
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Unlucky(devices[0]), Unlucky(devices[1]))
    before = [each.get_state() for each in devices]
    torchfmri.Inspector(model).run_inspection(torch.randn(2, 4))
    assert all(
        torch.equal(state, each.get_state()) for state, each in zip(before, devices, strict=True)
    )
