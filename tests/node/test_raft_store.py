"""What a Raft node has written survives a crash intact; damaged files are refused with a one-line error."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.raft.memory_store import MemoryRaftStore

from chronik.node.membership.raft_store import SqliteRaftStore
from chronik.raft.membership import Member, Membership
from chronik.raft.store import Entry, EntryKind, HardState, Persist, Snapshot, StoreError

MEMBERSHIP = Membership((Member(1, UUID(int=1), True, "host:1"), Member(2, UUID(int=2), False)), (UUID(int=3),))


def entries(first: int, *terms: int) -> tuple[Entry, ...]:
    return tuple(Entry(index, term, EntryKind.COMMAND, b"%d" % term) for index, term in enumerate(terms, start=first))


def ids() -> Iterator[UUID]:
    number = 0
    while True:
        number += 1
        yield UUID(int=number)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "raft.db")


@pytest.fixture
def open_store(path: str) -> Iterator[Callable[[], SqliteRaftStore]]:
    opened: list[SqliteRaftStore] = []
    new_id = ids()

    def open_store() -> SqliteRaftStore:
        opened.append(SqliteRaftStore(path, lambda: next(new_id)))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


OpenStore = Callable[[], SqliteRaftStore]


def test_a_new_store_is_empty_and_creates_its_id_once(open_store: OpenStore) -> None:
    stored = open_store().load()
    assert (stored.hard_state, stored.snapshot, stored.entries) == (HardState(), None, ())
    assert open_store().load().store_id == stored.store_id


def test_a_store_that_replaces_a_lost_one_has_another_id(path: str, open_store: OpenStore) -> None:
    store = open_store()
    before = store.load().store_id
    store.close()
    for lost in Path(path).parent.glob("raft.db*"):
        lost.unlink()
    assert open_store().load().store_id != before


def test_the_store_reads_back_everything_it_wrote(open_store: OpenStore) -> None:
    store = open_store()
    store.load()
    store.persist(Persist(HardState(3, 2, 1), entries=entries(1, 1, 2, 3)))
    store.persist(Persist(HardState(4, None, 3), Snapshot(2, 2, MEMBERSHIP, b"state"), drop_before=2))
    stored = open_store().load()
    assert stored.hard_state == HardState(4, None, 3)
    assert stored.snapshot == Snapshot(2, 2, MEMBERSHIP, b"state")
    assert stored.entries == entries(2, 2, 3)


def test_the_log_tail_is_truncated_and_replaced_in_one_write(open_store: OpenStore) -> None:
    store = open_store()
    store.persist(Persist(HardState(1), entries=entries(1, 1, 1, 1)))
    store.persist(Persist(HardState(2), cut_from=2, entries=entries(2, 2)))
    assert store.load().entries == entries(1, 1, 2)


def test_a_snapshot_from_the_leader_replaces_the_whole_log(open_store: OpenStore) -> None:
    store = open_store()
    store.persist(Persist(HardState(1), entries=entries(1, 1, 1, 1)))
    store.persist(Persist(HardState(5), Snapshot(50, 4, MEMBERSHIP, b"s"), cut_from=1, entries=entries(51, 5)))
    stored = open_store().load()
    assert stored.entries == entries(51, 5)
    assert stored.snapshot is not None
    assert stored.snapshot.index == 50


def test_a_write_can_be_retried(open_store: OpenStore) -> None:
    """A commit that reported an error may still have reached the disk."""
    store = open_store()
    write = Persist(HardState(1, 1, 0), entries=entries(1, 1, 1))
    store.persist(write)
    store.persist(write)
    assert store.load().entries == entries(1, 1, 1)


def test_a_write_that_would_leave_a_gap_is_refused_as_a_whole(open_store: OpenStore) -> None:
    store = open_store()
    store.persist(Persist(HardState(1), entries=entries(1, 1)))
    with pytest.raises(StoreError, match="ends at entry 1, not 2"):
        store.persist(Persist(HardState(9), entries=entries(3, 9)))
    assert store.load().hard_state == HardState(1)


def test_written_entries_are_in_the_files_without_closing_the_store(
    path: str, tmp_path: Path, open_store: OpenStore
) -> None:
    """As after kill -9: another process that opens a copy of the files reads everything."""
    store = open_store()
    store_id = store.load().store_id
    store.persist(Persist(HardState(7, 3, 0), entries=entries(1, 7)))
    for file in Path(path).parent.glob("raft.db*"):
        shutil.copy(file, tmp_path / file.name.replace("raft", "copy"))
    copy = SqliteRaftStore(str(tmp_path / "copy.db"), lambda: UUID(int=99))
    stored = copy.load()
    copy.close()
    assert (stored.store_id, stored.hard_state, stored.entries) == (store_id, HardState(7, 3, 0), entries(1, 7))


def test_each_write_is_synced_to_disk(path: str, open_store: OpenStore) -> None:
    store = open_store()
    store.load()
    connection = store._open()
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# Damage


def _overwritten(path: str) -> None:
    Path(path).write_bytes(b"not a database at all" * 500)


def _cut(path: str) -> None:
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: len(data) // 2])


def _executed(statement: str) -> Callable[[str], None]:
    def run(path: str) -> None:
        connection = sqlite3.connect(path)
        connection.execute(statement)
        connection.commit()
        connection.close()

    return run


DAMAGES = {
    "overwritten": _overwritten,
    "cut in half": _cut,
    "changed entry": _executed("UPDATE entries SET data = x'00' WHERE position = 60"),
    "entry of another type": _executed("UPDATE entries SET data = 'text' WHERE position = 60"),
    "entry of an unknown kind": _executed("UPDATE entries SET kind = 9 WHERE position = 60"),
    "missing entry": _executed("DELETE FROM entries WHERE position = 60"),
    "missing head": _executed("DELETE FROM entries WHERE position < 60"),
    "missing tail": _executed("DELETE FROM entries WHERE position > 90"),
    "changed vote": _executed("UPDATE hard_state SET vote = 3"),
    "changed snapshot": _executed("UPDATE snapshot SET data = x'00'"),
    "missing snapshot": _executed("DELETE FROM snapshot"),
    "unknown format": _executed("UPDATE settings SET value = 99 WHERE name = 'format'"),
    "unreadable id": _executed("UPDATE settings SET value = 'me' WHERE name = 'store_id'"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_error_for_a_damaged_file_is_one_line_that_names_the_file(
    path: str, open_store: OpenStore, damage: Callable[[str], None]
) -> None:
    store = open_store()
    store.load()
    store.persist(Persist(HardState(1, 1, 0), entries=entries(1, *[1] * 100)))
    store.persist(Persist(HardState(1, 1, 95), Snapshot(50, 1, MEMBERSHIP, b"state"), drop_before=45))
    store.close()
    damage(path)
    with pytest.raises(StoreError) as raised:
        open_store().load()
    assert path in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_flipped_bit_or_a_truncated_file_is_refused_or_harmless(path: str, open_store: OpenStore) -> None:
    store = open_store()
    store.load()
    store.persist(Persist(HardState(1, 1, 0), entries=entries(1, *[1] * 100)))
    store.persist(Persist(HardState(1, 1, 95), Snapshot(50, 1, MEMBERSHIP, b"state" * 500), drop_before=45))
    store.close()
    whole, random, refused = Path(path).read_bytes(), Random(1), 0
    expected = open_store().load()
    for _ in range(1000):
        damaged = bytearray(whole)
        if random.random() < 0.2:
            del damaged[random.randrange(len(whole)) :]
        else:
            damaged[random.randrange(len(whole))] ^= 1 << random.randrange(8)
        copy = f"{path}-copy"
        Path(copy).write_bytes(damaged)
        store = SqliteRaftStore(copy, lambda: UUID(int=1))
        try:
            # An empty file is a valid new store: the logs next to it reveal that case.
            assert not damaged or store.load() == expected
        except StoreError as error:
            refused += 1
            assert copy in str(error) and "remove it; a node with peers" in str(error) and "\n" not in str(error)
        store.close()
        for name in (copy, f"{copy}-wal", f"{copy}-shm"):
            Path(name).unlink(missing_ok=True)
    assert refused > 300


def test_the_error_for_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    store = SqliteRaftStore(str(tmp_path / "missing" / "raft.db"), lambda: UUID(int=1))
    with pytest.raises(StoreError, match="missing"):
        store.load()
    with pytest.raises(StoreError, match="missing"):
        store.persist(Persist(HardState(1)))


# Equivalence of both stores


class TwoStores(RuleBasedStateMachine):
    """The SQLite store and the in-memory store hold the same state after the same writes."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryRaftStore(UUID(int=1))
        self.file = SqliteRaftStore(":memory:", lambda: UUID(int=1))
        self.file.load()
        self.term = 1
        self.last = self.base = 0

    def both(self, persist: Persist) -> None:
        self.memory.persist(persist)
        self.file.persist(persist)
        assert self.file.load() == self.memory.load()

    @rule(count=st.integers(1, 5))
    def append(self, count: int) -> None:
        self.both(Persist(HardState(self.term), entries=entries(self.last + 1, *[self.term] * count)))
        self.last += count

    @rule(data=st.data(), count=st.integers(1, 3))
    def overwrite(self, data: st.DataObject, count: int) -> None:
        if self.last > self.base:
            first = data.draw(st.integers(self.base + 1, self.last))
            self.term += 1
            self.both(Persist(HardState(self.term, 2), cut_from=first, entries=entries(first, *[self.term] * count)))
            self.last = first + count - 1

    @rule(data=st.data(), trailing=st.integers(0, 3))
    def compact(self, data: st.DataObject, trailing: int) -> None:
        if self.last > self.base:
            index = data.draw(st.integers(self.base + 1, self.last))
            snapshot = Snapshot(index, self.term, MEMBERSHIP, b"%d" % index)
            self.both(Persist(HardState(self.term, None, index), snapshot, drop_before=index - trailing))
            self.base = index

    @rule(ahead=st.integers(1, 5))
    def install(self, ahead: int) -> None:
        self.last = self.base = self.last + ahead
        snapshot = Snapshot(self.last, self.term, MEMBERSHIP, b"i")
        self.both(Persist(HardState(self.term, None, self.last), snapshot, cut_from=1))

    def teardown(self) -> None:
        self.file.close()


TestTwoStores = TwoStores.TestCase
TestTwoStores.settings = settings(max_examples=30, stateful_step_count=20)
