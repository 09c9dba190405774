"""Consumer groups of KIP-848: epochs, reconciliation, fencing, static members, expressions, timeouts, failed writes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.groups.consumer_play import REBALANCE_MS, ConsumerPlay
from tests.groups.play import GROUP, PRODUCER

from chronik.groups.commits import CommitRequest
from chronik.groups.step import GroupSettings
from chronik.wire.errors import ErrorCode

SESSION_MS = GroupSettings().consumer_session_timeout_ms
JOIN: dict[str, Any] = {"rebalance_timeout_ms": 1, "topics": ("t",), "owned": frozenset()}


@pytest.mark.parametrize(
    ("epoch", "changes", "error"),
    [
        (0, {}, ErrorCode.none),
        (0, {"member_id": ""}, ErrorCode.invalid_request),
        (0, {"member_id": "", "member_id_required": False}, ErrorCode.none),
        (0, {"group_id": ""}, ErrorCode.invalid_request),
        (0, {"rebalance_timeout_ms": None}, ErrorCode.invalid_request),
        (0, {"owned": None}, ErrorCode.invalid_request),
        (0, {"topics": None}, ErrorCode.invalid_request),
        (0, {"topics": None, "expression": "t.*"}, ErrorCode.none),
        (0, {"topics": ()}, ErrorCode.none),
        (0, {"expression": "("}, ErrorCode.invalid_regular_expression),
        (0, {"expression": "x" * 2000}, ErrorCode.invalid_regular_expression),
        (0, {"assignor": "range"}, ErrorCode.none),
        (0, {"assignor": "none"}, ErrorCode.unsupported_assignor),
        (0, {"instance_id": ""}, ErrorCode.invalid_request),
        (0, {"rack": ""}, ErrorCode.invalid_request),
        (0, {"member_id": "m" * 40_000}, ErrorCode.invalid_request),
        (0, {"topics": tuple(f"{number:0200}" for number in range(6_000))}, ErrorCode.invalid_request),
        (-2, {}, ErrorCode.invalid_request),
        (-3, {}, ErrorCode.invalid_request),
        (-1, {}, ErrorCode.group_id_not_found),
        (5, {}, ErrorCode.group_id_not_found),
    ],
)
def test_the_first_request_is_checked(epoch: int, changes: dict[str, Any], error: ErrorCode) -> None:
    play = ConsumerPlay()
    token = play.send("a", epoch, **{**JOIN, **changes})
    assert play.error(token) is error
    has_group = error is ErrorCode.none
    assert [group["group_id"] for group in play.coordinator.groups()] == ([GROUP] if has_group else [])


def test_a_single_member_gets_all_partitions_at_once() -> None:
    play = ConsumerPlay()
    answer = play.joins("a")
    assert (answer["member_epoch"], answer["heartbeat_interval"]) == (1, 5_000)
    assert play.owns_all_once("a")
    assert play.group_state == "Stable"
    assert play.coordinator.groups()[0]["group_type"] == "consumer"
    answer = play.beats("a", owned=None)
    assert answer["assignment"] is None, "nothing has changed"


def test_a_heartbeat_without_a_change_writes_nothing() -> None:
    play = ConsumerPlay()
    play.joins("a")
    written = len(play.log)
    play.beats("a")
    play.beats("a", owned=None)
    assert len(play.log) == written


def test_a_partition_is_granted_only_after_its_owner_revoked_it() -> None:
    play = ConsumerPlay()
    play.joins("a")
    play.joins("b")
    assert play.owned["b"] == frozenset()
    before = play.ids("a")
    token = play.send("a", play.epochs["a"], owned=before)
    assert play.answers[token]["member_epoch"] == 1, "it keeps its epoch until it has revoked"
    play.beats("b")
    assert play.owned["b"] == frozenset(), "a still owns them"
    play.send("a", 1, owned=None)
    play.beats("b")
    assert play.owned["b"] == frozenset(), "a has not reported that it revoked them"
    play.took("a", token)
    assert play.beats("a")["member_epoch"] == 2
    play.beats("b")
    assert play.counts("a", "b") == [2, 2]
    assert play.owns_all_once("a", "b")
    assert play.group_state == "Stable"


def test_a_member_that_leaves_frees_its_partitions() -> None:
    play = ConsumerPlay()
    play.joins("a")
    play.joins("b")
    play.settles("a", "b")
    assert play.leaves("b") == {"error_code": ErrorCode.none, "member_id": "b", "member_epoch": -1}
    play.beats("a")
    assert play.owns_all_once("a")
    assert play.leaves("b")["error_code"] is ErrorCode.unknown_member_id


@pytest.mark.parametrize(
    ("epoch", "owned", "error"),
    [
        (3, "assigned", ErrorCode.none),
        (2, "assigned", ErrorCode.none),
        (2, "nothing", ErrorCode.none),
        (2, "more", ErrorCode.fenced_member_epoch),
        (2, "unknown", ErrorCode.fenced_member_epoch),
        (1, "nothing", ErrorCode.fenced_member_epoch),
        (4, "assigned", ErrorCode.fenced_member_epoch),
        (0, "nothing", ErrorCode.none),
    ],
)
def test_only_the_epoch_before_is_accepted_again(epoch: int, owned: str, error: ErrorCode) -> None:
    play = ConsumerPlay()
    play.joins("a")
    play.change_topic("t", 5)
    play.beats("a")
    play.change_topic("t", 6)
    play.beats("a")
    assert play.epochs["a"] == 3
    assigned = play.ids("a")
    sent = {
        "assigned": assigned,
        "nothing": frozenset(),
        "more": assigned | {(play.topics.topics["t"].id, 99)},
        "unknown": None,
    }[owned]
    first = {"rebalance_timeout_ms": 1, "topics": ("t",)} if epoch == 0 else {}
    answer = play.answers[play.send("a", epoch, owned=sent, **first)]
    assert answer["error_code"] is error
    if error is ErrorCode.none:
        assert answer["member_epoch"] == 3
    assert play.error(play.send("x", 3)) is ErrorCode.unknown_member_id


def test_a_member_without_heartbeats_is_removed_after_its_session() -> None:
    play = ConsumerPlay()
    play.joins("a")
    play.joins("b")
    play.settles("a", "b")
    play.wait(SESSION_MS - 1)
    play.beats("a")
    play.wait(1)
    play.beats("a")
    assert play.owns_all_once("a")
    assert play.beats("b")["error_code"] is ErrorCode.unknown_member_id


def test_a_member_that_does_not_revoke_is_removed_after_its_timeout() -> None:
    play = ConsumerPlay()
    play.joins("a")
    play.joins("b")
    stuck = play.ids("a")
    play.send("a", 1, owned=stuck)
    for _ in range(3):
        play.wait(REBALANCE_MS // 3 - 1)
        assert play.error(play.send("a", 1, owned=stuck)) is ErrorCode.none
        play.beats("b")
    assert list(play.group.revocation_deadlines) == ["a"]
    play.wait(3)
    assert play.error(play.send("a", 1, owned=stuck)) is ErrorCode.unknown_member_id
    play.beats("b")
    assert play.owns_all_once("b")
    assert not play.group.revocation_deadlines


def test_group_configs_override_the_session_and_the_interval() -> None:
    own = {"consumer.session.timeout.ms": "1000", "consumer.heartbeat.interval.ms": "100"}
    play = ConsumerPlay(GroupSettings(group_configs=lambda group: own if group == GROUP else {}))
    assert play.joins("a")["heartbeat_interval"] == 100
    play.wait(1_000)
    assert play.beats("a")["error_code"] is ErrorCode.unknown_member_id


def test_the_assignment_interval_of_a_group_delays_its_next_assignment() -> None:
    own = {"consumer.assignment.interval.ms": "1000"}
    play = ConsumerPlay(GroupSettings(group_configs=lambda group: own))
    play.joins("a")
    assert play.owns_all_once("a"), "the first assignment does not wait"
    play.wait(999)
    assert play.joins("b")["member_epoch"] == 1
    play.beats("a")
    assert (play.group.durable.epoch, play.group.durable.assignment_epoch) == (2, 1)
    assert (play.group_state, play.counts("a", "b")) == ("Assigning", [4, 0])
    play.wait(1)
    assert play.group.durable.assignment_epoch == 2, "computed by the clock, without a heartbeat"
    play.settles("a", "b")
    assert play.counts("a", "b") == [2, 2]


def test_a_full_group_refuses_new_members_only() -> None:
    play = ConsumerPlay(GroupSettings(consumer_members_max=2))
    play.joins("a")
    play.joins("b", instance_id="i")
    assert play.joins("c")["error_code"] is ErrorCode.group_max_size_reached
    play.beats("a")
    play.leaves("b", -2, instance_id="i")
    assert play.joins("b2", instance_id="i")["error_code"] is ErrorCode.none


# Subscriptions


def test_another_subscription_starts_a_new_epoch() -> None:
    play = ConsumerPlay()
    play.topics.put("u", 2)
    play.joins("a")
    play.beats("a", topics=("t", "u"))
    assert play.owns_all_once("a", topics=("t", "u"))
    play.beats("a", topics=("u",))
    play.beats("a")
    assert play.owns_all_once("a", topics=("u",))
    assert play.group.durable.epoch == 3


def test_new_partitions_and_deleted_topics_are_noticed() -> None:
    play = ConsumerPlay()
    play.topics.put("u", 2)
    play.joins("a", "t", "u", "later")
    play.change_topic("t", 6)
    play.change_topic("later", 1)
    play.beats("a")
    assert play.owns_all_once("a", topics=("t", "u", "later"))
    play.change_topic("u", None)
    play.owned["a"] = frozenset(each for each in play.owned["a"] if each[0] != "u")
    play.beats("a")
    assert play.owns_all_once("a", topics=("t", "later"))


def test_an_expression_selects_topics_that_come_and_go() -> None:
    play = ConsumerPlay()
    play.topics.put("logs-a", 1)
    play.topics.put("other-logs-a", 1)
    play.joins("a", topics=("t",), expression="logs-.*")
    assert play.owns_all_once("a", topics=("t", "logs-a"))
    play.change_topic("logs-b", 2)
    play.beats("a")
    assert play.owns_all_once("a", topics=("t", "logs-a", "logs-b"))
    play.change_topic("logs-a", None)
    play.owned["a"] = frozenset(each for each in play.owned["a"] if each[0] != "logs-a")
    play.beats("a")
    assert play.owns_all_once("a", topics=("t", "logs-b"))
    play.beats("a", expression="")
    play.beats("a")
    assert play.owns_all_once("a")
    assert not play.group.durable.expressions


def test_an_expression_selects_only_topics_that_the_member_may_describe() -> None:
    play = ConsumerPlay()
    play.topics.put("logs-a", 1)
    play.topics.put("logs-secret", 1)
    play.joins("a", topics=(), expression="logs-.*", may_describe=lambda name: name != "logs-secret")
    assert play.owns_all_once("a", topics=("logs-a",))


def test_an_expression_is_resolved_again_when_rights_change() -> None:
    play = ConsumerPlay()
    play.topics.put("logs-a", 1)
    play.topics.put("logs-b", 1)
    play.joins("a", topics=(), expression="logs-.*", may_describe=lambda name: name != "logs-b")
    play.beats("a", may_describe=lambda name: True)
    assert play.owns_all_once("a", topics=("logs-a",)), "a heartbeat alone does not resolve it"
    play.coordinator.rights_changed()
    play.beats("a", may_describe=lambda name: True)
    assert play.owns_all_once("a", topics=("logs-a", "logs-b"))
    play.coordinator.rights_changed()
    play.beats("a", may_describe=lambda name: name == "logs-b")
    play.beats("a")
    assert play.owns_all_once("a", topics=("logs-b",))


def test_members_choose_the_assignor_by_majority() -> None:
    play = ConsumerPlay()
    play.topics.put("u", 4)
    for member in ("a", "b"):
        play.joins(member, "t", "u", assignor="range")
    play.settles("a", "b")
    assert play.target("a") == {"t": [0, 1], "u": [0, 1]}
    assert play.described_consumer()["assignor_name"] == "range"


# Static members


def test_a_static_member_comes_back_to_its_partitions() -> None:
    play = ConsumerPlay()
    play.joins("a")
    play.joins("b", instance_id="i")
    play.settles("a", "b")
    owned = play.owned["b"]
    epoch = play.group.durable.epoch
    assert play.leaves("b", -2, instance_id="i")["member_epoch"] == -2
    play.beats("a")
    assert len(play.owned["a"]) == 2
    play.joins("b2", instance_id="i")
    assert play.owned["b2"] == owned
    assert play.group.durable.epoch == epoch
    answer = play.answers[play.send("b", epoch, instance_id="i")]
    assert answer["error_code"] is ErrorCode.fenced_instance_id
    assert play.error(play.send("b", epoch)) is ErrorCode.unknown_member_id


def test_a_member_that_joins_with_another_instance_id_releases_the_first() -> None:
    play = ConsumerPlay()
    play.joins("a", instance_id="i")
    assert play.joins("a", instance_id="j")["error_code"] is ErrorCode.none
    assert play.joins("b", instance_id="i")["error_code"] is ErrorCode.none, "as after the group was loaded again"


def test_an_instance_id_in_use_is_not_taken_over() -> None:
    play = ConsumerPlay()
    play.joins("a", instance_id="i")
    assert play.joins("b", instance_id="i")["error_code"] is ErrorCode.unreleased_instance_id
    assert play.joins("a", instance_id="i")["error_code"] is ErrorCode.none, "its first response was lost"
    assert play.leaves("b", -2, instance_id="i")["error_code"] is ErrorCode.fenced_instance_id
    play.wait(SESSION_MS)
    assert play.joins("b", instance_id="i")["error_code"] is ErrorCode.none
    assert play.owns_all_once("b")


def test_a_static_member_that_does_not_come_back_is_removed() -> None:
    play = ConsumerPlay()
    play.joins("a")
    play.joins("b", instance_id="i")
    play.settles("a", "b")
    play.leaves("b", -2, instance_id="i")
    play.wait(SESSION_MS - 1)
    play.beats("a")
    play.wait(1)
    play.beats("a")
    assert play.owns_all_once("a")


# Offsets


def test_commits_and_fetches_need_the_member_epoch() -> None:
    play = ConsumerPlay()
    play.joins("a")

    def commit(epoch: int, member: str = "a", *, knows_epochs: bool = True) -> ErrorCode:
        token = play.token()
        request = CommitRequest(GROUP, epoch, member, None, ((("t", 0), 5, -1, ""),), knows_epochs)
        play.run(play.coordinator.commit(request, token, play.at))
        return play.commit_error(token)

    assert commit(1) is ErrorCode.none
    assert commit(0) is ErrorCode.stale_member_epoch
    assert commit(2) is ErrorCode.stale_member_epoch
    assert commit(1, "x") is ErrorCode.unknown_member_id
    assert commit(-1, "") is ErrorCode.unknown_member_id
    assert commit(1, knows_epochs=False) is ErrorCode.unsupported_version
    fetched = [
        play.coordinator.committed(GROUP, None, *sender)[0] for sender in (("a", 1), ("a", 0), ("x", 1), (None, -1))
    ]
    assert fetched == [
        ErrorCode.none,
        ErrorCode.stale_member_epoch,
        ErrorCode.unknown_member_id,
        ErrorCode.none,
    ]
    assert play.commit_error(play.commit(generation=0, member_id="a", producer=PRODUCER)) is (
        ErrorCode.illegal_generation
    )
    play.leaves("a")
    assert commit(-1, "") is ErrorCode.none


def test_offsets_of_subscribed_topics_are_kept_and_an_empty_group_is_deleted() -> None:
    play = ConsumerPlay()
    play.commit(5, partition=("old", 0))
    play.joins("a")
    assert play.delete_offsets(("t", 0), ("old", 0))["errors"] == {
        ("t", 0): ErrorCode.group_subscribed_to_topic,
        ("old", 0): ErrorCode.none,
    }
    assert play.error(play.delete_group()) is ErrorCode.non_empty_group
    play.leaves("a")
    assert play.group_state == "Empty"
    assert play.error(play.delete_group()) is ErrorCode.none
    assert play.described_consumer()["error_code"] is ErrorCode.group_id_not_found
    play.restart()
    assert play.coordinator.groups() == []


def test_descriptions_are_for_the_kind_of_the_group_only() -> None:
    play = ConsumerPlay()
    play.joins("a", instance_id="i", rack="r")
    described = play.described_consumer()
    (member,) = described["members"]
    assert (described["group_epoch"], described["assignment_epoch"], described["assignor_name"]) == (1, 1, "uniform")
    assert (member["member_id"], member["instance_id"], member["rack_id"], member["member_type"]) == ("a", "i", "r", 1)
    topics = [{"topic_id": play.topics.topics["t"].id, "topic_name": "t", "partitions": [0, 1, 2, 3]}]
    assert member["assignment"] == member["target_assignment"] == {"topic_partitions": topics}
    classic = play.described()
    assert (classic["group_state"], classic["error_message"]) == ("Dead", f"Group {GROUP} is not a classic group.")


# The log


def test_a_new_coordinator_continues_where_the_last_one_was() -> None:
    play = ConsumerPlay()
    play.topics.put("logs-a", 1)
    play.joins("a", expression="logs-.*")
    play.joins("b", instance_id="i", rack="r", assignor="range")
    token = play.send("a", play.epochs["a"], owned=play.ids("a"))
    before = play.group.durable
    play.restart()
    after = play.group.durable
    assert after == before
    assert list(play.group.revocation_deadlines) == ["a"]
    play.took("a", token)
    play.settles("a", "b")
    assert play.owns_all_once("a", "b", topics=("t", "logs-a"))


@pytest.mark.parametrize("error", [ErrorCode.not_enough_replicas, ErrorCode.not_leader_or_follower])
def test_a_failed_write_changes_nothing(error: ErrorCode) -> None:
    play = ConsumerPlay()
    play.joins("a")
    before = play.group.durable
    play.append_error = error
    assert play.joins("b")["error_code"] is not ErrorCode.none
    assert play.leaves("a")["error_code"] is not ErrorCode.none
    play.append_error = ErrorCode.none
    assert play.group.image is play.group.durable
    assert play.group.durable == before
    play.owned["a"] = frozenset()
    play.beats("a", rebalance_timeout_ms=1, topics=("t",))
    play.joins("b")
    play.settles("a", "b")
    play.wait(SESSION_MS)
    assert play.group_state == "Empty"


def test_after_a_timeout_nothing_is_shown_before_a_later_write_succeeds() -> None:
    play = ConsumerPlay()
    play.joins("a")
    play.joins("b")
    play.append_error = ErrorCode.request_timed_out
    assert play.beats("a")["error_code"] is ErrorCode.coordinator_not_available
    play.append_error = ErrorCode.not_enough_replicas
    assert play.beats("a")["error_code"] is ErrorCode.coordinator_not_available
    play.append_error = ErrorCode.none
    written = len(play.log)
    assert play.beats("a", rebalance_timeout_ms=REBALANCE_MS, topics=("t",))["error_code"] is ErrorCode.none
    assert len(play.log) > written
    play.settles("a", "b")
    assert play.owns_all_once("a", "b")


def test_requests_during_a_write_share_the_next_one() -> None:
    play = ConsumerPlay()
    play.holds_appends = True
    first = play.send("m0", 0, **JOIN)
    tokens = [play.send(f"m{index}", 0, **JOIN) for index in range(1, 40)]
    assert len(play.held) == 1
    assert first not in play.answers
    play.write()
    assert first in play.answers
    assert len(play.held) == 1
    assert not any(token in play.answers for token in tokens)
    play.write()
    assert all(play.error(token) is ErrorCode.none for token in tokens)
    assert play.group.durable.epoch == 2
    assert len(play.group.durable.members) == 40


def test_waiting_requests_are_answered_when_the_partition_moves() -> None:
    play = ConsumerPlay()
    play.holds_appends = True
    tokens = [play.send("a", 0, **JOIN), play.send("b", 0, **JOIN), play.delete_group(), play.join()]
    play.run(play.coordinator.unload(0, play.at))
    assert [play.error(token) for token in tokens] == [ErrorCode.not_coordinator] * 4


def test_without_a_lease_waiting_requests_are_refused_and_members_stay() -> None:
    play = ConsumerPlay()
    play.holds_appends = True
    written, waiting = play.send("a", 0, **JOIN), play.send("b", 0, **JOIN)
    play.run(play.coordinator.refuse_waiting(play.at))
    assert play.error(waiting) is ErrorCode.not_coordinator
    play.write()
    assert play.error(written) is ErrorCode.none


def test_an_empty_group_without_offsets_is_deleted_by_expiry() -> None:
    play = ConsumerPlay()
    play.joins("a")
    play.leaves("a")
    play.run(play.coordinator.expire_offsets(play.at))
    assert play.coordinator.groups() == []
    play.restart()
    assert play.coordinator.groups() == []
