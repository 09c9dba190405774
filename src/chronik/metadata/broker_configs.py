"""Broker configs, under Kafka's names.

Dynamic configs are the defaults of topic configs: they can be set for one broker or, under the empty name, for all.
Static configs only report how the node was started; `node` fills in their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from chronik.metadata.config_definitions import INT_MAX, LONG_MAX, ConfigDefinition, ConfigType, by_name
from chronik.metadata.topic_configs import TOPIC_CONFIGS
from chronik.wire.errors import ErrorCode, KafkaError

CLUSTER_DEFAULT = ""
"""The broker name whose configs apply to every broker."""

CLUSTER_WIDE_CONFIGS = frozenset({"min.insync.replicas", "unclean.leader.election.enable"})
"""The controller uses these too, and it cannot know the value that another broker uses."""


def _static(name: str, config_type: ConfigType, documentation: str) -> ConfigDefinition:
    return ConfigDefinition(name, config_type, None, documentation, is_dynamic=False)


def _dynamic(topic_config: ConfigDefinition, name: str) -> ConfigDefinition:
    documentation = f"The default of the topic config {topic_config.name}. {topic_config.documentation}"
    return replace(topic_config, name=name, documentation=documentation, synonym=None)


MAX_CONNECTIONS_PER_IP = "max.connections.per.ip"
MAX_CONNECTION_CREATION_RATE = "max.connection.creation.rate"
LEADER_THROTTLED_RATE = "leader.replication.throttled.rate"
FOLLOWER_THROTTLED_RATE = "follower.replication.throttled.rate"
UNLIMITED = str(INT_MAX)

_S = ConfigType.STRING
_I = ConfigType.INT
_L = ConfigType.LONG
_B = ConfigType.BOOLEAN


def _rate(name: str, documentation: str) -> ConfigDefinition:
    return ConfigDefinition(name, _L, str(LONG_MAX), documentation, lowest=0, highest=LONG_MAX)


DYNAMIC_BROKER_CONFIGS: Mapping[str, ConfigDefinition] = by_name(
    (
        *(
            _dynamic(definition, definition.synonym)
            for definition in TOPIC_CONFIGS.values()
            if definition.synonym is not None
        ),
        ConfigDefinition(
            "sasl.kerberos.min.time.before.relogin",
            _L,
            "60000",
            "Kept and reported for clients that set it; nothing here uses Kerberos.",
            lowest=0,
        ),
        ConfigDefinition(
            MAX_CONNECTIONS_PER_IP,
            _I,
            UNLIMITED,
            "The most client connections of one address.",
            lowest=0,
            highest=INT_MAX,
        ),
        ConfigDefinition(
            MAX_CONNECTION_CREATION_RATE,
            _I,
            UNLIMITED,
            "The most client connections that a broker accepts per second; further ones are served late.",
            lowest=1,
            highest=INT_MAX,
        ),
        _rate(
            LEADER_THROTTLED_RATE,
            "The most bytes per second that this broker sends to the throttled replicas of the partitions it leads.",
        ),
        _rate(
            FOLLOWER_THROTTLED_RATE,
            "The most bytes per second that this broker fetches for its own throttled replicas.",
        ),
        _rate(
            "replica.alter.log.dirs.io.max.bytes.per.second",
            "Kafka's limit for moves between log folders. Not used: a node has one log folder.",
        ),
    )
)

STATIC_BROKER_CONFIGS: Mapping[str, ConfigDefinition] = by_name(
    (
        _static("advertised.listeners", _S, "The address that is advertised to clients."),
        _static("auto.create.topics.enable", _B, "Whether a metadata request for an unknown topic creates it."),
        _static("broker.id", _I, "This node's id."),
        _static("broker.rack", _S, "This node's rack; replicas are spread over racks."),
        _static("connections.max.idle.ms", _L, "How long an idle connection is kept."),
        _static("connections.max.reauth.ms", _L, "How long a client stays authenticated; 0 means while connected."),
        _static("default.replication.factor", _I, "The replication factor of a topic that is created without one."),
        _static("delete.topic.enable", _B, "Whether topics can be deleted."),
        _static(
            "durability",
            _S,
            "When a record counts as durable: 'synced' after fdatasync, 'replicated' once in the page cache.",
        ),
        _static("errors.deadletterqueue.auto.create.topics.enable", _B, "Whether dead-letter topics are created."),
        _static("errors.deadletterqueue.topic.name.prefix", _S, "How names of dead-letter topics begin."),
        _static("group.consumer.assignment.interval.ms", _I, "The shortest time between two assignments of a group."),
        _static("group.consumer.assignors", _S, "The assignors of consumer groups; the first is the default."),
        _static("group.consumer.heartbeat.interval.ms", _I, "The time between two heartbeats of a member."),
        _static("group.consumer.max.assignment.interval.ms", _I, "The longest assignment interval of a group."),
        _static("group.consumer.max.heartbeat.interval.ms", _I, "The longest heartbeat interval of a group."),
        _static("group.consumer.max.session.timeout.ms", _I, "The longest session timeout of a consumer group."),
        _static("group.consumer.max.size", _I, "The most members that one consumer group may have."),
        _static("group.consumer.migration.policy", _S, "Which groups may change between the classic and new protocol."),
        _static("group.consumer.min.assignment.interval.ms", _I, "The shortest assignment interval of a group."),
        _static("group.consumer.min.heartbeat.interval.ms", _I, "The shortest heartbeat interval of a group."),
        _static("group.consumer.min.session.timeout.ms", _I, "The shortest session timeout of a consumer group."),
        _static("group.consumer.session.timeout.ms", _I, "The session timeout of consumer groups."),
        _static("group.initial.rebalance.delay.ms", _I, "How long a new group waits for more members."),
        _static("group.max.session.timeout.ms", _I, "The longest session timeout that a member may request."),
        _static("group.max.size", _I, "The most members that one group may have."),
        _static("group.min.session.timeout.ms", _I, "The shortest session timeout that a member may request."),
        _static(
            "group.share.assignment.interval.ms", _I, "The shortest time between two assignments of a share group."
        ),
        _static("group.share.delivery.count.limit", _I, "How often a record is delivered to a share group at most."),
        _static("group.share.heartbeat.interval.ms", _I, "The time between two heartbeats of a member."),
        _static("group.share.max.assignment.interval.ms", _I, "The longest assignment interval of a share group."),
        _static("group.share.max.delivery.count.limit", _I, "The highest delivery count limit of a share group."),
        _static("group.share.max.heartbeat.interval.ms", _I, "The longest heartbeat interval of a share group."),
        _static("group.share.max.partition.max.record.locks", _I, "The highest limit of records in flight of a group."),
        _static("group.share.max.record.lock.duration.ms", _I, "The longest lock of a record that a group may set."),
        _static("group.share.max.session.timeout.ms", _I, "The longest session timeout of a share group."),
        _static("group.share.max.share.sessions", _I, "The most share sessions of a broker."),
        _static("group.share.max.size", _I, "The most members that one share group may have."),
        _static("group.share.min.assignment.interval.ms", _I, "The shortest assignment interval of a share group."),
        _static("group.share.min.delivery.count.limit", _I, "The lowest delivery count limit of a share group."),
        _static("group.share.min.heartbeat.interval.ms", _I, "The shortest heartbeat interval of a share group."),
        _static("group.share.min.partition.max.record.locks", _I, "The lowest limit of records in flight of a group."),
        _static("group.share.min.record.lock.duration.ms", _I, "The shortest lock of a record that a group may set."),
        _static("group.share.min.session.timeout.ms", _I, "The shortest session timeout of a share group."),
        _static("group.share.partition.max.record.locks", _I, "How many records of a partition are in flight at most."),
        _static("group.share.record.lock.duration.ms", _I, "How long a delivered record is locked for its consumer."),
        _static("group.share.session.timeout.ms", _I, "The session timeout of share groups."),
        _static("listen.http", _S, "The address of the node's page, API and metrics; empty if it has none."),
        _static("listeners", _S, "The address that the node listens on."),
        _static("log.dirs", _S, "The folder of the partitions' logs."),
        _static("max.connections", _I, "The most client connections at a time."),
        _static("max.connections.per.ip.overrides", _S, "Other limits of connections for single addresses."),
        _static("node.id", _I, "This node's id."),
        _static("num.partitions", _I, "The number of partitions of a topic that is created without one."),
        _static("offsets.retention.minutes", _I, "How long the offsets of an empty group are kept."),
        _static("offsets.topic.num.partitions", _I, "Partitions of the topic that holds committed offsets."),
        _static("producer.id.expiration.ms", _I, "How long an idle producer's sequence numbers are remembered."),
        _static("quota.window.num", _I, "How many samples a rate is measured over."),
        _static("quota.window.size.seconds", _I, "How long each of these samples is."),
        _static("share.coordinator.state.topic.num.partitions", _I, "Partitions of the share group state topic."),
        _static("socket.request.max.bytes", _I, "The largest request that is read."),
        _static("telemetry.max.bytes", _I, "The most bytes of metrics that a client may push at once."),
    )
)

BROKER_CONFIGS: Mapping[str, ConfigDefinition] = by_name(
    sorted((*DYNAMIC_BROKER_CONFIGS.values(), *STATIC_BROKER_CONFIGS.values()), key=lambda definition: definition.name)
)


def check_broker_configs(configs: Mapping[str, str | None], broker: str = CLUSTER_DEFAULT) -> None:
    """Raise INVALID_CONFIG for an unknown config or value, INVALID_REQUEST for one that is fixed at startup.

    A cluster-wide config set on one `broker` also raises INVALID_REQUEST. None unsets any name, even an unknown one.
    """
    for name, text in configs.items():
        if name in CLUSTER_WIDE_CONFIGS and broker != CLUSTER_DEFAULT and text is not None:
            raise KafkaError(
                ErrorCode.invalid_request, f"{name} cannot differ between brokers: set it for the topic or the cluster"
            )
        if name in STATIC_BROKER_CONFIGS:
            raise KafkaError(
                ErrorCode.invalid_request,
                f"Cannot update {name} while the broker runs: set it before the start",  # noqa: S608 - not SQL
            )
        if text is None:
            continue
        definition = DYNAMIC_BROKER_CONFIGS.get(name)
        if definition is None:
            raise KafkaError(ErrorCode.invalid_config, f"Unknown broker config name: {name}")
        definition.parse(text)
