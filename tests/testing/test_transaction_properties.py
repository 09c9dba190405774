"""Histories of transactions that are correct by construction raise no alarm; with one error added, the right one.

The construction is a model of a broker: partitions are lists of records and markers. Producers append records of their
open transactions in any order, and never learn some outcomes. A read_committed consumer reads up to the last stable
offset, and an application consumes one partition and sends its offsets inside its transactions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import assume, given
from hypothesis import strategies as st

from chronik.testing.history import check
from chronik.testing.operations import (
    Assigned,
    OffsetsFetched,
    OffsetsSent,
    Operation,
    Polled,
    SendAcknowledged,
    SendInvoked,
    TransactionEnded,
    TransactionEndInvoked,
    from_lines,
    to_lines,
)

PARTITIONS = ("t-0", "t-1", "t-2")
PRODUCERS = ("p0", "p1", "app")
INPUT, GROUP = "t-0", "g"
STEPS_MAX = 50
MARKER = ("", "")


@dataclass
class Open:
    """A transaction that has not ended."""

    name: str
    values: list[tuple[str, str, int]] = field(default_factory=list)
    offset: int | None = None


@dataclass
class Model:
    """A cluster without errors that records the operations of its clients."""

    draw: Callable[[st.SearchStrategy[int]], int]
    operations: list[Operation] = field(default_factory=list)
    logs: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: {name: [] for name in PARTITIONS})
    """By partition: value and transaction at each offset, or MARKER."""
    open: dict[str, Open] = field(default_factory=dict)
    committed: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    positions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTITIONS, 0))
    offset: int | None = None
    """The group's committed offset of INPUT."""
    begun: int = 0
    sent: int = 0

    @property
    def now_s(self) -> float:
        return float(len(self.operations))

    def choose(self, count: int) -> int:
        return self.draw(st.integers(0, count - 1))

    def step(self) -> None:
        (self.send, self.send, self.send, self.consume, self.end, self.poll, self.fetch)[self.choose(7)]()

    def current(self, producer: str) -> Open:
        if producer not in self.open:
            self.begun += 1
            self.open[producer] = Open(f"{producer}/{self.begun}")
        return self.open[producer]

    def send(self) -> None:
        producer = PRODUCERS[self.choose(3)]
        transaction, partition = self.current(producer), PARTITIONS[self.choose(3)]
        value, log = f"v{self.sent}", self.logs[partition]
        self.sent += 1
        self.operations.append(SendInvoked(self.now_s, producer, value, partition, transaction.name))
        log.append((value, transaction.name))
        transaction.values.append((partition, value, len(log) - 1))
        self.operations.append(SendAcknowledged(self.now_s, producer, value, partition, len(log) - 1))

    def stable(self, partition: str) -> int:
        firsts = [offset for each in self.open.values() for where, _, offset in each.values if where == partition]
        return min(firsts, default=len(self.logs[partition]))

    def visible(self, partition: str, start: int, end: int) -> list[tuple[str, int, str]]:
        records = enumerate(self.logs[partition][start:end], start)
        return [(partition, offset, value) for offset, (value, name) in records if name in self.committed]

    def consume(self) -> None:
        """Let the application consume from the group's offset, once in a transaction."""
        if "app" in self.open:
            return
        transaction, end = self.current("app"), self.stable(INPUT)
        start = self.offset or 0
        records = self.visible(INPUT, start, end)
        self.operations.append(Assigned(self.now_s, "app", {INPUT: start}, GROUP, is_read_committed=True))
        self.operations.append(Polled(self.now_s, self.now_s - 0.5, "app", tuple(records), transaction.name))
        transaction.offset = end
        self.operations.append(OffsetsSent(self.now_s, "app", transaction.name, GROUP, {INPUT: end}))

    def end(self) -> None:
        if not self.open:
            return
        producer = sorted(self.open)[self.choose(len(self.open))]
        transaction, is_commit = self.open.pop(producer), self.choose(3) > 0
        self.operations.append(TransactionEndInvoked(self.now_s, producer, transaction.name, is_commit))
        (self.committed if is_commit else self.aborted).add(transaction.name)
        for partition in dict.fromkeys(partition for partition, _, _ in transaction.values):
            self.logs[partition].append(MARKER)
        if is_commit and transaction.offset is not None:
            self.offset = transaction.offset
        if self.choose(4):
            outcome: Literal["commit", "abort"] = "commit" if is_commit else "abort"
            self.operations.append(TransactionEnded(self.now_s, producer, transaction.name, outcome))

    def poll(self) -> None:
        records: list[tuple[str, int, str]] = []
        for partition, position in self.positions.items():
            end = position + self.choose(self.stable(partition) - position + 1)
            records += self.visible(partition, position, end)
            self.positions[partition] = end
        self.operations.append(Polled(self.now_s, self.now_s - 0.5, "reader", tuple(records)))

    def fetch(self) -> None:
        self.operations.append(OffsetsFetched(self.now_s, self.now_s - 0.5, GROUP, {INPUT: self.offset}))

    def finish(self) -> None:
        """End every transaction, and read everything."""
        while self.open:
            self.end()
        self.fetch()
        positions: dict[str, int | None] = dict.fromkeys(PARTITIONS, 0)
        self.operations.append(Assigned(self.now_s, "last", positions, is_read_committed=True))
        records = [record for name in PARTITIONS for record in self.visible(name, 0, len(self.logs[name]))]
        self.operations.append(Polled(self.now_s, self.now_s, "last", tuple(records)))


@st.composite
def models(draw: st.DrawFn) -> Model:
    model = Model(draw)
    positions: dict[str, int | None] = dict.fromkeys(PARTITIONS, 0)
    model.operations.append(Assigned(0.0, "reader", positions, is_read_committed=True))
    for _ in range(draw(st.integers(1, STEPS_MAX))):
        model.step()
    model.finish()
    return model


def last_poll(model: Model) -> list[tuple[str, int, str]]:
    final = model.operations[-1]
    assert isinstance(final, Polled)
    return list(final.records)


def kinds(model: Model, records: list[tuple[str, int, str]]) -> set[str]:
    """Return the anomalies of the history with another last poll; the group and the reader need not reach the end."""
    operations = [*model.operations[:-1], Polled(model.now_s, model.now_s, "last", tuple(records))]
    return check(operations, final="last", rereaders=["reader"]).anomalies.keys() - {"lag-at-end"}


@given(models())
def test_a_history_of_transactions_that_is_correct_by_construction_is_clean(model: Model) -> None:
    assert kinds(model, last_poll(model)) == set()
    again = list(from_lines(to_lines(model.operations)))
    assert check(again, final="last") == check(model.operations, final="last")


@given(models(), st.data())
def test_a_committed_record_missing_from_the_last_poll_is_reported(model: Model, data: st.DataObject) -> None:
    records = last_poll(model)
    assume(records)
    records.remove(data.draw(st.sampled_from(records)))
    expected = {"int-poll-skip", "external-poll-skip", "lost-transaction", "torn-transaction", "vanished"}
    found = kinds(model, records)
    known = {op.transaction for op in model.operations if isinstance(op, TransactionEnded) and op.outcome == "commit"}
    if model.committed <= known:
        assert found & expected
    assert found <= expected


@given(models(), st.data())
def test_an_aborted_record_in_the_last_poll_is_reported(model: Model, data: st.DataObject) -> None:
    hidden = [
        (partition, offset, value)
        for partition, log in model.logs.items()
        for offset, (value, name) in enumerate(log)
        if name in model.aborted
    ]
    assume(hidden)
    records = [*last_poll(model), data.draw(st.sampled_from(hidden))]
    assert "G1a" in kinds(model, sorted(records))


@given(models(), st.data())
def test_an_offset_moved_by_an_aborted_transaction_is_reported(model: Model, data: st.DataObject) -> None:
    aborted = [
        op.offsets[INPUT] for op in model.operations if isinstance(op, OffsetsSent) and op.transaction in model.aborted
    ]
    written = {
        op.offsets[INPUT]
        for op in model.operations
        if isinstance(op, OffsetsSent) and op.transaction in model.committed
    }
    candidates = [offset for offset in aborted if offset not in written]
    assume(candidates)
    model.offset = data.draw(st.sampled_from(candidates))
    final = model.operations.pop()
    model.fetch()
    model.operations.append(final)
    assert "aborted-offsets" in kinds(model, last_poll(model))
