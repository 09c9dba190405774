"""ListConfigResources (key 74), versions 0-1.

Behaviour
- Lists the resources that may have configs: topics, brokers and their loggers, subscriptions to metrics of clients, and
  the groups on which a config is set. No types in the request means all of these.
- Another type is UNSUPPORTED_VERSION, as in Kafka.
Versions: 0 lists client metrics only; 1 types.
"""

from chronik.metadata.image import ClusterImage
from chronik.node.admin.configs import ResourceType
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

FIRST_VERSION_WITH_TYPES = 1


async def handle(metadata: MetadataLog, request: Request) -> Values:
    requested: list[int] = [ResourceType.CLIENT_METRICS]
    if request.api_version >= FIRST_VERSION_WITH_TYPES:
        requested = list(dict.fromkeys(request.message.resource_types)) or list(ResourceType)
    if any(each not in list(ResourceType) for each in requested):
        return {"error_code": ErrorCode.unsupported_version, "config_resources": []}
    listed = [
        {"resource_type": each, "resource_name": name}
        for each in requested
        for name in _names(ResourceType(each), metadata.image)
    ]
    return {"error_code": ErrorCode.none, "config_resources": listed}


def _names(resource_type: ResourceType, image: ClusterImage) -> list[str]:
    match resource_type:
        case ResourceType.TOPIC:
            return sorted(image.topics)
        case ResourceType.BROKER | ResourceType.BROKER_LOGGER:
            return [str(broker_id) for broker_id in sorted(image.brokers)]
        case ResourceType.GROUP:
            return sorted(image.group_configs)
        case ResourceType.CLIENT_METRICS:
            return sorted(image.client_metrics)


API = Api(ApiKey.LIST_CONFIG_RESOURCES, (0, 1))
