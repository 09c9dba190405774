"""Committed offsets: which members may commit, what is stored, and when it expires."""

from __future__ import annotations

import pytest
from tests.groups.play import GROUP, Play, subscription

from chronik.groups.step import GroupSettings
from chronik.wire.errors import ErrorCode

RETENTION_MS = 1_000_000


@pytest.fixture
def play() -> Play:
    return Play(GroupSettings(initial_rebalance_delay_ms=0, offsets_retention_ms=RETENTION_MS))


def expire(play: Play) -> None:
    play.run(play.coordinator.expire_offsets(play.at))


def test_committed_offset_of_a_member_is_readable(play: Play) -> None:
    (member,) = play.stable_group(1)
    token = play.commit(7, generation=1, member_id=member, metadata="why")
    assert play.commit_error(token) is ErrorCode.none
    committed = play.offsets()[("t", 0)]
    assert committed == (7, 1, "why", play.wall_ms)


def test_commit_is_acknowledged_and_visible_only_after_its_append(play: Play) -> None:
    play.holds_appends = True
    token = play.commit(7)
    assert token not in play.answers
    assert play.offset() is None
    play.write()
    assert play.commit_error(token) is ErrorCode.none
    assert play.offset() == 7


def test_commits_take_effect_in_log_order(play: Play) -> None:
    play.holds_appends = True
    play.commit(7)
    play.commit(3)
    play.write(1)
    assert play.offset() == 7
    play.write(1)
    assert play.offset() == 3


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (ErrorCode.not_enough_replicas, ErrorCode.coordinator_not_available),
        (ErrorCode.not_enough_replicas_after_append, ErrorCode.coordinator_not_available),
        (ErrorCode.not_leader_or_follower, ErrorCode.not_coordinator),
        (ErrorCode.kafka_storage_error, ErrorCode.not_coordinator),
        (ErrorCode.request_timed_out, ErrorCode.coordinator_not_available),
        (ErrorCode.message_too_large, ErrorCode.invalid_commit_offset_size),
        (ErrorCode.unknown_server_error, ErrorCode.unknown_server_error),
    ],
)
def test_failed_commit_returns_an_error_and_keeps_the_previous_offset(
    play: Play, error: ErrorCode, answer: ErrorCode
) -> None:
    play.commit(7)
    play.append_error = error
    assert play.commit_error(play.commit(8)) is answer
    assert play.offset() == 7


def test_failed_first_commit_leaves_no_group(play: Play) -> None:
    play.append_error = ErrorCode.kafka_storage_error
    play.commit(8)
    assert play.coordinator.groups() == []


def test_commit_of_another_generation_is_refused(play: Play) -> None:
    (member,) = play.stable_group(1)
    assert play.commit_error(play.commit(generation=0, member_id=member)) is ErrorCode.illegal_generation
    assert play.commit_error(play.commit(generation=2, member_id=member)) is ErrorCode.illegal_generation


def test_commit_of_an_unknown_member_is_refused(play: Play) -> None:
    play.stable_group(1)
    assert play.commit_error(play.commit(generation=1, member_id="ghost")) is ErrorCode.unknown_member_id
    assert play.commit_error(play.commit(generation=-1)) is ErrorCode.unknown_member_id
    assert play.commit_error(play.commit(generation=-1, member_id="ghost")) is ErrorCode.unknown_member_id


def test_commit_with_a_generation_to_an_unknown_group_is_refused(play: Play) -> None:
    assert play.commit_error(play.commit(generation=1, member_id="m")) is ErrorCode.illegal_generation


def test_simple_consumer_commits_to_a_group_without_members(play: Play) -> None:
    assert play.commit_error(play.commit(4)) is ErrorCode.none
    assert play.state == "Empty"
    (member,) = play.stable_group(1)
    play.leave((member, None))
    assert play.commit_error(play.commit(5)) is ErrorCode.none
    assert play.offset() == 5


def test_member_may_commit_in_preparing_rebalance_but_not_in_completing_rebalance(play: Play) -> None:
    (member,) = play.stable_group(1)
    play.join()
    assert play.commit_error(play.commit(generation=1, member_id=member)) is ErrorCode.none
    play.join(member)
    assert play.commit_error(play.commit(generation=2, member_id=member)) is ErrorCode.rebalance_in_progress


def test_commit_keeps_the_session_alive(play: Play) -> None:
    (member,) = play.stable_group(1)
    for _ in range(4):
        play.wait(9_000)
        assert play.commit_error(play.commit(generation=1, member_id=member)) is ErrorCode.none


def test_commit_with_too_large_metadata_is_refused(play: Play) -> None:
    assert play.commit_error(play.commit(metadata="x" * 4_096)) is ErrorCode.none
    assert play.commit_error(play.commit(metadata="x" * 4_097)) is ErrorCode.offset_metadata_too_large
    assert play.commit_error(play.commit(metadata="ä" * 2_049)) is ErrorCode.offset_metadata_too_large


def test_offsets_may_be_committed_with_an_empty_group_id(play: Play) -> None:
    assert play.commit_error(play.commit(group_id="")) is ErrorCode.none
    assert play.offset(group_id="") == 5


# Reading


def test_unknown_group_has_no_offsets_and_no_error(play: Play) -> None:
    assert play.coordinator.committed("nobody", [("t", 0)]) == (ErrorCode.none, {("t", 0): None})
    assert play.coordinator.committed("nobody", None) == (ErrorCode.none, {})


def test_partition_without_a_committed_offset_reads_as_none(play: Play) -> None:
    play.commit(4)
    error, committed = play.coordinator.committed(GROUP, [("t", 1), ("t", 0)])
    assert error is ErrorCode.none
    assert committed[("t", 1)] is None
    assert committed[("t", 0)] is not None


# Deleting


def test_group_with_members_is_not_deleted(play: Play) -> None:
    play.stable_group(1)
    assert play.error(play.delete_group()) is ErrorCode.non_empty_group


def test_deletion_of_an_unknown_group_is_refused(play: Play) -> None:
    assert play.error(play.delete_group()) is ErrorCode.group_id_not_found


def test_deleted_group_and_its_offsets_stay_deleted_after_a_restart(play: Play) -> None:
    (member,) = play.stable_group(1)
    play.commit(generation=1, member_id=member)
    play.leave((member, None))
    assert play.error(play.delete_group()) is ErrorCode.none
    assert play.coordinator.groups() == []
    assert play.offsets() == {}
    play.restart()
    assert play.coordinator.groups() == []
    assert play.offsets() == {}


def test_group_deletion_removes_the_offsets_of_pending_commits(play: Play) -> None:
    play.commit(4)
    play.holds_appends = True
    commit = play.commit(5, partition=("t", 1))
    delete = play.delete_group()
    play.write()
    assert play.commit_error(commit) is ErrorCode.none
    assert play.error(delete) is ErrorCode.none
    play.restart()
    assert play.offsets() == {}


def test_group_refuses_changes_while_it_is_being_deleted(play: Play) -> None:
    play.commit(4)
    play.holds_appends = True
    delete = play.delete_group()
    retry = ErrorCode.coordinator_load_in_progress
    assert play.commit_error(play.commit(5)) is retry
    assert play.error(play.join()) is retry
    assert play.error(play.delete_group()) is retry
    assert play.offset() == 4
    play.write()
    assert play.error(delete) is ErrorCode.none


def test_group_remains_if_its_deletion_fails(play: Play) -> None:
    play.commit(4)
    play.append_error = ErrorCode.not_enough_replicas
    assert play.error(play.delete_group()) is ErrorCode.coordinator_not_available
    play.append_error = ErrorCode.none
    assert play.offset() == 4
    assert play.commit_error(play.commit(5)) is ErrorCode.none


def test_offsets_of_an_empty_group_can_be_deleted(play: Play) -> None:
    play.commit(4)
    play.commit(5, partition=("u", 0))
    assert play.delete_offsets(("t", 0)) == {"error_code": ErrorCode.none, "errors": {("t", 0): ErrorCode.none}}
    assert list(play.offsets()) == [("u", 0)]
    play.restart()
    assert list(play.offsets()) == [("u", 0)]


def test_offsets_of_topics_that_members_subscribe_to_are_not_deleted(play: Play) -> None:
    (member,) = play.stable_group(1)
    play.commit(generation=1, member_id=member)
    play.commit(generation=1, member_id=member, partition=("u", 0))
    errors = play.delete_offsets(("t", 0), ("u", 0))["errors"]
    assert errors == {("t", 0): ErrorCode.group_subscribed_to_topic, ("u", 0): ErrorCode.none}
    assert list(play.offsets()) == [("t", 0)]


def test_offsets_of_a_connect_group_with_members_are_not_deleted(play: Play) -> None:
    play.stable_group(1, protocol_type="connect", protocols=(("default", b""),))
    assert play.delete_offsets(("t", 0))["error_code"] is ErrorCode.non_empty_group


def test_offset_deletion_for_an_unknown_group_is_refused(play: Play) -> None:
    assert play.delete_offsets(("t", 0))["error_code"] is ErrorCode.group_id_not_found


def test_topic_deletion_removes_its_offsets_from_every_group(play: Play) -> None:
    play.commit(4)
    play.commit(4, group_id="other")
    play.commit(4, group_id="other", partition=("u", 0))
    play.run(play.coordinator.topics_deleted(["t"], play.at))
    assert play.offsets() == {}
    assert list(play.offsets("other")) == [("u", 0)]
    assert play.coordinator.committed_topics() == ["u"]


# Expiry


def test_offsets_of_a_group_with_members_do_not_expire(play: Play) -> None:
    (member,) = play.stable_group(1)
    play.commit(generation=1, member_id=member)
    play.wall_ms += 2 * RETENTION_MS
    expire(play)
    assert play.offset() == 5


def test_offsets_expire_after_their_group_is_empty_for_the_retention_time(play: Play) -> None:
    (member,) = play.stable_group(1)
    play.commit(generation=1, member_id=member)
    play.wall_ms += 2 * RETENTION_MS
    play.leave((member, None))
    play.wall_ms += RETENTION_MS - 1
    expire(play)
    assert play.offset() == 5
    play.wall_ms += 1
    expire(play)
    assert play.offsets() == {}
    assert play.coordinator.groups() == []


def test_retention_time_continues_across_a_restart(play: Play) -> None:
    (member,) = play.stable_group(1)
    play.commit(generation=1, member_id=member)
    play.leave((member, None))
    play.wall_ms += RETENTION_MS // 2
    play.restart()
    expire(play)
    assert play.offset() == 5
    play.wall_ms += RETENTION_MS // 2
    expire(play)
    assert play.offsets() == {}


def test_offsets_of_a_simple_group_expire_by_commit_time(play: Play) -> None:
    play.commit(4)
    play.wall_ms += RETENTION_MS // 2
    play.commit(4, partition=("t", 1))
    play.wall_ms += RETENTION_MS // 2
    expire(play)
    assert list(play.offsets()) == [("t", 1)]


def test_offset_committed_to_an_empty_group_is_retained_for_the_full_time(play: Play) -> None:
    (member,) = play.stable_group(1)
    play.leave((member, None))
    play.wall_ms += RETENTION_MS - 1
    play.commit(9)
    play.wall_ms += 1
    expire(play)
    assert play.offset() == 9


def test_offsets_of_unsubscribed_topics_expire_by_commit_time(play: Play) -> None:
    (member,) = play.stable_group(1, protocols=(("range", subscription("u")),))
    play.commit(generation=1, member_id=member)
    play.commit(generation=1, member_id=member, partition=("u", 0))
    play.wall_ms += RETENTION_MS
    expire(play)
    assert list(play.offsets()) == [("u", 0)]


def test_pending_commit_prevents_offset_expiry(play: Play) -> None:
    play.commit(4)
    play.wall_ms += RETENTION_MS
    play.holds_appends = True
    play.commit(5)
    expire(play)
    play.write()
    assert play.offset() == 5


def test_expiry_removes_an_empty_group_without_offsets(play: Play) -> None:
    (member,) = play.stable_group(1)
    play.leave((member, None))
    expire(play)
    assert play.coordinator.groups() == []
    play.restart()
    assert play.coordinator.groups() == []
