"""A node's TLS listener: which clients it accepts, what it logs about others, and what strangers cannot exhaust."""

from __future__ import annotations

import asyncio
import datetime
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.node.cluster_harness import LocalNodes
from tests.support.certificates import Certificates
from tests.support.eventually import until

from chronik.authorization.acls import ANONYMOUS
from chronik.client.connection import Connection
from chronik.client.errors import ClientError, Unreachable
from chronik.node.broker import Broker
from chronik.node.config import ConfigError, ListenerConfig, Security
from chronik.node.serving import tls as serving_tls
from chronik.wire import frames
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.fetch import FetchPartition, FetchRequest, FetchTopic, write_fetch_request
from chronik.wire.produce import ProduceRequest, ProduceTopic, write_produce_request

PLAINTEXT_REQUEST = b"\x00\x00\x00\x12\x00\x12\x00\x00\x00\x00\x00\x01\x00\x08outsider"


class Scene:
    """One node with a TLS listener, named KAFKA, and a plaintext one."""

    def __init__(self, folder: Path) -> None:
        self.certificates = Certificates(folder / "certificates")
        self.nodes = LocalNodes(folder, 1)
        self.broker: Broker

    async def start(self, **tls: Any) -> Broker:
        plain = ListenerConfig("PLAIN", "127.0.0.1:0", "PLAINTEXT")
        settings: dict[str, Any] = {
            "security": Security(protocol="SSL"),
            "tls": self.certificates.tls(**tls),
            "listeners": (plain,),
        }
        self.broker = await self.nodes.start(1, self.nodes.config(1, **settings, default_replication_factor=1))
        return self.broker

    async def connect(self, client: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> Connection:
        context = self.certificates.client() if client is None else client
        return await Connection.open(host, self.broker.server.port, ssl=context, timeout_s=5.0)

    @property
    def port(self) -> int:
        return self.broker.server.port

    @property
    def reasons(self) -> list[str]:
        return [line["reason"] for line in self.nodes.events(1, "connection_refused")]

    async def logged(self, text: str) -> str:
        def found() -> str | None:
            return next((reason for reason in self.reasons if text in reason), None)

        return str(await until(found, f"{text!r} is logged"))

    def principals(self) -> list[str]:
        return [connection.access.principal for connection in self.broker.server._connections]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path)
    async with made.nodes:
        yield made


# -- clients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_client_of_each_tls_version_is_served(scene: Scene, version: ssl.TLSVersion) -> None:
    await scene.start()
    client = scene.certificates.client()
    client.minimum_version = client.maximum_version = version
    connection = await scene.connect(client)
    answer = await connection.call(ApiKey.METADATA, {"topics": None})
    assert [(broker.host, broker.port) for broker in answer.brokers] == [("127.0.0.1", scene.port)]
    assert scene.principals() == [ANONYMOUS]
    connection.close()


async def test_client_certificate_names_the_principal(scene: Scene) -> None:
    await scene.start(client_auth="requested")
    scene.certificates.issue("alice")
    connection = await scene.connect(scene.certificates.client("alice"))
    assert scene.principals() == ["User:CN=alice"]
    (access,) = [connection.access for connection in scene.broker.server._connections]
    assert access.host == "127.0.0.1"
    connection.close()


async def test_required_certificate_is_required(scene: Scene) -> None:
    await scene.start(client_auth="required")
    with pytest.raises(ClientError):
        await scene.connect()
    await scene.logged("the client has no certificate, and this listener requires one")
    scene.certificates.issue("alice")
    (await scene.connect(scene.certificates.client("alice"))).close()


async def test_expired_client_certificate_is_refused(scene: Scene) -> None:
    await scene.start(client_auth="required")
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3)
    scene.certificates.issue("late", since=since, days=1)
    with pytest.raises(ClientError):
        await scene.connect(scene.certificates.client("late"))
    await scene.logged("the client's certificate was refused: certificate has expired")
    assert scene.principals() == []


@pytest.mark.parametrize(
    ("name", "reason"), [("node", "unable to get local issuer certificate"), ("ca", "self-signed certificate")]
)
async def test_client_certificate_of_another_authority_is_refused(
    scene: Scene, tmp_path: Path, name: str, reason: str
) -> None:
    """Also one that is its own authority."""
    await scene.start(client_auth="requested")
    stranger = Certificates(tmp_path / "stranger")
    client = scene.certificates.client()
    client.load_cert_chain(stranger.folder / f"{name}.pem", stranger.folder / f"{name}.key")
    with pytest.raises(ClientError):
        await scene.connect(client)
    await scene.logged(f"the client's certificate was refused: {reason}")
    assert scene.principals() == []


async def test_client_that_refuses_the_node_is_told_apart_in_the_log(scene: Scene, tmp_path: Path) -> None:
    await scene.start()
    with pytest.raises(Unreachable, match="its certificate was refused: self-signed certificate in"):
        await scene.connect(Certificates(tmp_path / "stranger").client())
    await scene.logged("the client does not know the authority of this node's certificate")


async def test_certificate_for_another_host_is_refused_by_the_client(scene: Scene) -> None:
    scene.certificates.issue("node", "broker.example")
    await scene.start()
    with pytest.raises(Unreachable, match=r"IP address mismatch, certificate is not valid for '127\.0\.0\.1'"):
        await scene.connect()
    await scene.logged("the client refused this node's certificate")


# -- strangers ---------------------------------------------------------------------------------------------------------


async def test_plaintext_on_a_tls_port_is_refused_and_logged(scene: Scene) -> None:
    await scene.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
    writer.write(PLAINTEXT_REQUEST)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    await scene.logged("a client speaks plaintext to a TLS listener")


async def test_tls_on_a_plaintext_port_is_refused_and_logged(scene: Scene) -> None:
    broker = await scene.start()
    with pytest.raises(Unreachable):
        await Connection.open("127.0.0.1", broker.server.ports["PLAIN"], ssl=scene.certificates.client())
    await scene.logged("a client speaks TLS to a plaintext listener")


async def test_old_versions_of_tls_are_refused(scene: Scene) -> None:
    await scene.start()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.set_ciphers("ALL:@SECLEVEL=0")
    client.minimum_version, client.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises(Unreachable):
        await scene.connect(client)
    await scene.logged("the client offers only versions of TLS that this node refuses")


async def test_configured_version_is_the_only_one(scene: Scene) -> None:
    await scene.start(protocols=("TLSv1.3",))
    client = scene.certificates.client()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(Unreachable, match="refuses the versions of TLS"):
        await scene.connect(client)
    (await scene.connect()).close()


async def test_renegotiation_is_refused(scene: Scene) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on the PATH: only its s_client can renegotiate")
    await scene.start()
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{scene.port}", "-tls1_2", "-legacy_renegotiation"]

    def renegotiate() -> str:
        run = subprocess.run(command, input=b"R\n", capture_output=True, timeout=20)
        return (run.stdout + run.stderr).decode(errors="replace")

    output = await asyncio.to_thread(renegotiate)
    assert "RENEGOTIATING" in output
    assert "no renegotiation" in output.lower()


async def test_handshake_in_fragments_of_one_byte_succeeds(scene: Scene) -> None:
    await scene.start()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = scene.certificates.client().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)

    async def pass_bytes() -> None:
        for byte in outgoing.read():
            writer.write(bytes([byte]))
            await asyncio.sleep(0)

    while True:
        try:
            client.do_handshake()
            break
        except ssl.SSLWantReadError:
            await pass_bytes()
            incoming.write(await asyncio.wait_for(reader.read(1 << 16), 5))
    await pass_bytes()
    client.write(PLAINTEXT_REQUEST)
    await pass_bytes()
    while True:
        try:
            answer = client.read(1 << 16)
            break
        except ssl.SSLWantReadError:
            incoming.write(await asyncio.wait_for(reader.read(1 << 16), 5))
    assert answer[4:8] == PLAINTEXT_REQUEST[8:12]  # the correlation id of ApiVersions
    writer.close()


@pytest.mark.timeout(90)
async def test_a_thousand_stalled_handshakes_do_not_keep_clients_out(scene: Scene) -> None:
    broker = await scene.start(handshake_timeout_ms=4_000)
    handshakes = broker.server._tls._handshakes  # type: ignore[union-attr]
    strangers = []
    for number in range(serving_tls.HANDSHAKES_MAX + 200):
        _, writer = await asyncio.open_connection("127.0.0.1", scene.port)
        if number % 2:
            writer.write(b"\x16\x03\x01")  # a handshake that has begun
        strangers.append(writer)
        assert len(handshakes) <= serving_tls.HANDSHAKES_MAX
    connection = await scene.connect()
    await connection.call(ApiKey.METADATA, {"topics": []})
    await until(lambda: not handshakes, "the deadline ends all stalled handshakes")
    assert len(scene.reasons) <= 40  # the log is limited
    await connection.call(ApiKey.METADATA, {"topics": []})
    connection.close()
    for writer in strangers:
        writer.transport.abort()


async def test_stalled_handshake_ends_at_its_deadline(scene: Scene) -> None:
    await scene.start(handshake_timeout_ms=200)
    reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
    writer.write(b"\x16")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    await scene.logged("no TLS handshake within 0.2 s")


async def test_health_checks_that_only_connect_are_not_logged(scene: Scene) -> None:
    broker = await scene.start()
    _, writer = await asyncio.open_connection("127.0.0.1", scene.port)
    writer.close()
    await writer.wait_closed()
    await until(lambda: not broker.server._tls._handshakes)  # type: ignore[union-attr]
    assert scene.reasons == []


# -- reload ------------------------------------------------------------------------------------------------------------


async def seen_serial(scene: Scene, client: ssl.SSLContext | None = None) -> str:
    context = client or scene.certificates.client()
    _, writer = await asyncio.open_connection("127.0.0.1", scene.port, ssl=context)
    serial = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
    writer.close()
    return str(serial)


@pytest.fixture
def fast_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_tls, "POLL_S", 0.05)


async def test_new_connections_get_a_replaced_certificate(scene: Scene, fast_poll: None) -> None:
    await scene.start()
    old = await seen_serial(scene)
    connection = await scene.connect()
    scene.certificates.issue("node", "127.0.0.1")
    await until(lambda: scene.nodes.events(1, "certificates_reloaded"))
    assert await seen_serial(scene) != old
    await connection.call(ApiKey.METADATA, {"topics": []})  # an open connection stays
    connection.close()


async def test_mismatched_pair_keeps_the_old_certificate_and_is_logged_once(scene: Scene, fast_poll: None) -> None:
    await scene.start()
    old = await seen_serial(scene)
    scene.certificates.issue("other", "127.0.0.1")
    folder = scene.certificates.folder
    shutil.copy(folder / "other.key", folder / "node.key")
    await until(lambda: scene.nodes.events(1, "certificates_not_reloaded"))
    await asyncio.sleep(0.3)  # several more polls
    (event,) = scene.nodes.events(1, "certificates_not_reloaded")
    assert "does not belong to tls.certificate" in event["reason"]
    assert await seen_serial(scene) == old
    shutil.copy(folder / "other.pem", folder / "node.pem")
    await until(lambda: scene.nodes.events(1, "certificates_reloaded"))
    assert await seen_serial(scene) != old


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def make_huge(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(1 << 31)


@pytest.mark.parametrize("name", ["node.pem", "node.key", "ca.pem"])
@pytest.mark.parametrize("damage", [make_directory, make_pipe, make_huge])
async def test_certificates_are_loaded_again_after_a_file_that_is_none(
    scene: Scene, fast_poll: None, name: str, damage: Callable[[Path], None]
) -> None:
    await scene.start()
    client = scene.certificates.client()
    old = await seen_serial(scene, client)
    folder = scene.certificates.folder
    kept = (folder / name).read_bytes()
    damage(folder / name)
    await until(lambda: scene.nodes.events(1, "certificates_not_reloaded"))
    assert await seen_serial(scene, client) == old
    if (folder / name).is_dir():
        (folder / name).rmdir()
    else:
        (folder / name).unlink()
    (folder / name).touch(0o600)
    (folder / name).write_bytes(kept)
    scene.certificates.issue("node", "127.0.0.1")
    await until(lambda: scene.nodes.events(1, "certificates_reloaded"))
    assert await seen_serial(scene, client) != old


async def test_reload_survives_a_file_that_disappears_while_it_is_loaded(
    scene: Scene, fast_poll: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.start()
    old = await seen_serial(scene)
    folder = scene.certificates.folder
    read = serving_tls._read

    def removed_after(name: str, path: str, *, is_secret: bool) -> bytes:
        data = read(name, path, is_secret=is_secret)
        (folder / "node.pem").unlink(missing_ok=True)
        return data

    monkeypatch.setattr(serving_tls, "_read", removed_after)
    scene.certificates.issue("node", "127.0.0.1")
    await until(lambda: scene.nodes.events(1, "certificates_not_reloaded"))
    monkeypatch.setattr(serving_tls, "_read", read)
    scene.certificates.issue("node", "127.0.0.1")
    await until(lambda: scene.nodes.events(1, "certificates_reloaded"))
    assert await seen_serial(scene) != old


async def test_reload_of_the_authorities_revokes_certificates(scene: Scene, fast_poll: None, tmp_path: Path) -> None:
    await scene.start(client_auth="required")
    scene.certificates.issue("alice")
    alice = scene.certificates.client("alice")
    (await scene.connect(alice)).close()
    successor = Certificates(tmp_path / "successor")
    shutil.copy(successor.authorities, scene.certificates.authorities)
    await until(lambda: scene.nodes.events(1, "certificates_reloaded"))
    with pytest.raises(ClientError):
        await scene.connect(alice)
    successor.issue("bob")
    alice.load_cert_chain(successor.folder / "bob.pem", successor.folder / "bob.key")
    (await scene.connect(alice)).close()


async def test_expiry_is_measured_and_logged_two_weeks_before(scene: Scene) -> None:
    scene.certificates.issue("node", "127.0.0.1", days=10)
    broker = await scene.start()
    left_s = broker.metrics.certificate_left_s
    assert left_s is not None
    assert 9 * 86_400 < left_s < 10 * 86_400
    (event,) = scene.nodes.events(1, "certificate_expires")
    assert event["days"] == 9
    assert b"chronik_certificate_expiry_seconds 8" in broker.metrics.exposition()


# -- files -------------------------------------------------------------------------------------------------------------


async def test_key_that_others_can_read_is_refused(scene: Scene) -> None:
    key = scene.certificates.folder / "node.key"
    key.chmod(0o640)
    with pytest.raises(ConfigError, match=f"chmod 600 {key}"):
        await scene.start()


async def test_encrypted_key_needs_its_password_file(scene: Scene) -> None:
    folder = scene.certificates.folder
    command: list[str | Path] = ["openssl", "ec", "-aes256", "-in", folder / "node.key", "-out", folder / "locked.key"]
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on the PATH")
    subprocess.run([*command, "-passout", "pass:sesame"], check=True, capture_output=True)
    (folder / "locked.key").chmod(0o600)
    with pytest.raises(ConfigError, match=r"set tls\.key_password_file"):
        await scene.start(key=str(folder / "locked.key"))
    password = folder / "password"
    for text, is_right in (("wrong\n", False), ("sesame\n", True)):
        password.write_text(text)
        password.chmod(0o600)
        files = {"key": str(folder / "locked.key"), "key_password_file": str(password)}
        if is_right:
            await scene.start(**files)
            (await scene.connect()).close()
        else:
            with pytest.raises(ConfigError, match="wrong password") as refused:
                await scene.start(**files)
            assert "wrong\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("tls", "reason"),
    [
        ({"certificate": "/nowhere.pem"}, "tls.certificate /nowhere.pem cannot be read: No such file"),
        ({"authorities": "/nowhere.pem"}, "tls.authorities /nowhere.pem cannot be read: No such file"),
        ({"authorities": "/dev/null"}, "tls.authorities /dev/null cannot be read: it is no regular file"),
        ({"authorities": __file__}, "has no PEM certificate"),
        ({"ciphers": "NONE-SUCH"}, "tls.ciphers: OpenSSL knows none"),
    ],
)
async def test_unusable_tls_settings_stop_the_start(scene: Scene, tls: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        await scene.start(**tls)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
async def test_unread_large_responses_keep_memory_flat(scene: Scene) -> None:
    """A client requests 200 MB and reads none of it: the node holds about one response for it."""
    broker = await scene.start()
    connection = await scene.connect()
    topic = {"name": "t", "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    await connection.call(ApiKey.CREATE_TOPICS, {"topics": [topic], "timeout": 10_000, "validate_only": False})
    batch = memoryview(encode_batch([(None, bytes(500_000), [], 1)]))
    for _ in range(8):
        produced = ProduceRequest(None, 1, 5_000, [ProduceTopic("t", None, [(0, batch)])])
        await connection.request(ApiKey.PRODUCE, 11, write_produce_request(11, produced))
    wanted = FetchTopic("t", None, [FetchPartition(0, -1, 0, -1, -1, 4 << 20)])
    fetch = write_fetch_request(12, FetchRequest(topics=[wanted], max_wait_ms=0, max_bytes=4 << 20))
    reader, writer = await asyncio.open_connection("127.0.0.1", scene.port, ssl=scene.certificates.client(), limit=1)
    await until(lambda: len(broker.server._connections) == 2)
    _, slow = broker.server._connections
    for number in range(50):
        writer.write(frames.write_request(ApiKey.FETCH, 12, number, "slow", fetch))
    await until(lambda: slow.unsent_bytes > 1 << 20, "the socket is full")
    highest = 0
    for _ in range(50):
        await asyncio.sleep(0.01)
        highest = max(highest, slow.unsent_bytes)
    assert highest < 16 << 20
    size = 0
    while size < 50 * 8 * 500_000:  # all of it arrives once the client reads
        size += len(await asyncio.wait_for(reader.read(1 << 20), 10))
    await until(lambda: slow.unsent_bytes == 0)
    writer.close()
    connection.close()
