"""A stream of records with an event halfway through: an idempotent producer and a reader run side by side.

Both use librdkafka with its defaults and the addresses of all nodes. The reader has no group, so it sees the plain log.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Self

from chronik.cli.output import progress
from chronik.cli.verify_account import Account
from chronik.cli.verify_clients import Report, open_reader, open_sender
from chronik.cli.verify_run import is_read_to_end, number_of, record
from chronik.client.properties import Target

CHART_SLICE_S = 0.1
IDLE_S_MAX = 60.0


class FailoverStream:
    """Produces `records` records at `rate` per second to `topic`; `event` runs when half of them have been sent.

    The event runs in its own thread, in parallel with the stream, and the run waits for it to finish.
    """

    def __init__(self, bootstrap: Target, topic: str, partitions: int, records: int, rate: float) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._partitions = partitions
        self._records = records
        self._rate = rate
        self.account = Account(records, partitions)
        self.event_s = 0.0
        """How long after the start the event came."""
        self.pauses_s = [0.0] * partitions
        """By partition: the longest time without an acknowledgement."""
        self.acks: list[Counter[int]] = [Counter() for _ in range(partitions)]
        """By partition: the number of acknowledgements in each slice of `CHART_SLICE_S` after the start."""
        self._lock = threading.Lock()
        self._started_s = 0.0
        self._last_ack_s: dict[int, float] = {}
        self._sent_all = threading.Event()
        self._failure: BaseException | None = None

    @property
    def longest_pause_s(self) -> float:
        return max(self.pauses_s)

    def run(self, event: Callable[[], None]) -> Self:
        reading = self._thread("reader", self._read)
        happening = self._thread("event", event)
        reading.start()
        try:
            self._produce(happening)
        finally:
            self._sent_all.set()
        happening.join()
        reading.join()
        if self._failure is not None:
            raise self._failure
        return self

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error

        return threading.Thread(target=run, name=name, daemon=True)

    def _produce(self, happening: threading.Thread) -> None:
        sender = open_sender("confluent", self._bootstrap, self._topic, "all", self._reported)
        started_s = self._started_s = time.monotonic()
        number = 0
        with progress("stream", self._records) as show:
            while number < self._records:
                due = min(self._records, int((time.monotonic() - started_s) * self._rate) + 1)
                while number < due:
                    key, value = record(number)
                    self.account.sent()
                    sender.send(number, number % self._partitions, key, value)
                    number += 1
                sender.serve_reports()
                show(number, f"{self.account.acked:,} acknowledged, {self.account.consumed:,} read")
                if not self.event_s and 2 * number >= self._records:
                    self.event_s = time.monotonic() - self._started_s
                    happening.start()
                time.sleep(0.01)
            sender.flush()
            sender.close()
        self.account.give_up_waiting()

    def _reported(self, report: Report) -> None:
        """Handle a report; runs on the producing thread, while the reader's thread uses the account too."""
        now_s = time.monotonic()
        with self._lock:
            if report.error is not None:
                self.account.refused(report.error)
                return
            partition = report.number % self._partitions
            # Until a partition's first acknowledgement the client is still connecting.
            last_s = self._last_ack_s.get(partition, now_s)
            self._last_ack_s[partition] = now_s
            self.pauses_s[partition] = max(self.pauses_s[partition], now_s - last_s)
            self.acks[partition][int((now_s - self._started_s) / CHART_SLICE_S)] += 1
            self.account.acknowledged(report.number)

    def _read(self) -> None:
        starts = dict.fromkeys(range(self._partitions), 0)
        with closing(open_reader("confluent", self._bootstrap, self._topic, starts, 500)) as reader:
            last_s = time.monotonic()
            while time.monotonic() - last_s < IDLE_S_MAX:
                batch = reader.poll(0.1)
                with self._lock:
                    for read in batch:
                        self.account.delivered(read.partition, read.offset, number_of(read))
                if batch:
                    last_s = time.monotonic()
                elif (
                    self._sent_all.is_set()
                    and self.account.missing == 0
                    and is_read_to_end(self.account, self._bootstrap, self._topic, starts)
                ):
                    return
