"""Options in one wording, and what all commands do alike: talk to the user, run the user's code.

Every command adds its options to the `CommandOptions` that it is handed, so that an option that two
commands share has one name, one meaning and one help text. Progress goes through `say`: standard
output is for results. Names and defaults of options are public; help texts may change freely.
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


class CommandOptions:
    """The options of a command, or of a group of them.

    Args:
        parser: A parser of argparse, or one of its groups, which argparse keeps private.
    """

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self.argument = parser.add_argument

    def group(self, title: str) -> CommandOptions:
        """Return a group of options, with a heading in the help."""
        return CommandOptions(self._parser.add_argument_group(title))

    def one_of(self) -> CommandOptions:
        """Return a group of options of which exactly one must be given."""
        return CommandOptions(self._parser.add_mutually_exclusive_group(required=True))

    def model(self) -> None:
        """Add `--model`."""
        self.argument("--model", default="tiny", help=f"{CHOICES} (default: %(default)s)")

    def subject(self) -> None:
        """Add the function that makes what the command looks at."""
        self.text("subject", f"{FORM}, which returns (model, data, loss)", "MODULE:FACTORY")

    def device(self, *, dtype: bool = False) -> None:
        """Add `--device`, and `--dtype` if the model may be loaded in another one."""
        if dtype:
            text = (
                "dtype to load the model in (default: that of its files; float32 for named models)"
            )
            self.choice("--dtype", _DTYPES, text)
        self.argument("--device", help="device to run on, such as cuda (default: the model's)")

    def switch(self, flag: str, text: str) -> None:
        """Add an option that is off unless it is given."""
        self.argument(flag, action="store_true", help=text)

    def text(self, flag: str, text: str, name: str = "TEXT", **settings: Any) -> None:
        """Add an option with a text; `name` stands for it in the help."""
        self.argument(flag, metavar=name, help=text, **settings)

    def path(self, flag: str, text: str, name: str = "FILE", **settings: Any) -> None:
        """Add an option with a file or a folder."""
        self.text(flag, text, name, type=Path, **settings)

    def number(self, flag: str, default: int | None, text: str, name: str = "N") -> None:
        """Add an option with a whole number; the help names its default."""
        self.text(flag, _with_default(text, default), name, type=int, default=default)

    def choice(
        self, flag: str, choices: Iterable[str], text: str, default: str | None = None
    ) -> None:
        """Add an option with one of several words; the help names its default."""
        said = _with_default(text, default)
        self.argument(flag, choices=tuple(choices), default=default, help=said)

    def several(self, flag: str, text: str, name: str = "PATTERN", **settings: Any) -> None:
        """Add an option that may be repeated."""
        self.text(flag, f"{text}; may be repeated", name, action="append", **settings)


def _with_default(text: str, default: object) -> str:
    return text if default is None else f"{text} (default: %(default)s)"


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the dtype that `--dtype` names."""
    return getattr(torch, name) if name else None


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
