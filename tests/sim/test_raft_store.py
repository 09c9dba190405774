"""The simulated Raft store keeps every write that returned, whatever stops the machine, at any time."""

from __future__ import annotations

from uuid import UUID

import pytest
from tests.sim.machines import Machines

from chronik.raft.store import Entry, EntryKind, HardState, Persist, StoredState, StoreError
from chronik.testing.sim.host import Crashed, Host
from chronik.testing.sim.raft_store import DiskRaftStore

STORE_ID = UUID(int=7)


def opened(machines: Machines) -> tuple[DiskRaftStore, StoredState]:
    store = DiskRaftStore(machines.disk(), "/raft.db", lambda: STORE_ID)
    return store, store.load()


def write(term: int) -> Persist:
    """Vote in a new term, and append an entry of it."""
    return Persist(HardState(term, vote=1), entries=(Entry(term, term, EntryKind.COMMAND, b"x"),))


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("crash_at", range(1, 30, 2))
def test_writes_survive_a_crash_at_any_operation(power: bool, crash_at: int) -> None:
    machines = Machines(seed=crash_at, count=1)
    points = returned = 0

    def strike(host: Host, point: str) -> None:
        nonlocal points
        points += 1
        if points == crash_at:
            if power:
                host.power_off()
            else:
                host.kill()

    machines.hosts[0].on_crash_point = strike
    try:
        store, _ = opened(machines)
        for term in range(1, 4):
            store.persist(write(term))
            returned = term
    except Crashed:
        machines.restart()
    machines.hosts[0].on_crash_point = None
    _, stored = opened(machines)
    assert stored.hard_state.term in (returned, returned + 1)
    assert [entry.index for entry in stored.entries] == list(range(1, stored.hard_state.term + 1))
    assert stored.store_id == STORE_ID
    machines.bury()


def test_a_failed_write_may_be_retried(machines: Machines) -> None:
    store, _ = opened(machines)
    machines.hosts[0].disk.fill(0)
    with pytest.raises(StoreError):
        store.persist(write(1))
    machines.hosts[0].disk.make_room()
    store.persist(write(1))
    assert opened(machines)[1].hard_state == HardState(1, vote=1)


def test_one_write_can_truncate_the_log_and_drop_old_entries(machines: Machines) -> None:
    store, _ = opened(machines)
    for term in range(1, 6):
        store.persist(write(term))
    store.persist(Persist(HardState(6), drop_before=2, cut_from=4))
    assert [entry.index for entry in opened(machines)[1].entries] == [2, 3]
