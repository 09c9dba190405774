"""The Raft state that all roles share: settings, term and vote, the log, the members, and pending output."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias
from uuid import UUID

from chronik.raft.log import RaftLog
from chronik.raft.membership import Membership, MembershipHistory, decode_membership
from chronik.raft.messages import Body, Message
from chronik.raft.ready import Event, MembershipChanged, ProposalId
from chronik.raft.store import Entry, EntryKind, HardState, Persist, RaftError, Snapshot, StoredState

COMMITTED_ENTRIES_MAX = 1_000
"""The maximum number of entries to apply in one Ready."""


ROUNDING_MS = 2
"""Two clocks that count whole milliseconds may each be off by one."""


@dataclass(frozen=True, slots=True)
class RaftSettings:
    """Times are by the node's monotonic clock. A follower gets several heartbeats per timeout: this is checked."""

    heartbeat_interval_ms: int = 100
    election_timeout_ms: int = 600
    """How long a node refuses votes after hearing from a leader. It campaigns after one to two times this long."""
    clock_drift_percent: int = 5
    """How much a member's clock rate may differ from true time: the lease assumes this bound."""
    hello_interval_ms: int = 200
    transfer_timeout_ms: int = 600

    entry_bytes_max: int = 8 * 1024 * 1024
    append_bytes_max: int = 512 * 1024
    """The maximum size of one append, unless it is a single larger entry."""
    append_entries_max: int = 1_000
    in_flight_appends_max: int = 32
    in_flight_bytes_max: int = 4 * 1024 * 1024
    uncommitted_entries_max: int = 20_000
    uncommitted_bytes_max: int = 64 * 1024 * 1024
    committed_bytes_max: int = 1024 * 1024
    """The maximum size of the entries to apply in one Ready, unless it is a single larger entry."""
    snapshot_chunk_bytes: int = 512 * 1024
    snapshot_bytes_max: int = 256 * 1024 * 1024
    trailing_entries: int = 1_000
    """How many entries before a snapshot are kept for followers that lag a little."""
    promotion_lag_entries_max: int = 100

    def __post_init__(self) -> None:
        if self.election_timeout_ms < 3 * self.heartbeat_interval_ms:
            raise ValueError("election_timeout_ms must be at least three heartbeat_interval_ms")
        if self.lease_ms <= self.heartbeat_interval_ms:
            raise ValueError("with this clock_drift_percent a lease would end before the next heartbeat")

    @property
    def lease_ms(self) -> int:
        """How long no other leader can be elected, counted from sending a heartbeat that a majority answers.

        Voters refuse votes for the election timeout by their clocks, which may run fast while the leader's runs slow.
        """
        drift = self.clock_drift_percent
        return self.election_timeout_ms * (100 - drift) // (100 + drift) - ROUNDING_MS


@dataclass(frozen=True, slots=True)
class ToFollower:
    """Become a follower in `term`, of `leader` if it is known."""

    term: int
    leader: int | None = None


@dataclass(frozen=True, slots=True)
class ToCandidate:
    """Request votes: first ask whether they would be granted (pre-vote), then in a new term."""

    is_pre_vote: bool
    is_transfer: bool = False


@dataclass(frozen=True, slots=True)
class ToLeader:
    """Become the leader of the current term."""


Transition: TypeAlias = ToFollower | ToCandidate | ToLeader
"""The next role that the current role requests from `RaftNode`."""


class RaftState:
    """Shared by the roles, of which one is active at a time.

    Invariants: term, commit_index and applied_index never fall; applied_index <= commit_index and <= durable_index; the
    pending `proposals` have increasing indexes, and the log holds the entry of each as proposed. `now_ms` is the time
    of the current event.
    """

    def __init__(
        self, node_id: int, stored: StoredState, settings: RaftSettings, random: Random, now_ms: int, address: str
    ) -> None:
        self.node_id = node_id
        self.store_id = stored.store_id
        self.address = address
        self.settings = settings
        self.random = random
        self.now_ms = now_ms
        self.log = RaftLog(stored.snapshot, stored.entries)
        snapshot = stored.snapshot
        first, membership = (0, Membership()) if snapshot is None else (snapshot.index, snapshot.membership)
        self.members = MembershipHistory(first, membership)
        for entry in stored.entries:
            if entry.kind is EntryKind.MEMBERSHIP and entry.index > self.members.index:
                self.members.append(entry.index, decode_membership(entry.data))
        self.term = stored.hard_state.term
        self.vote = stored.hard_state.vote
        self.commit_index = max(first, min(stored.hard_state.commit, self.log.last_index))
        self.applied_index = 0
        self.leader: int | None = None
        self.heard_ms = now_ms
        if self.term == 0:
            # A node with a term may have promised a leader to refuse votes just before it restarted; this one has not.
            self.stop_hearing()
        self.is_storage_failed = False
        """Whether the store refuses writes, or does not respond: this node must not lead then."""
        self.proposals: deque[ProposalId] = deque()
        self.proposals_dropped: list[ProposalId] = []
        self.events: list[Event] = []
        self.messages: list[Message] = []
        self.messages_after: list[Message] = []
        self._handed_state = self._durable_state = (self.term, self.vote)

    @property
    def membership(self) -> Membership:
        return self.members.current

    @property
    def is_blank(self) -> bool:
        """Whether the store holds no entries of any cluster. It may still hold a vote, which remains valid."""
        return self.log.last_index == 0

    @property
    def may_campaign(self) -> bool:
        return self.members.may_campaign(self.node_id, self.store_id, self.commit_index)

    @property
    def is_sole_voter(self) -> bool:
        voters = self.membership.voters
        return len(voters) == 1 and self.membership.is_voter(self.node_id, self.store_id)

    @property
    def hears_leader(self) -> bool:
        return self.now_ms - self.heard_ms < self.settings.election_timeout_ms

    def stop_hearing(self) -> None:
        """Stop refusing votes on behalf of an earlier leader."""
        self.heard_ms = self.now_ms - self.settings.election_timeout_ms

    def election_timeout_ms(self) -> int:
        timeout_ms = self.settings.election_timeout_ms
        return timeout_ms + self.random.randrange(timeout_ms)

    def send(self, target: int, store: UUID | None, body: Body, term: int | None = None) -> None:
        """Send a message at once: it depends on nothing that is not durable yet."""
        self.messages.append(self._message(target, store, body, term))

    def send_after(self, target: int, store: UUID | None, body: Body, term: int | None = None) -> None:
        """Send a message once the current state of this node is durable."""
        self.messages_after.append(self._message(target, store, body, term))

    def _message(self, target: int, store: UUID | None, body: Body, term: int | None) -> Message:
        return Message(self.node_id, self.store_id, target, store, self.term if term is None else term, body)

    @property
    def is_state_durable(self) -> bool:
        return self._durable_state == (self.term, self.vote)

    def enter_term(self, term: int, vote: int | None) -> None:
        self.term = term
        self.vote = vote
        self.leader = None

    def append(self, entries: Sequence[Entry]) -> None:
        self.log.append(entries)
        for entry in entries:
            if entry.kind is EntryKind.MEMBERSHIP:
                self.members.append(entry.index, decode_membership(entry.data))
                self.events.append(MembershipChanged(self.membership, False))

    def merge(self, entries: Sequence[Entry]) -> None:
        """Merge the leader's entries, which follow an entry that is here; cut the log only if a term differs."""
        known = self.log.first_conflict(entries)
        if known == len(entries):
            return
        first = entries[known].index
        if first <= self.log.last_index:
            if first <= self.commit_index:
                raise RaftError(f"the leader's entry {first} differs from the one committed here")
            self.cut_from(first)
        self.append(entries[known:])

    def cut_from(self, index: int) -> None:
        self.log.cut_from(index)
        self._drop_proposals(index)
        if self.members.cut_from(index):
            self.events.append(MembershipChanged(self.membership, self.members.index <= self.commit_index))

    def restore(self, snapshot: Snapshot) -> None:
        self.log.restore(snapshot)
        self.members = MembershipHistory(snapshot.index, snapshot.membership)
        self._forget_proposals(snapshot.index)
        # Entries after one that differs from the leader's were never committed.
        self._drop_proposals(snapshot.index + 1)
        self.commit_index = snapshot.index
        self.events.append(MembershipChanged(snapshot.membership, True))

    def compact(self, index: int, data: bytes) -> None:
        """Install the state machine's snapshot after the applied entry `index`."""
        term = self.log.term_at(index)
        if index > self.applied_index or term is None:
            raise RaftError(f"there can be no snapshot at {index}: applied up to {self.applied_index}")
        self.log.compact(Snapshot(index, term, self.members.at(index), data), self.settings.trailing_entries)
        self.members.forget_before(index)

    def commit_to(self, index: int) -> None:
        """Commit the entries up to `index`, as far as they are here."""
        index = min(index, self.log.last_index)
        if index <= self.commit_index:
            return
        if self.commit_index < self.members.index <= index:
            self.events.append(MembershipChanged(self.membership, True))
        self.commit_index = index
        self._forget_proposals(index)

    def _forget_proposals(self, index: int) -> None:
        """Entries up to `index` are committed as in the log: proposers see them in `Ready.committed`."""
        while self.proposals and self.proposals[0].index <= index:
            self.proposals.popleft()

    def _drop_proposals(self, index: int) -> None:
        """The next leader's entries replaced those from `index` on."""
        self.proposals_dropped += [each for each in self.proposals if each.index >= index]
        self.proposals = deque(each for each in self.proposals if each.index < index)

    def uncommitted(self, last: int | None = None) -> tuple[Entry, ...]:
        """Return the entries after the commit index, up to `last` or all of them."""
        last = self.log.last_index if last is None else last
        return self.log.entries(self.commit_index + 1, last, sys.maxsize, sys.maxsize)

    def take_persist(self) -> Persist | None:
        hard_state = HardState(self.term, self.vote, self.commit_index)
        persist = self.log.take_unpersisted(hard_state)
        state = (self.term, self.vote)
        if persist is None and state == self._handed_state:
            return None
        self._handed_state = state
        return persist or Persist(hard_state)

    def persisted(self) -> None:
        self._durable_state = self._handed_state
        self.log.persisted()

    def take_restore(self) -> Snapshot | None:
        snapshot = self.log.snapshot
        if snapshot is None or self.applied_index >= snapshot.index or self.log.durable_index < snapshot.index:
            return None
        self.applied_index = snapshot.index
        return snapshot

    def take_committed(self) -> tuple[Entry, ...]:
        last = min(self.commit_index, self.log.durable_index)
        if last <= self.applied_index:
            return ()
        bytes_max = self.settings.committed_bytes_max
        entries = self.log.entries(self.applied_index + 1, last, bytes_max, COMMITTED_ENTRIES_MAX)
        self.applied_index = entries[-1].index
        return entries
