"""Opens connections with a client's security: TLS, SASL (KIP-43, KIP-152), and re-authentication (KIP-368).

The order on a connection is: TLS handshake, ApiVersions, SaslHandshake 1, SaslAuthenticate until the exchange ends.
A broker may limit the session. The connector then authenticates again on the same connection before the session ends.
"""

from __future__ import annotations

import asyncio
import secrets  # noqa: TID251  # a nonce has to be unpredictable; simulated nodes have no SASL
import ssl
from typing import Any

from chronik.authentication.clients import client_exchange
from chronik.authentication.sasl import OAUTHBEARER, SaslError
from chronik.client.connection import Connection
from chronik.client.errors import (
    AuthenticationFailed,
    BadResponse,
    CertificateExpired,
    CertificateRejected,
    ClientError,
    ConnectionLost,
    LostAtFirstRequest,
    RequestTimedOut,
    SecurityError,
    Unreachable,
    WrongListener,
)
from chronik.client.security import PLAINTEXT_SECURITY, ClientSecurity, SecuritySettingError
from chronik.client.tls_transport import NotTls
from chronik.wire import messages
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, MalformedRequest

REAUTHENTICATE_AT = 0.85
"""The part of a session after which the client authenticates again. Java's clients choose 0.85 to 0.95."""
EXCHANGES_MAX = 8
"""Messages of one authentication: a broker that asks for more is not using a mechanism that we know."""
NONCE_BYTES = 24

_NEEDS_CERTIFICATE = "if it requires a client certificate, set ssl.certificate.location and ssl.key.location"
_HANDSHAKE_VERSION = 1
_AUTHENTICATE_VERSION = 2
_EXPIRED = (9, 10)
_WRONG_HOST = (62, 64)
"""X509_V_ERR codes: not yet valid, expired; host name and IP address mismatch."""


class Connector:
    """Opens authenticated connections to the brokers of one cluster. Owned by one loop.

    Each connection with a limited session has a task that authenticates again; it ends with the connection.
    """

    def __init__(self, security: ClientSecurity = PLAINTEXT_SECURITY) -> None:
        self._security = security
        self._context: ssl.SSLContext | None = None
        self._renewals: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int, /, *, client_id: str = "chronik", timeout_s: float = 10.0) -> Connection:
        """Raise a ClientError: Unreachable, ConnectionLost, or a SecurityError if a retry would not help."""
        security = self._security
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            connection = await self._open(host, port, client_id, timeout_s)
        except Unreachable as error:
            cause = error.__cause__
            if security.uses_tls and isinstance(cause, ssl.SSLError | ConnectionResetError | ConnectionAbortedError):
                raise tls_failure(name, cause, security) from None
            raise
        try:
            if security.uses_sasl:
                lifetime_s = await self._authenticate(connection, timeout_s)
                if lifetime_s > 0:
                    self._renew_later(connection, lifetime_s, timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _open(self, host: str, port: int, client_id: str, timeout_s: float) -> Connection:
        try:
            context = await self._tls_context()
        except SecuritySettingError as error:
            raise SecurityError(str(error)) from None
        try:
            return await Connection.open(host, port, client_id=client_id, timeout_s=timeout_s, ssl=context)
        except ConnectionLost as error:
            raise _lost_while_opening(error, self._security) from None

    async def _tls_context(self) -> ssl.SSLContext | None:
        if self._context is None and self._security.uses_tls:
            # Reading the system's authorities takes milliseconds.
            self._context = await asyncio.get_running_loop().run_in_executor(None, self._security.ssl_context)
        return self._context

    # SASL.

    async def _authenticate(self, connection: Connection, timeout_s: float) -> float:
        """Authenticate, at first or again; return how long the session lasts, 0 if without limit."""
        security, name = self._security, connection.name
        mechanism = security.mechanism
        if not connection.supports(ApiKey.SASL_HANDSHAKE, _HANDSHAKE_VERSION):
            raise WrongListener(_no_sasl(name, security))
        try:
            async with asyncio.timeout(timeout_s):
                response = await _call(connection, ApiKey.SASL_HANDSHAKE, _HANDSHAKE_VERSION, {"mechanism": mechanism})
                if response.error_code == ErrorCode.unsupported_sasl_mechanism:
                    enabled = ", ".join(response.mechanisms) or "none"
                    raise AuthenticationFailed(
                        f"{name} does not offer {mechanism}; it offers {enabled}: set sasl.mechanism to one of them"
                    )
                if response.error_code == ErrorCode.illegal_sasl_state:
                    raise WrongListener(_no_sasl(name, security))
                if response.error_code != ErrorCode.none:
                    raise AuthenticationFailed(f"{name} refuses {mechanism}: {response.error_code.name}")
                return await self._exchange(connection)
        except TimeoutError:
            raise RequestTimedOut(f"{name} did not complete the authentication within {timeout_s:g} s") from None
        except (SaslError, SecuritySettingError) as error:
            raise AuthenticationFailed(f"authentication with {name} failed: {error}") from None
        except ConnectionLost:
            raise ConnectionLost(f"{name} closed the connection during the authentication") from None

    async def _exchange(self, connection: Connection) -> float:
        security, loop = self._security, asyncio.get_running_loop()
        token = ""
        if security.mechanism == OAUTHBEARER:
            token = await loop.run_in_executor(None, security.bearer_token)
        exchange = client_exchange(
            security.mechanism,
            username=security.username,
            password=security.password,
            token=token,
            nonce=secrets.token_urlsafe(NONCE_BYTES),
        )
        version = min(_AUTHENTICATE_VERSION, connection.version(ApiKey.SASL_AUTHENTICATE))
        message: bytes | None = exchange.first()
        lifetime_s = 0.0
        for _ in range(EXCHANGES_MAX):
            if message is None:
                exchange.verify()
                return lifetime_s
            response = await _call(connection, ApiKey.SASL_AUTHENTICATE, version, {"auth_bytes": message})
            if response.error_code != ErrorCode.none:
                raise AuthenticationFailed(self._refusal(connection.name, response))
            lifetime_s = response.session_lifetime.total_seconds() if version else 0.0
            challenge = bytes(response.auth_bytes)
            if exchange.is_blocking:
                message = await loop.run_in_executor(None, exchange.next, challenge)
            else:
                message = exchange.next(challenge)
        raise SaslError(f"the broker asks for more than {EXCHANGES_MAX} messages")

    def _refusal(self, name: str, response: Any) -> str:
        security = self._security
        reason = f" ({response.error_message})" if response.error_message else ""
        if security.mechanism == OAUTHBEARER:
            return f"{name} refuses the token{reason}: get a new one, and check its audience, scope and issuer"
        return (
            f"{name} refuses {security.who} with {security.mechanism}{reason}: check sasl.username and sasl.password, "
            "and that the user has a credential of this mechanism (chronik user list)"
        )

    def _renew_later(self, connection: Connection, lifetime_s: float, timeout_s: float) -> None:
        task = asyncio.get_running_loop().create_task(self._renew(connection, lifetime_s, timeout_s))
        self._renewals.add(task)
        task.add_done_callback(self._renewals.discard)

    async def _renew(self, connection: Connection, lifetime_s: float, timeout_s: float) -> None:
        """Authenticate again until the connection ends. A failure closes it, and its waiting requests fail."""
        while lifetime_s > 0:
            try:
                async with asyncio.timeout(lifetime_s * REAUTHENTICATE_AT):
                    await connection.wait_closed()
                    return
            except TimeoutError:
                pass
            connection.hold()
            try:
                lifetime_s = await self._authenticate(connection, timeout_s)
            except ClientError as error:
                connection.end(error)
            finally:
                connection.release()


async def _call(connection: Connection, key: ApiKey, version: int, values: dict[str, Any]) -> Any:
    """Send at once, also while other requests are held."""
    body = messages.write_request(key, version, values)
    response = await connection.send(key, version, body)
    try:
        return messages.read_response(key, version, bytes(response))
    except MalformedRequest as error:
        raise BadResponse(f"{connection.name} sent a response that does not parse: {error}") from None


def _no_sasl(name: str, security: ClientSecurity) -> str:
    instead = "SSL" if security.uses_tls else "PLAINTEXT"
    return (
        f"{name} does not authenticate clients: use the address of a SASL listener, or set security.protocol to "
        f"{instead}"
    )


def _lost_while_opening(error: ConnectionLost, security: ClientSecurity) -> ClientError:
    """Explain a connection that ended before it answered anything."""
    if isinstance(error, RequestTimedOut):
        return error
    if not security.uses_tls:
        return LostAtFirstRequest(
            f"{error} before it answered; if its listener uses TLS, set security.protocol to SSL or SASL_SSL"
        )
    if "certificate" in str(error).lower():
        # With TLS 1.3 a server refuses the client's certificate after the handshake, from the client's point of view.
        return CertificateRejected(
            f"{error}: set ssl.certificate.location and ssl.key.location to a certificate that the broker trusts"
        )
    if not security.certificate:
        return ConnectionLost(f"{error} before it answered; {_NEEDS_CERTIFICATE}")
    return error


def tls_failure(name: str, error: Exception, security: ClientSecurity) -> SecurityError:
    """Return a failed TLS handshake as one line with the way out."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason, trusted = error.verify_message, security.authorities or "the system's authorities"
        if error.verify_code in _EXPIRED:
            return CertificateExpired(f"the certificate of {name} is not valid now ({reason}): renew it on the broker")
        if error.verify_code in _WRONG_HOST:
            return CertificateRejected(
                f"the certificate of {name} is for another host ({reason}): use a name that is in it, or issue one "
                "with this name"
            )
        return CertificateRejected(
            f"the certificate of {name} is not trusted ({reason}; trusted: {trusted}): set ssl.ca.location to the "
            "certificate of the authority that issued it"
        )
    if isinstance(error, NotTls):
        return WrongListener(_no_tls(name, security))
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        if error.reason in ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
            return WrongListener(_no_tls(name, security))
        if error.reason is not None and "CERTIFICATE" in error.reason:
            return CertificateRejected(
                f"{name} refuses the client's certificate ({error.reason}): set ssl.certificate.location and "
                "ssl.key.location to one that it trusts"
            )
        return SecurityError(f"the TLS handshake with {name} failed ({error.reason or error}): check its TLS settings")
    return WrongListener(
        f"{name} closed the connection during the TLS handshake: if its listener does not speak TLS, use the "
        f"address of another one, or set security.protocol to {_plain(security)}"
        + ("" if security.certificate else f"; {_NEEDS_CERTIFICATE}")
    )


def _no_tls(name: str, security: ClientSecurity) -> str:
    return (
        f"{name} does not speak TLS: use the address of a TLS listener, or set security.protocol to {_plain(security)}"
    )


def _plain(security: ClientSecurity) -> str:
    return "SASL_PLAINTEXT" if security.uses_sasl else "PLAINTEXT"
