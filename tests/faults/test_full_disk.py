"""A full disk: producers get an error, reads continue, acknowledged records are kept, writes resume with free space."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.support_cluster import fill_disk, limit_files
from tests.conftest import StartNode
from tests.faults.support_load import MB, Account, Found, Writer, no_surprises
from tests.node.support_wire import WireClient, batch, connect
from tests.support.eventually import eventually
from tests.support.node import Node

from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

FILE_BYTES_MAX = 2 * MB
DISK_BYTES = 48 * MB


def fill(node: Node, topic: str, acks: int) -> Account:
    """Write until the node reports an error; every error must be the one for a full disk."""
    account = Account(topic, 0)
    writer = Writer(node, account, f"fill-{acks}", acks=acks)
    eventually(lambda: len(account.errors) >= 5, timeout_s=30, what="producers receive the error of a full disk")
    writer.stop()
    assert set(account.errors) == {ErrorCode.kafka_storage_error}
    assert account.acknowledged
    return account


def writes_again(client: WireClient, topic: str) -> int:
    """Wait until a record is accepted again, and return its offset."""

    def taken() -> int:
        response = client.produce(topic, batch(b"room again"))
        assert response.error_code == 0, ErrorCode(response.error_code)
        return response.base_offset

    return eventually(taken, timeout_s=15, what="the log takes writes again, without a restart")


@pytest.mark.parametrize("acks", [-1, 1])
def test_a_log_at_the_file_size_limit_refuses_writes_and_recovers_without_a_restart(node: Node, acks: int) -> None:
    with connect(node) as client:
        topic, other = client.new_topic(), client.new_topic()
        limit_files(node.pid, FILE_BYTES_MAX)
        account = fill(node, topic, acks)
        # Other partitions still accept writes, and everything can be read.
        assert client.append(other, b"still works") == 0
        account.check(Found.of(client.records(topic)))
        limit_files(node.pid, None)
        writes_again(client, topic)
        account.check(Found.of(client.records(topic)))
    no_surprises(node)
    node.kill()
    node.start()
    with connect(node) as client:
        records = client.records(topic)
        account.check(Found.of(records))
        assert records[-1].value == b"room again"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that can be filled."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "small-disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_node_on_a_full_disk_refuses_writes_and_recovers_without_a_restart(
    small_disk: Path, start_node: StartNode
) -> None:
    ballast = small_disk / "ballast"
    node = start_node(data_dir=str(small_disk / "data"))
    with connect(node) as client:
        topic = client.new_topic()
        client.append(topic, b"first")
        fill_disk(ballast, leave_bytes=6 * MB)
        account = fill(node, topic, acks=-1)
        account.check(Found.of(client.records(topic)))
        # Requests that need the disk fail with an error; other requests succeed.
        refused = client.create_topic("no-room-for-this")
        assert refused.error_code is not ErrorCode.none
        assert client.call(ApiKey.METADATA, 1, {"topics": None}).brokers
        ballast.unlink()
        writes_again(client, topic)
        made = eventually(lambda: client.create_topic("room-for-this").error_code is ErrorCode.none, what="a new topic")
        assert made
        assert client.append("room-for-this", b"x") == 0
    node.kill()
    node.start()
    with connect(node) as client:
        account.check(Found.of(client.records(topic)))
        assert client.append(topic, b"after") > 0


def test_a_node_on_a_full_disk_stops_cleanly_and_starts_after_space_is_freed(
    small_disk: Path, start_node: StartNode
) -> None:
    ballast = small_disk / "ballast"
    node = start_node(data_dir=str(small_disk / "data"))
    with connect(node) as client:
        topic = client.new_topic()
        fill_disk(ballast, leave_bytes=4 * MB)
        account = fill(node, topic, acks=-1)
        fill_disk(small_disk / "rest", leave_bytes=0)
    node.terminate()
    ballast.unlink()
    node.start()
    with connect(node) as client:
        account.check(Found.of(client.records(topic)))
        writes_again(client, topic)
