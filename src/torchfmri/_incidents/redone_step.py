"""A step that went wrong, run again to find the origin; and what is known without that.

`aftermath` runs it in the middle of training, `replay_run` from a folder. Losses are multiplied by
the scale that they had, because an overflow may come from it. If the model is finite when it is run
again, the finding says so and does not guess: compiled code, unknown targets and overwritten data
each have a message of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from torchfmri._incidents.content import is_finite, read_content
from torchfmri._incidents.event import Event, EventPlace, Lineage
from torchfmri._incidents.model_call import ModelCall
from torchfmri._incidents.origin import find_origin
from torchfmri._incidents.report import Context, data_name, report, samples_in_words
from torchfmri._model import loss_in
from torchfmri._records import Finding, alarm
from torchfmri._text import listed
from torchfmri._torch import flatten, nodes_behind

_MOST_NAMES = 4
OVERWRITTEN = (
    "Compute a new tensor (x = x - x.mean(), not x -= x.mean()), or hand the model a copy "
    "(model(x.clone())). A Monitor that has seen an earlier step do this keeps copies by itself "
    "and finds the origin."
)


@dataclass(frozen=True)
class BadStep:
    """What is known of a step whose loss or gradients are not finite.

    Attributes:
        number: The number of the step.
        calls: The calls of the model, one per micro-batch.
        losses: The losses as they were seen or told, with their graphs.
        gradients: Parameter -> its gradient, for gradients that are not finite.
        after_update: Whether the optimizer stepped before, from finite gradients.
        scale: The factor of the GradScaler on the loss.
        batch: The batch, as the user told it.
        overwritten: The identities of tensors that are no longer what they were in the step.
    """

    number: int
    calls: Sequence[ModelCall]
    losses: Sequence[Tensor]
    gradients: Mapping[str, Tensor]
    after_update: bool = False
    scale: float = 1.0
    batch: Any = None
    overwritten: frozenset[int] = frozenset()


def redo(step: BadStep, model: nn.Module, loss: Callable[..., Any] | None) -> Finding | None:
    """Return the origin, found by calling the model again; None if the calls turn out finite.

    Args:
        step: What is known of it.
        model: The model.
        loss: The loss module of the loop, if it is known.
    """
    for index, call in enumerate(step.calls):
        known = loss if call.loss_arguments is not None else None
        finding = redo_call(step, call, model, known)
        if finding is not None and not (call.was_written and depends_on_batch(finding)):
            return _of_micro_batch(finding, index, len(step.calls))
    return None


def depends_on_batch(finding: Finding) -> bool:
    """Whether another batch might have led to another finding: all but one about the weights."""
    return finding.problem not in ("nonfinite_weights", "nonfinite_update")


def redo_call(
    step: BadStep, call: ModelCall, model: nn.Module, loss: Callable[..., Any] | None
) -> Finding | None:
    """Return the origin in one call of the model; None if it turns out finite."""

    def search(run: Callable[[], Any]) -> Finding | None:
        return find_origin(
            run, model, call.batch, step=step.number, after_update=step.after_update, data=call.data
        )

    has_loss = [True]

    def run() -> Any:
        result = call.run(model, loss)
        found = loss_in(result)
        has_loss[0] = found is not None
        return found * step.scale if found is not None and step.scale != 1 else found

    finding = search(run)
    if finding is not None:
        return _with_other_data(finding, call, step.batch)
    if has_loss[0] or not step.gradients:
        return None
    finding = search(lambda: _sum(call.run(model)))
    if finding is None:
        return None
    remark = " (Found with the sum of the output as a stand-in for the loss.)"
    return replace(
        finding, text=finding.text + remark, evidence={**finding.evidence, "stand_in": True}
    )


def _with_other_data(finding: Finding, call: ModelCall, told: Any) -> Finding:
    """Return the finding about bad data, with a word on what else in the batch is bad."""
    if finding.problem != "nonfinite_data":
        return finding
    found = list(flatten(call.data))
    known = {id(each.tensor) for each in found}
    told_too = [each for each in _told_data(told) if id(each[1]) not in known]
    others = []
    for path, tensor in (*found, *told_too):
        content, named = read_content(tensor), data_name(path)
        is_bad = content is not None and (content.nan or content.pos_inf)  # -inf may be a mask
        if content is not None and is_bad and f" of {named}:" not in finding.text:
            others.append(f"{named} holds {content.value} {samples_in_words(content)}")
    if not others:
        return finding
    return replace(finding, text=f"{finding.text} Besides, {' and '.join(others)}.")


def _told_data(batch: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of the batch as the user told it, by where they stand in it."""
    return [
        (f"batch[{path}]" if path.isdigit() else path, tensor) for path, tensor in flatten(batch)
    ]


def why_not(model: nn.Module) -> str:
    """Return why this process cannot run the model by itself; empty if it can."""
    for parameter in model.parameters():
        if hasattr(parameter, "placements") or hasattr(parameter, "_is_sharded"):
            return "its parameters are sharded"
    kinds = {type(module).__name__ for module in model.modules()}
    for kind in ("FullyShardedDataParallel", "SyncBatchNorm"):
        if kind in kinds:
            return f"its {kind} needs all processes at once"
    return ""


def plain_finding(number: int) -> Finding:
    """Return the finding about a step of which nothing else is known."""
    return alarm(
        "nonfinite_backward",
        step=number,
        text=f"The loss or a gradient of step {number} is not finite.",
        advice=_advice(),
    )


def coarse_finding(step: BadStep, reason: str, compiled: bool, is_written: bool) -> Finding:
    """Return what is known without the origin: bad data, or a bad loss, or which gradients are bad.

    Args:
        step: What is known of it.
        reason: Why the model was not called again; empty if it was, and was finite.
        compiled: Whether the model is compiled.
        is_written: Whether the step is written to a folder.
    """
    was_called = not reason and bool(step.calls)
    data = _bad_data(step, was_called)
    if data is not None:
        return data
    written = next((call for call in step.calls if call.was_written), None)
    remark = _why_no_origin(step, reason, written, compiled)
    bad = [loss for loss in step.losses if not is_finite(loss)]
    if bad:
        operations = _operations_before(bad[0])
        named = f" The operations before it are {', '.join(operations)}." if operations else ""
        text = f"The loss of step {step.number} is {float(bad[0].detach())}.{remark}{named}"
        return alarm(
            "nonfinite_loss",
            step=step.number,
            text=text,
            advice=OVERWRITTEN if written is not None else _advice(step, is_written, operations),
            evidence={"operations": operations, "compiled": compiled},
        )
    names = list(step.gradients)
    layers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in reversed(names)))
    named = listed(names[::-1], _MOST_NAMES)
    text = f"The gradients of {named} are not finite at step {step.number}.{remark}"
    return alarm(
        "nonfinite_backward",
        layers=layers[:1],
        step=step.number,
        text=text,
        advice=OVERWRITTEN if written is not None else _advice(step, is_written),
        evidence={"parameters": names, "compiled": compiled},
    )


def _why_no_origin(step: BadStep, reason: str, written: ModelCall | None, compiled: bool) -> str:
    """Return a sentence that says why the origin is not known."""
    remark = f" The origin was not looked for: {reason}." if reason else ""
    if written is not None:
        who = "by the model" if written.is_written_by_model else "after the model had returned"
        remark += f" The batch was written into {who}: what it held before is not known, and so "
        return f"{remark}neither is the origin."
    if reason or not step.calls:
        return remark
    remark = " The model, called again in the same way, was finite"
    if compiled:
        return f"{remark}: compiled code gave what eager code does not."
    return f"{remark}. {_not_known(step)}"


def _not_known(step: BadStep) -> str:
    """Return why the origin is unknown if the model is finite when it is run again."""
    if all(call.loss_arguments is not None for call in step.calls):
        return "Operations that are not deterministic may differ from call to call."
    targets = "" if step.batch is not None else ", or in targets that the Monitor was not told of"
    return (
        "The loss is code that the Monitor cannot run again: the first such value came up in the "
        f"loss or its derivative{targets}."
    )


def _bad_data(step: BadStep, was_called: bool) -> Finding | None:
    """Return the finding about the first bad value of the batch; None if all are finite."""
    calls = [each for call in step.calls for each in flatten(call.data)]
    known = {id(each.tensor) for each in calls} if was_called else set()
    for path, tensor in (*calls, *_told_data(step.batch)):
        content = None if id(tensor) in known | step.overwritten else read_content(tensor)
        if content is not None and (content.nan or content.pos_inf):  # -inf may be a mask
            event = Event(
                number=0,
                kind="data",
                operation="",
                place=EventPlace("data"),
                content=content,
                name=path,
            )
            found = report(Lineage(event, event, event), Context(None, step.number))
            remark = " It was not traced from there to the loss."
            return replace(found, text=found.text + remark)
    return None


def _sum(output: Any) -> Tensor | None:
    tensors = [each.tensor for each in flatten(output)]
    floating = [each for each in tensors if each.is_floating_point() and each.requires_grad]
    return floating[0].sum() if floating else None


def _of_micro_batch(finding: Finding, index: int, count: int) -> Finding:
    if count == 1:
        return finding
    return replace(
        finding,
        text=f"In micro-batch {index} of {count}: {finding.text}",
        evidence={**finding.evidence, "micro_batch": index},
    )


def _operations_before(loss: Tensor) -> list[str]:
    """Return the operations that lead to a loss, the last first."""
    found: list[str] = []
    for node in nodes_behind([loss.grad_fn]):
        name = str(node.name()).rpartition("::")[2].partition("Backward")[0].lower()
        if name not in ("accumulategrad", "view", "reshapealias", "unsafeview", *found):
            found.append(name)
        if len(found) == 6:
            break
    return found


def _advice(
    step: BadStep | None = None, is_written: bool = False, operations: Sequence[str] = ()
) -> str:
    """Return how to find the origin that is not known, after what may be guessed of it."""
    guess = ""
    if "log" in operations:
        guess = "log of 0 is -inf: use log_softmax / cross_entropy, or clamp. "
    elif "div" in operations:
        guess = "Look for a division by 0. "
    has_targets = step is not None and (
        step.batch is not None or any(call.loss_arguments is not None for call in step.calls)
    )
    wanted = [] if is_written else ["have incidents written (Monitor(..., incidents='folder'))"]
    if not has_targets:
        wanted.append("tell the Monitor the batch (step.batch((x, y)), or monitor.batch((x, y)))")
    if wanted:
        first = " and ".join(wanted)
        return f"{guess}{first[0].upper()}{first[1:]}; then run `torchfmri replay` {_REPLAY}"
    return f"{guess}Run `torchfmri replay` {_REPLAY}"


_REPLAY = (
    "on the incident's folder with your model and loss (--factory): that names the operation and "
    "the line."
)
