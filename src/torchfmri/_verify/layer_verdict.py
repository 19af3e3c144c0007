"""The verdict on one call of a layer: its precision, kinks, and wrong layers inside.

`verify` calls `verify_call` for each layer, innermost first. float64 is tried first; a layer that
cannot run in it is verified as it is, with a note. A difference at a kink is judged again beside
it, and layers that are known to be wrong are left out of those around them, so that the innermost
one is named alone. Notes may be reworded; the order of these questions must stay. Other precisions
may be tried freely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchfmri._verify.comparison import WRONG, Judgement
from torchfmri._verify.directional import PRECISIONS, Precision, nudged
from torchfmri._verify.judgement import (
    BackwardError,
    Problem,
    SecondDerivative,
    UndifferentiableError,
    gradient_varies,
    judge,
    varies_by_itself,
)
from torchfmri._verify.module_calls import ModuleCall, tensors_within
from torchfmri._verify.report import GradientCheck
from torchfmri._verify.varied_call import ForwardError, VariedCall, VariedTensor

KINKS = "verified beside the point where it was called, which lies on a kink"
BACKWARD_PASS = "backward pass"


class Options(NamedTuple):
    """How thoroughly a layer is verified."""

    directions: int
    second: bool


@dataclass
class LayerVerdict:
    """The verdict on one call of a layer.

    Attributes:
        checks: One for each input and parameter.
        problem: Why the call could not be verified; "" if it could.
        notes: Reservations for the reader, such as another precision.
    """

    checks: list[GradientCheck] = field(default_factory=list)
    problem: str = ""
    notes: list[str] = field(default_factory=list)


def verify_call(call: ModuleCall, wrong: Mapping[str, nn.Module], options: Options) -> LayerVerdict:
    """Compare the gradients of one call, in the best precision that the module can run in.

    Args:
        call: The call.
        wrong: Layers known to be wrong; those inside this one are left out.
        options: How thoroughly to verify it.
    """
    if call.problem:
        return LayerVerdict(problem=f"its inputs cannot be copied ({call.problem})")
    failures: list[tuple[torch.dtype | None, Exception]] = []
    for dtype in _dtypes(call):
        try:
            verdict = _Judge(call, dtype, options).judge(wrong)
        except UndifferentiableError as error:
            return LayerVerdict(problem=str(error))
        except (ForwardError, BackwardError) as error:
            failures.append((dtype, error))
            continue
        if failures:
            reason = _cause(failures[0][1])
            used = "as it is" if dtype is None else f"in {str(dtype).removeprefix('torch.')}"
            verdict.notes.append(f"verified {used}: float64 does not work ({reason})")
        return verdict
    last = failures[-1][1]
    if isinstance(last, BackwardError):
        reason = f"its backward pass raises {_cause(last)}"
        check = GradientCheck(
            layer=call.layer,
            kind=type(call.module).__name__,
            of=BACKWARD_PASS,
            status=WRONG,
            deviation=float("inf"),
            allowed=0.0,
            reason=reason,
            call=call.index,
        )
        return LayerVerdict([check])
    return LayerVerdict(problem=f"it cannot be run alone: {_cause(last)}")


class _Judge:
    """Judges one call in one precision, and takes down its checks and notes."""

    def __init__(self, call: ModuleCall, dtype: torch.dtype | None, options: Options) -> None:
        self.call, self.options = call, options
        self.precision = _precision(call, dtype)
        self.verdict = LayerVerdict()
        self.varied = VariedCall(call, dtype)
        if varies_by_itself(self.varied):
            self.varied = VariedCall(call, dtype, careful=True)
            if varies_by_itself(self.varied):
                raise UndifferentiableError(
                    "not deterministic: two runs on the same numbers, with the same random state, "
                    "differ"
                )

    def judge(self, wrong: Mapping[str, nn.Module]) -> LayerVerdict:
        """Return the verdict, with the layers that are known to be wrong left out."""
        varied, verdict = self.varied, self.verdict
        inside = {id(each) for each in self.call.module.modules()} - {id(self.call.module)}
        left_out = {layer: module for layer, module in wrong.items() if id(module) in inside}
        if left_out:
            varied.leave_out(left_out)
            verdict.notes.append("verified without the wrong layers inside")
        if not varied.variables:
            raise UndifferentiableError("nothing that requires a gradient goes in")
        judgements = self._off_kinks(varied, varied.variables)
        joint = next((each for each in judgements if each.variable is varied.joint), None)
        if joint is not None and joint.status == WRONG:
            parts = self._off_kinks(varied, varied.inner)
            guilty = [each for each in parts if each.status == WRONG]
            if guilty:
                judgements = [each for each in judgements if each is not joint] + guilty
        verdict.checks = [_check(self.call, each, 1) for each in judgements]
        if self.options.second and not any(each.status == WRONG for each in verdict.checks):
            self._judge_second()
        return verdict

    def _judge_second(self) -> None:
        try:
            problem = SecondDerivative(self.varied)
            judgements = self._off_kinks(problem, problem.variables)
        except (BackwardError, ForwardError) as error:
            self.verdict.notes.append(f"no second derivative: {_cause(error)}")
        else:
            self.verdict.checks += [_check(self.call, each, 2) for each in judgements]

    def _off_kinks(self, problem: Problem, variables: Sequence[VariedTensor]) -> list[Judgement]:
        """Judge; if a kink may explain a difference, judge again at a point beside it."""
        values: Sequence[Tensor] = problem.values
        directions, precision = self.options.directions, self.precision
        judgements = judge(problem, values, variables, directions, precision)
        if any(each.status == WRONG and each.is_bent for each in judgements):
            values = nudged(values)
            judgements = judge(problem, values, variables, directions, precision)
            if KINKS not in self.verdict.notes:
                self.verdict.notes.append(KINKS)
        if any(each.status == WRONG for each in judgements) and gradient_varies(problem, values):
            for each in judgements:
                if each.status == WRONG:
                    each.reason = "differs from one backward pass to the next"
        return judgements


def _check(call: ModuleCall, judgement: Judgement, order: int) -> GradientCheck:
    return GradientCheck(
        layer=call.layer,
        kind=type(call.module).__name__,
        of=judgement.variable.name,
        status=judgement.status,
        deviation=judgement.deviation,
        allowed=judgement.allowed,
        reason=judgement.reason,
        call=call.index,
        order=order,
    )


def _dtypes(call: ModuleCall) -> list[torch.dtype | None]:
    """Return the dtypes to try, best first; None leaves the module as it is."""
    own = {tensor.dtype for tensor in _floats(call)}
    if own == {torch.float64}:
        return [torch.float64]
    return [torch.float64, None] if own <= {torch.float32} else [torch.float64, torch.float32, None]


def _precision(call: ModuleCall, dtype: torch.dtype | None) -> Precision:
    """Return the precision of the coarsest tensor if the module is left as it is."""
    if dtype is not None:
        return PRECISIONS[dtype]
    own = [PRECISIONS[each.dtype] for each in _floats(call) if each.dtype in PRECISIONS]
    return max(own, key=lambda precision: precision.rounding, default=PRECISIONS[torch.float32])


def _floats(call: ModuleCall) -> list[Tensor]:
    tensors = [*tensors_within(call.inputs), *call.module.parameters()]
    return [each for each in tensors if each.is_floating_point()]


def _cause(error: Exception) -> str:
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    text = lines[0] if lines else ""
    return f"{type(cause).__name__}: {text[:200]}" if text else type(cause).__name__
