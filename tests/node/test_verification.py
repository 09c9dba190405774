"""Transactions that a leader verifies: the state of one partition, and the requests to the coordinator."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.node.support_replicas import FakeCoordinator
from tests.support.eventually import until

from chronik.node.replicas import verifier as verifier_module
from chronik.node.replicas.verification import ProducedTransaction, UnverifiedBatch, Verification, Verifications
from chronik.node.replicas.verifier import Verifier
from chronik.observe.logging import silent_logger
from chronik.storage.producers import ProducerStates
from chronik.wire.batch import BatchHeader, encode_batch, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError

VERSION_1 = ProducedTransaction("payments", adds=False)
VERSION_2 = ProducedTransaction("payments", adds=True)


def header(sequence: int = 0, *, epoch: int = 3, producer_id: int = 7) -> BatchHeader:
    batch = encode_batch(
        [(b"k", b"v", (), 1)],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=True,
    )
    return read_batch_header(batch)


def code_of(
    verifications: Verifications,
    batch: BatchHeader,
    verified: Verification | None,
    producers: ProducerStates | None = None,
    transaction: ProducedTransaction = VERSION_1,
) -> ErrorCode:
    try:
        verifications.check(batch, transaction, verified, producers or ProducerStates(1000))
    except KafkaError as error:
        return error.code
    return ErrorCode.none


# -- one partition -----------------------------------------------------------------------------------------------------


def test_a_transaction_begins_only_under_a_verification() -> None:
    verifications = Verifications()
    with pytest.raises(UnverifiedBatch):
        verifications.check(header(), VERSION_1, None, ProducerStates(1000))
    assert code_of(verifications, header(), verifications.join(header(), False)) is ErrorCode.none


def test_a_producer_with_an_open_transaction_needs_no_verification() -> None:
    producers = ProducerStates(1000)
    producers.record(header(0), 0, 1)
    assert code_of(Verifications(), header(1), None, producers) is ErrorCode.none


def test_an_open_transaction_of_another_epoch_is_no_proof() -> None:
    producers = ProducerStates(1000)
    producers.record(header(0, epoch=3), 0, 1)
    assert code_of(Verifications(), header(0, epoch=4), None, producers) is ErrorCode.invalid_txn_state


def test_a_marker_voids_the_verification_before_it() -> None:
    verifications = Verifications()
    verified = verifications.join(header(), False)
    verifications.ended(7, 3)
    assert code_of(verifications, header(), verified) is ErrorCode.invalid_txn_state


def test_a_marker_of_the_last_transaction_does_not_void_the_next_one_of_version_2() -> None:
    """The next transaction begins while the markers of the last one are being written, which have its epoch."""
    verifications = Verifications()
    verified = verifications.join(header(), True)
    verifications.ended(7, 3)
    assert code_of(verifications, header(), verified, transaction=VERSION_2) is ErrorCode.none
    verifications.ended(7, 4)
    assert code_of(verifications, header(), verified, transaction=VERSION_2) is ErrorCode.invalid_txn_state


def test_a_marker_of_an_older_epoch_voids_nothing_but_needs_a_new_answer() -> None:
    verifications = Verifications()
    verified = verifications.join(header(), False)
    verifications.ended(7, 2)
    assert code_of(verifications, header(), verified) is ErrorCode.none
    assert verified.is_outdated


def test_an_old_answer_does_not_begin_the_next_transaction() -> None:
    """The verification of a transaction that ended must not confirm the next one, which may lack this partition."""
    verifications = Verifications()
    old = verifications.join(header(), False)
    verifications.ended(7, 3)
    new = verifications.join(header(1), False)
    assert new is not old
    producers = ProducerStates(1000)
    assert code_of(verifications, header(1), new, producers) is ErrorCode.none
    producers.record(header(1), 0, 1)
    verifications.appended(header(1))
    assert code_of(verifications, header(0), old, producers) is ErrorCode.invalid_txn_state


def test_the_end_of_leadership_voids_all_verifications_with_a_retriable_error() -> None:
    verifications = Verifications()
    verified = verifications.join(header(), False)
    verifications.end_all(KafkaError(ErrorCode.not_leader_or_follower))
    assert not verifications
    assert code_of(verifications, header(), verified) is ErrorCode.not_leader_or_follower


def test_a_newer_epoch_fences_the_batches_that_wait() -> None:
    verifications = Verifications()
    old = verifications.join(header(epoch=3), False)
    new = verifications.join(header(epoch=4), False)
    assert code_of(verifications, header(epoch=3), old) is ErrorCode.invalid_producer_epoch
    assert code_of(verifications, header(epoch=4), new) is ErrorCode.none
    with pytest.raises(KafkaError) as fenced:
        verifications.join(header(epoch=3), False)
    assert fenced.value.code is ErrorCode.invalid_producer_epoch


def test_an_epoch_that_is_not_verified_yet_does_not_stop_an_open_transaction() -> None:
    verifications, producers = Verifications(), ProducerStates(1000)
    producers.record(header(0, epoch=3), 0, 1)
    pending = verifications.join(header(0, epoch=4), False)
    verifications.check_order(header(1, epoch=3), None)
    assert code_of(verifications, header(1, epoch=3), None, producers) is ErrorCode.none
    verifications.appended(header(1, epoch=3))
    assert verifications.join(header(0, epoch=4), False) is pending


def test_a_later_batch_does_not_begin_the_transaction_before_an_earlier_one() -> None:
    verifications = Verifications()
    verified = verifications.join(header(5), False)
    assert verifications.join(header(2), False) is verified
    assert code_of(verifications, header(5), verified) is ErrorCode.out_of_order_sequence_number
    assert code_of(verifications, header(2), verified) is ErrorCode.none


@pytest.mark.parametrize(
    ("transaction", "code"), [(VERSION_1, ErrorCode.none), (VERSION_2, ErrorCode.out_of_order_sequence_number)]
)
def test_with_version_2_an_unknown_producer_begins_with_sequence_0(
    transaction: ProducedTransaction, code: ErrorCode
) -> None:
    verifications = Verifications()
    verified = verifications.join(header(4), False)
    assert code_of(verifications, header(4), verified, transaction=transaction) is code


def test_batches_wait_for_a_pending_verification_and_resume_in_order() -> None:
    verifications = Verifications()
    verifications.check_order(header(0), None)
    verified = verifications.join(header(0), False)
    with pytest.raises(UnverifiedBatch):
        verifications.check_order(header(1), None)
    verifications.check_order(header(0, producer_id=8), None)
    resumed: list[tuple[int, ErrorCode]] = []
    for sequence in (0, 1):
        joined = verifications.join(header(sequence), False)
        joined.waiting.append(lambda _, code, sequence=sequence: resumed.append((sequence, code)))  # type: ignore[misc]
    verifications.finish(7, verified, ErrorCode.not_coordinator)
    assert resumed == [(0, ErrorCode.not_coordinator), (1, ErrorCode.not_coordinator)]
    assert not verifications


# -- requests to the coordinator ---------------------------------------------------------------------------------------


class Scene:
    """A verifier with a fake coordinator, and partitions of one topic."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.coordinator = FakeCoordinator()
        self.verifier = Verifier(cast(Any, SimpleNamespace(loop=loop, log=silent_logger())), self.coordinator)
        self.partitions = [SimpleNamespace(topic="t", index=index, verifications=Verifications()) for index in range(3)]
        self.outcomes: list[tuple[int, int, ErrorCode]] = []

    def verify(self, index: int, batch: BatchHeader, transaction: ProducedTransaction = VERSION_1) -> None:
        def resume(verification: Verification, code: ErrorCode) -> None:
            self.outcomes.append((index, batch.base_sequence, code))

        self.verifier.verify(cast(Any, self.partitions[index]), batch, transaction, resume)

    @property
    def requested(self) -> list[list[int]]:
        return [[index for _, index in partitions] for *_, partitions, _ in self.coordinator.requests]


async def test_the_partitions_of_one_produce_request_are_verified_together() -> None:
    scene = Scene()
    for index in range(3):
        scene.verify(index, header(), VERSION_2)
    await until(lambda: len(scene.outcomes) == 3)
    partitions = (("t", 0), ("t", 1), ("t", 2))
    assert scene.coordinator.requests == [("payments", 7, 3, partitions, True)]


async def test_partitions_that_come_later_wait_for_the_request_before() -> None:
    """A coordinator refuses a transition while another one of the same transaction is pending."""
    scene = Scene()
    scene.coordinator.hold()
    scene.verify(0, header())
    await until(lambda: scene.requested == [[0]])
    scene.verify(1, header())
    scene.verify(2, header())
    scene.verify(0, header(1))
    await asyncio.sleep(0)
    assert scene.requested == [[0]]
    scene.coordinator.release()
    await until(lambda: len(scene.outcomes) == 4)
    assert scene.requested == [[0], [1, 2]]
    assert [(index, sequence) for index, sequence, _ in scene.outcomes[:2]] == [(0, 0), (0, 1)]


async def test_a_batch_after_the_marker_is_verified_again() -> None:
    scene = Scene()
    scene.coordinator.hold()
    scene.verify(0, header(0))
    await until(lambda: scene.requested == [[0]])
    scene.partitions[0].verifications.ended(7, 3)
    scene.verify(0, header(1))
    scene.coordinator.release()
    await until(lambda: len(scene.outcomes) == 2)
    assert scene.requested == [[0], [0]]


async def test_first_batch_of_the_next_transaction_survives_the_marker_of_the_last_one() -> None:
    """With version 2 both have the same epoch, and a client sends the batch as soon as EndTxn is answered."""
    scene = Scene()
    scene.coordinator.hold()
    scene.verify(0, header(0), VERSION_2)
    await until(lambda: scene.requested == [[0]])
    scene.partitions[0].verifications.ended(7, 3)
    assert not scene.outcomes
    scene.coordinator.release()
    await until(lambda: scene.outcomes == [(0, 0, ErrorCode.none)])
    assert scene.requested == [[0], [0]], "the first answer may be older than the marker"


async def test_with_version_2_the_marker_of_its_own_transaction_voids_a_batch() -> None:
    scene = Scene()
    scene.coordinator.hold()
    scene.verify(0, header(0), VERSION_2)
    await until(lambda: scene.requested == [[0]])
    verification = scene.partitions[0].verifications.join(header(0), True)
    scene.partitions[0].verifications.ended(7, 4)
    assert verification.void is not None and verification.void.code is ErrorCode.invalid_txn_state
    await scene.verifier.close()


async def test_producers_do_not_wait_for_each_other() -> None:
    scene = Scene()
    scene.coordinator.hold()
    scene.verify(0, header(producer_id=7))
    await until(lambda: len(scene.requested) == 1)
    scene.verify(0, header(producer_id=8))
    await until(lambda: len(scene.requested) == 2)
    await scene.verifier.close()


@pytest.mark.parametrize("failure", [KafkaError(ErrorCode.not_coordinator), ValueError("bug")])
async def test_a_request_that_fails_gives_each_partition_an_error(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    scene = Scene()

    async def fail(*_: object) -> Any:
        raise failure

    monkeypatch.setattr(scene.coordinator, "verify", fail)
    scene.verify(0, header())
    scene.verify(1, header())
    await until(lambda: len(scene.outcomes) == 2)
    code = failure.code if isinstance(failure, KafkaError) else ErrorCode.unknown_server_error
    assert scene.outcomes == [(0, 0, code), (1, 0, code)]


async def test_a_silent_coordinator_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_module, "VERIFY_TIMEOUT_S", 0.01)
    scene = Scene()
    scene.coordinator.hold()
    scene.verify(0, header())
    await until(lambda: scene.outcomes == [(0, 0, ErrorCode.network_exception)])


async def test_a_batch_that_arrives_while_others_resume_gets_the_same_answer() -> None:
    """The response to a batch may run the next request of its connection at once."""
    scene = Scene()
    scene.coordinator.answer = ErrorCode.not_coordinator
    outcomes: list[int] = []

    def resume(verification: Verification, code: ErrorCode) -> None:
        outcomes.append(0)
        scene.verify(0, header(1))

    scene.verifier.verify(cast(Any, scene.partitions[0]), header(0), VERSION_1, resume)
    await until(lambda: scene.outcomes)
    assert (outcomes, scene.outcomes) == ([0], [(0, 1, ErrorCode.not_coordinator)])
    assert scene.requested == [[0]]
    assert not scene.partitions[0].verifications
