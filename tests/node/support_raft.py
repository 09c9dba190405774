"""A metadata log without peers: a Raft group of one node, with a store that the test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

from tests.node.cluster_harness import SECRET

from chronik.metadata.commands import CreateCluster
from chronik.node.config import NodeConfig
from chronik.node.disk_watch import DiskWatch
from chronik.node.environment import Environment
from chronik.node.membership.metadata_log import MetadataLog, new_cluster_id
from chronik.node.membership.peer_handshake import Identity
from chronik.node.membership.peers import Peers
from chronik.node.membership.raft_service import RaftService
from chronik.node.runtime import Runtime
from chronik.observe.logging import silent_logger
from chronik.observe.metrics import Metrics
from chronik.raft.node import RaftNode
from chronik.raft.state import RaftSettings
from chronik.raft.store import RaftStore

DEADLINE_S = 10.0
DISK_TIMEOUT_MS = 5_000
SETTINGS = RaftSettings()


async def lone_log(env: Environment, store: RaftStore, on_fatal: Callable[[Exception], Any] | None = None) -> Any:
    """Return the log of node 1, ready for proposals. A new log already contains its cluster id."""
    loop = asyncio.get_running_loop()
    stored = await loop.run_in_executor(env.executor, store.load)
    node = RaftNode(1, stored, SETTINGS, env.random, int(loop.time() * 1000), seeds=(), founders=(1,))
    log = MetadataLog(loop, silent_logger())
    runtime = Runtime.make(NodeConfig(), env, Metrics(), silent_logger())
    peers = Peers(runtime, Identity(1, UUID(int=1), "127.0.0.1:1"), SECRET, lambda node_id: None)
    disk = DiskWatch(loop, DISK_TIMEOUT_MS, silent_logger())
    raft = RaftService(runtime, disk, node, store, peers, log, on_fatal or _raise)
    log.attach(raft)
    raft.start()
    async with asyncio.timeout(DEADLINE_S):
        while not log.is_controller:
            await asyncio.sleep(0.001)
    if not log.image.cluster_id:
        await log.propose(CreateCluster(new_cluster_id(env)))
    return log


def _raise(error: Exception) -> None:
    raise error
