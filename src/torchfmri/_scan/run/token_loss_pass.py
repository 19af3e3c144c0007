"""Gradients of each token's own loss, `per="token_loss"`: one backward pass per token.

Column t holds the gradient of the loss computed at position t, through everything that it could
see: of a layer's output over all positions, and of a layer's parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from torchfmri._model import compiled_code_as_eager, spared_grad
from torchfmri._scan.run.flat_layout import voxel_norms
from torchfmri._scan.run.gradient_pass import PassSink, read_logits, trainable
from torchfmri._scan.run.learning_costs import CostSums
from torchfmri._scan.run.mean_vectors import VectorPlan
from torchfmri._scan.run.model_call import call_model, logits_of
from torchfmri._scan.run.scan_loss import ScanLoss, position_has_loss
from torchfmri._scan.run.scan_pass import ScanPass, Sequences
from torchfmri._scan.run.subject import ScannedLayer, ScanSubject
from torchfmri._tokens import Checks, ParameterInfo, alike_of, without_autocast
from torchfmri.exceptions import InspectionError


def run_token_losses(
    subject: ScanSubject,
    sequences: Sequences,
    loss: ScanLoss,
    *,
    voxel: int,
    tensors: frozenset[str] = frozenset(),
    vectors: VectorPlan | None = None,
) -> ScanPass:
    """Run the sequences once forward, and backward once for each token that has a loss.

    Raises:
        InspectionError: The loss is a single number.
    """
    model = subject.model
    sink = _TokenLossSink(subject, sequences, loss, tensors=tensors, vectors=vectors, own_step=True)
    found = sink.found
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiled_code_as_eager())
        stack.enter_context(torch.enable_grad())
        parameters = stack.enter_context(trainable(model))
        stack.enter_context(spared_grad(parameters))  # a Function may run backward()s
        stack.enter_context(sink.attached())
        output = call_model(model, sequences.ids, sequences.mask, sequences.positions)
        logits = logits_of(output)
        read_logits(found, logits, sequences)
        losses = loss.losses(output, logits, sequences.ids, sequences.mask, sequences.generated)
        del output, logits
        if losses.shape != sequences.ids.shape:
            raise InspectionError(
                f"per='token_loss' needs one loss per token, {tuple(sequences.ids.shape)}, and "
                f"your own loss has the shape {tuple(losses.shape)}. Return one per token."
            )
        if loss.own is None:
            wanted = position_has_loss(loss, sequences.ids, sequences.mask, sequences.generated)
        else:
            wanted = sequences.mask.bool()
        _Costs(subject, found).run(losses, wanted, sink)
    return found


class _TokenLossSink(PassSink):
    """Takes the gradients of the token whose loss is being differentiated."""

    gradient_statistics = False  # T passes over every layer: not worth their price
    token = (0, 0)

    def reduce_gradient(self, layer: ScannedLayer, gradient: Tensor, rows: Tensor) -> None:
        """The norm over all positions of the token's row, by voxel."""
        row, position = self.token
        if row < 0:  # the sum of all losses, for the proof
            return
        found = self.found.gradient
        assert found is not None
        own = torch.linalg.vector_norm(voxel_norms(rows[row].detach(), layer.size), 2, 0)
        place = found.norms[row, position, layer.voxels]
        found.norms[row, position, layer.voxels] = torch.hypot(place.nan_to_num(), own)


class _Costs:
    """The norms of the parameters' gradients, token by token, and the proof of their sum."""

    def __init__(self, subject: ScanSubject, found: ScanPass) -> None:
        self._found = found
        parameters = dict(_named_parameters(subject))
        self._places = [
            (layer, info, parameters[info.name])
            for layer in subject.layers
            for info in layer.parameters
            if info.name in parameters and parameters[info.name].requires_grad
        ]
        # Where the graph begins: on the way there the gradients of all layers' outputs come by.
        known = {id(each) for _, _, each in self._places}
        self._beginnings = [each for each in _beginnings(subject.model) if id(each) not in known]
        infos = {info.name: info for _, info, _ in self._places}
        self._checks = Checks(infos, alike_of(infos))
        self._sums = CostSums(found, subject)

    def run(self, losses: Tensor, wanted: Tensor, sink: _TokenLossSink) -> None:
        """Differentiate each loss that is wanted by itself, then their sum for the proof."""
        count = len(self._places)
        leaves = [*(each for _, _, each in self._places), *self._beginnings]
        total: dict[str, list[Tensor]] = defaultdict(list)
        for row, position in wanted.nonzero().tolist():
            sink.token = (row, position)
            gradients = torch.autograd.grad(
                losses[row, position], leaves, retain_graph=True, allow_unused=True
            )
            for (layer, info, _), gradient in zip(self._places, gradients[:count], strict=True):
                if gradient is not None:
                    own = _voxel_squares(gradient.detach(), info)
                    self._sums.add_token(layer, info, own, (row, position))
                    total[info.name].append(self._probe(info.name, gradient))
        sink.token = (-1, -1)
        everything = torch.autograd.grad((losses * wanted).sum(), leaves, allow_unused=True)
        probes = {
            info.name: (torch.stack(total[info.name]), self._probe(info.name, gradient))
            for (_, info, _), gradient in zip(self._places, everything[:count], strict=True)
            if gradient is not None and info.name in total
        }
        self._found.residual = _residual(probes.values(), losses.dtype)
        self._sums.finish()

    def _probe(self, name: str, gradient: Tensor) -> Tensor:
        with without_autocast(gradient):  # that of the caller
            return self._checks.between(name, gradient).double()


def _named_parameters(subject: ScanSubject) -> Iterator[tuple[str, Tensor]]:
    for layer in subject.layers:
        for info in layer.parameters:
            parameter = layer.module._parameters.get(info.key)
            if parameter is not None:
                yield info.name, parameter


def _beginnings(model: nn.Module) -> Sequence[Tensor]:
    """The weights of the embeddings; of a model without any, all that can be trained."""
    embeddings = [each.weight for each in model.modules() if isinstance(each, nn.Embedding)]
    found = [each for each in embeddings if each.requires_grad]
    return found or [each for each in model.parameters() if each.requires_grad]


def _voxel_squares(gradient: Tensor, info: ParameterInfo) -> Tensor:
    """The squared norms of a dense gradient by voxel of output units."""
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    units = gradient.reshape(info.shape) if info.shape else gradient.reshape(1)
    first, last = info.output.first, info.output.last if info.shape else 1
    order = [*range(first, last), *(a for a in range(units.ndim) if not first <= a < last)]
    flat = units.permute(order).reshape(info.output.length(info.shape) if info.shape else 1, -1)
    norms = torch.linalg.vector_norm(flat, 2, -1, dtype=_wide(flat.dtype))
    return voxel_norms(norms, info.voxel).square()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _residual(probes: Collection[tuple[Tensor, Tensor]], dtype: torch.dtype) -> float | None:
    """How far the parts of each parameter are from adding up to its whole; the worst of them.

    Relative to the parts' sizes. Some gradients are zero but for rounding (the bias of attention
    keys): what is small beside all the others is measured against those.

    Args:
        probes: The parts, one number each, and the whole.
        dtype: Of the gradients.
    """
    sizes = [float(parts.abs().sum()) for parts, _ in probes]
    if not sizes:
        return None
    floor = math.sqrt(torch.finfo(dtype).eps) * max(sizes)
    apart = [abs(float(parts.sum()) - float(whole)) for parts, whole in probes]
    return max(
        gap / max(size, floor) if gap else 0.0 for gap, size in zip(apart, sizes, strict=True)
    )
