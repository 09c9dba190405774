"""The simulator's findings, replayed step by step: seeds become useless when the code changes, these stories do not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from unittest.mock import patch

from chronik.client.topics import Topics
from chronik.storage.folder import DataFolder
from chronik.testing.sim.client import Service, SimClient
from chronik.testing.sim.history import History
from chronik.testing.sim.host import Host, Process
from chronik.testing.sim.network import Network
from chronik.testing.sim.node import SimNode, node_config
from chronik.testing.sim.producer import Appender
from chronik.testing.sim.world import World
from chronik.wire.errors import KafkaError

Steps = Callable[[SimClient], Awaitable[None]]
DEADLINE_S = 60.0


class ScriptedClient(SimClient):
    """Runs the given steps once."""

    def __init__(self, world: World, node: SimNode, steps: Steps) -> None:
        super().__init__("scripted", Service(world, History(world), [(node.host.address, 9092)]))
        self._steps = steps

    async def work(self) -> None:
        await self._steps(self)


class Story:
    """One node, one client, and the events that a test triggers."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        host = Host(self.world, self.network, "node-1", "10.0.0.1")
        self.node = SimNode(host, node_config(1, host))
        self._client_host = Host(self.world, self.network, "client", "10.0.1.1")
        self._client_host.start(_idle)
        self.start()

    def start(self) -> None:
        self.node.start()
        assert self.world.run(self.world.now + DEADLINE_S, lambda: self.node.is_ready), self.world.violation

    def lose_power(self) -> None:
        self.node.power_off()
        self.start()

    def kill(self) -> None:
        self.node.kill()
        self.start()

    def do(self, steps: Steps) -> None:
        client = ScriptedClient(self.world, self.node, steps)
        process = self._client_host.process
        assert process is not None
        process.loop.call_soon_threadsafe(lambda: process.run(client.run()))
        assert self.world.run(self.world.now + DEADLINE_S, lambda: client.is_done), self.world.violation

    def end(self) -> None:
        for host in (self.node.host, self._client_host):
            host.bury()


async def _idle(process: Process) -> None:
    """The client machine's program; its client is started later."""


def test_data_folder_that_the_node_made_survives_a_power_failure() -> None:
    async def make(client: SimClient) -> None:
        await Topics(client.cluster).create("kept", 1, 1, {})

    async def look(client: SimClient) -> None:
        found.append("kept" in (await client.cluster.layout()).topics)

    found: list[bool] = []
    for seed in range(10):
        story = Story(seed)
        story.do(make)
        story.lose_power()
        story.do(look)
        story.end()
    assert all(found)


def test_recovery_point_of_a_deleted_topic_does_not_apply_to_a_recreated_topic() -> None:
    async def write_twenty(client: SimClient) -> None:
        await Topics(client.cluster).create("reused", 1, 1, {})
        await Appender(client, "reused").append([(None, b"x")] * 20)

    async def write_two_in_its_successor(client: SimClient) -> None:
        await Topics(client.cluster).delete("reused")
        await Topics(client.cluster).create("reused", 1, 1, {})
        await Appender(client, "reused").append([(None, b"y")] * 2)

    story = Story(0)
    story.do(write_twenty)
    story.world.run(story.world.now + 1.0)  # until the recovery points are written
    story.do(write_two_in_its_successor)
    story.kill()
    damaged = [line for line in story.node.log_lines if "log_damaged" in line]
    story.end()
    assert damaged == []


def test_new_log_is_listed_only_after_its_folder_is_durable() -> None:
    """Otherwise a shutdown before that and a power loss after the next start leave a listed log without a folder."""

    async def make(client: SimClient) -> None:
        with suppress(KafkaError):  # the topic exists, but its log is not opened
            await Topics(client.cluster).create("new", 1, 1, {})

    async def write(client: SimClient) -> None:
        await Appender(client, "new").append([(None, b"x")])

    def shut_down_before_the_sync(folder: DataFolder) -> None:
        folder.record_clean_shutdown(folder.recovery_points)
        raise OSError("the process ends here")

    story = Story(0)
    with patch.object(DataFolder, "sync_names", shut_down_before_the_sync):
        story.do(make)
        story.world.run(story.world.now + 1.0)
    story.kill()
    story.lose_power()
    story.do(write)
    story.end()
