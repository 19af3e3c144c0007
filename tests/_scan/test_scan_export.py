"""Scans for other programs: labelled arrays, Zarr and Parquet."""

import builtins
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from stored_scans import ANATOMY, META, make_sequence

from torchfmri import InspectionError, Scan, ScannedSequence, load
from torchfmri._scan.record.sequence import METRICS
from torchfmri._scan.store import export as export_module
from torchfmri._scan.store.export import bit_round


@pytest.fixture
def scan() -> Scan:
    """Three sequences, one of them empty and one without gradients, tensors and statistics."""
    last = make_sequence("last", 7)
    bare = {key: {"activation": getattr(last, key)["activation"]} for key in ("layers", "voxels")}
    last = ScannedSequence(**{**vars(last), **bare, "statistics": {}, "tensors": {}})
    return Scan(ANATOMY, [make_sequence("first", 5), make_sequence("empty", 0), last], META)


def test_dataset_is_labelled(scan: Scan) -> None:
    pytest.importorskip("xarray")
    dataset = scan.to_xarray()
    assert dict(dataset.sizes) == {
        "token": 12,
        "layer": 3,
        "voxel": 8,
        "prompt": 3,
        "statistic": 8,
        "unit_käse": 5,
    }
    assert dataset["sequence"].values.tolist() == [0] * 5 + [2] * 7
    assert dataset["position"].values.tolist() == [*range(5), *range(7)]
    assert dataset["name"].values.tolist() == ["first", "empty", "last"]
    assert dataset["prompt_condition"].values.tolist() == [each.condition for each in scan]
    assert dataset["condition"].values.tolist() == [c.condition for c in scan for _ in c.tokens.ids]
    assert dataset["text"].values.tolist() == [*scan[0].tokens.pieces, *scan[2].tokens.pieces]
    assert dataset["voxel_layer"].values.tolist() == [ANATOMY.layers[i] for i in ANATOMY.layer]
    assert dataset["voxel_kind"].values.tolist().count("expert") == 2
    one = dataset.sel(layer="käse").isel(token=dataset["sequence"] == 2)
    expected = scan[2].layers["activation"][:, 2]
    np.testing.assert_array_equal(one["layer_activation"].values, expected)
    np.testing.assert_array_equal(dataset["activation"].values[:5], scan[0].voxels["activation"])
    assert np.isnan(dataset["gradient"].values[5:]).all()  # that sequence has none
    np.testing.assert_array_equal(dataset["tensor_käse"].values[:5], scan[0].tensors["käse"])
    assert dataset["tensor_käse"].dtype == np.float16
    statistics = dataset["statistics_activations"].sel(name="first").values
    np.testing.assert_array_equal(statistics, scan[0].statistics["activations"])
    assert json.loads(dataset.attrs["meta"])["model"] == "tiny"


def test_zarr_opens_as_the_same_dataset(
    scan: Scan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xarray, zarr = pytest.importorskip("xarray"), pytest.importorskip("zarr")
    monkeypatch.setattr(export_module, "CHUNK", (2, 3))
    monkeypatch.setattr(export_module, "SHARD_BYTES", 4 * 9 * 4)  # several shards, the last short
    scan.save(tmp_path / "x.fmri")
    stored = load(tmp_path / "x.fmri")
    stored.export(tmp_path / "exact.zarr", exact=True)
    stored.export(tmp_path / "x.zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = xarray.open_zarr(tmp_path / "exact.zarr", chunks=None).load()
        rounded = xarray.open_zarr(tmp_path / "x.zarr", chunks=None).load()
    expected = scan.to_xarray()
    for name, variable in expected.variables.items():
        assert exact[name].dims == variable.dims
        np.testing.assert_array_equal(exact[name].values.astype(variable.dtype), variable.values)
    assert set(exact.coords) == set(expected.coords)
    for metric in METRICS:
        values, original = rounded[metric].values, expected[metric].values
        np.testing.assert_array_equal(values, bit_round(original))
        np.testing.assert_allclose(values, original, rtol=4.9e-4, atol=0)
    array = zarr.open_group(tmp_path / "x.zarr")["activation"]
    assert array.metadata.zarr_format == 3
    assert array.metadata.dimension_names == ("token", "voxel")
    assert (array.shards, array.chunks) == ((4, 9), (2, 3))
    assert "4.9e-4" in array.attrs["rounding"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["exact.zarr", "x.fmri", "x.zarr"]


def test_an_empty_scan_can_be_exported(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    for number, sequences in enumerate([[], [make_sequence("empty", 0)]]):
        Scan(ANATOMY, sequences, META).export(tmp_path / f"{number}.zarr")
        dataset = xarray.open_zarr(tmp_path / f"{number}.zarr", chunks=None)
        assert (dataset.sizes["token"], dataset.sizes["prompt"]) == (0, number)


def test_half_the_size(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    random = np.random.default_rng(0)
    sequence = make_sequence("s", 400)
    voxels = {metric: np.exp(random.normal(size=(400, 8))).astype(np.float32) for metric in METRICS}
    scan = Scan(ANATOMY, [ScannedSequence(**{**vars(sequence), "voxels": voxels})], META)
    scan.export(tmp_path / "x.zarr")
    size = sum(each.stat().st_size for each in (tmp_path / "x.zarr" / "gradient").rglob("c/*/*"))
    assert size < 0.55 * voxels["gradient"].nbytes


@settings(deadline=None)
@given(arrays.arrays(np.float32, st.integers(0, 50), elements=st.floats(width=32)))
def test_bit_rounding(values: np.ndarray) -> None:
    rounded = bit_round(values)
    odd = ~np.isfinite(values)
    np.testing.assert_array_equal(rounded[odd], values[odd])
    kept = np.isfinite(values) & (np.abs(values) >= np.finfo(np.float32).tiny)
    exact = values[kept].astype(np.float64)
    assert (np.abs(rounded[kept] - exact) <= 2.0**-11 * np.abs(exact)).all()
    largest = np.abs(values) > 3.3e38  # not rounded up to infinity
    assert np.isfinite(rounded[kept & largest]).all()
    bits = rounded[kept & ~largest].view(np.uint32)
    assert not (bits & 0x1FFF).any()
    np.testing.assert_array_equal(bit_round(rounded), rounded)


def test_bit_rounding_is_that_of_numcodecs() -> None:
    codecs = pytest.importorskip("numcodecs")
    random = np.random.default_rng(0)
    values = np.exp(random.normal(scale=10, size=10_000)).astype(np.float32)
    codec = codecs.BitRound(keepbits=10)
    expected = codec.decode(codec.encode(values.copy())).view(np.float32)
    np.testing.assert_array_equal(bit_round(values), expected)
    tie = np.float32(1 + 2**-11)  # half way between two neighbours: nothing is rounded further
    assert abs(float(bit_round(np.array([tie]))[0]) / float(tie) - 1) > 4.88e-4


def test_parquet_is_the_table_of_layers(scan: Scan, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    scan.export(tmp_path / "x.parquet")
    table = parquet.read_table(tmp_path / "x.parquet").to_pydict()
    assert len(table["layer"]) == 12 * 3
    row = 3 * 3 + 1  # token 3 of the first sequence, layer 1
    assert (table["sequence"][row], table["position"][row]) == ("first", 3)
    assert (table["layer"][row], table["module"][row]) == ("layers.0.mlp", "MLP")
    assert table["text"][row] == scan[0].tokens.pieces[3]
    assert table["id"][row] == scan[0].tokens.ids[3]
    assert table["generated"][row] == scan[0].tokens.generated[3]
    for metric in METRICS:
        found = np.array(table[metric], np.float32).reshape(12, 3)
        np.testing.assert_array_equal(found[:5], scan[0].layers[metric])
    assert np.isnan(np.array(table["gradient"][15:], float)).all()


def test_choices_are_named(scan: Scan, tmp_path: Path) -> None:
    for name in ("x.tsv", "x", "x.h5"):
        with pytest.raises(InspectionError, match=r"one of \.zarr, \.nc, \.parquet, \.csv"):
            scan.export(tmp_path / name)
    for name in ("x.nc", "x.zarr"):  # has layers and voxels whatever `by` says
        with pytest.raises(InspectionError, match="by='head' says what has a row of a table"):
            scan.export(tmp_path / name, by="head")


@pytest.mark.parametrize("name", ["x.zarr", "x.parquet"])
def test_nothing_is_replaced_without_asking(scan: Scan, tmp_path: Path, name: str) -> None:
    pytest.importorskip("zarr")
    scan.export(tmp_path / name)
    with pytest.raises(InspectionError, match="overwrite=True"):
        scan.export(tmp_path / name)
    scan.export(tmp_path / name, overwrite=True)
    other = tmp_path / "other" / name
    other.mkdir(parents=True)
    (other / "mine").write_text("years of work")
    with pytest.raises(InspectionError, match="could be replaced"):
        scan.export(other, overwrite=True)
    assert (other / "mine").exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["other", name])


def test_an_export_that_fails_leaves_nothing(
    scan: Scan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zarr")

    def fail(*arguments: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(export_module, "_put", fail)
    with pytest.raises(OSError, match="No space"):
        scan.export(tmp_path / "x.zarr")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("missing", "name", "hint"),
    [
        ("xarray", "x.zarr", r"torchfmri\[export\]"),
        ("zarr", "x.zarr", r"torchfmri\[export\]"),
        ("pyarrow", "x.parquet", r"torchfmri\[parquet\]"),
    ],
)
def test_a_missing_package_says_how_to_get_it(
    scan: Scan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, name: str, hint: str
) -> None:
    real = builtins.__import__

    def refuse(module: str, *rest: Any) -> Any:
        if module.partition(".")[0] == missing:
            raise ImportError(module)
        return real(module, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InspectionError, match=hint):
        scan.export(tmp_path / name)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_tensors_of_different_widths_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("xarray")
    sequences = [
        ScannedSequence(**{**vars(make_sequence(name)), "tensors": {"embed": np.zeros((4, width))}})
        for name, width in (("a", 2), ("b", 3))
    ]
    with pytest.raises(InspectionError, match=r"'embed' have different widths: \[2, 3\]"):
        Scan(ANATOMY, sequences, META).to_xarray()


def test_damage_is_not_left_out_without_a_word(scan: Scan, tmp_path: Path) -> None:
    pytest.importorskip("xarray")
    scan.save(tmp_path / "x.fmri")
    damaged = max((tmp_path / "x.fmri").glob("segment*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    stored = load(tmp_path / "x.fmri")
    with pytest.warns(UserWarning, match=f"1 problem.*{damaged.name}"):
        dataset = stored.to_xarray()
    assert dataset["name"].values.tolist() == ["first", "empty"]
