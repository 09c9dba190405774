"""The extent of each replica's own log of a partition, and what is lost if one of them leads.

Brokers answer ListOffsets of Kafka's debugging consumer from their own log, whether they lead or not. So this works on
any Kafka cluster, and for partitions without a leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chronik.client.cluster import Cluster, Deadline
from chronik.client.errors import ClientError, Refused
from chronik.client.topics import EARLIEST, LATEST, LOG_END_READER, READ_UNCOMMITTED, list_offsets
from chronik.wire.errors import ErrorCode, KafkaError

ANSWERS = "answers"
DOWN = "down"
UNLISTED = "down or fenced"
SILENT = "does not answer"
ANSWER_TIMEOUT_S = 5.0
NO_EPOCH = -1


@dataclass(frozen=True, slots=True)
class ReplicaLog:
    """One replica's log. Offsets are None if its broker did not report them; `state` gives the reason."""

    node_id: int
    state: str
    log_start_offset: int | None = None
    log_end_offset: int | None = None
    last_epoch: int = NO_EPOCH
    """The leader epoch of the last record; -1 if the log is empty or the broker does not report it."""

    @property
    def offsets(self) -> range:
        """The offsets of its records; empty if unknown."""
        return range(self.log_start_offset or 0, self.log_end_offset or 0)


@dataclass(frozen=True, slots=True)
class Loss:
    """How many records one replica lacks that other replicas have; if `is_exact` is False, more may be lost.

    `records` is None if no other replica answers, so that nothing is known.
    """

    records: int | None
    is_exact: bool

    def __str__(self) -> str:
        if self.records is None:
            return "unknown"
        return str(self.records) if self.is_exact else f"{self.records} or more"


async def replica_logs(cluster: Cluster, topic: str, partition: int, replicas: Sequence[int]) -> list[ReplicaLog]:
    """Return the replicas' logs in the order of `replicas`. An unresponsive broker costs at most five seconds."""
    return list(await asyncio.gather(*(_replica_log(cluster, topic, partition, node_id) for node_id in replicas)))


async def _replica_log(cluster: Cluster, topic: str, partition: int, node_id: int) -> ReplicaLog:
    deadline = Deadline(min(ANSWER_TIMEOUT_S, cluster.timeout_s))
    try:
        connection = await cluster.connection(node_id, deadline)
        start, end = [
            (await list_offsets(connection, topic, [partition], at, LOG_END_READER, READ_UNCOMMITTED, deadline.left_s))[
                partition
            ]
            for at in (EARLIEST, LATEST)
        ]
    except KafkaError as error:
        # `Cluster.connection` raises this code for a broker that is not in the metadata.
        is_unlisted = error.code is ErrorCode.coordinator_not_available
        return ReplicaLog(node_id, UNLISTED if is_unlisted else f"log is not open ({error.code.name})")
    except Refused:
        return ReplicaLog(node_id, DOWN)
    except ClientError:
        return ReplicaLog(node_id, SILENT)
    return ReplicaLog(node_id, ANSWERS, start.offset, end.offset, end.leader_epoch)


def loss_if_leading(log: ReplicaLog, logs: Iterable[ReplicaLog]) -> Loss:
    """Return what is lost if this replica leads: the records that it lacks and another replica has.

    The count uses offsets. It is exact only if every broker answers and all logs end in the same leader epoch: two
    epochs may have written different records at the same offsets.
    """
    logs = list(logs)
    others = [each for each in logs if each is not log]
    answering = [each for each in others if each.state == ANSWERS]
    if others and not answering:
        return Loss(None, is_exact=False)
    epochs = {each.last_epoch for each in logs if each.offsets}
    is_exact = len(answering) == len(others) and len(epochs) <= 1 and NO_EPOCH not in epochs
    every = _covered([each.offsets for each in (log, *answering)])
    return Loss(every - len(log.offsets), is_exact)


def _covered(ranges: Iterable[range]) -> int:
    """Return how many offsets at least one of the ranges has."""
    count = end = 0
    for each in sorted(ranges, key=lambda each: each.start):
        count += max(0, each.stop - max(end, each.start))
        end = max(end, each.stop)
    return count
