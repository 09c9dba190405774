"""Open transactions of the whole cluster, as reported by their coordinators."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from chronik.metadata.image import BrokerImage
from chronik.web import schemas
from chronik.web.node_view import NodeView, require_image
from chronik.web.offsets import BrokerPool, OffsetSampler, answers_of
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

TRANSACTIONS_MAX = 200
"""How many transactions of one coordinator are described. `total` counts all of them."""
ONGOING = "Ongoing"
NOT_ENDED = (ONGOING, "PrepareCommit", "PrepareAbort")


async def transactions_view(node: NodeView, sampler: OffsetSampler) -> schemas.Transactions:
    """Return the transactions that are open or lack markers, the oldest first."""
    brokers = require_image(node).live_brokers()
    answers, silent = await answers_of(brokers, lambda broker: _transactions_of(sampler.brokers, broker))
    transactions = [transaction for described, _ in answers for transaction in described]
    transactions.sort(key=lambda transaction: (transaction.start_ms, transaction.transactional_id))
    return schemas.Transactions(transactions, sum(count for _, count in answers), silent)


async def _transactions_of(brokers: BrokerPool, broker: BrokerImage) -> tuple[list[schemas.Transaction], int]:
    values = {"state_filters": list(NOT_ENDED), "producer_id_filters": [], "duration_filter": -1}
    listed = await brokers.call(broker, ApiKey.LIST_TRANSACTIONS, values, at_most=1)
    if listed.error_code != ErrorCode.none:
        raise KafkaError(listed.error_code, f"transactions of node {broker.id}")
    names = [each.transactional_id for each in listed.transaction_states]  # the oldest first
    if not names:
        return [], 0
    request = {"transactional_ids": names[:TRANSACTIONS_MAX]}
    described = await brokers.call(broker, ApiKey.DESCRIBE_TRANSACTIONS, request)
    return [
        _transaction(each, broker.id)
        for each in described.transaction_states
        if each.transaction_state
        in NOT_ENDED  # it may have ended, or moved to another coordinator, since it was listed
    ], len(names)


def _transaction(described: Any, coordinator: int) -> schemas.Transaction:
    start_ms = int(described.transaction_start_time.timestamp() * 1000)
    timeout_ms = described.transaction_timeout // timedelta(milliseconds=1)
    return schemas.Transaction(
        described.transactional_id,
        described.transaction_state,
        coordinator,
        described.producer_id,
        described.producer_epoch,
        start_ms,
        start_ms + timeout_ms if described.transaction_state == ONGOING else None,
        [f"{topic.topic}-{index}" for topic in described.topics for index in topic.partitions],
    )
