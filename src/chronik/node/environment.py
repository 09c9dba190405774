"""A node's interfaces to the outside world: disk, Raft store, randomness, threads and the wall clock.

The host passes these in and outlives the node, so the simulator can run the same node code on virtual time and a faulty
disk. Durations and deadlines use `loop.time()`; `wall_ms` is only for timestamps that people and records show. Deletion
by age uses `AgeClock`, which does not follow a jump at once.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from random import Random
from uuid import UUID

from chronik.node.commit_log_thread import CommitLogThread
from chronik.raft.store import RaftStore
from chronik.storage.disk import Disk


@dataclass(frozen=True, slots=True)
class Environment:
    """The parts of the machine that one node may use.

    `random` is the system's own (SystemRandom) except in tests: secrets, nonces and unguessable ids are drawn from it.
    `open_raft_store` receives the path of the store and the function that generates the id of a new one; None opens a
    SQLite file.
    """

    disk: Disk
    random: Random
    executor: Executor
    wall_ms: Callable[[], int]
    open_raft_store: Callable[[str, Callable[[], UUID]], RaftStore] | None = None
    boot_id: str = ""
    """Differs after each boot of the machine; empty if unknown."""
    cluster_secret: str = ""
    """The secrets that the process was started with; empty if they are in the node's files."""

    commit_log_thread: CommitLogThread | None = None
    """Writes the commit log; None: `executor` does."""
    cpu_s: Callable[[], float] = float
    """The CPU seconds that the calling thread has used. The default does not advance: no request takes any time."""

    def new_uuid(self) -> UUID:
        """Return a version 4 UUID drawn from `random`."""
        return UUID(int=self.random.getrandbits(128), version=4)
