"""A data folder from before there were clusters is taken over as a cluster of one, and nothing of it is lost."""

from __future__ import annotations

import asyncio
import sqlite3
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest
from crc32c import crc32c
from tests.node.cluster_harness import LocalNodes, until

from chronik.metadata.apply import apply
from chronik.metadata.commands import (
    AllocateProducerIds,
    Assignment,
    Command,
    CreateCluster,
    CreateTopic,
    RegisterBroker,
    encode_command,
)
from chronik.metadata.image import ClusterImage, encode_image
from chronik.node.membership.raft_store import SqliteRaftStore
from chronik.node.membership.sqlite_file import StoreError

TOPIC_ID = UUID(int=77)
ALONE = (Assignment((1,), (1,)),)
HISTORY: Sequence[Command] = (
    CreateCluster("the-cluster"),
    RegisterBroker(broker_id=1, incarnation=UUID(int=1), host="127.0.0.1", port=9092),
    CreateTopic("orders", TOPIC_ID, ALONE, {"retention.ms": "1000"}),
    AllocateProducerIds(1, 1000),
    RegisterBroker(broker_id=1, incarnation=UUID(int=2), host="127.0.0.1", port=9092),
)
SCHEMA = """
CREATE TABLE settings (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE snapshot (version INTEGER PRIMARY KEY, image BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE commands (version INTEGER PRIMARY KEY, command BLOB NOT NULL, checksum INTEGER NOT NULL);
INSERT INTO settings VALUES ('format', 1);
"""


def write_former(path: Path, in_snapshot: int, count: int = len(HISTORY)) -> ClusterImage:
    """metadata.db as it was, with so many of the commands in its snapshot; the image that they lead to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript(SCHEMA)
    image = ClusterImage()
    for version, command in enumerate(HISTORY[:count], 1):
        image, _ = apply(image, command)
        if version == in_snapshot:
            connection.execute("INSERT INTO snapshot VALUES (?, ?, ?)", row(version, encode_image(image)))
        elif version > in_snapshot:
            connection.execute("INSERT INTO commands VALUES (?, ?, ?)", row(version, encode_command(command)))
    connection.close()
    return image


def row(version: int, data: bytes) -> tuple[int, bytes, int]:
    return version, data, crc32c(data, crc32c(struct.pack(">q", version)))


@pytest.mark.parametrize("in_snapshot", [0, 3, len(HISTORY)])
def test_a_node_alone_goes_on_with_what_was_agreed_on_before_there_were_clusters(
    tmp_path: Path, in_snapshot: int
) -> None:
    former = write_former(tmp_path / "node-1" / "metadata.db", in_snapshot)
    epoch = former.topics["orders"].partitions[0].leader_epoch

    async def story() -> None:
        async with LocalNodes(tmp_path, 1, default_replication_factor=1) as nodes:
            for _ in range(2):
                broker = await nodes.start(1)
                image = broker.image
                assert image.cluster_id == "the-cluster"
                assert image.version > former.version
                topic = image.topics["orders"]
                assert (topic.id, topic.configs) == (TOPIC_ID, {"retention.ms": "1000"})
                assert image.next_producer_id >= former.next_producer_id
                await until(partial(broker.require_partition, "orders", 0))
                # Epochs go on: those in the logs are older.
                assert topic.partitions[0].leader_epoch > epoch
                await nodes.kill(broker)
            assert len(nodes.events(1, "metadata_taken_over")) == 1

    asyncio.run(story())


def test_it_grows_only_after_it_was_taken_over(tmp_path: Path) -> None:
    write_former(tmp_path / "node-1" / "metadata.db", 3)

    async def story() -> None:
        async with LocalNodes(tmp_path, 3, default_replication_factor=1) as nodes:
            with pytest.raises(StoreError, match="there were clusters: start this node once without peers"):
                await nodes.start(1)
            alone = await nodes.start(1, nodes.config(1, peers=()))
            await nodes.stop(alone)
            brokers = [await nodes.start(node_id) for node_id in (1, 2, 3)]
            await until(lambda: all("orders" in broker.image.topics for broker in brokers))

    asyncio.run(story())


def test_a_file_in_which_nothing_was_agreed_on_is_a_new_one(tmp_path: Path) -> None:
    write_former(tmp_path / "metadata.db", 0, 0)
    store = SqliteRaftStore(str(tmp_path / "metadata.db"), lambda: UUID(int=9))
    stored = store.load()
    assert (stored.snapshot, stored.entries, stored.store_id) == (None, (), UUID(int=9))
    store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE snapshot SET image = zeroblob(10)",
        "UPDATE commands SET command = zeroblob(10) WHERE version = 5",
        "DELETE FROM commands WHERE version = 4",
    ],
)
def test_a_damaged_one_is_refused_and_left_as_it_is(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "metadata.db"
    write_former(path, 3)
    connection = sqlite3.connect(path)
    connection.execute(damage)
    connection.commit()
    before = list(connection.iterdump())
    with pytest.raises(StoreError, match=r"is damaged .* remove it, and a node of a cluster joins again"):
        SqliteRaftStore(str(path), lambda: UUID(int=9)).load()
    assert list(connection.iterdump()) == before
    connection.close()
