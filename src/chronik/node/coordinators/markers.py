"""Transaction markers: the sender, at the coordinator, and the writer, at the leader of a partition.

The sender batches the markers for each leader, over a connection of its own. A marker that was repeated must not arrive
again later: it would end the producer's next transaction. So a peer's older connection for the same purpose is aborted,
and a node that begins to lead a partition aborts all of them (`PeerHandshake.drop_markers`). A marker of an earlier
coordinator is fenced by the coordinator's epoch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from chronik.client.errors import ClientError
from chronik.metadata.image import NO_LEADER, OFFSETS_TOPIC
from chronik.node.membership.internal_api import MARKERS
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import Peers
from chronik.node.replicas.partition import Partition, TransactionMarker
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Values
from chronik.transactions.actions import WriteMarkers
from chronik.transactions.transaction import TopicPartition
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

WRITE_TXN_MARKERS_VERSION = 1

WRITE_TIMEOUT_S = 10.0
"""How long a leader waits until a marker is committed. After that it is unknown; the coordinator repeats the marker."""

REQUEST_TIMEOUT_S = 15.0
"""Longer than the leader's own limit, so that only a silent node exceeds it."""

RETRY_S_MIN = 0.02
RETRY_S_MAX = 1.0
REQUESTS_MAX = 8
"""Requests in flight to one node. Markers of other transactions need not wait for a partition that is slow."""

PARTITIONS_MAX = 2_000
"""Partitions in one request."""


class MarkerLog(Protocol):
    """The partitions that this node leads: `PartitionHost`."""

    def require_leader(self, topic: str, index: int) -> Partition:
        """Return the partition. Raises KafkaError unless this node leads it."""

    async def append_marker(self, topic: str, index: int, marker: TransactionMarker, timeout_s: float) -> int:
        """Append the marker, wait until it is committed, and return its offset. Raises KafkaError."""


class MarkerWriter:
    """Writes markers to partitions that this node leads. Owned by the loop."""

    def __init__(
        self,
        runtime: Runtime,
        log: MarkerLog,
        offsets_are_loaded: Callable[[int], bool],
        offsets_ended: Callable[[int, int, int, bool], None],
    ) -> None:
        """`offsets_ended` receives each marker of a partition of the offsets topic (see GroupService)."""
        self._log_lines = runtime.log.bind(component="transactions")
        self._log = log
        self._offsets_are_loaded = offsets_are_loaded
        self._offsets_ended = offsets_ended

    async def write(self, marker: TransactionMarker, topic: str, index: int, *, by_client: bool = False) -> ErrorCode:
        try:
            if by_client:
                self._check_client(marker, topic, index)
            if topic == OFFSETS_TOPIC and not self._offsets_are_loaded(index):
                # While the partition loads, the marker could escape the groups' coordinator.
                return ErrorCode.not_leader_or_follower
            await self._log.append_marker(topic, index, marker, WRITE_TIMEOUT_S)
        except KafkaError as error:
            return error.code
        except Exception as error:
            self._log_lines.exception("marker_failed", topic=topic, partition=index, error=repr(error))
            return ErrorCode.unknown_server_error
        if topic == OFFSETS_TOPIC:
            self._offsets_ended(index, marker.producer_id, marker.producer_epoch, marker.is_commit)
        return ErrorCode.none

    def _check_client(self, marker: TransactionMarker, topic: str, index: int) -> None:
        """Raise KafkaError unless the marker aborts an open transaction, as tools for hanging ones do.

        With the epoch of a coordinator that does not exist, it would fence the real one for good.
        """
        if marker.is_commit:
            raise KafkaError(ErrorCode.cluster_authorization_failed, "only coordinators commit")
        producers = self._log.require_leader(topic, index).log.producers
        state = producers.get(marker.producer_id)
        if state is None or not producers.has_transaction(marker.producer_id, marker.producer_epoch):
            raise KafkaError(ErrorCode.invalid_txn_state, f"{topic}-{index} has no such transaction")
        if marker.coordinator_epoch > max(state.coordinator_epoch, 0):
            raise KafkaError(ErrorCode.transaction_coordinator_fenced, "the coordinator has a lower epoch")


@dataclass(slots=True, eq=False)
class _Pending:
    """One marker for one partition, until it is written."""

    action: WriteMarkers
    partition: TopicPartition
    pause_s: float = RETRY_S_MIN
    failure: str = ""
    is_void: bool = False

    @property
    def marker(self) -> TransactionMarker:
        action = self.action
        return TransactionMarker(action.producer_id, action.producer_epoch, action.is_commit, action.coordinator_epoch)

    @property
    def log_fields(self) -> dict[str, Any]:
        topic, index = self.partition
        return {"transactional_id": self.action.transactional_id, "topic": topic, "partition": index}


@dataclass(slots=True, eq=False)
class _Leader:
    """The markers that wait for one node, and the number of requests in flight to it."""

    waiting: deque[_Pending] = field(default_factory=deque)
    request_count: int = 0


class MarkerSender:
    """Sends each marker to the leader of its partition until it is written, the topic is deleted, or it is void.

    Invariant: `_pending` has every marker that is not written and not void, by the coordinator's partition. Owned by
    the loop.
    """

    def __init__(
        self,
        runtime: Runtime,
        metadata: MetadataLog,
        peers: Peers,
        writer: MarkerWriter,
        written: Callable[[WriteMarkers, TopicPartition], None],
    ) -> None:
        self._loop = runtime.loop
        self._node_id = runtime.node_id
        self._log = runtime.log.bind(component="transactions")
        self._metadata = metadata
        self._peers = peers
        self._writer = writer
        self._written = written
        self._pending: dict[int, dict[_Pending, None]] = {}
        self._leaders: dict[int, _Leader] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_flushing = False

    def send(self, action: WriteMarkers) -> None:
        of_partition = self._pending.setdefault(action.partition, {})
        for partition in action.partitions:
            pending = _Pending(action, partition)
            of_partition[pending] = None
            self._route(pending)

    def unloaded(self, partition: int) -> None:
        """Another node coordinates this partition of the transaction topic now, and sends its markers itself."""
        for pending in self._pending.pop(partition, ()):
            pending.is_void = True

    def stop(self) -> None:
        for partition in list(self._pending):
            self.unloaded(partition)
        for task in list(self._tasks):
            task.cancel()

    def pending_count(self) -> int:
        return sum(map(len, self._pending.values()))

    def _route(self, pending: _Pending) -> None:
        """Queue the marker for the current leader of its partition."""
        if pending.is_void:
            return
        leader = self._leader_of(pending)
        if leader is None:
            # The topic was deleted. Not at once: the coordinator's actions are carried out one after the other.
            self._loop.call_soon(self._done, pending)
        elif leader == NO_LEADER:
            self._failed(pending, "the partition has no leader")
        else:
            self._leaders.setdefault(leader, _Leader()).waiting.append(pending)
            if not self._is_flushing:
                self._is_flushing = True
                self._loop.call_soon(self._flush)

    def _leader_of(self, pending: _Pending) -> int | None:
        """Return the node that leads the marker's partition; None if its topic was deleted."""
        image = self._metadata.image.partition(*pending.partition)
        return None if image is None else image.leader

    def _flush(self) -> None:
        """Send what waits. All markers of one turn of the loop share a request for each leader."""
        self._is_flushing = False
        for node_id, leader in list(self._leaders.items()):
            self._flush_leader(node_id, leader)

    def _flush_leader(self, node_id: int, leader: _Leader) -> None:
        while leader.waiting and (node_id == self._node_id or leader.request_count < REQUESTS_MAX):
            batch = self._take(node_id, leader)
            if node_id == self._node_id:
                for pending in batch:
                    self._spawn(self._write_here(pending))
            elif batch:
                leader.request_count += 1
                self._spawn(self._request(node_id, leader, batch))

    def _take(self, node_id: int, leader: _Leader) -> list[_Pending]:
        """Take the markers of the next request. Its response names producers, so each has one marker in it."""
        taken: list[_Pending] = []
        markers: dict[int, TransactionMarker] = {}
        while leader.waiting and len(taken) < PARTITIONS_MAX:
            pending = leader.waiting[0]
            if self._leader_of(pending) != node_id:
                # The leader changed while requests to this node were waiting.
                self._route(leader.waiting.popleft())
                continue
            if markers.setdefault(pending.action.producer_id, pending.marker) != pending.marker:
                break
            leader.waiting.popleft()
            if not pending.is_void:
                taken.append(pending)
        return taken

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda task: self._tasks.pop(task, None))

    async def _write_here(self, pending: _Pending) -> None:
        self._finish(pending, await self._writer.write(pending.marker, *pending.partition))

    async def _request(self, node_id: int, leader: _Leader, batch: list[_Pending]) -> None:
        failure = ""
        errors: dict[tuple[int, str, int], ErrorCode] = {}
        try:
            connection = await self._peers.connection(node_id, MARKERS)
            response = await connection.call(
                ApiKey.WRITE_TXN_MARKERS,
                {"markers": _markers_of(batch)},
                timeout_s=REQUEST_TIMEOUT_S,
                at_most=WRITE_TXN_MARKERS_VERSION,
            )
            errors = {
                (marker.producer_id, topic.name, partition.partition_index): partition.error_code
                for marker in response.markers
                for topic in marker.topics
                for partition in topic.partitions
            }
        except ClientError as error:
            failure = str(error)
        except Exception as error:
            self._log.exception("markers_failed", peer=node_id, error=repr(error))
            failure = repr(error)
        finally:
            leader.request_count -= 1
        for pending in batch:
            code = errors.get((pending.action.producer_id, *pending.partition))
            if code is None:
                self._failed(pending, failure or f"node {node_id} did not answer for it")
            else:
                self._finish(pending, code)
        self._flush_leader(node_id, leader)

    def _finish(self, pending: _Pending, error: ErrorCode) -> None:
        if error is ErrorCode.invalid_producer_epoch and not pending.is_void:
            # The producer has a later epoch, although this coordinator remembers its earlier transaction: the newest
            # records of the state topic were lost. Nothing is left to end, and a repeated marker would block the id
            # forever.
            self._log.error("marker_refused", **pending.log_fields, reason="the partition knows a later producer epoch")
        if error in (ErrorCode.none, ErrorCode.invalid_producer_epoch):
            self._done(pending)
        else:
            self._failed(pending, error.name)

    def _done(self, pending: _Pending) -> None:
        if not pending.is_void:
            of_partition = self._pending[pending.action.partition]
            del of_partition[pending]
            self._written(pending.action, pending.partition)

    def _failed(self, pending: _Pending, reason: str) -> None:
        """Repeat the marker after a pause: without it the transaction would stay open forever.

        A leader that knows a newer coordinator refuses it until this node unloads its partition.
        """
        if pending.is_void:
            return
        if pending.pause_s >= RETRY_S_MAX and reason != pending.failure:
            # Short failures are normal while a leader changes.
            pending.failure = reason
            self._log.warning("marker_not_written", **pending.log_fields, reason=reason)
        self._loop.call_later(pending.pause_s, self._route, pending)
        pending.pause_s = min(RETRY_S_MAX, 2 * pending.pause_s)


def _markers_of(batch: Iterable[_Pending]) -> list[Values]:
    """Return the markers of a WriteTxnMarkers request."""
    by_marker: dict[TransactionMarker, dict[str, list[int]]] = {}
    for pending in batch:
        topic, index = pending.partition
        by_marker.setdefault(pending.marker, {}).setdefault(topic, []).append(index)
    return [
        {
            "producer_id": marker.producer_id,
            "producer_epoch": marker.producer_epoch,
            "transaction_result": marker.is_commit,
            "topics": [{"name": topic, "partition_indexes": indexes} for topic, indexes in topics.items()],
            "coordinator_epoch": marker.coordinator_epoch,
        }
        for marker, topics in by_marker.items()
    ]
