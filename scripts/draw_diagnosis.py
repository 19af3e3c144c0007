"""Draw the figure of docs/diagnosis.md: a learning rate that rises a hundredfold half-way.

python scripts/draw_diagnosis.py [FILE]
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._faults import rate_times_100_half_way
from torchfmri import diagnose


def main(path: Path) -> None:
    """Diagnose the planted fault and write its figure."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = rate_times_100_half_way()
    diagnosis = diagnose(case.model, case.batches, case.loss, case.optimizer, step=case.step)
    diagnosis.plot().figure.savefig(path, bbox_inches="tight", dpi=120)


if __name__ == "__main__":
    folder = Path(__file__).resolve().parent.parent / "docs" / "images"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else folder / "diagnosis.png")
