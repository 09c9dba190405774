"""Share groups of KIP-932: epochs, assignments, fencing, timeouts, the state of partitions, failed writes, loading."""

from __future__ import annotations

from typing import Any

import pytest
from tests.groups.play import GROUP
from tests.groups.share_play import SharePlay

from chronik.groups.step import DeleteShares, GroupSettings, InitializeShares
from chronik.wire.errors import ErrorCode

SESSION_MS = GroupSettings().share_session_timeout_ms


@pytest.mark.parametrize(
    ("epoch", "changes", "error"),
    [
        (0, {}, ErrorCode.none),
        (0, {"member_id": ""}, ErrorCode.invalid_request),
        (0, {"group_id": ""}, ErrorCode.invalid_request),
        (0, {"topics": None}, ErrorCode.invalid_request),
        (0, {"topics": ()}, ErrorCode.invalid_request),
        (0, {"rack": ""}, ErrorCode.invalid_request),
        (0, {"member_id": "m" * 40_000}, ErrorCode.invalid_request),
        (0, {"topics": tuple(f"{number:0200}" for number in range(6_000))}, ErrorCode.invalid_request),
        (-2, {}, ErrorCode.invalid_request),
        (-1, {}, ErrorCode.group_id_not_found),
        (5, {}, ErrorCode.group_id_not_found),
    ],
)
def test_the_first_request_is_checked(epoch: int, changes: dict[str, Any], error: ErrorCode) -> None:
    play = SharePlay()
    token = play.send("a", epoch, **{"topics": ("t",), **changes})
    assert play.answers[token]["error_code"] is error
    has_group = error is ErrorCode.none
    assert [group["group_id"] for group in play.coordinator.groups()] == ([GROUP] if has_group else [])


def test_a_partition_is_assigned_once_its_state_is_initialized() -> None:
    play = SharePlay()
    play.holds_shares = True
    play.took("a", play.send("a", 0, topics=("t",)))
    assert play.owned["a"] == frozenset()
    (request,) = play.share_requests
    assert isinstance(request, InitializeShares)
    assert set(request.offsets.values()) == {-1}, "the leader selects the start offset"
    play.beats("a")
    assert len(play.share_requests) == 1, "one request at a time"
    play.answer_shares()
    assert play.beats("a")["assignment"] is not None
    assert play.sizes("a") == [4]


def test_state_that_could_not_be_initialized_is_initialized_by_the_next_heartbeat() -> None:
    play = SharePlay()
    play.share_error = ErrorCode.coordinator_not_available
    play.took("a", play.send("a", 0, topics=("t",)))
    play.beats("a")
    assert play.sizes("a") == [0]
    play.share_error = ErrorCode.none
    play.beats("a")
    play.beats("a")
    assert play.sizes("a") == [4]


def test_a_new_coordinator_initializes_what_was_interrupted() -> None:
    play = SharePlay()
    play.holds_shares = True
    play.took("a", play.send("a", 0, topics=("t",)))
    play.share_requests.clear()
    play.restart()
    play.holds_shares = False
    play.beats("a")
    play.beats("a")
    assert play.sizes("a") == [4]


def test_members_share_partitions_if_there_are_more_of_them() -> None:
    play = SharePlay()
    members = [f"m{index}" for index in range(6)]
    for member in members:
        play.joins(member)
    for member in members:
        play.beats(member)
    assert sorted(play.sizes(*members)) == [1, 1, 1, 1, 2, 2]
    shared = [partition for member in members for partition in play.owned[member]]
    assert all(shared.count(("t", index)) == 2 for index in range(4))


def test_a_heartbeat_without_a_change_writes_nothing() -> None:
    play = SharePlay()
    play.joins("a")
    written = len(play.log)
    play.beats("a")
    play.beats("a", topics=("t",))
    assert len(play.log) == written


def test_members_follow_topics_that_grow_are_deleted_and_come_back() -> None:
    play = SharePlay()
    play.joins("a", "t", "u")
    assert play.sizes("a") == [4], "u does not exist"
    play.change_topic("u", 1)
    play.change_topic("t", 6)
    play.beats("a")
    play.beats("a")
    assert play.sizes("a") == [7]
    old_id = play.topic_id
    play.change_topic("t", None)
    play.beats("a")
    assert play.owned["a"] == {("u", 0)}
    assert old_id not in play.coordinator.share_topics(GROUP).initialized
    play.change_topic("t", 2)
    play.beats("a")
    play.beats("a")
    assert play.sizes("a") == [3]


@pytest.mark.parametrize(
    ("epoch", "error"),
    [(3, ErrorCode.none), (2, ErrorCode.none), (1, ErrorCode.fenced_member_epoch), (4, ErrorCode.fenced_member_epoch)],
)
def test_only_the_epoch_before_is_accepted_again(epoch: int, error: ErrorCode) -> None:
    play = SharePlay()
    play.joins("a")
    play.joins("b")
    play.beats("a")
    assert play.epochs == {"a": 3, "b": 3}
    assert play.answers[play.send("a", epoch)]["error_code"] is error


def test_a_member_whose_session_ends_is_removed() -> None:
    play = SharePlay()
    play.joins("a")
    play.joins("b")
    play.wait(SESSION_MS - 1)
    play.beats("a")
    play.wait(1)
    assert [member["member_id"] for member in play.described_share()["members"]] == ["a"]
    assert play.answers[play.send("b", play.epochs["b"])]["error_code"] is ErrorCode.unknown_member_id
    play.beats("a")
    assert play.sizes("a") == [4]


def test_the_session_and_interval_of_a_group_are_its_configs() -> None:
    own = {"share.session.timeout.ms": "1000", "share.heartbeat.interval.ms": "100"}
    play = SharePlay(GroupSettings(group_configs=lambda group: own if group == GROUP else {}))
    assert play.joins("a")["heartbeat_interval"] == 100
    play.wait(1_000)
    assert play.described_share()["group_state"] == "Empty"


def test_the_assignment_interval_of_a_group_delays_its_next_assignment() -> None:
    own = {"share.assignment.interval.ms": "1000"}
    play = SharePlay(GroupSettings(group_configs=lambda group: own))
    play.joins("a")
    play.wait(1_000)
    play.beats("a")
    assert play.sizes("a") == [4]
    play.joins("b")
    assert play.owned.get("b", frozenset()) == frozenset()
    play.wait(1_000)
    play.beats("b")
    play.beats("a")
    assert play.sizes("a", "b") == [2, 2]


def test_a_full_group_accepts_no_new_member() -> None:
    play = SharePlay(GroupSettings(share_members_max=1))
    play.joins("a")
    assert play.answers[play.send("b", 0, topics=("t",))]["error_code"] is ErrorCode.group_max_size_reached
    assert play.answers[play.send("a", 0, topics=("t",))]["error_code"] is ErrorCode.none


def test_loading_restores_members_with_fresh_sessions() -> None:
    play = SharePlay()
    play.joins("a", "t", "u")
    play.joins("b", rack="r1")
    play.beats("a")
    before, topics = play.described_share(), play.coordinator.share_topics(GROUP)
    play.wait(SESSION_MS - 1)
    play.restart()
    assert play.described_share() == before
    assert play.coordinator.share_topics(GROUP) == topics
    written = len(play.log)
    assert play.beats("a")["assignment"] is None
    assert len(play.log) == written, "nothing has changed for the new coordinator"
    play.wait(SESSION_MS)
    assert play.described_share()["group_state"] == "Empty"


def test_a_failed_write_changes_nothing() -> None:
    play = SharePlay()
    play.joins("a")
    before = play.described_share()
    play.append_error = ErrorCode.not_enough_replicas
    token = play.send("b", 0, topics=("t",))
    assert play.answers[token]["error_code"] is ErrorCode.coordinator_not_available
    assert play.described_share() == before
    play.append_error = ErrorCode.none
    play.joins("b")
    play.beats("a")
    assert play.sizes("a", "b") == [2, 2]


def test_state_is_not_initialized_if_it_cannot_be_noted() -> None:
    play = SharePlay()
    play.append_error = ErrorCode.not_enough_replicas
    play.send("a", 0, topics=("t",))
    assert not play.initialized
    assert not play.coordinator.groups()
    play.append_error = ErrorCode.none
    play.joins("a")
    assert play.sizes("a") == [4]


def test_requests_during_a_write_share_the_next_one() -> None:
    play = SharePlay()
    play.joins("a")
    play.holds_appends = True
    for member in "bcd":
        play.send(member, 0, topics=("t",))
    assert len(play.held) == 1
    play.write(1)
    assert len(play.held) == 1, "c and d share a write"
    play.write()
    assert play.epochs["a"] == 2
    assert play.described_share()["group_epoch"] == 4


def test_an_answer_of_share_coordinators_waits_for_a_pending_write() -> None:
    play = SharePlay()
    play.holds_shares = True
    play.took("a", play.send("a", 0, topics=("t",)))
    play.holds_appends = True
    play.send("b", 0, topics=("t",))
    play.answer_shares()
    assert not play.coordinator.share_topics(GROUP).initialized
    play.write(1)
    play.write()
    assert len(play.coordinator.share_topics(GROUP).initialized_partitions()) == 4


@pytest.mark.parametrize("ends", ["unload", "failed write"])
def test_a_deletion_that_is_interrupted_answers_and_can_be_repeated(ends: str) -> None:
    play = SharePlay()
    play.joins("a")
    play.leaves("a")
    play.holds_shares = True
    token = play.deletes_group()
    (request,) = play.share_requests
    assert isinstance(request, DeleteShares)
    assert len(request.partitions) == 4
    assert token not in play.answers
    if ends == "unload":
        play.run(play.coordinator.unload(0, play.at))
        assert play.answers[token]["error_code"] is ErrorCode.not_coordinator
        play.restart()
        play.share_requests.clear()
    else:
        play.append_error = ErrorCode.not_enough_replicas
        play.answer_shares()
        assert play.answers[token]["error_code"] is ErrorCode.coordinator_not_available
        play.append_error = ErrorCode.none
    assert play.described_share()["error_code"] is ErrorCode.none
    play.holds_shares = False
    again = play.deletes_group()
    assert play.answers[again]["error_code"] is ErrorCode.none
    assert not play.initialized
    assert not play.coordinator.groups()
    play.restart()
    assert not play.coordinator.groups(), "the tombstones cover all records"


def test_a_topic_whose_state_was_deleted_starts_again_when_a_member_joins() -> None:
    play = SharePlay()
    play.joins("a")
    play.leaves("a")
    assert play.answers[play.deletes_offsets("t", "unknown")]["errors"] == {}
    assert not play.initialized
    play.joins("a")
    assert play.sizes("a") == [4]
    assert {offset for _, offset in play.initialized.values()} == {-1}


def test_a_failed_deletion_of_state_names_the_topic() -> None:
    play = SharePlay()
    play.joins("a")
    play.leaves("a")
    play.share_error = ErrorCode.coordinator_not_available
    assert play.answers[play.deletes_offsets("t")]["errors"] == {play.topic_id: ErrorCode.coordinator_not_available}
    play.share_error = ErrorCode.none
    play.restart()
    assert play.answers[play.deletes_offsets("t")]["errors"] == {}
    assert not play.initialized


def test_each_alteration_has_a_higher_state_epoch() -> None:
    play = SharePlay()
    partition = (play.topic_id, 0)
    epochs = []
    for offset in (7, 3):
        assert play.answers[play.alters({partition: offset})]["errors"] == {partition: ErrorCode.none}
        epoch, altered = play.initialized[partition]
        assert altered == offset
        epochs.append(epoch)
    assert epochs == sorted(set(epochs))


def test_an_alteration_that_fails_is_reported_by_partition() -> None:
    play = SharePlay()
    play.share_error = ErrorCode.request_timed_out
    partition = (play.topic_id, 0)
    assert play.answers[play.alters({partition: 7})]["errors"] == {partition: ErrorCode.request_timed_out}
    assert play.joins("a")["error_code"] is ErrorCode.none, "the group is not locked any more"


def test_a_share_group_does_not_expire() -> None:
    play = SharePlay()
    play.joins("a")
    play.leaves("a")
    play.wall_ms += GroupSettings().offsets_retention_ms + 1
    play.run(play.coordinator.expire_offsets(play.at))
    assert [group["group_state"] for group in play.coordinator.groups()] == ["Empty"]


def test_altering_offsets_forgets_topics_that_were_deleted_meanwhile() -> None:
    play = SharePlay()
    play.joins("a")
    play.leaves("a")
    play.change_topic("t", None)
    play.change_topic("t", 1)
    assert play.answers[play.alters({(play.topic_id, 0): 7})]["errors"] == {(play.topic_id, 0): ErrorCode.none}
    assert play.coordinator.share_topics(GROUP).ids() == {"t": play.topic_id}


def test_a_topic_that_is_deleted_before_its_offsets_are_altered_is_an_error_of_its_partitions() -> None:
    """The topic existed when the request arrived, and was deleted while the request waited for a write of the group."""
    play = SharePlay()
    play.topics.put("other", 1)
    play.joins("a")
    deleted, other = (play.topic_id, 0), (play.topics.topics["other"].id, 0)
    play.holds_appends = True
    play.send("a", -1)
    token = play.alters({deleted: 7, other: 8})
    play.change_topic("t", None)
    for _ in range(3):
        play.write()
    unknown = ErrorCode.unknown_topic_or_partition
    assert play.answers[token]["errors"] == {deleted: unknown, other: ErrorCode.none}
    assert (play.initialized[other][1], play.group.is_locked) == (8, False)
