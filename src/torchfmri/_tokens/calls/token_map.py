"""Which tokens the rows of every call belong to, found by following one pass of the model.

The first pass for arguments of some shapes is followed operation by operation (`rules/trace.py`).
What it finds is kept with the plan: later passes of the same shapes look it up. Where rows are
chosen by the data itself (a router), every pass is followed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._tokens.calls.python_state import random_state
from torchfmri._tokens.rules import layer_rules as rules
from torchfmri._tokens.rules.arguments import (
    given_origins,
    is_mask,
    main_element,
    with_layout,
)
from torchfmri._tokens.rules.numbers import NOBODY, SEVERAL, compact, is_constant_along
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.owner_tokens import OwnerTokens, says_nothing
from torchfmri._tokens.rules.record import TokenRecord
from torchfmri._tokens.rules.rerun import OwnerCall
from torchfmri._tokens.rules.sources import Sources, TokenSource
from torchfmri._tokens.rules.step_uses import REASON, StepUse
from torchfmri._tokens.rules.trace import TokenTrace
from torchfmri._torch import Aside, Element, flatten, flatten_arguments

_ASSUMED = (
    "the layers do not say which axis of an argument the positions are: they are taken to be the "
    "second, (b, s, d). If they are the last, say channels='first'"
)
MOST = 16  # maps of one plan, for arguments of different shapes


class TokenRows(NamedTuple):
    """The tokens of the rows of one call.

    Attributes:
        numbers: The token of each row, from 0; -1 for rows that belong to another source.
        grid: (b, s).
        stack: "encoder" or "decoder" where the model has both.
        of: What the tokens belong to, where they are not those that the model was handed.
    """

    numbers: Tensor
    grid: tuple[int, int]
    stack: str
    of: str


class CallTokens(NamedTuple):
    """What following a call has found.

    Attributes:
        of: What its tokens belong to, if they are in the usual order; `stack`, whose they are.
        rows: The tokens of its rows, where they are in another order; one entry for each source.
        is_second: The features are the second axis, where the layer has no say in that.
        is_step: The call read the state of a recurrence, and its rows belong to the step that
            takes them in.
        spread: The same as `rows` where the output is spread over the batch.
        refused: Why they cannot be told.
    """

    of: str = ""
    stack: str = ""
    rows: tuple[TokenRows, ...] = ()
    spread: tuple[TokenRows, ...] = ()
    is_second: bool = False
    is_step: bool = False
    refused: str = ""


USUAL = CallTokens()


class TokenMap:
    """The tokens of all calls of one pass.

    Attributes:
        calls: By layer, those of its calls in order.
        owners: By layer, what is known of the calls of layers that are run again.
        outer: What is known of the call that the pass was.
        constants: Layers that read constants alone.
        given: The tokens of the arguments.
        counts: How often each layer was called.
        is_usual: Every call has its tokens in the usual order.
        is_dynamic: Another pass has other tokens.
        way: The way that the pass took through the model.
        state: The attributes of modules with which it is taken; None until two passes in a row
            have taken the same way.
        is_open: It may differ in any pass, for it depends on data or random numbers.
        reads_masks: The model reads values out of tensors, those of masks at least.
        masks: What its masks were like: see `kinds_of_masks`.
        note: A reservation about the tokens.
    """

    def __init__(self) -> None:
        self.calls: dict[str, list[CallTokens]] = defaultdict(list)
        self.owners: dict[str, list[OwnerTokens]] = defaultdict(list)
        self.constants: frozenset[str] = frozenset()
        self.given: Sequence[TokenSource] = ()
        self.outer = OwnerTokens()
        self.counts: dict[str, int] = {}
        self.is_usual = True
        self.is_dynamic = False
        self.way = 0
        self.state: list[object] | None = None
        self.is_open = False
        self.reads_masks = False
        self.masks: tuple[tuple[bool, bool], ...] = ()
        self.note = ""


class Tracing:
    """Follows a pass, and remembers what the calls of layers returned.

    An argument of floats can be read in two ways, with its features last or second. Layers tell,
    but parameters may be used on it before they do: it is followed both ways until one is left.

    Args:
        parameters: Of the model.
        arguments: Of the pass.
        keywords: Of the pass.
        channels: Where the features of arguments are, "last" or "first" of a sample; None to find
            out.
        of_layers: The names of parameters that belong to Linear layers.
        is_second: This one is followed beside another, and reads the first argument alone so.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
        channels: str | None = None,
        of_layers: frozenset[str] = frozenset(),
        is_second: bool = False,
    ) -> None:
        self.trace, self._channels, self._is_second = TokenTrace(), channels, is_second
        self.trace.of_layers = of_layers
        parameters = list(parameters)
        for name, parameter in parameters:
            self.trace.set_leaves(parameter, frozenset({name}))
            self.trace.set_sum(parameter, frozenset({name}))
        given = given_origins(self.trace.sources, arguments, keywords)
        for number, (tensor, origins) in enumerate(given):
            decided = None if is_second and number else channels
            self.trace.set(tensor, with_layout(origins, decided))
        self._masks = kinds_of_masks(arguments, keywords)
        masks = [each.tensor for each in flatten_arguments(arguments, keywords) if is_mask(each)]
        for mask, (_, is_full) in zip(masks, self._masks, strict=True):
            if given and mask is not given[0][0]:  # a mask alone stands for the tokens
                self.trace.set_mask(mask, is_full)
        self._second: Tracing | None = None
        if channels is None and given and given[0][1].is_raw:
            self._second = Tracing(
                parameters, arguments, keywords, "first", of_layers, is_second=True
            )
            self.trace.beside = self._second.trace
            self._share_layouts()
        self._outputs: list[tuple[TokenRecord, Origins, StepUse | None, tuple[int, ...]]] = []
        self._owners: list[tuple[str, OwnerTokens]] = []
        self._calls: list[OwnerCall] = []
        self._begun: dict[str, tuple[int, dict[str, int]]] = {}
        self._outer = OwnerTokens()
        self._constants: set[str] = set()
        self._grids: Counter[str] = Counter()  # made by each layer
        self._named = self._given = len(self.trace.sources.all)
        self._random = random_state()

    def begin_stack(
        self, stack: str, arguments: tuple[object, ...], keywords: Mapping[str, object]
    ) -> None:
        """The encoder or the decoder is handed its tokens."""
        trace = self.trace
        elements = flatten_arguments(arguments, keywords)
        main = main_element([each for each in elements if not each.path.startswith("encoder")])
        if main is None:
            return
        with Aside():
            known = trace.origins(main.tensor)
            if known is not None and _is_given(trace.sources, known.first):
                for source in trace.sources.present(known.first):
                    source.stack = stack
                return
            for tensor, origins in given_origins(trace.sources, (main.tensor,), {}, stack):
                decided = None if self._is_second else self._channels
                trace.set(tensor, with_layout(origins, decided))
        with Aside():
            if self.second is not None:
                self.second.begin_stack(stack, arguments, keywords)
                self._share_layouts()

    @property
    def second(self) -> Tracing | None:
        """The trace that reads the input as (b, d, s); None once a layer has ruled that out."""
        return None if self.trace.beside is None else self._second

    def _share_layouts(self) -> None:
        """What is found out about an argument is found out for both ways to read it."""
        assert self._second is not None
        both = (self.trace.sources.all, self._second.trace.sources.all)
        ours, theirs = ([each for each in some if each.layout is not None] for some in both)
        for one, other in zip(ours, theirs, strict=False):
            other.layout = one.layout
        self.trace.sources.layouts[0].is_followed = True

    def call(self, record: TokenRecord, output: Tensor) -> bool:
        """A layer with a rule has returned this; whether it was computed from constants alone."""
        with Aside():
            origins = self.trace.output_of_call(output)
            is_constant = bool((compact(origins.first) == NOBODY).all())
            use = origins.use_of(record.watched.parameters.values())
            if self.second is not None:
                self.second.call(record, output)
        self._name_sources(record.watched.layer)
        self._outputs.append((record, origins, use, tuple(output.shape)))
        if is_constant:
            self._constants.add(record.watched.layer)
        return is_constant

    def owner_begins(self, layer: str) -> None:
        """A layer that is run again is called."""
        counts = {leaf: len(uses) for leaf, uses in self.trace.recurrences.uses.items()}
        self._begun[layer] = len(self.trace.sources.all), counts
        if self.second is not None:
            self.second.owner_begins(layer)

    def owner(
        self, layer: str, arguments: Sequence[Element], is_outer: bool = False
    ) -> OwnerTokens:
        """A layer that is run again was called with these; its call may be the whole pass."""
        self._name_sources(layer or "the model")
        start, counts = self._begun.get(layer, (self._named, {}))
        start, counts = (self._given, {}) if is_outer else (start, counts)
        made = self.trace.sources.all[start:]
        uses = self.trace.recurrences.uses.items()
        steps = {leaf: several[counts.get(leaf, 0) :] for leaf, several in uses}
        with Aside():
            origins = [self.trace.origins(each.tensor) for each in arguments]
            if self.second is not None:
                self.second.owner(layer, arguments, is_outer)
        sums = [self.trace.sum_of(each.tensor) for each in arguments]
        found = OwnerTokens(origins, self.trace.sources.copy(), made, sums, steps)
        if is_outer:
            self._outer = found
        else:
            self._owners.append((layer, found))
        return found

    def owner_called(self, call: OwnerCall, arguments: Sequence[Element], output: object) -> None:
        """Tell a call that is run again later which tokens its arguments have."""
        call.tokens = self.owner(call.layer, arguments)
        self._calls.append(call)
        outputs = flatten(output)
        for each in (self, self.second) if len(outputs) == 1 else ():
            if each is not None:
                each._note_landing(call.names, arguments, outputs[0].tensor)

    def _note_landing(
        self, names: Sequence[str], arguments: Sequence[Element], output: Tensor
    ) -> None:
        """Wait for what the last call made of constants to be added to data: see `_settled`."""
        layer, handed = self._owners[-1]
        shapes = [each.tensor.shape for each in arguments]
        is_data = any(each is not None and not says_nothing(each) for each in handed.origins)
        if is_data or any(each[:-1] != output.shape[:-1] for each in shapes):
            return
        with Aside():
            returned = self.trace.output_of_call(output)
        self._owners[-1] = layer, handed._replace(returned=returned, names=names, shapes=shapes)

    def recurrent_called(self, output: object) -> None:
        """Take the rows that a recurrent layer returned for data: its steps need no proof."""
        tensors = [each.tensor for each in flatten(output)]
        self.trace.take_as_data(tensors)
        if self.second is not None:
            self.second.trace.take_as_data(tensors)

    def _name_sources(self, layer: str) -> None:
        """New grids of positions are called after the layer that made them."""
        new = self.trace.sources.all[self._named :]
        new = [each for each in new if not each.name and not each.is_given]
        for source in new:
            self._grids[layer] += 1
            number = self._grids[layer]
            source.name = layer if number == 1 else f"{layer} ({number})"
        self._named = len(self.trace.sources.all)

    def chosen(self) -> Tracing:
        """This one, or that with features second if layers say so and none says otherwise."""
        second = self.second
        return self if second is None or not self.trace.sources.layouts[0].is_second else second

    def finish(self, counts: Mapping[str, int]) -> TokenMap:
        """What was found; the records get their tokens."""
        chosen = self.chosen()
        found = chosen._finish(counts)
        for call, (_, tokens) in zip(self._calls, chosen._owners, strict=True):
            call.tokens = tokens
        found.way, found.masks = self.trace.way, self._masks
        found.reads_masks = self.trace.reads_masks or self.trace.reads_values
        found.is_open = self.trace.reads_values or random_state() != self._random
        if any(each.is_assumed for each in self.trace.sources.layouts):
            found.note = _ASSUMED
        return found

    def _finish(self, counts: Mapping[str, int]) -> TokenMap:
        found = TokenMap()
        found.counts, found.constants = dict(counts), frozenset(self._constants)
        found.outer = self._outer
        found.is_dynamic = self.trace.has_data_shapes or self.trace.has_data_steps
        found.given = [each for each in self.trace.sources.all[: self._given] if each.is_given]
        lookups = self._rows_of_constants()
        self.trace.recurrences.place()
        steps = {record.watched.layer for record, _, use, _ in self._outputs if use is not None}
        steps &= self._constants
        for record, origins, use, shape in self._outputs:
            names = record.watched.parameters.values()
            use = use or origins.use_of(names)  # it has landed since
            placed = self._placed(origins, names, use)
            tokens = tokens_of(self.trace, record, placed, shape)
            tokens = tokens._replace(is_step=use is not None and use.is_moved)
            if record.watched.layer in steps and use is None and self._is_no_position(placed):
                tokens = CallTokens(refused=_different(REASON))
            if id(origins) in lookups:
                tokens = tokens._replace(rows=(lookups[id(origins)],))
            landed = origins.landed
            if landed is not None:
                spread = tokens_of(self.trace, record, landed, tuple(landed.first.shape))
                tokens = tokens._replace(spread=spread.rows)
            assign(record, tokens)
            found.calls[record.watched.layer].append(tokens)
            found.is_usual &= tokens == USUAL
            found.is_dynamic |= origins.is_dynamic
        self._owners = [(layer, self._settled(handed)) for layer, handed in self._owners]
        for layer, handed in self._owners:
            found.owners[layer].append(handed)
            known = [each for each in handed.origins if each is not None]
            found.is_dynamic |= any(each.is_dynamic for each in known)
        return found

    def _settled(self, handed: OwnerTokens) -> OwnerTokens:
        """What a layer was handed; sequences of recurrences have no tokens that are not proved.

        Constants of which it made the first state of a recurrence have the tokens of that.
        """
        settled, is_step = self.trace.recurrences.settled, self.trace.steps.is_step
        if handed.returned is not None and not says_nothing(handed.returned):
            returned = self._placed(handed.returned, handed.names)
            return handed._replace(
                origins=[
                    returned.moved(lambda numbers, to=each: numbers[..., :1].expand(to))
                    for each in handed.shapes
                ],
                steps={},
            )
        several = [e if e is None or is_step(e) else settled(e) for e in handed.origins]
        return handed._replace(origins=several)

    def _placed(
        self, origins: Origins, names: Iterable[str], use: StepUse | None = None
    ) -> Origins:
        """The origins of what a call returned, at the step to which its use belongs."""
        use = use or origins.use_of(names)
        if use is not None and use.is_moved:
            return origins.placed(use)
        return self.trace.recurrences.settled(origins)

    def _is_no_position(self, origins: Origins) -> bool:
        """Whether rows are at no position, in a recurrence that has one for each other use."""
        small = compact(origins.first)
        return bool(((small == NOBODY) | self.trace.sources.is_sample(small)).all())

    def _rows_of_constants(self) -> dict[int, TokenRows]:
        """The rows of layers that are called several times with constants: each is a token."""
        several: dict[str, list[tuple[TokenRecord, Origins, int]]] = defaultdict(list)
        for record, origins, _, shape in self._outputs:
            if shape and bool((compact(origins.first) == NOBODY).all()):
                count = math.prod(shape[: len(shape) - record.features])
                several[record.watched.layer].append((record, origins, count))
        found: dict[int, TokenRows] = {}
        for layer, calls in several.items():
            total, start = sum(count for _, _, count in calls), 0
            for record, origins, count in calls if len(calls) > 1 else ():
                numbers = torch.arange(start, start + count, device=origins.first.device)
                found[id(origins)] = TokenRows(numbers, (total, 1), record.stack, layer)
                start += count
        return found


def tokens_of(
    trace: TokenTrace, record: TokenRecord, origins: Origins, shape: tuple[int, ...]
) -> CallTokens:
    """The tokens of the rows of a call, from the origins of what it returned."""
    rule, sources = record.watched.rule, trace.sources
    if bool((compact(origins.first) == NOBODY).all()):
        # It read constants: its rows are tokens of their own, unless its output is added to data.
        return CallTokens(record.watched.layer, record.stack)
    second = rule in rules.CHANNELS_SECOND
    if rule is rules.prelu and len(shape) > 2:
        by_channel = trace.layouts.by_channel(origins).first
        second = record.is_second = is_constant_along(by_channel, 1) and (
            origins.is_raw or not is_constant_along(by_channel, -1)
        )
    features = record.features
    axes = [1] if second else list(range(len(shape) - features, len(shape)))
    if second and len(shape) < 2:
        return USUAL
    layouts = trace.layouts
    origins = layouts.by_channel(origins) if second else layouts.settled(origins, axes, True)
    if origins.second is not None and not origins.is_decided and not origins.is_raw:
        return CallTokens(refused=_different(origins.reason))
    numbers = trace.sums.reduced(origins, axes, "", are_features=True).first
    numbers = numbers.squeeze(1) if second else numbers.flatten(len(shape) - features)[..., 0]
    small = compact(numbers)
    if bool((small == SEVERAL).any()):
        return CallTokens(refused=_different(origins.reason))
    if bool((small < NOBODY).any()):
        return CallTokens(refused=f"its rows cannot be followed through {origins.reason}")
    found = sources.present(small)
    if len(found) == 1 and not bool((small == NOBODY).any()):
        source = found[0]
        if _is_usual(record, shape, numbers - source.start, source.grid):
            second = record.is_second
            return CallTokens(name_of(source), source.true.stack, is_second=second)
    flat = numbers.reshape(-1)
    rows = [
        TokenRows(sources.local(each, flat), each.grid, each.true.stack, name_of(each))
        for each in found
    ]
    nobody = (flat == NOBODY).nonzero()[:, 0]
    if len(nobody):
        own = torch.full_like(flat, -1)
        own[nobody] = torch.arange(len(nobody), device=flat.device)
        name = f"rows of {record.watched.layer} that come from no token"
        rows.append(TokenRows(own, (len(nobody), 1), record.stack, name))
    return CallTokens(rows=tuple(rows), is_second=record.is_second)


def _different(reason: str) -> str:
    how = f", by {reason}," if reason else ""
    return f"its rows are computed from different positions{how} and no rule says whose they are"


def name_of(source: TokenSource) -> str:
    name = source.true.name
    return "" if name == "samples" else name


def _is_given(sources: Sources, numbers: Tensor) -> bool:
    small = compact(numbers)
    return bool((small >= 0).all()) and all(each.is_given for each in sources.present(small))


def _is_usual(
    record: TokenRecord, shape: tuple[int, ...], numbers: Tensor, grid: tuple[int, int]
) -> bool:
    """Whether the rows of a call are in the order that its shape suggests."""
    usual = record.grid_of(shape)
    is_along = record.watched.rule is rules.convolution and numbers.ndim == 2
    if is_along and numbers.shape[1] > grid[1] and record.model == grid:
        # What it computes beyond the sequence belongs to the last token until it is cut off.
        numbers = numbers[:, : grid[1]]
        ordered = torch.arange(numbers.numel(), device=numbers.device)
        return bool((numbers.reshape(-1) == ordered).all())
    if usual.shape != grid:
        return False
    if record.watched.rule in rules.CHANNELS_SECOND or record.is_second:
        rows = numbers.reshape(usual.b * usual.s, -1)
    else:
        rows = usual.numbers_of(numbers)
    tokens = torch.arange(usual.b * usual.s, device=rows.device)
    return bool((rows == tokens[:, None]).all())


def signature(
    model: nn.Module, arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> tuple[object, ...]:
    """What the tokens of a pass depend on, beside the data."""
    tensors = [
        (each.path, each.tensor.shape, each.tensor.dtype)
        for each in flatten_arguments(arguments, keywords)
    ]
    plain = [
        (key, value if isinstance(value, _PLAIN) else repr(value))
        for key, value in (*enumerate(arguments), *keywords.items())
        if _is_plain(value, 3)
    ]
    return (model.training, torch.is_grad_enabled(), *tensors, *plain)


def parameters_of_layers(model: nn.Module) -> frozenset[str]:
    """The names of the parameters of Linear layers; nothing of them is read, or parametrized."""
    return frozenset(
        f"{layer}.{key}" if layer else key
        for layer, module in model.named_modules()
        if isinstance(module, nn.Linear)
        for key in module._parameters
    )


def kinds_of_masks(
    arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> tuple[tuple[bool, bool], ...]:
    """Whether each mask leaves nothing out, and whether it is 1 everywhere: waits for the device.

    Models that read masks mostly branch on this.
    """
    masks = [each.tensor for each in flatten_arguments(arguments, keywords) if is_mask(each)]
    return tuple(map(_kind_of_mask, masks))


def _kind_of_mask(mask: Tensor) -> tuple[bool, bool]:
    if mask.is_meta:
        return True, False
    is_whole, is_one = torch.stack([mask.all(), (mask == 1).all()]).tolist()
    return is_whole, is_one


def assign(record: TokenRecord, tokens: CallTokens) -> None:
    """Give a record its tokens."""
    record.of, record.rows, record.is_second = tokens.of, tokens.rows, tokens.is_second
    record.spread_rows = tokens.spread
    record.stack = tokens.stack or record.stack


_PLAIN = (bool, int, float, str, type(None))


def _is_plain(value: object, depth: int) -> bool:
    """Whether a value is a number, a text, or a list or dictionary of these."""
    if isinstance(value, _PLAIN):
        return True
    several = value.values() if isinstance(value, dict) else value
    is_container = isinstance(value, (list, tuple, dict)) and depth > 0
    return is_container and all(_is_plain(each, depth - 1) for each in several)  # type: ignore[attr-defined]
