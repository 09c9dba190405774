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

from typing import Any

from chronik.metadata.apply import apply
from chronik.node.admin.configs import created_topic_entries
from chronik.node.admin.responses import duplicates, error_values, refuse_entries, within
from chronik.node.admin.topics import Topics
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.topic_plans import NewTopic, check_partition_count, plan_topic
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


async def handle(runtime: Runtime, metadata: MetadataLog, topics: Topics, request: Request) -> Values:
    message = request.message
    repeated = duplicates(topic.name for topic in message.topics)
    refused = error_values(KafkaError(ErrorCode.invalid_request, "Duplicate topic name."))
    unique = [topic for topic in message.topics if topic.name not in repeated]
    partition_count = sum(max(topic.num_partitions, len(topic.assignments), 0) for topic in unique)

    async def create(requested: Any) -> Values:
        check_partition_count(partition_count)
        new = _new_topic(requested)
        if message.validate_only:
            planned, _ = apply(metadata.image, plan_topic(metadata.image, runtime.config, runtime.env, new))
            topic, topic_id = planned.topics[new.name], None
        else:
            topic = await topics.create(new)
            topic_id = topic.id
        return {
            "topic_id": topic_id,
            "num_partitions": len(topic.partitions),
            "replication_factor": len(topic.partitions[0].replicas),
            "configs": created_topic_entries(topic, runtime.config, metadata.image),
        }

    entries = [({"name": topic.name, "configs": []}, create(topic)) for topic in unique]
    return {
        "topics": [
            *({"name": name, "configs": [], **refused} for name in repeated),
            *await within(runtime, message.timeout, entries),
        ]
    }


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


API = Api(
    ApiKey.CREATE_TOPICS,
    (2, 7),
    on_error=refuse_entries("topics", lambda request: ({"name": topic.name} for topic in request.message.topics)),
    on_controller=True,
)
