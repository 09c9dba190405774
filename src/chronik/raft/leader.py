"""A leader: it accepts proposals, replicates its log to its peers, and commits what a majority has made durable."""

from __future__ import annotations

from collections import deque
from uuid import UUID

from chronik.raft.membership import AddLearner, MembershipChange, MembershipError, Promote, encode_membership
from chronik.raft.messages import (
    Append,
    AppendReply,
    Heartbeat,
    HeartbeatReply,
    Message,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
)
from chronik.raft.progress import Mode, Progress
from chronik.raft.ready import ProposalId, Reason, Refused, RoleKind
from chronik.raft.state import RaftState, ToFollower, Transition
from chronik.raft.store import Entry, EntryKind


class Leader:
    """Leads in the current term.

    Each broadcast of heartbeats is a numbered round. When a majority has answered a round, no other node was leader
    when the round started. The lease starts at that moment, not with the replies: from then on a majority refuses votes
    for an election timeout.

    Invariants: the log only grows; `progress` has one entry for each other member, with the store the membership names;
    `_contact_ms` is the start of the latest round that a majority has answered.
    """

    kind = RoleKind.LEADER

    def __init__(self, state: RaftState) -> None:
        self._state = state
        state.leader = state.node_id
        self.progress: dict[int, Progress] = {}
        self._follow_membership()
        self._round = 0
        self._rounds_begun: deque[tuple[int, int]] = deque()
        self._contact_ms = state.now_ms
        self._lease_from_ms: int | None = None
        """None until a majority has answered this leader; being elected alone does not make voters refuse votes."""
        self._transfer: tuple[int, int] | None = None
        self._has_handed_over = False
        self._next_heartbeat_ms = state.now_ms
        self._uncommitted_bytes = sum(entry.size_bytes for entry in state.uncommitted())
        # A leader knows what is committed only once an entry of its own term is (section 5.4.2 of the paper).
        self._established_index = self._append(EntryKind.NO_OP, b"").index
        self._send_heartbeats()

    @property
    def deadline_ms(self) -> int:
        quorum_ms = self._contact_ms + self._state.settings.election_timeout_ms
        deadlines = [self._next_heartbeat_ms, quorum_ms]
        if self._transfer is not None:
            deadlines.append(self._transfer[1])
        return min(deadlines)

    def tick(self) -> Transition | None:
        state = self._state
        is_late = state.now_ms - self._contact_ms >= state.settings.election_timeout_ms
        if is_late and not state.membership.has_majority((state.node_id,)):
            # Check-quorum: other nodes may have elected a leader that this node cannot hear.
            return ToFollower(state.term)
        if self._transfer is not None and state.now_ms >= self._transfer[1]:
            if self._has_handed_over:
                # The target may still start its election, which voters do not refuse. This leader has no lease for the
                # rest of the term, so it steps down.
                return ToFollower(state.term)
            self._transfer = None
        if state.now_ms >= self._next_heartbeat_ms:
            for progress in self.progress.values():
                if progress.mode is Mode.REPLICATE and not self._is_active(progress):
                    progress.start(Mode.PROBE)
            self._send_heartbeats()
        return None

    def _send_heartbeats(self) -> None:
        state = self._state
        self._round += 1
        self._rounds_begun.append((self._round, state.now_ms))
        self._next_heartbeat_ms = state.now_ms + state.settings.heartbeat_interval_ms
        for node_id, progress in self.progress.items():
            commit = min(progress.match_index, state.commit_index)
            state.send(node_id, progress.store, Heartbeat(commit, self._round, state.log.term_at(commit) or 0))
        self._update_rounds()

    @property
    def lease_until_ms(self) -> int | None:
        """Until when, by this node's clock, no other node can have been elected; None if that is unknown."""
        if self._has_handed_over or self._lease_from_ms is None or not self.is_established:
            return None
        return self._lease_from_ms + self._state.settings.lease_ms

    @property
    def is_established(self) -> bool:
        return self._state.commit_index >= self._established_index

    def _is_active(self, progress: Progress) -> bool:
        return progress.is_active(self._state.now_ms, self._state.settings.election_timeout_ms)

    def propose(self, data: bytes) -> ProposalId | Refused:
        state = self._state
        settings = state.settings
        if self._transfer is not None:
            return Refused(Reason.TRANSFERRING)
        if len(data) > settings.entry_bytes_max:
            return Refused(Reason.TOO_LARGE, state.node_id)
        is_full = state.log.last_index - state.commit_index >= settings.uncommitted_entries_max
        if is_full or self._uncommitted_bytes + len(data) > settings.uncommitted_bytes_max:
            return Refused(Reason.BUSY, state.node_id)
        return self._propose(EntryKind.COMMAND, data)

    def propose_membership(self, change: MembershipChange) -> ProposalId | Refused:
        refusal = self.refusal(change)
        if refusal is not None:
            return Refused(refusal, self._state.node_id)
        try:
            membership = self._state.membership.after(change)
        except MembershipError as error:
            return Refused(Reason.INVALID, self._state.node_id, str(error))
        proposal = self._propose(EntryKind.MEMBERSHIP, encode_membership(membership))
        self._follow_membership()
        return proposal

    def refusal(self, change: MembershipChange) -> Reason | None:
        """Return why the change may not be proposed now, regardless of the membership."""
        state = self._state
        if self._transfer is not None:
            return Reason.TRANSFERRING
        if not self.is_established:
            # Otherwise two successive leaders could each change the membership they started from, and their majorities
            # would not overlap.
            return Reason.NOT_ESTABLISHED
        if state.members.index > state.commit_index:
            return Reason.CHANGE_IN_FLIGHT
        if isinstance(change, Promote) and change.node_id in self.progress and not self.is_caught_up(change.node_id):
            return Reason.NOT_CAUGHT_UP
        if isinstance(change, AddLearner) and self.is_in_use(change.node_id, change.store):
            return Reason.STORE_IN_USE
        return None

    def is_caught_up(self, node_id: int) -> bool:
        """Return whether the peer responds and has nearly all committed entries."""
        progress = self.progress.get(node_id)
        if progress is None:
            return False
        lag_entries = self._state.commit_index - progress.match_index
        return self._is_active(progress) and lag_entries <= self._state.settings.promotion_lag_entries_max

    def is_in_use(self, node_id: int, store: UUID) -> bool:
        """Return whether the node id belongs to a member that responds from a different store."""
        if node_id == self._state.node_id:
            return True
        progress = self.progress.get(node_id)
        return progress is not None and progress.store != store and self._is_active(progress)

    def transfer(self, target: int | None) -> Refused | None:
        state = self._state
        if self._transfer is not None:
            return Refused(Reason.TRANSFERRING)
        if target is None:
            target = self._most_up_to_date_voter()
        if target is None or target not in self.progress or not self._is_voter(target):
            return Refused(Reason.INVALID, state.node_id, "there is no other voter to transfer leadership to")
        self._transfer = (target, state.now_ms + state.settings.transfer_timeout_ms)
        return None

    def _most_up_to_date_voter(self) -> int | None:
        """Return the responsive other voter with the longest matching log; the lowest id if there are several."""
        candidates = [
            (progress.match_index, -node_id)
            for node_id, progress in self.progress.items()
            if self._is_voter(node_id) and self._is_active(progress)
        ]
        return -max(candidates)[1] if candidates else None

    def _is_voter(self, node_id: int) -> bool:
        return self._state.membership.is_voter(node_id, self.progress[node_id].store)

    def resign_if_storage_failed(self) -> Transition | None:
        """Step down if the store fails and a majority has made durable entries that it lacks.

        Without that majority no other node could be elected, since votes must be durable too: this one keeps leading,
        and keeps its lease.
        """
        state = self._state
        if not state.is_storage_failed or state.commit_index <= state.log.durable_index:
            return None
        target = self._most_up_to_date_voter()
        if target is not None:
            state.send(target, self.progress[target].store, TimeoutNow())
        return ToFollower(state.term)

    def _propose(self, kind: EntryKind, data: bytes) -> ProposalId:
        entry = self._append(kind, data)
        proposal = ProposalId(entry.index, entry.term)
        self._state.proposals.append(proposal)
        return proposal

    def _append(self, kind: EntryKind, data: bytes) -> Entry:
        state = self._state
        entry = Entry(state.log.last_index + 1, state.term, kind, data)
        self._uncommitted_bytes += entry.size_bytes
        state.append([entry])
        return entry

    def _follow_membership(self) -> None:
        """Update `progress`: members may have been added or removed, or have returned with another store."""
        state, kept = self._state, self.progress
        self.progress = {}
        for member in state.membership.members:
            if member.node_id != state.node_id:
                known = kept.get(member.node_id)
                is_same = known is not None and known.store == member.store
                progress = known if known is not None and is_same else Progress(member.store, state.log.last_index + 1)
                self.progress[member.node_id] = progress

    def persisted(self) -> Transition | None:
        """Commit: only durable entries of the leader count toward a majority."""
        return self._commit()

    def _commit(self) -> Transition | None:
        state = self._state
        index = state.membership.majority_value(self._match_index)
        if index <= state.commit_index or state.log.term_at(index) != state.term:
            return None
        self._uncommitted_bytes -= sum(entry.size_bytes for entry in state.uncommitted(index))
        state.commit_to(index)
        # A membership with fewer voters may have a majority for a later round.
        self._update_rounds()
        is_member = state.membership.is_voter(state.node_id, state.store_id)
        if not is_member and state.members.index <= state.commit_index:
            # The change that removed this node's vote is committed: its work is done.
            return ToFollower(state.term)
        return self.resign_if_storage_failed()

    def _match_index(self, node_id: int) -> int:
        if node_id == self._state.node_id:
            return self._state.log.durable_index
        return self.progress[node_id].match_index

    def receive(self, message: Message) -> Transition | None:
        state = self._state
        progress = self.progress.get(message.source)
        if progress is None or progress.store != message.source_store:
            return None
        progress.acked_ms = state.now_ms
        body = message.body
        if isinstance(body, AppendReply):
            if not body.is_rejected:
                is_news = progress.acked(min(body.index, state.log.last_index))
                self._note_caught_up(progress)
                return self._commit() if is_news else None
            agreed = body.hint_index
            if body.hint_term:
                agreed, _ = state.log.agreement_hint(body.hint_index, body.hint_term)
            progress.rejected(body.index, agreed)
        elif isinstance(body, HeartbeatReply):
            progress.acked_round = max(progress.acked_round, body.round)
            progress.is_probe_sent = False
            # An append with nothing new reveals a message lost in either direction.
            progress.must_probe = progress.match_index < state.log.last_index
            self._note_caught_up(progress)
            progress.chunk_overdue(state.now_ms, state.settings.election_timeout_ms)
            self._update_rounds()
        elif isinstance(body, SnapshotReply):
            progress.chunk_taken(body.index, body.next_offset)
        return None

    def _note_caught_up(self, progress: Progress) -> None:
        if progress.match_index == self._state.log.last_index:
            progress.caught_up_ms = self._state.now_ms

    def _update_rounds(self) -> None:
        answered = self._state.membership.majority_value(self._acked_round)
        while self._rounds_begun and self._rounds_begun[0][0] <= answered:
            _, self._contact_ms = self._rounds_begun.popleft()
            self._lease_from_ms = self._contact_ms

    def _acked_round(self, node_id: int) -> int:
        return self._round if node_id == self._state.node_id else self.progress[node_id].acked_round

    def send_due(self) -> None:
        """Send each peer what it may receive now. Called once per Ready, so that proposals are sent in batches."""
        state = self._state
        for node_id, progress in self.progress.items():
            if progress.mode is not Mode.SNAPSHOT:
                self._send_appends(node_id, progress)
            if progress.mode is Mode.SNAPSHOT:
                self._send_chunk(node_id, progress)
        if self._transfer is not None and not self._has_handed_over:
            target = self.progress.get(self._transfer[0])
            if target is not None and target.match_index == state.log.last_index:
                self._has_handed_over = True
                state.send(self._transfer[0], target.store, TimeoutNow())

    def _send_appends(self, node_id: int, progress: Progress) -> None:
        state, log, settings = self._state, self._state.log, self._state.settings
        while True:
            prev_index = progress.next_index - 1
            prev_term = log.term_at(prev_index)
            if prev_term is None:
                if log.snapshot is not None and self._is_active(progress):
                    # Until the peer responds, heartbeats are enough.
                    progress.start(Mode.SNAPSHOT, log.snapshot)
                return
            entries = (
                log.entries(progress.next_index, log.last_index, settings.append_bytes_max, settings.append_entries_max)
                if progress.may_append(settings)
                else ()
            )
            last_index = prev_index + len(entries)
            commit = min(state.commit_index, last_index)
            advances_commit = progress.mode is Mode.REPLICATE and commit > progress.sent_commit
            if not entries and not progress.must_probe and not advances_commit:
                return
            state.send(node_id, progress.store, Append(prev_index, prev_term, entries, commit))
            progress.appended(last_index, sum(entry.size_bytes for entry in entries), commit)

    def _send_chunk(self, node_id: int, progress: Progress) -> None:
        """Send one chunk at a time: the next one after a reply, the same one again if the reply is overdue."""
        state, snapshot = self._state, progress.snapshot
        if snapshot is None or progress.chunk_sent_ms is not None:
            return
        start = progress.chunk_offset
        data = snapshot.data[start : start + state.settings.snapshot_chunk_bytes]
        chunk = SnapshotChunk(snapshot.index, snapshot.term, snapshot.membership, len(snapshot.data), start, data)
        state.send(node_id, progress.store, chunk)
        progress.chunk_sent_ms = state.now_ms
