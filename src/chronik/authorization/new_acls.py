"""What a new ACL must satisfy. Checked when it is proposed, never when the metadata log is replayed."""

from __future__ import annotations

from chronik.authorization.acls import (
    CLUSTER_NAME,
    WILDCARD,
    AclBinding,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from chronik.authorization.hosts import NETWORK_MARK, parse_address, parse_network
from chronik.wire.errors import ErrorCode, KafkaError

ACLS_MAX = 100_000
"""How many ACLs a cluster may have. The metadata image holds all of them in memory."""
ACLS_PER_REQUEST_MAX = 10_000
"""Kafka's limit of the records that one request may write to the metadata log."""
FIELD_CHARS_MAX = 4_096


def check_new_acl(acl: AclBinding) -> None:
    """Raise INVALID_REQUEST with the reason if the ACL is not one that Kafka creates.

    Like Kafka, this accepts an operation that the resource type does not have: such an ACL has no effect.
    """
    if acl.resource_type in (ResourceType.UNKNOWN, ResourceType.ANY):
        raise _invalid(f"Invalid resourceType {acl.resource_type.name}")
    if acl.pattern_type not in (PatternType.LITERAL, PatternType.PREFIXED):
        raise _invalid(f"Invalid patternType {acl.pattern_type.name}")
    if acl.operation in (Operation.UNKNOWN, Operation.ANY):
        raise _invalid(f"Invalid operation {acl.operation.name}")
    if acl.permission not in (Permission.DENY, Permission.ALLOW):
        raise _invalid(f"Invalid permissionType {acl.permission.name}")
    if not acl.name:
        raise _invalid("Resource name should not be empty")
    if acl.resource_type is ResourceType.CLUSTER and acl.name != CLUSTER_NAME:
        raise _invalid(f"The only valid name for the CLUSTER resource is {CLUSTER_NAME}")
    kind, separator, name = acl.principal.partition(":")
    if not (kind and separator and name):
        raise _invalid("expected a string in format principalType:principalName for the principal")
    if not acl.host:
        raise _invalid("The host should not be empty: * means every host")
    if NETWORK_MARK in acl.host and parse_network(acl.host) is None:
        # An ACL that matches no host would be silent, and a DENY that never applies is dangerous.
        raise _invalid(f"{acl.host!r} is not a range of addresses such as 10.0.0.0/8")
    is_name = acl.host != WILDCARD and NETWORK_MARK not in acl.host and parse_address(acl.host) is None
    if is_name and acl.permission is Permission.DENY:
        # Kafka accepts it. Names are not resolved, so it would deny nothing.
        raise _invalid(f"{acl.host!r} is not an address: a host that is denied is an address, a range, or *")
    for field, value in (("resource name", acl.name), ("principal", acl.principal), ("host", acl.host)):
        if len(value) > FIELD_CHARS_MAX:
            raise _invalid(f"The {field} has {len(value)} characters, at most {FIELD_CHARS_MAX} are allowed")


def _invalid(reason: str) -> KafkaError:
    return KafkaError(ErrorCode.invalid_request, reason)
