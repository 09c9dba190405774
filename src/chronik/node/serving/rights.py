"""The rights that each API requires, as in Kafka.

`docs/security.md` contains this table, and `tests/test_docs.py` compares the two. The server checks the rights that a
whole request requires (`is_required`) before the handler runs. All others depend on what the request names; the handler
checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from chronik.authorization.acls import CLUSTER_NAME, Operation, ResourceType
from chronik.node.serving.access import Access
from chronik.wire.errors import ErrorCode


@dataclass(frozen=True, slots=True)
class Right:
    """An operation on the resources of a type that a request names, and the outcome for a client without the right."""

    operation: Operation
    resource_type: ResourceType
    without: str
    """The error, or what the response omits."""
    condition: str = ""
    """When it applies; empty if always."""
    is_required: bool = False


TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
TRANSACTIONAL_ID = ResourceType.TRANSACTIONAL_ID
TOPIC_ERROR: Final = "TOPIC_AUTHORIZATION_FAILED"
GROUP_ERROR: Final = "GROUP_AUTHORIZATION_FAILED"
CLUSTER_ERROR: Final = "CLUSTER_AUTHORIZATION_FAILED"
ID_ERROR: Final = "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"
OMITTED: Final = "omitted"
ALTERNATIVE: Final = "see the next row"


def _required(operation: Operation) -> tuple[Right, ...]:
    return (Right(operation, CLUSTER, CLUSTER_ERROR, is_required=True),)


def _of_group(operation: Operation) -> Right:
    return Right(operation, GROUP, GROUP_ERROR)


def _config_rights(operation: Operation) -> tuple[Right, ...]:
    return (
        Right(operation, TOPIC, TOPIC_ERROR, "of a topic"),
        Right(operation, GROUP, GROUP_ERROR, "of a group"),
        Right(operation, CLUSTER, CLUSTER_ERROR, "of a broker"),
    )


RIGHTS: Mapping[int, tuple[Right, ...]] = {
    0: (
        Right(Operation.WRITE, TRANSACTIONAL_ID, ID_ERROR, "with a transactional id"),
        Right(Operation.WRITE, TOPIC, TOPIC_ERROR),
    ),
    1: (
        Right(Operation.READ, TOPIC, TOPIC_ERROR, "as a consumer"),
        Right(Operation.CLUSTER_ACTION, CLUSTER, TOPIC_ERROR, "as a replica; only other nodes may be one"),
    ),
    2: (Right(Operation.DESCRIBE, TOPIC, TOPIC_ERROR),),
    3: (
        Right(Operation.DESCRIBE, TOPIC, TOPIC_ERROR, "if the topic is named, by name or id"),
        Right(Operation.DESCRIBE, TOPIC, OMITTED, "if all topics are requested"),
        Right(Operation.CREATE, CLUSTER, ALTERNATIVE, "if the topic is to be created"),
        Right(Operation.CREATE, TOPIC, TOPIC_ERROR, "if the topic is to be created"),
    ),
    8: (_of_group(Operation.READ), Right(Operation.READ, TOPIC, TOPIC_ERROR)),
    9: (
        _of_group(Operation.DESCRIBE),
        Right(Operation.DESCRIBE, TOPIC, TOPIC_ERROR, "if the topic is named"),
        Right(Operation.DESCRIBE, TOPIC, OMITTED, "if all topics are requested"),
    ),
    10: (
        Right(Operation.DESCRIBE, GROUP, GROUP_ERROR, "of a group"),
        Right(Operation.DESCRIBE, TRANSACTIONAL_ID, ID_ERROR, "of a transactional id"),
        Right(Operation.CLUSTER_ACTION, CLUSTER, CLUSTER_ERROR, "of a share coordinator"),
    ),
    11: (_of_group(Operation.READ),),
    12: (_of_group(Operation.READ),),
    13: (_of_group(Operation.READ),),
    14: (_of_group(Operation.READ),),
    15: (_of_group(Operation.DESCRIBE),),
    16: (Right(Operation.DESCRIBE, CLUSTER, ALTERNATIVE), Right(Operation.DESCRIBE, GROUP, OMITTED)),
    17: (),
    18: (),
    19: (
        Right(Operation.CREATE, CLUSTER, ALTERNATIVE),
        Right(Operation.CREATE, TOPIC, TOPIC_ERROR),
        Right(Operation.DESCRIBE_CONFIGS, TOPIC, "TOPIC_AUTHORIZATION_FAILED as config error", "for its configs"),
    ),
    20: (
        Right(Operation.DELETE, CLUSTER, ALTERNATIVE),
        Right(Operation.DELETE, TOPIC, TOPIC_ERROR),
        Right(Operation.DESCRIBE, TOPIC, "the name is omitted", "if the topic is named by its id"),
    ),
    21: (Right(Operation.DELETE, TOPIC, TOPIC_ERROR),),
    22: (
        Right(Operation.WRITE, TRANSACTIONAL_ID, ID_ERROR, "with a transactional id"),
        Right(Operation.IDEMPOTENT_WRITE, CLUSTER, ALTERNATIVE, "without a transactional id"),
        Right(Operation.WRITE, TOPIC, CLUSTER_ERROR, "without a transactional id: of at least one topic"),
    ),
    23: (Right(Operation.CLUSTER_ACTION, CLUSTER, ALTERNATIVE), Right(Operation.DESCRIBE, TOPIC, TOPIC_ERROR)),
    24: (
        Right(Operation.WRITE, TRANSACTIONAL_ID, ID_ERROR, "versions 0-3"),
        Right(Operation.WRITE, TOPIC, TOPIC_ERROR, "versions 0-3"),
        Right(Operation.CLUSTER_ACTION, CLUSTER, CLUSTER_ERROR, "from version 4"),
    ),
    25: (Right(Operation.WRITE, TRANSACTIONAL_ID, ID_ERROR), _of_group(Operation.READ)),
    26: (Right(Operation.WRITE, TRANSACTIONAL_ID, ID_ERROR),),
    27: (Right(Operation.ALTER, CLUSTER, ALTERNATIVE), Right(Operation.CLUSTER_ACTION, CLUSTER, CLUSTER_ERROR)),
    28: (
        Right(Operation.WRITE, TRANSACTIONAL_ID, ID_ERROR),
        _of_group(Operation.READ),
        Right(Operation.READ, TOPIC, TOPIC_ERROR),
    ),
    29: _required(Operation.DESCRIBE),
    30: _required(Operation.ALTER),
    31: _required(Operation.ALTER),
    32: _config_rights(Operation.DESCRIBE_CONFIGS),
    33: _config_rights(Operation.ALTER_CONFIGS),
    34: _required(Operation.ALTER),
    35: _required(Operation.DESCRIBE),
    36: (),
    37: (Right(Operation.ALTER, TOPIC, TOPIC_ERROR),),
    42: (_of_group(Operation.DELETE),),
    43: _required(Operation.ALTER),
    44: _config_rights(Operation.ALTER_CONFIGS),
    45: _required(Operation.ALTER),
    46: _required(Operation.DESCRIBE),
    47: (_of_group(Operation.DELETE), Right(Operation.READ, TOPIC, TOPIC_ERROR)),
    48: _required(Operation.DESCRIBE_CONFIGS),
    49: _required(Operation.ALTER_CONFIGS),
    50: _required(Operation.DESCRIBE),
    51: _required(Operation.ALTER),
    55: _required(Operation.DESCRIBE),
    60: (Right(Operation.DESCRIBE, CLUSTER, "no operations are reported", "if authorized operations are requested"),),
    61: (Right(Operation.READ, TOPIC, TOPIC_ERROR),),
    64: _required(Operation.ALTER),
    65: (
        Right(Operation.DESCRIBE, TRANSACTIONAL_ID, ID_ERROR),
        Right(Operation.DESCRIBE, TOPIC, OMITTED, "for the topics of the transaction"),
    ),
    66: (Right(Operation.DESCRIBE, TRANSACTIONAL_ID, OMITTED),),
    68: (
        _of_group(Operation.READ),
        Right(Operation.DESCRIBE, TOPIC, TOPIC_ERROR, "if the topic is named"),
        Right(Operation.DESCRIBE, TOPIC, "it does not match the expression", "if topics match an expression"),
    ),
    69: (
        _of_group(Operation.DESCRIBE),
        Right(Operation.DESCRIBE, TOPIC, TOPIC_ERROR, "of the members' assignments and subscriptions"),
    ),
    71: (),
    72: (),
    74: _required(Operation.DESCRIBE_CONFIGS),
    75: (
        Right(Operation.DESCRIBE, TOPIC, TOPIC_ERROR, "if the topic is named"),
        Right(Operation.DESCRIBE, TOPIC, OMITTED, "if all topics are requested"),
    ),
    76: (_of_group(Operation.READ), Right(Operation.DESCRIBE, TOPIC, TOPIC_ERROR)),
    77: (
        _of_group(Operation.DESCRIBE),
        Right(Operation.DESCRIBE, TOPIC, TOPIC_ERROR, "of the members' assignments and subscriptions"),
    ),
    78: (_of_group(Operation.READ), Right(Operation.READ, TOPIC, TOPIC_ERROR)),
    79: (_of_group(Operation.READ), Right(Operation.READ, TOPIC, TOPIC_ERROR)),
    80: _required(Operation.ALTER),
    81: _required(Operation.ALTER),
    83: _required(Operation.CLUSTER_ACTION),
    84: _required(Operation.CLUSTER_ACTION),
    85: _required(Operation.CLUSTER_ACTION),
    86: _required(Operation.CLUSTER_ACTION),
    87: _required(Operation.CLUSTER_ACTION),
    90: (
        _of_group(Operation.DESCRIBE),
        Right(Operation.DESCRIBE, TOPIC, TOPIC_ERROR, "if the topic is named"),
        Right(Operation.DESCRIBE, TOPIC, OMITTED, "if all topics are requested"),
    ),
    91: (_of_group(Operation.READ), Right(Operation.READ, TOPIC, TOPIC_ERROR)),
    92: (_of_group(Operation.DELETE), Right(Operation.READ, TOPIC, TOPIC_ERROR)),
}
"""By API key. An API without rights is open to every client of the listener."""

_REQUIRED: Mapping[int, tuple[Operation, ...]] = {
    key: tuple(right.operation for right in rights if right.is_required) for key, rights in RIGHTS.items()
}


def refusal(access: Access, api_key: int) -> ErrorCode | None:
    """Return the error of a request whose client lacks a right that the whole request requires."""
    if access.is_open:
        return None
    for operation in _REQUIRED[api_key]:
        if not access.allows(operation, CLUSTER, CLUSTER_NAME):
            return ErrorCode.cluster_authorization_failed
    return None
