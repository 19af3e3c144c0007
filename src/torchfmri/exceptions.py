"""The errors of torchfmri.

    InspectionError (RuntimeError)            anything that an inspection cannot do
    ├── LayerNotFoundError (KeyError)         a name or pattern that no layer has
    ├── MemoryLimitError (MemoryError)        max_bytes would be exceeded
    ├── NonFiniteError (ArithmeticError)      a step whose loss or gradients are NaN or infinite
    ├── GuardError                            a step that could not be checked for NaN
    ├── UnsupportedLayerError (NotImplementedError)   token gradients that cannot be had
    └── FileFormatError (ValueError)          a file or folder that is damaged, hostile or not ours
    ExplainedError (class of the original)    an error of the user's own code, with its explanation

Catch `InspectionError` for all but the last of them. An error carries what it is about as
attributes, so that nobody has to parse its text; names and attributes are public. It must come
through pickle (`_given`), because it may come from another process. A new one joins the tree, is
also a builtin error if one fits, and says the fact, what exists instead, and the next step.

Errors raised by the model itself pass through unchanged. `compare`, which runs two models, adds a
note that names the side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar


class InspectionError(RuntimeError):
    """An inspection cannot do what was asked; the message says why and what to write instead."""

    _given: ClassVar[tuple[str, ...]] = ()
    """The attributes that its constructor takes, in order: pickle makes it anew from these."""

    def __reduce__(self) -> Any:
        if not self._given:
            return super().__reduce__()
        return type(self), tuple(getattr(self, name) for name in self._given)


class LayerNotFoundError(InspectionError, KeyError):
    """No layer or parameter has this name, or none matches this pattern.

    Attributes:
        pattern: What was asked for, as the user wrote it.
        nearest: The names that come closest, best first.
        count: How many names there are to choose from.
        hint: Where they are listed; empty if nowhere.
        kind: What was looked for: "layer" or "parameter".
    """

    _given = ("pattern", "nearest", "count", "hint", "kind")

    def __init__(
        self,
        pattern: object,
        nearest: Sequence[str] = (),
        count: int = 0,
        hint: str = "",
        kind: str = "layer",
    ) -> None:
        self.pattern, self.nearest, self.count = pattern, tuple(nearest), count
        self.hint, self.kind = hint, kind
        message = f"No {kind} matches {pattern!r} among {count} {kind}{'' if count == 1 else 's'}."
        if self.nearest:
            message += f" Nearest: {', '.join(repr(name) for name in self.nearest)}."
        super().__init__(f"{message} List them with {hint}." if hint else message)

    __str__ = Exception.__str__  # that of KeyError quotes the message


class UnsupportedLayerError(InspectionError, NotImplementedError):
    """The token gradients of a parameter cannot be computed exactly, so none are given.

    Attributes:
        parameter: The parameter.
        layer: The layer that uses it.
        reason: Why not, and what to do.
    """

    _given = ("parameter", "layer", "reason")

    def __init__(self, parameter: str, layer: str, reason: str) -> None:
        self.parameter, self.layer, self.reason = parameter, layer, reason
        super().__init__(f"No token gradients of {parameter!r} in layer {layer!r}: {reason}")


class NonFiniteError(InspectionError, ArithmeticError):
    """A step has a NaN or infinite loss or gradient; the optimizer has not applied it.

    Attributes:
        finding: What is wrong, where and why.
        step: The number of the step.
        folder: Where the incident was written; None if nowhere.
    """

    _given = ("finding", "step", "folder")

    def __init__(self, finding: Any, step: int, folder: Any = None) -> None:
        self.finding, self.step, self.folder = finding, step, folder
        message = f"{finding.text} {finding.advice}"
        if folder is not None:
            message += f" Written to {str(folder)!r}: `torchfmri replay` runs it again."
        super().__init__(message)


class MissingTokensWarning(RuntimeWarning):
    """A result over several parameters is without some that have no token gradients.

    Examples:
        >>> import torchfmri, warnings
        >>> warnings.simplefilter("error", torchfmri.MissingTokensWarning)  # to stop there
    """


class GuardError(InspectionError):
    """A step could not be checked for NaN and infinity, and on_nonfinite="raise" asks for that.

    Attributes:
        step: The number of the step.
        reason: What failed; also the `__cause__`.
    """

    _given = ("step", "reason")

    def __init__(self, step: int, reason: str) -> None:
        self.step, self.reason = step, reason
        super().__init__(
            f"Step {step} is not applied: it could not be checked for NaN and infinity ({reason})."
            " To train without the check, leave on_nonfinite out."
        )


class FindingWarning(RuntimeWarning):
    """A Monitor in a trainer has found something; the message is the finding in words."""


class NonFiniteWarning(RuntimeWarning):
    """A step had a NaN or infinite loss or gradient; training goes on."""


class MemoryLimitError(InspectionError, MemoryError):
    """Keeping one more tensor would exceed `max_bytes`; nothing beyond it was kept.

    Attributes:
        layer: The layer whose tensor did not fit.
        needed: Bytes of that tensor.
        kept: Bytes kept so far.
        max_bytes: The limit.
        advice: What to do about it.
    """

    _given = ("layer", "needed", "kept", "max_bytes", "advice")

    def __init__(
        self,
        layer: str,
        needed: int,
        kept: int,
        max_bytes: int,
        advice: str = (
            "Watch fewer layers, keep a smaller dtype (dtype=torch.bfloat16), or keep statistics "
            "only (keep='statistics')."
        ),
    ) -> None:
        self.layer, self.needed, self.kept = layer, needed, kept
        self.max_bytes, self.advice = max_bytes, advice
        super().__init__(
            f"Keeping the tensor of layer {layer!r} needs {needed:,} bytes, but {kept:,} of "
            f"max_bytes={max_bytes:,} are in use. {advice}"
        )


class ExplainedError(Exception):
    """A failure of the user's own code or model, raised again with its explanation.

    It is also of the class of the original (an `ExplainedRuntimeError` is a `RuntimeError`), has
    its `args`, and the original as `__cause__`. Its text begins with the original message.

    Attributes:
        explanation: What happened, in which layer, why, and how to cure it.
    """

    explanation: Any = None
    original: ClassVar[type[BaseException]] = Exception

    def __str__(self) -> str:
        message = self.original.__str__(self)
        return message if self.explanation is None else f"{message}\n\n{self.explanation.body()}"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (_rebuild, (self.original, self.args, self.explanation))


def explained_error(original: BaseException, explanation: Any) -> ExplainedError:
    """Return an `ExplainedError` that is also of the class of `original` and has its attributes."""
    error = _rebuild(type(original), original.args, explanation)
    error.__dict__.update(original.__dict__)
    return error


def _rebuild(original: Any, arguments: tuple[Any, ...], explanation: Any) -> ExplainedError:
    cls = _explained_class(original)
    error = cls.__new__(cls, *arguments)
    error.args = arguments
    error.explanation = explanation
    return error


@cache
def _explained_class(original: type[BaseException]) -> type[ExplainedError]:
    return type(
        f"Explained{original.__name__}",
        (ExplainedError, original),
        {"original": original, "__module__": "torchfmri", "__doc__": ExplainedError.__doc__},
    )


class FileFormatError(InspectionError, ValueError):
    """A file or folder was not written by torchfmri, or it is damaged, hostile or too large.

    `ScanFormatError` is another name of it, from the time when only scans were checked.

    Attributes:
        path: The file or folder that was read; relative to a scan or an incident that it is part
            of.
        reason: What is wrong with it.
    """

    _given = ("path", "reason")

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path!r} cannot be read: {reason}")
        self.path, self.reason = path, reason


ScanFormatError = FileFormatError


MEANT_FOR_THE_USER = (NonFiniteError, GuardError, NonFiniteWarning)
"""What a guard raises on purpose, the warning if the user's filter makes it an error."""
