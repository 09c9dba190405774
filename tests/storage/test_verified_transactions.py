"""Whether a verified transaction still allows a batch: groups append some time after the verification."""

from __future__ import annotations

import pytest

from chronik.storage.producers import ProducerStates
from chronik.wire.batch import encode_batch, encode_marker, read_batch_header, read_marker
from chronik.wire.errors import ErrorCode, KafkaError


@pytest.fixture
def producers() -> ProducerStates:
    return ProducerStates(86_400_000)


def append(producers: ProducerStates, offset: int, epoch: int = 0) -> None:
    batch = encode_batch([(b"k", b"v", [], 0)], producer_id=7, producer_epoch=epoch, is_transactional=True)
    producers.record(read_batch_header(batch), offset, 0)


def end(producers: ProducerStates, offset: int, epoch: int = 0) -> None:
    marker = encode_marker(7, epoch, True, 0, 0)
    producers.end_transaction(read_batch_header(marker), read_marker(marker), offset, 0)


def refusal(producers: ProducerStates, verified_from: int, epoch: int = 0) -> ErrorCode:
    try:
        producers.check_verified(7, epoch, verified_from)
    except KafkaError as error:
        return error.code
    return ErrorCode.none


def test_transaction_is_open_from_its_first_batch_to_its_marker(producers: ProducerStates) -> None:
    assert not producers.has_transaction(7, 0)
    append(producers, 5)
    assert producers.has_transaction(7, 0)
    assert not producers.has_transaction(7, 1)
    end(producers, 6)
    assert not producers.has_transaction(7, 0)


def test_marker_since_the_verification_refuses_a_batch(producers: ProducerStates) -> None:
    assert refusal(producers, 0) is ErrorCode.none
    append(producers, 5)
    end(producers, 6)
    assert refusal(producers, 6) is ErrorCode.invalid_txn_state
    assert refusal(producers, 7) is ErrorCode.none


def test_marker_of_another_producer_refuses_nothing(producers: ProducerStates) -> None:
    marker = encode_marker(8, 0, True, 0, 0)
    producers.end_transaction(read_batch_header(marker), read_marker(marker), 6, 0)
    assert refusal(producers, 0) is ErrorCode.none


def test_batch_of_an_earlier_epoch_is_fenced(producers: ProducerStates) -> None:
    end(producers, 6, epoch=2)
    assert refusal(producers, 7, epoch=1) is ErrorCode.invalid_producer_epoch
    assert refusal(producers, 7, epoch=2) is ErrorCode.none
