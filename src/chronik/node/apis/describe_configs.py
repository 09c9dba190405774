"""DescribeConfigs (key 32), versions 1-4.

Behaviour
- Describes topics, this broker, the cluster-wide broker defaults (a broker with the empty name), groups and this
  broker's loggers. Each resource has its own outcome.
- Each config has its effective value, the source of that value, and on request every value that it overrides.
- No keys, or an empty list, means all configs; unknown keys are omitted.
Versions: 3 documentation and types, 4 flexible.
Not supported: configs of client metrics (INVALID_REQUEST).
"""

from typing import Any

from chronik.authorization.acls import Operation
from chronik.metadata.image import ClusterImage
from chronik.node.admin.configs import (
    ResourceType,
    broker_entries,
    check_broker_name,
    chosen,
    group_entries,
    logger_entries,
    require_config_right,
    topic_entries,
)
from chronik.node.admin.responses import error_values
from chronik.node.config import NodeConfig
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


async def handle(config: NodeConfig, metadata: MetadataLog, request: Request) -> Values:
    resources = request.message.resources
    return {"results": [_describe(config, metadata.image, request, resource) for resource in resources]}


def _describe(config: NodeConfig, image: ClusterImage, request: Request, resource: Any) -> Values:
    message = request.message
    named = {"resource_type": resource.resource_type, "resource_name": resource.resource_name}
    try:
        require_config_right(request.access, Operation.DESCRIBE_CONFIGS, resource.resource_type, resource.resource_name)
        entries = chosen(
            _entries(config, image, resource.resource_type, resource.resource_name),
            resource.configuration_keys,
            synonyms=message.include_synonyms,
            documentation=getattr(message, "include_documentation", False),
        )
    except KafkaError as error:
        return {**named, **error_values(error), "configs": []}
    return {**named, **error_values(None), "configs": entries}


def _entries(config: NodeConfig, image: ClusterImage, resource_type: int, name: str) -> list[Values]:
    if resource_type == ResourceType.TOPIC:
        return topic_entries(image.require_topic(name), config, image)
    if resource_type == ResourceType.BROKER:
        return broker_entries(name, config, image)
    if resource_type == ResourceType.GROUP:
        return group_entries(name, config, image)
    if resource_type == ResourceType.BROKER_LOGGER:
        check_broker_name(name, config)
        return logger_entries(config.levels)
    raise KafkaError(ErrorCode.invalid_request, f"Unsupported resource type {resource_type}")


API = Api(ApiKey.DESCRIBE_CONFIGS, (1, 4))
