"""Small scans for the tests of the store, and the oracle that compares them bit by bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchfmri import Anatomy, Scan, ScannedSequence, Tokens
from torchfmri._scan.record.sequence import METRICS, STATISTICS
from torchfmri._scan.store.writer import ScanWriter

ANATOMY = Anatomy.of_widths(
    ["embed", "layers.0.mlp", "käse"],
    ["Embedding", "MLP", "Linear"],
    [8, 6, 5],
    [4, 4, 4],
    experts=[0, 2, 0],
)
META = {"model": "tiny", "per": "position", "epsilon": float("nan"), "layers": ["*"]}
WORDS = (b"Hello", b"", b"\xe4\xbd", b"\xa0", b" you", b"\xff", b"\x00")


def make_sequence(name: str, length: int = 4, *, anatomy: Anatomy = ANATOMY) -> ScannedSequence:
    """A sequence whose values follow from its name."""
    random = np.random.default_rng(list(name.encode()))

    def floats(*shape: int) -> np.ndarray:
        values = random.standard_normal(shape).astype(np.float32)
        values[random.random(shape) < 0.1] = np.nan
        return values

    layers, voxels = len(anatomy.layers), len(anatomy.layer)
    tokens = Tokens(
        random.integers(0, 50_000, length),
        tuple(WORDS[index] for index in random.integers(0, len(WORDS), length)),
        floats(length),
        floats(length),
        random.random(length) < 0.5,
        random.random(length) < 0.5,
    )
    return ScannedSequence(
        name,
        tokens,
        {metric: floats(length, layers) for metric in METRICS},
        {metric: floats(length, voxels) for metric in METRICS},
        {"activations": random.standard_normal((layers, len(STATISTICS)))},
        {"käse": floats(length, 5).astype(np.float16)},
        condition=f"condition of {name}",
        padding=length % 3,
        checks={"residual": 1e-7, "tokens_identical": True, "worst": float("inf")},
        fields={"größe": length, "share": 0.5, "right": True, "tags": [name, None]},
        vectors={"all": {"käse": floats(5)}, "last": {"käse": floats(5), "embed": floats(8)}},
    )


def write_scan(path: Path, names: list[str], **options: Any) -> Path:
    with ScanWriter(path, ANATOMY, META, **options) as writer:
        for number, name in enumerate(names):
            writer.append(make_sequence(name, number % 5))
    return path


def assert_same_array(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()  # NaN payloads too


def assert_same_arrays(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name in expected:
        assert_same_array(found[name], expected[name])


def assert_same_sequence(found: ScannedSequence, expected: ScannedSequence) -> None:
    assert (found.name, found.condition, found.padding) == (
        expected.name,
        expected.condition,
        expected.padding,
    )
    assert repr(found.checks) == repr(expected.checks)  # nan is not equal to itself
    assert found.tokens.spelling == expected.tokens.spelling
    for field in ("ids", "surprisal", "entropy", "generated", "special"):
        assert_same_array(getattr(found.tokens, field), getattr(expected.tokens, field))
    for field in ("layers", "voxels", "statistics", "tensors"):
        assert_same_arrays(getattr(found, field), getattr(expected, field))
    assert found.fields == expected.fields
    assert set(found.vectors) == set(expected.vectors)
    for choice, vectors in expected.vectors.items():
        assert_same_arrays(found.vectors[choice], vectors)


def assert_same_anatomy(found: Anatomy, expected: Anatomy) -> None:
    assert (found.layers, found.types) == (expected.layers, expected.types)
    for field in ("layer", "start", "count", "kind"):
        assert_same_array(getattr(found, field), getattr(expected, field))


def read_everything(scan: Scan) -> list[ScannedSequence]:
    """All sequences that can be read, every byte of them touched."""
    found = list(scan)
    for sequence in found:
        assert sequence.tokens.text == "".join(sequence.tokens.pieces)
        for table in (sequence.layers, sequence.voxels, sequence.statistics, sequence.tensors):
            for values in table.values():
                values.tobytes()
    return found
