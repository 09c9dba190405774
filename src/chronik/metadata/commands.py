"""The commands that change metadata, and their encoding.

A command is a fact that its proposer decided once: it contains all ids, assignments and values, so applying it needs
neither clock nor randomness. On disk and on the wire a command is one msgpack map: `type` names the command, the other
keys are its fields by name. Readers ignore unknown fields and give missing fields their default, so a field may be
added with a default. A field is never renamed and never changes meaning. An unknown `type` is refused, since a node
that skipped a command would hold a different image than its peers.

    {"type": "create_topic", "name": "orders", "id": "6f2c...", "partitions": [{"replicas": [1], "isr": [1], ...}], ...}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias
from uuid import UUID

import msgspec

from chronik.authentication.scram import ScramCredential
from chronik.authorization.acls import AclBinding
from chronik.quotas.entities import QuotaEntity

ConfigResource: TypeAlias = Literal["topic", "broker", "client_metrics", "group"]


class Assignment(msgspec.Struct, frozen=True):
    """The replicas of a new partition in order of preference, and those of them that are alive."""

    replicas: tuple[int, ...]
    isr: tuple[int, ...]


class CreateCluster(msgspec.Struct, frozen=True, tag="create_cluster"):
    """The first command of every cluster: sets its id."""

    cluster_id: str


class PartitionChange(msgspec.Struct, frozen=True, array_like=True):
    """The new state of one partition, valid only while `partition_epoch` is current.

    Encoded as a list, since one command may hold thousands: a field may be added at the end, with a default.
    `replicas`, `adding` and `removing` stay unchanged if None. `is_unclean`: the new leader may lack committed records,
    and that loss is accepted. `begins_epoch`: the leader stays and starts a new leader epoch, which invalidates
    everything its replicas reported before.
    """

    partition: int
    partition_epoch: int
    leader: int
    isr: tuple[int, ...]
    eligible: tuple[int, ...] = ()
    replicas: tuple[int, ...] | None = None
    adding: tuple[int, ...] | None = None
    removing: tuple[int, ...] | None = None
    unproven: tuple[int, ...] = ()
    is_unclean: bool = False
    begins_epoch: bool = False


class TopicChanges(msgspec.Struct, frozen=True, array_like=True):
    """The changed partitions of one topic."""

    topic_id: UUID
    partitions: tuple[PartitionChange, ...]


class RegisterBroker(msgspec.Struct, frozen=True, tag="register_broker"):
    """Register a broker's process. A new incarnation bumps the leader epoch of each partition that it still leads.

    All `changes` are applied first, or the command is refused. They remove a broker that may have lost records from
    every ISR before any node can rely on it. `starts_fenced`: it serves only once it is unfenced.
    """

    broker_id: int
    incarnation: UUID
    host: str
    port: int
    rack: str | None = None
    was_clean: bool = True
    durability: str = ""
    folder_id: UUID | None = None
    internal: str = ""
    starts_fenced: bool = False
    changes: tuple[TopicChanges, ...] = ()
    http: str = ""
    listeners: Mapping[str, tuple[str, int]] = {}
    """The addresses for clients by listener. Empty: one listener, at `host` and `port`."""


class BrokerStatusChange(msgspec.Struct, frozen=True):
    """A new status of a broker. A change with an outdated partition epoch is skipped: the controller decides again."""

    broker_id: int
    broker_epoch: int
    changes: tuple[TopicChanges, ...] = ()


class FenceBroker(BrokerStatusChange, frozen=True, tag="fence_broker"):
    """Fence a broker that is down or unreachable; `changes` move its leaderships."""


class UnfenceBroker(BrokerStatusChange, frozen=True, tag="unfence_broker"):
    """Unfence a broker that is alive and up to date: it may lead and join ISRs."""


class ShutDownBroker(BrokerStatusChange, frozen=True, tag="shut_down_broker"):
    """Record that the broker is about to stop cleanly: it gets no new partitions, and its leaderships move."""


class UnregisterBroker(msgspec.Struct, frozen=True, tag="unregister_broker"):
    """Remove the broker for good; refused while any partition has a replica on it."""

    broker_id: int
    broker_epoch: int


class CreateTopic(msgspec.Struct, frozen=True, tag="create_topic"):
    name: str
    id: UUID
    partitions: tuple[Assignment, ...]
    configs: Mapping[str, str] = {}


class DeleteTopic(msgspec.Struct, frozen=True, tag="delete_topic"):
    """Carries the topic id, so that an old request does not delete a recreated topic of the same name."""

    name: str
    id: UUID


class CreatePartitions(msgspec.Struct, frozen=True, tag="create_partitions"):
    """Add partitions numbered from `first`, which is the current number of partitions."""

    name: str
    id: UUID
    first: int
    partitions: tuple[Assignment, ...]


class ChangePartition(msgspec.Struct, frozen=True, tag="change_partition"):
    """Change the leader, ISR or replicas of one partition; refused unless `partition_epoch` is current."""

    topic_id: UUID
    partition: int
    partition_epoch: int
    leader: int
    isr: tuple[int, ...]
    eligible: tuple[int, ...] = ()
    replicas: tuple[int, ...] | None = None
    adding: tuple[int, ...] | None = None
    removing: tuple[int, ...] | None = None


class ChangePartitions(msgspec.Struct, frozen=True, tag="change_partitions"):
    """Change many partitions. Those with an outdated epoch are skipped; if all are outdated, the command is refused."""

    changes: tuple[TopicChanges, ...]


class AlterConfigs(msgspec.Struct, frozen=True, tag="alter_configs"):
    """Set configs of one resource; None unsets. A broker's name is its id as text, "" is the cluster default."""

    resource: ConfigResource
    name: str
    changes: Mapping[str, str | None]


class AlterClientQuotas(msgspec.Struct, frozen=True, tag="alter_client_quotas"):
    """Set quotas of one entity; None removes one."""

    entity: QuotaEntity
    changes: Mapping[str, float | None]


class AllocateProducerIds(msgspec.Struct, frozen=True, tag="allocate_producer_ids"):
    """Allocate the next `count` producer ids to one broker; the event carries the range."""

    broker_id: int
    count: int


class ScramKey(msgspec.Struct, frozen=True):
    """One credential: a user has at most one for each mechanism."""

    user: str
    mechanism: str


class ScramUpsert(msgspec.Struct, frozen=True):
    user: str
    mechanism: str
    credential: ScramCredential


class AlterScramCredentials(msgspec.Struct, frozen=True, tag="alter_scram_credentials"):
    """Delete, then create or replace SCRAM credentials. Refused as a whole if one to delete does not exist."""

    deletions: tuple[ScramKey, ...] = ()
    upserts: tuple[ScramUpsert, ...] = ()


class CreateAcls(msgspec.Struct, frozen=True, tag="create_acls"):
    """Add ACLs; those that exist already stay as they are."""

    acls: tuple[AclBinding, ...]


class DeleteAcls(msgspec.Struct, frozen=True, tag="delete_acls"):
    """Remove exactly these ACLs; those that do not exist any more are ignored."""

    acls: tuple[AclBinding, ...]


Command: TypeAlias = (
    CreateCluster
    | RegisterBroker
    | FenceBroker
    | UnfenceBroker
    | ShutDownBroker
    | UnregisterBroker
    | CreateTopic
    | DeleteTopic
    | CreatePartitions
    | ChangePartition
    | ChangePartitions
    | AlterConfigs
    | AlterClientQuotas
    | AllocateProducerIds
    | AlterScramCredentials
    | CreateAcls
    | DeleteAcls
)

encode_command: Callable[[Command], bytes] = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
decode_command: Callable[[bytes], Command] = _decoder.decode
"""Decode a command. ValueError if the bytes are not a command, or are one of a newer version."""
