"""A partition's log as its leader serves it to consumers, for a node that is not the leader."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chronik.client.batches import Batches
from chronik.client.cluster import Cluster
from chronik.client.errors import ClientError
from chronik.client.topics import EARLIEST, LATEST, Topics
from chronik.metadata.image import BrokerImage
from chronik.web.answers import Refusal
from chronik.wire.errors import KafkaError

CLIENT_ID = "chronik-page"
ASK_TIMEOUT_S = 2.5
FETCH_BYTES_MAX = 1024 * 1024


class LeaderLog:
    """One partition, queried over the Kafka protocol."""

    def __init__(self, cluster: Cluster, topic: str, partition: int) -> None:
        self._topics = Topics(cluster)
        self._batches = Batches(cluster)
        self._topic = topic
        self._partition = partition

    async def bounds(self) -> tuple[int, int]:
        """Return the log start offset, and the first offset that consumers cannot see."""
        return await self._listed(EARLIEST), await self._listed(LATEST)

    async def offset_at(self, time_ms: int) -> int | None:
        """Return the offset of the first record at or after this time, or None if there is none."""
        offset = await self._listed(time_ms)
        return None if offset < 0 else offset

    async def read(self, offset: int) -> memoryview:
        """Return whole batches, starting with the one that contains `offset`; empty if there is none yet."""
        fetched = await self._batches.fetch(
            self._topic, self._partition, offset, max_bytes=FETCH_BYTES_MAX, max_wait_ms=0, min_bytes=0
        )
        return fetched.records

    async def _listed(self, time_ms: int) -> int:
        found = await self._topics.offsets(self._topic, time_ms, [self._partition])
        return found[self._partition].offset


@asynccontextmanager
async def leader_log(leader: BrokerImage, topic: str, partition: int) -> AsyncIterator[LeaderLog]:
    """Connect to the leader. Its errors become a Refusal that names it."""
    async with Cluster([(leader.host, leader.port)], client_id=CLIENT_ID, timeout_s=ASK_TIMEOUT_S) as cluster:
        try:
            yield LeaderLog(cluster, topic, partition)
        except (KafkaError, ClientError) as error:
            line = f"node {leader.id}, which leads {topic}-{partition}, did not answer: {error}; ask again"
            raise Refusal(503, line) from None
