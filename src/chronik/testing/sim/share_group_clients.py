"""Members of a share group (KIP-932), and the oracle of what becomes of each record."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

from chronik.client.cluster import Deadline
from chronik.client.connection import Connection
from chronik.client.errors import RETRIABLE, ClientError, raise_for
from chronik.testing.sim.client import REQUEST_TIMEOUT_S, TOPIC, Service, SimClient
from chronik.testing.sim.world import World
from chronik.wire.api import ApiKey
from chronik.wire.batch import decode_batch, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError

GROUP = "workers"
SESSION_MS = 1_500
HEARTBEAT_MS = 250
LOCK_MS = 700
DELIVERIES_MAX = 8
STATE_TIMEOUT_S = 8.0
"""A leader repeats a write of the state for 5 s before it answers an acknowledgement."""

SETTLED_S_MAX = 25.0
"""How long the group may take to settle the next records after the last fault. With one record for each fetch, it takes
longer to settle all of them."""

ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4
GROUP_RESOURCE = 32

_EXPECTED = RETRIABLE | {
    ErrorCode.unknown_member_id,
    ErrorCode.fenced_member_epoch,
    ErrorCode.group_id_not_found,
    ErrorCode.share_session_not_found,
    ErrorCode.invalid_share_session_epoch,
    ErrorCode.unknown_topic_id,
    ErrorCode.network_exception,
}
"""Errors that a member may get at any time; then it opens a new session."""


class Delivery(NamedTuple):
    offset: int
    deliveries: int


@dataclass(slots=True)
class _Settled:
    """What the group answered for an offset, and when."""

    accepted_s: float | None = None
    rejected_s: float | None = None
    released: tuple[int, float] | None = None
    """The delivery count of the last acknowledged release, and its time."""
    is_unknown: bool = False
    """An acceptance or a rejection had no answer: it may have been durable."""
    deliveries: int = 0
    in_flight: int = 0
    """Acknowledgements that were sent and have no answer yet."""


class ShareHistory:
    """What members of the group received and were answered, by partition and offset.

    A record ends accepted, rejected, or archived at its delivery limit; it is accepted once; it is not delivered by a
    request that was sent after its end; its delivery count rises with each acknowledged release; none is skipped.
    """

    def __init__(self, world: World, partitions: int) -> None:
        self._world = world
        self.partitions = range(partitions)
        self._offsets: dict[tuple[int, int], _Settled] = {}
        self._lost_fetches = dict.fromkeys(self.partitions, 0)
        self._drained_by_s: float | None = None
        self._last_starts: dict[int, int] = {}
        self.is_drained = False
        self.accepted_count = 0

    def delivered(self, partition: int, deliveries: Iterable[Delivery], sent_s: float, member: str) -> None:
        for offset, count in deliveries:
            known = self._of(partition, offset)
            known.deliveries = max(known.deliveries, count)
            what = f"offset {offset} was delivered to {member} the {count}. time"
            for end_s, how in ((known.accepted_s, "accepted"), (known.rejected_s, "rejected")):
                if end_s is not None and sent_s > end_s:
                    self._violated(partition, f"{what} after it was {how}")
            if known.released is not None and sent_s > known.released[1] and count <= known.released[0]:
                self._violated(partition, f"{what}, although it was released after that many deliveries")
            if not 1 <= count <= DELIVERIES_MAX:
                self._violated(partition, f"{what}; the limit is {DELIVERIES_MAX}")

    def fetch_lost(self, partitions: Iterable[int]) -> None:
        """A fetch had no answer: it may have delivered anything."""
        for partition in partitions:
            self._lost_fetches[partition] += 1

    def sending(self, partition: int, part: Acknowledged) -> None:
        for offset in range(part.first, part.last + 1):
            self._of(partition, offset).in_flight += 1

    def answered(self, partition: int, part: Acknowledged, error: ErrorCode, member: str) -> None:
        for offset in range(part.first, part.last + 1):
            known = self._of(partition, offset)
            known.in_flight -= 1
            if error is ErrorCode.none:
                self._settled(partition, offset, known, part, member)
            elif error is not ErrorCode.invalid_record_state and part.kind in (ACCEPT, REJECT):
                known.is_unknown = True

    def unanswered(self, partition: int, part: Acknowledged) -> None:
        self.answered(partition, part, ErrorCode.network_exception, "")

    def _settled(self, partition: int, offset: int, known: _Settled, part: Acknowledged, member: str) -> None:
        now = self._world.now
        if part.kind == ACCEPT:
            if known.accepted_s is not None:
                self._violated(partition, f"{member} accepted offset {offset}, which was accepted before")
            known.accepted_s = now
            self.accepted_count += 1
        elif part.kind == REJECT:
            known.rejected_s = now
        elif part.kind == RELEASE and part.deliveries < DELIVERIES_MAX:
            known.released = (part.deliveries, now)

    def check_drained(self, starts: dict[int, int], ends: dict[int, int]) -> bool:
        """Whether the group has settled every record; then check that it skipped none."""
        unsettled = {partition: end for partition, end in ends.items() if starts.get(partition, -1) < end}
        if unsettled:
            if self._drained_by_s is None or starts != self._last_starts:
                self._last_starts = starts
                self._drained_by_s = self._world.now + SETTLED_S_MAX
            if self._world.now > self._drained_by_s:
                self._violated(min(unsettled), f"not settled within {SETTLED_S_MAX:g} s: {starts} of {ends}")
            return self.is_drained
        for partition, end in ends.items():
            for offset in range(end):
                known = self._of(partition, offset)
                is_settled = (
                    known.accepted_s is not None
                    or known.rejected_s is not None
                    or known.is_unknown
                    or known.in_flight > 0
                )
                if not is_settled and known.deliveries + self._lost_fetches[partition] < DELIVERIES_MAX:
                    self._violated(partition, f"offset {offset} was skipped after {known.deliveries} deliveries")
        self.is_drained = True
        return True

    def _of(self, partition: int, offset: int) -> _Settled:
        return self._offsets.setdefault((partition, offset), _Settled())

    def _violated(self, partition: int, what: str) -> None:
        self._world.violated(f"share group {GROUP}, {TOPIC}-{partition}: {what}")


class Acknowledged(NamedTuple):
    """One type for consecutive offsets, delivered `count` times."""

    first: int
    last: int
    kind: int
    deliveries: int


@dataclass(frozen=True, slots=True)
class ShareSettings:
    accept_share: float
    reject_share: float
    hang_share: float
    """How often it holds records longer than their lock before it acknowledges them."""
    forget_share: float
    """How often it never acknowledges what it got: then only the end of the lock helps."""
    crash_share: float
    """How often it disappears without a word."""
    records_max: int
    is_strict: bool
    acknowledges_apart: bool
    """With ShareAcknowledge, not with the next fetch."""

    @staticmethod
    def drawn(random: Random) -> ShareSettings:
        return ShareSettings(
            random.choice((0.5, 0.8, 0.95)),
            random.choice((0.0, 0.05)),
            random.choice((0.0, 0.03, 0.1)),
            random.choice((0.0, 0.1, 0.3)),
            random.choice((0.0, 0.02, 0.05)),
            random.choice((1, 10, 100)),
            random.random() < 0.3,
            random.random() < 0.5,
        )


@dataclass(slots=True, eq=False)
class _Session:
    """A share session with one node."""

    connection: Connection
    epoch: int = 0
    partitions: set[int] = field(default_factory=set)
    pending: dict[int, list[Acknowledged]] = field(default_factory=dict)
    """What the next request acknowledges."""


class ShareMember(SimClient):
    """One member: it fetches, and accepts, releases, rejects and renews, hangs past the lock, forgets, and crashes."""

    def __init__(self, name: str, service: Service, settings: ShareSettings, shares: ShareHistory) -> None:
        super().__init__(name, service)
        self.records_accepted = 0
        self._settings = settings
        self._shares = shares
        self._topic_id: UUID | None = None
        self._incarnation = 0
        self._start()

    def _start(self) -> None:
        self._incarnation += 1
        self._member_id = f"{self.name}-{self._incarnation}"
        self._epoch = 0
        self._assigned: list[int] = []
        self._sessions: dict[int, _Session] = {}

    async def work(self) -> None:
        await self.insist(self._start_at_the_beginning)
        while not self._shares.is_drained:
            try:
                await self._take_part(await self.coordinator(GROUP))
            except (ClientError, KafkaError, TimeoutError) as error:
                await self._failed(error)

    async def _start_at_the_beginning(self) -> None:
        changes = [{"name": "share.auto.offset.reset", "config_operation": 0, "value": "earliest"}]
        resource = {"resource_type": GROUP_RESOURCE, "resource_name": GROUP, "configs": changes}
        connection = await self.cluster.any_connection(Deadline(REQUEST_TIMEOUT_S))
        values = {"resources": [resource], "validate_only": False}
        response = await connection.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, values, timeout_s=REQUEST_TIMEOUT_S)
        raise_for(response.responses[0], "no group config")

    async def _take_part(self, coordinator: Connection) -> None:
        while not self._shares.is_drained:
            await self._heartbeat(coordinator)
            beaten_s = self.world.now
            while self.world.now < beaten_s + HEARTBEAT_MS / 1000 and not self._shares.is_drained:
                for partition in self._assigned:
                    await self._share(partition)
                await self.pause()
                if self._misbehaves(self._settings.crash_share / 4):
                    await self._crash()
                    return
            if self.is_finishing:
                await self._check_drained(coordinator)

    def _misbehaves(self, share: float) -> bool:
        return not self.is_finishing and self.random.random() < share

    async def _crash(self) -> None:
        """Disappear, and come back as a new member."""
        self._give_up_sessions()
        await self.drop_connections()
        self._start()

    async def _failed(self, error: BaseException) -> None:
        self.count(error)
        if isinstance(error, KafkaError) and error.code not in _EXPECTED:
            self.world.violated(f"{self.name} got {error.code.name} ({error.message})")
        lost_member = isinstance(error, KafkaError) and error.code in (
            ErrorCode.unknown_member_id,
            ErrorCode.fenced_member_epoch,
            ErrorCode.group_id_not_found,
        )
        self._give_up_sessions()
        if not isinstance(error, KafkaError) or error.code is ErrorCode.not_coordinator:
            await self.drop_connections()
        if lost_member:
            self._start()
        await self.pause()

    def _give_up_sessions(self) -> None:
        """Forget all sessions: what was not acknowledged is released, or its lock ends."""
        self._sessions = {}

    # -- the group -----------------------------------------------------------------------------------------------------

    async def _heartbeat(self, coordinator: Connection) -> None:
        values = {
            "group_id": GROUP,
            "member_id": self._member_id,
            "member_epoch": self._epoch,
            "subscribed_topic_names": [TOPIC] if self._epoch == 0 else None,
        }
        response = await coordinator.call(ApiKey.SHARE_GROUP_HEARTBEAT, values, timeout_s=REQUEST_TIMEOUT_S)
        raise_for(response, "heartbeat")
        self._epoch = response.member_epoch
        if response.assignment is not None:
            for topic in response.assignment.topic_partitions:
                self._topic_id = topic.topic_id
            assigned = {index for topic in response.assignment.topic_partitions for index in topic.partitions}
            self._assigned = sorted(assigned)

    async def _check_drained(self, coordinator: Connection) -> None:
        values = {"groups": [{"group_id": GROUP, "topics": None}]}
        response = await coordinator.call(
            ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, values, timeout_s=STATE_TIMEOUT_S, at_most=0
        )
        (group,) = response.groups
        raise_for(group, "no offsets")
        starts = {each.partition_index: each.start_offset for topic in group.topics for each in topic.partitions}
        ends = {
            partition: max(self.history.partition(TOPIC, partition).records, default=-1) + 1
            for partition in self._shares.partitions
        }
        self._shares.check_drained(starts, ends)

    # -- records -------------------------------------------------------------------------------------------------------

    async def _share(self, partition: int) -> None:
        """Fetch from the partition's leader, and decide what to do with the records that came."""
        connection = await self.find_leader(TOPIC, partition)
        session = self._sessions.get(id(connection))
        if session is None or session.connection is not connection:
            session = self._sessions[id(connection)] = _Session(connection)
        session.partitions.add(partition)
        got = await self._fetch(session)
        for index, deliveries in got.items():
            if self._misbehaves(self._settings.crash_share):
                await self._crash()
                return
            if self._misbehaves(self._settings.hang_share):
                await self._renew_or_hang(session, index, deliveries)
            if not self._misbehaves(self._settings.forget_share):
                session.pending[index] = self._decide(deliveries)
        if session.pending and (self._settings.acknowledges_apart or self.is_finishing):
            await self._acknowledge(session)

    async def _renew_or_hang(self, session: _Session, partition: int, deliveries: Sequence[Delivery]) -> None:
        await asyncio.sleep(LOCK_MS / 1000 * self.random.choice((0.5, 1.0, 1.3)))
        if self.random.random() < 0.5:
            session.pending[partition] = [
                Acknowledged(each.offset, each.offset, RENEW, each.deliveries) for each in deliveries
            ]
            await self._acknowledge(session, is_renewal=True)
            await asyncio.sleep(LOCK_MS / 1000 * 0.6)

    def _decide(self, deliveries: Sequence[Delivery]) -> list[Acknowledged]:
        settings, parts = self._settings, list[Acknowledged]()
        mood = self.random.random()
        for offset, count in deliveries:
            chance = mood if self.random.random() < 0.8 else self.random.random()
            if self.is_finishing or chance < settings.accept_share:
                kind = ACCEPT
            elif chance > 1 - settings.reject_share:
                kind = REJECT
            else:
                kind = RELEASE
            last = parts[-1] if parts else None
            if last is not None and (last.last + 1, last.kind, last.deliveries) == (offset, kind, count):
                parts[-1] = last._replace(last=offset)
            else:
                parts.append(Acknowledged(offset, offset, kind, count))
        return parts

    async def _fetch(self, session: _Session) -> dict[int, list[Delivery]]:
        sent_s, pending = self.world.now, session.pending
        session.pending = {}
        values = {
            "max_wait": self.random.choice((0, 20, 100)),
            "min_bytes": 1,
            "max_bytes": 65_536,
            "max_records": self._settings.records_max,
            "batch_size": self._settings.records_max,
            "share_acquire_mode": int(self._settings.is_strict),
        }
        try:
            response = await self._ask(session, ApiKey.SHARE_FETCH, pending, values)
        except BaseException:
            self._shares.fetch_lost(session.partitions)
            raise
        got: dict[int, list[Delivery]] = {}
        for topic in response.responses:
            for each in topic.partitions:
                index = each.partition_index
                self._answered(index, pending.pop(index, []), ErrorCode(each.acknowledge_error_code))
                deliveries = [
                    Delivery(offset, part.delivery_count)
                    for part in each.acquired_records
                    for offset in range(part.first_offset, part.last_offset + 1)
                ]
                self._read(index, each.records or b"", {delivery.offset for delivery in deliveries})
                self._shares.delivered(index, deliveries, sent_s, self._member_id)
                if deliveries:
                    got[index] = deliveries
                if each.error_code is not ErrorCode.none:
                    self.count(KafkaError(each.error_code))
                    if each.error_code not in _EXPECTED:
                        self.world.violated(f"{self.name} got {each.error_code.name} ({each.error_message})")
        for index, parts in pending.items():
            self.world.violated(f"{self.name}: no answer for {parts} of partition {index}")
        return got

    def _read(self, partition: int, data: bytes, offsets: set[int]) -> None:
        """Check that the response has every acquired record, as it was produced."""
        at, history = 0, self.history.partition(TOPIC, partition)
        while at < len(data):
            for record in decode_batch(data, at):
                if record.offset in offsets:
                    history.read(record.offset, record.value, self.name)
                    offsets.discard(record.offset)
            at += read_batch_header(data, at).size_bytes
        if offsets:
            self.world.violated(f"{self.name}: no records at the acquired offsets {sorted(offsets)} of {partition}")

    async def _acknowledge(self, session: _Session, *, is_renewal: bool = False) -> None:
        pending, session.pending = session.pending, {}
        response = await self._ask(session, ApiKey.SHARE_ACKNOWLEDGE, pending, {"is_renew_ack": is_renewal})
        for topic in response.responses:
            for each in topic.partitions:
                self._answered(each.partition_index, pending.pop(each.partition_index, []), each.error_code)

    def _answered(self, partition: int, parts: Iterable[Acknowledged], error: ErrorCode) -> None:
        if error is not ErrorCode.none:
            self.count(KafkaError(error))
            if error not in _EXPECTED and error is not ErrorCode.invalid_record_state:
                self.world.violated(f"{self.name} got {error.name} for an acknowledgement")
        for part in parts:
            self._shares.answered(partition, part, error, self._member_id)
            if part.kind == ACCEPT and error is ErrorCode.none:
                self.records_accepted += part.last - part.first + 1

    async def _ask(
        self, session: _Session, key: ApiKey, pending: dict[int, list[Acknowledged]], values: dict[str, Any]
    ) -> Any:
        epoch, session.epoch = session.epoch, session.epoch + 1
        for index, parts in pending.items():
            for part in parts:
                self._shares.sending(index, part)
        partitions = [
            {
                "partition_index": index,
                "acknowledgement_batches": [
                    {"first_offset": part.first, "last_offset": part.last, "acknowledge_types": [part.kind]}
                    for part in pending.get(index, ())
                ],
            }
            for index in sorted(session.partitions if key is ApiKey.SHARE_FETCH else pending)
        ]
        request = {
            "group_id": GROUP,
            "member_id": self._member_id,
            "share_session_epoch": epoch,
            "topics": [{"topic_id": self._topic_id, "partitions": partitions}],
            **values,
        }
        try:
            response = await session.connection.call(key, request, timeout_s=STATE_TIMEOUT_S)
            raise_for(response, "share session")
        except BaseException:
            for index, parts in pending.items():
                for part in parts:
                    self._shares.unanswered(index, part)
            raise
        return response
