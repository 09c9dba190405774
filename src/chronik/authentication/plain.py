"""PLAIN (RFC 4616): the client sends its password. Only TLS protects it on the way.

message   [authzid] NUL authcid NUL password
"""

from __future__ import annotations

import hmac

from chronik.authentication.credentials import Credentials
from chronik.authentication.sasl import Authenticated, Outcome, Refused, SaslError
from chronik.authentication.scram import credential_of_salted, salted_password

MESSAGE_BYTES_MAX = 8 * 1024


def check_password(credentials: Credentials, name: str, password: str) -> bool:
    """Return whether `name` is a user with this password. One key derivation, for unknown users too: use a thread."""
    mechanism, credential, is_known = credentials.lookup_for_password(name)
    salted = salted_password(mechanism, password.encode(), credential.salt, credential.iterations)
    derived = credential_of_salted(mechanism, salted, credential.salt, credential.iterations)
    return hmac.compare_digest(derived.stored_key, credential.stored_key) and is_known


class PlainServer:
    """The server's side: one message, then the outcome. As in Kafka, authzid has to be empty or the user itself."""

    is_blocking = True

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        """May be replaced by newer ones until the message arrives."""
        self._is_over = False

    def respond(self, message: bytes) -> Outcome:
        if self._is_over:
            return Refused("a message after the end of the exchange")
        self._is_over = True
        if len(message) > MESSAGE_BYTES_MAX:
            return Refused(f"a message of {len(message)} bytes; allowed are {MESSAGE_BYTES_MAX}")
        try:
            parts = message.decode().split("\0")
        except UnicodeDecodeError:
            return Refused("the message is not UTF-8")
        if len(parts) != 3:
            return Refused(f"the message has {len(parts)} parts, not 3")
        authzid, name, password = parts
        if not name or not password:
            return Refused("the user name or the password is empty", name)
        if authzid not in ("", name):
            return Refused("the authorization id differs from the user name", name)
        if not check_password(self.credentials, name, password):
            return Refused("unknown user or wrong password", name)
        return Authenticated(name)


class PlainClient:
    """The client's side. PLAIN does not prove the server's identity: TLS has to."""

    is_blocking = False

    def __init__(self, username: str, password: str) -> None:
        self._message = b"\0" + username.encode() + b"\0" + password.encode()

    def first(self) -> bytes:
        return self._message

    def next(self, challenge: bytes) -> bytes | None:
        if challenge:
            raise SaslError("the server sends a challenge, which PLAIN does not have")
        return None

    def verify(self) -> None:
        """Nothing to verify."""
