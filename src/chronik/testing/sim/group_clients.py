"""Clients of groups: members, and two that are none: one commits offsets, one queries every node.

Whichever node answers, and whenever: it never returns a committed offset older than one that the group knew before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from chronik.client.cluster import Deadline
from chronik.client.connection import Connection
from chronik.client.errors import RETRIABLE, ClientError, raise_for
from chronik.testing.sim.client import (
    REQUEST_TIMEOUT_S,
    TOPIC,
    Service,
    SimClient,
    commit_offsets,
    committed_offsets,
    fetch,
)
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

GROUP = "readers"
PROTOCOL = "sim"
OFFSETS_PAUSE_S = 50e-3

_EXPECTED = RETRIABLE | {
    ErrorCode.rebalance_in_progress,
    ErrorCode.illegal_generation,
    ErrorCode.unknown_member_id,
    ErrorCode.member_id_required,
}
"""Errors that a member may get at any time; it then rejoins."""


@dataclass(frozen=True, slots=True)
class MemberSettings:
    session_ms: int
    """Also its rebalance timeout, and four times its heartbeat interval."""
    commit_share: float
    """The share of rounds over its partitions after which it commits."""
    stay_s: float
    """Mean time that it stays in the group before it rejoins as a new member."""

    @staticmethod
    def drawn(random: Random) -> MemberSettings:
        return MemberSettings(random.choice((600, 1500)), random.choice((0.5, 0.5, 0.02)), random.choice((1.5, 6.0)))


class SimMember(SimClient):
    """One member: joins, reads the partitions that the group leader assigned to it, and commits its positions.

    After an unanswered commit it rejoins before it commits again: a commit that is still in flight then belongs to an
    older generation and cannot overwrite a later one.
    """

    def __init__(
        self, name: str, service: Service, partitions: int, settings: MemberSettings, group: str = GROUP
    ) -> None:
        super().__init__(name, service)
        self.generations = 0
        self.commits = 0
        self.group = group
        self._partitions = partitions
        self._settings = settings
        self._ownership = service.history.ownership(group)
        self._member_id = ""
        self._generation = -1
        self._next_heartbeat_s = 0.0

    async def work(self) -> None:
        while not self.is_finishing:
            try:
                coordinator = await self.coordinator(self.group)
                assigned = await self._join(coordinator)
                self.generations += 1
                await self._consume(coordinator, assigned)
                self._ownership.lost(self.name)
                if not self.is_finishing:
                    await self._leave(coordinator)
            except (ClientError, KafkaError, TimeoutError) as error:
                self._ownership.lost(self.name)
                self.count(error)
                await self._start_over(error)

    async def _start_over(self, error: BaseException) -> None:
        if isinstance(error, KafkaError):
            if error.code is ErrorCode.unknown_member_id:
                self._member_id = ""
            if error.code is ErrorCode.offset_out_of_range:
                self.world.violated(f"{self.name}: a committed position does not exist: {error.message}")
            elif error.code not in _EXPECTED:
                self.world.violated(f"{self.name} got {error.code.name} ({error.message})")
        if not isinstance(error, KafkaError) or error.code is ErrorCode.not_coordinator:
            await self.drop_connections()
        await self.pause()

    async def _leave(self, coordinator: Connection) -> None:
        """Leave the group, with or without LeaveGroup, and come back as a new member."""
        if self.random.random() < 0.5:
            leaving = {"member_id": self._member_id, "group_instance_id": None, "reason": None}
            await self._call(coordinator, ApiKey.LEAVE_GROUP, {"group_id": self.group, "members": [leaving]})
        self._member_id = ""
        await self.drop_connections()
        await self.pause()

    async def _join(self, coordinator: Connection) -> list[int]:
        response = await self._call(coordinator, ApiKey.JOIN_GROUP, self._join_request())
        if response.error_code is ErrorCode.member_id_required:
            self._member_id = response.member_id
            response = await self._call(coordinator, ApiKey.JOIN_GROUP, self._join_request())
        raise_for(response, "join")
        self._member_id = response.member_id
        self._generation = response.generation_id
        assignments = []
        if response.leader == response.member_id:
            for index, member in enumerate(response.members):
                partitions = list(range(index, self._partitions, len(response.members)))
                assignments.append({"member_id": member.member_id, "assignment": json.dumps(partitions).encode()})
        sent_s = self.world.now
        protocol = {"protocol_type": PROTOCOL, "protocol_name": PROTOCOL}
        values = {**self._identity(), **protocol, "assignments": assignments}
        response = await self._call(coordinator, ApiKey.SYNC_GROUP, values)
        raise_for(response, "sync")
        assigned: list[int] = json.loads(response.assignment or b"[]")
        self._ownership.synced(self.name, self._generation, assigned, sent_s, self._session_s)
        return assigned

    @property
    def _session_s(self) -> float:
        return self._settings.session_ms / 1000

    def _join_request(self) -> dict[str, Any]:
        return {
            "group_id": self.group,
            "session_timeout": self._settings.session_ms,
            "rebalance_timeout": self._settings.session_ms,
            "member_id": self._member_id,
            "group_instance_id": None,
            "protocol_type": PROTOCOL,
            "protocols": [{"name": PROTOCOL, "metadata": b""}],
            "reason": None,
        }

    def _identity(self) -> dict[str, Any]:
        return {
            "group_id": self.group,
            "generation_id": self._generation,
            "member_id": self._member_id,
            "group_instance_id": None,
        }

    async def _consume(self, coordinator: Connection, assigned: list[int]) -> None:
        positions = {partition: await self._committed(coordinator, partition) for partition in assigned}
        self._next_heartbeat_s = self.world.now + self._session_s / 4
        ends_s = self.world.now + self.random.expovariate(1.0) * self._settings.stay_s
        while not self.is_finishing and self.world.now < ends_s:
            for partition in assigned:
                connection = await self.leader(TOPIC, partition)
                history, before = self.history.partition(TOPIC, partition), positions[partition]
                after = await fetch(connection, history, before, self.name, max_bytes=4096, max_wait_ms=50)
                if after > before:
                    self.history.group(self.group, TOPIC, partition).processed(before, after, self.name)
                    positions[partition] = after
                await self._heartbeat_if_due(coordinator)
            if not assigned:
                await self.pause()
                await self._heartbeat_if_due(coordinator)
            elif self.random.random() < self._settings.commit_share:
                await self._commit(coordinator, positions)

    async def _heartbeat_if_due(self, coordinator: Connection) -> None:
        sent_s = self.world.now
        if sent_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = sent_s + self._session_s / 4
            raise_for(await self._call(coordinator, ApiKey.HEARTBEAT, self._identity()), "heartbeat")
            self._ownership.heartbeat_succeeded(self.name, self._generation, sent_s, self._session_s)

    async def _committed(self, coordinator: Connection, partition: int) -> int:
        history = self.history.group(self.group, TOPIC, partition)
        known = history.committed
        offsets = await committed_offsets(coordinator, self.group, [partition], require_stable=False)
        history.fetched(offsets[partition], known, self.name)
        return max(0, offsets[partition])

    async def _commit(self, coordinator: Connection, positions: dict[int, int]) -> None:
        for partition, offset in positions.items():
            self.history.group(self.group, TOPIC, partition).trying(offset)
        sent_s = self.world.now
        await commit_offsets(coordinator, self.group, positions, self._generation, self._member_id)
        self._ownership.answered(self.name, self._generation, sent_s, "a commit")
        for partition, offset in positions.items():
            self.history.group(self.group, TOPIC, partition).commit_acknowledged(offset)
        self.commits += 1

    async def _call(self, connection: Connection, key: ApiKey, values: dict[str, Any]) -> Any:
        return await connection.call(key, values, timeout_s=REQUEST_TIMEOUT_S)


class OffsetReader(SimClient):
    """Fetches the committed offsets of a group from a random node, or from the coordinator that a random node names."""

    def __init__(self, name: str, service: Service, partitions: int, *, only_stable: bool = False) -> None:
        """`only_stable`: offsets that an open transaction may replace are never fetched."""
        super().__init__(name, service)
        self._partitions = range(partitions)
        self._only_stable = only_stable

    async def work(self) -> None:
        while not self.is_finishing:
            await self.rest(OFFSETS_PAUSE_S)
            groups = self.history.group_names
            if not groups:
                continue
            try:
                await self.check_offsets(self.random.choice(groups), await self._node())
            except (ClientError, KafkaError, TimeoutError) as error:
                self.failed(error)

    async def check_offsets(self, group: str, connection: Connection) -> None:
        """Fetch the group's committed offsets over this connection, and check them."""
        known = {each: self.history.group(group, TOPIC, each).committed for each in self._partitions}
        require_stable = self.random.random() < 0.5 or self._only_stable
        sent_s = self.world.now
        offsets = await committed_offsets(connection, group, self._partitions, require_stable=require_stable)
        for partition, offset in offsets.items():
            self.history.group(group, TOPIC, partition).fetched(offset, known[partition], self.name)
        if self._only_stable:
            self.history.transactions.offsets_fetched(group, TOPIC, offsets, sent_s)

    async def _node(self) -> Connection:
        """Connect to any node, whatever its role in the group, or to the coordinator that any node names."""
        deadline = Deadline(REQUEST_TIMEOUT_S)
        address = self.random.choice(self.bootstrap)
        node = self.single_node(address)
        if self.random.random() < 0.5:
            return await node.any_connection(deadline)
        async with self.new_cluster(address) as fresh:
            coordinator = await fresh.coordinator(self.random.choice(self.history.group_names), deadline)
        return await self.cluster.connection(coordinator, deadline)


class FinalOffsetReader(OffsetReader):
    """Queries each group's coordinator once, after all commits have stopped."""

    async def work(self) -> None:
        for group in self.history.group_names:
            await self.insist(partial(self._ask_coordinator, group))

    async def _ask_coordinator(self, group: str) -> None:
        deadline = Deadline(REQUEST_TIMEOUT_S)
        async with self.new_cluster(*self.bootstrap) as fresh:
            coordinator = await fresh.coordinator(group, deadline)
            await self.check_offsets(group, await fresh.connection(coordinator, deadline))


class OffsetCommitter(SimClient):
    """Commits increasing offsets to a group without members.

    An unanswered commit may still be in flight and overwrite a later one: nothing fences it. After one, commits go to a
    new group.
    """

    def __init__(self, name: str, service: Service, partitions: int) -> None:
        super().__init__(name, service)
        self._partitions = range(partitions)
        self._groups = 0

    async def work(self) -> None:
        while not self.is_finishing:
            self._groups += 1
            await self._commit_to(f"{self.name}-{self._groups}")

    async def _commit_to(self, group: str) -> None:
        offset = 0
        while not self.is_finishing:
            await self.rest(OFFSETS_PAUSE_S)
            connection = await self.insist(partial(self.coordinator, group))
            offset += self.random.randint(1, 10)
            histories = [self.history.group(group, TOPIC, partition) for partition in self._partitions]
            for history in histories:
                history.trying(offset)
            try:
                await commit_offsets(connection, group, dict.fromkeys(self._partitions, offset))
            except (ClientError, KafkaError, TimeoutError) as error:
                self.failed(error)
                await self.drop_connections()
                await self.pause()
                if isinstance(error, KafkaError) and error.code is ErrorCode.not_coordinator:
                    continue  # the commit was certainly not written
                return
            for history in histories:
                history.commit_acknowledged(offset)
