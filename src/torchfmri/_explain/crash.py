"""A traceback read for the layers it went through, the user's line, and tensors.

`entry_points` makes a `Crash`, and the functions that read clues ask it. Frames of a traceback keep
their local variables, so nothing has to be attached to a model before it fails. Because a `Crash`
holds those frames, it lives only while an explanation is written. Paths and function names of
PyTorch (`_call_impl`, `graph.py`) are what tells a module's call from others; they are the part
that a new PyTorch version may break.
"""

from __future__ import annotations

import dis
import linecache
import os
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from torchfmri._model import each_once, named_layers, named_parameters, unwrap

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_LIBRARIES = tuple(
    sorted({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
)
_MODULE_FILE = str(Path("torch", "nn", "modules", "module.py"))
_HOOKS_FILE = str(Path("torch", "utils", "hooks.py"))
_ENGINE_FILES = (str(Path("torch", "autograd", "graph.py")),)
_AUTOGRAD_FILES = (*_ENGINE_FILES, str(Path("torch", "autograd", "__init__.py")))
_RAISE = dis.opmap["RAISE_VARARGS"]
_ABSENT = object()


class SourceLine(NamedTuple):
    """A line of source code.

    Attributes:
        file: The file, as Python knows it.
        number: The line, from 1.
        function: The function it belongs to.
        code: The text of the line; empty if the source is not available.
    """

    file: str
    number: int
    function: str
    code: str


class TracebackStep(NamedTuple):
    """One entry of a traceback: a frame and where it was left."""

    frame: FrameType
    number: int
    instruction: int

    @property
    def file(self) -> str:
        return self.frame.f_code.co_filename

    @property
    def function(self) -> str:
        return self.frame.f_code.co_name

    @property
    def line(self) -> SourceLine:
        code = linecache.getline(self.file, self.number, self.frame.f_globals).strip()
        return SourceLine(self.file, self.number, self.function, code)

    @property
    def of_torch(self) -> bool:
        return is_of_torch(self.file)

    @property
    def of_user(self) -> bool:
        installed = self.file.startswith(_LIBRARIES) or "-packages" in self.file
        return not (self.of_torch or installed or self.file.startswith("<frozen "))

    @property
    def raises(self) -> bool:
        """Whether the frame was left by a `raise` statement rather than by a call."""
        code = self.frame.f_code.co_code
        return 0 <= self.instruction < len(code) and code[self.instruction] == _RAISE


class Crash:
    """An exception, and what its traceback shows.

    Attributes:
        error: The exception.
        message: Its text.
        steps: Its traceback, outermost frame first.
        model: The module that layer names are relative to, if there is one.
    """

    def __init__(self, error: BaseException, model: nn.Module | None = None) -> None:
        self.error = error
        self.message = str(error)
        self.steps = list(_steps(error))
        self.model = self._find_model() if model is None else model

    @cached_property
    def modules(self) -> list[nn.Module]:
        """The modules that were running, outermost first; in a backward pass those it re-ran."""
        start = self._engine_step
        steps = self.steps if start is None else self.steps[start + 1 :]
        found: list[nn.Module] = []
        for module in filter(None, map(_module_of, steps)):
            if not found or found[-1] is not module:
                found.append(module)
        return found

    @property
    def module(self) -> nn.Module | None:
        """The innermost module that was running, without wrappers."""
        return unwrap(self.modules[-1]) if self.modules else None

    @cached_property
    def layers(self) -> dict[str, nn.Module]:
        """All layers of the model, by name."""
        return named_layers(self.model) if self.model is not None else {}

    @cached_property
    def parameters(self) -> dict[int, tuple[str, str]]:
        """The `id` of a parameter -> the layer that owns it, and its name there."""
        found = {}
        for full, parameter in each_once(named_parameters(self.layers)).items():
            layer, _, name = full.rpartition(".")
            found[id(parameter)] = (layer, name)
        return found

    def layer_of(self, module: nn.Module | None) -> str | None:
        """Return the name of a module in the model; None if it is not part of it.

        If an instance has several names, the one under the running modules is used.
        """
        inner = unwrap(module) if module is not None else None
        names = [name for name, each in self.layers.items() if each is inner]
        if len(names) < 2:
            return names[0] if names else None
        above = [unwrap(each) for each in self.modules if unwrap(each) is not inner]
        parents = [name for name, each in self.layers.items() if above and each is above[-1]]
        under = [name for name in names if name.rpartition(".")[0] in parents]
        return (under or names)[0]

    @cached_property
    def phase(self) -> str:
        """What was going on: forward, backward, optimizer step, loading, or an empty string."""
        files = [step.file for step in self.steps]
        if self._engine_step is not None or any(each.endswith(_AUTOGRAD_FILES) for each in files):
            return "backward"
        optimizer = str(Path(_TORCH, "optim"))
        if any(step.function == "step" and step.file.startswith(optimizer) for step in self.steps):
            return "optimizer step"
        if any(step.function == "load_state_dict" and step.of_torch for step in self.steps):
            return "loading"
        called = any(step.function in ("forward", "_call_impl") for step in self.steps)
        return "forward" if self.modules and called else ""

    @property
    def source(self) -> SourceLine | None:
        """The innermost line of the user's own code, or of a library if there is none."""
        own = [step for step in self.steps if step.of_user]
        rest = [step for step in self.steps if not step.of_torch]
        return (own or rest)[-1].line if own or rest else None

    @property
    def operation(self) -> SourceLine | None:
        """The library line, called by the user's code, that failed; None if there is none.

        PyTorch's own files do not count.
        """
        rest = [step for step in self.steps if not step.of_torch]
        return rest[-1].line if rest and not rest[-1].of_user and self.source else None

    @property
    def raised_by_others(self) -> bool:
        """Whether a `raise` outside PyTorch made it, so that its words are not PyTorch's."""
        return bool(self.steps) and self.steps[-1].raises and not self.steps[-1].of_torch

    @cached_property
    def hook(self) -> tuple[SourceLine, nn.Module | None] | None:
        """The user's hook that raised the exception, and the module it is attached to.

        A hook on a tensor or parameter belongs to no module.
        """
        for index in range(len(self.steps) - 1, 0, -1):
            caller, step = self.steps[index - 1], self.steps[index]
            if step.of_torch:
                continue
            module = _calls_hook(caller)
            if module is not _ABSENT:
                return step.line, module if isinstance(module, nn.Module) else None
            if caller.file.endswith(_ENGINE_FILES):
                return step.line, None
        return None

    def inputs(self) -> dict[str, Tensor]:
        """Return the tensors that the innermost module was called with, by name or number."""
        given = self.arguments().items()
        return {name: each for name, each in given if isinstance(each, Tensor)}

    def arguments(self) -> dict[str, Any]:
        """Return what the innermost module was called with, by name or number."""
        for step in reversed(self.steps):
            called = step.file.endswith(_MODULE_FILE) and step.function == "_call_impl"
            if called and unwrap(step.frame.f_locals["self"]) is self.module:
                given = step.frame.f_locals
                values = {str(i): each for i, each in enumerate(given.get("args", ()))}
                return {**values, **given.get("kwargs", {})}
        return {}

    def local(self, name: str, function: str = "") -> Any:
        """Return a local variable of PyTorch's innermost frame that has it, or None.

        Args:
            name: The name of the variable.
            function: Look only in frames of this function.
        """
        for step in reversed(self.steps):
            if not step.of_torch or function not in ("", step.function):
                continue
            if name in step.frame.f_locals:
                return step.frame.f_locals[name]
        return None

    def roots(self) -> list[Tensor]:
        """Return the tensors whose backward pass failed."""
        for function, name in (
            ("_engine_run_backward", "t_outputs"),
            ("backward", "tensors"),
            ("grad", "outputs"),
        ):
            found = self.local(name, function)
            found = [found] if isinstance(found, Tensor) else found
            if isinstance(found, (list, tuple)):
                return [each for each in found if isinstance(each, Tensor)]
        return []

    @cached_property
    def _engine_step(self) -> int | None:
        """The place where the traceback enters the backward pass."""
        inside = [i for i, step in enumerate(self.steps) if step.file.endswith(_ENGINE_FILES)]
        return inside[-1] if inside else None

    @property
    def known_modules(self) -> list[nn.Module]:
        """The modules among the variables of the user's code."""
        return [
            value
            for step in self.steps
            if step.of_user
            for value in _variables(step.frame)
            if _is_module(value)
        ]

    def _find_model(self) -> nn.Module | None:
        """Return the outermost running module, or the only model among the user's variables."""
        running = [module for module in map(_module_of, self.steps) if module is not None]
        known = self.known_modules
        if running:
            around = [each for each in known if any(sub is running[0] for sub in each.modules())]
            return max([*around, running[0]], key=lambda each: len(list(each.modules())))
        distinct = {id(each): each for each in known}.values()
        inside = {id(sub) for each in distinct for sub in each.modules() if sub is not each}
        roots = [
            each
            for each in distinct
            if id(each) not in inside and any(True for _ in each.parameters())
        ]
        return roots[0] if len(roots) == 1 else None


def is_of_torch(file: str) -> bool:
    """Return whether a file belongs to PyTorch or torchfmri, or was generated by them."""
    return file.startswith((_TORCH + os.sep, _OURS + os.sep, "<eval_with_key>"))


def describe(tensor: Tensor) -> str:
    """Return shape, dtype and device of a tensor, such as `(3, 4) float32 cpu`."""
    shape = ", ".join(map(str, tensor.shape)) + ("," if tensor.dim() == 1 else "")
    return f"({shape}) {str(tensor.dtype).removeprefix('torch.')} {tensor.device}"


def _steps(error: BaseException) -> Iterator[TracebackStep]:
    entry = error.__traceback__
    while entry is not None:
        yield TracebackStep(entry.tb_frame, entry.tb_lineno, entry.tb_lasti)
        entry = entry.tb_next


def _variables(frame: FrameType) -> list[Any]:
    """Return a frame's local variables, and the global ones that its code names."""
    named = [frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals]
    return [*frame.f_locals.values(), *named]


def _module_of(step: TracebackStep) -> nn.Module | None:
    """Return the module whose method a frame runs; an unfinished one does not count."""
    value = step.frame.f_locals.get("self")
    return value if _is_module(value) and step.function != "__init__" else None


def _is_module(value: Any) -> TypeGuard[nn.Module]:
    # Compare types, because isinstance would also accept proxies for something else.
    return issubclass(type(value), nn.Module) and "_modules" in value.__dict__


def _calls_hook(step: TracebackStep) -> Any:
    """Return the module whose hook this frame called (None: unknown), or _ABSENT.

    The source line tells which call it was, because forward is called from there too.
    """
    if "hook(" not in step.line.code:
        return _ABSENT
    value = step.frame.f_locals.get("self")
    if step.file.endswith(_MODULE_FILE):
        return value
    return getattr(value, "module", None) if step.file.endswith(_HOOKS_FILE) else _ABSENT
