"""Topic configs: Kafka 4's and Chronik's own."""

from __future__ import annotations

from collections.abc import Mapping

from chronik.metadata.config_definitions import (
    INT_MAX,
    LONG_MAX,
    ConfigDefinition,
    ConfigType,
    ConfigValue,
    by_name,
)
from chronik.wire.errors import ErrorCode, KafkaError

_DAY_MS = 24 * 60 * 60 * 1000

BATCH_OVERHEAD_BYTES = 12
MAX_MESSAGE_BYTES_DEFAULT = 1024 * 1024 + BATCH_OVERHEAD_BYTES
COMPRESSION_TYPES = ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")
TIMESTAMP_TYPES = ("CreateTime", "LogAppendTime")
VISIBILITIES = ("committed", "appended")


def _whole(
    name: str,
    config_type: ConfigType,
    default: int,
    documentation: str,
    lowest: int,
    synonym: str | None,
    highest: int | None = None,
) -> ConfigDefinition:
    if highest is None:
        highest = LONG_MAX if config_type is ConfigType.LONG else INT_MAX
    return ConfigDefinition(name, config_type, str(default), documentation, lowest, highest, (), synonym)


def _flag(name: str, default: bool, documentation: str, synonym: str | None) -> ConfigDefinition:
    return ConfigDefinition(name, ConfigType.BOOLEAN, str(default).lower(), documentation, synonym=synonym)


_INT = ConfigType.INT
_LONG = ConfigType.LONG

TOPIC_CONFIGS: Mapping[str, ConfigDefinition] = by_name(
    (
        _flag(
            "chronik.trace",
            False,
            "Whether the node records a trace of each fetch, produce and watermark step of this topic.",
            None,
        ),
        ConfigDefinition(
            "cleanup.policy",
            ConfigType.LIST,
            "delete",
            "What happens to old records: 'delete' drops segments by age and size, 'compact' keeps the latest record "
            "of each key. Both may be named.",
            choices=("compact", "delete"),
            synonym="log.cleanup.policy",
        ),
        ConfigDefinition(
            "compression.type",
            ConfigType.STRING,
            "producer",
            "How batches are stored: 'producer' keeps them byte for byte as they were sent, any other value has the "
            "broker compress them anew.",
            choices=COMPRESSION_TYPES,
            synonym="compression.type",
        ),
        _whole(
            "delete.retention.ms",
            _LONG,
            _DAY_MS,
            "How long a tombstone stays in a compacted topic after it was compacted.",
            0,
            "log.cleaner.delete.retention.ms",
        ),
        _whole(
            "file.delete.delay.ms",
            _LONG,
            60_000,
            "How long a dropped segment's files may stay on disk.",
            0,
            "log.segment.delete.delay.ms",
        ),
        _whole(
            "flush.messages",
            _LONG,
            LONG_MAX,
            "Kafka's sync interval in records. When records are synced is the node's durability setting instead.",
            1,
            "log.flush.interval.messages",
        ),
        _whole(
            "flush.ms",
            _LONG,
            LONG_MAX,
            "Kafka's sync interval in time. When records are synced is the node's durability setting instead.",
            0,
            "log.flush.interval.ms",
        ),
        _whole(
            "index.interval.bytes",
            _INT,
            4096,
            "How many bytes of log one entry of the offset index stands for, at least.",
            0,
            "log.index.interval.bytes",
        ),
        _whole(
            "max.compaction.lag.ms",
            _LONG,
            LONG_MAX,
            "The longest time a record may wait for compaction.",
            1,
            "log.cleaner.max.compaction.lag.ms",
        ),
        _whole(
            "max.message.bytes",
            _INT,
            MAX_MESSAGE_BYTES_DEFAULT,
            "The largest record batch that is accepted, as sent (after compression).",
            0,
            "message.max.bytes",
        ),
        _whole(
            "message.timestamp.after.max.ms",
            _LONG,
            _DAY_MS // 24,
            "How far a record's timestamp may lie ahead of the broker's clock. Not used with LogAppendTime.",
            0,
            "log.message.timestamp.after.max.ms",
        ),
        _whole(
            "message.timestamp.before.max.ms",
            _LONG,
            LONG_MAX,
            "How far a record's timestamp may lie behind the broker's clock. Not used with LogAppendTime.",
            0,
            "log.message.timestamp.before.max.ms",
        ),
        ConfigDefinition(
            "message.timestamp.type",
            ConfigType.STRING,
            "CreateTime",
            "Whether a record keeps the producer's time or gets the broker's at the append.",
            choices=TIMESTAMP_TYPES,
            synonym="log.message.timestamp.type",
        ),
        ConfigDefinition(
            "min.cleanable.dirty.ratio",
            ConfigType.DOUBLE,
            "0.5",
            "The share of a compacted log that must be uncompacted before it is compacted again.",
            0,
            1,
            synonym="log.cleaner.min.cleanable.ratio",
        ),
        _whole(
            "min.compaction.lag.ms",
            _LONG,
            0,
            "How long a record stays uncompacted at least.",
            0,
            "log.cleaner.min.compaction.lag.ms",
        ),
        _whole(
            "min.insync.replicas",
            _INT,
            1,
            "How many replicas must have a record before acks=all is answered. Unless set: 2 where a topic has three "
            "or more replicas, otherwise 1.",
            1,
            "min.insync.replicas",
        ),
        _flag("preallocate", False, "Whether a new segment's whole size is reserved on disk.", "log.preallocate"),
        _whole(
            "retention.bytes",
            _LONG,
            -1,
            "How large a partition's log may grow before its oldest segments are dropped; -1 is without limit.",
            -1,
            "log.retention.bytes",
        ),
        _whole(
            "retention.ms",
            _LONG,
            7 * _DAY_MS,
            "How long records are kept before their segment is dropped; -1 is for ever.",
            -1,
            "log.retention.ms",
        ),
        _whole(
            "segment.bytes",
            _INT,
            1 << 30,
            "The size at which a segment is closed and the next one begins.",
            1024,
            "log.segment.bytes",
        ),
        _whole(
            "segment.index.bytes",
            _INT,
            10 * 1024 * 1024,
            "The largest size of a segment's index.",
            4,
            "log.index.size.max.bytes",
        ),
        _whole(
            "segment.jitter.ms",
            _LONG,
            0,
            "The longest random time by which segments of different partitions are closed earlier.",
            0,
            "log.roll.jitter.ms",
        ),
        _whole("segment.ms", _LONG, 7 * _DAY_MS, "The age at which a segment is closed.", 1, "log.roll.ms"),
        _flag(
            "unclean.leader.election.enable",
            False,
            "Whether a replica that lacks acknowledged records may lead when no other is left.",
            "unclean.leader.election.enable",
        ),
        ConfigDefinition(
            "visibility",
            ConfigType.STRING,
            "committed",
            "What consumers see: 'committed' ends at the high watermark; 'appended' ends at the leader's log end, and "
            "gives up that end offsets never go back.",
            choices=VISIBILITIES,
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
