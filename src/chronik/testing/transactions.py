"""Collects the transactions of a history, and decides which of them committed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from chronik.testing.operations import (
    Assigned,
    HistoryError,
    OffsetsSent,
    Operation,
    Polled,
    SendInvoked,
    TransactionEnded,
    TransactionEndInvoked,
)


class Outcome(StrEnum):
    COMMIT = "commit"
    ABORT = "abort"
    UNKNOWN = "unknown"


@dataclass(slots=True, eq=False)
class Transaction:
    """One transaction. Operations are numbers in the history, -1 if there is none."""

    name: str
    producer: str
    values: list[str] = field(default_factory=list)
    inputs: list[tuple[int, Polled]] = field(default_factory=list)
    """Its polls, each with its number in the history."""
    offsets: list[OffsetsSent] = field(default_factory=list)
    commit_invoked: int = -1
    """The first request to commit."""
    commit_invoked_s: float = 0.0
    ended: int = -1
    ended_s: float = float("inf")
    outcome: Outcome = Outcome.UNKNOWN


class TransactionHistory:
    """All facts in the operations about transactions and what read_committed consumers received."""

    def __init__(self) -> None:
        self.transactions: dict[str, Transaction] = {}
        self.received: dict[str, int] = {}
        """Each value that a read_committed consumer received, and the first operation that shows it."""
        self.read_committed: set[str] = set()
        """The read_committed consumers."""
        self._transaction_of: dict[str, Transaction] = {}

    def take(self, number: int, operation: Operation) -> None:
        match operation:
            case Polled(consumer=consumer, records=records, transaction=transaction):
                if transaction is not None:
                    self._transaction(transaction).inputs.append((number, operation))
                if consumer in self.read_committed:
                    for _, _, value in records:
                        self.received.setdefault(value, number)
            case SendInvoked(producer=producer, value=value, transaction=str(transaction)):
                of = self._transaction_of[value] = self._transaction(transaction, producer)
                of.values.append(value)
            case Assigned(consumer=consumer, is_read_committed=True):
                self.read_committed.add(consumer)
            case OffsetsSent(producer=producer, transaction=transaction):
                self._transaction(transaction, producer).offsets.append(operation)
            case TransactionEndInvoked(at_s=at_s, producer=producer, transaction=transaction, is_commit=is_commit):
                ending = self._transaction(transaction, producer)
                if is_commit and ending.commit_invoked < 0:
                    ending.commit_invoked, ending.commit_invoked_s = number, at_s
            case TransactionEnded(at_s=at_s, producer=producer, transaction=transaction, outcome=outcome):
                self._end(number, at_s, self._transaction(transaction, producer), Outcome(outcome))

    def settle(self) -> None:
        """Decide the outcome of every transaction, after all operations.

        Without a request to commit, a transaction aborts. A transaction with an unknown outcome committed if a
        read_committed consumer received one of its records.
        """
        for transaction in self.transactions.values():
            if transaction.outcome is Outcome.UNKNOWN:
                if transaction.commit_invoked < 0:
                    transaction.outcome = Outcome.ABORT
                elif any(value in self.received for value in transaction.values):
                    transaction.outcome = Outcome.COMMIT

    def of(self, value: str) -> Transaction | None:
        return self._transaction_of.get(value)

    def is_hidden(self, value: str) -> bool:
        """Return whether read_committed consumers need not, or must not, receive this value."""
        transaction = self._transaction_of.get(value)
        return transaction is not None and transaction.outcome is not Outcome.COMMIT

    def committed(self) -> Iterator[Transaction]:
        return (each for each in self.transactions.values() if each.outcome is Outcome.COMMIT)

    def _transaction(self, name: str, producer: str = "") -> Transaction:
        transaction = self.transactions.get(name)
        if transaction is None:
            transaction = self.transactions[name] = Transaction(name, producer)
        transaction.producer = transaction.producer or producer
        return transaction

    @staticmethod
    def _end(number: int, at_s: float, transaction: Transaction, outcome: Outcome) -> None:
        if transaction.ended >= 0:
            raise HistoryError(f"operation {number} ends transaction {transaction.name!r} a second time")
        if outcome is Outcome.COMMIT and transaction.commit_invoked < 0:
            raise HistoryError(f"operation {number} commits transaction {transaction.name!r} without a request")
        transaction.ended, transaction.outcome = number, outcome
        if outcome is not Outcome.UNKNOWN:
            transaction.ended_s = at_s
