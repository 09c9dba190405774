"""This node's part in its cluster: who it is, its links, the Raft group, the metadata, and its standing as a broker.

A node alone takes the same way: a group of one needs nobody's vote.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from chronik.metadata.calls import (
    AlterIsrCall,
    IsrMember,
    RegisterBrokerCall,
    ReplicaReport,
    ReportedResult,
    ReportReplicasCall,
)
from chronik.metadata.commands import CreateCluster
from chronik.metadata.events import BrokerUnregistered, ClusterCreated, Event
from chronik.metadata.image import ClusterImage, decode_image
from chronik.metadata.registration import REPLICATED
from chronik.node.broker_session import BrokerSession
from chronik.node.cluster_secret import ClusterSecret
from chronik.node.config import ConfigError, NodeConfig
from chronik.node.controller_client import ControllerClient
from chronik.node.controller_service import ControllerService
from chronik.node.endpoint import Endpoint
from chronik.node.greeter import Greeter
from chronik.node.identity import Identity
from chronik.node.link import PeerState
from chronik.node.metadata_log import RaftMetadataLog, new_cluster_id
from chronik.node.peers import Peers
from chronik.node.raft_service import RaftService
from chronik.node.raft_store import RaftStore
from chronik.node.sqlite_file import StoreError
from chronik.raft.entries import Snapshot, StoredState
from chronik.raft.membership import Member, Membership
from chronik.raft.node import RaftNode
from chronik.raft.ready import Event as RaftEvent
from chronik.raft.ready import LeaderEstablished, MembershipChanged, Persist, RoleChanged
from chronik.raft.settings import RaftSettings
from chronik.storage.errors import DataFolderError
from chronik.wire.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from chronik.node.broker import Broker
    from chronik.storage.folder import DataFolder

STORE_NAME = "metadata.db"
HEARTBEAT_INTERVAL_MS = 100
ELECTION_TIMEOUT_MS = 500
FOUNDERS_SMALL, FOUNDERS_LARGE = 3, 5
REFUSED_S = 5.0
"""Refusals may pass: the peer may not have noticed yet that this node's former process is gone."""

WAITING_LOGGED_S = 5.0
NO_METADATA_S = 20.0
"""A node without metadata waits this long for a cluster to join, once it has been connected to all founders."""

MAJORITY_LOST_S = 2.0
HAND_OVER_S = 1.0
LEAVE_TIMEOUT_S = 6.0
"""Longer than the controller's patience with partitions that only this broker can lead."""

PROPOSAL_TIMEOUT_S = 10.0

WITHOUT_METADATA = (
    "rebuild it from the logs with `chronik cluster restore-metadata`, or start with an empty data folder"
)


class ClusterMember:
    """Owned by the loop. `open` first; then `join` for the broker's part."""

    def __init__(self, broker: Broker, folder: DataFolder, secret: ClusterSecret) -> None:
        config = broker.config
        self._broker = broker
        self._folder = folder
        self._config = config
        self._loop = broker.loop
        self._log = broker.log
        self._is_open = False
        self._is_majority_lost = False
        self._leaderless: asyncio.TimerHandle | None = None
        self._follows = asyncio.Event()
        """Set while another node leads the Raft group."""
        self._meta_written: asyncio.Task[None] | None = None
        self._has_lost_metadata = False
        """Whether there are logs here beside an empty Raft store."""
        self._met_founders: set[int] = set()
        self._member_ids: set[int] = set()
        self.identity = Identity(
            config.node_id,
            broker.env.new_uuid(),
            str(config.advertised_internal(broker.internal_server.port)),
            _cluster_id(config, folder),
        )
        self.metadata = RaftMetadataLog(broker.loop, broker.log)
        self.metadata.subscribe(self._metadata_changed)
        configured = {peer.id: Endpoint.parse(peer.internal) for peer in config.peers if peer.id != config.node_id}
        links_log = broker.log.bind(component="links")
        random = broker.env.random
        self.peers = Peers(broker.loop, random, self.identity, secret, links_log, self._peer_refused, configured)
        self.greeter = Greeter(
            self.identity, secret, random, broker.loop.time, links_log, self.peers.learn, self._peer_left
        )
        self.controller = ControllerService(broker, self)
        self.client = ControllerClient(broker.loop, config.node_id, self.metadata, self.peers, self.controller.answer)
        self.raft: RaftService
        self.session: BrokerSession
        self._store_id = self.identity.incarnation

    # -- coming --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Reads the Raft store and takes part from now on. Raises what speaks against this folder or configuration."""
        broker, config = self._broker, self._config
        store = broker.env.open_raft_store(f"{self._folder.path}/{STORE_NAME}", broker.env.new_uuid)
        stored = await broker.run_blocking(store.load)
        try:
            if stored.snapshot is not None and not stored.snapshot.membership.members:
                stored = await self._take_over(store, stored, stored.snapshot)
            self._has_lost_metadata = await self._is_metadata_lost(stored)
            node = self._raft_node(stored)
            self._check(node, stored)
        except BaseException:
            await broker.run_blocking(store.close)
            raise
        self._store_id = stored.store_id
        self._is_open = True
        self.raft = RaftService(
            broker.loop,
            broker.env,
            node,
            store,
            self.peers,
            self.metadata,
            broker.log,
            broker.failed_by,
            broker.disk_watch,
        )
        self.metadata.attach(self.raft)
        self.raft.subscribe(self._raft_event)
        self.controller.start()
        self.peers.start()
        for member in node.membership.members:
            self.raft.learn(member.node_id, member.address)
            self._member_ids.add(member.node_id)
        self.raft.start()
        if config.peers and len(founders(config)) % 2 == 0:
            self._log.warning(
                "even_voters",
                voters=list(founders(config)),
                detail="with an even number of voters one node less can fail: use one, three or five",
            )

    def _raft_node(self, stored: StoredState) -> RaftNode:
        config = self._config
        return RaftNode(
            config.node_id,
            stored,
            RaftSettings(heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS, election_timeout_ms=ELECTION_TIMEOUT_MS),
            self._broker.env.random,
            int(self._loop.time() * 1000),
            address=self.identity.internal,
            seeds=[peer.id for peer in config.peers],
            # With logs here a cluster has been founded before: to found another one would orphan them.
            founders=() if self._has_lost_metadata else founders(config),
        )

    async def _take_over(self, store: RaftStore, stored: StoredState, former: Snapshot) -> StoredState:
        """The metadata is from before there were clusters: this node is the cluster that it describes."""
        if self._config.peers:
            raise StoreError(
                f"{self._folder.path}/{STORE_NAME} is from before there were clusters: start this node once without "
                "peers, so that it becomes a cluster of one, then with them"
            )
        own = Member(self._config.node_id, stored.store_id, is_voter=True, address=self.identity.internal)
        snapshot = msgspec.structs.replace(former, membership=Membership((own,)))
        await self._broker.run_blocking(lambda: store.persist(Persist(stored.hard_state, snapshot)))
        self._log.info(
            "metadata_taken_over",
            detail="from before there were clusters",
            cluster=decode_image(former.data).cluster_id,
        )
        return await self._broker.run_blocking(store.load)

    async def _is_metadata_lost(self, stored: StoredState) -> bool:
        """Whether there are logs, and no metadata that knows them. A node alone cannot start then."""
        is_blank = stored.snapshot is None and not stored.entries
        if not is_blank or not await self._broker.run_blocking(self._folder.partitions):
            return False
        path = f"{self._folder.path}/{STORE_NAME}"
        if not self._config.peers:
            raise StoreError(f"{path} is missing or empty though there are logs beside it: {WITHOUT_METADATA}")
        self._log.error("metadata_lost", path=path, then="this node joins its cluster again and keeps its logs")
        return True

    def _check(self, node: RaftNode, stored: StoredState) -> None:
        config, boot = self._config, self._folder.boot
        members = node.membership.members
        if members and boot is not None and node.last_index < boot.raft_index:
            way_out = (
                "remove it, and the node joins its cluster again with its logs" if config.peers else "restore that"
            )
            raise StoreError(
                f"{self._folder.path}/{STORE_NAME} ends at entry {node.last_index} and had reached {boot.raft_index}: "
                f"it is an old copy that has forgotten votes and metadata: {way_out}"
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

    async def join(self, settled: Callable[[], Awaitable[None]]) -> None:
        """Registers as a broker; waits for a controller as long as that takes. Afterwards the image is up to date."""
        broker, config = self._broker, self._config
        kafka = config.advertised_kafka(broker.server.port)
        has_kept_all, previous_epoch = self._last_process()
        boot, incarnation = self._folder.boot, self.identity.incarnation
        await broker.run_blocking(lambda: self._folder.record_start(incarnation))
        registration = RegisterBrokerCall(
            config.node_id,
            self.identity.incarnation,
            kafka.host,
            kafka.port,
            self.identity.internal,
            config.rack,
            has_kept_all,
            config.durability,
            previous_epoch=previous_epoch,
            folder_id=self._store_id,
            http=broker.http,
            previous_incarnations=None if boot is None else boot.incarnations,
        )
        self.session = BrokerSession(
            broker.loop,
            self.client,
            self.metadata,
            registration,
            settled,
            broker.hand_over,
            broker.failed_by,
            # Alone, there is nobody to lead instead.
            lambda: broker.disk_watch.is_stuck and not self.raft.is_alone,
            broker.log,
        )
        broker.disk_watch.subscribe(self.session.poke)
        started_s = logged_s = self._loop.time()
        while True:
            try:
                await self.session.register()
                break
            except KafkaError as error:
                now_s = self._loop.time()
                if self.raft.write_error is not None and not config.peers:
                    raise StoreError(
                        f"this start cannot be recorded ({self.raft.write_error}): make room on the disk"
                    ) from None
                self._give_up_if_refused(now_s - started_s, error)
                self._give_up_without_metadata(now_s - started_s)
                if now_s - logged_s >= WAITING_LOGGED_S:
                    logged_s = now_s
                    self._log.warning("waiting_for_controller", reason=error.message, missing=self.missing())
            await asyncio.sleep(0.1)
        boot_id = broker.env.boot_id if config.durability == REPLICATED else ""
        epoch = self.session.broker_epoch
        # What is applied here is durable here.
        index = self.metadata.applied_index
        await broker.run_blocking(lambda: self._folder.record_registration(boot_id, epoch, incarnation, index))

    def _last_process(self) -> tuple[bool, int | None]:
        """Whether the process before this one left all that it had written, and the broker epoch that it had.

        It did if it stopped cleanly; and if it was killed, as long as the machine has not booted since: what it had
        written is in the page cache, if not on disk.
        """
        folder, boot_id = self._folder, self._broker.env.boot_id
        boot = folder.boot
        if not folder.was_clean and boot is not None and boot_id and boot.boot_id == boot_id:
            return True, boot.broker_epoch
        return folder.was_clean, folder.stopped_epoch

    def missing(self) -> list[str]:
        """The voters, or while none is known the configured peers, that cannot be reached, with the reason."""
        voters = [voter.node_id for voter in self.raft.node.membership.voters] or list(founders(self._config))
        return [
            f"node {node_id}: {self.peers.status(node_id).reason}"
            for node_id in voters
            if node_id != self._config.node_id and not self.peers.is_connected(node_id)
        ]

    def _give_up_if_refused(self, waited_s: float, error: KafkaError) -> None:
        """A node that nobody wants must not wait for ever in silence."""
        if waited_s < REFUSED_S:
            return
        if error.code is ErrorCode.duplicate_broker_registration:
            raise ConfigError(error.message)
        if error.code is ErrorCode.invalid_registration and self.raft.node.last_index > 0:
            # With an empty store it would be about to join; this one was removed.
            raise ConfigError(error.message)
        statuses = [self.peers.status(node_id) for node_id in self.peers.known()]
        refusals = [status.reason for status in statuses if status.state is PeerState.REJECTED]
        if refusals and not any(status.state is PeerState.CONNECTED for status in statuses):
            raise ConfigError(refusals[0])

    def _give_up_without_metadata(self, waited_s: float) -> None:
        """A node that lost its metadata can only join. If all founders did, there is nothing to join."""
        if not self._has_lost_metadata:
            return
        others = set(founders(self._config)) - {self._config.node_id}
        self._met_founders |= {node_id for node_id in others if self.peers.is_connected(node_id)}
        if waited_s >= NO_METADATA_S and others <= self._met_founders and self.raft.leader_id < 0:
            raise StoreError(
                f"{self._folder.path}/{STORE_NAME} is missing or empty though there are logs beside it, and no node of "
                f"this cluster has its metadata: {WITHOUT_METADATA}"
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
        """Has the controller commit another ISR, or another leader, of a partition that this broker leads."""
        call = AlterIsrCall(
            self._config.node_id,
            topic_id,
            partition,
            leader_epoch,
            partition_epoch,
            tuple(IsrMember(*member) for member in members),
            self.session.broker_epoch,
            hand_over_to,
        )
        await self.client.call(call, PROPOSAL_TIMEOUT_S, waits_for_image=False)

    async def report_replicas(self, reports: tuple[ReplicaReport, ...], waits_for_image: bool) -> ReportedResult:
        """Returns when the controller has committed what follows from the reports."""
        call = ReportReplicasCall(self._config.node_id, self.session.broker_epoch, reports)
        result = await self.client.call(call, PROPOSAL_TIMEOUT_S, waits_for_image=waits_for_image)
        assert isinstance(result, ReportedResult)
        return result

    # -- going ---------------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Has others lead what this node leads, the cluster included; bounded, since a stop must come to an end."""
        if len(self.raft.node.membership.members) <= 1:
            return
        if not await self.session.leave(LEAVE_TIMEOUT_S):
            self._log.warning("left_without_handover", then="others take over when they miss this node")
        if self.raft.node.is_leader and self.raft.transfer_leadership() is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HAND_OVER_S):
                    await self._follows.wait()

    async def close(self) -> None:
        """A second call changes nothing; nor does one before `open` has come to its end."""
        if not self._is_open:
            return
        self._is_open = False
        self.controller.close()
        if self._leaderless is not None:
            self._leaderless.cancel()
        await self.metadata.close()
        await self.peers.close()
        if self._meta_written is not None:
            await asyncio.wait([self._meta_written], timeout=self._broker.disk_watch.patience_s)

    # -- events --------------------------------------------------------------------------------------------------------

    def _raft_event(self, event: RaftEvent) -> None:
        if isinstance(event, RoleChanged):
            if event.leader not in (None, self._config.node_id):
                self._follows.set()
            else:
                self._follows.clear()
            self._watch_majority(event.leader is not None)
        if isinstance(event, MembershipChanged) and event.is_committed:
            self._members_changed(event.membership)
        if isinstance(event, LeaderEstablished) and not self.metadata.image.cluster_id:
            self.metadata.submit(CreateCluster(self.identity.cluster_id or new_cluster_id(self._broker.env)))

    def _watch_majority(self, has_leader: bool) -> None:
        """An election takes a moment; when it takes longer, somebody has to know who is missing."""
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
        voters = [voter.node_id for voter in self.raft.node.membership.voters]
        self._log.error(
            "majority_lost",
            voters=voters,
            missing=self.missing(),
            then="nothing is changed or acknowledged until most voters are there again: start the missing ones",
        )

    def _metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, ClusterCreated):
                self._learn_cluster(event.cluster_id)
            elif isinstance(event, BrokerUnregistered):
                self._node_removed(event.broker.id)

    def _learn_cluster(self, cluster_id: str) -> None:
        known = self.identity.cluster_id
        if known and known != cluster_id:
            self._broker.failed_by(
                DataFolderError(
                    f"{self._folder.path}/{STORE_NAME} belongs to cluster {cluster_id}, its folder to {known}: "
                    "move this folder away, so that the node joins again with an empty one"
                )
            )
            return
        self.identity.cluster_id = cluster_id
        if self._folder.meta.cluster_id != cluster_id:
            write = self._broker.run_blocking(lambda: self._folder.set_cluster_id(cluster_id))
            self._meta_written = self._loop.create_task(write, name="cluster-id")

    def _node_removed(self, node_id: int) -> None:
        if node_id != self._config.node_id:
            self._forget_if_gone(node_id)
        elif hasattr(self, "session") and self.session.broker_epoch >= 0:
            self.session.removed()
            self._log.warning(
                "removed_from_cluster", then="stop this node; to join again it needs an empty data folder"
            )

    def _members_changed(self, membership: Membership) -> None:
        members = {member.node_id for member in membership.members}
        for node_id in sorted(self._member_ids - members):
            self._forget_if_gone(node_id)
        self._member_ids = members

    def _forget_if_gone(self, node_id: int) -> None:
        """Forget the address of a node that is neither a member of the Raft group nor a broker.

        A node that was removed and has joined again can be a member before its removal is applied here.
        """
        is_member = self.raft.node.membership.member(node_id) is not None
        if not is_member and node_id not in self.metadata.image.brokers:
            self.peers.forget(node_id)

    def _peer_refused(self, node_id: int) -> None:
        """Nobody listens at the peer's address. Only if it holds no connection to us either is its process gone."""
        if not self.greeter.is_present(node_id):
            self.controller.broker_gone(node_id)

    def _peer_left(self, node_id: int) -> None:
        """The peer's last connection ended: its link finds out at once whether the process is still there."""
        self.peers.probe(node_id)


def founders(config: NodeConfig) -> tuple[int, ...]:
    """The nodes that vote when the cluster is made: the first three of those configured, or five where there are."""
    ids = sorted({config.node_id, *(peer.id for peer in config.peers)})
    return tuple(ids[: FOUNDERS_LARGE if len(ids) >= FOUNDERS_LARGE else FOUNDERS_SMALL])


def _cluster_id(config: NodeConfig, folder: DataFolder) -> str:
    stored = folder.meta.cluster_id
    if stored and config.cluster_id and stored != config.cluster_id:
        raise DataFolderError(
            f"data folder {folder.path} belongs to cluster {stored}, the settings name cluster {config.cluster_id}: "
            "correct cluster_id, or pass another folder"
        )
    return stored or config.cluster_id or ""
