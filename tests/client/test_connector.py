"""TLS and SASL from the client's side, and the line that a person sees when they fail."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from pathlib import Path

import pytest
from tests.client.fake_broker import FakeBroker, metadata
from tests.client.secure_broker import SecureBroker, server_context

from chronik.client.cluster import Cluster
from chronik.client.connection import Connection
from chronik.client.connector import Connector
from chronik.client.errors import (
    AuthenticationFailed,
    CertificateExpired,
    CertificateRejected,
    ClientError,
    LostAtFirstRequest,
    SecurityError,
    WrongListener,
)
from chronik.client.groups import Groups
from chronik.client.security import ClientSecurity
from chronik.local.certificates import load_authority
from chronik.wire.api import ApiKey
from chronik.wire.errors import KafkaError

EMPTY = {"topics": [], "allow_auto_topic_creation": False}


def alice(folder: Path | None = None, **more: str) -> ClientSecurity:
    protocol = "SASL_PLAINTEXT" if folder is None else "SASL_SSL"
    authorities = "" if folder is None else str(folder / "ca.pem")
    settings = {"mechanism": "SCRAM-SHA-512", "username": "alice", "password": "sesame", **more}
    return ClientSecurity(protocol=protocol, authorities=authorities, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_a_cluster_authenticates_over_tls(tmp_path: Path, mechanism: str) -> None:
    context = server_context(tmp_path)
    async with SecureBroker({"alice": "sesame"}, context=context) as broker:
        security = alice(tmp_path, mechanism=mechanism)
        async with Cluster([broker.address], security=security) as cluster:
            assert list((await cluster.layout([])).brokers) == [1]
        assert broker.authenticated == ["alice"]


async def test_a_wrong_password_fails_at_once_and_is_not_shown(tmp_path: Path) -> None:
    async with SecureBroker({"alice": "sesame"}, context=server_context(tmp_path)) as broker:
        async with Cluster([broker.address] * 3, security=alice(tmp_path, password="guess")) as cluster:
            with pytest.raises(AuthenticationFailed) as raised:
                await cluster.layout([])
        line = str(raised.value)
        assert "refuses User:alice with SCRAM-SHA-512" in line
        assert "check sasl.username and sasl.password" in line
        assert "guess" not in line
        assert broker.times_asked(ApiKey.SASL_HANDSHAKE) == 1


async def test_a_mechanism_that_is_not_enabled_lists_the_enabled_ones() -> None:
    async with SecureBroker({"alice": "sesame"}, mechanisms=("SCRAM-SHA-256",)) as broker:
        with pytest.raises(AuthenticationFailed, match="does not offer SCRAM-SHA-512; it offers SCRAM-SHA-256"):
            await Connector(alice()).open(*broker.address)


async def test_a_broker_that_offers_a_weaker_mechanism_gets_no_password() -> None:
    """A downgrade: with PLAIN, whoever is in the middle would read the password."""
    async with SecureBroker({"alice": "sesame"}, mechanisms=("PLAIN",)) as broker:
        with pytest.raises(AuthenticationFailed, match="does not offer SCRAM-SHA-512; it offers PLAIN"):
            await Connector(alice()).open(*broker.address)
        assert broker.times_asked(ApiKey.SASL_AUTHENTICATE) == 0


async def test_a_broker_that_does_not_know_the_password_is_an_impostor() -> None:
    async with SecureBroker({"alice": "sesame"}) as broker:
        answers = iter([None, b""])
        original = broker.handlers[ApiKey.SASL_AUTHENTICATE]

        def impostor(request: object) -> object:
            data = next(answers)
            answer = original(request)
            return answer if data is None else {**dict(answer or {}), "auth_bytes": b"v=AAAA", "error_code": 0}

        broker.handlers[ApiKey.SASL_AUTHENTICATE] = impostor  # type: ignore[assignment]
        with pytest.raises(AuthenticationFailed, match="does not know the credentials"):
            await Connector(alice()).open(*broker.address)


async def test_an_untrusted_certificate_names_the_setting_of_the_authority(tmp_path: Path) -> None:
    server_context(tmp_path / "other")
    async with SecureBroker({}, context=server_context(tmp_path / "own")) as broker:
        with pytest.raises(CertificateRejected, match=r"not trusted .*: set ssl\.ca\.location"):
            await Connector(alice(tmp_path / "other")).open(*broker.address)


async def test_a_certificate_for_another_host_is_refused_unless_hosts_are_not_checked(tmp_path: Path) -> None:
    async with SecureBroker({"alice": "sesame"}, context=server_context(tmp_path, hosts=("elsewhere",))) as broker:
        with pytest.raises(CertificateRejected, match="is for another host"):
            await Connector(alice(tmp_path)).open(*broker.address)
        unchecked = ClientSecurity(
            "SASL_SSL", "SCRAM-SHA-512", "alice", "sesame", authorities=str(tmp_path / "ca.pem"), checks_host=False
        )
        (await Connector(unchecked).open(*broker.address)).close()


async def test_an_expired_certificate_has_its_own_error(tmp_path: Path) -> None:
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=10)
    async with SecureBroker({}, context=server_context(tmp_path, days=9, since=since)) as broker:
        with pytest.raises(CertificateExpired, match=r"not valid now \(certificate has expired\): renew it"):
            await Connector(alice(tmp_path)).open(*broker.address)


async def test_a_plaintext_listener_addressed_with_tls_is_a_wrong_listener(tmp_path: Path) -> None:
    server_context(tmp_path)
    async with FakeBroker() as broker:
        with pytest.raises(WrongListener, match="not speak TLS") as raised:
            await Connector(alice(tmp_path)).open(*broker.address, timeout_s=5)
        assert "SASL_PLAINTEXT" in str(raised.value)


async def test_a_tls_listener_addressed_in_plaintext_is_a_wrong_listener() -> None:
    async def alert(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4)
        writer.write(bytes.fromhex("15030300020246"))  # what OpenSSL sends: a fatal alert
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(alert, "127.0.0.1", 0)
    async with server:
        with pytest.raises(WrongListener, match=r"speaks TLS, and this client does not: set security\.protocol"):
            await Connection.open(*server.sockets[0].getsockname())


async def test_a_broker_without_sasl_is_a_wrong_listener() -> None:
    async with FakeBroker() as broker:
        with pytest.raises(WrongListener, match="does not authenticate clients"):
            await Connector(alice()).open(*broker.address)


async def test_a_client_that_should_authenticate_learns_it_after_three_lost_connections() -> None:
    async with FakeBroker() as broker:

        def close(request: object) -> None:
            broker.hang_up()

        broker.handlers[ApiKey.METADATA] = close
        async with Cluster([broker.address], timeout_s=30) as cluster:
            with pytest.raises(LostAtFirstRequest, match=r"if its listener requires SASL, set security\.protocol"):
                async with asyncio.timeout(10):
                    await cluster.layout([])
        assert broker.times_asked(ApiKey.METADATA) == 3


async def test_the_client_authenticates_again_before_its_session_ends() -> None:
    async with SecureBroker({"alice": "sesame"}, session_lifetime_ms=200) as broker:
        connection = await Connector(alice()).open(*broker.address)
        async with asyncio.timeout(10):
            while len(broker.authenticated) < 3:
                await connection.call(ApiKey.METADATA, EMPTY)
        assert not connection.is_closed
        # A broker accepts only SASL requests while a client authenticates.
        keys = [key for key, _ in broker.asked]
        for at, key in enumerate(keys):
            if key == ApiKey.SASL_HANDSHAKE:
                assert keys[at + 1 : at + 3] == [ApiKey.SASL_AUTHENTICATE] * 2
        connection.close()


async def test_a_refused_reauthentication_ends_the_connection_with_its_reason() -> None:
    async with SecureBroker({"alice": "sesame"}, session_lifetime_ms=100) as broker:
        connection = await Connector(alice()).open(*broker.address)
        broker.users["alice"] = "changed"
        async with asyncio.timeout(10):
            reason = await connection.wait_closed()
        assert isinstance(reason, AuthenticationFailed)


async def test_unusable_settings_are_reported_before_anything_is_sent(tmp_path: Path) -> None:
    async with FakeBroker({ApiKey.METADATA: lambda request: metadata()}) as broker:
        with pytest.raises(SecurityError, match=r"ssl\.ca\.location .*No such file"):
            await Connector(alice(tmp_path / "nowhere")).open(*broker.address)


async def test_an_authorization_error_names_the_principal_and_the_operation() -> None:
    async with SecureBroker({"alice": "sesame"}) as broker:
        broker.versions[ApiKey.DELETE_GROUPS] = (0, 2)
        broker.handlers |= {
            ApiKey.DELETE_GROUPS: lambda request: {"results": [{"group_id": "g", "error_code": 30}]},
            ApiKey.FIND_COORDINATOR: lambda request: {
                "coordinators": [{"key": "g", "node_id": 1, "host": "h", "port": 1, "error_code": 0}]
            },
        }
        async with Cluster([broker.address], security=alice()) as cluster:
            with pytest.raises(KafkaError, match="User:alice is not allowed to DELETE"):
                await Groups(cluster).delete("g")


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
async def test_a_listener_that_requires_a_certificate_names_the_settings(tmp_path: Path, version: str) -> None:
    context = server_context(tmp_path)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(str(tmp_path / "ca.pem"))
    authority = load_authority(tmp_path)
    certificate, key = authority.issue(tmp_path, "alice", [])
    authorities = str(tmp_path / "ca.pem")
    async with FakeBroker(context=context) as broker:
        without = ClientSecurity("SSL", authorities=authorities, tls_versions=(version,))
        with pytest.raises(ClientError, match=r"set ssl\.certificate\.location and ssl\.key\.location"):
            await Connector(without).open(*broker.address)
        own = ClientSecurity("SSL", authorities=authorities, certificate=str(certificate), key=str(key))
        (await Connector(own).open(*broker.address)).close()


async def test_a_connection_that_ends_without_an_answer_mentions_tls() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4)
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    async with server, Cluster([server.sockets[0].getsockname()]) as cluster:
        with pytest.raises(LostAtFirstRequest, match=r"if its listener uses TLS, set security\.protocol"):
            async with asyncio.timeout(10):
                await cluster.layout([])
