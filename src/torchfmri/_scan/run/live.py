"""CAPTURE: what the layers of a language model do while it generates, token by token.

In the first pass (the prompt) each output is reduced as it comes. In the steps after it an output
is one row per sequence: a hook copies it to its place in one buffer, and the whole buffer is
reduced at once when the step is over, because there a step is made of hundreds of tiny calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfmri._model import unwrap
from torchfmri._scan.run.endings import Endings
from torchfmri._scan.run.mean_vectors import MeanVectors, VectorPlan
from torchfmri._scan.run.measurements import Measurements
from torchfmri._scan.run.model_call import like_parameters, logits_of
from torchfmri._scan.run.subject import ScannedLayer, Subject
from torchfmri._scan.run.token_axis import first_tensor
from torchfmri._torch import Hook
from torchfmri.exceptions import InspectionError
from torchfmri.statistics import Statistics, calculate_statistics

_BUFFER_BYTES = 1 << 24
"""How much of the steps is kept before their statistics are taken."""


class Step(NamedTuple):
    """One forward pass of the model while it generates.

    Attributes:
        first: The position of its first new token.
        ids: (b, n) the tokens that were new to the model.
        activation: (b, n, voxel) the norms of their activations.
        surprisal: (b, n) of these tokens, nan where the model gave no logits for them.
        entropy: (b, n) of the distributions that they were drawn from.
    """

    first: int
    ids: Tensor
    activation: Tensor
    surprisal: Tensor
    entropy: Tensor


class LiveRecording:
    """Hooks on a model that generates, as a context manager.

    Args:
        subject: What is scanned.
        prompt: (b, s) the ids that the model starts from.
        length: How many positions there will be at most.
        statistics: Also take statistics of each layer, one per row of the batch.
        tensors: Layers of which the activations are kept in full.
        vectors: Layers of which mean vectors are kept.
        on_step: Told of each step.
    """

    def __init__(
        self,
        subject: Subject,
        prompt: Tensor,
        length: int,
        *,
        mask: Tensor,
        endings: Endings,
        statistics: bool = False,
        tensors: frozenset[str] = frozenset(),
        vectors: VectorPlan | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self._subject, self._on_step = subject, on_step
        self._prompt, self._mask, self._endings = prompt, mask, endings
        self._b, self._length = len(prompt), length
        self._padding = int((mask == 0).sum(1).min())  # of the longest row
        like = like_parameters(subject.model)
        self.activation = Measurements(subject, self._b, length, like)
        self.surprisal = torch.full((self._b, length), torch.nan, device=like.device)
        self.entropy = self.surprisal.clone()
        self.tensors: dict[str, Tensor] = {}
        self.missed: dict[str, str] = {}
        self._wants_tensors = tensors
        self.vectors = None if vectors is None else MeanVectors(vectors, self._b)
        self._kept = tensors if vectors is None else tensors | vectors.layers
        self._buffer = _StepBuffer(subject, self._b, like)
        self.statistics = (
            [[Statistics.empty() for _ in subject.layers] for _ in range(self._b)]
            if statistics else None
        )  # fmt: skip
        self._handles: list[Any] = []
        self.seen = 0
        self.unseen = 0
        self._fed_ids = torch.full((self._b, length), -1, device=prompt.device)
        self._passes = 0
        self._first = self._new = self._fed = 0
        self._ids = prompt
        self.is_step = False
        self._cache: Any = None  # that of the last pass
        self._distribution: Tensor | None = None  # the logits that the next token is drawn from

    def __enter__(self) -> LiveRecording:
        # The one that `generate` calls; a wrapper around it (PEFT) calls it as well.
        model = unwrap(self._subject.model)
        try:
            before, after = Hook(self._begins, model), Hook(self._ends_pass, model)
            self._handles.append(model.register_forward_pre_hook(before, with_kwargs=True))
            for layer in self._subject.layers:
                if layer.of_input:
                    take = Hook(partial(self._called_with, layer), layer.module)
                    self._handles.append(layer.module.register_forward_pre_hook(take))
                elif layer.axis is not None:
                    hook = _LayerHook(self, layer, self._buffer)
                    self._handles.append(layer.module.register_forward_hook(hook))
            self._handles.append(model.register_forward_hook(after))
        except BaseException:
            self._detach()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._detach()
        self._cache = None
        self._flush()

    def _detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    # -- one pass ----------------------------------------------------------------------------

    def _begins(
        self, model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        ids = keywords.get("input_ids")
        if ids is None:
            ids = next((each for each in arguments if isinstance(each, Tensor)), None)
        if ids is None or ids.ndim != 2 or ids.is_floating_point():
            raise InspectionError(
                "The model is called without token ids (with inputs_embeds, perhaps) while it is "
                "scanned; the tokens of a scan are ids. Hand it input_ids."
            )
        if len(ids) != self._b:
            raise InspectionError(
                f"The model runs {len(ids)} sequences at once where {self._b} are scanned: a "
                "decoding method that tries several candidates. Scan it from the pass alone: "
                "torchfmri.scan(..., live=False)."
            )
        cache = keywords.get("past_key_values")
        # The first pass may be without one: the model makes it.
        again = cache is self._cache or (self._cache is None and self._passes > 0)
        start = held_positions(keywords, ids.shape[1], self.seen, again)
        self._cache = cache
        known = self._prompt.shape[1] + self._passes
        longer = start + ids.shape[1] > known
        if longer and self._subject.looks_ahead:
            raise fed_in_its_own_way(model)
        if longer and start:
            raise fed_twice(start, ids.shape[1], known)
        self._subject.refuse_length(start + ids.shape[1] - self._padding)
        self._make_room(start + ids.shape[1])
        self._fed_ids[:, start : start + ids.shape[1]] = ids
        if not self._passes:
            self.unseen = start
        # Without a cache the whole sequence is run again at each step: earlier tokens are known.
        self._fed = ids.shape[1]
        self._first = max(self.seen, start)
        self._new = start + self._fed - self._first
        self._ids = ids[:, self._fed - self._new :]
        if self.vectors is not None and self._new > 0:
            self._choose_tokens(self.vectors)
        self.is_step = self._fed == self._new == 1
        if self.is_step:
            self._buffer.begin()

    def _make_room(self, length: int) -> None:
        """A loop of the user's own may write more than was expected."""
        if length <= self._length:
            return
        self._length = max(length, 2 * self._length)
        missing = self._length - self.surprisal.shape[1]
        self.activation.grow(self._length)
        self.surprisal = F.pad(self.surprisal, (0, missing), value=torch.nan)
        self.entropy = F.pad(self.entropy, (0, missing), value=torch.nan)
        self._fed_ids = F.pad(self._fed_ids, (0, missing), value=-1)
        self.tensors = {
            name: F.pad(each, (0, 0, 0, missing), value=torch.nan)
            for name, each in self.tensors.items()
        }

    def called(
        self, layer: ScannedLayer, module: nn.Module, arguments: object, output: object
    ) -> None:
        """Reduce what a layer returned, if there are tokens in it that are new."""
        tensor = first_tensor(output)
        if tensor is not None and self._new > 0:
            self._take(layer, tensor)

    def _called_with(self, layer: ScannedLayer, module: nn.Module, arguments: Any) -> None:
        """Reduce what a module was given."""
        self.called(layer, module, (), arguments)

    def _take(self, layer: ScannedLayer, tensor: Tensor) -> None:
        """Reduce an output of several tokens, or of a layer that is called several times."""
        assert layer.axis is not None
        rows = layer.axis.rows(tensor, self._b, self._fed)
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
        rows = rows[:, -new:].detach()
        first = self._first + self._new - new
        self.activation.put(layer, rows, first)
        self._keep(layer, rows, first)
        if self.statistics is not None:
            mask = self._mask[:, first : first + new].bool()
            mask = F.pad(mask, (0, new - mask.shape[1]), value=True)  # no padding after the prompt
            for row, parts in enumerate(self.statistics):
                own = rows[row][mask[row]]
                if not self._endings.has_ended(row, first):
                    parts[layer.index] += calculate_statistics(own, histogram=False)

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
        first, new = self._first, self._new
        kept = self._mask[:, first : first + new].bool()
        kept = F.pad(kept, (0, new - kept.shape[1]), value=True)  # no padding after the prompt
        ended = [self._endings.has_ended(row, first) for row in range(self._b)]
        kept = kept & ~torch.tensor(ended, device=kept.device)[:, None]
        generated = torch.arange(first, first + new, device=kept.device) >= self._prompt.shape[1]
        vectors.begin(self._fed_ids[:, first : first + new], kept, generated.expand_as(kept))

    def _ends_pass(self, model: nn.Module, arguments: object, output: object) -> None:
        self._passes += 1
        if self._new <= 0:
            return
        first, self.seen = self._first, self._first + self._new
        if self.is_step:
            self._end_step(first)
        self._read_logits(output)
        if self._on_step is not None:
            where = slice(first, self.seen)
            norms = self.activation.norms[:, where]
            self._on_step(
                Step(first, self._ids, norms, self.surprisal[:, where], self.entropy[:, where])
            )

    def _end_step(self, first: int) -> None:
        buffer = self._buffer
        columns, norms = buffer.norms()
        self.activation.norms[:, first, columns] = norms
        for layer in self._subject.layers if self._kept else ():
            if layer.name in self._kept and layer.index in buffer.taken:
                self._keep(layer, buffer.rows(layer.index)[:, None], first)
        if self.statistics is not None:
            buffer.remember([not self._endings.has_ended(row, first) for row in range(self._b)])
            if buffer.is_full:
                self._flush()

    def _flush(self) -> None:
        """Take the statistics of the steps that wait for them."""
        if self.statistics is not None:
            for row, parts in enumerate(self.statistics):
                for index, values in self._buffer.steps_of(row):
                    parts[index] += calculate_statistics(values, histogram=False)
            self._buffer.clear()

    def _read_logits(self, output: object) -> None:
        """Surprisal and entropy of the tokens that were new, from the logits before them."""
        logits = logits_of(output)
        if logits is None:
            return
        # They may be those of the last positions alone; row j predicts the position after it.
        logits = logits[:, -min(self._new, logits.shape[1]) :].detach()
        before, self._distribution = self._distribution, logits[:, -1:]
        if before is not None:
            self._put_surprisal(before, self._first)
        self._put_surprisal(logits[:, :-1], self.seen - logits.shape[1] + 1)

    def _put_surprisal(self, logits: Tensor, first: int) -> None:
        """Take in those of the tokens from `first` on, which were drawn from these logits."""
        count = logits.shape[1]
        if count:
            ids = self._fed_ids[:, first : first + count]
            surprisal, entropy = surprisal_and_entropy(logits, ids)
            self.surprisal[:, first : first + count] = surprisal
            self.entropy[:, first : first + count] = entropy

    def finish(self, ids: Tensor) -> None:
        """Take in the last token, which was drawn and never fed: it has a surprisal, no activation.

        Args:
            ids: (b, s) of everything that was generated.

        Raises:
            InspectionError: The model was fed other tokens than these.
        """
        self._check_fed(ids)
        if self._distribution is None or ids.shape[1] != self.seen + 1:
            return
        last = ids[:, -1:].to(self._distribution.device)
        surprisal, entropy = surprisal_and_entropy(self._distribution, last)
        self.surprisal[:, self.seen : self.seen + 1] = surprisal
        self.entropy[:, self.seen : self.seen + 1] = entropy
        if self._on_step is not None:
            empty = self.activation.norms[:, self.seen : self.seen + 1]
            self._on_step(Step(self.seen, last, empty, surprisal, entropy))

    def _check_fed(self, ids: Tensor) -> None:
        """Raise where what the model was fed is not what stands at that position."""
        count = min(ids.shape[1], self.seen)
        fed, real = self._fed_ids[:, :count], ids[:, :count].to(self._fed_ids.device)
        wrong = ((fed >= 0) & (fed != real)).nonzero()
        if len(wrong) or self.seen > ids.shape[1]:
            if self._subject.looks_ahead:
                raise fed_in_its_own_way(unwrap(self._subject.model))
            row, at = wrong[0].tolist() if len(wrong) else (0, ids.shape[1])
            there = int(ids[row, at]) if at < ids.shape[1] else "nothing"
            raise InspectionError(
                f"At position {at} the model was fed token {int(self._fed_ids[row, at])}, where "
                f"{there} stands in what came out: some token was fed twice into one cache, or the "
                "loop ran candidates that it then dropped. Feed each token once, or scan from the "
                "pass alone with live=False."
            )


class _LayerHook(Hook):
    """The hook on one layer; in a step of one token it does nothing but copy."""

    __slots__ = ("_buffer", "_layer", "_recording", "_shape", "_view")

    def __init__(self, recording: LiveRecording, layer: ScannedLayer, buffer: _StepBuffer) -> None:
        super().__init__(partial(recording.called, layer), layer.module)
        self._recording, self._layer, self._buffer = recording, layer, buffer
        self._view = buffer.view(layer.index)
        self._shape = None if self._view is None else self._view.shape

    def __call__(self, *arguments: Any) -> None:
        output = arguments[2]
        if type(output) is not Tensor:
            output = first_tensor(output)
        if (
            self._recording.is_step
            and output is not None
            and output.shape == self._shape
            and self._layer.module is arguments[0]
        ):
            assert self._view is not None
            self._view.copy_(output.detach() if output.requires_grad else output)
            self._buffer.taken.add(self._layer.index)
            return
        super().__call__(*arguments)


class _StepBuffer:
    """The outputs of all layers in steps of one token, side by side.

    Layers with voxels of one size stand together, each filled up with zeros to whole voxels, so
    that all norms are had by one reduction per size.
    """

    def __init__(self, subject: Subject, b: int, like: Tensor) -> None:
        layers = [each for each in subject.layers if each.axis is not None and each.calls == 1]
        layers = [each for each in layers if not each.of_input]  # these are reduced as they come
        layers.sort(key=lambda each: each.size)
        self._b = b
        self._groups: list[tuple[int, int, int]] = []  # first column, last column, voxel size
        self._places: dict[int, tuple[int, int]] = {}  # layer -> first column, units
        columns: list[int] = []
        at = 0
        for layer in layers:
            assert layer.axis is not None
            if not self._groups or self._groups[-1][2] != layer.size:
                self._groups.append((at, at, layer.size))
            width = layer.axis.width
            self._places[layer.index] = (at, width)
            at += width + -width % layer.size
            self._groups[-1] = (self._groups[-1][0], at, layer.size)
            columns += range(layer.voxels.start, layer.voxels.stop)
        self.columns = torch.tensor(columns, dtype=torch.long, device=like.device)
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self._data = torch.zeros(b, at, dtype=dtype, device=like.device)
        self._layers = {each.index: each for each in layers}
        self._views = {index: self._view(each) for index, each in self._layers.items()}
        self.taken: set[int] = set()
        # Steps that wait for their statistics.
        self._slots = max(1, min(32, _BUFFER_BYTES // max(1, self._data.nbytes)))
        self._past: Tensor | None = None
        self._past_taken: list[set[int]] = []
        self._past_alive: list[list[bool]] = []

    @property
    def is_full(self) -> bool:
        return len(self._past_taken) == self._slots

    def begin(self) -> None:
        """Begin a step."""
        self.taken = set()

    def _view(self, layer: ScannedLayer) -> Tensor:
        """The place of a layer, of the shape that its output has."""
        assert layer.axis is not None
        first, width = self._places[layer.index]
        place = self._data[:, first : first + width]
        inside, name = layer.axis.inside, layer.axis.axis.name
        if name == "(b, w, s)":
            return place[..., None]
        if len(inside) > 1:
            place = place.view(self._b, *inside)
        if name == "(b, heads, s, d)":
            return place[:, :, None]
        if name in ("(b, s, ...)", "(1, s, ...)"):
            return place[:, None] if inside else place
        return place

    def rows(self, index: int) -> Tensor:
        """(b, w) of a layer in this step."""
        first, width = self._places[index]
        return self._data[:, first : first + width]

    def view(self, index: int) -> Tensor | None:
        """The place of a layer, of the shape that its output has in a step; None without one."""
        return self._views.get(index)

    def norms(self) -> tuple[Tensor, Tensor]:
        """The columns of the layers that were called in this step, and (b, voxel) in that order."""
        found = torch.cat(
            [
                torch.linalg.vector_norm(self._data[:, first:last].view(self._b, -1, size), 2, -1)
                for first, last, size in self._groups
            ],
            1,
        )
        if len(self.taken) == len(self._layers):
            return self.columns, found
        taken = [
            index in self.taken
            for index, layer in self._layers.items()
            for _ in range(layer.voxels.start, layer.voxels.stop)
        ]
        kept = torch.tensor(taken, device=found.device)
        return self.columns[kept], found[:, kept]

    def remember(self, alive: list[bool]) -> None:
        """Keep the step, in which these rows of the batch had a token, for its statistics."""
        if self._past is None:
            self._past = self._data.new_empty(self._slots, *self._data.shape)
        self._past[len(self._past_taken)] = self._data
        self._past_taken.append(self.taken)
        self._past_alive.append(alive)

    def steps_of(self, row: int) -> list[tuple[int, Tensor]]:
        """Layer -> (n, w) of the steps in which this row had a token."""
        found = []
        for index in self._layers:
            slots = [
                slot
                for slot, taken in enumerate(self._past_taken)
                if self._past_alive[slot][row] and index in taken
            ]
            if slots:
                first, width = self._places[index]
                assert self._past is not None
                found.append((index, self._past[slots, row, first : first + width]))
        return found

    def clear(self) -> None:
        """Forget the steps."""
        self._past_taken.clear()
        self._past_alive.clear()


def surprisal_and_entropy(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """-log p of the ids and the entropy of their distributions, in nats, both (b, s).

    Args:
        logits: (b, s, vocabulary), those from which each id was drawn.
        ids: (b, s).
    """
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    logs = torch.log_softmax(logits, -1)
    surprisal = -logs.gather(-1, ids.to(logs.device)[..., None])[..., 0]
    # 0 log 0 is 0: a token that cannot come adds nothing.
    entropy = -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1)
    return surprisal, entropy


def held_positions(keywords: Mapping[str, Any], fed: int, seen: int, again: bool) -> int:
    """How many positions the model remembers as it is called.

    A KV cache says so. Another cache, or a single token without any, goes on from what was seen;
    otherwise the model starts from the beginning.

    Args:
        keywords: Of the call.
        fed: How many tokens it is given.
        seen: How many positions were seen before.
        again: Whether its cache is that of the pass before.
    """
    cache = keywords.get("past_key_values")
    length = getattr(cache, "get_seq_length", None)
    if callable(length):
        held = _length_of(length)
        # One that was run and holds nothing keeps a state, and no positions (RecurrentGemma,
        # MiniMax).
        return seen if held is None or (not held and again and fed == 1) else held
    goes_on = cache is not None or keywords.get("cache_params") is not None or fed == 1
    return seen if goes_on else 0


def _length_of(length: Callable[[], Any]) -> int | None:
    """What a cache says; None where it has states alone and says so by raising."""
    try:
        return int(length())
    except (ValueError, NotImplementedError):
        return None


def fed_in_its_own_way(model: nn.Module) -> InspectionError:
    """The error for a model that writes in another way than it reads (XLNet, XLM, CPM-Ant)."""
    return InspectionError(
        f"{type(model).__name__} looks ahead: in a pass over a whole sequence, what it computes at "
        "a position depends on the tokens after it. To write nevertheless, its generate() feeds it "
        "placeholders for tokens that are not there yet, or all tokens again at each step, so that "
        "no pass over the finished sequence computes what generating did. Read a text with "
        "max_new_tokens=0, or scan a model whose attention is causal."
    )


def fed_twice(held: int, fed: int, known: int) -> InspectionError:
    """The error for a sequence that is fed again into a cache that holds it already."""
    return InspectionError(
        f"The model is fed {fed} tokens while its cache already holds {held} positions, which "
        f"makes {held + fed}; but the sequence has only {known}. The same tokens are fed twice "
        "into one cache: attention would see each of them twice, and either answer wrongly without "
        "an error, or fail with sizes such as "
        f"{known} against {held + fed}. Feed only the tokens that are new to the cache "
        "(ids[:, -1:] after the first pass), or start with a new cache. (If your loop really "
        "writes several tokens per pass, scan it with live=False.)"
    )
