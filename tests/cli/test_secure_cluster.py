"""`chronik cluster up --secure`: TLS, SCRAM and ACLs of a local cluster, as its users see them."""

from __future__ import annotations

import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.run_chronik import chronik

from chronik.client.properties import ClientSettings, load_settings
from chronik.local.cluster import LocalCluster, free_port

pytestmark = pytest.mark.timeout(300)


class SecureCluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.properties = str(folder / "client.properties")
        self.settings: ClientSettings = load_settings(self.properties)

    def user(self, name: str, password: str) -> str:
        """Create a user; return the path of its client settings."""
        made = chronik("user", "create", name, "--properties", self.properties, stdin=f"{password}\n")
        assert made.code == 0, made.err
        path = self.folder / f"{name}.properties"
        text = Path(self.properties).read_text()
        text = text.replace("sasl.username=admin", f"sasl.username={name}")
        text = text.replace(self.settings.security.password, password)
        path.write_text(text)
        path.chmod(0o600)
        return str(path)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    folder = tmp_path_factory.mktemp("secure")
    port = free_port(3)
    started = chronik("cluster", "up", "--secure", "--dir", str(folder), "--port", str(port), timeout_s=120)
    assert started.code == 0, started.err
    try:
        yield SecureCluster(folder)
    finally:
        cluster = LocalCluster(str(folder))
        for node in cluster.running:
            cluster.kill(node.id)


def test_files_with_secrets_are_private(secure: SecureCluster) -> None:
    private = ("users", "client.properties", "java.properties", "certs/ca.key", "certs/node-1.key")
    modes = {name: stat.S_IMODE((secure.folder / name).stat().st_mode) for name in private}
    assert modes == dict.fromkeys(private, 0o600)


def test_the_password_is_in_no_log_and_no_command_line(secure: SecureCluster) -> None:
    password = secure.settings.security.password.encode()
    for node in LocalCluster(str(secure.folder)).nodes:
        assert password not in Path(node.log_path).read_bytes()
        assert password not in Path(node.config_path).read_bytes()
        assert password not in Path(f"/proc/{node.process.pid}/cmdline").read_bytes()


@pytest.mark.parametrize("client", ["kafka-python", "confluent"])
def test_every_acknowledged_record_is_read_over_tls_and_scram(secure: SecureCluster, client: str) -> None:
    words = ("verify", "--messages", "500", "--client", client, "--json", "--properties", secure.properties)
    assert chronik(*words, timeout_s=120).json()["verdict"] == "PASS"


@pytest.mark.parametrize("mode", [("requests", "--seconds", "3"), ("produce", "--records", "500")])
def test_bench_loads_a_cluster_with_tls_and_scram(secure: SecureCluster, mode: tuple[str, ...]) -> None:
    figures = chronik("bench", *mode, "--json", "--properties", secure.properties, timeout_s=120).json()
    assert figures["records"] > 0
    assert figures["errors"] == 0


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
def test_kcat_reads_the_client_properties(secure: SecureCluster) -> None:
    listed = subprocess.run(
        ["kcat", "-F", secure.properties, "-L"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "3 brokers" in listed.stdout


def test_status_kill_and_start_need_no_properties(secure: SecureCluster) -> None:
    folder = str(secure.folder)
    assert chronik("cluster", "kill", "2", "--dir", folder).code == 0
    assert chronik("cluster", "start", "2", "--dir", folder, timeout_s=120).code == 0
    status = chronik("cluster", "status", "--dir", folder, "--json").json()
    assert [node["state"] for node in status["nodes"]] == ["running"] * 3
    again = chronik("cluster", "up", "--dir", folder)
    assert "already running" in again.out


def test_a_user_without_rights_gets_them_from_an_acl(secure: SecureCluster) -> None:
    alice = secure.user("alice", "open sesame")
    assert chronik("topic", "create", "orders", "--properties", secure.properties).code == 0
    refused = chronik("topic", "delete", "orders", "--properties", alice)
    assert refused.code == 2
    assert "orders" in refused.error_line
    produced = chronik("produce", "orders", "--properties", alice, stdin="hello\n")
    assert produced.code != 0
    assert "chronik acl add" in produced.error_line
    examined = chronik("doctor", "orders", "--properties", alice)
    assert examined.code == 1
    assert examined.out.startswith("not-authorized: User:alice")
    granted = chronik(
        *("acl", "add", "--principal", "User:alice", "--operation", "ALL", "--topic", "orders"),
        *("--properties", secure.properties),
    )
    assert granted.code == 0, granted.err
    assert chronik("topic", "describe", "orders", "--properties", alice).code == 0
    (acl,) = chronik("acl", "list", "--json", "--properties", secure.properties).json()["acls"]
    assert (acl["principal"], acl["operation"]) == ("User:alice", "ALL")
    assert chronik("user", "delete", "alice", "--properties", secure.properties).code == 0
    assert "refuses User:alice" in chronik("topic", "list", "--properties", alice).error_line


def test_wrong_security_is_one_line_with_the_way_out(secure: SecureCluster) -> None:
    bootstrap = secure.settings.bootstrap
    plain = chronik("topic", "list", "-b", bootstrap)
    assert plain.code == 2
    assert "set security.protocol" in plain.error_line
    examined = chronik("doctor", "orders", "-b", bootstrap)
    assert examined.out.startswith("wrong-listener:")
    elsewhere = secure.folder / "elsewhere.properties"
    elsewhere.write_text(Path(secure.properties).read_text().replace("certs/ca.pem", "certs/other.pem"))
    elsewhere.chmod(0o600)
    assert "ssl.ca.location" in chronik("topic", "list", "--properties", str(elsewhere)).error_line


def test_a_moved_folder_starts_again(secure: SecureCluster, tmp_path: Path) -> None:
    assert chronik("cluster", "down", "--dir", str(secure.folder), timeout_s=120).code == 0
    moved = tmp_path / "moved"
    shutil.move(secure.folder, moved)
    try:
        assert chronik("cluster", "up", "--dir", str(moved), timeout_s=120).code == 0
        assert chronik("topic", "list", "--properties", str(moved / "client.properties")).code == 0
        assert chronik("cluster", "down", "--dir", str(moved), timeout_s=120).code == 0
    finally:
        shutil.move(moved, secure.folder)
