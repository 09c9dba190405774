"""franz-go's kadm, by which kminion, kcl, rpk and Redpanda Console tell lag, offsets and sizes: a program of a page."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.clients.drivers.java import TOOLS

PROGRAM = TOOLS / "kadm"
TIMEOUT_S = 30.0


def missing() -> str | None:
    """Why there can be none here; None where there can."""
    return None if PROGRAM.is_file() else "kadm's program is not in .tools: make test builds it where there is Go"


def ask(bootstrap: str, group: str, topic: str) -> dict[str, Any]:
    command = [str(PROGRAM), bootstrap, group, topic]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer
