"""The simulated metadata store keeps every command whose append returned, whatever ends the machine and when."""

from __future__ import annotations

import pytest
from tests.sim.machines import Machines

from chronik.node.metadata_store import MetadataStoreError
from chronik.testing.sim.host import Crashed, Host
from chronik.testing.sim.metadata_store import DiskMetadataStore


def opened(machines: Machines) -> tuple[DiskMetadataStore, bytes | None, list[bytes]]:
    store = DiskMetadataStore(machines.disk(), "/metadata.db")
    snapshot, commands = store.load()
    return store, snapshot, commands


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("crash_at", range(1, 14))
def test_commands_survive_a_crash_at_any_operation(power: bool, crash_at: int) -> None:
    machines = Machines(seed=crash_at, count=1)
    returned: list[bytes] = []
    moments = 0

    def strike(host: Host, moment: str) -> None:
        nonlocal moments
        moments += 1
        if moments == crash_at:
            if power:
                host.power_off()
            else:
                host.kill()

    machines.hosts[0].on_moment = strike
    try:
        store, _, _ = opened(machines)
        for number in range(1, 5, 2):
            commands = [b"c%d" % number, b"c%d" % (number + 1)]
            store.append(number, commands)
            returned += commands
    except Crashed:
        machines.restart()
    machines.hosts[0].on_moment = None
    _, _, found = opened(machines)
    assert found[: len(returned)] == returned
    assert found == [b"c%d" % number for number in range(1, len(found) + 1)]
    assert len(found) % 2 == 0
    machines.bury()


def test_a_snapshot_takes_the_place_of_what_it_covers(machines: Machines) -> None:
    store, _, _ = opened(machines)
    store.append(1, [b"c1", b"c2", b"c3"])
    store.replace_by_snapshot(2, b"image")
    store.append(4, [b"c4"])
    store.close()
    assert opened(machines)[1:] == (b"image", [b"c3", b"c4"])


def test_a_gap_is_refused(machines: Machines) -> None:
    store, _, _ = opened(machines)
    with pytest.raises(MetadataStoreError):
        store.append(2, [b"c2"])


def test_a_full_disk_refuses_and_a_later_append_goes_on(machines: Machines) -> None:
    store, _, _ = opened(machines)
    machines.hosts[0].disk.fill(5)
    with pytest.raises(MetadataStoreError):
        store.append(1, [b"c1"])
    machines.hosts[0].disk.make_room()
    store.append(1, [b"c1"])
    store.close()
    assert opened(machines)[2] == [b"c1"]
