"""Subscriptions to metrics of clients (KIP-714): configs of a CLIENT_METRICS resource, and which clients they match."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from chronik.metadata.config_definitions import ConfigDefinition, ConfigType, by_name, split_list
from chronik.metadata.image import ClusterImage
from chronik.wire.errors import ErrorCode, KafkaError

METRICS = "metrics"
INTERVAL_MS = "interval.ms"
MATCH = "match"
ALL_METRICS = "*"
INTERVAL_MS_DEFAULT = 300_000
INTERVAL_MS_MIN = 100
INTERVAL_MS_MAX = 3_600_000

SUBSCRIPTIONS_MAX = 1_000
NAME_CHARS_MAX = 249
CONFIG_CHARS_MAX = 10_000
"""Every telemetry request of a new client is compared with every subscription."""

ATTRIBUTES = (
    "client_instance_id",
    "client_id",
    "client_software_name",
    "client_software_version",
    "client_source_address",
    "client_source_port",
)
"""What a match may name."""

CLIENT_METRICS_CONFIGS: Mapping[str, ConfigDefinition] = by_name(
    (
        ConfigDefinition(
            INTERVAL_MS,
            ConfigType.INT,
            str(INTERVAL_MS_DEFAULT),
            "How often a matching client pushes its metrics, in milliseconds.",
        ),
        ConfigDefinition(
            MATCH,
            ConfigType.LIST,
            "",
            "The clients: ATTRIBUTE=EXPRESSION,..., which all must match; empty for all clients. The attributes are "
            f"{', '.join(ATTRIBUTES)}; an expression (RE2) matches the whole value.",
        ),
        ConfigDefinition(
            METRICS,
            ConfigType.LIST,
            "",
            "Prefixes of the names of metrics that clients push, or '*' for all metrics; empty for none.",
        ),
    )
)


class Subscription(NamedTuple):
    """A subscription with parsed configs."""

    metrics: tuple[str, ...]
    interval_ms: int
    patterns: tuple[tuple[str, Any], ...]
    """Attributes with compiled expressions."""

    def matches(self, attributes: Mapping[str, str]) -> bool:
        return all(pattern.fullmatch(attributes.get(name, "")) is not None for name, pattern in self.patterns)


def subscription(configs: Mapping[str, str]) -> Subscription:
    """Parse the configs of a subscription. KafkaError if one is invalid."""
    interval = CLIENT_METRICS_CONFIGS[INTERVAL_MS].parse(configs.get(INTERVAL_MS, str(INTERVAL_MS_DEFAULT)))
    if not isinstance(interval, int) or not INTERVAL_MS_MIN <= interval <= INTERVAL_MS_MAX:
        raise KafkaError(
            ErrorCode.invalid_request,
            f"Invalid value {interval} for {INTERVAL_MS}, interval must be between {INTERVAL_MS_MIN} and "
            f"{INTERVAL_MS_MAX} (1 hour)",
        )
    patterns = tuple(_pattern(text) for text in split_list(configs.get(MATCH, "")))
    return Subscription(split_list(configs.get(METRICS, "")), interval, patterns)


def _pattern(text: str) -> tuple[str, Any]:
    # Imported here because few clusters have a match, and the library takes 6 MB.
    import re2

    name, equals, expression = (part.strip() for part in text.partition("="))
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    try:
        if not equals or name not in ATTRIBUTES:
            raise ValueError(f"it must be ATTRIBUTE=EXPRESSION with one of {', '.join(ATTRIBUTES)}")
        return name, re2.compile(expression, options)
    except (ValueError, re2.error) as error:
        raise KafkaError(ErrorCode.invalid_config, f"Illegal client matching pattern: {text}: {error}") from None


def check_client_metrics_configs(image: ClusterImage, name: str, changes: Mapping[str, str | None]) -> None:
    """Raise unless the changes result in a valid subscription. None, which unsets, is always valid."""
    if not name or len(name) > NAME_CHARS_MAX or re.search(r"[\x00-\x1f\x7f]", name):
        raise KafkaError(
            ErrorCode.invalid_request, f"A subscription needs a name of 1 to {NAME_CHARS_MAX} printable characters"
        )
    configs = {**image.client_metrics.get(name, {}), **changes}
    values = {key: value for key, value in configs.items() if value is not None}
    for key, value in values.items():
        if key not in CLIENT_METRICS_CONFIGS:
            raise KafkaError(ErrorCode.invalid_request, f"Unknown client metrics configuration: {key}")
        if len(value) > CONFIG_CHARS_MAX:
            raise KafkaError(ErrorCode.invalid_config, f"{key} of {name} has more than {CONFIG_CHARS_MAX} characters")
    subscription(values)
    if values and name not in image.client_metrics and len(image.client_metrics) >= SUBSCRIPTIONS_MAX:
        raise KafkaError(
            ErrorCode.policy_violation,
            f"A cluster may have at most {SUBSCRIPTIONS_MAX} subscriptions to client metrics",
        )
