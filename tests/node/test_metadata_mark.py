"""The mark next to the Raft store reveals writes that the store lost, but not entries it truncated on purpose."""

from __future__ import annotations

import shutil
from pathlib import Path
from uuid import UUID

import pytest
from tests.node.test_raft_store import entries
from tests.raft.memory_store import MemoryRaftStore

from chronik.node.membership.metadata_mark import MARK_NAME, NO_MARK, MarkedRaftStore, MetadataMark, last_index_of
from chronik.node.membership.raft_store import SqliteRaftStore
from chronik.raft.store import HardState, Persist, StoredState, StoreError
from chronik.storage.disk import RealDisk


def opened(folder: Path) -> MarkedRaftStore:
    path = str(folder / "metadata.db")
    return MarkedRaftStore(SqliteRaftStore(path, lambda: UUID(int=1)), RealDisk(), str(folder))


def test_a_truncated_write_ahead_log_is_detected(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.load()
    store.persist(Persist(HardState(1), entries=entries(1, 1, 1)))
    size = (tmp_path / "metadata.db-wal").stat().st_size
    store.persist(Persist(HardState(2), entries=entries(3, 2, 2)))
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("metadata.db", "metadata.db-wal", MARK_NAME):
        shutil.copy(tmp_path / name, copy)
    with (copy / "metadata.db-wal").open("r+b") as file:
        file.truncate(size)
    hurt = opened(copy)
    assert last_index_of(hurt.load()) == 2
    assert hurt.mark == MetadataMark(2, 4)
    hurt.close()
    store.close()


def test_deliberately_truncated_entries_are_not_reported_as_lost(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.load()
    store.persist(Persist(HardState(1), entries=entries(1, 1, 1, 1)))
    store.persist(Persist(HardState(2), cut_from=2, entries=entries(2, 2)))
    store.close()
    again = opened(tmp_path)
    assert last_index_of(again.load()) == 2
    assert again.mark == MetadataMark(2, 2)
    again.close()


def test_a_new_store_ignores_the_mark_of_its_predecessor(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.load()
    store.persist(Persist(HardState(3), entries=entries(1, 1, 2, 3)))
    store.close()
    for path in tmp_path.glob("metadata.db*"):
        path.unlink()
    again = opened(tmp_path)
    again.load()
    assert again.mark == NO_MARK
    again.close()
    last = opened(tmp_path)
    last.load()
    assert last.mark == NO_MARK
    last.close()


class FailingStore(MemoryRaftStore):
    """A store whose node is killed before the write takes effect."""

    def persist(self, persist: Persist) -> None:
        raise StoreError("killed")


def test_a_kill_before_entries_are_replaced_leaves_a_valid_mark(tmp_path: Path) -> None:
    """The mark is lowered before the write, so it must not name the term of that write."""
    inner = FailingStore(UUID(int=1))
    inner.stored = StoredState(UUID(int=1), HardState(1), None, entries(1, 1, 1, 1))
    store = MarkedRaftStore(inner, RealDisk(), str(tmp_path))
    store.load()
    with pytest.raises(StoreError):
        store.persist(Persist(HardState(2), cut_from=2, entries=entries(2, 2)))
    again = MarkedRaftStore(inner, RealDisk(), str(tmp_path))
    again.load()
    assert again.mark == MetadataMark(1, 1)


@pytest.mark.parametrize("at", [0, 7, 8, 15, 16, 19])
def test_a_damaged_mark_is_ignored(tmp_path: Path, at: int) -> None:
    store = opened(tmp_path)
    store.load()
    store.persist(Persist(HardState(1), entries=entries(1, 1)))
    store.close()
    data = bytearray((tmp_path / MARK_NAME).read_bytes())
    data[at] ^= 1
    (tmp_path / MARK_NAME).write_bytes(data)
    again = opened(tmp_path)
    again.load()
    assert again.mark == NO_MARK
    again.close()
