"""The model as a scan sees it: which layers have tokens, and how their units make voxels.

Two short passes of different length, without gradients, tell which axis of each layer's output is
the token axis, and whether its rows are the tokens in their order. What a layer does later is only
looked at where it has the shape expected from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchfmri._model import (
    Pattern,
    each_once,
    find_layers,
    first_names,
    named_layers,
    named_parameters,
    place_table,
    runnable,
    unwrap,
)
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.run.head_outputs import head_outputs
from torchfmri._scan.run.probe import Probe
from torchfmri._scan.run.token_axis import Resolved
from torchfmri._tokens import ParameterInfo, describe, head_size
from torchfmri.exceptions import InspectionError

PLACES = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""What only holds layers or parameters, and is never called."""


@dataclass(frozen=True, eq=False)
class ScannedLayer:
    """One column of a scan.

    Attributes:
        name: The layer.
        index: Its column.
        module: Its module.
        axis: Where its tokens are; None for a module that has a learning cost alone: it is never
            called, though parameters of it are used, or its rows are in another order.
        calls: How often it is called in one pass.
        size: How many units a voxel has.
        voxels: The columns of its voxels of units.
        experts: The columns of its voxels that are experts.
        parameters: Its own, each under its first name.
        is_written: Whether somebody writes into its output after it has returned it, so that a
            reference is of no use.
        of_input: Whether it is the input of the module, and no output: what attention heads wrote.
    """

    name: str
    index: int
    module: nn.Module
    axis: Resolved | None
    calls: int
    size: int
    voxels: slice
    experts: slice
    parameters: tuple[ParameterInfo, ...]
    is_written: bool = False
    of_input: bool = False

    @property
    def is_output(self) -> bool:
        """Whether it is what its module puts out, token by token."""
        return self.axis is not None and not self.of_input


@dataclass(frozen=True, eq=False)
class ScanSubject:
    """What of a model is scanned.

    Attributes:
        model: The module to run.
        layers: In model order.
        anatomy: The same as a record, without the modules.
        missed: Layers that were asked for and are not scanned -> why.
        notes: What has to be known about some layers.
        vocabulary: How many tokens it has embeddings for; None where that is not known.
        first_position: The number that the model by itself gives to the first position.
        longest: How many positions its table of positions has room for; None without a table.
        looks_ahead: Whether its logits at a position depend on the tokens after it.
        order: The layers that are called, in the order in which they finish. That of `layers` is
            the one in which they were registered.
        layouts: Where layers stand side by side, as found out so far: see `layout_of`.
    """

    model: nn.Module
    layers: tuple[ScannedLayer, ...]
    anatomy: Anatomy
    missed: dict[str, str]
    notes: dict[str, str]
    vocabulary: int | None
    first_position: int
    longest: int | None
    looks_ahead: bool
    order: tuple[str, ...] = ()
    layouts: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @cached_property
    def places(self) -> dict[str, Any]:
        """The names of its places, for a stored scan: see `place_table`."""
        return place_table(named_layers(self.model))

    @cached_property
    def parameters(self) -> int:
        """How many numbers can be trained."""
        return sum(each.numel() for each in self.model.parameters())

    def refuse_length(self, length: int) -> None:
        """Raise for more positions than the model has in its table: it would fail far from here."""
        if self.longest is not None and length > self.longest:
            raise InspectionError(
                f"The sequence has {length} positions, and {type(unwrap(self.model)).__name__} has "
                f"a table of {self.longest}. Give a shorter prompt, or fewer max_new_tokens: both "
                f"together may have {self.longest}."
            )


class _Found(NamedTuple):
    """A layer before it has its columns."""

    name: str
    module: nn.Module
    axis: Resolved | None
    calls: int
    own: tuple[ParameterInfo, ...] = ()
    is_written: bool = False
    of_input: bool = False


def find_subject(
    model: nn.Module, pattern: Pattern, ids: Tensor, voxel: int, heads: bool = False
) -> ScanSubject:
    """Run two short passes and say what can be scanned.

    Args:
        model: The model.
        pattern: The layers that are wanted.
        ids: Token ids to run on, of any shape, at least one.
        voxel: How many neighbouring units are one voxel where no head or expert says otherwise.
        heads: Whether what each attention head wrote is a layer too.

    Raises:
        LayerNotFoundError: The pattern matches no layer.
        InspectionError: None of the layers has tokens.
    """
    layers = named_layers(model)
    chosen = {name: layers[name] for name in find_layers(layers, pattern)}
    modules = each_once(chosen)
    head = head_size(getattr(unwrap(model), "config", None))
    inputs = head_outputs(modules, head) if heads else {}
    if heads and not inputs:
        raise InspectionError(
            "heads=True: none of the chosen layers is a Linear called o_proj or out_proj whose "
            "input is made of heads of the size that the configuration names. Choose other layers, "
            "or leave it out."
        )
    probe = Probe(runnable(model), modules, ids, inputs)
    parameters = _own_parameters(layers, head, voxel)
    found, missed, notes = _survey(probe, modules, inputs, parameters)
    if not found:
        reasons = "; ".join(f"{name!r}: {why}" for name, why in list(missed.items())[:3])
        raise InspectionError(f"None of the layers that {pattern!r} matches has tokens. {reasons}")
    missed |= {
        alias: f"it is the same module as {name!r}"
        for alias, name in first_names(chosen).items()
        if alias != name
    }
    anatomy, scanned = _assemble(found, head, voxel)
    return ScanSubject(
        model=runnable(model),
        layers=scanned,
        anatomy=anatomy,
        missed=missed,
        notes=notes,
        vocabulary=probe.vocabulary,
        first_position=probe.first_position,
        longest=probe.longest,
        looks_ahead=probe.looks_ahead,
        order=tuple(each for each in probe.order if each in anatomy.layers),
    )


def _survey(
    probe: Probe,
    modules: Mapping[str, nn.Module],
    inputs: Collection[str],
    parameters: dict[str, list[ParameterInfo]],
) -> tuple[list[_Found], dict[str, str], dict[str, str]]:
    """Return the layers that can be scanned, why others cannot, and notes on some, by name."""
    found: list[_Found] = []
    missed: dict[str, str] = {}
    notes: dict[str, str] = {}
    axes = {name: probe.axis(name) for name in (*modules, *inputs)}
    disordered = probe.disordered({k: v for k, v in axes.items() if isinstance(v, Resolved)})
    for name, module in modules.items():
        own = tuple(parameters.get(name, ()))
        axis, calls = axes[name], probe.calls(name)
        if isinstance(axis, str) or (axis is None and not own):
            if not isinstance(module, PLACES):
                missed[name] = axis if isinstance(axis, str) else "it is never called as a module"
            continue
        if axis is None:
            notes[name] = "it is never called as a module: its learning cost is all there is"
        if name in disordered:
            missed[name], axis = disordered[name], None
            if not own:
                continue
            notes[name] = "its rows are not the tokens: its learning cost is all there is"
        if tied := _tied_elsewhere(name, module, parameters):
            notes[name] = f"{tied}: its learning cost stands there"
        if calls > 1 and axis is not None:
            notes[name] = f"it is called {calls} times per pass: values are over all calls"
        found.append(_Found(name, module, axis, calls, own, is_written=name in probe.written))
        source = f"{name}.input"
        given = axes.get(source)
        if isinstance(given, Resolved) and source not in disordered:
            found.append(_Found(source, module, given, probe.calls(source), of_input=True))
        elif source in inputs:
            missed[source] = disordered.get(source) or str(given or "it is never called")
    return found, missed, notes


def _assemble(
    found: list[_Found], head: int | None, voxel: int
) -> tuple[Anatomy, tuple[ScannedLayer, ...]]:
    """The layers with their columns, as a record and with their modules."""
    cuts = [
        (each.axis.width, head, "head")
        if each.of_input and each.axis is not None and head
        else _voxels_of(each.name, each.axis, each.own, head, voxel)
        for each in found
    ]
    widths, sizes, kinds = zip(*cuts, strict=True)
    experts = [max((_experts(info) for info in each.own), default=0) for each in found]
    names = [each.name for each in found]
    types = ["HeadOutputs" if each.of_input else type(each.module).__name__ for each in found]
    anatomy = Anatomy.of_widths(names, types, widths, sizes, kinds, experts)
    layers = []
    for index, each in enumerate(found):
        columns = anatomy.voxels_of(each.name)
        middle = columns.stop - experts[index]
        voxels, rows = slice(columns.start, middle), slice(middle, columns.stop)
        layers.append(
            ScannedLayer(
                name=each.name,
                index=index,
                module=each.module,
                axis=each.axis,
                calls=each.calls,
                size=sizes[index],
                voxels=voxels,
                experts=rows,
                parameters=each.own,
                is_written=each.is_written,
                of_input=each.of_input,
            )
        )
    return anatomy, tuple(layers)


def _voxels_of(
    name: str, axis: Resolved | None, own: tuple[ParameterInfo, ...], head: int | None, voxel: int
) -> tuple[int, int, str]:
    """Units, units in a voxel, and what a voxel is."""
    sizes = [info for info in own if info.output.last - info.output.first == 1]
    if axis is None:
        if not sizes:
            return 0, voxel, "units"
        widest = max(sizes, key=lambda info: info.output.length(info.shape))
        return widest.output.length(widest.shape), widest.voxel, "units"
    width = axis.width
    if head and len(axis.inside) == 2 and head in axis.inside[-1:]:
        return width, head, "head"  # (heads, d): norms of queries and keys
    for info in sizes:
        if info.output.length(info.shape) == width:
            same = head is not None and info.voxel == head and head != min(voxel, width)
            return width, info.voxel, "head" if same or _is_projection(name) else "units"
    return width, min(voxel, width), "units"


def _is_projection(name: str) -> bool:
    last = name.rpartition(".")[2].lower()
    return last in ("q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v")


def _experts(info: ParameterInfo) -> int:
    """How many experts a parameter holds as rows."""
    return info.shape[info.output.first] if info.output.last - info.output.first == 2 else 0


def _own_parameters(
    layers: dict[str, nn.Module], head: int | None, voxel: int
) -> dict[str, list[ParameterInfo]]:
    """Layer -> its own parameters; a tied one belongs to the layer that has it first."""
    found: dict[str, list[ParameterInfo]] = defaultdict(list)
    for name, parameter in each_once(named_parameters(layers)).items():
        if parameter.is_floating_point():
            layer = name.rpartition(".")[0]
            found[layer].append(describe(name, layers[layer], parameter, head, voxel))
    return found


def _tied_elsewhere(
    layer: str, module: nn.Module, parameters: dict[str, list[ParameterInfo]]
) -> str:
    """Which of a module's parameters belong to another layer, in words; "" for none."""
    own = {info.key for info in parameters.get(layer, ())}
    tied = [
        key for key, each in module._parameters.items()
        if each is not None and each.is_floating_point() and key not in own
    ]  # fmt: skip
    return f"its {' and '.join(tied)} is shared with an earlier layer" if tied else ""
