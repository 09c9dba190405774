"""What the responses of many APIs share: an outcome for each entry of the request, and authorized operations."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

from chronik.authorization.acls import Operation, ResourceType
from chronik.metadata.image import ClusterImage, TopicImage
from chronik.metadata.plans import Plan
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.runtime import Runtime
from chronik.node.serving.access import Access
from chronik.node.serving.api import ErrorValues, Request, Values
from chronik.node.serving.deadlines import bounded_wait_s
from chronik.observe.logging import Logger
from chronik.wire.errors import ErrorCode, KafkaError

H = TypeVar("H", bound=Hashable)

# -- one outcome for each entry ----------------------------------------------------------------------------------------


def error_values(error: KafkaError | None) -> Values:
    if error is None:
        return {"error_code": ErrorCode.none, "error_message": None}
    return {"error_code": error.code, "error_message": error.message or None}


def refuse_entries(field: str, entries: Callable[[Request], Iterable[Values]]) -> ErrorValues:
    """Return an `on_error` that refuses each entry of the request; `entries` returns the fields that identify it."""
    return lambda request, code: {field: [{**entry, "error_code": code} for entry in entries(request)]}


def require_cluster(image: ClusterImage, cluster_id: str | None) -> None:
    """Raise INCONSISTENT_CLUSTER_ID if a request is meant for another cluster."""
    if cluster_id is not None and cluster_id != image.cluster_id:
        raise KafkaError(ErrorCode.inconsistent_cluster_id, f"this is cluster {image.cluster_id}, not {cluster_id}")


def duplicates(items: Iterable[H]) -> list[H]:
    """Return the items that occur more than once, each once, in the order of first occurrence."""
    return [item for item, count in Counter(items).items() if count > 1]


async def within(
    runtime: Runtime, wait: timedelta, entries: Iterable[tuple[Values, Coroutine[Any, Any, Values]]]
) -> list[Values]:
    """Run the work of all entries concurrently, so that they share commits; return their results in order.

    An entry is the fields that identify it and the work that returns its other fields. Work that exceeds the timeout is
    answered with REQUEST_TIMED_OUT and continues.
    """
    tasks = [(key, runtime.loop.create_task(_outcome(runtime.log, key, work))) for key, work in entries]
    if not tasks:
        return []
    wait_s = bounded_wait_s(wait)
    await asyncio.wait([task for _, task in tasks], timeout=wait_s)
    return [task.result() if task.done() else {**key, **error_values(_not_done(wait_s))} for key, task in tasks]


async def _outcome(log: Logger, key: Values, work: Coroutine[Any, Any, Values]) -> Values:
    try:
        return {**key, **error_values(None), **await work}
    except KafkaError as error:
        refusal = error
    except TimeoutError:
        refusal = KafkaError(ErrorCode.request_timed_out, "Committed, but not yet applied on this node.")
    except Exception:
        log.exception("admin_request_failed", **{name: str(value) for name, value in key.items()})
        refusal = KafkaError(ErrorCode.unknown_server_error, "unexpected error; see the node's log")
    return {**key, **error_values(refusal)}


async def propose_within(metadata: MetadataLog, wait: timedelta, make_plan: Callable[[ClusterImage], Plan]) -> Plan:
    """Plan on the newest image, propose the plan, and return it with its outcomes. REQUEST_TIMED_OUT if late."""
    wait_s = bounded_wait_s(wait)
    try:
        async with asyncio.timeout(wait_s):
            return await metadata.propose_plan(make_plan)
    except TimeoutError:
        raise _not_done(wait_s) from None


def _not_done(wait_s: float) -> KafkaError:
    return KafkaError(ErrorCode.request_timed_out, f"Not finished in {int(wait_s * 1000)} ms; it may still complete.")


# -- topics and partitions ---------------------------------------------------------------------------------------------


def find_topic(image: ClusterImage, entry: Any) -> TopicImage | None:
    """Return the topic that an entry of a request names: by its id, or by name if it has none.

    Java's client sends an id with an empty name.
    """
    topic_id = getattr(entry, "topic_id", None)
    if topic_id is not None:
        return image.topic_by_id(topic_id)
    name = getattr(entry, "name", None)
    return None if name is None else image.topic(name)


def topic_of(entry: Any) -> object:
    """Return what identifies the topic of an entry: its name, or in versions without names its id."""
    return entry.name if hasattr(entry, "name") else entry.topic_id


def may_read(request: Request, entry: Any, topic: TopicImage | None) -> bool:
    """Return whether the client may read the topic of an entry. An unknown topic id names no topic."""
    name = getattr(entry, "name", None) if topic is None else topic.name
    return name is None or request.access.allows(Operation.READ, ResourceType.TOPIC, name)


def topic_key(topic: object) -> Values:
    """Return the fields that identify the topic, in the response as in the request."""
    return {name: getattr(topic, name) for name in ("name", "topic", "topic_id") if hasattr(topic, name)}


def each_partition(topics: Iterable[Any], answer: Callable[[Any, Any], Values]) -> list[Values]:
    """Return the topics of a response, with the fields that `answer(topic, partition)` returns, or its KafkaError."""

    def answered(topic: Any, partition: Any) -> Values:
        index_name = "partition_index" if hasattr(partition, "partition_index") else "partition"
        key = {index_name: getattr(partition, index_name)}
        try:
            return {**key, "error_code": ErrorCode.none, **answer(topic, partition)}
        except KafkaError as error:
            return {**key, "error_code": error.code}

    return [
        {**topic_key(topic), "partitions": [answered(topic, partition) for partition in topic.partitions]}
        for topic in topics
    ]


def refuse_partitions(request: Request, code: ErrorCode) -> Values:
    """The `on_error` of an API that answers each partition of the request."""
    return {"topics": each_partition(request.message.topics, lambda topic, partition: {"error_code": code})}


def by_topic(entries: Iterable[tuple[str, Values]]) -> dict[str, list[Values]]:
    """Group the entries of partitions by their topic's name, both in the order of first occurrence."""
    topics: dict[str, list[Values]] = {}
    for name, values in entries:
        topics.setdefault(name, []).append(values)
    return topics


# -- authorized operations ---------------------------------------------------------------------------------------------
# A set of operations is an int32 with bit N set for operation N.

NOT_REQUESTED = -(2**31)


def cluster_operations(access: Access) -> int:
    """Return the client's operations on the cluster; none if it may not describe the cluster."""
    if not access.allows(Operation.DESCRIBE, ResourceType.CLUSTER):
        return 0
    return access.authorized_operations(ResourceType.CLUSTER)
