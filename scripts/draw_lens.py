"""Draw the figures of docs/attention.md and docs/lens.md: python scripts/draw_lens.py [folder].

They show SmolLM2; everything is read by the functions that the pages describe.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import torchfmri
from torchfmri.visualization import save_figure

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
ASK = "The capital of Italy is Rome. The capital of France is"
REPEATED = "The ship left the harbour at dawn. The ship left the harbour at"


def main(folder: Path = FIGURES) -> list[Path]:
    """Draw all figures into `folder`."""
    model, tokenizer = torchfmri.load_model("smollm2")
    lens = torchfmri.lens(model, tokenizer, ASK)
    logit = torchfmri.attribute_logit(model, tokenizer, ASK, " Paris", against=" Rome")
    scan = torchfmri.scan(model, tokenizer, REPEATED, max_new_tokens=0, per=None, attention="*")
    names, values = scan.attention("induction")
    means = dict(zip(names, np.nanmean(values, 0).tolist(), strict=True))
    best = sorted(means, key=means.__getitem__, reverse=True)[:5]
    inputs = torchfmri.attribute_inputs(
        model, tokenizer, ASK, " Paris", against=" Rome", method="gradient_x_input"
    )
    figures = {
        "lens": lens.plot().figure,
        "logit_attribution": logit.plot().figure,
        "input_attribution": inputs.plot().figure,
        "attention_heads": scan.plot_heads("induction").figure,
        "attention_pattern": scan.plot_attention(best[0].partition("[")[0]),
    }
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        save_figure(figure, paths[-1], dpi=80)
    print(lens.table(), logit.table(), inputs.table(), sep="\n\n")
    print("\nmean induction score:")
    for name in best:
        print(f"  {name}  {means[name]:.2f}")
    return paths


if __name__ == "__main__":
    for path in main(*map(Path, sys.argv[1:2])):
        print(path)
