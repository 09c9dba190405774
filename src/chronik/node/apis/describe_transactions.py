"""DescribeTransactions (key 65), version 0.

Behaviour
- Returns the state of each transactional id, with its producer, timeout, start and partitions. Once the outcome is
  decided, the partitions are those whose marker is not written yet.
- TRANSACTIONAL_ID_NOT_FOUND for an unknown id; NOT_COORDINATOR if another node coordinates it.
"""

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.admin.responses import refuse_entries
from chronik.node.coordinators.transaction_service import TransactionService
from chronik.node.serving.access import Access
from chronik.node.serving.api import Api, Request, Values
from chronik.transactions.transaction import TransactionMetadata
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


async def handle(transactions: TransactionService, request: Request) -> Values:
    return {
        "transaction_states": [
            _describe(transactions, request.access, each) for each in request.message.transactional_ids
        ]
    }


def _describe(transactions: TransactionService, access: Access, transactional_id: str) -> Values:
    try:
        access.require(Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, transactional_id)
        error, state = transactions.describe(transactional_id)
    except KafkaError as refusal:
        error, state = refusal.code, None
    values: Values = {"error_code": error, "transactional_id": transactional_id}
    return values if state is None or error is not ErrorCode.none else {**values, **_described(state, access)}


def _described(state: TransactionMetadata, access: Access) -> Values:
    by_topic: dict[str, list[int]] = {}
    for topic, index in sorted(state.partitions):
        if access.sees(ResourceType.TOPIC, topic):
            by_topic.setdefault(topic, []).append(index)
    return {
        "transaction_state": state.state.label,
        "transaction_timeout": state.timeout_ms,
        "transaction_start_time": state.start_ms,
        "producer_id": state.producer_id,
        "producer_epoch": state.producer_epoch,
        "topics": [{"topic": topic, "partitions": indexes} for topic, indexes in by_topic.items()],
    }


API = Api(
    ApiKey.DESCRIBE_TRANSACTIONS,
    (0, 0),
    on_error=refuse_entries(
        "transaction_states", lambda request: ({"transactional_id": each} for each in request.message.transactional_ids)
    ),
)
