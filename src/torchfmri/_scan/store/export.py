"""Write a scan in formats that other programs read: Zarr, NetCDF, Parquet and CSV.

`Scan.export` calls `export`. `variables` says what stands in a Zarr store or a NetCDF file,
`tables` what stands in a table; this file lays out and writes. A file is there completely or not at
all, and what is there already is replaced only with overwrite=True. Chunk sizes may change freely;
names of variables may not, since other people's programs read them.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import check_target, from_extra
from torchfmri._files import make_folder, new_file, new_folder
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.record.sequence import Floats, ScannedSequence
from torchfmri._scan.store.tables import write_csv, write_parquet
from torchfmri._scan.store.variables import Variable, find_variables, labels, to_xarray
from torchfmri.exceptions import InspectionError

ENDINGS = (".zarr", ".nc", ".parquet", ".csv")
CHUNK = (128, 1024)
"""Tokens and columns that are compressed together."""
SHARD_BYTES = 16 << 20
"""About how large a file of a Zarr store is, before compression."""


def export(
    path: str | os.PathLike[str],
    anatomy: Anatomy,
    sequences: Iterable[ScannedSequence],
    meta: Mapping[str, Any],
    *,
    by: str = "layer",
    exact: bool = False,
    overwrite: bool = False,
) -> None:
    """Write a scan for other programs; see `Scan.export`."""
    target = check_target("path", path)
    if target.suffix not in ENDINGS:
        raise InspectionError(
            f"Cannot export to {str(target)!r}: the ending is one of {', '.join(ENDINGS)}. "
            "To keep the scan itself, use scan.save."
        )

    if by != "layer" and target.suffix in (".zarr", ".nc"):
        raise InspectionError(
            f"by={by!r} says what has a row of a table (.parquet, .csv). {target.suffix} holds "
            "layers and voxels beside each other: leave it out."
        )

    def require_free() -> None:
        _require_free(target, overwrite)

    if target.suffix == ".zarr":
        with new_folder(target, require_free, target.suffix) as new:
            _write_zarr(new, anatomy, sequences, meta, exact)
    else:
        require_free()
        make_folder(target.parent)
        with new_file(target) as new:
            if target.suffix == ".nc":
                _write_netcdf(new, anatomy, sequences, meta)
            else:
                write = write_csv if target.suffix == ".csv" else write_parquet
                write(new, anatomy, sequences, by)
            require_free()


def _require_free(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise InspectionError(
            f"{str(path)!r} exists. Write overwrite=True to replace it, or choose another name."
        )
    ours = (path / "zarr.json").is_file() if path.suffix == ".zarr" else path.is_file()
    if path.is_symlink() or not ours:
        raise InspectionError(
            f"{str(path)!r} is not a {path.suffix[1:]} of ours that could be replaced. Choose "
            "another name."
        )


def _write_netcdf(
    path: Path,
    anatomy: Anatomy,
    sequences: Iterable[ScannedSequence],
    meta: Mapping[str, Any],
) -> None:
    dataset = to_xarray(anatomy, sequences, meta)
    with from_extra("NetCDF needs xarray, h5netcdf and h5py", "export"):
        import h5netcdf  # noqa: F401
        import h5py  # noqa: F401
    # HDF5 ends the process with a segmentation fault where a disk is full, so it writes to memory.
    file = io.BytesIO()
    dataset.reset_index("name").to_netcdf(file, engine="h5netcdf", format="NETCDF4")
    path.write_bytes(file.getbuffer())


def bit_round(values: Floats, bits: int = 10) -> Floats:
    """Return the values with so many bits after the leading one, which compress to half the size.

    The error is at most 2**-(bits + 1) of the value: 4.9e-4 with 10 bits (of a subnormal number,
    below 1.2e-38, it may be more). Ties go to the even neighbour; NaN and infinities stay.
    """
    dropped = 23 - bits
    pattern = np.ascontiguousarray(values, np.float32).view(np.uint32)
    kept = pattern + ((pattern >> dropped) & 1) + np.uint32((1 << (dropped - 1)) - 1)
    kept &= np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    rounded: Floats = kept.view(np.float32)
    return np.where(np.isfinite(values) & np.isfinite(rounded), rounded, values)


def _write_zarr(
    path: Path,
    anatomy: Anatomy,
    sequences: Iterable[ScannedSequence],
    meta: Mapping[str, Any],
    exact: bool,
) -> None:
    with from_extra("Zarr needs xarray and zarr", "export"):
        import zarr
        from zarr.codecs import BloscCodec
    dataset = labels(anatomy, sequences, meta).reset_index("name")
    dataset.to_zarr(path, zarr_format=3, consolidated=False)
    group = zarr.open_group(path, mode="r+", use_consolidated=False)
    tokens = dataset.sizes["token"]
    for name, variable in find_variables(anatomy, sequences).items():
        rounds = not exact and variable.dtype == np.float32
        chunks, shards = _layout(tokens, variable)
        array = group.create_array(
            name,
            shape=(tokens, variable.width),
            dtype=variable.dtype,
            chunks=chunks,
            shards=shards,
            compressors=BloscCodec(cname="zstd", clevel=3, shuffle="shuffle"),
            fill_value=np.nan if variable.dtype.kind == "f" else 0,
            dimension_names=variable.dimensions,
            attributes={
                "long_name": variable.note,
                "rounding": "BitRound(10): relative error at most 4.9e-4" if rounds else "none",
            },
        )
        _fill(array, variable, shards[0], rounds)
    with warnings.catch_warnings():  # it is beyond the standard, but xarray complains without it
        warnings.simplefilter("ignore", UserWarning)
        zarr.consolidate_metadata(path)


def _layout(tokens: int, variable: Variable) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the chunks and shards of an array; a shard is as wide as the array."""
    columns = max(1, min(CHUNK[1], variable.width))
    width = columns * max(1, -(-variable.width // columns))
    rows = max(1, min(CHUNK[0], tokens))
    many = max(1, SHARD_BYTES // (rows * width * variable.dtype.itemsize))
    return (rows, columns), (rows * min(many, max(1, -(-tokens // rows))), width)


def _fill(array: Any, variable: Variable, rows: int, rounds: bool) -> None:
    """Write all parts, a shard at a time, so that none is written twice."""
    at, waiting = 0, np.empty((0, variable.width), variable.dtype)
    for part in variable.parts():
        waiting = np.concatenate([waiting, part], dtype=variable.dtype)
        whole = len(waiting) - len(waiting) % rows
        for first in range(0, whole, rows):
            _put(array, at, waiting[first : first + rows], rounds)
            at += rows
        waiting = waiting[whole:]
    _put(array, at, waiting, rounds)
    if at + len(waiting) != array.shape[0]:
        raise InspectionError("The scan changed while it was exported. Export it again.")


def _put(array: Any, at: int, values: NDArray[Any], rounds: bool) -> None:
    if values.size:
        array[at : at + len(values)] = bit_round(values) if rounds else values
