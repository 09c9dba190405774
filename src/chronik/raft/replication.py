"""What the leader sends to one peer: entries from the point of agreement, or a snapshot if they are compacted away."""

from __future__ import annotations

from chronik.raft.messages import Append, SnapshotChunk
from chronik.raft.progress import Mode, Progress
from chronik.raft.state import RaftState


def send_due(state: RaftState, node_id: int, progress: Progress) -> None:
    """Send everything that the peer lacks, within its flow-control bounds."""
    if progress.mode is not Mode.SNAPSHOT:
        _send_appends(state, node_id, progress)
    if progress.mode is Mode.SNAPSHOT:
        _send_chunk(state, node_id, progress)


def _send_appends(state: RaftState, node_id: int, progress: Progress) -> None:
    settings = state.settings
    log = state.log
    while True:
        prev_index = progress.next_index - 1
        prev_term = log.term_at(prev_index)
        if prev_term is None:
            _start_snapshot(state, progress)
            return
        entries = (
            log.entries(progress.next_index, log.last_index, settings.append_bytes_max, settings.append_entries_max)
            if progress.may_append(settings)
            else ()
        )
        last_index = prev_index + len(entries)
        commit = min(state.commit_index, last_index)
        tells_commit = progress.mode is Mode.REPLICATE and commit > progress.sent_commit
        if not entries and not progress.must_probe and not tells_commit:
            return
        state.send(node_id, progress.store, Append(prev_index, prev_term, entries, commit))
        progress.appended(last_index, sum(entry.size_bytes for entry in entries), commit)


def _start_snapshot(state: RaftState, progress: Progress) -> None:
    """Start a snapshot only if the peer responds; until then heartbeats are enough."""
    if progress.is_active(state.now_ms, state.settings.election_timeout_ms) and state.log.snapshot is not None:
        progress.start(Mode.SNAPSHOT, state.log.snapshot)


def _send_chunk(state: RaftState, node_id: int, progress: Progress) -> None:
    """Send one chunk at a time: the next one after a reply, the same one again if the reply is overdue."""
    snapshot = progress.snapshot
    if snapshot is None or progress.chunk_sent_ms is not None:
        return
    start = progress.chunk_offset
    data = snapshot.data[start : start + state.settings.snapshot_chunk_bytes]
    chunk = SnapshotChunk(snapshot.index, snapshot.term, snapshot.membership, len(snapshot.data), start, data)
    state.send(node_id, progress.store, chunk)
    progress.chunk_sent_ms = state.now_ms
