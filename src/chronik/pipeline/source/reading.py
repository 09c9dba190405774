"""Read one range of offsets from the partition's leader into Arrow: the work of a Spark task.

The next fetch is in flight while the last one is decoded. The end of a range was below the high watermark when it was
planned, so all of it becomes readable sooner or later. If the leader returns nothing, the task retries until
`STALLED_S_MAX` seconds have passed without a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chronik.client.batches import fetch_partition
from chronik.client.cluster import Deadline
from chronik.client.connection import Connection
from chronik.client.errors import ClientError
from chronik.client.properties import Target
from chronik.client.topics import EARLIEST, Topics
from chronik.pipeline.errors import PipelineError, task_errors
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.decoder import ROWS_MAX, ArrowDecoder, next_offset_after
from chronik.pipeline.source.ranges import RecordRange
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import FetchPartitionResponse, FetchRequest

FETCH_BYTES_MAX = 4 * 1024 * 1024
FETCH_WAIT_MS = 500
FETCH_TIMEOUT_S = 15.0
STALLED_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """How to read a range; the same for all tasks of a job."""

    bootstrap: Target
    with_headers: bool = False
    committed_only: bool = False
    fail_on_data_loss: bool = True
    rows_max: int = ROWS_MAX
    """The maximum number of rows in one Arrow batch."""
    after_loss: str = "pass failOnDataLoss=false to continue"
    """What the user of this job can do if records are gone."""
    stalled_s_max: float = STALLED_S_MAX

    def decoder(self, requested: RecordRange) -> ArrowDecoder:
        return ArrowDecoder(requested, with_headers=self.with_headers, rows_max=self.rows_max)


def read_range(requested: RecordRange, topic_id: str, settings: ReadSettings) -> Iterator[Any]:
    """Yield Arrow batches of the range. `topic_id` is the id when it was planned, empty if the brokers have none."""
    span = f"reading {requested.partition_name}, offsets {requested.start} to {requested.stop - 1}, from"
    with task_errors(f"{span} {settings.bootstrap}"):
        yield from _read_range(requested, topic_id, settings)


def _read_range(requested: RecordRange, topic_id: str, settings: ReadSettings) -> Iterator[Any]:
    with BlockingCluster(settings.bootstrap) as cluster:
        decoder = settings.decoder(requested)
        fetches = PartitionFetches(cluster, requested, topic_id, settings.committed_only, settings.stalled_s_max)
        for response in fetches.responses():
            if not isinstance(response, LogShortened):
                yield from decoder.feed(memoryview(response.records), response.aborted_transactions or ())
            elif settings.fail_on_data_loss:
                raise PipelineError(f"{response}; {settings.after_loss} at the log start")
            elif response.resume_at is not None:
                # The first batch may contain records below `resume_at`. Skip them: they are deleted, too.
                yield from decoder.finish()
                decoder = settings.decoder(requested._replace(start=response.resume_at))
        yield from decoder.finish()


class LogShortened(Exception):
    """The requested offset is no longer in the log. `resume_at` is the log start, or None if the log ends below it."""

    def __init__(self, message: str, resume_at: int | None) -> None:
        super().__init__(message)
        self.resume_at = resume_at


class PartitionFetches:
    """Fetch requests to one partition's leader. They follow leader changes."""

    def __init__(
        self,
        cluster: BlockingCluster,
        requested: RecordRange,
        topic_id: str,
        committed_only: bool = False,
        stalled_s_max: float = STALLED_S_MAX,
    ) -> None:
        self._cluster = cluster
        self._requested = requested
        self._name = requested.partition_name
        self._topic_id = topic_id
        self._isolation_level = int(committed_only)
        self._stalled_s_max = stalled_s_max
        self._leader: Connection | None = None

    def responses(self) -> Iterator[FetchPartitionResponse | LogShortened]:
        """Yield the responses for the range, and each gap where the log is shorter. Reading continues after a gap."""
        offset, stop = self._requested.start, self._requested.stop
        pending = self._send(offset)
        while offset < stop:
            outcome: FetchPartitionResponse | LogShortened
            try:
                outcome = self._cluster.run(pending)
                offset = next_offset_after(memoryview(outcome.records), offset)
            except LogShortened as gap:
                outcome = gap
                offset = stop if gap.resume_at is None else gap.resume_at
            if offset < stop:
                pending = self._send(offset)
            yield outcome

    def _send(self, offset: int) -> asyncio.Task[FetchPartitionResponse]:
        """Send the request, so that the broker works on it while the caller does something else."""
        task = self._cluster.loop.create_task(self._fetch(offset))
        self._cluster.loop.run_until_complete(asyncio.sleep(0))
        return task

    async def _fetch(self, offset: int) -> FetchPartitionResponse:
        """Return the first response that contains a batch."""
        stalled = Deadline(self._stalled_s_max)
        while True:
            response = await self._cluster.cluster.retry(lambda within: self._attempt(offset, within))
            if len(response.records):
                return response
            if stalled.left_s == 0:
                end = f"its high watermark is {response.high_watermark}"
                if self._isolation_level:
                    end += f" and its last stable offset {response.last_stable_offset} (is a transaction open?)"
                raise KafkaError(
                    ErrorCode.offset_not_available,
                    f"{self._name} returned nothing at {offset} for {self._stalled_s_max:g} s; {end}, and offsets up "
                    f"to {self._requested.stop} were requested",
                )

    async def _attempt(self, offset: int, within: Deadline) -> FetchPartitionResponse:
        if self._leader is None or self._leader.is_closed:
            self._leader = await self._find_leader(within)
        request = FetchRequest(
            max_wait_ms=FETCH_WAIT_MS, min_bytes=1, max_bytes=FETCH_BYTES_MAX, isolation_level=self._isolation_level
        )
        topic, partition = self._requested.topic, self._requested.partition
        try:
            response = await fetch_partition(self._leader, request, topic, partition, offset, FETCH_TIMEOUT_S)
        except (KafkaError, ClientError):
            self._leader = None
            raise
        if response.error_code == ErrorCode.offset_out_of_range:
            raise await self._shortened(offset)
        if response.error_code:
            self._leader = None
            raise KafkaError(ErrorCode(response.error_code), f"fetch of {self._name} at {offset}")
        return response

    async def _find_leader(self, within: Deadline) -> Connection:
        cluster = self._cluster.cluster
        topic = await cluster.topic(self._requested.topic, deadline=within)
        if self._topic_id and topic.id is not None and str(topic.id) != self._topic_id:
            fault = f"topic {self._requested.topic} was deleted and recreated while it was read"
            raise PipelineError(f"{fault}: start with a new checkpoint folder")
        leaders = await cluster.leaders(self._requested.topic, frozenset({self._requested.partition}), deadline=within)
        if self._requested.partition not in leaders:
            raise PipelineError(f"{self._name} is gone: was the topic deleted and recreated with fewer partitions?")
        return await cluster.connection(leaders[self._requested.partition], within)

    async def _shortened(self, offset: int) -> LogShortened:
        topic, partition = self._requested.topic, self._requested.partition
        start = (await Topics(self._cluster.cluster).offsets(topic, EARLIEST, [partition]))[partition]
        if start.offset > offset:
            gap = f"offsets {offset} to {start.offset - 1} are no longer in the log"
            return LogShortened(f"{self._name}: {gap}", start.offset)
        return LogShortened(f"{self._name}: the log ends before offset {offset}, which existed earlier", None)
