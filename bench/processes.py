"""What processes cost, as the kernel tells it: nothing is taken from what a server says of itself.

/proc/PID/stat      pid (name) state ppid ... utime and stime are the 12th and 13th after the name, in clock ticks
/proc/PID/statm     size resident shared ... in pages
/proc/stat          cpu user nice system idle iowait irq softirq steal ... in clock ticks, over all processors
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds since the processes' starts, and the memory that they have now."""

    cpu_s: float
    resident_bytes: int


def usage_of(pids: Iterable[int]) -> Usage:
    """The sum over these processes and all that they started and that still run."""
    cpu_s, resident = 0.0, 0
    for pid in with_children(pids):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            cpu_s += cpu_ticks(Path(f"/proc/{pid}/stat").read_text()) / TICKS_PER_S
            resident += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return Usage(cpu_s, resident)


def with_children(pids: Iterable[int]) -> set[int]:
    """These processes and their descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(parent_of((folder / "stat").read_text()), []).append(int(folder.name))
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def parent_of(stat: str) -> int:
    return int(_after_name(stat)[1])


def cpu_ticks(stat: str) -> int:
    fields = _after_name(stat)
    return int(fields[11]) + int(fields[12])


def _after_name(stat: str) -> list[str]:
    """The fields after the name, which stands in parentheses and may hold spaces and parentheses itself."""
    return stat.rpartition(")")[2].split()


def touch_memory(size_bytes: int) -> None:
    """Touches memory in a process of its own, which gives it back to the system.

    A virtual machine gets a page from its host when it first touches it: measured here, appending to a file cost 1-2 ms
    per MB of system time on fresh memory, and 0.2 on memory that had been used before.
    """
    touch = (
        f"import mmap; m = mmap.mmap(-1, {size_bytes}); "
        f"[m.__setitem__(i, 1) for i in range(0, {size_bytes}, {PAGE_BYTES})]"
    )
    subprocess.run([sys.executable, "-c", touch], check=True)


@dataclass(frozen=True, slots=True)
class MachineTime:
    """Clock ticks of all processors so far, and how many of them a virtual machine's host kept for others."""

    total: int
    stolen: int

    def stolen_share_since(self, before: MachineTime) -> float:
        passed = self.total - before.total
        return (self.stolen - before.stolen) / passed if passed else 0.0


def machine_time(stat: str | None = None) -> MachineTime:
    text = Path("/proc/stat").read_text() if stat is None else stat
    ticks = [int(field) for field in text.splitlines()[0].split()[1:9]]
    return MachineTime(sum(ticks), ticks[7])


def free_memory_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * PAGE_BYTES
