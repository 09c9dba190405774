"""Ledgers of acknowledged records and receipts of delivered records: JSON Lines, one record each.

    {"topic": str, "partition": int, "offset": int, "key": base64 or null, "timestamp_ms": int, "checksum": int}

`checksum` is `wire.checksum.record_checksum`. The records of a transaction are acknowledged when it commits. Those of
an aborted transaction have `"aborted": true`: no read_committed consumer may see them. Only the last line may be torn,
without a newline; readers and writers that continue a ledger discard it. A killed process leaves out records that it
had not written yet. That is the safe direction: a ledger never lists a record that was not acknowledged.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from pathlib import Path
from typing import Any

import msgspec

from chronik.wire.checksum import record_checksum

PENDING_RECORDS_MAX = 2000
"""Lines buffered in memory; the caller that reaches this limit writes them all."""
FLUSH_S = 0.2
"""The longest time that a line stays buffered while its process runs."""
TAIL_BYTES = 64 * 1024
NO_TIMESTAMP = -1

Headers = Sequence[tuple[str, bytes | None]]


class LedgerError(Exception):
    """The ledger cannot be written: later records would be missing."""


class Entry(msgspec.Struct, gc=False, omit_defaults=True):
    """One line of a ledger or receipt file; msgspec encodes the key as base64."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    timestamp_ms: int
    checksum: int
    aborted: bool = False


_encode_lines = msgspec.json.Encoder().encode_lines


class DeliveryReports(ABC):
    """Callbacks for producers. They record each acknowledged record; the caller that exceeds a limit writes them."""

    def __init__(self, pending: MutableSequence[Entry], pending_max: int) -> None:
        self.failed = 0
        """The number of reports for records that were not acknowledged: failures, and every record sent with acks=0."""
        self._pending = pending
        self._append = pending.append
        self._pending_max = pending_max

    @abstractmethod
    def flush(self) -> None: ...

    def confluent(self, error: object, message: Any) -> None:
        """Callback for `on_delivery` of confluent-kafka; accepts consumed messages too.

        Its delivery reports omit a record's headers, so the checksum covers key and value only. An audit accepts that,
        and reports how many records have headers that were not compared: `confluent_with` covers them.
        """
        if error is not None or (offset := message.offset()) is None or offset < 0:
            self.failed += 1
            return
        # Does not call `record`: the extra call is measurable here.
        key = message.key()
        checksum = record_checksum(key, message.value(), message.headers() or ())
        time_ms = message.timestamp()[1]
        self._append(Entry(message.topic(), message.partition(), offset, key, time_ms, checksum))
        if len(self._pending) >= self._pending_max:
            self.flush()

    def confluent_with(self, headers: Headers) -> Callable[[object, Any], None]:
        """Return the `on_delivery` callback for a record with headers."""
        return _Confluent(self, headers)

    def kafka_python(self, key: bytes | None, value: bytes | None, headers: Headers = ()) -> Callable[[Any], None]:
        """Return the `add_callback` callback for the future that kafka-python's `send` returns."""
        return _KafkaPython(self.record, key, value, headers)

    def aiokafka(
        self, key: bytes | None, value: bytes | None, headers: Headers = (), timestamp_ms: int | None = None
    ) -> Callable[[Any], None]:
        """Return the `add_done_callback` callback for the future that aiokafka's `send` returns.

        Pass the timestamp that was sent: aiokafka 0.14 reports that of the batch's first record for all of them, so
        without it the ledger has none (-1), and an audit compares none.
        """
        return _Aiokafka(self, key, value, headers, timestamp_ms)

    def record(
        self,
        topic: str,
        partition: int,
        offset: int | None,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
    ) -> None:
        """Record one acknowledged record. Raises LedgerError if earlier lines could not be written.

        Without an offset (acks=0) no broker has acknowledged the record, so it is not recorded.
        """
        if offset is None or offset < 0:
            self.failed += 1
            return
        self._append(Entry(topic, partition, offset, key, timestamp_ms, record_checksum(key, value, headers)))
        if len(self._pending) >= self._pending_max:
            self.flush()


class Ledger(DeliveryReports):
    """A file of acknowledged records, written from a producer's delivery reports. Thread-safe; close it when done.

        ledger = chronik.Ledger("acked.jsonl")
        producer.produce(topic, value, key, on_delivery=ledger.confluent)            # confluent-kafka
        producer.send(topic, value, key).add_callback(ledger.kafka_python(key, value))
        (await producer.send(topic, value, key)).add_done_callback(ledger.aiokafka(key, value))

    Records of a transaction are acknowledged when it is committed:

        reports = ledger.transaction()
        producer.produce(topic, value, key, on_delivery=reports.confluent)
        producer.commit_transaction()
        reports.commit()  # or reports.abort(), after producer.abort_transaction()

    Key and value are the bytes that are sent, after any serializer. Memory is bounded: at most a few thousand lines are
    buffered, for a fraction of a second, without the values. A transaction's lines are buffered until it ends.
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = True) -> None:
        """Continue the ledger at this path, or start an empty one."""
        self.path = Path(path)
        # Any thread appends; removal needs the lock. Both ends of a deque are atomic.
        lines: deque[Entry] = deque()
        super().__init__(lines, PENDING_RECORDS_MAX)
        self._lines = lines
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | (0 if append else os.O_TRUNC), 0o644)
        size = os.lseek(self._file, 0, os.SEEK_END)
        whole = whole_lines_bytes(self._file, size)
        if whole < size:
            os.ftruncate(self._file, whole)
            os.lseek(self._file, whole, os.SEEK_SET)
        self._lock = threading.Lock()
        self._fault: OSError | None = None
        self._closing = threading.Event()
        self._flusher = threading.Thread(target=self._flush_periodically, name="chronik-ledger", daemon=True)
        self._flusher.start()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def transaction(self) -> TransactionReports:
        """Return the callbacks for the records of one transaction."""
        return TransactionReports(self)

    def extend(self, entries: Sequence[Entry]) -> None:
        """Record the entries of a transaction. Raises LedgerError if earlier lines could not be written."""
        for entry in entries:
            self._append(entry)
        if len(self._lines) >= self._pending_max:
            self.flush()

    def flush(self) -> None:
        """Write all lines so far to the operating system: they survive a crash of this process."""
        with self._lock:
            self._write_pending()
            if self._fault is not None:
                raise LedgerError(f"cannot write the ledger {self.path}: {self._fault.strerror}")

    def close(self) -> None:
        """Write the buffered lines and sync them to disk."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._flusher.join()
        try:
            self.flush()
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def _flush_periodically(self) -> None:
        while not self._closing.wait(FLUSH_S):
            with contextlib.suppress(LedgerError):  # the next report raises it again
                self.flush()

    def _write_pending(self) -> None:
        """Write the buffered lines; requires the lock. After a write error, drop later lines: they follow a gap."""
        if self._fault is not None:
            self._lines.clear()
        if not self._lines:
            return
        take = self._lines.popleft
        text = _encode_lines([take() for _ in range(len(self._lines))])
        try:
            left = memoryview(text)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._fault = error
            self._pending_max = 0  # so that the next report flushes and raises


class TransactionReports(DeliveryReports):
    """The records of one transaction, buffered until its outcome is known. Without an outcome, they are left out."""

    def __init__(self, ledger: Ledger) -> None:
        self._entries: list[Entry] = []
        super().__init__(self._entries, sys.maxsize)
        self._ledger = ledger

    def commit(self) -> None:
        """Record the transaction as committed. Call this after the producer's commit has succeeded."""
        self._end()

    def abort(self) -> None:
        """Record the transaction as aborted. Call this after the producer's abort has succeeded."""
        for entry in self._entries:
            entry.aborted = True
        self._end()

    def flush(self) -> None:
        """Write nothing: the outcome of the transaction is not known."""

    def _end(self) -> None:
        self._ledger.failed += self.failed
        self._ledger.extend(self._entries)
        self._entries.clear()


# One object for each pending record, which the garbage collector does not track; a closure would be seven objects that
# it does track.


class _Confluent(msgspec.Struct, gc=False):
    ledger: DeliveryReports
    headers: Headers

    def __call__(self, error: object, message: Any) -> None:
        if error is not None:
            self.ledger.failed += 1
            return
        place = message.topic(), message.partition(), message.offset(), message.timestamp()[1]
        self.ledger.record(*place, message.key(), message.value(), self.headers)


class _KafkaPython(msgspec.Struct, gc=False):
    record: Callable[..., None]
    key: bytes | None
    value: bytes | None
    headers: Headers

    def __call__(self, metadata: Any) -> None:
        place = metadata.topic, metadata.partition, metadata.offset, metadata.timestamp
        self.record(*place, self.key, self.value, self.headers)


class _Aiokafka(msgspec.Struct, gc=False):
    ledger: DeliveryReports
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int | None

    def __call__(self, future: Any) -> None:
        if future.cancelled() or future.exception() is not None:
            self.ledger.failed += 1
            return
        metadata = future.result()
        if metadata is None:  # acks=0
            self.ledger.failed += 1
            return
        time_ms = NO_TIMESTAMP if self.timestamp_ms is None else self.timestamp_ms
        self.ledger.record(
            metadata.topic, metadata.partition, metadata.offset, time_ms, self.key, self.value, self.headers
        )


def whole_lines_bytes(file: int, size: int) -> int:
    """Return where the last complete line in a file's first `size` bytes ends."""
    at = size
    while at > 0:
        start = max(0, at - TAIL_BYTES)
        newline = os.pread(file, at - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        at = start
    return 0
