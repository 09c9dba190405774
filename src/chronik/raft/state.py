"""What a Raft node is in every role: its term and vote, its log, its peers, and what waits to go out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias
from uuid import UUID

from chronik.raft.entries import Entry, EntryKind, HardState, RaftError, Snapshot, StoredState
from chronik.raft.log import RaftLog
from chronik.raft.membership import Membership, MembershipHistory, decode_membership
from chronik.raft.messages import Body, Message
from chronik.raft.proposals import Proposals
from chronik.raft.ready import Event, MembershipChanged, Persist, ReadAnswer
from chronik.raft.settings import RaftSettings

COMMITTED_ENTRIES_MAX = 1_000
"""One Ready hands out at most so many entries to apply."""


@dataclass(frozen=True, slots=True)
class ToFollower:
    """Follow in `term`; `leader` where it is known."""

    term: int
    leader: int | None = None


@dataclass(frozen=True, slots=True)
class ToCandidate:
    """Ask for votes: first whether there would be some (pre-vote), then in a new term."""

    is_pre_vote: bool
    is_transfer: bool = False


@dataclass(frozen=True, slots=True)
class ToLeader:
    """Lead in the present term."""


Transition: TypeAlias = ToFollower | ToCandidate | ToLeader
"""What a role asks `RaftNode` to make of the node next."""


class RaftState:
    """Shared by the roles, of which one is active at a time.

    Invariants: term, commit_index and applied_index never fall; applied_index <= commit_index and <= durable_index.
    `now_ms` is the time of the event in hand.
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
        self.members = MembershipHistory(snapshot.index, snapshot.membership) if snapshot else _no_members()
        for entry in stored.entries:
            if entry.kind is EntryKind.MEMBERSHIP and entry.index > self.members.index:
                self.members.append(entry.index, decode_membership(entry.data))
        self.term = stored.hard_state.term
        self.vote = stored.hard_state.vote
        self.commit_index = min(stored.hard_state.commit, self.log.last_index)
        if snapshot is not None:
            self.commit_index = max(self.commit_index, snapshot.index)
        self.applied_index = 0
        self.leader: int | None = None
        self.heard_ms = now_ms
        if self.term == 0:
            # Any other node may have promised its patience to a leader just before it was restarted.
            self.stop_hearing()
        self.is_storage_failed = False
        """Whether the store refuses writes, or does not answer: this node must not lead then."""
        self.proposals = Proposals()
        self.confirmed_reads: list[ReadAnswer] = []
        """Reads that need only be applied far enough."""
        self.reads_refused: list[int] = []
        self.events: list[Event] = []
        self.messages: list[Message] = []
        self.messages_after: list[Message] = []
        self._handed_state = self._durable_state = (self.term, self.vote)

    # Who this is, and who is heard

    @property
    def membership(self) -> Membership:
        return self.members.current

    @property
    def is_blank(self) -> bool:
        """Whether the store has nothing of any cluster; a vote that it may have given is kept all the same."""
        return self.log.is_empty

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
        """Whatever leader there was, this node owes it no patience any more."""
        self.heard_ms = self.now_ms - self.settings.election_timeout_ms

    def election_timeout_ms(self) -> int:
        timeout_ms = self.settings.election_timeout_ms
        return timeout_ms + self.random.randrange(timeout_ms)

    # Messages

    def send(self, target: int, store: UUID | None, body: Body, term: int | None = None) -> None:
        """A message that says nothing that is not durable yet: it may go at once."""
        self.messages.append(self._message(target, store, body, term))

    def send_after(self, target: int, store: UUID | None, body: Body, term: int | None = None) -> None:
        """A message that may go once all that this node knows by now is durable."""
        self.messages_after.append(self._message(target, store, body, term))

    def _message(self, target: int, store: UUID | None, body: Body, term: int | None) -> Message:
        return Message(self.node_id, self.store_id, target, store, self.term if term is None else term, body)

    @property
    def is_state_durable(self) -> bool:
        """Whether the present term and vote are on disk."""
        return self._durable_state == (self.term, self.vote)

    # Term and vote

    def enter_term(self, term: int, vote: int | None) -> None:
        self.term = term
        self.vote = vote
        self.leader = None

    # The log

    def append(self, entries: Sequence[Entry]) -> None:
        self.log.append(entries)
        for entry in entries:
            if entry.kind is EntryKind.MEMBERSHIP:
                self.members.append(entry.index, decode_membership(entry.data))
                self.events.append(MembershipChanged(self.membership, False))

    def merge(self, entries: Sequence[Entry]) -> None:
        """Takes over the leader's entries, which follow one that is here; cuts only where a term differs."""
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
        self.proposals.cut_from(index)
        if self.members.cut_from(index):
            self.events.append(MembershipChanged(self.membership, self.members.index <= self.commit_index))

    def restore(self, snapshot: Snapshot) -> None:
        """A leader's snapshot takes the place of the log."""
        self.log.restore(snapshot)
        self.members = MembershipHistory(snapshot.index, snapshot.membership)
        self.proposals.committed(snapshot.index)
        # What stood behind an entry that differs from the leader's was never committed.
        self.proposals.cut_from(snapshot.index + 1)
        self.commit_index = snapshot.index
        self.events.append(MembershipChanged(snapshot.membership, True))

    def compact(self, index: int, data: bytes) -> None:
        """The state machine's snapshot after the entry `index`, which it has applied."""
        term = self.log.term_at(index)
        if index > self.applied_index or term is None:
            raise RaftError(f"there can be no snapshot at {index}: applied up to {self.applied_index}")
        self.log.compact(Snapshot(index, term, self.members.at(index), data), self.settings.trailing_entries)
        self.members.forget_before(index)

    def commit_to(self, index: int) -> None:
        """Entries up to `index` are committed; what is not here yet is not."""
        index = min(index, self.log.last_index)
        if index <= self.commit_index:
            return
        if self.commit_index < self.members.index <= index:
            self.events.append(MembershipChanged(self.membership, True))
        self.commit_index = index
        self.proposals.committed(index)

    def uncommitted(self, last: int | None = None) -> tuple[Entry, ...]:
        """The entries after the commit index, up to `last` or all of them."""
        last = self.log.last_index if last is None else last
        return self.log.entries(self.commit_index + 1, last, sys.maxsize, sys.maxsize)

    # What goes out

    def take_persist(self) -> Persist | None:
        unpersisted = self.log.take_unpersisted()
        state = (self.term, self.vote)
        if unpersisted is None and state == self._handed_state:
            return None
        self._handed_state = state
        hard_state = HardState(self.term, self.vote, self.commit_index)
        return Persist(hard_state) if unpersisted is None else Persist(hard_state, *unpersisted)

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

    def take_reads(self) -> tuple[ReadAnswer, ...]:
        answers = tuple(read for read in self.confirmed_reads if read.index <= self.applied_index)
        if answers:
            self.confirmed_reads = [read for read in self.confirmed_reads if read.index > self.applied_index]
        return answers


def _no_members() -> MembershipHistory:
    return MembershipHistory(0, Membership())
