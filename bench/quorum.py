"""The voters that hold the metadata of a large cluster, on virtual time: replay, elections, a new controller.

They run the code of nodes: Raft, the encodings of messages and commands, the image, the controller. A message takes
NETWORK_MS and a write WRITE_MS. The measured CPU time of each step passes on the virtual clock, too: a voter does one
step after another, and what a step sends leaves at its end. Brokers only send heartbeats.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from uuid import UUID

from chronik.metadata.apply import apply
from chronik.metadata.calls import HeartbeatCall
from chronik.metadata.commands import decode_command, encode_command
from chronik.metadata.controller import DUE_INTERVAL_MS, Controller
from chronik.metadata.image import ClusterImage, decode_image, encode_image
from chronik.node.membership.cluster_member import ELECTION_TIMEOUT_MS, HEARTBEAT_INTERVAL_MS
from chronik.node.membership.metadata_log import SNAPSHOT_COMMANDS
from chronik.raft.membership import Member, Membership
from chronik.raft.messages import Message, decode_message, encode_message
from chronik.raft.node import RaftNode
from chronik.raft.ready import LeaderEstablished, Ready, Refused, RoleChanged, RoleKind
from chronik.raft.state import RaftSettings
from chronik.raft.store import Entry, EntryKind, HardState, Persist, Snapshot, StoredState
from chronik.wire.errors import KafkaError

NETWORK_MS = 1.0
WRITE_MS = 2.0
BROKER_HEARTBEAT_MS = 300
LIMIT_MS = 60_000
FAILOVERS = 3
STAY_MS = 2.5 * ELECTION_TIMEOUT_MS
"""After this long, every follower that did not hear from the leader has campaigned."""
CALM_MS = 3_000
SETTINGS = RaftSettings(heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS, election_timeout_ms=ELECTION_TIMEOUT_MS)
Step = Callable[["Voter"], None]


class NotReached(Exception):
    """The cluster did not get there in LIMIT_MS of virtual time."""


@dataclass(slots=True, eq=False)
class Voter:
    """One voter and its store. `run` changes when it is killed, and with it what was scheduled ends."""

    node_id: int
    store_id: UUID
    random: Random
    snapshot: Snapshot
    entries: list[Entry]
    hard_state: HardState
    raft: RaftNode | None = None
    run: int = 0
    free_ms: float = 0.0
    """When its current step ends."""
    timer_ms: float | None = None
    cpu_ms: float = 0.0
    """Of this run."""
    longest_ms: float = 0.0
    """The CPU time of its longest step in office, which delays all its other work."""
    image: ClusterImage = field(default_factory=ClusterImage)
    applied_index: int = 0
    proposed_index: int = 0
    controller: Controller | None = None
    has_decided: bool = False
    sends: list[Message] = field(default_factory=list)
    writing: Ready | None = None

    def stored(self) -> StoredState:
        return StoredState(self.store_id, self.hard_state, self.snapshot, tuple(self.entries))

    def persist(self, write: Persist) -> None:
        if write.entries or write.cut_from is not None:
            cut_from = min([each.index for each in write.entries[:1]] + [write.cut_from or 1 << 62])
            while self.entries and self.entries[-1].index >= cut_from:
                self.entries.pop()
        self.entries += write.entries
        self.hard_state = write.hard_state
        if write.snapshot is not None:
            self.snapshot = write.snapshot
        if write.drop_before is not None:
            self.entries = [each for each in self.entries if each.index >= write.drop_before]


class Quorum:
    """Voters whose stores hold the commands of `log`, and the brokers of the image. All start at 0 ms."""

    def __init__(self, log: Sequence[bytes], voters: Sequence[int], seed: int) -> None:
        self.now_ms = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        stores = {node_id: UUID(int=node_id + 1) for node_id in voters}
        membership = Membership(tuple(Member(node_id, store, True) for node_id, store in stores.items()))
        snapshot, entries = _stored_log(log, membership)
        commit = HardState(term=1, commit=entries[-1].index if entries else snapshot.index)
        self.voters = {
            node_id: Voter(node_id, store, Random(f"{seed}:{node_id}"), snapshot, [*entries], commit)
            for node_id, store in stores.items()
        }
        self.dead: set[int] = set()
        for voter in self.voters.values():
            self.start(voter)
        image = self.voters[voters[0]].image
        for number, broker in enumerate(image.brokers.values()):
            call = HeartbeatCall(broker.id, broker.incarnation, broker.epoch, image.version)
            self._at(number * BROKER_HEARTBEAT_MS / len(image.brokers), partial(self._heartbeat, call))

    # -- events --------------------------------------------------------------------------------------------------------

    def start(self, voter: Voter) -> None:
        """Start a voter with what its store holds."""
        self.dead.discard(voter.node_id)
        voter.image, voter.applied_index, voter.cpu_ms, voter.free_ms = ClusterImage(), 0, 0.0, self.now_ms

        def begin(voter: Voter) -> None:
            now_ms, seeds = int(self.now_ms), sorted(self.voters)
            voter.raft = RaftNode(voter.node_id, voter.stored(), SETTINGS, voter.random, now_ms, seeds=seeds)

        self._step(voter, voter.run, begin)

    def kill(self, voter: Voter) -> None:
        """Cut its power. Its address does not refuse connections: others notice by their timeouts only."""
        self.dead.add(voter.node_id)
        voter.run += 1
        voter.raft = voter.controller = voter.writing = voter.timer_ms = None
        voter.has_decided = False
        voter.proposed_index = 0

    def run_until(self, condition: Callable[[], bool]) -> None:
        began_ms = self.now_ms
        while not condition():
            if self.now_ms > began_ms + LIMIT_MS:
                raise NotReached(f"not within {LIMIT_MS / 1000:g} s of virtual time")
            self.now_ms, _, action = heapq.heappop(self._queue)
            action()

    def run_for(self, duration_ms: float) -> None:
        end_ms = self.now_ms + duration_ms
        self.run_until(lambda: self.now_ms >= end_ms)

    def wait_for_controller(self) -> tuple[Voter, float, int]:
        """Run until a controller has decided and stays for STAY_MS.

        Return it, when its first decision ended, and how many others lost their office before: a node that decides for
        long sends no heartbeats meanwhile, and its followers may elect another one.
        """
        began_ms, lost = self.now_ms, 0
        while self.now_ms < began_ms + LIMIT_MS:
            self.run_until(lambda: self.controller is not None)
            leader = self.controller
            assert leader is not None
            office, decided_ms = leader.controller, leader.free_ms
            self.run_for(STAY_MS)
            if leader.controller is office:
                return leader, decided_ms, lost
            lost += 1
        raise NotReached(f"no controller stayed for {STAY_MS:g} ms")

    @property
    def controller(self) -> Voter | None:
        """The voter whose controller has decided."""
        return next((voter for voter in self.voters.values() if voter.controller and voter.has_decided), None)

    def _at(self, at_ms: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at_ms, next(self._numbers), action))

    def _step(self, voter: Voter, run: int, step: Step) -> None:
        """Do one step on a voter when it is free, and all that Raft then requests."""
        if voter.run != run:
            return
        if voter.free_ms > self.now_ms:
            self._at(voter.free_ms, partial(self._step, voter, run, step))
            return
        began_s = time.process_time()
        step(voter)
        self._carry_out(voter)
        sends = [(message.target, encode_message(message)) for message in voter.sends]
        voter.sends.clear()
        took_ms = 1000 * (time.process_time() - began_s)
        voter.cpu_ms += took_ms
        if voter.controller is not None:
            voter.longest_ms = max(voter.longest_ms, took_ms)
        voter.free_ms = self.now_ms + took_ms
        for target, data in sends:
            self._at(voter.free_ms + NETWORK_MS, partial(self._deliver, target, data))
        self._set_timer(voter)

    def _deliver(self, target: int, data: bytes) -> None:
        voter = self.voters[target]

        def receive(voter: Voter) -> None:
            if voter.raft is not None:
                voter.raft.step(decode_message(data), int(self.now_ms))

        self._step(voter, voter.run, receive)

    def _set_timer(self, voter: Voter) -> None:
        deadline_ms = None if voter.raft is None else voter.raft.next_deadline_ms()
        if deadline_ms is None or (voter.timer_ms is not None and voter.timer_ms <= deadline_ms):
            return
        voter.timer_ms = at_ms = max(float(deadline_ms), self.now_ms)

        def tick(voter: Voter) -> None:
            if voter.timer_ms == at_ms:
                voter.timer_ms = None
            if voter.raft is not None:
                voter.raft.tick(int(self.now_ms))

        self._at(at_ms, partial(self._step, voter, voter.run, tick))

    # -- one voter -----------------------------------------------------------------------------------------------------

    def _carry_out(self, voter: Voter) -> None:
        while voter.raft is not None and (ready := voter.raft.ready()) is not None:
            voter.sends += ready.messages
            if ready.persist is not None:
                voter.writing = ready
                self._at(self.now_ms + WRITE_MS, partial(self._step, voter, voter.run, self._written))
            if ready.restore is not None:
                voter.image, voter.applied_index = decode_image(ready.restore.data), ready.restore.index
            for entry in ready.committed:
                voter.applied_index = entry.index
                if entry.kind is EntryKind.COMMAND:
                    with suppress(KafkaError):  # as on every node: it is invalid after the ones before it
                        voter.image, _ = apply(voter.image, decode_command(entry.data))
            if voter.controller is not None:
                voter.controller.image_applied(voter.image)
            for event in ready.events:
                match event:
                    case LeaderEstablished():
                        voter.controller = Controller(voter.image, int(self.now_ms))
                        self._at(self.now_ms, partial(self._step, voter, voter.run, self._decide))
                    case RoleChanged(role=role) if role is not RoleKind.LEADER:
                        voter.controller, voter.has_decided = None, False

    def _written(self, voter: Voter) -> None:
        ready, voter.writing = voter.writing, None
        if voter.raft is not None and ready is not None and ready.persist is not None:
            voter.persist(ready.persist)
            voter.raft.persisted(ready, int(self.now_ms))
            voter.sends += ready.messages_after

    def _decide(self, voter: Voter) -> None:
        """Let the controller do one step of its decision, as soon as its earlier commands are applied.

        The next step follows soon if it is behind, else after its interval.
        """
        if voter.controller is None or voter.raft is None:
            return
        pause_ms = NETWORK_MS
        if voter.applied_index >= voter.proposed_index:
            for command in voter.controller.due(int(self.now_ms)):
                outcome = voter.raft.propose(encode_command(command), int(self.now_ms))
                if isinstance(outcome, Refused):
                    break  # planned again at the next interval
                voter.proposed_index = outcome.index
            if not voter.controller.is_behind:
                voter.has_decided = True
                pause_ms = DUE_INTERVAL_MS
        self._at(self.now_ms + pause_ms, partial(self._step, voter, voter.run, self._decide))

    def _heartbeat(self, call: HeartbeatCall) -> None:
        """Send a broker's heartbeat to the controller; a dead broker's come again if it returns."""
        self._at(self.now_ms + BROKER_HEARTBEAT_MS, partial(self._heartbeat, call))
        leader = next((voter for voter in self.voters.values() if voter.controller is not None), None)
        if leader is None or call.broker_id in self.dead:
            return
        newest = HeartbeatCall(call.broker_id, call.incarnation, call.broker_epoch, leader.image.version)

        def receive(voter: Voter) -> None:
            if voter.controller is not None:
                voter.controller.heartbeat(newest, int(self.now_ms))

        self._at(self.now_ms + NETWORK_MS, partial(self._step, leader, leader.run, receive))


def _stored_log(log: Sequence[bytes], membership: Membership) -> tuple[Snapshot, list[Entry]]:
    """Return what a node stores after these commands: its last snapshot, and the entries after it."""
    image = ClusterImage()
    covered = len(log) // SNAPSHOT_COMMANDS * SNAPSHOT_COMMANDS
    for data in log[:covered]:
        image, _ = apply(image, decode_command(data))
    snapshot = Snapshot(covered + 1, 1, membership, encode_image(image))  # entry 1 is the membership
    entries = [Entry(index, 1, EntryKind.COMMAND, data) for index, data in enumerate(log[covered:], snapshot.index + 1)]
    return snapshot, entries


def _has_changed(voter: Voter, image: ClusterImage) -> bool:
    return voter.image is not image


def leaderships(image: ClusterImage, node: int) -> int:
    return sum(partition.leader == node for topic in image.topics.values() for partition in topic.partitions)


def worst_failover(log: Sequence[bytes], voters: Sequence[int]) -> dict[str, float]:
    """Return the highest of each figure over some failovers: election timeouts are random."""
    played = [play_failover(log, voters, seed) for seed in range(FAILOVERS)]
    return {name: max(figures[name] for figures in played) for name in played[0]}


def play_failover(log: Sequence[bytes], voters: Sequence[int], seed: int) -> dict[str, float]:
    """Kill the controller's node, and start it again when others lead its partitions. Keys end in their unit."""
    quorum = Quorum(log, voters, seed)
    dead, _, _ = quorum.wait_for_controller()
    quorum.run_for(CALM_MS)
    figures = {"leaderships_of_controller": float(leaderships(dead.image, dead.node_id))}
    quorum.kill(dead)
    killed_ms = quorum.now_ms
    leader, decided_ms, lost = quorum.wait_for_controller()
    figures["controller_failover_virtual_ms"] = round(decided_ms - killed_ms, 1)
    figures["controllers_lost"] = float(lost)
    while leaderships(leader.image, dead.node_id):
        quorum.run_until(partial(_has_changed, leader, leader.image))
    figures["controller_node_dead_virtual_ms"] = round(leader.free_ms - killed_ms, 1)
    figures["controller_longest_step_cpu_ms"] = round(leader.longest_ms, 1)
    quorum.start(dead)
    figures["replay_cpu_ms"] = round(dead.cpu_ms, 1)
    quorum.run_until(lambda: dead.image.version == leader.image.version)
    if encode_image(dead.image) != encode_image(leader.image):
        raise NotReached("the restarted voter has another image than the controller")
    return figures
