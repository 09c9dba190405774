"""The log side of an audit: what is readable in a range of offsets, as audit rows.

There are three methods, all without a copy of the records:
- `headers`: batch headers, which Chronik's nodes list over HTTP. The header of a batch that compaction has thinned out
  does not show its offsets, so such a batch is fetched.
- `fetch`: the same headers from fetched batches, for any Kafka cluster.
- `records`: fetched and decoded records, with each record's checksum, and its key if keys are requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from chronik.client.node_http import HttpError, get_blocking
from chronik.pipeline.audit_blocks import CONTROL, NO_TIME, READABLE
from chronik.pipeline.audit_checksum import checksums
from chronik.pipeline.audit_rows import KEYED_SCHEMA, rows_table
from chronik.pipeline.blocking import BlockingCluster
from chronik.pipeline.columns import RecordRange
from chronik.pipeline.decoder import ArrowDecoder, next_offset_behind
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.reading import LogShortened, PartitionFetches
from chronik.wire.batch import BatchHeader, check_batches
from chronik.wire.errors import KafkaError

__all__ = ["FETCH", "HEADERS", "RECORDS", "LogRange", "read_log"]

HEADERS, FETCH, RECORDS = "headers", "fetch", "records"
PAGE_BATCHES = 5_000
HTTP_TIMEOUT_S = 30.0
BATCH_BYTES_MAX = 2**31 - 1
WATERMARK_TRIES = 150
WATERMARK_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class LogRange:
    """One task. `nodes`: HTTP addresses, any of which may be queried."""

    wanted: RecordRange
    topic_id: str
    bootstrap: str
    how: str
    nodes: tuple[str, ...]
    block_bits: int
    with_keys: bool = False


def read_log(task: LogRange) -> Iterator[Any]:
    """Yield Arrow batches of ROW_SCHEMA, or of KEYED_SCHEMA if keys are requested."""
    try:
        yield from _from_headers(task) if task.how == HEADERS else _from_fetches(task)
    except KafkaError as error:
        place = f"{task.wanted.topic}-{task.wanted.partition}"
        raise PipelineError(f"{place} cannot be read from {task.bootstrap}: {error}") from None


# Over HTTP.


class _Batch(msgspec.Struct, gc=False):
    """The required fields of a batch's header. The decoder skips all other fields of the response."""

    base_offset: int
    last_offset: int
    count: int
    base_timestamp_ms: int
    is_control: bool

    @property
    def is_thinned(self) -> bool:
        return self.count != self.last_offset - self.base_offset + 1


class _Page(msgspec.Struct):
    high_watermark: int
    next: int | None
    batches: list[_Batch]


_decode_page = msgspec.json.Decoder(_Page).decode


def _from_headers(task: LogRange) -> Iterator[Any]:
    wanted = task.wanted
    offset: int | None = wanted.start
    pause, waited = Event(), 0
    while offset is not None and offset < wanted.stop:
        page = _page(task, offset)
        batches = [batch for batch in page.batches if batch.base_offset < wanted.stop]
        thinned = [batch for batch in batches if not batch.is_control and batch.is_thinned]
        whole = [batch for batch in batches if batch.is_control or not batch.is_thinned]
        if whole:
            yield from _ranges(
                task,
                [max(batch.base_offset, offset) for batch in whole],
                [batch.last_offset + 1 for batch in whole],
                [batch.base_timestamp_ms for batch in whole],
                [batch.is_control for batch in whole],
            )
        for batch in thinned:
            yield from _thinned(task, max(batch.base_offset, offset), batch.last_offset + 1)
        behind = max([offset, *(batch.last_offset + 1 for batch in batches)])
        offset = page.next
        if offset is None and page.high_watermark < wanted.stop and behind < wanted.stop:
            # A new leader may take a moment to learn the high watermark that the audit saw at its start.
            if waited >= WATERMARK_TRIES:
                raise PipelineError(
                    f"{wanted.topic}-{wanted.partition} was readable up to {wanted.stop} and now only up to "
                    f"{page.high_watermark}: see chronik doctor {wanted.topic}"
                )
            waited += 1
            pause.wait(WATERMARK_PAUSE_S)
            offset = behind


def _thinned(task: LogRange, start: int, stop: int) -> Iterator[Any]:
    start, stop = max(start, task.wanted.start), min(stop, task.wanted.stop)
    if start < stop:
        inside = task.wanted._replace(start=start, stop=stop)
        yield from _from_fetches(LogRange(inside, task.topic_id, task.bootstrap, RECORDS, (), task.block_bits))


def _page(task: LogRange, offset: int) -> _Page:
    wanted = task.wanted
    path = f"/api/topics/{wanted.topic}/batches"
    query = {"partition": wanted.partition, "from": offset, "to": wanted.stop, "limit": PAGE_BATCHES}
    failure = "none of its nodes has an HTTP address"
    for node in task.nodes:
        try:
            return _decode_page(get_blocking(node, path, HTTP_TIMEOUT_S, **query))
        except HttpError as error:
            failure = str(error)
        except msgspec.MsgspecError as error:
            failure = f"http://{node}: {error}"
    raise PipelineError(
        f"no node lists the batches of {wanted.topic}-{wanted.partition} ({failure}): pass --log records"
    )


def _ranges(
    task: LogRange, starts: Sequence[int], stops: Sequence[int], times_ms: Sequence[int], control: Sequence[bool]
) -> Iterator[Any]:
    """Clip batches to the requested range, and cut them at block boundaries."""
    start = np.maximum(np.asarray(starts, np.int64), task.wanted.start)
    stop = np.minimum(np.asarray(stops, np.int64), task.wanted.stop)
    kept = start < stop
    times = np.asarray(times_ms, np.int64)[kept]
    sides = np.where(np.asarray(control, bool)[kept], CONTROL, READABLE)
    yield rows_table(sides, task.wanted.partition, start[kept], stop[kept], times, block_bits=task.block_bits)


# Over the Fetch API.


def _from_fetches(task: LogRange) -> Iterator[Any]:
    wanted = task.wanted
    with BlockingCluster(task.bootstrap) as cluster:
        fetches = PartitionFetches(cluster, wanted, task.topic_id, committed_only=False)
        decoder = ArrowDecoder(wanted, with_headers=True) if task.how == RECORDS else None
        offset = wanted.start
        pending = fetches.ask(offset)
        while offset < wanted.stop:
            try:
                fetched = cluster.run(fetches.answer(pending))
            except LogShortened as gap:
                # Retention continues during an audit. The log start read at the end accounts for what it removed.
                if gap.resume_at is None or gap.resume_at >= wanted.stop:
                    break
                offset = gap.resume_at
                decoder = ArrowDecoder(wanted._replace(start=offset), with_headers=True) if decoder else None
                pending = fetches.ask(offset)
                continue
            records = memoryview(fetched.records)
            offset = next_offset_behind(records, offset)
            if offset < wanted.stop:
                pending = fetches.ask(offset)
            yield from _fetched(task, records, decoder)
        if decoder is not None:
            for batch in decoder.finish():
                yield _records(task, batch)


def _fetched(task: LogRange, records: memoryview, decoder: ArrowDecoder | None) -> Iterator[Any]:
    if decoder is not None:
        for batch in decoder.feed(records):
            yield _records(task, batch)
    headers = [header for _, header in _whole_batches(records)]
    thinned = [
        header
        for header in headers
        if not header.is_control and header.record_count != header.next_offset - header.base_offset
    ]
    shown = [header for header in headers if header.is_control or (decoder is None and header not in thinned)]
    if decoder is None:
        for header in thinned:
            yield from _thinned(task, header.base_offset, header.next_offset)
    if shown and not task.with_keys:
        yield from _ranges(
            task,
            [header.base_offset for header in shown],
            [header.next_offset for header in shown],
            [header.base_timestamp for header in shown],
            [header.is_control for header in shown],
        )


def _whole_batches(records: memoryview) -> list[tuple[int, BatchHeader]]:
    """Return the headers of complete batches, after checking them."""
    at = 0
    while len(records) - at > 12:
        size = 12 + int.from_bytes(records[at + 8 : at + 12], "big", signed=True)
        if size <= 12 or at + size > len(records):
            break
        at += size
    return check_batches(records[:at], BATCH_BYTES_MAX, from_producer=False) if at else []


def _records(task: LogRange, batch: Any) -> Any:
    offsets = batch.column("offset").to_numpy()
    times = batch.column("timestamp").cast(pa.int64())
    times_ms = np.where(times.is_valid().to_numpy(zero_copy_only=False), times.fill_null(0).to_numpy() // 1000, NO_TIME)
    sums = checksums(batch.column("key"), batch.column("value"), batch.column("headers"))
    sides = np.full(len(offsets), READABLE)
    made = rows_table(
        sides, task.wanted.partition, offsets, offsets + 1, times_ms, checksum=sums, block_bits=task.block_bits
    )
    if not task.with_keys:
        return made
    return pa.RecordBatch.from_arrays([*made.columns, batch.column("key")], schema=KEYED_SCHEMA)
