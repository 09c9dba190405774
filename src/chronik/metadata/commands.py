"""The commands that change metadata, and their bytes.

A command is a fact that was decided once, by whoever proposed it: ids, assignments and values are inside, so applying
it needs neither clock nor randomness. On disk and on the wire a command is one msgpack map: `type` names the command,
the other keys are its fields by name. Readers pass over fields they do not know and give missing ones their default, so
a field may be added with a default; a field is never renamed or given another meaning. An unknown `type` is refused,
since a node that skipped a command would hold another image than its peers.

    {"type": "create_topic", "name": "orders", "id": "6f2c...", "partitions": [{"replicas": [1], "isr": [1], ...}], ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias
from uuid import UUID

import msgspec

ConfigResource: TypeAlias = Literal["topic", "broker"]


class Assignment(msgspec.Struct, frozen=True):
    """Where a new partition lives: all its replicas in order of preference, and those of them that are alive."""

    replicas: tuple[int, ...]
    isr: tuple[int, ...]


class CreateCluster(msgspec.Struct, frozen=True, tag="create_cluster"):
    """The first command of every cluster: gives it its id."""

    cluster_id: str


class PartitionChange(msgspec.Struct, frozen=True, array_like=True):
    """What one partition becomes, if `partition_epoch` is still its current one.

    Encoded as a list, since thousands of them go into one command: a field may be added at the end, with a default.
    `replicas`, `adding` and `removing` stay as they are where None. `is_unclean`: the new leader may lack committed
    records, and that loss is accepted. `begins_epoch`: the leader stays and starts a new leader epoch, in which nothing
    counts that its replicas told it before.
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
    """A broker's process says that it is there. A new incarnation bumps the epoch of each partition it still leads.

    `changes` come first, and all of them or the command is refused: they take a broker that may have lost records out
    of every ISR before anyone can count on it. `starts_fenced`: it serves once it has been unfenced.
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


class FenceBroker(msgspec.Struct, frozen=True, tag="fence_broker"):
    """The broker is down, or out of reach: others lead in its place, as `changes` say.

    Here and in the commands below, a change whose partition has moved on is passed over: the controller looks again.
    """

    broker_id: int
    broker_epoch: int
    changes: tuple[TopicChanges, ...] = ()


class UnfenceBroker(msgspec.Struct, frozen=True, tag="unfence_broker"):
    """The broker is there and up to date: it may lead and join ISRs."""

    broker_id: int
    broker_epoch: int
    changes: tuple[TopicChanges, ...] = ()


class ShutDownBroker(msgspec.Struct, frozen=True, tag="shut_down_broker"):
    """The broker is about to stop cleanly: it gets nothing new, and what it leads goes to others."""

    broker_id: int
    broker_epoch: int
    changes: tuple[TopicChanges, ...] = ()


class UnregisterBroker(msgspec.Struct, frozen=True, tag="unregister_broker"):
    """The broker is gone for good; refused while any partition has a replica on it."""

    broker_id: int
    broker_epoch: int


class CreateTopic(msgspec.Struct, frozen=True, tag="create_topic"):
    name: str
    id: UUID
    partitions: tuple[Assignment, ...]
    configs: Mapping[str, str] = {}


class DeleteTopic(msgspec.Struct, frozen=True, tag="delete_topic"):
    """Named with its id, so that a topic made again under the same name is not deleted by an old request."""

    name: str
    id: UUID


class CreatePartitions(msgspec.Struct, frozen=True, tag="create_partitions"):
    """Adds partitions numbered from `first`, which is the number there are now."""

    name: str
    id: UUID
    first: int
    partitions: tuple[Assignment, ...]


class ChangePartition(msgspec.Struct, frozen=True, tag="change_partition"):
    """Another leader, ISR or replicas for one partition; refused unless `partition_epoch` is still the current one."""

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
    """Many partitions in one command. One that has moved on is passed over; if all have, the command is refused."""

    changes: tuple[TopicChanges, ...]


class AlterConfigs(msgspec.Struct, frozen=True, tag="alter_configs"):
    """Sets configs of one topic or broker; None unsets. A broker's name is its id as text, "" the cluster's default."""

    resource: ConfigResource
    name: str
    changes: Mapping[str, str | None]


class AllocateProducerIds(msgspec.Struct, frozen=True, tag="allocate_producer_ids"):
    """Hands the next `count` producer ids to one broker; the event says which."""

    broker_id: int
    count: int


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
    | AllocateProducerIds
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def encode_command(command: Command) -> bytes:
    return _encoder.encode(command)


def decode_command(data: bytes) -> Command:
    """The command of `encode_command`; ValueError when the bytes are none, or one of a newer version."""
    return _decoder.decode(data)
