"""Copies trace events from the ring to the topic `__chronik_traces`: one JSON record per event, keyed by node id.

The topic is created when the first topic is traced. Its leader appends directly; other nodes send their events to the
leader, like forwarded produce requests. Traces explain why a cluster stalls, so they must not add load: few are in
flight at a time, few are sent per second, and events that cannot be delivered in time are dropped and counted.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from chronik.client.errors import ClientError
from chronik.metadata.image import TRACES_TOPIC
from chronik.node.admin.topics import Topics
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import Peers
from chronik.node.membership.topic_plans import NewTopic
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.observe.traces import Trace, encode_trace
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.compression import GZIP
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest
from chronik.wire.produce import ProduceRequest, ProduceTopic, read_produce_response, write_produce_request
from chronik.wire.records import NewRecord

PARTITION = 0
REPLICAS_MAX = 3
CONFIGS = {
    "retention.ms": str(60 * 60 * 1000),
    "retention.bytes": str(256 * 1024 * 1024),
    "segment.bytes": str(32 * 1024 * 1024),
    "min.insync.replicas": "1",
}
"""One in-sync replica is enough, so that even a cluster that lost most of its nodes can write traces."""

INTERVAL_S = 0.5
EVENTS_AT_ONCE_MAX = 500
"""With INTERVAL_S: at most 1,000 events per second."""
TRIES_MAX = 5
PAUSE_S = 1.0
TIMEOUT_S = 3.0
PRODUCE_VERSION = 11
ACKS_LEADER = 1
PURPOSE = "traces"


@dataclass(eq=False)
class TraceTopic:
    """Owned by the loop. Invariant: at most EVENTS_AT_ONCE_MAX events are in flight."""

    _runtime: Runtime
    _metadata: MetadataLog
    _peers: Peers
    _host: PartitionHost
    _topics: Topics
    _task: asyncio.Task[None] | None = None
    _is_failing: bool = False

    def __post_init__(self) -> None:
        self._ring = self._runtime.traces
        self._log = self._runtime.log.bind(component="traces")

    def start(self) -> None:
        self._task = self._runtime.loop.create_task(self._run(), name="traces")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        ring = self._ring
        while True:
            await asyncio.sleep(INTERVAL_S)
            if not ring.topics and ring.taken == ring.last_n:
                continue
            try:
                if TRACES_TOPIC not in self._metadata.image.topics:
                    await self._create()
                events = ring.take(EVENTS_AT_ONCE_MAX)
                if events:
                    await self._write(events)
            except Exception:
                self._log.exception("traces_failed")
                await asyncio.sleep(PAUSE_S)

    async def _create(self) -> None:
        replicas = min(REPLICAS_MAX, max(1, len(self._metadata.image.staying_brokers())))
        try:
            await self._topics.create(NewTopic(TRACES_TOPIC, 1, replicas, configs=CONFIGS), by_broker=True)
        except (KafkaError, TimeoutError) as error:
            if isinstance(error, TimeoutError) or error.code is not ErrorCode.topic_already_exists:
                self._report(str(error) or "no answer in time")

    async def _write(self, events: list[Trace]) -> None:
        """Write the events to the topic. Retry, because the leader may be changing; drop them after TRIES_MAX tries."""
        key = str(self._runtime.node_id).encode()
        records: list[NewRecord] = [(key, encode_trace(event), [], int(event.time_ms)) for event in events]
        # gzip reduces the batch to a fifteenth, and every client can read it.
        batch = encode_batch(records, codec=GZIP)
        reason = ""
        for _ in range(TRIES_MAX):
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._produce(batch)
                self._is_failing = False
                return
            except (KafkaError, ClientError, MalformedRequest, TimeoutError) as error:
                reason = str(error) or "no answer in time"
            await asyncio.sleep(PAUSE_S)
        self._ring.drop(len(events))
        self._report(reason)

    def _report(self, reason: str) -> None:
        """Log the failure once, until writing works again."""
        if not self._is_failing:
            self._is_failing = True
            self._log.warning("traces_dropped", reason=reason, then="the ring keeps the latest, see /api/traces")

    async def _produce(self, batch: bytes) -> None:
        image = self._metadata.image.partition(TRACES_TOPIC, PARTITION)
        if image is None or image.leader < 0:
            raise KafkaError(ErrorCode.leader_not_available, f"{TRACES_TOPIC} has no leader")
        if image.leader == self._runtime.node_id:
            leader = self._host.require_leader(TRACES_TOPIC, PARTITION)
            leader.append_internal(batch, self._runtime.env.wall_ms())
            return
        connection = await self._peers.connection(image.leader, PURPOSE)
        topic = ProduceTopic(TRACES_TOPIC, None, [(PARTITION, memoryview(batch))])
        request = ProduceRequest(None, ACKS_LEADER, int(TIMEOUT_S * 1000), [topic])
        body = await connection.send(ApiKey.PRODUCE, PRODUCE_VERSION, write_produce_request(PRODUCE_VERSION, request))
        answer = read_produce_response(PRODUCE_VERSION, body).topics[0][2][0]
        if answer.error_code:
            raise KafkaError(ErrorCode(answer.error_code), answer.error_message or "")
