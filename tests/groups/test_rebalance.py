"""How members join a group, receive assignments, and leave."""

from __future__ import annotations

from typing import Any

import pytest
from tests.groups.play import GROUP, REBALANCE_MS, SESSION_MS, Play, subscription

from chronik.groups.membership import NEW_MEMBER_JOIN_TIMEOUT_MS
from chronik.groups.records import read_group_value
from chronik.groups.step import GroupSettings
from chronik.wire.errors import ErrorCode

TWO_PROTOCOLS = (("sticky", b"s"), ("range", b"r"))


@pytest.fixture
def play() -> Play:
    return Play()


def test_first_member_leads_generation_one_and_receives_the_member_list(play: Play) -> None:
    token = play.join()
    answer = play.answers[token]
    member, generation = play.joined(token)
    assert generation == 1
    assert answer["leader"] == member
    assert answer["protocol_name"] == "range"
    assert answer["protocol_type"] == "consumer"
    assert [each["member_id"] for each in answer["members"]] == [member]
    assert member.startswith("app-")


def test_coordinator_assigns_a_member_id_and_accepts_it_on_rejoin(play: Play) -> None:
    first = play.join(member_id_required=True)
    assert play.error(first) is ErrorCode.member_id_required
    member = play.answers[first]["member_id"]
    assert member
    again = play.join(member, member_id_required=True)
    assert play.joined(again) == (member, 1)


def test_pending_member_expires_if_it_does_not_join(play: Play) -> None:
    token = play.join(member_id_required=True)
    play.wait(SESSION_MS)
    again = play.join(play.answers[token]["member_id"], member_id_required=True)
    assert play.error(again) is ErrorCode.unknown_member_id
    assert play.described()["group_state"] == "Dead"


def test_rebalance_waits_for_a_pending_member_until_its_session_ends(play: Play) -> None:
    (alone,) = play.stable_group(1)
    play.join(member_id_required=True)
    rejoin = play.join(alone)
    assert rejoin not in play.answers
    play.wait(SESSION_MS)
    assert play.joined(rejoin) == (alone, 2)


def test_only_the_leader_receives_the_member_list(play: Play) -> None:
    leader, follower = play.stable_group(2)
    tokens = {member: play.join(member, protocols=TWO_PROTOCOLS[1:]) for member in (leader, follower)}
    answers = {member: play.answers[token] for member, token in tokens.items()}
    assert answers[leader]["leader"] == answers[follower]["leader"] == leader
    assert [each["member_id"] for each in answers[leader]["members"]] == [leader, follower]
    assert answers[follower]["members"] == []


def test_new_member_makes_existing_members_rejoin(play: Play) -> None:
    (alone,) = play.stable_group(1)
    token = play.join()
    assert token not in play.answers
    assert play.state == "PreparingRebalance"
    assert play.heartbeat(alone, 1) is ErrorCode.rebalance_in_progress
    rejoin = play.join(alone)
    assert play.joined(rejoin) == (alone, 2)
    assert play.joined(token)[1] == 2


def test_rebalance_timeout_removes_members_that_do_not_rejoin(play: Play) -> None:
    (alone,) = play.stable_group(1)
    token = play.join()
    for _ in range(REBALANCE_MS // 5_000):
        assert play.heartbeat(alone, 1) is ErrorCode.rebalance_in_progress
        play.wait(5_000)
    newcomer, generation = play.joined(token)
    assert generation == 2
    assert play.answers[token]["leader"] == newcomer
    assert play.heartbeat(alone, 1) is ErrorCode.unknown_member_id


def test_session_timeout_removes_a_member_and_starts_a_rebalance(play: Play) -> None:
    leader, follower = play.stable_group(2)
    play.wait(SESSION_MS - 1)
    assert play.heartbeat(follower, 2) is ErrorCode.none
    play.wait(1)
    assert play.heartbeat(leader, 2) is ErrorCode.unknown_member_id
    assert play.heartbeat(follower, 2) is ErrorCode.rebalance_in_progress
    token = play.join(follower)
    assert play.joined(token) == (follower, 3)
    assert play.answers[token]["leader"] == follower


def test_member_does_not_expire_while_its_join_waits(play: Play) -> None:
    (alone,) = play.stable_group(1)
    play.join(member_id_required=True, session_timeout_ms=60_000)
    rejoin = play.join(alone)
    play.wait(3 * SESSION_MS)
    assert rejoin not in play.answers
    assert len(play.described()["members"]) == 1


def test_new_member_is_removed_if_its_join_waits_too_long(play: Play) -> None:
    (alone,) = play.stable_group(1, session_timeout_ms=1_800_000, rebalance_timeout_ms=1_800_000)
    token = play.join(rebalance_timeout_ms=1_800_000)
    play.wait(NEW_MEMBER_JOIN_TIMEOUT_MS)
    assert play.error(token) is ErrorCode.unknown_member_id
    assert [each["member_id"] for each in play.described()["members"]] == [alone]


def test_unchanged_follower_gets_the_current_generation_without_a_rebalance(play: Play) -> None:
    leader, follower = play.stable_group(2)
    token = play.join(follower)
    assert play.joined(token) == (follower, 2)
    assert play.answers[token]["leader"] == leader
    assert play.state == "Stable"


def test_follower_that_rejoins_with_new_metadata_starts_a_rebalance(play: Play) -> None:
    _, follower = play.stable_group(2)
    token = play.join(follower, protocols=(("range", subscription("t", "u")),))
    assert token not in play.answers
    assert play.state == "PreparingRebalance"


def test_leader_that_rejoins_starts_a_rebalance(play: Play) -> None:
    leader, _ = play.stable_group(2)
    token = play.join(leader)
    assert token not in play.answers
    assert play.state == "PreparingRebalance"


def test_repeated_join_in_completing_rebalance_gets_the_same_answer(play: Play) -> None:
    first = play.join()
    member, _ = play.joined(first)
    again = play.join(member)
    assert play.answers[again] == play.answers[first]


def test_repeated_join_fails_the_older_waiting_request(play: Play) -> None:
    play.stable_group(1)
    token = play.join(member_id_required=True)
    older = play.join(play.answers[token]["member_id"])
    newer = play.join(play.answers[token]["member_id"])
    assert play.error(older) is ErrorCode.rebalance_in_progress
    assert newer not in play.answers


def test_coordinator_selects_the_protocol_that_all_support_and_most_prefer(play: Play) -> None:
    (first,) = play.stable_group(1, protocols=TWO_PROTOCOLS)
    second = play.join(protocols=(("range", b"r"), ("other", b"o")))
    play.join(first, protocols=TWO_PROTOCOLS)
    assert play.answers[second]["protocol_name"] == "range"


def test_member_without_a_common_protocol_is_refused(play: Play) -> None:
    play.stable_group(1)
    assert play.error(play.join(protocols=(("other", b""),))) is ErrorCode.inconsistent_group_protocol
    assert play.error(play.join(protocol_type="connect")) is ErrorCode.inconsistent_group_protocol
    assert play.state == "Stable"


@pytest.mark.parametrize("changes", [{"protocols": ()}, {"protocol_type": ""}])
def test_first_member_must_provide_a_protocol(play: Play, changes: dict[str, Any]) -> None:
    assert play.error(play.join(**changes)) is ErrorCode.inconsistent_group_protocol
    assert play.coordinator.groups() == []


def test_empty_group_may_change_its_protocol_type(play: Play) -> None:
    (alone,) = play.stable_group(1)
    play.leave((alone, None))
    token = play.join(protocol_type="connect", protocols=(("default", b""),))
    assert play.joined(token)[1] == 3
    assert play.answers[token]["protocol_type"] == "connect"


@pytest.mark.parametrize("timeout_ms", [0, 5_999, 1_800_001])
def test_session_timeout_out_of_bounds_is_refused(play: Play, timeout_ms: int) -> None:
    assert play.error(play.join(session_timeout_ms=timeout_ms)) is ErrorCode.invalid_session_timeout


def test_empty_group_id_is_refused(play: Play) -> None:
    assert play.error(play.join(group_id="")) is ErrorCode.invalid_group_id
    assert play.error(play.sync("m", 1, group_id="")) is ErrorCode.invalid_group_id


def test_unknown_member_id_is_refused(play: Play) -> None:
    assert play.error(play.join("ghost")) is ErrorCode.unknown_member_id
    play.stable_group(1)
    assert play.error(play.join("ghost")) is ErrorCode.unknown_member_id
    assert play.error(play.sync("ghost", 1)) is ErrorCode.unknown_member_id
    assert play.heartbeat("ghost", 1) is ErrorCode.unknown_member_id
    assert play.leave(("ghost", None)) == [ErrorCode.unknown_member_id]


def test_full_group_refuses_new_members() -> None:
    play = Play(GroupSettings(initial_rebalance_delay_ms=0, members_max=2))
    play.stable_group(2)
    assert play.error(play.join()) is ErrorCode.group_max_size_reached
    assert play.error(play.join(member_id_required=True)) is ErrorCode.group_max_size_reached
    assert play.state == "Stable"


def test_pending_members_count_towards_the_group_size_limit() -> None:
    play = Play(GroupSettings(initial_rebalance_delay_ms=0, members_max=2))
    errors = [play.error(play.join(member_id_required=True)) for _ in range(3)]
    assert errors == [*[ErrorCode.member_id_required] * 2, ErrorCode.group_max_size_reached]


# The first rebalance


def test_members_started_together_join_the_same_first_generation() -> None:
    play = Play(GroupSettings(initial_rebalance_delay_ms=100))
    first = play.join()
    play.wait(90)
    second = play.join()
    play.wait(20)
    assert first not in play.answers
    play.wait(90)
    assert play.joined(first)[1] == play.joined(second)[1] == 1


def test_first_rebalance_with_one_member_takes_only_the_initial_delay() -> None:
    play = Play(GroupSettings(initial_rebalance_delay_ms=100))
    token = play.join()
    play.wait(99)
    assert token not in play.answers
    play.wait(1)
    assert play.joined(token)[1] == 1


def test_steady_joins_delay_the_first_generation_only_for_a_bounded_time() -> None:
    play = Play(GroupSettings(initial_rebalance_delay_ms=100))
    first = play.join()
    for _ in range(60):
        play.wait(50)
        if first in play.answers:
            break
        play.join()
    assert play.joined(first)[1] == 1


# SyncGroup


def test_followers_wait_for_the_leaders_assignment(play: Play) -> None:
    token = play.join()
    leader, _ = play.joined(token)
    newcomer = play.join()
    play.join(leader)
    follower, _ = play.joined(newcomer)
    waiting = play.sync(follower, 2)
    assert waiting not in play.answers
    leads = play.sync(leader, 2, {leader: b"L", follower: b"F"})
    assert play.answers[waiting]["assignment"] == b"F"
    assert play.answers[leads]["assignment"] == b"L"
    assert play.answers[leads]["protocol_type"] == "consumer"
    assert play.answers[leads]["protocol_name"] == "range"


def test_assignment_is_written_to_the_log_before_members_receive_it(play: Play) -> None:
    member, _ = play.joined(play.join())
    play.holds_appends = True
    token = play.sync(member, 1, {member: b"A"})
    assert token not in play.answers
    assert play.state == "CompletingRebalance"
    play.write()
    assert play.answers[token]["assignment"] == b"A"
    value = play.records[-1][1]
    assert value is not None
    stored = read_group_value(value)
    assert stored.members[0].assignment == b"A"
    assert (stored.generation, stored.leader_id, stored.protocol_name) == (1, member, "range")


def test_failed_assignment_write_makes_members_rejoin(play: Play) -> None:
    member, _ = play.joined(play.join())
    play.append_error = ErrorCode.not_leader_or_follower
    token = play.sync(member, 1, {member: b"A"})
    assert play.error(token) is ErrorCode.not_coordinator
    assert play.state == "PreparingRebalance"
    play.append_error = ErrorCode.none
    assert play.joined(play.join(member)) == (member, 2)


def test_repeated_sync_of_the_leader_writes_the_assignment_once(play: Play) -> None:
    member, _ = play.joined(play.join())
    play.holds_appends = True
    older = play.sync(member, 1, {member: b"A"})
    newer = play.sync(member, 1, {member: b"A"})
    assert play.error(older) is ErrorCode.rebalance_in_progress
    assert len(play.held) == 1
    play.write()
    assert play.answers[newer]["assignment"] == b"A"


def test_late_assignment_of_an_earlier_generation_has_no_effect(play: Play) -> None:
    leader, _ = play.joined(play.join())
    play.holds_appends = True
    late = play.sync(leader, 1, {leader: b"old"})
    newcomer = play.join()
    assert play.error(late) is ErrorCode.rebalance_in_progress
    rejoin = play.join(leader)
    assert play.joined(rejoin)[1] == play.joined(newcomer)[1] == 2
    play.write()
    assert play.state == "CompletingRebalance"


def test_stable_group_answers_a_sync_at_once(play: Play) -> None:
    _, follower = play.stable_group(2)
    assert play.answers[play.sync(follower, 2)]["assignment"] == follower.encode()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"generation": 0}, ErrorCode.illegal_generation),
        ({"generation": 2}, ErrorCode.illegal_generation),
        ({"protocol_type": "connect"}, ErrorCode.inconsistent_group_protocol),
        ({"protocol_name": "sticky"}, ErrorCode.inconsistent_group_protocol),
    ],
)
def test_sync_with_a_wrong_generation_or_protocol_is_refused(
    play: Play, changes: dict[str, Any], error: ErrorCode
) -> None:
    member, _ = play.joined(play.join())
    assert play.error(play.sync(member, **{"generation": 1, **changes})) is error


def test_sync_during_a_rebalance_returns_rebalance_in_progress(play: Play) -> None:
    (alone,) = play.stable_group(1)
    play.join()
    assert play.error(play.sync(alone, 1)) is ErrorCode.rebalance_in_progress


def test_rebalance_timeout_removes_a_member_that_never_syncs(play: Play) -> None:
    leader, _ = play.joined(play.join(session_timeout_ms=1_800_000))
    newcomer = play.join(session_timeout_ms=1_800_000)
    play.join(leader, session_timeout_ms=1_800_000)
    follower, _ = play.joined(newcomer)
    waiting = play.sync(follower, 2)
    play.wait(REBALANCE_MS)
    assert play.error(waiting) is ErrorCode.rebalance_in_progress
    assert play.heartbeat(leader, 2) is ErrorCode.unknown_member_id
    assert play.joined(play.join(follower)) == (follower, 3)


def test_heartbeat_of_another_generation_is_refused(play: Play) -> None:
    (alone,) = play.stable_group(1)
    assert play.heartbeat(alone, 0) is ErrorCode.illegal_generation


# LeaveGroup


def test_group_is_empty_after_its_last_member_leaves(play: Play) -> None:
    (alone,) = play.stable_group(1)
    assert play.leave((alone, None)) == [ErrorCode.none]
    assert play.state == "Empty"
    value = play.records[-1][1]
    assert value is not None
    assert read_group_value(value).members == ()


def test_one_request_removes_several_members(play: Play) -> None:
    members = play.stable_group(3)
    errors = play.leave(*((member, None) for member in members[:2]), ("ghost", None))
    assert errors == [ErrorCode.none, ErrorCode.none, ErrorCode.unknown_member_id]
    assert play.joined(play.join(members[2])) == (members[2], 4)


def test_leave_request_without_members_succeeds(play: Play) -> None:
    play.stable_group(1)
    assert play.leave() == []


def test_member_that_leaves_gets_an_error_for_its_waiting_join(play: Play) -> None:
    play.stable_group(1)
    pending = play.join(member_id_required=True)
    member = play.answers[pending]["member_id"]
    token = play.join(member)
    assert play.leave((member, None)) == [ErrorCode.none]
    assert play.error(token) is ErrorCode.unknown_member_id


def test_pending_member_may_leave(play: Play) -> None:
    pending = play.join(member_id_required=True)
    assert play.leave((play.answers[pending]["member_id"], None)) == [ErrorCode.none]


def test_leave_completes_a_rebalance_that_waits_for_the_member(play: Play) -> None:
    leader, follower = play.stable_group(2)
    token = play.join(leader)
    assert token not in play.answers
    play.leave((follower, None))
    assert play.joined(token) == (leader, 3)


# DescribeGroups


def test_describe_returns_metadata_and_assignments_of_a_stable_group(play: Play) -> None:
    (alone,) = play.stable_group(1)
    described = play.described()
    assert described["protocol_data"] == "range"
    assert described["members"] == [
        {
            "member_id": alone,
            "group_instance_id": None,
            "client_id": "app",
            "client_host": "/127.0.0.1",
            "member_metadata": subscription("t"),
            "member_assignment": alone.encode(),
        }
    ]


def test_list_returns_the_state_of_a_group(play: Play) -> None:
    play.stable_group(1)
    assert play.coordinator.groups() == [
        {"group_id": GROUP, "protocol_type": "consumer", "group_state": "Stable", "group_type": "classic"}
    ]


def test_describe_reports_an_unknown_group_as_dead(play: Play) -> None:
    assert play.described("nobody") == {
        "error_code": ErrorCode.none,
        "group_id": "nobody",
        "group_state": "Dead",
        "protocol_type": "",
        "members": [],
    }


def test_rebalance_is_reported_once_for_each_generation_with_members(play: Play) -> None:
    (alone,) = play.stable_group(1)
    play.leave((alone, None))
    assert [(each.generation, each.member_count) for each in play.rebalances] == [(1, 1)]
