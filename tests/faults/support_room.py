"""The isolated environment of a campaign: a network namespace for each node, and disks to fill (`keeper.py`)."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

KEEPER = Path(__file__).with_name("keeper.py")
PROGRAMS = ("ip", "nsenter", "mount", "umount")
HOST = 0
END_TIMEOUT_S = 20.0
# 198.18.0.0/15 is reserved for network tests, so no real host has such an address.
SUBNETS = [f"198.{high}.{low}" for high in (18, 19) for low in range(256)]


class NoRoom(Exception):
    """This machine does not support network namespaces; the message gives the reason in one line."""


@dataclass(frozen=True)
class Way:
    """What happens to packets in one direction: a share is lost, all others are delayed."""

    loss: float = 0.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0


CUT = Way(loss=1.0)


class Room:
    """A network of the nodes and this host, with faults for each direction. Ends with `close` or with this process."""

    def __init__(self, seed: int) -> None:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            raise NoRoom(f"not installed: {', '.join(missing)}")
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
        except NoRoom:
            self.close()
            raise

    def __enter__(self) -> Room:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def put(self, ways: Iterable[tuple[int, int, Way]]) -> None:
        """Set the state of the network; directions that are not listed are healthy."""
        told = [
            (source, target, {"loss": way.loss, "delay_ms": way.delay_ms, "jitter_ms": way.jitter_ms})
            for source, target, way in ways
        ]
        self._ask(ways=told)

    def disk(self, folder: Path, size_bytes: int) -> None:
        """Mount an in-memory file system of that size at an empty folder."""
        self._ask(disk=str(folder), size_bytes=size_bytes)

    def counts(self) -> tuple[int, int]:
        """Return the number of forwarded and of dropped packets."""
        found = self._ask(counts=True)
        return found["passed"], found["dropped"]

    def _ask(self, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(asked) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise NoRoom("its keeper has ended") from None
            return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its keeper has ended"}
        if "error" in answer:
            raise NoRoom(answer["error"])
        return answer


def _unused_subnet() -> str:
    """Return a subnet that no route of this machine covers."""
    with open("/proc/net/route", encoding="ascii") as routes:
        taken = {line.split()[1] for line in routes if line.count("\t") > 1}
    free = [net for net in SUBNETS if _as_route(net) not in taken]
    if not free:
        raise NoRoom("198.18.0.0/15 is in use")
    return random.choice(free)


def _as_route(subnet: str) -> str:
    """Format SUBNET.0 as /proc/net/route does: in hexadecimal, the last byte first."""
    return "00" + "".join(f"{int(part):02X}" for part in reversed(subnet.split(".")))
