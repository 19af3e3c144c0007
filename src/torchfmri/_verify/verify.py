"""`verify_gradients`: every layer's backward pass against a numerical derivative.

It is public; arguments, errors and the order of checks must stay. The model runs once inside
`unchanged`, which puts buffers, modes, `.grad` and random state back. `_settle` switches off what
PyTorch's layers do not differentiate by design (spectral norm, max_norm, padding rows); without it
healthy models would be called wrong.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._arguments import check_flag, check_module, check_number
from torchfmri._model import (
    Loss,
    Pattern,
    arguments_for,
    compiled_code_as_eager,
    copy_of_data,
    find_layers,
    first_names,
    loss_of,
    named_layers,
    refuse_scripted,
    runnable,
    switched_off,
    unchanged,
    unwrap,
)
from torchfmri._text import Progress
from torchfmri._torch import flatten, map_tensors
from torchfmri._verify.comparison import WRONG
from torchfmri._verify.directional import SEED, seed_all
from torchfmri._verify.layer_verdict import LayerVerdict, Options, verify_call
from torchfmri._verify.module_calls import CallLog, ModuleCall, copy_call, logged_calls
from torchfmri._verify.report import EXPECTED, GradientCheck, Verification
from torchfmri.exceptions import InspectionError

LOSS = "(loss)"


def verify_gradients(
    model: nn.Module,
    data: Any,
    loss: Loss = None,
    layers: Pattern = "*",
    *,
    target: Any = None,
    expected: Pattern | None = None,
    directions: int = 2,
    second: bool = False,
) -> Verification:
    """Verify that each layer's backward pass is the derivative of its forward pass.

    The model runs once. Then every layer runs alone, in float64, on the inputs that it really got.
    A backward pass gives the derivative along random directions of its inputs and parameters, and
    a few forward passes measure the same derivative. The cost does not depend on the number of
    parameters. A container is verified without the layers that are already known to be wrong, so
    that the innermost wrong layer is named. The model is left as it was, bit for bit.

    Args:
        model: The model, in the mode (train or eval) to verify. Frozen parameters
            are not verified.
        data: A tensor, a tuple of positional arguments or a dict of keyword arguments. A small
            batch is enough.
        loss: A function of the output (and of the target), which is verified as well.
        layers: The layers to verify; by default all layers and the model itself.
        target: Passed to the loss as its second argument.
        expected: Layers whose gradient is deliberately not the derivative: straight-through
            estimators, gradient reversal, stop-gradients.
        directions: The number of random directions for each input and parameter; if one deviates,
            twice as many and one more are tried.
        second: Whether to verify second derivatives too, wherever the first are right.

    Raises:
        InspectionError: The loss is NaN or infinite, nothing can be differentiated, or a layer is
            TorchScript.
        LayerNotFoundError: `layers` or `expected` matches nothing.
    """
    _check(model, directions)
    refuse_scripted(model)
    check_flag("second", second)
    started = time.perf_counter()
    names = named_layers(model)
    found = find_layers(names, layers)
    chosen = _canonical(names, list(names) if layers == "*" else found)
    allowed = set() if expected is None else set(_canonical(names, find_layers(names, expected)))
    arguments, keywords = arguments_for(model, data)
    report = _Report(allowed)
    with ExitStack() as stack:
        stack.enter_context(compiled_code_as_eager())
        stack.enter_context(unchanged(model, report.note_written))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        inputs = (copy_of_data(arguments), copy_of_data(dict(keywords)))
        log = _run(model, inputs, names, chosen)
        calls = [*log.calls, *_loss_call(log.output, target, loss, log)]
        _settle(model)
        with Progress("verify", len(calls)) as progress:
            for call in calls:
                progress.step(call.layer)
                report.add(call, verify_call(call, report.wrong, Options(directions, second)))
    report.add_missing(names, chosen, log)
    if not report.checks:
        why = [f"{layer or 'the model'}: {each}" for layer, each in report.missing.items()]
        raise InspectionError(f"Nothing was verified: {'; '.join(why) or 'no layer was called.'}")
    return Verification(
        model=type(unwrap(model)).__name__,
        checks=report.checks,
        missing=report.missing,
        notes=report.notes,
        seconds=time.perf_counter() - started,
    )


@dataclass
class _Report:
    """The results so far."""

    expected: set[str]
    checks: list[GradientCheck] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    wrong: dict[str, nn.Module] = field(default_factory=dict)

    def add(self, call: ModuleCall, verdict: LayerVerdict) -> None:
        layer = call.layer
        for check in verdict.checks:
            if check.status == WRONG:
                self.wrong[layer] = call.module
                check = replace(check, status=EXPECTED if layer in self.expected else WRONG)
            self.checks.append(replace(check, kind=_kind(call)))
        if verdict.problem:
            known = self.missing.get(layer, "").split("; ")
            self.missing[layer] = "; ".join(dict.fromkeys(filter(None, [*known, verdict.problem])))
        for note in verdict.notes:
            self._note(note, layer)

    def add_missing(self, names: Mapping[str, nn.Module], chosen: list[str], log: CallLog) -> None:
        judged = {check.layer for check in self.checks}
        for layer in chosen:
            count = log.counts.get(layer, 0)
            # A ModuleList has no forward of its own: it cannot be called at all.
            if count == 0 and type(names[layer]).forward is not nn.Module.forward:
                self.missing[layer] = (
                    "not called as a module; parameters of it that another layer uses are verified "
                    "there"
                )
            elif count > 1 and layer in judged:
                kept = sum(call.layer == layer for call in log.calls)
                if kept < count:
                    self._note("of several calls only one for each shape is verified", layer)
        for layer in self.expected & judged:
            if not any(each.layer == layer and each.status == EXPECTED for each in self.checks):
                self._note("expected to deviate, but its gradient is right", layer)

    def note_written(self, parameter: str) -> None:
        self._note(
            "its forward pass writes into its own parameters: those changes stay",
            parameter.rpartition(".")[0],
        )

    def _note(self, text: str, layer: str) -> None:
        layers = self.notes.setdefault(text, [])
        if layer not in layers:
            layers.append(layer)


def _check(model: Any, directions: Any) -> None:
    check_module("model", model)
    check_number("directions", directions, 1, "give a number from 1 upwards; 2 will do")
    if switched_off():
        raise InspectionError("TORCHFMRI=off is set, so nothing is verified. Unset it.")


def _canonical(names: Mapping[str, nn.Module], chosen: list[str]) -> list[str]:
    """Return the first name of each module, so that one with two names is verified once."""
    first = first_names(names)
    return list(dict.fromkeys(first[name] for name in chosen))


def _run(
    model: nn.Module, inputs: Any, names: Mapping[str, nn.Module], chosen: list[str]
) -> CallLog:
    """Run one forward pass, with gradients that start at the data too."""
    for element in flatten(inputs):
        if element.tensor.is_floating_point() and element.tensor.is_leaf:
            element.tensor.requires_grad_()
    seed_all(SEED)
    with logged_calls(names, chosen) as log:
        # A leaf cannot be written in place, but the model's input may be.
        arguments, keywords = map_tensors(inputs, Tensor.clone)
        log.output = runnable(model)(*arguments, **keywords)
    return log


class _LossModule(nn.Module):
    """The user's loss as a layer."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Any, target: Any = None) -> Tensor | None:
        return loss_of(output, target, self.loss)


def _loss_call(output: Any, target: Any, loss: Loss, log: CallLog) -> Iterator[ModuleCall]:
    value = loss_of(output, target, loss)
    if value is not None and not bool(value.isfinite()):
        made = f"; the first NaN comes from layer {log.first_nan!r}" if log.first_nan else ""
        raise InspectionError(
            f"The loss is {float(value.detach())}: its gradient cannot be verified{made}. "
            "Inspector(model).run_inspection(...) shows the values of every layer."
        )
    if callable(loss):
        module = _LossModule(loss)
        inputs = (output,) if target is None else (output, target)
        yield copy_call(LOSS, module, (inputs, {}), 0)


def _settle(model: nn.Module) -> None:
    """Switch off side effects that modules do not differentiate by design; undone afterwards.

    Spectral norm iterates its singular vectors while training, and an embedding with max_norm
    writes into its weight; autograd takes both as constant. The padding row of an embedding gets
    no gradient, and frequent rows may get a smaller one.
    """
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.max_norm = None
            module.scale_grad_by_freq = False
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
        hooks = module._forward_pre_hooks.values()
        kinds = {type(module).__name__, *(type(hook).__name__ for hook in hooks)}
        if kinds & {"_SpectralNorm", "SpectralNorm"}:
            module.training = False


def _kind(call: ModuleCall) -> str:
    if isinstance(call.module, _LossModule):
        loss = call.module.loss
        return type(loss).__name__ if isinstance(loss, nn.Module) else "loss"
    return type(call.module).__name__
