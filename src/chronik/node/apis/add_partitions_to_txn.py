"""AddPartitionsToTxn (key 24), versions 0-5.

Behaviour
- The transaction's coordinator adds partitions to a transaction, or begins one. The response is sent when that is
  committed in `__transaction_state`. If one partition does not exist, none is added: the others get
  OPERATION_NOT_ATTEMPTED.
- From version 4 on, leaders send it, for many transactions at once (KIP-890). With verify_only, nothing is added:
  TRANSACTION_ABORTABLE for a partition that is not in the open transaction.
- CONCURRENT_TRANSACTIONS while the previous transaction is not complete; the coordinator waits up to 100 ms for it.
Versions: 2 PRODUCER_FENCED (before that INVALID_PRODUCER_EPOCH), 3 flexible, 4 many transactions and verify_only, 5
TRANSACTION_ABORTABLE (before that INVALID_TXN_STATE). Clients send 0-3.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.metadata.image import is_internal
from chronik.node.coordinators.transaction_service import TransactionService
from chronik.node.serving.api import Api, Request, Values
from chronik.transactions.coordinator import ProducerIdAndEpoch
from chronik.transactions.transaction import TopicPartition
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

FENCED_FROM_VERSION = 2
MANY_TRANSACTIONS_FROM_VERSION = 4
ABORTABLE_FROM_VERSION = 5


async def handle(transactions: TransactionService, request: Request) -> Values:
    message = request.message
    if request.api_version < MANY_TRANSACTIONS_FROM_VERSION:
        transactional_id = message.v3_and_below_transactional_id
        request.access.require(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id)
        producer = ProducerIdAndEpoch(message.v3_and_below_producer_id, message.v3_and_below_producer_epoch)
        partitions = _partitions(message.v3_and_below_topics)
        errors = _refused(request, partitions)
        if not errors:
            errors = await transactions.add_partitions(transactional_id, producer, partitions)
        return {"results_by_topic_v3_and_below": _by_topic(request, errors)}
    request.access.require(Operation.CLUSTER_ACTION, ResourceType.CLUSTER)
    results = await asyncio.gather(*(_transaction(transactions, each) for each in message.transactions))
    return {
        "error_code": ErrorCode.none,
        "results_by_transaction": [
            {"transactional_id": entry.transactional_id, "topic_results": _by_topic(request, errors)}
            for entry, errors in zip(message.transactions, results, strict=True)
        ],
    }


async def _transaction(transactions: TransactionService, entry: Any) -> Mapping[TopicPartition, ErrorCode]:
    partitions = _partitions(entry.topics)
    producer = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
    try:
        if entry.verify_only:
            return transactions.verify_partitions(entry.transactional_id, producer, partitions)
        return await transactions.add_partitions(entry.transactional_id, producer, partitions)
    except KafkaError as error:
        return dict.fromkeys(partitions, error.code)


def _refused(request: Request, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, ErrorCode]:
    """Return an error for each partition if the client may not write to one of them, otherwise nothing."""
    allowed = {
        topic: not is_internal(topic) and request.access.allows(Operation.WRITE, ResourceType.TOPIC, topic)
        for topic in {topic for topic, _ in partitions}
    }
    refusals = {
        (topic, index): ErrorCode.topic_authorization_failed for topic, index in partitions if not allowed[topic]
    }
    return {each: refusals.get(each, ErrorCode.operation_not_attempted) for each in partitions} if refusals else {}


def _partitions(topics: Iterable[Any]) -> list[TopicPartition]:
    return list(dict.fromkeys((topic.name, index) for topic in topics for index in topic.partitions))


def _by_topic(request: Request, errors: Mapping[TopicPartition, ErrorCode]) -> list[Values]:
    known: dict[ErrorCode, ErrorCode] = {}
    if request.api_version < FENCED_FROM_VERSION:
        known[ErrorCode.producer_fenced] = ErrorCode.invalid_producer_epoch
    if request.api_version < ABORTABLE_FROM_VERSION:
        known[ErrorCode.transaction_abortable] = ErrorCode.invalid_txn_state
    topics: dict[str, list[Values]] = {}
    for (topic, index), error in errors.items():
        result = {"partition_index": index, "partition_error_code": known.get(error, error)}
        topics.setdefault(topic, []).append(result)
    return [{"name": topic, "results_by_partition": results} for topic, results in topics.items()]


def on_error(request: Request, code: ErrorCode) -> Values:
    message = request.message
    if request.api_version >= MANY_TRANSACTIONS_FROM_VERSION:
        return {"error_code": code, "results_by_transaction": []}
    errors = dict.fromkeys(_partitions(message.v3_and_below_topics), code)
    return {"results_by_topic_v3_and_below": _by_topic(request, errors)}


API = Api(ApiKey.ADD_PARTITIONS_TO_TXN, (0, 5), on_error=on_error)
