"""Three nodes under schedules that hypothesis builds step by step, and shrinks when one breaks a property.

Nothing happens by itself: a rule delivers, drops or duplicates each message, completes each write, and fires each
timer. The random runs cover more states; this test finds short counterexamples.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from tests.raft.harness import Cluster, Host, founded, stored_log

from chronik.raft.messages import Message
from chronik.raft.node import RaftNode
from chronik.raft.ready import Ready

VOTERS = (1, 2, 3)
nodes = st.sampled_from(VOTERS)
groups = st.sampled_from([(1, 2), (1, 3), (2, 3), VOTERS])


class HandPlayed(Cluster):
    """A cluster whose messages, writes and timers are triggered by the test."""

    def __init__(self) -> None:
        self.wire: list[Message] = []
        super().__init__(stored={each: stored_log(each, [1], founded(VOTERS)) for each in VOTERS})

    def transmit(self, message: Message) -> None:
        self.wire.append(message)

    def _write(self, host: Host, ready: Ready) -> None:
        assert ready.persist is not None
        self.oracle.persisting(host.store.stored, ready.persist)
        host.writing = ready

    def _set_timer(self, host: Host, node: RaftNode) -> None:
        """Do nothing: `fire` triggers the timers."""

    def deliver(self, message: Message) -> None:
        host = self.hosts[message.target]
        self._when_awake(host, host.incarnation, lambda node: self._step(host, node, message))

    def finish_write(self, node_id: int) -> None:
        host = self.hosts[node_id]
        if host.writing is not None:
            self._when_awake(host, host.incarnation, lambda node: self._written(host, node))

    def fire(self, node_id: int) -> None:
        """Advance the clock until this node's timer is due, and fire it."""
        host = self.hosts[node_id]
        deadline_ms = None if host.node is None else host.node.next_deadline_ms()
        if deadline_ms is not None:
            self.now_ms = max(self.now_ms, host.true_ms(deadline_ms))
            self._when_awake(host, host.incarnation, lambda node: self._tick(host, node))


class Schedules(RuleBasedStateMachine):
    """The oracle checks every step; at the end, the cluster must be able to make progress."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = HandPlayed()

    @rule(node_id=nodes)
    def timer_goes_off(self, node_id: int) -> None:
        self.cluster.fire(node_id)

    @rule(duration_ms=st.sampled_from([1, 50, 299, 300, 600]))
    def time_passes(self, duration_ms: int) -> None:
        self.cluster.now_ms += duration_ms

    @precondition(lambda self: self.cluster.wire)
    @rule(data=st.data())
    def message_arrives(self, data: st.DataObject) -> None:
        """Deliver any message on the wire, in any order."""
        wire = self.cluster.wire
        self.cluster.deliver(wire.pop(data.draw(st.integers(0, len(wire) - 1))))

    @precondition(lambda self: self.cluster.wire)
    @rule(data=st.data(), is_kept=st.booleans())
    def message_is_lost_or_doubled(self, data: st.DataObject, is_kept: bool) -> None:
        wire = self.cluster.wire
        message = wire.pop(data.draw(st.integers(0, len(wire) - 1)))
        if is_kept:
            wire += [message, message]

    @rule(group=groups)
    def all_goes_well_for_a_moment_within(self, group: tuple[int, ...]) -> None:
        """Without this, hardly any schedule would elect a leader. Messages of other nodes stay on the wire."""
        wire = self.cluster.wire
        for _ in range(4):
            for node_id in group:
                self.cluster.finish_write(node_id)
            inside = [message for message in wire if message.source in group and message.target in group]
            wire[:] = [message for message in wire if message not in inside]
            for message in inside:
                self.cluster.deliver(message)

    @rule(group=groups, data=st.data())
    def one_grows_impatient_within(self, group: tuple[int, ...], data: st.DataObject) -> None:
        self.cluster.now_ms += 600
        self.cluster.fire(data.draw(st.sampled_from(group)))
        self.all_goes_well_for_a_moment_within(group)

    @rule(node_id=nodes)
    def write_is_done(self, node_id: int) -> None:
        self.cluster.finish_write(node_id)

    @rule(node_id=nodes)
    def node_is_restarted(self, node_id: int) -> None:
        self.cluster.restart(node_id)

    @rule(node_id=nodes)
    def leader_gets_a_proposal(self, node_id: int) -> None:
        if self.cluster.node(node_id).is_leader:
            self.cluster.propose(node_id)

    @rule(node_id=nodes, to=nodes)
    def leadership_is_handed_over(self, node_id: int, to: int) -> None:
        self.cluster.transfer(node_id, to)

    @rule(node_id=nodes)
    def log_is_compacted(self, node_id: int) -> None:
        if self.cluster.hosts[node_id].machine.index:
            self.cluster.compact(node_id)

    def teardown(self) -> None:
        """A leader is elected and commits, within a bounded number of fair rounds."""
        cluster = self.cluster
        committed = cluster.oracle.last_committed
        for step in range(200):
            if cluster.leader is not None:
                cluster.propose(cluster.leader.node_id)
                for _ in range(3):
                    self.all_goes_well_for_a_moment_within(VOTERS)
                if cluster.oracle.last_committed > committed:
                    return
            else:
                cluster.fire(VOTERS[step % 3])
                self.all_goes_well_for_a_moment_within(VOTERS)
        raise AssertionError(f"no leader, or nothing committed: {cluster.describe()}")


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=50, stateful_step_count=60)
