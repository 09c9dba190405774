"""How a leader replicates its log to its peers: backing off, in a bounded stream, and by snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.raft.harness import SETTINGS, Cluster, founded, log_of, log_terms, store_id, stored_log
from tests.raft.solo import THREE, Solo, bodies

from chronik.raft.leader import Leader
from chronik.raft.messages import Append, AppendReply, Heartbeat, HeartbeatReply, SnapshotChunk, SnapshotReply
from chronik.raft.store import RaftError, Snapshot, StoredState

TIMEOUT_MS = SETTINGS.election_timeout_ms


def appends(solo: Solo, target: int, since: int = 0) -> list[Append]:
    return [body for body in bodies(solo.sent[since:], target) if isinstance(body, Append)]


def leader(terms: list[int], **changes: int) -> Solo:
    solo = Solo(stored_log(1, terms, THREE), settings=replace(SETTINGS, **changes))
    solo.lead()
    return solo


# Backing off


def test_the_leader_resumes_at_the_hint_of_a_follower_with_a_short_log() -> None:
    solo = leader([1] * 30)
    solo.hear(3, solo.node.term, AppendReply(30, True, hint_index=5, hint_term=1))
    assert appends(solo, 3)[-1].prev_index == 5


def test_the_leader_skips_a_whole_conflicting_term_at_once() -> None:
    """The follower has entries of term 2, which the leader lacks: one reply moves back before all of them."""
    solo = leader([1, 1, 4, 4, 4, 4, 4, 4, 4, 4])
    solo.hear(3, solo.node.term, AppendReply(10, True, hint_index=8, hint_term=2))
    assert appends(solo, 3)[-1].prev_index == 2


def test_two_diverging_logs_agree_after_a_few_messages() -> None:
    stored = {
        1: stored_log(1, [1, 1] + [4] * 40, THREE),
        2: stored_log(2, [1, 1] + [4] * 40, THREE),
        3: stored_log(3, [1, 1] + [2] * 20 + [3] * 20, THREE, term=4),
    }
    cluster = Cluster(stored=stored, seed=1)
    cluster.keeps_delivered = True
    cluster.elect()
    cluster.converge()
    rejected = [each.body for each in cluster.delivered if isinstance(each.body, AppendReply) and each.body.is_rejected]
    assert len(rejected) <= 6
    assert log_terms(cluster.node(3)) == log_terms(cluster.node(1))


def test_the_leader_ignores_a_stale_rejection() -> None:
    solo = leader([1] * 10)
    solo.acknowledge(3)
    count = len(solo.sent)
    solo.hear(3, solo.node.term, AppendReply(4, True, hint_index=2, hint_term=1))
    assert appends(solo, 3, count) == []


def test_a_peer_with_an_older_copy_of_its_store_receives_its_entries_again() -> None:
    """The peer acknowledged everything, but its reply to a probe shows that most of it is lost."""
    solo = leader([1] * 10)
    solo.acknowledge(3)
    solo.propose()
    solo.beat(3)
    last_index = solo.node.last_index
    solo.hear(3, solo.node.term, AppendReply(last_index, True, hint_index=4, hint_term=1))
    assert appends(solo, 3)[-1].prev_index == last_index - 1
    solo.hear(3, solo.node.term, AppendReply(last_index - 1, True, hint_index=4, hint_term=1))
    assert appends(solo, 3)[-1].prev_index == 4
    role = solo.node._role
    assert isinstance(role, Leader) and role.progress[3].match_index == 4


def test_a_heartbeat_commits_only_an_entry_with_the_term_of_the_leaders_entry() -> None:
    solo = Solo(stored_log(1, [1, 1, 2], THREE, term=3))
    solo.hear(2, 3, Heartbeat(3, 1, commit_term=3))
    assert solo.node.commit_index == 0
    solo.hear(2, 3, Heartbeat(2, 2, commit_term=1))
    assert solo.node.commit_index == 2


# The stream


def test_the_number_of_in_flight_appends_to_a_peer_is_bounded() -> None:
    solo = leader([1], in_flight_appends_max=3, in_flight_bytes_max=1 << 20)
    solo.acknowledge(3)
    count = len(solo.sent)
    for _ in range(10):
        solo.propose()
    assert len(appends(solo, 3, count)) == 3
    solo.acknowledge(3, index=solo.node.last_index - 9)
    assert len(appends(solo, 3, count)) == 4


def test_the_bytes_of_in_flight_appends_to_a_peer_are_bounded() -> None:
    solo = leader([1], in_flight_appends_max=100, in_flight_bytes_max=250)
    solo.acknowledge(3)
    count = len(solo.sent)
    for _ in range(10):
        solo.propose(b"x" * 68)
    assert len(appends(solo, 3, count)) == 3


def test_concurrent_proposals_share_one_append() -> None:
    solo = leader([1])
    solo.acknowledge(3)
    count = len(solo.sent)
    for _ in range(3):
        solo.node.propose(b"x", solo.now_ms)
    solo.settle()
    assert [len(append.entries) for append in appends(solo, 3, count)] == [3]


def test_an_append_is_bounded_in_bytes_but_contains_at_least_one_entry() -> None:
    solo = leader([1], append_bytes_max=100)
    solo.acknowledge(3)
    count = len(solo.sent)
    for data in (b"x" * 500, b"x", b"x"):
        solo.node.propose(data, solo.now_ms)
    solo.settle()
    assert [len(append.entries) for append in appends(solo, 3, count)] == [1, 2]


def test_the_next_heartbeat_reveals_a_lost_append() -> None:
    solo = leader([1])
    solo.acknowledge(3)
    proposal = solo.propose()
    count = len(solo.sent)
    solo.wait(SETTINGS.heartbeat_interval_ms)
    solo.beat(3)
    (probe,) = appends(solo, 3, count)
    assert (probe.prev_index, probe.entries) == (proposal.index, ())
    solo.hear(3, 2, AppendReply(proposal.index, True, hint_index=proposal.index - 1, hint_term=2))
    assert appends(solo, 3)[-1].entries[0].index == proposal.index


def test_the_leader_does_not_stream_entries_to_an_unresponsive_peer() -> None:
    solo = leader([1])
    solo.acknowledge(3)
    for _ in range(2 * TIMEOUT_MS // SETTINGS.heartbeat_interval_ms):
        solo.wait(SETTINGS.heartbeat_interval_ms)
        solo.beat(2)
    count = len(solo.sent)
    for _ in range(20):
        solo.propose()
        solo.acknowledge(2)
    assert len(appends(solo, 3, count)) <= 1


def test_followers_learn_the_commit_index_at_once() -> None:
    solo = leader([1])
    solo.acknowledge(3)
    proposal = solo.propose()
    solo.acknowledge(2)
    assert appends(solo, 3)[-1].commit == proposal.index


# Snapshots

SNAPSHOT = Snapshot(10, 3, THREE, b"state after ten")
CHUNK = SETTINGS.snapshot_chunk_bytes


def chunks(snapshot: Snapshot) -> list[SnapshotChunk]:
    index, term, membership, data = snapshot.index, snapshot.term, snapshot.membership, snapshot.data
    starts = range(0, len(data), CHUNK)
    return [SnapshotChunk(index, term, membership, len(data), at, data[at : at + CHUNK]) for at in starts]


def with_snapshot() -> Solo:
    """Create a leader whose log starts after a snapshot."""
    entries = tuple(entry for entry in log_of([1] * 10 + [3, 3], THREE) if entry.index > 10)
    stored = StoredState(store_id(1), snapshot=SNAPSHOT, entries=entries)
    solo = Solo(stored)
    solo.lead()
    return solo


def test_compaction_keeps_a_few_entries_for_slightly_lagging_followers() -> None:
    solo = leader([1] * 10)
    solo.node.compact(10, b"state")
    solo.settle()
    assert [entry.index for entry in solo.store.stored.entries] == [8, 9, 10, 11]
    assert solo.store.stored.snapshot == Snapshot(10, 1, THREE, b"state")


def test_only_applied_entries_can_be_compacted() -> None:
    solo = leader([1])
    solo.propose()
    with pytest.raises(RaftError):
        solo.node.compact(solo.node.last_index, b"state")


def test_a_node_restarts_from_its_snapshot_and_its_known_committed_entries() -> None:
    solo = leader([1] * 10)
    solo.node.compact(8, b"state after eight")
    solo.settle()
    solo.propose()
    solo.acknowledge(2)
    solo.propose()
    again = Solo(solo.store.stored)
    assert again.restored is not None
    assert again.restored.data == b"state after eight"
    assert [entry.index for entry in again.committed] == [9, 10, 11, 12]


def test_a_peer_that_needs_compacted_entries_receives_the_snapshot_in_chunks() -> None:
    solo = with_snapshot()
    term = solo.node.term
    assert bodies(solo.hear(3, term, AppendReply(12, True, hint_index=0, hint_term=0)), 3) == [chunks(SNAPSHOT)[0]]
    assert bodies(solo.hear(3, term, SnapshotReply(10, CHUNK)), 3) == [chunks(SNAPSHOT)[1]]
    assert bodies(solo.hear(3, term, SnapshotReply(10, 2 * CHUNK)), 3) == [chunks(SNAPSHOT)[2]]
    (append,) = bodies(solo.hear(3, term, AppendReply(10)), 3)
    assert isinstance(append, Append)
    assert append.prev_index == 10


def test_an_unacknowledged_chunk_is_sent_again_once_the_peer_responds() -> None:
    solo = with_snapshot()
    solo.hear(3, solo.node.term, AppendReply(12, True))
    count = len(solo.sent)
    for _ in range(TIMEOUT_MS // SETTINGS.heartbeat_interval_ms + 1):
        solo.wait(SETTINGS.heartbeat_interval_ms)
        solo.beat(2)
    assert chunks(SNAPSHOT)[0] not in bodies(solo.sent[count:], 3)
    solo.beat(3)
    assert chunks(SNAPSHOT)[0] in bodies(solo.sent[count:], 3)


def test_a_snapshot_is_acknowledged_and_applied_once_it_is_durable() -> None:
    solo = Solo(stored_log(1, [1], THREE, term=4), writes=False)
    first, second, third = chunks(SNAPSHOT)
    assert bodies(solo.hear(2, 4, first)) == [SnapshotReply(10, CHUNK)]
    assert bodies(solo.hear(2, 4, second)) == [SnapshotReply(10, 2 * CHUNK)]
    assert solo.hear(2, 4, third) == []
    assert solo.restored is None
    assert bodies(solo.write()) == [AppendReply(10)]
    assert solo.restored == SNAPSHOT
    assert (solo.store.stored.snapshot, solo.store.stored.entries) == (SNAPSHOT, ())


def test_the_reply_to_an_out_of_order_chunk_contains_the_expected_offset() -> None:
    solo = Solo(stored_log(1, [1], THREE, term=4))
    first, second, third = chunks(SNAPSHOT)
    assert bodies(solo.hear(2, 4, second)) == [SnapshotReply(10, 0)]
    solo.hear(2, 4, first)
    assert bodies(solo.hear(2, 4, first)) == [SnapshotReply(10, CHUNK)]
    assert bodies(solo.hear(2, 4, third)) == [SnapshotReply(10, CHUNK)]
    solo.hear(2, 4, second)
    assert bodies(solo.hear(2, 4, third)) == [AppendReply(10)]


def test_a_snapshot_of_entries_already_in_the_log_only_commits_them() -> None:
    solo = Solo(stored_log(1, [1] * 9 + [3, 3], THREE, term=4))
    assert bodies(solo.hear(2, 4, chunks(SNAPSHOT)[0])) == [AppendReply(10)]
    assert solo.node.commit_index == 10
    assert solo.node.last_index == 11


def test_the_reply_to_an_outdated_snapshot_contains_the_commit_index() -> None:
    solo = Solo(stored_log(1, [1] * 12, THREE, term=4))
    solo.hear(2, 4, Heartbeat(12, 1, commit_term=1))
    assert bodies(solo.hear(2, 4, chunks(SNAPSHOT)[0])) == [AppendReply(12)]


def test_a_snapshot_replaces_a_log_that_conflicts_with_it() -> None:
    solo = Solo(stored_log(1, [1] * 4 + [2] * 20, THREE, term=4))
    for chunk in chunks(SNAPSHOT):
        solo.hear(2, 4, chunk)
    assert (solo.node.last_index, solo.node.commit_index) == (10, 10)
    assert solo.store.stored.entries == ()


def test_a_snapshot_that_is_too_large_to_send_is_refused() -> None:
    solo = Solo(settings=replace(SETTINGS, snapshot_bytes_max=10))
    solo.lead()
    with pytest.raises(RaftError):
        solo.node.compact(1, b"x" * 11)


def test_a_follower_far_behind_catches_up_from_a_snapshot_while_the_cluster_commits() -> None:
    cluster = Cluster(seed=2)
    lead = cluster.elect()
    behind = next(each for each in cluster.hosts if each != lead.node_id)
    cluster.cut_off(behind)
    for _ in range(30):
        cluster.commit()
    for node_id in cluster.hosts:
        if node_id != behind:
            cluster.compact(node_id)
    cluster.heal()
    cluster.commit()
    cluster.converge()
    assert cluster.node(behind).snapshot_index > 20


def test_heartbeat_replies_do_not_contain_log_positions() -> None:
    """They may be sent before the log is durable, so they must not contain any index."""
    assert set(HeartbeatReply.__struct_fields__) == {"round"}


def test_learners_receive_entries_but_do_not_count_toward_a_majority() -> None:
    solo = Solo(stored_log(1, [1], founded((1, 2, 3), learners=(4,))))
    solo.lead()
    proposal = solo.propose()
    assert appends(solo, 4)[-1].entries
    solo.acknowledge(4)
    assert solo.node.commit_index < proposal.index
