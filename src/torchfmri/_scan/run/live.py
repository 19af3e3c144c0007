"""What the layers of a language model do while it generates, token by token.

In the first pass (the prompt) each output is read by itself, or with all others where they are on a
GPU and not too large. The steps after it are made of hundreds of tiny calls: hooks keep references,
the outputs of all layers are joined to one tensor when the step is over, and many steps are reduced
together. Nothing waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfmri._kernels import heaviest
from torchfmri._model import unwrap
from torchfmri._scan.run.collection import RestingCollector
from torchfmri._scan.run.endings import Endings
from torchfmri._scan.run.flat_layout import layout_of
from torchfmri._scan.run.live_hooks import (
    EagerHook,
    LayerHook,
    StepOutputs,
    call_with_tensor,
    ids_of,
)
from torchfmri._scan.run.mean_vectors import MeanVectors, VectorPlan
from torchfmri._scan.run.model_call import held_positions, like_parameters, logits_of
from torchfmri._scan.run.readings import Readings
from torchfmri._scan.run.refusals import fed_in_its_own_way, fed_twice
from torchfmri._scan.run.subject import ScannedLayer, ScanSubject
from torchfmri._scan.run.surprisal import Surprisals
from torchfmri._scan.run.token_axis import first_tensor
from torchfmri._torch import Attached, HookSet
from torchfmri.exceptions import InspectionError

_STEPS, _HOST_BYTES = 32, 1 << 24
"""How many steps wait before they are reduced, and how many bytes of them in the host's memory."""
_SHARE = 0.02
"""How much of the scan's processor time may go into telling, where tokens may wait."""
_LONGEST = 10
"""How many times `tell_every` they wait at most."""
_WRITTEN = "its activations while generating: somebody writes into its output"

_UNSEEN = "its activations of a token: its output was not followed into compiled code"


class LiveStep(NamedTuple):
    """One forward pass of the model while it generates.

    Attributes:
        first: The position of its first new token.
        ids: (b, n) the tokens that were new to the model.
        activation: (b, n, voxel) the norms of their activations.
        surprisal: (b, n) of these tokens, nan where the model gave no logits for them.
        entropy: (b, n) of the distributions that they were drawn from.
        kept: (b, n) which of them are tokens: neither padding, nor after the end of their row.
    """

    first: int
    ids: Tensor
    activation: Tensor
    surprisal: Tensor
    entropy: Tensor
    kept: Tensor


class LiveRecording(Attached):
    """Hooks on a model that generates, as a context manager.

    Args:
        subject: What is scanned.
        prompt: (b, s) the ids that the model starts from.
        length: How many positions there will be at most.
        mask: (b, s) of the prompt, 0 for padding.
        endings: Where each row ends.
        statistics: Also take statistics of each layer, one per row of the batch.
        tensors: Layers of which the activations are kept in full.
        vectors: Layers of which mean vectors are kept.
        on_step: Told of each step.
        tell_every: Seconds between two calls of `on_step`; steps of the meantime are told as one.
            Where telling is expensive they wait longer, up to ten times as long.

    Attributes:
        subject: As given.
        outputs: The outputs of the step that runs.
        activation: What was read.
        tensors: Layer -> (b, s, w).
        missed: Layer -> why something of it is missing.
        seen: How many positions were run.
        unseen: How many were in a cache from the beginning.
        passes: How often the model was run.
    """

    def __init__(
        self,
        subject: ScanSubject,
        prompt: Tensor,
        length: int,
        *,
        mask: Tensor,
        endings: Endings,
        statistics: bool = False,
        tensors: frozenset[str] = frozenset(),
        vectors: VectorPlan | None = None,
        on_step: Callable[[LiveStep], None] | None = None,
        tell_every: float = 0.0,
    ) -> None:
        self.subject, self._on_step = subject, on_step
        self._tell_every, self._told_at = tell_every, -math.inf
        self._worked = self._cost = 0.0  # processor time: when it was told last, and what that took
        self._untold: list[Tensor] = []  # the ids of steps that were not told yet, (b, n) each
        self._first_untold = 0
        self._prompt, self._mask, self._endings = prompt, mask, endings
        self._b, self._length = len(prompt), length
        self._padding = int((mask == 0).sum(1).min())  # of the longest row
        like = like_parameters(subject.model)
        self.missed: dict[str, str] = {}
        self.vectors = None if vectors is None else MeanVectors(vectors, self._b)
        self.activation = Readings(
            subject, self._b, length, like,
            kept=self._kept if statistics else None, missed=self.missed.__setitem__,
        )  # fmt: skip
        self._surprisals = Surprisals(self._b, length, like.device)
        self.tensors: dict[str, Tensor] = {}
        self._wants_tensors = tensors
        single = [each for each in subject.layers if each.is_output and each.calls == 1]
        self._bytes_of_a_value = like.element_size()
        self.outputs = StepOutputs(layout_of(subject, single, like.device), self._b)
        self._most = heaviest(like.device) if like.is_cuda else _HOST_BYTES
        self._flats: list[Tensor] = []  # steps that wait, (b, 1, width)
        self._first_flat = 0
        self._hooks = HookSet()
        self._collector = RestingCollector()
        self.seen = self.unseen = 0
        self._fed_ids = torch.full((self._b, length), -1, device=prompt.device)
        self._fed: list[Tensor] = []  # not yet in `_fed_ids`
        self._first_fed = 0
        self.passes = 0
        self._first = self._new = self._count = 0
        self._ids = prompt
        self._cache: Any = None  # that of the last pass

    @property
    def rows(self) -> int:
        """How many sequences run at once."""
        return self._b

    @property
    def surprisal(self) -> Tensor:
        """(b, s), nan where the model gave no logits for a token."""
        return self._surprisals.surprisal

    @property
    def entropy(self) -> Tensor:
        """(b, s) of the distributions that the tokens were drawn from."""
        return self._surprisals.entropy

    def _attach(self, stack: ExitStack) -> None:
        # The one that `generate` calls; a wrapper around it (PEFT) calls it as well.
        model = unwrap(self.subject.model)
        places = {each.index: place for place, each in enumerate(self.outputs.layout.layers)}
        stack.callback(self._collector.go_on)
        before, after = EagerHook(self._begins, model), EagerHook(self._ends, model)
        stack.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(self._hooks.remove)
        for layer in self.subject.layers:
            if layer.of_input:
                take = EagerHook(partial(self._take_input, layer), layer.module)
                stack.callback(layer.module.register_forward_pre_hook(take).remove)
            elif layer.axis is not None:
                place = places.get(layer.index)
                act = partial(call_with_tensor, self._take, layer)
                hook = (
                    EagerHook(act, layer.module) if place is None
                    else LayerHook(self._take, layer, self.outputs, place)
                )  # fmt: skip
                self._hooks.after([layer.module], hook)
        stack.callback(model.register_forward_hook(after).remove)
        stack.callback(self._finish)

    def _finish(self) -> None:
        self._cache = None
        self.outputs.begin(is_step=False)
        self._flush()
        self.activation.flush()

    # -- one pass ----------------------------------------------------------------------------

    def _begins(
        self, model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        self.begin_pass(ids_of(arguments, keywords), keywords)
        self._collector.rest()

    def begin_pass(self, ids: Tensor, keywords: Mapping[str, Any]) -> None:
        """Take note of what the model is about to be fed."""
        b, count = ids.shape
        if b != self._b:
            raise InspectionError(
                f"The model runs {b} sequences at once where {self._b} are scanned: a "
                "decoding method that tries several candidates. Scan it from the pass alone: "
                "torchfmri.scan(..., live=False)."
            )
        cache = keywords.get("past_key_values")
        # The first pass may be without one: the model makes it.
        again = cache is self._cache or (self._cache is None and self.passes > 0)
        start = held_positions(keywords, count, self.seen, again)
        self._cache = cache
        known = self._prompt.shape[1] + self.passes
        longer = start + count > known
        if longer and self.subject.looks_ahead:
            raise fed_in_its_own_way(unwrap(self.subject.model))
        if longer and start:
            raise fed_twice(start, count, known)
        self.subject.refuse_length(start + count - self._padding)
        self._make_room(start + count)
        self._note_fed(start, ids)
        if not self.passes:
            self.unseen = start
        # Without a cache the whole sequence is run again at each step: earlier tokens are known.
        self._count = count
        self._first = max(self.seen, start)
        self._new = start + count - self._first
        self._ids = ids[:, count - self._new :]
        if self.vectors is not None and self._new > 0:
            self._choose_tokens(self.vectors)
        self.outputs.begin(self._keeps_references(), count)

    def _keeps_references(self) -> bool:
        """Whether the outputs of this pass are joined when it is over."""
        if self._count != self._new or self._new == 1:
            return self._count == self._new
        layout, width = self.outputs.layout, self._b * self._count * self._bytes_of_a_value
        read_singly = self._wants_tensors or self.vectors is not None
        return self.activation.waits and not read_singly and width * layout.width < self._most

    def _make_room(self, length: int) -> None:
        """A loop of the user's own may write more than was expected."""
        if length <= self._length:
            return
        self._flush()
        self._length = max(length, 2 * self._length)
        missing = self._length - self._fed_ids.shape[1]
        self.activation.grow(self._length)
        self._surprisals.grow(self._length)
        self._fed_ids = F.pad(self._fed_ids, (0, missing), value=-1)
        self.tensors = {
            name: F.pad(each, (0, 0, 0, missing), value=torch.nan)
            for name, each in self.tensors.items()
        }

    def _note_fed(self, start: int, ids: Tensor) -> None:
        """Remember what was fed where; single tokens are written down many at a time."""
        if self._first_fed + len(self._fed) != start or ids.shape[1] > 1:
            self._write_fed()
            self._first_fed = start
        if ids.shape[1] > 1:
            self._fed_ids[:, start : start + ids.shape[1]] = ids
        else:
            self._fed.append(ids)

    def _write_fed(self) -> None:
        if self._fed:
            where = slice(self._first_fed, self._first_fed + len(self._fed))
            self._fed_ids[:, where] = torch.cat(self._fed, 1)
            self._first_fed, self._fed = where.stop, []

    def _take_input(self, layer: ScannedLayer, module: nn.Module, arguments: Any) -> None:
        """Read what a module was given."""
        tensor = first_tensor(arguments)
        if tensor is not None:
            self._take(layer, tensor)

    def _take(self, layer: ScannedLayer, tensor: Tensor) -> None:
        """Read an output of several tokens, or of a layer that is called several times."""
        if self._new <= 0:
            return
        assert layer.axis is not None
        rows = layer.axis.rows(tensor, self._b, self._count)
        new = self._new
        if rows is None:  # the last layer may run on the last position alone
            rows, new = layer.axis.rows(tensor, self._b, 1), 1
        if rows is None:  # or a projection of the cache on all that it holds (DeepSeek's kv_b_proj)
            rows, new = layer.axis.rows(tensor, self._b, self._first + self._new), self._new
        if rows is None:
            self.missed[layer.name] = (
                f"its activations while generating: an output of the shape {tuple(tensor.shape)}"
            )
            return
        rows = rows.detach()
        if rows.shape[1] != new:
            rows = rows[:, -new:]
        self._read(layer, tensor, rows, self._first + self._new - new)

    def _read(self, layer: ScannedLayer, source: Tensor, rows: Tensor, first: int) -> None:
        self.activation.take(layer, source, rows, first)
        self._keep(layer, rows, first)

    def _keep(self, layer: ScannedLayer, rows: Tensor, first: int) -> None:
        if self.vectors is not None:
            self.vectors.add(layer, rows)
        if layer.name in self._wants_tensors:
            if layer.name not in self.tensors:
                shape = (self._b, self._length, rows.shape[-1])
                self.tensors[layer.name] = rows.new_full(shape, torch.nan)
            self.tensors[layer.name][:, first : first + rows.shape[1]] = rows

    def _choose_tokens(self, vectors: MeanVectors) -> None:
        """Tell the mean vectors which of the new positions are tokens, and who wrote them."""
        kept = self._kept(self._first, self._new)
        positions = torch.arange(self._first, self._first + self._new, device=kept.device)
        generated = positions >= self._prompt.shape[1]
        vectors.begin(self._ids, kept, generated.expand_as(kept))

    def _ends(self, model: nn.Module, arguments: object, output: object) -> None:
        if self.outputs.is_step:
            self._end_step()
        self._collector.go_on()
        self.end_pass(output)

    def _end_step(self) -> None:
        """Join the outputs of all layers, of which nobody has a reference afterwards."""
        flat = self.outputs.joined() if self._count == 1 else None
        if flat is not None:
            self.outputs.begin(is_step=True)  # before the collector sees them
            self.take_flat(flat)
            return
        whole, others = self.outputs.split() if self._count > 1 else ([], self.outputs.single())
        self.activation.take_together(whole, self._first)
        for layer, output in others:
            if output is None:
                self.missed[layer.name] = _WRITTEN
            else:
                self._take(layer, output)

    def take_outputs(self, found: Iterable[tuple[int, Tensor]]) -> None:
        """Take in the outputs that a graph had in this step, beside those that hooks saw."""
        if self.outputs.is_step:
            for place, output in found:
                self.outputs.put(place, output)
            for layer, slot in zip(self.outputs.layout.layers, self.outputs.slots, strict=True):
                if slot is None:
                    self.missed[layer.name] = _UNSEEN
            self._end_step()

    def take_flat(self, flat: Tensor) -> None:
        """Take in the outputs of all layers in this step, (b, 1, width), as they stand there."""
        if self._first_flat + len(self._flats) != self._first:
            self._flush()
            self._first_flat = self._first
        self._flats.append(flat)
        if self._wants_tensors or self.vectors is not None:
            for layer, rows in zip(
                self.outputs.layout.layers, self.outputs.layout.units(flat), strict=True
            ):
                self._keep(layer, rows, self._first)

    def end_pass(self, output: object) -> None:
        """Take in the logits, and tell of the step."""
        self.passes += 1
        if self._new <= 0:
            return
        self.seen = self._first + self._new
        logits = logits_of(output)
        if logits is not None:
            self._surprisals.take(logits, self._first, self._ids)
        waiting = self._surprisals.bytes + sum(each.nbytes for each in self._flats[:1]) * len(
            self._flats
        )
        if len(self._flats) >= _STEPS or waiting > self._most:
            self._flush()
        if self._on_step is not None:
            if not self._untold:
                self._first_untold = self._first
            self._untold.append(self._ids)
            if self._is_time():
                self._tell()

    def _is_time(self) -> bool:
        """Whether to tell now: reading one step takes as long as reading many.

        Processor time counts, because on a busy machine seconds pass without any work.
        """
        waited = time.monotonic() - self._told_at
        if waited < self._tell_every or not self._tell_every:
            return not self._tell_every
        worked = time.thread_time() - self._worked
        return worked * _SHARE >= self._cost or waited >= _LONGEST * self._tell_every

    def _tell(self) -> None:
        """Tell of the steps that were not told yet."""
        if self._on_step is None or not self._untold:
            return
        started = time.thread_time()
        self._flush()
        ids, self._untold = torch.cat(self._untold, 1), []
        self._on_step(self._step(self._first_untold, ids))
        self._told_at, self._worked = time.monotonic(), time.thread_time()
        self._cost = self._worked - started

    def _step(self, first: int, ids: Tensor) -> LiveStep:
        where = slice(first, first + ids.shape[1])
        return LiveStep(
            first=first,
            ids=ids,
            activation=self.activation.norms[:, where],
            surprisal=self.surprisal[:, where],
            entropy=self.entropy[:, where],
            kept=self._kept(first, ids.shape[1]),
        )

    def _flush(self) -> None:
        """Read the steps that wait."""
        self._write_fed()
        if self._flats:
            flats, self._flats = self._flats, []
            flat = torch.cat(flats, 1) if len(flats) > 1 else flats[0]
            self.activation.take_flat(self.outputs.layout, flat, self._first_flat)
            self._first_flat += len(flats)
        self._surprisals.flush()

    def _kept(self, first: int, count: int) -> Tensor:
        """(b, n) which positions hold a token: neither padding, nor after the end of their row."""
        self._write_fed()
        running = self._endings.running(self._fed_ids[:, : first + count])[:, first:]
        mask = self._mask[:, first : first + count].to(running.device).bool()
        # There is no padding after the prompt.
        return running & F.pad(mask, (0, count - mask.shape[1]), value=True)

    # -- the end -----------------------------------------------------------------------------

    def finish(self, ids: Tensor) -> None:
        """Take in the last token, which was drawn and never fed: it has a surprisal, no activation.

        Args:
            ids: (b, s) of everything that was generated.

        Raises:
            InspectionError: The model was fed other tokens than these.
        """
        self._check_fed(ids)
        self._tell()
        if ids.shape[1] != self.seen + 1:
            return
        last = ids[:, -1:].to(self._fed_ids.device)
        if self._surprisals.finish(self.seen, last) and self._on_step is not None:
            self._on_step(self._step(self.seen, last))

    def _check_fed(self, ids: Tensor) -> None:
        """Raise where what the model was fed is not what stands at that position."""
        count = min(ids.shape[1], self.seen)
        fed, real = self._fed_ids[:, :count], ids[:, :count].to(self._fed_ids.device)
        wrong = ((fed >= 0) & (fed != real)).nonzero()
        if len(wrong) or self.seen > ids.shape[1]:
            if self.subject.looks_ahead:
                raise fed_in_its_own_way(unwrap(self.subject.model))
            row, at = wrong[0].tolist() if len(wrong) else (0, ids.shape[1])
            there = int(ids[row, at]) if at < ids.shape[1] else "nothing"
            raise InspectionError(
                f"At position {at} the model was fed token {int(self._fed_ids[row, at])}, where "
                f"{there} stands in what came out: some token was fed twice into one cache, or the "
                "loop ran candidates that it then dropped. Feed each token once, or scan from the "
                "pass alone with live=False."
            )
