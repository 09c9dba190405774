"""A follower: it accepts what the leader sends, and starts an election if it hears from no leader for too long."""

from __future__ import annotations

from chronik.raft.messages import (
    Append,
    AppendReply,
    Body,
    Heartbeat,
    HeartbeatReply,
    Message,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
)
from chronik.raft.ready import RoleKind
from chronik.raft.state import RaftState, ToCandidate, Transition
from chronik.raft.store import Snapshot


class Follower:
    """Follows `state.leader` if it is known. Learners and nodes that are not (yet) members are followers too."""

    kind = RoleKind.FOLLOWER

    def __init__(self, state: RaftState) -> None:
        self._state = state
        self._timeout_ms = 0 if state.is_sole_voter else state.election_timeout_ms()
        self._waiting_since_ms = state.now_ms
        self._incoming = bytearray()
        """The snapshot being received, in consecutive chunks."""
        self._incoming_at: tuple[int, int] | None = None
        """Its index and term."""

    @property
    def deadline_ms(self) -> int | None:
        return self._waiting_since_ms + self._timeout_ms if self._may_campaign else None

    @property
    def _may_campaign(self) -> bool:
        return self._state.may_campaign and not self._state.is_storage_failed

    def tick(self) -> Transition | None:
        deadline_ms = self.deadline_ms
        if deadline_ms is None or self._state.now_ms < deadline_ms:
            return None
        return ToCandidate(is_pre_vote=True)

    def restart_timeout(self) -> None:
        """Restart the election timeout: a leader was heard from, or a vote given."""
        self._waiting_since_ms = self._state.now_ms

    def receive(self, message: Message) -> Transition | None:
        """Handle a message from the leader of the current term."""
        state = self._state
        body = message.body
        if isinstance(body, TimeoutNow):
            return ToCandidate(is_pre_vote=False, is_transfer=True) if self._may_campaign else None
        self.restart_timeout()
        state.heard_ms = state.now_ms
        if isinstance(body, Append):
            self._append(message, body)
        elif isinstance(body, Heartbeat):
            if state.log.term_at(body.commit) == body.commit_term:
                state.commit_to(body.commit)
            # The reply promises only to refuse votes, nothing about the log, so it need not wait for the disk.
            self._answer_once_in_term(message, HeartbeatReply(body.round))
        elif isinstance(body, SnapshotChunk):
            self._take_chunk(message, body)
        return None

    def persisted(self) -> Transition | None:
        return None

    def _append(self, message: Message, append: Append) -> None:
        state = self._state
        source, store = message.source, message.source_store
        if append.prev_index < state.commit_index:
            # Committed entries are equal everywhere, so the logs agree at least this far.
            state.send_after(source, store, AppendReply(state.commit_index))
        elif state.log.term_at(append.prev_index) == append.prev_term:
            last_index = append.prev_index + len(append.entries)
            state.merge(append.entries)
            state.commit_to(min(append.commit, last_index))
            state.send_after(source, store, AppendReply(last_index))
        else:
            hint_index, hint_term = state.log.agreement_hint(append.prev_index, append.prev_term)
            self._answer_once_in_term(message, AppendReply(append.prev_index, True, hint_index, hint_term))

    def _take_chunk(self, message: Message, chunk: SnapshotChunk) -> None:
        """Collect a snapshot. Reply to each chunk, and acknowledge the whole snapshot once it is durable."""
        state = self._state
        source, store = message.source, message.source_store
        if chunk.index <= state.commit_index:
            state.send_after(source, store, AppendReply(state.commit_index))
            return
        if state.log.term_at(chunk.index) == chunk.index_term:
            # The log already has all of it; this node only did not know that it is committed.
            state.commit_to(chunk.index)
            state.send_after(source, store, AppendReply(chunk.index))
            return
        if self._incoming_at != (chunk.index, chunk.index_term):
            self._incoming_at = (chunk.index, chunk.index_term)
            self._incoming.clear()
        is_too_large = chunk.size_bytes > state.settings.snapshot_bytes_max
        if chunk.offset == len(self._incoming) and not is_too_large:
            self._incoming += chunk.data
        if len(self._incoming) < chunk.size_bytes:
            self._answer_once_in_term(message, SnapshotReply(chunk.index, len(self._incoming)))
            return
        self._incoming_at = None
        state.restore(Snapshot(chunk.index, chunk.index_term, chunk.membership, bytes(self._incoming)))
        self._incoming.clear()
        state.send_after(source, store, AppendReply(chunk.index))

    def _answer_once_in_term(self, message: Message, body: Body) -> None:
        """Send a reply that requires this node's term to be durable, but nothing of its log."""
        send = self._state.send if self._state.is_state_durable else self._state.send_after
        send(message.source, message.source_store, body)
