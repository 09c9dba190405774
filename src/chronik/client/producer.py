"""Producers of encoded batches: with retries, and in transactions of several partitions.

Both protocol generations of transactions are supported; the cluster's feature `transaction.version` decides. Generation
2 adds partitions and groups to the transaction implicitly. Generation 1 adds them in advance, by requests to the
coordinator.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from chronik.client.cluster import TRANSACTION_COORDINATOR, Cluster, Deadline
from chronik.client.errors import raise_for
from chronik.wire.api import ApiKey
from chronik.wire.batch import HEADER_BYTES, TRANSACTIONAL, join_batch, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.produce import (
    ProducePartitionResponse,
    ProduceRequest,
    ProduceTopic,
    read_produce_response,
    write_produce_request,
)

Partition = tuple[str, int]

TRANSACTION_VERSION = "transaction.version"
IMPLICIT_FROM = 2
"""The level of that feature with the second protocol generation."""
TIMEOUT_MS = 60_000
REQUEST_BYTES_MAX = 8 * 1024 * 1024
ACKS_ALL = -1

_PRODUCE_AT_MOST = {False: 11, True: 12}
_TXN_OFFSET_COMMIT_AT_MOST = {False: 4, True: 5}
_END_TXN_AT_MOST = {False: 4, True: 5}
"""By whether the transaction is of the second generation, to which newer versions belong. Produce 13 has topic ids."""
_ADD_PARTITIONS_AT_MOST = 3
_INIT_AT_MOST = 5
_SEQUENCE_MASK = 0x7FFFFFFF


class Producer:
    """Appends encoded batches with acks=all. It repeats a batch whose outcome is unknown, so it may duplicate it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._leaders: dict[Partition, int] = {}
        self._transactional_id: str | None = None
        self._is_implicit = False

    async def append(self, batches: Mapping[Partition, Sequence[bytes]]) -> None:
        """Append the batches of each partition in order, to all leaders at once."""
        waiting = {partition: deque(encoded) for partition, encoded in batches.items() if encoded}
        while waiting:
            # One request to each leader at a time: each gets a whole deadline.
            await self._cluster.retry(lambda deadline: self._append_once(waiting, deadline))

    async def _append_once(self, waiting: dict[Partition, deque[bytes]], deadline: Deadline) -> None:
        await self._find_leaders(waiting, deadline)
        by_leader: dict[int, list[Partition]] = {}
        for partition in waiting:
            by_leader.setdefault(self._leaders[partition], []).append(partition)
        sending = [self._send(leader, led, waiting, deadline) for leader, led in by_leader.items()]
        failures = [each for each in await asyncio.gather(*sending, return_exceptions=True) if each is not None]
        if failures:
            self._leaders.clear()
            raise min(failures, key=lambda error: not isinstance(error, KafkaError))

    async def _find_leaders(self, waiting: Mapping[Partition, deque[bytes]], deadline: Deadline) -> None:
        missing: dict[str, list[int]] = {}
        for topic, partition in waiting:
            if (topic, partition) not in self._leaders:
                missing.setdefault(topic, []).append(partition)
        for topic, partitions in missing.items():
            leaders = await self._cluster.leaders(topic, frozenset(partitions), deadline=deadline)
            self._leaders |= {(topic, partition): leader for partition, leader in leaders.items()}
            for partition in partitions:
                if partition not in leaders:
                    raise KafkaError(ErrorCode.invalid_request, f"topic {topic} has no partition {partition}")

    async def _send(
        self, leader: int, led: list[Partition], waiting: dict[Partition, deque[bytes]], deadline: Deadline
    ) -> None:
        """Send the first batch of each partition, and remove those that are appended. Raises the first error."""
        connection = await self._cluster.connection(leader, deadline)
        version = connection.version(ApiKey.PRODUCE, _PRODUCE_AT_MOST[self._is_implicit])
        topics: dict[str, ProduceTopic] = {}
        size_bytes = 0
        for partition in led:
            batch = waiting[partition][0]
            if size_bytes and size_bytes + len(batch) > REQUEST_BYTES_MAX:
                break
            size_bytes += len(batch)
            topic = topics.setdefault(partition[0], ProduceTopic(partition[0], None, []))
            topic.partitions.append((partition[1], memoryview(batch)))
        request = ProduceRequest(self._transactional_id, ACKS_ALL, deadline.for_broker_ms, list(topics.values()))
        body = write_produce_request(version, request)
        response = await connection.request(ApiKey.PRODUCE, version, body, timeout_s=deadline.left_s)
        failure: KafkaError | None = None
        for name, _, results in read_produce_response(version, response).topics:
            for result in results:
                if result.error_code in (ErrorCode.none, ErrorCode.duplicate_sequence_number):
                    appended = waiting[str(name), result.partition]
                    appended.popleft()
                    if not appended:
                        del waiting[str(name), result.partition]
                else:
                    failure = failure or _refusal(str(name), result)
        if failure is not None:
            raise failure


class TransactionalProducer(Producer):
    """One transaction: `begin`, then `append` and `commit_offsets`, then `commit` or `abort`.

    `begin` fences every earlier producer with the same id and ends its transaction. It also starts a new epoch, so
    sequences start at 0 in every partition.
    """

    def __init__(self, cluster: Cluster, transactional_id: str, timeout_ms: int = TIMEOUT_MS) -> None:
        super().__init__(cluster)
        self._transactional_id: str = transactional_id
        self._timeout_ms = timeout_ms
        self._producer_id = -1
        self._epoch = -1
        self._sequences: dict[Partition, int] = {}

    @property
    def _identity(self) -> dict[str, Any]:
        return {
            "transactional_id": self._transactional_id,
            "producer_id": self._producer_id,
            "producer_epoch": self._epoch,
        }

    async def begin(self) -> None:
        def take(response: Any) -> None:
            raise_for(response, f"producer id of {self._transactional_id}")
            self._producer_id, self._epoch = response.producer_id, response.producer_epoch

        values = {**self._identity, "producer_id": -1, "producer_epoch": -1, "transaction_timeout": self._timeout_ms}
        await self._call(ApiKey.INIT_PRODUCER_ID, values, take, _INIT_AT_MOST)
        self._sequences.clear()
        self._is_implicit = await self._cluster.retry(self._read_generation)

    async def append(self, batches: Mapping[Partition, Sequence[bytes]]) -> None:
        if not self._is_implicit:
            await self._add_partitions([partition for partition in batches if partition not in self._sequences])
        await super().append({partition: self._stamped(partition, encoded) for partition, encoded in batches.items()})

    async def commit_offsets(self, group: str, offsets: Mapping[Partition, int]) -> None:
        """Commit offsets of a group without members as part of the transaction."""
        if not self._is_implicit:

            def added(response: Any) -> None:
                raise_for(response, f"offsets of group {group} in transaction {self._transactional_id}")

            values = {**self._identity, "group_id": group}
            await self._call(ApiKey.ADD_OFFSETS_TO_TXN, values, added)
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, partition), offset in offsets.items():
            entry = {"partition_index": partition, "committed_offset": offset, "committed_metadata": ""}
            topics.setdefault(topic, []).append(entry)

        def check(response: Any) -> None:
            for topic in response.topics:
                for partition in topic.partitions:
                    raise_for(partition, f"{topic.name}-{partition.partition_index} of group {group}")

        values = {
            **self._identity,
            "group_id": group,
            "generation_id": -1,
            "topics": [{"name": name, "partitions": partitions} for name, partitions in topics.items()],
        }
        at_most = _TXN_OFFSET_COMMIT_AT_MOST[self._is_implicit]
        await self._cluster.call(ApiKey.TXN_OFFSET_COMMIT, values, check, group=group, at_most=at_most)

    async def commit(self) -> None:
        """Commit what was appended. If this raises, the outcome is known after the next `begin`."""
        await self._end(True)

    async def abort(self) -> None:
        await self._end(False)

    def _stamped(self, partition: Partition, batches: Sequence[bytes]) -> list[bytes]:
        """Return the batches with this producer's id and epoch and the partition's next sequences."""
        stamped: list[bytes] = []
        sequence = self._sequences.get(partition, 0)
        for batch in batches:
            header = read_batch_header(batch)
            own = header._replace(
                attributes=header.attributes | TRANSACTIONAL,
                producer_id=self._producer_id,
                producer_epoch=self._epoch,
                base_sequence=sequence,
            )
            stamped.append(join_batch(own, memoryview(batch)[HEADER_BYTES:]))
            sequence = (sequence + header.record_count) & _SEQUENCE_MASK
        self._sequences[partition] = sequence
        return stamped

    async def _add_partitions(self, partitions: Sequence[Partition]) -> None:
        topics: dict[str, list[int]] = {}
        for topic, partition in partitions:
            topics.setdefault(topic, []).append(partition)

        def check(response: Any) -> None:
            for topic in response.results_by_topic_v3_and_below:
                for result in topic.results_by_partition:
                    code = result.partition_error_code
                    if code not in (ErrorCode.none, ErrorCode.operation_not_attempted):
                        raise KafkaError(code, f"{topic.name}-{result.partition_index} in {self._transactional_id}")

        added = [{"name": topic, "partitions": numbers} for topic, numbers in topics.items()]
        values = {f"v3_and_below_{name}": value for name, value in (*self._identity.items(), ("topics", added))}
        await self._call(ApiKey.ADD_PARTITIONS_TO_TXN, values, check, _ADD_PARTITIONS_AT_MOST)

    async def _end(self, is_commit: bool) -> None:
        def check(response: Any) -> None:
            raise_for(response, f"{'commit' if is_commit else 'abort'} of {self._transactional_id}")

        values = {**self._identity, "committed": is_commit}
        await self._call(ApiKey.END_TXN, values, check, _END_TXN_AT_MOST[self._is_implicit])

    async def _read_generation(self, deadline: Deadline) -> bool:
        """Return whether the coordinator's cluster has finalized the second generation."""
        node_id = await self._cluster.coordinator(self._transactional_id, deadline, TRANSACTION_COORDINATOR)
        connection = await self._cluster.connection(node_id, deadline)
        return connection.features.get(TRANSACTION_VERSION, 0) >= IMPLICIT_FROM

    async def _call(self, key: ApiKey, values: Mapping[str, Any], read: Any, at_most: int | None = None) -> None:
        await self._cluster.call(key, values, read, transactional_id=self._transactional_id, at_most=at_most)


def _refusal(topic: str, result: ProducePartitionResponse) -> KafkaError:
    name = f"{topic}-{result.partition}"
    return KafkaError(
        ErrorCode(result.error_code), f"{name}: {result.error_message}" if result.error_message else f"batch for {name}"
    )
