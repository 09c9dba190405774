"""How a partition's leader and a group's coordinator ask a transaction's coordinator, which may be another node.

A leader verifies, before it appends the first batch of a transaction, that the transaction is open and has the
partition (KIP-890). With protocol version 2 it adds the partition instead: clients no longer do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chronik.client.errors import ClientError
from chronik.metadata.image import NO_LEADER, TRANSACTIONS_TOPIC
from chronik.node.coordinators.transaction_service import TransactionService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import Peers
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Values
from chronik.transactions.coordinator import ProducerIdAndEpoch
from chronik.transactions.transaction import TopicPartition
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

PURPOSE = "transactions"
ADD_PARTITIONS_TO_TXN_VERSION = 5
REQUEST_TIMEOUT_S = 10.0
"""Longer than the coordinator's own limit for an append, so that only a silent node exceeds it."""


class _Question(NamedTuple):
    """The partitions of one transaction that a request asks about, and the waiting caller."""

    producer: ProducerIdAndEpoch
    partitions: tuple[TopicPartition, ...]
    adds: bool
    answer: asyncio.Future[dict[TopicPartition, ErrorCode]]

    def settle(self, errors: dict[TopicPartition, ErrorCode]) -> None:
        if not self.answer.done():
            self.answer.set_result(errors)


class Transactions:
    """Asks the coordinator of any transactional id. All questions of one turn of the loop to one node share a request.

    Owned by the loop.
    """

    def __init__(
        self,
        runtime: Runtime,
        metadata: MetadataLog,
        peers: Peers,
        service: TransactionService,
    ) -> None:
        self._loop = runtime.loop
        self._node_id = runtime.node_id
        self._log = runtime.log.bind(component="transactions")
        self._metadata = metadata
        self._peers = peers
        self._service = service
        self._questions: dict[int, dict[str, _Question]] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        adds: bool,
    ) -> Mapping[TopicPartition, ErrorCode]:
        """Return NONE for each partition in the producer's open transaction; with `adds`, add all of them first.

        TRANSACTION_ABORTABLE: it is not in the transaction. INVALID_PRODUCER_EPOCH: the producer is fenced.
        INVALID_PRODUCER_ID_MAPPING: the transactional id has another producer. CONCURRENT_TRANSACTIONS,
        COORDINATOR_NOT_AVAILABLE, COORDINATOR_LOAD_IN_PROGRESS, NOT_COORDINATOR, NETWORK_EXCEPTION: retry.
        """
        producer = ProducerIdAndEpoch(producer_id, producer_epoch)
        node_id = self._coordinator_of(transactional_id)
        if node_id == NO_LEADER:
            errors = dict.fromkeys(partitions, ErrorCode.coordinator_not_available)
        elif node_id == self._node_id:
            errors = await self._ask_here(transactional_id, producer, partitions, adds)
        else:
            errors = await self._ask(node_id, transactional_id, producer, partitions, adds)
        # As in Kafka: producers handle this error of Produce.
        fenced = {ErrorCode.producer_fenced: ErrorCode.invalid_producer_epoch}
        return {partition: fenced.get(error, error) for partition, error in errors.items()}

    def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _coordinator_of(self, transactional_id: str) -> int:
        index = self._service.partition_of(transactional_id)
        partition = None if index is None else self._metadata.image.partition(TRANSACTIONS_TOPIC, index)
        return NO_LEADER if partition is None else partition.leader

    async def _ask_here(
        self, transactional_id: str, producer: ProducerIdAndEpoch, partitions: Sequence[TopicPartition], adds: bool
    ) -> dict[TopicPartition, ErrorCode]:
        try:
            if adds:
                return await self._service.add_partitions(transactional_id, producer, partitions)
            return self._service.verify_partitions(transactional_id, producer, partitions)
        except KafkaError as error:
            return dict.fromkeys(partitions, error.code)

    async def _ask(
        self,
        node_id: int,
        transactional_id: str,
        producer: ProducerIdAndEpoch,
        partitions: Sequence[TopicPartition],
        adds: bool,
    ) -> dict[TopicPartition, ErrorCode]:
        if transactional_id in self._questions.get(node_id, ()):
            # Each transactional id has one entry in a request.
            self._send(node_id)
        questions = self._questions.get(node_id)
        if questions is None:
            questions = self._questions[node_id] = {}
            self._loop.call_soon(self._send, node_id)
        answer: asyncio.Future[dict[TopicPartition, ErrorCode]] = self._loop.create_future()
        questions[transactional_id] = _Question(producer, tuple(partitions), adds, answer)
        return await answer

    def _send(self, node_id: int) -> None:
        questions = self._questions.pop(node_id, None)
        if questions:
            task = self._loop.create_task(self._request(node_id, questions))
            self._tasks[task] = None
            task.add_done_callback(lambda task: self._tasks.pop(task, None))

    async def _request(self, node_id: int, questions: dict[str, _Question]) -> None:
        unanswered = ErrorCode.network_exception
        results: dict[str, dict[TopicPartition, ErrorCode]] = {}
        try:
            connection = await self._peers.connection(node_id, PURPOSE)
            response = await connection.call(
                ApiKey.ADD_PARTITIONS_TO_TXN,
                {"transactions": [_entry(*item) for item in questions.items()]},
                timeout_s=REQUEST_TIMEOUT_S,
                at_most=ADD_PARTITIONS_TO_TXN_VERSION,
            )
            if response.error_code is not ErrorCode.none:
                unanswered = response.error_code
            results = {
                result.transactional_id: {
                    (topic.name, each.partition_index): each.partition_error_code
                    for topic in result.topic_results
                    for each in topic.results_by_partition
                }
                for result in response.results_by_transaction
            }
        except ClientError as error:
            self._log.info("transaction_coordinator_not_reached", peer=node_id, reason=str(error))
        finally:
            for transactional_id, question in questions.items():
                errors = results.get(transactional_id, {})
                question.settle({each: errors.get(each, unanswered) for each in question.partitions})


def _entry(transactional_id: str, question: _Question) -> Values:
    by_topic: dict[str, list[int]] = {}
    for topic, index in question.partitions:
        by_topic.setdefault(topic, []).append(index)
    return {
        "transactional_id": transactional_id,
        "producer_id": question.producer.producer_id,
        "producer_epoch": question.producer.producer_epoch,
        "verify_only": not question.adds,
        "topics": [{"name": topic, "partitions": indexes} for topic, indexes in by_topic.items()],
    }
