"""The Raft store on a disk that can be made to hang while the node runs. See `chronik.storage.slow_disk`."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from chronik.node.membership.raft_store import SqliteRaftStore
from chronik.raft.ready import Persist
from chronik.storage.slow_disk import SlowDisk


class SlowRaftStore(SqliteRaftStore):
    """SQLite does not write through `SlowDisk`, so each write first waits for the disk's switch."""

    def __init__(self, disk: SlowDisk, path: str, new_store_id: Callable[[], UUID]) -> None:
        super().__init__(path, new_store_id)
        self._slow = disk

    def persist(self, persist: Persist) -> None:
        self._slow.syncs.hold()
        super().persist(persist)
