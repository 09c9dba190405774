"""Bugs to plant into the node, each as a patch in the test, to show that the simulator's oracle can fail.

Systems of this kind really make these mistakes; most of them were made in the system that this one follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from chronik.node.replicas.partition import Partition
from chronik.storage import recovery
from chronik.storage.batches import scan_batches
from chronik.storage.log import Log
from chronik.storage.producers import ProducerStates
from chronik.storage.syncing import SyncJob
from chronik.wire.batch import BatchHeader


@contextmanager
def acknowledged_before_the_sync() -> Iterator[None]:
    """The node acknowledges a batch after appending it, before the sync."""

    def at_once(partition: Partition, end_offset: int) -> bool:
        return True

    with patch.object(Partition, "is_written", at_once), patch.object(Partition, "is_committed", at_once):
        yield


@contextmanager
def watermark_is_the_log_end() -> Iterator[None]:
    """Consumers see records that are appended but not yet synced; producers are acknowledged at the right time."""
    appended = Partition._appended

    def appended_and_seen(partition: Partition, size_bytes: int) -> None:
        appended(partition, size_bytes)
        partition._waits.wake_fetches(partition, size_bytes)

    end = property(lambda partition: partition.log.log_end_offset)
    with patch.object(Partition, "visible_end_offset", end), patch.object(Partition, "_appended", appended_and_seen):
        yield


def offset_is_loaded_and_later_stored() -> AbstractContextManager[Any]:
    """The next offset is read when a batch arrives and stored in a later callback: batches in between share it."""
    append = Log.append

    def append_with_a_race(
        log: Log, records: Any, batches: list[tuple[int, BatchHeader]], leader_epoch: int, now_ms: int
    ) -> Any:
        end_offset = log.log_end_offset
        result = append(log, records, batches, leader_epoch, now_ms)
        new_end, log.log_end_offset = log.log_end_offset, end_offset

        def store() -> None:
            log.log_end_offset = max(log.log_end_offset, new_end)

        asyncio.get_running_loop().call_soon(store)
        return result

    return patch.object(Log, "append", append_with_a_race)


def recovery_trusts_every_batch() -> AbstractContextManager[Any]:
    """Recovery after a crash accepts a batch as intact if its header is there."""

    def scan(*args: Any) -> Iterator[Any]:
        for batch in scan_batches(*args):
            yield batch._replace(intact=True)

    return patch.object(recovery, "scan_batches", scan)


def new_segment_without_folder_sync() -> AbstractContextManager[Any]:
    """The file of a new segment is synced, but its folder entry is not."""
    run = SyncJob.run

    def run_without_folders(job: SyncJob) -> None:
        job.folders = ()
        run(job)

    return patch.object(SyncJob, "run", run_without_folders)


def producers_are_forgotten() -> AbstractContextManager[Any]:
    """The last batches of idempotent producers do not survive a restart."""

    def forget(log: Log, *args: Any) -> None:
        original(log, *args)
        log.producers = ProducerStates(log.config.producer_expiration_ms)

    original: Callable[..., None] = Log.__init__
    return patch.object(Log, "__init__", forget)


def refusals_are_forgotten() -> AbstractContextManager[Any]:
    """Batches that follow a rejected batch are treated as out of order, which makes real clients start a new epoch."""

    def forget(partition: Partition, *args: Any) -> None:
        return

    return patch.object(Partition, "refused", forget)


Planted = Callable[[], AbstractContextManager[Any]]

PLANTED: dict[Planted, int] = {
    acknowledged_before_the_sync: 10,
    watermark_is_the_log_end: 12,
    offset_is_loaded_and_later_stored: 3,
    recovery_trusts_every_batch: 12,
    new_segment_without_folder_sync: 12,
    producers_are_forgotten: 5,
    refusals_are_forgotten: 40,
}
"""Each bug, and the number of seeds that may pass before it is found: about three times the mean."""
