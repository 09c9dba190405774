"""SaslHandshake (key 17), versions 0-1.

Behaviour
- Chooses the mechanism of the authentication that follows. UNSUPPORTED_SASL_MECHANISM with the enabled ones if the
  listener does not have it; then the connection is closed.
- An authenticated client begins a re-authentication (KIP-368): with the same mechanism, and not within a second of the
  last one.
- ILLEGAL_SASL_STATE on a listener without SASL, or while an authentication is running.
Versions: 0 the mechanism's messages follow as frames without a header, 1 they follow in SaslAuthenticate.
"""

from chronik.node.serving.api import Api, Request, Values
from chronik.node.serving.authentication import ClientAuthentication
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(request: Request) -> Values:
    client = request.connection.gate
    if not isinstance(client, ClientAuthentication):
        return {"error_code": ErrorCode.illegal_sasl_state, "mechanisms": []}
    code = client.handshake(request.message.mechanism, with_frames=request.api_version == 0)
    return {"error_code": code, "mechanisms": list(client.mechanisms)}


API = Api(ApiKey.SASL_HANDSHAKE, (0, 1), on_error=lambda request, code: {"error_code": code, "mechanisms": []})
