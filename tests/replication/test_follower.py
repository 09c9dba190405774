"""A follower uses a response only if it continues its log, and truncates by leader epochs only."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from chronik.replication.follower import (
    PAUSE_MS_MAX,
    Append,
    Decision,
    EpochEnd,
    FetchAgain,
    FetchedBatch,
    LeaderAnswer,
    LocalLog,
    NoData,
    PartitionFollower,
    Refuse,
    StartOver,
    Truncate,
    diverging_epoch,
    truncation_offset,
)
from chronik.storage.epochs import LeaderEpochs

EPOCH = 5


def local_log(epochs: Sequence[tuple[int, int]], end: int, start: int = 0) -> LocalLog:
    known = LeaderEpochs(epochs)
    last = known.epoch_of(end - 1) if end > start else -1
    return LocalLog(start, end, last, lambda epoch: known.end_offset(epoch, end))


def answered(follower: PartitionFollower, own: LocalLog, *batches: FetchedBatch, **more: object) -> Decision:
    values: dict[str, object] = {"high_watermark": 0, "log_start_offset": 0, **more}
    return follower.decide(
        LeaderAnswer(own.log_end_offset, own.last_epoch, batches=batches, **values),  # type: ignore[arg-type]
        own,
    )


def follower_at(watermark: int = 0) -> PartitionFollower:
    return PartitionFollower(1, EPOCH, watermark)


def test_batches_that_continue_the_log_are_appended() -> None:
    own = local_log([(3, 0)], 10)
    assert answered(follower_at(), own, FetchedBatch(10, 15, 3), FetchedBatch(15, 16, 5)) == Append()


def test_a_follower_accepts_offset_gaps_from_a_compacted_leader() -> None:
    assert answered(follower_at(), local_log([(3, 0)], 10), FetchedBatch(14, 15, 3)) == Append()


@pytest.mark.parametrize(
    "batches",
    [
        [FetchedBatch(9, 11, 3)],
        [FetchedBatch(10, 15, 3), FetchedBatch(14, 16, 3)],
        [FetchedBatch(10, 15, 4), FetchedBatch(15, 16, 3)],
        [FetchedBatch(10, 15, EPOCH + 1)],
        [FetchedBatch(10, 15, 2)],
    ],
)
def test_a_follower_fetches_again_if_batches_do_not_continue_its_log(batches: list[FetchedBatch]) -> None:
    assert isinstance(answered(follower_at(), local_log([(3, 0)], 10), *batches), FetchAgain)


def test_a_follower_ignores_a_response_to_an_earlier_fetch() -> None:
    own = local_log([(3, 0), (4, 8)], 10)
    late = LeaderAnswer(10, 3, 50, 0, diverging_epoch=EpochEnd(3, 2))
    assert isinstance(follower_at().decide(late, own), FetchAgain)
    assert isinstance(follower_at().decide(replace(late, fetch_offset=8), own), FetchAgain)


def test_a_diverging_follower_truncates_to_the_offset_at_which_the_epochs_diverge() -> None:
    own = local_log([(1, 0), (3, 20)], 30)
    assert answered(follower_at(), own, diverging_epoch=EpochEnd(3, 25)) == Truncate(25, False)
    # The leader's log has no epoch 3: truncate all of it.
    assert answered(follower_at(), own, diverging_epoch=EpochEnd(2, 40)) == Truncate(20, False)
    assert answered(follower_at(), own, diverging_epoch=EpochEnd(1, 12)) == Truncate(12, False)


def test_a_follower_does_not_truncate_below_its_high_watermark() -> None:
    own = local_log([(1, 0), (3, 20)], 30)
    assert answered(follower_at(26), own, diverging_epoch=EpochEnd(3, 25)) == Refuse(25)
    assert answered(follower_at(25), own, diverging_epoch=EpochEnd(3, 25)) == Truncate(25, False)


def test_a_follower_truncates_below_its_high_watermark_after_an_unclean_election() -> None:
    own = local_log([(1, 0), (3, 20)], 30)
    follower = PartitionFollower(2, 6, 26, unclean_epoch=5)
    assert answered(follower, own, diverging_epoch=EpochEnd(3, 25)) == Truncate(25, True)
    follower = PartitionFollower(2, 6, 26, unclean_epoch=3)
    assert answered(follower, own, diverging_epoch=EpochEnd(3, 25)) == Refuse(25), "that loss was another one"


def test_a_log_that_ends_before_the_leaders_log_start_restarts_at_that_offset() -> None:
    own = local_log([(1, 0)], 30)
    decision = answered(follower_at(20), own, is_out_of_range=True, log_start_offset=50)
    assert decision == StartOver(50, 50)
    follower = follower_at(20)
    follower.started_over(StartOver(50, 50))
    assert follower.high_watermark == 50


def test_an_out_of_range_error_does_not_drop_a_log_within_the_leaders_range() -> None:
    own = local_log([(1, 0)], 30)
    assert isinstance(answered(follower_at(), own, is_out_of_range=True, log_start_offset=0), FetchAgain)


def test_an_empty_follower_accepts_a_batch_that_contains_the_leaders_log_start() -> None:
    own = local_log([], 50, start=50)
    decision = answered(follower_at(50), own, FetchedBatch(45, 55, 2), FetchedBatch(55, 60, 2), log_start_offset=50)
    assert decision == StartOver(45, 60)
    follower = follower_at(50)
    follower.started_over(StartOver(45, 60))
    assert follower.high_watermark == 50


def test_a_response_without_records_requires_no_action() -> None:
    assert answered(follower_at(), local_log([(1, 0)], 3)) == NoData()


def test_watermark_exceeds_neither_the_leaders_watermark_nor_the_durable_end() -> None:
    follower = follower_at(5)
    assert not follower.leader_watermark_received(20, 5)
    assert follower.acknowledge_durable(12)
    assert follower.high_watermark == 12
    assert follower.acknowledge_durable(30)
    assert follower.high_watermark == 20
    assert not follower.leader_watermark_received(15, 30)
    assert follower.high_watermark == 20


def test_a_leader_detects_divergence_by_epoch_or_by_end_offset() -> None:
    assert diverging_epoch(EpochEnd(3, 30), 3, 30) is None
    assert diverging_epoch(EpochEnd(3, 30), 3, 31) == EpochEnd(3, 30)
    assert diverging_epoch(EpochEnd(2, 30), 3, 20) == EpochEnd(2, 30)


def test_each_truncation_offset_is_below_the_fetch_offset() -> None:
    assert truncation_offset(EpochEnd(3, 25), EpochEnd(3, 30)) == 25
    assert truncation_offset(EpochEnd(2, 40), EpochEnd(1, 20)) == 20
    assert truncation_offset(EpochEnd(0, 7), EpochEnd(-1, -1)) == 7


# -- transactions that the leader's compaction may have decided --------------------------------------------------------


def undecided(own: LocalLog, first_offset: int | None, *, is_dispensable: bool = True) -> LocalLog:
    return replace(own, undecided_from=first_offset, is_dispensable=is_dispensable)


def test_a_follower_fetches_an_undecided_transaction_again_if_its_marker_may_be_missing() -> None:
    own = undecided(local_log([(3, 0)], 10), 4)
    expected = Truncate(4, below_watermark=False, fetches_again=True)
    assert answered(follower_at(8), own, FetchedBatch(12, 13, 3)) == expected
    assert answered(follower_at(8), own, FetchedBatch(10, 12, 3), FetchedBatch(13, 14, 3)) == expected
    # Without a gap, nothing is missing.
    assert answered(follower_at(8), own, FetchedBatch(10, 12, 3), FetchedBatch(12, 14, 3)) == Append()
    assert answered(follower_at(8), undecided(own, None), FetchedBatch(12, 13, 3)) == Append()


def test_a_replica_that_others_rely_on_truncates_nothing_because_of_a_gap() -> None:
    own = undecided(local_log([(3, 0)], 10), 4, is_dispensable=False)
    assert isinstance(answered(follower_at(8), own, FetchedBatch(12, 13, 3)), FetchAgain)


def test_a_transaction_that_was_fetched_again_is_not_fetched_a_third_time() -> None:
    follower = follower_at(8)
    own = undecided(local_log([(3, 0)], 10), 4)
    assert isinstance(answered(follower, own, FetchedBatch(12, 13, 3)), Truncate)
    follower.truncated(4)
    # A small response has the transaction's first batch only; its marker is after the gap.
    assert answered(follower, undecided(local_log([(3, 0)], 4), None), FetchedBatch(4, 5, 3)) == Append()
    again = undecided(local_log([(3, 0)], 5), 4)
    assert answered(follower, again, FetchedBatch(12, 13, 3), received_ms=PAUSE_MS_MAX) == Append()


def test_a_pause_puts_transactions_in_doubt_even_if_responses_arrive_that_cannot_be_appended() -> None:
    follower = follower_at(8)
    assert answered(follower, undecided(local_log([(3, 0)], 4), None), FetchedBatch(4, 10, 3)) == Append()
    own = undecided(local_log([(3, 0)], 10), 4)
    for received_ms in (0, PAUSE_MS_MAX):
        # The disk is full.
        assert answered(follower, own, FetchedBatch(10, 11, 3), received_ms=received_ms) == Append()
    decision = answered(follower, own, FetchedBatch(12, 13, 3), received_ms=PAUSE_MS_MAX + 1)
    assert decision == Truncate(4, below_watermark=False, fetches_again=True)
