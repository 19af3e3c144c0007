"""Paths: what a place sends to others on the direct way, past everything in between.

`patch(to=...)` makes a `Paths`. There are two passes for each sender, many senders at once. In the
first one the sender has its clean value, and every attention and MLP after it is held at its value
in the corrupted prompt; only the residual stream carries the change. What then arrives at the
receivers is put into a second pass, where all else runs freely. Norms are computed anew in both.
Receivers that are held themselves must be read before they are (`before_edits`), or nothing would
ever arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchfmri._arguments import few, require
from torchfmri._edit import BoundEdit, Edit, EditPasses, attached
from torchfmri._lesion.lesion_run import Key, LesionRun, key_of
from torchfmri._lesion.questions import LesionQuestion, logits_for
from torchfmri._lesion.targets import LesionTarget
from torchfmri._model import Block, Place, find_stacks, places_of
from torchfmri.exceptions import InspectionError

LOGITS = "logits"
# Where in its block a sender stands: what comes after it there is held too.
_BEFORE, _ATTENTION, _MLP, _AFTER = range(4)


class _Held(NamedTuple):
    """A place that is held, and where it stands."""

    place: Place
    block: int
    order: int


class Paths:
    """The direct ways from places to receivers.

    Args:
        run: The model, with the senders as its targets.
        to: The receivers: names of places, or "logits".
        question: The corrupted prompt.

    Raises:
        InspectionError: A receiver is none, or the parts of blocks cannot be told apart.
    """

    def __init__(self, run: LesionRun, to: str | Sequence[str], question: LesionQuestion) -> None:
        names = [to] if isinstance(to, str) else list(to) if isinstance(to, Sequence) else []
        meaning = "give names of places such as 'L9H6.q', or 'logits'"
        usable = bool(names) and all(isinstance(each, str) for each in names)
        require(usable and (LOGITS not in names or len(names) == 1), "to", to, meaning)
        self.name = ", ".join(names)
        self._run, self._question = run, question
        receivers = [] if names == [LOGITS] else names
        self._receivers = [place for name in receivers for place in places_of(run.layers, name)]
        stacks = list(find_stacks(run.layers).values())
        if len(stacks) != 1:
            raise InspectionError(
                "Path patching holds what is between two places of one stack of blocks, and the "
                f"model has {len(stacks)}. Patch without to=."
            )
        self._blocks: list[Block] = stacks[0]
        self._held = [
            _Held(place, index, order)
            for part, order in (("hook_attn_out", _ATTENTION), ("hook_mlp_out", _MLP))
            for index in range(len(self._blocks))
            for place in places_of(run.layers, f"blocks.{index}.{part}")
        ]
        keys = [key_of(each.place) for each in self._held]
        with torch.no_grad(), run.reading(keys) as values:
            logits_for(run.model, question.ids[None], question.needed)
        self._corrupted: dict[Key, Tensor] = values
        self._arrived: dict[str, bool] = {}  # whether anything of a sender does

    def rows(
        self,
        senders: Sequence[LesionTarget],
        patches: Sequence[BoundEdit],
        passes: EditPasses,
        corrupted: float,
    ) -> list[float]:
        """Return the metric with each sender's patch, one in each row, that receivers alone get.

        Args:
            senders: What is patched in each row.
            patches: The patches.
            passes: What they know of the pass.
            corrupted: The metric without a patch, which is that of a row where nothing arrives.
        """
        held = self._hold(senders, passes)
        question, count = self._question, len(senders)
        if not self._receivers:
            self._arrived |= {each.place.name: True for each in senders}
            return self._run.rows(question, count, [*patches, *held], passes)
        arrived = self._arrivals(count, [*patches, *held], passes)
        reached = self._reached(senders, arrived)
        second = EditPasses()
        received = [
            self._run.bind(place, Edit.replace(arrived[key_of(place)]), second)
            for place in self._receivers
        ]
        found = self._run.rows(question, count, received, second)
        for sender, reaches in zip(senders, reached, strict=True):
            name = sender.place.name
            self._arrived[name] = reaches or self._arrived.get(name, False)
        pairs = zip(found, reached, strict=True)
        return [each if reaches else corrupted for each, reaches in pairs]

    def _arrivals(
        self, count: int, bound: Sequence[BoundEdit], passes: EditPasses
    ) -> dict[Key, Tensor]:
        """Return what receivers are handed in an edited pass."""
        keys = list(dict.fromkeys(map(key_of, self._receivers)))
        ids = self._question.ids.expand(count, -1)
        with (
            torch.no_grad(),
            attached(self._run.model, bound, passes, {}),
            # Receivers that are held themselves, such as an MLP, are read before they are.
            self._run.reading(keys, before_edits=True) as values,
        ):
            logits_for(self._run.model, ids, self._question.needed)
        return values

    def _reached(
        self, senders: Sequence[LesionTarget], arrived: Mapping[Key, Tensor]
    ) -> list[bool]:
        """Whether anything of each sender arrives.

        A block reaches all later ones by the stream. Within a block it depends on the architecture,
        so that it is tried: the same pass without the patches hands receivers the same values, bit
        for bit, where no path leads.
        """
        blocks = [self._block_of(each.layer) for each in self._receivers]
        last = max((each for each in blocks if each is not None), default=-1)
        where = [self._place_of(each.place) for each in senders]
        certain = [block < last for block, _ in where]
        if all(certain):
            return certain
        passes = EditPasses()
        plain = self._arrivals(len(senders), self._hold(senders, passes), passes)
        return [
            sure or any(not torch.equal(arrived[key][row], plain[key][row]) for key in plain)
            for row, sure in enumerate(certain)
        ]

    def _block_of(self, layer: str) -> int | None:
        blocks = [each for each in self._blocks if f"{layer}.".startswith(f"{each.name}.")]
        return blocks[0].index if blocks else None

    def unreached(self, senders: Sequence[LesionTarget]) -> tuple[str, ...]:
        """Return the senders of which nothing has arrived in any row so far."""
        names = (each.place.name for each in senders)
        return tuple(name for name in names if not self._arrived.get(name, False))

    def refuse_unreached(self, senders: Sequence[LesionTarget]) -> None:
        """Raise if nothing of any sender arrives.

        Raises:
            InspectionError: Nothing arrives from any sender; both ends are named.
        """
        missing = self.unreached(senders)
        if len(missing) == len(senders):
            raise InspectionError(
                f"No path leads from {few(missing)} to {self.name}: nothing of the patch arrives "
                "there. Receivers come after what sends to them; name later ones in to=, or leave "
                "it out."
            )

    def _hold(self, senders: Sequence[LesionTarget], passes: EditPasses) -> list[BoundEdit]:
        """Return edits that hold everything after each sender, in its row."""
        where = [self._place_of(each.place) for each in senders]
        found = []
        for held in self._held:
            rows = [row for row, each in enumerate(where) if each < (held.block, held.order)]
            if rows:
                value = self._corrupted[key_of(held.place)]
                edit = Edit.replace(value).at(rows=rows)
                found.append(self._run.bind(held.place, edit, passes))
        return found

    def _place_of(self, place: Place) -> tuple[int, int]:
        """Return the block of a sender, and where it stands in it.

        Raises:
            InspectionError: The sender is in no block, or in neither its attention nor its MLP.
        """
        for block in self._blocks:
            inner = place.layer.removeprefix(f"{block.name}.")
            if place.layer == block.name:
                return block.index, _BEFORE if place.what == "inputs" else _AFTER
            if inner == place.layer:
                continue
            return block.index, self._order(block, place, inner)
        raise InspectionError(
            f"{place.name!r} is in no block: what comes after it cannot be held. Patch it without "
            "to=, or name a place in a block."
        )

    def _order(self, block: Block, place: Place, inner: str) -> int:
        """Return where in its block a sender stands; its name there is `inner`."""
        for held in self._held:
            if key_of(place) == key_of(held.place):
                return held.order
        mlp = places_of(self._run.layers, f"layers.{block.index}.mlp")[0].layer
        parents = {block.attention(): _ATTENTION, mlp.removeprefix(f"{block.name}."): _MLP}
        for parent, order in parents.items():
            if inner == parent or inner.startswith(f"{parent}."):
                return order
        raise InspectionError(
            f"{place.name!r} is neither in the attention nor in the MLP of block {block.name!r}, "
            "so what comes after it cannot be held. Patch it without to=."
        )
