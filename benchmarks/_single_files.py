"""Histories, inspections, contrasts, lesions and hidden states: made to be damaged, and read."""

import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

import torchfmri
from torchfmri import Anatomy, History, Inspection, LesionMap, Scan, ScannedSequence, Tokens
from torchfmri._records import HistoryFolder


class Reading(NamedTuple):
    """What a reader made of a folder.

    Attributes:
        rows: What it found; compared with what is there without damage.
        words: What it reported as missing or damaged.
        shown: What a user sees of it.
    """

    rows: dict[str, bytes]
    words: tuple[str, ...] = ()
    shown: str = ""


def _net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.ones(2, 3)


def make_history(folder: Path) -> None:
    model, batch = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = torchfmri.Monitor(model, optimizer)
    writer = HistoryFolder(folder, seconds=0.0)  # a file for each step
    monitor.add_writer(writer)
    for _ in range(4):
        with monitor.step() as step:
            loss = model(batch).square().mean()
            step.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    writer.flush()


def read_history(folder: Path) -> Reading:
    history = History.load(folder)
    rows = {
        f"{step.number:09d}": repr((step.loss, step.scalars, step.parameters)).encode()
        + np.asarray(step.updates).tobytes()
        for step in history
    }
    for text, number in sorted((repr(row), row["step"]) for row in history.rows()):
        rows[f"{number:09d}"] += text.encode()
    return Reading(rows, tuple(history.notes), repr(history))


def make_inspection(folder: Path) -> None:
    folder.mkdir()
    model, batch = _net()
    inspector = torchfmri.Inspector(model)
    inspector.watch("0", what=["activations", "gradients", "parameters"])
    inspector.watch("2", what=["inputs"])
    inspector.run_inspection(batch, loss=lambda output: output.sum(), keep="tensors").save(
        folder / "run.inspection"
    )


def read_inspection(folder: Path) -> Reading:
    found = Inspection.load(folder / "run.inspection")
    rows = {"text": repr(found).encode(), "missing": repr(found.missing).encode()}
    for layer, record in found.items():
        for call in record.calls:
            for key, value in call._values.items():
                if value is not None:
                    rows[f"{layer} {call.index} {key}"] = repr(value.tensor.tolist()).encode()
    return Reading(rows, tuple(found.notes), repr(found) + found.table())


def make_contrast(folder: Path) -> None:
    folder.mkdir()
    anatomy = Anatomy.of_widths(["embed", "mlp"], ["Embedding", "MLP"], [8, 6], [4, 4])
    sequences = []
    for number in range(8):
        values = np.random.default_rng(number).random((3, 8), np.float32)
        tokens = Tokens(
            np.arange(3), (b"a", b"b", b"c"), values[:, 0].copy(), values[:, 1].copy(),
            np.zeros(3, bool), np.zeros(3, bool),
        )  # fmt: skip
        sequences.append(ScannedSequence(
            f"sequence {number}", tokens, {"activation": values[:, :2].copy()},
            {"activation": values[:, :4].copy()}, condition="ab"[number % 2],
        ))  # fmt: skip
    scan = Scan(anatomy, sequences, {"model": "tiny"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scan.contrast("a", "b").save(folder / "a.contrast")


def read_contrast(folder: Path) -> Reading:
    found = torchfmri.load_contrast(folder / "a.contrast")
    text = repr((found.conditions, found.notes, found.prompts, found.question, found.model))
    arrays = (found.effect, found.p, found.survives, found.n_a, found.columns.start)
    rows = {"numbers": b"".join(each.tobytes() for each in arrays), "shown": repr(found).encode()}
    return Reading({"said": text.encode(), **rows}, shown=repr(found) + found.table())


def make_lesions(folder: Path) -> None:
    folder.mkdir()
    values = np.random.default_rng(0).random((2, 3))
    LesionMap(
        names=("L0H0", "L0H1", "L1H0"), kinds=("heads",) * 3, blocks=np.array([0, 0, 1]),
        columns=np.array([0, 1, 0]), prompts=("one", "two"), answers=("a", "b"), foils=("", ""),
        metric="surprisal", edit="zero", intact=values[:, 0], lesioned=values, estimate=values,
        activation=values, key="x",
    ).save(folder / "lesions.json")  # fmt: skip


def read_lesions(folder: Path) -> Reading:
    found = LesionMap.load(folder / "lesions.json")
    rows = {"lesions": repr(found.to_dict()).encode()}
    return Reading(rows, shown=repr(found) + found.table())


def make_states(folder: Path) -> None:
    from safetensors.numpy import save_file

    folder.mkdir()
    for number, length in enumerate((3, 2)):
        values = np.random.default_rng(number).random((length, 2, 4), np.float32)
        ids = np.arange(length, dtype=np.int64)
        save_file({"hidden_states": values, "token_ids": ids}, folder / f"{number}.safetensors")


def read_states(folder: Path) -> Reading:
    found = torchfmri.import_hidden_states(folder)
    return Reading({}, shown=repr(found))  # these are not ours and carry no checksum
