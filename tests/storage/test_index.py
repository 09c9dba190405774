"""The sparse indexes, compared with a list."""

from hypothesis import given
from hypothesis import strategies as st
from tests.storage.faulty_disk import FaultyDisk

from chronik.storage.index import DROPPED_ENTRIES_AT, OFFSET_ENTRY, SparseIndex


@given(
    steps=st.lists(st.integers(1, 50), max_size=300),
    asked=st.integers(-1, 20_000),
    column=st.integers(0, 1),
    written=st.booleans(),
)
def test_floor_returns_the_last_entry_at_or_below_the_value(
    steps: list[int], asked: int, column: int, written: bool
) -> None:
    index = SparseIndex(FaultyDisk(), "/index", OFFSET_ENTRY)
    entries: list[tuple[int, int]] = []
    value = 0
    for step in steps:
        value += step
        entries.append((value, 2 * value))
        index.append(*entries[-1])
    if written:
        index.write()
    expected = [entry for entry in entries if entry[column] <= asked]
    assert index.view().floor(column, asked) == (expected[-1] if expected else None)
    assert index.view().last() == (entries[-1] if entries else None)
    assert index.count_upto(column, asked) == len(expected)
    index.cut(len(expected))
    assert index.view().last() == (expected[-1] if expected else None)


def test_a_view_does_not_change_when_entries_are_appended() -> None:
    index = SparseIndex(FaultyDisk(), "/index", OFFSET_ENTRY)
    index.append(1, 10)
    view = index.view()
    index.append(2, 20)
    index.write()
    assert view.floor(0, 100) == (1, 10)


def test_an_index_on_a_full_disk_keeps_a_bounded_number_of_unwritten_entries() -> None:
    disk = FaultyDisk()
    disk.capacity_bytes = 0
    index = SparseIndex(disk, "/index", OFFSET_ENTRY)
    for value in range(3 * DROPPED_ENTRIES_AT):
        index.append(value, value)
        assert index.unwritten_count <= DROPPED_ENTRIES_AT
    assert index.view().last() == (3 * DROPPED_ENTRIES_AT - 1, 3 * DROPPED_ENTRIES_AT - 1)
    disk.capacity_bytes = 1 << 30
    assert index.try_write()
    assert index.unwritten_count == 0
