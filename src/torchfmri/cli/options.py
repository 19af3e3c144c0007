"""Options in one wording, and what all commands do alike: talk to the user, run the user's code.

Every command builds its options with these functions, so that an option that two commands share has
one name, one meaning and one help text. Progress goes through `say`: standard output is for
results. Names and defaults of options are public; help texts may change freely.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchfmri._model import CHOICES, FORM, Subject, load_subject
from torchfmri.exceptions import InspectionError

Result = tuple[dict[str, Any], str, int]
"""What a command returns: its result as data (for --json) and as text, and the exit code."""
LOG_SECONDS = 30.0
"""How often a long command writes a line where no terminal shows its progress bar."""
_DTYPES = ("float32", "bfloat16", "float16", "float64")
Options = Any
"""A parser, or a group of its options, which argparse keeps private."""


def add_model(parser: Options) -> None:
    """Add `--model`."""
    parser.add_argument("--model", default="tiny", help=f"{CHOICES} (default: %(default)s)")


def add_subject(parser: Options) -> None:
    """Add the function that makes what the command looks at."""
    parser.add_argument(
        "subject", metavar="MODULE:FACTORY", help=f"{FORM}, which returns (model, data, loss)"
    )


def add_device(parser: Options, *, dtype: bool = False) -> None:
    """Add `--device`, and `--dtype` if the model may be loaded in another one."""
    if dtype:
        text = "dtype to load the model in (default: that of its files; float32 for named models)"
        add_choice(parser, "--dtype", _DTYPES, text)
    parser.add_argument("--device", help="device to run on, such as cuda (default: the model's)")


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the dtype that `--dtype` names."""
    return getattr(torch, name) if name else None


def add_switch(parser: Options, flag: str, text: str) -> None:
    """Add an option that is off unless it is given."""
    parser.add_argument(flag, action="store_true", help=text)


def add_text(parser: Options, flag: str, text: str, name: str = "TEXT", **settings: Any) -> None:
    """Add an option with a text; `name` stands for it in the help."""
    parser.add_argument(flag, metavar=name, help=text, **settings)


def add_path(parser: Options, flag: str, text: str, name: str = "FILE", **settings: Any) -> None:
    """Add an option with a file or a folder."""
    parser.add_argument(flag, type=Path, metavar=name, help=text, **settings)


def add_number(parser: Options, flag: str, default: int | None, text: str, name: str = "N") -> None:
    """Add an option with a whole number; the help names its default."""
    said = text if default is None else f"{text} (default: %(default)s)"
    parser.add_argument(flag, type=int, default=default, metavar=name, help=said)


def add_choice(
    parser: Options, flag: str, choices: Iterable[str], text: str, default: str | None = None
) -> None:
    """Add an option with one of several words; the help names its default."""
    said = text if default is None else f"{text} (default: %(default)s)"
    parser.add_argument(flag, choices=tuple(choices), default=default, help=said)


def add_several(parser: Options, flag: str, text: str, name: str = "PATTERN", **more: Any) -> None:
    """Add an option that may be repeated."""
    parser.add_argument(
        flag, action="append", metavar=name, help=f"{text}; may be repeated", **more
    )


def say(command: str, text: str) -> None:
    """Tell the user on standard error how far a command is; of several processes the first does."""
    if os.environ.get("RANK", "0") == "0":
        print(f"torchfmri {command}: {text}", file=sys.stderr, flush=True)


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Report an error of the user's own code as one of the command: nothing was found out.

    Args:
        what: Whose error it is: "The model", "The training".
    """
    try:
        yield
    except InspectionError:
        raise
    except Exception as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        raise InspectionError(f"{what} raised {type(error).__name__}: {error}{notes}") from error


def subject_of(spec: str, needs_data: bool = True) -> Subject:
    """Return what the user's function made, as `load_subject`; an error in it is no finding."""
    with users_code(repr(spec)):
        return load_subject(spec, needs_data)
