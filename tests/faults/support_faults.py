"""The faults and operations of tests on real processes. Each is a context manager that undoes everything it did.

HARD faults make nodes unavailable and SOFT faults make them slow; both mix freely. ALONE are operations and damage
that must work on an otherwise healthy cluster: they mix with SOFT faults only.
"""

from __future__ import annotations

import contextlib
import io
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

from tests.cluster.support_cluster import Nodes, fill_disk
from tests.cluster.support_workload import PROGRESS, Workload
from tests.faults.support_file_faults import damaged_log, flipped_bit, lost_log, short_log, stale_folder, truncated_file
from tests.faults.support_injector import FaultInjector, LinkFaults
from tests.faults.support_namespaces import CUT, LinkFault
from tests.faults.support_overload import Storm
from tests.faults.support_security import CLIENTS, REAUTHENTICATE_MS, ClusterSecurity
from tests.node.support_wire import ConnectionEnded, WireClient
from tests.support.eventually import eventually

from chronik.cli.cluster_resize import add_node, remove_node
from chronik.cli.errors import CliError
from chronik.client.errors import ClientError
from chronik.local.errors import LocalClusterError
from chronik.local.node import LocalNode
from chronik.wire.errors import KafkaError

Fault = Callable[[FaultInjector, Workload], AbstractContextManager[None]]
Choose = Callable[[FaultInjector, Workload], list[int]]

STORM_CLIENTS = 2_000
RELOAD_TIMEOUT_S = 60.0
TRANSFERS = 4
FREE_BYTES_MAX = 2 * 1024 * 1024
CONTINUES_S_MAX = 20.0
"""A partition that waits for a disk that hangs misses this deadline."""
OWN_S_MAX, ELSEWHERE_S_MAX = 10.0, 3.0
"""One sick disk: the maximum time without an acknowledgement, for partitions that its node leads and for others."""


# -- victims -----------------------------------------------------------------------------------------------------------


def leader(injector: FaultInjector, workload: Workload) -> list[int]:
    """Choose one, or none if the other faults of a mix have stopped every node."""
    leaders = injector.leaders(workload)
    return injector.chance.sample(leaders, min(1, len(leaders)))


def controller(injector: FaultInjector, workload: Workload) -> list[int]:
    return injector.controller()


def follower(injector: FaultInjector, workload: Workload) -> list[int]:
    return [injector.nodes.follower(workload.topic)]


def any_node(injector: FaultInjector, workload: Workload) -> list[int]:
    return injector.chance.sample(injector.nodes.ids, 1)


def some_nodes(injector: FaultInjector, workload: Workload) -> list[int]:
    return injector.pick(injector.chance.randint(1, len(injector.nodes.ids) // 2))


def minority(injector: FaultInjector, workload: Workload) -> list[int]:
    return sorted(injector.chance.sample(injector.nodes.ids, (len(injector.nodes.ids) - 1) // 2))


def majority(injector: FaultInjector, workload: Workload) -> list[int]:
    return injector.pick(len(injector.nodes.ids) // 2 + 1)


def all_nodes(injector: FaultInjector, workload: Workload) -> list[int]:
    return injector.responsive


# -- unavailable nodes, and the network --------------------------------------------------------------------------------


def _down(choose: Choose, how: str, take_down: Callable[[Nodes, int], None]) -> Fault:
    @contextmanager
    def down(injector: FaultInjector, workload: Workload) -> Iterator[None]:
        victims = choose(injector, workload)
        injector.note(f"{how} {_names(victims)}")
        for node_id in victims:
            take_down(injector.nodes, node_id)
        yield
        for node_id in victims:
            injector.bring_back(node_id)

    return down


def killed(choose: Choose) -> Fault:
    return _down(choose, "killed", Nodes.kill)


def paused(choose: Choose) -> Fault:
    return _down(choose, "paused", Nodes.pause)


def cut_off(choose: Choose) -> Fault:
    """Return the fault that isolates the victims, together, from the other nodes; clients reach every node."""

    def isolate(injector: FaultInjector, workload: Workload) -> AbstractContextManager[None]:
        victims = choose(injector, workload)
        injector.note(f"cut off {_names(victims)}")
        return injector.network(_apart(injector, [victims]))

    return isolate


def _apart(injector: FaultInjector, groups: list[list[int]]) -> LinkFaults:
    """Return the network in which no packet passes between different groups; all other nodes are one more group."""
    group_of = {node_id: index for index, group in enumerate(groups) for node_id in group}
    rest = [node_id for node_id in injector.nodes.ids if node_id not in group_of]
    group_of.update(dict.fromkeys(rest, len(groups)))
    return {(a, b): CUT for a in group_of for b in group_of if group_of[a] != group_of[b]}


def partition_primaries(injector: FaultInjector, workload: Workload) -> AbstractContextManager[None]:
    """Isolate up to two leaders, each alone."""
    leaders = injector.leaders(workload)
    victims = injector.chance.sample(leaders, min(len(leaders), 2))
    injector.note(f"cut off leaders {_names(victims)}")
    return injector.network(_apart(injector, [[victim] for victim in victims]))


def partition_ring(injector: FaultInjector, workload: Workload) -> AbstractContextManager[None]:
    """Each node sees a different majority: its neighbours in a ring."""
    ring = injector.chance.sample(injector.nodes.ids, len(injector.nodes.ids))
    reach = (len(ring) // 2 + 1) // 2
    cut = {
        (ring[a], ring[b]): CUT
        for a in range(len(ring))
        for b in range(len(ring))
        if min((a - b) % len(ring), (b - a) % len(ring)) > reach
    }
    injector.note(f"ring {'-'.join(map(str, ring))}")
    return injector.network(cut)


def partition_one_way(injector: FaultInjector, workload: Workload) -> AbstractContextManager[None]:
    """One node can send packets to the other nodes but receives none from them, or the other way round."""
    (victim,) = injector.chance.sample(injector.nodes.ids, 1)
    is_deaf = injector.chance.random() < 0.5
    injector.note(f"{victim} is {'deaf' if is_deaf else 'mute'}")
    others = [node_id for node_id in injector.nodes.ids if node_id != victim]
    return injector.network({((other, victim) if is_deaf else (victim, other)): CUT for other in others})


def slow_packets(injector: FaultInjector, workload: Workload) -> AbstractContextManager[None]:
    fault = LinkFault(delay_ms=injector.chance.uniform(10.0, 80.0), jitter_ms=injector.chance.uniform(0.0, 80.0))
    injector.note(f"packets {fault.delay_ms:.0f}-{fault.delay_ms + fault.jitter_ms:.0f} ms late")
    return injector.network(injector.everywhere(fault))


def lost_packets(injector: FaultInjector, workload: Workload) -> AbstractContextManager[None]:
    fault = LinkFault(loss=injector.chance.uniform(0.02, 0.12))
    injector.note(f"{fault.loss * 100:.0f} % of packets lost")
    return injector.network(injector.everywhere(fault))


# -- disks -------------------------------------------------------------------------------------------------------------


@contextmanager
def slow_disk(injector: FaultInjector, workload: Workload) -> Iterator[None]:
    victims = injector.chance.sample(injector.nodes.ids, injector.chance.randint(1, 2))
    delay_ms = injector.chance.randint(50, 400)
    injector.note(f"disk of {_names(victims)}: {delay_ms} ms for each sync and read")
    for victim in victims:
        injector.nodes.slow_syncs(victim, delay_ms)
        injector.nodes.slow_reads(victim, delay_ms)
    yield
    for victim in victims:
        injector.nodes.cure(victim)


@contextmanager
def full_disk(injector: FaultInjector, workload: Workload) -> Iterator[None]:
    """Fill the disk that holds a node's logs, metadata and log file. A node that cannot continue safely may stop."""
    (victim,) = injector.chance.sample(injector.small_disks, 1)
    injector.may_end_by_itself.add(victim)
    ballast = injector.nodes.data_folder(victim) / "ballast"
    leave_bytes = injector.chance.choice((0, injector.chance.randrange(FREE_BYTES_MAX)))
    injector.note(f"disk of {victim} full but for {leave_bytes // 1024} KB")
    with contextlib.suppress(OSError):  # another process took the remaining space first
        fill_disk(ballast, leave_bytes)
    yield
    ballast.unlink()


def sick_disk(kind: str, what: str, sicken: Callable[[Nodes, int], None]) -> Fault:
    """Return the fault that makes the disk of the controller or of a leader sick; the other nodes continue."""

    @contextmanager
    def sick(injector: FaultInjector, workload: Workload) -> Iterator[None]:
        nodes = injector.controller() if injector.chance.random() < 0.5 else injector.leaders(workload)
        if not nodes:
            injector.note(f"no node is left whose disk {what}")
            yield
            return
        victim = injector.chance.choice(nodes)
        injector.may_end_by_itself.add(victim)
        injector.note(f"disk of {victim} {what}")
        try:
            leaders = {index: state.leader for index, state in injector.nodes.partitions(workload.topic).items()}
        except AssertionError:
            leaders = {}
        began_s = workload.recorder.now_s()
        sicken(injector.nodes, victim)
        if not injector.is_mixed:
            _measure_progress(injector, workload, victim, leaders, kind, began_s)
        yield
        injector.nodes.cure(victim)

    return sick


def _measure_progress(
    injector: FaultInjector, workload: Workload, victim: int, leaders: dict[int, int], kind: str, began_s: float
) -> None:
    """Wait for progress on every partition, and record how long each waited for its next acknowledgement."""
    injector.hold()
    workload.proceed(1, CONTINUES_S_MAX)
    for what, goal_s, partitions in (
        ("its own partitions", OWN_S_MAX, [index for index, leader in leaders.items() if leader == victim]),
        ("partitions led elsewhere", ELSEWHERE_S_MAX, [index for index, leader in leaders.items() if leader != victim]),
    ):
        if partitions:
            gap_s = workload.longest_gap_ms(began_s, partitions) / 1000
            injector.measured.append((f"{kind}: longest time without an acknowledgement, {what}", gap_s, goal_s))


# -- many clients, and operations --------------------------------------------------------------------------------------


@contextmanager
def connection_storm(injector: FaultInjector, workload: Workload) -> Iterator[None]:
    """Connect 2,000 clients at once, spread over the nodes; each sends ApiVersions and then Metadata."""
    injector.note(f"{STORM_CLIENTS} clients at once")
    with Storm([node.kafka for node in injector.nodes], STORM_CLIENTS, workload.topic) as storm:
        if not injector.is_mixed:
            assert storm.served == STORM_CLIENTS, f"{storm.served} of {STORM_CLIENTS} were served: {storm.failures}"
        yield


@contextmanager
def leadership_transfer(injector: FaultInjector, workload: Workload) -> Iterator[None]:
    """Give partitions another preferred leader and elect it; repeat this `TRANSFERS` times."""
    injector.note(f"{TRANSFERS} transfers")
    for _ in range(TRANSFERS):
        try:
            _transfer(injector, workload)
        except (KafkaError, ClientError, CliError, LocalClusterError, AssertionError, OSError):
            if not injector.is_mixed:
                raise
            injector.note("not now")
    yield


def _transfer(injector: FaultInjector, workload: Workload) -> None:
    now = injector.nodes.partitions(workload.topic)
    leaders = {index: state.replicas[1] for index, state in now.items() if injector.chance.random() < 0.7}
    injector.nodes.elect(workload.topic, leaders)


def _one_by_one(end: Callable[[Nodes, int], None]) -> Fault:
    """Return the operation that restarts each node; while it is down, the other nodes continue."""

    @contextmanager
    def restart_all(injector: FaultInjector, workload: Workload) -> Iterator[None]:
        nodes = injector.nodes
        order = injector.chance.sample(nodes.ids, len(nodes.ids))
        injector.note(f"restarts {_names(order)}")
        for node_id in order:
            end(nodes, node_id)
            workload.proceed(injector.progress)
            nodes.start(node_id)
            nodes.wait_in_sync()
        yield

    return restart_all


rolling_restart, rolling_kill = _one_by_one(Nodes.stop), _one_by_one(Nodes.kill)


@contextmanager
def membership_change(injector: FaultInjector, workload: Workload) -> Iterator[None]:
    """Add a node, which takes its share of the data; then move the data off another node and remove that one."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        add_node(injector.nodes)
    newest = injector.nodes.ids[-1]
    yield
    injector.nodes.wait_in_sync()
    removed = injector.chance.choice([node_id for node_id in injector.nodes.ids if node_id not in injector.small_disks])
    injector.note(f"node {newest} came, {removed} left")
    with contextlib.redirect_stdout(output):
        remove_node(injector.nodes, removed)


# -- certificates and passwords ----------------------------------------------------------------------------------------


@contextmanager
def rotate_certificates(injector: FaultInjector, workload: Workload) -> Iterator[None]:
    """Give all nodes certificates of another authority while they run; afterwards they refuse the old authority.

    A node that is restarted then has to connect to all others with the new certificates only.
    """
    nodes, security = injector.nodes, injector.security
    previous = security.trust_next()
    _eventually_on_all(nodes, lambda node: security.accepts(node, previous + 1), "trust the new authority")
    for node_id in injector.chance.sample(nodes.ids, len(nodes.ids)):
        security.issue(node_id, nodes.host_of(node_id))
    _eventually_on_all(nodes, security.presents_newest, "present their new certificates")
    security.distrust_previous()
    _eventually_on_all(nodes, lambda node: not security.accepts(node, previous), "refuse the old authority")
    (restarted,) = injector.chance.sample(nodes.ids, 1)
    injector.note(f"authority {previous + 1} for {previous}, restarted {restarted}")
    nodes.stop(restarted)
    workload.proceed(injector.progress)
    nodes.start(restarted)
    yield


@contextmanager
def change_credentials(injector: FaultInjector, workload: Workload) -> Iterator[None]:
    """Change the passwords of all clients: the new ones are accepted, the old ones refused.

    A connection that authenticated with an old password ends when it has to authenticate again.
    """
    nodes, security = injector.nodes, injector.security
    clients_first = injector.chance.random() < 0.5
    injector.note(f"passwords of {', '.join(CLIENTS)}, first told to the {'clients' if clients_first else 'cluster'}")
    node = nodes.node(injector.chance.choice(nodes.ids))
    name = injector.chance.choice(CLIENTS)
    ends = f"node {node.id} ends the session of {name}"
    with security.log_in(node, name) as stale:
        before = len(security.revoked)
        security.change_passwords(nodes, clients_first=clients_first)
        revoked = security.revoked[before:]
        tries = [(each, user, password) for each in nodes for user, password in revoked]
        with ThreadPoolExecutor(len(tries)) as pool:  # the answer to a wrong password is seconds late
            answers = list(pool.map(_is_accepted(security), tries))
        accepted = [(each.id, user) for (each, user, _), is_in in zip(tries, answers, strict=True) if is_in]
        assert not accepted, f"revoked passwords are accepted: {accepted}"
        eventually(lambda: _has_ended(stale), 2 * REAUTHENTICATE_MS / 1000, ends)
    workload.proceed(injector.progress)
    yield


def _is_accepted(security: ClusterSecurity) -> Callable[[tuple[LocalNode, str, str]], bool]:
    def is_accepted(attempt: tuple[LocalNode, str, str]) -> bool:
        try:
            return security.is_accepted(*attempt)
        except (OSError, ConnectionEnded):  # slow or lost packets
            return False

    return is_accepted


def _has_ended(client: WireClient) -> bool:
    """Return whether a session has ended: the node closes the connection at its next request."""
    try:
        client.metadata()
    except (OSError, ConnectionEnded):
        return True
    return False


def _eventually_on_all(nodes: Nodes, condition: Callable[[LocalNode], bool], what: str) -> None:
    def is_met() -> bool:
        try:
            return all(map(condition, nodes))
        except OSError as error:
            raise AssertionError(repr(error)) from None

    eventually(is_met, RELOAD_TIMEOUT_S, f"all nodes {what}")


def _names(ids: list[int]) -> str:
    return ",".join(map(str, ids))


HARD: dict[str, Fault] = {
    "kill-leader": killed(leader),
    "kill-controller": killed(controller),
    "kill-majority": killed(majority),
    "kill-all": killed(all_nodes),
    "pause-leader": paused(leader),
    "pause-some": paused(some_nodes),
    "partition-one": cut_off(any_node),
    "partition-primaries": partition_primaries,
    "partition-minority": cut_off(minority),
    "partition-ring": partition_ring,
    "partition-one-way": partition_one_way,
    "full-disk": full_disk,
    "failing-disk": sick_disk("failing-disk", "fails", Nodes.refuse),
    "hanging-disk": sick_disk("hanging-disk", "hangs", Nodes.hang),
}
SOFT: dict[str, Fault] = {
    "slow-packets": slow_packets,
    "lost-packets": lost_packets,
    "slow-disk": slow_disk,
    "connection-storm": connection_storm,
    "leadership-transfer": leadership_transfer,
}
FILE_DAMAGE: dict[str, Fault] = {
    "bit-flip": flipped_bit,
    "truncated-file": truncated_file,
    "lost-log": lost_log,
    "damaged-log": damaged_log,
    "short-log": short_log,
    "stale-folder": stale_folder,
}
ALONE: dict[str, Fault] = {
    "rolling-restart": rolling_restart,
    "membership-change": membership_change,
    "rotate-certificates": rotate_certificates,
    "change-credentials": change_credentials,
    **FILE_DAMAGE,
}
CAMPAIGN: dict[str, Fault] = {**HARD, **SOFT, **ALONE}
NEEDS_NAMESPACES = frozenset(["partition-one-way", "slow-packets", "lost-packets", "full-disk", "membership-change"])
"""Faults that are impossible on loopback: proxies forward streams, not packets, and the nodes share a disk."""


def possible(injector: FaultInjector) -> dict[str, Fault]:
    has_namespaces = injector.namespaces is not None
    return {name: fault for name, fault in CAMPAIGN.items() if has_namespaces or name not in NEEDS_NAMESPACES}


# -- one fault on three nodes ------------------------------------------------------------------------------------------

SINGLE: dict[str, Fault] = {
    "kill-leader": killed(leader),
    "kill-controller": killed(controller),
    "kill-follower": killed(follower),
    "rolling-kill": rolling_kill,
    "kill-all": killed(all_nodes),
    "pause-leader": paused(leader),
    "cut-off-leader": cut_off(leader),
    "cut-off-controller": cut_off(controller),
    "cut-off-follower": cut_off(follower),
    "rolling-restart": rolling_restart,
}
NEEDS_LINKS = frozenset(name for name in SINGLE if name.startswith("cut-off"))
LASTS = NEEDS_LINKS | {"pause-leader"}


def inject(name: str, nodes: Nodes, workload: Workload, chance: random.Random, seconds: float) -> None:
    """Inject one fault; pauses and cuts last this long. Meanwhile the other nodes continue, unless all are killed."""
    injector = FaultInjector(nodes, chance)
    injector.hold_s = (seconds, seconds)
    injector.progress = PROGRESS
    began_s = time.monotonic()
    with SINGLE[name](injector, workload):
        if name != "kill-all":
            workload.proceed(PROGRESS)
        if name in LASTS:
            injector.hold(since_s=began_s)
    nodes.wait_until_ready()
