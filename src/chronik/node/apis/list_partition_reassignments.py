"""ListPartitionReassignments (key 46), version 0.

Behaviour
- Returns the partitions that are being reassigned, with their current, adding and removing replicas: of all topics, or
  of the requested partitions. Partitions that are not being reassigned, or do not exist, are omitted.
Answered by the controller, which begins and ends reassignments; other nodes forward the request to it.
"""

from chronik.metadata.reassignment import reassigning
from chronik.node.admin.responses import by_topic, error_values
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey


async def handle(metadata: MetadataLog, request: Request) -> Values:
    topics = request.message.topics
    requested = None
    if topics is not None:
        requested = [(topic.name, index) for topic in topics for index in topic.partition_indexes]
    reassignments = by_topic(
        (
            name,
            {
                "partition_index": partition.partition,
                "replicas": list(partition.replicas),
                "adding_replicas": list(partition.adding),
                "removing_replicas": list(partition.removing),
            },
        )
        for name, partition in reassigning(metadata.image, requested)
    )
    return {
        **error_values(None),
        "topics": [{"name": name, "partitions": partitions} for name, partitions in reassignments.items()],
    }


API = Api(ApiKey.LIST_PARTITION_REASSIGNMENTS, (0, 0), on_controller=True)
