"""Topic configs: Kafka 4's and Chronik's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chronik.metadata.config_definitions import (
    INT_MAX,
    LONG_MAX,
    ConfigDefinition,
    ConfigType,
    ConfigValue,
    by_name,
)
from chronik.schemas.validation import STRATEGIES, TOPIC_NAME
from chronik.wire.errors import ErrorCode, KafkaError

_DAY_MS = 24 * 60 * 60 * 1000

BATCH_OVERHEAD_BYTES = 12
MAX_MESSAGE_BYTES_DEFAULT = 1024 * 1024 + BATCH_OVERHEAD_BYTES
COMPRESSION_TYPES = ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")
TIMESTAMP_TYPES = ("CreateTime", "LogAppendTime")
VISIBILITIES = ("committed", "appended")
KEY_VALIDATION, VALUE_VALIDATION = "confluent.key.schema.validation", "confluent.value.schema.validation"
KEY_STRATEGY, VALUE_STRATEGY = "confluent.key.subject.name.strategy", "confluent.value.subject.name.strategy"
LEADER_THROTTLED_REPLICAS = "leader.replication.throttled.replicas"
FOLLOWER_THROTTLED_REPLICAS = "follower.replication.throttled.replicas"
ALL_REPLICAS = "*"


_SYNONYMS: Mapping[str, str | None] = {
    "chronik.trace": None,
    "compression.type": "compression.type",
    KEY_VALIDATION: None,
    VALUE_VALIDATION: None,
    KEY_STRATEGY: None,
    VALUE_STRATEGY: None,
    "delete.retention.ms": "log.cleaner.delete.retention.ms",
    "file.delete.delay.ms": "log.segment.delete.delay.ms",
    "flush.messages": "log.flush.interval.messages",
    "flush.ms": "log.flush.interval.ms",
    "follower.replication.throttled.replicas": None,
    "leader.replication.throttled.replicas": None,
    "max.compaction.lag.ms": "log.cleaner.max.compaction.lag.ms",
    "max.message.bytes": "message.max.bytes",
    "min.cleanable.dirty.ratio": "log.cleaner.min.cleanable.ratio",
    "min.compaction.lag.ms": "log.cleaner.min.compaction.lag.ms",
    "min.insync.replicas": "min.insync.replicas",
    "segment.index.bytes": "log.index.size.max.bytes",
    "segment.jitter.ms": "log.roll.jitter.ms",
    "segment.ms": "log.roll.ms",
    "unclean.leader.election.enable": "unclean.leader.election.enable",
    "errors.deadletterqueue.group.enable": None,
    "visibility": None,
}
"""The broker config that provides the default, if it is not the topic config's name after the prefix `log.`."""


def _define(name: str, config_type: ConfigType, default: str, documentation: str, **limits: Any) -> ConfigDefinition:
    synonym = _SYNONYMS.get(name, f"log.{name}")
    return ConfigDefinition(name, config_type, default, documentation, synonym=synonym, **limits)


def _int(name: str, default: int, documentation: str, lowest: int = 0) -> ConfigDefinition:
    return _define(name, ConfigType.INT, str(default), documentation, lowest=lowest, highest=INT_MAX)


def _long(name: str, default: int, documentation: str, lowest: int = 0) -> ConfigDefinition:
    return _define(name, ConfigType.LONG, str(default), documentation, lowest=lowest, highest=LONG_MAX)


def _choice(name: str, default: str, documentation: str, choices: tuple[str, ...]) -> ConfigDefinition:
    return _define(name, ConfigType.STRING, default, documentation, choices=choices)


def _throttled(name: str, documentation: str) -> ConfigDefinition:
    return _define(name, ConfigType.LIST, "", documentation, items=r"\*|\d+:\d+")


def _off(name: str, documentation: str) -> ConfigDefinition:
    return _define(name, ConfigType.BOOLEAN, "false", documentation)


DEAD_LETTERS_ENABLE = "errors.deadletterqueue.group.enable"

TOPIC_CONFIGS: Mapping[str, ConfigDefinition] = by_name(
    (
        _off(DEAD_LETTERS_ENABLE, "Whether share groups may use this topic for their dead letters (KIP-1191)."),
        _off("chronik.trace", "Whether nodes trace each fetch, produce and watermark step of this topic."),
        _define(
            "cleanup.policy",
            ConfigType.LIST,
            "delete",
            "What happens to old records: 'delete' drops segments by age and size, 'compact' keeps the latest record "
            "of each key. Both may be named; if neither is, nothing is removed.",
            choices=("compact", "delete"),
        ),
        _choice(
            "compression.type",
            "producer",
            "How batches are stored: 'producer' keeps them byte for byte as they were sent, with any other value "
            "the broker compresses them again.",
            COMPRESSION_TYPES,
        ),
        _off(
            KEY_VALIDATION,
            "Whether a record is refused if its key does not begin with the id of a schema that its subject has.",
        ),
        _choice(KEY_STRATEGY, TOPIC_NAME, "How the subject of a key's schema is named.", STRATEGIES),
        _off(
            VALUE_VALIDATION,
            "Whether a record is refused if its value does not begin with the id of a schema that its subject has.",
        ),
        _choice(VALUE_STRATEGY, TOPIC_NAME, "How the subject of a value's schema is named.", STRATEGIES),
        _long(
            "delete.retention.ms", _DAY_MS, "How long a tombstone stays in a compacted topic after it was compacted."
        ),
        _long(
            "file.delete.delay.ms",
            60_000,
            "Kafka's delay before a dropped segment's files are deleted. Not used: they are deleted at once.",
        ),
        _long(
            "flush.messages",
            LONG_MAX,
            "Kafka's sync interval in records. Not used: the node's durability setting decides when to sync.",
            lowest=1,
        ),
        _long(
            "flush.ms",
            LONG_MAX,
            "Kafka's sync interval in time. Not used: the node's durability setting decides when to sync.",
        ),
        _throttled(
            FOLLOWER_THROTTLED_REPLICAS,
            "The replicas whose fetches follower.replication.throttled.rate limits while they are not in sync: "
            "'PARTITION:BROKER,...', or '*' for all.",
        ),
        _int("index.interval.bytes", 4096, "The least number of log bytes between two entries of the offset index."),
        _throttled(
            LEADER_THROTTLED_REPLICAS,
            "The leaders whose responses to replicas that are not in sync leader.replication.throttled.rate limits: "
            "'PARTITION:BROKER,...', or '*' for all.",
        ),
        _long("max.compaction.lag.ms", LONG_MAX, "Kafka's longest wait for compaction. Not used.", lowest=1),
        _int(
            "max.message.bytes",
            MAX_MESSAGE_BYTES_DEFAULT,
            "The largest record batch that is accepted, as sent (after compression).",
        ),
        _long(
            "message.timestamp.after.max.ms",
            _DAY_MS // 24,
            "How far a record's timestamp may be ahead of the broker's clock. Not used with LogAppendTime.",
        ),
        _long(
            "message.timestamp.before.max.ms",
            LONG_MAX,
            "How far a record's timestamp may be behind the broker's clock. Not used with LogAppendTime.",
        ),
        _choice(
            "message.timestamp.type",
            "CreateTime",
            "Whether a record keeps the producer's time or gets the broker's at the append.",
            TIMESTAMP_TYPES,
        ),
        _define(
            "min.cleanable.dirty.ratio",
            ConfigType.DOUBLE,
            "0.5",
            "The share of a compacted log that must be uncompacted before it is compacted again.",
            lowest=0,
            highest=1,
        ),
        _long("min.compaction.lag.ms", 0, "The least time that a record stays uncompacted."),
        _int(
            "min.insync.replicas",
            1,
            "How many replicas must be in sync for acks=all to succeed. Unless set: 2 if a topic has three or "
            "more replicas, otherwise 1.",
            lowest=1,
        ),
        _off("preallocate", "Kafka's switch for segment preallocation. Not used: segments are preallocated in steps."),
        _long(
            "retention.bytes",
            -1,
            "How large a partition's log may grow before its oldest segments are dropped; -1 is without limit.",
            lowest=-1,
        ),
        _long(
            "retention.ms",
            7 * _DAY_MS,
            "How long records are kept before their segment is dropped; -1 is without limit.",
            lowest=-1,
        ),
        _int("segment.bytes", 1 << 30, "The size at which a segment is closed and the next one begins.", lowest=1024),
        _int("segment.index.bytes", 10 * 1024 * 1024, "Kafka's size limit of a segment's index. Not used.", lowest=4),
        _long(
            "segment.jitter.ms",
            0,
            "Kafka's maximum random jitter that is subtracted from segment.ms. Not used.",
        ),
        _long("segment.ms", 7 * _DAY_MS, "The age at which a segment is closed.", lowest=1),
        _off(
            "unclean.leader.election.enable",
            "Whether a replica that lacks acknowledged records may lead if no other replica is left.",
        ),
        _choice(
            "visibility",
            "committed",
            "What consumers see: 'committed' ends at the high watermark; 'appended' ends at the leader's log end, and "
            "allows end offsets to go back.",
            VISIBILITIES,
        ),
    )
)


_INTERNAL_TOPIC_VALUES: Mapping[str, ConfigValue] = {"cleanup.policy": ("compact",), "visibility": "committed"}
"""With other values, internal topics would lose their data."""


def check_topic_configs(configs: Mapping[str, str | None], is_internal: bool = False) -> None:
    """Raise INVALID_CONFIG for the first config that a topic cannot have. None, which unsets, is always valid.

    It is valid for unknown names too, as in Kafka: kafka-reassign-partitions removes throttles that were never set.
    """
    for name, text in configs.items():
        if text is None:
            continue
        definition = TOPIC_CONFIGS.get(name)
        if definition is None:
            raise KafkaError(ErrorCode.invalid_config, f"Unknown topic config name: {name}")
        value = definition.parse(text)
        if is_internal and name in _INTERNAL_TOPIC_VALUES and value != _INTERNAL_TOPIC_VALUES[name]:
            raise KafkaError(ErrorCode.invalid_config, f"{name} of an internal topic cannot be {text!r}")
