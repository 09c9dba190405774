"""One node's disk fails or hangs while records flow: the cluster continues without it until the disk is cured.

No acknowledged record is lost, duplicated or reordered. Partitions that other nodes lead continue, and those of the
sick node fail over. When its disk is cured, the node rejoins by itself.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.run_chronik import chronik
from tests.cluster.conftest import StartNodes
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_offsets import OffsetWatch
from tests.cluster.support_soak import SoakResults
from tests.cluster.support_workload import PROGRESS, Workload, all_replicas_agree
from tests.support.eventually import eventually

PARTITIONS = 3

Sicken = Callable[[Nodes, int], None]
SICKNESSES = [Nodes.refuse, Nodes.hang, Nodes.freeze]


@pytest.fixture
def nodes(start_nodes: StartNodes) -> Nodes:
    return start_nodes(disk_switches=True)


def controller(nodes: Nodes, topic: str) -> int:
    return nodes.controller()


def leader(nodes: Nodes, topic: str) -> int:
    """Return a leader that is not the controller."""
    other = nodes.controller()
    return next(state.leader for state in nodes.partitions(topic).values() if state.leader != other)


def no_partition_waits_for(nodes: Nodes, topic: str, sick: int) -> bool:
    """Check that the healthy nodes agree: the sick node neither leads nor is in sync nor is the controller."""
    for node_id in nodes.ids:
        if node_id == sick:
            continue
        for partition, state in nodes.partitions(topic, node_id).items():
            assert state.leader not in (sick, -1), f"node {node_id}: partition {partition} is led by {state.leader}"
            assert sick not in state.isr, f"node {node_id}: partition {partition} waits for {state.isr}"
        view = nodes.node(node_id).cluster_view()
        assert view is not None and view["controller"] not in (sick, None), f"node {node_id}: {view}"
    return True


def alive(nodes: Nodes, node_id: int) -> list[int]:
    """Return the nodes that this node considers alive."""
    view = nodes.node(node_id).cluster_view()
    return [] if view is None else [known["id"] for known in view["nodes"] if known["state"] == "alive"]


IN_MAKE_TEST = [(Nodes.hang, controller), (Nodes.refuse, leader)]
"""Each role; `make soak-counts` runs all pairs."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sicken", "chosen"),
    [
        pytest.param(
            sicken,
            chosen,
            marks=[] if (sicken, chosen) in IN_MAKE_TEST else pytest.mark.soak,
            id=f"{chosen.__name__}-{sicken.__name__}",
        )
        for chosen in (controller, leader)
        for sicken in SICKNESSES
    ],
)
def test_the_cluster_keeps_working_while_a_disk_is_faulty(
    sicken: Sicken, chosen: Callable[[Nodes, str], int], nodes: Nodes, tmp_path: Path
) -> None:
    topic = nodes.new_topic(PARTITIONS)
    with OffsetWatch(nodes, topic, range(PARTITIONS)), Workload(nodes, topic, PARTITIONS) as workload:
        workload.proceed(PROGRESS)
        sick = chosen(nodes, topic)
        sicken(nodes, sick)
        eventually(lambda: no_partition_waits_for(nodes, topic, sick), 30, "the others do without it")
        workload.proceed(PROGRESS)
        nodes.cure(sick)
        nodes.wait_in_sync()
        workload.proceed(PROGRESS)
        workload.finish(tmp_path / "history.jsonl")
    all_replicas_agree(nodes, workload.recorder.acknowledged())
    nodes.no_surprises()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "sicken",
    [
        Nodes.hang,
        pytest.param(Nodes.refuse, marks=pytest.mark.soak),
        pytest.param(Nodes.freeze, marks=pytest.mark.soak),
    ],
    ids=lambda sicken: str(sicken.__name__),
)
def test_a_leader_does_not_wait_for_a_follower_with_a_faulty_disk(sicken: Sicken, nodes: Nodes, tmp_path: Path) -> None:
    topic = nodes.new_topic(1)
    with OffsetWatch(nodes, topic, range(1)), Workload(nodes, topic, 1) as workload:
        workload.proceed(PROGRESS)
        before = nodes.partitions(topic)[0]
        sick = nodes.follower(topic)
        assert sick != before.leader
        sicken(nodes, sick)
        eventually(lambda: sick not in nodes.partitions(topic, before.leader)[0].isr, 30, "it leaves the ISR")
        workload.proceed(2 * PROGRESS)
        now = nodes.partitions(topic, before.leader)[0]
        assert (now.leader, now.epoch) == (before.leader, before.epoch), "the leader does not change"
        eventually(lambda: sick not in alive(nodes, before.leader), 30, "it is fenced")
        nodes.cure(sick)
        nodes.wait_in_sync()
        workload.finish(tmp_path / "history.jsonl")
    all_replicas_agree(nodes, workload.recorder.acknowledged())
    nodes.no_surprises()


@pytest.mark.timeout(300)
def test_a_node_with_a_hanging_disk_exits_on_sigterm_and_recovers_at_restart(nodes: Nodes, tmp_path: Path) -> None:
    topic = nodes.new_topic(PARTITIONS)
    with Workload(nodes, topic, PARTITIONS) as workload:
        workload.proceed(PROGRESS)
        sick = leader(nodes, topic)
        nodes.hang(sick)
        workload.proceed(PROGRESS)
        process = nodes.node(sick).process
        process.send(signal.SIGTERM)
        eventually(lambda: process.state is None, 40, "the process ends although its threads hang")
        workload.proceed(PROGRESS)
        nodes.cure(sick)
        nodes.start(sick)
        nodes.wait_in_sync()
        workload.finish(tmp_path / "history.jsonl")
    all_replicas_agree(nodes, workload.recorder.acknowledged())
    nodes.no_surprises()


@pytest.mark.timeout(300)
def test_cluster_status_shows_a_node_whose_disk_does_not_complete_writes(nodes: Nodes) -> None:
    topic = nodes.new_topic(1)
    sick = nodes.follower(topic)
    folder = nodes.node(sick).folder

    def shows(state: str, *texts: str) -> bool:
        listed = chronik("cluster", "status", "--json", "--dir", nodes.folder).json()["nodes"]
        shown = chronik("cluster", "status", "--dir", nodes.folder).out
        assert listed[sick - 1]["state"] == state, shown
        assert all(text in shown for text in texts), shown
        return True

    with Workload(nodes, topic, 1) as workload:
        workload.proceed(PROGRESS)
        nodes.hang(sick)
        no_answer = f"node {sick} runs, but its disk does not complete writes (the disk does not answer)"
        eventually(lambda: shows("disk_error", no_answer, folder), 30, "its disk hangs")
        nodes.cure(sick)
        eventually(lambda: shows("running"), 30, "it is cured")
        no_answer = f"node {sick} runs, but does not answer: check the disk of {folder}"

        def shows_that_its_loop_hangs() -> bool:
            nodes.wait_in_sync()
            nodes.freeze(sick)
            try:
                return eventually(lambda: shows("unresponsive", no_answer, f"chronik cluster kill {sick}"), 15)
            except AssertionError:
                nodes.cure(sick)
                raise

        # A sync in a thread may hang first. The follower appends nothing meanwhile, so that its loop does not hang.
        eventually(shows_that_its_loop_hangs, 90, "its loop hangs")
        nodes.cure(sick)
        nodes.wait_in_sync()
        eventually(lambda: shows("running"), 30, "it is cured again")


SICK_S = 12.0
ELSEWHERE_MS_MAX = 3_000.0
OWN_MS_MAX = 10_000.0


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sicken", SICKNESSES, ids=lambda sicken: str(sicken.__name__))
@pytest.mark.parametrize("chosen", [controller, leader], ids=lambda chosen: str(chosen.__name__))
def test_soak_measures_the_time_without_acknowledgements_while_a_disk_is_faulty(
    sicken: Sicken, chosen: Callable[[Nodes, str], int], nodes: Nodes, results: SoakResults, tmp_path: Path
) -> None:
    topic = nodes.new_topic(2 * PARTITIONS)
    with Workload(nodes, topic, 2 * PARTITIONS) as workload:
        workload.proceed(PROGRESS)
        nodes.wait_in_sync()
        sick = chosen(nodes, topic)
        leaders = {partition: state.leader for partition, state in nodes.partitions(topic).items()}
        from_s = workload.recorder.now_s()
        sicken(nodes, sick)
        time.sleep(SICK_S)  # let the fault last; there is no condition to wait for
        nodes.cure(sick)
        workload.proceed(PROGRESS)
        nodes.wait_in_sync()
        results.history(workload.finish(tmp_path / "history.jsonl"))
    fault = f"{sicken.__name__} {chosen.__name__}'s disk"
    results.fault(fault)
    results.unavailable(fault, workload.longest_gap_ms(from_s))
    for where, ms_max in (("elsewhere", ELSEWHERE_MS_MAX), ("its own", OWN_MS_MAX)):
        partitions = [each for each, leader in leaders.items() if (leader == sick) == (where == "its own")]
        gap_ms = workload.longest_gap_ms(from_s, partitions)
        results.measure(f"{fault}, longest without an acknowledgement, {where}", gap_ms, "ms", ms_max)
