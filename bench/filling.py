"""Topics filled with equal batches, as fast as a node takes them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.support import topics

from chronik.client.batches import Batches
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.wire.batch import encode_batch
from chronik.wire.records import NewRecord

PARTITIONS = 4
BATCH_BYTES = 16_000
"""The size that Java's producer makes batches of."""


def fill(bootstrap: str, topic: str, size_bytes: int, count: int) -> int:
    """Create the topic with about `count` records of that size, over all partitions; return their exact number."""
    half = size_bytes // 2
    now_ms = int(time.time() * 1000)
    records: list[NewRecord] = [
        (b"key-%04d" % i, (b"%d" % (i * 2654435761)).rjust(half, b"#") + b"." * (size_bytes - half), (), now_ms)
        for i in range(max(1, BATCH_BYTES // size_bytes))
    ]
    return fill_with(bootstrap, topic, [records], count)


def fill_with(bootstrap: str, topic: str, batches: Sequence[Sequence[NewRecord]], count: int) -> int:
    """Create the topic with about `count` records: batches of equal size, in turn, to one partition after another."""
    topics.create(bootstrap, topic, PARTITIONS)
    encoded = [encode_batch(records) for records in batches]
    per_partition = count // len(batches[0]) // PARTITIONS
    with BlockingCluster(bootstrap) as cluster:

        async def append() -> None:
            client = Batches(cluster.cluster)
            for number in range(per_partition):
                for partition in range(PARTITIONS):
                    await client.append(topic, partition, encoded[(number * PARTITIONS + partition) % len(encoded)])

        cluster.run(append())
    return per_partition * len(batches[0]) * PARTITIONS
