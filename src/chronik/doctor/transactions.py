"""Detect read_committed consumers that wait for an open transaction: the last stable offset stalls at its first record.

Usually the transaction's producer has stopped, and the coordinator aborts the transaction when its timeout passes. A
hanging transaction has no coordinator that will end it.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

from chronik.client.transactions import OpenTransaction, TransactionDescription
from chronik.doctor.diagnosis import Evidence, Finding, listed
from chronik.doctor.observations import BlockingTransaction, Observations, PartitionSample, lasting_s

HELD_BACK_S = 3.0
LONG_OPEN_S = 10.0
"""Shorter transactions are normal: stream processors commit every few seconds."""
ONGOING = "Ongoing"

Held = Mapping[int, PartitionSample]
"""By partition: the last sample of those whose last stable offset stalls."""


def held_back(seen: Observations) -> Held:
    """Return the partitions whose last stable offset has not advanced for a while, with records beyond it."""
    held: dict[int, PartitionSample] = {}
    for partition, samples in sorted(seen.partitions.items()):
        since_s = lasting_s(samples, partial(_is_held_at, samples[-1].last_stable_offset))
        if since_s is not None and since_s >= HELD_BACK_S:
            held[partition] = samples[-1]
    return held


def _is_held_at(stable: int | None, sample: PartitionSample) -> bool:
    watermark = sample.high_watermark
    return stable is not None and watermark is not None and sample.last_stable_offset == stable < watermark


def open_transaction(seen: Observations) -> Finding:
    held = held_back(seen)
    hanging: list[BlockingTransaction] = []
    known: dict[TransactionDescription, list[BlockingTransaction]] = {}
    for each in seen.transactions:
        if each.open.partition not in held:
            continue
        if each.coordinated is None:
            hanging.append(each)
        elif _age_s(seen, each) >= LONG_OPEN_S:
            known.setdefault(each.coordinated, []).append(each)
    partitions = sorted(each.open.partition for each in itertools.chain(hanging, *known.values()))
    return Finding(
        "open-transaction",
        f"consumers with read_committed wait for an open transaction in partition {listed(partitions)} of "
        f"{seen.topic}: they cannot see its records, nor any later record",
        " ".join(_steps(seen.topic, list(known), [each.open for each in hanging])),
        [
            *(_known(seen, state, same, held) for state, same in known.items()),
            *(_hanging(seen, each, held) for each in hanging),
        ],
    )


def _known(
    seen: Observations, state: TransactionDescription, same: Sequence[BlockingTransaction], held: Held
) -> Evidence:
    partitions = [each.open.partition for each in same]
    if state.state == ONGOING:
        ending = f"aborts it at {_time((state.start_ms or 0) + state.timeout_ms)}, unless it ends before"
    else:
        ending = f"has decided its outcome ({state.state}), and repeats its markers until all leaders have them"
    waiting = _waiting(partitions, held)
    return Evidence(
        f"transactional id {state.transactional_id} (producer {state.producer_id}, epoch {state.producer_epoch}) has "
        f"had a transaction open in partition {listed(partitions)} since {_time(state.start_ms or 0)}; node "
        f"{state.coordinator}, its coordinator, {ending}; {waiting} offsets wait",
        partitions[0],
        state.coordinator,
        transactional_id=state.transactional_id,
        since_s=round(_age_s(seen, same[0]), 1),
        numbers={
            "producer_id": state.producer_id,
            "producer_epoch": state.producer_epoch,
            "timeout_ms": state.timeout_ms,
            "last_stable_offset": same[0].open.start_offset,
            "lag": waiting,
        },
    )


def _hanging(seen: Observations, blocking: BlockingTransaction, held: Held) -> Evidence:
    open_ = blocking.open
    waiting = _waiting([open_.partition], held)
    return Evidence(
        f"producer {open_.producer_id}, epoch {open_.producer_epoch}, has a transaction open in partition "
        f"{open_.partition} from offset {open_.start_offset} on, and no coordinator knows it: it hangs. Its last "
        f"record is from {_time(open_.last_timestamp_ms)}; {waiting} offsets wait",
        open_.partition,
        held[open_.partition].leader,
        since_s=round(_age_s(seen, blocking), 1),
        numbers={
            "producer_id": open_.producer_id,
            "producer_epoch": open_.producer_epoch,
            "last_stable_offset": open_.start_offset,
            "lag": waiting,
        },
    )


def _steps(topic: str, known: Sequence[TransactionDescription], hanging: Sequence[OpenTransaction]) -> list[str]:
    steps: list[str] = []
    ongoing = [state.transactional_id for state in known if state.state == ONGOING]
    if ongoing:
        steps.append(
            f"Check the producer of {listed(ongoing)}: does it run, and does it commit? To abort its transaction now "
            f"and fence it: chronik transaction abort {shlex.quote(ongoing[0])}. A lower transaction.timeout.ms of the "
            "producer shortens such waits."
        )
    if len(ongoing) < len(known):
        steps.append("Check the nodes that lead the partitions without a marker (chronik transaction describe ID).")
    for open_ in hanging[:1]:
        steps.append(
            f"End the hanging transaction: chronik transaction abort --topic {topic} --partition {open_.partition} "
            f"--start-offset {open_.start_offset}."
        )
    return steps


def _waiting(partitions: Sequence[int], held: Held) -> int:
    """Return how many offsets are beyond the last stable offset."""
    return sum((held[index].high_watermark or 0) - (held[index].last_stable_offset or 0) for index in partitions)


def _age_s(seen: Observations, blocking: BlockingTransaction) -> float:
    """Return how long the transaction has been open, or, if no coordinator knows it, the age of its last record."""
    state = blocking.coordinated
    since_ms = blocking.open.last_timestamp_ms if state is None or state.start_ms is None else state.start_ms
    return max(0, seen.wall_ms - since_ms) / 1000


def _time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")
