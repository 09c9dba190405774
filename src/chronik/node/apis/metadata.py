"""Metadata (key 3), versions 0-13.

Behaviour
- Answered from this node's image: the live brokers, and the topics requested by name or id (an id takes precedence);
  null (in v0 an empty list) means all topics, an empty list none.
- A topic that does not exist is created if the node's `auto_create_topics` and the request allow it, and the response
  contains its leaders. Its partitions are charged to the client's `controller_mutation_rate` on the controller; while
  that is used up, the topic has the error LEADER_NOT_AVAILABLE, after which clients retry.
- If a leader has just failed, the response waits briefly for its successor, and still lists the failed node.
- Brokers have the address of the listener by which the client came in. A broker that lacks it is not listed; the
  partitions that it leads have no leader and LISTENER_NOT_FOUND (before v6 LEADER_NOT_AVAILABLE).
- A replica is offline if its node is down, or lacks that listener.
- A response with many partitions is made in a thread, so that it does not delay other clients.
Versions: 1 controller and rack, 2 cluster id, 4 auto-creation switch, 5 offline replicas, 7 leader epochs, 9 flexible,
10 topic ids, 12 topics by id, 13 top-level error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from chronik.authorization.acls import Operation, ResourceType
from chronik.metadata.image import (
    OFFSETS_TOPIC,
    SHARE_STATE_TOPIC,
    TRANSACTIONS_TOPIC,
    ClusterImage,
    TopicImage,
    check_topic_name,
)
from chronik.node.admin.responses import NOT_REQUESTED, cluster_operations, find_topic
from chronik.node.admin.topic_description import AbsentBrokers, described_topic
from chronik.node.admin.topics import Topics
from chronik.node.config import NodeConfig
from chronik.node.coordinators.group_service import GroupService
from chronik.node.coordinators.share_coordinator import ShareCoordinatorService
from chronik.node.coordinators.transaction_service import TransactionService
from chronik.node.membership.departures import Departures
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.topic_plans import NewTopic
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.serving.api import Api, LargeValues, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

FIRST_VERSION_WITH_LISTENER_ERROR = 6
LOOP_PARTITIONS_MAX = 1_000
"""A response with more partitions is made in a thread: 100,000 take half a second."""


class Services(NamedTuple):
    """The parts of the node that this API uses."""

    config: NodeConfig
    metadata: MetadataLog
    departures: Departures
    topics: Topics
    groups: GroupService
    transactions: TransactionService
    share_coordinator: ShareCoordinatorService
    host: PartitionHost


async def handle(node: Services, request: Request) -> Values | LargeValues:
    message, access = request.message, request.access
    requested = message.topics
    found: list[TopicImage | Values]
    if requested is None or (request.api_version == 0 and not requested):
        await node.departures.wait_for_failover(None)
        topics = node.metadata.image.topics
        found = [topics[name] for name in sorted(topics) if access.sees(ResourceType.TOPIC, name)]
    else:
        found = await _requested_topics(node, request, requested)
    operations: Mapping[str, int] = {}
    if getattr(message, "include_topic_authorized_operations", False):
        names = [each.name for each in found if isinstance(each, TopicImage)]
        operations = {name: access.authorized_operations(ResourceType.TOPIC, name) for name in names}
    cluster = _cluster(node, request)
    described = DescribedTopics(found, _absent(node.metadata.image, request), operations)
    if sum(len(each.partitions) for each in found if isinstance(each, TopicImage)) > LOOP_PARTITIONS_MAX:
        return LargeValues(lambda: {**cluster, "topics": described})
    return {**cluster, "topics": [*described]}


async def _requested_topics(node: Services, request: Request, requested: Sequence[Any]) -> list[TopicImage | Values]:
    """Return the requested topics, and for those that cannot be described the response."""
    access = request.access
    found = [find_topic(node.metadata.image, entry) for entry in requested]
    names = [
        _requested_name(entry) if topic is None else topic.name for entry, topic in zip(requested, found, strict=True)
    ]
    seen = [name is None or access.allows(Operation.DESCRIBE, ResourceType.TOPIC, name) for name in names]
    await node.departures.wait_for_failover(
        [name for name, is_seen in zip(names, seen, strict=True) if name is not None and is_seen]
    )
    may_create = getattr(request.message, "allow_auto_topic_creation", True) and node.config.auto_create_topics
    # The response to a topic that the client may not see does not depend on whether the topic exists.
    return [
        await _find(node, request, entry, may_create)
        if is_seen
        else _failed(_requested_name(entry), _requested_id(entry), ErrorCode.topic_authorization_failed)
        for entry, is_seen in zip(requested, seen, strict=True)
    ]


class DescribedTopics:
    """The topics of a response, each described when it is encoded.

    All descriptions of 100,000 partitions would take 40 MB. And the compiled encoder keeps the interpreter's lock until
    it asks for the next topic.
    """

    def __init__(
        self, found: Sequence[TopicImage | Values], absent: AbsentBrokers, operations: Mapping[str, int]
    ) -> None:
        self._found = found
        self._absent = absent
        self._operations = operations

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Values]:
        for each in self._found:
            values = described_topic(each, self._absent) if isinstance(each, TopicImage) else each
            if isinstance(each, TopicImage) and each.name in self._operations:
                values["topic_authorized_operations"] = self._operations[each.name]
            yield values


def _cluster(node: Services, request: Request) -> Values:
    """Return the fields that do not depend on the requested topics."""
    with_operations = getattr(request.message, "include_cluster_authorized_operations", False)
    return {
        "brokers": [
            {"node_id": member.id, "host": address[0], "port": address[1], "rack": member.rack}
            for member in node.departures.listed_brokers()
            if (address := member.address(request.listener)) is not None
        ],
        "cluster_id": node.metadata.image.cluster_id,
        "controller_id": node.metadata.controller_id,
        "cluster_authorized_operations": cluster_operations(request.access) if with_operations else NOT_REQUESTED,
    }


async def _find(node: Services, request: Request, entry: Any, may_create: bool) -> TopicImage | Values:
    topic = find_topic(node.metadata.image, entry)
    if topic is not None:
        return topic
    name = _requested_name(entry)
    if name is None:
        return _failed(None, _requested_id(entry), ErrorCode.unknown_topic_id)
    try:
        access = request.access
        if may_create and not access.has(Operation.CREATE, ResourceType.CLUSTER):
            access.require(Operation.CREATE, ResourceType.TOPIC, name)
        check_topic_name(name)
        if not may_create:
            raise KafkaError(ErrorCode.unknown_topic_or_partition)
        return await _create(node, NewTopic(name, charged_to=(access.principal, request.client_id or "")))
    except KafkaError as error:
        return _failed(name, None, error.code)


def _requested_id(entry: Any) -> object:
    return getattr(entry, "topic_id", None)


def _requested_name(entry: Any) -> str | None:
    """Return the name by which the topic is requested; None if it is requested by id."""
    name: str | None = entry.name if _requested_id(entry) is None else None
    return name


async def _create(node: Services, new: NewTopic) -> TopicImage:
    """Create a topic with the node's defaults, unless another client has just created it.

    This includes the topics of coordinators: lag tools request the offsets topic before any group exists.
    """
    name = new.name
    try:
        if name == OFFSETS_TOPIC:
            await node.groups.topic.ensure_exists()
        elif name == TRANSACTIONS_TOPIC:
            await node.transactions.topic.ensure_exists()
        elif name == SHARE_STATE_TOPIC:
            await node.share_coordinator.topic.ensure_exists()
        else:
            await node.topics.create(new)
    except KafkaError as error:
        if error.code in (ErrorCode.coordinator_not_available, ErrorCode.throttling_quota_exceeded):
            # Not errors of this API; metadata clients retry after LEADER_NOT_AVAILABLE.
            raise KafkaError(ErrorCode.leader_not_available, error.message) from error
        if error.code != ErrorCode.topic_already_exists:
            raise
        await node.host.applied()
    return node.metadata.image.require_topic(name)


def _absent(image: ClusterImage, request: Request) -> AbsentBrokers:
    names_listener = request.api_version >= FIRST_VERSION_WITH_LISTENER_ERROR
    error = ErrorCode.listener_not_found if names_listener else ErrorCode.leader_not_available
    return AbsentBrokers.on(image, request.listener, error)


def _failed(name: str | None, topic_id: object, code: ErrorCode) -> Values:
    return {"error_code": code, "name": name, "topic_id": topic_id, "partitions": []}


def on_error(request: Request, code: ErrorCode) -> Values:
    topics = request.message.topics or ()
    return {
        "brokers": [],
        "topics": [_failed(_requested_name(topic), _requested_id(topic), code) for topic in topics],
    }


API = Api(ApiKey.METADATA, (0, 13), on_error=on_error)
