"""FindCoordinator (key 10), versions 0-6.

Behaviour
- The coordinator of a group is the leader of the group's partition of `__consumer_offsets`, and of a transactional id
  that of its partition of `__transaction_state`. As in Kafka, Java's hash of the key selects the partition. The first
  request creates that topic.
- The share coordinator of `group:topicId:partition` (type 2) is the leader of its partition of `__share_group_state`.
  INVALID_REQUEST for a key of another form.
- COORDINATOR_NOT_AVAILABLE while the topic cannot be created, the partition has no leader, or this node has no lease
  and may not know the leader. Clients then retry, also at other nodes.
- The address is that of the listener by which the client came in; COORDINATOR_NOT_AVAILABLE if the coordinator has no
  such listener.
Versions: 1 key type, 3 flexible, 4 many keys at once, each with its own error, 5 as 4, 6 share groups.
"""

from typing import TypeAlias

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.admin.responses import error_values
from chronik.node.coordinators.group_service import GroupService
from chronik.node.coordinators.share_coordinator import ShareCoordinatorService
from chronik.node.coordinators.transaction_service import TransactionService
from chronik.node.serving.access import REFUSALS
from chronik.node.serving.api import Api, Request, Values
from chronik.shares.state import is_share_key
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

GROUP = 0
TRANSACTION = 1
SHARE = 2
FIRST_VERSION_WITH_MANY_KEYS = 4
FIRST_VERSION_WITH_SHARE_GROUPS = 6
RESOURCES = {GROUP: ResourceType.GROUP, TRANSACTION: ResourceType.TRANSACTIONAL_ID}
NO_COORDINATOR: Values = {"node_id": -1, "host": "", "port": -1}
Service: TypeAlias = GroupService | TransactionService | ShareCoordinatorService


async def handle(
    groups: GroupService, transactions: TransactionService, shares: ShareCoordinatorService, request: Request
) -> Values:
    message = request.message
    services: dict[int, Service] = {GROUP: groups, TRANSACTION: transactions}
    key_type = getattr(message, "key_type", GROUP)
    if request.api_version >= FIRST_VERSION_WITH_SHARE_GROUPS:
        services[SHARE] = shares

    async def find(key: str) -> Values:
        if key_type == SHARE and not request.access.has(Operation.CLUSTER_ACTION, ResourceType.CLUSTER):
            return {"key": key, **error_values(KafkaError(ErrorCode.cluster_authorization_failed)), **NO_COORDINATOR}
        resource_type = RESOURCES.get(key_type)
        if resource_type is not None and not request.access.allows(Operation.DESCRIBE, resource_type, key):
            return {"key": key, **error_values(KafkaError(REFUSALS[resource_type])), **NO_COORDINATOR}
        return await _find(services.get(key_type), key, request.listener)

    if request.api_version < FIRST_VERSION_WITH_MANY_KEYS:
        coordinator = await find(message.key)
        del coordinator["key"]
        return coordinator
    return {"coordinators": [await find(key) for key in message.coordinator_keys]}


async def _find(service: Service | None, key: str, listener: str) -> Values:
    try:
        if service is None:
            raise KafkaError(ErrorCode.invalid_request, "This version has no such type of coordinator.")
        if isinstance(service, ShareCoordinatorService) and not is_share_key(key):
            raise KafkaError(ErrorCode.invalid_request, "The key of a share coordinator is group:topicId:partition.")
        leader = await service.coordinator_of(key)
        address = leader.address(listener)
        if address is None:
            raise KafkaError(
                ErrorCode.coordinator_not_available, f"Broker {leader.id}, the coordinator, has no listener {listener}."
            )
    except KafkaError as error:
        return {"key": key, **error_values(error), **NO_COORDINATOR}
    return {"key": key, **error_values(None), "node_id": leader.id, "host": address[0], "port": address[1]}


def on_error(request: Request, code: ErrorCode) -> Values:
    failed = {"error_code": code, **NO_COORDINATOR}
    if request.api_version < FIRST_VERSION_WITH_MANY_KEYS:
        return failed
    return {"coordinators": [{"key": key, **failed} for key in request.message.coordinator_keys]}


API = Api(ApiKey.FIND_COORDINATOR, (0, 6), on_error=on_error)
