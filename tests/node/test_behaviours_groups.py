"""Groups on the wire: joining in two steps, generations, static members."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.node.support_wire import connect, unique
from tests.support.eventually import eventually
from tests.support.node import Node

from chronik.wire import messages
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

JOIN_VERSION = 7
SESSION_TIMEOUT_MS = 30_000


class Member:
    """One member of a group, on its own connection, using the classic protocol directly."""

    def __init__(self, node: Node, group: str, instance_id: str | None = None) -> None:
        self.client = connect(node)
        self.group = group
        self.instance_id = instance_id
        self.member_id = ""
        self.generation_id = -1
        self.leader = ""

    def send_join(self) -> int:
        values = {
            "group_id": self.group,
            "session_timeout": SESSION_TIMEOUT_MS,
            "rebalance_timeout": SESSION_TIMEOUT_MS,
            "member_id": self.member_id,
            "group_instance_id": self.instance_id,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b"\x00\x00"}],
        }
        return self.client.send(
            ApiKey.JOIN_GROUP, JOIN_VERSION, messages.write_request(ApiKey.JOIN_GROUP, JOIN_VERSION, values)
        )

    def joined(self, correlation_id: int) -> Any:
        body = self.client.answer(ApiKey.JOIN_GROUP, JOIN_VERSION, correlation_id)
        answer = messages.read_response(ApiKey.JOIN_GROUP, JOIN_VERSION, body)
        if answer.error_code in (ErrorCode.none, ErrorCode.member_id_required):
            self.member_id = answer.member_id
        if answer.error_code is ErrorCode.none:
            self.generation_id = answer.generation_id
            self.leader = answer.leader
        return answer

    def join(self) -> Any:
        """Join, in two steps if the coordinator requires it."""
        answer = self.joined(self.send_join())
        if answer.error_code is ErrorCode.member_id_required:
            answer = self.joined(self.send_join())
        assert answer.error_code is ErrorCode.none, answer.error_code
        return answer

    def sync(self, assignments: dict[str, bytes] | None = None) -> Any:
        return self.client.call(
            ApiKey.SYNC_GROUP,
            5,
            {
                **self._identity(),
                "protocol_type": "consumer",
                "protocol_name": "range",
                "assignments": [
                    {"member_id": member_id, "assignment": assignment}
                    for member_id, assignment in (assignments or {}).items()
                ],
            },
        )

    def heartbeat(self) -> ErrorCode:
        code: ErrorCode = self.client.call(ApiKey.HEARTBEAT, 4, self._identity()).error_code
        return code

    def commit(self, topic: str, offset: int, generation_id: int | None = None) -> ErrorCode:
        identity = self._identity()
        identity["generation_id_or_member_epoch"] = identity.pop("generation_id")
        if generation_id is not None:
            identity["generation_id_or_member_epoch"] = generation_id
        partition = {"partition_index": 0, "committed_offset": offset}
        answer = self.client.call(
            ApiKey.OFFSET_COMMIT, 8, {**identity, "topics": [{"name": topic, "partitions": [partition]}]}
        )
        code: ErrorCode = answer.topics[0].partitions[0].error_code
        return code

    def _identity(self) -> dict[str, Any]:
        return {
            "group_id": self.group,
            "generation_id": self.generation_id,
            "member_id": self.member_id,
            "group_instance_id": self.instance_id,
        }


@pytest.fixture
def group(shared_node: Node) -> str:
    name = unique("group")
    with connect(shared_node) as client:
        eventually(
            lambda: client.call(ApiKey.FIND_COORDINATOR, 2, {"key": name, "key_type": 0}).error_code is ErrorCode.none,
            what="the group has a coordinator",
        )
    return name


@pytest.fixture
def members(shared_node: Node, group: str) -> Iterator[list[Member]]:
    two = [Member(shared_node, group), Member(shared_node, group)]
    yield two
    for member in two:
        member.client.socket.close()


def test_a_new_member_receives_its_id_first_and_joins_with_it(members: list[Member]) -> None:
    member, _ = members
    first = member.joined(member.send_join())
    assert first.error_code is ErrorCode.member_id_required
    assert first.member_id
    second = member.joined(member.send_join())
    assert second.error_code is ErrorCode.none
    assert (second.member_id, second.leader) == (first.member_id, first.member_id)
    assert [known.member_id for known in second.members] == [first.member_id]


def test_a_member_id_that_the_coordinator_never_assigned_is_unknown(members: list[Member]) -> None:
    member, _ = members
    member.member_id = "made-up"
    assert member.joined(member.send_join()).error_code is ErrorCode.unknown_member_id


def test_commits_from_an_old_generation_fail(members: list[Member], shared_node: Node) -> None:
    first, second = members
    topic = first.client.new_topic()
    first.join()
    first.sync({first.member_id: b"all"})
    assert first.commit(topic, 1) is ErrorCode.none
    old_generation = first.generation_id

    joining = second.joined(second.send_join())
    assert joining.error_code is ErrorCode.member_id_required
    waiting = second.send_join()
    eventually(lambda: first.heartbeat() is ErrorCode.rebalance_in_progress, what="the first member is told to rejoin")
    again = first.send_join()
    first.joined(again)
    second.joined(waiting)
    assert first.generation_id == second.generation_id > old_generation
    leader, follower = (first, second) if first.leader == first.member_id else (second, first)
    assert leader.sync({leader.member_id: b"l", follower.member_id: b"f"}).assignment == b"l"
    assert follower.sync().assignment == b"f"

    assert first.commit(topic, 2, old_generation) is ErrorCode.illegal_generation
    assert first.commit(topic, 3) is ErrorCode.none
    wanted = [{"name": topic, "partition_indexes": [0]}]
    stored = first.client.call(ApiKey.OFFSET_FETCH, 7, {"group_id": first.group, "topics": wanted})
    assert stored.topics[0].partitions[0].committed_offset == 3


def test_a_commit_from_a_member_that_left_fails(members: list[Member]) -> None:
    member, _ = members
    topic = member.client.new_topic()
    member.join()
    member.sync({member.member_id: b"all"})
    leaving = {"group_id": member.group, "members": [{"member_id": member.member_id}]}
    assert member.client.call(ApiKey.LEAVE_GROUP, 4, leaving).error_code is ErrorCode.none
    assert member.commit(topic, 1) in (ErrorCode.unknown_member_id, ErrorCode.illegal_generation)


def test_a_static_member_rejoins_without_a_rebalance_and_fences_its_old_instance(
    shared_node: Node, members: list[Member]
) -> None:
    other, _ = members
    static = Member(shared_node, other.group, "instance-1")
    answer = static.joined(static.send_join())
    assert answer.error_code is ErrorCode.none, "a static member joins in one step"
    static.sync({static.member_id: b"mine"})
    generation = static.generation_id

    restarted = Member(shared_node, other.group, "instance-1")
    restarted.joined(restarted.send_join())
    assert restarted.generation_id == generation, "no new generation"
    assert restarted.member_id != static.member_id
    assert restarted.sync({restarted.member_id: b"mine"}).assignment == b"mine"
    assert restarted.heartbeat() is ErrorCode.none
    assert static.heartbeat() is ErrorCode.fenced_instance_id
    for member in (static, restarted):
        member.client.socket.close()


def test_a_static_followers_restart_does_not_trigger_a_rebalance(shared_node: Node, members: list[Member]) -> None:
    leader, _ = members
    leader.join()
    leader.sync({leader.member_id: b"all"})
    static = Member(shared_node, leader.group, "instance-2")
    waiting = static.send_join()
    eventually(lambda: leader.heartbeat() is ErrorCode.rebalance_in_progress, what="the leader is told to rejoin")
    leader.joined(leader.send_join())
    static.joined(waiting)
    assert leader.sync({leader.member_id: b"l", static.member_id: b"s"}).assignment == b"l"
    assert static.sync().assignment == b"s"

    restarted = Member(shared_node, leader.group, "instance-2")
    restarted.joined(restarted.send_join())
    assert restarted.generation_id == static.generation_id
    assert restarted.sync().assignment == b"s", "it gets its old assignment back"
    assert leader.heartbeat() is ErrorCode.none, "the leader noticed nothing"
    for member in (static, restarted):
        member.client.socket.close()


def test_heartbeats_outside_a_generation_are_refused(members: list[Member]) -> None:
    member, stranger = members
    member.join()
    member.sync({member.member_id: b"all"})
    assert member.heartbeat() is ErrorCode.none
    member.generation_id += 1
    assert member.heartbeat() is ErrorCode.illegal_generation
    stranger.member_id = "nobody"
    assert stranger.heartbeat() is ErrorCode.unknown_member_id


def test_a_group_with_members_cannot_be_deleted_and_an_empty_one_can(members: list[Member]) -> None:
    member, _ = members
    topic = member.client.new_topic()
    member.join()
    member.sync({member.member_id: b"all"})
    assert member.commit(topic, 1) is ErrorCode.none
    deleting = {"groups_names": [member.group]}
    results = member.client.call(ApiKey.DELETE_GROUPS, 2, deleting).results
    assert results[0].error_code is ErrorCode.non_empty_group
    member.client.call(ApiKey.LEAVE_GROUP, 4, {"group_id": member.group, "members": [{"member_id": member.member_id}]})
    results = member.client.call(ApiKey.DELETE_GROUPS, 2, deleting).results
    assert results[0].error_code is ErrorCode.none
    stored = member.client.call(ApiKey.OFFSET_FETCH, 7, {"group_id": member.group, "topics": None})
    assert stored.topics == ()
