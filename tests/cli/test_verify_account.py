"""The account of every record: planted errors are found, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from chronik.cli.verify_account import FAIL, PARTIAL, PASS, Account

PARTITIONS = 3


def account_of(
    messages: int, delivered: Iterable[int], *, acked: Iterable[int] | None = None, partitions: int = PARTITIONS
) -> Account:
    """Return an account of records delivered in this order, each at the next offset of its partition."""
    account = Account(messages, partitions)
    acknowledged = set(range(messages) if acked is None else acked)
    for number in range(messages):
        account.sent()
        if number in acknowledged:
            account.acknowledged(number)
        else:
            account.refused("timed out")
    offsets = [0] * partitions
    for number in delivered:
        partition = number % partitions
        account.delivered(partition, offsets[partition], number)
        offsets[partition] += 1
    return account


def test_records_read_once_and_in_order_pass() -> None:
    account = account_of(5000, range(5000))
    assert (account.produced, account.acked, account.consumed, account.missing) == (5000, 5000, 5000, 0)
    assert (account.duplicates, account.out_of_order, account.unexpected) == (0, 0, 0)
    assert account.success_rate == 100.0
    assert account.verdict == PASS
    assert account.complaint() is None
    assert account.imbalance == 1


def test_an_acknowledged_record_that_was_not_read_is_missing() -> None:
    account = account_of(100, [number for number in range(100) if number != 42])
    assert account.missing == 1
    assert account.incomplete() == {42 % PARTITIONS}
    assert account.verdict == PARTIAL
    assert account.complaint() == "of 100 records: 1 missing"


def test_a_record_read_before_its_acknowledgement_is_not_missing() -> None:
    account = Account(1, 1)
    account.sent()
    account.delivered(0, 0, 0)
    account.acknowledged(0)
    assert account.missing == 0
    assert account.verdict == PASS


def test_a_second_copy_is_only_a_duplicate() -> None:
    account = account_of(9, [0, 1, 2, 3, 4, 5, 0, 6, 7, 8])
    assert (account.duplicates, account.out_of_order, account.missing) == (1, 0, 0)
    assert account.consumed == 10
    assert account.verdict == PARTIAL


def test_one_offset_delivered_twice_is_a_duplicate() -> None:
    account = account_of(3, [0, 1, 2])
    account.delivered(0, 0, 0)
    assert account.duplicates == 1


def test_a_record_read_after_a_later_record_of_its_partition_is_out_of_order() -> None:
    account = account_of(9, [0, 1, 2, 6, 3, 4, 5, 7, 8])
    assert (account.out_of_order, account.duplicates, account.missing) == (1, 0, 0)
    assert account.verdict == PARTIAL


def test_order_across_partitions_does_not_matter() -> None:
    assert account_of(9, [2, 5, 8, 1, 4, 7, 0, 3, 6]).verdict == PASS


def test_a_new_record_at_an_offset_that_does_not_increase_is_out_of_order() -> None:
    account = Account(2, 1)
    account.delivered(0, 7, 0)
    account.delivered(0, 7, 1)
    assert account.out_of_order == 1


def test_a_record_never_produced_or_in_another_partition_is_unexpected() -> None:
    account = account_of(3, [0, 1, 2])
    account.delivered(0, 1, None)
    account.delivered(0, 2, 3)
    account.delivered(0, 3, 1)
    assert account.unexpected == 3
    assert account.verdict != PASS
    assert account.next_offset(0) == 4


def test_a_rejected_record_is_not_missing_and_may_be_read() -> None:
    unread = account_of(10, range(9), acked=range(9))
    read = account_of(10, range(10), acked=range(9))
    for account in (unread, read):
        assert (account.missing, account.failed, account.duplicates) == (0, 1, 0)
        assert account.verdict == PARTIAL
    assert account_of(10, range(9), acked=range(9)).complaint() == (
        "of 10 records: 1 not acknowledged (the first error: timed out)"
    )


def test_records_without_a_delivery_report_are_failed() -> None:
    account = Account(3, 1)
    for _ in range(3):
        account.sent()
    account.acknowledged(0)
    account.give_up_waiting()
    assert (account.acked, account.failed) == (1, 2)


def test_the_figures_of_the_earlier_system_fail_and_better_ones_are_partial() -> None:
    assert account_of(5000, range(4391)).verdict == FAIL
    assert account_of(5000, range(3814)).verdict == FAIL
    assert account_of(5000, range(4410)).verdict == PARTIAL
    assert account_of(5000, range(4410)).success_rate == 88.2


def test_success_rate_is_100_only_if_no_record_is_missing() -> None:
    assert account_of(1_000_000, range(1, 1_000_000)).success_rate == 99.999


def test_gaps_deviation_and_offsets_are_reported_by_partition() -> None:
    account = Account(30, PARTITIONS)
    for number in (0, 3, 6, 9):
        account.delivered(0, number // 3 + (10 if number > 3 else 0), number)
    for number in (1, 4):
        account.delivered(1, number // 3, number)
    first, second, third = account.partition_figures({0: 2, 1: 3})
    assert (first["messages"], first["first_offset"], first["last_offset"], first["gaps"]) == (4, 0, 13, 10)
    assert (first["leader"], second["leader"], third["leader"]) == (2, 3, None)
    assert (second["messages"], second["deviation"], second["deviation_percent"]) == (2, -8, -80.0)
    assert (third["messages"], third["first_offset"], third["gaps"]) == (0, None, 0)
    assert account.imbalance == 4


def test_missing_and_duplicate_records_are_reported_by_partition() -> None:
    account = Account(6, 2)
    for number in range(5):
        account.acknowledged(number)
    for offset, number in enumerate((0, 2, 2)):
        account.delivered(0, offset, number)
    account.delivered(1, 0, 1)
    first, second = account.partition_figures({})
    assert (first["acked"], first["messages"], first["missing"], first["duplicates"]) == (3, 3, 1, 1)
    assert (second["acked"], second["messages"], second["missing"], second["duplicates"]) == (2, 1, 1, 0)


@given(
    messages=st.integers(10, 200),
    partitions=st.integers(1, 5),
    lost=st.sets(st.integers(0, 199), max_size=20),
    copied=st.sets(st.integers(0, 199), max_size=20),
)
def test_planted_losses_and_duplicates_are_counted_exactly(
    messages: int, partitions: int, lost: set[int], copied: set[int]
) -> None:
    lost = {number for number in lost if number < messages}
    copied = {number for number in copied if number < messages} - lost
    delivered = [number for number in range(messages) if number not in lost]
    account = account_of(messages, [*delivered, *sorted(copied)], partitions=partitions)
    assert account.missing == len(lost)
    assert account.duplicates == len(copied)
    assert account.out_of_order == 0
    assert account.consumed == messages - len(lost) + len(copied)
    assert (account.verdict == PASS) == (not lost and not copied)
    assert account.incomplete() == {number % partitions for number in lost}


@given(order=st.permutations(range(12)), partitions=st.integers(1, 4))
def test_out_of_order_records_are_counted_exactly_by_partition(order: list[int], partitions: int) -> None:
    account = account_of(12, order, partitions=partitions)
    expected = 0
    for partition in range(partitions):
        own = [number for number in order if number % partitions == partition]
        expected += sum(number < max(own[: at + 1]) for at, number in enumerate(own))
    assert account.out_of_order == expected
    assert account.missing == 0
