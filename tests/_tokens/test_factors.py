"""The algebra of token gradients against dense tensors: random terms, factors and axes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchfmri._tokens.algebra import factors
from torchfmri._tokens.algebra.factors import Index, Term
from torchfmri._tokens.algebra.grams import summed_gram
from torchfmri._tokens.algebra.sketch import Sketch

LETTERS = "ijklmn"
few = settings(max_examples=60, deadline=None)


def dense_of(term: Term) -> Tensor:
    """Every token's gradient by one einsum over explicit one-hot rows, (t, *axes)."""
    parts: list[Tensor] = []
    for each in term.factors:
        if isinstance(each, Index):
            ones = torch.zeros(*each.at.shape, each.size, dtype=torch.float64)
            for t in range(each.at.shape[0]):
                for r in range(each.at.shape[1]):
                    ones[t, r, each.at[t, r]] = 1
            parts.append(ones)
        else:
            parts.append(each.double())
    letters = LETTERS[: len(parts)]
    equation = ",".join(f"tr{letter}" for letter in letters) + f"->t{letters}"
    return torch.einsum(equation, *parts)


def refinements(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Axes that multiply to the entries of this shape: merged, split and as they are."""
    count = math.prod(shape)
    found = [shape, (count,), (count, 1), (1, count)]
    found += [(first, count // first) for first in range(2, count) if count % first == 0]
    found += [(shape[0], math.prod(shape[1:]))] if shape else []
    return list(dict.fromkeys(found))


def groupings(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Neighbouring axes taken together in every way, and the first one split in two."""
    found = [shape]
    for axes in found:
        found += [
            (*axes[:k], axes[k] * axes[k + 1], *axes[k + 2 :])
            for k in range(len(axes) - 1)
            if (*axes[:k], axes[k] * axes[k + 1], *axes[k + 2 :]) not in found
        ]
    even = [axes for axes in found if axes[0] == shape[0] and axes[0] % 2 == 0]
    split = [(2, axes[0] // 2, *axes[1:]) for axes in even]
    return found + split


@st.composite
def terms_of(
    draw: Any, same_axes: bool = False, aligned: bool = False
) -> tuple[tuple[int, ...], list[Term]]:
    """A parameter's shape and one to three terms of it, over the same tokens.

    Aligned: the axes are those of the shape, taken together or split, as all rules make them.
    """
    shape = draw(
        st.sampled_from([(6,), (4, 3), (3, 4), (2, 3, 2), (1, 4), (4, 1), (2, 2, 3), (1,)])
    )
    tokens = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    found = []
    ways = groupings(shape) if aligned else refinements(shape)
    fixed = draw(st.sampled_from(ways))
    for _ in range(draw(st.integers(1, 3))):
        axes = fixed if same_axes else draw(st.sampled_from(ways))
        rows = draw(st.integers(1, 3))
        kinds = [draw(st.booleans()) for _ in axes]
        kinds[draw(st.integers(0, len(axes) - 1))] = False  # at least one tensor
        made: list[Any] = []
        for length, is_index in zip(axes, kinds, strict=True):
            if is_index:
                at = torch.randint(length, (tokens, rows), generator=generator)
                made.append(Index(at, length))
            else:
                values = torch.randn(tokens, rows, length, generator=generator, dtype=torch.float64)
                made.append(values)
        found.append(Term(tuple(made)))
    return shape, found


def close(found: Tensor, expected: Tensor, scale: float = 0.0) -> None:
    assert found.shape == expected.shape
    assert found.dtype == torch.float64
    scale = max(scale, float(expected.abs().max()), 1e-300)
    assert float((found - expected).abs().max()) <= 1e-12 * scale


def whole_of(terms: list[Term]) -> Tensor:
    """The sum of the terms in full, (t, entries)."""
    return sum((dense_of(term).flatten(1) for term in terms), start=torch.zeros(()))


def size_of(terms: list[Term]) -> float:
    return max(float(dense_of(term).abs().max()) for term in terms)


@few
@given(terms_of())
def test_dense(drawn: Any) -> None:
    _, terms = drawn
    close(factors.dense(terms), whole_of(terms), size_of(terms))


@few
@given(terms_of())
def test_squares_with_cross_terms(drawn: Any) -> None:
    _, terms = drawn
    close(factors.squares(terms), whole_of(terms).square().sum(1), size_of(terms) ** 2)


@few
@given(terms_of())
def test_gram(drawn: Any) -> None:
    _, terms = drawn
    whole = whole_of(terms)
    close(factors.gram(terms), whole @ whole.T, size_of(terms) ** 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gram_of_parameters_that_share_factors(dtype: torch.dtype) -> None:
    """Inputs read by several, biases, vectors, row numbers: as parameter by parameter."""
    generator = torch.Generator().manual_seed(0)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(80, 1, width, generator=generator).to(dtype)

    x, other, q, k, v, up = (draw(width) for width in (16, 8, 12, 7, 9, 300))
    ids = factors.Index(torch.randint(5, (80, 1), generator=generator), 5)
    parameters = [
        [Term((q, x))], [Term((k, x))], [Term((k,))], [Term((v, x))], [Term((x, up))],
        [Term((up,))], [Term((up,))], [Term((other, q))], [Term((draw(6),))], [Term((ids, v))],
        [Term((q, x)), Term((draw(12), x))],
    ]  # fmt: skip
    whole = torch.cat([sum(map(dense_of, terms)).flatten(1) for terms in parameters], 1)
    expected = whole @ whole.T
    found = factors.mirrored(summed_gram(parameters)).double()
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    assert float((found - expected).abs().max()) <= tolerance * float(whole.norm() ** 2)
    less = factors.mirrored(summed_gram(parameters[1:])).double()  # so the comparison can fail
    assert float((less - expected).abs().max()) > 1e-3 * float(expected.abs().max())


@few
@given(terms_of())
def test_total(drawn: Any) -> None:
    _, terms = drawn
    expected = whole_of(terms).sum(0)
    close(factors.total(terms).reshape(-1), expected, size_of(terms))


@few
@given(terms_of())
def test_dots(drawn: Any) -> None:
    shape, terms = drawn
    direction = torch.randn(shape, dtype=torch.float64)
    expected = whole_of(terms) @ direction.flatten()
    close(factors.dots(terms, direction), expected, size_of(terms) * float(direction.abs().max()))


@few
@given(terms_of())
def test_squared_terms(drawn: Any) -> None:
    shape, terms = drawn
    expected = whole_of(terms).square()
    squared = factors.squared_terms(terms)
    close(factors.dense(squared), expected, size_of(terms) ** 2)
    close(factors.total(squared).reshape(-1), expected.sum(0), size_of(terms) ** 2)
    weights = torch.rand(shape, dtype=torch.float64)
    close(factors.dots(squared, weights), expected @ weights.flatten(), size_of(terms) ** 2)


@few
@given(terms_of(aligned=True), st.data())
def test_marginal_squares(drawn: Any, data: Any) -> None:
    """Along any part of the parameter, also where the factors are coarser or finer than it."""
    shape, terms = drawn
    first = data.draw(st.integers(0, len(shape) - 1))
    last = data.draw(st.integers(first + 1, len(shape)))
    start, end = math.prod(shape[first:]), math.prod(shape[last:])
    cube = whole_of(terms).view(terms[0].tokens, -1, start // end, end)
    expected = cube.square().sum((1, 3))
    close(factors.marginal_squares(terms, start, end), expected, size_of(terms) ** 2)


@few
@given(terms_of())
def test_scaled(drawn: Any) -> None:
    _, terms = drawn
    weights = torch.randn(terms[0].tokens, dtype=torch.float64)
    expected = whole_of(terms) * weights[:, None]
    found = factors.dense([term.scaled(weights) for term in terms])
    close(found, expected, size_of(terms) * float(weights.abs().max()))


@few
@given(terms_of())
def test_some_tokens(drawn: Any) -> None:
    _, terms = drawn
    count = terms[0].tokens
    close(factors.dense([each.at(slice(count - 1, count)) for each in terms]), whole_of(terms)[-1:])
    order = torch.arange(count).flip(0)
    close(factors.dense([each.at(order) for each in terms]), whole_of(terms).flip(0))


@few
@given(terms_of())
def test_probe(drawn: Any) -> None:
    shape, terms = drawn
    whole = whole_of(terms)
    if len(shape) < 2:
        u = torch.randn(math.prod(shape), dtype=torch.float64)
        close(factors.probe(terms, shape, (u,)), whole @ u, 10 * size_of(terms))
        return
    u = torch.randn(shape[0], dtype=torch.float64)
    v = torch.randn(math.prod(shape[1:]), dtype=torch.float64)
    expected = torch.einsum("toi,o,i->t", whole.view(len(whole), shape[0], -1), u, v)
    close(factors.probe(terms, shape, (u, v)), expected, 10 * size_of(terms))


@few
@given(terms_of())
def test_common_axes_change_nothing(drawn: Any) -> None:
    _, terms = drawn
    again = factors.common_axes(terms)
    assert len({term.axes for term in again}) == 1
    for one, other in zip(terms, again, strict=True):
        close(dense_of(other).flatten(1), dense_of(one).flatten(1))


@few
@given(terms_of(same_axes=True))
def test_inner(drawn: Any) -> None:
    _, terms = drawn
    for one in terms:
        for other in terms:
            expected = (dense_of(one) * dense_of(other)).flatten(1).sum(1)
            close(factors.inner(one, other), expected, size_of(terms) ** 2)


@given(terms_of(), st.integers(1, 40))
@few
def test_chunks_change_nothing(drawn: Any, entries: int) -> None:
    """The same with room for a few entries at a time."""
    shape, terms = drawn
    expected = whole_of(terms)
    before = factors.MOST_ENTRIES
    try:
        factors.MOST_ENTRIES = entries
        close(factors.gram(terms), expected @ expected.T, size_of(terms) ** 2)
        close(factors.squares(terms), expected.square().sum(1), size_of(terms) ** 2)
        direction = torch.randn(shape, dtype=torch.float64)
        close(factors.dots(terms, direction), expected @ direction.flatten(), 10 * size_of(terms))
    finally:
        factors.MOST_ENTRIES = before


@few
@given(terms_of())
def test_a_wrong_term_is_seen(drawn: Any) -> None:
    """The comparison can fail: one term taken twice, two tokens exchanged."""
    _, terms = drawn
    whole = whole_of(terms)
    with pytest.raises(AssertionError):
        close(factors.dense([*terms, terms[0]]), whole, size_of(terms))
    with pytest.raises(AssertionError):
        close(factors.squares([*terms, terms[0]]), whole.square().sum(1), size_of(terms) ** 2)
    if len(whole) > 1:
        with pytest.raises(AssertionError):
            close(factors.gram(terms), whole @ whole.roll(1, 0).T, size_of(terms) ** 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_factors_are_multiplied_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    g, x = torch.randn(3, 2, 5).to(dtype), torch.randn(3, 2, 4).to(dtype)
    term = Term((g, x))
    expected = torch.einsum("tro,tri->toi", g.double(), x.double()).flatten(1)
    direction = torch.randn(5, 4)
    for found, truth in (
        (factors.dense([term]), expected),
        (factors.squares([term]), expected.square().sum(1)),
        (factors.gram([term]), expected @ expected.T),
        (factors.dots([term], direction), expected @ direction.double().flatten()),
    ):
        assert found.dtype == torch.float32
        assert torch.allclose(found.double(), truth, rtol=1e-5, atol=1e-5)


def test_two_terms_that_cancel_have_no_norm() -> None:
    """A gradient that cancels may be lost in rounding, and never becomes NaN."""
    g, x = torch.randn(4, 1, 3, dtype=torch.float64), torch.randn(4, 1, 5, dtype=torch.float64)
    both = [Term((g, x)), Term((-g, x.clone()))]
    squares = factors.squares(both)
    assert bool((squares >= 0).all())
    assert float(squares.sqrt().max()) <= 1e-7 * float(factors.squares(both[:1]).sqrt().max())


@few
@given(terms_of(), st.sampled_from([1, 3, 4, 6, 12]))
def test_sketches_of_factors_are_those_of_the_whole(drawn: Any, k: int) -> None:
    shape, terms = drawn
    sketch = Sketch("a.weight", shape, k, 5)
    directions = torch.stack(
        [sketch.direction(number, torch.zeros((), dtype=torch.float64)) for number in range(k)]
    )
    whole = whole_of(terms)
    close(sketch.dense(whole), whole @ directions.T, 10 * size_of(terms))
