"""Ledgers (what was acknowledged) and receipts (what was delivered): JSON Lines, one record each.

    {"topic": str, "partition": int, "offset": int, "key": base64 or null, "timestamp_ms": int, "checksum": int}

`checksum` is `wire.checksum.record_checksum`. A line is whole or it is the last and has no newline: whoever reads a
ledger, and whoever goes on writing one, leaves such a torn line out. What a killed process had not written yet is
missing from its ledger, which errs on the safe side: a ledger never names a record that was not acknowledged.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from chronik.wire.checksum import record_checksum

__all__ = ["Entry", "Ledger", "LedgerError", "entries"]

PENDING_RECORDS_MAX = 2000
"""Lines that wait in memory; who adds one more writes them all."""
FLUSH_S = 0.2
"""The longest that a line waits while its process lives."""
TAIL_BYTES = 64 * 1024

Headers = Sequence[tuple[str, bytes | None]]


class LedgerError(Exception):
    """The ledger cannot be written: what comes after it would be missing."""


class Entry(msgspec.Struct, frozen=True):
    """One line of a ledger or of receipts."""

    topic: str
    partition: int
    offset: int
    key: str | None
    timestamp_ms: int
    checksum: int


class _Line(msgspec.Struct, gc=False):
    """An entry before it is written; msgspec makes the base64 of the key."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    timestamp_ms: int
    checksum: int


_encode_lines = msgspec.json.Encoder().encode_lines


class Ledger:
    """A file of records, written by a producer's delivery reports. Threads may share it; close it when done.

        ledger = chronik.Ledger("acked.jsonl")
        producer.produce(topic, value, key, on_delivery=ledger.confluent)            # confluent-kafka
        producer.send(topic, value, key).add_callback(ledger.kafka_python(key, value))
        (await producer.send(topic, value, key)).add_done_callback(ledger.aiokafka(key, value))

    Key and value are the bytes that are sent, so behind any serializer. Memory is bounded: lines wait in it by the
    thousand and for a fraction of a second, without the values.
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = True) -> None:
        """Goes on behind what a ledger of this name holds, or starts it anew."""
        self.path = Path(path)
        self.failed = 0
        """Reports of records that were not acknowledged."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | (0 if append else os.O_TRUNC), 0o644)
        os.lseek(self._file, 0, os.SEEK_END)
        _cut_torn_line(self._file)
        # Added to by any thread, taken from under the lock: both ends of a deque are atomic.
        self._pending: deque[_Line] = deque()
        self._append = self._pending.append
        self._pending_max = PENDING_RECORDS_MAX
        self._lock = threading.Lock()
        self._fault: OSError | None = None
        self._closing = threading.Event()
        self._flusher = threading.Thread(target=self._flush_now_and_then, name="chronik-ledger", daemon=True)
        self._flusher.start()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Delivery reports.

    def confluent(self, error: object, message: Any) -> None:
        """For `on_delivery` of confluent-kafka; takes consumed messages too.

        Its delivery reports do not tell a record's headers: one that has some needs `confluent_with`.
        """
        if error is not None:
            self.failed += 1
            return
        # Not by way of `record`: a call more is felt here.
        key = message.key()
        self._append(
            _Line(
                message.topic(),
                message.partition(),
                message.offset(),
                key,
                message.timestamp()[1],
                record_checksum(key, message.value(), message.headers() or ()),
            )
        )
        if len(self._pending) >= self._pending_max:
            self.flush()

    def confluent_with(self, headers: Headers) -> Callable[[object, Any], None]:
        """For `on_delivery` of a record with headers."""
        return _Confluent(self, headers)

    def kafka_python(self, key: bytes | None, value: bytes | None, headers: Headers = ()) -> Callable[[Any], None]:
        """For `add_callback` of the future that kafka-python's `send` returns."""
        return _KafkaPython(self.record, key, value, headers)

    def aiokafka(
        self, key: bytes | None, value: bytes | None, headers: Headers = (), timestamp_ms: int | None = None
    ) -> Callable[[Any], None]:
        """For `add_done_callback` of the future that aiokafka's `send` returns.

        Pass the timestamp that was sent: aiokafka 0.14 tells that of the batch's first record for all of them.
        """
        return _Aiokafka(self, key, value, headers, timestamp_ms)

    def record(
        self,
        topic: str,
        partition: int,
        offset: int,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
    ) -> None:
        """One record, whoever reports it. Raises LedgerError where lines before it could not be written."""
        self._append(_Line(topic, partition, offset, key, timestamp_ms, record_checksum(key, value, headers)))
        if len(self._pending) >= self._pending_max:
            self.flush()

    # The file.

    def flush(self) -> None:
        """All lines so far are handed to the system: they outlive this process."""
        with self._lock:
            self._write_pending()
            if self._fault is not None:
                raise LedgerError(f"cannot write the ledger {self.path}: {self._fault.strerror}")

    def close(self) -> None:
        """Writes what waits, down to the disk."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._flusher.join()
        try:
            self.flush()
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def _flush_now_and_then(self) -> None:
        while not self._closing.wait(FLUSH_S):
            with contextlib.suppress(LedgerError):  # raised again by the next report
                self.flush()

    def _write_pending(self) -> None:
        """Under the lock. A fault stays: behind a hole, no more lines."""
        if self._fault is not None:
            self._pending.clear()
        if not self._pending:
            return
        take = self._pending.popleft
        text = _encode_lines([take() for _ in range(len(self._pending))])
        try:
            left = memoryview(text)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._fault = error
            self._pending_max = 0  # the next report flushes, and so is told


# One object for each record on its way, which the garbage collector does not visit: functions with their cells would
# be seven that it does.


class _Confluent(msgspec.Struct, gc=False):
    ledger: Ledger
    headers: Headers

    def __call__(self, error: object, message: Any) -> None:
        if error is not None:
            self.ledger.failed += 1
            return
        self.ledger.record(
            message.topic(),
            message.partition(),
            message.offset(),
            message.timestamp()[1],
            message.key(),
            message.value(),
            self.headers,
        )


class _KafkaPython(msgspec.Struct, gc=False):
    record: Callable[..., None]
    key: bytes | None
    value: bytes | None
    headers: Headers

    def __call__(self, metadata: Any) -> None:
        self.record(
            metadata.topic,
            metadata.partition,
            metadata.offset,
            metadata.timestamp,
            self.key,
            self.value,
            self.headers,
        )


class _Aiokafka(msgspec.Struct, gc=False):
    ledger: Ledger
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int | None

    def __call__(self, future: Any) -> None:
        if future.cancelled() or future.exception() is not None:
            self.ledger.failed += 1
            return
        told = future.result()
        time_ms = told.timestamp if self.timestamp_ms is None else self.timestamp_ms
        self.ledger.record(told.topic, told.partition, told.offset, time_ms, self.key, self.value, self.headers)


def entries(path: str | os.PathLike[str]) -> Iterator[Entry]:
    """The lines of a ledger, without a torn last one. Raises LedgerError where another line is no entry."""
    decode = msgspec.json.Decoder(Entry).decode
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decode(line)
            except msgspec.MsgspecError as error:
                raise LedgerError(f"{path}, line {number}, is no ledger's: {error}") from None


def _cut_torn_line(file: int) -> None:
    """Ends the file behind its last newline, and leaves the position there."""
    end = os.lseek(file, 0, os.SEEK_END)
    at = end
    while at > 0:
        start = max(0, at - TAIL_BYTES)
        newline = os.pread(file, at - start, start).rfind(b"\n")
        if newline >= 0:
            at = start + newline + 1
            break
        at = start
    if at < end:
        os.ftruncate(file, at)
    os.lseek(file, at, os.SEEK_SET)
