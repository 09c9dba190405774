"""Ports for the nodes that tests start."""

import random
import socket

# Below the range from which the system takes ports for outgoing connections, so that a node that is killed
# and started again finds its port still free.
LOWEST_PORT = 20_000
HIGHEST_PORT = 32_000
TRIES_MAX = 200


def free_ports(count: int) -> list[int]:
    """`count` ports of 127.0.0.1 that nobody listens on now."""
    found: list[int] = []
    chooser = random.Random()
    for _ in range(TRIES_MAX):
        port = chooser.randint(LOWEST_PORT, HIGHEST_PORT)
        if port not in found and _is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"no {count} free ports between {LOWEST_PORT} and {HIGHEST_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
