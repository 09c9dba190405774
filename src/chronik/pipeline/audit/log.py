"""The log side of an audit: what is readable in a range of offsets, as audit rows.

There are three methods:
- `headers`: batch headers, which Chronik's nodes list over HTTP. The header of a batch that compaction has thinned out
  does not show its offsets, so such a batch is fetched.
- `fetch`: the same headers from fetched batches, for any Kafka cluster.
- `records`: fetched and decoded records, with each record's checksum, and its key if keys are requested.

Readable is what a read_committed consumer gets. Headers do not show which transactions were aborted, so headers of
transactional batches are fetched, with the list of aborted transactions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from chronik.client.node_http import HttpError, caller_of, get_blocking
from chronik.client.properties import ClientSettings, Target
from chronik.pipeline.audit.blocks import CONTROL, READABLE
from chronik.pipeline.audit.rows import KEYED_SCHEMA, record_rows, rows_table
from chronik.pipeline.deleted import DeletedKeys
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.decoder import AbortedTransactions, ArrowDecoder, whole_batches
from chronik.pipeline.source.ranges import RecordRange
from chronik.pipeline.source.reading import LogShortened, PartitionFetches
from chronik.wire.errors import KafkaError
from chronik.wire.fetch import FetchPartitionResponse

HEADERS, FETCH, RECORDS = "headers", "fetch", "records"
PAGE_BATCHES = 5_000
HTTP_TIMEOUT_S = 30.0
WATERMARK_TRIES = 150
WATERMARK_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class LogRange:
    """One task. `nodes`: HTTP addresses, any of which may be queried."""

    requested: RecordRange
    topic_id: str
    bootstrap: Target
    how: str
    nodes: tuple[str, ...]
    block_bits: int
    with_keys: bool = False
    deleted: DeletedKeys | None = None


def read_log(task: LogRange) -> Iterator[Any]:
    """Yield Arrow batches of ROW_SCHEMA, or of KEYED_SCHEMA if keys are requested."""
    try:
        yield from _from_headers(task) if task.how == HEADERS else _from_fetches(task)
    except KafkaError as error:
        name = task.requested.partition_name
        raise PipelineError(f"{name} cannot be read from {task.bootstrap}: {error}") from None


class _Batch(msgspec.Struct, gc=False):
    """The required fields of a batch's header. The decoder skips all other fields of the response."""

    base_offset: int
    last_offset: int
    count: int
    base_timestamp_ms: int
    is_control: bool
    """Whether no consumer gets its records: a marker, or a batch of an aborted transaction."""
    is_transactional: bool


def _from_batches(task: LogRange, batches: Sequence[_Batch], begin: int) -> Iterator[Any]:
    """Yield the requested offsets of batches from `begin` on. Fetch batches that compaction has thinned out."""
    requested = task.requested
    whole: list[tuple[int, int, int, int]] = []
    for batch in batches:
        start = max(batch.base_offset, begin, requested.start)
        stop = min(batch.last_offset + 1, requested.stop)
        if start >= stop:
            continue
        if batch.is_control or batch.count == batch.last_offset - batch.base_offset + 1:
            whole.append((CONTROL if batch.is_control else READABLE, start, stop, batch.base_timestamp_ms))
        else:
            inside = requested._replace(start=start, stop=stop)
            yield from _from_fetches(LogRange(inside, task.topic_id, task.bootstrap, RECORDS, (), task.block_bits))
    if whole:
        sides, starts, stops, times_ms = np.array(whole, np.int64).T
        yield rows_table(sides, requested.partition, starts, stops, times_ms, block_bits=task.block_bits)


# Over HTTP.


class _Page(msgspec.Struct):
    high_watermark: int
    next: int | None
    batches: list[_Batch]


_decode_page = msgspec.json.Decoder(_Page).decode


def _from_headers(task: LogRange) -> Iterator[Any]:
    requested = task.requested
    offset: int | None = requested.start
    pause, waited = Event(), 0
    while offset is not None and offset < requested.stop:
        page = _page(task, offset)
        batches = [batch for batch in page.batches if batch.base_offset < requested.stop]
        next_offset = max([offset, *(batch.last_offset + 1 for batch in batches)])
        if any(batch.is_transactional and not batch.is_control for batch in batches):
            inside = requested._replace(start=offset, stop=min(next_offset, requested.stop))
            yield from _from_fetches(replace(task, requested=inside, how=FETCH))
        else:
            yield from _from_batches(task, batches, offset)
        offset = page.next
        if offset is None and page.high_watermark < requested.stop and next_offset < requested.stop:
            # A new leader may take a moment to learn the high watermark that the audit saw at its start.
            if waited >= WATERMARK_TRIES:
                now = f"was readable up to {requested.stop} and now only up to {page.high_watermark}"
                raise PipelineError(f"{requested.partition_name} {now}: see chronik doctor {requested.topic}")
            waited += 1
            pause.wait(WATERMARK_PAUSE_S)
            offset = next_offset


def _page(task: LogRange, offset: int) -> _Page:
    requested = task.requested
    path = f"/api/topics/{requested.topic}/batches"
    offsets = {"from": offset, "to": requested.stop}
    query: dict[str, Any] = {"partition": requested.partition, **offsets, "limit": PAGE_BATCHES}
    failure = "none of its nodes has an HTTP address"
    caller = caller_of(ClientSettings.of(task.bootstrap).security)
    for node in task.nodes:
        try:
            return _decode_page(get_blocking(node, path, HTTP_TIMEOUT_S, caller, **query))
        except HttpError as error:
            failure = str(error)
        except msgspec.MsgspecError as error:
            failure = f"{node}: {error}"
    raise PipelineError(f"no node lists the batches of {requested.partition_name} ({failure}): pass --log records")


# Over the Fetch API.


def _from_fetches(task: LogRange) -> Iterator[Any]:
    requested = task.requested
    with BlockingCluster(task.bootstrap) as cluster:
        decoder = ArrowDecoder(requested, with_headers=True) if task.how == RECORDS else None
        aborted = AbortedTransactions()
        for response in PartitionFetches(cluster, requested, task.topic_id, committed_only=True).responses():
            if not isinstance(response, LogShortened):
                yield from _fetched(task, response, decoder, aborted)
            elif response.resume_at is not None and decoder is not None:
                # Retention continues during an audit. The log start read at the end accounts for what it removed.
                for batch in decoder.finish():
                    yield _records(task, batch)
                decoder = ArrowDecoder(requested._replace(start=response.resume_at), with_headers=True)
        if decoder is not None:
            for batch in decoder.finish():
                yield _records(task, batch)


def _fetched(
    task: LogRange, response: FetchPartitionResponse, decoder: ArrowDecoder | None, aborted: AbortedTransactions
) -> Iterator[Any]:
    records, listed = memoryview(response.records), response.aborted_transactions or ()
    if decoder is not None:
        for rows in decoder.feed(records, listed):
            yield _records(task, rows)
    if task.with_keys:
        return
    aborted.expect(listed)
    batches: list[_Batch] = []
    for start, header in whole_batches(records):
        is_control = aborted.cover(header, records, start) or header.is_control
        if decoder is None or is_control:
            place = header.base_offset, header.last_offset, header.record_count, header.base_timestamp
            batches.append(_Batch(*place, is_control, header.is_transactional))
    yield from _from_batches(task, batches, task.requested.start)


def _records(task: LogRange, batch: Any) -> Any:
    rows = record_rows(READABLE, batch, task.block_bits, task.deleted)
    if not task.with_keys:
        return rows
    return pa.RecordBatch.from_arrays([*rows.columns, batch.column("key")], schema=KEYED_SCHEMA)
