"""Raw record batches: appended to and fetched from a partition's leader, never decoded here.

For tools that move or check records (forwarding, doctor, pipeline). Applications' clients provide ordered delivery with
retries.
"""

from __future__ import annotations

from dataclasses import dataclass

from chronik.client.cluster import Cluster, Deadline
from chronik.client.connection import Connection
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import FetchPartition, FetchRequest, FetchTopic, read_fetch_response, write_fetch_request
from chronik.wire.produce import ProduceRequest, ProduceTopic, read_produce_response, write_produce_request

BY_NAME_AT_MOST = 12
"""The last version of Produce and Fetch that identifies topics by name instead of by id."""
FETCH_SLACK_S = 5.0
ACKS_ALL = -1


@dataclass(frozen=True, slots=True)
class FetchedBatches:
    """Whole batches, starting with the one that holds the requested offset; `records` is a slice of the response."""

    records: memoryview
    high_watermark: int
    log_start_offset: int


class Batches:
    """Produces and fetches encoded batches in one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def append(
        self, topic: str, partition: int, records: bytes, *, acks: int = ACKS_ALL, timeout_s: float = 30.0
    ) -> int:
        """Append encoded batches once and return their base offset. No retry: a lost response may hide a success."""
        deadline = Deadline(timeout_s)
        connection = await self._leader(topic, partition, deadline)
        version = connection.version(ApiKey.PRODUCE, BY_NAME_AT_MOST)
        request = ProduceRequest(
            None, acks, deadline.left_ms, [ProduceTopic(topic, None, [(partition, memoryview(records))])]
        )
        body = write_produce_request(version, request)
        response = await connection.request(ApiKey.PRODUCE, version, body, timeout_s=deadline.left_s)
        result = read_produce_response(version, response).topics[0][2][0]
        if result.error_code:
            raise KafkaError(ErrorCode(result.error_code), result.error_message or f"produce to {topic}-{partition}")
        return result.base_offset

    async def fetch(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        max_bytes: int = 1024 * 1024,
        max_wait_ms: int = 500,
        min_bytes: int = 1,
    ) -> FetchedBatches:
        """Fetch batches from `offset` up to the high watermark; empty if none arrive within `max_wait_ms`."""

        async def attempt(deadline: Deadline) -> FetchedBatches:
            connection = await self._leader(topic, partition, deadline)
            version = connection.version(ApiKey.FETCH, BY_NAME_AT_MOST)
            requested = FetchPartition(
                partition,
                current_leader_epoch=-1,
                fetch_offset=offset,
                last_fetched_epoch=-1,
                log_start_offset=-1,
                max_bytes=max_bytes,
            )
            request = FetchRequest(
                max_wait_ms=max_wait_ms,
                min_bytes=min_bytes,
                max_bytes=max_bytes,
                topics=[FetchTopic(topic, None, [requested])],
            )
            body = write_fetch_request(version, request)
            timeout_s = max_wait_ms / 1000 + FETCH_SLACK_S
            encoded = await connection.request(ApiKey.FETCH, version, body, timeout_s=timeout_s)
            response = read_fetch_response(version, encoded)
            result = response.topics[0][2][0] if response.topics else None
            code = response.error_code or (result.error_code if result is not None else 0)
            if code or result is None:
                raise KafkaError(ErrorCode(code), f"fetch of {topic}-{partition} at {offset}")
            return FetchedBatches(memoryview(result.records), result.high_watermark, result.log_start_offset)

        return await self._cluster.retry(attempt)

    async def _leader(self, topic: str, partition: int, deadline: Deadline) -> Connection:
        leaders = await self._cluster.leaders(topic, frozenset({partition}), deadline=deadline)
        if partition not in leaders:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, f"{topic} has no partition {partition}")
        return await self._cluster.connection(leaders[partition], deadline)
