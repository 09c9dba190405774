"""Nodes that host replicas, in one process and on one loop: real hosts, logs, fetchers and Fetch handler.

Fakes connect them: a controller that applies commands immediately and notifies each node when the test allows it, and
a wire without sockets that can be cut. Nothing here sleeps; `until` waits for a condition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

from tests.node.support_async import Story, async_test
from tests.support.slow_disk import HANG, SlowDisk

from chronik.client.connection import Connection as ClientConnection
from chronik.client.errors import ConnectionLost, Unreachable
from chronik.metadata.apply import apply
from chronik.metadata.calls import AlterIsrCall, IsrMember, ReplicaReport, ReportedResult, ReportReplicasCall
from chronik.metadata.commands import (
    Assignment,
    ChangePartition,
    Command,
    CreateCluster,
    CreateTopic,
    DeleteTopic,
    FenceBroker,
    RegisterBroker,
    UnfenceBroker,
)
from chronik.metadata.elections import BrokerStates
from chronik.metadata.events import Event
from chronik.metadata.fitness import plan_report
from chronik.metadata.image import BrokerImage, ClusterImage, PartitionImage
from chronik.metadata.isr import plan_isr_change
from chronik.node.apis import fetch as fetch_api
from chronik.node.apis import list_offsets as list_offsets_api
from chronik.node.apis import produce as produce_api
from chronik.node.config import ListenerConfig, NodeConfig
from chronik.node.disk_watch import DiskWatch
from chronik.node.environment import Environment
from chronik.node.replicas.healing import Healing
from chronik.node.replicas.partition import Partition, TransactionMarker
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.replicas.replication import ClusterLinks, IsrMembers
from chronik.node.replicas.schema_checks import SchemaChecks
from chronik.node.replicas.syncer import Syncer
from chronik.node.replicas.verifier import Verifier
from chronik.node.runtime import Runtime
from chronik.node.serving.access import OPEN_ACCESS
from chronik.node.serving.connection import Reply, Request
from chronik.node.serving.deadlines import Deadlines
from chronik.node.serving.fetch_sessions import FetchSessions
from chronik.node.serving.held_bytes import HeldBytes
from chronik.observe.logging import silent_logger
from chronik.observe.metrics import Metrics
from chronik.observe.traces import TraceRing
from chronik.storage.disk import RealDisk
from chronik.storage.folder import DataFolder
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import (
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchTopic,
    read_fetch_response,
    write_fetch_request,
)
from chronik.wire.produce import (
    ProducePartitionResponse,
    ProduceRequest,
    ProduceTopic,
    read_produce_response,
    write_produce_request,
)

TOPIC = "orders"
TOPIC_ID = UUID(int=77)
TIMEOUT_S = 10.0
FETCH_VERSION = 18


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


class Metadata:
    """One node's view of the metadata."""

    def __init__(self) -> None:
        self.image = ClusterImage()
        self.is_held = False
        self._waiting: list[tuple[ClusterImage, Sequence[Event]]] = []
        self._listeners: list[Callable[[ClusterImage, Sequence[Event]], None]] = []

    def subscribe(self, listener: Callable[[ClusterImage, Sequence[Event]], None]) -> None:
        self._listeners.append(listener)

    def tell(self, image: ClusterImage, events: Sequence[Event]) -> None:
        if self.is_held:
            self._waiting.append((image, events))
            return
        self.image = image
        for listener in self._listeners:
            listener(image, events)

    def hold(self) -> None:
        self.is_held = True

    def release(self) -> None:
        self.is_held = False
        waiting, self._waiting = self._waiting, []
        for image, events in waiting:
            self.tell(image, events)


class FakeCoordinator:
    """The transaction coordinator: it confirms every transaction, unless the test holds it or sets its answer."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int, int, tuple[tuple[str, int], ...], bool]] = []
        self.answer = ErrorCode.none
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[tuple[str, int]],
        adds: bool,
    ) -> Mapping[tuple[str, int], ErrorCode]:
        self.requests.append((transactional_id, producer_id, producer_epoch, tuple(partitions), adds))
        answer = self.answer
        await self.may_answer.wait()
        return dict.fromkeys(partitions, answer)

    def hold(self) -> None:
        """Keep the answers to requests, as they are now, until `release`."""
        self.may_answer.clear()

    def release(self) -> None:
        self.may_answer.set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()


class ServerConnection:
    """The server's end of the wire, with what the handlers of Fetch and Produce need."""

    def __init__(self, peer_id: int | None) -> None:
        self.peer_id = peer_id
        self.client_host = "test"
        self.listener = ListenerConfig("KAFKA", "h:1", "PLAINTEXT")
        self.answers: dict[Reply, asyncio.Future[bytes]] = {}
        self.is_cut = False
        self._on_close: dict[object, Callable[[], None]] = {}

    def when_closed(self, owner: object, callback: Callable[[], None]) -> None:
        self._on_close[owner] = callback

    def forget(self, owner: object) -> None:
        self._on_close.pop(owner, None)

    def reply_ready(self, reply: Reply) -> None:
        future = self.answers.pop(reply, None)
        if future is not None and not future.done() and not self.is_cut:
            future.set_result(b"".join(bytes(part) for part in reply.body or ()))

    def close(self) -> None:
        callbacks, self._on_close = list(self._on_close.values()), {}
        for callback in callbacks:
            callback()


class Wire:
    """A follower's connection to a leader. A cut connection drops requests silently; a closed one fails them."""

    def __init__(self, cluster: Cluster, by: int, to: int) -> None:
        self._cluster = cluster
        self._to = to
        self.by = by
        self.server = ServerConnection(by)
        self.is_closed = False
        self.requests: list[FetchRequest] = []
        self._waiting: list[asyncio.Future[memoryview]] = []

    def version(self, key: int, at_most: int | None = None) -> int:
        return FETCH_VERSION

    def send(self, key: int, version: int, body: bytes) -> asyncio.Future[memoryview]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[memoryview] = loop.create_future()
        node = self._cluster.nodes.get(self._to)
        if self.is_closed or node is None:
            answer.set_exception(ConnectionLost("closed"))
            return answer
        self._waiting.append(answer)
        if not self._cluster.is_cut(self.by, self._to):
            answered = node.request(self.server, version, body)
            answered.add_done_callback(lambda done: self._answered(answer, done))
        return answer

    def _answered(self, answer: asyncio.Future[memoryview], done: asyncio.Future[bytes]) -> None:
        if not answer.done() and not done.cancelled() and not self._cluster.is_cut(self.by, self._to):
            answer.set_result(memoryview(done.result()))

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.server.close()
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(ConnectionLost("closed"))


class Node:
    """One node: a partition host, and a stand-in for the broker around it."""

    def __init__(self, cluster: Cluster, node_id: int, path: Path, durability: str, rack: str | None) -> None:
        self.id = node_id
        self.rack = rack
        self.metadata = Metadata()
        self.has_lease = True
        self.metrics = Metrics()
        self.loop = asyncio.get_running_loop()
        self.executor = ThreadPoolExecutor(2)
        self._switch = path.with_suffix(".disk")
        disk = RealDisk() if cluster.disk_timeout_ms is None else SlowDisk(syncs=str(self._switch))
        self.env = Environment(disk=disk, random=Random(node_id), executor=self.executor, wall_ms=lambda: 1)
        self.traces = TraceRing(node_id, 1000, self.env.wall_ms, self.metrics)
        self.config = NodeConfig(node_id=node_id, durability=cast(Any, durability), replica_lag_ms_max=cluster.lag_ms)
        self.wires: list[Wire] = []
        self._cluster = cluster
        self._path = path
        self.folder: DataFolder
        self.host: PartitionHost
        self.healing: Healing
        self.runtime = Runtime(self.loop, self.env, self.config, self.metrics, self.traces, silent_logger())
        self.fetch_services: fetch_api.Services
        self.list_offsets_services: list_offsets_api.Services
        self.produce_services: produce_api.Services
        self.coordinator = FakeCoordinator()
        self.verifier = Verifier(self.runtime, self.coordinator)

    async def start(self, image: ClusterImage) -> None:
        self.metadata.image = image
        self.folder = DataFolder.open(self.env.disk, str(self._path), self.id, "cluster")
        disk_timeout_ms = self._cluster.disk_timeout_ms or self.config.disk_timeout_ms
        watch = DiskWatch(self.loop, disk_timeout_ms, silent_logger())
        syncer = Syncer(self.runtime, watch)
        links = ClusterLinks(
            self._connect,
            lambda *proposal: self._cluster.propose_isr(self.id, *proposal),
            lambda reports, _: self._cluster.report_replicas(self.id, reports),
            lambda: self.has_lease,
        )
        self.host = PartitionHost(self.runtime, self.folder, cast(Any, self.metadata), syncer, links)
        self.metadata.subscribe(self.host.metadata_changed)
        self.healing = Healing(self.runtime, self.host)
        server = SimpleNamespace(reading_bytes=0, response_bytes_allowed=lambda: 1 << 20)
        sessions = FetchSessions(self.env.random, 10)
        self.fetch_services = fetch_api.Services(
            self.runtime, cast(Any, self.metadata), self.host, cast(Any, server), sessions
        )
        self.list_offsets_services = list_offsets_api.Services(self.runtime, self.host)
        forwarding = SimpleNamespace(has_lanes=lambda connection: False, can_forward=lambda *batch: False)
        self.produce_services = produce_api.Services(
            self.runtime,
            cast(Any, self.metadata),
            self.host,
            cast(Any, forwarding),
            Deadlines(self.loop),
            self.verifier,
            HeldBytes(self.loop, produce_api.VERIFYING_BYTES_MAX),
            SchemaChecks(self.runtime, cast(Any, None)),
        )
        await self.host.open_all()

    @property
    def partition(self) -> Partition:
        return self.host.partitions[(TOPIC, 0)]

    @property
    def has_partition(self) -> bool:
        return (TOPIC, 0) in self.host.partitions

    async def run_blocking(self, call: Callable[[], Any]) -> Any:
        return await self.loop.run_in_executor(self.executor, call)

    async def _connect(self, node_id: int) -> ClientConnection:
        if node_id not in self._cluster.nodes or self._cluster.is_cut(self.id, node_id):
            raise Unreachable(f"node {node_id} is down")
        wire = Wire(self._cluster, self.id, node_id)
        self.wires.append(wire)
        return cast(ClientConnection, wire)

    # -- requests ------------------------------------------------------------------------------------------------------

    def request(self, connection: ServerConnection, version: int, body: bytes) -> asyncio.Future[bytes]:
        """Run one Fetch request as the server would."""
        frame = memoryview(body)
        request = Request(cast(Any, connection), 1, version, 1, "test", frame, 0, self.loop.time())
        reply = Reply(request, True, self.metrics.api(1), self.loop.time)
        answer: asyncio.Future[bytes] = self.loop.create_future()
        connection.answers[reply] = answer
        fetch_api.handle(self.fetch_services, request, reply)
        return answer

    async def fetch(self, fetch: FetchRequest, *, peer_id: int | None = None, version: int = FETCH_VERSION) -> Any:
        body = write_fetch_request(version, fetch)
        answer = await asyncio.wait_for(self.request(ServerConnection(peer_id), version, body), TIMEOUT_S)
        return read_fetch_response(version, memoryview(answer))

    async def consume(
        self, offset: int, *, rack: str = "", max_wait_ms: int = 0, isolation_level: int = 0, max_bytes: int = 1 << 20
    ) -> FetchPartitionResponse:
        wanted = FetchPartition(0, -1, offset, -1, -1, max_bytes)
        fetch = FetchRequest(
            max_wait_ms=max_wait_ms,
            min_bytes=1,
            isolation_level=isolation_level,
            rack_id=rack,
            topics=[FetchTopic(None, TOPIC_ID, [wanted])],
        )
        response = await self.fetch(fetch)
        found: FetchPartitionResponse = response.topics[0][2][0]
        return found

    async def end_offset(self) -> Mapping[str, Any]:
        """Return the latest offset, by ListOffsets."""
        return await self.listed_offset(-1)

    async def listed_offset(self, timestamp: int, replica_id: int = -1, isolation_level: int = 0) -> Mapping[str, Any]:
        wanted = SimpleNamespace(partition_index=0, current_leader_epoch=-1, timestamp=timestamp)
        topics = [SimpleNamespace(name=TOPIC, partitions=[wanted])]
        message = SimpleNamespace(replica_id=replica_id, isolation_level=isolation_level, topics=topics)
        request = SimpleNamespace(message=message, api_version=7, access=OPEN_ACCESS)
        answer = await list_offsets_api.handle(self.list_offsets_services, cast(Any, request))
        found: Mapping[str, Any] = answer["topics"][0]["partitions"][0]
        return found

    def produce_request(
        self,
        records: bytes,
        transactional_id: str | None = "payments",
        *,
        version: int = 11,
        acks: int = -1,
        connection: ServerConnection | None = None,
    ) -> asyncio.Future[ProducePartitionResponse]:
        """Run one Produce request as the server would. With acks=0 the outcome stays open."""
        topic = ProduceTopic(TOPIC if version < 13 else None, TOPIC_ID if version >= 13 else None, [])
        topic.partitions.append((0, memoryview(records)))
        request = ProduceRequest(transactional_id, acks, 10_000, [topic])
        # The handler may not keep the frame: a real connection reuses it.
        frame = bytearray(write_produce_request(version, request))
        connection = connection or ServerConnection(None)
        received = Request(cast(Any, connection), 0, version, 1, "test", memoryview(frame), 0, self.loop.time())
        reply = Reply(received, True, self.metrics.api(0), self.loop.time)
        answer: asyncio.Future[bytes] = self.loop.create_future()
        connection.answers[reply] = answer
        produce_api.handle(self.produce_services, received, reply)
        frame[:] = bytes(len(frame))
        outcome: asyncio.Future[ProducePartitionResponse] = self.loop.create_future()

        def answered(done: asyncio.Future[bytes]) -> None:
            if acks != 0 and not outcome.done() and not done.cancelled():
                outcome.set_result(read_produce_response(version, memoryview(done.result())).topics[0][2][0])

        answer.add_done_callback(answered)
        return outcome

    async def end_transaction(
        self, producer_id: int, epoch: int, is_commit: bool = True, coordinator_epoch: int = 1
    ) -> None:
        """Write a marker as the leader, and wait until it is committed."""
        await self.host.append_marker(
            TOPIC, 0, TransactionMarker(producer_id, epoch, is_commit, coordinator_epoch), TIMEOUT_S
        )

    def append(self, *values: bytes) -> int:
        """Append one batch on this node and return the offset after it."""
        batch = encode_batch([(b"k", value, (), 1) for value in values])
        return self.partition.append(memoryview(bytearray(batch)), 1).last_offset + 1

    def produce(self, *values: bytes) -> asyncio.Future[None]:
        """Append one batch with acks=all; the future completes when the request is answered."""
        return self.committed(self.append(*values))

    def committed(self, end_offset: int) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self.loop.create_future()

        def answered(error: KafkaError | None) -> None:
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self.partition.when_committed(end_offset, answered)
        return done

    def hang(self) -> None:
        """Make every write in a thread hang from now on."""
        self._switch.write_text(HANG)

    def cure(self) -> None:
        self._switch.unlink(missing_ok=True)

    def contents(self) -> bytes:
        log = self.partition.log
        return bytes(log.read_job(log.log_start_offset, 1 << 30, log.log_end_offset)())

    async def stop(self, *, cleanly: bool = True) -> None:
        self.cure()
        for wire in self.wires:
            wire.close()
        await self.healing.close()
        await self.verifier.close()
        self.produce_services.deadlines.close()
        if cleanly:
            await self.host.close_all()
        else:
            self.host.replication.close()
            self.host.replica_sessions.close()
        self.folder.close()
        self.executor.shutdown()


class Cluster:
    """Nodes 1 to 3, with node 1 leading partition 0 of TOPIC. Use as an async context manager."""

    def __init__(
        self,
        path: Path,
        *,
        replicas: Sequence[int] = (1, 2, 3),
        isr: Sequence[int] | None = None,
        durability: str = "synced",
        configs: Mapping[str, str] | None = None,
        racks: Mapping[int, str] | None = None,
        lag_ms: int = 600_000,
        disk_timeout_ms: int | None = None,
    ) -> None:
        """The nodes' disks can be made to hang only if `disk_timeout_ms` is set."""
        self.path = path
        self.lag_ms = lag_ms
        self.disk_timeout_ms = disk_timeout_ms
        self.nodes: dict[int, Node] = {}
        self.image = ClusterImage()
        self.proposals: list[tuple[int, IsrMembers, int]] = []
        self.refuses_proposals = False
        self.losses: list[tuple[int, str]] = []
        self.refuses_losses = False
        self._replicas = tuple(replicas)
        self._isr = self._replicas if isr is None else tuple(isr)
        self._durability = durability
        self._configs = dict(configs or {})
        self._racks = dict(racks or {})
        self._cuts: set[tuple[int, int]] = set()

    async def __aenter__(self) -> Cluster:
        self.commit(CreateCluster("cluster"))
        for node_id in (1, 2, 3):
            self.register(node_id)
        assignment = Assignment(self._replicas, self._isr)
        self.commit(CreateTopic(TOPIC, TOPIC_ID, (assignment,), self._configs))
        for node_id in (1, 2, 3):
            await self.start(node_id)
        return self

    async def __aexit__(self, *error: object) -> None:
        for node in list(self.nodes.values()):
            await node.stop()

    def __getitem__(self, node_id: int) -> Node:
        return self.nodes[node_id]

    # -- nodes ---------------------------------------------------------------------------------------------------------

    async def start(self, node_id: int) -> Node:
        node = Node(self, node_id, self.path / f"node-{node_id}", self._durability, self._racks.get(node_id))
        await node.start(self.image)
        self.nodes[node_id] = node
        await node.host.reports.flush()
        node.host.reports.start()
        return node

    def register(self, node_id: int) -> None:
        """Register a new incarnation of the node and unfence it immediately."""
        incarnation = UUID(int=self.image.version + 1000)
        self.commit(
            RegisterBroker(broker_id=node_id, incarnation=incarnation, host="h", port=1, rack=self._racks.get(node_id))
        )
        if self.image.brokers[node_id].is_fenced:
            self.commit(UnfenceBroker(node_id, self.image.brokers[node_id].epoch))

    async def kill(self, node_id: int) -> None:
        """Kill the node without a clean shutdown."""
        node = self.nodes.pop(node_id)
        for other in self.nodes.values():
            for wire in other.wires:
                if wire._to == node_id:
                    wire.close()
        await node.stop(cleanly=False)

    async def stop(self, node_id: int) -> None:
        node = self.nodes.pop(node_id)
        await node.stop()

    def cut(self, one: int, other: int) -> None:
        """Drop all traffic between the two nodes; their connections look open."""
        self._cuts |= {(one, other), (other, one)}

    def heal(self) -> None:
        """Restore all traffic. Dropped requests are lost with their connections."""
        self._cuts = set()
        for node in self.nodes.values():
            for wire in node.wires:
                wire.close()

    def is_cut(self, one: int, other: int) -> bool:
        return (one, other) in self._cuts

    # -- the controller ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> PartitionImage:
        found = self.image.partition(TOPIC, 0)
        assert found is not None
        return found

    def broker(self, node_id: int) -> BrokerImage:
        return self.image.brokers[node_id]

    def commit(self, command: Command) -> None:
        self.image, events = apply(self.image, command)
        for node in self.nodes.values():
            node.metadata.tell(self.image, events)

    def change(self, *, leader: int | None = None, isr: Sequence[int] | None = None, **more: Any) -> None:
        state = self.state
        self.commit(
            ChangePartition(
                TOPIC_ID,
                0,
                state.partition_epoch,
                state.leader if leader is None else leader,
                state.isr if isr is None else tuple(isr),
                **more,
            )
        )

    def fence(self, node_id: int) -> None:
        self.commit(FenceBroker(node_id, self.broker(node_id).epoch))

    def delete_topic(self) -> None:
        self.commit(DeleteTopic(TOPIC, TOPIC_ID))

    async def propose_isr(
        self,
        by: int,
        topic_id: UUID,
        partition: int,
        leader_epoch: int,
        partition_epoch: int,
        members: IsrMembers,
        hand_over_to: int,
    ) -> None:
        self.proposals.append((by, members, hand_over_to))
        if self.refuses_proposals:
            raise KafkaError(ErrorCode.request_timed_out, "the controller is silent")
        call = AlterIsrCall(
            by,
            topic_id,
            partition,
            leader_epoch,
            partition_epoch,
            tuple(IsrMember(*member) for member in members),
            hand_over_to=hand_over_to,
        )
        self.commit(plan_isr_change(self.image, BrokerStates.of(self.image), call))

    async def report_replicas(self, by: int, reports: tuple[ReplicaReport, ...]) -> ReportedResult:
        self.losses += [(by, report.reason) for report in reports if report.loss]
        if self.refuses_proposals or self.refuses_losses:
            raise KafkaError(ErrorCode.request_timed_out, "the controller is silent")
        call = ReportReplicasCall(by, self.broker(by).epoch, reports)
        plan = plan_report(self.image, BrokerStates.of(self.image), call)
        if plan.command is not None:
            self.commit(plan.command)
        return ReportedResult(tuple("" if error is None else error.message for error in plan.outcomes))


def on_cluster(**settings: Any) -> Callable[[Story], Story]:
    """Make a test of a coroutine that takes a cluster with these settings."""
    return async_test(lambda path: Cluster(path, **settings), "tmp_path")
