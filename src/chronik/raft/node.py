"""One Raft node: events go in with their time, a `Ready` comes out.

node = RaftNode(1, store.load(), settings, random, now_ms, seeds=(1, 2, 3), founders=(1, 2, 3))
node.step(message, now_ms)                 # a message from a peer
node.propose(command, now_ms)              # a ProposalId, or Refused
node.tick(now_ms)                          # no later than next_deadline_ms()
node.storage_failed(now_ms)                # the store refuses writes or does not respond; then storage_recovered
while (ready := node.ready()) is not None:
    ...                                    # carry it out, see chronik.raft.ready
    node.persisted(ready, now_ms)          # when its `persist` is durable
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from chronik.raft.candidate import Candidate
from chronik.raft.follower import Follower
from chronik.raft.joining import Introduction, Joiners
from chronik.raft.leader import Leader
from chronik.raft.membership import Membership, MembershipChange
from chronik.raft.messages import (
    Append,
    AppendReply,
    Heartbeat,
    Hello,
    HelloReply,
    Message,
    SnapshotChunk,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from chronik.raft.progress import Progress
from chronik.raft.ready import LeaderEstablished, ProposalId, Ready, Reason, Refused, RoleChanged, RoleKind
from chronik.raft.state import RaftSettings, RaftState, ToCandidate, ToFollower, Transition
from chronik.raft.store import EntryKind, RaftError, StoredState


class RaftNode:
    """One member of the cluster, or a node that wants to join.

    Invariants: all those of `RaftState`; one role is active; at most one Ready with a write is outstanding.
    Owned by the node's event loop; nothing here waits, reads a clock or touches a file.
    """

    def __init__(
        self,
        node_id: int,
        stored: StoredState,
        settings: RaftSettings,
        random: Random,
        now_ms: int,
        *,
        address: str = "",
        seeds: Sequence[int] = (),
        founders: Sequence[int] = (),
    ) -> None:
        """`seeds` are the nodes to send hellos to; `founders` are the first voters, none for a node that only joins."""
        self._state = state = RaftState(node_id, stored, settings, random, now_ms, address)
        self._introduction = Introduction(state, seeds, tuple(founders))
        self._joiners = Joiners(state)
        self._role: Follower | Candidate | Leader = Follower(state)
        self._reported = RoleChanged(RoleKind.FOLLOWER, state.term, None)
        self._persisting: Ready | None = None

    @property
    def node_id(self) -> int:
        return self._state.node_id

    @property
    def role(self) -> RoleKind:
        return self._role.kind

    @property
    def is_leader(self) -> bool:
        return self._role.kind is RoleKind.LEADER

    @property
    def term(self) -> int:
        return self._state.term

    @property
    def vote(self) -> int | None:
        return self._state.vote

    @property
    def leader(self) -> int | None:
        return self._state.leader

    @property
    def commit_index(self) -> int:
        return self._state.commit_index

    @property
    def applied_index(self) -> int:
        """The last entry that a Ready has returned to apply."""
        return self._state.applied_index

    @property
    def last_index(self) -> int:
        return self._state.log.last_index

    @property
    def snapshot_index(self) -> int:
        snapshot = self._state.log.snapshot
        return 0 if snapshot is None else snapshot.index

    @property
    def membership(self) -> Membership:
        """The membership in effect, committed or not."""
        return self._state.membership

    @property
    def progress(self) -> Mapping[int, Progress]:
        """What this node knows as leader of each other member; empty if it does not lead."""
        return self._role.progress if isinstance(self._role, Leader) else {}

    @property
    def leader_lease_until_ms(self) -> int | None:
        """The time until which no other node can lead, if clock drift stays within its bound; None without a lease.

        Compare it with the clock at the moment of use. Each heartbeat that a majority answers renews it.
        """
        return self._role.lease_until_ms if isinstance(self._role, Leader) else None

    def next_deadline_ms(self) -> int | None:
        """Return when `tick` is due; None if only a message can change anything."""
        deadlines = [self._role.deadline_ms, self._introduction.deadline_ms]
        return min((each for each in deadlines if each is not None), default=None)

    def tick(self, now_ms: int) -> None:
        self._set_time(now_ms)
        if self._introduction.tick():
            self._change_role(ToCandidate(is_pre_vote=True))
        else:
            self._change_role(self._role.tick())

    def step(self, message: Message, now_ms: int) -> None:
        """Handle a message from a peer. Outdated messages and messages for another store have no effect.

        Read `now_ms` after the message arrived: the leader's lease depends on it.
        """
        self._set_time(now_ms)
        state = self._state
        if message.target != state.node_id or message.source == state.node_id:
            return
        body = message.body
        if isinstance(body, Hello):
            self._hello(message, body)
            return
        if message.target_store != state.store_id or self._introduction.is_from_lost_store(message):
            return
        if isinstance(body, HelloReply):
            if state.is_blank and self._introduction.reply(message, body):
                self._change_role(ToCandidate(is_pre_vote=True))
        elif isinstance(body, VoteRequest):
            self._vote(message, body)
        elif isinstance(body, Append | Heartbeat | SnapshotChunk | TimeoutNow):
            self._follow(message)
        elif message.term > state.term and not (isinstance(body, VoteReply) and body.is_granted):
            # A granted pre-vote names a term that does not exist yet; every other reply names its sender's term.
            self._change_role(ToFollower(message.term))
        elif message.term >= state.term and not isinstance(self._role, Follower):
            self._change_role(self._role.receive(message))

    def storage_failed(self, now_ms: int) -> None:
        """Note that the store refuses a write, or has not responded for too long; the write stays pending.

        Until `storage_recovered` this node does not campaign. If it leads, it steps down once it knows that a majority
        writes without it; before that, no other node could lead either.
        """
        self._set_time(now_ms)
        self._state.is_storage_failed = True
        if isinstance(self._role, Candidate):
            self._change_role(ToFollower(self._state.term))
        elif isinstance(self._role, Leader):
            self._change_role(self._role.resign_if_storage_failed())

    def storage_recovered(self, now_ms: int) -> None:
        """Note that the store accepts writes again. A follower waits a whole timeout before it campaigns."""
        self._set_time(now_ms)
        self._state.is_storage_failed = False
        if isinstance(self._role, Follower):
            self._role.restart_timeout()

    def propose(self, data: bytes, now_ms: int) -> ProposalId | Refused:
        """Append a command to the log. Later Readys report its outcome by index and term."""
        self._set_time(now_ms)
        return self._role.propose(data) if isinstance(self._role, Leader) else self._not_leader()

    def propose_membership(self, change: MembershipChange, now_ms: int) -> ProposalId | Refused:
        """Append a membership change, which takes effect at once. At most one may be uncommitted."""
        self._set_time(now_ms)
        return self._role.propose_membership(change) if isinstance(self._role, Leader) else self._not_leader()

    def suggested_change(self, voters_max: int) -> MembershipChange | None:
        """Return the change to propose next (see `chronik.raft.joining`); None if none is needed or allowed."""
        return self._joiners.suggest_change(self._role, voters_max) if isinstance(self._role, Leader) else None

    def transfer_leadership(self, target: int | None, now_ms: int) -> Refused | None:
        """Transfer leadership, within `transfer_timeout_ms`, to `target` or to the most up-to-date voter.

        Proposals are refused meanwhile. If the target does not catch up in time, they are accepted again. If it catches
        up but is not elected in time, this node steps down.
        """
        self._set_time(now_ms)
        return self._role.transfer(target) if isinstance(self._role, Leader) else self._not_leader()

    def compact(self, index: int, data: bytes) -> None:
        """Set the snapshot: `data` is the state machine after applied entry `index`. Drop most entries up to it."""
        if len(data) > self._state.settings.snapshot_bytes_max:
            raise RaftError(f"a snapshot of {len(data)} bytes is too large to be sent to a follower")
        if index > self.snapshot_index:
            self._state.compact(index, data)

    def _not_leader(self) -> Refused:
        return Refused(Reason.NOT_LEADER, self._state.leader)

    def _set_time(self, now_ms: int) -> None:
        self._state.now_ms = max(self._state.now_ms, now_ms)

    def _vote(self, message: Message, request: VoteRequest) -> None:
        """Answer a vote request, also of a node outside the membership: a lagging log does not know all members."""
        state = self._state
        # A leader that lost its majority steps down by itself; until then no election is needed.
        if not request.is_transfer and (self.is_leader or state.hears_leader):
            return
        if message.term > state.term and not request.is_pre_vote:
            self._change_role(ToFollower(message.term))
        is_granted = self._may_grant(message, request)
        reply = VoteReply(is_granted, request.is_pre_vote)
        if is_granted and request.is_pre_vote:
            # A pre-vote binds nobody, so there is nothing to wait for.
            state.send(message.source, message.source_store, reply, term=message.term)
            return
        if is_granted:
            state.vote = message.source
            if isinstance(self._role, Follower):
                self._role.restart_timeout()
        state.send_after(message.source, message.source_store, reply)

    def _may_grant(self, message: Message, request: VoteRequest) -> bool:
        state = self._state
        is_newer = message.term > state.term
        is_free = state.vote in (None, message.source) and state.leader is None
        may_vote = (request.is_pre_vote and is_newer) or (message.term == state.term and is_free)
        return may_vote and state.log.is_up_to_date(request.last_index, request.last_term)

    def _follow(self, message: Message) -> None:
        """Handle a message that only a leader sends."""
        state = self._state
        if message.term < state.term:
            # Report the newer term: without it, the sender could lead a majority that this node never follows.
            state.send_after(message.source, message.source_store, AppendReply(0, is_rejected=True))
            return
        if message.term == state.term and (self.is_leader or state.leader not in (None, message.source)):
            raise RaftError(f"nodes {state.leader} and {message.source} both lead in term {state.term}")
        if message.term > state.term or not isinstance(self._role, Follower) or state.leader is None:
            self._change_role(ToFollower(message.term, message.source))
        assert isinstance(self._role, Follower)
        self._change_role(self._role.receive(message))

    def _hello(self, message: Message, hello: Hello) -> None:
        state, role = self._state, self._role
        if hello.node_id == state.node_id:
            return
        if isinstance(role, Leader):
            self._joiners.hello(hello, role)
        elif state.is_blank:
            self._introduction.hello(hello)
        elif state.leader is not None and not hello.is_relayed:
            leader = state.membership.member(state.leader)
            relayed = Hello(hello.node_id, hello.store, hello.address, is_relayed=True)
            state.send(state.leader, None if leader is None else leader.store, relayed)

    def _change_role(self, transition: Transition | None) -> None:
        """Change the role, and repeat while the new role requests another one."""
        state = self._state
        while transition is not None:
            if isinstance(self._role, Leader):
                state.stop_hearing()
                self._joiners.clear()
            if isinstance(transition, ToFollower):
                if transition.term > state.term:
                    state.enter_term(transition.term, None)
                state.leader = transition.leader
                self._role = Follower(state)
                transition = None
            elif isinstance(transition, ToCandidate):
                state.leader = None
                self._role = Candidate(state, transition)
                transition = self._role.started()
            else:
                self._role = Leader(state)
                transition = None
        now = RoleChanged(self._role.kind, state.term, state.leader)
        if now != self._reported:
            self._reported = now
            state.events.append(now)

    def ready(self) -> Ready | None:
        """Return the next work to carry out. Call this after each event until it returns None."""
        state = self._state
        if isinstance(self._role, Leader):
            self._role.send_due()
        persist, messages_after = None, []
        if self._persisting is None:
            persist = state.take_persist()
            messages_after, state.messages_after = state.messages_after, []
        messages, state.messages = state.messages, []
        if persist is None:
            messages += messages_after
            messages_after = []
        restore = state.take_restore()
        committed = state.take_committed()
        if self.is_leader and any(each.kind is EntryKind.NO_OP and each.term == state.term for each in committed):
            state.events.append(LeaderEstablished(state.term))
        dropped, events = tuple(state.proposals_dropped), tuple(state.events)
        ready = Ready(tuple(messages), persist, tuple(messages_after), restore, committed, dropped, events)
        state.proposals_dropped.clear()
        state.events.clear()
        if ready == _NOTHING:
            return None
        if persist is not None:
            self._persisting = ready
        return ready

    def persisted(self, ready: Ready, now_ms: int) -> None:
        self._set_time(now_ms)
        if ready.persist is None:
            return
        if ready is not self._persisting:
            raise RaftError("the reported write is not the pending one")
        self._persisting = None
        self._state.persisted()
        self._change_role(self._role.persisted())


_NOTHING = Ready()
