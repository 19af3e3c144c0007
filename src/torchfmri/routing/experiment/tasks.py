"""Tasks to learn: sequences behind a task token, and grid puzzles in the JSON format of ARC.

`RunPlan.tasks` makes one of the two, and `TrainingRun` draws its batches from anything that fits
the protocol `Tasks`. A batch depends on its generator alone, so a run that was interrupted goes on
with the data it would have seen. The sequences of a task must stay as they are, because new results
are compared with earlier ones.

A puzzle is a file {"train": [{"input": grid, "output": grid}, ...], "test": [...]}, a grid a list
of rows of colours 0 to 9. It becomes one sequence: demonstrations, then a question and its answer,
which is what is learned. The pairs of "test" must never be learned from. If they were, accuracy on
them would show memory and not the rule. A further rule of made puzzles is an entry of `RULES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from torchfmri.exceptions import InspectionError

SYMBOLS = 16
NAMES = ("copy", "reverse", "increment", "sort")
IGNORED = -100


class Batch(NamedTuple):
    """Sequences of one length, or padded on the right.

    Attributes:
        ids: (b, s).
        labels: (b, s), -100 where nothing is to be predicted.
        tasks: (b,), the number of each sample's task.
        mask: (b, s), 0 where a position is padding; None if there is none.
    """

    ids: Tensor
    labels: Tensor
    tasks: Tensor
    mask: Tensor | None = None

    def to(self, device: str) -> Batch:
        """Return the task with its tensors on a device."""
        moved = (None if each is None else each.to(device) for each in self)
        return Batch(*moved)  # type: ignore[arg-type]


class Tasks(Protocol):
    """A source of batches."""

    @property
    def names(self) -> Sequence[str]:
        """The tasks, by number."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""

    @property
    def groups(self) -> Sequence[str]:
        """The groups that are judged separately, the hardest last."""

    def train(self, size: int, generator: torch.Generator) -> Batch:
        """Return a batch to learn from."""

    def test(self, group: str, size: int, generator: torch.Generator) -> Batch:
        """Return a batch to be judged by; groups are lengths, or what else is judged apart."""


@dataclass(frozen=True)
class SequenceTasks:
    """[task] x_1 ... x_n [=] y_1 ... y_n, made when asked for; every batch has one length.

    Attributes:
        lengths: The lengths n, each as likely as the others.
        names: The tasks.

    Examples:
        >>> import torch
        >>> tasks = SequenceTasks(lengths=(3,), names=("reverse",))
        >>> batch = tasks.train(1, torch.Generator().manual_seed(0))
        >>> (batch.ids[0, 1:4].flip(0) == batch.ids[0, 5:]).all().item()
        True
    """

    lengths: tuple[int, ...] = (6, 10, 14)
    names: tuple[str, ...] = NAMES

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in NAMES:
                raise InspectionError(f"There is no task {name!r}; there are {', '.join(NAMES)}.")
        if not self.lengths or min(self.lengths) < 1 or not self.names:
            raise InspectionError(
                f"lengths={self.lengths}, names={self.names}: give at least one length of 1 or "
                "more, and one task."
            )

    @property
    def vocab_size(self) -> int:
        """Symbols, one token per task, and the sign between question and answer."""
        return SYMBOLS + len(NAMES) + 1

    @property
    def groups(self) -> tuple[str, ...]:
        """Lengths are judged apart."""
        return tuple(f"length {length}" for length in self.lengths)

    def train(self, size: int, generator: torch.Generator) -> Batch:
        """Return a batch of one length, with a task for each sample."""
        at = int(torch.randint(len(self.lengths), (), generator=generator))
        return self._make(size, self.lengths[at], generator)

    def test(self, group: str, size: int, generator: torch.Generator) -> Batch:
        """Return a batch of that length."""
        return self._make(size, self.lengths[self.groups.index(group)], generator)

    def _make(self, size: int, length: int, generator: torch.Generator) -> Batch:
        x = torch.randint(SYMBOLS, (size, length), generator=generator)
        tasks = torch.randint(len(self.names), (size,), generator=generator)
        answers = torch.stack([_answer(name, x) for name in self.names])
        y = answers[tasks, torch.arange(size)]
        tokens = torch.tensor([SYMBOLS + NAMES.index(name) for name in self.names])
        sign = torch.full((size, 1), SYMBOLS + len(NAMES))
        ids = torch.cat((tokens[tasks, None], x, sign, y), 1)
        labels = ids.clone()
        labels[:, : length + 2] = IGNORED
        return Batch(ids, labels, tasks)


def _answer(name: str, x: Tensor) -> Tensor:
    if name == "reverse":
        return x.flip(1)
    if name == "increment":
        return (x + 1) % SYMBOLS
    return x.sort(1).values if name == "sort" else x


COLOURS = 10
NEWLINE, ARROW, END = 10, 11, 12
"""After a row, between input and output, after an output."""
Grid = list[list[int]]

RULES: dict[str, Callable[[Any], Any]] = {
    "mirror": np.fliplr,
    "flip": np.flipud,
    "transpose": np.transpose,
    "shift": lambda grid: np.roll(grid, 1, axis=1),
}
"""The rules of made puzzles."""


class Puzzle(NamedTuple):
    """Demonstrations, a question and its answer.

    Attributes:
        task: The rule of a made puzzle, or the name of its file.
        demonstrations: Pairs of grids.
        question: The pair whose output is to be found.
    """

    task: str
    demonstrations: tuple[tuple[Grid, Grid], ...]
    question: tuple[Grid, Grid]

    def tokens(self) -> tuple[list[int], int]:
        """Return the sequence, and where its answer begins."""
        ids: list[int] = []
        for before, after in self.demonstrations:
            ids += [*_rows(before), ARROW, *_rows(after), END]
        ids += [*_rows(self.question[0]), ARROW]
        return [*ids, *_rows(self.question[1]), END], len(ids)


@dataclass(frozen=True)
class GridPuzzles:
    """The puzzles of a folder, as batches; the colours of every sample are exchanged at random.

    Attributes:
        names: The tasks.
        train_puzzles: Each pair of "train" as the question after the others: ids, labels, tasks.
        test_puzzles: Each pair of "test" after all of "train".
        skipped: How many puzzles were longer than allowed.

    Examples:
        >>> write_puzzles(Path("puzzles"), count=8)
        >>> puzzles = GridPuzzles.read(Path("puzzles"))
        >>> puzzles.names
        ('flip', 'mirror', 'shift', 'transpose')
    """

    names: tuple[str, ...]
    train_puzzles: Batch
    test_puzzles: Batch
    skipped: int = 0
    vocab_size: int = COLOURS + 3
    groups: tuple[str, ...] = ("test puzzles",)

    @classmethod
    def read(cls, folder: Path, max_tokens: int = 256) -> GridPuzzles:
        """Return the tasks of all .json files in a folder.

        Raises:
            InspectionError: There is none, or a file is none of ARC's.
        """
        files = sorted(folder.glob("*.json"))
        if not files:
            raise InspectionError(
                f"There is no .json file in {folder}; give a folder of ARC tasks."
            )
        training: list[Puzzle] = []
        testing: list[Puzzle] = []
        for file in files:
            name, pairs, questions = _read(file)
            for at, pair in enumerate(pairs):
                training.append(Puzzle(name, (*pairs[:at], *pairs[at + 1 :]), pair))
            testing += [Puzzle(name, pairs, question) for question in questions]
        names = tuple(sorted({each.task for each in training}))
        kept = [_fitting(each, max_tokens) for each in (training, testing)]
        if not all(kept):
            raise InspectionError(
                f"No puzzle in {folder} fits into {max_tokens} tokens; allow more."
            )
        skipped = len(training) + len(testing) - sum(map(len, kept))
        learned, judged = (_stack(each, names) for each in kept)
        return cls(names, learned, judged, skipped)

    def train(self, size: int, generator: torch.Generator) -> Batch:
        """Return puzzles drawn at random, their colours exchanged."""
        return _drawn(self.train_puzzles, size, generator)

    def test(self, group: str, size: int, generator: torch.Generator) -> Batch:
        """Return puzzles drawn from pairs that are never learned from, their colours exchanged."""
        return _drawn(self.test_puzzles, size, generator)


def write_puzzles(folder: Path, count: int = 64, size: int = 3, seed: int = 0) -> None:
    """Write made tasks into a folder, one file each, in ARC's format with the rule beside it.

    Args:
        folder: Made if it is not there.
        count: How many tasks, the rules in turn.
        size: Rows and columns of a grid.
        seed: The seed of the colours.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    rules = list(RULES.items())
    for number in range(count):
        rule, act = rules[number % len(rules)]
        grids = random.integers(COLOURS, size=(3, size, size))
        pairs = [{"input": each.tolist(), "output": act(each).tolist()} for each in grids]
        task = {"train": pairs[:2], "test": pairs[2:], "rule": rule}
        (folder / f"{rule}_{number:03}.json").write_text(json.dumps(task), encoding="utf-8")


def _read(file: Path) -> tuple[str, tuple[tuple[Grid, Grid], ...], list[tuple[Grid, Grid]]]:
    try:
        task = json.loads(file.read_text(encoding="utf-8"))
        parts = [
            [(each["input"], each["output"]) for each in task[key]] for key in ("train", "test")
        ]
        for grid in (grid for part in parts for pair in part for grid in pair):
            values = np.asarray(grid)
            if values.ndim != 2 or values.min() < 0 or values.max() >= COLOURS:
                raise ValueError(f"a grid is rows of colours 0 to {COLOURS - 1}")
    except (ValueError, KeyError, TypeError) as error:
        raise InspectionError(
            f"{file} is not an ARC task: {type(error).__name__}: {error}"
        ) from error
    return str(task.get("rule", file.stem)), tuple(parts[0]), parts[1]


def _rows(grid: Grid) -> Iterator[int]:
    for row in grid:
        yield from row
        yield NEWLINE


def _fitting(puzzles: list[Puzzle], max_tokens: int) -> list[Puzzle]:
    return [each for each in puzzles if len(each.tokens()[0]) <= max_tokens]


def _stack(puzzles: Sequence[Puzzle], names: tuple[str, ...]) -> Batch:
    found = [each.tokens() for each in puzzles]
    width = max(len(ids) for ids, _ in found)
    ids = torch.full((len(found), width), END)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORED)
    for row, (sequence, answer) in enumerate(found):
        values = torch.tensor(sequence)
        ids[row, : len(values)] = values
        mask[row, : len(values)] = 1
        labels[row, answer : len(values)] = values[answer:]
    tasks = torch.tensor([names.index(each.task) for each in puzzles])
    return Batch(ids, labels, tasks, mask)


def _drawn(puzzles: Batch, size: int, generator: torch.Generator) -> Batch:
    rows = torch.randint(len(puzzles.ids), (size,), generator=generator)
    assert puzzles.mask is not None
    mask = puzzles.mask[rows]
    width = int(mask.sum(1).max())
    others = torch.arange(COLOURS, END + 1).expand(size, -1)
    table = torch.cat((torch.rand(size, COLOURS, generator=generator).argsort(1), others), 1)
    ids = table.gather(1, puzzles.ids[rows])
    labels: Tensor = ids.masked_fill(puzzles.labels[rows] == IGNORED, IGNORED)
    return Batch(ids[:, :width], labels[:, :width], puzzles.tasks[rows], mask[:, :width])
