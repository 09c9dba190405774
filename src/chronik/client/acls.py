"""Admin calls on ACLs (KIP-11, KIP-290): create, list and delete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chronik.authorization.acl_filter import AclFilter
from chronik.authorization.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from chronik.client.cluster import Cluster
from chronik.client.errors import raise_for
from chronik.wire.api import ApiKey


class Acls:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def create(self, bindings: Sequence[AclBinding]) -> None:
        creations = [
            {
                "resource_type": binding.resource_type,
                "resource_name": binding.name,
                "resource_pattern_type": binding.pattern_type,
                "principal": binding.principal,
                "host": binding.host,
                "operation": binding.operation,
                "permission_type": binding.permission,
            }
            for binding in bindings
        ]

        def check(response: Any) -> None:
            for result in response.results:
                raise_for(result, "adding ACLs")

        await self._cluster.call(ApiKey.CREATE_ACLS, {"creations": creations}, check)

    async def list(self, selected: AclFilter) -> Sequence[AclBinding]:
        def read(response: Any) -> Sequence[AclBinding]:
            raise_for(response, "listing ACLs")
            return sorted(
                (
                    _binding(resource, resource.pattern_type, acl)
                    for resource in response.resources
                    for acl in resource.acls
                ),
                key=_order,
            )

        return await self._cluster.call(ApiKey.DESCRIBE_ACLS, filter_values(selected), read)

    async def delete(self, selected: AclFilter) -> Sequence[AclBinding]:
        """Delete all ACLs that match; return them."""

        def read(response: Any) -> Sequence[AclBinding]:
            deleted = []
            for result in response.filter_results:
                raise_for(result, "removing ACLs")
                for match in result.matching_acls:
                    raise_for(match, "removing ACLs")
                    deleted.append(_binding(match, match.pattern_type, match))
            return sorted(deleted, key=_order)

        return await self._cluster.call(ApiKey.DELETE_ACLS, {"filters": [filter_values(selected)]}, read)


def filter_values(selected: AclFilter) -> dict[str, Any]:
    """Return the filter as fields of a request."""
    return {
        "resource_type_filter": selected.resource_type,
        "resource_name_filter": selected.name,
        "pattern_type_filter": selected.pattern_type,
        "principal_filter": selected.principal,
        "host_filter": selected.host,
        "operation": selected.operation,
        "permission_type": selected.permission,
    }


def _binding(resource: Any, pattern_type: int, acl: Any) -> AclBinding:
    return AclBinding(
        _known(ResourceType, resource.resource_type),
        resource.resource_name,
        _known(PatternType, pattern_type),
        acl.principal,
        acl.host,
        _known(Operation, acl.operation),
        _known(Permission, acl.permission_type),
    )


def _known(kind: Any, number: int) -> Any:
    """Return the member, or UNKNOWN for a number of a newer broker."""
    try:
        return kind(number)
    except ValueError:
        return kind.UNKNOWN


def _order(binding: AclBinding) -> tuple[object, ...]:
    return (binding.principal, binding.resource_type, binding.name, binding.operation, binding.host)
