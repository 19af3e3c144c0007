"""A scan of many prompts, which goes on where it was interrupted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.run.dataset_rows import Row
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
        failed: The name of a sequence -> its row, and why it could not be scanned. They are tried
            again next time.

    Example:
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
    rows: Sequence[Row],
    path: str | os.PathLike[str],
    max_new_tokens: int = 64,
    *,
    batch: int = 1,
    chat: bool = False,
    seed: int | None = None,
    generate: Mapping[str, Any] | None = None,
    on_row: Callable[[int, int, str], None] | None = None,
    commit_seconds: float = 5.0,
) -> DatasetScan:
    """Scan every row that is not in the folder yet; sequences are committed as they come.

    Whatever interrupts it, calling it again goes on with what is missing: nothing is lost that was
    committed, and nothing is scanned twice. Among several processes (torchrun) the first one lists
    what is missing, and each takes its share.

    Args:
        scanner: The model, and what to measure.
        rows: The dataset.
        path: The folder of the scan; it is created, or added to.
        max_new_tokens: How many tokens to generate at most for each.
        batch: How many rows are run at once.
        chat: Wrap texts as a user's messages.
        seed: Of sampling; each row (each batch) has one of its own, made from it and its name.
        generate: Options for the model's `generate`.
        on_row: Told how many of how many are done, and the name of the next.
        commit_seconds: How long a finished sequence waits at most for others to be written with.

    Raises:
        LayerNotFoundError: The pattern matches no layer.
        InspectionError: The folder holds another scan, or the first rows cannot be scanned.
    """
    if not isinstance(batch, int) or batch < 1:
        raise InspectionError(f"batch={batch!r}: how many rows are run at once, such as 1.")
    if max_new_tokens and seed is None and scanner.samples(generate or {}):
        raise InspectionError(
            "Tokens are drawn, by your options or by the model's own settings, and a dataset must "
            "not depend on when it was interrupted: give a seed=, or do_sample=False."
        )
    rank, world = _processes()
    if world > 1:
        refuse_shared_work(scanner.model)
    pending = _list_pending(rows, Path(path), rank, world)
    job = _Job(scanner, max_new_tokens, chat, seed, generate or {}, len(rows) - len(pending))
    own = pending[rank::world]
    anatomy, meta = job.describe(rows)
    if not own:  # also then the folder must be one of such a scan
        if (Path(path) / META).exists():
            require_same(read_meta(Path(path)), anatomy, meta, Path(path))
        return DatasetScan(Path(path), found=job.found)
    with ScanWriter(path, anatomy, meta, rank=rank, commit_seconds=commit_seconds) as writer:
        for start in range(0, len(own), batch):
            several = [rows[each] for each in own[start : start + batch]]
            if on_row is not None:
                on_row(start, len(own), several[0].name)
            # A run that was ending when this one listed what is missing may have added some.
            job.scan([row for row in several if row.name not in writer.names], writer)
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
    scanned: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def describe(self, rows: Sequence[Row]) -> tuple[Anatomy, dict[str, Any]]:
        """The anatomy and the meta of the scan.

        They are found out with the dataset's first row that can be run, whichever are missing, so
        that all processes and all runs find the same.

        Raises:
            InspectionError: None of the first rows can be run.
        """
        for number in range(len(rows)):
            row = rows[number]
            try:
                anatomy, meta = self.scanner.describe(
                    row.prompt, self.max_new_tokens, chat=self.chat, generate=self.generate
                )
            except LayerNotFoundError:
                raise
            except Exception as error:
                if number + 1 in (_GIVE_UP, len(rows)):
                    raise _gave_up(number + 1, row, error) from error
                continue
            return anatomy, meta | ({} if self.seed is None else {"seed": self.seed})
        raise InspectionError("The dataset has no rows.")

    def scan(self, rows: Sequence[Row], writer: ScanWriter) -> None:
        """Scan some rows at once; where that fails, one by one, to name the one that fails."""
        if not rows:
            return
        failure: Exception | None = None
        try:
            found = self.scanner.scan(
                [row.prompt for row in rows],
                self.max_new_tokens,
                chat=self.chat,
                seed=self._seed_of(rows[0]),
                names=[row.name for row in rows],
                conditions=[row.condition for row in rows],
                generate=self.generate,
            )
        except Exception as error:
            failure = error
        if failure is None:
            for sequence in found:
                writer.append(sequence)
                self.scanned += 1
        elif len(rows) == 1:
            self._note(rows[0], failure)
        else:
            failure = None  # and with it what its frames hold, should memory have run out
            for row in rows:
                self.scan([row], writer)

    def _seed_of(self, row: Row) -> int | None:
        if self.seed is None:
            return None
        digest = hashlib.sha256(f"{self.seed} {row.name}".encode()).digest()
        return int.from_bytes(digest[:7], "big")

    def _note(self, row: Row, error: Exception) -> None:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        self.failed[row.name] = f"{row.place}: {reason}"
        if not self.scanned and not self.found and len(self.failed) >= _GIVE_UP:
            raise _gave_up(_GIVE_UP, row, error) from error


def _gave_up(number: int, row: Row, error: Exception) -> InspectionError:
    first = "The first row" if number == 1 else f"The first {number} rows"
    return InspectionError(
        f"{first} could not be scanned. {row.place}: {type(error).__name__}: {error}"
    )


def _processes() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _list_pending(rows: Sequence[Row], path: Path, rank: int, world: int) -> list[int]:
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


def _pending(rows: Sequence[Row], path: Path) -> list[int]:
    done: set[str] = set()
    if (path / META).exists():
        committed, _ = read_committed(path)
        done = {each.name for segment in committed for each in segment.sequences}
    return [number for number in range(len(rows)) if rows[number].name not in done]
