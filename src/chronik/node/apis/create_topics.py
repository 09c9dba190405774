"""CreateTopics (key 19), versions 2-7.

Behaviour
- Each topic has its own outcome. It is answered when the topic is durable and this node's logs of it are open, so the
  client's next request finds it. A wait beyond the request's timeout ends with REQUEST_TIMED_OUT; the topic may still
  be created.
- A name that appears twice in one request is INVALID_REQUEST, and no topic of that name is created.
- -1 partitions or replicas use the node's defaults. Manual assignments require -1 for both.
- Partitions, replicas and configs of the new topic are returned only to clients with DESCRIBE_CONFIGS.
- validate_only returns the same response and creates nothing.
- The partitions of a valid topic, also with validate_only, are charged to the client's `controller_mutation_rate`
  (KIP-599). While that is used up, topics are refused with THROTTLING_QUOTA_EXCEEDED; before version 6 they are created
  and the client is throttled.
Versions: 4 defaults by -1, 5 flexible, partitions and configs in the response, 6 THROTTLING_QUOTA_EXCEEDED, 7 ids.
Not supported: internal topics (INVALID_TOPIC_EXCEPTION), more than 10,000 partitions in a request (POLICY_VIOLATION).
"""

from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.metadata.apply import apply
from chronik.metadata.image import TopicImage
from chronik.node.admin.configs import created_topic_entries
from chronik.node.admin.responses import duplicates, error_values, refuse_entries, within
from chronik.node.admin.topics import Topics
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.topic_plans import NewTopic, check_partition_count, plan_topic
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.node.serving.quotas import ClientQuotas
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

NOT_SHOWN = -1

STRICT_FROM_VERSION = 6
"""A client of this version knows THROTTLING_QUOTA_EXCEEDED."""


async def handle(
    runtime: Runtime, metadata: MetadataLog, topics: Topics, quotas: ClientQuotas, request: Request
) -> Values:
    message = request.message
    quota = quotas.mutations(request, STRICT_FROM_VERSION)
    repeated = duplicates(topic.name for topic in message.topics)
    refused = error_values(KafkaError(ErrorCode.invalid_request, "Duplicate topic name."))
    unique = [topic for topic in message.topics if topic.name not in repeated]
    partition_count = sum(max(topic.num_partitions, len(topic.assignments), 0) for topic in unique)

    access = request.access
    may_create_all = access.has(Operation.CREATE, ResourceType.CLUSTER)

    async def create(requested: Any) -> Values:
        if not may_create_all:
            access.require(Operation.CREATE, ResourceType.TOPIC, requested.name)
        check_partition_count(partition_count)
        new = _new_topic(requested)
        planned: TopicImage | None = None
        if message.validate_only or quota is not None:
            image, _ = apply(metadata.image, plan_topic(metadata.image, runtime.config, runtime.env, new))
            planned = image.topics[new.name]
            if quota is not None:
                quota.charge(len(planned.partitions))
        if message.validate_only and planned is not None:
            topic, topic_id = planned, None
        else:
            topic = await topics.create(new)
            topic_id = topic.id
        if not access.has(Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, new.name):
            return {
                "topic_id": topic_id,
                "num_partitions": NOT_SHOWN,
                "replication_factor": NOT_SHOWN,
                "topic_config_error_code": ErrorCode.topic_authorization_failed,
            }
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
