"""FindCoordinator (key 10), versions 0-6.

Behaviour
- The coordinator of a group is the leader of the group's partition of `__consumer_offsets`. As in Kafka, Java's hash of
  the group id selects the partition. The first request creates that topic.
- COORDINATOR_NOT_AVAILABLE while the topic cannot be created, the partition has no leader, or this node has no lease
  and may not know the leader. Clients then retry, also at other nodes.
Versions: 1 key type, 3 flexible, 4 many keys at once, each with its own error, 5 and 6 as 4.
Not supported: transactions (type 1; `transactions` explains the error) and share groups (type 2).
"""

from chronik.node.admin.responses import error_values
from chronik.node.apis.transactions import TRANSACTIONS_REFUSED, TRANSACTIONS_REFUSED_MESSAGE
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

GROUP = 0
TRANSACTION = 1
FIRST_VERSION_WITH_MANY_KEYS = 4
NO_COORDINATOR: Values = {"node_id": -1, "host": "", "port": -1}


async def handle(groups: GroupService, request: Request) -> Values:
    message = request.message
    key_type = getattr(message, "key_type", GROUP)
    if request.api_version < FIRST_VERSION_WITH_MANY_KEYS:
        coordinator = await _find(groups, message.key, key_type)
        del coordinator["key"]
        return coordinator
    return {"coordinators": [await _find(groups, key, key_type) for key in message.coordinator_keys]}


async def _find(groups: GroupService, key: str, key_type: int) -> Values:
    try:
        if key_type == TRANSACTION:
            raise KafkaError(TRANSACTIONS_REFUSED, TRANSACTIONS_REFUSED_MESSAGE)
        if key_type != GROUP:
            raise KafkaError(ErrorCode.invalid_request, f"Coordinators of type {key_type} are not supported.")
        leader = await groups.coordinator_of(key)
    except KafkaError as error:
        return {"key": key, **error_values(error), **NO_COORDINATOR}
    return {"key": key, **error_values(None), "node_id": leader.id, "host": leader.host, "port": leader.port}


def on_error(request: Request, code: ErrorCode) -> Values:
    failed = {"error_code": code, **NO_COORDINATOR}
    if request.api_version < FIRST_VERSION_WITH_MANY_KEYS:
        return failed
    return {"coordinators": [{"key": key, **failed} for key in request.message.coordinator_keys]}


API = Api(ApiKey.FIND_COORDINATOR, (0, 6), on_error=on_error)
