"""A batch cut into its sequences: without padding, each with its own values and checks.

`BatchRun` calls `cut_rows` once, when the model is done. What grows with the batch here is slicing
alone; statistics come as one table of all sequences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchfmri._scan.record.sequence import ScannedSequence, Tokens
from torchfmri._scan.run.live import LiveRecording
from torchfmri._scan.run.measurements import rms_by_layer, rms_by_voxel
from torchfmri._scan.run.readings import Readings
from torchfmri._scan.run.scan_loss import ScanLoss
from torchfmri._scan.run.scan_pass import ScanPass, Sequences
from torchfmri._scan.run.spelling import Speller
from torchfmri._scan.run.subject import ScanSubject


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

    subject: ScanSubject
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
            name=name,
            tokens=self.tokens,
            layers=self.layers,
            voxels=self.voxels,
            statistics=self.statistics,
            tensors=self.tensors,
            condition=condition,
            padding=self.padding,
            checks=self.checks,
            fields=fields or {},
            vectors=self.vectors,
        )


def cut_rows(
    frame: Frame,
    sequences: Sequences,
    found: ScanPass | None,
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
    tensors = found.tensors if found is not None else live.tensors if live is not None else {}
    statistics = _statistics(found, live)
    # To the host as a whole: each transfer waits for the device.
    layers, voxels, kept = _on_host(by_layer), _on_host(by_voxel), _on_host(tensors)
    tokens = _host_tokens(sequences, surprisal, entropy)
    vectors = found.vectors if found is not None else live.vectors if live is not None else None
    rows = []
    for row, where in enumerate(tokens.mask):
        own: dict[str, Any] = dict(checks)
        if difference is not None:
            own["live_difference"] = difference[row]
        if found is not None and found.residual is not None:
            own["gradient_residual"] = found.residual
        if greedy is not None:
            own["greedy_tokens"] = greedy[row]
        rows.append(
            BatchRow(
                tokens=_tokens(frame, tokens, row),
                layers={name: _cut(each[row], where) for name, each in layers.items()},
                voxels={name: _cut(each[row], where) for name, each in voxels.items()},
                statistics={name: each[row] for name, each in statistics.items()},
                tensors={name: _cut(each[row, :width], where) for name, each in kept.items()},
                padding=int((~where).sum()),
                checks=own,
                vectors={} if vectors is None else vectors.of_row(row),
            )
        )
    return rows


def _activation(
    found: ScanPass | None, live: LiveRecording | None, mask: Tensor
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
    found: ScanPass | None, live: LiveRecording | None, width: int
) -> tuple[Tensor | None, Tensor | None]:
    if found is not None and found.surprisal is not None:
        return found.surprisal, found.entropy
    if live is not None:
        return live.surprisal[:, :width], live.entropy[:, :width]
    return None, None


def _greedy_agrees(frame: Frame, found: ScanPass | None, sequences: Sequences) -> list[bool] | None:
    """Whether the pass, too, finds each generated token the likeliest; None where it need not."""
    if found is None or found.best is None or not bool(sequences.generated.any()):
        return None
    if not frame.likeliest:
        return None
    equal = found.best == sequences.ids[:, 1:]
    agrees: list[bool] = (equal | ~sequences.generated[:, 1:]).all(1).tolist()
    return agrees


class _HostTokens(NamedTuple):
    """The tokens of a batch in the host's memory, each (b, s)."""

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    generated: NDArray[np.bool_]
    surprisal: NDArray[np.float32]
    entropy: NDArray[np.float32]


def _host_tokens(
    sequences: Sequences, surprisal: Tensor | None, entropy: Tensor | None
) -> _HostTokens:
    nothing = torch.full(sequences.ids.shape, torch.nan, device="cpu")
    return _HostTokens(
        sequences.ids.cpu().numpy(),
        sequences.mask.bool().cpu().numpy(),
        sequences.generated.cpu().numpy(),
        _array(nothing if surprisal is None else surprisal),
        _array(nothing if entropy is None else entropy),
    )


def _tokens(frame: Frame, tokens: _HostTokens, row: int) -> Tokens:
    """The tokens of one sequence, without its padding."""
    where = tokens.mask[row]
    ids = tokens.ids[row][where]
    speller = frame.speller

    def numbers(each: NDArray[np.float32]) -> NDArray[np.float32]:
        if frame.loss is not None and not frame.loss.causal:
            return np.full(len(ids), np.nan, dtype=np.float32)
        found: NDArray[np.float32] = each[row][where]
        found[:1] = np.nan  # what stands before the first token is padding
        return found

    return Tokens(
        ids=ids.astype(np.int64),
        spelling=speller.spell(ids.tolist()),
        surprisal=numbers(tokens.surprisal),
        entropy=numbers(tokens.entropy),
        generated=tokens.generated[row][where],
        special=np.array([speller.is_special(each) for each in ids.tolist()], dtype=bool),
    )


def _statistics(
    found: ScanPass | None, live: LiveRecording | None
) -> dict[str, NDArray[np.float64]]:
    """Return activations and gradients -> their statistics, (b, layer, STATISTICS)."""
    sources: dict[str, Readings | None] = {}
    if found is not None:
        sources = {"activations": found.activation, "gradients": found.gradient}
    elif live is not None:
        sources = {"activations": live.activation}
    tables = {name: each.statistics() for name, each in sources.items() if each is not None}
    return {name: each for name, each in tables.items() if each is not None}


def _cut(values: NDArray[np.float32], where: NDArray[np.bool_]) -> NDArray[np.float32]:
    """The values of some positions; without a copy where these are all."""
    return values if where.all() else values[where]


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[np.float32]]:
    return {name: _array(each) for name, each in tensors.items()}


def _array(tensor: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = tensor.detach().to("cpu", torch.float32).numpy()
    return found
