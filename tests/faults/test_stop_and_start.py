"""Clean stops under load, and invalid starts that fail with one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from tests.faults.support_load import Account, Found, Writer, wait_for_acknowledged
from tests.node.support_wire import connect, fetch_of
from tests.support.node import CHRONIK, Node
from tests.support.ports import free_ports

from chronik.wire import messages
from chronik.wire.api import ApiKey

STOP_TIMEOUT_S = 10.0
START_TIMEOUT_S = 20.0
CANNOT = 2


def stop_within(node: Node, timeout_s: float) -> int:
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    return node.process.wait(timeout_s)


def events(node: Node) -> list[str]:
    return [json.loads(line)["event"] for line in node.log_text().splitlines() if line.startswith("{")]


def test_sigterm_under_load_exits_with_0_and_loses_no_acknowledged_record(node: Node) -> None:
    with connect(node) as client:
        topic = client.new_topic(partitions=2)
    running = [
        Writer(node, Account(topic, partition), f"{partition}-{acks}", acks=acks)
        for partition in range(2)
        for acks in (-1, 1)
    ]
    wait_for_acknowledged(running, 200)
    assert stop_within(node, STOP_TIMEOUT_S) == 0
    for writer in running:
        writer.join()
    node.start()
    assert "log_recovered" not in events(node), "a clean stop leaves nothing to recover"
    with connect(node) as client:
        for partition in range(2):
            found = Found.of(client.records(topic, partition=partition))
            for writer in running:
                if writer.account.partition == partition:
                    writer.account.check(found)


def test_sigterm_does_not_wait_for_long_polls_and_rebalances(node: Node) -> None:
    with connect(node) as consumer, connect(node) as member, connect(node) as half_open:
        topic = consumer.new_topic()
        consumer.send_fetch(fetch_of((topic, 0, 0), max_wait_ms=300_000))
        half_open.send_bytes(b"\x00\x00\x10\x00")
        member.call(ApiKey.FIND_COORDINATOR, 2, {"key": "g", "key_type": 0})
        values = {
            "group_id": "g",
            "session_timeout": 300_000,
            "rebalance_timeout": 300_000,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        }
        member.call(ApiKey.JOIN_GROUP, 2, values)
        # The second member waits for the first one to rejoin.
        member.send(ApiKey.JOIN_GROUP, 2, messages.write_request(ApiKey.JOIN_GROUP, 2, values))
        assert stop_within(node, STOP_TIMEOUT_S) == 0
    node.start()


def test_a_second_sigterm_stops_the_node_and_loses_no_acknowledged_record(node: Node) -> None:
    assert node.process is not None
    with connect(node) as client:
        topic = client.new_topic()
        client.append(topic, b"kept")
    node.process.send_signal(signal.SIGTERM)
    node.process.send_signal(signal.SIGTERM)
    node.process.wait(STOP_TIMEOUT_S)
    node.start()
    with connect(node) as client:
        assert [record.value for record in client.records(topic)] == [b"kept"]


# -- invalid starts ----------------------------------------------------------------------------------------------------


def refused(*arguments: str, cwd: Path) -> str:
    """Return the one line that a failing start prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CHRONIK_")}
    ended = subprocess.run(
        [str(CHRONIK), "start", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        cwd=cwd,
        env=environment,
        check=False,
    )
    assert ended.returncode == CANNOT, (ended.returncode, ended.stderr)
    assert ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("chronik: ")
    return lines[0]


def listen_flags(kafka: int | None = None, http: int | None = None) -> list[str]:
    free = free_ports(3)
    return [
        *("--listen", f"127.0.0.1:{kafka or free[0]}"),
        *("--http", f"127.0.0.1:{http or free[1]}"),
        *("--internal", f"127.0.0.1:{free[2]}"),
    ]


def test_a_second_node_on_one_data_folder_is_refused_and_the_first_keeps_running(node: Node, tmp_path: Path) -> None:
    with connect(node) as client:
        topic = client.new_topic()
        line = refused("--data-dir", str(node.data_dir), *listen_flags(), cwd=tmp_path)
        assert str(node.data_dir) in line
        assert client.append(topic, b"x") == 0
    node.kill()
    node.start()


@pytest.mark.parametrize("which", ["kafka", "http"])
def test_the_error_names_a_port_that_is_taken(tmp_path: Path, which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("--data-dir", str(tmp_path / "data"), *listen_flags(**{which: port}), cwd=tmp_path)
    assert str(port) in line
    assert "taken" in line


def test_the_error_names_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    line = refused("--data-dir", str(tmp_path / "file" / "data"), *listen_flags(), cwd=tmp_path)
    assert str(tmp_path / "file") in line


def test_the_error_names_an_unwritable_folder(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    line = refused("--data-dir", str(folder / "data"), *listen_flags(), cwd=tmp_path)
    assert "read-only" in line


def test_the_error_names_a_folder_on_a_read_only_file_system(tmp_path: Path) -> None:
    line = refused("--data-dir", "/proc/chronik-data", *listen_flags(), cwd=tmp_path)
    assert "/proc/chronik-data" in line


def test_the_error_names_an_unknown_config_key_and_suggests_a_similar_one(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text('durabillity = "synced"\n')
    line = refused("--config", str(config), *listen_flags(), cwd=tmp_path)
    assert "durabillity" in line
    assert "durability" in line.replace("durabillity", "")


@pytest.mark.parametrize("address", ["0.0.0.0", "[::]"])
def test_a_wildcard_bind_without_an_advertised_address_is_refused(tmp_path: Path, address: str) -> None:
    (port,) = free_ports(1)
    line = refused("--data-dir", str(tmp_path / "data"), "--listen", f"{address}:{port}", cwd=tmp_path)
    assert "--advertise" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-flag"],
        ["--config", "missing.toml"],
        ["--listen", "nonsense"],
        ["--durability", "sometimes"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_invalid_flags_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    refused(*arguments, cwd=tmp_path)


def test_a_data_folder_of_another_node_or_of_a_newer_format_is_refused(node: Node, tmp_path: Path) -> None:
    assert stop_within(node, STOP_TIMEOUT_S) == 0
    folder = str(node.data_dir)
    line = refused("--data-dir", folder, "--node-id", "7", *listen_flags(), cwd=tmp_path)
    assert folder in line
    meta = node.data_dir / "meta.json"
    before = meta.read_text()
    content = json.loads(before)
    key = next(name for name in content if "version" in name)
    meta.write_text(json.dumps({**content, key: content[key] + 1}))
    line = refused("--data-dir", folder, *listen_flags(), cwd=tmp_path)
    assert folder in line
    meta.write_text(before)
    node.start()


def test_an_unknown_topic_default_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text('[topic_defaults]\n"retention.mss" = 5\n')
    line = refused("--config", str(config), "--data-dir", str(tmp_path / "data"), *listen_flags(), cwd=tmp_path)
    assert "retention.mss" in line
