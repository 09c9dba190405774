"""The checker finds and names each anomaly of transactions, and accepts the near miss that Kafka allows."""

from __future__ import annotations

from typing import Literal

import pytest
from tests.testing.support_story import P, Q, Story, only

from chronik.testing.operations import Assigned, HistoryError, Polled, SendAcknowledged, SendInvoked, SendUnknown
from chronik.testing.transaction_cycles import component_of

A, B = "a/1", "b/1"


def story_of_readers() -> Story:
    """Two partitions, a read_committed consumer `c` and a read_uncommitted one `u`."""
    story = Story()
    story.reader("c")
    story.assign("u", t_0=0, t_1=0)
    return story


def test_committed_and_aborted_transactions_of_two_producers_are_clean() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 0), (Q, 0))
    story.wrote(B, (P, 1))
    story.end(A, "commit")
    story.end(B, "abort")
    story.wrote("a/2", (P, 4), (Q, 2))
    story.end("a/2", "commit")
    story.read((P, 0), (Q, 0))
    story.read((P, 4), (Q, 2))
    story.read((P, 0), (P, 1), (P, 4), (Q, 0), (Q, 2), consumer="u")
    report = story.check(dense=True)
    assert report.is_clean and not report.permitted, str(report)
    assert report.transactions == 3
    assert "3 transactions" in str(report)


def test_markers_are_no_skipped_records_and_a_skipped_committed_record_is() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 0))
    story.end(A, "commit")
    story.wrote(B, (P, 2), (P, 3))
    story.end(B, "commit")
    story.read((P, 0), (P, 2), (P, 3))
    story.read((P, 0), consumer="u")
    assert story.check(dense=True).is_clean
    story.read((P, 3), consumer="u")
    only(story.check(dense=True), "external-poll-skip", "1 records skipped")


# -- what read_committed consumers receive -----------------------------------------------------------------------------


def test_a_record_of_an_aborted_transaction_that_is_received_is_g1a() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 0), (P, 1), (P, 2), (P, 3))
    story.end(A, "abort")
    story.read((P, 0), (P, 1), (P, 2), (P, 3), consumer="u")
    assert story.check().is_clean
    story.read((P, 0), (P, 1), (P, 2), (P, 3))
    only(story.check(), "G1a", "'t-0@0', 't-0@1', 't-0@2' and 1 more of a/1, which aborted")


def test_a_record_of_a_transaction_that_never_asked_to_commit_is_g1a() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 0))
    story.read((P, 0))
    only(story.check(), "G1a", "never asked to commit")
    story.end(A, "unknown", commits=False)
    assert list(story.check().anomalies) == ["G1a"]


def test_a_transaction_whose_outcome_is_unknown_may_be_received_completely() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 0), (Q, 0))
    story.end(A, "unknown")
    assert story.check().is_clean
    story.read((P, 0))
    story.read((Q, 0))
    assert story.check().is_clean


def test_a_record_received_before_its_transaction_asks_to_commit_is_g1b() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 0), (P, 1))
    story.read((P, 0), consumer="u")
    story.end(A, "commit")
    story.read((P, 0), (P, 1))
    assert story.check().is_clean
    early = story_of_readers()
    early.wrote(A, (P, 0), (P, 1))
    early.read((P, 0))
    early.end(A, "commit")
    early.read((P, 1))
    only(early.check(), "G1b", "received 't-0@0' of a/1 before it asked to commit")


def test_a_part_of_a_transaction_in_one_poll_and_the_rest_in_the_next_is_allowed() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 0), (P, 1), (Q, 0))
    story.end(A, "commit")
    story.read((P, 0))
    story.read((P, 1), (Q, 0))
    assert story.check().is_clean


def test_a_committed_transaction_that_every_consumer_passes_is_lost() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 0), (P, 1))
    story.end(A, "commit")
    story.wrote(B, (P, 3))
    story.end(B, "commit")
    unread = [anomaly.evidence for anomaly in story.check().anomalies["unseen"]]
    assert len(unread) == 3 and "'t-0@0' of the committed a/1 was never polled" in unread
    story.read((P, 3))
    report = story.check()
    assert list(report.anomalies) == ["external-poll-skip", "lost-transaction"]
    (lost,) = report.anomalies["lost-transaction"]
    assert "passed 't-0@0', 't-0@1' of the committed a/1" in lost.evidence


def test_a_committed_transaction_that_only_uncommitted_readers_see_is_lost() -> None:
    story = story_of_readers()
    story.reader("last")
    story.wrote(A, (P, 0))
    story.end(A, "commit")
    story.read((P, 0), consumer="u")
    report = story.check(final="last")
    assert report.counts()["lost-transaction"] == 1


def test_a_transaction_of_which_the_final_read_finds_only_a_part_is_torn() -> None:
    story = Story()
    story.wrote(A, (P, 0), (Q, 0))
    story.end(A, "unknown")
    story.reader("last")
    story.read((P, 0), consumer="last")
    only(story.check(final="last"), "torn-transaction", "passed 't-1@0' of the committed a/1; they received 't-0@0'")
    story.read((Q, 0), consumer="last")
    assert story.check(final="last").is_clean


def test_a_transaction_below_the_log_start_of_the_final_read_is_not_torn() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 0), (Q, 0))
    story.end(A, "commit")
    story.wrote("a/2", (Q, 2))
    story.end("a/2", "commit")
    story.read((P, 0), (Q, 0), (Q, 2))
    story.read((P, 0), (Q, 0), (Q, 2), consumer="u")
    story.operations.append(Assigned(story.now_s, "last", {P: 0, Q: 2}, is_read_committed=True))
    story.read((P, 0), (Q, 2), consumer="last")
    assert story.check(final="last").is_clean


def test_records_of_unfinished_sends_are_no_part_of_a_transaction() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 0))
    story.operations.append(SendInvoked(story.now_s, "a", "lost", P, A))
    story.operations.append(SendUnknown(story.now_s, "a", "lost", "timed out"))
    story.end(A, "unknown")
    story.wrote(B, (P, 3))
    story.end(B, "commit")
    story.read((P, 0), (P, 3))
    assert story.check().is_clean


def test_a_committed_record_missing_from_one_consumer_only_is_a_skip() -> None:
    story = story_of_readers()
    story.reader("d")
    story.wrote(A, (P, 0))
    story.end(A, "commit")
    story.wrote("a/2", (P, 2))
    story.end("a/2", "commit")
    story.read((P, 0), (P, 2))
    story.read((P, 2), consumer="d")
    only(story.check(), "external-poll-skip", "d received 't-0@2'")


def test_a_producers_records_out_of_order_inside_a_transaction_are_internal() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 1), (P, 0))
    story.end(A, "commit")
    story.read((P, 0), (P, 1))
    only(story.check(), "int-nonmonotonic-send", "'t-0@1' before 't-0@0'")
    others = story_of_readers()
    others.wrote(A, (P, 1))
    others.wrote("a/2", (P, 0))
    others.end(A, "commit")
    others.end("a/2", "commit")
    others.read((P, 0), (P, 1))
    only(others.check(), "nonmonotonic-send", "'t-0@1' before 't-0@0'")


# -- the final read ----------------------------------------------------------------------------------------------------


def test_a_final_reader_that_is_read_committed_need_not_find_aborted_records() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 0))
    story.end(A, "commit")
    story.wrote("a/2", (P, 2))
    story.end("a/2", "abort")
    story.read((P, 0), (P, 2), consumer="u")
    story.read((P, 0))
    story.reader("last")
    story.read((P, 0), consumer="last")
    assert story.check(final="last").is_clean, str(story.check(final="last"))
    del story.operations[-1]
    assert list(story.check(final="last").anomalies) == ["vanished"]


def test_a_group_that_commits_in_transactions_reaches_the_end_or_lags() -> None:
    story = Story()
    story.reader("m", P, group="g")
    story.wrote(A, (P, 0), (P, 1))
    story.end(A, "commit")
    story.reader("last")
    story.read((P, 0), (P, 1), consumer="last")
    only(story.check(final="last"), "lag-at-end", "group g is at t-0@0")
    story.offsets("m/1", 2)
    story.end("m/1", "abort")
    only(story.check(final="last"), "lag-at-end", "group g is at t-0@0")
    story.offsets("m/2", 2)
    story.end("m/2", "commit")
    assert story.check(final="last").is_clean


# -- cycles ------------------------------------------------------------------------------------------------------------


def interleaved() -> Story:
    story = story_of_readers()
    story.wrote(A, (P, 0))
    story.wrote(B, (P, 1), (Q, 0))
    story.wrote(A, (Q, 1))
    story.end(A, "commit")
    story.end(B, "commit")
    story.read((P, 0), (P, 1), (Q, 0), (Q, 1))
    return story


def test_writes_in_contradictory_orders_are_g0_which_kafka_permits() -> None:
    report = interleaved().check()
    assert report.is_clean and list(report.permitted) == ["G0"]
    (cycle,) = report.permitted["G0"]
    assert cycle.evidence == "a/1 wrote t-0@0 before 1 of b/1; b/1 wrote t-1@0 before 1 of a/1"
    assert "permitted G0: 1" in str(report)
    only(interleaved().check(isolates_writes=True), "G0", "a/1 wrote")


def test_writes_in_the_same_order_in_all_partitions_are_no_g0() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 0), (Q, 0))
    story.wrote(B, (P, 1), (Q, 1))
    story.end(A, "commit")
    story.end(B, "commit")
    story.read((P, 0), (P, 1), (Q, 0), (Q, 1))
    assert not story.check().permitted
    aborted = story_of_readers()
    aborted.wrote(A, (P, 0))
    aborted.wrote(B, (P, 1), (Q, 0))
    aborted.wrote(A, (Q, 1))
    aborted.end(A, "abort")
    aborted.end(B, "commit")
    aborted.read((P, 1), (Q, 0))
    assert not aborted.check().permitted


def circular(outcome: Literal["commit", "abort"] = "commit") -> Story:
    """Two applications whose transactions consume each other's records."""
    story = story_of_readers()
    story.reader("d")
    story.wrote(A, (P, 0))
    story.wrote(B, (Q, 0))
    story.read((Q, 0), transaction=A)
    story.read((P, 0), consumer="d", transaction=B)
    story.end(A, "commit")
    story.end(B, outcome)
    story.read((P, 0))
    story.read((Q, 0), consumer="d")
    return story


def test_transactions_that_consume_each_others_records_are_g1c() -> None:
    report = circular().check()
    assert list(report.anomalies) == ["G1b", "G1c"] and not report.permitted
    (cycle,) = report.anomalies["G1c"]
    assert "b/1 wrote t-1@0, which was read by a/1" in cycle.evidence
    assert "a/1 wrote t-0@0, which was read by b/1" in cycle.evidence


def test_a_chain_of_transactions_that_consume_records_is_no_g1c() -> None:
    assert "G1c" not in circular("abort").check().anomalies
    story = story_of_readers()
    story.wrote(A, (P, 0))
    story.end(A, "commit")
    story.read((P, 0), transaction=B)
    story.wrote(B, (Q, 0))
    story.end(B, "commit")
    story.read((Q, 0))
    assert story.check().is_clean and not story.check().permitted


def test_consumed_records_and_a_write_order_in_a_circle_are_permitted() -> None:
    story = story_of_readers()
    story.wrote(B, (Q, 0))
    story.wrote(A, (P, 0), (Q, 1))
    story.end(A, "commit")
    story.read((P, 0), transaction=B)
    story.end(B, "commit")
    story.read((Q, 0), (Q, 1))
    report = story.check()
    assert report.is_clean and list(report.permitted) == ["G1c-write-order"]
    only(story.check(isolates_writes=True), "G1c-write-order", "read by b/1", "t-1@0 before 1 of a/1")


def test_components_of_a_graph_are_the_nodes_that_reach_each_other() -> None:
    graph = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": ["e"], "e": ["d", "f"], "g": ["g"]}
    found = component_of(graph)
    assert found["a"] == found["b"] == found["c"]
    assert found["d"] == found["e"]
    assert len({found[name] for name in "adfg"}) == 4
    chain = {str(number): [str(number + 1)] for number in range(50_000)}
    assert len(set(component_of(chain).values())) == 50_001


# -- offsets -----------------------------------------------------------------------------------------------------------


def test_an_offset_that_only_an_aborted_transaction_sent_is_reported() -> None:
    story = Story()
    story.offsets("a/1", 5)
    story.end("a/1", "commit")
    story.fetched(5)
    story.offsets("a/2", 9)
    story.end("a/2", "abort")
    story.fetched(5)
    assert story.check().is_clean
    story.fetched(9)
    only(story.check(), "aborted-offsets", "group g was at 9 of t-0, an offset of a/2, which aborted")
    story.offsets("a/3", 9)
    story.end("a/3", "commit")
    assert list(story.check().anomalies) == ["aborted-offsets"]


def test_a_group_without_the_offset_of_a_committed_transaction_is_reported() -> None:
    story = Story()
    story.fetched(None)
    story.offsets("a/1", 5)
    story.end("a/1", "commit")
    story.offsets("a/2", 9)
    story.end("a/2", "commit")
    story.fetched(9)
    assert story.check().is_clean
    story.fetched(5)
    only(story.check(), "lost-offsets", "group g was at 5 of t-0")
    story.operations.pop()
    story.fetched(0, partition=Q)
    assert story.check().is_clean
    story.fetched(None)
    only(story.check(), "lost-offsets", "group g was at no offset of t-0")


def test_a_fetch_during_a_commit_or_of_an_unknown_one_may_have_either_offset() -> None:
    story = Story()
    story.offsets("a/1", 5)
    story.end("a/1", "commit")
    story.offsets("a/2", 9)
    story.end("a/2", "commit")
    story.fetched(5, took_s=2.0)
    story.offsets("a/3", 12)
    story.end("a/3", "unknown")
    story.fetched(9)
    story.fetched(12)
    assert story.check().is_clean
    story.offsets("a/4", 15)
    story.end("a/4", "commit")
    story.fetched(9)
    only(story.check(), "lost-offsets", "at 9")


def test_the_offsets_of_a_plain_commit_replace_those_of_a_transaction() -> None:
    story = Story()
    story.offsets("a/1", 5)
    story.end("a/1", "commit")
    story.commit("m", 7)
    story.fetched(7)
    assert story.check().is_clean
    story.fetched(5)
    only(story.check(), "lost-offsets", "at 5")


def test_a_record_that_two_committed_transactions_of_a_group_consume_is_reported() -> None:
    story = Story()
    story.reader("m", P, group="g")
    story.wrote("x/1", (P, 0))
    story.end("x/1", "commit")

    def process(transaction: str, outcome: Literal["commit", "abort", "unknown"]) -> None:
        story.reader("m", P, group="g")
        story.read((P, 0), consumer="m", transaction=transaction)
        story.offsets(transaction, 1)
        story.end(transaction, outcome)

    process("a/1", "abort")
    process("a/2", "commit")
    process("a/3", "unknown")
    assert story.check().is_clean
    process("b/1", "commit")
    only(story.check(), "processed-twice", "'t-0@0'", "in a/2 and in b/1")


# -- protocol V1, and histories that break their rules -----------------------------------------------------------------


def test_a_late_end_is_permitted_only_for_producers_that_are_named() -> None:
    story = story_of_readers()
    story.wrote(A, (P, 0))
    story.read((P, 0))
    story.end(A, "abort")
    assert list(story.check().anomalies) == ["G1a"]
    assert list(story.check(late_ends=["b"]).anomalies) == ["G1a"]
    report = story.check(late_ends=["a"])
    assert report.is_clean and list(report.permitted) == ["G1a"]


def test_a_transaction_that_ends_twice_or_commits_unasked_is_an_error() -> None:
    story = Story()
    story.wrote(A, (P, 0))
    story.end(A, "commit")
    story.end(A, "commit")
    with pytest.raises(HistoryError, match="ends transaction 'a/1' a second time"):
        story.check()
    story = Story()
    story.end(A, "commit", commits=False)
    with pytest.raises(HistoryError, match="without a request"):
        story.check()


def test_a_partition_without_read_committed_readers_is_judged_by_the_others() -> None:
    story = Story()
    story.assign("u", t_0=0)
    story.wrote(A, (P, 0))
    story.end(A, "commit")
    assert list(story.check().anomalies) == ["unseen"]
    story.read((P, 0), consumer="u")
    assert story.check().is_clean


def test_polls_inside_an_uncommitted_reader_may_return_the_transactions_own_records() -> None:
    story = Story()
    story.assign("u", t_0=0)
    story.operations.append(SendInvoked(story.now_s, "a", "own", P, A))
    story.operations.append(SendAcknowledged(story.now_s, "a", "own", P, 0))
    story.operations.append(Polled(story.now_s, story.now_s - 0.5, "u", ((P, 0, "own"),), A))
    story.end(A, "commit")
    assert story.check().is_clean
