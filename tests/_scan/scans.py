"""Scans made of random numbers, with the names and the size of a real model's."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchfmri import Anatomy, Scan, ScannedSequence, Tokens
from torchfmri._scan.record.sequence import METRICS, STATISTICS

PARTS = {
    "": ("Block", 128),
    ".self_attn": ("Attention", 128),
    ".self_attn.q_proj": ("Linear", 128),
    ".self_attn.o_proj": ("Linear", 128),
    ".mlp": ("MLP", 128),
    ".mlp.up_proj": ("Linear", 200),
    ".mlp.down_proj": ("Linear", 128),
    ".norm": ("RMSNorm", 128),
}
WORDS = ("The", " capital", " of", " France", " is", " Paris", ".", "\n", " It", "'s", " old")


def make_anatomy(blocks: int) -> Anatomy:
    """An embedding, blocks of eight layers, a norm and a head; heads of 64 in q_proj."""
    rows = [("model.embed", "Embedding", 128, "units")]
    for block in range(blocks):
        for part, (kind, width) in PARTS.items():
            what = "head" if part.endswith("q_proj") else "units"
            rows.append((f"model.layers.{block}{part}", kind, width, what))
    rows += [("model.norm", "RMSNorm", 128, "units"), ("lm_head", "Linear", 300, "units")]
    names, types, widths, kinds = zip(*rows, strict=True)
    return Anatomy.of_widths(names, types, widths, [64] * len(rows), kinds)


def make_tokens(number: int, spelling: Sequence[bytes] | None = None) -> Tokens:
    """The first half is the prompt, begins with a special token, and surprises."""
    random = np.random.default_rng(number)
    texts = spelling or [b"<s>", *(WORDS[i % len(WORDS)].encode() for i in range(number - 1))]
    surprisal = random.gamma(1.5, 2.0, number).astype(np.float32)
    entropy = random.gamma(2.0, 1.0, number).astype(np.float32)
    surprisal[:1] = entropy[:1] = np.nan
    return Tokens(
        np.arange(number),
        tuple(texts[:number]),
        surprisal,
        entropy,
        np.arange(number) >= number // 2,
        np.arange(number) == 0,
    )


def make_sequence(
    anatomy: Anatomy,
    tokens: int = 12,
    metrics: Sequence[str] = METRICS,
    seed: int = 0,
    spelling: Sequence[bytes] | None = None,
    **options: Any,
) -> ScannedSequence:
    """Positive values over several powers of ten; no gradient at the last token."""
    random = np.random.default_rng(seed)

    def draw(columns: int, metric: str, containers: Sequence[int] = ()) -> Any:
        scale = 10.0 ** random.normal(0, 0.5, columns)
        values = (random.lognormal(0, 0.6, (tokens, columns)) * scale).astype(np.float32)
        if metric != "activation":
            values[-1:] = np.nan
        if metric == "learning_cost":
            values[:, list(containers)] = np.nan
        return values

    inner = {"Block", "Attention", "MLP"}
    containers = [column for column, kind in enumerate(anatomy.types) if kind in inner]
    voxels = [at for at, layer in enumerate(anatomy.layer.tolist()) if layer in containers]
    statistics = random.lognormal(0, 1, (len(anatomy.layers), len(STATISTICS)))
    return ScannedSequence(
        str(seed),
        make_tokens(tokens, spelling),
        {metric: draw(len(anatomy.layers), metric, containers) for metric in metrics},
        {metric: draw(len(anatomy.layer), metric, voxels) for metric in metrics},
        {"activations": statistics},
        **options,
    )


def make_scan(
    blocks: int = 8,
    tokens: int = 12,
    metrics: Sequence[str] = METRICS,
    sequences: int = 1,
    **options: Any,
) -> Scan:
    """A scan of so many blocks of eight layers, and three layers around them."""
    anatomy = make_anatomy(blocks)
    found = [make_sequence(anatomy, tokens, metrics, seed, **options) for seed in range(sequences)]
    meta = {"model": "test model", "per": "position", "loss": "sum over generated tokens"}
    return Scan(anatomy, found, meta)
