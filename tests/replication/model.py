"""Three replicas of one partition, a controller, and every fault between them, from one seed.

The replicas run the real state machines over logs that are lists. The model adds messages that are delayed, lost or
reordered, slow syncs, crashes that lose unsynced records, metadata that reaches each node at its own time, and
leaders that do not know they were replaced. After each step, an oracle compares the records exposed as committed with
the logs. `Bugs` are mistakes that a test plants, to check that the oracle finds them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from chronik.replication.follower import (
    Append,
    EpochEnd,
    FetchAgain,
    FetchedBatch,
    LeaderAnswer,
    LocalLog,
    NoData,
    PartitionFollower,
    StartOver,
    Truncate,
    diverging_epoch,
)
from chronik.replication.isr import InSyncReplicas
from chronik.replication.leader import PartitionLeader, ProposedIsr
from chronik.storage.epochs import LeaderEpochs

NODES = (1, 2, 3)
NO_LEADER = -1
RECORDS_PER_ANSWER_MAX = 3
LAG_MS_MAX = 300


class Violation(AssertionError):
    """A broken guarantee."""


@dataclass(frozen=True)
class Bugs:
    """Mistakes to plant, one at a time."""

    removal_counts_before_commit: bool = False
    addition_counts_after_commit: bool = False
    watermark_is_log_end: bool = False
    truncates_by_watermark: bool = False
    counts_what_is_not_synced: bool = False
    counts_what_is_received: bool = False
    diverging_fetch_counts: bool = False
    keeps_unused_epochs: bool = False


class Record(NamedTuple):
    epoch: int
    value: int


class State(NamedTuple):
    """The partition as the controller committed it."""

    leader: int
    leader_epoch: int
    isr: tuple[int, ...]
    partition_epoch: int


class Fetch(NamedTuple):
    replica: int
    broker_epoch: int
    leader_epoch: int
    offset: int
    """The end of the replica's log; it has everything below `durable` durably."""
    last_epoch: int
    durable: int


class Reply(NamedTuple):
    """The response to `fetch`. An `answer` of None is an error, after which the follower fetches again."""

    fetch: Fetch
    answer: LeaderAnswer | None
    records: tuple[Record, ...]


@dataclass
class Node:
    id: int
    broker_epoch: int = 0
    is_up: bool = True
    records: list[Record] = field(default_factory=list)
    synced: int = 0
    epochs: LeaderEpochs = field(default_factory=LeaderEpochs)
    checkpoint: int = 0
    known: State | None = None
    inbox: deque[State] = field(default_factory=deque)
    leader: PartitionLeader | None = None
    follower: PartitionFollower | None = None
    shown: int = 0
    """The high watermark up to which the oracle has checked."""
    syncing: int | None = None
    heard_ms: dict[int, int] = field(default_factory=dict)

    @property
    def watermark(self) -> int:
        role = self.leader or self.follower
        return 0 if role is None else role.high_watermark

    def append(self, record: Record) -> None:
        self.epochs.assign(record.epoch, len(self.records))
        self.records.append(record)

    def truncate(self, end: int) -> None:
        del self.records[end:]
        self.synced = min(self.synced, end)
        self.syncing = None
        self.epochs.truncate_to(end)

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        return self.epochs.end_offset(epoch, len(self.records))


class EagerIsr(InSyncReplicas):
    """Treats its proposal as committed."""

    def propose(self, isr: object) -> None:
        super().propose(isr)  # type: ignore[arg-type]
        self.maximal = tuple(isr)  # type: ignore[arg-type]


class LazyIsr(InSyncReplicas):
    """Ignores additions until they are committed."""

    def propose(self, isr: object) -> None:
        super().propose(isr)  # type: ignore[arg-type]
        self.maximal = self.committed


class HastyLeader(PartitionLeader):
    """Uses its own log end as the high watermark."""

    def _advance(self) -> bool:
        rose = self._own_end > self.high_watermark
        self.high_watermark = max(self.high_watermark, self._own_end)
        return rose


class Cluster:
    def __init__(self, seed: int, *, synced: bool = True, min_insync: int = 2, bugs: Bugs | None = None) -> None:
        self.random = Random(f"replication:{seed}")
        self.is_synced_mode = synced
        self.min_insync = min_insync
        self.bugs = bugs or Bugs()
        self.now_ms = 1_000
        self.state = State(1, 0, NODES, 0)
        self.nodes = {node: Node(node) for node in NODES}
        self.live = dict.fromkeys(NODES, 0)
        self.next_broker_epoch = 1
        self.fetches: list[tuple[int, Fetch]] = []
        self.replies: list[tuple[int, Reply]] = []
        self.proposals: list[tuple[int, ProposedIsr]] = []
        self.committed: list[Record] = []
        self.next_value = 0
        self.counts = dict.fromkeys(("committed", "elections", "truncations", "crashes", "isr_changes"), 0)
        self._publish()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        choices: list[tuple[int, Callable[[], None]]] = [
            (10, self.append),
            (14, self.start_sync),
            (14, self.finish_sync),
            (14, self.send_fetch),
            (16, self.deliver_fetch),
            (16, self.deliver_reply),
            (6, self.check_isr),
            (6, self.deliver_proposal),
            (1, self.hand_over),
            (9, self.deliver_metadata),
            (1, self.crash),
            (3, self.restart),
            (1, self.move_leader),
            (1, self.fence),
            (2, self.unfence),
            (2, self.pass_time),
            (1, self.checkpoint),
        ]
        weights = [weight for weight, _ in choices]
        for step in self.random.choices([step for _, step in choices], weights, k=steps):
            self.now_ms += 1
            step()
            self.look()

    def calm_down(self) -> None:
        """End all faults: every appended record is committed, and all replicas become identical."""
        for node in NODES:
            if not self.nodes[node].is_up:
                self._start(self.nodes[node])
            self.unfence_node(node)
        for _ in range(400):
            self.now_ms += 5
            for node in NODES:
                self.deliver_all_metadata(self.nodes[node])
                self.start_sync_of(self.nodes[node])
                self.finish_sync_of(self.nodes[node])
                self.send_fetch_of(self.nodes[node])
            while self.fetches:
                self.deliver_fetch()
                self.look()
            while self.replies:
                self.deliver_reply()
                self.look()
            self.check_isr()
            while self.proposals:
                self.deliver_proposal()
            self.look()
        ends = {len(node.records) for node in self.nodes.values()}
        logs = {tuple(node.records) for node in self.nodes.values()}
        leader = self.nodes[self.state.leader]
        if len(logs) != 1 or leader.watermark != len(leader.records) or set(self.state.isr) != set(NODES):
            raise Violation(f"no agreement after the faults: ends {ends}, watermark {leader.watermark}, {self.state}")

    def pick(self, wanted: Callable[[Node], bool]) -> Node | None:
        found = [node for node in self.nodes.values() if node.is_up and wanted(node)]
        return self.random.choice(found) if found else None

    def append(self) -> None:
        node = self.pick(lambda node: node.leader is not None)
        if node is None or node.leader is None:
            return
        for _ in range(self.random.randint(1, 3)):
            node.append(Record(node.leader.leader_epoch, self.next_value))
            self.next_value += 1
        if not self.is_synced_mode or self.bugs.counts_what_is_not_synced:
            node.leader.acknowledge_durable(len(node.records))

    def start_sync(self) -> None:
        node = self.pick(lambda node: node.syncing is None and node.synced < len(node.records))
        if node is not None:
            self.start_sync_of(node)

    def start_sync_of(self, node: Node) -> None:
        if node.is_up and node.syncing is None and node.synced < len(node.records):
            node.syncing = len(node.records)

    def finish_sync(self) -> None:
        node = self.pick(lambda node: node.syncing is not None)
        if node is not None:
            self.finish_sync_of(node)

    def finish_sync_of(self, node: Node) -> None:
        if node.syncing is None:
            return
        node.synced, node.syncing = max(node.synced, node.syncing), None
        if self.is_synced_mode and node.leader is not None:
            node.leader.acknowledge_durable(node.synced)
        elif self.is_synced_mode and node.follower is not None:
            node.follower.acknowledge_durable(node.synced)

    def send_fetch(self) -> None:
        node = self.pick(lambda node: node.follower is not None)
        if node is not None:
            self.send_fetch_of(node)

    def send_fetch_of(self, node: Node) -> None:
        follower = node.follower
        if follower is None or follower.leader_id == NO_LEADER or not node.is_up:
            return
        end = len(node.records)
        durable = end if self.bugs.counts_what_is_not_synced else self.durable_end(node)
        if durable < end and self.random.random() < 0.5:
            # The leader is of an older release, or the sync will soon end.
            return
        last_epoch = node.records[-1].epoch if node.records else -1
        self.fetches.append(
            (follower.leader_id, Fetch(node.id, node.broker_epoch, follower.leader_epoch, end, last_epoch, durable))
        )

    def deliver_fetch(self) -> None:
        if not self.fetches:
            return
        to, fetch = self.fetches.pop(self.random.randrange(len(self.fetches)))
        node = self.nodes[to]
        if not node.is_up or self.random.random() < 0.05:
            return
        self.replies.append((fetch.replica, self.answer(node, fetch)))

    def answer(self, node: Node, fetch: Fetch) -> Reply:
        leader = node.leader
        refused = Reply(fetch, None, ())
        if leader is None or fetch.leader_epoch != leader.leader_epoch:
            return refused
        if leader.is_stale(fetch.replica, fetch.broker_epoch):
            return refused
        node.heard_ms[fetch.replica] = self.now_ms
        diverging = None
        if fetch.last_epoch >= 0 and not self.bugs.truncates_by_watermark:
            end = EpochEnd(*node.end_of_epoch(fetch.last_epoch))
            diverging = diverging_epoch(end, fetch.last_epoch, fetch.offset)
        is_out = diverging is None and fetch.offset > len(node.records)
        if (diverging is None and not is_out) or self.bugs.diverging_fetch_counts:
            durable = fetch.offset if self.bugs.counts_what_is_received else fetch.durable
            leader.replica_fetched(
                fetch.replica, fetch.broker_epoch, durable, len(node.records), self.now_ms, self.live, 0
            )
        records: tuple[Record, ...] = ()
        if diverging is None and not is_out:
            records = tuple(node.records[fetch.offset : fetch.offset + self.random.randint(1, RECORDS_PER_ANSWER_MAX)])
        batches = [
            FetchedBatch(offset, offset + 1, record.epoch) for offset, record in enumerate(records, fetch.offset)
        ]
        answer = LeaderAnswer(fetch.offset, fetch.last_epoch, leader.high_watermark, 0, batches, diverging, is_out)
        return Reply(fetch, answer, records)

    def deliver_reply(self) -> None:
        if not self.replies:
            return
        to, reply = self.replies.pop(self.random.randrange(len(self.replies)))
        node = self.nodes[to]
        follower = node.follower
        if not node.is_up or follower is None or self.random.random() < 0.05:
            return
        if reply.fetch.broker_epoch != node.broker_epoch or reply.fetch.leader_epoch != follower.leader_epoch:
            return
        if reply.answer is not None:
            self.take(node, follower, reply.answer, reply.records)

    def take(self, node: Node, follower: PartitionFollower, answer: LeaderAnswer, records: tuple[Record, ...]) -> None:
        last_epoch = node.records[-1].epoch if node.records else -1
        own = LocalLog(0, len(node.records), last_epoch, node.end_of_epoch)
        match follower.decide(answer, own):
            case Truncate(offset=offset, below_watermark=below):
                if below:
                    raise Violation(f"node {node.id} goes back to {offset}, below its watermark {node.watermark}")
                self.counts["truncations"] += 1
                node.truncate(offset)
                follower.truncated(offset)
            case StartOver(offset=offset):
                raise Violation(f"node {node.id} starts over at {offset}")
            case Append():
                for record in records:
                    node.append(record)
                follower.leader_watermark_received(answer.high_watermark, self.durable_end(node))
            case NoData():
                follower.leader_watermark_received(answer.high_watermark, self.durable_end(node))
            case FetchAgain():
                return

    def durable_end(self, node: Node) -> int:
        return node.synced if self.is_synced_mode else len(node.records)

    def hand_over(self) -> None:
        """Transfer leadership from a leader to a replica that has every record."""
        node = self.pick(lambda node: node.leader is not None)
        if node is None or node.leader is None:
            return
        leader = node.leader
        for to in leader.in_sync_replicas:
            if to != node.id and leader.durable_end_of(to) >= len(node.records):
                proposed = leader.propose_hand_over(to, self.now_ms, self.live)
                if proposed is not None:
                    self.proposals.append((node.id, proposed))
                return

    def check_isr(self) -> None:
        node = self.pick(lambda node: node.leader is not None)
        if node is None or node.leader is None:
            return
        proposed = node.leader.check_isr(len(node.records), self.now_ms, self.live, node.heard_ms)
        if proposed is not None:
            self.proposals.append((node.id, proposed))

    def deliver_proposal(self) -> None:
        """Deliver a proposal to the controller; the proposal or the response may be lost."""
        if not self.proposals:
            return
        proposer, proposed = self.proposals.pop(self.random.randrange(len(self.proposals)))
        fate = self.random.random()
        is_committed = fate >= 0.15 and self.decide(proposer, proposed)
        leader = self.nodes[proposer].leader
        if leader is not None and leader.leader_epoch == proposed.leader_epoch:
            leader.isr.ended(proposed.partition_epoch, is_committed and fate >= 0.3, self.now_ms)
        if fate >= 0.9:
            # The sender transmitted it twice.
            self.proposals.append((proposer, proposed))

    def decide(self, proposer: int, proposed: ProposedIsr) -> bool:
        state = self.state
        is_current = (state.leader, state.leader_epoch) == (proposer, proposed.leader_epoch)
        if not is_current or proposed.partition_epoch != state.partition_epoch:
            return False
        for replica, broker_epoch in proposed.isr:
            if replica in state.isr and broker_epoch == -1:
                continue
            if replica not in self.live or broker_epoch != self.live[replica]:
                return False
        self.commit(state._replace(isr=tuple(replica for replica, _ in proposed.isr)))
        self.counts["isr_changes"] += 1
        if proposed.hand_over_to in self.live and proposed.hand_over_to in self.state.isr:
            self.commit(self.state._replace(leader=proposed.hand_over_to))
        return True

    # -- metadata ------------------------------------------------------------------------------------------------------

    def commit(self, state: State) -> None:
        is_led_anew = state.leader != self.state.leader
        if is_led_anew:
            self.counts["elections"] += 1
        self.state = state._replace(
            partition_epoch=self.state.partition_epoch + 1, leader_epoch=state.leader_epoch + is_led_anew
        )
        self._publish()

    def _publish(self) -> None:
        for node in self.nodes.values():
            node.inbox.append(self.state)

    def deliver_metadata(self) -> None:
        node = self.pick(lambda node: bool(node.inbox))
        if node is not None:
            self.apply(node, node.inbox.popleft())

    def deliver_all_metadata(self, node: Node) -> None:
        while node.inbox and node.is_up:
            self.apply(node, node.inbox.popleft())

    def apply(self, node: Node, state: State) -> None:
        known = node.known
        node.known = state
        if known is not None and known.leader_epoch == state.leader_epoch and known.leader == state.leader:
            if node.leader is not None:
                node.leader.partition_changed(NODES, state.isr, state.partition_epoch, self.now_ms)
            return
        watermark = node.watermark if known is not None else min(node.checkpoint, len(node.records))
        node.leader = node.follower = None
        if state.leader != node.id:
            node.follower = PartitionFollower(state.leader, state.leader_epoch, watermark)
            if not self.bugs.keeps_unused_epochs:
                # The node may have led an epoch without writing, and now receive records of an older epoch.
                node.epochs.truncate_to(len(node.records))
            if self.bugs.truncates_by_watermark:
                node.truncate(watermark)
            return
        kind = HastyLeader if self.bugs.watermark_is_log_end else PartitionLeader
        if state.isr and node.id not in state.isr:
            raise Violation(f"node {node.id} leads without being in sync: {state}")
        node.leader = kind(
            node.id,
            state.leader_epoch,
            replicas=NODES,
            isr=state.isr,
            partition_epoch=state.partition_epoch,
            min_insync_replicas=self.min_insync,
            log_end_offset=len(node.records),
            durable_end=self.durable_end(node),
            high_watermark=watermark,
            now_ms=self.now_ms,
            lag_ms_max=LAG_MS_MAX,
        )
        if self.bugs.removal_counts_before_commit:
            node.leader.isr = EagerIsr(state.isr, state.partition_epoch)
        elif self.bugs.addition_counts_after_commit:
            node.leader.isr = LazyIsr(state.isr, state.partition_epoch)
        node.epochs.assign(state.leader_epoch, len(node.records))
        node.heard_ms = {}

    # -- faults --------------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        node = self.pick(lambda _: True)
        if node is None:
            return
        self.counts["crashes"] += 1
        node.is_up = False
        node.leader = node.follower = None
        node.known = None
        node.syncing = None
        node.heard_ms = {}
        if self.is_synced_mode:
            node.truncate(self.random.randint(node.synced, len(node.records)))
        elif self.random.random() < 0.4 and len(self.state.isr) > 1:
            # Power loss: records only in the page cache are lost, and the controller removes the node from the ISR.
            self.live.pop(node.id, None)
            self.leave(node.id)
            node.truncate(self.random.randint(0, len(node.records)))
        node.shown = 0

    def restart(self) -> None:
        down = [node for node in self.nodes.values() if not node.is_up]
        if down:
            self._start(self.random.choice(down))

    def _start(self, node: Node) -> None:
        """Register a new process. If it was the leader, a new epoch begins. It receives the current metadata."""
        node.is_up = True
        node.broker_epoch = self.next_broker_epoch
        self.next_broker_epoch += 1
        if self.is_synced_mode:
            node.synced = len(node.records)
        self.live[node.id] = node.broker_epoch
        state = self.state
        if state.leader == node.id:
            self.commit(state._replace(leader_epoch=state.leader_epoch + 1))
        elif state.leader == NO_LEADER and node.id in state.isr:
            self.commit(state._replace(leader=node.id))
        node.inbox = deque([self.state])

    def fence(self) -> None:
        """Fence a node, whether it is down or only slow."""
        node = self.random.choice(NODES)
        if node in self.live and len(self.live) > 1:
            del self.live[node]
            self.leave(node)

    def leave(self, node: int) -> None:
        state = self.state
        isr = tuple(replica for replica in state.isr if replica != node) or state.isr
        leader = state.leader
        if leader == node:
            leader = next((replica for replica in isr if replica in self.live), NO_LEADER)
        if (leader, isr) != (state.leader, state.isr):
            self.commit(state._replace(leader=leader, isr=isr))

    def unfence(self) -> None:
        self.unfence_node(self.random.choice(NODES))

    def unfence_node(self, node: int) -> None:
        if node in self.live or not self.nodes[node].is_up:
            return
        self.live[node] = self.nodes[node].broker_epoch
        if self.state.leader == NO_LEADER and node in self.state.isr:
            self.commit(self.state._replace(leader=node))

    def move_leader(self) -> None:
        others = [node for node in self.state.isr if node in self.live and node != self.state.leader]
        if others and self.state.leader != NO_LEADER:
            self.commit(self.state._replace(leader=self.random.choice(others)))

    def pass_time(self) -> None:
        self.now_ms += self.random.choice((5, 50, 400))

    def checkpoint(self) -> None:
        node = self.pick(lambda _: True)
        if node is not None:
            node.checkpoint = node.watermark

    # -- the oracle ----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        for node in self.nodes.values():
            watermark = node.watermark
            if not node.is_up or watermark == node.shown:
                continue
            if watermark > len(node.records):
                raise Violation(f"node {node.id} shows {watermark}, its log ends at {len(node.records)}")
            if watermark < node.shown:
                raise Violation(f"the watermark of node {node.id} fell from {node.shown} to {watermark}")
            for offset in range(min(node.shown, len(self.committed)), watermark):
                self.compare(node, offset)
            node.shown = watermark
        leader = self.nodes.get(self.state.leader)
        if leader is not None and leader.is_up and leader.leader is not None and leader.known == self.state:
            for offset in range(max(0, len(self.committed) - 8), len(self.committed)):
                if offset >= len(leader.records) or leader.records[offset] != self.committed[offset]:
                    raise Violation(f"committed record {offset} is lost: node {leader.id} leads without it")
            for replica in self.state.isr if self.is_synced_mode else ():
                if self.nodes[replica].synced < leader.watermark:
                    raise Violation(f"{leader.watermark} is committed, node {replica} is in sync and lacks it on disk")

    def compare(self, node: Node, offset: int) -> None:
        record = node.records[offset]
        if offset < len(self.committed):
            if self.committed[offset] != record:
                raise Violation(f"node {node.id} shows {record} at {offset}, where {self.committed[offset]} was shown")
        else:
            self.committed.append(record)
            self.counts["committed"] += 1
