"""FindCoordinator (key 10), versions 0-6.

Behaviour
- The coordinator of a group is the leader of the group's partition of `__consumer_offsets`. As in Kafka, Java's hash of
  the group id selects the partition. The first request creates that topic.
- COORDINATOR_NOT_AVAILABLE while the topic cannot be created, the partition has no leader, or this node has no lease
  and may not know the leader. Clients then retry, also at other nodes.
Versions: 1 key type, 3 flexible, 4 many keys at once, each with its own error, 5 and 6 as 4.
Not supported: transactions (type 1; `transactions` explains the error) and share groups (type 2).
"""

from __future__ import annotations

from functools import partial

from chronik.node.apis.transactions import TRANSACTIONS_REFUSED, TRANSACTIONS_REFUSED_MESSAGE
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

GROUP = 0
TRANSACTION = 1
FIRST_VERSION_WITH_MANY_KEYS = 4


async def handle(groups: GroupService, request: Request) -> Values:
    message = request.message
    key_type = getattr(message, "key_type", GROUP)
    if request.api_version < FIRST_VERSION_WITH_MANY_KEYS:
        found = await _find(groups, message.key, key_type)
        del found["key"]
        return found
    return {"coordinators": [await _find(groups, key, key_type) for key in message.coordinator_keys]}


async def _find(groups: GroupService, key: str, key_type: int) -> Values:
    try:
        if key_type == TRANSACTION:
            raise KafkaError(TRANSACTIONS_REFUSED, TRANSACTIONS_REFUSED_MESSAGE)
        if key_type != GROUP:
            raise KafkaError(ErrorCode.invalid_request, f"Coordinators of type {key_type} are not supported.")
        leader = await groups.coordinator_of(key)
    except KafkaError as error:
        return _failed(key, error.code, error.message)
    return {
        "key": key,
        "error_code": ErrorCode.none,
        "error_message": None,
        "node_id": leader.id,
        "host": leader.host,
        "port": leader.port,
    }


def _failed(key: str, code: ErrorCode, message: str | None) -> Values:
    return {"key": key, "error_code": code, "error_message": message or None, "node_id": -1, "host": "", "port": -1}


def on_error(request: Request, code: ErrorCode) -> Values:
    if request.api_version < FIRST_VERSION_WITH_MANY_KEYS:
        failed = _failed("", code, None)
        del failed["key"]
        return failed
    return {"coordinators": [_failed(key, code, None) for key in request.message.coordinator_keys]}


API = Api(ApiKey.FIND_COORDINATOR, (0, 6), on_error=on_error)


def handler(groups: GroupService) -> Handler:
    return Handler(API, partial(handle, groups))
