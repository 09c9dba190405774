"""A coordinator that clients reach but that is cut off from its peers answers for no group."""

from __future__ import annotations

import pytest
from tests.cluster.conftest import StartNodes
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_groups import WireMember
from tests.node.support_wire import WireClient, unique
from tests.support.eventually import eventually

from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

SESSION_TIMEOUT_MS = 60_000
REBALANCE_TIMEOUT_MS = 2_000
TAKE_OVER_S = 30.0
ANSWER_S = 15.0
"""Longer than a lease, and longer than a commit may wait for its batch."""


class Member(WireMember):
    """Takes all partitions of its topic, and commits offsets."""

    def __init__(
        self, nodes: Nodes, node_id: int, group: str, topic: str, rebalance_timeout_ms: int = REBALANCE_TIMEOUT_MS
    ) -> None:
        client = nodes.connect(node_id, timeout_s=ANSWER_S)
        super().__init__(
            client, group, session_timeout_ms=SESSION_TIMEOUT_MS, rebalance_timeout_ms=rebalance_timeout_ms
        )
        self.topic = topic

    def own_all(self) -> None:
        """Join, and as the leader take all partitions; retry while the coordinator loads."""

        def owns() -> bool:
            error = self.joined(self.send_join())
            if error is ErrorCode.member_id_required:
                error = self.joined(self.send_join())
            assert error is ErrorCode.none, error
            error = self.sync_all()
            assert error is ErrorCode.none, error
            return True

        eventually(owns, TAKE_OVER_S, f"{self.group} has a generation")

    def sync_all(self) -> ErrorCode:
        return self.sync({self.member_id: b"all"})

    def commit(self, offset: int) -> ErrorCode:
        partition = {"partition_index": 0, "committed_offset": offset}
        values = {
            "group_id": self.group,
            "generation_id_or_member_epoch": self.generation,
            "member_id": self.member_id,
            "topics": [{"name": self.topic, "partitions": [partition]}],
        }
        return ErrorCode(self.client.call(ApiKey.OFFSET_COMMIT, 8, values).topics[0].partitions[0].error_code)


def committed(client: WireClient, group: str, topic: str) -> tuple[ErrorCode, int]:
    """Send OffsetFetch with require_stable; return the group's error and the offset of partition 0."""
    wanted = {"group_id": group, "topics": [{"name": topic, "partition_indexes": [0]}]}
    found = client.call(ApiKey.OFFSET_FETCH, 8, {"groups": [wanted], "require_stable": True}).groups[0]
    return found.error_code, found.topics[0].partitions[0].committed_offset if found.topics else -1


def find_coordinator(client: WireClient, group: str) -> tuple[ErrorCode, int]:
    found = client.call(ApiKey.FIND_COORDINATOR, 4, {"key_type": 0, "coordinator_keys": [group]}).coordinators[0]
    return found.error_code, found.node_id


def other_claims(client: WireClient, member: Member) -> dict[str, ErrorCode]:
    """Return the answers to the other group requests, by API."""
    group, topic = member.group, member.topic
    partitions = [{"partition_index": 0}]
    delete = {"group_id": group, "topics": [{"name": topic, "partitions": partitions}]}
    return {
        "JoinGroup": member.joined(member.send_join()),
        "SyncGroup": member.sync_all(),
        "OffsetCommit": member.commit(7),
        "LeaveGroup": member.leave(),
        "DescribeGroups": client.call(ApiKey.DESCRIBE_GROUPS, 5, {"groups": [group]}).groups[0].error_code,
        "DeleteGroups": client.call(ApiKey.DELETE_GROUPS, 2, {"groups_names": [group]}).results[0].error_code,
        "OffsetDelete": client.call(ApiKey.OFFSET_DELETE, 0, delete).error_code,
    }


@pytest.mark.timeout(180)
def test_an_isolated_coordinator_refuses_group_requests_after_a_failover(start_nodes: StartNodes) -> None:
    nodes = start_nodes(cuttable=True)
    topic, group = nodes.new_topic(1), unique("group")
    old = nodes.coordinator(group, by=nodes.ids[0], among=nodes.ids)
    others = [node_id for node_id in nodes.ids if node_id != old]
    with Member(nodes, old, group, topic) as first, nodes.connect(old, timeout_s=ANSWER_S) as at_old:
        first.own_all()
        assert first.commit(5) is ErrorCode.none
        assert first.heartbeat() is ErrorCode.none
        nodes.cut_off(old)

        new = nodes.coordinator(group, by=others[0], among=others)
        with Member(nodes, new, group, topic) as second, nodes.connect(new) as at_new:
            second.own_all()
            assert second.generation > first.generation
            assert second.commit(50) is ErrorCode.none
            assert committed(at_new, group, topic) == (ErrorCode.none, 50)

            # Send the same requests to the old coordinator: two members must not own one partition.
            assert first.heartbeat() is ErrorCode.not_coordinator
            assert committed(at_old, group, topic) == (ErrorCode.not_coordinator, -1)
            assert find_coordinator(at_old, group) == (ErrorCode.coordinator_not_available, -1)
            assert at_old.call(ApiKey.LIST_GROUPS, 4, {"states_filter": []}).groups == ()
            claims = other_claims(at_old, first)
            assert set(claims.values()) == {ErrorCode.not_coordinator}, claims

            nodes.heal()
            # The old coordinator follows the metadata again, and names the same coordinator as the other nodes.
            assert nodes.coordinator(group, by=old, among=[new]) == new
            assert second.heartbeat() is ErrorCode.none
            assert committed(at_new, group, topic) == (ErrorCode.none, 50)
            assert committed(at_old, group, topic) == (ErrorCode.not_coordinator, -1)
    nodes.no_surprises()


@pytest.mark.timeout(180)
def test_an_isolated_coordinator_fails_its_pending_group_requests(start_nodes: StartNodes) -> None:
    nodes = start_nodes(cuttable=True, offsets_topic_partitions=1)
    topic, group, other = nodes.new_topic(1), unique("group"), unique("group")
    old = nodes.coordinator(group, by=nodes.ids[0], among=nodes.ids)
    with (
        Member(nodes, old, group, topic, rebalance_timeout_ms=SESSION_TIMEOUT_MS) as first,
        Member(nodes, old, group, topic) as newcomer,
        Member(nodes, old, other, topic) as owner,
    ):
        first.own_all()
        owner.own_all()
        assert newcomer.joined(newcomer.send_join()) is ErrorCode.member_id_required
        # The newcomer waits for the first member, which does not rejoin; the owner's commit waits for replicas.
        waiting = newcomer.send_join()
        nodes.cut_off(old)
        assert owner.commit(9) in (ErrorCode.not_coordinator, ErrorCode.coordinator_not_available)
        assert newcomer.joined(waiting) is ErrorCode.not_coordinator
        nodes.heal()
    nodes.no_surprises()
