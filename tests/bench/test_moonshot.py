"""The faults of the moonshot come from its seed, and no run passes without each kind of them."""

from __future__ import annotations

import random
from typing import Any, cast

from bench.moonshot import NODES, ROUND_OF_FAULTS, Driver, Faults
from chronik.local.temporary_cluster import TemporaryCluster


class Victims:
    """A cluster and a driver without processes."""

    def __init__(self) -> None:
        self.down: set[int] = set()
        self.worst = 0

    def kill(self, node: int | None = None, *, with_jvm: bool = False) -> None:
        if node is not None:
            self.down.add(node)
            self.worst = max(self.worst, len(self.down))

    def launch(self, node: int) -> None:
        self.down.remove(node)

    def workers(self) -> list[int]:
        return []


def faults_of(seed: int, seconds: int, rows_per_s: int) -> tuple[list[dict[str, Any]], Victims]:
    victims = Victims()
    faults = Faults(cast(TemporaryCluster, victims), cast(Driver, victims), random.Random(seed), 10.0)
    faults.begin(0.0)
    for second in range(seconds):
        faults.tick(second, second * rows_per_s)
    faults.end()
    return faults.done, victims


def test_a_seed_repeats_its_faults_and_one_broker_is_down_at_a_time() -> None:
    first, victims = faults_of(1, 600, 10)
    assert first == faults_of(1, 600, 10)[0] != faults_of(2, 600, 10)[0]
    assert (victims.worst, victims.down) == (1, set())
    assert {fault["node"] for fault in first if fault["fault"] == "broker"} == set(range(1, NODES + 1))


def test_what_cannot_be_killed_now_waits_and_does_not_hold_up_the_other_faults() -> None:
    """There are no workers, and nothing lands, so that no driver is killed."""
    kinds = [fault["fault"] for fault in faults_of(3, 600, 0)[0]]
    assert set(kinds) == {"broker"} and len(kinds) > len(ROUND_OF_FAULTS)
