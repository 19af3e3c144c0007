"""Gradients as they would be while generating: one token at a time, the cache held constant.

`per="cached"`. Each position's own loss is differentiated through that position alone: what the
earlier tokens left in the KV cache is a constant. These gradients do not add up to `.grad`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfmri._model import compiled_code_as_eager, unwrap
from torchfmri._scan.run.gradient_pass import (
    PassSink,
    backward,
    token_gradients_of,
    trainable,
)
from torchfmri._scan.run.learning_costs import read_costs
from torchfmri._scan.run.mean_vectors import VectorPlan
from torchfmri._scan.run.model_call import logits_of, needed_positions, takes
from torchfmri._scan.run.scan_loss import IGNORED, ScanLoss, position_has_loss
from torchfmri._scan.run.scan_pass import ScanPass, Sequences
from torchfmri._scan.run.subject import ScanSubject
from torchfmri._scan.run.surprisal import surprisal_and_entropy
from torchfmri.exceptions import InspectionError


def run_cached(
    subject: ScanSubject,
    sequences: Sequences,
    loss: ScanLoss,
    *,
    voxel: int,
    tensors: frozenset[str] = frozenset(),
    vectors: VectorPlan | None = None,
) -> ScanPass:
    """Run the sequences token by token with a cache, each step with its own backward pass.

    Raises:
        InspectionError: The model has no KV cache, or the loss is not one per token.
    """
    model = subject.model
    check_cached(model, loss)
    b, s = sequences.ids.shape
    sink = PassSink(subject, sequences, loss, tensors=tensors, vectors=vectors, own_step=True)
    found = sink.found
    found.notes.append(
        "per='cached' holds the KV cache constant: these gradients do not add up to .grad"
    )
    counts = position_has_loss(loss, sequences.ids, sequences.mask, sequences.generated)
    first = int(counts.any(0).nonzero()[0]) if bool(counts.any()) else s - 1
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiled_code_as_eager())
        parameters = stack.enter_context(trainable(model))
        taps = stack.enter_context(sink.attached())
        steps = _Steps(model, sequences, sink, found)
        if first > 0:
            with torch.no_grad():
                steps.run(0, first)
        tokens = token_gradients_of(model, parameters, voxel, found)
        if tokens is not None:
            stack.enter_context(tokens)
        stack.enter_context(torch.enable_grad())
        for position in range(first, s - 1):
            taps.next_step()
            logits = steps.run(position, 1)
            labels = sequences.ids[:, position + 1].masked_fill(~counts[:, position], IGNORED)
            losses = F.cross_entropy(
                _wide(logits[:, -1]), labels, ignore_index=IGNORED, reduction="sum"
            )
            backward(losses, model)
            steps.detach()
        taps.next_step()
        with torch.no_grad():
            steps.run(s - 1, 1)
    if tokens is not None and s - 1 > first:
        count = s - 1 - first

        def arrange(own: Tensor) -> Tensor | None:
            if own.shape[:2] != (count * b, 1):
                return None
            placed = own.new_full((b, s, own.shape[-1]), torch.nan)
            placed[:, first : s - 1] = own.view(count, b, -1).transpose(0, 1)
            return placed

        read_costs(found, subject, tokens, arrange)
    return found


def check_cached(model: nn.Module, loss: ScanLoss) -> None:
    """Raise where gradients with a constant cache cannot be computed.

    Raises:
        InspectionError: Naming what stands in the way.
    """
    if loss.own is not None:
        raise InspectionError(
            "per='cached' differentiates each token's own loss at its own step, so it has no use "
            "for a loss of your own. Use per='position'."
        )
    kind = type(unwrap(model)).__name__
    if not loss.causal:
        raise InspectionError(
            f"{kind} is not a causal language model: per='cached' needs one that writes token by "
            "token. Use per='position'."
        )
    if not takes(model, "past_key_values"):
        raise InspectionError(
            f"{kind} takes no past_key_values: it has no KV cache to hold constant "
            "(a recurrent state is updated in place and cannot be differentiated step by step). "
            "Use per='position'."
        )


class _Steps:
    """The model run step by step into one cache of its own."""

    def __init__(
        self, model: nn.Module, sequences: Sequences, sink: PassSink, found: ScanPass
    ) -> None:
        self._model, self._sequences, self._sink, self._found = model, sequences, sink, found
        self._positions = needed_positions(model, sequences.mask, sequences.positions)
        self._cache: Any = None
        self._last: Tensor | None = None
        self._is_constant = False  # whether the cache was seen to hold nothing but constants
        shape = sequences.ids.shape
        device = sequences.ids.device
        found.surprisal = torch.full(shape, torch.nan, device=device)
        found.entropy = torch.full(shape, torch.nan, device=device)

    def run(self, first: int, count: int) -> Tensor:
        """The logits of these positions, which are then in the cache."""
        self._sink.window(first, count)
        where = slice(first, first + count)
        ids = self._sequences.ids[:, where]
        keywords: dict[str, Any] = {"past_key_values": self._cache, "use_cache": True}
        if takes(self._model, "output_router_logits"):
            keywords["output_router_logits"] = False  # its loss does not know of a cache
        if takes(self._model, "attention_mask"):
            keywords["attention_mask"] = self._sequences.mask[:, : first + count]
        if self._positions is not None and takes(self._model, "position_ids"):
            keywords["position_ids"] = self._positions[:, where]
        output = self._model(input_ids=ids, **keywords)
        logits = logits_of(output)
        if logits is None:
            raise InspectionError("The model returned no logits for token ids.")
        self._cache = getattr(output, "past_key_values", None)
        if not _is_key_value(self._cache):
            raise self._refusal()
        self._read(logits.detach(), first, count)
        return logits

    def _refusal(self) -> InspectionError:
        kind, name = type(self._cache).__name__, type(unwrap(self._model)).__name__
        what = f"that of {name} is a {kind}, whose state is recurrent or unknown"
        return InspectionError(
            "per='cached' holds the KV cache constant step by step, and "
            f"{f'{name} returns none' if self._cache is None else what}. Use per='position'."
        )

    def _read(self, logits: Tensor, first: int, count: int) -> None:
        before = (
            logits[:, :-1] if self._last is None else torch.cat([self._last, logits[:, :-1]], 1)
        )
        self._last = logits[:, -1:]
        if not before.shape[1]:
            return
        where = slice(first + count - before.shape[1], first + count)
        surprisal, entropy = surprisal_and_entropy(before, self._sequences.ids[:, where])
        assert self._found.surprisal is not None
        assert self._found.entropy is not None
        self._found.surprisal[:, where], self._found.entropy[:, where] = surprisal, entropy

    def detach(self) -> None:
        """Make what is in the cache a constant for the steps that follow."""
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        if not self._is_constant:
            if _has_graph(self._cache):
                raise self._refusal()
            self._is_constant = True


def _is_key_value(cache: Any) -> bool:
    """Whether a cache holds keys and values and nothing else."""
    layers: list[Any] = getattr(cache, "layers", None) or []
    return bool(layers) and all(
        isinstance(getattr(each, "keys", None), Tensor)
        and isinstance(getattr(each, "values", None), Tensor)
        and not hasattr(each, "recurrent_states")
        and not hasattr(each, "conv_states")
        for each in layers
    )


def _has_graph(cache: Any) -> bool:
    """Whether something in a cache can still be differentiated: a state beside keys and values."""
    held = [value for owner in (cache, *cache.layers) for value in vars(owner).values()]
    parts = [each for value in held for each in (value if isinstance(value, list) else [value])]
    return any(isinstance(each, Tensor) and each.requires_grad for each in parts)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
