"""A broker that speaks TLS and SASL, with the server side of the real mechanisms behind a fake of the APIs."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.client.fake_broker import FakeBroker, metadata

from chronik.authentication.sasl import SCRAM_SHA_256, SCRAM_SHA_512, Authenticated, Challenge, ServerExchange
from chronik.authentication.scram import ScramCredential, ScramServer, new_credential
from chronik.local.certificates import create_authority
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

SALT = b"salt-of-the-test-broker!"


class SecureBroker(FakeBroker):
    """Users have SCRAM credentials of both hashes. One connection authenticates at a time."""

    def __init__(
        self,
        users: Mapping[str, str],
        *,
        mechanisms: tuple[str, ...] = (SCRAM_SHA_512, SCRAM_SHA_256),
        session_lifetime_ms: int = 0,
        context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(context=context)
        self.users = dict(users)
        self.mechanisms = mechanisms
        self.session_lifetime_ms = session_lifetime_ms
        self.authenticated: list[str] = []
        self._exchange: ServerExchange | None = None
        self.versions |= {ApiKey.SASL_HANDSHAKE: (0, 1), ApiKey.SASL_AUTHENTICATE: (0, 2)}
        self.handlers |= {
            ApiKey.SASL_HANDSHAKE: self._handshake,
            ApiKey.SASL_AUTHENTICATE: self._authenticate,
            ApiKey.METADATA: lambda request: metadata(self),
        }

    def _handshake(self, request: Any) -> dict[str, Any]:
        if request.mechanism not in self.mechanisms:
            code = ErrorCode.unsupported_sasl_mechanism.value
            return {"error_code": code, "mechanisms": list(self.mechanisms)}
        mechanism = request.mechanism

        def credential(mechanism: str, name: str) -> tuple[ScramCredential, bool]:
            password = self.users.get(name, "nobody knows this one")
            return new_credential(mechanism, password, SALT), name in self.users

        self._exchange = ScramServer(mechanism, credential, "server-nonce-of-the-broker")
        return {"error_code": 0, "mechanisms": list(self.mechanisms)}

    def _authenticate(self, request: Any) -> dict[str, Any]:
        assert self._exchange is not None
        outcome = self._exchange.respond(bytes(request.auth_bytes))
        if isinstance(outcome, Challenge):
            return _answer(outcome.data)
        if isinstance(outcome, Authenticated):
            self.authenticated.append(outcome.name)
            return _answer(outcome.data, session_lifetime=self.session_lifetime_ms)
        code = ErrorCode.sasl_authentication_failed.value
        return _answer(b"", error_code=code, error_message="Authentication failed")


def _answer(data: bytes, **more: Any) -> dict[str, Any]:
    return {"error_code": 0, "error_message": None, "auth_bytes": data, "session_lifetime": 0, **more}


def server_context(folder: Path, *, hosts: tuple[str, ...] = ("127.0.0.1",), **issued: Any) -> ssl.SSLContext:
    """Create an authority in `folder` (ca.pem), and return a server's context with a certificate of it."""
    certificate, key = create_authority(folder).issue(folder, "broker", hosts, **issued)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
