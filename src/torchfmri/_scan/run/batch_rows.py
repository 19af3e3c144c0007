"""A batch cut into its sequences: without padding, each with its own values and checks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchfmri._scan.record.sequence import STATISTICS, ScannedSequence, Tokens
from torchfmri._scan.run.gradient_pass import Pass, Sequences
from torchfmri._scan.run.live import LiveRecording
from torchfmri._scan.run.measurements import rms_by_layer, rms_by_voxel
from torchfmri._scan.run.scan_loss import ScanLoss
from torchfmri._scan.run.spelling import Speller
from torchfmri._scan.run.subject import Subject
from torchfmri.statistics import Statistics


@dataclass(frozen=True, eq=False)
class Frame:
    """What all rows of a batch have in common.

    Attributes:
        subject: What was scanned.
        loss: What was differentiated, if anything was.
        per: Which gradient it is.
        speller: Token ids -> bytes.
        likeliest: Whether each token should be the one with the largest logit.
    """

    subject: Subject
    loss: ScanLoss | None
    per: str | None
    speller: Speller
    likeliest: bool


@dataclass(eq=False)
class BatchRow:
    """One sequence of the batch, before it has a name."""

    tokens: Tokens
    layers: dict[str, NDArray[np.float32]]
    voxels: dict[str, NDArray[np.float32]]
    statistics: dict[str, NDArray[np.float64]]
    tensors: dict[str, NDArray[Any]]
    padding: int
    checks: dict[str, Any]
    vectors: dict[str, dict[str, NDArray[np.float32]]]

    @property
    def fingerprint(self) -> str:
        """A few digits that stand for its tokens."""
        return hashlib.sha256(self.tokens.ids.tobytes()).hexdigest()[:12]

    def sequence(
        self, name: str, condition: str, fields: Mapping[str, Any] | None = None
    ) -> ScannedSequence:
        """The sequence by that name, with its label and the row that it comes from."""
        return ScannedSequence(
            name, self.tokens, self.layers, self.voxels, self.statistics, self.tensors,
            condition, self.padding, self.checks, fields or {}, self.vectors,
        )  # fmt: skip


def cut_rows(
    frame: Frame,
    sequences: Sequences,
    found: Pass | None,
    live: LiveRecording | None,
    checks: Mapping[str, Any],
) -> list[BatchRow]:
    """Cut a batch into its sequences, without their padding."""
    subject, width = frame.subject, sequences.ids.shape[1]
    activation, difference = _activation(found, live, sequences.mask)
    by_voxel = {"activation": rms_by_voxel(activation, subject)}
    by_layer = {"activation": rms_by_layer(activation, subject)}
    if found is not None and found.gradient is not None:
        assert frame.loss is not None
        keep = found.gradient_positions[..., None]
        by_voxel["gradient"] = found.gradient.norms.masked_fill(~keep, torch.nan)
        by_layer["gradient"] = found.gradient.by_layer().masked_fill(~keep, torch.nan)
        if found.cost is not None and found.layer_cost is not None:
            by_voxel["learning_cost"] = found.cost.masked_fill(~keep, torch.nan)
            by_layer["learning_cost"] = found.layer_cost.masked_fill(~keep, torch.nan)
    surprisal, entropy = _surprisal(found, live, width)
    greedy = _greedy_agrees(frame, found, sequences)
    vectors = found.vectors if found is not None else live.vectors if live is not None else None
    rows = []
    for row in range(len(sequences.ids)):
        where = sequences.mask[row].bool()
        own: dict[str, Any] = dict(checks)
        if difference is not None:
            own["live_difference"] = difference[row]
        if found is not None and found.residual is not None:
            own["gradient_residual"] = found.residual
        if greedy is not None:
            own["greedy_tokens"] = greedy[row]
        tensors = found.tensors if found is not None else live.tensors if live is not None else {}
        rows.append(
            BatchRow(
                _tokens(frame, sequences, row, where, surprisal, entropy),
                {name: _array(each[row][where]) for name, each in by_layer.items()},
                {name: _array(each[row][where]) for name, each in by_voxel.items()},
                _statistics(found, live, row),
                {name: _array(each[row, :width][where]) for name, each in tensors.items()},
                int((sequences.mask[row] == 0).sum()),
                own,
                {} if vectors is None else vectors.of_row(row),
            )
        )
    return rows


def _activation(
    found: Pass | None, live: LiveRecording | None, mask: Tensor
) -> tuple[Tensor, list[float] | None]:
    """Live norms, completed by the pass's, and how far the two are apart in each row."""
    if live is None:
        assert found is not None
        return found.activation.norms, None
    norms = live.activation.norms[:, : mask.shape[1]]
    if found is None:
        return norms, None
    other = found.activation.norms
    kept = other.nan_to_num() * mask[..., None]
    largest = kept.flatten(0, 1).amax(0)
    # What one of them lacks is no difference, and padding is no data.
    apart = ((norms - other).abs() * mask[..., None] / largest).nan_to_num(0.0, 0.0)
    return torch.where(norms.isnan(), other, norms), apart.flatten(1).amax(1).tolist()


def _surprisal(
    found: Pass | None, live: LiveRecording | None, width: int
) -> tuple[Tensor | None, Tensor | None]:
    if found is not None and found.surprisal is not None:
        return found.surprisal, found.entropy
    if live is not None:
        return live.surprisal[:, :width], live.entropy[:, :width]
    return None, None


def _greedy_agrees(frame: Frame, found: Pass | None, sequences: Sequences) -> list[bool] | None:
    """Whether the pass, too, finds each generated token the likeliest; None where it need not."""
    if found is None or found.best is None or not bool(sequences.generated.any()):
        return None
    if not frame.likeliest:
        return None
    equal = found.best == sequences.ids[:, 1:]
    agrees: list[bool] = (equal | ~sequences.generated[:, 1:]).all(1).tolist()
    return agrees


def _tokens(
    frame: Frame,
    sequences: Sequences,
    row: int,
    where: Tensor,
    surprisal: Tensor | None,
    entropy: Tensor | None,
) -> Tokens:
    ids = sequences.ids[row][where].tolist()
    speller = frame.speller
    nothing = np.full(len(ids), np.nan, dtype=np.float32)

    def numbers(each: Tensor | None) -> NDArray[np.float32]:
        if each is None or (frame.loss is not None and not frame.loss.causal):
            return nothing
        found = _array(each[row][where])
        if len(found):
            found[0] = np.nan  # what stands before the first token is padding
        return found

    return Tokens(
        np.array(ids, dtype=np.int64),
        speller.spell(ids),
        numbers(surprisal),
        numbers(entropy),
        sequences.generated[row][where].cpu().numpy(),
        np.array([speller.is_special(each) for each in ids], dtype=bool),
    )


def _statistics(
    found: Pass | None, live: LiveRecording | None, row: int
) -> dict[str, NDArray[np.float64]]:
    if found is not None:
        return {kind: _table(each[row]) for kind, each in found.statistics.items()}
    if live is not None and live.statistics is not None:
        return {"activations": _table(live.statistics[row])}
    return {}


def _table(several: Sequence[Statistics]) -> NDArray[np.float64]:
    """(layer, STATISTICS)."""
    return np.array(
        [[float(getattr(each, name)) for name in STATISTICS] for each in several],
        dtype=np.float64,
    ).reshape(-1, len(STATISTICS))


def _array(tensor: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = tensor.detach().to("cpu", torch.float32).numpy().copy()
    return found
