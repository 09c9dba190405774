"""The cost of processes, as the kernel reports it: no figure comes from a server itself.

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
    """CPU seconds since the processes started, and their current memory."""

    cpu_s: float
    resident_bytes: int


def usage_of(pids: Iterable[int]) -> Usage:
    """Return the sum over these processes and all their running descendants."""
    cpu_s, resident = 0.0, 0
    for pid in with_children(pids):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            cpu_s += cpu_ticks(Path(f"/proc/{pid}/stat").read_text()) / TICKS_PER_S
            resident += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return Usage(cpu_s, resident)


def with_children(pids: Iterable[int]) -> set[int]:
    """Return these processes and their descendants."""
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
    """Return the fields after the name, which is in parentheses and may itself contain spaces and parentheses."""
    return stat.rpartition(")")[2].split()


def touch_memory(size_bytes: int) -> None:
    """Touch memory in a separate process, which then returns it to the system.

    A virtual machine gets a page from its host when it first touches it. Measured here, appending to a file cost 1-2 ms
    of system time per MB on fresh memory, and 0.2 ms on memory that had been used before.
    """
    touch = (
        f"import mmap; m = mmap.mmap(-1, {size_bytes}); "
        f"[m.__setitem__(i, 1) for i in range(0, {size_bytes}, {PAGE_BYTES})]"
    )
    subprocess.run([sys.executable, "-c", touch], check=True)


@dataclass(frozen=True, slots=True)
class MachineTime:
    """Clock ticks of all processors so far, and the ticks that a virtual machine's host used otherwise (steal)."""

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
