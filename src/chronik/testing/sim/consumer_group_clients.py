"""Members of a consumer group (KIP-848), some of the classic protocol, and the oracle of who owns a partition."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any
from uuid import UUID

from chronik.client.cluster import Deadline
from chronik.client.connection import Connection
from chronik.client.errors import RETRIABLE, ClientError, raise_for
from chronik.groups.consumer_protocol import read_assignment, write_assignment
from chronik.testing.sim.client import (
    REQUEST_TIMEOUT_S,
    TOPIC,
    Service,
    SimClient,
    commit_offsets,
    committed_offsets,
    fetch,
)
from chronik.testing.sim.history import SESSION_SHARE
from chronik.testing.sim.world import World
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.primitives import write_string

GROUP = "readers-848"
SESSION_MS = 1_500
HEARTBEAT_MS = 250
REBALANCE_MS = 2 * SESSION_MS
"""Longer than a session: a member that hears nothing gives up its partitions before it is removed for not revoking."""

_SUBSCRIPTION = b"\x00\x00\x00\x00\x00\x01" + write_string(TOPIC, False) + b"\xff\xff\xff\xff"
"""Of a classic member: version 0, one topic, no user data."""

_EXPECTED = RETRIABLE | {
    ErrorCode.unknown_member_id,
    ErrorCode.fenced_member_epoch,
    ErrorCode.stale_member_epoch,
    ErrorCode.group_id_not_found,
    ErrorCode.rebalance_in_progress,
    ErrorCode.illegal_generation,
    ErrorCode.member_id_required,
    ErrorCode.unreleased_instance_id,
}
"""Errors that a member may get at any time; then it gives up its partitions and joins again."""


class ConsumerOwnership:
    """The owners of a group's partitions, by the assignments that members received. Two owners at once are a violation.

    A member owns a partition from the response that assigns it until the member releases it, or its session ends. The
    session starts when the member sends the last request that succeeds.
    """

    def __init__(self, world: World, partitions: int) -> None:
        self._world = world
        self.partitions = range(partitions)
        self._owned: dict[str, set[int]] = {}
        self._until_s: dict[str, float] = {}
        self.is_complete = False
        """Whether, after the last fault, every partition had an owner."""

    def succeeded(self, member: str, sent_s: float) -> None:
        self._until_s[member] = max(self._until_s.get(member, 0.0), sent_s + SESSION_MS / 1000 * SESSION_SHARE)

    def is_valid(self, member: str) -> bool:
        return self._until_s.get(member, 0.0) > self._world.now

    def assigned(self, member: str, partition: int) -> None:
        for other, owned in self._owned.items():
            if other != member and partition in owned and self.is_valid(other):
                left_s = self._until_s[other] - self._world.now
                self._world.violated(
                    f"{GROUP}: {member} was assigned partition {partition}, but {other} owns it for {left_s:.3f} s more"
                )
        self._owned.setdefault(member, set()).add(partition)

    def released(self, member: str, partition: int) -> None:
        self._owned[member].discard(partition)

    def lost(self, member: str) -> None:
        self._owned.pop(member, None)
        self._until_s.pop(member, None)

    def check_complete(self) -> bool:
        owned = {partition for member, parts in self._owned.items() if self.is_valid(member) for partition in parts}
        self.is_complete = self.is_complete or all(partition in owned for partition in self.partitions)
        return self.is_complete


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    is_classic: bool
    instance_id: str | None
    assignor: str | None
    uses_expression: bool
    commit_share: float
    """The share of rounds after which it commits."""
    stay_s: float
    """Mean time in the group before it leaves and comes back as a new member."""

    @staticmethod
    def drawn(random: Random, number: int) -> ConsumerSettings:
        is_classic = number > 0 and random.random() < 0.25
        return ConsumerSettings(
            is_classic,
            f"i{number}" if random.random() < 0.25 and not is_classic else None,
            random.choice((None, "uniform", "range")),
            random.random() < 0.3,
            random.choice((0.5, 0.1)),
            random.choice((1.5, 4.0)),
        )


class ConsumerMember(SimClient):
    """One member: it joins, follows its assignment, reads and commits, and leaves or just disappears.

    After an unanswered commit it comes back as a new member: a commit that is still in flight then belongs to a member
    that the group removes before another one gets the partition, so that it cannot overwrite a later commit.
    """

    def __init__(self, name: str, service: Service, settings: ConsumerSettings, ownership: ConsumerOwnership) -> None:
        super().__init__(name, service)
        self.epochs = 0
        self.commits = 0
        self._settings = settings
        self._ownership = ownership
        self._topic_id: UUID | None = None
        self._incarnation = 0
        self._start()

    def _start(self) -> None:
        self._incarnation += 1
        self._member_id = f"{self.name}-{self._incarnation}"
        self._epoch = 0
        self._positions: dict[int, int | None] = {}
        """By owned partition; None until the committed offset is known."""
        self._is_full = True
        self._owned_sent: tuple[int, ...] | None = None

    async def work(self) -> None:
        while not (self.is_finishing and self._ownership.check_complete()):
            try:
                await self._take_part(await self.coordinator(GROUP))
            except (ClientError, KafkaError, TimeoutError) as error:
                self.count(error)
                await self._failed(error)
        self._give_up()

    async def _take_part(self, coordinator: Connection) -> None:
        ends_s = self.world.now + self.random.expovariate(1.0) * self._settings.stay_s
        while not (self.is_finishing and self._ownership.check_complete()):
            await self._heartbeat(coordinator)
            beaten_s = self.world.now
            while self.world.now < beaten_s + HEARTBEAT_MS / 1000:
                await self._read(coordinator)
                await self.pause()
            if self._positions and self.random.random() < self._settings.commit_share:
                await self._commit(coordinator)
            if self.world.now > ends_s and not self.is_finishing:
                await self._leave(coordinator)
                return

    async def _failed(self, error: BaseException) -> None:
        if isinstance(error, KafkaError):
            if error.code not in _EXPECTED:
                self.world.violated(f"{self.name} got {error.code.name} ({error.message})")
            if error.code not in RETRIABLE and error.code is not ErrorCode.stale_member_epoch:
                self._give_up()
        if not isinstance(error, KafkaError) or error.code is ErrorCode.not_coordinator:
            await self.drop_connections()
        self._is_full = True
        if not self._ownership.is_valid(self._member_id):
            self._give_up()
        await self.pause()

    def _give_up(self) -> None:
        """Abandon all partitions, and come back as a new member."""
        self._ownership.lost(self._member_id)
        self._start()

    async def _leave(self, coordinator: Connection) -> None:
        way = self.random.random()
        if way < 0.5 and self._epoch > 0:  # Its session may have ended meanwhile: then it has not joined again.
            self._positions = {}
            self._ownership.lost(self._member_id)
            static = self._settings.instance_id is not None and way < 0.3
            await self._send_leave(coordinator, -2 if static else -1)
        self._give_up()
        await self.pause()

    async def _send_leave(self, coordinator: Connection, epoch: int) -> None:
        values = {**self._identity(epoch), "rebalance_timeout": -1, "topic_partitions": None}
        response = await self._call(coordinator, ApiKey.CONSUMER_GROUP_HEARTBEAT, values)
        if response.error_code is not ErrorCode.none:
            raise KafkaError(ErrorCode(response.error_code), "leave")

    def _identity(self, epoch: int) -> dict[str, Any]:
        return {
            "group_id": GROUP,
            "member_id": self._member_id,
            "member_epoch": epoch,
            "instance_id": self._settings.instance_id,
            "subscribed_topic_names": None,
        }

    async def _heartbeat(self, coordinator: Connection) -> None:
        sent_s = self.world.now
        owned = tuple(sorted(self._positions))
        values: dict[str, Any] = {**self._identity(self._epoch), "rebalance_timeout": -1, "topic_partitions": None}
        topic_id = await self._find_topic_id()
        if self._is_full or owned != self._owned_sent:
            values["topic_partitions"] = [{"topic_id": topic_id, "partitions": owned}] if owned else []
        if self._is_full:
            by_expression = self._settings.uses_expression
            values |= {
                "rebalance_timeout": REBALANCE_MS,
                "subscribed_topic_names": [] if by_expression else [TOPIC],
                "subscribed_topic_regex": f"{TOPIC}.*" if by_expression else "",
                "server_assignor": self._settings.assignor,
            }
        response = await self._call(coordinator, ApiKey.CONSUMER_GROUP_HEARTBEAT, values)
        raise_for(response, "heartbeat")
        self._is_full = False
        self._owned_sent = owned
        self.epochs += response.member_epoch != self._epoch
        self._epoch = response.member_epoch
        self._ownership.succeeded(self._member_id, sent_s)
        if response.assignment is not None:
            assigned = response.assignment.topic_partitions
            mine = {index for each in assigned if each.topic_id == topic_id for index in each.partitions}
            await self._follow(coordinator, mine)

    async def _find_topic_id(self) -> UUID:
        if self._topic_id is None:
            layout = await self.cluster.layout([TOPIC], deadline=Deadline(REQUEST_TIMEOUT_S))
            self._topic_id = layout.topics[TOPIC].id
        if self._topic_id is None:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, TOPIC)
        return self._topic_id

    async def _follow(self, coordinator: Connection, assigned: set[int]) -> None:
        """Release what is no longer assigned, perhaps after a last commit; then take what is new."""
        gained = sorted(assigned - self._positions.keys())
        for partition in gained:
            self._ownership.assigned(self._member_id, partition)
            self._positions[partition] = None
        lost = sorted(self._positions.keys() - assigned)
        if lost:
            await self.pause()  # What was read is still being processed.
            if self.random.random() < 0.5:
                await self._commit(coordinator)
        for partition in lost:
            del self._positions[partition]
            self._ownership.released(self._member_id, partition)

    async def _read(self, coordinator: Connection) -> None:
        for partition in sorted(self._positions):
            if not self._ownership.is_valid(self._member_id):
                self._give_up()
                return
            before = self._positions[partition]
            if before is None:
                before = self._positions[partition] = await self._committed(coordinator, partition)
            connection = await self.find_leader(TOPIC, partition)
            history = self.history.partition(TOPIC, partition)
            after = await fetch(connection, history, before, self.name, max_bytes=4096, max_wait_ms=20)
            if after > before:
                self.history.group(GROUP, TOPIC, partition).processed(before, after, self.name)
                self._positions[partition] = after

    async def _committed(self, coordinator: Connection, partition: int) -> int:
        history = self.history.group(GROUP, TOPIC, partition)
        known = history.committed
        offsets = await committed_offsets(coordinator, GROUP, [partition], require_stable=False)
        history.fetched(offsets[partition], known, self.name)
        return max(0, offsets[partition])

    async def _commit(self, coordinator: Connection) -> None:
        positions = {partition: offset for partition, offset in self._positions.items() if offset is not None}
        if not positions:
            return
        for partition, offset in positions.items():
            self.history.group(GROUP, TOPIC, partition).trying(offset)
        try:
            await commit_offsets(coordinator, GROUP, positions, self._epoch, self._member_id)
        except KafkaError as error:
            if error.code not in (ErrorCode.stale_member_epoch, ErrorCode.illegal_generation):
                self._give_up()  # It may be written later.
            raise
        except (ClientError, TimeoutError):
            self._give_up()
            raise
        for partition, offset in positions.items():
            self.history.group(GROUP, TOPIC, partition).commit_acknowledged(offset)
        self.commits += 1

    async def _call(self, connection: Connection, key: ApiKey, values: dict[str, Any]) -> Any:
        return await connection.call(key, values, timeout_s=REQUEST_TIMEOUT_S)


class ClassicConsumerMember(ConsumerMember):
    """A member of the classic protocol in the same group. It revokes everything before it joins, as eager clients do.

    Alone it forms a classic group, which it leads, until a member of the new protocol converts the group.
    """

    async def _heartbeat(self, coordinator: Connection) -> None:
        sent_s = self.world.now
        if self._epoch > 0:
            values = {
                "group_id": GROUP,
                "generation_id": self._epoch,
                "member_id": self._member_id,
                "group_instance_id": None,
            }
            response = await self._call(coordinator, ApiKey.HEARTBEAT, values)
            if response.error_code is ErrorCode.none:
                self._ownership.succeeded(self._member_id, sent_s)
                return
            if response.error_code is not ErrorCode.rebalance_in_progress:
                raise_for(response, "heartbeat")
        await self._join(coordinator)

    def _start(self) -> None:
        super()._start()
        self._member_id = ""

    async def _join(self, coordinator: Connection) -> None:
        for partition in sorted(self._positions):
            self._ownership.released(self._member_id, partition)
        self._positions = {}
        response = await self._call(coordinator, ApiKey.JOIN_GROUP, self._join_request())
        if response.error_code is ErrorCode.member_id_required:
            self._member_id = response.member_id
            response = await self._call(coordinator, ApiKey.JOIN_GROUP, self._join_request())
        raise_for(response, "join")
        self._epoch = response.generation_id
        assignments = []
        if response.leader == response.member_id:
            partitions = self._ownership.partitions
            for index, member in enumerate(response.members):
                share = list(partitions[index :: len(response.members)])
                assignments.append({"member_id": member.member_id, "assignment": write_assignment(0, {TOPIC: share})})
        sent_s = self.world.now
        values = {
            "group_id": GROUP,
            "generation_id": self._epoch,
            "member_id": self._member_id,
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocol_name": "range",
            "assignments": assignments,
        }
        response = await self._call(coordinator, ApiKey.SYNC_GROUP, values)
        raise_for(response, "sync")
        self.epochs += 1
        self._ownership.succeeded(self._member_id, sent_s)
        assigned = read_assignment(response.assignment) or ()
        await self._follow(coordinator, {index for _, index in assigned})

    def _join_request(self) -> dict[str, Any]:
        return {
            "group_id": GROUP,
            "session_timeout": SESSION_MS,
            "rebalance_timeout": REBALANCE_MS,
            "member_id": self._member_id,
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": _SUBSCRIPTION}],
            "reason": None,
        }

    async def _send_leave(self, coordinator: Connection, epoch: int) -> None:
        leaving = {"member_id": self._member_id, "group_instance_id": None, "reason": None}
        await self._call(coordinator, ApiKey.LEAVE_GROUP, {"group_id": GROUP, "members": [leaving]})
