"""The real node on a simulated machine: started, killed, powered off, stopped, and restarted on the same disk."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterable

import msgspec

from chronik.metadata.image import ClusterImage
from chronik.node.broker import Broker
from chronik.node.config import ConfigError, Listen, NodeConfig
from chronik.node.environment import Environment
from chronik.node.runtime import Runtime
from chronik.observe.logging import LogLevels, make_logger
from chronik.observe.metrics import Metrics
from chronik.raft.store import StoreError
from chronik.storage.folder import DataFolderError
from chronik.testing.sim.disk import ProcessDisk
from chronik.testing.sim.host import Host, Process
from chronik.testing.sim.raft_store import DiskRaftStore
from chronik.testing.sim.tree import FolderNode
from chronik.wire.errors import ErrorCode, KafkaError

CLUSTER_SECRET = "the-secret-of-every-simulated-cluster"
"""A node without peers generates its own and keeps it on its disk."""
LOG_LINES_KEPT = 200
TRY_AGAIN_S = 0.2
COMMIT_LOG_OFF_SHARE = 0.15
"""How often a node with a commit log is started without it: then it has to replay the last one first."""
LOGGED_AS_FAULTS = (
    "request_failed",
    "append_failed",
    "read_failed",
    "error_response_failed",
    "metadata_event_failed",
    "log_damaged",
    "commit_log_damaged",
    "truncated_below_watermark",
    "raft_failed",
    "isr_proposal_failed",
    "heartbeat_failed",
)
"""Events that no node may log under any fault."""


class SimNode:
    """One node of the cluster: its machine, its settings, and its running broker, if any."""

    def __init__(self, host: Host, config: NodeConfig) -> None:
        self.host = host
        self.world = host.world
        self.config = config
        self.broker: Broker | None = None
        self.log_lines: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self.starts = 0
        self.copies: list[tuple[int, FolderNode]] = []
        """Copies of its data folder, each with `starts` at that time; kept while it stays the same member."""
        self.may_log: set[str] = set()
        """The events in `LOGGED_AS_FAULTS` that this node may log because its files were damaged."""

    @property
    def is_ready(self) -> bool:
        return self.is_up and self.broker is not None and self.broker.is_ready

    @property
    def is_up(self) -> bool:
        process = self.host.process
        return self.host.is_powered and process is not None and process.is_alive

    @property
    def running_broker(self) -> Broker | None:
        """The broker, if it is open and takes part in the Raft group."""
        return self.broker if self.is_up else None

    @property
    def ready_broker(self) -> Broker | None:
        """The broker, if it serves clients."""
        return self.broker if self.is_ready else None

    @property
    def is_controller(self) -> bool:
        broker = self.ready_broker
        return broker is not None and broker.is_controller

    def start(self) -> None:
        """Start the program, unless it is running."""
        if self.is_up:
            return
        if not self.host.is_powered:
            self.host.power_on()
        self.starts += 1
        self.broker = None
        self.world.note(f"{self.host.name} starts")
        self.host.start(self._main, self.config.executor_threads)

    async def _main(self, process: Process) -> None:
        clock = self.host.clock
        disk = ProcessDisk(process)
        env = Environment(
            disk,
            self.world.random(f"{process.name}:node"),
            process.executor,
            clock.wall_ms,
            lambda path, new_store_id: DiskRaftStore(disk, path, new_store_id),
            boot_id=f"boot-{self.host.boots}",
            cluster_secret=CLUSTER_SECRET if self.config.peers else "",
        )
        logger = make_logger(self._logged, clock.wall_ms, LogLevels(), node=self.config.node_id)
        config = self.config
        if config.commit_log and self.world.random(f"{process.name}:commit-log").random() < COMMIT_LOG_OFF_SHARE:
            config = msgspec.structs.replace(config, commit_log=False)
        try:
            self.broker = await Broker.open(Runtime.make(config, env, Metrics(), logger))
            await self.broker.start()
        except (OSError, DataFolderError, StoreError, ConfigError, KafkaError) as error:
            if isinstance(error, KafkaError) and error.code is not ErrorCode.kafka_storage_error:
                raise
            # A node that cannot use its disk or its folder reports that and exits; its supervisor starts it again.
            self.world.note(f"{self.host.name} cannot start: {error}")
            asyncio.get_running_loop().call_soon(self.host.kill)
            return
        self.world.note(f"{self.host.name} is ready")
        failure = await self.broker.failed()
        self.world.note(f"{self.host.name} cannot continue: {failure}")
        self.world.after(TRY_AGAIN_S, self.start_when_down)
        await self._stop(self.broker)

    def _logged(self, line: str) -> None:
        self.log_lines.append(f"{self.world.now:10.6f}  {self.host.name}  {line.rstrip()}")
        if any(f'"{event}"' in line for event in LOGGED_AS_FAULTS):
            event = json.loads(line)
            if event["event"] in LOGGED_AS_FAULTS and event["event"] not in self.may_log:
                self.world.violated(f"{self.host.name} logged {event['event']}: {event.get('error')}")

    def kill(self) -> None:
        """SIGKILL."""
        self.world.note(f"{self.host.name} is killed")
        self.host.kill()

    def power_off(self) -> None:
        self.world.note(f"{self.host.name} loses power")
        self.host.power_off()

    def stop(self) -> None:
        """SIGTERM: a clean stop if the node is ready; otherwise the process just ends."""
        process, broker = self.host.process, self.broker
        if process is None or not process.is_running:
            return
        if broker is None or not broker.is_ready:
            self.kill()
            return
        self.world.note(f"{self.host.name} is stopped")
        process.loop.call_soon_threadsafe(lambda: process.run(self._stop(broker)))

    async def _stop(self, broker: Broker) -> None:
        await broker.stop()
        self.world.note(f"{self.host.name} has stopped")
        asyncio.get_running_loop().call_soon(self.host.kill)

    def start_when_down(self) -> None:
        """Start the node whenever it is down, until it is ready."""
        if not self.is_ready:
            self.start()
            self.world.after(TRY_AGAIN_S, self.start_when_down)


def newest_image(nodes: Iterable[SimNode]) -> ClusterImage | None:
    """Return the newest image of all running nodes: a leader acts on its own image."""
    images = [broker.image for node in nodes if (broker := node.running_broker) is not None]
    return max(images, key=lambda image: image.version, default=None)


def node_config(node_id: int, host: Host, **settings: object) -> NodeConfig:
    """Return settings for a simulated node: periodic work runs more often than on a real node.

    In half of all runs, nodes have a commit log, with small files. In most, followers fetch so little at once that they
    often fetch ahead of their syncs.
    """
    values: dict[str, object] = {
        "node_id": node_id,
        "data_dir": f"/data/node-{node_id}",
        "listen": Listen(kafka=f"{host.address}:9092", internal=f"{host.address}:5092"),
        "offsets_topic_partitions": 2,
        "transaction_state_topic_partitions": 2,
        "group_initial_rebalance_delay_ms": 20,
        "group_min_session_timeout_ms": 500,
        "retention_check_interval_ms": 400,
        "compaction_check_interval_ms": 300,
        "recovery_point_interval_ms": 250,
        "commit_log": host.world.random("commit-log").random() < 0.5,
        "commit_log_bytes": 128 * 1024,
        "replica_fetch_bytes_max": host.world.random("replica-fetch").choice((200, 500, 1_000, 1024 * 1024)),
        "scrub_interval_ms": 500,
        **settings,
    }
    return NodeConfig(**values)  # type: ignore[arg-type]
