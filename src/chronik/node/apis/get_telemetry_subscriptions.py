"""GetTelemetrySubscriptions (key 71), version 0 (KIP-714).

Behaviour
- Returns the metrics that a client is to push, and how often: all subscriptions (configs of CLIENT_METRICS) that match
  the client, with the shortest of their intervals. Without a match the client is to push nothing, and requests it
  again after five minutes.
- A client without an instance id gets one. The id of the subscription depends on it and on the configs only, so that
  every node accepts the client's pushes.
- THROTTLING_QUOTA_EXCEEDED before the interval has passed, unless the subscription has changed.
- Counters are requested as cumulative values, not as deltas: a lost push loses nothing.
"""

from chronik.node.admin.telemetry import COMPRESSION_TYPES, ClientTelemetry
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(telemetry: ClientTelemetry, request: Request) -> Values:
    instance = telemetry.get(request)
    return {
        "error_code": ErrorCode.none,
        "client_instance_id": instance.id,
        "subscription_id": instance.subscription_id,
        "accepted_compression_types": COMPRESSION_TYPES,
        "push_interval": instance.interval_ms,
        "telemetry_max_bytes": telemetry.max_bytes,
        "delta_temporality": False,
        "requested_metrics": instance.metrics,
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"error_code": code, "accepted_compression_types": [], "requested_metrics": []}


API = Api(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, (0, 0), on_error=on_error)
