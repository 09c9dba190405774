"""How a command fails: one line on standard error that says what to do, and an exit code.

Exit 2: it could not be done (wrong use, a port in use, a broker out of reach). Exit 1: it was done, and a check failed.
"""

from __future__ import annotations

import sys

CANNOT = 2
CHECK_FAILED = 1
INTERRUPTED = 130


class CliError(Exception):
    """What a command tells its user instead of a traceback."""

    def __init__(self, message: str, exit_code: int = CANNOT) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def say(message: str) -> None:
    """One line on standard error; newlines inside would break the promise of one line."""
    print(f"chronik: {' '.join(message.split())}", file=sys.stderr, flush=True)
