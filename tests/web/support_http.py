"""Send HTTP requests to a node, and append batches of a known shape to its topics."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import confluent_kafka

from chronik.cli.options import with_cluster
from chronik.client.batches import Batches
from chronik.client.cluster import Cluster
from chronik.wire.batch import encode_batch
from chronik.wire.records import NewRecord

TIMEOUT_S = 10.0
NOW_MS = 1_700_000_000_000


def get(address: object, path: str) -> tuple[int, Any]:
    """Return the status and the JSON of one GET; `address` is HOST:PORT."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=TIMEOUT_S) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def put(bootstrap: str, topic: str, partition: int, *batches: bytes) -> None:
    """Append encoded batches, one by one."""

    async def append(cluster: Cluster) -> None:
        for batch in batches:
            await Batches(cluster).append(topic, partition, batch)

    with_cluster(bootstrap, append, 30)


def put_unacknowledged(bootstrap: str, topic: str, partition: int, batch: bytes) -> None:
    """Append a batch with acks=1."""
    with_cluster(bootstrap, lambda cluster: Batches(cluster).append(topic, partition, batch, acks=1), 30)


def open_transaction(bootstrap: str, transactional_id: str, topic: str, partition: int = 0) -> confluent_kafka.Producer:
    """Return a producer whose transaction is open and has one record in the partition."""
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": transactional_id})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"undecided", partition=partition)
    assert producer.flush(30) == 0
    return producer


def batch_of(values: Sequence[bytes | None], *, codec: int = 0, time_ms: int = NOW_MS) -> bytes:
    records: list[NewRecord] = [
        (f"key-{number}".encode(), value, [("source", b"test")], time_ms + number)
        for number, value in enumerate(values)
    ]
    return encode_batch(records, codec=codec)
