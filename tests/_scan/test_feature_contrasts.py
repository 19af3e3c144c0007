"""Contrasts and lesions over the features of a dictionary, against loops over dense features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor, nn

import torchfmri
from torchfmri import InspectionError, ScanOptions, lesion

ROWS = [
    {"ids": [7, 9, 7, 9, 12], "condition": "a"},
    {"ids": [7, 8, 3, 9], "condition": "a"},
    {"ids": [5, 9, 11, 9, 12, 2], "condition": "a"},
    {"ids": [20, 21, 22, 20], "condition": "b"},
    {"ids": [30, 31, 22, 20, 4], "condition": "b"},
    {"ids": [25, 21, 27], "condition": "b"},
]


class Dictionary:
    """Forty directions, of which about half are on at a token."""

    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.directions = torch.randn(16, 40)

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self.directions.to(x.dtype) - 0.05).relu()

    def decode(self, features: Tensor) -> Tensor:
        return features @ self.directions.to(features.dtype).T / 40


def build() -> nn.Module:
    return ARCHITECTURES["llama"].build("eager", attention_dropout=0.0).eval()


def dense(model: nn.Module, ids: list[int], sae: Dictionary) -> np.ndarray[Any, Any]:
    """(s, 40) the features of block 1, with a hook of our own."""
    seen: list[Tensor] = []
    block = model.model.layers[1]
    handle = block.register_forward_hook(
        lambda _, x, y: seen.append(y if isinstance(y, Tensor) else y[0])
    )
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    handle.remove()
    return sae.encode(seen[0])[0].numpy()


def scanned(tmp_path: Path, count: int, sae: Dictionary) -> torchfmri.Scan:
    options = ScanOptions(per=None, features={"L1": sae}, feature_count=count)
    torchfmri.scan_dataset(build(), None, ROWS, tmp_path / "f.fmri", 0, options=options)
    return torchfmri.load(tmp_path / "f.fmri")


def means_by_hand(count: int, sae: Dictionary) -> np.ndarray[Any, Any]:
    """(prompt, 40) the mean over tokens of the `count` strongest features, 0 for the others."""
    model, found = build(), []
    for row in ROWS:
        table = dense(model, row["ids"], sae)  # type: ignore[arg-type]
        for token in table:
            token[np.argsort(-token)[count:]] = 0
        found.append(table.mean(0))
    return np.stack(found)


@pytest.mark.parametrize("count", [40, 5])
def test_a_contrast_over_features_is_that_of_their_means(tmp_path: Path, count: int) -> None:
    sae = Dictionary()
    scan = scanned(tmp_path, count, sae)
    found = scan.contrast("a", "b", level="feature", labels={3: "three", 99: "never"})
    means = means_by_hand(count, sae)
    seen = np.flatnonzero((means > 0).any(0))
    assert found.columns.start.tolist() == seen.tolist()
    expected = means[:3].mean(0) - means[3:].mean(0)
    np.testing.assert_allclose(found.effect, expected[seen], atol=1e-6)
    # Welch's t, written out, for one feature that is on in both groups.
    feature = int(np.argmax((means > 0).sum(0)))
    a, b = means[:3, feature], means[3:, feature]
    t = (a.mean() - b.mean()) / np.sqrt(a.var(ddof=1) / 3 + b.var(ddof=1) / 3)
    assert found.t[list(seen).index(feature)] == pytest.approx(t, rel=1e-4)
    note = next(each for each in found.notes if "strongest of each token" in each)
    assert ("nothing was lost" in note) == (count == 40)
    assert found.columns.names[0] == f"L1[feature {seen[0]}]"


def test_labels_are_shown_and_kept(tmp_path: Path) -> None:
    scan = scanned(tmp_path, 40, Dictionary())
    labels = [f"direction {each}" for each in range(40)]
    found = scan.contrast("a", "b", level="feature", layers="L1", labels={"L1": labels})
    best = found.peaks(1)[0]
    assert (best.kind, best.label) == ("feature", f"direction {best.unit}")
    assert f"L1[feature {best.unit}] direction {best.unit}" in found.table(width=200)
    assert found.to_dataframe()["label"].tolist()[0] == f"direction {found.columns.start[0]}"
    found.save(tmp_path / "f.contrast")
    loaded = torchfmri.load_contrast(tmp_path / "f.contrast")
    assert loaded.peaks(1)[0].label == best.label
    assert loaded.table() == found.table()
    assert found.plot_contrast().figure is not None
    assert "direction" in str(found.tidy([0]))


def test_features_of_two_scans_are_joined_with_zeros(tmp_path: Path) -> None:
    sae = Dictionary()
    options = ScanOptions(per=None, features={"L1": sae}, feature_count=2)
    for side in "ab":
        rows = [row for row in ROWS if row["condition"] == side]
        torchfmri.scan_dataset(build(), None, rows, tmp_path / side, 0, options=options)
    sides = [torchfmri.load(tmp_path / side) for side in "ab"]
    found = torchfmri.contrast(*sides, level="feature")
    means = means_by_hand(2, sae)
    seen = np.flatnonzero((means > 0).any(0))
    only_one = (means[:3] > 0).any(0) ^ (means[3:] > 0).any(0)
    assert only_one.any()  # else nothing would have to be joined
    assert found.columns.start.tolist() == seen.tolist()
    expected = means[:3].mean(0) - means[3:].mean(0)
    np.testing.assert_allclose(found.effect, expected[seen], atol=1e-6)


def test_contrasts_over_features_refuse_what_is_not_there(tmp_path: Path) -> None:
    scan = scanned(tmp_path, 40, Dictionary())
    with pytest.raises(InspectionError, match="has no level='feature'"):
        scan.contrast("a", "b", level="feature", metric="gradient")
    with pytest.raises(InspectionError, match="labels= are texts for features"):
        scan.contrast("a", "b", labels={1: "x"})
    with pytest.raises(InspectionError, match="labels=3"):
        scan.contrast("a", "b", level="feature", labels=3)
    with pytest.raises(InspectionError, match=r"Test features with scan\.contrast"):
        scan.glm("condition", level="feature")
    options = ScanOptions(per=None)
    torchfmri.scan_dataset(build(), None, ROWS, tmp_path / "n.fmri", 0, options=options)
    with pytest.raises(InspectionError, match=r"no feature ids\. Scan with features"):
        torchfmri.load(tmp_path / "n.fmri").contrast("a", "b", level="feature")


@pytest.mark.parametrize("batch", [1, 8])
def test_a_lesion_takes_one_feature_out(batch: int) -> None:
    sae, model = Dictionary(), build().double()
    ids, answer = [7, 9, 7, 9, 12], 30
    found = lesion(
        model, None, torch.tensor(ids), [[answer]], of="features", features={"L1": sae},
        batch=batch, method="both", labels={3: "three"},
    )  # fmt: skip

    def surprisal(feature: int | None) -> float:
        """Block 1's output less the feature's value times its direction, with a plain hook."""

        def cut(_: nn.Module, given: object, output: Any) -> Any:
            value = output if isinstance(output, Tensor) else output[0]
            if feature is None:
                return None
            weight = (value @ sae.directions.double()[:, feature] - 0.05).relu()
            new = value - weight[..., None] * sae.directions.double()[:, feature] / 40
            return new if isinstance(output, Tensor) else (new, *output[1:])

        handle = model.model.layers[1].register_forward_hook(cut)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        handle.remove()
        return -float(logits.log_softmax(-1)[answer])

    on = np.flatnonzero((dense(model, ids, sae) > 0).any(0)).tolist()
    assert found.names == tuple(f"L1[feature {each}]" for each in on)
    assert found.intact[0] == pytest.approx(surprisal(None), abs=1e-9)
    for column, feature in enumerate(on):
        assert found.lesioned[0, column] == pytest.approx(surprisal(feature), abs=1e-9)
    assert np.abs(found.effect).max() > 1e-4  # a lesion that does nothing would pass otherwise
    assert found.estimate_error()["r"] > 0.9
    rms = np.sqrt((dense(model, ids, sae)[:, on] ** 2).mean(0))
    np.testing.assert_allclose(found.activation[0], rms, rtol=1e-5)
    assert ("three" in found.table(count=40)) == (3 in on)


def test_named_features_are_kept_with_their_labels_and_resumed(tmp_path: Path) -> None:
    sae, model, path = Dictionary(), build(), tmp_path / "l.json"

    def run(dictionary: Dictionary) -> torchfmri.LesionMap:
        return lesion(
            model, None, torch.tensor([7, 9, 7]), [[4]], of=["L1[feature 7]", "mlps"], path=path,
            features={"L1": dictionary}, labels={7: "seven"},
        )  # fmt: skip

    found = run(sae)
    assert found.names[-1] == "L1[feature 7]"
    assert found.kinds.count("mlps") == len(found.names) - 1
    loaded = torchfmri.LesionMap.load(path)
    assert loaded.labels == found.labels == (*[""] * (len(found.names) - 1), "seven")
    assert run(sae).effect.tolist() == found.effect.tolist()
    with pytest.raises(InspectionError, match="lesions of another model"):
        run(Dictionary(seed=2))
    assert len(found.plot().axes) == 4


def test_lesions_of_features_refuse_what_is_not_there() -> None:
    model, sae, ids = build(), Dictionary(), torch.tensor([7, 9, 7])

    def run(**given: Any) -> None:
        lesion(model, None, ids, [[4]], **given)

    with pytest.raises(InspectionError, match="no dictionary makes them"):
        run(of="features")
    with pytest.raises(InspectionError, match="lesions none of them"):
        run(features={"L1": sae})
    with pytest.raises(InspectionError, match="has 40, 0 to 39"):
        run(of="L1[feature 40]", features={"L1": sae})
    with pytest.raises(InspectionError, match="dictionary at 'L1'"):
        run(of="L0[feature 4]", features={"L1": sae})
    with pytest.raises(InspectionError, match="decode"):
        run(of="features", features={"L1": torch.relu})
    with pytest.raises(InspectionError, match="edit='mean'"):
        run(of="features", features={"L1": sae}, edit="mean")
    silent = Dictionary()
    silent.directions *= 0
    with pytest.raises(InspectionError, match="No feature of 'L1' is on"):
        run(of="features", features={"L1": silent})
    assert not any(each._forward_hooks for each in model.modules())
