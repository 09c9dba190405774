"""Configs of topics, brokers, groups, loggers and client metrics, as the admin APIs describe and change them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

from chronik.authorization import acls
from chronik.client.endpoint import Endpoint
from chronik.metadata.broker_configs import (
    BROKER_CONFIGS,
    CLUSTER_DEFAULT,
    DYNAMIC_BROKER_CONFIGS,
    MAX_CONNECTION_CREATION_RATE,
    MAX_CONNECTIONS_PER_IP,
    STATIC_BROKER_CONFIGS,
    check_broker_configs,
)
from chronik.metadata.client_metrics import CLIENT_METRICS_CONFIGS, check_client_metrics_configs
from chronik.metadata.commands import AlterConfigs
from chronik.metadata.config_definitions import ConfigDefinition, ConfigSource, ConfigType, split_list
from chronik.metadata.group_configs import GROUP_CONFIGS, RANGED_CONFIGS, check_group_configs
from chronik.metadata.image import DEFAULT_LISTENER, BrokerImage, ClusterImage, TopicImage
from chronik.metadata.topic_configs import TOPIC_CONFIGS, check_topic_configs
from chronik.node.admin.responses import duplicates, refuse_entries, within
from chronik.node.config import ListenerConfig, NodeConfig, group_setting
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.access import Access
from chronik.node.serving.api import Request, Values
from chronik.node.topic_settings import Sourced, as_text, broker_values, dynamic_values, topic_values
from chronik.observe.logging import DEBUG, ERROR, INFO, WARNING, LogLevels
from chronik.wire.errors import ErrorCode, KafkaError


class ResourceType(IntEnum):
    """Kafka's codes for the resource types of configs."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


LOGGER_LEVELS: Mapping[str, int] = {"DEBUG": DEBUG, "INFO": INFO, "WARN": WARNING, "ERROR": ERROR}
KAFKA_LOGGER_LEVELS: Mapping[str, int] = {**LOGGER_LEVELS, "TRACE": DEBUG, "FATAL": ERROR}
"""Kafka has two more levels; each maps to the nearest one here."""
ROOT_LOGGER = "root"
COMPONENTS = (
    "authorizer",
    "controller",
    "groups",
    "links",
    "metadata",
    "node",
    "quotas",
    "raft",
    "replication",
    "storage",
    "telemetry",
    "traces",
    "transactions",
)


def require_config_right(access: Access, operation: acls.Operation, resource_type: int, name: str) -> None:
    """Raise unless the client has the right on the resource whose configs it requests."""
    if resource_type == ResourceType.TOPIC:
        access.require(operation, acls.ResourceType.TOPIC, name)
    elif resource_type == ResourceType.GROUP:
        access.require(operation, acls.ResourceType.GROUP, name)
    else:
        access.require(operation, acls.ResourceType.CLUSTER)


# -- descriptions ------------------------------------------------------------------------------------------------------


def topic_entries(topic: TopicImage, config: NodeConfig, image: ClusterImage) -> list[Values]:
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
            _entry(BROKER_CONFIGS[key], [Sourced(key, text, ConfigSource.DYNAMIC_DEFAULT_BROKER)], is_read_only=False)
            for key, text in image.broker_configs.get(CLUSTER_DEFAULT, {}).items()
            if key in BROKER_CONFIGS
        ]
    check_broker_name(name, config)
    static, settings = _static_values(config, image), _connection_settings(config)
    topic_configs = {definition.synonym: definition for definition in TOPIC_CONFIGS.values() if definition.synonym}
    entries: list[Values] = []
    for definition in BROKER_CONFIGS.values():
        if definition.name in static:
            values = [Sourced(definition.name, static[definition.name], ConfigSource.STATIC_BROKER)]
        elif definition.name in topic_configs:
            values = broker_values(topic_configs[definition.name], config, image)
        else:
            values = dynamic_values(definition.name, config.node_id, image)
            if definition.name in settings:
                values.append(Sourced(definition.name, settings[definition.name], ConfigSource.STATIC_BROKER))
            values.append(Sourced(definition.name, definition.default or "", ConfigSource.DEFAULT))
        entries.append(_entry(definition, values, is_read_only=not definition.is_dynamic))
    return entries


def logger_entries(levels: LogLevels) -> list[Values]:
    """Return the log level of each component, and under the name `root` the level of all other components."""
    names = {level: name for name, level in LOGGER_LEVELS.items()}
    loggers = {name: levels.level_of(name) for name in _loggers(levels)}
    loggers[ROOT_LOGGER] = levels.default
    return [
        {
            "name": component,
            "value": names[level],
            "read_only": False,
            "config_source": ConfigSource.DYNAMIC_BROKER_LOGGER,
            "is_sensitive": False,
            "synonyms": [],
            "config_type": ConfigType.STRING,
            "documentation": f"The lowest level at which {component} writes lines: {', '.join(LOGGER_LEVELS)}.",
        }
        for component, level in sorted(loggers.items())
    ]


def client_metrics_entries(name: str, image: ClusterImage) -> list[Values]:
    """Return all configs of a subscription to metrics of clients; none if it does not exist."""
    if not name:
        raise KafkaError(ErrorCode.invalid_request, "A subscription to client metrics needs a name")
    configs = image.client_metrics.get(name)
    if configs is None:
        return []
    entries: list[Values] = []
    for definition in CLIENT_METRICS_CONFIGS.values():
        values = [Sourced(definition.name, definition.default or "", ConfigSource.DEFAULT)]
        if definition.name in configs:
            values.insert(0, Sourced(definition.name, configs[definition.name], ConfigSource.CLIENT_METRICS))
        entries.append(_entry(definition, values, is_read_only=False))
    return entries


def group_entries(name: str, config: NodeConfig, image: ClusterImage) -> list[Values]:
    """Return all configs of a group, which need not exist."""
    if not name:
        raise KafkaError(ErrorCode.invalid_request, "A group config needs the name of the group.")
    own, static = image.group_configs.get(name, {}), _static_values(config, image)
    entries = []
    for definition in GROUP_CONFIGS.values():
        values = []
        if definition.name in own:
            values.append(Sourced(definition.name, own[definition.name], ConfigSource.DYNAMIC_GROUP))
        if definition.synonym is not None:
            values.append(Sourced(definition.synonym, static[definition.synonym], ConfigSource.STATIC_BROKER))
        if definition.default is not None:
            values.append(Sourced(definition.name, definition.default, ConfigSource.DEFAULT))
        entries.append(_entry(definition, values, is_read_only=False))
    return entries


def _loggers(levels: LogLevels) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*COMPONENTS, *levels.components)))


def chosen(
    entries: Iterable[Values], keys: Iterable[str] | None, *, synonyms: bool, documentation: bool
) -> list[Values]:
    """Return the requested entries (no keys: all), with synonyms and documentation only if requested."""
    requested = frozenset(keys or ())
    return [
        {
            **entry,
            "synonyms": entry["synonyms"] if synonyms else [],
            "documentation": entry["documentation"] if documentation else None,
        }
        for entry in entries
        if not requested or entry["name"] in requested
    ]


def check_broker_name(name: str, config: NodeConfig) -> None:
    """Raise unless the name is this broker or the cluster-wide default: a node handles no other broker's configs."""
    if name not in {CLUSTER_DEFAULT, str(config.node_id)}:
        raise KafkaError(
            ErrorCode.invalid_request,
            f"Unexpected broker id, expected {config.node_id} or empty, but received {name!r}",
        )


def _kafka_name(listener: ListenerConfig) -> str:
    """Return the listener's name as in Kafka's `listeners`, where an unnamed listener has that of its protocol."""
    return listener.protocol if listener.name == DEFAULT_LISTENER else listener.name


def _advertised(config: NodeConfig, registered: BrokerImage | None) -> Iterator[str]:
    for listener in config.kafka_listeners:
        address = None if registered is None else registered.address(listener.name)
        yield f"{_kafka_name(listener)}://{listener.advertised() if address is None else Endpoint(*address)}"


def _connection_settings(config: NodeConfig) -> dict[str, str]:
    """Return the limits of connections that the node was started with, unless they are the defaults."""
    settings = {
        MAX_CONNECTIONS_PER_IP: config.connections_max_per_ip,
        MAX_CONNECTION_CREATION_RATE: config.connection_creation_rate,
    }
    return {name: str(value) for name, value in settings.items() if str(value) != BROKER_CONFIGS[name].default}


def _static_values(config: NodeConfig, image: ClusterImage) -> dict[str, str]:
    """Return the node's startup settings under Kafka's names."""
    # If the node was configured to use any free port, only the registration has the real one.
    registered = image.brokers.get(config.node_id)
    values: dict[str, object] = {
        "advertised.listeners": ",".join(_advertised(config, registered)),
        "auto.create.topics.enable": config.auto_create_topics,
        "broker.id": config.node_id,
        "broker.rack": config.rack or "",
        "connections.max.idle.ms": config.connection_idle_ms_max,
        "connections.max.reauth.ms": config.sasl.reauthenticate_ms,
        "default.replication.factor": config.default_replication_factor,
        "delete.topic.enable": True,
        "durability": config.durability,
        "errors.deadletterqueue.auto.create.topics.enable": config.errors_deadletterqueue_auto_create_topics_enable,
        "errors.deadletterqueue.topic.name.prefix": config.errors_deadletterqueue_topic_name_prefix,
        "group.consumer.assignors": ",".join(config.group_consumer_assignors),
        "group.consumer.max.size": config.group_consumer_max_size,
        "group.consumer.migration.policy": config.group_consumer_migration_policy,
        "group.share.max.size": config.group_share_max_size,
        "group.share.max.share.sessions": config.group_share_max_share_sessions,
        **{
            group_setting(name, end).replace("_", "."): getattr(config, group_setting(name, end))
            for name in RANGED_CONFIGS
            for end in ("", "min", "max")
        },
        "group.initial.rebalance.delay.ms": config.group_initial_rebalance_delay_ms,
        "group.max.session.timeout.ms": config.group_max_session_timeout_ms,
        "group.max.size": config.group_max_size,
        "group.min.session.timeout.ms": config.group_min_session_timeout_ms,
        "listen.http": registered.http if registered else "",
        "listeners": ",".join(f"{_kafka_name(each)}://{each.endpoint}" for each in config.kafka_listeners),
        "log.dirs": config.data_folder,
        "max.connections": config.connections_max,
        "max.connections.per.ip.overrides": ",".join(
            f"{address}:{count}" for address, count in config.connections_max_per_ip_overrides.items()
        ),
        "node.id": config.node_id,
        "num.partitions": config.num_partitions,
        "offsets.retention.minutes": config.offsets_retention_minutes,
        "offsets.topic.num.partitions": config.offsets_topic_partitions,
        "producer.id.expiration.ms": config.producer_id_expiration_ms,
        "quota.window.num": config.quota_window_num,
        "quota.window.size.seconds": config.quota_window_size_seconds,
        "share.coordinator.state.topic.num.partitions": config.share_state_topic_partitions,
        "socket.request.max.bytes": config.frame_bytes_max,
        "telemetry.max.bytes": config.telemetry_max_bytes,
        "transaction.max.timeout.ms": config.transaction_max_timeout_ms,
        "transaction.state.log.num.partitions": config.transaction_state_topic_partitions,
        "transactional.id.expiration.ms": config.transactional_id_expiration_ms,
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


# -- changes -----------------------------------------------------------------------------------------------------------

WAIT = timedelta(seconds=30)
"""These requests have no timeout of their own."""


class Operation(IntEnum):
    """Kafka's codes for the operation on one config."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one config of one resource."""

    name: str
    operation: int
    value: str | None


async def alter_resources(
    runtime: Runtime,
    metadata: MetadataLog,
    host: PartitionHost,
    request: Request,
    change_of: Callable[[Any], Change],
    *,
    replaces_all: bool,
) -> Values:
    """Change the resources of a request, each as a whole or not at all; `change_of` reads one config of the request.

    If `replaces_all`, configs of a resource that the request does not name are unset.
    """
    message = request.message
    keys = [(resource.resource_type, resource.resource_name) for resource in message.resources]
    repeated = duplicates(keys)

    async def alter(resource_type: int, name: str, changes: list[Change]) -> Values:
        if (resource_type, name) in repeated:
            raise KafkaError(ErrorCode.invalid_request, "Each resource must appear at most once.")
        require_config_right(request.access, acls.Operation.ALTER_CONFIGS, resource_type, name)
        if resource_type == ResourceType.BROKER_LOGGER and not replaces_all:
            levels = _changed_levels(runtime, name, changes)
            if not message.validate_only:
                runtime.log.levels = levels
            return {}

        def plan(image: ClusterImage) -> AlterConfigs:
            resource = _Resource(resource_type, name, runtime.config, image)
            unset: dict[str, str | None] = dict.fromkeys(resource.configs if replaces_all else ())
            return resource.command({**unset, **_changed(resource, changes)})

        if message.validate_only:
            plan(metadata.image)
        else:
            await metadata.propose(plan)
            await host.applied()
        return {}

    entries = [
        (
            {"resource_type": resource_type, "resource_name": name},
            alter(resource_type, name, [change_of(config) for config in resource.configs]),
        )
        for (resource_type, name), resource in zip(keys, message.resources, strict=True)
    ]
    return {"responses": await within(runtime, WAIT, entries)}


def has_only_loggers(message: Any) -> bool:
    """Whether a request to alter configs names only loggers, which the broker that receives it alters itself."""
    return bool(message.resources) and all(
        resource.resource_type == ResourceType.BROKER_LOGGER for resource in message.resources
    )


def _changed_levels(runtime: Runtime, name: str, changes: list[Change]) -> LogLevels:
    """Return the log levels after the changes. KafkaError if the broker, a logger or a level is unknown."""
    if name != str(runtime.node_id):
        raise KafkaError(
            ErrorCode.invalid_request, f"Unexpected broker id, expected {runtime.node_id} but received {name!r}"
        )
    if repeated := duplicates(change.name for change in changes):
        raise KafkaError(ErrorCode.invalid_request, f"Error due to duplicate config keys: {', '.join(repeated)}")
    levels = runtime.log.levels
    new: dict[str, int | None] = {change.name: _new_level(levels, change) for change in changes}
    return levels.changed({key: level for key, level in new.items() if key != ROOT_LOGGER}, new.get(ROOT_LOGGER))


def _new_level(levels: LogLevels, change: Change) -> int | None:
    """Return the level that a change sets; None if the logger is to follow `root` again."""
    if change.name != ROOT_LOGGER and change.name not in _loggers(levels):
        raise KafkaError(ErrorCode.invalid_config, f"Logger {change.name} does not exist!")
    if change.operation == Operation.DELETE:
        if change.name == ROOT_LOGGER:
            raise KafkaError(
                ErrorCode.invalid_request, f"Removing the log level of the {ROOT_LOGGER} logger is not allowed"
            )
        return None
    if change.operation != Operation.SET:
        raise KafkaError(ErrorCode.invalid_request, f"Config operation {change.operation} is not allowed for loggers")
    level = KAFKA_LOGGER_LEVELS.get((change.value or "").strip().upper())
    if level is None:
        known = ", ".join(KAFKA_LOGGER_LEVELS)
        raise KafkaError(
            ErrorCode.invalid_config, f"Cannot set the log level of {change.name} to {change.value!r}: use {known}"
        )
    return level


refuse_resources = refuse_entries(
    "responses",
    lambda request: (
        {"resource_type": resource.resource_type, "resource_name": resource.resource_name}
        for resource in request.message.resources
    ),
)
"""The `on_error` of both APIs."""


class _Resource:
    """A topic, a broker, a group or a subscription to client metrics in one image, with its configs.

    KafkaError if it does not exist; a group need not exist, and a subscription is created by its first config.
    """

    def __init__(self, resource_type: int, name: str, config: NodeConfig, image: ClusterImage) -> None:
        self.name = name
        self._config = config
        self._image = image
        self._is_topic = resource_type == ResourceType.TOPIC
        self._is_subscription = resource_type == ResourceType.CLIENT_METRICS
        self._is_group = resource_type == ResourceType.GROUP
        self.configs: Mapping[str, str]
        if self._is_topic:
            self._topic = image.require_topic(name)
            self.configs = self._topic.configs
        elif resource_type == ResourceType.BROKER:
            if name != CLUSTER_DEFAULT and name not in {str(broker_id) for broker_id in image.brokers}:
                raise KafkaError(ErrorCode.invalid_request, f"There is no broker {name!r} in this cluster.")
            self.configs = image.broker_configs.get(name, {})
        elif self._is_subscription:
            self.configs = image.client_metrics.get(name, {})
        elif self._is_group:
            if not name:
                raise KafkaError(ErrorCode.invalid_request, "A group config needs the name of the group.")
            self.configs = image.group_configs.get(name, {})
        else:
            raise KafkaError(ErrorCode.invalid_request, f"Unexpected resource type {resource_type}")

    def definition(self, key: str) -> ConfigDefinition | None:
        if self._is_topic:
            return TOPIC_CONFIGS.get(key)
        if self._is_subscription:
            return CLIENT_METRICS_CONFIGS.get(key)
        if self._is_group:
            return GROUP_CONFIGS.get(key)
        return DYNAMIC_BROKER_CONFIGS.get(key, STATIC_BROKER_CONFIGS.get(key))

    def value_in_effect(self, definition: ConfigDefinition) -> str:
        """Return the list to append to: the value set on this resource, or the default that a new value overrides."""
        if definition.name in self.configs:
            return self.configs[definition.name]
        if self._is_topic:
            return topic_values(definition, self._topic, self._config, self._image)[0].value
        if self._is_subscription:
            return definition.default or ""
        for topic_config in TOPIC_CONFIGS.values():
            if topic_config.synonym == definition.name:
                return broker_values(topic_config, self._config, self._image)[0].value
        return definition.default or ""

    def command(self, changes: Mapping[str, str | None]) -> AlterConfigs:
        if self._is_topic:
            check_topic_configs(changes, self._topic.is_internal)
            return AlterConfigs("topic", self.name, changes)
        if self._is_subscription:
            check_client_metrics_configs(self._image, self.name, changes)
            return AlterConfigs("client_metrics", self.name, changes)
        if self._is_group:
            check_group_configs(changes, _group_ranges(self._config), _group_values(self._config, self.configs))
            return AlterConfigs("group", self.name, changes)
        check_broker_configs(changes, self.name)
        return AlterConfigs("broker", self.name, changes)


def _group_ranges(config: NodeConfig) -> dict[str, tuple[int, int]]:
    return {
        name: (getattr(config, group_setting(name, "min")), getattr(config, group_setting(name, "max")))
        for name in RANGED_CONFIGS
    }


def _group_values(config: NodeConfig, own: Mapping[str, str]) -> dict[str, int]:
    return {name: int(own.get(name, getattr(config, group_setting(name)))) for name in RANGED_CONFIGS}


def _changed(resource: _Resource, changes: list[Change]) -> dict[str, str | None]:
    if repeated := duplicates(change.name for change in changes):
        raise KafkaError(ErrorCode.invalid_request, f"Error due to duplicate config keys: {', '.join(repeated)}")
    return {change.name: _new_value(resource, change) for change in changes}


def _new_value(resource: _Resource, change: Change) -> str | None:
    if change.operation == Operation.DELETE:
        return None
    if change.value is None:
        raise KafkaError(ErrorCode.invalid_request, f"Null value not supported for {change.name}")
    value = change.value.strip()
    if change.operation == Operation.SET:
        return value
    if change.operation not in {Operation.APPEND, Operation.SUBTRACT}:
        raise KafkaError(ErrorCode.invalid_request, f"Unknown config operation {change.operation}")
    definition = resource.definition(change.name)
    if definition is None:
        raise KafkaError(ErrorCode.invalid_config, f"Unknown config name: {change.name}")
    if definition.type is not ConfigType.LIST:
        verb = "append to" if change.operation == Operation.APPEND else "subtract from"
        raise KafkaError(ErrorCode.invalid_config, f"Cannot {verb} {change.name}: its type is not a list")
    items = split_list(resource.value_in_effect(definition))
    given = split_list(value)
    if change.operation == Operation.APPEND:
        return ",".join(dict.fromkeys((*items, *given)))
    return ",".join(item for item in items if item not in given)
