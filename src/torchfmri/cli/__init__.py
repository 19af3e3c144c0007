"""The command line: `torchfmri <command>`, one file per command.

`commands` holds the table `COMMANDS`, the parser and `main`. A new subcommand is a file here with
`add_arguments` and `run`, an entry in that table, and a line in `docs/index.md`.
"""

from torchfmri.cli.commands import CLEAN, COMMANDS, Command, build_parser, main
from torchfmri.cli.options import CommandOptions, Result
