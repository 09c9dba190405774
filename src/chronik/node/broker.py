"""The running node: puts the rooms together and owns their order of start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from chronik.metadata.commands import RegisterBroker
from chronik.metadata.events import Event
from chronik.metadata.image import ClusterImage, TopicImage
from chronik.node.api import Api
from chronik.node.apis import load_apis
from chronik.node.config import ConfigError, NodeConfig
from chronik.node.deadlines import Deadlines
from chronik.node.environment import Environment
from chronik.node.fetch_sessions import FetchSessions
from chronik.node.group_service import GroupService
from chronik.node.housekeeping import Housekeeping
from chronik.node.metadata_log import LocalMetadataLog, MetadataLog, new_cluster_id
from chronik.node.metadata_store import MetadataStoreError
from chronik.node.partition import Partition
from chronik.node.partition_host import PartitionHost
from chronik.node.producer_ids import ProducerIds
from chronik.node.server import Server
from chronik.node.syncer import Syncer
from chronik.node.topic_creation import create_topic
from chronik.node.topic_settings import check_topic_defaults
from chronik.observe.logging import Logger
from chronik.observe.metrics import GroupLag, Metrics
from chronik.storage.folder import DataFolder
from chronik.wire.errors import ErrorCode, KafkaError

T = TypeVar("T")
APPLIED_TIMEOUT_S = 30.0


class Broker:
    """One node. Owned by its loop; `start` to serve, `stop` to leave the data folder clean.

    Whoever handles a request reads what it needs from here: `image`, `partition`, `groups`, `metadata`.
    """

    def __init__(self, config: NodeConfig, env: Environment, metrics: Metrics, log: Logger) -> None:
        self.config = config
        self.env = env
        self.metrics = metrics
        self.log = log
        self.node_id = config.node_id
        self.loop = asyncio.get_running_loop()
        self.apis: dict[int, Api] = load_apis()
        self.is_ready = False
        self.deadlines = Deadlines(self.loop)
        self.fetch_sessions = FetchSessions(env.random, config.fetch_sessions_max)
        self.syncer = Syncer(self.loop, env, metrics)
        self.server = Server(self, self.apis)
        self.metadata: MetadataLog
        self.groups: GroupService
        self.host: PartitionHost
        self.producer_ids: ProducerIds
        self._closers: list[Callable[[], Awaitable[None]]] = []

    # -- start and stop ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover, then serve. Raises what keeps the node from starting, after letting go of what it holds."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.config
        if config.peers:
            raise ConfigError("peers: this version runs single nodes only: remove the peers")
        try:
            check_topic_defaults(config)
        except KafkaError as error:
            raise ConfigError(f"topic_defaults: {error.message}") from None
        # The port first: a second node must notice before it touches anything.
        await self.server.bind(config.kafka_endpoint.host, config.kafka_endpoint.port)
        self._closers.append(self._close_server)
        folder = await self._open_folder()
        await self._open_metadata(folder)
        self.host = PartitionHost(
            self.loop, self.env, config, folder, self.metadata, self.syncer, self.metrics, self.log
        )
        self.metadata.subscribe(self.host.metadata_changed)
        self._closers.append(self.host.close_all)
        await self.host.open_all()
        self._closers.append(self._close_server)
        self.groups = GroupService(self)
        self.metadata.subscribe(self._tell_groups)
        # Closed before the connections: members that wait in a rebalance would hold up their end.
        self._closers.append(self.groups.stop)
        await self.groups.start()
        self.metrics.partitions = self.host.gauges
        self.metrics.groups = lambda: [GroupLag(*lag) for lag in self.groups.lag_gauges()]
        housekeeping = Housekeeping(self.loop, self.env, config, self.host, self.log)
        housekeeping.start()
        self._closers.append(housekeeping.stop)
        await self.server.serve()
        self.is_ready = True
        self.log.info(
            "ready",
            kafka=str(config.advertised_kafka(self.server.port)),
            data_dir=config.data_folder,
            durability=config.durability,
            topics=len(self.image.topics),
            partitions=len(self.host.partitions),
        )

    async def _open_folder(self) -> DataFolder:
        config = self.config
        cluster_id = config.cluster_id or new_cluster_id(self.env)
        folder = await self.run_blocking(
            lambda: DataFolder.open(self.env.disk, config.data_folder, config.node_id, cluster_id)
        )
        self._closers.append(lambda: self.run_blocking(folder.close))
        return folder

    async def _open_metadata(self, folder: DataFolder) -> None:
        store = self.env.open_metadata_store(f"{folder.path}/metadata.db")
        has_logs = bool(await self.run_blocking(folder.partitions))
        self.metadata = await LocalMetadataLog.open(self.env, store, folder.meta.cluster_id, may_be_new=not has_logs)
        self._closers.append(self.metadata.close)
        self.producer_ids = ProducerIds(self.metadata, self.node_id)
        advertised = self.config.advertised_kafka(self.server.port)
        registration = RegisterBroker(
            broker_id=self.node_id,
            incarnation=self.env.new_uuid(),
            host=advertised.host,
            port=advertised.port,
            rack=self.config.rack,
        )
        try:
            await self.metadata.propose(registration)
        except KafkaError as error:
            raise MetadataStoreError(
                f"this start cannot be recorded ({error.message}): make room on the disk"
            ) from None

    async def stop(self) -> None:
        """Answer what runs, sync everything, and record that the shutdown was clean. A second call changes nothing."""
        self.is_ready = False
        while self._closers:
            await self._closers.pop()()

    async def _close_server(self) -> None:
        await self.server.close(self.config.shutdown_timeout_ms / 1000)
        self.deadlines.close()

    # -- what handlers ask for -----------------------------------------------------------------------------------------

    @property
    def image(self) -> ClusterImage:
        return self.metadata.image

    @property
    def controller_id(self) -> int:
        return self.metadata.image.controller_id

    def partition(self, topic: str, index: int) -> Partition | None:
        return self.host.partitions.get((topic, index))

    def require_partition(self, topic: str, index: int) -> Partition:
        """The partition, if this node leads it; otherwise the error that tells the client what to do."""
        partition = self.host.partitions.get((topic, index))
        if partition is not None:
            return partition
        if self.image.partition(topic, index) is None:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, f"{topic}-{index} does not exist")
        self.metrics.not_leader += 1
        raise KafkaError(ErrorCode.not_leader_or_follower, f"{topic}-{index} is not led by node {self.node_id}")

    async def applied(self) -> None:
        """Wait until the partitions hosted here follow the image as it is now."""
        async with asyncio.timeout(APPLIED_TIMEOUT_S):
            await self.host.settled()

    async def create_missing_topic(self, name: str) -> TopicImage:
        """Create a topic with the node's defaults because a client asked for it; fine if another was first."""
        try:
            await create_topic(self, name)
        except KafkaError as error:
            if error.code != ErrorCode.topic_already_exists:
                raise
            await self.applied()
        return self.image.require_topic(name)

    async def append_internal(self, topic: str, index: int, batch: bytes) -> int:
        """Append to a topic of the cluster's own, and wait until it is committed; the base offset."""
        partition = self.require_partition(topic, index)
        partition.check_enough_replicas()
        appended = partition.append_internal(batch, self.env.wall_ms())
        committed: asyncio.Future[None] = self.loop.create_future()

        def done(error: KafkaError | None) -> None:
            if committed.done():
                return
            if error is None:
                committed.set_result(None)
            else:
                committed.set_exception(error)

        partition.when_committed(appended.last_offset + 1, done)
        await committed
        return appended.base_offset

    def fetch_bytes_allowed(self) -> int:
        """How much one fetch may bring now: less while slow readers hold much of what was sent already."""
        return self.server.response_bytes_allowed()

    async def run_blocking(self, call: Callable[[], T]) -> T:
        return await self.loop.run_in_executor(self.env.executor, call)

    def _tell_groups(self, image: ClusterImage, events: Sequence[Event]) -> None:
        for event in events:
            self.groups.metadata_event(event)
