"""Members of groups as raw requests, each on a connection of its own: consumer groups (KIP-848) and classic groups.

A group has the name of its topic. Members send their heartbeats at fixed times, spread evenly over the interval, so
that both servers get the same load. As Java's consumer does, a member acknowledges a changed assignment at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol
from uuid import UUID, uuid4

from bench.clients import NotMeasured
from chronik.client.cluster import Cluster, Deadline
from chronik.client.connection import Connection
from chronik.client.errors import RETRIABLE, ClientError, raise_for
from chronik.groups.consumer_protocol import write_assignment
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.primitives import write_string

REBALANCE_TIMEOUT_MS = 60_000
SETTLE_S_MAX = 120.0
RETRY_S = 0.05
CONNECTIONS_AT_ONCE = 50
CHECK_S = 0.002


class Member(Protocol):
    """One member. `beaten_s` is when it sent the last heartbeat that succeeded."""

    beaten_s: float

    async def beat(self) -> None:
        """Send a heartbeat, and whatever its answer requires."""

    async def leave(self) -> None: ...


class ConsumerMember:
    """A member of the new protocol. `owned` are the partitions of the last assignment that it has acknowledged."""

    def __init__(self, connection: Connection, topic: str, topic_id: UUID) -> None:
        self.owned: frozenset[int] = frozenset()
        self.beaten_s = 0.0
        self._connection = connection
        self._topic = topic
        self._topic_id = topic_id
        self._id = str(uuid4())
        self._epoch = 0

    async def beat(self) -> None:
        reported: frozenset[int] | None = None
        while True:
            sent_s = time.monotonic()
            response = await self._heartbeat(reported)
            self.beaten_s = sent_s
            if reported is not None:
                self.owned = reported
            if response.assignment is None:
                return
            assigned = frozenset(
                index
                for each in response.assignment.topic_partitions
                if each.topic_id == self._topic_id
                for index in each.partitions
            )
            if assigned == self.owned:
                return
            reported = assigned

    async def leave(self) -> None:
        self._epoch = -1
        await self._heartbeat(None)

    async def _heartbeat(self, reported: frozenset[int] | None) -> Any:
        values: dict[str, Any] = {
            "group_id": self._topic,
            "member_id": self._id,
            "member_epoch": self._epoch,
            "rebalance_timeout": -1,
            "subscribed_topic_names": None,
            "topic_partitions": None,
        }
        if reported is not None:
            partitions = sorted(reported)
            values["topic_partitions"] = [{"topic_id": self._topic_id, "partitions": partitions}] if partitions else []
        if self._epoch == 0:
            values |= {
                "rebalance_timeout": REBALANCE_TIMEOUT_MS,
                "subscribed_topic_names": [self._topic],
                "server_assignor": "uniform",
                "topic_partitions": [],
            }
        response = await self._connection.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, values)
        raise_for(response, f"heartbeat of a member of {self._topic}")
        self._epoch = response.member_epoch
        return response


class ClassicMember:
    """A member of the classic protocol. `generation` is the last one of which it has received its assignment."""

    def __init__(self, connection: Connection, topic: str, partitions: int, session_ms: int) -> None:
        self.generation = 0
        self.beaten_s = 0.0
        self._connection = connection
        self._topic = topic
        self._partitions = partitions
        self._session_ms = session_ms
        self._id = ""

    async def beat(self) -> None:
        if self.generation:
            sent_s = time.monotonic()
            values = {"group_id": self._topic, "generation_id": self.generation, "member_id": self._id}
            response = await self._connection.call(ApiKey.HEARTBEAT, values)
            if response.error_code is not ErrorCode.rebalance_in_progress:
                raise_for(response, f"heartbeat of a member of {self._topic}")
                self.beaten_s = sent_s
                return
        while not await self._join():
            pass

    async def leave(self) -> None:
        values = {"group_id": self._topic, "members": [{"member_id": self._id, "reason": None}]}
        raise_for(await self._connection.call(ApiKey.LEAVE_GROUP, values), f"leaving {self._topic}")

    async def _join(self) -> bool:
        """Join and get the assignment; return whether no other rebalance began meanwhile."""
        response = await self._connection.call(ApiKey.JOIN_GROUP, self._join_request(), timeout_s=SETTLE_S_MAX)
        if response.error_code is ErrorCode.member_id_required:
            self._id = response.member_id
            response = await self._connection.call(ApiKey.JOIN_GROUP, self._join_request(), timeout_s=SETTLE_S_MAX)
        raise_for(response, f"joining {self._topic}")
        generation, count = response.generation_id, len(response.members)
        values = {
            "group_id": self._topic,
            "generation_id": generation,
            "member_id": self._id,
            "protocol_type": "consumer",
            "protocol_name": "range",
            "assignments": [
                {
                    "member_id": member.member_id,
                    "assignment": write_assignment(0, {self._topic: range(index, self._partitions, count)}),
                }
                for index, member in enumerate(response.members)
            ],
        }
        response = await self._connection.call(ApiKey.SYNC_GROUP, values, timeout_s=SETTLE_S_MAX)
        if response.error_code is ErrorCode.rebalance_in_progress:
            return False
        raise_for(response, f"assignment in {self._topic}")
        self.generation = generation
        return True

    def _join_request(self) -> dict[str, Any]:
        # Subscription: version 0, one topic, no user data.
        subscription = b"\x00\x00\x00\x00\x00\x01" + write_string(self._topic, False) + b"\xff\xff\xff\xff"
        return {
            "group_id": self._topic,
            "session_timeout": self._session_ms,
            "rebalance_timeout": REBALANCE_TIMEOUT_MS,
            "member_id": self._id,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": subscription}],
            "reason": None,
        }


class Beating:
    """Members whose heartbeats run in the background. A member that fails ends the measurement."""

    def __init__(self, members: Sequence[Member], interval_s: float) -> None:
        self.interval_s = interval_s
        self._members = list(members)
        self._origin_s = time.monotonic()
        count = len(members)
        self._tasks = {
            id(member): asyncio.create_task(self._beat(member, number / count)) for number, member in enumerate(members)
        }

    async def silence(self, member: Member) -> None:
        """Send no more heartbeats of this member. Its last one has been answered."""
        sent_s = member.beaten_s
        while member.beaten_s == sent_s:
            await self.check()
            await asyncio.sleep(CHECK_S)
        self._members.remove(member)
        await _cancel([self._tasks.pop(id(member))])

    async def check(self) -> None:
        for task in self._tasks.values():
            if task.done():
                await task

    async def stop(self) -> None:
        """End the heartbeats and let all members leave, so that the group costs the next measurement nothing."""
        await _cancel(list(self._tasks.values()))
        with contextlib.suppress(ClientError, KafkaError):
            await asyncio.gather(*(member.leave() for member in self._members))

    async def _beat(self, member: Member, phase: float) -> None:
        try:
            await asyncio.sleep(phase * self.interval_s)
            while True:
                await _patiently(member)
                passed = (time.monotonic() - self._origin_s) / self.interval_s - phase
                await asyncio.sleep((1 - passed % 1) * self.interval_s)
        except (ClientError, KafkaError, TimeoutError) as error:
            raise NotMeasured(f"a member failed: {error}") from None


async def _patiently(member: Member) -> None:
    """Beat, and try again while the coordinator is not ready yet."""
    deadline_s = time.monotonic() + SETTLE_S_MAX
    while True:
        try:
            await member.beat()
            return
        except KafkaError as error:
            if error.code not in RETRIABLE or time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(RETRY_S)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def connected(cluster: Cluster, group: str, count: int) -> AsyncIterator[list[Connection]]:
    """Yield so many connections to the coordinator of a group."""
    deadline = Deadline(SETTLE_S_MAX)
    node_id = await cluster.retry(lambda deadline: cluster.coordinator(group, deadline), deadline)
    broker = (await cluster.layout([], deadline=deadline)).brokers[node_id]
    connections: list[Connection] = []
    try:
        while len(connections) < count:
            several = min(CONNECTIONS_AT_ONCE, count - len(connections))
            opening = (cluster.new_connection(broker.host, broker.port) for _ in range(several))
            connections += await asyncio.gather(*opening)
        yield connections
    finally:
        for connection in connections:
            connection.close()
