"""Attention patterns for a recording: each goes to the innermost watched layer that was running.

The Inspector enters `recorded_attention` beside its taps. How a pattern is read where it is
computed is known by `_attention`; here it is only named and handed to the `Recorder`. Room is asked
for before a pattern is computed, because a pattern grows with the square of the length. A layer
without a pattern is told why. The reasons may be reworded freely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from torchfmri._attention import AttentionCall, AttentionReader
from torchfmri._capture import CallKey
from torchfmri._inspect.recorder import Recorder, WatchedLayer
from torchfmri._model import Pattern, match_names, named_layers, places_of, unwrap
from torchfmri._torch import Element
from torchfmri.exceptions import InspectionError

_READABLE = ("eager", "sdpa", None)
_DROPOUT = "the pattern is that before dropout"


@contextmanager
def recorded_attention(
    model: nn.Module, watched: Mapping[str, WatchedLayer], recorder: Recorder
) -> Iterator[None]:
    """Record the attention of the layers for which it is watched, while the block runs."""
    if not any("attention" in each.what for each in watched.values()):
        yield
        return
    recording = AttentionRecording(model, watched, recorder)
    with recording:
        yield
    recording.finish()


def attention_layers(model: nn.Module, pattern: Pattern) -> list[str] | None:
    """Return the layers whose patterns a name such as `blocks.3.attn.hook_pattern` stands for.

    None for all else, patterns over layers among them.

    Raises:
        InspectionError: The name is known, and the place is not in this model; or it is one head.
    """
    layers = named_layers(model)
    if not isinstance(pattern, str) or match_names(pattern, [name for name in layers if name]):
        return None
    places = [each for each in places_of(layers, pattern) if each.what == "attention"]
    if heads := [each.name for each in places if each.head is not None]:
        raise InspectionError(
            f"{heads[0]!r} is one head, and all heads of a layer are kept together: (b, heads, q, "
            f"k). Watch {places[0].layer!r}, and read head {places[0].head} of its pattern."
        )
    return [each.layer for each in places] or None


class AttentionRecording(AttentionReader):
    """Hands the patterns of a model to a recorder while its block runs.

    Args:
        model: The model.
        watched: The layers of the recording by name; those with `what="attention"` take part.
        recorder: The recorder that keeps the patterns.
    """

    def __init__(
        self, model: nn.Module, watched: Mapping[str, WatchedLayer], recorder: Recorder
    ) -> None:
        self._names = [name for name, each in watched.items() if "attention" in each.what]
        self._recorder, self._config = recorder, getattr(unwrap(model), "config", None)
        self._seen: dict[CallKey, list[str]] = {}
        super().__init__(model, self._keep, self._fail)

    def _keep(self, call: AttentionCall) -> None:
        """Hand a pattern to the recorder, under the innermost watched layer that is running."""
        layer = next((each for each in reversed(call.stack) if each in self._names), None)
        if layer is None:
            return
        key = CallKey(layer, self.running.calls[layer] - 1)
        # Where the layer that is watched holds the one that attends: how that is called in it.
        path = call.layer[len(layer) :].removeprefix(".")
        paths = self._seen.setdefault(key, [])
        if path in paths:
            path = f"{path}#{sum(each.partition('#')[0] == path for each in paths) + 1}"
        paths.append(path)
        if call.dropout:
            self._recorder.noted(layer, _DROPOUT)
        self._recorder.check_room(layer, call.bytes)  # before the pattern is computed
        self._recorder.attention(key, Element(path, call.pattern()))

    def _fail(self, layer: str, error: Exception) -> None:
        inside = [each for each in self._names if layer == each or layer.startswith(f"{each}.")]
        self._recorder.failed(max(inside, key=len, default=layer), error, backward=False)

    def finish(self) -> None:
        """Say for which layers no attention was seen, and why."""
        found = {key.layer for key in self._seen}
        for layer in [each for each in self._names if each not in found]:
            self._recorder.missed(layer, "attention", self._reason(layer, found))

    def _reason(self, layer: str, found: set[str]) -> str:
        above = f"{layer}." if layer else ""
        if any(each.startswith(above) for each in found):
            return "it stands under the watched layers inside this one"
        unread = [each for each in self.unread if each == layer or each.startswith(above)]
        if unread:
            return self.unread[unread[0]]
        implementation: Any = getattr(self._config, "_attn_implementation", None)
        if implementation not in _READABLE:
            return (
                f"the model computes it by {implementation!r}, which cannot be read: call "
                "model.set_attn_implementation('sdpa') or load it with attn_implementation='sdpa'"
            )
        if found:
            return "none is computed in it"
        return (
            "none was computed: no scaled_dot_product_attention ran, and no softmax that is "
            "multiplied with values"
        )
