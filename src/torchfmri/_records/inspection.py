"""The result of one run: what was captured, by layer and call, and what was not and why.

`Inspector` fills it, and its parts are `record.Record`s. It knows no model, no hooks and no
capture: tables, figures and compare work on a loaded inspection as on a new one. Whatever could not
be captured stands in `missing` with its reason, never just absent. `to_dict` is public (`--json`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from torchfmri._arguments import check_file, check_path
from torchfmri._model import not_found
from torchfmri._records.inspection_files import load_inspection, save_inspection
from torchfmri._records.record import Call, Record
from torchfmri._records.values import WHAT, check_what
from torchfmri._text import Row, html_table, printable, text_table
from torchfmri.exceptions import InspectionError
from torchfmri.statistics import Statistics


class Inspection(Mapping[str, Record]):
    """What one run showed: a mapping from layer to `Record`, in model order.

    Attributes:
        missing: Layer -> why it, or something of it, was not captured.
        notes: Reservation -> the layers it holds for.
        loss: The loss of the run, if one was computed.
        token_ids: (b, s) the token numbers that the model was given, where it was given such.
        kept: (b, s) False where a position is padding; None if that is not known.
        tokens: The texts of the tokens without padding, row by row, if they are known.

    Examples:
        >>> import torch
        >>> from torchfmri import Inspector
        >>> inspector = Inspector(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()))
        >>> inspection = inspector.run_inspection(torch.randn(3, 4))
        >>> inspection
        <Inspection: 2 layers of Sequential; activations>
        >>> list(inspection), inspection.missing
        (['0', '1'], {})
        >>> inspection.statistics("1", "activations")["count"]
        24
    """

    def __init__(self, model: str, records: dict[str, Record]) -> None:
        self.model = model
        self.missing: dict[str, str] = {}
        self.notes: dict[str, list[str]] = {}
        self.loss: float | None = None
        self.token_ids: Tensor | None = None
        self.kept: Tensor | None = None
        self.tokens: tuple[str, ...] = ()
        self._records = records

    def __getitem__(self, layer: str) -> Record:
        try:
            return self._records[layer]
        except KeyError:
            raise not_found(layer, self._records, "list(inspection)") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, layer: object) -> bool:
        return layer in self._records

    def calls(self) -> list[Call]:
        """Return all calls in the order in which they finished."""
        unique = {id(record): record for record in self._records.values()}
        found = [call for record in unique.values() for call in record.calls if call.order >= 0]
        return sorted(found, key=lambda call: call.order)

    def statistics(self, layer: str, what: str | None = None, **options: Any) -> Any:
        """Return `inspection[layer].statistics(what, ...)`; raise if there are none."""
        record = self[layer]
        found = record.statistics(what, **options)
        if found is None:
            reason = self.missing.get(layer, "nothing arrived")
            raise InspectionError(f"No {what or 'values'} of {layer!r} were captured: {reason}.")
        return found

    def rows(self, what: str | None = None) -> list[Row]:
        """Return one row per layer and thing watched, for tables and plots over depth.

        Args:
            what: Only this; everything that was watched by default.
        """
        if what is not None:
            check_what(what)
        return [
            Row(layer, record.kind, each, len(record.calls), self._statistics(record, each))
            for layer, record in self._records.items()
            for each in record.what
            if what in (None, each)
        ]

    def _statistics(self, record: Record, what: str) -> Statistics | None:
        """Return the statistics of a record; None if kept tensors cannot be reduced."""
        try:
            return record.tensor_statistics(what)
        except InspectionError as error:
            self.missing.setdefault(record.layer, f"{what}: {error}")
            return None

    def table(self, what: str | None = None, *, fold: bool | None = None) -> str:
        """Return a table for the terminal: a line per layer, with its distribution as a sparkline.

        Args:
            what: Only this; everything that was watched by default.
            fold: One line for layers whose names differ only in numbers, except those with NaN,
                Inf or only one value; by default from 100 rows on.
        """
        rows = self.rows(what)
        return text_table(
            rows,
            self._summary(),
            self.missing,
            self.notes,
            unfolded="inspection.table(fold=False)",
            reasons="inspection.missing",
            fold=fold,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all statistics as plain Python values, ready for JSON."""
        layers: dict[str, dict[str, Any]] = {}
        for row in self.rows():
            found = row.statistics.to_dict() if row.statistics is not None else None
            layers.setdefault(row.layer, {"kind": row.kind, "calls": row.calls})[row.what] = found
        return {
            "model": self.model,
            "loss": self.loss,
            "layers": layers,
            "missing": dict(self.missing),
            "notes": {text: list(layers) for text, layers in self.notes.items()},
        }

    def save(self, path: str | PathLike[str]) -> Path:
        """Write everything to one file, whole or not at all; `Inspection.load` reads it again.

        Tensors are kept if the inspection has them, else statistics. Statistics per unit
        (`per="channel"`) are kept with tensors only.

        Raises:
            InspectionError: The path is a folder, or a tensor cannot be kept.
        """
        place = check_file("path", path)
        save_inspection(self, place)
        return place

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Inspection:
        """Return the inspection that `save` wrote; nothing in the file is code.

        Raises:
            FileFormatError: The file is missing, damaged, or no inspection.
        """
        found = load_inspection(check_path("path", path))
        inspection = cls(found.pop("model"), found.pop("records"))
        inspection.tokens = tuple(found.pop("tokens"))
        for name, value in found.items():
            setattr(inspection, name, value)
        return inspection

    def _summary(self) -> str:
        watched = sorted({each for record in self._records.values() for each in record.what})
        parts = [f"{len(self)} layers of {printable(self.model)}"]
        if watched:
            parts.append(", ".join(each for each in WHAT if each in watched))
        if self.loss is not None:
            parts.append(f"loss {self.loss:.6g}")
        if self.missing:
            parts.append(f"{len(self.missing)} with something missing")
        return "; ".join(parts)

    def __repr__(self) -> str:
        return f"<Inspection: {self._summary()}>"

    def _repr_html_(self) -> str:
        return html_table(self.rows(), self._summary(), self.missing, self.notes)
