"""Bugs to plant into the commit log. tests/storage/test_commit_log.py finds more of them, with other means."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch
from uuid import UUID

from tests.sim.planted import Planted
from tests.sim.planted_disks import Found

from chronik.node.replicas.partition import Partition
from chronik.storage import folder
from chronik.storage.commit_log import CommitLog, Entry, LogId
from chronik.storage.disk import Disk
from chronik.storage.log import Log
from chronik.storage.replaying import ReplayReport, read_entries
from chronik.testing.sim.aimed_scenarios import DeposedLeaders, LostCommitLogs, SteppedJobs
from chronik.testing.sim.disk import SimFile
from chronik.testing.sim.scenario import SingleNode


def acknowledged_only_in_the_commit_log() -> AbstractContextManager[Any]:
    """The next start does not write what the commit log holds into the segments."""
    return patch.object(folder, "replay", lambda *_: None)


def commit_log_is_recycled_before_the_flush() -> AbstractContextManager[Any]:
    """A file of the commit log is overwritten although segments with entries in it are not synced."""

    def forget(log: Log) -> None:
        log._syncs._forget_framed()

    return patch.object(Log, "flush_job", forget)


def commit_log_is_not_synced() -> AbstractContextManager[Any]:
    """A frame counts as durable when it is written."""
    sync = SimFile.datasync

    def datasync(file: SimFile) -> None:
        if "/commit-log/" not in file._path:
            sync(file)

    return patch.object(SimFile, "datasync", datasync)


def truncated_entries_are_not_cancelled() -> AbstractContextManager[Any]:
    """A log that is truncated leaves its entries in the commit log: the next start writes them again."""

    def void(*_: Any) -> None:
        return

    return patch.object(CommitLog, "void", void)


def flush_begins_beside_a_truncation() -> AbstractContextManager[Any]:
    """A flush writes its mark of the durable end, and its checkpoint, into a log that a thread truncates or closes."""
    return patch.object(Partition, "can_flush", True)


def lost_commit_log_counts_as_unused() -> AbstractContextManager[Any]:
    """A commit log without any frame is taken for one that was never used: its node may lead at once."""

    def read_without_alarm(*args: Any) -> tuple[dict[LogId, list[Entry]], ReplayReport]:
        entries, report = read_entries(*args)
        return entries, report if report.frames else ReplayReport()

    return patch.object(folder, "read_entries", read_without_alarm)


def superseded_frames_hide_lost_ones() -> AbstractContextManager[Any]:
    """Any intact frame is enough, also one in a recycled file from before the newest file."""

    def read_whatever_is_left(disk: Disk, path: str, generation: UUID, _: int) -> Any:
        return read_entries(disk, path, generation, 1)

    return patch.object(folder, "read_entries", read_whatever_is_left)


PLANTED_IN_COMMIT_LOG: dict[Planted, Found] = {
    acknowledged_only_in_the_commit_log: Found(SingleNode.name, 20),
    commit_log_is_recycled_before_the_flush: Found(SingleNode.name, 25),
    commit_log_is_not_synced: Found(SingleNode.name, 25),
    truncated_entries_are_not_cancelled: Found(DeposedLeaders.name, 5),
    flush_begins_beside_a_truncation: Found(SteppedJobs.name, 9),
    lost_commit_log_counts_as_unused: Found(LostCommitLogs.name, 2),
    superseded_frames_hide_lost_ones: Found(LostCommitLogs.name, 2),
}
