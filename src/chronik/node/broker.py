"""The running node: puts the rooms together and owns their order of start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from chronik.metadata.calls import HandOver
from chronik.metadata.events import Event
from chronik.metadata.image import BrokerImage, ClusterImage, TopicImage
from chronik.metadata.names import OFFSETS_TOPIC
from chronik.node.admin.topic_creation import create_topic
from chronik.node.age_clock import AgeClock
from chronik.node.apis import load_apis
from chronik.node.config import ConfigError, NodeConfig
from chronik.node.coordinators.group_service import GroupService
from chronik.node.disk_watch import DiskWatch
from chronik.node.environment import Environment
from chronik.node.forwarding.forwarding import Forwarding
from chronik.node.membership.cluster_member import ClusterMember
from chronik.node.membership.cluster_secret import load_secret
from chronik.node.membership.controller_client import ControllerClient
from chronik.node.membership.controller_service import ControllerService
from chronik.node.membership.departures import Departures
from chronik.node.membership.envelopes import Envelopes
from chronik.node.membership.greeter import Greeter
from chronik.node.membership.internal_server import InternalServer
from chronik.node.membership.metadata_log import NotController, RaftMetadataLog
from chronik.node.membership.peers import Peers
from chronik.node.membership.producer_ids import ProducerIds
from chronik.node.membership.raft_service import RaftService
from chronik.node.replicas.cluster_links import ClusterLinks
from chronik.node.replicas.healing import Damage, Healing
from chronik.node.replicas.housekeeping import Housekeeping
from chronik.node.replicas.partition import Partition
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.replicas.scrubber import Scrubber
from chronik.node.replicas.syncer import Syncer
from chronik.node.replicas.watermark_watch import WatermarkWatch
from chronik.node.serving.deadlines import Deadlines
from chronik.node.serving.fetch_sessions import FetchSessions
from chronik.node.serving.request import Api
from chronik.node.serving.server import Server
from chronik.node.topic_settings import check_topic_defaults
from chronik.node.trace_topic import TraceTopic
from chronik.observe.logging import Logger
from chronik.observe.metrics import GroupLag, Metrics
from chronik.observe.traces import TraceRing
from chronik.storage.folder import DataFolder
from chronik.wire.errors import ErrorCode, KafkaError

T = TypeVar("T")
APPLIED_TIMEOUT_S = 30.0
FOLLOWED_TIMEOUT_S = 5.0
"""Longer than a session: a broker that does not follow is found to be gone by then."""


class Broker:
    """One node. Owned by its loop; `start` to serve, `stop` to leave the data folder clean.

    Whoever handles a request reads what it needs from here: `image`, `partition`, `groups`, `metadata`.
    """

    def __init__(self, config: NodeConfig, env: Environment, metrics: Metrics, log: Logger, *, http: str = "") -> None:
        self.config = config
        self.env = env
        self.metrics = metrics
        self.log = log
        self.http = http
        """Where this node's HTTP server can be reached; empty where it has none."""
        self.node_id = config.node_id
        self.traces = TraceRing(config.node_id, config.trace_ring_events, env.wall_ms, metrics)
        self.loop = asyncio.get_running_loop()
        self.age_clock = AgeClock(self.loop.time, env.wall_ms, log)
        self.apis: dict[int, Api] = load_apis()
        self._is_serving = False
        self.has_opened_logs = False
        self.is_leaving = False
        """Whether others are taking over what this node leads, since it is about to stop."""
        self.deadlines = Deadlines(self.loop)
        self.fetch_sessions = FetchSessions(env.random, config.fetch_sessions_max)
        self.disk_watch = DiskWatch(self.loop, config.disk_timeout_ms, log)
        self.syncer = Syncer(self.loop, env, metrics, self.disk_watch, is_vital=config.durability == "synced")
        self.server = Server(self, self.apis)
        self.internal_server = InternalServer(self, self.apis)
        self.envelopes = Envelopes(self)
        self.forwarding = Forwarding(self, config.forward_bytes_max)
        self.member: ClusterMember
        self.metadata: RaftMetadataLog
        self.departures: Departures
        self.groups: GroupService
        self.host: PartitionHost
        self.healing: Healing
        self.producer_ids: ProducerIds
        self.watermarks: WatermarkWatch
        self.failure: Exception | None = None
        """What the node found that it cannot go on from; whoever runs it should stop it."""
        self._failed = asyncio.Event()
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
        try:
            check_topic_defaults(config)
        except KafkaError as error:
            raise ConfigError(f"topic_defaults: {error.message}") from None
        # The ports first: a second node must notice before it touches anything.
        await self.server.bind(*config.kafka_endpoint)
        self._closers.append(self._close_server)
        await self.internal_server.bind(*config.internal_endpoint)
        self._closers.append(self._close_internal_server)
        folder = await self._open_folder()
        secret = await self.run_blocking(lambda: load_secret(self.env, config, folder.path))
        self.member = ClusterMember(self, folder, secret)
        self.metadata = self.member.metadata
        self.departures = Departures(self.loop, self.node_id, self.metadata, self.peers.status)
        self.metadata.subscribe(self.departures.metadata_changed)
        self._closers.append(self.member.close)
        await self.member.open()
        self._closers.append(self._close_internal_server)
        await self.internal_server.serve()
        self.producer_ids = ProducerIds(self.controller_client, self.node_id)
        await self._while_sound(self.member.join(self._settled))
        links = ClusterLinks(
            self.peers.connection, self.member.propose_isr, self.member.report_replicas, self.lease_is_valid
        )
        self.host = PartitionHost(
            self.loop,
            self.env,
            config,
            folder,
            self.metadata,
            self.syncer,
            self.metrics,
            self.traces,
            self.log,
            links,
            self.member.identity.incarnation,
        )
        self.metadata.subscribe(self.host.metadata_changed)
        self._closers.append(lambda: self.host.close_all(self.member.session.broker_epoch))
        self.healing = Healing(
            self.loop, self.env, folder.path, self.host.replication, self.host.reports, self.metrics, self.log
        )
        self._closers.append(self.healing.close)
        await self.host.open_all()
        # Before the first heartbeat: no replica that lost records may be elected.
        await self._while_sound(self.host.reports.flush())
        self.host.reports.start()
        self.has_opened_logs = True
        self._closers.append(self._close_server)
        self.groups = GroupService(self)
        self.metadata.subscribe(self._tell_groups)
        # Closed before the connections: members that wait in a rebalance would hold up their end.
        self._closers.append(self.groups.stop)
        await self.groups.start()
        self.metrics.partitions = self.host.gauges
        self.metrics.groups = lambda: [GroupLag(*lag) for lag in self.groups.lag_gauges()]
        self.watermarks = WatermarkWatch(self.loop, self.host.partitions, self.log)
        self.watermarks.start()
        self._closers.append(self.watermarks.stop)
        self.metrics.watermark_age_s = self.watermarks.monitor.age_s
        housekeeping = Housekeeping(self.loop, self.env, self.age_clock.now_ms, config, self.host, self.log)
        housekeeping.start()
        self._closers.append(housekeeping.stop)
        scrubber = Scrubber(
            self.loop, self.env, config.scrub_interval_ms, self.host, self.healing, self.metrics, self.log
        )
        scrubber.start()
        self._closers.append(scrubber.stop)
        self.member.session.start()
        self._closers.append(self.member.session.close)
        await self._while_sound(self.member.session.unfenced())
        await self.server.serve()
        traces = TraceTopic(self)
        traces.start()
        self._closers.append(traces.stop)
        self._closers.append(self._leave)
        self._is_serving = True
        self.log.info(
            "ready",
            kafka=str(config.advertised_kafka(self.server.port)),
            internal=self.member.identity.internal,
            data_dir=config.data_folder,
            durability=config.durability,
            controller=self.controller_id,
            topics=len(self.image.topics),
            partitions=len(self.host.partitions),
        )

    async def _open_folder(self) -> DataFolder:
        config = self.config
        folder = await self.run_blocking(
            lambda: DataFolder.open(self.env.disk, config.data_folder, config.node_id, config.cluster_id or "")
        )

        async def close() -> None:
            try:
                await self.disk_watch.wait(self.loop.run_in_executor(self.env.executor, folder.close))
            except TimeoutError as error:
                self.log.error("data_folder_not_closed", reason=str(error))

        self._closers.append(close)
        return folder

    async def _while_sound(self, work: Coroutine[Any, Any, None]) -> None:
        """Waits for a part of the start that needs other nodes; raises what this one cannot go on from meanwhile."""
        running = self.loop.create_task(work)
        failing = self.loop.create_task(self._failed.wait())
        try:
            await asyncio.wait([running, failing], return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None:
                raise self.failure
            await running
        finally:
            running.cancel()
            failing.cancel()

    async def stop(self) -> None:
        """Answer what runs, sync everything, and record that the shutdown was clean. A second call changes nothing."""
        self._is_serving = False
        while self._closers:
            await self._closers.pop()()

    async def failed(self) -> Exception:
        """Returns when the node has found something that it cannot go on from."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    def failed_by(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
            self._failed.set()

    async def _leave(self) -> None:
        """While it still serves, others take over what it leads."""
        self._is_serving = False
        self.is_leaving = True
        if self.failure is None:
            await self.member.leave()

    async def _close_server(self) -> None:
        await self.server.close(self.config.shutdown_timeout_ms / 1000)
        self.deadlines.close()

    async def _close_internal_server(self) -> None:
        await self.internal_server.close(0)

    # -- what handlers ask for -----------------------------------------------------------------------------------------

    @property
    def image(self) -> ClusterImage:
        return self.metadata.image

    @property
    def controller_id(self) -> int:
        return self.metadata.controller_id

    @property
    def is_controller(self) -> bool:
        return self.metadata.is_controller

    @property
    def controller(self) -> ControllerService:
        return self.member.controller

    @property
    def controller_client(self) -> ControllerClient:
        return self.member.client

    @property
    def greeter(self) -> Greeter:
        return self.member.greeter

    @property
    def peers(self) -> Peers:
        return self.member.peers

    @property
    def raft(self) -> RaftService:
        return self.member.raft

    @property
    def is_ready(self) -> bool:
        """Whether clients are served: started, not stopping, and not cut off from the controller."""
        return self._is_serving and self.lease_is_valid()

    @property
    def damages(self) -> Sequence[Damage]:
        """Damage that was found in logs of this node since its start, the oldest first."""
        return tuple(self.healing.damages) if self.has_opened_logs else ()

    def lease_is_valid(self) -> bool:
        """Whether this node may act as the leader that its image says it is. Alone it needs nobody's leave."""
        return self.member.raft.is_alone or self.member.session.lease_is_valid

    def leader_of(self, topic: str, index: int) -> tuple[tuple[int, int], BrokerImage] | None:
        """Who leads a partition, as (id, epoch) and with its address: for a client that came to the wrong node."""
        partition = self.image.partition(topic, index)
        leader = None if partition is None else self.image.brokers.get(partition.leader)
        if partition is None or leader is None or leader.id == self.node_id:
            return None
        return (leader.id, partition.leader_epoch), leader

    def hand_over(self, hand_overs: Sequence[HandOver]) -> None:
        """The controller asks this node to give these partitions to others, with all that it acknowledged."""
        if self.has_opened_logs:
            self.host.hand_over(hand_overs)

    def partition(self, topic: str, index: int) -> Partition | None:
        return self.host.partitions.get((topic, index))

    def require_partition(self, topic: str, index: int, *, is_answer: bool = True) -> Partition:
        """The partition, if this node leads it; otherwise the error that tells the client what to do.

        `is_answer` False: the error is no answer yet, since another node is asked.
        """
        partition = self.host.partitions.get((topic, index))
        if partition is not None and partition.leads:
            return partition
        if self.image.partition(topic, index) is None:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, f"{topic}-{index} does not exist")
        if is_answer:
            self.metrics.rejected(topic, index)
        raise KafkaError(ErrorCode.not_leader_or_follower, f"{topic}-{index} is not led by node {self.node_id}")

    def has_opened(self, topic: TopicImage) -> bool:
        """Whether every log of the topic that belongs on this node is open, or will be before it serves anybody."""
        return not self.has_opened_logs or all(
            self.partition(topic.name, partition.partition) is not None
            for partition in topic.partitions
            if self.node_id in partition.replicas
        )

    async def _settled(self) -> None:
        if self.has_opened_logs:
            await self.host.settled()

    async def applied(self) -> None:
        """Wait until the partitions hosted here follow the image as it is now."""
        async with asyncio.timeout(APPLIED_TIMEOUT_S):
            await self._settled()

    async def applied_everywhere(self) -> None:
        """On the controller: wait until all brokers that are there follow the image as it is now, within bounds."""
        version, broker_ids = self.image.version, sorted(self.image.brokers)
        await self.applied()
        try:
            async with asyncio.timeout(FOLLOWED_TIMEOUT_S):
                await self.controller.applied_by(version, broker_ids)
        except TimeoutError:
            self.log.warning("image_not_followed", version=version, then="answered all the same")
        except NotController:
            # Another controller has taken over; what was done stands.
            return

    async def create_missing_topic(self, name: str) -> TopicImage:
        """Create a topic with the node's defaults because a client asked for it; fine if another was first.

        The groups' own topic too, which lag tools ask for before there is a group.
        """
        try:
            if name == OFFSETS_TOPIC:
                await self.groups.ensure_topic()
            else:
                await create_topic(self, name)
        except KafkaError as error:
            if error.code == ErrorCode.coordinator_not_available:
                # The groups' word for it; who asks for metadata knows this one, and asks again.
                raise KafkaError(ErrorCode.leader_not_available, error.message) from error
            if error.code != ErrorCode.topic_already_exists:
                raise
            await self.applied()
        return self.image.require_topic(name)

    async def append_internal(self, topic: str, index: int, batch: bytes, timeout_s: float) -> int:
        """Append to a topic of the cluster's own, and wait until it is committed; the base offset.

        REQUEST_TIMED_OUT after `timeout_s`: the batch is in the log, and may be committed later or never.
        """
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
        try:
            async with asyncio.timeout(timeout_s):
                await committed
        except TimeoutError:
            raise KafkaError(
                ErrorCode.request_timed_out, f"{topic}-{index} was not committed within {timeout_s} s"
            ) from None
        return appended.base_offset

    def fetch_bytes_allowed(self) -> int:
        """How much one fetch may bring now: less while slow readers hold much of what was sent already."""
        return self.server.response_bytes_allowed()

    async def run_blocking(self, call: Callable[[], T]) -> T:
        return await self.loop.run_in_executor(self.env.executor, call)

    def _tell_groups(self, image: ClusterImage, events: Sequence[Event]) -> None:
        for event in events:
            self.groups.metadata_event(event)
