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

from chronik.node.membership.cluster_secret import ClusterSecret
from chronik.node.membership.raft_store import RaftStore, SqliteRaftStore
from chronik.storage.disk import Disk


@dataclass(frozen=True, slots=True)
class Environment:
    """What one node may use of the machine it runs on.

    `random` is the system's own (SystemRandom) except in tests: secrets and nonces are drawn from it, and ids that
    nobody may guess. `open_raft_store` gets the path of the store and what draws the id of a new one.
    """

    disk: Disk
    random: Random
    executor: Executor
    wall_ms: Callable[[], int]
    open_raft_store: Callable[[str, Callable[[], UUID]], RaftStore] = SqliteRaftStore
    boot_id: str = ""
    """Another one after each start of the machine; empty where that is not known."""
    cluster_secret: ClusterSecret | None = None
    """The secret that the process was started with; None where the node's files have it."""

    def new_uuid(self) -> UUID:
        """A version 4 UUID from the handed-in randomness."""
        return UUID(int=self.random.getrandbits(128), version=4)
