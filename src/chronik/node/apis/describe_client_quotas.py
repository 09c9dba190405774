"""DescribeClientQuotas (key 48), versions 0-1.

Behaviour
- Lists the entities that match every component of the filter: by an exact name (0), the default (1), or any name (2).
  With `strict`, an entity with further parts does not match; no component matches every entity.
- A type that appears twice, a match that does not fit its kind, or an ip together with another type is INVALID_REQUEST.
  An unknown type is UNSUPPORTED_VERSION.
- The answer is this node's image.
Versions: 1 flexible.
"""

from enum import IntEnum
from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.quotas.entities import EntityType, QuotaEntity, normalized_address
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


class MatchType(IntEnum):
    EXACT = 0
    DEFAULT = 1
    ANY = 2


async def handle(metadata: MetadataLog, request: Request) -> Values:
    request.access.require(Operation.DESCRIBE_CONFIGS, ResourceType.CLUSTER)
    exact, any_name = _filter(request.message.components)
    is_strict = request.message.strict

    def matches(entity: QuotaEntity) -> bool:
        parts = dict(entity.parts)
        return (
            (not is_strict or len(parts) == len(exact) + len(any_name))
            and all(kind in parts and parts[kind] == name for kind, name in exact.items())
            and any_name <= parts.keys()
        )

    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "entries": [
            {
                "entity": [{"entity_type": kind, "entity_name": name} for kind, name in quotas.entity.parts],
                "values": [{"key": key, "value": value} for key, value in quotas.values.items()],
            }
            for quotas in metadata.image.client_quotas
            if matches(quotas.entity)
        ],
    }


def _filter(components: Any) -> tuple[dict[str, str | None], set[str]]:
    """Return the names to match by type, and the types whose name does not matter."""
    exact: dict[str, str | None] = {}
    any_name: set[str] = set()
    for component in components:
        kind, match_type, name = component.entity_type, component.match_type, component.match
        if not kind:
            raise KafkaError(ErrorCode.invalid_request, "Invalid empty entity type.")
        if kind in exact or kind in any_name:
            raise KafkaError(ErrorCode.invalid_request, f"Entity type {kind} cannot appear more than once.")
        if kind not in frozenset(EntityType):
            raise KafkaError(ErrorCode.unsupported_version, f"Unsupported entity type {kind}")
        if match_type not in frozenset(MatchType):
            raise KafkaError(ErrorCode.invalid_request, f"Unknown match type {match_type}")
        if (name is None) == (match_type == MatchType.EXACT):
            raise KafkaError(ErrorCode.invalid_request, "An exact match needs a name, and only an exact match has one.")
        if match_type == MatchType.ANY:
            any_name.add(kind)
        else:
            exact[kind] = normalized_address(name) if kind == EntityType.IP and name is not None else name
    kinds = {*exact, *any_name}
    if EntityType.IP in kinds and len(kinds) > 1:
        raise KafkaError(ErrorCode.invalid_request, "An ip cannot be combined with a user or a client id.")
    return exact, any_name


API = Api(ApiKey.DESCRIBE_CLIENT_QUOTAS, (0, 1))
