"""Readers of a partition's log: on this node, or at its leader over HTTP or the Kafka protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias, TypeVar

import msgspec

from chronik.client.batches import Batches
from chronik.client.cluster import Cluster
from chronik.client.errors import ClientError
from chronik.client.node_http import HttpError, get
from chronik.client.topics import EARLIEST, LATEST, Topics
from chronik.metadata.image import BrokerImage
from chronik.node.replicas.partition import Partition
from chronik.web.answers import INT32_MAX, Flag, Number, Parameters, Refusal
from chronik.web.node_view import NodeView
from chronik.web.offsets import CLIENT_ID
from chronik.wire.errors import ErrorCode, KafkaError

T = TypeVar("T")

PARTITION = Number("partition", high=INT32_MAX, is_required=True)
OWN = Flag("own", "Answer only from this node's own log.")
HTTP_TIMEOUT_S = 1.0
"""After this, the leader is queried over the Kafka protocol."""
KAFKA_TIMEOUT_S = 2.5
READ_BYTES_MAX = 1024 * 1024


class LocalLog:
    """A partition that this node leads or replicates. A replica is read up to the high watermark that it knows."""

    def __init__(self, node: NodeView, partition: Partition) -> None:
        self._node = node
        self._partition = partition
        self._name = f"{partition.topic}-{partition.index}"
        self._generation = partition.generation

    async def bounds(self) -> tuple[int, int]:
        """Return the log start offset, and the first offset that consumers cannot see."""
        return self._partition.log_start_offset, self._partition.visible_end_offset

    async def offset_at(self, time_ms: int) -> int | None:
        """Return the offset of the first record at or after this time, or None if there is none."""
        partition = self._partition
        upto = partition.visible_end_offset
        record = await self.run(lambda: partition.log.offset_for_timestamp_job(time_ms, upto))
        return None if record is None or record.offset >= upto else record.offset

    async def read(self, offset: int) -> memoryview:
        """Return whole batches, starting with the one that contains `offset`; empty if there is none yet."""
        partition = self._partition
        upto = partition.visible_end_offset
        return memoryview(await self.run(lambda: partition.log.read_job(offset, READ_BYTES_MAX, upto)))

    async def run(self, plan: Callable[[], Callable[[], T]]) -> T:
        """Plan a log job here and run it in the executor. A truncation waits for the job."""
        partition = self._partition
        if partition.is_closed or not partition.jobs.begin():
            raise Refusal(503, f"the log of {self._name} is being truncated or closed: retry")
        with partition.jobs.running():
            try:
                result = await self._node.run_blocking(plan())
            except (KafkaError, OSError) as error:
                if isinstance(error, KafkaError) and error.code is ErrorCode.offset_out_of_range:
                    raise Refusal(503, f"{self._name}: {error.message} any more: retry") from None
                raise Refusal(500, f"the log of {self._name} cannot be read: {error}; see the node's log") from None
        if partition.generation != self._generation:
            raise Refusal(503, f"the leader of {self._name} changed during the read: retry")
        return result


class LeaderLog:
    """A partition that another node leads, queried over the Kafka protocol."""

    def __init__(self, cluster: Cluster, topic: str, partition: int) -> None:
        self._topics = Topics(cluster)
        self._batches = Batches(cluster)
        self._topic = topic
        self._partition = partition

    async def bounds(self) -> tuple[int, int]:
        return await self._listed(EARLIEST), await self._listed(LATEST)

    async def offset_at(self, time_ms: int) -> int | None:
        offset = await self._listed(time_ms)
        return None if offset < 0 else offset

    async def read(self, offset: int) -> memoryview:
        fetched = await self._batches.fetch(
            self._topic, self._partition, offset, max_bytes=READ_BYTES_MAX, max_wait_ms=0, min_bytes=0
        )
        return memoryview(fetched.records)

    async def _listed(self, time_ms: int) -> int:
        return (await self._topics.offsets(self._topic, time_ms, [self._partition]))[self._partition].offset


LogReader: TypeAlias = LocalLog | LeaderLog


@asynccontextmanager
async def leader_log(node: NodeView, leader: BrokerImage, topic: str, partition: int) -> AsyncIterator[LeaderLog]:
    """Connect to the leader. Its errors become a Refusal that names it."""
    bootstrap = [(leader.host, leader.port)]
    async with Cluster(bootstrap, client_id=CLIENT_ID, timeout_s=KAFKA_TIMEOUT_S, connect=node.connect) as cluster:
        try:
            yield LeaderLog(cluster, topic, partition)
        except (KafkaError, ClientError) as error:
            line = f"node {leader.id}, which leads {topic}-{partition}, did not answer: {error}; retry"
            raise Refusal(503, line) from None


class _Responder(msgspec.Struct):
    """The node that a page of batches or messages comes from."""

    leader: int | None = None
    node: int | None = None


async def forward_to_leader(node: NodeView, leader: BrokerImage, parameters: Parameters, path: str) -> bytes | None:
    """Return the leader's response, encoded, or None if its HTTP port cannot be reached from here.

    The leader checks the rights of the client that sent the request.
    """
    if not leader.http:
        return None
    try:
        # With own=1, the leader does not forward the request again.
        query: dict[str, object] = {**parameters.given(), OWN.name: 1}
        body = (await get(leader.http, path, HTTP_TIMEOUT_S, node.caller(parameters.access), **query)).body
        # The leader's address may be valid on its own machine only; here, another node may listen there.
        responder = msgspec.json.decode(body, type=_Responder)
    except (HttpError, msgspec.DecodeError):
        return None
    return body if leader.id in (responder.leader, responder.node) else None
