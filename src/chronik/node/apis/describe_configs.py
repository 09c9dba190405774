"""DescribeConfigs (key 32), versions 1-4.

Behaviour
- Describes topics, this broker, the cluster-wide broker defaults (a broker with the empty name), groups, this broker's
  loggers and subscriptions to metrics of clients. Each resource has its own outcome.
- Each config has its effective value, the source of that value, and on request every value that it overrides.
- No keys, or an empty list, means all configs; unknown keys are omitted.
Versions: 3 documentation and types, 4 flexible.
"""

from typing import Any

from chronik.authorization.acls import Operation
from chronik.metadata.image import ClusterImage
from chronik.node.admin.configs import (
    ResourceType,
    broker_entries,
    check_broker_name,
    chosen,
    client_metrics_entries,
    group_entries,
    logger_entries,
    require_config_right,
    topic_entries,
)
from chronik.node.admin.responses import error_values
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


async def handle(runtime: Runtime, metadata: MetadataLog, request: Request) -> Values:
    resources = request.message.resources
    return {"results": [_describe(runtime, metadata.image, request, resource) for resource in resources]}


def _describe(runtime: Runtime, image: ClusterImage, request: Request, resource: Any) -> Values:
    message = request.message
    named = {"resource_type": resource.resource_type, "resource_name": resource.resource_name}
    try:
        require_config_right(request.access, Operation.DESCRIBE_CONFIGS, resource.resource_type, resource.resource_name)
        entries = chosen(
            _entries(runtime, image, resource.resource_type, resource.resource_name),
            resource.configuration_keys,
            synonyms=message.include_synonyms,
            documentation=getattr(message, "include_documentation", False),
        )
    except KafkaError as error:
        return {**named, **error_values(error), "configs": []}
    return {**named, **error_values(None), "configs": entries}


def _entries(runtime: Runtime, image: ClusterImage, resource_type: int, name: str) -> list[Values]:
    if resource_type == ResourceType.TOPIC:
        return topic_entries(image.require_topic(name), runtime.config, image)
    if resource_type == ResourceType.BROKER:
        return broker_entries(name, runtime.config, image)
    if resource_type == ResourceType.GROUP:
        return group_entries(name, runtime.config, image)
    if resource_type == ResourceType.BROKER_LOGGER:
        check_broker_name(name, runtime.config)
        return logger_entries(runtime.log.levels)
    if resource_type == ResourceType.CLIENT_METRICS:
        return client_metrics_entries(name, image)
    raise KafkaError(ErrorCode.invalid_request, f"Unsupported resource type {resource_type}")


API = Api(ApiKey.DESCRIBE_CONFIGS, (1, 4))
