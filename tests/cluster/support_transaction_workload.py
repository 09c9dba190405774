"""Transactions that flow through a cluster during faults: writers, transformers, readers, and the final check."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from confluent_kafka import Consumer, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from tests.clients.drivers.java import Jvm
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_logins import Logins
from tests.cluster.support_recorder import COMMON, RecordedConsumer, RecordedProducer, Recorder, named, positions
from tests.cluster.support_transactions import (
    ConfluentTransactions,
    JavaTransactions,
    RecordedTransactions,
    TransactionalWriter,
    Transformer,
    fetched_offsets,
)
from tests.cluster.support_workload import has_read
from tests.support.eventually import eventually

from chronik.cli.options import with_cluster
from chronik.client.transactions import Transactions
from chronik.testing.history import Report, check
from chronik.testing.operations import OffsetsFetched, write_history

PARTITIONS = 3
SEGMENT_BYTES = 64 * 1024
WRITERS = 2
TRANSFORMERS = 2
PLAIN_RATE_PER_S = 15.0
PROGRESS_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
"""Within this time after the last fault, every transaction ends and every consumer has read to the end."""
READ_COMMITTED, READ_UNCOMMITTED = ({"isolation.level": level} for level in ("read_committed", "read_uncommitted"))
FINAL_READER = "final"
ENDED = ("Empty", "CompleteCommit", "CompleteAbort", "Dead")


def transaction_topics(nodes: Nodes) -> list[str]:
    """Create the topics of a workload: input, side and output."""
    return [nodes.new_topic(PARTITIONS, segment_bytes=str(SEGMENT_BYTES)) for _ in range(3)]


def transformers_of(topic: str) -> str:
    """Return the group of the transformers that consume the topic; their transactional ids begin with it."""
    return f"transformers-of-{topic}"


class TransactionWorkload:
    """Writers over the topics `input` and `side`; transformers from `input` to `output`; readers of all three topics.

    A producer without transactions writes to `input`, too: its records wait for open transactions. With `jvm`, one more
    writer is a Java client.
    """

    def __init__(
        self,
        nodes: Nodes,
        seed: str,
        jvm: Jvm | None = None,
        transformers: int = TRANSFORMERS,
        logins: Logins | None = None,
        topics: Sequence[str] = (),
    ) -> None:
        self.nodes = nodes
        self._logins = logins or Logins.plaintext(nodes.bootstrap)
        self.recorder = Recorder()
        self.topics = list(topics) or transaction_topics(nodes)
        self.input, self.side, self.output = self.topics
        self._group = transformers_of(self.input)
        self._seed = seed
        written = [(topic, partition) for topic in (self.input, self.side) for partition in range(PARTITIONS)]
        self._plain = RecordedProducer(
            self.recorder, "plain", self._logins.producer, self.input, range(PARTITIONS), rate_per_s=PLAIN_RATE_PER_S
        )
        self.writers = [
            TransactionalWriter(
                self.recorder,
                f"w{index}",
                partial(ConfluentTransactions, self._logins.transactions, f"{self.input}-w{index}"),
                written,
                self._chance(f"w{index}"),
            )
            for index in range(WRITERS)
        ]
        if jvm is not None:
            self.writers.append(
                TransactionalWriter(
                    self.recorder,
                    "java",
                    partial(JavaTransactions, jvm, self._logins.transactions, f"{self.input}-java"),
                    written,
                    self._chance("java"),
                )
            )
        self.transformers = [
            Transformer(
                self.recorder,
                f"t{index}",
                self._logins.transactions,
                self.input,
                self._group,
                [(self.output, partition) for partition in range(PARTITIONS)],
                self._chance(f"t{index}"),
            )
            for index in range(transformers)
        ]
        self.readers = [self._reader("committed", READ_COMMITTED), self._reader("uncommitted", READ_UNCOMMITTED)]

    def __enter__(self) -> TransactionWorkload:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all clients, whatever happened; after `conclude` they have already stopped."""
        self._plain.abandon()
        for client in (*self.writers, *self.transformers, *self.readers):
            client.stop()

    def proceed(self, timeout_s: float = PROGRESS_TIMEOUT_S) -> None:
        """Wait until every application has committed another transaction."""
        applications = self._applications
        before = {name: transactions.committed for name, transactions in applications.items()}

        def done() -> bool:
            stuck = {
                name: applications[name].describe()
                for name, count in before.items()
                if applications[name].committed == count
            }
            assert not stuck, f"no further commit by {stuck}; {self._errors()}"
            return True

        eventually(done, timeout_s, "every application commits another transaction")

    def conclude(self, history_file: Path) -> Report:
        """Stop all clients after they have read to the end, write the history to a file, and check it."""
        try:
            self._finish()
        finally:
            for client in (*self.writers, *self.transformers, *self.readers):
                client.stop()
            write_history(history_file, list(self.recorder.operations))
        assert self._errors() == [], self._errors()[:5]
        return check(self.recorder.operations, rereaders=[FINAL_READER], final=FINAL_READER)

    def summary(self) -> str:
        """Return how the transactions ended, by application: committed, aborted, unknown."""
        return ", ".join(
            f"{name} {each.committed}/{each.aborted}/{each.unknown}" for name, each in self._applications.items()
        )

    @property
    def _applications(self) -> dict[str, RecordedTransactions]:
        writers = {writer.name: writer.transactions for writer in self.writers}
        return writers | {transformer.name: transformer.transactions for transformer in self.transformers}

    def ends(self) -> dict[str, int]:
        """Return the end offset of each partition, markers included."""
        return self._latest(IsolationLevel.READ_UNCOMMITTED)

    def _finish(self) -> None:
        for writer in self.writers:
            writer.stop()
        self._plain.stop()
        eventually(self._is_stable, END_TIMEOUT_S, "every transaction of the writers has ended")
        last = self._write_last(self.input)
        if self.transformers:
            eventually(lambda: self._is_transformed(last), END_TIMEOUT_S, "the transformers have consumed all records")
        for transformer in self.transformers:
            transformer.stop()
        eventually(self._is_stable, END_TIMEOUT_S, "every transaction has ended")
        last |= self._write_last(self.side) | self._write_last(self.output)
        self.readers.append(self._reader(FINAL_READER, READ_COMMITTED))
        eventually(lambda: all(has_read(reader, last) for reader in self.readers), END_TIMEOUT_S, "all is read")

    def _write_last(self, topic: str) -> dict[str, int]:
        """Write plain records to each partition, and return its end. A consumer at this end has passed all markers."""
        producer = RecordedProducer(self.recorder, f"last-{topic}", self._logins.producer, topic, range(PARTITIONS))
        eventually(lambda: len(producer.ends) == PARTITIONS, END_TIMEOUT_S, "the last records are acknowledged")
        producer.stop()
        return dict(producer.ends)

    def _is_stable(self) -> bool:
        """Check that no transaction is open, neither in a partition nor at its coordinator."""
        ends, stable = self.ends(), self._latest(IsolationLevel.READ_COMMITTED)
        waiting = {where: (stable[where], end) for where, end in ends.items() if stable[where] != end}
        assert not waiting, f"last stable offset and end offset differ: {waiting}"
        listed = with_cluster(self.nodes.bootstrap, lambda cluster: Transactions(cluster).listed())
        unfinished = [each for each in listed if each.state not in ENDED]
        assert not unfinished, f"unfinished transactions: {unfinished}"
        return True

    def _is_transformed(self, ends: Mapping[str, int]) -> bool:
        invoked_s = self.recorder.now_s()
        group = {**COMMON, **READ_COMMITTED, **self._logins.consumer.options, "group.id": self._group}
        consumer = Consumer(group)
        try:
            found = consumer.committed(positions(ends), timeout=10.0)
        except KafkaException as error:
            raise AssertionError(f"no committed offsets: {error}") from None
        finally:
            consumer.close()
        assert all(each.error is None for each in found), f"no committed offsets: {found}"
        offsets = fetched_offsets(found)
        self.recorder.record(OffsetsFetched(self.recorder.now_s(), invoked_s, self._group, offsets))
        behind = {where: (offset, ends[where]) for where, offset in offsets.items() if (offset or 0) < ends[where]}
        assert not behind, f"the transformers are behind: {behind}; {self.summary()}"
        return True

    def _latest(self, isolation: IsolationLevel) -> dict[str, int]:
        places = [TopicPartition(topic, index) for topic in self.topics for index in range(PARTITIONS)]
        latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        admin = AdminClient({**COMMON, **self._logins.consumer.options})
        try:
            found = admin.list_offsets(dict.fromkeys(places, latest), isolation_level=isolation, request_timeout=10.0)
            return {named(place.topic, place.partition): answer.result().offset for place, answer in found.items()}
        except KafkaException as error:
            raise AssertionError(f"no end offsets: {error}") from None

    def _errors(self) -> list[str]:
        clients = (self._plain, *self.writers, *self.transformers, *self.readers)
        return [f"{client.name}: {error}" for client in clients for error in client.errors]

    def _chance(self, name: str) -> random.Random:
        return random.Random(f"{self._seed} {name}")

    def _reader(self, name: str, options: dict[str, str]) -> RecordedConsumer:
        others = [named(topic, partition) for topic in (self.side, self.output) for partition in range(PARTITIONS)]
        return RecordedConsumer(
            self.recorder, name, self._logins.consumer, self.input, range(PARTITIONS), others=others, options=options
        )
