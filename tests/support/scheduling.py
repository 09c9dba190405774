"""Which worker runs which test files, and in which order, when `make test` shares them among several workers.

Tests with real processes mostly wait: for a session that expires, a JVM, a browser. Tests that only compute fill these
gaps: one worker in the background runs them at a low priority, so that the others wait no longer because of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

LONG = ("spark", "clients", "cluster", "faults", "cli", "web", "sim")
"""Folders of tests with long files."""
LONGEST = ("tests/spark/test_sink_crash.py", "tests/cli/test_demo.py", "tests/spark/test_land_crash.py")
"""Files that take long because of one test, which starts JVMs of its own."""
APART = (*LONGEST, "tests/spark/test_land_s3.py", "tests/spark/test_run.py")
"""Files that no entry of TOGETHER takes: their tests start all processes themselves."""
TOGETHER = {
    "Spark, Apache Kafka": (
        "tests/spark/*.py",
        "tests/pipeline/test_apache_kafka.py",
        "tests/pipeline/test_audit_log.py",
        "tests/pipeline/test_sink.py",
    ),
    "shared_nodes, kafka_tools": (
        "tests/cluster/test_dashboard.py",
        "tests/cluster/test_metadata.py",
        "tests/cluster/test_strangers.py",
        "tests/cluster/test_support.py",
        "tests/cluster/test_tools_*.py",
        "tests/cluster/test_verify.py",
    ),
    "Java clients": ("tests/clients/*.py",),
}
"""Files whose tests share processes for the whole run: one worker runs them all, so that it alone starts these."""
COMPUTE = tuple(
    f"tests/{files}.py"
    for files in (
        "sim/*",
        "pipeline/test_table_model",
        "pipeline/test_land_maintenance",
        "storage/*",
        "metadata/*",
        "authentication/*",
        "authorization/*",
        "bench/*",
        "raft/*",
        "replication/*",
        "schemas/*",
        "shares/*",
        "transactions/*",
        "wire/*",
    )
)
"""Files whose tests start no process and wait for nothing: how fast they run decides no result."""
BACKGROUND_NICE = 10
BACKGROUND_TIMEOUT_S = 900
"""Of a test in the background: the default one is for tests that the scheduler of the system serves at once."""
WORKERS_MIN = 3
"""Fewer workers leave none for the background."""


def background_worker(count: int) -> str | None:
    """Return the id of the worker for COMPUTE, if one of so many is to have no other tests."""
    return f"gw{count - 1}" if count >= WORKERS_MIN else None


def is_in_background(config: pytest.Config) -> bool:
    worker = getattr(config, "workerinput", None)
    return worker is not None and worker["workerid"] == background_worker(worker["workercount"])


def lower_priority() -> None:
    """Let this process and its children compute only while others wait.

    Linux may give each session its share of the CPU, whatever the priorities of its processes are: so this one gets a
    session of its own, with a priority.
    """
    os.nice(BACKGROUND_NICE)
    with suppress(OSError):  # There is no such file, or it belongs to somebody else.
        os.setsid()
        Path("/proc/self/autogroup").write_text(str(BACKGROUND_NICE))


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Put the long files first, those of different folders in turn: so the workers end at about the same time."""
    files = list(paths)
    long = [[path for path in files if path.parent.name == folder] for folder in LONG]
    in_turn = [path for turn in zip_longest(*long) for path in turn if path is not None]
    longest = [path for name in LONGEST for path in files if path.match(name)]
    return list(dict.fromkeys([*in_turn[:1], *longest, *in_turn, *files]))  # the first is of the longest group: Spark


class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist publishes no types
    """Gives whole files to each worker, all files of one entry of TOGETHER to the same one."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._background = background_worker(self.numnodes)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file in APART:
            return file
        return next((name for name, files in TOGETHER.items() if matches(file, files)), file)

    def _assign_work_unit(self, node: Any) -> None:
        is_background = node.gateway.id == self._background
        preferred = (scope for scope in self.workqueue if matches(scope, COMPUTE) == is_background)
        self.workqueue.move_to_end(next(preferred, next(iter(self.workqueue))), last=False)
        super()._assign_work_unit(node)


def matches(file: str, patterns: Iterable[str]) -> bool:
    return any(map(partial(fnmatch, file), patterns))
