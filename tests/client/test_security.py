"""Settings of a secured client, in librdkafka's and in Java's names."""

from __future__ import annotations

from pathlib import Path

import pytest

from chronik.client.properties import PropertiesError, load_settings, parse_properties, settings_of
from chronik.client.security import ClientSecurity, SecuritySettingError, parse_security
from chronik.local.certificates import create_authority

LIBRDKAFKA = """
# librdkafka
bootstrap.servers=127.0.0.1:9092
security.protocol=SASL_SSL
sasl.mechanism=SCRAM-SHA-512
sasl.username=alice
sasl.password=open=se\\same
ssl.ca.location=/certs/ca.pem
fetch.min.bytes=7
"""
JAVA = r"""
! Java
bootstrap.servers = 127.0.0.1:9092
security.protocol = SASL_SSL
sasl.mechanism = SCRAM-SHA-512
sasl.jaas.config = org.apache.kafka.common.security.scram.ScramLoginModule required \
    username="alice" \
    password="open=se\\\\same";
ssl.truststore.type = PEM
ssl.truststore.location = /certs/ca.pem
fetch.min.bytes = 7
"""
ALICE = ClientSecurity(
    protocol="SASL_SSL",
    mechanism="SCRAM-SHA-512",
    username="alice",
    password="open=se\\same",
    authorities="/certs/ca.pem",
)


@pytest.mark.parametrize("text", [LIBRDKAFKA, JAVA], ids=["librdkafka", "java"])
def test_both_dialects_describe_the_same_client(text: str) -> None:
    settings = settings_of(parse_properties(text))
    assert settings.security == ALICE
    assert settings.bootstrap == "127.0.0.1:9092"
    assert settings.others == {"fetch.min.bytes": "7"}


def test_secrets_are_neither_in_reprs_nor_in_errors() -> None:
    settings = settings_of(parse_properties(LIBRDKAFKA + "my.api.secret=hidden\n"))
    assert "same" not in repr(settings)
    assert "hidden" not in repr(settings)
    with pytest.raises(SecuritySettingError) as raised:
        parse_security({"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.password": "hidden"})
    assert "hidden" not in str(raised.value)
    with pytest.raises(PropertiesError) as broken:
        parse_properties("hidden")
    assert "hidden" not in str(broken.value)


def test_a_java_keystore_in_pem_has_the_certificate_and_the_key() -> None:
    security, _ = parse_security(
        {
            "security.protocol": "ssl",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": "/certs/alice.pem",
            "ssl.key.password": "secret",
            "ssl.endpoint.identification.algorithm": "",
            "enable.ssl.certificate.verification": "false",
        }
    )
    assert (security.certificate, security.key, security.key_password) == ("/certs/alice.pem", "", "secret")
    assert not security.checks_host
    assert not security.checks_certificate


def test_a_token_comes_from_its_file_each_time(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    for setting in (
        {"sasl.oauthbearer.token.file": str(file)},
        {"sasl.oauthbearer.token.endpoint.url": f"file://{file}"},
    ):
        file.write_text("first\n")
        security, _ = parse_security(
            {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER", **setting}
        )
        assert security.bearer_token() == "first"
        file.write_text("second")
        assert security.bearer_token() == "second"


SASL = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}
SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"security.protocol": "TLS"}, "security.protocol=TLS is unknown: use PLAINTEXT, SSL"),
        ({"security.protocol": "SASL_SSL"}, "sasl.mechanism is missing"),
        ({**SASL, "sasl.mechanism": "GSSAPI"}, "GSSAPI is not supported: use PLAIN"),
        ({**SASL, "sasl.username": "alice"}, "PLAIN needs sasl.password"),
        ({**SASL, "sasl.jaas.config": f'{SCRAM_MODULE} required username="a" password="b";'}, "is for SCRAM, not"),
        ({**SASL, "sasl.jaas.config": "com.example.Login required;"}, "sasl.jaas.config is not MODULE"),
        ({**SASL, "sasl.mechanisms": "SCRAM-SHA-256"}, "sasl.mechanism and sasl.mechanisms differ"),
        ({**SASL, "sasl.mechanism": "OAUTHBEARER"}, "OAUTHBEARER needs sasl.oauthbearer.token.file"),
        ({"security.protocol": "SSL", "ssl.truststore.location": "/t.jks"}, "ssl.truststore.type=JKS is not supported"),
        ({"security.protocol": "SSL", "ssl.key.pem": "-----BEGIN"}, "name it with ssl.key.location"),
        ({"security.protocol": "SSL", "ssl.key.location": "/k"}, "needs ssl.certificate.location"),
        ({"security.protocol": "SSL", "ssl.crl.location": "/crl"}, "ssl.crl.location is not supported"),
        ({"security.protocol": "SSL", "ssl.enabled.protocols": "TLSv1"}, "ssl.enabled.protocols=TLSv1"),
        ({"enable.ssl.certificate.verification": "perhaps"}, "neither true nor false"),
    ],
)
def test_wrong_settings_are_errors_that_name_them(properties: dict[str, str], reason: str) -> None:
    with pytest.raises(SecuritySettingError) as raised:
        parse_security(properties)
    assert reason in str(raised.value)


def test_settings_that_the_protocol_does_not_use_are_ignored() -> None:
    security, others = parse_security({"sasl.username": "alice", "sasl.password": "b", "ssl.ca.location": "/c"})
    assert security == ClientSecurity()
    assert others == {}


def test_a_file_with_a_password_is_refused_if_others_can_read_it(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text(LIBRDKAFKA)
    for mode in (0o644, 0o640, 0o606):
        file.chmod(mode)
        with pytest.raises(PropertiesError, match=f"chmod 600 {file}"):
            load_settings(str(file))
    file.chmod(0o600)
    assert load_settings(str(file)).security == ALICE
    assert load_settings(str(file), "10.0.0.1:1").bootstrap == "10.0.0.1:1"
    assert load_settings(str(file)).path == str(file)


def test_a_file_without_a_secret_may_be_public(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("bootstrap.servers=127.0.0.1:1\nsecurity.protocol=SSL\nssl.ca.location=/ca.pem\n")
    file.chmod(0o644)
    assert load_settings(str(file)).security.uses_tls


def test_an_unusable_file_is_one_line_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(PropertiesError, match=r"cannot read .*missing: No such file"):
        load_settings(str(tmp_path / "missing"))
    file = tmp_path / "file"
    file.write_text("security.protocol=SSL\n")
    with pytest.raises(PropertiesError, match=r"bootstrap\.servers is missing"):
        load_settings(str(file))
    file.write_bytes(b"\xff\xfe=1")
    with pytest.raises(PropertiesError, match="not UTF-8"):
        load_settings(str(file))
    file.write_text("bootstrap.servers=a:1\nnot a property\n")
    with pytest.raises(PropertiesError, match="line 2 is not NAME=VALUE"):
        load_settings(str(file))


def test_unusable_certificate_files_are_named(tmp_path: Path) -> None:
    authority = create_authority(tmp_path)
    certificate, _ = authority.issue(tmp_path, "alice", [])
    _, other_key = authority.issue(tmp_path, "bob", [])
    empty = tmp_path / "empty"
    empty.write_text("")
    for security, reason in (
        (ClientSecurity("SSL", authorities=str(tmp_path / "no.pem")), "No such file"),
        (ClientSecurity("SSL", authorities=str(empty)), "no certificates in PEM"),
        (ClientSecurity("SSL", certificate=str(certificate), key=str(other_key)), "does not belong"),
        (ClientSecurity("SSL", certificate=str(certificate), key=str(tmp_path / "no.key")), "No such file"),
    ):
        with pytest.raises(SecuritySettingError, match=reason):
            security.ssl_context()
