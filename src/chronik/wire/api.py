"""Kafka's APIs by key: their names, their flexible versions, and the versions supported here.

A flexible version (KIP-482) writes lengths as varints and ends each structure with tagged fields; its request header is
v2 and its response header v1. The one exception is ApiVersions: its response header is always v0, since a client reads
it before it knows which versions the broker supports.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from kio.schema.index import api_key_map, schema_name_map

from chronik.wire.new_layouts import NEW_REQUESTS
from chronik.wire.old_layouts import OLD_REQUESTS

_NEVER: Final = 1 << 15


class ApiKey(IntEnum):
    """The API keys in use, the first two bytes of a request, each with its first flexible version."""

    flexible_from: int

    def __new__(cls, key: int, flexible_from: int = _NEVER) -> "ApiKey":
        member = int.__new__(cls, key)
        member._value_ = key
        member.flexible_from = flexible_from
        return member

    PRODUCE = 0, 9
    FETCH = 1, 12
    LIST_OFFSETS = 2, 6
    METADATA = 3, 9
    OFFSET_COMMIT = 8, 8
    OFFSET_FETCH = 9, 6
    FIND_COORDINATOR = 10, 3
    JOIN_GROUP = 11, 6
    HEARTBEAT = 12, 4
    LEAVE_GROUP = 13, 4
    SYNC_GROUP = 14, 4
    DESCRIBE_GROUPS = 15, 5
    LIST_GROUPS = 16, 3
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18, 3
    CREATE_TOPICS = 19, 5
    DELETE_TOPICS = 20, 4
    DELETE_RECORDS = 21, 2
    INIT_PRODUCER_ID = 22, 2
    OFFSET_FOR_LEADER_EPOCH = 23, 4
    ADD_PARTITIONS_TO_TXN = 24, 3
    ADD_OFFSETS_TO_TXN = 25, 3
    END_TXN = 26, 3
    WRITE_TXN_MARKERS = 27, 1
    TXN_OFFSET_COMMIT = 28, 3
    DESCRIBE_ACLS = 29, 2
    CREATE_ACLS = 30, 2
    DELETE_ACLS = 31, 2
    DESCRIBE_CONFIGS = 32, 4
    ALTER_CONFIGS = 33, 2
    ALTER_REPLICA_LOG_DIRS = 34, 2
    DESCRIBE_LOG_DIRS = 35, 2
    SASL_AUTHENTICATE = 36, 2
    CREATE_PARTITIONS = 37, 2
    DELETE_GROUPS = 42, 2
    ELECT_LEADERS = 43, 2
    INCREMENTAL_ALTER_CONFIGS = 44, 1
    ALTER_PARTITION_REASSIGNMENTS = 45, 0
    LIST_PARTITION_REASSIGNMENTS = 46, 0
    OFFSET_DELETE = 47
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50, 0
    ALTER_USER_SCRAM_CREDENTIALS = 51, 0
    DESCRIBE_CLIENT_QUOTAS = 48, 1
    ALTER_CLIENT_QUOTAS = 49, 1
    DESCRIBE_QUORUM = 55, 0
    DESCRIBE_CLUSTER = 60, 0
    DESCRIBE_PRODUCERS = 61, 0
    UNREGISTER_BROKER = 64, 0
    DESCRIBE_TRANSACTIONS = 65, 0
    LIST_TRANSACTIONS = 66, 0
    CONSUMER_GROUP_HEARTBEAT = 68, 0
    CONSUMER_GROUP_DESCRIBE = 69, 0
    GET_TELEMETRY_SUBSCRIPTIONS = 71, 0
    PUSH_TELEMETRY = 72, 0
    LIST_CONFIG_RESOURCES = 74, 0
    DESCRIBE_TOPIC_PARTITIONS = 75, 0
    SHARE_GROUP_HEARTBEAT = 76, 0
    SHARE_GROUP_DESCRIBE = 77, 0
    SHARE_FETCH = 78, 0
    SHARE_ACKNOWLEDGE = 79, 0
    ADD_RAFT_VOTER = 80, 0
    REMOVE_RAFT_VOTER = 81, 0
    INITIALIZE_SHARE_GROUP_STATE = 83, 0
    READ_SHARE_GROUP_STATE = 84, 0
    WRITE_SHARE_GROUP_STATE = 85, 0
    DELETE_SHARE_GROUP_STATE = 86, 0
    READ_SHARE_GROUP_STATE_SUMMARY = 87, 0
    DESCRIBE_SHARE_GROUP_OFFSETS = 90, 0
    ALTER_SHARE_GROUP_OFFSETS = 91, 0
    DELETE_SHARE_GROUP_OFFSETS = 92, 0


_FLEXIBLE_FROM: Final[Mapping[int, int]] = {key: key.flexible_from for key in ApiKey}


def is_flexible(key: int, version: int) -> bool:
    """Return whether the bodies (and the request header) of this version use the flexible encoding."""
    return version >= _FLEXIBLE_FROM.get(key, _NEVER)


def response_header_is_flexible(key: int, version: int) -> bool:
    """Return whether the response header carries tagged fields."""
    return key != ApiKey.API_VERSIONS and version >= _FLEXIBLE_FROM.get(key, _NEVER)


def known_versions(key: int) -> range:
    """Return the versions whose messages can be read and written; empty for an unknown key."""
    name = api_key_map.get(key)
    if name is None:
        return range(0)
    versions = {*schema_name_map[name], *(version for other, version in (*OLD_REQUESTS, *NEW_REQUESTS) if other == key)}
    return range(min(versions), max(versions) + 1)
