"""ListTransactions (key 66), versions 0-2.

Behaviour
- Returns the transactional ids that this node coordinates; clients query every node.
- Lists transactions by the time they began, the oldest first: one that blocks readers is in any first part of the list.
- Filters by state, producer id, the time since the transaction began, and an RE2 expression that the whole
  transactional id must match. Unknown states are returned as such; a wrong expression is INVALID_REGULAR_EXPRESSION.
- COORDINATOR_LOAD_IN_PROGRESS while the node loads ids, COORDINATOR_NOT_AVAILABLE while it has no lease: the list
  would be incomplete, and tools would take the missing ids for lost.
Versions: 1 duration filter, 2 filter by expression (KIP-1152).
"""

from collections.abc import Callable

from chronik.authorization.acls import ResourceType
from chronik.node.coordinators.transaction_service import TransactionService
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.transactions.transaction import TransactionMetadata, TransactionState
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

PATTERN_BYTES_MAX = 1024
PATTERN_MEMORY_BYTES_MAX = 1024 * 1024
STATES = {state.label: state for state in TransactionState}


async def handle(runtime: Runtime, transactions: TransactionService, request: Request) -> Values:
    message = request.message
    names, producer_ids = set(message.state_filters), set(message.producer_id_filters)
    duration_ms = getattr(message, "duration_filter", -1)
    began_before_ms = runtime.env.wall_ms() - duration_ms
    matches = _matcher(getattr(message, "transactional_id_pattern", None))
    listed = [
        {"transactional_id": each, "producer_id": state.producer_id, "transaction_state": state.state.label}
        for each, state in sorted(transactions.transactions(), key=_age)
        if (not names or state.state.label in names)
        and (not producer_ids or state.producer_id in producer_ids)
        and request.access.sees(ResourceType.TRANSACTIONAL_ID, each)
        and (duration_ms < 0 or state.start_ms < began_before_ms)
        and matches(each)
    ]
    return {
        "error_code": ErrorCode.none,
        "unknown_state_filters": sorted(names - STATES.keys()),
        "transaction_states": listed,
    }


def _age(named: tuple[str, TransactionMetadata]) -> tuple[int, str]:
    return named[1].start_ms, named[0]


def _matcher(pattern: str | None) -> Callable[[str], bool]:
    """Return the filter by transactional id. RE2 needs linear time, so a hostile expression cannot block the loop."""
    if not pattern:
        return lambda transactional_id: True
    # Imported at the first use, because few clients filter by expression.
    import re2

    if len(pattern.encode()) > PATTERN_BYTES_MAX:
        raise KafkaError(ErrorCode.invalid_regular_expression, f"an expression of more than {PATTERN_BYTES_MAX} bytes")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = PATTERN_MEMORY_BYTES_MAX
    try:
        expression = re2.compile(pattern, options)
    except re2.error:
        raise KafkaError(ErrorCode.invalid_regular_expression) from None
    return lambda transactional_id: expression.fullmatch(transactional_id) is not None


API = Api(ApiKey.LIST_TRANSACTIONS, (0, 2))
