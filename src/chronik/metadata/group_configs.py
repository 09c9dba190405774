"""Configs of groups, under Kafka's names. A broker setting is the default of each, and two others are its range."""

from __future__ import annotations

from collections.abc import Mapping

from chronik.metadata.config_definitions import INT_MAX, ConfigDefinition, ConfigType, by_name
from chronik.wire.errors import ErrorCode, KafkaError

GROUP_CONFIGS: Mapping[str, ConfigDefinition] = by_name(
    (
        ConfigDefinition(
            "consumer.heartbeat.interval.ms",
            ConfigType.INT,
            None,
            "The time between two heartbeats of a member of the consumer group.",
            lowest=1,
            highest=INT_MAX,
            synonym="group.consumer.heartbeat.interval.ms",
        ),
        ConfigDefinition(
            "consumer.session.timeout.ms",
            ConfigType.INT,
            None,
            "How long the consumer group waits for a heartbeat before it removes the member.",
            lowest=1,
            highest=INT_MAX,
            synonym="group.consumer.session.timeout.ms",
        ),
    )
)


def check_group_configs(
    changes: Mapping[str, str | None], ranges: Mapping[str, tuple[int, int]], effective: Mapping[str, int]
) -> None:
    """Raise INVALID_CONFIG for an unknown config, a value out of its range, or a session that no heartbeat can keep.

    `effective` has the values before the change.
    """
    values = dict(effective)
    for name, text in changes.items():
        definition = GROUP_CONFIGS.get(name)
        if definition is None:
            raise KafkaError(ErrorCode.invalid_config, f"Unknown group config name: {name}")
        if text is None:
            continue
        lowest, highest = ranges[name]
        value = int(str(definition.parse(text)))
        if not lowest <= value <= highest:
            raise KafkaError(ErrorCode.invalid_config, f"{name} must be from {lowest} to {highest}")
        values[name] = value
    if values["consumer.session.timeout.ms"] <= values["consumer.heartbeat.interval.ms"]:
        raise KafkaError(
            ErrorCode.invalid_config, "consumer.session.timeout.ms must be greater than consumer.heartbeat.interval.ms"
        )
