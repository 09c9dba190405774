"""A model of brokers that replicate one partition under the controller: logs, leaders, fetches and commits.

The test chooses every step: which message arrives, which process dies, how far a broker has followed the metadata. The
brokers follow the rules that docs/design.md states under "Replication"; the model checks what the controller must
guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from chronik.metadata.apply import apply
from chronik.metadata.calls import (
    UNKNOWN_EPOCH,
    AlterIsrCall,
    HeartbeatCall,
    HeartbeatResult,
    IsrMember,
    RegisterBrokerCall,
    ReplicaReport,
    ReportReplicasCall,
)
from chronik.metadata.commands import Assignment, Command, CreateTopic
from chronik.metadata.controller import Controller, ControllerSettings
from chronik.metadata.elections import Loss, min_insync_replicas
from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage
from chronik.wire.errors import KafkaError

TOPIC = "orders"
TOPIC_ID = UUID(int=77)
SETTINGS = ControllerSettings(rebalance_interval_ms=1_000, requested_hand_over_ms=200, recovery_wait_ms=1_000)

Entry = tuple[int, int]
"""The leader epoch under which a record was appended, and a unique number."""


@dataclass
class Leading:
    """A leader's state during one epoch."""

    leader_epoch: int
    epoch_start: int
    high_watermark: int
    ends: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By replica: its log end offset at its last fetch, and the broker epoch of that fetch."""
    proposed: set[int] = field(default_factory=set)
    """Replicas proposed since the partition last changed: each proposal may have been, or may still be, accepted."""


@dataclass
class Process:
    """One broker: its disk survives, all other state is new in each incarnation."""

    id: int
    incarnation: UUID
    folder_id: UUID
    log: list[Entry] = field(default_factory=list)
    high_watermark: int = 0
    is_up: bool = True
    is_registered: bool = False
    epoch: int = -1
    version: int = 0
    leading: Leading | None = None
    wants_shutdown: bool = False
    cannot_write: bool = False
    stopped_epoch: int = -1
    was_clean: bool = True
    has_lost: bool = False
    loss: Loss | None = None
    """The loss that the broker found in its log at startup, until the controller knows of it."""
    previous: list[UUID] = field(default_factory=list)
    """The processes that may have registered last with this data folder, according to the folder."""
    is_old_copy: bool = False
    copy: tuple[list[Entry], list[UUID], int] | None = None
    """An old copy of the data folder."""


class World:
    """Brokers, the images they follow, and the current controller."""

    def __init__(self, brokers: int, replicas: tuple[int, ...], durability: str) -> None:
        self.durability = durability
        self.now_ms = 1_000
        self.images = [ClusterImage()]
        self.committed: list[Entry] = []
        self.is_tainted = False
        self.is_refused = False
        """Whether a replica keeps records that were lost elsewhere, so that an administrator must decide."""
        self.is_offline = False
        """Whether the last replica that could lead has lost its log, so that an administrator must decide."""
        self.proposals: list[AlterIsrCall] = []
        self._incarnations = 0
        self._records = 0
        self._leaders: dict[int, tuple[int, UUID]] = {}
        self.controller = Controller(self.image, self.now_ms, SETTINGS)
        self.processes = {
            broker_id: Process(broker_id, self._incarnation(), UUID(int=broker_id))
            for broker_id in range(1, brokers + 1)
        }
        for broker_id in self.processes:
            self.register(broker_id)
        self.settle(300)
        self.propose(CreateTopic(TOPIC, TOPIC_ID, (Assignment(replicas, replicas),)))
        self.settle(200)

    # -- metadata ------------------------------------------------------------------------------------------------------

    @property
    def image(self) -> ClusterImage:
        return self.images[-1]

    @property
    def partition(self) -> PartitionImage:
        return self.image.topics[TOPIC].partitions[0]

    def propose(self, command: Command) -> bool:
        try:
            image, _ = apply(self.image, command)
        except KafkaError:
            return False
        before = self.image
        self.images.append(image)
        self.controller.image_applied(image)
        if TOPIC in before.topics:
            unproven = before.topics[TOPIC].partitions[0].unproven
            if unproven and self.partition.leader in unproven:
                # Records that only an unproven replica holds are not guaranteed if that replica is down.
                longest = max(len(self.processes[member].log) for member in unproven)
                self.is_tainted = self.is_tainted or len(self.processes[self.partition.leader].log) < longest
            self._check_step(before.topics[TOPIC].partitions[0], self.partition)
        return True

    def run_controller(self, commands_max: int = 100) -> int:
        """Propose the commands that are due, up to `commands_max`: a controller may die between two of them."""
        done = 0
        for command in self.controller.due(self.now_ms):
            if done == commands_max:
                break
            self.propose(command)
            done += 1
        return done

    def change_controller(self) -> None:
        self.controller = Controller(self.image, self.now_ms, SETTINGS)

    # -- broker lifecycle ----------------------------------------------------------------------------------------------

    def register(self, broker_id: int) -> bool:
        process = self.processes[broker_id]
        call = RegisterBrokerCall(
            broker_id,
            process.incarnation,
            f"host-{broker_id}",
            9092,
            was_clean=process.was_clean,
            durability=self.durability,
            previous_epoch=process.stopped_epoch if broker_id in self.image.brokers else None,
            folder_id=process.folder_id,
            previous_incarnations=tuple(process.previous),
        )
        process.previous.append(process.incarnation)
        try:
            command = self.controller.register(self.image, call, self.now_ms)
        except KafkaError:
            return False
        if process.has_lost:
            # If no replica with more records is left, the cluster guarantees nothing, so the model stops checking.
            safe = {*self.partition.isr, *self.partition.eligible}
            is_certain = process.loss is not None or process.is_old_copy
            self.is_offline = self.is_offline or (is_certain and safe <= {broker_id})
            self.is_tainted = self.is_tainted or all(self.processes[member].has_lost for member in safe)
        assert self.propose(command)
        process.is_registered = True
        process.epoch = self.image.brokers[broker_id].epoch
        process.version = self.image.version
        process.previous = [process.incarnation]
        if process.loss is not None:
            self.report(broker_id, process.loss)
        process.has_lost = process.is_old_copy = False
        process.loss = None
        return True

    def report(self, broker_id: int, loss: Loss | None, leader_epoch: int = UNKNOWN_EPOCH) -> None:
        """Report to the controller the broker's loss, its leader's loss, or the broker's log end offset."""
        process = self.processes[broker_id]
        last_epoch = process.log[-1][0] if process.log else -1
        report = ReplicaReport(
            TOPIC_ID, 0, len(process.log), last_epoch, "" if loss is None else loss.value, "", leader_epoch
        )
        call = ReportReplicasCall(broker_id, process.epoch, (report,))
        try:
            command = self.controller.report(self.image, call, self.now_ms).command
        except KafkaError:
            return
        if command is not None:
            self.propose(command)

    def heartbeat(self, broker_id: int) -> HeartbeatResult | None:
        process = self.processes[broker_id]
        if not (process.is_up and process.is_registered):
            return None
        call = HeartbeatCall(
            broker_id,
            process.incarnation,
            process.epoch,
            process.version,
            wants_shutdown=process.wants_shutdown,
            cannot_write=process.cannot_write,
        )
        result = self.controller.heartbeat(call, self.now_ms)
        if result.should_shut_down:
            process.stopped_epoch = process.epoch
            process.was_clean = True
            process.is_up = False
        return result

    def kill(self, broker_id: int) -> None:
        process = self.processes[broker_id]
        process.is_up = False
        process.was_clean = False
        process.stopped_epoch = -1

    def copy_folder(self, broker_id: int) -> None:
        process = self.processes[broker_id]
        process.copy = list(process.log), list(process.previous), process.high_watermark

    def restore_folder(self, broker_id: int) -> None:
        """Restore the data folder from its copy while the broker is down."""
        process = self.processes[broker_id]
        # Only a copy of an earlier process: a copy from the current process is detected only when the broker leads.
        if process.copy is not None and self.image.brokers[broker_id].incarnation not in process.copy[1]:
            log, previous, process.high_watermark = process.copy
            process.log, process.previous = list(log), list(previous)
            process.has_lost = process.is_old_copy = True

    def remove_log(self, broker_id: int) -> None:
        """Remove the log while the broker is down; the broker notices at startup."""
        process = self.processes[broker_id]
        process.log = []
        process.has_lost = True
        process.loss = Loss.CERTAIN

    def restart(self, broker_id: int, lost: int = 0) -> None:
        """Start a new process on the same disk. Under `replicated`, an unclean stop loses the last records."""
        process = self.processes[broker_id]
        if lost and not process.was_clean and self.durability == "replicated":
            del process.log[max(0, len(process.log) - lost) :]
            process.has_lost = True
        process.high_watermark = min(process.high_watermark, len(process.log))
        process.incarnation = self._incarnation()
        process.is_up = True
        process.is_registered = False
        process.leading = None
        process.wants_shutdown = process.cannot_write = False

    def follow(self, broker_id: int, versions: int = 1) -> None:
        """Let the broker apply the next versions of the metadata."""
        process = self.processes[broker_id]
        for _ in range(versions):
            if not process.is_up or process.version >= self.image.version:
                return
            process.version += 1
            self._take_role(process)

    def _take_role(self, process: Process) -> None:
        image = self.images[process.version]
        if TOPIC not in image.topics or image.brokers[process.id].incarnation != process.incarnation:
            # The leader epoch belongs to the previous process: this process may have lost records of that one.
            return
        partition = image.topics[TOPIC].partitions[0]
        if partition.leader != process.id:
            process.leading = None
            return
        leading = process.leading
        if leading is None or leading.leader_epoch != partition.leader_epoch:
            high_watermark = min(process.high_watermark, len(process.log))
            process.leading = Leading(partition.leader_epoch, len(process.log), high_watermark)
        elif partition.partition_epoch > self.images[process.version - 1].topics[TOPIC].partitions[0].partition_epoch:
            leading.proposed = set()
        self._advance(process)

    # -- records -------------------------------------------------------------------------------------------------------

    def append(self, broker_id: int) -> None:
        process = self.processes[broker_id]
        if process.is_up and process.leading is not None:
            self._records += 1
            process.log.append((process.leading.leader_epoch, self._records))
            self._advance(process)

    def fetch(self, broker_id: int, records_max: int = 100) -> None:
        """Fetch from the known leader, after truncating what the leader does not have."""
        process = self.processes[broker_id]
        view = self._view(process)
        if view is None or not process.is_up or not process.is_registered or broker_id not in view.replicas:
            return
        leader = self.processes.get(view.leader)
        if leader is None or leader is process or not leader.is_up or leader.leading is None:
            return
        if leader.leading.leader_epoch != view.leader_epoch:
            return
        leader_view = self._view(leader)
        assert leader_view is not None
        if broker_id not in leader_view.replicas:
            return
        common = _common(process.log, leader.log)
        if common < process.high_watermark:
            # The follower keeps the committed records and reports the leader's loss.
            self.report(broker_id, Loss.CERTAIN, view.leader_epoch)
            self.is_refused = self.is_tainted
            return
        del process.log[common:]
        known = leader.leading.ends.get(broker_id, (0, -1))
        if process.epoch < known[1]:
            return
        leader.leading.ends[broker_id] = (common, process.epoch)
        self._advance(leader)
        process.log += leader.log[common : common + records_max]
        process.high_watermark = max(process.high_watermark, min(leader.leading.high_watermark, len(process.log)))

    def _advance(self, process: Process) -> None:
        """Advance the high watermark by the maximal ISR, if enough replicas are in sync."""
        view = self._view(process)
        leading = process.leading
        if view is None or leading is None:
            return
        image = self.images[process.version]
        if len(view.isr) < min_insync_replicas(image, image.topics[TOPIC], view):
            return
        maximal = {*view.isr, *leading.proposed}
        ends = [
            len(process.log) if member == process.id else leading.ends.get(member, (0, -1))[0] for member in maximal
        ]
        end = min(ends)
        if end > leading.high_watermark:
            self._commit(process.log[:end])
            leading.high_watermark = end
            process.high_watermark = end

    def _commit(self, records: list[Entry]) -> None:
        if self.is_tainted:
            return
        common = min(len(records), len(self.committed))
        assert records[:common] == self.committed[:common], f"{records} are committed beside {self.committed}"
        if len(records) > len(self.committed):
            self.committed = list(records)

    # -- ISR changes ---------------------------------------------------------------------------------------------------

    def propose_isr(self, broker_id: int, leaving: set[int], hand_over_to: int = NO_LEADER) -> None:
        """Propose to add the in-sync replicas to the ISR and to remove `leaving`."""
        process = self.processes[broker_id]
        view = self._view(process)
        leading = process.leading
        if view is None or leading is None or not process.is_up:
            return
        brokers = self.images[process.version].brokers
        members = [IsrMember(broker_id, process.epoch)]
        for replica in view.replicas:
            end, epoch = leading.ends.get(replica, (-1, -1))
            if replica == broker_id or replica in leaving:
                continue
            is_in_sync = end >= leading.high_watermark and end >= leading.epoch_start and replica in brokers
            if replica in view.isr or is_in_sync:
                members.append(IsrMember(replica, epoch))
        call = AlterIsrCall(
            broker_id,
            TOPIC_ID,
            0,
            leading.leader_epoch,
            view.partition_epoch,
            tuple(members),
            process.epoch,
            hand_over_to,
        )
        isr = {member.broker_id for member in members}
        if hand_over_to == NO_LEADER and isr == set(view.isr) and not leading.proposed:
            return
        leading.proposed |= isr
        self.proposals.append(call)

    def deliver(self, at: int, *, is_again: bool = False) -> bool:
        """Deliver a proposal to the controller; it may be delivered a second time."""
        call = self.proposals[at] if is_again else self.proposals.pop(at)
        try:
            command = self.controller.alter_isr(self.image, call, self.now_ms)
        except KafkaError:
            return False
        return self.propose(command)

    # -- recovery ------------------------------------------------------------------------------------------------------

    def settle(self, ms: int = 4_000) -> None:
        """Run all live brokers for `ms` milliseconds."""
        for step in range(ms // 100):
            self.now_ms += 100
            for broker_id, process in self.processes.items():
                if process.is_up and not process.is_registered:
                    self.register(broker_id)
                self.follow(broker_id, 1_000)
                if step % 3 == 0:
                    self.heartbeat(broker_id)
                if process.is_up and TOPIC in self.image.topics and broker_id in self.partition.unproven:
                    self.report(broker_id, None)
            self.run_controller()
            if TOPIC not in self.image.topics:
                continue
            for broker_id in (*self.processes, *self.processes):
                self.follow(broker_id, 1_000)
                self.fetch(broker_id)
            if self.partition.leader != NO_LEADER:
                self.propose_isr(self.partition.leader, set())
            while self.proposals:
                self.deliver(0)

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        if TOPIC not in self.image.topics:
            return
        partition = self.partition
        topic = self.image.topics[TOPIC]
        assert set(partition.isr) <= set(partition.replicas)
        assert len(set(partition.isr)) == len(partition.isr)
        assert partition.leader == NO_LEADER or partition.leader in partition.isr
        assert not set(partition.eligible) & set(partition.isr)
        assert set(partition.adding) <= set(partition.replicas) and set(partition.removing) <= set(partition.replicas)
        assert not partition.unproven or partition.leader == NO_LEADER
        if partition.eligible:
            assert len(partition.isr) < min_insync_replicas(self.image, topic, partition)
        for process in self.processes.values():
            for other in self.processes.values():
                for mine, theirs in zip(process.log, other.log, strict=False):
                    assert mine[0] != theirs[0] or mine == theirs, "one epoch has two logs"
        if self.is_tainted:
            return
        for member in (*partition.isr, *partition.eligible):
            process = self.processes[member]
            if not process.has_lost:
                held = process.log[: len(self.committed)]
                assert held == self.committed, f"broker {member} of {partition} lacks {self.committed}: {held}"

    def _check_step(self, old: PartitionImage, new: PartitionImage) -> None:
        if new == old:
            return
        assert new.partition_epoch > old.partition_epoch
        assert new.leader_epoch >= old.leader_epoch
        if new.leader != old.leader:
            assert new.leader_epoch > old.leader_epoch
        if new.leader != NO_LEADER:
            holder = (new.leader, self.image.brokers[new.leader].incarnation)
            assert self._leaders.setdefault(new.leader_epoch, holder) == holder, "one epoch has two leaders"

    def _view(self, process: Process) -> PartitionImage | None:
        topic = self.images[process.version].topics.get(TOPIC)
        return None if topic is None else topic.partitions[0]

    def _incarnation(self) -> UUID:
        self._incarnations += 1
        return UUID(int=1_000 + self._incarnations)


def _common(one: list[Entry], other: list[Entry]) -> int:
    at = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        at += 1
    return at
