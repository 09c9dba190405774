"""Ports for the nodes that tests start.

A port belongs to one test process as long as that runs, and is not given out twice in a row. Nodes bind late, and a
stopped node returns to its port, so no other node may take it in the meantime.
"""

import fcntl
import os
import random
import socket
import tempfile
from collections import deque
from pathlib import Path

# Below the system's range for outgoing connections, so that a node that is killed and started again finds its port
# still free. Also below the range of `chronik.local.cluster`: processes that tests start (`chronik demo`, the plugin's
# pytest) choose from that, and know nothing of these locks.
LOWEST_PORT = 10_000
HIGHEST_PORT = 20_000
TRIES_MAX = 10_000

_taken: deque[int] = deque(maxlen=2_000)
"""The ports given out last; older ones may be given out again."""
_locks: list[int] = []


def free_ports(count: int) -> list[int]:
    """Return `count` ports of 127.0.0.1 on which nothing listens, and that no other test process gets."""
    found: list[int] = []
    chooser = random.Random()
    for _ in range(TRIES_MAX):
        port = chooser.randint(LOWEST_PORT, HIGHEST_PORT)
        if port not in _taken and is_free(port):
            _taken.append(port)
            found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"no {count} free ports between {LOWEST_PORT} and {HIGHEST_PORT}")


def is_free(port: int) -> bool:
    """Return whether nothing listens on the port, and no other test process has it."""
    return _is_ours(port) and _is_unused(port)


def _is_ours(port: int) -> bool:
    """Return whether this process holds the port's lock, a byte of a file; the lock ends with the process."""
    if not _locks:
        path = Path(tempfile.gettempdir()) / f"chronik-test-ports-{os.getuid()}"
        _locks.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    try:
        fcntl.lockf(_locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _is_unused(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
