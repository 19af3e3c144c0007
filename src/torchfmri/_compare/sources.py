"""Turn whatever the user hands to `compare` into a `Side`.

`entry_point` calls `opened` for paths and `side_of` for the rest: a `Run`, one or several
`Inspection`s, or a `Scan`. A new source needs a branch in `side_of`, and in `opened` if it can be a
file. Errors of the user's model pass through `running`, which names the side and keeps the error as
the cause. A scan holds only the size of each token's values, so its recording is marked "rms", and
`entry_point` then reduces the other side in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchfmri._arguments import is_list
from torchfmri._compare.grid import PositionGrid
from torchfmri._compare.hidden_states import import_hidden_states
from torchfmri._compare.recording import Recording
from torchfmri._compare.run import RecordedPass, Run, kept_value
from torchfmri._compare.side import Side, live_side, measure_repeats
from torchfmri._explain import add_note
from torchfmri._files import list_names
from torchfmri._records import Call, History, Inspection, Record, kind_of
from torchfmri._scan import Scan, load
from torchfmri.exceptions import FileFormatError, InspectionError, MemoryLimitError

_CHOICES = (
    "Give a model with data=, a torchfmri.Run, an Inspection, a Scan, a History, or the path of a "
    "saved one"
)

_ALLOW_MORE = (
    "Give less data (fewer rows or tokens), a larger max_bytes, or none (max_bytes=None: no limit)."
)


def opened(given: Any) -> Any:
    """Open a path: a saved inspection, history or scan, or exported hidden states.

    Raises:
        FileFormatError: There is nothing that can be read.
    """
    if is_list(given) and given and any(isinstance(each, (str, PathLike)) for each in given):
        return [opened(each) for each in given]
    if not isinstance(given, (str, PathLike)):
        return given
    path = Path(given)
    kind = kind_of(path)
    if kind == "inspection":
        return Inspection.load(path)
    if kind == "history":
        return History.load(path)
    if path.suffix == ".safetensors":
        return import_hidden_states(path)
    if not path.is_dir():
        saved = "it is no file that torchfmri saved, or it is damaged or a part of one"
        fact = saved if path.exists() else "there is no such file"
        raise FileFormatError(str(path), f"{fact}. {_CHOICES}")
    names = list_names(path)
    if "meta.json" in names:
        return load(path)
    states = [n for n in names if n.endswith(".safetensors") and not n.startswith("steps-")]
    return import_hidden_states(path) if states else History.load(path)


def recorded_data(other: Any) -> Any:
    """The tokens that the other side recorded; None if it has none."""
    first = other[0] if isinstance(other, (list, tuple)) and other else other
    if isinstance(first, Scan) and len(first):
        return {"input_ids": torch.from_numpy(np.array(first[0].tokens.ids))[None]}
    if not isinstance(first, Inspection) or first.token_ids is None:
        return None
    found = {"input_ids": first.token_ids}
    return found if first.kept is None else {**found, "attention_mask": first.kept.long()}


@contextmanager
def running(name: str, side: Any) -> Iterator[None]:
    """Note at an error of a model or its loss which side raised it; the error passes through."""
    try:
        yield
    except MemoryLimitError as error:
        given = error.layer, error.needed, error.kept, error.max_bytes
        raise MemoryLimitError(*given, advice=_ALLOW_MORE) from error
    except Exception as error:
        if isinstance(side, Run) and not isinstance(error, InspectionError):
            kind = type(side.model).__name__
            add_note(error, f"torchfmri.compare: raised while {name} was run, a {kind}")
        raise


def side_of(given: Any, name: str, max_bytes: int | None) -> Side:
    """A side of a comparison of runs.

    Raises:
        InspectionError: It is nothing that can be compared.
    """
    if isinstance(given, Run):
        return live_side(given, max_bytes)
    if is_list(given) and given and all(isinstance(each, Inspection) for each in given):
        return _recorded(given)
    if isinstance(given, Inspection):
        return _recorded([given])
    if isinstance(given, Scan):
        return scan_side(given)
    raise InspectionError(f"{name} is a {type(given).__name__} ({given!r:.80}). {_CHOICES}.")


def _recorded(inspections: Sequence[Inspection]) -> Side:
    """A recording, with the spread of further recordings of the same run."""
    first = inspections[0]
    side = Side(Recording(RecordedPass(first, inspection_grids(first))))
    for other in inspections[1:]:
        measure_repeats(side, RecordedPass(other, inspection_grids(other)))
    side.notes += [f"{text}" for text, layers in first.notes.items() if not any(layers)]
    side.tokens = list(first.tokens)
    return side


def inspection_grids(inspection: Inspection) -> list[PositionGrid]:
    """Where the tokens are in a recording: by its token numbers, or by its padding."""
    ids, kept = inspection.token_ids, inspection.kept
    if ids is None and kept is None:
        return []
    shape = (ids if ids is not None else kept).shape  # type: ignore[union-attr]
    kept = torch.ones(shape, dtype=torch.bool, device="cpu") if kept is None else kept
    return [PositionGrid(kept=kept, order=tuple(range(shape[0])), ids=ids)]


def _finishing(layers: Sequence[str]) -> list[str]:
    """Return layers in the order in which they finish: a module after the layers inside it."""
    found: list[str] = []
    running: list[str] = []
    for layer in layers:
        while running and not _is_inside(layer, running[-1]):
            found.append(running.pop())
        running.append(layer)
    return [*found, *reversed(running)]


def _is_inside(layer: str, other: str) -> bool:
    return not other or layer.startswith(f"{other}.")


def scan_side(scan: Scan) -> Side:
    """The first sequence of a scan: the size of each layer's values at each token."""
    if not len(scan):
        raise InspectionError("The scan has no sequences: there is nothing to compare.")
    sequence = scan[0]
    named: Any = getattr(torch, str(scan.meta.get("dtype")), None)
    known = isinstance(named, torch.dtype) and named.is_floating_point
    computed = named if known else torch.float32
    records = {}
    for order, layer in enumerate(_finishing(scan.anatomy.layers)):
        column = scan.anatomy.layers.index(layer)
        record = Record(layer, scan.anatomy.types[column], frozenset({"activations", "gradients"}))
        call = Call(layer, 0, order)
        for metric, what in (("activation", "activations"), ("gradient", "gradients")):
            if metric not in sequence.layers:
                continue
            numbers = torch.from_numpy(np.array(sequence.layers[metric][:, column], np.float32))
            value = kept_value("", numbers[None, :, None])
            value.dtype = computed  # the sizes are kept in float32
            if what == "activations":
                call._values[what, ""] = value
            else:
                call._gradients[0, what, ""] = value
        record.calls.append(call)
        records[layer] = record
    ids = torch.from_numpy(np.array(sequence.tokens.ids))[None]
    grid = PositionGrid(kept=torch.ones_like(ids, dtype=torch.bool), order=(0,), ids=ids)
    inspection = Inspection(str(scan.meta.get("model", "scan")), records)
    side = Side(Recording(RecordedPass(inspection, [grid], batch=1), "rms"))
    side.notes.append(
        "a scan holds the size of each token's values, so sizes were compared; it does not say "
        "which of the layers in a module runs first: they are compared in the order of the model"
    )
    side.tokens = list(sequence.tokens.pieces)
    return side
