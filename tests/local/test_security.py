"""The files of a secure local cluster, before any node runs."""

from __future__ import annotations

import shutil
import ssl
import stat
from pathlib import Path

import pytest

from chronik.client.properties import load_settings
from chronik.client.security import ClientSecurity
from chronik.local.cluster import LocalCluster, free_port
from chronik.local.errors import LocalClusterError
from chronik.local.security import CLIENT_PROPERTIES, JAVA_PROPERTIES


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    made = LocalCluster(str(tmp_path / "secure"))
    made.create(2, free_port(3), is_secure=True)
    return made


def test_both_files_of_client_settings_describe_the_administrator(cluster: LocalCluster) -> None:
    folder = Path(cluster.folder)
    client, java = (load_settings(str(folder / name)) for name in (CLIENT_PROPERTIES, JAVA_PROPERTIES))
    assert client.security == java.security
    assert client.bootstrap == java.bootstrap == cluster.bootstrap
    assert (client.security.username, client.security.protocol) == ("admin", "SASL_SSL")
    assert len(client.security.password) >= 32
    assert cluster.client_settings == client


def test_files_with_secrets_are_private(cluster: LocalCluster) -> None:
    folder = Path(cluster.folder)
    secret = [path for path in folder.rglob("*") if path.suffix in (".key", ".properties") or path.name == "users"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
    assert len(secret) == 6
    # A node's log names topics and users.
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("node-*")} == {0o700}


def test_node_settings_secure_every_port_and_have_no_secret(cluster: LocalCluster) -> None:
    password = cluster.client_settings.security.password
    for node in cluster.nodes:
        config = node.config
        assert config.security.protocol == "SASL_SSL"
        assert config.security.internal_tls
        assert config.security.http_tls
        assert config.security.http_login
        assert config.authorization.enabled
        assert config.authorization.super_users == ("User:admin",)
        assert password not in Path(node.config_path).read_text()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.tls.certificate, config.tls.key)
    first, second = (node.config.tls.certificate for node in cluster.nodes)
    assert first != second


def test_an_added_node_gets_a_certificate_and_enters_the_client_settings(cluster: LocalCluster) -> None:
    added = cluster.add()
    assert Path(added.config.tls.certificate).name == "node-3.pem"
    assert added.config.security.protocol == "SASL_SSL"
    assert added.bootstrap in load_settings(f"{cluster.folder}/{CLIENT_PROPERTIES}").bootstrap


def test_a_moved_folder_gets_its_new_paths(cluster: LocalCluster, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.move(cluster.folder, moved)
    again = LocalCluster(str(moved))
    again.introduce()
    assert all(node.config.tls.certificate.startswith(str(moved)) for node in again.nodes)
    assert again.client_settings.security.authorities == str(moved / "certs" / "ca.pem")


def test_a_cluster_without_security_has_no_settings(tmp_path: Path) -> None:
    plain = LocalCluster(str(tmp_path))
    plain.create(1, free_port(1))
    assert not plain.is_secured
    assert plain.client_settings.security == ClientSecurity()
    assert not (tmp_path / CLIENT_PROPERTIES).exists()


def test_settings_that_others_can_read_are_refused(cluster: LocalCluster) -> None:
    Path(cluster.folder, CLIENT_PROPERTIES).chmod(0o644)
    with pytest.raises(LocalClusterError, match="chmod 600"):
        _ = cluster.client_settings
