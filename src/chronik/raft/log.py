"""The log in memory: the entries since the snapshot, and which of them the store has.

The node writes off the event loop, so three positions differ: the end of the log, the last entry handed to the store,
and the last durable entry. Truncating the log lowers the latter two, even while a write is pending.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chronik.raft.store import Entry, HardState, Persist, RaftError, Snapshot


class RaftLog:
    """Entries `base_index` + 1 to `last_index`; for `base_index` only the term is known.

    Invariants: indexes have no gap; base_index <= snapshot.index; durable_index <= last_index, and all entries up to
    durable_index are on disk exactly as here.
    """

    def __init__(self, snapshot: Snapshot | None, entries: Sequence[Entry]) -> None:
        self.snapshot = snapshot
        self.base_index = snapshot.index if snapshot else 0
        self.base_term = snapshot.term if snapshot else 0
        self._entries = list(entries)
        if self._entries and self._entries[0].index <= self.base_index:
            # Some entries before the snapshot were kept. The term before the first of them is unknown, so that entry
            # becomes the base.
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

    def term_at(self, index: int) -> int | None:
        """Return the term of the entry at `index`; None if it was compacted away or does not exist yet."""
        if index == self.base_index:
            return self.base_term
        if self.base_index < index <= self.last_index:
            return self._entries[index - self.base_index - 1].term
        return None

    def entries(self, first: int, last: int, bytes_max: int, entries_max: int) -> tuple[Entry, ...]:
        """Return the entries from `first` to `last` within the bounds, but at least one if there is one."""
        start = first - self.base_index - 1
        stop = min(last - self.base_index, len(self._entries), start + entries_max)
        if start < 0:
            raise RaftError(f"entry {first} is compacted away: the log starts after {self.base_index}")
        size_bytes = 0
        for position in range(start, stop):
            size_bytes += self._entries[position].size_bytes
            if size_bytes > bytes_max and position > start:
                stop = position
                break
        return tuple(self._entries[start:stop])

    def is_up_to_date(self, last_index: int, last_term: int) -> bool:
        """Return whether a log with this end holds everything this one may have committed (paper, section 5.4.1)."""
        return (last_term, last_index) >= (self.last_term, self.last_index)

    def agreement_hint(self, index: int, term: int) -> tuple[int, int]:
        """Return the last position up to `index` whose term is at most `term`, and that term (0 if compacted away).

        If another log differs at `index` and has `term` there, the two cannot agree on any position in between.
        """
        hint_index = min(index, self.last_index)
        while (hint_term := self.term_at(hint_index)) is not None and hint_term > term:
            hint_index -= 1
        return hint_index, hint_term or 0

    def append(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.index != self.last_index + 1:
                raise RaftError(f"entry {entry.index} cannot follow {self.last_index}")
            self._entries.append(entry)

    def first_conflict(self, entries: Sequence[Entry]) -> int:
        """Return how many of the entries are already here. If the next one has another term, the log must be cut."""
        for count, entry in enumerate(entries):
            if self.term_at(entry.index) != entry.term:
                return count
        return len(entries)

    def cut_from(self, index: int) -> None:
        if index <= self.base_index:
            raise RaftError(f"entry {index} is compacted away and cannot be cut")
        del self._entries[index - self.base_index - 1 :]
        if index <= self._handed_index:
            self._cut_from = index if self._cut_from is None else min(self._cut_from, index)
        self._handed_index = min(self._handed_index, index - 1)
        self.durable_index = min(self.durable_index, index - 1)

    def restore(self, snapshot: Snapshot) -> None:
        """Replace the whole log by the leader's snapshot. Nothing is durable until the snapshot is stored."""
        self._entries.clear()
        self.snapshot = self._unpersisted_snapshot = snapshot
        self.base_index, self.base_term = snapshot.index, snapshot.term
        self._handed_index = snapshot.index
        self._drop_before = None
        # A pending write says nothing about this log.
        self._cut_from = 1
        self.durable_index = 0

    def compact(self, snapshot: Snapshot, trailing_entries: int) -> None:
        """Install the state machine's own snapshot; drop entries up to it, except the last few for slow peers."""
        self.snapshot = self._unpersisted_snapshot = snapshot
        base_index = max(self.base_index, snapshot.index - trailing_entries)
        base_term = self.term_at(base_index)
        assert base_term is not None
        del self._entries[: base_index - self.base_index]
        self.base_index, self.base_term = base_index, base_term
        self._drop_before = base_index + 1

    def take_unpersisted(self, hard_state: HardState) -> Persist | None:
        """Return everything the store lacks, as one write; `persisted` must follow before the next one.

        None if the store lacks nothing, apart from a new `hard_state`.
        """
        entries = tuple(self._entries[self._handed_index - self.base_index :])
        persist = Persist(hard_state, self._unpersisted_snapshot, self._drop_before, self._cut_from, entries)
        if persist == Persist(hard_state):
            return None
        self._unpersisted_snapshot = self._drop_before = self._cut_from = None
        self._handed_index = self._write_end = self.last_index
        return persist

    def persisted(self) -> None:
        """Note that the write of the last `take_unpersisted` is durable, except entries cut since then."""
        if self._write_end is None:
            return
        end = self._write_end if self._cut_from is None else min(self._write_end, self._cut_from - 1)
        self.durable_index = max(self.durable_index, end)
        self._write_end = None
