"""The command line: `torchfmri <command>`.

`main` is the entry point of the package. Results go to standard output, progress to standard error.
Exit codes are public: 0 nothing to report, 1 something was found, 2 it could not be done. A command
is a module with `add_arguments`, which adds to its `CommandOptions`, and `run`, which returns its
result as data (for --json), as text, and the exit code. `_TEXTS` has its line of help. An error of
the user is one line without a traceback; anything else is a bug and comes through.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from torchfmri import __version__
from torchfmri._files import finite_json
from torchfmri._text import printable, terminal_text
from torchfmri.cli import (
    advise,
    chat,
    compare,
    contrast,
    cost,
    demo,
    diagnose,
    lens,
    lesion,
    repair,
    replay,
    routing,
    scan,
    verify,
    view,
)
from torchfmri.cli.options import CommandOptions, Result
from torchfmri.exceptions import InspectionError
from torchfmri.visualization import check_picture

CLEAN, FOUND, FAILED, INTERRUPTED = 0, 1, 2, 130


class Command(NamedTuple):
    """A subcommand: its name, its line in `--help`, its options, and what runs it."""

    name: str
    help: str
    add_arguments: Callable[[CommandOptions], None]
    run: Callable[[argparse.Namespace], Result]


_TEXTS = {
    demo: "scan a real language model while it answers: a table, a picture and a page",
    scan: "watch a language model while it answers: every token, every layer, exact gradients",
    contrast: "compare the conditions of a scan: what differs, with a test over prompts",
    lesion: "remove each head and MLP in turn, and map how the answers change",
    lens: "show what each layer would predict next, and which heads, MLPs and tokens made a logit",
    view: "show a scan, two scans, or a training run in a browser",
    chat: "type a prompt into a page and watch the model answer, layer by layer",
    cost: "count the FLOPs, bytes and seconds of every layer, and how they grow",
    advise: "try what may save memory or time, and report what it saves",
    verify: "prove that the backward pass of every layer is right, or name the first that is not",
    diagnose: "train a copy for some steps, and say what is wrong, where, why, and what to do",
    compare: "say where two settings, recordings or training runs differ, and if that is rounding",
    replay: "rerun a step that turned NaN, and name its sample, layer, operation and line",
    repair: "bring back sequences that a damaged manifest no longer lists; nothing is deleted",
    routing: "train sparse routing from token gradients, and compare what it learns from",
}
COMMANDS = tuple(
    Command(module.__name__.rpartition(".")[2], text, module.add_arguments, module.run)
    for module, text in _TEXTS.items()
)


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(FAILED)


def build_parser(commands: Sequence[Command] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser for all commands."""
    parser = _Parser(
        prog="torchfmri",
        description="A digital fMRI for PyTorch models.",
        epilog="Exit codes: 0 nothing to report, 1 something was found, 2 it could not be done.",
    )
    parser.add_argument("--version", action="version", version=f"torchfmri {__version__}")
    chosen = parser.add_subparsers(dest="command", metavar="command", parser_class=_Parser)
    for command in commands:
        each = chosen.add_parser(command.name, help=command.help, description=command.help)
        each.add_argument("--json", action="store_true", help="print the result as JSON")
        command.add_arguments(CommandOptions(each))
        each.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: Instead of those of the process.
        commands: What can be run.
    """
    parser = build_parser(commands)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return CLEAN
    try:
        _check_pictures(options)
        data, text, code = options.run(options)
        if data or text:  # of several processes only the first has something to say
            as_json = (
                json.dumps(finite_json(data), indent=2, allow_nan=False) if options.json else ""
            )
            print(as_json or terminal_text(text))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone, as in `torchfmri demo | head`; nothing is left to be flushed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLEAN
    except KeyboardInterrupt:
        print(f"torchfmri {options.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (InspectionError, ImportError, OSError, ValueError) as error:
        message = printable(" ".join(str(error).split())) or type(error).__name__
        print(f"torchfmri {options.command}: error: {message}", file=sys.stderr)
        return FAILED
    return int(code)


def _check_pictures(options: argparse.Namespace) -> None:
    """Refuse a picture that cannot be drawn before a command works for minutes."""
    for name in ("picture", "plot"):
        if path := getattr(options, name, None):
            check_picture(f"--{name}", Path(path))
