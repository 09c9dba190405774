"""Which ACLs a DescribeAcls or DeleteAcls request means."""

from __future__ import annotations

import msgspec

from chronik.authorization.acls import WILDCARD, AclBinding, Operation, PatternType, Permission, ResourceType


class AclFilter(msgspec.Struct, frozen=True):
    """Matches ACLs field by field. None and ANY match every value; every other field must be equal.

    The pattern type decides how `name` compares. LITERAL and PREFIXED match patterns of that type and exactly that
    name, ANY patterns of both types. MATCH matches each pattern that applies to the resource `name`: the literal
    pattern, the wildcard, and every prefix.
    """

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

    @property
    def unknown_field(self) -> str | None:
        """The first field whose value this version does not know; such a filter is refused."""
        for field in ("resource_type", "pattern_type", "operation", "permission"):
            if getattr(self, field) == 0:
                return field
        return None

    def matches(self, acl: AclBinding) -> bool:
        return (
            self.resource_type in (ResourceType.ANY, acl.resource_type)
            and (self.principal is None or self.principal == acl.principal)
            and (self.host is None or self.host == acl.host)
            and self.operation in (Operation.ANY, acl.operation)
            and self.permission in (Permission.ANY, acl.permission)
            and self._matches_name(acl)
        )

    def _matches_name(self, acl: AclBinding) -> bool:
        if self.pattern_type not in (PatternType.ANY, PatternType.MATCH, acl.pattern_type):
            return False
        if self.name is None:
            return True
        if self.pattern_type is not PatternType.MATCH:
            return self.name == acl.name
        if acl.pattern_type is PatternType.PREFIXED:
            return self.name.startswith(acl.name)
        return acl.name in (self.name, WILDCARD)
