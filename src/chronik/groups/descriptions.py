"""Groups as ConsumerGroupDescribe and ShareGroupDescribe show them: only what is durable."""

from typing import Any

from chronik.groups.consumer_group import NOTHING, ConsumerGroup
from chronik.groups.consumer_member import ConsumerMember
from chronik.groups.share_assignor import SIMPLE
from chronik.groups.share_group import ShareGroup
from chronik.groups.topics import Assignment, TopicCatalog, by_topic
from chronik.wire.errors import ErrorCode

CLASSIC_MEMBER = 0
CONSUMER_MEMBER = 1


def describe(group: ConsumerGroup, default_assignor: str, catalog: TopicCatalog) -> dict[str, Any]:
    image = group.durable
    return {
        "error_code": ErrorCode.none,
        "group_id": group.group_id,
        "group_state": str(image.state),
        "group_epoch": image.epoch,
        "assignment_epoch": image.assignment_epoch,
        "assignor_name": image.preferred_assignor(default_assignor),
        "members": [
            _member(member, image.target.get(member.member_id, NOTHING), catalog) for member in image.members.values()
        ],
    }


def describe_shares(group: ShareGroup, catalog: TopicCatalog) -> dict[str, Any]:
    """A share group as ShareGroupDescribe shows it."""
    image = group.durable
    return {
        "error_code": ErrorCode.none,
        "group_id": group.group_id,
        "group_state": str(image.state),
        "group_epoch": image.epoch,
        "assignment_epoch": image.assignment_epoch,
        "assignor_name": SIMPLE,
        "members": [
            {
                "member_id": member.member_id,
                "rack_id": member.metadata.rack,
                "member_epoch": member.current.epoch,
                "client_id": member.metadata.client_id,
                "client_host": member.metadata.client_host,
                "subscribed_topic_names": list(member.metadata.topics),
                "assignment": _topics(member.current.partitions, catalog),
            }
            for member in image.members.values()
        ],
    }


def _member(member: ConsumerMember, target: Assignment, catalog: TopicCatalog) -> dict[str, Any]:
    metadata = member.metadata
    return {
        "member_id": member.member_id,
        "instance_id": metadata.instance_id,
        "rack_id": metadata.rack,
        "member_epoch": member.current.epoch,
        "client_id": metadata.client_id,
        "client_host": metadata.client_host,
        "subscribed_topic_names": list(metadata.topics),
        "subscribed_topic_regex": metadata.expression or None,
        "assignment": _topics(member.current.assigned, catalog),
        "target_assignment": _topics(target, catalog),
        "member_type": CLASSIC_MEMBER if member.uses_classic_protocol else CONSUMER_MEMBER,
    }


def _topics(assignment: Assignment, catalog: TopicCatalog) -> dict[str, Any]:
    """Return the partitions by topic; without topics that were deleted."""
    named = [(topic_id, catalog.name_of(topic_id), indexes) for topic_id, indexes in by_topic(assignment).items()]
    return {
        "topic_partitions": [
            {"topic_id": topic_id, "topic_name": name, "partitions": indexes}
            for topic_id, name, indexes in named
            if name is not None
        ]
    }
