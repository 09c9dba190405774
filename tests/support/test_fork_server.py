"""A forked node is a process like any other: it is found, signalled and waited for, and it ends with its test run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.eventually import eventually
from tests.support.fork_server import ROOT
from tests.support.node import Node

from chronik.local.node_process import inspect

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nodes are forked on Linux only")

RUN = """
import signal, sys
from pathlib import Path
from tests.support.node import Node
print(Node(Path(sys.argv[1])).start().pid, flush=True)
signal.pause()
"""


def test_a_forked_node_shows_its_command_line_and_returns_its_exit_code(node: Node) -> None:
    found = inspect(node.pid)
    assert found is not None
    assert found[2].rstrip().endswith(f"start --config {node.folder / 'node-1.toml'}")
    node.process, process = None, node.process
    assert process is not None and process.poll() is None
    process.kill()
    assert process.wait(20.0) == -9 and process.returncode == -9


def test_forked_nodes_end_when_the_test_run_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        assert inspect(pid) is not None
        run.kill()
    eventually(lambda: inspect(pid) is None, what=f"node process {pid} is gone")
