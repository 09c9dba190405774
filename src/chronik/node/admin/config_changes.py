"""What AlterConfigs and IncrementalAlterConfigs share: one validated metadata command for each resource."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

from chronik.metadata.broker_configs import (
    CLUSTER_DEFAULT,
    DYNAMIC_BROKER_CONFIGS,
    STATIC_BROKER_CONFIGS,
    check_broker_configs,
)
from chronik.metadata.commands import AlterConfigs
from chronik.metadata.config_definitions import ConfigDefinition, ConfigType, split_list
from chronik.metadata.image import ClusterImage
from chronik.metadata.topic_configs import TOPIC_CONFIGS, check_topic_configs
from chronik.node.admin.config_entries import ResourceType
from chronik.node.admin.responses import duplicates, refuse_entries, within
from chronik.node.config import NodeConfig
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Values
from chronik.node.topic_settings import broker_values, topic_values
from chronik.wire.errors import ErrorCode, KafkaError

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
    message: Any,
    change_of: Callable[[Any], Change],
    *,
    replaces_all: bool,
) -> Values:
    """Change the resources of a request, each as a whole or not at all; `change_of` reads one config of the request.

    If `replaces_all`, configs of a resource that the request does not name are unset.
    """
    keys = [(resource.resource_type, resource.resource_name) for resource in message.resources]
    repeated = duplicates(keys)

    async def alter(resource_type: int, name: str, changes: list[Change]) -> Values:
        if (resource_type, name) in repeated:
            raise KafkaError(ErrorCode.invalid_request, "Each resource must appear at most once.")

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


refuse_resources = refuse_entries(
    "responses",
    lambda request: (
        {"resource_type": resource.resource_type, "resource_name": resource.resource_name}
        for resource in request.message.resources
    ),
)
"""The `on_error` of both APIs."""


class _Resource:
    """A topic or broker in one image, with its configs. KafkaError if it does not exist."""

    def __init__(self, resource_type: int, name: str, config: NodeConfig, image: ClusterImage) -> None:
        self.name = name
        self._config = config
        self._image = image
        self._is_topic = resource_type == ResourceType.TOPIC
        self.configs: Mapping[str, str]
        if self._is_topic:
            self._topic = image.require_topic(name)
            self.configs = self._topic.configs
        elif resource_type == ResourceType.BROKER:
            if name != CLUSTER_DEFAULT and name not in {str(broker_id) for broker_id in image.brokers}:
                raise KafkaError(ErrorCode.invalid_request, f"There is no broker {name!r} in this cluster.")
            self.configs = image.broker_configs.get(name, {})
        else:
            raise KafkaError(ErrorCode.invalid_request, f"Unexpected resource type {resource_type}")

    def definition(self, key: str) -> ConfigDefinition | None:
        if self._is_topic:
            return TOPIC_CONFIGS.get(key)
        return DYNAMIC_BROKER_CONFIGS.get(key, STATIC_BROKER_CONFIGS.get(key))

    def value_in_effect(self, definition: ConfigDefinition) -> str:
        """Return the list to append to: the value set on this resource, or the default that a new value overrides."""
        if definition.name in self.configs:
            return self.configs[definition.name]
        if self._is_topic:
            return topic_values(definition, self._topic, self._config, self._image)[0].value
        for topic_config in TOPIC_CONFIGS.values():
            if topic_config.synonym == definition.name:
                return broker_values(topic_config, self._config, self._image)[0].value
        return definition.default or ""

    def command(self, changes: Mapping[str, str | None]) -> AlterConfigs:
        if self._is_topic:
            check_topic_configs(changes, self._topic.is_internal)
        else:
            check_broker_configs(changes, self.name)
        return AlterConfigs("topic" if self._is_topic else "broker", self.name, changes)


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
