"""Raw record batches: appended to and fetched from a partition's leader, never decoded here.

For tools that read or check records (the web API, the pipeline). Applications' clients provide ordered delivery with
retries.
"""

from __future__ import annotations

from chronik.client.cluster import Cluster, Deadline
from chronik.client.connection import Connection
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest
from chronik.wire.fetch import (
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchTopic,
    read_fetch_response,
    write_fetch_request,
)
from chronik.wire.produce import ProduceRequest, ProduceTopic, read_produce_response, write_produce_request

BY_NAME_AT_MOST = 12
"""The last version of Produce and Fetch that identifies topics by name instead of by id."""
FETCH_SLACK_S = 5.0


class Batches:
    """Produces and fetches encoded batches in one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def append(self, topic: str, partition: int, records: bytes, *, acks: int = -1) -> int:
        """Append encoded batches once and return their base offset. No retry: a lost response may hide a success."""
        deadline = Deadline(30.0)
        connection = await self._leader(topic, partition, deadline)
        version = connection.version(ApiKey.PRODUCE, BY_NAME_AT_MOST)
        topics = [ProduceTopic(topic, None, [(partition, memoryview(records))])]
        body = write_produce_request(version, ProduceRequest(None, acks, deadline.left_ms, topics))
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
    ) -> FetchPartitionResponse:
        """Fetch batches from `offset` up to the high watermark; empty if none arrive within `max_wait_ms`."""

        async def attempt(deadline: Deadline) -> FetchPartitionResponse:
            connection = await self._leader(topic, partition, deadline)
            request = FetchRequest(max_wait_ms=max_wait_ms, min_bytes=min_bytes, max_bytes=max_bytes)
            timeout_s = max_wait_ms / 1000 + FETCH_SLACK_S
            result = await fetch_partition(connection, request, topic, partition, offset, timeout_s)
            if result.error_code:
                raise KafkaError(ErrorCode(result.error_code), f"fetch of {topic}-{partition} at {offset}")
            return result

        return await self._cluster.retry(attempt)

    async def _leader(self, topic: str, partition: int, deadline: Deadline) -> Connection:
        leaders = await self._cluster.leaders(topic, frozenset({partition}), deadline=deadline)
        if partition not in leaders:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, f"{topic} has no partition {partition}")
        return await self._cluster.connection(leaders[partition], deadline)


async def fetch_partition(
    connection: Connection, request: FetchRequest, topic: str, partition: int, offset: int, timeout_s: float
) -> FetchPartitionResponse:
    """Send `request` for one partition. The result may have an error; its records begin with the batch of `offset`."""
    name = f"{topic}-{partition}"
    version = connection.version(ApiKey.FETCH, BY_NAME_AT_MOST)
    requested = FetchPartition(partition, -1, offset, -1, -1, request.max_bytes)
    request.topics = [FetchTopic(topic, None, [requested])]
    body = write_fetch_request(version, request)
    encoded = await connection.request(ApiKey.FETCH, version, body, timeout_s=timeout_s)
    try:
        response = read_fetch_response(version, encoded)
    except MalformedRequest as error:
        raise KafkaError(ErrorCode.unknown_server_error, f"{connection.name}: {error}") from None
    if response.error_code:
        raise KafkaError(ErrorCode(response.error_code), f"fetch of {name} at {offset}")
    if len(response.topics) != 1 or len(response.topics[0][2]) != 1:
        raise KafkaError(ErrorCode.unknown_server_error, f"the response of {connection.name} lacks {name}")
    return response.topics[0][2][0]
