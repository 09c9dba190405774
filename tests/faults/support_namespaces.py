"""Network namespaces for the nodes of a campaign, and disks that can be filled (`keeper.py`)."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KEEPER = Path(__file__).with_name("keeper.py")
PROGRAMS = ("ip", "nsenter", "mount", "umount")
HOST = 0
END_TIMEOUT_S = 20.0
# 198.18.0.0/15 is reserved for network tests, so no real host has such an address.
SUBNETS = [f"198.{high}.{low}" for high in (18, 19) for low in range(256)]


class NamespacesUnavailable(Exception):
    """This machine does not support network namespaces; the message gives the reason in one line."""


@dataclass(frozen=True)
class LinkFault:
    """What happens to packets in one direction: a share is lost, all others are delayed."""

    loss: float = 0.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0

    def combined_with(self, other: LinkFault) -> LinkFault:
        loss = 1.0 - (1.0 - self.loss) * (1.0 - other.loss)
        return LinkFault(loss, self.delay_ms + other.delay_ms, self.jitter_ms + other.jitter_ms)


CUT = LinkFault(loss=1.0)


class Namespaces:
    """A network of the nodes and this host, with faults for each direction. Ends with `close` or with this process."""

    def __init__(self, seed: int) -> None:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            raise NamespacesUnavailable(f"not installed: {', '.join(missing)}")
        self.subnet = _unused_subnet()
        self._namespaces: dict[int, str] = {}
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(KEEPER), self.subnet, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to the test only; the keeper ends after it
        )
        try:
            self._read()
            self._ask(node=1)
        except NamespacesUnavailable:
            self.close()
            raise

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def address(self, node: int) -> str:
        return f"{self.subnet}.{node}"

    def enter(self, node: int) -> list[str]:
        """Return the command prefix that runs a command in the node's namespace, as the same process."""
        if node not in self._namespaces:
            self._namespaces[node] = self._ask(node=node)["namespace"]
        return ["nsenter", f"--net={self._namespaces[node]}", "--"]

    def apply(self, faults: Iterable[tuple[int, int, LinkFault]]) -> None:
        """Set the state of the network; directions that are not listed are healthy."""
        self._ask(links=[(source, target, asdict(fault)) for source, target, fault in faults])

    def mount_disk(self, folder: Path, size_bytes: int) -> None:
        """Mount an in-memory file system of that size at an empty folder."""
        self._ask(disk=str(folder), size_bytes=size_bytes)

    def counts(self) -> tuple[int, int]:
        """Return the number of forwarded and of dropped packets."""
        counts = self._ask(counts=True)
        return counts["passed"], counts["dropped"]

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise NamespacesUnavailable("its keeper has ended") from None
            return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its keeper has ended"}
        if "error" in answer:
            raise NamespacesUnavailable(answer["error"])
        return answer


def _unused_subnet() -> str:
    """Return a subnet that no route of this machine covers."""
    with open("/proc/net/route", encoding="ascii") as routes:
        taken = {line.split()[1] for line in routes if line.count("\t") > 1}
    free = [net for net in SUBNETS if _as_route(net) not in taken]
    if not free:
        raise NamespacesUnavailable("198.18.0.0/15 is in use")
    return random.choice(free)


def _as_route(subnet: str) -> str:
    """Format SUBNET.0 as /proc/net/route does: in hexadecimal, the last byte first."""
    return "00" + "".join(f"{int(part):02X}" for part in reversed(subnet.split(".")))
