"""Signed claims: who a request is from, and until when. Session cookies, bearer tokens, and tokens between nodes.

    KIND "." base64url(claims) "." base64url(HMAC-SHA256(key of the kind, KIND "." base64url(claims)))

The key of each kind is derived from the cluster secret, so every node accepts what any node has signed, and a value of
one kind is never valid as another. A table of sessions would be known to one node only, and a load balancer may send
the next request to another node.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Sequence
from enum import Enum

import msgspec

ID_BYTES = 32
NODE_TOKEN_MS_MAX = 30_000
CHARACTERS_MAX = 4_096
"""Browsers refuse larger cookies."""
LABEL = b"chronik http 1 "
"""Another format needs another label."""


class Kind(Enum):
    SESSION = "session"
    TOKEN = "token"  # noqa: S105 - a kind
    NODE = "node"
    CSRF = "csrf"

    @property
    def purpose(self) -> bytes:
        """What its key is derived for."""
        return LABEL + self.value.encode()


class Claims(msgspec.Struct, frozen=True, array_like=True):
    """What a signed value states.

    `fingerprint` is that of the user's credentials: a new password ends what was signed before. A node signs for a
    user with the user's `host`; with an empty `principal` it signs for itself.
    """

    user: str
    principal: str
    id: bytes
    issued_ms: int
    expires_ms: int
    fingerprint: bytes = b""
    host: str = ""


def sign(key: bytes, kind: Kind, claims: Claims) -> str:
    signed = f"{kind.value}.{_encode(msgspec.msgpack.encode(claims))}"
    return f"{signed}.{_encode(hmac.digest(key, signed.encode(), 'sha256'))}"


def verify(keys: Sequence[bytes], kind: Kind, text: str, now_ms: int) -> Claims | None:
    """Return the claims if one of the keys signed them and they have not expired."""
    if len(text) > CHARACTERS_MAX or not text.isascii():
        return None
    signed, _, mac = text.rpartition(".")
    prefix, _, payload = signed.partition(".")
    if prefix != kind.value:
        return None
    macs = (_encode(hmac.digest(key, signed.encode(), "sha256")) for key in keys)
    if not any(hmac.compare_digest(expected, mac) for expected in macs):
        return None
    try:
        claims = msgspec.msgpack.decode(_decode(payload), type=Claims)
    except (binascii.Error, msgspec.DecodeError):
        return None
    return claims if now_ms < claims.expires_ms else None


def node_token(key: bytes, now_ms: int, principal: str = "", host: str = "") -> str:
    """Return what a node proves to another node's HTTP API with: for a client of its own, or for itself."""
    return sign(key, Kind.NODE, Claims("", principal, b"", now_ms, now_ms + NODE_TOKEN_MS_MAX, b"", host))


def csrf_token(key: bytes, owner: bytes) -> str:
    """Return the token that only a page of this cluster can read. `owner` is the id of its session or visit."""
    return _encode(hmac.digest(key, owner, "sha256"))


def is_csrf_token(keys: Sequence[bytes], owner: bytes, token: str) -> bool:
    encoded = token.encode("utf-8", "replace")
    return any(hmac.compare_digest(csrf_token(key, owner).encode(), encoded) for key in keys)


def encode_id(value: bytes) -> str:
    return _encode(value)


def decode_id(text: str) -> bytes | None:
    """Return an id that `encode_id` wrote, or None."""
    try:
        value = _decode(text)
    except (binascii.Error, ValueError):
        return None
    return value if len(value) == ID_BYTES and _encode(value) == text else None


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
