"""How a command fails: one line on standard error that states what to do, and an exit code.

Exit 2: the command could not run (wrong usage, a port in use, an unreachable broker). Exit 1: it ran, and a check
failed.
"""

from __future__ import annotations

import sys

CANNOT = 2
CHECK_FAILED = 1
INTERRUPTED = 130


class CliError(Exception):
    """What a command shows its user instead of a traceback."""

    def __init__(self, message: str, exit_code: int = CANNOT) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def say(message: str) -> None:
    """Print one line on standard error; replace newlines, since users are promised one line."""
    print(f"chronik: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Escape what could control a terminal or forge a line: clients choose the names of groups and transactions."""
    return "".join(each if each.isprintable() or each == " " else ascii(each)[1:-1] for each in text)
