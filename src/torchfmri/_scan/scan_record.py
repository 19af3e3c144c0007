"""The `Scan` that users hold: all sequences of a scan, in memory or on disk, without the model.

`run` and `loading` make one. Most methods choose a sequence, hand it to the file that does the work
(`pictures`, `prompts`, `store`), and warn of files that could not be read; their documentation
stands here because users look for it here. Signatures are public. A method that reads a stored scan
must pass over damaged sequences and name them, not fail: the rest may have taken days.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchfmri._arguments import check_file, check_number, is_whole, require
from torchfmri._contrast import (
    GLM,
    Classification,
    Contrast,
    TestOptions,
    classify,
    compare,
    difference,
)
from torchfmri._files import new_file
from torchfmri._scan.pictures.figures import PictureMethods
from torchfmri._scan.pictures.scan_board import ScanBoard
from torchfmri._scan.pictures.summary import failed_checks, sequences_grid, summary_grid
from torchfmri._scan.prompts.first_level import fit_glm
from torchfmri._scan.prompts.prompt_values import tabulate
from torchfmri._scan.prompts.prompt_vectors import has_vectors
from torchfmri._scan.prompts.question import Question, ValueSource
from torchfmri._scan.prompts.token_choice import TokenChoice
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.record.reading import (
    FROM_LOSS,
    Reading,
    Values,
    merged_statistics,
    only_layer,
)
from torchfmri._scan.record.sequence import METRICS, ScannedSequence, Tokens
from torchfmri._scan.store.export import export
from torchfmri._scan.store.saving import save
from torchfmri._scan.store.stored_sequences import SequencesInMemory, StoredSequences
from torchfmri._scan.store.tables import to_dataframe
from torchfmri._scan.store.variables import to_xarray
from torchfmri._text import Grid, group_reasons, plural, printable, shorten
from torchfmri._viewer import Entry, whole_page, widget_of
from torchfmri.exceptions import FileFormatError, InspectionError

if TYPE_CHECKING:
    import pandas
    import xarray

_LINES_BEFORE_FOLDING = 40
_SEQUENCES_SHOWN = 20
_LONGEST_MODEL = 200
_LONGEST = 1_000
Pattern = str | Sequence[str]


class Scan(PictureMethods):
    """The record of a model that read and wrote, token by token; see `scan` and `load`.

    It is a sequence of `ScannedSequence`s. Column t of everything is token t: its surprisal is
    -log p(token t | those before it). delta_sc, z(activation) - z(gradient norm), is computed when
    it is read.

    Args:
        anatomy: The layers and voxels.
        sequences: One or more; those of a stored scan are read when they are asked for.
        meta: What was measured and how: the model, its configuration's hash, versions, `per`, the
            loss, what was not captured and why (`missed`).
        problems: What could not be read, where it comes from a folder.

    Examples:
        >>> import numpy as np
        >>> from torchfmri import Anatomy, Scan, ScannedSequence, Tokens
        >>> two = np.zeros(2, np.float32)
        >>> tokens = Tokens(np.array([7, 8]), (b"Hello", b" you"), two, two, two > 0, two > 0)
        >>> anatomy = Anatomy.of_widths(["embed", "mlp"], ["Embedding", "MLP"], [4, 4], [2, 2])
        >>> sizes = np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)
        >>> sequence = ScannedSequence("0", tokens, {"activation": sizes}, {})
        >>> scan = Scan(anatomy, [sequence], {"model": "tiny"})
        >>> scan
        <Scan: 1 sequence of tiny; 2 tokens, 0 generated; 2 layers, 4 voxels; activation>
        >>> scan.text
        'Hello you'
        >>> names, values = scan.values("activation", pattern="mlp")
        >>> names, values.tolist()
        (('mlp',), [[2.0], [5.0]])
    """

    def __init__(
        self,
        anatomy: Anatomy,
        sequences: Sequence[ScannedSequence],
        meta: Mapping[str, Any],
        problems: Sequence[str] = (),
    ) -> None:
        self.anatomy, self.meta = anatomy, meta
        self._sequences = (
            sequences if isinstance(sequences, StoredSequences) else SequencesInMemory(sequences)
        )
        self._problems = tuple(problems)

    # -- sequences -------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in model order."""
        return self.anatomy.layers

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[ScannedSequence]:
        return iter(self._sequences)

    def __getitem__(self, index: int) -> ScannedSequence:
        count, given = len(self), cast(object, index)
        inside = isinstance(given, slice) or (is_whole(given) and -count <= index < count)
        require(inside, "scan[index]", index, f"there are {count} sequences, the first is 0")
        return self._sequences[index]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sequences; those of a stored scan are known without reading it."""
        return self._sequences.names

    @property
    def folder(self) -> Path | None:
        """The folder of a stored scan; None for a scan in memory."""
        return self._sequences.folder

    @property
    def only(self) -> ScannedSequence:
        """The sequence of a scan that has just one.

        Raises:
            InspectionError: There are several, or none.
        """
        if len(self) != 1:
            raise InspectionError(
                f"This scan has {plural(len(self), 'sequence')}: choose one, as in scan[0], or "
                "with sequence=0 in values, table, draw and the other methods."
                if len(self)
                else "This scan has no sequences."
            )
        return self[0]

    @property
    def tokens(self) -> Tokens:
        """The tokens of the only sequence."""
        return self.only.tokens

    @property
    def text(self) -> str:
        """The text of the only sequence."""
        return self.only.text

    # -- values ----------------------------------------------------------------------------------

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that can be read and drawn per layer, of the first sequence."""
        return self._reading(0).metrics if len(self) else ()

    def values(
        self, metric: str = "activation", by: str = "layer", pattern: Pattern = "*",
        *, sequence: int | None = None,
    ) -> Values:  # fmt: skip
        """Return the values of a metric, token by token, with the names of their columns.

        Args:
            metric: "activation" (root mean square), "gradient" (norm of dL/d output),
                "learning_cost" (norm of the gradient of the layer's own parameters) or "delta_sc".
            by: "layer", or "voxel" for the parts of the layers that match.
            pattern: A pattern for layers, or several.
            sequence: Which sequence; may be left out if there is only one.

        Returns:
            names: One per column.
            values: (s, name)

        Raises:
            LayerNotFoundError: No layer matches.
            InspectionError: The scan has no such metric, or no such sequence.
        """
        return self._reading(sequence).values(metric, by, pattern)

    def delta_sc(
        self, by: str = "layer", pattern: Pattern = "*", *, sequence: int | None = None
    ) -> Values:
        """Return z(activation) - z(gradient norm): is a layer loud without need, or the reverse?

        By voxel it is a contrast within a layer, z over the layer's voxels. By layer it compares
        layers of one kind (`layers.*.mlp`), z of log10 values over them. nan where the standard
        deviation is 0: a layer with one voxel, a kind with one layer.

        Args:
            by: "layer" or "voxel".
            pattern: A pattern for layers, or several. What is compared does not depend on it.
            sequence: Which sequence; may be left out if there is only one.
        """
        return self.values("delta_sc", by, pattern, sequence=sequence)

    def statistics(self, layer: str, *, sequence: int | None = None) -> dict[str, dict[str, float]]:
        """Return, by what was watched, count, mean, std, min, max, nan, inf and zero of a layer.

        Args:
            layer: Its name.
            sequence: Which sequence; all of them together by default.

        Raises:
            LayerNotFoundError: There is no such layer in the scan.
        """
        column = self.anatomy.column(only_layer(layer, self.anatomy, self.meta))
        chosen = list(self) if sequence is None else [self._reading(sequence).sequence]
        return merged_statistics(chosen, column)

    def _reading(self, sequence: int | None) -> Reading:
        if sequence is None:
            return Reading(self.anatomy, self.only, self.meta)
        if not hasattr(sequence, "__index__") or not -len(self) <= sequence < len(self):
            number = plural(len(self), "sequence")
            raise InspectionError(
                f"There is no sequence {sequence!r}: this scan has {number}, counted from 0. "
                "scan.names lists them."
            )
        return Reading(self.anatomy, self[sequence], self.meta)

    # -- tables ----------------------------------------------------------------------------------

    def table(
        self, *, sequence: int | None = None, fold: bool | None = None, width: int | None = None
    ) -> str:
        """Return a table with one line per layer: the median over tokens of each metric.

        Gradients and learning costs are zero at positions that the loss does not reach in a layer
        (the prompt, in the head): they are summarised over those it does, and `positions` says how
        many these are.

        Args:
            sequence: Which sequence; may be left out if there is only one.
            fold: Make one line of the layers whose names differ only in numbers, with a sparkline
                of their medians over depth (logarithmic); by default from 40 layers on.
            width: In characters; that of the terminal by default.
        """
        return self._grid(sequence, fold).text(width)

    def _grid(self, sequence: int | None, fold: bool | None) -> Grid:
        reading = self._reading(sequence)
        which = f"sequence {sequence} of {self!r}" if len(self) > 1 else repr(self)
        title = f"{which[1:-1] if which[0] == '<' else which}; medians over tokens"
        if any(metric in reading.metrics for metric in FROM_LOSS):
            title += ", of gradients over the positions that the loss reaches"
        folded = len(self.layers) > _LINES_BEFORE_FOLDING if fold is None else fold
        return summary_grid(reading, title, fold=folded, notes=self._notes(reading.sequence))

    def _notes(self, sequence: ScannedSequence) -> list[str]:
        """Return the notes of a table: what was not measured or read, padding, failed checks."""
        missed = self.meta.get("missed") or {}
        if not isinstance(missed, Mapping):  # whoever wrote it: a file may say anything
            missed = {"what is not known": f"`missed` is {repr(missed)[:100]}, not names by layer"}
        reasons = {str(layer)[:_LONGEST]: str(why)[:_LONGEST] for layer, why in missed.items()}
        notes = [
            f"not captured: {layer or 'the model'} ({plural(number, 'layer')}): {why}"
            for layer, number, why in group_reasons(reasons)
        ]
        if sequence.padding:
            notes.append(f"padding is left out: {plural(sequence.padding, 'position')}")
        notes += failed_checks(sequence)
        stored = self.meta.get("notes") or []
        if not isinstance(stored, list) or not all(isinstance(each, str) for each in stored):
            stored = [f"the notes of this scan cannot be read: {str(stored)[:60]!r}"]
        said = dict.fromkeys([*stored, *sequence.unmeasured])
        notes += [each for each in said if each.partition(": ")[0] not in self.layers]
        return [*notes, *(f"not read: {problem}" for problem in self.problems)]

    def _first(self) -> ScannedSequence | None:
        """Return the first sequence; None if there is none, or it cannot be read."""
        try:
            return self[0] if len(self) else None
        except FileFormatError:
            return None

    def __repr__(self) -> str:
        first = self._first()
        model = printable(shorten(str(self.meta.get("model") or "a model"), _LONGEST_MODEL))
        parts = [f"{plural(len(self), 'sequence')} of {model}"]
        if first is not None and len(self) == 1:
            generated = int(first.tokens.generated.sum())
            parts.append(f"{plural(len(first), 'token')}, {generated} generated")
        voxels = plural(len(self.anatomy.layer), "voxel")
        parts.append(f"{plural(len(self.layers), 'layer')}, {voxels}")
        if first is not None:
            parts.append(", ".join(metric for metric in METRICS if metric in first.layers))
        if self.problems:
            parts.append(plural(len(self.problems), "problem"))
        return f"<Scan: {'; '.join(part for part in parts if part)}>"

    def _repr_html_(self) -> str:
        if len(self) == 1 and self._first() is not None:
            return self._grid(0, None).html()
        shown = list(islice(self, _SEQUENCES_SHOWN))
        return sequences_grid(shown, len(self), repr(self)[1:-1], self.problems).html()

    # -- contrasts -------------------------------------------------------------------------------

    @property
    def conditions(self) -> dict[str, int]:
        """The conditions of the sequences -> how many have each; those without one are ""."""
        found: dict[str, int] = {}
        for sequence in self:
            found[sequence.condition] = found.get(sequence.condition, 0) + 1
        return found

    def contrast(
        self,
        a: str | Mapping[str, float] | Sequence[Any],
        b: str | None = None,
        *,
        by: str = "condition",
        paired: str | None = None,
        metric: str = "activation",
        level: str = "voxel",
        layers: Pattern = "*",
        tokens: TokenChoice = "all",
        alpha: float = 0.05,
        height_control: str | None = "fdr",
        two_sided: bool = True,
        test: str = "t",
        permutations: int | None = None,
        seed: int = 0,
        labels: object = None,
    ) -> Contrast:
        """Return the difference between conditions, with a test over prompts; see docs/contrast.md.

        Args:
            a: A condition, with `b` the one to compare it with; or a whole contrast: "a - b",
                {"a": 1, "b": -0.5, "c": -0.5}, or a list of such for an F-test.
            b: The other condition.
            by: The field of the rows that holds the condition.
            paired: The field that says which prompts are pairs.
            metric: "activation", "gradient", "learning_cost", "delta_sc", or "signed".
            level: "layer", "voxel", "head", "feature", or "unit" for the signed activation.
            layers: A pattern, or several; for features, over the places of dictionaries.
            tokens: "all", "prompt", "generated", "last", "prompt_last", a position, (first, end), a
                compiled pattern, {"characters": (first, end)}, {"field": name} or {"role": name}.
            alpha: The threshold.
            height_control: What it bounds: "fdr", "bonferroni", "max", "fpr", or None.
            two_sided: Whether the other direction counts.
            test: Where p comes from: "t", or "permutation".
            permutations: How many relabellings; by default 1,000 if they are needed.
            seed: The seed of the relabellings.
            labels: Texts for features: {feature: text}, a list, or {place: one of these}.

        Raises:
            LayerNotFoundError: No layer matches.
            InspectionError: Nothing can be compared; the message says why.
        """
        options = TestOptions(
            alpha=alpha,
            height_control=height_control,
            two_sided=two_sided,
            test=test,
            permutations=permutations,
            seed=seed,
        )
        question = Question(
            metric=metric,
            level=level,
            layers=layers,
            tokens=tokens,
            by=by,
            paired=paired,
            labels=labels,
        )
        table, asked = tabulate([self._source()], question), a if b is None else difference(a, b)
        found = compare(table, asked, is_paired=paired is not None, options=options)
        self._warn_of_problems()
        return found

    def glm(
        self,
        formula: str,
        *,
        metric: str = "activation",
        level: str = "voxel",
        layers: Pattern = "*",
        tokens: TokenChoice = "all",
    ) -> GLM:
        """Fit a linear model of the scan in two levels: tokens within prompts, then prompts.

        Args:
            formula: What explains the values, such as "surprisal + position + condition": of tokens
                `position`, `surprisal`, `entropy` and `generated`; of prompts `condition`, `tokens`
                (how many) and every field of the rows; products of both. formulaic reads it.
            metric: "activation", "gradient", "learning_cost" or "delta_sc".
            level: "layer", "voxel" or "head".
            layers: A pattern, or several.
            tokens: Which tokens count, as for `contrast`.

        Returns:
            The fitted model; `glm.contrast("surprisal")` tests a term.

        Raises:
            InspectionError: The extra `glm` is not installed, or the formula cannot be fitted; the
                message says why.
        """
        found = fit_glm(self._source(), formula, Question(metric, level, layers, tokens))
        self._warn_of_problems()
        return found

    def classify(
        self,
        a: str,
        b: str,
        *,
        by: str = "condition",
        paired: str | None = None,
        layers: Pattern = "*",
        tokens: TokenChoice = "all",
        folds: int = 5,
        permutations: int = 1_000,
        seed: int = 0,
    ) -> Classification:
        """Return how well a condition can be read from each layer, for prompts not trained on.

        A ridge probe on each layer's mean vectors, and beside it one on the rms of its voxels;
        accuracy is cross-validated over prompts and compared with shuffled labels.

        Args:
            a: A condition.
            b: The other.
            by: The field of the rows that holds the condition.
            paired: The field that says which prompts are pairs; they stay in one fold.
            layers: A pattern, or several.
            tokens: Which tokens count, as for `contrast`.
            folds: Into how many parts the prompts are divided.
            permutations: How many relabellings.
            seed: The seed of folds and relabellings.

        Raises:
            InspectionError: There are too few prompts, or no values.
        """
        questions = [
            Question(metric=metric, level=level, layers=layers, tokens=tokens, by=by, paired=paired)
            for metric, level in (("signed", "unit"), ("activation", "voxel"))
            if metric == "activation" or has_vectors(self._source(), tokens)
        ]
        tables = [tabulate([self._source()], each) for each in questions]
        if len(tables) == 1:
            tables[0].notes.append("no mean vectors of these tokens: probes of rms voxels alone")
        found = classify(
            tables, difference(a, b), is_paired=paired is not None,
            folds=folds, permutations=permutations, seed=seed,
        )  # fmt: skip
        self._warn_of_problems()
        return found

    def _source(self) -> ValueSource:
        return ValueSource(self.anatomy, self._sequences, self.meta, folder=self.folder)

    # -- pages -----------------------------------------------------------------------------------

    def save_html(
        self, path: str | Path, *, sequence: int | None = None, layers: Pattern = "*"
    ) -> None:
        """Write the viewer's page of a sequence: one file that needs nothing else.

        Args:
            path: Where to.
            sequence: Which sequence; may be left out if there is only one.
            layers: A pattern, or several.
        """
        target = check_file("path", path)
        reading = self._reading(sequence)
        board = self._board(reading.columns(layers))
        number = 0 if sequence is None else range(len(self))[sequence]
        with new_file(target) as new:
            new.write_text(whole_page(board, number), encoding="utf-8")

    def widget(self, *, height: int = 640) -> Any:
        """Return the viewer in a notebook; `widget.state` is what it shows, and can be set.

        Its data come through the kernel, so it works wherever the notebook does. Needs the extra
        `notebook`. Where widgets cannot be shown, use `save_html`.

        Args:
            height: In pixels.
        """
        check_number("height", height, 200, "give the height in pixels, from 200")
        return widget_of(self._board(), height)

    def _board(self, columns: Sequence[int] | None = None) -> ScanBoard:
        """Return what the viewer shows of this scan: all layers, or those of some columns."""

        def listed() -> list[Entry]:
            entries = self._sequences.entries
            return [Entry(e.name, e.tokens, e.condition, e.text) for e in entries]

        return ScanBoard(self, listed, self.folder, columns)

    # -- on disk ---------------------------------------------------------------------------------

    @property
    def problems(self) -> tuple[str, ...]:
        """The damaged files of a stored scan, as far as they are known, each with its problem.

        Missing and truncated ones are known when the scan is opened, others when they are read.
        """
        return (*self._problems, *self._sequences.problems)

    def refresh(self) -> int:
        """Read the sequences that were added to the stored scan since, and return how many.

        They stand at the end. A scan in memory has none to add.
        """
        return self._sequences.refresh()

    def verify(self) -> tuple[str, ...]:
        """Compare every checksum of a stored scan and return all problems; it reads everything."""
        self._sequences.verify()
        return self.problems

    def digest(self) -> str:
        """Return the SHA-256 of a stored scan, to compare with one that you keep elsewhere.

        The checksums inside a scan guard against accidents; whoever changes it on purpose changes
        them too. It is that of `sha256sum meta.json manifest-*.jsonl segment-*.safetensors`, run
        in the folder.

        Raises:
            InspectionError: The scan is in memory.
            FileFormatError: A file is missing.
        """
        return self._sequences.digest()

    def save(
        self, path: str | PathLike[str], *, overwrite: bool = False, append: bool = False
    ) -> None:
        """Write the scan into a folder: completely, or not at all. `load` reads it.

        Args:
            path: The folder; its name usually ends in `.fmri`.
            overwrite: Whether a scan that is there is replaced.
            append: Whether the sequences are added to the scan that is there, part by part: those
                committed stay when a later one fails.

        Raises:
            InspectionError: There is something already; with `append`, a scan that was measured
                otherwise or has a sequence of the same name; with `overwrite`, something that is
                not a scan.
            FileFormatError: A sequence of this scan is stored and damaged. Save the others:
                `Scan(scan.anatomy, list(scan), scan.meta).save(path)`.
            OSError: The disk is full, or the like.
        """
        sequences = (self[index] for index in range(len(self)))  # iterating would pass over damage
        save(path, self.anatomy, sequences, self.meta, overwrite=overwrite, append=append)

    def to_xarray(self) -> xarray.Dataset:
        """Return the scan as a labelled Dataset in memory, all tokens of all sequences in a row.

        Metrics are (token, voxel), and (token, layer) with `layer_` before their names; `sequence`
        and `position` say which token it is. The condition and the fields of the rows are
        coordinates of the tokens, so that `dataset.groupby("condition")` works; those of sequences
        are along `prompt`. Needs the extra `export`.

        Raises:
            InspectionError: xarray is not installed.
        """
        dataset = to_xarray(self.anatomy, self, self.meta)
        self._warn_of_problems()
        return dataset

    def to_dataframe(self, by: str = "token") -> pandas.DataFrame:
        """Return the scan as a long table in memory: conditions and fields of the rows are columns.

        Texts that repeat are categories. A field whose name is that of a column of the scan is
        called `field_` and its name. `head` is -1 for voxels that are not heads. Needs the extra
        `tables`.

        Args:
            by: What has a row: each "token", or each "layer", "voxel" or "head" at each token.

        Raises:
            InspectionError: pandas is not installed, or no layer has heads.
        """
        table = to_dataframe(self.anatomy, self, by)
        self._warn_of_problems()
        return table

    def export(
        self,
        path: str | PathLike[str],
        *,
        by: str = "layer",
        exact: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Write the scan for other programs; the ending of the path says how.

        `.zarr` is what `to_xarray` gives, as a sharded Zarr v3 store (`xarray.open_zarr`), `.nc`
        the same as NetCDF (`xarray.open_dataset`). `.parquet` and `.csv` are the long table that
        `to_dataframe` gives.

        Args:
            path: Where to.
            by: What has a row in `.parquet` and `.csv`: "token", "layer", "voxel" or "head".
            exact: Keep every bit in `.zarr` too. By default float32 metrics and tensors are rounded
                there to 10 bits after the leading one, a relative error of at most 4.9e-4, which
                halves the size.
            overwrite: Whether an export that is there is replaced.

        Raises:
            InspectionError: The ending is none of these, a package is missing (extras `export` and
                `parquet`), or there is something already.
        """
        export(path, self.anatomy, self, self.meta, by=by, exact=exact, overwrite=overwrite)
        self._warn_of_problems()

    def _warn_of_problems(self) -> None:
        if self.problems:
            found = plural(len(self.problems), "problem")
            text = f"The scan has {found}, and what could not be read is left out: "
            warnings.warn(text + "; ".join(self.problems[:5]), stacklevel=3)
