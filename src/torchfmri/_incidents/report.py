"""The finding that names what began a lineage of non-finite values.

`origin` and `redone_step` ask `report`; `aftermath` adds when bad weights were made. The keys of
`evidence` are documented with `find_origin` and stored in incidents; sentences may change, but a
test compares many of them. A sample is named only where rows of a result belong to rows of the
batch beyond doubt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torchfmri._explain import SourceLine
from torchfmri._incidents.causes import cause_of
from torchfmri._incidents.content import Content
from torchfmri._incidents.event import PRODUCTS, Event, Lineage
from torchfmri._records import Finding, alarm
from torchfmri._text import layer_label
from torchfmri._torch import flatten

_BAD_DATA = "Drop or repair the sample before it reaches the model; look at how it was made."
HOLD = " Let a Monitor hold such steps (on_nonfinite='skip')."
"""The end of an advice, for those whose Monitor does not hold them yet."""
_BAD_WEIGHTS = (
    "Load an earlier checkpoint. If they were made by training: lower the learning rate, and clip "
    f"the gradients.{HOLD}"
)
_BAD_START = (
    "Look at how the weights are initialised, and at the checkpoint that they were loaded from."
)
_BAD_BUFFER = (
    "Load an earlier checkpoint, or reset it (reset_running_stats() of a batch norm). A forward "
    "pass in training mode over a bad batch makes it so, also one whose step was then left out by "
    "other means than a Monitor."
)
_BAD_UPDATE = (
    "Lower the learning rate, or raise the optimizer's eps; look at its state (Adam's second "
    "moment overflows in half precision)."
)
_BAD_CHANGE = (
    "Look at what writes to the weights outside optimizer.step(): load_state_dict, a checkpoint "
    "that holds NaN, averaging, clamping or pruning by hand."
)
_UNRECORDED = (
    "If nothing does, lower the learning rate or raise the optimizer's eps. Monitor(every=1) "
    "records every update."
)

_MOST_SAMPLES = 8
"""The most samples that a finding names."""


class Context(NamedTuple):
    """What is known of the step.

    Attributes:
        batch: Its data, to name samples.
        step: Its number.
        after_update: Whether the optimizer has stepped before, from finite gradients.
        bad_parameters: The parameters that were not finite before it.
    """

    batch: Any = None
    step: int | None = None
    after_update: bool = False
    bad_parameters: tuple[str, ...] = ()


def report(lineage: Lineage, context: Context) -> Finding:
    """Return the finding about a lineage."""
    root, step = lineage.root, context.step
    if root.kind in ("data", "outside"):
        return _about_data(root, step)
    if root.kind in ("parameter", "buffer"):
        return _about_weights(root, context)
    rows = _samples(root, context.batch)
    cause = cause_of(root)
    where = _where(root)
    phrase = f"{root.content.value} is born {where}{_at(step)}{_until(root)}: {cause.why}"
    text = f"{phrase}{_line(root)}."
    if lineage.birth is not root and lineage.birth.content.nan and not root.content.nan:
        turned = lineage.birth.operation.strip("_")
        text += f" It becomes NaN in {turned}{_line(lineage.birth)}."
    if rows:
        text += f" It is in {_in_words(rows)} of the batch."
    layer = root.place.layer
    return alarm(
        f"nonfinite_{root.place.phase}",
        layers=(layer,) if layer else (),
        step=step,
        text=text,
        advice=cause.advice,
        evidence=_evidence(root, rows),
    )


def _about_data(root: Event, step: int | None) -> Finding:
    content = root.content
    name = f" of {data_name(root.name)}" if root.name else ""
    bad = content.nan + content.inf
    first = f", first at {_index(content.element)}" if content.element else ""
    if root.kind == "data":
        rows = content.rows
        text = (
            f"The batch{_of(step)} holds {content.value} {samples_in_words(content)}{name}: "
            f"{bad:,} of {content.count:,} values{first}."
        )
    else:
        rows = ()
        text = (
            f"A tensor that the step did not make, of shape {content.shape}, holds "
            f"{content.value}{_at(step)}: {bad:,} of {content.count:,} values{first}."
        )
    return alarm(
        "nonfinite_data",
        step=step,
        text=text,
        advice=_BAD_DATA,
        evidence=_evidence(root, rows),
    )


def data_name(path: str) -> str:
    """Return the name of a tensor in the batch, from its path."""
    called = f"argument {path}" if path.isdigit() else path
    return repr(called) if called.isidentifier() else called


def samples_in_words(content: Content) -> str:
    """Describe in which samples of the batch a tensor is not finite."""
    return f"in {_in_words(content.rows)}" if content.rows else "as its only value"


def _about_weights(root: Event, context: Context) -> Finding:
    step, is_buffer = context.step, root.kind == "buffer"
    names = (root.name,) if is_buffer else context.bad_parameters or (root.name,)
    layers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name))
    evidence = {**_evidence(root, ()), "parameter": root.name, "parameters": list(names)}
    what = "The buffer" if is_buffer else "The weights"
    found = alarm(
        "nonfinite_weights",
        layers=layers,
        phase="forward" if is_buffer else "optimizer",
        step=step,
        text=f"{what} {root.name!r} held {root.content.value} before "
        f"{'the step' if step is None else f'step {step}'} "
        f"({_how_many(evidence)}).",
        advice=_BAD_BUFFER if is_buffer else _BAD_WEIGHTS,
        evidence=evidence,
    )
    if not context.after_update or is_buffer:
        return found
    return made_by_update(found, None if step is None else (step - 1, step - 1))


def made_by_update(
    finding: Finding, steps: tuple[int, int] | None, of_finite_gradients: bool = True
) -> Finding:
    """Return a finding about non-finite weights, as the work of an update in one of these steps.

    Args:
        finding: Names the weights.
        steps: The first and the last step whose update may have made them; None: the last one.
        of_finite_gradients: Whether the gradients of these steps were finite.
    """
    found, (first, last) = finding.evidence, steps or (None, None)
    one = "The optimizer's update in "
    if first != last:
        one, when = "An update of the optimizer in ", f"steps {first} to {last}"
    else:
        when = "the step before" if first is None else f"step {first}"
    source = "finite gradients" if of_finite_gradients else "gradients that were not finite"
    return replace(
        finding,
        problem="nonfinite_update",
        step=last,
        text=f"{one}{when} made {found['parameter']!r} {found['value']} ({_how_many(found)}), from "
        f"{source}.",
        advice=_BAD_UPDATE if of_finite_gradients else _BAD_WEIGHTS,
    )


def bad_from_start(finding: Finding, first: int) -> Finding:
    """Return a finding about weights that were not finite in the first recorded step either."""
    remark = f" They did so at step {first} already, the first that was recorded."
    return replace(finding, text=finding.text + remark, advice=_BAD_START)


def changed_between(finding: Finding, last_good: int, first_bad: int, is_after: bool) -> Finding:
    """Return a finding about non-finite weights that no recorded update has made.

    Args:
        finding: Names the weights.
        last_good: The last step at which they were recorded as finite.
        first_bad: The first step before which they were not.
        is_after: Whether they were finite after the update of `last_good` too.
    """
    found, when = finding.evidence, "after" if is_after else "before"
    text = (
        f"The weights {found['parameter']!r} were finite {when} the optimizer's update in step "
        f"{last_good}, and held {found['value']} before step {first_bad} ({_how_many(found)})."
    )
    first = last_good + int(is_after)
    if first == first_bad:
        text += f" They were changed between step {last_good} and step {first_bad}, not by the "
        text += "optimizer."
        return replace(finding, text=text, advice=_BAD_CHANGE)
    span = f"step {first}" if first == first_bad - 1 else f"steps {first} to {first_bad - 1}"
    text += f" An update in {span} made them so, or something else that wrote to them: what the "
    text += "updates did there was not recorded in full."
    return replace(finding, text=text, advice=f"{_BAD_CHANGE} {_UNRECORDED}")


def _how_many(found: Mapping[str, Any]) -> str:
    """Return how many values are concerned, and how many more parameters."""
    others = len(found["parameters"]) - 1
    more = f"; {others} more parameters are not finite either" if others else ""
    return f"{found['nan'] + found['inf']:,} of {found['count']:,} values{more}"


def _where(root: Event) -> str:
    layer = root.place.layer
    named = "the model itself" if layer == "" else f"layer {layer_label(layer or '')!r}"
    if root.place.phase == "forward":
        return f"in {named}"
    if root.place.phase == "backward":
        return "in the backward pass" if layer is None else f"in the backward pass of {named}"
    return "in the loss" if root.place.phase == "loss" else "before the model was called"


def _until(root: Event) -> str:
    if root.place.phase == "loss":
        return " (forward was finite)"
    return " (the loss was finite)" if root.place.phase == "backward" else ""


def _line(event: Event) -> str:
    line, caller = event.place.line, event.place.caller
    if line is None:
        return ""
    called = f", called at {_short(caller)}" if caller is not None else ""
    return f", {_short(line)}{called}"


def _short(line: SourceLine) -> str:
    return f"{Path(line.file).name}:{line.number}"


def _evidence(root: Event, rows: tuple[int, ...]) -> dict[str, Any]:
    """Return the numbers behind a finding; `find_origin` documents the keys."""
    content, line = root.content, root.place.line
    found: dict[str, Any] = {
        "operation": root.operation,
        "line": _short(line) if line is not None else "",
        "code": line.code if line is not None else "",
        "file": line.file if line is not None else "",
        "value": content.value,
        "nan": content.nan,
        "inf": content.inf,
        "count": content.count,
        "shape": list(content.shape),
        "dtype": content.dtype,
        "element": list(content.element),
    }
    if root.place.caller is not None:
        found["called_at"] = _short(root.place.caller)
    if rows:
        found["rows"] = list(rows[:_MOST_SAMPLES])
    return found


def _samples(root: Event, batch: Any) -> tuple[int, ...]:
    """Return the rows of the batch to which rows of a result belong; none if that is unclear."""
    content = root.content
    if root.place.derivative and root.operation in PRODUCTS:
        return ()  # it may be the gradient of a matrix, whose rows are units
    sizes = {each.tensor.shape[0] for each in flatten(batch) if each.tensor.dim() > 0}
    if len(sizes) != 1 or not content.rows:
        return ()
    size = sizes.pop()
    if size < 2 or content.shape[0] % size or content.shape[0] < size:
        return ()
    rows = tuple(dict.fromkeys(row // (content.shape[0] // size) for row in content.rows))
    return rows if len(rows) < size else ()


def _in_words(rows: tuple[int, ...]) -> str:
    if len(rows) == 1:
        return f"sample {rows[0]}"
    if len(rows) > _MOST_SAMPLES:
        return f"{len(rows):,} samples, the first of them {rows[0]}"
    return f"samples {', '.join(map(str, rows[:-1]))} and {rows[-1]}"


def _index(element: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, element))}]"


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def _of(step: int | None) -> str:
    return "" if step is None else f" of step {step}"
