"""ACLs as CreateAcls, DescribeAcls and DeleteAcls send and return them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from enum import IntEnum
from itertools import islice
from typing import Any, TypeVar

from msgspec.structs import astuple

from chronik.authorization.acl_filter import AclFilter
from chronik.authorization.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from chronik.node.config import NodeConfig
from chronik.node.serving.api import Values
from chronik.wire.errors import ErrorCode, KafkaError

COMPARED_AT_ONCE = 1_000
"""Other requests run after each such slice: a filter over all ACLs of a large cluster takes tens of milliseconds."""

E = TypeVar("E", bound=IntEnum)


def require_authorizer(config: NodeConfig) -> None:
    if not config.authorization.enabled:
        raise KafkaError(ErrorCode.security_disabled, "No Authorizer is configured.")


def binding_of(creation: Any) -> AclBinding:
    return AclBinding(
        _known(ResourceType, creation.resource_type),
        creation.resource_name,
        _known(PatternType, creation.resource_pattern_type),
        creation.principal,
        creation.host,
        _known(Operation, creation.operation),
        _known(Permission, creation.permission_type),
    )


def filter_of(requested: Any) -> AclFilter:
    """Return the filter of a request. INVALID_REQUEST if a field has a value that this version does not know."""
    acl_filter = AclFilter(
        _known(ResourceType, requested.resource_type_filter),
        requested.resource_name_filter,
        _known(PatternType, requested.pattern_type_filter),
        requested.principal_filter,
        requested.host_filter,
        _known(Operation, requested.operation),
        _known(Permission, requested.permission_type),
    )
    if acl_filter.unknown_field is not None:
        raise KafkaError(ErrorCode.invalid_request, f"The filter's {acl_filter.unknown_field} is unknown.")
    return acl_filter


async def matching(acls: Collection[AclBinding], acl_filter: AclFilter) -> list[AclBinding]:
    """Return the ACLs that the filter matches, sorted."""
    found: list[AclBinding] = []
    compared = iter(acls)
    while part := list(islice(compared, COMPARED_AT_ONCE)):
        found += filter(acl_filter.matches, part)
        await asyncio.sleep(0)
    return sorted(found, key=astuple)


def acl_values(acl: AclBinding) -> Values:
    return {
        "principal": acl.principal,
        "host": acl.host,
        "operation": acl.operation,
        "permission_type": acl.permission,
    }


def pattern_values(acl: AclBinding) -> Values:
    return {"resource_type": acl.resource_type, "resource_name": acl.name, "pattern_type": acl.pattern_type}


def _known(kind: type[E], value: int) -> E:
    try:
        return kind(value)
    except ValueError:
        return kind(0)
