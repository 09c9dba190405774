"""SaslAuthenticate (key 36), versions 0-2.

Behaviour
- Carries one message of the mechanism that SaslHandshake chose, and the server's answer.
- SASL_AUTHENTICATION_FAILED with one message for every reason, after a delay that grows with the failures of the
  client's address; then the connection is closed. The log has the reason.
- ILLEGAL_SASL_STATE without a handshake before it, and on a listener without SASL.
- On success the session's lifetime is the shorter one of `sasl.reauthenticate_ms` and the token's; 0 means no limit.
Versions: 1 session lifetime (KIP-368), 2 flexible.
"""

from datetime import timedelta

from chronik.node.serving.api import Api, Request, Values
from chronik.node.serving.authentication import ClientAuthentication
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


async def handle(request: Request) -> Values:
    client = request.connection.gate
    try:
        if not isinstance(client, ClientAuthentication):
            raise KafkaError(ErrorCode.illegal_sasl_state, "This listener does not use SASL.")
        answer = await client.authenticate(request.message.auth_bytes)
    except KafkaError as error:
        return {"error_code": error.code, "error_message": error.message or None, "auth_bytes": b""}
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "auth_bytes": answer.data,
        "session_lifetime": timedelta(milliseconds=answer.lifetime_ms),
    }


API = Api(
    ApiKey.SASL_AUTHENTICATE,
    (0, 2),
    on_error=lambda request, code: {"error_code": code, "error_message": None, "auth_bytes": b""},
)
