"""Sketches: the three ways in agree, inner products are unbiased, nothing random is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchfmri import InspectionError
from torchfmri._tokens.algebra.sketch import Sketch

SHAPES = [(6, 5), (7,), (), (1, 9), (9, 1), (3, 4, 2), (40, 3)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    o = shape[0] if shape else 1
    return o, torch.Size(shape).numel() // o


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 7, 16, 40])
def test_the_ways_in_agree_on_the_same_gradient(shape: tuple[int, ...], k: int) -> None:
    sketch = Sketch("weight", shape, k, seed=3)
    o, i = matrix_shape(shape)
    g, x = numbers(4, 5, o), numbers(4, 5, i, seed=1)
    index = torch.randint(o, (4, 5), generator=torch.Generator().manual_seed(2))
    outer = torch.einsum("tro,tri->toi", g, x).flatten(1)
    one_hot = torch.nn.functional.one_hot(index, o).double()
    picked = torch.einsum("tro,tri->toi", one_hot, x).flatten(1)
    torch.testing.assert_close(sketch.outer(g, x), sketch.dense(outer), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sketch.rows(index, x), sketch.dense(picked), rtol=1e-12, atol=1e-12)
    assert sketch.dense(outer).shape == (4, k)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_factor_may_be_shared_by_all_tokens(shape: tuple[int, ...]) -> None:
    sketch = Sketch("weight", shape, 16, seed=3)
    o, i = matrix_shape(shape)
    g, x = numbers(4, 5, o), numbers(1, 5, i, seed=1)
    index = torch.randint(o, (1, 5), generator=torch.Generator().manual_seed(2))
    apart = sketch.outer(g, x.expand(4, 5, i))
    torch.testing.assert_close(sketch.outer(g, x), apart, rtol=1e-12, atol=1e-12)
    values = numbers(4, 5, i)
    apart = sketch.rows(index.expand(4, 5), values)
    torch.testing.assert_close(sketch.rows(index, values), apart, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_direction_is_a_row_of_the_map(shape: tuple[int, ...]) -> None:
    sketch = Sketch("weight", shape, 6, seed=0)
    count = torch.Size(shape).numel()
    basis = torch.eye(count, dtype=torch.float64)
    rows = torch.stack([sketch.direction(number, basis) for number in range(6)])
    torch.testing.assert_close(sketch.dense(basis).mT, rows)


@pytest.mark.parametrize("shape", [(12, 10), (50,)])
def test_inner_products_are_unbiased(shape: tuple[int, ...]) -> None:
    one, other = numbers(torch.Size(shape).numel()), numbers(torch.Size(shape).numel(), seed=1)
    other += one / 2  # so that the true value is far from 0
    pair = torch.stack([one, other])
    products = []
    for seed in range(2000):
        sketched = Sketch("weight", shape, 16, seed).dense(pair)
        products.append(sketched[0] @ sketched[1])
    found = torch.stack(products)
    error = float(found.std()) / len(found) ** 0.5
    true = float(one @ other)
    assert abs(float(found.mean()) - true) < 4 * error
    assert error < 0.05 * abs(true), "too noisy to tell: the test could not fail"


def test_names_seeds_and_shapes_have_maps_of_their_own() -> None:
    x = numbers(1, 12)
    first = Sketch("a", (3, 4), 16, 0).dense(x)
    for other in (
        Sketch("b", (3, 4), 16, 0),
        Sketch("a", (3, 4), 16, 1),
        Sketch("a", (4, 3), 16, 0),
    ):
        assert not torch.allclose(first, other.dense(x))
    assert torch.equal(first, Sketch("a", (3, 4), 16, 0).dense(x))


def test_signs_are_balanced_and_columns_independent() -> None:
    signs = Sketch("a", (5000,), 64, 0)._columns("n", 64, 0, 5000, numbers(1)) * 8
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    for axis in (0, 1):
        count = signs.shape[axis]
        assert float(signs.mean(axis).abs().max()) < 5 / count**0.5
    correlations = signs @ signs.mT / 5000 - torch.eye(64, dtype=torch.float64)
    assert float(correlations.abs().max()) < 5 / 5000**0.5


def test_large_vectors_go_through_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = numbers(2, 1000)
    whole = Sketch("a", (1000,), 8, 0).dense(values)
    monkeypatch.setattr("torchfmri._tokens.algebra.sketch._BLOCK", 8 * 7)
    torch.testing.assert_close(Sketch("a", (1000,), 8, 0).dense(values), whole)


def test_no_random_generator_is_used() -> None:
    before = torch.get_rng_state()
    Sketch("a", (30, 4), 16, 0).dense(numbers(2, 120))
    assert torch.equal(before, torch.get_rng_state())


def test_half_precision_is_summed_in_float32() -> None:
    values = numbers(2, 120).bfloat16()
    found = Sketch("a", (30, 4), 16, 0).dense(values)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, Sketch("a", (30, 4), 16, 0).dense(values.float()))


def test_no_numbers_are_refused() -> None:
    with pytest.raises(InspectionError, match="k=0"):
        Sketch("a", (3,), 0, 0)
