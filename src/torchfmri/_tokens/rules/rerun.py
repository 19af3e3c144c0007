"""A layer that has no rule, run again by itself, so that its own graph can be read.

The user's graph is never opened: under checkpointing that would make the user's backward fail.
What the layer was called with, its random numbers and its autocast state are restored; its
parameters are replaced by copies in name only (the same memory), its buffers by real copies, and
no hook of anybody fires.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from torchfmri._capture import TokenMask
from torchfmri._tokens.algebra.factors import Term, grouped, squares, total
from torchfmri._tokens.rules.arguments import given_origins
from torchfmri._tokens.rules.numbers import NOBODY, compact, is_constant_along
from torchfmri._tokens.rules.origins import Origins
from torchfmri._tokens.rules.owner_tokens import OwnerTokens, says_nothing
from torchfmri._tokens.rules.positions import position_terms
from torchfmri._tokens.rules.record import Axis, UsePart, sums_to
from torchfmri._tokens.rules.recurrent import RECURRENT, recurrent_input, recurrent_terms
from torchfmri._tokens.rules.sources import Sources, TokenSource
from torchfmri._tokens.rules.step_uses import REASON, StepUse
from torchfmri._tokens.rules.trace import TokenTrace
from torchfmri._tokens.rules.tracker import Tags, Tracker, fresh_tags
from torchfmri._tokens.rules.uses import (
    NotUnderstoodError,
    UnclearLayoutError,
    scattered,
    tags_of,
    terms_of,
    told_numbers,
)
from torchfmri._torch import flatten, map_tensors, may_autocast, node_sequence_number
from torchfmri.exceptions import UnsupportedLayerError

_UNCLEAR = (
    "it is used entry by entry on an argument of the model, and no layer says whether the features "
    "of that are its last axis, (b, s, d), or its second, (b, d, s). Say which: "
    "token_gradients(..., channels='last') or channels='first'."
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class RunState:
    """What a call depends on beside its arguments."""

    random: Tensor
    device_random: dict[int, tuple[int, int]]  # seed and offset of each CUDA device
    autocast: dict[str, tuple[bool, torch.dtype]]  # of kinds of device; off for others

    @staticmethod
    def now(kinds: Iterable[str], cuda: Sequence[torch.device]) -> RunState:
        """The state that a call starts from, on these kinds of device."""
        generators = torch.cuda.default_generators if cuda else ()
        random = {
            each.index: (generators[each.index].initial_seed(), generators[each.index].get_offset())
            for each in cuda
        }
        autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in (kinds if may_autocast() else ())
        }
        return RunState(torch.default_generator.get_state(), random, autocast)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """These random numbers and this autocast state, while the block runs."""
        with _no_autocast() as stack:
            stack.enter_context(torch.random.fork_rng(devices=list(self.device_random)))
            torch.set_rng_state(self.random)
            for device, (seed, offset) in self.device_random.items():
                generator = torch.cuda.default_generators[device]
                generator.manual_seed(seed)
                generator.set_offset(offset)
            for kind, (enabled, dtype) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


@contextlib.contextmanager
def _no_autocast() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield stack


@dataclass(slots=True)
class OwnerParts:
    """What a re-run found, by parameter, and what it could not find."""

    parts: dict[str, list[UsePart]] = field(default_factory=lambda: defaultdict(list))
    unsupported: dict[str, Exception] = field(default_factory=dict)


class OwnerCall:
    """One call of a layer that is run again when the backward pass is over."""

    def __init__(
        self,
        layer: str,
        module: nn.Module,
        modules: Mapping[int, Mapping[str, str]],
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
        output: object,
        state: RunState | None,
        axis: Axis,
        mask: TokenMask | None,
        suspects: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        self.layer, self.module, self._modules = layer, module, modules
        self.names = _names(modules)
        self._suspects = dict(suspects or {})
        self.suspects = _names(self._suspects)
        self.axis, self._mask = axis, mask
        self.tokens = OwnerTokens()
        self.sources = self.tokens.sources
        self.gradients: dict[str, Tensor | None] = {}
        self._spread: Tensor | None = None
        self._tracker: Tracker | None = None
        self._origins: Sequence[Origins | None] | None = None
        self.take_arguments(arguments, keywords, state)
        self._versions = [each._version for each in module.parameters()]
        self._training = module.training
        self._outputs = {each.path: SeenOutput(each.tensor) for each in flatten(output)}

    @property
    def stack(self) -> str:
        """Encoder or decoder, where the model has both."""
        return self.axis.stack

    @property
    def has_no_arguments(self) -> bool:
        """Whether the arguments are still to come, from a checkpoint's replay."""
        return not self._arguments and not self._keywords

    def take_arguments(
        self, arguments: tuple[object, ...], keywords: Mapping[str, object], state: RunState | None
    ) -> None:
        """Keep what the call was given, without its graph, and the state it started from."""
        self._arguments = self._kept(arguments)
        self._keywords = self._kept(dict(keywords))
        self._state = state

    def _kept(self, value: Any) -> Any:
        """The arguments without their graph; a KV cache is left out, it is full already."""
        if isinstance(value, Tensor):
            return value.detach()
        if isinstance(value, PackedSequence):
            return value._replace(data=value.data.detach())
        if type(value) in (tuple, list):
            return type(value)(map(self._kept, value))
        if isinstance(value, dict):
            return {key: self._kept(each) for key, each in value.items()}
        return None if hasattr(value, "get_seq_length") else value

    def works_by_position(self, output: Tensor, numbers: Tensor, source: TokenSource) -> bool:
        """Whether each position of the output depends on that position of the inputs alone.

        Found out by changing the inputs of half of the positions: every two positions are on
        different sides once, because their numbers differ in some binary digit.

        Args:
            output: Of the call.
            numbers: The tokens of its entries, of this `source`.
            source: See `numbers`.
        """
        if type(self.module).forward is nn.EmbeddingBag.forward:
            return True  # bag by bag, which are not at the positions of its ids
        count = math.prod(source.grid)
        tokens = torch.arange(count, device=output.device)
        before = output.detach()
        for digit in range(max(1, (count - 1).bit_length())):
            for side in (0, 1):
                changed = (tokens >> digit & 1) == side
                again = self._with_noise(changed, source)
                same = ~changed[numbers]
                if again is None or not torch.equal(again[same], before[same]):
                    return False
        return True

    def _tokens_for(self, source: TokenSource, origins: Origins) -> Tensor:
        """The tokens of an input, as tokens of the output's source."""
        own = self.source_of(origins)
        if own is source:
            return self.sources.local(own, origins.first)
        if source.grid[1] == own.grid[1] == 1 and own.grid[0] == source.grid[0]:  # whole samples
            return self.sources.sample_of(origins.first)
        raise NotUnderstoodError("what it returns is not at the positions of its input")

    def _with_noise(self, changed: Tensor, source: TokenSource) -> Tensor | None:
        """The output for inputs that are changed at some positions."""
        elements = flatten((self._arguments, self._keywords))
        known = dict(zip([id(each.tensor) for each in elements], self._known(), strict=True))

        def change(value: Tensor) -> Tensor:
            origins = known.get(id(value))
            if origins is None or says_nothing(origins) or value.dtype == torch.bool:
                return value
            local = self._tokens_for(source, origins)
            other = value.flatten().roll(1).view(value.shape)  # ids have to stay ids
            if value.is_floating_point() or value.is_complex():
                other = other + 1
            return torch.where(changed[local.clamp(0)] & (local >= 0), other, value)

        arguments, keywords = (
            map_tensors(each, change) for each in (self._arguments, self._keywords)
        )
        buffers = {key: each.clone() for key, each in self.module.named_buffers()}
        with torch.no_grad(), self._restored():
            made = flatten(functional_call(self.module, buffers, arguments, keywords))
        return made[0].tensor if made else None

    def source_of(self, origins: Origins) -> TokenSource:
        """The one source of a tensor's tokens."""
        found = self.sources.present(origins.first)
        if len(found) != 1:
            raise NotUnderstoodError("its inputs have no tokens, or tokens of several kinds")
        return found[0]

    def tokens_of(self, output: Tensor) -> tuple[TokenSource, Tensor]:
        """The tokens of the entries of an output: as they were followed, or those of an input."""
        origins = None if self._tracker is None else self._tracker.origins(output)
        if origins is not None and bool((compact(origins.first) >= 0).all()):
            source = self.source_of(origins)
            return source, self.sources.local(source, origins.first)
        for each, origins in zip(
            flatten((self._arguments, self._keywords)), self._known(), strict=True
        ):
            shape = each.tensor.shape
            if origins is None or not output.ndim or shape[:-1] != output.shape[:-1]:
                continue
            if each.tensor.is_floating_point() and is_constant_along(origins.first, -1):
                source = self.source_of(origins)
                local = self.sources.local(source, origins.first.narrow(-1, 0, 1))
                if bool((local >= 0).all()):
                    return source, local.expand(output.shape)
        raise NotUnderstoodError("what it returns is not at the positions of its input")

    def spread(self, gradient: Tensor) -> None:
        """Take the gradient of the addition that spread the output over the batch."""
        self._spread = gradient.detach()

    # -- the re-run --------------------------------------------------------------------------

    def handed(self, names: Collection[str]) -> dict[int, list[str]]:
        """Which of these parameters the arguments are sums of, by the number of the argument."""
        found = {k: [each for each in names if each in of] for k, of in enumerate(self.tokens.sums)}
        return {number: several for number, several in found.items() if several}

    def parts(
        self,
        wanted: Mapping[str, nn.Parameter],
        beside_calls: bool = False,
        handed: Mapping[int, Sequence[str]] | None = None,
        given_away: Collection[str] = (),
    ) -> OwnerParts:
        """The parts of these parameters, found by running the layer again.

        Args:
            wanted: The parameters.
            handed: Parameters of other layers whose sum an argument is, by its number.
            given_away: Parameters that other layers are handed: what the layer returns of these is
                accounted for there.
            beside_calls: Look for uses of weights of modules that are also called, beside those
                calls, which are counted already.

        Raises:
            UnsupportedLayerError: The layer cannot be run again as it was.
        """
        if [each._version for each in self.module.parameters()] != self._versions:
            raise self._refused(wanted, "its weights were changed before the backward pass ended")
        found = OwnerParts()
        self._origins = None
        leaves = {name: each.detach().requires_grad_() for name, each in wanted.items()}
        count = len(flatten((self._arguments, self._keywords)))
        handed = handed if handed and count == len(self.tokens.sums) else {}
        leaves |= {_argument(k): each for k, each in self._as_leaves(handed).items()}
        with quiet(self.module), self._restored(), torch.enable_grad():
            if isinstance(self.module, RECURRENT):
                self._recurrent(wanted, found)
                return found
            inputs = [each.tensor for each in flatten((self._arguments, self._keywords))]
            known = [None if k in handed else each for k, each in enumerate(self._known())]
            tracker = Tracker(leaves, zip(inputs, known, strict=True), self.sources)
            before = len(self.sources.all)
            self._tracker = tracker
            for key, each in self.module.named_parameters():
                tracker.set_leaves(each, frozenset({f"another parameter, {key}"}))
            modules = self._suspects if beside_calls else self._modules
            with tracker, self._without_calls(tracker, beside_calls):
                output = self._called(modules, leaves)
            tracker.settle()
            lost = self._place_steps(tracker, handed)
            self._name_sources(before)
            outputs = [
                each
                for each in self._checked(flatten(output), wanted)
                if (derived := tracker.derived(each.tensor)) is None
                or derived.leaves.isdisjoint(given_away)
            ]
            self._collect(tracker, outputs, leaves, found, beside_calls, lost)
        self._tracker = None
        for number, names in handed.items():
            several = found.parts.pop(_argument(number), [])
            refusal = found.unsupported.pop(_argument(number), None)
            for name in names:
                found.parts[name] += several
                if isinstance(refusal, UnsupportedLayerError):
                    reason = str(refusal.reason)
                    found.unsupported[name] = UnsupportedLayerError(name, self.layer, reason)
        return found

    def _place_steps(self, tracker: Tracker, handed: Mapping[int, Sequence[str]]) -> list[str]:
        """Find out where uses in recurrences belong; return the leaves of which that is not known.

        A call may be one step of a recurrence, of which the pass as a whole was followed.
        """
        tracker.recurrences.place()
        lost = []
        for leaf, uses in tracker.recurrences.uses.items():
            several = next((n for k, n in handed.items() if _argument(k) == leaf), [leaf])
            known = next((self.tokens.steps[n] for n in several if n in self.tokens.steps), None)
            if known is None:
                continue
            if len(known) != len(uses) or not all(map(self._place_step, uses, known)):
                lost.append(leaf)
        tracker.place_uses()
        return lost

    def _place_step(self, mine: StepUse, use: StepUse) -> bool:
        """Place a use where the same one of the pass is; whether it is the same.

        A grid that the call itself makes has other numbers when it is run again.
        """
        if mine.own.shape != use.own.shape:
            return False
        place = use.own if use.place is None else use.place
        apart = mine.own - use.own
        is_same = bool((apart == 0).all())
        sources = self.sources.present(torch.stack([use.own, place]))
        if not is_same and (bool((apart != apart.flatten()[0]).any()) or len(sources) != 1):
            return False
        is_told = place >= 0
        mine.place = torch.where(is_told, place + apart, place) if use.is_moved else mine.own
        return True

    def _as_leaves(self, handed: Mapping[int, Sequence[str]]) -> dict[int, Tensor]:
        """Those of the arguments, in whose place leaves of our own are put."""
        elements = flatten((self._arguments, self._keywords))
        leaves = {k: elements[k].tensor.detach().requires_grad_() for k in handed}
        instead = {id(elements[k].tensor): leaf for k, leaf in leaves.items()}
        if instead:
            self._arguments, self._keywords = (
                map_tensors(each, lambda tensor: instead.get(id(tensor), tensor))
                for each in (self._arguments, self._keywords)
            )
        return leaves

    def _called(
        self, modules: Mapping[int, Mapping[str, str]], leaves: Mapping[str, Tensor]
    ) -> Any:
        """The layer's output, computed with the leaves in place of its parameters.

        They stay there until `quiet` puts back what was: a checkpoint inside of the layer runs once
        more in the backward pass of our own.
        """
        buffers: dict[int, Tensor] = {}
        for module in self.module.modules():
            own = modules.get(id(module), {})  # elsewhere it is counted already
            vars(module)["_parameters"] = {
                key: None if each is None else leaves.get(own.get(key, ""), each.detach())
                for key, each in module._parameters.items()
            }
            vars(module)["_buffers"] = {
                key: None if each is None else buffers.setdefault(id(each), each.clone())
                for key, each in module._buffers.items()
            }
        return self.module(*self._arguments, **self._keywords)

    @contextlib.contextmanager
    def _without_calls(self, tracker: Tracker, beside_calls: bool) -> Iterator[None]:
        """While a module below is called, whose calls are counted already, nothing is a use."""
        handles = []
        for module in self.module.modules():
            if beside_calls and id(module) in self._suspects:
                handles.append(module.register_forward_pre_hook(tracker.pause))
                handles.append(module.register_forward_hook(tracker.resume))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _known(self) -> Sequence[Origins | None]:
        """The tokens of the arguments; read off them where the pass was not followed."""
        if self._origins is not None:
            return self._origins
        origins, sources = self.tokens.origins, self.tokens.sources
        elements = flatten((self._arguments, self._keywords))
        if len(origins) == len(elements) and not all(map(says_nothing, origins)):
            self.sources = sources.copy()
            self._origins = origins
            return origins
        self.sources = Sources()
        given = given_origins(
            self.sources, self._arguments, self._keywords, self.axis.stack, self.layer
        )
        found = {id(tensor): each for tensor, each in given}
        self._origins = [found.get(id(each.tensor)) for each in elements]
        return self._origins

    def _name_sources(self, start: int) -> None:
        """Call the grids of positions that the run has made as the pass that was followed did."""
        for number, source in enumerate(self.sources.all[start:]):
            if not source.name:
                known = self.tokens.made[number].true.name if number < len(self.tokens.made) else ""
                source.name = known or self.layer or "the model"

    def _checked(self, outputs: list[Any], wanted: Mapping[str, object]) -> list[Any]:
        """The outputs of the re-run, if they are those of the call."""
        for each in outputs:
            seen = self._outputs.get(each.path)
            if seen is not None and not seen.equals(each.tensor):
                raise self._refused(
                    wanted,
                    "run again it gave another output (random numbers of its own, a state that it "
                    "keeps, or a hook that changes it)",
                )
        return outputs

    def _collect(
        self,
        tracker: Tracker,
        outputs: list[Any],
        leaves: Mapping[str, Tensor],
        found: OwnerParts,
        beside_calls: bool,
        lost: Collection[str],
    ) -> None:
        """The terms of all uses, from one backward pass through the graph of the re-run."""
        distinct = {id(each.tensor): each for each in reversed(outputs)}  # returned twice: once
        pairs: list[tuple[Tensor, Tensor]] = [
            (each.tensor, g)
            for each in distinct.values()
            if (g := self.gradients.get(each.path)) is not None and each.tensor.requires_grad
        ]
        uses = [use for use in tracker.uses if use.edge is not None]
        hidden = {name for use in tracker.uses if use.edge is None for name in use.derived.leaves}
        if not pairs:
            found.unsupported.update({name: self._without_graph(name) for name in hidden})
            return
        pairs = _from_outside(pairs)
        ends = [each for each, _ in pairs]
        gradients = [each.clone() for _, each in pairs]  # a fused kernel may write into them
        brought: Sequence[Tensor | None] = torch.autograd.grad(
            ends,
            [*(use.edge for use in uses), *leaves.values()],
            gradients,
            allow_unused=True,
            retain_graph=True,
        )
        failed = dict(tracker.unknown) | dict.fromkeys(lost, REASON)
        terms: dict[str, list[tuple[Tags, Term]]] = defaultdict(list)
        for use, g in zip(uses, brought, strict=False):
            if g is None:
                continue
            for name in use.derived.leaves:
                try:
                    terms[name] += terms_of(use, g, leaves[name], tracker.sources)
                except UnclearLayoutError:
                    found.unsupported[name] = UnsupportedLayerError(name, self.layer, _UNCLEAR)
                except (NotUnderstoodError, RuntimeError, IndexError) as reason:
                    failed.setdefault(name, str(reason) or type(reason).__name__)
        self._add_returned(tracker, outputs, leaves, terms)
        for name, whole in zip(leaves, brought[len(uses) :], strict=True):
            if beside_calls:
                break  # the gradient in this graph holds the calls as well
            if whole is None and name in hidden:
                found.unsupported[name] = self._without_graph(name)
            is_told = name not in failed and name not in found.unsupported
            if whole is not None and is_told and not _adds_up(terms[name], whole):
                failed[name] = "an operation that was not understood"
        if not beside_calls:
            self._fall_back(failed, pairs, leaves, found)
        for name, several in terms.items():
            if name not in failed and name not in found.unsupported:
                for tags, term in several:
                    axis = Axis(self.axis.run, tags.stack, tags.grid, tags.of)
                    rule = f"re-run of {type(self.module).__name__}"
                    found.parts[name].append(UsePart(axis, rule, self._mask, [term]))

    def _add_returned(
        self,
        tracker: Tracker,
        outputs: list[Any],
        leaves: Mapping[str, Tensor],
        terms: dict[str, list[tuple[Tags, Term]]],
    ) -> None:
        """A layer that returns rows of its parameter: the tokens are where they are added."""
        for each in outputs:
            derived, g = tracker.derived(each.tensor), self.gradients.get(each.path)
            if derived is None or derived.places is None or g is None:
                continue
            spread = self._spread
            if spread is not None and len(outputs) == 1 and sums_to(spread, g):
                g = spread
            (name,) = derived.leaves
            shape = tuple(leaves[name].shape)
            several: list[Tags] = []
            if derived.origins is not None:
                several = tags_of(
                    tracker.sources, told_numbers(derived.origins, g, "it", tracker.sources)
                )
            else:
                g = g if g.ndim > 2 else g[None]
                fresh = fresh_tags(g)
                several = [] if fresh is None else [replace(fresh, stack=self.axis.stack)]
            for tags in several:
                term = scattered(tags, derived.places.expand(g.shape), g, shape)
                terms[name].append((tags, term))

    def _fall_back(
        self,
        failed: dict[str, str],
        pairs: list[tuple[Tensor, Any]],
        leaves: Mapping[str, Tensor],
        found: OwnerParts,
    ) -> None:
        """Parameters used in operations without a rule: a pass per position, if that is exact."""
        for name in [each for each, reason in failed.items() if REASON in reason]:
            # What it returns is at a position, but its use may belong to the next step.
            text = f"it is used in {failed.pop(name)}"
            found.unsupported[name] = UnsupportedLayerError(name, self.layer, text)
        names = list(failed)
        if not names:
            return
        try:
            source, terms = position_terms(self, pairs, [leaves[name] for name in names])
        except NotUnderstoodError as reason:
            for name in names:
                found.unsupported[name] = UnsupportedLayerError(
                    name, self.layer,
                    f"it is used in {failed[name]}, which has no rule, and {reason}: it is "
                    "unattributed. Exclude it from the pattern, or ask for per='token_loss', which "
                    "needs no rule.",
                )  # fmt: skip
            return
        for name, term in zip(names, terms, strict=True):
            axis = Axis(self.axis.run, source.true.stack, source.grid, source.true.name)
            rule = f"position by position in {type(self.module).__name__}"
            found.parts[name].append(UsePart(axis, rule, self._mask, [term]))

    def _recurrent(self, wanted: Mapping[str, nn.Parameter], found: OwnerParts) -> None:
        """An RNN, GRU or LSTM: computed again step by step, at the tokens of the rows it reads."""
        try:
            grid, terms = recurrent_terms(
                self.module, self._arguments, self._keywords, self.gradients, self._outputs
            )
            several = self._steps_read(grid)
        except NotUnderstoodError as reason:
            raise self._refused(wanted, str(reason)) from reason
        keys = {id(each): key for key, each in self.module._parameters.items()}
        for name, parameter in wanted.items():
            whole = terms[keys[id(parameter)]]
            for tags in several:
                term, numbers, count = whole, tags.numbers, math.prod(tags.grid)
                # It may read the first rows alone: then they are in order, and not all.
                if not torch.equal(numbers, torch.arange(count, device=numbers.device)):
                    kept = (numbers >= 0).nonzero()[:, 0]
                    term = grouped(numbers[kept], count, whole.at(kept))
                axis = Axis(self.axis.run, tags.stack or self.axis.stack, tags.grid, tags.of)
                rule = f"unrolled {self.module.mode}"
                found.parts[name].append(UsePart(axis, rule, self._mask, [term]))

    def _steps_read(self, grid: tuple[int, int]) -> list[Tags]:
        """The tokens of the rows that a recurrent layer reads, for each source of tokens.

        Args:
            grid: The rows of its input, in their order: (b, s), or (s, b).
        """
        x = recurrent_input(self._arguments, self._keywords)
        read = x.data if isinstance(x, PackedSequence) else x
        elements = flatten((self._arguments, self._keywords))
        known = dict(zip([id(each.tensor) for each in elements], self._known(), strict=True))
        origins = known.get(id(read))
        if origins is None:
            raise NotUnderstoodError("the tokens of its rows cannot be told")
        trace = TokenTrace(self.sources)
        origins = trace.layouts.settled(origins, [read.ndim - 1], are_features=True)
        if origins.second is not None and not origins.is_decided:
            raise NotUnderstoodError(f"its rows are of different positions, by {origins.reason}")
        numbers = trace.sums.reduced(origins, [read.ndim - 1], "", are_features=True).first[..., 0]
        rows = numbers.reshape(-1)
        if bool((rows < NOBODY).any()):
            raise NotUnderstoodError(f"its rows cannot be followed through {origins.reason}")
        sources = self.sources.present(rows)
        is_given = read.ndim == 2 and len(sources) == 1 and sources[0].is_given
        if is_given and torch.equal(rows, sources[0].numbers(rows.device).reshape(-1)):
            # The model was handed steps without a batch, or a packed sequence.
            places = torch.arange(math.prod(grid), device=rows.device)
            return [Tags(grid, places, sources[0].stack, sources[0].name)]
        is_row = torch.ones_like(rows, dtype=torch.bool)
        if isinstance(x, PackedSequence):
            packed = x._replace(data=(rows + 2).double()[:, None])
            padded, _ = pad_packed_sequence(packed, batch_first=bool(self.module.batch_first))
            rows = padded[..., 0].reshape(-1).long() - 2
            is_row, rows = rows != -2, rows.clamp(min=NOBODY)  # what is added has no gradient
        found = tags_of(self.sources, rows)
        nobody = (is_row & (rows == NOBODY)).nonzero()[:, 0]
        if len(nobody):
            own = torch.full_like(rows, -1)
            own[nobody] = torch.arange(len(nobody), device=rows.device)
            name = f"rows of {self.layer} that come from no token"
            found.append(Tags((len(nobody), 1), own, self.axis.stack, name))
        return found

    def _without_graph(self, name: str) -> UnsupportedLayerError:
        return UnsupportedLayerError(
            name, self.layer,
            "it is used inside of a reentrant checkpoint, which computes without a graph when the "
            "layer is run again. Write checkpoint(..., use_reentrant=False).",
        )  # fmt: skip

    def _refused(self, wanted: Mapping[str, object], reason: str) -> UnsupportedLayerError:
        name = next(iter(wanted))
        return UnsupportedLayerError(
            name, self.layer,
            f"{reason}. Exclude it from the pattern, or ask for per='token_loss', which runs "
            "nothing again.",
        )  # fmt: skip

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        """The random numbers and the autocast state of the call, while the block runs."""
        with _no_autocast() if self._state is None else self._state.restored():
            yield


def _adds_up(terms: Sequence[tuple[Tags, Term]], whole: Tensor) -> bool:
    """Whether the tokens' gradients sum to the gradient that autograd finds in the same graph."""
    if not terms:
        return not bool(whole.any())
    added = torch.stack([total([term]).reshape(whole.shape).to(whole.dtype) for _, term in terms])
    difference = torch.linalg.vector_norm(added.sum(0) - whole)
    sizes = sum(float(squares([term]).sum()) for _, term in terms)
    scale = max(float(torch.linalg.vector_norm(whole)), sizes**0.5)
    precision = 1e-6 if whole.dtype == torch.float64 else 1e-3 if whole.itemsize > 2 else 0.1
    return bool(float(difference) <= precision * max(scale, 1e-30))


def _from_outside(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Outputs with the gradients that came from outside of the layer.

    The hook on an output brings the gradient of all its readers, and one of them may be the layer
    itself, on its way to another output (an LSTM cell computes h from c and returns both).
    """
    if len(pairs) == 1:
        return pairs
    latest = sorted(pairs, key=lambda each: node_sequence_number(each[0].grad_fn), reverse=True)
    found: list[tuple[Tensor, Tensor]] = []
    for output, gradient in latest:
        for later, outside in found:
            (inside,) = torch.autograd.grad(
                later, output, outside.clone(), retain_graph=True, allow_unused=True
            )
            gradient = gradient if inside is None or later is output else gradient - inside
        found.append((output, gradient))
    return found


class SeenOutput:
    """An output of the call, to be compared with that of the re-run."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = 0 if tensor.is_inference() else tensor._version

    def equals(self, other: Tensor) -> bool:
        tensor = self._tensor
        if tensor._version != self._version:  # written in place since: nothing to compare with
            return True
        if tensor.shape != other.shape:
            return False
        precision = (
            1e-10 if tensor.dtype == torch.float64 else 3e-2 if tensor.itemsize < 4 else 1e-4
        )
        scale = float(tensor.abs().max()) if tensor.numel() and tensor.is_floating_point() else 1.0
        return torch.allclose(
            tensor.float() if tensor.itemsize < 4 else tensor,
            other.detach().float() if other.itemsize < 4 else other.detach(),
            rtol=precision, atol=precision * scale, equal_nan=True,
        )  # fmt: skip


@contextlib.contextmanager
def quiet(module: nn.Module) -> Iterator[None]:
    """Without any hook on the modules of a layer, put back as they were.

    The hooks with which torch.nn.utils computes weights (weight_norm, pruning) are part of the
    layer and stay; what they set is put back too.
    """
    kept = [(each, dict(vars(each))) for each in module.modules()]
    try:
        for each, before in kept:
            for name in _HOOKS:
                vars(each)[name] = OrderedDict(
                    (key, hook)
                    for key, hook in before[name].items()
                    if type(hook).__module__.startswith("torch.nn.utils")
                )
        yield
    finally:
        for each, before in kept:
            vars(each).clear()
            vars(each).update(before)


def _argument(number: int) -> str:
    """What the leaf in the place of an argument is called; no parameter is."""
    return f"argument {number}"


def _names(modules: Mapping[int, Mapping[str, str]]) -> list[str]:
    """The parameters of these modules, each once."""
    return list(dict.fromkeys(name for own in modules.values() for name in own.values()))
