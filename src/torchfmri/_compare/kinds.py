"""What kind of difference two tables of values show: a factor, a shift, swapped heads, ...

Each test asks whether one simple change explains nearly all of the difference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import torch
from torch import Tensor

from torchfmri._compare.difference import Kind
from torchfmri._compare.recording import RecordedRows, relative
from torchfmri._text import apart, plural

_EXPLAINED = 0.02
"""A change explains a difference if it leaves no more than this share of it..."""
_MOST_LEFT = 0.2
"""... or no more than this share, if rounding alone may leave as much: in bfloat16 that is 4 % of a
difference of 5 %."""
_MOST_POSITIONS = 4
_TOKENS = 2
"""Fewer rows cannot tell a rule from a coincidence."""
_MOST_UNITS = 16.0
"""More units in the last place than this are not explained by rounding alone."""
_LEAST_VALUES = 32
"""Fewer different values can have few bits by chance."""
_LEVELS = 256
_MOST_NOISE = 0.5
"""If more than this relative difference is allowed, different tokens look alike too."""


def kinds_of(
    a: RecordedRows,
    b: RecordedRows,
    threshold: float,
    dtypes: Collection[torch.dtype] = (torch.float64,),
) -> list[Kind]:
    """Return the simplest kinds of difference that explain the values; empty if none does.

    Args:
        a: The values of one side.
        b: Those of the other.
        threshold: What relative difference of a row counts.
        dtypes: Those in which they were computed: the rounding to them is left in any case, and
            in several, fewer bits on one side explain nothing.
    """
    one, two = a.values, b.values
    unit = max(_unit(each) for each in dtypes) / 2
    if one.shape != two.shape:
        turned = _is_turned(one, two)
        return [Kind("transposed", "b is a transposed")] if turned else []
    bad = ~one.isfinite(), ~two.isfinite()
    if not torch.equal(*bad):
        counts = [int(each.sum()) for each in bad]
        said = f"{counts[0]:,} values of a and {counts[1]:,} of b are NaN or infinite"
        if not all(counts):
            said = f"only {'a' if counts[0] else 'b'} has NaN or infinite values"
        return [Kind("nonfinite", said)]
    gaps = relative(one, two)
    one, two = one.masked_fill(bad[0], 0), two.masked_fill(bad[1], 0)
    found = _position_kinds(a, gaps > threshold)
    differing = gaps > threshold
    shifted = _shifted_positions(a, b, threshold)
    if shifted is not None:
        return [shifted]
    if differing.any() and (zero := _zero(one[differing], two[differing])) is not None:
        return [zero, *found]
    rows = differing if differing.any() else torch.ones_like(differing)
    noun, count = "token" if a.grid is not None else "sample", int(rows.sum())
    for test in (_factor, _permutation, _shift, _factor_per_unit, _factor_per_token):
        kind = test(one[rows], two[rows], unit)
        if kind is not None:
            text = kind.text.replace("token", noun)
            few = f", at {count} of {plural(len(rows), noun)}" if 2 * count < len(rows) else ""
            return [Kind(kind.name, text + few), *found]
    precision = _precision(one[rows], two[rows]) if len(dtypes) == 1 else None
    return found if precision is None else [precision, *found]


def _explains(one: Tensor, two: Tensor, explained: Tensor, unit: float) -> bool:
    """Whether `explained` accounts for a difference, but for what rounding leaves of it.

    It has to account for b as well: where b is nearly zero, nearly zero times a is no reason.
    """
    left, gap = (two - explained).norm(), float((two - one).norm().clamp_min(1e-300))
    size = float(two.norm())
    rounding = min(unit * size, _MOST_LEFT * gap)
    return float(left) <= max(_EXPLAINED * min(gap, size), rounding)


def _zero(one: Tensor, two: Tensor) -> Kind | None:
    """Return a factor of zero: all values of one side are lost where the two differ."""
    for side, values, other in (("a", one, two), ("b", two, one)):
        if not values.any() and int((other != 0).sum()) >= _TOKENS:
            return Kind("factor", f"{side} is zero there")
    return None


def _factors(one: Tensor, two: Tensor, unit: float, dim: int | None) -> Tensor | None:
    """Return the factors that explain b: one, or one for each row or unit; None if none do."""
    squares, products = one.square(), one * two
    if dim is None:
        factors = products.sum() / squares.sum().clamp_min(1e-300)
    else:
        factors = products.sum(dim, keepdim=True) / squares.sum(dim, keepdim=True).clamp_min(1e-300)
    return factors.flatten() if _explains(one, two, factors * one, unit) else None


def _factor(one: Tensor, two: Tensor, unit: float) -> Kind | None:
    factor = _factors(one, two, unit, None)
    if one.numel() < _TOKENS or factor is None or not factor:
        return None
    return Kind("factor", f"b is a times {apart(float(factor), 1.0)[0]}")


def _shift(one: Tensor, two: Tensor, unit: float) -> Kind | None:
    """Return a shift: b is a plus one vector that is equal at every token."""
    if len(one) < _TOKENS:
        return None
    by = (two - one).mean(0, keepdim=True)
    if not _explains(one, two, one + by, unit):
        return None
    units = int((by.abs() > by.abs().max() * 1e-3).sum())
    if units == one.shape[1] and float(by.std()) < _EXPLAINED * float(by.abs().mean()):
        return Kind("shift", f"b is a plus {float(by.mean()):.4g} everywhere")
    return Kind("shift", f"b is a plus the same {units} numbers at every token, as of a bias")


def _factor_per_unit(one: Tensor, two: Tensor, unit: float) -> Kind | None:
    factors = _factors(one, two, unit, 0)
    if len(one) < _TOKENS or one.shape[1] < _TOKENS or factors is None:
        return None
    changed = (factors - 1).abs() > _EXPLAINED * float((factors - 1).abs().max())
    count = f"{int(changed.sum())} of {len(factors)} units"
    if not factors[changed].any():
        return Kind("factor_per_unit", f"{count} are zero in b")
    least, most = float(factors[changed].min()), float(factors[changed].max())
    if math.isclose(least, most, rel_tol=1e-4):
        return Kind("factor_per_unit", f"b is a times {least:.4g}, in {count}")
    low, high = apart(least, most)
    said = "each unit has a factor" if changed.all() else f"{count} have a factor"
    text = f"{said} of its own, {low} to {high}, as of the weight of a norm"
    return Kind("factor_per_unit", text if changed.all() else text.replace("its own", "their own"))


def _factor_per_token(one: Tensor, two: Tensor, unit: float) -> Kind | None:
    factors = _factors(one, two, unit, 1)
    if one.shape[1] < 2 * _TOKENS or factors is None:
        return None
    low, high = apart(float(factors.min()), float(factors.max()))
    text = f"each token has a factor of its own, {low} to {high}, as of another epsilon in a norm"
    return Kind("factor_per_token", f"{text} or another normalisation")


def _permutation(one: Tensor, two: Tensor, unit: float) -> Kind | None:
    """Return a permutation of units, found by sorting both sides by a random sum over tokens."""
    tokens, units = one.shape
    if units < 2 or tokens < _TOKENS:
        return None
    generator = torch.Generator().manual_seed(0)
    sums = torch.rand(tokens, generator=generator, dtype=one.dtype, device="cpu") + 0.5
    order_one, order_two = (sums @ one).argsort(), (sums @ two).argsort()
    source = torch.empty_like(order_one)
    source[order_two] = order_one
    if not _explains(one, two, one[:, source], unit):
        return None
    moved = source != torch.arange(units, device="cpu")
    if not moved.any():
        return None
    for size in range(units // 2, 1, -1):
        if units % size == 0 and _moves_blocks(source, size):
            heads = sorted({int(each) // size for each in torch.nonzero(moved).flatten()})
            names = ", ".join(map(str, heads[:8]))
            return Kind("swapped_heads", f"heads of {size} units have changed places: {names}")
    return Kind("permuted_units", f"{int(moved.sum())} of {units} units have changed places")


def _moves_blocks(source: Tensor, size: int) -> bool:
    blocks = source.view(-1, size)
    first = blocks[:, :1]
    whole = (blocks == first + torch.arange(size, device="cpu")).all() and (first % size == 0).all()
    return bool(whole)


def _precision(one: Tensor, two: Tensor) -> Kind | None:
    """Return `precision` if one side alone was rounded to fewer bits than its dtype has.

    A small difference without a pattern is no evidence of that: many mistakes look like it.
    """
    gap = float((two - one).norm() / one.norm().clamp_min(1e-300))
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16):
        rounded = [bool(torch.equal(each.to(dtype).double(), each)) for each in (one, two)]
        if rounded[0] == rounded[1] or gap > _MOST_UNITS * torch.finfo(dtype).eps:
            continue
        side, values = ("a", one) if rounded[0] else ("b", two)
        if len(set(values.flatten().tolist())) < _LEAST_VALUES:
            return None
        name = str(dtype).removeprefix("torch.")
        return Kind("precision", f"{side} was rounded to {name}: its values have no more bits")
    return None


def _position_kinds(rows: RecordedRows, differing: Tensor) -> list[Kind]:
    if rows.grid is None or not differing.any():
        return []
    places = rows.grid.places
    positions = torch.tensor([position for _, position in places], device="cpu")
    first = int(positions[differing].min())
    later = positions >= first
    if first and differing[later].double().mean() > 0.8:
        return [Kind("from_position", f"only from position {first} on")]
    return []


def _shifted_positions(a: RecordedRows, b: RecordedRows, threshold: float) -> Kind | None:
    """Return `shifted_positions` if b has at each position what a has at a neighbouring one."""
    if a.grid is None or b.grid is None or threshold > _MOST_NOISE:
        return None
    rows = torch.tensor([row for row, _ in a.grid.places], device="cpu")
    for by in (each for step in range(1, _MOST_POSITIONS + 1) for each in (step, -step)):
        n = len(rows) - abs(by)
        ahead, behind = slice(abs(by), None), slice(None, max(0, n))
        same = rows[ahead] == rows[behind]
        if int(same.sum()) < _TOKENS:
            continue
        ours, theirs = (ahead, behind) if by > 0 else (behind, ahead)
        gaps = relative(a.values[ours][same], b.values[theirs][same])
        plain = relative(a.values[ours][same], b.values[ours][same])
        if bool((gaps <= threshold).all()) and bool((plain > threshold).any()):
            return Kind("shifted_positions", f"b has at each position what a has {by:+d} from it")
    return None


def _is_turned(one: Tensor, two: Tensor) -> bool:
    if one.numel() != two.numel() or one.shape != two.shape[::-1]:
        return False
    return bool(torch.allclose(one.T, two, rtol=1e-3))


# -- parameters ----------------------------------------------------------------------------------


def parameter_kind(name: str, one: Tensor, two: Tensor) -> Kind | None:
    """Return how a parameter or buffer of b differs from that of a; None if they are equal."""
    one, two = one.detach().cpu(), two.detach().cpu()
    if one.squeeze().shape == two.squeeze().shape:  # a Linear, and a convolution of width 1
        two = two.reshape(one.shape)
        if is_same(one, two):
            return None
    x, y = (torch.view_as_real(v) if v.is_complex() else v for v in (one, two))
    x, y = x.double(), y.double()
    if axes := _turned_axes(x, y):
        said = "" if x.ndim == 2 else f": its axes {axes[0]} and {axes[1]} are swapped"
        return Kind("transposed", f"{name} is transposed{said}")
    if x.shape != y.shape:
        return Kind("shape", f"{name} is {tuple(one.shape)} in a and {tuple(two.shape)} in b")
    if not (x.isfinite().all() and y.isfinite().all()):
        return _nonfinite(name, x, y)
    if "inv_freq" in name and x.ndim == 1 and len(x) > 1:
        return _rope_base(x, y)
    dtypes = [str(each.dtype).removeprefix("torch.") for each in (one, two)]
    if ("int" in dtypes[0]) != ("int" in dtypes[1]):
        return Kind(
            "precision", f"{name} is {dtypes[0]} in a and {dtypes[1]} in b, as if quantised"
        )
    if x.shape == y.shape and (levels := _levels(x, y)):
        return Kind("precision", f"{name} {levels}, and differs by {_distance(x, y):.1e}")
    if torch.allclose(x, y, rtol=1e-2, atol=float(x.abs().max()) * 1e-2 + 1e-12):
        return Kind("parameter", f"{name} differs by {_distance(x, y):.1e}")
    for present, other in ((x, y), (y, x)):
        if not other.any() and present.any():
            side = "b" if other is y else "a"
            return Kind("missing_parameter", f"{name} is zero in {side}")
    if x.ndim >= 2:
        unit = max(_unit(one.dtype), _unit(two.dtype)) / 2
        kind = _factor(x.flatten(1), y.flatten(1), unit) or _permutation(
            x.flatten(1).T.contiguous(), y.flatten(1).T.contiguous(), unit
        )
        if kind is not None:
            return Kind(kind.name, f"{name}: {kind.text}")
    return Kind("parameter", f"{name} differs by {_distance(x, y):.1e}")


def _turned_axes(x: Tensor, y: Tensor) -> tuple[int, int] | None:
    """Return which two axes of y must be swapped for it to be x; None if it is x, or never is."""
    if x.shape == y.shape and torch.allclose(x, y, rtol=1e-2):
        return None
    for axes in itertools.combinations(range(x.ndim), 2):
        turned = y.transpose(*axes) if y.ndim == x.ndim else y
        if turned.shape == x.shape and torch.allclose(x, turned, rtol=1e-2):
            return axes
    return None


def _nonfinite(name: str, x: Tensor, y: Tensor) -> Kind | None:
    """Return how two parameters with NaN or infinite values differ; None if they are equal."""
    if torch.allclose(x, y, rtol=0, atol=0, equal_nan=True):
        return None
    counts = [int((~each.isfinite()).sum()) for each in (x, y)]
    if counts[0] == counts[1]:
        return Kind("parameter", f"{name} differs, and has {counts[0]:,} NaN or infinite values")
    return Kind(
        "nonfinite", f"{name} has {counts[0]:,} NaN or infinite values in a and {counts[1]:,} in b"
    )


def _levels(x: Tensor, y: Tensor) -> str:
    """Describe a weight that has at most 256 different values on one side only; else empty."""
    if x.numel() < 4 * _LEVELS or float((x - y).norm()) > 0.5 * float(x.norm()):
        return ""
    counts = [len(set(each.flatten().tolist())) for each in (x, y)]
    if not (min(counts) <= _LEVELS < max(counts) / 2):
        return ""
    return f"has {counts[0]:,} different values in a and {counts[1]:,} in b, as if quantised"


def is_same(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors hold the same values, or the same values in another precision."""
    if one.dtype == two.dtype:
        return torch.equal(one, two.to(one.device))
    if one.is_complex() != two.is_complex():
        return False
    coarser = max((one.dtype, two.dtype), key=_unit)
    return torch.equal(one.to(coarser), two.to(one.device, coarser))


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 1.0


def _distance(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / x.norm().clamp_min(1e-300))


def _rope_base(x: Tensor, y: Tensor) -> Kind | None:
    """Return the kind of two rope frequencies: inv_freq[i] = base ** (-i / n) tells the base."""
    if torch.allclose(x, y, rtol=1e-5, atol=0):
        return None
    bases = [float(each[1]) ** -len(each) if each[1] > 0 else math.nan for each in (x, y)]
    steps = torch.arange(len(x), dtype=x.dtype, device="cpu") / len(x)
    if all(
        torch.allclose(each, base**-steps, rtol=1e-4, atol=0)
        for each, base in zip((x, y), bases, strict=True)
    ):
        base, other = apart(bases[0], bases[1], 6)
        return Kind("rope_base", f"the rope base is {base} in a and {other} in b")
    factors = y / x
    if torch.allclose(factors, factors[:1].expand_as(factors), rtol=1e-4, atol=0):
        return Kind(
            "rope_factor",
            f"the rope frequencies are {apart(float(factors[0]), 1.0)[0]} times those of a",
        )
    return Kind("parameter", f"the rope frequencies differ by {_distance(x, y):.1e}")
