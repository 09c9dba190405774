"""Configs of groups, under Kafka's names. A broker setting is the default of most, and two others are their range."""

from __future__ import annotations

import re
from collections.abc import Mapping

from chronik.metadata.config_definitions import INT_MAX, ConfigDefinition, ConfigType, by_name
from chronik.wire.errors import ErrorCode, KafkaError

CONSUMER_ASSIGNOR_OFFLOAD_ENABLE = "consumer.assignor.offload.enable"
DEAD_LETTER_TOPIC = "errors.deadletterqueue.topic.name"
DEAD_LETTER_COPY_RECORD = "errors.deadletterqueue.copy.record.enable"
SHARE_ASSIGNOR_OFFLOAD_ENABLE = "share.assignor.offload.enable"
SHARE_AUTO_OFFSET_RESET = "share.auto.offset.reset"
SHARE_DELIVERY_COUNT_LIMIT = "share.delivery.count.limit"
SHARE_ISOLATION_LEVEL = "share.isolation.level"
SHARE_PARTITION_MAX_RECORD_LOCKS = "share.partition.max.record.locks"
SHARE_RECORD_LOCK_DURATION_MS = "share.record.lock.duration.ms"
SHARE_RENEW_ACKNOWLEDGE_ENABLE = "share.renew.acknowledge.enable"

BY_DURATION = "by_duration:"
_DURATION = re.compile(
    r"P(?!$)(?:(?P<days>\d{1,6})D)?"
    r"(?:T(?!$)(?:(?P<hours>\d{1,9})H)?(?:(?P<minutes>\d{1,9})M)?(?:(?P<seconds>\d{1,12}(?:\.\d{1,9})?)S)?)?",
    re.ASCII | re.IGNORECASE,
)


def _number(name: str, documentation: str, lowest: int = 1) -> ConfigDefinition:
    return ConfigDefinition(
        name, ConfigType.INT, None, documentation, lowest=lowest, highest=INT_MAX, synonym=f"group.{name}"
    )


def _offload(name: str) -> ConfigDefinition:
    documentation = "Accepted without effect: the coordinator always computes assignments on its own thread."
    return ConfigDefinition(name, ConfigType.BOOLEAN, "true", documentation)


GROUP_CONFIGS: Mapping[str, ConfigDefinition] = by_name(
    (
        _number(
            "consumer.assignment.interval.ms", "The shortest time between two assignments of the consumer group.", 0
        ),
        _offload(CONSUMER_ASSIGNOR_OFFLOAD_ENABLE),
        _number("consumer.heartbeat.interval.ms", "The time between two heartbeats of a member of the consumer group."),
        _number(
            "consumer.session.timeout.ms",
            "How long the consumer group waits for a heartbeat before it removes the member.",
        ),
        ConfigDefinition(
            DEAD_LETTER_COPY_RECORD,
            ConfigType.BOOLEAN,
            "false",
            "Whether the dead letters of the share group have the key, value and headers of the record.",
        ),
        ConfigDefinition(
            DEAD_LETTER_TOPIC,
            ConfigType.STRING,
            "",
            "The topic that gets a copy of each record that the share group gives up; empty for none (KIP-1191).",
        ),
        _number("share.assignment.interval.ms", "The shortest time between two assignments of the share group.", 0),
        _offload(SHARE_ASSIGNOR_OFFLOAD_ENABLE),
        ConfigDefinition(
            SHARE_AUTO_OFFSET_RESET,
            ConfigType.STRING,
            "latest",
            "Where the share group starts in a partition without a start offset: earliest, latest, or "
            "by_duration:DURATION, which is that long ago (ISO 8601, such as PT1H).",
        ),
        _number(SHARE_DELIVERY_COUNT_LIMIT, "How often a record is delivered to the share group at most.", 2),
        _number("share.heartbeat.interval.ms", "The time between two heartbeats of a member of the share group."),
        ConfigDefinition(
            SHARE_ISOLATION_LEVEL,
            ConfigType.STRING,
            "read_uncommitted",
            "Whether the share group reads records of transactions before they are committed.",
            choices=("read_committed", "read_uncommitted"),
        ),
        _number(SHARE_PARTITION_MAX_RECORD_LOCKS, "How many records of a partition are in flight at most.", 100),
        _number(SHARE_RECORD_LOCK_DURATION_MS, "How long a delivered record is locked for its consumer.", 1_000),
        ConfigDefinition(
            SHARE_RENEW_ACKNOWLEDGE_ENABLE,
            ConfigType.BOOLEAN,
            "true",
            "Whether a consumer of the share group may extend the lock of a record.",
        ),
        _number(
            "share.session.timeout.ms", "How long the share group waits for a heartbeat before it removes the member."
        ),
    )
)

RANGED_CONFIGS = tuple(name for name, definition in GROUP_CONFIGS.items() if definition.type is ConfigType.INT)
"""The configs whose default and range are settings of the broker."""


def duration_ms(policy: str) -> int | None:
    """Return how long ago a policy `by_duration:DURATION` starts; None for another policy. Raise INVALID_CONFIG."""
    if not policy.startswith(BY_DURATION):
        return None
    found = _DURATION.fullmatch(policy.removeprefix(BY_DURATION))
    if found is None:
        raise KafkaError(
            ErrorCode.invalid_config,
            f"Invalid value {policy!r} for configuration {SHARE_AUTO_OFFSET_RESET}: it must end with a duration in "
            "ISO 8601, such as PT1H",
        )
    parts = {unit: float(text) for unit, text in found.groupdict(default="0").items()}
    seconds = ((parts["days"] * 24 + parts["hours"]) * 60 + parts["minutes"]) * 60 + parts["seconds"]
    return int(seconds * 1000)


def check_group_configs(
    changes: Mapping[str, str | None], ranges: Mapping[str, tuple[int, int]], effective: Mapping[str, int]
) -> None:
    """Raise INVALID_CONFIG for an unknown config, a value out of its range, or a session that no heartbeat can keep.

    `effective` has the numbers before the change, and `ranges` their ranges.
    """
    values = dict(effective)
    for name, text in changes.items():
        definition = GROUP_CONFIGS.get(name)
        if definition is None:
            raise KafkaError(ErrorCode.invalid_config, f"Unknown group config name: {name}")
        if text is None:
            continue
        value = definition.parse(text)
        if name == SHARE_AUTO_OFFSET_RESET and text not in ("earliest", "latest") and duration_ms(text) is None:
            raise KafkaError(
                ErrorCode.invalid_config, f"{name} must be earliest, latest or {BY_DURATION}DURATION, not {text!r}"
            )
        if name in ranges:
            lowest, highest = ranges[name]
            values[name] = int(str(value))
            if not lowest <= values[name] <= highest:
                raise KafkaError(ErrorCode.invalid_config, f"{name} must be from {lowest} to {highest}")
    for kind in ("consumer", "share"):
        session, interval = f"{kind}.session.timeout.ms", f"{kind}.heartbeat.interval.ms"
        if values[session] <= values[interval]:
            raise KafkaError(ErrorCode.invalid_config, f"{session} must be greater than {interval}")
