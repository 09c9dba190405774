"""The seams through which a node touches the world: disk, Raft store, randomness, threads and the wall clock.

The host hands these in and outlives the node, so the simulator can run the same node code on virtual
time and a faulty disk. Durations and deadlines are measured by `loop.time()`; `wall_ms` is only for what people and
records see (timestamps). What is deleted for its age goes by `AgeClock`, which does not follow a jump at once.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from random import Random
from uuid import UUID

from chronik.raft.store import RaftStore
from chronik.storage.disk import Disk


@dataclass(frozen=True, slots=True)
class Environment:
    """What one node may use of the machine it runs on.

    `random` is the system's own (SystemRandom) except in tests: secrets and nonces are drawn from it, and ids that
    nobody may guess. `open_raft_store` receives the path of the store and the function that draws the id of a new one;
    None opens a SQLite file.
    """

    disk: Disk
    random: Random
    executor: Executor
    wall_ms: Callable[[], int]
    open_raft_store: Callable[[str, Callable[[], UUID]], RaftStore] | None = None
    boot_id: str = ""
    """Another one after each start of the machine; empty where that is not known."""
    cluster_secret: str = ""
    """The secrets that the process was started with; empty if the node's files have them."""

    def new_uuid(self) -> UUID:
        """A version 4 UUID from the handed-in randomness."""
        return UUID(int=self.random.getrandbits(128), version=4)
