"""DescribeCluster (key 60), versions 0-2.

Behaviour
- Returns the cluster id, the controller and the live brokers, like Metadata: those that have the listener by which
  the client came in, with their address there.
- Authorized operations, if requested, are those of the client; none if it may not describe the cluster.
Versions: 1 endpoint type, 2 fenced brokers, if requested (KIP-1073).
Not supported: controller endpoints (MISMATCHED_ENDPOINT_TYPE), because this is a broker's listener.
"""

from chronik.node.admin.responses import NOT_REQUESTED, cluster_operations, error_values
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

BROKER_ENDPOINTS = 1
CONTROLLER_ENDPOINTS = 2


async def handle(metadata: MetadataLog, request: Request) -> Values:
    message = request.message
    endpoint_type = getattr(message, "endpoint_type", BROKER_ENDPOINTS)
    if endpoint_type == CONTROLLER_ENDPOINTS:
        raise KafkaError(ErrorCode.mismatched_endpoint_type, "This is a broker's listener, not a controller's.")
    if endpoint_type != BROKER_ENDPOINTS:
        raise KafkaError(ErrorCode.unsupported_endpoint_type, f"Endpoint type {endpoint_type} is unknown.")
    image = metadata.image
    includes_fenced = getattr(message, "include_fenced_brokers", False)
    brokers = [broker for _, broker in sorted(image.brokers.items())] if includes_fenced else image.live_brokers()
    return {
        **error_values(None),
        "endpoint_type": BROKER_ENDPOINTS,
        "cluster_id": image.cluster_id,
        "controller_id": metadata.controller_id,
        "brokers": [
            {
                "broker_id": broker.id,
                "host": address[0],
                "port": address[1],
                "rack": broker.rack,
                "is_fenced": broker.is_fenced,
            }
            for broker in brokers
            if (address := broker.address(request.listener)) is not None
        ],
        "cluster_authorized_operations": cluster_operations(request.access)
        if message.include_cluster_authorized_operations
        else NOT_REQUESTED,
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"error_code": code, "cluster_id": "", "controller_id": -1, "brokers": []}


API = Api(ApiKey.DESCRIBE_CLUSTER, (0, 2), on_error=on_error)
