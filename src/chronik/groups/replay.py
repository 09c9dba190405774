"""Rebuild the groups of an offsets partition from its records, before the node takes it over."""

from collections.abc import Iterable, Iterator

from chronik.groups.group import Group
from chronik.groups.records import (
    CommittedOffset,
    GroupMetadata,
    OffsetKey,
    UnreadableRecord,
    read_group_value,
    read_key,
    read_offset_value,
)


class Replay:
    """The latest value of every key read so far. Owned by the coordinator while the partition loads.

    Values are parsed only at the end: most of them are replaced by a later value before that.
    """

    __slots__ = ("_latest", "unreadable_count")

    def __init__(self) -> None:
        self._latest: dict[bytes, bytes] = {}
        self.unreadable_count = 0

    def read(self, records: Iterable[tuple[bytes | None, bytes | None]]) -> None:
        latest = self._latest
        for key, value in records:
            if key is None:
                self.unreadable_count += 1
                continue
            latest.pop(key, None)
            if value is not None:
                latest[key] = value

    def groups(self, partition: int, now_ms: int) -> Iterator[Group]:
        """Yield the groups as of the last record, in log order."""
        groups: dict[str, Group] = {}
        for key, value in self._latest.items():
            try:
                about = read_key(key)
                if about is None:
                    continue
                stored = read_offset_value(value) if isinstance(about, OffsetKey) else read_group_value(value)
            except UnreadableRecord:
                # No coordinator can have written it; the other groups must still load.
                self.unreadable_count += 1
                continue
            group = groups.get(about.group_id)
            if group is None:
                group = groups[about.group_id] = Group(about.group_id, partition)
            if isinstance(about, OffsetKey) and isinstance(stored, CommittedOffset):
                group.offsets.committed[(about.topic, about.partition)] = stored
            elif isinstance(stored, GroupMetadata):
                group.restore(stored, now_ms)
        yield from groups.values()
