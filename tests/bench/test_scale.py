"""The metadata of large clusters, in small: elections and replay take time, and costs grow with the partitions."""

from __future__ import annotations

import time

import pytest

from bench import quorum, scale
from bench.quorum import NotReached, Quorum, play_failover
from chronik.metadata.commands import Command
from chronik.metadata.controller import Controller, ControllerSettings
from chronik.metadata.image import encode_image
from chronik.node.membership.cluster_member import ELECTION_TIMEOUT_MS

NODES = 12
VOTERS = range(scale.VOTERS)
GROWTH = 16
TOLERANCE = 2.5
"""Linear costs grow by GROWTH, quadratic ones by its square: the limit is in between, because of noise."""


def created(topics: int) -> scale.PlayedCluster:
    cluster = scale.PlayedCluster()
    cluster.start(NODES)
    cluster.create_topics(topics, 10)
    return cluster


def test_a_failover_takes_an_election_and_a_dead_node_its_session() -> None:
    figures = play_failover(created(20).log, VOTERS, seed=1)
    assert ELECTION_TIMEOUT_MS <= figures["controller_failover_virtual_ms"] <= 5_000
    assert figures["controllers_lost"] == 0
    session_ms = ControllerSettings().session_timeout_ms
    assert figures["leaderships_of_controller"] > 0
    assert session_ms <= figures["controller_node_dead_virtual_ms"] <= 2 * session_ms + ELECTION_TIMEOUT_MS


def test_a_voter_replays_its_snapshot_and_the_commands_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quorum, "SNAPSHOT_COMMANDS", 10)
    cluster = created(20)
    played = Quorum(cluster.log, VOTERS, seed=1)
    for voter in played.voters.values():
        assert voter.snapshot.index > 10
        assert voter.entries
        assert encode_image(voter.image) == encode_image(cluster.image)


def test_a_controller_that_decides_for_longer_than_an_election_timeout_loses_its_office(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decisions = iter([2 * ELECTION_TIMEOUT_MS / 1000])

    def decide(self: Controller, now_ms: int) -> list[Command]:
        ends_s = time.process_time() + next(decisions, 0.0)
        while time.process_time() < ends_s:
            pass
        return due(self, now_ms)

    due = Controller.due
    monkeypatch.setattr(Controller, "due", decide)
    _, decided_ms, lost = Quorum(created(1).log, VOTERS, seed=1).wait_for_controller()
    assert lost == 1
    assert decided_ms > 2 * ELECTION_TIMEOUT_MS


def test_without_a_majority_there_is_no_failover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quorum, "LIMIT_MS", 10_000)
    played = Quorum(created(1).log, VOTERS, seed=1)
    first, _, _ = played.wait_for_controller()
    others = [voter for voter in played.voters.values() if voter is not first]
    for voter in (first, *others[:2]):
        played.kill(voter)
    with pytest.raises(NotReached):
        played.wait_for_controller()


@pytest.mark.soak
def test_costs_grow_linearly_with_the_partitions() -> None:
    """Not in `make test`: other processes on the machine change the CPU time."""
    small, large = (scale.measure(size, 100, NODES) for size in (1_000, GROWTH * 1_000))
    grown = {name: large[name] / small[name] for name in small if small[name] >= 1}
    assert {"create_all_cpu_ms", "controller_failover_cpu_ms", "metadata_of_all_cpu_ms"} <= grown.keys()
    assert {name: factor for name, factor in grown.items() if factor > GROWTH * TOLERANCE} == {}


@pytest.mark.soak
def test_a_change_of_an_isr_costs_the_same_with_more_topics() -> None:
    small, large = (scale.measure(10 * topics, 10, NODES)["isr_change_cpu_ms"] for topics in (500, GROWTH * 500))
    assert large <= TOLERANCE * small
