"""The methods of a `Scan` that read its readouts: attention, lens, experts and features.

`PictureMethods`, and so `Scan`, inherits from `ReadoutMethods`. The values stand in the tensors of
a sequence under the names that `record/readouts` makes; these names and the order of the columns
are the stored format and must not change. The signatures are public.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchfmri._attention import HEAD_SCORES
from torchfmri._lens import Lens
from torchfmri._scan.record.reading import Reading, Values
from torchfmri._scan.record.readouts import (
    LENS,
    LENS_PARTS,
    PATTERN,
    Experts,
    choose_readouts,
    find_readouts,
    readout_name,
)
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import plot_attention, plot_heads

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Pattern = str | Sequence[str]
_SCORES = "Scan with attention=True."
_WHOLE = "Scan with attention='L3.attn', or attention='*' for the patterns of all layers."


class ReadoutMethods:
    """The methods of a `Scan` that read readouts."""

    meta: Mapping[str, Any]

    def _reading(self, sequence: int | None) -> Reading:
        raise NotImplementedError

    def attention(
        self, score: str = "entropy", pattern: Pattern = "*", *, sequence: int | None = None
    ) -> Values:
        """Return a score of every head at every token; the scan needs `attention=True`.

        Args:
            score: "entropy" (nats), "distance" (mean, in tokens), "first" (share on the first
                token), "previous" (share on the token before), or "induction" (share on the tokens
                that followed earlier copies of this one; nan where there is none).
            pattern: A pattern for the layers that compute attention, or several.
            sequence: Which sequence; may be left out if there is only one.

        Returns:
            names: "model.layers.3.self_attn[head 2]", one per column.
            values: (s, head)

        Raises:
            LayerNotFoundError: No such layer computes attention.
            InspectionError: The scan has no attention, or no such score.
        """
        found = self._scores(score, pattern, sequence)
        names = [
            f"{layer}[head {head}]"
            for layer, each in found.items()
            for head in range(each.shape[1])
        ]
        return Values(tuple(names), np.concatenate(list(found.values()), 1))

    def _scores(
        self, score: str, pattern: Pattern, sequence: int | None
    ) -> dict[str, NDArray[Any]]:
        if score not in HEAD_SCORES:
            raise InspectionError(
                f"score={score!r}: there are {', '.join(HEAD_SCORES)}. Choose one."
            )
        chosen = self._reading(sequence).sequence
        return choose_readouts(chosen, f"{PATTERN}_{score}", pattern, _SCORES)

    def attention_pattern(self, layer: str, *, sequence: int | None = None) -> NDArray[np.float32]:
        """Return the whole pattern of one layer, (heads, query, key), if the scan has kept it.

        Args:
            layer: The layer that computes attention, or a name of its block such as `L3.attn`.
            sequence: Which sequence; may be left out if there is only one.

        Raises:
            LayerNotFoundError: There is no such layer.
            InspectionError: The scan has not kept it.
        """
        chosen = self._reading(sequence).sequence
        found = choose_readouts(chosen, PATTERN, layer, _WHOLE)
        if len(found) != 1:
            raise InspectionError(f"{layer!r} matches {len(found)} layers: name one of them.")
        (values,) = found.values()
        s = len(chosen)
        return values.reshape(s, -1, s).transpose(1, 0, 2)

    def plot_attention(
        self, layer: str, heads: Sequence[int] | None = None, *, sequence: int | None = None
    ) -> Figure:
        """Draw the patterns of one layer, a panel per head: queries down, keys across.

        Args:
            layer: The layer that computes attention.
            heads: Which heads; all by default.
            sequence: Which sequence; may be left out if there is only one.
        """
        pattern = self.attention_pattern(layer, sequence=sequence)
        tokens = self._reading(sequence).sequence.tokens
        return plot_attention(pattern, tokens.pieces, heads=heads, title=layer)

    def plot_heads(
        self,
        score: str = "induction",
        pattern: Pattern = "*",
        *,
        sequence: int | None = None,
        ax: Axes | None = None,
    ) -> Axes:
        """Draw a score of every head, its mean over tokens: layers down, heads across.

        Args:
            score: As for `attention`.
            pattern: Which layers.
            sequence: Which sequence; may be left out if there is only one.
            ax: Where to draw.
        """
        found = self._scores(score, pattern, sequence)
        table = np.full((len(found), max(each.shape[1] for each in found.values())), np.nan)
        for row, values in enumerate(found.values()):
            seen = ~np.isnan(values)
            total = np.where(seen, values, 0).sum(0)
            with np.errstate(invalid="ignore"):
                table[row, : values.shape[1]] = total / seen.sum(0)
        title = f"{score}, mean over tokens"
        return plot_heads(table, list(found), title=title, label=score, ax=ax)

    def lens(self, tokenizer: Any = None, *, sequence: int | None = None) -> Lens:
        """Return what each block would have said next; the scan needs `lens=True`.

        Args:
            tokenizer: The model's tokenizer, which spells the tokens; without it they are numbers.
            sequence: Which sequence; may be left out if there is only one.

        Raises:
            InspectionError: The scan has no lens.
        """
        chosen = self._reading(sequence).sequence
        names = (self.meta.get("readouts") or {}).get(LENS)
        tensors = chosen.tensors
        if not names or readout_name(LENS, "rank") not in tensors:
            raise InspectionError("This scan has no lens. Scan with lens=True.")
        s, layers = len(chosen), len(names)
        parts = {
            part: np.asarray(tensors[readout_name(LENS, part)])
            .reshape(s, layers, -1)
            .transpose(1, 0, 2)
            for part in LENS_PARTS
        }
        top = parts["top"].astype(np.int64)
        spelling: dict[int, str] = {}
        if tokenizer is not None:
            spelling = {each: tokenizer.decode([each]) for each in np.unique(top).tolist()}
        return Lens(
            layers=tuple(names),
            pieces=chosen.tokens.pieces,
            ids=chosen.tokens.ids,
            rank=parts["rank"][..., 0].astype(np.int64),
            probability=parts["probability"][..., 0],
            entropy=parts["entropy"][..., 0],
            top=top,
            top_probability=parts["top_probability"],
            spelling=spelling,
        )

    def experts(self, pattern: Pattern = "*", *, sequence: int | None = None) -> dict[str, Experts]:
        """Return router -> where it sent each token; the scan needs `experts=True`.

        Args:
            pattern: Which routers.
            sequence: Which sequence; may be left out if there is only one.

        Raises:
            InspectionError: The scan has no experts.
        """
        chosen = self._reading(sequence).sequence
        ids = choose_readouts(chosen, "expert_ids", pattern, "Scan with experts=True.")
        weights = find_readouts(chosen, "expert_weights")
        entropy = find_readouts(chosen, "expert_entropy")
        return {
            layer: Experts(layer, each.astype(np.int64), weights[layer], entropy[layer][:, 0])
            for layer, each in ids.items()
        }

    def features(
        self, place: str | None = None, *, sequence: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the strongest features of every token: ids (s, k), -1 for none, and values.

        Args:
            place: Where, as it was called in `features=`; may be left out if there is only one.
            sequence: Which sequence; may be left out if there is only one.

        Raises:
            InspectionError: The scan has no features, or several places of them.
        """
        chosen = self._reading(sequence).sequence
        found = choose_readouts(
            chosen, "feature_ids", "*" if place is None else place, "Scan with features={...}."
        )
        if len(found) != 1:
            raise InspectionError(f"Features were read at {', '.join(found)}: name one of them.")
        ((name, ids),) = found.items()
        return ids.astype(np.int64), chosen.tensors[readout_name(name, "feature_values")]
