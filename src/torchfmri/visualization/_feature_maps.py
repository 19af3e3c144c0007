"""Draw the channels of a convolution as images: `plot_feature_maps`.

`Inspector.plot_feature_maps` and users call it through `plots`. It needs the tensors themselves
(keep="tensors"). All channels share one colour scale, so that they can be compared, and a dead
channel says so in words. Sizes, gaps and colours may change freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from torchfmri._records import Inspection
from torchfmri._text import layer_label, plural
from torchfmri.exceptions import InspectionError
from torchfmri.visualization._figure import MEANING, axes_or_new, draw_cells, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_feature_maps(
    inspection: Inspection,
    layer: str,
    sample: int = 0,
    *,
    channels: int | Sequence[int] = 16,
    what: str = "activations",
    call: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draw the channels of one sample as images on one colour scale; needs keep="tensors".

    Args:
        inspection: What to show.
        layer: A layer with an output of shape (b, channels, height, width).
        sample: Which of the batch.
        channels: How many, from the first on; or which.
        what: activations, or gradients, of which there is one per activation.
        call: Which call of the layer.
        ax: Where to draw.

    Raises:
        LayerNotFoundError: The layer was not inspected.
        InspectionError: Only statistics were kept, the output is not an image, or there is no such
            sample or channel.
    """
    images = _images(inspection, layer, what, call)
    _check_index("sample", sample, len(images))
    several = images[sample]
    picked = list(range(min(channels, len(several)))) if isinstance(channels, int) else [*channels]
    if not picked:
        raise InspectionError(f"channels={channels!r} shows nothing. Write channels=16.")
    for channel in picked:
        _check_index("channel", channel, len(several))
    columns = _columns(len(picked))
    mosaic, corners = _mosaic([several[channel] for channel in picked], columns)
    width = min(7.4, 1.4 * columns + 0.6)
    ax = axes_or_new(ax, width + 1.1, min(width * mosaic.shape[0] / mosaic.shape[1] + 0.5, 14.0))
    finite = mosaic[np.isfinite(mosaic)]
    top = float(np.abs(finite).max()) if len(finite) else 1.0
    signed = bool(len(finite)) and float(finite.min()) < 0
    colours, low = ("RdBu_r", -top) if signed else ("viridis", 0.0)
    drawn = draw_cells(ax, mosaic, colours, vmin=low, vmax=top or 1.0, aspect="equal")
    for channel, (x, y) in zip(picked, corners, strict=True):
        _label_tile(ax, several[channel], channel, x, y)
    ax.set_axis_off()
    all_of_them = len(picked) == len(several)
    shown = f"{'all' if all_of_them else f'{len(picked)} of'} {plural(len(several), 'channel')}"
    title = f"{what} of '{layer_label(layer)}' ({inspection[layer].kind}): {shown}, sample {sample}"
    ax.set_title(escape(title), fontsize=11)
    # Inset axes are as high as the pictures, whatever the size of the figure.
    scale = ax.inset_axes((1.02, 0.0, 0.025, 1.0))
    ax.figure.colorbar(drawn, cax=scale, label=MEANING[what])
    return ax


def _images(inspection: Inspection, layer: str, what: str, call: int) -> Any:
    """Return the images of one call as an array (b, channels, height, width)."""
    record = inspection[layer]
    inspection.statistics(layer, what, call=call)  # raises, with the reason, if there is nothing
    value = record.calls[call].value(what)
    assert value is not None
    if len(value.shape) != 4:
        raise InspectionError(
            f"{layer!r} has {what} of shape {value.shape}; feature maps need (batch, channels, "
            f"height, width). Choose a convolution, or plot_histogram({layer!r})."
        )
    tensor: Tensor = value.tensor
    if tensor.is_complex():
        raise InspectionError(
            f"{layer!r} has complex {what}, which no single picture shows. Plot the real part or "
            "the size of inspection[layer].calls[0].activations[0] yourself."
        )
    return tensor.detach().to("cpu").double().numpy()


def _check_index(noun: str, index: int, count: int) -> None:
    if not -count <= index < count:
        raise InspectionError(f"There is no {noun} {index}: there are {count}, counted from 0.")


def _columns(count: int) -> int:
    """Return how many tiles side by side: wider than high, and few gaps in the last row."""
    ideal = float(np.sqrt(count * 1.8))
    options = range(int(np.ceil(np.sqrt(count))), int(np.ceil(2.2 * np.sqrt(count))) + 1)
    return min(options, key=lambda columns: (-count % columns, abs(columns - ideal)))


def _mosaic(tiles: Sequence[Any], columns: int) -> tuple[Any, list[tuple[int, int]]]:
    """Return the tiles side by side with a gap between them, and the corner of each."""
    height, width = tiles[0].shape
    gap = max(1, round(width / 16))
    rows = -(-len(tiles) // columns)
    mosaic = np.full(((height + gap) * rows - gap, (width + gap) * columns - gap), np.nan)
    corners = []
    for index, tile in enumerate(tiles):
        y, x = index // columns * (height + gap), index % columns * (width + gap)
        mosaic[y : y + height, x : x + width] = tile
        corners.append((x, y))
    return mosaic, corners


def _label_tile(ax: Axes, tile: Any, channel: int, x: int, y: int) -> None:
    """Write the channel's number, and in words if there is nothing to see in it."""
    box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0}
    ax.text(x, y, str(channel), fontsize=7, va="top", ha="left", color="black", bbox=box)
    lost = int((~np.isfinite(tile)).sum())
    words = f"{lost} NaN or Inf" if lost else "dead: all zero" if not tile.any() else ""
    if words:
        middle = (x + tile.shape[1] / 2 - 0.5, y + tile.shape[0] / 2 - 0.5)
        ax.text(*middle, words, fontsize=7, va="center", ha="center", color="black", bbox=box)
