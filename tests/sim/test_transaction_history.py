"""The oracle of transactions reports what clients must never receive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chronik.testing.operations import (
    Assigned,
    Polled,
    SendAcknowledged,
    SendInvoked,
    TransactionEnded,
    TransactionEndInvoked,
)
from chronik.testing.sim.transaction_history import TransactionHistory
from chronik.testing.sim.transactional_session import Takeovers
from chronik.testing.sim.world import World


@pytest.fixture
def world() -> World:
    return World(0)


@pytest.mark.parametrize(
    ("stable", "watermark", "aborted", "symptom"),
    [
        (10, 10, [(1, 3), (2, 5)], None),
        (11, 10, [], "above 10"),
        (6, 10, [], "after 7"),
        (10, 10, [(2, 5), (1, 3)], "out of order"),
    ],
)
def test_wrong_stable_offsets_and_unsorted_lists_are_violations(
    world: World, stable: int, watermark: int, aborted: list[tuple[int, int]], symptom: str | None
) -> None:
    TransactionHistory(world).stable_received("t-0", stable, watermark, aborted, 7, "reader")
    assert world.violation is None if symptom is None else symptom in (world.violation or "")


@pytest.mark.parametrize(("is_commit", "symptom"), [(True, None), (False, "G1a")])
def test_an_aborted_record_that_a_reader_received_is_a_violation(
    world: World, is_commit: bool, symptom: str | None
) -> None:
    history = TransactionHistory(world)
    history.record(SendInvoked(0.1, "p", "p/1#0", "t-0", "p/1"))
    history.record(SendAcknowledged(0.2, "p", "p/1#0", "t-0", 0))
    history.record(TransactionEndInvoked(0.3, "p", "p/1", is_commit))
    history.record(TransactionEnded(0.4, "p", "p/1", "commit" if is_commit else "abort"))
    history.record(Assigned(0.5, "final", {"t-0": 0}, is_read_committed=True))
    history.record(Polled(0.6, 0.5, "final", (("t-0", 0, "p/1#0"),)))
    history.check("final")
    assert world.violation is None if symptom is None else symptom in (world.violation or "")


def test_a_request_that_succeeds_after_its_successor_was_initialized_is_a_violation(world: World) -> None:
    client: Any = SimpleNamespace(world=world)
    old: Any = SimpleNamespace(name="x.1", number=1)
    new: Any = SimpleNamespace(name="x.2", number=2)
    takeovers = Takeovers(client)
    takeovers.initialized(old)
    world.run(1.0)
    takeovers.initialized(new)
    takeovers.succeeded(old, 0.9, "EndTxn")
    takeovers.succeeded(new, 1.5, "EndTxn")
    assert world.violation is None
    takeovers.succeeded(old, 1.1, "EndTxn")
    assert "after x.2 had replaced it" in (world.violation or "")
