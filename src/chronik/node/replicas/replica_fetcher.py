"""The fetcher for one leader: it fetches all partitions that this node replicates from that leader, in one session.

A fetch includes a partition when its position changed, and the leader then responds once (see `replica_sessions`). So
one long poll is in flight. A fetch offset states what this node has durably. After records arrive, the partition waits
for their sync, so that one fetch states that and requests the next records.

If the leader has more than one response holds, the partition is fetched ahead instead: the fetch states what is durable
and, separately, what was received, from where the leader continues. The end of each sync is reported at once. So the
disk limits replication by its bandwidth and not by the time of a sync. What is received and not durable is bounded. A
leader of an older release does not know received positions, and is never fetched ahead.

A partition that waits does not delay the other partitions: it is included once it is ready, in a second fetch that
makes the leader end the first.

After an error, or a response that does not fit the log, the follower fetches again after a pause. It never drops a
partition for that: the leader may not know yet that it leads, or this node may not know yet that the leader changed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from uuid import UUID

from chronik.client.connection import Connection
from chronik.client.errors import ClientError, ConnectionLost
from chronik.node.replicas.partition import Partition
from chronik.node.runtime import Runtime
from chronik.node.topic_settings import is_throttled
from chronik.observe.logging import Logger
from chronik.replication.follower import (
    NO_EPOCH,
    Append,
    EpochEnd,
    FetchAgain,
    FetchedBatch,
    LeaderAnswer,
    LocalLog,
    NoData,
    PartitionFollower,
    Refuse,
    StartOver,
    Truncate,
)
from chronik.replication.throttle import ReplicationThrottle
from chronik.storage.syncing import UNSYNCED_FILES_MAX
from chronik.wire.api import ApiKey
from chronik.wire.batch import BatchHeader, check_batches
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest
from chronik.wire.fetch import (
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ReceivedPosition,
    read_fetch_response,
    write_fetch_request,
)

FETCH_VERSION = 18
WAIT_MS = 500
ANSWER_TIMEOUT_S = 3.0
"""If a leader leaves a fetch unanswered this long beyond its max wait, the follower reconnects."""
RESPONSE_BYTES_MAX = 8 * 1024 * 1024
IN_FLIGHT_MAX = 2
PAUSE_S_MIN = 0.02
PAUSE_S_MAX = 1.0
REFUSED_PAUSE_S = 0.1
SESSION_EPOCH_MAX = 0x7FFFFFFF
SESSION_ERRORS = (ErrorCode.fetch_session_id_not_found, ErrorCode.invalid_fetch_session_epoch)
SYNC_WAIT_S = 0.005
"""How long an idle session waits for the sync of the last records, and how often a partition with little to receive is
fetched ahead."""
UNSYNCED_BYTES_MAX = 128 * 1024 * 1024
"""Nothing is fetched ahead while this many bytes of the leader's partitions are received and not durable. With syncs of
300 ms, half of it is synced while the other half arrives, at 200 MB/s. A partition whose log is durable is fetched all
the same, once."""
UNSYNCED_SEGMENTS_MAX = UNSYNCED_FILES_MAX // 2
"""The same in segments of the partition: beyond `UNSYNCED_FILES_MAX`, the loop itself would sync."""
RETRY_S_MIN = 0.01
RETRY_S_MAX = 0.5
REFUSED_RETRY_S = 5.0
FAILED_RETRY_S = 1.0
"""The pause after an error that is not caused by old metadata."""
THROTTLED_RETRY_S = 0.1
"""How often a throttled replica checks whether it may fetch, or has joined the ISR and need not wait."""

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

NOT_SENT = 0
Batches = list[tuple[int, BatchHeader]]


class FetcherHost(Protocol):
    """What a fetcher needs from replication, which runs the fetchers."""

    broker_epoch: int
    follower_throttle: ReplicationThrottle

    def connect(self, node_id: int) -> Awaitable[Connection]: ...

    async def truncate(self, partition: Partition, role: PartitionFollower, decision: Truncate | StartOver) -> bool:
        """Truncate the partition's log while no other job uses it; return whether it was truncated."""


@dataclass(slots=True, eq=False)
class Followed:
    """One followed partition: due, included in a fetch, or waiting for a sync, a truncation or a pause."""

    partition: Partition
    role: PartitionFollower
    sent_in: int = NOT_SENT
    """The number of the fetch that last requested its records, until a response brings more than a watermark."""
    position: tuple[int, int] = (-1, NO_EPOCH)
    """Where its log ended in that fetch."""
    reported_end: int = -1
    """The durable end in the fetch that last included it."""
    unsynced: deque[tuple[int, int]] = field(default_factory=deque)
    """The appends that are not durable yet: end offset and size in bytes."""
    unsynced_bytes: int = 0
    has_more: bool = False
    """Whether the leader had more records than a response holds, since the last sync ended."""
    is_truncating: bool = False
    is_trimming: bool = False
    is_reported: bool = False
    failures: int = 0
    retry: asyncio.TimerHandle | None = None

    key: tuple[UUID, int] = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.partition.topic_id, self.partition.index)

    def not_sent(self) -> None:
        self.sent_in = NOT_SENT
        if self.retry is not None:
            self.retry.cancel()
            self.retry = None


class ReplicaFetcher:
    """Owned by the loop. Call `follow` and `leave` as the metadata changes, and `close` when nothing is followed."""

    def __init__(self, runtime: Runtime, leader_id: int, host: FetcherHost) -> None:
        self.leader_id = leader_id
        self._runtime = runtime
        self._loop = runtime.loop
        self._host = host
        self._throttle = host.follower_throttle
        self._bytes_max = runtime.config.replica_fetch_bytes_max
        self._log = runtime.log.bind(component="replication", leader=leader_id)
        self._session = LeaderSession(runtime, leader_id, host, self, self._log)
        self._followed: dict[tuple[UUID, int], Followed] = {}
        self._due: dict[Followed, None] = {}
        self._reports: dict[Followed, None] = {}
        """Partitions whose durable end the next fetch reports, without a request for records."""
        self._waiting: dict[Followed, float] = {}
        """Partitions that wait for the sync of their last records, and until when, in this order."""
        self._wait_timer: asyncio.TimerHandle | None = None
        self._is_urgent = False
        """Whether a partition is due that has more records at the leader: the next fetch does not wait for syncs."""
        self._unsynced_bytes = 0
        self._forgotten: dict[tuple[UUID, int], None] = {}
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
        partition.on_durable = None if partition.acknowledges_unsynced else self._on_durable
        self._queue_position(followed)
        self._session.open()

    def leave(self, partition: Partition) -> None:
        followed = self._followed.get((partition.topic_id, partition.index))
        if followed is not None and followed.partition is partition:
            self._drop(followed)
            partition.on_durable = None
            del self._followed[followed.key]
            self._forgotten[followed.key] = None

    def _on_durable(self, partition: Partition) -> None:
        """Report the new durable end, with a request for records if none is pending."""
        followed = self._followed.get((partition.topic_id, partition.index))
        if followed is None:
            return
        self._count_unsynced(followed)
        is_idle = followed.sent_in == NOT_SENT and followed not in self._due and followed.retry is None
        if is_idle and not followed.is_truncating:
            self._queue_position(followed)
        else:
            self._report(followed)
        # What arrives from now on is small again, until a response shows otherwise.
        followed.has_more = False

    def resend_position(self, partition: Partition) -> None:
        """Update the position after the log end changed or must not be sent; ignore responses still in flight."""
        followed = self._followed.get((partition.topic_id, partition.index))
        if followed is not None:
            self._due.pop(followed, None)
            self._reports.pop(followed, None)
            self._count_unsynced(followed)
            self._queue_position(followed)

    def resend_positions(self) -> None:
        """Send all positions again: to a leader that has lost them, or under a new broker epoch."""
        for followed in self._followed.values():
            if followed.sent_in != NOT_SENT:
                self._queue_position(followed)

    def close(self) -> None:
        for followed in self._followed.values():
            self._drop(followed)
            followed.partition.on_durable = None
        self._followed = {}
        if self._wait_timer is not None:
            self._wait_timer.cancel()
        # A running truncation continues to its end: half of it would leave the log unusable.
        self._session.close()

    def _drop(self, followed: Followed) -> None:
        for queue in (self._due, self._reports):
            queue.pop(followed, None)
        self._waiting.pop(followed, None)
        self._unsynced_bytes -= followed.unsynced_bytes
        followed.not_sent()

    def _is_current(self, followed: Followed) -> bool:
        return self._followed.get(followed.key) is followed and followed.partition.role is followed.role

    # -- positions -----------------------------------------------------------------------------------------------------

    def _queue_position(self, followed: Followed) -> None:
        """Request the partition's next records in the next fetch, if the log is durable or may be fetched ahead.

        Otherwise a sync is pending, or what prevents the fetch ends with `resend_position`.
        """
        followed.not_sent()
        self._waiting.pop(followed, None)
        position = followed.partition.fetch_position()
        if position is None:
            return
        if not position.is_durable and not self._may_fetch_ahead(followed):
            self._report(followed)
        elif self._is_throttled(followed) and self._throttle.is_exceeded(self._loop.time()):
            self._retry_later(followed, THROTTLED_RETRY_S)
        else:
            self._due[followed] = None
            self._session.kick()

    def _report(self, followed: Followed) -> None:
        """Report the durable end in the next fetch, if it has changed and the leader takes it without a request."""
        if self._session.takes_received and followed.partition.durable_end_offset > followed.reported_end:
            self._reports[followed] = None
            self._session.kick()

    def _may_fetch_ahead(self, followed: Followed) -> bool:
        log = followed.partition.log
        return (
            followed.has_more
            and self._session.takes_received
            and not log.read_only
            and self._unsynced_bytes < UNSYNCED_BYTES_MAX
            and followed.unsynced_bytes < UNSYNCED_SEGMENTS_MAX * log.config.segment_bytes
        )

    def _count_unsynced(self, followed: Followed) -> None:
        """Remove what is durable, truncated, or lost by a failed sync."""
        partition, unsynced = followed.partition, followed.unsynced
        durable_end, end = partition.durable_end_offset, partition.log_end_offset
        removed_bytes = 0
        while unsynced and (unsynced[0][0] <= durable_end or partition.log.read_only_forever):
            removed_bytes += unsynced.popleft()[1]
        while unsynced and unsynced[-1][0] > end:
            removed_bytes += unsynced.pop()[1]
        followed.unsynced_bytes -= removed_bytes
        self._unsynced_bytes -= removed_bytes

    def _appended(self, followed: Followed, size_bytes: int) -> None:
        """Fetch the partition again after its records were appended: ahead of their sync if the leader has more."""
        partition = followed.partition
        if partition.durable_end_offset >= partition.log_end_offset:
            self._queue_position(followed)
            return
        followed.unsynced.append((partition.log_end_offset, size_bytes))
        followed.unsynced_bytes += size_bytes
        self._unsynced_bytes += size_bytes
        # The leader sends whole batches.
        is_full = 2 * size_bytes >= self._bytes_max
        followed.has_more = followed.has_more or is_full
        if is_full and self._may_fetch_ahead(followed):
            self._is_urgent = True
            self._queue_position(followed)
        else:
            self._wait_for_sync(followed)

    # -- waiting for syncs ---------------------------------------------------------------------------------------------

    def _wait_for_sync(self, followed: Followed) -> None:
        followed.not_sent()
        until_s = self._waiting[followed] = self._loop.time() + SYNC_WAIT_S
        if self._wait_timer is None:
            self._wait_timer = self._loop.call_at(until_s, self._end_waits)

    def _end_waits(self) -> None:
        """Fetch on without the syncs of partitions that have waited long enough: ahead if there was much to receive.

        This keeps their next sync full; the others are fetched when they are durable.
        """
        self._wait_timer = None
        now_s = self._loop.time()
        for followed, until_s in list(self._waiting.items()):
            if until_s > now_s:
                self._wait_timer = self._loop.call_at(until_s, self._end_waits)
                break
            self._queue_position(followed)
        self._session.kick()

    def _is_throttled(self, followed: Followed) -> bool:
        """Whether the follower's rate limits this replica: it is listed, and not in sync."""
        partition = followed.partition
        return (
            self._throttle.is_limited
            and is_throttled(partition.settings.follower_throttled, partition.index, partition.node_id)
            and partition.node_id not in partition.in_sync_replicas
        )

    def _retry_later(self, followed: Followed, pause_s: float) -> None:
        followed.sent_in = NOT_SENT
        if followed.retry is None:
            followed.retry = self._loop.call_later(pause_s, self._queue_position, followed)

    # -- session callbacks ---------------------------------------------------------------------------------------------

    def has_due(self) -> bool:
        return bool(self._due or self._reports)

    def may_wait(self) -> bool:
        """Whether new positions are expected shortly, so that an idle session waits for them."""
        return not self._followed or (bool(self._waiting) and not self._is_urgent)

    def connected(self) -> None:
        """A new session begins: the leader knows no positions yet."""
        self._forgotten.clear()
        self._reports.clear()
        self.resend_positions()

    def next_positions(self, number: int) -> tuple[list[FetchTopic], list[tuple[UUID, int]]]:
        """Return the partitions that fetch `number` includes, and those it removes from the session."""
        topics: dict[UUID, FetchTopic] = {}
        due, self._due = self._due, {}
        reports, self._reports = self._reports, {}
        self._is_urgent = False
        for followed in due:
            reports.pop(followed, None)
            self._add_position(topics, followed, number)
        for followed in reports:
            self._add_position(topics, followed, NOT_SENT)
        forgotten, self._forgotten = list(self._forgotten), {}
        return list(topics.values()), forgotten

    def _add_position(self, topics: dict[UUID, FetchTopic], followed: Followed, number: int) -> None:
        """Add the partition's present position, as a request for records in fetch `number` or as a report."""
        partition, wants_records = followed.partition, number != NOT_SENT
        position = partition.fetch_position()
        if position is None and wants_records:
            # Something else has begun to change the log: look again when it may have ended.
            self._retry_later(followed, FAILED_RETRY_S)
        if position is None or not (position.is_durable or self._session.takes_received):
            # In another session since: the end of a sync queues it again.
            return
        bytes_max = 0
        if wants_records:
            followed.sent_in = number
            followed.position = (position.end, position.last_epoch)
            bytes_max = self._bytes_max
            if self._is_throttled(followed):
                bytes_max = min(bytes_max, self._throttle.bytes_max)
        followed.reported_end = position.durable_end
        received: ReceivedPosition | None = None
        if not (wants_records and position.is_durable):
            received = ReceivedPosition(position.end, position.last_epoch, wants_records)
        topic = topics.get(partition.topic_id)
        if topic is None:
            topic = topics[partition.topic_id] = FetchTopic(None, partition.topic_id, [])
        topic.partitions.append(
            FetchPartition(
                partition.index,
                followed.role.leader_epoch,
                position.durable_end,
                position.durable_epoch,
                partition.durable_log_start,
                bytes_max,
                partition.high_watermark,
                received,
            )
        )

    def answered(self, number: int, response: FetchResponse) -> None:
        for _, topic_id, partitions in response.topics:
            for answer in partitions:
                followed = None if topic_id is None else self._followed.get((topic_id, answer.partition))
                # If a later fetch requested the partition again, only that fetch's response is used.
                if followed is not None and NOT_SENT < followed.sent_in <= number and self._is_current(followed):
                    self._handle(followed, answer)

    # -- responses -----------------------------------------------------------------------------------------------------

    def _handle(self, followed: Followed, response: FetchPartitionResponse) -> None:
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
            self._log.exception("follow_failed", **followed.partition.log_fields)
            self._retry_later(followed, FAILED_RETRY_S)

    def _decide(
        self, followed: Followed, response: FetchPartitionResponse, records: memoryview, batches: Batches
    ) -> None:
        partition, diverging = followed.partition, response.diverging_epoch
        fetch_offset, last_fetched_epoch = followed.position
        answer = LeaderAnswer(
            fetch_offset,
            last_fetched_epoch,
            response.high_watermark,
            response.log_start_offset,
            [FetchedBatch(h.base_offset, h.next_offset, h.partition_leader_epoch) for _, h in batches],
            None if diverging is None else EpochEnd(*diverging),
            is_out_of_range=bool(response.error_code),
            received_ms=int(self._loop.time() * 1000),
        )
        log = partition.log
        own = LocalLog(
            log.log_start_offset,
            log.log_end_offset,
            partition.last_epoch,
            log.end_offset_for_epoch,
            log.undecided_from,
            partition.is_dispensable,
        )
        match followed.role.decide(answer, own):
            case Append():
                partition.append_fetched(records, batches, self._runtime.env.wall_ms())
                if self._is_throttled(followed):
                    self._throttle.record(len(records), self._loop.time())
                self._appended(followed, len(records))
                self._take_watermarks(followed, response)
            case NoData():
                self._take_watermarks(followed, response)
            case Truncate() | StartOver() as decision:
                followed.sent_in = NOT_SENT
                followed.is_truncating = True
                self._run(self._truncate(followed, decision, response, records, batches))
            case Refuse(offset=offset):
                partition.refuse_to_follow(offset)
                self._retry_later(followed, REFUSED_RETRY_S)
            case FetchAgain(reason=reason):
                self._failed(followed, ErrorCode.none, reason)

    def _take_watermarks(self, followed: Followed, response: FetchPartitionResponse) -> None:
        """Take the watermark and log start from a response that continues this node's log."""
        followed.failures = 0
        followed.is_reported = False
        partition = followed.partition
        partition.leader_watermark_received(response.high_watermark)
        start = min(response.log_start_offset, partition.high_watermark)
        if start > partition.durable_log_start and not followed.is_trimming:
            followed.is_trimming = True
            self._run(self._trim(followed, start))

    def _failed(self, followed: Followed, code: ErrorCode, reason: str = "") -> None:
        is_expected = code in EXPECTED_ERRORS
        if not is_expected and not followed.is_reported:
            followed.is_reported = True
            self._log.warning("fetch_failed", **followed.partition.log_fields, error=code.name, reason=reason)
        pause_s = min(RETRY_S_MIN * 2 ** min(followed.failures, 10), RETRY_S_MAX) if is_expected else FAILED_RETRY_S
        followed.failures += 1
        self._retry_later(followed, pause_s)

    # -- truncation and log start --------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name=f"follow-node-{self.leader_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _truncate(
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
            is_done = await self._host.truncate(partition, followed.role, decision)
            if is_done and isinstance(decision, StartOver) and batches and self._is_current(followed):
                partition.append_fetched(records, batches, self._runtime.env.wall_ms())
                self._take_watermarks(followed, response)
        except Exception:
            self._log.exception("cut_failed", **partition.log_fields)
        followed.is_truncating = False
        if self._is_current(followed):
            self._count_unsynced(followed)
            self._fetch_again(followed, is_done)

    async def _trim(self, followed: Followed, offset: int) -> None:
        """Delete records below the leader's log start, and report that: a DeleteRecords request may wait for it."""
        partition = followed.partition
        is_done = False
        try:
            if not partition.is_closed and not partition.jobs.is_exclusive:
                await partition.raise_log_start(offset)
            is_done = True
        except Exception:
            self._log.exception("trim_failed", **partition.log_fields)
        followed.is_trimming = False
        if followed.sent_in == NOT_SENT or not self._is_current(followed):
            return
        if is_done and self._session.takes_received:
            self._reports[followed] = None
            self._session.kick()
        else:
            self._fetch_again(followed, is_done)

    def _fetch_again(self, followed: Followed, is_done: bool) -> None:
        if is_done:
            self._queue_position(followed)
        else:
            self._retry_later(followed, FAILED_RETRY_S)


class LeaderSession:
    """The fetch session with one leader: one connection, one long poll, and recovery when either ends.

    Invariant: at most two fetches are in flight, and the second is sent only to end the first. Owned by the loop.
    """

    def __init__(
        self, runtime: Runtime, leader_id: int, host: FetcherHost, fetcher: ReplicaFetcher, log: Logger
    ) -> None:
        self._loop = runtime.loop
        self._node_id = runtime.node_id
        self._leader_id = leader_id
        self._host = host
        self._fetcher = fetcher
        self._log = log
        self._connection: Connection | None = None
        self.takes_received = False
        """Whether the leader understands received positions, as the first response of this session says."""
        self._version = FETCH_VERSION
        self._id = 0
        self._epoch = 0
        self._number = 0
        self._in_flight: deque[tuple[int, float]] = deque()
        self._is_kicked = False
        self._is_closed = False
        self._connecting: asyncio.Task[None] | None = None
        self._losses = 0
        """Consecutive connections that ended before any response."""
        self._watch: asyncio.TimerHandle | None = None

    def open(self) -> None:
        if self._connecting is None and self._connection is None and not self._is_closed:
            self._connecting = self._loop.create_task(self._reach(), name=f"follow-node-{self._leader_id}")

    def close(self) -> None:
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._watch is not None:
            self._watch.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _reach(self) -> None:
        pause_s = PAUSE_S_MIN
        if self._losses > 1:
            # A starting leader accepts connections before it can answer requests.
            await asyncio.sleep(min(PAUSE_S_MIN * 2 ** (self._losses - 2), PAUSE_S_MAX))
        while True:
            try:
                connection = await self._host.connect(self._leader_id)
                self._version = connection.version(ApiKey.FETCH, FETCH_VERSION)
                break
            except (ClientError, OSError) as error:
                self._log.debug("leader_not_reached", error=str(error))
            except Exception:
                self._log.exception("leader_not_reached")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        self._connecting = None
        self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        self._connection = connection
        self._id = self._epoch = 0
        self.takes_received = False
        self._in_flight.clear()
        if self._watch is None:
            self._watch = self._loop.call_later(ANSWER_TIMEOUT_S / 2, self._check_answers)
        self._fetcher.connected()
        self.kick()

    # -- requests ------------------------------------------------------------------------------------------------------

    def kick(self) -> None:
        """Send a fetch in the next loop turn if one is due, so that it includes everything from this turn."""
        if not self._is_kicked:
            self._is_kicked = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._is_kicked = False
        connection = self._connection
        if connection is None:
            return
        in_flight = len(self._in_flight)
        has_due = self._fetcher.has_due()
        # The session has no id before the first response, so a second fetch cannot end the first until then.
        if in_flight and (in_flight >= IN_FLIGHT_MAX or not has_due or not self._id):
            return
        if not in_flight and self._fetcher.may_wait():
            return
        self._number += 1
        topics, forgotten = self._fetcher.next_positions(self._number)
        request = FetchRequest(
            replica_id=self._node_id,
            replica_epoch=self._host.broker_epoch,
            max_wait_ms=WAIT_MS if self._id else 0,
            min_bytes=1,
            max_bytes=RESPONSE_BYTES_MAX,
            session_id=self._id,
            session_epoch=self._epoch,
            topics=topics,
            forgotten=[(None, topic_id, [index]) for topic_id, index in forgotten] if self._id else [],
        )
        if self._id:
            self._epoch = 1 if self._epoch == SESSION_EPOCH_MAX else self._epoch + 1
        self._in_flight.append((self._number, self._loop.time()))
        future = connection.send(ApiKey.FETCH, self._version, write_fetch_request(self._version, request))
        future.add_done_callback(partial(self._answered, connection, self._number))

    def _check_answers(self) -> None:
        self._watch = self._loop.call_later(ANSWER_TIMEOUT_S / 2, self._check_answers)
        oldest_s = self._loop.time() - WAIT_MS / 1000 - ANSWER_TIMEOUT_S
        if self._in_flight and self._in_flight[0][1] < oldest_s and self._connection is not None:
            self._log.warning("leader_does_not_answer")
            self._connection.close()

    # -- responses -----------------------------------------------------------------------------------------------------

    def _answered(self, connection: Connection, number: int, future: asyncio.Future[memoryview]) -> None:
        error: BaseException | None = asyncio.CancelledError() if future.cancelled() else future.exception()
        if connection is not self._connection:
            return
        if error is None:
            try:
                response = read_fetch_response(self._version, future.result())
            except MalformedRequest as malformed:
                error = malformed
        if error is not None:
            self._lost(error)
            return
        self._in_flight = deque(sent for sent in self._in_flight if sent[0] != number)
        if response.error_code:
            self._refused(ErrorCode(response.error_code))
            return
        if not self._id:
            self._id, self._epoch = response.session_id, 1
            self.takes_received = response.takes_received
        self._losses = 0
        self._fetcher.answered(number, response)
        self.kick()

    def _lost(self, error: BaseException) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if not self._is_closed:
            self._losses += 1
            say = self._log.info if self._losses == 1 else self._log.debug
            say("leader_connection_lost", error=str(error))
            self.open()

    def _refused(self, code: ErrorCode) -> None:
        """Start a new session after a top-level error: at once for a session error, otherwise after a pause."""
        connection, self._connection = self._connection, None
        is_over = code in SESSION_ERRORS
        if not is_over:
            self._log.info("leader_refused_fetch", error=code.name)
        if connection is not None:
            self._loop.call_later(0 if is_over else REFUSED_PAUSE_S, self._resume, connection)

    def _resume(self, connection: Connection) -> None:
        if self._is_closed or self._connection is not None:
            connection.close()
        elif connection.is_closed:
            self._lost(ConnectionLost("closed meanwhile"))
        else:
            self._begin(connection)
