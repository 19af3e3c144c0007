"""Where two runs part: the first layer, in execution order, whose values differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from torchfmri._arguments import check_real, require
from torchfmri._records import Call, Inspection, Value, check_what
from torchfmri.exceptions import InspectionError

# What rounding alone may do to a whole layer, relative to its size: about the square root of a
# typical depth times the rounding unit, with an order of magnitude to spare.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two inspections part.

    Attributes:
        layer: Its name in the first inspection.
        call: Which call of it.
        what: What was compared.
        element: The path of the tensor in a tuple or dict; `""` alone.
        relative: |a - b| / |a| over the whole tensor (L2), or of the statistics if only these
            were kept; infinite where one is not finite and the other is, or shapes differ.
        largest: The largest absolute difference of one value; NaN if only statistics were kept.
        tolerance: What was allowed.
        compared: How many tensors agreed before this one.
        reason: In words.

    Example:
        >>> import torch
        >>> from torchfmri import Inspector, first_difference
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.PReLU())
        >>> x, inspector = torch.randn(8, 4), Inspector(model, keep="tensors")
        >>> before = inspector.run_inspection(x)
        >>> with torch.no_grad():
        ...     _ = model[2].weight.mul_(1.1)
        >>> difference = first_difference(before, inspector.run_inspection(x))
        >>> difference.layer, difference.compared
        ('2', 2)
    """

    layer: str
    call: int
    what: str
    element: str
    relative: float
    largest: float
    tolerance: float
    compared: int
    reason: str

    def __str__(self) -> str:
        place = f"{self.what} of {self.layer!r}" + (f", call {self.call}" if self.call else "")
        return f"First difference: {place}: {self.reason} ({self.compared} tensors before it agree)"


def first_difference(
    a: Inspection,
    b: Inspection,
    what: str = "activations",
    *,
    tolerance: float | None = None,
    names: Mapping[str, str] | None = None,
) -> Difference | None:
    """The first layer, in execution order, where two inspections part; None if they do not.

    Gradients are compared in backward order. Tensors are compared value by value where both
    inspections kept them, else their statistics.

    Args:
        a: The reference; its execution order counts.
        b: The run to compare: a port, another dtype, compiled code.
        what: activations, inputs, gradients or input_gradients.
        tolerance: Largest relative difference (L2) that counts as equal; by default what rounding
            in the less precise of the two dtypes explains. 0 asks for equal values.
        names: Layer in `a` -> layer in `b`, where they are called differently.

    Raises:
        InspectionError: The two have no layer in common, or `what` was not captured.
    """
    check_what(what)
    for given in (a, b):
        if not isinstance(given, Inspection):
            raise InspectionError(
                f"first_difference compares two inspections, not a {type(given).__name__}. Make "
                "them with Inspector(model).run_inspection(data, keep='tensors')."
            )
    if tolerance is not None:
        check_real("tolerance", tolerance, "a relative difference, such as 1e-5", 0.0)
    mapped = names is None or (isinstance(names, Mapping) and all(each in a for each in names))
    require(mapped, "names", names, "map layers of a to layers of b: {'layer in a': 'layer in b'}")
    pairs = _pairs(a, b, what, names or {})
    if "gradients" in what:
        pairs.reverse()
    compared = 0
    for ours, theirs, layer, index in pairs:
        if ours is None or theirs is None:
            reason = f"called in one run only (call {index})"
            return Difference(layer, index, what, "", math.inf, math.nan, 0.0, compared, reason)
        values, others = ours.values(what), theirs.values(what)
        for position, path in enumerate(ours.elements(what)):
            value = values[position] if position < len(values) else None
            other = others[position] if position < len(others) else None
            if value is None and other is None:
                continue
            allowed = _tolerance(value, other) if tolerance is None else tolerance
            relative, largest, reason = _compare(value, other)
            if relative > allowed:
                place = (layer, index, what, path)
                return Difference(*place, relative, largest, allowed, compared, reason)
            compared += 1
    if not compared:
        raise InspectionError(f"There are no {what} to compare: watch them in both inspections.")
    return None


Pair: TypeAlias = "tuple[Call | None, Call | None, str, int]"


def _pairs(a: Inspection, b: Inspection, what: str, names: Mapping[str, str]) -> list[Pair]:
    """The calls of layers that both watched, in the order of `a`; then those that only `b` made."""
    named = {layer: other for layer in a if (other := names.get(layer, layer)) in b}
    if not any(a[layer].calls and b[other].calls for layer, other in named.items()):
        raise InspectionError(
            f"The inspections have no called layer in common (for example {_first(a)} and "
            f"{_first(b)}). Give names={{layer in a: layer in b}}."
        )
    common = {
        layer: other
        for layer, other in named.items()
        if what in a[layer].what and what in b[other].what
    }
    pairs: list[Pair] = []
    for call in a.calls():
        if call.layer in common:
            calls = b[common[call.layer]].calls
            other_call = calls[call.index] if call.index < len(calls) else None
            pairs.append((call, other_call, call.layer, call.index))
    for layer, other in common.items():
        more = b[other].calls[len(a[layer].calls) :]
        pairs.extend((None, call, layer, call.index) for call in more)
    return pairs


def _first(inspection: Inspection) -> str:
    return next((repr(call.layer) for call in inspection.calls()), "none")


def _tolerance(value: Value | None, other: Value | None) -> float:
    dtypes = [each.dtype for each in (value, other) if each is not None]
    return max(_TOLERANCE.get(dtype, 0.0) for dtype in dtypes)


def _compare(value: Value | None, other: Value | None) -> tuple[float, float, str]:
    """Relative difference, largest difference, and the two in words."""
    if value is None or other is None:
        return math.inf, math.nan, "present in one inspection only"
    if value.shape != other.shape:
        return math.inf, math.nan, f"shape {value.shape} against {other.shape}"
    if value.has_tensor and other.has_tensor:
        return _compare_tensors(value.tensor, other.tensor)
    one, two = value.statistics, other.statistics
    bad_one, bad_two = (one.nan, one.pos_inf, one.neg_inf), (two.nan, two.pos_inf, two.neg_inf)
    if bad_one != bad_two:
        return math.inf, math.nan, f"NaN, +Inf, -Inf: {bad_one} against {bad_two}"
    size = max(one.l2 / math.sqrt(max(one.finite, 1)), 1e-300)
    names = ("mean", "std", "min", "max")
    gaps = {name: abs(float(one[name]) - float(two[name])) / size for name in names if one.finite}
    worst = max(gaps, key=lambda name: gaps[name], default="")
    relative = gaps.get(worst, 0.0)
    return relative, math.nan, f"{worst} differs by {relative:.2e} of the rms (statistics only)"


def _compare_tensors(one: Tensor, two: Tensor) -> tuple[float, float, str]:
    if one.is_nested or one.layout != torch.strided:
        one, two = one.to_dense(), two.to_dense()
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, two = one.to("cpu", wide), two.to("cpu", wide)
    finite = one.isfinite() & two.isfinite()
    same = (one == two) | (one.isnan() & two.isnan())
    lost = int((~finite & ~same).sum())
    gap = torch.where(finite, one - two, torch.zeros_like(one)).abs()
    largest = float(gap.max()) if gap.numel() else 0.0
    if lost:
        return math.inf, largest, f"{lost} of {one.numel()} values are non-finite in one run only"
    size = float(torch.where(finite, one, torch.zeros_like(one)).abs().norm())
    gap_size = float(gap.norm())
    relative = gap_size / size if size else (math.inf if gap_size else 0.0)
    return relative, largest, f"differs by {relative:.2e} (relative L2), at most {largest:.3e}"
