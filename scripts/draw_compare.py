"""Draw the figures of docs/compare.md: two models and two training runs that part.

python scripts/draw_compare.py [FOLDER]
"""

import copy
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torchfmri
from benchmarks.compare import train


def main(folder: Path) -> None:
    """Plant a fault, compare, and write both figures."""
    torch.set_num_threads(1)
    model, tokenizer = torchfmri.load_model("tiny")
    other = copy.deepcopy(model)
    other.model.layers[2].self_attn.scaling *= 1.02
    data = tokenizer("The capital of France is Paris.", return_tensors="pt")
    found = torchfmri.compare(
        model, other, data={**data, "labels": data["input_ids"]}, tokenizer=tokenizer
    )
    found.draw(folder / "compare.png")
    torchfmri.compare(train(), train(changed=37)).draw(folder / "compare_runs.png")


if __name__ == "__main__":
    images = Path(__file__).resolve().parent.parent / "docs" / "images"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else images)
