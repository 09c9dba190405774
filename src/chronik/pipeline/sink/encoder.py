"""Encode rows into record batches by partition: the work of a Spark task that needs neither Spark nor a broker.

A row without a partition goes where Kafka's producers send it: by the murmur2 hash of its key. Rows without a key fill
one batch of a partition, then one of the next partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

import pyarrow as pa

from chronik.pipeline.errors import PipelineError
from chronik.wire.batch import encode_batch
from chronik.wire.records import Headers, NewRecord

BATCH_BYTES = 512 * 1024
"""A batch of records is complete at this size, before compression. Topics accept 1 MB by default."""
RECORD_OVERHEAD_BYTES = 16

Partition = tuple[str, int]
Batches = dict[Partition, list[bytes]]

_WORD = Struct("<I")
_MULTIPLIER = 0x5BD1E995
_SEED = 0x9747B28C
_UINT32 = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Return the hash by which Kafka's producers choose a partition, as an unsigned number of 31 bits."""
    mixed = _SEED ^ len(data)
    whole = len(data) & ~3
    for (word,) in _WORD.iter_unpack(data[:whole]):
        word = word * _MULTIPLIER & _UINT32
        mixed = (mixed * _MULTIPLIER & _UINT32) ^ ((word ^ word >> 24) * _MULTIPLIER & _UINT32)
    if whole < len(data):
        mixed = (mixed ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _UINT32
    mixed = (mixed ^ mixed >> 13) * _MULTIPLIER & _UINT32
    return (mixed ^ mixed >> 15) & 0x7FFFFFFF


@dataclass(slots=True)
class _OpenBatch:
    records: list[NewRecord] = field(default_factory=list)
    size_bytes: int = 0


class RowEncoder:
    """Collects rows, and encodes a batch when it is full. `size_bytes` is the size of the encoded batches."""

    def __init__(self, partition_count: Callable[[str], int], codec: int, *, topic: str | None, first: int) -> None:
        """`first` spreads the tasks' rows without keys: each task starts with another partition."""
        self._partition_count = partition_count
        self._codec = codec
        self._topic = topic
        self._first = first
        self._counts: dict[str, int] = {}
        self._unkeyed: dict[str, int] = {}
        self._open: dict[Partition, _OpenBatch] = {}
        self._encoded: Batches = {}
        self.size_bytes = 0

    def add(self, rows: Any, timestamp_ms: int) -> None:
        """Add the rows of an Arrow batch."""
        for key, value, headers, topic, partition in _columns(rows, self._topic):
            target = self._target(topic, partition, key)
            batch = self._open.setdefault(target, _OpenBatch())
            batch.records.append((key, value, headers, timestamp_ms))
            batch.size_bytes += len(key or b"") + len(value or b"") + RECORD_OVERHEAD_BYTES
            for name, content in headers:
                batch.size_bytes += len(name) + len(content or b"")
            if batch.size_bytes >= BATCH_BYTES:
                self._complete(target)
                self._unkeyed.pop(target[0], None)

    def take(self) -> Batches:
        """Return all batches so far, each partition's in order, and start anew."""
        for target in list(self._open):
            self._complete(target)
        taken, self._encoded, self.size_bytes = self._encoded, {}, 0
        return taken

    def _complete(self, target: Partition) -> None:
        encoded = encode_batch(self._open.pop(target).records, codec=self._codec)
        self._encoded.setdefault(target, []).append(encoded)
        self.size_bytes += len(encoded)

    def _target(self, topic: str | None, partition: int | None, key: bytes | None) -> Partition:
        if topic is None:
            raise PipelineError("a row has no topic: fill the column topic, or give the option topic")
        count = self._counts.get(topic)
        if count is None:
            count = self._counts[topic] = self._partition_count(topic)
        if partition is not None:
            if not 0 <= partition < count:
                raise PipelineError(f"a row names partition {partition} of {topic}, which has {count} partitions")
            return topic, partition
        if key is not None:
            return topic, murmur2(key) % count
        if topic not in self._unkeyed:
            self._unkeyed[topic] = self._first % count
            self._first += 1
        return topic, self._unkeyed[topic]


Row = tuple[bytes | None, bytes | None, Headers, str | None, int | None]


def _columns(rows: Any, topic: str | None) -> Iterator[Row]:
    count, names = rows.num_rows, rows.schema.names

    def column(name: str, as_bytes: bool = False) -> list[Any]:
        if name not in names:
            return [None] * count
        values = rows.column(name)
        return list((values.cast(pa.binary()) if as_bytes else values).to_pylist())

    topics = [topic] * count if topic is not None else column("topic")
    headers = map(_headers, column("headers"))
    return zip(column("key", True), column("value", True), headers, topics, column("partition"), strict=True)


def _headers(given: list[dict[str, Any]] | None) -> Headers:
    headers = [(header["key"], header["value"]) for header in given or ()]
    if any(name is None for name, _ in headers):
        raise PipelineError("a row has a header without a key: a header's key must not be null")
    return headers
