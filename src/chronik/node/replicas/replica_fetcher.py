"""The fetcher for one leader: it fetches all partitions that this node replicates from that leader, in one session.

A fetch includes a partition when its position changed, and the leader then responds once (see `replica_sessions`). So
one long poll is in flight. After records arrive, the next fetch waits briefly for their sync, because a fetch position
states what this node has durably. A partition with a slower sync or truncation does not delay the other partitions: it
is included once it is ready, in a second fetch that makes the leader end the first.

After an error, or a response that does not fit the log, the follower fetches again after a pause. It never drops a
partition for that: the leader may not know yet that it leads, or this node may not know yet that the leader changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol
from uuid import UUID

from chronik.client.connection import Connection
from chronik.node.replicas.leader_session import LeaderSession
from chronik.node.replicas.partition import Partition
from chronik.observe.logging import Logger
from chronik.replication.divergence import EpochEnd
from chronik.replication.follower import (
    NO_EPOCH,
    Answer,
    Append,
    AskAgain,
    FetchedBatch,
    Nothing,
    OwnLog,
    PartitionFollower,
    Refuse,
    StartOver,
    Truncate,
)
from chronik.wire.batch import BatchHeader, check_batches
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import FetchPartition, FetchPartitionResponse, FetchResponse, FetchTopic

PARTITION_BYTES = 1024 * 1024
PARTITION_BYTES_MAX = 8 * PARTITION_BYTES
SLOW_SYNC_S = 0.02
"""Each fetch of a partition is synced before the next. If syncs take longer than this, fetches become larger."""
SYNC_WAIT_S = 0.005
"""How long the next fetch waits for the sync of the last one's records."""
RETRY_S_MIN = 0.01
RETRY_S_MAX = 0.5
REFUSED_RETRY_S = 5.0
FAILED_RETRY_S = 1.0
"""The pause after an error that is not caused by old metadata."""

EXPECTED_ERRORS = frozenset(
    {
        ErrorCode.none,
        ErrorCode.not_leader_or_follower,
        ErrorCode.unknown_leader_epoch,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.unknown_topic_id,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.stale_broker_epoch,
    }
)
"""Errors which mean that the leader or the follower has old metadata."""

NOT_NAMED = 0
Batches = list[tuple[int, BatchHeader]]


class FetcherHome(Protocol):
    """What a fetcher needs from replication, which runs the fetchers."""

    def broker_epoch(self) -> int: ...

    def wall_ms(self) -> int: ...

    def connect(self, node_id: int) -> Awaitable[Connection]: ...

    async def cut(self, partition: Partition, role: PartitionFollower, decision: Truncate | StartOver) -> bool:
        """Truncate the partition's log while no other job uses it; return whether it was truncated."""

    async def follow_log_start(self, partition: Partition, offset: int) -> None: ...


class Followed:
    """One followed partition: due, included in a fetch, or waiting for a sync, a truncation or a pause."""

    __slots__ = (
        "appended_s",
        "bytes_max",
        "failures",
        "fetched_bytes",
        "is_reported",
        "is_syncing",
        "is_trimming",
        "key",
        "named_in",
        "partition",
        "position",
        "retry",
        "role",
    )

    def __init__(self, partition: Partition, role: PartitionFollower) -> None:
        self.key = (partition.topic_id, partition.index)
        self.partition = partition
        self.role = role
        self.named_in = NOT_NAMED
        """The number of the fetch that last included it, until a response brings more than a watermark."""
        self.position = (-1, NO_EPOCH)
        self.bytes_max = PARTITION_BYTES
        self.fetched_bytes = 0
        self.appended_s = 0.0
        self.is_syncing = False
        self.is_trimming = False
        self.is_reported = False
        self.failures = 0
        self.retry: asyncio.TimerHandle | None = None

    def appended(self, fetched_bytes: int, now_s: float) -> None:
        self.fetched_bytes, self.appended_s = fetched_bytes, now_s

    def synced(self, now_s: float) -> None:
        """Adapt the next fetch size to the time that the last sync took."""
        took_s = now_s - self.appended_s
        if took_s > SLOW_SYNC_S and 2 * self.fetched_bytes > self.bytes_max:
            self.bytes_max = min(2 * self.bytes_max, PARTITION_BYTES_MAX)
        elif took_s < SLOW_SYNC_S / 2:
            self.bytes_max = max(self.bytes_max // 2, PARTITION_BYTES)


class ReplicaFetcher:
    """Owned by the loop. Call `follow` and `leave` as the metadata changes, and `close` when nothing is followed."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, node_id: int, leader_id: int, home: FetcherHome, log: Logger
    ) -> None:
        self.leader_id = leader_id
        self._loop = loop
        self._home = home
        self._log = log.bind(leader=leader_id)
        self._session = LeaderSession(loop, node_id, leader_id, home.connect, home.broker_epoch, self, self._log)
        self._followed: dict[tuple[UUID, int], Followed] = {}
        self._due: dict[Followed, None] = {}
        self._forgotten: dict[tuple[UUID, int], None] = {}
        self._syncing = 0
        self._sync_wait_until_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._followed)

    # -- followed partitions -------------------------------------------------------------------------------------------

    def follow(self, partition: Partition) -> None:
        """Fetch this partition under the leader epoch of its current role."""
        role = partition.role
        if not isinstance(role, PartitionFollower):
            raise TypeError(f"{partition.topic}-{partition.index} is led here")
        key = (partition.topic_id, partition.index)
        known = self._followed.get(key)
        if known is not None:
            if known.role is role:
                return
            self._drop(known)
        self._forgotten.pop(key, None)
        followed = self._followed[key] = Followed(partition, role)
        self._position(followed)
        self._session.open()

    def leave(self, partition: Partition) -> None:
        followed = self._followed.get((partition.topic_id, partition.index))
        if followed is not None and followed.partition is partition:
            self._drop(followed)
            del self._followed[followed.key]
            self._forgotten[followed.key] = None

    def counted(self, partition: Partition) -> None:
        """Fetch the partition again if its whole log is durable now."""
        followed = self._followed.get((partition.topic_id, partition.index))
        if followed is not None and followed.is_syncing and partition.fetch_position() is not None:
            followed.synced(self._loop.time())
            self._position(followed)

    def name_again(self, partition: Partition) -> None:
        """Update the position after the log end changed or must not be sent; ignore responses still in flight."""
        followed = self._followed.get((partition.topic_id, partition.index))
        if followed is not None:
            self._due.pop(followed, None)
            self._position(followed)

    def name_all(self) -> None:
        """Send all positions again: to a leader that has lost them, or under a new broker epoch."""
        for followed in self._followed.values():
            if followed.named_in != NOT_NAMED:
                self._position(followed)

    def close(self) -> None:
        for followed in self._followed.values():
            self._drop(followed)
        self._followed = {}
        # A running truncation continues to its end: half of it would leave the log unusable.
        self._session.close()

    def _drop(self, followed: Followed) -> None:
        self._due.pop(followed, None)
        self._set_syncing(followed, False)
        followed.named_in = NOT_NAMED
        if followed.retry is not None:
            followed.retry.cancel()
            followed.retry = None

    def _is_current(self, followed: Followed) -> bool:
        return self._followed.get(followed.key) is followed and followed.partition.role is followed.role

    # -- positions -----------------------------------------------------------------------------------------------------

    def _position(self, followed: Followed) -> None:
        """Include the partition in the next fetch, as soon as its log is durable."""
        followed.named_in = NOT_NAMED
        if followed.retry is not None:
            followed.retry.cancel()
            followed.retry = None
        position = followed.partition.fetch_position()
        self._set_syncing(followed, position is None)
        if position is not None:
            followed.position = position
            self._due[followed] = None
            self._session.kick()

    def _set_syncing(self, followed: Followed, is_syncing: bool) -> None:
        self._syncing += is_syncing - followed.is_syncing
        followed.is_syncing = is_syncing

    def _later(self, followed: Followed, pause_s: float) -> None:
        followed.named_in = NOT_NAMED
        if followed.retry is None:
            followed.retry = self._loop.call_later(pause_s, self._position, followed)

    # -- session callbacks ---------------------------------------------------------------------------------------------

    def has_due(self) -> bool:
        return bool(self._due)

    def may_wait(self) -> bool:
        if not self._followed:
            return True
        return self._syncing > 0 and self._loop.time() < self._sync_wait_until_s

    def connected(self) -> None:
        self._forgotten.clear()
        self.name_all()

    def named(self, number: int) -> tuple[list[FetchTopic], list[tuple[UUID, int]]]:
        topics: dict[UUID, FetchTopic] = {}
        due, self._due = self._due, {}
        for followed in due:
            partition = followed.partition
            topic = topics.get(partition.topic_id)
            if topic is None:
                topic = topics[partition.topic_id] = FetchTopic(None, partition.topic_id, [])
            offset, last_epoch = followed.position
            followed.named_in = number
            topic.partitions.append(
                FetchPartition(
                    partition.index,
                    followed.role.leader_epoch,
                    offset,
                    last_epoch,
                    partition.durable_log_start,
                    followed.bytes_max,
                    partition.high_watermark,
                )
            )
        forgotten, self._forgotten = list(self._forgotten), {}
        return list(topics.values()), forgotten

    def answered(self, number: int, response: FetchResponse) -> None:
        syncing = self._syncing
        for _, topic_id, partitions in response.topics:
            for answer in partitions:
                followed = None if topic_id is None else self._followed.get((topic_id, answer.partition))
                # If a later fetch included the partition again, only that fetch's response is used.
                if followed is not None and NOT_NAMED < followed.named_in <= number and self._is_current(followed):
                    self._take(followed, answer)
        if self._syncing > syncing:
            self._sync_wait_until_s = self._loop.time() + SYNC_WAIT_S
            self._loop.call_later(SYNC_WAIT_S, self._session.kick)

    # -- responses -----------------------------------------------------------------------------------------------------

    def _take(self, followed: Followed, response: FetchPartitionResponse) -> None:
        code = response.error_code
        if code and code != ErrorCode.offset_out_of_range:
            self._failed(followed, ErrorCode(code))
            return
        try:
            records = memoryview(response.records)
            batches = check_batches(records, len(records), from_producer=False) if len(records) else []
            self._decide(followed, response, records, batches)
        except KafkaError as error:
            # A full disk, or records corrupted in transit.
            self._failed(followed, error.code, error.message)
        except Exception:
            self._log.exception("follow_failed", topic=followed.partition.topic, partition=followed.partition.index)
            self._later(followed, FAILED_RETRY_S)

    def _decide(
        self, followed: Followed, response: FetchPartitionResponse, records: memoryview, batches: Batches
    ) -> None:
        partition, diverging = followed.partition, response.diverging_epoch
        answer = Answer(
            *followed.position,
            response.high_watermark,
            response.log_start_offset,
            [FetchedBatch(h.base_offset, h.next_offset, h.partition_leader_epoch) for _, h in batches],
            None if diverging is None else EpochEnd(*diverging),
            is_out_of_range=bool(response.error_code),
        )
        log = partition.log
        end = log.log_end_offset
        last_epoch = log.epoch_of(end - 1) if end > log.log_start_offset else NO_EPOCH
        own = OwnLog(log.log_start_offset, end, last_epoch, log.end_offset_for_epoch)
        match followed.role.answered(answer, own):
            case Append():
                partition.append_fetched(records, batches, self._home.wall_ms())
                followed.appended(len(records), self._loop.time())
                self._position(followed)
                self._fits(followed, response)
            case Nothing():
                self._fits(followed, response)
            case Truncate() | StartOver() as decision:
                followed.named_in = NOT_NAMED
                self._run(self._cut(followed, decision, response, records, batches))
            case Refuse(offset=offset):
                partition.refuse_to_follow(offset)
                self._later(followed, REFUSED_RETRY_S)
            case AskAgain(reason=reason):
                self._failed(followed, ErrorCode.none, reason)

    def _fits(self, followed: Followed, response: FetchPartitionResponse) -> None:
        """Take the watermark and log start from a response that continues this node's log."""
        followed.failures = 0
        followed.is_reported = False
        partition = followed.partition
        partition.told_watermark(response.high_watermark)
        start = min(response.log_start_offset, partition.high_watermark)
        if start > partition.durable_log_start and not followed.is_trimming:
            followed.is_trimming = True
            self._run(self._trim(followed, start))

    def _failed(self, followed: Followed, code: ErrorCode, reason: str = "") -> None:
        is_expected = code in EXPECTED_ERRORS
        if not is_expected and not followed.is_reported:
            followed.is_reported = True
            self._log.warning(
                "fetch_failed",
                topic=followed.partition.topic,
                partition=followed.partition.index,
                error=code.name,
                reason=reason,
            )
        pause_s = min(RETRY_S_MIN * 2 ** min(followed.failures, 10), RETRY_S_MAX) if is_expected else FAILED_RETRY_S
        followed.failures += 1
        self._later(followed, pause_s)

    # -- truncation and log start --------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name=f"follow-node-{self.leader_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cut(
        self,
        followed: Followed,
        decision: Truncate | StartOver,
        response: FetchPartitionResponse,
        records: memoryview,
        batches: Batches,
    ) -> None:
        partition = followed.partition
        is_done = False
        try:
            is_done = await self._home.cut(partition, followed.role, decision)
            if is_done and isinstance(decision, StartOver) and batches and self._is_current(followed):
                partition.append_fetched(records, batches, self._home.wall_ms())
                self._fits(followed, response)
        except Exception:
            self._log.exception("cut_failed", topic=partition.topic, partition=partition.index)
        if not self._is_current(followed):
            return
        if is_done:
            self._position(followed)
        else:
            self._later(followed, FAILED_RETRY_S)

    async def _trim(self, followed: Followed, offset: int) -> None:
        """Delete records below the leader's log start, and report that: a DeleteRecords request may wait for it."""
        partition = followed.partition
        is_done = False
        try:
            await self._home.follow_log_start(partition, offset)
            is_done = True
        except Exception:
            self._log.exception("trim_failed", topic=partition.topic, partition=partition.index)
        followed.is_trimming = False
        if followed.named_in == NOT_NAMED or not self._is_current(followed):
            return
        if is_done:
            self._position(followed)
        else:
            self._later(followed, FAILED_RETRY_S)
