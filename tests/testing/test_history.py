"""The checker can fail: it finds and names each anomaly planted into an otherwise correct history."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.testing.support_story import P, Story, only

from chronik.testing.anomalies import KINDS
from chronik.testing.history import check, merge
from chronik.testing.operations import (
    Assigned,
    HistoryError,
    OffsetsFetched,
    OffsetsSent,
    Operation,
    Polled,
    SendAcknowledged,
    SendInvoked,
    TransactionEnded,
    TransactionEndInvoked,
    from_lines,
    read_history,
    to_lines,
    write_history,
)


def test_a_history_with_every_record_read_once_and_in_order_is_clean() -> None:
    story = Story()
    story.assign(t_0=0)
    story.written("a", "b", "c")
    story.poll((0, "a"))
    story.poll()
    story.poll((1, "b"), (2, "c"))
    report = story.check(dense=True)
    assert report.is_clean
    assert (report.sent, report.acknowledged, report.polled) == (3, 3, 3)
    assert report.counts() == dict.fromkeys(KINDS, 0)


def test_an_acknowledged_record_that_all_consumers_skip_is_a_lost_write() -> None:
    story = Story()
    story.written("a", "b")
    story.send("c")
    story.ok("c", 2)
    story.poll((0, "a"))
    story.poll((2, "c"), consumer="d")
    only(story.check(), "lost-write", "'b'", "t-0@1", "t-0@2")


def test_an_acknowledged_record_replaced_by_another_at_its_offset_is_a_lost_write() -> None:
    story = Story()
    story.written("a")
    story.send("b", producer="q")
    story.ok("b", 0, producer="q")
    story.poll((0, "b"))
    report = story.check()
    assert list(report.anomalies) == ["lost-write", "inconsistent-offsets"]


def test_an_acknowledged_record_after_the_last_polled_offset_is_unseen() -> None:
    story = Story()
    story.written("a", "b")
    story.poll((0, "a"))
    only(story.check(), "unseen", "'b'", "t-0@1")


def test_a_record_acknowledged_without_an_offset_is_unseen_until_it_is_polled() -> None:
    story = Story()
    story.send("a")
    story.ok("a", None)
    only(story.check(), "unseen", "'a'")
    story.poll((0, "a"))
    assert story.check().is_clean


def test_a_value_at_two_offsets_is_a_duplicate() -> None:
    story = Story()
    story.written("a")
    story.poll((0, "a"), (1, "a"))
    only(story.check(), "duplicate", "'a'", "t-0@0", "t-0@1")


def test_a_value_in_two_partitions_is_a_duplicate() -> None:
    story = Story()
    story.written("a")
    story.poll((0, "a"))
    story.poll((0, "a"), partition="t-1")
    only(story.check(), "duplicate", "t-0@0", "t-1@0")


def test_a_record_at_another_offset_than_acknowledged_is_a_duplicate() -> None:
    story = Story()
    story.send("a")
    story.ok("a", 7)
    story.poll((8, "a"))
    only(story.check(), "duplicate", "t-0@7", "t-0@8")


def test_two_values_at_one_offset_are_inconsistent() -> None:
    story = Story()
    story.send("a")
    story.info("a")
    story.send("b", producer="q")
    story.info("b")
    story.poll((0, "a"))
    story.poll((0, "b"), consumer="d")
    only(story.check(), "inconsistent-offsets", "t-0@0", "'a'", "'b'")


def test_a_later_send_at_a_lower_offset_than_an_earlier_one_is_nonmonotonic() -> None:
    story = Story()
    story.send("a")
    story.send("b")
    story.ok("b", 0)
    story.ok("a", 1)
    story.poll((0, "b"), (1, "a"))
    only(story.check(), "nonmonotonic-send", "'a'", "'b'")


def test_the_order_of_a_send_without_an_outcome_follows_from_its_polled_offset() -> None:
    story = Story()
    story.send("a")
    story.info("a")
    story.send("b")
    story.ok("b", 0)
    story.poll((0, "b"), (1, "a"))
    only(story.check(), "nonmonotonic-send", "'a'", "'b'")


def test_sends_of_different_producers_have_no_order() -> None:
    story = Story()
    story.send("a")
    story.send("b", producer="q")
    story.ok("b", 0, producer="q")
    story.ok("a", 1)
    story.poll((0, "b"), (1, "a"))
    assert story.check().is_clean


def test_a_record_skipped_inside_a_poll_is_an_internal_skip() -> None:
    story = Story()
    story.written("a", "b", "c")
    story.poll((0, "a"), (1, "b"), (2, "c"), consumer="whole")
    story.poll((0, "a"), (2, "c"))
    only(story.check(), "int-poll-skip", "'c'", "t-0@0", "1 records")


def test_a_record_skipped_between_polls_is_an_external_skip() -> None:
    story = Story()
    story.written("a", "b", "c")
    story.poll((0, "a"), (1, "b"), (2, "c"), consumer="whole")
    story.assign(t_0=0)
    story.poll((0, "a"))
    story.poll((2, "c"))
    only(story.check(), "external-poll-skip", "'c'", "t-0@0")


def test_a_consumer_that_starts_after_its_assigned_offset_skips() -> None:
    story = Story()
    story.written("a", "b")
    story.poll((0, "a"), (1, "b"), consumer="whole")
    story.assign(t_0=0)
    story.poll((1, "b"))
    only(story.check(), "external-poll-skip", "'b'")


def test_an_offset_without_a_record_is_a_skip_only_if_offsets_are_dense() -> None:
    story = Story()
    story.send("a")
    story.ok("a", 0)
    story.send("b")
    story.ok("b", 2)
    story.poll((0, "a"), (2, "b"))
    assert story.check().is_clean
    only(story.check(dense=True), "int-poll-skip", "'b'")


def test_a_record_returned_twice_by_a_poll_is_internally_nonmonotonic() -> None:
    story = Story()
    story.written("a", "b")
    story.poll((0, "a"), (1, "b"), (1, "b"))
    only(story.check(), "int-nonmonotonic-poll", "'b'", "t-0@1")


def test_a_record_returned_again_by_a_later_poll_is_externally_nonmonotonic() -> None:
    story = Story()
    story.written("a", "b")
    story.poll((0, "a"), (1, "b"))
    story.poll((0, "a"))
    report = story.check()
    only(report, "external-nonmonotonic-poll", "'a'", "t-0@1")
    assert report.anomalies["external-nonmonotonic-poll"][0].operations == (4, 5)


def test_a_consumer_that_reads_below_its_assigned_offset_is_nonmonotonic() -> None:
    story = Story()
    story.written("a", "b")
    story.assign(t_0=None)
    story.poll((0, "a"), (1, "b"))
    story.assign(consumer="d", t_0=1)
    story.poll((0, "a"), consumer="d")
    only(story.check(), "external-nonmonotonic-poll", "d received 'a'")


def test_a_consumer_that_keeps_a_partition_continues_from_its_position() -> None:
    story = Story()
    story.written("a", "b")
    story.poll((0, "a"), (1, "b"), consumer="whole")
    story.assign(t_0=0)
    story.poll((0, "a"))
    story.assign(t_0=None, t_1=None)
    story.poll((0, "a"))
    only(story.check(), "external-nonmonotonic-poll", "'a'")


def test_a_consumer_may_read_a_reassigned_partition_from_any_offset() -> None:
    story = Story()
    story.written("a", "b", "c")
    story.poll((0, "a"), (1, "b"), (2, "c"), consumer="whole")
    story.assign(t_0=None)
    story.poll((0, "a"))
    story.assign()
    story.assign(t_0=None)
    story.poll((2, "c"))
    story.assign()
    story.assign(t_0=None)
    story.poll((0, "a"))
    assert story.check().is_clean


def test_a_record_that_no_producer_sent_is_an_unknown_value() -> None:
    story = Story()
    story.poll((0, "b"))
    only(story.check(), "unknown-value", "'b'")


def test_a_polled_record_whose_send_failed_is_an_aborted_read() -> None:
    story = Story()
    story.send("a")
    story.fail("a")
    assert story.check().is_clean
    story.poll((0, "a"))
    only(story.check(), "aborted-read", "'a'")


def test_a_send_without_an_outcome_may_or_may_not_be_polled() -> None:
    story = Story()
    story.send("a")
    story.info("a")
    story.send("b")
    story.send("c")
    story.info("c")
    story.poll((0, "a"))
    report = story.check()
    assert report.is_clean
    assert report.unknown == 3


def test_lag_is_the_longest_time_that_an_acknowledged_record_waits_for_a_consumer() -> None:
    story = Story()
    story.assign(t_0=0)  # at 0 s
    story.written("a", "b")  # "a" acknowledged at 2 s, "b" at 4 s
    story.poll()  # requested at 4.5 s
    story.poll((0, "a"))  # requested at 5.5 s: "b" has been known for 1.5 s
    story.poll((1, "b"))
    lag = story.check().worst_lag
    assert lag is not None
    assert (lag.seconds, lag.consumer, lag.partition, lag.next_offset, lag.operation) == (2.5, "c", P, 0, 5)


def test_a_consumer_that_receives_every_record_in_its_next_poll_has_no_lag() -> None:
    story = Story()
    story.assign(t_0=0)
    story.poll()
    story.written("a")
    story.poll((0, "a"))
    story.poll()
    assert story.check().worst_lag is None


def test_a_consumer_that_rereads_has_no_lag_and_must_not_skip_records() -> None:
    story = Story()
    story.assign(t_0=0)
    story.written("a", "b", "c")
    story.poll((0, "a"), (1, "b"), (2, "c"))
    story.assign("again", t_0=0)
    story.poll((0, "a"), (2, "c"), consumer="again")
    story.poll(consumer="again")
    report = check(story.operations, rereaders=["c", "again"])
    assert report.worst_lag is None
    only(report, "int-poll-skip", "1 records skipped")


def test_a_commit_after_the_next_owners_commit_is_an_overlap() -> None:
    story = Story()
    story.member("m", P)
    story.commit("m", 1)
    story.member("n", P)
    story.commit("m", 2, took_s=1.5)  # requested before "n" had the partition
    story.commit("n", 2)
    assert story.check().is_clean
    story.commit("m", 3)
    only(story.check(), "ownership-overlap", "m owned t-0 in group g", "after n had committed it at 4.0 s")


def test_a_commit_in_flight_during_the_next_owners_commit_is_no_overlap() -> None:
    story = Story()
    story.member("m", P)
    story.member("n", P)
    story.commit("n", 1)
    story.commit("m", 1, took_s=1.5)
    assert story.check().is_clean


def test_a_poll_later_than_a_session_after_the_next_owners_commit_is_an_overlap() -> None:
    story = Story()
    story.written("a", "b", "c")
    story.member("m", P)
    story.poll((0, "a"), consumer="m")
    story.member("n", P)
    story.poll((0, "a"), consumer="n")
    story.commit("n", 1)  # at 10 s
    story.poll((1, "b"), consumer="m")
    story.poll((1, "b"), (2, "c"), consumer="n")
    assert story.check(session_s=3.0).is_clean
    story.poll(consumer="m")
    story.poll((2, "c"), consumer="m")  # invoked at 13.5 s
    only(story.check(session_s=3.0), "ownership-overlap", "m owned t-0", "records of it at 13.5 s", "n had committed")
    assert story.check(session_s=4.0).is_clean
    assert story.check().is_clean


def test_a_partition_that_is_revoked_and_assigned_again_is_no_overlap() -> None:
    story = Story()
    story.written("a", "b")
    for owner, other in (("m", "n"), ("n", "m"), ("m", "n")):
        story.member(other)
        story.member(owner, P)
        story.poll((0, "a"), (1, "b"), consumer=owner)
        story.commit(owner, 2)
    assert story.check(session_s=0.0).is_clean


def test_owners_in_different_groups_or_of_different_partitions_do_not_overlap() -> None:
    story = Story()
    story.member("m", P)
    story.member("n", "t-1")
    story.member("x", P, group="h")
    for _ in range(3):
        story.commit("m", 1)
        story.commit("n", 1, partition="t-1")
        story.commit("x", 1, group="h")
    assert story.check(session_s=0.0).is_clean


def test_a_polled_record_that_the_final_reader_does_not_find_has_vanished() -> None:
    story = Story()
    story.assign("c", t_0=0)
    story.written("a", "b")
    story.poll((0, "a"), (1, "b"))
    story.assign("last", t_0=0)
    story.poll((0, "a"), consumer="last")
    only(story.check(final="last"), "vanished", "'b'", "t-0@1", "last did not find it")
    story.poll((1, "b"), consumer="last")
    assert story.check(final="last").is_clean


def test_a_polled_record_can_vanish_even_if_its_send_has_no_outcome() -> None:
    story = Story()
    story.send("a")
    story.info("a")
    story.poll((0, "a"))
    story.assign("last", t_0=0)
    only(story.check(final="last"), "vanished", "'a'")


def test_a_record_below_the_log_start_has_not_vanished() -> None:
    story = Story()
    story.assign("c", t_0=0)
    story.written("a", "b")
    story.poll((0, "a"), (1, "b"))
    story.assign("last", t_0=1)
    story.poll((1, "b"), consumer="last")
    assert story.check(final="last").is_clean


def test_a_consumer_that_does_not_reach_the_log_end_lags() -> None:
    story = Story()
    story.assign("c", t_0=0)
    story.assign("again", t_0=0)
    story.written("a", "b")
    story.poll((0, "a"))
    story.assign("last", t_0=0)
    story.poll((0, "a"), (1, "b"), consumer="last")
    report = check(story.operations, final="last", rereaders=["again"])
    only(report, "lag-at-end", "c is at t-0@1", "ends at 2")


def test_a_group_lags_until_any_of_its_members_commits_the_log_end() -> None:
    story = Story()
    story.written("a", "b")
    story.member("m", P)
    story.poll((0, "a"), consumer="m")
    story.commit("m", 1)
    story.member("m")
    story.assign("last", t_0=0)
    story.poll((0, "a"), (1, "b"), consumer="last")
    only(story.check(final="last"), "lag-at-end", "group g is at t-0@1")
    story.member("n", P)
    story.commit("n", 2)
    assert story.check(final="last").is_clean


def test_a_group_that_never_commits_lags() -> None:
    story = Story()
    story.written("a")
    story.member("m", P)
    story.assign("last", t_0=0)
    story.poll((0, "a"), consumer="last")
    only(story.check(final="last"), "lag-at-end", "group g is at t-0@0")


def test_a_history_without_its_final_reader_is_an_error() -> None:
    story = Story()
    story.written("a")
    with pytest.raises(HistoryError, match="last was assigned no partition"):
        story.check(final="last")


def test_a_history_that_sends_a_value_twice_is_an_error() -> None:
    story = Story()
    story.send("a")
    story.send("a")
    with pytest.raises(HistoryError, match="operation 1 sends 'a' a second time"):
        story.check()


def test_a_history_with_an_unmatched_or_second_send_outcome_is_an_error() -> None:
    story = Story()
    story.ok("a", 0)
    with pytest.raises(HistoryError, match="never began"):
        story.check()
    story = Story()
    story.written("a")
    story.info("a")
    with pytest.raises(HistoryError, match="a second time"):
        story.check()


def test_a_history_round_trips_through_its_file(tmp_path: Path) -> None:
    story = Story()
    story.assign(t_0=0, t_1=None)
    story.written("a", "ü \u2028")
    story.send("c")
    story.fail("c")
    story.send("d")
    story.info("d")
    story.poll((0, "a"))
    story.poll()
    story.member("m", P)
    story.commit("m", 1)
    story.operations += [
        Assigned(10.0, "c", {P: 0}, is_read_committed=True),
        Polled(11.0, 10.5, "c", ((P, 0, "a"),), "p/1"),
        SendInvoked(12.0, "p", "e", P, "p/1"),
        OffsetsSent(13.0, "p", "p/1", "g", {P: 1}),
        TransactionEndInvoked(14.0, "p", "p/1", is_commit=True),
        TransactionEnded(15.0, "p", "p/1", "commit"),
        OffsetsFetched(16.0, 15.5, "g", {P: 1}),
    ]
    path = tmp_path / "history.jsonl"
    write_history(path, story.operations)
    assert read_history(path) == story.operations
    assert len(path.read_bytes().splitlines()) == len(story.operations)


def test_the_error_for_an_invalid_line_states_its_number() -> None:
    lines = [*to_lines([SendInvoked(0.0, "p", "a")]), b"\n", b'{"op":"dance"}\n']
    with pytest.raises(HistoryError, match="line 3"):
        list(from_lines(lines))
    with pytest.raises(HistoryError, match="line 1"):
        list(from_lines(["{"]))


def test_histories_are_merged_in_time_order() -> None:
    sends: list[Operation] = [SendInvoked(0.0, "p", "a"), SendAcknowledged(2.0, "p", "a", P, 0)]
    polls: list[Operation] = [Polled(1.0, 0.5, "c", ()), Polled(3.0, 2.5, "c", ((P, 0, "a"),))]
    assert merge([sends, polls]) == [sends[0], polls[0], sends[1], polls[1]]
