"""On CUDA a training step is recorded and replayed: the same numbers as step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchfmri.routing import (
    LearningDynamics,
    RoutingConfig,
    RoutingLanguageModel,
    computation_parameters,
    routing_parameters,
)
from torchfmri.routing.experiment.tasks import SequenceTasks
from torchfmri.routing.experiment.training_run import VARIANTS
from torchfmri.routing.experiment.training_step import TrainingStep, on_own_stream

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train(variant: str, recorded: bool) -> Tensor:
    """The losses of twenty steps of three lengths."""
    torch.manual_seed(0)
    tasks, chosen = SequenceTasks(lengths=(3, 4, 5)), VARIANTS[variant]
    model = RoutingLanguageModel(RoutingConfig(tasks.vocab_size, 32, 3, 2)).cuda()
    options = {"lr": 2e-3, "fused": True, "capturable": True}
    main = torch.optim.AdamW(computation_parameters(model), **options)
    meta = torch.optim.AdamW(routing_parameters(model), **options)
    losses = []

    def run() -> None:
        with LearningDynamics(
            model, main, meta, meta_loss=chosen.meta_loss, signal=chosen.signal, mode=chosen.mode
        ) as dynamics:
            # What is called the CPU's way here is the eager one; the tensors are on the GPU.
            step = TrainingStep(model, dynamics, "cuda" if recorded else "cpu")
            for number in range(20):
                batch = tasks.train(8, torch.Generator().manual_seed(number)).to("cuda")
                losses.append(step(batch).clone())
            assert bool(step._recorded) == recorded

    on_own_stream("cuda", run)
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("variant", ["agreement", "aggregate", "token", "dense"])
def test_a_replayed_step_is_the_step(variant: str) -> None:
    eager, replayed = train(variant, recorded=False), train(variant, recorded=True)
    torch.testing.assert_close(replayed, eager, rtol=1e-4, atol=1e-4)
    assert not torch.equal(eager[0], eager[-1])
