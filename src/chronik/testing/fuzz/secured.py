"""The client's side of listeners with TLS and SASL: a TLS peer in memory, and the messages of an authentication."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from chronik.authentication.clients import client_exchange
from chronik.authentication.sasl import PLAIN, SCRAM_SHA_256, SCRAM_SHA_512
from chronik.authentication.scram import ITERATIONS_MIN, SALT_BYTES, salted_password
from chronik.testing.fuzz.samples import framed
from chronik.wire import messages
from chronik.wire.api import ApiKey

USER, PASSWORD = "alice", "wonderland"
MECHANISMS = (PLAIN, SCRAM_SHA_256, SCRAM_SHA_512)
SALT = bytes(SALT_BYTES)
NONCE = "n" * 32
HANDSHAKE_VERSION, AUTHENTICATE_VERSION = 1, 2
_STEP_BYTES = 1 << 16


def credential_request() -> bytes:
    """Return the body of AlterUserScramCredentials that creates the user."""
    entry = {
        "name": USER,
        "mechanism": 1,
        "iterations": ITERATIONS_MIN,
        "salt": SALT,
        "salted_password": salted_password(SCRAM_SHA_256, PASSWORD.encode(), SALT, ITERATIONS_MIN),
    }
    values = {"deletions": [], "upsertions": [entry]}
    return messages.write_request(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, values)


def handshake(mechanism: str, version: int = HANDSHAKE_VERSION) -> bytes:
    """Return the frame of a SaslHandshake, with its size."""
    body = messages.write_request(ApiKey.SASL_HANDSHAKE, version, {"mechanism": mechanism})
    return framed(ApiKey.SASL_HANDSHAKE, version, body).frame


def authenticate(message: bytes, version: int = AUTHENTICATE_VERSION) -> bytes:
    """Return the frame of a SaslAuthenticate, with its size."""
    body = messages.write_request(ApiKey.SASL_AUTHENTICATE, version, {"auth_bytes": message})
    return framed(ApiKey.SASL_AUTHENTICATE, version, body).frame


def first_message(mechanism: str, password: str = PASSWORD) -> bytes:
    return client_exchange(mechanism, username=USER, password=password, nonce=NONCE).first()


def authentications() -> list[list[bytes]]:
    """Return beginnings of authentications, as frames without their sizes."""
    found: list[list[bytes]] = []
    for mechanism in MECHANISMS:
        for password in (PASSWORD, "wrong"):
            message = first_message(mechanism, password)
            for version in range(AUTHENTICATE_VERSION + 1):
                found.append([handshake(mechanism)[4:], authenticate(message, version)[4:]])
            found.append([handshake(mechanism, 0)[4:], message])
        final = f"c=biws,r={NONCE}{NONCE},p=AAAA".encode()
        found.append([handshake(mechanism)[4:], authenticate(first_message(mechanism))[4:], authenticate(final)[4:]])
        found.append([handshake(mechanism, 0)[4:], first_message(mechanism), final])
    return found


class TlsPeer:
    """The client of one TLS connection."""

    def __init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        # What the node presents is not the subject here.
        context.verify_mode = ssl.CERT_NONE
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing)
        self.is_done = False

    def shake(self, received: bytes) -> bytes:
        """Take a part of the handshake, and return the next one."""
        self._incoming.write(received)
        try:
            self._tls.do_handshake()
            self.is_done = True
        except ssl.SSLWantReadError:
            pass
        return self._outgoing.read()

    def encrypt(self, data: bytes) -> bytes:
        for at in range(0, len(data), _STEP_BYTES):
            self._tls.write(data[at : at + _STEP_BYTES])
        return self._outgoing.read()

    def decrypt(self, received: bytes) -> bytes:
        self._incoming.write(received)
        parts: list[bytes] = []
        try:
            while part := self._tls.read(_STEP_BYTES):
                parts.append(part)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        return b"".join(parts)


def tls_bytes() -> Sequence[bytes]:
    """Return the beginning of a TLS handshake, and records that do not belong there: what `mutator` damages."""
    hello = TlsPeer().shake(b"")
    alert, renegotiation, heartbeat = (
        b"\x15\x03\x03\x00\x02\x01\x00",
        b"\x16\x03\x03\x00\x04\x00\x00\x00\x00",
        b"\x18\x03\x03",
    )
    data = b"\x17\x03\x03\x00\x20" + bytes(32)
    return hello, hello[:60], alert, renegotiation, heartbeat + b"\x00\x03\x01\xff\xff", data, b"\x16\x03\x01\xff\xff"
