"""A node's process is either found by its pid file or does not run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from chronik.cli.errors import CliError
from chronik.cli.node_process import NodeProcess


def test_a_node_process_does_not_stay_running_if_its_pid_file_cannot_be_written(tmp_path: Path) -> None:
    """As on a full disk; here, the folder does not exist."""
    config = tmp_path / "node.toml"
    process = NodeProcess(str(config), str(tmp_path / "missing" / "node.pid"), str(tmp_path / "node.log"))
    with pytest.raises(CliError, match=r"cannot write .*node\.pid"):
        process.launch([sys.executable, "-c", "import signal; signal.pause()"], {})
    assert process.state is None
    assert not any(str(config).encode() in command_of(path) for path in Path("/proc").glob("[0-9]*/cmdline"))


def command_of(path: Path) -> bytes:
    """Return the command line; empty if the process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
