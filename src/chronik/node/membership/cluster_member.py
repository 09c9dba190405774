"""This node's membership in its cluster: identity, peer links, Raft group, metadata log and broker session.

A single-node cluster runs the same code as a Raft group of one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import NamedTuple
from uuid import UUID

from chronik.client.endpoint import Endpoint
from chronik.metadata.calls import (
    AlterIsrCall,
    IsrMember,
    RegisterBrokerCall,
    ReplicaReport,
    ReportedResult,
    ReportReplicasCall,
)
from chronik.metadata.commands import CreateCluster
from chronik.metadata.events import BrokerUnregistered, ClusterCreated, Event, LeaderChanged, TopicDeleted
from chronik.metadata.image import ClusterImage
from chronik.metadata.registration import REPLICATED
from chronik.node.config import ConfigError, NodeConfig
from chronik.node.disk_watch import DiskWatch
from chronik.node.membership.broker_session import BrokerSession
from chronik.node.membership.cluster_secret import ClusterSecret
from chronik.node.membership.controller_client import ControllerClient
from chronik.node.membership.controller_service import ControllerService, HostedPartitions
from chronik.node.membership.metadata_log import MetadataLog, new_cluster_id
from chronik.node.membership.metadata_mark import MarkedRaftStore, MetadataMark
from chronik.node.membership.peer_handshake import Identity, PeerHandshake
from chronik.node.membership.peers import Peers, PeerState
from chronik.node.membership.raft_service import RaftService
from chronik.node.membership.raft_store import SqliteRaftStore
from chronik.node.runtime import Runtime
from chronik.node.serving.tls import NodeTls
from chronik.raft.node import RaftNode
from chronik.raft.ready import Event as RaftEvent
from chronik.raft.ready import LeaderEstablished, MembershipChanged, RoleChanged
from chronik.raft.state import RaftSettings
from chronik.raft.store import StoredState, StoreError
from chronik.storage.folder import DataFolder, DataFolderError
from chronik.wire.errors import ErrorCode, KafkaError

STORE_NAME = "metadata.db"
HEARTBEAT_INTERVAL_MS = 100
ELECTION_TIMEOUT_MS = 500
FOUNDERS_SMALL, FOUNDERS_LARGE = 3, 5
REFUSED_S = 5.0
"""A refusal may be temporary: the peer may not have noticed yet that this node's previous process is gone."""

WAITING_LOGGED_S = 5.0
NO_METADATA_S = 20.0
"""How long a node without metadata waits for a controller once it has been connected to all founders."""

MAJORITY_LOST_S = 2.0
HAND_OVER_S = 1.0
LEAVE_TIMEOUT_S = 6.0
"""Longer than the controller waits for partitions that only this broker can lead."""

PROPOSAL_TIMEOUT_S = 10.0

WITHOUT_METADATA = (
    "rebuild it from the logs with `chronik cluster restore-metadata`, or start with an empty data folder"
)


class Addresses(NamedTuple):
    """The addresses at which clients and other nodes reach this node."""

    kafka: Mapping[str, Endpoint]
    """By listener; the first one is that of `listen.kafka`."""
    internal: Endpoint
    http: str
    """Empty if the node has no HTTP server."""


class StoredMetadata(NamedTuple):
    """The contents of this node's Raft store when it was opened."""

    store: MarkedRaftStore
    state: StoredState
    has_logs: bool
    """Whether the data folder holds partition logs."""


async def load_metadata(runtime: Runtime, folder: DataFolder) -> StoredMetadata:
    """Open the Raft store and load its state. Raise StoreError if the store cannot be read."""
    open_store = runtime.env.open_raft_store or SqliteRaftStore
    inner = open_store(f"{folder.path}/{STORE_NAME}", runtime.env.new_uuid)
    store = MarkedRaftStore(inner, runtime.env.disk, folder.path)
    try:
        state = await runtime.run_blocking(store.load)
        return StoredMetadata(store, state, bool(await runtime.run_blocking(folder.partitions)))
    except BaseException:
        await runtime.run_blocking(store.close)
        raise


class ClusterMember:
    """Owned by the loop. `start` takes part in the Raft group; `join` then registers the broker."""

    def __init__(
        self,
        runtime: Runtime,
        disk_watch: DiskWatch,
        folder: DataFolder,
        secret: ClusterSecret,
        addresses: Addresses,
        incarnation: UUID,
        loaded: StoredMetadata,
        metadata: MetadataLog,
        hosted: HostedPartitions,
        failed_by: Callable[[Exception], None],
        tls: NodeTls | None = None,
    ) -> None:
        """Raise ConfigError or StoreError if the data folder or the configuration is unusable."""
        stored = loaded.state
        self._runtime = runtime
        self._disk_watch = disk_watch
        self._folder = folder
        self._failed_by = failed_by
        self._config = config = runtime.config
        self._loop = runtime.loop
        self._log = runtime.log
        self._is_open = True
        self._is_majority_lost = False
        self._leaderless: asyncio.TimerHandle | None = None
        self._follows = asyncio.Event()
        """Set while another node leads the Raft group."""
        self._meta_written: asyncio.Task[None] | None = None
        self._has_lost_metadata = self._is_metadata_lost(stored, loaded.has_logs)
        """Whether the data folder holds logs but its Raft store is empty."""
        self._met_founders: set[int] = set()
        self._refused_since_s: float | None = None
        self._leaderless_since_s: float | None = None
        cluster_id = _cluster_id(config, folder)
        self.identity = Identity(config.node_id, incarnation, str(addresses.internal), cluster_id)
        node = RaftNode(
            config.node_id,
            stored,
            RaftSettings(heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS, election_timeout_ms=ELECTION_TIMEOUT_MS),
            runtime.env.random,
            int(self._loop.time() * 1000),
            address=self.identity.internal,
            seeds=[peer.id for peer in config.peers],
            # Logs prove that a cluster was founded before. Founding another one would orphan them.
            founders=() if self._has_lost_metadata else founders(config),
        )
        self._check(node, stored, loaded.store.mark)
        self.metadata = metadata
        self._member_ids: set[int] = set()
        self.peers = Peers(runtime, self.identity, secret, self._peer_refused, tls)
        self.handshake = PeerHandshake(runtime, self.identity, secret, self.peers.learn, self.peers.probe)
        """It probes a peer whose last connection ended, to learn at once whether its process is still running."""
        self.raft = RaftService(runtime, disk_watch, node, loaded.store, self.peers, self.metadata, failed_by)
        self.metadata.attach(self.raft)
        self.controller = ControllerService(runtime, self.raft, self.metadata, self.peers, hosted)
        self.client = ControllerClient(runtime, self.metadata, self.peers, self.controller.answer)
        self.session = BrokerSession(
            runtime,
            self.client,
            self.metadata,
            self._registration(addresses, stored.store_id),
            hosted,
            failed_by,
            # In a single-node cluster no other node could lead.
            lambda: disk_watch.is_stuck and not self.raft.is_alone,
        )
        disk_watch.subscribe(self.session.heartbeat_soon)

    def start(self) -> None:
        self.metadata.subscribe(self._metadata_changed)
        self.raft.subscribe(self._raft_event)
        self.controller.start()
        self.peers.start()
        self.raft.learn_members()
        self._member_ids = {member.node_id for member in self.raft.node.membership.members}
        self.raft.start()
        voters = founders(self._config)
        if self._config.peers and len(voters) % 2 == 0:
            self._log.warning(
                "even_voters",
                voters=list(voters),
                detail="an even number of voters tolerates no more failures than one fewer: use one, three or five",
            )

    def _is_metadata_lost(self, stored: StoredState, has_logs: bool) -> bool:
        """Return whether the folder has logs but no metadata. A single-node cluster cannot start then."""
        if stored.snapshot is not None or stored.entries or not has_logs:
            return False
        path = f"{self._folder.path}/{STORE_NAME}"
        if not self._config.peers:
            raise StoreError(f"{path} is missing or empty, although there are logs beside it: {WITHOUT_METADATA}")
        self._log.error("metadata_lost", path=path, then="this node joins its cluster again and keeps its logs")
        return True

    def _check(self, node: RaftNode, stored: StoredState, mark: MetadataMark) -> None:
        config, boot = self._config, self._folder.boot
        members = node.membership.members
        reached = max(mark.last_index, 0 if boot is None else boot.raft_index)
        if members and (node.last_index < reached or stored.hard_state.term < mark.term):
            way_out = (
                "remove it, and the node joins its cluster again with its logs" if config.peers else WITHOUT_METADATA
            )
            raise StoreError(
                f"{self._folder.path}/{STORE_NAME} ends at entry {node.last_index} of term {stored.hard_state.term} "
                f"and had reached entry {reached} and term {mark.term}: it is damaged or an old copy, "
                f"and has forgotten votes and metadata: {way_out}"
            )
        others = [member.node_id for member in members if member.is_voter and member.node_id != config.node_id]
        if others and not config.peers:
            raise ConfigError(
                f"this node's cluster has the voters {sorted([*others, config.node_id])}, and no peers are set, "
                "so that there can be no majority: add a [[peers]] entry for each of the others"
            )
        own = node.membership.member(config.node_id)
        if members and (own is None or own.store != stored.store_id):
            raise StoreError(
                f"node {config.node_id} was removed from the cluster of {self._folder.path}: "
                "start it with an empty data folder to join again"
            )

    def _registration(self, addresses: Addresses, store_id: UUID) -> RegisterBrokerCall:
        config, boot = self._config, self._folder.boot
        has_kept_all, previous_epoch = self._last_process()
        return RegisterBrokerCall(
            config.node_id,
            self.identity.incarnation,
            *next(iter(addresses.kafka.values())),
            self.identity.internal,
            config.rack,
            has_kept_all,
            config.durability,
            previous_epoch=previous_epoch,
            folder_id=store_id,
            http=addresses.http,
            previous_incarnations=None if boot is None else boot.incarnations,
            listeners=addresses.kafka if len(addresses.kafka) > 1 else {},
        )

    def lease_is_valid(self) -> bool:
        """Return whether this node may act as leader of its partitions. A single-node cluster needs no lease."""
        return self.raft.is_alone or self.session.lease_is_valid

    async def join(self) -> None:
        """Register as a broker, and wait as long as it takes for a controller. The image is up to date afterwards."""
        config, incarnation = self._config, self.identity.incarnation
        await self._runtime.run_blocking(lambda: self._folder.record_start(incarnation))
        logged_s = self._loop.time()
        while True:
            try:
                await self.session.register()
                break
            except KafkaError as error:
                now_s = self._loop.time()
                if self.raft.write_error is not None and not config.peers:
                    raise StoreError(
                        f"the registration cannot be stored ({self.raft.write_error}): free space, or repair the disk"
                    ) from None
                self._fail_if_refused(now_s, error)
                self._fail_without_metadata(now_s)
                if now_s - logged_s >= WAITING_LOGGED_S:
                    logged_s = now_s
                    self._log.warning("waiting_for_controller", reason=error.message, missing=self.missing())
            await asyncio.sleep(0.1)
        boot_id = self._runtime.env.boot_id if config.durability == REPLICATED else ""
        epoch = self.session.broker_epoch
        # An applied entry is durable on this node.
        index = self.metadata.applied_index
        await self._runtime.run_blocking(lambda: self._folder.record_registration(boot_id, epoch, incarnation, index))

    def _last_process(self) -> tuple[bool, int | None]:
        """Return whether the previous process lost none of its writes, and its broker epoch.

        A process that stopped cleanly lost nothing. Neither did a killed process if the machine has not rebooted since:
        its writes are in the page cache, if not on disk.
        """
        folder, boot_id = self._folder, self._runtime.env.boot_id
        boot = folder.boot
        if not folder.was_clean and boot is not None and boot_id and boot.boot_id == boot_id:
            return True, boot.broker_epoch
        return folder.was_clean, folder.stopped_epoch

    def missing(self) -> list[str]:
        """Return the unreachable voters, with the reason for each; the founders if no voter is known."""
        voters = [voter.node_id for voter in self.raft.node.membership.voters] or list(founders(self._config))
        return [
            f"node {node_id}: {self.peers.status(node_id).reason}"
            for node_id in voters
            if node_id != self._config.node_id and not self.peers.is_connected(node_id)
        ]

    def _fail_if_refused(self, now_s: float, error: KafkaError) -> None:
        """Raise ConfigError if the cluster has refused this node for REFUSED_S, instead of waiting forever.

        The time starts at the first refusal, because the node may have waited for a controller before.
        """
        reason = self._refusal(error)
        if not reason:
            self._refused_since_s = None
        elif self._refused_since_s is None:
            self._refused_since_s = now_s
        elif now_s - self._refused_since_s >= REFUSED_S:
            raise ConfigError(reason)

    def _refusal(self, error: KafkaError) -> str:
        """Return why the cluster refuses this node; empty if it may still accept it."""
        # A node with an empty store is still about to join; one with entries was removed.
        was_removed = error.code is ErrorCode.invalid_registration and self.raft.node.last_index > 0
        if was_removed or error.code is ErrorCode.duplicate_broker_registration:
            return error.message
        statuses = [self.peers.status(node_id) for node_id in self.peers.known()]
        refusals = [status.reason for status in statuses if status.state is PeerState.REJECTED]
        is_connected = any(status.state is PeerState.CONNECTED for status in statuses)
        return refusals[0] if refusals and not is_connected else ""

    def _fail_without_metadata(self, now_s: float) -> None:
        """Raise StoreError if this node lost its metadata and most founders did too: no cluster is left to join."""
        if not self._has_lost_metadata:
            return
        others = set(founders(self._config)) - {self._config.node_id}
        self._met_founders |= {node_id for node_id in others if self.peers.is_connected(node_id)}
        if not others <= self._met_founders or self.raft.leader_id >= 0:
            self._leaderless_since_s = None
        elif self._leaderless_since_s is None:
            self._leaderless_since_s = now_s
        elif now_s - self._leaderless_since_s >= NO_METADATA_S:
            raise StoreError(
                f"{self._folder.path}/{STORE_NAME} is missing or empty, although there are logs beside it, and no "
                f"majority of this cluster has its metadata: {WITHOUT_METADATA}"
            )

    async def propose_isr(
        self,
        topic_id: UUID,
        partition: int,
        leader_epoch: int,
        partition_epoch: int,
        members: Sequence[tuple[int, int]],
        hand_over_to: int,
    ) -> None:
        """Request a new ISR or a new leader for a partition that this broker leads; return once it is committed."""
        isr, sender, epoch = tuple(starmap(IsrMember, members)), self._config.node_id, self.session.broker_epoch
        call = AlterIsrCall(sender, topic_id, partition, leader_epoch, partition_epoch, isr, epoch, hand_over_to)
        await self.client.call(call, PROPOSAL_TIMEOUT_S, waits_for_image=False)

    async def report_replicas(self, reports: tuple[ReplicaReport, ...], waits_for_image: bool) -> ReportedResult:
        """Report replicas to the controller; return once it has committed the resulting changes."""
        call = ReportReplicasCall(self._config.node_id, self.session.broker_epoch, reports)
        result = await self.client.call(call, PROPOSAL_TIMEOUT_S, waits_for_image=waits_for_image)
        assert isinstance(result, ReportedResult)
        return result

    async def leave(self) -> None:
        """Transfer the leadership of this node's partitions and of the Raft group, within a bounded time."""
        if len(self.raft.node.membership.members) <= 1:
            return
        if not await self.session.leave(LEAVE_TIMEOUT_S):
            self._log.warning("left_without_handover", then="other nodes take over when this node's session ends")
        if self.raft.node.is_leader and self.raft.transfer_leadership() is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HAND_OVER_S):
                    await self._follows.wait()

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self.controller.stop()
        if self._leaderless is not None:
            self._leaderless.cancel()
        await self.metadata.close()
        await self.peers.close()
        if self._meta_written is not None:
            await asyncio.wait([self._meta_written], timeout=self._disk_watch.patience_s)

    def _raft_event(self, event: RaftEvent) -> None:
        if isinstance(event, RoleChanged):
            if event.leader not in (None, self._config.node_id):
                self._follows.set()
            else:
                self._follows.clear()
            self._watch_majority(has_leader=event.leader is not None)
        if isinstance(event, MembershipChanged) and event.is_committed:
            members = {member.node_id for member in event.membership.members}
            for node_id in sorted(self._member_ids - members):
                self._forget_if_gone(node_id)
            self._member_ids = members
        if isinstance(event, LeaderEstablished) and not self.metadata.image.cluster_id:
            self.metadata.submit(CreateCluster(self.identity.cluster_id or new_cluster_id(self._runtime.env)))

    def _watch_majority(self, has_leader: bool) -> None:
        """Log the missing voters if there is no leader after MAJORITY_LOST_S; a normal election takes less."""
        if has_leader and self._leaderless is not None:
            self._leaderless.cancel()
            self._leaderless = None
        if has_leader and self._is_majority_lost:
            self._is_majority_lost = False
            self._log.info("majority_found", controller=self.raft.leader_id)
        if not has_leader and self._leaderless is None and not self._is_majority_lost:
            self._leaderless = self._loop.call_later(MAJORITY_LOST_S, self._report_majority_lost)

    def _report_majority_lost(self) -> None:
        self._leaderless = None
        if self.raft.leader_id >= 0:
            return
        self._is_majority_lost = True
        missing = self.missing()
        remedy = (
            "start the missing nodes"
            if missing
            else "all are connected, but no election completes: check the load of their CPUs and their disks"
        )
        self._log.error(
            "majority_lost",
            voters=[voter.node_id for voter in self.raft.node.membership.voters],
            missing=missing,
            then=f"nothing is changed or acknowledged without a majority of the voters: {remedy}",
        )

    def _metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case ClusterCreated(cluster_id=cluster_id):
                    self._learn_cluster(cluster_id)
                case BrokerUnregistered(broker=broker) if broker.id != self._config.node_id:
                    self._forget_if_gone(broker.id)
                case BrokerUnregistered() if self.session.broker_epoch >= 0:
                    self.session.removed()
                    self._log.warning(
                        "removed_from_cluster", then="stop this node; to join again it needs an empty data folder"
                    )
                case LeaderChanged(partition=partition) if partition.leader == self._config.node_id:
                    self.handshake.drop_markers()
                case TopicDeleted():
                    # Before a new topic of that name exists.
                    self.handshake.drop_markers()

    def _learn_cluster(self, cluster_id: str) -> None:
        known = self.identity.cluster_id
        if known and known != cluster_id:
            self._failed_by(
                DataFolderError(
                    f"{self._folder.path}/{STORE_NAME} belongs to cluster {cluster_id}, its folder to {known}: "
                    "move this folder away, so that the node joins again with an empty one"
                )
            )
            return
        self.identity.cluster_id = cluster_id
        if self._folder.meta.cluster_id != cluster_id:
            write = self._runtime.run_blocking(lambda: self._folder.set_cluster_id(cluster_id))
            self._meta_written = self._loop.create_task(write, name="cluster-id")

    def _forget_if_gone(self, node_id: int) -> None:
        """Forget the address of a node that is neither a member of the Raft group nor a broker.

        A node that was removed and rejoined can be a member before this node applies its removal.
        """
        is_member = self.raft.node.membership.member(node_id) is not None
        if not is_member and node_id not in self.metadata.image.brokers:
            self.peers.forget(node_id)

    def _peer_refused(self, node_id: int) -> None:
        """Handle a refused connection. The peer's process is gone only if it holds no connection to this node."""
        if not self.handshake.is_present(node_id):
            self.controller.broker_gone(node_id)


def founders(config: NodeConfig) -> tuple[int, ...]:
    """Return the initial voters: the three lowest configured node ids, or the five lowest if there are that many.

    If machines run several nodes, the first node of each machine comes before second ones: the loss of a machine should
    not be the loss of a majority.
    """
    ranks = {config.node_id: 0} | {peer.id: peer.rank for peer in config.peers}
    ids = sorted(ranks, key=lambda node_id: (ranks[node_id], node_id))
    return tuple(sorted(ids[: FOUNDERS_LARGE if len(ids) >= FOUNDERS_LARGE else FOUNDERS_SMALL]))


def _cluster_id(config: NodeConfig, folder: DataFolder) -> str:
    stored = folder.meta.cluster_id
    if stored and config.cluster_id and stored != config.cluster_id:
        raise DataFolderError(
            f"data folder {folder.path} belongs to cluster {stored}, the settings name cluster {config.cluster_id}: "
            "correct cluster_id, or pass another folder"
        )
    return stored or config.cluster_id or ""
