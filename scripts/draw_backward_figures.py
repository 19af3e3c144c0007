"""Draw the figures of docs/backward.md: python scripts/draw_backward_figures.py [folder]."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch import Tensor

from torchfmri.reference import AttentionFunction, attention, light_attention

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "figures"
FORWARD, BACKWARD, INK, PAPER = "#2c6fbb", "#c2452d", "#222222", "#ffffff"


def main(folder: Path = FOLDER) -> list[Path]:
    """Draw all figures into `folder`."""
    mpl.use("Agg")
    mpl.rcParams.update(
        {"svg.hashsalt": "torchfmri", "font.size": 11, "font.family": "DejaVu Sans"}
    )
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "linear_backward": draw_linear(),
        "attention_backward": draw_attention(),
        "softmax_gradient": draw_softmax(),
        "attention_memory": draw_memory(),
    }
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.svg")
        figure.savefig(paths[-1], facecolor=PAPER, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
    return paths


# -- linear ----------------------------------------------------------------------------------

# How long the axes are drawn: n positions, i in, o out.
LENGTHS = {"n": 1.5, "i": 2.2, "o": 1.2, "1": 0.25}


def draw_linear() -> plt.Figure:
    """The forward product and the three gradients as products of rectangles."""
    figure, axes = plt.subplots(2, 2, figsize=(9.6, 5.0), layout="constrained")
    g = ("g", "n", "o", BACKWARD)
    x, weight = ("x", "n", "i", FORWARD), ("W", "o", "i", FORWARD)
    products = [
        ("forward: y = x Wᵀ + b", [x, ("Wᵀ", "i", "o", FORWARD)], ("y", "n", "o", FORWARD)),
        ("gradient of x: g W", [g, weight], ("dx", "n", "i", BACKWARD)),
        (
            "gradient of W: gᵀ x",
            [("gᵀ", "o", "n", BACKWARD), x],
            ("dW", "o", "i", BACKWARD),
        ),
        ("gradient of b: g summed over n", [g], ("db", "1", "o", BACKWARD)),
    ]
    for axis, (title, factors, result) in zip(axes.flat, products, strict=True):
        _draw_product(axis, title, factors, result)
    return figure


def _draw_product(
    axes: Axes,
    title: str,
    factors: list[tuple[str, str, str, str]],
    result: tuple[str, str, str, str],
) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=INK)
    axes.set_xlim(-0.3, 8.9)
    axes.set_ylim(-1.75, 1.55)
    axes.set_aspect("equal")
    axes.axis("off")
    left = 0.2
    for number, factor in enumerate([*factors, result]):
        if number:
            sign = "=" if number == len(factors) else "·"
            sign = "Σ →" if len(factors) == 1 else sign
            axes.text(left + 0.2, 0, sign, ha="center", va="center", fontsize=15)
            left += 0.85
        left = _draw_matrix(axes, left, *factor)


def _draw_matrix(axes: Axes, left: float, name: str, rows: str, columns: str, colour: str) -> float:
    height, width = LENGTHS[rows], LENGTHS[columns]
    box = Rectangle((left, -height / 2), width, height, facecolor=colour, alpha=0.18)
    axes.add_patch(box)
    axes.add_patch(Rectangle((left, -height / 2), width, height, fill=False, edgecolor=colour))
    above = 0.35 if rows == "1" else 0
    axes.text(left + width / 2, above, name, ha="center", va="center", fontsize=14, color=colour)
    below = -height / 2 - 0.12
    axes.text(left + width / 2, below, columns, ha="center", va="top", fontsize=10, style="italic")
    if rows != "1":
        axes.text(left - 0.1, 0, rows, ha="right", va="center", fontsize=10, style="italic")
    return left + width + 0.2


# -- attention -------------------------------------------------------------------------------

BOXES = {
    "Q": (0.0, 2.4), "K": (0.0, 1.2), "V": (0.0, 0.0),
    "S": (2.9, 1.8), "P": (5.6, 1.8), "O": (8.3, 0.9),
}  # fmt: skip
ARROWS = [("Q", "S"), ("K", "S"), ("S", "P"), ("P", "O"), ("V", "O")]
FORMULAS = {
    "Q": "dQ = dS K / √d", "K": "dK = dSᵀ Q / √d", "V": "dV = Pᵀ g",
    "S": "dS = P ∘ (dP − rowsum(P ∘ dP))", "P": "dP = g Vᵀ", "O": "g = dL/dO",
}  # fmt: skip
VALUES = {"S": "S = Q Kᵀ / √d", "P": "P = softmax(S)", "O": "O = P V"}


def draw_attention() -> plt.Figure:
    """What is computed going forward, and which gradient each of it gets."""
    figure, axes = plt.subplots(figsize=(9.6, 3.9), layout="constrained")
    axes.set_xlim(-0.9, 9.6)
    axes.set_ylim(-0.75, 3.2)
    axes.axis("off")
    for start, end in ARROWS:
        (x1, y1), (x2, y2) = BOXES[start], BOXES[end]
        for shift, colour, ends in (
            (0.09, FORWARD, ((x1 + 0.78, y1), (x2 - 0.78, y2))),
            (-0.09, BACKWARD, ((x2 - 0.78, y2), (x1 + 0.78, y1))),
        ):
            (a, b), (c, d) = ends
            axes.annotate(
                "",
                (c, d + shift),
                (a, b + shift),
                arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.5},
            )
    for name, (x, y) in BOXES.items():
        box = FancyBboxPatch(
            (x - 0.7, y - 0.2), 1.4, 0.4, boxstyle="round,pad=0.04", facecolor="#e9f0f8",
            edgecolor=FORWARD,
        )  # fmt: skip
        axes.add_patch(box)
        axes.text(x, y, VALUES.get(name, name), ha="center", va="center", fontsize=10.5)
        axes.text(x, y - 0.37, FORMULAS[name], ha="center", va="center", fontsize=9, color=BACKWARD)
    axes.text(-0.7, 3.05, "forward →", color=FORWARD)
    axes.text(1.2, 3.05, "← backward", color=BACKWARD)
    return figure


# -- softmax ---------------------------------------------------------------------------------


def example(length: int = 8, width: int = 4) -> dict[str, Tensor]:
    """P, dP and dS of causal attention over random numbers."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, g = torch.randn(4, 1, 1, length, width, dtype=torch.float64, generator=generator)
    _, p = AttentionFunction.apply(q, k, v, None, True, 1 / math.sqrt(width))
    dp = g @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    return {"P": p[0, 0], "dP": dp[0, 0], "dS": ds[0, 0]}


def draw_softmax() -> plt.Figure:
    """The weights of a causal example, the gradient that arrives, and what the softmax passes."""
    found = example()
    titles = {
        "P": "P: the weights\n(rows sum to 1)",
        "dP": "dP = g Vᵀ: what arrives\n(the future too)",
        "dS": "dS: what passes\n(rows sum to 0, the future is 0)",
    }
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.5), layout="constrained")
    for axis, (name, values) in zip(axes, found.items(), strict=True):
        limit = 1.0 if name == "P" else float(values.abs().max())
        colours, low = ("Blues", 0.0) if name == "P" else ("RdBu_r", -limit)
        image = axis.imshow(values, cmap=colours, vmin=low, vmax=limit)
        axis.set_title(titles[name], fontsize=10.5)
        axis.set_xlabel("key position t")
        axis.set_ylabel("query position s" if name == "P" else "")
        figure.colorbar(image, ax=axis, shrink=0.75)
    return figure


# -- memory ----------------------------------------------------------------------------------


def kept_bytes(version: object, length: int) -> int:
    """What autograd keeps for the backward pass, every storage once."""
    inputs = [torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3)]
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = version(*inputs, causal=True)  # type: ignore[operator]
    assert output.requires_grad
    return sum(storages.values())


def draw_memory() -> plt.Figure:
    """Measured bytes kept by the two versions over the length."""
    lengths = [128, 256, 512, 1024, 2048]
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for version, label, colour, place in (
        (attention, "keeps the weights", BACKWARD, (-12, 6)),
        (light_attention, "makes them again, block by block", FORWARD, (0, -72)),
    ):
        mebibytes = [kept_bytes(version, length) / 2**20 for length in lengths]
        axes.plot(lengths, mebibytes, "o-", color=colour)
        axes.annotate(
            f"{label}: {mebibytes[-1]:.0f} MiB",
            (lengths[-1], mebibytes[-1]),
            place,
            textcoords="offset points",
            ha="right",
            color=colour,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    ticks = [2, 8, 32, 128]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(0.6, 400)
    axes.set_xlabel("length (8 heads of 64, float32, causal)")
    axes.set_ylabel("kept for backward, MiB")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    for path in main(*map(Path, sys.argv[1:2])):
        print(path)
