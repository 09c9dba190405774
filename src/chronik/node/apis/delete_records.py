"""DeleteRecords (key 21), versions 0-2.

Behaviour
- Raises a partition's log start to the given offset (-1: the high watermark). Records below it can no longer be read,
  and segments that hold only such records are deleted.
- Answers with the low watermark, the smallest log start of the in-sync replicas, once all of them have done the same:
  no failover brings deleted records back. REQUEST_TIMED_OUT if this, or reaching min.insync.replicas, takes too long.
- An offset above the high watermark is OFFSET_OUT_OF_RANGE; one below the log start changes nothing.
- POLICY_VIOLATION unless `cleanup.policy` includes delete: a compacted topic promises each key's latest record.
Versions: 2 flexible.
Not supported: internal topics (INVALID_TOPIC_EXCEPTION).
"""

from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.metadata.image import is_internal
from chronik.node.admin.responses import each_partition, within
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.node.serving.deadlines import bounded_wait_s
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

NO_LOW_WATERMARK = -1


async def handle(runtime: Runtime, host: PartitionHost, request: Request) -> Values:
    message = request.message
    entries = [
        (
            {"partition_index": partition.partition_index, "low_watermark": NO_LOW_WATERMARK},
            _delete(host, topic.name, partition, bounded_wait_s(message.timeout), is_allowed),
        )
        for topic in message.topics
        for is_allowed in (request.access.allows(Operation.DELETE, ResourceType.TOPIC, topic.name),)
        for partition in topic.partitions
    ]
    outcomes = iter(await within(runtime, message.timeout, entries))

    def outcome(topic: Any, partition: Any) -> Values:
        values = next(outcomes)
        del values["error_message"]  # This API has none.
        return values

    return {"topics": each_partition(message.topics, outcome)}


async def _delete(host: PartitionHost, topic: str, requested: Any, wait_s: float, is_allowed: bool) -> Values:
    if not is_allowed:
        raise KafkaError(ErrorCode.topic_authorization_failed)
    if is_internal(topic):
        raise KafkaError(ErrorCode.invalid_topic_exception, f"{topic!r} is internal")
    partition = host.require_leader(topic, requested.partition_index)
    log_config = partition.settings.log_config
    if log_config.cleanup_compact and not log_config.cleanup_delete:
        raise KafkaError(ErrorCode.policy_violation, f"cleanup.policy of {topic!r} does not include delete")
    low_watermark = await partition.delete_records(requested.offset, wait_s)
    # The lease may have ended while the replicas caught up.
    host.require_leader(topic, requested.partition_index)
    return {"low_watermark": low_watermark}


API = Api(ApiKey.DELETE_RECORDS, (0, 2))
