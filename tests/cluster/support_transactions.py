"""Real transactional clients that record all they do: writers over several topics, and consume-transform-produce.

A writer sends a few records to random partitions in each transaction, then commits or aborts it. A transformer consumes
a topic in a group, writes a record for each record to another topic, and commits its offsets in the same transaction.
Both misbehave sometimes, as real applications do: a second writer takes over the transactional id in the middle of a
transaction, and a transformer stalls until its group has continued without it. Then the old one tries to commit.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from tests.clients.drivers.base import ClientError
from tests.clients.drivers.java import Jvm
from tests.cluster.support_groups import GROUP, SESSION_MS
from tests.cluster.support_logins import FollowedLogin, Login
from tests.cluster.support_recorder import (
    POLL_TIMEOUT_S,
    PRODUCER,
    RecordedClient,
    RecordedConsumer,
    Recorder,
    content,
    named,
    positions,
    records_of,
)

from chronik.testing.operations import (
    Assigned,
    OffsetsFetched,
    OffsetsSent,
    Polled,
    SendAcknowledged,
    SendInvoked,
    SendUnknown,
    TransactionEnded,
    TransactionEndInvoked,
)

TIMEOUT_MS = 15_000
"""After this, the coordinator aborts an open transaction."""
CALL_TIMEOUT_S = 5.0
END_TIMEOUT_S = 90.0
"""A transaction that has not ended after this time, retries included, is abandoned: its outcome is unknown."""
RECORDS_MAX = 8
PAUSE_S_MAX = 0.2
ABORTS, TAKEOVERS, STALLS = 0.25, 0.02, 0.01
"""The shares of transactions that are aborted, that are taken over, and that stall."""
STALL_S = SESSION_MS / 1000 + 2.0
TRANSFORMED_MAX = 50

Outcome = Literal["commit", "abort", "unknown"]
Answered = Callable[[str, str, int | None, str], None]
"""Receives value, partition, offset (None if the acknowledgement has none), and the error, empty on success."""
NewClient = Callable[[], "TransactionalClient"]


class AbortRequired(Exception):
    """The transaction cannot commit; the application must abort it."""


class ClientEnded(Exception):
    """The producer cannot continue; the application must create another one."""


class TransactionalClient(Protocol):
    """A producer with a transactional id. Each call retries as long as the client says that it may."""

    retries: str
    """Why the current call retries: what a test shows if it does not end."""

    def open(self) -> None:
        """Fence earlier producers with this id, and abort or finish their last transaction."""

    def begin(self) -> None: ...

    def send(self, records: Sequence[tuple[str, str, int]], answered: Answered) -> None:
        """Send values to topics and partitions."""

    def end(self, is_commit: bool) -> None: ...

    def close(self) -> None: ...


class ConfluentTransactions:
    """librdkafka's producer: protocol V1."""

    def __init__(self, login: str | Login, transactional_id: str) -> None:
        self.retries = ""
        login = Login.of(login)
        self._producer = Producer(
            {
                **PRODUCER,
                **login.options,
                "transactional.id": transactional_id,
                "transaction.timeout.ms": TIMEOUT_MS,
                "message.timeout.ms": TIMEOUT_MS,
            }
        )
        self._login = FollowedLogin(login, self._producer)

    def open(self) -> None:
        self._retry(self._producer.init_transactions)

    def begin(self) -> None:
        self._retry(lambda _: self._producer.begin_transaction())

    def send(self, records: Sequence[tuple[str, str, int]], answered: Answered) -> None:
        for value, topic, partition in records:
            where = named(topic, partition)

            def delivered(error: KafkaError | None, message: Message, value: str = value, where: str = where) -> None:
                answered(value, where, message.offset(), "" if error is None else str(error))

            try:
                self._producer.produce(
                    topic, content(value), key=where.encode(), partition=partition, on_delivery=delivered
                )
            except KafkaException as failure:
                raise _classified(failure) from None
        self._serve(self._producer.poll, 0.0)

    def send_offsets(self, offsets: list[TopicPartition], group_metadata: Any) -> None:
        """Send offsets. If the call ignores its timeout, abandon the producer.

        librdkafka waits forever if the broker that coordinated the group is down and no longer in the metadata (its
        issues 5456 and 5511).
        """
        send = self._producer.send_offsets_to_transaction

        def within_bound(timeout_s: float) -> None:
            sent: Future[None] = Future()

            def run() -> None:
                try:
                    sent.set_result(send(offsets, group_metadata, timeout_s))
                except Exception as error:
                    sent.set_exception(error)

            threading.Thread(target=run, daemon=True).start()
            try:
                sent.result(3 * timeout_s)
            except TimeoutError:
                raise ClientEnded("send_offsets_to_transaction() does not return") from None

        self._retry(within_bound)

    def end(self, is_commit: bool) -> None:
        if not is_commit:
            # An abort that overtakes the registration of the first partition fails the producer: librdkafka issue 4849.
            self._serve(self._producer.flush, CALL_TIMEOUT_S)
        self._retry(self._producer.commit_transaction if is_commit else self._producer.abort_transaction)

    def close(self) -> None:
        with contextlib.suppress(ClientEnded):
            self._serve(self._producer.purge)
            self._serve(self._producer.poll, 0.0)

    @staticmethod
    def _serve(call: Callable[..., Any], *arguments: float) -> None:
        """Run a call that serves callbacks. After a fatal error, it raises that, or a SystemError inside a callback."""
        try:
            call(*arguments)
        except (KafkaException, SystemError) as failure:
            raise ClientEnded(str(failure)) from None

    def _retry(self, call: Callable[[float], Any]) -> None:
        until_s = time.monotonic() + END_TIMEOUT_S
        self.retries = ""
        while True:
            self._login.refresh()
            try:
                call(CALL_TIMEOUT_S)
                return
            except SystemError as failure:  # see _serve
                raise ClientEnded(str(failure)) from None
            except KafkaException as failure:
                error: KafkaError = failure.args[0]
                self.retries = str(error)
                if not error.retriable() or time.monotonic() > until_s:
                    raise _classified(failure) from None


def _classified(failure: KafkaException) -> Exception:
    error: KafkaError = failure.args[0]
    return AbortRequired(str(error)) if error.txn_requires_abort() else ClientEnded(str(error))


class JavaTransactions:
    """The Java producer: protocol V2."""

    _numbers = itertools.count()

    def __init__(self, jvm: Jvm, login: str | Login, transactional_id: str) -> None:
        self.retries = ""
        self._jvm = jvm
        self._login = Login.of(login)
        self._password = self._login.settings.security.password
        settings = {
            **self._login.java_options,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": str(TIMEOUT_MS),
            "delivery.timeout.ms": str(TIMEOUT_MS),
            "request.timeout.ms": "3000",
            "retry.backoff.ms": "20",
            "max.block.ms": str(int(CALL_TIMEOUT_S * 1000)),
        }
        fields = [part for pair in settings.items() for part in pair]
        self._id = f"{transactional_id} {next(self._numbers)}"
        jvm.call("producer-new", self._id, len(fields), *fields)

    def open(self) -> None:
        self._retry("producer-open")

    def begin(self) -> None:
        self._retry("producer-begin")

    def send(self, records: Sequence[tuple[str, str, int]], answered: Answered) -> None:
        fields: list[str | int | bytes] = []
        for value, topic, partition in records:
            fields += [topic, partition, content(value)]
        answer = self._jvm.call("producer-send", self._id, len(records), *fields)
        for value, topic, partition in records:
            offset, error = answer.number(), answer.name()
            answered(value, named(topic, partition), offset if offset >= 0 else None, error)

    def end(self, is_commit: bool) -> None:
        self._retry("producer-commit" if is_commit else "producer-abort")

    def close(self) -> None:
        self._jvm.call("producer-close", self._id)

    def _retry(self, verb: str) -> None:
        until_s = time.monotonic() + END_TIMEOUT_S
        self.retries = ""
        while True:
            try:
                self._jvm.call(verb, self._id)
                return
            except ClientError as error:
                text = self.retries = str(error)
                is_current = self._login.settings.security.password == self._password
                if "TimeoutException" in text and time.monotonic() <= until_s and is_current:
                    continue
                if verb == "producer-commit" and not any(kind in text for kind in JAVA_FATAL):
                    raise AbortRequired(text) from None
                raise ClientEnded(text) from None


JAVA_FATAL = ("ProducerFenced", "InvalidProducerEpoch", "OutOfOrderSequence", "TimeoutException", "IllegalState")
"""After these, the Java client documents that the producer must be closed; a timeout leaves the outcome open."""


class RecordedTransactions:
    """The transactions of one application, one after the other, recorded. Owned by the application's thread."""

    def __init__(self, recorder: Recorder, name: str, new_client: NewClient, chance: random.Random) -> None:
        self.committed = 0
        self.aborted = 0
        self.unknown = 0
        self.chance = chance
        self.client: TransactionalClient | None = None
        self._recorder = recorder
        self._name = name
        self._new_client = new_client
        self._successor: TransactionalClient | None = None
        self._number = 0

    def describe(self) -> str:
        """Return why the application may not make progress."""
        client = self.client
        return "no producer" if client is None else f"retries after: {client.retries or 'no error'}"

    def next_name(self) -> str:
        self._number += 1
        return f"{self._name}/{self._number}"

    def open(self) -> TransactionalClient:
        """Return a client that is ready for a transaction; raise ClientEnded if it cannot be had."""
        if self.client is None:
            client = self._new_client()
            try:
                client.open()
            except AbortRequired as error:
                raise ClientEnded(str(error)) from None
            self.client = client
        return self.client

    def run(self, transaction: str, work: Callable[[TransactionalClient], None], is_commit: bool) -> Outcome | None:
        """Run one transaction. Return its outcome, or None if it did not begin."""
        try:
            client = self.open()
            client.begin()
        except (AbortRequired, ClientEnded):
            self.close()
            return None
        outcome: Outcome
        try:
            work(client)
            self._end(client, transaction, is_commit)
            outcome = "commit" if is_commit else "abort"
        except AbortRequired:
            outcome = self._abort(client, transaction)
        except ClientEnded:
            self.close()
            outcome = "unknown"
        if self._successor is not None:
            self.close()
            self.client, self._successor = self._successor, None
            if outcome == "unknown":
                outcome = "abort"  # the successor aborted it before this producer asked to commit
        self._ended(transaction, outcome)
        return outcome

    def send(self, client: TransactionalClient, transaction: str, records: Sequence[tuple[str, str, int]]) -> None:
        for value, topic, partition in records:
            at_s = self._recorder.now_s()
            self._recorder.record(SendInvoked(at_s, self._name, value, named(topic, partition), transaction))
        client.send(records, self._answered)

    def take_over(self) -> None:
        """Open another producer with the same id in the middle of a transaction, which is aborted: a zombie has it."""
        successor = self._new_client()
        try:
            successor.open()
        except (AbortRequired, ClientEnded):
            successor.close()
        else:
            self._successor = successor

    def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            client.close()

    def _ended(self, transaction: str, outcome: Outcome) -> None:
        self._recorder.record(TransactionEnded(self._recorder.now_s(), self._name, transaction, outcome))
        self.committed += outcome == "commit"
        self.aborted += outcome == "abort"
        self.unknown += outcome == "unknown"

    def _end(self, client: TransactionalClient, transaction: str, is_commit: bool) -> None:
        self._recorder.record(TransactionEndInvoked(self._recorder.now_s(), self._name, transaction, is_commit))
        client.end(is_commit)

    def _abort(self, client: TransactionalClient, transaction: str) -> Outcome:
        try:
            self._end(client, transaction, is_commit=False)
        except (AbortRequired, ClientEnded):
            self.close()
            return "unknown"
        return "abort"

    def _answered(self, value: str, where: str, offset: int | None, error: str) -> None:
        at_s = self._recorder.now_s()
        if error:
            self._recorder.record(SendUnknown(at_s, self._name, value, error))
        else:
            self._recorder.record(SendAcknowledged(at_s, self._name, value, where, offset))


class TransactionalWriter(RecordedClient):
    """Writes one transaction after another over the partitions `places` (topic and number) until it is stopped."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        new_client: NewClient,
        places: Sequence[tuple[str, int]],
        chance: random.Random,
    ) -> None:
        super().__init__(recorder, name, "", ())
        self.transactions = RecordedTransactions(recorder, name, new_client, chance)
        self._places = list(places)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._transact()
            self.transactions.close()
        except Exception as error:
            self.errors.append(repr(error))

    def _transact(self) -> None:
        transactions, chance = self.transactions, self.transactions.chance
        name = transactions.next_name()
        is_commit, is_taken_over = chance.random() >= ABORTS, chance.random() < TAKEOVERS

        def write(client: TransactionalClient) -> None:
            count = chance.randint(1, RECORDS_MAX)
            values = [(f"{name}/{index}", *chance.choice(self._places)) for index in range(count)]
            half = count // 2
            transactions.send(client, name, values[:half])
            self._stop.wait(chance.uniform(0.0, PAUSE_S_MAX))
            transactions.send(client, name, values[half:])
            if is_taken_over:
                transactions.take_over()

        transactions.run(name, write, is_commit)


class Transformer(RecordedConsumer):
    """A member of a group that consumes `topic` and writes to `output`, exactly once."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        login: str | Login,
        topic: str,
        group: str,
        output: Sequence[tuple[str, int]],
        chance: random.Random,
    ) -> None:
        self.transactions = RecordedTransactions(
            recorder, name, lambda: ConfluentTransactions(login, f"{group}-{name}"), chance
        )
        self._group = group
        self._output = list(output)
        self._rebalances = 0
        options = {
            **GROUP,
            "group.id": group,
            "isolation.level": "read_committed",
            "max.poll.interval.ms": SESSION_MS,
        }
        super().__init__(recorder, name, login, topic, (), options=options)

    def _begin(self) -> None:
        self._consumer.subscribe(
            [self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._rebalances += 1
        self.next_offsets = {named(self._topic, each.partition): 0 for each in partitions}
        self._rewind()

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._rebalances += 1
        self.next_offsets.clear()
        self._record_assignment()
        consumer.unassign()

    def _rewind(self) -> None:
        """Continue at the group's committed offsets."""
        while self.next_offsets:
            self._login.refresh()
            invoked_s = self._recorder.now_s()
            try:
                found = self._consumer.committed(positions(self.next_offsets), timeout=2.0)
            except KafkaException:
                found = []
            if found and all(each.error is None for each in found):
                break
            if self._stop.is_set():
                return  # the consumer is being closed
        else:
            return
        offsets = fetched_offsets(found)
        self._recorder.record(OffsetsFetched(self._recorder.now_s(), invoked_s, self._group, offsets))
        self.next_offsets = {where: offset or 0 for where, offset in offsets.items()}
        self._record_assignment()
        self._consumer.assign(positions(self.next_offsets))

    def _record_assignment(self) -> None:
        at_s, offsets = self._recorder.now_s(), dict[str, int | None](self.next_offsets)
        self._recorder.record(Assigned(at_s, self.name, offsets, self._group, is_read_committed=True))

    def _poll(self) -> list[Message]:
        self._login.refresh()
        invoked_s, rebalances = self._recorder.now_s(), self._rebalances
        messages = [each for each in self._consumer.consume(TRANSFORMED_MAX, POLL_TIMEOUT_S) if each.error() is None]
        if not messages:
            return []
        if rebalances != self._rebalances:
            self._rewind()  # the records may belong to partitions that were revoked
            return []
        metadata = self._consumer.consumer_group_metadata()
        name = self.transactions.next_name()
        records = records_of(messages)
        self._recorder.record(Polled(self._recorder.now_s(), invoked_s, self.name, records, name))
        consumed = {where: offset + 1 for where, offset, _ in records}
        self.next_offsets.update(consumed)
        if self.transactions.run(name, self._work(name, len(records), consumed, metadata), self._commits()) != "commit":
            self._rewind()
        return messages

    def _commits(self) -> bool:
        return self.transactions.chance.random() >= ABORTS

    def _work(
        self, name: str, count: int, consumed: Mapping[str, int], metadata: Any
    ) -> Callable[[TransactionalClient], None]:
        chance = self.transactions.chance

        def transform(client: TransactionalClient) -> None:
            assert isinstance(client, ConfluentTransactions)
            values = [(f"{name}/{index}", *chance.choice(self._output)) for index in range(count)]
            self.transactions.send(client, name, values)
            if chance.random() < STALLS:
                self._stop.wait(STALL_S)
            at_s = self._recorder.now_s()
            self._recorder.record(OffsetsSent(at_s, self.name, name, self._group, dict(consumed)))
            client.send_offsets(positions(consumed), metadata)

        return transform

    def _run(self) -> None:
        super()._run()
        self.transactions.close()


def fetched_offsets(found: Sequence[TopicPartition]) -> dict[str, int | None]:
    """Return the committed offsets that the client fetched; None if a partition has none."""
    return {named(each.topic, each.partition): each.offset if each.offset >= 0 else None for each in found}
