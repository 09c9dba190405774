"""Real clients that record all they do and see: librdkafka's idempotent producer, and its consumer in both modes.

A record's content is derived from its value, so a consumer can verify that it arrived unchanged. Content that does not
match is recorded as received, and the checker reports it as never sent.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from tests.cluster.support_logins import FollowedLogin, Login

from chronik.testing.operations import (
    Assigned,
    Operation,
    Polled,
    SendAcknowledged,
    SendInvoked,
    SendUnknown,
)

# Clients give up on a silent broker after seconds, so that a paused node causes retries instead of a long wait.
COMMON = {
    "socket.timeout.ms": 4_000,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 500,
    "topic.metadata.refresh.fast.interval.ms": 50,
    "log_level": 2,
}
PRODUCER = {
    **COMMON,
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 5,
    "request.timeout.ms": 3_000,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 200,
    "message.timeout.ms": 120_000,
}
CONSUMER = {
    **COMMON,
    "enable.auto.commit": False,
    "fetch.wait.max.ms": 100,
    "fetch.min.bytes": 10_000,  # otherwise a fetch for each record, hundreds a second for each consumer
    "fetch.error.backoff.ms": 50,
    "retry.backoff.ms": 50,
    "check.crcs": True,
    "statistics.interval.ms": 1_000,
}

UNUSED_GROUPS = "unused-"
"""The prefix of the group ids of consumers that use none: librdkafka requires one."""
UNANSWERED_MAX = 2_000
FILLER_BYTES_MAX = 700
POLL_RECORDS_MAX = 500
POLL_TIMEOUT_S = 0.1
WANDERS = 0.02
"""The share of a wandering consumer's polls before which it seeks back."""
SHOWN_STATISTICS = (
    "broker",
    "leader",
    "leader_epoch",
    "fetch_state",
    "next_offset",
    "app_offset",
    "hi_offset",
    "fetchq_cnt",
    "rxmsgs",
    "rx_ver_drops",
)
"""What librdkafka's statistics say of a partition: who serves it, who leads it, and how far the client is."""
FLUSH_TIMEOUT_S = 130.0
FLUSH_STEP_S = 1.0
JOIN_TIMEOUT_S = 150.0


class Recorder:
    """The history of a run. Any thread may record operations; they are kept in the order of their arrival."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._acknowledged: dict[str, int] = {}
        self._started_s = time.monotonic()
        self._lock = threading.Lock()

    def now_s(self) -> float:
        return time.monotonic() - self._started_s

    def record(self, operation: Operation) -> None:
        with self._lock:
            self.operations.append(operation)
            if isinstance(operation, SendAcknowledged):
                self._acknowledged[operation.partition] = self._acknowledged.get(operation.partition, 0) + 1

    def acknowledged(self) -> dict[str, int]:
        """Return the number of acknowledged sends for each partition."""
        with self._lock:
            return dict(self._acknowledged)


def content(value: str) -> bytes:
    """Return the content of a record with this value: the value, and a filler derived from it."""
    number = int(value.rpartition("/")[2])
    return value.encode() + b"|" + b"%d." % number * (number * 37 % FILLER_BYTES_MAX // 8)


def value_of(message: bytes | None) -> str:
    """Return the value of a record if its content is unchanged; otherwise the raw content."""
    raw = message or b""
    value = raw.partition(b"|")[0].decode(errors="replace")
    try:
        return value if content(value) == raw else repr(raw)
    except ValueError:
        return repr(raw)


def named(topic: str, partition: int) -> str:
    return f"{topic}-{partition}"


def number(found: int | None) -> int:
    """Return a number that every record read has; mypy cannot know that it is not None."""
    assert found is not None
    return found


def records_of(messages: Sequence[Message]) -> tuple[tuple[str, int, str], ...]:
    """Return the records of a poll, as a history has them."""
    return tuple(
        (named(message.topic() or "", number(message.partition())), number(message.offset()), value_of(message.value()))
        for message in messages
    )


def positions(offsets: Mapping[str, int]) -> list[TopicPartition]:
    """Return the offsets of partitions TOPIC-N as the client takes them."""
    split = [(where.rpartition("-"), offset) for where, offset in offsets.items()]
    return [TopicPartition(topic, int(partition), offset) for (topic, _, partition), offset in split]


class RecordedClient:
    """A client on its own thread. `errors` are the errors that it could not recover from."""

    def __init__(self, recorder: Recorder, name: str, topic: str, partitions: Sequence[int]) -> None:
        self.name = name
        self.errors: list[str] = []
        self._recorder = recorder
        self._topic = topic
        self._partitions = list(partitions)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def stop(self) -> None:
        """Stop; return when the client has ended, a producer after every send has an outcome or the client gave up."""
        self._stop.set()
        self._thread.join(JOIN_TIMEOUT_S)
        assert not self._thread.is_alive(), f"{self.name} does not end"

    def _run(self) -> None:
        raise NotImplementedError


class RecordedProducer(RecordedClient):
    """Sends numbered values to each partition in turn until it is stopped."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        login: str | Login,
        topic: str,
        partitions: Sequence[int],
        *,
        rate_per_s: float = 400.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(recorder, name, topic, partitions)
        self.unanswered = 0
        self.ends: dict[str, int] = {}
        """By partition: the offset after the last acknowledged record."""
        self._pause_s = len(partitions) / rate_per_s
        login = Login.of(login)
        self._producer = Producer(
            {**PRODUCER, **login.options, "client.id": name, "error_cb": self._error, **(options or {})}
        )
        self._login = FollowedLogin(login, self._producer)
        self._thread.start()

    def abandon(self) -> None:
        """End the producer without waiting for outcomes, after the test has failed."""
        self._stop.set()
        self._producer.purge()
        self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        number = 0
        next_s = time.monotonic()
        while not self._stop.is_set():
            self._login.refresh()
            if self.unanswered < UNANSWERED_MAX:
                for partition in self._partitions:
                    self._send(f"{self.name}/{partition}/{number}", partition)
                number += 1
            next_s = max(next_s + self._pause_s, time.monotonic() - 0.1)
            self._producer.poll(max(0.0, next_s - time.monotonic()))
        until_s = time.monotonic() + FLUSH_TIMEOUT_S
        while self._producer.flush(FLUSH_STEP_S) and time.monotonic() < until_s:
            self._login.refresh()

    def _send(self, value: str, partition: int) -> None:
        self.unanswered += 1
        where = named(self._topic, partition)
        self._recorder.record(SendInvoked(self._recorder.now_s(), self.name, value, where))

        def answered(error: KafkaError | None, message: Message) -> None:
            self.unanswered -= 1
            at_s = self._recorder.now_s()
            if error is None:
                offset = message.offset()  # None if the broker knew the batch from an earlier attempt
                if offset is not None:
                    self.ends[where] = offset + 1
                self._recorder.record(SendAcknowledged(at_s, self.name, value, where, offset))
            else:
                self._recorder.record(SendUnknown(at_s, self.name, value, str(error)))
                self.errors.append(f"{value}: {error}")

        self._producer.produce(
            self._topic, content(value), key=where.encode(), partition=partition, on_delivery=answered
        )

    def _error(self, error: KafkaError) -> None:
        if error.fatal():
            self.errors.append(f"fatal: {error}")


class RecordedConsumer(RecordedClient):
    """Reads all partitions from their start by `assign`. An offset out of range is an error, never a reset."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        login: str | Login,
        topic: str,
        partitions: Sequence[int],
        *,
        others: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`others` are partitions of other topics: TOPIC-N."""
        super().__init__(recorder, name, topic, partitions)
        self.next_offsets = dict.fromkeys([*(named(topic, partition) for partition in partitions), *others], 0)
        self._is_read_committed = (options or {}).get("isolation.level") == "read_committed"
        self._statistics = "{}"
        login = Login.of(login)
        self._consumer = Consumer(
            {
                **CONSUMER,
                "auto.offset.reset": "error",
                **login.options,
                "group.id": f"{UNUSED_GROUPS}{name}",
                "client.id": name,
                "stats_cb": self._keep_statistics,
                **(options or {}),
            }
        )
        self._login = FollowedLogin(login, self._consumer)
        self._thread.start()

    def describe(self, where: str) -> str:
        """Return what the client itself last said of a partition, and of its connections: why it may not read on."""
        last = json.loads(self._statistics)
        topic, _, partition = where.rpartition("-")
        known = last.get("topics", {}).get(topic, {}).get("partitions", {}).get(partition, {})
        shown = {key: known[key] for key in SHOWN_STATISTICS if key in known}
        connections = {
            broker["nodeid"]: broker["state"] for broker in last.get("brokers", {}).values() if broker["nodeid"] >= 0
        }
        return f"{self.name} at {self.next_offsets.get(where)} of {where}: {shown}, connections: {connections}"

    def _keep_statistics(self, statistics: str) -> None:
        self._statistics = statistics

    def _run(self) -> None:
        try:
            self._begin()
            while not self._stop.is_set():
                self._poll()
            self._consumer.close()
        except Exception as error:
            self.errors.append(repr(error))

    def _begin(self) -> None:
        self._assign()

    def _assign(self) -> None:
        self._recorder.record(
            Assigned(
                self._recorder.now_s(),
                self.name,
                dict(self.next_offsets),
                is_read_committed=self._is_read_committed,
            )
        )
        self._consumer.assign(positions(self.next_offsets))

    def _poll(self) -> list[Message]:
        self._login.refresh()
        invoked_s = self._recorder.now_s()
        good: list[Message] = []
        for message in self._consumer.consume(POLL_RECORDS_MAX, POLL_TIMEOUT_S):
            error = message.error()
            if error is None:
                good.append(message)
            elif not error.retriable() and not is_passing(error):
                self.errors.append(str(error))
        records = records_of(good)
        self._recorder.record(Polled(self._recorder.now_s(), invoked_s, self.name, records))
        for where, offset, _ in records:
            self.next_offsets[where] = offset + 1
        return good


class WanderingConsumer(RecordedConsumer):
    """Repeatedly seeks back to an earlier record of each partition, and reads on from there."""

    _chance = random.Random("wandering")

    def _poll(self) -> list[Message]:
        if self._chance.random() < WANDERS:
            self.next_offsets = {where: self._chance.randint(0, at) for where, at in self.next_offsets.items()}
            self._assign()
        return super()._poll()


def is_passing(error: KafkaError) -> bool:
    """Return whether a consumer recovers from this error by itself, while brokers come and go."""
    return error.code() in (
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._TIMED_OUT,
        KafkaError._RESOLVE,
        KafkaError._MAX_POLL_EXCEEDED,
        KafkaError._AUTHENTICATION,  # its password was changed, and it has not received the new one yet
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    )
