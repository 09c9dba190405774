"""What the describe APIs return for a resource when a client requests everything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.conftest import StartNode
from tests.node.support_wire import WireClient, connect, unique
from tests.support.node import Node

from chronik.authorization.acls import ResourceType
from chronik.node.admin.responses import NOT_REQUESTED
from chronik.node.serving.access import OPEN_ACCESS, OPERATIONS
from chronik.wire.api import ApiKey

ALL = {resource_type: OPEN_ACCESS.authorized_operations(resource_type) for resource_type in OPERATIONS}


@pytest.fixture
def client(shared_node: Node) -> Iterator[WireClient]:
    with connect(shared_node) as connected:
        yield connected


def test_authorized_operations_are_returned_only_if_requested(client: WireClient) -> None:
    topic = client.new_topic()
    group = unique("group")
    offset = {"partition_index": 0, "committed_offset": 0, "committed_leader_epoch": -1}
    commit = {"group_id": group, "topics": [{"name": topic, "partitions": [offset]}]}
    client.call(ApiKey.FIND_COORDINATOR, 2, {"key": group})
    client.call(ApiKey.OFFSET_COMMIT, 8, {**commit, "generation_id_or_member_epoch": -1})
    for asks in (True, False):
        asked = {
            "topics": [{"name": topic}],
            "include_topic_authorized_operations": asks,
            "include_cluster_authorized_operations": asks,
        }
        metadata = client.call(ApiKey.METADATA, 8, asked)
        assert metadata.topics[0].topic_authorized_operations == (ALL[ResourceType.TOPIC] if asks else NOT_REQUESTED)
        assert metadata.cluster_authorized_operations == (ALL[ResourceType.CLUSTER] if asks else NOT_REQUESTED)
        groups = client.call(
            ApiKey.DESCRIBE_GROUPS, 5, {"groups": [group], "include_authorized_operations": asks}
        ).groups
        assert groups[0].authorized_operations == (ALL[ResourceType.GROUP] if asks else NOT_REQUESTED)


def test_a_node_on_uvloop_serves_requests(start_node: StartNode) -> None:
    with connect(start_node(loop="uvloop")) as client:
        topic = client.new_topic()
        assert client.append(topic, b"one", b"two") == 0
        assert [record.value for record in client.records(topic)] == [b"one", b"two"]
