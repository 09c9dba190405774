"""The acts of a campaign: faults and operations. Each act is a context manager that undoes everything it did.

HARD acts make nodes unavailable and SOFT acts make them slow; both mix freely. ALONE acts are operations and damage
that must work on an otherwise healthy cluster: they mix with SOFT acts only.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.support_elections import elect
from tests.cluster.support_workload import Workload
from tests.faults.support_damage import flipped_bit, truncated_file
from tests.faults.support_lost_files import damaged_log, lost_log, short_log, stale_folder
from tests.faults.support_room import CUT, Way
from tests.faults.support_stage import Stage, Ways
from tests.faults.support_storm import Storm

from chronik.cli.cluster_resize import add_node, remove_node
from chronik.cli.errors import CliError
from chronik.client.errors import ClientError
from chronik.local.errors import LocalClusterError
from chronik.wire.errors import KafkaError

Act = Callable[[Stage, Workload], AbstractContextManager[None]]

STORM_CLIENTS = 2_000
TRANSFERS = 4
FREE_BYTES_MAX = 2 * 1024 * 1024
GOES_ON_S = 20.0
"""Shorter than a hanging sync (`HANGING`): a partition that waits for the disk misses this deadline."""
OWN_S_MAX, ELSEWHERE_S_MAX = 10.0, 3.0
"""One sick disk: the maximum time without an acknowledgement, for partitions that its node leads and for others."""


# -- unavailable nodes -------------------------------------------------------------------------------------------------


@contextmanager
def _killed(stage: Stage, victims: list[int]) -> Iterator[None]:
    stage.note(f"killed {_names(victims)}")
    for node_id in victims:
        stage.nodes.kill(node_id)
    yield
    for node_id in victims:
        stage.bring_back(node_id)


def kill_leader(stage: Stage, workload: Workload) -> AbstractContextManager[None]:
    return _killed(stage, stage.chance.sample(stage.leaders(workload), 1))


def kill_controller(stage: Stage, workload: Workload) -> AbstractContextManager[None]:
    return _killed(stage, stage.controller())


def kill_majority(stage: Stage, workload: Workload) -> AbstractContextManager[None]:
    return _killed(stage, stage.pick(len(stage.nodes.ids) // 2 + 1))


def kill_all(stage: Stage, workload: Workload) -> AbstractContextManager[None]:
    return _killed(stage, stage.running)


@contextmanager
def _paused(stage: Stage, victims: list[int]) -> Iterator[None]:
    stage.note(f"paused {_names(victims)}")
    for node_id in victims:
        stage.nodes.pause(node_id)
    yield
    for node_id in victims:
        stage.bring_back(node_id)


def pause_leader(stage: Stage, workload: Workload) -> AbstractContextManager[None]:
    return _paused(stage, stage.chance.sample(stage.leaders(workload), 1))


def pause_some(stage: Stage, workload: Workload) -> AbstractContextManager[None]:
    return _paused(stage, stage.pick(stage.chance.randint(1, len(stage.nodes.ids) // 2)))


# -- the network -------------------------------------------------------------------------------------------------------


def _apart(stage: Stage, groups: list[list[int]]) -> Ways:
    """Return the network in which no packet passes between different groups; clients reach every node."""
    group_of = {node_id: index for index, group in enumerate(groups) for node_id in group}
    rest = [node_id for node_id in stage.nodes.ids if node_id not in group_of]
    group_of.update(dict.fromkeys(rest, len(groups)))
    return {(a, b): CUT for a in group_of for b in group_of if group_of[a] != group_of[b]}


def partition_one(stage: Stage, workload: Workload) -> AbstractContextManager[None]:
    (victim,) = stage.chance.sample(stage.nodes.ids, 1)
    stage.note(f"cut off {victim}")
    return stage.network(_apart(stage, [[victim]]))


def partition_primaries(stage: Stage, workload: Workload) -> AbstractContextManager[None]:
    """Isolate up to two leaders, each alone."""
    leaders = stage.leaders(workload)
    victims = stage.chance.sample(leaders, min(len(leaders), 2))
    stage.note(f"cut off leaders {_names(victims)}")
    return stage.network(_apart(stage, [[victim] for victim in victims]))


def partition_minority(stage: Stage, workload: Workload) -> AbstractContextManager[None]:
    minority = sorted(stage.chance.sample(stage.nodes.ids, (len(stage.nodes.ids) - 1) // 2))
    stage.note(f"cut off {_names(minority)} together")
    return stage.network(_apart(stage, [minority]))


def partition_ring(stage: Stage, workload: Workload) -> AbstractContextManager[None]:
    """Each node sees a different majority: its neighbours in a ring."""
    ring = stage.chance.sample(stage.nodes.ids, len(stage.nodes.ids))
    reach = (len(ring) // 2 + 1) // 2
    cut = {
        (ring[a], ring[b]): CUT
        for a in range(len(ring))
        for b in range(len(ring))
        if min((a - b) % len(ring), (b - a) % len(ring)) > reach
    }
    stage.note(f"ring {'-'.join(map(str, ring))}")
    return stage.network(cut)


def partition_one_way(stage: Stage, workload: Workload) -> AbstractContextManager[None]:
    """One node can send packets to the other nodes but receives none from them, or the other way round."""
    (victim,) = stage.chance.sample(stage.nodes.ids, 1)
    is_deaf = stage.chance.random() < 0.5
    stage.note(f"{victim} is {'deaf' if is_deaf else 'mute'}")
    others = [node_id for node_id in stage.nodes.ids if node_id != victim]
    return stage.network({((other, victim) if is_deaf else (victim, other)): CUT for other in others})


def slow_packets(stage: Stage, workload: Workload) -> AbstractContextManager[None]:
    way = Way(delay_ms=stage.chance.uniform(10.0, 80.0), jitter_ms=stage.chance.uniform(0.0, 80.0))
    stage.note(f"packets {way.delay_ms:.0f}-{way.delay_ms + way.jitter_ms:.0f} ms late")
    return stage.network(stage.everywhere(way))


def lost_packets(stage: Stage, workload: Workload) -> AbstractContextManager[None]:
    way = Way(loss=stage.chance.uniform(0.02, 0.12))
    stage.note(f"{way.loss * 100:.0f} % of packets lost")
    return stage.network(stage.everywhere(way))


# -- disks -------------------------------------------------------------------------------------------------------------


@contextmanager
def slow_disk(stage: Stage, workload: Workload) -> Iterator[None]:
    victims = stage.chance.sample(stage.nodes.ids, stage.chance.randint(1, 2))
    delay_ms = stage.chance.randint(50, 400)
    stage.note(f"disk of {_names(victims)}: {delay_ms} ms for each sync and read")
    nodes = stage.nodes
    switches = [switch(victim) for switch in (nodes.slow_syncs, nodes.slow_reads) for victim in victims]
    for switch in switches:
        switch.write_text(str(delay_ms))
    yield
    for switch in switches:
        switch.unlink()


@contextmanager
def full_disk(stage: Stage, workload: Workload) -> Iterator[None]:
    """Fill the disk that holds a node's logs, metadata and log file. A node that cannot continue safely may stop."""
    (victim,) = stage.chance.sample(stage.small_disks, 1)
    stage.may_end_by_itself.add(victim)
    ballast = Path(stage.nodes.node(victim).folder) / "ballast"
    leave_bytes = stage.chance.choice((0, stage.chance.randrange(FREE_BYTES_MAX)))
    stage.note(f"disk of {victim} full but for {leave_bytes // 1024} KB")
    _fill(ballast, leave_bytes)
    yield
    ballast.unlink()


def _fill(ballast: Path, leave_bytes: int) -> None:
    with ballast.open("wb") as file:
        disk = os.statvfs(ballast.parent)
        wanted = disk.f_bavail * disk.f_frsize - leave_bytes
        with contextlib.suppress(OSError):  # another process took the remaining space first
            os.posix_fallocate(file.fileno(), 0, max(1, wanted))


@contextmanager
def failing_disk(stage: Stage, workload: Workload) -> Iterator[None]:
    """Every write of one node's process fails with EFBIG. The other nodes continue."""
    victim = _controller_or_leader(stage, workload)
    pid = stage.nodes.node(victim).process.pid
    assert pid is not None
    stage.may_end_by_itself.add(victim)
    stage.note(f"disk of {victim} fails")
    with _watched(stage, workload, victim, "failing-disk"):
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))
    yield
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@contextmanager
def hanging_disk(stage: Stage, workload: Workload) -> Iterator[None]:
    """No write or sync of one node completes. The other nodes continue."""
    victim = _controller_or_leader(stage, workload)
    stage.may_end_by_itself.add(victim)
    stage.note(f"disk of {victim} hangs")
    with contextlib.ExitStack() as hung:
        with _watched(stage, workload, victim, "hanging-disk"):
            hung.enter_context(stage.hanging(victim))
        yield


def _controller_or_leader(stage: Stage, workload: Workload) -> int:
    found = stage.controller() if stage.chance.random() < 0.5 else stage.leaders(workload)
    return stage.chance.choice(found)


@contextmanager
def _watched(stage: Stage, workload: Workload, victim: int, kind: str) -> Iterator[None]:
    """Run the block, which makes a node sick; then wait for progress on every partition and record how long it took."""
    try:
        leaders = {index: state.leader for index, state in stage.nodes.partitions(workload.topic).items()}
    except AssertionError:
        leaders = {}
    at_s = workload.recorder.now_s()
    yield
    if stage.is_mixed:
        return
    stage.hold()
    workload.proceed(1, GOES_ON_S)
    for what, goal_s, partitions in (
        ("its own partitions", OWN_S_MAX, [index for index, leader in leaders.items() if leader == victim]),
        ("partitions led elsewhere", ELSEWHERE_S_MAX, [index for index, leader in leaders.items() if leader != victim]),
    ):
        if partitions:
            gap_s = workload.longest_gap_ms(at_s, partitions) / 1000
            stage.measured.append((f"{kind}: longest time without an acknowledgement, {what}", gap_s, goal_s))


# -- many clients, and operations --------------------------------------------------------------------------------------


@contextmanager
def connection_storm(stage: Stage, workload: Workload) -> Iterator[None]:
    """Connect 2,000 clients at once, spread over the nodes; each sends ApiVersions and then Metadata."""
    stage.note(f"{STORM_CLIENTS} clients at once")
    with Storm([node.kafka for node in stage.nodes.local.nodes], STORM_CLIENTS, workload.topic) as storm:
        if not stage.is_mixed:
            assert storm.served == STORM_CLIENTS, f"{storm.served} of {STORM_CLIENTS} were served: {storm.failures}"
        yield


@contextmanager
def leadership_transfer(stage: Stage, workload: Workload) -> Iterator[None]:
    """Give partitions another preferred leader and elect it; repeat this `TRANSFERS` times."""
    stage.note(f"{TRANSFERS} transfers")
    for _ in range(TRANSFERS):
        try:
            _transfer(stage, workload)
        except (KafkaError, ClientError, CliError, LocalClusterError, AssertionError, OSError):
            if not stage.is_mixed:
                raise
            stage.note("not now")
    yield


def _transfer(stage: Stage, workload: Workload) -> None:
    now = stage.nodes.partitions(workload.topic)
    wanted = {index: state.replicas[1] for index, state in now.items() if stage.chance.random() < 0.7}
    elect(stage.nodes, workload.topic, wanted)


@contextmanager
def rolling_restart(stage: Stage, workload: Workload) -> Iterator[None]:
    order = stage.chance.sample(stage.nodes.ids, len(stage.nodes.ids))
    stage.note(f"restarts {_names(order)}")
    for node_id in order:
        stage.nodes.stop(node_id)
        stage.nodes.start(node_id)
        stage.nodes.wait_in_sync()
    yield


@contextmanager
def membership_change(stage: Stage, workload: Workload) -> Iterator[None]:
    """Add a node, which takes its share of the data; then move the data off another node and remove that one."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        add_node(stage.nodes.local)
    newest = stage.nodes.ids[-1]
    yield
    stage.nodes.wait_in_sync()
    gone = stage.chance.choice([node_id for node_id in stage.nodes.ids if node_id not in stage.small_disks])
    stage.note(f"node {newest} came, {gone} left")
    with contextlib.redirect_stdout(told):
        remove_node(stage.nodes.local, gone)


def _names(ids: list[int]) -> str:
    return ",".join(map(str, ids))


HARD: dict[str, Act] = {
    "kill-leader": kill_leader,
    "kill-controller": kill_controller,
    "kill-majority": kill_majority,
    "kill-all": kill_all,
    "pause-leader": pause_leader,
    "pause-some": pause_some,
    "partition-one": partition_one,
    "partition-primaries": partition_primaries,
    "partition-minority": partition_minority,
    "partition-ring": partition_ring,
    "partition-one-way": partition_one_way,
    "full-disk": full_disk,
    "failing-disk": failing_disk,
    "hanging-disk": hanging_disk,
}
SOFT: dict[str, Act] = {
    "slow-packets": slow_packets,
    "lost-packets": lost_packets,
    "slow-disk": slow_disk,
    "connection-storm": connection_storm,
    "leadership-transfer": leadership_transfer,
}
ALONE: dict[str, Act] = {
    "rolling-restart": rolling_restart,
    "membership-change": membership_change,
    "bit-flip": flipped_bit,
    "truncated-file": truncated_file,
    "lost-log": lost_log,
    "damaged-log": damaged_log,
    "short-log": short_log,
    "stale-folder": stale_folder,
}
ACTS: dict[str, Act] = {**HARD, **SOFT, **ALONE}
NEEDS_ROOM = frozenset(["partition-one-way", "slow-packets", "lost-packets", "full-disk", "membership-change"])
"""Acts that are impossible on loopback: proxies forward streams, not packets, and the nodes share a disk."""


def possible(stage: Stage) -> dict[str, Any]:
    return {name: act for name, act in ACTS.items() if stage.room is not None or name not in NEEDS_ROOM}
