"""Tables of prompts made of random numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchfmri._contrast import PromptColumns, PromptTable


def make_table(
    groups: Sequence[str],
    columns: int = 12,
    *,
    pairs: Sequence[str] | None = None,
    values: np.ndarray | None = None,
    seed: int = 0,
    **others: Any,
) -> PromptTable:
    """Normal values around 3, four voxels of 64 units to a layer."""
    n = len(groups)
    random = np.random.default_rng(seed)
    drawn = random.normal(3.0, 1.0, (n, columns)) if values is None else values
    number = np.arange(drawn.shape[1])
    return PromptTable(
        names=[f"prompt-{row}" for row in range(n)],
        groups=np.array(groups, object),
        pairs=None if pairs is None else np.array(pairs, object),
        values=drawn,
        columns=PromptColumns(
            layer=np.array([f"layers.{each // 4}.mlp" for each in number], object),
            module=np.full(len(number), "MLP", object),
            kind=np.full(len(number), "units", object),
            start=number % 4 * 64,
            count=np.full(len(number), 64),
        ),
        counts=np.full(n, 10),
        metric="activation",
        level="voxel",
        tokens="all tokens",
        model="tiny",
        **others,
    )
