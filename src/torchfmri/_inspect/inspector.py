"""The Inspector: name layers, run once, read what happened inside.

It is the public door of this room, and compare uses it too. The order in `run_inspection` and
`_attached` matters: first the turn and the hooks, then the state that is put back, then copies of
the data, so that an error or Ctrl-C at any point leaves the model as it was. Padding attaches last,
so that its hooks run around those of the taps. Names of methods and options are fixed by the
documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_module
from torchfmri._capture import Padding, Taps, Target, masked_modules
from torchfmri._diagnosis import Diagnosis, diagnose_inspection
from torchfmri._edit import Spec, attached, bind_edits, require_acted
from torchfmri._inspect.attention import attention_layers, recorded_attention
from torchfmri._inspect.recorder import Keep, Recorder, WatchedLayer
from torchfmri._model import (
    Loss,
    Pattern,
    arguments_for,
    check_differentiable,
    compiled_code_as_eager,
    copy_of_data,
    find_layers,
    input_layers,
    leaf_layers,
    loss_of,
    named_layers,
    not_found,
    own_turn,
    parse_place,
    run_backward,
    runnable,
    switched_off,
    thawed,
    unchanged,
    unwrap,
    watched,
)
from torchfmri._records import BACKWARD_WHAT, Inspection, Record, check_per, check_what
from torchfmri._text import plural
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_OF_INPUTS = {"activations": "inputs", "gradients": "input_gradients"}


class Inspector:
    """Shows what happens inside a model; the model itself stays as it is.

    Args:
        model: Any `nn.Module`, also wrapped (DDP, `torch.compile`, FSDP, PEFT).
        keep: `"statistics"` (default) or `"tensors"`: what inspections keep of each tensor.
        max_bytes: The most bytes of tensors to keep; beyond it an error names the layer.
        device: Where to keep tensors; by default they stay where they are.
        dtype: What to keep floating-point tensors as; as they are by default.

    Examples:
        >>> import torch
        >>> from torch import Tensor, nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> inspector = Inspector(model)
        >>> inspector.watch("*", what=["activations", "gradients"])
        ['0', '1', '2']
        >>> inspection = inspector.run_inspection(torch.randn(16, 4), loss="sum")
        >>> inspector.get_statistics("1")["count"]
        128
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        keep: str = "statistics",
        max_bytes: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_module("model", model)
        self.model = model
        self._keep = Keep(keep, max_bytes, device, dtype)
        self._watches: dict[str, set[str]] = {}
        self._per_channel: set[str] = set()
        self._edits: dict[str, Spec] = {}
        self._inspection: Inspection | None = None
        self._recording = False

    def __repr__(self) -> str:
        count = len(self._watches)
        layers = plural(count, "layer") if count else "nothing"
        watched = f"{layers} watched" + ("" if count else ": all leaf layers")
        return f"<Inspector of {type(unwrap(self.model)).__name__}: {watched}>"

    # -- choosing layers ---------------------------------------------------------------------

    def layers(self, pattern: Pattern = "*", exclude: Pattern | None = None) -> list[str]:
        """Return the names of the layers that match, in model order.

        Args:
            pattern: A shell-style pattern over the whole name (`*` crosses dots, a leading `*.`
                may match nothing, `?`, `[0-3]`, `{q,k,v}_proj`), a module type, or a list of
                these. `""` is the model itself. `L3`, `L3.mlp`, `L3H2`, `layers.3.self_attn` and
                names of TransformerLens stand for the layer at which the place is.
            exclude: Leave these out.

        Raises:
            LayerNotFoundError: Nothing matches; the error names the nearest layers.
        """
        layers = named_layers(self.model)
        return find_layers(layers, pattern, exclude, hint="inspector.layers()", whole=False)

    def watch(
        self,
        pattern: Pattern = "*",
        what: str | Sequence[str] = "activations",
        *,
        exclude: Pattern | None = None,
        per: str | None = None,
    ) -> list[str]:
        """Watch more layers, or more of the same layers; returns the names that matched.

        Args:
            pattern: Which layers, as for `layers`. For `blocks.3.hook_resid_pre` and other names of
                what a layer takes, its inputs and input gradients are watched. Single heads are
                refused: layers are watched whole.
            what: One or several of inputs, activations, gradients (dL/d output), input_gradients
                (through that call only), parameters, parameter_gradients, attention (patterns
                (b, heads, q, k), of the layers that compute attention).
            exclude: Leave these out.
            per: `"channel"` to also take statistics per unit (channel or feature).

        Raises:
            LayerNotFoundError: Nothing matches.
            InspectionError: `what` or `per` is none of the above.
        """
        wanted = _check_whats(what)
        check_per(per)
        layers = named_layers(self.model)
        names = input_layers(layers, pattern) if exclude is None else []
        if names:  # `blocks.3.hook_resid_pre` and the like are what a layer takes
            wanted = [_OF_INPUTS.get(each, each) for each in wanted]
        elif wanted == ["attention"]:
            names = attention_layers(self.model, pattern) or []
        names = names or find_layers(layers, pattern, exclude, hint="inspector.layers()")
        for name in names:
            self._watches.setdefault(name, set()).update(wanted)
        if per:
            self._per_channel.update(names)
        return names

    def unwatch(self, pattern: Pattern = "*", what: str | Sequence[str] | None = None) -> list[str]:
        """Stop watching layers, or only `what` of them; returns the names that matched.

        Raises:
            LayerNotFoundError: No layer matches.
        """
        unwanted = None if what is None else set(_check_whats(what))
        names = self.layers(pattern)
        for name in names:
            left = set() if unwanted is None else self._watches.get(name, set()) - unwanted
            if left:
                self._watches[name] = left
            else:
                self._watches.pop(name, None)
                self._per_channel.discard(name)
        return names

    @property
    def watched(self) -> dict[str, tuple[str, ...]]:
        """What is watched: layer -> what."""
        return {name: tuple(sorted(what)) for name, what in self._watches.items()}

    # -- editing -----------------------------------------------------------------------------

    def edit(self, place: str, edit: Spec) -> None:
        """Change activations in everything that this inspector runs or records.

        What is watched is what the edited model does. `torchfmri.edited` does the same for a block.

        Args:
            place: A layer or pattern, a head (`L9H6`), or a name of TransformerLens.
            edit: An `Edit`, `"zero"`, a tensor to put there, or a function of the value.

        Raises:
            LayerNotFoundError: Nothing matches.
            InspectionError: The place or the edit cannot be had, or it meets another edit.
        """
        edits = {**self._edits, place: edit}
        bind_edits(self.model, edits)
        self._edits = edits

    def unedit(self, place: str | None = None) -> None:
        """Take back the edit of a place, or all edits.

        Raises:
            LayerNotFoundError: There is no edit of that place.
        """
        if place is not None and place not in self._edits:
            raise not_found(place, self._edits, "inspector.edits", "edit")
        kept = {name: each for name, each in self._edits.items() if name != place}
        self._edits = {} if place is None else kept

    @property
    def edits(self) -> dict[str, Spec]:
        """The edits: place -> edit."""
        return dict(self._edits)

    # -- running -----------------------------------------------------------------------------

    def run_inspection(
        self, data: Any, *, target: Any = None, loss: Loss = None, **keep: Any
    ) -> Inspection:
        """Run the model once on `data`, and back if gradients are watched; leave no trace.

        `.grad`, buffers, modes, random state, the data and the compiler's stance are afterwards
        as before, also when the model raises. Nothing watched yet: all leaf layers.

        Args:
            data: A tensor, a tuple of positional arguments, or a dict (or BatchEncoding) of
                keyword arguments.
            target: Handed to the loss as its second argument.
            loss: A loss module or function of the output (and of the target); `"sum"` for the sum
                of the first output. By default the output's own `.loss`, or a scalar output.
            **keep: `keep`, `max_bytes`, `device`, `dtype`, for this run only.

        Raises:
            InspectionError: Gradients are watched and there is no loss, or nothing requires grad.
        """
        arguments, keywords = arguments_for(self.model, data)
        with ExitStack() as stack:
            stack.enter_context(own_turn())
            recorder = stack.enter_context(self._attached(keep, alone=True))
            if recorder is None:
                return self.inspection
            backward = any(each in BACKWARD_WHAT for each in self._wanted())
            if backward and not torch.is_grad_enabled():
                raise InspectionError(
                    "Gradients are watched, but grad mode is off here. Leave torch.no_grad() or "
                    "torch.inference_mode(), or watch activations only."
                )
            model = runnable(self.model)
            stack.enter_context(unchanged(self.model, partial(_note_written, recorder)))
            arguments, keywords = copy_of_data(arguments), copy_of_data(dict(keywords))
            if backward:
                note = partial(recorder.noted, "")
                stack.enter_context(thawed(model, (arguments, keywords), note))
            _note_tokens(self.inspection, arguments, keywords)
            output = model(*arguments, **keywords)
            value = loss_of(output, target, loss)
            if backward:
                value = check_differentiable(value)
            if value is not None:
                self.inspection.loss = float(value.detach())
            if backward and value is not None:
                run_backward(value, model.parameters())
        return self.inspection

    @contextmanager
    def recording(self, **keep: Any) -> Iterator[Inspection]:
        """Watch your own forward and backward passes: `with inspector.recording() as inspection:`.

        The inspection fills while the block runs; the hooks go when it ends, however it ends.

        Args:
            **keep: `keep`, `max_bytes`, `device`, `dtype`, for this recording only.
        """
        with self._attached(keep):
            yield self.inspection

    @contextmanager
    def _attached(self, keep: Mapping[str, Any], alone: bool = False) -> Iterator[Recorder | None]:
        """Attach everything and start a fresh inspection; undo it all afterwards."""
        options = _replace(self._keep, keep)
        if self._recording:
            raise InspectionError(
                "This inspector is already recording. End that block first, or use a second "
                "Inspector(model) beside it."
            )
        targets, sinks, inspection = self._plan()
        self._inspection = inspection
        if switched_off():
            inspection.missing = dict.fromkeys(inspection, "TORCHFMRI=off: nothing is attached")
            yield None
            return
        masked = masked_modules(self.model.modules())
        padding = Padding(masked, lambda error: recorder.failed("", error, False))
        recorder = Recorder(inspection, sinks, options, padding)
        with watched(self.model, alone=alone):
            self._recording = True
            try:
                with (
                    compiled_code_as_eager(),
                    self._edited(),
                    Taps(targets, recorder),
                    recorded_attention(self.model, sinks, recorder),
                ):
                    padding.attach()
                    yield recorder
                if recorder.error is not None:
                    raise recorder.error
            finally:
                padding.detach()
                self._recording = False
                recorder.finish()

    @contextmanager
    def _edited(self) -> Iterator[None]:
        """Attach the edits while the block runs."""
        if not self._edits:
            yield
            return
        bound, passes = bind_edits(self.model, self._edits)
        with attached(self.model, bound, passes, {}):
            yield
        require_acted(bound)

    def _plan(self) -> tuple[list[Target], dict[str, WatchedLayer], Inspection]:
        """Return what to tap, once per module instance, and the empty records to fill."""
        layers = named_layers(self.model)
        watches = self._watches or {name: {"activations"} for name in leaf_layers(layers)}
        gone = [name for name in watches if name not in layers]
        if gone:
            raise InspectionError(
                f"Watched layers are no longer in the model: {', '.join(map(repr, gone))}. "
                "Make a new Inspector(model)."
            )
        names: dict[int, list[str]] = {}
        for name in layers:
            if name in watches:
                names.setdefault(id(layers[name]), []).append(name)
        targets, sinks, records = [], {}, {}
        for shared in names.values():
            first, module = shared[0], layers[shared[0]]
            what = frozenset().union(*(watches[name] for name in shared))
            record = Record(first, type(module).__name__, what)
            record.names = tuple(shared)
            targets.append(Target(first, module, what))
            channels = any(name in self._per_channel for name in shared)
            sinks[first] = WatchedLayer(record, module, what, channels)
            records.update(dict.fromkeys(shared, record))
        ordered = {name: records[name] for name in layers if name in records}
        return targets, sinks, Inspection(type(unwrap(self.model)).__name__, ordered)

    def _wanted(self) -> set[str]:
        return {each for record in self.inspection.values() for each in record.what}

    # -- reading -----------------------------------------------------------------------------

    @property
    def inspection(self) -> Inspection:
        """The latest inspection.

        Raises:
            InspectionError: There is none yet.
        """
        if self._inspection is None:
            raise InspectionError("Nothing was inspected yet. Call inspector.run_inspection(data).")
        return self._inspection

    def diagnose(self) -> Diagnosis:
        """Return what the latest inspection shows to be wrong; print it to read it.

        Only what was watched is judged: activations for sizes and dead layers, gradients and
        parameter_gradients for what vanishes. `torchfmri.diagnose` trains a copy and sees more.

        Raises:
            InspectionError: Nothing was inspected yet.
        """
        return diagnose_inspection(self.inspection, self.model)

    @property
    def captured_data(self) -> dict[str, dict[str, Any]]:
        """The captured tensors: layer -> what -> tensor (a list where called several times).

        Parameters and their gradients are dicts by name. The whole story, with every call and
        every element, is in `inspection`.

        Raises:
            InspectionError: Only statistics were kept, or nothing was inspected yet.
        """
        return {
            layer: {what: record.tensors(what) for what in record.what}
            for layer, record in self.inspection.items()
            if record.calls or not set(record.what) - {"parameters", "parameter_gradients"}
        }

    def get_statistics(
        self,
        layer: Pattern | None = None,
        what: str | None = None,
        *,
        layer_name: Pattern | None = None,
        **options: Any,
    ) -> Any:
        """Return the statistics of one layer in the latest inspection, merged over its calls.

        A wildcard, a list or a module type gives a dict: layer -> statistics, in model order.
        Layers of which nothing was captured are left out; `inspection.missing` says why.

        Args:
            layer: The layer's name, or a pattern as for `layers`.
            what: What to describe; activations by default, or the first thing watched.
            layer_name: Another word for `layer`.
            **options: `element`, `call` and `per` of `Record.statistics`.

        Raises:
            LayerNotFoundError: The layer was not inspected.
            InspectionError: Nothing of it was captured; the reason is in the message.
        """
        if (layer is None) == (layer_name is None):
            raise InspectionError(
                "get_statistics takes the name of a layer: get_statistics('fc1'), or "
                f"layer_name='fc1'; it was given layer={layer!r} and layer_name={layer_name!r}."
            )
        wanted = layer_name if layer is None else layer
        if isinstance(wanted, str) and wanted not in self.inspection and parse_place(wanted):
            wanted = self.layers(wanted)
            wanted = wanted[0] if len(wanted) == 1 else wanted
        if isinstance(wanted, str) and (wanted in self.inspection or not set("*?[{") & {*wanted}):
            return self._statistics_of(wanted, what, options)
        names = self.layers(wanted)  # type: ignore[arg-type]
        return self._statistics_of_several(names, what, options)

    def _statistics_of(self, layer: str, what: str | None, options: dict[str, Any]) -> Any:
        if layer not in self.inspection and layer in named_layers(self.model):
            raise InspectionError(
                f"{layer!r} was not watched in the latest run. Write "
                f"inspector.watch({layer!r}) and run again."
            )
        return self.inspection.statistics(layer, what, **options)

    def _statistics_of_several(
        self, names: list[str], what: str | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        records = {name: self.inspection[name] for name in names if name in self.inspection}
        found = {
            name: statistics
            for name, record in records.items()
            if what in (None, *record.what)
            and (statistics := record.statistics(what, **options)) is not None
        }
        # Where there is nothing at all, the first layer's own error says what to do.
        return found or {names[0]: self._statistics_of(names[0], what, options)}

    # -- looking -----------------------------------------------------------------------------

    def plot_histogram(self, layer: str, what: str | None = None, **options: Any) -> Axes:
        """Draw the distribution of one layer's values; see `torchfmri.visualization.plots`."""
        return plots.plot_histogram(self.inspection, layer, what, **options)

    def plot_statistics(self, what: str = "activations", **options: Any) -> Axes:
        """Draw statistics over depth; see `torchfmri.visualization.plots`."""
        return plots.plot_statistics(self.inspection, what, **options)

    def plot_feature_maps(self, layer: str, sample: int = 0, **options: Any) -> Axes:
        """Draw the channels of one sample as images; needs keep="tensors"."""
        return plots.plot_feature_maps(self.inspection, layer, sample, **options)

    def plot_compare(self, a: Inspection, b: Inspection, **options: Any) -> Axes:
        """Draw two inspections side by side; see `torchfmri.visualization.plots`."""
        return plots.plot_compare(a, b, **options)


def _note_written(recorder: Recorder, name: str) -> None:
    recorder.noted(
        name.rpartition(".")[0],
        "its forward pass writes into its own parameters: those changes stay",
    )


def _note_tokens(
    inspection: Inspection, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> None:
    """Keep which tokens the model was given, so that another run can be compared with this one."""
    ids = keywords.get("input_ids", arguments[0] if arguments else None)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        return
    inspection.token_ids = ids.detach().to("cpu", copy=True)
    mask = keywords.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        inspection.kept = mask.detach().cpu() != 0


def _check_whats(what: str | Sequence[str]) -> list[str]:
    if not isinstance(what, str) and not (isinstance(what, (list, tuple, set)) and what):
        raise InspectionError(f"what={what!r} watches nothing. Write what='activations' or a list.")
    return [check_what(each) for each in ([what] if isinstance(what, str) else what)]


def _replace(keep: Keep, options: Mapping[str, Any]) -> Keep:
    known = set(Keep.__dataclass_fields__)
    for name in options:
        if name not in known:
            raise TypeError(f"Unexpected argument {name!r}: there are {', '.join(sorted(known))}.")
    return replace(keep, **options)
