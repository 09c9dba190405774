"""The figures of the Raft paper: their logs, written as lists of terms, and the scenarios they show."""

from __future__ import annotations

import pytest
from tests.raft.harness import SETTINGS, Cluster, founded, log_of, log_terms, stored_log
from tests.raft.solo import Solo, bodies

from chronik.raft.messages import Append, VoteReply, VoteRequest

# Figure 7: the log of the leader when it is elected for term 8, and the possible logs of its followers.
FIGURE_7_LEADER = [1, 1, 1, 4, 4, 5, 5, 6, 6, 6]
FIGURE_7_FOLLOWERS = {
    "a, which lacks an entry": [1, 1, 1, 4, 4, 5, 5, 6, 6],
    "b, which lacks many": [1, 1, 1, 4],
    "c, which has one that is not committed": [1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 6],
    "d, which has two of a later term": [1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7, 7],
    "e, which lacks some and has others": [1, 1, 1, 4, 4, 4, 4],
    "f, which led in terms 2 and 3": [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3],
}

VOTERS = founded((1, 2, 3))


@pytest.mark.parametrize("follower", FIGURE_7_FOLLOWERS.values(), ids=FIGURE_7_FOLLOWERS)
def test_a_leader_makes_every_log_of_figure_7_match_its_own(follower: list[int]) -> None:
    stored = {
        1: stored_log(1, FIGURE_7_LEADER, VOTERS, term=7),
        2: stored_log(2, FIGURE_7_LEADER, VOTERS, term=7),
        3: stored_log(3, follower, VOTERS, term=7),
    }
    cluster = Cluster(stored=stored, seed=1)
    # Node 3 only follows: with the log of (d) it would win, and no log would be truncated.
    cluster.cut_off(3)
    leader = cluster.elect()
    assert leader.term == 8
    cluster.heal()
    cluster.converge()
    assert log_terms(cluster.node(3)) == [*FIGURE_7_LEADER, 8]


def test_only_nodes_with_up_to_date_logs_of_figure_7_can_win_an_election() -> None:
    """(a), (c) and (d) can win a majority; (b), (e) and (f) never can."""
    logs = [FIGURE_7_LEADER, *FIGURE_7_FOLLOWERS.values()]
    voters = founded(range(1, 8))
    stored = {number: stored_log(number, log, voters, term=7) for number, log in enumerate(logs, start=1)}
    winners = set()
    for seed in range(20):
        leader = Cluster(stored=stored, seed=seed).elect()
        winners.add(leader.node_id)
    assert winners <= {1, 2, 4, 5}
    assert len(winners) > 1


FIVE = founded(range(1, 6))


def s1_leads_in_term_4() -> Solo:
    """Figure 8 (c): S1, the leader of term 2, leads again; only S2 has its entry of term 2."""
    solo = Solo(stored_log(1, [1, 2], FIVE, term=3))
    solo.stand()
    for peer in (2, 3):
        solo.hear(peer, 4, VoteReply(True, is_pre_vote=True))
    for peer in (2, 3):
        solo.hear(peer, 4, VoteReply(True))
    assert (solo.node.is_leader, solo.node.term) == (True, 4)
    return solo


def test_an_entry_of_an_old_term_is_not_committed_by_counting_replicas() -> None:
    """Figure 8 (c): the entry of term 2 is on a majority (S1, S2 and S3), but S5 may still overwrite it."""
    solo = s1_leads_in_term_4()
    solo.acknowledge(2, index=2)
    solo.acknowledge(3, index=2)
    assert solo.node.commit_index == 0


def test_an_uncommitted_entry_may_be_overwritten_on_a_majority() -> None:
    """Figure 8 (d): S3 replaces its entry of term 2 with S5's entry of term 3."""
    s3 = Solo(stored_log(3, [1, 2], FIVE, term=4), node_id=3)
    s3.hear(5, 5, Append(1, 1, (log_of([1, 3], FIVE)[1],), 0))
    assert log_terms(s3.node) == [1, 3]


def test_an_entry_of_the_current_term_commits_all_earlier_entries() -> None:
    """Figure 8 (e): an entry of term 4 on a majority also commits the entry of term 2, and S5 cannot win."""
    solo = s1_leads_in_term_4()
    solo.acknowledge(2, index=3)
    solo.acknowledge(3, index=3)
    assert solo.node.commit_index == 3
    assert [entry.term for entry in solo.committed] == [1, 2, 4]
    s3 = Solo(stored_log(3, [1, 2, 4], FIVE), node_id=3)
    s3.now_ms += SETTINGS.election_timeout_ms
    assert bodies(s3.hear(5, 5, VoteRequest(2, 3))) == [VoteReply(False)]


def test_all_logs_of_figure_8_converge_to_the_log_of_the_leader() -> None:
    logs = {1: [1, 2], 2: [1, 2], 3: [1], 4: [1], 5: [1, 3]}
    stored = {number: stored_log(number, terms, FIVE, term=3) for number, terms in logs.items()}
    for seed in range(10):
        cluster = Cluster(stored=stored, seed=seed)
        cluster.elect()
        cluster.converge()
        assert len({tuple(log_terms(cluster.node(number))) for number in logs}) == 1
