from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chronik.client.endpoint import Endpoint
from chronik.node.config import ConfigError, ListenerConfig, NodeConfig, load

CERTIFICATE = {"tls.certificate": "node.pem", "tls.key": "node.key"}
PUBLIC = {"listen.kafka": "192.0.2.7:9092"}


def listeners(**more: Any) -> dict[str, Any]:
    return {"listeners": [{"name": "INSIDE", "listen": "127.0.0.1:9192", "protocol": "PLAINTEXT", **more}]}


def test_the_first_listener_is_that_of_listen_kafka() -> None:
    config = load(flags={"listen.kafka": "127.0.0.1:9292", "advertise.kafka": "a:1", **listeners()})
    first, second = config.kafka_listeners
    assert first == ListenerConfig("KAFKA", "127.0.0.1:9292", "PLAINTEXT", "a:1")
    assert (second.name, second.endpoint, second.advertised()) == ("INSIDE", ("127.0.0.1", 9192), ("127.0.0.1", 9192))


def test_a_listener_on_any_free_port_advertises_the_bound_one() -> None:
    assert ListenerConfig("A", "127.0.0.1:0", "PLAINTEXT").advertised(4711) == Endpoint("127.0.0.1", 4711)
    assert ListenerConfig("A", "127.0.0.1:0", "PLAINTEXT", "b:9").advertised(4711) == Endpoint("b", 9)


def test_listeners_and_lists_are_read_from_the_environment() -> None:
    config = load(
        env={
            "CHRONIK_LISTENERS": "INSIDE=SSL://127.0.0.1:9192,OUT=SASL_SSL://127.0.0.1:9292@broker.example:443",
            "CHRONIK_TLS_CERTIFICATE": "node.pem",
            "CHRONIK_TLS_KEY": "node.key",
            "CHRONIK_SASL_MECHANISMS": "PLAIN, SCRAM-SHA-256",
            "CHRONIK_AUTHORIZATION_SUPER_USERS": "User:CN=a,O=b;User:c",
            "CHRONIK_TLS_PRINCIPAL_MAPPING_RULES": r"RULE:^CN=(.*?),.*$/$1/L,DEFAULT",
        }
    )
    assert config.listeners == (
        ListenerConfig("INSIDE", "127.0.0.1:9192", "SSL"),
        ListenerConfig("OUT", "127.0.0.1:9292", "SASL_SSL", "broker.example:443"),
    )
    assert config.sasl.mechanisms == ("PLAIN", "SCRAM-SHA-256")
    assert config.authorization.super_users == ("User:CN=a,O=b", "User:c")
    assert config.tls.principal_mapping_rules == (r"RULE:^CN=(.*?),.*$/$1/L", "DEFAULT")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (listeners(name="in side"), "is not a name"),
        (listeners(name="kafka"), "two listeners are named kafka"),
        (listeners(listen="9192"), "listeners INSIDE: '9192' is not HOST:PORT"),
        (listeners(listen="127.0.0.1:9092"), "the address of another listener"),
        (listeners(listen="0.0.0.0:9192"), 'add advertise = "HOST:9192"'),
        (listeners(advertise="0.0.0.0:9192"), "is not an address to connect to"),
        (listeners(protocol="TLS"), "invalid enum value 'TLS'"),
        (listeners(protocol="SSL"), "tls.certificate is not set"),
        (listeners(protocol="SASL_SSL") | {"tls.certificate": "a"}, "tls.key is not set"),
        (listeners(protocol="SASL_PLAINTEXT") | {"sasl.mechanisms": []}, "sasl.mechanisms is empty"),
        ({"security.internal_tls": True, **CERTIFICATE}, "security.internal_tls needs tls.authorities"),
        ({"tls.client_auth": "required"}, "needs tls.authorities"),
        ({"tls.protocols": []}, "tls.protocols is empty"),
        ({"tls.protocols": ["TLSv1.1"]}, "TLSv1.1"),
        ({"tls.handshake_timeout_ms": 0}, "handshake_timeout_ms = 0 is too small"),
    ],
)
def test_an_impossible_listener_is_an_error_that_names_it(flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(flags=flags)
    assert reason in str(refused.value)


def test_the_error_names_an_unknown_key_of_a_listener(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[[listeners]]\nname = "A"\nlisten = "127.0.0.1:1"\nprotocol = "SSL"\nadvertize = "b:1"\n')
    with pytest.raises(ConfigError, match=r"unknown key listeners\.advertize.*did you mean listeners\.advertise\?"):
        load(str(file))
    with pytest.raises(ConfigError, match=r"CHRONIK_LISTENERS: .*is not NAME=PROTOCOL://HOST:PORT"):
        load(env={"CHRONIK_LISTENERS": "INSIDE=127.0.0.1:9192"})


@pytest.mark.parametrize(
    ("flags", "cure"),
    [
        (PUBLIC, 'set security.protocol = "SASL_SSL"'),
        ({**PUBLIC, "security.protocol": "SASL_PLAINTEXT"}, 'set security.protocol = "SASL_SSL"'),
        ({**PUBLIC, **CERTIFICATE, "security.protocol": "SSL"}, 'tls.client_auth = "required"'),
        (listeners(listen="192.0.2.7:9192"), "listener INSIDE = 192.0.2.7:9192 is reachable"),
        ({"listen.http": "192.0.2.7:6092"}, "security.http_tls = true"),
        ({"listen.http": "192.0.2.7:6092", **CERTIFICATE, "security.http_tls": True}, "security.http_login = true"),
        ({"listen.internal": "192.0.2.7:5092"}, "security.internal_tls = true"),
        ({"listen.kafka": "broker.example:9092"}, "--insecure"),
    ],
)
def test_an_unprotected_listener_beyond_loopback_is_refused(flags: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError, match="reachable from other machines without") as refused:
        load(flags=flags)
    assert cure in str(refused.value)
    accepted = load(flags={**flags, "security.insecure": True})
    assert len(accepted.warnings()) == 1


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {**PUBLIC, **CERTIFICATE, "security.protocol": "SASL_SSL"},
        {
            **PUBLIC,
            **CERTIFICATE,
            "security.protocol": "SSL",
            "tls.client_auth": "required",
            "tls.authorities": "ca.pem",
        },
        {"listen.http": "192.0.2.7:1", **CERTIFICATE, "security.http_tls": True, "security.http_login": True},
        {"listen.internal": "192.0.2.7:1", **CERTIFICATE, "security.internal_tls": True, "tls.authorities": "ca.pem"},
        listeners(protocol="SASL_PLAINTEXT"),
    ],
)
def test_a_protected_listener_starts_without_a_warning(flags: dict[str, Any]) -> None:
    assert load(flags=flags).warnings() == []


def test_a_node_without_tls_needs_no_certificate() -> None:
    assert not NodeConfig().uses_tls
    assert load(flags={**CERTIFICATE, "security.http_tls": True}).uses_tls


def test_acls_without_a_login_to_the_page_are_a_warning() -> None:
    (warning,) = load(flags={"authorization.enabled": True}).warnings()
    assert "security.http_login = true" in warning
    assert load(flags={"authorization.enabled": True, "security.http_login": True}).warnings() == []
