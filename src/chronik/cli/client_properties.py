"""Client settings, translated for the clients that commands drive: librdkafka, kafka-python, aiokafka, and Java's."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from chronik.authentication.sasl import OAUTHBEARER
from chronik.cli.errors import CliError
from chronik.client.properties import ClientSettings, Target
from chronik.client.security import ClientSecurity

_SILENT = logging.Logger("chronik.librdkafka", logging.CRITICAL + 1)

TOKEN_LIFETIME_S = 300.0
"""How long librdkafka keeps a token before it asks again. The broker checks the token's own lifetime."""


def librdkafka_settings(target: Target) -> dict[str, Any]:
    """Return the settings for confluent-kafka: addresses, security, and the user's other properties."""
    settings = ClientSettings.of(target)
    security = settings.security
    servers = ",".join(str(endpoint) for endpoint in settings.endpoints)
    given: dict[str, Any] = {**known_to_librdkafka(settings.others), "bootstrap.servers": servers}
    if security.protocol == "PLAINTEXT":
        return given
    given["security.protocol"] = security.protocol
    if security.uses_tls:
        given |= _librdkafka_tls(security)
    if security.uses_sasl:
        given["sasl.mechanism"] = security.mechanism
        if security.mechanism == OAUTHBEARER:
            given["oauth_cb"] = TokenSource(security)
        else:
            given |= {"sasl.username": security.username, "sasl.password": security.password}
    return given


def _librdkafka_tls(security: ClientSecurity) -> dict[str, Any]:
    paths = {
        "ssl.ca.location": security.authorities,
        "ssl.certificate.location": security.certificate,
        "ssl.key.location": security.key or security.certificate,
        "ssl.key.password": security.key_password,
    }
    return {
        **{name: value for name, value in paths.items() if value},
        "enable.ssl.certificate.verification": security.checks_certificate,
        "ssl.endpoint.identification.algorithm": "https" if security.checks_host else "none",
    }


def known_to_librdkafka(others: Mapping[str, str]) -> dict[str, str]:
    """Return the properties that librdkafka knows: it refuses others, and files may have those of Java's clients."""
    from confluent_kafka import KafkaException, Producer

    known = dict(others)
    while known:
        try:
            Producer({**known, "logger": _SILENT, "bootstrap.servers": ""})
        except KafkaException as error:
            match = re.search(r'No such configuration property: "([^"]+)"', str(error))
            if match is None or match[1] not in known:
                raise CliError(f"--properties: librdkafka refuses a property: {error.args[0].str()}") from None
            del known[match[1]]
        else:
            break
    return known


class TokenSource:
    """Returns a token whenever librdkafka asks for one: its file may have a new one by then."""

    def __init__(self, security: ClientSecurity) -> None:
        self._security = security

    def __call__(self, _: str) -> tuple[str, float]:
        import time

        return self._security.bearer_token(), time.time() + TOKEN_LIFETIME_S


def kafka_python_settings(target: Target) -> dict[str, Any]:
    """Return the arguments for kafka-python's and aiokafka's clients: addresses and security."""
    settings = ClientSettings.of(target)
    security = settings.security
    given: dict[str, Any] = {"bootstrap_servers": [str(endpoint) for endpoint in settings.endpoints]}
    if security.protocol == "PLAINTEXT":
        return given
    given["security_protocol"] = security.protocol
    if security.uses_tls:
        given["ssl_context"] = security.ssl_context()
    if security.uses_sasl:
        given["sasl_mechanism"] = security.mechanism
        if security.mechanism == OAUTHBEARER:
            given["sasl_oauth_token_provider"] = _kafka_python_token(security)
        else:
            given |= {"sasl_plain_username": security.username, "sasl_plain_password": security.password}
    return given


def _kafka_python_token(security: ClientSecurity) -> Any:
    from kafka.net.sasl.oauth import AbstractTokenProvider

    class Provider(AbstractTokenProvider):  # type: ignore[misc]
        def token(self) -> str:
            return security.bearer_token()

    return Provider()


def aiokafka_settings(target: Target) -> dict[str, Any]:
    """Return the arguments for aiokafka's clients: those of kafka-python, but tokens come from a coroutine."""
    settings = ClientSettings.of(target)
    security = settings.security
    if security.mechanism != OAUTHBEARER:
        return kafka_python_settings(settings)
    from aiokafka.abc import AbstractTokenProvider

    class Provider(AbstractTokenProvider):  # type: ignore[misc]
        async def token(self) -> str:
            return security.bearer_token()

    given: dict[str, Any] = {
        "bootstrap_servers": [str(endpoint) for endpoint in settings.endpoints],
        "security_protocol": security.protocol,
        "sasl_mechanism": OAUTHBEARER,
        "sasl_oauth_token_provider": Provider(),
    }
    if security.uses_tls:
        given["ssl_context"] = security.ssl_context()
    return given
