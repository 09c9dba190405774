"""Metadata (key 3), versions 0-13.

Behaviour
- Answered from this node's own image: all brokers, and the topics requested by name or id; null (in v0 an empty list)
  means all topics, an empty list none.
- A topic that does not exist is created if the node's `auto_create_topics` and the request allow it, and the response
  contains its leaders.
- If a leader has just failed, the response waits briefly for its successor, and still lists the failed node.
- A replica is offline if its node is down.
Versions: 1 controller and rack, 2 cluster id, 4 auto-creation switch, 5 offline replicas, 7 leader epochs, 9 flexible,
10 topic ids, 12 topics by id, 13 top-level error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from chronik.metadata.image import OFFSETS_TOPIC, ClusterImage, TopicImage, check_topic_name
from chronik.node.admin.operations import CLUSTER_OPERATIONS, NOT_ASKED, TOPIC_OPERATIONS
from chronik.node.admin.topics import Topics
from chronik.node.config import NodeConfig
from chronik.node.coordinators.group_service import GroupService
from chronik.node.membership.departures import Departures
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


class Services(NamedTuple):
    """The parts of the node that this API uses."""

    config: NodeConfig
    metadata: MetadataLog
    departures: Departures
    topics: Topics
    groups: GroupService
    host: PartitionHost


async def handle(node: Services, request: Request) -> Values:
    message = request.message
    wanted = message.topics
    if wanted is None or (request.api_version == 0 and not wanted):
        await node.departures.wait_for_failover(None)
        image = node.metadata.image
        topics = [_described(image, topic) for _, topic in sorted(image.topics.items())]
    else:
        await node.departures.wait_for_failover(_names(node, wanted))
        may_create = getattr(message, "allow_auto_topic_creation", True) and node.config.auto_create_topics
        topics = [await _find(node, topic, may_create) for topic in wanted]
    if getattr(message, "include_topic_authorized_operations", False):
        for topic in topics:
            if topic["error_code"] is ErrorCode.none:
                topic["topic_authorized_operations"] = TOPIC_OPERATIONS
    asks_for_cluster = getattr(message, "include_cluster_authorized_operations", False)
    image = node.metadata.image
    return {
        "brokers": [
            {"node_id": member.id, "host": member.host, "port": member.port, "rack": member.rack}
            for member in node.departures.listed_brokers()
        ],
        "cluster_id": image.cluster_id,
        "controller_id": node.metadata.controller_id,
        "cluster_authorized_operations": CLUSTER_OPERATIONS if asks_for_cluster else NOT_ASKED,
        "topics": topics,
    }


def _names(node: Services, wanted: Sequence[Any]) -> list[str]:
    ids = [topic.topic_id for topic in wanted if topic.name is None]
    known = [node.metadata.image.names_by_id.get(topic_id) for topic_id in ids]
    return [name for name in (*(topic.name for topic in wanted), *known) if name is not None]


async def _find(node: Services, wanted: Any, may_create: bool) -> Values:
    name = wanted.name
    topic_id = getattr(wanted, "topic_id", None)
    if name is None:
        found = None if topic_id is None else node.metadata.image.topic_by_id(topic_id)
        return _described(node.metadata.image, found) if found else _failed(None, topic_id, ErrorCode.unknown_topic_id)
    found = node.metadata.image.topic(name)
    if found is not None:
        return _described(node.metadata.image, found)
    try:
        check_topic_name(name)
        if not may_create:
            raise KafkaError(ErrorCode.unknown_topic_or_partition)
        created = await _create(node, name)
        return _described(node.metadata.image, created)
    except KafkaError as error:
        return _failed(name, None, error.code)


async def _create(node: Services, name: str) -> TopicImage:
    """Create a topic with the node's defaults, unless another client has just created it.

    This includes the offsets topic, which lag tools request before any group exists.
    """
    try:
        if name == OFFSETS_TOPIC:
            await node.groups.ensure_topic()
        else:
            await node.topics.create(name)
    except KafkaError as error:
        if error.code == ErrorCode.coordinator_not_available:
            # A group error; metadata clients retry after LEADER_NOT_AVAILABLE.
            raise KafkaError(ErrorCode.leader_not_available, error.message) from error
        if error.code != ErrorCode.topic_already_exists:
            raise
        await node.host.applied()
    return node.metadata.image.require_topic(name)


def _failed(name: str | None, topic_id: object, code: ErrorCode) -> Values:
    return {"error_code": code, "name": name, "topic_id": topic_id, "partitions": []}


def _described(image: ClusterImage, topic: TopicImage) -> Values:
    return {
        "error_code": ErrorCode.none,
        "name": topic.name,
        "topic_id": topic.id,
        "is_internal": topic.is_internal,
        "partitions": [
            {
                "error_code": ErrorCode.none if partition.leader >= 0 else ErrorCode.leader_not_available,
                "partition_index": partition.partition,
                "leader_id": partition.leader,
                "leader_epoch": partition.leader_epoch,
                "replica_nodes": partition.replicas,
                "isr_nodes": partition.isr,
                "offline_replicas": [replica for replica in partition.replicas if not image.is_live(replica)],
            }
            for partition in topic.partitions
        ],
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    topics = request.message.topics or ()
    return {
        "brokers": [],
        "topics": [_failed(topic.name, getattr(topic, "topic_id", None), code) for topic in topics],
    }


API = Api(ApiKey.METADATA, (0, 13), on_error=on_error)


def handler(services: Services) -> Handler:
    return Handler(API, partial(handle, services))
