"""Several landings into one table, each with its own checkpoint: every offset lands once, in any interleaving.

The tables are real. The interleavings are chosen: before a landing commits to a table, other landings land batches of
their own and tables are compacted, at each of the points where another process could have done so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StructField, StructType
from tests.support.landing import landed, records, writer

from chronik.pipeline.land.delta import BatchLander, LandedBatch, LandingTable
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.schema import dead_letter_schema, table_schema
from chronik.pipeline.land.task import NewFile

NUMBER = StructType([StructField("n", LongType(), nullable=False)])
PARTITIONS = 2
LOG_END = 12
DEPTH_MAX = 2
"""How many landings can be inside one another. Each has its own snapshot."""


class HookedTable(LandingTable):
    """Runs `hook` before each commit: after the files were written, and between the two tables' commits."""

    hook: Callable[[], None] = staticmethod(lambda: None)

    def commit(self, query: str, batch: int, files: Sequence[NewFile]) -> None:
        self.hook()
        super().commit(query, batch, files)


class Landing:
    """A query with its own checkpoint, which reads the topic in batches of its own size."""

    def __init__(self, folder: Path, name: str, shift: int, step: int, starts: Sequence[int]) -> None:
        self._folder, self._name, self._shift, self._step = folder, name, shift, step
        self._rows = HookedTable.open(str(folder / "t"), table_schema(NUMBER), "t", "id-1")
        dead_letters = HookedTable.open(str(folder / "t_dead_letters"), dead_letter_schema(), "t", "id-1")
        assert isinstance(self._rows, HookedTable) and isinstance(dead_letters, HookedTable)
        self.tables = self._rows, dead_letters
        self._lander = BatchLander(*self.tables)
        self._next = list(starts)
        self._batch = 0
        self.is_busy = False

    @property
    def is_done(self) -> bool:
        return min(self._next) >= LOG_END

    @property
    def _read_now(self) -> tuple[int, ...]:
        """Return the partitions of the next batch: two landings conflict only if both have rows of one partition."""
        unread = [partition for partition, start in enumerate(self._next) if start < LOG_END]
        return (unread[(self._batch + self._shift) % len(unread)],)

    def land(self, hook: Callable[[], None]) -> LandedBatch:
        """Land the next batch, with `hook` before each of its commits."""
        for table in self.tables:
            table.hook = hook
        self.is_busy = True
        ends = [
            min(LOG_END, start + (self._step if partition in self._read_now else 0))
            for partition, start in enumerate(self._next)
        ]
        batches = [
            batch_of(partition, range(*span)) for partition, span in enumerate(zip(self._next, ends, strict=True))
        ]
        done = self._lander.land(self._name, self._batch, writer(self._folder, *batches, fields=NUMBER))
        self._next, self._batch, self.is_busy = ends, self._batch + 1, False
        return done


def batch_of(partition: int, offsets: range) -> object:
    """Return records of which every third is a dead letter."""
    return records(partition, offsets, [b'{"n": 1}' if offset % 3 else b"x" for offset in offsets])


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Return the batch sizes and starts of landings, and the choices at each point where another process can act."""
    count = draw(st.integers(2, 3))
    starts = st.lists(st.sampled_from([0, 0, 5]), min_size=PARTITIONS, max_size=PARTITIONS)
    landings = [(draw(st.sampled_from([3, 5, 12])), draw(starts)) for _ in range(count)]
    return [(landings[0][0], [0] * PARTITIONS), *landings[1:]], draw(
        st.lists(st.integers(0, count), min_size=30, max_size=30)
    )


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules())
def test_every_offset_lands_once_in_any_interleaving_of_landings(
    schedule: tuple[list[tuple[int, list[int]]], list[int]],
) -> None:
    sizes, choices = schedule
    with TemporaryDirectory() as name:
        run_schedule(Path(name), sizes, iter(choices))


def run_schedule(folder: Path, sizes: list[tuple[int, list[int]]], choices: Iterator[int]) -> None:
    landings = [Landing(folder, f"query-{number}", number, *size) for number, size in enumerate(sizes)]
    depth = 0

    def others_act() -> None:
        nonlocal depth
        choice = next(choices, len(landings))
        if choice >= len(landings) or depth == DEPTH_MAX:
            return
        other = landings[choice]
        if not other.is_busy and not other.is_done:
            depth += 1
            other.land(others_act)
            depth -= 1

    while any(not landing.is_done for landing in landings):
        number = next(choices, 0) % len(landings)
        ready = [landing for landing in landings[number:] + landings[:number] if not landing.is_done]
        ready[0].land(others_act)
    rows, dead = landed(folder / "t"), landed(folder / "t_dead_letters")
    assert sorted(rows + dead) == [(part, offset) for part in range(PARTITIONS) for offset in range(LOG_END)]
    assert all(offset % 3 == 0 for _, offset in dead)


def test_a_commit_of_another_landing_during_ours_is_noticed_by_the_next_batch(tmp_path: Path) -> None:
    """The other landing commits to another partition, so nothing conflicts, and our next batch reads that partition."""
    rows = HookedTable.open(str(tmp_path / "t"), table_schema(None), "t", "id-1")
    assert isinstance(rows, HookedTable)
    BatchLander(rows).land("first", 0, writer(tmp_path, records(0, range(5))))
    other = BatchLander(LandingTable.open(str(tmp_path / "t"), table_schema(None), "t", "id-1"))
    ours = BatchLander(rows)

    def land_other() -> None:
        rows.hook = lambda: None
        other.land("other", 0, writer(tmp_path, records(1, range(10))))

    rows.hook = land_other
    assert ours.land("ours", 0, writer(tmp_path, records(0, range(8)))) == LandedBatch(3, 0)
    assert ours.land("ours", 1, writer(tmp_path, records(1, range(20)))) == LandedBatch(10, 0)
    assert landed(tmp_path / "t") == [(0, offset) for offset in range(8)] + [(1, offset) for offset in range(20)]


def test_only_the_files_that_may_overlap_are_read_for_landed_offsets(tmp_path: Path) -> None:
    """A table of months must not be read as a whole because two landings run side by side."""
    table = LandingTable.open(str(tmp_path / "t"), table_schema(None), "t", "id-1")
    for batch in range(4):
        table.commit("q", batch, writer(tmp_path, records(0, range(batch * 10, batch * 10 + 10)))(LandedOffsets()))
        if batch == 0:
            first = DeltaTable(str(tmp_path / "t")).file_uris()
    Path(first[0]).unlink()
    assert table.landed_offsets({0: 30}).ranges(0) == [(30, 40)]
