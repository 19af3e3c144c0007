"""Learning costs of a scan: gradient norms of parameters by token, layer and voxel.

`gradient_pass` and `cached_pass` call `read_costs` with token gradients of keep="voxels";
`token_loss_pass` adds token by token with `CostSums`. Both put the result into a `ScanPass`.
Squares are added up and the root is taken once at the end. nan means that no gradient came, which
is not the same as 0, and what is missing is named in `missed` or `notes`. All parameters are added
in one operation per table, since a model has hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchfmri._scan.run.scan_pass import ScanPass
from torchfmri._scan.run.subject import ScannedLayer, ScanSubject
from torchfmri._tokens import ParameterInfo, TokenGradients
from torchfmri.exceptions import InspectionError


def read_costs(
    found: ScanPass,
    subject: ScanSubject,
    tokens: TokenGradients,
    arrange: Callable[[Tensor], Tensor | None],
) -> None:
    """The learning cost of each layer and voxel, from its parameters' token gradients.

    Args:
        found: Takes the result.
        subject: What was scanned.
        tokens: The token gradients, of keep="voxels".
        arrange: Reshapes values per token to (b, s, ...); returns None if they do not fit.
    """
    norms = found.activation.norms
    b, s = norms.shape[:2]
    sums = CostSums(found, subject)
    received, together = set(tokens.names), tokens.squares_by_voxel()
    for layer in subject.layers:
        for info in layer.parameters:
            if info.name not in received:
                continue
            try:
                squared = together.get(info.name)
                if squared is None:
                    squared = tokens[info.name].norm(by="voxel").square()
            except InspectionError as error:
                found.missed[layer.name] = f"the learning cost of {info.name}: {error}"
                continue
            own = arrange(squared)
            if own is None:
                found.missed[layer.name] = (
                    f"the learning cost of {info.name}: its gradients cover {squared.shape[0]} x "
                    f"{squared.shape[1]} tokens, but the scan has {b} x {s}"
                )
                continue
            sums.add(layer, info, own)
    sums.finish()
    coverage = tokens.coverage()
    found.residual = (
        coverage.residual if any(row.residual is not None for row in coverage) else None
    )
    for row in coverage.missing:
        found.notes.append(f"no learning cost for {row.name}: {row.note}")


class CostSums:
    """Squared learning costs, added up over the parameters of each layer; nan where none came.

    Args:
        found: Takes their roots.
        subject: What was scanned.
    """

    def __init__(self, found: ScanPass, subject: ScanSubject) -> None:
        norms = found.activation.norms
        self._found = found
        self._by_voxel = torch.full_like(norms, torch.nan)
        self._by_layer = norms.new_full((*norms.shape[:2], len(subject.layers)), torch.nan)
        # What was added to: a nan that is there may be that of a gradient.
        self._has_voxel, self._has_layer = (
            torch.zeros_like(each, dtype=torch.bool) for each in (self._by_voxel, self._by_layer)
        )
        self._whole: list[tuple[ScannedLayer, slice | None, Tensor]] = []

    def add(self, layer: ScannedLayer, info: ParameterInfo, own: Tensor) -> None:
        """Add the squares of a parameter for every token, (b, s, its voxels)."""
        self._whole.append((layer, _columns_of(layer, info), own.to(self._by_voxel.dtype)))

    def add_token(
        self, layer: ScannedLayer, info: ParameterInfo, own: Tensor, token: tuple[int, int]
    ) -> None:
        """Add the squares of a parameter for one token, (its voxels)."""
        own = own.to(self._by_voxel.dtype)
        _add_at(self._by_layer[token], self._has_layer[token], layer.index, own.sum())
        columns = _columns_of(layer, info)
        if columns is not None:
            _add_at(self._by_voxel[token], self._has_voxel[token], columns, own)

    def finish(self) -> None:
        """Put the roots of the sums where they belong."""
        layers = [([layer.index] * own.shape[-1], own) for layer, _, own in self._whole]
        voxels = [
            (list(range(columns.start, columns.stop)), own)
            for _, columns, own in self._whole
            if columns is not None
        ]
        _add_columns(self._by_layer, layers)
        _add_columns(self._by_voxel, voxels)
        self._found.cost = self._by_voxel.sqrt()
        self._found.layer_cost = self._by_layer.sqrt()


def _add_at(sums: Tensor, has_some: Tensor, where: int | slice, own: Tensor) -> None:
    """Add to some sums of one token; those to which nothing was added so far begin at zero."""
    sums[where] = torch.where(has_some[where], sums[where], 0) + own
    has_some[where] = True


def _add_columns(sums: Tensor, parts: Sequence[tuple[list[int], Tensor]]) -> None:
    """Add (b, s, n) to n columns each, all at once: a model has hundreds of parameters."""
    if parts:
        columns = torch.tensor([each for some, _ in parts for each in some], device=sums.device)
        sums[..., columns] = sums[..., columns].nan_to_num()  # nan: nothing was added so far
        sums.index_add_(-1, columns, torch.cat([own for _, own in parts], -1))


def _columns_of(layer: ScannedLayer, info: ParameterInfo) -> slice | None:
    """Return the columns of a parameter's voxels; None if they differ from the layer's voxels."""
    if info.output.last - info.output.first == 2:  # experts and units: each expert is a voxel
        # A layer may have several such parameters, and not all have one row per expert.
        rows = layer.experts.stop - layer.experts.start
        return layer.experts if info.shape[info.output.first] == rows else None
    units = info.output.length(info.shape)
    same = layer.axis is None or units == layer.axis.width
    return layer.voxels if info.voxel == layer.size and same else None
