"""DescribeConfigs (key 32), versions 1-4.

Behaviour
- Topics, this broker, the cluster-wide broker defaults (a broker with the empty name) and this broker's loggers. Each
  resource has its own outcome.
- Each config comes with the value in effect, where it comes from, and on request every value that it overrides.
- No keys, or an empty list of them, means all; keys that are none are left out.
Versions: 3 documentation and types, 4 flexible.
Not supported: configs of groups and client metrics (INVALID_REQUEST).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chronik.node.admin.config_entries import (
    ResourceType,
    broker_entries,
    check_broker_name,
    chosen,
    logger_entries,
    topic_entries,
)
from chronik.node.serving.request import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from chronik.node.broker import Broker


async def handle(broker: Broker, request: Request) -> Values:
    return {"results": [_describe(broker, request.message, resource) for resource in request.message.resources]}


def _describe(broker: Broker, message: Any, resource: Any) -> Values:
    named = {"resource_type": resource.resource_type, "resource_name": resource.resource_name}
    try:
        entries = chosen(
            _entries(broker, resource.resource_type, resource.resource_name),
            resource.configuration_keys,
            synonyms=message.include_synonyms,
            documentation=getattr(message, "include_documentation", False),
        )
    except KafkaError as error:
        return {**named, "error_code": error.code, "error_message": error.message, "configs": []}
    return {**named, "error_code": ErrorCode.none, "error_message": None, "configs": entries}


def _entries(broker: Broker, resource_type: int, name: str) -> list[Values]:
    if resource_type == ResourceType.TOPIC:
        return topic_entries(broker.image.require_topic(name), broker.config, broker.image)
    if resource_type == ResourceType.BROKER:
        return broker_entries(name, broker.config, broker.image)
    if resource_type == ResourceType.BROKER_LOGGER:
        check_broker_name(name, broker.config)
        return logger_entries(broker.config.levels)
    raise KafkaError(ErrorCode.invalid_request, f"Unsupported resource type {resource_type}")


API = Api(ApiKey.DESCRIBE_CONFIGS, (1, 4), handle)
