"""A response about many topics describes them one by one, while it is encoded."""

from __future__ import annotations

from uuid import UUID

import pytest

from chronik.metadata.image import NO_LEADER, BrokerImage, ClusterImage, PartitionImage, TopicImage
from chronik.node.admin import topic_description
from chronik.node.admin.topic_description import AbsentBrokers, described_topic
from chronik.node.apis import metadata
from chronik.node.apis.metadata import DescribedTopics
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode
from chronik.wire.messages import write_response

LISTENERS = {1: {"IN": ("h", 1), "OUT": ("h", 2)}, 2: {"IN": ("h", 3)}, 3: {"IN": ("h", 4), "OUT": ("h", 5)}}


def image() -> ClusterImage:
    brokers = {
        broker_id: BrokerImage(broker_id, 1, "h", 1, UUID(int=1), is_fenced=broker_id == 3, listeners=listeners)
        for broker_id, listeners in LISTENERS.items()
    }
    partitions = tuple(
        PartitionImage(index, leader, 7, (1, 2, 3), (1, 2)) for index, leader in enumerate((1, 2, NO_LEADER))
    )
    topics = {name: TopicImage(name, UUID(int=number), partitions) for number, name in enumerate("abc")}
    return ClusterImage(topics=topics, brokers=brokers)


def test_topics_are_described_as_they_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = AbsentBrokers.on(image(), "IN")
    found = [*image().topics.values()]
    written = write_response(ApiKey.METADATA, 12, {"topics": [described_topic(topic, absent) for topic in found]})
    described: list[str] = []

    def record(topic: TopicImage, absent: AbsentBrokers) -> dict[str, object]:
        described.append(topic.name)
        return topic_description.described_topic(topic, absent)

    monkeypatch.setattr(metadata, "described_topic", record)
    topics = DescribedTopics(found, absent, {})
    assert write_response(ApiKey.METADATA, 12, {"topics": topics}) == written
    assert described == ["a", "b", "c"]
    next(iter(topics))
    assert described == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("listener", "leaders", "errors", "offline"),
    [
        ("IN", [1, 2, -1], [ErrorCode.none, ErrorCode.none, ErrorCode.leader_not_available], [3]),
        ("OUT", [1, -1, -1], [ErrorCode.none, ErrorCode.listener_not_found, ErrorCode.leader_not_available], [2, 3]),
    ],
)
def test_replicas_are_offline_if_their_broker_is_fenced_or_lacks_the_listener(
    listener: str, leaders: list[int], errors: list[ErrorCode], offline: list[int]
) -> None:
    described = described_topic(image().topics["a"], AbsentBrokers.on(image(), listener))["partitions"]
    assert [each["leader_id"] for each in described] == leaders
    assert [each["error_code"] for each in described] == errors
    assert [each["offline_replicas"] for each in described] == [offline] * 3
