"""--properties: one file of client settings for every command that connects to a cluster, and for every client."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.broker_thread import serving
from tests.cli.run_chronik import chronik
from tests.client.secure_broker import SecureBroker

from chronik.cli import app
from chronik.cli.client_properties import aiokafka_settings, kafka_python_settings, librdkafka_settings
from chronik.cli.errors import CliError
from chronik.client.properties import ClientSettings, settings_of
from chronik.local.certificates import create_authority

UNCONNECTED = {
    *("start", "version", "demo", "certs create", "pipeline maintain"),
    *(f"cluster {name}" for name in ("up", "status", "down", "stop", "start", "kill", "pause", "resume")),
    *(f"cluster {name}" for name in ("add", "remove", "restore-metadata")),
}
"""Commands that work on folders and local processes; those of `cluster` find the nodes in theirs."""


def leaves(group: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the words of each command that has no subcommands."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*words, name))
        else:
            yield " ".join((*words, name))


LEAVES = tuple(leaves(app.command([])))


@pytest.mark.parametrize("words", LEAVES)
def test_every_command_that_connects_takes_properties(words: str) -> None:
    command: Any = app.command(words.split()[:1])
    for word in words.split():
        command = command.commands[word]
    options = {option for parameter in command.params for option in parameter.opts}
    expected = set() if words in UNCONNECTED else {"--bootstrap", "-b", "--properties"}
    assert options & {"--bootstrap", "-b", "--properties"} == expected


def test_all_commands_that_do_not_connect_exist() -> None:
    assert set(LEAVES) >= UNCONNECTED


def properties(folder: Path, text: str) -> str:
    file = folder / "client.properties"
    file.write_text(text)
    file.chmod(0o600)
    return str(file)


def test_the_file_names_the_brokers_unless_a_flag_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = properties(tmp_path, "bootstrap.servers=127.0.0.1:1\n")
    assert app.main(["topic", "list", "--properties", file]) == 2
    assert "127.0.0.1:1:" in capsys.readouterr().err
    assert app.main(["topic", "list", "--properties", file, "-b", "127.0.0.1:2"]) == 2
    assert "127.0.0.1:2:" in capsys.readouterr().err


def test_the_environment_names_the_file_unless_a_flag_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHRONIK_PROPERTIES", str(tmp_path / "missing"))
    assert app.main(["group", "list"]) == 2
    assert "missing: No such file" in capsys.readouterr().err
    file = properties(tmp_path, "bootstrap.servers=127.0.0.1:1\n")
    assert app.main(["group", "list", "--properties", file]) == 2
    assert "127.0.0.1:1:" in capsys.readouterr().err


def test_a_public_file_with_a_password_is_refused_with_one_line(tmp_path: Path) -> None:
    file = properties(
        tmp_path,
        "bootstrap.servers=127.0.0.1:1\nsecurity.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\n"
        "sasl.username=a\nsasl.password=hidden\n",
    )
    Path(file).chmod(0o644)
    for command in (("topic", "list"), ("consume", "t"), ("verify",), ("doctor", "t"), ("bench", "produce")):
        outcome = chronik(*command, "--properties", file)
        assert outcome.code == 2
        assert f"chmod 600 {file}" in outcome.error_line
        assert "hidden" not in outcome.err


def test_wrong_settings_are_one_line_that_names_the_file(tmp_path: Path) -> None:
    file = properties(tmp_path, "bootstrap.servers=127.0.0.1:1\nsecurity.protocol=TLS\n")
    outcome = chronik("topic", "list", "--properties", file)
    assert outcome.code == 2
    assert outcome.error_line.startswith(f"chronik: --properties: {file}: security.protocol=TLS is unknown")


def secured(folder: Path, **more: str) -> ClientSettings:
    create_authority(folder)
    return settings_of(
        {
            "bootstrap.servers": "127.0.0.1:1",
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": "alice",
            "sasl.password": "sesame",
            "ssl.ca.location": str(folder / "ca.pem"),
            **more,
        }
    )


def test_librdkafka_receives_what_it_knows(tmp_path: Path) -> None:
    from confluent_kafka import Producer

    settings = secured(tmp_path, **{"linger.ms": "3", "max.poll.interval.ms": "9000", "key.serializer": "a.b.C"})
    given = librdkafka_settings(settings)
    Producer(given)
    assert given["sasl.mechanism"] == "SCRAM-SHA-512"
    assert given["ssl.ca.location"] == str(tmp_path / "ca.pem")
    assert given["linger.ms"] == "3"
    assert "key.serializer" not in given


def test_a_value_that_librdkafka_refuses_is_an_error() -> None:
    settings = settings_of({"bootstrap.servers": "127.0.0.1:1", "fetch.min.bytes": "soon"})
    with pytest.raises(CliError, match=r"librdkafka refuses .*fetch\.min\.bytes"):
        librdkafka_settings(settings)


def test_kafka_python_and_aiokafka_receive_the_same_security(tmp_path: Path) -> None:
    settings = secured(tmp_path)
    for given in (kafka_python_settings(settings), aiokafka_settings(settings)):
        assert given["security_protocol"] == "SASL_SSL"
        assert given["sasl_plain_username"] == "alice"
        assert isinstance(given["ssl_context"], ssl.SSLContext)
        assert given["ssl_context"].check_hostname


def test_tokens_reach_every_client(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("header.claims.signature")
    settings = secured(tmp_path, **{"sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.token.file": str(file)})
    assert librdkafka_settings(settings)["oauth_cb"]("")[0] == "header.claims.signature"
    assert kafka_python_settings(settings)["sasl_oauth_token_provider"].token() == "header.claims.signature"
    assert "sasl_oauth_token_provider" in aiokafka_settings(settings)


def test_produce_and_consume_name_a_wrong_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(SecureBroker({"alice": "sesame"})) as address:
        file = properties(
            tmp_path,
            f"bootstrap.servers={address}\nsecurity.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-512\n"
            "sasl.username=alice\nsasl.password=guess\n",
        )
        assert app.main(["consume", "orders", "--properties", file]) == 2
    line = capsys.readouterr().err
    assert "refuses User:alice with SCRAM-SHA-512" in line
    assert "guess" not in line
