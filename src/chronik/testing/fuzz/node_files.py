"""Fuzzing of the files other than logs: the data folder's own (its owner, its recovery points), and the Raft store.

What must hold: opening ends with a result, or with the error that becomes one line for people. A log's records are
never deleted because of a damaged file. The Raft store returns only a term, a vote, an entry or a snapshot that was
once written, or it refuses to load.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import UUID

from chronik.node.membership.raft_store import SqliteRaftStore
from chronik.raft.membership import Member, Membership
from chronik.raft.store import Entry as RaftEntry
from chronik.raft.store import EntryKind, HardState, Persist, Snapshot, StoredState, StoreError, stored_after
from chronik.storage.commit_log import FILE_BYTES_MIN, FILES_MAX, Entry, LogId
from chronik.storage.disk import RealDisk, StorageError
from chronik.storage.folder import DataFolder, DataFolderError, RecoveryPoint
from chronik.testing.fuzz import BrokenPromise
from chronik.testing.fuzz.file_damage import check_damaged_copies, scratch_folder

NODE_ID = 1
TOPIC, TOPIC_ID = "orders", UUID(int=7)
RECORDS = b"a batch, as far as this is concerned"
STORE_ID = UUID(int=9)
MEMBERSHIP = Membership((Member(NODE_ID, STORE_ID, True, "10.0.0.1:5092"),))


def fuzz_folders(count: int, seed: int) -> Counter[str]:
    """Check `count` damaged data folders after a clean stop, and as many with a commit log."""
    return _fuzz(count, seed, _write_folder, _open_folder) + _fuzz(count, seed, _write_commit_log, _open_framed)


def fuzz_raft_stores(count: int, seed: int) -> Counter[str]:
    """Check `count` damaged Raft stores, with and without a write-ahead log."""
    outcomes: Counter[str] = Counter()
    for is_closed in (True, False):
        history: list[StoredState] = []
        write, check = partial(_write_store, history, is_closed), partial(_open_store, history)
        outcomes += _fuzz(count, seed, write, check)
    return outcomes


def _fuzz(count: int, seed: int, write: Callable[[Path], None], check: Callable[[Path], str]) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    with scratch_folder() as folder:
        original, copy = folder / "original", folder / "copy"
        original.mkdir()
        write(original)

        def files() -> list[Path]:
            return sorted(path for path in copy.rglob("*") if path.is_file() and path.suffix != ".log")

        def check_copy() -> None:
            outcomes[check(copy)] += 1

        check_damaged_copies(original, copy, range(seed, seed + count), files, check_copy)
    return outcomes


def _write_folder(path: Path) -> None:
    folder = DataFolder.open(RealDisk(), str(path), NODE_ID, "cluster")
    folder.claim_log(TOPIC, 0, TOPIC_ID, 0)
    (path / "logs" / f"{TOPIC}-0" / f"{0:020d}.log").write_bytes(RECORDS)
    folder.record_registration("boot", 3, TOPIC_ID, 0)
    folder.record_clean_shutdown({(TOPIC, 0): RecoveryPoint(TOPIC_ID, 60)}, {(TOPIC_ID, 0): 60}, 3)
    folder.close()


def _open_folder(path: Path) -> str:
    try:
        folder = DataFolder.open(RealDisk(), str(path), NODE_ID, "cluster")
    except DataFolderError as error:
        return _refused(str(error))
    except Exception as error:
        raise BrokenPromise(f"opening ends with {error!r}") from error
    try:
        folder.claim_log(TOPIC, 0, TOPIC_ID, 0)
        outcome = "opened"
    except StorageError as error:
        outcome = _refused(error.message)
    except Exception as error:
        raise BrokenPromise(f"taking the log ends with {error!r}") from error
    finally:
        folder.close()
    records = path / "logs" / f"{TOPIC}-0" / f"{0:020d}.log"
    if not records.exists() or records.read_bytes() != RECORDS:
        raise BrokenPromise("the log's records are gone")
    folder.recovery_point(TOPIC, 0, TOPIC_ID)
    return outcome


def _write_commit_log(path: Path) -> None:
    """Write a folder whose commit log has the second half of the records in three frames."""
    folder = DataFolder.open(RealDisk(), str(path), NODE_ID, "cluster")
    folder.claim_log(TOPIC, 0, TOPIC_ID, 0)
    half = len(RECORDS) // 2
    (path / "logs" / f"{TOPIC}-0" / f"{0:020d}.log").write_bytes(RECORDS[:half])
    commit_log = folder.begin_commit_log(STORE_ID, FILES_MAX * FILE_BYTES_MIN)
    commit_log.add_file()
    for at in range(half, len(RECORDS), half // 3 + 1):
        commit_log.write([Entry(LogId(TOPIC_ID, 0), 0, at, at, RECORDS[at : at + half // 3 + 1])])
    commit_log.close()
    folder.close()


def _open_framed(path: Path) -> str:
    try:
        folder = DataFolder.open(RealDisk(), str(path), NODE_ID, "cluster")
    except DataFolderError as error:
        return _refused(str(error))
    except Exception as error:
        raise BrokenPromise(f"opening ends with {error!r}") from error
    folder.close()
    records = (path / "logs" / f"{TOPIC}-0" / f"{0:020d}.log").read_bytes()
    if not RECORDS.startswith(records) or len(records) < len(RECORDS) // 2:
        raise BrokenPromise("the replay wrote something else than the records")
    if records == RECORDS:
        return "replayed"
    # The last frame looks like the torn one of a crash. Without any other, or without their log, that is found.
    return "replayed in part"


def _refused(line: str) -> str:
    if not line or "\n" in line:
        raise BrokenPromise(f"a refusal that is no line: {line!r}")
    return "refused"


def _write_store(history: list[StoredState], is_closed: bool, folder: Path) -> None:
    """Add every state that the store ever had to `history`. Unless closed, most data is in the write-ahead log."""
    working = folder.parent / f"working-{is_closed}"
    working.mkdir()
    store = SqliteRaftStore(str(working / "metadata.db"), lambda: STORE_ID)
    history.append(store.load())
    for number in range(1, 31):
        entries = (RaftEntry(number, 1 + number // 10, EntryKind.COMMAND, b"command-%d" % number * 20),)
        snapshot = Snapshot(12, 2, MEMBERSHIP, b"image" * 300) if number == 15 else None
        persist = Persist(
            hard_state=HardState(1 + number // 10, number % 2, number - 1),
            entries=entries,
            snapshot=snapshot,
            drop_before=13 if snapshot else None,
        )
        store.persist(persist)
        history.append(stored_after(history[-1], persist))
    if is_closed:
        store.close()
    for path in working.iterdir():
        shutil.copy(path, folder)
    store.close()


def _open_store(history: list[StoredState], folder: Path) -> str:
    store = SqliteRaftStore(str(folder / "metadata.db"), lambda: UUID(int=11))
    try:
        stored = store.load()
    except StoreError as error:
        return _refused(str(error))
    except Exception as error:
        raise BrokenPromise(f"loading ends with {error!r}") from error
    finally:
        store.close()
    if stored == history[-1]:
        return "whole"
    if stored in history:
        return "as it once was"
    if stored == StoredState(UUID(int=11)):
        return "as if new"
    raise BrokenPromise(f"a state that never was: {stored}")
