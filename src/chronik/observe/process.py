"""Resource usage of this process: CPU, memory, open files. Read from the kernel at each scrape."""

import os
import resource
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """CPU seconds since the start, resident bytes and open files; None if the system does not report it."""

    cpu_s: float
    resident_bytes: int | None
    open_files: int | None
    open_files_max: int


def process_usage() -> ProcessUsage:
    """Return the current usage. CPU comes from getrusage, since /proc/self/stat has steps of 10 ms."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return ProcessUsage(
        cpu_s=usage.ru_utime + usage.ru_stime,
        resident_bytes=_resident_bytes(),
        open_files=_open_files(),
        open_files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def machine_boot_id() -> str:
    """Return an id that changes at each boot of the machine; empty if the system does not report it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot_id:
            return boot_id.read().strip()
    except OSError:
        return ""


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _open_files() -> int | None:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder)) - 1  # listing the folder opens it
        except OSError:
            continue
    return None
