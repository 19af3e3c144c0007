"""The result of `torchfmri.cost`: what each layer of a model costs.

`cost_run` fills it. `Cost` and `LayerCost` are public: attributes and `to_dict` must stay, the
table may be changed freely. A layer's cost includes the layers inside it; its `own` cost does not,
and only own costs add up to the total.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torchfmri._capture import LOSS
from torchfmri._cost.growth import Growth
from torchfmri._model import not_found
from torchfmri._text import Column, Grid, bytes_text, flops_text, layer_label, seconds_text, star

_LINES_BEFORE_FOLDING = 40


@dataclass(frozen=True)
class LayerCost:
    """The cost of a layer with everything inside it; `own` leaves out the layers inside.

    Attributes:
        layer: The name of the layer.
        kind: The class of the module.
        calls: How often it was called.
        forward_flops: FLOPs of matrix products, convolutions, attention and recurrent cells.
        backward_flops: FLOPs of the backward pass, with what a checkpoint computes again.
        parameter_bytes: Bytes of parameters, each counted for the first layer that holds it.
        activation_bytes: Bytes of outputs; a storage counts for the first layer that returns it.
        gradient_bytes: Bytes of the parameter gradients that arrive.
        saved_bytes: Bytes kept for backward; a storage counts for the first layer that saved it.
        forward_seconds: Seconds of the forward pass; NaN if time was not measured.
        backward_seconds: Seconds of the backward pass; NaN if time was not measured.
        own: The cost without the layers inside; None if there are none.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh())
        >>> layer = torchfmri.cost(model, torch.randn(16, 8), rounds=0)["0"]
        >>> layer.forward_flops, layer.parameter_bytes
        (1024, 144)
    """

    layer: str
    kind: str
    calls: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    gradient_bytes: int = 0
    saved_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    own: LayerCost | None = field(default=None, repr=False, compare=False)

    @property
    def flops(self) -> int:
        """FLOPs of the forward and backward pass together."""
        return self.forward_flops + self.backward_flops

    @property
    def seconds(self) -> float:
        """Seconds of the forward and backward pass together."""
        return self.forward_seconds + self.backward_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers; `own` holds them without the layers inside."""
        data = {name: getattr(self, name) for name in ("kind", "calls", *ADDABLE)}
        if self.own is not None:
            data["own"] = {name: getattr(self.own, name) for name in ADDABLE}
        return data


ADDABLE = tuple(
    each.name for each in fields(LayerCost) if each.name not in ("layer", "kind", "calls", "own")
)
"""What adds up over layers."""


def add_costs(costs: list[LayerCost], layer: str, kind: str, calls: int) -> LayerCost:
    """Return the sum of several costs, under one name."""
    sums = {name: sum(getattr(each, name) for each in costs) for name in ADDABLE}
    return LayerCost(layer, kind, calls, **sums)


@dataclass(frozen=True)
class Cost(Mapping[str, LayerCost]):
    """The cost of a model on its data, per layer and in total.

    It maps each layer to its `LayerCost`, which includes everything inside the layer. `""` is the
    model, and `"(loss)"` is what runs outside it. All `own` values add up to `total`.

    Attributes:
        model: The class of the model.
        device: The device it ran on.
        layers: Layer -> cost.
        total: The cost of the model and the loss together.
        buffer_bytes: Bytes of the model's buffers.
        data_bytes: Bytes of data and target.
        retained_bytes: Bytes alive between forward and backward, beyond parameters, buffers and
            data. They equal the saved bytes, unless something else keeps memory too.
        peak_bytes: The most bytes alive at once during forward and backward: parameters, buffers,
            data, gradients and everything computed. It counts tensors; on CUDA it also counts
            what kernels take for themselves inside an operation.
        peak_place: Phase and layer of the peak.
        plain_seconds: Seconds of a step that was not watched; NaN if time was not measured.
        growth: The laws of how cost grows with the size of the data, if you gave `sizes`.
        notes: What the reader should know.

    Examples:
        >>> import torch, torchfmri
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> cost = torchfmri.cost(model, torch.randn(16, 8), loss="sum")
        >>> cost.total.forward_flops == 2 * 16 * (8 * 4 + 4 * 2)
        True
        >>> cost["1"].saved_bytes == 16 * 4 * 4  # ReLU keeps its output
        True
    """

    model: str
    device: str
    layers: dict[str, LayerCost]
    total: LayerCost
    buffer_bytes: int = 0
    data_bytes: int = 0
    retained_bytes: int = 0
    peak_bytes: int = 0
    peak_place: tuple[str, str] = ("", "")
    plain_seconds: float = math.nan
    growth: Growth | None = None
    notes: tuple[str, ...] = ()

    def __getitem__(self, layer: str) -> LayerCost:
        if layer not in self.layers:
            raise not_found(layer, filter(None, self.layers), "list(cost.layers)")
        return self.layers[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        growth = self.growth._repr_html_() if self.growth is not None else ""
        return self._grid(inside=False, fold=None).html() + growth

    def table(
        self, *, inside: bool = False, fold: bool | None = None, width: int | None = None
    ) -> str:
        """Return a text with one line per layer, and the total.

        Args:
            inside: Whether to include the layers inside each layer; by default a line shows the
                layer's own cost, so that the lines add up to the total.
            fold: Whether layers whose names differ only in numbers share a line; by default from
                40 lines on.
            width: The width in characters; by default the width of the terminal.
        """
        text = self._grid(inside, fold).text(width)
        return text if self.growth is None else f"{text}\n\n{self.growth.table(width=width)}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, for JSON."""
        return {
            **vars(self),
            "layers": {name: each.to_dict() for name, each in self.layers.items()},
            "total": self.total.to_dict(),
            "peak_place": list(self.peak_place),
            "growth": None if self.growth is None else self.growth.to_dict(),
            "notes": list(self.notes),
        }

    def _grid(self, inside: bool, fold: bool | None) -> Grid:
        shown = [each if inside else each.own or each for each in self.layers.values()]
        shown = [each for each in shown if any(getattr(each, name) for name in ADDABLE)]
        if fold or (fold is None and len(shown) > _LINES_BEFORE_FOLDING):
            shown = _folded(shown)
        lines = [*shown, replace(self.total, layer="total")]
        timed = not math.isnan(self.plain_seconds)
        return Grid(
            title=self._title(),
            heading="layer, with what is inside" if inside else "layer",
            names=[layer_label(each.layer) for each in lines],
            columns=_columns(lines, self.total, timed),
            notes=self.notes,
            emphasised=frozenset([len(lines) - 1]),
        )

    def _title(self) -> str:
        phase, layer = self.peak_place
        text = f"cost of {self.model} on {self.device}: peak {bytes_text(self.peak_bytes)}"
        text += f" in the {phase} pass of {layer_label(layer)}" if phase else ""
        if not math.isnan(self.plain_seconds):
            text += f", {seconds_text(self.plain_seconds)} forward and backward"
        return text


def _columns(lines: list[LayerCost], total: LayerCost, timed: bool) -> list[Column]:
    def column(title: str, name: str, importance: int) -> Column:
        write = flops_text if name.endswith("flops") else bytes_text
        write = seconds_text if name.endswith("seconds") else write
        return Column(title, [write(getattr(each, name)) for each in lines], importance)

    columns = [
        Column("type", [each.kind for each in lines], 1, right=False),
        column("FLOPs fwd", "forward_flops", 9),
        column("FLOPs bwd", "backward_flops", 7),
        column("params", "parameter_bytes", 6),
        column("outputs", "activation_bytes", 3),
        column("gradients", "gradient_bytes", 2),
        column("saved", "saved_bytes", 10),
    ]
    if timed:
        columns += [
            column("forward", "forward_seconds", 8),
            column("backward", "backward_seconds", 8),
        ]
        if total.seconds:
            shares = [f"{100 * each.seconds / total.seconds:.0f} %" for each in lines]
            columns.append(Column("share", shares, 5))
    return columns


def _folded(costs: list[LayerCost]) -> list[LayerCost]:
    """Return one cost for all layers whose names differ only in numbers."""
    groups: dict[tuple[str, str], list[LayerCost]] = {}
    for each in costs:
        name = each.layer if each.layer == LOSS else star(each.layer)
        groups.setdefault((name, each.kind), []).append(each)
    return [
        members[0]
        if len(members) == 1
        else add_costs(
            members, f"{name} ({len(members)})", kind, sum(each.calls for each in members)
        )
        for (name, kind), members in groups.items()
    ]
