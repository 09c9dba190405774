"""Restarts on the same data: many partitions, and a large log after kill -9.

A server is ready when each partition of the topic has acknowledged a write.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator

from bench.clients import Topic, drive, wait_until_listening, write_to_all
from bench.processes import usage_of
from bench.samples import Figure
from bench.workloads import MEGABYTE, PARTITIONS, Life

GIGABYTE = 1_000_000_000
FREE_BYTES_SPARE = 5 * GIGABYTE
LARGE_RECORD_BYTES = 100_000
GOAL_PARTITIONS = (100, 1_000, 5_000)
GOAL_GIGABYTES = 10
# Each partition may have a segment and two indexes open, in addition to the files that a server always opens.
FILES_PER_PARTITION = 3
FILES_SPARE = 1_000


def many_partitions(count: int) -> Callable[[Life], Iterator[Figure]]:
    def run(life: Life) -> Iterator[Figure]:
        goals = ("<= 0.2", ">= 1.0", "<= 1.0") if count in GOAL_PARTITIONS else (None, None, None)
        workload = f"{count:,} partitions, 1 node"
        with Topic(life.server, count, is_kept=True) as topic:
            write_to_all(topic)
            figures = drive(topic, "produce", life.scale.records(300_000), 100)
            resident_mb = usage_of(life.server.pids).resident_bytes / MEGABYTE
            yield Figure(
                workload, "resident memory", "MB", resident_mb, goals[0], "partitions", float(count), None, resident_mb
            )
            rate, cpu_s = figures["records_per_s"], figures["broker_cpu_s"]
            yield Figure(workload, "records", "1/s", rate, goals[1], cpu_s=cpu_s, resident_mb=resident_mb)
            life.server.stop()
            yield Figure(workload, "start to writes in all", "s", _ready_after_s(life, topic), goals[2])

    return run


def large_log(gigabytes: int) -> Callable[[Life], Iterator[Figure]]:
    def run(life: Life) -> Iterator[Figure]:
        goal = "<= 1.0" if gigabytes == GOAL_GIGABYTES else None
        size = gigabytes * GIGABYTE // (20 if life.scale.quick else 1)
        with Topic(life.server, PARTITIONS, is_kept=True) as topic:
            drive(topic, "produce", size // LARGE_RECORD_BYTES, LARGE_RECORD_BYTES)
            life.server.kill()
            seconds = _ready_after_s(life, topic)
            workload = f"restart after kill -9, {gigabytes} GB, 1 node"
            yield Figure(workload, "start to writes in all", "s", seconds, goal, "log size", float(gigabytes))

    return run


def no_files_for(count: int, files_max: int, files_each: int = FILES_PER_PARTITION) -> str | None:
    """Return why a process cannot open this many partitions, or other files, here, or None if it can."""
    needed = count * files_each + FILES_SPARE
    return None if files_max >= needed else f"{needed} open files are needed, {files_max} allowed (ulimit -n)"


def no_room_for(size_bytes: int) -> str | None:
    """Return why a log of that size cannot be written here, or None if it can."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free >= size_bytes + FREE_BYTES_SPARE:
        return None
    return f"only {free / GIGABYTE:.1f} GB are free in {tempfile.gettempdir()}"


def _ready_after_s(life: Life, topic: Topic) -> float:
    started_s = time.monotonic()
    life.server.launch()
    wait_until_listening(life.server)
    write_to_all(topic)
    return time.monotonic() - started_s
