"""Checks of arguments, each of which raises with the value and what to give instead.

Public functions check their arguments here, before they touch the model. A new check calls
`require`, so that all messages read `name=value: what to give instead`. A value is shown in a few
words, since a tensor or a model would fill the screen. tests/_arguments/bad_calls.py has the bad
calls that must end this way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri.exceptions import InspectionError


def require(condition: bool, name: str, value: object, meaning: str) -> None:
    """Raise unless a condition holds for an argument.

    Args:
        condition: What must hold.
        name: The name of the argument.
        value: What was given.
        meaning: What to give instead.

    Raises:
        InspectionError: It does not hold.
    """
    if not condition:
        raise InspectionError(f"{name}={shown(value)}: {meaning}.")


def is_whole(value: object) -> bool:
    """Whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_list(value: object) -> bool:
    """Whether a value is a sequence other than a text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def check_number(name: str, value: Any, least: int | None, meaning: str) -> None:
    """Raise if an argument is not a whole number, too small, or beyond 64 bits."""
    lowest = -(2**63) if least is None else least
    require(is_whole(value) and lowest <= value < 2**63, name, value, meaning)


def check_real(name: str, value: Any, meaning: str, least: float = -math.inf) -> None:
    """Raise if an argument is not a number, NaN, or too small."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(number and value >= least, name, value, meaning)


def check_flag(name: str, value: Any) -> None:
    """Raise if an argument is neither True nor False."""
    require(isinstance(value, bool), name, value, "choose True or False")


def check_callable(name: str, value: Any, meaning: str) -> None:
    """Raise if an argument cannot be called; None may be left out."""
    require(value is None or callable(value), name, value, meaning)


def check_module(name: str, value: Any) -> None:
    """Raise if an argument is not a model."""
    meaning = f"give a model: an nn.Module, not {type(value).__name__}"
    if isinstance(value, type):
        meaning += ": its instance, not its class"
    require(isinstance(value, nn.Module), name, value, meaning)


def check_tensor(name: str, value: Any, meaning: str) -> None:
    """Raise if an argument is not a tensor."""
    require(isinstance(value, Tensor), name, value, f"give a tensor, {meaning}")


def check_scalar(loss: Any) -> Tensor:
    """Return the loss, which is a tensor that holds one real number.

    Raises:
        InspectionError: It holds several, is complex, or is not a tensor.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise InspectionError(f"The loss must be one number, but it is {found}. Take its mean().")
    if loss.is_complex():
        raise InspectionError(f"The loss must be a real number, but it is {loss.dtype}.")
    return loss


def check_scaler(scaler: Any) -> None:
    """Raise if an argument is neither None nor works like a `torch.amp.GradScaler`."""
    methods = ("scale", "unscale_", "step", "update", "get_scale")
    works = scaler is None or all(callable(getattr(scaler, name, None)) for name in methods)
    meaning = "give torch.amp.GradScaler(...), or leave it out"
    require(works, "scaler", scaler, meaning)


def check_device(name: str, value: Any) -> torch.device:
    """Return the device that an argument names, once a tensor fits there.

    Raises:
        InspectionError: PyTorch knows no such device, or this machine has none.
    """
    try:
        place = torch.device(value)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        there = ", ".join(["cpu", *(f"cuda:{each}" for each in range(count))])
        reason = shorten(str(error), 200, placeholder=" ...").rstrip(".")
        raise InspectionError(
            f"{name}={str(value)!r} cannot be used: {reason}. Here are {there}; choose one of them."
        ) from error
    return place


def check_path(name: str, value: Any) -> Path:
    """Return an argument as a path.

    Raises:
        InspectionError: It is not a path.
    """
    meaning = "give the path of a file or folder, a text or a Path"
    require(isinstance(value, (str, os.PathLike)) and value != "", name, value, meaning)
    found = os.fspath(value)
    require(isinstance(found, str), name, value, meaning)
    try:
        encoded = os.fsencode(found)
    except UnicodeEncodeError:
        encoded = b"\0"  # half a character, which no name has either
    meaning = "no file can have this name; give another one, without special characters"
    require(b"\0" not in encoded, name, value, meaning)
    longest = max(map(len, encoded.split(os.fsencode(os.sep))))
    meaning = f"a part of it has {longest:,} bytes, and file systems allow 255; give a shorter one"
    require(longest <= 255, name, value, meaning)
    return Path(found)


def check_target(name: str, value: Any) -> Path:
    """Return the path of a file or folder that can be made, with the folders above it.

    Raises:
        InspectionError: It is not a path, or lies in something that is not a folder.
    """
    path = check_path(name, value)
    above = next((each for each in path.absolute().parents if os.path.lexists(each)), path)
    require(above.is_dir(), name, value, f"{str(above)!r} is not a folder; choose another place")
    return path


def check_folder(name: str, value: Any) -> Path:
    """Return the path of a folder that exists or can be made.

    Raises:
        InspectionError: It is not a path, or something else is there.
    """
    path = check_target(name, value)
    free = path.is_dir() or not os.path.lexists(path)
    require(free, name, value, "that is a file; name a folder")
    return path


def check_file(name: str, value: Any) -> Path:
    """Return the path of a file that can be written.

    Raises:
        InspectionError: It is not a path, a folder, or in a folder that does not exist.
    """
    path = check_path(name, value)
    require(not path.is_dir(), name, value, "that is a folder; name a file in it")
    missing = f"there is no folder {str(path.parent)!r}; make it first"
    require(path.parent.is_dir(), name, value, missing)
    return path


def check_each(name: str, value: Any, known: Sequence[str], meaning: str) -> tuple[str, ...]:
    """Return the names that an argument lists, one or several, all of them known.

    Raises:
        InspectionError: It lists none, or others.
    """
    several = (value,) if isinstance(value, str) else value
    listed = isinstance(several, (list, tuple, set, frozenset)) and bool(several)
    meaning = f"{meaning}: {', '.join(map(repr, known))}"
    require(listed and all(each in known for each in several), name, value, meaning)
    return tuple(several)


def shown(value: object) -> str:
    """Return a value as a message shows it, in a few words."""
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)} and {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"<{type(value).__name__}>"


def few(texts: Iterable[str], most: int = 3) -> str:
    """Return texts with commas between them: the first `most`, and how many more there are.

    Examples:
        >>> few(["a", "b", "c"], 3), few("abcde", 3)
        ('a, b, c', 'a, b, c and 2 more')
    """
    named = list(texts)
    more = f" and {len(named) - most} more" if len(named) > most else ""
    return ", ".join(named[:most]) + more
