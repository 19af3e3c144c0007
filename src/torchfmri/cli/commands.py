"""The command line: `torchfmri <command>`.

Results go to standard output, progress to standard error. Exit codes: 0 nothing to report, 1
something was found, 2 it could not be done.

A command is one entry of `COMMANDS`: its name, a line of help, a function that adds its options to
a parser, and one that runs it and returns its result as data (for --json), as text, and the code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from torchfmri import __version__
from torchfmri._files import finite_json
from torchfmri._text import printable, terminal_text
from torchfmri.cli import (
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
from torchfmri.exceptions import InspectionError

Result = tuple[dict[str, Any], str, int]

CLEAN, FOUND, FAILED, INTERRUPTED = 0, 1, 2, 130


class Command(NamedTuple):
    """A subcommand: its name, its line in `--help`, its options, and what runs it."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Result]


COMMANDS = (
    Command(
        "demo",
        "scan a real language model while it answers: a table, a picture and a page",
        demo.add_arguments,
        demo.run,
    ),
    Command(
        "scan",
        "watch a language model while it answers: every token, every layer, exact gradients",
        scan.add_arguments,
        scan.run,
    ),
    Command(
        "contrast",
        "compare the conditions of a scan: what differs, with a test over prompts",
        contrast.add_arguments,
        contrast.run,
    ),
    Command(
        "lesion",
        "take every head and MLP out in turn, and map what becomes of the answers",
        lesion.add_arguments,
        lesion.run,
    ),
    Command(
        "lens",
        "what each layer would say next, and which heads, MLPs and input tokens made a logit",
        lens.add_arguments,
        lens.run,
    ),
    Command(
        "view",
        "look at a scan, at two, or at a training run in a browser",
        view.add_arguments,
        view.run,
    ),
    Command(
        "chat",
        "type a prompt into a page and watch the model answer, layer by layer",
        chat.add_arguments,
        chat.run,
    ),
    Command(
        "cost",
        "price every layer: FLOPs, bytes, seconds, and how they grow",
        cost.add_cost_arguments,
        cost.run_cost,
    ),
    Command(
        "advise",
        "try what may save memory or time, and report what it brought",
        cost.add_advise_arguments,
        cost.run_advise,
    ),
    Command(
        "verify",
        "prove that the backward pass of every layer is right, or name the first that is not",
        verify.add_arguments,
        verify.run,
    ),
    Command(
        "diagnose",
        "train a copy for some steps, and say what is wrong, where, why and what to do",
        diagnose.add_arguments,
        diagnose.run,
    ),
    Command(
        "compare",
        "say where two settings, recordings or training runs part, and whether that is rounding",
        compare.add_arguments,
        compare.run,
    ),
    Command(
        "replay",
        "run a step again that turned NaN, and name sample, layer, operation and line",
        replay.add_arguments,
        replay.run,
    ),
    Command(
        "repair",
        "add what a lost or damaged manifest of a scan no longer names; nothing is deleted",
        repair.add_arguments,
        repair.run,
    ),
    Command(
        "routing",
        "train sparse routing from token gradients, and compare what it learns from",
        routing.add_arguments,
        routing.run,
    ),
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(FAILED)


def build_parser(commands: Sequence[Command] = COMMANDS) -> argparse.ArgumentParser:
    """The parser for all commands."""
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
        command.add_arguments(each)
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
