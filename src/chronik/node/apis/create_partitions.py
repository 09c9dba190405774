"""CreatePartitions (key 37), versions 0-3.

Behaviour
- Each topic has its own outcome, answered when the partitions are durable and this node's logs of them are open.
- The partition count can only grow (INVALID_PARTITIONS). A topic that appears twice in a request is INVALID_REQUEST.
- Manual assignments are for the new partitions only and must have the topic's replication factor.
- validate_only returns the same response and changes nothing.
- The new partitions are charged to the client's `controller_mutation_rate`, as in CreateTopics.
Versions: 2 flexible, 3 THROTTLING_QUOTA_EXCEEDED.
Not supported: internal topics (INVALID_TOPIC_EXCEPTION), since their partitions map groups to coordinators.
"""

from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.metadata.commands import CreatePartitions
from chronik.metadata.image import ClusterImage
from chronik.node.admin.responses import duplicates, error_values, refuse_entries, within
from chronik.node.membership.controller_service import ControllerService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.topic_plans import plan_partitions
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.node.serving.quotas import ClientQuotas
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

STRICT_FROM_VERSION = 3
"""A client of this version knows THROTTLING_QUOTA_EXCEEDED."""


async def handle(
    runtime: Runtime, metadata: MetadataLog, controller: ControllerService, quotas: ClientQuotas, request: Request
) -> Values:
    message = request.message
    quota = quotas.mutations(request, STRICT_FROM_VERSION)

    async def grow(topic: Any) -> Values:
        request.access.require(Operation.ALTER, ResourceType.TOPIC, topic.name)
        # An empty list means the same as null: librdkafka and kafka-python send either for automatic placement.
        assignments = [assignment.broker_ids for assignment in topic.assignments or ()] or None

        def plan(image: ClusterImage) -> CreatePartitions:
            return plan_partitions(image, runtime.env, topic.name, topic.count, assignments)

        if quota is not None:
            quota.charge(len(plan(metadata.image).partitions))
        if message.validate_only:
            plan(metadata.image)
        else:
            await metadata.propose(plan)
            await controller.applied_everywhere()
        return {}

    repeated = duplicates(topic.name for topic in message.topics)
    refused = error_values(KafkaError(ErrorCode.invalid_request, "Duplicate topic in the request."))
    entries = [({"name": topic.name}, grow(topic)) for topic in message.topics if topic.name not in repeated]
    return {
        "results": [
            *({"name": name, **refused} for name in repeated),
            *await within(runtime, message.timeout, entries),
        ]
    }


API = Api(
    ApiKey.CREATE_PARTITIONS,
    (0, 3),
    on_error=refuse_entries("results", lambda request: ({"name": topic.name} for topic in request.message.topics)),
    on_controller=True,
)
