"""CreateTopics (key 19), versions 2-7.

Behaviour
- Each topic has its own outcome. It is answered when the topic is durable and this node's logs of it are open, so the
  client's next request finds it. A wait beyond the request's timeout ends with REQUEST_TIMED_OUT; the topic may still
  be created.
- A name that appears twice in one request is INVALID_REQUEST, and no topic of that name is created.
- -1 partitions or replicas use the node's defaults. Manual assignments require -1 for both.
- validate_only returns the same response and changes nothing.
Versions: 4 defaults by -1, 5 flexible, partitions and configs in the response, 7 topic ids.
Not supported: internal topics (INVALID_TOPIC_EXCEPTION), more than 10,000 partitions in a request (POLICY_VIOLATION).
"""

from typing import Any, NamedTuple
from uuid import UUID

from chronik.metadata.apply import apply
from chronik.metadata.image import TopicImage
from chronik.node.admin.config_entries import created_topic_entries
from chronik.node.admin.responses import duplicates, error_values, refuse_entries, within
from chronik.node.admin.topics import Topics
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.topic_plans import NewTopic, check_partition_count, plan_topic
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


class Services(NamedTuple):
    """The parts of the node that this API uses."""

    runtime: Runtime
    metadata: MetadataLog
    topics: Topics


async def handle(node: Services, request: Request) -> Values:
    message = request.message
    repeated = duplicates(topic.name for topic in message.topics)
    refused = error_values(KafkaError(ErrorCode.invalid_request, "Duplicate topic name."))
    topics = [topic for topic in message.topics if topic.name not in repeated]
    partition_count = sum(max(topic.num_partitions, len(topic.assignments), 0) for topic in topics)
    entries = [
        ({"name": topic.name, "configs": []}, _create(node, topic, partition_count, message.validate_only))
        for topic in topics
    ]
    return {
        "topics": [
            *({"name": name, "configs": [], **refused} for name in repeated),
            *await within(node.runtime, message.timeout, entries),
        ]
    }


async def _create(node: Services, topic: Any, partition_count: int, validate_only: bool) -> Values:
    check_partition_count(partition_count)
    new = _new_topic(topic)
    if validate_only:
        planned, _ = apply(
            node.metadata.image, plan_topic(node.metadata.image, node.runtime.config, node.runtime.env, new)
        )
        return _created(node, planned.topics[new.name], None)
    created = await node.topics.create(new)
    return _created(node, created, created.id)


def _new_topic(topic: Any) -> NewTopic:
    if repeated := duplicates(config.name for config in topic.configs):
        raise KafkaError(ErrorCode.invalid_config, f"Duplicate config name {repeated[0]}.")
    if duplicates(assignment.partition_index for assignment in topic.assignments):
        raise KafkaError(ErrorCode.invalid_replica_assignment, "A partition has two assignments.")
    return NewTopic(
        name=topic.name,
        num_partitions=topic.num_partitions,
        replication_factor=topic.replication_factor,
        assignments={assignment.partition_index: assignment.broker_ids for assignment in topic.assignments},
        configs={config.name: config.value for config in topic.configs},
    )


def _created(node: Services, topic: TopicImage, topic_id: UUID | None) -> Values:
    return {
        "name": topic.name,
        "topic_id": topic_id,
        "num_partitions": len(topic.partitions),
        "replication_factor": len(topic.partitions[0].replicas),
        "configs": created_topic_entries(topic, node.runtime.config, node.metadata.image),
    }


API = Api(
    ApiKey.CREATE_TOPICS,
    (2, 7),
    on_error=refuse_entries("topics", lambda request: ({"name": topic.name} for topic in request.message.topics)),
    on_controller=True,
)
