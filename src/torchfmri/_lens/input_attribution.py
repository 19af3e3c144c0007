"""Which input tokens made a logit: gradient x input, and integrated gradients.

`torchfmri.attribute_inputs` calls `attribute_embeddings` and fills the record, which is public.
Other vectors are put in by a hook on the input embedding, so any model works that has one. The
points are Gauss-Legendre's; rows are run `_ROWS_AT_ONCE` at a time, and sums are in float64.
Integrated gradients that do not add up must say so: keep `residual` and `has_converged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchfmri._lens.logit_attribution import title_of
from torchfmri._model import unwrap
from torchfmri._text import Column, Grid
from torchfmri._torch import hooked
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import plot_token_bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS = ("gradient_x_input", "integrated_gradients")
_ROWS_AT_ONCE = 16  # points of the way that run in one batch
_CONVERGED = 0.05  # share of logit - baseline that may be missing


@dataclass(frozen=True, eq=False)
class InputAttribution:
    """What each input token adds to one logit, or to the difference of two.

    Attributes:
        method: "gradient_x_input" or "integrated_gradients".
        token: The text of the token whose logit it is.
        against: The text of the other token, where it is a difference; else None.
        position: The position whose prediction it is.
        pieces: The text of each input token.
        values: (s,) what each adds.
        logit: The logit, or the difference.
        baseline: The same number with the baseline instead of every token.
        steps: How many points of the way from there integrated gradients looked at; 1 for the
            other method.

    Examples:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> found = torchfmri.attribute_inputs(model, tokenizer, "Once upon a time")
        >>> len(found.values) == len(found.pieces)
        True
    """

    method: str
    token: str
    against: str | None
    position: int
    pieces: Sequence[str]
    values: NDArray[np.float64]
    logit: float
    baseline: float
    steps: int

    @property
    def residual(self) -> float:
        """What the tokens miss of logit - baseline; 0 for integrated gradients that converged."""
        return self.logit - self.baseline - float(self.values.sum())

    @property
    def has_converged(self) -> bool:
        """Whether the tokens explain all but 5% of logit - baseline."""
        return abs(self.residual) <= _CONVERGED * abs(self.logit - self.baseline)

    @property
    def title(self) -> str:
        """What was attributed, and how."""
        what = title_of(self.token, self.against, self.position)
        return f"{what}, {self.method.replace('_', ' ')}"

    def table(self) -> str:
        """Return a line per token, then the sum and how far it is from the logit."""
        names = [f"{index} {piece!r}" for index, piece in enumerate(self.pieces)]
        cells = [f"{value:+.4f}" for value in (*self.values, self.values.sum())]
        names.append("sum")
        notes = []
        if self.method == "integrated_gradients":
            names += ["logit - baseline", "residual"]
            cells += [f"{self.logit - self.baseline:+.4f}", f"{self.residual:+.1e}"]
            if not self.has_converged:
                notes.append(
                    f"not converged in {self.steps} steps: the residual is more than "
                    f"{_CONVERGED:.0%} of what is to be explained, so trust no single number here; "
                    "try more steps, another baseline, or method='gradient_x_input'"
                )
        return Grid(self.title, "token", names, [Column("adds", cells, 1)], notes).text()

    def __repr__(self) -> str:
        return f"<InputAttribution: {self.title}; residual {self.residual:.1e}>"

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw a bar per token, orange if it adds and blue if it takes away."""
        return plot_token_bars(self.values, list(self.pieces), title=self.title, ax=ax)


def attribute_embeddings(
    model: nn.Module,
    call: Callable[[int], Tensor],
    score: Callable[[Tensor], Tensor],
    method: str,
    steps: int,
    baseline: str | int = "mean",
) -> tuple[Tensor, float, float]:
    """Return what each input token adds to a score, (s,), the score, and its baseline.

    Args:
        model: The model; a hook on its input embedding puts other vectors in while this runs.
        call: Runs it on a number of copies of the one sequence; returns logits (copies, s, v).
        score: Logits (copies, s, v) -> (copies,).
        method: One of `METHODS`.
        steps: Points of integrated gradients, by Gauss and Legendre's rule.
        baseline: "zero", "mean" (of all embeddings), or the token that every token is put in for.
    """
    embedding = _embedding(model)
    _check_baseline(embedding, baseline)
    real: list[Tensor] = []
    with torch.no_grad(), _hooked(embedding, lambda output: real.append(output.detach().clone())):
        logit = float(score(call(1))[0])
    if len(real) != 1 or real[0].ndim != 3:
        raise InspectionError(
            f"The input embedding of {type(unwrap(model)).__name__} runs {len(real)} times in a "
            "pass, but once with (b, s, width) was expected: its tokens cannot be told apart."
        )
    vectors = real[0][:1]
    start = _baseline(embedding, vectors, baseline)
    if method == "gradient_x_input":
        points, weights = np.ones(1), np.ones(1)
    else:
        nodes, weights = np.polynomial.legendre.leggauss(steps)
        points, weights = (1 + nodes) / 2, weights / 2
    with torch.no_grad(), _hooked(embedding, partial(_instead, start)):
        lowest = float(score(call(1))[0])
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for first in range(0, len(points), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        alphas = torch.tensor(points[part], dtype=vectors.dtype, device=vectors.device)
        given = (start + alphas[:, None, None] * (vectors - start)).requires_grad_()
        with torch.enable_grad(), _hooked(embedding, partial(_instead, given)):
            (gradient,) = torch.autograd.grad(score(call(len(alphas))).sum(), given)
        rule = torch.tensor(weights[part], device=vectors.device)
        total += torch.einsum("n,nsw->sw", rule, gradient.double())
    apart = vectors if method == "gradient_x_input" else vectors - start
    return (total * apart[0].double()).sum(-1), logit, lowest


def _baseline(embedding: nn.Module, vectors: Tensor, baseline: str | int) -> Tensor:
    """Return the vectors (1, s, width) that stand for a prompt that says nothing."""
    if baseline == "zero":
        return torch.zeros_like(vectors)
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    tokens = range(len(weight)) if baseline == "mean" else [baseline]
    ids = torch.tensor(tokens, device=weight.device)
    # Through the layer itself, which may scale what is in its table (Gemma).
    with torch.no_grad():
        found: Tensor = embedding(ids)
    return found.double().mean(0).to(vectors.dtype).expand_as(vectors).clone()


def _check_baseline(embedding: nn.Module, baseline: str | int) -> None:
    """Raise for a baseline that the embedding has no vector for, before the model runs."""
    weight = getattr(embedding, "weight", None)
    if baseline == "zero":
        return
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise InspectionError(
            f"baseline={baseline!r}: {type(embedding).__name__} has no table of embeddings. Use "
            "baseline='zero'."
        )
    if baseline != "mean" and not (isinstance(baseline, int) and 0 <= baseline < len(weight)):
        raise InspectionError(
            f"baseline={baseline!r}: give 'mean', 'zero', or a token, 0 to {len(weight) - 1}."
        )


def _embedding(model: nn.Module) -> nn.Module:
    find = getattr(unwrap(model), "get_input_embeddings", None)
    try:
        found = find() if callable(find) else None
    except NotImplementedError:  # it has embeddings of another kind
        found = None
    if not isinstance(found, nn.Module):
        raise InspectionError(
            f"{type(unwrap(model)).__name__} does not say where its tokens are embedded: it has no "
            "get_input_embeddings(). Give it one that returns that layer."
        )
    return found


def _instead(given: Tensor, _: Tensor) -> Tensor:
    return given.clone()  # some models write into their embeddings, and into a leaf nobody may


@contextmanager
def _hooked(module: nn.Module, act: Callable[[Tensor], Any]) -> Iterator[None]:
    """Hand the output of a module to `act`; what that returns, if anything, is put in its place."""

    def hook(_: nn.Module, __: object, output: Tensor) -> Tensor | None:
        found = act(output)
        return found if isinstance(found, Tensor) else None

    with hooked([module.register_forward_hook(hook)]):
        yield
