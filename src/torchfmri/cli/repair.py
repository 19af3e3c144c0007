"""The command `torchfmri repair`: bring back what a damaged manifest no longer lists.

`run` calls `repair` of `_scan`, reads the scan again and says what is still wrong. Nothing is
deleted. The exit code is 1 as long as something cannot be read. Options, the keys of `--json` and
the exit code are public.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from torchfmri._scan import load, repair
from torchfmri._text import plural
from torchfmri.cli.options import CommandOptions, Result


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri repair`."""
    parser.argument("folder", type=Path, help="a scan: NAME.fmri")


def run(options: Namespace) -> Result:
    """Repair the scan, and return what was done as data, as text, and as an exit code."""
    done = repair(options.folder)
    scan = load(options.folder)
    left = scan.verify()
    lines = [
        f"added {name}: {plural(len(names), 'sequence')} ({', '.join(map(repr, names[:5]))}"
        f"{', ...' if len(names) > 5 else ''})"
        for name, names in done.added.items()
    ]
    lines += [f"set aside {name}: its sequences are all there already" for name in done.spare]
    lines += [f"wrote {name} anew, and kept the old one as .damaged" for name in done.rewritten]
    lines += [f"cannot be added: {name}: {reason}" for name, reason in done.lost.items()]
    lines += [f"left: {problem}" for problem in left]
    found = f"{options.folder}: {plural(len(scan), 'sequence')}, {plural(len(left), 'problem')}"
    data = {
        "added": {name: list(names) for name, names in done.added.items()},
        "spare": list(done.spare),
        "rewritten": list(done.rewritten),
        "lost": done.lost,
        "sequences": len(scan),
        "problems": list(left),
    }
    return data, "\n".join([*lines, found]), 1 if left else 0
