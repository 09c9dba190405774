"""The committed offsets of one group.

Transactional commits, held until their transaction ends, will also belong in `GroupOffsets`.
"""

from collections.abc import Iterable, Sequence

from chronik.groups.records import CommittedOffset, Record, TopicPartition, write_offset_key, write_offset_value


class GroupOffsets:
    """The offsets of a group that are durable in the log.

    Invariant: `committed` equals the result of replaying the log up to the last reported write. `start` announces a
    change; `finish` applies or drops it, in log order. Owned by its group.
    """

    __slots__ = ("_in_flight", "committed")

    def __init__(self) -> None:
        self.committed: dict[TopicPartition, CommittedOffset] = {}
        self._in_flight: dict[TopicPartition, int] = {}

    def start(self, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions:
            self._in_flight[partition] = self._in_flight.get(partition, 0) + 1

    def finish(self, changes: Sequence[tuple[TopicPartition, CommittedOffset | None]], written: bool) -> None:
        for partition, committed in changes:
            left = self._in_flight[partition] - 1
            if left:
                self._in_flight[partition] = left
            else:
                del self._in_flight[partition]
            if not written:
                continue
            if committed is None:
                self.committed.pop(partition, None)
            else:
                self.committed[partition] = committed

    def is_in_flight(self, partition: TopicPartition) -> bool:
        return partition in self._in_flight

    @property
    def is_empty(self) -> bool:
        return not self.committed and not self._in_flight

    def partitions(self) -> list[TopicPartition]:
        """Every partition with an offset in the log, or that may have one once pending writes finish."""
        return [*self.committed, *(partition for partition in self._in_flight if partition not in self.committed)]


def offset_record(group_id: str, partition: TopicPartition, committed: CommittedOffset | None) -> Record:
    key = write_offset_key(group_id, *partition)
    return key, None if committed is None else write_offset_value(committed)
