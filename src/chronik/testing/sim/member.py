"""A member of a consumer group: joins, is given partitions, reads them, and commits what it has read.

After a commit without an answer it joins again before it commits anything else: a commit that is still under way then
belongs to an older generation and cannot undo a later one.
"""

from __future__ import annotations

import json
from typing import Any

from chronik.client.cluster import Deadline
from chronik.client.connection import Connection
from chronik.client.errors import RETRIABLE, ClientError
from chronik.testing.sim.client import REQUEST_TIMEOUT_S, SimClient
from chronik.testing.sim.fetching import fetch
from chronik.testing.sim.history import History
from chronik.testing.sim.world import World
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

SESSION_TIMEOUT_MS = 1500
REBALANCE_TIMEOUT_MS = 1500
HEARTBEAT_S = 0.4
PROTOCOL = "sim"
FETCH_BYTES = 4096
FETCH_WAIT_MS = 50

_EXPECTED = RETRIABLE | {
    ErrorCode.rebalance_in_progress,
    ErrorCode.illegal_generation,
    ErrorCode.unknown_member_id,
    ErrorCode.member_id_required,
}
"""What a member may be told at any time; it then joins again."""


class SimMember(SimClient):
    """One member; reads whatever the group's leader gave it."""

    def __init__(
        self,
        name: str,
        world: World,
        history: History,
        bootstrap: list[tuple[str, int]],
        group: str,
        topic: str,
        partitions: int,
    ) -> None:
        super().__init__(name, world, history, bootstrap)
        self.group = group
        self.topic = topic
        self.generations = 0
        self.commits = 0
        self._partitions = partitions
        self._member_id = ""
        self._generation = -1
        self._next_heartbeat_s = 0.0

    async def work(self) -> None:
        while not self.is_finishing:
            try:
                coordinator = await self._coordinator()
                assigned = await self._join(coordinator)
                self.generations += 1
                await self._consume(coordinator, assigned)
            except (ClientError, KafkaError, TimeoutError) as error:
                self.failed(error)
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

    async def _coordinator(self) -> Connection:
        deadline = Deadline(REQUEST_TIMEOUT_S)
        node_id = await self.cluster.coordinator(self.group, deadline)
        return await self.cluster.connection(node_id, deadline)

    # -- joining -------------------------------------------------------------------------------------------------------

    async def _join(self, coordinator: Connection) -> list[int]:
        response = await self._call(coordinator, ApiKey.JOIN_GROUP, self._join_request())
        if response.error_code is ErrorCode.member_id_required:
            self._member_id = response.member_id
            response = await self._call(coordinator, ApiKey.JOIN_GROUP, self._join_request())
        _raise_for(response, "join")
        self._member_id = response.member_id
        self._generation = response.generation_id
        assignments = []
        if response.leader == response.member_id:
            members = [each.member_id for each in response.members]
            assignments = [
                {
                    "member_id": member,
                    "assignment": json.dumps(list(range(at, self._partitions, len(members)))).encode(),
                }
                for at, member in enumerate(members)
            ]
        response = await self._call(
            coordinator,
            ApiKey.SYNC_GROUP,
            {
                **self._identity(),
                "protocol_type": PROTOCOL,
                "protocol_name": PROTOCOL,
                "assignments": assignments,
            },
        )
        _raise_for(response, "sync")
        assigned: list[int] = json.loads(response.assignment or b"[]")
        return assigned

    def _join_request(self) -> dict[str, Any]:
        return {
            "group_id": self.group,
            "session_timeout": SESSION_TIMEOUT_MS,
            "rebalance_timeout": REBALANCE_TIMEOUT_MS,
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

    # -- consuming -----------------------------------------------------------------------------------------------------

    async def _consume(self, coordinator: Connection, assigned: list[int]) -> None:
        positions = {partition: await self._committed(coordinator, partition) for partition in assigned}
        self._next_heartbeat_s = self.world.now + HEARTBEAT_S
        while not self.is_finishing:
            for partition in assigned:
                connection = await self.leader(self.topic, partition)
                before = positions[partition]
                after = await fetch(
                    connection,
                    self.history.partition(self.topic, partition),
                    before,
                    self.name,
                    max_bytes=FETCH_BYTES,
                    max_wait_ms=FETCH_WAIT_MS,
                )
                if after > before:
                    self.history.group(self.group, self.topic, partition).processed(before, after, self.name)
                    positions[partition] = after
                await self._keep_alive(coordinator)
            if not assigned:
                await self.pause()
                await self._keep_alive(coordinator)
            elif self.random.random() < 0.5:
                await self._commit(coordinator, positions)

    async def _keep_alive(self, coordinator: Connection) -> None:
        if self.world.now >= self._next_heartbeat_s:
            self._next_heartbeat_s = self.world.now + HEARTBEAT_S
            _raise_for(await self._call(coordinator, ApiKey.HEARTBEAT, self._identity()), "heartbeat")

    async def _committed(self, coordinator: Connection, partition: int) -> int:
        history = self.history.group(self.group, self.topic, partition)
        known = history.committed
        topics = [{"name": self.topic, "partition_indexes": [partition]}]
        response = await self._call(
            coordinator,
            ApiKey.OFFSET_FETCH,
            {
                "group_id": self.group,
                "topics": topics,
                "groups": [{"group_id": self.group, "member_id": None, "member_epoch": -1, "topics": topics}],
                "require_stable": False,
            },
            at_most=9,
        )
        answer = response.groups[0] if hasattr(response, "groups") else response
        _raise_for(answer, "offset fetch")
        result = answer.topics[0].partitions[0]
        _raise_for(result, "offset fetch")
        history.fetched(int(result.committed_offset), known, self.name)
        return max(0, int(result.committed_offset))

    async def _commit(self, coordinator: Connection, positions: dict[int, int]) -> None:
        for partition, offset in positions.items():
            self.history.group(self.group, self.topic, partition).trying(offset)
        partitions = [
            {
                "partition_index": partition,
                "committed_offset": offset,
                "committed_leader_epoch": -1,
                "committed_metadata": "",
            }
            for partition, offset in positions.items()
        ]
        response = await self._call(
            coordinator,
            ApiKey.OFFSET_COMMIT,
            {
                "group_id": self.group,
                "generation_id_or_member_epoch": self._generation,
                "member_id": self._member_id,
                "group_instance_id": None,
                "topics": [{"name": self.topic, "partitions": partitions}],
            },
            at_most=9,
        )
        for result in response.topics[0].partitions:
            _raise_for(result, "commit")
        for partition, offset in positions.items():
            self.history.group(self.group, self.topic, partition).commit_acknowledged(offset, self._generation)
        self.commits += 1

    async def _call(
        self, connection: Connection, key: ApiKey, values: dict[str, Any], *, at_most: int | None = None
    ) -> Any:
        return await connection.call(key, values, timeout_s=REQUEST_TIMEOUT_S, at_most=at_most)


def _raise_for(response: Any, what: str) -> None:
    code = ErrorCode(getattr(response, "error_code", 0))
    if code is not ErrorCode.none:
        raise KafkaError(code, what)
