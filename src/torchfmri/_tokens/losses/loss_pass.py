"""One pass over the tokens' losses: which route each parameter takes, chunks, reductions.

Before the chunks, the weighted sum of all losses is differentiated once with respect to both the
outputs of the layers and the parameters. Where the former explain the latter, a parameter's
gradients can be had from factors; where they do not (it is used outside of its module's call, or
the module does something else than its class says), they are taken at the parameter itself. The
same totals are what the tokens' gradients must add up to in the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchfmri._tokens.algebra.block import TermBlock
from torchfmri._tokens.algebra.sketch import Sketch
from torchfmri._tokens.losses.gradient import Computed, TokenLossGradient
from torchfmri._tokens.losses.matrix_calls import MatrixCall
from torchfmri._tokens.losses.routes import explaining, explains, rule_of
from torchfmri._tokens.losses.vector_jacobian import Place, VectorJacobian, largest_gradient
from torchfmri.exceptions import MemoryLimitError

DIRECT, UNUSED = "at the parameter", "receives no gradient"
_CHUNK = 1 << 30  # bytes of a chunk at most: larger ones are no faster
_PROBE = 16  # numbers of the random map under which totals are compared
_PROBE_SEED = -1


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is computed while the gradients pass by, besides the norms.

    Attributes:
        factors: Whether the factors are kept.
        sketch: (k, seed) of a random projection, or None.
        directions: Name of a parameter -> direction to take inner products with.
    """

    factors: bool = False
    sketch: tuple[int, int] | None = None
    directions: Mapping[str, Tensor] = field(default_factory=dict)


class LossPass:
    """The way of all tokens' losses to the parameters.

    Args:
        losses: One loss per token, with its graph.
        parameters: Name -> parameter.
        calls: The calls of layers that multiply by one of them.
        wanted: What to compute.
        max_bytes: What a chunk, and the factors that are kept, may take.
    """

    def __init__(
        self,
        losses: Tensor,
        parameters: Mapping[str, nn.Parameter],
        calls: Sequence[MatrixCall],
        wanted: Wanted,
        max_bytes: int,
    ) -> None:
        self._losses, self._wanted, self._max_bytes = losses, wanted, max_bytes
        self._calls = list(calls)
        self._paths = [_Path(name, each, wanted) for name, each in parameters.items()]
        self._weights = _weights(losses)
        self._kept = 0

    def run(self) -> dict[str, TokenLossGradient]:
        """The gradients by parameter."""
        self._choose_routes()
        if self._wanted.factors:
            self._copy_inputs()
        places = [place for path in self._paths for place in path.places()]
        jacobian = VectorJacobian(self._losses, places)
        for first, last in self._chunks():
            found = iter(jacobian.tokens(first, last))
            for path in self._paths:
                arrived = [next(found) for _ in path.places()]
                self._keep(path, path.reduce(arrived, last - first))
        largest = max((path.size() for path in self._paths), default=0.0)
        reason = jacobian.reason
        note = f"one token at a time, because batching failed: {reason}" if reason else ""
        grid = tuple(self._losses.shape)
        return {path.name: path.result(grid, self._weights, largest, note) for path in self._paths}

    def _choose_routes(self) -> None:
        """Differentiate the sum of the losses and compare (module docstring)."""
        edges: list[Place] = [call.edge for call in self._calls]
        jacobian = VectorJacobian(self._losses, [*edges, *(each.parameter for each in self._paths)])
        for weights in self._weights:
            found = jacobian.weighted(weights)
            arrived = list(zip(self._calls, found, strict=False))
            for path, total in zip(self._paths, found[len(edges) :], strict=True):
                own = [(call, g) for call, g in arrived if call.parameter == path.name]
                path.choose(total, [(call, g) for call, g in own if g is not None])

    def _copy_inputs(self) -> None:
        """Inputs that are kept must not change when the user writes the next batch into them."""
        copies: dict[tuple[int, torch.Size], Tensor] = {}
        for path in self._paths:
            calls = path.calls or []
            for number, call in enumerate(calls):
                values = call.values
                key = (values.data_ptr(), values.shape)  # q, k and v read the same one
                if key not in copies:
                    self._take(path.name, values.numel() * values.element_size())
                    copies[key] = values.clone()
                calls[number] = call.reading(copies[key])

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """How many tokens go at once: what arrives, and what is needed to get and reduce it."""
        sizes = {path.name: path.bytes for path in self._paths}
        biggest = max(sizes, key=sizes.__getitem__, default="")
        needed = sum(sizes.values()) + 3 * max(largest_gradient(self._losses), *sizes.values(), 0)
        if needed > self._max_bytes:
            advice = (
                "That is for a single token, all parameters together. Select fewer parameters, or "
                "raise max_bytes."
            )
            raise MemoryLimitError(biggest, needed, 0, self._max_bytes, advice)
        count = self._losses.numel()
        step = max(1, min(self._max_bytes, _CHUNK) // max(1, needed))
        for first in range(0, count, step):
            yield first, min(first + step, count)

    def _keep(self, path: _Path, blocks: list[TermBlock]) -> None:
        if not self._wanted.factors:
            return
        for block in blocks:
            self._take(path.name, block.bytes)
            path.blocks.append(block.kept())

    def _take(self, name: str, needed: int) -> None:
        if self._kept + needed > self._max_bytes:
            advice = (
                "Those are the factors of all tokens so far. Select fewer parameters or fewer "
                "tokens (losses[:, :64]), raise max_bytes, or keep norms and project "
                "(tokens.backward(losses, project=256))."
            )
            raise MemoryLimitError(name, needed, self._kept, self._max_bytes, advice)
        self._kept += needed


class _Path:
    """The way to one parameter, and what has been computed on it."""

    def __init__(self, name: str, parameter: nn.Parameter, wanted: Wanted) -> None:
        self.name, self.parameter = name, parameter
        self._shape = tuple(parameter.shape)
        self._wanted = wanted
        self.calls: list[MatrixCall] | None = None  # None: not compared yet, or not explained
        self._rule, self._note = "", ""
        self._totals: list[Tensor] = []
        self._probe = Sketch(name, self._shape, _PROBE, _PROBE_SEED)
        self._sketch = None if wanted.sketch is None else Sketch(name, self._shape, *wanted.sketch)
        self._squares: list[Tensor] = []
        self._probes: list[Tensor] = []
        self._sketches: list[Tensor] = []
        self._dots: list[Tensor] = []
        self.blocks: list[TermBlock] = []

    # -- the route ---------------------------------------------------------------------------

    def choose(self, total: Tensor | None, arrived: list[tuple[MatrixCall, Tensor]]) -> None:
        """Take the route through the calls if their outputs explain the whole gradient."""
        if total is None:
            self._rule = UNUSED
            return
        self._totals.append(self._probe.dense(total.reshape(1, -1))[0])
        if self._rule == DIRECT:
            return
        if self.calls is None:  # the first comparison chooses, the second must agree
            self.calls = explaining(total, arrived)
        elif not explains(
            total, [(one, g) for one, (_, g) in zip(self.calls, arrived, strict=True)]
        ):
            self.calls = None
        if self.calls is not None:
            self._rule = rule_of(self.calls)
            return
        if arrived:
            self._note = "the calls of its module do not explain its whole gradient"
        self._rule = DIRECT

    def places(self) -> list[Place]:
        """Where its gradients are taken."""
        if self._rule == UNUSED:
            return []
        return [self.parameter] if self.calls is None else [call.edge for call in self.calls]

    @property
    def bytes(self) -> int:
        """What arrives for one token, and its factors in at least float32."""
        if self._rule == UNUSED:
            return 0
        width = max(4, self.parameter.element_size())
        if self.calls is None:
            return self.parameter.numel() * width
        return sum(math.prod(call.shape) for call in self.calls) * width

    # -- the chunks --------------------------------------------------------------------------

    def reduce(self, arrived: list[Tensor | None], count: int) -> list[TermBlock]:
        """Compute what is wanted of a chunk; returns what could be kept of it."""
        block = self._block(arrived, count)
        parts = [block.trimmed(tokens) for tokens in block.runs()]
        for part in parts:
            precise = part.precise()
            self._squares.append(precise.squares())
            self._probes.append(precise.sketches(self._probe))
            if self._sketch is not None:
                self._sketches.append(precise.sketches(self._sketch))
            if self.name in self._wanted.directions:
                self._dots.append(precise.dots(self._wanted.directions[self.name]))
        return parts

    def _block(self, arrived: list[Tensor | None], count: int) -> TermBlock:
        found = [
            call.factors(g)
            for call, g in zip(self.calls or (), arrived, strict=False)
            if g is not None
        ]
        if found:
            return TermBlock(self._shape, found)
        whole = arrived[0] if arrived and self.calls is None else None
        if whole is None:  # no token of this chunk reaches it
            whole = self.parameter.new_zeros(count, self.parameter.numel())
        return TermBlock(self._shape, (), whole.reshape(count, -1))

    # -- the end -----------------------------------------------------------------------------

    def size(self) -> float:
        """How large the tokens' gradients are, under the random map."""
        return float(torch.linalg.vector_norm(torch.cat(self._probes)))

    def result(
        self, grid: tuple[int, ...], weights: Sequence[Tensor], largest: float, note: str
    ) -> TokenLossGradient:
        """The result, with how far the tokens are from adding up to the whole."""
        computed = Computed(
            torch.cat(self._squares).to(weights[0].device),
            self.blocks if self._wanted.factors else None,
            {} if self._wanted.sketch is None else {self._wanted.sketch: torch.cat(self._sketches)},
            torch.cat(self._dots) if self._dots else None,
        )
        notes = "; ".join(each for each in (self._note, note) if each)
        residual = self._residual(weights, largest)
        return TokenLossGradient(
            self.name, self._shape, grid, computed, rule=self._rule, residual=residual, note=notes
        )

    def _residual(self, weights: Sequence[Tensor], largest: float) -> float:
        probes = torch.cat(self._probes)
        # Some gradients are zero but for rounding (the bias of attention keys): what is small
        # beside all the others is measured against those.
        floor = math.sqrt(torch.finfo(self.parameter.dtype).eps) * largest
        worst = 0.0
        for each, total in zip(weights, self._totals, strict=False):
            scaled = probes * each.flatten().to(probes)[:, None]
            gap = float(torch.linalg.vector_norm(scaled.sum(0) - total))
            size = max(float(torch.linalg.vector_norm(scaled)), floor)
            worst = max(worst, gap / size if gap else 0.0) if gap == gap else math.nan
        return worst


def _weights(losses: Tensor) -> list[Tensor]:
    """The plain sum, and one in which no two tokens have the same weight: mixing them up shows."""
    number = torch.arange(losses.numel(), device=losses.device, dtype=losses.dtype)
    return [torch.ones_like(losses), (1 + number.cos() / 2).view(losses.shape)]
