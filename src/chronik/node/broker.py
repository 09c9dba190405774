"""The running node: constructs its services, and starts and stops them in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal, NamedTuple
from uuid import UUID

from chronik.metadata.events import ClientQuotasChanged, ConfigChanged, Event
from chronik.metadata.image import ClusterImage
from chronik.node.admin.telemetry import ClientInstance, ClientTelemetry
from chronik.node.admin.topics import Topics
from chronik.node.age_clock import AgeClock
from chronik.node.api_table import ApiServices, make_handlers
from chronik.node.config import ConfigError
from chronik.node.coordinators.group_service import GroupService
from chronik.node.coordinators.log_ends import LogEnds
from chronik.node.coordinators.markers import MarkerWriter
from chronik.node.coordinators.share_coordinator import ShareCoordinatorService
from chronik.node.coordinators.share_state import ShareStateClient
from chronik.node.coordinators.transaction_service import TransactionService
from chronik.node.coordinators.transactions import Transactions
from chronik.node.disk_watch import NO_ANSWER, DiskWatch
from chronik.node.forwarding.forwarding import Forwarding
from chronik.node.membership.authorization import AuthorizationService
from chronik.node.membership.cluster_member import Addresses, ClusterMember, StoredMetadata, load_metadata
from chronik.node.membership.cluster_secret import ClusterSecret, load_secret
from chronik.node.membership.controller_client import ProducerIds
from chronik.node.membership.departures import Departures
from chronik.node.membership.envelopes import Envelopes
from chronik.node.membership.internal_server import KAFKA_APIS, InternalServer, PeerApis, internal_listener
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.committer import Committer, begin_commit_log
from chronik.node.replicas.healing import Damage, Healing
from chronik.node.replicas.housekeeping import Housekeeping, WatermarkWatch
from chronik.node.replicas.partition import Partition
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.replicas.replication import ClusterLinks
from chronik.node.replicas.scrubber import Scrubber
from chronik.node.replicas.syncer import Syncer
from chronik.node.replicas.verifier import Verifier
from chronik.node.runtime import Runtime
from chronik.node.schema_registry import SchemaRegistry
from chronik.node.serving.authentication import Authentication
from chronik.node.serving.connection_quotas import ConnectionQuotas
from chronik.node.serving.deadlines import Deadlines
from chronik.node.serving.fetch_sessions import FetchSessions
from chronik.node.serving.quotas import ClientQuotas
from chronik.node.serving.server import Server
from chronik.node.serving.tls import NodeTls
from chronik.node.shares.dead_letters import DeadLetters
from chronik.node.shares.share_partitions import SharePartitions
from chronik.node.topic_settings import check_topic_defaults
from chronik.node.trace_topic import TraceTopic
from chronik.storage.commit_log import CommitLog
from chronik.storage.folder import DataFolder
from chronik.wire.errors import KafkaError

BrokerState = Literal["ready", "starting", "stopping", "disconnected"]


class Held(NamedTuple):
    """The resources that a node acquires first: its ports, data folder, cluster secret and metadata store."""

    server: Server
    internal_server: InternalServer
    folder: DataFolder
    commit_log: CommitLog | None
    secret: ClusterSecret
    stored: StoredMetadata
    tls: NodeTls | None


class Broker:
    """One node, created by `open`. `start` begins to serve; `stop` leaves the data folder clean.

    Owned by its loop.
    """

    @classmethod
    async def open(cls, runtime: Runtime, *, http: str = "", tls: NodeTls | None = None) -> Broker:
        """Bind the ports, lock the data folder, and load the metadata store.

        `http` is the address of this node's HTTP server, if it has one. `tls` has the certificates that the settings
        name; without it they are loaded here. If the node cannot start, raise the reason after releasing everything.
        """
        env, config = runtime.env, runtime.config
        try:
            check_topic_defaults(config)
        except KafkaError as error:
            raise ConfigError(f"topic_defaults: {error.message}") from None
        disk_watch = DiskWatch(runtime.loop, config.disk_timeout_ms, runtime.log)
        async with AsyncExitStack() as held:
            if tls is None and config.uses_tls:
                tls = await NodeTls.load(runtime)
                tls.start()
                held.push_async_callback(tls.stop)
            # The ports first: a second node with the same settings must fail before it touches anything.
            server, internal_server = Server(runtime, tls), InternalServer(runtime, tls)
            held.push_async_callback(server.close, 0)
            await server.bind(*config.kafka_listeners)
            held.push_async_callback(internal_server.close, 0)
            await internal_server.bind(internal_listener(config))
            folder = await runtime.run_blocking(
                lambda: DataFolder.open(env.disk, config.data_folder, config.node_id, config.cluster_id or "")
            )
            held.push_async_callback(_close_files, runtime, disk_watch, folder)
            commit_log = await begin_commit_log(runtime, folder)
            if commit_log is not None:
                held.push_async_callback(_close_files, runtime, disk_watch, commit_log)
            secret = await runtime.run_blocking(lambda: load_secret(env, config, folder.path))
            stored = await load_metadata(runtime, folder)
            try:
                broker = cls(
                    runtime, disk_watch, Held(server, internal_server, folder, commit_log, secret, stored, tls), http
                )
            except BaseException:
                await runtime.run_blocking(stored.store.close)
                raise
            broker._closers.append(held.pop_all().aclose)
            return broker

    def __init__(self, runtime: Runtime, disk_watch: DiskWatch, held: Held, http: str) -> None:
        loop, env, config, log = runtime.loop, runtime.env, runtime.config, runtime.log
        self.runtime = runtime
        self.config = config
        self.metrics = runtime.metrics
        self.node_id = config.node_id
        self.disk_watch = disk_watch
        self.secret = held.secret
        self.server = held.server
        self.internal_server = held.internal_server
        self.traces = runtime.traces
        self.failure: Exception | None = None
        """The error that the node cannot continue from; its owner should stop it."""
        self._failed = asyncio.Event()
        self._is_serving = False
        self._is_stopping = False
        incarnation = env.new_uuid()
        self.metadata = MetadataLog(loop, log)
        self.host = self._make_host(held, incarnation)
        self.member = ClusterMember(
            runtime,
            disk_watch,
            held.folder,
            held.secret,
            Addresses(held.server.advertised(), config.advertised_internal(held.internal_server.port), http),
            incarnation,
            held.stored,
            self.metadata,
            self.host,
            self.failed_by,
            held.tls,
        )
        member = self.member
        self.authentication = Authentication(runtime, held.secret.proven, lambda: self.metadata.image.scram)
        self.server.authentication = self.authentication
        self.healing = Healing(runtime, self.host)
        self.age_clock = AgeClock(loop.time, env.wall_ms, log)
        self.deadlines = Deadlines(loop)
        self.quotas = ClientQuotas(runtime)
        member.controller.charge_creation = self.quotas.charge_creation
        self.connection_quotas = ConnectionQuotas(runtime)
        self.topics = Topics(self.metadata, member.client, self.host.applied)
        self.share_coordinator = ShareCoordinatorService(
            runtime, self.metadata, self.host, self.topics, member.lease_is_valid, self.age_clock
        )
        self.share_state = ShareStateClient(runtime, self.metadata, member.peers, self.share_coordinator)
        self.groups = GroupService(
            runtime,
            self.metadata,
            self.host,
            self.topics,
            member.lease_is_valid,
            self.age_clock,
            self.share_state,
            LogEnds(runtime, self.metadata, self.host, member.peers),
        )
        self.producer_ids = ProducerIds(member.client, self.node_id)
        self.marker_writer = MarkerWriter(runtime, self.host, self.groups.is_loaded, self.groups.transaction_ended)
        self.transactions = TransactionService(
            runtime,
            self.metadata,
            self.host,
            self.topics,
            member.lease_is_valid,
            self.age_clock,
            member.peers,
            self.marker_writer,
            self.producer_ids.next,
        )
        self.transaction_coordinators = Transactions(runtime, self.metadata, member.peers, self.transactions)
        self.shares = SharePartitions(
            runtime, self.metadata, self.host, self.share_state, config.group_share_max_share_sessions
        )
        self.dead_letters = DeadLetters(
            runtime, self.metadata, self.host, member.peers, self.topics, self.shares.dead_letter_written
        )
        self.shares.copy_dead_letter = self.dead_letters.copy
        self.telemetry = ClientTelemetry(runtime, self.metadata)
        self.forwarding = Forwarding(runtime, self.metadata, member.peers, self.host, self.deadlines)
        self.verifier = Verifier(runtime, self.transaction_coordinators)
        self.departures = Departures(runtime, self.metadata, member.peers.status)
        self.watermarks = WatermarkWatch(runtime, self.host.partitions)
        self._housekeeping = Housekeeping(runtime, self.host, self.age_clock.now_ms)
        self._scrubber = Scrubber(runtime, self.host, self.healing)
        self._trace_topic = TraceTopic(runtime, self.metadata, member.peers, self.host, self.topics)
        self.schemas = SchemaRegistry(runtime, self.metadata, member.peers, self.host, self.topics)
        self.authorization = AuthorizationService(runtime) if config.authorization.enabled else None
        """Authorizes clients; None if every client may do everything."""
        self.server.decisions = self.authentication.decisions = self.authorization
        self._envelopes = Envelopes(runtime, self.metadata, member.client, self.host.applied, self.authorization)
        self.handlers = make_handlers(
            ApiServices(
                runtime=runtime,
                metadata=self.metadata,
                raft=member.raft,
                controller=member.controller,
                departures=self.departures,
                producer_ids=self.producer_ids,
                host=self.host,
                groups=self.groups,
                transactions=self.transactions,
                share_coordinator=self.share_coordinator,
                shares=self.shares,
                transaction_coordinators=self.transaction_coordinators,
                marker_writer=self.marker_writer,
                topics=self.topics,
                forwarding=self.forwarding,
                server=self.server,
                deadlines=self.deadlines,
                fetch_sessions=FetchSessions(env.random, config.fetch_sessions_max),
                verifier=self.verifier,
                schemas=self.schemas,
                quotas=self.quotas,
                telemetry=self.telemetry,
            )
        )
        self._envelopes.serve(self.handlers)
        self._peer_apis = PeerApis(held.internal_server, member, self._envelopes, log)
        self._closers: list[Callable[[], Awaitable[None]]] = []

    def _make_host(self, held: Held, incarnation: UUID) -> PartitionHost:
        # Lambdas, because `member` is created later: it needs the partitions, and they need it.
        links = ClusterLinks(
            lambda node_id: self.member.peers.connection(node_id),
            lambda *proposal: self.member.propose_isr(*proposal),
            lambda reports, waits: self.member.report_replicas(reports, waits),
            lambda: self.member.lease_is_valid(),
        )
        committer = None
        if held.commit_log is not None:
            committer = Committer(self.runtime, self.disk_watch, held.commit_log)
        syncer = Syncer(self.runtime, self.disk_watch, committer)
        return PartitionHost(self.runtime, held.folder, self.metadata, syncer, links, incarnation)

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover, then serve. If the node cannot start, raise the reason after releasing everything."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        member, host, metadata = self.member, self.host, self.metadata
        # First: a users file that cannot be used has to stop the node before it joins the cluster.
        self._closers.append(self.authentication.stop)
        await self.authentication.start()
        metadata.subscribe(self.departures.metadata_changed)
        if self.authorization is not None:
            self.authorization.start(metadata)
            self._closers.append(self._close_authorization)
        self._closers.append(member.close)
        member.start()
        self._closers.append(lambda: self.internal_server.close(0))
        kafka_apis = [handler for handler in self.handlers if handler.api.key in KAFKA_APIS]
        await self.internal_server.serve([*kafka_apis, *self._peer_apis.handlers(), self.schemas.handler()])
        await self._while_sound(member.join())
        metadata.subscribe(host.metadata_changed)
        self._closers.append(lambda: host.close_all(member.session.broker_epoch))
        self._closers.append(self.healing.close)
        await host.open_all()
        # Before the first heartbeat: a replica that lost records must not be elected.
        await self._while_sound(host.reports.flush())
        host.reports.start()
        self.internal_server.has_opened_logs = True
        self._closers.append(self._close_server)
        metadata.subscribe(self.groups.metadata_changed)
        # Stopped before the connections close, because members waiting in a rebalance would delay that.
        self._closers.append(self.groups.stop)
        await self.groups.start()
        metadata.subscribe(self.transactions.metadata_changed)
        self._closers.append(self.transactions.stop)
        await self.transactions.start()
        metadata.subscribe(self.share_coordinator.metadata_changed)
        self._closers.append(self.share_coordinator.stop)
        await self.share_coordinator.start()
        metadata.subscribe(self.shares.metadata_changed)
        self._closers.append(self.dead_letters.stop)
        self._closers.append(self.shares.stop)
        self.metrics.partitions = host.gauges
        self.metrics.groups = self.groups.lag_gauges
        self.metrics.shares = self.shares.figures
        self.metrics.transactions = self.transactions.gauges
        self.metrics.clients = self.telemetry.gauges
        self.metrics.watermark_age_s = self.watermarks.monitor.age_s
        for service in (self.watermarks, self._housekeeping, self._scrubber):
            service.start()
            self._closers.append(service.stop)
        member.session.start()
        self._closers.append(member.session.close)
        await self._while_sound(member.session.wait_unfenced())
        self._enforce_quotas()
        await self.server.serve(self.handlers, self._envelopes)
        self._trace_topic.start()
        self._closers.append(self._trace_topic.stop)
        self._closers.append(self._leave)
        self._is_serving = True
        self.runtime.log.info(
            "ready",
            kafka=str(self.config.advertised_kafka(self.server.port)),
            internal=member.identity.internal,
            data_dir=self.config.data_folder,
            durability=self.config.durability,
            controller=self.controller_id,
            topics=len(self.image.topics),
            partitions=len(host.partitions),
        )

    def _enforce_quotas(self) -> None:
        """Enforce quotas on the clients of the Kafka listener. Other nodes, on the internal listener, are exempt."""
        self.server.connection_quotas = self.connection_quotas
        self.quotas.serve(self.server)
        self._update_quotas(self.image)
        self.metadata.subscribe(self._quotas_changed)

    def _quotas_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, ClientQuotasChanged) or (
                isinstance(event, ConfigChanged) and event.resource == "broker"
            ):
                self._update_quotas(image)
                return

    def _update_quotas(self, image: ClusterImage) -> None:
        self.quotas.update(image)
        self.connection_quotas.update(image)

    async def _while_sound(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for a step of the start that needs other nodes. Raise `failure` if the node fails meanwhile."""
        running = self.runtime.loop.create_task(work)
        failing = self.runtime.loop.create_task(self._failed.wait())
        try:
            await asyncio.wait([running, failing], return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None:
                raise self.failure
            await running
        finally:
            running.cancel()
            failing.cancel()

    async def stop(self) -> None:
        """Answer running requests, sync everything, and record a clean shutdown. Idempotent."""
        self._is_serving, self._is_stopping = False, True
        while self._closers:
            await self._closers.pop()()

    async def failed(self) -> Exception:
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    def failed_by(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
            self._failed.set()

    async def _leave(self) -> None:
        """Transfer this node's leadership to other nodes while it still serves."""
        self._is_serving, self._is_stopping = False, True
        self.forwarding.is_leaving = True
        if self.failure is None:
            await self.member.leave()

    async def _close_authorization(self) -> None:
        if self.authorization is not None:
            self.authorization.close()

    async def _close_server(self) -> None:
        await self.server.close(self.config.shutdown_timeout_ms / 1000)
        await self.verifier.close()
        self.transaction_coordinators.stop()
        self.deadlines.close()

    # -- state ---------------------------------------------------------------------------------------------------------

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
    def is_ready(self) -> bool:
        """Whether the node serves clients: started, not stopping, and not cut off from the controller."""
        return self._is_serving and self.member.lease_is_valid()

    @property
    def state(self) -> BrokerState:
        """Ready, or the reason why the node does not serve clients; disconnected means from the controller."""
        if self._is_serving:
            return "ready" if self.is_ready else "disconnected"
        return "stopping" if self._is_stopping else "starting"

    @property
    def disk_error(self) -> str | None:
        """Why the disk does not complete writes that the node depends on; None if it does."""
        error = self.member.raft.write_error
        if error is not None:
            return str(error)
        return NO_ANSWER if self.disk_watch.is_stuck else None

    @property
    def damages(self) -> Sequence[Damage]:
        """Damage found in this node's logs since its start, oldest first."""
        return tuple(self.healing.damages)

    @property
    def pushing_clients(self) -> Sequence[ClientInstance]:
        """The clients that push their metrics to this node, the one that was heard last comes last."""
        return self.telemetry.instances()

    def partition(self, topic: str, index: int) -> Partition | None:
        return self.host.partitions.get((topic, index))


async def _close_files(runtime: Runtime, disk_watch: DiskWatch, files: DataFolder | CommitLog) -> None:
    try:
        await disk_watch.wait(runtime.loop.run_in_executor(runtime.env.executor, files.close))
    except TimeoutError as error:
        runtime.log.error("data_folder_not_closed", reason=str(error))
