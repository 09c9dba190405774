"""Records that flow through a cluster during faults: producers, consumers in both modes, and the final check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, TopicPartition
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_groups import SESSION_MS, Commits, GroupConsumer
from tests.cluster.support_logins import Logins
from tests.cluster.support_logs import replicas_agree
from tests.cluster.support_recorder import (
    COMMON,
    UNUSED_GROUPS,
    RecordedConsumer,
    RecordedProducer,
    Recorder,
    WanderingConsumer,
    named,
)
from tests.support.eventually import eventually

from chronik.testing.history import Report, check
from chronik.testing.operations import SendAcknowledged, write_history

PROGRESS = 100
"""Acknowledged records of each partition that a test waits for before, during and after a fault."""
PROGRESS_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0
PRODUCERS = 2
SESSION_S = SESSION_MS / 1000 + 4.0
"""By then, a member without an answer has given up: its client checks its session about once a second."""
FINAL_READER = "late"


def group_of(topic: str) -> str:
    """Return the group that a workload has on the topic."""
    return f"group-of-{topic}"


class Workload:
    """Two idempotent producers, a consumer by assignment and a group of two, on one topic of a running cluster.

    With `rereads`, another consumer keeps seeking back to old records, and a last one reads everything from the start.
    """

    def __init__(
        self,
        nodes: Nodes,
        topic: str,
        partitions: int = 2,
        *,
        rate_per_s: float = 400.0,
        members: int = 2,
        rereads: bool = False,
        logins: Logins | None = None,
    ) -> None:
        self.nodes = nodes
        self._logins = logins or Logins.plaintext(nodes.bootstrap)
        self.topic = topic
        self.partitions = range(partitions)
        self.recorder = Recorder()
        self.commits = Commits()
        self.producers = [
            RecordedProducer(
                self.recorder,
                f"p{index}",
                self._logins.producer,
                topic,
                self.partitions,
                rate_per_s=rate_per_s / PRODUCERS,
            )
            for index in range(PRODUCERS)
        ]
        self.reader = self._reader("reader")
        self.rereaders = [self._reader("wanderer", WanderingConsumer)] if rereads else []
        self._rereads = rereads
        self.group = group_of(topic)
        self.members: list[GroupConsumer] = []
        for index in range(members):
            self.new_member(f"member{index}")

    def __enter__(self) -> Workload:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all clients, whatever happened; after `finish` they have already stopped."""
        for producer in self.producers:
            producer.abandon()
        for consumer in self._consumers:
            consumer.stop()

    @property
    def _consumers(self) -> list[RecordedConsumer]:
        return [self.reader, *self.rereaders, *self.members]

    def _reader(self, name: str, kind: type[RecordedConsumer] = RecordedConsumer) -> RecordedConsumer:
        return kind(self.recorder, name, self._logins.consumer, self.topic, self.partitions)

    def new_member(self, name: str) -> GroupConsumer:
        """Add a member to the group. It must read to the end unless it is stopped before."""
        member = GroupConsumer(self.recorder, name, self._logins.consumer, self.topic, self.group, self.commits)
        self.members.append(member)
        return member

    def proceed(self, acknowledged: int, timeout_s: float = PROGRESS_TIMEOUT_S) -> None:
        """Wait until `acknowledged` more records of each partition are acknowledged."""
        before = self.recorder.acknowledged()
        names = [named(self.topic, partition) for partition in self.partitions]

        def done() -> bool:
            now = self.recorder.acknowledged()
            gained = {name: now.get(name, 0) - before.get(name, 0) for name in names}
            assert min(gained.values()) >= acknowledged, f"acknowledged meanwhile: {gained}"
            return True

        eventually(done, timeout_s, f"{acknowledged} more records of each partition are acknowledged")

    def read_again(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Read everything acknowledged so far from the start, with a new consumer."""
        ends = self.recorder.acknowledged()
        reader = self._reader(f"again{len(self.rereaders)}")
        self.rereaders.append(reader)
        eventually(lambda: has_read(reader, ends), timeout_s, "everything can be read from the start")
        reader.stop()

    def finish(self, history_file: Path) -> Report:
        """Stop the producers, read to the end, and fail unless the history is clean."""
        report = self.conclude(history_file)
        assert report.is_clean, f"{report}\nthe history is in {history_file}"
        assert report.acknowledged == report.sent, f"{report}"
        return report

    def conclude(self, history_file: Path) -> Report:
        """Stop all clients after they have read to the end, write the history to a file, and check it."""
        try:
            for producer in self.producers:
                producer.stop()
            ends = self.ends()
            if self._rereads:
                self.rereaders.append(self._reader(FINAL_READER))
            eventually(lambda: self._read_to(ends), DRAIN_TIMEOUT_S, "the consumers have read to the end")
        finally:
            for consumer in self._consumers:
                consumer.stop()
            write_history(history_file, list(self.recorder.operations))
        for producer in self.producers:
            assert producer.errors == [], f"{producer.name}: {producer.errors[:5]}"
        for consumer in self._consumers:
            assert consumer.errors == [], f"{consumer.name}: {consumer.errors[:5]}"
        assert self.commits.violations == []
        return check(
            self.recorder.operations,
            dense=True,
            rereaders=[reader.name for reader in self.rereaders],
            session_s=SESSION_S,
            final=FINAL_READER if self._rereads else None,
        )

    def ends(self) -> dict[str, int]:
        """Return the end offset of each partition, as a client sees it."""
        consumer = Consumer({**COMMON, **self._logins.consumer.options, "group.id": f"{UNUSED_GROUPS}ends"})
        ends: dict[str, int] = {}

        def ask(partition: int) -> bool:
            try:
                found = consumer.get_watermark_offsets(TopicPartition(self.topic, partition), timeout=5.0)
            except KafkaException as error:
                raise AssertionError(f"no end offset: {error}") from None
            assert found is not None
            ends[named(self.topic, partition)] = found[1]
            return True

        eventually(lambda: all(map(ask, self.partitions)), END_TIMEOUT_S, "the end offsets are known")
        consumer.close()
        return ends

    def _read_to(self, ends: dict[str, int]) -> bool:
        for reader in (self.reader, *self.rereaders[-1:]):
            has_read(reader, ends)
        if self.members:
            committed = self.commits.committed()
            behind = {where: end - committed.get(where, 0) for where, end in ends.items()}
            assert max(behind.values()) <= 0, f"the group is behind: {behind}\n{_described(self.members, behind)}"
        return True

    def longest_gap_ms(self, from_s: float = 0.0, partitions: Sequence[int] | None = None) -> float:
        """Return the longest time that a partition had no acknowledgement, since `from_s` on the recorder's clock."""
        watched = self.partitions if partitions is None else partitions
        last = {named(self.topic, partition): from_s for partition in watched}
        longest_s = 0.0
        for operation in self.recorder.operations:
            if isinstance(operation, SendAcknowledged) and operation.at_s >= from_s and operation.partition in last:
                longest_s = max(longest_s, operation.at_s - last[operation.partition])
                last[operation.partition] = operation.at_s
        return longest_s * 1000


def has_read(reader: RecordedConsumer, ends: dict[str, int]) -> bool:
    assert reader.errors == [], reader.errors[:5]
    behind = {where: end - reader.next_offsets[where] for where, end in ends.items()}
    assert max(behind.values()) <= 0, f"the {reader.name} is behind: {behind}\n{_described([reader], behind)}"
    return True


def _described(consumers: Sequence[RecordedConsumer], behind: Mapping[str, int]) -> str:
    """Return what the clients themselves say of the partitions that they have not read to the end."""
    lines: list[str] = []
    for where in (where for where, records in behind.items() if records > 0):
        assigned = [consumer.describe(where) for consumer in consumers if where in consumer.next_offsets]
        lines += assigned or [f"no consumer has {where}"]
    return "\n".join(lines)


def all_replicas_agree(nodes: Nodes, ends: dict[str, int]) -> None:
    """Stop the nodes cleanly and compare their replicas on disk."""
    nodes.wait_in_sync()
    nodes.stop_all()
    folders = {node_id: nodes.data_folder(node_id) for node_id in nodes.ids}
    for partition, end in ends.items():
        replicas_agree(folders, partition, end)
