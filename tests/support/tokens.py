"""An issuer of tokens for tests: keys of each type, their public key set, and tokens that it signs."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER = "https://issuer.test"
AUDIENCE = "chronik"
NOW_MS = 1_800_000_000_000


@cache
def private_key(kind: str) -> Any:
    """Return the issuer's key: rsa, small-rsa, ec or ed25519. Each is made once."""
    if kind == "ec":
        return ec.generate_private_key(ec.SECP256R1())
    if kind == "ed25519":
        return ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(65537, 1024 if kind == "small-rsa" else 2048)


def public_jwk(kind: str, key_id: str | None = None, **fields: Any) -> dict[str, Any]:
    algorithm = {"ec": ECAlgorithm, "ed25519": OKPAlgorithm}.get(kind, RSAAlgorithm)
    jwk = json.loads(algorithm.to_jwk(private_key(kind).public_key()))  # type: ignore[attr-defined]
    return {**jwk, **({} if key_id is None else {"kid": key_id}), **fields}


def key_set(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": keys or [public_jwk("rsa", "rsa"), public_jwk("ec", "ec")]}).encode()


def claims(now_ms: int = NOW_MS, **changed: Any) -> dict[str, Any]:
    now_s = now_ms // 1000
    standard = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "iat": now_s, "exp": now_s + 300, "scope": "read write"}
    return {name: value for name, value in {**standard, **changed}.items() if value is not None}


def token(kind: str = "rsa", algorithm: str = "RS256", key_id: str | None = "rsa", **changed: Any) -> str:
    headers = {} if key_id is None else {"kid": key_id}
    return jwt.encode(claims(**changed), private_key(kind), algorithm, headers=headers)


def token_now(sub: str = "alice", lifetime_s: int = 300, key_id: str = "rsa") -> str:
    """Return a token that is valid now."""
    now_s = int(time.time())
    return token(key_id=key_id, now_ms=now_s * 1000, sub=sub, exp=now_s + lifetime_s)
