"""The properties of a Raft cluster that must always hold, checked while it runs.

They are those of the paper's figures 2 and 3, and those that the node relies on: the lease, and the
outcome of proposals. `Violation` names the property that fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias
from uuid import UUID

from chronik.raft.messages import AppendReply, Hello, HelloReply, Message, VoteReply, VoteRequest
from chronik.raft.node import RaftNode
from chronik.raft.ready import ProposalId
from chronik.raft.store import Entry, EntryKind, Persist, StoredState

Disks: TypeAlias = Mapping[int, StoredState]
"""The current content of each host's store."""


class Promise(NamedTuple):
    """A node has answered a heartbeat of `term` that it received at `heard_ms` on its own clock."""

    term: int
    heard_ms: int


class Violation(AssertionError):
    """A violated property; the message starts with its name."""


class Oracle:
    """Observes every host after every event, every message when it is sent, and every write. One per cluster."""

    def __init__(self) -> None:
        self.leaders: dict[int, tuple[int, UUID]] = {}
        self.committed: dict[int, Entry] = {}
        self.last_committed = 0
        self._committed_in: dict[int, int] = {}
        self._past: dict[tuple[int, int], tuple[int, Entry]] = {}
        self._states: dict[int, int] = {}
        self._dropped: dict[ProposalId, None] = {}
        self._seen_commit: dict[UUID, int] = {}
        self._transfers: dict[tuple[UUID | None, int], None] = {}
        self._votes: dict[tuple[UUID, int], tuple[int, UUID | None]] = {}

    # Elections

    def became_leader(self, node: RaftNode, store: UUID) -> None:
        known = self.leaders.setdefault(node.term, (node.node_id, store))
        if known != (node.node_id, store):
            raise Violation(f"election safety: {known[0]} and {node.node_id} both lead in term {node.term}")
        log = node._state.log
        for index, entry in self.committed.items():
            is_older = self._committed_in[index] < node.term
            if is_older and index > log.base_index and log.term_at(index) != entry.term:
                raise Violation(f"leader completeness: leader {node.node_id} of {node.term} lacks committed {index}")

    def check_lease(self, node: RaftNode) -> None:
        """Check that no newer leader exists while a node holds a lease."""
        newest = max(self.leaders)
        if newest > node.term:
            raise Violation(f"lease: {node.node_id} of term {node.term} holds it while term {newest} has a leader")

    # Messages and writes

    def sent(self, message: Message, stored: StoredState) -> None:
        """Check that what a node sends is on its disk, unless the disk already has a later term."""
        body, term = message.body, stored.hard_state.term
        is_pre_vote = getattr(body, "is_pre_vote", False)
        if is_pre_vote or isinstance(body, Hello | HelloReply):
            return
        if message.term > term:
            raise Violation(f"durability: {message.source} speaks of term {message.term}, its disk of {term}")
        if isinstance(body, VoteReply) and body.is_granted:
            vote = (message.target, message.target_store)
            if self._votes.setdefault((message.source_store, message.term), vote) != vote:
                raise Violation(f"election safety: {message.source} votes twice in term {message.term}")
            if message.term == term and stored.hard_state.vote != message.target:
                raise Violation(f"durability: {message.source} has given a vote that is not on its disk")
        if isinstance(body, AppendReply) and not body.is_rejected and message.term == term:
            last = stored.entries[-1].index if stored.entries else 0
            if body.index > max(last, stored.snapshot.index if stored.snapshot else 0):
                raise Violation(f"durability: {message.source} acknowledges {body.index}, its disk ends at {last}")

    def persisting(self, stored: StoredState, persist: Persist) -> None:
        """Check log matching by induction: index and term identify one entry and the term of its predecessor."""
        if not persist.entries:
            return
        terms = {entry.index: entry.term for entry in stored.entries}
        snapshot = persist.snapshot or stored.snapshot
        if snapshot is not None:
            terms[snapshot.index] = snapshot.term
        prev_term = terms.get(persist.entries[0].index - 1, 0)
        for entry in persist.entries:
            if self._past.setdefault((entry.index, entry.term), (prev_term, entry)) != (prev_term, entry):
                raise Violation(f"log matching: two entries or pasts for {entry.index} in term {entry.term}")
            prev_term = entry.term

    def voting(self, message: Message, promise: Promise | None, local_ms: int, timeout_ms: int) -> None:
        """Check that a node that answered a heartbeat grants no vote for an election timeout, except for a transfer."""
        body = message.body
        if isinstance(body, VoteRequest) and body.is_transfer:
            self._transfers[(message.source_store, message.term)] = None
        is_vote = isinstance(body, VoteReply) and body.is_granted
        if promise is None or not is_vote or (message.target_store, message.term) in self._transfers:
            return
        if message.term > promise.term and local_ms - promise.heard_ms < timeout_ms:
            raise Violation(
                f"patience: {message.source} votes {local_ms - promise.heard_ms} ms after it heard a leader"
            )

    # Commitment

    def stepped(self, node: RaftNode, store: UUID, disks: Disks, local_ms: int) -> None:
        """Check what a node considers committed, and its lease, after each of its events."""
        log = node._state.log
        seen = self._seen_commit.get(store, 0)
        if node.commit_index > seen:
            for index in range(max(seen, log.base_index) + 1, node.commit_index + 1):
                (entry,) = log.entries(index, index, 1 << 60, 1)
                self._commit(entry, node.term)
            self._seen_commit[store] = node.commit_index
            if node.is_leader:
                self._check_majority(node, disks)
        lease_ms = node.leader_lease_until_ms
        if lease_ms is not None and local_ms < lease_ms:
            self.check_lease(node)
            if node.commit_index < self.last_committed:
                raise Violation(f"lease: {node.node_id} reads at {node.commit_index} of {self.last_committed}")

    def _commit(self, entry: Entry, term: int) -> None:
        self._committed_in.setdefault(entry.index, term)
        known = self.committed.setdefault(entry.index, entry)
        if known != entry:
            raise Violation(f"state machine safety: {known} and {entry} are both committed")
        if ProposalId(entry.index, entry.term) in self._dropped:
            raise Violation(f"proposals: {entry.index} of term {entry.term} was dropped and is committed")
        self.last_committed = max(self.last_committed, entry.index)

    def _check_majority(self, leader: RaftNode, disks: Disks) -> None:
        """Check that a leader commits an entry of its own term that is on the disks of a majority."""
        index = leader.commit_index
        if leader._state.log.term_at(index) != leader.term:
            raise Violation(f"commitment: the leader of {leader.term} commits {index}, which is of another term")
        voters = leader.membership.voters
        # A store that was lost after its acknowledgement is not the leader's fault.
        lost = [voter for voter in voters if _store(disks, voter.node_id) != voter.store]
        has_it = [voter for voter in voters if voter not in lost and _holds(disks[voter.node_id], index, leader.term)]
        if 2 * (len(has_it) + len(lost)) <= len(voters):
            raise Violation(f"commitment: {index} is on {len(has_it)} of {len(voters)} disks")

    def applied(self, index: int, state: int) -> None:
        """Check state machine safety: all nodes that applied `index`, by entries or a snapshot, have the same state."""
        known = self._states.setdefault(index, state)
        if known != state:
            raise Violation(f"state machine safety: two states after entry {index}")

    # Clients

    def dropped(self, proposal: ProposalId) -> None:
        self._dropped[proposal] = None
        committed = self.committed.get(proposal.index)
        if committed is not None and committed.term == proposal.term:
            raise Violation(f"proposals: {proposal} is committed and was called dropped")

    def commands(self) -> list[bytes]:
        """All committed commands in order."""
        entries = [self.committed[index] for index in sorted(self.committed)]
        return [entry.data for entry in entries if entry.kind is EntryKind.COMMAND]


def _store(disks: Disks, node_id: int) -> UUID | None:
    stored = disks.get(node_id)
    return None if stored is None else stored.store_id


def _holds(stored: StoredState, index: int, term: int) -> bool:
    if stored.snapshot is not None and stored.snapshot.index >= index:
        return True
    return any(entry.index == index and entry.term == term for entry in reversed(stored.entries))
