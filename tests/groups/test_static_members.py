"""Members with an instance id keep their membership across a restart."""

from __future__ import annotations

from typing import Any

import pytest
from tests.groups.play import REBALANCE_MS, SESSION_MS, Play, subscription

from chronik.groups.records import read_group_value
from chronik.wire.errors import ErrorCode


@pytest.fixture
def play() -> Play:
    return Play()


def static_group(play: Play, **changes: Any) -> tuple[str, str]:
    """Two static members: "a" leads and "b" follows."""
    leader, _ = play.joined(play.join(instance_id="a", **changes))
    newcomer = play.join(instance_id="b", **changes)
    play.join(leader, instance_id="a", **changes)
    follower, _ = play.joined(newcomer)
    assignments = {leader: b"A", follower: b"B"}
    play.sync(follower, 2, instance_id="b")
    play.sync(leader, 2, assignments, instance_id="a")
    assert play.state == "Stable"
    return leader, follower


def test_static_member_joins_in_one_step(play: Play) -> None:
    member, generation = play.joined(play.join(instance_id="a", member_id_required=False))
    assert generation == 1
    assert member.startswith("a-")


def test_restarted_follower_keeps_its_assignment_without_a_rebalance(play: Play) -> None:
    leader, follower = static_group(play)
    token = play.join(instance_id="b")
    restarted, generation = play.joined(token)
    assert generation == 2
    assert restarted != follower
    assert play.answers[token]["leader"] == leader
    assert play.state == "Stable"
    assert play.heartbeat(leader, 2, "a") is ErrorCode.none
    assert play.answers[play.sync(restarted, 2, instance_id="b")]["assignment"] == b"B"


def test_new_member_id_of_a_static_member_is_logged_before_the_response(play: Play) -> None:
    static_group(play)
    play.holds_appends = True
    token = play.join(instance_id="b")
    assert token not in play.answers
    play.write()
    restarted, _ = play.joined(token)
    value = play.records[-1][1]
    assert value is not None
    assert [each.member_id for each in read_group_value(value).members][1] == restarted


def test_join_of_a_static_member_fails_if_its_new_member_id_cannot_be_written(play: Play) -> None:
    static_group(play)
    play.append_error = ErrorCode.not_enough_replicas
    token = play.join(instance_id="b")
    assert play.error(token) is ErrorCode.coordinator_not_available


def test_restarted_leader_without_skip_assignment_rejoins_as_a_follower(play: Play) -> None:
    leader, _ = static_group(play)
    token = play.join(instance_id="a")
    answer = play.answers[token]
    assert answer["leader"] == leader != answer["member_id"]
    assert answer["members"] == []
    assert not answer["skip_assignment"]


def test_restarted_leader_with_skip_assignment_remains_leader(play: Play) -> None:
    _, follower = static_group(play)
    token = play.join(instance_id="a", can_skip_assignment=True)
    answer = play.answers[token]
    restarted, generation = play.joined(token)
    assert generation == 2
    assert answer["leader"] == restarted
    assert answer["skip_assignment"]
    assert [each["member_id"] for each in answer["members"]] == [restarted, follower]
    assert [each["group_instance_id"] for each in answer["members"]] == ["a", "b"]
    assert play.answers[play.sync(restarted, 2, instance_id="a")]["assignment"] == b"A"


def test_second_process_with_the_same_instance_id_fences_the_first(play: Play) -> None:
    leader, follower = static_group(play)
    play.join(instance_id="b")
    fenced = ErrorCode.fenced_instance_id
    assert play.heartbeat(follower, 2, "b") is fenced
    assert play.error(play.join(follower, instance_id="b")) is fenced
    assert play.error(play.sync(follower, 2, instance_id="b")) is fenced
    assert play.leave((follower, "b")) == [fenced]
    token = play.commit(generation=2, member_id=follower, instance_id="b")
    assert play.commit_error(token) is fenced
    assert play.heartbeat(leader, 2, "a") is ErrorCode.none


def test_fencing_fails_the_waiting_join_of_the_older_process(play: Play) -> None:
    static_group(play)
    play.holds_appends = True
    older = play.join(instance_id="b")
    newer = play.join(instance_id="b")
    assert play.error(older) is ErrorCode.fenced_instance_id
    play.write()
    play.joined(newer)


def test_restart_with_other_owned_partitions_does_not_start_a_rebalance(play: Play) -> None:
    static_group(play, protocols=(("cooperative-sticky", subscription("t", user_data=b"owned")),))
    token = play.join(instance_id="b", protocols=(("cooperative-sticky", subscription("t")),))
    assert play.joined(token)[1] == 2


def test_restart_with_a_new_subscription_starts_a_rebalance(play: Play) -> None:
    leader, _ = static_group(play)
    token = play.join(instance_id="b", protocols=(("range", subscription("t", "u")),))
    assert token not in play.answers
    play.join(leader, instance_id="a")
    assert play.joined(token)[1] == 3


def test_member_that_restarts_during_a_rebalance_joins_it(play: Play) -> None:
    leader, follower = static_group(play)
    rejoin = play.join(follower, instance_id="b", protocols=(("range", b"other"),))
    restarted = play.join(instance_id="b")
    assert play.error(rejoin) is ErrorCode.fenced_instance_id
    play.join(leader, instance_id="a")
    assert play.joined(restarted)[1] == 3


def test_restart_while_members_wait_for_the_assignment_starts_a_new_rebalance(play: Play) -> None:
    leader, _ = play.joined(play.join(instance_id="a"))
    newcomer = play.join(instance_id="b")
    play.join(leader, instance_id="a")
    follower, _ = play.joined(newcomer)
    waiting = play.sync(follower, 2, instance_id="b")
    token = play.join(instance_id="b")
    assert play.error(waiting) is ErrorCode.fenced_instance_id
    play.join(leader, instance_id="a")
    assert play.joined(token)[1] == 3


def test_absent_static_member_remains_in_the_group_until_its_session_expires(play: Play) -> None:
    leader, follower = static_group(play)
    play.wait(SESSION_MS - 2)
    assert play.heartbeat(leader, 2, "a") is ErrorCode.none
    play.wait(1)
    assert [each["member_id"] for each in play.described()["members"]] == [leader, follower]
    play.wait(1)
    assert play.heartbeat(leader, 2, "a") is ErrorCode.rebalance_in_progress
    assert play.joined(play.join(leader, instance_id="a"))[1] == 3


def test_rebalance_timeout_does_not_remove_an_absent_static_member(play: Play) -> None:
    leader, follower = static_group(play, session_timeout_ms=1_800_000)
    token = play.join(leader, instance_id="a", session_timeout_ms=1_800_000)
    play.wait(REBALANCE_MS)
    assert play.joined(token)[1] == 3
    assert [each["member_id"] for each in play.answers[token]["members"]] == [leader, follower]


def test_administrator_removes_a_static_member_by_its_instance_id(play: Play) -> None:
    leader, _ = static_group(play)
    assert play.leave(("", "b"), ("", "nobody")) == [ErrorCode.none, ErrorCode.unknown_member_id]
    assert play.joined(play.join(leader, instance_id="a"))[1] == 3


def test_member_id_with_an_unknown_instance_id_is_refused(play: Play) -> None:
    leader, _ = static_group(play)
    assert play.error(play.join(leader, instance_id="nobody")) is ErrorCode.unknown_member_id


def test_only_member_may_rejoin_with_another_assignor(play: Play) -> None:
    member, _ = play.joined(play.join(instance_id="a"))
    play.sync(member, 1, instance_id="a")
    token = play.join(instance_id="a", protocols=(("sticky", subscription("t")),))
    assert play.answers[token]["protocol_name"] == "sticky"
    assert play.joined(token)[1] == 2


def test_static_members_survive_a_coordinator_restart(play: Play) -> None:
    leader, follower = static_group(play)
    play.restart()
    assert play.heartbeat(leader, 2, "a") is ErrorCode.none
    token = play.join(instance_id="b")
    assert play.joined(token)[1] == 2
    assert play.heartbeat(follower, 2, "b") is ErrorCode.fenced_instance_id
