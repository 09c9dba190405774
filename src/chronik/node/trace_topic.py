"""From the ring to the topic `__chronik_traces`: a record for each event, its value the event's JSON, its key the node.

The topic is made when the first topic is traced. Whichever node leads it appends; the others send it theirs, as
forwarded produce goes. Traces tell why a cluster stalls, so they must not add to it: few are in hand at a time, few go
out in a second, and what cannot be brought there in time is dropped and counted.
"""

from __future__ import annotations

import asyncio

from chronik.client.errors import ClientError
from chronik.metadata.names import TRACES_TOPIC
from chronik.node.admin.topics import Topics
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import Peers
from chronik.node.membership.topic_plans import NewTopic
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.observe.traces import Trace, encode_trace
from chronik.wire.api import ApiKey
from chronik.wire.batch import NewRecord, encode_batch
from chronik.wire.compression import GZIP
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest
from chronik.wire.produce import ProduceRequest, ProduceTopic, read_produce_response, write_produce_request

PARTITION = 0
REPLICAS_MAX = 3
CONFIGS = {
    "retention.ms": str(60 * 60 * 1000),
    "retention.bytes": str(256 * 1024 * 1024),
    "segment.bytes": str(32 * 1024 * 1024),
    "min.insync.replicas": "1",
}
"""What is left of a cluster shall still be able to tell: one replica is enough."""

INTERVAL_S = 0.5
EVENTS_AT_ONCE_MAX = 500
"""With the interval: at most 1,000 in a second."""
TRIES_MAX = 5
PAUSE_S = 1.0
TIMEOUT_S = 3.0
PRODUCE_VERSION = 11
LEADER_WROTE_IT = 1
PURPOSE = "traces"


class TraceTopic:
    """Owned by the loop. Invariant: at most EVENTS_AT_ONCE_MAX events are in hand."""

    def __init__(
        self,
        runtime: Runtime,
        metadata: MetadataLog,
        peers: Peers,
        host: PartitionHost,
        topics: Topics,
    ) -> None:
        self._runtime = runtime
        self._metadata = metadata
        self._peers = peers
        self._host = host
        self._topics = topics
        self._ring = runtime.traces
        self._log = runtime.log.bind(component="traces")
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False

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
                    await self._bring(events)
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

    async def _bring(self, events: list[Trace]) -> None:
        """Several tries, since a leader may be on the move; then they are given up."""
        key = str(self._runtime.node_id).encode()
        records: list[NewRecord] = [(key, encode_trace(event), [], int(event.time_ms)) for event in events]
        # A fifteenth of the size, in the one codec that every client reads.
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
        """Once, until it works again."""
        if not self._is_failing:
            self._is_failing = True
            self._log.warning("traces_dropped", reason=reason, then="the ring keeps the latest, see /api/traces")

    async def _produce(self, batch: bytes) -> None:
        image = self._metadata.image.partition(TRACES_TOPIC, PARTITION)
        if image is None or image.leader < 0:
            raise KafkaError(ErrorCode.leader_not_available, f"{TRACES_TOPIC} has no leader")
        if image.leader == self._runtime.node_id:
            led = self._host.require_leader(TRACES_TOPIC, PARTITION)
            led.append_internal(batch, self._runtime.env.wall_ms())
            return
        connection = await self._peers.connection(image.leader, PURPOSE)
        topic = ProduceTopic(TRACES_TOPIC, None, [(PARTITION, memoryview(batch))])
        request = ProduceRequest(None, LEADER_WROTE_IT, int(TIMEOUT_S * 1000), [topic])
        body = await connection.send(ApiKey.PRODUCE, PRODUCE_VERSION, write_produce_request(PRODUCE_VERSION, request))
        answer = read_produce_response(PRODUCE_VERSION, body).topics[0][2][0]
        if answer.error_code:
            raise KafkaError(ErrorCode(answer.error_code), answer.error_message or "")
