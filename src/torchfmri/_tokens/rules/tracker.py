"""CAPTURE: follows parameters and tokens through the operations of a layer that is run again.

Every tensor of the run is one of three: computed from the layer's inputs (data, with the number of
the token that each entry belongs to, where that can be told), computed from parameters alone
(derived), or a constant. Where a derived tensor meets data, that is a use of the parameter: the
operation, its operands and the place of its result in the graph are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchfmri._torch import DispatchMode, map_tensors


@dataclass(frozen=True, slots=True)
class Tags:
    """To which token each entry of a tensor belongs.

    Attributes:
        grid: (b, s).
        numbers: b * s + s for every entry, of the tensor's shape; -1 where there is none.
        stack: "encoder" or "decoder" where the model has both.
    """

    grid: tuple[int, int]
    numbers: Tensor
    stack: str = ""


@dataclass(slots=True)
class Derived:
    """A tensor computed from parameters alone.

    Attributes:
        tensor: The tensor.
        leaves: The names of the parameters.
        places: Where each entry stands in its one parameter, flat; None where the entries were
            computed and not only moved.
        tags: Set where the entries were chosen by tokens, as in an embedding.
        edge: Its place in the graph, where its entries were computed.
    """

    tensor: Tensor
    leaves: frozenset[str]
    places: Tensor | None
    tags: Tags | None = None
    edge: Any = None


@dataclass(slots=True)
class Use:
    """One operation in which a derived tensor meets data.

    Attributes:
        function: The operation.
        arguments: Its operands, detached.
        keywords: Further ones.
        position: Which operand is the derived tensor.
        derived: That tensor.
        output: The result, or the derived tensor itself where its own gradient is wanted.
        tags: The tokens of `output`.
        operands: The tokens of each operand, by position.
        edge: The place of `output` in the graph.
    """

    function: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    position: int
    derived: Derived
    output: Tensor
    tags: Tags | None
    operands: dict[int, Tags | None] = field(default_factory=dict)
    edge: Any = None
    is_direct: bool = False


# Operations that move entries and change none.
_VIEWS = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy", "t", "transpose", "permute",
    "expand", "expand_copy", "unsqueeze", "squeeze", "select", "slice", "narrow", "split",
    "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind", "chunk", "unfold",
}  # fmt: skip
_COPIES = {
    "clone", "_to_copy", "detach", "alias", "contiguous", "lift_fresh", "index", "index_select",
    "gather", "cat", "stack", "repeat", "flip", "roll", "constant_pad_nd",
}  # fmt: skip
_MOVES = frozenset(_VIEWS | _COPIES)
_BY_IDS = frozenset({"index", "index_select", "embedding", "gather"})
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "_grouped_mm", "grouped_mm_fallback"})


class Tracker(DispatchMode):  # type: ignore[no-untyped-call]
    """The operations of a run, as they come.

    Attributes:
        uses: Where parameters meet data.
        unknown: Parameters used in an operation that is not understood -> that operation.
    """

    def __init__(
        self, leaves: Mapping[str, Tensor], inputs: Iterable[tuple[Tensor, Tags | None]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: list[Use] = []
        self.unknown: dict[str, str] = {}
        self._derived: dict[int, Derived] = {}
        self._data: dict[int, Tags | None] = {}
        self._alive: list[Tensor] = []  # an id is one as long as its tensor is there
        self._waiting: list[Use] = []
        self._made: list[Derived] = []
        for name, leaf in leaves.items():
            places = torch.arange(leaf.numel(), device=leaf.device).view(leaf.shape)
            self._remember(leaf, Derived(leaf, frozenset({name}), places))
        self._knows_tokens = False
        self._paused = 0
        for tensor, tags in inputs:
            self._knows_tokens |= tags is not None
            self._data[id(tensor)] = tags
            self._alive.append(tensor)

    def _remember(self, tensor: Tensor, derived: Derived) -> None:
        self._derived[id(tensor)] = derived
        self._alive.append(tensor)
        if derived.places is None:
            self._made.append(derived)

    def derived(self, tensor: Tensor) -> Derived | None:
        """What is known of a tensor that was computed from parameters alone."""
        return self._derived.get(id(tensor))

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

    # -- one operation -----------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        self.settle()
        operands = _tensors(arguments, keywords)
        parameters = [each for each in operands if id(each) in self._derived]
        if self._paused:
            return self._as_data(function, arguments, keywords)
        data = [each for each in operands if id(each) in self._data]
        kept = arguments
        if parameters and data and function._schema.is_mutable:
            kept = (arguments[0].clone(), *arguments[1:])
        result = function(*arguments, **keywords)
        if parameters and not data:
            self._only_parameters(function, arguments, keywords, parameters, result)
        elif data:
            self._with_data(function, kept, arguments, keywords, result)
        return result

    def _as_data(self, function: Any, arguments: Any, keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        operands = [
            (position, self._data.get(id(each)), each)
            for position, each in enumerate(arguments)
            if isinstance(each, Tensor) and id(each) in self._data
        ]
        is_table = name_of(function) == "embedding"
        for number, each in enumerate(_tensors((result,), {})):
            if is_table and operands:
                found = operands[0][1]
                tags = (
                    None
                    if found is None
                    else Tags(found.grid, found.numbers[..., None].expand(each.shape), found.stack)
                )
            else:
                tags = self._propagated(function, arguments, keywords, operands, each, number)
            self._set_data(each, tags)
        return result

    def _only_parameters(
        self, function: Any, arguments: Any, keywords: Any, parameters: list[Tensor], result: Any
    ) -> None:
        sources = [self._derived[id(each)] for each in parameters]
        tagged = next((each for each in sources if each.tags is not None), None)
        name = name_of(function)
        moved = self._moved(function, arguments, keywords, sources)
        if moved is None and tagged is not None:  # chosen by tokens, and now computed with
            self._use_directly(tagged)
            for each in _tensors((result,), {}):
                self._set_data(
                    each, self._inherited(function, [(0, tagged.tags, tagged.tensor)], each)
                )
            return
        leaves = frozenset().union(*(each.leaves for each in sources))
        tags = None
        if tagged is not None and tagged.tags is not None and name in _MOVES:
            numbers = _moved_like(
                function, arguments, keywords, {id(tagged.tensor): tagged.tags.numbers}
            )
            tags = [Tags(tagged.tags.grid, each, tagged.tags.stack) for each in numbers]
        for number, each in enumerate(_tensors((result,), {})):
            places = moved[number] if moved is not None else None
            self._remember(each, Derived(each, leaves, places, tags[number] if tags else None))

    def _moved(
        self, function: Any, arguments: Any, keywords: Any, sources: list[Derived]
    ) -> list[Tensor] | None:
        """Where the entries of the result stand in the parameter, if they were only moved."""
        if name_of(function) not in _MOVES | _BY_IDS or len({each.leaves for each in sources}) > 1:
            return None
        if len(sources[0].leaves) > 1 or any(each.places is None for each in sources):
            return None
        places = {id(each.tensor): each.places for each in sources if each.places is not None}
        return _moved_like(function, arguments, keywords, places)

    def _with_data(
        self, function: Any, kept: Any, arguments: Any, keywords: Any, result: Any
    ) -> None:
        name = name_of(function)
        results = _tensors((result,), {})
        operands = [
            (position, self._data.get(id(each)), each)
            for position, each in enumerate(arguments)
            if isinstance(each, Tensor) and id(each) in self._data
        ]
        derived = [
            (position, self._derived[id(each)])
            for position, each in enumerate(arguments)
            if isinstance(each, Tensor) and id(each) in self._derived
        ]
        if (
            name in _BY_IDS
            and derived
            and not any(position == derived[0][0] for position, _, _ in operands)
            and self._chosen_by_ids(function, arguments, keywords, derived, operands, results)
        ):
            return
        inner = [
            self._derived[id(each)]
            for each in _tensors(arguments, keywords)
            if id(each) in self._derived
        ]
        tags = [
            self._propagated(function, arguments, keywords, operands, each, k)
            for k, each in enumerate(results)
        ]
        if name in ("sort", "topk"):
            tags = [_sorted_tags(function, operands, results, arguments, keywords)] * len(results)
        if len(derived) < len(inner):  # inside a list: cat, stack
            tags = [self._beside(arguments, results[0]) if name == "cat" else None]
        for each, tag in zip(results, tags, strict=True):
            self._set_data(each, tag)
            self._derived.pop(id(each), None)  # written in place: data now
        for position, source in derived:
            if source.tags is not None and source.tensor.shape == results[0].shape:
                self._use_directly(source)
                continue
            use = Use(
                function,
                kept,
                keywords,
                position,
                source,
                results[0],
                tags[0] or self._guessed(results[0], source.tensor),
                {where: tag for where, tag, _ in operands},
            )
            self._add(use)
        if len(derived) < len(inner):
            self._use_in_list(function, arguments, tags[0], inner)

    def _guessed(self, result: Tensor, parameter: Tensor) -> Tags | None:
        """Tokens read off a shape, where no input of the layer said which they are (an image)."""
        return None if self._knows_tokens else _fresh_for(result, parameter)

    def _add(self, use: Use) -> None:
        self.uses.append(use)
        self._waiting.append(use)

    def _use_directly(self, source: Derived) -> None:
        """The gradient of a derived tensor itself is wanted: its entries know their tokens."""
        if any(use.is_direct and use.output is source.tensor for use in self.uses):
            return
        use = Use(None, (), {}, 0, source, source.tensor, source.tags, is_direct=True)
        self._add(use)

    def _use_in_list(
        self, function: Any, arguments: Any, tags: Tags | None, inner: list[Derived]
    ) -> None:
        """A parameter put beside data (a class token): its tokens are its places in the result."""
        name = name_of(function)
        axis = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], int) else 0
        if name != "cat" or tags is None:
            for source in inner:
                self.unknown.update(dict.fromkeys(source.leaves, name))
            return
        start = 0
        for each in arguments[0]:
            length = each.shape[axis]
            found = self._derived.get(id(each))
            if found is not None:
                numbers = tags.numbers.narrow(axis, start, length)
                found.tags = Tags(tags.grid, numbers, tags.stack)
                self._use_directly(found)
            start += length

    def _beside(self, arguments: Any, result: Tensor) -> Tags | None:
        """The tokens of data with a parameter put beside it: those of the data, or new ones."""
        axis = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], int) else 0
        for each in arguments[0]:
            tags = self._data.get(id(each))
            if tags is not None:
                first = tags.numbers.narrow(axis, 0, 1)
                if bool((tags.numbers == first).all()):
                    return Tags(tags.grid, first.expand(result.shape), tags.stack)
        return fresh_tags(result) if result.ndim <= 3 else None

    def _chosen_by_ids(
        self, function: Any, arguments: Any, keywords: Any,
        derived: list[tuple[int, Derived]], operands: Any, results: list[Tensor],
    ) -> bool:  # fmt: skip
        """A table of which tokens choose rows: derived still, with the tokens of its rows."""
        source = derived[0][1]
        moved = self._moved(function, arguments, keywords, [source])
        if moved is None:
            return False
        tags: Tags | None = None
        for each in _tensors(arguments, keywords):
            found = self._data.get(id(each))
            if found is not None:
                extra = results[0].ndim - found.numbers.ndim
                numbers = found.numbers[(..., *[None] * extra)].expand(results[0].shape)
                tags = Tags(found.grid, numbers, found.stack)
        self._remember(results[0], Derived(results[0], source.leaves, moved[0], tags))
        return True

    # -- tokens ------------------------------------------------------------------------------

    def _set_data(self, tensor: Tensor, tags: Tags | None) -> None:
        if id(tensor) not in self._data or tags is not None:
            self._data[id(tensor)] = tags
            self._alive.append(tensor)

    def _propagated(
        self, function: Any, arguments: Any, keywords: Any, operands: Any, result: Tensor, k: int
    ) -> Tags | None:
        name = name_of(function)
        if name in _MOVES:
            numbers = {
                id(each): self._data[id(each)]
                for each in _tensors(arguments, keywords)
                if self._data.get(id(each)) is not None
            }
            if not numbers:
                return None
            first = next(iter(numbers.values()))
            assert first is not None
            tensors = {key: tag.numbers for key, tag in numbers.items() if tag is not None}
            moved = _moved_like(function, arguments, keywords, tensors)
            return Tags(first.grid, moved[k], first.stack)
        return self._inherited(function, operands, result)

    def _inherited(self, function: Any, operands: Any, result: Tensor) -> Tags | None:
        """The tokens of a result that was computed, from those of the operands."""
        name = name_of(function)
        tagged = [(position, tags, each) for position, tags, each in operands if tags is not None]
        if not tagged:
            return None
        first = tagged[0][1]
        if name in PRODUCTS:
            factors = [each for each in operands if each[2].is_floating_point()]
            if len(factors) > len(tagged):  # with data of unknown tokens nothing is known of it
                return None
            return _rows_tags(name, tagged, result)
        if name == "convolution":
            return _convolved(first, result)
        for _, tags, each in tagged:
            if each.shape == result.shape:
                found: Tags = tags
                return found
        numbers = _broadcast(first.numbers, result.shape)
        return None if numbers is None else Tags(first.grid, numbers, first.stack)


def _rows_tags(name: str, tagged: Any, result: Tensor) -> Tags | None:
    """The result of a product belongs to the tokens of its rows, else of its columns.

    A product along the tokens (a mixer) has its results at the positions of the same samples.
    """
    rows = {"addmm": 1, "baddbmm": 1}.get(name, 0)
    if not _same_samples([tags for position, tags, _ in tagged if position >= rows], name):
        return None
    columns_too = name not in ("mv", "_grouped_mm", "grouped_mm_fallback")
    for position, tags, _ in tagged:
        if position == rows:
            numbers = _outer_numbers(tags, -1, result.shape[-1] if columns_too else 0)
            if numbers is None:
                continue
            whole = numbers[..., 0] if name == "mv" else numbers.expand(result.shape)
            return Tags(tags.grid, whole, tags.stack)
    for position, tags, _ in tagged:
        if position == rows + 1 and columns_too:
            numbers = _outer_numbers(tags, -2, result.shape[-2])
            if numbers is not None:
                return Tags(tags.grid, numbers.expand(result.shape), tags.stack)
    return None


def _same_samples(operands: list[Tags], name: str) -> bool:
    """Whether a product of data with data stays within samples, as attention does."""
    if len(operands) != 2 or name == "mv":
        return True
    one, other = operands
    if other.numbers.ndim < 2:  # where groups end: of a single token even that has a token
        return True
    rows, columns = one.numbers[..., :1], other.numbers[..., :1, :]
    nobody = (rows < 0) | (columns < 0)
    lengths = max(1, one.grid[1]), max(1, other.grid[1])
    # Samples are the first axis of the tokens, or the second in layers of (s, b, h).
    return any(
        bool(((first == second) | nobody).all())
        for first in (rows // lengths[0], rows % lengths[0])
        for second in (columns // lengths[1], columns % lengths[1])
    )


def _outer_numbers(tags: Tags, axis: int, length: int) -> Tensor | None:
    """The tokens that are left when one axis is summed over; `length` is what takes its place."""
    numbers, s = tags.numbers, tags.grid[1]
    first = numbers.narrow(axis, 0, 1)
    if bool((numbers == first).all()):
        return first
    sample = numbers // s
    if length != s or not bool((sample == sample.narrow(axis, 0, 1)).all()):
        return None
    position = torch.arange(s, device=numbers.device)
    return sample.narrow(axis, 0, 1) * s + (position if axis == -1 else position[:, None])


def _sorted_tags(
    function: Any, operands: Any, results: list[Tensor], arguments: Any, keywords: Any
) -> Tags | None:
    """Entries that were put in another order take their tokens along."""
    tags = operands[0][1] if operands else None
    if tags is None:
        return None
    names = [each.name for each in function._schema.arguments]
    axis = {**dict(zip(names, arguments, strict=False)), **keywords}.get("dim", -1)
    return Tags(tags.grid, tags.numbers.gather(axis, results[1]), tags.stack)


def _convolved(tags: Tags, result: Tensor) -> Tags | None:
    """A convolution along the tokens, causal or not: position l of the result is token l.

    What is computed beyond the sequence belongs to its last token, until it is cut off.
    """
    length = tags.numbers.shape[-1]
    if result.ndim == 3 and (result.shape[0], result.shape[2]) == tags.grid:
        numbers = torch.arange(math.prod(tags.grid), device=result.device)
        return Tags(tags.grid, numbers.view(-1, 1, tags.grid[1]).expand(result.shape), tags.stack)
    if result.ndim != 3 or tags.numbers.ndim != 3 or result.shape[-1] < length:
        return None
    position = torch.arange(result.shape[-1], device=result.device).clamp(max=length - 1)
    return Tags(tags.grid, tags.numbers[:, :1, position].expand(result.shape), tags.stack)


def _broadcast(numbers: Tensor, shape: torch.Size) -> Tensor | None:
    """Numbers for a result of another shape: broadcast, or with axes reduced to one entry."""
    if numbers.ndim > len(shape):
        return None
    lead = shape[: len(shape) - numbers.ndim]
    if lead and numbers.ndim >= 2 and tuple(shape[: numbers.ndim]) == tuple(numbers.shape):
        return numbers[(..., *[None] * len(lead))].expand(shape)
    for axis in range(numbers.ndim):
        if numbers.shape[axis] not in (1, shape[len(lead) + axis]):
            first = numbers.narrow(axis, 0, 1)
            if not bool((numbers == first).all()):  # tokens were added up: it is nobody's now
                return None
            numbers = first
    return numbers.expand(shape)


def fresh_tags(tensor: Tensor) -> Tags | None:
    """New tokens: the first two axes of a tensor with its features last."""
    if tensor.ndim < 2:
        return None
    b, s = (tensor.shape[0], tensor.shape[1]) if tensor.ndim > 2 else (tensor.shape[0], 1)
    numbers = torch.arange(b * s, device=tensor.device).view(b, *[s] * (tensor.ndim > 2), 1)
    numbers = numbers[(..., *[None] * (tensor.ndim - numbers.ndim))]
    return Tags((b, s), numbers.expand(tensor.shape))


def _fresh_for(result: Tensor, parameter: Tensor) -> Tags | None:
    """New tokens for data of unknown ones: positions around a channel axis, or the first axes."""
    lengths = [1] * (result.ndim - parameter.ndim) + list(parameter.shape)
    second = result.ndim >= 3 and len(lengths) >= 2 and lengths[1] == result.shape[1]
    if second and all(each == 1 for axis, each in enumerate(lengths) if axis != 1):
        b, positions = result.shape[0], result.shape[2:]
        count = positions.numel()
        numbers = torch.arange(b * count, device=result.device).view(b, 1, *positions)
        return Tags((b, count), numbers.expand(result.shape))
    return fresh_tags(result)


def _moved_like(
    function: Any, arguments: Any, keywords: Any, instead: Mapping[int, Tensor]
) -> list[Tensor]:
    """An operation that only moves entries, done on other tensors of the same shapes."""

    def replaced(value: Any) -> Any:
        return map_tensors(value, partial(_replaced, instead))

    if name_of(function) == "embedding":
        table, ids = replaced(arguments[0]), arguments[1]
        return [table[ids]]
    if name_of(function) in ("_to_copy", "clone", "contiguous", "detach", "alias", "lift_fresh"):
        return [replaced(arguments[0])]
    if name_of(function) in ("view", "_unsafe_view", "_reshape_alias", "view_copy"):
        return [replaced(arguments[0]).reshape(arguments[1])]  # expanded numbers have no view
    if name_of(function) == "constant_pad_nd":  # what is added is nobody's
        return [function(replaced(arguments[0]), arguments[1], -1)]
    if name_of(function) in _BY_IDS:  # the first operand moves, the others say where
        arguments = (replaced(arguments[0]), *arguments[1:])
    else:
        arguments = tuple(map(replaced, arguments))
    return _tensors((function(*arguments, **keywords),), {})


def _replaced(instead: Mapping[int, Tensor], tensor: Tensor) -> Tensor:
    """The tensor that stands for this one, by its id; -1 where another one has floats."""
    found = instead.get(id(tensor))
    if found is None and tensor.is_floating_point():
        return tensor.new_full(tensor.shape, -1, dtype=torch.int64)
    return tensor if found is None else found


def name_of(function: Any) -> str:
    return str(function._schema.name).rpartition("::")[2].removesuffix("_") or str(function)


def _tensors(arguments: Any, keywords: Any) -> list[Tensor]:
    """The tensors among operands, lists of tensors opened."""
    found: list[Tensor] = []
    for each in (*arguments, *keywords.values()):
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += [one for one in each if isinstance(one, Tensor)]
    return found
