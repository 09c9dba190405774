"""The log in memory: the entries since the snapshot, and how far the store has them.

The node writes off the loop, so three positions differ: what is in the log, what was handed to the store, and what the
store has made durable. Cutting the tail moves the latter two back, whatever write is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from chronik.raft.entries import Entry, RaftError, Snapshot


class Unpersisted(NamedTuple):
    """What the store has to be told: the snapshot, then drop the head, cut the tail, append the entries."""

    snapshot: Snapshot | None
    drop_before: int | None
    cut_from: int | None
    entries: tuple[Entry, ...]


class RaftLog:
    """Entries `base_index` + 1 to `last_index`; of the one at `base_index` only the term is known.

    Invariants: indexes have no gap; base_index <= snapshot.index; durable_index <= last_index, and everything up to it
    is on disk as it stands here.
    """

    def __init__(self, snapshot: Snapshot | None, entries: Sequence[Entry]) -> None:
        self.snapshot = snapshot
        self.base_index = snapshot.index if snapshot else 0
        self.base_term = snapshot.term if snapshot else 0
        self._entries = list(entries)
        if self._entries and self._entries[0].index <= self.base_index:
            # Entries were kept from before the snapshot. The term before the first of them is not known any more, so
            # that one takes the base's place.
            first = self._entries.pop(0)
            self.base_index, self.base_term = first.index, first.term
        for index, entry in enumerate(self._entries, self.base_index + 1):
            if entry.index != index:
                raise RaftError(f"the log has entry {entry.index} where {index} should be")
        if snapshot is not None and self.last_index < snapshot.index:
            raise RaftError(f"the log ends at {self.last_index}, its snapshot at {snapshot.index}")
        self.durable_index = self.last_index
        self._handed_index = self.last_index
        self._cut_from: int | None = None
        self._drop_before: int | None = None
        self._unpersisted_snapshot: Snapshot | None = None
        self._write_end: int | None = None

    @property
    def last_index(self) -> int:
        return self.base_index + len(self._entries)

    @property
    def last_term(self) -> int:
        return self._entries[-1].term if self._entries else self.base_term

    @property
    def is_empty(self) -> bool:
        return self.last_index == 0

    def term_at(self, index: int) -> int | None:
        """The term of the entry at `index`; None where that is compacted away or not there yet."""
        if index == self.base_index:
            return self.base_term
        if self.base_index < index <= self.last_index:
            return self._entries[index - self.base_index - 1].term
        return None

    def entries(self, first: int, last: int, bytes_max: int, entries_max: int) -> tuple[Entry, ...]:
        """The entries from `first` to `last` within the bounds, but at least one where there is one."""
        start = first - self.base_index - 1
        stop = min(last - self.base_index, len(self._entries), start + entries_max)
        if start < 0:
            raise RaftError(f"entry {first} is compacted away: the log starts after {self.base_index}")
        size_bytes = 0
        for at in range(start, stop):
            size_bytes += self._entries[at].size_bytes
            if size_bytes > bytes_max and at > start:
                stop = at
                break
        return tuple(self._entries[start:stop])

    def is_up_to_date(self, last_index: int, last_term: int) -> bool:
        """Whether a log that ends so holds all that this one may have committed (section 5.4.1 of the paper)."""
        return (last_term, last_index) >= (self.last_term, self.last_index)

    def agreement_hint(self, index: int, term: int) -> tuple[int, int]:
        """The last position up to `index` whose term is at most `term`, with that term (0 where it is compacted).

        Where another log differs at `index` and has `term` there, the two cannot agree on any position in between.
        """
        at = min(index, self.last_index)
        while (found := self.term_at(at)) is not None and found > term:
            at -= 1
        return at, found or 0

    def append(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.index != self.last_index + 1:
                raise RaftError(f"entry {entry.index} cannot follow {self.last_index}")
            self._entries.append(entry)

    def first_conflict(self, entries: Sequence[Entry]) -> int:
        """How many of the entries are here already; where the next one meets another term, the log has to be cut."""
        for count, entry in enumerate(entries):
            if self.term_at(entry.index) != entry.term:
                return count
        return len(entries)

    def cut_from(self, index: int) -> None:
        """Removes the entries from `index` on."""
        if index <= self.base_index:
            raise RaftError(f"entry {index} is compacted away and cannot be cut")
        del self._entries[index - self.base_index - 1 :]
        self._mark_cut(index)

    def _mark_cut(self, index: int) -> None:
        if index <= self._handed_index:
            self._cut_from = index if self._cut_from is None else min(self._cut_from, index)
        self._handed_index = min(self._handed_index, index - 1)
        self.durable_index = min(self.durable_index, index - 1)

    def restore(self, snapshot: Snapshot) -> None:
        """A snapshot of the leader takes the place of the whole log. Nothing counts as durable until it is stored."""
        self._entries.clear()
        self._mark_cut(1)
        self.snapshot = self._unpersisted_snapshot = snapshot
        self.base_index, self.base_term = snapshot.index, snapshot.term
        self._handed_index = snapshot.index
        self._drop_before = None
        # Whatever write is under way says nothing about this log.
        self._cut_from = 1

    def compact(self, snapshot: Snapshot, trailing_entries: int) -> None:
        """The state machine's own snapshot: entries up to it may go, but for the last few that laggards may need."""
        self.snapshot = self._unpersisted_snapshot = snapshot
        base_index = max(self.base_index, snapshot.index - trailing_entries)
        base_term = self.term_at(base_index)
        assert base_term is not None
        del self._entries[: base_index - self.base_index]
        self.base_index, self.base_term = base_index, base_term
        self._drop_before = base_index + 1

    def take_unpersisted(self) -> Unpersisted | None:
        """What the store lacks, to be written by one write; `persisted` must follow before the next one."""
        entries = tuple(self._entries[self._handed_index - self.base_index :]) if not self._is_handed else ()
        taken = Unpersisted(self._unpersisted_snapshot, self._drop_before, self._cut_from, entries)
        if taken == (None, None, None, ()):
            return None
        self._unpersisted_snapshot = self._drop_before = self._cut_from = None
        self._handed_index = self._write_end = self.last_index
        return taken

    @property
    def _is_handed(self) -> bool:
        return self._handed_index >= self.last_index

    def persisted(self) -> None:
        """The write of the last `take_unpersisted` is durable; what was cut since then does not count."""
        if self._write_end is None:
            return
        end = self._write_end if self._cut_from is None else min(self._write_end, self._cut_from - 1)
        self.durable_index = max(self.durable_index, end)
        self._write_end = None
