"""Draw the figures of docs/token_gradients.md: python scripts/draw_token_gradients.py [folder].

The page's own examples run first, in order, and save two of the figures. The third shows the
three quantities on the model that those examples trained: every P[t, s] is computed by itself.
Prints what adds up to the gradient and what does not.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.patches import Rectangle
from torch import Tensor, nn

import torchfmri

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "token_gradients.md"
TEXT = "Now is fun."
LAYERS = {
    "model.layers.0.mlp.up_proj": "first block, mlp.up_proj",
    "model.layers.1.mlp.up_proj": "last block, mlp.up_proj",
}
# Where nothing that follows mixes positions, and two layers where something does.
AGREE = ("lm_head", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.o_proj")
DIFFER = ("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj")
POSITION, TOKEN_LOSS, CACHED, INK, PAPER = "#2c6fbb", "#c2452d", "#3a8c4e", "#222222", "#ffffff"


def main(folder: Path = DOCS / "figures") -> list[Path]:
    """Draw all figures into `folder`."""
    mpl.use("Agg")
    mpl.rcParams.update(
        {"svg.hashsalt": "torchfmri", "font.size": 11, "font.family": "DejaVu Sans"}
    )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)  # so that sums are added in one order
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        with chdir(place), redirect_stdout(io.StringIO()):
            names = run_page()
        paths = [Path(shutil.copy(each, folder)) for each in sorted(Path(place).glob("*.svg"))]
    model, batch = names["train"](60), names["encode"]([TEXT])
    found = {layer: contributions(model, batch, layer) for layer in LAYERS}
    for layer, p in found.items():
        print(f"{layer}\n{p.summary()}")
    for layer in (*AGREE, *DIFFER):
        assert contributions(model, batch, layer).is_diagonal() == (layer in AGREE), layer
    paths.append(folder / "token_gradients.svg")
    figure = draw_three(found)
    figure.savefig(paths[-1], facecolor=PAPER, bbox_inches="tight", metadata={"Date": None})
    plt.close("all")
    return paths


def run_page() -> dict[str, Any]:
    """The names that the Python examples of the page leave behind."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE.read_text("utf-8")):
        exec(compile(code, str(PAGE), "exec"), names)
    return names


# -- the three quantities --------------------------------------------------------------------


@dataclass(frozen=True)
class Contributions:
    """P[t, s], what the loss at position t asks of a weight through position s, (t, s, o, i)."""

    p: Tensor
    gradient: Tensor

    def norms(self) -> dict[str, Tensor]:
        """How long each P[t, s] is, and each token gradient of the three kinds."""
        diagonal = torch.arange(len(self.p))
        return {
            "P": self.p.norm(dim=(2, 3)),
            "position": self.p.sum(0).norm(dim=(1, 2)),
            "token_loss": self.p.sum(1).norm(dim=(1, 2)),
            "cached": self.p[diagonal, diagonal].norm(dim=(1, 2)),
        }

    def is_diagonal(self) -> bool:
        """Whether every loss acts through its own position alone, so that all three agree."""
        norms = self.norms()["P"]
        return bool((norms - norms.diag().diag()).max() <= 1e-12 * norms.max())

    def summary(self) -> str:
        """How far each of the three is from adding up to the gradient."""
        diagonal = torch.arange(len(self.p))
        sums = {
            "position": self.p.sum(0).sum(0),
            "token_loss": self.p.sum(1).sum(0),
            "cached": self.p[diagonal, diagonal].sum(0),
        }
        return "\n".join(
            f"  {name:<10}  its sum misses the gradient by "
            f"{float((each - self.gradient).norm() / self.gradient.norm()):.1%}"
            for name, each in sums.items()
        )


def contributions(model: nn.Module, batch: Mapping[str, Tensor], layer: str) -> Contributions:
    """P of one Linear in float64, a loss at a time, and compared with what torchfmri says."""
    model = model.double()
    module, seen = model.get_submodule(layer), {}

    def keep(module: nn.Module, arguments: Any, output: Tensor) -> None:
        seen["x"], seen["y"] = arguments[0], output

    handle = module.register_forward_hook(keep)
    losses = torchfmri.token_losses(model(**batch).logits, batch["labels"])[0, :-1]
    handle.remove()
    p = []
    for loss in losses:
        (g,) = torch.autograd.grad(loss, seen["y"], retain_graph=True)
        p.append(torch.einsum("so,si->soi", g[0, :-1], seen["x"][0, :-1]))
    (gradient,) = torch.autograd.grad(losses.sum(), module.weight)
    found = Contributions(torch.stack(p).detach(), gradient)

    name, norms = f"{layer}.weight", found.norms()
    with torchfmri.token_gradients(model, name) as tokens:
        torchfmri.token_losses(model(**batch).logits, batch["labels"]).sum().backward()
    with torchfmri.token_gradients(model, name, per="token_loss") as own:
        own.backward(torchfmri.token_losses(model(**batch).logits, batch["labels"]))
    assert torch.allclose(tokens[name].norm()[0, :-1], norms["position"])
    assert torch.allclose(own[name].norm()[0, :-1], norms["token_loss"])
    return found


def draw_three(found: Mapping[str, Contributions]) -> plt.Figure:
    """For each layer the matrix with its column sums below, row sums and diagonal beside it."""
    figure = plt.figure(figsize=(11.4, 5.9), layout="constrained")
    parts = figure.subfigures(1, len(found), wspace=0.04)
    for part, (layer, p) in zip(parts, found.items(), strict=True):
        _draw_layer(part, LAYERS[layer], p.norms())
    return figure


def _draw_layer(figure: Any, title: str, norms: Mapping[str, Tensor]) -> None:
    here = list(TEXT[:-1])
    after = [f"{one}→{other}".replace(" ", "␣") for one, other in zip(here, TEXT[1:], strict=True)]
    grid = figure.add_gridspec(2, 3, width_ratios=(2.7, 1, 1), height_ratios=(2.7, 1))
    matrix = figure.add_subplot(grid[0, 0])
    size = len(here)
    shade = PowerNorm(0.5, vmin=0, vmax=float(norms["P"].max()))  # so that small ones are seen
    matrix.pcolormesh(norms["P"], cmap="Greys", norm=shade, edgecolors="#dddddd", linewidth=0.5)
    matrix.set_xlim(0, size)
    matrix.set_ylim(size, 0)
    for each in range(size):
        matrix.add_patch(Rectangle((each, each), 1, 1, fill=False, edgecolor=CACHED, linewidth=1.8))
    matrix.set_yticks([each + 0.5 for each in range(size)], after)
    matrix.tick_params(labelbottom=False, bottom=False)
    matrix.set_ylabel("t: whose loss")
    matrix.set_title("|P[t, s]|", fontsize=11)
    figure.suptitle(title, fontsize=13, color=INK)

    longest = 1.08 * max(float(norms[name].max()) for name in ("position", "token_loss", "cached"))
    places = [each + 0.5 for each in range(size)]
    below = figure.add_subplot(grid[1, 0], sharex=matrix)
    below.bar(places, norms["position"], color=POSITION)
    below.set_ylim(longest, 0)
    below.set_xticks(places, [each.replace(" ", "␣") for each in here])
    below.set_xlabel("s: through which position")
    below.set_ylabel("columns\nposition", color=POSITION)
    for column, (name, colour, what) in enumerate(
        (("token_loss", TOKEN_LOSS, "rows"), ("cached", CACHED, "diagonal")), start=1
    ):
        beside = figure.add_subplot(grid[0, column], sharey=matrix)
        beside.barh(places, norms[name], color=colour)
        beside.set_xlim(0, longest)
        beside.tick_params(labelleft=False)
        beside.set_title(f"{what}\n{name}", color=colour, fontsize=11)
        _tidy(beside)
    _tidy(below)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


if __name__ == "__main__":
    for path in main(*map(Path, sys.argv[1:2])):
        print(path)
