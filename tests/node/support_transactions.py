"""A transactional client of nodes in this process: each method is one request to the coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.node.cluster_harness import DEADLINE_S, LocalNodes

from chronik.client.connection import Connection
from chronik.client.errors import ClientError
from chronik.metadata.image import TRANSACTIONS_TOPIC
from chronik.node.broker import Broker
from chronik.transactions.coordinator import ProducerIdAndEpoch
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch, read_batch_header, read_marker
from chronik.wire.errors import ErrorCode

RETRIED = (
    ErrorCode.concurrent_transactions,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.coordinator_not_available,
    ErrorCode.not_coordinator,
)
PAUSE_S = 0.01
TRANSACTION = 1


class WrittenMarker(NamedTuple):
    producer_id: int
    producer_epoch: int
    is_commit: bool
    coordinator_epoch: int


async def create_topic(nodes: LocalNodes, name: str, partitions: int = 3, replicas: int = 3) -> None:
    client = await nodes.client(next(iter(nodes.brokers.values())))
    topic = {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": replicas,
        "assignments": [],
        "configs": [],
    }
    answer = await client.call(ApiKey.CREATE_TOPICS, {"topics": [topic], "timeout": 10_000, "validate_only": False})
    assert answer.topics[0].error_code is ErrorCode.none
    client.close()


class TransactionalClient:
    """Finds its coordinator and retries as clients do, unless a method says otherwise."""

    def __init__(self, nodes: LocalNodes, transactional_id: str, version: int = 2) -> None:
        """`version` is the transaction version: 2 ends transactions with EndTxn 5."""
        self.nodes = nodes
        self.id = transactional_id
        self.version = version
        self.producer = ProducerIdAndEpoch(-1, -1)
        self._connection: Connection | None = None

    async def coordinator(self) -> Broker:
        """Return the node that coordinates the id, as the first node that answers tells."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for broker in list(self.nodes.brokers.values()):
                    try:
                        client = await self.nodes.client(broker)
                        values = {"key_type": TRANSACTION, "coordinator_keys": [self.id]}
                        (found,) = (await client.call(ApiKey.FIND_COORDINATOR, values)).coordinators
                        client.close()
                    except ClientError:
                        continue
                    if found.error_code is ErrorCode.none and found.node_id in self.nodes.brokers:
                        return self.nodes.brokers[found.node_id]
                    assert found.error_code in (ErrorCode.none, ErrorCode.coordinator_not_available)
                await asyncio.sleep(PAUSE_S)

    async def call_once(self, key: ApiKey, values: dict[str, Any], at_most: int | None = None) -> Any:
        if self._connection is None:
            self._connection = await self.nodes.client(await self.coordinator())
        try:
            return await self._connection.call(key, values, at_most=at_most)
        except ClientError:
            self._connection = None
            raise

    async def call(self, key: ApiKey, values: dict[str, Any], at_most: int | None = None) -> Any:
        """Repeat the request until its error is not one that clients retry."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    answer = await self.call_once(key, values, at_most)
                    if _error_of(answer) not in RETRIED:
                        return answer
                except ClientError:
                    pass
                self._forget_coordinator()
                await asyncio.sleep(PAUSE_S)

    def _forget_coordinator(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def init(self, timeout_ms: int = 60_000, expected: ProducerIdAndEpoch | None = None) -> ErrorCode:
        known = expected or ProducerIdAndEpoch(-1, -1)
        answer = await self.call(
            ApiKey.INIT_PRODUCER_ID,
            {
                "transactional_id": self.id,
                "transaction_timeout": timeout_ms,
                "producer_id": known.producer_id,
                "producer_epoch": known.producer_epoch,
            },
            at_most=5,
        )
        if answer.error_code is ErrorCode.none:
            self.producer = ProducerIdAndEpoch(answer.producer_id, answer.producer_epoch)
        return _error_of(answer)

    def add_values(self, *partitions: tuple[str, int]) -> dict[str, Any]:
        topics: dict[str, list[int]] = {}
        for topic, index in partitions:
            topics.setdefault(topic, []).append(index)
        return {
            "v3_and_below_transactional_id": self.id,
            "v3_and_below_producer_id": self.producer.producer_id,
            "v3_and_below_producer_epoch": self.producer.producer_epoch,
            "v3_and_below_topics": [{"name": name, "partitions": indexes} for name, indexes in topics.items()],
        }

    async def add(self, *partitions: tuple[str, int]) -> ErrorCode:
        return _error_of(await self.call(ApiKey.ADD_PARTITIONS_TO_TXN, self.add_values(*partitions), at_most=3))

    async def add_offsets(self, group_id: str) -> ErrorCode:
        producer_id, epoch = self.producer
        values = {"transactional_id": self.id, "producer_id": producer_id, "producer_epoch": epoch}
        return _error_of(await self.call(ApiKey.ADD_OFFSETS_TO_TXN, {**values, "group_id": group_id}))

    async def end(self, *, commit: bool = True) -> ErrorCode:
        producer_id, epoch = self.producer
        values = {"transactional_id": self.id, "producer_id": producer_id, "producer_epoch": epoch, "committed": commit}
        at_most = 5 if self.version == 2 else 4
        answer = await self.call(ApiKey.END_TXN, values, at_most=at_most)
        if answer.error_code is ErrorCode.none and self.version == 2:
            self.producer = ProducerIdAndEpoch(answer.producer_id, answer.producer_epoch)
        return _error_of(answer)

    async def describe(self) -> Any:
        """Return the state of the id, as its coordinator tells."""
        answer = await self.call(ApiKey.DESCRIBE_TRANSACTIONS, {"transactional_ids": [self.id]})
        return answer.transaction_states[0]

    async def until_state(self, state: str) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            while (described := await self.describe()).transaction_state != state:
                await asyncio.sleep(PAUSE_S)
        return described

    def close(self) -> None:
        self._forget_coordinator()


def _error_of(answer: Any) -> ErrorCode:
    """Return the error of a response: its first one, if its entries have their own."""
    for name in ("results_by_topic_v3_and_below", "transaction_states"):
        entries = getattr(answer, name, None)
        if entries:
            first = entries[0]
            error = (
                first.error_code if name == "transaction_states" else first.results_by_partition[0].partition_error_code
            )
            assert isinstance(error, ErrorCode)
            return error
    error = answer.error_code
    assert isinstance(error, ErrorCode)
    return error


def markers(broker: Broker, topic: str, index: int) -> list[WrittenMarker]:
    """Return the markers in a node's own log."""
    return list(_markers(broker, topic, index))


def _markers(broker: Broker, topic: str, index: int) -> Iterator[WrittenMarker]:
    partition = broker.partition(topic, index)
    assert partition is not None
    log = partition.log
    data = bytes(log.read_job(log.log_start_offset, 1 << 24, log.log_end_offset)())
    at = 0
    while at < len(data):
        header = read_batch_header(data, at)
        if header.is_control:
            marker = read_marker(data, at)
            yield WrittenMarker(header.producer_id, header.producer_epoch, marker.is_commit, marker.coordinator_epoch)
        at += header.size_bytes


def write_open(broker: Broker, topic: str, index: int, producer_id: int, *, age_ms: int = 0) -> int:
    """Append a transactional batch to the log itself, as a leader would that does not verify; return its offset."""
    partition = broker.partition(topic, index)
    assert partition is not None and partition.leader is not None
    now_ms = time.time_ns() // 1_000_000 - age_ms
    batch = encode_batch(
        [(b"k", b"v", [], now_ms)], producer_id=producer_id, producer_epoch=0, base_sequence=0, is_transactional=True
    )
    return partition.append_internal(bytes(batch), now_ms).base_offset


def leader(nodes: LocalNodes, topic: str, index: int) -> Broker | None:
    image = next(iter(nodes.brokers.values())).image.partition(topic, index)
    return None if image is None else nodes.brokers.get(image.leader)


def coordinator_partition(broker: Broker, transactional_id: str) -> tuple[str, int]:
    index = broker.transactions.partition_of(transactional_id)
    assert index is not None
    return TRANSACTIONS_TOPIC, index
