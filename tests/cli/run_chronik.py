"""Runs the real `chronik` command, as a user's shell would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

CHRONIK = Path(sys.executable).with_name("chronik")


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """The one JSON object on standard output."""
        assert self.code == 0, self.err
        parsed = json.loads(self.out)
        assert isinstance(parsed, dict)
        return parsed

    @property
    def error_line(self) -> str:
        """The one line that an error may take."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("chronik: ")
        return lines[0]


def chronik(*arguments: str, stdin: str = "", timeout_s: float = 60.0, cwd: Path | None = None) -> Outcome:
    done = subprocess.run(
        [str(CHRONIK), *arguments], input=stdin, capture_output=True, text=True, timeout=timeout_s, cwd=cwd, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
