"""Clients that overload a cluster: floods, slow readers, large groups, many connections. Each tracks its outcome."""

from __future__ import annotations

import asyncio
import resource
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

from confluent_kafka import KafkaError, Message, Producer
from tests.cluster.support_cluster import Nodes, reset_peak
from tests.cluster.support_groups import WireMember
from tests.cluster.support_links import LoopThread
from tests.node.support_wire import FETCH_VERSION, decoded, fetch_of, unique

from chronik.client.endpoint import Endpoint
from chronik.wire import frames, messages
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode
from chronik.wire.fetch import read_fetch_response, write_fetch_request
from chronik.wire.primitives import skip_tags

MB = 1024 * 1024
OUTCOME_TIMEOUT_S = 120.0
SESSION_MS = 30_000
SERVED_TIMEOUT_S = 30.0
FILES_SPARE = 500


def reset_peaks(nodes: Nodes) -> dict[int, int]:
    """Reset the nodes' peak memory to their current resident memory, and return the latter."""
    return {node.id: reset_peak(node.process.pid) for node in nodes.responsive}


def highest_growth_mb(nodes: Nodes, before: dict[int, int]) -> float:
    """Return the largest growth of any node: from its memory before to its peak."""
    return max(nodes.resident_bytes(node_id, "VmHWM") - was for node_id, was in before.items()) / MB


@dataclass
class Flood:
    """Produces as fast as possible, for a limited time and at most `most` records; every record gets an outcome."""

    bootstrap: str
    topic: str
    acks: str
    value: bytes = bytes(10_000)
    most: int = 150_000
    sent: int = 0
    acknowledged: int = 0
    failed: list[str] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "acks": self.acks,
                "linger.ms": 1,
                "max.in.flight.requests.per.connection": 1_000,
                # Records queued in the client must be sent within its request.timeout.ms, or the client sends them
                # again.
                "queue.buffering.max.kbytes": 64 * 1024,
                "message.timeout.ms": 110_000,
                "log_level": 2,
            }
        )
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s and self.sent < self.most:
            try:
                producer.produce(self.topic, self.value, on_delivery=self._answered)
                self.sent += 1
                producer.poll(0)
            except BufferError:
                producer.poll(0.05)  # back-pressure, as a client sees it
        assert producer.flush(OUTCOME_TIMEOUT_S) == 0, "not every record has an outcome"

    def _answered(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.acknowledged += 1
        else:
            self.failed.append(str(error))


class SlowReaders:
    """Opens `count` connections that request megabytes and read them slowly, and then checks everything they received.

    Runs on an event loop in its own thread. `sips` counts the reads of all connections.
    """

    PIPELINED = 4
    SIP_BYTES = 4096
    SIP_PAUSE_S = 0.05

    def __init__(self, nodes: Nodes, topic: str, count: int) -> None:
        leader = nodes.node(nodes.leader(topic))
        self._host, self._port = leader.kafka
        request = fetch_of((topic, 0, 0), max_bytes=50 * MB, partition_max_bytes=50 * MB)
        self._body = write_fetch_request(FETCH_VERSION, request)
        self._count = count
        self.sips = 0
        self._hurry = threading.Event()
        self._loop = LoopThread("slow-readers")
        self._all = self._loop.submit(self._read_all())

    def finish(self) -> list[list[int]]:
        """Read the remaining data at full speed and return the offsets in each response of each connection."""
        self._hurry.set()
        try:
            return self._all.result(OUTCOME_TIMEOUT_S)
        finally:
            self._loop.close()

    async def _read_all(self) -> list[list[int]]:
        responses = await asyncio.gather(*(self._read() for _ in range(self._count)))
        return [offsets for answers in responses for offsets in answers]

    async def _read(self) -> list[list[int]]:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=64 * 1024)
        for number in range(self.PIPELINED):
            writer.write(frames.write_request(ApiKey.FETCH, FETCH_VERSION, number + 1, "slow", self._body))
        received = bytearray()
        answers: list[list[int]] = []
        while len(answers) < self.PIPELINED:
            data = await reader.read(self.SIP_BYTES if not self._hurry.is_set() else MB)
            assert data, "the node ended a connection of a reader that was slow"
            received += data
            self.sips += 1
            while len(received) >= 4 and len(received) >= 4 + (size := struct.unpack_from(">i", received)[0]):
                answers.append(_offsets(bytes(received[4 : 4 + size]), len(answers) + 1))
                del received[: 4 + size]
            if not self._hurry.is_set():
                await asyncio.sleep(self.SIP_PAUSE_S)
        writer.transport.abort()
        return answers


def _offsets(frame: bytes, correlation_id: int) -> list[int]:
    assert int.from_bytes(frame[:4], "big") == correlation_id
    body = memoryview(frame)[4:]
    answer = read_fetch_response(FETCH_VERSION, body[skip_tags(body, 0) :]).topics[0][2][0]
    assert answer.error_code == 0, ErrorCode(answer.error_code)
    return [record.offset for record in decoded(answer.records)]


class Member(WireMember):
    """Joins, is assigned some of the partitions, and leaves."""

    def __init__(self, nodes: Nodes, group: str, partitions: int) -> None:
        client = nodes.connect(nodes.coordinator(group), timeout_s=90.0)
        super().__init__(client, group, session_timeout_ms=SESSION_MS, rebalance_timeout_ms=60_000)
        self._partitions = partitions

    @property
    def assigned(self) -> list[int]:
        return list(self.assignment)

    def join(self) -> None:
        """Complete a rebalance: return when the member has its assignment in a stable generation."""
        while True:
            code = self.joined(self.send_join())
            if code is ErrorCode.member_id_required:
                continue
            assert code is ErrorCode.none, code
            code = self.sync(self._shares())
            if code is ErrorCode.rebalance_in_progress:
                continue
            assert code is ErrorCode.none, code
            return

    def follow(self) -> None:
        """Rejoin if the group is rebalancing, as a client's heartbeat thread does."""
        code = self.heartbeat()
        if code is ErrorCode.rebalance_in_progress:
            self.join()
        else:
            assert code is ErrorCode.none, code

    def end(self) -> None:
        """Leave the group."""
        code = self.leave()
        assert code is ErrorCode.none, code
        self.client.socket.close()

    def _shares(self) -> dict[str, bytes]:
        """Assign each member its partitions, one byte each: the coordinator does not parse assignments."""
        count = len(self.members)
        return {member: bytes(range(index, self._partitions, count)) for index, member in enumerate(self.members)}


class ConsumerMember:
    """A member of the new protocol (KIP-848), which owns what it has acknowledged."""

    def __init__(self, nodes: Nodes, group: str, topic: str) -> None:
        self.assigned: list[int] = []
        self.epoch = 0
        self._client = nodes.connect(nodes.coordinator(group), timeout_s=90.0)
        self._group, self._topic = group, topic
        self._id = str(uuid4())
        self._topic_id: UUID | None = None

    def follow(self) -> None:
        """Send heartbeats until the assignment is the one that was acknowledged; the first one joins."""
        reported: list[int] | None = None
        while True:
            response = self._beat(reported)
            if reported is not None:
                self.assigned = reported
            if response.assignment is None:
                return
            topics = response.assignment.topic_partitions
            assigned = sorted(index for each in topics for index in each.partitions)
            self._topic_id = topics[0].topic_id if topics else self._topic_id
            if assigned == self.assigned:
                return
            # It gives up at once what it must, and takes the rest only once that is acknowledged.
            self.assigned = sorted(set(self.assigned) & set(assigned))
            reported = assigned

    def end(self) -> None:
        """Leave the group."""
        self.assigned, self.epoch = [], -1
        self._beat(None)
        self.close()

    def close(self) -> None:
        self._client.socket.close()

    def _beat(self, owned: list[int] | None) -> Any:
        joins = self.epoch == 0
        partitions = [{"topic_id": self._topic_id, "partitions": owned}] if owned else []
        values: dict[str, Any] = {
            "group_id": self._group,
            "member_id": self._id,
            "member_epoch": self.epoch,
            "rebalance_timeout": 60_000 if joins else -1,
            "subscribed_topic_names": [self._topic] if joins else None,
            "topic_partitions": partitions if joins or owned is not None else None,
        }
        response = self._client.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, values)
        assert response.error_code is ErrorCode.none, response
        self.epoch = response.member_epoch
        return response


def new_group() -> str:
    return unique("group")


class Storm:
    """Many clients that connect at once, are served, and stay connected until the block ends.

    `served` clients got both answers in time.
    """

    def __init__(self, nodes: Sequence[Endpoint], clients: int, topic: str) -> None:
        self.served = 0
        self.failures: Counter[str] = Counter()
        self._nodes = nodes
        self._clients = clients
        versions = messages.write_request(ApiKey.API_VERSIONS, 0, {})
        metadata = messages.write_request(
            ApiKey.METADATA, 12, {"topics": [{"name": topic}], "allow_auto_topic_creation": False}
        )
        self._requests = frames.write_request(ApiKey.API_VERSIONS, 0, 1, "storm", versions)
        self._requests += frames.write_request(ApiKey.METADATA, 12, 2, "storm", metadata)
        self._writers: list[asyncio.StreamWriter] = []
        self._loop = LoopThread("storm")

    def __enter__(self) -> Storm:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < self._clients + FILES_SPARE:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, self._clients + FILES_SPARE), hard))
        self._loop.run(self._all(), 2 * SERVED_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._close(), SERVED_TIMEOUT_S)
        self._loop.close()

    async def _all(self) -> None:
        await asyncio.gather(*(self._one(self._nodes[number % len(self._nodes)]) for number in range(self._clients)))

    async def _one(self, node: Endpoint) -> None:
        try:
            async with asyncio.timeout(SERVED_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(*node)
                self._writers.append(writer)
                writer.write(self._requests)
                for correlation_id in (1, 2):
                    (size,) = struct.unpack(">i", await reader.readexactly(4))
                    answer = await reader.readexactly(size)
                    if int.from_bytes(answer[:4], "big") != correlation_id:
                        raise ValueError(f"answer to another request than {correlation_id}")
            self.served += 1
        except (OSError, EOFError, ValueError) as error:
            self.failures[repr(error)] += 1

    async def _close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # lets the transports close
