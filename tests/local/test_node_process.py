"""A node's process is either found by its pid file or does not run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from tests.support.eventually import eventually

from chronik.local.errors import LocalClusterError
from chronik.local.node_process import NodeProcess


def test_a_node_process_does_not_stay_running_if_its_pid_file_cannot_be_written(tmp_path: Path) -> None:
    """As on a full disk; here, the folder does not exist."""
    config = tmp_path / "node.toml"
    process = NodeProcess(str(config), str(tmp_path / "missing" / "node.pid"), str(tmp_path / "node.log"))
    with pytest.raises(LocalClusterError, match=r"cannot write .*node\.pid"):
        process.launch([sys.executable, "-c", "import signal; signal.pause()"], {})
    assert process.state is None
    assert not any(str(config).encode() in command_of(path) for path in Path("/proc").glob("[0-9]*/cmdline"))


# As after SIGKILL while a thread is inside fsync: the system call `exit` ends only the thread that calls it.
FIRST_THREAD_ENDS = """
import ctypes, platform, signal, threading
threading.Thread(target=signal.pause).start()
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
"""


@pytest.mark.parametrize("is_child", [True, False])
def test_a_process_runs_until_its_last_thread_has_ended(tmp_path: Path, is_child: bool) -> None:
    paths = [str(tmp_path / name) for name in ("node.toml", "node.pid", "node.log")]
    launched = NodeProcess(*paths)
    launched.launch([sys.executable, "-c", FIRST_THREAD_ENDS], {})
    process = launched if is_child else NodeProcess(*paths)
    eventually(lambda: state_letter(launched) == "Z", what="the first thread has ended")
    assert process.state == "running"
    process.send(signal.SIGKILL)
    assert process.wait_until_gone(30.0)
    assert launched.wait_until_gone(30.0)


def state_letter(process: NodeProcess) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def command_of(path: Path) -> bytes:
    """Return the command line; empty if the process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
