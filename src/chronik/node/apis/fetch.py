"""Fetch (key 1), versions 4-18.

Behaviour
- Returns whole batches below the watermark, byte for byte as stored. The first non-empty partition ignores the size
  limits, so that a large batch never stalls its consumer.
- Waits up to max_wait_ms for min_bytes, summed over all partitions; an error in any partition ends the wait.
- Sessions (KIP-227) as in `fetch_sessions`; an incremental response contains only partitions that changed.
- read_committed (isolation level 1) ends at the last stable offset: the first record of the earliest transaction that
  is open, or whose marker is not committed. The response lists the aborted transactions of the returned range by first
  offset, from this replica's own log; the consumer skips their records. A fetch that waits counts stable bytes.
- A response is bounded by the node's fetch_bytes_max, whatever the client allows.
- A new leader waits, up to max_wait_ms, until its watermark reaches its epoch's start: clients may have seen a higher
  watermark. If it does not in time, the answer is OFFSET_NOT_AVAILABLE (before version 11 NOT_LEADER_OR_FOLLOWER).
- A consumer with a rack is redirected to an in-sync replica there (KIP-392), which serves up to its own watermark.
- Errors caused by old metadata include the current leader (KIP-951). If the client's epoch is not old, the leader is
  also the preferred read replica, for librdkafka.
- A response that exceeds the client's quota is replaced by one without partitions, with the throttle time (KIP-219).
  The limit of a response is the quota of all windows, so that a consumer always makes progress.
- Replicas of this cluster use their own kind of session, see `replica_sessions`.
Versions: 5 log start offset, 7 sessions, 9 leader epoch, 11 follower reads, 12 flexible and diverging epochs, 13 topic
ids, 15 replica state, 16 node endpoints, 17 directory ids, 18 the follower's watermark.
Not supported: records above the watermark for consumers, except with `visibility=appended`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from chronik.authorization.acls import Operation, ResourceType
from chronik.metadata.image import ClusterImage
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition import BAD_BATCH, ColdOutcomes, ColdRead, Partition, is_damage, run_cold_reads
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Handler
from chronik.node.serving.connection import Buffer, Reply, Request
from chronik.node.serving.fetch_sessions import (
    NO_SESSION,
    FetchSession,
    FetchSessions,
    TopicKey,
    topic_key,
)
from chronik.node.serving.server import Server
from chronik.observe.traces import PartitionTrace, TraceRing, error_name
from chronik.storage.aborted import AbortedJob, AbortedTransaction
from chronik.storage.reading import ReadJob
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import (
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    TopicResponse,
    read_fetch_request,
    write_fetch_response,
)
from chronik.wire.primitives import uuid_of

READ_COMMITTED = 1
FOLLOWER_READS_FROM_VERSION = 11
NODE_ENDPOINTS_FROM_VERSION = 16
OLD_METADATA = (ErrorCode.not_leader_or_follower, ErrorCode.fenced_leader_epoch)
NO_TOPIC = -1
WAIT_MS_MAX = 5 * 60 * 1000
UNLIMITED_BYTES = 2**63

AbortedTransactions: TypeAlias = "list[AbortedTransaction]"


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of the node that this API uses."""

    runtime: Runtime
    metadata: MetadataLog
    host: PartitionHost
    server: Server
    fetch_sessions: FetchSessions


def handle(node: Services, request: Request, reply: Reply) -> None:
    fetch = read_fetch_request(request.api_version, request.frame, request.body_at)
    if fetch.replica_id >= 0:
        access = request.access
        if not (access.is_open or access.allows(Operation.CLUSTER_ACTION, ResourceType.CLUSTER)):
            _refuse_replica(request, reply, fetch)
            return
        if node.host.is_open:
            node.host.replica_sessions.handle(request, reply, fetch)
        else:
            reply.failed = True
            reply.send(write_fetch_response(request.api_version, ErrorCode.broker_not_available, NO_SESSION, []))
        return
    try:
        session, incremental = node.fetch_sessions.resolve(fetch, request.started_s, request.access.principal)
    except KafkaError as error:
        reply.failed = True
        reply.send(write_fetch_response(request.api_version, error.code, NO_SESSION, []))
        return
    PendingFetch(node, request, reply, fetch, session, incremental).start()


def _refuse_replica(request: Request, reply: Reply, fetch: FetchRequest) -> None:
    """Refuse all partitions of a client that claims to be a replica."""
    topics = [
        (
            topic.name,
            topic.topic_id,
            [
                FetchPartitionResponse(requested.partition, error_code=ErrorCode.topic_authorization_failed)
                for requested in topic.partitions
            ],
        )
        for topic in fetch.topics
    ]
    reply.failed = True
    reply.send(write_fetch_response(request.api_version, 0, NO_SESSION, topics))


class PendingFetch:
    """A fetch until it is answered: reads the available data, and waits for more if that is not enough.

    A consumer may request thousands of partitions each time, of which few have news. So a fetch that has waited reads
    only the partitions that notified it, once for all that did in the same turn of the loop.

    Owned by the loop. Answered once: with data, at its deadline, or never if its connection closes first.
    """

    __slots__ = (
        "_arrived_bytes",
        "_fetch",
        "_held_back",
        "_incremental",
        "_is_full",
        "_is_over",
        "_is_read_committed",
        "_is_settling",
        "_keys",
        "_lookups",
        "_min_bytes",
        "_news",
        "_node",
        "_partitions",
        "_quota_bytes_max",
        "_reading",
        "_reply",
        "_request",
        "_requested",
        "_responses",
        "_session",
        "_stable",
        "_timer",
        "_topics",
        "_trace",
        "_waiting_on",
        "_wake",
    )

    def __init__(
        self,
        node: Services,
        request: Request,
        reply: Reply,
        fetch: FetchRequest,
        session: FetchSession | None,
        incremental: bool,
    ) -> None:
        self._node = node
        self._request = request
        self._reply = reply
        self._fetch = fetch
        self._session = session
        self._incremental = incremental
        # Lists with one item for each requested partition, because a tuple for each is more work for the collector.
        self._requested: list[FetchPartition] = []
        self._topics: list[int] = []
        """Numbers, as positions in `_keys`: a compiled comparison of two keys compares their content."""
        self._keys: list[TopicKey] = []
        self._list_requested()
        self._responses: list[FetchPartitionResponse] = []
        """As of the last read of each partition."""
        self._partitions: list[Partition] = []
        """Filled by a read of all partitions without an error."""
        self._waiting_on: dict[Partition, int] = {}
        """The position of each partition in these lists, while the fetch waits for data."""
        self._news: dict[int, None] = {}
        """The positions of the partitions to read again."""
        self._wake: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._arrived_bytes = 0
        self._reading = False
        self._is_over = False
        self._is_full = False
        """The response cannot grow by waiting: the limits are reached, or the consumer should read elsewhere."""
        self._is_settling = False
        """A partition's new leader may have the data in a moment."""
        self._is_read_committed = fetch.isolation_level == READ_COMMITTED
        self._lookups: list[AbortedLookup] = []
        """Begun by the last `_read` of a read_committed fetch, if what it returns may contain aborted transactions."""
        self._stable: dict[Partition, int] = {}
        """The last stable offset of each partition that a read_committed fetch waits for."""
        self._held_back: set[Partition] = set()
        """The partitions of `_stable` in which an open transaction hides visible records."""
        limits = request.limits
        quota_bytes_max = None if limits is None else limits.fetch_bytes_max
        self._quota_bytes_max = UNLIMITED_BYTES if quota_bytes_max is None else quota_bytes_max
        """What the client's quota allows in a response."""
        # Never wait for more bytes than the limits allow in a response.
        self._min_bytes = min(
            fetch.min_bytes, fetch.max_bytes, node.server.response_bytes_allowed(), self._quota_bytes_max
        )
        self._trace: FetchTrace | None = self._traced() if node.runtime.traces.topics else None

    def _traced(self) -> FetchTrace:
        node = self._node
        names = [self._name(key) for key in self._keys]
        named = [(names[topic], each) for topic, each in zip(self._topics, self._requested, strict=True)]
        return FetchTrace(node.runtime.traces, self._request, self._fetch, named, node.runtime.loop.time)

    def _list_requested(self) -> None:
        numbers: dict[TopicKey, int] = {}
        if self._session is not None:
            partitions = self._session.partitions
            self._requested = [partition.requested for partition in partitions.values()]
            self._topics = [numbers.setdefault(key, len(numbers)) for key, _ in partitions]
        else:
            for topic in self._fetch.topics:
                number = numbers.setdefault(topic_key(topic.name, topic.topic_id), len(numbers))
                self._requested += topic.partitions
                self._topics += [number] * len(topic.partitions)
        self._keys = list(numbers)

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        limits = self._request.limits
        if limits is not None and limits.is_over():
            self._answer([])
            return
        size_bytes, failed, cold = self._read_all()
        if cold:
            self._read_cold(cold)
        elif (
            failed
            or self._is_full
            or (size_bytes >= self._min_bytes and not self._is_settling)
            or self._fetch.max_wait_ms <= 0
            or not self._requested
        ):
            self._finish_reading()
        else:
            self._cancel_lookups()
            self._wait(size_bytes)

    def _wait(self, size_bytes: int) -> None:
        self._arrived_bytes = size_bytes
        waiting_on = self._waiting_on
        for at, partition in enumerate(self._partitions):
            partition.wait_for_data(self)
            waiting_on[partition] = at
            response = self._responses[at]
            if len(response.records):
                # Read again later: thousands of waiting fetches must not hold records in memory.
                response.records = b""
                self._news[at] = None
            if self._is_read_committed:
                # The offsets that were read in this turn of the loop, unless the partition is settling.
                stable = partition.last_stable_offset if response.error_code else response.last_stable_offset
                self._stable[partition] = stable
                if stable < partition.visible_end_offset:
                    self._held_back.add(partition)
        if self._trace is not None:
            self._trace.waits()
        loop = self._node.runtime.loop
        self._timer = loop.call_later(min(self._fetch.max_wait_ms, WAIT_MS_MAX) / 1000, self._finish)
        self._request.connection.when_closed(self, self._abandon)

    def data_arrived(self, partition: Partition, size_bytes: int) -> None:
        at = self._waiting_on.get(partition)
        if at is None:
            return
        self._news[at] = None
        if self._is_read_committed:
            size_bytes = self._stable_bytes(partition, size_bytes)
            if not size_bytes:
                return
        self._arrived_bytes += size_bytes
        if self._trace is not None:
            self._trace.arrived(partition.trace, size_bytes)
        if self._wake is None and self._arrived_bytes >= self._min_bytes and not partition.is_settling:
            # In the next turn of the loop, with everything that arrives in this one.
            self._wake = self._node.runtime.loop.call_soon(self._finish_with_news)

    def _stable_bytes(self, partition: Partition, size_bytes: int) -> int:
        """Return how many bytes have become stable, when `size_bytes` have become visible."""
        before = self._stable[partition]
        stable = self._stable[partition] = partition.last_stable_offset
        if stable < partition.visible_end_offset:
            self._held_back.add(partition)
        elif partition in self._held_back:
            self._held_back.remove(partition)
        else:
            return size_bytes
        return partition.log.bytes_between(before, stable)

    def partition_gone(self) -> None:
        self._finish()

    def _finish_with_news(self) -> None:
        is_listed_twice = len(self._waiting_on) < len(self._requested)
        if self._is_settling or is_listed_twice or not self._node.host.replication.lease_is_valid():
            # What was read before may be wrong by now.
            self._news = {}
        self._end_wait()

    def _finish(self) -> None:
        """Answer with a new read of all partitions."""
        self._news = {}
        self._end_wait()

    def _end_wait(self) -> None:
        if self._is_over or self._reading:
            return
        self._stop_waiting()
        limits = self._request.limits
        if limits is None:
            self._read_again()
        else:
            limits.run(self._read_again)

    def _read_again(self) -> None:
        _, _, cold = self._read(sorted(self._news)) if self._news else self._read_all()
        if cold:
            self._read_cold(cold)
        else:
            self._finish_reading()

    def _abandon(self) -> None:
        self._is_over = True
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        for handle in (self._timer, self._wake):
            if handle is not None:
                handle.cancel()
        self._timer = self._wake = None
        for partition in self._waiting_on:
            partition.stop_waiting(self)
        self._waiting_on = {}
        self._request.connection.forget(self)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _name(self, topic: TopicKey) -> str | None:
        name, topic_id = topic
        if name is None and topic_id is not None:
            name = self._node.metadata.image.names_by_id.get(uuid_of(topic_id))
        return name

    def _read_all(self) -> tuple[int, bool, list[ColdRead]]:
        self._responses = [FetchPartitionResponse(requested.partition) for requested in self._requested]
        self._partitions = []
        return self._read(range(len(self._requested)))

    def _read(self, positions: Sequence[int]) -> tuple[int, bool, list[ColdRead]]:
        """Read the partitions at these positions, in this order, up to the size limit.

        Return the number of bytes, whether any partition has an error, and the reads that miss the page cache, which
        are left to the caller.
        """
        left_bytes = min(self._fetch.max_bytes, self._node.server.response_bytes_allowed(), self._quota_bytes_max)
        responses, hosted = self._responses, self._node.host.partitions
        is_full_read = not self._partitions
        size_bytes = 0
        failed = False
        cold: list[ColdRead] = []
        has_lease = self._node.host.replication.lease_is_valid()
        topic = NO_TOPIC
        name: str | None = None
        may_read = True
        for at in positions:
            requested = self._requested[at]
            index = requested.partition
            response = responses[at]
            if not is_full_read:
                response = responses[at] = FetchPartitionResponse(index)
            partition: Partition | None = None
            try:
                if self._topics[at] != topic:
                    topic = self._topics[at]
                    name = self._name(self._keys[topic])
                    may_read = name is None or self._may_read(name)
                if name is None:
                    raise KafkaError(ErrorCode.unknown_topic_id)
                if not may_read:
                    raise KafkaError(ErrorCode.topic_authorization_failed)
                partition = hosted.get((name, index))
                if partition is None or not has_lease or not partition.accepts_requests:
                    partition = self._require(name, index, partition)
                partition.check_leader_epoch(requested.current_leader_epoch)
                if is_full_read:
                    self._partitions.append(partition)
                response.high_watermark = partition.visible_end_offset
                response.last_stable_offset = partition.last_stable_offset
                response.log_start_offset = partition.log_start_offset
                if self._trace is not None:
                    self._trace.seen(at, partition.high_watermark, partition.log_end_offset)
                read = self._read_partition(partition, requested, response, left_bytes, size_bytes == 0)
                if read is None:
                    continue
                if isinstance(read, ColdRead):
                    cold.append(read)
                    size_bytes += 1
                    left_bytes -= read.max_bytes
                else:
                    response.records = read
                    size_bytes += len(read)
                    left_bytes -= len(read)
            except KafkaError as error:
                failed = True
                response.error_code = error.code
            except Exception as error:
                failed = True
                if partition is not None and is_damage(error):
                    partition.found_damaged(requested.fetch_offset, "read", str(error))
                    response.error_code = ErrorCode.kafka_storage_error
                    continue
                self._node.runtime.log.exception("read_failed", topic=name, partition=index)
                response.error_code = ErrorCode.unknown_server_error
        return size_bytes, failed, cold

    def _may_read(self, topic: str) -> bool:
        """Decide again in each read, also for partitions that only the session names.

        So a right that was withdrawn ends with the next fetch at the latest.
        """
        access = self._request.access
        return access.is_open or access.allows(Operation.READ, ResourceType.TOPIC, topic)

    def _require(self, topic: str, index: int, hosted: Partition | None) -> Partition:
        """Return the partition if this node may serve it: as the leader, or as a follower for a client with a rack."""
        may_follow = self._request.api_version >= FOLLOWER_READS_FROM_VERSION and self._fetch.rack_id
        if hosted is not None and may_follow and hosted.follows:
            return hosted
        return self._node.host.require_leader(topic, index)

    def _read_partition(
        self,
        partition: Partition,
        requested: FetchPartition,
        response: FetchPartitionResponse,
        left_bytes: int,
        is_first: bool,
    ) -> Buffer | ColdRead | None:
        offset = requested.fetch_offset
        upto = response.high_watermark
        if self._is_read_committed:
            upto = response.last_stable_offset
            response.aborted_transactions = ()
        if partition.is_settling:
            # The client sees this error only if the wait does not help.
            self._is_settling = True
            knows_error = self._request.api_version >= FOLLOWER_READS_FROM_VERSION
            response.error_code = ErrorCode.offset_not_available if knows_error else ErrorCode.not_leader_or_follower
            response.high_watermark = response.last_stable_offset = -1
            return None
        if offset < partition.log_start_offset or offset > partition.log_end_offset:
            if partition.leader is None and offset > partition.log_end_offset:
                raise KafkaError(ErrorCode.offset_not_available)
            raise KafkaError(ErrorCode.offset_out_of_range)
        if self._fetch.rack_id and self._request.api_version >= FOLLOWER_READS_FROM_VERSION:
            replica = _read_replica(self._node.metadata.image, partition, self._fetch.rack_id, offset)
            if replica is not None:
                response.preferred_read_replica = replica
                self._is_full = True
                return None
        if offset >= upto:
            return None
        if left_bytes <= 0 and not is_first:
            self._is_full = True
            return None
        max_bytes = max(0, min(requested.max_bytes, left_bytes))
        log = partition.log
        read = log.read(offset, max_bytes, upto, min_one_batch=is_first)
        if read is None:
            lookup = self._begin_lookup(partition, response, offset, min(upto, log.read_limit(offset)))
            cold = partition.cold_read(response, offset, max_bytes, upto, min_one_batch=is_first)
            if lookup is not None:
                lookup.read = cold.job
            return cold
        if read.next_offset < upto:
            self._is_full = True
        self._begin_lookup(partition, response, offset, read.next_offset)
        return read.data

    def _read_cold(self, cold: list[ColdRead]) -> None:
        """Read data that is not in the page cache in a thread, then answer."""
        self._reading = True
        connection = self._request.connection
        connection.when_closed(self, self._abandon)
        server = self._node.server
        reading_bytes = sum(read.max_bytes for read in cold)
        server.reading_bytes += reading_bytes

        def done(outcomes: ColdOutcomes | None) -> None:
            self._reading = False
            server.reading_bytes -= reading_bytes
            connection.forget(self)
            if self._is_over or outcomes is None:
                self._cancel_lookups()
                return
            for read, outcome in outcomes:
                self._fill(read, outcome)
            self._finish_reading()

        run_cold_reads(self._node.runtime, cold, done)

    def _fill(self, read: ColdRead, outcome: Buffer | Exception) -> None:
        partition, response = read.partition, read.response
        if partition.generation != read.generation or not (partition.leads or partition.follows):
            # The role changed or the lease expired: the data may be stale, or mix bytes of two logs.
            response.error_code = ErrorCode.not_leader_or_follower
        elif not isinstance(outcome, Exception):
            if read.job.damaged_at is None:
                response.records = outcome
            else:
                response.error_code = self._damaged(partition, read.job.damaged_at, BAD_BATCH)
        elif is_damage(outcome):
            # For example a broken chain of batches: this replica cannot reach the records after it.
            response.error_code = self._damaged(partition, read.job.offset, str(outcome))
        elif isinstance(outcome, KafkaError):
            response.error_code = outcome.code
        else:
            self._node.runtime.log.error("read_failed", partition=response.partition, error=repr(outcome))
            response.error_code = ErrorCode.kafka_storage_error

    def _damaged(self, partition: Partition, offset: int, reason: str) -> ErrorCode:
        """Report the damage. The client never gets the bad bytes: many do not check CRCs.

        KAFKA_STORAGE_ERROR makes it look for another leader; CORRUPT_MESSAGE tells its user.
        """
        is_elsewhere = partition.found_damaged(offset, "read", reason)
        return ErrorCode.kafka_storage_error if is_elsewhere else ErrorCode.corrupt_message

    # -- aborted transactions ------------------------------------------------------------------------------------------

    def _begin_lookup(
        self, partition: Partition, response: FetchPartitionResponse, offset: int, upto_offset: int
    ) -> AbortedLookup | None:
        """Begin to look up the aborted transactions of a range, if there may be any.

        Together with the read: compaction removes both, aborted records and their entries in the index.
        """
        job = partition.aborted_job(offset, upto_offset) if self._is_read_committed else None
        if job is None:
            return None
        if not partition.jobs.begin():
            job.close()
            raise KafkaError(ErrorCode.not_leader_or_follower)
        lookup = AbortedLookup(response, partition, partition.generation, job)
        self._lookups.append(lookup)
        return lookup

    def _cancel_lookups(self) -> None:
        lookups, self._lookups = self._lookups, []
        for lookup in lookups:
            lookup.job.close()
            lookup.partition.jobs.end()

    def _finish_reading(self) -> None:
        """Answer, after the lookups of the aborted transactions."""
        if not self._lookups:
            self._answer(self._responses)
            return
        lookups, self._lookups = self._lookups, []
        self._reading = True
        connection, runtime = self._request.connection, self._node.runtime
        connection.when_closed(self, self._abandon)

        def done(outcomes: asyncio.Future[list[AbortedTransactions | Exception]]) -> None:
            self._reading = False
            for lookup in lookups:
                lookup.partition.jobs.end()
            connection.forget(self)
            if self._is_over or outcomes.cancelled():
                return
            for lookup, outcome in zip(lookups, outcomes.result(), strict=True):
                self._set_aborted(lookup, outcome)
            self._answer(self._responses)

        runtime.loop.run_in_executor(runtime.env.executor, _look_up, lookups).add_done_callback(done)

    def _set_aborted(self, lookup: AbortedLookup, outcome: AbortedTransactions | Exception) -> None:
        """Complete the response, or withhold its records: without the list, aborted records would look committed."""
        response, partition = lookup.response, lookup.partition
        if response.error_code:
            return
        if partition.generation != lookup.generation or not (partition.leads or partition.follows):
            _withhold(response, ErrorCode.not_leader_or_follower)
        elif isinstance(outcome, Exception):
            self._node.runtime.log.error("aborted_lookup_failed", **partition.log_fields, error=repr(outcome))
            partition.lookup_failed(outcome)
            _withhold(response, ErrorCode.kafka_storage_error)
        else:
            result = None if lookup.read is None else lookup.read.result
            response.aborted_transactions = [
                (each.producer_id, each.first_offset)
                for each in outcome
                if result is None or each.first_offset < result.next_offset
            ]

    # -- responses -----------------------------------------------------------------------------------------------------

    def _answer(self, responses: list[FetchPartitionResponse]) -> None:
        self._is_over = True
        session = self._session
        limits, throttle_ms = self._request.limits, 0
        if limits is not None:
            throttle_ms, may_carry = limits.fetched(sum(len(response.records) for response in responses))
            if not may_carry:
                self._answer_empty(throttle_ms)
                return
        topics: dict[int, list[FetchPartitionResponse]] = {}
        failed = False
        topic = NO_TOPIC
        answered: list[FetchPartitionResponse] = []
        for number, response in zip(self._topics, responses, strict=True):
            failed = failed or response.error_code != 0
            if session is not None:
                key = self._keys[number]
                entry = session.partitions.get((key, response.partition))
                if entry is not None and not entry.news(response) and self._incremental:
                    continue
                if entry is not None and len(response.records):
                    session.served((key, response.partition))
            if number != topic:
                topic = number
                answered = topics.setdefault(topic, [])
            answered.append(response)
        named: list[TopicResponse] = []
        for number, answered in topics.items():
            name, topic_id = self._keys[number]
            named.append((name, None if topic_id is None else uuid_of(topic_id), answered))
        body = write_fetch_response(
            self._request.api_version,
            0,
            session.id if session is not None else NO_SESSION,
            named,
            throttle_ms,
            self._endpoints(responses) if failed else (),
        )
        self._reply.failed = failed
        if self._trace is not None:
            self._trace.served(responses)
        node = self._node
        node.runtime.metrics.bytes_out += sum(len(part) for part in body)
        node.runtime.metrics.fetch.observe(node.runtime.loop.time() - self._request.started_s)
        self._reply.send(body)

    def _answer_empty(self, throttle_ms: int) -> None:
        """Answer without any partition, and keep the session as it is: the client fetches the same again."""
        session, node = self._session, self._node
        if session is not None and not self._incremental:
            # A client takes an empty first response for a session that was not created.
            node.fetch_sessions.forget(session.id, session.principal)
            session = None
        session_id = NO_SESSION if session is None else session.id
        if self._trace is not None:
            self._trace.served([FetchPartitionResponse(requested.partition) for requested in self._requested])
        node.runtime.metrics.fetch.observe(node.runtime.loop.time() - self._request.started_s)
        self._reply.send(write_fetch_response(self._request.api_version, 0, session_id, [], throttle_ms))

    def _endpoints(self, responses: list[FetchPartitionResponse]) -> list[tuple[int, str, int, str | None]]:
        """Set the current leader in each response with an old-metadata error; return these leaders' addresses."""
        if self._request.api_version < NODE_ENDPOINTS_FROM_VERSION:
            return []
        node = self._node
        endpoints: dict[int, tuple[int, str, int, str | None]] = {}
        for number, requested, response in zip(self._topics, self._requested, responses, strict=True):
            if response.error_code not in OLD_METADATA:
                continue
            topic = self._name(self._keys[number])
            leader = None if topic is None else node.host.other_leader(topic, requested.partition)
            if leader is not None:
                response.current_leader, broker = leader
                if requested.current_leader_epoch == response.current_leader[1]:
                    # librdkafka can fetch from another node than the leader that it knows, and then ignores the hint
                    # and Metadata until another node leads (its pull request 5593). It follows a read replica.
                    response.preferred_read_replica = broker.id
                address = broker.address(self._request.listener)
                if address is not None:
                    endpoints[broker.id] = (broker.id, *address, broker.rack)
        return list(endpoints.values())


@dataclass(slots=True, eq=False)
class AbortedLookup:
    """A lookup of the aborted transactions in the range that one partition's response returns."""

    response: FetchPartitionResponse
    partition: Partition
    generation: int
    """The partition's generation when the lookup began. If it has changed since, the records may be stale."""
    job: AbortedJob
    read: ReadJob | None = None
    """The cold read of the same range: how far it reaches is known when it is done."""


def _look_up(lookups: list[AbortedLookup]) -> list[AbortedTransactions | Exception]:
    """Runs in a thread: touches files only."""
    outcomes: list[AbortedTransactions | Exception] = []
    for lookup in lookups:
        try:
            outcomes.append(lookup.job())
        except Exception as error:
            outcomes.append(error)
    return outcomes


def _withhold(response: FetchPartitionResponse, code: ErrorCode) -> None:
    response.error_code = code
    response.records = b""
    response.aborted_transactions = None


class FetchTrace:
    """The traces of one fetch: created only if a topic is traced, and only for the traced partitions.

    Owned by the loop. `_entries` has the trace of each partition of the fetch, None if it is not traced.
    """

    __slots__ = ("_clock", "_entries", "_has_waited", "_number", "_request")

    def __init__(
        self,
        ring: TraceRing,
        request: Request,
        fetch: FetchRequest,
        requested: Iterable[tuple[str | None, FetchPartition]],
        clock: Callable[[], float],
    ) -> None:
        self._number = ring.next_fetch()
        self._request = request
        self._entries = [
            None if name not in ring.topics else (PartitionTrace(ring, name, partition.partition), partition)
            for name, partition in requested
        ]
        self._clock = clock
        self._has_waited = False
        for trace, partition in filter(None, self._entries):
            trace.fetch_started(
                self._number, request.client_id, partition.fetch_offset, fetch.max_wait_ms, fetch.min_bytes
            )

    def seen(self, at: int, high_watermark: int, log_end_offset: int) -> None:
        entry = self._entries[at]
        if entry is not None:
            entry[0].watermark_seen(self._number, high_watermark, log_end_offset)

    def waits(self) -> None:
        self._has_waited = True
        for trace, _ in filter(None, self._entries):
            trace.no_data(self._number)

    def arrived(self, trace: PartitionTrace | None, size_bytes: int) -> None:
        if trace is not None:
            trace.data_available(self._number, size_bytes)

    def served(self, responses: list[FetchPartitionResponse]) -> None:
        """Trace the response. If the fetch did not wait, its data became available no later than now."""
        elapsed_s = self._clock() - self._request.started_s
        for entry, response in zip(self._entries, responses, strict=True):
            if entry is None:
                continue
            trace, requested = entry
            size_bytes = len(response.records)
            if size_bytes and not self._has_waited:
                trace.data_available(self._number, size_bytes)
            trace.fetch_served(
                self._number,
                self._request.client_id,
                requested.fetch_offset,
                size_bytes,
                response.high_watermark,
                error_name(response.error_code) if response.error_code else None,
                elapsed_s,
            )


def _read_replica(image: ClusterImage, partition: Partition, rack: str, offset: int) -> int | None:
    """Return the most caught-up in-sync replica in `rack` that has `offset`; None to read from this leader (KIP-392).

    Followers know only the watermark, so they cannot serve topics whose records are visible when appended.
    """
    leader = partition.leader
    if leader is None or partition.settings.visible_when_appended:
        return None
    best: int | None = None
    for replica in leader.in_sync_replicas:
        broker = image.brokers.get(replica)
        if broker is None or broker.rack != rack:
            continue
        if replica == leader.node_id:
            return None
        if broker.is_fenced or broker.is_shutting_down or leader.durable_end_of(replica) < offset:
            continue
        if best is None or leader.durable_end_of(replica) > leader.durable_end_of(best):
            best = replica
    return best


API = Api(ApiKey.FETCH, (4, 18))


def handler(services: Services) -> Handler:
    return Handler(API, hot=partial(handle, services))
