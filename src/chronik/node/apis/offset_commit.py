"""OffsetCommit (key 8), versions 2-10.

Behaviour
- Answered when the offsets are committed to `__consumer_offsets`; waiting commits are written together.
- A member commits with its generation: an older one is ILLEGAL_GENERATION, and in CompletingRebalance even the current
  one is REBALANCE_IN_PROGRESS. A client without membership (generation -1) may commit only while the group is empty.
- A member of a consumer group (KIP-848) commits with its member epoch: another one is STALE_MEMBER_EPOCH, and for its
  classic members ILLEGAL_GENERATION. Versions below 9 are UNSUPPORTED_VERSION for members of the new protocol.
- A group that does not exist is GROUP_ID_NOT_FOUND from version 9, ILLEGAL_GENERATION before, unless the generation
  is -1.
- Partitions that do not exist are UNKNOWN_TOPIC_OR_PARTITION, unknown topic ids UNKNOWN_TOPIC_ID, metadata of more than
  4,096 bytes OFFSET_METADATA_TOO_LARGE; the other partitions of the request are still committed.
Versions: 3 throttling, 5 no retention time, 6 leader epoch, 7 static members, 8 flexible, 9 member epochs (KIP-848),
10 topic ids.
Not supported: the retention time of versions 2-4, which Kafka ignores as well once a group has members.
"""

from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.groups.commits import CommitRequest
from chronik.groups.records import TopicPartition
from chronik.node.admin.responses import each_partition, find_topic, may_read, refuse_partitions, topic_of
from chronik.node.coordinators.group_service import GroupService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

FIRST_VERSION_WITH_MEMBER_EPOCHS = 9
FIRST_VERSION_WITH_TOPIC_IDS = 10


async def handle(groups: GroupService, metadata: MetadataLog, request: Request) -> Values:
    message = request.message
    request.access.require(Operation.READ, ResourceType.GROUP, message.group_id)
    topics = {topic_of(entry): find_topic(metadata.image, entry) for entry in message.topics}
    refused = {topic_of(entry) for entry in message.topics if not may_read(request, entry, topics[topic_of(entry)])}
    offsets: list[tuple[TopicPartition, int, int, str]] = []
    for entry in message.topics:
        topic = topics[topic_of(entry)]
        for each in entry.partitions:
            if (
                topic_of(entry) not in refused
                and topic is not None
                and topic.partition(each.partition_index) is not None
            ):
                leader_epoch = getattr(each, "committed_leader_epoch", -1)
                partition = (topic.name, each.partition_index)
                offsets.append((partition, each.committed_offset, leader_epoch, each.committed_metadata or ""))
    errors: dict[TopicPartition, ErrorCode] = {}
    if offsets:
        errors = await groups.commit(
            CommitRequest(
                group_id=message.group_id,
                generation=message.generation_id_or_member_epoch,
                member_id=message.member_id,
                instance_id=getattr(message, "group_instance_id", None),
                offsets=tuple(offsets),
                knows_epochs=request.api_version >= FIRST_VERSION_WITH_MEMBER_EPOCHS,
            )
        )

    def outcome(entry: Any, each: Any) -> Values:
        topic = topics[topic_of(entry)]
        if topic_of(entry) in refused:
            return {"error_code": ErrorCode.topic_authorization_failed}
        if topic is None:
            by_id = request.api_version >= FIRST_VERSION_WITH_TOPIC_IDS
            return {"error_code": ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition}
        partition = (topic.name, each.partition_index)
        return {"error_code": errors.get(partition, ErrorCode.unknown_topic_or_partition)}

    return {"topics": each_partition(message.topics, outcome)}


API = Api(ApiKey.OFFSET_COMMIT, (2, 10), on_error=refuse_partitions)
