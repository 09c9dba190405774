"""Ports for the nodes that tests start.

A port is given to one process only, as long as that runs, and there not twice in a row: nodes bind late, and one that
was stopped comes back to its port, which nobody may have taken meanwhile.
"""

import fcntl
import os
import random
import socket
import tempfile
from collections import deque
from pathlib import Path

# Below the range from which the system takes ports for outgoing connections, so that a node that is killed
# and started again finds its port still free.
LOWEST_PORT = 20_000
HIGHEST_PORT = 32_000
TRIES_MAX = 10_000

_taken: deque[int] = deque(maxlen=2_000)
"""Those given last; older ones may be given again."""
_locks: list[int] = []


def free_ports(count: int) -> list[int]:
    """`count` ports of 127.0.0.1 that nobody listens on, and no other process of these tests is given."""
    found: list[int] = []
    chooser = random.Random()
    for _ in range(TRIES_MAX):
        port = chooser.randint(LOWEST_PORT, HIGHEST_PORT)
        if port not in _taken and _is_ours(port) and _is_free(port):
            _taken.append(port)
            found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"no {count} free ports between {LOWEST_PORT} and {HIGHEST_PORT}")


def _is_ours(port: int) -> bool:
    """Whether this process has the lock of the port, a byte of a file; it ends with the process."""
    if not _locks:
        path = Path(tempfile.gettempdir()) / f"chronik-test-ports-{os.getuid()}"
        _locks.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    try:
        fcntl.lockf(_locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
