"""A Raft cluster in memory: hosts with clocks and disks, a network that loses, delays and reorders, and an oracle.

Everything is derived from one seed. A crash loses what was not written; a write in progress at that moment is lost or
kept at random. True time is in milliseconds; each host reads it from a clock with its own offset and rate.
"""

from __future__ import annotations

import heapq
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from uuid import UUID

from tests.raft.memory_store import MemoryRaftStore
from tests.raft.oracle import Oracle, Promise, Violation

from chronik.raft.membership import Member, Membership, MembershipChange, encode_membership
from chronik.raft.messages import Heartbeat, HeartbeatReply, Message, decode_message, encode_message
from chronik.raft.node import RaftNode
from chronik.raft.ready import Event, ProposalId, Ready, Refused, RoleChanged, RoleKind
from chronik.raft.state import RaftSettings
from chronik.raft.store import Entry, EntryKind, HardState, StoredState

SETTINGS = RaftSettings(
    heartbeat_interval_ms=50,
    election_timeout_ms=300,
    hello_interval_ms=50,
    transfer_timeout_ms=300,
    append_entries_max=4,
    append_bytes_max=400,
    in_flight_appends_max=3,
    in_flight_bytes_max=1_000,
    snapshot_chunk_bytes=5,
    trailing_entries=3,
    promotion_lag_entries_max=5,
)
"""Small bounds, so that short runs reach them."""

STATE = struct.Struct(">QQI")


@dataclass(slots=True)
class Machine:
    """The state machine: its applied index, its number of commands, and a checksum over all of them in order."""

    index: int = 0
    count: int = 0
    checksum: int = 0

    def apply(self, entry: Entry) -> None:
        if entry.index != self.index + 1:
            raise Violation(f"applying: entry {entry.index} follows {self.index}")
        self.index = entry.index
        if entry.kind is EntryKind.COMMAND:
            self.count += 1
            self.checksum = zlib.crc32(entry.data, self.checksum)

    def encode(self) -> bytes:
        return STATE.pack(self.index, self.count, self.checksum)

    @classmethod
    def decode(cls, data: bytes) -> Machine:
        return cls(*STATE.unpack(data))


@dataclass(slots=True)
class Faults:
    """The current faults; all probabilities are per message or write."""

    latency_ms: tuple[float, float] = (0.5, 2.0)
    stray: float = 0.0
    """A message is delayed by `stray_ms`, and many later messages overtake it."""
    stray_ms: tuple[float, float] = (50.0, 900.0)
    loss: float = 0.0
    duplication: float = 0.0
    write_ms: tuple[float, float] = (0.2, 2.0)
    crash_at_write: float = 0.0
    """A host crashes during a write, or between the write and the messages that depend on it, and soon restarts."""
    cut: dict[tuple[int, int], None] = field(default_factory=dict)
    """Links, by source and target, that drop every message."""


@dataclass(slots=True)
class Host:
    """A machine with a disk and a clock, on which a node runs most of the time."""

    node_id: int
    store: MemoryRaftStore
    random: Random
    clock_offset_ms: float
    clock_rate: float
    node: RaftNode | None = None
    machine: Machine = field(default_factory=Machine)
    incarnation: int = 0
    paused_until_ms: float = 0.0
    hangs_until_ms: float = 0.0
    """Until then, writes to its disk hang."""
    writing: Ready | None = None
    timer_ms: float | None = None
    heard_ms: dict[int, int] = field(default_factory=dict)
    """By term: the local time of the last heartbeat received. Its reply may be sent later, after a disk write."""
    promise: Promise | None = None
    events: list[Event] = field(default_factory=list)
    dropped: list[ProposalId] = field(default_factory=list)

    def local_ms(self, now_ms: float) -> int:
        return int(self.clock_offset_ms + now_ms * self.clock_rate)

    def true_ms(self, local_ms: int) -> float:
        return (local_ms - self.clock_offset_ms) / self.clock_rate + 0.001


class Cluster:
    """Hosts, the network between them, and time. Public methods are the actions and queries of a test."""

    def __init__(
        self,
        size: int = 3,
        seed: int | str = 0,
        *,
        settings: RaftSettings = SETTINGS,
        stored: Mapping[int, StoredState] | None = None,
        drift: float = 0.0,
        voters_max: int = 3,
        sends_before_write: bool = False,
        new_store: Callable[[StoredState], MemoryRaftStore] | None = None,
    ) -> None:
        self.random = Random(f"raft:{seed}")
        self.settings = settings
        self.oracle = Oracle()
        self.faults = Faults()
        self.now_ms = 0.0
        self.voters_max = voters_max
        self.hosts: dict[int, Host] = {}
        self.compacts_every: int | None = None
        self.tends_membership = True
        """Whether leaders apply `suggested_change`, as the node would."""
        self.delivered: list[Message] = []
        self.keeps_delivered = False
        self._drift = drift
        self._sends_before_write = sends_before_write
        self._new_store = new_store or _memory_store
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._proposals = 0
        self.founders = tuple(sorted(stored)) if stored else tuple(range(1, size + 1))
        for node_id in self.founders:
            self.add_host(node_id, None if stored is None else stored[node_id])

    # Hosts

    def add_host(self, node_id: int, stored: StoredState | None = None) -> Host:
        rate = 1 + self.random.uniform(-self._drift, self._drift)
        offset_ms = self.random.uniform(0, 10_000)
        store = self._new_store(stored or StoredState(self.new_store_id()))
        self.hosts[node_id] = Host(node_id, store, Random(self.random.getrandbits(64)), offset_ms, rate)
        self.start(node_id)
        return self.hosts[node_id]

    def new_store_id(self) -> UUID:
        return UUID(int=self.random.getrandbits(128), version=4)

    def start(self, node_id: int) -> None:
        host = self.hosts[node_id]
        assert host.node is None
        host.incarnation += 1
        host.machine = Machine()
        host.timer_ms = None
        founders = self.founders if node_id in self.founders else ()
        host.node = RaftNode(
            node_id,
            host.store.load(),
            self.settings,
            host.random,
            host.local_ms(self.now_ms),
            address=f"host-{node_id}",
            seeds=sorted({*self.founders, *self.hosts}),
            founders=founders,
        )
        self._settle(host)

    def crash(self, node_id: int) -> None:
        """Cut the power: memory is lost, and a write in progress may or may not have reached the disk."""
        host = self.hosts[node_id]
        assert host.node is not None
        if host.writing is not None and host.writing.persist is not None and self.random.random() < 0.5:
            host.store.persist(host.writing.persist)
        host.node = host.writing = None
        host.paused_until_ms = host.hangs_until_ms = 0.0
        host.incarnation += 1

    def restart(self, node_id: int) -> None:
        if self.hosts[node_id].node is not None:
            self.crash(node_id)
        self.start(node_id)

    def wipe(self, node_id: int) -> None:
        """Restart the host with an empty disk."""
        host = self.hosts[node_id]
        if host.node is not None:
            self.crash(node_id)
        host.store = self._new_store(StoredState(self.new_store_id()))
        self.start(node_id)

    def pause(self, node_id: int, for_ms: float) -> None:
        """Stop the process; it resumes later and receives everything that arrived in between."""
        host = self.hosts[node_id]
        host.paused_until_ms = max(host.paused_until_ms, self.now_ms + for_ms)

    def sicken(self, node_id: int, for_ms: float, noticed_after_ms: float) -> None:
        """Make the host's disk hang: writes complete when the hang ends. The node is notified only after a while."""
        host = self.hosts[node_id]
        end_ms = host.hangs_until_ms = max(host.hangs_until_ms, self.now_ms + for_ms)

        def tell(node: RaftNode) -> None:
            if self.now_ms < host.hangs_until_ms:
                node.storage_failed(host.local_ms(self.now_ms))

        def recover(node: RaftNode) -> None:
            if self.now_ms >= host.hangs_until_ms:
                node.storage_recovered(host.local_ms(self.now_ms))

        incarnation = host.incarnation
        self.after(noticed_after_ms, lambda: self._when_awake(host, incarnation, tell))
        self._at(end_ms, lambda: self._when_awake(host, incarnation, recover))

    def node(self, node_id: int) -> RaftNode:
        node = self.hosts[node_id].node
        assert node is not None, f"node {node_id} is down"
        return node

    @property
    def running(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.node is not None]

    # The network

    def cut_off(self, *node_ids: int) -> None:
        """Isolate these nodes: they can reach each other, but no other node, and no other node can reach them."""
        for source in self.hosts:
            for target in self.hosts:
                if (source in node_ids) != (target in node_ids):
                    self.faults.cut[(source, target)] = None

    def heal(self) -> None:
        self.faults.cut.clear()

    def transmit(self, message: Message) -> None:
        """Send a message as bytes, subject to the current faults."""
        random, faults = self.random, self.faults
        data = encode_message(message)
        for _ in range(2 if random.random() < faults.duplication else 1):
            if random.random() >= faults.loss:
                latency_ms = faults.stray_ms if random.random() < faults.stray else faults.latency_ms
                self.after(random.uniform(*latency_ms), lambda: self._deliver(data))

    def _send(self, host: Host, messages: Sequence[Message]) -> None:
        for message in messages:
            self.oracle.sent(message, host.store.stored)
            timeout_ms = self.settings.election_timeout_ms
            self.oracle.voting(message, host.promise, host.local_ms(self.now_ms), timeout_ms)
            if isinstance(message.body, HeartbeatReply):
                host.promise = Promise(message.term, host.heard_ms[message.term])
            self.transmit(message)

    def _deliver(self, data: bytes) -> None:
        message = decode_message(data)
        host = self.hosts.get(message.target)
        if host is None or (message.source, message.target) in self.faults.cut:
            return
        self._when_awake(host, host.incarnation, lambda node: self._step(host, node, message))

    def _step(self, host: Host, node: RaftNode, message: Message) -> None:
        if self.keeps_delivered:
            self.delivered.append(message)
        if isinstance(message.body, Heartbeat) and message.term >= node.term:
            host.heard_ms[message.term] = host.local_ms(self.now_ms)
        node.step(message, host.local_ms(self.now_ms))

    # Time

    def after(self, delay_ms: float, action: Callable[[], None]) -> None:
        self._at(self.now_ms + delay_ms, action)

    def _at(self, when_ms: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (when_ms, self._sequence, action))

    def run_for(self, duration_ms: float) -> None:
        end_ms = self.now_ms + duration_ms
        while self._queue and self._queue[0][0] <= end_ms:
            self.now_ms, _, action = heapq.heappop(self._queue)
            action()
        self.now_ms = end_ms

    def run_until(self, condition: Callable[[], bool], limit_ms: float = 10_000) -> None:
        end_ms = self.now_ms + limit_ms
        while not condition():
            if not self._queue or self._queue[0][0] > end_ms:
                raise Violation(f"liveness: not within {limit_ms} ms: {self.describe()}")
            self.now_ms, _, action = heapq.heappop(self._queue)
            action()

    def describe(self) -> str:
        parts = []
        for host in self.hosts.values():
            node = host.node
            what = "down" if node is None else f"{node.role.value} t{node.term} c{node.commit_index}/{node.last_index}"
            parts.append(f"{host.node_id}: {what}")
        return ", ".join(parts)

    # Actions and queries

    @property
    def leader(self) -> RaftNode | None:
        """The leader of the newest term among the running nodes, if it is established."""
        leaders = [host.node for host in self.running if host.node is not None and host.node.is_leader]
        newest = max(leaders, key=lambda node: node.term, default=None)
        return newest if newest is not None and newest.leader_lease_until_ms is not None else None

    def elect(self, limit_ms: float = 10_000) -> RaftNode:
        self.run_until(lambda: self.leader is not None, limit_ms)
        leader = self.leader
        assert leader is not None
        return leader

    def propose(self, node_id: int, data: bytes | None = None) -> ProposalId | Refused:
        """Propose a command on a node, by default a unique one."""
        self._proposals += 1
        host = self.hosts[node_id]
        data = data if data is not None else b"command %d" % self._proposals
        result = self.node(node_id).propose(data, host.local_ms(self.now_ms))
        self._settle(host)
        return result

    def change(self, node_id: int, change: MembershipChange) -> ProposalId | Refused:
        host = self.hosts[node_id]
        result = self.node(node_id).propose_membership(change, host.local_ms(self.now_ms))
        self._settle(host)
        return result

    def transfer(self, node_id: int, target: int | None) -> Refused | None:
        host = self.hosts[node_id]
        refused = self.node(node_id).transfer_leadership(target, host.local_ms(self.now_ms))
        self._settle(host)
        return refused

    def compact(self, node_id: int) -> None:
        host = self.hosts[node_id]
        self.node(node_id).compact(host.machine.index, host.machine.encode())
        self._settle(host)

    def commit(self, limit_ms: float = 10_000) -> ProposalId:
        """Propose a unique command, again if necessary, until it is committed."""
        accepted: list[ProposalId] = []

        def is_done() -> bool:
            for proposal in accepted:
                entry = self.oracle.committed.get(proposal.index)
                if entry is not None and entry.term == proposal.term:
                    return True
            leader = self.leader
            if leader is not None and (not accepted or accepted[-1].term != leader.term):
                result = self.propose(leader.node_id)
                if isinstance(result, ProposalId):
                    accepted.append(result)
            return False

        self.run_until(is_done, limit_ms)
        return accepted[-1]

    def converge(self, limit_ms: float = 10_000) -> None:
        """Wait until the leader has committed its whole log and every running member has applied it."""

        def is_done() -> bool:
            leader = self.leader
            if leader is None:
                return False
            members = [member.node_id for member in leader.membership.members]
            hosts = [host for host in self.running if host.node_id in members]
            return all(host.machine.index == leader.last_index for host in hosts)

        self.run_until(is_done, limit_ms)

    # Execution

    def _when_awake(self, host: Host, incarnation: int, action: Callable[[RaftNode], None]) -> None:
        """Run an action on a node unless it has died since, but not before a pause of its host ends."""
        node = host.node
        if node is None or host.incarnation != incarnation:
            return
        if host.paused_until_ms > self.now_ms:
            # Timers, messages and requests that accumulated during the pause run in any order.
            wake_ms = host.paused_until_ms + self.random.random()
            self._at(wake_ms, lambda: self._when_awake(host, incarnation, action))
            return
        action(node)
        self._settle(host)

    def _settle(self, host: Host) -> None:
        """Carry out the node's requested actions, check them, and set its timer."""
        node = host.node
        incarnation = host.incarnation
        if node is None:
            return
        while (ready := node.ready()) is not None:
            self._carry_out(host, ready)
            if host.incarnation != incarnation:
                return
        disks = {each: other.store.stored for each, other in self.hosts.items()}
        self.oracle.stepped(node, host.store.stored.store_id, disks, host.local_ms(self.now_ms))
        if self.tends_membership and node.is_leader:
            change = node.suggested_change(self.voters_max)
            if change is not None:
                node.propose_membership(change, host.local_ms(self.now_ms))
                self._settle(host)
                return
        self._set_timer(host, node)

    def _set_timer(self, host: Host, node: RaftNode) -> None:
        deadline_ms = node.next_deadline_ms()
        if deadline_ms is None:
            return
        due_ms = max(self.now_ms, host.true_ms(deadline_ms))
        if host.timer_ms is not None and self.now_ms < host.timer_ms <= due_ms:
            return
        host.timer_ms = due_ms
        incarnation = host.incarnation
        self._at(due_ms, lambda: self._when_awake(host, incarnation, lambda n: self._tick(host, n)))

    def _tick(self, host: Host, node: RaftNode) -> None:
        host.timer_ms = None
        deadline_ms = node.next_deadline_ms()
        if deadline_ms is not None and host.local_ms(self.now_ms) >= deadline_ms:
            node.tick(host.local_ms(self.now_ms))

    def _carry_out(self, host: Host, ready: Ready) -> None:
        self._send(host, ready.messages)
        if ready.persist is not None:
            self._write(host, ready)
        self._apply(host, ready)
        for event in ready.events:
            self._notice(host, event)

    def _write(self, host: Host, ready: Ready) -> None:
        assert ready.persist is not None
        assert host.writing is None
        self.oracle.persisting(host.store.stored, ready.persist)
        host.writing = ready
        if self._sends_before_write:
            self._send(host, ready.messages_after)
        incarnation = host.incarnation
        delay_ms = max(0.0, host.hangs_until_ms - self.now_ms) + self.random.uniform(*self.faults.write_ms)
        if self.random.random() < self.faults.crash_at_write:
            self.after(delay_ms * self.random.choice([0.5, 1.0]), lambda: self._die(host, incarnation))
        self.after(delay_ms, lambda: self._when_awake(host, incarnation, lambda node: self._written(host, node)))

    def _die(self, host: Host, incarnation: int) -> None:
        if host.incarnation == incarnation and self.hosts.get(host.node_id) is host:
            self.crash(host.node_id)
            incarnation = host.incarnation
            self.after(self.random.uniform(1, 200), lambda: self._come_back(host, incarnation))

    def _come_back(self, host: Host, incarnation: int) -> None:
        if host.incarnation == incarnation and self.hosts.get(host.node_id) is host:
            self.start(host.node_id)

    def _written(self, host: Host, node: RaftNode) -> None:
        ready = host.writing
        assert ready is not None and ready.persist is not None
        host.store.persist(ready.persist)
        host.writing = None
        if not self._sends_before_write:
            self._send(host, ready.messages_after)
        node.persisted(ready, host.local_ms(self.now_ms))

    def _apply(self, host: Host, ready: Ready) -> None:
        assert host.node is not None
        if ready.restore is not None:
            host.machine = Machine.decode(ready.restore.data)
            self.oracle.applied(host.machine.index, host.machine.checksum)
        for entry in ready.committed:
            host.machine.apply(entry)
            self.oracle.applied(entry.index, host.machine.checksum)
        for proposal in ready.proposals_dropped:
            self.oracle.dropped(proposal)
        host.dropped += ready.proposals_dropped
        if self.compacts_every and host.machine.index - host.node.snapshot_index >= self.compacts_every:
            host.node.compact(host.machine.index, host.machine.encode())

    def _notice(self, host: Host, event: Event) -> None:
        host.events.append(event)
        node = host.node
        if node is not None and isinstance(event, RoleChanged) and event.role is RoleKind.LEADER and node.is_leader:
            host.promise = None
            self.oracle.became_leader(node, host.store.stored.store_id)
            for other in self.running:
                self._check_lease(other)

    def _check_lease(self, host: Host) -> None:
        assert host.node is not None
        lease_ms = host.node.leader_lease_until_ms
        if lease_ms is not None and host.local_ms(self.now_ms) < lease_ms:
            self.oracle.check_lease(host.node)


def _memory_store(stored: StoredState) -> MemoryRaftStore:
    store = MemoryRaftStore(stored.store_id)
    store.stored = stored
    return store


def store_id(node_id: int) -> UUID:
    """Return a store id derived from the node id, for hand-written logs."""
    return UUID(int=node_id)


def founded(voters: Iterable[int], learners: Iterable[int] = ()) -> Membership:
    members = [Member(each, store_id(each), True) for each in voters]
    members += [Member(each, store_id(each), False) for each in learners]
    return Membership(tuple(sorted(members, key=lambda member: member.node_id)))


def log_of(terms: Sequence[int], membership: Membership) -> tuple[Entry, ...]:
    """Build a log as in the paper's figures: a term for each index from 1 on. The first entry is the membership."""
    first = Entry(1, terms[0], EntryKind.MEMBERSHIP, encode_membership(membership))
    rest = [
        Entry(index, term, EntryKind.COMMAND, b"%d in %d" % (index, term))
        for index, term in enumerate(terms[1:], start=2)
    ]
    return (first, *rest)


def stored_log(
    node_id: int, terms: Sequence[int], membership: Membership, *, term: int | None = None, vote: int | None = None
) -> StoredState:
    """Return the stored state of a node with this log; its term defaults to that of the last entry."""
    hard_state = HardState(terms[-1] if term is None else term, vote)
    return StoredState(store_id(node_id), hard_state, None, log_of(terms, membership))


def log_terms(node: RaftNode) -> list[int]:
    """Return the terms of a node's log from index 1, or from its first index."""
    terms = [node._state.log.term_at(index) for index in range(1, node.last_index + 1)]
    return [term for term in terms if term is not None]
