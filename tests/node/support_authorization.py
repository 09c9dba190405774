"""A node that authorizes its clients, and one request of each API with the rights that it requires.

Principals are set on the connection: how clients prove who they are is not part of these tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from tests.node.cluster_harness import LocalNodes
from tests.support.eventually import until

from chronik.authorization.acls import (
    CLUSTER_NAME,
    AclBinding,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from chronik.client.connection import Connection
from chronik.metadata.commands import CreateAcls, DeleteAcls
from chronik.node.broker import Broker
from chronik.node.config import Authorization
from chronik.node.serving.access import Access
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode
from chronik.wire.messages import read_response, write_request

ADMIN, ALICE, EVE = "User:admin", "User:alice", "User:eve"
ENABLED = Authorization(enabled=True, super_users=(ADMIN,))
TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
TRANSACTIONAL_ID = ResourceType.TRANSACTIONAL_ID
ORDERS, READERS, SHARERS, PAYMENTS = "orders", "readers", "sharers", "payments"
"""The topic, the group, the share group and the transactional id that exist."""
ABSENT = "absent"
"""The name of a topic, a group, a share group and a transactional id that do not exist."""
REFUSALS = {
    TOPIC: ErrorCode.topic_authorization_failed,
    GROUP: ErrorCode.group_authorization_failed,
    CLUSTER: ErrorCode.cluster_authorization_failed,
    TRANSACTIONAL_ID: ErrorCode.transactional_id_authorization_failed,
}
BATCH = encode_batch([(None, b"secret", [], 1)])
TRANSACTIONAL_BATCH = encode_batch(
    [(None, b"", [], 1)], producer_id=7, producer_epoch=0, base_sequence=0, is_transactional=True
)


def allow(
    operation: Operation,
    resource_type: ResourceType,
    name: str = CLUSTER_NAME,
    *,
    principal: str = ALICE,
    permission: Permission = Permission.ALLOW,
    pattern_type: PatternType = PatternType.LITERAL,
    host: str = "*",
) -> AclBinding:
    return AclBinding(resource_type, name, pattern_type, principal, host, operation, permission)


async def login(nodes: LocalNodes, broker: Broker, principal: str | None) -> Connection:
    """Return a connection of the principal; None does not authenticate."""
    before = set(broker.server._connections)
    client = await nodes.client(broker)
    opened: list[Any] = await until(lambda: [each for each in broker.server._connections if each not in before])
    if principal is not None:
        opened[0].access = Access(principal, opened[0].client_host, broker.authorization)
    return client


async def ask(client: Connection, key: ApiKey, version: int, values: dict[str, Any]) -> Any:
    body = await client.request(key, version, write_request(key, version, values))
    return read_response(key, version, bytes(body))


async def ask_case(client: Connection, key: ApiKey, case: Case, names: Names) -> Any:
    if case.before is not None:
        earlier, values = case.before
        await ask(client, earlier, names.version, values(names))
    return await ask(client, key, names.version, case.values(names))


def joins(names: Names, epoch: int) -> dict[str, Any]:
    """Return the values of a ShareGroupHeartbeat; its member leaves with epoch -1."""
    member = {"group_id": names.share_group, "member_id": "only-member", "member_epoch": epoch}
    return {**member, "subscribed_topic_names": [ABSENT]}


async def set_acls(broker: Broker, acls: Sequence[AclBinding]) -> None:
    """Make these the only ACLs of the cluster. The broker must be the controller."""
    before = tuple(broker.image.acls)
    if before:
        await broker.metadata.propose(DeleteAcls(before))
    if acls:
        await broker.metadata.propose(CreateAcls(tuple(acls)))


class DeniesEverything:
    """Decisions that record what was requested, and which denials were audited."""

    def __init__(self) -> None:
        self.requested: list[tuple[str, str, Operation, ResourceType, str]] = []
        self.denials: list[tuple[object, ...]] = []

    def allows(self, principal: str, host: str, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        self.requested.append((principal, host, operation, resource_type, name))
        return False

    def known(self, *_: object) -> dict[tuple[int, str], bool]:
        return {}

    def allows_any(self, *_: object) -> bool:
        return False

    def denied(self, *denial: object) -> None:
        self.denials.append(denial)


@dataclass(frozen=True)
class Names:
    """What a request names, and its version."""

    version: int
    topic: str = ORDERS
    group: str = READERS
    share_group: str = SHARERS
    transactional_id: str = PAYMENTS
    topic_id: UUID | None = None

    @property
    def fresh(self) -> str:
        """A name that no earlier request used."""
        return f"{self.topic}-{self.version}"


Rights = tuple[tuple[AclBinding, ErrorCode], ...]


@dataclass(frozen=True)
class Case:
    """One request, and all rights that it needs, each with the error of a client that has all others.

    A listing answers without an error and omits what the client may not see: `listed` is such a name.
    """

    values: Callable[[Names], dict[str, Any]]
    rights: Rights = ()
    listed: str | None = None
    by_id_from: int = 99
    """From this version on, topics have ids."""
    versions: tuple[int, int] | None = None
    hides_existence: bool = True
    also: tuple[AclBinding, ...] = ()
    """Rights that only add to the response."""
    silent_below: int = 0
    """Below this version the response has no field for the error: it is empty instead, as in Kafka."""
    before: tuple[ApiKey, Callable[[Names], dict[str, Any]]] | None = None
    """A request of the same connection that comes first, in the same version."""


def needs(*acls: AclBinding) -> Rights:
    return tuple((acl, REFUSALS[acl.resource_type]) for acl in acls)


def _topic_entry(names: Names, **fields: Any) -> dict[str, Any]:
    return {"name": names.topic, "topic_id": names.topic_id, **fields}


def _txn(names: Names) -> dict[str, Any]:
    return {"transactional_id": names.transactional_id, "producer_id": 7, "producer_epoch": 0}


def _produce(names: Names, transactional_id: str | None = None, records: bytes = BATCH) -> dict[str, Any]:
    partition = {"index": 0, "records": records}
    topic = {"name": names.topic, "topic_id": names.topic_id, "partition_data": [partition]}
    return {"transactional_id": transactional_id, "acks": -1, "timeout": 5_000, "topic_data": [topic]}


def _fetch(names: Names, replica_id: int = -1) -> dict[str, Any]:
    partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20, "current_leader_epoch": -1}
    topic = {"topic": names.topic, "topic_id": names.topic_id, "partitions": [partition]}
    session = {"session_id": 0, "session_epoch": -1, "replica_id": replica_id}
    return {"max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 20, "topics": [topic], **session}


def _share_fetch(names: Names) -> dict[str, Any]:
    """Open a share session of a member."""
    return {
        "group_id": names.group,
        "member_id": f"member-{names.version}",
        "share_session_epoch": 0,
        "max_bytes": 1,
        "max_records": 1,
        "topics": [{"topic_id": names.topic_id, "partitions": [{"partition_index": 0}]}],
    }


_ACKNOWLEDGED = {
    "partition_index": 0,
    "acknowledgement_batches": [{"first_offset": 0, "last_offset": 0, "acknowledge_types": [1]}],
}


def _config(resource_type: int, name: str, **fields: Any) -> dict[str, Any]:
    configs = [{"name": "retention.ms" if resource_type == 2 else "log.retention.ms", "value": "123456", **fields}]
    resource = {"resource_type": resource_type, "resource_name": name, "configs": configs}
    return {"resources": [resource], "validate_only": True}


def _described(resource_type: int, name: str) -> dict[str, Any]:
    resource = {"resource_type": resource_type, "resource_name": name, "configuration_keys": None}
    return {"resources": [resource], "include_synonyms": True}


ANY_ACL = {
    "resource_type_filter": 1,
    "resource_name_filter": None,
    "pattern_type_filter": 1,
    "principal_filter": None,
    "host_filter": None,
    "operation": 1,
    "permission_type": 1,
}
_NO_ACL = {**ANY_ACL, "principal_filter": "User:nobody"}
_NEW_ACL = {
    "resource_type": 2,
    "resource_name": "made",
    "resource_pattern_type": 3,
    "principal": "User:made",
    "host": "*",
    "operation": 3,
    "permission_type": 3,
}

READ_ORDERS = allow(Operation.READ, TOPIC, ORDERS)
DESCRIBE_ORDERS = allow(Operation.DESCRIBE, TOPIC, ORDERS)
WRITE_ORDERS = allow(Operation.WRITE, TOPIC, ORDERS)
READ_READERS = allow(Operation.READ, GROUP, READERS)
DESCRIBE_READERS = allow(Operation.DESCRIBE, GROUP, READERS)
WRITE_PAYMENTS = allow(Operation.WRITE, TRANSACTIONAL_ID, PAYMENTS)
DESCRIBE_PAYMENTS = allow(Operation.DESCRIBE, TRANSACTIONAL_ID, PAYMENTS)


def on_cluster(operation: Operation) -> Rights:
    return needs(allow(operation, CLUSTER))


CASES: dict[ApiKey, tuple[Case, ...]] = {
    ApiKey.PRODUCE: (
        Case(_produce, needs(WRITE_ORDERS), by_id_from=13),
        Case(
            lambda n: _produce(n, n.transactional_id, TRANSACTIONAL_BATCH),
            needs(WRITE_PAYMENTS, WRITE_ORDERS),
            by_id_from=13,
        ),
    ),
    ApiKey.FETCH: (
        Case(_fetch, needs(READ_ORDERS), by_id_from=13),
        Case(
            lambda n: _fetch(n, 1),
            ((allow(Operation.CLUSTER_ACTION, CLUSTER), ErrorCode.topic_authorization_failed),),
            by_id_from=13,
            versions=(4, 14),
        ),
    ),
    ApiKey.LIST_OFFSETS: (
        Case(
            lambda n: {
                "replica_id": -1,
                "topics": [
                    {
                        "name": n.topic,
                        "partitions": [
                            {
                                "partition_index": 0,
                                "timestamp": -1,
                                "max_num_offsets": 1,
                                "current_leader_epoch": -1,
                            }
                        ],
                    }
                ],
            },
            needs(DESCRIBE_ORDERS),
        ),
    ),
    ApiKey.METADATA: (
        Case(
            lambda n: {
                "topics": [{"name": n.topic, "topic_id": None}],
                "allow_auto_topic_creation": False,
                "include_topic_authorized_operations": True,
            },
            needs(DESCRIBE_ORDERS),
        ),
        Case(
            lambda n: {"topics": [{"name": None, "topic_id": n.topic_id}], "allow_auto_topic_creation": False},
            needs(DESCRIBE_ORDERS),
            versions=(12, 13),
            by_id_from=12,
        ),
        Case(
            lambda n: {"topics": None if n.version else [], "allow_auto_topic_creation": False},
            needs(DESCRIBE_ORDERS),
            listed=ORDERS,
        ),
        Case(
            lambda n: {"topics": [{"name": f"new-{n.version}", "topic_id": None}], "allow_auto_topic_creation": True},
            needs(
                allow(Operation.DESCRIBE, TOPIC, "new-", pattern_type=PatternType.PREFIXED),
                allow(Operation.CREATE, TOPIC, "new-", pattern_type=PatternType.PREFIXED),
            ),
            hides_existence=False,
        ),
    ),
    ApiKey.OFFSET_COMMIT: (
        Case(
            lambda n: {
                "group_id": n.group,
                "generation_id_or_member_epoch": -1,
                "member_id": "",
                "retention_time": -1,
                "topics": [_topic_entry(n, partitions=[{"partition_index": 0, "committed_offset": 1}])],
            },
            needs(READ_READERS, READ_ORDERS),
            by_id_from=10,
        ),
    ),
    ApiKey.OFFSET_FETCH: (
        Case(
            lambda n: {
                "group_id": n.group,
                "topics": [{"name": n.topic, "partition_indexes": [0]}],
                "groups": [{"group_id": n.group, "topics": [_topic_entry(n, partition_indexes=[0])]}],
            },
            needs(DESCRIBE_READERS, DESCRIBE_ORDERS),
            by_id_from=10,
        ),
        Case(
            lambda n: {"group_id": n.group, "topics": None, "groups": [{"group_id": n.group, "topics": None}]},
            needs(DESCRIBE_READERS),
            versions=(2, 10),
        ),
    ),
    ApiKey.FIND_COORDINATOR: (
        Case(lambda n: {"key": n.group, "key_type": 0, "coordinator_keys": [n.group]}, needs(DESCRIBE_READERS)),
        Case(
            lambda n: {"key_type": 2, "coordinator_keys": [f"{n.group}:{'A' * 22}:0"]},
            on_cluster(Operation.CLUSTER_ACTION),
            versions=(6, 6),
        ),
        Case(
            lambda n: {"key": n.transactional_id, "key_type": 1, "coordinator_keys": [n.transactional_id]},
            needs(DESCRIBE_PAYMENTS),
            versions=(1, 6),
        ),
    ),
    ApiKey.JOIN_GROUP: (
        Case(
            lambda n: {
                "group_id": n.group,
                "session_timeout": 10_000,
                "rebalance_timeout": 10_000,
                "member_id": "unknown",
                "protocol_type": "consumer",
                "protocols": [{"name": "range", "metadata": b""}],
            },
            needs(READ_READERS),
        ),
    ),
    ApiKey.HEARTBEAT: (
        Case(lambda n: {"group_id": n.group, "generation_id": 1, "member_id": "x"}, needs(READ_READERS)),
    ),
    ApiKey.LEAVE_GROUP: (
        Case(lambda n: {"group_id": n.group, "member_id": "x", "members": [{"member_id": "x"}]}, needs(READ_READERS)),
    ),
    ApiKey.SYNC_GROUP: (
        Case(
            lambda n: {
                "group_id": n.group,
                "generation_id": 1,
                "member_id": "x",
                "protocol_type": "consumer",
                "protocol_name": "range",
                "assignments": [],
            },
            needs(READ_READERS),
        ),
    ),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: (
        Case(
            lambda n: {
                "group_id": n.group,
                "member_id": "unknown",
                "member_epoch": -1,
                "rebalance_timeout": -1,
                "subscribed_topic_names": [n.topic],
                "topic_partitions": None,
            },
            needs(READ_READERS, DESCRIBE_ORDERS),
        ),
    ),
    ApiKey.CONSUMER_GROUP_DESCRIBE: (Case(lambda n: {"group_ids": [n.group]}, needs(DESCRIBE_READERS)),),
    ApiKey.SHARE_GROUP_HEARTBEAT: (
        Case(
            lambda n: {
                "group_id": n.group,
                "member_id": "unknown",
                "member_epoch": -1,
                "subscribed_topic_names": [n.topic],
            },
            needs(READ_READERS, DESCRIBE_ORDERS),
        ),
    ),
    ApiKey.SHARE_GROUP_DESCRIBE: (Case(lambda n: {"group_ids": [n.group]}, needs(DESCRIBE_READERS)),),
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS: (
        Case(
            lambda n: {
                "groups": [{"group_id": n.group, "topics": [{"topic_name": n.topic, "partitions": [0]}]}],
            },
            needs(DESCRIBE_READERS, DESCRIBE_ORDERS),
        ),
    ),
    ApiKey.ALTER_SHARE_GROUP_OFFSETS: (
        Case(
            lambda n: {
                "group_id": n.group,
                "topics": [
                    {"topic_name": n.topic, "partitions": [{"partition_index": 0, "start_offset": 0}]},
                ],
            },
            needs(READ_READERS, READ_ORDERS),
        ),
    ),
    ApiKey.DELETE_SHARE_GROUP_OFFSETS: (
        Case(
            lambda n: {"group_id": n.share_group, "topics": [{"topic_name": n.topic}]},
            needs(allow(Operation.DELETE, GROUP, SHARERS), READ_ORDERS),
        ),
    ),
    ApiKey.LIST_CONFIG_RESOURCES: (Case(lambda n: {"resource_types": []}, on_cluster(Operation.DESCRIBE_CONFIGS)),),
    ApiKey.DESCRIBE_GROUPS: (Case(lambda n: {"groups": [n.group]}, needs(DESCRIBE_READERS)),),
    ApiKey.LIST_GROUPS: (
        Case(lambda n: {}, needs(DESCRIBE_READERS), listed=READERS),
        Case(lambda n: {}, on_cluster(Operation.DESCRIBE), listed=READERS),
    ),
    ApiKey.API_VERSIONS: (Case(lambda n: {"client_software_name": "t", "client_software_version": "1"}),),
    ApiKey.CREATE_TOPICS: (
        Case(
            lambda n: {
                "topics": [{"name": n.fresh, "num_partitions": 1, "replication_factor": 1}],
                "timeout": 10_000,
                "validate_only": True,
            },
            needs(allow(Operation.CREATE, TOPIC, f"{ORDERS}-", pattern_type=PatternType.PREFIXED)),
            also=(allow(Operation.DESCRIBE_CONFIGS, TOPIC, "*"),),
        ),
        Case(
            lambda n: {
                "topics": [{"name": n.fresh, "num_partitions": 1, "replication_factor": 1}],
                "timeout": 10_000,
                "validate_only": True,
            },
            ((allow(Operation.CREATE, CLUSTER), ErrorCode.topic_authorization_failed),),
            also=(allow(Operation.DESCRIBE_CONFIGS, TOPIC, "*"),),
        ),
    ),
    ApiKey.DELETE_TOPICS: (
        Case(
            lambda n: {"topics": [{"name": None, "topic_id": n.topic_id}], "timeout": 10_000},
            needs(allow(Operation.DELETE, TOPIC, ORDERS)),
            versions=(6, 6),
            by_id_from=6,
        ),
        Case(
            lambda n: {"topic_names": [n.topic], "topics": [{"name": n.topic, "topic_id": None}], "timeout": 10_000},
            needs(allow(Operation.DELETE, TOPIC, ORDERS)),
        ),
    ),
    ApiKey.DELETE_RECORDS: (
        Case(
            lambda n: {
                "topics": [{"name": n.topic, "partitions": [{"partition_index": 0, "offset": 0}]}],
                "timeout": 5_000,
            },
            needs(allow(Operation.DELETE, TOPIC, ORDERS)),
        ),
    ),
    ApiKey.INIT_PRODUCER_ID: (
        Case(
            lambda n: {"transactional_id": n.transactional_id, "transaction_timeout": 60_000, "producer_id": -1},
            needs(WRITE_PAYMENTS),
        ),
        Case(
            lambda n: {"transactional_id": None, "transaction_timeout": 60_000, "producer_id": -1},
            on_cluster(Operation.IDEMPOTENT_WRITE),
        ),
        Case(
            lambda n: {"transactional_id": None, "transaction_timeout": 60_000, "producer_id": -1},
            ((allow(Operation.WRITE, TOPIC, "any"), ErrorCode.cluster_authorization_failed),),
        ),
    ),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: (
        Case(
            lambda n: {
                "replica_id": -1,
                "topics": [
                    {
                        "topic": n.topic,
                        "partitions": [{"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0}],
                    }
                ],
            },
            needs(DESCRIBE_ORDERS),
        ),
    ),
    ApiKey.ADD_PARTITIONS_TO_TXN: (
        Case(
            lambda n: {
                "v3_and_below_transactional_id": n.transactional_id,
                "v3_and_below_producer_id": 7,
                "v3_and_below_producer_epoch": 0,
                "v3_and_below_topics": [{"name": n.topic, "partitions": [0]}],
            },
            needs(WRITE_PAYMENTS, WRITE_ORDERS),
            versions=(0, 3),
        ),
        Case(
            lambda n: {
                "transactions": [{**_txn(n), "verify_only": True, "topics": [{"name": n.topic, "partitions": [0]}]}]
            },
            on_cluster(Operation.CLUSTER_ACTION),
            versions=(4, 5),
        ),
    ),
    ApiKey.ADD_OFFSETS_TO_TXN: (Case(lambda n: {**_txn(n), "group_id": n.group}, needs(WRITE_PAYMENTS, READ_READERS)),),
    ApiKey.END_TXN: (Case(lambda n: {**_txn(n), "committed": True}, needs(WRITE_PAYMENTS)),),
    ApiKey.WRITE_TXN_MARKERS: tuple(
        Case(
            lambda n: {
                "markers": [
                    {
                        "producer_id": 7,
                        "producer_epoch": 0,
                        "transaction_result": False,
                        "coordinator_epoch": 0,
                        "topics": [{"name": n.topic, "partition_indexes": [0]}],
                    }
                ]
            },
            on_cluster(operation),
        )
        for operation in (Operation.CLUSTER_ACTION, Operation.ALTER)
    ),
    ApiKey.TXN_OFFSET_COMMIT: (
        Case(
            lambda n: {
                **_txn(n),
                "group_id": n.group,
                "generation_id": -1,
                "member_id": "",
                "topics": [_topic_entry(n, partitions=[{"partition_index": 0, "committed_offset": 1}])],
            },
            needs(WRITE_PAYMENTS, READ_READERS, READ_ORDERS),
            by_id_from=6,
        ),
    ),
    ApiKey.DESCRIBE_ACLS: (Case(lambda n: ANY_ACL, on_cluster(Operation.DESCRIBE)),),
    ApiKey.CREATE_ACLS: (Case(lambda n: {"creations": [_NEW_ACL]}, on_cluster(Operation.ALTER)),),
    ApiKey.DELETE_ACLS: (Case(lambda n: {"filters": [_NO_ACL]}, on_cluster(Operation.ALTER)),),
    ApiKey.DESCRIBE_CONFIGS: (
        Case(lambda n: _described(2, n.topic), needs(allow(Operation.DESCRIBE_CONFIGS, TOPIC, ORDERS))),
        Case(lambda n: _described(4, "1"), on_cluster(Operation.DESCRIBE_CONFIGS)),
        Case(lambda n: _described(32, n.group), needs(allow(Operation.DESCRIBE_CONFIGS, GROUP, READERS))),
        Case(lambda n: _described(8, "1"), on_cluster(Operation.DESCRIBE_CONFIGS)),
    ),
    ApiKey.ALTER_CONFIGS: (
        Case(lambda n: _config(2, n.topic), needs(allow(Operation.ALTER_CONFIGS, TOPIC, ORDERS))),
        Case(lambda n: _config(4, "1"), on_cluster(Operation.ALTER_CONFIGS)),
        Case(lambda n: _config(32, n.group), needs(allow(Operation.ALTER_CONFIGS, GROUP, READERS))),
    ),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: (
        Case(lambda n: _config(2, n.topic, config_operation=0), needs(allow(Operation.ALTER_CONFIGS, TOPIC, ORDERS))),
        Case(lambda n: _config(4, "1", config_operation=0), on_cluster(Operation.ALTER_CONFIGS)),
        Case(lambda n: _config(32, n.group, config_operation=0), needs(allow(Operation.ALTER_CONFIGS, GROUP, READERS))),
    ),
    ApiKey.DESCRIBE_LOG_DIRS: (Case(lambda n: {"topics": None}, on_cluster(Operation.DESCRIBE), silent_below=3),),
    ApiKey.CREATE_PARTITIONS: (
        Case(
            lambda n: {"topics": [{"name": n.topic, "count": 9}], "timeout": 5_000, "validate_only": True},
            needs(allow(Operation.ALTER, TOPIC, ORDERS)),
        ),
    ),
    ApiKey.DELETE_GROUPS: (
        Case(lambda n: {"groups_names": [n.group]}, needs(allow(Operation.DELETE, GROUP, READERS))),
    ),
    ApiKey.ELECT_LEADERS: (
        Case(
            lambda n: {"topic_partitions": [{"topic": n.topic, "partitions": [0]}], "timeout": 5_000},
            on_cluster(Operation.ALTER),
        ),
    ),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: (
        Case(
            lambda n: {
                "topics": [{"name": n.topic, "partitions": [{"partition_index": 0, "replicas": None}]}],
                "timeout": 5_000,
            },
            on_cluster(Operation.ALTER),
        ),
    ),
    ApiKey.LIST_PARTITION_REASSIGNMENTS: (
        Case(lambda n: {"topics": None, "timeout": 5_000}, on_cluster(Operation.DESCRIBE)),
    ),
    ApiKey.OFFSET_DELETE: (
        Case(
            lambda n: {
                "group_id": n.group,
                "topics": [{"name": n.topic, "partitions": [{"partition_index": 0}]}],
            },
            needs(allow(Operation.DELETE, GROUP, READERS), READ_ORDERS),
        ),
    ),
    ApiKey.DESCRIBE_CLIENT_QUOTAS: (
        Case(lambda n: {"components": [], "strict": False}, on_cluster(Operation.DESCRIBE_CONFIGS)),
    ),
    ApiKey.ALTER_CLIENT_QUOTAS: (
        Case(
            lambda n: {
                "entries": [
                    {
                        "entity": [{"entity_type": "user", "entity_name": "made"}],
                        "ops": [{"key": "producer_byte_rate", "value": 1e6, "remove": False}],
                    }
                ],
                "validate_only": True,
            },
            on_cluster(Operation.ALTER_CONFIGS),
        ),
    ),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: (
        Case(lambda n: {"users": None}, on_cluster(Operation.DESCRIBE)),
        Case(lambda n: {"users": [{"name": "made"}]}, on_cluster(Operation.DESCRIBE)),
    ),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: (
        Case(
            lambda n: {
                "deletions": [],
                "upsertions": [
                    {
                        "name": "made",
                        "mechanism": 2,
                        "iterations": 4096,
                        "salt": b"s" * 24,
                        "salted_password": b"p" * 64,
                    }
                ],
            },
            on_cluster(Operation.ALTER),
        ),
    ),
    ApiKey.DESCRIBE_CLUSTER: (Case(lambda n: {"include_cluster_authorized_operations": True, "endpoint_type": 1}),),
    ApiKey.DESCRIBE_PRODUCERS: (
        Case(lambda n: {"topics": [{"name": n.topic, "partition_indexes": [0]}]}, needs(READ_ORDERS)),
    ),
    ApiKey.ALTER_REPLICA_LOG_DIRS: (
        Case(
            lambda n: {"dirs": [{"path": "/elsewhere", "topics": [{"name": n.topic, "partitions": [0]}]}]},
            on_cluster(Operation.ALTER),
        ),
    ),
    ApiKey.DESCRIBE_QUORUM: (
        Case(
            lambda n: {"topics": [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]},
            on_cluster(Operation.DESCRIBE),
        ),
    ),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: (
        Case(lambda n: {"topics": [{"name": n.topic}]}, needs(DESCRIBE_ORDERS)),
        Case(lambda n: {"topics": []}, needs(DESCRIBE_ORDERS), listed=ORDERS),
    ),
    ApiKey.ADD_RAFT_VOTER: (
        Case(lambda n: {"cluster_id": None, "timeout": 1_000, "voter_id": 9}, on_cluster(Operation.ALTER)),
    ),
    ApiKey.REMOVE_RAFT_VOTER: (Case(lambda n: {"cluster_id": None, "voter_id": 9}, on_cluster(Operation.ALTER)),),
    ApiKey.SHARE_FETCH: (Case(_share_fetch, needs(READ_READERS, READ_ORDERS), by_id_from=1),),
    ApiKey.SHARE_ACKNOWLEDGE: (
        Case(
            lambda n: {
                "group_id": n.group,
                "member_id": f"member-{n.version}",
                "share_session_epoch": 1,
                "topics": [{"topic_id": n.topic_id, "partitions": [_ACKNOWLEDGED]}],
            },
            needs(READ_READERS, READ_ORDERS),
            by_id_from=1,
            before=(ApiKey.SHARE_FETCH, _share_fetch),
        ),
    ),
    **{
        key: (
            Case(
                lambda n: {
                    "group_id": n.group,
                    "topics": [{"topic_id": UUID(int=7), "partitions": [{"partition": 0}]}],
                },
                on_cluster(Operation.CLUSTER_ACTION),
            ),
        )
        for key in (
            ApiKey.INITIALIZE_SHARE_GROUP_STATE,
            ApiKey.READ_SHARE_GROUP_STATE,
            ApiKey.WRITE_SHARE_GROUP_STATE,
            ApiKey.DELETE_SHARE_GROUP_STATE,
            ApiKey.READ_SHARE_GROUP_STATE_SUMMARY,
        )
    },
    ApiKey.UNREGISTER_BROKER: (Case(lambda n: {"broker_id": 99}, on_cluster(Operation.ALTER)),),
    ApiKey.DESCRIBE_TRANSACTIONS: (
        Case(lambda n: {"transactional_ids": [n.transactional_id]}, needs(DESCRIBE_PAYMENTS)),
    ),
    ApiKey.LIST_TRANSACTIONS: (
        Case(
            lambda n: {"state_filters": [], "producer_id_filters": [], "duration_filter": -1},
            needs(DESCRIBE_PAYMENTS),
            listed=PAYMENTS,
        ),
    ),
}
"""By API."""

WITHOUT_RIGHTS = {
    ApiKey.SASL_HANDSHAKE,
    ApiKey.SASL_AUTHENTICATE,
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS,
    ApiKey.PUSH_TELEMETRY,
}
"""The first two come before a client has rights, and are errors on this listener, which does not use SASL."""

TELEMETRY: dict[ApiKey, tuple[Case, ...]] = {
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: (Case(lambda n: {"client_instance_id": uuid4()}),),
    ApiKey.PUSH_TELEMETRY: (
        Case(
            lambda n: {
                "client_instance_id": uuid4(),
                "subscription_id": 1,
                "terminating": False,
                "compression_type": 0,
                "metrics": b"",
            }
        ),
    ),
}
"""Requests that need no right. Their other errors depend on what the client sent before."""

LAST = (ApiKey.OFFSET_DELETE, ApiKey.DELETE_GROUPS, ApiKey.DELETE_TOPICS)
"""They remove what other requests need."""
