"""The random walks can fail: each planted bug is found within a stated number of seeds."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from tests.metadata.test_controller_walks import BROKERS, ReplicatedWalk, SyncedWalk, Walk

from chronik.metadata import apply, registration
from chronik.metadata.elections import BrokerStates, Draft, Loss, TopicRules
from chronik.metadata.image import NO_LEADER

SEEDS_MAX = 60
STEPS = 150

Arguments = Callable[[Random], tuple[Any, ...]]


def any_broker(random: Random) -> int:
    return random.randint(1, BROKERS)


STEPS_BY_WEIGHT: tuple[tuple[float, str, Arguments], ...] = (
    (6, "append", lambda random: (any_broker(random), random.randint(1, 3))),
    (10, "append_at_the_leader", lambda random: ()),
    (16, "fetch", lambda random: (any_broker(random), random.randint(0, 3), random.randint(1, 2))),
    (14, "follow", lambda random: (any_broker(random), random.choice([1, 1, 2, 100]))),
    (6, "propose_isr", lambda random: (any_broker(random), {any_broker(random)})),
    (1, "hand_over", lambda random: (any_broker(random), any_broker(random))),
    (10, "heartbeat", lambda random: (any_broker(random),)),
    (0.5, "ask_to_stop", lambda random: (any_broker(random),)),
    (3, "kill", lambda random: (any_broker(random), random.random() < 0.5)),
    (2, "copy_folder", lambda random: (any_broker(random),)),
    (1, "lose_files", lambda random: (any_broker(random), random.random() < 0.5)),
    (2, "crash_and_return_without_files", lambda random: (any_broker(random), random.random() < 0.5)),
    (5, "restart", lambda random: (any_broker(random), random.randint(0, 3))),
    (2, "crash_and_return_at_once", lambda random: (any_broker(random), random.randint(0, 3))),
    (6, "register", lambda random: (any_broker(random),)),
    (6, "time_passes", lambda random: (random.choice([0, 50, 100, 300, 700]), random.random() < 0.5)),
    (1, "sessions_end", lambda random: ()),
    (1, "controller_changes", lambda random: (random.randint(0, 1),)),
    (1.5, "all_is_well_for_a_while", lambda random: ()),
    (1, "set_min_insync", lambda random: (random.choice(["1", "2", "3", None]),)),
    (1, "move", lambda random: (tuple(random.sample(range(1, BROKERS + 1), random.randint(1, 3))),)),
    (1, "elect_preferred", lambda random: ()),
)


def walk(kind: type[Walk], seed: int) -> None:
    """Run one walk of steps chosen by the seed; raise AssertionError if a record is lost."""
    random = Random(seed)
    machine = kind()
    weights = [weight for weight, _, _ in STEPS_BY_WEIGHT]
    for _ in range(STEPS):
        _, name, arguments = random.choices(STEPS_BY_WEIGHT, weights)[0]
        getattr(machine, name)(*arguments(random))
        if machine.world.proposals and random.random() < 0.3:
            machine.world.deliver(random.randrange(len(machine.world.proposals)), is_again=random.random() < 0.3)
        machine.world.check()
    machine.teardown()


def is_found() -> bool:
    for seed in range(SEEDS_MAX):
        for kind in (SyncedWalk, ReplicatedWalk):
            try:
                walk(kind, seed)
            except AssertionError:
                return True
    return False


def test_the_random_walks_pass_without_a_planted_bug() -> None:
    for seed in range(10):
        walk(SyncedWalk, seed)
        walk(ReplicatedWalk, seed)


def test_walks_find_the_election_of_a_replica_outside_the_isr(monkeypatch: pytest.MonkeyPatch) -> None:
    def elect(self: Draft, brokers: BrokerStates, rules: TopicRules) -> None:
        if self.leader not in self.isr or self.leader not in brokers.staying:
            self.leader = next((replica for replica in self.replicas if replica in brokers.can_lead), NO_LEADER)
            if self.leader != NO_LEADER and self.leader not in self.isr:
                self.isr = (self.leader,)

    monkeypatch.setattr(Draft, "_elect", elect)
    assert is_found()


def test_walks_find_a_crashed_broker_that_stays_in_the_isr_under_replicated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draft, "lose", lambda self, broker_id, loss: None)
    assert is_found()


def test_walks_find_a_replica_that_stays_in_the_isr_without_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    lose = Draft.lose

    def keep_if_lost(self: Draft, broker_id: int, loss: Loss) -> None:
        if loss is not Loss.CERTAIN:
            lose(self, broker_id, loss)

    monkeypatch.setattr(Draft, "lose", keep_if_lost)
    assert is_found()


def test_walks_find_a_replica_that_stays_in_the_isr_with_an_old_folder_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_loss", lambda known, call: None)
    assert is_found()


def test_walks_find_leaders_that_stay_eligible_while_other_replicas_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Draft, rules: TopicRules) -> None:
        safe = (*self.image.isr, *self.eligible)
        self.eligible = tuple(replica for replica in self.replicas if replica in safe and replica not in self.isr)

    monkeypatch.setattr(Draft, "_keep_eligible", keep)
    assert is_found()


def test_walks_find_leaders_that_stay_eligible_after_the_minimum_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "_without_eligible", lambda topic, events: topic)
    assert is_found()


def test_walks_find_a_restarted_leader_that_continues_in_its_old_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "_bump_epochs", lambda image, broker_id: (image, []))
    monkeypatch.setattr(registration, "_plan_departure", lambda *arguments: None)
    assert is_found()


def test_walks_find_a_reassignment_that_completes_before_its_replicas_are_in_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complete = Draft._complete

    def hurried(self: Draft, brokers: BrokerStates, rules: TopicRules) -> None:
        self.isr += tuple(replica for replica in self.adding if replica not in self.isr)
        complete(self, brokers, rules)

    monkeypatch.setattr(Draft, "_complete", hurried)
    assert is_found()
