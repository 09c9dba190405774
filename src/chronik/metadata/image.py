"""The cluster's metadata at one version: immutable values that share their unchanged parts between versions.

Invariants: partition i of a topic is at index i; `names_by_id` mirrors `topics`; `version` is the number of commands
applied so far, so two images of the same version are equal. An update copies only what it touches: the topic's tuple of
partitions and the recently changed entries of the map of topics (`LayeredMap`), never the other topics.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from uuid import UUID

import msgspec

from chronik.authentication.scram import ScramCredential
from chronik.authorization.acls import AclBinding
from chronik.metadata.layered_map import LayeredMap
from chronik.quotas.entities import QuotaEntity
from chronik.wire.errors import ErrorCode, KafkaError

DEFAULT_LISTENER = "KAFKA"
"""The listener of a broker that registered none by name."""

NO_LEADER = -1
NO_CONTROLLER = -1

TOPIC_NAME_CHARS_MAX = 249

OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTIONS_TOPIC = "__transaction_state"
SHARE_STATE_TOPIC = "__share_group_state"
TRACES_TOPIC = "__chronik_traces"
SCHEMAS_TOPIC = "_schemas"
INTERNAL_TOPICS = frozenset({OFFSETS_TOPIC, TRANSACTIONS_TOPIC, SHARE_STATE_TOPIC})

_LEGAL = re.compile(r"[a-zA-Z0-9._-]+")


def is_internal(name: str) -> bool:
    """Whether the topic is internal: clients may read and list it, but not create or delete it."""
    return name in INTERNAL_TOPICS


def is_traceable(name: str) -> bool:
    """Whether the topic may be traced. Tracing a topic that holds traces or cluster state would create more traces."""
    return not name.startswith("__")


def check_topic_name(name: str) -> None:
    """Raise INVALID_TOPIC_EXCEPTION with the reason if the topic name is illegal. It becomes a folder name."""
    if not name:
        reason = "the empty string is not allowed"
    elif name in {".", ".."}:
        reason = "'.' and '..' are not allowed"
    elif len(name) > TOPIC_NAME_CHARS_MAX:
        reason = f"it is {len(name)} characters long, at most {TOPIC_NAME_CHARS_MAX} are allowed"
    elif not _LEGAL.fullmatch(name):
        reason = "only ASCII letters, digits, '.', '_' and '-' are allowed"
    else:
        return
    shown = name if len(name) <= TOPIC_NAME_CHARS_MAX else name[:32] + "..."
    raise KafkaError(ErrorCode.invalid_topic_exception, f"topic name {shown!r} is invalid: {reason}")


class PartitionImage(msgspec.Struct, frozen=True, gc=False):
    """One partition. Every change raises `partition_epoch`; `leader_epoch` rises when a leader starts to lead.

    Invariants: `isr` is a subset of `replicas`; `leader` is in `isr`, or NO_LEADER; a leader epoch belongs to one
    process of one broker. Every broker in `isr` or `eligible` holds every committed record. `eligible` (KIP-966) is
    disjoint from `isr`. It is empty unless `isr` has fewer than min.insync.replicas members, when nothing is committed.

    During a reassignment `replicas` holds the old and the new replicas: `adding` lists the new ones, `removing` those
    to remove. `last_known_leader` is the last leader of a partition that has no leader now.

    `unproven` is empty while there is a leader. It lists replicas that were in `isr` or `eligible` until their machine
    lost its page cache: they may lack committed records, and nothing shows whether they do. `unclean_epoch` is the
    leader epoch of the last election that accepted the loss of committed records; -1 if there was none.

    The garbage collector skips it (`gc=False`): it refers to no cycles, and there may be 100,000.
    """

    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    partition_epoch: int = 0
    eligible: tuple[int, ...] = ()
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    last_known_leader: int = NO_LEADER
    unproven: tuple[int, ...] = ()
    unclean_epoch: int = -1

    @property
    def is_being_reassigned(self) -> bool:
        return bool(self.adding or self.removing)

    @property
    def is_settled(self) -> bool:
        """Whether the image shows nothing to do: there is a leader, every replica is in sync, and none is to change."""
        return (
            self.leader in self.isr
            and len(self.isr) == len(self.replicas)
            and not (self.eligible or self.unproven or self.adding or self.removing)
        )

    @property
    def target_replicas(self) -> tuple[int, ...]:
        """The replicas after the reassignment; the first is the preferred leader."""
        return tuple(replica for replica in self.replicas if replica not in self.removing)

    @property
    def settled_replicas(self) -> tuple[int, ...]:
        """The replicas before the reassignment, without those being added."""
        return tuple(replica for replica in self.replicas if replica not in self.adding)


class TopicImage(msgspec.Struct, frozen=True):
    """One topic. `configs` holds only values set on the topic itself; defaults come from the node."""

    name: str
    id: UUID
    partitions: tuple[PartitionImage, ...]
    configs: Mapping[str, str] = {}

    @property
    def is_internal(self) -> bool:
        return is_internal(self.name)

    def partition(self, partition: int) -> PartitionImage | None:
        return self.partitions[partition] if 0 <= partition < len(self.partitions) else None


class BrokerImage(msgspec.Struct, frozen=True):
    """One broker. Each start of its process has a new `incarnation`; `epoch` is the version that registered it.

    A fenced broker leads nothing and may not join an ISR: it is down, or has just registered. A stopping broker still
    serves, but gets no new partitions. `status_version` is the version of the last change to either; a broker that has
    not applied it does not know its status. `durability` is this process's rule for when a record is durable.
    `folder_id` identifies its data folder. `internal` is its address for other nodes; `http` is its HTTP API, if any.
    `listeners` has its addresses for clients by listener; `host` and `port` are those of the first one. It is empty if
    there is only that one.
    """

    id: int
    epoch: int
    host: str
    port: int
    incarnation: UUID
    rack: str | None = None
    is_fenced: bool = False
    is_shutting_down: bool = False
    status_version: int = 0
    durability: str = ""
    folder_id: UUID | None = None
    internal: str = ""
    http: str = ""
    listeners: Mapping[str, tuple[str, int]] = {}

    def address(self, listener: str) -> tuple[str, int] | None:
        """Return the address for clients that came in by `listener`; None if the broker does not have it."""
        if not self.listeners:
            return (self.host, self.port) if listener == DEFAULT_LISTENER else None
        return self.listeners.get(listener)

    @property
    def may_join_isr(self) -> bool:
        return not (self.is_fenced or self.is_shutting_down)


class ClientQuotas(msgspec.Struct, frozen=True):
    """The quotas that are set on one entity: never empty."""

    entity: QuotaEntity
    values: Mapping[str, float]


class ClusterImage(msgspec.Struct, frozen=True):
    """All metadata. `broker_configs` is keyed by the node id as text; the empty key holds the cluster-wide defaults.

    `topics` and `names_by_id` are dicts in a decoded image, and a `LayeredMap` after a change.

    `scram` holds the users' credentials, by user and mechanism; no user is without one. Its keys are secret.
    """

    cluster_id: str = ""
    version: int = 0
    topics: Mapping[str, TopicImage] = {}
    names_by_id: Mapping[UUID, str] = {}
    brokers: Mapping[int, BrokerImage] = {}
    broker_configs: Mapping[str, Mapping[str, str]] = {}
    next_producer_id: int = 0
    controller_id: int = NO_CONTROLLER
    scram: Mapping[str, Mapping[str, ScramCredential]] = {}
    acls: frozenset[AclBinding] = frozenset()
    client_quotas: tuple[ClientQuotas, ...] = ()
    """Sorted by entity, each entity once."""
    client_metrics: Mapping[str, Mapping[str, str]] = {}
    """The configs of subscriptions to metrics of clients, by name: never empty."""
    group_configs: Mapping[str, Mapping[str, str]] = {}
    """By group; a group without configs is not in it."""

    def topic(self, name: str) -> TopicImage | None:
        return self.topics.get(name)

    def topic_by_id(self, topic_id: UUID) -> TopicImage | None:
        name = self.names_by_id.get(topic_id)
        return None if name is None else self.topics.get(name)

    def partition(self, topic: str, partition: int) -> PartitionImage | None:
        image = self.topics.get(topic)
        return None if image is None else image.partition(partition)

    def require_topic(self, name: str) -> TopicImage:
        topic = self.topics.get(name)
        if topic is None:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, f"topic {name!r} does not exist")
        return topic

    def require_partition(self, topic_name: str, index: int) -> tuple[TopicImage, PartitionImage]:
        topic, partition = self.topics.get(topic_name), self.partition(topic_name, index)
        if topic is None or partition is None:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, f"{topic_name}-{index} does not exist")
        return topic, partition

    def quotas_of(self, entity: QuotaEntity) -> Mapping[str, float]:
        return next((quotas.values for quotas in self.client_quotas if quotas.entity == entity), {})

    def is_live(self, broker_id: int) -> bool:
        broker = self.brokers.get(broker_id)
        return broker is not None and not broker.is_fenced

    def live_brokers(self) -> list[BrokerImage]:
        return [broker for _, broker in sorted(self.brokers.items()) if not broker.is_fenced]

    def staying_brokers(self) -> list[BrokerImage]:
        """The brokers that are neither fenced nor shutting down, by id: they may get replicas."""
        return [broker for broker in self.live_brokers() if not broker.is_shutting_down]

    def absent_brokers(self) -> list[BrokerImage]:
        """The brokers that are fenced or shutting down, by id."""
        return [broker for _, broker in sorted(self.brokers.items()) if not broker.may_join_isr]


encode_image: Callable[[ClusterImage], bytes] = msgspec.msgpack.Encoder(enc_hook=LayeredMap.as_dict).encode
"""Encode the image as msgpack maps keyed by field name, so that a later version may add fields."""
decode_image: Callable[[bytes], ClusterImage] = msgspec.msgpack.Decoder(ClusterImage).decode
"""Decode an image. Unknown fields are ignored; ValueError if the bytes are not an image."""
