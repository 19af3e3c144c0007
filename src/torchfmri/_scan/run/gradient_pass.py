"""One pass over a finished sequence with gradients: what every position did and should have done.

`per="position"`: one forward and one backward pass. Each sequence is run in full without a
KV cache, so no token is fed twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from torchfmri._capture import CallKey, Short, Sink, Taps, Target
from torchfmri._model import (
    acts_on_gradients,
    compiled_code_as_eager,
    every_parameter,
    run_backward,
    spared_grad,
)
from torchfmri._scan.run.head_outputs import listening_to_inputs
from torchfmri._scan.run.learning_costs import read_costs
from torchfmri._scan.run.mean_vectors import MeanVectors, VectorPlan
from torchfmri._scan.run.model_call import call_model, like_parameters, logits_of
from torchfmri._scan.run.readings import Kept, Readings
from torchfmri._scan.run.scan_loss import ScanLoss, gradient_positions
from torchfmri._scan.run.scan_pass import ScanPass, Sequences
from torchfmri._scan.run.subject import ScannedLayer, ScanSubject
from torchfmri._scan.run.surprisal import surprisal_and_entropy
from torchfmri._tokens import TokenGradients
from torchfmri._torch import Element


def run_pass(
    subject: ScanSubject,
    sequences: Sequences,
    loss: ScanLoss | None,
    *,
    voxel: int,
    tensors: frozenset[str] = frozenset(),
    vectors: VectorPlan | None = None,
) -> ScanPass:
    """Run the sequences once, with a backward pass if there is a loss.

    Args:
        subject: What is scanned.
        sequences: The batch.
        loss: What to differentiate; None for activations alone.
        voxel: Units of a voxel, for the parameters.
        tensors: Layers whose activations are kept in full.
        vectors: Layers whose mean vectors are kept.
    """
    model = subject.model
    b, s = sequences.ids.shape
    sink = PassSink(subject, sequences, loss, tensors=tensors, vectors=vectors)
    found = sink.found
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiled_code_as_eager())
        stack.enter_context(torch.set_grad_enabled(loss is not None))
        tokens = None
        if loss is not None:
            parameters = stack.enter_context(trainable(model))
            tokens = token_gradients_of(model, parameters, voxel, found)
            if tokens is not None:
                stack.enter_context(tokens)
        stack.enter_context(sink.attached())
        output = call_model(model, sequences.ids, sequences.mask, sequences.positions)
        logits = logits_of(output)
        read_logits(found, logits, sequences)
        if loss is not None:
            losses = loss.losses(output, logits, sequences.ids, sequences.mask, sequences.generated)
            del output, logits
            backward(losses.sum(), model)
    if tokens is not None:
        read_costs(found, subject, tokens, lambda own: own if own.shape[:2] == (b, s) else None)
    return found


def backward(loss: Tensor, model: nn.Module) -> None:
    """Run the backward pass; every `.grad` stays as it is."""
    parameters = every_parameter(model)  # as they are now: FSDP puts others there in a forward pass
    if acts_on_gradients(parameters):
        run_backward(loss, parameters)
    else:
        with spared_grad(parameters):
            torch.autograd.backward(loss)


def token_gradients_of(
    model: nn.Module, parameters: Iterable[nn.Parameter], voxel: int, found: ScanPass
) -> TokenGradients | None:
    """The token gradients of all parameters by voxel; None where there are no parameters."""
    if not any(each.requires_grad for each in parameters):
        found.notes.append("the model has no parameters that could be trained: no learning cost")
        return None
    return TokenGradients(model, keep="voxels", voxel=voxel)


@contextlib.contextmanager
def trainable(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Let every floating-point parameter require a gradient, as long as the block runs.

    Yields all parameters: to find them in a large model takes a while.
    A frozen model and one in training are then scanned alike.
    """
    parameters = every_parameter(model)
    frozen = [
        each
        for each in parameters
        if not each.requires_grad and each.is_floating_point() and not each.is_inference()
    ]
    try:
        for each in frozen:
            each.requires_grad_(True)
        yield parameters
    finally:
        for each in frozen:
            each.requires_grad_(False)


def read_logits(found: ScanPass, logits: Tensor | None, sequences: Sequences) -> None:
    """Surprisal and entropy of every token after the first."""
    if logits is None or logits.shape[:2] != sequences.ids.shape or logits.shape[1] < 2:
        return
    with torch.no_grad():
        before = logits[:, :-1].detach()
        surprisal, entropy = surprisal_and_entropy(before, sequences.ids[:, 1:])
        first = torch.full_like(surprisal[:, :1], torch.nan)
        found.surprisal = torch.cat([first, surprisal], 1)
        found.entropy = torch.cat([first, entropy], 1)
        found.best = before.argmax(-1)


class PassSink(Sink):
    """Receives values from the taps and passes activations and gradients on to their Readings.

    Args:
        subject: What is scanned.
        sequences: The batch.
        loss: What is differentiated; None for activations alone.
        tensors: Layers whose activations are kept in full.
        vectors: Layers whose mean vectors are kept.
        own_step: Each position's loss is differentiated by itself.

    Attributes:
        found: What has been read.
    """

    gradient_statistics = True

    def __init__(
        self,
        subject: ScanSubject,
        sequences: Sequences,
        loss: ScanLoss | None,
        *,
        tensors: frozenset[str],
        vectors: VectorPlan | None,
        own_step: bool = False,
    ) -> None:
        self._layers = {each.name: each for each in subject.layers}
        self.found = found = ScanPass()
        self._tensors = tensors
        self._b, self._s = sequences.ids.shape
        found.vectors = None if vectors is None else MeanVectors(vectors, self._b)
        self._sequences = sequences
        self._shape = (self._b, self._s)
        self._paths: dict[CallKey, str] = {}
        self._first = 0
        what = (subject, self._b, self._s, like_parameters(subject.model))
        tell = found.missed.__setitem__
        found.activation = Readings(*what, kept=_slices(sequences.mask.bool()), missed=tell)
        if loss is not None:
            found.gradient_positions = gradient_positions(
                loss, own_step, sequences.ids, sequences.mask, sequences.generated
            )
            kept = _slices(found.gradient_positions) if self.gradient_statistics else None
            found.gradient = Readings(*what, kept=kept, missed=tell)
        self._choose_tokens()

    @contextlib.contextmanager
    def attached(self) -> Iterator[Taps]:
        """Within the block, reduce layer outputs, and the inputs that are scanned as layers."""
        layers = [each for each in self._layers.values() if each.is_output]
        targets = [self._target(each) for each in layers if not _takes_short_way(each)]
        short = Short(
            modules=[each.module for each in layers if _takes_short_way(each)],
            owners={id(each.module): each for each in layers},
            take=self._take,
            arrived=self._arrived,
            target=self._target,
        )
        inputs = {each.name: each.module for each in self._layers.values() if each.of_input}

        def take(name: str, tensor: Tensor) -> None:
            self._put(self._layers[name], tensor)

        with Taps(targets, self, short=short) as taps, listening_to_inputs(inputs, take):
            yield taps

    def window(self, first: int, count: int) -> None:
        """Expect `count` positions from `first` on in the passes that follow."""
        self._first, self._s = first, count
        self._paths.clear()
        self._choose_tokens()

    def _choose_tokens(self) -> None:
        """Tell the mean vectors which tokens come next."""
        where = slice(self._first, self._first + self._s)
        if self.found.vectors is not None:
            ids, generated = self._sequences.ids[:, where], self._sequences.generated[:, where]
            kept = self._sequences.mask[:, where].bool()
            self.found.vectors.begin(ids, kept, generated)

    def _rows(self, layer: ScannedLayer, tensor: Tensor) -> Tensor | None:
        assert layer.axis is not None
        rows = layer.axis.rows(tensor, self._b, self._s)
        if rows is None:
            self.found.missed[layer.name] = (
                f"its output has the shape {tuple(tensor.shape)}, where "
                f"{layer.axis.expected(self._b, self._s)} was expected"
            )
        return rows

    def _target(self, layer: ScannedLayer) -> Target:
        """What is read of a layer whose calls take the long way."""
        is_read = {"activations"} if self.found.gradient is None else {"activations", "gradients"}
        return Target(layer.name, layer.module, frozenset(is_read))

    def _take(
        self, layer: ScannedLayer, arguments: object, keywords: object, output: Tensor
    ) -> ScannedLayer | None:
        """Take in a call that returned one tensor; None sends it the long way."""
        if not output.is_floating_point() or self.found.gradient is None:
            return None
        self._put(layer, output)
        return layer

    def _arrived(self, layer: ScannedLayer, gradient: Tensor | None) -> None:
        """Take in the gradient of such a call."""
        try:
            self._put_gradient(layer, gradient)
        except Exception as error:  # one that passed would end the backward pass
            self.failed(layer.name, error, backward=True)

    def values(self, call: CallKey, what: str, elements: list[Element]) -> None:
        element = next((each for each in elements if each.tensor.is_floating_point()), None)
        layer = self._layers[call.layer]
        if element is None:
            return
        self._paths[call] = element.path
        self._put(layer, element.tensor)

    def _put(self, layer: ScannedLayer, tensor: Tensor) -> None:
        """Reduce the values of a layer."""
        rows = self._rows(layer, tensor)
        if rows is None:
            return
        self.found.activation.take(layer, tensor, rows, self._first)
        if layer.name in self._tensors:
            self._keep(layer, rows.detach())
        if self.found.vectors is not None:
            self.found.vectors.add(layer, rows.detach())

    def _keep(self, layer: ScannedLayer, rows: Tensor) -> None:
        kept = self.found.tensors
        if layer.name not in kept:
            kept[layer.name] = rows.new_full((*self._shape, rows.shape[-1]), torch.nan)
        kept[layer.name][:, self._first : self._first + self._s] = rows

    def gradient(
        self, call: CallKey, what: str, path: str, gradient: Tensor | None, backward: int
    ) -> None:
        if path == self._paths.get(call):
            self._put_gradient(self._layers[call.layer], gradient)

    def _put_gradient(self, layer: ScannedLayer, gradient: Tensor | None) -> None:
        """Reduce the gradient of what a layer returned; None is zero, and autograd knows that."""
        if gradient is None:
            return
        assert self.found.gradient is not None
        assert layer.axis is not None
        if layer.axis.is_shared(gradient, self._b):
            self.found.missed[layer.name] = (
                "its gradient: all sequences of the batch share its output"
            )
            return
        rows = self._rows(layer, gradient)
        if rows is not None:
            self.reduce_gradient(layer, gradient, rows)

    def reduce_gradient(self, layer: ScannedLayer, gradient: Tensor, rows: Tensor) -> None:
        """Take in dL/d output, whose rows are (b, s, w)."""
        assert self.found.gradient is not None
        self.found.gradient.take(layer, gradient, rows, self._first)

    def missed(self, layer: str, what: str, reason: str) -> None:
        self.found.missed[layer] = f"{what}: {reason}" if what else reason

    def noted(self, layer: str, text: str) -> None:
        self.found.notes.append(f"{layer}: {text}")

    def failed(self, layer: str, error: Exception, backward: bool) -> None:
        if not backward:
            raise error
        self.found.missed[layer] = f"its gradient could not be read: {error}"


def _takes_short_way(layer: ScannedLayer) -> bool:
    """Whether hooks can be on its module."""
    return not isinstance(layer.module, torch.jit.ScriptModule)


def _slices(kept: Tensor) -> Kept:
    """Return a function (first, count) -> which of these positions count."""
    return lambda first, count: kept[:, first : first + count]
