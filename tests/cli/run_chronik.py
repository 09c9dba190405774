"""Run the real `chronik` command in a process of its own, as a user's shell would."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.command_server import run_command
from tests.support.node import Node

from chronik.client.cluster import Cluster
from chronik.client.topics import Topics

CHRONIK = Path(sys.executable).with_name("chronik")


class Outcome(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """Parse standard output as one JSON object."""
        assert self.code == 0, self.err
        parsed = json.loads(self.out)
        assert isinstance(parsed, dict)
        return parsed

    @property
    def error_line(self) -> str:
        """Check that the error output is one line, and return it."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("chronik: ")
        return lines[0]


def chronik(*arguments: str, stdin: str = "", timeout_s: float = 60.0, cwd: Path | None = None) -> Outcome:
    done = run_command(arguments, stdin, timeout_s, cwd)
    return Outcome(done.returncode, done.stdout, done.stderr)


def create_topic(node: Node, name: str, partitions: int = 3, configs: Mapping[str, str] | None = None) -> None:
    """Create a topic for a test without starting a process."""

    async def create() -> None:
        async with Cluster([("127.0.0.1", node.kafka_port)]) as cluster:
            await Topics(cluster).create(name, partitions, None, configs or {})

    asyncio.run(create())
