"""A log that cannot be opened is an error until the disk recovers; a deleted log is removed then."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from chronik.metadata.commands import DeleteTopic
from chronik.node.broker import Broker
from chronik.node.config import Listen, NodeConfig
from chronik.node.environment import Environment
from chronik.node.runtime import Runtime
from chronik.observe.logging import silent_logger
from chronik.observe.metrics import Metrics
from chronik.storage.disk import RealDisk
from chronik.wire.errors import ErrorCode, KafkaError


class SickDisk(RealDisk):
    """While sick, it creates no log folders and renames no file of the node itself."""

    is_sick = False

    def rename(self, old: str, new: str) -> None:
        if self.is_sick and "/logs/" not in new:
            raise OSError(errno.EIO, "sick")
        super().rename(old, new)

    def mkdir(self, path: str) -> None:
        if self.is_sick and "/logs/" in path:
            raise OSError(errno.EIO, "sick")
        super().mkdir(path)


@asynccontextmanager
async def running_broker(tmp_path: Path, disk: SickDisk) -> AsyncIterator[Broker]:
    with ThreadPoolExecutor(4) as executor:
        config = NodeConfig(
            data_dir=str(tmp_path / "node"),
            listen=Listen(kafka="127.0.0.1:0", http="127.0.0.1:0", internal="127.0.0.1:0"),
            recovery_point_interval_ms=20,
        )
        environment = Environment(disk, Random(1), executor, lambda: 0)
        broker = await Broker.open(Runtime.make(config, environment, Metrics(), silent_logger()))
        await broker.start()
        yield broker
        await broker.stop()


async def test_a_topic_whose_log_cannot_open_returns_errors_until_the_disk_recovers(tmp_path: Path) -> None:
    disk = SickDisk()

    async with running_broker(tmp_path, disk) as broker:
        disk.is_sick = True
        with pytest.raises(KafkaError) as failed:
            await broker.topics.create("orders")
        assert failed.value.code is ErrorCode.kafka_storage_error
        with pytest.raises(KafkaError) as refused:
            broker.host.require_leader("orders", 0)
        assert refused.value.code is ErrorCode.not_leader_or_follower
        disk.is_sick = False
        async with asyncio.timeout(10):
            while broker.partition("orders", 0) is None:
                await asyncio.sleep(0.01)


async def test_a_controller_that_is_still_starting_creates_topics_for_other_nodes(tmp_path: Path) -> None:
    """Found by the simulator (three-nodes seed 5134): an error, because its own partitions were not open yet."""
    disk = SickDisk()

    async with running_broker(tmp_path, disk) as broker:
        broker.host.is_open = False
        assert (await broker.topics.create("orders")).name == "orders"
        broker.host.is_open = True


async def test_a_deleted_topics_log_is_removed_when_the_disk_recovers(tmp_path: Path) -> None:
    """Found by the simulator (three-nodes seed 4040): after one failed write, the files stayed until the next start."""
    disk = SickDisk()

    async with running_broker(tmp_path, disk) as broker:
        topic = await broker.topics.create("orders")
        folder = tmp_path / "node" / "logs" / "orders-0"
        assert folder.exists()
        disk.is_sick = True
        await broker.metadata.propose(DeleteTopic("orders", topic.id))
        await broker.host.applied()
        assert folder.exists()
        disk.is_sick = False
        async with asyncio.timeout(10):
            while folder.exists():
                await asyncio.sleep(0.01)
