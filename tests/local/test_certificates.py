from __future__ import annotations

import contextlib
import datetime
import ssl
from pathlib import Path

import pytest

from chronik.local.certificates import create_authority, load_authority
from chronik.local.errors import LocalClusterError


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> ssl.SSLObject:
    """Run a handshake in memory; return the client's side."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    calling = client.wrap_bio(to_client, to_server, server_hostname=host)
    for _ in range(4):
        for side in (calling, serving):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    calling.do_handshake()
    serving.do_handshake()
    return calling


def contexts(folder: Path, certificate: Path, key: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return a server's context that requires a certificate, and that of a client which has the same one."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(str(folder / "ca.pem"))
        context.load_cert_chain(str(certificate), str(key))
    return server, client


@pytest.mark.parametrize("host", ["broker-1.example", "127.0.0.1", "::1"])
def test_issued_certificate_serves_its_hosts_and_authenticates_clients(tmp_path: Path, host: str) -> None:
    pair = create_authority(tmp_path).issue(tmp_path, "node-1", ["broker-1.example", "127.0.0.1", "[::1]"])
    handshake(*contexts(tmp_path, *pair), host)


def test_issued_certificate_is_refused_for_another_host(tmp_path: Path) -> None:
    pair = create_authority(tmp_path).issue(tmp_path, "node-1", ["localhost"])
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'broker-2'"):
        handshake(*contexts(tmp_path, *pair), "broker-2")


def test_certificate_of_the_past_is_expired(tmp_path: Path) -> None:
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=10)
    pair = create_authority(tmp_path).issue(tmp_path, "node-1", ["localhost"], days=9, since=since)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(*contexts(tmp_path, *pair), "localhost")


def test_loaded_authority_issues_certificates_of_the_created_one(tmp_path: Path) -> None:
    create_authority(tmp_path)
    pair = load_authority(tmp_path).issue(tmp_path / "later", "node-1", ["localhost"])
    handshake(*contexts(tmp_path, *pair), "localhost")


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    create_authority(tmp_path).issue(tmp_path, "alice", [])
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"ca.key": 0o600, "ca.pem": 0o644, "alice.key": 0o600, "alice.pem": 0o644}


def test_authority_is_not_replaced_and_its_name_is_not_issued(tmp_path: Path) -> None:
    authority = create_authority(tmp_path)
    with pytest.raises(LocalClusterError, match="already has an authority"):
        create_authority(tmp_path)
    for name in ("ca", "../escape", ""):
        with pytest.raises(LocalClusterError, match="cannot name a certificate"):
            authority.issue(tmp_path, name, [])


def test_missing_or_mismatched_authority_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LocalClusterError, match="has no authority"):
        load_authority(tmp_path)
    create_authority(tmp_path / "one")
    create_authority(tmp_path / "two")
    (tmp_path / "one" / "ca.key").replace(tmp_path / "two" / "ca.key")
    with pytest.raises(LocalClusterError, match="do not belong together"):
        load_authority(tmp_path / "two")
