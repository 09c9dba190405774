"""Random runs under faults satisfy every property of the oracle, replay exactly, and find the planted bugs."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from random import SystemRandom

import pytest
from tests.raft import planted
from tests.raft.harness import Cluster
from tests.raft.nemesis import CHANGING, FAULTY, HANDED_OVER, LOSING, RESTLESS, SICK, Plan, flapping_run, random_run
from tests.raft.oracle import Violation

from chronik.raft.store import RaftError

PLANS = {
    "faulty": FAULTY,
    "changing": CHANGING,
    "handed over": HANDED_OVER,
    "losing": LOSING,
    "restless": RESTLESS,
    "sick": SICK,
}
SEEDS = 8
SOAK_SEEDS = 1_000


def run(seed: int, plan: Plan) -> Cluster:
    try:
        return random_run(seed, plan)
    except Exception as error:
        raise AssertionError(f"seed {seed} fails: {error}") from error


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_cluster_keeps_its_guarantees_under_faults_and_recovers(plan: Plan) -> None:
    committed = sum(run(seed, plan).oracle.last_committed for seed in range(SEEDS))
    assert committed > 10 * SEEDS, "a run in which nothing happens shows nothing"


@pytest.mark.soak
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_cluster_keeps_its_guarantees_for_fresh_seeds(plan: Plan) -> None:
    random = SystemRandom()
    for _ in range(SOAK_SEEDS):
        run(random.randrange(2**40), plan)


def test_a_flapping_node_does_not_depose_the_leader() -> None:
    for seed in range(5):
        flapping_run(seed)


# Replays


def fingerprint(seed: int) -> int:
    """Return the result of a run as one number."""
    cluster = random_run(seed, CHANGING)
    logs = [str(cluster.oracle.committed[index]) for index in sorted(cluster.oracle.committed)]
    return zlib.crc32(f"{cluster.now_ms} {cluster.describe()} {logs}".encode())


def test_a_seed_replays_exactly_in_any_process() -> None:
    command = [sys.executable, "-c", "from tests.raft.test_random_runs import fingerprint; print(fingerprint(1))"]
    path = os.pathsep.join(sys.path)
    found = [
        subprocess.run(
            command, env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for hash_seed in ("1", "2")
    ]
    assert found == [str(fingerprint(1))] * 2


# Planted bugs

Bug = Callable[[pytest.MonkeyPatch], planted.Maker]
BUGS: list[tuple[Bug, Plan, int]] = [
    (planted.vote_is_not_durable, FAULTY, 3),
    (planted.messages_go_before_the_write, FAULTY, 3),
    (planted.own_entries_count_before_the_write, FAULTY, 10),
    (planted.entries_of_old_terms_are_committed_by_counting, FAULTY, 10),
    (planted.votes_go_to_shorter_logs, FAULTY, 20),
    (planted.appends_cut_what_is_known, FAULTY, 10),
    (planted.votes_are_given_while_a_leader_is_heard, RESTLESS, 10),
    (planted.restarted_nodes_vote_at_once, RESTLESS, 50),
    (planted.lease_outlives_the_hand_over, HANDED_OVER, 20),
    (planted.lost_disks_go_unnoticed, LOSING, 30),
]
"""Each bug with its plan and the maximum number of seeds to find it: about three times the number needed."""


@pytest.mark.parametrize(("bug", "plan", "seeds"), BUGS, ids=[bug.__name__ for bug, _, _ in BUGS])
def test_random_runs_find_a_planted_bug(bug: Bug, plan: Plan, seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make = bug(monkeypatch)
    with pytest.raises((Violation, RaftError)):
        for seed in range(seeds):
            random_run(seed, plan, make)


def test_a_flapping_node_reveals_a_missing_pre_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    make = planted.there_is_no_pre_vote(monkeypatch)
    with pytest.raises(Violation, match="stability"):
        for seed in range(5):
            flapping_run(seed, make)
