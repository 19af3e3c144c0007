"""What a command works on: a model, its data and its loss, made by a function of the user's.

The commands of `cli/` call `load_subject`; `named_models` takes models from such functions too. A
file is imported under a name of its own, since a module of its name may be loaded already, and its
folder goes onto `sys.path`, as for a script. What the user's own code raises passes through as it
is. Only a wrong name, or a wrong thing returned, becomes an InspectionError. Words may change
freely; the forms of a name (`FORM`) are public.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from torchfmri._arguments import few
from torchfmri.exceptions import InspectionError

FORM = "package.module:factory or path/to/file.py:factory"
_MOST_NAMES = 5
# Where models of other packages keep an example of their own data.
_OWN_EXAMPLES = ("example_input_array", "dummy_inputs")


class Subject(NamedTuple):
    """A model, what to run it on, and what to differentiate.

    Attributes:
        model: The model.
        data: A tensor, a tuple of positional arguments or a dict of keyword arguments.
        loss: A function of the model's output; None if the output is or has its own loss.
    """

    model: nn.Module
    data: Any
    loss: Any = None


def load_subject(spec: str, needs_data: bool = True) -> Subject:
    """Return what a function makes, named `package.module:factory` or `file.py:factory`.

    The function is called without arguments and returns `(model, data, loss)`, `(model, data)`, or
    a model that carries its own example (`example_input_array` of Lightning, `dummy_inputs` of
    transformers). As for a script, the folder of the file (for a module: the current folder) is on
    `sys.path` from then on. What the user's own code raises passes through. Where no data is
    needed, it may be None or left out.

    Raises:
        InspectionError: There is no such file, module or function, or it returns something else.
    """
    return _subject_of(find_factory(spec)(), spec, needs_data)


def find_factory(spec: str) -> Callable[[], Any]:
    """Return the function named by `spec`, not called yet; as for `load_subject`."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise InspectionError(f"{spec!r} names no function. Write {FORM}.")
    is_file = place.endswith(".py") or Path(place).is_file()
    module = _load_file(Path(place)) if is_file else _load_module(place)
    return _function_of(module, name, place)


def _load_file(path: Path) -> ModuleType:
    """Return the module that a file of the user's makes when it is run."""
    if not path.is_file():
        raise InspectionError(f"There is no file {str(path)!r} here. Write {FORM}.")
    path = path.resolve()
    _make_importable(path.parent)
    # A name of its own: the file may be called like a module that is already imported.
    name = f"_torchfmri_subject_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InspectionError(f"{path.name!r} is not a Python file. Write {FORM}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise InspectionError(f"{name!r} is neither a module nor a .py file. Write {FORM}.")
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only if it is the module itself that is absent, not something that it imports.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InspectionError(
                f"There is no module {error.name!r}. Modules are looked for in the current folder "
                f"and among the installed packages; a file is written path/to/file.py:factory."
            ) from error
        raise


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _function_of(module: ModuleType, name: str, place: str) -> Callable[[], Any]:
    found: Callable[[], Any] | None = getattr(module, name, None)
    if callable(found) and not isinstance(found, nn.Module):
        return found
    if found is not None:
        raise InspectionError(
            f"{name!r} in {place} is a {type(found).__name__}, not a function. Write a function "
            f"without arguments that returns it."
        )
    own = [
        each
        for each, value in vars(module).items()
        if callable(value)
        and not each.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    ]
    near = get_close_matches(name, own, 3, 0.5)
    names = [*near, *(each for each in own if each not in near)]
    said = few(map(repr, names), _MOST_NAMES)
    there = f" It has {said}." if names else " It defines no function."
    raise InspectionError(f"There is no {name!r} in {place}.{there}")


def _subject_of(made: Any, spec: str, needs_data: bool) -> Subject:
    """Return the parts of what the user's function made, or raise with what it should make."""
    parts = (made,) if isinstance(made, nn.Module) else made
    if not isinstance(parts, tuple) or not parts or not isinstance(parts[0], nn.Module):
        raise InspectionError(
            f"{spec} returned {kinds_of(made)}. It should return (model, data, loss), "
            "(model, data), or a model that carries its own example."
        )
    if len(parts) > 3:
        raise InspectionError(
            f"{spec} returned {len(parts)} things. It should return (model, data, loss): several "
            "positional arguments of the model belong in one tuple."
        )
    model = parts[0]
    own = (getattr(model, name, None) for name in _OWN_EXAMPLES)
    data = parts[1] if len(parts) > 1 else next((each for each in own if each is not None), None)
    if data is None and needs_data:
        raise InspectionError(
            f"{spec} returned a {type(model).__name__} without data to run it on. Return "
            "(model, data), with data a tensor, a tuple of arguments or a dict of keywords."
        )
    return Subject(model, data, parts[2] if len(parts) > 2 else None)


def kinds_of(made: object) -> str:
    """Return the class of what a function returned; for a tuple, the classes of its parts."""
    if not isinstance(made, tuple):
        return type(made).__name__
    return f"({', '.join(type(each).__name__ for each in made)})"
