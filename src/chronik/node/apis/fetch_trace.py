"""The traces of one fetch: created only if a topic is traced, and only for the traced partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from chronik.node.serving.connection import Request
from chronik.observe.traces import PartitionTrace, TraceRing, error_name
from chronik.wire.fetch import FetchPartition, FetchPartitionResponse, FetchRequest


class FetchTrace:
    """Owned by the loop. `_entries` has the trace of each partition of the fetch, None if it is not traced."""

    __slots__ = ("_clock", "_entries", "_has_waited", "_number", "_request")

    def __init__(
        self,
        ring: TraceRing,
        request: Request,
        fetch: FetchRequest,
        wanted: Iterable[tuple[str | None, FetchPartition]],
        clock: Callable[[], float],
    ) -> None:
        self._number = ring.next_fetch()
        self._request = request
        self._entries = [
            None if name not in ring.topics else (PartitionTrace(ring, name, partition.partition), partition)
            for name, partition in wanted
        ]
        self._clock = clock
        self._has_waited = False
        for trace, partition in filter(None, self._entries):
            trace.fetch_started(
                self._number, request.client_id, partition.fetch_offset, fetch.max_wait_ms, fetch.min_bytes
            )

    def seen(self, at: int, high_watermark: int, log_end_offset: int) -> None:
        entry = self._entries[at]
        if entry is not None:
            entry[0].watermark_seen(self._number, high_watermark, log_end_offset)

    def waits(self) -> None:
        self._has_waited = True
        for trace, _ in filter(None, self._entries):
            trace.no_data(self._number)

    def arrived(self, trace: PartitionTrace | None, size_bytes: int) -> None:
        if trace is not None:
            trace.data_available(self._number, size_bytes)

    def served(self, responses: list[FetchPartitionResponse]) -> None:
        """Trace the response. If the fetch did not wait, its data became available no later than now."""
        elapsed_s = self._clock() - self._request.started_s
        for entry, response in zip(self._entries, responses, strict=True):
            if entry is None:
                continue
            trace, wanted = entry
            size_bytes = len(response.records)
            if size_bytes and not self._has_waited:
                trace.data_available(self._number, size_bytes)
            trace.fetch_served(
                self._number,
                self._request.client_id,
                wanted.fetch_offset,
                size_bytes,
                response.high_watermark,
                error_name(response.error_code) if response.error_code else None,
                elapsed_s,
            )
