"""Offsets by key, with the rule that decides when the offsets of a transaction take effect.

The coordinator applies it to the offsets of each group, and loading to the raw records of a partition. The changes
arrive in log order, so both have the same result.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Producer(NamedTuple):
    """A transactional producer."""

    producer_id: int
    epoch: int


class PendingOffset(NamedTuple, Generic[V]):
    """An offset in an open transaction of a producer with this epoch.

    The value is None once a later commit has replaced it. The partition is still unstable then, until the marker.
    """

    epoch: int
    value: V | None


@dataclass(slots=True, eq=False)
class OffsetTable(Generic[K, V]):
    """The committed offsets, and those in open transactions.

    An offset in a transaction is pending until its marker. A commit marker makes it the committed offset, unless a
    later record in the log has replaced it; an abort marker drops it. A tombstone removes pending offsets too.
    Invariants: `pending[key]` is in log order; `_keys_of` has the keys of each producer's pending offsets.
    """

    committed: dict[K, V] = field(default_factory=dict)
    pending: dict[K, dict[int, PendingOffset[V]]] = field(default_factory=dict)
    """By key and producer id."""
    _keys_of: dict[int, dict[K, None]] = field(default_factory=dict)

    def commit(self, key: K, value: V) -> None:
        """Store an offset that is not part of a transaction."""
        self.committed[key] = value
        if key in self.pending:
            self._replace(key, list(self.pending[key]))

    def remove(self, key: K) -> None:
        """Apply a tombstone."""
        self.committed.pop(key, None)
        for producer_id in self.pending.pop(key, ()):
            self._forget_key(producer_id, key)

    def hold(self, key: K, producer: Producer, value: V | None) -> None:
        """Store an offset that waits for the marker of its transaction; None if a later commit has replaced it."""
        entries = self.pending.setdefault(key, {})
        entries.pop(producer.producer_id, None)
        entries[producer.producer_id] = PendingOffset(producer.epoch, value)
        self._keys_of.setdefault(producer.producer_id, {})[key] = None

    def end(self, producer: Producer, is_commit: bool) -> None:
        """Apply a marker to the producer's pending offsets.

        An offset of a higher epoch than the marker's was written after the marker.
        """
        for key in list(self._keys_of.get(producer.producer_id, ())):
            entries = self.pending[key]
            if entries[producer.producer_id].epoch > producer.epoch:
                continue
            older = _before(producer.producer_id, entries)
            value = entries.pop(producer.producer_id).value
            self._forget_key(producer.producer_id, key)
            if is_commit and value is not None:
                self.committed[key] = value
                self._replace(key, older)
            if not entries:
                del self.pending[key]

    def producers(self) -> Iterable[int]:
        """The ids of the producers with pending offsets."""
        return self._keys_of

    def _replace(self, key: K, producer_ids: Iterable[int]) -> None:
        entries = self.pending[key]
        for producer_id in producer_ids:
            entries[producer_id] = PendingOffset(entries[producer_id].epoch, None)

    def _forget_key(self, producer_id: int, key: K) -> None:
        keys = self._keys_of[producer_id]
        del keys[key]
        if not keys:
            del self._keys_of[producer_id]


def _before(producer_id: int, entries: Iterable[int]) -> list[int]:
    before: list[int] = []
    for each in entries:
        if each == producer_id:
            break
        before.append(each)
    return before
