"""DeleteTopics (key 20), versions 1-6.

Behaviour
- Each topic has its own outcome, answered when the deletion is durable and this node has released the topic's logs, so
  the name can be reused at once. A recreated topic has a new id.
- An entry has either a topic's name or its id. Both, neither, or a topic that appears twice is INVALID_REQUEST.
- The partitions are charged to the client's `controller_mutation_rate`, as in CreateTopics.
Versions: 4 flexible, 5 error messages and THROTTLING_QUOTA_EXCEEDED, 6 by id.
Not supported: deleting internal topics (INVALID_TOPIC_EXCEPTION).
"""

from uuid import UUID

from chronik.authorization.acls import Operation, ResourceType
from chronik.metadata.commands import DeleteTopic
from chronik.metadata.image import ClusterImage, TopicImage
from chronik.node.admin.responses import duplicates, refuse_entries, within
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.node.serving.quotas import ClientQuotas
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

BY_ID_FROM_VERSION = 6
STRICT_FROM_VERSION = 5
"""A client of this version knows THROTTLING_QUOTA_EXCEEDED."""


async def handle(
    runtime: Runtime, metadata: MetadataLog, host: PartitionHost, quotas: ClientQuotas, request: Request
) -> Values:
    quota = quotas.mutations(request, STRICT_FROM_VERSION)
    image, topics, access = metadata.image, _entries(request), request.access
    repeated = duplicates(_resolved(image, *topic) for topic in topics)
    listed_twice = duplicates(topics)
    may_delete_all = access.has(Operation.DELETE, ResourceType.CLUSTER)

    def authorize(name: str | None, topic_id: UUID | None) -> None:
        if may_delete_all:
            return
        if topic_id is not None:
            name = image.names_by_id.get(topic_id)
        elif name is not None and image.topic(name) is None:
            # Only clients that may describe the topic learn whether it exists.
            access.require(Operation.DESCRIBE, ResourceType.TOPIC, name)
            return
        if name is not None:
            access.require(Operation.DELETE, ResourceType.TOPIC, name)

    def shown(name: str | None, topic_id: UUID | None) -> str | None:
        """Return the topic's name, if the request or the client's rights reveal it."""
        known = None if topic_id is None else image.names_by_id.get(topic_id)
        if name is None and known is not None and access.sees(ResourceType.TOPIC, known):
            return known
        return name

    async def delete(name: str | None, topic_id: UUID | None, is_repeated: bool) -> Values:
        if (name, topic_id) in listed_twice:
            raise KafkaError(ErrorCode.invalid_request, "Duplicate topic in the request.")
        if (name is None) == (topic_id is None):
            raise KafkaError(ErrorCode.invalid_request, "Give either the topic's name or its id.")
        authorize(name, topic_id)
        if is_repeated:
            # Only for an authorized client: it learns which topic has the id.
            raise KafkaError(ErrorCode.invalid_request, "Duplicate topic in the request.")
        if quota is not None:
            quota.charge(len(_find(metadata.image, name, topic_id).partitions))
        deleted: list[TopicImage] = []

        def plan(image: ClusterImage) -> DeleteTopic:
            topic = _find(image, name, topic_id)
            deleted.append(topic)
            return DeleteTopic(topic.name, topic.id)

        await metadata.propose(plan)
        await host.applied()
        return {"name": deleted[0].name, "topic_id": deleted[0].id}

    entries = [
        (
            {"name": shown(name, topic_id), "topic_id": topic_id},
            delete(name, topic_id, _resolved(image, name, topic_id) in repeated),
        )
        for name, topic_id in dict.fromkeys(topics)
    ]
    return {"responses": await within(runtime, request.message.timeout, entries)}


def _entries(request: Request) -> list[tuple[str | None, UUID | None]]:
    message = request.message
    if request.api_version >= BY_ID_FROM_VERSION:
        return [(topic.name, topic.topic_id) for topic in message.topics]
    return [(name, None) for name in message.topic_names]


def _find(image: ClusterImage, name: str | None, topic_id: UUID | None) -> TopicImage:
    if topic_id is not None:
        topic = image.topic_by_id(topic_id)
        if topic is None:
            raise KafkaError(ErrorCode.unknown_topic_id, f"no topic has the id {topic_id}")
    else:
        topic = image.require_topic(name or "")
    if topic.is_internal:
        raise KafkaError(ErrorCode.invalid_topic_exception, f"{topic.name!r} is internal and cannot be deleted")
    return topic


def _resolved(image: ClusterImage, name: str | None, topic_id: UUID | None) -> str:
    """Return a key for the entry that is the same for a topic's name and its id."""
    if topic_id is None:
        return f"name {name}"
    known = image.names_by_id.get(topic_id)
    return f"id {topic_id}" if known is None else f"name {known}"


API = Api(
    ApiKey.DELETE_TOPICS,
    (1, 6),
    on_error=refuse_entries(
        "responses", lambda request: ({"name": name, "topic_id": topic_id} for name, topic_id in _entries(request))
    ),
    on_controller=True,
)
