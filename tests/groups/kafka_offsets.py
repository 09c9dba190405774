"""Kafka's rule for offsets in transactions, as a model for tests."""

from __future__ import annotations

from collections.abc import Iterable

from tests.groups.play import Held, LogEntry, Marker

from chronik.groups.records import OffsetKey, TopicPartition, read_key, read_offset_value


class KafkaOffsets:
    """The offsets that Kafka would have after reading this log: a direct copy of its rule, by log offset.

    A pending offset becomes the committed one at its commit marker, unless the committed one has a higher log offset.
    """

    def __init__(self, log: Iterable[LogEntry]) -> None:
        self.committed: dict[OffsetKey, tuple[int, int]] = {}
        self.pending: dict[int, dict[OffsetKey, tuple[int, int]]] = {}
        for log_offset, entry in enumerate(log):
            if isinstance(entry, Marker):
                ended = self.pending.pop(entry.producer.producer_id, {})
                for key, stored in ended.items() if entry.is_commit else ():
                    self.committed[key] = max(stored, self.committed.get(key, stored))
                continue
            (raw_key, value), producer = (entry.record, entry.producer) if isinstance(entry, Held) else (entry, None)
            about = read_key(raw_key or b"")
            if not isinstance(about, OffsetKey):
                continue
            if value is None:
                for offsets in (self.committed, *self.pending.values()):
                    offsets.pop(about, None)
            else:
                offsets = self.committed if producer is None else self.pending.setdefault(producer.producer_id, {})
                offsets[about] = (log_offset, read_offset_value(value).offset)

    def of(self, group_id: str) -> dict[TopicPartition, int]:
        return {
            (key.topic, key.partition): offset
            for key, (_, offset) in self.committed.items()
            if key.group_id == group_id
        }

    def unstable(self, group_id: str) -> set[TopicPartition]:
        pending = [key for offsets in self.pending.values() for key in offsets]
        return {(key.topic, key.partition) for key in pending if key.group_id == group_id}
