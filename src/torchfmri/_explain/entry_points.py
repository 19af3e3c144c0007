"""`explain` and `explained`: an exception explained after it was caught, or as it leaves a block.

Both are public. The user's exception must always come through: `explained` raises a known failure
again as a subclass of the original's class, and leaves every other one as the same object. An error
of ours while explaining becomes a note, never an exception. Only exceptions of Python and PyTorch
are raised anew, because other classes may have constructors that cannot be copied. Words, and the
order of tables from special to general failures, may be refined.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch import nn

from torchfmri._arguments import check_module, few
from torchfmri._explain.backward_clues import reached
from torchfmri._explain.backward_failures import BACKWARD_FAILURES
from torchfmri._explain.crash import Crash, SourceLine, describe
from torchfmri._explain.explanation import Explanation, short_path
from torchfmri._explain.failure import Clues, Failure
from torchfmri._explain.forward_failures import FORWARD_FAILURES
from torchfmri._explain.layer_failures import LAYER_FAILURES
from torchfmri._explain.setup_failures import SETUP_FAILURES
from torchfmri._explain.target_failures import TARGET_FAILURES
from torchfmri._model import switched_off
from torchfmri.exceptions import ExplainedError, InspectionError, explained_error

FAILURES: tuple[Failure, ...] = (
    *BACKWARD_FAILURES,
    *SETUP_FAILURES,
    *LAYER_FAILURES,
    *TARGET_FAILURES,
    *FORWARD_FAILURES,
)
"""Every failure that can be explained; the first match counts, so special entries come first."""
_MOST_TENSORS = 4
_PYTHONS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError)
_CLASSES = {cls.__name__: cls for cls in (*_PYTHONS, *(each.error for each in FAILURES)) if cls}
_RAISED = re.compile(
    r"^(?:\w+\.)*(?P<name>[A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (?P<message>.*)",
    re.MULTILINE | re.DOTALL,
)


def explain(
    exception: BaseException | str | None = None, model: nn.Module | None = None
) -> Explanation:
    """Explain an exception: what happened, in which layer and line, why, and the cure.

    You need not prepare anything. The explanation is read from the traceback, whose frames keep
    their variables, and for a backward pass from the graph of the loss. Nothing is run again.

    Args:
        exception: The exception; by default the last uncaught one (in a notebook or an interactive
            session). You can also pass the text of a message, as copied from a log. It is explained
            without layer and line.
        model: The model that layer names are relative to; by default the outermost module that was
            running, or the only model among the variables of the failing code.

    Raises:
        InspectionError: There is no exception to explain, the text is not a known message, or
            `model` is not a module.
    """
    if exception is None:
        exception = getattr(sys, "last_value", None)
        if exception is None:
            raise InspectionError(
                "There is no exception to explain: nothing was raised in this session without "
                "being caught. Pass the one you caught: torchfmri.explain(error)."
            )
    if not isinstance(exception, BaseException | str):
        raise InspectionError(
            f"explain takes an exception, not {exception!r}. Catch it with "
            "`except Exception as error:` and pass error."
        )
    _check_model(model)
    if isinstance(exception, str):
        return _explain_text(exception)
    if isinstance(exception, ExplainedError):
        return exception.explanation  # type: ignore[no-any-return]
    crash = Crash(exception, model)
    found = find_failure(crash)
    cause = exception.__cause__ or (
        None if exception.__suppress_context__ else exception.__context__
    )
    if found is None and cause is not None:
        deeper = Crash(cause, model)
        if (found := find_failure(deeper)) is not None:
            crash = deeper
    return _write(crash, *found) if found is not None else _write_unknown(crash)


def _explain_text(text: str) -> Explanation:
    """Explain a message, or a whole traceback that ends with it."""
    *_, last = [None, *_RAISED.finditer(text)]
    # The message of a class that is neither Python's nor PyTorch's is not PyTorch's either.
    cls = RuntimeError if last is None else _CLASSES.get(last["name"])
    if cls is not None:
        crash = Crash(cls((text if last is None else last["message"]).strip()))
        found = find_failure(crash)
        if found is not None:
            return _write(crash, *found)
    raise InspectionError(
        f"explain takes an exception, not {text!r}, which is not a message that it knows. Catch it "
        "with `except Exception as error:` and pass error, to see at least layer and line."
    )


def find_failure(crash: Crash) -> tuple[Failure, re.Match[str]] | None:
    """Return the first failure of the table that fits, with its match; None if none does."""
    matches = ((failure, failure.match(crash)) for failure in FAILURES)
    return next(((failure, match) for failure, match in matches if match is not None), None)


def explained(
    model: nn.Module | None = None, *, detect: bool = False
) -> AbstractContextManager[None]:
    """Return a `with` block that raises known failures with their explanation.

    A known failure is raised again as an `ExplainedError` that is also of the original's class
    (`except RuntimeError` keeps working), has its `args`, and has the original as `__cause__`.
    Unknown failures, and exceptions of classes that are neither Python's nor PyTorch's, leave the
    block as the same object with a note about layer and line. KeyboardInterrupt, SystemExit and
    errors of torchfmri are left unchanged.

    Args:
        model: As for `explain`.
        detect: Whether to record the line of every forward operation (anomaly detection without its
            check for NaN), so that a failed backward pass can be traced to it. The setting is
            restored at the end. This makes a forward pass several times slower.

    Raises:
        InspectionError: `model` is not a module.

    Examples:
        >>> import torch, torchfmri
        >>> model = torch.nn.Linear(4, 2)
        >>> try:
        ...     with torchfmri.explained(model):
        ...         model(torch.randn(3, 5))
        ... except RuntimeError as error:
        ...     print(type(error).__name__, error.explanation.kind, type(error.__cause__).__name__)
        ExplainedRuntimeError matrix_shape RuntimeError
    """
    _check_model(model)
    return nullcontext() if switched_off() else _Explained(model, detect)


class _Explained(AbstractContextManager[None]):
    """The `with` block that `explained` returns."""

    def __init__(self, model: nn.Module | None, detect: bool) -> None:
        self._model = model
        self._detect = detect
        self._anomaly: list[torch.autograd.set_detect_anomaly] = []

    def __enter__(self) -> None:
        if self._detect and not torch.is_anomaly_enabled():
            self._anomaly.append(torch.autograd.set_detect_anomaly(True, check_nan=False))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._anomaly:
            self._anomaly.pop().__exit__(None, None, None)
        if not isinstance(error, Exception) or isinstance(error, (ExplainedError, InspectionError)):
            return
        try:
            explanation = explain(error, self._model)
        except Exception as ours:  # the user's error must come through, with a note about ours
            add_note(error, f"torchfmri could not explain this: {type(ours).__name__}: {ours}")
            return
        known = type(error).__module__.partition(".")[0] in ("builtins", "torch")
        if explanation.recognised and known:
            raise explained_error(error, explanation) from error
        add_note(error, f"torchfmri:\n{explanation.body()}")


def _write(crash: Crash, failure: Failure, match: re.Match[str]) -> Explanation:
    groups = {name: value or "" for name, value in match.groupdict().items()}
    read = failure.clues
    clues = Clues() if read is None else _read(lambda: read(crash, match))
    placed = crash.phase == "backward" and (clues.layer is not None or clues.near is not None)
    around = () if placed else _place_facts(crash)
    return _place(
        crash,
        clues,
        kind=failure.kind,
        what=failure.what.format_map(groups),
        why=failure.why,
        cure=(*clues.cure, *(each.format_map(groups) for each in failure.cure)),
        facts=(*clues.facts, *around, *_hook_fact(crash)),
    )


def _write_unknown(crash: Crash) -> Explanation:
    if crash.hook is not None:
        return _write_hook(crash, *crash.hook)
    return _place(
        crash,
        Clues(),
        kind="unknown",
        what="This is none of the failures that torchfmri knows; here is where it happened.",
        why="",
        cure=(),
        facts=_place_facts(crash),
    )


def _write_hook(crash: Crash, line: SourceLine, module: nn.Module | None) -> Explanation:
    of = "a tensor or a parameter" if module is None else "a module"
    return _place(
        crash,
        Clues(layer=crash.layer_of(module)),
        kind="hook_raised",
        what=f"A hook of {of} raised the exception; the model itself did not fail.",
        why=f"The hook is {line.function} at {short_path(line.file)}:{line.number}. What is raised "
        "in a hook stops the pass that called it; gradients may then be half done.",
        cure=(
            "Repair the hook, or remove it: handle.remove() on what register_*_hook returned.",
            "After a failed backward pass: optimizer.zero_grad() before the next one.",
        ),
    )


def _place(
    crash: Crash,
    clues: Clues,
    *,
    kind: str,
    what: str,
    why: str,
    cure: tuple[str, ...],
    facts: tuple[str, ...] = (),
) -> Explanation:
    """Return the explanation with everything that is known about the place."""
    layer = clues.layer if clues.layer is not None else crash.layer_of(crash.module)
    module = crash.layers.get(layer, crash.module) if layer is not None else crash.module
    return Explanation(
        kind=kind,
        error=f"{type(crash.error).__name__}: {crash.message}",
        what=what,
        why=why,
        cure=cure,
        facts=facts,
        layer=layer,
        module=None if module is None else type(module).__name__,
        near=clues.near if layer is None else None,
        phase=crash.phase,
        source=crash.source,
        operation=crash.operation,
        forward=clues.forward,
    )


def _read(clues: Callable[[], Clues]) -> Clues:
    try:
        return clues()
    except Exception as error:  # the rest of the explanation does not depend on it
        return Clues((f"(Reading more failed: {type(error).__name__}: {error})",))


def _place_facts(crash: Crash) -> tuple[str, ...]:
    """Describe what the layer was given and holds, and how far a backward pass came."""
    if crash.phase == "backward":
        return _read(lambda: Clues(tuple(filter(None, [reached(crash)])))).facts
    if crash.module is None:
        return ()
    given = [describe(each) for each in crash.inputs().values()]
    held = [
        f"{name} {describe(each)}"
        for name, each in crash.module._parameters.items()
        if each is not None
    ]
    found = (("It was called with", given), ("It holds", held))
    return tuple(f"{verb} {few(items, _MOST_TENSORS)}." for verb, items in found if items)


def _hook_fact(crash: Crash) -> tuple[str, ...]:
    if crash.hook is None:
        return ()
    line, _ = crash.hook
    return (f"It happened in the hook {line.function} at {short_path(line.file)}:{line.number}.",)


def _check_model(model: nn.Module | None) -> None:
    if model is not None:
        check_module("model", model)


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error, which Python prints below it.

    Args:
        error: The error; it stays the same object with the same message.
        text: What to say.
    """
    # Not error.add_note, which fails for classes that forbid setting attributes.
    error.__dict__.setdefault("__notes__", []).append(text)
