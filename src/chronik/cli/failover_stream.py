"""A stream of records with something happening in the middle of it: an idempotent producer and a reader side by side.

Both are librdkafka with its defaults and all nodes' addresses. The reader has no group, so what it sees is the log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from chronik.cli.output import progress
from chronik.cli.verify_account import Account
from chronik.cli.verify_clients import Reader, Report, open_reader, open_sender
from chronik.cli.verify_run import end_offsets, number_of, record

SLICE_S = 0.01
POLL_S = 0.1
IDLE_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What came of it. `longest_pause_s`: the longest time between two acknowledgements of one partition."""

    account: Account
    seconds: float
    longest_pause_s: float


class FailoverStream:
    """`records` records at `rate` per second into `topic`; `event` is called when half of them have been sent."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, records: int, rate: float) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._partitions = partitions
        self._records = records
        self._rate = rate
        self._account = Account(records, partitions)
        self._lock = threading.Lock()
        self._last_ack_s: list[float] = []
        self._longest_pause_s = 0.0
        self._sent_all = threading.Event()
        self._failure: BaseException | None = None

    def run(self, event: Callable[[], None]) -> StreamResult:
        reader = threading.Thread(target=self._read, name="reader", daemon=True)
        started_s = time.monotonic()
        reader.start()
        try:
            self._produce(event)
        finally:
            self._sent_all.set()
        reader.join()
        if self._failure is not None:
            raise self._failure
        return StreamResult(self._account, time.monotonic() - started_s, self._longest_pause_s)

    def _produce(self, event: Callable[[], None]) -> None:
        sender = open_sender("confluent", self._bootstrap, self._topic, "all", self._reported)
        started_s = time.monotonic()
        self._last_ack_s = [started_s] * self._partitions
        happened = False
        number = 0
        with progress("stream", self._records) as bar:
            while number < self._records:
                due = min(self._records, int((time.monotonic() - started_s) * self._rate) + 1)
                while number < due:
                    key, value = record(number)
                    self._account.sent()
                    sender.send(number, number % self._partitions, key, value)
                    number += 1
                sender.serve_reports()
                bar.update(number, f"{self._account.acked:,} acknowledged, {self._account.consumed:,} read")
                if not happened and 2 * number >= self._records:
                    happened = True
                    event()
                time.sleep(SLICE_S)
            sender.flush()
            sender.close()
        self._account.give_up_waiting()

    def _reported(self, report: Report) -> None:
        """Called by this thread when it serves reports; the reader's thread uses the account too."""
        now_s = time.monotonic()
        with self._lock:
            if report.error is not None:
                self._account.refused(report.error)
                return
            partition = report.number % self._partitions
            self._longest_pause_s = max(self._longest_pause_s, now_s - self._last_ack_s[partition])
            self._last_ack_s[partition] = now_s
            self._account.acknowledged(report.number)

    def _read(self) -> None:
        try:
            reader = open_reader(
                "confluent", self._bootstrap, self._topic, dict.fromkeys(range(self._partitions), 0), 500
            )
            try:
                self._read_all(reader)
            finally:
                reader.close()
        except BaseException as error:
            self._failure = error

    def _read_all(self, reader: Reader) -> None:
        last_s = time.monotonic()
        while time.monotonic() - last_s < IDLE_S_MAX:
            batch = reader.poll(POLL_S)
            with self._lock:
                for read in batch:
                    self._account.delivered(read.partition, read.offset, number_of(read))
            if batch:
                last_s = time.monotonic()
            elif self._sent_all.is_set() and self._account.missing == 0:
                ends = end_offsets(self._bootstrap, self._topic)
                if ends is not None and all(self._account.next_offset(p) >= end for p, end in ends.items()):
                    return
