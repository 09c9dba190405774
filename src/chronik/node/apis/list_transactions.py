"""ListTransactions (key 66), versions 0-1.

Behaviour
- Returns the transactional ids that this node coordinates; clients query every node.
- Filters by state, producer id, and the time since the transaction began. Unknown states are returned as such.
- COORDINATOR_LOAD_IN_PROGRESS while the node loads ids or has no lease, because the list would be incomplete.
Versions: 1 duration filter.
Not supported: 2 (filter by a pattern).
"""

from chronik.node.coordinators.transaction_service import TransactionService
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.transactions.transaction import TransactionState
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

STATES = {state.label: state for state in TransactionState}


async def handle(runtime: Runtime, transactions: TransactionService, request: Request) -> Values:
    message = request.message
    names, producer_ids = set(message.state_filters), set(message.producer_id_filters)
    duration_ms = getattr(message, "duration_filter", -1)
    began_before_ms = runtime.env.wall_ms() - duration_ms
    listed = [
        {"transactional_id": each, "producer_id": state.producer_id, "transaction_state": state.state.label}
        for each, state in transactions.transactions()
        if (not names or state.state.label in names)
        and (not producer_ids or state.producer_id in producer_ids)
        and (duration_ms < 0 or state.start_ms < began_before_ms)
    ]
    return {
        "error_code": ErrorCode.none,
        "unknown_state_filters": sorted(names - STATES.keys()),
        "transaction_states": listed,
    }


API = Api(ApiKey.LIST_TRANSACTIONS, (0, 1))
