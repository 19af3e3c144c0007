"""The result of patching: how much of the clean answer each patch brings back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import check_number
from torchfmri._text import Column, Grid, number_text, plural
from torchfmri.visualization import PatchPicture, draw_patches, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
_MOST_NAMES = 6


@dataclass(frozen=True, eq=False)
class PatchMap:
    """How much of the clean answer comes back when values of the clean run are put in.

    Attributes:
        names: The places.
        blocks: (n,) their blocks; -1 for none.
        labels: The tokens that were patched one by one; one label, "all tokens", where all were.
        pairs: (clean position, corrupted position) of the tokens that stand for each other.
        metric: "logit_difference" or "surprisal".
        clean: The metric of the clean prompt.
        corrupted: The metric of the corrupted one.
        patched: (n, labels) the metric of the corrupted prompt with each patch.
        unmatched: Tokens of either prompt that stand for none of the other, which stay as they are.
        to: What the patches reach; "" where everything after them.
        unreached: Places from which nothing arrives at `to`, because no path leads there; their
            score is 0.

    Examples:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> patches = torchfmri.patch(model, tokenizer, "Tom had a", "Lily had a", " dog")
        >>> patches.score.shape
        (5, 1)
    """

    names: tuple[str, ...]
    blocks: NDArray[np.int64]
    labels: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    metric: str
    clean: float
    corrupted: float
    patched: Floats
    unmatched: tuple[str, ...] = ()
    to: str = ""
    unreached: tuple[str, ...] = ()

    @property
    def score(self) -> Floats:
        """(n, labels) 0 where it is as corrupted, 1 where it is as clean."""
        found: Floats = (self.patched - self.corrupted) / (self.clean - self.corrupted)
        return found + 0.0  # no -0

    def top(self, count: int = 10) -> list[tuple[str, str, float]]:
        """Place, token and score of the patches with the highest scores."""
        check_number("count", count, 1, "give how many to name, from 1")
        order = np.argsort(-self.score, axis=None, kind="stable")[:count]
        places = [np.unravel_index(int(each), self.score.shape) for each in order]
        return [
            (self.names[int(n)], self.labels[int(t)], float(self.score[n, t])) for n, t in places
        ]

    def __repr__(self) -> str:
        return f"<PatchMap of {plural(len(self.names), 'place')}: {self.metric}>"

    def __str__(self) -> str:
        return self.table()

    def table(self, count: int = 12, width: int | None = None) -> str:
        """The patches with the highest scores."""
        found = self.top(count)
        way = self.to and f", on the direct way to {self.to}"
        notes = [f"not matched by role: {', '.join(self.unmatched)}"] if self.unmatched else []
        if self.unreached:
            shown = ", ".join(self.unreached[:_MOST_NAMES])
            more = ", ..." * (len(self.unreached) > _MOST_NAMES)
            notes.append(
                f"no path leads to {self.to} from {plural(len(self.unreached), 'place')} ({shown}"
                f"{more}), which come after it or beside it: nothing arrives, and the score is 0"
            )
        return Grid(
            title=(
                f"clean values of {plural(len(self.names), 'place')} put into the corrupted "
                f"prompt{way}: {self.metric} {number_text(self.corrupted)} as corrupted (score 0), "
                f"{number_text(self.clean)} as clean (score 1)"
            ),
            heading="place",
            names=[place for place, _, _ in found],
            columns=[
                Column("token", [token for _, token, _ in found], 5, right=False),
                Column("score", [f"{score:.3f}" for _, _, score in found], 9),
            ],
            notes=notes,
        ).text(width)

    def plot(self) -> Figure:
        """The scores: places down, tokens across."""
        score = np.where(np.isin(self.names, self.unreached)[:, None], np.nan, self.score)
        picture = PatchPicture(
            names=self.names, labels=self.labels, score=score, metric=self.metric, to=self.to
        )
        figure = new_figure(*picture.inches)
        draw_patches(figure, picture)
        return figure

    def draw(self, path: str | Path) -> None:
        """Write the picture of `plot` to a file."""
        save_figure(self.plot(), path, dpi=150)
