"""Every event in every state of a transactional id: the error, the next state, the epoch and the markers.

An outcome is the error of the response (`ok` for none, `-` for an event without a response), then `>` and the next
state if something changed. `+1` means that the epoch rises, `*` that markers are to be written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from tests.transactions.driver import ID, PARTITIONS, TIMEOUT_MS, Driver

from chronik.groups.records import group_partition
from chronik.transactions.coordinator import ProducerIdAndEpoch, TransactionSettings
from chronik.transactions.records import write_key, write_value
from chronik.transactions.transaction import EPOCH_MAX, TransactionMetadata, TransactionState
from chronik.wire.errors import ErrorCode

ORDERS = ("orders", 0)
AUDIT = ("audit", 3)
EXPIRATION_MS = 7 * 24 * 3_600_000


class Scene(NamedTuple):
    """A coordinator, and what the client knows: its producer, and the one before the last epoch that it got."""

    driver: Driver
    producer: ProducerIdAndEpoch
    earlier: ProducerIdAndEpoch


def unknown() -> Scene:
    driver = Driver(TransactionSettings(id_expiration_ms=EXPIRATION_MS))
    return Scene(driver, ProducerIdAndEpoch(5, 5), ProducerIdAndEpoch(5, 4))


def empty() -> Scene:
    driver = unknown().driver
    first = driver.producer(driver.init())
    return Scene(driver, driver.producer(driver.init(first)), first)


def ongoing(scene: Scene | None = None) -> Scene:
    scene = scene or empty()
    scene.driver.add(scene.producer, ORDERS)
    return scene


def adding() -> Scene:
    """An open transaction whose next record is being appended."""
    scene = ongoing()
    scene.driver.holds_appends = True
    scene.driver.add(scene.producer, AUDIT)
    return scene


def prepared(*, commit: bool, version: int, scene: Scene | None = None) -> Scene:
    driver, producer, earlier = ongoing(scene)
    ended = driver.producer(driver.end(producer, commit=commit, version=version))
    return Scene(driver, ended, producer if version == 2 else earlier)


def complete(*, commit: bool, version: int, scene: Scene | None = None) -> Scene:
    scene = prepared(commit=commit, version=version, scene=scene)
    scene.driver.write_markers()
    return scene


def fenced(scene: Scene | None = None) -> Scene:
    """A timeout has aborted the producer's transaction."""
    scene = ongoing(scene)
    scene.driver.tick(TIMEOUT_MS)
    scene.driver.write_markers()
    return scene


def last_epoch() -> Scene:
    """A producer with the highest epoch that a producer gets."""
    producer = ProducerIdAndEpoch(7, EPOCH_MAX - 1)
    metadata = TransactionMetadata(*producer, TIMEOUT_MS, TransactionState.EMPTY, 1_700_000_000_000)
    log: dict[int, list[tuple[bytes, bytes]]] = {each: [] for each in range(PARTITIONS)}
    log[group_partition(ID, PARTITIONS)].append((write_key(ID), write_value(metadata)))
    driver = Driver(TransactionSettings(id_expiration_ms=EXPIRATION_MS), log)
    return Scene(driver, producer, producer._replace(producer_epoch=producer.producer_epoch - 1))


STATES: dict[str, Callable[[], Scene]] = {
    "unknown": unknown,
    "Empty": empty,
    "Ongoing": ongoing,
    "adding": adding,
    "PrepareCommit1": lambda: prepared(commit=True, version=0),
    "PrepareAbort1": lambda: prepared(commit=False, version=0),
    "CompleteCommit1": lambda: complete(commit=True, version=0),
    "CompleteAbort1": lambda: complete(commit=False, version=0),
    "PrepareCommit2": lambda: prepared(commit=True, version=2),
    "PrepareAbort2": lambda: prepared(commit=False, version=2),
    "CompleteCommit2": lambda: complete(commit=True, version=2),
    "CompleteAbort2": lambda: complete(commit=False, version=2),
    "fenced": fenced,
    "last-epoch": last_epoch,
    "last-open": lambda: ongoing(last_epoch()),
    "last-Prepare": lambda: prepared(commit=True, version=2, scene=last_epoch()),
    "last-Complete": lambda: complete(commit=True, version=2, scene=last_epoch()),
    "last-fenced": lambda: fenced(last_epoch()),
}
"""`1` and `2` are the transaction version of the client that ended the transaction."""


def other(producer: ProducerIdAndEpoch) -> ProducerIdAndEpoch:
    return producer._replace(producer_id=producer.producer_id + 5_000)


def highest(producer: ProducerIdAndEpoch) -> ProducerIdAndEpoch:
    return producer._replace(producer_epoch=EPOCH_MAX)


def verify(scene: Scene) -> ErrorCode:
    error, verified = scene.driver.coordinator.verify_partitions(ID, scene.producer, [ORDERS])
    return error if error is not ErrorCode.none or verified[ORDERS] else ErrorCode.transaction_abortable


def time_out(scene: Scene) -> None:
    scene.driver.tick(TIMEOUT_MS)


def expire(scene: Scene) -> None:
    scene.driver.now_ms += EXPIRATION_MS + 1
    scene.driver.expire()


def write_markers(scene: Scene) -> None:
    scene.driver.write_markers()


EVENTS: dict[str, Callable[[Scene], int | ErrorCode | None]] = {
    "init": lambda scene: scene.driver.init(),
    "recover": lambda scene: scene.driver.init(scene.producer),
    "recover earlier": lambda scene: scene.driver.init(scene.earlier),
    "recover other": lambda scene: scene.driver.init(other(scene.producer)),
    "add": lambda scene: scene.driver.add(scene.producer, ORDERS, AUDIT),
    "add same": lambda scene: scene.driver.add(scene.producer, ORDERS),
    "add earlier": lambda scene: scene.driver.add(scene.earlier, AUDIT),
    "add other": lambda scene: scene.driver.add(other(scene.producer), AUDIT),
    "add highest": lambda scene: scene.driver.add(highest(scene.earlier), AUDIT),
    "verify": verify,
    "commit 1": lambda scene: scene.driver.end(scene.producer),
    "abort 1": lambda scene: scene.driver.end(scene.producer, commit=False),
    "commit 2": lambda scene: scene.driver.end(scene.producer, version=2),
    "abort 2": lambda scene: scene.driver.end(scene.producer, commit=False, version=2),
    "commit 2 earlier": lambda scene: scene.driver.end(scene.earlier, version=2),
    "abort 2 earlier": lambda scene: scene.driver.end(scene.earlier, commit=False, version=2),
    "abort 2 highest": lambda scene: scene.driver.end(highest(scene.earlier), commit=False, version=2),
    "commit 2 other": lambda scene: scene.driver.end(other(scene.producer), version=2),
    "timeout": time_out,
    "markers": write_markers,
    "expiry": expire,
}


def outcome(state: str, event: str) -> str:
    scene = STATES[state]()
    driver = scene.driver
    _, before = driver.coordinator.describe(ID)
    marker_count = len(driver.markers)
    result = EVENTS[event](scene)
    if result is not None and not isinstance(result, ErrorCode):
        result = driver.error(result)
    _, after = driver.coordinator.describe(ID)
    text = "-" if result is None else "ok" if result is ErrorCode.none else result.name
    if after == before:
        return text
    if after is None:
        return text + ">unknown"
    text += ">" + after.state.label
    if before is not None and after.producer_id != before.producer_id:
        text += "-new-id"
    elif before is not None and after.producer_epoch != before.producer_epoch:
        text += f"+{after.producer_epoch - before.producer_epoch}"
    return text + "*" * (len(driver.markers) > marker_count)


OUTCOMES: dict[str, dict[str, str]] = {
    "init": {
        "ok>Empty": "unknown",
        "concurrent_transactions>PrepareAbort+1*": "Ongoing last-open",
        "concurrent_transactions": "adding PrepareCommit1 PrepareAbort1 PrepareCommit2 PrepareAbort2 last-Prepare",
        "ok>Empty-new-id": "last-epoch last-fenced",
        "ok>Empty+1": "*",
    },
    "recover": {
        "ok>Empty": "unknown",
        "ok>Empty+1": "Empty CompleteCommit1 CompleteAbort1 CompleteCommit2 CompleteAbort2 last-Complete",
        "concurrent_transactions>PrepareAbort+1*": "Ongoing last-open",
        "concurrent_transactions": "adding PrepareCommit1 PrepareAbort1 PrepareCommit2 PrepareAbort2 last-Prepare",
        "producer_fenced": "fenced last-fenced",
        "ok>Empty-new-id": "last-epoch",
    },
    "recover earlier": {
        "ok>Empty": "unknown CompleteCommit2 CompleteAbort2 last-Complete",
        "ok": "Empty",
        "concurrent_transactions>PrepareAbort+1*": "Ongoing",
        "concurrent_transactions": "adding PrepareCommit1 PrepareAbort1 PrepareCommit2 PrepareAbort2 last-Prepare",
        "producer_fenced": "CompleteCommit1 CompleteAbort1 fenced last-epoch last-open last-fenced",
    },
    "recover other": {
        "ok>Empty": "unknown",
        "concurrent_transactions": "adding PrepareCommit1 PrepareAbort1 PrepareCommit2 PrepareAbort2 last-Prepare",
        "producer_fenced": "*",
    },
    "add": {
        "invalid_producer_id_mapping": "unknown",
        "concurrent_transactions": "adding PrepareCommit1 PrepareAbort1 PrepareCommit2 PrepareAbort2 last-Prepare",
        "producer_fenced": "fenced last-fenced",
        "ok>Ongoing": "*",
    },
    "add same": {
        "invalid_producer_id_mapping": "unknown",
        "ok": "Ongoing last-open",
        "concurrent_transactions": "adding PrepareCommit1 PrepareAbort1 PrepareCommit2 PrepareAbort2 last-Prepare",
        "producer_fenced": "fenced last-fenced",
        "ok>Ongoing": "*",
    },
    "add earlier": {
        "invalid_producer_id_mapping": "unknown last-Complete",
        "producer_fenced": "*",
    },
    "add other": {
        "invalid_producer_id_mapping": "*",
    },
    "add highest": {
        "invalid_producer_id_mapping": "unknown last-Complete",
        "producer_fenced": "*",
    },
    "verify": {
        "invalid_producer_id_mapping": "unknown",
        "ok": "Ongoing adding last-open",
        "concurrent_transactions": "PrepareCommit1 PrepareAbort1 PrepareCommit2 PrepareAbort2 last-Prepare",
        "producer_fenced": "fenced last-fenced",
        "transaction_abortable": "*",
    },
    "commit 1": {
        "invalid_producer_id_mapping": "unknown",
        "invalid_txn_state": "Empty PrepareAbort1 CompleteAbort1 PrepareAbort2 CompleteAbort2 last-epoch",
        "ok>PrepareCommit*": "Ongoing last-open",
        "concurrent_transactions": "adding PrepareCommit1 PrepareCommit2 last-Prepare",
        "ok": "CompleteCommit1 CompleteCommit2 last-Complete",
        "producer_fenced": "fenced last-fenced",
    },
    "abort 1": {
        "invalid_producer_id_mapping": "unknown",
        "ok>PrepareAbort*": "Ongoing last-open",
        "concurrent_transactions": "adding PrepareAbort1 PrepareAbort2 last-Prepare",
        "ok": "CompleteAbort1 CompleteAbort2",
        "producer_fenced": "fenced last-fenced",
        "invalid_txn_state": "*",
    },
    "commit 2": {
        "invalid_producer_id_mapping": "unknown",
        "ok>PrepareCommit+1*": "Ongoing last-open",
        "concurrent_transactions": "adding PrepareCommit1 PrepareAbort1 PrepareCommit2 PrepareAbort2 last-Prepare",
        "producer_fenced": "fenced last-fenced",
        "invalid_txn_state": "*",
    },
    "abort 2": {
        "invalid_producer_id_mapping": "unknown",
        "ok>CompleteAbort+1": "Empty CompleteCommit1 CompleteAbort1 CompleteCommit2 CompleteAbort2 last-Complete",
        "ok>PrepareAbort+1*": "Ongoing last-open",
        "concurrent_transactions": "adding PrepareCommit1 PrepareAbort1 PrepareCommit2 PrepareAbort2 last-Prepare",
        "producer_fenced": "fenced last-fenced",
        "ok>CompleteAbort-new-id": "last-epoch",
    },
    "commit 2 earlier": {
        "invalid_producer_id_mapping": "unknown",
        "concurrent_transactions": "PrepareCommit2 last-Prepare",
        "invalid_txn_state": "PrepareAbort2 CompleteAbort2",
        "ok": "CompleteCommit2 last-Complete",
        "producer_fenced": "*",
    },
    "abort 2 earlier": {
        "invalid_producer_id_mapping": "unknown",
        "invalid_txn_state": "PrepareCommit2 CompleteCommit2 last-Prepare last-Complete",
        "concurrent_transactions": "PrepareAbort2",
        "ok": "CompleteAbort2",
        "producer_fenced": "*",
    },
    "abort 2 highest": {
        "invalid_producer_id_mapping": "unknown last-Complete",
        "producer_fenced": "*",
    },
    "commit 2 other": {
        "invalid_producer_id_mapping": "*",
    },
    "timeout": {
        "->PrepareAbort+1*": "Ongoing last-open",
        "-": "*",
    },
    "markers": {
        "->CompleteCommit": "PrepareCommit1 PrepareCommit2",
        "->CompleteAbort": "PrepareAbort1 PrepareAbort2",
        "->CompleteCommit-new-id": "last-Prepare",
        "-": "*",
    },
    "expiry": {
        "-": "unknown Ongoing adding PrepareCommit1 PrepareAbort1 PrepareCommit2 PrepareAbort2 last-open last-Prepare",
        "->unknown": "*",
    },
}
"""By event: the states of each outcome; `*` stands for all other states."""


@pytest.mark.parametrize("event", EVENTS)
def test_each_event_has_its_outcome_in_each_state(event: str) -> None:
    outcomes: dict[str, list[str]] = {}
    for state in STATES:
        outcomes.setdefault(outcome(state, event), []).append(state)
    listed = {state for states in OUTCOMES[event].values() for state in states.split()}
    others = [state for state in STATES if state not in listed]
    expected = {text: others if states == "*" else states.split() for text, states in OUTCOMES[event].items()}
    assert outcomes == expected
