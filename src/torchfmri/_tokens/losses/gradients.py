"""`TokenLossGradients`: differentiate every token's loss inside a `with` block, then read.

`token_gradients(per="token_loss")` makes it, and users call `backward(losses)` inside the block.
The hooks only note calls (`MatrixCalls`); `backward` runs `LossPass` and keeps the results. It uses
`torch.autograd.grad` and keeps the graph, so `.grad` stays untouched and the user's own backward
still works afterwards. Methods have the names and meanings of `TokenGradients`, so keep the two
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor, nn

from torchfmri._model import (
    compiled_code_as_eager,
    match_names,
    named_layers,
    not_found,
    switched_off,
    watched,
)
from torchfmri._tokens.algebra.coverage import Coverage, CoverageRow
from torchfmri._tokens.losses.gradient import TokenLossGradient, check_direction
from torchfmri._tokens.losses.loss_pass import UNUSED, LossPass, Wanted
from torchfmri._tokens.losses.matrix_calls import MatrixCalls
from torchfmri.exceptions import InspectionError

_USAGE = (
    'with torchfmri.token_gradients(model, "*", per="token_loss") as tokens: '
    "losses = torchfmri.token_losses(model(ids).logits, ids); tokens.backward(losses)"
)


class TokenLossGradients:
    """The gradient of each token's own loss l_t, for all parameters that were selected.

    Every token's loss is differentiated by itself, over all positions that it could see. That
    takes as many vector-Jacobian products as there are tokens; they run in chunks under
    `max_bytes`. `.grad` is not touched, and the graph stays: `losses.sum().backward()` still works
    afterwards. The sum over all tokens is the gradient of `losses.sum()`.

    Args:
        model: Is left as it was.
        parameters: Name -> parameter, as selected by a pattern.
        max_bytes: What one chunk of tokens may take, and what the factors may take that are kept.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Linear(3, 2)
        >>> with torchfmri.token_gradients(model, per="token_loss") as tokens:
        ...     losses = model(torch.randn(1, 4, 3)).square().sum(-1)
        ...     tokens.backward(losses)
        >>> tokens["weight"].norm().shape
        torch.Size([1, 4])
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        max_bytes: int = 1 << 30,
        keep: str = "norms",
    ) -> None:
        self._keep = _checked_keep(keep)
        self._model, self._max_bytes = model, max_bytes
        self._parameters = dict(parameters)
        self._names = _all_names(model, self._parameters)
        self._calls = MatrixCalls(model, self._parameters)
        self._stack: ExitStack | None = None
        self._is_off = False
        self._frozen: list[str] = []
        self._results: dict[str, TokenLossGradient] | None = None

    # -- attaching ---------------------------------------------------------------------------

    def __enter__(self) -> TokenLossGradients:
        if self._stack is not None:
            raise InspectionError("These token gradients are attached already.")
        self._is_off = switched_off()
        with ExitStack() as stack:
            if not self._is_off:
                stack.enter_context(watched(self._model))
                stack.callback(self._calls.detach)
                stack.enter_context(compiled_code_as_eager())
                self._calls.attach()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    # -- the pass ----------------------------------------------------------------------------

    def backward(
        self,
        losses: Tensor,
        *,
        keep: str | None = None,
        project: int | None = None,
        seed: int = 0,
        dot: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Differentiate every loss by itself. Norms are always computed; say what else is wanted.

        The gradients of a chunk are gone when the next one comes, so the rest has to be asked for
        here: `project=256` for a random projection, `dot={name: direction}` for inner products.
        With `keep="factors"` everything, also `gram()`, can be asked afterwards; the factors of
        all tokens must then fit in `max_bytes`.

        Args:
            losses: One loss per token, (b, s), with their graph: `torchfmri.token_losses(...)`.
                Fewer tokens cost less: `losses[:, 5:10]`.
            keep: "norms" or "factors"; by default as `token_gradients(..., keep=...)` said, and
                norms if it did not.
            project: To how many numbers each gradient is mapped, or None.
            seed: Of that map.
            dot: Name of a parameter -> direction, of its shape.

        Raises:
            InspectionError: The losses are not one per token, or have no graph.
            MemoryLimitError: A single token, or the factors, need more than `max_bytes`.
        """
        if self._is_off:
            return
        if self._stack is None:
            raise InspectionError(f"backward() belongs inside the with block: {_USAGE}.")
        keep = self._keep if keep is None else _checked_keep(keep)
        _check_losses(losses)
        sketch = None if project is None else (project, seed)
        directions = self._directions(dot or {})
        wanted = Wanted(keep == "factors", sketch, directions)
        trained = {name: each for name, each in self._parameters.items() if each.requires_grad}
        self._frozen = [name for name in self._parameters if name not in trained]
        self._results = None
        calls = self._calls.calls
        with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
            self._results = LossPass(losses, trained, calls, wanted, self._max_bytes).run()
        self._calls.use_up()

    def _directions(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        directions = {}
        for name, direction in given.items():
            first = self._first_name(name)
            check_direction(name, direction, tuple(self._parameters[first].shape))
            directions[first] = direction.detach()
        return directions

    # -- reading -----------------------------------------------------------------------------

    def __getitem__(self, name: str) -> TokenLossGradient:
        results, first = self._computed(), self._first_name(name)
        if first not in results:
            raise InspectionError(
                f"{name!r} is frozen: it gets no gradient. Set requires_grad_(True) before the run."
            )
        return results[first]

    @property
    def names(self) -> list[str]:
        """The parameters that receive a gradient, in model order."""
        return [name for name, each in self._computed().items() if each.rule != UNUSED]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return self._names.get(str(name)) in self.names

    def __repr__(self) -> str:
        state = "no losses yet" if self._results is None else f"{len(self._results)} parameters"
        return f"TokenLossGradients({type(self._model).__name__}, {state})"

    def norm(self, pattern: str = "*") -> Tensor:
        """The norm of each token's gradient over all parameters that match, (b, s)."""
        return self._sum(TokenLossGradient.squares, pattern).sqrt()

    def gram(self, pattern: str = "*") -> Tensor:
        """The inner product of every two tokens' gradients over all parameters, (b * s, b * s).

        Exact. It needs `backward(losses, keep="factors")`; where those do not fit, the inner
        products of `project(k)` estimate it without bias.
        """
        return self._sum(TokenLossGradient.gram, pattern)

    def project(self, k: int, seed: int = 0, pattern: str = "*") -> Tensor:
        """Each token's gradient over all parameters under a random map to k numbers, (b, s, k)."""
        return self._sum(lambda each: each.project(k, seed), pattern)

    def dot(self, direction: Mapping[str, Tensor] | None = None) -> Tensor:
        """The inner product of each token's gradient with one direction, (b, s).

        Args:
            direction: Name of a parameter -> its part of the direction; the others count as zero.
                Without it the direction given to `backward(dot=...)`.
        """
        results = self._computed()
        if direction is None:
            parts = [each.dot() for each in results.values() if each.has_dots]
            if not parts:
                raise InspectionError(
                    "No direction was given. Write tokens.backward(losses, dot={name: direction})."
                )
        else:
            parts = [self[name].dot(each) for name, each in self._directions(direction).items()]
        return _added(parts)

    def coverage(self) -> Coverage:
        """How each parameter's gradients were found, and how well they add up.

        The rule names the calls whose factors were used ("Linear", "Embedding + Linear"), or says
        "at the parameter" where one whole gradient per token was formed and reduced at once. The
        residual is |sum over tokens - gradient of the sum| relative to the tokens' gradients,
        under a random map, for the plain sum and for one that weighs every token differently.
        """
        failures = self._calls.failures
        rows = [
            CoverageRow(
                name=each.name,
                rule=each.rule,
                tokens=("losses",),
                residual=each.residual,
                check="probe",
                note=f"a hook failed: {failures[each.name]!r}"
                if each.name in failures
                else each.note,
            )
            for each in self._computed().values()
        ]
        return Coverage(rows + [CoverageRow(name, "frozen") for name in self._frozen])

    def _sum(self, act: Callable[[TokenLossGradient], Tensor], pattern: str) -> Tensor:
        results = self._computed()
        names = match_names(pattern, self.names)
        if not names:
            raise not_found(pattern, self.names, "tokens.names", "parameter")
        return _added([act(results[name]) for name in names])

    def _computed(self) -> dict[str, TokenLossGradient]:
        if self._is_off:
            raise InspectionError("Nothing was computed: TORCHFMRI=off is set in the environment.")
        if self._results is None:
            raise InspectionError(
                f"Nothing was computed yet: tokens.backward(losses) comes first. {_USAGE}."
            )
        return self._results

    def _first_name(self, name: str) -> str:
        first = self._names.get(name) if isinstance(name, str) else None
        if first is None:
            raise not_found(name, self._names, "tokens.names", "parameter")
        return first


def _all_names(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Every name of each parameter -> the name that it was selected by (tied weights)."""
    first = {id(parameter): name for name, parameter in parameters.items()}
    names = {name: name for name in parameters}
    for layer, module in named_layers(model).items():
        for key, parameter in module._parameters.items():
            if id(parameter) in first:
                names.setdefault(f"{layer}.{key}" if layer else key, first[id(parameter)])
    return names


def _checked_keep(keep: str) -> str:
    if keep not in ("norms", "factors"):
        raise InspectionError(f"keep={keep!r}: choose 'norms' or 'factors'.")
    return keep


def _check_losses(losses: Tensor) -> None:
    if not isinstance(losses, Tensor) or losses.ndim == 0 or not losses.is_floating_point():
        what = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else losses
        raise InspectionError(
            f"backward() takes one loss per token, (b, s), not {what!r}. Do not add the losses up: "
            "losses = torchfmri.token_losses(logits, ids)."
        )
    if losses.grad_fn is None:
        raise InspectionError(
            "The losses have no graph: they were computed under torch.no_grad(), were detached, "
            "or no parameter of the model requires grad."
        )


def _added(parts: list[Tensor]) -> Tensor:
    """The sum, on the device of the first."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part.to(total.device)
    return total
