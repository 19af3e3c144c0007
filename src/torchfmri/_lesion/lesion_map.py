"""The result of lesions: what each did to the metric, prompt by prompt, with its file.

`lesion` fills it. It is public, and its file format is versioned (`_FORMAT`, `_VERSION`): fields
may be added with a default, never renamed. `load` reads files as if an enemy wrote them, so every
list and table is checked for its length. p is that of one lesion; only the dots of the picture are
corrected for how many there are. The table, its notes and the picture may change freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import check_number, check_path
from torchfmri._contrast import t_quantile, t_tail
from torchfmri._files import new_file, read_regular, seal, unseal
from torchfmri._model import nearest_names
from torchfmri._text import Column, Grid, number_text, plural, printable
from torchfmri._viewer import Panel
from torchfmri.exceptions import FileFormatError, InspectionError, LayerNotFoundError
from torchfmri.visualization import LesionPicture, draw_lesions, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
_FORMAT, _VERSION, _LIMIT = "torchfmri lesions", 1, 1 << 30
_TEXTS = {"names": "n", "kinds": "n", "prompts": "p", "answers": "p", "foils": "p"}
_ARRAYS: dict[str, tuple[str, type]] = {
    **dict.fromkeys(("blocks", "columns"), ("n", np.int64)),
    "intact": ("p", np.float64),
    **dict.fromkeys(("lesioned", "estimate", "activation"), ("pn", np.float64)),
}
"""The fields that are texts or arrays: their axes, of p prompts and n lesions, and their type."""
_MOST_FEATURES = 40
"""How many features are drawn: each has a row that must stay legible."""
_UNITS = {"surprisal": "surprisal of the answer (nats)", "logit_difference": "logit difference"}


class Paired(NamedTuple):
    """Differences over prompts; NaN if there are fewer than two prompts.

    Attributes:
        mean: (n,)
        low: (n,) the lower end of the interval.
        high: (n,) its upper end.
        t: (n,) Student's t; infinite if all differences are equal.
        p: (n,) its two-sided p, not corrected for how many there are.
    """

    mean: Floats
    low: Floats
    high: Floats
    t: Floats
    p: Floats


def paired(differences: Floats, level: float = 0.95) -> Paired:
    """Return the mean, interval, t and p of differences (prompts, n), column by column."""
    count = len(differences)
    mean = differences.mean(0)
    if count < 2:
        unknown = np.full(mean.shape, np.nan)
        return Paired(mean=mean, low=unknown, high=unknown, t=unknown, p=unknown)
    error = differences.std(0, ddof=1) / np.sqrt(count)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(mean == 0, 0.0, mean / error)
    reach = t_quantile((1 + level) / 2, count - 1) * error
    p = t_tail(t, count - 1)
    return Paired(mean=mean, low=mean - reach, high=mean + reach, t=t, p=p)


@dataclass(frozen=True, eq=False)
class LesionMap:
    """What the lesion of each place did to a metric; rows are prompts, columns are lesions.

    Attributes:
        names: The lesions, such as "L9H6".
        kinds: What each is: "heads", "mlps", "attentions", "blocks", "voxels", "features" or
            "places".
        blocks: (n,) the block of each; -1 if it is in none.
        columns: (n,) the head or voxel of each; 0 for others.
        prompts: What was asked, and `answers` and `foils` beside it.
        answers: The answers that counted.
        foils: What they were compared with; "" without.
        metric: "surprisal", "logit_difference", or the name of a function.
        edit: "zero", "mean" or "resample".
        intact: (p,) the metric without lesions.
        lesioned: (p, n) the metric with each lesion; NaN if it was only estimated.
        estimate: (p, n) the change by attribution patching; NaN if it was not asked for.
        activation: (p, n) the root mean square of what was lesioned, without lesions.
        key: What the lesions were made with, to tell whether a file can be continued.
        labels: The user's texts for features, one for each lesion; none if no table was given.
        masked: Whether the answers are masked in the prompts (BERT), and do not come after them.

    Examples:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> lesions = torchfmri.lesion(model, tokenizer, "Once upon a", " time", of="mlps")
        >>> lesions.names
        ('L0.mlp', 'L1.mlp', 'L2.mlp', 'L3.mlp', 'L4.mlp')
        >>> lesions.effect.shape
        (1, 5)
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    blocks: NDArray[np.int64]
    columns: NDArray[np.int64]
    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    foils: tuple[str, ...]
    metric: str
    edit: str
    intact: Floats
    lesioned: Floats
    estimate: Floats
    activation: Floats
    key: str = ""
    labels: tuple[str, ...] = ()
    masked: bool = False

    @property
    def effect(self) -> Floats:
        """(p, n) the metric with each lesion minus that without, or an estimate of it."""
        change = self.lesioned - self.intact[:, None]
        return np.where(np.isnan(self.lesioned), self.estimate, change)

    @property
    def is_exact(self) -> bool:
        """Whether the lesions were made, and not only estimated."""
        return not bool(np.isnan(self.lesioned).all())

    def over_prompts(self, level: float = 0.95) -> Paired:
        """Return the mean, interval, paired t and p of each effect over prompts."""
        return paired(self.effect, level)

    def effect_of(self, name: str) -> Floats:
        """Return (p,) the effect of one lesion, prompt by prompt.

        Raises:
            LayerNotFoundError: There is no such lesion.
        """
        if name not in self.names:
            near = nearest_names(name, self.names)
            raise LayerNotFoundError(name, near, len(self.names), "lesions.names")
        found: Floats = self.effect[:, self.names.index(name)]
        return found

    def top(self, count: int = 10) -> list[str]:
        """Return the lesions with the largest mean effects in size, largest first."""
        check_number("count", count, 1, "give how many to name, from 1")
        order = np.argsort(-np.abs(self.effect.mean(0)), kind="stable")
        return [self.names[each] for each in order[:count]]

    def estimate_error(self) -> dict[str, float]:
        """Return how far attribution patching is from the lesions themselves.

        `r` is the correlation over lesions of the mean effects, `slope` that of the estimate on
        the effect, `median` and `largest` the size of the differences, `same_top` the share of the
        ten largest effects that the estimate also has among its ten.

        Raises:
            InspectionError: Lesions and estimates are both needed, and one is missing.
        """
        if not self.is_exact or bool(np.isnan(self.estimate).any()):
            raise InspectionError(
                "To compare the estimate with the lesions, both are needed: method='both'."
            )
        true, guess = self.effect.mean(0), self.estimate.mean(0)
        spread = bool(true.std() > 0 and guess.std() > 0)
        tops = [
            set(np.argsort(-np.abs(each), kind="stable")[:10].tolist()) for each in (true, guess)
        ]
        return {
            "r": float(np.corrcoef(true, guess)[0, 1]) if spread else float("nan"),
            "slope": float(np.polyfit(true, guess, 1)[0]) if spread else float("nan"),
            "median": float(np.median(np.abs(guess - true))),
            "largest": float(np.abs(guess - true).max()),
            "same_top": len(tops[0] & tops[1]) / max(len(tops[0]), 1),
        }

    def __repr__(self) -> str:
        return (
            f"<LesionMap of {plural(len(self.names), 'lesion')} ({printable(self.edit)}) on "
            f"{plural(len(self.prompts), 'prompt')}: {printable(self.metric)}>"
        )

    def __str__(self) -> str:
        return self.table()

    def table(self, count: int = 12, width: int | None = None) -> str:
        """Return the largest effects, with interval and t over prompts.

        Args:
            count: How many lesions to show.
            width: In letters; that of the terminal by default.
        """
        found, shown = self.over_prompts(), [self.names.index(each) for each in self.top(count)]
        several = len(self.prompts) > 1
        columns = [Column("change", [number_text(found.mean[each]) for each in shown], 9)]
        if several:
            between = [f"{found.low[i]:+.3g} to {found.high[i]:+.3g}" for i in shown]
            columns.append(Column("95 % interval", between, 6))
            columns.append(Column("t", [f"{found.t[each]:.2f}" for each in shown], 5))
            columns.append(Column("p", [f"{found.p[each]:.2g}" for each in shown], 4))
        if not np.isnan(self.estimate).any() and self.is_exact:
            mean = self.estimate.mean(0)
            columns.append(Column("estimated", [number_text(mean[each]) for each in shown], 7))
        columns.append(Column("rms", [number_text(self.activation.mean(0)[i]) for i in shown], 2))
        return Grid(
            title=self._title(),
            heading="lesion",
            names=[self._titled(each) for each in shown],
            columns=columns,
            notes=self._notes(several),
        ).text(width)

    def _titled(self, index: int) -> str:
        label = printable(self.labels[index]) if self.labels else ""
        return f"{self.names[index]} {label}".rstrip()

    def _title(self) -> str:
        what = _UNITS.get(self.metric, self.metric)
        made = "lesions" if self.is_exact else "estimated lesions (attribution patching)"
        return (
            f"{len(self.names)} {made} ({self.edit}), {plural(len(self.prompts), 'prompt')}: "
            f"change of the {what}, which is {number_text(float(self.intact.mean()))} without one"
        )

    def _notes(self, several: bool) -> list[str]:
        notes = []
        if several:
            notes.append(
                f"p is that of one lesion; of {len(self.names)}, about "
                f"{max(1, round(0.05 * len(self.names)))} are below 0.05 by chance."
            )
        else:
            notes.append("One prompt: no interval. Give several prompts for t and p.")
        lost = np.isnan(self.effect).any(0)
        if lost.any():
            first = self.names[int(lost.argmax())]
            notes.append(
                f"The metric is NaN with {plural(int(lost.sum()), 'lesion')}, such as {first}."
            )
        notes += [] if self.masked else self._without_space()
        if self.is_exact and not np.isnan(self.estimate).any():
            error = self.estimate_error()
            notes.append(
                f"Attribution patching against the lesions: r = {error['r']:.3f}, slope "
                f"{error['slope']:.2f}, median error {error['median']:.3g}, largest "
                f"{error['largest']:.3g}; {error['same_top']:.0%} of the ten largest are the same."
            )
        return notes

    def _without_space(self) -> list[str]:
        """Return a note about answers that would continue the last word of the prompt."""
        joined = [
            (prompt, answer)
            for prompt, answer in zip(self.prompts, self.answers, strict=True)
            if prompt[-1:].isalnum() and answer[:1].isalnum()
        ]
        if not joined:
            return []
        prompt, answer = joined[0]
        several = f" ({len(joined)} answers are so)" if len(joined) > 1 else ""
        word = f"continues the word {prompt.split()[-1]!r}"
        own = f"a word of its own is {' ' + answer!r}{several}."
        return [f"The answer {answer!r} has no space before it and {word}; {own}"]

    def panel(self, layers: Sequence[str] = (), count: int = 20) -> Panel:
        """Return the largest effects as a panel for `torchfmri.view(scan, panels=[...])`.

        Args:
            layers: Those of the scan, `scan.layers`: a lesion leads to its block.
            count: How many lesions to show.
        """
        found = self.over_prompts()
        blocks = {each.rpartition(".")[2]: each for each in reversed(layers)}
        several, rows = len(self.prompts) > 1, list[list[Any]]()
        for index in map(self.names.index, self.top(count)):
            link = {"layer": blocks.get(str(self.blocks[index])), "text": self._titled(index)}
            numbers = [number_text(found.mean[index])]
            rows.append([link, *numbers, *([f"{found.p[index]:.2g}"] if several else [])])
        columns = ["lesion", "change", *(["p"] if several else [])]
        return Panel("lesions", self._title(), "table", {"columns": columns, "rows": rows})

    def plot(self) -> Figure:
        """Draw effects beside activations: blocks down, heads or voxels across."""
        figure = new_figure(*self._picture().inches)
        draw_lesions(figure, self._picture())
        return figure

    def draw(self, path: str | Path) -> None:
        """Write the picture of `plot` to a file."""
        save_figure(self.plot(), path, dpi=150)

    def _picture(self) -> LesionPicture:
        statistics = self.over_prompts()
        with_features = "features" in self.kinds  # they have no order: a row each, largest on top
        shown = self.top(_MOST_FEATURES) if with_features else self.names
        chosen = [self.names.index(each) for each in shown]
        fewer = f"; the {len(shown)} largest are drawn" * (len(shown) < len(self.names))
        notable = np.nan_to_num(statistics.p, nan=1.0) < 0.05 / max(len(self.names), 1)
        return LesionPicture(
            kinds=["places" if with_features else self.kinds[each] for each in chosen],
            blocks=self.blocks[chosen],
            columns=self.columns[chosen],
            names=[self._titled(each) for each in chosen],
            effect=self.effect.mean(0)[chosen],
            notable=notable[chosen],
            activation=self.activation.mean(0)[chosen],
            label=f"change of {_UNITS.get(self.metric, self.metric)}",
            title=self._title() + fewer,
        )

    def _record(self) -> dict[str, Any]:
        """Return the fields as plain data, without those that `lesion` needs to go on."""
        return {
            **{name: list(getattr(self, name)) for name in _TEXTS},
            **{name: getattr(self, name).tolist() for name in _ARRAYS},
            "metric": self.metric,
            "edit": self.edit,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        return {
            **self._record(),
            **{name: each.tolist() for name, each in self.over_prompts()._asdict().items()},
            **({"labels": list(self.labels)} if self.labels else {}),
            **({"masked": True} if self.masked else {}),
        }

    def save(self, path: str | Path) -> None:
        """Write the map to a file, whole or not at all."""
        record = {"format": _FORMAT, "version": _VERSION, "key": self.key, **self._record()}
        record |= {"labels": list(self.labels), "masked": self.masked}
        with new_file(check_path("path", path)) as new:
            new.write_bytes(seal(record, "the lesions"))

    @classmethod
    def load(cls, path: str | Path) -> LesionMap:
        """Return the map in a file that `save` or an interrupted `lesion` wrote.

        Raises:
            FileFormatError: It is not such a file, or it is damaged.
        """
        place = check_path("path", path)
        record = unseal(read_regular(place, _LIMIT), str(place))
        if record.get("format") != _FORMAT or record.get("version") != _VERSION:
            raise FileFormatError(str(place), f"it is not a file of {_FORMAT}, version {_VERSION}")
        try:
            texts: dict[str, Any] = {name: tuple(map(str, record[name])) for name in _TEXTS}
            arrays: dict[str, Any] = {
                name: np.array(record[name], dtype) for name, (_, dtype) in _ARRAYS.items()
            }
            found = cls(
                **texts,
                **arrays,
                metric=str(record["metric"]),
                edit=str(record["edit"]),
                key=str(record["key"]),
                labels=tuple(map(str, record.get("labels", ()))),
                masked=record.get("masked") is True,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FileFormatError(
                str(place), f"its tables are not as they should be: {error}"
            ) from error
        sizes = {"p": len(found.prompts), "n": len(found.names)}
        axes = {**_TEXTS, **{name: form for name, (form, _) in _ARRAYS.items()}}
        axes |= {"labels": "n"} if found.labels else {}
        for name, form in axes.items():
            value: Any = getattr(found, name)
            shape = value.shape if isinstance(value, np.ndarray) else (len(value),)
            if shape != tuple(sizes[axis] for axis in form):
                told = tuple(sizes.values())
                raise FileFormatError(str(place), f"its tables have other sizes than {told}")
        return found
