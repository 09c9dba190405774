"""ACL bindings: a principal may, or may not, carry out an operation on the resources that a pattern matches.

The numbers are those of Kafka's protocol.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

CLUSTER_NAME = "kafka-cluster"
"""The name of the only resource of type CLUSTER."""

WILDCARD = "*"
"""As a literal resource name: every resource of the type. As a host: every host."""

ANONYMOUS = "User:ANONYMOUS"
"""The principal of a client that did not authenticate."""

EVERY_PRINCIPAL = "User:*"


class ResourceType(IntEnum):
    UNKNOWN = 0
    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(IntEnum):
    UNKNOWN = 0
    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class Operation(IntEnum):
    UNKNOWN = 0
    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class Permission(IntEnum):
    UNKNOWN = 0
    ANY = 1
    DENY = 2
    ALLOW = 3


class AclBinding(msgspec.Struct, frozen=True, array_like=True):
    """One ACL. `principal` is TYPE:NAME, as in User:alice. Encoded as a list: a cluster may have thousands."""

    resource_type: ResourceType
    name: str
    pattern_type: PatternType
    principal: str
    host: str
    operation: Operation
    permission: Permission
