"""A member of a share group by raw requests: one connection and one share session with one node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

from tests.node.cluster_harness import DEADLINE_S, LocalNodes
from tests.node.support_transactions import leader
from tests.node.support_wire import decoded

from chronik.client.connection import Connection
from chronik.client.errors import ClientError
from chronik.node.broker import Broker
from chronik.shares.state import InitialState, SharePartitionKey
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode
from chronik.wire.produce import ProduceRequest, ProduceTopic, read_produce_response, write_produce_request

ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4
GROUP = "queue"
PRODUCE_VERSION = 11


class Delivered(NamedTuple):
    offset: int
    value: bytes
    deliveries: int


async def produce(broker: Broker, topic: str, index: int, values: Sequence[bytes], **batch: Any) -> int:
    """Produce one batch to the leader; return its base offset."""
    records = encode_batch([(None, value, [], 1) for value in values], **batch)
    connection = await Connection.open("127.0.0.1", broker.server.port, client_id="producer")
    request = ProduceRequest(None, -1, 5_000, [ProduceTopic(topic, None, [(index, memoryview(records))])])
    try:
        body = write_produce_request(PRODUCE_VERSION, request)
        answer = read_produce_response(PRODUCE_VERSION, await connection.request(ApiKey.PRODUCE, PRODUCE_VERSION, body))
    finally:
        connection.close()
    result = answer.topics[0][2][0]
    assert result.error_code == 0, ErrorCode(result.error_code)
    return result.base_offset


class ShareMember:
    """One member's session with one node. `fetch` and `acknowledge` return the errors and do not raise them."""

    def __init__(self, broker: Broker, connection: Connection, topic_id: UUID, member_id: str, group: str) -> None:
        self.broker = broker
        self.connection = connection
        self.topic_id = topic_id
        self.member_id = member_id
        self.group = group
        self.epoch = 0
        self.lock_ms = 0

    @classmethod
    async def open(cls, broker: Broker, topic: str, member_id: str = "member-1", group: str = GROUP) -> ShareMember:
        connection = await Connection.open("127.0.0.1", broker.server.port, client_id=member_id)
        return cls(broker, connection, broker.image.require_topic(topic).id, member_id, group)

    def close(self) -> None:
        self.connection.close()

    async def ask(self, key: ApiKey, topics: list[dict[str, Any]], **values: Any) -> Any:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return await self.connection.call(
            key,
            {
                "group_id": self.group,
                "member_id": self.member_id,
                "share_session_epoch": epoch,
                "topics": topics,
                **values,
            },
        )

    def topics(self, index: int, acknowledgements: Sequence[tuple[int, int, int]] = ()) -> list[dict[str, Any]]:
        batches = [
            {"first_offset": first, "last_offset": last, "acknowledge_types": [kind]}
            for first, last, kind in acknowledgements
        ]
        return [
            {"topic_id": self.topic_id, "partitions": [{"partition_index": index, "acknowledgement_batches": batches}]}
        ]

    async def fetch(
        self,
        index: int = 0,
        *acknowledgements: tuple[int, int, int],
        wait_ms: int = 0,
        records: int = 500,
        strict: bool = False,
        max_bytes: int = 1 << 20,
    ) -> tuple[ErrorCode, ErrorCode, list[Delivered]]:
        """Return the errors of the fetch and of the acknowledgements, and the acquired records."""
        response = await self.ask(
            ApiKey.SHARE_FETCH,
            self.topics(index, acknowledgements),
            max_wait=wait_ms,
            min_bytes=1,
            max_bytes=max_bytes,
            max_records=records,
            batch_size=records,
            share_acquire_mode=int(strict),
        )
        if response.error_code is not ErrorCode.none:
            return response.error_code, response.error_code, []
        self.lock_ms = int(response.acquisition_lock_timeout.total_seconds() * 1000)
        for topic in response.responses:
            for partition in topic.partitions:
                counts = {
                    offset: each.delivery_count
                    for each in partition.acquired_records
                    for offset in range(each.first_offset, each.last_offset + 1)
                }
                records_of = decoded(partition.records or b"")
                delivered = [
                    Delivered(record.offset, record.value or b"", counts[record.offset])
                    for record in records_of
                    if record.offset in counts
                ]
                return partition.error_code, ErrorCode(partition.acknowledge_error_code), delivered
        return ErrorCode.none, ErrorCode.none, []

    async def acknowledge(self, *acknowledgements: tuple[int, int, int], index: int = 0, **values: Any) -> ErrorCode:
        response = await self.ask(ApiKey.SHARE_ACKNOWLEDGE, self.topics(index, acknowledgements), **values)
        if response.error_code is not ErrorCode.none:
            error: ErrorCode = response.error_code
        else:
            error = response.responses[0].partitions[0].error_code
        return error

    async def end(self) -> ErrorCode:
        """End the session with the final epoch."""
        self.epoch = -1
        response = await self.ask(ApiKey.SHARE_ACKNOWLEDGE, [])
        error: ErrorCode = response.error_code
        return error


async def initialize(broker: Broker, topic: str, *, group: str = GROUP, epoch: int = 1, start: int = 0) -> None:
    """Create the state of all partitions of a topic for a group, as the group's coordinator does."""
    image = broker.image.require_topic(topic)
    states = {
        SharePartitionKey(group, image.id, each.partition): InitialState(epoch, start) for each in image.partitions
    }
    errors = await broker.share_state.initialize(states, 10_000)
    assert set(errors.values()) == {ErrorCode.none}, errors


async def member_of_leader(nodes: LocalNodes, topic: str, member_id: str = "member-1", index: int = 0) -> ShareMember:
    """Return a member with a session at the partition's current leader, and retry as clients do."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            broker = leader(nodes, topic, index)
            if broker is not None:
                try:
                    return await ShareMember.open(broker, topic, member_id)
                except (ClientError, KeyError):
                    pass
            await asyncio.sleep(0.05)
