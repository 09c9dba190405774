"""Configs as the admin APIs return them: each value with its source, synonyms, type and documentation.

Configs belong to a resource: a topic, a broker, or a broker's loggers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum

from chronik.metadata.broker_configs import BROKER_CONFIGS, CLUSTER_DEFAULT
from chronik.metadata.config_definitions import ConfigDefinition, ConfigSource, ConfigType
from chronik.metadata.image import ClusterImage, TopicImage
from chronik.metadata.topic_configs import TOPIC_CONFIGS
from chronik.node.config import NodeConfig
from chronik.node.serving.api import Values
from chronik.node.topic_settings import Sourced, as_text, broker_values, dynamic_values, topic_values
from chronik.observe.logging import DEBUG, ERROR, INFO, WARNING, LogLevels
from chronik.wire.errors import ErrorCode, KafkaError


class ResourceType(IntEnum):
    """Kafka's codes for the resource types of configs."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8


LOGGER_LEVELS: Mapping[str, int] = {"DEBUG": DEBUG, "INFO": INFO, "WARN": WARNING, "ERROR": ERROR}
ROOT_LOGGER = "root"
COMPONENTS = ("groups", "metadata", "node", "storage")


def topic_entries(topic: TopicImage, config: NodeConfig, image: ClusterImage) -> list[Values]:
    """Return all configs of a topic."""
    return [
        _entry(definition, topic_values(definition, topic, config, image), is_read_only=False)
        for definition in TOPIC_CONFIGS.values()
    ]


def created_topic_entries(topic: TopicImage, config: NodeConfig, image: ClusterImage) -> list[Values]:
    """Return all configs of a topic for CreateTopics: each with a source, which the Java client requires."""
    shown = ("name", "value", "read_only", "config_source", "is_sensitive")
    return [{key: entry[key] for key in shown} for entry in topic_entries(topic, config, image)]


def broker_entries(name: str, config: NodeConfig, image: ClusterImage) -> list[Values]:
    """Return all configs of this broker, or for the empty name the cluster-wide broker configs."""
    if name == CLUSTER_DEFAULT:
        return [
            _entry(
                BROKER_CONFIGS[key],
                [Sourced(key, text, ConfigSource.DYNAMIC_DEFAULT_BROKER)],
                is_read_only=False,
            )
            for key, text in image.broker_configs.get(CLUSTER_DEFAULT, {}).items()
            if key in BROKER_CONFIGS
        ]
    check_broker_name(name, config)
    static = _static_values(config, image)
    topic_configs = {definition.synonym: definition for definition in TOPIC_CONFIGS.values() if definition.synonym}
    entries: list[Values] = []
    for definition in BROKER_CONFIGS.values():
        if definition.name in static:
            values = [Sourced(definition.name, static[definition.name], ConfigSource.STATIC_BROKER)]
        elif definition.name in topic_configs:
            values = broker_values(topic_configs[definition.name], config, image)
        else:
            values = dynamic_values(definition.name, config.node_id, image)
            values.append(Sourced(definition.name, definition.default or "", ConfigSource.DEFAULT))
        entries.append(_entry(definition, values, is_read_only=not definition.is_dynamic))
    return entries


def logger_entries(levels: LogLevels) -> list[Values]:
    """Return the log level of each component, and under the name `root` the level of all other components."""
    names = {level: name for name, level in LOGGER_LEVELS.items()}
    found = {ROOT_LOGGER: levels.default, **{name: levels.level_of(name) for name in (*COMPONENTS, *levels.components)}}
    return [
        {
            "name": component,
            "value": names[level],
            "read_only": True,
            "config_source": ConfigSource.DYNAMIC_BROKER_LOGGER,
            "is_sensitive": False,
            "synonyms": [],
            "config_type": ConfigType.STRING,
            "documentation": f"The lowest level at which {component} writes lines: {', '.join(LOGGER_LEVELS)}.",
        }
        for component, level in sorted(found.items())
    ]


def chosen(
    entries: Iterable[Values], keys: Iterable[str] | None, *, synonyms: bool, documentation: bool
) -> list[Values]:
    """Return the requested entries (no keys: all), with synonyms and documentation only if requested."""
    wanted = frozenset(keys or ())
    return [
        {
            **entry,
            "synonyms": entry["synonyms"] if synonyms else [],
            "documentation": entry["documentation"] if documentation else None,
        }
        for entry in entries
        if not wanted or entry["name"] in wanted
    ]


def check_broker_name(name: str, config: NodeConfig) -> None:
    """Raise unless the name is this broker or the cluster-wide default: a node handles no other broker's configs."""
    if name not in {CLUSTER_DEFAULT, str(config.node_id)}:
        raise KafkaError(
            ErrorCode.invalid_request,
            f"Unexpected broker id, expected {config.node_id} or empty, but received {name!r}",
        )


def _static_values(config: NodeConfig, image: ClusterImage) -> dict[str, str]:
    """Return the node's startup settings under Kafka's names."""
    # If the node was configured to use any free port, only the registration has the real one.
    registered = image.brokers.get(config.node_id)
    values: dict[str, object] = {
        "advertised.listeners": f"PLAINTEXT://{config.advertised_kafka(registered.port if registered else None)}",
        "auto.create.topics.enable": config.auto_create_topics,
        "broker.id": config.node_id,
        "broker.rack": config.rack or "",
        "connections.max.idle.ms": config.connection_idle_ms_max,
        "default.replication.factor": config.default_replication_factor,
        "delete.topic.enable": True,
        "durability": config.durability,
        "group.initial.rebalance.delay.ms": config.group_initial_rebalance_delay_ms,
        "group.max.session.timeout.ms": config.group_max_session_timeout_ms,
        "group.max.size": config.group_max_size,
        "group.min.session.timeout.ms": config.group_min_session_timeout_ms,
        "listen.http": registered.http if registered else "",
        "listeners": f"PLAINTEXT://{config.kafka_endpoint}",
        "log.dirs": config.data_folder,
        "max.connections": config.connections_max,
        "node.id": config.node_id,
        "num.partitions": config.num_partitions,
        "offsets.retention.minutes": config.offsets_retention_minutes,
        "offsets.topic.num.partitions": config.offsets_topic_partitions,
        "producer.id.expiration.ms": config.producer_id_expiration_ms,
        "socket.request.max.bytes": config.frame_bytes_max,
    }
    return {name: as_text(value) for name, value in values.items()}


def _entry(definition: ConfigDefinition, values: list[Sourced], *, is_read_only: bool) -> Values:
    effective = values[0]
    return {
        "name": definition.name,
        "value": effective.value,
        "read_only": is_read_only,
        "config_source": effective.source,
        "is_sensitive": False,
        "synonyms": [{"name": name, "value": value, "source": source} for name, value, source in values],
        "config_type": definition.type,
        "documentation": definition.documentation,
    }
