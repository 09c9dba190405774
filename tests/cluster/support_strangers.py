"""`chronik start` processes that may not belong to the cluster they want to join: start, observe and end them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.support_cluster import clean_environment, to_toml
from tests.support.node import CHRONIK
from tests.support.ports import free_ports

READY = "is ready"
EXIT_TIMEOUT_S = 20.0


class Stray:
    """One process, and its output so far."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def code(self) -> int | None:
        return self._process.poll()

    @property
    def is_ready(self) -> bool:
        return any(line.startswith("chronik: node") and READY in line for line in self.output.splitlines())

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(EXIT_TIMEOUT_S)


def stray(folder: Path, settings: Mapping[str, Any], variables: Mapping[str, str]) -> Stray:
    """Start a node on free ports with these settings, in `folder`/data unless the settings name a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    kafka, http, internal = free_ports(3)
    listen = {name: f"127.0.0.1:{port}" for name, port in (("kafka", kafka), ("http", http), ("internal", internal))}
    (folder / "node.toml").write_text(to_toml({"data_dir": str(folder / "data"), "listen": listen, **settings}))
    with (folder / "output").open("wb") as log:
        process = subprocess.Popen(
            [str(CHRONIK), "start", "--config", str(folder / "node.toml")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**clean_environment(), **variables},
            cwd=folder,
        )
    return Stray(process, folder / "output")


def said_by(output: str) -> str:
    """Return the one human-readable line with which a start ended."""
    said = [line for line in output.splitlines() if line.startswith("chronik: ")]
    assert len(said) == 1, output[-3000:]
    assert "Traceback" not in output
    return said[0]
