"""A small program on franz-go's kadm, which kminion, kcl, rpk and Redpanda Console use for lag, offsets and sizes."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.clients.drivers.java import TOOLS

PROGRAM = TOOLS / "kadm"
TIMEOUT_S = 30.0


def missing() -> str | None:
    """Return why kadm cannot run here, or None if it can."""
    return None if PROGRAM.is_file() else "kadm's program is not in .tools: make test builds it where there is Go"


def ask(bootstrap: str, group: str, topic: str) -> dict[str, Any]:
    command = [str(PROGRAM), bootstrap, group, topic]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer
