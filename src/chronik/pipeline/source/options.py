"""The source's options, with the names and meanings of Spark's own Kafka source.

    kafka.bootstrap.servers             HOST:PORT[,...]
    subscribe | subscribePattern | assign    topics by name; by a pattern; {"TOPIC": [PARTITION, ...]}
    startingOffsets, endingOffsets      earliest, latest, or {"TOPIC": {"PARTITION": OFFSET}} (-2 earliest, -1 latest)
    startingTimestamp, endingTimestamp  milliseconds: the first record at or after that time
    startingOffsetsByTimestamp, endingOffsetsByTimestamp    {"TOPIC": {"PARTITION": MILLISECONDS}}
    startingOffsetsByTimestampStrategy  error or latest, if no record is that recent
    minOffsetsPerTrigger, maxTriggerDelay    wait for this many offsets, but no longer than this (15m)
    maxOffsetsPerTrigger, minPartitions, maxRecordsPerPartition, failOnDataLoss, includeHeaders
    kafkaConsumer.pollTimeoutMs         how long a task waits for a record (60000)
    fetchOffset.numRetries, fetchOffset.retryIntervalMs, groupIdPrefix    accepted: our client retries for 30 s anyway
    kafka.group.id                      the group to which finished micro-batches are committed
    kafka.isolation.level               read_uncommitted or read_committed

    kafka.security.protocol, kafka.sasl.*, kafka.ssl.*    the client's security, as in Spark's source
    kafka.properties.file               a file with client settings, so that secrets stay out of Spark

A timestamp takes precedence over offsets, as in Spark's source. All other `kafka.` options, such as
`kafka.fetch.max.bytes`, are accepted and ignored.

Spark shows options in its UI, its plans and its event log, and hides only those with a suspicious name. So passwords
belong in the file: Spark passes on its path, and each process that connects reads it. A password in an option is
accepted, as Spark's source does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chronik.client.properties import (
    ClientSettings,
    PropertiesError,
    Target,
    java_properties,
    load_settings,
    settings_of,
)
from chronik.client.security import PLAINTEXT_SECURITY, SecuritySettingError
from chronik.client.topics import EARLIEST, LATEST
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.ranges import Partition

NAMES = {
    name.lower(): name
    for name in (
        *("subscribe", "subscribePattern", "assign", "startingOffsets", "endingOffsets"),
        *("startingTimestamp", "endingTimestamp", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp"),
        *("startingOffsetsByTimestampStrategy", "maxOffsetsPerTrigger", "minPartitions", "maxRecordsPerPartition"),
        *("minOffsetsPerTrigger", "maxTriggerDelay", "kafkaConsumer.pollTimeoutMs"),
        *("fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
        *("failOnDataLoss", "includeHeaders", "groupIdPrefix"),
    )
}
RANGES_ONLY = "rangesOnly"
"""For our own jobs, so no error for users lists it."""
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
TRIGGER_DELAY_S = 900.0
SECURITY = ("kafka.sasl.", "kafka.ssl.", "kafka.security.protocol", "kafka.enable.ssl.certificate.verification")
PROPERTIES_FILE = "kafka.properties.file"


@dataclass(frozen=True, slots=True)
class Edge:
    """Where reading starts or ends: at one position or time for all partitions, or at an offset or time for each."""

    everywhere: int | None = None
    offsets: Mapping[Partition, int] | None = None
    time_ms: int | None = None
    times_ms: Mapping[Partition, int] | None = None
    latest_if_none: bool = True
    """Whether a time after the last record means the end of the log. Otherwise it is an error."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    bootstrap: Target
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: frozenset[Partition] | None = None
    starting: Edge = Edge(EARLIEST)
    ending: Edge = Edge(LATEST)
    rows_per_trigger_max: int | None = None
    rows_per_trigger_min: int = 0
    trigger_delay_s_max: float = TRIGGER_DELAY_S
    """How long a micro-batch waits for `rows_per_trigger_min` offsets."""
    stalled_s_max: float | None = None
    parts_min: int = 0
    rows_per_part_max: int = 0
    fail_on_data_loss: bool = True
    with_headers: bool = False
    group: str = ""
    committed_only: bool = False
    ranges_only: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str], *, streaming: bool) -> SourceOptions:
        """Raises a PipelineError that names the option."""
        options = checked({name: value for name, value in given.items() if name.lower() != RANGES_ONLY.lower()}, NAMES)
        internal = {name.lower(): value for name, value in given.items()}
        bootstrap = bootstrap_of(options)
        most, least = number(options, "maxOffsetsPerTrigger", 1), number(options, "minOffsetsPerTrigger", 1) or 0
        if most is not None and least > most:
            raise PipelineError(f"option minOffsetsPerTrigger is {least}, more than maxOffsetsPerTrigger ({most})")
        number(options, "fetchOffset.numRetries", 0)
        number(options, "fetchOffset.retryIntervalMs", 0)
        poll_ms = number(options, "kafkaConsumer.pollTimeoutMs", 1)
        topics, pattern, assigned = _what_to_read(options)
        level = one_of(options, "kafka.isolation.level", ("read_uncommitted", "read_committed"), "read_uncommitted")
        for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
            if streaming and name.lower() in options:
                raise PipelineError(f"option {name} is for batch reads: a stream has no end")
        return cls(
            bootstrap=bootstrap,
            topics=topics,
            pattern=pattern,
            assigned=assigned,
            starting=_starting(options, streaming),
            ending=_ending(options),
            rows_per_trigger_max=most,
            rows_per_trigger_min=least,
            trigger_delay_s_max=_duration_s(options, "maxTriggerDelay", TRIGGER_DELAY_S),
            stalled_s_max=None if poll_ms is None else poll_ms / 1000,
            parts_min=number(options, "minPartitions", 1) or 0,
            rows_per_part_max=number(options, "maxRecordsPerPartition", 1) or 0,
            fail_on_data_loss=_flag(options, "failOnDataLoss", True),
            with_headers=_flag(options, "includeHeaders", False),
            group=options.get("kafka.group.id", "").strip(),
            committed_only=level == "read_committed",
            ranges_only=_flag(internal, RANGES_ONLY, False),
        )


def checked(given: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the options by lower-case name. Raises PipelineError for an option that is not in `names`."""
    options = {name.lower(): value for name, value in given.items()}
    for name in options:
        if not name.startswith("kafka.") and name not in names:
            raise PipelineError(f"option {name} is unknown: the names are {', '.join(sorted(names.values()))}")
    return options


def bootstrap_of(options: Mapping[str, str]) -> Target:
    """Return the cluster. Raises PipelineError without addresses, or with wrong client settings."""
    bootstrap = ",".join(_listed(options.get("kafka.bootstrap.servers", "")))
    path = options.get(PROPERTIES_FILE, "").strip()
    security = {name.removeprefix("kafka."): value for name, value in options.items() if name.startswith(SECURITY)}
    if path and security:
        raise PipelineError(f"give {PROPERTIES_FILE} or kafka.{min(security)}, not both")
    try:
        if path:
            return load_settings(path, bootstrap or None)
        if not bootstrap:
            raise PipelineError("option kafka.bootstrap.servers is missing: give HOST:PORT[,...]")
        settings = settings_of(security, bootstrap)
    except (PropertiesError, SecuritySettingError) as error:
        raise PipelineError(f"{'option ' + PROPERTIES_FILE if path else 'kafka. options'}: {error}") from None
    return bootstrap if settings.security == PLAINTEXT_SECURITY else settings


def connection_options(target: Target, *, own: bool = True) -> dict[str, str]:
    """Return the options that name a cluster, of format chronik or of Spark's own connector (`own` is False).

    For format chronik, secrets stay in their file. Spark's connector has no such option; the session hides them.
    """
    settings = ClientSettings.of(target)
    options = {"kafka.bootstrap.servers": settings.bootstrap}
    if settings.security == PLAINTEXT_SECURITY:
        return options
    if own and settings.path is not None:
        return {**options, PROPERTIES_FILE: settings.path}
    try:
        return options | {f"kafka.{name}": value for name, value in java_properties(settings.security).items()}
    except SecuritySettingError as error:
        raise PipelineError(str(error)) from None


def _what_to_read(options: Mapping[str, str]) -> tuple[tuple[str, ...], str | None, frozenset[Partition] | None]:
    ways = [name for name in ("subscribe", "subscribePattern", "assign") if options.get(name.lower(), "").strip()]
    if len(ways) != 1:
        raise PipelineError(f"give one of subscribe, subscribePattern and assign (given: {', '.join(ways) or 'none'})")
    value = options[ways[0].lower()].strip()
    if ways[0] == "subscribe":
        return tuple(dict.fromkeys(_listed(value))), None, None
    if ways[0] == "subscribePattern":
        try:
            re.compile(value)
        except re.error as error:
            raise PipelineError(f"option subscribePattern is not a regular expression: {error}") from None
        return (), value, None
    named = _parse_json("assign", value).items()
    assigned = frozenset((topic, _whole("assign", number)) for topic, numbers in named for number in numbers)
    return tuple(dict.fromkeys(topic for topic, _ in sorted(assigned))), None, assigned


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _starting(options: Mapping[str, str], streaming: bool) -> Edge:
    strategy = one_of(options, "startingOffsetsByTimestampStrategy", ("error", "latest"), "error")
    edge = _edge(options, "starting", "latest" if streaming else "earliest", latest_if_none=strategy == "latest")
    if not streaming and (edge.everywhere == LATEST or LATEST in (edge.offsets or {}).values()):
        raise PipelineError("option startingOffsets: a batch read from the latest offset would be empty")
    return edge


def _ending(options: Mapping[str, str]) -> Edge:
    edge = _edge(options, "ending", "latest", latest_if_none=True)
    if edge.everywhere == EARLIEST or EARLIEST in (edge.offsets or {}).values():
        raise PipelineError("option endingOffsets: a batch read up to the earliest offset would be empty")
    return edge


def _edge(options: Mapping[str, str], side: str, default: str, *, latest_if_none: bool) -> Edge:
    time_ms = number(options, f"{side}Timestamp", 0)
    if time_ms is not None:
        return Edge(time_ms=time_ms, latest_if_none=latest_if_none)
    times = options.get(f"{side}offsetsbytimestamp")
    if times is not None:
        return Edge(times_ms=_by_partition(f"{side}OffsetsByTimestamp", times), latest_if_none=latest_if_none)
    value = options.get(f"{side}offsets", default).strip()
    if value.lower() in ("earliest", "latest"):
        return Edge(EARLIEST if value.lower() == "earliest" else LATEST)
    return Edge(offsets=_by_partition(f"{side}Offsets", value))


def _by_partition(name: str, value: str) -> dict[Partition, int]:
    numbers: dict[Partition, int] = {}
    for topic, entries in _parse_json(name, value).items():
        if not isinstance(entries, dict):
            raise PipelineError(f'option {name}: write {{"{topic}": {{"0": NUMBER, ...}}}}')
        for partition, number in entries.items():
            numbers[topic, _whole(name, partition)] = _whole(name, number)
    return numbers


def _parse_json(name: str, value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise PipelineError(f"option {name} is neither a known word nor a JSON object: {value[:80]}")
    return parsed


def _whole(name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise PipelineError(f"option {name}: {value!r} is not a whole number") from None


def number(options: Mapping[str, str], name: str, least: int) -> int | None:
    value = options.get(name.lower())
    if value is None:
        return None
    parsed = _whole(name, value)
    if parsed < least:
        raise PipelineError(f"option {name} must be {least} or more, not {parsed}")
    return parsed


def _duration_s(options: Mapping[str, str], name: str, default_s: float) -> float:
    value = options.get(name.lower())
    if value is None:
        return default_s
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", value.strip().lower())
    if found is None or (found.group(2) or "ms") not in UNITS_S:
        raise PipelineError(f"option {name}: {value!r} is not a time: write it as in 500ms, 30s or 15m")
    return int(found.group(1)) * UNITS_S[found.group(2) or "ms"]


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    return one_of(options, name, ("true", "false"), str(default).lower()) == "true"


def one_of(options: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = options.get(name.lower(), default).strip().lower()
    if value not in allowed:
        raise PipelineError(f"option {name} must be one of {', '.join(allowed)}, not {value}")
    return value
