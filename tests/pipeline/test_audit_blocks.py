"""One block of an audit: all possible errors, planted, and named with their offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from chronik.pipeline.audit.blocks import (
    ABORTED,
    ACKED,
    BY_POSITION,
    CONTROL,
    DELIVERED,
    EXACT_TIME,
    LANDED,
    NO_CHECKSUM,
    NO_TIME,
    READABLE,
    SIDES,
    Block,
    Bounds,
    Finding,
    Rows,
)
from chronik.pipeline.audit.result import AuditResult, summarise
from chronik.pipeline.report.audit import sentence

SIZE = 64
TIME_MS = 1_700_000_000_000
ALL = (ACKED, READABLE, DELIVERED, LANDED)


class Sides:
    """Hand-written rows of all sides."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    def records(self, side: int, offsets: Sequence[int], checksums: dict[int, int] | None = None) -> Sides:
        """Add one row for each offset, in the given order; the checksum of record n is 1000 + n."""
        for seq, offset in enumerate(offsets):
            checksum = (checksums or {}).get(offset, 1000 + offset)
            self.rows.append((side, offset, offset + 1, seq, TIME_MS + offset * 1000, checksum, 0))
        return self

    def batch(self, side: int, start: int, stop: int, flags: int = 0) -> Sides:
        self.rows.append((side, start, stop, 0, TIME_MS + start * 1000, NO_CHECKSUM, flags))
        return self

    def columns(self) -> Rows:
        made = np.array([(*row, NO_CHECKSUM)[:8] for row in self.rows], np.int64).reshape(-1, 8)
        return Rows(*(made[:, column] for column in range(8)))


def look(sides: Sides, bounds: Bounds, given: Sequence[int], *, is_compacted: bool = False) -> AuditResult:
    """Reconcile by offsets and, in a nearly empty block, by the edges of rows: the results must be equal."""
    found = list(Block(0, 0, SIZE, sides.columns(), bounds, given, is_compacted=is_compacted).findings())
    by_edges = list(Block(0, 0, SIZE * 64, sides.columns(), bounds, given, is_compacted=is_compacted).findings())
    result = summarise("t", {0: bounds}, given, found)
    assert summarise("t", {0: bounds}, given, by_edges).to_json() == result.to_json()
    return result


def ranges(found: Sequence[Any]) -> list[tuple[str, int, int]]:
    return [(SIDES[each.side], each.first, each.last) for each in found]


def clean(count: int = 20) -> Sides:
    """Return sides that all have all records."""
    sides = Sides().batch(READABLE, 0, count)
    for side in (ACKED, DELIVERED, LANDED):
        sides.records(side, range(count))
    return sides


def test_sides_that_agree_are_complete() -> None:
    result = look(clean(), Bounds(0, 0, 20), ALL)
    told = result.to_json()
    assert told["verdict"] == "complete"
    assert (told["acked"], told["readable"], told["delivered"], told["landed"]) == (20, 20, 20, 20)
    assert [told[name] for name in ("gaps", "duplicates", "out_of_order", "mismatches", "expired", "unexpected")] == [
        0
    ] * 6
    assert told["verified"] == 20
    assert (told["partitions"][0]["first_offset"], told["partitions"][0]["last_offset"]) == (0, 19)


def test_sides_that_are_not_given_are_null() -> None:
    told = look(Sides().batch(READABLE, 0, 5), Bounds(0, 0, 5), [READABLE]).to_json()
    assert (told["acked"], told["readable"], told["delivered"], told["landed"]) == (None, 5, None, None)
    assert told["verdict"] == "complete"


def test_all_planted_errors_are_reported() -> None:
    sides = Sides().batch(READABLE, 0, 30).records(ACKED, range(30))
    order = [*range(10), 11, 10, *range(12, 30)]
    sides.records(DELIVERED, order)
    landed = [offset for offset in range(30) if offset not in (3, 4, 17)]
    sides.records(LANDED, [*landed, 8, 21], {25: 7})
    result = look(sides, Bounds(0, 0, 30), ALL)
    found = result.partitions[0]
    assert result.verdict == "incomplete"
    assert ranges(found.gaps) == [("landed", 3, 4), ("landed", 17, 17)]
    assert ranges(found.duplicates) == [("landed", 8, 8), ("landed", 21, 21)]
    assert ranges(found.disordered) == [("delivered", 10, 11)]
    assert result.to_json()["partitions"][0]["mismatch_offsets"] == [
        {"side": "landed", "offset": 25, "found": 7, "expected": 1025, "field": "content"}
    ]
    assert (found.missing(), found.disorder, found.mismatches) == (3, 1, 1)


def test_swapped_contents_are_out_of_order_and_not_two_mismatches() -> None:
    sides = clean()
    sides.rows = [row for row in sides.rows if row[0] != LANDED]
    sides.records(LANDED, range(20), {5: 1006, 6: 1005})
    found = look(sides, Bounds(0, 0, 20), ALL).partitions[0]
    assert ranges(found.disordered) == [("landed", 5, 6)]
    assert (found.disorder, found.mismatches) == (1, 0)


def test_an_acknowledged_record_missing_from_the_log_is_a_gap_of_the_log() -> None:
    sides = Sides().batch(READABLE, 0, 8).batch(READABLE, 9, 12).records(ACKED, range(12))
    found = look(sides, Bounds(0, 0, 12), (ACKED, READABLE)).partitions[0]
    assert ranges(found.gaps) == [("readable", 8, 8)]


def test_missing_offsets_are_a_gap_without_a_ledger_but_a_control_batch_is_not() -> None:
    sides = Sides().batch(READABLE, 0, 8).batch(CONTROL, 8, 9).batch(READABLE, 9, 12).batch(READABLE, 14, 20)
    result = look(sides, Bounds(0, 0, 20), [READABLE])
    assert ranges(result.partitions[0].gaps) == [("readable", 12, 13)]
    assert result.total(READABLE) == 17


def test_overlapping_batches_are_duplicates_of_the_log() -> None:
    sides = Sides().batch(READABLE, 0, 8).batch(READABLE, 5, 10)
    found = look(sides, Bounds(0, 0, 10), [READABLE]).partitions[0]
    assert ranges(found.duplicates) == [("readable", 5, 7)]


def test_records_deleted_by_retention_are_expired_and_not_missing() -> None:
    sides = Sides().batch(READABLE, 6, 20).records(ACKED, range(20)).records(LANDED, range(20))
    result = look(sides, Bounds(0, 6, 20), (ACKED, READABLE, LANDED))
    told = result.to_json()
    assert told["verdict"] == "complete"
    assert (told["acked"], told["readable"], told["landed"], told["expired"]) == (20, 14, 20, 6)


def test_records_deleted_by_retention_during_the_audit_are_expired() -> None:
    bounds = Bounds(0, 0, 20)
    sides = Sides().batch(READABLE, 9, 20).records(ACKED, range(20)).records(LANDED, range(4, 20))
    given = (ACKED, READABLE, LANDED)
    found = list(Block(0, 0, SIZE, sides.columns(), bounds, given).findings())
    assert summarise("t", {0: bounds}, given, found).verdict == "incomplete"
    result = summarise("t", {0: bounds}, given, found, now={0: (9, 20)})
    assert (result.verdict, result.partitions[0].expired) == ("complete", 9)


def test_records_acknowledged_beyond_the_log_end_are_lost_unless_the_log_grew() -> None:
    bounds = Bounds(0, 0, 10)
    sides = Sides().batch(READABLE, 0, 10).records(ACKED, range(13))
    found = list(Block(0, 0, SIZE, sides.columns(), bounds, (ACKED, READABLE)).findings())
    lost = summarise("t", {0: bounds}, (ACKED, READABLE), found, now={0: (0, 10)})
    assert ranges(lost.partitions[0].gaps) == [("readable", 10, 12)]
    assert lost.total(ACKED) == 13
    grown = summarise("t", {0: bounds}, (ACKED, READABLE), found, now={0: (0, 13)})
    assert (grown.verdict, grown.total(ACKED)) == ("complete", 10)


def test_a_given_start_excludes_earlier_records() -> None:
    sides = Sides().batch(READABLE, 5, 20).records(ACKED, range(20)).records(LANDED, range(5, 20))
    told = look(sides, Bounds(5, 0, 20), (ACKED, READABLE, LANDED)).to_json()
    assert (told["verdict"], told["acked"], told["readable"], told["landed"]) == ("complete", 15, 15, 15)


def test_readable_records_below_a_committed_offset_are_delivered() -> None:
    sides = (
        Sides().batch(READABLE, 0, 4).batch(CONTROL, 4, 5).batch(READABLE, 5, 10).batch(DELIVERED, 0, 7, BY_POSITION)
    )
    result = look(sides, Bounds(0, 0, 10), (READABLE, DELIVERED))
    assert result.total(DELIVERED) == 6
    assert ranges(result.partitions[0].gaps) == [("delivered", 7, 9)]
    assert result.partitions[0].lag(DELIVERED) == 3


def test_a_delivered_record_that_is_not_in_the_log_is_unexpected() -> None:
    sides = Sides().batch(READABLE, 0, 4).batch(CONTROL, 4, 5).records(DELIVERED, range(5))
    found = look(sides, Bounds(0, 0, 5), (READABLE, DELIVERED)).partitions[0]
    assert ranges(found.unexpected) == [("delivered", 4, 4)]


def test_a_compacted_log_needs_only_the_latest_record_of_each_key() -> None:
    sides = Sides().records(READABLE, [3, 9]).records(ACKED, [9, 11]).records(LANDED, [0, 1, 2, 3, 9])
    result = look(sides, Bounds(0, 0, 12), (ACKED, READABLE, LANDED), is_compacted=True)
    assert ranges(result.partitions[0].gaps) == [("readable", 11, 11)]
    assert result.total(LANDED) == 2
    without = Sides().records(READABLE, [3, 9]).records(LANDED, [0, 9])
    found = look(without, Bounds(0, 0, 12), (READABLE, LANDED), is_compacted=True).partitions[0]
    assert ranges(found.gaps) == [("landed", 3, 3)]


def test_a_ledger_with_two_records_at_one_offset_is_a_duplicate_and_a_mismatch() -> None:
    sides = Sides().batch(READABLE, 0, 3).records(ACKED, [0, 1, 2]).records(ACKED, [1], {1: 5})
    found = look(sides, Bounds(0, 0, 3), (ACKED, READABLE)).partitions[0]
    assert ranges(found.duplicates) == [("acked", 1, 1)]
    assert [(item.offset, item.found, item.expected) for item in found.mismatched] == [(1, 5, 1001)]


def test_null_checksums_are_never_compared() -> None:
    sides = Sides().batch(READABLE, 0, 3).records(LANDED, range(3), dict.fromkeys(range(3), NO_CHECKSUM))
    told = look(sides, Bounds(0, 0, 3), (READABLE, LANDED)).to_json()
    assert (told["verdict"], told["verified"]) == ("complete", 0)


def test_time_buckets_count_the_records_of_each_side_and_the_gaps() -> None:
    sides = Sides().batch(READABLE, 0, 20).records(ACKED, range(20)).records(LANDED, range(15))
    told = look(sides, Bounds(0, 0, 20), (ACKED, READABLE, LANDED)).to_json()
    assert sum(row["acked"] for row in told["buckets"]) == 20
    assert sum(row["landed"] for row in told["buckets"]) == 15
    assert sum(row["gaps"] for row in told["buckets"]) == 5
    assert all(row["delivered"] is None for row in told["buckets"])
    assert min(row["start_ms"] for row in told["buckets"] if row["gaps"]) >= TIME_MS + 14_000


@pytest.mark.parametrize("edge", [10, 16])
def test_gaps_and_order_are_checked_across_two_blocks(edge: int) -> None:
    bounds, found = Bounds(0, 0, 40), list[Finding]()
    given = (READABLE, DELIVERED, LANDED)
    delivered = [*range(edge - 1), edge, edge - 1, *range(edge + 1, 40)]
    landed = [offset for offset in range(40) if not edge - 3 <= offset < edge + 3]
    whole = (
        Sides().batch(READABLE, 0, edge).batch(READABLE, edge, 40).records(DELIVERED, delivered).records(LANDED, landed)
    )
    columns = whole.columns()
    for base, stop in ((0, edge), (edge, 40)):
        chosen = (columns.start >= base) & (columns.start < stop)
        part = Rows(*(column[chosen] for column in columns))
        found += Block(0, base, stop - base, part, bounds, given).findings()
    result = summarise("t", {0: bounds}, given, found).partitions[0]
    assert ranges(result.gaps) == [("landed", edge - 3, edge + 2)]
    assert ranges(result.disordered) == [("delivered", edge - 1, edge)]
    assert result.disorder == 1


def test_records_without_a_timestamp_are_counted() -> None:
    sides = Sides().batch(READABLE, 0, 3)
    sides.rows = [(*row[:4], NO_TIME, *row[5:]) for row in sides.rows]
    told = look(sides, Bounds(0, 0, 3), [READABLE]).to_json()
    assert (told["readable"], told["buckets"]) == (3, [])


def test_records_of_aborted_transactions_are_absent_from_every_side() -> None:
    """Offsets 5 to 7: two aborted records and their marker, which no read_committed consumer gets."""
    sides = Sides().batch(READABLE, 0, 5).batch(CONTROL, 5, 8).batch(READABLE, 8, 20).records(ABORTED, [5, 6])
    seen = [*range(5), *range(8, 20)]
    for side in (ACKED, DELIVERED, LANDED):
        sides.records(side, seen)
    assert look(sides, Bounds(0, 0, 20), ALL).verdict == "complete"
    landed = look(sides.records(LANDED, [6]), Bounds(0, 0, 20), ALL)
    assert ranges(landed.partitions[0].unexpected) == [("landed", 6, 6)]
    delivered = look(sides.records(DELIVERED, [5]), Bounds(0, 0, 20), (READABLE, DELIVERED))
    assert ranges(delivered.partitions[0].unexpected) == [("delivered", 5, 5)]


def test_a_readable_record_of_an_aborted_transaction_is_a_fault() -> None:
    result = look(clean().records(ABORTED, [3, 4]), Bounds(0, 0, 20), ALL)
    assert result.verdict == "incomplete"
    assert ranges(result.partitions[0].unexpected) == [("readable", 3, 4), ("delivered", 3, 4), ("landed", 3, 4)]
    compacted = look(clean().records(ABORTED, [3, 4]), Bounds(0, 0, 20), ALL, is_compacted=True)
    assert ranges(compacted.partitions[0].unexpected) == [("readable", 3, 4)]


def test_an_aborted_record_beyond_the_last_stable_offset_is_a_fault() -> None:
    sides = Sides().batch(READABLE, 0, 10).records(LANDED, range(12)).records(ABORTED, [11])
    block = Block(0, 0, SIZE, sides.columns(), Bounds(0, 0, 10), (READABLE, LANDED))
    result = summarise("t", {0: Bounds(0, 0, 10)}, (READABLE, LANDED), block.findings(), now={0: (0, 12)})
    assert ranges(result.partitions[0].unexpected) == [("landed", 11, 11)]


def timed(sides: Sides, side: int, times_ms: Sequence[int]) -> Sides:
    sides.rows += [
        (side, offset, offset + 1, offset, time_ms, 1000 + offset, EXACT_TIME)
        for offset, time_ms in enumerate(times_ms)
    ]
    return sides


def test_an_altered_timestamp_is_a_mismatch() -> None:
    sides = timed(timed(Sides(), READABLE, [5, 6, 7, NO_TIME]), LANDED, [5, 9, NO_TIME, NO_TIME])
    result = look(sides, Bounds(0, 0, 4), [READABLE, LANDED])
    found = [(item.offset, item.field, item.found, item.expected) for item in result.partitions[0].mismatched]
    assert found == [(1, "timestamp", 9, 6), (2, "timestamp", NO_TIME, 7)]
    assert (result.verdict, result.to_json()["mismatches"], result.timed) == ("incomplete", 2, 4)


def test_times_of_batches_are_not_compared_with_times_of_records() -> None:
    sides = timed(timed(Sides().batch(READABLE, 0, 3), ACKED, [5, 6, 7]), LANDED, [5, 6, 7])
    result = look(sides, Bounds(0, 0, 3), [ACKED, READABLE, LANDED])
    assert (result.verdict, result.timed, result.verified) == ("complete", 3, 3)


def test_a_ledger_without_headers_is_compared_by_key_and_value() -> None:
    """Record 0 has headers that the ledger does not cover. Those of record 1 differ between log and table."""
    sides = Sides().records(ACKED, range(3))
    bare, full = 1000, 77
    sides.rows += [(READABLE, n, n + 1, n, TIME_MS, full + n if n < 2 else 1002, 0, bare + n) for n in range(3)]
    sides.rows += [(LANDED, n, n + 1, n, TIME_MS, (full, 5, 1002)[n], 0, bare + n) for n in range(3)]
    result = look(sides, Bounds(0, 0, 3), [ACKED, READABLE, LANDED])
    assert [(item.side, item.offset, item.found, item.expected) for item in result.partitions[0].mismatched] == [
        (LANDED, 1, 5, full + 1)
    ]
    assert result.headless == 2


def test_the_verdict_says_what_was_compared() -> None:
    log_only = look(Sides().batch(READABLE, 0, 3).records(ACKED, range(3)), Bounds(0, 0, 3), [ACKED, READABLE])
    assert sentence(log_only).endswith(
        "contents were not compared, timestamps were not compared, --log records compares those of the log"
    )
    both = look(timed(timed(Sides(), READABLE, [5, 6]), LANDED, [5, 6]), Bounds(0, 0, 2), [READABLE, LANDED])
    both.derived = ["id", "name"]
    assert sentence(both).endswith(
        "contents of 2 records compared, timestamps of 2 records compared, columns that were not compared: id, name"
    )
