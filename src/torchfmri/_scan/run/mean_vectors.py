"""Mean vectors: the signed activation of each layer, averaged over chosen tokens of a sequence.

A root mean square is blind to direction: v and -v look the same. Directions need the signed mean.
It is accumulated while the model runs, so that no activations are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchfmri._arguments import check_each
from torchfmri._scan.record.blocks import block_of, outline_of
from torchfmri._scan.record.sequence import VECTORS, Floats
from torchfmri._scan.run.subject import ScannedLayer, ScanSubject
from torchfmri._text import bytes_text, plural

AUTO = "auto"
_DATASET = ("all", "generated", "last")
"""What a scan of a dataset keeps unless something else is asked for."""
_BYTES = 4
"""Of one unit of a mean vector: float32."""


def check_choices(vectors: object) -> None:
    """Raise if `vectors` is not a valid choice of tokens."""
    if vectors is not None and vectors != AUTO:
        check_each("vectors", vectors, VECTORS, "choose None, 'auto', or some of")


def chosen_tokens(
    vectors: str | Sequence[str] | None, *, dataset: bool, generates: bool
) -> tuple[str, ...]:
    """Return the tokens to average over; "generated" is dropped if the model does not generate."""
    if vectors == AUTO:
        vectors = _DATASET if dataset else ()
    several = (vectors,) if isinstance(vectors, str) else tuple(vectors or ())
    return tuple(each for each in VECTORS if each in several and (generates or each != "generated"))


@dataclass(frozen=True)
class VectorPlan:
    """Which mean vectors are kept.

    Attributes:
        tokens: The tokens to average over: some of VECTORS.
        layers: The layers whose vectors are kept.
        special: Token ids that do not count.
        notes: Why some layers have no vectors.
    """

    tokens: tuple[str, ...] = ()
    layers: frozenset[str] = frozenset()
    special: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def plan_vectors(
    subject: ScanSubject, tokens: tuple[str, ...], special: Sequence[int], limit: int
) -> VectorPlan:
    """Choose the layers whose mean vectors take at most `limit` bytes per sequence.

    All of them if they fit; otherwise those that give an overview (blocks, attention, MLP), then
    the same without anything wider than a block (such as the LM head), then blocks only, dropping
    the last ones until they fit.
    """
    if not tokens:
        return VectorPlan()
    notes = []
    several = [each for each in subject.layers if each.axis is not None and each.calls > 1]
    if several:
        names = _some([each.name for each in several])
        notes.append(f"no mean vectors of {names}: called several times per pass")
    usable = [each for each in subject.layers if each.axis is not None and each.calls == 1]
    kept = {each.name: each.axis.width for each in usable if each.axis is not None}
    whole = _size(kept, tokens)
    if whole > limit:
        kept = _fewer(kept, [subject.anatomy.layers[k] for k in outline_of(subject.anatomy.layers)],
                      lambda widths: _size(widths, tokens) <= limit)  # fmt: skip
        left_out = [each.name for each in usable if each.name not in kept]
        notes.append(
            f"no mean vectors of {_some(left_out)}: all layers would take {bytes_text(whole)} "
            f"per sequence, but vector_bytes is {bytes_text(limit)}"
        )
    return VectorPlan(tokens, frozenset(kept), tuple(special), tuple(notes))


def _fewer(
    widths: Mapping[str, int], outline: Sequence[str], fits: Callable[[Mapping[str, int]], bool]
) -> dict[str, int]:
    """The layers that fit, by the rule of `plan_vectors`."""
    overview = {name: widths[name] for name in outline if name in widths}
    blocks = {name: width for name, width in overview.items() if name == block_of(name) != ""}
    widest = max(blocks.values(), default=0)
    narrow = {name: width for name, width in overview.items() if width <= widest}
    kept = next((each for each in (overview, narrow) if fits(each)), blocks)
    while kept and not fits(kept):
        kept.popitem()
    return kept


def _size(widths: Mapping[str, int], tokens: Sequence[str]) -> int:
    return sum(widths.values()) * _BYTES * len(tokens)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:2])
    return f"{plural(len(names), 'layer')} ({shown}{', ...' if len(names) > 2 else ''})"


class MeanVectors:
    """Sums over the tokens of a batch, layer by layer, while they come.

    Args:
        plan: What is kept.
        b: Batch rows.
    """

    def __init__(self, plan: VectorPlan, b: int) -> None:
        self.plan, self._b = plan, b
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._counts: dict[tuple[str, str], Tensor] = {}
        self._chosen: dict[str, Tensor] = {}

    def begin(self, ids: Tensor, kept: Tensor, generated: Tensor) -> None:
        """Set the tokens that the following `add` calls refer to.

        Args:
            ids: (b, n) the tokens.
            kept: (b, n) True for real tokens, False for padding.
            generated: (b, n) whether the model wrote it.
        """
        if self.plan.special:
            kept = kept & ~torch.isin(ids, torch.tensor(self.plan.special, device=ids.device))
        chosen = {
            "all": kept,
            "prompt": kept & ~generated,
            "generated": kept & generated,
            "last": kept,
        }
        self._chosen = {choice: chosen[choice] for choice in self.plan.tokens}

    def add(self, layer: ScannedLayer, rows: Tensor) -> None:
        """Add a layer's outputs, (b, n, w); of fewer tokens than expected, they are the last ones.

        Layers that are not in the plan are passed over.
        """
        if layer.name not in self.plan.layers:
            return
        dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        for choice, chosen in self._chosen.items():
            kept = chosen[:, -rows.shape[1] :].to(rows.device)
            key = (choice, layer.name)
            if choice == "last":
                self._put_last(key, rows.to(dtype), kept)
                continue
            # What is not counted may be nan, and nan * 0 is nan.
            total = rows.to(dtype).masked_fill(~kept[..., None], 0.0).sum(1)
            count = kept.sum(1)
            self._sums[key] = self._sums[key] + total if key in self._sums else total
            self._counts[key] = self._counts[key] + count if key in self._counts else count

    def _put_last(self, key: tuple[str, str], rows: Tensor, kept: Tensor) -> None:
        """Keep the last token of each row that has one among these."""
        found = (torch.arange(1, kept.shape[1] + 1, device=kept.device) * kept).amax(1)
        last = rows[torch.arange(self._b, device=rows.device), (found - 1).clamp(min=0)]
        before = self._sums.get(key)
        before = torch.full_like(last, torch.nan) if before is None else before
        self._sums[key] = torch.where((found > 0)[:, None], last, before)
        self._counts[key] = torch.ones_like(found)

    def of_row(self, row: int) -> dict[str, dict[str, Floats]]:
        """Choice -> layer -> (w,) of one sequence; nan where no token was chosen."""
        found: dict[str, dict[str, Floats]] = {choice: {} for choice in self.plan.tokens}
        for (choice, name), total in self._sums.items():
            mean = total[row] / self._counts[choice, name][row]  # 0 / 0 is nan
            found[choice][name] = mean.to("cpu", torch.float32).numpy()
        return found
