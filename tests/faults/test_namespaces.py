"""The network namespaces of campaigns: packets are lost and delayed as requested, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.support_namespaces import CUT, HOST, LinkFault, Namespaces, NamespacesUnavailable
from tests.support.eventually import eventually

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7777))
print("up", flush=True)
while True:
    near, _ = server.accept()
    while data := near.recv(100):
        near.sendall(data)
"""


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    try:
        made = Namespaces(seed=1)
    except NamespacesUnavailable as reason:
        pytest.skip(f"no network namespaces here: {reason}")
    with made:
        yield made


@pytest.fixture
def echo(namespaces: Namespaces) -> Iterator[str]:
    """The address of an echo server in namespace 1."""
    address = namespaces.address(1)
    process = subprocess.Popen([*namespaces.enter(1), sys.executable, "-c", ECHO, address], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield address
    process.kill()
    process.wait()
    process.stdout.close()


def say(near: socket.socket, timeout_s: float = 10.0) -> float:
    """Send a byte and return the seconds until its echo arrives."""
    began_s = time.monotonic()
    near.settimeout(timeout_s)
    near.sendall(b"x")
    assert near.recv(1) == b"x"
    return time.monotonic() - began_s


def test_connections_survive_packet_loss_and_delay_in_one_or_both_directions(namespaces: Namespaces, echo: str) -> None:
    with socket.create_connection((echo, 7777), 10) as near:
        say(near)
        namespaces.apply([(HOST, 1, LinkFault(delay_ms=60.0)), (1, HOST, LinkFault(delay_ms=60.0))])
        assert say(near) >= 0.12
        for cut in ((HOST, 1), (1, HOST)):
            namespaces.apply([(*cut, CUT)])
            with pytest.raises(TimeoutError):
                say(near, timeout_s=0.5)
            namespaces.apply([])
            near.settimeout(10)
            assert near.recv(1) == b"x"  # retransmitted by TCP
        _, dropped = namespaces.counts()
        assert dropped >= 2
        namespaces.apply([(HOST, 1, LinkFault(loss=0.2)), (1, HOST, LinkFault(loss=0.2))])
        while namespaces.counts()[1] == dropped:
            say(near)
        say(near)


def test_namespaces_and_disks_are_removed_when_their_process_dies(tmp_path: Path, namespaces: Namespaces) -> None:
    """`namespaces` is a parameter only to skip the test if namespaces are unavailable."""
    disk = tmp_path / "disk"
    disk.mkdir()
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.faults.support_namespaces import Namespaces\n"
        "namespaces = Namespaces(seed=1)\n"
        "namespaces.enter(2)\n"
        f"namespaces.mount_disk(Path({str(disk)!r}), 1 << 20)\n"
        "print(namespaces.subnet, flush=True)\n"
        "signal.pause()\n"
    )
    root = Path(__file__).resolve().parents[2]
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root, text=True)
    assert other.stdout is not None
    subnet = other.stdout.readline().strip()
    assert disk.is_mount()
    assert subnet in links()
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    other.stdout.close()
    eventually(lambda: not disk.is_mount() and subnet not in links(), timeout_s=20, what="nothing is left")


def links() -> str:
    return subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True, check=True).stdout


def test_a_write_beyond_the_size_of_a_test_disk_fails(tmp_path: Path, namespaces: Namespaces) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    namespaces.mount_disk(disk, 1 << 20)
    with pytest.raises(OSError, match="No space left"):
        (disk / "file").write_bytes(bytes(2 << 20))
