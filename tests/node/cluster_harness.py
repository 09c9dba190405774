"""Nodes of one cluster in this process, on one loop: real brokers, sockets and files, but no client library.

    async with LocalNodes(tmp_path) as nodes:
        one, two, three = await nodes.start_all()
        await nodes.kill(one)

Killing a node sends no shutdown message. Its sockets close, as the operating system does for a dead process, and none
of its tasks runs again.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

from tests.node.support_wire import errors_of
from tests.support.eventually import until
from tests.support.node import SMALL_FILES
from tests.support.ports import free_ports

from chronik.client.connection import Connection
from chronik.node.broker import Broker
from chronik.node.config import Listen, NodeConfig, Peer
from chronik.node.environment import Environment
from chronik.node.membership.cluster_secret import ClusterSecret
from chronik.node.runtime import Runtime
from chronik.observe.logging import LogLevels, make_logger
from chronik.observe.metrics import Metrics
from chronik.storage.disk import RealDisk
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

OWNER: contextvars.ContextVar[int | None] = contextvars.ContextVar("owner", default=None)
"""The number of the broker that a task belongs to; a task inherits it from the task that started it."""

SECRET_TEXT = "what-the-nodes-of-a-test-know-of-each-other"
SECRET = ClusterSecret(SECRET_TEXT, "the test")
DEADLINE_S = 15.0
POLL_S = 0.01


class LocalNodes:
    """Settings, folders and ports of several nodes, and the brokers that run on them. Node ids start at 1."""

    def __init__(self, folder: Path, count: int = 3, **settings: Any) -> None:
        self.folder = folder
        self.boot_id = "the machine's first boot"
        self.settings = settings
        self.brokers: dict[int, Broker] = {}
        self.lines: dict[int, list[dict[str, Any]]] = {}
        self.secrets: dict[int, str] = {}
        """Secrets of nodes whose secret differs; empty if the node reads its secret from its own files."""
        self._ports: dict[int, tuple[int, int]] = {}
        self._random = Random(7)
        self._executor = ThreadPoolExecutor(8)
        self._tasks: dict[int, list[asyncio.Task[Any]]] = {}
        self._owners: dict[Broker, int] = {}
        self._owner = 0
        for node_id in range(1, count + 1):
            self.add(node_id)

    async def __aenter__(self) -> LocalNodes:
        asyncio.get_running_loop().set_task_factory(self._make_task)
        return self

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **more)
        owner = OWNER.get()
        if owner is not None:
            self._tasks.setdefault(owner, []).append(task)
        return task

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for broker in list(self.brokers.values()):
            await self.kill(broker)
        self._executor.shutdown()

    # -- configuration -------------------------------------------------------------------------------------------------

    def add(self, node_id: int) -> None:
        kafka, internal = free_ports(2)
        self._ports[node_id] = (kafka, internal)

    def internal_port(self, node_id: int) -> int:
        return self._ports[node_id][1]

    def config(self, node_id: int, peers: Sequence[int] | None = None, **settings: Any) -> NodeConfig:
        kafka, internal = self._ports[node_id]
        others = [other for other in self._ports if other != node_id] if peers is None else peers
        return NodeConfig(
            node_id=node_id,
            listen=Listen(kafka=f"127.0.0.1:{kafka}", http="127.0.0.1:0", internal=f"127.0.0.1:{internal}"),
            peers=tuple(Peer(other, f"127.0.0.1:{self._ports[other][1]}") for other in others),
            **{
                "data_dir": str(self.folder / f"node-{node_id}"),
                "default_replication_factor": 3,
                **SMALL_FILES,
                **self.settings,
                **settings,
            },
        )

    async def broker(self, config: NodeConfig) -> Broker:
        """Return a broker that is not started yet. Its log lines are kept."""
        lines = self.lines.setdefault(config.node_id, [])
        log = make_logger(
            lambda line: lines.append(json.loads(line)), lambda: 0, LogLevels(default=10), node=config.node_id
        )
        environment = Environment(
            RealDisk(),
            Random(self._random.random()),
            self._executor,
            _wall_ms,
            boot_id=self.boot_id,
            cluster_secret=self.secrets.get(config.node_id, SECRET_TEXT),
        )
        runtime = Runtime.make(config, environment, Metrics(), log)
        return await Broker.open(runtime, http="127.0.0.1:6092")

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    async def start_all(self) -> list[Broker]:
        return list(await asyncio.gather(*(self.start(node_id) for node_id in self._ports)))

    async def start(self, node_id: int, config: NodeConfig | None = None) -> Broker:
        loop = asyncio.get_running_loop()
        owner = self._owner = self._owner + 1
        context = contextvars.copy_context()
        context.run(OWNER.set, owner)
        broker = await loop.create_task(self.broker(config or self.config(node_id)), context=context)
        self.brokers[node_id] = broker
        self._owners[broker] = owner
        starting = loop.create_task(broker.start(), context=context)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await starting
        except Exception:
            self.brokers.pop(node_id)
            raise
        return broker

    async def stop(self, broker: Broker) -> None:
        """Stop the broker cleanly."""
        self.brokers.pop(broker.node_id, None)
        async with asyncio.timeout(DEADLINE_S):
            await broker.stop()

    async def kill(self, broker: Broker) -> None:
        """Act as kill -9: peers and clients see closed sockets, and the broker writes nothing more."""
        self.brokers.pop(broker.node_id, None)
        for listener in (broker.server, broker.internal_server):
            for _, bound in listener._listeners.values():
                bound.close()
            for connection in list(listener._connections):
                connection.abort()
        tasks = [task for task in self._tasks.pop(self._owners[broker], []) if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=DEADLINE_S)
        broker.deadlines.close()
        if hasattr(broker, "member"):
            await broker.member.close()
            broker.member._folder.close()

    # -- queries -------------------------------------------------------------------------------------------------------

    async def controller(self) -> Broker:
        """Wait for the controller: on a busy machine, a node may lose this role at any time."""
        await until(lambda: any(broker.is_controller for broker in self.brokers.values()), "a controller")
        return next(broker for broker in self.brokers.values() if broker.is_controller)

    def others(self, broker: Broker) -> list[Broker]:
        return [other for other in self.brokers.values() if other is not broker]

    def events(self, node_id: int, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines.get(node_id, []) if line["event"] == event]

    async def client(self, broker: Broker) -> Connection:
        return await Connection.open("127.0.0.1", broker.server.port, client_id="harness")

    async def administer(self, through: Broker, key: ApiKey, values: Mapping[str, Any]) -> Any:
        """Return the controller's response. Retry without one, as an admin client does: a busy controller resigns."""
        client = await self.client(through)
        try:
            async with asyncio.timeout(DEADLINE_S):
                while ErrorCode.not_controller in errors_of(response := await client.call(key, values)):
                    await asyncio.sleep(POLL_S)
        finally:
            client.close()
        return response


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
