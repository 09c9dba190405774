"""Topics of a running cluster, created and filled batch by batch by a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.support.eventually import eventually

from chronik.client.batches import Batches
from chronik.client.cluster import Deadline
from chronik.client.groups import Groups
from chronik.client.properties import Target
from chronik.client.topics import Topics
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.records import NewRecord

KNOWN_S_MAX = 30.0
NOW_MS = 1_700_000_000_000
FOREVER = {"retention.ms": "-1"}
"""The fixed timestamp is long ago: a node that runs for some minutes would delete such records as expired."""


def numbered(count: int, first: int = 0) -> list[NewRecord]:
    """Return records: record i has the key ki, the value vi and a timestamp i ms after a fixed one."""
    return [(b"k%d" % i, b"v%d" % i, (), NOW_MS + i) for i in range(first, first + count)]


def create(bootstrap: Target, topic: str, partitions: int = 1) -> None:
    with BlockingCluster(bootstrap) as cluster:
        cluster.run(Topics(cluster.cluster).create(topic, partitions, 1, FOREVER))
        # Apache Kafka knows a topic and elects its leaders some time after it has created it. Leaders list offsets.
        eventually(lambda: cluster.topics([topic]), KNOWN_S_MAX, f"topic {topic} is known")
        cluster.offsets([(topic, partition) for partition in range(partitions)], -1)


def grow(bootstrap: Target, topic: str, partitions: int) -> None:
    with BlockingCluster(bootstrap) as cluster:
        cluster.run(Topics(cluster.cluster).grow(topic, partitions))


def delete(bootstrap: Target, topic: str) -> None:
    with BlockingCluster(bootstrap) as cluster:
        cluster.run(Topics(cluster.cluster).delete(topic))


def append(bootstrap: Target, topic: str, partition: int, *batches: Sequence[NewRecord], codec: int = 0) -> None:
    with BlockingCluster(bootstrap) as cluster:
        for records in batches:
            batch = encode_batch(records, codec=codec)
            cluster.run(Batches(cluster.cluster).append(topic, partition, batch))


def trim(bootstrap: Target, topic: str, partition: int, before: int) -> None:
    """Move the log start offset to `before`, as retention does."""
    asked = {"name": topic, "partitions": [{"partition_index": partition, "offset": before}]}

    async def ask(cluster: BlockingCluster) -> None:
        connection = await cluster.cluster.any_connection(Deadline(10))
        answer = await connection.call(ApiKey.DELETE_RECORDS, {"topics": [asked], "timeout": 10_000})
        assert answer.topics[0].partitions[0].error_code == 0

    with BlockingCluster(bootstrap) as cluster:
        cluster.run(ask(cluster))


def committed(bootstrap: Target, group: str) -> dict[tuple[str, int], int]:
    with BlockingCluster(bootstrap) as cluster:
        return cluster.run(Groups(cluster.cluster).committed(group))


def alter(bootstrap: Target, topic: str, configs: Mapping[str, str]) -> None:
    with BlockingCluster(bootstrap) as cluster:
        cluster.run(Topics(cluster.cluster).alter_configs(topic, configs))
