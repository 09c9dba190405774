"""Admin calls on transactions: list, describe, find and abort those that hang (KIP-664).

Plain Kafka protocol, so all of it works on any Kafka cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from chronik.client.cluster import TRANSACTION_COORDINATOR, Cluster, Deadline
from chronik.client.errors import raise_for
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

Partition = tuple[str, int]

STATE_TOPIC = "__transaction_state"
"""The leader of a partition coordinates the transactional ids that hash to it."""

STATES = "Empty, Ongoing, PrepareCommit, PrepareAbort, CompleteCommit, CompleteAbort or PrepareEpochFence"


@dataclass(frozen=True, slots=True)
class ListedTransaction:
    transactional_id: str
    coordinator: int
    producer_id: int
    state: str


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """The state of a transactional id. `start_ms` is None without a transaction.

    `partitions` are those of the open transaction, or those that lack its marker once the outcome is decided.
    """

    transactional_id: str
    coordinator: int
    producer_id: int
    producer_epoch: int
    state: str
    timeout_ms: int
    start_ms: int | None
    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that is open in a partition's log, according to the partition's leader."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    start_offset: int
    last_timestamp_ms: int

    @property
    def key(self) -> tuple[str, int, int, int]:
        return self.topic, self.partition, self.producer_id, self.start_offset


class Transactions:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def listed(self, states: Sequence[str] = (), producer_ids: Sequence[int] = ()) -> list[ListedTransaction]:
        """Return the transactional ids of all brokers: each broker lists those that it coordinates."""
        values = {"state_filters": list(states), "producer_id_filters": list(producer_ids)}

        async def attempt(deadline: Deadline) -> dict[str, ListedTransaction]:
            listed: dict[str, ListedTransaction] = {}
            for node_id in sorted((await self._cluster.layout([], deadline=deadline)).brokers):
                connection = await self._cluster.connection(node_id, deadline)
                response = await connection.call(ApiKey.LIST_TRANSACTIONS, values, timeout_s=deadline.left_s, at_most=1)
                raise_for(response, f"transactions of broker {node_id}")
                if response.unknown_state_filters:
                    unknown = ", ".join(response.unknown_state_filters)
                    raise KafkaError(ErrorCode.invalid_request, f"unknown transaction state {unknown}, use {STATES}")
                for each in response.transaction_states:
                    listed[each.transactional_id] = ListedTransaction(
                        each.transactional_id, node_id, each.producer_id, each.transaction_state
                    )
            return listed

        return [each for _, each in sorted((await self._cluster.retry(attempt)).items())]

    async def describe(self, transactional_id: str) -> TransactionDescription:
        """Return the state of one id. TRANSACTIONAL_ID_NOT_FOUND if it is unknown."""

        async def attempt(deadline: Deadline) -> TransactionDescription:
            node_id = await self._cluster.coordinator(transactional_id, deadline, TRANSACTION_COORDINATOR)
            connection = await self._cluster.connection(node_id, deadline)
            values = {"transactional_ids": [transactional_id]}
            response = await connection.call(ApiKey.DESCRIBE_TRANSACTIONS, values, timeout_s=deadline.left_s)
            (found,) = response.transaction_states
            if found.error_code is ErrorCode.transactional_id_not_found:
                raise KafkaError(found.error_code, f"transactional id {transactional_id} does not exist")
            raise_for(found, f"transactional id {transactional_id}")
            start_ms = int(found.transaction_start_time.timestamp() * 1000)
            return TransactionDescription(
                transactional_id,
                node_id,
                found.producer_id,
                found.producer_epoch,
                found.transaction_state,
                found.transaction_timeout // timedelta(milliseconds=1),
                start_ms if start_ms >= 0 else None,
                tuple((topic.topic, index) for topic in found.topics for index in topic.partitions),
            )

        return await self._cluster.retry(attempt)

    async def open_in(self, topic: str, partition: int | None = None) -> list[OpenTransaction]:
        """Return the transactions that are open in the logs of a topic's partitions, or of one of them."""
        wanted = None if partition is None else frozenset({partition})

        async def attempt(deadline: Deadline) -> list[OpenTransaction]:
            by_leader: dict[int, list[int]] = {}
            for index, leader in (await self._cluster.leaders(topic, wanted, deadline=deadline)).items():
                by_leader.setdefault(leader, []).append(index)
            if wanted is not None and not by_leader:
                raise KafkaError(ErrorCode.unknown_topic_or_partition, f"topic {topic} has no partition {partition}")
            found: list[OpenTransaction] = []
            for leader, indexes in by_leader.items():
                connection = await self._cluster.connection(leader, deadline)
                values = {"topics": [{"name": topic, "partition_indexes": indexes}]}
                response = await connection.call(ApiKey.DESCRIBE_PRODUCERS, values, timeout_s=deadline.left_s)
                found += _open_transactions(response)
            return sorted(found, key=lambda each: each.key)

        return await self._cluster.retry(attempt, give_up_on=frozenset({ErrorCode.unknown_topic_or_partition}))

    async def hanging(
        self, topic: str, older_than_ms: int, now_ms: int, partition: int | None = None
    ) -> list[OpenTransaction]:
        """Return the transactions that no coordinator will end: read_committed consumers wait for them forever.

        Only those whose last record is older than `older_than_ms`: no open transaction is older than its timeout. Each
        is checked twice, since it may end while its coordinator is asked.
        """
        candidates = [
            each for each in await self.open_in(topic, partition) if now_ms - each.last_timestamp_ms > older_than_ms
        ]
        known = await self.coordinated(candidates)
        unknown = [each for each in candidates if each.key not in known]
        if not unknown:
            return []
        still_open = {each.key for each in await self.open_in(topic, partition)}
        return [each for each in unknown if each.key in still_open]

    async def coordinated(
        self, candidates: Sequence[OpenTransaction]
    ) -> dict[tuple[str, int, int, int], TransactionDescription]:
        """Return the state of the transactions that a coordinator has yet to end, by `OpenTransaction.key`.

        LEADER_NOT_AVAILABLE if a coordinator is away: it may know the transactions that the others do not.
        """
        if not candidates:
            return {}
        producer_ids = sorted({each.producer_id for each in candidates})
        names = {each.producer_id: each.transactional_id for each in await self._listed_by_all(producer_ids)}
        described: dict[int, TransactionDescription] = {}
        for producer_id, name in names.items():
            try:
                described[producer_id] = await self.describe(name)
            except KafkaError as error:
                if error.code is not ErrorCode.transactional_id_not_found:
                    raise
        return {
            each.key: described[each.producer_id]
            for each in candidates
            if each.producer_id in described and (each.topic, each.partition) in described[each.producer_id].partitions
        }

    async def _listed_by_all(self, producer_ids: Sequence[int]) -> list[ListedTransaction]:
        """Return the transactional ids of these producers; fail unless every coordinator has answered.

        An id that is not listed because its coordinator is away, or has just moved, must not look like a lost one.
        """

        async def attempt(deadline: Deadline) -> list[ListedTransaction]:
            before = await self._coordinators(deadline)
            listed = await self.listed((), producer_ids)
            if await self._coordinators(deadline) != before:
                raise KafkaError(ErrorCode.leader_not_available, f"partitions of {STATE_TOPIC} have new leaders")
            return listed

        return await self._cluster.retry(attempt)

    async def _coordinators(self, deadline: Deadline) -> list[tuple[int, int]]:
        """Return the leader and the leader epoch of each partition of the state topic; none without that topic."""
        layout = (await self._cluster.layout([STATE_TOPIC], deadline=deadline)).topics.get(STATE_TOPIC)
        if layout is None or layout.error is ErrorCode.unknown_topic_or_partition:
            return []
        leaderless = [each.partition for each in layout.partitions if each.leader < 0]
        if leaderless or layout.error is not ErrorCode.none:
            raise KafkaError(
                ErrorCode.leader_not_available,
                f"partitions {leaderless} of {STATE_TOPIC} have no leader, so their transactional ids are not known",
            )
        return [(each.leader, each.leader_epoch) for each in layout.partitions]

    async def fence(self, described: TransactionDescription) -> None:
        """Abort the open transaction of an id, and fence its producer. The id keeps its transaction timeout."""
        transactional_id = described.transactional_id

        def check(response: Any) -> None:
            raise_for(response, f"fencing the producer of {transactional_id}")

        values = {
            "transactional_id": transactional_id,
            "transaction_timeout": described.timeout_ms,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        await self._cluster.call(ApiKey.INIT_PRODUCER_ID, values, check, transactional_id=transactional_id, at_most=5)

    async def write_abort(self, transaction: OpenTransaction) -> None:
        """Have the partition's leader write an abort marker, as the transaction's coordinator would."""
        topic, index = transaction.topic, transaction.partition
        marker = {
            "producer_id": transaction.producer_id,
            "producer_epoch": transaction.producer_epoch,
            "transaction_result": False,
            "topics": [{"name": topic, "partition_indexes": [index]}],
            # A partition without a marker has no coordinator epoch.
            "coordinator_epoch": max(0, transaction.coordinator_epoch),
        }

        async def attempt(deadline: Deadline) -> None:
            leaders = await self._cluster.leaders(topic, frozenset({index}), deadline=deadline)
            connection = await self._cluster.connection(leaders[index], deadline)
            response = await connection.call(
                ApiKey.WRITE_TXN_MARKERS, {"markers": [marker]}, timeout_s=deadline.left_s, at_most=1
            )
            raise_for(response.markers[0].topics[0].partitions[0], f"abort marker in {topic}-{index}")

        await self._cluster.retry(attempt)


def _open_transactions(response: Any) -> list[OpenTransaction]:
    found: list[OpenTransaction] = []
    for topic in response.topics:
        for partition in topic.partitions:
            raise_for(partition, f"producers of {topic.name}-{partition.partition_index}")
            found += [
                OpenTransaction(
                    topic.name,
                    partition.partition_index,
                    each.producer_id,
                    each.producer_epoch,
                    each.coordinator_epoch,
                    each.current_txn_start_offset,
                    each.last_timestamp,
                )
                for each in partition.active_producers
                if each.current_txn_start_offset >= 0
            ]
    return found
