"""Loads the groups of a partition from the records of the offsets topic."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from chronik.groups.any_group import AnyGroup, GroupOffsets
from chronik.groups.consumer_group import ConsumerGroup, GroupImage
from chronik.groups.consumer_member import ConsumerMember, CurrentAssignment, MemberMetadata
from chronik.groups.consumer_records import (
    read_current,
    read_expression,
    read_member,
    read_partitions,
)
from chronik.groups.group import Group
from chronik.groups.image_records import KINDS, ImageKey, Kind, read_epoch, read_image_key, read_target
from chronik.groups.offsets import OffsetTable, Producer
from chronik.groups.records import (
    GroupKey,
    GroupMetadata,
    OffsetKey,
    RecordReader,
    UnreadableRecord,
    read_group_value,
    read_key,
    read_offset_value,
)
from chronik.groups.share_group import ShareGroup, ShareImage
from chronik.groups.share_member import ShareAssignment, ShareMember, ShareMetadata
from chronik.groups.share_records import read_share_current, read_share_group, read_share_member, read_share_state


@dataclass(slots=True, eq=False)
class Replay:
    """The records of a partition that loads: the latest value of every key read so far.

    Values are parsed only at the end: most of them are replaced by a later value before that.
    """

    table: OffsetTable[bytes, bytes] = field(default_factory=OffsetTable)
    """Group metadata too, which is never part of a transaction."""
    markers: list[tuple[Producer, bool]] = field(default_factory=list)
    """The markers that were committed while the partition loads. They follow all records that are read."""
    unreadable_count: int = 0

    def read(self, records: Iterable[tuple[bytes | None, bytes | None]], producer: Producer | None) -> None:
        table = self.table
        for key, value in records:
            if key is None:
                self.unreadable_count += 1
            elif value is None:
                table.remove(key)
            elif producer is None:
                table.commit(key, value)
            else:
                table.hold(key, producer, value)

    def groups(self, partition: int, now_ms: int) -> list[AnyGroup]:
        """Return the groups as of the last record."""
        loaded: dict[str, _LoadedGroup] = {}
        for key, value in self.table.committed.items():
            try:
                self._read(loaded, key, value)
            except UnreadableRecord:
                # No coordinator can have written it; the other groups must still load.
                self.unreadable_count += 1
        for key, entries in self.table.pending.items():
            for producer_id, (epoch, pending) in entries.items():
                self._hold(loaded, key, Producer(producer_id, epoch), pending)
        return [group.restored(group_id, partition, now_ms) for group_id, group in loaded.items()]

    def _read(self, loaded: dict[str, "_LoadedGroup"], key: bytes, value: bytes) -> None:
        about = read_any_key(key)
        if about is None:
            return
        group = loaded.get(about.group_id) or loaded.setdefault(about.group_id, _LoadedGroup())
        match about:
            case OffsetKey():
                group.offsets.committed[(about.topic, about.partition)] = read_offset_value(value)
            case GroupKey():
                group.classic = read_group_value(value)
            case ImageKey():
                group.read(about, value)

    def _hold(self, loaded: dict[str, "_LoadedGroup"], key: bytes, producer: Producer, value: bytes | None) -> None:
        """Add a pending offset to its group."""
        try:
            about = read_any_key(key)
            pending = None if value is None else read_offset_value(value)
        except UnreadableRecord:
            about = None
        if not isinstance(about, OffsetKey):
            self.unreadable_count += 1
            return
        group = loaded.get(about.group_id) or loaded.setdefault(about.group_id, _LoadedGroup())
        group.offsets.hold((about.topic, about.partition), producer, pending)


def read_any_key(key: bytes) -> OffsetKey | GroupKey | ImageKey | None:
    """Parse a record key; None for a kind of record that this coordinator does not use."""
    reader = RecordReader(key)
    version = reader.int16()
    return read_image_key(Kind(version), reader) if version in KINDS else read_key(key)


@dataclass(slots=True, eq=False)
class _LoadedGroup:
    """The records of one group: of a classic one, of a consumer group, of a share group, or offsets only."""

    offsets: GroupOffsets = field(default_factory=GroupOffsets)
    classic: GroupMetadata | None = None
    is_consumer: bool = False
    image: GroupImage = field(default_factory=GroupImage)
    members: dict[str, MemberMetadata] = field(default_factory=dict)
    current: dict[str, CurrentAssignment] = field(default_factory=dict)
    is_share: bool = False
    shares: ShareImage = field(default_factory=ShareImage)
    share_members: dict[str, ShareMetadata] = field(default_factory=dict)
    share_current: dict[str, ShareAssignment] = field(default_factory=dict)

    def read(self, key: ImageKey, value: bytes) -> None:
        match key.kind:
            case Kind.GROUP:
                self.is_consumer = True
                self.image.epoch = read_epoch(value)
            case Kind.PARTITIONS:
                self.image.topics = {topic.name: topic for topic in read_partitions(value)}
            case Kind.MEMBER:
                self.members[key.detail] = read_member(value)
            case Kind.TARGET:
                self.image.assignment_epoch = read_epoch(value)
            case Kind.TARGET_MEMBER:
                self.image.target[key.detail] = read_target(value)
            case Kind.CURRENT_MEMBER:
                self.current[key.detail] = read_current(value)
            case Kind.EXPRESSION:
                self.image.expressions[key.detail] = read_expression(value)
            case Kind.SHARE_GROUP:
                self.is_share = True
                self.shares.epoch, self.shares.metadata_hash = read_share_group(value)
            case Kind.SHARE_MEMBER:
                self.share_members[key.detail] = read_share_member(value)
            case Kind.SHARE_TARGET:
                self.shares.assignment_epoch = read_epoch(value)
            case Kind.SHARE_TARGET_MEMBER:
                self.shares.target[key.detail] = read_target(value)
            case Kind.SHARE_CURRENT_MEMBER:
                self.share_current[key.detail] = read_share_current(value)
            case Kind.SHARE_STATE:
                self.shares.topics = read_share_state(value)

    def restored(self, group_id: str, partition: int, now_ms: int) -> AnyGroup:
        if self.is_share:
            return self._restored_share_group(group_id, partition)
        if not self.is_consumer:
            group = Group(group_id, partition, self.offsets)
            if self.classic is not None:
                group.restore(self.classic, now_ms)
            return group
        for member_id, metadata in self.members.items():
            current = self.current.get(member_id, CurrentAssignment())
            self.image.put(ConsumerMember(member_id, metadata, current))
        self.image.target = {each: self.image.target[each] for each in self.image.target if each in self.members}
        return ConsumerGroup(group_id, partition, self.offsets, image=self.image, durable=self.image, is_persisted=True)

    def _restored_share_group(self, group_id: str, partition: int) -> ShareGroup:
        image = self.shares
        for member_id, metadata in self.share_members.items():
            image.members[member_id] = ShareMember(
                member_id, metadata, self.share_current.get(member_id, ShareAssignment())
            )
        image.target = {each: image.target[each] for each in image.target if each in image.members}
        return ShareGroup(group_id, partition, self.offsets, image=image, durable=image, is_persisted=True)
