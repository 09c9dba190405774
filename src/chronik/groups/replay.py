"""What a partition of the offsets topic says about its groups, gathered record by record before it is taken over."""

from collections.abc import Iterable, Iterator

from chronik.groups.actions import Record
from chronik.groups.group import Group
from chronik.groups.records import (
    CommittedOffset,
    GroupMetadata,
    OffsetKey,
    TopicPartition,
    UnreadableRecord,
    read_group_value,
    read_key,
    read_offset_value,
)


class Replay:
    """The latest value of every key read so far. Owned by the coordinator, from the start of a load to its end."""

    __slots__ = ("_metadata", "_offsets", "unreadable_count")

    def __init__(self) -> None:
        self._offsets: dict[str, dict[TopicPartition, CommittedOffset]] = {}
        self._metadata: dict[str, GroupMetadata] = {}
        self.unreadable_count = 0

    def read(self, records: Iterable[tuple[bytes | None, bytes | None]]) -> None:
        for key, value in records:
            if key is None:
                self.unreadable_count += 1
                continue
            try:
                self._read((key, value))
            except UnreadableRecord:
                # Only something other than a coordinator can have written it; the groups beside it must still load.
                self.unreadable_count += 1

    def _read(self, record: Record) -> None:
        key, value = record
        about = read_key(key)
        if about is None:
            return
        if isinstance(about, OffsetKey):
            partition = (about.topic, about.partition)
            if value is None:
                self._offsets.get(about.group_id, {}).pop(partition, None)
            else:
                self._offsets.setdefault(about.group_id, {})[partition] = read_offset_value(value)
        elif value is None:
            self._metadata.pop(about.group_id, None)
        else:
            self._metadata[about.group_id] = read_group_value(value)

    def groups(self, partition: int, now_ms: int) -> Iterator[Group]:
        """The groups as they are after the last record, sorted out of nothing but the log's order."""
        names = dict.fromkeys([*self._metadata, *self._offsets])
        for name in names:
            metadata, committed = self._metadata.get(name), self._offsets.get(name)
            if metadata is None and not committed:
                continue
            group = Group(name, partition)
            if metadata is not None:
                group.restore(metadata, now_ms)
            if committed:
                group.offsets.committed.update(committed)
            yield group
