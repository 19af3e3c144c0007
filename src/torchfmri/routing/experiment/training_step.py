"""Make one training step; on CUDA it is recorded once per shape and then replayed without Python.

`TrainingRun` calls a `TrainingStep` for every batch. A replayed step runs the same kernels on the
same memory: tensors that it reads must be copied into the recorded ones, and nothing in the step
may allocate or branch on values. Without CUDA this is a plain step. The number of eager steps may
change freely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchfmri.routing.experiment.tasks import Batch
from torchfmri.routing.learning_dynamics import LearningDynamics

_EAGER_FIRST = 2
"""Steps of a shape before it is recorded: optimizers and libraries make what they keep."""


class _Recorded(NamedTuple):
    """A step as a CUDA graph, the tensors it reads and the one it writes."""

    graph: torch.cuda.CUDAGraph
    ids: Tensor
    labels: Tensor
    loss: Tensor


class TrainingStep:
    """Forward, backward, meta stream and both optimizers, on one batch at a time.

    On a GPU thousands of small kernels wait for Python to launch them. There the step is recorded
    as a CUDA graph for each shape of batch, and replayed: the same kernels, the same numbers.
    Padded batches, which have many shapes, run as on the CPU.

    Args:
        model: Called with (ids, mask, labels=labels), which returns a `loss`.
        dynamics: Attached to it; its optimizers were made with capturable=True for CUDA.
        device: Where the batches are.
    """

    def __init__(self, model: nn.Module, dynamics: LearningDynamics, device: str) -> None:
        self._model, self._dynamics = model, dynamics
        self._records = torch.device(device).type == "cuda"
        self._seen: dict[torch.Size, int] = {}
        self._recorded: dict[torch.Size, _Recorded] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """Make a step, and return the main loss; the next step of this shape overwrites it."""
        shape = batch.ids.shape
        if not self._records or batch.mask is not None:
            return self._run(batch.ids, batch.labels, batch.mask)
        seen = self._seen[shape] = self._seen.get(shape, 0) + 1
        if seen <= _EAGER_FIRST:
            return self._run(batch.ids, batch.labels, None)
        if shape not in self._recorded:
            self._recorded[shape] = self._record(batch)
        recorded = self._recorded[shape]
        recorded.ids.copy_(batch.ids)
        recorded.labels.copy_(batch.labels)
        recorded.graph.replay()
        return recorded.loss

    def _run(self, ids: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        loss = self._model(ids, mask, labels=labels).loss
        return self._dynamics.compute_and_apply_gradients(loss).loss

    def _record(self, batch: Batch) -> _Recorded:
        ids, labels = batch.ids.clone(), batch.labels.clone()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            loss = self._run(ids, labels, None)
        return _Recorded(graph, ids, labels, loss)


def on_own_stream(device: str, act: Callable[[], object]) -> None:
    """Run something on a stream of its own, which recording needs; on the CPU just run it."""
    if torch.device(device).type != "cuda":
        act()
        return
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        act()
    torch.cuda.current_stream().wait_stream(stream)
