"""ShareFetch (key 78), versions 1-2.

Behaviour
- Acknowledges records of earlier fetches, then acquires records for the member (KIP-932). An acknowledgement succeeds
  once the share coordinator has committed it; a partition's acknowledgements and its fetch have separate errors.
- Acquired records are locked for the member: others do not get them until the lock ends or they are released. The
  response has whole batches, which may contain further records; `acquired_records` says which are the member's.
- Waits up to max_wait_ms for the first record, unless a partition has an error. New records, released ones and ends of
  locks end the wait.
- Share sessions: epoch 0 opens one, 1 and up continue it, -1 ends it and releases what the member has acquired, as
  the end of its connection does. A session names its partitions once.
- Batch-optimized mode acquires whole batches until max_records; record-limit mode (KIP-1206) acquires no more.
- The first batch may exceed max_bytes, unless that is 0: such a request gets no records.
- A request with renewals (KIP-1222) fetches nothing.
- Whether a member belongs to the group is not checked, as in Kafka.
- Errors caused by old metadata include the current leader, and its address.
Versions: 2 acquire mode and renewals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.replicas.partition import Partition
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.node.serving.server import Server
from chronik.node.shares.share_partitions import LedShare, SharePartitions
from chronik.node.shares.share_sessions import FINAL_EPOCH, INITIAL_EPOCH, PartitionId, ShareSession
from chronik.shares.share_partition import Acknowledgement, AcknowledgeType, Limits
from chronik.shares.state import SharePartitionKey
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

RENEWALS_FROM_VERSION = 2
RECORD_LIMIT_MODE = 1
WAIT_S_MAX = 300.0
MEMBER_ID_CHARS_MAX = 1_000
OLD_METADATA = (ErrorCode.not_leader_or_follower, ErrorCode.fenced_leader_epoch)
NO_LEADER: Values = {"leader_id": -1, "leader_epoch": -1}


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of the node that this API and ShareAcknowledge use."""

    runtime: Runtime
    host: PartitionHost
    server: Server
    shares: SharePartitions


async def handle(node: Services, request: Request) -> Values:
    message = request.message
    try:
        session = open_session(node, request, may_open=True)
        check_renewals(node, request, is_fetch=True)
        named = {(topic.topic_id, each.partition_index): None for topic in message.topics for each in topic.partitions}
        forgotten = [(topic.topic_id, index) for topic in message.forgotten_topics_data for index in topic.partitions]
        is_final = message.share_session_epoch == FINAL_EPOCH
        if not is_final:
            node.shares.sessions.add(session, (each for each in named if each[0] is not None))
    except KafkaError as error:
        return {"error_code": error.code, "error_message": error.message or None}
    lock_ms = node.shares.group_settings(message.group_id).records.record_lock_duration_ms
    acknowledged = await acknowledge(node, request, message.topics)
    node.shares.sessions.remove(session, forgotten)
    if is_final:
        node.shares.sessions.close(session)
    answers: dict[PartitionId, Values] = {}
    for partition, refused in acknowledged.items():
        answers[partition] = _acknowledge_values(refused)
    if not is_final and not session.is_closed and not is_renewal(request):
        for partition, fetched in (await PendingShareFetch(node, request, session).run()).items():
            answers[partition] = {**answers.get(partition, {}), **fetched}
    return {
        "acquisition_lock_timeout": lock_ms,
        "responses": by_topic(answers),
        "node_endpoints": add_leaders(node, request, answers),
    }


def _acknowledge_values(error: KafkaError | None) -> Values:
    if error is None:
        return {"acknowledge_error_code": 0}
    return {"acknowledge_error_code": error.code.value, "acknowledge_error_message": error.message or None}


# -- what ShareAcknowledge does too ------------------------------------------------------------------------------------


def open_session(node: Services, request: Request, *, may_open: bool) -> ShareSession:
    """Check the request, and return the member's session."""
    message, principal = request.message, request.access.principal
    group_id, member_id, epoch = message.group_id, message.member_id, message.share_session_epoch
    if not group_id or not member_id or len(member_id) > MEMBER_ID_CHARS_MAX:
        raise KafkaError(ErrorCode.invalid_request, "a share session needs a group and a member id")
    request.access.require(Operation.READ, ResourceType.GROUP, group_id)
    sessions = node.shares.sessions
    if epoch != INITIAL_EPOCH:
        return sessions.require(group_id, member_id, principal, epoch, request.connection)
    if not may_open:
        raise KafkaError(ErrorCode.invalid_share_session_epoch, "acknowledgements need an open session")
    if any(each.acknowledgement_batches for topic in message.topics for each in topic.partitions):
        raise KafkaError(ErrorCode.invalid_request, "the first request of a session cannot acknowledge records")
    return sessions.open(group_id, member_id, principal, request.connection)


def is_renewal(request: Request) -> bool:
    return request.api_version >= RENEWALS_FROM_VERSION and bool(request.message.is_renew_ack)


def check_renewals(node: Services, request: Request, *, is_fetch: bool) -> None:
    """Raise INVALID_REQUEST for a renewal that the request does not announce, or that fetches."""
    message = request.message
    if is_renewal(request):
        if not node.shares.group_settings(message.group_id).may_renew:
            raise KafkaError(ErrorCode.invalid_request, "the group does not allow renewals")
        if is_fetch and (message.max_bytes or message.min_bytes or message.max_records or message.max_wait):
            raise KafkaError(ErrorCode.invalid_request, "a request with renewals cannot fetch")
        return
    kinds = {kind for topic in message.topics for each in topic.partitions for kind in _kinds(each)}
    if AcknowledgeType.RENEW in kinds:
        raise KafkaError(ErrorCode.invalid_request, "the request does not announce renewals")


def _kinds(partition: Any) -> Iterable[int]:
    return (kind for batch in partition.acknowledgement_batches for kind in batch.acknowledge_types)


def require_readable(node: Services, request: Request, topic_id: UUID) -> None:
    """Refuse a topic that the client may not read before anything else, its leader included."""
    topic = node.host.image.names_by_id.get(topic_id)
    if topic is not None:
        request.access.require(Operation.READ, ResourceType.TOPIC, topic)


async def acknowledge(node: Services, request: Request, topics: Iterable[Any]) -> dict[PartitionId, KafkaError | None]:
    """Acknowledge the records of all partitions at once; return the error of each."""
    group_id, member_id = request.message.group_id, request.message.member_id

    async def one(topic_id: UUID, partition: Any) -> KafkaError | None:
        key = SharePartitionKey(group_id, topic_id, partition.partition_index)
        batches = [
            Acknowledgement(batch.first_offset, batch.last_offset, batch.acknowledge_types)
            for batch in partition.acknowledgement_batches
        ]
        try:
            require_readable(node, request, topic_id)
            node.shares.partition_of(key)
            error = await node.shares.acknowledge(key, member_id, batches)
        except KafkaError as refused:
            return refused
        except Exception:
            node.runtime.log.exception("share_acknowledge_failed", key=str(key))
            return KafkaError(ErrorCode.unknown_server_error)
        return None if error is ErrorCode.none else KafkaError(error)

    work = {
        (topic.topic_id, each.partition_index): one(topic.topic_id, each)
        for topic in topics
        for each in topic.partitions
        if each.acknowledgement_batches
    }
    return dict(zip(work, await asyncio.gather(*work.values()), strict=True))


def by_topic(answers: dict[PartitionId, Values]) -> list[Values]:
    topics: dict[UUID, list[Values]] = {}
    for (topic_id, index), values in answers.items():
        topics.setdefault(topic_id, []).append({"partition_index": index, "current_leader": NO_LEADER, **values})
    return [{"topic_id": topic_id, "partitions": partitions} for topic_id, partitions in topics.items()]


def add_leaders(node: Services, request: Request, answers: dict[PartitionId, Values]) -> list[Values]:
    """Set the current leader in each answer with an old-metadata error; return these leaders' addresses."""
    endpoints: dict[int, Values] = {}
    names = node.host.image.names_by_id
    for (topic_id, index), values in answers.items():
        codes = (values.get("error_code", ErrorCode.none), ErrorCode(values.get("acknowledge_error_code", 0)))
        name = names.get(topic_id)
        if name is None or not any(code in OLD_METADATA for code in codes):
            continue
        leader = node.host.other_leader(name, index)
        if leader is None:
            continue
        (leader_id, leader_epoch), broker = leader
        values["current_leader"] = {"leader_id": leader_id, "leader_epoch": leader_epoch}
        address = broker.address(request.listener)
        if address is not None:
            endpoints[leader_id] = {
                "node_id": leader_id,
                "host": address[0],
                "port": address[1],
                "rack": broker.rack,
            }
    return list(endpoints.values())


# -- fetching ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class PendingShareFetch:
    """A fetch until it has records, an error, or no time left. Owned by the loop."""

    _node: Services
    _request: Request
    _session: ShareSession
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _shares: dict[LedShare, None] = field(default_factory=dict)
    _logs: dict[Partition, None] = field(default_factory=dict)

    async def run(self) -> dict[PartitionId, Values]:
        loop, message = self._node.runtime.loop, self._request.message
        wait_s = min(max(message.max_wait / timedelta(seconds=1), 0.0), WAIT_S_MAX)
        deadline_s = loop.time() + wait_s
        try:
            while True:
                self._woken.clear()
                answers = await self._fetch()
                if answers or self._session.is_closed or loop.time() >= deadline_s or not self._session.partitions:
                    return answers
                try:
                    async with asyncio.timeout_at(deadline_s):
                        await self._woken.wait()
                except TimeoutError:
                    pass
        finally:
            for share in self._shares:
                share.waiting.pop(self, None)
            for log in self._logs:
                log.stop_waiting(self)

    def _wait_for(self, led: LedShare) -> None:
        """Wake up for records of a share partition; called before its fetch, because a wake-up may come meanwhile."""
        led.waiting[self] = None
        self._shares[led] = None
        if led.machine is not None and led.machine.has_room:
            led.log.wait_for_data(self)
            self._logs[led.log] = None

    def wake(self) -> None:
        self._woken.set()

    def data_arrived(self, partition: Partition, size_bytes: int) -> None:
        self._woken.set()

    def partition_gone(self) -> None:
        self._woken.set()

    async def _fetch(self) -> dict[PartitionId, Values]:
        """Acquire records of all partitions up to the limits."""
        message, node = self._request.message, self._node
        may_have_records = message.max_bytes > 0
        left_bytes = min(message.max_bytes, node.server.response_bytes_allowed())
        left_records = message.max_records if message.max_records > 0 else 1 << 31
        is_strict = self._request.api_version >= RENEWALS_FROM_VERSION and (
            message.share_acquire_mode == RECORD_LIMIT_MODE
        )
        answers: dict[PartitionId, Values] = {}
        partitions = list(self._session.partitions)
        loads = await asyncio.gather(*map(self._led, partitions))
        for partition, led in zip(partitions, loads, strict=True):
            if isinstance(led, KafkaError):
                answers[partition] = {"error_code": led.code, "error_message": led.message or None}
                continue
            if not may_have_records or left_records <= 0 or (left_bytes <= 0 and answers) or self._session.is_closed:
                continue
            limits = Limits(left_records, message.batch_size if message.batch_size > 0 else left_records, is_strict)
            self._wait_for(led)
            try:
                fetched = await node.shares.fetch(led, self._session, limits, left_bytes, not answers)
            except KafkaError as error:
                answers[partition] = {"error_code": error.code, "error_message": error.message or None}
                continue
            if fetched is None:
                continue
            answers[partition] = {
                "records": bytes(fetched.records),
                "acquired_records": [each._asdict() for each in fetched.acquired],
            }
            left_bytes -= len(fetched.records)
            left_records -= sum(each.last_offset - each.first_offset + 1 for each in fetched.acquired)
            self._session.served(partition)
        return answers

    async def _led(self, partition: PartitionId) -> LedShare | KafkaError:
        key = SharePartitionKey(self._session.group_id, *partition)
        try:
            require_readable(self._node, self._request, partition[0])
            return await self._node.shares.led(key)
        except KafkaError as error:
            return error
        except Exception:
            self._node.runtime.log.exception("share_fetch_failed", key=str(key))
            return KafkaError(ErrorCode.unknown_server_error)


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"error_code": code}


API = Api(ApiKey.SHARE_FETCH, (1, 2), on_error=on_error)
