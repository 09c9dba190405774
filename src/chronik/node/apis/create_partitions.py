"""CreatePartitions (key 37), versions 0-3.

Behaviour
- Each topic has its own outcome, answered when the partitions are durable and this node's logs of them are open.
- The number only grows (INVALID_PARTITIONS); a topic that stands twice in one request is INVALID_REQUEST.
- Manual assignments, where given, are for the new partitions only and must have the topic's replication factor.
- validate_only answers the same and changes nothing.
Versions: 2 flexible.
Not supported: internal topics (INVALID_TOPIC_EXCEPTION), since their partitions map groups to coordinators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chronik.metadata.commands import CreatePartitions
from chronik.metadata.image import ClusterImage
from chronik.node.admin.outcomes import Outcome, duplicates, refusal, within
from chronik.node.admin.topic_creation import plan_partitions
from chronik.node.serving.request import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from chronik.node.broker import Broker


async def handle(broker: Broker, request: Request) -> Values:
    message = request.message
    repeated = duplicates(topic.name for topic in message.topics)
    results = [
        refusal(KafkaError(ErrorCode.invalid_request, "Duplicate topic in the request."), name=name)
        for name in repeated
    ]
    results += await within(
        broker,
        message.timeout,
        [
            Outcome({"name": topic.name}, _grow(broker, topic, message.validate_only))
            for topic in message.topics
            if topic.name not in repeated
        ],
    )
    return {"results": results}


async def _grow(broker: Broker, topic: Any, validate_only: bool) -> Values:
    assignments = None
    # An empty list means what null means: librdkafka and kafka-python send either for "place them yourself".
    if topic.assignments:
        assignments = [assignment.broker_ids for assignment in topic.assignments]

    def plan(image: ClusterImage) -> CreatePartitions:
        return plan_partitions(image, broker.env, topic.name, topic.count, assignments)

    if validate_only:
        plan(broker.image)
    else:
        await broker.metadata.propose(plan)
        await broker.applied_everywhere()
    return {}


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"results": [refusal(KafkaError(code), name=topic.name) for topic in request.message.topics]}


API = Api(ApiKey.CREATE_PARTITIONS, (0, 3), handle, on_error=on_error, on_controller=True)
