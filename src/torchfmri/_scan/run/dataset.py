"""Scan many prompts into a folder, and go on where an earlier run was interrupted: `scan_rows`.

`entry_points.scan_dataset` and `torchfmri scan` with a dataset call it; users get the
`DatasetScan`. Whatever interrupts it, the folder must in the end hold what one run without
interruption would have written. That is why batches follow from the order of the rows and not from
what is missing, why each batch has a seed made from its first row's name, and why nothing is
written of a sampled row that was run alone. Among several processes only the first one lists what
is missing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from torchfmri._arguments import check_number
from torchfmri._model import ending_by_signals, whole_restorations
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.record.sequence import ScannedSequence
from torchfmri._scan.run.dataset_rows import DatasetRow
from torchfmri._scan.run.refusals import refuse_shared_work
from torchfmri._scan.run.scanner import Scanner
from torchfmri._scan.store.folder import META
from torchfmri._scan.store.manifest import read_committed
from torchfmri._scan.store.meta import read_meta, require_same
from torchfmri._scan.store.writer import ScanWriter
from torchfmri.exceptions import InspectionError, LayerNotFoundError

_GIVE_UP = 3
"""Rows that may fail before anything has been scanned: then it is not the rows' fault."""


@dataclass(frozen=True)
class DatasetScan:
    """How a scan of a dataset went.

    Attributes:
        path: The folder of the scan; `torchfmri.load(path)` reads it.
        scanned: How many sequences this call added; among several processes, this one alone.
        found: How many were there before.
        failed: The name of a sequence -> its row, and why it could not be read or scanned. They are
            tried again next time.

    Examples:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> torchfmri.scan_dataset(model, tokenizer, ["One", "Two"], "x.fmri", 2).scanned
        2
        >>> torchfmri.scan_dataset(model, tokenizer, ["One", "Two"], "x.fmri", 2).found
        2
    """

    path: Path
    scanned: int = 0
    found: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)


def scan_rows(
    scanner: Scanner,
    rows: Sequence[DatasetRow],
    path: str | os.PathLike[str],
    max_new_tokens: int = 64,
    *,
    batch: int = 1,
    chat: bool = False,
    seed: int | None = None,
    generate: Mapping[str, Any] | None = None,
    strict: bool = False,
    on_row: Callable[[int, int, str], None] | None = None,
    commit_seconds: float = 5.0,
) -> DatasetScan:
    """Scan every row that is not in the folder yet; sequences are committed as they come.

    Whatever interrupts it, calling it again goes on with what is missing: nothing is lost that was
    committed, and nothing is written twice. Among several processes (torchrun) the first one lists
    what is missing, and each takes its share.

    Batches are fixed by the order of the rows: a batch of which a row is missing is run again
    whole, with the seed it had, so that every row gets the tokens it would have got anyway.

    Args:
        scanner: The model, and what to measure.
        rows: The dataset.
        path: The folder of the scan; it is created, or added to.
        max_new_tokens: How many tokens to generate at most for each.
        batch: How many rows are run at once.
        chat: Wrap texts as a user's messages.
        seed: Of sampling; each batch has one of its own, made from it and the first row's name.
        generate: Options for the model's `generate`.
        strict: Stop at the first row that cannot be scanned, instead of passing it over.
        on_row: Told how many of how many are done, and the name of the next.
        commit_seconds: How long a finished sequence waits at most for others to be written with.

    Raises:
        LayerNotFoundError: The pattern matches no layer.
        InspectionError: The folder holds another scan, or the first rows cannot be scanned.
    """
    check_number("batch", batch, 1, "how many rows are run at once, such as 1")
    samples = bool(max_new_tokens) and scanner.samples(generate or {})
    if samples and seed is None:
        raise InspectionError(
            "Tokens are drawn, by your options or by the model's own settings, and a dataset must "
            "not depend on when it was interrupted: give a seed=, or do_sample=False."
        )
    rank, world = _processes()
    if world > 1:
        refuse_shared_work(scanner.model)
    pending = _list_pending(rows, Path(path), rank, world)
    found = len(rows) - len(pending)
    job = _Job(
        scanner=scanner,
        max_new_tokens=max_new_tokens,
        chat=chat,
        seed=seed,
        generate=generate or {},
        found=found,
        strict=strict,
        samples=samples,
    )
    anatomy, meta = job.describe(rows)
    if samples and batch > 1:  # what is drawn for a row depends on those beside it
        meta["batch"] = batch
    own = _batches(pending, batch)[rank::world]
    if not own:  # also then the folder must be one of such a scan
        if (Path(path) / META).exists():
            require_same(read_meta(Path(path)), anatomy, meta, Path(path))
        return DatasetScan(Path(path), found=job.found)
    done, total = 0, sum(map(len, own))
    with (
        whole_restorations(),
        ending_by_signals(),
        ScanWriter(path, anatomy, meta, rank=rank, commit_seconds=commit_seconds) as writer,
    ):
        for missing in own:
            start = missing[0] - missing[0] % batch
            several = rows[start : start + batch]
            wanted = {row.name: None for row in several if row.number in missing}
            if on_row is not None:
                on_row(done, total, next(iter(wanted)))
            # A run that was ending when this one listed what is missing may have added some.
            job.scan(several, wanted.keys() - writer.names, writer)
            done += len(missing)
    return DatasetScan(Path(path), job.scanned, job.found, job.failed)


@dataclass
class _Job:
    """What stays the same for all rows, and what has become of them."""

    scanner: Scanner
    max_new_tokens: int
    chat: bool
    seed: int | None
    generate: Mapping[str, Any]
    found: int
    strict: bool = False
    samples: bool = False
    scanned: int = 0
    tried_in_vain: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def describe(self, rows: Sequence[DatasetRow]) -> tuple[Anatomy, dict[str, Any]]:
        """The anatomy and the meta of the scan.

        They are found out with the dataset's first row that can be run, whichever are missing, so
        that all processes and all runs find the same.

        Raises:
            InspectionError: None of the first rows can be run.
        """
        tried = 0
        row, failure = rows[0], None
        for row in rows:
            if row.problem:
                continue
            tried += 1
            try:
                anatomy, meta = self.scanner.describe(
                    row.prompt, self.max_new_tokens, chat=self.chat, generate=self.generate
                )
            except LayerNotFoundError:
                raise
            except Exception as error:
                if tried == _GIVE_UP or self.strict:
                    raise _gave_up(tried, row, error) from error
                last, failure = row, error
                continue
            return anatomy, meta | ({} if self.seed is None else {"seed": self.seed})
        if failure is not None:
            raise _gave_up(tried, last, failure) from failure
        raise InspectionError(f"No row of the dataset can be read. {row.problem}")

    def scan(
        self, rows: Sequence[DatasetRow], wanted: AbstractSet[str], writer: ScanWriter
    ) -> None:
        """Scan a batch and write the rows that are wanted.

        Where the batch fails, its rows are scanned one by one, to name the one that fails.
        """
        for row in rows:
            if row.problem and row.name in wanted:
                self._note(row, row.problem)
        rows = [row for row in rows if not row.problem]
        if not wanted & {row.name for row in rows}:
            return
        failure = self._scan_together(rows, wanted, writer)
        if failure is None:
            return
        if len(rows) == 1:
            self._note_failure(rows[0], failure)
            return
        failure = None  # and with it what its frames hold, should memory have run out
        if self.samples:
            self._scan_again(rows, wanted, writer)
        else:
            for row in rows:
                self.scan([row], wanted, writer)

    def _scan_together(
        self, rows: Sequence[DatasetRow], wanted: AbstractSet[str], writer: ScanWriter
    ) -> Exception | None:
        """Scan rows as one batch and write those that are wanted; returns why that failed."""
        try:
            found = self.scanner.scan(
                [row.prompt for row in rows],
                self.max_new_tokens,
                chat=self.chat,
                seed=self._seed_of(rows[0]),
                names=[row.name for row in rows],
                conditions=[row.condition for row in rows],
                fields=[row.fields for row in rows],
                generate=self.generate,
            )
        except Exception as error:
            return error
        for row, sequence in zip(rows, found, strict=True):
            if row.name in wanted:
                self._write(row, sequence, writer)
        return None

    def _scan_again(
        self, rows: Sequence[DatasetRow], wanted: AbstractSet[str], writer: ScanWriter
    ) -> None:
        """Scan a batch again that failed, if need be without the rows that fail by themselves.

        What is drawn for a row depends on those beside it. So nothing is written of a row that was
        run alone, and a row is left out only if it fails alone twice.
        """
        if self._scan_together(rows, wanted, writer) is None:
            return
        failures = {row.name: self._failure_of(row, writer) for row in rows}
        for row in rows:
            failure = failures[row.name]
            if failure is not None and row.name in wanted:
                self._note_failure(row, failure)
        rest = [row for row in rows if failures[row.name] is None]
        failure = self._scan_together(rest, wanted, writer) if rest else None
        for row in rest if failure is not None else ():
            if row.name in wanted:
                reason = (
                    f"{len(rest)} rows fail together and not alone: {type(failure).__name__}: "
                    f"{failure} What is drawn depends on the batch: scan with a smaller batch, "
                    "into another folder."
                )
                self._note_failure(row, InspectionError(reason))

    def _failure_of(self, row: DatasetRow, writer: ScanWriter) -> Exception | None:
        """Why a row cannot be scanned alone, not even when it is tried again."""
        if self._scan_together([row], frozenset(), writer) is None:
            return None
        failure = self._scan_together([row], frozenset(), writer)
        return failure and failure.with_traceback(None)  # whose frames hold what they saw

    def _write(self, row: DatasetRow, sequence: ScannedSequence, writer: ScanWriter) -> None:
        try:
            writer.append(sequence)
        except InspectionError as error:  # it cannot be kept; a disk that fails is an OSError
            self._note_failure(row, error)
        else:
            self.scanned += 1

    def _seed_of(self, row: DatasetRow) -> int | None:
        if self.seed is None:
            return None
        digest = hashlib.sha256(f"{self.seed} {row.name}".encode()).digest()
        return int.from_bytes(digest[:7], "big")

    def _note_failure(self, row: DatasetRow, error: Exception) -> None:
        self.tried_in_vain += 1
        if not self.scanned and not self.found and self.tried_in_vain >= _GIVE_UP:
            raise _gave_up(_GIVE_UP, row, error) from error
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        self._note(row, f"{row.place}: {reason}", error)

    def _note(self, row: DatasetRow, why: str, error: Exception | None = None) -> None:
        if self.strict:
            raise InspectionError(
                f"{why} Stopped there (strict): correct the row, or pass it over without strict."
            ) from error
        self.failed[row.name] = why


def _gave_up(number: int, row: DatasetRow, error: Exception) -> InspectionError:
    first = "The first row" if number == 1 else f"The first {number} rows"
    return InspectionError(
        f"{first} could not be scanned. {row.place}: {type(error).__name__}: {error}"
    )


def _processes() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _list_pending(rows: Sequence[DatasetRow], path: Path, rank: int, world: int) -> list[int]:
    """The rows that are not committed, as the first process finds them.

    If each listed them for itself, one that is late would miss what others have committed since,
    and take another share.
    """
    if world == 1:
        return _pending(rows, path)
    shared: list[Any] = [None, None]
    if rank == 0:
        try:
            shared[0] = _pending(rows, path)
        except Exception as error:  # the others must not wait for ever
            shared[1] = error
    torch.distributed.broadcast_object_list(shared, src=0)
    pending, failure = shared
    if failure is not None:
        raise failure
    found: list[int] = pending
    return found


def _batches(pending: Sequence[int], batch: int) -> list[list[int]]:
    """The missing rows of each batch that misses any; batches are fixed by the rows' order."""
    return [list(several) for _, several in groupby(pending, lambda number: number // batch)]


def _pending(rows: Sequence[DatasetRow], path: Path) -> list[int]:
    done: set[str] = set()
    if (path / META).exists():
        committed, _ = read_committed(path)
        done = {each.name for segment in committed for each in segment.sequences}
    return [number for number in range(len(rows)) if rows[number].name not in done]
