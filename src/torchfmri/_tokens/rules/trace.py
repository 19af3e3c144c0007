"""Follows tokens from the arguments of a model through its operations.

Every tensor that depends on the arguments has `Origins`; `operations.py` says what an operation
does with them. Nothing here keeps a tensor alive.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchfmri._tokens.rules.grids import Grids
from torchfmri._tokens.rules.joins import Joins
from torchfmri._tokens.rules.layouts import Layouts
from torchfmri._tokens.rules.moves import BY_IDS, MOVES, name_of, tensors_in, window
from torchfmri._tokens.rules.numbers import (
    NOBODY,
    UNKNOWN,
    compact,
    constant,
    is_constant_along,
    rows_of,
)
from torchfmri._tokens.rules.operations import NEW, WRITES, TokenRules
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.places import written
from torchfmri._tokens.rules.reaches import Reaches, token_of
from torchfmri._tokens.rules.recurrences import Recurrences
from torchfmri._tokens.rules.row_reach import NONE, RowReach
from torchfmri._tokens.rules.sources import Sources, TokenSource
from torchfmri._tokens.rules.step_uses import Begun, StepUse
from torchfmri._tokens.rules.steps import Steps
from torchfmri._tokens.rules.sums import Sums
from torchfmri._tokens.rules.way import step
from torchfmri._torch import FollowingMode


class TokenTrace(FollowingMode):  # type: ignore[no-untyped-call]
    """The tokens of every tensor of a run.

    Attributes:
        sources: The grids of tokens.
        way: The way that the run has taken, see `way.py`.
        reads_values: Whether Python was handed a value out of a tensor, or a yes or no about it,
            that may differ in another run with the same masks.
        reads_masks: Whether Python was handed one that depends on the masks alone.
        has_data_shapes: Whether values decided the shape of a tensor (`nonzero`).
        has_data_steps: Whether values decided which rows the steps of a recurrence take in.
        of_layers: The parameters of Linear layers.
        beside: The same run with the features of its arguments second; None where they are not.
    """

    def __init__(self, sources: Sources | None = None) -> None:
        super().__init__()
        self.sources = Sources() if sources is None else sources
        self.recurrences = Recurrences(self.sources)
        self.grids = Grids(self.sources)
        self.layouts = Layouts(self.sources, self.grids)
        self.steps = Steps(self.sources, self.grids, self.recurrences)
        self.joins = Joins(self.sources, self.grids, self.steps)
        self.reaches = Reaches(self.recurrences.proof, self.steps, self.grids)
        self.sums = Sums(self.sources, self.grids, self.layouts, self.joins)
        self._origins: dict[int, Origins] = {}
        self._leaves: dict[int, frozenset[str]] = {}
        self._floating: dict[int, list[Origins]] = {}
        self._sums: dict[int, frozenset[str]] = {}
        self._written: set[int] = set()
        self._states: set[int] = set()
        self._computed: set[int] = set()
        self._fixed: set[int] = set()
        self._masks: set[int] = set()
        self._of_masks: set[int] = set()
        self._sets = (
            *(self._written, self._states, self._computed),
            *(self._fixed, self._masks, self._of_masks),
        )
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        self.count = 0
        self.way = 0
        self.reads_values = self.reads_masks = False
        self.has_data_shapes = False
        self.has_data_steps = False
        self.beside: TokenTrace | None = None
        self.of_layers: frozenset[str] = frozenset()

    # -- what is known of a tensor -------------------------------------------------------------

    def set(self, tensor: Tensor, origins: Origins) -> None:
        """Set the origins of a tensor."""
        self._watch(tensor)
        self._origins[id(tensor)] = origins
        self._leaves.pop(id(tensor), None)
        self._floating.pop(id(tensor), None)

    def origins(self, tensor: Tensor) -> Origins | None:
        """The origins of a tensor; None if it does not depend on the arguments."""
        found = self._origins.get(id(tensor))
        if self._written and tensor._is_view():
            base = tensor._base
            if base is not None and id(base) in self._written:
                whole = self._origins[id(base)]
                seen = window(whole.first, base, tensor)
                known = whole if found is None else found
                return known.but(first=seen, second=None, reach=whole.reach)
        return found

    def is_data(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on tokens, and not only on masks, numbers and other weights."""
        found = self.origins(tensor)
        if found is None:
            return False
        return not tensor.numel() or bool((compact(found.first) != NOBODY).any())

    def has_data(self, operands: Sequence[Tensor]) -> bool:
        """Whether an operation is one on data.

        A weight with a row for every row of what is added to it is changed by that: it is no use of
        the weight for as many samples.
        """
        data = [each for each in operands if self.is_data(each)]
        weights = [each.shape for each in operands if self.leaves(each)]
        doubtful = [found for each in data if (found := self.origins(each)) and found.is_doubtful]
        if not data or len(doubtful) < len(data):
            return bool(data)
        return not all(each.first.shape in weights for each in doubtful)

    def is_fixed(self, tensor: Tensor) -> bool:
        """Whether a constant is the same in every pass: computed in this one, and not drawn.

        What a pass finds in an attribute, or is handed by another library, may be something else
        the next time. A full mask is the same in every pass that has one: see `set_mask`.
        """
        return id(tensor) in self._fixed

    def set_mask(self, mask: Tensor, is_full: bool) -> None:
        """Note that an argument is a mask, and whether all of it is 1.

        Models read masks to find out whether there is any padding. Passes are told apart by that,
        so a full mask is a constant, and of any mask it is known whether it is full.
        """
        self._watch(mask)
        self._masks.add(id(mask))
        if is_full:
            self.forget(mask)
            self._set_fixed(mask, of_masks=True)

    def _set_fixed(self, tensor: Tensor, of_masks: bool) -> None:
        self._watch(tensor)
        self._fixed.add(id(tensor))
        if of_masks:
            self._of_masks.add(id(tensor))

    def _unfix(self, written: Tensor) -> None:
        """A constant was written into, and whatever shares its memory."""
        memory = written.untyped_storage().data_ptr()
        for key in [*self._fixed]:
            each = self._alive[key]()
            if each is None or each is written or each.untyped_storage().data_ptr() == memory:
                self._fixed.discard(key)
                self._masks.discard(key)

    def note_read(self, *tensors: Tensor) -> None:
        """Note that values of these tensors leave torch: Python may branch on them."""
        if self.asides:
            return
        if not all(map(self.is_fixed, tensors)):
            self.reads_values = True
        elif any(id(each) in self._of_masks for each in tensors):
            self.reads_masks = True

    def is_state(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from parameters that were spread over the samples."""
        return id(tensor) in self._states

    def forget(self, tensor: Tensor) -> None:
        """Take a tensor for one that does not depend on the arguments."""
        self._origins.pop(id(tensor), None)

    def leaves(self, tensor: Tensor) -> frozenset[str]:
        """The parameters of which a tensor was computed, where it depends on nothing else."""
        return self._leaves.get(id(tensor), frozenset())

    def set_leaves(self, tensor: Tensor, leaves: frozenset[str]) -> None:
        """Note that a tensor was computed from these parameters alone."""
        self._watch(tensor)
        self._leaves[id(tensor)] = leaves

    def set_sum(self, tensor: Tensor, names: frozenset[str]) -> None:
        """Note that a tensor is the sum of these parameters, entry by entry."""
        self._watch(tensor)
        self._sums[id(tensor)] = names

    def sum_of(self, tensor: Tensor) -> frozenset[str]:
        """The parameters of which a tensor is the sum; none for any other tensor."""
        return self._sums.get(id(tensor), frozenset())

    def _watch(self, tensor: Tensor) -> None:
        """Forget a tensor when it is gone: another one may have its id then."""
        key = id(tensor)
        found = self._alive.get(key)
        if found is not None and found() is tensor:
            return
        tables = (self._origins, self._leaves, self._floating, self._sums, self._alive)
        sets = self._sets

        def forget(_: object) -> None:
            for table in tables:
                table.pop(key, None)
            for each in sets:
                each.discard(key)

        forget(None)
        self._alive[key] = weakref.ref(tensor, forget)

    def close(self) -> None:
        """Let go of everything: callbacks on tensors refer to these tables."""
        for table in (self._origins, self._leaves, self._floating, self._sums, self._alive):
            table.clear()
        for some in self._sets:
            some.clear()
        if self.beside is not None:
            self.beside.close()

    def output_of_call(self, tensor: Tensor) -> Origins:
        """The origins of what a layer returned.

        A layer that read constants (the state that a recurrence begins with) has none yet: it takes
        those of the data that its output is first added to.
        """
        found = self.origins(tensor)
        if found is None:
            found = Origins(constant(NOBODY, tensor))
            if id(tensor) in self._leaves:
                self._floating.setdefault(id(tensor), []).append(found)
        return found

    # -- one operation -----------------------------------------------------------------------

    def run(self, function: Any, arguments: Any, keywords: Any) -> Any:
        """Run an operation, and follow its tokens."""
        self.way = step(self.way, function, arguments, keywords)
        result = function(*arguments, **keywords)
        self.follow(function, arguments, keywords, result)
        if self.beside is not None:
            self.beside.follow(function, arguments, keywords, result)
            if self.sources.layouts[0].is_settled:
                self.beside.close()
                self.beside = None
        return result

    def follow(self, function: Any, arguments: Any, keywords: Any, result: Any) -> None:
        """Find the origins of a result; nothing raised here may reach whoever runs the model."""
        self.count += 1
        try:
            self._follow(function, arguments, keywords, result)
        except Exception as error:
            reason = f"{name_of(function)}: {error}"
            for each in tensors_in((result,), {}):
                self.forget(each)
                with contextlib.suppress(RuntimeError):  # of tensors that have no shape (nested)
                    self.set(each, Origins(constant(UNKNOWN, each), reason=reason))

    def _follow(self, function: Any, arguments: Any, keywords: Any, result: Any) -> None:
        operands, results = tensors_in(arguments, keywords), tensors_in((result,), {})
        leaves = frozenset().union(*(self.leaves(each) for each in operands))
        name = name_of(function)
        tags = getattr(function, "tags", ())
        if torch.Tag.data_dependent_output in tags:
            self.note_read(*operands)
        if not all(map(self.is_fixed, operands)):
            if results and self.is_fixed(results[0]):  # written into
                self._unfix(results[0])
            by_numbers = name == "index" and not any(_is_mask(each) for each in operands[1:])
            self.has_data_shapes |= torch.Tag.dynamic_output_shape in tags and not by_numbers
        known = any(self.origins(each) is not None for each in operands)
        is_derived = bool(leaves) and not self.has_data(operands)
        if name in NEW or not known or is_derived:
            drawn = torch.Tag.nondeterministic_seeded in tags
            has_fixed = not drawn and all(map(self.is_fixed, operands)) and not known
            of_masks = any(id(each) in self._of_masks for each in operands)
            for each in results:
                self.forget(each)
                if has_fixed:
                    self._set_fixed(each, of_masks)
                if is_derived and name not in NEW:
                    self._note_derived("" if keywords else name, operands, each, leaves)
                    self.note_state(name, operands, each)
            return
        named = {"function": function, "name": name, "arguments": arguments, "keywords": keywords}
        call = TokenRules(trace=self, results=results, **named)
        by_entry = torch.Tag.pointwise in tags
        read = self._read(name, operands)
        for each, found in zip(results, call.origins(), strict=True):
            if found is None:
                continue
            begun = by_entry and found.has_begun and call.has_constants(each.shape)
            reach = self._reach(found, read, name, by_entry or call.is_move, begun)
            rests = self.reaches.rests(found, read, name)
            parts = (
                self.joins.parts.kept(found, (*read, found))
                if by_entry or len(read) == 1
                else frozenset()
            )
            found = replace(found, reach=reach, rests=rests, begun=_begun(read), parts=parts)
            if leaves:
                # Rows that ids choose are at these, unless a state has made the ids.
                if name not in MOVES and (name != "embedding" or found.chain):
                    found = self._note_begun(found.but(), read, leaves, operands)
                    self._note_use(found, leaves, operands, by_entry)
                self._land(operands, found)
            several = []  # what is computed of several rows is none of them
            if name in MOVES or name in WRITES:
                several = [e for e in map(self.origins, operands) if e is not None]
            self.set(each, self._over(self._with_history(found, several), is_moved=bool(several)))
        self._follow_mask(name, arguments, operands, results)
        if results and results[0] is arguments[0] and function._schema.is_mutable:
            self._write_to_base(arguments[0])

    def _read(self, name: str, operands: Sequence[Tensor]) -> list[Origins]:
        """The origins of the operands whose values the result has."""
        operands = operands[1:] if name == "copy" else operands
        if name in BY_IDS and self.origins(operands[0]) is not None:
            operands = operands[:1]
        operands = [each for each in operands if each.is_floating_point()] or operands
        return [each for each in map(self.origins, operands) if each is not None]

    def _reach(
        self, found: Origins, read: Sequence[Origins], name: str, by_entry: bool, begun: bool
    ) -> Mapping[int, RowReach]:
        """The rows of which the rows of a result were computed."""
        reach = self.reaches.of_result(found, read, name, by_entry, self.count)
        if begun and self.steps.is_step(found):
            token = token_of(found)
            known = reach.get(token) or self.reaches.data(found)
            reach = {token: self.recurrences.proof.begun(known)}
        return reach

    def _over(self, found: Origins, is_moved: bool) -> Origins:
        """These origins; what is no step has left its recurrence."""
        if not (found.chain or found.seen) or self.steps.is_step(found):
            return found
        if not is_moved:  # scores of a state and of all others may come back to it
            self.recurrences.leave(found.chain)
        return found.but(chain={}, seen=frozenset(), pair=None, walk=None)

    def _with_history(self, found: Origins, several: Sequence[Origins]) -> Origins:
        """What is put together of steps remembers them; a row of it is the step again.

        Where all positions are there, the recurrence is over, and each row is data for another one.
        """
        history = {row: step for each in several for row, step in each.history.items()}
        if not (history or found.history or any(each.chain or each.seen for each in several)):
            return found  # as nearly always; whether it is a step takes long to find out
        if self.steps.is_step(found):
            step = history.get(int(rows_of(found.first)[0])) if history else None
            found = replace(found, history={}) if found.history else found  # it may be a use
            return found if step is None else found.continued(step)
        for each in several:
            if (each.chain or each.seen) and not each.history and self.steps.is_step(each):
                history[int(rows_of(each.first)[0])] = each
        if not (history or found.history):
            return found
        history = history or {**found.history}
        if not self.grids.has_all(found.first):
            return found.but(history=history)
        for each in several:
            history |= each.ended  # what was taken in first stays taken in
        return found.but(history={}, ended=history)

    def _follow_mask(
        self, name: str, arguments: Any, operands: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """Know a mask in another dtype, and whether it is full, where a model asks for that."""
        if len(operands) != 1 or id(operands[0]) not in self._masks:
            return
        if name == "_to_copy":
            self._masks.update(map(id, results))
        elif name == "all" and len(arguments) == 1:
            self._set_fixed(results[0], of_masks=True)

    def _note_use(
        self, found: Origins, leaves: frozenset[str], operands: Sequence[Tensor], is_pointwise: bool
    ) -> None:
        """Note that a step, maybe of a recurrence, is the result of a use of parameters."""
        if not self.steps.is_step(found):
            return
        self.has_data_steps |= found.is_dynamic
        # A weight times a mask of constants is spread over the samples, a state has a row for each.
        computed = self._has_computed(operands, found)
        is_fresh = len(found.seen) <= 1
        use = StepUse(
            own=found.first,
            leaves=leaves,
            is_first=computed and is_pointwise,
            is_start=computed and is_pointwise,
            is_fresh=is_fresh,
            pair=found.pair,
            walk=found.walk,
            begun=found.begun,
        )
        if use.is_first:
            self.steps.meet_constants(found)
        self.recurrences.add(use, found.chain)
        token = token_of(found)
        reach = found.reach.get(token) or self.reaches.data(found)
        found.reach = {token: self.recurrences.proof.used(use, reach, found.rests)}
        found.use = use
        found.chain = {**found.chain, **dict.fromkeys(leaves, (use,))}

    def _note_begun(
        self,
        found: Origins,
        read: Sequence[Origins],
        leaves: frozenset[str],
        operands: Sequence[Tensor],
    ) -> Origins:
        """Note a use that may begin a walk of several positions at once, or go on with one."""
        is_mixed = self.reaches.is_side_by_side(found, read)
        for each in found.begun:
            each.is_again |= not each.leaves.isdisjoint(leaves)
            each.is_split |= is_mixed and not each.leaves.isdisjoint(leaves)
        is_first = not self.steps.is_step(found) and self._has_computed(operands, found)
        if is_mixed or is_first:
            begun = Begun(leaves)
            found.begun |= {begun}
            if is_mixed:
                self.joins.parts.side_by_side(begun, read[0])
        is_start = any(id(each) in self._computed for each in operands)
        found.parts = self.joins.parts.used(found, leaves, self.steps.is_step(found), is_start)
        return found

    def _has_computed(self, operands: Sequence[Tensor], found: Origins) -> bool:
        """Whether one operand is what parameters make of constants, a row for each sample."""
        shape = found.first.shape
        return any(id(each) in self._computed and each.shape == shape for each in operands)

    def _note_derived(
        self, name: str, operands: Sequence[Tensor], result: Tensor, leaves: frozenset[str]
    ) -> None:
        """A result that was computed from parameters alone."""
        floating = [cell for each in operands for cell in self._floating.get(id(each), ())]
        self.set_leaves(result, leaves)
        if floating:
            self._floating[id(result)] = floating
        sums = [self._sums.get(id(each), frozenset[str]()) for each in operands]
        is_sum = name in ("add", "clone") and all(each.shape == result.shape for each in operands)
        if is_sum and all(sums) and len(frozenset().union(*sums)) == sum(map(len, sums)):
            self.set_sum(result, frozenset().union(*sums))

    def note_state(self, name: str, operands: Sequence[Tensor], result: Tensor) -> None:
        """Note what a recurrence may begin with, and learned queries: parameters, per sample."""
        constants = [
            each for each in operands
            if each.ndim and each.shape == result.shape and not self.leaves(each)
            and self.origins(each) is None
        ]  # fmt: skip
        spread = name in ("expand", "repeat")
        if constants or spread or any(id(each) in self._states for each in operands):
            self._watch(result)
            self._states.add(id(result))
        others = [each for each in operands if each.ndim and not self.leaves(each)]
        if others or spread or any(id(each) in self._computed for each in operands):
            self._watch(result)
            self._computed.add(id(result))

    def _land(self, operands: Sequence[Tensor], found: Origins) -> None:
        """Outputs that were computed from constants meet data: they have its tokens."""
        for each in operands:
            for cell in self._floating.pop(id(each), ()):
                shape, rows = cell.first.shape, found.first.shape
                if cell.chain:  # read again: it belongs to the step that read it first
                    continue
                if shape[:-1] == rows[:-1] and is_constant_along(found.first, -1):
                    cell.first = found.first.narrow(-1, 0, 1).expand(shape)
                    cell.chain, cell.seen, cell.born = found.chain, found.seen, found.born
                    cell.reach, cell.rests = found.reach, found.rests
                elif _without_ones(each.shape) == _without_ones(shape):
                    if found.first.numel() == cell.first.numel():  # axes of one were added
                        cell.first = found.first.reshape(shape)
                    elif each.shape == shape and is_constant_along(found.first, -1):
                        cell.landed = found

    def take_as_data(self, tensors: Sequence[Tensor]) -> None:
        """Take rows that a recurrence has made for data, whose tokens are known."""
        for each in map(self._origins.get, map(id, tensors)):
            if each is not None:
                each.reach, each.rests = {}, NONE

    def land(self, tensor: Tensor, source: TokenSource) -> None:
        """Outputs of which a tensor was computed are at the tokens of this source, (b, s, ...)."""
        for cell in self._floating.pop(id(tensor), ()):
            shape = cell.first.shape
            if tuple(shape[:2]) == source.grid:
                numbers = source.numbers(cell.first.device)
                cell.first = numbers[(..., *[None] * (len(shape) - 2))].expand(shape)

    def _write_to_base(self, tensor: Tensor) -> None:
        """A view was written into: the tensor that it is a view of has other origins too."""
        base = tensor._base if tensor._is_view() else None
        found = self._origins.get(id(tensor))
        if base is None or found is None:
            return
        found, old = found.told(), self._origins.get(id(base))
        first = torch.empty_strided(base.shape, base.stride(), dtype=torch.int64,
                                    device=base.device)  # fmt: skip
        first.copy_(constant(NOBODY, base) if old is None else old.told().first)
        place = window(first, base, tensor)
        before = place.clone()
        place.copy_(written(found, first, before, found.first, self.sources))
        known = {} if old is None else old.reach
        reach = self.reaches.written(known, found, before, place)
        dynamic = found.is_dynamic or (old is not None and old.is_dynamic)
        filled = None if self.steps.is_one_step(found) else self.grids.filled(first)
        first = first if filled is None else first.copy_(filled)
        made = found.but(
            first=first,
            second=None,
            is_dynamic=dynamic,
            reach=reach,
            rests=found.rests if old is None else found.rests | old.rests,
            begun=found.begun if old is None else found.begun | old.begun,
        )
        several = [found] if old is None else [old, found]
        self.set(base, self._with_history(made, several))
        self._written.add(id(base))


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [each for each in shape if each > 1]


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def _begun(read: Sequence[Origins]) -> frozenset[Begun]:
    return frozenset(walk for each in read for walk in each.begun)
