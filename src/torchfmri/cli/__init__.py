"""The command line: `torchfmri <command>`."""

from torchfmri.cli.commands import (
    CLEAN,
    COMMANDS,
    FAILED,
    FOUND,
    INTERRUPTED,
    Command,
    build_parser,
    main,
)

__all__ = ["CLEAN", "COMMANDS", "FAILED", "FOUND", "INTERRUPTED", "Command", "build_parser", "main"]
