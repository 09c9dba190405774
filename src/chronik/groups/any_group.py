"""What all kinds of groups share: a name, a partition of the offsets topic, and committed offsets.

The kinds are the classic `group.Group`, the `consumer_group.ConsumerGroup` of KIP-848, and the `share_group.ShareGroup`
of KIP-932, which has no committed offsets. Requests for offsets, timers and the deletion of a group use only this
base.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from chronik.groups.offsets import OffsetTable, Producer
from chronik.groups.records import CommittedOffset, Record, TopicPartition


class GroupState(StrEnum):
    """The states of a group; the values appear in DescribeGroups, ConsumerGroupDescribe and ListGroups."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


class GroupKind(StrEnum):
    """The types of groups; the values appear in ListGroups."""

    CLASSIC = "classic"
    CONSUMER = "consumer"
    SHARE = "share"


@dataclass(slots=True, eq=False)
class GroupOffsets(OffsetTable[TopicPartition, CommittedOffset]):
    """The offsets of a group that are durable in the log, and the changes that are being written.

    Invariant: the table equals the result of replaying the log up to the last reported write. `start` announces a
    change; `finish` applies or drops it, in log order. Owned by its group.
    """

    _in_flight: Counter[TopicPartition] = field(default_factory=Counter)
    _held_in_flight: Counter[TopicPartition] = field(default_factory=Counter)
    """Those of `_in_flight` that are part of a transaction."""

    def start(self, partitions: Iterable[TopicPartition], *, in_transaction: bool = False) -> None:
        for partition in partitions:
            self._in_flight[partition] += 1
            if in_transaction:
                self._held_in_flight[partition] += 1

    def finish(self, changes: Sequence[tuple[TopicPartition, CommittedOffset | None]], written: bool) -> None:
        for partition, committed in changes:
            _count_down(self._in_flight, partition)
            if not written:
                continue
            if committed is None:
                self.remove(partition)
            else:
                self.commit(partition, committed)

    def finish_held(
        self, changes: Sequence[tuple[TopicPartition, CommittedOffset]], producer: Producer, written: bool
    ) -> None:
        """Finish the write of offsets in a producer's transaction."""
        for partition, committed in changes:
            _count_down(self._in_flight, partition)
            _count_down(self._held_in_flight, partition)
            if written:
                self.hold(partition, producer, committed)

    def is_changing(self, partition: TopicPartition) -> bool:
        """Whether a change is being written, or waits for the end of its transaction."""
        return partition in self._in_flight or partition in self.pending

    def unstable_partitions(self) -> set[TopicPartition]:
        """The partitions whose committed offset an open transaction may change."""
        return {*self.pending, *self._held_in_flight}

    @property
    def is_empty(self) -> bool:
        return not self.committed and not self.pending and not self._in_flight

    def partitions(self) -> list[TopicPartition]:
        """Every partition with an offset in the log, or that may have one once pending writes finish."""
        return list(dict.fromkeys([*self.committed, *self.pending, *self._in_flight]))


def _count_down(counts: Counter[TopicPartition], partition: TopicPartition) -> None:
    counts[partition] -= 1
    if not counts[partition]:
        del counts[partition]


@dataclass(slots=True, eq=False)
class AnyGroup:
    """A group of any kind. Owned by the coordinator; nothing here waits or reads a clock."""

    group_id: str
    partition: int
    offsets: GroupOffsets = field(default_factory=GroupOffsets)
    is_locked: bool = False
    """Whether a request deletes the group or, of a share group, changes the state of its partitions. Until that is
    durable, requests that may change the group are refused, and clients retry."""
    is_dead: bool = False
    """Whether the coordinator has forgotten the group, or replaced it by one of another kind."""
    scheduled_ms: int | None = None
    """The deadline of the coordinator's timer for this group."""

    @property
    @abstractmethod
    def state(self) -> GroupState: ...

    @property
    @abstractmethod
    def kind(self) -> GroupKind: ...

    @property
    @abstractmethod
    def protocol_type(self) -> str | None: ...

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Whether the group has no content, no record in the log and no request, so that it can be forgotten."""

    @property
    @abstractmethod
    def may_expire(self) -> bool:
        """Whether the group may be deleted once it has no offsets left."""

    @abstractmethod
    def subscribed_topics(self) -> frozenset[str] | None:
        """The topics that the members consume; None if unknown."""

    @abstractmethod
    def topics_in_use(self, limit_ms: int) -> frozenset[str] | None:
        """The topics whose offsets do not expire, if older ones than `limit_ms` do; None if no offset expires."""

    @abstractmethod
    def tombstones(self) -> list[Record]:
        """The records that delete the group, without those for its offsets."""

    @abstractmethod
    def next_deadline_ms(self) -> int | None: ...
