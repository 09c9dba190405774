"""A topic's settings as parsed values: its own configs over the node's defaults.

A topic config takes its value from the first of these that sets it: the topic itself, the broker's dynamic config of
the synonym (`log.retention.ms` for `retention.ms`), the cluster's dynamic default of the synonym, the node's
`[topic_defaults]`, Kafka's default. Only min.insync.replicas is the same on all nodes (see `metadata.elections`): it
is the topic's own, the cluster's, or depends on the number of replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from chronik.metadata.broker_configs import CLUSTER_DEFAULT
from chronik.metadata.config_definitions import ConfigDefinition, ConfigSource
from chronik.metadata.elections import MIN_INSYNC_REPLICAS, REPLICATION_FACTOR_SAFE, min_insync_replicas
from chronik.metadata.image import ClusterImage, TopicImage, is_traceable
from chronik.metadata.topic_configs import (
    ALL_REPLICAS,
    FOLLOWER_THROTTLED_REPLICAS,
    KEY_STRATEGY,
    KEY_VALIDATION,
    LEADER_THROTTLED_REPLICAS,
    TOPIC_CONFIGS,
    VALUE_STRATEGY,
    VALUE_VALIDATION,
    check_topic_configs,
)
from chronik.node.config import NodeConfig
from chronik.schemas.validation import SchemaCheck
from chronik.storage.config import LogConfig
from chronik.wire.errors import KafkaError

CODECS: Mapping[str, int | None] = {
    "producer": None,
    "uncompressed": 0,
    "gzip": 1,
    "snappy": 2,
    "lz4": 3,
    "zstd": 4,
}

TRACE = "chronik.trace"

T = TypeVar("T", bound=object)


class Sourced(NamedTuple):
    """One value of a config, under the name by which it was set."""

    name: str
    value: str
    source: ConfigSource


@dataclass(frozen=True, slots=True)
class TopicDefaults:
    """The node's defaults for topics; `configs` is keyed by the topic config's name."""

    configs: Mapping[str, str]
    producer_expiration_ms: int


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """The parsed configs of a topic, read once per change."""

    log_config: LogConfig
    max_message_bytes: int
    min_insync_replicas: int
    timestamp_before_max_ms: int
    timestamp_after_max_ms: int
    broker_codec: int | None
    """The codec of stored batches; None keeps the producer's."""
    visible_when_appended: bool
    is_traced: bool
    leader_throttled: frozenset[str] = frozenset()
    """The leaders whose replication is throttled, as PARTITION:BROKER, or ALL_REPLICAS."""
    follower_throttled: frozenset[str] = frozenset()
    """The followers whose replication is throttled."""
    schema_checks: tuple[SchemaCheck, ...] = ()
    """What is checked in each record's key and value."""


def is_throttled(throttled: frozenset[str], partition: int, node_id: int) -> bool:
    """Whether the replica of a partition on a node is one of the throttled ones."""
    return bool(throttled) and (ALL_REPLICAS in throttled or f"{partition}:{node_id}" in throttled)


def topic_defaults(config: NodeConfig, image: ClusterImage) -> TopicDefaults:
    """Return the node's defaults for topics, from its configuration file and the dynamic broker configs."""
    effective = {name: broker_values(definition, config, image)[0] for name, definition in TOPIC_CONFIGS.items()}
    configs = {name: value for name, (_, value, source) in effective.items() if source is not ConfigSource.DEFAULT}
    return TopicDefaults(configs, config.producer_id_expiration_ms)


def check_topic_defaults(config: NodeConfig) -> None:
    """Raise INVALID_CONFIG if an entry of `[topic_defaults]` is invalid. Called when the node starts."""
    check_topic_configs({name: as_text(value) for name, value in config.topic_defaults.items()})


def topic_settings(topic: TopicImage, defaults: TopicDefaults) -> TopicSettings:
    def value(name: str, kind: type[T]) -> T:
        definition = TOPIC_CONFIGS[name]
        default = _default_of(definition, topic)
        try:
            parsed = definition.parse(topic.configs.get(name, defaults.configs.get(name, default)))
        except KafkaError:
            # Another version accepted this value; the topic must open anyway.
            parsed = definition.parse(default)
        if not isinstance(parsed, kind):
            raise TypeError(f"{name} is not of type {kind.__name__}")
        return parsed

    policies = value("cleanup.policy", tuple)
    max_message_bytes = value("max.message.bytes", int)
    return TopicSettings(
        log_config=LogConfig(
            segment_bytes=value("segment.bytes", int),
            segment_ms=value("segment.ms", int),
            retention_ms=value("retention.ms", int),
            retention_bytes=value("retention.bytes", int),
            max_batch_bytes=max_message_bytes,
            index_interval_bytes=value("index.interval.bytes", int),
            cleanup_delete="delete" in policies,
            cleanup_compact="compact" in policies,
            delete_retention_ms=value("delete.retention.ms", int),
            min_compaction_lag_ms=value("min.compaction.lag.ms", int),
            min_cleanable_ratio=value("min.cleanable.dirty.ratio", float),
            log_append_time=value("message.timestamp.type", str) == "LogAppendTime",
            producer_expiration_ms=defaults.producer_expiration_ms,
        ),
        max_message_bytes=max_message_bytes,
        min_insync_replicas=value(MIN_INSYNC_REPLICAS, int),
        timestamp_before_max_ms=value("message.timestamp.before.max.ms", int),
        timestamp_after_max_ms=value("message.timestamp.after.max.ms", int),
        broker_codec=CODECS[value("compression.type", str)],
        visible_when_appended=value("visibility", str) == "appended" and not topic.is_internal,
        is_traced=value(TRACE, bool),
        leader_throttled=frozenset(value(LEADER_THROTTLED_REPLICAS, tuple)),
        follower_throttled=frozenset(value(FOLLOWER_THROTTLED_REPLICAS, tuple)),
        schema_checks=tuple(
            SchemaCheck(side, value(strategy, str))
            for side, validation, strategy in (
                ("key", KEY_VALIDATION, KEY_STRATEGY),
                ("value", VALUE_VALIDATION, VALUE_STRATEGY),
            )
            if value(validation, bool) and not topic.is_internal
        ),
    )


def partition_settings(settings: TopicSettings, image: ClusterImage, topic: TopicImage, index: int) -> TopicSettings:
    """Return the settings of one partition: its topic's, but with min.insync.replicas as the controller computes it.

    A partition that gains replicas needs no more in-sync replicas until the new ones have caught up.
    """
    partition = topic.partition(index)
    if partition is None:
        return settings
    return replace(settings, min_insync_replicas=min_insync_replicas(image, topic, partition))


def traced_topics(image: ClusterImage, defaults: TopicDefaults) -> frozenset[str]:
    """Return the topics whose `chronik.trace` is true, including topics without a replica on this node."""
    return frozenset(topic.name for topic in image.topics.values() if is_traced(topic, defaults))


def is_traced(topic: TopicImage, defaults: TopicDefaults) -> bool:
    by_default = defaults.configs.get(TRACE, TOPIC_CONFIGS[TRACE].default)
    return (topic.configs.get(TRACE, by_default) or "").strip().lower() == "true" and is_traceable(topic.name)


def topic_values(
    definition: ConfigDefinition, topic: TopicImage, config: NodeConfig, image: ClusterImage
) -> list[Sourced]:
    """Return all values of a topic config, the effective one first; never empty."""
    *values, default = broker_values(definition, config, image)
    if definition.name in topic.configs:
        values.insert(0, Sourced(definition.name, topic.configs[definition.name], ConfigSource.DYNAMIC_TOPIC))
    return [*values, default._replace(value=_default_of(definition, topic))]


def broker_values(definition: ConfigDefinition, config: NodeConfig, image: ClusterImage) -> list[Sourced]:
    """Return the broker's values for a topic config, highest precedence first; never empty."""
    name = definition.synonym or definition.name
    default = Sourced(name, definition.default or "", ConfigSource.DEFAULT)
    if definition.name == MIN_INSYNC_REPLICAS:
        values = dynamic_values(MIN_INSYNC_REPLICAS, config.node_id, image)
        cluster = [sourced for sourced in values if sourced.source is ConfigSource.DYNAMIC_DEFAULT_BROKER]
        return [*cluster, default]
    values = [] if definition.synonym is None else dynamic_values(definition.synonym, config.node_id, image)
    if definition.name in config.topic_defaults:
        text = as_text(config.topic_defaults[definition.name])
        values.append(Sourced(name, text, ConfigSource.STATIC_BROKER))
    return [*values, default]


def dynamic_values(name: str, node_id: int, image: ClusterImage) -> list[Sourced]:
    """Return the dynamic values of a broker config: this broker's, then the cluster default."""
    return [
        Sourced(name, image.broker_configs[broker][name], source)
        for broker, source in (
            (str(node_id), ConfigSource.DYNAMIC_BROKER),
            (CLUSTER_DEFAULT, ConfigSource.DYNAMIC_DEFAULT_BROKER),
        )
        if name in image.broker_configs.get(broker, {})
    ]


def as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _default_of(definition: ConfigDefinition, topic: TopicImage) -> str:
    if definition.name == MIN_INSYNC_REPLICAS:
        replicas = max((len(partition.replicas) for partition in topic.partitions), default=1)
        return "2" if replicas >= REPLICATION_FACTOR_SAFE else "1"
    return definition.default or ""
