"""DescribeConfigs (key 32), versions 1-4.

Behaviour
- Describes topics, this broker, the cluster-wide broker defaults (a broker with the empty name) and this broker's
  loggers. Each resource has its own outcome.
- Each config has its effective value, the source of that value, and on request every value that it overrides.
- No keys, or an empty list, means all configs; unknown keys are omitted.
Versions: 3 documentation and types, 4 flexible.
Not supported: configs of groups and client metrics (INVALID_REQUEST).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from chronik.node.admin.config_entries import (
    ResourceType,
    broker_entries,
    check_broker_name,
    chosen,
    logger_entries,
    topic_entries,
)
from chronik.node.config import NodeConfig
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


class Services(NamedTuple):
    """The parts of the node that this API uses."""

    config: NodeConfig
    metadata: MetadataLog


async def handle(node: Services, request: Request) -> Values:
    return {"results": [_describe(node, request.message, resource) for resource in request.message.resources]}


def _describe(node: Services, message: Any, resource: Any) -> Values:
    named = {"resource_type": resource.resource_type, "resource_name": resource.resource_name}
    try:
        entries = chosen(
            _entries(node, resource.resource_type, resource.resource_name),
            resource.configuration_keys,
            synonyms=message.include_synonyms,
            documentation=getattr(message, "include_documentation", False),
        )
    except KafkaError as error:
        return {**named, "error_code": error.code, "error_message": error.message, "configs": []}
    return {**named, "error_code": ErrorCode.none, "error_message": None, "configs": entries}


def _entries(node: Services, resource_type: int, name: str) -> list[Values]:
    if resource_type == ResourceType.TOPIC:
        return topic_entries(node.metadata.image.require_topic(name), node.config, node.metadata.image)
    if resource_type == ResourceType.BROKER:
        return broker_entries(name, node.config, node.metadata.image)
    if resource_type == ResourceType.BROKER_LOGGER:
        check_broker_name(name, node.config)
        return logger_entries(node.config.levels)
    raise KafkaError(ErrorCode.invalid_request, f"Unsupported resource type {resource_type}")


API = Api(ApiKey.DESCRIBE_CONFIGS, (1, 4))


def handler(services: Services) -> Handler:
    return Handler(API, partial(handle, services))
