"""A lens: what each layer would have said next, at every token of one text.

`torchfmri.lens` and `scan.lens` return it. It is public, and its arrays are stored in scans: names,
shapes and the meaning of 0 and nan must stay. Column t is about token t + 1, or about token t
itself in a masked language model. The table may change freely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._arguments import is_whole
from torchfmri._text import Column, Grid
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import plot_lens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS = ("probability", "rank", "entropy", "top_probability")


@dataclass(frozen=True, eq=False)
class Lens:
    """What each layer would have said next, read through the model's own final norm and head.

    Column t is the stream at token t: what is said there is about token t + 1, or about token t
    itself in a masked language model (`ahead` is 0 then). The first row is the embedding, the last
    one what the model itself says.

    Attributes:
        layers: The rows: "embedding", then the blocks.
        pieces: The text of each token.
        ids: (s,) the tokens.
        rank: (layer, s) of the token that it is about, 1 for the likeliest; 0 if none came.
        probability: (layer, s) of the token that it is about; nan if none came.
        entropy: (layer, s) of the distribution, in nats.
        top: (layer, s, k) the likeliest tokens, the first most so.
        top_probability: (layer, s, k).
        spelling: Token id -> text, of all ids in `top`; a missing one is shown as its number.

    Examples:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> lens = torchfmri.lens(model, tokenizer, "Once upon a time")
        >>> lens.layers[0], lens.rank.shape == lens.probability.shape
        ('embedding', True)
    """

    layers: tuple[str, ...]
    pieces: Sequence[str]
    ids: NDArray[np.int64]
    rank: NDArray[np.int64]
    probability: NDArray[np.float32]
    entropy: NDArray[np.float32]
    top: NDArray[np.int64]
    top_probability: NDArray[np.float32]
    spelling: Mapping[int, str]

    @property
    def ahead(self) -> int:
        """1 if a column is about the token after it, 0 if it is about its own token."""
        return 0 if self.rank.size and self.rank[-1, -1] else 1  # nothing comes after the last one

    def spell(self, token: int) -> str:
        """Return the text of a token, or its number if it has none."""
        return self.spelling.get(int(token), f"#{int(token)}")

    def decided(self) -> NDArray[np.int64]:
        """Return (s,) the first row from which on the model's own answer stays the likeliest."""
        agrees = self.top[:, :, 0] == self.top[-1, :, 0]
        stays = np.flip(np.logical_and.accumulate(np.flip(agrees, 0), 0), 0)
        return np.asarray(stays.argmax(0), np.int64)

    def table(self, position: int = -1, count: int = 3) -> str:
        """Return the likeliest tokens of every layer at one position.

        Args:
            position: Which token's stream, counted from 0, or from the end.
            count: How many tokens.
        """
        s = len(self.ids)
        if not is_whole(position) or not -s <= position < s:
            raise InspectionError(
                f"There is no position {position!r}: the text has {s} tokens. Give 0 to {s - 1}, "
                f"or -1 to {-s} from the end."
            )
        place = position % s
        count = min(count, self.top.shape[-1])
        cells = [
            "  ".join(
                f"{self.spell(token)!r} {share:.0%}"
                for token, share in zip(
                    self.top[row, place, :count],
                    self.top_probability[row, place, :count],
                    strict=True,
                )
            )
            for row in range(len(self.layers))
        ]
        heading = "would say next" if self.ahead else "would say here"
        columns = [Column(heading, cells, importance=2, right=False)]
        title = f"{'after' if self.ahead else 'at'} token {place}, {self.pieces[place]!r}"
        if place + self.ahead < s:
            title += f"; {self.pieces[place + 1]!r} came next" if self.ahead else ""
            ranks = [str(each) for each in self.rank[:, place]]
            shares = [f"{each:.2%}" for each in self.probability[:, place]]
            columns += [Column("its rank", ranks, 1), Column("probability", shares, 1)]
        return Grid(title, "layer", self.layers, columns).text()

    def __repr__(self) -> str:
        return f"<Lens: {len(self.layers)} layers, {len(self.ids)} tokens>"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python values, ready for JSON; nan is None."""

        def plain(values: NDArray[Any]) -> Any:
            objects = values.astype(object)
            objects[np.isnan(values)] = None
            return objects.tolist()

        return {
            "layers": list(self.layers),
            "tokens": list(self.pieces),
            "ids": self.ids.tolist(),
            "rank": self.rank.tolist(),
            "probability": plain(self.probability),
            "entropy": plain(self.entropy),
            "top": [[[self.spell(each) for each in k] for k in row] for row in self.top],
            "top_probability": plain(self.top_probability),
        }

    def plot(self, metric: str = "top_probability", *, ax: Axes | None = None) -> Axes:
        """Draw layers up and tokens across, with the likeliest next token in each cell.

        Args:
            metric: "top_probability" (of that token), "probability" or "rank" (of the token that
                came next), or "entropy".
            ax: Where to draw.
        """
        if metric not in METRICS:
            raise InspectionError(
                f"metric={metric!r} is unknown: choose one of {', '.join(METRICS)}."
            )
        values = np.asarray(getattr(self, metric), float)
        values = values[:, :, 0] if metric == "top_probability" else values
        if metric == "rank":
            values = np.where(values > 0, values, np.nan)
        words = [[self.spell(each) for each in row] for row in self.top[:, :, 0]]
        pieces = list(self.pieces)
        ahead = bool(self.ahead)
        return plot_lens(values, words, self.layers, pieces, metric=metric, ahead=ahead, ax=ax)
