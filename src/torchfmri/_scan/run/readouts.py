"""One more pass over finished sequences, without gradients, that reads out what was asked for.

Attention of every head, the lens of every block, the experts of every router and the features of
dictionaries all come from it: it runs the whole sequence without a cache, so key j is token j.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchfmri._attention import HEAD_SCORES, AttentionCall, AttentionReader, score_heads
from torchfmri._lens import (
    ExpertRouting,
    FeatureReader,
    RouterReader,
    find_sources,
    find_unembedding,
    only_stack,
    read_stream,
    run_stream,
)
from torchfmri._model import (
    check_pattern,
    compiled_code_as_eager,
    find_layers,
    generators_restored,
    named_layers,
    places_of,
)
from torchfmri._scan.record.readouts import LENS, LENS_PARTS, PATTERN, readout_name
from torchfmri._scan.run.batch_rows import BatchRow
from torchfmri._scan.run.model_call import call_model, is_causal, logits_of
from torchfmri._scan.run.scan_options import ScanOptions
from torchfmri._scan.run.scan_pass import Sequences
from torchfmri.exceptions import InspectionError, MemoryLimitError

MOST_PATTERN_BYTES = 1 << 30
LENS_TOP = 5


@dataclass(eq=False)
class Readouts:
    """What a pass over a batch of sequences read out of a model.

    Attributes:
        values: Name -> (b, s, columns).
        patterns: Layer -> (b, heads, s, s), of those that are kept whole.
        missed: Layer -> why something could not be read.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    patterns: dict[str, Tensor] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)

    def add_to(self, rows: Sequence[BatchRow], mask: Tensor) -> None:
        """Put them among the tensors of the sequences, without padding."""
        for index, row in enumerate(rows):
            where = mask[index].bool().cpu()
            for name, values in self.values.items():
                row.tensors[name] = _array(values[index][where])
            for layer, pattern in self.patterns.items():
                own = pattern[index][:, where][:, :, where]
                row.tensors[readout_name(layer, PATTERN)] = _array(own.transpose(0, 1).flatten(1))


def wants_readouts(options: ScanOptions) -> bool:
    """Whether anything is to be read out."""
    several = (options.attention, options.lens, options.experts)
    return any(each is not False for each in several) or options.features is not None


def describe_readouts(model: nn.Module, options: ScanOptions) -> dict[str, Any]:
    """What is read out, as plain data for the meta of a scan; empty where nothing is.

    Raises:
        InspectionError: The model has no stream for a lens, or no such place for features.
    """
    found: dict[str, Any] = {}
    if options.attention is not False:
        found["attention"] = sorted(_kept_patterns(model, options))
    if options.lens:
        found["lens"] = ["embedding", *(block.name for block in only_stack(model))]
    if options.experts:
        found["experts"] = True
    if options.features is not None:
        found["features"] = [each.name for each in find_sources(model, options.features)]
    return found


def read_out(model: nn.Module, sequences: Sequences, options: ScanOptions) -> Readouts:
    """Run the sequences once more and read out what the options ask for.

    Raises:
        InspectionError: The lens cannot read this model.
        MemoryLimitError: The patterns that are to be kept whole are too large.
    """
    found = Readouts()
    ids, mask = sequences.ids, sequences.mask
    sink = _Sink(found, ids, mask)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(generators_restored())
        stack.enter_context(compiled_code_as_eager())
        if options.attention is not False:
            sink.kept = _kept_patterns(model, options)
            reader = stack.enter_context(AttentionReader(model, sink.attention))
            # Called when the block ends: what was seen and could not be read.
            stack.callback(lambda: found.missed.update(_unread(reader)))
        if options.experts:
            routers = RouterReader(model, sink.routing, sink.missed)
            if not routers.routers:
                found.missed[""] = "experts: no layer of the model is a router"
            stack.enter_context(routers)
        if options.features is not None:
            sources = find_sources(model, options.features)
            stack.enter_context(FeatureReader(model, sources, options.feature_count, sink.features))

        def call() -> Any:
            return call_model(model, ids, mask, sequences.positions)

        if options.lens:
            stream = run_stream(model, call)
            unembedding = find_unembedding(model, stream, logits_of(stream.output))
            ahead = int(is_causal(model))
            reading = read_stream(stream, unembedding, ids, LENS_TOP, mask, ahead)
            for part in LENS_PARTS:
                values = getattr(reading, part).movedim(0, 2).flatten(2)  # (b, s, layer * k)
                found.values[readout_name(LENS, part)] = values.cpu()
        else:
            call()
    if options.attention is not False and not sink.attended:
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        found.missed[""] = (
            "attention: none was computed that can be read (no scaled_dot_product_attention, and "
            "no softmax that is multiplied with values"
            + (f"; the implementation is {implementation!r})" if implementation else ")")
        )
    return found


def _unread(reader: AttentionReader) -> dict[str, str]:
    return {layer: f"attention: {reason}" for layer, reason in reader.unread.items()}


def _kept_patterns(model: nn.Module, options: ScanOptions) -> frozenset[str]:
    """The layers whose patterns are kept whole."""
    if isinstance(options.attention, bool):
        return frozenset()
    layers = named_layers(model)
    chosen: set[str] = set()
    for single in check_pattern(options.attention):
        if isinstance(single, str):
            places = places_of(layers, single)
            heads = [each.name for each in places if each.head is not None]
            if heads:
                raise InspectionError(
                    f"attention={single!r} names the head {heads[0]!r}: all heads of a layer are "
                    "kept together. Name the layer."
                )
            chosen.update(each.layer for each in places)
        else:
            chosen.update(find_layers(layers, single))
    return frozenset(chosen)


class _Sink:
    """Takes in what the readers find in one pass."""

    def __init__(self, found: Readouts, ids: Tensor, mask: Tensor) -> None:
        self._found, self._ids, self._mask = found, ids, mask
        self.kept: frozenset[str] = frozenset()
        self.attended: dict[str, int] = {}
        self._bytes = 0

    def missed(self, layer: str, reason: str) -> None:
        self._found.missed[layer] = reason

    def attention(self, call: AttentionCall) -> None:
        number = self.attended[call.layer] = self.attended.get(call.layer, 0) + 1
        b, s = self._ids.shape
        if (call.shape[0], *call.shape[2:]) != (b, s, s):
            reason = f"attention: a pattern of the shape {call.shape} is none over {s} tokens"
            self.missed(call.layer, reason)
            return
        # A layer that attends several times in one pass has a name for each.
        layer = call.layer if number == 1 else f"{call.layer}#{number}"
        scores = score_heads(call.chunks(), self._ids, self._mask)
        for name in HEAD_SCORES:
            self._found.values[readout_name(layer, f"{PATTERN}_{name}")] = scores[name].cpu()
        if any(each in call.stack for each in self.kept):
            needed = 4 * int(np.prod(call.shape))
            if self._bytes + needed > MOST_PATTERN_BYTES:
                raise MemoryLimitError(
                    call.layer, needed, self._bytes, MOST_PATTERN_BYTES,
                    "Keep the patterns of fewer layers (attention='L3.attn'), or scan fewer tokens "
                    "at once; attention=True keeps the scores of heads alone.",
                )  # fmt: skip
            self._bytes += needed
            self._found.patterns[layer] = call.pattern().float().cpu()

    def routing(self, routing: ExpertRouting) -> None:
        b, s = self._ids.shape
        if len(routing.ids) != b * s:
            count = len(routing.ids)
            self.missed(routing.layer, f"experts: it routes {count} rows where {b * s} tokens are")
            return
        for name in ("ids", "weights", "entropy"):
            values = getattr(routing, name)
            stored = readout_name(routing.layer, f"expert_{name}")
            self._found.values[stored] = values.reshape(b, s, -1).cpu()

    def features(self, name: str, ids: Tensor, values: Tensor) -> None:
        b, s = self._ids.shape
        if ids.shape[:-1].numel() != b * s:
            shape = tuple(ids.shape)
            self.missed(name, f"features: {shape} has not one row for each of {b} x {s} tokens")
            return
        for part, tensor in (("ids", ids), ("values", values)):
            stored = readout_name(name, f"feature_{part}")
            self._found.values[stored] = tensor.reshape(b, s, -1).cpu()


def _array(tensor: Tensor) -> NDArray[Any]:
    """Whole numbers as int32, which vocabularies fit into, all else as float32."""
    dtype = torch.float32 if tensor.is_floating_point() else torch.int32
    return np.ascontiguousarray(tensor.to(dtype).numpy())
