"""`chronik start`: its errors, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.run_chronik import CHRONIK, chronik
from tests.support.node import Node


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_kafka_port_in_use_is_a_one_line_error_with_advice(tmp_path: Path, taken_port: int) -> None:
    refused = chronik(
        "start", "--data-dir", str(tmp_path), "--listen", f"127.0.0.1:{taken_port}", "--http", "127.0.0.1:0"
    )
    assert refused.code == 2
    assert f"port {taken_port} is taken" in refused.error_line
    assert "--listen" in refused.error_line


def test_an_http_port_in_use_is_a_one_line_error_with_advice(tmp_path: Path, taken_port: int) -> None:
    refused = chronik(
        "start", "--data-dir", str(tmp_path), "--listen", "127.0.0.1:0", "--http", f"127.0.0.1:{taken_port}"
    )
    assert refused.code == 2
    assert f"port {taken_port} is taken" in refused.error_line
    assert "--http" in refused.error_line


def test_an_unwritable_data_folder_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    folder = tmp_path / "file" / "node"
    refused = chronik("start", "--data-dir", str(folder), "--listen", "127.0.0.1:0")
    assert refused.code == 2
    assert str(folder) in refused.error_line


def test_start_refuses_the_data_folder_of_another_node(node: Node) -> None:
    node.terminate()
    refused = chronik("start", "--node-id", "7", "--data-dir", str(node.data_dir), "--listen", "127.0.0.1:0")
    assert refused.code == 2
    assert str(node.data_dir) in refused.error_line


def test_start_refuses_a_data_folder_in_use(shared_node: Node) -> None:
    refused = chronik("start", "--data-dir", str(shared_node.data_dir), "--listen", "127.0.0.1:0")
    assert refused.code == 2
    assert str(shared_node.data_dir) in refused.error_line


def test_start_names_an_unknown_configuration_key(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("durabilty = 'synced'\n")
    refused = chronik("start", "--config", str(file))
    assert refused.code == 2
    assert "unknown key durabilty" in refused.error_line
    assert "did you mean durability?" in refused.error_line


def test_a_wildcard_bind_without_an_advertised_address_is_refused(tmp_path: Path) -> None:
    refused = chronik("start", "--data-dir", str(tmp_path), "--listen", "0.0.0.0:9092")
    assert refused.code == 2
    assert "--advertise HOST:9092" in refused.error_line


@pytest.mark.parametrize(
    "flags", [["--listen", "9092"], ["--node-id", "one"], ["--log-level", "loud"], ["--nope"], ["--durability", "x"]]
)
def test_an_invalid_flag_is_a_one_line_error(tmp_path: Path, flags: list[str]) -> None:
    refused = chronik("start", "--data-dir", str(tmp_path), *flags)
    assert refused.code == 2
    assert refused.error_line


def test_start_prints_the_ports_that_the_system_chose(tmp_path: Path) -> None:
    command = [str(CHRONIK), "start", "--data-dir", str(tmp_path / "n"), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        log = process.stderr.read()
        assert process.wait(20) == 0
    assert line.startswith("chronik: node 1 is ready: kafka 127.0.0.1:")
    assert "127.0.0.1:0" not in line
    events = [json.loads(entry)["event"] for entry in log.splitlines()]
    assert events[-1] == "stopped"


def test_other_users_of_the_machine_cannot_read_what_a_node_stores(tmp_path: Path) -> None:
    folder = tmp_path / "n"
    command = [str(CHRONIK), "start", "--data-dir", str(folder), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, umask=0) as process:
        assert process.stdout is not None
        assert "is ready" in process.stdout.readline()
        created = [folder, *folder.rglob("*")]
        modes = {path.name: path.stat().st_mode & 0o077 for path in created}
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert {"n", "logs", "metadata.db", "metadata.db-wal"} <= modes.keys()
    assert set(modes.values()) == {0}


def test_log_level_error_silences_lower_levels(tmp_path: Path) -> None:
    command = [str(CHRONIK), "start", "--data-dir", str(tmp_path / "n"), "--listen", "127.0.0.1:0"]
    command += ["--log-level", "error"]
    environment = {**os.environ, "CHRONIK_NODE_ID": "5"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "node 5 is ready" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
        assert process.wait(20) == 0


def test_library_messages_are_logged_as_json_lines(node: Node) -> None:
    with socket.create_connection(("127.0.0.1", node.http_port)) as http:
        http.sendall(b"no request\r\n\r\n")
        assert http.recv(100).startswith(b"HTTP/1.1 400")
    node.terminate()
    lines = [json.loads(line) for line in node.log_path.read_text().splitlines() if not line.startswith("chronik: ")]
    assert [line["library"] for line in lines if line["event"] == "library_message"] == ["uvicorn.error"]
