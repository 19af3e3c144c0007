"""Non-finite steps inside of other people's training loops."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfmri import NonFiniteError, NonFiniteWarning
from torchfmri._incidents.replay_run import replay
from torchfmri._model.factory import Subject

BAD_STEP = 2


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of numbers; one of them is NaN."""

    def __init__(self, bad: int | None = 4 * BAD_STEP + 1) -> None:
        self.x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        if bad is not None:
            self.x[bad, 2] = math.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": torch.ones(1)}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.last(self.first(x).relu())
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


def trainer(tmp_path: Path, rows: Rows, **options: Any) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from torchfmri.integrations.huggingface import MonitorCallback

    class InOrder(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    callback = MonitorCallback(**options)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=5, per_device_train_batch_size=4, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True, logging_steps=5,
    )  # fmt: skip
    found = InOrder(Regression(), arguments, train_dataset=rows, callbacks=[callback])
    return found, callback


def test_hugging_face_raises(tmp_path: Path) -> None:
    folder = tmp_path / "incidents"
    made, callback = trainer(tmp_path, Rows(), on_nonfinite="raise", incidents=folder)
    with pytest.raises(NonFiniteError, match="sample 1") as caught:
        made.train()
    assert caught.value.step == BAD_STEP
    assert "'x'" in str(caught.value)
    assert all(bool(each.isfinite().all()) for each in made.model.parameters())
    assert not any(module._forward_hooks for module in made.model.modules())
    assert [each.step for each in callback.monitor.incidents] == [BAD_STEP]
    outcome = replay(folder, Subject(Regression(), None))
    assert outcome.finding.evidence["rows"] == [1]


def test_hugging_face_skips(tmp_path: Path) -> None:
    made, callback = trainer(tmp_path, Rows(), on_nonfinite="skip")
    with pytest.warns(NonFiniteWarning) as told:
        made.train()
    texts = [str(each.message) for each in told]
    assert sum("is left out" in text for text in texts) == 1
    # The Trainer's log would show a finite mean for these steps.
    assert sum("logging_nan_inf_filter" in text for text in texts) == 1
    assert made.state.global_step == 5
    assert all(bool(each.isfinite().all()) for each in made.model.parameters())
    assert len(callback.monitor.incidents) == 1


def test_hugging_face_healthy(tmp_path: Path) -> None:
    made, callback = trainer(tmp_path, Rows(bad=None), on_nonfinite="raise")
    made.train()
    assert callback.monitor.incidents == []


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_lightning(tmp_path: Path, action: str) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from torchfmri.integrations.lightning import MonitorCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Regression()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.inner(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    callback = MonitorCallback(on_nonfinite=action, incidents=tmp_path / "incidents")
    model = Module()
    made = lightning.Trainer(
        max_steps=5, accelerator="cpu", devices=1, logger=False, callbacks=[callback],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
    if action == "raise":
        with pytest.raises(NonFiniteError) as caught:
            made.fit(model, loader)
        assert caught.value.step == BAD_STEP
        assert "sample 1 of 'x'" in str(caught.value)
    else:
        with pytest.warns(NonFiniteWarning, match="is left out"):
            made.fit(model, loader)
    assert all(bool(each.isfinite().all()) for each in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    # training_step is no call of the model; the batch is kept all the same.
    outcome = replay(tmp_path / "incidents", Subject(Regression(), None))
    assert outcome.finding.problem == "nonfinite_data"
    assert outcome.finding.evidence["rows"] == [1]
