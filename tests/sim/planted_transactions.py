"""Bugs to plant into transactions: typical mistakes of coordinators, of leaders, and of the index of aborted ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.sim.planted import Planted
from tests.sim.planted_disks import Found

from chronik.groups.coordinator import GroupCoordinator
from chronik.groups.offsets import Producer
from chronik.groups.step import Append, Moment, Reply
from chronik.node.coordinators.markers import MarkerSender
from chronik.node.membership.peer_handshake import PeerHandshake
from chronik.node.replicas.verification import ProducedTransaction, Verifications
from chronik.storage import recovery
from chronik.storage.aborted import AbortedJob, AbortedTransaction
from chronik.storage.producers import ProducerStates
from chronik.testing.sim.transaction_scenario import SeveredCoordinators, Transactions
from chronik.transactions import coordinator as coordinator_module
from chronik.transactions.actions import Action, WriteMarkers
from chronik.transactions.coordinator import EndRequest, TransactionCoordinator
from chronik.wire.batch import BatchHeader, Marker
from chronik.wire.errors import ErrorCode


def marker_is_missing_on_one_partition() -> AbstractContextManager[Any]:
    """The coordinator counts the marker of the last partition as written, and never sends it."""
    send = MarkerSender.send

    def send_but_one(sender: MarkerSender, action: WriteMarkers) -> None:
        *sent, missing = action.partitions
        if not sent:
            send(sender, action)
            return
        send(sender, replace(action, partitions=tuple(sent)))
        sender._loop.call_soon(sender._written, action, missing)

    return patch.object(MarkerSender, "send", send_but_one)


def aborted_list_is_not_sorted() -> AbstractContextManager[Any]:
    """The aborted transactions are listed in the order of their markers, as the index has them."""
    find = AbortedJob.__call__

    def by_marker(job: AbortedJob) -> list[AbortedTransaction]:
        return sorted(find(job), key=lambda entry: entry.last_offset)

    return patch.object(AbortedJob, "__call__", by_marker)


def commit_succeeds_before_it_is_durable() -> AbstractContextManager[Any]:
    """EndTxn is answered when PrepareCommit is appended, before it is committed in the log."""
    end = TransactionCoordinator.end

    def end_at_once(coordinator: TransactionCoordinator, request: EndRequest, token: int, at: Moment) -> list[Action]:
        actions = end(coordinator, request, token, at)
        for append in [action for action in actions if isinstance(action, Append)]:
            write = coordinator._writes[append.token]

            def done(error: ErrorCode, later: list[Action], at: Moment, write: Any = write) -> None:
                following: list[Action] = []
                write.done(error, following, at)
                later += [action for action in following if not isinstance(action, Reply)]

            coordinator._writes[append.token] = write._replace(done=done)
            actions.append(coordinator_module._end_reply(token, ErrorCode.none, write.metadata))
        return actions

    return patch.object(TransactionCoordinator, "end", end_at_once)


@contextmanager
def stale_coordinator_is_accepted() -> Iterator[None]:
    """A leader writes the marker of a coordinator that another one has replaced, however long it was on its way.

    A node that begins to lead drops the connections for markers. After a cut, that would hide the bug in most seeds.
    """
    check = ProducerStates.check_marker

    def check_without_coordinator(states: ProducerStates, header: BatchHeader, marker: Marker) -> None:
        check(states, header, marker._replace(coordinator_epoch=1 << 30))

    def keep(handshake: PeerHandshake) -> None:
        return

    with (
        patch.object(ProducerStates, "check_marker", check_without_coordinator),
        patch.object(PeerHandshake, "drop_markers", keep),
    ):
        yield


@contextmanager
def verification_is_skipped() -> Iterator[None]:
    """A leader appends the first batch of a version 1 transaction without asking the coordinator."""
    check = Verifications.check

    def check_version_2(
        verifications: Verifications, header: BatchHeader, transaction: ProducedTransaction, *args: Any
    ) -> None:
        if transaction.adds:
            check(verifications, header, transaction, *args)

    with patch.object(Verifications, "check", check_version_2):
        yield


def offsets_are_applied_on_abort() -> AbstractContextManager[Any]:
    """A group takes over the offsets of a transaction whatever its outcome."""
    ended = GroupCoordinator.transaction_ended

    def commit(groups: GroupCoordinator, partition: int, producer: Producer, is_commit: bool) -> None:
        ended(groups, partition, producer, True)

    return patch.object(GroupCoordinator, "transaction_ended", commit)


def aborted_index_is_not_rebuilt() -> AbstractContextManager[Any]:
    """Recovery reads the markers of aborted transactions, but does not add them to the index."""

    def nothing(*_: Any) -> None:
        return None

    return patch.object(recovery, "aborted", nothing)


PLANTED_IN_TRANSACTIONS: dict[Planted, Found] = {
    marker_is_missing_on_one_partition: Found(Transactions.name, 0),
    aborted_list_is_not_sorted: Found(Transactions.name, 9),
    commit_succeeds_before_it_is_durable: Found(Transactions.name, 11),
    stale_coordinator_is_accepted: Found(SeveredCoordinators.name, 20),
    verification_is_skipped: Found(Transactions.name, 14),
    offsets_are_applied_on_abort: Found(Transactions.name, 2),
    aborted_index_is_not_rebuilt: Found(Transactions.name, 1),
}
"""The seed of each test; docs/simulator.md lists how often each bug is found."""

SEEDS_MAX: dict[Planted, int] = {
    marker_is_missing_on_one_partition: 4,
    aborted_list_is_not_sorted: 15,
    commit_succeeds_before_it_is_durable: 45,
    stale_coordinator_is_accepted: 100,
    verification_is_skipped: 40,
    offsets_are_applied_on_abort: 6,
    aborted_index_is_not_rebuilt: 4,
}
"""The number of seeds from 0 on within which each bug must be found; only `make soak` runs that many."""
