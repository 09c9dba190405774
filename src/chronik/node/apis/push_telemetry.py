"""PushTelemetry (key 72), version 0 (KIP-714).

Behaviour
- Keeps the last values of a client's metrics, which are OpenTelemetry's (`wire.otlp`), for /metrics and
  /api/client-metrics: of subscribed metrics, at most 500 series of a client and 20,000 in all. Further series are
  dropped, and a metric shows how many. A client that is silent for a minute and three intervals is forgotten.
- UNKNOWN_SUBSCRIPTION_ID if the client's subscription has changed: it then requests the new one.
- THROTTLING_QUOTA_EXCEEDED before the interval has passed, or while too many pushes wait. The last push of a client
  (`terminating`) need not wait for the interval; a further one is INVALID_REQUEST.
- TELEMETRY_TOO_LARGE above `telemetry_max_bytes`, UNSUPPORTED_COMPRESSION_TYPE, INVALID_RECORD for data that cannot be
  decompressed or decoded.
"""

from chronik.node.admin.telemetry import ClientTelemetry
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(telemetry: ClientTelemetry, request: Request) -> Values:
    await telemetry.push(request)
    return {"error_code": ErrorCode.none}


API = Api(ApiKey.PUSH_TELEMETRY, (0, 0))
