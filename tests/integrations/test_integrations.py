"""A Monitor inside other people's loops and loggers."""

import importlib
import json
import math
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchfmri import InspectionError, Monitor
from torchfmri.integrations.writers import (
    FIELDS,
    TensorBoardWriter,
    TrackioWriter,
    WandbWriter,
)


def train(monitor: Monitor, model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        with monitor.step() as step:
            loss = model(torch.randn(8, 4)).square().mean()
            step.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


# -- Hugging Face --------------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(3, 64, (size, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = torch.ones(12, dtype=torch.long)
        return {"input_ids": self.rows[index], "labels": self.rows[index], "attention_mask": mask}


def tiny_qwen() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=32,
        )
    )  # fmt: skip


def run_trainer(tmp_path: Path, accumulate: int, batch: int, callback: Any, steps: int = 3) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = tiny_qwen()
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulate, report_to="none", logging_steps=1,
            eval_strategy="steps", eval_steps=1, save_strategy="no", disable_tqdm=True,
            use_cpu=True, learning_rate=1e-3, seed=0, lr_scheduler_type="constant",
        ),
        train_dataset=Tokens(64),
        eval_dataset=Tokens(4),
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    return trainer


def test_hugging_face_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from torchfmri.integrations.huggingface import MonitorCallback

    found = []
    for accumulate in (1, 4):
        written = []
        callback = MonitorCallback(
            lambda step, _, w=written: w.append(step.number), watch=nn.Linear
        )
        trainer = run_trainer(tmp_path, accumulate, 8 // accumulate, callback)
        monitor = callback.monitor
        assert monitor is not None
        history = monitor.history
        assert list(history.steps) == written == [0, 1, 2]
        logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        assert history.loss.tolist() == pytest.approx(logged, abs=2e-3)
        # Eight rows of twelve tokens per optimizer step; evaluation is not part of it.
        assert set(history.values("lm_head", field="count")) == {8 * 12 * 64.0}
        assert (history.update_ratio("model.layers.0.mlp.up_proj.weight") > 0).all()
        assert not any(module._forward_hooks for module in trainer.model.modules())
        found.append(history.matrix("parameter_gradients", "rms")[1])
    # The same batch in one piece or in four leads to the same gradients.
    assert np.allclose(found[0], found[1], rtol=1e-3)


def test_hugging_face_callback_after_an_exception(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from torchfmri.integrations.huggingface import MonitorCallback

    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    trainer = (arguments, TrainerState(), TrainerControl())
    callback = MonitorCallback()
    model = nn.Sequential(nn.Linear(2, 2))
    callback.on_train_begin(*trainer, model=model)
    callback.on_step_begin(*trainer)
    assert model[0]._forward_hooks
    callback.on_train_begin(*trainer, model=model)  # the loop raised and begins anew
    assert not model[0]._forward_hooks
    assert callback.monitor is not None
    assert len(callback.monitor.history) == 0


# -- Lightning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning(tmp_path: Path, accumulate: int) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from torchfmri.integrations.lightning import MonitorCallback

    losses = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = self.fc(batch[0]).square().mean()
            losses.append(float(loss.detach()))
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.fc(batch[0] * 1e6)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.TensorDataset(torch.randn(32, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    callback = MonitorCallback()
    model = Module()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, callbacks=[callback],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=accumulate, val_check_interval=1, default_root_dir=tmp_path,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(model, loader, loader)
    assert callback.monitor is not None
    history = callback.monitor.history
    assert len(history) == 4 // accumulate
    expected = np.reshape(losses, (-1, accumulate)).mean(1)
    assert np.allclose(history.loss, expected)
    assert set(history.values("fc", field="count")) == {8 * 2.0 * accumulate}
    assert history.values("fc", field="abs_max").max() < 100
    assert (history.values("fc.weight", "parameter_gradients", "rms") > 0).all()
    assert (history.update_ratio("fc.weight") > 0).all()
    assert not model.fc._forward_hooks


# -- writers -------------------------------------------------------------------------------------


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    monitor = Monitor(model, histogram=True)
    with SummaryWriter(tmp_path) as writer:
        monitor.add_writer(TensorBoardWriter(writer, FIELDS, histograms=True))
        train(monitor, model)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    rms = [event.value for event in events.Scalars("activations/0/rms")]
    assert np.allclose(rms, monitor.history.values("0", field="rms"), rtol=1e-5)
    losses = [event.value for event in events.Scalars("torchfmri/loss")]
    assert np.allclose(losses, monitor.history.loss, rtol=1e-5)
    histogram = events.Histograms("gradients/0")[-1].histogram_value
    assert histogram.num == 64
    assert math.isclose(sum(histogram.bucket), 64, rel_tol=1e-6)
    assert "updates/0.weight" in events.Tags()["scalars"]


class Run:
    """A stand-in for a run of Weights & Biases."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

        self.alerts: list[dict[str, Any]] = []
        self.axes: dict[str, str | None] = {"*": "train/global_step"}

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        assert "*" not in name, "wandb refuses it, or takes it for a pattern"
        self.axes[name] = step_metric

    def log(self, row: dict[str, Any], step: int | None = None) -> None:
        self.rows.append(row if step is None else {**row, "its step": step})

    def alert(self, **said: Any) -> None:
        self.alerts.append(said)


def test_wandb_writer_with_a_stand_in() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    monitor, run = Monitor(model, every=2), Run()
    monitor.add_writer(WandbWriter(run, fields=("rms", "nan")))
    train(monitor, model, 4)
    assert [row["torchfmri/step"] for row in run.rows] == [0, 2]
    rms = [row["gradients/0/rms"] for row in run.rows]
    assert np.allclose(rms, monitor.history.values("0", "gradients", "rms"))
    assert run.rows[0]["activations/1/nan"] == 0.0
    assert "updates/0.weight" in run.rows[0]
    numbers = {name for row in run.rows for name in row} - {"torchfmri/step"}
    assert {run.axes.get(name) for name in numbers} == {"torchfmri/step"}, "by name, not by pattern"


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    monitor = Monitor(model, histogram=True)
    with wandb.init(mode="offline", dir=str(tmp_path), project="test") as run:
        monitor.add_writer(WandbWriter(run, FIELDS, histograms=True))
        train(monitor, model)
        assert run.summary["activations/0/rms"] == pytest.approx(
            monitor.history.values("0", field="rms")[-1]
        )


def test_writer_leaves_out_what_is_not_known() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * math.nan

    model = nn.Sequential(nn.Linear(4, 2), Broken())
    monitor, run = Monitor(model), Run()
    monitor.add_writer(WandbWriter(run, FIELDS, images=0))
    with monitor.step():
        model(torch.randn(3, 4)).sum().backward()
    assert run.rows[0]["activations/1/nan"] == 6.0
    assert "activations/1/rms" not in run.rows[0]
    assert "torchfmri/loss" not in run.rows[0]


# -- summaries -----------------------------------------------------------------------------------


def broken_run(monitor: Monitor, model: nn.Module, steps: int = 12) -> None:
    """Train; from the tenth step on the loss is NaN."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        with monitor.step() as step:
            loss = model(torch.randn(8, 4)).square().mean() * (math.nan if number >= 10 else 1.0)
            step.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def deep(blocks: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *(nn.Sequential(nn.Linear(4, 4)) for _ in range(blocks)))


def tags(writer: Any) -> set[str]:
    return {name for row in writer.rows for name in row}


def test_a_summary_does_not_grow_with_the_model() -> None:
    found = []
    for blocks in (3, 12):
        model, run = deep(blocks), Run()
        monitor = Monitor(model)
        monitor.add_writer(WandbWriter(run, images=0))
        train(monitor, model)
        found.append(tags(run))
    assert found[0] == found[1]
    assert "torchfmri/gradients/N.N" in found[0]
    assert all(name.startswith("torchfmri/") for name in found[0])
    rows = [run.rows[-1]["torchfmri/activations/N.N"]]
    names = [f"{number}.0" for number in range(1, 13)]
    values = [monitor.history.values(name, field="rms")[-1] for name in names]
    assert rows[0] == pytest.approx(max(values)), "the largest of its kind"


def test_tensorboard_gets_findings_a_nan_loss_and_maps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = deep(2)
    monitor = Monitor(model)
    with SummaryWriter(tmp_path) as writer:
        monitor.add_writer(TensorBoardWriter(writer))
        broken_run(monitor, model)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    losses = events.Scalars("torchfmri/loss")
    assert [event.step for event in losses] == list(range(12))
    assert math.isnan(losses[10].value)
    assert events.Scalars("torchfmri/nonfinite/parameter_gradients")[10].value > 0
    (text,) = events.Tensors("torchfmri/findings/text_summary")[:1]
    assert text.step == 10
    assert b"nonfinite" in text.tensor_proto.string_val[0]
    images = events.Images("torchfmri/map/gradients")
    assert [image.step for image in images] == [9, 10], "the tenth watched step, and the first NaN"
    assert images[0].width > 300


def test_alerts_have_the_step() -> None:
    model, run = deep(2), Run()
    monitor = Monitor(model)
    monitor.add_writer(WandbWriter(run, images=0))
    broken_run(monitor, model)
    assert math.isnan(run.rows[10]["torchfmri/loss"])
    (alert,) = [each for each in run.alerts if "nonfinite" in each["title"]]
    assert "step 10" in alert["title"]
    assert alert["level"] == "ERROR"
    assert len(run.alerts) == len({each["title"] for each in run.alerts}), "each is said once"


def test_trackio_with_a_stand_in() -> None:
    model, run = deep(2), Run()
    monitor = Monitor(model, every=2)
    monitor.add_writer(TrackioWriter(run, images=0))
    train(monitor, model, 4)
    assert [row["its step"] for row in run.rows] == [0, 2]
    assert "torchfmri/updates/*.*.weight" in run.rows[0]


def test_trackio_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    model = deep(2)
    monitor = Monitor(model)
    run = trackio.init(project="test", embed=False)
    monitor.add_writer(TrackioWriter(run))
    broken_run(monitor, model)
    trackio.finish()
    (database,) = tmp_path.glob("*.db")
    with sqlite3.connect(database) as tables:
        rows = tables.execute("select step, metrics from metrics order by step").fetchall()
        alerts = tables.execute("select title, step from alerts").fetchall()
    numbers = {step: json.loads(row) for step, row in rows}
    assert list(numbers) == list(range(12))
    assert math.isnan(float(numbers[10]["torchfmri/loss"]))
    assert "torchfmri/map/gradients" in numbers[9]
    pictures = [int(each.parent.name) for each in tmp_path.rglob("*.png")]
    assert sorted(pictures) == [9] * 3 + [10] * 3, "the tenth watched step, and the first NaN"
    assert ("torchfmri: nonfinite_loss, step 10", 10) in alerts


# -- the runs that a trainer has opened ----------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[int]]:
    """Tag -> its steps, of all that was written below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[int]] = {}
    files = list(folder.rglob("*tfevents*"))
    assert len(files) == 1, "the run that the trainer opened, and no other"
    events = EventAccumulator(str(files[0]))
    events.Reload()
    for tag in events.Tags()["scalars"]:
        found[tag] = [event.step for event in events.Scalars(tag)]
    return found


@pytest.mark.parametrize("wanted", [True, False])
def test_the_trainers_own_run_gets_a_summary(tmp_path: Path, wanted: bool) -> None:
    pytest.importorskip("tensorboard")
    transformers = pytest.importorskip("transformers")
    from torchfmri.integrations.huggingface import MonitorCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.layer(x).square().mean()}

    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, use_cpu=True, report_to="tensorboard", save_strategy="no",
        logging_steps=1, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    data = [{"x": torch.randn(4)} for _ in range(24)]
    callback = MonitorCallback(dashboards=wanted)
    transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[callback]).train()
    found = scalars(tmp_path)
    assert "train/loss" in found
    assert found.get("torchfmri/loss") == ([0, 1, 2] if wanted else None)


def test_the_run_of_a_lightning_logger_gets_a_summary(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.loggers import TensorBoardLogger

    from torchfmri.integrations.lightning import MonitorCallback

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss: Tensor = self.layer(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = lightning.Trainer(
        max_steps=3, logger=TensorBoardLogger(tmp_path), callbacks=[MonitorCallback()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=4))
    assert scalars(tmp_path)["torchfmri/loss"] == [0, 1, 2]


@pytest.mark.parametrize("name", ["huggingface", "lightning"])
def test_misuse_of_a_callback_is_explained_at_once(name: str) -> None:
    pytest.importorskip("transformers" if name == "huggingface" else "lightning")
    callback = importlib.import_module(f"torchfmri.integrations.{name}").MonitorCallback
    with pytest.raises(InspectionError, match="no option 'wach'"):
        callback(wach=nn.Linear)
    with pytest.raises(InspectionError, match="A writer is a function"):
        callback(Monitor(nn.Linear(2, 2)))
