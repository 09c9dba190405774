"""DescribeTopicPartitions (key 75), version 0 (KIP-966).

Behaviour
- Describes the named topics, or all if none is named, in the order of their names. Topics that the client may not
  describe are omitted if all are requested, otherwise TOPIC_AUTHORIZATION_FAILED. No topic is created.
- A response has at most `response_partition_limit` partitions, and at most 2,000. If partitions remain, `next_cursor`
  names the first of them; the client sends it with the same topics to continue. Topics that are deleted meanwhile are
  skipped if all are requested.
- Partitions have the fields of Metadata, and the eligible leaders. A partition without a leader has its last known
  leader as last known eligible one.
- INVALID_REQUEST for a cursor with a negative partition.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from chronik.authorization.acls import Operation, ResourceType
from chronik.metadata.image import NO_LEADER, ClusterImage, TopicImage, check_topic_name
from chronik.node.admin.topic_description import AbsentBrokers, described_topic
from chronik.node.membership.departures import Departures
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

PARTITIONS_MAX = 2_000


class Cursor(NamedTuple):
    """The first partition that a response describes."""

    topic: str
    partition: int


async def handle(metadata: MetadataLog, departures: Departures, request: Request) -> Values:
    message, access = request.message, request.access
    first = _cursor(message.cursor)
    covers_all = not message.topics
    names = sorted(metadata.image.topics if covers_all else {topic.name for topic in message.topics})
    names = [name for name in names if name >= first.topic]
    if covers_all:
        visible = [name for name in names if access.sees(ResourceType.TOPIC, name)]
        await departures.wait_for_failover(None)
    else:
        visible = [name for name in names if access.allows(Operation.DESCRIBE, ResourceType.TOPIC, name)]
        await departures.wait_for_failover(visible)
    hidden = set() if covers_all else set(names) - set(visible)
    page = _Page(metadata.image, request, max(1, min(message.response_partition_limit, PARTITIONS_MAX)))
    return page.described(visible if covers_all else names, first, hidden, covers_all)


def _cursor(requested: Any) -> Cursor:
    if requested is None:
        return Cursor("", 0)
    if requested.partition_index < 0:
        raise KafkaError(ErrorCode.invalid_request, f"a cursor at partition {requested.partition_index}")
    return Cursor(requested.topic_name, requested.partition_index)


class _Page:
    """The topics of one response, up to a number of partitions."""

    def __init__(self, image: ClusterImage, request: Request, partitions_max: int) -> None:
        self._image = image
        self._access = request.access
        self._absent = AbsentBrokers.on(image, request.listener)
        self._left = partitions_max

    def described(self, names: Iterable[str], first: Cursor, hidden: set[str], covers_all: bool) -> Values:
        topics: list[Values] = []
        for name in names:
            topic = self._image.topic(name)
            if name in hidden:
                # It does not depend on whether the topic exists.
                topics.append(_failed(name, ErrorCode.topic_authorization_failed))
            elif topic is None:
                if not covers_all:
                    topics.append(_failed(name, _reason(name)))
            elif self._left <= 0:
                return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": 0}}
            else:
                start = first.partition if name == first.topic else 0
                end = min(len(topic.partitions), start + self._left)
                topics.append(self._topic(topic, start, end))
                self._left -= max(0, end - start)
                if end < len(topic.partitions):
                    return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": end}}
        return {"topics": topics, "next_cursor": None}

    def _topic(self, topic: TopicImage, start: int, end: int) -> Values:
        values = described_topic(topic, self._absent)
        operations = self._access.authorized_operations(ResourceType.TOPIC, topic.name)
        partitions = [
            {
                **partition,
                "eligible_leader_replicas": image.eligible,
                "last_known_elr": () if image.last_known_leader == NO_LEADER else (image.last_known_leader,),
            }
            for partition, image in zip(values["partitions"][start:end], topic.partitions[start:end], strict=True)
        ]
        return {**values, "partitions": partitions, "topic_authorized_operations": operations}


def _reason(name: str) -> ErrorCode:
    try:
        check_topic_name(name)
    except KafkaError as error:
        return error.code
    return ErrorCode.unknown_topic_or_partition


def _failed(name: str, code: ErrorCode) -> Values:
    return {"error_code": code, "name": name, "partitions": []}


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"topics": [_failed(topic.name, code) for topic in request.message.topics], "next_cursor": None}


API = Api(ApiKey.DESCRIBE_TOPIC_PARTITIONS, (0, 0), on_error=on_error)
