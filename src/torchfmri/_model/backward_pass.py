"""One backward pass over a finished forward pass, without touching anybody's `.grad`.

The Inspector, scans, costs, verification and incidents call it. `torch.autograd.grad` runs wherever
it can, because it fills no `.grad` and sets off no optimizer that steps in the backward pass. A
reentrant checkpoint refuses it and needs `backward()`: then each `.grad` is put aside, as it is
around a Function that runs backward passes of its own. `prepare_backward` searches the graph
beforehand, so that costs can time the pass alone. Whichever way runs, every `.grad` must be the
same tensor with the same values afterwards, because the user's optimizer steps with it. How the
graph is searched may change freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from torchfmri._model.interruption import whole_restorations
from torchfmri._torch import has_post_accumulate_hooks, nodes_behind
from torchfmri.exceptions import InspectionError

# The node that torch.utils.checkpoint(use_reentrant=True) leaves in the graph.
_REENTRANT = "CheckpointFunctionBackward"


def run_backward(loss: Tensor, parameters: Iterable[Tensor]) -> None:
    """Run the backward pass of `loss`; hooks fire, and every `.grad` stays as it is.

    Raises:
        InspectionError: The graph holds a reentrant checkpoint, which only `loss.backward()` can
            run, and something (an optimizer in the backward pass) would act on the gradients.
    """
    prepare_backward(loss, parameters)()


def prepare_backward(loss: Tensor, parameters: Iterable[Tensor]) -> Callable[[], object]:
    """Return what `run_backward` runs, with the search through the graph already done."""
    leaves, reentrant = _explore(loss)
    spared = {**leaves, **{id(each): each for each in parameters}}
    run: Callable[[], object] = partial(torch.autograd.backward, loss)
    if reentrant:
        _refuse_acting(spared.values())
    elif leaves:  # else nothing is to be differentiated, and hooks still fire
        run = partial(torch.autograd.grad, loss, list(leaves.values()), allow_unused=True)
    return partial(_run_spared, run, spared.values())


def _run_spared(run: Callable[[], object], leaves: Iterable[Tensor]) -> None:
    """Run a backward pass in which a Function may run others, as reversible layers do.

    These are `backward()`s, whatever the outer pass is: they fill the `.grad` of their leaves.
    """
    with spared_grad(leaves):
        run()


def _explore(loss: Tensor) -> tuple[dict[int, Tensor], bool]:
    """Return the leaves of the graph behind `loss`, and whether it has a reentrant checkpoint."""
    leaves: dict[int, Tensor] = {}
    reentrant = False
    for node in nodes_behind([loss.grad_fn]):
        variable = getattr(node, "variable", None)  # an AccumulateGrad node has its leaf
        if isinstance(variable, Tensor):
            leaves[id(variable)] = variable
        reentrant = reentrant or node.name() == _REENTRANT
    if loss.grad_fn is None:
        leaves[id(loss)] = loss
    return leaves, reentrant


def _refuse_acting(leaves: Iterable[Tensor]) -> None:
    """Raise if something acts as soon as a `.grad` is filled, which only we would have done."""
    acting = [leaf for leaf in leaves if has_post_accumulate_hooks(leaf)]
    if acting:
        raise InspectionError(
            f"The model uses reentrant checkpointing, and {len(acting)} parameters act as soon as "
            "they get a gradient (an optimizer in the backward pass). A backward pass by torchfmri "
            "would step that optimizer. Use checkpoint(..., use_reentrant=False)."
        )


@contextmanager
def spared_grad(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Put every `.grad` aside while the block runs its own backward passes."""
    with whole_restorations():
        spare = [(leaf, leaf.grad) for leaf in leaves if leaf.is_leaf]
        try:
            for leaf, _ in spare:
                leaf.grad = None
            yield
        finally:
            for leaf, gradient in spare:
                leaf.grad = gradient


def acts_on_gradients(parameters: Iterable[Tensor]) -> bool:
    """Whether a plain `backward()` would set something off besides filling `.grad`.

    An optimizer in the backward pass would step, and data-parallel processes would talk.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed or any(has_post_accumulate_hooks(each) for each in parameters)
