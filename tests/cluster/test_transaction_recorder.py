"""What the recorder of transactions writes when a client fails: a wrong outcome would be a false alarm, or none."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.cluster.support_recorder import Recorder, named
from tests.cluster.support_transactions import (
    AbortRequired,
    Answered,
    ClientEnded,
    RecordedTransactions,
    TransactionalClient,
)

from chronik.testing.operations import SendAcknowledged, SendUnknown, TransactionEnded, TransactionEndInvoked


class ScriptedClient:
    """Fails the calls that `failures` names."""

    def __init__(self, **failures: Exception) -> None:
        self.retries = ""
        self.calls: list[str] = []
        self._failures = failures

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self._failures:
            raise self._failures[name]

    def open(self) -> None:
        self._called("open")

    def begin(self) -> None:
        self._called("begin")

    def send(self, records: Sequence[tuple[str, str, int]], answered: Answered) -> None:
        self._called("send")
        for offset, (value, topic, partition) in enumerate(records):
            failed = "purged" in self._failures
            answered(value, named(topic, partition), None if failed else offset, "purged" if failed else "")

    def end(self, is_commit: bool) -> None:
        self._called("commit" if is_commit else "abort")

    def close(self) -> None:
        self._called("close")


class Application:
    """Runs transactions with the given clients, one after the other."""

    def __init__(self, *clients: ScriptedClient) -> None:
        self.recorder = Recorder()
        remaining = iter(clients)
        self.transactions = RecordedTransactions(self.recorder, "a", lambda: next(remaining), random.Random(1))

    def run(self, *, commits: bool = True, is_taken_over: bool = False) -> str | None:
        def write(client: TransactionalClient) -> None:
            self.transactions.send(client, "a/1", [("a/1/0", "t", 0)])
            if is_taken_over:
                self.transactions.take_over()

        return self.transactions.run("a/1", write, commits)

    @property
    def ended(self) -> list[str]:
        """The recorded requests to end the transaction, and its outcome."""
        return [
            operation.outcome if isinstance(operation, TransactionEnded) else f"asked to commit: {operation.is_commit}"
            for operation in self.recorder.operations
            if isinstance(operation, TransactionEnded | TransactionEndInvoked)
        ]


def test_a_commit_and_an_abort_are_recorded_with_their_request() -> None:
    application = Application(ScriptedClient())
    assert application.run() == "commit"
    assert application.ended == ["asked to commit: True", "commit"]
    application = Application(ScriptedClient())
    assert application.run(commits=False) == "abort"
    assert application.ended == ["asked to commit: False", "abort"]


def test_a_transaction_that_cannot_commit_is_aborted_and_recorded_so() -> None:
    client = ScriptedClient(commit=AbortRequired())
    application = Application(client)
    assert application.run() == "abort"
    assert application.ended == ["asked to commit: True", "asked to commit: False", "abort"]
    assert application.transactions.client is client, "the client continues"


def test_a_producer_that_ends_during_a_commit_leaves_an_unknown_outcome() -> None:
    client, successor = ScriptedClient(commit=ClientEnded()), ScriptedClient()
    application = Application(client, successor)
    assert application.run() == "unknown"
    assert client.calls[-1] == "close"
    application.transactions.open()
    assert application.transactions.client is successor


def test_an_abort_that_fails_leaves_an_unknown_outcome_without_a_commit() -> None:
    application = Application(ScriptedClient(send=AbortRequired(), abort=ClientEnded()))
    assert application.run() == "unknown"
    assert application.ended == ["asked to commit: False", "unknown"]


def test_a_zombies_transaction_is_aborted_unless_its_commit_is_acknowledged() -> None:
    zombie, successor = ScriptedClient(commit=ClientEnded()), ScriptedClient()
    application = Application(zombie, successor)
    assert application.run(is_taken_over=True) == "abort"
    assert application.transactions.client is successor and zombie.calls[-1] == "close"
    application = Application(ScriptedClient(), ScriptedClient())
    assert application.run(is_taken_over=True) == "commit", "a fault, which the checker reports as a lost transaction"


def test_a_takeover_that_fails_leaves_the_outcome_to_the_first_producer() -> None:
    zombie, successor = ScriptedClient(commit=ClientEnded()), ScriptedClient(open=ClientEnded())
    application = Application(zombie, successor)
    assert application.run(is_taken_over=True) == "unknown"
    assert successor.calls == ["open", "close"]


def test_a_transaction_that_did_not_begin_is_not_recorded() -> None:
    application = Application(ScriptedClient(begin=ClientEnded()), ScriptedClient(open=AbortRequired()))
    assert application.run() is None
    assert application.run() is None
    assert application.recorder.operations == []


def test_a_send_with_an_error_has_an_unknown_outcome() -> None:
    application = Application(ScriptedClient(purged=Exception()))
    application.run(commits=False)
    kinds = [type(operation) for operation in application.recorder.operations]
    assert SendUnknown in kinds and SendAcknowledged not in kinds
