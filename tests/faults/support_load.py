"""How fault tests observe a node: its memory, a client that must be served, and writers that track their records."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.cluster.support_cluster import no_surprises_in, resident_bytes
from tests.node.support_wire import ConnectionEnded, WireClient, batch
from tests.support.eventually import eventually
from tests.support.node import Node

from chronik.wire.records import Record

MB = 1024 * 1024


def memory_bytes(node: Node, which: str = "VmRSS") -> int:
    """Return the node's resident memory; with `VmHWM` its peak since the start or since `reset_peak`."""
    return resident_bytes(node.pid, which)


def no_surprises(node: Node) -> None:
    """Fail if the node logged an unexpected exception: it must reject bad input deliberately."""
    no_surprises_in({"": node.log_text()})


class HealthyClient:
    """Produces and fetches back one record after another while a fault affects the node.

    On exit, it must have been served: at least once, and never slower than `slowest_s_max`.
    """

    def __init__(self, node: Node, *, slowest_s_max: float = 5.0) -> None:
        self._client = WireClient(node.kafka_port, timeout_s=slowest_s_max)
        self._topic = self._client.new_topic()
        self._slowest_s_max = slowest_s_max
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="healthy-client", daemon=True)
        self.rounds = 0
        self.slowest_s = 0.0
        self.failure: Exception | None = None

    def __enter__(self) -> HealthyClient:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        self._client.socket.close()
        if kind is None:
            assert self.failure is None, (
                f"the healthy client was not served after {self.rounds} rounds: {self.failure!r}"
            )
            assert self.rounds > 0
            assert self.slowest_s <= self._slowest_s_max

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                started_s = time.monotonic()
                value = b"%d" % self.rounds
                offset = self._client.append(self._topic, value)
                assert offset == self.rounds
                fetched = self._client.fetch_one(self._topic, offset, max_wait_ms=1000)
                assert fetched.error_code == 0 and value in bytes(fetched.records)
                self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)
                self.rounds += 1
                self._stop.wait(0.005)
        except Exception as failure:
            self.failure = failure


@dataclass
class Account:
    """The values that one writer sent to one partition, and the offset of each acknowledged value."""

    topic: str
    partition: int
    sent: list[bytes] = field(default_factory=list)
    acknowledged: dict[bytes, int] = field(default_factory=dict)
    errors: list[int] = field(default_factory=list)

    def check(self, found: Found) -> None:
        """Check that acknowledged values occur once, at their offset, other values at most once, and all in order."""
        for value, offset in self.acknowledged.items():
            places = found.offsets.get(value)
            assert places == [offset], f"{value[:40]!r} was acknowledged at {offset}, found at {places}"
        offsets = [offset for value in self.sent for offset in found.offsets.get(value, ())]
        assert offsets == sorted(set(offsets)), "a record is there twice, or records changed their order"


@dataclass(frozen=True)
class Found:
    """The offsets of each value in a partition."""

    offsets: dict[bytes, list[int]]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Found:
        """Index the records. Their offsets have no gaps, because nothing is compacted or deleted here."""
        assert [record.offset for record in records] == list(range(len(records)))
        offsets: dict[bytes, list[int]] = {}
        for record in records:
            offsets.setdefault(record.value or b"", []).append(record.offset)
        return cls(offsets)


class Writer:
    """Sends numbered records, a few in flight, as fast as they are acknowledged, until the node or the test ends it."""

    def __init__(
        self, node: Node, account: Account, name: str, *, acks: int, in_flight: int = 20, timeout_s: float = 10.0
    ) -> None:
        self.account = account
        self.stopped_by: Exception | None = None
        self._client = WireClient(node.kafka_port, timeout_s=timeout_s)
        self._name = name
        self._acks = acks
        self._in_flight = in_flight
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"writer-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the requests in flight are answered."""
        self._stop.set()
        self.join()

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        waiting: list[tuple[int, bytes]] = []
        number = 0
        try:
            while not self._stop.is_set() or waiting:
                while len(waiting) < self._in_flight and not self._stop.is_set():
                    value = b"%s/%d/" % (self._name.encode(), number) + b"." * (number * 37 % 2000)
                    number += 1
                    self.account.sent.append(value)
                    correlation_id = self._client.send_produce(
                        self.account.topic, batch(value), partition=self.account.partition, acks=self._acks
                    )
                    waiting.append((correlation_id, value))
                correlation_id, value = waiting.pop(0)
                response = self._client.produced(correlation_id)
                if response.error_code == 0:
                    self.account.acknowledged[value] = response.base_offset
                else:
                    self.account.errors.append(response.error_code)
        except (OSError, ConnectionEnded) as ended:
            self.stopped_by = ended
        finally:
            self._client.socket.close()


def wait_for_acknowledged(writers: Sequence[Writer], count: int) -> None:
    """Wait until each writer has `count` records acknowledged."""
    eventually(
        lambda: all(len(writer.account.acknowledged) >= count for writer in writers),
        timeout_s=30,
        what=f"every writer has {count} records acknowledged",
    )
