"""Sampled offsets of partitions across the cluster: from this node's own log, or from each partition's leader.

A leader that does not answer delays nothing: its last reported offsets stay, with their age. It is queried again once
its pending request times out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from chronik.client.connection import Connection
from chronik.client.errors import ClientError
from chronik.doctor.brokers import log_bounds
from chronik.metadata.image import BrokerImage, ClusterImage, PartitionImage, TopicImage
from chronik.web.node_view import NodeView, led_here
from chronik.wire.api import ApiKey
from chronik.wire.errors import KafkaError

T = TypeVar("T")

CLIENT_ID = "chronik-page"
TIMEOUT_S = 2.0
PartitionName = tuple[str, int]
Bounds = tuple[int, int, int, int]
"""The log start offset, the end offsets that read_committed and other consumers see, and the log end offset."""
ANSWER_WAIT_S = 0.4
"""How long a sample waits for the other nodes."""
STALE_S = 2.5
"""After this age, a leader's report is replaced by what this node's own replica knows."""


@dataclass(slots=True)
class Sample:
    """One partition's offsets, the node that reported them, when (event loop time), and how they change."""

    log_start_offset: int
    last_stable_offset: int
    high_watermark: int
    log_end_offset: int
    node: int
    at_s: float
    rate: float = 0.0
    """Records per second appended since the previous sample."""
    stuck_since_s: float | None = None
    """Since when the high watermark has not advanced while the log end is beyond it, or None if there is no lag."""

    @property
    def lag(self) -> int:
        return self.log_end_offset - self.high_watermark

    def stuck_ms(self, now_s: float) -> int:
        return 0 if self.stuck_since_s is None else int((now_s - self.stuck_since_s) * 1000)


class BrokerPool:
    """One connection to each queried broker, kept until `close`. Each request is sent once, with a short deadline.

    Raises ClientError or KafkaError. The caller shows what it has, and retries next time.
    """

    def __init__(self, node: NodeView) -> None:
        self._node = node
        self._connections: dict[tuple[str, int], asyncio.Task[Connection]] = {}

    async def close(self) -> None:
        opened, self._connections = list(self._connections.values()), {}
        for task in opened:
            task.cancel()
        for result in await asyncio.gather(*opened, return_exceptions=True):
            if isinstance(result, Connection):
                result.close()

    async def call(
        self, broker: BrokerImage, key: ApiKey, values: Mapping[str, Any], at_most: int | None = None
    ) -> Any:
        connection = await self._connection(broker)
        return await connection.call(key, values, timeout_s=TIMEOUT_S, at_most=at_most)

    async def bounds(self, broker: BrokerImage, partitions: Iterable[PartitionName]) -> dict[PartitionName, Bounds]:
        """Return the offsets of partitions that the broker leads. Partitions with an error are omitted."""
        by_topic: dict[str, list[int]] = {}
        for topic, partition in partitions:
            by_topic.setdefault(topic, []).append(partition)
        starts, stable, visible, ends = (
            {name: offset for name, (offset, _) in answer.items() if offset is not None}
            for answer in await log_bounds(await self._connection(broker), by_topic, TIMEOUT_S)
        )
        # Sequential requests: an end may have grown since the one before it was read, but is never below it.
        bounds: dict[PartitionName, Bounds] = {}
        for name, start in starts.items():
            if name in stable and name in visible and name in ends:
                end = max(visible[name], ends[name])
                bounds[name] = (start, min(stable[name], visible[name]), visible[name], end)
        return bounds

    async def _connection(self, broker: BrokerImage) -> Connection:
        address = (broker.host, broker.port)
        task = self._connections.get(address)
        if task is not None and task.done() and (task.cancelled() or task.exception() or task.result().is_closed):
            task = None
        if task is None:
            task = asyncio.create_task(self._node.connect(*address, client_id=CLIENT_ID, timeout_s=TIMEOUT_S))
            self._connections[address] = task
        return await asyncio.shield(task)


async def answers_of(
    brokers: Sequence[BrokerImage], ask: Callable[[BrokerImage], Awaitable[T]]
) -> tuple[list[T], list[int]]:
    """Ask all brokers at once. Return their answers, and the ids of the brokers that did not answer."""
    results = await asyncio.gather(*(ask(broker) for broker in brokers), return_exceptions=True)
    answers: list[T] = []
    silent: list[int] = []
    for broker, result in zip(brokers, results, strict=True):
        if isinstance(result, (ClientError, KafkaError)):
            silent.append(broker.id)
        elif isinstance(result, BaseException):
            raise result
        else:
            answers.append(result)
    return answers, silent


class OffsetSampler:
    """Samples of some topics, kept from one call to the next. Owned by the event loop; close it when done.

    Group views send their requests through `brokers`. Samples have connections of their own, because a request that
    times out ends its connection.
    """

    def __init__(self, node: NodeView) -> None:
        self.samples: dict[PartitionName, Sample] = {}
        self.brokers = BrokerPool(node)
        self._leaders = BrokerPool(node)
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, asyncio.Task[dict[PartitionName, Bounds]]] = {}

    async def aclose(self) -> None:
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await self.brokers.close()
        await self._leaders.close()

    async def sample(self, image: ClusterImage, topics: Iterable[TopicImage]) -> None:
        """Update `samples`. Partitions that are not requested are dropped."""
        requested: set[PartitionName] = set()
        led: dict[int, list[PartitionName]] = {}
        for topic in topics:
            for partition in topic.partitions:
                name = (topic.name, partition.partition)
                requested.add(name)
                self._sample_own(name, partition, led)
        for name in self.samples.keys() - requested:
            del self.samples[name]
        for leader, names in led.items():
            broker = image.brokers.get(leader)
            if broker is not None and leader not in self._pending:
                self._pending[leader] = self._loop.create_task(self._leaders.bounds(broker, names))
        if self._pending:
            await asyncio.wait(self._pending.values(), timeout=ANSWER_WAIT_S)
        for leader, task in list(self._pending.items()):
            if task.done():
                del self._pending[leader]
                with contextlib.suppress(ClientError, KafkaError):
                    for name, bounds in task.result().items():
                        if name in requested:
                            self._note(name, bounds, leader)
        self._fall_back(requested)

    def _sample_own(self, name: PartitionName, partition: PartitionImage, led: dict[int, list[PartitionName]]) -> None:
        node = self._node
        hosted = led_here(node, *name)
        if hosted is not None:
            ends = (hosted.last_stable_offset, hosted.visible_end_offset, hosted.log_end_offset)
            bounds = (hosted.log_start_offset, *ends)
            self._note(name, bounds, node.node_id)
        elif partition.leader >= 0 and partition.leader != node.node_id:
            led.setdefault(partition.leader, []).append(name)

    def _fall_back(self, requested: set[PartitionName]) -> None:
        """Use this node's own replicas for partitions whose last report is too old."""
        node, oldest_s = self._node, self._loop.time() - STALE_S
        for name in requested:
            known = self.samples.get(name)
            replica = node.partition(*name) if known is None or known.at_s < oldest_s else None
            if replica is not None:
                ends = (replica.last_stable_offset, replica.high_watermark, replica.log_end_offset)
                bounds = (replica.log_start_offset, *ends)
                self._note(name, bounds, node.node_id)

    def _note(self, name: PartitionName, bounds: Bounds, node: int) -> None:
        now_s = self._loop.time()
        start, stable, visible, end = bounds
        fresh = Sample(start, stable, visible, end, node, now_s)
        before = self.samples.get(name)
        if before is not None and before.node == node:
            fresh.rate = max(0.0, end - before.log_end_offset) / max(0.001, now_s - before.at_s)
        if fresh.lag > 0:
            is_stuck = before is not None and before.lag > 0 and visible <= before.high_watermark
            fresh.stuck_since_s = before.stuck_since_s if before is not None and is_stuck else now_s
        self.samples[name] = fresh
