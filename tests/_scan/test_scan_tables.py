"""Scans as long tables: pandas, polars, CSV, Parquet, xarray and NetCDF equal the scan."""

import builtins
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scans import make_anatomy, make_sequence

from torchfmri import InspectionError, Scan, ScannedSequence
from torchfmri._scan.record.sequence import METRICS
from torchfmri._scan.store.fields import field_columns

pandas = pytest.importorskip("pandas")
ROWS: list[dict[str, Any]] = [
    {"topic": 'käse, "x"\n', "n": 1, "score": 0.5, "good": True, "tags": [1, "a"], "text": "x"},
    {"topic": "", "n": 2, "score": 1, "good": False, "tags": [], "text": "y", "extra": 3},
]


@pytest.fixture(scope="module")
def scan() -> Scan:
    anatomy = make_anatomy(2)
    sequences = [
        make_sequence(anatomy, 5 + 2 * k, seed=k, condition="ab"[k], fields=row)
        for k, row in enumerate(ROWS)
    ]
    return Scan(anatomy, sequences, {"model": "random"})


def expected(scan: Scan, by: str, metric: str) -> np.ndarray:
    parts = []
    for sequence in scan:
        table = sequence.layers if by == "layer" else sequence.voxels
        heads = scan.anatomy.kind == 1 if by == "head" else slice(None)
        parts.append(table[metric][:, heads].reshape(-1))
    return np.concatenate(parts)


@pytest.mark.parametrize("by", ["token", "layer", "voxel", "head"])
def test_a_frame_equals_the_scan(scan: Scan, by: str) -> None:
    frame = scan.to_dataframe(by)
    heads = int((scan.anatomy.kind == 1).sum())
    width = {"token": 1, "layer": len(scan.layers), "voxel": len(scan.anatomy.layer), "head": heads}
    assert len(frame) == 12 * width[by]
    assert set(frame["sequence"]) == {"0", "1"}
    surprisal = np.concatenate([s.tokens.surprisal for s in scan]).repeat(width[by])
    np.testing.assert_array_equal(frame["surprisal"], surprisal)
    assert frame["n"].dtype == np.int64
    assert frame["score"].dtype == np.float64
    assert frame["good"].dtype == bool
    assert set(frame["tags"]) == {'[1,"a"]', "[]"}
    assert set(frame["field_text"]) == {"x", "y"}  # `text` is that of the token
    assert frame["extra"].dtype == "Int64"
    assert frame["extra"].iloc[0] is pandas.NA
    assert frame["extra"].iloc[-1] == 3
    if by == "token":
        return
    for metric in METRICS:
        np.testing.assert_array_equal(frame[metric], expected(scan, by, metric))
    names = [*scan.layers] if by == "layer" else [scan.layers[k] for k in scan.anatomy.layer]
    if by != "head":
        assert frame["layer"].iloc[: len(names)].tolist() == names
    if by == "head":
        assert frame["head"].iloc[:4].tolist() == [0, 1, 0, 1]
        assert set(frame["kind"]) == {"head"}


@pytest.mark.parametrize("by", ["token", "layer", "voxel", "head"])
def test_files_equal_the_frame(scan: Scan, by: str, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = scan.to_dataframe(by)
    for ending in ("csv", "parquet"):
        scan.export(tmp_path / f"x.{ending}", by=by)
    gaps = [name for name in frame if frame[name].dtype.kind == "f" or name == "extra"]
    texts = [name for name in frame if frame[name].dtype.kind == "O"]
    read = {
        "csv": pandas.read_csv(
            tmp_path / "x.csv",
            keep_default_na=False,
            na_values={name: [""] for name in gaps},
            dtype={name: frame[name].dtype for name in gaps} | dict.fromkeys(texts, str),
        ),
        "parquet": pandas.read_parquet(tmp_path / "x.parquet"),
        "polars": polars.read_parquet(tmp_path / "x.parquet").to_pandas(),
    }
    for other in read.values():
        assert list(other.columns) == list(frame.columns)
        for name in frame:
            assert other[name].isna().tolist() == frame[name].isna().tolist(), name
            assert other[name].dropna().tolist() == frame[name].dropna().tolist(), name


def test_labelled_arrays_can_be_grouped_and_come_back(scan: Scan, tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    dataset = scan.to_xarray()
    assert {"prompt", "token", "layer", "voxel"} <= set(dataset.dims)
    means = dataset["layer_activation"].groupby("condition").mean("token")
    np.testing.assert_allclose(
        means.sel(condition="b").values, scan[1].layers["activation"].mean(0), rtol=1e-5
    )
    by_field = dataset["layer_activation"].groupby("n").mean("token")
    np.testing.assert_allclose(by_field.sel(n=2).values, means.sel(condition="b").values)
    assert dataset.sel(name="1")["prompt_condition"].item() == "b"
    scan.export(tmp_path / "x.nc")
    with xarray.open_dataset(tmp_path / "x.nc") as read:
        assert set(read.coords) == set(dataset.coords)
        for name, variable in dataset.variables.items():
            found = read[name].values
            np.testing.assert_array_equal(found.astype(variable.dtype), variable.values)
        assert read.attrs["meta"] == dataset.attrs["meta"]


def test_a_scan_without_rows_has_the_columns() -> None:
    anatomy = make_anatomy(1)
    for sequences in ([], [make_sequence(anatomy, 0)]):
        frame = Scan(anatomy, sequences, {}).to_dataframe("voxel")
        assert len(frame) == 0
        assert {"sequence", "layer", "head", "activation"} <= set(frame.columns)


def test_fields_of_many_types_have_one() -> None:
    anatomy = make_anatomy(1)
    fields: list[dict[str, Any]] = [
        {"a": 1, "b": True, "c": 1, "d": None, "e": "x", "f": 2**63, "g": 2**60, "h": math.nan},
        {"a": 2.5, "b": 1, "c": 2, "d": 4, "e": {"x": 1}, "f": 1, "g": 0.5, "h": "x"},
        {"a": 3, "b": False, "d": None, "e": None, "f": 2, "g": 1, "h": math.inf},
    ]
    sequences = [make_sequence(anatomy, 2, seed=k, fields=f) for k, f in enumerate(fields)]
    columns = {each.name: each for each in field_columns(sequences, [])}
    types = {name: each.type for name, each in columns.items()}
    assert types == {
        "a": float, "b": str, "c": int, "d": int, "e": str, "f": str, "g": str, "h": str
    }  # fmt: skip
    assert [name for name, each in columns.items() if each.has_gaps] == ["c", "d", "e", "h"]
    assert [columns["e"].value(each) for each in fields] == ["x", '{"x":1}', None]
    assert [columns["b"].value(each) for each in fields] == ["true", "1", "false"]
    assert [columns["f"].value(each) for each in fields] == [str(2**63), "1", "2"]
    assert [columns["h"].value(each) for each in fields] == [None, "x", "inf"]


GAPS: dict[str, list[Any]] = {
    "whole": [1, None, 3],
    "large": [2**60 + 1, None, 2**60 + 3],
    "flag": [True, None, False],
    "real": [0.5, None, 2.5],
    "word": ["x", None, ""],
    "date": ["2024-01-02", None, "2024-01-03"],
}


def test_fields_with_gaps_keep_their_types(tmp_path: Path) -> None:
    """A value that is missing is missing everywhere, and changes no other one."""
    polars, xarray = pytest.importorskip("polars"), pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    anatomy = make_anatomy(1)
    rows = [
        {name: values[k] for name, values in GAPS.items() if k != 1 or name == "flag"}
        for k in range(3)
    ]
    made = [make_sequence(anatomy, 1, seed=k, fields=row) for k, row in enumerate(rows)]
    scan = Scan(anatomy, made, {})
    frame = scan.to_dataframe()
    assert [str(frame[name].dtype) for name in ("whole", "large", "flag", "real")] == [
        "Int64", "Int64", "boolean", "float64"
    ]  # fmt: skip
    for name, values in GAPS.items():
        found = frame[name].astype(object)
        assert found.isna().tolist() == [False, True, False]
        assert found.dropna().tolist() == [values[0], values[2]]
    for ending in ("csv", "parquet", "nc"):
        scan.export(tmp_path / f"x.{ending}", **({} if ending == "nc" else {"by": "token"}))
    read = polars.read_parquet(tmp_path / "x.parquet")
    for name, values in GAPS.items():
        cells = read[name].fill_nan(None) if name == "real" else read[name]
        assert cells.to_list() == values, name
    assert [str(read[name].dtype) for name in ("whole", "flag")] == ["Int64", "Boolean"]
    cells = pandas.read_csv(tmp_path / "x.csv", dtype=str, keep_default_na=False)
    for name, values in GAPS.items():
        assert cells[name].tolist() == ["" if each is None else str(each) for each in values]
    arrays = scan.to_xarray()
    np.testing.assert_array_equal(arrays["whole"], [1, np.nan, 3])
    assert arrays["large"].values.tolist() == [str(2**60 + 1), "", str(2**60 + 3)]
    assert arrays["flag"].values.tolist() == ["true", "", "false"]
    assert arrays["word"].values.tolist() == ["x", "", ""]
    with xarray.open_dataset(tmp_path / "x.nc") as stored:
        for name in GAPS:
            np.testing.assert_array_equal(stored[name].values, arrays[name].values)


def test_tables_that_cannot_be_made(
    scan: Scan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InspectionError, match="by='word': choose one of 'token'"):
        scan.to_dataframe("word")
    anatomy = make_anatomy(1)
    plain = type(anatomy)(**{**vars(anatomy), "kind": np.zeros_like(anatomy.kind)})
    bare = ScannedSequence("x", scan[0].tokens, {}, {})
    with pytest.raises(InspectionError, match="No voxel of this scan is a head"):
        Scan(plain, [bare], {}).export(tmp_path / "x.csv", by="head")
    assert list(tmp_path.iterdir()) == []
    real = builtins.__import__

    def refuse(module: str, *rest: Any) -> Any:
        if module.partition(".")[0] in ("pandas", "h5netcdf", "formulaic"):
            raise ImportError(module)
        return real(module, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InspectionError, match=r"torchfmri\[tables\]"):
        scan.to_dataframe()
    with pytest.raises(InspectionError, match=r"torchfmri\[glm\]"):
        scan.glm("surprisal")
