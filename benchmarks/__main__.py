"""Command line of the benchmarks: one subcommand per subject."""

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

import benchmarks


def subjects() -> list[str]:
    """Names of the subjects: every module of the package that does not start with `_`."""
    names = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name for name in names if not name.startswith("_"))


def build_parser() -> argparse.ArgumentParser:
    """The parser with one subcommand per subject, each described by its module's first line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    commands = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for name in subjects():
        module = importlib.import_module(f"benchmarks.{name}")
        summary = (module.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        command.add_argument(
            "--json", action="store_true", help="print one JSON object instead of a table"
        )
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    return parser


def format_table(result: dict[str, Any]) -> str:
    """The figures of a result as text: name, value, 95 % interval; then everything else."""
    intervals = result.get("intervals", {})
    figures = {
        name: value
        for name, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    width = max([len(name) for name in figures], default=0)
    lines = []
    for name, value in figures.items():
        interval = intervals.get(name)
        bounds = f"   95 % [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
        lines.append(f"{name:<{width}}  {value:8.3f}{bounds}")
    for name, value in result.items():
        if name in figures or name == "intervals" or not value:
            continue
        lines.append(f"\n{name}")
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        lines.extend(f"  {key}: {entry}" for key, entry in entries)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subject and print its result; returns the exit code."""
    options = build_parser().parse_args(arguments)
    result = options.main(options)
    print(json.dumps(result, indent=2) if options.json else format_table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
