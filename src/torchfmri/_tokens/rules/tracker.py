"""Follows parameters through the operations of a layer that is run again.

Every tensor of the run is one of three: computed from the layer's inputs (data, whose tokens a
`TokenTrace` follows), computed from parameters alone (derived), or a constant. Where a derived
tensor meets data, that is a use of the parameter: the operation, its operands and the place of its
result in the graph are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchfmri._tokens.rules.moves import BY_IDS, MOVES, moved_like, name_of, tensors_in
from torchfmri._tokens.rules.numbers import NOBODY, compact
from torchfmri._tokens.rules.operations import NEW
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.row_reach import NONE
from torchfmri._tokens.rules.sources import Sources
from torchfmri._tokens.rules.step_uses import REASON
from torchfmri._tokens.rules.trace import TokenTrace


@dataclass(frozen=True, slots=True)
class Tags:
    """To which token of one source each entry of a tensor belongs.

    Attributes:
        grid: (b, s).
        numbers: b * s + s for every entry, of the tensor's shape; -1 where there is none.
        stack: "encoder" or "decoder" where the model has both.
        of: What the tokens belong to, where they are not those that the model was handed.
    """

    grid: tuple[int, int]
    numbers: Tensor
    stack: str = ""
    of: str = ""


@dataclass(slots=True, eq=False)
class Derived:
    """A tensor computed from parameters alone.

    Attributes:
        tensor: The tensor.
        leaves: The names of the parameters.
        places: Where each entry stands in its one parameter, flat; None where the entries were
            computed and not only moved.
        origins: Set where the entries were chosen by tokens, as in an embedding.
        edge: Its place in the graph, where its entries were computed.
        past: All derived tensors that it was computed from.
        again: Those of them that were combined with their own parameters since: `w = w * a`.
    """

    tensor: Tensor
    leaves: frozenset[str]
    places: Tensor | None
    origins: Origins | None = None
    edge: Any = None
    past: frozenset[Derived] = frozenset()
    again: frozenset[Derived] = frozenset()


@dataclass(slots=True)
class Use:
    """One operation in which a derived tensor meets data.

    Attributes:
        function: The operation; None where the gradient of the derived tensor itself is wanted.
        arguments: Its operands, detached.
        keywords: Further ones.
        position: Which operand is the derived tensor.
        derived: That tensor.
        output: The result, or the derived tensor itself.
        origins: The tokens of `output`.
        tags: The same for one source of tokens, while its term is formed.
        edge: The place of `output` in the graph.
    """

    function: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    position: int
    derived: Derived
    output: Tensor
    origins: Origins | None
    tags: Tags | None = None
    edge: Any = None

    @property
    def is_direct(self) -> bool:
        return self.function is None


class Tracker(TokenTrace):  # type: ignore[no-untyped-call]
    """The operations of a run, as they come.

    Args:
        leaves: The parameters by name.
        inputs: The tensors that the layer is called with, and their tokens.
        sources: What the numbers of tokens mean.

    Attributes:
        uses: Where parameters meet data.
        unknown: Parameters used in an operation that is not understood -> that operation.
    """

    def __init__(
        self,
        leaves: Mapping[str, Tensor],
        inputs: Iterable[tuple[Tensor, Origins | None]],
        sources: Sources,
    ) -> None:
        super().__init__(sources)
        self.uses: list[Use] = []
        self.unknown: dict[str, str] = {}
        self._derived: dict[int, Derived] = {}
        self._kept: list[Tensor] = []  # an id is one as long as its tensor is there
        self._waiting: list[Use] = []
        self._made: list[Derived] = []
        self._met: set[Derived] = set()
        self._paused = 0
        for name, leaf in leaves.items():
            places = torch.arange(leaf.numel(), device=leaf.device).view(leaf.shape)
            self._remember(Derived(leaf, frozenset({name}), places))
        for tensor, origins in inputs:
            self._kept.append(tensor)
            if origins is not None:  # uses of the pass in which it was called are not ours
                self.set(tensor, origins.but(chain={}, pair=None, walk=None, reach={}, rests=NONE))

    def leaves(self, tensor: Tensor) -> frozenset[str]:
        """The parameters of which a tensor was computed, where it depends on nothing else."""
        found = self._derived.get(id(tensor))
        return super().leaves(tensor) if found is None else found.leaves

    def derived(self, tensor: Tensor) -> Derived | None:
        """What is known of a tensor that was computed from parameters alone."""
        return self._derived.get(id(tensor))

    def _remember(self, derived: Derived) -> None:
        self._derived[id(derived.tensor)] = derived
        self._kept.append(derived.tensor)
        if derived.places is None:
            self._made.append(derived)

    def pause(self, *_: object) -> None:
        """Take operations from here on as ones on data: their uses are counted elsewhere."""
        self._paused += 1

    def resume(self, *_: object) -> None:
        """Look for uses again."""
        self._paused -= 1

    def settle(self) -> None:
        """Find the place in the graph of results that have got theirs since."""
        made, self._made = self._made, []
        for derived in made:
            if derived.tensor.requires_grad:
                derived.edge = get_gradient_edge(derived.tensor)
        waiting, self._waiting = self._waiting, []
        for use in waiting:
            if use.output.requires_grad:
                use.edge = get_gradient_edge(use.output)

    def place_uses(self) -> None:
        """Give uses that are steps of a recurrence the tokens at which these were placed."""
        for use in self.uses:
            if use.origins is None:
                continue
            step = use.origins.use
            if step is None:
                use.origins = self.recurrences.settled(use.origins)
            elif step.is_moved:
                use.origins = use.origins.placed(step)

    # -- one operation -----------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        self.settle()
        operands = tensors_in(arguments, keywords)
        parameters = [self._derived[id(each)] for each in operands if id(each) in self._derived]
        has_data = self.has_data(operands)
        kept = arguments
        if parameters and has_data and function._schema.is_mutable:
            kept = (arguments[0].clone(), *arguments[1:])
        result = function(*arguments, **keywords)
        self._kept += tensors_in((result,), {})
        if self._paused or not parameters:
            self.follow(function, arguments, keywords, result)
        elif has_data:
            self._with_data(function, kept, arguments, keywords, result)
        else:
            self._only_parameters(function, arguments, keywords, parameters, result)
        return result

    def _only_parameters(
        self, function: Any, arguments: Any, keywords: Any, sources: list[Derived], result: Any
    ) -> None:
        if name_of(function) in NEW:  # of the shape of a parameter, and no more
            self.follow(function, arguments, keywords, result)
            return
        chosen = [each for each in sources if each.origins is not None]
        moved = self._moved(function, arguments, keywords, sources)
        if moved is None and chosen:  # chosen by tokens, and now computed with
            self._become_data(chosen)
            self._with_data(function, arguments, arguments, keywords, result)
            return
        leaves = frozenset().union(*(each.leaves for each in sources))
        origins: list[Origins] | None = None
        if chosen and name_of(function) in MOVES:
            source = chosen[0]
            assert source.origins is not None
            numbers = {id(source.tensor): source.origins.first}
            found = moved_like(function, arguments, keywords, numbers)
            origins = [source.origins.like(each) for each in found]
        past, again = _past(sources)
        if name_of(function) in ("cat", "stack"):
            self._refuse_steps([*sources])
        for number, each in enumerate(tensors_in((result,), {})):
            places = moved[number] if moved is not None else None
            made = Derived(each, leaves, places, origins[number] if origins else None)
            made.past, made.again = past, again
            self._remember(made)
            self.note_state(name_of(function), tensors_in(arguments, keywords), each)

    def _refuse_steps(self, several: Sequence[Derived]) -> None:
        """Refuse parameters that change a weight from one position to the next, `w = w * a`.

        The gradient of each weight is known, and not that of each change.
        """
        for each in several:
            for earlier in each.again.intersection(several):
                self.unknown.update(dict.fromkeys(each.leaves & earlier.leaves, REASON))

    def _become_data(self, chosen: Iterable[Derived]) -> None:
        """Rows of parameters that tokens have chosen: their own gradients are wanted."""
        for each in chosen:
            assert each.origins is not None
            self._use_directly(each)
            del self._derived[id(each.tensor)]
            self.set(each.tensor, each.origins)

    def _moved(
        self, function: Any, arguments: Any, keywords: Any, sources: list[Derived]
    ) -> list[Tensor] | None:
        """Where the entries of the result stand in the parameter, if they were only moved."""
        if name_of(function) not in MOVES | BY_IDS or len({each.leaves for each in sources}) > 1:
            return None
        if len(sources[0].leaves) > 1 or any(each.places is None for each in sources):
            return None
        places = {id(each.tensor): each.places for each in sources if each.places is not None}
        return moved_like(function, arguments, keywords, places)

    def _with_data(
        self, function: Any, kept: Any, arguments: Any, keywords: Any, result: Any
    ) -> None:
        operands, results = tensors_in(arguments, keywords), tensors_in((result,), {})
        known = [self._derived.get(id(each)) for each in operands]
        chosen = [each for each in known if each is not None and each.origins is not None]
        self._become_data(chosen)
        derived = [
            (position, self._derived[id(each)])
            for position, each in enumerate(arguments)
            if isinstance(each, Tensor) and id(each) in self._derived
        ]
        if self._chosen_by_ids(function, arguments, keywords, derived, operands, results):
            return
        inner = [self._derived[id(each)] for each in operands if id(each) in self._derived]
        self.follow(function, arguments, keywords, result)
        for each in results:
            self._derived.pop(id(each), None)  # written in place: data now
        origins = self.origins(results[0]) if results else None
        for position, source in derived:
            use = Use(
                function=function,
                arguments=kept,
                keywords=keywords,
                position=position,
                derived=source,
                output=results[0],
                origins=origins,
            )
            self._add(use)
        if len(derived) < len(inner):  # inside a list: cat, stack
            self._use_in_list(function, arguments, origins, inner)

    def _add(self, use: Use) -> None:
        made = use.derived
        if made.past and made not in self._met:
            for each in [e for e in self._met if e in made.again or made in e.again]:
                self._refuse_steps([each, made])
            self._met.add(made)
        self.uses.append(use)
        self._waiting.append(use)

    def _use_directly(self, source: Derived) -> None:
        """The gradient of a derived tensor itself is wanted: its entries know their tokens."""
        self._add(
            Use(
                function=None,
                arguments=(),
                keywords={},
                position=0,
                derived=source,
                output=source.tensor,
                origins=source.origins,
            )
        )

    def _use_in_list(
        self, function: Any, arguments: Any, origins: Origins | None, inner: list[Derived]
    ) -> None:
        """A parameter put beside data (a class token): its tokens are its places in the result."""
        name = name_of(function)
        axis = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], int) else 0
        if name != "cat" or origins is None:
            for source in inner:
                self.unknown.update(dict.fromkeys(source.leaves, name))
            return
        start = 0
        for each in arguments[0]:
            length = each.shape[axis]
            found = self._derived.get(id(each))
            if found is not None:
                found.origins = origins.like(origins.first.narrow(axis, start, length))
                if bool((compact(found.origins.first) == NOBODY).all()):
                    self.unknown.update(dict.fromkeys(found.leaves, name))
                self._use_directly(found)
            start += length

    def _chosen_by_ids(
        self, function: Any, arguments: Any, keywords: Any,
        derived: list[tuple[int, Derived]], operands: list[Tensor], results: list[Tensor],
    ) -> bool:  # fmt: skip
        """A table of which tokens choose rows: derived still, with the tokens of its rows."""
        if name_of(function) not in BY_IDS or [position for position, _ in derived] != [0]:
            return False
        source = derived[0][1]
        moved = self._moved(function, arguments, keywords, [source])
        if moved is None:
            return False
        self.follow(function, arguments, keywords, results[0])
        origins = self.origins(results[0])
        self.forget(results[0])
        self._remember(Derived(results[0], source.leaves, moved[0], origins))
        return True


def _past(sources: Sequence[Derived]) -> tuple[frozenset[Derived], frozenset[Derived]]:
    """All tensors that a result was computed from, and those combined with their parameters."""
    pasts = [each.past | {each} for each in sources]
    again = frozenset[Derived]().union(*(each.again for each in sources))
    for past in pasts:
        for other, theirs in zip(sources, pasts, strict=True):
            if theirs is not past:
                shared = (e for e in past - theirs if e.past and e.leaves & other.leaves)
                again |= frozenset(shared)
    return frozenset[Derived]().union(*pasts), again


def fresh_tags(tensor: Tensor) -> Tags | None:
    """New tokens: the first two axes of a tensor with its features last."""
    if tensor.ndim < 2:
        return None
    b, s = (tensor.shape[0], tensor.shape[1]) if tensor.ndim > 2 else (tensor.shape[0], 1)
    numbers = torch.arange(b * s, device=tensor.device).view(b, *[s] * (tensor.ndim > 2), 1)
    numbers = numbers[(..., *[None] * (tensor.ndim - numbers.ndim))]
    return Tags((b, s), numbers.expand(tensor.shape))
