"""AlterClientQuotas (key 49), versions 0-1.

Behaviour
- Sets and removes quotas of users, client ids, both together, or addresses (KIP-546); a null name is the default of its
  type. Each entry has its own outcome, and is changed as a whole or not at all.
- An entity or a key that appears twice is INVALID_REQUEST, as is a value that is not positive (0 is allowed for
  `connection_creation_rate`, and refuses the address), or a fraction where Kafka has whole numbers.
- Answered when the change is durable; each node applies it to its next request.
- validate_only returns the same response and changes nothing.
Versions: 1 flexible.
Not supported: host names as addresses, which Kafka resolves once.
"""

from datetime import timedelta
from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.metadata.commands import AlterClientQuotas
from chronik.node.admin.responses import duplicates, refuse_entries, within
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.quotas.entities import check_changes, make_entity
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

WAIT = timedelta(seconds=30)


async def handle(runtime: Runtime, metadata: MetadataLog, request: Request) -> Values:
    request.access.require(Operation.ALTER_CONFIGS, ResourceType.CLUSTER)
    message = request.message
    repeated = duplicates(_key(entry) for entry in message.entries)

    async def alter(entry: Any) -> Values:
        if _key(entry) in repeated:
            raise KafkaError(ErrorCode.invalid_request, "Each entity must appear at most once.")
        if keys := duplicates(op.key for op in entry.ops):
            raise KafkaError(ErrorCode.invalid_request, f"Duplicate quota key {keys[0]}")
        entity = make_entity((part.entity_type, part.entity_name) for part in entry.entity)
        changes = {op.key: None if op.remove else op.value for op in entry.ops}
        check_changes(entity, changes)
        if changes and not message.validate_only:
            await metadata.propose(AlterClientQuotas(entity, changes))
        return {}

    entries = [({"entity": _entity(entry)}, alter(entry)) for entry in message.entries]
    return {"entries": await within(runtime, WAIT, entries)}


def _key(entry: Any) -> frozenset[tuple[str, str | None]]:
    return frozenset((part.entity_type, part.entity_name) for part in entry.entity)


def _entity(entry: Any) -> list[Values]:
    return [{"entity_type": part.entity_type, "entity_name": part.entity_name} for part in entry.entity]


API = Api(
    ApiKey.ALTER_CLIENT_QUOTAS,
    (0, 1),
    on_error=refuse_entries(
        "entries", lambda request: ({"entity": _entity(entry)} for entry in request.message.entries)
    ),
    on_controller=True,
)
