"""The in-memory log agrees with its store, whatever is truncated, compacted or replaced during a write."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.raft.harness import store_id
from tests.raft.solo import THREE

from chronik.raft.log import RaftLog
from chronik.raft.store import Entry, EntryKind, HardState, Persist, RaftError, Snapshot, StoredState, stored_after

STATE = HardState()


def entries(first: int, *terms: int) -> tuple[Entry, ...]:
    return tuple(Entry(index, term, EntryKind.COMMAND, b"%d" % term) for index, term in enumerate(terms, start=first))


def log(*terms: int) -> RaftLog:
    return RaftLog(None, entries(1, *terms))


def test_the_log_knows_the_terms_of_its_entries_and_of_the_preceding_entry() -> None:
    compacted = RaftLog(Snapshot(4, 2, THREE, b""), entries(5, 3, 3))
    assert [compacted.term_at(index) for index in (3, 4, 5, 6, 7)] == [None, 2, 3, 3, None]


def test_entries_before_the_snapshot_survive_a_restart() -> None:
    compacted = RaftLog(Snapshot(4, 2, THREE, b""), entries(2, 1, 2, 2, 3))
    assert (compacted.base_index, compacted.last_index) == (2, 5)
    assert compacted.term_at(2) == 1


def test_a_log_with_a_gap_is_refused() -> None:
    with pytest.raises(RaftError):
        RaftLog(None, (*entries(1, 1), *entries(3, 1)))
    with pytest.raises(RaftError):
        RaftLog(Snapshot(4, 2, THREE, b""), entries(6, 3))
    with pytest.raises(RaftError):
        RaftLog(Snapshot(4, 2, THREE, b""), entries(1, 1, 1))


def test_a_read_of_the_log_is_bounded_but_returns_at_least_one_entry() -> None:
    long = log(1, 1, 1, 1, 1)
    size_bytes = long.entries(1, 1, 1 << 20, 1)[0].size_bytes
    assert len(long.entries(1, 5, 1, 100)) == 1
    assert len(long.entries(1, 5, 2 * size_bytes, 100)) == 2
    assert len(long.entries(1, 5, 1 << 20, 3)) == 3
    assert len(long.entries(2, 4, 1 << 20, 100)) == 3
    assert long.entries(6, 9, 1 << 20, 100) == ()


@pytest.mark.parametrize(
    ("terms", "index", "term", "hint"),
    [((1, 1, 3, 3), 9, 2, (2, 1)), ((1, 1, 3, 3), 4, 3, (4, 3)), ((2, 2), 2, 1, (0, 0)), ((1,), 1, 9, (1, 1))],
)
def test_the_hint_is_the_last_index_at_which_the_logs_may_agree(
    terms: tuple[int, ...], index: int, term: int, hint: tuple[int, int]
) -> None:
    assert log(*terms).agreement_hint(index, term) == hint


def test_entries_truncated_during_their_write_are_not_durable() -> None:
    written = log(1)
    written.append(entries(2, 1, 1))
    written.take_unpersisted(STATE)
    written.cut_from(3)
    written.append(entries(3, 2, 2))
    written.persisted()
    assert written.durable_index == 2
    assert written.take_unpersisted(STATE) == Persist(STATE, None, None, 3, entries(3, 2, 2))
    written.persisted()
    assert written.durable_index == 4


def test_a_write_that_began_before_a_snapshot_does_not_make_the_new_log_durable() -> None:
    written = log(1)
    written.append(entries(2, 1, 1))
    written.take_unpersisted(STATE)
    snapshot = Snapshot(2, 2, THREE, b"")
    written.restore(snapshot)
    written.persisted()
    assert written.durable_index == 0
    assert written.take_unpersisted(STATE) == Persist(STATE, snapshot, None, 1, ())
    written.persisted()
    assert written.durable_index == 2


class LogAndStore(RuleBasedStateMachine):
    """A log and the store that persists it, with at most one write in progress.

    Invariant: the store equals the log up to `durable_index`, and entirely after a write that leaves nothing pending.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log = RaftLog(None, ())
        self.stored = StoredState(store_id(1))
        self.writing: Persist | None = None
        self.term = 1

    @rule(count=st.integers(1, 4))
    def append(self, count: int) -> None:
        self.log.append(entries(self.log.last_index + 1, *[self.term] * count))

    @precondition(lambda self: self.log.last_index > self.log.base_index)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(self.log.base_index + 1, self.log.last_index))
        snapshot = self.log.snapshot
        if snapshot is None or index > snapshot.index:
            self.log.cut_from(index)
            self.term += 1
            self.append(1)

    @rule(ahead=st.integers(1, 5))
    def restore(self, ahead: int) -> None:
        self.term += 1
        self.log.restore(Snapshot(self.log.last_index + ahead, self.term, THREE, b"s"))

    @precondition(lambda self: self.log.durable_index > self.log.base_index)
    @rule(data=st.data(), trailing=st.integers(0, 3))
    def compact(self, data: st.DataObject, trailing: int) -> None:
        snapshot = self.log.snapshot
        first = max(self.log.base_index, snapshot.index if snapshot else 0) + 1
        if first <= self.log.durable_index:
            index = data.draw(st.integers(first, self.log.durable_index))
            self.log.compact(Snapshot(index, self.log.term_at(index) or 0, THREE, b"c"), trailing)

    @precondition(lambda self: self.writing is None)
    @rule()
    def write(self) -> None:
        self.writing = self.log.take_unpersisted(STATE)

    @precondition(lambda self: self.writing is not None)
    @rule()
    def written(self) -> None:
        assert self.writing is not None
        self.stored = stored_after(self.stored, self.writing)
        self.writing = None
        self.log.persisted()

    @precondition(lambda self: self.writing is None)
    @rule()
    def crash(self) -> None:
        """Rebuild the log from disk; all of it is durable."""
        self.log = RaftLog(self.stored.snapshot, self.stored.entries)
        assert self.log.durable_index == self.log.last_index
        self.term += 1

    @invariant()
    def what_is_durable_is_on_disk(self) -> None:
        on_disk = {entry.index: entry for entry in self.stored.entries}
        snapshot = self.stored.snapshot
        for index in range(self.log.base_index + 1, self.log.durable_index + 1):
            if snapshot is None or index > snapshot.index:
                assert (on_disk[index],) == self.log.entries(index, index, 1, 1)


TestLogAndStore = LogAndStore.TestCase
TestLogAndStore.settings = settings(max_examples=60, stateful_step_count=40)
