"""`TokenGradient`: the gradient of one parameter through each token, kept as factors.

`calls/runs.py` makes it, users get it by `tokens[name]`, and `TokenSelection` adds several up. Its
shape is that of all tokens times the parameter and is never allocated, except in `materialise`: a
new method works on `terms()`, or in slices of tokens. It has either terms or `reduced` numbers
(keep="norms" or "voxels"), so a method needs one of the two. Public methods leave padded positions
out; `total` and `probes` keep them, because they are compared with what autograd added up. Every
public method is `in_full`, or it would compute in the caller's autocast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchfmri._arguments import check_number, check_tensor, is_whole
from torchfmri._tokens.algebra import factors
from torchfmri._tokens.algebra.factors import Index, Term
from torchfmri._tokens.algebra.parameter import ParameterInfo
from torchfmri._tokens.algebra.precision import in_full
from torchfmri._tokens.algebra.reduced import Reduced
from torchfmri._tokens.algebra.sketch import Sketch
from torchfmri._tokens.algebra.voxels import voxel_squares
from torchfmri.exceptions import InspectionError, MemoryLimitError

MAX_BYTES = 1 << 32


class TopEntries(NamedTuple):
    """The largest entries of each token's gradient.

    Attributes:
        values: (b, s, k), by falling absolute value.
        indices: (b, s, k, axes of the parameter): where they are.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Linear(3, 2)
        >>> with torchfmri.token_gradients(model) as tokens:
        ...     model(torch.randn(1, 4, 3)).square().sum().backward()
        >>> tokens["weight"].topk(2).indices.shape
        torch.Size([1, 4, 2, 2])
    """

    values: Tensor
    indices: Tensor


class TokenGradient:
    """The gradient of one parameter through each token position, kept as factors.

    Its shape is (b, s, *parameter.shape), and nothing of that size is ever formed: every method
    works on the factors. Padded positions are excluded: they count as zero.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> x = torch.randn(1, 4, 3)
        >>> with torchfmri.token_gradients(model) as tokens:
        ...     model(x).square().sum().backward()
        >>> tokens["weight"].shape
        torch.Size([1, 4, 2, 3])
        >>> torch.equal(tokens["weight"].sum(), model.weight.grad)
        True
    """

    def __init__(
        self,
        info: ParameterInfo,
        grid: tuple[int, int],
        rule: str,
        *,
        terms: Sequence[Term] | None = None,
        reduced: Reduced | None = None,
        mask: Tensor | None = None,
    ) -> None:
        self._info, self._grid, self.rule, self.mask = info, grid, rule, mask
        self._all, self.reduced = terms, reduced
        self._counted: Sequence[Term] | None = None
        self._squares: Tensor | None = None

    # -- what it is --------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self._info.name

    @property
    def shape(self) -> torch.Size:
        """(b, s, *parameter.shape)."""
        return torch.Size((*self._grid, *self._info.shape))

    @property
    def bytes(self) -> int:
        """What its factors keep in memory; several parameters may share them."""
        return sum(term.bytes for term in self._all or ())

    def __repr__(self) -> str:
        norms = "voxels" if self._is_by_voxel else "norms"
        kept = norms if self._all is None else "factors"
        return (
            f"TokenGradient({self.name!r}, shape={tuple(self.shape)}, rule={self.rule!r}, "
            f"keep={kept!r})"
        )

    # -- numbers per token -------------------------------------------------------------------

    @in_full
    def norm(self, by: str | None = None) -> Tensor:
        """The Euclidean norm of each token's gradient, (b, s).

        Args:
            by: "output", "input" or "voxel": one norm per unit of that side or per group of
                output units (a head, an expert, else 64 neighbours), (b, s, units).
        """
        if by is None:
            return self.squares().sqrt().view(self._grid)
        if by == "voxel":
            return self._voxel_squares().sqrt().view(*self._grid, -1)
        return self._unit_squares(by).sqrt().view(*self._grid, -1)

    @in_full
    def squares(self) -> Tensor:
        """The squared norms, (t,)."""
        if self._squares is None:
            if self.reduced is None:
                self._squares = factors.squares(self.terms("norm()"))
            else:
                found = self._counted_squares(self.reduced)
                self._squares = found if found.ndim == 1 else found.sum(1)
        return self._squares

    def numbers(self) -> Reduced:
        """What its squared norms follow from; padded positions may count in them."""
        return self.reduced or Reduced.of(self.squares(), self.squares())

    def _voxel_squares(self) -> Tensor:
        if self.reduced is not None and self._is_by_voxel:
            return self._counted_squares(self.reduced)
        return voxel_squares(self.terms("norm(by='voxel')"), self._info)

    @property
    def _is_by_voxel(self) -> bool:
        return self.reduced is not None and self.reduced.is_by_voxel

    def _counted_squares(self, reduced: Reduced) -> Tensor:
        """The squares that were kept, with zeros for padded positions."""
        squares = reduced.squares()
        if self.mask is None:
            return squares
        return squares * self.mask.view(-1, *[1] * (squares.ndim - 1))

    def _unit_squares(self, by: str) -> Tensor:
        sides = {"output": self._info.output, "input": self._info.input}
        if by not in sides:
            raise InspectionError(f"norm(by={by!r}): choose 'output', 'input' or 'voxel'.")
        side = sides[by]
        if side is None:
            raise InspectionError(
                f"{self.name!r} of shape {self._info.shape} has no input units: "
                "norm(by='output') gives one number per entry."
            )
        steps = side.steps(self._info.shape)
        return factors.marginal_squares(self.terms(f"norm(by={by!r})"), *steps)

    @in_full
    def weighted_norm(self, weights: Tensor) -> Tensor:
        """sqrt(sum of weights * G^2) for weights of the parameter's shape, (b, s).

        With 1 / v of Adam as weights it is the length of the step that a token asks for.
        """
        self._check_shape("weighted_norm", weights)
        squared = factors.squared_terms(self.terms("weighted_norm()"))
        return factors.dots(squared, weights).clamp_min(0).sqrt().view(self._grid)

    @in_full
    def dot(self, direction: Tensor) -> Tensor:
        """The inner product of each token's gradient with one direction, (b, s)."""
        self._check_shape("dot", direction)
        return factors.dots(self.terms("dot()"), direction).view(self._grid)

    @in_full
    def project(self, k: int, seed: int = 0) -> Tensor:
        """Each token's gradient under a random linear map to k numbers, (b, s, k).

        The map depends on the parameter's name and `seed` alone, so that tokens of different
        batches can be compared; inner products are kept on average.
        """
        sketch = Sketch(self.name, self._info.shape, k, seed)
        parts = [_sketched(sketch, term.precise()) for term in self.terms("project()")]
        return torch.stack(parts).sum(0).view(*self._grid, k)

    @in_full
    def topk(self, k: int) -> TopEntries:
        """The k entries of largest absolute value in each token's gradient."""
        entries = math.prod(self._info.shape)
        if not is_whole(k) or not 1 <= k <= entries:
            raise InspectionError(
                f"topk({k!r}): {self.name!r} has {entries:,} entries; give a number of them."
            )
        terms = self.terms("topk()")
        if len(terms) == 1 and terms[0].rows == 1 and _tensors(terms[0]) == 2:
            values, places = _outer_topk(terms[0].precise(), k)
        else:
            parts = [
                _dense_topk([term.at(part) for term in terms], k)
                for part in factors.slices(terms[0].tokens, entries)
            ]
            values, places = (torch.cat(each) for each in zip(*parts, strict=True))
        shape = self._info.shape
        where = places.new_empty(*places.shape, 0)
        if shape:
            where = torch.stack(torch.unravel_index(places, shape), -1)
        return TopEntries(values.view(*self._grid, k), where.view(*self._grid, k, -1))

    # -- numbers per pair, sums --------------------------------------------------------------

    @in_full
    def gram(self) -> Tensor:
        """The inner product of every two tokens' gradients, (b * s, b * s)."""
        return factors.gram(self.terms("gram()"))

    @in_full
    def sum(self, mask: Tensor | None = None) -> Tensor:
        """The gradients of some tokens added up, of the parameter's shape.

        Args:
            mask: (b, s), booleans or weights; without it all tokens that are no padding.
        """
        terms = self.terms("sum()")
        if mask is not None:
            check_tensor("mask", mask, f"booleans or weights {self._grid}, or None")
            if tuple(mask.shape) != self._grid:
                raise InspectionError(
                    f"sum(mask): the mask is {tuple(mask.shape)}, the tokens are {self._grid}."
                )
            weights = mask.to(factors.device_of(terms[0])).flatten()
            terms = [term.scaled(weights) for term in terms]
        return factors.total(terms).reshape(self._info.shape).to(self._info.dtype)

    @in_full
    def squared_sum(self) -> Tensor:
        """The squares of all tokens' gradients added up entry by entry: the diagonal Fisher."""
        squared = factors.squared_terms(self.terms("squared_sum()"))
        return factors.total(squared).reshape(self._info.shape)

    # -- in full -----------------------------------------------------------------------------

    @in_full
    def __getitem__(self, where: tuple[int, int]) -> Tensor:
        """The whole gradient of one token: `gradient[b, s]`, of the parameter's shape."""
        if not (isinstance(where, tuple) and len(where) == 2):
            raise InspectionError(f"Give a batch and a position, gradient[b, s], not {where!r}.")
        token = 0
        for name, index, length in zip(("b", "s"), where, self._grid, strict=True):
            if not -length <= index < length:
                raise IndexError(f"{name} = {index} is out of range: the tokens are {self._grid}.")
            token = token * length + index % length
        terms = [term.at(slice(token, token + 1)) for term in self.terms("[b, s]")]
        return factors.dense(terms).view(self._info.shape)

    @in_full
    def materialise(self, max_bytes: int = MAX_BYTES) -> Tensor:
        """All tokens' gradients in full, (b, s, *parameter.shape), if they fit.

        Raises:
            MemoryLimitError: They would need more than `max_bytes`.
        """
        check_number("max_bytes", max_bytes, 0, "a number of bytes, such as 1 << 32")
        terms = self.terms("materialise()")
        needed = math.prod(self.shape) * max(4, factors.dtype_of(terms[0]).itemsize)
        if needed > max_bytes:
            raise MemoryLimitError(
                self.name, needed, 0, max_bytes, "Ask for some tokens, gradient[b, s], or for sums."
            )
        return factors.dense(terms).view(self.shape)

    # -- inside ------------------------------------------------------------------------------

    def terms(self, wanted: str) -> Sequence[Term]:
        """The terms, without padded positions."""
        if self._all is None:
            kept = "norms by voxel" if self._is_by_voxel else "norms"
            raise InspectionError(
                f"{wanted} of {self.name!r} needs its factors, and only {kept} were kept. "
                "Write token_gradients(model, ..., keep='factors')."
            )
        if self._counted is None:
            self._counted = self._all
            if self.mask is not None:
                self._counted = [term.scaled(self.mask.flatten()) for term in self._all]
        return self._counted

    def total(self) -> Tensor:
        """The sum over every position, padding included: what autograd has added up."""
        self.terms("total()")
        assert self._all is not None
        return factors.total(self._all).reshape(self._info.shape).to(self._info.dtype)

    def probes(self, vectors: tuple[Tensor, ...]) -> Tensor:
        """Every position's gradient between two vectors, padding included, (t,)."""
        if self.reduced is not None:
            return self.reduced.probes()
        self.terms("probes()")
        assert self._all is not None
        return factors.probe(self._all, self._info.shape, vectors)

    def _check_shape(self, method: str, tensor: Tensor) -> None:
        check_tensor(method, tensor, f"of the shape of {self.name!r}, {self._info.shape}")
        if tuple(tensor.shape) != self._info.shape:
            raise InspectionError(
                f"{method}(): {self.name!r} has the shape {self._info.shape}, what was given "
                f"has {tuple(tensor.shape)}."
            )


def _tensors(term: Term) -> int:
    return sum(isinstance(each, Tensor) for each in term.factors) if len(term.factors) == 2 else 0


def _outer_topk(term: Term, k: int) -> tuple[Tensor, Tensor]:
    """The largest products are among those of the largest factors."""
    first, second = term.factors
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    rows = first[:, 0].abs().topk(min(k, first.shape[2])).indices
    columns = second[:, 0].abs().topk(min(k, second.shape[2])).indices
    largest = first[:, 0].gather(1, rows)[:, :, None] * second[:, 0].gather(1, columns)[:, None, :]
    chosen = largest.flatten(1).abs().topk(k).indices
    places = (rows[:, :, None] * second.shape[2] + columns[:, None, :]).flatten(1)
    return largest.flatten(1).gather(1, chosen), places.gather(1, chosen)


def _dense_topk(terms: list[Term], k: int) -> tuple[Tensor, Tensor]:
    whole = factors.dense(terms)
    places = whole.abs().topk(k).indices
    return whole.gather(1, places), places


def _sketched(sketch: Sketch, term: Term) -> Tensor:
    """One term under the map of a sketch, (t, k)."""
    if len(term.factors) == 2:
        first, second = term.factors
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            return sketch.outer(first, second)
        if isinstance(first, Index) and isinstance(second, Tensor):
            return sketch.rows(first.at, second)
    some = factors.slices(term.tokens, term.rows * math.prod(term.axes))
    return torch.cat([sketch.dense(factors.dense([term.at(part)])) for part in some])
