"""Batches that an idempotent producer sent after a refused batch do not overtake it."""

import pytest
from tests.storage.helpers import NOW_MS
from tests.storage.test_producers import LAST_SEQUENCE, header, sent

from chronik.storage.producers import ProducerStates
from chronik.storage.refusals import KEPT_MS, PRODUCERS_MAX, RefusedBatches
from chronik.wire.batch import BatchHeader, Marker, encode_marker, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError

NOBODY = ProducerStates(1000)
FULL = ErrorCode.kafka_storage_error


def refusing(*sequences: int, epoch: int = 0) -> RefusedBatches:
    refused = RefusedBatches()
    for sequence in sequences:
        refused.note(header(sequence, epoch=epoch), FULL, NOBODY, NOW_MS)
    return refused


def is_refused(
    refused: RefusedBatches, batch: BatchHeader, *, now_ms: int = NOW_MS, states: ProducerStates = NOBODY
) -> bool:
    try:
        refused.check(batch, states, now_ms)
    except KafkaError as error:
        assert error.code is FULL
        return True
    return False


@pytest.mark.parametrize("order", [(0, 16, 20), (20, 0, 16)])
def test_only_the_first_refused_batch_is_accepted(order: tuple[int, ...]) -> None:
    refused = refusing(*order)
    assert is_refused(refused, header(34))
    assert is_refused(refused, header(16))
    assert not is_refused(refused, header(0))


def test_a_batch_before_the_refused_batch_is_accepted() -> None:
    assert not is_refused(refusing(16), header(0))


def test_batches_stay_in_order_when_sequences_wrap() -> None:
    refused = refusing(LAST_SEQUENCE)
    assert is_refused(refused, header(0))
    assert not is_refused(refused, header(LAST_SEQUENCE))


def test_a_refused_batch_that_was_retried_blocks_no_later_batch() -> None:
    refused = refusing(0)
    assert not is_refused(refused, header(0))
    assert not is_refused(refused, header(1))


def test_batches_of_a_known_producer_after_a_refused_batch_get_its_error_code() -> None:
    """Found by `make soak`, full-disk: on OUT_OF_ORDER, librdkafka starts an epoch and duplicates a batch elsewhere."""
    states = sent(0)
    refused = RefusedBatches()
    refused.note(header(1), FULL, states, NOW_MS)
    assert is_refused(refused, header(2), states=states)
    assert is_refused(refused, header(3), states=states)
    assert not is_refused(refused, header(1), states=states)


def test_a_refused_batch_is_forgotten_if_the_log_received_it_from_another_leader() -> None:
    refused = refusing(1)
    assert not is_refused(refused, header(3), states=sent(0, 1, 2))
    assert not refused
    refused = refusing(1)
    refused.note(header(3), FULL, sent(0, 1, 2), NOW_MS)
    assert is_refused(refused, header(4), states=sent(0, 1, 2))


def test_a_batch_that_is_already_in_the_log_is_not_recorded() -> None:
    refused = RefusedBatches()
    refused.note(header(0), FULL, sent(0, 1), NOW_MS)
    assert not refused


def test_other_producers_and_newer_epochs_are_not_blocked() -> None:
    refused = refusing(5)
    assert not is_refused(refused, header(7, producer_id=2))
    assert not is_refused(refused, header(0, epoch=1))
    refused.note(header(3, epoch=1), FULL, NOBODY, NOW_MS)
    refused.note(header(0), FULL, NOBODY, NOW_MS)
    assert is_refused(refused, header(4, epoch=1))


def test_a_refused_batch_is_forgotten_after_a_time_limit() -> None:
    refused = refusing(0)
    assert not is_refused(refused, header(1), now_ms=NOW_MS + KEPT_MS + 1)
    assert not refused
    refused = refusing(0)
    refused.note(header(0), FULL, NOBODY, NOW_MS + KEPT_MS)
    assert is_refused(refused, header(1), now_ms=NOW_MS + KEPT_MS + 1)


def test_the_number_of_tracked_producers_is_bounded() -> None:
    refused = RefusedBatches()
    for producer_id in range(PRODUCERS_MAX + 1):
        refused.note(header(0, producer_id=producer_id), FULL, NOBODY, NOW_MS)
    assert len(refused) == PRODUCERS_MAX
    assert not is_refused(refused, header(1, producer_id=0))
    assert is_refused(refused, header(1, producer_id=PRODUCERS_MAX))


def test_a_batch_without_a_producer_id_is_not_recorded() -> None:
    refused = RefusedBatches()
    refused.note(header(-1, producer_id=-1, epoch=-1), FULL, NOBODY, NOW_MS)
    assert not refused


def test_a_marker_that_begins_an_epoch_makes_refused_batches_of_the_old_one_obsolete() -> None:
    states = sent(0)
    refused = RefusedBatches()
    refused.note(header(1), FULL, states, NOW_MS)
    marker = read_batch_header(encode_marker(1, 1, False, 0, NOW_MS))
    states.end_transaction(marker, Marker(False, 0), 1, NOW_MS)
    refused.forget_received(states, NOW_MS)
    assert not refused
