"""SASL over a wire client: handshakes, messages of a mechanism, and whole authentications."""

from __future__ import annotations

import os
import secrets
import struct
from pathlib import Path
from typing import Any

from tests.node.support_wire import ConnectionEnded, WireClient

from chronik.authentication.clients import client_exchange
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

ALL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
PASSWORDS = {"admin": "admin-secret", "alice": "wonder,land=1"}


def write_users(path: Path, users: dict[str, str] = PASSWORDS, mode: int = 0o600) -> str:
    text = "".join(f"{name}:{password}\n" for name, password in users.items())
    fresh = path.with_suffix(".new")
    fresh.write_text(f"# users of a test\n\n{text}")
    os.chmod(fresh, mode)
    os.replace(fresh, path)
    return str(path)


def handshake(client: WireClient, mechanism: str, version: int = 1) -> Any:
    return client.call(ApiKey.SASL_HANDSHAKE, version, {"mechanism": mechanism})


def authenticate(client: WireClient, message: bytes, version: int = 2) -> Any:
    return client.call(ApiKey.SASL_AUTHENTICATE, version, {"auth_bytes": message})


def send_token(client: WireClient, message: bytes) -> None:
    """Send a message as a frame without a header."""
    client.send_bytes(struct.pack(">i", len(message)) + message)


def receive_token(client: WireClient) -> bytes:
    """Return the next frame, which has no header."""
    data = b""
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        part = client.socket.recv(1 << 16)
        if not part:
            raise ConnectionEnded(f"{len(data)} bytes of an unfinished frame were there")
        data += part
    assert len(data) == 4 + int.from_bytes(data[:4], "big")
    return data[4:]


def log_in(
    client: WireClient,
    mechanism: str = "SCRAM-SHA-512",
    user: str = "admin",
    password: str | None = None,
    *,
    token: str = "",
    version: int = 2,
) -> Any:
    """Authenticate, and return the last answer: of the success, or of the failure."""
    shaken = handshake(client, mechanism)
    assert shaken.error_code is ErrorCode.none, shaken
    password = PASSWORDS.get(user, "no password") if password is None else password
    exchange = client_exchange(
        mechanism, username=user, password=password, token=token, nonce=secrets.token_urlsafe(24)
    )
    answer = authenticate(client, exchange.first(), version)
    while answer.error_code is ErrorCode.none:
        message = exchange.next(answer.auth_bytes)
        if message is None:
            exchange.verify()
            return answer
        answer = authenticate(client, message, version)
    return answer


def is_served(client: WireClient) -> bool:
    return client.metadata().cluster_id is not None


def has_ended(client: WireClient) -> bool:
    """Whether the node closes the connection without a further byte."""
    return client.ended_without_a_byte()
