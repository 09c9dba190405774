"""Deliver encoded batches: plainly, or all of them in one transaction that also records the micro-batch's number.

The transaction belongs to a transactional id made from the query's id. Beginning it fences every other driver of the
query and ends its transaction, so the number of the last committed micro-batch is final when it is read. The number is
an offset of the query's own group, committed in the same transaction: records and number are visible together or not at
all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from chronik.client.cluster import Cluster
from chronik.client.errors import ClientError
from chronik.client.groups import Groups
from chronik.client.producer import Partition, Producer, TransactionalProducer
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.wire.errors import ErrorCode, KafkaError

Batches = Mapping[Partition, Sequence[bytes]]

PREFIX = "chronik-sink-"
NUMBER_PARTITION = 0
"""A group's offset needs an existing partition. Every topic of a micro-batch has this one."""
_FENCED = (ErrorCode.invalid_producer_epoch, ErrorCode.producer_fenced)


def deliver(cluster: BlockingCluster, batches: Batches) -> None:
    """Append at least once."""
    cluster.run(Producer(cluster.cluster).append(batches))


def deliver_once(
    cluster: BlockingCluster, name: str, batches: Batches, timeout_ms: int, number: int | None = None
) -> bool:
    """Append in one transaction. Return False if the micro-batch `number` of the query `name` is committed already."""
    if not batches:
        return True
    try:
        return cluster.run(_deliver_once(cluster.cluster, PREFIX + name, batches, timeout_ms, number))
    except _Fenced as error:
        raise PipelineError(
            f"another run of the query {name} has taken over, or the transaction took over {timeout_ms} ms ({error}): "
            "stop one of the two runs, or raise kafka.transaction.timeout.ms"
        ) from None


class _Fenced(Exception):
    """A newer producer has the same transactional id, or the transaction timed out."""


async def _deliver_once(cluster: Cluster, name: str, batches: Batches, timeout_ms: int, number: int | None) -> bool:
    producer = TransactionalProducer(cluster, name, timeout_ms)
    await producer.begin()
    if number is not None and number <= await last_number(cluster, name):
        return False
    try:
        await producer.append(batches)
        if number is not None:
            topics = dict.fromkeys(topic for topic, _ in batches)
            await producer.commit_offsets(name, {(topic, NUMBER_PARTITION): number for topic in topics})
        await producer.commit()
    except (KafkaError, ClientError) as error:
        # If the coordinator received the commit after all, it refuses the abort, and the next `begin` awaits it.
        with contextlib.suppress(KafkaError, ClientError):
            await producer.abort()
        if isinstance(error, KafkaError) and error.code in _FENCED:
            raise _Fenced(str(error)) from None
        raise
    return True


async def last_number(cluster: Cluster, name: str) -> int:
    """Return the number of the last committed micro-batch; -1 if there is none.

    It is final if a transaction of this query has begun and not ended: the begin waits for the markers of earlier ones.
    Older brokers apply the offsets of a marker after they have answered it, so this waits for stable offsets.
    """
    return max((await Groups(cluster).committed(name, is_stable=True)).values(), default=-1)
