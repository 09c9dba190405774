"""Histories that are correct by construction raise no alarm; with one error added, they raise the right one.

The construction is a model of a broker: partitions are lists, and producers append in order. A producer may never learn
the outcome of a send. Consumers read on from their positions and may get other partitions at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import assume, given
from hypothesis import strategies as st

from chronik.testing.history import check
from chronik.testing.operations import (
    Assigned,
    Operation,
    Polled,
    SendAcknowledged,
    SendFailed,
    SendInvoked,
    SendUnknown,
    from_lines,
    to_lines,
)

PARTITIONS = ("t-0", "t-1", "t-2")
PRODUCERS = ("p0", "p1")
CONSUMERS = ("c0", "c1")
STEPS_MAX = 80


@dataclass
class Model:
    """A cluster without errors that records the operations of its clients."""

    draw: Callable[[st.SearchStrategy[int]], int]
    operations: list[Operation] = field(default_factory=list)
    logs: dict[str, list[str]] = field(default_factory=lambda: {partition: [] for partition in PARTITIONS})
    positions: dict[str, dict[str, int]] = field(default_factory=lambda: {consumer: {} for consumer in CONSUMERS})
    unanswered: list[tuple[str, str, str, int]] = field(default_factory=list)
    sent: int = 0

    @property
    def now_s(self) -> float:
        return float(len(self.operations))

    def choose(self, count: int) -> int:
        return self.draw(st.integers(0, count - 1))

    def step(self) -> None:
        (self.send, self.send, self.answer, self.poll, self.poll, self.assign)[self.choose(6)]()

    def send(self) -> None:
        producer, partition = PRODUCERS[self.choose(2)], PARTITIONS[self.choose(3)]
        value = f"{producer}/{self.sent}"
        self.sent += 1
        self.operations.append(SendInvoked(self.now_s, producer, value, (partition, None)[self.choose(2)]))
        fate = self.choose(6)
        if fate == 0:
            self.operations.append(SendFailed(self.now_s, producer, value, "refused"))
        elif fate == 1:
            self.operations.append(SendUnknown(self.now_s, producer, value, "never appended"))
        else:
            self.logs[partition].append(value)
            if fate == 2:
                self.operations.append(SendUnknown(self.now_s, producer, value, "the answer was lost"))
            elif fate > 3:
                self.unanswered.append((producer, value, partition, len(self.logs[partition]) - 1))

    def answer(self) -> None:
        """Acknowledge in any order, possibly after a consumer has read the record."""
        if self.unanswered:
            producer, value, partition, offset = self.unanswered.pop(self.choose(len(self.unanswered)))
            told = None if self.choose(4) == 0 else offset
            self.operations.append(SendAcknowledged(self.now_s, producer, value, partition, told))

    def poll(self) -> None:
        consumer = CONSUMERS[self.choose(2)]
        records: list[tuple[str, int, str]] = []
        for partition, position in self.positions[consumer].items():
            count = self.choose(len(self.logs[partition]) - position + 1)
            for offset in range(position, position + count):
                records.append((partition, offset, self.logs[partition][offset]))
            self.positions[consumer][partition] += count
        self.operations.append(Polled(self.now_s, self.now_s - 0.5, consumer, tuple(records)))

    def assign(self) -> None:
        """Assign manually or by a rebalance: partitions stay, or start at a committed or at any other position."""
        consumer = CONSUMERS[self.choose(2)]
        before, after, told = self.positions[consumer], dict[str, int](), dict[str, int | None]()
        for partition in PARTITIONS:
            if self.choose(2):
                start = self.choose(len(self.logs[partition]) + 1)
                how = self.choose(3)
                if how == 0 and partition in before:
                    after[partition], told[partition] = before[partition], None
                elif how == 1 and partition not in before:
                    after[partition], told[partition] = start, None
                else:
                    after[partition], told[partition] = start, start
        self.positions[consumer] = after
        self.operations.append(Assigned(self.now_s, consumer, told))

    def finish(self) -> None:
        """Answer every send, and read everything."""
        while self.unanswered:
            self.answer()
        self.operations.append(Assigned(self.now_s, "last", dict.fromkeys(PARTITIONS, 0)))
        records = [(name, offset, value) for name, log in self.logs.items() for offset, value in enumerate(log)]
        self.operations.append(Polled(self.now_s, self.now_s, "last", tuple(records)))


@st.composite
def models(draw: st.DrawFn) -> Model:
    model = Model(draw)
    for _ in range(draw(st.integers(1, STEPS_MAX))):
        model.step()
    model.finish()
    return model


def last_poll(model: Model) -> tuple[tuple[str, int, str], ...]:
    final = model.operations[-1]
    assert isinstance(final, Polled)
    return final.records


def with_last_poll(model: Model, records: list[tuple[str, int, str]]) -> list[Operation]:
    """Return the history with another last poll."""
    return [*model.operations[:-1], Polled(model.now_s, model.now_s, "last", tuple(records))]


@given(models())
def test_a_history_that_is_correct_by_construction_is_clean(model: Model) -> None:
    report = check(model.operations, dense=True)
    assert report.is_clean, str(report)
    assert check(model.operations).is_clean
    assert check(model.operations, session_s=0.0, final="last", rereaders=CONSUMERS).is_clean


@given(models())
def test_a_history_gets_the_same_report_after_it_is_written_and_read(model: Model) -> None:
    again = list(from_lines(to_lines(model.operations)))
    assert again == model.operations
    assert check(again) == check(model.operations)


@given(models(), st.data())
def test_a_record_that_is_missing_from_the_last_poll_is_reported(model: Model, data: st.DataObject) -> None:
    records = list(last_poll(model))
    assume(records)
    gone = data.draw(st.sampled_from(records))
    records.remove(gone)
    report = check(with_last_poll(model, records), dense=True, final="last", rereaders=CONSUMERS)
    is_last_of_partition = gone[1] == len(model.logs[gone[0]]) - 1
    seen_before = any(gone in op.records for op in model.operations[:-1] if isinstance(op, Polled))
    assert ("vanished" in report.anomalies) == seen_before
    if is_last_of_partition:
        acknowledged = any(op.value == gone[2] for op in model.operations if isinstance(op, SendAcknowledged))
        assert ("unseen" in report.anomalies) == (acknowledged and not seen_before)
    else:
        assert {"int-poll-skip", "external-poll-skip"} & report.anomalies.keys()


@given(models(), st.data())
def test_a_duplicate_record_is_reported(model: Model, data: st.DataObject) -> None:
    records = list(last_poll(model))
    assume(records)
    partition, _, value = data.draw(st.sampled_from(records))
    records.append((partition, len(model.logs[partition]), value))
    assert check(with_last_poll(model, records)).anomalies.keys() >= {"duplicate"}


@given(models(), st.data())
def test_two_swapped_records_are_reported(model: Model, data: st.DataObject) -> None:
    records = list(last_poll(model))
    acknowledged = {
        (op.partition, op.offset)
        for op in model.operations
        if isinstance(op, SendAcknowledged) and op.offset is not None
    }
    pairs = [
        at
        for at in range(len(records) - 1)
        if records[at][0] == records[at + 1][0] and (records[at][0], records[at][1]) in acknowledged
    ]
    assume(pairs)
    at = data.draw(st.sampled_from(pairs))
    (partition, offset, first), (_, _, second) = records[at], records[at + 1]
    records[at : at + 2] = [(partition, offset, second), (partition, offset + 1, first)]
    report = check(with_last_poll(model, records))
    assert report.anomalies.keys() >= {"inconsistent-offsets", "duplicate"}


@given(models(), st.data())
def test_a_record_with_changed_content_is_reported(model: Model, data: st.DataObject) -> None:
    records = list(last_poll(model))
    assume(records)
    at = data.draw(st.integers(0, len(records) - 1))
    records[at] = (*records[at][:2], "something else")
    assert check(with_last_poll(model, records)).anomalies.keys() >= {"unknown-value"}
