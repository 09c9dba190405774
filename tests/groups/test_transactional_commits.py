"""Offsets in transactions: when they take effect, which members may commit them, and what keeps them pending."""

from __future__ import annotations

import pytest
from tests.groups.play import GROUP, PARTITION, PRODUCER, SESSION_MS, Held, Marker, Play, load, replay

from chronik.groups.offsets import Producer
from chronik.groups.records import write_group_key
from chronik.groups.step import GroupSettings
from chronik.wire.errors import ErrorCode

RETENTION_MS = 1_000_000
OTHER = Producer(8, 0)


@pytest.fixture
def play() -> Play:
    return Play(GroupSettings(initial_rebalance_delay_ms=0, offsets_retention_ms=RETENTION_MS))


def expire(play: Play) -> None:
    play.run(play.coordinator.expire_offsets(play.at))


# Taking effect


def test_offset_of_a_transaction_takes_effect_when_it_commits(play: Play) -> None:
    play.commit(3)
    assert play.commit_error(play.commit(7, producer=PRODUCER)) is ErrorCode.none
    assert play.offset() == 3
    play.end_transaction()
    assert play.offset() == 7


def test_offset_of_an_aborted_transaction_has_no_effect(play: Play) -> None:
    play.commit(3)
    play.commit(7, producer=PRODUCER)
    play.end_transaction(is_commit=False)
    assert play.offset() == 3
    assert play.is_stable()


def test_offsets_are_appended_in_a_batch_of_the_producer(play: Play) -> None:
    play.holds_appends = True
    play.commit(7, producer=PRODUCER)
    play.commit(8)
    assert [append.producer for append in play.held] == [PRODUCER, None]


def test_marker_ends_only_its_own_transaction(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    play.commit(8, producer=OTHER, partition=("t", 1))
    play.end_transaction(OTHER, is_commit=False)
    assert not play.is_stable()
    assert play.is_stable(("t", 1))
    play.end_transaction()
    assert play.offsets().keys() == {("t", 0)}


def test_marker_ends_the_offsets_of_all_groups(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    play.commit(8, producer=PRODUCER, group_id="other")
    play.end_transaction()
    assert (play.offset(), play.offset(group_id="other")) == (7, 8)


def test_later_commit_is_not_replaced_by_the_transaction(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    play.commit(9)
    assert play.offset() == 9
    assert not play.is_stable(), "the transaction is open"
    play.end_transaction()
    assert play.offset() == 9
    assert play.is_stable()


def test_later_transaction_is_not_replaced_by_one_that_commits_after_it(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    play.commit(9, producer=OTHER)
    play.end_transaction(OTHER)
    play.end_transaction(PRODUCER)
    assert play.offset() == 9


def test_later_transaction_replaces_one_that_commits_before_it(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    play.commit(9, producer=OTHER)
    play.end_transaction(PRODUCER)
    assert play.offset() == 7
    play.end_transaction(OTHER)
    assert play.offset() == 9


def test_last_offset_of_a_transaction_counts(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    play.commit(9, producer=OTHER)
    play.commit(8, producer=PRODUCER)
    play.end_transaction(OTHER)
    play.end_transaction(PRODUCER)
    assert play.offset() == 8


def test_marker_with_the_next_epoch_ends_the_transaction(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    play.end_transaction(Producer(PRODUCER.producer_id, PRODUCER.epoch + 1), is_commit=False)
    assert play.is_stable()


# Reading


def test_partition_is_unstable_from_the_commit_request_to_the_marker(play: Play) -> None:
    play.holds_appends = True
    play.commit(7, producer=PRODUCER)
    assert not play.is_stable()
    play.write()
    assert not play.is_stable()
    assert play.is_stable(("t", 1))
    play.end_transaction()
    assert play.is_stable()


def test_plain_commit_leaves_the_partition_stable(play: Play) -> None:
    play.holds_appends = True
    play.commit(7)
    assert play.is_stable()
    play.write()
    assert play.is_stable()


@pytest.mark.parametrize("error", [ErrorCode.not_enough_replicas, ErrorCode.invalid_txn_state])
def test_offset_that_was_not_written_is_not_pending(play: Play, error: ErrorCode) -> None:
    play.append_error = error
    assert play.commit_error(play.commit(7, producer=PRODUCER)) is not ErrorCode.none
    assert play.is_stable()
    assert play.coordinator.groups() == []
    play.end_transaction()
    assert play.offsets() == {}


def test_offset_whose_append_timed_out_is_pending(play: Play) -> None:
    play.append_error = ErrorCode.request_timed_out
    assert play.commit_error(play.commit(7, producer=PRODUCER)) is ErrorCode.coordinator_not_available
    assert not play.is_stable()
    # The marker follows the offset in the log: if the marker is committed, so is the offset.
    play.end_transaction()
    assert play.offset() == 7


# The order of reports


@pytest.mark.parametrize(("is_commit", "offset"), [(True, 7), (False, 3)])
def test_marker_may_be_reported_before_the_append_that_it_decides(play: Play, is_commit: bool, offset: int) -> None:
    play.commit(3)
    play.holds_appends = True
    play.commit(7, producer=PRODUCER)
    (append,) = play.held
    play.put_in_log(append)
    play.end_transaction(is_commit=is_commit)
    assert play.offset() == 3
    play.held.clear()
    play.run(play.coordinator.appended(append.token, ErrorCode.none, play.at))
    assert play.offset() == offset
    assert play.is_stable()


def test_marker_does_not_end_a_transaction_of_a_higher_epoch(play: Play) -> None:
    play.commit(7, producer=Producer(PRODUCER.producer_id, 2))
    play.coordinator.transaction_ended(PARTITION, Producer(PRODUCER.producer_id, 1), True)
    assert play.offset() is None
    assert not play.is_stable()


def test_marker_of_another_partition_has_no_effect(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    play.coordinator.transaction_ended(PARTITION + 1, PRODUCER, True)
    assert play.offset() is None


# Members


def test_transactional_commit_of_another_generation_is_refused(play: Play) -> None:
    (member,) = play.stable_group(1)
    for generation, error in (
        (0, ErrorCode.illegal_generation),
        (1, ErrorCode.none),
        (2, ErrorCode.illegal_generation),
    ):
        token = play.commit(generation=generation, member_id=member, producer=PRODUCER)
        assert play.commit_error(token) is error


def test_transactional_commit_of_an_unknown_member_is_refused(play: Play) -> None:
    play.stable_group(1)
    unknown = ErrorCode.unknown_member_id
    assert play.commit_error(play.commit(generation=1, member_id="ghost", producer=PRODUCER)) is unknown
    assert play.commit_error(play.commit(generation=-1, member_id="ghost", producer=PRODUCER)) is unknown


def test_transactional_commit_of_a_replaced_static_member_is_fenced(play: Play) -> None:
    (member,) = play.stable_group(1, instance_id="a")
    play.join(instance_id="a")
    token = play.commit(generation=1, member_id=member, instance_id="a", producer=PRODUCER)
    assert play.commit_error(token) is ErrorCode.fenced_instance_id


def test_producer_without_group_metadata_may_commit_to_a_group_with_members(play: Play) -> None:
    play.stable_group(1)
    assert play.commit_error(play.commit(7, producer=PRODUCER)) is ErrorCode.none


def test_member_may_commit_transactionally_in_completing_rebalance(play: Play) -> None:
    (member,) = play.stable_group(1)
    play.join(member, protocols=(("range", b"changed"),))
    assert play.state == "CompletingRebalance"
    assert play.commit_error(play.commit(generation=2, member_id=member, producer=PRODUCER)) is ErrorCode.none


def test_transactional_commit_does_not_extend_the_session(play: Play) -> None:
    (member,) = play.stable_group(1)
    play.wait(SESSION_MS - 1)
    play.commit(generation=1, member_id=member, producer=PRODUCER)
    play.wait(1)
    assert play.heartbeat(member, 1) is ErrorCode.unknown_member_id


def test_transactional_commit_with_a_generation_to_an_unknown_group_is_refused(play: Play) -> None:
    token = play.commit(generation=1, member_id="m", producer=PRODUCER)
    assert play.commit_error(token) is ErrorCode.illegal_generation
    assert play.coordinator.groups() == []


def test_transactional_commit_with_an_empty_group_id_is_refused(play: Play) -> None:
    assert play.commit_error(play.commit(group_id="", producer=PRODUCER)) is ErrorCode.invalid_group_id


def test_transactional_commit_with_too_large_metadata_is_refused(play: Play) -> None:
    token = play.commit(metadata="x" * 4_097, producer=PRODUCER)
    assert play.commit_error(token) is ErrorCode.offset_metadata_too_large
    assert play.is_stable()
    assert play.coordinator.groups() == []


# Deletion and expiry


def test_group_with_only_pending_offsets_exists_until_an_abort(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    assert play.state == "Empty"
    play.end_transaction(is_commit=False)
    assert play.coordinator.groups() == []


def test_deletion_of_a_group_removes_its_pending_offsets(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    assert play.error(play.delete_group()) is ErrorCode.none
    play.end_transaction()
    assert play.offsets() == {}
    play.restart()
    assert play.offsets() == {}


def test_offset_committed_after_the_deletion_of_its_group_is_kept(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    play.delete_group()
    play.commit(8, producer=PRODUCER)
    play.end_transaction()
    assert play.offset() == 8


def test_offset_deletion_removes_pending_offsets(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    play.commit(8, producer=PRODUCER, partition=("t", 1))
    assert play.delete_offsets(("t", 0))["errors"] == {("t", 0): ErrorCode.none}
    assert play.is_stable()
    play.end_transaction()
    assert play.offsets().keys() == {("t", 1)}


def test_topic_deletion_removes_pending_offsets(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    play.commit(8, producer=PRODUCER, partition=("u", 0))
    assert play.coordinator.committed_topics() == ["t", "u"]
    play.run(play.coordinator.topics_deleted(["t"], play.at))
    play.end_transaction()
    assert play.offsets().keys() == {("u", 0)}


def test_offset_does_not_expire_while_a_transaction_may_change_it(play: Play) -> None:
    play.commit(3)
    play.commit(7, producer=PRODUCER)
    play.wall_ms += 2 * RETENTION_MS
    expire(play)
    assert play.offset() == 3
    play.end_transaction(is_commit=False)
    expire(play)
    assert play.coordinator.groups() == []


def test_group_does_not_expire_while_it_has_pending_offsets(play: Play) -> None:
    (member,) = play.stable_group(1)
    play.commit(7, generation=1, member_id=member, producer=PRODUCER)
    play.leave((member, None))
    play.wall_ms += 2 * RETENTION_MS
    expire(play)
    assert play.state == "Empty"
    play.end_transaction()
    assert play.offset() == 7


# Failover


@pytest.mark.parametrize(("is_commit", "offset"), [(True, 7), (False, 3)])
def test_pending_offset_survives_a_coordinator_restart(play: Play, is_commit: bool, offset: int) -> None:
    play.commit(3)
    play.commit(7, producer=PRODUCER)
    play.restart()
    assert play.offset() == 3
    assert not play.is_stable()
    play.end_transaction(is_commit=is_commit)
    assert play.offset() == offset
    assert play.is_stable()


def test_order_of_pending_offsets_survives_a_coordinator_restart(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    play.commit(8, producer=OTHER)
    play.commit(9)
    play.commit(10, producer=OTHER)
    play.restart()
    play.end_transaction(PRODUCER)
    assert play.offset() == 9
    play.end_transaction(OTHER)
    assert play.offset() == 10


def test_markers_in_the_log_are_applied_when_it_is_loaded(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    play.end_transaction()
    play.commit(8, producer=PRODUCER)
    play.commit(9, producer=OTHER, partition=("t", 1))
    play.end_transaction(OTHER, is_commit=False)
    play.restart()
    assert play.offset() == 7
    assert play.is_stable(("t", 1))
    assert not play.is_stable()


def test_marker_that_is_written_while_groups_load_takes_effect_after_loading(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    coordinator = Play(is_loaded=False).coordinator
    coordinator.start_loading(PARTITION)
    coordinator.transaction_ended(PARTITION, PRODUCER, True)
    replay(coordinator, PARTITION, play.log)
    coordinator.finish_loading(PARTITION, play.at)
    play.coordinator = coordinator
    assert play.offset() == 7
    assert play.is_stable()


def test_unloading_answers_a_pending_transactional_commit_and_forgets_its_markers(play: Play) -> None:
    play.holds_appends = True
    token = play.commit(7, producer=PRODUCER)
    (append,) = play.held
    play.end_transaction()
    play.run(play.coordinator.unload(PARTITION, play.at))
    assert play.commit_error(token) is ErrorCode.not_coordinator
    load(play.coordinator, PARTITION, [], play.at)
    assert play.coordinator.appended(append.token, ErrorCode.none, play.at) == []
    play.held.clear()
    play.holds_appends = False
    play.commit(8, producer=PRODUCER)
    assert play.offset() is None


def test_loading_skips_unreadable_pending_records(play: Play) -> None:
    play.commit(7, producer=PRODUCER)
    unreadable = [
        Held((b"\x00\x01", b"cut"), PRODUCER),
        Held((write_group_key("strange"), b"x"), PRODUCER),
    ]
    coordinator = Play(is_loaded=False).coordinator
    assert load(coordinator, PARTITION, [*unreadable, *play.log, Marker(OTHER, True)], play.at) == 2
    assert coordinator.unstable_partitions(GROUP) == {("t", 0)}
