"""Admin calls on ACLs (KIP-11, KIP-290): create, list and delete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chronik.authorization.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from chronik.client.cluster import Cluster
from chronik.client.errors import raise_for
from chronik.wire.api import ApiKey


@dataclass(frozen=True, slots=True)
class AclSelection:
    """Which ACLs to list or delete; ANY and None select all."""

    resource_type: ResourceType = ResourceType.ANY
    name: str | None = None
    pattern_type: PatternType = PatternType.ANY
    principal: str | None = None
    host: str | None = None
    operation: Operation = Operation.ANY
    permission: Permission = Permission.ANY

    @property
    def is_exact(self) -> bool:
        """Whether at most one ACL can match."""
        return (
            None not in (self.name, self.principal, self.host)
            and self.resource_type != ResourceType.ANY
            and self.pattern_type in (PatternType.LITERAL, PatternType.PREFIXED)
            and self.operation != Operation.ANY
            and self.permission != Permission.ANY
        )

    def values(self) -> dict[str, Any]:
        return {
            "resource_type_filter": self.resource_type,
            "resource_name_filter": self.name,
            "pattern_type_filter": self.pattern_type,
            "principal_filter": self.principal,
            "host_filter": self.host,
            "operation": self.operation,
            "permission_type": self.permission,
        }


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

    async def list(self, selection: AclSelection) -> Sequence[AclBinding]:
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

        return await self._cluster.call(ApiKey.DESCRIBE_ACLS, selection.values(), read)

    async def delete(self, selection: AclSelection) -> Sequence[AclBinding]:
        """Delete all ACLs that match; return them."""

        def read(response: Any) -> Sequence[AclBinding]:
            deleted = []
            for result in response.filter_results:
                raise_for(result, "removing ACLs")
                for match in result.matching_acls:
                    raise_for(match, "removing ACLs")
                    deleted.append(_binding(match, match.pattern_type, match))
            return sorted(deleted, key=_order)

        return await self._cluster.call(ApiKey.DELETE_ACLS, {"filters": [selection.values()]}, read)


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
